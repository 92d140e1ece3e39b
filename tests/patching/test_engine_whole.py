"""A patch as a whole or not at all, in one process and in all processes of a server; a start after the host's."""

import dataclasses
import importlib
import json
import os
import re
import sys
from types import SimpleNamespace

import pytest

import deepseek_v4_sm120
from deepseek_v4_sm120 import patching
from deepseek_v4_sm120.patching import import_hook, profile, verdict
from deepseek_v4_sm120.patching.contract import Parameters
from deepseek_v4_sm120.patching.engine import APPLIED, BROKEN, NOT_APPLICABLE, OFF, READY
from deepseek_v4_sm120.patching.spec import Patch, PatchError
from deepseek_v4_sm120.settings import Settings, read_choices
from tests.patching.small_host import (
    BROKEN_HOSTS,
    FUNCTION,
    HEADS,
    enter,
    function_target,
    make,
    start_engine,
    states,
)


@pytest.mark.parametrize("on_broken", ["raise", "warn"])
@pytest.mark.parametrize("order", [1, -1])
def test_one_broken_target_leaves_out_the_whole_patch(host, said, gpu, on_broken, order):
    """In front of the good one and behind it; the good one is imported first."""
    broken = function_target(**HEADS | {"contract": Parameters(("self", "count"))})
    host()
    engine = make(*(function_target(), broken)[::order], settings=Settings(on_broken=on_broken))
    from eng_host import kernels, model

    assert kernels.f(a=1) == 1 and model.Model().heads(8) == 64
    assert states(engine) == [BROKEN, BROKEN]
    reasons = {r.where: r.reason for r in engine.records}
    assert reasons["eng_host.model:Model.heads"].endswith("parameters: missing count; unexpected n")
    assert reasons["eng_host.kernels:f"].startswith("left out as a whole: eng_host.model:Model.heads: ")
    assert len(engine.problems()) == 1


def test_a_target_missing_after_its_import_takes_the_others_back(host, said, gpu):
    """Another patch lies on top in the same place, and stays."""
    host({"eng_host/late.py": "def f(**kwargs): return kwargs['a'] + kwargs.get('b', 0)\ndel f\n"})
    late = function_target(where="eng_host.late:f", caller=None)
    patches = [
        Patch(name="torn", why="test", targets=(function_target(), late), retire="never"),
        Patch(name="whole", why="test", targets=(function_target(),), retire="never"),
    ]
    engine = start_engine(patches)
    from eng_host import kernels

    assert kernels.f(a=1) == ("ours", ("ours", 1)) and states(engine) == [APPLIED, READY, APPLIED]
    import eng_host.late  # noqa: F401

    assert states(engine) == [BROKEN, BROKEN, APPLIED]
    assert kernels.f(a=1) == ("ours", 1) and kernels.f.__wrapped__(a=1) == 1
    assert "eng_host.late has no f after its import" in engine.records[0].reason
    assert engine.undo() == [] and kernels.f(a=1) == 1
    assert [level for level, _ in said] == ["INFO", "WARNING"]


def test_what_somebody_put_on_top_of_ours_stays_and_stops_our_server(host, said, gpu):
    host({"eng_host/late.py": "def f(**kwargs): return kwargs['a'] + kwargs.get('b', 0)\ndel f\n"})
    engine = make(function_target(), function_target(where="eng_host.late:f", caller=None))
    from eng_host import kernels

    kernels.f = stranger = lambda **kwargs: "somebody's"
    import eng_host.late  # noqa: F401

    assert kernels.f is stranger
    assert engine.disagreements == [
        "job: eng_host.kernels:f cannot be taken back, somebody put another function on top of ours"
    ]
    assert enter() == "loaded", "not our GPU"
    gpu(True)
    with pytest.raises(PatchError, match="cannot be taken back"):
        enter()


def test_after_the_layers_are_made_there_is_no_way_back(host, said, gpu):
    host({"eng_host/late.py": "def f(**kwargs): return kwargs['a'] + kwargs.get('b', 0)\ndel f\n"})
    late = function_target(where="eng_host.late:f", caller=None)
    engine = make(function_target(), late, settings=Settings(on_broken="warn"))
    gpu(True)
    assert enter() == "loaded"
    from eng_host import kernels

    with pytest.raises(PatchError, match="too late to run the stock code instead"):
        import eng_host.late  # noqa: F401
    assert kernels.f(a=1) == ("ours", 1) and states(engine) == [APPLIED, BROKEN]


