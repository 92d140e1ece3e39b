"""The kernels for many rows that have the bits of few, and a warp's product of few: their own text, compiled for a CPU
(mxfp4_moe_on_cpu.cpp), against the order that is written down (mxfp4_moe_order.py), to the bit. No GPU."""

from __future__ import annotations

import ctypes
import math
import re
from pathlib import Path

import pytest
import torch

from deepseek_v4_sm120.reference.mxfp4_moe import decode_e2m1
from tests.on_cpu import Numbered, made_together
from tests.ops.mxfp4_moe_order import SLICES, STEP, prepared, product

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
HEADERS = ("numbers.h", "device/stages.cuh")
HEADERS += tuple(f"mxfp4_moe/{name}" for name in ("mxfp4_moe.h", "sorted.h", "config.h", "product.cuh"))
HEADERS += ("mxfp4_moe/swiglu.cuh", "mxfp4_moe/units.cuh", "mxfp4_moe/sorted.cuh", "mxfp4_moe/wide.cuh")
POINTER, INT64, INT32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
TOPK = 2
TILE, WIDE_TILE = 64, 112  # pairs


class Prepare(ctypes.Structure):
    _fields_ = [("source", POINTER), ("to", POINTER), ("powers", POINTER), ("stride", INT64), ("rows", INT64)]
    _fields_ += [("slices", INT32), ("steps", INT32)]


class Sorted(ctypes.Structure):
    _fields_ = [(name, POINTER) for name in ("x", "powers", "codes", "scales")]
    _fields_ += [("expert_bytes", INT64), ("expert_scale_bytes", INT64)]
    _fields_ += [(name, POINTER) for name in ("pairs", "expert", "begin", "end", "h", "y", "y16")] + [
        ("limit", ctypes.c_float)
    ]
    _fields_ += [(name, INT32) for name in ("num_tiles", "topk", "inputs", "slices", "steps", "first", "outputs")]
    _fields_ += [(name, INT32) for name in ("gate_row", "up_row", "x_row_chunks")] + [("taken", POINTER)]


def text_of(*changes: tuple[str, str]) -> str:
    """The kernels, each change made in their text, which must have it."""
    text = "".join((REPO / "csrc" / name).read_text() for name in HEADERS)
    text = re.sub(r"^#(include|pragma once).*$", "", text, flags=re.M)
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return (HERE / "mxfp4_moe_on_cpu.cpp").read_text().replace("//@@ the kernels", text)


@pytest.fixture(scope="module")
def libraries() -> dict[str, Numbered]:
    """The kernels as they are (""), and each text that is not so, of which the products of down are there."""
    texts = {"": text_of()} | {
        name: f"#define DOWN\n{text_of(change)}" for name, change in (NOT_SO | WIDE_NOT_SO).items()
    }
    made = made_together(list(texts.values()), "-Og", "-w", "-ffp-contract=off")
    for library in made:
        for name in ("prepare", "multiply", "multiply_wide"):
            getattr(library, name).restype = ctypes.c_bool
    made[0].few.restype = ctypes.c_bool
    return dict(zip(texts, made, strict=True))


@pytest.fixture(scope="module")
def library(libraries):
    return libraries[""]


def steps_of(inputs: int) -> int:
    return inputs // SLICES[inputs] // STEP


