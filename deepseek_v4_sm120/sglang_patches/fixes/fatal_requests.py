"""A request whose numbers or kinds fit no answer is refused, instead of ending the server for all.

SGLang hands these on as they are, and what meets them is the scheduler, or the process that makes text of tokens. An
error there ends the server:

- a `top_k` of 2**31 and more, which clients send for "all" (sglang #17646, closed without)
- more log-probabilities for a token than the vocabulary has (`logprobs`, `top_logprobs`, all APIs): sglang #40076, open
- `logprob_start_len` below -1 (/generate), whose counts do not come out, and a prompt of no tokens beside others
- up to 0.5.13 `token_ids_logprob` beyond the vocabulary, up to 0.5.20 a seed that has more than 64 bits
- up to 0.5.21 sampling parameters of /generate of another kind: a schema that is an object where its text is asked for,
  "skip_special_tokens": 1, "stop_token_ids": [null] (#22144)
- a `max_new_tokens` of half a token, a `logit_bias` that is no table of numbers, in all releases; up to 0.5.19 an
  infinite one, by which nothing can be drawn
- up to 0.5.13 a `temperature` that is NaN, which JSON as Python reads it has, over the chat API, too
- up to 0.5.16 a `stop_regex` that Python parses and does not compile, such as one that looks behind for any number of
  characters, over the chat API, too

Here such a `top_k` is what it means, the whole vocabulary, 5.0 is 5, and 1 is true; each of the others is answered
by an error that says which one. This runs in the process that answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, MutableMapping
from numbers import Integral, Real

from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.fixes.unknown_tokens import refuse_unknown

SEEDS = range(-(2**63), 2**63)
GREATEST, ALL = 2**31 - 1, -1  # that SGLang's tensor of top_k holds; what it reads as the whole vocabulary
GREATEST_BIAS = 1e30  # by SGLang's least temperature, 1e-6, float32 still holds it
SWITCHES = ("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "ignore_eos")
WHOLE = ("max_new_tokens", "min_new_tokens", "top_k", "n", "stream_interval", "sampling_seed")
KINDS = {
    "true or false": (bool, SWITCHES),
    "a whole number": (Integral, WHOLE),
    "a string": (str, ("json_schema", "regex", "ebnf", "structural_tag")),
    "an object": (Mapping, ("custom_params", "logit_bias")),
}


def replace_validate(original: Callable) -> Callable:
    """For TokenizerManager._validate_one_request(self, obj, input_ids), which raises ValueError for what is refused."""

    @functools.wraps(original)
    def _validate_one_request(self, obj, input_ids):
        if models_served.has_served_card():
            refuse(obj, input_ids, self.model_config.vocab_size)
        return original(self, obj, input_ids)

    return _validate_one_request


def replace_normalize(original: Callable) -> Callable:
    """For SamplingParams.normalize(self, tokenizer), behind which `stop_regex_strs` is a list; SGLang parses them."""

    @functools.wraps(original)
    def normalize(self, tokenizer):
        original(self, tokenizer)
        if models_served.has_served_card():
            for pattern in self.stop_regex_strs:
                refuse_uncompiled(pattern)

    return normalize


def refuse(obj, input_ids, size: int) -> None:
    """Of a request for text; one for embeddings asks for none of these."""
    if isinstance(obj.sampling_params, dict):
        mean(obj.sampling_params)
        refuse_kinds(obj.sampling_params)
    if input_ids is not None and not len(input_ids) and not getattr(obj, "session_params", None):
        raise ValueError("The prompt has no tokens.")
    if not getattr(obj, "return_logprob", False) and not getattr(obj, "top_logprobs_num", 0):
        return
    asked, first = obj.top_logprobs_num or 0, obj.logprob_start_len
    if not 0 <= asked <= size:
        raise ValueError(f"{asked} log-probabilities for a token; the model's vocabulary has {size}, and 0 is none.")
    if first is not None and first < -1:
        raise ValueError(f"logprob_start_len is {first}; it is a place in the prompt, from 0 on, or -1 for none of it.")
    refuse_unknown("token_ids_logprob has", obj.token_ids_logprob, size)


def mean(asked: MutableMapping) -> None:
    """In place: of a batch the request is made of another object, which has the same sampling_params."""
    for name in WHOLE:
        if isinstance(asked.get(name), float) and asked[name] % 1 == 0:
            asked[name] = int(asked[name])
    for name in SWITCHES:
        if asked.get(name) in (0, 1):
            asked[name] = bool(asked[name])
    if isinstance(asked.get("top_k"), int) and asked["top_k"] > GREATEST:
        asked["top_k"] = ALL


def refuse_kinds(asked: Mapping) -> None:
    for what, (kind, names) in KINDS.items():
        for name in names:
            if not isinstance(asked.get(name), kind | None):
                raise ValueError(f"{name} has to be {what}.")
    temperature = asked.get("temperature")
    if isinstance(temperature, Real) and not math.isfinite(temperature):
        raise ValueError("temperature has to be a finite number.")
    if (asked.get("sampling_seed") or 0) not in SEEDS:
        raise ValueError("sampling_seed has more than 64 bits.")
    tokens, biases = asked.get("stop_token_ids"), asked.get("logit_bias")
    if not all(isinstance(token, Integral) for token in tokens or ()):
        raise ValueError("stop_token_ids have to be whole numbers.")
    if not all(isinstance(bias, Real) and bias <= GREATEST_BIAS for bias in (biases or {}).values()):
        raise ValueError(f"logit_bias has to be numbers by tokens, up to {GREATEST_BIAS:g}.")


def refuse_uncompiled(pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError) as error:  # what the scheduler would end with
        raise ValueError(f"stop_regex is no regular expression: {error}.") from error
