"""A request that replaces all of its session starts it anew, instead of ending the server.

A request of a session (/open_session) that says `"session_params": {"id": ..., "replace": true}` and names no `rid`
forgets, by SGLang's own words, all requests of the session so far. SGLang takes them out of a dict while it walks
through that dict: where there is one at all, Python raises an error there, in the scheduler, which ends the server for
all (0.5.12 to 0.5.23; no thread is known). It is asked so over /generate, the completions and the chat API.

Here they are forgotten in front of that, as SGLang means it: those that still run are aborted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import is_ours


def replace_create_request(original: Callable) -> Callable:
    """For Session.create_req(self, req, ...) -> the request as the scheduler knows it. A streaming session refuses to
    be replaced."""

    @functools.wraps(original)
    def create_req(self, req, *args, **kwargs):
        asked = req.session_params
        if asked is not None and asked.replace and asked.rid is None and not self.streaming and is_ours():
            for node in self.req_nodes.values():
                node.abort()  # nothing, where it has ended
            self.req_nodes.clear()
        return original(self, req, *args, **kwargs)

    return create_req
