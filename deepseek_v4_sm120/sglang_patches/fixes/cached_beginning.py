"""A prompt's rest is cut to what its own cached beginning leaves of the sliding windows, instead of waiting for ever.

While SGLang asks whether a prompt's next chunk has room, it holds what is cached of the prompt. From 0.5.18 on a chunk
is cut where it asks for more than the whole pool of sliding windows has, and else waits for what others hold (sglang
#32700). On an idle server nobody else does: where the rest asks for less than the pool, but for more than the prompt's
own beginning leaves of it, it waits for ever, and all requests behind it do.

Here a chunk is cut, too, where nothing runs that could give room. SGLang asks this only of one that has none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import is_ours


def replace_adder_never_fits(original: Callable) -> Callable:
    """For PrefillAdder._swa_req_never_fits(...) -> whether the chunk has to be cut (0.5.18 to 0.5.20)."""

    @functools.wraps(original)
    def _swa_req_never_fits(self, extend_input_len, max_new_tokens, swa_host_hit_length=0):
        asked = original(self, extend_input_len, max_new_tokens, swa_host_hit_length)
        return asked or (self.rem_total_token_offset == 0 and is_ours())  # of what runs and of what was let in so far

    return _swa_req_never_fits


def replace_budget_never_fits(original: Callable) -> Callable:
    """For SWAPrefillBudget.swa_never_fits(...) -> whether the chunk has to be cut (0.5.21 on)."""

    @functools.wraps(original)
    def swa_never_fits(self, extend_input_len, max_new_tokens, **kwargs):
        asked = original(self, extend_input_len, max_new_tokens, **kwargs)
        return asked or (self.total_offset == 0 and is_ours())

    return swa_never_fits
