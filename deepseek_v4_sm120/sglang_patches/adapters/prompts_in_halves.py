"""A prompt's rows in two halves that take turns: while NCCL sums one half's rows, the card works on the other's.

    replace_init_forward_metadata   the attention backend's: of a batch that goes in halves their metadata, too, in
                                    front of the whole's, for what it reads may be written again behind it
    replace_model_forward           the target model's forward: once for each half, in threads that take turns

Under tensor parallelism a layer sums its rows over the cards twice, and waits. Here the tensor-parallel group's
all_reduce starts a half's sum on NCCL's own stream and gives the other half its turn; both launch on SGLang's stream,
so that has one half's attention behind the other's, then the experts of both, and each waits for a sum that ran beside
the other's products. The first half never reads what the second writes: it has the earlier rows of each prompt, and its
layer's keys and states are written before the second half's turn. A half is a batch as SGLang would make one of these
rows: whole prompts, and one that is cut, as in chunks, at a multiple of a page.

Whether a batch is cut, and where, all ranks must decide alike: by its rows, mode, settings and groups (`why_not`).
Their sums then start in one order. `status` says how many passes went in halves, and why others did not.

Behind the layers both halves' rows are put together: the head, the log-probabilities and what a draft reads are of the
whole batch, as ever.

Passes in SGLang's prefill graphs: halves_in_graphs.py.

DSV4_SM120_SET=prompts_in_halves=on tries out whether a server's passes gain by it (halves_trial.py); a number: every
pass of as many rows for each half goes so.
"""

from __future__ import annotations

import collections
import copy
import functools
import importlib
import itertools
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepseek_v4_sm120 import patching
from deepseek_v4_sm120.ops.all_reduce_sizes import ONE_ORDER_RANKS
from deepseek_v4_sm120.ops.shared import cuda_tensors
from deepseek_v4_sm120.settings import asks_for, settings
from deepseek_v4_sm120.sglang_patches.adapters import halves_trial as trial
from deepseek_v4_sm120.sglang_patches.adapters import prompt_passes
from deepseek_v4_sm120.sglang_patches.adapters.all_reduce import PARALLEL_STATE
from deepseek_v4_sm120.sglang_patches.adapters.index_select_dealt import see_the_same_cards
from deepseek_v4_sm120.sglang_patches.adapters.mhc_owed_sum import finished
from deepseek_v4_sm120.sglang_patches.adapters.turns import Turns
from deepseek_v4_sm120.sglang_patches.adapters.waiting import Scope, way_out
from deepseek_v4_sm120.sglang_patches.defaults import DEALT_STREAMS, HALF_ROWS

PATCH = "prompts_in_halves"
ROWS = HALF_ROWS  # of a half at least, more or less, where it is tried out
PAGE = 256  # a prompt is cut at a multiple of it: no group of a compressor is in both halves
# Multiprocessors that kernels leave to the sums beside them, whose blocks NCCL has one of for each channel: 4 through
# host memory (seen on two H200)
SUM_SMS = 8
CAPTURERS, RECORDERS = "sglang.srt.state_capturer.routed_experts", "sglang.srt.eplb.expert_distribution"
PASS = "_dsv4_sm120_pass"  # of a batch: its Pass
_running = Scope()  # its layer: the Half whose turn it is
_seen: collections.Counter = collections.Counter()  # "passes" in halves, "rows" of them, "sums" that had turns
_left: collections.Counter = collections.Counter()  # why -> passes of as many rows that were not
_trials = trial.Trials()


