"""What calls and answers are held to: each release's own way from a request to the grammar, over a stand-in for
XGrammar, with ours and without. XGrammar's own were asked by hand (docs/mended.md)."""

import asyncio
import collections
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches.fixes import calls_or_answers, own_names
from deepseek_v4_sm120.sglang_patches.rows.grammars import TAGS
from deepseek_v4_sm120.sglang_patches.rows.http_server import CHAT, RESPONSES, RESPONSES_REQUEST
from tests.patching import made_formats
from tests.patching.made_formats import call, calls, lets
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import every_release, fetch, since

pytestmark = pytest.mark.usefixtures("served_card")
SINCE, CONFIG_SINCE, REFUSED_SINCE, JUDGED_SINCE, RESPONSES_SINCE = "0.5.13", "0.5.17", "0.5.18", "0.5.21", "0.5.18"
ODD = ("-A", "a.b", "user-id", "filter[name]", "$x", "姓名", "First Name", "1st", "a/b")
CODE = 'if a < b and "c" > d:\n\treturn </div>\n\n'
SCHEMA = {"type": "object", "properties": {"answer": {"type": "string"}}}
ANSWER = '{"answer": "x"}'


class ToolChoice(SimpleNamespace):
    def model_dump(self):
        return {"type": "function", "function": {"name": self.function.name}}


class Record(SimpleNamespace):
    """A pydantic model; what was not given is None."""

    _DEFAULT_SAMPLING_PARAMS = collections.defaultdict(int)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

    def model_dump(self):
        return {key: vars(value) if isinstance(value, Record) else value for key, value in vars(self).items()}


def tool(name, *arguments, strict=False):
    parameters = {"type": "object", "properties": {argument: {"type": "string"} for argument in arguments}}
    return Record(type="function", function=Record(name=name, parameters=parameters, strict=strict))


STRICT, LOOSE = tool("run", "command", strict=True), tool("grep", *ODD)
NAMED = ToolChoice(function=SimpleNamespace(name="grep"))


def detector(version, *, ours, name="deepseek_v4", make=made_formats.get_model_structural_tag):
    module, _, where = TAGS.partition(":")
    names = {"get_model_structural_tag": make, "ToolChoice": ToolChoice, "isinstance": isinstance}
    function = take(fetch(version), names, where, module)
    kind = type("Detector", (), {"get_structural_tag": own_names.replace_tag(function) if ours else function})
    kind.get_structural_tag_name = lambda self: name
    return kind()


def told(version, tools, choice, *, ours, **more) -> dict:
    given = {"tools": tools, "tool_choice": choice, "thinking_mode": False}
    return detector(version, ours=ours, **more).get_structural_tag(**given).model_dump(by_alias=True)


@every_release(SINCE)
def test_arguments_have_their_tools_names(version):
    for choice, tools in (("required", [LOOSE]), (NAMED, [STRICT, LOOSE]), ("auto", [STRICT, LOOSE])):
        stock, ours = (told(version, tools, choice, ours=of) for of in (False, True))
        for name in ODD:
            text = calls(("grep", {name: CODE, "plain": ""}))
            assert not lets(stock, text) and lets(ours, text), (choice, name)
        for text in (call("grep"), call("grep", a=CODE, b="</｜DSML｜x>")):
            assert lets(stock, text) and lets(ours, text)
        assert lets(ours, "Words.") is (choice == "auto") and lets(stock, "Words.") is (choice == "auto")


@every_release(SINCE)
def test_what_is_no_call_stays_out(version):
    ours = told(version, [STRICT, LOOSE], "required", ours=True)
    assert lets(ours, calls(("grep", {"-A": "1"}), ("run", {"command": CODE}), ("grep", {})))
    whole = call("grep", **{"-A": "1"})
    for text in (
        "",
        "words" + whole,
        whole + "words",
        call("run", **{"-A": "1"}),  # a strict tool's names are its schema's
        call("run"),
        call("other", a="b"),
        call("grep", **{'a"b': "1"}),
        call("grep", **{"": "1"}),
        whole.replace('string="true"', 'string="maybe"'),
        whole.replace("</｜DSML｜parameter>", ""),
        whole.replace("</｜DSML｜parameter>\n", "</｜DSML｜parameter>"),
    ):
        assert not lets(ours, text), text


