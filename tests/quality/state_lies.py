"""Lies of a server whose answers depend on what went before: a prefix from the cache, a storm of cancelled requests.
Rows of test_lies.py's table, as those of lying_server.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

from tests.quality.lying_server import FAIL, INCOMPLETE, Lie, abort, canned, end, keep, of_generate, one_more, stuck

CHATS, CANCELLED = "long-chats", "cancelled-requests"  # names of the gates
BOTH = (CHATS, CANCELLED)


def other_token(found, meta):
    """The sixth token is another one, with the log-probability of the right one."""
    if len(found["output_ids"]) > 5:
        found["output_ids"][5] = 7
        for entry in meta.get("output_token_logprobs", [])[5:6]:
            entry[1] = 7


def where_cached(least: float, most: float) -> Callable:
    """Wrong where this share of the prompt is said to come from the cache."""

    def change(found, meta):
        if least < meta["cached_tokens"] / meta["prompt_tokens"] <= most:
            other_token(found, meta)

    return of_generate(change)


def cut_where_cached(found, meta):
    if meta["cached_tokens"]:
        keep(3, "stop")(found, meta)


def cached(tokens) -> Callable:
    """`tokens`(what is true) is what the server tells."""

    def change(found, meta):
        meta["cached_tokens"] = tokens(meta["cached_tokens"])

    return of_generate(change)


def after_cancels(change: Callable) -> Callable:
    """A lie about /generate from the first cancelled request on."""
    lie = of_generate(change)

    def say(handler, content):
        return lie(handler, content) if handler.engine.requests.cancelled else content

    return say


def in_a_storm(change: Callable) -> Callable:
    """A lie about answers that are not streamed while others run, and only then."""
    lie = of_generate(change)

    def say(handler, content):
        return lie(handler, content) if handler.engine.active > 1 and not handler.streaming else content

    return say


def other_logprob(found, meta):
    for entry in meta.get("output_token_logprobs", [])[5:6]:
        entry[0] -= 1e-6


def of_loads(change: Callable, after: bool = False) -> Callable:
    """A lie about /v1/loads: `change`(the first rank's load). `after`: from the first cancelled request on."""

    def say(handler, content):
        if handler.path != "/v1/loads" or (after and not handler.engine.requests.cancelled):
            return content
        found = copy.deepcopy(content)
        change(found["loads"][0])
        return found

    return say


def load(name: str, value) -> Callable:
    def change(rank):
        rank[name] = value(rank[name]) if callable(value) else value

    return change


def all_loads(value) -> Callable:
    def say(handler, content):
        return value if handler.path == "/v1/loads" else content

    return say


def no_loads(handler, content):
    if handler.path == "/v1/loads":
        handler.path = "/elsewhere"
        handler.refuse("Not Found", 404)
        return None
    return content


def idle(rank):
    rank |= {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 0}


def moods() -> Callable:
    asked = []

    def change(found, meta):
        asked.append(1)
        if len(asked) % 3 == 1:
            other_token(found, meta)

    return of_generate(change)


def _gates(names, verdict: str) -> dict[str, str]:
    return dict.fromkeys(names, verdict)


CACHE = [
    Lie("a stale prefix", {CHATS: FAIL}, where_cached(0, 1), words="chose 7"),
    Lie("stale where a chat goes on", {CHATS: FAIL}, where_cached(0, 0.85), words="as the chat grew chose 7"),
    Lie("stale where all is cached", {CHATS: FAIL}, where_cached(0.85, 1), words="once more from the cache chose 7"),
    Lie("cut short where cached", {CHATS: FAIL}, of_generate(cut_where_cached), words="3 tokens where 24"),
    Lie("keeps no prefix", {CHATS: INCOMPLETE}, faults=("no_radix",), words="came from the cache"),
    Lie("all from the cache", {CHATS: INCOMPLETE}, faults=("cached_everything",), words="in an emptied cache"),
    Lie("does not count what is cached", {CHATS: INCOMPLETE}, cached(lambda _: None), words="0 of"),
    Lie("little from the cache", {CHATS: INCOMPLETE}, cached(lambda true: true // 8), words="shared tokens came from"),
    Lie("more than there is", {CHATS: INCOMPLETE}, cached(lambda true: 9 * true), words="cached tokens where"),
    Lie("a negative count", {CHATS: INCOMPLETE}, cached(lambda _: -1), words="expected a whole number"),
]
LEFT_BEHIND = [
    Lie(
        "tokens not given back", {CANCELLED: FAIL}, of_loads(load("num_used_tokens", lambda used: used + 64), True),
        words="64 tokens of the KV cache are not given back",
    ),
    Lie("one runs for ever", {CANCELLED: FAIL}, of_loads(load("num_running_reqs", 1), True), words="1 running"),
    Lie("one waits for ever", {CANCELLED: FAIL}, of_loads(load("num_waiting_reqs", 1), True), words="1 waiting"),
    Lie("other answers afterwards", {CANCELLED: FAIL}, after_cancels(other_token), words="after it chose 7"),
    Lie("another answer beside the storm", {CANCELLED: FAIL}, in_a_storm(other_token), words="in it chose 7 (below"),
    Lie("other log-probabilities", {CANCELLED: FAIL}, after_cancels(other_logprob), words="differs by 1e-06"),
    Lie("shorter answers afterwards", {CANCELLED: FAIL}, after_cancels(keep(3, "stop")), words="3 tokens where"),
    Lie("one answer too long", {CANCELLED: FAIL}, after_cancels(one_more), words="25 tokens where 24"),
    Lie("the load of nobody", {CANCELLED: INCOMPLETE}, of_loads(idle), words="no running request in the storm"),
    Lie("no load", {CANCELLED: INCOMPLETE}, no_loads, words="/v1/loads"),
    Lie("a load of no rank", {CANCELLED: INCOMPLETE}, all_loads({"loads": []}), words="no rank tells its load"),
    Lie("a load that is a list", {CANCELLED: INCOMPLETE}, all_loads([]), words="expected an object"),
    Lie("no count of tokens", {CANCELLED: INCOMPLETE}, of_loads(load("num_used_tokens", None)), words="num_used"),
    Lie("a count as text", {CANCELLED: INCOMPLETE}, of_loads(load("num_running_reqs", "0")), words="num_running_reqs"),
    Lie("busy from the start", {CANCELLED: INCOMPLETE}, of_loads(load("num_running_reqs", 3)), words="needs it alone"),
    Lie("moods before the storm", {CANCELLED: INCOMPLETE}, moods(), words="without any storm"),
]  # fmt: skip
ENDS = [
    Lie("stops early, with a state", _gates(BOTH, FAIL), of_generate(keep(3, "stop")), words="3 tokens where"),
    Lie("empty, with a state", _gates(BOTH, FAIL), of_generate(keep(0, "length")), words="0 tokens where"),
    Lie("aborts, with a state", _gates(BOTH, INCOMPLETE), of_generate(abort), words="KV cache out of memory"),
    Lie("no end, with a state", _gates(BOTH, INCOMPLETE), of_generate(end(None)), words="no finish_reason"),
    Lie("stuck, with a state", _gates(BOTH, INCOMPLETE), of_generate(stuck), words="say nothing"),
    Lie("one answer to all, with a state", _gates(BOTH, INCOMPLETE), of_generate(canned), words="say nothing"),
]
LIES = [*CACHE, *LEFT_BEHIND, *ENDS]
