"""An answer that `max_tokens` ends within a character arrives up to that character.

A character that is rare, as most emoji are, is several tokens. 0.5.23 hands the tokens of a step, or of a whole answer
that is not streamed, to deepseek-recipe (0.2.0) at once. Where they end within a character recipe waits for the rest of
it with all of their text, and where none comes the text is lost: an answer that is not streamed is empty.

Here the tokens of a character that is not at its end are handed over by themselves. This runs in the process that
answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches import models_served

UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer says for bytes that are no character
MOST = 4  # bytes of a character, and so tokens


def replace_feed(original: Callable) -> Callable:
    """For DeepSeekRecipeOutputParser.feed(self, token_ids) -> what was read of a stream's step."""

    @functools.wraps(original)
    def feed(self, token_ids):
        if len(token_ids) < 2 or not models_served.has_served_card():  # one token goes on as it is, whatever it is of
            return original(self, token_ids)
        whole = num_whole(self._hf_tokenizer, token_ids)
        if whole in (0, len(token_ids)):
            return original(self, token_ids)
        told = original(self, token_ids[:whole])
        return told.merge(original(self, token_ids[whole:]))

    return feed


def replace_finish(original: Callable) -> Callable:
    """For DeepSeekRecipeOutputParser.finish(self, token_ids, finish_reason, *, keep_matched_stop) -> what was read of
    the last step, or of a whole answer. What matched a stop is to be cut from the tokens as they are."""

    @functools.wraps(original)
    def finish(self, token_ids, finish_reason, *, keep_matched_stop=False):
        ids = [*self._pending_ids, *token_ids]  # what a stop may begin with is pending
        is_cut = finish_reason.get("matched") is None and models_served.has_served_card()
        whole = num_whole(self._hf_tokenizer, ids) if is_cut else len(ids)
        if whole == len(ids):
            return original(self, token_ids, finish_reason, keep_matched_stop=keep_matched_stop)
        self.num_consumed_tokens -= len(self._pending_ids)
        self._pending_ids, self._stop_hold_chars = [], 0
        told = self.feed(ids[:whole])
        rest = original(self, ids[whole:], finish_reason, keep_matched_stop=keep_matched_stop)
        return told.merge(rest)

    return finish


def num_whole(tokenizer, token_ids) -> int:
    """How many of the tokens are in front of a character that is not at its end."""
    end = len(token_ids)
    while end and tokenizer.decode(token_ids[max(end - MOST, 0) : end], skip_special_tokens=False).endswith(UNKNOWN):
        end -= 1
    return end
