"""Requests that give way to a higher priority (--enable-priority-scheduling) go back into the queue, in one order.

Their slots are freed, and they leave the batch before it is known whether the other one fits.

    their order      they are kept in a set, and so put back in an order of addresses: another on each card, whose
                     schedulers then let in other requests first, and wait for each other for ever (all releases)
    where nobody     up to 0.5.21 SGLang returns without putting them back, if the other one does not fit after all and
    is let in        nothing else is let in: they are never answered, and their clients wait

Here they go back as they stood in the batch, and where nobody is let in by the scheduler's own call, as from 0.5.22 on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import is_ours

_asked: list = []  # adders for which somebody gave way, since the scheduler last looked for a batch; it is one thread


def replace_preempt(original: Callable) -> Callable:
    """For PrefillAdder.preempt_to_schedule(self, req, ...) -> whether others gave way; they are in preempt_list."""

    @functools.wraps(original)
    def preempt_to_schedule(self, *args, **kwargs):
        stood, known = list(self.running_batch.reqs), len(self.preempt_list)
        has_given_way = original(self, *args, **kwargs)
        if has_given_way and is_ours():
            gave_way = {id(request) for request in self.preempt_list[known:]}
            self.preempt_list[known:] = [request for request in stood if id(request) in gave_way]
            if self not in _asked:
                _asked.append(self)
        return has_given_way

    return preempt_to_schedule


def replace_next_prompts(original: Callable) -> Callable:
    """For Scheduler._get_new_batch_prefill_raw(self, ...) -> batch or None, from 0.5.16 on beside the running batch."""

    @functools.wraps(original)
    def _get_new_batch_prefill_raw(self, *args, **kwargs):
        _asked.clear()
        found = original(self, *args, **kwargs)
        batch = found[0] if isinstance(found, tuple) else found
        for adder in _asked if batch is None else ():
            for request in adder.preempt_list:
                self._add_request_to_queue(request)
        return found

    return _get_new_batch_prefill_raw
