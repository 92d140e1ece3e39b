"""Of the responses that clients let a server store, the last ones are kept, instead of all of them for ever.

Over /v1/responses a request that does not say `"store": false` (Codex does, OpenAI's own libraries do not) is kept in
the process that answers: all messages of its conversation, and the response with its instructions and tools, so that
`previous_response_id` finds them. Nothing is ever forgotten, and an agent sends its whole conversation with each turn:
a conversation of 250 KB of JSON leaves 0.5 MB with each of its turns, eight agents with three turns a minute 17 GB a
day, until the host has no memory left. Up to 0.5.19 in all servers, from 0.5.20 on with --enable-response-store ("no
TTL or size limit", by its own help). No thread of SGLang's is known; vLLM #48275 is the same.

Here both have a bound, and what was used last stays. A response that was forgotten is "not found", as behind a restart.
From 0.5.20 on SGLang asks for the messages of the response before once more when an answer is over, and so many others
may have come meanwhile that they are forgotten: an answer is told and kept with those that it began with. Up to 0.5.19
one that is overtaken so is told, and not kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import answers_for_ours

KEPT = 4096  # responses
KEPT_LENGTH = 256 << 20  # of their texts, and a word for each
WORD = 16
RUNS = ("queued", "in_progress")  # in the background: SGLang takes for granted that it finds these
HISTORY, BEGUN = "_response_input_history", "_dsv4_sm120_begun_with"  # of the serving, 0.5.20 on; of a request, ours


def replace_init(original: Callable) -> Callable:
    """For OpenAIServingResponses.__init__(self, tokenizer_manager, template_manager, ..), whose msg_store and
    response_store are dicts of messages and of responses by the response's id."""

    @functools.wraps(original)
    def __init__(self, tokenizer_manager, template_manager, **further):
        original(self, tokenizer_manager, template_manager, **further)
        if answers_for_ours(self):
            history = getattr(self, HISTORY, None)
            kept = Kept(tells_behind=history is not None)
            self.msg_store, self.response_store = kept.messages, kept.responses
            if history is not None:
                setattr(self, HISTORY, remembered(history))

    return __init__


def remembered(original: Callable) -> Callable:
    """original: request -> the messages of the response before, and its own; asked as it comes and when it is over."""

    @functools.wraps(original)
    def _response_input_history(request):
        known = vars(request)
        if BEGUN not in known:
            known[BEGUN] = original(request)
        return list(known[BEGUN])

    return _response_input_history


class Kept:
    """Responses and their messages, by id; those used last."""

    def __init__(self, *, tells_behind: bool = False):
        """tells_behind: whether SGLang stores the messages of an answer right behind its response once more."""
        self.messages, self.responses = Messages(self), Responses(self)
        self.tells_behind = tells_behind
        self.lengths: dict[str, int] = {}  # by last use
        self.length = 0

    def used(self, name: str, more: int = 0) -> None:
        self.lengths[name] = self.lengths.pop(name, 0) + more
        self.length += more
        for oldest in list(self.lengths)[:-1] if self.is_full() else ():
            if getattr(self.responses.seen(oldest), "status", None) not in RUNS:
                self.length -= self.lengths.pop(oldest)
                self.messages.pop(oldest, None)
                self.responses.pop(oldest, None)
                if not self.is_full():
                    break

    def is_full(self) -> bool:
        return len(self.lengths) > KEPT or self.length > KEPT_LENGTH


class Messages(dict):
    def __init__(self, kept: Kept):
        super().__init__()
        self.kept = kept

    def seen(self, name: str):
        """What is kept of it, which is no use of it."""
        return super().get(name)

    def __getitem__(self, name):
        found = super().__getitem__(name)
        self.kept.used(name)
        return found

    def get(self, name, default=None):
        if name in self:
            self.kept.used(name)
        return super().get(name, default)

    def __setitem__(self, name, value):
        more = length(value) - (length(self.seen(name)) if name in self else 0)
        super().__setitem__(name, value)
        self.kept.used(name, more)


class Responses(Messages):
    def __setitem__(self, name, value):
        # else they were forgotten while it was answered: the next turn asks for both
        if name in self.kept.messages or self.kept.tells_behind:
            super().__setitem__(name, value)


def length(value) -> int:
    """Of all texts in it, and a word for each and for the whole."""
    found, rest = 0, [value]
    while rest:
        one = rest.pop()
        if isinstance(one, str):
            found += len(one) + WORD
        elif isinstance(one, dict):
            rest.extend(one.values())
        elif isinstance(one, list | tuple):
            rest.extend(one)
        elif hasattr(one, "__pydantic_fields_set__"):
            rest.extend(vars(one).values())
    return found + WORD
