"""An answer that DSPARK speculates for keeps its sliding window's slots, and no more.

Before each decode step SGLang frees the slots of the sliding windows that are behind a request's window. Up to 0.5.17
the preparation of DSPARK's steps neither asks for it nor counts the steps, without which it would free none (sglang
#33805): each token of an answer keeps its slot, of a pool that has a tenth of the tokens. Where all answers together
reach that, requests are retracted, and a single one ends with an error, "Out of memory", in a KV cache that is empty
for nine tenths.

Here both are done where EAGLE's preparation does them, and DSPARK's own from 0.5.18 on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import is_ours


def replace_prepare_for_decode(original: Callable) -> Callable:
    """For DFlashDraftInputV2.prepare_for_decode(self, batch), which takes new slots for a step."""

    @functools.wraps(original)
    def prepare_for_decode(self, batch):
        if not is_ours():
            return original(self, batch)
        batch.maybe_evict_swa()
        original(self, batch)
        for request in batch.reqs:
            request.decode_batch_idx += 1

    return prepare_for_decode
