"""update_weights_from_tensor(load_format="direct"): SGLang copies each tensor into the parameter of its name, past
load_weights and the parameter's own loader. Where that parameter of ours is another than SGLang's, what is right for
SGLang's would be stored in it as something else: refused, before anything of the call is written.

A refusal ends the server, as SGLang's own KeyError and AssertionError do there: nothing catches them.
"""

import functools
from collections.abc import Callable

import torch

from deepseek_v4_sm120.sglang_patches.adapters.waiting import way_out


def refusing(original: Callable, operator: str, expected: Callable[[torch.nn.Module, str, torch.Tensor], str | None]):
    """For _model_load_weights_direct(model, named_tensors).

    expected: of (a module, its parameter's name, the tensor that comes): what should come instead; None: it is right.
    """

    @functools.wraps(original)
    def _model_load_weights_direct(model, named_tensors):
        modules = dict(model.named_modules())
        for name, tensor in named_tensors:
            owner, _, of_owner = name.rpartition(".")
            instead = expected(modules[owner], of_owner, tensor) if owner in modules else None
            if instead is not None:
                given = f"with load_format='direct' update_weights_from_tensor's {name} must be {instead}"
                came = f"got {tensor.dtype} {list(tensor.shape)}; nothing was written"
                advice = "leave out load_format and give the checkpoint's tensors, or, for SGLang's own layout"
                raise ValueError(way_out(operator, f"{given}, {came}. Instead {advice}"))
        return original(model, named_tensors)

    return _model_load_weights_direct
