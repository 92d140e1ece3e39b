"""The engine with a table of its own over a small host package: no SGLang name, no torch, no compiled module."""

import importlib
import json
import logging
import sys

import pytest

from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.patching.contract import Bound, Parameters
from deepseek_v4_sm120.patching.engine import APPLIED, BROKEN, NOT_APPLICABLE, OFF, READY, UNSUPPORTED
from deepseek_v4_sm120.patching.spec import Patch, PatchError, StandIn, Target
from deepseek_v4_sm120.settings import Settings
from deepseek_v4_sm120.sglang_patches import device_gate
from tests.patching.small_host import (
    BROKEN_HOSTS,
    FUNCTION,
    HOST,
    digest,
    enter,
    function_target,
    make,
    start_engine,
    states,
)


def test_applies_at_the_import_and_says_so_once(host, said):
    host()
    engine = make()
    assert states(engine) == [READY]
    from eng_host import caller, kernels

    assert caller.run() == ("ours", 1) and kernels.f.__wrapped__(a=1) == 1
    assert states(engine) == [APPLIED] and engine.records[0].review == "reviewed"
    importlib.reload(kernels)
    assert len(said) == 1 and said[0][0] == "INFO" and "eng_host 1.2.0; applied job" in said[0][1]


def test_methods(host):
    host()
    target = function_target(where="eng_host.model:Model.heads", contract=Parameters(("self", "n")), caller=None)
    engine = make(target)
    from eng_host.model import Model

    assert Model().heads(8) == ("ours", 64)
    assert engine.undo() == [] and Model().heads(8) == 64


def test_reload_double_apply_and_undo(host):
    host()
    engine = make()
    from eng_host import kernels

    ours = kernels.f
    engine.apply(engine.records[0], kernels)
    assert kernels.f is ours
    importlib.reload(kernels)
    assert kernels.f is not ours and kernels.f(a=1) == ("ours", 1) and kernels.f.__wrapped__(a=1) == 1
    original = kernels.f.__wrapped__
    assert engine.undo() == [] and kernels.f is original and states(engine) == [READY]


def test_two_patches_in_one_place(host):
    host()
    patches = [Patch(name=name, why="test", targets=(function_target(),), retire="never") for name in ("one", "two")]
    engine = start_engine(patches)
    from eng_host import kernels

    both = kernels.f
    assert both(a=1) == ("ours", ("ours", 1)) and states(engine) == [APPLIED, APPLIED]
    for record in engine.records:
        engine.apply(record, kernels)
    assert kernels.f is both, "neither is applied twice"
    importlib.reload(kernels)
    assert kernels.f is not both and kernels.f(a=1) == both(a=1)
    assert engine.undo() == [] and kernels.f(a=1) == 1


def test_two_patches_that_share_what_they_put_in_one_place(host):
    """A replacement that gives back what it was given: each patch can be taken back alone, and the place is restored
    with the last."""
    host()
    shared = function_target(replacement="eng_ours:shared", contract=Bound())
    patches = [Patch(name=name, why="test", targets=(shared,), retire="never") for name in ("one", "two", "three")]
    engine = start_engine(patches)
    from eng_host import kernels

    first, stock = kernels.f, kernels.f.__wrapped__
    assert first(a=1) == ("shared", 1) and stock(a=1) == 1 and states(engine) == [APPLIED] * 3
    for record in engine.records:
        engine.apply(record, kernels)
    assert kernels.f is first
    for index in (0, 2):
        engine._take_back([engine.records[index]])
        assert kernels.f is first and engine.records[index].state == READY
    engine.apply(engine.records[0], kernels)
    assert kernels.f is first and states(engine) == [APPLIED, APPLIED, READY]
    importlib.reload(kernels)
    assert kernels.f is not first and kernels.f(a=1) == ("shared", 1) and states(engine) == [APPLIED] * 3
    stock = kernels.f.__wrapped__
    engine._take_back(engine.records[1:])
    assert kernels.f(a=1) == ("shared", 1)
    assert engine.undo() == [] and kernels.f is stock and states(engine) == [READY] * 3


def test_undo_leaves_a_stranger_on_top_alone(host):
    host()
    engine = make()
    from eng_host import kernels

    def stranger(**kwargs):
        return "stranger"

    kernels.f = stranger
    assert engine.undo() == engine.records and kernels.f is stranger and states(engine) == [APPLIED]


def test_flags(host):
    host({"eng_host/flags.py": "is_new = False\n"})
    make(function_target(where="eng_host.flags:is_new", contract=Bound(), replacement="eng_ours:flag", caller=None))
    from eng_host import flags

    assert flags.is_new is True


