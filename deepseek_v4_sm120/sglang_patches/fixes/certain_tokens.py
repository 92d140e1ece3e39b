"""Where draft and model are certain of a token, it is drawn, and not the last one of the vocabulary.

With DSPARK, and with EAGLE's rejection sampling, a draft is refused by chance where the draft thought more of it than
the model does; then one is drawn of what the model has more of. Where both are certain of a token, both have 1 but for
rounding, and there may be nothing of which the model has more: where a draft of 1 is held against 1 - 2^-24 (top_k and
top_p divide by the sum that is left, and x * (1 / x) is no 1 for every sixth x) and the random number is the greatest
of all, or where the draft drew another token at last, of which the model has none. SGLang's kernel then takes the
vocabulary's last token: a word from nowhere, at which an answer under a grammar breaks off. By the kernel's arithmetic
that is once in 10^7 to 10^8 such places, which are most of a text.

Here the drafts' probabilities count for a millionth less. So what is certain always has something left, and all other
draws are as they were, but for that millionth.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.sglang_patches.scope import is_ours

PROBS = "draft_probs"  # the keyword
OF_DRAFTS = 1 - 2**-20  # more than the sums of probabilities are off, less than bf16 logits tell


def replace_verify(original: Callable) -> Callable:
    """For chain_speculative_sampling_triton(.., draft_probs [requests, drafts, vocabulary] float32, ..), which nobody
    reads afterwards. A later release may call it otherwise: then it is SGLang's, and the log says so."""

    @functools.wraps(original)
    def verify(*args, **kwargs):
        if is_ours() and PROBS in kwargs:
            kwargs[PROBS].mul_(OF_DRAFTS)
        elif is_ours():
            report.warn_once(f"certain_tokens does nothing: SGLang gives {original.__name__} no {PROBS}")
        return original(*args, **kwargs)

    return verify
