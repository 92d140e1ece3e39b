"""A completion of no tokens has the log-probabilities of its prompt, and no others.

Who wants to know a prompt's log-probabilities over /v1/completions asks with `echo`, `logprobs` and `max_tokens` 0, and
sums `token_logprobs` from a place of the prompt to the end of the list. SGLang draws a token for every request and cuts
it off the text, but tells its log-probability behind the prompt's where drafts are made, or where a request of the same
pass wants tokens: the same request's sum then depends on its neighbours. Without those it tells its alternatives alone,
so that `top_logprobs` is longer than `tokens` (0.5.12 to 0.5.23).

Here what was drawn is not told. This runs in the process that answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches import models_served

OF_ANSWER = ("output_token_logprobs", "output_top_logprobs")


def replace_response(original: Callable) -> Callable:
    """For OpenAIServingCompletion._build_completion_response(self, request, ret, created), of an answer that is not
    streamed."""

    @functools.wraps(original)
    def _build_completion_response(self, request, ret, created):
        if request.max_tokens == 0 and models_served.has_served_card():
            ret = [item | {"meta_info": without_answer(item["meta_info"])} for item in ret]
        return original(self, request, ret, created)

    return _build_completion_response


def without_answer(told: dict) -> dict:
    return told | {name: [] for name in OF_ANSWER if name in told}
