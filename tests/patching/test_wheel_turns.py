"""Turns that come back as history: each release's own way to the encoder, and deepseek-recipe itself, beside ours."""

import ast
import copy
import importlib.util
import json
import random
import re
import sys
import types
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.fixes import call_order, turn_phases
from deepseek_v4_sm120.sglang_patches.rows.http_server import RECIPE, RESPONSES
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import RELEASES, content, every_release, fetch, packages, since

RECIPE_SINCE, PHASES_SINCE = "0.5.23", "0.5.20"
RENDERER = "sglang/srt/parser/deepseek_recipe_renderer.py"
TOOL = {"type": "function", "function": {"name": "run", "description": "", "parameters": {"type": "object"}}}


pytestmark = pytest.mark.usefixtures("served_card")


@pytest.fixture
def recipe(monkeypatch):
    """deepseek-recipe, without the folder that it lies in."""
    place = packages() / "deepseek_recipe"
    given = {"submodule_search_locations": [str(place)]}
    spec = importlib.util.spec_from_file_location("deepseek_recipe", place / "__init__.py", **given)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "deepseek_recipe", module)
    spec.loader.exec_module(module)
    return module


def turn(*calls):
    """A turn of calls, (id, number) each."""
    made = [{"id": i, "type": "function", "function": {"name": "run", "arguments": f'{{"k": {n}}}'}} for i, n in calls]
    return {"role": "assistant", "content": "", "tool_calls": made}


def results(*answers):
    return [{"role": "tool", "tool_call_id": i, "content": f"R{n}"} for i, n in answers]


def encoder(version, recipe, *, ours, spec="dsv4"):
    """messages -> the prompt, by the release's adapter and renderer, and by recipe."""
    renderer = types.ModuleType("renderer")
    exec(content(fetch(version), RENDERER), vars(renderer))

    def render(body, **more):
        asked = {**renderer.pre_normalize(body), "model": renderer.MODEL_NAMES["dsv4"]}
        made = recipe.ChatCompletionRequest(asked).convert(recipe.ConversionOptions())
        return recipe.DeepseekV4Encoding().render_conversation(made.conversation).prompt

    module, _, its_class = RECIPE.partition(":")
    names = {"isinstance": isinstance, "_numeric_effort": lambda effort: effort}
    method = take(fetch(version), names, f"{its_class}._encode", module)
    made = type("Adapter", (), {"_encode": call_order.replace_encode(method) if ours else method})()
    made._spec, made._default_effort, made.deepseek_recipe = spec, None, SimpleNamespace(encode=render)

    def prompt(*messages) -> str:
        body = {"messages": [{"role": "user", "content": "U"}, *messages], "thinking": True, "tools": [TOOL]}
        before = copy.deepcopy(body)
        found = made._encode(body, effort=None, task=None, image_urls=[])
        assert body["messages"] == before["messages"]
        return found

    return prompt


def numbers(prompt: str) -> tuple[list, list]:
    """The calls' and the results', as they stand."""
    found = (re.findall(pattern, prompt) for pattern in (r'"k" string="false">(\d+)<', r"<tool_result>R(\d+)<"))
    return tuple([int(number) for number in each] for each in found)


@every_release(RECIPE_SINCE)
def test_calls_stay_as_the_model_wrote_them(version, recipe):
    """Whatever their ids, and in whatever order the results come; recipe sorts both by the ids."""
    stock, ours = (encoder(version, recipe, ours=of) for of in (False, True))
    in_order, chance = [[0, 1], [0, 1]], random.Random(0)
    for answers in ((("b", 0), ("a", 1)), (("a", 1), ("b", 0))):
        given = turn(("b", 0), ("a", 1)), *results(*answers)
        assert list(numbers(stock(*given))) == [[1, 0], [1, 0]]
        assert list(numbers(ours(*given))) == in_order
    swapped = 0
    for _ in range(50):
        calls = [(f"call_{chance.randbytes(12).hex()}", n) for n in range(chance.randint(2, 5))]
        given = turn(*calls), *results(*chance.sample(calls, len(calls)))
        wanted = [n for _, n in calls]
        assert numbers(ours(*given)) == (wanted, wanted)
        swapped += numbers(stock(*given)) != (wanted, wanted)
    assert swapped > 20


