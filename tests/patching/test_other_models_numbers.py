"""The numbers of DeepSeek-V4-Pro's widths, and of what ours still serves of DeepSeek-V4.1 where nobody told the process
its model: SGLang's own code out of the 0.5.23 wheel on the CPU, with ours in its place (the reference computes) and
without. The same results; what is not ours comes to SGLang's own code with the very arguments."""

from __future__ import annotations

import ast
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.reference import bf16_linear as linear_reference
from deepseek_v4_sm120.reference import mhc as mhc_reference
from deepseek_v4_sm120.reference import sparse_decode as attention_reference
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.reference.mxfp4_moe import mxfp4_moe as experts_reference
from deepseek_v4_sm120.sglang_patches import device_gate
from deepseek_v4_sm120.sglang_patches.adapters import (
    bf16_linear,
    fp8_linear,
    index_select,
    mhc,
    mxfp4_moe,
    sparse_decode,
    wo_a,
)
from deepseek_v4_sm120.sglang_patches.rows.mhc import LAYER_BASE
from deepseek_v4_sm120.specs.fp8_linear import make_weight
from deepseek_v4_sm120.specs.mhc import Shape as Streams
from deepseek_v4_sm120.specs.mhc import make_inputs as make_streams
from deepseek_v4_sm120.specs.mxfp4_moe import Shape as Experts
from deepseek_v4_sm120.specs.mxfp4_moe import make_inputs as make_experts
from deepseek_v4_sm120.specs.sparse_decode import CacheShape, Shape, make_inputs
from tests.adapters import test_mxfp4_moe as experts
from tests.adapters import wo_a_layer
from tests.adapters.test_mxfp4_moe import served as experts_served  # noqa: F401  a fixture
from tests.adapters.test_sparse_decode import LAYOUT
from tests.patching import test_wheel_wo_a as wheels

VERSION = "0.5.23"
ATTENTION = "sglang.kernels.ops.attention.flash_mla_sm120"


@pytest.fixture(autouse=True)
def open_gate(monkeypatch):
    monkeypatch.setattr(device_gate, "serves", lambda device: True)


# ---- attention: SGLang's torch form of the call that every layer makes on SM120


def stock_attention(wheel):
    tree = ast.parse(wheels.source(wheel, ATTENTION))
    wanted = ("_gather_and_dequant", "_sm120_sparse_decode_fwd")
    body = [n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]).startswith(("_NO", "_RO"))]
    body += [n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) in CONSTANTS]
    body += [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in wanted]
    names = {"torch": torch}
    exec(compile(ast.Module(body, []), "wheel", "exec"), names)

    def flash_mla_with_kvcache_sm120(**call):
        order = ("q", "k_cache", "indices", "topk_length", "attn_sink", "head_dim_v", "softmax_scale")
        others = {name: call[name] for name in ("extra_k_cache", "extra_topk_length")}
        extra = call["extra_indices_in_kvcache"]
        return names[wanted[1]](*(call[name] for name in order), extra_indices=extra, **others)

    return flash_mla_with_kvcache_sm120


CONSTANTS = ("_TILE_SIZE", "_NUM_TILES", "_SCALE_STRIDE", "_D")
CALLS = {  # (heads of the rank, heads of q, entries of a window's page, entries of the second cache's page, picks)
    "Pro, C4": (128, 128, 256, 64, 1024),
    "Pro, C128": (16, 16, 256, 2, 192),
    "V4.1, ratio 0": (32, 64, 256, None, None),
    "V4.1, ratio 1": (32, 64, 256, 256, 512),
    "V4.1, ratio 2": (32, 64, 256, 128, 512),
}


