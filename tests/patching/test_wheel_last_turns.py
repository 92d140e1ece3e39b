"""A conversation that ends with a turn of the assistant's: each release's own way to the prompt, and what it takes the
answer for, beside ours and beside DeepSeek's own conversion (deepseek-recipe)."""

import copy
import json
import sys
import types
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches import models_served, prompt_messages
from deepseek_v4_sm120.sglang_patches.fixes import assistant_marks, default_thinking, last_turns
from deepseek_v4_sm120.sglang_patches.rows.http_server import CHAT, MESSAGES, READER, RECIPE
from deepseek_v4_sm120.sglang_patches.table import TABLE
from tests.patching import test_wheel_chat_requests as chat_requests
from tests.patching import test_wheel_turns
from tests.patching.test_wheel_chat_requests import Record, before_recipe, block, parts, prompt, serving
from tests.patching.test_wheel_system_reminders import request as over_messages
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import content, every_release, fetch

RECIPE_SINCE = "0.5.23"
MODULE, _, CLASS = CHAT.partition(":")
CALLS = [{"id": "c", "type": "function", "function": {"name": "clock", "arguments": '{"zone": 1}'}}]
TOOL = {"type": "function", "function": {"name": "clock", "description": "", "parameters": {"type": "object"}}}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "23:59"}
USER, END = {"role": "user", "content": "U"}, "<｜end▁of▁sentence｜>"
TEXT, BOTH = {"content": "Sure, "}, {"content": "Sure, ", "reasoning_content": "Hm."}
THOUGHTS = {"content": "", "reasoning_content": "Hm."}
NOTHING, CALLED = {"content": ""}, {"content": "I look.", "reasoning_content": "Hm.", "tool_calls": CALLS}
TURNS, EITHER = (TEXT, BOTH, THOUGHTS, NOTHING), (False, True)

pytestmark = pytest.mark.usefixtures("served_card", "thinks_by_default")
thinks_by_default, recipe = chat_requests.thinks_by_default, test_wheel_turns.recipe


def read(value):
    """A JSON request's part as SGLang has it."""
    if isinstance(value, dict):
        return Record(**{name: read(one) for name, one in value.items()})
    return [read(one) for one in value] if isinstance(value, list) else value


def message(given: dict) -> Record:
    return read({"tools": None, "tool_calls": None, "reasoning_content": None, "tool_call_id": None, **given})


def asked(turn, *, goes_on, thinking, tools=False, before=(USER,), **more):
    given = [*before, {"role": "assistant", **turn}]
    request = chat_requests.asked({"thinking": thinking}, read([TOOL]) if tools else None, **more)
    request.messages, request.continue_final_message = [message(one) for one in given], goes_on
    return request


def text_of(parts_) -> str:
    return "\n\n".join(part.text for part in parts_) if isinstance(parts_, list) else parts_


def chat(version, *, ours, marks=True):
    """The release's own handler, with ours around it. marks: with assistant_marks, too."""
    made = serving(version, ours=False)
    kind, names = type(made), type(made)._apply_jinja_template.__globals__
    append = "_append_assistant_prefix_to_prompt_ids"
    setattr(kind, append, take(fetch(version), {}, f"{CLASS}.{append}", MODULE))
    made.tokenizer_manager.tokenizer.bos_token_id = None
    encoding = names["encoding_dsv4"]
    if marks:
        encoding.render_message = assistant_marks.replace_render_message(encoding.render_message)
    if ours:
        encoding.encode_messages = last_turns.replace_encode(encoding.encode_messages)
        kind._handle_last_assistant_message = last_turns.replace_last(kind._handle_last_assistant_message)
        thinks = default_thinking.replace_reasoning_of_request(kind._get_reasoning_from_request)
        kind._get_reasoning_from_request = last_turns.replace_reasoning(thinks)
    return made


@pytest.fixture
def converted(recipe):
    """body -> (the prompt from the user's words on, where its answer begins), by recipe."""
    renderer = types.ModuleType("renderer")
    exec(content(fetch(RECIPE_SINCE), test_wheel_turns.RENDERER), vars(renderer))

    def made(body):
        given = {**renderer.pre_normalize(body), "model": renderer.MODEL_NAMES["dsv4"]}
        found = recipe.ChatCompletionRequest(given).convert(recipe.ConversionOptions())
        text = recipe.DeepseekV4Encoding().render_conversation(found.conversation).prompt
        return text, found.parsing_options.thinking_initial_stage

    made.renderer = renderer
    return made


