"""A long prompt's chunk in two halves of its tokens: one's sums between the cards run beside the other one's products.

    replace_model_forward   DeepseekV4Model.forward: cuts the batch in two (halves_batch.py) and runs itself for both,
                            in turn (turns.py); outputs are joined, and what is behind the layers sees the whole batch
    replace_all_reduce      GroupCoordinator.all_reduce: a half starts its sum on a stream beside the products', hands
                            over to the other half, and in its next turn makes the products wait for the sum

The second half needs of the first what a chunk of a prompt needs of the chunks before it: what they wrote to the caches
of a layer. Since both take turns at every sum, and a layer has two, the first is always one stretch ahead, so that is
there. All products are on the stream that the whole chunk's would be on, in the order in which they are launched, and
all sums on the one beside it; each sum waits for the products launched before it.

Every rank launches the sums in the same order, A1 B1 A2 B2 ..., because that order is the program's, never a matter of
time: turns are strict, and whether and where a batch is cut hangs on nothing but what all ranks have alike. So NCCL
meets itself as it does without halves. A rank that fails leaves the others waiting in a sum as it does without, too:
its error ends its process, and SGLang ends the others.

Memory of a sum that is under way is held by the half that waits for it. What a sum allocates is taken from the side
stream's pool, and whatever is put there next waits for all products launched before, so for its last reader.
"""

from __future__ import annotations

import collections
import functools
import importlib
import threading
from collections.abc import Callable

import torch

from deepseek_v4_sm120.ops.shared import cuda_tensors
from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.settings import settings
from deepseek_v4_sm120.sglang_patches.adapters import alike
from deepseek_v4_sm120.sglang_patches.adapters.halves_batch import Cut, cut_of, halves_of, unknown_in
from deepseek_v4_sm120.sglang_patches.adapters.turns import Turns
from deepseek_v4_sm120.sglang_patches.names import MODEL

PATCH = "halves"
# Multiprocessors for the sums' blocks, of which NCCL has as many as channels. A boundary of many rows (ops.mhc) is a
# kernel all of whose blocks must be resident: with one in each multiprocessor but those, it would wait for the sum to
# end, and nothing would be hidden. Its blocks come by 32, so an SM120 of 188 has as many as it has without
SUM_SMS = 28
ROWS = 2048  # of a chunk, from where on it is cut: a half has at least 896, more than the sums that are ours
ENVIRON = "sglang.srt.environ"
FORWARD_CONTEXT = "sglang.srt.model_executor.forward_context"
BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend"
NEEDED = ("seq_lens_cpu", "extend_seq_lens_cpu", "extend_prefix_lens_cpu", "extend_start_loc")
# arguments with which something counts or keeps the rows of a whole forward, or cuts it in two itself
OTHERS = (
    *("enable_two_batch_overlap", "enable_attn_tp_input_scattered", "enable_pdmux", "enable_eplb"),
    *("enable_return_routed_experts", "enable_return_indexer_topk", "expert_distribution_recorder_mode"),
)


class _Running(threading.local):
    """hand_over: of the half that this thread runs, to the other one; None outside of halves."""

    hand_over: Callable[[], None] | None = None


_running = _Running()
_seen: collections.Counter = collections.Counter()  # "forwards" and "rows" in halves; why others were left whole


