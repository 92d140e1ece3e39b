"""bench/sparse_decode.py but for the clock: inputs, gate, table, file. CPU, with a stand-in for the kernel."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "bench"))

import common  # noqa: E402
import sparse_decode as bench  # noqa: E402
import sparse_decode_cases as table  # noqa: E402

from deepseek_v4_sm120.reference.sparse_decode import sparse_decode as reference  # noqa: E402


@pytest.fixture
def on_cpu(monkeypatch):
    """Two layers, small pools, every time 5 us, the reference as the kernel."""
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.setattr(bench, "TEMPLATE_SLOTS", 2048)
    monkeypatch.setattr(bench, "CONTEXT_SLOTS", 2048)
    monkeypatch.setattr(common, "total_memory", lambda: 12 * 40_000_000)
    monkeypatch.setattr(common, "layers_for_cold_caches", lambda _: 2)
    monkeypatch.setattr(common, "graph_microseconds", lambda calls: 5.0 * len([call() for call in calls]) / 2)
    monkeypatch.setattr(common, "ceilings", lambda: {"copy_gbs": 4000.0, "empty_launch_us": 1.5})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "stand-in")
    full = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **kind: full(*size, **kind))

    def kernel(**arguments):
        return reference(**arguments, dtype=torch.float32)[0].bfloat16()

    monkeypatch.setattr(bench, "sparse_decode", kernel)
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", [table.WINDOW, table.C4, table.C128_512K, table.C128_1K_OF_1M])
def test_inputs_are_as_production_makes_them(kind, shared, on_cpu):
    pools = bench.Pools(on_cpu)
    layers = bench.make_layers(table.Case("x", 4, 8, kind), pools, on_cpu, shared)
    first, second = layers.inputs
    assert first.kv_pages.data_ptr() != second.kv_pages.data_ptr()
    window = first.indices[:, 0]
    assert int(window.min()) >= 0 and int(window.max()) < first.kv_pages.shape[0] * 256
    assert bool((window[:, 1:] == window[:, :-1] - 1).all()), "newest first"
    if kind.page_size:
        used = first.extra_indices[:, 0, : kind.length]
        assert first.extra_indices.shape[2] == kind.width and bool(
            (first.extra_indices[:, 0, kind.length :] == -1).all()
        )
        assert int(used.min()) >= 0 and int(used.max()) < first.extra_kv_pages.shape[0] * kind.page_size
        distinct = [row.unique().numel() for row in used]
        assert min(distinct) >= (0.9 if shared else 1) * kind.length
        ascending = bool((used[:, 1:] > used[:, :-1]).all())
        assert ascending == (kind.page_size == 2)
        common_share = float(torch.isin(used[0], used[1]).float().mean())
        assert common_share > 0.7 if shared else kind.page_size == 2 or common_share == 0.0
    microseconds, error = bench.gated_time(layers)
    assert microseconds == 5.0 and error < bench.bounds.SPARSE_DECODE.truth


def test_a_wrong_kernel_is_not_timed(on_cpu, monkeypatch):
    monkeypatch.setattr(bench, "sparse_decode", lambda **call: reference(**call, dtype=torch.float32)[0] * 1.01)
    layers = bench.make_layers(table.Case("wrong", 1, 8, table.C4), bench.Pools(on_cpu), on_cpu)
    with pytest.raises(SystemExit, match="relative error 0.01"):
        bench.gated_time(layers)


def test_report_table_and_plot(on_cpu, tmp_path):
    pools, cases = (
        bench.Pools(on_cpu),
        [case for case in table.CASES if case.name in ("C4, 1 x 64 heads", "C4, 4 x 64 heads")],
    )
    report = common.Report("sparse_decode", "abc", common.ceilings())
    bench.run_cases(report, cases, pools, on_cpu)
    bench.run_width_pairs(report, table.WIDTH_PAIRS[:1], pools, on_cpu)
    bench.run_verification(report, table.VERIFY_CASES[:1], pools, on_cpu)
    report.write(tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert {"device", "date", "commit", "command", "ceilings", "rows"} <= set(written)
    bars = {(row["issue"], row["case"]): (row["bar"], row["met"]) for row in written["rows"] if row["metric"] == "us"}
    assert bars[2, "C4, 1 x 64 heads"] == (16.0, True) and bars[3, "C4, 1 x 64 heads"] == (7.0, True)
    text = bench.summary(report, cases, [])
    assert "C4, 4 x 64 heads" in text and "MISSED" not in text
    assert "captured for 1M" in bench.ratios(report) and "one request" in bench.ratios(report)
    report.rows = [common.row(3, case.name, "ours", row.metric, 99.0, row.bar) for case in cases for row in report.rows]
    assert "MISSED" in bench.summary(report, cases, [])


def test_every_bar_of_the_issues_is_in_the_table():
    bars = {(case.family, case.rows, case.heads, issue): bar for case in table.CASES for issue, bar in case.bars}
    assert len(bars) == 25 + 5
    assert bars["window", 1, 8, 3] == 6 and bars["C4", 16, 32, 3] == 13 and bars["C128 at 512K", 64, 16, 3] == 75
    assert all(bars["C4", 1, heads, 2] == 16 for heads in (8, 16, 32, 64)) and bars["C4", 64, 64, 2] == 120
    assert len({case.name for case in table.CASES}) == len(table.CASES)
