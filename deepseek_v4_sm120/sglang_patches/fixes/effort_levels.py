"""`reasoning_effort` means for the first DeepSeek-V4 checkpoints what it meant when they were trained.

The effort is a text in front of the prompt. Those of April 2026 know two: none for "high", their default, and "Absolute
maximum ..." for "max". From 0731 on there are three: none for "low", that text for "high", and "Beyond maximum ..." for
"max". SGLang 0.5.18 to 0.5.22 look into the checkpoint's own encoder for which of both it is. 0.5.23 makes all prompts
by deepseek-recipe, which knows the later one alone, with "high" where nothing is said: so the first checkpoints think
with their greatest effort unless they are told "low", and at "max" read a text that they have never seen.

Here their levels are those of before. A checkpoint is told by its encoder, in its folder or in the Hub's cache; where
that is in neither place, by its name: DeepSeek's first Flash and SGLang's FP8 conversion of it. All others keep the
later levels. This runs in the process that answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import answers_for_ours

ENCODER = "encoding/encoding_dsv4.py"
ONE_TEXT, SEVERAL = r"^REASONING_EFFORT_MAX\b", r"^REASONING_EFFORT_PROMPTS\b"  # what the encoders define
FIRST = ("deepseek-ai/DeepSeek-V4-Flash", "sgl-project/DeepSeek-V4-Flash-FP8")
# a level of the first checkpoints -> of the later ones, with the same text
LEVELS = {name: "low" for name in (None, "none", "minimal", "low", "medium", "high", "xhigh")}
LEVELS |= {"max": "high", "ultra": "high"}
NAME = r"\w[\w.-]*/\w[\w.-]*"  # as the Hub has them
MARK = "_dsv4_sm120_first_levels"


def replace_build(original: Callable) -> Callable:
    """For chat_encoding_adapters.build_chat_encoding_adapter(ctx), called when a server starts."""

    @functools.wraps(original)
    def build_chat_encoding_adapter(ctx):
        made = original(ctx)
        if made is not None and answers_for_ours(ctx):
            setattr(made, MARK, has_first_levels(ctx.model_path, ctx.revision))
        return made

    return build_chat_encoding_adapter


def replace_encode(original: Callable) -> Callable:
    """For DeepSeekRecipeChatEncodingAdapter._encode(self, body, *, effort, ...) -> the prompt's tokens; `effort` is the
    request's, and where it has none the server's."""

    @functools.wraps(original)
    def _encode(self, body, *, effort, **more):
        if getattr(self, MARK, False):
            meant = self._default_effort if effort in (None, "none") else effort
            effort = LEVELS.get(meant, meant)
        return original(self, body, effort=effort, **more)

    return _encode


def has_first_levels(model_path: str, revision: str | None = None) -> bool:
    """By the checkpoint's encoder where it can be read without asking the Hub, else by its name."""
    encoder = _encoder(model_path, revision)
    if encoder is None:
        return model_path in FIRST
    with open(encoder, encoding="utf-8", errors="replace") as file:
        text = file.read()
    return bool(re.search(ONE_TEXT, text, re.MULTILINE)) and not re.search(SEVERAL, text, re.MULTILINE)


def _encoder(model_path: str, revision: str | None) -> str | None:
    if os.path.isdir(model_path):
        beside = os.path.join(model_path, ENCODER)
        return beside if os.path.isfile(beside) else None
    if not re.fullmatch(NAME, model_path):
        return None
    found = importlib.import_module("huggingface_hub").try_to_load_from_cache(model_path, ENCODER, revision=revision)
    return found if isinstance(found, str) else None
