"""bench/wo_a.py: its cases and bars. CPU only."""

from __future__ import annotations


def test_few_rows_and_prompts_of_every_rank_count(bench):
    found = bench.cases()
    assert len({case.name for case in found}) == len(found) == len(bench.ROWS) * len(bench.TPS)
    assert {case.groups for case in found} == {8, 4, 2}
    assert {case.rows for case in found if case.folded} == {1, 2, 4, 8, 16, 32, 64, 65, 128, 192, 256}
    assert set(bench.QUICK_ROWS) <= set(bench.ROWS) and set(bench.FASTER_THAN_STOCK) <= set(bench.QUICK_ROWS)


def test_the_summary_tells_what_was_missed(bench):
    report = bench.common.Report("wo_a", "x", {})
    name = bench.Case(2, 1).name
    report.add(bench.common.row(7, name, "stock, bf16", "us", 12.0), bench.common.row(7, name, "ours", "us", 9.5, 8.0))
    assert "9.50 MISSED 8" in bench.summary(report) and "12.00" in bench.summary(report)