@every_release(SINCE)
def test_other_models_tags_and_cards_are_left_alone(version, monkeypatch):
    given = ([LOOSE], "required")
    stock = told(version, *given, ours=False)
    assert told(version, *given, ours=True) != stock
    assert told(version, *given, ours=True, name="deepseek_v3_2") == stock
    assert detector(version, ours=True, make=lambda **_: None).get_structural_tag(tools=[LOOSE]) is None
    monkeypatch.setattr(own_names.models_served, "has_served_card", lambda: False)
    assert told(version, *given, ours=True) == stock


# ---- calls_or_answers


class Unsupported(ValueError):
    pass


def judge(schema):
    if "not" in schema:
        raise Unsupported("not")


@pytest.fixture
def parser(monkeypatch):
    """parser(version): puts the release's own parser where ours looks for it, and what judges schemas."""

    def put(version):
        module = calls_or_answers.CALLS
        names = {"ToolChoice": ToolChoice, "isinstance": isinstance, "ResponseTemplateToolDetector": dict}
        names |= {"Glm47MoeDetector": dict, "ToolStrictLevel": SimpleNamespace(FUNCTION=1, PARAMETER=2)}
        taken = {
            name: take(fetch(version), names, f"FunctionCallParser.{name}", module)
            for name in ("get_structure_constraint", "structural_tag_tools")
        }

        def init(self, tools, tool_call_parser):
            assert tool_call_parser == "deepseekv4"
            self.tools, self.tool_strict_level, self.detector = tools, 0, detector(version, ours=True)
            self.detector.get_auto_tool_call_structural_tag = lambda **_: None

        made = type("FunctionCallParser", (), {**{k: v for k, v in taken.items() if v}, "__init__": init})
        packages = ("sglang", "sglang.srt", "sglang.srt.constrained")
        for package in packages:
            monkeypatch.setitem(sys.modules, package, ModuleType(package))
            sys.modules[package].__path__ = []
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(FunctionCallParser=made))
        if since(version, JUDGED_SINCE):
            judging = SimpleNamespace(validate_xgrammar_json_schema=judge, __spec__="there")
            monkeypatch.setitem(sys.modules, calls_or_answers.JUDGE, judging)
        return made

    return put


def serving(
    version, made, *methods, backend="xgrammar", spec="dsv4", owner=CHAT, of_system=(), reads="deepseekv4", **own
):
    module, _, kind = owner.partition(":")
    taken = {}
    for name, replace in methods:
        names = {"GenerateReqInput": Record, "ChatCompletionRequest": Record, **own}
        names["_extract_max_dynamic_patch"] = lambda _: (None, None)
        taken[name] = take(fetch(version), names, f"{kind}.{name}", module)
        taken[name] = replace(taken[name]) if replace else taken[name]

    def quiet_but(self, name):
        if name == "_effective_tools":
            raise AttributeError(name)
        return lambda *_, **__: None

    quiet = {"__getattr__": quiet_but, **taken}
    chat = type(kind, (), quiet)()
    chat.__dict__ |= {"chat_encoding_spec": spec, "tool_call_parser": reads, "is_gpt_oss": False}
    chat.__dict__ |= {"is_minimax_m3": False, "default_sampling_params": {}, "default_chat_template_kwargs": None}
    arguments = SimpleNamespace(grammar_backend=backend)
    told = {"config_value": lambda name: vars(arguments)[name]} if since(version, CONFIG_SINCE) else {}
    config = SimpleNamespace(is_multimodal=False)
    chat.template_manager = SimpleNamespace(reasoning_config=None)
    chat.tokenizer_manager = SimpleNamespace(server_args=arguments, model_config=config, **told)
    if since(version, CONFIG_SINCE):
        chat._effective_tools = lambda request: [*request.tools, *of_system]

    def process(request, *_, **__):
        constraint = None
        if reads and request.tools and request.tool_choice != "none":
            constraint = made(request.tools, "deepseekv4").get_structure_constraint(request.tool_choice)
        return Record(prompt_ids=[1], tool_call_constraint=constraint)

    chat._process_messages, chat._can_reuse_text_only_prompt_ids = process, lambda *_: True
    chat._engine_prompt = lambda *_: ("input_ids", [1])
    return chat


