"""An answer that `max_tokens` ends within a character, or a stop behind one, arrives up to there.

A character that is rare, as most emoji are, is several tokens. 0.5.23 hands the tokens of a step, or of a whole answer
that is not streamed, to deepseek-recipe (0.2.0) at once. Where they end within a character recipe waits for the rest of
it with all of their text, and where none comes the text is lost: an answer that is not streamed is empty.

And where a stop of two or more characters ends an answer behind an emoji, SGLang takes what is in front of the stop as
text, begins within the emoji, and hands that text over: the emoji is lost, and all of an answer that is not streamed.

So is an answer whose last character is U+FFFD itself, which looks the same; here it loses that one.

And SGLang looks for a stop, and for what one may begin with, a token farther back each time, with all behind it decoded
anew. What a `stop_regex` ended has no such text, so an answer of 8,000 tokens that is not streamed keeps all others
waiting for 5 s, by the square of its length; a stream does so with each token where a stop has thousands of characters.

Here the tokens of a character that is not at its end are handed over by themselves, and those in front of a stop as
they are, found by halving. This runs in the process that answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches import models_served

UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer says for bytes that are no character
MOST = 4  # bytes of a character, and so tokens
# of a parser: its last tokens, and those in front of its last step
FED, BEFORE = "_dsv4_sm120_fed", "_dsv4_sm120_before"


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


def replace_release(original: Callable) -> Callable:
    """For DeepSeekRecipeOutputParser._release_pending_ids(self) -> the tokens in front of all that a stop may begin
    with. A part of a character is none: its bytes would be counted as one each. What may be a part is not handed over
    behind text, which would be lost with it; what is more than a character has are U+FFFD themselves."""

    @functools.wraps(original)
    def _release_pending_ids(self):
        if not models_served.has_served_card():
            return original(self)
        ids, kept = self._pending_ids, self._stop_hold_chars
        held = len(ids)
        if kept:
            held = least(lambda first: num_characters(self._hf_tokenizer, ids[first + 1 :]) < kept, 0, held)
        if held < len(ids):
            held = num_whole(self._hf_tokenizer, ids[:held]) or (held if held >= MOST else 0)
        self._pending_ids = ids[held:]
        return ids[:held]

    return _release_pending_ids


def num_characters(tokenizer, token_ids) -> int:
    """Of what may begin and end within one: a U+FFFD farther in is what the text has."""
    text = tokenizer.decode(token_ids, skip_special_tokens=False)
    inner = text[MOST - 1 : 1 - MOST] if len(text) >= 2 * MOST else ""
    return len(text) - text.count(UNKNOWN) + inner.count(UNKNOWN)


def replace_finish(original: Callable) -> Callable:
    """For DeepSeekRecipeOutputParser.finish(self, token_ids, finish_reason, *, keep_matched_stop) -> what was read of
    the last step, or of a whole answer."""

    @functools.wraps(original)
    def finish(self, token_ids, finish_reason, *, keep_matched_stop=False):
        if not models_served.has_served_card():
            return original(self, token_ids, finish_reason, keep_matched_stop=keep_matched_stop)
        ids = [*self._pending_ids, *token_ids]  # what a stop may begin with is pending
        before, matched = _before(self, len(self._pending_ids)), finish_reason.get("matched")
        setattr(self, BEFORE, before)
        if isinstance(matched, str):
            ids = self._cut_at_stop_string(ids, matched, keep_stop=keep_matched_stop)
        elif matched is not None and not keep_matched_stop and ids[-1:] == [matched]:
            ids = ids[:-1]
        whole = num_whole(self._hf_tokenizer, ids, before)
        if whole == len(ids):
            return original(self, token_ids, finish_reason, keep_matched_stop=keep_matched_stop)
        consumed = self.num_consumed_tokens + len(token_ids)
        self._pending_ids, self._stop_hold_chars = [], 0
        setattr(self, FED, before)
        told = self.feed(ids[:whole])
        told = told.merge(original(self, ids[whole:], {**finish_reason, "matched": None}))
        self.num_consumed_tokens = consumed
        return told

    return finish


def replace_cut(original: Callable) -> Callable:
    """For DeepSeekRecipeOutputParser._cut_at_stop_string(self, token_ids, stop, *, keep_stop) -> the tokens in front of
    a stop that the last one of them completes, or with it."""

    @functools.wraps(original)
    def _cut_at_stop_string(self, token_ids, stop, *, keep_stop):
        if not models_served.has_served_card():
            return original(self, token_ids, stop, keep_stop=keep_stop)
        decode = functools.partial(self._hf_tokenizer.decode, skip_special_tokens=False)
        before = getattr(self, BEFORE, [])
        ids = [*before, *token_ids]
        last = len(decode(ids[-1:]))

        def has_stop(number: int) -> bool:  # so many tokens, with all of it that the last one may complete
            text = decode(ids[-number:])
            return stop in text and len(text) - last - len(stop) + 1 >= 0

        number = least(has_stop, 1, len(ids))
        text = decode(ids[-number:])
        while number < len(ids) and text.startswith(UNKNOWN) and len(text) - last - len(stop) + 1 < MOST:
            number = least(has_stop, number + 1, len(ids))
            text = decode(ids[-number:])
        cut = text.find(stop)
        if cut == -1:
            return token_ids
        cut += len(stop) if keep_stop else 0
        start = len(ids) - number
        end = least(lambda end: len(decode(ids[start : end + 1])) > cut + MOST, start, len(ids))
        head = decode(ids[start:end])
        while end > start and (len(head) > cut or head != text[: len(head)]):
            end -= 1
            head = decode(ids[start:end])
        encoded = self._hf_tokenizer.encode(text[len(head) : cut], add_special_tokens=False)
        return [*ids[len(before) : max(end, len(before))], *encoded.ids]

    return _cut_at_stop_string


def least(is_enough: Callable[[int], bool], low: int, most: int) -> int:
    """The least number from `low` on that is enough, `most` where none below is; what is more is enough, too. Few are
    asked, none much greater than that one."""
    high, step = low, 1
    while high < most and not is_enough(high):
        low, high, step = high + 1, min(high + step, most), 2 * step
    if high == most and not is_enough(most):
        return most
    return bisect.bisect_left(range(low, high), True, key=is_enough) + low


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
