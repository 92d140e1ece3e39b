"""calibrate without a GPU: the decision, the profile, the workers' protocol, the providers' arithmetic on the CPU."""

import json
import subprocess
import sys

import pytest

from deepseek_v4_sm120 import OPS
from deepseek_v4_sm120.calibrate import OPERATORS, command, sparse_decode, worker
from deepseek_v4_sm120.calibrate.provider import OURS, STOCK
from deepseek_v4_sm120.console import CommandError
from deepseek_v4_sm120.ops import sparse_decode as op
from deepseek_v4_sm120.patching import profile

SHAPES = {"tp": 2, "context": 131_072, "concurrency": 8, "quick": True}


def times(**microseconds):
    cases = [{"case": name, "us": us, "error": 0.001, "how": "graph"} for name, us in microseconds.items()]
    return {"cases": cases, "wrong": None}


WRONG = {"cases": [{"case": "C4", "error": 0.3, "allowed": 0.003}], "wrong": "C4: relative error 0.3000, allowed 0.003"}


@pytest.mark.parametrize(
    ("ours", "stock", "winner", "ratio"),
    [
        (times(a=10, b=10), times(a=20, b=20), OURS, 2.0),
        (times(a=10, b=10), times(a=5, b=10), STOCK, 0.5**0.5),
        (times(a=10), {"problem": "not installed"}, OURS, None),
        (WRONG, times(a=5), STOCK, None),
        (times(a=10), WRONG, OURS, None),
        ({"problem": "no module"}, times(a=5), STOCK, None),
        (times(a=10), times(b=5), OURS, None),
    ],
)
def test_who_is_used(ours, stock, winner, ratio):
    found = command.decide({OURS: ours, STOCK: stock, "torch": times(a=900)})
    assert (found["winner"], found["stock_over_ours"]) == (winner, pytest.approx(ratio) if ratio else None)
    assert set(found["wrong"]) == {name for name, result in {OURS: ours, STOCK: stock}.items() if result is WRONG}


def test_the_profile_is_what_the_patch_table_reads(tmp_path, monkeypatch, capsys):
    operators = {"sparse_decode": command.decide({OURS: WRONG, STOCK: times(C4=5), "x": {"problem": "absent"}})}
    found = command.as_profile(operators, "NVIDIA RTX PRO 6000", SHAPES)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(found))
    monkeypatch.setattr(profile, "here", lambda sglang: profile.identity_of(found))
    read = profile.consult(str(path), None)
    assert "ours: C4: relative error 0.3000" in read.against("sparse_decode")
    command.show(found, path)
    text = capsys.readouterr().out
    assert "WRONG  ours: C4" in text and "not run  x: absent" in text and "stock is used" in text


def test_every_operator_has_a_file_here():
    assert set(OPERATORS) <= set(OPS) and OPERATORS
    for name in OPERATORS:
        described = worker.operator(name)
        names = [p.name for p in described.providers()]
        assert names[0] == OURS and STOCK in names and len(set(names)) == len(names)
        assert described.cases(**SHAPES)


def test_the_shapes_are_those_of_the_plan():
    cases = sparse_decode.cases(**SHAPES)
    assert {c.heads for c in cases} == {32} and {c.rows for c in cases} == {1, 8}
    assert {(c.page_size, c.length, c.width) for c in cases} == {(0, 0, 0), (64, 512, 512), (2, 1024, 1024)}
    assert len(sparse_decode.cases(**SHAPES | {"quick": False})) > len(cases)
    assert op.PREFILL_ROWS <= sparse_decode.CHECKED_PREFILL_ROWS <= sparse_decode.PREFILL_ROWS


@pytest.mark.parametrize("kind", ["window", "C4", "C128 at 1K"])
def test_the_torch_provider_is_right(kind, monkeypatch):
    from deepseek_v4_sm120.reference import sparse_decode_inputs
    from deepseek_v4_sm120.reference.accuracy import relative_error

    make = sparse_decode_inputs.make_inputs
    monkeypatch.setattr(
        sparse_decode_inputs, "make_inputs", lambda shape, seed, device: make(shape, seed=seed, device="cpu")
    )
    case = next(c for c in sparse_decode.cases(**SHAPES | {"context": 1024}) if c.kind == kind)
    call = next(p for p in sparse_decode.providers() if p.name == "torch").build()
    for inputs in sparse_decode.correctness_inputs(case):
        assert relative_error(call(inputs), sparse_decode.reference(inputs)) < 0.003


def fake_worker(tmp_path, monkeypatch, lines, code=0, stderr=""):
    script = tmp_path / "worker.py"
    script.write_text(f"import sys\nprint({lines!r})\nsys.stderr.write({stderr!r})\nsys.exit({code})\n")
    real = subprocess.run

    def run(words, **how):
        return real([sys.executable, str(script)], **how)

    monkeypatch.setattr(command.subprocess, "run", run)
    return command.run_worker("sparse_decode", OURS, SHAPES)


def test_a_crash_is_a_result(tmp_path, monkeypatch):
    line = json.dumps({"case": "C4", "us": 5.0, "error": 0.001, "how": "graph"})
    found = fake_worker(tmp_path, monkeypatch, f"noise\n{line}", 1, "Traceback\nRuntimeError: illegal access")
    assert found["wrong"] == "crashed after 1 case(s): RuntimeError: illegal access"
    found = fake_worker(tmp_path, monkeypatch, json.dumps({"case": "C4", "error": None, "allowed": 0.003}))
    assert found["wrong"] == "C4: relative error not finite, allowed 0.003"
    assert fake_worker(tmp_path, monkeypatch, json.dumps({"problem": "not here"})) == {"problem": "not here"}


def test_a_module_that_does_not_load_writes_no_verdict(monkeypatch):
    monkeypatch.setattr(command, "run_worker", lambda *words: {"problem": "no compiled module"})
    with pytest.raises(CommandError, match="sparse_decode cannot run here: no compiled module"):
        command.calibrate("sparse_decode", SHAPES, command.console.Progress(5))


def test_the_worker_itself_tells_that_there_is_no_gpu():
    words = [sys.executable, "-m", "deepseek_v4_sm120.calibrate.worker", "sparse_decode", OURS, json.dumps(SHAPES)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert "sees no CUDA device" in json.loads(done.stdout)["problem"]
