"""ops.fp8_linear with x gated or normalised on its way in, on the GPU: against the reference, and to the bit against x
that was gated or normalised before. Weights that change nothing show what the product sees."""

from __future__ import annotations

import functools

import pytest
import torch

from deepseek_v4_sm120.ops import fp8_linear as op
from deepseek_v4_sm120.ops.fp8_linear import MADE_ROWS, fp8_linear, gated, normalized, takes_prologue
from deepseek_v4_sm120.ops.shared.checks import Call
from deepseek_v4_sm120.reference import fp8_linear as reference
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.specs.bounds import FP8_LINEAR
from deepseek_v4_sm120.specs.fp8_linear import (
    make_gates_and_ups,
    make_norm_weight,
    make_one_to_one,
    make_weight,
    make_x,
)
from tests.ops.fp8_linear_tuned import tuned

pytestmark = pytest.mark.gpu

LIMIT, EPS = 10.0, 1e-6
ROWS = (1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 50, 64, 65, 150)
MOST = 150
GATED = [(4096, 2048), (4096, 1024), (4096, 512), (4096, 256), (256, 128), (640, 384), (512, 1408), (1152, 3072)]
NORMED = [(32768, 1024), (16384, 1024), (8192, 1024), (4096, 1536), (256, 128), (640, 384), (512, 1152), (384, 2048)]


@functools.cache
def _make(kind, outputs, inputs):
    """x of MOST rows, the arguments that make x', weights, scales."""
    generator = torch.Generator("cuda").manual_seed(inputs)
    weight, scale = make_weight(1, outputs, inputs, generator)
    if kind == "gated":
        return make_gates_and_ups(MOST, inputs, generator), {"swiglu_limit": LIMIT}, weight[0], scale[0]
    arguments = {"norm_weight": make_norm_weight(inputs, generator), "norm_eps": EPS}
    wide = torch.full((MOST, inputs + 512), torch.nan, dtype=torch.bfloat16, device="cuda")  # a part of longer rows
    wide[:, :inputs] = make_x(MOST, 1, inputs, generator)[:, 0]
    return wide[:, :inputs], arguments, weight[0], scale[0]


def _expected(kind, x, arguments):
    if kind == "gated":
        return reference.gated(x, arguments["swiglu_limit"])
    return reference.normalized(x, arguments["norm_weight"], arguments["norm_eps"])


def _made(x, arguments, inputs):
    """x' as the product sees it."""
    return fp8_linear(x, *make_one_to_one(inputs, "cuda"), **arguments)


def _bits(tensor):
    return tensor.contiguous().view(torch.int16)


def _steps_apart(a, b):
    """By how many bf16 numbers two tensors differ, where both are finite."""
    a, b = (torch.where(t < 0, -(t & 0x7FFF), t) for t in (_bits(a).int(), _bits(b).int()))
    return (a - b).abs()


def _made_before(x, arguments):
    """x' by a launch of its own."""
    return normalized(x, **arguments) if "norm_weight" in arguments else gated(x, **arguments)


def _same(a, b):
    """To the bit but for the sign of zero, which a product with zeros loses."""
    return torch.equal(_bits(a + 0.0), _bits(b + 0.0))


CASES = [("gated", *size) for size in GATED] + [("normed", *size) for size in NORMED]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_size_and_number_of_rows(case):
    kind, outputs, inputs = case
    x, arguments, weight, scale = _make(*case)
    made = _made_before(x, arguments)
    apart = _steps_apart(made, _expected(kind, x, arguments))
    assert int(apart.max()) <= 1 and float((apart > 0).float().mean()) < 0.01  # ties and the last bit of fp32
    together = fp8_linear(x, weight, scale, **arguments)
    assert relative_error(together, reference.fp8_linear(made, weight, scale)) < FP8_LINEAR.truth
    for rows in ROWS:
        assert _same(_made(x[:rows], arguments, inputs), made[:rows])
        assert torch.equal(_bits(_made_before(x[:rows], arguments)), _bits(made[:rows]))
        out = fp8_linear(x[:rows], weight, scale, **arguments)
        assert torch.equal(_bits(out), _bits(together[:rows]))
        assert torch.equal(_bits(out), _bits(fp8_linear(made[:rows], weight, scale)))
    assert takes_prologue("SWIGLU" if kind == "gated" else "NORM", outputs, inputs)


@pytest.mark.parametrize("kind", ("gated", "normed"))
def test_no_tuning_changes_a_bit(kind):
    x, arguments, weight, scale = _make(kind, 4096, 2048 if kind == "gated" else 1024)
    how = (arguments.get(name) for name in ("swiglu_limit", "norm_weight", "norm_eps"))
    prologue = op._check_prologue(Call("fp8_linear", "x", x), x, *how)
    tried = 0
    for rows in (1, 3, MADE_ROWS):
        expected = fp8_linear(x[:rows], weight, scale, **arguments)
        for warp_rows, blocks in ((1, 0), (1, 7), (2, 0), (4, 0), (4, 50), (8, 0), (8, 9)):
            tuning = {"prologue": prologue, "warp_rows": warp_rows, "blocks": blocks}
            out = tuned(x[:rows, None], weight[None], scale[None], **tuning)
            tried += out is not None
            assert out is None or torch.equal(_bits(out[:, 0]), _bits(expected))
    assert tried >= 6


