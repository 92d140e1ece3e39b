"""Tool calls of one turn stay in the order in which the model wrote them.

deepseek-recipe (0.2.0), which makes all prompts from 0.5.23 on, sorts the calls of a turn, and their results, by their
ids. DeepSeek's own ids begin with the call's number; SGLang's are random, as are other servers'. So every second pair
of calls is in the next prompt the other way round: "ran the tests, then edited the file". The model reads what it did
not do, and the prefix cache, which has what it wrote, ends there.

Here recipe is given ids that sort as the calls stand; no id is part of a prompt. This runs in the process that answers
over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import is_our_encoding

CALLS, ID, RESULT_OF = "tool_calls", "id", "tool_call_id"


def replace_encode(original: Callable) -> Callable:
    """For DeepSeekRecipeChatEncodingAdapter._encode(self, body, *, effort, ...) -> the prompt's tokens."""

    @functools.wraps(original)
    def _encode(self, body, **more):
        if is_our_encoding(self._spec):
            body = {**body, "messages": in_order(body["messages"])}
        return original(self, body, **more)

    return _encode


def in_order(messages: list[dict]) -> list[dict]:
    """The messages with ids that sort as their calls stand. A result belongs to the last turn that has its id; a result
    of no call, and a turn that lacks an id or has one twice, keep theirs, of which recipe says what it thinks."""
    made, named = [], {}
    for at, message in enumerate(messages):
        calls = message.get(CALLS)
        if calls:
            ids = [call.get(ID) for call in calls]
            if None in ids or max(Counter(ids).values()) > 1:
                for old in ids:
                    named.pop(old, None)
            else:
                named |= {old: f"call_{at:06d}_{i:06d}" for i, old in enumerate(ids)}
                calls = [{**call, ID: named[call[ID]]} for call in calls]
            message = {**message, CALLS: calls}
        elif message.get(RESULT_OF) in named:
            message = {**message, RESULT_OF: named[message[RESULT_OF]]}
        made.append(message)
    return made
