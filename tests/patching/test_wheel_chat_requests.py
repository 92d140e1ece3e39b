"""Requests over the chat API: each release's own way to the prompt, and what it takes the answer for, beside ours."""

import copy
import functools
import json
import sys
import types
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.fixes import (
    blanks_before_calls,
    default_thinking,
    developer_messages,
    effort_levels,
    json_answers,
    thought_history,
    unchosen_tools,
)
from deepseek_v4_sm120.sglang_patches.rows.http_server import CHAT, MESSAGES, RECIPE, RESPONSES
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import RELEASES, content, every_release, fetch, members, since

MODULE, _, CLASS = CHAT.partition(":")
BLANKS_LEFT_OUT_SINCE = "0.5.21"
TOOLS_LEFT_OUT_SINCE, LEVELS_OF_THE_CHECKPOINT_SINCE, RECIPE_SINCE = "0.5.22", "0.5.18", "0.5.23"
METHODS = ("_get_reasoning_from_request", "_apply_jinja_template", "_handle_last_assistant_message")
OF_RECIPE = ("_get_reasoning_from_request", "_thinking_requested")
BEFORE_RECIPE = [version for version in RELEASES if not since(version, RECIPE_SINCE)]
before_recipe = pytest.mark.parametrize("version", BEFORE_RECIPE, scope="module")


class Record(SimpleNamespace):
    """A pydantic model, as far as requests are asked for."""

    def model_dump(self):
        return {name: plain(value) for name, value in vars(self).items()}


def plain(value):
    if isinstance(value, list):
        return [plain(one) for one in value]
    return value.model_dump() if isinstance(value, Record) else value


def flat(message: dict):
    """The text of a message's parts, as SGLang hands it to the encoder."""
    parts = message["content"]
    return " ".join(part["text"] for part in parts) if isinstance(parts, list) else parts


def asked(kwargs=None, tools=None, choice="auto", in_system=None, role="system", **more):
    """A request of a conversation whose system message may bring tools."""
    messages = [
        Record(role=role, content="Be brief.", tools=in_system),
        Record(role="user", content="What time is it?", tools=None),
    ]
    given = {"reasoning_effort": None, "task": None, "continue_final_message": False, "stop": None, **more}
    return Record(messages=messages, chat_template_kwargs=kwargs, tools=tools, tool_choice=choice, **given)


TOOL = Record(type="function", function=Record(name="clock", description="", parameters={"type": "object"}))
OTHER = Record(type="function", function=Record(name="calendar", description="", parameters={"type": "object"}))


pytestmark = pytest.mark.usefixtures("served_card")


@pytest.fixture(autouse=True)
def in_cache(monkeypatch):
    """name -> what the Hub's cache tells of a checkpoint's encoder"""
    kept = {}
    look = SimpleNamespace(try_to_load_from_cache=lambda name, file, revision: kept.get(name))
    monkeypatch.setitem(sys.modules, "huggingface_hub", look)
    return kept


@pytest.fixture
def thinks_by_default(monkeypatch):
    """The server's environment: whether it thinks by default."""
    said = SimpleNamespace(value=False)
    given = {"SGLANG_DEFAULT_THINKING": lambda: said.value, "SGLANG_DSV4_REASONING_EFFORT": str}
    envs = SimpleNamespace(**{name: SimpleNamespace(get=get) for name, get in given.items()})
    monkeypatch.setitem(sys.modules, default_thinking.ENVIRON, SimpleNamespace(envs=envs))
    return said


@functools.cache
def encoder_of(version) -> str | None:
    found = [member for member in members(fetch(version)) if member.endswith("/openai/encoding_dsv4.py")]
    return content(fetch(version), found[0]) if found else None