def asked(
    version, made, *, ours, tools=(LOOSE,), choice="auto", kind="json_schema", schema=SCHEMA, beside=True, **more
) -> dict:
    """What the scheduler is asked for by a request over the chat API."""
    protocol = RESPONSES_REQUEST.partition(":")[0]
    names = {"convert_json_schema_to_str": json.dumps, "getattr": getattr, "ToolChoice": ToolChoice}
    function = take(
        fetch(version), names | {"isinstance": isinstance}, "ChatCompletionRequest.to_sampling_params", protocol
    )
    held = Record(type=kind, json_schema=Record(schema_=schema)) if kind else None
    given = {"tools": list(tools), "tool_choice": choice, "parallel_tool_calls": beside}
    request = Record(**given, response_format=held, messages=[])
    request.to_sampling_params = function.__get__(request)
    replace = calls_or_answers.replace_convert if ours else None
    chat = serving(version, made, ("_convert_to_internal_request", replace), **more)
    found, same = chat._convert_to_internal_request(request, None)
    assert same is request
    return {
        name: found.sampling_params[name] for name in ("json_schema", "structural_tag") if name in found.sampling_params
    }


@every_release(SINCE)
@pytest.mark.parametrize("kind", ("json_schema", "json_object"))
def test_an_answer_is_a_call_or_holds_to_its_schema(version, kind, parser):
    made = parser(version)
    for tools in ([LOOSE], [STRICT, LOOSE]):
        stock, ours = (asked(version, made, ours=of, kind=kind, tools=tools) for of in (False, True))
        assert list(stock) == ["json_schema"] and list(ours) == ["structural_tag"]  # so the row is needed
        tag = json.loads(ours["structural_tag"])
        assert tag["format"]["elements"][0]["json_schema"] == json.loads(stock["json_schema"])
        for text in (ANSWER, call("grep"), calls(("grep", {"-A": CODE}), ("grep", {"b": "1"}))):
            assert lets(tag, text), text
        for text in ("", "Words.", "Words." + call("grep"), ANSWER + call("grep"), call("grep") + ANSWER):
            assert not lets(tag, text), text
        assert lets(tag, call("run", command="ls")) is (STRICT in tools)
    if since(version, CONFIG_SINCE):
        tag = json.loads(asked(version, made, ours=True, kind=kind, tools=(), of_system=(LOOSE,))["structural_tag"])
        assert lets(tag, call("grep")) and lets(tag, ANSWER), "a system message's own tools"


@every_release(SINCE)
def test_a_call_that_is_required_is_one(version, parser):
    made = parser(version)
    for choice in ("required", NAMED):
        if since(version, REFUSED_SINCE):
            for ours in (False, True):
                with pytest.raises(ValueError, match="cannot be combined"):
                    asked(version, made, ours=ours, choice=choice)
        else:
            assert list(asked(version, made, ours=False, choice=choice)) == ["json_schema"]
            tag = json.loads(asked(version, made, ours=True, choice=choice)["structural_tag"])
            assert lets(tag, call("grep", a="1")) and not lets(tag, ANSWER)


@every_release(SINCE)
def test_all_else_is_held_as_sglang_has_it(version, parser, monkeypatch):
    made = parser(version)
    for more in (
        {"choice": "none"},
        {"tools": ()},
        {"kind": None},
        {"kind": None, "choice": "required"},
        {"kind": None, "tools": (STRICT, LOOSE)},
        {"backend": "llguidance"},
        {"reads": None},
        {"spec": "dsv41"},
    ):
        stock, ours = (asked(version, made, ours=of, **more) for of in (False, True))
        assert ours == stock, more
    assert list(asked(version, made, ours=True)) == ["structural_tag"]
    monkeypatch.setattr(own_names.models_served, "has_served_card", lambda: False)
    assert list(asked(version, made, ours=True)) == ["json_schema"]


