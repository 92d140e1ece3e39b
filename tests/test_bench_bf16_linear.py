"""bench/bf16_linear.py: its cases are the shapes of the model. CPU only."""

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


def test_cases_are_the_models_projections(bench):
    assert {(case.outputs, case.bytes) for case in bench.CASES if case.rows == 1} == {
        (2048, 16 << 20),
        (1024, 8 << 20),
        (512, 4 << 20),
        (256, 2 << 20),
        (64, 1 << 19),
    }
    assert len({case.name for case in bench.CASES}) == len(bench.CASES) == 25
