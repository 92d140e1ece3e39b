"""ops.fp8_linear on the GPU against the reference: the model's shapes, hostile numbers, bits, graphs, streams."""

from __future__ import annotations

import pytest
import torch

from deepseek_v4_sm120.ops import fp8_linear as op
from deepseek_v4_sm120.ops.fp8_linear import LAUNCH_ROWS, fp8_grouped_linear, fp8_linear
from deepseek_v4_sm120.ops.shared.limits import STEP_ROWS
from deepseek_v4_sm120.reference import fp8_linear as reference
from deepseek_v4_sm120.reference.accuracy import relative_error, strict_error
from deepseek_v4_sm120.specs.bounds import FP8_LINEAR, LATENT_NORM
from deepseek_v4_sm120.specs.fp8_linear import make_weight, make_x, matrices

pytestmark = pytest.mark.gpu

ODD_SIZES = [(128, 128), (128, 256), (256, 384), (384, 512), (2048, 512), (640, 640), (1152, 1536), (128, 7168)]
SHAPES = sorted({(m.groups, m.outputs, m.inputs) for tp in (1, 2, 4, 8) for m in matrices(tp)})
ROWS = (1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 48, 63, 64, 65, 127, 128, 129, 200, 256)


def _make(rows, outputs, inputs, *, groups=1, seed=3, ue8m0=False):
    generator = torch.Generator("cuda").manual_seed(seed)
    weight, scale = make_weight(groups, outputs, inputs, generator, ue8m0=ue8m0)
    return make_x(rows, groups, inputs, generator), weight, scale


def _plain(rows, outputs, inputs, **options):
    x, weight, scale = _make(rows, outputs, inputs, **options)
    return x[:, 0], weight[0], scale[0]


def _bits(tensor):
    return tensor.view(torch.int16)


def tuned(x, weight, scale, **tuning):
    """x W^T [rows, groups, outputs] by a kernel and blocks of one's choice, or None where there is no such kernel."""
    out = torch.full((x.shape[0], *weight.shape[:2]), torch.nan, dtype=torch.bfloat16, device="cuda")
    try:
        op._run(x, weight, scale, out, **tuning)
    except RuntimeError as error:
        assert "no kernel for this plan" in str(error)
        return None
    return out


def test_the_latents_norm(device):
    """Against float64; a row's bits among others; NaN and infinity stay in their row."""
    x = make_x(300, 1, 1536, torch.Generator(device).manual_seed(4))[:, 0, :1024]
    weight = torch.randn(1024, device=device).bfloat16()
    x[7, 3], x[9, 1000], x[11] = torch.nan, torch.inf, 0
    found, truth = op.latent_norm(x, weight, 1e-6), reference.latent_norm(x, weight, 1e-6)
    kept = [row for row in range(300) if row not in (7, 9)]
    assert strict_error(found[kept], truth[kept]) < LATENT_NORM.truth and not found[11].any()
    assert found[7].isnan().all() and found[9].isnan().sum() == 1
    for row in (0, 7, 12, 299):
        assert torch.equal(_bits(op.latent_norm(x[row : row + 1], weight, 1e-6)[0]), _bits(found[row]))


@pytest.mark.parametrize("inputs", [2048, 4096])
def test_what_merges_has_the_bits_of_a_merged_product(inputs, device):
    """wo_b at four and at two cards."""
    x, weight, scale = _plain(64, 4096, inputs)
    seen = set()
    for rows in (1, 2, 8, 9, 16, 31, 64):
        if (splits := op.splits_of(rows, 4096, inputs, device.index or 0)) == 1:
            continue
        partial = op.fp8_linear_unmerged(x[:rows], weight, scale)
        assert partial.shape == (splits, rows, 4096) and partial.is_contiguous()
        assert torch.equal(_bits(op.merge(partial)), _bits(fp8_linear(x[:rows], weight, scale)))
        seen.add(splits)
    assert seen


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_matrix_of_the_model(shape):
    groups, outputs, inputs = shape
    x, weight, scale = _make(64, outputs, inputs, groups=groups)
    truth = reference.fp8_grouped_linear(x, weight, scale)
    together = fp8_grouped_linear(x, weight, scale)
    for rows in (1, 5, 16, 24, 64):
        out = fp8_grouped_linear(x[:rows], weight, scale)
        assert strict_error(out, truth[:rows]) < FP8_LINEAR.truth
        assert torch.equal(_bits(out), _bits(together[:rows]))


