"""No value of one request's ends the server for all.

SGLang's front asks whether the values of a request are in their bounds, of some of them not, or not whether they are
numbers. Where the scheduler then fails over one, its process ends, and with it the server and all requests in it:

- a `top_k` of 2**31 and more, which clients send for "all" (sglang #17646, closed without)
- more `top_logprobs` (`logprobs` over /v1/completions, `top_logprobs_num`) than the vocabulary has (sglang #40076)
- over /generate, which looks at no types: a `logprob_start_len` below -1, a `max_new_tokens`, `top_k` or
  `stream_interval` that is no whole number, a `logit_bias` that is no table of numbers; up to 0.5.13
  `token_ids_logprob` beyond the vocabulary

Here such a `top_k` is what it means, the whole vocabulary, and the others are answered by an error that names them.
This runs in the process that answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.fixes.unknown_tokens import refuse_unknown

GREATEST = 2**31 - 1  # that SGLang's tensor of top_k holds
ALL = -1
WHOLE = ("max_new_tokens", "top_k", "stream_interval")


def replace_validate(original: Callable) -> Callable:
    """For TokenizerManager._validate_one_request(self, obj, input_ids), which raises ValueError for what is refused."""

    @functools.wraps(original)
    def _validate_one_request(self, obj, input_ids):
        if models_served.has_served_card():
            if isinstance(obj.sampling_params, dict):
                mend_params(obj.sampling_params)
            if getattr(obj, "return_logprob", False):
                refuse_logprobs(obj, self.model_config.vocab_size)
        return original(self, obj, input_ids)

    return _validate_one_request


def mend_params(params: dict) -> None:
    """In place: of a batch SGLang asks this of one object and makes the request of another."""
    for name in WHOLE:
        value = params.get(name)
        if not isinstance(value, int | None):
            raise ValueError(f"{name} is a whole number, not {value!r}.")
    if params.get("logit_bias") is not None:
        refuse_bias(params["logit_bias"])
    if (params.get("top_k") or 0) > GREATEST:
        params["top_k"] = ALL


def refuse_bias(bias) -> None:
    if not isinstance(bias, dict):
        raise ValueError("logit_bias is a table of tokens and numbers.")
    for token, value in bias.items():
        if not isinstance(value, int | float) or math.isnan(value):
            raise ValueError(f"logit_bias is a number for each token, and {value!r} for {token}.")


def refuse_logprobs(obj, size: int) -> None:
    if (obj.top_logprobs_num or 0) > size:
        raise ValueError(f"Of {obj.top_logprobs_num} top log-probabilities the vocabulary has {size}.")
    if (obj.logprob_start_len or 0) < -1:
        raise ValueError(f"logprob_start_len is a place of the prompt, or -1, not {obj.logprob_start_len}.")
    refuse_unknown("token_ids_logprob has", obj.token_ids_logprob, size)
