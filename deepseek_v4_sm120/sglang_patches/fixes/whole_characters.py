"""A stream tells no text twice where a step ends within a character.

A character that is rare, as most emoji are, is several tokens. Where a step ends within one, SGLang's detokenizer tells
the text up to the last space; behind a Chinese character, up to that character. So where one step ends behind such a
character and the next one, which speculation or --stream-interval makes several tokens, ends in another character
behind an emoji, less is counted as told than was told: once the last character is whole, all of it is told again, also
in the text of an answer that is not streamed.

Here the text is told up to the last of all places at which SGLang's rule would end it, a space or a Chinese character,
which is never less than was told before. What is behind waits for the character, as in SGLang: it may be the beginning
of a stop that goes on with that character. This runs in the process that makes text of tokens, where no GPU is asked.
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
        if not models_served.has_served_card():
            return original(text)
        end = len(text.rstrip(UNKNOWN))
        while end and not original(text[end - 1] + UNKNOWN):
            end -= 1
        return text[:end]

    return find_printable_text
