"""A mixed pass masks a drafting answer by where its grammar stands, not by where it stood a step ago.

With --enable-mixed-chunk and drafts (0.5.19 on) an answer that runs takes its next token in the pass of another
prompt's chunk. SGLang masks that token as soon as the pass is launched, while the last step's tokens wait in a queue
for the host: what it verifies next has them brought to the grammar first, prompts have none, and nobody thought of the
answers beside a prompt. So the token is one that the grammar allowed before the last step, the grammar refuses it, and
the answer breaks off: up to 0.5.22 with "abort" for its finish_reason, on 0.5.23 with an error 500. Or it is taken,
where the grammar repeats itself, and is another one than the model's.

Here the last step's tokens are brought to their grammars before such a pass is launched, by SGLang's own function, and
the pass waits for that step. Passes without grammars or without answers are launched as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import is_ours


def replace_waits(original: Callable) -> Callable:
    """For Scheduler.is_disable_overlap_for_batch(self, batch, last_batch) -> whether the results that wait are looked
    at before the batch, or None, is launched; asked in front of each launch where steps overlap."""

    @functools.wraps(original)
    def is_disable_overlap_for_batch(self, batch, last_batch):
        is_mixed = batch and batch.has_grammar and batch.forward_mode.is_mixed()
        if is_mixed and not batch.spec_algorithm.is_none() and is_ours():  # without drafts the mask waits for results
            self._advance_pending_grammar()
        return original(self, batch, last_batch)

    return is_disable_overlap_for_batch
