"""ops.wo_a on the GPU against the reference: rotation, few rows and prompts, bits, graphs, strides."""

from __future__ import annotations

import pytest
import torch

from deepseek_v4_sm120.ops import wo_a as op
from deepseek_v4_sm120.ops.wo_a import wo_a
from deepseek_v4_sm120.reference import wo_a as reference
from deepseek_v4_sm120.reference.accuracy import relative_error, strict_error
from deepseek_v4_sm120.specs.bounds import WO_A
from deepseek_v4_sm120.specs.wo_a import INPUTS, OUTPUTS, make_wo_a

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 3, 5, 8, 9, 16, 17, 32, 33, 63, 64, 65, 128, 200, 256)


def _make(rows, groups=2, seed=3, **options):
    return make_wo_a(rows, groups, torch.Generator("cuda").manual_seed(seed), **options)


def _bits(tensor):
    return tensor.view(torch.int16)


@pytest.mark.parametrize("groups", (8, 4, 2, 1))
def test_rotation_and_product_of_few_rows(groups):
    x, weight, scale, freqs_cis, positions = _make(op.FP8_ROWS, groups)
    truth = reference.wo_a(x, weight, scale, freqs_cis, positions)
    together = wo_a(x, weight, scale, freqs_cis=freqs_cis, positions=positions)
    for rows in ROWS:
        out = wo_a(x[:rows], weight, scale, freqs_cis=freqs_cis, positions=positions[:rows])
        assert strict_error(out, truth[:rows]) < WO_A.truth
        assert torch.equal(_bits(out), _bits(together[:rows]))
    assert relative_error(wo_a(x, weight, scale), truth) > 0.05  # the rotation is no small thing


@pytest.mark.parametrize("rows", (64, 190))
def test_the_rotation_is_that_of_a_rotated_copy(rows):
    """To the last bit but where the reference's float64 rounds the other way: few of the rotated numbers."""
    x, weight, scale, freqs_cis, positions = _make(rows)
    turned = reference.rotated_back(x, freqs_cis, positions)
    apart = wo_a(turned, weight, scale)
    folded = wo_a(x, weight, scale, freqs_cis=freqs_cis, positions=positions)
    assert relative_error(folded, apart.double()) < 3e-4
    still = torch.zeros_like(positions)  # position 0 rotates by nothing
    assert torch.equal(
        _bits(wo_a(x, weight, scale, freqs_cis=freqs_cis, positions=still)), _bits(wo_a(x, weight, scale))
    )


@pytest.mark.parametrize("rows", (8, 100))
def test_every_pair_of_every_head_is_rotated_by_its_own_angle(rows):
    x, weight, scale, freqs_cis, positions = _make(rows, 1)
    codes = torch.zeros_like(weight, dtype=torch.float32)
    codes[0, torch.arange(OUTPUTS), torch.arange(OUTPUTS) + 2048] = 1.0  # outputs are inputs 2048 .. 3071: two heads
    picked = wo_a(x, codes.to(weight.dtype), torch.ones_like(scale), freqs_cis=freqs_cis, positions=positions)
    wanted = reference.rotated_back(x, freqs_cis, positions)[:, :, 2048 : 2048 + OUTPUTS]
    difference = (_bits(picked).int() - _bits(wanted.contiguous()).int()).abs()
    assert int(difference.max()) <= 1 and float((difference > 0).float().mean()) < 1e-3


def test_positions_of_both_widths_and_at_the_end_of_the_table():
    x, weight, scale, freqs_cis, positions = _make(7, 1)
    positions[3], positions[5] = freqs_cis.shape[0] - 1, 0
    out = wo_a(x, weight, scale, freqs_cis=freqs_cis, positions=positions)
    same = wo_a(x, weight, scale, freqs_cis=freqs_cis, positions=positions.int())
    assert torch.equal(_bits(out), _bits(same))
    assert strict_error(out, reference.wo_a(x, weight, scale, freqs_cis, positions)) < WO_A.truth


