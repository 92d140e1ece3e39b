"""min_p holds for requests whose drafts DSPARK verifies, too.

DSPARK's verification knows temperature, top_k and top_p, and not min_p: tokens are drawn that it forbids, and nothing
says so (EAGLE's: min_p_verify.py). Here what min_p leaves out is taken from the probabilities that it draws from,
behind top_k and top_p. 0.5.23 has two ways that know no probabilities of a whole block, a kernel of its own and a graph
around it, for batches without top_k and top_p: a batch with min_p does not take them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.fixes.min_p_verify import of_batch, replace_verify
from deepseek_v4_sm120.sglang_patches.scope import is_ours

__all__ = ["replace_accept", "replace_are_noop", "replace_verify"]
NOISE = "rejection_noise"  # what 0.5.23's kernel of its own draws by; None: it is not taken


def replace_accept(original: Callable) -> Callable:
    """For accept_draft_tokens(*, candidates, target_logits, draft_block, sampling_info, .., rejection_noise), which
    asks the function below at most once."""

    @functools.wraps(original)
    def accept_draft_tokens(*, candidates, target_logits, draft_block, sampling_info, **asked):
        asks = asks_min_p(sampling_info) and is_ours()
        of_batch.min_ps = sampling_info.min_ps if asks else None
        if asks and NOISE in asked:
            asked[NOISE] = None
        verified = dict(candidates=candidates, target_logits=target_logits, draft_block=draft_block)
        try:
            return original(**verified, sampling_info=sampling_info, **asked)
        finally:
            of_batch.min_ps = None

    return accept_draft_tokens


def replace_are_noop(original: Callable) -> Callable:
    """For verify_logits_adjustments_are_noop(sampling_info): whether a graph may decide on the logits as they are."""

    @functools.wraps(original)
    def verify_logits_adjustments_are_noop(sampling_info):
        return original(sampling_info) and not (asks_min_p(sampling_info) and is_ours())

    return verify_logits_adjustments_are_noop


def asks_min_p(sampling_info) -> bool:
    """Whether a request of the batch that samples may have min_p. What a graph is captured with has no such field."""
    return (
        sampling_info is not None
        and not sampling_info.is_all_greedy
        and getattr(sampling_info, "need_min_p_sampling", False)
    )
