"""What a token is as text is asked of the tokenizer once, not at each place where its log-probability is told.

The log-probabilities of a prompt (`echo` and `logprobs` over /v1/completions, which is what lm-evaluation-harness asks
with, and `return_text_in_logprobs` of /generate) are told with the text of each token and of each of its alternatives.
SGLang has the tokenizer make them one by one, 12 to 25 us each, in the loop that answers over HTTP: all streams of the
server stand still meanwhile, for seconds where the prompt is long (0.5.12 to 0.5.23).

A token's text is always the same, so here the original is asked for those that were not told yet. At most that is the
vocabulary once. This runs in the process that answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches import models_served


class Texts:
    """The texts of one tokenizer's tokens, as far as they were told."""

    def __init__(self):
        self.tokenizer, self.known = None, {}

    def of(self, tokenizer) -> dict[int, str]:
        if tokenizer is not self.tokenizer:
            self.tokenizer, self.known = tokenizer, {}
        return self.known


def replace_detokenize(original: Callable) -> Callable:
    """For TokenizerManager.detokenize_logprob_tokens(self, token_logprobs_val, token_logprobs_idx, decode_to_text) ->
    [(log-probability, token, text)]. SGLang's own for alternatives asks this one, for each place of them."""
    texts = Texts()

    @functools.wraps(original)
    def detokenize_logprob_tokens(self, token_logprobs_val, token_logprobs_idx, decode_to_text):
        if not decode_to_text or not models_served.has_served_card():
            return original(self, token_logprobs_val, token_logprobs_idx, decode_to_text)
        known = texts.of(self.tokenizer)
        asked = [token for token in dict.fromkeys(token_logprobs_idx) if token not in known]
        if asked:
            known.update((token, text) for _, token, text in original(self, asked, asked, True))
        of_each = map(known.__getitem__, token_logprobs_idx)
        return [*zip(token_logprobs_val, token_logprobs_idx, of_each, strict=False)]

    return detokenize_logprob_tokens
