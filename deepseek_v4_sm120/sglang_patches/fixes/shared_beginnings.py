"""What a running request reads of a beginning that others have too is not freed under it.

The prefix cache keeps a beginning's KV cache and, for as long as there is room, its slots of the sliding windows. Where
those are gone, which is soon so while the requests that began with it are far behind their windows, the next prompt
with that beginning is computed anew, and its slots take the place of the old ones in the cache, windows and all. Up to
0.5.14 the old ones are freed, also where a request still reads them: other prompts overwrite them, and its answer goes
on from their text, and nothing says so (sglang #29352 mended it in 0.5.15).

Here, as from 0.5.15 on, what is read stays: it is given the new slots of the windows, and the new ones of the rest are
freed. With a hierarchical cache these releases have another prefix cache, which is left as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import is_ours


def replace_insert(original: Callable) -> Callable:
    """For SWARadixCache._insert_helper(self, node, key, value, update_kv_after_len, swa_evicted_seqlen=0), which puts a
    sequence's slots into the tree below a node, and frees those that are twice."""

    @functools.wraps(original)
    def _insert_helper(self, node, key, value, update_kv_after_len, swa_evicted_seqlen=0):
        if is_ours():
            give_windows_to_what_is_read(self, node, key, value, update_kv_after_len, swa_evicted_seqlen)
        return original(self, node, key, value, update_kv_after_len, swa_evicted_seqlen)

    return _insert_helper


def give_windows_to_what_is_read(cache, node, key, value, own, evicted) -> None:
    """own: so many of the sequence's slots are the tree's already. evicted: so many have no slot of the windows."""
    start = 0
    while len(key) > 0 and (node := node.children.get(key.child_key(cache.page_size))) is not None:
        length = node.key.match(key, page_size=cache.page_size)
        if length < len(node.key):
            node = cache._split_node(node.key, node, length)
        if node.swa_tombstone and node.full_lock_ref > 0 and own < start + length and evicted < start + length:
            first = max(evicted - start, 0)
            if first:
                cache._split_node(node.key, node, first)  # node is what lies behind it
            give_windows(cache, node, value[first:length])
        start, key, value = start + length, key[length:], value[length:]


def give_windows(cache, node, slots) -> None:
    """The windows' slots that belong to `slots` become those of a node of the tree that has none."""
    windows_of = cache.token_to_kv_pool_allocator.full_to_swa_index_mapping
    windows_of[node.value] = windows_of[slots]
    windows_of[slots] = 0  # so that they are not freed with them
    node.swa_tombstone = False
    cache.swa_lru_list.insert_mru(node)
    cache.swa_evictable_size_ += len(node.value)
