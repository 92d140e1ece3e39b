"""ops.sparse_decode on a GPU against float64: production shapes, hostile inputs, invariance, graphs, streams.

Every input is poisoned: bytes that the specification does not read are NaN (specs/sparse_decode.py). The
kernel always runs before the reference, so that it cannot profit from memory that the reference left behind.
"""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepseek_v4_sm120.ops.sparse_decode import sparse_decode
from deepseek_v4_sm120.reference import kv_pages
from deepseek_v4_sm120.reference.accuracy import complaint, relative_error, strict_error
from deepseek_v4_sm120.reference.sparse_decode import sparse_decode as reference
from deepseek_v4_sm120.specs.bounds import SPARSE_DECODE
from deepseek_v4_sm120.specs.sparse_decode import (
    FLASHMLA_LSE,
    FLASHMLA_OUT,
    LSE,
    CacheShape,
    Inputs,
    Shape,
    make_inputs,
)

pytestmark = pytest.mark.gpu

REPO = Path(__file__).resolve().parents[2]

WINDOW = CacheShape(256, 128, lengths=(128, 128, 77))
C4 = CacheShape(64, 512, lengths=(512, 512, 300))
C4_PRO = CacheShape(64, 1024, lengths=(1024, 801))
C128_SHORT = CacheShape(2, 8192, lengths=(64, 1, 8, 250), ascending=True)
C128_LONG = CacheShape(2, 8192, lengths=(8192, 4096, 1500), ascending=True)
EXTRAS = {"window": None, "C4": C4, "C4 Pro": C4_PRO, "C128 short": C128_SHORT, "C128 long": C128_LONG}


@pytest.fixture(autouse=True, params=["few rows", "few rows in pairs", "many rows"])
def kernel(request, monkeypatch):
    """Every test runs through all kernels, whatever its number of rows and heads."""
    many, pairs = request.param == "many rows", request.param == "few rows in pairs"
    monkeypatch.setattr("deepseek_v4_sm120.ops.sparse_decode.PREFILL_ROWS", 1 if many else 10**9)
    monkeypatch.setattr("deepseek_v4_sm120.ops.sparse_decode.PAIR_ROWS", 1 if pairs else 10**9)
    monkeypatch.setattr("deepseek_v4_sm120.ops.sparse_decode.PREFILL_HEADS", 1)
    return request.param


def call(inputs: Inputs, **more):
    return sparse_decode(**inputs.arguments(), return_lse=True, **more)


def verify(case, inputs: Inputs, result) -> None:
    """The result of a call that has been made, against float64."""
    out, lse = result
    truth, true_lse = reference(**inputs.arguments())
    error = strict_error(out, truth)
    assert error <= SPARSE_DECODE.truth, f"{case}: relative error {error:.5f}, allowed {SPARSE_DECODE.truth}"
    problem = complaint(lse, true_lse, LSE)
    assert problem is None, f"{case}: lse: {problem}"
    empty = true_lse[:, :, 0] == math.inf
    worst = float(out[:, 0][empty].abs().max()) if bool(empty.any()) else 0.0
    assert worst == 0.0, f"{case}: rows without a candidate must give 0, got {worst}"


def check(case, shape: Shape, device, *, seed: int = 0, **tolerance) -> None:
    inputs = make_inputs(shape, seed=seed, device=device)
    verify(f"{case}, {shape}", inputs, call(inputs), **tolerance)


def equal(case, ours, expected) -> None:
    """Bit by bit, and says how far off."""
    for name, one, other in zip(("out", "lse")[: len(ours)], ours, expected, strict=True):
        one_bits, other_bits = one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
        if not torch.equal(one_bits, other_bits):
            different = int((one != other).sum())
            raise AssertionError(f"{case}: {name} differs in {different} of {one.numel()} elements")


def rows_of(inputs: Inputs, rows: slice) -> Inputs:
    """The call that has these rows alone."""
    per_row = ("q", "indices", "topk_length", "extra_indices", "extra_topk_length")
    cut = {name: getattr(inputs, name)[rows] for name in per_row if getattr(inputs, name) is not None}
    return dataclasses.replace(inputs, **cut)


# ---- accuracy


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128, 1, 5, 24])
@pytest.mark.parametrize("extra", EXTRAS)
def test_accuracy(extra, heads, device):
    for rows in (1, 2, 7, 64, 100):
        check(f"{extra}, {heads} heads, {rows} rows", Shape(rows, heads, WINDOW, EXTRAS[extra]), device, seed=rows)


