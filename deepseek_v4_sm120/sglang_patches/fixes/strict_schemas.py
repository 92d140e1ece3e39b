"""A schema that is to be held strictly may be any that the grammar knows.

From 0.5.23 on deepseek-recipe makes the prompts. Where a schema says `"strict": true` it asks for what DeepSeek's own
service can hold: all properties required, no others, a type for each, few formats. So `response_format` and tools with
an optional property, an object without properties, a `const`, a date or a map are refused with 400, which 0.5.22 took;
over /v1/messages every schema of `output_config` is one of these. What holds answers to a schema here is SGLang's
grammar, as in 0.5.22, and it is made of the request itself.

Here recipe is asked once more without that word, where it refuses. Prompts that it makes stay as they are: it writes a
strict tool's schema anew, in an order of its own and without what it does not know, so the word cannot always be left
out. What it refuses it says by an error alone, whose rules (of every keyword, of tools beside each other) are its
own and may change with it. This runs in the process that answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import is_our_encoding

STRICT, FORMAT, TOOLS = "strict", "response_format", "tools"
SCHEMA_IN = {FORMAT: "json_schema", TOOLS: "function"}


def replace_encode(original: Callable) -> Callable:
    """For DeepSeekRecipeChatEncodingAdapter._encode(self, body, *, effort, ...) -> the prompt's tokens."""

    @functools.wraps(original)
    def _encode(self, body, **more):
        try:
            return original(self, body, **more)
        except ValueError:
            loose = without_strict(body)
            if loose == body or not is_our_encoding(self._spec):
                raise
        return original(self, loose, **more)

    return _encode


def without_strict(body: dict) -> dict:
    made = dict(body)
    if body.get(FORMAT):
        made[FORMAT] = _loose(body[FORMAT], SCHEMA_IN[FORMAT])
    if body.get(TOOLS):
        made[TOOLS] = [_loose(tool, SCHEMA_IN[TOOLS]) for tool in body[TOOLS]]
    return made


def _loose(holder: dict, name: str) -> dict:
    given = holder.get(name)
    if not isinstance(given, dict) or not given.get(STRICT):
        return holder
    return {**holder, name: {key: value for key, value in given.items() if key != STRICT}}
