"""With `tool_choice` "none" the prompt has no tools, so that the model does not call one where nobody reads the call.

Up to 0.5.21 SGLang writes them into DeepSeek-V4's prompt whatever was chosen, and reads no calls where "none" was: the
model calls one, and its markup is the text of the answer (sglang #35736). DeepSeek's API leaves the tools out, and so
does SGLang from 0.5.22 on. This runs in the process that answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import answers_for_ours


def replace_apply_template(original: Callable) -> Callable:
    """For OpenAIServingChat._apply_jinja_template(self, request, tools, is_multimodal), which makes the prompt of a
    request and leaves it as it is."""

    @functools.wraps(original)
    def _apply_jinja_template(self, request, tools, is_multimodal):
        if request.tool_choice == "none" and answers_for_ours(self):
            request = _without_tools(request)
            request.messages = [_without_tools(message) for message in request.messages]
        return original(self, request, tools, is_multimodal)

    return _apply_jinja_template


def _without_tools(given):
    """A copy of the request, or of a message, of which the system's may bring tools of its own."""
    made = copy.copy(given)
    if getattr(made, "tools", None):
        made.tools = None
    return made
