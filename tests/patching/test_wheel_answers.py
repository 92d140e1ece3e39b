"""How answers are told, and what requests are taken for: each release's own code on the CPU, beside ours."""

import asyncio
import collections
import copy
import dataclasses
import json
import random
from array import array
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch

from deepseek_v4_sm120.sglang_patches.fixes import (
    billing_lines,
    max_output_tokens,
    stop_sequences,
    unknown_tokens,
    whole_characters,
)
from deepseek_v4_sm120.sglang_patches.rows.http_server import (
    FIND_PRINTABLE,
    MESSAGES,
    RESPONSES_REQUEST,
    TOKENIZER_MANAGER,
)
from tests.patching.test_wheel_wo_a import QUIET, take
from tests.patching.wheels import content, every_release, fetch, since

pytestmark = pytest.mark.usefixtures("served_card")


class Record(SimpleNamespace):
    """A pydantic model; what was not given is None."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

    def model_dump_json(self, **_):
        return json.dumps(self, default=lambda one: {k: v for k, v in vars(one).items() if v is not None})


# ---- whole_characters

DETOKENIZER = FIND_PRINTABLE.partition(":")[0]
DECODES = ("_decode_batch_token_id_output", "_grouped_batch_decode", "_clamp_decode_ids", "trim_matched_stop")
ANSWER, STEPS = "做得很好🎉🎊 ok", (3, 10, 4, 20)  # the steps end behind 做, within 🎉 and within 🎊
LENGTH = MappingProxyType({"type": "length"})


class Bytes:
    """A tokenizer whose tokens are bytes."""

    is_fast = True

    def decode(self, ids, **_):
        return bytes(ids).decode(errors="replace")

    def batch_decode(self, rows, **_):
        return list(map(self.decode, rows))


def detokenizer(version, *, ours):
    wheel, utilities = fetch(version), "sglang.utils"
    names = {"dataclasses": dataclasses, "defaultdict": collections.defaultdict}
    names["_is_chinese_char"] = take(wheel, {}, "_is_chinese_char", utilities)
    printable = take(wheel, names, "find_printable_text", utilities)
    names["find_printable_text"] = whole_characters.replace_printable(printable) if ours else printable
    take(wheel, names, "DecodeStatus", DETOKENIZER)
    methods = {name: take(wheel, names, f"DetokenizerManager.{name}", DETOKENIZER) for name in DECODES}
    made = type("DetokenizerManager", (), {n: method for n, method in methods.items() if method})()
    made.decode_status, made.tokenizer, made.vocab_size = {}, Bytes(), 256
    made.disable_tokenizer_batch_decode = made.is_tool_call_parser_gpt_oss = False
    made.tool_close_token_ids = ()
    return made


def told(version, text, steps, *, ours, ends=LENGTH) -> str:
    """A stream's text, whose tokens come in such steps."""
    made, ids, pieces = detokenizer(version, ours=ours), list(text.encode()), []
    prompt, at = list(b"prompt"), 0
    for number, step in enumerate(steps):
        new, at = ids[at : at + step], at + step
        one = {
            "rids": "r",
            "decoded_texts": "",
            "decode_ids": prompt + new if not number else new,
            "no_stop_trim": False,
        }
        one |= {"read_offsets": len(prompt), "skip_special_tokens": True, "spaces_between_special_tokens": True}
        one["finished_reasons"] = None if at < len(ids) else ends
        batch = SimpleNamespace(**{name: [value] for name, value in one.items()})
        pieces += made._decode_batch_token_id_output(batch)
        if at >= len(ids):
            return "".join(pieces)


@every_release()
def test_no_text_is_told_twice(version):
    assert told(version, ANSWER, STEPS, ours=True) == ANSWER
    assert told(version, ANSWER, STEPS, ours=False) == ANSWER.replace("得很好", "得很好得很好")  # so the row is needed


@every_release("0.5.23")
def test_whatever_the_steps(version):
    chance, differ = random.Random(0), 0
    parts = ("你好", "🎉", "🎊", "ok", " ", "é", "\n", "世界", "�")
    for _ in range(100):
        text = "".join(chance.choices(parts, k=chance.randint(1, 12)))
        steps = [chance.randint(1, 6) for _ in range(len(text.encode()))]
        assert told(version, text, steps, ours=True) == text
        differ += told(version, text, steps, ours=False) != text
    assert differ > 2


@every_release()
@pytest.mark.parametrize("stop", ["，🎉", "\n🎉", "ok🎉"])
@pytest.mark.parametrize("within", [1, 2, 3])
def test_a_stop_that_goes_on_with_such_a_character_is_not_begun(version, stop, within):
    for before in ("好", "an answer ", "好了", ""):
        text = before + stop
        steps = (len(text.encode()) - 4 + within, 4)
        ends = {"type": "stop", "matched": stop}
        assert {told(version, text, steps, ours=ours, ends=ends) for ours in (True, False)} == {before}


