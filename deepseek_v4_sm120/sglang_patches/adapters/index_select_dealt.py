"""The rows of a prompt's indexer, dealt to the cards: each selects for every n-th row, then all gather the lists.

SGLang's indexer is replicated: each rank of a tensor-parallel group scores all rows of a chunk against all entries.

    replace_forward   forward_c4_indexer of a prompt: names the group that may deal
    who_deals, deal   what index_select.py does with it, between its logits and its top-k

All ranks must decide alike, or they wait for each other for ever. So this asks for nothing but what they have alike:
the mode, rows and width of a batch that all of them have, settings, and that all see the same cards of one host. Not
with data, expert, context or decode-context parallelism, whose ranks have other rows, groups or pages; not in decode,
verify and draft, nor under capture or on a side stream, where another of SGLang's exchanges could run at once.

Rows go round, row r to rank r % n: later rows of a chunk have more entries, and so each rank has as much to do. The
lists are SGLang's own all-gather of slots, which are the same on all ranks, since their schedulers allot the same pages
to the same requests in the same order. A row's bits do not depend on the rows beside it, so they are as ever.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from importlib.util import find_spec

import torch

from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.settings import settings
from deepseek_v4_sm120.sglang_patches import device_gate, models_served
from deepseek_v4_sm120.sglang_patches.adapters.all_reduce import CONTEXT, PARALLEL_STATE, SERVER_ARGS
from deepseek_v4_sm120.sglang_patches.adapters.waiting import Scope

PATCH = "dealt_index"
RANKS = (2, 4, 8)
# The gather takes 2 KB of a row over PCIe, 82 ns at 25 GB/s; scores and selection of a row take 50 ps an entry. So some
# 1,900 entries pay for the bytes, as the mean of the rows: half of the greatest or more. PAIRS of row and entry are 200
# us of work, against the 50 that a collective and what is around it cost at any size. docs/notes/index_select.md
ENTRIES, PAIRS = 4096, 1 << 22
_prompt = Scope()  # its layer: the coordinator of the group that may deal


def replace_forward(original: Callable) -> Callable:
    """For C4IndexerBackendMixin.forward_c4_indexer."""

    @functools.wraps(original)
    def forward_c4_indexer(self, x, q_lora, c4_indexer, forward_batch, *args, **kwargs):
        is_prompt = forward_batch.forward_mode.is_extend_without_speculative()
        may_deal = is_prompt and not kwargs.get("enable_multi_stream")
        with _prompt.enter(_group() if may_deal else None):
            return original(self, x, q_lora, c4_indexer, forward_batch, *args, **kwargs)

    return forward_c4_indexer


def _group():
    """The coordinator of the ranks that all have the rows of a prompt; None: they are not all alike."""
    state = importlib.import_module(PARALLEL_STATE)
    tp, decode_context = state._TP, getattr(state, "_DCP", None)  # 0.5.15 and later
    is_alone = (
        tp.world_size in RANKS
        and tp is state.get_tp_group()  # not the second one that multiplexed prompts have
        and tp is state.get_attn_tp_group()  # neither data nor context parallel attention
        and state.get_moe_ep_group().world_size == 1
        and (decode_context is None or decode_context.world_size == 1)
        and _see_the_same_cards(tp.world_size)
    )
    return tp if is_alone else None


@functools.cache
def _see_the_same_cards(ranks: int) -> bool:
    """Whether the ranks are on one host, which alone tells their settings, and all see all cards, every one served."""
    count = torch.cuda.device_count()
    found = (
        models_served.serves_this_process()
        and _nodes() == 1
        and count >= ranks
        and all(
            device_gate.serves_capability(torch.cuda.get_device_capability(index), settings().force)
            for index in range(count)
        )
    )
    if found:
        text = f"{PATCH}: prompts' rows are dealt to {ranks} cards from {ENTRIES} entries on"
        report.add_note(PATCH, lambda: text, lambda: {"ranks": ranks, "entries": ENTRIES, "pairs": PAIRS})
        report.write()
    return found


def _nodes() -> int:
    context = importlib.import_module(CONTEXT) if find_spec(CONTEXT) is not None else None
    if hasattr(context, "get_server_args"):  # 0.5.15 and later
        return context.get_server_args().nnodes
    return importlib.import_module(SERVER_ARGS).get_global_server_args().nnodes


def who_deals(rows: int, entries: int):
    """The group's coordinator, where it is worth its while for rows of up to so many entries; else None."""
    is_worth_it = _prompt.layer is not None and entries >= ENTRIES and rows * entries >= PAIRS
    return _prompt.layer if is_worth_it and not torch.cuda.is_current_stream_capturing() else None


def deal(coordinator, select: Callable, *outs: torch.Tensor | None) -> None:
    """outs, [rows, k] each, as select(rows, *outs) fills them: of this rank's rows here, of all others' by them."""
    ranks, rank, rows = coordinator.world_size, coordinator.rank_in_group, outs[0].shape[0]
    whole, more = divmod(rows, ranks)
    mine = [None if out is None else out.new_empty(whole + (more > 0), out.shape[1]) for out in outs]
    own = slice(rank, rows, ranks)
    select(own, *(None if part is None else part[: len(range(rows)[own])] for part in mine))
    for out, part in zip(outs, mine, strict=True):
        if out is None:
            continue
        gathered = part.new_empty(ranks, *part.shape)
        coordinator.all_gather_into_tensor(gathered.flatten(0, 1), part)
        out[: whole * ranks].unflatten(0, (whole, ranks)).copy_(gathered[:, :whole].transpose(0, 1))
        if more:
            out[whole * ranks :].copy_(gathered[:more, whole])
