"""A turn that comes back over /v1/responses is one turn in the prompt: its thoughts, its words and its calls.

Over this API a turn is several items. From 0.5.20 on SGLang says of a turn's words which phase they belong to
("commentary" in front of calls, else "final_answer"), and clients send it back (those that append a response's output
to their input, as OpenAI's manual says). SGLang puts together only what has the same phase, and thoughts and calls have
none: so up to 0.5.22 thoughts, words and calls, and in 0.5.23 what is in front of the calls and the calls, are turns of
their own, each with its end and a new `<｜Assistant｜></think>`. The model reads what it never wrote, and the prefix
cache, which has what it did write, ends there. DeepSeek-V4 knows no phases.

Here they are put together without. This runs in the process that answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import answers_for_ours

PHASE = "phase"


def replace_construct(original: Callable) -> Callable:
    """For OpenAIServingResponses._construct_input_messages(self, request, prev_response, ...) -> the chat API's
    messages."""

    @functools.wraps(original)
    def _construct_input_messages(self, request, prev_response=None, **more):
        made = original(self, request, prev_response, **more)
        if not answers_for_ours(self) or not any(PHASE in message for message in made):
            return made
        without = [{name: value for name, value in message.items() if name != PHASE} for message in made]
        return self._merge_consecutive_assistant_messages(without)

    return _construct_input_messages