@pytest.mark.parametrize("name", CALLS)
def test_attention(name, sglang_wheel, monkeypatch):
    heads, padded, page, extra_page, picks = CALLS[name]
    calls, stock = [], stock_attention(sglang_wheel(VERSION))

    def operator(q, *arguments, out=None, return_lse, **options):
        calls.append(q.shape[2])
        options.pop("prefill")
        return attention_reference.sparse_decode(q, *arguments, **options)[0].to(torch.bfloat16)

    monkeypatch.setattr(sparse_decode.op, "sparse_decode", operator)
    monkeypatch.setattr(sparse_decode, "kv_page_layout", lambda: LAYOUT)
    extra = None if extra_page is None else CacheShape(extra_page, picks, lengths=(picks, 1, picks // 3))
    made = make_inputs(Shape(3, padded, CacheShape(page, 128, lengths=(128, 77, 1)), extra), device="cpu")
    made.q[:, :, heads:] = 0  # SGLang zeroes V4.1's padded heads
    if extra is not None:
        made.extra_indices[:, :, 5::7] = -1
    call = {
        **{"q": made.q, "k_cache": made.kv_pages, "indices": made.indices, "topk_length": made.topk_length},
        **{"head_dim_v": 512, "softmax_scale": 512**-0.5, "attn_sink": made.attn_sink},
        **{"extra_k_cache": made.extra_kv_pages, "extra_indices_in_kvcache": made.extra_indices},
        "extra_topk_length": made.extra_topk_length,
    }
    expected = stock(**call)[0][:, :, :heads]
    found = sparse_decode.replace_sm120(stock)(**call)[0][:, :, :heads]
    assert calls == [padded] and relative_error(found, expected) < 0.005


@pytest.mark.parametrize("token_bytes", [528, 288])
def test_v41s_own_cache_layouts_are_sglangs(token_bytes, monkeypatch):
    """They are for SM100; a page of another width never comes to ours."""
    monkeypatch.setattr(sparse_decode, "kv_page_layout", lambda: LAYOUT)
    made = make_inputs(Shape(2, 64, CacheShape(256, 128, lengths=128)), device="cpu")
    pages = torch.zeros(2, 256, 1, token_bytes, dtype=torch.uint8)
    call = {"q": made.q, "k_cache": pages, "head_dim_v": 512, "indices": made.indices}
    assert sparse_decode.replace_sm120(lambda **found: ("stock", found))(**call) == ("stock", call)


@pytest.mark.parametrize(("is_dsv41", "heads", "dim"), [(True, 32, 512), (False, 32, 576), (False, 256, 512)])
def test_other_attentions_keep_the_heads_that_their_kernels_want(is_dsv41, heads, dim):
    attention = SimpleNamespace(n_local_heads=heads, head_dim=dim, is_dsv41=is_dsv41, attn_sink=torch.zeros(64))
    assert sparse_decode.replace_kernel_num_heads(lambda self, rows: ("stock", rows))(attention, 4) == ("stock", 4)


# ---- the router


@pytest.mark.parametrize("sizes", [(384, 7168), (384, 5120), (128, 5120)], ids=["Pro", "V4.1", "its draft"])
@pytest.mark.parametrize("rows", [1, 256, 257])
def test_the_routers_own_forward(sizes, rows, sglang_wheel, monkeypatch):
    count, hidden = sizes
    calls = []
    names = {
        "torch": torch,
        "_is_cuda": True,
        "use_intel_amx_backend": lambda gate: False,
        "get_exec": lambda: SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False)),
        "GIVEN": {"linear_bf16_fp32": lambda x, w: x.float() @ w.float().T},
    }
    forward = wheels.take(sglang_wheel(VERSION), names, "MoEGate.forward", "sglang.srt.models.deepseek_v2")

    def operator(x, weight):
        calls.append(tuple(weight.shape))
        assert bf16_linear.op.takes(x, weight)
        return linear_reference.bf16_linear(x, weight).float()

    monkeypatch.setattr(bf16_linear.op, "bf16_linear", operator)
    generator = torch.Generator().manual_seed(rows)
    gate = type("MoEGate", (), {})()
    gate.is_deepseek_v4, gate.tiny_router_gemm_max_tokens = True, -1
    gate.weight = torch.randn((count, hidden), generator=generator).to(torch.bfloat16)
    x = torch.randn((rows, hidden), generator=generator).to(torch.bfloat16)
    expected = forward(gate, x)
    found = bf16_linear.replace_gate(forward)(gate, x)
    assert len(calls) == (rows <= 256) and relative_error(found, expected) < 1e-5


# ---- hyper-connections


def decoder_layer(wheel, hidden):
    """(layer, hc_pre) of the wheel; its Sinkhorn and its sum of the streams, which are kernels, by definition."""

    def hc_split_sinkhorn(mixes, scale, base, streams, iters, eps):
        m = mixes.squeeze(1)
        pre = torch.sigmoid(m[:, :4] * scale[0] + base[:4]) + eps
        post = 2 * torch.sigmoid(m[:, 4:8] * scale[1] + base[4:8])
        comb = mhc_reference.sinkhorn((m[:, 8:] * scale[2] + base[8:]).view(-1, 4, 4), iters, eps)
        return pre.unsqueeze(1), post.unsqueeze(1), comb.unsqueeze(1)

    def mhc_combine(x, pre, streams, dtype):
        return (pre[:, :, None] * x.view(x.shape[0], streams, -1)).sum(1).to(dtype)

    names = {
        **{"torch": torch, "F": torch.nn.functional, "compile_in_capture_mode": lambda function: function},
        **{"_is_npu": False, "_is_xpu": False, "_is_hip": False, "MHC_POST_MULT_VALUE": 2.0},
        "get_mhc_ops": lambda: SimpleNamespace(hc_split_sinkhorn=hc_split_sinkhorn),
        "use_symmetric_memory": lambda *args, **kwargs: nullcontext(),
        "GIVEN": {"mhc_combine": mhc_combine},
    }
    module, _, qualname = LAYER_BASE.partition(":")
    hc_pre = wheels.take(wheel, names, f"{qualname}.hc_pre", module)
    return SimpleNamespace(rms_norm_eps=1e-6, hc_eps=1e-6, hc_sinkhorn_iters=20, hc_mult=4, hidden=hidden), hc_pre


