"""SGLang's attention backend of every release, taken out of the wheels and run on the CPU over stand-ins: its call on
SM120 comes to ours with what ours takes, whatever the rows, the heads that it pads to and the caches of a layer."""

import ast
import itertools
import math
import sys
import types
from types import SimpleNamespace
from typing import Optional

import pytest
import torch

from deepseek_v4_sm120.patching import contract
from deepseek_v4_sm120.reference import kv_pages
from deepseek_v4_sm120.sglang_patches import device_gate
from deepseek_v4_sm120.sglang_patches.adapters import sparse_decode as adapter
from deepseek_v4_sm120.sglang_patches.table import BACKEND, SM120_ATTENTION, SM120_ATTENTION_0_5_14
from deepseek_v4_sm120.specs import sparse_decode as spec
from deepseek_v4_sm120.specs.provider import STOCK
from tests.patching.test_wheel_prefill import Metadata as Lists
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import content, every_release, fetch, since, tree

FIRST, HEADS, PADDED, DECODE_ROWS = "0.5.14", 16, 64, 64  # DECODE_ROWS: SM120_DECODE_MAX_TOKENS of 0.5.20 and later
LENGTHS = {4: "c4_sparse_topk_lengths", 128: "c128_topk_lengths_clamp1"}
INDICES = {4: "c4_sparse_page_indices", 128: "c128_page_indices"}


class Metadata(Lists):
    """What the attention reads of DSV4AttnMetadata; from 0.5.21 on it asks for the lists of a ratio."""

    positions = None

    def get_flashmla_metadata(self, ratio):
        return None

    def sparse_page_indices(self, ratio):
        return getattr(self, INDICES[ratio])

    def sparse_topk_lengths(self, ratio):
        return getattr(self, LENGTHS[ratio])


