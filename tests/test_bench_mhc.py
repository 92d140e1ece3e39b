"""bench/mhc.py: its bars are the issue's, its bytes count everything once, its peer computes the operator. CPU only."""

from __future__ import annotations

from deepseek_v4_sm120.reference import mhc as reference
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.specs.mhc import Shape, make_inputs


def test_bars(bench):
    assert bench.ISSUE == 7
    assert bench.BARS_US == {1: 6.0, 8: 7.0, 64: 12.0} and bench.COPY_SHARE == {8192: 0.6}
    assert set(bench.BARS_US) | set(bench.COPY_SHARE) <= set(bench.ROWS) & set(bench.QUICK)


def test_bytes(bench):
    inputs = make_inputs(Shape(5), device="cpu")
    read = [inputs.f, inputs.streams, inputs.post, inputs.comb, inputs.fn]
    written = [inputs.streams, inputs.f, inputs.post, inputs.comb]  # the results' sizes
    assert bench.boundary_bytes(5) == sum(tensor.nbytes for tensor in read + written)


def test_the_peer_computes_the_operator(bench):
    inputs = make_inputs(Shape(3, hidden=256), device="cpu")
    truth = reference.mhc(**inputs.boundary())
    found = bench.torch_boundary(**inputs.boundary())
    for one, expected in zip(found, (truth.streams, truth.post, truth.comb, truth.y), strict=True):
        assert relative_error(one, expected) < 0.003
