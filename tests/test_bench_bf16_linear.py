"""bench/bf16_linear.py: its cases hold the bars of the issue. CPU only."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    spec = importlib.util.spec_from_file_location("bench_bf16_linear", BENCH / "bf16_linear.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_bars_hold_for_matrices_of_8_mb_and_more(bench):
    bars = {(case.what, case.rows): case.bar for case in bench.CASES}
    assert bars["C4 compressor", 1] == bars["C128 compressor", 16] == 0.7 and bars["C4 compressor", 32] == 0.6
    assert {bars[what, rows] for what, rows in bars if what.startswith("index")} == {None}
    assert len({case.name for case in bench.CASES}) == len(bench.CASES) == 20


def test_a_share_is_met_from_above(bench):
    case = bench.Case("C4 compressor", 2048, 1)
    assert bench.share_row(case, 0.71).met and not bench.share_row(case, 0.69).met
