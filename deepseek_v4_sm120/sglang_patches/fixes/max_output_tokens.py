"""`max_output_tokens` of /v1/responses is the number of tokens that an answer may have, as it says.

SGLang takes two away, for tokens that "the engine appends"; it appends none. So an answer ends two tokens before the
number that was asked for, a request for two is answered by nothing, and one for a single token, with which clients ask
whether a server is there, is refused ("max_new_tokens must be at least 0, got -1").

Here the number holds, where the room that is left does not say less. This runs in the process that answers over HTTP,
where no GPU is asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches import models_served

MOST, TAKEN_AWAY = "max_new_tokens", 2


def replace_to_sampling_params(original: Callable) -> Callable:
    """For ResponsesRequest.to_sampling_params(self, default_max_tokens, ...) -> the engine's parameters."""

    @functools.wraps(original)
    def to_sampling_params(self, *given, **named):
        made = original(self, *given, **named)
        asked = self.max_output_tokens
        if asked is not None and made[MOST] == asked - TAKEN_AWAY and models_served.has_served_card():
            made[MOST] = asked
        return made

    return to_sampling_params
