"""Public operators: they validate, allocate, and launch. One module per operator."""
