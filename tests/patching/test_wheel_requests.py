"""Requests that are refused or ended at the wrong place, and what of an answer's numbers is told: each release's own
code on the CPU, beside ours."""

import asyncio
import copy
import random
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches.fixes import (
    echoed_items,
    empty_stops,
    prompts_aside,
    response_errors,
    sampled_states,
    strict_schemas,
    token_logprobs,
)
from deepseek_v4_sm120.sglang_patches.rows.http_server import (
    CHAT,
    MESSAGES,
    OPENAI,
    RECIPE,
    RESPONSES,
    RESPONSES_REQUEST,
    TOKENIZER_MANAGER,
)
from tests.patching.test_wheel_answers import Record
from tests.patching.test_wheel_turns import RENDERER, handler, recipe  # noqa: F401
from tests.patching.test_wheel_wo_a import definition, take
from tests.patching.wheels import content, every_release, fetch, since

pytestmark = pytest.mark.usefixtures("served_card")

MANAGER = TOKENIZER_MANAGER.partition(":")[0]


# ---- empty_stops


def normalized(version, stop, regex=None, *, ours=True):
    names = {"get_max_seq_length": len, "MAX_STOP_COUNT": 9, "MAX_STOP_REGEX_COUNT": 9, "MAX_STOP_REGEX_LEN": 9}
    names["raise_if_tokenizer_required"] = lambda *_: None
    method = take(fetch(version), names, "SamplingParams.normalize", "sglang.srt.sampling.sampling_params")
    made = SimpleNamespace(stop_strs=copy.copy(stop), stop_regex_strs=copy.copy(regex), min_new_tokens=0)
    (empty_stops.replace_normalize(method) if ours else method)(
        made, SimpleNamespace(encode=lambda text, **_: list(text))
    )
    return made


def ends(version, made) -> bool:
    """Whether the stops end an answer of one token."""
    names = {"FINISH_MATCHED_STR": lambda **of: of, "FINISHED_MATCHED_REGEX": lambda **of: of, "re": __import__("re")}
    method = take(fetch(version), names, "Req._check_str_based_finish", "sglang.srt.managers.schedule_batch")
    req = SimpleNamespace(sampling_params=made, tail_str=lambda *_: "Hello", decoded_text="")
    req._locate_str_stop_finished_len = req._locate_regex_stop_finished_len = lambda *_, **__: 1
    return bool(method(req))


@every_release()
def test_an_empty_stop_ends_nothing(version):
    for stop, regex in (("", None), ([""], None), (["", "x"], None), (None, [""])):
        stock, ours = (normalized(version, stop, regex, ours=of) for of in (False, True))
        assert "" in [*stock.stop_strs, *stock.stop_regex_strs]  # so the row is needed
        assert "" not in [*ours.stop_strs, *ours.stop_regex_strs]
    for stop in (None, "l", ["l"], ["x", "l"], []):
        stock, ours = (vars(normalized(version, stop, ["o"], ours=of)) for of in (False, True))
        assert ours == stock
    assert normalized(version, ["", "x"]).stop_strs == ["x"] and not normalized(version, "").stop_strs


@pytest.mark.parametrize("version", ("0.5.12", "0.5.23"))
def test_what_it_would_end(version):
    for stop, regex in (([""], None), (["", "x"], None), (None, [""])):
        assert ends(version, normalized(version, stop, regex, ours=False))
        assert not ends(version, normalized(version, stop, regex))


def test_elsewhere_an_empty_stop_stays(elsewhere):
    assert normalized("0.5.23", [""]).stop_strs == [""]


# ---- echoed_items

LATER, ITEMS_SINCE = "0.5.18", "0.5.14"
PARTS = [{"type": "output_text", "text": "words", "annotations": [], "logprobs": None}]
ECHO = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": PARTS}


class Body:
    """An HTTP request, whose JSON was read."""

    def __init__(self, items):
        self.items = items

    async def json(self):
        return {"input": self.items}


def created(version, *, ours, spec="dsv4"):
    """The chat API's message of a turn that came back, which OpenAI's type for it holds with an iterator of parts."""

    async def create(self, request, raw_request=None):
        return self._construct_input_messages(request, None)

    made = handler(version, spec)
    method = echoed_items.replace_create(create) if ours else create
    request = SimpleNamespace(instructions=None, previous_response_id=None, input=[ECHO | {"content": iter(PARTS)}])
    (message,) = asyncio.run(method(made, request, Body([copy.deepcopy(ECHO)])))
    return message["content"]


