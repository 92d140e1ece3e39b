"""DSPARK's draft layer of each release, taken out of the wheels and run on the CPU with ours in it: the collapse of its
streams, and the heads of its attention, which it pads to 64 whatever the rank has."""

import ast
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.reference import mhc as reference
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.sglang_patches import device_gate
from deepseek_v4_sm120.sglang_patches.adapters import mhc, sparse_decode
from deepseek_v4_sm120.sglang_patches.names import DSPARK, MODEL
from deepseek_v4_sm120.specs.mhc import Shape, make_inputs
from tests.patching.test_wheel_wo_a import QUIET, definition, source, take
from tests.patching.wheels import every_release, fetch, since

FIRST, MODULE = "0.5.16", DSPARK.partition(":")[0]
EPS = 1e-6


@every_release(FIRST)
def test_the_collapse_is_ours(version, monkeypatch):
    """As the release computes it, by its own function in torch; of DeepSeek-V4.1's there is nothing to collapse."""
    wheel, calls = fetch(version), []

    def operator(streams, *mixes, rms_eps, hc_eps):
        calls.append(streams.shape)
        return reference.mhc_head(streams, *mixes, rms_eps=rms_eps, eps=hc_eps).bfloat16()

    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(mhc.op, "mhc_head", operator)
    in_torch = take(wheel, {"torch": torch, "F": torch.nn.functional}, "hc_head_torch", MODEL)
    stock = take(wheel, {"hc_head_torch": in_torch}, "DeepseekV4ForCausalLMDSpark.collapse_hc_head", MODULE)
    inputs = make_inputs(Shape(5, 4096), device="cpu")
    last = SimpleNamespace(hc_head_fn=inputs.head_fn, hc_head_scale=inputs.head_scale, hc_head_base=inputs.head_base)
    model = SimpleNamespace(stages=[None, last], norm_eps=EPS, hc_eps=EPS, hc_pre_from_prev_sublayer=False)
    collapse = mhc.replace_dspark_head(stock)
    assert relative_error(collapse(model, inputs.streams), stock(model, inputs.streams).double()) < 0.004
    assert calls == [inputs.streams.shape]
    if since(version, "0.5.21"):
        model.hc_pre_from_prev_sublayer, y = True, inputs.streams[:, 0]
        assert collapse(model, y) is y and len(calls) == 1


class Attention(SimpleNamespace):
    """DSparkAttention of a rank as far as its forward asks: its own heads, 64 in the queries."""

    n_local_groups = o_lora_rank = 2
    head_dim, rope_head_dim, _use_fast_kernel, alt_streams, eps = 512, 64, True, None, EPS
    layer_id, q_head_norm, freqs_cis, attn_tp_size = 0, False, None, 4

    def __getattr__(self, name):
        return QUIET


@every_release(FIRST)
@pytest.mark.parametrize("heads", [32, 16, 8])
def test_padded_heads_are_not_computed(version, heads, monkeypatch):
    """The draft's attention calls the backend's forward with its layer, which tells the rank's heads."""
    wheel, told = fetch(version), []

    def of_backend(self, q, k, v, layer, forward_batch, compress_ratio, save_kv_cache=True, attn_sink=None, **_):
        rows = q.unsqueeze(1)
        nothing = dict.fromkeys(("softmax_scale", "topk_length", "extra_k_cache", "extra_indices", "extra_topk_length"))
        call = sparse_decode.Call(
            **nothing,
            q=rows,
            k_cache=None,
            indices=None,
            head_dim_v=512,
            attn_sink=None,
            is_sparse_fp8=True,
            args=(),
            kwargs={},
        )
        told.append((q.shape[1], call.heads))
        return q

    forward = sparse_decode.replace_backend_forward(of_backend)
    backend = SimpleNamespace(get_swa_out_cache_loc=lambda batch: None)
    backend.forward = lambda *args, **kwargs: forward(backend, *args, **kwargs)
    pool = SimpleNamespace(uniform_fp8=False, set_swa_key_buffer_radix_fused_norm_rope=lambda **_: None)
    names = {"torch": torch, "_PAD_NUM_HEADS": 64, "_resolve_dspark_pool": lambda: pool}
    names |= {"get_is_capture_mode": lambda: False, "_apply_wo_a_bf16_matmul": lambda *args, **_: torch.zeros(3, 2, 2)}
    names |= {"fused_rope_inplace": lambda *args, **kwargs: None}
    names["GIVEN"] = {"get_attn_backend": lambda: backend}
    stock = take(wheel, names, "DSparkAttention.forward", MODULE)
    layer = SimpleNamespace(tp_q_head_num=heads)
    attention = Attention(n_local_heads=heads, attn=layer, wo_b=lambda x, **_: (x, None))
    attention.kv_proj_only, attention._store_block_kv = lambda x: x, lambda **_: None
    attention._compute_q = lambda *args, **kwargs: None
    attention._local_attn_sink = lambda *args: None
    inputs = heads * 512 // 2
    attention.wo_a = SimpleNamespace(weight=torch.zeros(4, inputs, dtype=torch.bfloat16))
    stock(attention, torch.zeros(3), torch.zeros(3, 8, dtype=torch.bfloat16), QUIET)
    assert told == [(64, heads)]


@every_release(FIRST)
def test_its_layers_are_the_models(version):
    """hc_pre and hc_post of a stage are the decoder layer's, so ours; of the attention's weights wo_a alone is bf16."""
    wheel = fetch(version)
    stage, layer = ("DSparkV4Stage", "DeepseekV4DecoderLayer")
    if since(version, "0.5.23"):
        stage, layer = ("DSparkV4CudaStage", "DeepseekV4CudaDecoderLayer")
    made = definition(wheel, stage, MODULE)
    assert ast.unparse(made.bases[-1]) == layer
    for name in ("hc_pre", "hc_post"):
        assert not [d for c in (stage, "DSparkV4StageMixin") if (d := definition(wheel, f"{c}.{name}", MODULE))]
    assert "wo_a_fp8=False" in source(wheel, MODULE)
