"""Sizes and strides that ops.index_select refuses, and what it hands to the extension. CPU only, with a stand-in for
`_C`. What else is refused is in test_checks.py.
"""

from __future__ import annotations

import contextlib
import re

import pytest
import torch

from deepseek_v4_sm120.ops import index_select as op
from deepseek_v4_sm120.ops.shared import checks, cuda_tensors
from deepseek_v4_sm120.specs.index_select import new_pages

ROWS = 3


pytestmark = pytest.mark.usefixtures("fake")


@pytest.fixture
def on_cpu(monkeypatch):
    """As if the CPU were a CUDA device."""
    monkeypatch.setattr(checks.Call, "on_cuda", lambda check: None)
    monkeypatch.setattr(cuda_tensors, "on_device_of", lambda tensor: contextlib.nullcontext())
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
    ("changes", "words"),
    [
        ({"q_scales": int32(ROWS, 1, 64)}, "q.dtype must be torch.int8 or torch.uint8, got torch.float8_e4m3fn"),
        ({"q": fp8(ROWS, 1, 64, 64)}, r"q.shape must be \[rows, 1, 64, 128\], got \[3, 1, 64, 64\]"),
        ({"q": fp8(ROWS, 1, 64, 132)[..., 1:129]}, "q must have strides .*a multiple of 16, 1.*132, 1"),
        ({"q": fp8(ROWS, 1, 64, 160)[..., 8:136]}, "q must start on a 16-byte boundary"),
        ({"k_pages": new_pages(5, True)}, r"k_pages.shape must be \[pages, 64, 1, 132\], none 0, got \[5, 64, 1, 68\]"),
        ({"k_pages": new_pages(5, False)[:0]}, r"k_pages.shape must be .*none 0, got \[0, 64, 1, 132\]"),
        ({"k_pages": new_pages(5, False, gap=8)}, r"k_pages.stride\(0\) must be a multiple of 16 and at least 8448"),
        ({"weights": torch.zeros(ROWS, 63)}, r"weights.shape must be \[3, 64\], got \[3, 63\]"),
        ({"lengths": int32(2 * ROWS)[::2]}, r"lengths must be contiguous, got strides \[2\]"),
        ({"page_table": int32(ROWS + 1, 10)}, r"page_table.shape must be \[3, columns\], got \[4, 10\]"),
        ({"page_table": int32(ROWS, 0)}, r"page_table.shape\[1\] must be 1 or more, got 0"),
        ({"page_table": int32(ROWS, 20)[:, ::2]}, r"page_table must have strides .*, got strides \[20, 2\]"),
        ({"out": int32(ROWS, 511)}, r"out.shape must be \[3, 512\]"),
        ({"entries": int32(ROWS, 1024)[:, ::2]}, r"entries must have strides .*, got strides \[1024, 2\]"),
    ],
)
def test_refusals(changes, words, fake):
    with pytest.raises((TypeError, ValueError), match=f"^index_select: {words}"):
        op.index_select(**good(**changes))
    assert fake.calls == []


def test_no_more_entries_than_the_kernel_counts(fake):
    table = torch.zeros(1, 2**18 + 1, dtype=torch.int32).expand(ROWS, -1)
    with pytest.raises(ValueError, match="page_table must have at most 16777216 entries a row, got 16777280"):
        op.index_select(**good(page_table=table))
    with pytest.raises(ValueError, match=r"scores.shape\[1\] must be 1..16777216, got 16777217"):
        op.topk_select(torch.zeros(1, 2**24 + 1), int32(1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q_scales": int32(ROWS, 1, 63)}, r"q_scales.shape must be \[3, 1, 64\], got \[3, 1, 63\]"),
        ({"k_pages": new_pages(5, False)}, r"k_pages.shape must be \[pages, 64, 1, 68\]"),
    ],
)
def test_refusals_of_fp4(changes, words):
    with pytest.raises(ValueError, match=f"^mqa_logits: {words}"):
        op.mqa_logits(**{**good_fp4(), **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scores": torch.zeros(ROWS, 0)}, r"scores.shape\[1\] must be 1..16777216, got 0"),
        ({"page_table": int32(ROWS, 1)}, "page_table must have 100 entries a row or more, scores' width, got 64"),
        ({"out": int32(ROWS, 5)}, r"out.shape must be \[3, 512\]"),
        ({"entries": int32(ROWS, 512)}, "entries must be None without page_table, got a tensor"),
    ],
)
def test_refusals_of_topk(changes, words):
    with pytest.raises(ValueError, match=f"^topk_select: {words}"):
        op.topk_select(**{"scores": torch.zeros(ROWS, 100), "lengths": int32(ROWS), **changes})


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


