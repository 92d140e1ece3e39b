"""The kernels for few rows in pairs and for 32 heads: their own text, compiled for a CPU
(sparse_decode_pairs_on_cpu.cpp), against the reference, and to the bit against the text of the kernel for few rows. No
GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
import re
from pathlib import Path

import pytest
import torch

from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.reference.sparse_decode import sparse_decode as reference
from deepseek_v4_sm120.specs.bounds import SPARSE_DECODE
from deepseek_v4_sm120.specs.sparse_decode import CacheShape, Inputs, Shape, make_inputs
from tests.on_cpu import Numbered, made_together

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
OPERATOR = ("sparse_decode.h", "config.h", "work.cuh", "fold.cuh", "roles.cuh", "score.cuh", "softmax.cuh", "value.cuh")
OPERATOR += ("gather.cuh", "merge.cuh", "kernel.cuh")
HEADERS = ("numbers.h", "kv_page_layout.h", *(f"sparse_decode/{name}" for name in OPERATOR))
POINTER, INT64 = ctypes.c_void_p, ctypes.c_int64
PER_ROW = ("q", "indices", "topk_length", "extra_indices", "extra_topk_length")


class GivenCache(ctypes.Structure):
    _fields_ = [("pages", POINTER), ("page_bytes", INT64), ("page_size", INT64), ("num_pages", INT64)]
    _fields_ += [("indices", POINTER), ("indices_stride", INT64), ("width", INT64), ("lengths", POINTER)]


class Given(ctypes.Structure):
    _fields_ = [(name, POINTER) for name in ("q", "out", "lse", "sink")]
    _fields_ += [(name, INT64) for name in ("rows", "heads", "blocks", "wide", "at_once")]
    _fields_ += [("scale_log2", ctypes.c_float), ("main", GivenCache), ("extra", GivenCache), ("table", POINTER)]
    _fields_ += [("table_stride", INT64), ("num_tables", INT64), ("table_of_row", POINTER)]


def text_of(*changes: tuple[str, str]) -> str:
    """The kernel, each change made in its text, which must have it."""
    kernel = "".join((REPO / f"csrc/sparse_decode/{name}.cuh").read_text() for name in ("pairs", "wide"))
    for old, new in changes:
        assert old in kernel, old
        kernel = kernel.replace(old, new)
    text = "".join((REPO / "csrc" / name).read_text() for name in HEADERS)
    divisor = re.search(
        r"^FastDivisor make_divisor\(.*?^}", (REPO / "csrc/sparse_decode/launch.cu").read_text(), re.M | re.S
    )
    groups = re.search(r"constexpr int kGroups = .*", (REPO / "csrc/sparse_decode/kernels.h").read_text())
    text += f"namespace dsv4::sparse_decode {{ {divisor[0]} namespace pairs {{ {groups[0]}\n }} }}\n{kernel}"
    text = re.sub(r"^(#include|#pragma once|  extern __shared__).*$", "", text, flags=re.M)
    for register, name in (("ctaid", "blockIdx"), ("tid", "threadIdx")):
        text = re.sub(rf'asm volatile\("mov.u32 %0, %{register}.(.);" : "=r"\(v\)\);', rf"v = {name}.\1;", text)
    return (HERE / "sparse_decode_pairs_on_cpu.cpp").read_text().replace("//@@ the kernels", text)


@pytest.fixture(scope="module")
def libraries() -> dict[str, Numbered]:
    """The kernels as they are (""), and each change, of which the kernels for lists in pairs are there."""
    texts = {"": text_of()} | {name: f"#define LISTS\n{text_of(change)}" for name, change in CHANGES.items()}
    made = made_together(list(texts.values()), "-Og", "-w", "-ffp-contract=off")
    return dict(zip(texts, made, strict=True))


@pytest.fixture(scope="module")
def library(libraries):
    return libraries[""]


def pointer(tensor) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def cache_of(pages, indices, lengths) -> GivenCache:
    if pages is None:
        return GivenCache()
    listed = (None, 0, 0) if indices is None else (pointer(indices), indices.stride(0), indices.shape[2])
    return GivenCache(pointer(pages), pages.stride(0), pages.shape[1], pages.shape[0], *listed, pointer(lengths))


def given(inputs: Inputs, blocks: int, wide: bool | None, at_once: bool, by_table: bool):
    """(the call, what it writes)"""
    i, (rows, _, heads, _) = inputs, inputs.q.shape
    out, lse = torch.full_like(i.q, math.nan), torch.full((rows, heads, 1), math.nan)
    main = cache_of(i.kv_pages, i.indices, i.topk_length)
    extra = cache_of(i.extra_kv_pages, None if by_table else i.extra_indices, i.extra_topk_length)
    table = (None, 0, 0, None)
    if by_table:
        extra.width = i.page_table.shape[1] * i.extra_kv_pages.shape[1]
        table = (pointer(i.page_table), i.page_table.stride(0), i.page_table.shape[0], pointer(i.page_table_rows))
    wide = (heads > 16 if wide is None else wide) and not by_table
    of_call = (rows, heads, blocks, wide, at_once, 512**-0.5 * math.log2(math.e))
    tensors = (i.q, out, lse, i.attn_sink)
    return Given(*(pointer(tensor) for tensor in tensors), *of_call, main, extra, *table), (out, lse)


def run(library, inputs: Inputs, *, blocks=1, wide=None, at_once=False, by_table=False):
    """(out, lse) of all rows; wide: by the kernel for 32 heads, None: as launched."""
    call, result = given(inputs, blocks, wide, at_once, by_table)
    library.in_pairs.restype = ctypes.c_bool
    assert library.in_pairs(ctypes.byref(call)), "threads wait for ever"
    return result


def few(library, inputs: Inputs):
    """The same by the kernel for few rows."""
    call, result = given(inputs, 0, False, False, False)
    library.few.restype = ctypes.c_bool
    assert library.few(ctypes.byref(call)), "threads wait for ever"
    return result


def rows_of(inputs: Inputs, rows) -> Inputs:
    there = [name for name in PER_ROW if getattr(inputs, name) is not None]
    return dataclasses.replace(inputs, **{name: getattr(inputs, name)[rows].contiguous() for name in there})


def right(inputs: Inputs, result) -> bool:
    truth, true_lse = reference(**inputs.arguments())
    finite = torch.isfinite(true_lse)
    if not torch.equal(finite, torch.isfinite(result[1])):
        return False
    close = float((result[1] - true_lse)[finite].abs().max()) <= 1e-4
    return close and relative_error(result[0], truth) <= SPARSE_DECODE.truth


def same(one, other) -> bool:
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(one, other, strict=True))


WINDOW = CacheShape(256, 128, lengths=(128, 33, 0, 100), masked=0.1)
C4 = CacheShape(64, 96, lengths=(96, 64, 0, 65, 31), masked=0.1)


def inputs_of(heads: int, rows: int = 5, main=WINDOW, extra=C4, **more) -> Inputs:
    return make_inputs(Shape(rows, heads, main, extra, **more), device="cpu")


@pytest.mark.parametrize("heads", [5, 17])
def test_the_bits_of_the_kernel_for_few_rows(library, heads):
    """Masked slots, lengths of all kinds and none, NaN in what is not named, several rows a group; copies that come as
    late as they may and at once."""
    inputs = inputs_of(heads, rows=4)
    expected = few(library, inputs)
    assert right(inputs, expected)
    for at_once in (False, True):
        assert same(run(library, inputs, at_once=at_once), expected)


@pytest.mark.parametrize(
    "more", [{"query_scale": 60.0}, {"wide_scales": True}, {"flashmla": True}, {"sink": False}], ids=str
)
def test_the_same_bits_for_other_numbers(library, more):
    """References that move within a row, exponents far apart, infinite sinks, none."""
    inputs = inputs_of(8, rows=2, **more)
    assert same(run(library, inputs), few(library, inputs))


def test_blocks_head_groups_and_neighbours_do_not_count(library):
    inputs = inputs_of(34, rows=3, main=CacheShape(64, 40, lengths=(40, 0, 7)))
    whole = run(library, inputs)
    assert right(inputs, whole)
    assert same(run(library, inputs, wide=False), whole)
    assert same(run(library, inputs, blocks=3), whole)
    order = torch.tensor([2, 0])
    assert same(run(library, rows_of(inputs, order), blocks=2), [part[order] for part in whole])
    alone = run(
        library,
        dataclasses.replace(inputs, q=inputs.q[:, :, 16:24].contiguous(), attn_sink=inputs.attn_sink[16:24].clone()),
    )
    assert same(alone, (whole[0][:, :, 16:24].contiguous(), whole[1][:, 16:24].contiguous()))


def test_a_page_table_gives_the_bits_of_its_list(library):
    extra = CacheShape(48, 96, lengths=(96, 0, 50), tables=2, masked=0.2)
    inputs = inputs_of(20, rows=3, main=CacheShape(64, 33), extra=extra)
    inputs.page_table_rows[1] = 2
    inputs.extra_indices[1] = -1
    assert same(run(library, inputs, by_table=True), run(library, inputs))


# what the text says, made otherwise: each must be seen
CHANGES = {
    "the accumulator is not rescaled": ("acc[t][s][0][k] *= f0.x", "acc[t][s][0][k] *= 1"),
    "both halves of a leaf have one mask": ("ring.valid[at.stage][half] =", "ring.valid[at.stage][0] ="),
    "all who gather fill the same stages": ("n = kWide ? set : 0", "n = 0"),
    "who fills a stage does not wait": ("ring.free[at.stage].wait(at.phase ^ 1);", ""),
    "the last leaf is the last but one": ("leaf + 1 == w.leaves", "leaf + 2 >= w.leaves"),
    "tiles are added in another order": (
        "add(add(parts[0], parts[1]), parts[2])",
        "add(parts[0], add(parts[1], parts[2]))",
    ),
    "tiles of 32 heads are not added by pairs": (
        "add(sums, add(parts[t], parts[t + 1]))",
        "add(add(sums, parts[t]), parts[t + 1])",
    ),
    "values have the other tile's exponents": (
        "accumulate_tile(second, scales[1]",
        "accumulate_tile(second, scales[0]",
    ),
}


@pytest.fixture(scope="module")
def moving(library):
    """References that move within a row, heads of two tiles; and what few rows make of it."""
    inputs = inputs_of(17, rows=2, query_scale=60.0)
    return inputs, few(library, inputs)


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_otherwise_is_seen(libraries, moving, change):
    inputs, expected = moving
    changed = libraries[change]
    with pytest.raises(AssertionError, match="other bits|wait for ever"):
        for at_once, wide in itertools.product((False, True), repeat=2):
            assert same(run(changed, inputs, at_once=at_once, wide=wide), expected), "other bits"
