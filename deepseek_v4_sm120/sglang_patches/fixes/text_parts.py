"""The parts of a message's text have an empty line between them in the prompt.

Clients send a text in parts: Claude Code its reminders in front of what was asked, others files. DeepSeek's encoder
has an empty line between them, as between two messages of the user's; up to 0.5.22 SGLang puts a blank there, so that a
part goes on in the last line of the one before. From 0.5.23 on deepseek-recipe puts them together. This runs in the
process that answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import copy

from deepseek_v4_sm120.sglang_patches.prompt_messages import with_each_message

TEXT, BETWEEN = "text", "\n\n"


def _in_one(message):
    """The message, or a copy of one whose content is parts, all of them text."""
    parts = message.content
    if not isinstance(parts, list) or any(part.type != TEXT for part in parts):
        return message
    made = copy.copy(message)
    made.content = BETWEEN.join(part.text for part in parts)
    return made


replace_apply_template = with_each_message(_in_one)
