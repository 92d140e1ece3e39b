"""A page that a hierarchical cache has on disk is read by servers whose pages have the same form, and by no others.

With --hicache-storage-backend file a page's file is named by its tokens, its pool and the model's name. How long its
rows are says nobody, and a file that is longer than what is read of it is read without a word. The compressors' state
of a page is twice as long where DSPARK speculates: a server without it that has the same folder later takes the first
half of all layers' for its own, so behind what comes back from the disk the first group of four is pooled from foreign
numbers, and is cached so (0.5.16 to 0.5.23). EAGLE's files have other names. With --enable-deepseek-v4-fp4-indexer
0.5.14 to 0.5.19 read FP8's keys of the indexer for FP4's. Where the file is too short, the read fails, each time anew.
sglang #33268 (open) has the same of --kv-cache-dtype.

Here the name has the form as well: the bytes of a page in each pool. So what a folder had before is not read any more.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import is_ours

FORM = "_dsv4_sm120_form"  # of a storage: a number for what its pools' pages look like


def replace_register(original: Callable) -> Callable:
    """For HiCacheStorage.register_mem_host_pool_v2(self, host_pool, host_pool_name), called for each pool in front of
    the first page; by the scheduler's thread, and the pages are others' work."""

    @functools.wraps(original)
    def register_mem_host_pool_v2(self, host_pool, host_pool_name):
        original(self, host_pool, host_pool_name)
        if is_ours():
            page = f"{host_pool_name} {host_pool.layer_num * host_pool.size_per_token}"
            setattr(self, FORM, zlib.crc32(page.encode(), getattr(self, FORM, 0)))

    return register_mem_host_pool_v2


def replace_suffixed(original: Callable) -> Callable:
    """For HiCacheFile._get_suffixed_key(self, key) -> the name of a page's file."""

    @functools.wraps(original)
    def _get_suffixed_key(self, key):
        form = getattr(self, FORM, None)
        return original(self, key if form is None else f"{key}.{form:08x}")

    return _get_suffixed_key
