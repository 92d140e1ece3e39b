"""Passes of prompts' rows that may go another way than whole: what keeps all of a server's whole, and how many went.

What is asked here all ranks of a tensor-parallel group have alike, for they must decide alike.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable

import torch

from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.settings import settings
from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.adapters.all_reduce import all_reduce_of

ONE_ORDER = "every sum has one order (reproducible=on)"
COMPILED = "torch compiles the model"
OTHER_CARDS = "not all cards of one host are served and seen by all ranks"
# what a coordinator may sum with beside its custom kernels and NCCL
_OTHERS = ("pynccl_comm", "qr_comm", "pymscclpp_comm", "torch_symm_mem_comm", "pcie_ipc_comm")


def first(reasons: dict[str, bool]) -> str | None:
    """The first that holds."""
    return next((why for why, holds in reasons.items() if holds), None)


def of_sums(tp, ranks: int = 0) -> dict[str, bool]:
    """Reasons against another way that are the sums' of a group. ranks: of how many at most a reproducible server's
    sums may be NCCL's."""
    return {
        "one card has all rows": tp.world_size == 1,
        ONE_ORDER: settings().reproducible and tp.world_size > ranks,
    }


def of_server(state, tp, pipeline, compared: str) -> dict[str, bool]:
    """Those that are the server's. state: SGLang's module of groups; compared: what shadow mode does."""
    return {
        f"shadow mode compares whole {compared}": bool(settings().shadow),
        COMPILED: models_served.is_compiled(),
        "what modules return is looked at (--forward-hooks)": models_served.is_looked_into(),
        **of_groups(state, tp, pipeline),
    }


def of_groups(state, tp, pipeline) -> dict[str, bool]:
    """Those by which ranks have other rows, or other exchanges run beside the group's."""
    decode_context = getattr(state, "_DCP", None)  # 0.5.15 and later
    return {
        "pipeline parallelism": pipeline.world_size > 1,
        "data or context parallel attention": state._ATTN_TP is not tp,
        "PD multiplexing": state._PDMUX_PREFILL_TP_GROUP is not None,
        "expert parallelism": state.get_moe_ep_group().world_size > 1,
        "decode context parallelism": decode_context is not None and decode_context.world_size > 1,
    }


def is_for_nccl(coordinator, x: torch.Tensor, but: tuple[str, ...] = ()) -> bool:
    """Whether SGLang's all_reduce would end at torch.distributed's, in place, or at ours with the same bits. but: of
    _OTHERS, not asked for."""
    others = [getattr(coordinator, name, None) for name in _OTHERS if name not in but]
    by_flashinfer = getattr(coordinator, "_can_use_flashinfer_allreduce", None)  # 0.5.18 and later
    return (
        all(other is None or other.disabled for other in others)
        and not _is_for_custom(coordinator, x)
        and not coordinator.is_symmetric_memory_enabled()
        and not (by_flashinfer is not None and by_flashinfer(x))
    )


def _is_for_custom(coordinator, x: torch.Tensor) -> bool:
    custom, communicator = coordinator.ca_comm, all_reduce_of(coordinator)
    if custom is None or custom.disabled or not custom.should_custom_ar(x):
        return False
    return communicator is None or not communicator.may_be_nccls(x)


def count(
    patch: str,
    why: str | None,
    rows: int,
    *,
    seen: collections.Counter,
    left: collections.Counter,
    describe: Callable[[], str],
    found: Callable[[], dict],
) -> None:
    """One more pass in `seen`, or in `left` by why it went whole. The note of the report (describe, found) is written
    anew at powers of two, and at a new reason."""
    if why is None:
        seen["passes"] += 1
        seen["rows"] += rows
    else:
        left[why] += 1
    number = seen["passes"] if why is None else left[why]
    if not number & (number - 1):
        report.add_note(patch, describe, found)
        report.write()


def wrap_sums_of(coordinator, mark: str, sum_of: Callable) -> bool:
    """Makes the all_reduce of this one object sum_of(what it was, input); False: it is so already. Others may wrap it
    as well, and keep the mark."""
    original = coordinator.all_reduce
    if getattr(original, mark, False):
        return False

    @functools.wraps(original)
    def all_reduce(input_):
        return sum_of(original, input_)

    setattr(all_reduce, mark, True)
    coordinator.all_reduce = all_reduce
    return True
