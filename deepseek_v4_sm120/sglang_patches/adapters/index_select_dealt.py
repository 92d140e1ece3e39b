"""The rows of a prompt's indexer, dealt to the cards: each selects for every n-th row, then all gather the lists.

SGLang's indexer is replicated: each rank of a tensor-parallel group scores all rows of a chunk against all entries.

    replace_forward   forward_c4_indexer of a prompt: names the group that may deal, and counts rows times entries
    who_deals, deal   what index_select.py does with it, between its logits and its top-k

All ranks must decide alike, or they wait for each other for ever. So this asks for nothing but what they have alike:
the mode, rows and lengths of a batch that all of them have, settings, and that all see the same cards of one host. Not
with data, expert, context or decode-context parallelism, whose ranks have other rows or groups; not in decode, verify
and draft, nor under capture or on a side stream, where another of SGLang's exchanges could run at once.

Rows go round, row r to rank r % n: later rows of a chunk have more entries, and so each rank has as much to do. What is
gathered, by SGLang's own all-gather, are entries, numbers within a request; each rank makes slots of them by its own
page table, whatever pages the others have. A row's bits do not depend on the rows beside it, so they are as ever.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from importlib.util import find_spec

import torch

from deepseek_v4_sm120.ops import index_select as op
from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.settings import settings
from deepseek_v4_sm120.sglang_patches import device_gate, models_served
from deepseek_v4_sm120.sglang_patches.adapters.all_reduce import CONTEXT, PARALLEL_STATE, SERVER_ARGS
from deepseek_v4_sm120.sglang_patches.adapters.waiting import Scope

PATCH = "dealt_index"
RANKS = (2, 4, 8)
TOKENS = 4  # of an entry
# What a call is reckoned to take, in ns: docs/notes/index_select.md. Dealt where what is saved is MARGIN times what the
# exchange costs, since cards' links differ.
PAIR_NS = 0.05  # scores and selection, of a row and an entry
BYTE_NS = 1 / 25  # from the other ranks, over PCIe
SLOTS_NS = 3.0  # of a row
EXCHANGE_NS = 50_000  # a collective and what is around it, at any size
MARGIN = 2
_prompt = Scope()  # its layer: the coordinator of the group that may deal


def replace_forward(original: Callable) -> Callable:
    """For C4IndexerBackendMixin.forward_c4_indexer."""

    @functools.wraps(original)
    def forward_c4_indexer(self, x, q_lora, c4_indexer, forward_batch, *args, **kwargs):
        is_prompt = forward_batch.forward_mode.is_extend_without_speculative()
        may_deal = is_prompt and not kwargs.get("enable_multi_stream")
        group = _group() if may_deal else None
        with _prompt.enter(group, pairs=0 if group is None else _pairs(forward_batch)):
            return original(self, x, q_lora, c4_indexer, forward_batch, *args, **kwargs)

    return forward_c4_indexer


def _pairs(forward_batch) -> int:
    """Of a row and an entry that it may choose, in all of a prompt's rows; 0 where the host does not know them."""
    rows, before = forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu
    if rows is None or before is None:
        return 0
    return sum(int(n) * int(2 * first + n) for n, first in zip(rows, before, strict=True)) // (2 * TOKENS)


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
        and see_the_same_cards(tp.world_size)
    )
    if is_alone:
        _tell(tp.world_size)
    return tp if is_alone else None


@functools.cache
def _tell(ranks: int) -> None:
    text = f"{PATCH}: the rows of long prompts are dealt to {ranks} cards"
    report.add_note(PATCH, lambda: text, lambda: {"ranks": ranks})
    report.write()


@functools.cache
def see_the_same_cards(ranks: int) -> bool:
    """Whether the ranks are on one host, which alone tells their settings, and all see all cards, every one served."""
    count = torch.cuda.device_count()
    return (
        models_served.serves_this_process()
        and _nodes() == 1
        and count >= ranks
        and all(
            device_gate.serves_capability(torch.cuda.get_device_capability(index), settings().force)
            for index in range(count)
        )
    )


def _nodes() -> int:
    context = importlib.import_module(CONTEXT) if find_spec(CONTEXT) is not None else None
    if hasattr(context, "get_server_args"):  # 0.5.15 and later
        return context.get_server_args().nnodes
    return importlib.import_module(SERVER_ARGS).get_global_server_args().nnodes


def is_worth_it(ranks: int, rows: int, pairs: int, row_bytes: int) -> bool:
    """Whether a card saves enough where each has 1 / ranks of the work, and gets the others' lists."""
    others = 1 - 1 / ranks
    return pairs * PAIR_NS * others >= MARGIN * (rows * (row_bytes * BYTE_NS * others + SLOTS_NS) + EXCHANGE_NS)


def entry_type(page_table) -> torch.dtype:
    """Of the lists that are gathered."""
    return torch.int16 if op.is_narrow(page_table) else torch.int32


def who_deals(out, page_table):
    """The group's coordinator, where it is worth its while for lists like `out`; else None."""
    group = _prompt.layer
    if group is None:
        return None
    row_bytes = out.shape[1] * entry_type(page_table).itemsize
    if not is_worth_it(group.world_size, out.shape[0], _prompt.known["pairs"], row_bytes):
        return None
    return None if torch.cuda.is_current_stream_capturing() else group


def deal(coordinator, select: Callable, page_table, num_pages: int, out, entries) -> None:
    """Fills out, [rows, k] slots, and entries, if given. select(rows, out, entries) makes this rank's rows of both."""
    ranks, rank, (rows, k) = coordinator.world_size, coordinator.rank_in_group, out.shape
    own = slice(rank, rows, ranks)
    count = len(range(rows)[own])
    part = out.new_empty(-(-rows // ranks), k)
    select(own, out[:count], part[:count])  # its slots are written over below
    part = part.to(entry_type(page_table))
    dealt = part.new_empty(ranks, *part.shape)
    coordinator.all_gather_into_tensor(dealt.flatten(0, 1).view(torch.uint8), part.view(torch.uint8))
    op.dealt_slots(dealt, page_table, num_pages=num_pages, out=out, entries=entries)