def serving(version, *, ours, spec="dsv4", parser="deepseek-v4", **own):
    """The release's own handler of chat requests, over stand-ins or what is `own`; its prompt is text."""
    names = {
        **{"copy": copy, "envs": sys.modules[default_thinking.ENVIRON].envs},
        "MessageProcessingResult": SimpleNamespace,
        "ThinkingMode": SimpleNamespace(THINKING="thinking", CHAT="chat"),
        "process_content_for_template_format": lambda message, *args, **more: {**message, "content": flat(message)},
        "normalize_assistant_tool_call_arguments": lambda message, **more: None,
        "encoding_dsv4": types.ModuleType("encoding_dsv4"),
        **own,
    }
    has_encoder = encoder_of(version) is not None
    exec(encoder_of(version) or "", vars(names["encoding_dsv4"]))
    wanted = METHODS if has_encoder else OF_RECIPE
    methods = {name: take(fetch(version), names, f"{CLASS}.{name}", MODULE) for name in wanted}
    if ours:
        reads = default_thinking.replace_reasoning_of_request(methods["_get_reasoning_from_request"])
        methods["_get_reasoning_from_request"] = reads
    if ours and has_encoder:
        for of in (unchosen_tools, developer_messages, blanks_before_calls):
            methods["_apply_jinja_template"] = of.replace_apply_template(methods["_apply_jinja_template"])
    chat = type("OpenAIServingChat", (), methods)()
    chat.chat_encoding_spec, chat.reasoning_parser, chat._dsv4_reasoning_effort_profile = spec, parser, "preview"
    chat.template_manager = SimpleNamespace(jinja_template_content_format="string", reasoning_config=None)
    chat._reasoning_detector = SimpleNamespace(reasoning_default="explicit_thinking")
    chat.tokenizer_manager = SimpleNamespace(tokenizer=SimpleNamespace(encode=lambda text: text))
    chat._encode_messages = lambda *args, **more: None
    return chat


def prompt(chat, request) -> str:
    given = [tool.model_dump() for tool in request.tools or []] if request.tool_choice != "none" else []
    return chat._apply_jinja_template(request, given or None, False).prompt_ids


def opens_thoughts(version, chat, request) -> bool:
    if since(version, RECIPE_SINCE):
        return chat._thinking_requested(request)
    return prompt(chat, request).endswith("<｜Assistant｜><think>")


@every_release()
def test_the_answers_reader_knows_whether_the_prompt_thinks(version, thinks_by_default):
    """Asked for or by default; SGLang itself does not know of the default."""
    stock, ours, differ = serving(version, ours=False), serving(version, ours=True), []
    for by_default in (False, True):
        thinks_by_default.value = by_default
        for kwargs in (None, {}, {"thinking": True}, {"thinking": False}, {"enable_thinking": False}):
            request = asked(kwargs)
            thinks = opens_thoughts(version, ours, request)
            assert ours._get_reasoning_from_request(request) is thinks
            if stock._get_reasoning_from_request(request) is not thinks:
                differ.append((by_default, kwargs))
    assert differ == [(True, None), (True, {}), (True, {"enable_thinking": False})]


def responses(version, monkeypatch, *, ours, parser="deepseek-v4", spec="dsv4"):
    """The release's own handler of /v1/responses, as far as it decides whether an answer begins with thoughts, and the
    chat request that it makes of an effort."""
    kind = RESPONSES.partition(":")[2]
    function = take(fetch(version), {}, f"{kind}._is_thinking_enabled_for_request", RESPONSES.partition(":")[0])
    names = {"model_validator": lambda **_: lambda function: function, "isinstance": isinstance}
    read = take(fetch(version), names, "ChatCompletionRequest.normalize_reasoning_inputs", default_thinking.PROTOCOL)

    def made(**given):
        return Record(**{"chat_template_kwargs": None, "task": None, **read.__func__(None, given)})

    monkeypatch.setitem(sys.modules, default_thinking.PROTOCOL, SimpleNamespace(ChatCompletionRequest=made))
    function = default_thinking.replace_responses_thinking(function) if ours else function
    handler = SimpleNamespace(reasoning_parser=parser, chat_encoding_spec=spec)
    handler.template_manager = SimpleNamespace(force_reasoning=False, reasoning_config=None)
    handler._reasoning_detector = SimpleNamespace(reasoning_default="explicit_thinking")

    def of(effort):
        reasoning = None if effort == "not said" else SimpleNamespace(effort=effort)
        return function(handler, SimpleNamespace(reasoning=reasoning)), made(reasoning_effort=effort)

    return of


