"""q normed and rotated on the way in (head_norm_eps) against the same done before the call: the same bits.

What is done before is SGLang's fused_q_norm_rope in plain torch (reference.normed_and_rotated_by_warps), which is the
same float32 operations in the same order.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from deepseek_v4_sm120.ops.sparse_decode import MAX_NORM_ROWS, sparse_decode
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.reference.sparse_decode import normed_and_rotated, normed_and_rotated_by_warps
from deepseek_v4_sm120.reference.sparse_decode import sparse_decode as reference
from deepseek_v4_sm120.specs.bounds import SPARSE_DECODE
from deepseek_v4_sm120.specs.sparse_decode import CacheShape, Inputs, Shape, make_freqs_cis, make_inputs

pytestmark = pytest.mark.gpu

WINDOW = CacheShape(256, 128, lengths=(128, 128, 77, 0))
C4 = CacheShape(64, 512, lengths=(512, 512, 300))
C128_SHORT = CacheShape(2, 8192, lengths=(64, 1, 8, 250), ascending=True)
C128_LONG = CacheShape(2, 4096, lengths=(4096, 1500), ascending=True)
EXTRAS = {"window": None, "C4": C4, "C128 short": C128_SHORT, "C128 long": C128_LONG}


def shape_of(rows: int, heads: int, extra=C4, **more) -> Shape:
    return Shape(rows, heads, WINDOW, extra, norm=True, **more)


def before(inputs: Inputs) -> Inputs:
    """The call that gets q ready."""
    arguments = (inputs.q, inputs.head_norm_eps, inputs.freqs_cis, inputs.positions)
    return inputs.with_q(normed_and_rotated_by_warps(*arguments))


def call(inputs: Inputs, **more):
    return sparse_decode(**inputs.arguments(), return_lse=True, prefill=False, **more)


def equal(case, found, expected) -> None:
    for name, one, other in zip(("out", "lse"), found, expected, strict=True):
        bits = torch.int16 if name == "out" else torch.int32
        same = one.contiguous().view(bits) == other.contiguous().view(bits)
        assert bool(same.all()), f"{case}: {name} differs in {int((~same).sum())} of {one.numel()} elements"


def check(case, inputs: Inputs) -> None:
    found = call(inputs)  # first, so that it cannot profit from what the other one leaves
    equal(case, found, call(before(inputs)))


@pytest.mark.parametrize("heads", [64, 32, 16, 8, 128, 1, 5, 24])
@pytest.mark.parametrize("extra", EXTRAS)
def test_the_same_bits_as_norm_and_rotation_before(extra, heads, device):
    for rows in (1, 2, 8, 70):
        check(f"{extra}, {heads} heads, {rows} rows", make_inputs(shape_of(rows, heads, EXTRAS[extra]), seed=rows))


def test_several_launches_and_the_greatest_number_of_rows(device):
    check("several launches", make_inputs(shape_of(300, 64, C128_LONG)))
    check("most rows", make_inputs(shape_of(MAX_NORM_ROWS, 64)))


@pytest.mark.parametrize("heads", [64, 16])
@pytest.mark.parametrize("extra", EXTRAS)
def test_accuracy(extra, heads, device):
    inputs = make_inputs(shape_of(9, heads, EXTRAS[extra]))
    out, _ = call(inputs)
    error = relative_error(out, reference(**inputs.arguments())[0])
    assert error <= SPARSE_DECODE.truth, f"relative error {error:.5f}, allowed {SPARSE_DECODE.truth}"


def test_the_bits_come_from_the_definition(device):
    """What both sides of the tests above share is off the float64 definition by single roundings to bf16."""
    inputs = make_inputs(shape_of(64, 64))
    arguments = (inputs.q, inputs.head_norm_eps, inputs.freqs_cis, inputs.positions)
    one, other = normed_and_rotated_by_warps(*arguments), normed_and_rotated(*arguments)
    assert int((one != other).sum()) < one.numel() * 1e-4
    torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_up_to_1m(dtype, device):
    inputs = make_inputs(shape_of(12, 32))
    inputs.freqs_cis = make_freqs_cis(1 << 20, device)
    last = (1 << 20) - 1
    inputs.positions = torch.tensor([0, 1, last, last - 1, 65_536, 777_777] * 2, dtype=dtype, device=device)
    check(f"positions as {dtype}", inputs)
    moved = dataclasses.replace(inputs, positions=inputs.positions.flip(0))
    assert not torch.equal(call(moved)[0], call(inputs)[0])


def test_hostile_rows_stay_in_their_row(device):
    """NaN, infinities, zeros, the smallest and the greatest numbers: the same bits, and nothing elsewhere."""
    inputs = make_inputs(shape_of(16, 64))
    calm = call(inputs)
    q = inputs.q[:, 0]
    q[1], q[3, 5, 17], q[4, 63, 500], q[5, 0, 448] = math.nan, math.nan, math.inf, -math.inf
    q[6], q[7, 3], q[8], q[9], q[10, :, ::2] = 0.0, 0.0, 1e-40, 3e38, 1e-30
    q[11], q[12, 8:16, 511] = torch.finfo(torch.bfloat16).max, math.nan
    check("hostile", inputs)
    found = call(inputs)
    untouched = [0, 2, 13, 14, 15]
    equal("rows beside them", [one[untouched] for one in found], [one[untouched] for one in calm])
    heads = [head for head in range(64) if head != 5]
    equal("heads beside a NaN", [found[0][3, :, heads], found[1][3, heads]], [calm[0][3, :, heads], calm[1][3, heads]])


@pytest.mark.parametrize("eps", [0.0, 1e-5, 1.0])
def test_other_eps(eps, device):
    check(f"eps {eps}", dataclasses.replace(make_inputs(shape_of(5, 16)), head_norm_eps=eps))


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("extra", ["window", "C4", "C128 long"])
def test_bits_of_a_row_do_not_depend_on_the_batch(extra, heads, device):
    inputs = make_inputs(shape_of(64, heads, EXTRAS[extra]))
    whole = call(inputs)
    for row in (0, 3, 31, 63):
        names = ("q", "indices", "topk_length", "extra_indices", "extra_topk_length", "positions")
        cut = {name: getattr(inputs, name)[row : row + 1] for name in names if getattr(inputs, name) is not None}
        equal(f"row {row}", call(dataclasses.replace(inputs, **cut)), [one[row : row + 1] for one in whole])


def test_views(device):
    """q in the front of a wider projection, the result into padded heads; q is not written."""
    inputs = make_inputs(shape_of(7, 16))
    expected = call(before(inputs))
    wide = torch.full((7, 1, 24, 1024), math.nan, dtype=torch.bfloat16, device=device)
    wide[:, :, 4:20, :512] = inputs.q
    bytes_before = wide.view(torch.int16).clone()
    frame = torch.full((7, 1, 64, 512), math.nan, dtype=torch.bfloat16, device=device)
    found = call(dataclasses.replace(inputs, q=wide[:, :, 4:20, :512]), out=frame[:, :, :16])
    equal("views", found, expected)
    assert bool(frame[:, :, 16:].isnan().all()) and torch.equal(wide.view(torch.int16), bytes_before)


def test_page_table(device):
    inputs = make_inputs(shape_of(12, 32, CacheShape(2, 4096, lengths=(4096, 64, 0, 777), tables=3, masked=0.05)))
    found = sparse_decode(**inputs.table_arguments(), return_lse=True)
    equal("page table", found, call(before(inputs)))


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_graph_replay_with_new_contents(rows, device):
    static = make_inputs(shape_of(rows, 64), seed=1)
    call(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(static)
    for seed in (2, 3):
        fresh = make_inputs(shape_of(rows, 64), seed=seed)
        expected = call(before(fresh))
        for name, value in static.arguments().items():
            if torch.is_tensor(value):
                value.copy_(getattr(fresh, name))
        graph.replay()
        equal(f"replay of seed {seed}", captured, expected)


def test_back_to_back_with_the_kernel_that_writes_q(device):
    """The kernel in front may still run when ours starts (programmatic dependent launch): q must be waited for."""
    inputs = make_inputs(shape_of(8, 64))
    source = torch.randn_like(inputs.q)
    for _ in range(20):
        torch.neg(source, out=inputs.q)
        found = call(inputs)
        source.copy_(inputs.q)
        equal("back to back", found, call(before(inputs)))
