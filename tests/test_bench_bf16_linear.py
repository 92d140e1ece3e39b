"""bench/bf16_linear.py: its cases are the shapes of the model. CPU only."""

from __future__ import annotations


def test_cases_are_the_models_projections(bench):
    assert {(case.outputs, case.bytes) for case in bench.CASES if case.rows == 1} == {
        (2048, 16 << 20),
        (1024, 8 << 20),
        (512, 4 << 20),
        (256, 2 << 20),
        (64, 1 << 19),
    }
    assert len({case.name for case in bench.CASES}) == len(bench.CASES) == 5 * len(bench.ROWS)
