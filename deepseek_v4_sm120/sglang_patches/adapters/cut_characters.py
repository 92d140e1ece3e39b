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
FED = "_dsv4_sm120_fed"  # of a parser: the last tokens that it was given


def replace_feed(original: Callable) -> Callable:
    """For DeepSeekRecipeOutputParser.feed(self, token_ids) -> what was read of a stream's step."""

    @functools.wraps(original)
    def feed(self, token_ids):
        if not models_served.has_served_card():
            return original(self, token_ids)
        before = _before(self, 0)
        whole = num_whole(self._hf_tokenizer, token_ids, before) if len(token_ids) > 1 else 0  # one goes on as it is
        if whole in (0, len(token_ids)):
            told = original(self, token_ids)
        else:
            told = original(self, token_ids[:whole])
            told = told.merge(original(self, token_ids[whole:]))
        setattr(self, FED, [*getattr(self, FED, ()), *token_ids][-MOST - len(self._pending_ids) :])
        return told

    return feed


def replace_finish(original: Callable) -> Callable:
    """For DeepSeekRecipeOutputParser.finish(self, token_ids, finish_reason, *, keep_matched_stop) -> what was read of
    the last step, or of a whole answer. What matched a stop is to be cut from the tokens as they are."""

    @functools.wraps(original)
    def finish(self, token_ids, finish_reason, *, keep_matched_stop=False):
        ids = [*self._pending_ids, *token_ids]  # what a stop may begin with is pending
        is_cut = finish_reason.get("matched") is None and models_served.has_served_card()
        before = _before(self, len(self._pending_ids))
        whole = num_whole(self._hf_tokenizer, ids, before) if is_cut else len(ids)
        if whole == len(ids):
            return original(self, token_ids, finish_reason, keep_matched_stop=keep_matched_stop)
        self.num_consumed_tokens -= len(self._pending_ids)
        self._pending_ids, self._stop_hold_chars = [], 0
        setattr(self, FED, before)
        told = self.feed(ids[:whole])
        rest = original(self, ids[whole:], finish_reason, keep_matched_stop=keep_matched_stop)
        return told.merge(rest)

    return finish


def _before(parser, pending: int) -> list[int]:
    """The last tokens that were handed over before the last `pending` ones: a character may begin among them."""
    fed = getattr(parser, FED, [])
    return fed[: len(fed) - pending][1 - MOST :]


def num_whole(tokenizer, token_ids, before=()) -> int:
    """How many of the tokens are in front of a character that is not at its end; it may begin among those before."""
    end, all_ids = len(token_ids), [*before, *token_ids]
    while end:
        behind = len(before) + end
        if not tokenizer.decode(all_ids[max(behind - MOST, 0) : behind], skip_special_tokens=False).endswith(UNKNOWN):
            break
        end -= 1
    return end