def test_a_row_in_any_place():
    for case in (("gated", 4096, 2048), ("normed", 8192, 1024)):
        x, arguments, weight, scale = _make(*case)
        together = fp8_linear(x, weight, scale, **arguments)
        shuffled = torch.randperm(MOST, device="cuda")
        for rows in (1, 7, 40, 140):
            out = fp8_linear(x[shuffled][:rows], weight, scale, **arguments)
            assert torch.equal(_bits(out), _bits(together[shuffled][:rows]))


def test_more_rows_than_a_step_has():
    for kind, outputs, inputs in (("gated", 4096, 1024), ("normed", 8192, 1024)):
        x, arguments, weight, scale = _make(kind, outputs, inputs)
        many = x.repeat(3, 1)[:420]
        out, once = fp8_linear(many, weight, scale, **arguments), fp8_linear(x, weight, scale, **arguments)
        assert torch.equal(_bits(out), _bits(once.repeat(3, 1)[:420]))


def test_limits_and_what_is_no_number():
    """As in SGLang's kernel: NaN counts as the limit, infinities are clamped but for a gate of -infinity."""
    strange = torch.tensor([torch.nan, torch.inf, -torch.inf, 10.0, 10.0625, -10.0625, 0.0, -0.0, 3e-39, -88.0, 3e38])
    gates, ups = torch.meshgrid(strange, strange, indexing="ij")
    x = torch.zeros(gates.numel(), 512, dtype=torch.bfloat16, device="cuda")
    x[:, 0], x[:, 256] = gates.flatten().cuda(), ups.flatten().cuda()  # a row each: a NaN spoils its row's product
    for limit in (10.0, 7.03, 0.5):
        expected, before = reference.gated(x, limit)[:, 0], gated(x, limit)[:, 0]
        alone = torch.cat([_made(row[None], {"swiglu_limit": limit}, 256)[:, 0] for row in x])
        for made in (before, alone):
            close = torch.isclose(made.float(), expected.float(), rtol=1e-2, atol=1e-35, equal_nan=True)
            assert bool(close.all()), (limit, made[~close], expected[~close])


@pytest.mark.parametrize("rows", (3, 20, 64, 120))
def test_rows_that_are_no_numbers_do_not_leak(rows):
    x, arguments, weight, scale = _make("normed", 8192, 1024)
    x = x[:rows].clone()
    clean = fp8_linear(x, weight, scale, **arguments)
    x[1, 77], x[2, :] = torch.nan, 0.0
    out = fp8_linear(x, weight, scale, **arguments)
    assert bool(out[1].isnan().all()) and not bool(out[2].any())
    kept = [row for row in range(rows) if row not in (1, 2)]
    assert torch.equal(_bits(out[kept]), _bits(clean[kept]))


@pytest.mark.parametrize("rows", (1, 16, 64, 130))
def test_a_chain_of_both_in_a_graph(rows):
    """Each launch reads what the one before wrote, with its weights ahead of it."""
    x, gating, down, down_scale = _make("gated", 1024, 1024)
    _, norming, up, up_scale = _make("normed", 2048, 1024)
    static = torch.zeros_like(x[:rows])

    def chain(first):
        for _ in range(10):
            first = fp8_linear(fp8_linear(first, down, down_scale, **gating), up, up_scale, **norming)
        return first

    expected = x[:rows]
    for _ in range(10):
        torch.cuda.synchronize()
        middle = fp8_linear(expected, down, down_scale, **gating)
        torch.cuda.synchronize()
        expected = fp8_linear(middle, up, up_scale, **norming)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(static)
    static.copy_(x[:rows])
    for _ in range(3):
        graph.replay()
    assert torch.equal(_bits(out), _bits(expected))


def test_more_inputs_than_a_block_can_make():
    """Two launches, then; the same results."""
    generator = torch.Generator("cuda").manual_seed(9)
    inputs = 1 << 14
    assert not takes_prologue("NORM", 128, inputs) and not takes_prologue("SWIGLU", 128, inputs)
    (weight,), (scale,) = make_weight(1, 128, inputs, generator)
    for x, arguments in (
        (make_gates_and_ups(3, inputs, generator), {"swiglu_limit": LIMIT}),
        (make_x(3, 1, inputs, generator)[:, 0], {"norm_weight": make_norm_weight(inputs, generator), "norm_eps": EPS}),
    ):
        expected = fp8_linear(_made_before(x, arguments), weight, scale)
        assert torch.equal(_bits(fp8_linear(x, weight, scale, **arguments)), _bits(expected))
        assert fp8_linear(x[:0], weight, scale, **arguments).shape == (0, 128)


def test_the_kernel_makes_as_many_rows_as_the_operator_says():
    assert op.extension.load().FP8_LINEAR_MADE_ROWS == MADE_ROWS
