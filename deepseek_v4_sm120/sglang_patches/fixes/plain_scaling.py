"""The first request with a repetition_penalty stops no stream while torch.compile works.

SGLang scales the logits by a function that torch.compile looks at when it is first called: then for one row, and once
more for several, when the first batch of two has such a request. Each time all cards' schedulers, and so all streams,
wait for Dynamo and Inductor: in a fresh process 44 s for the first, 6 s for the second, 24 s of a CPU together (torch
2.13, two busy cores; what is kept on the disk saves the kernel's compilation, not the tracing). All releases do so.

Here the same is done by torch's own operations, in place and with the same roundings: each logit is divided or
multiplied once, the others by 1. A penalised batch takes a few launches more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from deepseek_v4_sm120.sglang_patches.scope import is_ours


def replace_apply(original: Callable) -> Callable:
    """For apply_scaling_penalties(logits, scaling_penalties), which changes the logits."""

    @functools.wraps(original, updated=())
    def apply_scaling_penalties(logits, scaling_penalties):
        if not is_ours():
            return original(logits, scaling_penalties)
        is_negative = logits < 0
        logits.div_(torch.where(is_negative, 1.0, scaling_penalties))
        logits.mul_(torch.where(is_negative, scaling_penalties, 1.0))
        return None

    return apply_scaling_penalties
