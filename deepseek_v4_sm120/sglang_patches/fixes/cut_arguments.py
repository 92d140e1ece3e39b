"""A call that comes back with arguments that are no JSON object is in the prompt as DeepSeek's encoder writes it.

Such calls are in conversations: `max_tokens` ended the answer within the call, or a client writes nothing where a tool
takes no arguments. From 0.5.14 to 0.5.22 SGLang refuses each later request of that conversation with 400. DeepSeek's
encoder writes what there is as one argument, `arguments`; so does deepseek-recipe, from 0.5.23 on. Here SGLang is given
that argument. This runs in the process that answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import copy
import json

from deepseek_v4_sm120.sglang_patches.prompt_messages import with_each_message

ROLE, ARGUMENT = "assistant", "arguments"


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


replace_apply_template = with_each_message(_with_objects)
