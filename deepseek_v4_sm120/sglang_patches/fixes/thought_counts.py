"""No answer has more tokens of thoughts than tokens.

A step with speculation brings several tokens. Where `max_tokens` or a stop ends an answer before the step's last one,
those behind it are cut from the answer, but the ones that were thoughts stay counted: `reasoning_tokens` of the usage
is more than `completion_tokens`, and what a client reckons as the words between the two is less than nothing.

Where the end is within the thoughts, all that was answered is thoughts, so the lesser of the two is the count. This
runs in the process that answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches import models_served


def replace_handle(original: Callable) -> Callable:
    """For TokenizerManager._handle_batch_output(self, recv_obj), of all answers of a step."""

    @functools.wraps(original)
    async def _handle_batch_output(self, recv_obj):
        thoughts = getattr(recv_obj, "reasoning_tokens", None)
        if thoughts and models_served.has_served_card():
            recv_obj.reasoning_tokens = [min(pair) for pair in zip(thoughts, recv_obj.completion_tokens, strict=True)]
        return await original(self, recv_obj)

    return _handle_batch_output
