"""The self-test on this machine, and that it can fail."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120 import OPS
from deepseek_v4_sm120.commands import selftest
from deepseek_v4_sm120.commands.selftest import apart, build_and_layout
from deepseek_v4_sm120.ops import mxfp4_moe as moe_op
from deepseek_v4_sm120.ops.shared import extension
from deepseek_v4_sm120.reference import kv_pages
from deepseek_v4_sm120.specs import mxfp4_moe
from deepseek_v4_sm120.specs.check import ON_GPU, Check, Failure, same, within


def outcomes(capsys, *arguments: str) -> tuple[int, dict]:
    status = selftest.main(["--quick", "--json", *arguments])
    found = json.loads(capsys.readouterr().out)
    return status, {(check["operator"], check["check"]): check for check in found["checks"]}


def test_every_operator_has_checks_with_and_without_a_gpu():
    assert set(OPS) <= {check.operator for check in selftest.checks(quick=True)}
    for quick in (True, False):
        for operator in OPS:
            needs = {check.needs for check in selftest.checks(quick) if check.operator == operator}
            assert ("torch",) in needs and ON_GPU in needs


@pytest.mark.parametrize("error", [0.0021, float("nan"), float("inf")])
def test_an_error_above_its_bound_is_a_failure(error):
    assert within(0.002, 0.002) == "relative error 0.002"
    with pytest.raises(Failure, match=f"of y {error:.2g}, allowed 0.002"):
        within(error, 0.002, "of y")


def test_other_numbers_are_a_failure():
    one = torch.tensor([1.0, 0.0, 3.0])
    same(one, torch.tensor([1.0, -0.0, 3.0]), "both")
    for other in (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, float("nan"), 3.0])):
        with pytest.raises(Failure, match="both differ in 1 of 3"):
            same(one, other, "both")
    with pytest.raises(Failure, match="both differ"):
        same(one, one[None], "both")  # of another shape


def test_a_kernel_that_does_not_fit_is_a_failure(monkeypatch):
    rows = [{"name": name, "local_bytes": 0, "registers": 64, "blocks_per_sm": n} for name, n in (("a", 2), ("b", 0))]
    monkeypatch.setattr(extension, "load", lambda: SimpleNamespace(kernel_attributes=lambda: rows))
    with pytest.raises(Failure, match="not one block fits a multiprocessor: b"):
        build_and_layout._check_kernels()


def test_nothing_fails_here(capsys):
    status, found = outcomes(capsys)
    failed = {name: check["detail"] for name, check in found.items() if check["result"] == "FAIL"}
    if extension.explain() is None:
        assert status == 0 and not failed
    else:
        assert {check["operator"] for check in found.values() if check["result"] == "FAIL"} <= {
            "build",
            "kv_page_layout",
        } | set(OPS)
    assert found["kv_page_layout", "golden page"]["result"] == "PASS"
    assert found["sparse_decode", "two references"]["result"] == "PASS"
    for check in found.values():
        assert check["detail"], f"{check['check']} says nothing"


@pytest.fixture
def in_this_process(monkeypatch):
    """Where there is a card, too: another process has nothing of what is patched in this one."""
    missing = selftest.what_is_missing
    without = {"GPU": (selftest.NOT_RUN, "not asked")}
    monkeypatch.setattr(selftest, "what_is_missing", lambda require_gpu: missing(require_gpu) | without)


@pytest.mark.parametrize("name", ["AMAX_FLOOR", "E4M3_MAX"])
def test_a_wrong_writer_fails_with_status_1(name, in_this_process, monkeypatch, capsys):
    monkeypatch.setattr(kv_pages, name, 2 * getattr(kv_pages, name))
    status, found = outcomes(capsys)
    assert status == 1 and found["kv_page_layout", "golden page"]["result"] == "FAIL"
    assert "byte" in found["kv_page_layout", "golden page"]["detail"]


def test_an_exception_is_a_failure_and_the_table_goes_on(in_this_process, monkeypatch, capsys):
    monkeypatch.setattr(kv_pages, "pack_rows", None)
    assert selftest.main(["--quick"]) == 1
    table = capsys.readouterr().out
    assert "FAIL     TypeError: 'NoneType' object is not callable" in table
    assert "two references" in table.split("golden page")[1]


def test_each_outcome_is_printed_when_it_is_there(monkeypatch, capsys):
    """A whole run takes a minute or more: silence looks like one that hangs."""

    def second():
        assert capsys.readouterr().out.splitlines()[1:] == ["op         first       PASS     fine"]
        return "fine, too"

    todo = [Check("op", "first", lambda: "fine"), Check("longer_op", "the second", second)]
    monkeypatch.setattr(selftest, "checks", lambda quick: iter(todo))
    monkeypatch.setattr(selftest, "what_is_missing", lambda require_gpu: {"module": (selftest.FAIL, "none")})
    assert selftest.main([]) == 0
    assert capsys.readouterr().out == "longer_op  the second  PASS     fine, too\n2 PASS, 0 FAIL, 0 NOT RUN\n"


def test_where_there_is_a_card_the_checks_are_asked_apart(monkeypatch, capsys):
    asked = []

    def outcomes(todo, quick, require_gpu):
        asked.append((len(todo), quick, require_gpu))
        yield from (selftest.Outcome(check.operator, check.name, "PASS", "fine", 0.0) for check in todo)

    monkeypatch.setattr(apart, "outcomes", outcomes)
    monkeypatch.setattr(selftest, "checks", lambda quick: iter([Check("op", "one", str), Check("op", "two", str)]))
    monkeypatch.setattr(selftest, "_card", lambda: "")
    for missing, detail in (({"block-scaled FP8": ("NOT RUN", "none")}, "fine"), ({"GPU": ("NOT RUN", "none")}, "")):
        monkeypatch.setattr(selftest, "what_is_missing", lambda require_gpu, missing=missing: missing)
        assert selftest.main(["--quick", "--require-gpu"]) == 0
        assert [line.split()[2:] for line in capsys.readouterr().out.splitlines()[1:3]] == [
            ["PASS", *detail.split()]
        ] * 2
    assert asked == [(2, True, True)]


def test_how_to_serve_without_what_failed_is_said(monkeypatch, capsys):
    results = {"card": "FAIL", "mhc": "FAIL", "wo_a": "PASS", "bf16_linear": "FAIL", "compressor": "NOT RUN"}
    todo = [Check(name, "one", str) for name in (*results, "mhc")]
    made = [selftest.Outcome(check.operator, "one", results[check.operator], "why", 0.0) for check in todo]
    for missing, said in (({}, True), ({"module": ("FAIL", "none")}, False), ({"GPU": ("FAIL", "none")}, False)):
        selftest._told(made, todo, missing)
        out = capsys.readouterr().out
        assert ("\nDSV4_SM120_SET=bf16_linear=off,mhc=off leaves" in out) == said == ("doctor --out" in out), missing
    selftest._told([made[2]], todo, {})
    assert "doctor --out" not in capsys.readouterr().out  # nothing failed
    gone = selftest.Outcome("mhc", "one", "FAIL", f"{selftest.NO_GPU}: torch sees none", 0.0)
    selftest._told([made[2], gone], todo, {})
    assert "DSV4" not in capsys.readouterr().out
    made_before = {"mhc": "on", "argument_defaults": "off", "router_topk": "on"}
    monkeypatch.setattr(selftest, "settings", lambda: SimpleNamespace(choices=made_before))
    selftest._told(made, todo, {})
    assert "DSV4_SM120_SET=mhc=off,router_topk=on,bf16_linear=off leaves" in capsys.readouterr().out


def test_a_missing_module_is_a_failure_that_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(extension, "explain", lambda: "no compiled module; build with ./build_docker.sh")
    status, found = outcomes(capsys)
    assert status == 1 and "build_docker.sh" in found["build", "compiled module"]["detail"]


def test_where_no_kernel_ran_the_last_line_says_so(capsys, monkeypatch):
    monkeypatch.setattr(extension, "explain", lambda: None)
    monkeypatch.setattr(selftest, "run_check", lambda *_: selftest.Outcome("a", "b", "NOT RUN", "c", 0.0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert selftest.main(["--quick"]) == 0
    assert "No kernel was run: no GPU: torch" in capsys.readouterr().out.splitlines()[-1]


def test_the_same_reason_is_printed_once(capsys, monkeypatch):
    monkeypatch.setattr(extension, "explain", lambda: "no compiled module; build with ./build_docker.sh")
    assert selftest.main(["--quick"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum("no compiled module" in line for line in lines) == 1
    failed = [line for line in lines if "  FAIL  " in line]
    assert len(failed) > 20 and sum(line.endswith("  as above") for line in failed) == len(failed) - 1


def test_a_gpu_that_is_required_and_not_there_is_a_failure(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(extension, "explain", lambda: None)
    run = selftest.run_check
    monkeypatch.setattr(selftest, "run_check", lambda check, *given: run(replace(check, run=str), *given))
    status, found = outcomes(capsys)
    on_gpu = {name for name, check in found.items() if "no GPU" in check["detail"]}
    assert status == 0 and on_gpu and {found[name]["result"] for name in on_gpu} == {"NOT RUN"}
    status, found = outcomes(capsys, "--require-gpu")
    assert status == 1 and {name for name, check in found.items() if check["result"] == "FAIL"} == on_gpu


@pytest.mark.parametrize(
    "said",
    [
        "CUDA out of memory. Tried to allocate 2 GiB",
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_a_card_that_others_fill_is_no_fault_of_an_operator(said, monkeypatch):
    """As beside a running server; but where the card has room, and wherever a GPU is required."""

    def fails():
        raise torch.OutOfMemoryError(said) if "Tried" in said else RuntimeError(said)

    def result(free_gib, require_gpu=False, check=fails):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_gib << 30, 96 << 30))
        return selftest.run_check(Check("op", "large", check), {}, require_gpu)

    def wrong():
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    found = result(3)
    assert (found.result, found.detail[:40]) == (selftest.NOT_RUN, "3072 of 98304 MiB are free on this card:")
    every = [result(20), result(3, require_gpu=True), result(3, check=wrong)]
    assert [one.result for one in every] == [selftest.FAIL] * 3 and said in every[0].detail
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert result(3).result == selftest.FAIL


@pytest.mark.parametrize(("own_gib", "result"), [(0, "NOT RUN"), (4, "NOT RUN"), (90, "FAIL")])
def test_who_fills_the_card_himself_is_at_fault(own_gib, result, monkeypatch):
    def fails():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 << 30, 96 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: own_gib << 30)
    assert selftest.run_check(Check("op", "large", fails), {}, False).result == result


@pytest.mark.parametrize("quick", [True, False])
def test_what_an_sm120_card_takes_for_prompts_is_checked(quick):
    """In bf16, and with MXFP8, which is SGLang's default there."""
    asked = []
    for check in mxfp4_moe.checks(quick):
        rows, kind, *_ = getattr(check.run, "args", None) or (0, "")
        if rows > moe_op.DECODE_ROWS:
            asked.append((kind, check.needs))
    assert asked == [("bf16", ON_GPU), ("mxfp8", ON_GPU)]


@pytest.mark.gpu
def test_everything_runs_on_a_gpu(capsys):
    status, found = outcomes(capsys)
    if torch.cuda.get_device_capability()[0] != 12:
        skipped = found.pop(("card", "block-scaled mma against software"))
        assert (skipped["result"], "no block-scaled mma" in skipped["detail"]) == ("NOT RUN", True)
    not_run = {name: check["detail"] for name, check in found.items() if check["result"] != "PASS"}
    assert status == 0 and not not_run


@pytest.mark.parametrize(
    ("count", "words"),
    [(1, " on RTX PRO 6000, 1a2b"), (4, " on RTX PRO 6000, 1a2b; the other 3 by CUDA_VISIBLE_DEVICES"), (0, "")],
)
def test_the_card_that_is_asked_is_named(count, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    card = SimpleNamespace(name="RTX PRO 6000", uuid="1a2b")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    assert selftest._card() == words
