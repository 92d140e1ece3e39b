"""What a server said, with the types that its routes promise: whatever JSON comes, it is taken whole or refused.

The shapes are those of SGLang's /generate (srt/managers/tokenizer_manager.py) and of its OpenAI-compatible chat
(srt/entrypoints/openai/protocol.py), 0.5.12 to 0.5.23. What else an answer holds is not looked at. Every function here
raises ServerNonsense for a value of another type; that is all they raise.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

from bench.serving.server_errors import ServerNonsense

GREATEST_ID = 2**31  # of a token: the ids of tokenizers are 32-bit numbers
GREATEST_ACCEPTANCE = 1e6


def shown(value: object, length: int = 60) -> str:
    """`value` for a message: short, and nothing in it that a terminal would obey."""
    text = repr(value) if not isinstance(value, (list, dict)) or len(value) < 100 else f"a {type(value).__name__}"
    return text if len(text) <= length else f"{text[:length]}..."


def _other(what: str, expected: str, value: object) -> ServerNonsense:
    return ServerNonsense(f"{what}: expected {expected}, got {shown(value)}")


def parse(text: bytes, what: str) -> object:
    """The JSON in `text`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also bytes that are no UTF-8, numbers and nests without an end
        raise ServerNonsense(f"{what}: the answer is no JSON ({type(error).__name__}): {text[:80]!r}") from error


def mapping(value: object, what: str) -> dict:
    if not isinstance(value, dict):
        raise _other(what, "an object", value)
    return value


def sequence(value: object, what: str) -> list:
    """A list; None is an empty one, as these routes write it."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise _other(what, "a list", value)
    return value


def text_of(value: object, what: str) -> str:
    """A text; None is an empty one, as these routes write it."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _other(what, "a text", value)
    return value


def count(value: object, what: str) -> int:
    """A number of things; None is 0."""
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _other(what, "a whole number of at least 0", value)
    return value


def token(value: object, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < GREATEST_ID:
        raise _other(what, "a token id", value)
    return value


def first_state(info: object) -> dict:
    """Of /server_info what the first scheduler says of itself; nothing where it says none."""
    states = info.get("internal_states") if isinstance(info, dict) else None
    return states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}


