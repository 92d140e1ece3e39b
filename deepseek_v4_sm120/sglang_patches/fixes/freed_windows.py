"""What a prompt's window leaves behind is freed before another prompt's window takes its place.

Behind a pass over prompts SGLang gives back the slots of the sliding windows that each prompt has left, and puts its KV
cache into the prefix cache. 0.5.18 holds the first until all prompts of the pass are done, and remembers them by the
slots of the KV cache. Where two prompts of a pass begin alike, and the shorter one's window lies in that beginning, the
prefix cache meanwhile gives the beginning that window. So what is freed in the end is the window of a prompt that runs:
it reads slot 0 from then on, an answer goes on from it, and nothing says so. What should have been freed is lost, and
when the cache gives that beginning up, the check of the books at the next idle moment ends the server ("pool memory
leak detected", sglang #36081). 0.5.19 looks the slots up before it holds them.

Here they are freed at once, as up to 0.5.17.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import is_ours


def replace_free_swa(original: Callable) -> Callable:
    """For SWATokenToKVPoolAllocator.free_swa(self, free_index), which defers where a group of frees is open."""

    @functools.wraps(original)
    def free_swa(self, free_index):
        is_alone = self.is_not_in_free_group
        self.is_not_in_free_group = is_alone or is_ours()
        try:
            return original(self, free_index)
        finally:
            self.is_not_in_free_group = is_alone

    return free_swa