def results(version, outputs, *, ours):
    """What the chat API's messages have of calls' results."""

    async def create(self, request, raw_request=None):
        return self._construct_input_messages(request, None)

    made = handler(version)
    items = [{"type": "function_call_output", "call_id": f"c{i}", "output": output} for i, output in enumerate(outputs)]
    request = SimpleNamespace(instructions=None, previous_response_id=None, input=copy.deepcopy(items))
    method = echoed_items.replace_create(create) if ours else create
    return [message["content"] for message in asyncio.run(method(made, request, Body(items)))]


@pytest.mark.parametrize("version", ("0.5.14", "0.5.15", "0.5.15.post1", "0.5.16", "0.5.17"))
def test_a_turn_that_comes_back_has_its_words(version):
    assert not isinstance(created(version, ours=False), list)  # so the row is needed
    assert [part["text"] for part in created(version, ours=True)] == ["words"]
    assert not isinstance(created(version, ours=True, spec="dsv41"), list)


def test_a_text_and_what_came_otherwise_than_over_http_are_as_they_were():
    async def create(self, request, raw_request=None):
        return request.input

    method, made, items = echoed_items.replace_create(create), SimpleNamespace(chat_encoding_spec="dsv4"), [dict(ECHO)]
    for given, raw in (("words", Body("words")), (items, None)):
        assert asyncio.run(method(made, SimpleNamespace(input=given), raw)) is given


RESULTS = [[{"type": "input_text", "text": "two "}, {"type": "input_text", "text": "parts"}], "one", [], ""]
RESULTS += [[{"type": "input_image", "image_url": "x"}, {"type": "output_text", "text": "seen"}]]
AS_TEXT = ["two parts", "one", "", "", "seen"]


@every_release(ITEMS_SINCE)
def test_a_result_in_parts_is_their_text(version):
    """As later releases have it themselves."""
    is_later = since(version, LATER)
    assert results(version, RESULTS, ours=False) == (AS_TEXT if is_later else RESULTS)
    assert is_later or results(version, RESULTS, ours=True) == AS_TEXT
    other = {"type": "shell_call_output", "output": RESULTS[0]}
    assert echoed_items._with_text(other) == other


@every_release()
def test_which_releases_hold_an_iterator(version):
    """Those that read a message by OpenAI's type, and do not take its id away before; the handler of the chat API's
    messages is there from 0.5.14 on."""
    protocol = content(fetch(version), f"{RESPONSES_REQUEST.partition(':')[0].replace('.', '/')}.py")
    kept = 'if k != "id"' in protocol or "Union[str, List[Dict[str, Any]], List[ResponseInputOutputItem]]" in protocol
    assert kept is since(version, LATER)
    text = content(fetch(version), f"{RESPONSES.partition(':')[0].replace('.', '/')}.py")
    assert ("def _normalize_response_message_for_chat" in text) is since(version, ITEMS_SINCE)


# ---- response_errors


class Failed(Exception):
    def __init__(self, status_code, detail):
        self.status_code, self.detail = status_code, detail

    def __str__(self):
        return f"{self.status_code}: {self.detail}"


def answered(version, error, *, ours, spec="dsv4"):
    """(status, words) of an answer that an error ends, as create_responses makes it."""
    module, _, its_class = RESPONSES.partition(":")
    names = {"asyncio": asyncio, "time": time}
    names |= {"ORJSONResponse": lambda **of: (of["status_code"], of["content"]["error"]["message"])}
    full = take(fetch(version), names, f"{its_class}.responses_full_generator", module)
    refused = take(fetch(version), names, f"{its_class}.create_error_response", module)
    made = SimpleNamespace(chat_encoding_spec=spec)
    made.create_error_response = lambda *words: refused(made, *words)

    async def results():
        raise error
        yield

    async def ask():
        more = {"require_reasoning": False} if since(version, "0.5.17") else {}
        asked = (response_errors.replace_full(full) if ours else full)(
            made, *("request", {}, results(), None, "model", None, None), **more
        )
        try:
            return await asked
        except Exception as e:
            return made.create_error_response(str(e))

    return asyncio.run(ask())


