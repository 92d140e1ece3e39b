"""What every gate does with its command line, and that no exit code says FAIL but a real FAIL."""

from __future__ import annotations

import json
import sys

import pytest

from bench.quality import gates, greedy
from bench.quality.verdict import Verdict
from bench.serving import compare
from tests.quality.test_gates import reference, run, under_test  # noqa: F401
from tests.quality.test_lies import FEWER

KEY = "k3y-that-nobody-may-read"


def test_the_help_says_every_default():
    """What a verdict was measured by: docs/gates.md has none of these numbers."""
    found = next(action.choices for action in gates.parser()._actions if action.choices)
    parsers = [*(found[gate] for gate in gates.GATES), compare.parser()]
    actions = [action for parser in parsers for action in parser._actions if action.dest != "help"]
    told = [(one.dest, one.help) for one in actions if one.default is not False and one.default not in (None, [])]
    assert len(told) > 50 and [name for name, said in told if "default" not in (said or "")] == []
    said = " ".join(found["logit-oracle"].format_help().split())
    assert ("max_marked", "answers that may bear a mark (default: %(default)s)") in told  # 0
    assert f"{greedy.TIE})" in said and "[1, 8, 32]" in found["speculation-equality"].format_help()


@pytest.mark.parametrize("gate", gates.GATES)
def test_a_key_opens_the_server_and_is_written_nowhere(gate, serve, run, tmp_path, monkeypatch, capsys):  # noqa: F811
    server = under_test(gate, serve)
    other = reference(gate, serve)
    server.http.api_key = KEY
    monkeypatch.setattr(sys, "argv", ["gates.py", gate, f"--api-k={KEY}"])
    code, found = run(gate, server, *other, *FEWER.get(gate, ()), "--api-key", KEY)
    assert (code, found["verdict"]) == (gates.PASSED, "PASS"), found
    said = capsys.readouterr()
    assert KEY not in (tmp_path / f"{gate}.json").read_text() + said.out + said.err
    assert "[api key]" in found["command"]


def test_the_key_of_the_environment(serve, run, monkeypatch, capsys):  # noqa: F811
    server = serve(api_key=KEY)
    code, found = run("arithmetic", server)
    assert code == gates.INCOMPLETE and "--api-key, or SGLANG_API_KEY in the environment" in found["incomplete"]
    monkeypatch.setenv("SGLANG_API_KEY", KEY)
    assert run("arithmetic", server)[0] == gates.PASSED
    assert run("arithmetic", server, "--api-key", "another")[0] == gates.INCOMPLETE
    with pytest.raises(SystemExit):
        gates.main(["arithmetic", "--help"])
    assert "SGLANG_API_KEY" in capsys.readouterr().out


def test_a_server_that_says_the_key_back(serve, run, tmp_path, capsys):  # noqa: F811
    def echo(handler, content):
        if handler.path != "/generate":
            return content
        return content | {"text": f"\x1b[2J{handler.headers['Authorization']}"}

    run("arithmetic", serve(lie=echo), "--api-key", KEY)
    said = capsys.readouterr()
    assert KEY not in (tmp_path / "arithmetic.json").read_text() + said.out + said.err and "\x1b" not in said.out


