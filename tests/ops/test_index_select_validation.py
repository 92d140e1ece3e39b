"""Every refusal of ops.index_select, and what it hands to the extension. CPU only, with a stand-in for `_C`."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch

from deepseek_v4_sm120 import extension
from deepseek_v4_sm120.ops import index_select as op
from deepseek_v4_sm120.reference.index_select_inputs import new_pages

ROWS = 3


class FakeExtension(types.SimpleNamespace):
    """The names that ops reads from `_C`; records launches instead of running them."""

    def __init__(self):
        super().__init__(INDEX_HEADS=64, INDEX_DIM=128, INDEX_PAGE=64, INDEX_MAX_K=1024, calls=[])
        for name in ("index_select", "mqa_logits", "topk_select"):
            setattr(self, name, lambda name=name, **call: self.calls.append((name, call)))
        self.index_select_scratch_bytes = lambda **sizes: 4096


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    stand_in = FakeExtension()
    monkeypatch.setattr(extension, "load", lambda: stand_in)
    op._scratch_bytes.cache_clear()
    yield stand_in
    op._scratch_bytes.cache_clear()


@pytest.fixture
def on_cpu(monkeypatch):
    """As if the CPU were a CUDA device."""
    monkeypatch.setattr(op, "_check_cuda", lambda name, tensor: None)
    monkeypatch.setattr(op, "_on", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(op, "has_fp8_mma", lambda index: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)


def fp8(*shape) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)


def int32(*shape) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def good(**changes) -> dict:
    arguments = {
        "q": fp8(ROWS, 1, 64, 128),
        "k_pages": new_pages(5, False),
        "weights": torch.zeros(ROWS, 64),
        "lengths": int32(ROWS),
        "page_table": int32(ROWS, 10),
    }
    return {**arguments, **changes}


def good_fp4(**changes) -> dict:
    q = torch.zeros(ROWS, 1, 64, 64, dtype=torch.int8)
    return good(q=q, k_pages=new_pages(5, True), q_scales=int32(ROWS, 1, 64), **changes)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"q": torch.zeros(ROWS, 1, 64, 128)}, TypeError, "q.dtype must be torch.float8_e4m3fn without q_scales"),
        ({"q_scales": int32(ROWS, 1, 64)}, TypeError, "q.dtype must be torch.int8 or torch.uint8 with q_scales"),
        ({"q": fp8(ROWS, 64, 128)}, ValueError, r"q.shape must be \[rows, 1, 64, 128\], got \[3, 64, 128\]"),
        ({"q": fp8(ROWS, 1, 64, 132)[..., 1:129]}, ValueError, "multiples of 16"),
        ({"q": fp8(ROWS, 1, 64, 160)[..., 8:136]}, ValueError, "q must start on a 16-byte boundary"),
        ({"k_pages": new_pages(5, True)}, ValueError, r"k_pages.shape must be \[pages, 64, 1, 132\]"),
        ({"k_pages": torch.zeros(5, 64, 1, 132)}, TypeError, "k_pages.dtype must be one byte wide"),
        ({"k_pages": new_pages(5, False, gap=8)}, ValueError, "multiple of 16 and at least 8448"),
        ({"weights": torch.zeros(ROWS, 63)}, ValueError, r"weights.shape must be \[3, 64\], got \[3, 63\]"),
        ({"weights": torch.zeros(ROWS, 64).double()}, TypeError, "weights.dtype must be torch.float32"),
        ({"lengths": int32(ROWS).long()}, TypeError, "lengths.dtype must be torch.int32"),
        ({"lengths": int32(ROWS, 1)}, ValueError, r"lengths must be \[3\], contiguous"),
        ({"lengths": int32(2 * ROWS)[::2]}, ValueError, "lengths must be"),
        ({"page_table": int32(ROWS + 1, 10)}, ValueError, r"page_table.shape must be \[3, at least 1\]"),
        ({"page_table": int32(ROWS, 0)}, ValueError, "page_table.shape"),
        ({"page_table": int32(ROWS, 20)[:, ::2]}, ValueError, r"page_table.stride\(1\) must be 1, got 2"),
        ({"k": 0}, ValueError, "k must be an int in 1..1024, got 0"),
        ({"k": 1025}, ValueError, "k must be an int in 1..1024, got 1025"),
        ({"out": int32(ROWS, 511)}, ValueError, r"out.shape must be \[3, 512\]"),
        ({"out": torch.zeros(ROWS, 512)}, TypeError, "out.dtype must be torch.int32"),
        ({"out": int32(1, 512).expand(ROWS, -1)}, ValueError, "out must not overlap itself"),
        ({"entries": int32(ROWS, 1024)[:, ::2]}, ValueError, r"entries.stride\(1\) must be 1"),
        ({"logits": int32(ROWS, 512)}, TypeError, "logits.dtype must be torch.float32"),
        ({}, RuntimeError, "must be on a CUDA device, got cpu"),
    ],
)
def test_refusals(changes, error, words, fake):
    with pytest.raises(error, match=f"^index_select: .*{words}"):
        op.index_select(**good(**changes))
    assert fake.calls == []


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"q_scales": torch.zeros(ROWS, 1, 64)}, TypeError, "q_scales.dtype must be torch.int32"),
        ({"q_scales": int32(ROWS, 64)}, ValueError, r"q_scales must be \[3, 1, 64\]"),
        ({"k_pages": new_pages(5, False)}, ValueError, r"k_pages.shape must be \[pages, 64, 1, 68\]"),
    ],
)
def test_refusals_of_fp4(changes, error, words):
    with pytest.raises(error, match=f"^mqa_logits: {words}"):
        op.mqa_logits(**{**good_fp4(), **changes})


@pytest.mark.parametrize(
    ("scores", "changes", "error", "words"),
    [
        (torch.zeros(ROWS, 100).half(), {}, TypeError, "scores.dtype must be torch.float32"),
        (torch.zeros(ROWS, 0), {}, ValueError, "scores.shape"),
        (torch.zeros(ROWS, 200)[:, ::2], {}, ValueError, r"scores.stride\(1\) must be 1"),
        (
            torch.zeros(ROWS, 100),
            {"page_table": int32(ROWS, 1)},
            ValueError,
            r"page_table.shape\[1\] must be at least 2",
        ),
        (torch.zeros(ROWS, 100), {"out": int32(ROWS, 5)}, ValueError, r"out.shape must be \[3, 512\]"),
    ],
)
def test_refusals_of_topk(scores, changes, error, words):
    with pytest.raises(error, match=f"^topk_select: {words}"):
        op.topk_select(scores, int32(ROWS), **changes)


def test_what_is_launched(on_cpu, fake):
    arguments = good(k_pages=new_pages(5, False, gap=32), page_table=int32(ROWS, 20)[:, :10])
    out = op.index_select(**arguments, rows_per_request=6, k=77)
    assert out.shape == (ROWS, 77) and out.dtype == torch.int32
    ((name, call),) = fake.calls
    assert name == "index_select" and call["slots"] == out.data_ptr() and call["entries"] == call["chosen_logits"] == 0
    assert (call["rows"], call["width"], call["k"], call["rows_per_request"]) == (ROWS, 640, 77, 2)
    assert (call["page_bytes"], call["num_pages"], call["page_table_stride"]) == (8480, 5, 20)
    assert (call["q_stride_row"], call["q_stride_head"], call["fp4"], call["stream"]) == (8192, 128, False, 7)
    assert call["max_scratch_bytes"] == 64 << 20 and call["scratch"] != 0


def test_fp4_logits_and_prefill_scratch(on_cpu, fake):
    logits = op.mqa_logits(**good_fp4())
    assert logits.shape == (ROWS, 640) and fake.calls[-1][1]["fp4"] is True
    rows = 257
    op.topk_select(torch.zeros(rows, 64), int32(rows))
    assert fake.calls[-1][1]["max_scratch_bytes"] == 256 << 20


def test_topk_without_and_with_a_table(on_cpu, fake):
    out = op.topk_select(torch.zeros(ROWS, 100), int32(ROWS))
    assert fake.calls[-1][1]["entries"] == out.data_ptr() and fake.calls[-1][1]["slots"] == 0
    out = op.topk_select(torch.zeros(ROWS, 100), int32(ROWS), page_table=int32(ROWS, 2), num_pages=9)
    assert fake.calls[-1][1]["slots"] == out.data_ptr() and fake.calls[-1][1]["num_pages"] == 9
    with pytest.raises(ValueError, match="entries must be None without page_table"):
        op.topk_select(torch.zeros(ROWS, 100), int32(ROWS), entries=int32(ROWS, 512))


def test_no_rows_is_no_launch(on_cpu, fake):
    empty = {name: tensor[:0] if name != "k_pages" else tensor for name, tensor in good().items()}
    assert op.index_select(**empty).shape == (0, 512) and fake.calls == []
