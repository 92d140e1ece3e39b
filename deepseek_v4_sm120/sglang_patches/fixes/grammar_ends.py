"""Where a grammar has come to its end the answer ends, whatever else forbids the end.

Of a JSON schema, a regular expression or a required tool call that is complete, XGrammar leaves one token: the end.
min_tokens forbids it until so many tokens are there; with speculation for up to two blocks longer (min_tokens.py mends
that), and behind a retraction in any case. Then no token is left: all logits are -inf. SGLang takes token 0, which the
grammar refuses, and the answer breaks off: up to 0.5.22 with "abort" for its finish_reason, on 0.5.23 with an error
500. Up to 0.5.19 the draw of a request with a temperature, and without top_k and top_p, is itself an error, and ends
the server for all. (vLLM #53665; its #54218 lets the grammar have its way.)

Here of such a row what the grammar leaves may be drawn. Rows that have a token left keep their bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import is_ours


def replace_apply(original: Callable) -> Callable:
    """For apply_token_bitmask_inplace_triton(logits [rows, vocabulary], bitmask, indices=None), in place: XGrammar's,
    behind penalties in every way of decoding. The host asks nothing of the GPU."""

    @functools.wraps(original)
    def apply_token_bitmask_inplace_triton(logits, bitmask, indices=None):
        original(logits, bitmask, indices)
        if is_ours():
            has_none = logits.amax(-1, keepdim=True) == -math.inf
            logits.masked_fill_(has_none, 0.0)
            original(logits, bitmask, indices)

    return apply_token_bitmask_inplace_triton