@every_release()
def test_an_error_has_its_own_status(version):
    full = Failed(503, "The request queue is full.")
    assert answered(version, full, ours=False) == (400, f"503: {full.detail}")  # so the row is needed
    assert answered(version, full, ours=True) == (503, full.detail)
    assert answered(version, Failed(500, "a card's fault"), ours=True) == (500, "a card's fault")
    assert answered(version, full, ours=True, spec="dsv41") == answered(version, full, ours=False)
    for error in (ValueError("too long"), Failed(400, "bad"), KeyError("x")):
        assert answered(version, error, ours=True) == answered(version, error, ours=False)
    text = content(fetch(version), f"{RESPONSES.partition(':')[0].replace('.', '/')}.py")
    assert "except Exception as e:\n                return self.create_error_response(str(e))" in text


# ---- token_logprobs

UTILS = f"{OPENAI}.utils"
LETTERS = token_logprobs.byte_of()


class OfBytes:
    """DeepSeek's kind of tokenizer: marks first, then a token for each byte."""

    def __init__(self):
        self.tokens = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", *LETTERS]

    def get_vocab(self):
        return dict.fromkeys(self.tokens)

    def convert_ids_to_tokens(self, token):
        return self.tokens[token]

    def text(self, token):
        piece = self.tokens[token]
        return piece if token < 2 else bytes([LETTERS[piece]]).decode(errors="replace")


def told(version, ids, steps, *, ours, spec="dsv4", asks=True, alone=False):
    """(token, bytes, alternatives' bytes) of each token of an answer: (not streamed, streamed in such steps). asks:
    for alternatives; alone: a step's tokens come without those before."""
    tokenizer, wheel = OfBytes(), fetch(version)
    names = {"LogProbs": lambda: SimpleNamespace(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])}
    names |= {"_BYTE_LEVEL_TOKENIZERS": set(), "_BYTE_DECODER": LETTERS}
    names |= dict.fromkeys(("ChoiceLogprobs", "ChatCompletionTokenLogprob", "TopLogprob"), Record)
    for name in ("_lossless_token_text", "token_id_to_bytes", "_is_byte_level_tokenizer", "to_openai_style_logprobs"):
        take(wheel, names, name, UTILS)
    names["GIVEN"] = {"_is_byte_level_tokenizer": names.get("_is_byte_level_tokenizer")}
    names["get_serving"] = lambda: SimpleNamespace(incremental_streaming_output=alone)
    module, _, its_class = CHAT.partition(":")
    parts = ("_process_logprobs_tokens", "_build_token_logprobs_from_raw")
    parts = {part: take(wheel, names, f"{its_class}.{part}", module) for part in parts}
    whole, step = (
        take(wheel, names, f"{its_class}._process_{kind}_logprobs", module) for kind in ("response", "streaming")
    )
    if ours:
        whole, step = token_logprobs.replace_response(whole), token_logprobs.replace_streaming(step)
    made = type(its_class, (), {name: part for name, part in parts.items() if part})()
    made.chat_encoding_spec = spec
    served = SimpleNamespace(incremental_streaming_output=alone)
    made.tokenizer_manager = SimpleNamespace(tokenizer=tokenizer, server_args=served)
    given = [(-0.5, token, tokenizer.text(token)) for token in ids]
    top = [[(-0.5 - n, other, tokenizer.text(other)) for n, other in enumerate((t, (t + 1) % 258))] for t in ids]
    info = {"output_token_logprobs": given} | ({"output_top_logprobs": top} if asks else {})
    streamed, at = [], 0
    for size in steps:
        of_step = {name: rows[at : at + size] if alone else rows[: at + size] for name, rows in info.items()}
        streamed += step(made, {"meta_info": of_step}, at, at + size).content
        at += size
    return [
        [(one.token, one.bytes, [other.bytes for other in one.top_logprobs]) for one in found]
        for found in (whole(made, {"meta_info": info}).content, streamed)
    ]


