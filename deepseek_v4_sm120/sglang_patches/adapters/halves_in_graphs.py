"""Prompts in halves within SGLang's breakable prefill graphs: the host launches a few graphs a layer, not each kernel.

    replace_init_for_capture   the attention backend's metadata for a pass that is captured: the halves', too
    replace_init_for_replay    those of a batch, read into what the graphs were captured with
    replace_can_run_graph      the runner's question whether a batch goes by its graphs: not one that is cut elsewhere

A captured pass is graphs with breaks between, which run as ordinary code at each replay: SGLang's at a layer's
attention, and here one at each sum. The break starts a half's sum on NCCL's own stream and goes on to the other half,
whose last sum it waits for. So threads take turns (prompts_in_halves.py) while a pass is captured, and a replay is one
list. No graph is under capture while the turn changes: CUDA has a capture end in the thread that began it.

Graphs have the middle of their rows as cut, and a batch that goes by them its own there: a prompt behind a prefix of
whole pages, or as many rows in front of the cut as behind. What a half's rows do not fill is padding, as in SGLang's.

Passes go so by DSV4_SM120_SET=prompts_in_halves=ROWS, of as many rows for each half: to try out which way is faster
both would have to be captured.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
from collections.abc import Callable

import torch

from deepseek_v4_sm120.ops.shared import cuda_tensors
from deepseek_v4_sm120.sglang_patches.adapters import prompts_in_halves as eager
from deepseek_v4_sm120.sglang_patches.adapters.all_reduce import PARALLEL_STATE
from deepseek_v4_sm120.sglang_patches.adapters.prompts_in_halves import Cut, Half, Halves, Pass

BREAKABLE = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"
CONTEXT = "sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph"
WEAK = "sglang.srt.model_executor.runner_backend_utils.weak_ref_tensor"
_HALVES = "_dsv4_sm120_halves"  # of a captured pass's metadata: its CapturedHalves
_COUNTS = ("num_token_non_padded", "global_num_token_non_padded")  # tensors that captured kernels read
# of a half's batch: its own, where its rows are the graphs'
_OWN = (*eager.REQUESTS, "batch_size", "seq_lens_sum", "extend_num_tokens")
_OWN += ("num_token_non_padded_cpu", "global_num_token_non_padded_cpu")


class CapturedHalves(Halves):
    """Of one captured pass. A half's `batch` has the graphs' rows and the last batch's requests."""

    def __init__(self, backend, coordinator, batch, cut: Cut):
        super().__init__(backend, coordinator, batch, cut)
        self.rows = cut.rows
        self._capture = None  # SGLang's, while it records
        self._whole: tuple = ()  # what `leave` gives back
        self._holding = contextlib.ExitStack()
        self._works: dict[int, object] = {}  # number of a half: its sum that is under way
        self._counts = [{name: getattr(half.batch, name, None) for name in _COUNTS} for half in self.both]

    def load(self, prepare: Callable, batch, static) -> None:
        """A replay's batch. static: its padded one; prepare: SGLang's, of metadata."""
        cut = eager.cut_of(batch, self.rows)
        for half, made in zip(self.both, (eager.first_half(batch, cut), eager.second_half(batch, cut)), strict=True):
            padded = copy.copy(static)
            for name in eager.ROW_FIELDS:
                setattr(padded, name, getattr(static, name)[half.at])
            for name in _OWN:
                if hasattr(made, name):
                    setattr(padded, name, getattr(made, name))
            for name, captured in self._counts[half.number].items():
                if captured is not None:
                    setattr(padded, name, captured.fill_(made.extend_num_tokens))
            prepare(self.backend, half.metadata, made, static_forward_batch=padded)
            half.batch = padded
        eager.count(None, cut.whole)

    # ---- what runs between graphs

    def enter(self) -> None:
        self._whole = self.backend.forward_metadata, _context().forward_batch
        self.begin(self.both[0])

    def begin(self, half: Half) -> None:
        super().begin(half)
        _context().forward_batch = half.batch
        work = self._works.pop(half.number, None)
        if work is not None:
            work.wait()  # makes the stream wait

    def sum_and_begin(self, half: Half, x: torch.Tensor, following: Half) -> None:
        self._works[half.number] = self.start_sum(x)
        self.begin(following)

    def leave(self) -> None:
        self.backend.forward_metadata, _context().forward_batch = self._whole
        self._whole = ()

    def enter_replay(self) -> None:
        self.enter()
        self._holding.close()  # of a replay that has failed
        self._holding.enter_context(cuda_tensors.held(eager.SUM_SMS))  # of the breaks' kernels: graphs have theirs

    def leave_replay(self) -> None:
        self._holding.close()
        self.leave()

    # ---- the course of a pass

    def run(self, model: Callable):
        capture = self._capture = importlib.import_module(BREAKABLE)._current_capture_var.get()
        self.enter()
        if capture is None:  # before it is captured, for what is compiled at first
            try:
                return super().run(model)
            finally:
                self.leave()
        self._end_graph(self.enter_replay)
        try:
            return super().run(model)
        except BaseException:
            if capture._current_graph is None:  # SGLang ends one on its way out
                self._begin_graph()
            raise
        finally:
            self.leave()

    def together(self, parts):
        """Behind both halves, in the caller's thread: in a graph of its own."""
        if self._capture is not None:
            self._begin_graph()
        return super().together(parts)

    def turn(self, half: Half, model: Callable):
        if self._capture is None:
            return super().turn(half, model)
        self._begin_graph()
        found = super().turn(half, model)
        other = self.both[1 - half.number]
        is_last = self.turns.is_over(other.number)
        self._end_graph(self.leave_replay if is_last else functools.partial(self.begin, other))
        return found

    def summed(self, half: Half, x: torch.Tensor) -> torch.Tensor:
        if self._capture is None:
            return super().summed(half, x)
        other = self.both[1 - half.number]
        following = half if self.turns.is_over(other.number) else other
        # nothing of a capture is looked at, so no sum is made; a graph's memory is kept by the graphs
        self._end_graph(functools.partial(self.sum_and_begin, half, _weak(x), following))
        self.turns.next(half.number)
        self.begin(half)
        self._begin_graph()
        return x

    def _begin_graph(self) -> None:
        capture = self._capture
        capture._begin_new_segment()

    def _end_graph(self, behind: Callable[[], None]) -> None:
        """behind: run at each replay, in front of the next graph."""
        capture = self._capture
        capture._end_current_segment()
        capture.cuda_graph._break_fns.append(behind)


