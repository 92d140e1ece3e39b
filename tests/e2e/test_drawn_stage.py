"""The stage `drawn2` without a card: its plugin around a stand-in for SGLang's sampler, what is counted of the ranks'
files, and the real flow with a stand-in for the engine."""

import importlib.util
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.e2e import drawn_stage
from tests.e2e.test_scripts import machine, rows_of  # noqa: F401

WENT_ON, DRAWN = "draws with which they went on that differ", "draws that differ between the ranks"
LACKING = f"draws, missing to {drawn_stage.LEAST_DRAWS:,}"


@pytest.fixture
def plugin(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("drawn_tokens", drawn_stage.PLUGIN / "drawn_tokens.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setenv("E2E_DRAWN", str(tmp_path / "drawn"))
    return module


def test_what_is_drawn_and_what_is_gone_on_with(plugin, monkeypatch, tmp_path):
    class Sampler:
        def _sync_token_ids_across_tp(self, batch_next_token_ids, sampling_info):
            batch_next_token_ids += sampling_info.more
            return "theirs"

    module = ModuleType("sglang.srt.layers.sampler")
    module.Sampler = Sampler
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.sampler", module)
    plugin.hook()
    for step in range(2 * plugin.EVERY + 1):
        tokens = torch.tensor([step, 5])
        assert Sampler()._sync_token_ids_across_tp(tokens, SimpleNamespace(more=100)) == "theirs"
        assert tokens.tolist() == [step + 100, 105], "the function itself acts on the engine's own tokens"
        tokens += 7  # the engine's buffer goes on being used
    lines = (tmp_path / "drawn" / "1.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [[[s, 5], [s + 100, 105]] for s in range(2 * plugin.EVERY)]


def files(folder, *ranks):
    for rank, steps in enumerate(ranks):
        (folder / f"{rank}.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))


def test_what_is_counted(tmp_path):
    same = [[1, 2, 3], [1, 2, 3]]
    files(tmp_path, [same, [[1, 2], [4, 4]], same], [same, [[1, 9], [4, 4]]])
    once = {"ranks": 2, "steps": 2, "draws": 5, "drawn": 1, "gone_on": 0}
    assert drawn_stage.counted(tmp_path) == once, "what only one rank has written yet is left out"
    files(tmp_path, [same, [[1, 2], [4, 4]]], [same, [[1, 2], [4, 5]]])
    assert drawn_stage.counted(tmp_path) == once | {"drawn": 0, "gone_on": 1}
    files(tmp_path, [same, same], [same, [[1, 2], [1, 2]]])
    assert drawn_stage.counted(tmp_path) == once | {"draws": 6, "drawn": 3, "gone_on": 3}, "other requests"


def verdicts(path):
    return {r["metric"]: (r["value"], r["met"]) for r in rows_of(path) if "min_p" in r["case"] and r["issue"] == 23}


@pytest.mark.parametrize(
    ("how", "went_on", "ranks"),
    [
        ("", (0, True), (0, True)),
        ("FAKE_PARTED", (18, False), (0, True)),
        ("FAKE_ONE_RANK", (None, False), (1, False)),
    ],
)
def test_the_stage(machine, how, went_on, ranks):  # noqa: F811
    machine("drawn2", **({how: drawn_stage.OURS} if how else {}))
    path = machine.out / "stage_drawn2.json"
    case = json.loads(path.read_text())["cases"][drawn_stage.OURS]
    assert case["exit"] == 0 and case["sglang"] == "0.0.0.fake" and "flashinfer" in case["command"], case["log"]
    found = verdicts(path)
    assert found[WENT_ON] == went_on and found["ranks that wrote, missing to 2"] == ranks
    assert found["draws"] == (36, None) and found[LACKING] == (drawn_stage.LEAST_DRAWS - 36, False)
    assert found[DRAWN] == (None if how == "FAKE_ONE_RANK" else 18, None)


def test_an_engine_that_wrote_nothing_shows_nothing():
    rows = drawn_stage.rows(
        {drawn_stage.OURS: {}}, lambda case, impl, metric, value, bar=None, issue=0: (metric, value)
    )
    assert dict(rows)[WENT_ON] is None and dict(rows)[LACKING] == drawn_stage.LEAST_DRAWS
