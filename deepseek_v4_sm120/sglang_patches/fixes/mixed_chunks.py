"""A prompt's chunk takes answers along (--enable-mixed-chunk) only where there are slots for their tokens, too.

With --enable-mixed-chunk the answers that run are read in the same pass as a chunk of a prompt. Which prompts are let
in is asked with a token for each answer, but an answer whose page is full takes a page, and of the sliding windows
nothing is kept for it: where the KV cache or the windows' pool is full, the prompt has what the answers need. An answer
alone would then retract another one; in a mixed pass the allocation fails and ends the server ("Decode out of memory").
0.5.22 asks before it mixes.

And 0.5.17 and 0.5.18 take an answer's length from the tokens that are known so far, and one more for the step that is
in flight. Of an answer that sat out the last pass, because a prompt in it asked for log-probabilities, none is: its
next token is computed a position too far, and cached so. 0.5.19 takes the row's length.

Here answers that have no room beside the prompt sit out its pass, the next step is theirs, and a row's length is its
own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import is_ours

_looking: list = []  # (scheduler, what it runs) while it looks for prompts to mix with that; it is one thread


def replace_next_prompts(original: Callable) -> Callable:
    """For Scheduler._get_new_batch_prefill_raw(self, prefill_delayer_single_pass, running_batch) -> batch, running."""

    @functools.wraps(original)
    def _get_new_batch_prefill_raw(self, prefill_delayer_single_pass, running_batch):
        mixes = self.is_mixed_chunk
        if mixes and is_ours():
            _looking.append((self, running_batch))
        try:
            return original(self, prefill_delayer_single_pass, running_batch)
        finally:
            _looking.clear()
            self.is_mixed_chunk = mixes

    return _get_new_batch_prefill_raw


def replace_prepare(original: Callable) -> Callable:
    """For ScheduleBatch.prepare_for_extend(self), behind which the prompts have their slots."""

    @functools.wraps(original)
    def prepare_for_extend(self):
        original(self)
        for scheduler, running in _looking:
            if not running.is_empty():
                running.filter_batch()
                scheduler.is_mixed_chunk = running.is_empty() or running.check_decode_mem()

    return prepare_for_extend


def replace_mix(original: Callable) -> Callable:
    """For ScheduleBatch.mix_with_running(self, running_batch), whose rows have the slots of their next tokens."""

    @functools.wraps(original)
    def mix_with_running(self, running_batch):
        original(self, running_batch)
        if is_ours():
            self.prefix_lens[-len(running_batch.reqs) :] = (running_batch.seq_lens_cpu - 1).tolist()

    return mix_with_running
