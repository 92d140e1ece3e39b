"""Who owns a cache slot: random load on releases' own schedulers, with what each slot must hold beside it."""

import json
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
LOAD = "from tests.patching import slots_random_load; slots_random_load.main()"
SEEN = ("Wrong", "AssertionError")  # by us, by SGLang: what else ends a run is a program that is wrong itself
OUT = "RuntimeError Decode out of memory"  # SGLang's own words


@pytest.fixture
def found(program_python):
    """found(version, seeds): what the program has printed"""

    def found(version, seeds):
        done = subprocess.run([*program_python(), "-c", LOAD, version, seeds], cwd=REPO, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return found


def is_seen(wrong):
    return wrong is not None and (wrong.partition(": ")[2].partition(" ")[0] in SEEN or OUT in wrong)


def check_what_ours_mends(found, names):
    assert set(found["alone"]) == set(found["with ours"]) == names
    assert {name: wrong for name, wrong in found["alone"].items() if not is_seen(wrong)} == {}, "SGLang alone"
    assert {name: one["wrong"] for name, one in found["with ours"].items() if one["wrong"]} == {}
    assert all(one["seen"]["answered"] > 10 for one in found["with ours"].values())


def test_every_slot_holds_what_its_readers_take_it_for(found):
    """Prompts in chunks, prefixes, drafts, ends, aborts, retraction, pauses, flushes; and each fault that is put into
    0.5.23, or into what is known of a pass, is seen, as are those of its own that `preempted_requests` and
    `waiting_chunks` mend. The same with a hierarchical cache."""
    found = found("0.5.23", "suite")
    assert {name: case["wrong"] for name, case in found["cases"].items() if case["wrong"]} == {}
    for name, case in found["cases"].items():
        assert case["seen"]["answered"] > 20 and case["seen"]["aborted"] > 0, name
        assert case["seen"].get("cached", 0) > 0 or name == "no prefix cache", name
    assert sum(case["seen"].get("retracted", 0) for case in found["cases"].values()) > 0
    assert {name: wrong for name, wrong in found["wrong ones"].items() if not is_seen(wrong)} == {}
    assert len(found["wrong ones"]) == 4
    check_what_ours_mends(found, {"priorities", "two chunks"})
    check_hierarchy(found["hierarchy"])
    check_waiting(**found["waiting"])
    check_grammars(**found["grammars"])
    check_first_requests(found["forms"])


def check_first_requests(found):
    """A day of requests asks for no form of a kernel that first_requests has not met; without its batches it does, and
    without those whose rows are whole sixteens."""
    for name, needed in (("plain", ("alone",)), ("EAGLE", ("alone", "odd"))):
        asked = {whose: {tuple(one) for one in forms} for whose, forms in found[name].items()}
        assert len({kernel for kernel, _ in asked["day"] if not kernel.startswith("prompts")}) == 2
        assert max(form for _, form in asked["day"]) == 4
        assert asked["day"] <= asked["first"]
        assert not any(asked["day"] <= asked[whose] for whose in needed)


def check_hierarchy(found):
    """What goes to the host and the disk and comes back is what it was; each fault is seen, and so is a server without
    DSPARK that reads the files of one with it."""
    assert {name: case["wrong"] for name, case in found["cases"].items() if case["wrong"]} == {}
    assert all(case["seen"]["kept"] > 50 and case["seen"]["loaded"] > 10 for case in found["cases"].values())
    assert {name: wrong for name, wrong in found["wrong ones"].items() if not is_seen(wrong)} == {}
    assert len(found["wrong ones"]) == 6
    assert "state of" in found["alone"]["wrong"] and is_seen(found["alone"]["wrong"])
    of_another, of_another_form, own = found["with ours"]["read"]
    assert found["with ours"]["wrong"] is None and of_another == of_another_form == 0 and own > 10


def check_waiting(alone, ours):
    """Short prompts are read beside the long one's chunks, which are shorter then, and whole in between; the second
    long one keeps its place. One without room is looked up seldom, and is let in as soon. Whatever is let in so has
    the slots that it reads."""
    before, behind = alone["behind"], ours["behind"]
    last = before["long"][-1]
    assert last == 7 and all(before[f"short {n}"][0] >= last for n in range(3)), "SGLang alone"
    assert [behind[f"short {n}"] for n in range(3)] == [[3], [5], [7]] and behind["long"] == list(range(10))
    assert behind["second"][0] >= behind["long"][-1] and len(behind["second"]) <= len(before["second"])
    (turn, looks), (turn_of_ours, looks_of_ours) = alone["without room"], ours["without room"]
    assert looks > 90 and looks_of_ours < 10 and turn <= turn_of_ours <= turn + 1
    assert ours["random"]["wrong"] is None and ours["random"]["seen"]["answered"] > 20 and ours["shorter"] > 5


def check_grammars(alone, ours):
    """A pass masks each answer by where its grammar stands; of SGLang alone a mixed one does not, where there are
    drafts."""
    assert {name: case["wrong"] for name, case in alone["cases"].items() if case["wrong"]} == {}
    assert all(case["seen"]["masked"] > 50 for case in alone["cases"].values())
    assert is_seen(alone["mixed"]) and "is masked as behind" in alone["mixed"]
    assert ours["wrong"] is None and ours["seen"]["masked"] > 50 and ours["seen"]["mixed"] > 20


def test_answers_that_have_no_room_beside_a_prompt_sit_out_its_pass(found):
    """In 0.5.17, whose own allocation ends the server, and which then counts a token too many of them."""
    check_what_ours_mends(found("0.5.17", "0"), {"priorities", "two chunks", "mixed, full"})