@pytest.mark.parametrize("rows", ROWS)
def test_rows_and_scales(rows):
    for ue8m0 in (False, True):
        x, weight, scale = _plain(rows, 1536, 4096, ue8m0=ue8m0)
        assert strict_error(fp8_linear(x, weight, scale), reference.fp8_linear(x, weight, scale)) < FP8_LINEAR.truth


@pytest.mark.parametrize("size", ODD_SIZES, ids=str)
def test_odd_sizes(size):
    x, weight, scale = _plain(64, *size)
    truth, together = reference.fp8_linear(x, weight, scale), fp8_linear(x, weight, scale)
    assert strict_error(together, truth) < FP8_LINEAR.truth
    for rows in (1, 8, 13, 30):
        assert torch.equal(_bits(fp8_linear(x[:rows], weight, scale)), _bits(together[:rows]))


def test_a_row_has_the_same_bits_in_every_batch():
    for outputs, inputs in ((4096, 8192), (8192, 1024), (4096, 2048), (1536, 4096), (4096, 512)):
        x, weight, scale = _plain(64, outputs, inputs)
        together = fp8_linear(x, weight, scale)
        for row in (0, 11, 63):
            assert torch.equal(_bits(fp8_linear(x[row : row + 1], weight, scale)[0]), _bits(together[row]))
        shuffled = torch.randperm(64, device="cuda")
        assert torch.equal(_bits(fp8_linear(x[shuffled][:40], weight, scale)), _bits(together[shuffled][:40]))


FEW = [{"warp_rows": w, "blocks": b} for w, b in ((1, 0), (1, 7), (2, 0), (2, 264), (4, 0), (4, 50), (8, 0))]
TILES = [{"row_tiles": r, "warp_rows": w, "in_turn": t} for r in (1, 2) for w, t in ((8, 1), (8, 2), (4, 1))]


@pytest.mark.parametrize("rows", (1, 8))
def test_no_blocks_of_few_rows_change_a_bit(rows):
    x, weight, scale = _make(rows, 4096, 2048)
    expected = fp8_grouped_linear(x, weight, scale)
    outs = [out for tuning in FEW if (out := tuned(x, weight, scale, **tuning)) is not None]
    assert len(outs) >= 4
    assert all(torch.equal(_bits(out), _bits(expected)) for out in outs)


@pytest.mark.parametrize("rows", (1, 4, 8, 9))
def test_a_whole_product_has_the_same_bits(rows):
    for inputs in (4096, 2048):
        given = _plain(rows, 4096, inputs)
        assert torch.equal(_bits(fp8_linear(*given, whole=True)), _bits(fp8_linear(*given)))


@pytest.mark.parametrize("shape", [*SHAPES, *((1, *size) for size in ODD_SIZES), (1, 256, 20480)], ids=str)
def test_every_tile_has_the_bits_of_few_rows(shape):
    groups, outputs, inputs = shape
    x, weight, scale = _make(64, outputs, inputs, groups=groups, ue8m0=inputs % 512 != 0)
    expected = torch.cat([fp8_grouped_linear(rows, weight, scale) for rows in x.split(8)])
    tried = 0
    for rows in (1, 8, 9, 16, 17, 32, 33, 64):
        for tuning in TILES:
            out = tuned(x[:rows], weight, scale, **tuning)
            tried += out is not None
            assert out is None or torch.equal(_bits(out), _bits(expected[:rows])), (rows, tuning)
    assert tried >= 8


@pytest.mark.parametrize("shape", [*SHAPES, *((1, *size) for size in ODD_SIZES), (1, 256, 20480)], ids=str)
def test_a_steps_rows_have_the_bits_of_each_alone(shape):
    groups, outputs, inputs = shape
    x, weight, scale = _make(STEP_ROWS, outputs, inputs, groups=groups, ue8m0=inputs % 512 != 0)
    alone = torch.cat([fp8_grouped_linear(row[None], weight, scale) for row in x])
    for rows in (65, 66, 100, 127, 128, 129, 191, 192, 193, 255, 256):
        assert torch.equal(_bits(fp8_grouped_linear(x[:rows], weight, scale)), _bits(alone[:rows])), rows
    tried = 0
    for in_turn in (1, 2, 4, 8):
        for rows in (65, 200):
            out = tuned(x[:rows], weight, scale, in_turn=in_turn)
            tried += out is not None
            assert out is None or torch.equal(_bits(out), _bits(alone[:rows])), (rows, in_turn)
    assert tried >= 2


