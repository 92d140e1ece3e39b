"""The reference against a second formulation and against cases that one can work out on paper. CPU only."""

from __future__ import annotations

import math

import pytest
import torch

from deepseek_v4_sm120.reference import kv_pages
from deepseek_v4_sm120.reference.accuracy import complaint, relative_error, strict_error
from deepseek_v4_sm120.reference.sparse_decode import (
    indices_of_page_table,
    lse_base2_with_sink,
    sparse_decode,
    sparse_decode_online,
)
from deepseek_v4_sm120.specs.bounds import SPARSE_DECODE, SPARSE_DECODE_REFERENCES
from deepseek_v4_sm120.specs.sparse_decode import (
    CHECKED_EXTRAS,
    CHECKED_WINDOW,
    FLASHMLA_LSE,
    FLASHMLA_OUT,
    CacheShape,
    Shape,
    make_inputs,
)

C4 = CacheShape(64, 512, lengths=(512, 1, 0), masked=0.1)
C128 = CacheShape(2, 200, lengths=(64, 999), ascending=True)

SHAPES = {
    "window": Shape(2, 8),
    "c4": Shape(3, 8, CacheShape(256, 128, lengths=(128, 5, 0)), C4),
    "c128": Shape(2, 5, CacheShape(48, 128, lengths=(-3, 128)), C128),
    "no lengths, no sink": Shape(2, 1, CacheShape(64, 64), CacheShape(2, 64), sink=False),
    "flashmla": Shape(2, 16, CacheShape(64, 128), CacheShape(64, 128, masked=0.3), flashmla=True),
    "wide scales": Shape(2, 8, wide_scales=True),
    "page table": Shape(4, 8, extra=CacheShape(2, 201, lengths=(64, 999, 0), tables=2, masked=0.1)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_two_formulations_agree(name):
    inputs = make_inputs(SHAPES[name], seed=3, device="cpu")
    out, lse = sparse_decode(**inputs.arguments())
    online, online_lse = sparse_decode_online(**inputs.arguments(), block=48)
    assert relative_error(online, out) < SPARSE_DECODE_REFERENCES
    assert complaint(online, out, FLASHMLA_OUT) is None
    assert complaint(online_lse, lse, FLASHMLA_LSE) is None
    assert float(out.abs().max()) > 0


@pytest.mark.parametrize("page_size", [2, 3, 64])
def test_a_page_table_is_its_list_in_both_formulations(page_size):
    lengths = (130, 1, 0, -4, 2**31 - 1)
    extra = CacheShape(page_size, 130, lengths=lengths, tables=3, masked=0.2)
    inputs = make_inputs(Shape(7, 4, extra=extra), seed=5, device="cpu")
    inputs.page_table_rows[3:5] = torch.tensor([-1, 3])  # no such table
    for formulation in (sparse_decode, sparse_decode_online):
        by_table = formulation(**inputs.table_arguments())
        listed = indices_of_page_table(inputs.page_table, page_size, len(inputs.extra_kv_pages), inputs.page_table_rows)
        by_list = formulation(**{**inputs.arguments(), "extra_indices": listed})
        assert all(torch.equal(one, other) for one, other in zip(by_table, by_list, strict=True))
        assert not torch.equal(by_table[0], formulation(**inputs.arguments())[0])  # the rows changed above


def test_the_list_of_a_page_table_by_hand():
    table = torch.tensor([[3, -1], [4, 0], [2**31 - 1, 1]], dtype=torch.int32)
    listed = indices_of_page_table(table, 2, 4)
    assert listed.tolist() == [[[6, 7, -1, -1]], [[-1, -1, 0, 1]], [[-1, -1, 2, 3]]] and listed.dtype == torch.int32
    of_rows = indices_of_page_table(table, 2, 4, torch.tensor([2, -1, 0, 3], dtype=torch.int32))
    assert of_rows.tolist() == [[[-1, -1, 2, 3]], [[-1] * 4], [[6, 7, -1, -1]], [[-1] * 4]]
    none = indices_of_page_table(table[:0], 2, 4, torch.tensor([0], dtype=torch.int32))
    assert none.tolist() == [[[-1] * 4]]


def keys_at(slots: list[int], page_size: int = 2, pages: int = 4):
    """A NaN pool in which slot i holds the row of all i + 1."""
    pool = kv_pages.new_pages(pages, page_size, fill=0xFF)
    rows = torch.tensor(slots, dtype=torch.float32)[:, None].expand(-1, 512) + 1
    kv_pages.write_rows(pool, torch.tensor(slots), rows)
    return pool


def ask(pool, slots, *, scale=1 / 512, **arguments):
    q = torch.ones(1, 1, 1, 512, dtype=torch.bfloat16)
    indices = torch.tensor([[slots]], dtype=torch.int32)
    out, lse = sparse_decode(q, pool, indices, softmax_scale=scale, **arguments)
    return out[0, 0, 0], float(lse)


def test_one_candidate_returns_its_row_and_its_score():
    out, lse = ask(keys_at([5]), [5])
    assert torch.equal(out, torch.full((512,), 6.0, dtype=torch.float64))
    assert lse == pytest.approx(6.0, abs=1e-12)  # scale * 512 * 1 * 6


def test_two_candidates_by_hand():
    out, lse = ask(keys_at([0, 1]), [0, 1])  # scores 1 and 2, rows 1 and 2
    weight = math.e / (1 + math.e)
    assert float(out[0]) == pytest.approx(1 + weight, abs=1e-12)
    assert lse == pytest.approx(math.log(math.e + math.e**2), abs=1e-12)


def test_the_sink_takes_weight_but_has_no_value_and_is_not_in_lse():
    out, lse = ask(keys_at([0]), [0], attn_sink=torch.tensor([1.0]))  # score 1, sink 1: half the weight each
    assert float(out[0]) == pytest.approx(0.5, abs=1e-12)
    assert lse == pytest.approx(1.0, abs=1e-12)
    assert float(ask(keys_at([0]), [0], attn_sink=torch.tensor([math.inf]))[0].abs().max()) == 0.0
    assert float(ask(keys_at([0]), [0], attn_sink=torch.tensor([-math.inf]))[0][0]) == 1.0


def test_a_duplicate_counts_twice():
    out, _ = ask(keys_at([0, 1]), [0, 0, 1], scale=1e-9)
    assert float(out[0]) == pytest.approx(4 / 3, abs=1e-6)


@pytest.mark.parametrize("masked", [-1, -(2**31), 8, 2**31 - 1])
def test_masked_slots_have_no_weight(masked):
    out, lse = ask(keys_at([0]), [masked, 0, masked])
    assert float(out[0]) == 1.0 and lse == pytest.approx(1.0, abs=1e-12)


def test_the_last_slot_of_the_pool_is_not_masked():
    assert float(ask(keys_at([7]), [7])[0][0]) == 8.0


@pytest.mark.parametrize(("length", "seen"), [(-5, 0), (0, 0), (1, 1), (2, 2), (7, 2)])
def test_length_is_clamped_to_the_width(length, seen):
    lengths = torch.tensor([length], dtype=torch.int32)
    out, lse = ask(keys_at([0, 1]), [0, 1], topk_length=lengths, scale=1e-9)
    assert float(out[0]) == pytest.approx((0, 1, 1.5)[seen], abs=1e-6)
    assert (lse == math.inf) == (seen == 0)


def test_both_caches_share_one_softmax():
    one, _ = ask(keys_at([0, 1, 2, 3]), [0, 1, 2, 3])
    extra = torch.tensor([[[3, 1]]], dtype=torch.int32)
    two, _ = ask(keys_at([0, 2]), [2, 0], extra_kv_pages=keys_at([1, 3], page_size=4, pages=2), extra_indices=extra)
    assert torch.allclose(one, two, atol=1e-12, rtol=0)


def test_an_empty_row_gives_zero_and_plus_infinity():
    for arguments in ({}, {"attn_sink": torch.tensor([0.5])}):
        out, lse = ask(keys_at([0]), [-1, -1], **arguments)
        assert float(out.abs().max()) == 0.0 and lse == math.inf


def test_float8_view_reads_the_same_bytes():
    pool = keys_at([0, 1])
    assert torch.equal(ask(pool, [0, 1])[0], ask(pool.view(torch.float8_e4m3fn), [0, 1])[0])


@pytest.mark.parametrize("extra", CHECKED_EXTRAS)
@pytest.mark.parametrize("heads", [8, 16, 64])
def test_another_heads_sink_shows_in_all_that_the_selftest_asks(extra, heads):
    inputs = make_inputs(Shape(2, heads, CHECKED_WINDOW, CHECKED_EXTRAS[extra]), device="cpu")
    truth, wrong = (
        sparse_decode(**inputs.arguments() | {"attn_sink": sink})[0]
        for sink in (inputs.attn_sink, inputs.attn_sink.roll(1))
    )
    assert strict_error(wrong, truth) > 10 * SPARSE_DECODE.truth


def test_lse_base2_with_sink():
    lse = torch.tensor([[[math.log(3.0)], [math.inf]]], dtype=torch.float64)
    sink = torch.tensor([0.0, 1.5])
    with_sink = lse_base2_with_sink(lse, sink)[0, :, 0]
    assert float(with_sink[0]) == pytest.approx(2.0, abs=1e-12)  # log2(3 + 1)
    assert float(with_sink[1]) == pytest.approx(1.5 / math.log(2), abs=1e-12)  # nothing but the sink
    without = lse_base2_with_sink(lse)[0, :, 0]
    assert float(without[0]) == pytest.approx(math.log2(3), abs=1e-12) and float(without[1]) == -math.inf


def test_a_row_of_zeros_is_wrong_by_what_the_others_are():
    """As of tokens whose experts are on other cards; not by dust, which a sum of nothing may leave."""
    truth = torch.randn(8, 200, generator=torch.Generator().manual_seed(0))
    truth[3] = 0.0
    for written, is_wrong in ((0.0, False), (1e-7, False), (1e-3, True)):
        found = truth.clone()
        found[3] = written
        assert (strict_error(found, truth) > 0.01) is is_wrong
        assert relative_error(found, truth) < 0.01
    assert strict_error(truth[:0], truth[:0]) == strict_error(truth[:, :0], truth[:, :0]) == 0.0


def test_accuracy_measures_can_fail():
    truth = torch.full((100,), 1.0)
    assert relative_error(truth * 1.004, truth) == pytest.approx(0.004, rel=1e-3)
    assert relative_error(truth * float("nan"), truth) == math.inf
    for one, other in ((truth, truth * math.inf), (truth * math.inf, truth), (truth * math.inf,) * 2):
        assert relative_error(one, other) == math.inf
    assert relative_error(torch.zeros(3), torch.zeros(3)) == 0.0 and relative_error(truth, truth * 0) == math.inf
    assert complaint(truth * 1.01, truth, FLASHMLA_OUT) is not None  # inside both tolerances, but the cosine
    assert "NaN" in complaint(truth * float("nan"), truth, FLASHMLA_OUT)
    assert "infinities" in complaint(truth, truth * math.inf, FLASHMLA_LSE)
    assert "1 of 100" in complaint(truth + (torch.arange(100) == 7) * 0.02, truth, FLASHMLA_OUT)
    assert complaint(truth + 9e-4, truth, FLASHMLA_OUT) is None


def test_inputs_poison_everything_that_is_not_read():
    inputs = make_inputs(SHAPES["c4"], seed=1, device="cpu")
    pool = inputs.extra_kv_pages
    raw = pool.as_strided((pool.shape[0], pool.stride(0)), (pool.stride(0), 1))
    live = inputs.extra_indices[0, 0]
    live = live[(live >= 0) & (live < pool.shape[0] * pool.shape[1])]
    written = (raw[:, : 64 * 576].reshape(-1, 576) != 0xFF).any(dim=1).nonzero().flatten()
    first_of_row_1 = int(inputs.extra_indices[1, 0, 0])
    expected = set(live.tolist()) | ({first_of_row_1} if 0 <= first_of_row_1 < pool.shape[0] * 64 else set())
    assert set(written.tolist()) == expected
    scales = raw[:, 64 * 576 : 64 * 584].reshape(-1, 8)
    assert (scales[:, 7] == 0xFF).all() and (raw[:, 64 * 584 :] == 0xFF).all()
    assert (scales[live.long()][:, :7] != 0xFF).all()
