"""An empty string among a request's stops ends nothing.

`"stop": ""` and `[""]` come from clients whose field for it was left empty. SGLang asks after each token whether the
text has the stop in it, and every text has that one: the answer is empty, and over after one token, "stop" its reason
(sglang #38712, open; OpenAI's API ends no answer there). The same for `stop_regex` of /generate.

Here empty ones are taken out. This runs in the process that answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches import models_served


def replace_normalize(original: Callable) -> Callable:
    """For SamplingParams.normalize(self, tokenizer), which makes the stops of a request ready, once."""

    @functools.wraps(original)
    def normalize(self, tokenizer):
        if models_served.has_served_card():
            self.stop_strs, self.stop_regex_strs = map(without_empty, (self.stop_strs, self.stop_regex_strs))
        return original(self, tokenizer)

    return normalize


def without_empty(stops):
    """One, several or none; the very same where none of them is empty."""
    if stops == "":
        return None
    return [stop for stop in stops if stop != ""] if isinstance(stops, list) else stops
