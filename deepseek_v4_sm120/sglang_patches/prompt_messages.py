"""The prompt of a request, each of its messages changed by itself: what several fixes of the chat API share. This
runs in the process that answers over HTTP, where no GPU is asked."""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import answers_for_ours

PROTOCOL, TEXT_PART = "sglang.srt.entrypoints.openai.protocol", "ChatCompletionMessageContentTextPart"


def text_part(text: str):
    """A part of a message's text, as SGLang has it."""
    return getattr(importlib.import_module(PROTOCOL), TEXT_PART)(type="text", text=text)


def with_each_message(change: Callable) -> Callable:
    """A replacement for OpenAIServingChat._apply_jinja_template(self, request, tools, is_multimodal), which makes the
    prompt of a request and leaves it as it is. change: a message -> itself, or a changed copy."""

    def replace_apply_template(original: Callable) -> Callable:
        @functools.wraps(original)
        def _apply_jinja_template(self, request, tools, is_multimodal):
            if answers_for_ours(self):
                request = copy.copy(request)
                request.messages = [change(message) for message in request.messages]
            return original(self, request, tools, is_multimodal)

        return _apply_jinja_template

    return replace_apply_template