@every_release()
def test_nothing_is_told_later_than_by_sglang(version):
    names = {"_is_chinese_char": take(fetch(version), {}, "_is_chinese_char", "sglang.utils")}
    stock = take(fetch(version), names, "find_printable_text", "sglang.utils")
    ours, chance, sooner = whole_characters.replace_printable(stock), random.Random(1), 0
    for _ in range(200):
        text = "".join(chance.choices(("你好", "🎉", "ok", " ", "，", "\n", "�"), k=chance.randint(0, 6))) + "�"
        assert text.startswith(ours(text)) and ours(text).startswith(stock(text))
        sooner += ours(text) != stock(text)
    assert sooner > 20


def test_other_models_and_cards_keep_sglangs_text(elsewhere):
    find = whole_characters.replace_printable(str.upper)
    assert find("a �") == "A �"


# ---- billing_lines

LINE = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={};"
WORDS = "You are Claude Code."


def block(text, kind="text"):
    return SimpleNamespace(type=kind, text=text)


def prompt_of(version, system, *, ours, encoding="dsv4"):
    """The messages that the release makes of a request."""
    module, _, its_class = MESSAGES.partition(":")
    names = {"isinstance": lambda one, kind: False if kind is QUIET else isinstance(one, kind)}
    names |= {"ChatCompletionRequest": Record, "json": json}
    names["_extract_system_text"] = lambda content: content
    method = take(fetch(version), names, f"{its_class}._convert_to_chat_completion_request", module)
    method = billing_lines.replace_convert(method) if ours else method
    serving = SimpleNamespace(
        openai_serving_chat=SimpleNamespace(chat_encoding_spec=encoding), _merge_inline_system=True
    )
    rest = dict.fromkeys(("temperature", "top_p", "top_k", "stop_sequences", "thinking", "tools", "tool_choice"))
    rest |= dict.fromkeys(("stream", "output_config", "betas", "metadata")) | {"pd_routing_kwargs": dict}
    message = SimpleNamespace(role="user", content="hi")
    asked = SimpleNamespace(model="m", max_tokens=9, system=system, messages=[message], **rest)
    before = copy.deepcopy(asked)
    made = method(serving, asked).messages
    assert asked == before
    return made


@every_release()
def test_that_line_is_in_no_prompt(version):
    for first, second in [
        ([block(LINE.format("fa690")), block(WORDS)], [block(LINE.format("0d9c1")), block(WORDS)]),
        (f"{LINE.format('fa690')}\n{WORDS}", [block(f"{LINE.format('0d9c1')}\n{WORDS}")]),
    ]:
        assert prompt_of(version, first, ours=False) != prompt_of(version, second, ours=False)  # so the row is needed
        assert prompt_of(version, first, ours=True) == prompt_of(version, second, ours=True)
        assert prompt_of(version, first, ours=True) == prompt_of(version, WORDS, ours=False)
        assert prompt_of(version, first, ours=True, encoding="dsv41") == prompt_of(version, first, ours=False)


@every_release()
def test_a_prompt_without_it_stays_as_it_is(version):
    for system in (None, WORDS, [block(WORDS), block(f"As in: {LINE}")], [block(WORDS), block("", "other")], []):
        assert prompt_of(version, system, ours=True) == prompt_of(version, system, ours=False)
    assert prompt_of(version, [block(LINE.format("1"))], ours=True) == prompt_of(version, None, ours=False)


# ---- stop_sequences

ENDS = {  # why it ended, and by what -> what Anthropic's API says of it
    ("stop", "STOP"): ("stop_sequence", "STOP"),
    ("stop", 7): ("end_turn", None),
    ("stop", None): ("end_turn", None),
    ("stop", "NaN happened"): ("end_turn", None),
    ("length", None): ("max_tokens", None),
    ("tool_calls", "STOP"): ("tool_use", None),
}
ADAPTED, PROCESSED = Record(of="adapted"), Record(of="processed")
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Names(dict):
    """Of a module: a record of that type for each name that begins as a class."""

    def __missing__(self, name):
        raise KeyError(name)

    def setdefault(self, name, value):
        if value is QUIET and name[0].isupper() and not name.isupper():
            kind = {"MessageDeltaEvent": "message_delta"}.get(name, "other")
            value = lambda **given: Record(**{"type": kind, **given})  # noqa: E731
        return super().setdefault(name, value)


