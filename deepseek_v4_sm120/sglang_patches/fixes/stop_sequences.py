"""An answer over /v1/messages that one of the request's stop_sequences ended says so, and which.

Anthropic's API tells `"stop_reason": "stop_sequence"` and the sequence. SGLang tells "end_turn" and none, as of an
answer that the model itself ended, so that a client that goes on where its own marker stood takes the turn for finished
(sglang #33153, open; vLLM #45807 mended it there). What ended the answer is known: the chat API, through which these
answers come, calls it `matched_stop`.

Here it is told. This runs in the process that answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import answers_for_ours

DATA, LAST = "data: ", "event: message_delta\n"
STOP, END, TOLD = "stop", "end_turn", "stop_sequence"
NO_STRING = ("NaN happened",)  # what SGLang calls a match where the logits were none


def replace_convert(original: Callable) -> Callable:
    """For AnthropicServing._convert_response(self, response) -> the answer, of the chat API's."""

    @functools.wraps(original)
    def _convert_response(self, response):
        made = original(self, response)
        matched = _matched(response.choices[0]) if response.choices else None
        if matched and made.stop_reason == END and answers_for_ours(self.openai_serving_chat):
            made.stop_reason, made.stop_sequence = TOLD, matched
        return made

    return _convert_response


def replace_generate(original: Callable) -> Callable:
    """For AnthropicServing._generate_anthropic_stream(self, adapted_request, processed_request, anthropic_request,
    raw_request), which makes the stream's events of the chat API's."""

    @functools.wraps(original)
    async def _generate_anthropic_stream(self, adapted_request, processed_request, anthropic_request, raw_request):
        listening = None
        if anthropic_request.stop_sequences and answers_for_ours(self.openai_serving_chat):
            listening = Listening(self.openai_serving_chat)
            self = copy.copy(self)
            self.openai_serving_chat = listening
        made = original(self, adapted_request, processed_request, anthropic_request, raw_request)
        async with contextlib.aclosing(made) as events:
            async for event in events:
                yield told(event, listening.matched) if listening and event.startswith(LAST) else event

    return _generate_anthropic_stream


class Listening:
    """The chat API's handler; what ended the answer that it streams."""

    def __init__(self, chat):
        self.chat, self.matched = chat, None

    def __getattr__(self, name):
        return getattr(self.chat, name)

    async def _generate_chat_stream(self, *request):
        async with contextlib.aclosing(self.chat._generate_chat_stream(*request)) as chunks:
            async for chunk in chunks:
                if '"matched_stop":"' in chunk:
                    for choice in json.loads(chunk.removeprefix(DATA))["choices"]:
                        if choice["finish_reason"] == STOP and choice["matched_stop"] not in NO_STRING:
                            self.matched = choice["matched_stop"]
                yield chunk


def told(event: str, matched: str | None) -> str:
    """The stream's last word on the answer, with what ended it."""
    head, _, data = event.rstrip("\n").partition(DATA)
    given = json.loads(data)
    if matched is None or given["delta"].get("stop_reason") != END:
        return event
    given["delta"] |= {"stop_reason": TOLD, TOLD: matched}
    return f"{head}{DATA}{json.dumps(given, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _matched(choice) -> str | None:
    found = choice.matched_stop if choice.finish_reason == STOP else None
    return found if isinstance(found, str) and found not in NO_STRING else None
