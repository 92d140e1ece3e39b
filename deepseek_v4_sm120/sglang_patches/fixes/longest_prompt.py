"""A prompt that can never be read is refused, instead of keeping all that come after it waiting.

Where the KV cache holds fewer tokens than a request may have, SGLang accepts prompts of up to 7 tokens less than it
holds. What lets a prompt in asks for a page more than its tokens; so the longest ones wait at the head of the queue for
ever, on an idle server, too, and every request behind them (sglang #29249, open). Their clients have to give up first.
With --allow-auto-truncate each prompt that is too long becomes such a one.

Here the longest prompt that is accepted is the longest that can be let in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import is_ours

HELD, LONGEST = 0, 5  # of what is told: the tokens that the KV cache holds, and from how many on a prompt is refused


def replace_worker_info(original: Callable) -> Callable:
    """For TpModelWorker.get_worker_info(self) -> a tuple that the scheduler takes its limits from, once."""

    @functools.wraps(original)
    def get_worker_info(self):
        told = original(self)
        held, longest = told[HELD], told[LONGEST]
        if longest > held or not is_ours():  # decode context parallelism counts the one on a card, the other on all
            return told
        page = self.model_runner.token_to_kv_pool_allocator.page_size
        return (*told[:LONGEST], min(longest, held // page * page - page - 1), *told[LONGEST + 1 :])

    return get_worker_info
