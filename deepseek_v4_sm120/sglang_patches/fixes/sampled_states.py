"""A stream of several answers to one prompt (`n`) leaves nothing behind in the process that answers over HTTP.

For a request with n answers 0.5.18 to 0.5.21 note n requests of its prompt, and then make others, with names of their
own, which are what runs. Of the first ones one is dropped. Where the answers are not streamed, the rest goes with the
request's end; a stream's stays for as long as the server runs, each with the prompt, and a server that is asked to stop
waits for their answers.

Here they go with the stream's end. This runs where no GPU is asked.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches import models_served


def replace_batch(original: Callable) -> Callable:
    """For TokenizerManager._handle_batch_request(self, obj, request, ...), which yields the answers of several."""

    @functools.wraps(original)
    async def _handle_batch_request(self, obj, *request, **more):
        noted = {}
        if getattr(obj, "parallel_sample_num", 1) > 1 and models_served.has_served_card():
            noted = {name: self.rid_to_state.get(name) for name in obj.rid}
        async with contextlib.aclosing(original(self, obj, *request, **more)) as answers:
            async for answer in answers:
                yield answer
        for name, state in noted.items():
            if state is not None and self.rid_to_state.get(name) is state:
                del self.rid_to_state[name]

    return _handle_batch_request
