"""Without a prefix cache a prompt that waits for room gives back what its own window has left behind.

With --disable-radix-cache a prompt that is read in chunks gives back the slots of the sliding windows that it is done
with where its next chunk takes its own: a chunk later where steps overlap, because a pass in flight may still read
them. But whether the next chunk has room is asked before that. Where two chunks and a page are all that the windows'
pool has, the prompt's own two chunks fill it, and it waits for itself: for ever, on an idle server, too, and with it
all requests behind it (sglang #36458, open; all releases).

Here a prompt that has no room, and no pass in flight, gives them back first, as SGLang does where steps do not overlap,
and is asked once more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace

from deepseek_v4_sm120.sglang_patches.scope import is_ours


def replace_add_chunk(original: Callable) -> Callable:
    """For PrefillAdder.add_chunked_req(self, req) -> the request while chunks of it are left; asked first in a pass."""

    @functools.wraps(original)
    def add_chunked_req(self, req):
        left = original(self, req)
        is_waiting = not self.can_run_list  # nobody is asked before
        if is_waiting and req.inflight_middle_chunks <= 0 and not shares_prefixes(self.tree_cache) and is_ours():
            give_back(self, req)
            left = original(self, req)
        return left

    return add_chunked_req


def shares_prefixes(cache) -> bool:
    """Whether what a request leaves behind is the cache's to keep."""
    since_0_5_22 = getattr(cache, "supports_prefix_sharing", None)
    return since_0_5_22() if since_0_5_22 is not None else not cache.is_chunk_cache()


def give_back(adder, request) -> None:
    """The windows' slots of what is read of it, but for its last window; by the batch's own function, which asks no
    more of a batch than this."""
    cache, allocator = adder.tree_cache, adder.token_to_kv_pool_allocator
    batch = SimpleNamespace(tree_cache=cache, token_to_kv_pool_allocator=allocator)
    batch.req_to_token_pool = cache.req_to_token_pool
    since_0_5_22 = getattr(request, "prefix_len", None)
    length = len(request.prefix_indices) if since_0_5_22 is None else since_0_5_22
    type(adder.running_batch)._evict_swa(batch, request, length)
