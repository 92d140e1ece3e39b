"""A request that asks for some tokens' log-probabilities ends no server, whoever is beside it.

/generate takes `token_ids_logprob`, tokens whose log-probabilities are told at each place of the answer. Of a batch in
which one request asks so SGLang makes a tensor for it and an empty list for each other one, and then asks all of them
for `tolist`: the scheduler ends, and so the server for all, as soon as anybody else is answered in the same step,
whatever that one has asked for (0.5.12 to 0.5.20, with speculation and without; sglang #34719 and #35705, open). Up to
0.5.15 so does a prompt whose log-probabilities are asked for, in one pass with another that asks for tokens of its own.

Here who asks for no tokens asks for none of them, which is an empty tensor, as 0.5.21 has it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import is_ours


def replace_raw(original: Callable) -> Callable:
    """For get_token_ids_logprobs_raw(logprobs, token_ids_logprobs_list, stage, ..) -> by request the numbers and whose
    they are. The list has a request's tokens, or None."""

    @functools.wraps(original)
    def get_token_ids_logprobs_raw(logprobs, token_ids_logprobs_list, *args, **kwargs):
        if is_ours():
            token_ids_logprobs_list = [[] if tokens is None else tokens for tokens in token_ids_logprobs_list]
        return original(logprobs, token_ids_logprobs_list, *args, **kwargs)

    return get_token_ids_logprobs_raw
