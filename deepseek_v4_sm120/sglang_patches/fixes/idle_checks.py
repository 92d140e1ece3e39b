"""A request that comes to an idle server does not wait until the whole prefix cache has been looked through.

In each turn of its loop without a batch SGLang checks the invariants of the prefix cache's tree, node by node, in plain
Python, as long as nobody asks for anything; and what arrives meanwhile is received behind that. A node takes some 8 to
12 us, and a full KV cache of agents' turns is thousands of nodes: 24 ms for 3,000 of them (processor time, 0.5.17's own
tree and check; the check of 0.5.12 to 0.5.15 36). So the turns of a single agent, whose server is idle while a tool
runs, begin up to so much later, on the slowest of all cards. Up to 0.5.18; sglang #36205 keeps that check for SGLang's
own tests from 0.5.19 on, and tells of trees for which it took tens of seconds.

Here it is left out, as there. The check of the books (slots that are free, cached and in use) is SGLang's as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import is_ours


def replace_check(original: Callable) -> Callable:
    """For _check_tree_cache(self) of a scheduler's checks, which on_idle asks -> None, or an error that ends it."""

    @functools.wraps(original)
    def _check_tree_cache(self):
        if not is_ours():
            original(self)

    return _check_tree_cache
