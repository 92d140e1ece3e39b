"""A turn that a client sends back over /v1/responses as it received it is taken.

Clients that append a response's output to their next input (OpenAI's manual does) send its messages with their ids. Up
to 0.5.17 SGLang reads such a message by OpenAI's own type for it, whose parts are an iterator that is read later: what
makes the chat API's messages of it finds no list, and the second turn of each conversation is refused with 400
("Input should be a valid string ... ValidatorIterator"). Later releases keep the items as they came.

Here they are kept, too, once they were found to be items. And the result of a call that comes in parts, as OpenAI's API
allows and its agents send it, is their text, as from 0.5.18 on: as a list it is refused the same way. This runs in the
process that answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import answers_for_ours

RESULT, PARTS, TEXT = "function_call_output", "output", "text"


def replace_create(original: Callable) -> Callable:
    """For OpenAIServingResponses.create_responses(self, request, raw_request=None) -> an answer, its events or an
    error. raw_request: the HTTP request, whose body was read for `request`."""

    @functools.wraps(original)
    async def create_responses(self, request, raw_request=None):
        if isinstance(request.input, list) and raw_request is not None and answers_for_ours(self):
            request.input = [_with_text(item) for item in (await raw_request.json())["input"]]
        return await original(self, request, raw_request)

    return create_responses


def _with_text(item: dict) -> dict:
    parts = item.get(PARTS)
    if item.get("type") != RESULT or not isinstance(parts, list):
        return item
    return item | {PARTS: "".join(part.get(TEXT) or "" for part in parts if isinstance(part, dict))}
