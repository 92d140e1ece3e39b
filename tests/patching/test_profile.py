"""Profiles of `calibrate`: read, refused, and what they do to the patches."""

import json
import os
from dataclasses import asdict
from textwrap import dedent

import pytest

import deepseek_v4_sm120
from deepseek_v4_sm120.patching import profile
from deepseek_v4_sm120.sglang_patches.table import TABLE
from tests.patching.test_table import FAKE_SM120

GOOD = {
    "format": profile.FORMAT,
    "identity": {"device": "GPU A", "driver": "580.1", "sglang": "0.5.17", "package": deepseek_v4_sm120.__version__},
    "operators": {
        "sparse_decode": {"winner": "stock", "wrong": {}},
        "mhc": {"winner": "ours", "wrong": {}, "left_out": {"ours, quick": "takes 2.00 times as long"}},
        "wo_a": {"winner": "stock", "wrong": {"ours": "relative error 0.2"}},
    },
}


def of_here() -> dict:
    """The identity that a profile of this machine and SGLang 0.5.17 has; made up where nothing is known."""
    return GOOD["identity"] | {name: fact for name, fact in asdict(profile.here("0.5.17")).items() if fact}


@pytest.fixture
def proc(tmp_path, monkeypatch):
    folder = tmp_path / "proc"
    (folder / "gpus/0").mkdir(parents=True)
    (folder / "gpus/0/information").write_text("Model: \t\t GPU A\nIRQ: 3\n")
    (folder / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.1  Release Build\n")
    monkeypatch.setattr(profile, "here", lambda sglang, real=profile.here: real(sglang, folder))
    return folder


def write(tmp_path, found):
    path = tmp_path / "profile.json"
    path.write_text(found if isinstance(found, str) else json.dumps(found))
    return str(path)


def test_a_profile_of_this_machine_rules_out_what_lost(tmp_path, proc):
    found = profile.consult(write(tmp_path, GOOD), "0.5.17")
    assert found.problem is None and not found.warnings
    assert found.against("mhc") is None and found.against("never measured") is None
    assert found.against("sparse_decode").endswith("stock is faster on this machine")
    assert found.against("wo_a").endswith("ours: relative error 0.2")
    assert found.describe()["winners"]["wo_a"] == "stock"
    assert found.left_out("mhc", "ours, quick") == "takes 2.00 times as long" and found.left_out("wo_a", "x") is None
    assert profile.verdicts(found.describe()) == "sparse_decode: stock, mhc: ours without quick, wo_a: stock"


@pytest.mark.parametrize("changed", [{"device": "GPU B"}, {"driver": "590.2"}, {"sglang": "0.5.20"}, {"package": "9"}])
def test_a_foreign_profile_counts_for_nothing_and_is_told(tmp_path, proc, changed):
    found = profile.consult(write(tmp_path, GOOD | {"identity": GOOD["identity"] | changed}), "0.5.17")
    assert found.against("sparse_decode") is None and found.problem is None
    assert f"{next(iter(changed.values()))}, not" in found.warnings[0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "is not one of ours"),
        ({"format": 99}, "is not one of ours"),
        (GOOD | {"operators": {"sparse_decode": {}}}, "'sparse_decode' has no winner"),
        (GOOD | {"operators": {"sparse_decode": []}}, "'sparse_decode' has no winner"),
        (GOOD | {"identity": 3}, "no identity"),
        (GOOD | {"operators": {"mhc": {"winner": "ours", "wrong": []}}}, "has wrong that is not"),
        (GOOD | {"operators": {"mhc": {"winner": "ours", "left_out": 3}}}, "has left_out that is not"),
        (GOOD | {"operators": {"mhc": {"winner": "ours", "stock_over_ours": "fast"}}}, "has stock_over_ours 'fast'"),
        (GOOD | {"operators": {"mhc": {"winner": "ours", "stock_over_ours": True}}}, "has stock_over_ours True"),
        (GOOD | {"operators": {"mhc": {"winner": "ours", "stock_over_ours": 0}}}, "has stock_over_ours 0"),
        (GOOD | {"operators": {"mhc": {"winner": "ours", "stock_over_ours": float("nan")}}}, "is not JSON"),
        (GOOD | {"operators": {"mhc": {"winner": "ours", "wrong": {"ours": 3}}}}, "has wrong that is not"),
        (GOOD | {"operators": {"mhc": {"winner": "theirs"}}}, "has the winner 'theirs'"),
        (GOOD | {"operators": []}, "no operators"),
        (GOOD | {"identity": {}}, "lacks device, driver, sglang, package"),
        (GOOD | {"identity": {k: v for k, v in GOOD["identity"].items() if k != "driver"}}, "lacks driver"),
        (GOOD | {"identity": GOOD["identity"] | {"device": None}}, "the device of its identity is no text"),
        (GOOD | {"identity": GOOD["identity"] | {"package": ""}}, "the package of its identity is no text"),
        (GOOD | {"identity": GOOD["identity"] | {"driver": 580}}, "the driver of its identity is no text"),
        ("[" * 100_000, "too many levels"),
        (GOOD | {"plan": [[[[[[[[[[1]]]]]]]]]], "operators": json.loads("[" * 70 + "]" * 70)}, "too many levels"),
    ],
)
def test_a_corrupt_profile_is_one_sentence(tmp_path, content, words):
    """All else in it is right: the operators are ours, and the machine is not known to be another."""
    found = profile.consult(write(tmp_path, content), None)
    assert words in found.problem and found.against("sparse_decode") is None


