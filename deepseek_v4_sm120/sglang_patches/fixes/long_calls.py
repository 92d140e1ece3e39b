"""A stream that writes a file by a tool call does not stop the others, however long the file is.

Up to 0.5.20 a call's arguments are told while they are written, and SGLang's parser of calls reads all that was written
of the call anew with each step of a stream, and compares it with the last step's character by character. It does so in
the loop that answers over HTTP: 7 ms a step behind 40,000 characters, 27 behind 160,000 (on the CPU). So a file's time
there grows by the square of its length, and all streams wait for it. No thread of SGLang's is known.

Here what two steps share is found by halving, the same text; and behind each 4,096 characters one more step is kept
until the parser is asked for all of them at once: the arguments are those of a stream of longer steps. At a tag of the
call's, and with the last step, it is asked at once. Over /v1/responses the parser is asked in the midst of SGLang's
stream, so steps are kept in front of it. This runs where no GPU is asked.

From 0.5.20 on a custom tool's call over /v1/responses (Codex's apply_patch) has its text told, too, and for it all of
the call's JSON is read anew with each step, character by character in Python: 6 ms a step behind a patch of 40,000
characters. Here a step goes on where the last one ended, the same text.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import AsyncIterator, Callable

from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.fixes.tool_strings import CALLS, is_ours

EACH = 4096  # characters that were written of a call, for each step that is kept
CALL_END = "</｜DSML｜invoke>"
MARK, TAG = "｜DSML｜", 64  # one token, which each tag has, and characters in which a tag is at its end
KEPT = "_dsv4_sm120_kept"  # of a parser: the text that it was not asked for, and of how many steps
STREAMS = 32  # whose texts are kept, to go on behind them; of more at once some are read from their beginning
START = re.compile(r'"input"[^:]*:[^"]*"')  # what a custom tool's text stands behind
HEX, HIGH, LOW = "[0-9a-fA-F]", "[dD][89abAB]", "[dD][c-fC-F]"
WHOLE = rf'["\\/bfnrt]|u(?!{HIGH}){HEX}{{4}}|u{HIGH}{HEX}{{2}}\\u{LOW}{HEX}{{2}}'  # an escape, behind its backslash
TEXT = re.compile(rf'[^"\\]*(?:\\(?:{WHOLE})[^"\\]*)*')  # of a JSON string, to its end or to what is not whole


def replace_common_prefix(original: Callable) -> Callable:
    """For _find_common_prefix(s1, s2) -> what two texts begin with."""

    @functools.wraps(original)
    def _find_common_prefix(s1, s2):
        if not models_served.has_served_card():
            return original(s1, s2)
        low, high = 0, min(len(s1), len(s2)) + 1  # so much they share, and so much they do not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if s1[low:middle] == s2[low:middle] else (low, middle)
        return s1[:low]

    return _find_common_prefix


def replace_process(original: Callable) -> Callable:
    """For OpenAIServingChat._process_tool_call_stream(self, index, delta, parser_dict, content, ...), which makes a
    step's events of its text."""

    @functools.wraps(original)
    async def _process_tool_call_stream(self, index, delta, parser_dict, content, *given, **named):
        parser = getattr(parser_dict.get(index), "detector", None)
        if is_ours(parser):
            is_last = content["meta_info"]["finish_reason"] is not None
            delta = handed_on(parser, delta, is_last)
            if delta is None:
                return
        made = original(self, index, delta, parser_dict, content, *given, **named)
        async with contextlib.aclosing(made) as events:
            async for event in events:
                yield event

    return _process_tool_call_stream


def handed_on(parser, text: str, is_last: bool) -> str | None:
    """The text that the parser is asked for with this step; None where it is kept."""
    kept, steps = getattr(parser, KEPT, ("", 0))
    written, text, steps = parser._buffer, kept + text, steps + 1
    is_due = is_last or steps >= len(written) // EACH or MARK in written[-TAG:] + text
    setattr(parser, KEPT, ("", 0) if is_due else (text, steps))
    return text if is_due else None


def replace_responses(original: Callable) -> Callable:
    """For OpenAIServingResponses.responses_stream_generator_non_harmony(self, request, sampling_params,
    result_generator, ...) -> the events that it makes of the steps."""

    @functools.wraps(original)
    def responses_stream_generator_non_harmony(self, request, sampling_params, result_generator, *given, **named):
        if request.tools and models_served.has_served_card():
            result_generator = longer_steps(result_generator)
        return original(self, request, sampling_params, result_generator, *given, **named)

    return responses_stream_generator_non_harmony


async def longer_steps(steps: AsyncIterator) -> AsyncIterator:
    """The steps of a stream without those whose text the next one has as well. Each has all of the text so far; where a
    server sends the new one alone (--incremental-streaming-output) no text is as long as the call, and none is kept."""
    end, tail, written, many, kept = 0, "", 0, 0, None  # written: of a call that is not at its end
    async for step in steps:
        chunk = step if isinstance(step, dict) else step.last_output
        text = chunk["text"]
        new, end = text[end:], len(text)
        seen, many = tail + new, many + 1
        at = max(seen.rfind(CALLS), seen.rfind(CALL_END))
        written = len(seen) - at if at >= 0 else written + len(new) if written else 0
        tail = seen[-TAG:]
        if MARK in seen or many >= min(written, len(text)) // EACH:
            many, kept = 0, None
            yield step
        else:
            kept = step
    if kept is not None:
        yield kept


def replace_custom_input(original: Callable) -> Callable:
    """For decode_custom_tool_input_prefix(buffer) -> a custom tool's text, of its call's JSON so far."""
    known = []  # (the JSON so far, how much of it was read, its text), the last one first

    @functools.wraps(original)
    def decode_custom_tool_input_prefix(buffer):
        if not models_served.has_served_card():
            return original(buffer)
        start = START.search(buffer)
        if start is None:
            return ""
        last = next((one for one in known if buffer.startswith(one[0])), None)
        _, at, text = last or ("", start.end(), "")
        whole = TEXT.match(buffer, at)
        at, text = whole.end(), text + json.loads(f'"{whole.group()}"', strict=False)
        known[:] = [(buffer, at, text), *(one for one in known if one is not last)][:STREAMS]
        return text

    return decode_custom_tool_input_prefix
