"""With a seed a request draws the same token whatever it is batched with, and with min_p, too.

A server with --enable-deterministic-inference draws by noise that is a hash of the request's seed, the position and the
token. But where a request of the batch has a top_k (a greedy one has 1), top_p or min_p, SGLang sorts the probabilities
of all first, and the noise is that of a token's place in the order: a request with a seed draws another token beside
such a one than alone (sglang #35697, open). And beside a request with min_p an assertion ends the server for all
(#33695, open).

Here what the three leave is drawn in the vocabulary's order in each batch, by the logarithms that SGLang takes where
nothing is left out, so a request has the same bits in both. min_p needs nothing else: the draw asks for no sum of 1.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch

from deepseek_v4_sm120.sglang_patches.scope import is_ours


def replace_sampling(original: Callable) -> Callable:
    """For top_k_top_p_min_p_sampling_from_probs_torch(probs [rows, vocabulary], ..) -> tokens [rows] int32; with
    return_filtered_probs (0.5.20 and later) more, which is the original's."""

    @functools.wraps(original)
    def sampling_from_probs(probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions, **kwargs):
        if sampling_seed is None or kwargs.get("return_filtered_probs") or not is_ours():
            return original(probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions, **kwargs)
        kept = kept_probabilities(probs, top_ks, top_ps, min_ps if need_min_p_sampling else None)
        draw = inspect.unwrap(original).__globals__["multinomial_with_seed"]
        return draw(kept.log_(), sampling_seed, positions).view(-1).to(torch.int32)

    return sampling_from_probs


def kept_probabilities(probs, top_ks, top_ps, min_ps: torch.Tensor | None) -> torch.Tensor:
    """[rows, vocabulary]: 0 for what they leave out. Each asks of a token how it stands among all, as in SGLang."""
    ordered, tokens = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1).sub_(ordered)
    left_out = before > top_ps[:, None]
    left_out |= torch.arange(ordered.shape[-1], device=probs.device) >= top_ks[:, None]
    if min_ps is not None:
        left_out |= ordered < ordered[:, :1] * min_ps[:, None]
    return torch.zeros_like(probs).scatter_(-1, tokens, ordered.masked_fill_(left_out, 0.0))