@pytest.fixture
def protocol(monkeypatch):
    """SGLang's module of that name, as far as ours asks it."""
    module = ModuleType(token_logprobs.PROTOCOL)
    module.TopLogprob = Record
    monkeypatch.setitem(sys.modules, token_logprobs.PROTOCOL, module)


@every_release()
def test_log_probabilities_are_each_tokens_own(version, protocol):
    place = {LETTERS[letter]: 2 + at for at, letter in enumerate(LETTERS)}
    chance, text = random.Random(0), "é🎉 ok"
    ids = [*(place[byte] for byte in text.encode()), 1]
    steps = [3, 2, 1, 4]
    assert sum(steps) == len(ids)
    wanted = [[LETTERS[piece]] for piece in map(OfBytes().convert_ids_to_tokens, ids[:-1])]
    for found in told(version, ids, steps, ours=True):
        assert [of for _, of, _ in found[:-1]] == wanted
        assert bytes(byte for _, of, _ in found for byte in of).decode() == f"{text}<｜end▁of▁sentence｜>"
        assert all(len(others) == 2 and others[0] == of for _, of, others in found)
    both = told(version, ids, steps, ours=True)
    assert told(version, ids, steps, ours=True, alone=True) == both
    without = [[(text, of, []) for text, of, _ in found] for found in both]
    assert told(version, ids, steps, ours=True, asks=False) == without
    whole, streamed = told(version, ids, steps, ours=False)
    assert [of for _, of, _ in whole[:-1]] != wanted  # so the row is needed
    assert (streamed == whole) is since(version, "0.5.21")
    assert told(version, ids, steps, ours=True, spec="dsv41") == [whole, streamed]
    chance.shuffle(ids)
    whole, streamed = told(version, ids, [len(ids)], ours=True)
    assert whole == streamed


def test_alternatives_are_told_as_they_came(protocol):
    serving = SimpleNamespace(tokenizer_manager=SimpleNamespace(tokenizer=OfBytes()))
    content = [Record(token="x", top_logprobs="SGLang's own") for _ in range(4)]
    given = {"output_token_logprobs": [(-1.0, 0, "before"), *((-1.0, 0, "x") for _ in range(4))]}
    given["output_top_logprobs"] = [[(-9.0, 1, "before")], [(-1.0, 1, "y"), (-2.0, 0, None)], None, []]
    token_logprobs.as_they_are(serving, SimpleNamespace(content=content), given, 1)
    assert [(one.token, one.logprob, one.bytes) for one in content[0].top_logprobs] == [
        ("y", -1.0, [121]),
        ("", -2.0, []),
    ]
    assert [one.top_logprobs for one in content[1:]] == [[], [], "SGLang's own"]


def test_bytes_are_the_tokens_where_its_text_lost_them():
    def of(letters, text):
        return token_logprobs.bytes_of(SimpleNamespace(convert_ids_to_tokens=lambda token: letters), 7, text)

    assert of("Ġð", " \ufffd") == [0x20, 0xF0] and of("Ġð", " ð") == list(" ð".encode())
    for nothing in (None, "", "<｜a\ufffd｜>", "Ġ｜"):
        assert of(nothing, "a\ufffd") == list("a\ufffd".encode())


@every_release("0.5.21")
def test_letters_of_bytes_are_sglangs(version):
    assert token_logprobs.byte_of() == take(fetch(version), {}, "_build_byte_decoder", UTILS)()
    assert definition(fetch(version), "TopLogprob", token_logprobs.PROTOCOL) is not None


# ---- sampled_states


