"""The compressors' products of few rows, dealt to the cards: each multiplies its share of the outputs, then all gather.

SGLang's compressors are replicated: every card of a tensor-parallel group reads all of their bf16 weights in each step.
Here rank r multiplies outputs [r * n / ranks, (r + 1) * n / ranks) by a slice of the weight, a view, and one launch
lays the ranks' float32 columns side by side (ops.all_reduce.all_gather). An output's sum has one order, however many
outputs and rows there are (csrc/bf16_linear), so the bits are the whole product's, and no border shows in them.

Dealt are the core compressors' products (OUTPUTS and more) of up to DEALT_ROWS rows. The index compressor's stays
whole: at two cards it is 2 MB a layer, on the index's way, and its gather could run beside the core compressor's.

Why cards cannot wait for each other for ever. The gather's blocks wait on a card until the others' have sent. (1) All
ranks make the same calls in the same order: who deals is decided by what they have alike, a product's shape, settings
and groups. (2) A card never has two kernels at once that wait for other cards. SGLang forks the core compressor's
stream behind a layer's boundary and joins it in front of its attention, in captures alone (one stream elsewhere), and
between both nobody sums or gathers; steps, drafts and prompts follow each other on one stream. (3) So whatever holds
the card when a gather comes ends by itself: what ran before has ended, as its product waited for it, and what follows
the gather, launched ahead or not, starts only when all its blocks run. Then it finds its place, and sends before it
waits. Where (1) or (2) do not hold products stay whole: `why_whole`, and docs/notes/whole_step.md.

The gather has a group of its own (Communicator.products), so its calls are counted apart from the boundaries' sums. One
call of a group at a time: the next one's product waits for the compressor behind this one, which must be ours, since
SGLang's may end before what is in front of it (docs/programmatic_launch.md).
"""

from __future__ import annotations

import collections
import functools
import importlib
from collections.abc import Callable

import torch

from deepseek_v4_sm120.ops import all_reduce, bf16_linear
from deepseek_v4_sm120.ops.all_reduce_sizes import DEALT_ROWS
from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.settings import settings
from deepseek_v4_sm120.sglang_patches import models_served, shadow
from deepseek_v4_sm120.sglang_patches.adapters import bf16_linear as whole
from deepseek_v4_sm120.sglang_patches.adapters import compressor, prompt_passes, prompts_in_halves
from deepseek_v4_sm120.sglang_patches.adapters.all_reduce import DEALT as PATCH
from deepseek_v4_sm120.sglang_patches.adapters.all_reduce import PARALLEL_STATE, Communicator, all_reduce_of
from deepseek_v4_sm120.specs import bounds

OUTPUTS = 1024  # at least: the C128 compressor's, 8.4 MB of weights; the C4 compressor has 2,048
_seen: collections.Counter = collections.Counter()  # "products" dealt, "rows" of them; of a graph at its capture


def replace_linear_bf16_fp32(original: Callable) -> Callable:
    """For linear_bf16_fp32(x, weight) -> [rows, outputs] float32, as compressor.py imported it and bf16_linear.py
    replaced it."""
    beside = settings().shadow

    @functools.wraps(original)
    def linear_bf16_fp32(x, y, *args, **kwargs):
        communicator = None if args or kwargs or not is_dealt(x, y) else who_deals(y)
        if communicator is None:
            return original(x, y, *args, **kwargs)
        found = deal(x, y, communicator)
        if not beside:
            return found
        pairs = [(found, bf16_linear.bf16_linear(x, y))]
        shape = {"rows": x.shape[0], "outputs": y.shape[0]}
        shadow.record(PATCH, pairs, identity=y.data_ptr(), shape=shape, relative_l2=bounds.ALL_GATHER)
        theirs = original(x, y)  # which has a line of its own
        return found if beside == "ours" else theirs

    return linear_bf16_fp32


def is_dealt(x, weight) -> bool:
    """Whether such a product is dealt, where anybody deals: by its shape alone."""
    return whole.takes(x, weight) and x.shape[0] <= DEALT_ROWS and weight.shape[0] >= OUTPUTS


def who_deals(weight) -> Communicator | None:
    """The tensor-parallel group's, where all its ranks deal; None: every card multiplies all."""
    state = importlib.import_module(PARALLEL_STATE)
    tp = state._TP
    if tp.world_size == 1:
        return None
    communicator = all_reduce_of(tp)
    why = why_whole(state, communicator) or _why_not_of(weight, communicator.products)
    if why is None:
        return communicator
    _tell_whole(why)
    return None


def why_whole(state, communicator: Communicator | None) -> str | None:
    """What keeps all of a server's products whole; the same on all ranks."""
    if communicator is None:
        return "the sums between the cards are not ours"
    if communicator.products is None:
        return communicator.why_whole
    return prompt_passes.first(
        {
            prompt_passes.COMPILED: models_served.is_compiled() or torch.compiler.is_compiling(),
            "SGLang's own kernels compress": not compressor.is_in_place(),
            "prompts go in halves of as few rows": 0 < prompts_in_halves.least_rows() < 2 * DEALT_ROWS,
            **prompt_passes.of_groups(state, state._TP, state._PP),
        }
    )


def _why_not_of(weight, group: all_reduce.AllReduce) -> str | None:
    outputs, step = weight.shape[0], group.ranks * bf16_linear.OUTPUTS_MULTIPLE
    return f"{outputs} outputs are no multiple of {step}" if outputs % step else None


def deal(x, weight, communicator: Communicator) -> torch.Tensor:
    """[rows, outputs] float32: this rank's outputs, between those of the others."""
    group = communicator.products
    share = weight.shape[0] // group.ranks
    own = weight[group.rank * share : (group.rank + 1) * share]
    _count(x.shape[0], group.ranks)
    return all_reduce.all_gather(bf16_linear.bf16_linear(x, own), group, tag=communicator.product_tags.next())


def _count(rows: int, ranks: int) -> None:
    """The note of the report is written anew at powers of two."""
    _seen["products"] += 1
    _seen["rows"] += rows
    if not _seen["products"] & (_seen["products"] - 1):
        report.add_note(PATCH, functools.partial(_describe, ranks), lambda: {"ranks": ranks, **_seen})
        report.write()


def _describe(ranks: int) -> str:
    return f"{PATCH}: {_seen['products']} products of up to {DEALT_ROWS} rows dealt to {ranks} cards"


@functools.cache
def _tell_whole(why: str) -> None:
    report.add_note(PATCH, lambda: f"{PATCH}: every card makes whole products: {why}", lambda: {"whole": why})
    report.write()
