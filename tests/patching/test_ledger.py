"""The ledger of what was reviewed, and the command that shows a release and records it."""

import json

import pytest

from deepseek_v4_sm120.patching import ledger
from deepseek_v4_sm120.sglang_patches.table import KNOWN_FILES, LEDGER, TABLE
from tests.patching import release_table, review
from tests.patching.wheels import RELEASES

GATE = "sglang.srt.models.deepseek_v2:MoEGate.forward"


def test_it_is_read_when_somebody_asks():
    assert TABLE.reviewed() is TABLE.reviewed() and TABLE.reviewed().problem is None
    assert list(TABLE.reviewed().of(GATE)) == list(RELEASES)
    assert TABLE.reviewed().of("sglang.nowhere:f") == {}


@pytest.mark.parametrize("content", [None, "{", "[]", '{"0.5.12": 3}', '{"0.5.12": {"m:f": 7}}', b"\xff\x00"])
def test_a_damaged_one_makes_everything_unreviewed_in_words(tmp_path, content):
    path = tmp_path / "reviewed.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    found = ledger.read(path)
    assert str(path) in found.problem and found.releases == {} and found.of("m:f") == {}


def test_the_engine_says_so(python, tree, tmp_path):
    """One sentence, and the server runs."""
    code = """
        from pathlib import Path
        from dataclasses import replace
        from deepseek_v4_sm120.sglang_patches import table as sglang_patches
        from deepseek_v4_sm120.patching import ledger
        missing = ledger.read(Path("nowhere/reviewed.json"))
        sglang_patches.TABLE = replace(sglang_patches.TABLE, reviewed=lambda: missing)
        import sglang.srt.managers.scheduler as s
        from deepseek_v4_sm120 import patching
        print(s.started, {r.review[:45] for r in patching.active_engine().records if r.review})
    """
    done = python(code, path=[tree()])
    assert done.stdout == "True {'UNREVIEWED: nowhere/reviewed.json cannot be r'}\n"


def test_a_review_shows_what_changed_and_records_it(tmp_path, monkeypatch, capsys):
    assert review.main(["0.5.16"]) == 0
    shown = capsys.readouterr().out
    assert "-    if get_global_server_args().enable_deterministic_inference:" in shown  # against 0.5.15.post1
    assert "+    if get_server_args().enable_deterministic_inference:" in shown
    assert "the same as in 0.5.15.post1: " in shown and "C4Indexer.compute_weights" in shown.splitlines()[-2]

    copy = tmp_path / "reviewed.json"
    known = json.loads(LEDGER.read_text())
    copy.write_text(json.dumps({name: found for name, found in known.items() if name != "0.5.16"}))
    monkeypatch.setattr(review, "LEDGER", copy)
    monkeypatch.setattr(review, "KNOWN_FILES", tmp_path / "known")
    assert review.main(["0.5.16", "--record"]) == 0
    assert json.loads(copy.read_text()) == known and list(json.loads(copy.read_text())) == list(RELEASES)
    assert copy.read_text() == LEDGER.read_text()
    assert (tmp_path / "known/0.5.16.json").read_text() == (KNOWN_FILES / "0.5.16.json").read_text()


@pytest.mark.parametrize("arguments", [["later"], ["0.5.12"]])
def test_a_review_against_nothing_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        review.main(arguments)
    assert stopped.value.code == 2 and arguments[0] in capsys.readouterr().err


def test_the_table_of_releases_in_the_docs_is_current():
    """Stale: python3 tests/patching/release_table.py"""
    assert release_table.PAGE.read_text() == release_table.page()
    for release in RELEASES:
        assert f"| {release} " in release_table.PAGE.read_text()
    absent = [p for p in TABLE.patches if any(release_table.state(p, r) == release_table.ABSENT for r in RELEASES)]
    assert absent and [p.name for p in absent if not p.absent and "sm120" in p.modes] == []


def test_what_the_table_of_releases_says_of_an_unread_release(monkeypatch):
    known = {**ledger.read(LEDGER).releases, "0.5.23": {}}
    monkeypatch.setattr(release_table.ledger, "read", lambda path: ledger.Ledger(known))
    by_name = {patch.name: patch for patch in TABLE.patches}
    assert release_table.state(by_name["mhc"], "0.5.23") == "UNREVIEWED"
    assert release_table.state(by_name["mhc"], "0.5.22") == "reviewed"
    assert release_table.state(by_name["compressor"], "0.5.13.post1") == "not there"