@pytest.mark.parametrize(
    ("version", "function", "review"),
    [
        ("1.2.0", FUNCTION + "# a comment\n", "reviewed"),
        ("1.3.0", FUNCTION, "UNREVIEWED: nobody has looked at eng_host 1.3.0; this code is that of 1.2.0"),
        ("1.3.0.dev7+g1", FUNCTION, "UNREVIEWED: nobody has looked at eng_host 1.3.0.dev7+g1; this code is that of"),
        ("1.2.0", FUNCTION.replace("0)", "1)"), "UNREVIEWED: nobody has looked at this code (digest "),
    ],
)
def test_review(host, version, function, review):
    host({"eng_host/_version.py": f"__version__ = '{version}'", "eng_host/kernels.py": function})
    engine = make()
    import eng_host.kernels  # noqa: F401

    assert states(engine) == [APPLIED] and engine.records[0].review.startswith(review)
    assert ("UNREVIEWED job" in report.summary(engine)) == review.startswith("UNREVIEWED")


@pytest.mark.parametrize("shadow", [None, "1", "ours"])
def test_a_log_says_that_both_run(host, shadow):
    host({})
    told = report.summary(make(settings=Settings(shadow=shadow)))
    assert (f"SHADOW MODE {shadow}" in told) is (shadow is not None) and ("SHADOW" in told) is (shadow is not None)


@pytest.mark.parametrize(("changes", "words"), BROKEN_HOSTS)
def test_a_broken_contract_is_told_in_one_line_and_stops_no_import(host, said, gpu, changes, words):
    host(changes)
    engine = make()
    import eng_host.main  # noqa: F401

    if changes.get("eng_host/kernels.py", "") is not None:
        import eng_host.kernels

        assert not hasattr(getattr(eng_host.kernels, "f", None), "__wrapped__")
    assert states(engine) == [BROKEN] and words in engine.records[0].reason
    assert [level for level, _ in said] == ["WARNING"]
    assert "\n" not in said[0][1] and words in said[0][1] and "job: " in said[0][1] and "eng_host 1.2.0" in said[0][1]
    assert enter() == "loaded", "not our GPU: the server starts"
    assert len(said) == 1


@pytest.mark.parametrize(("changes", "words"), BROKEN_HOSTS)
def test_a_broken_contract_stops_our_model_on_our_gpu(host, said, gpu, changes, words):
    host(changes)
    engine = make()
    gpu(True)
    from eng_host import arguments, model

    for stop in (lambda: arguments.resolve("asked"), model.Model):
        with pytest.raises(PatchError) as error:
            stop()
        text = str(error.value)
        assert words in text and "eng_host 1.2.0" in text and "DSV4_SM120_ON_BROKEN=warn" in text
        assert not isinstance(error.value, ImportError) and states(engine) == [BROKEN]


def test_the_constructor_alone_stops_too(host, said, gpu):
    """A worker whose first process did not see the GPU, or a release without the place where arguments are resolved."""
    host({**BROKEN_HOSTS[0][0], "eng_host/arguments.py": "def resolve_later(arguments): pass"})
    make()
    gpu(True)
    from eng_host import model

    with pytest.raises(PatchError, match="missing b"):
        model.Model()


def test_a_host_without_the_places_says_that_nothing_can_be_stopped(host, said, gpu):
    model = "class ModelBase:\n    def __init__(self): pass\n"
    host({**BROKEN_HOSTS[0][0], "eng_host/arguments.py": None, "eng_host/model.py": model})
    make()
    gpu(True)
    import eng_host.main  # noqa: F401

    assert "no server is stopped: eng_host 1.2.0 has none of the places for it" in said[0][1] and len(said) == 1


def test_nothing_broken_lets_everybody_pass(host, said, gpu):
    host()
    engine = make()
    gpu(True)
    assert enter() == "loaded" and [level for level, _ in said] == []
    from eng_host import arguments, model

    assert engine.undo() == []
    assert not hasattr(arguments.resolve, "__wrapped__") and not hasattr(model.Model.__init__, "__wrapped__")


def test_on_broken_warn_runs_the_stock_code(host, said, gpu):
    host(BROKEN_HOSTS[0][0])
    engine = make(settings=Settings(on_broken="warn"))
    gpu(True)
    from eng_host import kernels, main  # noqa: F401

    assert kernels.f(a=1) == 1 and states(engine) == [BROKEN] and enter() == "loaded"
    assert [(level, "missing b" in text) for level, text in said] == [("WARNING", True)]


def test_a_need_that_fails_is_broken_with_its_own_words(host, said, gpu):
    host()
    engine = make(needs=("eng_ours:fine", "eng_ours:missing"))
    gpu(True)
    with pytest.raises(PatchError, match="no compiled module for this Python; build it"):
        enter()
    assert states(engine) == [BROKEN]


