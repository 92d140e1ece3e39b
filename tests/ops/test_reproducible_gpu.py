"""A row alone, in a step and among 8,192 others, to the bit: each operator as a reproducible server calls it, and what
such a server leaves to torch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from deepseek_v4_sm120.ops import mxfp4_moe as experts
from deepseek_v4_sm120.ops import sparse_decode as attention
from deepseek_v4_sm120.ops.bf16_linear import bf16_linear
from deepseek_v4_sm120.ops.fp8_linear import LAUNCH_ROWS, fp8_linear
from deepseek_v4_sm120.ops.mhc import mhc, mhc_head
from deepseek_v4_sm120.ops.wo_a import wo_a
from deepseek_v4_sm120.reference import wo_a as wo_a_reference
from deepseek_v4_sm120.reference.accuracy import relative_error, strict_error
from deepseek_v4_sm120.reference.mxfp4_moe import mxfp4_moe as experts_reference
from deepseek_v4_sm120.specs import bounds
from deepseek_v4_sm120.specs.bf16_linear import make_weight as make_bf16_weight
from deepseek_v4_sm120.specs.bf16_linear import make_x as make_bf16_x
from deepseek_v4_sm120.specs.fp8_linear import make_weight, make_x, matrices
from deepseek_v4_sm120.specs.mhc import Shape as Streams
from deepseek_v4_sm120.specs.mhc import make_inputs as make_streams
from deepseek_v4_sm120.specs.mxfp4_moe import Shape as Experts
from deepseek_v4_sm120.specs.mxfp4_moe import make_inputs as make_experts
from deepseek_v4_sm120.specs.sparse_decode import CacheShape, Shape, make_inputs
from deepseek_v4_sm120.specs.wo_a import make_wo_a

pytestmark = pytest.mark.gpu

ROWS = 8192  # of a chunk
# where tiles, blocks and pieces of 8, 32, 64, 128, 256 and 512 rows begin and end; then a step and a shorter chunk
PARTS = [slice(i, i + 1) for i in (0, 7, 63, 64, 255, 256, 511, 512, 4097, ROWS - 1)]
PARTS += [slice(100, 108), slice(250, 282), slice(1000, 1256), slice(3000, 3600), slice(6000, 8048)]


def same_bits(one, other) -> bool:
    width = torch.int16 if one.element_size() == 2 else torch.int32
    return torch.equal(one.contiguous().view(width), other.contiguous().view(width))


def check(together, alone):
    """alone(part): what those rows give by themselves."""
    for part in PARTS:
        assert same_bits(together[part], alone(part)), part


SHAPES = sorted({(m.outputs, m.inputs) for tp in (1, 2) for m in matrices(tp) if m.groups == 1})


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense_fp8(shape):
    outputs, inputs = shape
    generator = torch.Generator("cuda").manual_seed(5)
    weight, scale = (tensor[0] for tensor in make_weight(1, outputs, inputs, generator))
    x = make_x(ROWS, 1, inputs, generator)[:, 0]
    check(fp8_linear(x, weight, scale), lambda part: fp8_linear(x[part], weight, scale))


@pytest.mark.parametrize("groups", (8, 4))
def test_wo_a(groups):
    x, weight, scale, freqs_cis, positions = make_wo_a(ROWS, groups, torch.Generator("cuda").manual_seed(7))

    def run(part):
        given = {"freqs_cis": freqs_cis, "positions": positions[part]}
        return wo_a(x[part], weight, scale, **given, reproducible=True)

    together = run(slice(None))
    check(together, run)
    step = {"freqs_cis": freqs_cis, "positions": positions[:200]}
    assert same_bits(together[:200], wo_a(x[:200], weight, scale, **step)), "and those of a step without the setting"
    truth = wo_a_reference.wo_a(x[5000:5050], weight, scale, freqs_cis, positions[5000:5050])
    assert strict_error(together[5000:5050], truth) < bounds.WO_A.truth


def test_wo_a_of_more_rows_than_a_launch_takes():
    rows = LAUNCH_ROWS + 70
    x, weight, scale, freqs_cis, positions = make_wo_a(rows, 1, torch.Generator("cuda").manual_seed(8))
    together = wo_a(x, weight, scale, freqs_cis=freqs_cis, positions=positions, reproducible=True)
    for first in (0, LAUNCH_ROWS - 3, rows - 8):
        part = slice(first, first + 8)
        alone = wo_a(x[part], weight, scale, freqs_cis=freqs_cis, positions=positions[part])
        assert same_bits(together[part], alone)


@pytest.mark.parametrize("outputs", [64, 256, 512, 1024, 2048, 129280 // 8])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_bf16_projections_and_head(outputs, out_dtype, device):
    generator = torch.Generator("cuda").manual_seed(9)
    x, weight = make_bf16_x(ROWS, generator), make_bf16_weight(outputs, generator)
    check(bf16_linear(x, weight, out_dtype=out_dtype), lambda part: bf16_linear(x[part], weight, out_dtype=out_dtype))


def test_the_whole_head(device):
    """All of Flash's vocabulary, rows as there are requests."""
    generator = torch.Generator("cuda").manual_seed(10)
    x, weight = make_bf16_x(300, generator), make_bf16_weight(129280, generator)
    together = bf16_linear(x, weight, out_dtype=torch.bfloat16)
    for rows in (1, 2, 8, 9, 32, 33, 64, 100, 256):
        assert same_bits(together[:rows], bf16_linear(x[:rows], weight, out_dtype=torch.bfloat16)), rows
    expected = x.double() @ weight[-64:].double().T
    assert relative_error(together[:, -64:], expected) < 0.0025


