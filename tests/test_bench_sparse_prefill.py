"""bench/sparse_prefill.py without a GPU: the issue's cases and how a number is made."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import sparse_prefill as bench  # noqa: E402


def test_every_bar_of_the_issue_is_a_case():
    bars = {(case.rows, case.heads, case.width, case.page_size): case.bar for case in bench.CASES if case.bar}
    expected = {(rows, 64, 1024, 2): 270 for rows in (2048, 8192)}
    for heads, bar in ((64, 240), (32, 200), (16, 200), (8, 70)):
        expected |= {(rows, heads, 512, 64): bar for rows in (2048, 8192)}
    assert bars == expected


def test_tflops_count_valid_candidates():
    case = bench.Case(1000, 64, 512, 64)
    assert bench.tflops(case, 1e6) == 2 * 1024 * 64 * 640 * 1000 / 1e12
