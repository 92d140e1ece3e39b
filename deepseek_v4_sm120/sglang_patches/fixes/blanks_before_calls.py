"""The line ends between a turn's words and its calls are in the next prompt once, as the model wrote them.

The model writes an empty line in front of its calls. Up to 0.5.20 SGLang's parser tells it in streams as the end of the
words, where a step ends in front of the calls (without speculation always), and that between calls, too; a client sends
it back, and the encoder writes its own behind it. So a turn with calls is in the next prompt otherwise than the model
wrote it: the prefix cache ends in front of the calls, with whole files in their arguments, and the model reads empty
lines that it never wrote. Without streams the words come without blanks at their end; so does 0.5.21 tell them.

Here a turn's words end so in the prompt. This runs in the process that answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import copy

from deepseek_v4_sm120.sglang_patches.prompt_messages import with_each_message

ROLE, TEXT = "assistant", "text"


def _without_blanks(message):
    if message.role != ROLE or not message.tool_calls or not message.content:
        return message
    made = copy.copy(message)
    if isinstance(message.content, str):
        made.content = message.content.rstrip()
        return made
    parts = list(message.content)
    while parts and (last := parts[-1]).type == TEXT:
        parts.pop()
        if last.text.strip():
            last = copy.copy(last)
            last.text = last.text.rstrip()
            parts.append(last)
            break
    made.content = parts or ""
    return made


replace_apply_template = with_each_message(_without_blanks)
