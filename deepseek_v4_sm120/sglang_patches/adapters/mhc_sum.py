"""The sums between the cards in front of a boundary, put off into it.

    replace_layer_forward   the decoder layer's forward: in it the tensor-parallel group gives, instead of a sum of few
                            rows, an `OwedSum`; attention and experts hand that on to the next boundary (mhc.py), whose
                            kernel adds what the cards send

A layer asks its group for two sums: of wo_b, which the boundary between attention and experts takes, and of the
experts, which the next layer's first boundary takes, or the post behind the last layer. SGLang's ways to ask are many
(RowParallelLinear, tensor_model_parallel_all_reduce, post_experts_all_reduce, the layer boundaries of 0.5.23); all end
at `all_reduce` of the group's coordinator, which in our model's processes is ours while a layer runs.

A sum is put off where it would be ours (adapters/all_reduce.py) and has so few rows that a boundary makes it inside
(ops.mhc.takes_sum): by the rows alone, so all ranks do the same. Never in shadow mode, where SGLang's own sum is looked
at, never under torch.compile, nor where functions of the user's are given what modules return (--forward-hooks; or
SGLang's dumps), which know tensors alone, and not with PD multiplexing, whose streams have too few multiprocessors for
a kernel that other cards wait for. Nor where attention has a group of its own (data or context parallelism): there the
experts' sum is scattered in front of the boundary, and a rank that gets no rows of it does not look at it at all, for
which the others would wait. Nor with pipeline parallelism: NCCL's kernels of a stage's sends, receives and gathers run
beside its layers and hold multiprocessors until other cards answer; of a boundary that waits for other cards all blocks
have to be resident, and so cards could wait for each other for ever. Nothing waits for a boundary that does not come:
whoever else looks at an `OwedSum`, whatever that is, gets the finished sum, made where it looks.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch

from deepseek_v4_sm120.ops import mhc as op
from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.settings import settings
from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.adapters import prompt_passes
from deepseek_v4_sm120.sglang_patches.adapters.all_reduce import PARALLEL_STATE, Communicator, all_reduce_of
from deepseek_v4_sm120.sglang_patches.adapters.mhc_owed_sum import PATCH, OwedSum, finished, layers
from deepseek_v4_sm120.sglang_patches.adapters.mhc_owed_terms import form_of

OWN_ROWS = 8  # of one card, whose boundary adds wo_b's parts: a layer takes 1.2 us less at 1, 4 and 8; more not timed


class SumOfFewRows(OwedSum):
    """Terms that the boundary's kernel adds up; for all others SGLang's own call does. term: this card's, whose last
    addition may be left as well (mhc_owed_terms.py)."""

    def __init__(self, term: torch.Tensor | OwedSum, ours: Communicator, original: Callable):
        self._term, self._ours, self._original = term, ours, original

    def finish(self) -> torch.Tensor:
        return self._original(finished(self._term))

    def unfinished(self) -> tuple[torch.Tensor, dict]:
        term, left = self._term.for_boundary() if isinstance(self._term, OwedSum) else (self._term, {})
        return term, {"sum_over": self._ours.sums, "tag": self._ours.next_tag(), **left}

    def alike(self, name: str):
        return getattr(form_of(self._term), name)


def replace_layer_forward(original: Callable) -> Callable:
    """For the decoder layer's forward. On one card, which has no such sum, only wo_b's last addition may be left to the
    boundary behind it (mhc_owed_terms.py)."""

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        is_seen = models_served.is_compiled() or models_served.is_looked_into() or settings().shadow
        if torch.compiler.is_compiling() or is_seen:
            return original(self, *args, **kwargs)
        state = importlib.import_module(PARALLEL_STATE)
        coordinator = state._TP
        has_sum = all_reduce_of(coordinator) is not None
        if not (has_sum or is_alone(coordinator)) or not _comes_to_a_boundary(state):
            return original(self, *args, **kwargs)
        if has_sum:
            _put_off_sums_of(coordinator)
        leaves = functools.partial(_leaves, coordinator) if has_sum else _leaves_own
        with layers.enter(self, leaves=leaves, has_sum=has_sum):
            return original(self, *args, **kwargs)

    return forward


def is_alone(coordinator) -> bool:
    """Whether a group has one rank: what a layer gives then comes to the boundary as it is."""
    return getattr(coordinator, "world_size", None) == 1


def _comes_to_a_boundary(state) -> bool:
    """Whether a layer's sums go to the boundary behind it on all ranks, whose streams have all multiprocessors."""
    return state._ATTN_TP is state._TP and state._PDMUX_PREFILL_TP_GROUP is None and state._PP.world_size == 1


def _put_off_sums_of(coordinator) -> None:
    """Other groups, and other models' processes, keep what they have."""
    if not prompt_passes.wrap_sums_of(coordinator, "puts_off", functools.partial(_owed_sum, coordinator)):
        return
    ours = all_reduce_of(coordinator)
    rows = op.summing_rows(ours.sums)
    text = f"{PATCH}: sums between the cards of up to {rows} rows are made inside of the boundaries behind them"
    report.add_note(PATCH, lambda: text, lambda: {"sums_up_to_rows": rows})
    report.write()


def _owed_sum(coordinator, original: Callable, input_):
    ours = _who_can_wait(coordinator, form_of(input_)) if layers.layer is not None else None
    return original(finished(input_)) if ours is None else SumOfFewRows(input_, ours, original)


def _leaves_own(term: torch.Tensor) -> bool:
    """Whether the last addition of such a term may be left to a boundary of one card, which makes no sum."""
    return len(term) <= OWN_ROWS and op.takes_own_terms(term)


def _leaves(coordinator, term: torch.Tensor) -> bool:
    """Whether the last addition of such a term may be left to the boundary that makes the sum."""
    ours = _who_can_wait(coordinator, term)
    return ours is not None and op.takes_terms(*term.shape, ours.sums)


def _who_can_wait(coordinator, x) -> Communicator | None:
    """What would make the sum, where a boundary can make it instead; not where the user has chosen one in front."""
    ours, mscclpp = all_reduce_of(coordinator), getattr(coordinator, "pymscclpp_comm", None)
    by_flashinfer = getattr(coordinator, "_can_use_flashinfer_allreduce", None)  # 0.5.18 and later
    can_wait = (
        ours is not None
        and ours.sums.takes(x)
        and op.takes_sum(*x.shape, ours.sums)
        and not coordinator.is_symmetric_memory_enabled()  # NCCL's are in front then, up to 0.5.17
        and (mscclpp is None or mscclpp.disabled)
        and not (by_flashinfer is not None and by_flashinfer(x))
    )
    return ours if can_wait else None