def tail(text: str) -> str:
    return text[text.index("<｜User｜>") :]


def told(chat_, version, request, answer="more."):
    """(thoughts, text) of an answer, by what the release's handler tells its reader."""
    module = READER.partition(":")[0]
    names = {"StreamingParseResult": lambda normal_text="", reasoning_text="": (reasoning_text, normal_text)}
    reader = take(fetch(version), names, "BaseReasoningFormatDetector", module)
    before = {"continue_final_message": True, "previous_content": request.messages[-1].content}
    thinks = chat_._get_reasoning_from_request(request)
    made = reader("<think>", "</think>", force_reasoning=thinks, **(before if request.continue_final_message else {}))
    return getattr(made, "_detect_and_parse_impl", made.detect_and_parse)(answer)


@before_recipe
@pytest.mark.parametrize("thinking", EITHER)
def test_the_answer_goes_on_behind_closed_thoughts(version, thinking, converted):
    stock, ours = chat(version, ours=False), chat(version, ours=True)
    for turn in TURNS:
        request = asked(turn, goes_on=True, thinking=thinking)
        before = copy.deepcopy(request)
        body = {"messages": [USER, {"role": "assistant", **turn}], "thinking": thinking, "continue_final_message": True}
        wanted, _ = converted(body)
        found = prompt(ours, request)
        assert tail(found) == tail(wanted) and request == before
        within = thinking and not turn["content"]
        assert told(ours, version, request) == (("more.", "") if within else ("", "more."))
        differs = thinking and turn is not NOTHING
        assert (tail(prompt(stock, request)) != tail(wanted)) is differs
        assert (told(stock, version, request) == ("more.", "")) is thinking
        assert prompt(ours, asked(turn, goes_on=True, thinking=thinking, tools=True)).endswith(tail(wanted))


@before_recipe
@pytest.mark.parametrize("thinking", EITHER)
def test_a_last_turn_stands_and_another_one_is_asked_for(version, thinking, converted):
    """With tools, where recipe keeps all thoughts; without them SGLang's encoder keeps those behind the user's."""
    with_marks, without, stock = (chat(version, ours=ours, marks=marks) for ours, marks in ((1, 1), (1, 0), (0, 1)))
    asks = f"{END}<｜Assistant｜>{'<think>' if thinking else '</think>'}"
    for turn in TURNS:
        request = asked(turn, goes_on=False, thinking=thinking, tools=True)
        before = copy.deepcopy(request)
        body = {"messages": [USER, {"role": "assistant", **turn}], "thinking": thinking, "tools": [TOOL]}
        wanted, _ = converted(body)
        found = [prompt(one, request) for one in (with_marks, without)]
        assert tail(found[0]) == tail(found[1]) == tail(wanted) and found[0].endswith(asks) and request == before
        assert END not in prompt(stock, request) and prompt(stock, request).count("<｜Assistant｜>") == 1
        no_tools = prompt(with_marks, asked(turn, goes_on=False, thinking=thinking))
        assert no_tools.endswith((turn["content"] or "</think>") + asks)
    request = asked(CALLED, goes_on=False, thinking=thinking, tools=True)
    found = prompt(with_marks, request)
    assert '<｜DSML｜invoke name="clock">' in found and found.endswith(asks)
    assert ("Hm.</think>I look." in found) is thinking
    assert 'invoke name="clock"' not in prompt(stock, request)


@before_recipe
def test_a_conversation_of_one_turn(version):
    """SGLang looks for a first message that there is none of."""
    alone = asked(TEXT, goes_on=True, thinking=False, before=())
    assert prompt(chat(version, ours=True), alone).endswith("<｜Assistant｜></think>Sure, ")
    with pytest.raises(IndexError):
        prompt(chat(version, ours=False), alone)