def test_many_rows(device):
    check("prefill-sized", Shape(3000, 8, WINDOW, C4), device)
    check("prefill-sized", Shape(700, 64, WINDOW, C128_SHORT), device)


@pytest.mark.parametrize("page_size", [256, 64, 2, 48, 1, 1000])
@pytest.mark.parametrize("extra_page_size", [256, 64, 2, 48, 3])
def test_page_sizes(page_size, extra_page_size, device):
    main, extra = CacheShape(page_size, 128, lengths=(128, 50)), CacheShape(extra_page_size, 320, lengths=(320, 77))
    check("page sizes", Shape(5, 16, main, extra), device)


@pytest.mark.parametrize("width", [1, 2, 31, 33, 64, 127, 129, 192, 256, 1000, 1280, 1281, 2048, 2500])
def test_widths(width, device):
    check("main width", Shape(3, 16, CacheShape(64, width)), device)
    check("extra width", Shape(3, 8, CacheShape(256, 128, lengths=(128, 3)), CacheShape(64, width, masked=0.2)), device)


@pytest.mark.parametrize("heads", [64, 32, 16, 8])
@pytest.mark.parametrize("rows", [3, 6, 40, 64, 256])
def test_dsparks_draft(rows, heads, device):
    """A block's rows: window and block in lists of 192, of which the length tells how many there are; a row's bits are
    those of the row alone."""
    lengths = (131, 4, 135, 128, 0, 192)
    inputs = make_inputs(Shape(rows, heads, CacheShape(128, 192, lengths=lengths)), seed=rows, device=device)
    whole = call(inputs)
    verify(f"DSPARK's draft, {rows} rows, {heads} heads", inputs, whole)
    for row in {0, 1, rows - 1} if rows <= 64 else ():
        alone = call(rows_of(inputs, slice(row, row + 1)))
        equal(f"row {row} of {rows}, {heads} heads", alone, tuple(part[row : row + 1] for part in whole))


@pytest.mark.parametrize("heads", [64, 128, 16])
@pytest.mark.parametrize("extra", [None, CacheShape(64, 512, masked=0.2), CacheShape(2, 1024, lengths=(1024, 0, 700))])
def test_flashmla_inputs_and_tolerances(extra, heads, device):
    """Its distributions, NaN in unread slots, infinite sinks, zero lengths, non-contiguous q and indices."""
    for rows, lengths in ((1, 128), (4, (128, 0, 60, 128)), (64, (128, 0, 100))):
        main = CacheShape(64, 128, lengths=lengths, masked=0.1)
        shape = Shape(rows, heads, main, extra, flashmla=True)
        inputs = with_gaps(make_inputs(shape, seed=rows, device=device))
        out, lse = call(inputs)
        truth, true_lse = reference(**inputs.arguments())
        case = f"FlashMLA's inputs, {heads} heads, {rows} rows, extra {extra}"
        for name, ours, true, tolerance in (("out", out, truth, FLASHMLA_OUT), ("lse", lse, true_lse, FLASHMLA_LSE)):
            problem = complaint(ours, true, tolerance)
            assert problem is None, f"{case}: {name}: {problem}"
        error = strict_error(out, truth)
        assert error <= SPARSE_DECODE.truth, f"{case}: relative error {error:.5f}"


def with_gaps(inputs: Inputs) -> Inputs:
    """q and the index tensors as views with NaN and far-away slots between their rows."""

    def gap(tensor, pad, value):
        wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + pad), value, dtype=tensor.dtype, device=tensor.device)
        wide[..., : tensor.shape[-1]] = tensor
        return wide[..., : tensor.shape[-1]]

    extra = None if inputs.extra_indices is None else gap(inputs.extra_indices, 5, 2**30)
    return dataclasses.replace(
        inputs, q=gap(inputs.q, 64, math.nan), indices=gap(inputs.indices, 3, 2**30), extra_indices=extra
    )


# ---- hostile inputs


@pytest.mark.parametrize("heads", [8, 64])
def test_lengths(heads, device):
    """Zero, negative, on and around every tile edge, beyond the width."""
    main = CacheShape(256, 128, lengths=(0, 1, 31, 32, 33, 127, 128, -7, 2**31 - 1, -(2**31), 129))
    for extra in (
        None,
        CacheShape(64, 512, lengths=(0, 511, 512, 64, 1, 0, -1, 513)),
        CacheShape(2, 2048, lengths=(0,)),
    ):
        check("lengths", Shape(88, heads, main, extra), device)


