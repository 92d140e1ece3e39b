"""A prompt of tokens that the model does not have is refused, instead of ending the server for all.

/generate and /v1/completions take prompts as tokens, such as an evaluation's client makes with the tokenizer that it
was told, which may be another model's. SGLang looks at none of them. This model's first layers choose their experts by
a table of the vocabulary, which is read at the token's place, whatever it is: beyond its end, which ends the scheduler
on the CPU, and on a GPU is an illegal access or experts that do not exist.

The same for `stop_token_ids`, which `min_tokens` looks up among the logits: there they are written beyond the end.

Here such a request is answered by an error that names the token. This runs in the process that answers over HTTP,
where no GPU is asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches import models_served


def replace_validate(original: Callable) -> Callable:
    """For TokenizerManager._validate_one_request(self, obj, input_ids), which raises ValueError for what is refused."""

    @functools.wraps(original)
    def _validate_one_request(self, obj, input_ids):
        if models_served.has_served_card():
            size = self.model_config.vocab_size
            refuse_unknown("The prompt has", input_ids, size)
            asked = obj.sampling_params or {}
            if asked.get("min_new_tokens"):
                refuse_unknown("stop_token_ids has", asked.get("stop_token_ids"), size)
        return original(self, obj, input_ids)

    return _validate_one_request


def refuse_unknown(what: str, tokens, size: int) -> None:
    if hasattr(tokens, "tolist"):  # a caller in Python may give an array, which has no truth of its own, or a tensor
        tokens = tokens.tolist()
    if not tokens:
        return
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < size:
            raise ValueError(f"{what} token {token}; the model's vocabulary is 0 to {size - 1}.")