@pytest.mark.parametrize("version", ("0.5.14", "0.5.15", "0.5.15.post1", "0.5.16"))
def test_the_reader_of_responses_knows_whether_the_prompt_thinks(version, thinks_by_default, monkeypatch):
    chat, differ = serving(version, ours=True), []
    stock, ours = (responses(version, monkeypatch, ours=ours) for ours in (False, True))
    for by_default in (False, True):
        thinks_by_default.value = by_default
        for effort in (None, "none", "low", "high"):
            told, request = ours(effort)
            thinks = opens_thoughts(version, chat, asked(request.chat_template_kwargs, reasoning_effort=effort))
            assert told is thinks
            differ += [(by_default, effort)] if stock(effort)[0] is not thinks else []
        assert ours("not said")[0] is by_default
    by_effort = [(False, "low"), (False, "high")] if version == "0.5.16" else []
    assert differ == [*by_effort, (True, None), (True, "low"), (True, "high")]
    for given in ({"parser": None}, {"spec": "dsv32"}):
        assert responses(version, monkeypatch, ours=True, **given)("high")[0] is False
    monkeypatch.setattr(models_served, "has_served_card", lambda: False)
    assert responses(version, monkeypatch, ours=True)("high")[0] is False


@pytest.mark.parametrize("version", ("0.5.17", "0.5.23"))
@pytest.mark.parametrize("is_told", (False, True))
def test_a_grammar_holds_from_the_first_token_where_no_thoughts_are_known(version, is_told):
    """So that the answer is written in the thoughts' place: what SGLang does with what it was told."""
    read_masks, base = [], type("BaseGrammarObject", (), {"__init__": lambda self: None})
    names = {"BaseGrammarObject": base, "super": super}
    matcher = "sglang.srt.utils.token_sequence_matcher"
    names["TokenSequenceMatcher"] = take(fetch(version), {"len": len}, "TokenSequenceMatcher", matcher)
    module = "sglang.srt.constrained.reasoner_grammar_backend"
    made = take(fetch(version), names, "ReasonerGrammarObject", module)
    held = made(SimpleNamespace(fill_vocab_mask=lambda *args: read_masks.append(args)), [7])
    held.maybe_init_reasoning(is_told)
    held.fill_vocab_mask(None, 0)
    assert bool(read_masks) is not is_told


@every_release()
def test_elsewhere_what_is_read_stays_sglangs(version, thinks_by_default, monkeypatch):
    thinks_by_default.value = True
    assert serving(version, ours=True)._get_reasoning_from_request(asked()) is True
    assert serving(version, ours=True)._get_reasoning_from_request(asked(task="title")) is False
    assert serving(version, ours=True, spec="dsv41")._get_reasoning_from_request(asked()) is False
    assert serving(version, ours=True, parser=None)._get_reasoning_from_request(asked()) is False
    monkeypatch.setattr(models_served, "has_served_card", lambda: False)
    assert serving(version, ours=True)._get_reasoning_from_request(asked()) is False


@before_recipe
def test_tools_that_are_not_to_be_called_are_not_in_the_prompt(version, thinks_by_default):
    """Of the request and of its system message; from 0.5.22 on SGLang leaves those of the request out."""
    stock, ours = serving(version, ours=False), serving(version, ours=not since(version, TOOLS_LEFT_OUT_SINCE))
    without = prompt(stock, asked())
    assert "## Tools" not in without
    request = asked(tools=[TOOL], choice="none")
    assert ("clock" in prompt(stock, request)) is not since(version, TOOLS_LEFT_OUT_SINCE)
    if not since(version, TOOLS_LEFT_OUT_SINCE):
        request = asked(tools=[TOOL], choice="none", in_system=[OTHER])
    before = copy.deepcopy(request)
    assert prompt(ours, request) == without and request == before
    if not since(version, TOOLS_LEFT_OUT_SINCE):
        for choice in ("auto", "required", Record(function=Record(name="clock"))):
            chosen = asked(tools=[TOOL], choice=choice)
            assert "clock" in prompt(ours, chosen) and prompt(ours, chosen) == prompt(stock, chosen)


