"""A call that comes back with arguments that are no JSON object is in the prompt as DeepSeek's encoder writes it.

Such calls are in conversations: `max_tokens` ended the answer within the call, or a client writes nothing where a tool
takes no arguments. From 0.5.14 to 0.5.22 SGLang refuses each later request of that conversation with 400. DeepSeek's
encoder writes what there is as one argument, `arguments`; so does deepseek-recipe, from 0.5.23 on. Here SGLang is given
that argument. This runs in the process that answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import answers_for_ours

ROLE, ARGUMENT = "assistant", "arguments"


def replace_apply_template(original: Callable) -> Callable:
    """For OpenAIServingChat._apply_jinja_template(self, request, tools, is_multimodal), which makes the prompt of a
    request and leaves it as it is."""

    @functools.wraps(original)
    def _apply_jinja_template(self, request, tools, is_multimodal):
        if answers_for_ours(self):
            request = copy.copy(request)
            request.messages = [_with_objects(message) for message in request.messages]
        return original(self, request, tools, is_multimodal)

    return _apply_jinja_template


def _with_objects(message):
    """The message, or a copy of a turn with a call whose arguments are a text that is no JSON object."""
    if message.role != ROLE or not message.tool_calls or all(map(_is_read, message.tool_calls)):
        return message
    made = copy.copy(message)
    made.tool_calls = [call if _is_read(call) else _with_one_argument(call) for call in message.tool_calls]
    return made


def _is_read(call) -> bool:
    given = call.function.arguments
    return not isinstance(given, str) or is_object(given)


def is_object(text: str) -> bool:
    """Whether a text is a JSON object, as strictly as SGLang reads it: without NaN and its like."""
    try:
        return isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(constant: str):
    raise ValueError(constant)


def _with_one_argument(call):
    call = copy.copy(call)
    call.function = copy.copy(call.function)
    call.function.arguments = json.dumps({ARGUMENT: call.function.arguments})
    return call