def replace_model_forward(original: Callable) -> Callable:
    """For DeepseekV4Model.forward(self, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors=None)."""

    @functools.wraps(original)
    def forward(self, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors=None):
        given = (self, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
        if input_ids is None or len(input_ids) < ROWS:
            return original(*given)
        why = _why_whole(*given)
        if why is not None:
            _count(why)
            return original(*given)
        cut = cut_of(forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu)
        found = _in_halves(original, self, input_ids, positions, forward_batch, cut)
        _seen["rows"] += len(input_ids)
        _count("forwards")
        return found

    return forward


def replace_all_reduce(original: Callable) -> Callable:
    """For GroupCoordinator.all_reduce(self, input_)."""

    @functools.wraps(original)
    def all_reduce(self, input_):
        if torch.compiler.is_compiling() or _running.hand_over is None or self.world_size == 1:
            return original(self, input_)
        found, wait = _start_beside(functools.partial(original, self, input_))
        try:
            _running.hand_over()
        finally:
            wait()
        return found

    return all_reduce


def _why_whole(model, input_ids, positions, batch, input_embeds, pp_proxy_tensors) -> str | None:
    """Why a batch is not cut; None: it is. By what all ranks have alike, and the same on all of them."""
    if batch.forward_mode.name != "EXTEND":
        return f"mode {batch.forward_mode.name}"
    if settings().shadow:
        return "shadow mode"
    if settings().choices.get("dealt_index", "off") not in ("off", "0"):
        return "dealt_index: its gathers are not on the sums' stream"
    if torch.cuda.is_current_stream_capturing() or _is_for_a_graph():
        return "a graph"
    if input_embeds is not None or pp_proxy_tensors is not None or model.pp_group.world_size != 1:
        return "embeddings, or a part of the layers"
    if missing := [name for name in NEEDED if getattr(batch, name) is None]:
        return f"a batch without {', '.join(missing)}"
    rows = sum(batch.extend_seq_lens_cpu)
    if any(len(tensor) != rows for tensor in (input_ids, positions, batch.out_cache_loc)):
        return "a padded batch"
    if unknown := unknown_in(batch):
        return f"a batch with {', '.join(unknown)}"
    backend = _backend()
    if type(backend) is not importlib.import_module(BACKEND).DeepseekV4AttnBackend:
        return f"attention by {type(backend).__name__}"
    if backend.hisparse_coordinator is not None:
        return "hisparse"
    if importlib.import_module(ENVIRON).envs.SGLANG_OPT_USE_ONLINE_COMPRESS.get():
        return "SGLANG_OPT_USE_ONLINE_COMPRESS"
    arguments = alike.server_arguments()
    if others := [name for name in OTHERS if getattr(arguments, name, "unknown")]:
        return ", ".join(others)
    if alike.tensor_parallel_group() is None:
        return "no group of 2, 4 or 8 ranks of one host that all have the same rows"
    return None


def _is_for_a_graph() -> bool:
    """The warm-up of a capture, or a prompt's graph with breaks."""
    model = importlib.import_module(MODEL)
    return model.get_is_capture_mode() or model.is_in_breakable_cuda_graph()


def _backend():
    return importlib.import_module(FORWARD_CONTEXT).get_attn_backend()


def _in_halves(original: Callable, model, input_ids, positions, batch, cut: Cut):
    """What the model's forward returns for the whole batch."""
    backend = _backend()
    whole, metadata = backend.forward_metadata, []
    halves, tokens = halves_of(batch, cut), (slice(cut.rows), slice(cut.rows, None))

    def begin(i: int) -> None:
        backend.forward_metadata = metadata[i]

    turns = Turns(begin)

    def run(i: int):
        _running.hand_over = functools.partial(turns.hand_over, i)
        try:
            with cuda_tensors.held_by_others(SUM_SMS):
                return original(model, input_ids[tokens[i]], positions[tokens[i]], halves[i], None, None)
        finally:
            _running.hand_over = None

    try:
        for half in halves:
            backend.init_forward_metadata(half)
            metadata.append(backend.forward_metadata)
        return _joined(turns.run(functools.partial(run, 0), functools.partial(run, 1)))
    finally:
        backend.forward_metadata = whole


def _joined(halves):
    """Tensors of both one behind the other, in the tuples and lists that they come in."""
    if all(isinstance(half, torch.Tensor) for half in halves):
        return torch.cat(halves)
    if all(isinstance(half, tuple | list) for half in halves):
        return type(halves[0])(map(_joined, zip(*halves, strict=True)))
    kinds = ", ".join(type(half).__name__ for half in halves)
    raise TypeError(f"{PATCH}: the model's forward must return tensors, in tuples or lists; got {kinds}")


# ---- the stream of the sums


@functools.cache
def _stream() -> torch.cuda.Stream:
    """Of this process's card. In front where both streams have blocks to place: a sum has few, and others wait."""
    return torch.cuda.Stream(priority=-1)


def _start_beside(call: Callable) -> tuple[object, Callable[[], None]]:
    """(what `call` returns, what makes the current stream wait for it): behind all that the current stream has."""
    _stream().wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(_stream()):
        found = call()
    done = _stream().record_event()
    return found, lambda: torch.cuda.current_stream().wait_event(done)


# ---- what is told


def _count(what: str) -> None:
    """The report is written anew at powers of two."""
    _seen[what] += 1
    if not _seen[what] & (_seen[what] - 1):
        report.add_note(PATCH, _describe, lambda: dict(_seen))
        report.write()


def _describe() -> str:
    left = [f"{count} whole: {why}" for why, count in _seen.items() if why not in ("forwards", "rows")]
    text = f"{_seen['forwards']} chunks of {ROWS} rows and more in halves, {_seen['rows']} rows"
    return f"{PATCH}: {'; '.join((text, *left))}"