@before_recipe
def test_what_a_developer_says_is_in_the_prompt_as_the_systems(version, thinks_by_default):
    stock, ours = serving(version, ours=False), serving(version, ours=True)
    for tools in (None, [TOOL]):
        for thinking in (False, True):
            of_system = asked({"thinking": thinking}, tools)
            of_developer = asked({"thinking": thinking}, tools, role="developer")
            before = copy.deepcopy(of_developer)
            assert prompt(ours, of_developer) == prompt(ours, of_system) == prompt(stock, of_system)
            assert of_developer == before
            assert ("Be brief." in prompt(stock, of_developer)) is not (thinking and tools is None)
            assert "Be brief." in prompt(ours, of_developer) != prompt(stock, of_developer)


def called(content, calls=True):
    """A turn of `content` and a call of the clock, answered."""
    call = Record(id="c", type="function", function=Record(name="clock", arguments='{"zone": 1}'))
    rest = {"tools": None, "reasoning_content": None, "tool_call_id": None}
    turn = Record(role="assistant", content=content, tool_calls=[call] if calls else None, **rest)
    result = Record(role="tool", content="23:59", **{**rest, "tool_call_id": "c"})
    request = asked(tools=[TOOL])
    request.messages += [turn, result] if calls else [turn, Record(role="user", content="And now?", tools=None)]
    return request


def parts(*texts):
    return [Record(type="text", text=text) for text in texts]


BLANKS = ("Look.\n\n", "Look.\n\n\n\n", parts("Look.\n\n"), parts("Look.", "\n\n\n"), parts("Look. ", "\n", ""))
blanks_told = pytest.mark.parametrize("version", [v for v in RELEASES if not since(v, BLANKS_LEFT_OUT_SINCE)])


@blanks_told
def test_words_in_front_of_calls_end_without_blanks(version, thinks_by_default):
    """As a stream has told them: once more than the encoder writes them; test_wheel_tool_strings.py has the streams."""
    stock, ours = serving(version, ours=False), serving(version, ours=True)
    wanted = prompt(stock, called("Look."))
    assert "Look.\n\n<｜DSML｜tool_calls>" in wanted
    for content_ in BLANKS:
        before = copy.deepcopy(request := called(content_))
        assert prompt(ours, request) == wanted != prompt(stock, request)
        assert request == before
    for content_ in ("\n\n", parts("\n", "\n"), None, ""):
        assert prompt(ours, called(content_)) == prompt(stock, called(""))


@blanks_told
def test_all_other_words_keep_their_blanks(version, thinks_by_default, monkeypatch):
    stock, ours = serving(version, ours=False), serving(version, ours=True)
    for request in (called("Look.\n\n", calls=False), called(parts("\n a", "b")), called("\n  Look.")):
        assert prompt(ours, request) == prompt(stock, request)
    monkeypatch.setattr(models_served, "has_served_card", lambda: False)
    for content_ in BLANKS:
        assert prompt(ours, called(content_)) == prompt(stock, called(content_))


HISTORY_OF_ITS_OWN_SINCE, THOUGHTS_SINCE = "0.5.19", "0.5.14"
with_marks = pytest.mark.parametrize(
    "version", [v for v in BEFORE_RECIPE if since(v, THOUGHTS_SINCE) and not since(v, HISTORY_OF_ITS_OWN_SINCE)]
)
MARKS = "<think>{}\n</think>"


def block(kind, **more):
    return Record(type=kind, **{"text": None, "source": None, "id": None, **more})


