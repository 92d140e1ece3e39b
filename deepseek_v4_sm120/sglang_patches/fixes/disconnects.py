"""A request whose client has gone away ends, instead of being generated to its last token for nobody.

When a client leaves a stream, SGLang cancels the handler, and two seconds later ends the request in the scheduler, if
the tokenizer manager still knows it. In 0.5.18 and 0.5.19 the cancelled handler drops what is known of it first: so
nothing ends it, it holds one of the server's few request slots up to its max_tokens, and the log fills with "the state
was deleted in TokenizerManager". Before 0.5.17 the state stays there, 0.5.17 and 0.5.20 send the abort themselves.

Here it is sent before the state is dropped, for what had gone to the scheduler. Not for the further answers of n > 1,
which have names of their own. This runs in the process that answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches import models_served


def replace_discard(original: Callable) -> Callable:
    """For TokenizerManager._discard_pending_req_states(self, obj), called where a request's handler ends by an error or
    by its cancellation; what was answered to its end has no state any more."""

    @functools.wraps(original)
    def _discard_pending_req_states(self, obj):
        try:
            if models_served.has_served_card():
                for rid in [obj.rid] if isinstance(obj.rid, str) else obj.rid:
                    state = self.rid_to_state.get(rid)
                    if state is not None and state.time_stats.api_server_dispatch_time:
                        self.abort_request(rid)
        finally:
            original(self, obj)

    return _discard_pending_req_states