def sampled(version, *, ours, n=3, streamed=True):
    """(answers, what is left in the process) of a request with n answers."""
    names = {"asyncio": asyncio, "copy": copy, "getattr": getattr, "hasattr": hasattr}
    method = take(fetch(version), names, "TokenizerManager._handle_batch_request", MANAGER)
    made = SimpleNamespace(rid_to_state={}, count=0)

    class Asked(SimpleNamespace):
        def __getitem__(self, at):
            return Asked(**vars(self) | {"rid": self.rid[at]})

        def regenerate_rid(self):
            made.count += 1
            self.rid = f"own {made.count}"
            return self.rid

    class Sent:
        """What _send_one_request gives, which some releases wait for."""

        def __await__(self):
            return iter(())

    async def answer(asked, request):
        del made.rid_to_state[asked.rid]
        yield {"meta_info": {"id": asked.rid}}

    async def tokenized(asked):
        return SimpleNamespace(sampling_params=SimpleNamespace(max_new_tokens=9), rid=asked.rid, mm_inputs=None)

    async def of_streams(generators, rids):
        for generator in generators:
            async for one in generator:
                yield one

    def noted(asked, *_):
        made.rid_to_state[asked.rid] = SimpleNamespace(time_stats=SimpleNamespace(set_finished_time=lambda: None))

    made._tokenize_one_request, made._init_req_state, made._wait_one_response = tokenized, noted, answer
    made._send_one_request, made._stream_batch_responses = (lambda *_: Sent()), of_streams
    asked = Asked(batch_size=1, parallel_sample_num=n, rid=[f"rid {k}" for k in range(n)], stream=streamed)
    asked.return_prompt_token_ids = False
    for at in range(n):
        noted(asked[at])
    method = sampled_states.replace_batch(method) if ours else method

    async def ask():
        return [one async for one in method(made, asked)]

    return len(asyncio.run(ask())), list(made.rid_to_state)


@pytest.mark.parametrize("version", ("0.5.18", "0.5.19", "0.5.20", "0.5.21"))
def test_a_stream_of_several_answers_leaves_nothing(version):
    assert sampled(version, ours=False) == (3, ["rid 1", "rid 2"])  # so the row is needed
    assert sampled(version, ours=True) == (3, [])


def test_elsewhere_it_leaves_them(elsewhere):
    assert sampled("0.5.20", ours=True) == (3, ["rid 1", "rid 2"])


@every_release("0.5.17")
def test_which_releases_leave_them(version):
    text = content(fetch(version), f"{MANAGER.replace('.', '/')}.py")
    drops_one = "del self.rid_to_state[objs[i].rid]" in text
    assert drops_one is (since(version, "0.5.18") and not since(version, "0.5.22"))


# ---- strict_schemas

WHOLE = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
REFUSED = {
    "optional": {**WHOLE, "required": []},
    "map": {**WHOLE, "properties": {"a": {"type": "object", "additionalProperties": {"type": "integer"}}}},
    "constant": {**WHOLE, "properties": {"a": {"const": "x"}}},
    "date": {**WHOLE, "properties": {"a": {"type": "string", "format": "date-time"}}},
    "nothing": {"type": "object"},
}


def asked_with(schema, *, tool, strict):
    of = {"name": "f", **({"strict": True} if strict else {})}
    if tool:
        return {"tools": [{"type": "function", "function": {**of, "description": "", "parameters": schema}}]}
    return {"response_format": {"type": "json_schema", "json_schema": {**of, "schema": schema}}}


def prompted(version, recipe, given, *, ours, spec="dsv4"):  # noqa: F811
    """The prompt, by the release's adapter and renderer, and by recipe."""
    renderer = ModuleType("renderer")
    exec(content(fetch(version), RENDERER), vars(renderer))

    def render(body, **more):
        try:
            made = recipe.ChatCompletionRequest({**renderer.pre_normalize(body), "model": renderer.MODEL_NAMES["dsv4"]})
            made = made.convert(recipe.ConversionOptions()).conversation
            return recipe.DeepseekV4Encoding().render_conversation(made).prompt
        except recipe.ConversionError as error:
            raise ValueError(error.body) from error

    module, _, its_class = RECIPE.partition(":")
    names = {"isinstance": isinstance, "_numeric_effort": lambda effort: effort}
    method = take(fetch(version), names, f"{its_class}._encode", module)
    made = SimpleNamespace(_spec=spec, _default_effort=None, deepseek_recipe=SimpleNamespace(encode=render))
    body = {"messages": [{"role": "user", "content": "U"}], "thinking": True, **given}
    before = copy.deepcopy(body)
    try:
        return (strict_schemas.replace_encode(method) if ours else method)(made, body, effort=None)
    finally:
        assert body == before


