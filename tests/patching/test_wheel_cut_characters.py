"""Answers that end within a character or behind one, read by the reader of each release that has deepseek-recipe."""

import functools
import json
import subprocess
import sys
from pathlib import Path

from tests.patching.recipe_answers_read import CASES, SMILE, TEXT, UNKNOWN
from tests.patching.wheels import every_release

REPO = Path(__file__).resolve().parents[2]
with_recipe = every_release("0.5.23")
CUT = {case: TEXT for case in ("cut", "cut after a byte", "cut in thoughts", "cut, with a stop", "aborted")}
CUT |= {"cut behind another, with a stop": TEXT + SMILE}
CUT |= {"ended by a token": TEXT, "ended within a character": TEXT}
STOPPED = {"stopped by a token": TEXT + SMILE, "stopped by rare characters": TEXT}
AT_ITS_END = ("stopped behind an unknown one", "stopped behind unknown ones")
OTHERS = {
    "unknown ones within": f"{UNKNOWN * 9}a{UNKNOWN * 9}b. No stop",
    "cut behind a character": TEXT + SMILE,
    "whole": f"{TEXT}{SMILE}!",
    "stopped": TEXT + SMILE,
}


@functools.cache
def read(version: str) -> dict:
    command = [sys.executable, "-m", "tests.patching.recipe_answers_read", version]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@with_recipe
def test_what_is_in_front_of_the_character_arrives(version):
    for case, text in CUT.items():
        told = [text, ""] if "thoughts" in case else ["", text]
        assert all(found == told for found in read(version)["ours"][case].values()), case


@with_recipe
def test_sglang_tells_nothing_where_it_is_not_streamed(version):
    """So the row is needed; in streams the last step is missing, up to the character before the last step's."""
    for case, whole in CUT.items():
        found = {way: "".join(told) for way, told in read(version)["stock"][case].items()}
        assert found["0"] == "", case
        assert all(whole.startswith(text) for text in found.values())
        assert any(text != whole for way, text in found.items() if way != "0")


@with_recipe
def test_a_stop_behind_a_character(version):
    """What is in front of it arrives; of SGLang's nothing, or the stop's beginning, too."""
    for case, text in STOPPED.items():
        assert all(found == ["", text] for found in read(version)["ours"][case].values()), case
        assert any(found != ["", text] for found in read(version)["stock"][case].values()), case
    assert read(version)["stock"]["stopped by a token"]["0"] == ["", ""]


@with_recipe
def test_a_stop_that_is_to_be_told_is(version):
    """With no_stop_trim."""
    found = read(version)["with its stop"]
    assert {"stopped", *STOPPED, *AT_ITS_END, "ended by a token"} == set(found)
    for case, ways in found.items():
        text = CASES[case][0]
        assert all(told == ["", text] for told in ways), (case, ways)


@with_recipe
def test_unknown_characters_in_front_of_a_stop_take_no_others_with_them(version):
    for case in AT_ITS_END:
        assert all(found == ["", TEXT] for found in read(version)["ours"][case].values()), case
        assert read(version)["stock"][case]["0"] == ["", ""], case


@with_recipe
def test_unknown_characters_are_not_kept_back_without_end(version):
    """All that is kept back is read anew with each token: an answer that repeats them would stop the server."""
    assert read(version)["most held"] < 64


@with_recipe
def test_what_is_decoded_for_stops_grows_with_the_answer_and_the_stop_alone(version):
    """What a stop_regex ended has no such text, and a client's stop may be of any length: by their squares (SGLang's
    own: 500 tokens for each of 1,000) one request keeps all others waiting."""
    assert max(read(version)["decoded"].values()) < 25


@with_recipe
def test_a_stream_tells_what_the_whole_answer_is(version):
    """Drawn answers: marks in odd places, calls, stops, cut and cut into steps anywhere. Of SGLang's many differ."""
    assert read(version)["differ, ours"] == []
    assert len(read(version)["differ"]) > 9


@with_recipe
def test_what_ends_with_a_character_is_as_it_was(version):
    found = read(version)
    for case in CASES.keys() - CUT.keys() - STOPPED.keys() - set(AT_ITS_END):
        assert found["ours"][case] == found["stock"][case]
        assert all(told == ["", OTHERS.get(case, "")] for told in found["ours"][case].values()), case


@with_recipe
def test_other_models_and_cards_keep_sglangs(version):
    assert read(version)["elsewhere"] == read(version)["stock"]
