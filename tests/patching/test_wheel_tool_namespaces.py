"""Tools in a namespace over /v1/responses: the release's own way for them, and whether a request takes it."""

import asyncio
import copy
import types
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches.fixes import tool_namespaces
from deepseek_v4_sm120.sglang_patches.rows.http_server import OPENAI, RESPONSES
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import content, every_release, fetch

SINCE = "0.5.23"
ADAPTER, STATE = f"{OPENAI}.responses_tools.beam", f"{OPENAI}.responses_adapters"

pytestmark = pytest.mark.usefixtures("served_card")


class Tool(SimpleNamespace):
    def model_dump(self, exclude_none):
        return dict(vars(self))


MEMBER = {"type": "function", "name": "query", "description": "Asks.", "parameters": {"type": "object"}}
OWN = Tool(type="function", name="shell", parameters={"type": "object"})
SPACE = Tool(type="namespace", name="mcp__db", description="A database.", tools=[MEMBER])
BUILT_IN = Tool(type="shell", environment={"type": "local"})


def translation(version) -> dict:
    """The release's own functions that translate names, by their names."""
    found = types.ModuleType("adapters")
    exec(content(fetch(version), f"{STATE.replace('.', '/')}.py"), vars(found))
    names = {"response_tool_name": found.response_tool_name, "isinstance": isinstance, "BaseModel": Tool}
    for name in ("flat_namespace_tool_name", "flatten_response_tools", "flatten_response_input"):
        names[name] = take(fetch(version), names, name, ADAPTER)
    return names


def asked(version, *tools, ours, spec="dsv4"):
    """(the names of the tools of which the prompt is made, call name -> how a call of it is told; None where nothing is
    translated) or the words of a refusal, by the release's create_responses."""
    flatten, seen = translation(version)["flatten_response_tools"], []

    def from_request(request, *, tool_call_parser):
        flat, names = flatten(request.tools)
        translated = copy.copy(request)
        translated.tools = [Tool(**tool) for tool in flat]
        return translated, names

    class Enough(Exception):
        pass

    async def make_request(request, previous, tokenizer, *, tool_adapter):
        seen.append(([tool.name for tool in request.tools if tool.type == "function"], tool_adapter))
        raise Enough

    module, _, its_class = RESPONSES.partition(":")
    kinds = {name: type(name, (Exception,), {}) for name in ("ResponseToolChoiceError", "_MediaInputValidationError")}
    names = {
        "BeamToolAdapter": SimpleNamespace(from_request=from_request),
        "any": any,
        "isinstance": isinstance,
        **kinds,
    }
    names |= {"jinja2": SimpleNamespace(TemplateError=kinds["ResponseToolChoiceError"]), "ValueError": ValueError}
    names |= {"TypeError": TypeError, "RuntimeError": RuntimeError, "dict": dict}
    create = take(fetch(version), names, f"{its_class}.create_responses", module)
    made = SimpleNamespace(
        chat_encoding_spec=spec,
        _translates_tools=False,
        tool_call_parser="deepseekv4",
        tokenizer_manager=SimpleNamespace(tokenizer=None),
        enable_response_store=False,
        use_harmony=False,
        create_error_response=lambda words, **_: words,
        _validate_model=lambda model: None,
        _make_request=make_request,
    )
    request = SimpleNamespace(tools=list(tools), tool_choice="auto", previous_response_id=None, background=False)
    request.model, request.stream, request.store = "m", False, False
    request.effective_tool_choice, request.is_include_output_logprobs = lambda: "auto", lambda: False
    create = tool_namespaces.replace_create(create) if ours else create
    try:
        return asyncio.run(create(made, request))
    except Enough:
        assert made._translates_tools is False, "what others are answered with stays"
        return seen[0]


@every_release(SINCE)
def test_tools_in_a_namespace_reach_the_prompt(version):
    assert asked(version, OWN, SPACE, ours=False) == (["shell"], None)  # so the row is needed
    names = {"shell": {"name": "shell"}, "mcp__db__query": {"name": "query", "namespace": "mcp__db"}}
    assert asked(version, OWN, SPACE, ours=True) == (["shell", "mcp__db__query"], names)


@every_release(SINCE)
def test_without_one_and_elsewhere_nothing_is_translated(version):
    assert asked(version, OWN, ours=True) == asked(version, OWN, ours=False) == (["shell"], None)
    assert asked(version, ours=True) == ([], None)
    assert asked(version, OWN, SPACE, ours=True, spec="dsv41") == (["shell"], None)
    refused = asked(version, BUILT_IN, SPACE, ours=False)
    assert isinstance(refused, str) and asked(version, BUILT_IN, SPACE, ours=True) == refused


@every_release(SINCE)
def test_on_other_cards_nothing_is_translated(version, elsewhere):
    assert asked(version, OWN, SPACE, ours=True) == (["shell"], None)


@every_release(SINCE)
def test_a_call_is_told_by_both_names_and_comes_back_as_it_was_made(version):
    module, _, its_class = RESPONSES.partition(":")
    given = {"ResponseFunctionToolCall": lambda **of: of, "random_uuid": lambda: "0" * 32}
    given["response_tool_name"] = translation(version)["response_tool_name"]
    make = take(fetch(version), given, f"{its_class}._make_tool_call_item", module)
    _, names = translation(version)["flatten_response_tools"]([OWN, SPACE])
    told = make("mcp__db__query", "{}", set(), names)
    assert (told["name"], told["namespace"]) == ("query", "mcp__db")
    assert "namespace" not in make("shell", "{}", set(), names)
    assert translation(version)["flatten_response_input"](told)["name"] == "mcp__db__query"
