"""Each turn of the assistant's has its mark in the prompt, the one that is asked for among them.

DeepSeek-V4's encoder writes `<｜Assistant｜>` behind the user's messages alone. So up to 0.5.22 a turn behind a message
of the system's, or behind another turn, has none: a greeting at the head of a conversation, words that a client sends
as two turns. And a prompt that ends with the system's (a client that has its instructions there, or nothing else; a
developer's message, too) asks for no answer: the model goes on with that text, without thoughts. deepseek-recipe, which
makes the prompts from 0.5.23 on, has the mark in front of every turn, with `<think>` behind it where thoughts follow,
else `</think>`. This runs in the process that answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches import models_served

MARK, OPEN, CLOSE, THINKING = "<｜Assistant｜>", "<think>", "</think>", "thinking"
MARKED = ("user", "developer")  # by SGLang


def replace_render_message(original: Callable) -> Callable:
    """For render_message(index, messages, thinking_mode, drop_thinking=True, ..) of DeepSeek-V4's encoder -> the
    prompt's part of that message."""

    @functools.wraps(original)
    def render_message(index, messages, thinking_mode, drop_thinking=True, *args, **more):
        part = original(index, messages, thinking_mode, drop_thinking, *args, **more)
        if not models_served.has_served_card() or not _lacks_mark(index, messages):
            return part
        is_behind = not any(message.get("role") in MARKED for message in messages[index:])
        has_thoughts = thinking_mode == THINKING and (is_behind or not drop_thinking)
        return part + MARK + (OPEN if has_thoughts else CLOSE)

    return render_message


def _lacks_mark(index: int, messages: list) -> bool:
    """Whether a turn follows, or is asked for, and SGLang writes no mark, nor that of a task of DeepSeek's own."""
    follows = messages[index + 1].get("role") == "assistant" if index + 1 < len(messages) else True
    is_task = any(message.get("task") is not None for message in messages)
    return follows and not is_task and messages[index].get("role") in ("system", "assistant")
