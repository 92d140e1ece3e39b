"""What a server may say that is not so, one lie a row, and what each gate must make of it: FAIL or INCOMPLETE, no PASS.

A lie is a change of what the fake server of tests/serving sends (`say`), a fault that it knows by name, or a setting of
it. A new gate needs a row in which it is not passed (test_lies.py asks for one); the lies of TO_ALL are told to it as
soon as it stands in gates.GATES.
"""

from __future__ import annotations

import copy
import json
import math
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.quality import gates

FAIL, INCOMPLETE = "FAIL", "INCOMPLETE"
ORACLE, SPECULATION, BATCH = "logit-oracle", "speculation-equality", "batch-invariance"
TOOLS, NEEDLE, ARITHMETIC, SOAK = "tool-calls", "needle", "arithmetic", "corruption-soak"
GENERATE, CHAT = "/generate", "/v1/chat/completions"
EVERY_GATE = tuple(gates.GATES)


@dataclass(frozen=True)
class Lie:
    """`say`(handler, JSON) -> JSON, None where it has answered itself. `both`: the reference tells it too;
    `only_other`: it alone does. `server`: settings of the fake server. `words`: what the verdict must say.
    """

    name: str
    gates: dict[str, str]
    say: Callable | None = None
    faults: tuple[str, ...] = ()
    both: bool = False
    only_other: bool = False
    server: dict = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    words: str = ""


def of_generate(change: Callable) -> Callable:
    """A lie about /generate: `change`(answer, meta) alters a copy of the answer, streamed or not."""

    def say(handler, content):
        if handler.path != GENERATE or not isinstance(content, dict) or "meta_info" not in content:
            return content
        found = copy.deepcopy(content)
        change(found, found["meta_info"])
        return found

    return say


def of_chat(change: Callable, streamed: bool | None = None) -> Callable:
    """A lie about chat: `change`(choice, message or delta). `streamed`: told only so, or only not so."""

    def say(handler, content):
        if handler.path != CHAT or not isinstance(content, dict) or "choices" not in content:
            return content
        found = copy.deepcopy(content)
        choice = found["choices"][0]
        if streamed in (None, "delta" in choice):
            change(choice, choice.get("delta", choice.get("message")))
        return found

    return say


def keep(count: int, kind: str) -> Callable:
    """Only `count` tokens, and `kind` as the end."""

    def change(found, meta):
        found["output_ids"] = found["output_ids"][:count]
        meta["completion_tokens"] = len(found["output_ids"])
        for name in ("output_token_logprobs", "output_top_logprobs"):
            if name in meta:
                meta[name] = meta[name][:count]
        if meta["finish_reason"]:
            meta["finish_reason"] = {"type": kind}

    return change


def abort(found, meta):
    keep(3, "abort")(found, meta)
    if meta["finish_reason"]:
        meta["finish_reason"] |= {"message": "KV cache out of memory", "status_code": None, "err_type": None}


def end(reason) -> Callable:
    def change(found, meta):
        if meta["finish_reason"]:
            meta["finish_reason"] = reason

    return change


def one_more(found, meta):
    found["output_ids"] += found["output_ids"][-1:]
    meta["completion_tokens"] = len(found["output_ids"])


def truncates(found, meta):
    """Of a longer prompt it has read a few tokens only, and says so."""
    meta["prompt_tokens"] = min(12, meta["prompt_tokens"])


def canned(found, meta):
    """The same varied text whatever was asked."""
    ids = [zlib.crc32(b"%d" % place) & 0xFFFF for place in range(len(found["output_ids"]))]
    found["output_ids"] = ids
    for place, entry in enumerate(meta.get("output_token_logprobs", [])):
        entry[1] = ids[place]
    for place, step in enumerate(meta.get("output_top_logprobs", [])):
        if step:
            step[0][1] = ids[place]


def stuck(found, meta):
    """One token again and again."""
    found["output_ids"] = [7] * len(found["output_ids"])
    for entry in meta.get("output_token_logprobs", []):
        entry[1] = 7
    for step in meta.get("output_top_logprobs", []):
        if step:
            step[0][1] = 7