@every_release(RECIPE_SINCE)
def test_ids_that_sort_make_the_same_prompt(version, recipe):
    """So no id is part of it; a client that numbers each turn's calls from 0 has them again, and more than ten."""
    stock, ours = (encoder(version, recipe, ours=of) for of in (False, True))
    two = [(f"call_{n}", n) for n in range(2)]
    given = turn(*two), *results(*two), turn(*two), *results(*two)
    assert ours(*given) == stock(*given)
    many = [(f"call_{n}", n) for n in range(12)]
    given = turn(*many), *results(*many)
    assert numbers(ours(*given))[0] == list(range(12)) != numbers(stock(*given))[0]


@every_release(RECIPE_SINCE)
def test_other_models_and_cards_keep_recipes_order(version, recipe, monkeypatch):
    given = turn(("b", 0), ("a", 1)), *results(("b", 0), ("a", 1))
    stock = encoder(version, recipe, ours=False)(*given)
    assert encoder(version, recipe, ours=True, spec="dsv41")(*given) == stock
    monkeypatch.setattr(models_served, "has_served_card", lambda: False)
    assert encoder(version, recipe, ours=True)(*given) == stock


@every_release(RECIPE_SINCE)
def test_a_result_that_is_missing_is_refused_as_before(version, recipe):
    for of in (False, True):
        with pytest.raises(recipe.ConversionError):
            encoder(version, recipe, ours=of)(turn(("b", 0), ("a", 1)), *results(("b", 0)))


def test_ids_that_name_no_call_are_kept():
    twice = turn(("a", 0), ("a", 1))
    nameless = turn((None, 0))
    for given in ([twice, *results(("a", 0))], [nameless], results(("x", 0)), [turn(), *results(("", 0))]):
        assert call_order.in_order(given) == given
    named = call_order.in_order([turn(("a", 0)), *results(("a", 0)), twice, *results(("a", 1))])
    assert named[0]["tool_calls"][0]["id"] == named[1]["tool_call_id"] != "a"
    assert named[2:] == [twice, *results(("a", 1))]


def test_ids_are_looked_at_a_few_times_each_whatever_a_request_brings():
    """A client may send thousands: by their square they keep the process that answers from all others."""
    looks = 0

    class Id(str):
        def __hash__(self):
            nonlocal looks
            looks += 1
            return super().__hash__()

        def __eq__(self, other):
            nonlocal looks
            looks += 1
            return super().__eq__(other)

    many = turn(*((Id(number), number) for number in range(100)))
    twice = [turn((Id("x"), 0), (Id("x"), 1)) for _ in range(100)]
    wide = turn(*((Id(f"y{number % 99}"), number) for number in range(100)))
    found = call_order.in_order([many, *twice, wide])
    assert found[1:] == [*twice, wide] and found[0]["tool_calls"][0]["id"] == "call_000000_000000"
    assert looks < 10 * 400


@pytest.mark.parametrize("version", [version for version in RELEASES if not since(version, RECIPE_SINCE)])
def test_before_recipe_calls_stay_as_they_stand(version):
    """Its encoder knows the calls' places."""
    encoding = types.ModuleType("encoding")
    exec(content(fetch(version), "sglang/srt/entrypoints/openai/encoding_dsv4.py"), vars(encoding))
    given = [{"role": "user", "content": "U"}, turn(("b", 0), ("a", 1)), *results(("a", 1), ("b", 0))]
    found = encoding.encode_messages(given, thinking_mode="thinking")
    assert numbers(found) == ([0, 1], [0, 1])