@pytest.mark.parametrize(
    ("gate", "arguments", "message"),
    [
        ("logit-oracle", ["--new", "0"], "--new must be at least 1, got 0"),
        ("logit-oracle", ["--lengths", "16", "0"], "--lengths must be at least 1"),
        ("logit-oracle", ["--min-token-match", "98"], "--min-token-match must be above 0 and at most 1, got 98"),
        ("logit-oracle", ["--min-overlap", "0"], "--min-overlap must be above 0"),
        ("logit-oracle", ["--max-mean-error", "inf"], "--max-mean-error must be at least 0 and finite"),
        ("logit-oracle", ["--save", "/proc/x"], "give --reference (an address or a file), or --save"),
        ("arithmetic", ["--lm-eval", "--data", "x"], "--lm-eval brings its own questions: leave out --data"),
        ("arithmetic", ["--lm-eval", "--examples", "x"], "leave out --data and --examples"),
        ("speculation-equality", ["--num-prompts", "0"], "--num-prompts must be at least 1"),
        ("speculation-equality", ["--concurrency", "0"], "--concurrency must be at least 1"),
        ("speculation-equality", ["--concurrency", "32"], "--concurrency 32 needs as many prompts"),
        ("speculation-equality", ["--new", "1"], "--new must be at least 2"),
        ("batch-invariance", ["--num-prompts", "0"], "--num-prompts must be at least 1"),
        ("batch-invariance", ["--others", "0"], "--others must be at least 1"),
        ("batch-invariance", ["--sampled", "-1"], "--sampled must be at least 0"),
        ("batch-invariance", ["--others", "7", "--sampled", "8"], "--sampled must be at most --others, 7"),
        ("batch-invariance", ["--tie", "inf"], "--tie must be a finite number"),
        ("needle", ["--repeats", "0"], "--repeats must be at least 1"),
        ("needle", ["--lengths", "0"], "--lengths must be at least 1"),
        ("needle", ["--min-score", "0"], "--min-score must be above 0"),
        ("arithmetic", ["--limit", "0"], "--limit must be at least 1"),
        ("arithmetic", ["--limit", "-1"], "--limit must be at least 1"),
        ("arithmetic", ["--concurrency", "0"], "--concurrency must be at least 1"),
        ("arithmetic", ["--new", "0"], "--new must be at least 1"),
        ("arithmetic", ["--min-score", "nan"], "--min-score must be above 0"),
        ("tool-calls", ["--repeats", "0"], "--repeats must be at least 1"),
        ("tool-calls", ["--timeout", "0"], "--timeout must be a number of seconds above 0"),
        ("tool-calls", ["--total-timeout", "nan"], "--total-timeout must be a number of seconds above 0"),
        ("tool-calls", ["--api-key", "two\nlines"], "printable ASCII"),
    ],
)
def test_what_asks_for_nothing_is_wrong_usage(gate, arguments, message, serve, run, capsys):  # noqa: F811
    server = under_test(gate, serve)
    assert run(gate, server, *reference(gate, serve), *arguments) == (gates.USAGE, None)
    assert message in capsys.readouterr().err and server.engine.completions == 0


def test_out_is_tried_before_the_run(serve, tmp_path, capsys):
    server = serve()
    (tmp_path / "file").write_text("")
    (tmp_path / "taken/arithmetic.json").mkdir(parents=True)
    for out in (tmp_path / "file", tmp_path / "file/below", tmp_path / "taken"):
        assert gates.main(["arithmetic", "--url", server.url, "--out", str(out)]) == gates.USAGE
        assert f"--out {out} cannot be written" in capsys.readouterr().err
    assert gates.main(["logit-oracle", "--url", server.url, "--save", str(tmp_path / "taken")]) == gates.USAGE
    assert server.engine.completions == 0


@pytest.mark.parametrize("gate", ["logit-oracle", "speculation-equality"])
@pytest.mark.parametrize("before", [None, "an earlier one"])
def test_what_ends_midway_saves_nothing(gate, before, serve, run, tmp_path, monkeypatch):  # noqa: F811
    folder = tmp_path / "saved"
    folder.mkdir()
    if before:
        (folder / "reference.json").write_text(before)

    def broken(*_):
        raise OSError("Connection reset by peer")

    with monkeypatch.context() as patched:
        patched.setattr(gates.GATES[gate].saved, "record", broken)
        assert run(gate, serve(), "--save", folder / "reference.json")[0] not in (gates.PASSED, gates.NO_VERDICT)
    assert [path.read_text() for path in folder.iterdir()] == ([before] if before else [])
    with monkeypatch.context() as patched:  # a disk that is full when all is there
        patched.setattr(gates.GATES[gate].saved.json, "dumps", broken)
        assert run(gate, serve(), "--save", folder / "reference.json")[0] not in (gates.PASSED, gates.NO_VERDICT)
    assert [path.read_text() for path in folder.iterdir()] == ([before] if before else [])


@pytest.mark.parametrize(("fault", "code"), [((), gates.INCOMPLETE), (("bad_math",), gates.FAILED)])
def test_a_pass_that_cannot_be_written_is_none(fault, code, serve, run, monkeypatch, capsys):  # noqa: F811
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(Verdict, "write", full)
    assert run("arithmetic", serve(*fault))[0] == code
    said = capsys.readouterr()
    assert "No space left" in said.err and "arithmetic: " in said.out


