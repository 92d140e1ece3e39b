#!/usr/bin/env python3
"""Microseconds that our Python takes in front of the launches of a prompt's layer, on this CPU. No GPU: where CUDA and
the compiled module are asked, stand-ins answer at once. What is left is adapters, operators' checks and torch.

    python3 bench/host_time.py [CASE ..] [--rows 4096] [--calls 2000] [--profile]

Each line is the least of several stretches, as others may use the CPU; --profile says where the time of a case goes.
What SGLang does around the seams, the driver's launches and CUDA's allocator come on top.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import ctypes
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import needs_torch  # noqa: F401
import torch

from deepseek_v4_sm120.ops import all_reduce as all_reduce_op
from deepseek_v4_sm120.ops import index_select as index_select_op
from deepseek_v4_sm120.ops.shared import cuda_tensors, extension
from deepseek_v4_sm120.ops.shared.checks import Call
from deepseek_v4_sm120.sglang_patches import device_gate
from deepseek_v4_sm120.sglang_patches.adapters import (
    all_reduce,
    bf16_linear,
    compressor,
    fp8_linear,
    index_select,
    index_select_dealt,
    mhc,
    mhc_sum,
    mxfp4_moe,
    router_topk,
    sparse_decode,
    wo_a,
)
from deepseek_v4_sm120.specs import compressor as compressor_specs

HIDDEN, EXPERTS, TOPK, INTER, HEADS = 4096, 256, 6, 1024, 32  # Flash's, of one of two ranks
STRETCHES, SMS, CAPABILITY = 20, 188, (12, 0)
M_MMAP_MAX, M_TRIM_THRESHOLD = -4, -1  # malloc.h
BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32


class StandIn(ModuleType):
    """`_C`: launches do nothing, and what is asked of sizes is small."""

    KV_NOPE_DIM, KV_ROPE_DIM, KV_HEAD_DIM, KV_DATA_BYTES, KV_SCALE_BYTES = 448, 64, 512, 576, 8
    KV_TOKEN_BYTES, KV_TILE, KV_PAGE_ALIGN = 584, 64, 576
    INDEX_HEADS, INDEX_DIM, INDEX_PAGE, INDEX_MAX_K = 64, 128, 64, 1024
    mhc_fused_rows, mxfp4_moe_max_tiled_experts, sparse_decode_max_control_words = 128, 1024, 1024

    def stream_sms(self, stream, of_device):
        return of_device

    def mhc_fits(self, **_):
        return True

    def mhc_card_is_shared(self):
        return False

    def mhc_workspace(self, rows, **_):
        return 0, 4096 * rows, rows // 2

    def sparse_decode_workspace(self, **_):
        return 4096, 64

    def mxfp4_moe_problem(self, **_):
        return ""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        found = (lambda **_: 4096) if name.endswith("_bytes") else (lambda **_: None)
        setattr(self, name, found)
        return found


@contextlib.contextmanager
def without_a_gpu():
    """For the duration: tensors of the CPU are a served card's."""
    patches = [
        mock.patch.dict(sys.modules, {extension._NAME: StandIn(extension._NAME)}),
        mock.patch.object(Call, "on_cuda", lambda self: None),
        mock.patch.object(device_gate, "serves", lambda device: True),
        mock.patch.object(cuda_tensors, "_all_sms", lambda index: SMS),
        mock.patch.object(cuda_tensors, "current_stream", lambda index: 0),
        mock.patch.object(cuda_tensors, "on_device_of", lambda tensor: contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: CAPABILITY),
        mock.patch.object(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, create=True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        mock.patch.object(torch, "bmm", lambda *_, **__: None),
        mock.patch.object(index_select_op, "has_fp8_mma", lambda index: True),
        mock.patch("deepseek_v4_sm120.ops.shared.zeroed_words.ZeroedWords.take", lambda *_: WORDS),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


class Plan(NamedTuple):
    """Of a compressor's step with many tokens of a request, as SGLang has it."""

    compress_ratio: int
    plan_c: torch.Tensor
    plan_w: torch.Tensor
    is_decode: bool = False


WORDS = torch.zeros(1024, dtype=INT32)


def nothing(*_, **__):
    """SGLang's own."""


def of_boundary(rows: int) -> Callable:
    call = mhc.replace_fused_post_pre(nothing)
    f, streams = torch.zeros(rows, HIDDEN, dtype=BF16), torch.zeros(rows, 4, HIDDEN, dtype=BF16)
    post, comb = torch.zeros(rows, 4, 1), torch.zeros(rows, 4, 4)
    fn, scale, base, norm = torch.zeros(24, 4 * HIDDEN), torch.zeros(3), torch.zeros(24), torch.zeros(HIDDEN).to(BF16)
    numbers = (1e-6, 1e-6, 1e-6, 2.0, 20)
    return lambda: call(f, streams, post, comb, fn, scale, base, *numbers, norm_weight=norm, norm_eps=1e-6)


def of_experts(rows: int) -> Callable:
    shapes = (EXPERTS, 2 * INTER, HIDDEN // 2), (EXPERTS, HIDDEN, INTER // 2)
    w13, w2 = (torch.empty(shape, dtype=torch.uint8) for shape in shapes)  # never written: no memory
    scales = [torch.empty((*w.shape[:2], w.shape[2] // 16), dtype=torch.uint8) for w in (w13, w2)]
    experts = mxfp4_moe.Experts(w13, scales[0], w2, scales[1], 0, False, 10.0, "bf16")
    layer = SimpleNamespace(**{mxfp4_moe.KEPT: experts})
    module = ModuleType("host_time_dispatcher")
    module.StandardCombineInput = lambda hidden_states: hidden_states
    sys.modules[module.__name__] = module
    routed = SimpleNamespace(topk_ids=torch.zeros(rows, TOPK, dtype=INT32), topk_weights=torch.zeros(rows, TOPK))
    dispatched = type("Dispatched", (), {"__module__": module.__name__})()
    dispatched.topk_output, dispatched.hidden_states = routed, torch.zeros(rows, HIDDEN, dtype=BF16)
    call = mxfp4_moe.replace_marlin_apply(nothing)
    return lambda: call(None, layer, dispatched)


def of_attention(rows: int, extra_page_size: int = 64, extra_width: int = 512) -> Callable:
    def pool(page_size):
        return torch.zeros(16, page_size * 592, dtype=torch.uint8)[:, : page_size * 584].view(16, page_size, 1, 584)

    given = {
        "q": torch.zeros(rows, 1, HEADS, 512, dtype=BF16),
        "k_cache": pool(256),
        "head_dim_v": 512,
        "softmax_scale": 512**-0.5,
        "indices": torch.zeros(rows, 1, 128, dtype=INT32),
        "topk_length": torch.zeros(rows, dtype=INT32),
        "attn_sink": torch.zeros(HEADS),
        "extra_k_cache": pool(extra_page_size),
        "extra_indices_in_kvcache": torch.zeros(rows, 1, extra_width, dtype=INT32),
        "extra_topk_length": torch.zeros(rows, dtype=INT32),
    }
    call = sparse_decode.replace_sm120(nothing)
    layer = SimpleNamespace(tp_q_head_num=HEADS)
    forward = sparse_decode.replace_backend_forward(lambda *_: call(**given))
    return lambda: forward(None, None, None, None, layer)


def of_indexer(rows: int, ranks: int = 1) -> Callable:
    logits, topk = index_select.replace_logits(nothing), index_select.replace_topk(nothing)
    q, pages = torch.zeros(rows, 1, 64, 128, dtype=torch.float8_e4m3fn), torch.zeros(16, 64, 1, 132, dtype=torch.uint8)
    weights, lengths = torch.zeros(rows, 64), torch.zeros(rows, dtype=INT32)
    table = torch.zeros(rows, 1024, dtype=INT32)  # dealt lists need no other type then
    out = torch.zeros(rows, 512, dtype=INT32)
    group = SimpleNamespace(world_size=ranks, rank_in_group=0, all_gather_into_tensor=nothing)

    def forward_c4_indexer(*_):
        scores = logits(q, pages, weights, lengths, table, None, 65536, False)
        topk(scores, lengths, table, out, 64)

    forward = index_select.replace_forward(forward_c4_indexer)
    mode = SimpleNamespace(is_decode=lambda: False)
    batch, indexer = SimpleNamespace(forward_mode=mode), SimpleNamespace(use_fp4_indexer=False)

    def run():
        with index_select_dealt._prompt.enter(group if ranks > 1 else None, pairs=1 << 40):
            forward(batch, q, None, indexer, batch)

    return run


def of_wo_a(rows: int) -> Callable:
    groups, outputs, inputs = 4, 1024, 4096
    weight = wo_a.StoredWeight(torch.zeros(groups * outputs, inputs, dtype=torch.float8_e4m3fn), requires_grad=False)
    weight.scale = torch.nn.Parameter(torch.zeros(groups * outputs // 128, inputs // 128), requires_grad=False)
    x, equation = torch.zeros(rows, groups, inputs, dtype=BF16), wo_a.op.EQUATION
    attention = SimpleNamespace(wo_a=SimpleNamespace(weight=weight))
    rope = wo_a.replace_rope(nothing)
    rotated, freqs, positions = x[..., -64:], torch.zeros(9, 32, dtype=torch.complex64), torch.zeros(rows).long()

    def product(self):
        rope(rotated, None, freqs, positions, True)
        return torch.einsum(equation, x, self.wo_a.weight.view(groups, outputs, -1))

    forward = wo_a.replace_forward(product)
    return lambda: forward(attention)


def of_dense(rows: int) -> Callable:
    """What stays SGLang's: an FP8 layer, the router's logits and its choice."""
    x, weight = torch.zeros(rows, HIDDEN, dtype=BF16), torch.zeros(EXPERTS, HIDDEN, dtype=BF16)
    logits, bias = torch.zeros(rows, EXPERTS), torch.zeros(EXPERTS)

    class MoEGate:
        is_deepseek_v4 = True

    gate, layer = MoEGate(), SimpleNamespace(weight=weight)
    gate.weight = weight
    told = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False))
    stock = FunctionType(nothing.__code__, {"get_exec": lambda: told})
    of_gate, of_layer = bf16_linear.replace_gate(stock), fp8_linear.replace_apply(nothing)
    of_topk = router_topk.replace_masked(nothing)

    def run():
        of_layer(None, layer, x)
        of_gate(gate, x)
        of_topk(None, logits, bias, TOPK, True, "sqrtsoftplus")

    return run


def of_compressor(rows: int) -> Callable:
    """SGLang's own, too, of a prompt's rows."""
    made = compressor_specs.make_step("c4", [compressor_specs.Request(5, 4)], device="cpu").arguments()
    given = {
        "kv_score_buffer": made["state"],
        "kv_score_input": torch.zeros(rows, made["kv_score"].shape[1]),
        "ape": made["ape"],
        "head_dim": made["norm_weight"].shape[0],
        "norm": SimpleNamespace(weight=made["norm_weight"], variance_epsilon=1e-6),
        "freqs_cis_cache": made["freqs_cis"],
        "kv_cache": made["cache"],
        "is_indexer": False,
        "compress_ratio": 4,
        "page_size": made["page_size"],
        "out_loc": torch.zeros(rows, dtype=torch.int64),
    }
    plan = Plan(4, made["plan"], made["writes"])
    backend = SimpleNamespace(_get_paged_compress_metadata=lambda ratio: plan)
    call = compressor.replace_all_in_one(nothing)
    return lambda: call(backend, **given)


def of_sum(rows: int) -> Callable:
    """A layer's forward with the two sums between the cards that it asks for: SGLang's, of a prompt's rows."""
    x = torch.zeros(rows, HIDDEN, dtype=BF16)
    sums = object.__new__(all_reduce_op.AllReduce)
    sums.rank, sums.ranks, sums.device, sums.max_rows = 0, 2, torch.device("cpu"), all_reduce_op.MAX_ROWS
    sums.hidden, sums.one_shot_rows, sums.num_sms = HIDDEN, 64, SMS
    theirs = SimpleNamespace(disabled=True, should_custom_ar=lambda x: False)
    coordinator = SimpleNamespace(world_size=2, ca_comm=all_reduce.Communicator(theirs, sums))
    coordinator.is_symmetric_memory_enabled = lambda: False

    def all_reduce_of_the_coordinator(input_):
        return None if coordinator.ca_comm.should_custom_ar(input_) else input_

    coordinator.all_reduce = all_reduce_of_the_coordinator
    state = ModuleType(all_reduce.PARALLEL_STATE)
    state._TP = state._ATTN_TP = coordinator
    state._PDMUX_PREFILL_TP_GROUP, state._PP = None, SimpleNamespace(world_size=1)
    sys.modules[state.__name__] = state

    def layer(self):
        coordinator.all_reduce(x)
        coordinator.all_reduce(x)

    forward = mhc_sum.replace_layer_forward(layer)
    return lambda: forward(coordinator)


CASES = {
    "boundary": of_boundary,
    "experts": of_experts,
    "attention, C4": of_attention,
    "attention, C128": lambda rows: of_attention(rows, 2, 64),
    "indexer": of_indexer,
    "indexer, dealt to 2": lambda rows: of_indexer(rows, 2),
    "wo_a": of_wo_a,
    "dense layer, router": of_dense,
    "compressor": of_compressor,
    "layer with its two sums": of_sum,
}


def keep_memory() -> None:
    """The C library keeps what is given back to it, as CUDA's allocator does: results are large, and would be mapped
    anew by every call."""
    for parameter, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 1 << 30)):
        ctypes.CDLL(None).mallopt(parameter, value)


def microseconds(run: Callable, calls: int) -> float:
    run()
    found = []
    for _ in range(STRETCHES):
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        found.append((time.perf_counter() - begin) / calls * 1e6)
    return min(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    with without_a_gpu(), torch.inference_mode():
        for name in options.cases:
            run = CASES[name](options.rows)
            print(f"{microseconds(run, options.calls // STRETCHES + 1):8.1f} us  {name}", flush=True)
            if options.profile:
                with cProfile.Profile() as profile:
                    for _ in range(options.calls):
                        run()
                pstats.Stats(profile).sort_stats("tottime").print_stats(18)
    return 0


if __name__ == "__main__":
    sys.exit(main())