def test_what_serves_a_broken_operator_is_left_out_with_it(host, said, gpu):
    host()
    broken = function_target(**HEADS | {"contract": Parameters(("self", "count"))})
    patches = [
        Patch(name="helper", why="test", targets=(function_target(),), retire="never", serves="operator"),
        Patch(name="operator", why="test", targets=(broken,), retire="never"),
    ]
    engine = start_engine(patches, Settings(on_broken="warn"))
    from eng_host import kernels

    assert kernels.f(a=1) == 1 and states(engine) == [NOT_APPLICABLE, BROKEN]
    assert engine.records[0].reason == "serves operator, which is BROKEN"


def test_what_serves_an_operator_without_a_place_is_left_out(host):
    host()
    nowhere = function_target(sglang=">=1.4")
    patches = [
        Patch(name="helper", why="test", targets=(function_target(),), retire="never", serves="operator"),
        Patch(name="operator", why="test", targets=(nowhere,), retire="never"),
    ]
    engine = start_engine(patches)
    assert [(r.state, r.reason) for r in engine.records] == [
        (NOT_APPLICABLE, "serves operator, which is NOT APPLICABLE"),
        (NOT_APPLICABLE, "eng_host 1.2.0 has no such place"),
    ]


@pytest.mark.parametrize(
    ("version", "function"), [("1.3.0", FUNCTION), ("1.2.0", FUNCTION.replace("0)", "1)"))], ids=["version", "code"]
)
def test_unreviewed_refuse_is_as_broken(host, said, gpu, version, function):
    host({"eng_host/_version.py": f"__version__ = '{version}'", "eng_host/kernels.py": function})
    engine = make(settings=Settings(unreviewed="refuse"))
    from eng_host import kernels

    assert not hasattr(kernels.f, "__wrapped__") and states(engine) == [BROKEN]
    assert "job: eng_host.kernels:f: UNREVIEWED: nobody has looked at" in said[0][1] and "=refuse" in said[0][1]
    gpu(True)
    with pytest.raises(PatchError, match="UNREVIEWED: nobody has looked at"):
        enter()


# All processes of a server --------------------------------------------------------------------------------------------


def test_children_leave_out_what_their_parent_left_out(host, said, gpu):
    host(BROKEN_HOSTS[0][0])
    parent = make(settings=Settings(on_broken="warn"))
    enter()
    assert states(parent) == [BROKEN]
    import_hook.forget()
    host()  # the child would find everything in order
    child = make(settings=Settings(on_broken="warn"))
    from eng_host import kernels

    assert kernels.f(a=1) == 1 and states(child) == [BROKEN]
    assert "left out by the process that started this one: eng_host.kernels:f: consumed keys" in child.records[0].reason


def test_a_child_has_what_its_parent_has(host, said, gpu):
    host()
    make()
    gpu(True)
    enter()
    import_hook.forget()
    child = make()
    assert child.inherited is not None and [record.state for record in child.survey()] == [READY]
    assert child.disagreements == child.problems() == []


# a module of the host, and what a patch of ours begins in front of it
EARLY = {
    "eng_host/worker.py": "import eng_ours.early\neng_ours.early.found.append('the code')\n",
    "eng_ours/early.py": "found = []\ndef begin(): found.append('ahead')\n",
}
AHEAD = ("eng_host.worker", "eng_ours.early:begin")


@pytest.mark.parametrize(
    ("child", "begins"),
    [
        ({}, True),
        ({"settings": Settings(off=True)}, False),
        ({"settings": Settings(choices={"job": "off"})}, False),
        ({"modes": ("ops",)}, False),
        ({"needs": ("eng_ours:missing",), "settings": Settings(on_broken="warn")}, False),
    ],
    ids=["ready", "all off", "off", "not applicable", "broken by then"],
)
def test_what_a_patch_begins_ahead_of_an_import_in_a_child(child, begins, host, said, gpu):
    host(EARLY)
    make(ahead=AHEAD)
    enter()
    import_hook.forget()
    engine = make(ahead=AHEAD, **child)
    importlib.import_module("eng_host.kernels")  # BROKEN from here on, where what the patch needs does not load
    assert (states(engine) == [APPLIED]) is begins
    importlib.import_module("eng_host.worker")
    assert sys.modules["eng_ours.early"].found == ["ahead"] * begins + ["the code"]