def test_a_replacement_that_cannot_be_made_is_broken_and_no_traceback_of_an_import(host, said, gpu):
    host({"eng_bad/__init__.py": "raise OSError('half a folder')"})
    engine = make(function_target(replacement="eng_bad:replace"))
    from eng_host import kernels

    assert kernels.f(a=1) == 1 and states(engine) == [BROKEN]
    assert "eng_bad:replace: OSError: half a folder" in said[0][1]


def test_the_preflight_imports_no_target(host):
    host()
    engine = make(needs=("eng_ours:fine",))
    import eng_host.main  # noqa: F401

    assert "eng_host.kernels" not in sys.modules and states(engine) == [READY]
    assert engine.records[0].review == "reviewed"


def test_unsupported_version_warns_once_and_runs_stock(host, said):
    host({"eng_host/_version.py": "__version__ = '2.0.1'"})
    engine = make()
    import eng_host.main
    from eng_host import kernels

    importlib.reload(eng_host.main)
    assert kernels.f(a=1) == 1 and states(engine) == [UNSUPPORTED]
    assert [level for level, _ in said] == ["WARNING"]
    assert "eng_host 2.0.1 is outside of what this release knows" in said[0][1]


@pytest.mark.parametrize(
    ("version", "state"),
    [("0.9.5", UNSUPPORTED), ("1.0.0.dev3", READY), ("1.0.0rc1", UNSUPPORTED), ("2.0.0.dev1", UNSUPPORTED)],
)
def test_only_a_build_ahead_of_the_first_release_is_judged_by_what_it_has(host, said, version, state):
    host({"eng_host/_version.py": f"__version__ = '{version}'"})
    assert states(make(function_target(sglang=">=1,<2"))) == [state]


def test_not_applicable_is_quiet(host, said):
    host({"eng_host/_version.py": "__version__ = '1.9'"})
    assert states(make()) == [NOT_APPLICABLE]
    host()
    assert states(make(modes=("ops",))) == [NOT_APPLICABLE]
    assert states(make(modes=("ops",), settings=Settings(force="ops"), start=False)) == [READY]
    assert states(make(settings=Settings(off=True))) == [OFF]
    import eng_host.main  # noqa: F401

    assert said == []


def test_a_tree_that_does_not_tell_its_version_is_judged_by_what_it_has(host, said):
    host({"eng_host/_version.py": "__version__ = '0.0.0.dev0'"})
    targets = (
        function_target(),
        function_target(where="eng_host.elsewhere:f"),
        function_target(where="eng_host.model:f"),
    )
    assert [record.where for record in make(*targets[:1]).records] == ["eng_host.kernels:f"]
    assert states(make(*targets)) == [UNSUPPORTED], "not as a whole"
    older = (*targets, function_target(sglang="<1.2"))
    assert [record.where for record in make(*older, start=False).records] == ["eng_host.kernels:f"]
    import eng_host.main  # noqa: F401

    assert "eng_host does not tell its version, and no place of it fits job: the stock code runs" in [
        t for _, t in said
    ]


def test_a_prerelease_between_two_ranges_is_judged_by_what_it_has(host):
    targets = (function_target(sglang="<1.3"), function_target(where="eng_host.caller:run", sglang=">=1.3"))
    targets += (function_target(where="eng_host.nowhere:f", sglang=">=1.3"),)
    for version, chosen in [
        ("1.3.0.dev5", ["eng_host.kernels:f"]),
        ("1.2.9.dev5", ["eng_host.kernels:f"]),
        ("1.3.1.dev5", ["eng_host.caller:run", "eng_host.nowhere:f"]),
    ]:
        host({"eng_host/_version.py": f"__version__ = '{version}'"})
        assert [record.where for record in make(*targets, start=False).records] == chosen
    host({"eng_host/_version.py": "__version__ = '1.3.0.dev5'", "eng_host/kernels.py": "def f(): pass"})
    found = make(*targets, start=False)
    assert [record.where for record in found.records] == ["eng_host.caller:run", "eng_host.nowhere:f"]
    assert {record.state for record in found.survey()} == {BROKEN}, "nothing fits: said, not passed over"


def test_unreviewed_is_told_once_in_words(host, said):
    host({"eng_host/_version.py": "__version__ = '1.3.0'"})
    make()
    import eng_host.main

    importlib.reload(eng_host.main)
    ((level, words),) = said
    assert level == "WARNING" and words.startswith("UNREVIEWED in eng_host 1.3.0, and replaced where it fits: job; ")


def test_no_host_at_all(host):
    host({name: None for name in HOST if name.startswith("eng_host/")})
    engine = make()
    assert states(engine) == [NOT_APPLICABLE] and engine.version is None


def test_version_from_the_distribution(host, tmp_path):
    host({"eng_host/_version.py": None, "eng_host-1.4.dist-info/METADATA": "Name: eng_host\nVersion: 1.4\n"})
    assert make(start=False).version == "1.4"