def test_an_error_of_the_gate_itself_is_no_failure_of_the_server(serve, run, monkeypatch, capsys):  # noqa: F811
    def broken(_options):
        raise KeyError(KEY)

    monkeypatch.setattr(gates.GATES["needle"], "run", broken)
    assert run("needle", serve(), "--api-key", KEY)[0] == gates.INTERNAL
    said = capsys.readouterr().err
    assert "Traceback" in said and "KeyError: '[api key]'" in said and "the server has no verdict" in said
    assert gates.INTERNAL not in (gates.PASSED, gates.FAILED, gates.USAGE, gates.NO_VERDICT, gates.INCOMPLETE)


@pytest.mark.parametrize("gate", ["needle", "corruption-soak"])
def test_an_interrupted_gate_has_no_verdict_and_says_so(gate, serve, run, monkeypatch, capsys):  # noqa: F811
    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr("bench.serving.endpoint.Endpoint.generate", interrupted)
    code, found = run(gate, serve())
    said = capsys.readouterr()
    assert code == gates.INCOMPLETE and "interrupted" in said.out + said.err and "Traceback" not in said.err
    if gate == "corruption-soak":  # what was found until then is written down, and how to go on
        assert found["verdict"] == "INCOMPLETE" and "goes on" in found["incomplete"]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_server_is_no_reference_of_itself(host, serve, run):  # noqa: F811
    server = serve()
    code, found = run("logit-oracle", server, "--reference", f"http://{host}:{server.http.server_port}")
    assert (code, found["verdict"]) == (gates.NO_VERDICT, "NO VERDICT") and "its own noise" in found["notes"][0]


@pytest.mark.parametrize("name", ["nosuch.json", "/nosuch/reference"])
def test_a_saved_file_that_is_not_there_is_no_address(name, serve, run, capsys):  # noqa: F811
    for gate, option, settings in (
        ("logit-oracle", "--reference", {}),
        ("speculation-equality", "--without", {"accept_length": 2}),
    ):
        assert run(gate, serve(**settings), option, name)[0] == gates.USAGE
        assert f"there is no file {name}" in capsys.readouterr().err


def test_positions_that_were_given_up_are_no_pass(serve, run, monkeypatch):  # noqa: F811
    monkeypatch.setattr("bench.quality.logit_oracle.RESTARTS", 1)
    server = serve("tie_flip")
    code, found = run("logit-oracle", server, "--reference", serve().url, "--min-token-match", "0.1")
    assert code == gates.INCOMPLETE and "positions were not compared" in found["incomplete"], found


def test_a_summary_of_something_else(tmp_path, capsys):
    for name, text in {"list": "[]", "text": "no JSON", "half": '{"figures": {"a": "b"}}', "number": "3"}.items():
        path = tmp_path / f"{name}.json"
        path.write_text(text)
        assert gates.main(["summary", str(path)]) == gates.USAGE
        assert f"{path} holds no verdict" in capsys.readouterr().err
    assert gates.main(["summary", str(tmp_path / "none.json")]) == gates.USAGE


def test_a_reference_file_that_is_none(serve, run, tmp_path, capsys):  # noqa: F811
    saved = tmp_path / "reference.json"
    server = serve()
    run("logit-oracle", server, "--save", saved)
    whole = json.loads(saved.read_text())
    cut = json.loads(saved.read_text())
    del cut["entries"][0]["answer"]["tops"][3][5:]
    for found in ([], {}, {"format": "another"}, whole | {"entries": []}, whole | {"entries": [1]}, cut):
        saved.write_text(json.dumps(found))
        assert run("logit-oracle", server, "--reference", saved)[0] == gates.USAGE
        assert "is no file of 'logit-oracle 1'" in capsys.readouterr().err
    for entry in whole["entries"]:  # as they were written before the ids of the log-probabilities were kept
        for name in ("finish_message", "logprob_ids", "completion_tokens"):
            del entry["answer"][name]
    saved.write_text(json.dumps(whole))
    assert run("logit-oracle", server, "--reference", saved)[0] == gates.PASSED
