"""What a layer hands on for a sum between the cards that is not finished.

An `OwedSum` stands for the sum. A boundary of ours takes it as it is (`for_boundary`); to all others it is the finished
sum, from the first look on, whatever that look is. It is no tensor, so nothing reads unfinished numbers by mistake.
`layers` is the scope of a decoder layer's forward, in which a sum may be owed: mhc_sum.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils import _pytree

from deepseek_v4_sm120.sglang_patches.adapters.waiting import Scope, Waiting

PATCH = "mhc"
# known: `leaves`, whether a term may come to the next boundary without its last addition; `has_sum`, whether that is a
# sum's between cards
layers = Scope()
# what a sum and its terms have in common: answered without a sum
_ALIKE = frozenset(("shape", "dtype", "device", "layout", "ndim", "dim", "size", "numel", "is_cuda", "is_contiguous"))
_ALIKE |= frozenset(("stride", "element_size", "requires_grad", "is_cpu"))
_OPERATORS = (
    *("add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv", "rtruediv", "itruediv"),
    *("matmul", "rmatmul", "pow", "neg", "abs", "getitem", "setitem", "iter", "bool", "float"),
    *("lt", "le", "gt", "ge", "eq", "ne", "array"),
)


class OwedSum(Waiting):
    """Stands for a sum over the cards. `finish` makes it, once; `alike` answers what is asked of its form alone."""

    operator = PATCH
    _sum: torch.Tensor | None = None

    def run(self) -> torch.Tensor:
        """The finished sum."""
        if self._sum is None:
            self._sum = self.finish()
        return self._sum

    def for_boundary(self) -> tuple[torch.Tensor, dict]:
        """(f, what ops.mhc takes beside it)"""
        return (self._sum, {}) if self._sum is not None else self.unfinished()

    def finish(self) -> torch.Tensor:
        raise NotImplementedError

    def unfinished(self) -> tuple[torch.Tensor, dict]:
        raise NotImplementedError

    def alike(self, name: str):
        raise NotImplementedError

    def __getattr__(self, name: str):
        return self.alike(name) if name in _ALIKE else getattr(self.run(), name)

    def __len__(self) -> int:
        return self.shape[0]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func(*_pytree.tree_map(finished, args), **_pytree.tree_map(finished, kwargs or {}))


def _operator(name: str) -> Callable:
    def run(self, *args):
        return getattr(self.run(), name)(*args)

    return run


for _name in (f"__{name}__" for name in _OPERATORS):
    setattr(OwedSum, _name, _operator(_name))


def finished(x):
    """x; of an OwedSum the sum."""
    return x.run() if isinstance(x, OwedSum) else x
