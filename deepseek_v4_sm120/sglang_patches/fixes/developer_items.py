"""A developer's message in the middle of a conversation over /v1/responses stays where it is, in the user's turn.

Codex sends such messages: a picture that was made smaller, another mode or model, its app's state. SGLang puts all of
them at the head of the prompt: each new one moves the whole conversation, which is read anew, and the model does not
see when it was told. DeepSeek's own conversion of that API (deepseek-recipe) writes them into the user's turn where
they stand; so does this, from 0.5.20 on. Those in front of the conversation stay with the system's, as SGLang has them.
This runs in the process that answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import answers_for_ours

DEVELOPER, INSTRUCTIONS, MESSAGE = "developer", ("developer", "system"), (None, "message")
CALL, RESULT, ID = "_call", "_call_output", "call_id"


def replace_history(original: Callable) -> Callable:
    """For OpenAIServingResponses._response_input_history(self, request) -> the items of the conversation so far."""

    @functools.wraps(original)
    def _response_input_history(self, request):
        items = original(self, request)
        return in_place(items) if answers_for_ours(self) else items

    return _response_input_history


def in_place(items: list) -> list:
    """The items, a developer's behind the first of others as the user's, and behind the results of open calls."""
    made, held, calls, has_begun = [], [], set(), False
    for item in items:
        kind, role = (item.get("type"), item.get("role")) if isinstance(item, dict) else ("", None)
        if kind in MESSAGE and role in INSTRUCTIONS:
            if has_begun and role == DEVELOPER:
                item = {**item, "role": "user"}
            (held if calls else made).append(item)
            continue
        has_begun = True
        if kind and kind.endswith(RESULT):
            calls.discard(item.get(ID))
        elif kind and kind.endswith(CALL):
            calls.add(item.get(ID))
        made.append(item)
        if not calls:
            made, held = made + held, []
    return made + held
