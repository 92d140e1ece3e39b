"""Of several answers to one prompt (`n`) each is drawn by a seed of its own.

A server with --enable-deterministic-inference draws by noise that is a hash of the request's seed, the position and the
token. The n requests that are made of one have the same settings, the seed among them (without one: 42), so all n
answers are the same (sglang #28805, open).

Here the first has the request's seed, as a request for one answer has, and each further one the next: vLLM's rule, and
that pull request's. Each can be had again, by the same request or alone by its seed. Without that flag no seed is read.
This runs in the process that answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches import models_served

WITHOUT = 42  # SamplingBatchInfo's, for a request without a seed
LEAST, SEEDS = -(2**63), 2**64  # it makes an int64 of them


def replace_send(original: Callable) -> Callable:
    """For TokenizerManager._send_one_request(self, tokenized_obj), which some releases await. It is called for each of
    a prompt's n, one behind the other, with settings that they share, and before for the prompt, with a copy of them.
    """

    @functools.wraps(original)
    def _send_one_request(self, tokenized_obj):
        if models_served.has_served_card() and tokenized_obj.sampling_params.n > 1:
            shared = tokenized_obj.sampling_params
            tokenized_obj.sampling_params = copy.copy(shared)
            shared.sampling_seed = following(shared.sampling_seed)
        return original(self, tokenized_obj)

    return _send_one_request


def following(seed):
    """What is no seed stays as it is: SGLang refuses it, or draws by none."""
    of = WITHOUT if seed is None else seed
    return (of + 1 - LEAST) % SEEDS + LEAST if isinstance(of, int) else seed
