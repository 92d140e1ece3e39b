"""What ends a request over /v1/responses is told as what it is: 503 where the queue is full, not 400.

A request that the scheduler ends with an error (a full queue, a time limit, a card's fault) is answered over the other
APIs by its own status. Over /v1/responses, where it is not streamed, by 400 "invalid_request_error", whatever it was:
clients' libraries, which try again after 503 and 500, give up, and their users look for the fault in the request.

Here it has its status. This runs in the process that answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import answers_for_ours

TYPE = "server_error"  # OpenAI's word for what is not the request's fault


def replace_full(original: Callable) -> Callable:
    """For OpenAIServingResponses.responses_full_generator(self, ...) -> an answer that is not streamed, or an error."""

    @functools.wraps(original)
    async def responses_full_generator(self, *request, **more):
        try:
            return await original(self, *request, **more)
        except Exception as error:
            status = getattr(error, "status_code", None)  # a fastapi.HTTPException
            if not isinstance(status, int) or status < 500 or not answers_for_ours(self):
                raise
            return self.create_error_response(str(error.detail), TYPE, int(status))

    return responses_full_generator