@pytest.mark.parametrize("ue8m0", (False, True))
def test_expanded_weights_are_stocks_to_the_bit(ue8m0):
    _, weight, scale, *_ = _make(1, 4, ue8m0=ue8m0)
    factors = torch.exp2(scale.float() - 127) if ue8m0 else scale
    wide = factors.repeat_interleave(128, 1).repeat_interleave(128, 2)
    assert torch.equal(_bits(op.expanded(weight, scale)), _bits((weight.float() * wide).to(torch.bfloat16)))
    weight.view(torch.uint8)[2, 77, 130] = 0x7F
    out = op.expanded(weight, scale)
    assert bool(out[2, 77, 130].isnan()) and int(out.isnan().sum()) == 1


@pytest.mark.parametrize("rows", (op.FP8_ROWS + 1, 600))
def test_prompts(rows):
    x, weight, scale, freqs_cis, positions = _make(rows, 4)
    turned = reference.rotated_back(x, freqs_cis, positions)
    out = wo_a(turned, weight, scale)
    assert out.is_contiguous() and out.shape == (rows, 4, OUTPUTS)
    assert strict_error(out, reference.wo_a(turned, weight, scale)) < WO_A.truth
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    wo_a(turned, weight, scale)
    assert torch.cuda.memory_allocated() == before  # nothing stays
    assert torch.cuda.max_memory_allocated() - before >= 2 * weight.numel()


def test_output_of_padded_heads():
    """A rank's heads out of 64: rows lie further apart than they are long."""
    for rows in (9, 70, 260):
        x, weight, scale, *_ = _make(rows, 2)
        wide = torch.full((rows, 64, 512), torch.nan, dtype=torch.bfloat16, device="cuda")
        sliced = wide[:, 16:32]
        sliced.copy_(x.view(rows, 16, 512))
        assert torch.equal(_bits(wo_a(sliced.view(rows, 2, INPUTS), weight, scale)), _bits(wo_a(x, weight, scale)))


def test_no_rows():
    x, weight, scale, freqs_cis, positions = _make(1)
    assert wo_a(x[:0], weight, scale, freqs_cis=freqs_cis, positions=positions[:0]).shape == (0, 2, OUTPUTS)


def test_a_row_has_the_same_bits_in_every_step():
    x, weight, scale, *_ = _make(op.FP8_ROWS)
    together = wo_a(x, weight, scale)
    assert strict_error(together, reference.wo_a(x, weight, scale)) < WO_A.truth
    for rows in (1, 64, 65, 100, 255):
        assert torch.equal(_bits(wo_a(x[-rows:], weight, scale)), _bits(together[-rows:]))


@pytest.mark.parametrize("rows", (1, 16, 64, 100, 200, 300))
def test_a_graph_replays_it(rows):
    x, weight, scale, freqs_cis, positions = _make(rows)
    rotation = {"freqs_cis": freqs_cis, "positions": positions} if rows <= op.FP8_ROWS else {}
    expected = wo_a(x, weight, scale, **rotation)
    static, where = torch.zeros_like(x), torch.zeros_like(positions)
    captured = {**rotation, "positions": where} if rotation else {}
    wo_a(static, weight, scale, **captured)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [wo_a(static, weight, scale, **captured) for _ in range(3)]
    static.copy_(x)
    where.copy_(positions)
    for _ in range(3):
        graph.replay()
    assert all(torch.equal(_bits(out), _bits(expected)) for out in outs)


def test_prompts_and_few_rows_in_turns():
    """The expanded weights' memory is given out again at once; what reads it must have ended."""
    x, weight, scale, freqs_cis, positions = _make(300, 2)
    other = _make(1, 2, seed=9)
    expected, expected_other = wo_a(x, weight, scale), wo_a(x, other[1], other[2])
    for _ in range(20):
        assert torch.equal(_bits(wo_a(x, weight, scale)), _bits(expected))
        assert torch.equal(_bits(wo_a(x, other[1], other[2])), _bits(expected_other))
