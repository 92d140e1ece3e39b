"""Tool calls, read by the parsers of every release that the row is for, whole and in pieces of any number of tokens."""

import ast
import asyncio
import functools
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.fixes import long_calls, tool_strings
from deepseek_v4_sm120.sglang_patches.fixes.tool_strings import CALLS
from deepseek_v4_sm120.sglang_patches.rows.http_server import PROCESS
from tests.patching.response_calls_read import INNER, OUTER
from tests.patching.response_calls_read import MODULE as RESPONSES_MODULE
from tests.patching.test_wheel_wo_a import definition
from tests.patching.tool_calls_read import (
    ANSWER,
    CASES,
    CHAT_CLASS,
    CHAT_MODULE,
    EACH,
    IN_FRONT,
    MARK,
    MARKED,
    OF_THOUGHTS,
    REAL,
    THOUGHT,
)
from tests.patching.wheels import RELEASES, WheelSources, content, fetch, members, since

REPO = Path(__file__).resolve().parents[2]
OWN_PARSER_SINCE, WHOLE_CALLS_SINCE, WORDS_KEPT_SINCE, CALLS_ENDED_SINCE = "0.5.23", "0.5.21", "0.5.18", "0.5.16"
BEFORE_WHOLE_CALLS, BELOW_ZERO = [r for r in RELEASES if not since(r, WHOLE_CALLS_SINCE)], "below zero"
STREAMED_RESPONSES = [r for r in BEFORE_WHOLE_CALLS if since(r, "0.5.14")]
JSON_CALL = ["run", {"command": " as JSON "}]
read_by = pytest.mark.parametrize("version", [r for r in RELEASES if not since(r, OWN_PARSER_SINCE)], scope="module")


READER = "import runpy; runpy.run_module('tests.patching.tool_calls_read', run_name='__main__')"


@functools.cache
def texts(version: str) -> tuple[str | None, ...]:
    """All that the program reads of a release."""
    sources = WheelSources(fetch(version))
    chat = definition(fetch(version), f"{CHAT_CLASS}._check_for_unstreamed_tool_args", CHAT_MODULE)
    step = definition(fetch(version), PROCESS.partition(":")[2], CHAT_MODULE)
    found = [definition(fetch(version), name, RESPONSES_MODULE) for name in (OUTER, INNER)]
    told = [node and ast.unparse(node) for node in (chat, step, *found)]
    return (*map(sources.read, (*REAL, *OF_THOUGHTS)), *told)


@pytest.fixture(scope="module")
def read(program_python):
    """read(version): what the program has printed, once for releases with the same texts."""
    found = {}

    def of(version: str) -> dict:
        if texts(version) not in found:
            command = [*program_python(), "-c", READER, version]
            done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            found[texts(version)] = json.loads(done.stdout)
        return found[texts(version)]

    return of


@read_by
def test_strings_arrive_as_they_were_written(read, version):
    for case, ways in read(version)["ours"].items():
        for way, (_, *calls) in ways.items():
            assert calls == [["run", CASES[case]], JSON_CALL], (case, way)


@read_by
def test_sglang_strips_them(read, version):
    """So the row is needed; and what is whole apart from that is as it was."""
    found = read(version)
    for case, arguments in CASES.items():
        stripped = {name: v.strip() if isinstance(v, str) else v for name, v in arguments.items()}
        for way, (in_front, *calls) in found["stock"][case].items():
            assert calls == [["run", stripped], JSON_CALL], (case, way)
            if way == "0":
                assert in_front == found["ours"][case][way][0] == IN_FRONT


@read_by
def test_other_models_and_cards_keep_sglangs(read, version):
    found = read(version)
    assert found["v3.2 beside ours"] == found["v3.2"]
    for case, ways in found["elsewhere"].items():
        assert len(ways) == 3 and ways.items() <= found["stock"][case].items()
    assert set(found["elsewhere"]) == set(found["v3.2"]) == set(CASES)