@pytest.mark.parametrize("masked", [0.05, 0.5, 0.98])
def test_masked_indices(masked, device):
    main, extra = CacheShape(256, 128, masked=masked), CacheShape(64, 512, lengths=(512, 100), masked=masked)
    check("masked", Shape(32, 16, main, extra), device)


@pytest.mark.parametrize("index", [-1, -(2**31), 2**31 - 1])
def test_rows_without_a_candidate(index, device):
    inputs = make_inputs(Shape(6, 32, WINDOW, C4), device=device)
    inputs.indices[::2] = index
    inputs.extra_indices[::2] = index
    out = torch.full_like(inputs.q, math.nan)
    result = call(inputs, out=out)
    assert result[0] is out and float(out[::2].abs().max()) == 0.0 and bool((result[1][::2] == math.inf).all())
    verify(f"every other row has only {index}", inputs, result)


def test_first_slot_beyond_the_pool_is_masked_and_the_last_slot_is_read(device):
    inputs = make_inputs(Shape(2, 16, CacheShape(256, 128)), device=device)
    slots = inputs.kv_pages.shape[0] * inputs.kv_pages.shape[1]
    kv_pages.write_rows(inputs.kv_pages, torch.tensor([slots - 1], device=device), torch.ones(1, 512, device=device))
    inputs.indices[0, 0, :5] = slots
    inputs.indices[1, 0, 7] = slots - 1
    verify("the pool's end", inputs, call(inputs))


def test_page_of_padded_graph_rows(device):
    """SGLang's padded rows: slot 0 with length 1, and -1 with length 1 in the second cache."""
    inputs = make_inputs(
        Shape(8, 16, CacheShape(256, 128, lengths=128), CacheShape(64, 512, lengths=512)), device=device
    )
    kv_pages.write_rows(inputs.kv_pages, torch.tensor([0], device=device), torch.zeros(1, 512, device=device))
    inputs.indices[5:] = 0
    inputs.topk_length[5:] = 1
    inputs.extra_indices[5:] = -1
    inputs.extra_topk_length[5:] = 1
    verify("padded rows", inputs, call(inputs))


@pytest.mark.parametrize("sink", [math.inf, -math.inf, 88.0, -200.0, 1e30])
def test_sinks(sink, device):
    inputs = make_inputs(Shape(4, 16, CacheShape(256, 128, lengths=(128, 0)), C4), device=device)
    inputs.attn_sink[::3] = sink
    result = call(inputs)
    verify(f"sink {sink}", inputs, result)
    if sink == math.inf:
        assert float(result[0][:, :, ::3].abs().max()) == 0.0


@pytest.mark.parametrize("query_scale", [0.0, 1e-30, 1e-3, 8.0, 100.0])
def test_query_magnitudes(query_scale, device):
    check("query scale", Shape(16, 16, WINDOW, C4, query_scale=query_scale), device)


@pytest.mark.parametrize("heads", [8, 64])
def test_tiles_with_maxima_from_1e_minus_4_to_1e4(heads, device):
    inputs = make_inputs(Shape(16, heads, WINDOW, C4, wide_scales=True), device=device)
    out, lse = call(inputs)
    verify("wide scales", inputs, (out, lse))
    truth, _ = reference(**inputs.arguments())
    for tile in range(8):
        part = slice(64 * tile, 64 * tile + 64)
        error = relative_error(out[..., part], truth[..., part])
        assert error <= SPARSE_DECODE.truth, f"wide scales, tile {tile}: relative error {error:.5f}"


def test_duplicates(device):
    inputs = make_inputs(Shape(8, 16, CacheShape(256, 128), CacheShape(64, 512)), device=device)
    inputs.indices[:4] = inputs.indices[:4, :, :1]
    inputs.extra_indices[2:] = inputs.extra_indices[2:, :, :3].repeat(1, 1, 171)[..., :512]
    verify("duplicates", inputs, call(inputs))


