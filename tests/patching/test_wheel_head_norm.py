"""SGLang's own attention, from the projection of the queries on, taken out of the wheels and run on the CPU over
stand-ins: MQALayer.forward, what prepares its queries on one stream and on several, and the backend's forward, with our
attention in it. The queries wait from the second call on, and come out as before."""

from __future__ import annotations

import contextlib
import functools
import sys
from types import MethodType, ModuleType, SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120 import settings
from deepseek_v4_sm120.reference import kv_pages
from deepseek_v4_sm120.sglang_patches import device_gate
from deepseek_v4_sm120.sglang_patches.adapters import sparse_decode as attention
from deepseek_v4_sm120.sglang_patches.adapters import sparse_decode_head_norm as adapter
from deepseek_v4_sm120.sglang_patches.adapters.attention_forward import replace_forward
from deepseek_v4_sm120.sglang_patches.table import BACKEND
from deepseek_v4_sm120.specs.sparse_decode import NORM_EPS, make_freqs_cis
from tests.adapters.test_sparse_decode import LAYOUT
from tests.adapters.test_sparse_decode_head_norm import Operator, norm_rope
from tests.adapters.wo_a_layer import GROUPS, HEADS, OUTPUTS, Linear, rope
from tests.patching.test_wheel_wo_a import NO_FUSION, QUIET, Mxfp8SwizzledInput, Quiet, take
from tests.patching.wheels import every_release, since

POSITIONS = 200
PREPARATIONS = ("_forward_prepare", "_forward_prepare_multi_stream", "_compute_q_b")


def quiet_member(self, name):
    return self.__dict__.get("_modules", {}).get(name, QUIET)


class Metadata:
    """DSV4AttnMetadata of a decode batch, as far as a layer without a second cache reads it."""

    def __init__(self, rows):
        generator = torch.Generator().manual_seed(rows)
        self.swa_page_indices = torch.randint(0, 512, (rows, 128), dtype=torch.int32, generator=generator)
        self.swa_topk_lengths = torch.randint(1, 129, (rows,), dtype=torch.int32, generator=generator)

    def get_flashmla_metadata(self, compress_ratio):
        return None


class Pool:
    """DeepSeekV4TokenToKVPool with one window cache, by the names of all versions."""

    page_size = swa_window_size = swa_page_size = 256
    swa_kv_pool = SimpleNamespace(kv_cache_total_dim=584, page_size=256)
    request_window, uniform_fp8 = None, False

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.buffer = torch.zeros(2, kv_pages.page_bytes(256), dtype=torch.uint8)
        view = self.buffer[:, : 256 * 584].view(2, 256, 1, 584)
        kv_pages.write_rows(view, torch.arange(512), torch.randn(512, 512, generator=generator))

    def get_swa_key_buffer_radix(self, layer_id):
        return self.buffer

    def get_swa_key_page_size(self):
        return 256

    def get_swa_key_bytes_per_token(self):
        return 584


