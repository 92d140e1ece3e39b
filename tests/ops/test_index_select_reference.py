"""The reference of index_select against loops over single numbers, and against bytes worked out by hand. CPU only."""

from __future__ import annotations

import math

import pytest
import torch

from deepseek_v4_sm120.reference import index_select as reference
from deepseek_v4_sm120.specs import index_select as spec
from deepseek_v4_sm120.specs.check import Failure
from deepseek_v4_sm120.specs.index_select import Shape, make_inputs


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


def e2m1(code: int) -> float:
    exponent, mantissa = code >> 1 & 3, code & 1
    value = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -value if code & 8 else value


def one_logit(inputs, row: int, entry: int) -> float:
    """From bytes, one number at a time."""
    raw = inputs.k_pages
    page = raw.as_strided((raw.stride(0),), (1,), int(inputs.page_table[row, entry // 64]) * raw.stride(0)).tolist()
    at = entry % 64
    total = 0.0
    if inputs.q_scales is None:
        key = [e4m3(b) for b in page[at * 128 : at * 128 + 128]]
        bits = bytes(page[8192 + 4 * at : 8192 + 4 * at + 4])
        scale = torch.frombuffer(bytearray(bits), dtype=torch.float32).item()
    else:
        data = page[at * 64 : at * 64 + 64]
        scales = [2.0 ** (page[4096 + 4 * at + g] - 127) for g in range(4)]
        key = [e2m1(data[d // 2] >> (4 * (d % 2)) & 15) * scales[d // 32] for d in range(128)]
        scale = 1.0
    for head in range(64):
        if inputs.q_scales is None:
            q = [e4m3(b) for b in inputs.q[row, 0, head].view(torch.uint8).tolist()]
        else:
            word, data = int(inputs.q_scales[row, 0, head]), inputs.q[row, 0, head].tolist()
            q = [
                e2m1(data[d // 2] >> (4 * (d % 2)) & 15) * 2.0 ** ((word >> (8 * (d // 32)) & 255) - 127)
                for d in range(128)
            ]
        total += float(inputs.weights[row, head]) * max(0.0, math.fsum(a * b for a, b in zip(q, key, strict=True)))
    return scale * total


@pytest.mark.parametrize("fp4", [False, True])
def test_logits_from_single_bytes(fp4):
    inputs = make_inputs(Shape(2, (70, 3), fp4, page_gap=32), seed=5, device="cpu")
    logits = reference.mqa_logits(**inputs.arguments())
    for row, entry in ((0, 0), (0, 63), (0, 64), (0, 69), (1, 2)):
        assert float(logits[row, entry]) == pytest.approx(one_logit(inputs, row, entry), rel=1e-12, abs=1e-12)
    assert bool((logits[0, 70:] == -math.inf).all()) and bool((logits[1, 3:] == -math.inf).all())
    assert len({round(v, 9) for v in logits[0, :70].tolist()}) == 70


def brute_force(values, length, k):
    order = sorted(range(length), key=lambda j: (math.isnan(values[j]), 0 if math.isnan(values[j]) else -values[j], j))
    return sorted(order[:k])


@pytest.mark.parametrize("k", [1, 4, 16])
def test_topk_by_sorting(k):
    choices = torch.tensor([math.nan, -math.inf, -1.0, -0.0, 0.0, 1.0, math.inf])
    generator = torch.Generator().manual_seed(0)
    for length in (0, 1, k, 15, 40):
        scores = choices[torch.randint(0, len(choices), (3, 40), generator=generator)]
        slots, entries = reference.topk_select(scores, torch.tensor([length] * 3), k=k)
        for row in range(3):
            expected = brute_force(scores[row].tolist(), length, k)
            assert entries[row].tolist() == expected + [-1] * (k - len(expected))
        assert torch.equal(slots, entries)


def test_page_transform_and_pages_outside():
    scores = torch.arange(200.0)[None]
    table = torch.tensor([[7, -1, 3, 9]], dtype=torch.int32)
    slots, entries = reference.topk_select(scores, torch.tensor([200]), k=200, page_table=table, num_pages=8)
    assert entries[0].tolist() == list(range(200))
    assert slots[0, 0] == 7 * 64 and slots[0, 63] == 7 * 64 + 63 and slots[0, 128] == 3 * 64
    assert bool((slots[0, 64:128] == -1).all()) and bool((slots[0, 192:] == -1).all())


def test_ties_zeros_and_nan():
    scores = torch.tensor([[0.0, -0.0, 0.0, math.nan, -math.inf, -0.0]])
    assert reference.topk_select(scores, torch.tensor([6]), k=3)[1].tolist() == [[0, 1, 2]]
    assert reference.topk_select(scores, torch.tensor([6]), k=5)[1].tolist() == [[0, 1, 2, 4, 5]]


def test_the_self_test_judges_logits_by_their_own_rows_greatest(monkeypatch):
    """A row of small logits, a thousandth of it off, is next to nothing beside another row's."""
    inputs = make_inputs(Shape(3, (1000, 64, 700)), device="cpu")
    inputs.weights[1] *= 1e-3
    truth = reference.mqa_logits(**inputs.arguments())
    off = torch.zeros_like(truth)
    monkeypatch.setattr(spec, "make_inputs", lambda shape: inputs)
    monkeypatch.setattr(spec.op, "mqa_logits", lambda **given: truth.float() + off)
    spec._check_logits(False)
    off[1, 3] = 1e-3 * truth[1, :64].abs().max()
    assert off[1, 3] < 2e-6 * truth[0, :1000].abs().max()
    with pytest.raises(Failure, match="row's greatest"):
        spec._check_logits(False)


@pytest.mark.parametrize("fp4", [False, True])
def test_keys_that_come_again_are_ties_at_the_border(fp4):
    """Of the self-test: a choice that takes the later of equals differs."""
    inputs = make_inputs(Shape(2, (3000, 9001), fp4, distinct=700), device="cpu")
    logits = reference.mqa_logits(**inputs.arguments()).float()
    _, entries = reference.topk_select(logits, inputs.lengths)
    for row, chosen in zip(logits, entries.long(), strict=True):
        equal = (row == row[chosen].min()).nonzero()[:, 0]
        taken = torch.isin(equal, chosen)
        assert 0 < int(taken.sum()) < len(equal) and bool(taken[: int(taken.sum())].all())


def test_fp4_rounding_of_ties_and_signs():
    x = torch.zeros(1, 128)
    x[0, :8] = torch.tensor([6.0, 0.25, 0.75, 1.25, 2.5, 5.0, -0.1, -5.1])
    packed, exponents = reference.quantise_fp4(x)
    assert exponents[0, 0] == 127
    assert reference.fp4_values(packed)[0, :8].tolist() == [6.0, 0.0, 0.5, 1.0, 2.0, 4.0, 0.0, -6.0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_slots_of_dealt_entries_one_at_a_time(dtype):
    generator = torch.Generator().manual_seed(0)
    ranks, rows, columns, k, pages = 3, 7, 4, 40, 5
    table = torch.randint(-2, 9, (rows, columns), generator=generator, dtype=torch.int32)
    dealt = torch.randint(-1, 64 * columns + 30, (ranks, 3, k), generator=generator)
    slots, entries = reference.dealt_slots(dealt.to(dtype), table, num_pages=pages)
    for row in range(rows):
        for at, entry in enumerate(dealt[row % ranks, row // ranks].tolist()):
            is_entry = 0 <= entry < 64 * columns
            page = int(table[row, entry // 64]) if is_entry else -1
            assert int(entries[row, at]) == (entry if is_entry else -1)
            assert int(slots[row, at]) == (64 * page + entry % 64 if 0 <= page < pages else -1)
