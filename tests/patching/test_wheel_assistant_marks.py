"""The assistant's marks in the prompts of each release's own encoder, without and with ours around it, beside those
that DeepSeek's own conversion writes (deepseek-recipe)."""

import copy
import types

import pytest

from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.fixes import assistant_marks, developer_messages
from tests.patching import test_wheel_chat_requests as chat_requests
from tests.patching import test_wheel_turns
from tests.patching.test_wheel_chat_requests import Record, asked, before_recipe, encoder_of, prompt

MARK, END = "<｜Assistant｜>", "<｜end▁of▁sentence｜>"
THINKING, CHAT = "thinking", "chat"

pytestmark = pytest.mark.usefixtures("served_card", "thinks_by_default")
thinks_by_default, recipe = chat_requests.thinks_by_default, test_wheel_turns.recipe


def encoder(version, *, ours):
    made = types.ModuleType("encoding_dsv4")
    exec(encoder_of(version), vars(made))
    if ours:
        made.render_message = assistant_marks.replace_render_message(made.render_message)
    return made


def said(*roles, **more):
    return [{"role": role, "content": f"{role} {n}."} | more for n, role in enumerate(roles)]


@pytest.fixture
def converted(recipe):
    """(messages, thinking) -> the prompt, by deepseek-recipe."""
    kinds = {"system": recipe.SystemMessage, "user": recipe.UserMessage, "assistant": recipe.AssistantMessage}

    def made(messages, thinking):
        given = [kinds[one["role"]](one["content"]) for one in messages]
        conversation = recipe.Conversation(given, thinking_mode=thinking == THINKING, reasoning_effort="low")
        return recipe.DeepseekV4Encoding().render_conversation(conversation).prompt

    return made


@before_recipe
@pytest.mark.parametrize("thinking", [THINKING, CHAT])
@pytest.mark.parametrize(
    "roles",
    [
        ("system", "assistant", "user"),
        ("assistant", "user"),
        ("system", "user", "assistant", "assistant", "user"),
        ("system", "assistant", "assistant", "user", "assistant", "user"),
        ("system",),
    ],
    ids="-".join,
)
def test_every_turn_has_the_mark_that_deepseeks_own_conversion_has(version, thinking, roles, converted):
    messages = said(*roles)
    wanted = converted(messages, thinking)
    if roles[0] != "system":  # SGLang puts an empty one in front
        messages.insert(0, {"role": "system", "content": ""})
    before = copy.deepcopy(messages)
    assert encoder(version, ours=True).encode_messages(messages, thinking) == wanted and messages == before
    assert encoder(version, ours=False).encode_messages(messages, thinking).count(MARK) < wanted.count(MARK)


@before_recipe
@pytest.mark.parametrize("thinking", [THINKING, CHAT])
def test_a_prompt_that_ends_with_the_systems_asks_for_an_answer(version, thinking, converted):
    """What DeepSeek's conversion puts at the head stays in its place."""
    stock, ours = encoder(version, ours=False), encoder(version, ours=True)
    for roles in (("user", "system"), ("system", "user", "assistant", "system"), ("user", "system", "system")):
        messages = said(*roles)
        asks = MARK + ("<think>" if thinking == THINKING else "</think>")
        assert converted(messages, thinking).endswith(asks)
        found = stock.encode_messages(messages, thinking)
        assert ours.encode_messages(messages, thinking) == found + asks and found.endswith(f"system {len(roles) - 1}.")


@before_recipe
def test_the_next_turns_prompt_begins_with_the_one_before_and_its_answer(version):
    """So that the prefix cache has it, with thoughts where they are kept."""
    ours = encoder(version, ours=True)
    tools = {"tools": [{"type": "function", "function": {"name": "clock", "parameters": {}}}]}
    for thinking, more in ((CHAT, {}), (THINKING, tools)):
        answer = {"role": "assistant", "content": "A.", "reasoning_content": "Hm." * bool(more)}
        first = [*said("system", **more), *said("user", "system")]
        told = ("Hm.</think>" if more else "") + "A." + END
        following = ours.encode_messages([*first, answer, *said("user")], thinking)
        assert following.startswith(ours.encode_messages(first, thinking) + told)


@before_recipe
def test_all_other_prompts_stay_sglangs(version, monkeypatch):
    stock, ours = encoder(version, ours=False), encoder(version, ours=True)
    result = [{"role": "tool", "content": "23:59", "tool_call_id": "c"}]
    others = [said("system", "user"), said("system", "user", "assistant", "user"), said("user", "assistant") + result]
    others += [said("user", "system", "user"), said("user", "system", task="title"), said("user", task="action")]
    for thinking in (THINKING, CHAT):
        for messages in others:
            assert ours.encode_messages(messages, thinking) == stock.encode_messages(messages, thinking)
    monkeypatch.setattr(models_served, "has_served_card", lambda: False)
    for roles in (("user", "system"), ("assistant", "user")):
        assert ours.encode_messages(said(*roles), CHAT) == stock.encode_messages(said(*roles), CHAT)


@before_recipe
def test_a_developers_message_at_the_end_is_asked_for_an_answer(version):
    """SGLang marks it as the user's where the model does not think; developer_messages takes it for the system's."""
    chat = chat_requests.serving(version, ours=False)
    kind = type(chat)
    names = kind._apply_jinja_template.__globals__
    kind._apply_jinja_template = developer_messages.replace_apply_template(kind._apply_jinja_template)
    request = asked()
    request.messages.append(Record(role="developer", content="In French.", tools=None))
    assert prompt(chat, request).endswith("In French.")
    names["encoding_dsv4"].render_message = encoder(version, ours=True).render_message
    assert prompt(chat, request).endswith(f"In French.{MARK}</think>")