class Engine:
    """One wheel's attention as we run it."""

    def __init__(self, wheel, version, monkeypatch, *, ranks=1, streams=False):
        self.wheel, self.version, self.ranks, self.streams = wheel, version, ranks, streams
        self.operator, self.module = Operator(), ModuleType("wheel_head_norm_model")
        self.module.is_in_breakable_cuda_graph = lambda: False
        norm_rope.calls = []
        monkeypatch.setitem(sys.modules, self.module.__name__, self.module)
        monkeypatch.setattr(device_gate, "serves", lambda device: True)
        monkeypatch.setattr(attention.op, "sparse_decode", self.operator)
        monkeypatch.setattr(attention, "kv_page_layout", lambda: LAYOUT)
        for module in (attention, adapter):
            monkeypatch.setattr(module, "settings", lambda: settings.Settings())
        flash_mla = ModuleType("flash_mla")
        flash_mla.flash_mla_with_kvcache = attention.replace_flash_mla(None)
        monkeypatch.setitem(sys.modules, "flash_mla", flash_mla)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: QUIET)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())

    @functools.cached_property
    def names(self):
        platform = SimpleNamespace(is_sm120=True, is_sm100=False, is_blackwell=True)
        given = {
            "flash_mla_with_kvcache_sm120": attention.replace_sm120(None),
            "SM120_DECODE_MAX_TOKENS": 64,
            "is_batch_invariant_mode_enabled": lambda: False,
            NO_FUSION: lambda: None,
        }
        envs = Quiet()
        vars(envs)["SGLANG_OPT_USE_MULTI_STREAM_OVERLAP"] = SimpleNamespace(get=lambda: True)
        return {
            **{"GIVEN": given, "torch": torch, "_is_sm120": True, "_is_cuda": True, "get_platform": lambda: platform},
            **{"DSV4AttnMetadata": Metadata, "DeepSeekV4TokenToKVPool": Pool, "fused_rope_inplace": rope},
            **{"get_attn_backend": lambda: self.backend, "get_token_to_kv_pool": lambda: self.backend.token_to_kv_pool},
            **{"fused_q_norm_rope": adapter.replace_norm_rope(norm_rope), "_LARGE_INDEXER_QUERY_THRESHOLD": 9999},
            "get_is_capture_mode": lambda: self.streams,
            "envs": envs,
            "Mxfp8SwizzledInput": Mxfp8SwizzledInput,
            "is_in_breakable_cuda_graph": self.module.is_in_breakable_cuda_graph,
        }

    @functools.cached_property
    def backend(self):
        made = Quiet()
        vars(made).update(mtp_enabled=False, head_dim_v=512, softmax_scale=0.05, is_dsv41=False, trtllm_attn=False)
        vars(made).update(token_to_kv_pool=Pool(), forward_metadata=SimpleNamespace(core_attn_metadata=None))
        names = dict(self.names)
        inner = take(self.wheel, names, "DeepseekV4AttnBackend._forward_attention", BACKEND)
        if inner is not None:
            vars(made)["_forward_attention"] = MethodType(inner, made)
            vars(made)["_use_sparse_prefill"] = lambda *args, **kwargs: False
        forward = take(self.wheel, names, "DeepseekV4AttnBackend.forward", BACKEND)
        if since(self.version, "0.5.14") and not since(self.version, "0.5.20"):
            forward = attention.replace_backend_forward(forward)
        vars(made)["forward"] = MethodType(forward, made)
        return made

    def layer(self):
        names = dict(self.names)
        members = {"__getattr__": quiet_member}
        for name in PREPARATIONS:
            owners = (f"{owner}.{name}" for owner in ("MQALayer", "MqaAttentionBase"))
            found = (take(self.wheel, names, owner) for owner in owners)
            members[name] = next(one for one in found if one is not None)
        take(self.wheel, names, "_apply_wo_a_bf16_matmul")
        forward = take(self.wheel, names, "MQALayer.forward")
        forward.__module__ = self.module.__name__
        members["forward"] = replace_forward(forward)
        made = type("MQALayer", (torch.nn.Module,), members)()
        heads = HEADS // self.ranks
        sink = torch.linspace(-1, 1, HEADS if self.ranks == 1 else 64)
        values = {
            **{"attn_tp_size": self.ranks, "tp_size": self.ranks, "tp_rank": self.ranks - 1, "n_heads": HEADS},
            **{"n_local_heads": heads, "head_dim": 512, "qk_rope_head_dim": 64, "eps": NORM_EPS, "q_lora_rank": 8},
            **{"n_local_groups": GROUPS // self.ranks, "o_lora_rank": OUTPUTS, "compress_ratio": 0, "layer_id": 3},
            **{"is_dsv41": False, "q_head_norm": True, "use_mega_attention": False, "wo_a_fp8": False},
            **{"indexer": None, "compressor": None, "alt_streams": [QUIET] * 3, "_multi_stream_bs_limit": 128},
            "attn_mqa": SimpleNamespace(layer_id=3, tp_q_head_num=heads, v_head_dim=512),
            **{"attn_sink": torch.linspace(-1, 1, HEADS), "_attn_sink_local": sink},
            "freqs_cis": make_freqs_cis(POSITIONS, "cpu"),
            "wo_b": lambda o, **_: (o, None),
            "q_norm": lambda q: q,
            "wq_a": lambda x: (x, None),
            "wq_b": lambda q: (self.queries(q.shape[0]), None),
            "_compute_q_a": lambda x, qkv_a: (x, x) if since(self.version, "0.5.21") else x,
            "_normalize_q_lora": lambda q: (q, q),
            "_local_attn_sink": lambda count=None: sink[:count],
            "_project_wo_b": lambda o, defer_all_reduce: o.flatten(1),
        }
        for name, value in values.items():
            made.__dict__[name] = value
        kernel_heads = attention.replace_kernel_num_heads(lambda self, rows: 64)
        made.__dict__["_kernel_num_heads"] = MethodType(kernel_heads, made)
        made.wo_a = Linear(0, self.ranks)
        made.wo_a.weight.data.copy_(torch.randn(made.wo_a.weight.shape, generator=torch.Generator().manual_seed(5)))
        return made

    def queries(self, rows):
        """wq_b's output, [rows, heads * 512]"""
        generator = torch.Generator().manual_seed(rows)
        return (torch.randn(rows, HEADS // self.ranks * 512, generator=generator) * 9).to(torch.bfloat16)

    def run(self, layer, rows, mode="decode"):
        asked = {name: lambda: False for name in ("is_idle", "is_extend", "is_extend_without_speculative")}
        asked |= {"is_decode_or_idle": lambda: mode == "decode", "is_decode": lambda: mode == "decode"}
        asked |= {"is_target_verify": lambda: mode == "verify", "is_draft_extend_v2": lambda: False}
        batch = Quiet()
        vars(batch)["forward_mode"] = SimpleNamespace(**asked)
        vars(batch).update(attn_backend=self.backend, token_to_kv_pool=self.backend.token_to_kv_pool)
        vars(self.backend)["forward_metadata"].core_attn_metadata = Metadata(rows)
        positions = torch.arange(rows) * 7 % POSITIONS
        return layer.forward(torch.zeros(rows, 8, dtype=torch.bfloat16), positions, batch)


@every_release()
@pytest.mark.parametrize("streams", [False, True], ids=["one stream", "side streams"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_wheels_own_forward_hands_its_queries_to_the_attention(version, streams, ranks, sglang_wheel, monkeypatch):
    engine = Engine(sglang_wheel(version), version, monkeypatch, ranks=ranks, streams=streams)
    layer = engine.layer()
    for rows, mode in ((3, "decode"), (3, "verify"), (1, "decode")):
        engine.operator.calls.clear()
        norm_rope.calls.clear()
        first, *others = (engine.run(layer, rows, mode) for _ in range(3))
        waits = since(version, "0.5.14") or ranks == 1  # before, the rank's heads are not the first ones
        assert engine.operator.calls == [False, waits, waits]
        assert len(norm_rope.calls) == (1 if waits else 3)
        assert first.shape[0] == rows and float(first.float().abs().max()) > 0
        assert all(torch.equal(one, first) for one in others)
