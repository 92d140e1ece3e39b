"""The stage `accepted`, its engines, the collection: the text of drafts that are right or not, and how it ends."""

import json

import pytest

from tests.e2e import features_stage
from tests.e2e.test_scripts import machine, rows_of, script  # noqa: F401


@pytest.mark.parametrize("lie", [None, "none"])
def test_drafts_that_are_accepted(machine, lie):  # noqa: F811
    """The text of the plain run beside it is what is drafted; every batch must be equal, and verifications as few."""
    names = ("accepted_plain", *(f"accepted_{n}" for n in ("eagle314_none", "eagle314_half", "eagle516_all")))
    more = {"FAKE_ACCEPTED": lie} if lie else {}
    ended = machine("accepted", "--jobs", "4", "--only", *names, FAKE_OTHER_TEXT="accepted_eagle314_half", **more)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    stage = json.loads((machine.out / "stage_accepted.json").read_text())
    assert all("reproducible=on" in case["command"] for case in stage["cases"].values())
    told = {(t["run"], t["at_once"]): t for t in stage["texts"] if "ended" not in t}
    assert told["accepted_eagle314_half", 8]["differ"] == 8 and told["accepted_eagle516_all", 32]["differ"] == 0
    rows = [
        r for r in rows_of(machine.out / "stage_accepted.json") if "32 prompts" in r["case"] and r["bar"] is not None
    ]
    met = {(r["case"].partition("32 prompts at once: ")[2].partition(":")[0], r["metric"][:7]): r["met"] for r in rows}
    none, half, every = "EAGLE, 3 drafts, none right", "EAGLE, 3 drafts, half right", "EAGLE, 5 drafts, all right"
    greedy = ", greedy text with and without"
    assert met == {
        (none + greedy, "answers"): True,
        (half + greedy, "answers"): False,
        (every + greedy, "answers"): True,
        (none + greedy, "verific"): True,
        (half + greedy, "verific"): not lie,
        (every + greedy, "verific"): not lie,
    }


def test_an_answer_that_does_not_end_is_seen(machine):  # noqa: F811
    """Where min_tokens counts a step as a token, and nowhere else."""
    run, names = "accepted_eagle314_all", ("accepted_plain", "accepted_eagle314_all")
    for endless in ((), (run,), names):
        machine("accepted", "--jobs", "2", "--only", *names, FAKE_ENDLESS=" ".join(endless))
        path = machine.out / "stage_accepted.json"
        told = {t["run"]: t for t in json.loads(path.read_text())["texts"] if "ended" in t}
        assert {name: t["differ"] for name, t in told.items()} == {name: 8 * (name in endless) for name in names}
        assert told[run]["answers"] == 8
        missed = [row["case"] for row in rows_of(path) if row["met"] is False]
        assert len(missed) == len(endless) and all("8 prompts at once that end behind" in case for case in missed)


def test_drafts_need_the_text_of_a_run(machine):  # noqa: F811
    ended = machine("accepted", "--only", "accepted_eagle314_all")
    assert ended.returncode == 1 and "drafts are the text of accepted_plain: run it with them" in ended.stderr
    assert machine("accepted", "--only", "accepted_plain").returncode == 0
    assert machine("accepted", "--only", "accepted_eagle314_all").returncode == 0


def test_each_model_whose_answers_end_has_a_tokenizer(machine, tmp_path):  # noqa: F811
    """SGLang refuses min_tokens without one: seen at TP4, where only the other stage's model had it."""
    stages = script("stages").STAGES
    asked = {word for case in stages["reproducible43_4"] for word in features_stage.variant_of(case.options)}
    assert asked == {"--variant", "flash43e64"}
    assert {features_stage.variant_of(case.options) for case in stages["reproducible4"]} == {("--variant", "flash6h")}
    assert machine("reproducible43_4").returncode == 0
    assert {path.parent.name for path in tmp_path.rglob("tokenizer.json")} >= {"flash43e64"}