def is_acceptance(value: object) -> bool:
    """Whether this is the number of tokens that a step of speculation has brought."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < GREATEST_ACCEPTANCE


def tokens(value: object, what: str) -> list[int]:
    if not isinstance(value, list):
        raise _other(what, "a list of token ids", value)
    return [token(one, what) for one in value]


def weighed(value: object, what: str) -> tuple[float, int]:
    """(log-probability, id) of SGLang's [log-probability, id, text or null]. null is NaN: JSON has no other way to say
    it.
    """
    if not isinstance(value, list) or len(value) < 2:
        raise _other(what, "[log-probability, token id, ...]", value)
    number = value[0]
    if number is None:
        number = math.nan
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise _other(what, "a log-probability", number)
    if isinstance(number, int) and abs(number) > 2**53:  # an int that is no float
        raise _other(what, "a log-probability", number)
    return float(number), token(value[1], what)


@dataclass
class Answer:
    """One completion. `tops[i]` are the most likely tokens at output position i as (log-probability, id), as the server
    gave them (best first, if it is right). `logprobs[i]` is said of the token `logprob_ids[i]`. What a speculating
    server says of positions behind the last token is left out.
    """

    ids: list[int]
    text: str
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[float, int]]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finish: str | None = None  # stop, length or abort
    finish_message: str = ""  # what an abort says of itself
    logprob_ids: list[int] = field(default_factory=list)
    completion_tokens: int | None = None  # by the server's own count
    speculated: bool = False  # it says that drafts were verified

    @classmethod
    def of(cls, value: object, what: str = "/generate") -> Answer:
        """From the JSON of /generate."""
        found = mapping(value, what)
        meta = mapping(found.get("meta_info", {}), f"{what}: meta_info")
        finish, message = meta.get("finish_reason"), ""
        if isinstance(finish, dict):
            message = text_of(finish.get("message"), f"{what}: finish_reason.message")
            finish = finish.get("type")
        if finish is not None:
            finish = text_of(finish, f"{what}: finish_reason")
        chosen = [
            weighed(one, f"{what}: output_token_logprobs")
            for one in sequence(meta.get("output_token_logprobs"), f"{what}: output_token_logprobs")
        ]
        ids = found.get("output_ids")
        if ids is None and not chosen:
            raise ServerNonsense(f"{what}: the answer has no output_ids: {shown(found)}")
        tops = sequence(meta.get("output_top_logprobs"), f"{what}: output_top_logprobs")
        made = meta.get("completion_tokens")
        ids = [one for _, one in chosen] if ids is None else tokens(ids, f"{what}: output_ids")
        chosen = chosen[: len(ids)]
        return cls(
            ids=ids,
            text=text_of(found.get("text"), f"{what}: text"),
            logprobs=[logprob for logprob, _ in chosen],
            tops=[
                [weighed(one, f"{what}: output_top_logprobs") for one in sequence(step, f"{what}: output_top_logprobs")]
                for step in tops[: len(ids)]
            ],
            prompt_tokens=count(meta.get("prompt_tokens"), f"{what}: prompt_tokens"),
            cached_tokens=count(meta.get("cached_tokens"), f"{what}: cached_tokens"),
            finish=finish,
            finish_message=message,
            logprob_ids=[one for _, one in chosen],
            completion_tokens=None if made is None else count(made, f"{what}: completion_tokens"),
            speculated=any(is_acceptance(meta.get(name)) for name in ("spec_accept_length", "spec_verify_ct")),
        )

    def followed_by(self, piece: Answer) -> Answer:
        """This much of a streamed answer and the next event's. SGLang repeats the whole answer in every event, and with
        --incremental-streaming-output sends only what is new: its own count of the tokens tells which.
        """
        if piece.completion_tokens is None or piece.completion_tokens == len(piece.ids):
            return piece
        if piece.finish == "abort" and len(self.ids) + len(piece.ids) == piece.completion_tokens + 1:
            # retracted, and aborted while it waited: behind what is new come its last token and all its text once more
            ids, length = self.ids + piece.ids[:-1], (len(self.text) + len(piece.text)) // 2
            kept = {name: getattr(self, name) for name in _LISTS}
            return Answer(**{**vars(piece), **kept, "ids": ids, "text": piece.text[len(piece.text) - length :]})
        whole = {name: getattr(self, name) + getattr(piece, name) for name in ("ids", "text", *_LISTS)}
        return Answer(**{**vars(piece), **whole})


_LISTS = ("logprobs", "tops", "logprob_ids")


def call_of(value: object, what: str) -> dict:
    """A tool call or a piece of one: {"id", "type", "function": {"name", "arguments"}}, "" where there is nothing."""
    found = mapping(value, what)
    function = mapping({} if found.get("function") is None else found["function"], f"{what}: function")
    return {
        "id": text_of(found.get("id"), f"{what}: id"),
        "type": text_of(found.get("type"), f"{what}: type"),
        "function": {name: text_of(function.get(name), f"{what}: {name}") for name in ("name", "arguments")},
    }


def message_of(value: object, what: str) -> dict:
    """A chat message or a streamed piece of one: {"content", "reasoning_content", "tool_calls"} of these types."""
    found = mapping(value, what)
    calls = sequence(found.get("tool_calls"), f"{what}: tool_calls")
    return {
        "content": text_of(found.get("content"), f"{what}: content"),
        "reasoning_content": text_of(found.get("reasoning_content"), f"{what}: reasoning_content"),
        "tool_calls": [call_of(one, f"{what}: tool_calls") for one in calls],
    }


class JoinedMessage:
    """A streamed chat message, its pieces joined as a client must join them."""

    def __init__(self, what: str):
        self.what, self.finish = what, None
        self.content, self.reasoning = [], []
        self.calls: dict[int, dict] = {}

    def add(self, event: dict) -> None:
        """One event; those without a choice carry usage."""
        for value in sequence(event.get("choices"), f"{self.what}: choices"):
            choice = mapping(value, f"{self.what}: choices")
            delta = {} if choice.get("delta") is None else choice["delta"]
            piece = message_of(delta, f"{self.what}: delta")
            if self.finish and any(piece.values()):
                said = f"a stream that goes on after finish_reason {self.finish!r}"
                raise ServerNonsense(f"{self.what}: {said}: {shown(piece)}")
            self.content.append(piece["content"])
            self.reasoning.append(piece["reasoning_content"])
            self.finish = text_of(choice.get("finish_reason"), f"{self.what}: finish_reason") or self.finish
            for call, given in zip(piece["tool_calls"], delta.get("tool_calls") or [], strict=True):
                self.add_call(count(given.get("index"), f"{self.what}: index"), call)

    def add_call(self, index: int, piece: dict) -> None:
        call = self.calls.setdefault(index, {"id": "", "type": "", "function": {"name": "", "arguments": ""}})
        if call["id"] and piece["id"] and call["id"] != piece["id"]:
            raise ServerNonsense(f"{self.what}: tool call {index} has two ids, {call['id']!r} and {piece['id']!r}")
        call["id"], call["type"] = call["id"] or piece["id"], call["type"] or piece["type"]
        for name in ("name", "arguments"):
            call["function"][name] += piece["function"][name]

    def message(self) -> dict:
        return {
            "content": "".join(self.content),
            "reasoning_content": "".join(self.reasoning),
            "tool_calls": [self.calls[index] for index in sorted(self.calls)],
            "finish_reason": self.finish,
        }