def prepare(library, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, inputs = x.shape
    to, powers = torch.empty((rows, inputs), dtype=torch.float16), torch.empty((rows, SLICES[inputs]))
    given = Prepare(x.data_ptr(), to.data_ptr(), powers.data_ptr(), x.stride(0), rows, SLICES[inputs], steps_of(inputs))
    assert library.prepare(ctypes.byref(given)), "threads wait for ever"
    return to, powers


def numbers(rows: int, inputs: int, generator) -> torch.Tensor:
    x = torch.randn((rows, inputs), generator=generator)
    x[::3] = x[::3] ** 5
    return x.bfloat16()


@pytest.mark.parametrize("inputs", [256, 384, 1024])
def test_what_is_prepared(library, inputs):
    """Of 8 inputs, 0 and 4 are beside each other, then 1 and 5, 2 and 6, 3 and 7: as a word of codes is decoded."""
    x = numbers(5, inputs, torch.Generator().manual_seed(1))
    found, powers = prepare(library, x)
    values, expected = prepared(x)
    assert torch.equal(powers, expected)
    ordered = values.flatten(1).unflatten(1, (-1, 2, 4)).transpose(2, 3).flatten(1)
    assert torch.equal(found.double(), ordered)


@pytest.mark.parametrize("passes", [1, 2, 4])
@pytest.mark.parametrize("inputs", [256, 768, 4096])
def test_a_warp_of_few_rows(library, inputs, passes):
    """Two rows at a time, each by itself in the mma's columns; slices added here."""
    generator = torch.Generator().manual_seed(inputs)
    x = numbers(2 * passes, inputs, generator)
    codes = torch.randint(0, 256, (16, inputs // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 126, (16, inputs // 32), generator=generator, dtype=torch.uint8)
    partial = torch.full((SLICES[inputs], 8, 16), math.nan)
    words = (POINTER(tensor.data_ptr()) for tensor in (x, codes, scales, partial))
    assert library.few(inputs, passes, *words), "threads wait for ever"
    total = partial[0]
    for part in partial[1:]:
        total = total + part
    assert torch.equal(total[: 2 * passes], product(x, codes, scales))


# pairs of each expert; blocks, also such as have no unit; inputs; outputs
CASES = {
    "one pair": ([1], 1, 256, 128),
    "half a tile and one more": ([33], 1, 256, 128),
    "a tile and a bit": ([0, 70, 3], 2, 256, 256),
    "three steps": ([12, 40], 1, 384, 128),
    "two slices": ([9, 64], 3, 1024, 128),
    "more slices than have room": ([5], 1, 2048, 128),
    "all heights of a tile": ([16, 0, 17, 33, 49, 64], 2, 512, 128),
}


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_the_bits(library, name, gated):
    assert has_the_bits(library, name, gated)


SUM = "__fadd_rn(sums[0][n][i], sums[1][n][i])"
NOT_SO = {
    "one sum after the other": (
        f"__fadd_rn(before[n][i], {SUM});",
        "__fadd_rn(__fadd_rn(before[n][i], sums[0][n][i]), sums[1][n][i]);",
    ),
    "the other group's scale": ("t == 0 ? scales", "t == 1 ? scales"),
    "x without its grid": ("(150 + max(", "(130 + max("),
    "a copy behind the last pair's": ("x_row + 16 * k < tile.count", "x_row + 16 * k + 1 < tile.count"),
}


@pytest.mark.parametrize("what", NOT_SO)
def test_what_is_not_so_is_seen(libraries, what):
    assert not has_the_bits(libraries[what], "a tile and a bit", False)


def has_the_bits(library, name: str, gated: bool) -> bool:
    counts, blocks, inputs, outputs = CASES[name]
    x = numbers(rows_of(counts) if gated else sum(counts), inputs, torch.Generator().manual_seed(len(name)))
    values, powers = prepare(library, x)
    return all(is_right(library.multiply, counts, blocks, x, values, powers, outputs, 128, gated, product))


def rows_of(counts: list[int]) -> int:
    return -(-sum(counts) // TOPK) + 2  # some pairs have no expert


def is_right(
    multiply, counts, blocks, x, values, powers, outputs, wide, gated, expected, scale=110, tile=TILE
) -> list[bool]:
    """Whether a product of `values`, which stand for x, is `expected`, of each expert. Down: the last outputs."""
    inputs, experts, local, rows = x.shape[1], len(counts), sum(counts), rows_of(counts)
    generator = torch.Generator().manual_seed(inputs)
    pairs = torch.randperm(rows * TOPK, generator=generator)[:local].int()
    tiles = []
    for e in range(experts):
        first, end = sum(counts[:e]), sum(counts[: e + 1])
        tiles += [(e, begin, min(begin + tile, end)) for begin in range(first, end, tile)]
    tiles.append((-1, 0, 0))
    expert, begin, end = torch.tensor(tiles, dtype=torch.int32).T.contiguous()
    inter = outputs // 2
    codes = torch.randint(0, 256, (experts, outputs, inputs // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(scale, 126, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
    h = torch.full((local, inter), math.nan, dtype=torch.bfloat16)
    first, columns = (0, inter) if gated else (outputs - wide, wide)
    y = torch.full((rows * TOPK, columns), math.nan)
    y16 = y.bfloat16()
    taken = torch.zeros(1, dtype=torch.int32)
    given = Sorted(
        *(tensor.data_ptr() for tensor in (values, powers, codes, scales)),
        *(codes.stride(0), scales.stride(0)),
        *(tensor.data_ptr() for tensor in (pairs, expert, begin, end, h, y, y16)),
        *(math.inf, len(tiles), TOPK, inputs, powers.shape[1], inputs // powers.shape[1] // STEP, first, columns),
        *(0, inter, values.stride(0) // 8, taken.data_ptr()),
    )
    if not multiply(ctypes.byref(given), blocks, gated):
        return False  # threads wait for ever
    y = y16 if wide == 256 else y
    right = []
    for e in range(experts):
        here = torch.arange(sum(counts[:e]), sum(counts[: e + 1]))
        if gated:
            gate, up = expected(x[(pairs[here] // TOPK).long()], codes[e], scales[e]).chunk(2, dim=1)
            right.append(torch.equal(h[here], (gate * up).bfloat16()))
        else:
            right.append(
                torch.equal(y[pairs[here].long()], expected(x[here], codes[e], scales[e])[:, first:].to(y.dtype))
            )
    if not gated:
        others = torch.ones(rows * TOPK, dtype=torch.bool)
        others[pairs.long()] = False
        assert bool(y[others].isnan().all()), "a pair without an expert was written"
    return right


WIDE = {  # counts, blocks, inputs, outputs
    "one pair": ([1], 1, 256, 256),
    "all heights of a tile": ([16, 0, 17, 33, 49, 65, 81, 112], 2, 256, 256),
    "tiles and a bit": ([120, 230], 3, 384, 512),
    "more stages than have room": ([5, 40], 1, 1024, 256),
    "places for scales that are filled in part": ([70], 1, 768, 512),
}


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", WIDE)
def test_wide(library, name, gated):
    assert is_right_wide(library, name, gated)


WIDE_NOT_SO = {
    "pairs of another tile": ("p.pairs + unit.begin + min(thread", "p.pairs + min(thread"),
    "the last pair is not copied": ("x_row + 16 * k < unit.count", "x_row + 16 * k + 1 < unit.count"),
    "scales of the stage that is multiplied": (
        "const int behind = last ? 0 : i;",
        "const int behind = last ? 0 : i - 1;",
    ),
    "x of another piece": ("(j & 1) * 64 + (j & 2) * 16", "(j & 1) * 64"),
    "a unit that nobody takes": ("tell(p, turn + 1, ahead, units)", "tell(p, turn + 1, ahead + 1, units)"),
}


@pytest.mark.parametrize("what", WIDE_NOT_SO)
def test_what_is_not_so_of_wide_is_seen(libraries, what):
    assert not is_right_wide(libraries[what], "tiles and a bit", False)


def is_right_wide(library, name: str, gated: bool) -> bool:
    """Of numbers whose sums are exact in whatever order."""
    counts, blocks, inputs, outputs = WIDE[name]
    generator = torch.Generator().manual_seed(len(name))
    x = torch.randint(-4, 5, (rows_of(counts) if gated else sum(counts), inputs + 8), generator=generator).bfloat16()
    x = x[:, :inputs]

    def exact(x, codes, scales):
        weights = decode_e2m1(codes).unflatten(1, (-1, 32)) * 2.0 ** (scales.double() - 127)[:, :, None]
        return (x.double() @ weights.flatten(1).T).float()

    given = (library.multiply_wide, counts, blocks, x, x, torch.empty(0, 1), outputs, 256, gated, exact)
    return all(is_right(*given, scale=123, tile=WIDE_TILE))
