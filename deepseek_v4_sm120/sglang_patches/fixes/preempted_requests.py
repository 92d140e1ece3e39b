"""Requests that give way to a higher priority (--enable-priority-scheduling) go back into the queue, in one order, and
nobody gives way while a prompt that is read in chunks has no room for its next one.

Their slots are freed, and they leave the batch before it is known whether the other one fits.

    their order      they are kept in a set, and so put back in an order of addresses: another on each card, whose
                     schedulers then let in other requests first, and wait for each other for ever (all releases)
    where nobody     up to 0.5.21 SGLang returns without putting them back, if the other one does not fit after all and
    is let in        nothing else is let in: they are never answered, and their clients wait
    beside a prompt  a prompt whose next chunk finds no room in the sliding windows waits, and others are let in beside
    that waits       it only where somebody gives way. A chunk of it is then counted that did not run, and so the last
                     one that runs is not taken for the last: the first token of its answer is lost, and of an answer
                     of one token all: never answered, its slots never freed (all releases)
    beside a prompt  a chunk that the windows have cut leaves room for more tokens in the pass, and where somebody gives
    that was cut     way another prompt may be let in and cut. Is the first one the pass's own, it is forgotten, and
                     answered as if its first chunk were all of it; else an assertion ends the server (all releases)

Here they go back as they stood in the batch, and where nobody is let in by the scheduler's own call, as from 0.5.22 on.
A prompt that waits, or was cut, has what room there is; who has a higher priority is let in behind it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import is_ours

_asked: list = []  # adders for which somebody gave way, since the scheduler last looked for a batch; it is one thread
_without_room = weakref.WeakSet()  # adders of passes in which a prompt's chunk waits, or is not its last


def replace_preempt(original: Callable) -> Callable:
    """For PrefillAdder.preempt_to_schedule(self, req, ...) -> whether others gave way; they are in preempt_list."""

    @functools.wraps(original)
    def preempt_to_schedule(self, *args, **kwargs):
        if (self in _without_room or self.new_chunked_req is not None) and is_ours():
            return False
        stood, known = list(self.running_batch.reqs), len(self.preempt_list)
        has_given_way = original(self, *args, **kwargs)
        if has_given_way and is_ours():
            gave_way = {id(request) for request in self.preempt_list[known:]}
            self.preempt_list[known:] = [request for request in stood if id(request) in gave_way]
            if self not in _asked:
                _asked.append(self)
        return has_given_way

    return preempt_to_schedule


def replace_add_chunk(original: Callable) -> Callable:
    """For PrefillAdder.add_chunked_req(self, req) -> the request while chunks of it are left; asked first in a pass."""

    @functools.wraps(original)
    def add_chunked_req(self, req):
        left = original(self, req)
        if left is not None:
            _without_room.add(self)
        return left

    return add_chunked_req


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
