"""A prompt is looked up in the prefix cache, and put into it, without a copy of what is left of it at each node.

A conversation lies in the prefix cache's tree as a chain of nodes: one or two for each chunk that was read, and some
three for each turn. Up to 0.5.20 SGLang walks along that chain with the tokens that are left, and copies them at each
node (0.5.20 looks up without, and puts in with it): by context times turns. Each turn is looked up once or twice and
put in twice, where the prompt was read and where the answer ends, beside nothing that the cards would do meanwhile: all
streams stand still. No thread of SGLang's is known; 0.5.21 has the tree in Rust.

Here what is left is a place in the tokens. What a node keeps is copied as before: it must not hold the whole prompt.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import is_ours


class Rest:
    """What of a RadixKey is behind a place, as far as a walk asks."""

    __slots__ = ("_length", "_start", "_whole")

    def __init__(self, whole, start: int = 0):
        self._whole, self._start = whole, start
        self._length = max(len(whole) - start, 0)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice):
        """key[n:] is a rest, key[:n] a RadixKey."""
        start, end, _ = slice.indices(part, self._length)
        if part == slice(start, None):
            return Rest(self._whole, self._start + start)
        return self._whole[self._start + start : self._start + end]

    def child_key(self, page_size: int = 1):
        return self[:page_size].child_key(page_size)


def _rest(key):
    return Rest(key) if type(key) is not Rest and is_ours() else key


def replace_match(original: Callable) -> Callable:
    """For RadixKey.match(self, other, page_size=1), a node's key beside what is left of a prompt: so many whole pages
    are the same from the first on."""

    @functools.wraps(original)
    def match(self, other, page_size=1):
        return original(self, other[: len(self)] if type(other) is Rest else other, page_size)

    return match


def replace_find(original: Callable) -> Callable:
    """For _match_prefix_helper(self, key) of a prefix cache."""

    @functools.wraps(original)
    def _match_prefix_helper(self, key):
        return original(self, _rest(key))

    return _match_prefix_helper


def replace_insert(original: Callable) -> Callable:
    """For _insert_helper(self, node, key, value, ..) of a prefix cache, which puts a prompt in below a node."""

    @functools.wraps(original)
    def _insert_helper(self, node, key, value, *further, **named):
        return original(self, node, _rest(key), value, *further, **named)

    return _insert_helper


def replace_step(original: Callable) -> Callable:
    """For UnifiedTreeCore._insert_walk_step(self, state), which goes on by a node with what is left in state.key."""

    @functools.wraps(original)
    def _insert_walk_step(self, state):
        state.key = _rest(state.key)
        return original(self, state)

    return _insert_walk_step


def replace_node(original: Callable) -> Callable:
    """For _add_new_node(self, parent, key, ..) of a prefix cache, which keeps the key."""

    @functools.wraps(original)
    def _add_new_node(self, parent, key, *further, **named):
        return original(self, parent, key[: len(key)] if type(key) is Rest else key, *further, **named)

    return _add_new_node
