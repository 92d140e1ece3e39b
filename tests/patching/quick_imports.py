"""What an import of SGLang's modules does for kernels and operators that nobody compiles or traces here, done quickly.
Imported in front of them, in a process of their own."""

import inspect
import linecache
import types

import torch
import triton.runtime.jit


def _lines(function):
    """inspect.getsourcelines, without tokenizing a kernel's text to see where it ends: to the last line that has code.
    Triton asks it of every kernel at its decoration, and here none is compiled."""
    first = function.__code__.co_firstlineno
    last = max(line or first for *_, line in function.__code__.co_lines())
    return linecache.getlines(inspect.getsourcefile(function))[first - 1 : last], first


triton.runtime.jit.inspect = types.SimpleNamespace(**{**vars(inspect), "getsourcelines": _lines})  # a seventh of it
torch._library.utils.get_source = lambda level: "its place"  # of operators, for messages: a tenth of an import
# whether an operator's module has said that it needs another one, by the paths of all modules: a twentieth
torch.library.inspect = types.SimpleNamespace(**{**vars(inspect), "getmodule": lambda frame: None})
