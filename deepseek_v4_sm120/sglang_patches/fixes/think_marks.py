"""A `<think>` in the text or in a call's arguments is what it is there: characters.

DeepSeek-V4's prompt opens the thoughts, or closes them, so an answer opens none itself. Up to 0.5.22 SGLang's reader of
thoughts takes the first `<think>` for their beginning wherever it stands: without thoughts anywhere in the answer, and
in streams behind the thoughts, too. What follows are thoughts then: an agent that writes a file in which the mark
stands loses the call, or has a part of it executed.

Here thoughts begin where the prompt opened them, or with a `<think>` that nothing stands in front of. From 0.5.23 on
DeepSeek's own parser reads the answers. This runs in the process that answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches import models_served

OPENS, CLOSES = "<think>", "</think>"


def replace_parse_non_stream(original: Callable) -> Callable:
    """For ReasoningParser.parse_non_stream(self, full_text) -> thoughts, text"""

    @functools.wraps(original)
    def parse_non_stream(self, full_text):
        if OPENS not in full_text or _may_open(full_text) or not _is_ours(self.detector):
            return original(self, full_text)
        if not self.detector._in_reasoning:
            return "", full_text
        front, closes, text = full_text.partition(CLOSES)
        thoughts, more = original(self, front + closes)
        return thoughts, (more or "") + text

    return parse_non_stream


def replace_parse_stream_chunk(original: Callable) -> Callable:
    """For ReasoningParser.parse_stream_chunk(self, chunk_text) -> thoughts, text; what the mark was looked for in once
    is not looked at again (`stripped_think_start`)."""

    @functools.wraps(original)
    def parse_stream_chunk(self, chunk_text):
        detector = self.detector
        if _is_ours(detector) and not _may_open(detector._buffer + chunk_text):
            detector.stripped_think_start = True
        return original(self, chunk_text)

    return parse_stream_chunk


def _is_ours(detector) -> bool:
    return detector.think_start_token == OPENS and models_served.has_served_card()


def _may_open(text: str) -> bool:
    """Whether an answer that begins so has the mark in front, or may have it yet."""
    text = text.lstrip()
    return text.startswith(OPENS) or OPENS.startswith(text)