@pytest.mark.parametrize("shape", ((1, 4096, 8192), (1, 8192, 1024), (2, 1024, 4096), (1, 1536, 4096)), ids=str)
def test_a_prompt_has_the_bits_of_its_rows(shape):
    groups, outputs, inputs = shape
    x, weight, scale = _make(2100, outputs, inputs, groups=groups)
    together = fp8_grouped_linear(x, weight, scale)
    assert strict_error(together[:300], reference.fp8_grouped_linear(x[:300], weight, scale)) < FP8_LINEAR.truth
    for first in (0, 100, 1000, 2040, 2092):
        few = fp8_grouped_linear(x[first : first + 8], weight, scale)
        assert torch.equal(_bits(together[first : first + 8]), _bits(few))


UNITS = [{"in_turn": in_turn, "row_tiles": row_tiles} for in_turn in (1, 2, 4, 8) for row_tiles in (1, 2)]


@pytest.mark.parametrize("size", [*ODD_SIZES, (384, 2304), (128, 20480), (384, 128)], ids=str)
def test_units_of_rows_where_they_begin_and_end(size):
    """With NaN, infinity and a row of zeros; one slice, two, eight, of one length and of two; a unit a block, many."""
    outputs, inputs = size
    x, weight, scale = _make(1100, outputs, inputs, ue8m0=outputs % 256 != 0)
    weight.view(torch.uint8)[0, outputs - 3, inputs - 1] = 0x7F
    x[-1, 0, 5], x[-2, 0, 7], x[-3] = torch.nan, torch.inf, 0
    few = torch.cat([fp8_grouped_linear(part, weight, scale) for part in x.split(8)])
    for rows in (65, 127, 128, 129, 191, 193, 256, 385, 1100):
        for tuning in ({}, {"blocks": 3}, *UNITS):
            out = tuned(x[-rows:], weight, scale, **tuning)
            assert (out is None) == (tuning.get("in_turn", 1) > (8 if inputs >= 2048 else 2 if inputs >= 256 else 1))
            assert out is None or torch.equal(_bits(out), _bits(few[-rows:])), (rows, tuning)


def test_more_rows_than_a_launch_takes():
    x, weight, scale = _plain(LAUNCH_ROWS + 70, 128, 128)
    out = fp8_linear(x, weight, scale)
    for first in (0, LAUNCH_ROWS - 3, LAUNCH_ROWS + 62):
        assert torch.equal(_bits(out[first : first + 8]), _bits(fp8_linear(x[first : first + 8], weight, scale)))
    assert fp8_linear(x[:0], weight, scale).shape == (0, 128)


def test_subnormal_weights_alone():
    x, weight, scale = _plain(5, 256, 1024)
    codes = weight.view(torch.uint8)
    codes.copy_(codes & 0x87)
    assert relative_error(fp8_linear(x, weight, scale), reference.fp8_linear(x, weight, scale)) < FP8_LINEAR.truth


def test_nan_weights_spoil_their_outputs_alone():
    x, weight, scale = _plain(20, 384, 1024)
    clean = fp8_linear(x, weight, scale)
    for code, output, place in ((0x7F, 5, 0), (0xFF, 200, 1023), (0x7F, 383, 517)):
        weight.view(torch.uint8)[output, place] = code
    out = fp8_linear(x, weight, scale)
    spoiled = torch.zeros(384, dtype=torch.bool, device="cuda")
    spoiled[[5, 200, 383]] = True
    assert bool(out[:, spoiled].isnan().all())
    assert torch.equal(_bits(out[:, ~spoiled]), _bits(clean[:, ~spoiled]))


@pytest.mark.parametrize("rows", (4, 30, 64, 150))
def test_nonfinite_rows_do_not_leak(rows):
    x, weight, scale = _plain(rows, 512, 1024)
    clean = fp8_linear(x, weight, scale)
    x[1, 77], x[3, 1000] = torch.nan, torch.inf
    out = fp8_linear(x, weight, scale)
    assert bool(out[1].isnan().all())
    assert not bool(out[3].isfinite().any())
    kept = [row for row in range(rows) if row not in (1, 3)]
    assert torch.equal(_bits(out[kept]), _bits(clean[kept]))


def test_sizes_of_numbers_far_apart():
    x, weight, scale = _plain(6, 256, 1024)
    factors = torch.tensor([1e-30, 1e-6, 1.0, 1e6, 1e28, 3e-38], device="cuda")
    x = (x.double() * factors[:, None].double()).to(torch.bfloat16)
    scale[0] *= 1e6
    out, truth = fp8_linear(x, weight, scale), reference.fp8_linear(x, weight, scale)
    for row in range(6):
        assert relative_error(out[row], truth[row]) < FP8_LINEAR.truth
    x, weight, scale = _plain(2, 256, 1024)
    x[:, ::128] *= 2.0**18  # one input of each block far above the others
    assert relative_error(fp8_linear(x, weight, scale), reference.fp8_linear(x, weight, scale)) < FP8_LINEAR.truth
    scale.fill_(torch.finfo(torch.float32).max)
    assert not bool(fp8_linear(x, weight, scale).isfinite().all())  # beyond float32: infinities, or their differences
    assert not bool(fp8_linear(torch.zeros_like(x), weight, scale).any())