def serving(version, *, ours, chunks=()):
    module, _, its_class = MESSAGES.partition(":")
    read = SimpleNamespace(model_validate_json=lambda text: json.loads(text, object_hook=lambda d: Record(**d)))
    names = Names(STOP_REASON_MAP=REASONS, ChatCompletionStreamResponse=read, json=json, asyncio=asyncio, QUIET=QUIET)
    names["GIVEN"] = {}
    for name in ("ValidationError", "HTTPException"):
        names[name] = KeyError
    take(fetch(version), names, "_wrap_sse_event", module)
    methods = ("_generate_anthropic_stream", "_convert_response")
    generate, convert = (take(fetch(version), names, f"{its_class}.{name}", module) for name in methods)
    if ours:
        generate, convert = stop_sequences.replace_generate(generate), stop_sequences.replace_convert(convert)
    made = type("AnthropicServing", (), dict(zip(methods, (generate, convert), strict=True)))()

    async def stream(*request):
        assert request == (ADAPTED, PROCESSED, "raw")
        for chunk in chunks:
            yield chunk

    made.openai_serving_chat = SimpleNamespace(chat_encoding_spec="dsv4", _generate_chat_stream=stream)
    return made


def chunk(reason=None, matched=None, **delta):
    choice = {"delta": delta, "finish_reason": reason, "matched_stop": matched}
    return "data: " + json.dumps({"choices": [choice], "model": "m"}, separators=(",", ":")) + "\n\n"


def streamed(version, reason, matched, asked, *, ours):
    """(why it ended, the sequence, all other events)"""
    chunks = [chunk(role="assistant", content=""), chunk(content='a "matched_stop":"x" b'), chunk(reason, matched)]
    made = serving(version, ours=ours, chunks=[*chunks, "data: [DONE]\n\n"])

    async def events():
        request = Record(model="m", stop_sequences=asked)
        return [one async for one in made._generate_anthropic_stream(ADAPTED, PROCESSED, request, "raw")]

    chat, found = made.openai_serving_chat, asyncio.run(events())
    assert made.openai_serving_chat is chat, "what others are answered with stays"
    (last,) = [event for event in found if event.startswith(stop_sequences.LAST)]
    delta = json.loads(last.split("data: ")[1])["delta"]
    others = [event.split("data: ")[0] for event in found if event is not last]
    return delta.get("stop_reason"), delta.get("stop_sequence"), others


@every_release()
def test_which_sequence_ended_an_answer(version):
    for (reason, matched), wanted in ENDS.items():
        stock = streamed(version, reason, matched, ["STOP"], ours=False)
        assert stock[:2] == (REASONS[reason], None)  # so the row is needed
        assert streamed(version, reason, matched, ["STOP"], ours=True) == (*wanted, stock[2])
        assert streamed(version, reason, matched, None, ours=True) == stock
        answer = Record(choices=[Record(message=Record(content="a"), finish_reason=reason, matched_stop=matched)])
        for ours, expected in ((False, (REASONS[reason], None)), (True, wanted)):
            made = serving(version, ours=ours)._convert_response(answer)
            assert (made.stop_reason, made.stop_sequence) == expected


@every_release("0.5.23")
def test_elsewhere_it_is_sglangs(version, elsewhere):
    assert streamed(version, "stop", "STOP", ["STOP"], ours=True)[:2] == ("end_turn", None)
    answer = Record(choices=[Record(message=Record(content="a"), finish_reason="stop", matched_stop="STOP")])
    assert serving(version, ours=True)._convert_response(answer).stop_reason == "end_turn"


def test_the_last_event_is_written_as_the_others():
    event = 'event: message_delta\ndata: {"delta":{"stop_reason":"end_turn"},"text":"é"}\n\n'
    wanted = '"stop_reason":"stop_sequence","stop_sequence":"É"'
    assert stop_sequences.told(event, "É") == event.replace('"stop_reason":"end_turn"', wanted)
    assert stop_sequences.told(event, None) == event


def test_what_listens_has_all_that_the_chat_has():
    assert (
        stop_sequences.Listening(SimpleNamespace(tokenizer_manager="of the server")).tokenizer_manager
        == "of the server"
    )


# ---- max_output_tokens


def most(version, asked, room, *, ours):
    module, _, its_class = RESPONSES_REQUEST.partition(":")
    method = take(fetch(version), {}, f"{its_class}.to_sampling_params", module)
    method = max_output_tokens.replace_to_sampling_params(method) if ours else method
    request = Record(max_output_tokens=asked, _DEFAULT_SAMPLING_PARAMS=collections.defaultdict(int))
    request._json_schema_from_text_format = lambda text: None
    return method(request, room)["max_new_tokens"]