def test_an_operator_that_nobody_knows_is_a_problem_of_this_release_only(tmp_path, proc):
    strange = GOOD | {"operators": GOOD["operators"] | {"of_nobody": {"winner": "ours"}}}
    found = profile.consult(write(tmp_path, strange), "0.5.17")
    assert "names 'of_nobody', which is no operator" in found.problem and found.against("sparse_decode") is None
    foreign = strange | {"identity": GOOD["identity"] | {"package": "9"}}  # of a release that may know it
    found = profile.consult(write(tmp_path, foreign), "0.5.17")
    assert found.problem is None and "another machine or release" in found.warnings[0]


BUILT = {"git_commit": "abc", "code": "1"}


@pytest.mark.parametrize(
    ("made", "is_outdated"),
    [(BUILT, False), (BUILT | {"git_commit": "docs alone"}, False), (BUILT | {"code": "2"}, True), (None, True)],
)
def test_a_profile_of_another_build_of_this_release_holds_and_is_told(tmp_path, proc, monkeypatch, made, is_outdated):
    """As after `git pull` and a build: what was wrong may be so still, and what was slow is another kernel now. An
    operator that is gone since is no damage."""
    monkeypatch.setattr(profile, "build_info", lambda: BUILT)
    found = profile.consult(write(tmp_path, GOOD | {"build": made}), "0.5.17")
    assert found.against("wo_a").endswith("ours: relative error 0.2") and found.problem is None
    assert bool(found.outdated) is is_outdated and not found.warnings
    assert not is_outdated or "was made with another build of ours (git " in found.outdated
    assert profile.of_parent(found.handover()).outdated == found.describe()["outdated"] == found.outdated
    gone = GOOD | {"build": made, "operators": GOOD["operators"] | {"of_earlier": {"winner": "stock"}}}
    found = profile.consult(write(tmp_path, gone), "0.5.17")
    assert bool(found.problem) is not is_outdated and bool(found.against("wo_a")) is is_outdated
    monkeypatch.setattr(profile, "build_info", dict)  # a checkout
    assert profile.consult(write(tmp_path, GOOD | {"build": made}), "0.5.17").outdated is None


@pytest.mark.parametrize(
    ("plan", "is_told"), [({"tp": 2, "quick": True}, True), ({"tp": 2, "quick": False}, False), ({}, False), (3, False)]
)
def test_where_a_quick_profile_is_taken_that_is_told(tmp_path, proc, plan, is_told):
    """In status and doctor's line, and where an operator is left out; by the children of a server, too."""
    found = profile.consult(write(tmp_path, GOOD | {"plan": plan}), "0.5.17")
    for one in (found, profile.of_parent(found.handover())):
        told = (profile.verdicts(one.describe()), one.against("wo_a"), one.against("sparse_decode"))
        assert [profile.QUICK in text for text in told] == [is_told] * 3, told


