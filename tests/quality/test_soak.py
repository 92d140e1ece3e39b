"""The soak: whose state it is, what it takes to pass, and that no lie in an answer passes."""

from __future__ import annotations

import json

import pytest

from bench.quality import corruption_soak, gates, soak_state
from bench.quality.corruption_marks import marks
from bench.serving.endpoint import Answer
from tests.quality.test_soak_marks import LIES

SHORT = ("--longest-words", "50", "--longest-output", "64")
MOMENT_H = "0.00001"


@pytest.fixture
def soak(tmp_path):
    """soak(server, ...) -> (exit code, the gate's JSON), always with the same --state."""

    def call(server, *arguments, hours=MOMENT_H):
        (tmp_path / "corruption-soak.json").unlink(missing_ok=True)
        common = ["corruption-soak", "--url", server.url, "--timeout", "5", "--out", str(tmp_path), *SHORT]
        common += ["--state", str(tmp_path / "soak.jsonl"), "--hours", hours]
        code = gates.main([*common, *map(str, arguments)])
        path = tmp_path / "corruption-soak.json"
        return code, json.loads(path.read_text()) if path.exists() else None

    return call


def lines(tmp_path, name="soak.jsonl") -> list[dict]:
    return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]


def answered(tmp_path) -> list[int]:
    return [line["number"] for line in lines(tmp_path)[1:] if "output_tokens" in line]


def test_a_soak_is_taken_up_where_it_was_left(serve, soak, tmp_path):
    first, second = serve(), serve()
    assert soak(first)[0] == gates.PASSED
    before = answered(tmp_path)
    assert sorted(before) == list(range(len(before)))
    with open(tmp_path / "soak.jsonl", "a") as file:
        file.write('{"number": 99999, "outp')  # killed while it wrote
    code, found = soak(second)
    after = answered(tmp_path)
    assert code == gates.PASSED and sorted(after) == list(range(len(after))) and len(after) > len(before)
    assert second.engine.completions == len(after) - len(before) == found["figures"]["answers_of_this_run"]
    assert found["figures"]["answers"] == len(after)


def test_a_finished_soak_does_not_pass_without_a_server(serve, soak):
    server = serve()
    assert soak(server)[0] == gates.PASSED
    server.close()  # killed, and the same command once more
    code, found = soak(server)
    assert (code, found["verdict"]) == (gates.INCOMPLETE, "INCOMPLETE")


def test_a_finished_soak_asks_again_before_it_passes(serve, soak):
    assert soak(serve())[0] == gates.PASSED
    server = serve("foreign_script")
    assert soak(server)[0] == gates.FAILED and server.engine.completions >= 2


def test_only_an_answer_of_this_run_passes(serve, soak):
    assert soak(serve())[0] == gates.PASSED
    code, found = soak(serve("error_500"))
    assert code == gates.INCOMPLETE and "out of memory" in found["incomplete"]
    assert found["figures"]["answers_of_this_run"] == 0 and found["figures"]["answers"] > 0


