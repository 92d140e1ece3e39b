"""Lies of a server whose answers look as they should: wrong for some, later, in streams, in company, or of another
request. Rows of test_lies.py's table, as those of lying_server.py.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

from tests.quality.lying_server import (
    ARITHMETIC,
    BATCH,
    FAIL,
    GENERATE,
    INCOMPLETE,
    NEEDLE,
    ORACLE,
    SOAK,
    SPECULATION,
    TOOLS,
    Lie,
    keep,
    of_chat,
    of_generate,
    tops,
    truncates,
)
from tests.quality.state_lies import CANCELLED, CHATS, in_a_storm, other_token


def text(change: Callable, streamed: bool | None = None) -> Callable:
    """`change`(text) of a /generate answer. `streamed`: told only so, or only not so."""

    def changed(found, meta):
        found["text"] = change(found["text"])

    lie = of_generate(changed)
    return lambda handler, content: lie(handler, content) if streamed in (None, handler.streaming) else content


def every(number: int, change: Callable) -> Callable:
    """A lie about each `number`th answer."""
    asked, lie = [], of_generate(change)

    def say(handler, content):
        if handler.path == GENERATE and isinstance(content, dict) and "meta_info" in content:
            asked.append(1)
            return lie(handler, content) if len(asked) % number == 0 else content
        return content

    return say


def empty(found, meta):
    """An error that is told as an answer: 200, no token, no text."""
    keep(0, "stop")(found, meta)
    found["text"] = ""


def answer_before() -> Callable:
    """Each gets the text of the one before it."""
    before = []

    def change(found, meta):
        if meta["finish_reason"]:
            before.append((found["text"], found["output_ids"], meta["finish_reason"], meta["completion_tokens"]))
            if len(before) > 1:
                found["text"], found["output_ids"], meta["finish_reason"], meta["completion_tokens"] = before[-2]

    return of_generate(change)


def cut_within_a_sentence(found, meta):
    words = re.findall(r"\s*\S+", found["text"])[:27]
    found["text"] = "".join(words).rstrip(".")
    keep(27, "stop")(found, meta)


def counts(found, meta):
    meta["completion_tokens"] = 2 * meta["completion_tokens"]


def flat(step):
    for entry in step:
        entry[0] = -3.0


def of_the_token_before(found, meta):
    """The log-probabilities are said one place late."""
    entries = meta.get("output_token_logprobs") or []
    values = [entry[0] for entry in entries]
    for entry, value in zip(entries, [-0.9, *values], strict=False):
        entry[0] = value


def wrong_and_as_likely(handler, content):
    """A prefix from the cache is wrong, and whoever asks behind it hears that the wrong token is as likely."""

    def change(found, meta):
        if not meta["cached_tokens"]:
            return
        other_token(found, meta)
        for step in meta.get("output_top_logprobs") or []:
            for rank, entry in enumerate(step):
                entry[0] = -3.0 - rank / 1000
            if len(step) > 1:
                step[1][1] = 7
        for entry, step in zip(
            meta.get("output_token_logprobs", []), meta.get("output_top_logprobs", []), strict=False
        ):
            entry[0] = step[0][0] if step else entry[0]

    return of_generate(change)(handler, content)


def drafts_alone(found, meta):
    meta.pop("spec_accept_length", None)


def no_drafts_in_company(handler, content):
    """Speculation that is switched off above a few requests, as some servers do."""
    return of_generate(drafts_alone)(handler, content) if handler.engine.max_active > 4 else content


def others_are_wrong(handler, content):
    """Of those that run at once, the streamed ones."""
    return of_generate(other_token)(handler, content) if handler.streaming and handler.engine.active > 2 else content


def streams_cut(handler, content):
    """A stream in company ends after a few tokens, as if it were whole."""
    if handler.streaming and handler.engine.active > 1 and isinstance(content, dict) and "meta_info" in content:
        content = copy.deepcopy(content)
        content["output_ids"] = content["output_ids"][:8]
        content["meta_info"]["completion_tokens"] = len(content["output_ids"])
        if content["meta_info"]["finish_reason"] and content["meta_info"]["finish_reason"]["type"] != "abort":
            content["meta_info"]["finish_reason"] = {"type": "stop"}
    return content


def used_never_told(handler, content):
    if handler.path != "/v1/loads":
        return content
    found = copy.deepcopy(content)
    found["loads"][0]["num_used_tokens"] = 0
    return found


def extra_field(_choice, message):
    for call in message.get("tool_calls") or []:
        if call["function"]["arguments"].endswith("}"):
            call["function"]["arguments"] = call["function"]["arguments"][:-1] + ', "country": "x"}'


def after_the_end() -> Callable:
    """A stream says that it ends, and goes on."""

    def change(choice, delta):
        if delta.get("content"):
            choice["finish_reason"] = "stop"

    return of_chat(change, True)


def note_goes_on(_choice, message):
    for call in message.get("tool_calls") or []:
        call["function"]["arguments"] = call["function"]["arguments"].replace("& more", "& more & more & mo")


STATE = (CHATS, CANCELLED)
WHOSE = [
    Lie("the answer of before", {NEEDLE: FAIL, ARITHMETIC: FAIL}, answer_before(), words="expected"),
    Lie("the answer of before, soaked", {SOAK: FAIL}, answer_before(), words="not this one's"),
    Lie(
        "no case named",
        {SOAK: INCOMPLETE},
        text(lambda said: re.sub(r"Case .*?:", "Yes.", said)),
        words="the case that",
    ),
    Lie("reads 12 tokens of a request", {SOAK: INCOMPLETE}, of_generate(truncates), words="12 prompt tokens of"),
]
TEXTS = [
    Lie("streams lose what is in them", {SOAK: FAIL}, text(lambda _: "", True), words="an empty answer"),
    Lie("cut within a sentence", {SOAK: FAIL}, of_generate(cut_within_a_sentence), words="within a sentence"),
    Lie("a letter now and then", {SOAK: FAIL}, text(lambda said: said + " 的 it."), words="a few in each"),
    Lie("every 14th is empty", {ARITHMETIC: FAIL}, every(14, empty), words="an empty answer"),
]
NUMBERS = [
    Lie("counts twice", dict.fromkeys((ORACLE, BATCH, *STATE), FAIL), of_generate(counts), words="the server counts"),
    Lie("counts twice, streamed", {SPECULATION: INCOMPLETE}, of_generate(counts), words="tokens that counts"),
    Lie("flat logits", {ORACLE: FAIL}, of_generate(tops(flat)), words="all as likely, -3.0000"),
    Lie("flat logits of both", {ORACLE: INCOMPLETE}, of_generate(tops(flat)), both=True, words="all as likely"),
    Lie(
        "one place late",
        {ORACLE: FAIL},
        of_generate(of_the_token_before),
        words="has log-probability -0.9000, and -0.4",
    ),
    Lie("a wrong prefix as likely", {CHATS: FAIL}, wrong_and_as_likely, words="chose 7 (below the best 20)"),
]
COMPANY = [
    Lie("no drafts in company", {SPECULATION: INCOMPLETE}, no_drafts_in_company, words="at concurrency 8 no answer"),
    Lie("the others are wrong", {BATCH: FAIL}, others_are_wrong, words="in company chose 7"),
    Lie(
        "streams cut in a storm", {CANCELLED: FAIL}, streams_cut, arguments=("--requests", "24"),
        words="ended before anybody cancelled it",
    ),
    Lie("no token is ever in use", {CANCELLED: INCOMPLETE}, used_never_told, words="no token in use for them"),
    Lie(
        "wrong beside a storm, and no log-probabilities", {CANCELLED: INCOMPLETE}, in_a_storm(other_token),
        ("rejects_logprobs",), words="nobody can say whether a batch may move them",
    ),
]  # fmt: skip
CALLS = [
    Lie("an argument of nobody", {TOOLS: FAIL}, of_chat(extra_field), words="the tool does not have, country"),
    Lie("a note that goes on", {TOOLS: FAIL}, of_chat(note_goes_on), words="the note has changed"),
    Lie("goes on after its end", {TOOLS: INCOMPLETE}, after_the_end(), words="goes on after finish_reason 'stop'"),
]
LIES = [*WHOSE, *TEXTS, *NUMBERS, *COMPANY, *CALLS]