@every_release("0.5.23")
def test_a_strict_schema_may_be_any(version, recipe):  # noqa: F811
    for tool in (False, True):
        for schema in REFUSED.values():
            strict, loose = (asked_with(schema, tool=tool, strict=of) for of in (True, False))
            if tool and schema == REFUSED["nothing"]:
                continue  # taken
            with pytest.raises(ValueError, match="invalid_request_error"):
                prompted(version, recipe, strict, ours=False)  # so the row is needed
            assert prompted(version, recipe, strict, ours=True) == prompted(version, recipe, loose, ours=False)
            with pytest.raises(ValueError, match="invalid_request_error"):
                prompted(version, recipe, strict, ours=True, spec="dsv41")
        fine = asked_with(WHOLE, tool=tool, strict=True)
        assert prompted(version, recipe, fine, ours=True) == prompted(version, recipe, fine, ours=False)
        loose = asked_with(WHOLE, tool=tool, strict=False)  # a tool's schema is written anew, so recipe must be asked
        assert (prompted(version, recipe, fine, ours=True) != prompted(version, recipe, loose, ours=True)) == tool
    wrong = {"must be a JSON Schema of": asked_with({"type": "array"}, tool=True, strict=False)}
    wrong["of type 'json_object'"] = {"response_format": {"type": "json_object"}}  # where nobody asks for JSON in words
    for words, given in wrong.items():
        for of in (False, True):
            with pytest.raises(ValueError, match=words):
                prompted(version, recipe, given, ours=of)


# ---- prompts_aside


def messages_handled(version, convert, *, ours, streamed, refused=None, spec="dsv4"):
    """What the release's handler of /v1/messages answers, where its prompt is made by `convert`."""
    module, _, its_class = MESSAGES.partition(":")
    names = {"StreamingResponse": lambda *_, **__: "events", "asyncio": asyncio, "HTTPException": Failed}
    names |= {"ChatCompletionResponse": str, "JSONResponse": lambda content: content, "isinstance": isinstance}
    which = "_handle_streaming" if streamed else "_handle_non_streaming"
    method = take(fetch(version), names, f"{its_class}.{which}", module)

    def validate(request):
        assert request == "chat"
        return refused

    def stream(*given):
        assert given[-2:] == ("messages", "raw")

    chat = SimpleNamespace(chat_encoding_spec=spec, _validate_request=validate)
    chat._convert_to_internal_request = convert
    chat.tokenizer_manager = SimpleNamespace(create_abort_task=lambda _: None)

    async def answer(*given):
        assert given[-1] == "raw"
        return "answer"

    chat._handle_non_streaming_request = answer
    made = SimpleNamespace(openai_serving_chat=chat, _generate_anthropic_stream=stream)
    made._error_response = lambda **of: of["status_code"]
    made._convert_response = lambda _: SimpleNamespace(model_dump=lambda **_: "message")
    method = prompts_aside.replace_handle(method) if ours else method
    found = asyncio.run(method(made, "chat", "messages", "raw"))
    assert made.openai_serving_chat is chat, "the next request's prompt is its own"
    return found


@every_release("0.5.22")
def test_prompts_of_messages_are_made_beside_the_loop(version):
    threads = []

    def convert(*request):
        threads.append(threading.get_ident())
        assert request == ("chat", "raw")
        return SimpleNamespace(), "chat"

    def fails(*_):
        raise ValueError("no prompt")

    def breaks(*_):
        raise RuntimeError("x")

    for streamed in (True, False):
        for of in (False, True):
            threads.clear()
            wanted = "events" if streamed else "message"
            assert messages_handled(version, convert, ours=of, streamed=streamed) == wanted
            assert (threads != [threading.get_ident()]) is of and len(threads) == 1  # so the row is needed
            status = 400 if since(version, "0.5.23") else 500
            assert messages_handled(version, fails, ours=of, streamed=streamed) == status
            assert messages_handled(version, breaks, ours=of, streamed=streamed) == 500
            assert messages_handled(version, breaks, ours=of, streamed=streamed, refused="empty") == 400
        threads.clear()
        assert messages_handled(version, convert, ours=True, streamed=streamed, refused="empty") == 400 and not threads
        messages_handled(version, convert, ours=True, streamed=streamed, spec="dsv41")
        assert threads == [threading.get_ident()]


@every_release()
def test_where_the_chat_apis_are_made_beside_it(version):
    text = content(fetch(version), f"{OPENAI.replace('.', '/')}/serving_base.py")
    assert ("run_in_executor(" in text) is since(version, "0.5.22")
