"""The rows that pad a step to a captured graph write to nobody's state.

A step of fewer requests than its graph was captured for is padded. What a padded row is, is a length of 1, and up to
0.5.12.post1 the request that had its place in the graph's last full step: SGLang resets lengths and slots of the cache,
and not the requests (0.5.13 resets these, too). A compressor finds a row's state by the request's first slot. That one
may long be another request's, or the request runs on in another row: its state of that slot is written over with what a
padded row computes, and its answer goes on from a wrong entry, and nothing says so.

Here such rows are request 0's, which is nobody.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import is_ours


def replace_populate(original: Callable) -> Callable:
    """For DecodeInputBuffers.populate_from_forward_batch(self, *, forward_batch, raw_bs, .., bs, ..), which puts a
    step's `raw_bs` requests into the buffers of a graph of `bs`."""

    @functools.wraps(original)
    def populate_from_forward_batch(self, **given):
        if given["bs"] != given["raw_bs"] and is_ours():
            self.req_pool_indices.zero_()
        return original(self, **given)

    return populate_from_forward_batch
