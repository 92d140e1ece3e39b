"""A picture in a request is told to the model as one that it cannot see, and the conversation goes on.

DeepSeek-V4 reads text alone. From 0.5.17 on SGLang refuses each request with a picture (400), and since clients send
all of a conversation each time, every later one: an agent (Claude Code, for one) that has read a picture, or was given
a screenshot by a tool, is at its end there. Up to 0.5.16 the picture is left out without a word.

DeepSeek's own conversion (deepseek-recipe), which makes the prompts from 0.5.23 on, writes `[Unsupported Image]` where
a picture is, in the user's words and in results, over the chat API and over /v1/messages. So it is here in all
releases; videos and sounds, which recipe does not know, stay refused. This runs in the process that answers over HTTP,
where no GPU is asked.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.prompt_messages import text_part, with_each_message
from deepseek_v4_sm120.sglang_patches.scope import answers_for_ours

PICTURE, TOLD = "image_url", "[Unsupported Image]"


def replace_validate(original: Callable) -> Callable:
    """For OpenAIServingChat._validate_media_content(self, request) -> why it is refused, or None."""

    @functools.wraps(original)
    def _validate_media_content(self, request):
        if answers_for_ours(self):
            request = copy.copy(request)
            request.messages = [_without_pictures(message) for message in request.messages]
        return original(self, request)

    return _validate_media_content


def _without_pictures(message):
    """The message, or a copy of one that has pictures."""
    parts = message.content
    if not isinstance(parts, list) or all(part.type != PICTURE for part in parts):
        return message
    made = copy.copy(message)
    made.content = [text_part(TOLD) if part.type == PICTURE else part for part in parts]
    return made


replace_apply_template = with_each_message(_without_pictures)
