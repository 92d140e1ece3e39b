"""Grammars are forgotten after a while, instead of being kept for as long as the server runs.

For each JSON schema, regular expression or strict set of tools that a request asks for, each card's scheduler compiles
a grammar, and keeps it twice, in SGLang's table and in XGrammar's, neither of which forgets anything (sglang #22196).
Of a schema of 12 fields and 129,280 tokens that is 0.9 MB (XGrammar 0.2.7, measured with made tokens); a client whose
schemas have something of the request in them (the ids that may be chosen) fills the host's memory in days.

Here both have a bound: what was set first goes first. All cards keep the same ones, for they are told the same requests
in the same order, and agree on when a grammar is ready: SGLang relies on that, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import is_ours

KEPT = 128  # grammars in SGLang's table
COMPILED_BYTES = 256 << 20  # in XGrammar's


def replace_set_cache(original: Callable) -> Callable:
    """For BaseGrammarBackend.set_cache(self, key, value); self.cache is a dict of what was set."""

    @functools.wraps(original)
    def set_cache(self, key, value):
        original(self, key, value)
        if len(self.cache) > KEPT and is_ours():
            del self.cache[next(iter(self.cache))]

    return set_cache


def replace_compiler(original: Callable) -> Callable:
    """For XGrammar's class GrammarCompiler, by its name in SGLang's module, which calls it."""

    @functools.wraps(original, updated=())
    def compiler(*args, **kwargs):
        bound = {"cache_limit_bytes": COMPILED_BYTES} if is_ours() else {}
        return original(*args, **bound | kwargs)

    return compiler
