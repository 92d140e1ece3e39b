"""min_p holds for requests whose drafts are verified, too.

A request's token is drawn among those that have at least min_p times the probability of the likeliest. EAGLE's
verification, which draws what it accepts and what follows, knows temperature, top_k and top_p, and not min_p (sglang
#10617): with speculation min_p is ignored, and nothing says so.

Here what min_p leaves out is taken from the probabilities that verification draws from, behind top_k and top_p, as
SGLang's sampler does it without speculation. Verification sends its decisions to the other cards by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.sglang_patches.scope import is_ours

PROBS = "target_probs"  # the keyword


class OfBatch:
    """The batch that is being verified, as far as it has min_p: [requests], or None."""

    min_ps: torch.Tensor | None = None


of_batch = OfBatch()


def replace_eagle_sample(original: Callable) -> Callable:
    """For eagle_sample(verify_input, batch, logits_output, ..), which asks the function below once at most."""

    @functools.wraps(original)
    def eagle_sample(verify_input, batch, *args, **kwargs):
        info = batch.sampling_info
        asks = info.need_min_p_sampling and not info.is_all_greedy
        of_batch.min_ps = info.min_ps if asks and is_ours() else None
        try:
            return original(verify_input, batch, *args, **kwargs)
        finally:
            of_batch.min_ps = None

    return eagle_sample


def replace_verify(original: Callable | None) -> Callable | None:
    """For tree_speculative_sampling_target_only and chain_speculative_sampling_triton(.., target_probs [requests,
    width, vocabulary] float32, ..). None, where the machine has no such kernel, stays None. A later release may call it
    otherwise: then a min_p is ignored as without us, and the log says so."""
    if original is None:
        return None

    @functools.wraps(original)
    def verify(*args, **kwargs):
        if of_batch.min_ps is not None and PROBS in kwargs:
            keep_min_p(kwargs[PROBS], of_batch.min_ps)
        elif of_batch.min_ps is not None:
            report.warn_once(f"min_p is ignored where drafts are verified: SGLang gives {original.__name__} no {PROBS}")
        return original(*args, **kwargs)

    return verify


def keep_min_p(probs: torch.Tensor, min_ps: torch.Tensor) -> None:
    """In place: what has less than min_p of the greatest is 0, the rest is normalised. A min_p of 0 changes nothing."""
    least = probs.amax(-1, keepdim=True) * min_ps[:, None, None]
    probs.masked_fill_(probs < least, 0.0)
    probs.div_(torch.where(min_ps[:, None, None] > 0, probs.sum(-1, keepdim=True), 1.0))
