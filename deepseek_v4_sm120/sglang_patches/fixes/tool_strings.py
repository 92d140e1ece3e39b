"""The strings of a tool call arrive as the model wrote them, with the blanks and line ends at their ends.

DeepSeek-V4 writes a tool's parameter between its tags, a string "as is" (its own prompt says so, and its own parser
takes it so). SGLang's parser strips what is a string: indentation in front, line ends behind. So a file is written
without its last line end, and an editor that looks for `old_string` finds another place or none: in all releases, with
and without streaming. vLLM's parser and SGLang's of DeepSeek-V4.1 keep them.

Up to 0.5.17, where a call is told while it is written, a minus sign alone is no number that the parser can end, and it
fails: the markup of the call so far is told as text (the call itself follows). Such a number waits for its digits here.

From 0.5.16 to 0.5.20 a stream that ends within a call, by `max_tokens` for one, tells it as a whole one: its string so
far is closed, and half of a file is written, or a shorter command run. Here such arguments stay without their end, and
are no JSON, as with OpenAI's API and 0.5.23.

Up to 0.5.15 what is left of a stream's last call is looked for in its arguments as a string of JSON, quotes included.
Of `{}`, a call without arguments, it finds these quotes: the client is told `{}""`.

This runs in the process that answers over HTTP, where no GPU is asked: whether the server's cards are ours is what
models_served.py was told when SGLang resolved its arguments.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches import models_served

CALLS = "<｜DSML｜tool_calls>"  # opens a call of DeepSeek-V4's; V3.2 and V4.1, of the same class, have others
SIGN = r'<｜DSML｜parameter\s+name="[^"]+"\s+string="false"\s*>\s*-\s*$'  # of a number whose digits are to come


def is_ours(detector) -> bool:
    return getattr(detector, "bot_token", None) == CALLS and models_served.has_served_card()


def replace_parse_parameters(original: Callable) -> Callable:
    """For DeepSeekV32Detector._parse_parameters_from_xml(self, invoke_content) -> the arguments as JSON, of a call that
    is whole."""

    @functools.wraps(original)
    def _parse_parameters_from_xml(self, invoke_content):
        told = original(self, invoke_content)
        return _as_written(self, invoke_content, told)[0] if is_ours(self) else told

    return _parse_parameters_from_xml


def replace_parse_partial_parameters(original: Callable) -> Callable:
    """Up to 0.5.20, where a call is also told while it is written: what two tellings share is sent, so of a string that
    is not at its end the blanks in front are there from the beginning; those behind follow with what is behind them."""

    @functools.wraps(original)
    def _parse_parameters_from_xml(self, invoke_content, allow_partial=False):
        if not is_ours(self):
            return original(self, invoke_content, allow_partial)
        if allow_partial:
            invoke_content = re.sub(SIGN, "", invoke_content)
        told, end = _as_written(self, invoke_content, original(self, invoke_content, allow_partial))
        if end is None or not allow_partial:
            return told
        last = re.search(self.partial_parameter_regex, invoke_content[end:], re.DOTALL)
        arguments = json.loads(told)
        if last is None or last[2] != "true" or not arguments.get(last[1]):
            return told
        in_front = len(last[3]) - len(last[3].lstrip())
        return _dumped({**arguments, last[1]: last[3][:in_front] + arguments[last[1]]})

    return _parse_parameters_from_xml


def replace_check_unstreamed(original: Callable) -> Callable:
    """For OpenAIServingChat._check_for_unstreamed_tool_args(self, parser, content, request, index) -> what is told of
    the last call at a stream's end. Of a call that is whole all was told with its last piece; one that the model itself
    leaves without its end stays SGLang's."""

    @functools.wraps(original)
    def _check_for_unstreamed_tool_args(self, parser, content, request, index):
        is_cut = content["meta_info"]["finish_reason"]["type"] != "stop"
        if is_cut and is_ours(getattr(parser, "detector", parser)):
            return None
        return original(self, parser, content, request, index)

    return _check_for_unstreamed_tool_args


def replace_check_quoted(original: Callable) -> Callable:
    """Up to 0.5.15: nothing is left, but quotes that are not the arguments'."""

    @functools.wraps(original)
    def _check_for_unstreamed_tool_args(self, parser, content, request, index):
        if is_ours(getattr(parser, "detector", parser)):
            return None
        return original(self, parser, content, request, index)

    return _check_for_unstreamed_tool_args


def _as_written(detector, invoke_content: str, told: str) -> tuple[str, int | None]:
    """The arguments with their whole strings as they stand between their tags, and where the last parameter ends; None
    where the arguments are written as JSON, without tags."""
    if invoke_content.strip().startswith("{"):
        return told, None
    strings, end = {}, 0
    for parameter in re.finditer(detector.parameter_regex, invoke_content, re.DOTALL):
        name, is_string, value = parameter.groups()
        end = parameter.end()
        if is_string == "true":
            strings[name] = value
        else:
            strings.pop(name, None)
    return (_dumped({**json.loads(told), **strings}) if strings else told), end


def _dumped(arguments: dict) -> str:
    return json.dumps(arguments, ensure_ascii=False)