@pytest.mark.parametrize("text", ["{", "[]", '{"code": "1", "git_commit": "abc"}'])
def test_what_a_build_says_of_itself_may_be_damaged(tmp_path, monkeypatch, text):
    (tmp_path / "build_info.json").write_text(text)
    monkeypatch.setattr(deepseek_v4_sm120, "__file__", str(tmp_path / "__init__.py"))
    assert profile.build_info() == (BUILT if "code" in text else {})


def test_a_profile_of_another_build_is_in_the_log_in_status_and_in_doctor(python, tree, tmp_path):
    """In a folder that was built; a server says it once."""
    path = write(tmp_path, GOOD | {"identity": of_here(), "build": {"git_commit": "earlier", "code": "2"}})
    code = """
        import json
        from deepseek_v4_sm120.patching import profile
        profile.build_info = lambda: {"git_commit": "abc", "code": "1"}
        import sglang.srt.managers.scheduler
        from deepseek_v4_sm120 import __main__ as main
        from deepseek_v4_sm120.commands.doctor import facts, software_checks
        found = main.status()
        told = [one.state for one in software_checks._profile(facts.Facts(smi=None, status=found))]
        print(json.dumps([main.status_text(found).count("another build of ours (git earlier, not abc)"), told]))
    """
    done = python(code, path=[tree()], env={"DSV4_SM120_PROFILE": path})
    assert done.stderr.count("another build of ours (git earlier, not abc): it holds until `calibrate`") == 1
    assert json.loads(done.stdout) == [1, ["WARN", "FAIL"]]


def test_a_profile_may_be_asked_about_another_machine(tmp_path, proc):
    there = profile.Identity("GPU B", None, None, deepseek_v4_sm120.__version__)
    path = write(tmp_path, GOOD | {"identity": GOOD["identity"] | {"device": "GPU B"}})
    assert profile.consult(path, None, there).against("sparse_decode") and profile.consult(path, None).warnings


@pytest.mark.parametrize("name", ["sglang", "driver"])
def test_what_calibrate_did_not_know_holds_nowhere_where_it_is_known(tmp_path, proc, name):
    unknown = GOOD | {"identity": GOOD["identity"] | {name: None}}
    found = profile.consult(write(tmp_path, unknown), "0.5.17")
    assert "not known, not" in found.warnings[0] and found.against("sparse_decode") is None
    (proc / "version").unlink()
    found = profile.consult(write(tmp_path, unknown), None)
    assert not found.warnings and found.against("sparse_decode")


def test_what_is_no_file_is_a_problem_and_not_a_wait(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, "/dev/null"):
        assert "cannot be read" in profile.consult(str(path), None).problem


def test_no_profile_and_a_missing_one(tmp_path):
    assert profile.consult(None, None).describe() is None
    assert "cannot be read: No such file" in profile.consult(str(tmp_path / "none.json"), None).problem


def test_every_operator_can_be_left_out(python, tree, tmp_path):
    """With all patches that serve it, and nothing else."""
    code = """
        import sglang
        from deepseek_v4_sm120 import OPS, patching
        records = [(r.patch.serves or r.patch.name, r) for r in patching.active_engine().records]
        for operator, record in records:
            assert (operator in OPS) == ("stock is faster on this machine" in record.reason), record
            assert operator not in OPS or record.state in ("OFF", "NOT APPLICABLE"), record
        print({operator for operator, record in records} >= set(OPS))
    """
    lost = {op: {"winner": "stock"} for op in deepseek_v4_sm120.OPS}
    path = write(tmp_path, GOOD | {"identity": of_here(), "operators": lost})
    done = python(code, path=[tree()], env={"DSV4_SM120_PROFILE": path})
    assert done.stdout == "True\n"