def handler(version, spec="dsv4"):
    """Of /v1/responses as far as it makes the chat API's messages: the release's own methods."""
    module, _, its_class = RESPONSES.partition(":")
    tree = ast.parse(content(fetch(version), f"{module.replace('.', '/')}.py"))
    (whole,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == its_class]
    parts = ("_construct_input_messages", "_response_input_history", "_merge_consecutive_assistant_messages")
    parts += ("_flatten_tool_output", "_chat_tool_call_message")
    parts += tuple(f"_normalize_response_{of}_for_chat" for of in ("message", "content_part"))
    body = [node for node in whole.body if getattr(node, "name", None) in parts]
    only = ast.ClassDef(its_class, [], [], body, [], **({"type_params": []} if sys.version_info >= (3, 12) else {}))
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    names = {"orjson": SimpleNamespace(loads=json.loads, JSONDecodeError=ValueError)}
    exec(compile(ast.fix_missing_locations(ast.Module([future, only], [])), version, "exec"), names)
    made = names[its_class]()
    made.chat_encoding_spec, made.supports_inline_system, made.tool_call_parser = spec, False, "deepseekv4"
    return made


def responses(version, *, ours, spec="dsv4"):
    """items -> the chat API's messages."""
    made = handler(version, spec)
    if ours:
        replaced = turn_phases.replace_construct(type(made)._construct_input_messages)
        type(made)._construct_input_messages = replaced

    def messages(items: list) -> list:
        request = SimpleNamespace(instructions="Be brief.", input=copy.deepcopy(items), previous_response_id=None)
        found = made._construct_input_messages(request, None)
        assert request.input == items
        return found

    return messages


def words(text: str, phase):
    item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    return item if phase is None else {**item, "phase": phase}


def history(*, phases):
    """What a client has of two turns, one with a call."""
    thoughts = [{"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": t}]} for t in "TU"]
    before, last = ("commentary", "final_answer") if phases else (None, None)
    return [
        *({"role": "user", "content": "What time is it?"}, thoughts[0], words("I look.", before)),
        {"type": "function_call", "call_id": "c", "name": "clock", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "23:59"},
        *(thoughts[1], words("Nearly midnight.", last), {"role": "user", "content": "And now?"}),
    ]


def turns(messages) -> list:
    return [message for message in messages if message["role"] == "assistant"]


@every_release(PHASES_SINCE)
def test_a_turn_with_a_phase_is_one_turn(version):
    stock, ours = (responses(version, ours=of) for of in (False, True))
    without = stock(history(phases=False))
    assert len(turns(without)) == 2 and ours(history(phases=False)) == without
    assert ours(history(phases=True)) == without
    first, second = turns(without)
    assert first["reasoning_content"] == "T" and first["content"][0]["text"] == "I look." and first["tool_calls"]
    assert second["reasoning_content"] == "U" and second["content"][0]["text"] == "Nearly midnight."


@every_release(PHASES_SINCE)
def test_sglang_takes_it_apart(version):
    """So the row is needed: thoughts, words and calls by themselves, in 0.5.23 the calls alone."""
    apart = turns(responses(version, ours=False)(history(phases=True)))
    assert len(apart) == (3 if since(version, RECIPE_SINCE) else 5)
    (of_calls,) = [one for one in apart if one.get("tool_calls")]
    assert not of_calls.get("content") and not of_calls.get("reasoning_content")


@every_release(PHASES_SINCE)
def test_other_models_and_cards_keep_sglangs_turns(version, monkeypatch):
    stock = responses(version, ours=False)(history(phases=True))
    assert responses(version, ours=True, spec=None)(history(phases=True)) == stock
    monkeypatch.setattr(models_served, "has_served_card", lambda: False)
    assert responses(version, ours=True)(history(phases=True)) == stock


@every_release()
def test_which_releases_say_phases(version):
    text = content(fetch(version), f"{RESPONSES.partition(':')[0].replace('.', '/')}.py")
    assert ('.get("phase")' in text) is ('phase="commentary"' in text) is since(version, PHASES_SINCE)