@before_recipe
def test_text_with_marks_and_tasks_stay_sglangs(version):
    stock, ours = chat(version, ours=False), chat(version, ours=True)
    for text in ("<think>Hm.", "<think>Hm.</think>Sure,", "Hm.</think>Sure,"):
        request = asked({"content": text}, goes_on=True, thinking=True)
        assert prompt(ours, request) == prompt(stock, request)
        assert told(ours, version, request)[0 if "</think>" not in text else 1] == "more."
        assert ours._get_reasoning_from_request(request) is ("</think>" not in text)
    for goes_on in EITHER:
        request = asked(BOTH, goes_on=goes_on, thinking=True, task="title")
        found = [
            one._handle_last_assistant_message([m.model_dump() for m in request.messages], request)
            for one in (stock, ours)
        ]
        assert found[0] == found[1]


@before_recipe
def test_on_other_cards_all_stays_sglangs(version, monkeypatch):
    stock, ours = chat(version, ours=False), chat(version, ours=True)
    for is_ours in EITHER:
        monkeypatch.setattr(models_served, "has_served_card", lambda is_ours=is_ours: is_ours)
        for goes_on in EITHER:
            request = asked(BOTH, goes_on=goes_on, thinking=True)
            assert (prompt(ours, request) == prompt(stock, request)) is not is_ours
            thinks = [one._get_reasoning_from_request(request) for one in (stock, ours)]
            assert thinks == [True, not (is_ours and goes_on)]
        encode = last_turns.replace_encode(lambda messages, thinking_mode: f"prompt{END}")
        assert encode([{"role": "assistant"}], "chat") == f"prompt{END}" + "<｜Assistant｜></think>" * is_ours


@every_release()
def test_a_grammar_does_not_wait_for_thoughts_that_are_closed(version, thinks_by_default):
    """Whatever makes the prompt: asked for, or by the server's default."""
    thinks = serving(version, ours=True)._get_reasoning_from_request
    kind = type("Chat", (), {"_get_reasoning_from_request": last_turns.replace_reasoning(thinks.__func__)})
    made = kind()
    vars(made).update(vars(thinks.__self__))
    for by_default in EITHER:
        thinks_by_default.value = by_default
        for turn in (*TURNS, {"content": parts("Sure, ", "b")}, {"content": None}, {"content": parts("")}):
            request = asked(turn, goes_on=True, thinking=True)
            request.chat_template_kwargs = None if by_default else {"thinking": True}
            assert thinks(request) is True
            assert made._get_reasoning_from_request(request) is (text_of(read(turn["content"]) or "") == "")
            request.continue_final_message = False
            assert made._get_reasoning_from_request(request) is True
    without = asked(TEXT, goes_on=True, thinking=False)
    assert made._get_reasoning_from_request(without) is False


def test_ours_is_asked_behind_default_thinking():
    names = [patch.name for patch in TABLE.patches]
    assert names.index("default_thinking") < names.index("last_turns")
    assert names.index("thought_history") < names.index("last_turns")


class Wire(Record):
    """A request, or a part of one, as pydantic dumps what was set."""

    def model_dump(self, **_):
        return {name: chat_requests.plain(value) for name, value in vars(self).items() if value is not None}


def test_a_last_turn_of_no_words_or_of_a_task_is_sglangs(monkeypatch):
    """Such as one of a call alone, which a client asks to have gone on with."""
    monkeypatch.setattr(last_turns, "answers_for_ours", lambda serving: True)
    of_words = last_turns.replace_last(lambda serving, messages, request: "SGLang's")
    thinks = last_turns.replace_reasoning(lambda serving, request: True)
    for words, task in ((None, None), ("Words.", "title")):
        turn = SimpleNamespace(role="assistant", content=words)
        request = SimpleNamespace(messages=[turn], task=task, continue_final_message=True)
        assert of_words(None, [vars(turn)], request) == "SGLang's" and thinks(None, request) is True


def wire(value):
    if isinstance(value, list):
        return [wire(one) for one in value]
    return Wire(**{n: wire(one) for n, one in vars(value).items()}) if isinstance(value, Record) else value


