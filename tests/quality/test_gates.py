"""Every gate passes a right server and catches its fault."""

from __future__ import annotations

import json

import pytest

from bench.quality import gates
from bench.quality.arithmetic import shipped_problems

QUICK = {
    "logit-oracle": ["--lengths", "16", "200", "--new", "24"],
    "speculation-equality": ["--num-prompts", "16", "--concurrency", "1", "8", "16", "--new", "24"],
    "batch-invariance": ["--num-prompts", "2", "--new", "24", "--others", "15"],
    "needle": ["--lengths", "400", "1500", "--depths", "0", "0.25", "0.5", "1"],
    "arithmetic": [],
    "corruption-soak": ["--hours", "0.0001", "--longest-words", "50", "--longest-output", "64"],
    "tool-calls": [],
    "long-chats": ["--chats", "1", "--turns", "3", "--length", "400", "--new", "24"],
    "cancelled-requests": [
        *("--requests", "12", "--rounds", "1", "--num-prompts", "2", "--new", "24"),
        *("--storm-new", "2000", "--settle", "3"),
    ],
}
# a token takes so long that requests overlap, and a busy machine still gets all of them under way
PACE = {"step_s": 0.002, "quiet_s": 0.15, "stream_interval": 8}


@pytest.fixture
def run(serve, tmp_path):
    """run(gate, server, *arguments) -> (exit code, the gate's JSON)."""

    def call(gate, server, *arguments):
        extra = ["--state", str(tmp_path / "soak.jsonl")] if gate == "corruption-soak" else []
        (tmp_path / f"{gate}.json").unlink(missing_ok=True)
        common = [gate, "--url", server.url, "--timeout", "30", "--out", str(tmp_path)]
        code = gates.main([*common, *QUICK[gate], *extra, *map(str, arguments)])
        path = tmp_path / f"{gate}.json"
        return code, json.loads(path.read_text()) if path.exists() else None

    return call


def reference(gate, serve) -> list[str]:
    """The other server that a gate needs, right and without speculation."""
    if gate == "logit-oracle":
        return ["--reference", serve().url]
    return ["--without", serve().url] if gate == "speculation-equality" else []


def under_test(gate, serve, *faults):
    return serve(*faults, **PACE, accept_length=2 if gate == "speculation-equality" else 1)


@pytest.mark.parametrize("gate", gates.GATES)
def test_a_right_server_passes(gate, run, serve, capsys):
    code, found = run(gate, under_test(gate, serve), *reference(gate, serve))
    assert (code, found["verdict"], found["incomplete"]) == (gates.PASSED, "PASS", ""), found
    assert found["summary"] in capsys.readouterr().out
    assert all(finding.endswith("a tie") for finding in found["findings"])


@pytest.mark.parametrize(
    ("gate", "fault", "said"),
    [
        ("logit-oracle", "wrong_logits", "reference chose"),
        ("logit-oracle", "foreign_script", "reference chose"),
        ("logit-oracle", "frozen", "reference chose"),
        ("speculation-equality", "spec_corrupt", "concurrency 16, prompt"),
        ("speculation-equality", "frozen", "concurrency 1, prompt"),
        ("speculation-equality", "foreign_script", "below the best 20"),
        ("batch-invariance", "batch_variant", "among 15 others chose"),
        ("batch-invariance", "sampled_beside", "among 15 others chose"),
        ("needle", "forgets", "I do not know"),
        ("arithmetic", "bad_math", "expected"),
        ("corruption-soak", "foreign_script", "foreign script"),
        ("corruption-soak", "frozen", "repetition"),
        ("tool-calls", "markup_leak", "one call, streamed: markup in content"),
        ("tool-calls", "reasoning_leak", "no reasoning_content though thinking was asked for"),
        ("tool-calls", "reasoning_leak", "markup in content"),
        ("tool-calls", "broken_markup", "markup in content"),
        ("tool-calls", "broken_arguments", "the arguments are no JSON"),
        ("tool-calls", "empty_call", "expected calls for ['Rome'], got []"),
        ("tool-calls", "stream_differs", "streamed and not streamed differ"),
        ("tool-calls", "lost_tool_delta", "one call, streamed: expected calls for ['Rome'], got []"),
    ],
)
def test_the_gate_catches_its_fault(gate, fault, said, run, serve):
    code, found = run(gate, under_test(gate, serve, fault), *reference(gate, serve))
    assert (code, found["verdict"]) == (gates.FAILED, "FAIL")
    assert any(said in finding for finding in found["findings"]), found["findings"]


def test_corruption_under_concurrency_only_is_not_seen_alone(run, serve):
    """The fault needs company: what a test at concurrency 1 would have passed."""
    plain = serve()
    alone = run(
        "speculation-equality", under_test("speculation-equality", serve, "spec_corrupt"), "--without", plain.url
    )
    assert alone[1]["figures"]["equal_at_1"] == 16 and alone[1]["figures"]["equal_at_16"] < 16


