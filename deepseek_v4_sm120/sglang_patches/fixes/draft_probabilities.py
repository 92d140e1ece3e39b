"""EAGLE's rejection sampling judges drafts by the probabilities that they were drawn by.

With --speculative-use-rejection-sampling a draft is drawn from the draft model's probabilities, and verification weighs
these against the model's own. Where several drafts are made in a graph, they lie in the memory that graphs share: the
graph of the verified rows runs next, and may write over them before anybody reads them. Then answers are drawn from
neither distribution, and nothing says so. Of what that graph gives they alone are read so late.

Here they are copied where the graph has run, as SGLang does from 0.5.21 on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import is_ours


def replace_execute(original: Callable) -> Callable:
    """For EAGLEDraftCudaGraphRunner.execute(self, forward_batch) -> (parents, scores, tokens, probabilities [requests,
    drafts, vocabulary] or None: without rejection sampling)."""

    @functools.wraps(original)
    def execute(self, forward_batch):
        *drafts, probabilities = original(self, forward_batch)
        if probabilities is not None and is_ours():
            probabilities = probabilities.clone()
        return *drafts, probabilities

    return execute