class Pool:
    """DeepSeekV4TokenToKVPool as far as the attention asks: pages of 256 tokens, each padded."""

    page_size = swa_window_size = swa_page_size = 256
    swa_kv_pool = SimpleNamespace(kv_cache_total_dim=584, page_size=256)
    request_window, ratio = None, 4

    def get_swa_key_buffer_radix(self, layer_id):
        return torch.zeros(3, kv_pages.page_bytes(256), dtype=torch.uint8)

    def get_extra_key_buffer(self, layer_id):
        return torch.zeros(9, kv_pages.page_bytes(256 // self.ratio), dtype=torch.uint8)

    def get_extra_key_page_size(self, layer_id):
        return 256 // self.ratio

    def get_swa_key_page_size(self):
        return 256

    def get_swa_key_bytes_per_token(self):
        return 584

    def get_extra_key_bytes_per_token(self, layer_id):
        return 584


@pytest.fixture
def calls(monkeypatch):
    """What ops.sparse_decode is called with; its result is q + 1."""
    made = []

    def operator(q, k_cache, indices, *, out=None, return_lse, **given):
        made.append({"q": q, "k_cache": k_cache, "indices": indices, **given})
        return q + 1 if out is None else out.copy_(q + 1)

    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(adapter.op, "sparse_decode", operator)
    return made


def backend_of(version, monkeypatch):
    """(forward of the wheel's backend with ours around it, self)"""

    def stock(**kwargs):
        raise AssertionError(f"SGLang's own was called with {sorted(kwargs)}")

    name = SM120_ATTENTION if since(version, "0.5.16") else SM120_ATTENTION_0_5_14
    module = types.ModuleType(name)
    module.flash_mla_with_kvcache_sm120, module.SM120_DECODE_MAX_TOKENS = adapter.replace_sm120(stock), DECODE_ROWS
    monkeypatch.setitem(sys.modules, name, module)
    never = SimpleNamespace(get=lambda: False)
    names = {
        "torch": torch,
        "DSV4AttnMetadata": Metadata,
        "DeepSeekV4TokenToKVPool": Pool,
        "_is_sm120": True,
        "get_platform": lambda: SimpleNamespace(is_sm120=True, is_sm100=False),
        "_LARGE_INDEXER_QUERY_THRESHOLD": 11673,
        "envs": SimpleNamespace(SGLANG_OPT_FLASHMLA_SPARSE_PREFILL=never),
        "GIVEN": {
            "flash_mla_with_kvcache_sm120": module.flash_mla_with_kvcache_sm120,
            "SM120_DECODE_MAX_TOKENS": DECODE_ROWS,
        },
        "is_cp_active": lambda batch: False,
    }
    members = ("_forward_attention", "_use_sparse_prefill", "_mega_paged_prefill", "forward")
    wheel = fetch(version)
    take(wheel, names, "_pad_tensor_to_size", BACKEND)
    methods = {name: take(wheel, names, f"DeepseekV4AttnBackend.{name}", BACKEND) for name in members}
    methods = {name: method for name, method in methods.items() if method is not None}
    methods["forward"] = adapter.replace_backend_forward(methods["forward"])
    made = type("DeepseekV4AttnBackend", (), methods)()
    made.mtp_enabled = made.trtllm_attn = made.is_dsv41 = made.is_dspark_draft = False
    made.head_dim_v, made.softmax_scale = 512, 0.125
    return made


class Core(SimpleNamespace):
    late_layer_tail = sparse_prefill_cache = None


CASES = list(itertools.product((0, 4, 128), (3, DECODE_ROWS + 1), (HEADS, PADDED), (0, 2, -1)))


@every_release(FIRST)
def test_its_call_comes_to_ours(version, calls, monkeypatch):
    """Of every kind of layer, of decode and prompts, with and without padded heads, where the batch's lists have as
    many rows as its queries, more, and fewer."""
    made = backend_of(version, monkeypatch)
    for ratio, rows, heads, more in CASES:
        calls.clear()
        pool, metadata = Pool(), Metadata(rows + more)
        pool.ratio = ratio or 4
        made.forward_metadata, made.token_to_kv_pool = Core(core_attn_metadata=metadata), pool
        modes = dict.fromkeys(("is_idle", "is_decode", "is_target_verify", "is_draft_extend_v2"), lambda: False)
        mode = SimpleNamespace(**modes, is_extend_without_speculative=lambda rows=rows: rows > DECODE_ROWS)
        q = torch.randn(rows, heads, 512).to(torch.bfloat16)
        layer = SimpleNamespace(layer_id=7, tp_q_head_num=HEADS, v_head_dim=512)
        given = {"save_kv_cache": False, "attn_sink": torch.zeros(heads)}
        batch = SimpleNamespace(forward_mode=mode)
        out = made.forward(q=q, k=q, v=q, layer=layer, forward_batch=batch, compress_ratio=ratio, **given)
        assert torch.equal(out[:, :HEADS], q[:, :HEADS] + 1)
        (call,) = calls
        assert call["q"].shape == (rows, 1, HEADS, 512) and call["attn_sink"].shape == (HEADS,)
        assert call["indices"].shape == (rows, 1, 128) and call["topk_length"].shape == (rows,)
        assert call["k_cache"].shape == (3, 256, 1, 584)
        if ratio:
            assert call["extra_kv_pages"].shape == (9, 256 // ratio, 1, 584)
            assert call["extra_indices"].shape[:2] == (rows, 1) and call["extra_topk_length"].shape == (rows,)
        else:
            assert call["extra_kv_pages"] is call["extra_indices"] is call["extra_topk_length"] is None


# ---- calibrate's inputs


@pytest.mark.parametrize("case", ["window", "C4", "C128"])
@every_release("0.5.16")
def test_calibrates_inputs_are_what_sglangs_own_attention_takes(version, case, sglang_wheel):
    """Its torch kernel is right on them: nothing is asked for that lies outside of the pools, and of slot 0, which it
    reads where -1 stands, nothing comes through."""
    wheel, names = sglang_wheel(version), {"torch": torch, "Optional": Optional, "math": math}
    whole = tree(wheel, SM120_ATTENTION)
    parts = [contract.find_definition(whole, name) for name in ("_gather_and_dequant", "_sm120_sparse_decode_fwd")]
    exec(compile(ast.Module([*filter(is_size, whole.body), *parts], []), "wheel", "exec"), names)
    page_size = {"window": 0, "C4": 64, "C128": 2}[case]
    asked = spec.Case(case, 4, 8, page_size, 128, 128)
    for inputs in spec.correctness_inputs(asked, "cpu"):
        given = spec._keywords(inputs)
        given["extra_indices"] = given.pop("extra_indices_in_kvcache")
        for kind in ("", "extra_"):
            if given[f"{kind}indices"] is None:
                continue
            pool = given[f"{kind}k_cache"]
            assert int(given[f"{kind}indices"].min()) == -1 or kind and page_size == 2
            assert int(given[f"{kind}indices"].max()) < pool.shape[0] * pool.shape[1]
        out, _ = names["_sm120_sparse_decode_fwd"](**given)
        assert spec.error(STOCK, out, inputs) <= spec.max_error(STOCK, asked)


def is_size(node) -> bool:
    """_NAME = number, or of other such."""
    simple = isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.BinOp)
    return simple and isinstance(node.targets[0], ast.Name) and node.targets[0].id.startswith("_")


@every_release("0.5.13")
def test_whose_kernels_stock_calls(version):
    """What the adapter chooses shadow mode's bound by."""
    asked = set()
    for node in ast.walk(tree(fetch(version), SM120_ATTENTION if since(version, "0.5.16") else SM120_ATTENTION_0_5_14)):
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "_sm120_default_backend":
            asked.add(ast.literal_eval(node.comparators[0]))
    by_flashinfer = since(version, "0.5.15")
    assert asked == ({"flashinfer", "triton"} if by_flashinfer else {"triton"})
    environment = content(fetch(version), "sglang/srt/environ.py")
    assert ('SGLANG_SM120_FLASHMLA_BACKEND = EnvStr("flashinfer")' in environment) == by_flashinfer