class Cut:
    """Where a batch of prompts with `lengths` rows behind `before` tokens is cut: between two prompts near the middle,
    or within one at a multiple of a page; or as near to row `at` as may be. rows: of the first half; request: whose
    rows it ends with; offset: how many of them it has; is_within: whether the second half has others of them; least:
    rows of the smaller half."""

    def __init__(self, lengths: list[int], before: list[int], at: int | None = None):
        ends = list(itertools.accumulate(lengths))
        self.whole = ends[-1]
        middle = self.whole // 2 if at is None else min(at, self.whole)
        self.request = next(number for number, end in enumerate(ends) if end >= middle)
        start, end = ends[self.request] - lengths[self.request], ends[self.request]
        edge = min((start, end), key=lambda edge: abs(edge - middle))
        page = (before[self.request] + middle - start + PAGE // 2) // PAGE * PAGE - before[self.request] + start
        slack = self.whole // 16 if at is None else 0
        self.is_within = start < page < end and abs(edge - middle) > slack
        self.rows = page if self.is_within else edge
        if self.rows == start:
            self.request -= 1
        self.offset = self.rows - start if self.is_within else lengths[self.request]
        self.least = min(self.rows, self.whole - self.rows)


@dataclass
class Half:
    number: int
    batch: object
    at: slice
    metadata: object = None
    halves: Halves | None = None

    def sums(self, x) -> bool:
        return x.ndim == 2 and len(x) == self.at.stop - self.at.start and x.is_contiguous()


class Halves:
    """turns: of the pass that runs."""

    turns: Turns

    def __init__(self, backend, coordinator, batch, cut: Cut):
        self.backend, self.coordinator = backend, coordinator
        self.both = [
            Half(0, first_half(batch, cut), slice(0, cut.rows)),
            Half(1, second_half(batch, cut), slice(cut.rows, cut.whole)),
        ]
        for half in self.both:  # metadata and batches go with the pass, not when somebody looks for cycles
            half.halves = weakref.proxy(self)

    def prepare(self, init_forward_metadata: Callable) -> None:
        for half in self.both:
            init_forward_metadata(self.backend, half.batch)
            half.metadata = self.backend.forward_metadata

    def run(self, model: Callable):
        """What model(batch, rows) returns, of both halves' rows."""
        whole = self.backend.forward_metadata
        prompt_passes.wrap_sums_of(self.coordinator, "gives_turns", _sum_in_turn)
        self.turns = Turns()
        try:
            with cuda_tensors.held(SUM_SMS):
                return self.together(self.turns.run(*(functools.partial(self.turn, half, model) for half in self.both)))
        finally:
            self.backend.forward_metadata = whole

    def together(self, parts):
        return together(parts)

    def turn(self, half: Half, model: Callable):
        self.begin(half)
        with _running.enter(half):
            return model(half.batch, half.at)

    def begin(self, half: Half) -> None:
        """What a half finds in its turn."""
        self.backend.forward_metadata = half.metadata

    def start_sum(self, x: torch.Tensor):
        """Over the cards, in place. Its `wait` makes the stream wait."""
        _seen["sums"] += 1
        return torch.distributed.all_reduce(x, group=self.coordinator.device_group, async_op=True)

    def summed(self, half: Half, x: torch.Tensor) -> torch.Tensor:
        """x, the sum over the cards in place, in front of which the other half has had its turn."""
        work = self.start_sum(x)
        self.turns.next(half.number)
        self.begin(half)
        work.wait()
        return x


@dataclass
class Pass:
    """How a batch's rows go through the model. tried: the trial that times it; is_kept: it is run more than once."""

    rows: int
    halves: Halves | None
    tried: trial.Trial | None = None
    is_kept: bool = False

    def run(self, model: Callable, whole: Callable):
        start = trial.event() if self.tried else None
        found = whole() if self.halves is None else self.halves.run(model)
        if self.tried:
            way = trial.WHOLE if self.halves is None else trial.HALVES
            self.tried.add(way, self.rows, start, trial.event())
        return found


def together(parts):
    """Of tensors [rows, ...], or of tuples and lists of them, one. Raises TypeError for others."""
    one = parts[0]
    if isinstance(one, torch.Tensor):
        return torch.cat(parts)
    if type(one) in (tuple, list):
        return type(one)(map(together, zip(*parts, strict=True)))
    if one is None:
        return None
    raise TypeError(way_out(PATCH, f"the model's forward returned a {type(one).__name__}, whose rows nobody knows"))


# ---- a half's batch


ROW_FIELDS = ("input_ids", "positions", "out_cache_loc")
REQUESTS = ("req_pool_indices", "req_pool_indices_cpu", "orig_seq_lens", "rids", "lora_ids")
REQUESTS += ("extend_logprob_start_lens_cpu", "seq_lens", "seq_lens_cpu", "extend_seq_lens", "extend_seq_lens_cpu")
REQUESTS += ("extend_prefix_lens", "extend_prefix_lens_cpu", "extend_start_loc")
# a batch that has any of these has rows or requests that nobody cuts
_NOT_CUT = ("input_embeds", "replace_embeds", "tbo_children", "attn_cp_metadata", "attn_dcp_metadata")
_NOT_CUT += ("out_cache_loc_virtual", "out_cache_loc_dsv4", "global_num_tokens_cpu", "mm_input_embeds")
_NOT_CUT += ("encoder_swa_replay", "encoder_swa_row_floor", "encoder_swa_compress_rows", "token_type_ids")


def _half(batch, rows: slice, requests: slice):
    half = copy.copy(batch)
    for name in ROW_FIELDS:
        setattr(half, name, getattr(batch, name)[rows])
    for name in REQUESTS:
        found = getattr(batch, name, None)
        if found is not None:
            part = found[requests]
            setattr(half, name, part.clone() if isinstance(part, torch.Tensor) else list(part))
    half.batch_size = len(half.req_pool_indices)
    half.extend_num_tokens = rows.stop - rows.start
    for name in ("num_token_non_padded", "global_num_token_non_padded"):
        if getattr(batch, name, None) is not None:
            setattr(half, name, torch.full_like(getattr(batch, name), half.extend_num_tokens))
    for name in ("num_token_non_padded_cpu", "global_num_token_non_padded_cpu"):
        if getattr(batch, name, None) is not None:
            setattr(half, name, half.extend_num_tokens)
    return half


def first_half(batch, cut: Cut):
    half = _half(batch, slice(0, cut.rows), slice(0, cut.request + 1))
    if cut.is_within:
        missing = batch.extend_seq_lens_cpu[cut.request] - cut.offset
        for name in ("seq_lens", "seq_lens_cpu", "extend_seq_lens", "extend_seq_lens_cpu"):
            getattr(half, name)[-1] -= missing
    half.seq_lens_sum = int(half.seq_lens_cpu.sum())
    return half


def second_half(batch, cut: Cut):
    first = cut.request if cut.is_within else cut.request + 1
    half = _half(batch, slice(cut.rows, cut.whole), slice(first, batch.batch_size))
    half.extend_start_loc = (half.extend_start_loc - cut.rows).clamp_(min=0)
    if cut.is_within:
        for name in ("extend_prefix_lens", "extend_prefix_lens_cpu"):
            getattr(half, name)[0] += cut.offset
        for name in ("extend_seq_lens", "extend_seq_lens_cpu"):
            getattr(half, name)[0] -= cut.offset
    half.seq_lens_sum = int(half.seq_lens_cpu.sum())
    return half


# ---- which batches


def replace_init_forward_metadata(original: Callable) -> Callable:
    """For DeepseekV4AttnBackend.init_forward_metadata(self, forward_batch)."""

    @functools.wraps(original)
    def init_forward_metadata(self, forward_batch):
        made = None if torch.compiler.is_compiling() else _pass_of(self, forward_batch)
        if made is not None:
            if made.halves is not None:
                made.halves.prepare(original)
            setattr(forward_batch, PASS, made)
        return original(self, forward_batch)

    return init_forward_metadata


def replace_model_forward(original: Callable) -> Callable:
    """For DeepseekV4Model.forward(self, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors=None)."""

    @functools.wraps(original)
    def forward(self, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors=None):
        made = None if torch.compiler.is_compiling() else vars(forward_batch).get(PASS)
        if made is not None and not made.is_kept:
            delattr(forward_batch, PASS)
        whole = functools.partial(
            original, self, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors=pp_proxy_tensors
        )
        if made is None or len(input_ids) != made.rows or input_embeds is not None:
            return whole()
        return made.run(lambda batch, rows: original(self, input_ids[rows], positions[rows], batch, None), whole)

    return forward


def least_rows() -> int:
    """Of a half, of each pass; 0: it is tried out."""
    return patching.value(PATCH)


def _pass_of(backend, batch) -> Pass | None:
    """None: nothing is asked about such a batch, or it goes whole for a reason."""
    if batch.forward_mode.name != "EXTEND" or backend.model_runner.is_draft_worker:
        return None
    asked = least_rows()
    each = asked or ROWS
    if not batch.extend_seq_lens_cpu or batch.extend_prefix_lens_cpu is None or len(batch.input_ids) < 2 * each:
        return None
    state = importlib.import_module(PARALLEL_STATE)
    tp = state._TP
    if tp.world_size == 1:
        return None
    cut = cut_of(batch)
    why = why_whole(state, backend, batch, cut, each)
    if why is not None:
        count(why, cut.whole)
        return None
    tried = None if asked else _trials.of(cut.whole)
    if tried is not None and tried.next_way(tp.cpu_group) == trial.WHOLE:
        count("by its time, or to find that out", cut.whole)
        return Pass(cut.whole, None, tried) if tried.is_timed() else None
    count(None, cut.whole)
    return Pass(cut.whole, Halves(backend, tp, batch, cut), tried if tried and tried.is_timed() else None)


def cut_of(batch, at: int | None = None) -> Cut:
    return Cut([int(n) for n in batch.extend_seq_lens_cpu], [int(n) for n in batch.extend_prefix_lens_cpu], at)


def why_whole(state, backend, batch, cut: Cut, each: int, but: tuple[str, ...] = ()) -> str | None:
    """but: ways to sum of SGLang's that are not asked for."""
    return (
        why_not_here(state) or why_not(backend, batch, cut, each) or _why_not_sums(state._TP, backend, batch, cut, but)
    )


def why_not_here(state) -> str | None:
    """What keeps all of a server's passes whole."""
    tp = state._TP
    return prompt_passes.first(
        prompt_passes.of_sums(tp, ONE_ORDER_RANKS)
        | {f"what has the same sums ({DEALT_STREAMS})": asks_for(settings().choices, DEALT_STREAMS)}
        | prompt_passes.of_server(state, tp, state._PP, "batches")
        | _of_experts()
    ) or (None if see_the_same_cards(tp.world_size) else prompt_passes.OTHER_CARDS)


def _of_experts() -> dict[str, bool]:
    """What looks at a layer's experts, and takes rows for the first of a pass, or a layer for one that is run once."""
    capturers, recorders = sys.modules.get(CAPTURERS), sys.modules.get(RECORDERS)
    recorder = recorders and recorders.get_global_expert_distribution_recorder()
    return {
        "the experts of rows are returned (--enable-return-routed-experts)": capturers is not None
        and capturers.get_global_experts_capturer() is not None,
        "the use of experts is recorded (--expert-distribution-recorder-mode)": recorders is not None
        and isinstance(recorder, recorders._ExpertDistributionRecorderReal),
    }


def why_not(backend, batch, cut: Cut, each: int) -> str | None:
    """What keeps this pass whole."""
    if torch.cuda.is_current_stream_capturing():
        return "under capture"
    given = [name for name in _NOT_CUT if _says_something(getattr(batch, name, None))]
    return prompt_passes.first(
        {
            "rows behind those of its prompts": len(batch.input_ids) != cut.whole,
            f"no place to cut it into halves of {each} rows": cut.least < each * 3 // 4,
            f"a batch with {', '.join(given)}": bool(given),
            "images": any(one is not None for one in batch.mm_inputs or ()),
            "adapters (LoRA)": any(one is not None for one in batch.lora_ids or ()),
            "what DeepSeek-V4.1 keeps beside its metadata": _has_v41s(backend),
            "a cache that is sparse on the host (HiSparse)": backend.hisparse_coordinator is not None,
            "compressors with states of their own": backend.online_c128_mtp.enabled(),
        }
    )


def _why_not_sums(tp, backend, batch, cut: Cut, but: tuple[str, ...]) -> str | None:
    rows = batch.input_ids.new_empty(cut.least, backend.model_runner.model_config.hidden_size, dtype=torch.bfloat16)
    return None if prompt_passes.is_for_nccl(tp, rows, but) else "others than NCCL sum"


def _says_something(value) -> bool:
    return isinstance(value, torch.Tensor) or bool(value)


def _has_v41s(backend) -> bool:
    """Whether a pass leaves states in the backend or its pool that a half would find (0.5.21 and later)."""
    replays = getattr(backend, "low_ratios", ()) or getattr(backend, "enable_decoder_swa_bounded_replay", False)
    return bool(replays) or getattr(backend.token_to_kv_pool, "request_window", None) is not None


def _sum_in_turn(original: Callable, input_):
    half = _running.layer
    if half is None:
        return original(input_)
    term = finished(input_)
    return half.halves.summed(half, term) if half.sums(term) else original(term)


def count(why: str | None, rows: int) -> None:
    def found() -> dict:
        return {**_seen, "whole": dict(_left), "found": _trials.decided()}

    prompt_passes.count(PATCH, why, rows, seen=_seen, left=_left, describe=_describe, found=found)


def _describe() -> str:
    text = f"{PATCH}: {_seen['passes']} passes of {2 * (least_rows() or ROWS)} rows and more in halves that take turns"
    return "; ".join([text, *(f"{count} whole: {why}" for why, count in _left.items()), *_trials.told()])