@pytest.mark.parametrize(
    ("operator", "measured", "chosen", "state", "words"),
    [
        ("mhc", {"winner": "stock", "stock_over_ours": 0.8}, "", "NOT APPLICABLE", "stock is faster on this machine"),
        ("mhc", {"winner": "stock", "stock_over_ours": 0.8}, "on", "READY", "=on, although profile"),
        ("mhc", {"winner": "ours", "stock_over_ours": 1.3}, "off", "OFF", "DSV4_SM120_SET=mhc=off"),
        ("mhc", {"winner": "ours", "stock_over_ours": None}, "", "READY", "when sglang imports it"),
        ("mhc", {"winner": "stock", "wrong": {"ours": "crashed"}}, "", "NOT APPLICABLE", "ours: crashed"),
        ("mhc", None, "", "READY", "when sglang imports it"),
    ],
)
def test_who_decides_whether_an_operator_is_on(operator, measured, chosen, state, words, tmp_path, monkeypatch):
    """DSV4_SM120_SET, else the profile, else what is shipped."""
    from deepseek_v4_sm120.patching.engine import Engine
    from deepseek_v4_sm120.settings import Settings

    operators = {} if measured is None else {operator: measured}
    path = write(tmp_path, GOOD | {"identity": of_here(), "operators": operators})
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/__init__.py").write_text("")
    (tmp_path / "sglang-0.5.17.dist-info").mkdir()
    (tmp_path / "sglang-0.5.17.dist-info/METADATA").write_text("Name: sglang\nVersion: 0.5.17\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    choices = {operator: chosen} if chosen else {}
    records = Engine(TABLE, "sglang", Settings(profile=path, choices=choices)).records
    found = [r for r in records if (r.patch.serves or r.patch.name) == operator and not r.patch.default]
    assert found and {r.state for r in found} == {state}
    assert all(words in r.reason for r in found), [r.reason for r in found]


def test_the_engine_leaves_out_what_lost_and_stops_at_a_corrupt_file(python_with_torch, tree, tmp_path):
    code = """
        from sglang.srt.layers.attention import deepseek_v4_backend
        from sglang.kernels.ops.attention import flash_mla_sm120 as module
        from deepseek_v4_sm120 import patching
        records = patching.active_engine().records
        ours = [r for r in records if "sparse_decode" in (r.patch.name, r.patch.serves)]
        print(hasattr(module.flash_mla_with_kvcache_sm120, "__wrapped__"), ours[0].reason[-31:],
              [(r.patch.name, r.state) for r in ours if r.state != "NOT APPLICABLE"])
        import sglang.srt.managers.scheduler
        from deepseek_v4_sm120.sglang_patches import device_gate
        device_gate.serves_current_device = lambda: True
        from sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM
        DeepseekV4ForCausalLM()
    """
    path = write(tmp_path, GOOD | {"identity": of_here()})
    done = python_with_torch(code, path=[tree()], env={"DSV4_SM120_PROFILE": path})
    assert done.stdout == "False stock is faster on this machine []\n"
    path = write(tmp_path, "{")
    done = python_with_torch(code, path=[tree()], env={"DSV4_SM120_PROFILE": path}, check=False)
    assert done.returncode == 1 and f"profile {path} is not JSON" in done.stderr
    done = python_with_torch(code, path=[tree()], env={"DSV4_SM120_PROFILE": path, "DSV4_SM120_ON_BROKEN": "warn"})
    assert done.stdout.startswith("True") and "is not JSON" in done.stderr


@pytest.mark.parametrize(
    ("plan", "is_told"), [({"tp": 2}, True), ({"tp": 4}, False), (None, False), ({"tp": "2"}, False)]
)
def test_a_server_of_other_cards_than_its_profile_is_told(python_with_torch, tree, tmp_path, plan, is_told):
    """calibrate's default is two: four have other shapes, and sums that two cannot tell of."""
    code = """
        from types import SimpleNamespace
        import sglang.srt.managers.scheduler
        from sglang.srt.arg_groups import deepseek_v4_hook
        arguments = SimpleNamespace(tp_size=4, prefill_decode_interval=None)
        deepseek_v4_hook.apply_deepseek_v4_defaults(arguments, "DeepseekV4ForCausalLM")
        from deepseek_v4_sm120 import patching
        from deepseek_v4_sm120.patching import report
        print([note for note in report.as_dict(patching.active_engine())["notes"] if "cards" in note])
    """
    path = write(tmp_path, GOOD | {"identity": of_here(), "plan": plan})
    done = python_with_torch(dedent(FAKE_SM120) + dedent(code), path=[tree()], env={"DSV4_SM120_PROFILE": path})
    told = f"profile {path} is of 2 cards, this server has 4: "
    assert (done.stderr.count(told), told in done.stdout) == (is_told, is_told), done.stderr
