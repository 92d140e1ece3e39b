"""The sums of a prompt's rows in pieces of their rows: NCCL sums one while products and boundaries of others run.

    replace_row_parallel_forward   RowParallelLinear.forward: of wo_b, the product is made in pieces of its rows, and
                                   the sum of each starts while the next one is multiplied
    owed                           for mhc_sum.py: what a layer gets instead of a sum of many rows, a `SumInPieces`: the
                                   boundary behind it (ops.mhc) runs piece by piece, each behind its own sum

The experts' product is left whole, its sum is not; or both go in parts of their columns (mhc_sum_in_parts.py). A
piece's sum is torch's own, asynchronous: on the process group's stream, behind what the current stream has when it
starts; who wants it makes the current stream wait. torch keeps the memory until then. So sums have one stream and the
order in which they are started, which all ranks have alike: pieces are cut by rows, and whether at all by what all
ranks know (settings, rows, the coordinator's ways to sum).

Only where DSV4_SM120_SET=sums_in_pieces asks for it and SGLang would give the whole sum to torch's NCCL, in place: not
what SGLang's custom kernels, ours or symmetric memory take, nor where every sum has one order (reproducible=on). Not
under capture: graphs hold whole sums.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable

import torch

from deepseek_v4_sm120 import patching
from deepseek_v4_sm120.ops.shared import limits
from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.settings import settings
from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.adapters.mhc_owed_sum import PATCH, OwedSum, layers
from deepseek_v4_sm120.sglang_patches.adapters.waiting import way_out

DEFAULT = "sums_in_pieces"
ROWS = 1024  # of a piece at least: fewer are bound by launches, and SGLang's own kernel sums up to as many at two cards
TILE_ROWS = 128  # that pieces have multiples of, as the products' tiles have
# Multiprocessors for the sums' blocks, of which NCCL has as many as channels. A boundary of many rows (ops.mhc) is a
# kernel all of whose blocks must be resident: with one in each multiprocessor it would wait for the sum beside it
SUM_SMS = 28
# what else a coordinator may sum with
_OTHERS = ("pynccl_comm", "qr_comm", "pymscclpp_comm", "torch_symm_mem_comm", "pcie_ipc_comm")
_seen: collections.Counter = collections.Counter()  # see count


def are_asked_for() -> bool:
    """Not on several hosts, whose other ranks may sum the whole at once."""
    return not settings().reproducible and not models_served.has_several_hosts() and most_pieces() > 1


def most_pieces() -> int:
    engine = patching.active_engine()
    return 0 if engine is None else engine.steering.value(DEFAULT)


def sizes_of(rows: int) -> list[int]:
    """Rows of each piece: as many pieces as were asked for, of ROWS and more each."""
    count = max(1, min(most_pieces(), rows // ROWS))
    each = rows // count // TILE_ROWS * TILE_ROWS if count > 1 else rows
    return [*[each] * (count - 1), rows - each * (count - 1)]


class SumInPieces(OwedSum):
    """Pieces of rows that are being summed in place. is_asked: of a product that SGLang leaves without its sum, False
    until SGLang asks for it; a look before that is a mistake."""

    operator = DEFAULT
    untaken = "the product in front of a sum was made in pieces, and nobody asked for its sum"

    def __init__(self, coordinator, pieces: tuple[torch.Tensor, ...], whole: torch.Tensor | None = None):
        self.pieces, self.is_asked = pieces, True
        self._whole = whole
        group = coordinator.device_group
        self._works = [torch.distributed.all_reduce(piece, group=group, async_op=True) for piece in pieces]

    @classmethod
    def joined(cls, sums: list[SumInPieces]) -> SumInPieces:
        """Of parts that were started one by one."""
        made = object.__new__(cls)
        made.pieces = tuple(piece for one in sums for piece in one.pieces)
        made._works = [work for one in sums for work in one._works]
        made._whole, made.is_asked = None, True
        return made

    def is_of(self, terms) -> bool:
        return self is terms

    def wait_for(self, number: int) -> None:
        """Makes the current stream wait for a piece."""
        self._works[number].wait()

    def finish(self) -> torch.Tensor:
        self._must_be_asked()
        for number in range(len(self.pieces)):
            self.wait_for(number)
        return self.joined_up() if self._whole is None else self._whole

    def joined_up(self) -> torch.Tensor:
        return torch.cat(self.pieces)

    def unfinished(self) -> tuple[tuple, dict]:
        self._must_be_asked()
        return self.pieces, {"ready": self.wait_for, "held_sms": SUM_SMS}

    def _must_be_asked(self) -> None:
        if not self.is_asked:
            raise RuntimeError(way_out(self.operator, "a product was read whose pieces are being summed"))

    def alike(self, name: str):
        first = self.pieces[0]
        if name == "shape":
            return torch.Size((sum(len(piece) for piece in self.pieces), first.shape[1]))
        if name in ("size", "numel"):
            return getattr(torch.empty(self.shape, device="meta"), name)
        return getattr(first, name)


def owed(coordinator, x) -> SumInPieces | None:
    """What a layer gets for the sum of x that it asks for; None: the sum itself, by SGLang's call."""
    if isinstance(x, SumInPieces):
        layers.take(SumInPieces, x)
        x.is_asked = True
        return x
    if layers.known.get("is_piece"):
        return SumInPieces(coordinator, (x,))
    if not takes(coordinator, x):
        return None
    sizes = sizes_of(len(x))
    count("sums", len(sizes))
    return SumInPieces(coordinator, x.split(sizes), x)


