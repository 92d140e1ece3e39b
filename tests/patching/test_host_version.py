"""Which rows are for a host whose version decides nothing: a tree that names no release, a build of between two."""

import importlib
import sys
from dataclasses import replace

import pytest

from deepseek_v4_sm120.__main__ import _head_part
from deepseek_v4_sm120.patching import contract, engine
from deepseek_v4_sm120.patching.engine import APPLIED, NOT_APPLICABLE, READY, Engine
from deepseek_v4_sm120.patching.sources import tells_release
from deepseek_v4_sm120.settings import Settings
from deepseek_v4_sm120.sglang_patches.table import TABLE
from tests.patching.small_host import FUNCTION, function_target, make, states
from tests.patching.wheels import RELEASES, WheelSources, check_once, fetch

UNTOLD = ("0.0.0.dev0", "0.0.0.dev1+gabc1234", "main-abc", "unknown", None)
# In a build of between two releases: what is of one of them alone, and of which nobody knows whether it is mended yet
RETIRED = {"0.5.20": {"disconnects"}, "0.5.23": {"developer_messages", "fenced_copies", "think_marks", "tool_strings"}}
RETIRED["0.5.23"] |= {"tool_fields", "text_parts", "cut_arguments", "assistant_marks"}


@pytest.fixture
def places(monkeypatch):
    """places(release, called) -> {patch: its places} of the release's wheel that tells another version, READY alone."""
    monkeypatch.setitem(sys.modules, "deepseek_v4_sm120.ops.shared.extension", type(sys)("extension"))
    sys.modules["deepseek_v4_sm120.ops.shared.extension"].load = lambda: None
    monkeypatch.setattr(contract, "check", check_once)

    def found(release, called):
        monkeypatch.setattr(engine, "Sources", lambda stand_ins=None: WheelSources(fetch(release), stand_ins))
        monkeypatch.setattr(engine, "package_version", lambda host, sources: called)
        made = Engine(TABLE, host="sglang", settings=Settings())
        records = [r for r in made.survey() if r.patch.default is None]  # defaults are for releases that we know
        assert {r.state for r in records} <= {READY, NOT_APPLICABLE}
        return {
            patch.name: {r.where for r in records if r.patch is patch and r.state == READY} for patch in TABLE.patches
        }

    return found


@pytest.mark.parametrize("told", UNTOLD)
def test_what_names_no_release(told):
    assert not tells_release(told)


@pytest.mark.parametrize(
    "told",
    [
        *("0.5.24", "0.5.23.post1", "0.5.24rc0", "0.5.24.dev0+g123.d20261129", "0.5.23+cu130", "0.5.23+SM120_v2"),
        *RELEASES,
    ],
)
def test_what_names_one(told):
    assert tells_release(told)


@pytest.mark.parametrize("release", ["0.5.15.post1", "0.5.19", "0.5.23"])
def test_a_tree_that_names_no_release_has_the_rows_of_the_one_that_it_is(places, release):
    """A fix that retired before is on top of SGLang's own else."""
    asked = places(release, release)
    for told in UNTOLD[1:3]:
        assert places(release, told) == asked


def test_a_tree_ahead_of_what_it_is_like_has_nothing_that_the_next_release_has_no_place_for(host):
    """What a fix is for may be mended there, although the place looks as before."""
    closed, open_ended = function_target(sglang=">=1.2,<1.2.1"), function_target(sglang=">=1.2,<2")
    host({"eng_host/_version.py": "__version__ = '0.0.0'"})
    assert states(make(closed, start=False)) == states(make(open_ended, start=False)) == [READY], "it is 1.2.0"
    ahead = {"eng_host.model:Model.heads": "of 1.2.0"}
    (record,) = make(closed, start=False, reviewed=ahead).records
    assert record.state == NOT_APPLICABLE
    assert record.reason.startswith("eng_host tells no release; behind 1.2.0, which it is most like, nobody knows of")
    assert states(make(open_ended, start=False, reviewed=ahead)) == [READY]


