"""SGLang's calls -> our operators: one module per operator, each with `replace_*(original) -> function`."""
