"""Random terms that every rank knows, and the look at all their sums: each one launch for the sums of a whole graph.

A value is a hash of (seed, round, rank, place), so no two exchanges have the same rows, none travels over the CPU, and
a rank knows what the others send. Few words are two NaNs of all bits, which is what an empty place holds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
NOTHING_IN = 4096  # a word in so many is two NaNs of all bits
NAN = 0x7FFF  # of a sum


@triton.jit
def _hash(x):
    """int32 -> int32, Chris Wellons' lowbias32; shifts are logical."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * -2073254261  # 0x846ca68b
    return x ^ ((x >> 16) & 0xFFFF)


@triton.jit
def _term(place, seed, rank, NOTHING_IN: tl.constexpr):
    """The bits of a bf16 at `place`, as int32: a sign, one of eight exponents (2^-7 .. 1), all mantissas."""
    mixed = _hash(place ^ _hash(seed + rank * 0x01000193))
    bits = ((mixed & 1) << 15) | ((120 + ((mixed >> 1) & 7)) << 7) | ((mixed >> 4) & 0x7F)
    word = _hash(((place >> 1) & 0x7FFFFFFF) ^ _hash(seed + rank * 0x01000193 + 0x1B873593))
    return tl.where((word & (NOTHING_IN - 1)) == 0, 0xFFFF, bits)


@triton.jit
def _value(bits):
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def fill_kernel(x, state, seed, rank, count, NOTHING_IN: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    now = seed + tl.load(state) * 0x2545F491
    tl.store(x + place, _term(place, now, rank, NOTHING_IN).to(tl.int16), mask=place < count)


@triton.jit
def check_kernel(
    out, state, seed, count, RANKS: tl.constexpr, NOTHING_IN: tl.constexpr, NAN: tl.constexpr, BLOCK: tl.constexpr
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    now = seed + tl.load(state) * 0x2545F491
    total = _value(_term(place, now, 0, NOTHING_IN))
    for rank in tl.static_range(1, RANKS):
        total = total + _value(_term(place, now, rank, NOTHING_IN))
    word = total.to(tl.int32, bitcast=True)  # to the nearest, ties to even, by hand: nothing here overflows
    rounded = ((word + 0x7FFF + ((word >> 16) & 1)) >> 16) & 0xFFFF
    expected = tl.where(total != total, NAN, rounded)
    found = tl.load(out + place, mask=place < count, other=0).to(tl.int32) & 0xFFFF
    wrong = tl.sum(((found != expected) & (place < count)).to(tl.int32))
    if wrong > 0:
        tl.atomic_add(state + 1, wrong)


class Terms:
    """The terms of `rows` exchanges one behind the other, `x`, and their sums, `out`, with the same places.

    state: [round, wrong sums so far]; `next_round` changes all terms."""

    def __init__(self, rows: list[int], hidden: int, rank: int, ranks: int, seed: int, device):
        self.rows, self.rank, self.ranks, self.seed = rows, rank, ranks, seed
        self.x, self.out = (torch.zeros(sum(rows), hidden, dtype=torch.bfloat16, device=device) for _ in range(2))
        self.state = torch.zeros(2, dtype=torch.int32, device=device)

    def pairs(self):
        """(x, out) of each exchange."""
        return zip(self.x.split(self.rows), self.out.split(self.rows), strict=True)

    def fill(self) -> None:
        grid = (triton.cdiv(self.x.numel(), BLOCK),)
        words = self.x.view(torch.int16)
        fill_kernel[grid](words, self.state, self.seed, self.rank, words.numel(), NOTHING_IN, BLOCK)

    def check(self) -> None:
        grid = (triton.cdiv(self.out.numel(), BLOCK),)
        words = self.out.view(torch.int16)
        check_kernel[grid](words, self.state, self.seed, words.numel(), self.ranks, NOTHING_IN, NAN, BLOCK)

    def next_round(self) -> None:
        self.state[:1] += 1

    @property
    def wrong(self) -> int:
        return int(self.state[1])