def conversation(thinks=True):
    """Over /v1/messages: a turn with thoughts and a call, one with thoughts and text, one without."""
    of_turns = (("I look.",), ("It is late.", "Very."))
    thoughts = [[block("thinking", thinking=text) for text in texts if thinks] for texts in of_turns]
    call = block("tool_use", name="clock", input={"zone": 1})
    call.id = "call_1"
    turns = [
        ("user", "What time is it?"),
        ("assistant", [*thoughts[0], block("text", text="Let me see."), call]),
        ("user", [block("tool_result", tool_use_id="call_1", content="23:59")]),
        ("assistant", [*thoughts[1], block("text", text="Nearly midnight.")]),
        *(("user", "Thanks."), ("assistant", "You're welcome."), ("user", "And now?")),
    ]
    rest = dict.fromkeys(
        ("system", "temperature", "top_p", "top_k", "stop_sequences", "thinking", "output_config", "betas", "tools")
    )
    messages = [Record(role=role, content=content) for role, content in turns]
    more = {"tool_choice": None, "pd_routing_kwargs": dict}
    return Record(messages=messages, model="m", max_tokens=9, stream=False, **rest, **more)


def over_messages(version, request, *, ours, spec="dsv4"):
    """The chat API's messages of a request, by the release's own conversion."""
    names = {"json": json, "ChatCompletionRequest": lambda **given: Record(**given), "ValueError": ValueError}
    module, _, its_class = MESSAGES.partition(":")
    method = take(fetch(version), names, f"{its_class}._convert_to_chat_completion_request", module)
    convert = thought_history.replace_convert(method) if ours else method
    names["ChatCompletionRequest"] = lambda messages, **given: Record(
        messages=[Record(**{"content": None, "tool_calls": None, **one}) for one in messages], tools=None, **given
    )
    made = type("AnthropicServing", (), {"_convert_to_chat_completion_request": convert})()
    made._merge_inline_system = True
    made.openai_serving_chat = SimpleNamespace(chat_encoding_spec=spec, wrap_reasoning_history=MARKS.format)
    before = copy.deepcopy(request)
    found = made._convert_to_chat_completion_request(request).messages
    assert request == before
    return found


@with_marks
def test_thoughts_that_come_back_are_the_turns_own(version, thinks_by_default, monkeypatch):
    plain = over_messages(version, conversation(thinks=False), ours=True)
    stock, found = (over_messages(version, conversation(), ours=ours) for ours in (False, True))
    of_turns = [flat(vars(message)) for message in stock if message.role == "assistant"]
    assert of_turns[0] == f"{MARKS.format('I look.')} Let me see." and "<think>" in of_turns[1]
    given = [getattr(message, "reasoning_content", None) for message in found if message.role == "assistant"]
    assert given == ["I look.", "It is late.\nVery.", None]
    for message in found:
        vars(message).pop("reasoning_content", None)
    assert found == plain and not any("think>" in flat(vars(message)) for message in plain if message.content)
    assert over_messages(version, conversation(), ours=True, spec="other") == stock
    monkeypatch.setattr(models_served, "has_served_card", lambda: False)
    assert over_messages(version, conversation(), ours=True) == stock


def test_a_conversion_that_makes_other_turns_is_sglangs():
    handed = []

    def original(self, request):
        handed.append(request)
        return Record(messages=[Record(role="assistant")])

    serves = SimpleNamespace(openai_serving_chat=SimpleNamespace(chat_encoding_spec="dsv4"))
    request = conversation()
    made = thought_history.replace_convert(original)(serves, request)
    assert handed[-1] is request and made == original(serves, request)


@with_marks
def test_the_prompt_is_the_chat_apis(version, thinks_by_default):
    """With tools, where thoughts of all turns are in it."""
    chat, thinking = serving(version, ours=True), {"thinking": True}

    def of(messages):
        request = asked(thinking, [TOOL])
        request.messages = [Record(role="system", content="", tools=None), *copy.deepcopy(messages)]
        for message in request.messages:
            if isinstance(message.content, list):
                message.content = [Record(**part) for part in message.content]
        return prompt(chat, request)

    stock, found = (of(over_messages(version, conversation(), ours=ours)) for ours in (False, True))
    assert "<｜Assistant｜><think></think><think>I look.\n</think>" in stock
    assert "<｜Assistant｜><think>I look.</think>Let me see." in found and "</think><think>" not in found


