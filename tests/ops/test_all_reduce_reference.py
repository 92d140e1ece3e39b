"""The specification against arithmetic number by number: float32 sums in the order of ranks, rounded to bf16 once, and
gathers."""

import ctypes
import struct

import pytest
import torch

from deepseek_v4_sm120.reference.all_reduce import all_gather
from deepseek_v4_sm120.reference.all_reduce import all_reduce as reference
from deepseek_v4_sm120.specs.all_reduce import make_logits, make_terms


def value(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def sum_of(words: list[int]) -> int | None:
    """bf16 bits of the sum of bf16 bits; None: a NaN."""
    total = value(words[0])
    for word in words[1:]:
        total = ctypes.c_float(total + value(word)).value  # a double holds the sum of two floats' exactly enough
    if total != total:
        return None
    bits = struct.unpack("<I", struct.pack("<f", total))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_number_by_number(ranks):
    terms = make_terms(ranks, 3, seed=ranks, hidden=512, hard=True)
    found = reference(terms).view(torch.int16).flatten().tolist()
    nan = reference(terms).isnan().flatten().tolist()
    words = [[word & 0xFFFF for word in term.view(torch.int16).flatten().tolist()] for term in terms]
    for i, of_ranks in enumerate(zip(*words, strict=True)):
        expected = sum_of(list(of_ranks))
        assert nan[i] if expected is None else found[i] & 0xFFFF == expected, i


def test_the_order_of_ranks_is_part_of_it():
    big = [torch.tensor([[x]]).bfloat16() for x in (2.0**30, 1.0, -(2.0**30))]
    assert float(reference(big)) == 0.0
    assert float(reference([big[0], big[2], big[1]])) == 1.0


def test_it_rounds_once():
    """1 and three times 2^-9: at every hop they would be lost, together they are more than half a step of bf16."""
    terms = [torch.tensor([[x]]).bfloat16() for x in (1.0, 2.0**-9, 2.0**-9, 2.0**-9)]
    rounded = ((terms[0] + terms[1]) + terms[2]) + terms[3]
    assert float(reference(terms)) == 1.0 + 2.0**-7 and float(rounded) == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gather_moves_every_number_and_keeps_each_nan_one(dtype):
    sent = make_logits(4, 3, 1, columns=48, dtype=dtype)
    found = all_gather(sent)
    assert found.shape == (3, 192) and found.dtype == dtype
    for row in range(3):
        for rank in range(4):
            for column in range(48):
                one, was = found[row, 48 * rank + column], sent[rank][row, column]
                assert torch.equal(one, was) or bool(one.isnan()) and bool(was.isnan())
    words = [word for logits in sent for word in logits.view(torch.int32).flatten().tolist()]
    assert -1 in words and -1 not in found.view(torch.int32).flatten().tolist()
    assert found.view(torch.int32).flatten().tolist().count(0x7FFF7FFF) == words.count(-1)
