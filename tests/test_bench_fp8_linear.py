"""bench/fp8_linear.py: its cases hold the bars of the issue. CPU only."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    spec = importlib.util.spec_from_file_location("bench_fp8_linear", BENCH / "fp8_linear.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_every_shape_of_the_model_is_timed_once(bench):
    found = bench.unlike_matrices()
    shapes = {(m.name == "wo_a", m.groups, m.outputs, m.inputs) for m in found}
    assert len(shapes) == len(found) == 14
    assert {m.groups for m in found if m.name == "wo_a"} == {8, 4, 2}
    assert len({case.name for case in bench.cases()}) == len(bench.cases()) == 14 * len(bench.ROWS)


def test_bars_are_the_issues(bench):
    for case in bench.cases():
        large = case.matrix.bytes >= 8 << 20
        expected = {True: {1: 0.7, 4: 0.7, 8: 0.7, 16: 0.7, 32: None, 64: 0.6}[case.rows], False: None}[large]
        assert case.share == expected, case.name
    assert bench.FASTER_THAN_DEEP_GEMM == 1.5 and set(bench.DEEP_GEMM) == {1, 8}


def test_the_mean_of_a_step_is_compared_with_the_quoted_one(bench):
    report = bench.common.Report("fp8_linear", "x", {"read_gbs": 1000.0})
    for matrix in bench.matrices(1):
        report.add(bench.common.row(7, bench.Case(matrix, 1).name, "ours", "us", 5.0))
    bench.compare_with_deep_gemm(report)
    quoted, ours = report.rows[-2:]
    assert quoted.value == 12.75 and quoted.bar is None and "quoted" in quoted.impl
    assert (ours.value, ours.bar, ours.met) == (5.0, 8.5, True)
