"""While a long prompt that came over /v1/messages is made tokens, the streams of others go on.

What answers over HTTP is one loop. From 0.5.22 on SGLang makes the chat API's prompts in a thread beside it; those of
/v1/messages, which are Claude Code's, in the loop itself: all streams stand still meanwhile. With 600 KB of text a
stream's longest pause was 302 ms there, and 56 over the chat API (0.5.23 on the CPU, a small stand-in tokenizer).

Here they are made as the chat API's, before the handler asks for them. This runs where no GPU is asked.
"""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import answers_for_ours


def replace_handle(original: Callable) -> Callable:
    """For AnthropicServing._handle_streaming(self, chat_request, anthropic_request, raw_request), and its like for
    answers that are not streamed."""

    @functools.wraps(original)
    async def _handle(self, chat_request, anthropic_request, raw_request):
        chat = self.openai_serving_chat
        if answers_for_ours(chat) and not chat._validate_request(chat_request):
            self = copy.copy(self)
            self.openai_serving_chat = await converted(chat, chat_request, raw_request)
        return await original(self, chat_request, anthropic_request, raw_request)

    return _handle


class Converted:
    """The chat API's handler, which has the request's prompt, or why there is none."""

    def __init__(self, chat, made, error):
        self.chat, self.made, self.error = chat, made, error

    def __getattr__(self, name):
        return getattr(self.chat, name)

    def _convert_to_internal_request(self, *request):
        if self.error is not None:
            raise self.error
        return self.made


async def converted(chat, *request) -> Converted:
    loop = asyncio.get_running_loop()
    try:
        return Converted(chat, await loop.run_in_executor(None, chat._convert_to_internal_request, *request), None)
    except Exception as error:
        return Converted(chat, None, error)