@every_release()
def test_which_releases_write_thoughts_into_the_text(version):
    text = content(fetch(version), f"{MESSAGES.partition(':')[0].replace('.', '/')}.py")
    assert ("_convert_assistant_thinking_blocks" in text) is since(version, THOUGHTS_SINCE)
    assert ("supports_native_reasoning_history()" in text) is since(version, HISTORY_OF_ITS_OWN_SINCE)


def test_the_prompts_of_others_stay_sglangs(thinks_by_default, monkeypatch):
    monkeypatch.setattr(models_served, "has_served_card", lambda: False)
    for request in (asked(tools=[TOOL], choice="none"), asked(role="developer")):
        assert prompt(serving("0.5.17", ours=True), request) == prompt(serving("0.5.17", ours=False), request)


@before_recipe
def test_which_levels_a_release_has(version):
    """docs/mended.md: the first ones, then those of the checkpoint; from 0.5.23 on deepseek-recipe's."""
    text, both = encoder_of(version), since(version, LEVELS_OF_THE_CHECKPOINT_SINCE)
    assert "Absolute maximum" in text
    assert ("Beyond maximum" in text) is ("reasoning_effort_profile" in text) is both


def of_adapter(name, names):
    module, _, its_class = RECIPE.partition(":")
    return take(fetch(RECIPE_SINCE), names, f"{its_class}.{name}", module)


def recipe(*, default=None, levels_of=None, spec="dsv4"):
    """0.5.23's adapter as a server makes it for the checkpoint `levels_of`: effort -> what recipe is given."""
    names = {"isinstance": isinstance, "_numeric_effort": lambda effort: effort}
    method = of_adapter("_encode", names)
    made = type("Adapter", (), {"_encode": effort_levels.replace_encode(method)})()
    made._default_effort, made._spec = default, spec
    made.deepseek_recipe = SimpleNamespace(encode=lambda body, **more: body.get("reasoning_effort"))
    context = SimpleNamespace(chat_encoding_spec=spec, model_path=levels_of, revision=None)
    if levels_of:
        assert effort_levels.replace_build(lambda ctx: made)(context) is made
    return lambda effort: made._encode({}, effort=effort, task=None, image_urls=[])


GIVEN = (None, "none", "minimal", "low", "medium", "high", "xhigh", "max")
FLASH, LATER = effort_levels.FIRST[0], "deepseek-ai/DeepSeek-V4-Flash-0731"


def test_the_first_checkpoints_have_their_own_levels():
    """recipe's "low" has no text, "high" the first checkpoints' greatest, "max" one of the later ones alone; what it
    is not told is "high"."""
    stock = recipe()
    assert [stock(effort) for effort in GIVEN] == [None, None, *GIVEN[2:]]
    ours = recipe(levels_of=FLASH)
    assert [ours(effort) for effort in GIVEN] == [*["low"] * 7, "high"] and ours("unheard of") == "unheard of"
    for default, meant in ((None, "low"), ("low", "low"), ("high", "low"), ("max", "high")):
        ours = recipe(levels_of=FLASH, default=default)
        assert [ours(None), ours("none"), ours("high"), ours("max")] == [meant, meant, "low", "high"]


def test_other_checkpoints_keep_recipes_levels(monkeypatch):
    stock = recipe()
    for ours in (recipe(levels_of=LATER), recipe(levels_of=FLASH, spec="dsv41")):
        assert [ours(effort) for effort in GIVEN] == [stock(effort) for effort in GIVEN]
    monkeypatch.setattr(models_served, "has_served_card", lambda: False)
    ours = recipe(levels_of=FLASH)
    assert [ours(effort) for effort in GIVEN] == [stock(effort) for effort in GIVEN]


def test_a_server_without_a_tokenizer_has_no_adapter():
    assert effort_levels.replace_build(lambda ctx: None)(SimpleNamespace(chat_encoding_spec="dsv4")) is None