@pytest.fixture
def adapter(converted, recipe, monkeypatch):
    """(version, ours) -> request -> (its prompt from the user's words on, where its answer's reader begins)"""
    module, _, its_class = RECIPE.partition(":")
    monkeypatch.setitem(sys.modules, prompt_messages.PROTOCOL, SimpleNamespace(**{prompt_messages.TEXT_PART: Wire}))
    renderer = converted.renderer
    renderer.load_deepseek_recipe = lambda: recipe
    of_recipe = SimpleNamespace(model=renderer.MODEL_NAMES["dsv4"], _options=recipe.ConversionOptions())
    start = renderer.DeepSeekRecipe.parse_start

    def made(version, *, ours, spec="dsv4"):
        given = {"DeepSeekRecipeOutputParser": lambda recipe, *, thinking_stage, **_: thinking_stage}
        given |= {"_stop_strings": lambda stop: [], "ImageData": None, "isinstance": isinstance}
        for name in ("_null_content_as_empty", "_trailing_assistant_turn"):
            take(fetch(version), given, name, module)
        names = ("encode_messages", "_new_output_parser")
        methods = {name: take(fetch(version), given, f"{its_class}.{name}", module) for name in names}
        for name, replace in zip(names, OF_ADAPTER, strict=True):
            methods[name] = replace(methods[name]) if ours else methods[name]
        one = type("Adapter", (), methods)()
        one.deepseek_recipe = SimpleNamespace(encode_text=str, parse_start=lambda **more: start(of_recipe, **more))
        one._encode = lambda body, **_: converted(body)[0]
        one._spec, one._separate_reasoning = spec, True
        one._hooks = SimpleNamespace(
            thinking_requested=lambda request: request.chat_template_kwargs.thinking,
            tool_call_parsing_active=lambda request: True,
        )

        def ask(request):
            request = wire(request)
            request.chat_template_kwargs = SimpleNamespace(**request.chat_template_kwargs)
            before, thinking = copy.deepcopy(request), request.chat_template_kwargs.thinking
            tools = [tool.model_dump() for tool in request.tools] if request.tools else None
            found = one.encode_messages(messages=[], request=request, tools=tools, thinking=thinking, image_data=[])
            stage = one._new_output_parser(request)
            assert request == before
            return tail(found), stage

        return ask

    return made


OF_ADAPTER = (last_turns.replace_encode_messages, last_turns.replace_new_output_parser)
MORE = {"response_format": None, "separate_reasoning": True, "stream_reasoning": True}
HISTORY = (USER, {"role": "assistant", "content": "", "tool_calls": CALLS}, RESULT)


@every_release(RECIPE_SINCE)
@pytest.mark.parametrize("thinking", EITHER)
def test_recipe_goes_on_with_tools_and_calls_too(version, thinking, adapter, converted, recipe):
    """Where it refuses that itself; without them ours has its prompt, and its reader's beginning."""
    stock, ours = adapter(version, ours=False), adapter(version, ours=True)
    for turn in (*TURNS, {"content": None, "reasoning_content": "Hm."}, {"content": parts("Sure, ")} | BOTH):
        plain = asked(turn, goes_on=True, thinking=thinking, **MORE)
        assert ours(plain) == stock(plain)
        in_parts = asked({**turn, "content": parts("Sure, ", "b")}, goes_on=True, thinking=thinking, **MORE)
        in_one = asked({**turn, "content": "Sure, \n\nb"}, goes_on=True, thinking=thinking, **MORE)
        assert ours(in_parts) == ours(in_one) == stock(in_one)
        assert (stock(in_parts)[1] != stock(in_one)[1]) is thinking
        with_tools = asked(turn, goes_on=True, thinking=thinking, tools=True, **MORE)
        with pytest.raises(recipe.ConversionError, match="should not be used with prefix"):
            stock(with_tools)
        assert ours(with_tools) == ours(plain)
        assert ours(asked(turn, goes_on=True, thinking=thinking, tools=True, before=HISTORY, **MORE))[0].endswith(
            tail(ours(plain)[0]).removeprefix("<｜User｜>U")
        )
        found, stage = ours(asked(turn, goes_on=True, thinking=thinking, before=HISTORY, **MORE))
        opened = "<think>" if thinking and not turn["content"] else "</think>"
        assert found.endswith("</tool_result><｜Assistant｜>" + opened + text_of(read(turn["content"] or "")))
        assert stage == ours(plain)[1]


