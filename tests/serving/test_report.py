"""What a stranger reads first on a page: what was compared, what came out, what the tables name."""

from __future__ import annotations

from bench.serving import report
from bench.serving.measures import HEADLINES, METRICS
from tests.serving.test_plots import entry, result


def lines_of(found: dict) -> dict[str, str]:
    return dict(line.removeprefix("- ").split(": ", 1) for line in report.first_lines(found))


def test_what_was_compared_what_came_out_and_what_to_know():
    found = result()
    told = lines_of(found)
    assert told["compared"] == "A = side A against B = side B; the one intended change: patch"
    assert told["v"] == "side B is better in 4 of 5 figures; worse in 1: intrusion {} (itl_p99_ms)"
    assert told["to know before believing it"] == "random <weights>"
    assert " one host, 3 rounds of every cell, " in told["how"]
    page, text = report.html_page(found, {}, None), report.markdown(found)
    for what in ("side B is better in 4 of 5 figures", "A: side A", "B / A", report.NAMES):
        assert page.index(what) < page.index("commit c") and text.index(what) < text.index("commit c")


def test_rounds_that_were_asked_for_and_not_begun_are_none():
    """Three were asked for."""
    found = result()
    cells = found["variants"][0]["cells"]
    for cell in cells:
        cell["runs"] = {side: runs[:2] for side, runs in cell["runs"].items()}
    told = lines_of(found)
    assert " one host, 2 of 3 rounds of every cell, " in told["how"]
    assert "fewer than three rounds" in told["to know before believing it"]
    cells[-1]["runs"]["B"] = []
    assert " one host, 0 to 2 of 3 rounds of every cell, " in lines_of(found)["how"]
    assert " one host, 0 of 3 rounds of every cell, " in lines_of(result(cells=[]))["how"]


def test_what_was_not_measured_is_told_first():
    found = result()
    cells = found["variants"][0]["cells"]
    cells[0]["runs"]["A"][0]["problems"] = ["a request failed"]
    for runs in cells[1]["runs"].values():
        for run in runs:
            run["problems"] = ["the server died"]
    assert "2 cells not or partly measured" in lines_of(found)["v"]
    assert "INCOMPLETE" in lines_of(result(incomplete=["no time"]))["v"]
    assert lines_of(result(refused=["another model"], cells=[]))["v"].startswith("no comparison")
    assert lines_of(result(cells=[]))["v"] == "nothing was measured"


def test_every_metric_of_a_table_is_explained_and_says_which_way_is_better():
    assert all(metric.words for metric in METRICS.values())
    found = result()
    text = "\n".join(report.glossary(found))
    for kind in ("depth", "concurrent", "prefill", "intrusion"):
        assert all(f"- {name}: " in text for name in HEADLINES[kind])
    assert "acceptance_length" not in text and text.count("is better") == text.count("_ms: ") + text.count("_s: ")
    speculating = result(cells=[entry("single", "acceptance_length", 1.5)])
    assert "acceptance_length: tokens of a step" in "\n".join(report.glossary(speculating))


def test_a_patch_is_told_by_its_states():
    who = {"patch": {"b": "APPLIED", "a": "APPLIED", "c": "READY"}}
    assert report.patch_text(who) == "APPLIED: a, b; READY: c"
    assert report.patch_text({"patch": {}}) == "none (stock)" and report.patch_text({"patch": None}) == "not known"