@every_release()
def test_as_many_tokens_as_were_asked_for(version):
    for asked, room, stock, ours in ((1, 900, -1, 1), (16, 900, 14, 16), (1000, 900, 898, 898), (None, 900, 898, 898)):
        assert most(version, asked, room, ours=False) == stock  # so the row is needed
        assert most(version, asked, room, ours=True) == ours
    if since(version, "0.5.22"):
        assert [most(version, asked, None, ours=True) for asked in (None, 7)] == [None, 7]


@every_release("0.5.23")
def test_elsewhere_two_are_taken_away(version, elsewhere):
    assert most(version, 16, 900, ours=True) == 14


# ---- unknown_tokens

VOCABULARY = 12


def validates(version, ids, *, ours, **asked):
    module = TOKENIZER_MANAGER.partition(":")[0]
    names = {"isinstance": lambda one, kind: False}
    method = take(fetch(version), names, "TokenizerManager._validate_one_request", module)
    method = unknown_tokens.replace_validate(method) if ours else method
    manager = SimpleNamespace(context_len=100, num_reserved_tokens=0, validate_total_tokens=True)
    manager.model_config = SimpleNamespace(vocab_size=VOCABULARY)
    manager._validate_joint_schema_request = manager._validate_mm_limits = lambda *_: None
    return method(manager, SimpleNamespace(sampling_params={"max_new_tokens": 5, **asked}), ids)


@every_release()
def test_tokens_that_the_model_does_not_have_are_refused(version):
    for ids in ([0], [3, VOCABULARY - 1], [], None):
        assert validates(version, ids, ours=True) is None
    for ids in ([3, VOCABULARY], [-1, 3]):
        assert validates(version, ids, ours=False) is None  # so the row is needed
        with pytest.raises(ValueError, match=rf"token {ids[ids[0] > 0]}; the model's vocabulary is 0 to 11"):
            validates(version, ids, ours=True)


@every_release("0.5.14")
@pytest.mark.parametrize("made", [lambda ids: array("q", ids), np.array, torch.tensor], ids=["array", "numpy", "torch"])
def test_tokens_in_an_array_are_taken_as_in_a_list(version, made):
    """`Engine.generate(input_ids=[numpy.array(..), ..])`: SGLang makes its own array of what can be gone through."""
    text = content(fetch(version), "sglang/srt/managers/tokenizer_manager.py")
    assert 'array("q", input_ids) if input_ids is not None else None' in text
    for ids in ([3], [3, VOCABULARY - 1], []):
        assert array("q", made(ids)) == array("q", ids)
        assert validates(version, made(ids), ours=False) is validates(version, made(ids), ours=True) is None
    with pytest.raises(ValueError, match="token 12; the model's vocabulary"):
        validates(version, made([3, VOCABULARY]), ours=True)


def test_elsewhere_tokens_are_not_looked_at(elsewhere):
    assert validates("0.5.23", [3, VOCABULARY], ours=True) is None


def test_a_request_without_settings_has_a_prompt(served_card):
    seen = []
    validate = unknown_tokens.replace_validate(lambda self, obj, input_ids: seen.append(input_ids))
    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCABULARY))
    validate(manager, SimpleNamespace(sampling_params=None), [3])
    with pytest.raises(ValueError, match="The prompt has token 12"):
        validate(manager, SimpleNamespace(sampling_params=None), [VOCABULARY])
    assert seen == [[3]]


@every_release()
def test_what_min_tokens_looks_up(version):
    for asked in (
        {"stop_token_ids": [VOCABULARY]},
        {"stop_token_ids": [3], "min_new_tokens": 2},
        {"min_new_tokens": 2},
    ):
        assert validates(version, [1], ours=True, **asked) is None
    asked = {"stop_token_ids": [3, VOCABULARY], "min_new_tokens": 2}
    assert validates(version, [1], ours=False, **asked) is None  # so the row is needed
    with pytest.raises(ValueError, match="stop_token_ids has token 12;"):
        validates(version, [1], ours=True, **asked)


@every_release()
def test_what_they_would_do(version):
    """The table by which the first layers choose experts has a row for each token, and no more."""
    forward = take(
        fetch(version),
        {"torch": torch, "_RENORMALIZE_SUM_EPSILON": 0.0},
        "HashTopK._forward_torch",
        "sglang.srt.layers.moe.hash_topk",
    )
    layer = SimpleNamespace(topk=2, score_func="sqrtsoftplus", num_shared_topk_slots=0, num_fused_shared_experts=0)
    layer.tid2eid = torch.arange(2 * VOCABULARY).reshape(VOCABULARY, 2) % 4
    forward(layer, torch.zeros(1, 4), torch.tensor([VOCABULARY - 1]))
    with pytest.raises(IndexError, match="out of bounds"):
        forward(layer, torch.zeros(1, 4), torch.tensor([VOCABULARY]))