@pytest.mark.parametrize("page_size", [256, 64, 2])
def test_pages_past_2_to_the_31_bytes(page_size, device):
    """Live pages at the end of a pool of 2.3 GiB, as the main and as the second cache."""
    pages = -(-int(2.3 * 2**30) // kv_pages.page_bytes(page_size))
    pool = kv_pages.new_pages(pages, page_size, fill=0xFF, device=device)
    inputs = make_inputs(Shape(4, 16, CacheShape(page_size, 128), CacheShape(64, 128)), device=device)
    last = pages * page_size - 1
    slots = last - torch.randperm(512, device=device).to(torch.int32).reshape(4, 1, 128)
    rows = torch.randn(512, 512, device=device)
    kv_pages.write_rows(pool, slots.flatten(), rows)
    as_main = dataclasses.replace(inputs, kv_pages=pool, indices=slots)
    verify(f"large main pool, page size {page_size}", as_main, call(as_main))
    as_extra = dataclasses.replace(inputs, extra_kv_pages=pool, extra_indices=slots)
    verify(f"large extra pool, page size {page_size}", as_extra, call(as_extra))


def test_views_and_poisoned_outputs(device):
    """q, indices and out as views; bytes around out stay as they were."""
    inputs = with_gaps(make_inputs(Shape(7, 24, WINDOW, C4), device=device))
    frame = torch.full((7, 1, 40, 576), math.nan, dtype=torch.bfloat16, device=device)
    out = frame[:, :, 8:32, :512]
    result = call(inputs, out=out)
    assert bool(frame[:, :, :8].isnan().all() and frame[:, :, 32:].isnan().all() and frame[..., 512:].isnan().all())
    verify("views", inputs, result)
    permuted = dataclasses.replace(inputs, q=inputs.q.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3))
    equal("heads before rows", call(permuted), result)
    shared = dataclasses.replace(inputs, indices=inputs.indices[:1].expand(7, 1, 128), topk_length=None)
    shared = dataclasses.replace(shared, extra_kv_pages=None, extra_indices=None, extra_topk_length=None)
    verify("one index row for all", shared, call(shared))


def test_arguments_left_out(device):
    inputs = make_inputs(Shape(3, 16, CacheShape(256, 128), sink=False), device=device)
    inputs.softmax_scale = 0.02
    verify("no lengths, no sink, no second cache", inputs, call(inputs))
    alone = sparse_decode(**inputs.arguments())
    equal("without lse", (alone,), call(inputs)[:1])
    float8 = dataclasses.replace(inputs, kv_pages=inputs.kv_pages.view(torch.float8_e4m3fn))
    equal("float8 pages", call(float8), call(inputs))


def test_no_rows(device):
    inputs = make_inputs(Shape(1, 16, WINDOW, C4), device=device)
    out, lse = call(rows_of(inputs, slice(0)))
    assert out.shape == (0, 1, 16, 512) and lse.shape == (0, 16, 1)


# ---- the same bits


@pytest.mark.parametrize("heads", [8, 16, 64])
@pytest.mark.parametrize("extra", ["window", "C4", "C128 short", "C128 long"])
def test_bits_of_a_row_do_not_depend_on_the_batch_or_the_width(extra, heads, device):
    """Alone, in a batch of 64, in a batch of 3, and with index tensors as wide as a context of 1M tokens."""
    kind = EXTRAS[extra]
    if kind is not None:  # lengths within the width: a length beyond it means other candidates once the tensor is wider
        lengths = tuple(min(length, 4096) for length in kind.lengths)
        kind = dataclasses.replace(kind, width=min(kind.width, 4096), lengths=lengths)
    inputs = make_inputs(Shape(64, heads, WINDOW, kind), device=device)
    whole = call(inputs)
    for row in (0, 1, 2, 31, 63):
        case = f"{extra}, {heads} heads, row {row}"
        expected = tuple(part[row : row + 1] for part in whole)
        alone = rows_of(inputs, slice(row, row + 1))
        equal(f"{case} alone", call(alone), expected)
        if kind is not None:
            equal(f"{case} with wide indices", call(widened(alone, 8192)), expected)
            used = max(64, int(alone.extra_topk_length[0]))
            equal(f"{case} with narrow indices", call(widened(alone, used)), expected)
    verify(extra, inputs, whole)
    if kind is not None:
        equal(f"{extra}, {heads} heads, the batch with wide indices", call(widened(inputs, 8192)), whole)
    tail = rows_of(inputs, slice(61, 64))
    equal(f"{extra}, {heads} heads, the last three", call(tail), tuple(part[61:] for part in whole))


def widened(inputs: Inputs, width: int) -> Inputs:
    """The second cache's indices cut or padded with -1 to a width."""
    old = inputs.extra_indices
    wide = torch.full((old.shape[0], 1, width), -1, dtype=torch.int32, device=old.device)
    keep = min(width, old.shape[2])
    wide[..., :keep] = old[..., :keep]
    return dataclasses.replace(inputs, extra_indices=wide)