@pytest.mark.parametrize(
    ("release", "called"),
    [("0.5.22", "0.5.23.dev100+gabc"), ("0.5.23", "0.5.23.dev100+gabc"), ("0.5.23", "0.5.23rc1")]
    + [
        ("0.5.19", "0.5.20.dev7"),
        ("0.5.20", "0.5.20.dev7"),
        ("0.5.23", "0.5.24.dev3"),
        ("0.5.23", "0.5.23.post1.dev1"),
    ],
)
def test_a_build_of_between_two_releases_has_all_places_of_a_patch_or_none(places, release, called):
    """Those that have another range in the next release are in neither of the two by its version."""
    asked, found = places(release, release), places(release, called)
    gone = {name for name in asked if asked[name] and not found[name]}
    assert gone == (RETIRED.get(called.partition(".dev")[0], set()) if release != called[:6] else set()) | (
        {"dspark_lengths", "draft_chain", "step_tables"} if called.startswith("0.5.24") else set()
    )
    assert {name: where for name, where in found.items() if name not in gone} == {
        name: where for name, where in asked.items() if name not in gone
    }


@pytest.mark.parametrize("told", ["main-abc", "0.5.x"])
def test_a_version_that_is_none_stops_nothing(host, said, told):
    host({"eng_host/_version.py": f"__version__ = {told!r}"})
    make(function_target(sglang=">=1.2,<2"))
    import eng_host.main
    from eng_host import kernels

    assert eng_host.main and kernels.f(a=1) == ("ours", 1) and f"eng_host {told}; applied job" in said[-1][1]


def test_a_tree_without_a_version_is_told_in_words(host, said):
    host({"eng_host/_version.py": None, "eng_host/kernels.py": FUNCTION.replace("0)", "1)")})
    make(function_target(sglang=">=1.2,<2"))
    import eng_host.main

    assert eng_host.main
    assert any(text.startswith("UNREVIEWED in eng_host (which tells no version), and") for _, text in said)


@pytest.mark.parametrize(("folder", "words"), [("/of/sglang", "tells no version, /of/sglang"), (None, "not found on")])
def test_status_tells_a_tree_without_a_version_from_none(folder, words):
    build = {"problem": "not built"}
    found = {"deepseek_v4_sm120": "1", "python": "3", "sglang": None, "host_folder": folder, "build": build}
    _, line, *_ = _head_part({**found, "settings": {}, "indexer_choices": {}})
    assert line.split(maxsplit=1)[1].startswith(words)


@pytest.mark.parametrize(
    ("function", "only_read", "state"),
    [
        *((FUNCTION, True, APPLIED), (FUNCTION.replace("0)", "1)"), False, APPLIED)),
        (FUNCTION.replace("0)", "1)"), True, NOT_APPLICABLE),
    ],
)
def test_what_makes_up_for_code_is_left_out_of_code_that_nobody_read(host, said, function, only_read, state):
    """Quietly, as where the fault is mended: on top of a mend it would do the same twice."""
    host({"eng_host/_version.py": "__version__ = '1.3'", "eng_host/kernels.py": function})
    made = make(function_target(sglang=">=1,<2"), only_read=only_read)
    importlib.import_module("eng_host.main")
    importlib.import_module("eng_host.kernels")
    (record,) = made.records
    assert record.state == state and made.problems() == []
    is_told = record.reason.startswith("nobody has looked at this code of eng_host.kernels:f: its fault may be mended")
    assert is_told == (state == NOT_APPLICABLE) == (record.review == "")


@pytest.mark.parametrize("name", ["penalties", "prompt_logprobs"])
def test_the_next_release_that_counts_itself_is_not_counted_for_again(monkeypatch, name):
    """Simulated: 0.5.23's wheel as 0.5.24, with other code in one of the places."""
    monkeypatch.setitem(sys.modules, "deepseek_v4_sm120.ops.shared.extension", type(sys)("extension"))
    sys.modules["deepseek_v4_sm120.ops.shared.extension"].load = lambda: None
    monkeypatch.setattr(engine, "package_version", lambda host, sources: "0.5.24")
    monkeypatch.setattr(engine, "Sources", lambda stand_ins=None: WheelSources(fetch("0.5.23"), stand_ins))
    table = replace(TABLE, patches=tuple(patch for patch in TABLE.patches if patch.name == name))
    asked = contract.check

    def check(where, expected, caller, parse):
        found = asked(where, expected, caller, parse)
        return replace(found, digest="of another") if mended == where else found

    monkeypatch.setattr(contract, "check", check)
    for mended in (None, *(t.where for t in table.patches[0].targets)):
        found = {r.state for r in Engine(table, host="sglang", settings=Settings()).survey()}
        assert found == ({READY} if mended is None else {NOT_APPLICABLE}), mended