def takes(coordinator, x: torch.Tensor) -> bool:
    """Whether the sum of such rows may go in pieces, by what all ranks have alike: rows, and who would sum them."""
    return (
        are_asked_for()
        and x.ndim == 2
        and len(x) >= 2 * ROWS
        and x.is_contiguous()
        and limits.takes(PATCH, hidden=x.shape[1])  # DeepSeek-V4.1 has the same layers, and boundaries of its own
        and not torch.cuda.is_current_stream_capturing()
        and is_for_nccl(coordinator, x)
    )


def is_for_nccl(coordinator, x: torch.Tensor, but: tuple[str, ...] = ()) -> bool:
    """Whether SGLang's all_reduce would end at torch.distributed's, in place. but: of _OTHERS, not asked for."""
    others = [getattr(coordinator, name, None) for name in _OTHERS if name not in but]
    custom = coordinator.ca_comm
    by_flashinfer = getattr(coordinator, "_can_use_flashinfer_allreduce", None)  # 0.5.18 and later
    return (
        all(other is None or other.disabled for other in others)
        and not (custom is not None and not custom.disabled and custom.should_custom_ar(x))
        and not coordinator.is_symmetric_memory_enabled()
        and not (by_flashinfer is not None and by_flashinfer(x))
    )


def replace_row_parallel_forward(original: Callable) -> Callable:
    """For RowParallelLinear.forward(self, input_, skip_all_reduce=False, ...) -> (output, bias)."""

    @functools.wraps(original)
    def forward(self, input_, *args, **kwargs):
        if not _cuts(self, input_, args, kwargs):
            return original(self, input_, *args, **kwargs)
        coordinator, started, is_asked = layers.known["coordinator"], [], True
        sizes = sizes_of(len(input_))
        for piece in input_.split(sizes):
            with layers.enter(layers.layer, coordinator=coordinator, is_piece=True):
                found, bias = original(self, piece, **kwargs)
            if not isinstance(found, SumInPieces):  # the sum is asked for later
                found, is_asked = SumInPieces(coordinator, (found,)), False
            started.append(found)
        count("products", len(sizes))
        whole = SumInPieces.joined(started)
        if not is_asked:
            whole.is_asked = False
            layers.put_off(whole)
        return whole, bias

    return forward


def _cuts(linear, x, args, kwargs) -> bool:
    """Whether it is the layer's wo_b, called for the whole of an output whose sum goes in pieces."""
    return (
        layers.layer is not None
        and linear is getattr(getattr(layers.layer, "self_attn", None), "wo_b", None)
        and isinstance(x, torch.Tensor)
        and not args
        and set(kwargs) <= {"skip_all_reduce"}
        and len(x) >= 2 * ROWS
        and takes(layers.known["coordinator"], x.new_empty((len(x), linear.output_size)))
    )


def count(what: str, pieces: int = 0) -> None:
    """One more of "products" and "sums" in so many pieces, or "experts" (products with their sums, in parts of the
    columns). The report is written anew at powers of two."""
    _seen[what] += 1
    _seen["pieces"] += pieces
    if not _seen[what] & (_seen[what] - 1):
        report.add_note(DEFAULT, _describe, lambda: dict(_seen))
        report.write()


def _describe() -> str:
    return (
        f"{DEFAULT}: {_seen['products']} products with their sums and {_seen['sums']} sums of {2 * ROWS} rows and more "
        f"in {_seen['pieces']} pieces; {_seen['experts']} products of experts with their sums in parts of the columns"
    )
