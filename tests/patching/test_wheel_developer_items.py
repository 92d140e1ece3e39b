"""A developer's messages within a conversation over /v1/responses: each release's own way, beside ours."""

import copy
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.fixes import developer_items
from deepseek_v4_sm120.sglang_patches.rows.http_server import RESPONSES
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import every_release, fetch

since_it_is_one = every_release("0.5.20")
MODULE, _, CLASS = RESPONSES.partition(":")
METHODS = ("_response_input_history", "_construct_input_messages")

pytestmark = pytest.mark.usefixtures("served_card")


def said(role, text):
    return {"type": "message", "role": role, "content": text}


CALL, OTHER = ({"type": "function_call", "call_id": i, "name": "run", "arguments": "{}"} for i in "ab")
RESULT, LAST = ({"type": "function_call_output", "call_id": i, "output": i} for i in "ab")
U, A, D, V = said("user", "U"), said("assistant", "x"), said("developer", "D"), said("user", "V")


def messages(version, items, *, ours, spec="dsv4") -> list[tuple]:
    """(role, content) of what the release makes of them."""
    names = {}
    methods = {name: take(fetch(version), names, f"{CLASS}.{name}", MODULE) for name in METHODS}
    if ours:
        methods[METHODS[0]] = developer_items.replace_history(methods[METHODS[0]])
    made = type("OpenAIServingResponses", (), methods)()
    made.chat_encoding_spec, made.supports_inline_system, made.tool_call_parser = spec, False, "deepseekv4"
    made._merge_consecutive_assistant_messages = lambda given: given
    made._normalize_response_message_for_chat = lambda item, **more: (
        {**item, "role": "system" if item["role"] == "developer" else item["role"]}
        if "role" in item
        else {"role": item["type"], "content": item["call_id"]}
    )
    asked = SimpleNamespace(instructions="I", input=items, previous_response_id=None)
    before = copy.deepcopy(items)
    found = made._construct_input_messages(asked)
    assert items == before
    return [(one["role"], one["content"]) for one in found]


def written(*items):
    return [(i.get("role", i["type"]), i["content"] if "role" in i else i["call_id"]) for i in items]


HEAD, NOTE = ("system", "I"), ("user", "D")


@since_it_is_one
@pytest.mark.parametrize(
    ("items", "wanted"),
    [
        ([U, A, D, V], [HEAD, *written(U, A), NOTE, *written(V)]),
        ([U, D], [HEAD, *written(U), NOTE]),
        ([D, U, A, V], [("system", "I\n\nD"), *written(U, A, V)]),
        ([U, CALL, RESULT, D], [HEAD, *written(U, CALL, RESULT), NOTE]),
        ([U, CALL, OTHER, RESULT, D, LAST, A], [HEAD, *written(U, CALL, OTHER, RESULT, LAST), NOTE, *written(A)]),
        ([U, CALL, D], [HEAD, *written(U, CALL), NOTE]),
        ("U", [HEAD, *written(U)]),
    ],
)
def test_they_stay_where_they_are(version, items, wanted):
    assert messages(version, items, ours=True) == wanted


@since_it_is_one
def test_the_prompt_so_far_stays(version):
    """What was a conversation's prompt is the beginning of the next one's; not with SGLang, so the row is needed."""
    for ours in (True, False):
        first, later = (messages(version, items, ours=ours) for items in ([U, A, V], [U, A, V, A, D, U]))
        assert (later[: len(first)] == first) is ours


@since_it_is_one
def test_all_else_stays_sglangs(version, monkeypatch):
    stock = messages(version, [U, A, D, V], ours=False)
    assert messages(version, [U, A, D, V], ours=True, spec="dsv41") == stock
    system = [U, A, said("system", "D"), V]
    assert messages(version, system, ours=True) == messages(version, system, ours=False)
    monkeypatch.setattr(models_served, "has_served_card", lambda: False)
    assert messages(version, [U, A, D, V], ours=True) == stock