@every_release(JUDGED_SINCE)
def test_a_schema_that_xgrammar_cannot_hold_is_refused(version, parser):
    made = parser(version)
    with pytest.raises(Unsupported):
        asked(version, made, ours=True, schema={**SCHEMA, "not": {}})


def responses(version, made, *, ours, tools=(LOOSE,), choice="auto", schema=SCHEMA, beside=None, **more) -> dict:
    """The same over /v1/responses."""
    protocol, _, kind = RESPONSES_REQUEST.partition(":")
    function = take(fetch(version), {"convert_json_schema_to_str": json.dumps}, f"{kind}.to_sampling_params", protocol)
    function = calls_or_answers.replace_to_sampling_params(function) if ours else function
    request = Record(tools=list(tools), tool_choice=choice, parallel_tool_calls=beside)
    request.to_sampling_params = function.__get__(request)
    request._json_schema_from_text_format = lambda _: None if schema is None else json.dumps(schema)
    request.has_json_schema_constraint = lambda: schema is not None
    request.effective_tool_choice = lambda: request.tool_choice
    replace = calls_or_answers.replace_make if ours else None
    chat = serving(version, made, ("_make_request", replace), owner=RESPONSES, **more)
    chat._response_tools_to_chat_tools, chat._chat_tool_choice = lambda request: request.tools, lambda choice: choice
    chat._construct_input_messages = lambda *_, **__: []
    *_, processed = asyncio.run(chat._make_request(request, None, None))
    given = {"stop": None, "tool_call_constraint": processed.tool_call_constraint}
    found = request.to_sampling_params(1000, {}, **given)
    return {name: found[name] for name in ("json_schema", "structural_tag") if name in found}


def test_whether_there_may_be_several_calls_is_the_requests(parser):
    made, told = parser("0.5.23"), []
    get = made.get_structure_constraint

    def asked_for(self, *given, **more):
        told.extend([more["parallel_tool_calls"]] if more else [])
        return get(self, *given, **more)

    made.get_structure_constraint = asked_for
    for ask, beside in ((asked, True), (asked, False), (responses, None), (responses, True), (responses, False)):
        assert list(ask("0.5.23", made, ours=True, beside=beside)) == ["structural_tag"]
    assert told == [True, False, True, True, False]


@every_release(RESPONSES_SINCE)
def test_so_is_one_over_responses(version, parser):
    made = parser(version)
    assert list(responses(version, made, ours=False)) == ["json_schema"]
    for tools in ([LOOSE], [STRICT, LOOSE]):
        tag = json.loads(responses(version, made, ours=True, tools=tools)["structural_tag"])
        assert lets(tag, ANSWER) and lets(tag, call("grep", **{"-A": "1"})) and not lets(tag, "Words.")
    for ours in (False, True):
        for tools, choice in (([STRICT], "auto"), ([LOOSE], "required")):
            if not (ours and choice == "auto"):
                with pytest.raises(ValueError, match="Cannot combine"):
                    responses(version, made, ours=ours, tools=tools, choice=choice)
    for more in ({"schema": None, "tools": (STRICT,)}, {"tools": ()}, {"choice": "none"}, {"backend": "llguidance"}):
        stock, ours = (responses(version, made, ours=of, **more) for of in (False, True))
        assert ours == stock, more
    assert list(responses(version, made, ours=True, spec="dsv41")) == ["json_schema"]


@pytest.mark.parametrize("or_answer", [True, False])
def test_calls_that_xgrammar_does_not_know_are_left_to_sglang(or_answer):
    """Of another model's --tool-call-parser SGLang makes a tag of an older kind, which has no format."""
    params, older = {"json_schema": "{}"}, {"type": "structural_tag", "structures": [], "triggers": []}
    calls = ("structural_tag", SimpleNamespace(model_dump=lambda by_alias: older))
    calls_or_answers.hold_to_either(params, calls, or_answer)
    assert params == {"json_schema": "{}"}
    known = ("structural_tag", SimpleNamespace(model_dump=lambda by_alias: {"format": {}}))
    for given, of in (({}, known), ({"regex": "a"}, known), (params, None), (params, ("json_schema", "{}"))):
        before = dict(given)
        calls_or_answers.hold_to_either(given, of, or_answer)
        assert given == before
