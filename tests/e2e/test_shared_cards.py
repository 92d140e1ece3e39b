"""Ranks that share a card: what engines are given, when the service runs, what is refused, and what rows say of it."""

import contextlib
import importlib.util
import json
import os
import re
from types import SimpleNamespace

import pytest

from tests.e2e.collect import shared_cards
from tests.e2e.test_scripts import machine, rows_of, script  # noqa: F401
from tests.patching.wheels import content, every_release, fetch

CONTROL = """#!/bin/sh
[ "$1" = -d ] || read said
echo "${1:-$said} $CUDA_MPS_PIPE_DIRECTORY$CUDA_VISIBLE_DEVICES" >> "$(dirname "$0")/control"
"""
ENGINES = ("same_tp4_8192", "same_tp4_512")


@pytest.fixture
def control(tmp_path, monkeypatch):
    """The service's control, as a script that notes what it is asked."""
    path = tmp_path / "bin" / shared_cards.CONTROL
    path.parent.mkdir()
    path.write_text(CONTROL)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
    return path.parent / "control"


def test_engines_of_ranks_that_share_cards(machine, control, tmp_path):  # noqa: F811
    """One after the other, between a start and an end of the service; rows and runs say so, files do not mix."""
    only = ("--only", *ENGINES, "--ranks-a-card", "4")
    ended = machine("reproducible4", *only, FAKE_UNLIKE=ENGINES[1], CUDA_VISIBLE_DEVICES="1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert control.read_text() == f"-d {tmp_path}/work/mps\nquit {tmp_path}/work/mps\n"
    path = machine.out / "stage_reproducible4.json"
    stage = json.loads(path.read_text())
    assert stage["ranks_a_card"] == 4 and stage["command"].endswith(" --ranks-a-card 4")
    told = [row for row in rows_of(path) if row["metric"] == "answers that differ"]
    assert sorted((row["met"], row["impl"].rpartition(", ")[2]) for row in told) == [
        (False, "4 ranks a card"),
        (True, "4 ranks a card"),
    ]
    collect = script("collect")
    assert set(collect.collect([stage], "c0ffee")["runs"]) == {f"{name}, 4 ranks a card" for name in ENGINES}
    with pytest.raises(SystemExit, match=re.escape("not of [1, 4]")):
        collect.collect([stage, {k: v for k, v in stage.items() if k != "ranks_a_card"}], "c0ffee")


def test_the_service_ends_with_engines_that_fail(machine, control):  # noqa: F811
    ended = machine("reproducible4", "--only", ENGINES[0], "--ranks-a-card", "2", FAKE_CRASH=ENGINES[0])
    assert ended.returncode == 1 and len(control.read_text().splitlines()) == 2


def test_cards_of_their_own_have_no_service(machine, control):  # noqa: F811
    assert machine("reproducible4", "--only", ENGINES[0]).returncode == 0
    assert not control.exists()
    path = machine.out / "stage_reproducible4.json"
    assert "ranks_a_card" not in json.loads(path.read_text())
    assert not any("ranks" in row["impl"] for row in rows_of(path))


def test_what_is_refused(machine, control):  # noqa: F811
    ended = machine("sums4_43", "--ranks-a-card", "4")
    assert ended.returncode == 1 and "says nothing: nccl43_sums4, " in ended.stderr
    control.with_name(shared_cards.CONTROL).unlink()
    ended = machine("reproducible4", "--only", ENGINES[0], "--ranks-a-card", "4")
    assert ended.returncode == 1 and "nvidia-cuda-mps-control is not on PATH" in ended.stderr
    assert not control.exists()


def test_what_an_engine_is_given(tmp_path):
    """Beside the plugins that the case has anyway; each rank its share of the multiprocessors."""
    of = shared_cards.environment(SimpleNamespace(ranks_a_card=4, work=tmp_path), "/a:/b")
    assert of["PYTHONPATH"] == f"{shared_cards.PLUGIN}:/a:/b" and of["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert of[shared_cards.PIPES] == shared_cards.folders(tmp_path)[shared_cards.PIPES]
    of = shared_cards.environment(SimpleNamespace(ranks_a_card=8, work=tmp_path), None)
    assert of["PYTHONPATH"] == str(shared_cards.PLUGIN) and of["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "12"
    assert shared_cards.environment(SimpleNamespace(ranks_a_card=1, work=tmp_path), "/a") == {}
    run_stage = script("run_stage")
    case = next(case for case in run_stage.STAGES["experts"] if "E2E_AS_SM120" in case.environment)
    arguments = SimpleNamespace(ranks_a_card=2, work=tmp_path)
    paths = run_stage.environment(case, arguments)["PYTHONPATH"].split(os.pathsep)
    assert [os.path.basename(path) for path in paths[:2]] == ["shared_cards_plugin", "sm120_plugin"]


@pytest.fixture
def plugin():
    spec = importlib.util.spec_from_file_location("shared_cards_ranks", shared_cards.PLUGIN / "shared_cards_ranks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_card_of_a_rank(plugin, monkeypatch):
    assert plugin.VARIABLE == shared_cards.VARIABLE

    @contextlib.contextmanager
    def theirs(card):
        yield card + 10  # what it makes of a card is kept

    for ranks, cards in ((4, [0] * 4 + [1] * 4), (2, [0, 0, 1, 1, 2, 2, 3, 3]), (8, [0] * 8)):
        monkeypatch.setenv(shared_cards.VARIABLE, str(ranks))
        found = []
        for rank in range(8):
            with plugin.shared(theirs, rank) as card:
                found.append(card - 10)
        assert found == cards


@every_release("0.5.14")
def test_what_the_plugin_wraps_starts_the_ranks(plugin, version):
    """Each release's own starters ask that function for a rank's card, by the name that is wrapped."""
    for module in plugin.STARTERS:
        text = content(fetch(version), f"{module.replace('.', '/')}.py")
        assert text.count(f"{plugin.FUNCTION}(gpu_id) as gpu_id:") == 1, module
    without = ("        if full_nvlink is None:\n            return ", "    return full_nvlink is True\n")
    for module, end in zip(plugin.SUMS, without, strict=True):
        text = content(fetch(version), f"{module.replace('.', '/')}.py")
        assert text.count(f"full_nvlink = {plugin.ASKED}(") == 1 and end in text, module