def test_nan_scales_spoil_their_block_of_outputs():
    x, weight, scale = _plain(3, 512, 512, ue8m0=True)
    clean = fp8_linear(x, weight, scale)
    scale[1, 2] = 255
    out = fp8_linear(x, weight, scale)
    assert bool(out[:, 128:256].isnan().all())
    assert torch.equal(_bits(out[:, 256:]), _bits(clean[:, 256:]))
    scale[1, 2] = 0
    assert bool(fp8_linear(x, weight, scale).isfinite().all())
    same = fp8_linear(x, weight, scale.view(torch.float8_e8m0fnu))
    assert torch.equal(_bits(same), _bits(fp8_linear(x, weight, scale)))


@pytest.mark.parametrize("rows", (9, 77))
def test_strides(rows):
    x, weight, scale = _plain(rows, 512, 1024)
    expected = fp8_linear(x, weight, scale)
    wide_x = torch.full((rows, 1024 + 64), torch.nan, dtype=torch.bfloat16, device="cuda")
    wide_x[:, 8:1032] = x
    wide_weight = torch.empty((512, 1024 + 48), dtype=torch.uint8, device="cuda").fill_(0x7F)
    wide_weight[:, 16:1040] = weight.view(torch.uint8)
    wide_out = torch.full((rows, 520), 7.0, dtype=torch.bfloat16, device="cuda")
    columns = scale.T.contiguous().T
    sliced = wide_weight[:, 16:1040].view(torch.float8_e4m3fn)
    out = fp8_linear(wide_x[:, 8:1032], sliced, columns, out=wide_out[:, 4:516])
    assert torch.equal(_bits(out), _bits(expected))
    assert bool((wide_out[:, :4] == 7).all()) and bool((wide_out[:, 516:] == 7).all())
    x, weight, scale = _make(rows, 256, 512, groups=4)
    transposed = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(
        _bits(fp8_grouped_linear(transposed, weight, scale)), _bits(fp8_grouped_linear(x, weight, scale))
    )


@pytest.mark.parametrize("rows", (1, 16, 64, 100, 256))
def test_a_graph_replays_it(rows):
    x, weight, scale = _plain(rows, 4096, 4096)
    expected = fp8_linear(x, weight, scale)
    static = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = fp8_linear(static, weight, scale)
        second = fp8_linear(first, weight, scale)
    static.copy_(x)
    for _ in range(3):
        graph.replay()
    assert torch.equal(_bits(first), _bits(expected))
    assert torch.equal(_bits(second), _bits(fp8_linear(expected, weight, scale)))


def test_a_chain_of_dependent_calls():
    """Each launch reads what the launch before wrote, while its own weights are already on their way."""
    _, weight, scale = _plain(1, 1024, 1024)
    scale *= 0.1
    for rows in (1, 20, 130):
        x = _plain(rows, 1024, 1024)[0]
        chained, waited = x, x
        for _ in range(50):
            chained = fp8_linear(chained, weight, scale)
        for _ in range(50):
            torch.cuda.synchronize()
            waited = fp8_linear(waited, weight, scale)
        assert torch.equal(_bits(chained), _bits(waited))


@pytest.mark.parametrize(
    "rows, outputs, inputs", [(8, 4096, 8192), (9, 4096, 4096), (32, 4096, 2048), (64, 1536, 4096)]
)
def test_splits_of_calls_side_by_side(rows, outputs, inputs):
    """Two graphs and two streams at once, over and over."""
    x, weight, scale = _make(rows, outputs, inputs)
    alone = torch.cat([fp8_grouped_linear(row[None], weight, scale) for row in x])
    graphs, replayed = [], []
    for _ in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            replayed += [fp8_grouped_linear(x, weight, scale) for _ in range(6)]
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    for _ in range(20):
        eager = []
        for stream, graph in zip(streams[:2], graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        for stream in streams[2:]:
            with torch.cuda.stream(stream):
                eager += [fp8_grouped_linear(x, weight, scale) for _ in range(6)]
        torch.cuda.synchronize()
        assert all(torch.equal(_bits(out), _bits(alone)) for out in [*eager, *replayed])