def test_what_the_batch_alone_changes_is_said_beside_what_speculation_changes(run, serve):
    plain = serve("batch_variant", **PACE)
    code, found = run("speculation-equality", under_test("speculation-equality", serve), "--without", plain.url)
    assert code == gates.PASSED and found["figures"]["equal_at_16"] == 16
    changed = 16 - found["figures"]["equal_without_speculation_at_16"]
    assert changed > 0 and found["summary"].endswith(f"{changed} of 16"), found["summary"]


def test_a_tie_is_stated_and_is_no_fault(run, serve):
    server = under_test("speculation-equality", serve, "tie_flip")
    code, found = run("speculation-equality", server, "--without", serve().url)
    assert code == gates.PASSED and found["figures"]["ties_at_1"] > 0
    assert all("a tie" in finding and "(-0.4000)" in finding for finding in found["findings"])
    wide = run("speculation-equality", under_test("speculation-equality", serve, "tie_flip"), "--without", serve().url,
               "--tie", "-1")  # fmt: skip
    assert wide[0] == gates.FAILED


def test_speculation_equality_needs_a_server_that_speculates(run, serve, capsys):
    assert run("speculation-equality", serve(), "--without", serve().url) == (gates.USAGE, None)
    assert "does not speculate; the gate would prove nothing" in capsys.readouterr().err
    both = serve(accept_length=2), serve(accept_length=2)
    assert run("speculation-equality", both[0], "--without", both[1].url)[0] == gates.USAGE


def test_speculation_equality_against_a_saved_file(run, serve, tmp_path):
    """One server at a time, as on cards that hold no second one."""
    gate, saved = "speculation-equality", tmp_path / "plain.json"
    assert run(gate, serve(**PACE), "--save", saved, "--concurrency", "1", "8")[0] == gates.NO_VERDICT
    assert run(gate, serve(accept_length=2), "--save", saved)[0] == gates.USAGE  # it speculates
    code, found = run(gate, under_test(gate, serve), "--without", saved)
    assert code == gates.PASSED and found["figures"]["equal_at_16"] == 16
    assert found["figures"]["equal_without_speculation_at_8"] == 16
    assert found["notes"] == ["what the batch alone changes at 16 is not in the file"]
    code, found = run(gate, under_test(gate, serve, "spec_corrupt"), "--without", saved)
    assert code == gates.FAILED and "without chose" in found["findings"][0]
    code, found = run(gate, under_test(gate, serve, "tie_flip"), "--without", saved)
    assert code == gates.PASSED and found["figures"]["ties_at_1"] > 0 and found["findings"][0].endswith("a tie")


SAVED: list[str] = []  # what the first of these tests has saved


@pytest.mark.parametrize("part", ["ids", "tops", "short", "crowds", "too many", "prompts", "format"])
def test_a_saved_file_that_was_changed_is_refused(part, run, serve, tmp_path, capsys):
    gate, saved = "speculation-equality", tmp_path / "plain.json"
    if not SAVED:
        run(gate, serve(**PACE), "--save", saved)
        SAVED.append(saved.read_text())
    found = json.loads(SAVED[0])
    if part in ("ids", "tops"):
        found["entries"][0]["answer"][part].pop()
    elif part == "short":  # whole answers, of one token each
        for entry in found["entries"]:
            entry["answer"] |= {n: v[:1] for n, v in entry["answer"].items() if isinstance(v, list)}
    elif part in ("crowds", "too many"):
        found["crowds"]["8"] = "16" if part == "crowds" else [17, 8]
    elif part == "prompts":
        del found["entries"][9:]
    else:
        found["format"] = "logit-oracle 1"
    saved.write_text(json.dumps(found))
    assert run(gate, under_test(gate, serve), "--without", saved) == (gates.USAGE, None)
    assert gate in capsys.readouterr().err


def test_speculation_equality_works_where_the_speculating_server_gives_no_log_probabilities(run, serve):
    server = under_test("speculation-equality", serve, "rejects_logprobs")
    assert run("speculation-equality", server, "--without", serve().url)[0] == gates.PASSED


def test_the_oracle_against_a_saved_file(run, serve, tmp_path):
    saved = tmp_path / "reference.json"
    assert run("logit-oracle", serve(), "--save", saved)[0] == gates.NO_VERDICT
    assert run("logit-oracle", serve(), "--reference", saved)[0] == gates.PASSED
    code, found = run("logit-oracle", serve("wrong_logits"), "--reference", saved)
    assert code == gates.FAILED
    figures = found["figures"]
    assert figures["positions"] > 40 and 0.5 < figures["token_match"] < 0.8
    assert 0.15 < figures["logprob_error_mean"] < 0.6 and figures["top1_overlap"] == figures["token_match"]
    assert figures["self_token_match"] == 1 and figures["self_logprob_error_max"] == 0


