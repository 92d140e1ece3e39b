"""update_weights_from_tensor past load_weights: SGLang copies each tensor into the parameter of its name, and the
parameter's own loader is not asked. With load_format="direct" SGLang does, with the name of a --custom-weight-loader
the user's own function may.

Where that parameter of ours is another than SGLang's, what is right for SGLang's would be stored in it as something
else: refused, before anything of the call is written. A function of the user's is looked up by its name, and what it
is given is looked at first; tensors by the checkpoint's names, for load_weights, are no parameter's.

A refusal ends the server, as SGLang's own KeyError and AssertionError do there: nothing catches them.
"""

import functools
from collections.abc import Callable

import torch

from deepseek_v4_sm120.sglang_patches.adapters.waiting import way_out

Expected = Callable[[torch.nn.Module, str, torch.Tensor], str | None]


def refusing(original: Callable, operator: str, expected: Expected, load_format: str = "direct") -> Callable:
    """For _model_load_weights_direct(model, named_tensors), and for a function of the user's with its call.

    expected: of (a module, its parameter's name, the tensor that comes): what should come instead; None: it is right.
    """

    @functools.wraps(original)
    def load(model, named_tensors):
        modules = dict(model.named_modules())
        for name, tensor in named_tensors:
            owner, _, of_owner = name.rpartition(".")
            instead = expected(modules[owner], of_owner, tensor) if owner in modules else None
            if instead is not None:
                given = f"with load_format={load_format!r} update_weights_from_tensor's {name} must be {instead}"
                came = f"got {tensor.dtype} {list(tensor.shape)}; nothing was written"
                advice = "leave out load_format and give the checkpoint's tensors, or, for SGLang's own layout"
                raise ValueError(way_out(operator, f"{given}, {came}. Instead {advice}"))
        return original(model, named_tensors)

    return load


def refusing_custom(original: Callable, operator: str, expected: Expected) -> Callable:
    """For dynamic_import(func_path), which finds a --custom-weight-loader."""
    return finding(original, lambda found, func_path: refusing(found, operator, expected, func_path))


def finding(original: Callable, replace: Callable[[Callable, str], Callable]) -> Callable:
    """For dynamic_import(func_path): `replace`, of the --custom-weight-loader that it finds and that one's name."""

    @functools.wraps(original)
    def dynamic_import(func_path):
        return replace(original(func_path), func_path)

    return dynamic_import