def test_logging_is_used_where_it_is_set_up_and_stderr_elsewhere(caplog, capsys, monkeypatch):
    caplog.set_level("INFO")
    report.info("through logging")
    assert [r.getMessage() for r in caplog.records] == ["through logging"] and capsys.readouterr().err == ""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    report.info("nothing is set up")
    assert capsys.readouterr().err == "deepseek_v4_sm120: nothing is set up\n"


def test_audit_reports_importers_that_kept_the_original(host, said):
    host(
        {
            "eng_host/kernels.py": FUNCTION + "import eng_host.early\n",
            "eng_host/early.py": "from eng_host.kernels import f as g\n",
        }
    )
    engine = make()
    import eng_host.kernels

    assert eng_host.kernels.f(a=1) == ("ours", 1)
    while device_gate._first_served:
        device_gate._first_served.pop()()
    assert engine.records[0].by_name == ["eng_host.early:g"]
    assert said[-1] == ("WARNING", "job: still the original in eng_host.early:g")
    assert eng_host.early.g(a=1) == 1, "the audit reports, it does not rewrite"


def test_audit_is_silent_about_what_was_replaced_in_one_importer_only(host, said):
    host({"eng_host/consumer.py": "from eng_host.kernels import f\n"})
    engine = make(function_target(where="eng_host.consumer:f", contract=Bound(), caller=None))
    from eng_host import consumer, kernels

    engine.audit()
    assert consumer.f(a=1) == ("ours", 1) and kernels.f(a=1) == 1
    assert engine.records[0].by_name == [] and [level for level, _ in said] == ["INFO"]


def test_a_late_start_during_the_targets_own_import(host):
    host({"eng_host/kernels.py": FUNCTION + "import eng_door\n", "eng_door.py": "import eng_start\neng_start.go()\n"})
    door = type(sys)("eng_start")
    made = []
    door.go = lambda: made.append(make())
    sys.modules["eng_start"] = door
    from eng_host import kernels

    assert kernels.f(a=1) == 1
    import eng_host.main  # noqa: F401

    assert kernels.f(a=1) == ("ours", 1) and states(made[0]) == [APPLIED]


def test_report_file(host, tmp_path):
    host()
    folder = tmp_path / "reports" / "new"
    engine = make(settings=Settings(report=str(folder)))
    (file,) = folder.glob("*.json")
    assert json.loads(file.read_text())["patches"][0]["state"] == READY
    import eng_host.kernels  # noqa: F401

    found = json.loads(file.read_text())
    row = found["patches"][0]
    assert (row["patch"], row["target"], row["state"]) == ("job", "eng_host.kernels:f", APPLIED)
    assert found["eng_host"] == "1.2.0" and found["shadow"] == [] and row["digest"] == digest()
    assert [p.name for p in folder.iterdir()] == [file.name], "no draft is left behind"
    engine.undo()


def test_stand_in(host):
    package = "deepseek_v4_sm120.sglang_patches.adapters.flash_mla_absent"
    host({"eng_host/backend.py": "def run():\n    import flash_mla\n    return flash_mla.get_mla_metadata()\n"})
    stand_in = StandIn(
        name="flash_mla",
        why="test",
        package=package,
        sglang="<1.5",
        only_after="eng_host.backend",
        condition="eng_ours:is_on",
    )
    target = Target(
        where="flash_mla:get_mla_metadata",
        sglang="<1.5",
        contract=Parameters(("*args", "**kwargs"), imported=True),
        replacement="eng_ours:replace",
    )
    host(
        {
            "eng_ours/__init__.py": HOST["eng_ours/__init__.py"]
            + "\n        on = []\n        def is_on(): return bool(on)\n"
        }
    )
    engine = make(target, stand_ins=(stand_in,))
    import eng_host.main  # noqa: F401

    assert states(engine) == [READY]
    import eng_ours

    eng_ours.on.append(True)
    assert importlib.util.find_spec("flash_mla") is None, "not before its caller is imported"
    from eng_host import backend

    eng_ours.on.clear()
    with pytest.raises(ModuleNotFoundError):
        backend.run()
    eng_ours.on.append(True)
    try:
        assert backend.run()[0] == "ours"
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] == "flash_mla"]:
            del sys.modules[name]


def test_stand_in_is_not_offered_to_versions_that_do_not_need_it(host):
    host({"eng_host/_version.py": "__version__ = '1.9'"})
    stand_in = StandIn(
        name="flash_mla",
        why="test",
        package="deepseek_v4_sm120.patching",
        sglang="<1.5",
        only_after="sys",
        condition="eng_ours:fine",
    )
    make(stand_ins=(stand_in,))
    assert importlib.util.find_spec("flash_mla") is None
