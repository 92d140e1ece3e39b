"""A stream tells no text twice where a step ends within a character.

A character that is rare, as most emoji are, is several tokens. Where a step ends within one, SGLang's detokenizer tells
the text up to the last space; behind a Chinese character, up to that character. So where one step ends behind such a
character and the next one, which speculation or --stream-interval makes several tokens, ends in another character
behind an emoji, less is counted as told than was told: once the last character is whole, all of it is told again, also
in the text of an answer that is not streamed.

Here the text is told up to the character that is not whole, which is never less than was told before. This runs in the
process that makes text of tokens, where no GPU is asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.fixes.cut_characters import UNKNOWN


def replace_printable(original: Callable) -> Callable:
    """For the detokenizer's find_printable_text(text) -> what of a text with such an end may be told."""

    @functools.wraps(original)
    def find_printable_text(text):
        return text.rstrip(UNKNOWN) if models_served.has_served_card() else original(text)

    return find_printable_text