@pytest.mark.parametrize(("hidden", "ours"), [(7168, True), (5120, False), (6144, False)])
def test_the_pre_of_a_layer(hidden, ours, sglang_wheel, monkeypatch):
    calls, (layer, hc_pre) = [], decoder_layer(sglang_wheel(VERSION), hidden)

    def operator(streams, fn, scale, base, *, norm_weight, post_scale, sinkhorn_iters, hc_eps, **options):
        calls.append((streams.shape[2], sinkhorn_iters, post_scale))
        y, post, comb = mhc_reference.mhc_pre(streams, fn, scale, base, eps=hc_eps, iters=sinkhorn_iters)
        return post, comb, y.to(torch.bfloat16)

    monkeypatch.setattr(mhc.op, "mhc_pre", operator)
    made = make_streams(Streams(3, hidden=hidden), device="cpu")
    call = (layer, made.streams, made.fn, made.scale, made.base)
    expected, found = hc_pre(*call), mhc.replace_hc_pre(hc_pre)(*call)
    assert calls == ([(7168, 20, 2.0)] if ours else [])
    for one, other in zip(found[:3], expected[:3], strict=True):
        assert relative_error(one, other) < 0.004
    stock = mhc.replace_hc_post(lambda *given: "stock")
    result = stock(layer, SimpleNamespace(rows=3), made.streams, made.post, made.comb)
    assert result == "stock"  # an output whose sum over the ranks is still to come is no tensor


# ---- wo_a


def test_pros_projection(sglang_wheel, monkeypatch):
    """16 groups of 8 heads, at TP 8: loading and forward are SGLang's."""
    sizes = {"GROUPS": 16, "INPUTS": 4096, "HEADS": 128}
    for module in (wo_a_layer, wheels):
        for name, value in sizes.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(wheels, "LAYERS", 1)
    monkeypatch.setattr(wheels.Model.config, "num_hidden_layers", 1)
    monkeypatch.setattr(wo_a_layer.Linear.__init__, "__defaults__", (0, 1, 16 * wheels.OUTPUTS, 4096))
    operator = wo_a_layer.Operator()
    monkeypatch.setattr(wo_a.op, "wo_a", operator)
    wo_a._serve.cache_clear()
    inputs = wheels.inputs(5, 8)
    wheel = sglang_wheel(VERSION)
    expected, _ = wheels.Tree(wheel, monkeypatch, patched=False).run(*inputs, rank=3, ranks=8)
    found, model = wheels.Tree(wheel, monkeypatch, patched=True).run(*inputs, rank=3, ranks=8)
    assert operator.calls == [(5, True)] * wheels.LAYERS
    assert {type(layer.self_attn.wo_a.weight) for layer in model.model.layers} == {wo_a.StoredWeight}
    for result in (found, expected):
        assert relative_error(result, wheels.truth(*inputs, 3, 8)) < 0.0025


@pytest.mark.parametrize("changed", [{"is_dsv41": True}, {"block": [32, 32]}, {"head_dim": 576}, {"o_lora_rank": 96}])
def test_another_wo_a_is_made_and_loaded_by_sglang(changed):
    attention = SimpleNamespace(wo_a=wo_a_layer.Linear(), head_dim=512, qk_rope_head_dim=64, o_lora_rank=128)
    config = wo_a_layer.Fp8Config()
    assert wo_a.keeps(attention, config, "wo_a")
    config.weight_block_size = changed.get("block", config.weight_block_size)
    vars(attention).update(changed)
    assert not wo_a.keeps(attention, config, "wo_a")
    model, seen = torch.nn.Module(), []
    model.self_attn = torch.nn.Module()
    model.self_attn.wo_a = attention.wo_a
    weights = iter(())
    wo_a.replace_load_weights(lambda self, given: seen.append(given))(model, weights)
    assert seen == [weights]