@pytest.mark.parametrize(
    ("text", "is_first"),
    [
        ('REASONING_EFFORT_MAX = (\n    "Absolute maximum"\n)\n', True),
        ('import re\n\nREASONING_EFFORT_MAX: str = "Absolute maximum"\n', True),
        ('REASONING_EFFORT_PROMPTS: Dict[str, str] = {"low": ""}\nDEFAULT_REASONING_EFFORT = "low"\n', False),
        ('REASONING_EFFORT_MAX = "..."\nREASONING_EFFORT_PROMPTS = {"low": "", "max": REASONING_EFFORT_MAX}\n', False),
        ("def encode():\n    REASONING_EFFORT_MAX = 1\n", False),
        ("", False),
    ],
)
def test_a_checkpoint_is_told_by_its_encoder(text, is_first, tmp_path, in_cache):
    """In its folder, whatever that is called, and in the Hub's cache, whatever its name."""
    encoder = tmp_path / effort_levels.ENCODER
    encoder.parent.mkdir()
    encoder.write_text(text)
    assert effort_levels.has_first_levels(str(tmp_path)) is is_first
    in_cache |= {LATER: str(encoder), "someone/DeepSeek-V4-Flash-NVFP4": str(encoder), FLASH: object()}
    assert [effort_levels.has_first_levels(name) for name in in_cache] == [is_first, is_first, True]
    assert effort_levels.has_first_levels("someone/else") is False
    (tmp_path / "empty").mkdir()
    assert effort_levels.has_first_levels(str(tmp_path / "empty")) is False


OBJECT, LIST, WORDS = {"type": "object"}, {"type": "array"}, {"enum": ["yes", "no"]}


def reads_json(schema=None, kind="json_schema", *, ours, spec="dsv4") -> bool:
    """Whether 0.5.23 has recipe look for the JSON in an answer."""
    names = {"JSON_RESPONSE_FORMATS": ("json_object", "json_schema"), "_stop_strings": lambda stop: []}
    names["DeepSeekRecipeOutputParser"] = lambda recipe, **given: given["parse_json_output"]
    method = of_adapter("_new_output_parser", names)
    kept = json_answers.replace_new_output_parser(method) if ours else method
    made = type("Adapter", (), {"_new_output_parser": kept, "_spec": spec, "_separate_reasoning": True})()
    made.deepseek_recipe = SimpleNamespace(parse_start=lambda **given: None)
    made._hooks = SimpleNamespace(
        thinking_requested=lambda request: False, tool_call_parsing_active=lambda request: False
    )
    asks = Record(type=kind, json_schema=None if schema is None else Record(schema_=schema))
    request = asked(response_format=None if kind is None else asks, separate_reasoning=True, stream_reasoning=True)
    before = copy.deepcopy(request)
    found = made._new_output_parser(request)
    assert request == before
    return found


@pytest.mark.parametrize(
    ("schema", "kind", "stock", "ours"),
    [
        *((schema, "json_schema", True, True) for schema in (OBJECT, LIST)),
        *((schema, "json_schema", True, False) for schema in (WORDS, {"type": "string"}, {"type": ["object", "null"]})),
        *(({"anyOf": [OBJECT, {"type": "null"}]}, "json_schema", True, False), (None, "json_schema", True, False)),
        *((None, "json_object", True, True), (None, "text", False, False), (None, None, False, False)),
    ],
)
def test_an_answer_in_json_is_looked_for_where_it_is_in_brackets(schema, kind, stock, ours, monkeypatch):
    assert reads_json(schema, kind, ours=False) is stock
    assert reads_json(schema, kind, ours=True) is ours
    assert reads_json(schema, kind, ours=True, spec="dsv41") is stock
    monkeypatch.setattr(models_served, "has_served_card", lambda: False)
    assert reads_json(schema, kind, ours=True) is stock


@every_release(RECIPE_SINCE)
def test_the_adapter_is_made_where_ours_looks(version):
    """By the module's name at the call, for which a replaced function counts; what it is made of knows the model."""
    text = content(fetch(version), f"{MODULE.replace('.', '/')}.py")
    assert "return chat_encoding_adapters.build_chat_encoding_adapter(" in text
    assert "model_path=self.tokenizer_manager.model_path," in text and "revision=get_model().revision," in text