OTHERS = {
    "another model": ({"model": "another/model"}, (), "models"),
    "another version": ({"version": "0.5.22"}, (), "version"),
    "another flag": ({"flags": {"tp_size": 4}}, (), "flag tp_size"),
    "speculation": ({"accept_length": 2}, (), "flag speculative_algorithm"),
    "another seed": ({}, ("--seed", "2"), "asked"),
    "shorter documents": ({}, ("--longest-words", "20"), "asked"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_the_state_of_another_server_is_put_aside_with_a_word(other, serve, soak, tmp_path, capsys):
    options, arguments, said = OTHERS[other]
    assert soak(serve())[0] == gates.PASSED
    before = (tmp_path / "soak.jsonl").read_text()
    server = serve(**options)
    code, found = soak(server, *arguments)
    assert code == gates.PASSED and found["figures"]["answers"] == server.engine.completions
    assert any("kept as" in note and said in note for note in found["notes"]), found["notes"]
    assert "kept as" in capsys.readouterr().err
    assert (tmp_path / "soak.jsonl.old").read_text() == before


def test_marks_of_another_server_are_not_this_ones(serve, soak):
    assert soak(serve("foreign_script"))[0] == gates.FAILED
    assert soak(serve("foreign_script"))[0] == gates.FAILED  # found once, and again
    assert soak(serve())[0] == gates.FAILED  # the same server as far as it tells: what was found stays found
    assert soak(serve(version="0.5.22"))[0] == gates.PASSED


def test_a_port_and_secrets_are_nobodys_identity(serve, soak, tmp_path):
    flags = {"api_key": "sk-secret", "launch_command": "x --api-key sk-secret", "hf_token": "hf_secret"}
    assert soak(serve(flags=flags | {"port": 1, "random_seed": 1}))[0] == gates.PASSED
    assert soak(serve(flags=flags | {"port": 2, "random_seed": 2}))[1]["notes"][:-1] == []
    assert not (tmp_path / "soak.jsonl.old").exists() and "secret" not in (tmp_path / "soak.jsonl").read_text()


def test_a_server_that_does_not_say_who_it_is_gets_a_new_state(serve, soak, tmp_path):
    assert soak(serve("no_server_info"))[0] == gates.PASSED
    assert soak(serve("no_server_info"))[0] == gates.PASSED
    assert (tmp_path / "soak.jsonl.old").exists()


@pytest.mark.parametrize("text", ["no json\n", "[]\n", '{"soak": 1, "seed": 1}\n', "null\n{}\n"])
def test_a_file_that_is_no_state_is_put_aside(text, serve, soak, tmp_path):
    (tmp_path / "soak.jsonl").write_text(text)
    (tmp_path / "soak.jsonl.old").write_text("an older one")
    assert soak(serve())[0] == gates.PASSED
    assert (tmp_path / "soak.jsonl.old2").read_text() == text
    assert (tmp_path / "soak.jsonl.old").read_text() == "an older one"


def test_the_patch_is_part_of_the_identity_where_its_reports_are_given(serve, soak, tmp_path):
    report = tmp_path / "report"
    report.mkdir()

    def patched(version: str, state: str = "APPLIED") -> None:
        row = {"patch": "wo_a", "state": state, "digest": "1"}
        (report / "1.json").write_text(json.dumps({"deepseek_v4_sm120": version, "patches": [row]}))

    patched("1.0")
    assert soak(serve(), "--report", report)[0] == gates.PASSED
    assert not any("kept as" in note for note in soak(serve(), "--report", report)[1]["notes"])
    patched("1.1")
    assert any("patch" in note for note in soak(serve(), "--report", report)[1]["notes"])
    patched("1.1", "OFF")
    assert any("patch" in note for note in soak(serve(), "--report", report)[1]["notes"])
    assert any("not known" in note for note in soak(serve())[1]["notes"])
    assert soak(serve(), "--report", tmp_path / "nothing") == (gates.USAGE, None)


def test_a_server_that_changes_under_the_soak_is_incomplete(serve, soak, monkeypatch):
    server = serve()
    original, asked = server.engine.enter, []

    def enter():
        asked.append(1)
        server.http.flags["tp_size"] = 8
        original()

    monkeypatch.setattr(server.engine, "enter", enter)
    code, found = soak(server)
    assert code == gates.INCOMPLETE and "not the one that began: flag tp_size" in found["incomplete"]


# --- failures


def test_what_failed_is_kept_sent_again_and_never_forgotten(serve, soak, tmp_path):
    code, found = soak(serve("error_500"))
    assert code == gates.INCOMPLETE and "requests failed: request 0: " in found["incomplete"]
    failed = [line for line in lines(tmp_path)[1:] if "failed" in line]
    prompt, output = corruption_soak.request(0, 1, 50)
    (first,) = (line for line in failed if line["number"] == 0)
    assert first["prompt"] == prompt and first["max_new_tokens"] == min(64, output) and "500" in first["failed"]
    assert not any("wave_s" in line for line in lines(tmp_path)), "time without answers does not count"
    server = serve()
    code, found = soak(server)
    assert {line["number"] for line in failed} <= set(answered(tmp_path))
    assert code == gates.INCOMPLETE and "have failed in this soak" in found["incomplete"]
    assert any("request 0 (" in finding and "failed" in finding for finding in found["findings"])
    assert soak(serve())[0] == gates.INCOMPLETE


def test_a_mark_found_before_the_server_died_is_a_failure(serve, soak):
    code, found = soak(serve("die_mid_stream", "foreign_script", die_after=6), hours="1")
    assert code == gates.FAILED and "requests failed" in found["notes"][0]


def test_a_server_lost_behind_the_last_answer_does_not_pass(serve, soak, monkeypatch):
    server = serve()
    original = soak_state.State.add

    def add(self, entry):
        original(self, entry)
        if "wave_s" in entry:
            server.http.flags = None  # /server_info breaks off

    monkeypatch.setattr(soak_state.State, "add", add)
    code, found = soak(server)
    assert code == gates.INCOMPLETE, found


# --- lies, one a row: none passes but the honest server


def lying(server, change):
    """`change`(text) -> what the server says instead."""
    original = server.engine.scripted

    def scripted(text):
        found = original(text)
        return change(found) if found and "Answer in English." in text[-100:] else found

    server.engine.scripted = scripted
    return server


IN_THE_GATE = (
    *("exclamation marks behind text", "30 words in a loop", "every word doubled", "German", "what is left of it"),
    *("12 foreign characters in 300 words", "<invoke cut off", "pieces of words", "DSML with ASCII pipes"),
)


@pytest.mark.parametrize("lie", IN_THE_GATE)
def test_a_lie_in_a_text_fails(lie, serve, soak):
    server = lying(serve(), lambda text: " " + LIES[lie][0])
    code, found = soak(server, "--longest-output", "2000")
    assert code == gates.FAILED and any(LIES[lie][1].split("(")[0] in finding for finding in found["findings"])


@pytest.mark.parametrize("seed", range(3))
def test_the_honest_server_passes(seed, serve, soak):
    code, found = soak(serve(), "--longest-output", "2000", "--seed", seed, hours="0.0003")
    assert code == gates.PASSED and found["findings"] == [] and found["figures"]["answers"] >= 4


def test_one_text_for_every_request_does_not_pass(serve, soak):
    text = " The old kettle was found near the river. It had been there for years, and nobody had asked whose it was."
    code, found = soak(lying(serve(), lambda _: text))
    assert code == gates.INCOMPLETE and "the same text" in found["incomplete"]


def test_a_prompt_again_fails(serve, soak):
    server = serve()
    server.engine.scripted = lambda text: text.partition("<｜User｜>")[2].partition("<｜Assistant｜>")[0]
    code, found = soak(server)
    assert code == gates.FAILED and any("its own prompt again" in one for one in found["findings"]), found


def test_two_words_that_end_by_themselves_fail(serve, soak):
    code, found = soak(lying(serve(), lambda _: " The baker"))
    assert code == gates.FAILED and any("an answer of 2 words" in finding for finding in found["findings"])


FINISHES = {
    "abort": (Answer([1, 2], "The baker", finish="abort"), "finish_reason 'abort'"),
    "none": (Answer([1, 2], "The baker", finish=None), "finish_reason None"),
    "error": (Answer([1, 2], "The baker", finish="error"), "finish_reason 'error'"),
}


@pytest.mark.parametrize("finish", FINISHES)
def test_an_answer_without_an_end_is_a_failure(finish, serve, soak, monkeypatch, tmp_path):
    answer, said = FINISHES[finish]
    monkeypatch.setattr(corruption_soak.Endpoint, "generate", lambda *_, **__: answer)
    code, found = soak(serve())
    assert code == gates.INCOMPLETE and said in found["incomplete"]
    assert all(line["text"] == "The baker" for line in lines(tmp_path)[1:] if "failed" in line)


@pytest.mark.parametrize(
    ("answer", "asked", "said"),
    [
        (Answer([1] * 3, "a b c", finish="length"), 24, "finish_reason 'length' after 3 of 24"),
        (Answer([1] * 30, "word " * 30, finish="length"), 24, "after 30 of 24"),
        (Answer([1] * 30, "word " * 30, finish="stop"), 24, "after 30 of 24"),
        (Answer([1] * 64, "two words", finish="length"), 64, "64 tokens, but a text of 9 characters"),
        (Answer([1] * 19, "word " * 19, finish="stop"), 64, "an answer of 19 words"),
        (Answer([1] * 64, "word " * 40, finish="length"), 64, None),
        (Answer([1] * 20, "word " * 20, finish="stop"), 64, None),
    ],
)
def test_where_an_answer_ends(answer, asked, said):
    found = corruption_soak.end_marks(answer, asked)
    assert (found == []) if said is None else any(said in mark for mark in found), found


def test_the_same_request_number_is_the_same_prompt():
    assert corruption_soak.request(7, 1, 6000) == corruption_soak.request(7, 1, 6000)
    assert corruption_soak.request(7, 1, 6000) != corruption_soak.request(8, 1, 6000)


@pytest.mark.parametrize("number", range(12))
def test_the_prompts_themselves_bear_no_mark(number):
    """A model that quotes its request is no corrupt one."""
    prompt, _ = corruption_soak.request(number, 1, 1500)
    assert marks(prompt.split("｜>", 2)[2].rsplit("<｜", 1)[0]) == []


@pytest.mark.parametrize("arguments", [("--hours", "0"), ("--hours", "nan"), ("--longest-output", "0"),
                                       ("--longest-words", "-1"), ("--max-marked", "-1")])  # fmt: skip
def test_a_soak_of_nothing_is_a_usage_error(arguments, serve, soak):
    assert soak(serve(), *arguments) == (gates.USAGE, None)
