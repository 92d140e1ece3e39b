"""Pictures in a conversation: what each release refuses, and its own way to the prompt, beside ours and DeepSeek's own
conversion (deepseek-recipe)."""

import copy
import sys
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches import models_served, prompt_messages
from deepseek_v4_sm120.sglang_patches.fixes import text_parts, unseen_pictures
from deepseek_v4_sm120.sglang_patches.rows.http_server import CHAT
from deepseek_v4_sm120.sglang_patches.table import TABLE
from tests.patching import test_wheel_last_turns as last_turns
from tests.patching.test_wheel_chat_requests import Record, before_recipe, prompt, serving
from tests.patching.test_wheel_last_turns import CALLS, TOOL, USER, message, tail
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import content, every_release, fetch, since

REFUSED_SINCE, TOLD = "0.5.17", "[Unsupported Image]"
MODULE, _, CLASS = CHAT.partition(":")
MEDIA = frozenset({"image_url", "video_url", "audio_url"})  # asked of each release below

pytestmark = pytest.mark.usefixtures("served_card", "thinks_by_default")
thinks_by_default, recipe, converted = last_turns.thinks_by_default, last_turns.recipe, last_turns.converted


def text(words):
    return {"type": "text", "text": words}


def media(kind):
    return {"type": kind, kind: {"url": "data:image/png;base64,AA=="}}


PICTURE = media("image_url")
RESULT = {"role": "tool", "tool_call_id": "c"}
OF_CALL = [USER, {"role": "assistant", "content": "", "tool_calls": CALLS}]
CASES = [
    [{"role": "user", "content": [text("Look."), PICTURE]}],
    [{"role": "user", "content": [PICTURE, text("One."), PICTURE, text("Two.")]}],
    [{"role": "user", "content": [PICTURE]}, {"role": "assistant", "content": "No."}, USER],
    [*OF_CALL, {**RESULT, "content": [text("Here:"), PICTURE]}],
    [*OF_CALL, {**RESULT, "content": [PICTURE]}],
]


@pytest.fixture(autouse=True)
def protocol(monkeypatch):
    monkeypatch.setitem(sys.modules, prompt_messages.PROTOCOL, SimpleNamespace(**{prompt_messages.TEXT_PART: Record}))


def chat(version, *, ours):
    module = "sglang.srt.parser.jinja_template_utils"
    flattens = take(fetch(version), {"isinstance": isinstance}, "process_content_for_template_format", module)
    made = serving(version, ours=False, process_content_for_template_format=flattens)
    kind = type(made)
    kind._apply_jinja_template = text_parts.replace_apply_template(kind._apply_jinja_template)
    if ours:
        kind._apply_jinja_template = unseen_pictures.replace_apply_template(kind._apply_jinja_template)
    return made


def asked(messages):
    request = last_turns.asked({"content": ""}, goes_on=False, thinking=False, tools=True)
    request.messages = [message(one) for one in messages]
    return request


@before_recipe
def test_the_prompt_tells_of_a_picture_as_recipe_does(version, converted, monkeypatch):
    stock, ours = chat(version, ours=False), chat(version, ours=True)
    for messages in CASES:
        request = asked(messages)
        before = copy.deepcopy(request)
        wanted, _ = converted({"messages": messages, "thinking": False, "tools": [TOOL]})
        assert TOLD in wanted
        assert tail(prompt(ours, request)) == tail(wanted) and request == before
        assert TOLD not in prompt(stock, request)
    plain = asked([{"role": "user", "content": [text("One."), text("Two.")]}])
    assert prompt(ours, plain) == prompt(stock, plain)
    monkeypatch.setattr(models_served, "has_served_card", lambda: False)
    assert TOLD not in prompt(chat(version, ours=True), asked(CASES[0]))


@every_release(REFUSED_SINCE)
def test_a_request_with_a_picture_is_not_refused(version, monkeypatch):
    names = {"isinstance": isinstance, "_MEDIA_CONTENT_PART_TYPES": MEDIA}
    stock = take(fetch(version), names, f"{CLASS}._validate_media_content", MODULE)
    ours = unseen_pictures.replace_validate(stock)
    serves = SimpleNamespace(chat_encoding_spec="dsv4")
    serves.tokenizer_manager = SimpleNamespace(model_config=SimpleNamespace(is_multimodal=False))
    for messages in CASES:
        request = asked(messages)
        before = copy.deepcopy(request)
        assert "'image_url'" in stock(serves, request)
        assert ours(serves, request) is None and request == before
    for kind in MEDIA - {"image_url"}:
        request = asked([{"role": "user", "content": [PICTURE, media(kind)]}])
        assert f"'{kind}'" in ours(serves, request)
    serves.chat_encoding_spec = "dsv41"
    assert ours(serves, request) == stock(serves, request)
    serves.chat_encoding_spec = "dsv4"
    monkeypatch.setattr(models_served, "has_served_card", lambda: False)
    assert ours(serves, request) == stock(serves, request)


@every_release()
def test_what_counts_as_a_picture(version):
    """What is refused, from the release's own text; before it was, nothing is."""
    found = content(fetch(version), f"{MODULE.replace('.', '/')}.py")
    line = next((one for one in found.splitlines() if one.startswith("_MEDIA_CONTENT_PART_TYPES = ")), None)
    assert (line is None) is not since(version, REFUSED_SINCE)
    if line is not None:
        assert all(kind in line for kind in MEDIA) and line.count('"') == 2 * len(MEDIA)


def test_parts_are_put_together_behind_ours():
    names = [patch.name for patch in TABLE.patches]
    assert names.index("text_parts") < names.index("unseen_pictures")
