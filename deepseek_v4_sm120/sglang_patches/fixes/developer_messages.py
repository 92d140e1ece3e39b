"""What a message of the role `developer` says is in the prompt, as a system message's is.

OpenAI's newer clients give their instructions this role. DeepSeek-V4's encoder has another use for it (of a search of
DeepSeek's own): with thoughts and without tools it leaves out such messages in front of the last question, so up to
0.5.22 the instructions are gone without a word; else they are a question of the user's. DeepSeek's API does not take
the role; SGLang makes it `system` from 0.5.23 on. This runs in the process that
answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import copy

from deepseek_v4_sm120.sglang_patches.prompt_messages import with_each_message

ROLE = "developer"


def _of_the_system(message):
    if message.role != ROLE:
        return message
    made = copy.copy(message)
    made.role = "system"
    return made


replace_apply_template = with_each_message(_of_the_system)
