"""A stand-in for `_C`, as the fixture `fake`: what checks and plans read of it, and launches that are recorded. And
ranks on one card, as the fixture `group`."""

from __future__ import annotations

import types

import pytest
import torch

from deepseek_v4_sm120.ops import index_select, sparse_decode
from deepseek_v4_sm120.ops.shared import cuda_tensors, extension
from deepseek_v4_sm120.ops.shared.kv_page_layout import kv_page_layout
from deepseek_v4_sm120.reference import kv_pages
from deepseek_v4_sm120.specs.all_reduce import in_threads


class FakeExtension(types.SimpleNamespace):
    def __init__(self):
        super().__init__(
            KV_NOPE_DIM=448,
            KV_ROPE_DIM=64,
            KV_HEAD_DIM=512,
            KV_DATA_BYTES=576,
            KV_SCALE_BYTES=8,
            KV_TOKEN_BYTES=584,
            KV_TILE=64,
            KV_PAGE_ALIGN=576,
            INDEX_HEADS=64,
            INDEX_DIM=128,
            INDEX_PAGE=64,
            INDEX_MAX_K=1024,
            CLEAR_DRAFTS_STATES=64,
            kv_page_bytes=kv_pages.page_bytes,
            index_select_scratch_bytes=lambda **sizes: 4096,
            sparse_decode_max_control_words=1024,
            sparse_decode_workspace=lambda **sizes: (4096 * sizes["rows"], 4 * sizes["rows"]),
            calls=[],  # (name, arguments)
        )
        for name in ("index_select", "mqa_logits", "topk_select", "dealt_slots", "sparse_decode"):
            setattr(self, name, lambda name=name, **call: self.calls.append((name, call)))


@pytest.fixture
def fake(monkeypatch):
    """`_C` without a compiler or a GPU; the caches that hold its answers are emptied before and after."""
    stand_in = FakeExtension()
    monkeypatch.setattr(extension, "load", lambda: stand_in)
    caches = (kv_page_layout, cuda_tensors._all_sms, index_select._scratch_bytes, sparse_decode._workspace)
    for cached in caches:
        cached.cache_clear()
    yield stand_in
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def group(request):
    """The group of each rank, of (ranks, transport); none tells of a fault when the test has ended."""
    ranks, transport = request.param
    made = in_threads(ranks, transport=transport)
    yield made
    torch.cuda.synchronize()
    assert [one.fault() for one in made] == [None] * ranks
    for one in made:
        one.close()