@read_by
def test_words_in_front_of_a_call_are_lost_by_several_tokens_a_step_before_they_were_mended(read, version):
    """What doctor and docs/mended.md say of streams; sglang #34458."""
    streamed = [
        in_front.strip()
        for ways in read(version)["stock"].values()
        for way, (in_front, *_) in ways.items()
        if way not in ("0", "1")
    ]
    assert all(words == IN_FRONT for words in streamed) == since(version, WORDS_KEPT_SINCE)
    assert {ways["1"][0].strip() for case, ways in read(version)["stock"].items() if case != BELOW_ZERO} == {IN_FRONT}


@read_by
def test_the_empty_line_in_front_of_a_call_is_told_in_streams_before_0_5_21(read, version):
    """So blanks_before_calls is needed (test_wheel_chat_requests.py)."""
    by_way = {way: {ways[way][0] for ways in read(version)["ours"].values()} for way in ("0", "1")}
    assert by_way["0"] == {IN_FRONT}
    assert by_way["1"] == {IN_FRONT if since(version, "0.5.21") else f"{IN_FRONT}\n\n\n\n"}


@read_by
def test_a_number_whose_digits_are_to_come_does_not_make_text_of_the_call(read, version):
    """In streams up to 0.5.17, whose parser fails at a minus sign."""
    found = read(version)
    in_text = {case for case, ways in found["stock"].items() if any(MARK in in_front for in_front, *_ in ways.values())}
    assert in_text == (set() if since(version, WORDS_KEPT_SINCE) else {BELOW_ZERO})
    assert (MARK in found["stock"][BELOW_ZERO]["1"][0]) is not since(version, WORDS_KEPT_SINCE)
    assert not any(MARK in in_front for ways in found["ours"].values() for in_front, *_ in ways.values())


@read_by
def test_thoughts_that_the_reader_is_not_told_of_arrive_as_text(read, version):
    """So default_thinking is needed (test_wheel_chat_requests.py)."""
    whole, streamed, default = read(version)["thoughts"]["False"]
    assert whole == streamed == ["", f"{THOUGHT}</think>{ANSWER}"] and default == "explicit_thinking"
    assert read(version)["thoughts"]["True"][:2] == [[THOUGHT, ANSWER]] * 2


@read_by
def test_a_mark_in_the_answer_opens_no_thoughts(read, version):
    """fixes/think_marks.py: without thoughts, and behind them."""
    for is_told, thoughts in (("False", ""), ("True", THOUGHT)):
        found = read(version)["marks of ours"][is_told]
        assert len(found) == 8
        for case, told in found.items():
            assert told == [thoughts, MARKED[case.partition(",")[0]]], case
    assert read(version)["opened, ours"] == read(version)["opened"], "thoughts that the answer itself begins with"
    assert read(version)["opened"]["opened, marks"] == ["Hm.", "Done."]


@read_by
def test_sglang_takes_it_for_their_beginning(read, version):
    """So the row is needed; from 0.5.13 on it reads what is whole right behind thoughts that it knows of."""
    for is_told, thoughts in (("False", ""), ("True", THOUGHT)):
        found = read(version)["marks"][is_told]
        assert found == read(version)["marks elsewhere"][is_told]
        wrong = {case for case, told in found.items() if told != [thoughts, MARKED[case.partition(",")[0]]]}
        assert {"text, marks", "call, marks"} <= wrong
        assert ("text, 0" in wrong) is ("call, 0" in wrong) is (is_told == "False" or version.startswith("0.5.12"))


@pytest.mark.parametrize("version", BEFORE_WHOLE_CALLS, scope="module")
def test_which_releases_tell_a_call_that_is_cut_off_as_a_whole_one(read, version):
    assert bool(read(version)["cut"][1]) is since(version, CALLS_ENDED_SINCE)


@pytest.mark.parametrize("version", [r for r in BEFORE_WHOLE_CALLS if since(r, CALLS_ENDED_SINCE)], scope="module")
def test_a_call_that_is_cut_off_is_not_told_as_a_whole_one(read, version):
    """By max_tokens; one that the model itself leaves without its end stays SGLang's."""
    sent, at_the_end = read(version)["cut"]
    assert json.loads(sent + at_the_end) == {"command": "rm -rf /srv"}  # of /srv/a/b
    assert read(version)["cut, ours"] == [[sent, ""], [sent, at_the_end]]
    with pytest.raises(ValueError, match="Unterminated string"):
        json.loads(sent)


