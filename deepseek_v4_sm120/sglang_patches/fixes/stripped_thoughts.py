"""With --strip-thinking-cache a request that was retracted ends without freeing what the prefix cache holds.

With that flag a request that thought leaves only its prompt in the prefix cache; all behind it is freed where the
request ends. When a request is retracted and computed anew, what it had answered so far is put into the cache as its
prompt is. Where it ends, or is retracted once more, that is freed all the same, in the cache as it is: its slots are
given to others, whose text it becomes, or the books do not add up. From 0.5.22 on an assertion ends the server.

Here a request's own is at least what it has in the cache. The token behind it counts, too: with EAGLE a token of a key
is two of the sequence's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import is_ours


def replace_request_length(original: Callable) -> Callable:
    """For Req._cache_commit_len(self), from 0.5.16 on effective_kv_committed_len -> how much of its KV cache a request
    may leave in the prefix cache where it gives its slots back; those behind are freed."""
    return at_least_what_is_cached(original, lambda request: request)


def replace_record_length(original: Callable) -> Callable:
    """The same, and Req.owned_kv_len (0.5.21 on), where a request's lengths are those of a record of its own."""
    return at_least_what_is_cached(original, lambda request: request.kv)


def at_least_what_is_cached(original: Callable, lengths: Callable) -> Callable:
    @functools.wraps(original)
    def own_length(self):
        length, record = original(self), lengths(self)
        if length > record.cache_protected_len or not is_ours():
            return length
        return max(length, min(record.kv_committed_len, record.cache_protected_len + 1))

    return own_length
