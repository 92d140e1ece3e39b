"""A prompt that nobody waits behind is read without pauses.

With --prefill-decode-interval (ours by default from 0.5.20 on) SGLang lets so many turns of its loop pass behind each
chunk of a prompt before it looks for the next one, so that the streams that run have steps between. It counts turns,
whether or not there is a stream: where nobody decodes they are empty, but in the first of them the chunk's result is
waited for, and the next chunk is planned and launched behind it, on cards that have nothing to do. With --pp-size that
is every stage but one: a chunk begins in the first when the one before has left the last, and N stages take N times as
long for a long prompt as without that argument.

Here turns are counted while somebody decodes, in this batch or in another one of the pipeline's; else the next chunk
follows at once, as without the argument. Cards and stages decide alike. Not with data parallel attention, whose ranks
keep one pace whoever decodes on them, nor with several hosts, unless all have us alike (several_hosts.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.scope import is_ours


def replace_should_defer(original: Callable) -> Callable:
    """For Scheduler._should_defer_prefill(self), from 0.5.23 on with the running batch -> whether a turn is for the
    streams alone. Asked behind the merge of what was read with what runs."""

    @functools.wraps(original)
    def _should_defer_prefill(self, *args, **kwargs):
        keeps_pace = self.require_mlp_sync or models_served.may_have_unlike_hosts() or not is_ours()
        # what has streams, or has read their prompts in its last pass: the batch whose turn it is, and the pipeline's
        batches = [self.running_batch, self.last_batch, *vars(self).get("running_mbs", ())]
        if keeps_pace or any(batch is not None and not batch.is_empty() for batch in batches):
            return original(self, *args, **kwargs)
        return False

    return _should_defer_prefill
