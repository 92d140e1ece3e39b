"""bench/fp8_linear.py: its cases hold the bars of the issue. CPU only."""

from __future__ import annotations


def test_every_shape_of_the_model_is_timed_once(bench):
    found = bench.unlike_matrices()
    shapes = {(m.name == "wo_a", m.groups, m.outputs, m.inputs) for m in found}
    assert len(shapes) == len(found) == 14
    assert {m.groups for m in found if m.name == "wo_a"} == {8, 4, 2}
    assert len({case.name for case in bench.cases()}) == len(bench.cases()) == 14 * len(bench.ROWS)


def test_bars_are_the_issues(bench):
    for case in bench.cases():
        large = case.matrix.bytes >= 8 << 20
        expected = {1: 0.7, 4: 0.7, 8: 0.7, 16: 0.7, 64: 0.6}.get(case.rows) if large else None
        assert case.share == expected, case.name
    assert (
        bench.FASTER_THAN_DEEP_GEMM == 1.5
        and bench.COMPARED_ROWS == (1, 4, 8)
        and set(bench.QUOTED_DEEP_GEMM) == {1, 8}
    )


def _report(bench, rows, ours, theirs=None):
    report = bench.common.Report("fp8_linear", "x", {"read_gbs": 1000.0})
    for matrix in bench.matrices(1):
        name = bench.Case(matrix, rows).name
        report.add(bench.common.row(7, name, "ours", "us", ours))
        if theirs is not None:
            report.add(bench.common.row(7, name, bench.DEEP_GEMM, "us", theirs))
    bench.compare_with_deep_gemm(report)
    return report.rows


def test_the_mean_of_a_step_is_compared_with_the_quoted_one(bench):
    theirs, ours = _report(bench, 1, 5.0)[-2:]
    assert theirs.value == 12.75 and theirs.bar is None and "quoted" in theirs.note
    assert (ours.value, ours.bar, ours.met) == (5.0, 8.5, True)
    assert len(_report(bench, 4, 5.0)) == len(bench.matrices(1))


def test_what_the_run_itself_measured_comes_first(bench):
    theirs, ours = _report(bench, 1, 5.0, 6.0)[-2:]
    assert theirs.value == 6.0 and not theirs.note and (ours.bar, ours.met) == (4.0, False)
    theirs, ours = _report(bench, 32, 5.0, 6.0)[-2:]
    assert theirs.value == 6.0 and ours.bar is None


def test_deep_gemm_is_left_out_where_it_is_not_installed(bench, monkeypatch, capsys):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert bench.deep_gemm_linear() is None
    assert "not run, no module sglang and deep_gemm" in capsys.readouterr().out


def test_a_graph_has_calls_enough(bench, monkeypatch):
    monkeypatch.setattr(bench.common, "graph_microseconds", len)
    assert [bench.microseconds_of([print] * count) for count in (1, 4, 39, 40, 100)] == [40, 40, 78, 40, 100]
