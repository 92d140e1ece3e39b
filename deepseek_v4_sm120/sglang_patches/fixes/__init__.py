"""SGLang's own faults that users of this model meet, mended: one module per fault, `replace_*(original) -> function`
as in adapters/, without an operator. Each says in its docstring what goes wrong, in which releases, and who found it.
"""