@pytest.mark.parametrize("extra", ["C4", "C128 long"])
def test_repeats_give_the_same_bits_whatever_the_scratch_held(extra, device):
    inputs = make_inputs(Shape(4, 64, WINDOW, EXTRAS[extra]), device=device)
    others = [make_inputs(Shape(rows, 16, WINDOW, EXTRAS[extra]), seed=9, device=device) for rows in (1, 9, 64)]
    expected = call(inputs)
    for repeat in range(20):
        call(others[repeat % 3])
        junk = [torch.full((1 << 22,), math.nan, device=device) for _ in range(4)]
        del junk  # the allocator hands this memory out again as scratch
        equal(f"repeat {repeat}", call(inputs), expected)


# ---- graphs, streams, dependent launches


@pytest.mark.parametrize("extra", ["window", "C4", "C128 long"])
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_graph_replay_with_new_contents(extra, rows, device):
    """Lengths, indices, q and rows of the cache change between replays; the result follows, to the bit."""
    shape = Shape(rows, 16, WINDOW, EXTRAS[extra])
    static = make_inputs(shape, device=device)
    call(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(static)
        second = call(static)
    for seed in range(4):
        fresh = make_inputs(shape, seed=seed, device=device)
        if seed == 3:
            fresh.topk_length.zero_()
        expected = call(fresh)
        copy_into(static, fresh)
        for part in (*captured, *second):
            part.fill_(math.nan)
        graph.replay()
        graph.replay()
        equal(f"{extra}, {rows} rows, replay {seed}", captured, expected)
        equal(f"{extra}, {rows} rows, replay {seed}, second call of the graph", second, expected)
        verify(f"{extra}, {rows} rows, replay {seed}", fresh, expected)


FIRST_CALL = """
import torch
from deepseek_v4_sm120.ops.sparse_decode import sparse_decode
from deepseek_v4_sm120.specs.sparse_decode import CacheShape, Shape, make_inputs

inputs = make_inputs(Shape(2, 16, CacheShape(256, 128), CacheShape(64, 512)))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = [sparse_decode(**inputs.arguments()) for _ in range(3)]
for _ in range(3):
    graph.replay()
eager = sparse_decode(**inputs.arguments())
torch.cuda.synchronize()
assert all(torch.equal(part, eager) for part in captured), "captured calls differ from the eager one"
print("equal")
"""


def test_the_first_call_of_a_process_may_be_captured():
    done = subprocess.run([sys.executable, "-c", FIRST_CALL], cwd=REPO, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip() == "equal", done.stdout + done.stderr


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_two_streams_at_once(graphs, device):
    kinds = [Shape(2, 64, WINDOW, C4), Shape(3, 16, WINDOW, C128_LONG)]
    inputs = [make_inputs(kind, seed=seed, device=device) for seed, kind in enumerate(kinds)]
    expected = [call(one) for one in inputs]
    streams = [torch.cuda.Stream(device) for _ in inputs]
    torch.cuda.synchronize()
    runs = [captured(one, calls=20) if graphs else one for one in inputs]
    results = [None, None]
    for _ in range(20 if graphs else 200):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if graphs:
                    runs[index][0].replay()
                    results[index] = runs[index][1]
                else:
                    results[index] = call(runs[index])
    torch.cuda.synchronize()
    for index in range(2):
        equal(f"stream {index}", results[index], expected[index])
        verify(f"stream {index}", inputs[index], expected[index])


def captured(inputs: Inputs, calls: int):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            result = call(inputs)
    return graph, result


@pytest.mark.parametrize("rows", [1, 64])
def test_back_to_back_calls_see_what_the_kernel_before_them_wrote(rows, device):
    """Programmatic dependent launch: q, indices and lengths written by the kernels just before, chained outputs."""
    shape = Shape(rows, 16, WINDOW, C4)
    prepared = [make_inputs(shape, seed=seed, device=device) for seed in range(6)]
    expected = [call(one) for one in prepared]
    static = make_inputs(shape, seed=99, device=device)
    torch.cuda.synchronize()
    results = []
    for one in prepared * 5:
        copy_into(static, one)
        results.append(call(static))
    for number, result in enumerate(results):
        equal(f"call {number}", result, expected[number % 6])
    chain = [prepared[0].q]
    for _ in range(20):
        chain.append(sparse_decode(**{**prepared[0].arguments(), "q": chain[-1]}))
    slow = prepared[0].q
    for number in range(20):
        slow = sparse_decode(**{**prepared[0].arguments(), "q": slow})
        torch.cuda.synchronize()
        equal(f"link {number} of the chain", (chain[number + 1],), (slow,))


def copy_into(static: Inputs, fresh: Inputs) -> None:
    """New contents for the tensors of a call, in place."""
    for name, value in static.arguments().items():
        if torch.is_tensor(value):
            value.copy_(getattr(fresh, name))