def replace_init_for_capture(original: Callable) -> Callable:
    """For DeepseekV4AttnBackend.init_forward_metadata_for_breakable_cuda_graph_capture(self, forward_batch)."""

    @functools.wraps(original)
    def init_forward_metadata_for_breakable_cuda_graph_capture(self, forward_batch):
        halves = _captured_halves(self, forward_batch)
        if halves is not None:
            halves.prepare(original)
            setattr(forward_batch, eager.PASS, Pass(len(forward_batch.input_ids), halves, is_kept=True))
        found = original(self, forward_batch)
        if halves is not None:
            setattr(found, _HALVES, halves)
        return found

    return init_forward_metadata_for_breakable_cuda_graph_capture


def replace_init_for_replay(original: Callable) -> Callable:
    """For DeepseekV4AttnBackend.prepare_forward_metadata_for_breakable_cuda_graph_replay(self, capture_metadata,
    forward_batch, *, static_forward_batch=None)."""

    @functools.wraps(original)
    def prepare_forward_metadata_for_breakable_cuda_graph_replay(
        self, capture_metadata, forward_batch, *, static_forward_batch=None
    ):
        halves = getattr(capture_metadata, _HALVES, None)
        if halves is not None:
            halves.load(original, forward_batch, static_forward_batch)
        return original(self, capture_metadata, forward_batch, static_forward_batch=static_forward_batch)

    return prepare_forward_metadata_for_breakable_cuda_graph_replay


def replace_can_run_graph(original: Callable) -> Callable:
    """For PrefillCudaGraphRunner.can_run_graph(self, forward_batch)."""

    @functools.wraps(original)
    def can_run_graph(self, forward_batch):
        return original(self, forward_batch) and _fits(self, forward_batch)

    return can_run_graph


def _fits(runner, batch) -> bool:
    """Whether the batch is cut where its graphs are, if they are."""
    captured = runner.attn_metadata_buffers
    if not captured:
        return True
    rows = runner._pad_to_bucket(len(batch.input_ids), runner.capture_num_tokens)
    halves = next((getattr(found, _HALVES, None) for key, found in captured.items() if key.size == rows), None)
    if halves is None:
        return True
    cut = eager.cut_of(batch, halves.rows)
    backend = runner.model_runner.attn_backend
    is_cut = batch.forward_mode.name == "EXTEND" and cut.rows == halves.rows < cut.whole
    return is_cut and eager.why_not(backend, batch, cut, 0) is None


def _captured_halves(backend, batch) -> CapturedHalves | None:
    rows, each = len(batch.input_ids), eager.least_rows()
    if batch.forward_mode.name != "EXTEND" or backend.model_runner.is_draft_worker or not each:
        return None
    if rows < 2 * each or rows % (2 * eager.PAGE):
        return None
    state = importlib.import_module(PARALLEL_STATE)
    cut = eager.cut_of(batch, rows // 2)
    # while graphs are captured SGLang has its own NCCL switched on, which would sum within them
    why = eager.why_whole(state, backend, batch, cut, each, but=("pynccl_comm",))
    if why is not None:
        eager.count(f"captured: {why}", rows)
        return None
    return CapturedHalves(backend, state._TP, batch, cut)


def _context():
    """Of SGLang's breaks, which ask it for the batch."""
    return importlib.import_module(CONTEXT).get_tc_piecewise_forward_context()


def _weak(x: torch.Tensor) -> torch.Tensor:
    return importlib.import_module(WEAK).weak_ref_tensors(x)