@every_release(RECIPE_SINCE)
@pytest.mark.parametrize("thinking", EITHER)
def test_recipe_is_given_the_turn_as_it_stands(version, thinking, adapter, converted, recipe):
    stock, ours = adapter(version, ours=False), adapter(version, ours=True)
    for tools in EITHER:
        for turn in TURNS:
            request = asked(turn, goes_on=False, thinking=thinking, tools=tools, **MORE)
            body = {"messages": [USER, {"role": "assistant", **turn}], "thinking": thinking}
            wanted, stage = converted(body | ({"tools": [TOOL]} if tools else {}))
            assert ours(request) == (tail(wanted), stage if thinking else None)
            assert END in tail(wanted) and END not in stock(request)[0]
        called = asked(CALLED, goes_on=False, thinking=thinking, tools=tools, **MORE)
        assert "clock" not in stock(called)[0]
        with pytest.raises(recipe.ConversionError, match="must be followed by tool messages"):
            ours(called)


@every_release(RECIPE_SINCE)
def test_all_other_requests_of_recipes_stay_sglangs(version, adapter, monkeypatch):
    others = [asked(BOTH, goes_on=False, thinking=True, task="title", **MORE)]
    others += [asked(BOTH, goes_on=True, thinking=True, task="title", **MORE)]
    ends_with_user = asked(BOTH, goes_on=False, thinking=True, **MORE)
    ends_with_user.messages.append(message(USER))
    stock, ours = adapter(version, ours=False), adapter(version, ours=True)
    for request in (*others, ends_with_user):
        assert ours(request) == stock(request)
    last = asked(BOTH, goes_on=False, thinking=True, **MORE)
    assert ours(last) != stock(last) == adapter(version, ours=True, spec="dsv41")(last)
    monkeypatch.setattr(models_served, "has_served_card", lambda: False)
    assert ours(last) == stock(last)


def over_anthropic(version, *turns, ours, spec="dsv4"):
    """(role, text, whether the answer goes on) of the last message, by the release's own conversion."""
    module, _, its_class = MESSAGES.partition(":")
    names = {"json": json, "ValueError": ValueError, "BaseModel": Record}
    take(fetch(version), names, "_extract_system_text", module)
    convert = take(fetch(version), names, f"{its_class}._convert_to_chat_completion_request", module)
    names["ChatCompletionRequest"] = lambda messages, **given: Record(
        messages=[message({"content": None, **one}) for one in messages], tools=None, continue_final_message=False
    )
    method = last_turns.replace_convert(convert) if ours else convert
    made = type("AnthropicServing", (), {"_convert_to_chat_completion_request": method})()
    made._merge_inline_system = True
    made.openai_serving_chat = SimpleNamespace(chat_encoding_spec=spec, supports_native_reasoning_history=lambda: True)
    request = over_messages(*turns, system=None)
    before = copy.deepcopy(request)
    found = made._convert_to_chat_completion_request(request)
    assert request == before
    last = found.messages[-1]
    return last.role, last.content, found.continue_final_message


TEXTS, CALL = [block("text", text="a"), block("text", text="b")], block("tool_use", name="clock", input={})


@every_release()
def test_over_anthropics_api_the_answer_goes_on(version, monkeypatch):
    asks = ("user", "U")
    for given, text in (("{", "{"), ([TEXTS[0]], "a"), (TEXTS, "a\n\nb"), ("", "")):
        turns = asks, ("assistant", given)
        assert over_anthropic(version, *turns, ours=True) == ("assistant", text, True)
        stock = over_anthropic(version, *turns, ours=False)
        assert not stock[2] and over_anthropic(version, *turns, ours=True, spec="other") == stock
    for turns in ([asks], [asks, ("assistant", [TEXTS[0], CALL])], [asks, ("assistant", [CALL])]):
        assert over_anthropic(version, *turns, ours=True) == over_anthropic(version, *turns, ours=False)
    monkeypatch.setattr(models_served, "has_served_card", lambda: False)
    assert not over_anthropic(version, asks, ("assistant", "{"), ours=True)[2]