def test_no_rows_is_no_launch(on_cpu, fake):
    empty = {name: tensor[:0] if name != "k_pages" else tensor for name, tensor in good().items()}
    assert op.index_select(**empty).shape == (0, 512) and fake.calls == []


def dealt(**changes) -> dict:
    arguments = {"dealt": int32(2, 2, 77), "page_table": int32(ROWS, 20)[:, :10], "num_pages": 5}
    return {**arguments, **changes}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dealt": int32(2, 3, 77)}, "dealt must have 3 rows as even parts, page_table's, got [2, 3, 77]"),
        ({"dealt": int32(0, 2, 77)}, "dealt must have 3 rows as even parts, page_table's, got [0, 2, 77]"),
        ({"dealt": int32(2, 2, 1025)}, "k must be an int in 1..1024, got 1025"),
        ({"dealt": int32(2, 2, 77).long()}, "dealt.dtype must be torch.int32 or torch.int16, got torch.int64"),
        ({"page_table": int32(ROWS, 0)}, "page_table must have 1 to 16777216 entries a row, got 0"),
        ({"page_table": int32(1, 2**18 + 1).expand(ROWS, -1)}, "page_table must have 1 to 16777216 entries a row"),
        ({"out": int32(ROWS, 78)}, "out.shape must be [3, 77], got [3, 78]"),
    ],
)
def test_refusals_of_dealt_entries(changes, words, fake):
    with pytest.raises((TypeError, ValueError), match=re.escape(f"dealt_slots: {words}")):
        op.dealt_slots(**dealt(**changes))
    assert fake.calls == []


def test_sixteen_bits_are_for_what_they_hold(on_cpu, fake):
    """1,023 pages end at entry 65,471; with 1,024 the last entry would be none."""
    short = int32(2, 2, 77).short()
    for columns, is_narrow in ((1, True), (1023, True), (1024, False), (5000, False)):
        table = int32(ROWS, columns)
        assert op.is_narrow(table) is is_narrow
        if is_narrow:
            op.dealt_slots(**dealt(dealt=short, page_table=table))
            assert fake.calls[-1][1]["narrow"] is True and fake.calls[-1][1]["width"] == 64 * columns
        else:
            with pytest.raises(TypeError, match=f"dealt.dtype must be torch.int32 for {64 * columns} entries a row"):
                op.dealt_slots(**dealt(dealt=short, page_table=table))


def test_slots_are_launched_behind_the_exchange(on_cpu, fake):
    entries = int32(ROWS, 100)[:, :77]
    out = op.dealt_slots(**dealt(entries=entries))
    ((name, call),) = fake.calls
    assert name == "dealt_slots" and call["pdl"] is False and call["stream"] == 7
    assert (call["ranks"], call["rows"], call["k"], call["width"]) == (2, ROWS, 77, 640)
    assert (call["page_table_stride"], call["num_pages"], call["narrow"]) == (20, 5, False)
    assert (call["slots"], call["slots_stride"]) == (out.data_ptr(), 77)
    assert (call["entries"], call["entries_stride"]) == (entries.data_ptr(), 100)
    op.dealt_slots(int32(2, 0, 77), int32(0, 10), num_pages=5)
    assert len(fake.calls) == 1