@pytest.mark.parametrize("version", [r for r in BEFORE_WHOLE_CALLS if not since(r, CALLS_ENDED_SINCE)], scope="module")
def test_a_call_without_arguments_is_told_without_quotes_behind_them(read, version):
    """And no other call's end is: what it told of these was nothing."""
    stock, ours = read(version)["ends"]
    assert stock[0] == ["{}", '""'] and stock[1][1] == ""
    assert read(version)["end elsewhere"] == '""'
    assert [at_the_end for _, at_the_end in ours] == ["", "", ""]
    assert [sent for sent, _ in ours] == [sent for sent, _ in stock]


told_in_pieces = pytest.mark.parametrize("version", BEFORE_WHOLE_CALLS, scope="module")


@told_in_pieces
def test_a_long_call_is_told_as_sglang_tells_it(read, version):
    """long_calls: all of a call that is whole; of one that is cut off its beginning, and the parser has it all."""
    stock, ours = (read(version)[way] for way in ("long, stock", "long"))
    assert ours["whole"]["told"] == stock["whole"]["told"] and MARK in ours["whole"]["told"][1]
    told, least = (one["cut off"]["told"][1] for one in (stock, ours))
    assert told.startswith(least) and len(told) - len(least) < 2 * EACH
    assert all(ours[case]["buffer"] == stock[case]["buffer"] and ours[case]["unseen"] == [] for case in ours)


@told_in_pieces
def test_a_long_call_is_not_read_anew_with_each_step(read, version):
    """So the row is needed; and a stream is silent for no longer than it is to be."""
    stock, ours = (read(version)[way]["cut off"] for way in ("long, stock", "long"))
    steps, written = stock["asked"], len(stock["buffer"])
    assert stock["read"] > steps * written / 3 and ours["read"] < steps * written / 6
    assert ours["silent"] <= 2 * written // EACH + 3


streams_responses = pytest.mark.parametrize("version", STREAMED_RESPONSES, scope="module")


@streams_responses
def test_a_long_call_over_responses_is_told_as_sglang_tells_it(read, version):
    """All of a call that is whole; of one that is cut off its beginning, and the parser has it all."""
    stock, ours = (read(version)[way] for way in ("responses, stock", "responses"))
    for what in ("arguments", "text", "items", "buffer"):
        assert ours["whole"][what] == stock["whole"][what]
        assert what == "arguments" or ours["cut off"][what] == stock["cut off"][what]
    assert MARK in ours["whole"]["arguments"] and "function_call_arguments.done" in ours["whole"]["items"]
    told, least = stock["cut off"]["arguments"], ours["cut off"]["arguments"]
    assert told.startswith(least) and len(told) - len(least) < 2 * EACH


@streams_responses
def test_a_long_call_over_responses_is_not_read_anew_with_each_step(read, version):
    """Where steps have all of the text, and tools were given; a stream is silent for no longer than it is to be."""
    stock, ours = (read(version)[way] for way in ("responses, stock", "responses"))
    for case in stock:
        steps, written = stock[case]["asked"], len(stock["cut off"]["buffer"])
        assert stock[case]["read"] > steps * written / 3 and ours[case]["read"] < steps * written / 5
    assert ours["cut off"]["silent"] <= 2 * written // EACH + 3
    steps, seen = ours["cut off"]["steps"]
    assert seen < steps / 2 and stock["cut off"]["steps"] == [steps, steps]
    for way in ("new text alone", "elsewhere", "no tools"):
        assert read(version)[f"responses, {way}"]["steps"] == [steps, steps]