def test_batch_invariance_strict_minds_a_log_probability(run, serve, monkeypatch):
    server = serve(**PACE)
    original = server.engine.candidates

    def candidates(state):
        shift = 1e-3 if server.engine.active > 8 else 0.0
        return [(logprob + shift, token) for logprob, token in original(state)]

    monkeypatch.setattr(server.engine, "candidates", candidates)
    assert run("batch-invariance", server)[0] == gates.PASSED
    code, found = run("batch-invariance", server, "--strict")
    assert code == gates.FAILED and found["figures"]["logprob_difference_max"] == pytest.approx(1e-3)
    assert server.engine.max_active == 16


def test_batch_invariance_beside_greedy_requests_alone(run, serve):
    server = serve("sampled_beside", **PACE)
    code, found = run("batch-invariance", server, "--sampled", "0")
    assert (code, found["figures"]["sampled"]) == (gates.PASSED, 0)
    assert run("batch-invariance", server, "--sampled", "1")[0] == gates.FAILED


def test_a_needle_at_every_place_of_a_group(run, serve):
    code, found = run("needle", serve(), "--every-place", "--repeats", "2")
    assert code == gates.PASSED and set(map(tuple, found["details"]["found_of_asked"].values())) == {(8, 8)}
    by_length = found["details"]["found_of_asked_by_tokens_modulo_4"]
    assert sum(asked for _, asked in by_length.values()) == 64 and len(by_length) > 1


def test_random_weights_have_no_quality_verdict(run, serve):
    code, found = run("needle", serve("forgets"), "--random-weights")
    assert code == gates.NO_VERDICT and "no quality can be measured" in found["notes"][-1]
    code, found = run("batch-invariance", serve(**PACE), "--random-weights")
    assert code == gates.PASSED and found["notes"] == ["random weights"]


@pytest.mark.parametrize("gate", gates.GATES)
@pytest.mark.parametrize("fault", ["error_500", "die_mid_stream", "hang"])
def test_a_lost_server_is_incomplete_never_a_pass(gate, fault, run, serve):
    code, found = run(gate, under_test(gate, serve, fault), *reference(gate, serve), "--timeout", "0.3")
    assert (code, found["verdict"]) == (gates.INCOMPLETE, "INCOMPLETE")
    assert found["incomplete"]


@pytest.mark.parametrize("gate", ["logit-oracle", "batch-invariance"])
def test_no_tokenizer(gate, run, serve, capsys):
    server = under_test(gate, serve, "no_tokenizer")
    assert run(gate, server, *reference(gate, serve))[0] == gates.USAGE
    assert "no tokenizer" in capsys.readouterr().err
    assert run(gate, server, *reference(gate, serve), "--prompts", "random")[0] == gates.PASSED


def test_a_wrong_model_name(run, serve):
    code, found = run("tool-calls", serve(), "--model", "nosuch")
    assert code == gates.INCOMPLETE and "serves ['fake/model'], not 'nosuch'" in found["incomplete"]


def test_nobody_there(run, capsys):
    assert gates.main(["needle", "--url", "http://127.0.0.1:9"]) == gates.INCOMPLETE
    assert "ConnectionRefusedError" in capsys.readouterr().out


@pytest.mark.parametrize("ends", ["killed", "an error", "usage"])
def test_an_earlier_verdict_does_not_stand_for_a_run_without_one(ends, serve, tmp_path, monkeypatch):
    common = ["arithmetic", "--url", serve().url, "--out", str(tmp_path)]
    path = tmp_path / "arithmetic.json"
    assert gates.main(common) == gates.PASSED and path.exists()
    error = {"killed": KeyboardInterrupt, "an error": KeyError, "usage": ValueError}[ends]

    def lost(_):
        raise error("x")

    monkeypatch.setattr(gates.GATES["arithmetic"], "run", lost)
    code = {"killed": gates.INCOMPLETE, "an error": gates.INTERNAL, "usage": gates.USAGE}[ends]
    assert gates.main(common) == code
    assert not path.exists() and json.loads((tmp_path / "arithmetic.json.old").read_text())["verdict"] == "PASS"


def test_examples_are_not_asked(run, serve, tmp_path):
    """Their answers stand in the prompt."""
    data = tmp_path / "data.jsonl"
    rows = [{"question": p.question, "answer": p.worked} for p in shipped_problems()[:8]]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, found = run("arithmetic", serve(), "--data", data, "--examples", data)
    assert code == gates.PASSED and found["summary"].startswith("3 of 3 right")


def test_the_summary_is_a_table(run, serve, tmp_path, capsys):
    run("arithmetic", serve())
    run("needle", serve("forgets"))
    capsys.readouterr()
    assert gates.main(["summary", str(tmp_path / "arithmetic.json"), str(tmp_path / "needle.json")]) == gates.PASSED
    lines = capsys.readouterr().out.splitlines()
    assert "/arithmetic | PASS | 55 of 55 right" in lines[2] and "/needle | FAIL |" in lines[3]
