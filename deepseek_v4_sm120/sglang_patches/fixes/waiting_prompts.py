"""A long prompt that waits for room in the KV cache is not looked up in front of every step of the streams that run.

With sliding windows SGLang tries to let in the head of the queue before each step, because windows give back slots
though nobody has ended. For that it looks the prompt up in the prefix cache: with 950,000 tokens cached 0.29 s on
0.5.17, where a step of three streams takes 0.003 (up to 0.5.19; from 0.5.20 on 0.007 to 0.012), for as long as it
waits.

Here a prompt for which there was no room is tried again a step later for each 8,192 tokens that it has, or as soon as
a request of those that run has ended, or the head of the queue is another: some 1% of the time that reading it takes.
Nobody behind it is let in meanwhile by SGLang either; so not where the head is passed by: with priorities, another
policy than the queue's order, LoRA, or a storage behind a hierarchical cache. Cards decide alike. Not with several
hosts, unless all have us alike (several_hosts.py), nor with pipeline parallelism.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import decides_alike

TOKENS_OF_A_STEP = 1 << 13

_waits: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # scheduler -> (its state, steps until it looks again)


def replace_next_prompts(original: Callable) -> Callable:
    """For Scheduler._get_new_batch_prefill_raw(self, prefill_delayer_single_pass, running_batch) -> batch, running."""

    @functools.wraps(original)
    def _get_new_batch_prefill_raw(self, prefill_delayer_single_pass, running_batch):
        asked = {"prefill_delayer_single_pass": prefill_delayer_single_pass, "running_batch": running_batch}
        if prefill_delayer_single_pass is not None or not _may_wait(self, running_batch):
            return original(self, **asked)
        head = self.waiting_queue[0]
        state = head.rid, len(running_batch.reqs)
        known, steps = _waits.pop(self, (None, 0))
        if known == state and steps:
            _waits[self] = state, steps - 1
            return None, running_batch
        found = original(self, **asked)
        if found[0] is None:
            _waits[self] = state, (len(head.origin_input_ids) + len(head.output_ids)) // TOKENS_OF_A_STEP
        return found

    return _get_new_batch_prefill_raw


def _may_wait(scheduler, running_batch) -> bool:
    if scheduler.chunked_req is not None or not scheduler.waiting_queue or running_batch.is_empty():
        return False
    stores = scheduler.enable_hicache_storage or getattr(scheduler, "enable_lmcache", False)
    is_passed_by = scheduler.enable_priority_scheduling or scheduler.enable_lora or stores
    in_order = scheduler.schedule_policy == "fcfs" and not is_passed_by
    return in_order and decides_alike(scheduler.pp_group.world_size)