@pytest.mark.parametrize(
    "shape",
    [
        Experts(ROWS, inter=512, experts=64),
        Experts(ROWS, inter=1024, experts=32, masked=0.5),
        Experts(ROWS, inter=512, experts=32, ids="one"),
        Experts(2100, hidden=7168, inter=384, experts=48, topk=8),
    ],
    ids=["Flash", "expert parallelism", "one expert", "Pro"],
)
def test_experts(shape, device):
    inputs = make_experts(shape, seed=11, device=device)

    def run(part, **changes):
        given = inputs.arguments() | {"reproducible": True} | changes
        cut = {name: given[name][part] for name in ("hidden", "topk_ids", "topk_weights")}
        return experts.mxfp4_moe(**(given | cut))

    together = run(slice(None))
    for part in [part for part in PARTS if part.stop <= shape.rows]:
        assert same_bits(together[part], run(part)), part
    part = slice(500, 530)
    given = inputs.arguments()
    cut = {name: given[name][part] for name in ("hidden", "topk_ids", "topk_weights")}
    assert strict_error(together[part], experts_reference(**(given | cut))) < bounds.MXFP4_MOE.truth


def test_a_graph_replays_experts(device):
    inputs = make_experts(Experts(1300, inter=512, experts=32), seed=12, device=device)
    other = make_experts(Experts(1300, inter=512, experts=32), seed=13, device=device)
    given = inputs.arguments() | {"reproducible": True}
    expected = experts.mxfp4_moe(**(given | {"hidden": other.hidden, "topk_ids": other.topk_ids}))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts.mxfp4_moe(**given)
    inputs.hidden.copy_(other.hidden)
    inputs.topk_ids.copy_(other.topk_ids)
    graph.replay()
    assert same_bits(out, expected)


WINDOW = CacheShape(256, 128, lengths=(128, 128, 77), pool_slots=40_000)
C4 = CacheShape(64, 512, lengths=(512, 512, 300), pool_slots=40_000)
C128 = CacheShape(2, 2048, lengths=(2048, 64, 1500), ascending=True, pool_slots=40_000)


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("extra", [None, C4, C128], ids=["window", "C4", "C128"])
def test_attention(extra, heads, device):
    inputs = make_inputs(Shape(ROWS, heads, WINDOW, extra), device=device)
    by_row = ("q", "indices", "topk_length", "extra_indices", "extra_topk_length")

    def run(part):
        cut = {name: getattr(inputs, name)[part] for name in by_row if getattr(inputs, name) is not None}
        return attention.sparse_decode(**dataclasses.replace(inputs, **cut).arguments(), prefill=False)

    check(run(slice(None)), run)


def test_boundaries_and_the_collapse_of_the_streams(device):
    inputs = make_streams(Streams(ROWS), seed=14, device=device)
    given = inputs.boundary()
    by_row = [name for name, value in given.items() if isinstance(value, torch.Tensor) and len(value) == ROWS]
    together = mhc(**given)
    for part in PARTS:
        alone = mhc(**(given | {name: given[name][part].contiguous() for name in by_row}))
        assert all(same_bits(a[part], b) for a, b in zip(together, alone, strict=True)), part
    head = inputs.head()
    check(mhc_head(**head), lambda part: mhc_head(**(head | {"streams": inputs.streams[part].contiguous()})))


def test_what_is_left_to_torch(device):
    """The head's logits as SGLang goes on with them: a row's log-probabilities and greatest do not depend on others."""
    logits = torch.randn(600, 129280, generator=torch.Generator("cuda").manual_seed(15), device=device)
    together, greatest = torch.log_softmax(logits, dim=-1), logits.argmax(dim=-1)
    shares = torch.softmax(logits, dim=-1)
    for rows in (1, 2, 8, 32, 33, 100, 256, 512):
        assert same_bits(together[:rows], torch.log_softmax(logits[:rows], dim=-1)), rows
        assert same_bits(shares[:rows], torch.softmax(logits[:rows], dim=-1)), rows
        assert torch.equal(greatest[:rows], logits[:rows].argmax(dim=-1)), rows
