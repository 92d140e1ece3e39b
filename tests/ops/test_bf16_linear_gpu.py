"""ops.bf16_linear on the GPU against float64: the model's shapes, hostile values, bits, graphs."""

from __future__ import annotations

import pytest
import torch

from deepseek_v4_sm120.ops import bf16_linear as op
from deepseek_v4_sm120.ops.bf16_linear import bf16_linear
from deepseek_v4_sm120.ops.shared.limits import STEP_ROWS
from deepseek_v4_sm120.reference.accuracy import strict_error
from deepseek_v4_sm120.reference.bf16_linear import bf16_linear as reference
from deepseek_v4_sm120.specs.bf16_linear import make_weight, make_x
from deepseek_v4_sm120.specs.bounds import BF16_LINEAR

pytestmark = pytest.mark.gpu

# (inputs, outputs): compressors of C4 layers, of the indexer, of C128 layers, head weights; Pro's; odd ones
SHAPES = [
    (4096, 2048),
    (4096, 512),
    (4096, 1024),
    (4096, 64),
    (7168, 2048),
    (7168, 64),
    (512, 4),
    (1024, 20),
    (8704, 264),
]


def make(rows, inputs, outputs, device, seed=0, stride=0):
    generator = torch.Generator(device).manual_seed(seed)
    x = make_x(rows, generator, hidden=inputs, gap=stride)
    return x, make_weight(outputs, generator, hidden=inputs)


@pytest.mark.parametrize("inputs, outputs", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 129, 256, 1000])
def test_against_the_reference(rows, inputs, outputs, device):
    x, weight = make(rows, inputs, outputs, device, seed=rows)
    truth = reference(x, weight)
    assert float(truth.abs().max()) > 0
    assert strict_error(bf16_linear(x, weight), truth) < BF16_LINEAR.truth
    rounded = bf16_linear(x, weight, out_dtype=torch.bfloat16)
    assert torch.equal(rounded, bf16_linear(x, weight).bfloat16())


@pytest.mark.parametrize("inputs, outputs", SHAPES)
def test_a_row_alone_and_among_others(inputs, outputs, device):
    x, weight = make(STEP_ROWS, inputs, outputs, device)
    together = torch.cat([bf16_linear(row[None], weight) for row in x])
    for rows in (*range(2, 70), 96, 97, 127, 128, 129, 192, 193, 255, 256):
        assert torch.equal(bf16_linear(x[:rows], weight), together[:rows]), rows
    assert torch.equal(bf16_linear(x[-100:], weight), together[-100:])


@pytest.mark.parametrize("inputs, outputs", SHAPES)
@pytest.mark.parametrize("rows", [1, 8, 9, 17, 32, 33])
def test_the_warps_of_a_block_change_no_bit(rows, inputs, outputs, device):
    x, weight = make(rows, inputs, outputs, device)
    expected = bf16_linear(x, weight)
    for warps in (8, 16):
        op._launch(x, weight, out := torch.full_like(expected, torch.nan), warps=warps)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("inputs, outputs", SHAPES)
def test_a_prompt_has_the_bits_of_its_rows(inputs, outputs, device):
    x, weight = make(2100, inputs, outputs, device)
    together, rounded = bf16_linear(x, weight), bf16_linear(x, weight, out_dtype=torch.bfloat16)
    for first in (0, 100, 1000, 2047, 2092):
        few = x[first : first + 8]
        assert torch.equal(bf16_linear(few, weight), together[first : first + 8])
        assert torch.equal(bf16_linear(few, weight, out_dtype=torch.bfloat16), rounded[first : first + 8])


@pytest.mark.parametrize("rows", [9, 40, 70, 300, 1100])
def test_a_row_of_nan_and_infinity_stays_its_own(rows, device):
    x, weight = make(rows, 4096, 512, device)
    clean = bf16_linear(x, weight)
    x[3], x[8, 5] = float("nan"), float("inf")
    found = bf16_linear(x, weight)
    assert bool(found[3].isnan().all()) and not bool(found[8].isfinite().any())
    kept = [r for r in range(rows) if r not in (3, 8)]
    assert torch.equal(found[kept], clean[kept])
    weight[7] = float("nan")
    assert torch.equal(bf16_linear(x, weight)[kept][:, :7], clean[kept][:, :7])


@pytest.mark.parametrize("rows", [5, 37, 150, 1100])
def test_views_and_out(rows, device):
    x, weight = make(rows, 4096, 1024, device, stride=24)
    assert not x.is_contiguous()
    holder = torch.full((rows, 1100), float("nan"), device=device)
    out = bf16_linear(x, weight, out=holder[:, :1024])
    assert torch.equal(out, bf16_linear(x.contiguous(), weight))
    assert bool(holder[:, 1024:].isnan().all())


def test_weights_past_two_to_the_31_bytes(device):
    weight = torch.zeros(300_000, 4096, dtype=torch.bfloat16, device=device)  # 2.4 GB
    x, few = make(40, 4096, 8, device)
    weight[-8:] = few
    for rows in (2, 40):
        assert torch.equal(bf16_linear(x[:rows], weight)[:, -8:], bf16_linear(x[:rows], few))


@pytest.mark.parametrize("rows", [8, 48, 256])
def test_graph_replay_behind_the_kernel_that_writes_x(rows, device):
    """Weights are read before the kernel in front has ended; x must not be."""
    x, weight = make(rows, 4096, 2048, device)
    source = torch.empty_like(x)
    bf16_linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = source * 2
        for _ in range(3):
            hidden = hidden + 1
        out = bf16_linear(hidden, weight)
    for seed in range(4):
        source.copy_(make(rows, 4096, 4, device, seed=seed + 50)[0])
        graph.replay()
        expected = source * 2
        for _ in range(3):
            expected = expected + 1
        assert torch.equal(out, bf16_linear(expected, weight))
