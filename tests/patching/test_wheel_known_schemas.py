"""Tools of requests: each release's own judgement of them, with ours and without, by how often schemas are judged."""

import json
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches.fixes import known_schemas
from deepseek_v4_sm120.sglang_patches.rows.http_server import CHAT, VALIDATOR
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import content, every_release, fetch

MODULE, _, CLASS = CHAT.partition(":")


class SchemaError(Exception):
    pass


class Judge:
    """jsonschema's class, of which a schema of the type "wrong" is wrong."""

    def __init__(self):
        self.judged, self.META_SCHEMA = [], "its own"

    def check_schema(self, schema):
        self.judged.append(schema)
        if schema["properties"]["a"].get("type") == "wrong":
            raise SchemaError("wrong")


def tools(*types):
    schemas = [{"type": "object", "properties": {"a": {"type": kind}}} for kind in types]
    return [SimpleNamespace(function=SimpleNamespace(name=f"tool {i}", parameters=s)) for i, s in enumerate(schemas)]


def validate(version, validator):
    """validate(tools): what the release has to say against a request with them."""
    names = {"Draft202012Validator": validator, "SchemaError": SchemaError, "ChatCompletionMessageGenericParam": dict}
    names["normalize_json_schema_types"] = lambda schema: None
    function = take(fetch(version), names, f"{CLASS}._validate_request", MODULE)
    nothing = dict.fromkeys(("chat_template_kwargs", "return_sampling_mask", "response_format", "max_tokens"))
    nothing |= dict.fromkeys(("return_flat_raw_output_top_logprobs", "max_completion_tokens"))
    chat = SimpleNamespace(
        is_minimax_m3=False,
        _validate_media_content=lambda request: None,
        _effective_tools=lambda request: request.tools,
        tokenizer_manager=SimpleNamespace(server_args=SimpleNamespace(context_length=None)),
    )

    def of(tools):
        return function(chat, SimpleNamespace(messages=["a"], tools=tools, tool_choice="auto", **nothing))

    return of


@every_release()
def test_a_schema_is_judged_once(version, served_card):
    stock, ours = Judge(), Judge()
    for validator in (stock, known_schemas.replace_validator(ours)):
        of = validate(version, validator)
        assert [of(tools("string", "integer", "string")) for _ in range(3)] == [None] * 3
        assert of(tools("string", "null", "integer")) is None
        refused = [of(tools("string", "wrong")) for _ in range(2)]
        assert refused == ["Tool 1 function has invalid 'parameters' schema: wrong"] * 2
    judged = [schema["properties"]["a"]["type"] for schema in ours.judged]
    assert judged == ["string", "integer", "null", "wrong", "wrong"] and len(stock.judged) == 16


def test_other_models_and_cards_judge_each_time(monkeypatch):
    monkeypatch.setattr(known_schemas.models_served, "has_served_card", lambda: False)
    judge = Judge()
    validator = known_schemas.replace_validator(judge)
    for _ in range(3):
        validator.check_schema(tools("string")[0].function.parameters)
    assert len(judge.judged) == 3 and validator.known == {} and validator.META_SCHEMA == "its own"


def test_what_reads_alike_is_not_taken_for_the_same(served_card):
    """A bound of true is wrong where 1 is right, and "1" is no number; a name is not its place."""
    judge = Judge()
    validator = known_schemas.replace_validator(judge)
    values = [1, True, 1.0, "1", [1], None, {"b": 1}, "é", "\\u00e9", "e\u0301"]
    for _ in range(2):
        for value in values:
            validator.check_schema({"properties": {"a": {"minLength": value}}})
    assert json.dumps([s["properties"]["a"]["minLength"] for s in judge.judged]) == json.dumps(values)


def test_the_first_ones_are_forgotten(served_card, monkeypatch):
    monkeypatch.setattr(known_schemas, "KEPT", 3)
    judge = Judge()
    validator = known_schemas.replace_validator(judge)
    for kind in "abcdcba":
        validator.check_schema(tools(kind)[0].function.parameters)
    assert [schema["properties"]["a"]["type"] for schema in judge.judged] == list("abcda")
    assert len(validator.known) == 3


@every_release()
def test_the_class_is_asked_for_this_alone(version):
    text = content(fetch(version), f"{VALIDATOR.partition(':')[0].replace('.', '/')}.py")
    used = [line.strip() for line in text.splitlines() if "Draft202012Validator" in line.partition("#")[0]]
    asked = "Draft202012Validator.check_schema(tool.function.parameters)"
    assert used == ["from jsonschema import Draft202012Validator, SchemaError", asked]


def test_too_deep_a_schema_is_refused_as_ever(served_card):
    schema = {}
    for _ in range(200_000):
        schema = {"items": schema}
    with pytest.raises(RecursionError):
        known_schemas.replace_validator(Judge()).check_schema(schema)
