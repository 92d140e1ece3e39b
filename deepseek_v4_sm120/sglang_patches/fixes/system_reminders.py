"""A system message in the middle of a conversation over /v1/messages stays where it is, as a reminder.

Claude Code sends such messages: what is left of its tokens behind each result, a change of its mode, the date. SGLang
puts all of them at the head of the prompt: each new one moves the whole conversation, which is read anew, and the model
does not see when it was told. In 0.5.14 it does so as it reads the request, and has forgotten their places here.

DeepSeek's own conversion of that API (deepseek-recipe) writes each into the user's turn where it stands, as
<system-reminder>; so does this. It runs in the process that answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import answers_for_ours

SYSTEM, USER, ASSISTANT, TEXT, CALL = "system", "user", "assistant", "text", "tool_use"
REMINDER = "<system-reminder>\n{}\n</system-reminder>"


def replace_convert(original: Callable) -> Callable:
    """For AnthropicServing._convert_to_chat_completion_request(self, anthropic_request) -> the chat API's request."""

    @functools.wraps(original)
    def _convert_to_chat_completion_request(self, anthropic_request):
        messages = anthropic_request.messages
        if any(message.role == SYSTEM for message in messages) and answers_for_ours(self.openai_serving_chat):
            anthropic_request = copy.copy(anthropic_request)
            anthropic_request.messages = in_place(messages)
        return original(self, anthropic_request)

    return _convert_to_chat_completion_request


def in_place(messages: list) -> list:
    """The messages, those of the system as the user's; one between calls and their results stands behind these."""
    made, held = [], []
    for message in messages:
        if message.role == SYSTEM:
            text = _text(message.content)
            if text:
                message = copy.copy(message)
                message.role, message.content = USER, REMINDER.format(text)
                (held if made and _calls(made[-1]) else made).append(message)
            continue
        made.append(message)
        if message.role == USER:
            made += held
            held = []
    return made + held


def _text(content) -> str:
    if isinstance(content, str):
        return content
    return "\n\n".join(block.text for block in content if block.type == TEXT)


def _calls(message) -> bool:
    blocks = message.content if isinstance(message.content, list) else []
    return message.role == ASSISTANT and any(block.type == CALL for block in blocks)
