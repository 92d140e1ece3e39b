"""What is drawn, with a stand-in for matplotlib: the pictures themselves are for the eye."""

from __future__ import annotations

import importlib.machinery
import sys
from unittest.mock import MagicMock

import pytest

from bench.serving import plots, report
from tests.serving.test_rules import side


@pytest.fixture
def drawn(monkeypatch):
    """Every axes object that was drawn on."""
    found = []

    def subplots(**_):
        figure, axes = MagicMock(), MagicMock()
        figure.savefig = lambda buffer, **_: buffer.write(b"PNG")
        found.append(axes)
        return figure, axes

    pyplot = MagicMock(subplots=subplots)
    package = MagicMock(pyplot=pyplot, __spec__=importlib.machinery.ModuleSpec("matplotlib", None))
    monkeypatch.setitem(sys.modules, "matplotlib", package)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", pyplot)
    return found


def entry(kind, metric, scale, **cell) -> dict:
    name = f"{kind} {cell}"
    runs = {
        letter: [{"round": r, "problems": [], "values": {metric: scale * factor + r}, "pools": {}} for r in range(3)]
        for letter, factor in (("A", 1), ("B", 2))
    }
    return {"cell": {"name": name, "kind": kind, "prompt_tokens": 8, "streams": 1, **cell}, "runs": runs}


def result(**variant) -> dict:
    cells = [
        entry("depth", "stream_tok_s", 50, prompt_tokens=8192),
        entry("depth", "stream_tok_s", 40, prompt_tokens=32768),
        entry("concurrent", "total_tok_s", 100, streams=8),
        entry("prefill", "prefill_tok_s", 9000, prompt_tokens=1024),
        entry("prefill", "ttft_ms", 100, prompt_tokens=1024),
        entry("intrusion", "itl_p99_ms", 100),
    ]
    for letter in "AB":
        cells[-1]["runs"][letter][0]["pools"] = {"during": [1.0, 2.0, 30.0], "otherwise": [1.0]}
    sides = {letter: {"label": f"side {letter}", "clocks": None, "identity": vars(side())} for letter in "AB"}
    machine = {"gpus": [{"name": "X", "driver_version": "1"}], "topology": "GPU0", "date": "d", "commit": "c"}
    return {
        "title": "T",
        "command": "c",
        "machine": {**machine, "processor": "p", "cores": 1},
        "settings": {"rounds": 3, "prompts": "text", "seed": 1},
        "matrix": "m",
        "changes": ["patch"],
        "notes": ["random <weights>"],
        "generator": "g",
        "versions": {"torch": "2"},
        "variants": [{"name": "v", "sides": sides, "cells": cells, "refused": [], "incomplete": [], **variant}],
    }


def test_every_plot_of_the_issue_is_drawn_from_the_medians_and_the_spread(drawn):
    assert plots.problem() is None
    found = plots.draw(result())
    assert set(found) == {*plots.LINES, plots.LATENCY} and set(found.values()) == {b"PNG"}
    x, medians, errors = drawn[0].errorbar.call_args_list[0].args
    assert (x, medians, errors) == ([8192, 32768], [51, 41], [[1, 1], [1, 1]])
    assert drawn[0].errorbar.call_args_list[1].args[1] == [101, 81]
    pool, share, style = drawn[-1].step.call_args_list[0].args
    assert pool == [1.0, 2.0, 30.0] and share == pytest.approx([1, 2 / 3, 1 / 3]) and style == "-"


def test_what_is_refused_is_not_drawn(drawn):
    assert plots.draw(result(refused=["the clocks differ"])) == {} and drawn == []


def test_the_page_holds_its_pictures_and_escapes_what_it_quotes(drawn):
    page = report.html_page(result(), plots.draw(result()), None)
    assert page.count("data:image/png;base64,UE5H") == 5
    assert "random &lt;weights&gt;" in page and "<weights>" not in page
    assert "GPU0" in page and "1 x X" in page


def test_no_matplotlib_is_a_message(monkeypatch):
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    assert plots.problem() == plots.NO_MATPLOTLIB
    page = report.html_page(result(), {}, plots.problem())
    assert "matplotlib is not installed" in page and "<table>" in page
