"""This card's terms of a sum that a boundary makes, without their last addition, which is the boundary's, too.

    of_product   wo_b's output of few rows (fp8_linear.py): sums of parts of the inputs, which nobody adds up
    of_experts   the shared expert's output and the routed experts' (mxfp4_moe.py), side by side

A layer hands either to its group's all_reduce, and that the sum of it to the next boundary (mhc_sum.py). Each saves a
launch on the way of a step. Whoever else looks gets the finished term, by the kernel that would have made it. On one
card there is no sum, and wo_b's output is handed to the boundary itself; the experts' is added in front of it there: a
boundary that waits for two streams could not ask for its weights while the addition runs.
"""

from __future__ import annotations

import torch

from deepseek_v4_sm120.ops import fp8_linear as linear_op
from deepseek_v4_sm120.ops import mhc as op
from deepseek_v4_sm120.ops import mxfp4_moe as experts_op
from deepseek_v4_sm120.sglang_patches.adapters.mhc_owed_sum import OwedSum, layers


class OwedTerm(OwedSum):
    """like: a tensor of the term's form, whatever is in it."""

    like: torch.Tensor

    def alike(self, name: str):
        return getattr(self.like, name)


class Unmerged(OwedTerm):
    def __init__(self, partial: torch.Tensor, like: torch.Tensor):
        self._partial, self.like = partial, like

    def finish(self) -> torch.Tensor:
        return linear_op.merge(self._partial)

    def unfinished(self) -> tuple[torch.Tensor, dict]:
        return self._partial, {}


class Unadded(OwedTerm):
    def __init__(self, shared: torch.Tensor, routed: torch.Tensor, scaling: float):
        self.like, self._routed, self._scaling = shared, routed, scaling

    def finish(self) -> torch.Tensor:
        return experts_op.add_shared(self.like, self._routed, scaling=self._scaling)

    def unfinished(self) -> tuple[torch.Tensor, dict]:
        return self.like, {"routed": self._routed, "scaling": self._scaling}


def of_product(linear, x: torch.Tensor, scale: torch.Tensor) -> Unmerged | None:
    """Of rows x, where `linear` is the running layer's wo_b; None: its product is made whole."""
    if linear is not getattr(getattr(layers.layer, "self_attn", None), "wo_b", None):
        return None
    if linear_op.splits_of(x.shape[0], *linear.weight.shape, x.device.index) != op.TERM_SPLITS:
        return None
    like = x.new_empty((x.shape[0], linear.weight.shape[0]))
    return Unmerged(linear_op.fp8_linear_unmerged(x, linear.weight, scale), like) if _is_left(like) else None


def of_experts(shared: torch.Tensor, routed: torch.Tensor, scaling: float) -> Unadded | None:
    """Of outputs of the same form, both contiguous; None: they are added."""
    return Unadded(shared, routed, scaling) if layers.known.get("has_sum") and _is_left(shared) else None


def _is_left(like: torch.Tensor) -> bool:
    """Whether a term of this form may come to the running layer's next boundary without its last addition."""
    return layers.known["leaves"](like)


def form_of(x):
    """A tensor of x's form: x itself, but for an OwedTerm."""
    return x.like if isinstance(x, OwedTerm) else x
