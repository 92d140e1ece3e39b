"""bench/compressor.py: its cases. CPU only."""

from __future__ import annotations

from deepseek_v4_sm120.ops.compressor import MAX_ROWS


def test_every_kind_with_and_without_ends(bench):
    found = bench.cases()
    assert len({case.name for case in found}) == len(found) == 4 * len(bench.ROWS) * len(bench.ENDS)
    assert max(bench.ROWS) == MAX_ROWS and set(bench.QUICK_ROWS) <= set(bench.ROWS)
    for case in found:
        ratio = bench.KINDS[case.kind][0]
        ended = sum(length % ratio == 0 for length in case.lengths())
        assert (
            ended == {"none": 0, "all": case.rows, "mixed": case.rows // ratio}[case.ends]
            and len(case.lengths()) == case.rows
        )
    assert bench.Case("c128", 1, "all").read_bytes() == 129 * 4096


def test_verifications_have_the_bar_of_the_issue(bench):
    found = bench.verify_cases()
    assert len({case.name for case in found}) == len(found) == 4 * len(bench.VERIFIED) + 1
    assert {case.most_of_stock for case in found if case.streams * case.tokens == 4} == {0.5}
    for case in found:
        ratio, requests = bench.KINDS[case.kind].ratio, case.requests()
        assert [r.tokens for r in requests] == [case.tokens] * case.streams and case.streams * case.tokens <= MAX_ROWS
        assert any((r.before + r.tokens) // ratio > r.before // ratio for r in requests) == case.ends
    assert bench.VerifyCase("c128", 1, 4).read_bytes() == 132 * 4096


def test_stock_clears_rejected_drafts_layer_by_layer(bench, monkeypatch):
    """Found at one of its homes, called as the wheels' pool calls it."""
    calls = []

    def clear(state, requests, lengths, accepted, *, ring_size, num_draft_tokens):
        calls.append((state.shape[1], len(requests), ring_size, num_draft_tokens))

    monkeypatch.setattr(bench, "first_installed", lambda homes: homes[0])
    monkeypatch.setattr(bench, "unpatched", lambda home, name: {bench.CLEANUP: clear}[name])
    made = bench.make_drafts(2, 4, 3, ring=128, device="cpu")
    bench.drafts_implementations()[bench.STOCK](made)
    assert calls == [(1024, 2, 128, 4)] * 3 and bench.LAYERS["c128"] == 20


def test_the_summary_has_a_line_for_each_case(bench):
    report = bench.common.Report("compressor", "x", {})
    name = bench.Case("c4", 1, "none").name
    report.add(bench.common.row(7, name, "ours", "us", 2.25), bench.common.row(7, name, bench.STOCK, "us", 4.5))
    assert name in bench.summary(report) and "2.25" in bench.summary(report) and "4.50" in bench.summary(report)
