"""Prefill must not starve decode: after each prefill chunk, a number of decode steps come first.

SGLang 0.5.20 and later have it as --prefill-decode-interval (defaults.py sets that argument); here is the same
for 0.5.17, whose scheduler always prefers prefill.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120 import patching

DEFAULT = "prefill_decode_interval_0_5_17"


def replace_new_batch_prefill(original: Callable) -> Callable:
    """For Scheduler._get_new_batch_prefill_raw of 0.5.17, which returns (batch or None, running batch).

    A chunk that is held back stays `chunked_req`: 0.5.17 stashes a chunk only when it has grown, so asking later is
    what it does itself when memory is short. Nothing is held back while nobody decodes.
    """
    interval = patching.value(DEFAULT)
    waits = "_deepseek_v4_sm120_decode_steps_first"

    @functools.wraps(original)
    def _get_new_batch_prefill_raw(self, prefill_delayer_single_pass, running_batch):
        left = getattr(self, waits, 0)
        if left and not running_batch.is_empty():
            setattr(self, waits, left - 1)
            return None, running_batch
        batch, running_batch = original(
            self, prefill_delayer_single_pass=prefill_delayer_single_pass, running_batch=running_batch
        )
        setattr(self, waits, interval if batch is not None else 0)
        return batch, running_batch

    return _get_new_batch_prefill_raw