def chosen(number) -> Callable:
    """`number` as the log-probability of one token; None takes all of them away."""

    def change(found, meta):
        if entries := meta.get("output_token_logprobs"):
            entries[len(entries) // 2][0] = number

    return change


def no_logprobs(found, meta):
    meta.pop("output_token_logprobs", None)


def of_other_tokens(found, meta):
    for entry in meta.get("output_token_logprobs", []):
        entry[1] += 1


def tops(change: Callable) -> Callable:
    """`change`(step) of every position's best twenty."""

    def whole(found, meta):
        for step in meta.get("output_top_logprobs") or []:
            if step:
                change(step)

    return whole


def foreign_below(step):
    for place, entry in enumerate(step[1:]):
        entry[1] = 900_000 + place


def foreign_below_once(found, meta):
    if len(meta.get("output_top_logprobs") or []) == 24:
        foreign_below(meta["output_top_logprobs"][20])


def greedy_from_outside(found, meta):
    """One token that no reference has among its best, with all the log-probabilities of the right one."""
    if len(found["output_ids"]) == 24 and meta.get("output_top_logprobs"):
        found["output_ids"][20] = meta["output_token_logprobs"][20][1] = meta["output_top_logprobs"][20][0][1] = 900_000


def first_twice(step):
    step[1] = list(step[0])


def backwards(step):
    step.reverse()


def fewer(step):
    del step[5:]


def no_tops(found, meta):
    meta.pop("output_top_logprobs", None)


def nan_in(step):
    step[3][0] = math.nan


# --- lies about chat


def finish(reason) -> Callable:
    def change(choice, _message):
        if choice["finish_reason"]:
            choice["finish_reason"] = reason

    return change


def finish_where(had: str, reason: str) -> Callable:
    def change(choice, _message):
        if choice["finish_reason"] == had:
            choice["finish_reason"] = reason

    return change


def added(name: str, text: str) -> Callable:
    """`text` at the end of `name`, in the piece or message that has some of it."""

    def change(_choice, message):
        if message.get(name):
            message[name] += text

    return change


def beside_calls(text: str) -> Callable:
    def change(_choice, message):
        if message.get("tool_calls"):
            message["content"] = text

    return change


def replaced(old: str, new: str, name: str = "content") -> Callable:
    def change(_choice, message):
        if message.get(name):
            message[name] = message[name].replace(old, new)

    return change


def ids(value) -> Callable:
    def change(_choice, message):
        for call in message.get("tool_calls") or []:
            if call["id"]:
                call["id"] = value

    return change


def call_arguments(value) -> Callable:
    def change(_choice, message):
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = value

    return change


def moody() -> Callable:
    """Another answer each time it is asked: then the stream cannot be blamed."""
    asked = []

    def say(handler, content):
        if handler.path == CHAT and isinstance(content, dict) and "message" in (content.get("choices") or [{}])[0]:
            asked.append(1)
            content = copy.deepcopy(content)
            content["choices"][0]["message"]["content"] += f" That is the answer {'again ' * len(asked)}."
        return content

    return say


# --- lies about everything: of any shape, at any pace


def instead(value, *paths: str) -> Callable:
    """`value` in place of every JSON answer at these paths (without any: to a completion), and of every event."""

    def say(handler, content):
        return value if handler.path in (paths or (GENERATE, CHAT)) and isinstance(content, dict) else content

    return say


def numbers_as_text(handler, content):
    def changed(value):
        if isinstance(value, dict):
            return {name: changed(one) for name, one in value.items()}
        if isinstance(value, list):
            return [changed(one) for one in value]
        return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value

    return changed(content) if handler.path in (GENERATE, CHAT, "/v1/tokenize") else content


def fields_of_other_types(handler, content):
    if handler.path == GENERATE and isinstance(content, dict):
        return content | {"meta_info": [1, 2], "text": {"a": 1}}
    if handler.path == CHAT and isinstance(content, dict):
        return content | {"choices": [{"index": 0, "message": "four", "delta": "four", "finish_reason": 7}]}
    return content


def cut_off(handler, content):
    """Half of the JSON, whole by its length."""
    if handler.path in (GENERATE, CHAT) and isinstance(content, dict):
        text = json.dumps(content)
        return text[: len(text) // 2]
    return content


def dripping(head: bytes, drop: bytes) -> Callable:
    """A byte now and then, for ever: never silent, never whole. In a stream, a chunk of one byte."""

    def say(handler, content):
        if handler.path not in (GENERATE, CHAT) or not isinstance(content, dict):
            return content
        handler.close_connection = True
        handler.wfile.write(b"" if handler.streaming else head)
        while not handler.engine.ended.wait(0.05):
            handler.wfile.write(b"1\r\n \r\n" if handler.streaming else drop)
        return None

    return say


def held_back() -> Callable:
    """Every event but the last of a stream is kept for itself: what a proxy does that buffers."""

    def say(handler, content):
        if handler.path == GENERATE and isinstance(content, dict) and "meta_info" in content:
            if content["meta_info"]["finish_reason"] is None:
                return None
            time.sleep(0.001)
        return content

    return say


def error_in_stream(handler, content):
    """As SGLang ends a stream that it has aborted: 200, and an error in place of an event."""
    error = {"error": {"message": "KV cache out of memory", "type": "abort", "code": 500}}
    return error if handler.path in (GENERATE, CHAT) and isinstance(content, dict) else content


EQUALITY = (ORACLE, SPECULATION, BATCH)
MARKUP = {
    "function_calls": '<function_calls>[{"name": "get_weather"}]</function_calls>',
    "cut invoke": '<invoke name="get_weather"',
    "DSML, ASCII pipes": '<|DSML|invoke name="get_weather">',
    "DSML, wide pipes": "</｜DSML｜tool_calls>",
    "tool_call": '<tool_call>{"name": "get_weather"}</tool_call>',
    "control token": "<|im_end|>",
    "TOOL_CALLS": "[TOOL_CALLS]",
}


def _gates(names, verdict: str) -> dict[str, str]:
    return dict.fromkeys(names, verdict)


LENGTHS = [
    Lie("stops after 3 tokens", _gates(EQUALITY, FAIL), of_generate(keep(3, "stop")), words="3 tokens where"),
    Lie("3 tokens said to be all", _gates(EQUALITY, FAIL), of_generate(keep(3, "length")), words="3 tokens where"),
    Lie("empty answers", _gates(EQUALITY, FAIL), of_generate(keep(0, "stop")), words="0 tokens where"),
    Lie(
        "empty answers of both", _gates((ORACLE, SPECULATION), INCOMPLETE), of_generate(keep(0, "stop")), both=True,
        words="nothing can be judged by this reference",
    ),
    Lie("aborts", _gates((*EQUALITY, NEEDLE, ARITHMETIC), INCOMPLETE), of_generate(abort), words="KV cache out of"),
    Lie(
        "the reference aborts", _gates((ORACLE, SPECULATION), INCOMPLETE), of_generate(abort), only_other=True,
        words="KV cache out of memory",
    ),
    Lie("all tokens, but stopped", _gates(EQUALITY, FAIL), of_generate(end({"type": "stop"})), words="'length' must"),
    Lie("no reason for the end", _gates(EQUALITY, INCOMPLETE), of_generate(end(None)), words="no finish_reason"),
    Lie("a token too many", _gates(EQUALITY, FAIL), of_generate(one_more), words="tokens where"),
    Lie("reads 12 tokens", _gates(EQUALITY, INCOMPLETE), of_generate(truncates), words="12 prompt tokens, "),
    Lie("reads 12 tokens of a document", {NEEDLE: INCOMPLETE}, of_generate(truncates), words="12 prompt tokens"),
    Lie("both repeat one token", _gates(EQUALITY, INCOMPLETE), of_generate(stuck), both=True, words="say nothing"),
    Lie("one answer to all prompts", _gates(EQUALITY, INCOMPLETE), of_generate(canned), both=True, words="say nothing"),
]  # fmt: skip
STRICT = ("--strict",)
LOGPROBS = [
    Lie("no log-probabilities", _gates((ORACLE, BATCH), INCOMPLETE), of_generate(no_logprobs), words="0 log-prob"),
    Lie("none, strict", {BATCH: INCOMPLETE}, of_generate(no_logprobs), arguments=STRICT, words="0 log-probabilities"),
    Lie("a null", _gates((ORACLE, BATCH), FAIL), of_generate(chosen(None)), words="is no log-probability"),
    Lie("a null, strict", {BATCH: FAIL}, of_generate(chosen(None)), arguments=STRICT, words="is no log-probability"),
    Lie("a NaN, strict", {BATCH: FAIL}, of_generate(chosen(math.nan)), arguments=STRICT, words="is no log-probability"),
    Lie("above 0", _gates((ORACLE, BATCH), FAIL), of_generate(chosen(0.5)), words="above 0"),
    Lie("of other tokens", _gates((ORACLE, BATCH), FAIL), of_generate(of_other_tokens), words="of other tokens"),
    Lie("19 foreign tokens below", {ORACLE: FAIL}, of_generate(tops(foreign_below)), words="only 1 of the best 20"),
    Lie("19 foreign tokens once", {ORACLE: FAIL}, of_generate(foreign_below_once), words="only 1 of the best 20"),
    Lie("a token from outside", {ORACLE: FAIL}, of_generate(greedy_from_outside), words="not among its best 20"),
    Lie("5 of 20", {ORACLE: INCOMPLETE}, of_generate(tops(fewer)), words="5 best tokens where 20"),
    Lie("5 of 20, reference", {ORACLE: INCOMPLETE}, of_generate(tops(fewer)), only_other=True, words="5 best tokens"),
    Lie("no best", {ORACLE: INCOMPLETE}, of_generate(no_tops), words="of 0 of 24 positions"),
    Lie("worst first", {ORACLE: FAIL}, of_generate(tops(backwards)), words="do not stand best first"),
    Lie("a token twice", {ORACLE: FAIL}, of_generate(tops(first_twice)), words="repeat a token"),
    Lie("NaN among the best", {ORACLE: FAIL}, of_generate(tops(nan_in)), words="is no log-probability"),
    Lie(
        "no best of the judge", {SPECULATION: INCOMPLETE}, of_generate(tops(fewer)), ("tie_flip",), both=True,
        words="5 best tokens",
    ),
]  # fmt: skip
MODEL = [
    Lie("wrong logits", {ORACLE: FAIL}, faults=("wrong_logits",), words="reference chose"),
    Lie("the verifier slips in company", {SPECULATION: FAIL}, faults=("spec_corrupt",), words="concurrency 8"),
    Lie("other answers in company", {BATCH: FAIL}, faults=("batch_variant",), words="among 7 others chose"),
    Lie("forgets", {NEEDLE: FAIL}, faults=("forgets",), words="I do not know"),
    Lie("one too high", {ARITHMETIC: FAIL}, faults=("bad_math",), words="expected"),
    Lie("foreign words", {SOAK: FAIL, TOOLS: FAIL, ORACLE: FAIL}, faults=("foreign_script",)),
    Lie("stuck", {SOAK: FAIL, ORACLE: FAIL, SPECULATION: FAIL}, faults=("frozen",)),
]
COMPANY = [
    Lie("4 at once", {BATCH: INCOMPLETE}, server={"max_running": 4}, words="requests at once where 8 were to"),
    Lie("7 at once", {BATCH: INCOMPLETE}, server={"max_running": 7}, words="--max-running-requests 8"),
    Lie("5 at once", {SPECULATION: INCOMPLETE}, server={"max_running": 5}, words="5 requests at once where 8 were to"),
    Lie(
        "samples nothing", {BATCH: INCOMPLETE}, faults=("ignores_temperature",), words="the greedy answer of 96 tokens"
    ),
    Lie(
        "announces speculation", {SPECULATION: INCOMPLETE}, words="may never have drafted",
        server={"accept_length": 1, "flags": {"speculative_algorithm": "EAGLE"}},
    ),
    Lie("all tokens at the end", _gates((BATCH, SPECULATION), INCOMPLETE), held_back(), words="buffer"),
]  # fmt: skip
CALLS = [
    Lie("stop beside calls", {TOOLS: FAIL}, of_chat(finish_where("tool_calls", "stop")), words="_reason is 'stop'"),
    Lie("calls without calls", {TOOLS: FAIL}, of_chat(finish_where("stop", "tool_calls")), words="_reason is 'tool"),
    Lie("cut at the length", {TOOLS: FAIL}, of_chat(finish("length")), words="finish_reason is 'length'"),
    Lie("no end", {TOOLS: FAIL}, of_chat(finish(None)), words="finish_reason is None"),
    Lie("no end, streamed", {TOOLS: FAIL}, of_chat(finish(None), True), words="streamed: finish_reason is None"),
    Lie("aborts the chat", {TOOLS: INCOMPLETE}, of_chat(finish("abort")), words="aborted"),
    Lie("aborts the stream", {TOOLS: INCOMPLETE}, of_chat(finish("abort"), True), words="aborted"),
    Lie("no ids", {TOOLS: FAIL}, of_chat(ids(None)), words="ids of the calls are missing"),
    Lie("no ids, streamed", {TOOLS: FAIL}, of_chat(ids(None), True), words="streamed: the ids of the calls"),
    Lie("one id for all", {TOOLS: FAIL}, of_chat(ids("call_1")), words="missing or the same"),
    Lie("other content streamed", {TOOLS: FAIL}, of_chat(replaced("four", "4"), True), words="differ in content"),
    Lie("content lost in the stream", {TOOLS: FAIL}, of_chat(replaced("make", ""), True), words="differ in content"),
    Lie(
        "reasoning lost in the stream", {TOOLS: FAIL}, of_chat(replaced("first", "", "reasoning_content"), True),
        words="differ in reasoning_content",
    ),
    Lie("a wrong sum", {TOOLS: FAIL}, of_chat(replaced("four", "five")), words="the sum is wrong"),
    Lie("moods", {TOOLS: INCOMPLETE}, moody(), words="gives another answer"),
    Lie("a foreign letter", {TOOLS: FAIL}, of_chat(added("content", " 的")), words="foreign script in content"),
    Lie("foreign thoughts", {TOOLS: FAIL}, of_chat(added("reasoning_content", " так")), words="in reasoning_content"),
    Lie("an escape", {TOOLS: FAIL}, of_chat(added("content", "\x1b[2J")), words="characters that are none"),
    Lie("arguments that are a list", {TOOLS: FAIL}, of_chat(call_arguments("[1]"), False), words="no JSON object"),
    Lie("arguments that are no text", {TOOLS: INCOMPLETE}, of_chat(call_arguments({"city": 1})), words="a text, got"),
    *(Lie(f"beside calls: {name}", {TOOLS: FAIL}, of_chat(beside_calls(text), False), words="markup in content")
      for name, text in MARKUP.items()),
    *(Lie(fault, {TOOLS: FAIL}, faults=(fault,)) for fault in (
        "markup_leak", "reasoning_leak", "broken_markup", "broken_arguments", "empty_call", "stream_differs",
        "lost_tool_delta",
    )),
]  # fmt: skip
NUMBERS = of_generate(lambda found, _meta: found.__setitem__("text", found["text"] + " or 11111 or 22222"))
MODELS = {"list": [], "no data": {}, "no names": {"data": [{}]}, "a name that is a number": {"data": [{"id": 7}]}}
OTHER_ROUTES = [
    *(Lie(f"models: {name}", {TOOLS: INCOMPLETE}, instead(value, "/v1/models"), words="/v1/models")
      for name, value in MODELS.items()),
    *(Lie(f"server_info: {value!r}", {SPECULATION: INCOMPLETE}, instead(value, "/server_info"), words="an object")
      for value in ([], "3")),
    *(Lie(f"tokens: {value!r}", _gates((ORACLE, BATCH, SPECULATION), INCOMPLETE), instead(value, "/v1/tokenize"),
          both=True, words="tokenize")
      for value in ([], {"tokens": None}, {"tokens": ["1"]}, {"tokens": [[1, 2]]}, {"tokens": [1.5]})),
]  # fmt: skip
PLAIN = [Lie("several numbers", {NEEDLE: FAIL}, NUMBERS, words="or 11111")]
TO_ALL = [
    Lie("a list", _gates(EVERY_GATE, INCOMPLETE), instead([]), words="expected an object, got []"),
    Lie("null", _gates(EVERY_GATE, INCOMPLETE), instead("null"), words="expected an object, got None"),
    Lie("an empty object", _gates(EVERY_GATE, INCOMPLETE), instead({}), words="http"),
    Lie("numbers as texts", _gates(EVERY_GATE, INCOMPLETE), numbers_as_text, words="expected a"),
    Lie("fields of other types", _gates(EVERY_GATE, INCOMPLETE), fields_of_other_types, words="expected a"),
    Lie("nested without end", _gates(EVERY_GATE, INCOMPLETE), instead("[" * 200_000), words="no JSON"),
    Lie("a number without end", _gates(EVERY_GATE, INCOMPLETE), instead('{"output_ids": [' + "9" * 9000 + "]}")),
    Lie("cut off", _gates(EVERY_GATE, INCOMPLETE), cut_off, words="no JSON"),
    Lie("an error as an answer", _gates(EVERY_GATE, INCOMPLETE), error_in_stream),
    Lie(
        "drips", _gates(EVERY_GATE, INCOMPLETE), dripping(b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n", b" "),
        arguments=("--total-timeout", "0.4"),
        words="no whole answer within 0.4 s",
    ),
    Lie(
        "drips its head", _gates(EVERY_GATE, INCOMPLETE), dripping(b"HTTP/1.1 200 OK\r\nX-Slow: ", b"x"),
        arguments=("--total-timeout", "0.4"),
        words="no whole answer within 0.4 s",
    ),
    Lie("wants a key", _gates(EVERY_GATE, INCOMPLETE), server={"api_key": "s3cret-key"}, words="401: Unauthorized"),
]  # fmt: skip
LIES = [*LENGTHS, *LOGPROBS, *MODEL, *COMPANY, *CALLS, *OTHER_ROUTES, *PLAIN, *TO_ALL]
