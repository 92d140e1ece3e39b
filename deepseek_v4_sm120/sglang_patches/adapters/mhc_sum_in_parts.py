"""The experts' sum between the cards in parts of their columns: NCCL sums one part while down makes the next.

    may_wait     for mxfp4_moe.py: whether the experts' output may be an `UnmadeExperts`, to which the shared expert's
                 is added where SGLang adds them
    owed         for mhc_sum.py: what a layer gets instead of the sum of it, a `SumInParts`: the products are launched
                 here, part by part, and each part's sum behind it

The experts' rows cannot be cut (mhc_sum_in_pieces.py), since each weight would be decoded once more for each piece. A
part of the columns has its own weights, once, for all rows. A boundary needs all of a row: so the last part's sum goes
in pieces of its rows, and the boundary runs in these, the first of them behind the sums of all other parts as well.

By DSV4_SM120_SET=sums_in_pieces, and under its conditions, where the experts of a prompt are our kernels'
(ops.mxfp4_moe_in_parts). To all others an `UnmadeExperts` is the finished output, made where it is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from deepseek_v4_sm120.ops import mhc, mxfp4_moe
from deepseek_v4_sm120.sglang_patches.adapters import mhc_sum_in_pieces as pieces
from deepseek_v4_sm120.sglang_patches.adapters.mhc_owed_sum import layers
from deepseek_v4_sm120.sglang_patches.adapters.mhc_owed_terms import OwedTerm


class UnmadeExperts(OwedTerm):
    """make(): the routed experts' output. in_parts(**what mxfp4_moe_in_parts has beside the experts): the same."""

    def __init__(self, make: Callable, in_parts: Callable, like: torch.Tensor):
        self.like, self._make, self._in_parts = like, make, in_parts
        self._added: dict = {}

    def with_shared(self, shared: torch.Tensor, scaling: float) -> UnmadeExperts:
        """shared + scaling * what it was so far; `shared` may be written."""
        self._added = {"shared": shared, "scaling": scaling}
        return self

    def takes_shared(self, shared: torch.Tensor) -> bool:
        form = (self.like.shape, self.like.dtype, self.like.device)
        return not self._added and (shared.shape, shared.dtype, shared.device) == form and shared.is_contiguous()

    def finish(self) -> torch.Tensor:
        made = self._make()
        return made if not self._added else self._added["shared"].add_(made, alpha=self._added["scaling"])

    def unfinished(self) -> tuple[torch.Tensor, dict]:
        return self.run(), {}

    @property
    def is_made(self) -> bool:
        return self._sum is not None

    def make_parts(self, count: int, behind: Callable) -> torch.Tensor:
        return self._in_parts(parts=count, behind=behind, held_sms=pieces.SUM_SMS, **self._added)

    def __getitem__(self, at):
        """All columns of all rows, as SGLang cuts off what a dispatcher has padded: itself."""
        is_all = isinstance(at, tuple) and len(at) == 2 and at[0] is Ellipsis and isinstance(at[1], slice)
        return self if is_all and at[1] == slice(self.like.shape[-1]) else self.run()[at]

    def contiguous(self) -> UnmadeExperts:
        return self


class SumInParts(pieces.SumInPieces):
    def __init__(self, coordinator, experts: UnmadeExperts, count: int):
        self.is_asked, self._like, self._whole = True, experts.like, None
        self._works: list = []
        self._group, self._left = coordinator.device_group, count
        self._sizes = pieces.sizes_of(len(experts.like))
        self._parts = experts.make_parts(count, self._start)
        self.pieces = self._parts.split(self._sizes, dim=1)

    def _start(self, part: torch.Tensor) -> None:
        """The sum of a part, behind its launches; of the last, of each piece of its rows."""
        self._left -= 1
        for piece in (part,) if self._left else part.split(self._sizes):
            self._works.append(torch.distributed.all_reduce(piece, group=self._group, async_op=True))

    def wait_for(self, number: int) -> None:
        others = len(self._works) - len(self._sizes)
        for work in self._works[:others] if number == 0 else ():
            work.wait()
        self._works[others + number].wait()

    def joined_up(self) -> torch.Tensor:
        return mhc.joined(self._parts)

    def alike(self, name: str):
        return getattr(self._like, name)


def may_wait(hidden: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, wide: bool | None) -> bool:
    """Whether the output of rows `hidden` may be made where its sum is asked for."""
    coordinator = layers.known.get("coordinator") if layers.layer is not None else None
    return (
        coordinator is not None
        and wide is not False
        and pieces.takes(coordinator, hidden)
        and (wide or mxfp4_moe.prefers_wide(hidden.device))
        and mxfp4_moe.makes_parts(w13, w2, parts_of())
    )


def parts_of() -> int:
    """As many as pieces of a sum were asked for, down to a power of two."""
    return 2 ** int(math.log2(max(1, pieces.most_pieces())))


def owed(coordinator, x) -> SumInParts | None:
    """What a layer gets for the sum of x that it asks for; None: another sum, or x is looked at already."""
    if not isinstance(x, UnmadeExperts) or x.is_made or not pieces.takes(coordinator, x.like):
        return None
    pieces.count("experts")
    return SumInParts(coordinator, x, parts_of())
