"""bench/index_select.py: its cases hold the bars of the issue, one each. CPU only."""

from __future__ import annotations


def test_bars(bench):
    bars = {(c.rows, c.entries): c.bar_us for c in bench.CASES if c.bar_us is not None}
    assert bars == {(1, 16384): 10, (1, 32768): 12, (1, 262144): 26, (8, 32768): 22, (64, 32768): 110}
    assert (bench.FP4_RATIO_BAR, bench.PREFILL_TFLOPS_BAR, bench.TOPK_SHARE_BAR) == (0.75, 300, 0.25)
    pairs = [(c.rows, c.entries, c.rows_per_request, c.columns) for c in bench.CASES if c.fp4]
    assert (1, 262144, 1, None) in pairs


def test_names_and_bytes(bench):
    names = [case.name for case in bench.CASES]
    assert len(set(names)) == len(names)
    by_name = {case.name: case for case in bench.CASES}
    assert by_name["1 x 16K, FP8, captured for 1024K tokens"].columns == 4096
    assert by_name["1 x 256K, FP8"].bytes == 262144 * 132 and by_name["1 x 256K, FP4"].bytes == 262144 * 68
    assert by_name["32 x 32K, FP8, 4 rows a request"].bytes == 8 * 32768 * 132
    assert by_name["64 x 32K, FP8, each page 2 times"].bytes == 64 * 16384 * 132


def test_an_at_least_bar_is_met_from_above(bench):
    assert bench.at_least("case", "tflops", 301, 300).met and not bench.at_least("case", "tflops", 299, 300).met