def test_a_layer_that_is_not_ours_is_never_filled_with_unscaled_bytes():
    """One that the configuration leaves out among ours: E4M3 would be cast to its bf16 without the scales."""
    model = torch.nn.Module()
    for name in ("first", "second"):
        setattr(model, name, torch.nn.Module())
        getattr(model, name).wo_a = wo_a_layer.Linear()
    wo_a.store(model.first.wo_a, None)

    def load(self, weights):
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            if name in parameters:  # else SGLang says so, and goes on
                parameters[name].weight_loader(parameters[name], tensor)

    shape = model.second.wo_a.weight.shape
    load_weights = wo_a.replace_load_weights(load)
    for _ in range(2):  # weights may be loaded again
        load_weights(model, [("second.wo_a.weight", torch.ones(shape, dtype=torch.bfloat16))])
        assert model.second.wo_a.weight.float().mean() == 1
        with pytest.raises(ValueError, match="checkpoint's weight must be torch.bfloat16.*got torch.float8_e4m3fn"):
            load_weights(model, [("second.wo_a.weight", torch.ones(shape).to(torch.float8_e4m3fn))])


# ---- FP8 linear layers


def test_another_models_fp8_layers_are_sglangs_until_an_attention_of_ours_is_made(monkeypatch):
    monkeypatch.setattr(fp8_linear, "process", fp8_linear.Process())
    weight, scale = make_weight(1, 256, 256, torch.Generator().manual_seed(0))
    layer = SimpleNamespace(weight=weight[0], weight_scale_inv=scale[0])
    method = SimpleNamespace(block_quant=True)
    made = fp8_linear.replace_attention_init(lambda self, is_dsv41: setattr(self, "is_dsv41", is_dsv41))
    apply = fp8_linear.replace_apply(lambda *given: "stock")
    x = torch.zeros(1, 256, dtype=torch.bfloat16)
    for is_dsv41 in (None, True):
        if is_dsv41:
            made(SimpleNamespace(), is_dsv41)
        assert apply(method, layer, x) == "stock" and not fp8_linear.keeps(method, layer)
    made(SimpleNamespace(), False)
    assert fp8_linear.keeps(method, layer)


# ---- experts


@pytest.mark.parametrize("cutlass", [False, True], ids=["marlin", "flashinfer_mxfp4"])
@pytest.mark.parametrize(
    ("shape", "ours"),
    [
        (Experts(1, hidden=7168, inter=384, experts=6), True),  # Pro at TP 8
        (Experts(2, hidden=5120, inter=1152, experts=8), False),  # V4.1 at TP 2
        (Experts(2, hidden=4096, inter=640, experts=8), False),
    ],
    ids=["Pro", "V4.1", "pruned"],
)
def test_experts_are_loaded_and_computed_by_the_same_one(shape, ours, cutlass, experts_served, monkeypatch):  # noqa: F811
    monkeypatch.setitem(mxfp4_moe.limits.LIMITS, "mxfp4_moe", SIZES)
    recorded = experts.Recorded("x", torch.float8_e8m0fnu, cutlass=cutlass)
    made = make_experts(shape, device="cpu")
    layer, method = experts.engine_layer(recorded, made), experts.Method(cutlass)
    process, apply = experts.replaced(cutlass)
    process(method, layer)
    result = apply(method, layer, experts.dispatched(made)).hidden_states
    if ours:
        assert layer.log == ["fp8"]
        up_first = {"up_first": cutlass}
        assert relative_error(result, experts_reference(**{**made.arguments(), **up_first})) < 0.004
    else:
        assert layer.log == ["repacked", "applied"] and torch.equal(result, made.hidden * 2)


SIZES = dict(mxfp4_moe.limits.LIMITS["mxfp4_moe"])


@pytest.mark.parametrize("flag", ["apply_router_weight_on_input", "no_combine"])
def test_experts_that_weigh_otherwise_are_sglangs(flag):
    made = make_experts(Experts(1, hidden=4096, inter=256, experts=2), device="cpu")
    layer = experts.engine_layer(experts.RECORDED[2], made)
    assert mxfp4_moe.keeps(experts.Method(False), layer)
    setattr(layer.moe_runner_config, flag, True)
    assert not mxfp4_moe.keeps(experts.Method(False), layer)


# ---- the indexer


def test_pros_top_k_is_ours_and_more_is_not():
    table, lengths = torch.zeros(1, 4, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    for k, ours in ((512, True), (1024, True), (2048, False)):
        out = torch.zeros(1, k, dtype=torch.int32)
        assert index_select.takes_selection(lengths, table, out, 64) is ours
    assert not index_select.takes_selection(lengths, None, out[:, :512], 64)  # V4.1's, without a page table


@pytest.mark.parametrize("heads", [32, 64])
def test_v41s_index_queries_are_never_deferred(heads):
    q = torch.zeros(1, 1, heads, 128).to(torch.float8_e4m3fn)
    keys = torch.zeros(1, 64, 1, 132, dtype=torch.uint8)
    numbers = torch.zeros(1, dtype=torch.int32)
    call = (q, keys, torch.zeros(1, heads), numbers, numbers.view(1, 1), None, 64, False)
    assert index_select.takes(call) is (heads == 64)