def test_a_child_begins_nothing_of_what_its_parent_left_out(host, said, gpu):
    host({**EARLY, **BROKEN_HOSTS[0][0]})
    make(ahead=AHEAD, settings=Settings(on_broken="warn"))
    enter()
    import_hook.forget()
    host(EARLY)
    child = make(ahead=AHEAD, settings=Settings(on_broken="warn"))
    assert states(child) == [READY], "nothing is looked at on disk before that"
    import eng_host.worker  # noqa: F401

    assert sys.modules["eng_ours.early"].found == ["the code"]


def test_what_a_first_process_never_begins(host, said, gpu):
    host(EARLY)
    make(ahead=AHEAD)
    import eng_host.worker  # noqa: F401

    assert sys.modules["eng_ours.early"].found == ["the code"]


def test_a_child_that_cannot_have_what_its_parent_has_stops(host, said, gpu):
    host()
    make(needs=("eng_ours:fine",), settings=Settings(on_broken="warn"))
    import eng_host.arguments
    import eng_host.model

    enter()
    import_hook.forget()
    importlib.reload(eng_host.arguments)
    importlib.reload(eng_host.model)
    child = make(needs=("eng_ours:missing",), settings=Settings(on_broken="warn"))
    assert enter() == "loaded", "not our GPU"
    gpu(True)
    with pytest.raises(PatchError, match="all processes of a server must run the same code"):
        enter()
    assert states(child) == [BROKEN]


def test_a_child_needs_the_profile_no_more(host, said, gpu, tmp_path, monkeypatch):
    host()
    monkeypatch.setattr(deepseek_v4_sm120, "OPS", ("job",))
    here = profile.here(make(start=False).version)
    identity = {**vars(here), "device": here.device or "any GPU"}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"format": 1, "identity": identity, "operators": {"job": {"winner": "stock"}}}))
    settings = Settings(profile=str(path))
    assert states(make(settings=settings)) == [NOT_APPLICABLE]
    enter()
    path.unlink()
    child = make(settings=settings)
    assert states(child) == [NOT_APPLICABLE] and child.problems() == []


def test_a_profile_that_no_variable_holds_is_left_to_the_children():
    """Linux starts no process with a variable of 128 KiB."""
    environ, mine = {}, verdict.identity("1.2.0")
    for size, is_handed_on in ((1 << 10, True), (1 << 17, False)):
        verdict.Verdict(mine, {"job": "why"}, {"warnings": ["x" * size]}).hand_over(environ)
        found = verdict.inherited(environ, "1.2.0")
        assert len(environ[patching.VERDICT]) < 1 << 17 and (found.profile is not None) == is_handed_on
        assert found.left_out == {"job": "why"}


def test_a_verdict_about_another_installation_is_none(host, said, gpu):
    host(BROKEN_HOSTS[0][0])
    make()
    enter()
    host({"eng_host/_version.py": "__version__ = '1.3.0'"})
    assert make(start=False).inherited is None


@pytest.mark.parametrize("when", ["its own start", "between the two", "never"])
@pytest.mark.parametrize("becomes", ["another build\n", None])
def test_a_folder_that_is_made_anew_while_a_server_starts_stops_it(
    host, said, gpu, monkeypatch, tmp_path, when, becomes
):
    """A path on PYTHONPATH, a build under it: ranks would run other kernels than each other, or files of both."""
    host()
    record = tmp_path / f"dsv4/deepseek_v4_sm120-{deepseek_v4_sm120.__version__}.dist-info/RECORD"
    record.parent.mkdir(parents=True)
    record.write_text("a build\n")
    monkeypatch.setattr(verdict, "_package", lambda: tmp_path / "dsv4/deepseek_v4_sm120")

    def replace(now):
        if now == when:
            record.unlink() if becomes is None else record.write_text(becomes)

    make()
    gpu(True)
    assert enter() == "loaded", "the first process"
    replace("between the two")
    import_hook.forget()
    child = make()
    replace("its own start")
    assert child.inherited is not None
    if when == "never":
        child.enter_model(makes_layers=True)
        assert child.disagreements == []
        return
    with pytest.raises(PatchError, match="made anew, or taken away, while this server started.*: start it again, "):
        child.enter_model(makes_layers=True)