def test_the_parser_is_asked_at_tags_and_at_the_end(served_card):
    """Behind so many characters that three steps are kept otherwise."""
    parser, asked = SimpleNamespace(_buffer="x" * 4 * long_calls.EACH), []
    for text in ("a", "b", "c", "d", "</", MARK, "parameter", ">", "\n", "e", "f"):
        told = long_calls.handed_on(parser, text, text == "f")
        parser._buffer += told or ""
        asked.append(told)
    assert asked == [None, None, None, "abcd", None, f"</{MARK}", "parameter", ">", "\n", "e", "f"]
    parser._buffer += " " * long_calls.TAG
    assert [long_calls.handed_on(parser, text, text == "h") for text in ("g", "h", "i")] == [None, "gh", None]


def handed_to_sglang(texts: list[str], *, is_incremental=False) -> list[str]:
    """Of a stream's steps by their new text: what each that SGLang gets has more than the one before."""

    async def steps():
        for i, text in enumerate(texts):
            yield {"text": text if is_incremental else "".join(texts[: i + 1])}

    async def all_of_them():
        return [step["text"] async for step in long_calls.longer_steps(steps())]

    told = asyncio.run(all_of_them())
    return told if is_incremental else [text.removeprefix(told[i - 1] if i else "") for i, text in enumerate(told)]


def test_which_steps_of_a_response_are_kept():
    """Those within a call, one more behind each 4,096 characters of it; none at its tags, and not the last."""
    long, tags = "x" * 4 * long_calls.EACH, ("</", MARK, 'invoke name="run">')
    call = [CALLS, long, "a", "b", "c", "d", "e"]
    assert handed_to_sglang([*call, "f"]) == [CALLS, long, "abcd", "ef"]
    assert handed_to_sglang([*call, *tags, "f", "."]) == [CALLS, long, "abcd", "e</" + MARK, tags[2], "f", "."]
    assert handed_to_sglang([long, "a", CALLS, "b", "c"]) == [long, "a", CALLS, "b", "c"]  # a call that begins
    ended = [CALLS, long, long_calls.CALL_END, " " * long_calls.TAG, "a", "b", "c"]
    assert handed_to_sglang(ended) == ended
    assert handed_to_sglang(call, is_incremental=True) == call


@told_in_pieces
def test_what_two_steps_share_is_what_sglang_finds(read, version):
    assert read(version)["prefixes"] == []


@told_in_pieces
def test_other_cards_keep_sglangs_steps(read, version):
    assert read(version)["long elsewhere"]["asked"] == read(version)["long, stock"]["cut off"]["asked"]


@read_by
def test_deepseeks_prompt_says_as_is(version):
    (encoder,) = [m for m in members(fetch(version)) if m.endswith("/openai/encoding_dsv4.py")]
    assert 'String parameters should be specified as is and set `string="true"`' in content(fetch(version), encoder)


def test_from_then_on_deepseeks_own_parser_reads_the_answers():
    wheel = fetch(OWN_PARSER_SINCE)
    assert not [m for m in members(wheel) if m.endswith("/openai/encoding_dsv4.py")]
    assert '"dsv4": {"builtin": _build_deepseek_recipe}' in content(
        wheel, "sglang/srt/entrypoints/openai/chat_encoding_adapters.py"
    )


@pytest.mark.parametrize(
    ("model", "card", "ours"),
    [("deepseek_v4", True, True), ("deepseek_v4", False, False), ("deepseek_v41", True, False), (None, True, False)],
)
def test_it_is_ours_where_the_parent_told_so(model, card, ours, monkeypatch):
    """In the parent, and in a process that it starts, which asks no GPU."""
    environment = {}
    monkeypatch.setattr(models_served, "_announced", None)
    if model:
        models_served.announce({"model_type": model}, environment)
    if card:
        models_served.announce_served_card(environment)
    assert models_served.has_served_card() is ours
    monkeypatch.setattr(models_served, "_announced", models_served._UNASKED)
    models_served.announced(environment)
    assert models_served.has_served_card() is ours


def test_without_our_card_the_original_is_asked_alone(monkeypatch):
    monkeypatch.setattr(models_served, "_announced", None)

    class Detector:
        bot_token = tool_strings.CALLS
        parse = tool_strings.replace_parse_parameters(lambda self, text: text)

    assert Detector().parse("anything") == "anything"
