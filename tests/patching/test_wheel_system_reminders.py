"""System messages in the middle of a conversation over /v1/messages: each release's own conversion, beside ours."""

import copy
import json
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.fixes import system_reminders
from deepseek_v4_sm120.sglang_patches.rows.http_server import MESSAGES
from tests.patching.test_wheel_chat_requests import Record, block
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import content, every_release, fetch

TAKEN_SINCE = "0.5.15"
MODULE, _, CLASS = MESSAGES.partition(":")
CALL = [block("text", text="I look."), block("tool_use", name="clock", input={})]
RESULT = [block("tool_result", tool_use_id="call_1", content="23:59")]
UNSET = (
    "temperature",
    "top_p",
    "top_k",
    "stop_sequences",
    "thinking",
    "output_config",
    "betas",
    "tools",
    "tool_choice",
)

pytestmark = pytest.mark.usefixtures("served_card")


def request(*turns, system="Be brief."):
    messages = [Record(role=role, content=content) for role, content in turns]
    more = {"model": "m", "max_tokens": 9, "stream": False, "pd_routing_kwargs": dict, **dict.fromkeys(UNSET)}
    return Record(messages=messages, system=system, **more)


def converted(version, asked, *, ours, spec="dsv4") -> list[tuple]:
    """(role, text) of the chat API's messages."""
    names = {"json": json, "ValueError": ValueError, "BaseModel": Record}
    take(fetch(version), names, "_extract_system_text", MODULE)
    method = take(fetch(version), names, f"{CLASS}._convert_to_chat_completion_request", MODULE)
    names["ChatCompletionRequest"] = lambda messages, **given: Record(messages=messages, tools=None, **given)
    convert = system_reminders.replace_convert(method) if ours else method
    made = type("AnthropicServing", (), {"_convert_to_chat_completion_request": convert})()
    made._merge_inline_system = True
    chat = {"chat_encoding_spec": spec, "supports_native_reasoning_history": lambda: True}
    made.openai_serving_chat = SimpleNamespace(**chat)
    before = copy.deepcopy(asked)
    found = made._convert_to_chat_completion_request(asked).messages
    assert asked == before
    return [(one["role"], one.get("content")) for one in found]


def told(text):
    return "user", f"<system-reminder>\n{text}\n</system-reminder>"


HEAD, QUESTION, WORDS, ANSWER = ("system", "Be brief."), ("user", "U"), ("assistant", "I look."), ("tool", "23:59")
CASES = [
    ([QUESTION, ("system", "S")], [HEAD, QUESTION, told("S")]),
    ([QUESTION, ("system", "S"), WORDS, QUESTION], [HEAD, QUESTION, told("S"), WORDS, QUESTION]),
    ([("system", "S"), QUESTION], [HEAD, told("S"), QUESTION]),
    ([QUESTION, WORDS, ("system", "S"), ("user", "V")], [HEAD, QUESTION, WORDS, told("S"), ("user", "V")]),
    (
        [QUESTION, ("system", [block("text", text="a"), block("image"), block("text", text="b")])],
        [HEAD, QUESTION, told("a\n\nb")],
    ),
    ([QUESTION, ("system", "")], [HEAD, QUESTION]),
    ([QUESTION, ("assistant", CALL), ("system", "S")], [HEAD, QUESTION, WORDS, told("S")]),
    ([QUESTION, ("assistant", CALL), ("user", RESULT), ("system", "S")], [HEAD, QUESTION, WORDS, ANSWER, told("S")]),
    ([QUESTION, ("assistant", CALL), ("system", "S"), ("user", RESULT)], [HEAD, QUESTION, WORDS, ANSWER, told("S")]),
    (
        [QUESTION, ("assistant", CALL), ("system", "S"), ("user", RESULT), WORDS, QUESTION],
        [HEAD, QUESTION, WORDS, ANSWER, told("S"), WORDS, QUESTION],
    ),
]


@every_release(TAKEN_SINCE)
@pytest.mark.parametrize(("turns", "wanted"), CASES)
def test_a_system_message_stays_where_it_is(version, turns, wanted):
    assert converted(version, request(*turns), ours=True) == wanted


@every_release(TAKEN_SINCE)
def test_the_prompt_so_far_stays(version):
    """What was a conversation's prompt is the beginning of the next one's; not with SGLang, so the row is needed."""
    turns = [QUESTION, ("system", "1"), WORDS, ("user", "V"), ("system", "2")]
    first, later = request(*turns[:3]), request(*turns)
    ours, stock = ([converted(version, of, ours=by) for of in (first, later)] for by in (True, False))
    assert ours[1][: len(ours[0])] == ours[0]
    assert stock[1][: len(stock[0])] != stock[0]
    assert stock[1][0] == ("system", "Be brief.\n1\n2")


@every_release()
def test_which_release_moves_them_as_it_reads_a_request(version):
    text = content(fetch(version), f"{MODULE.rpartition('.')[0].replace('.', '/')}/protocol.py")
    assert ("def move_mid_conversation_system_messages" in text) is (version == "0.5.14")


@every_release(TAKEN_SINCE)
def test_all_else_stays_sglangs(version, monkeypatch):
    without, with_one = request(QUESTION, WORDS, QUESTION), request(QUESTION, ("system", "S"), WORDS, QUESTION)
    assert converted(version, without, ours=True) == converted(version, without, ours=False)
    stock = converted(version, with_one, ours=False)
    assert converted(version, with_one, ours=True) != stock
    assert converted(version, with_one, ours=True, spec="dsv41") == stock
    monkeypatch.setattr(models_served, "has_served_card", lambda: False)
    assert converted(version, with_one, ours=True) == stock