def test_a_worker_asks_once_whether_the_servers_other_processes_run_the_same(host, said, gpu, monkeypatch):
    """In front of its layers, on a GPU of ours, and not in the process that resolves the arguments."""
    host()
    asked, answers = [], [None, PatchError("other hosts run something else")]

    def ask():
        asked.append("asked")
        if (answer := answers.pop(0)) is not None:
            raise answer

    monkeypatch.setitem(sys.modules, "eng_agrees", SimpleNamespace(ask=ask))
    engine = make(agrees="eng_agrees:ask")
    gpu(False)
    assert enter() == "loaded" and not asked, "on another GPU nothing of ours runs"
    gpu(True)
    assert enter() == enter() == "loaded" and asked == ["asked"]
    engine._has_layers = False  # another worker
    with pytest.raises(PatchError, match="other hosts"):
        enter()


def test_the_word_of_a_build_that_named_none_is_that_of_another(monkeypatch):
    words = {"identity": verdict.identity("1.2.0"), "left_out": {}, "profile": None}
    found = verdict.inherited({patching.VERDICT: json.dumps(words)}, "1.2.0")
    monkeypatch.setattr(verdict, "build", lambda: "a digest")
    assert verdict.replaced("a digest", None) is None and "two builds" in verdict.replaced("a digest", found)


def test_what_another_build_hands_over_of_a_profile_is_no_traceback(host, said, gpu, monkeypatch):
    host()
    make()
    enter()
    words = json.loads(os.environ[patching.VERDICT])
    handed = {"path": "p", "operators": {}, "problem": None, "warnings": [], "of_tomorrow": 1}
    monkeypatch.setenv(patching.VERDICT, json.dumps(words | {"profile": handed, "build": "of tomorrow"}))
    import_hook.forget()
    child = make()
    gpu(True)
    with pytest.raises(PatchError, match="two builds"):
        child.enter_model(makes_layers=True)
    assert child.profile.path == "p"


def test_a_server_says_it_once(host, said, gpu):
    host({**BROKEN_HOSTS[0][0], "eng_host/_version.py": "__version__ = '1.3.0'"})
    for _ in range(3):  # the first process and two workers, which inherit its environment
        make()
        import eng_host.main

        importlib.reload(eng_host.main)
        import_hook.forget()
    assert [level for level, _ in said] == ["WARNING"]


def test_a_late_start_replaces_what_nobody_holds_and_refuses_what_somebody_does(host, said, gpu):
    host({"eng_host/early.py": "from eng_host.kernels import f as g\n"})
    import eng_host.early
    import eng_host.model

    held = function_target()
    patches = [
        Patch(name="held", why="test", targets=(held, function_target(**HEADS)), retire="never"),
        Patch(name="free", why="test", targets=(function_target(**HEADS),), retire="never"),
    ]
    engine = start_engine(patches)
    assert eng_host.kernels.f(a=1) == eng_host.early.g(a=1) == 1 and eng_host.model.Model().heads(8) == ("ours", 64)
    assert states(engine) == [BROKEN, BROKEN, APPLIED]
    assert "was imported before our hook, and eng_host.early:g has the original by name" in engine.records[0].reason
    gpu(True)
    with pytest.raises(PatchError, match="imported before our hook"):
        enter()


def test_what_is_only_called_is_replaced_where_somebody_holds_it_and_taken_back_there(host, said, gpu):
    host({"eng_host/early.py": "from eng_host.kernels import f as g\n"})
    import eng_host.early
    import eng_host.model

    before = eng_host.early.g
    rebound = dataclasses.replace(function_target(), rebound=True)
    engine = start_engine([Patch(name="called", why="test", targets=(rebound,), retire="never")])
    assert states(engine) == [APPLIED] and eng_host.kernels.f is eng_host.early.g is not before
    engine._take_back(engine.records)
    assert eng_host.kernels.f is eng_host.early.g is before


def test_the_refusal_says_which_choices_start_the_server(host, said, gpu):
    """Those that are made stay; what fits is not left out."""
    host({"eng_host/kernels.py": "g = 1"})
    patches = [
        Patch(name="one", why="test", targets=(function_target(),), retire="never"),
        Patch(name="two", why="test", targets=(function_target(**HEADS),), retire="never"),
    ]
    start_engine(patches, Settings(choices={"two": "on"}))
    gpu(True)
    with pytest.raises(PatchError) as refused:
        enter()
    (setting,) = re.findall(r"DSV4_SM120_ON_BROKEN=warn, or DSV4_SM120_SET=(\S+), to run", str(refused.value))
    assert setting == "two=on,one=off"
    engine = start_engine(patches, Settings(choices=read_choices(setting)), start=False)
    assert states(engine) == [OFF, READY] and engine.survey() and engine.problems() == []
