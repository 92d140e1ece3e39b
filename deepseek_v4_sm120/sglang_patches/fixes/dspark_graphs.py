"""All cards put DSPARK's draft into graphs, or none does.

Where hardly a gigabyte is free behind the model's own graphs, SGLang captures none of DSPARK's draft; and where its
buffers would leave less than that, drafts of requests that sample stay out of them. Up to 0.5.18 each card asks its own
free memory, and cards differ: by what else they do, the first one's context, a library's buffers. A card that captures
runs the draft, whose sums need all cards; one that does not goes on to the model's first request. They wait for each
other for ever: at the start, or, where the sampling alone is in one card's graph, at the first request that samples.

0.5.19 asks for the least of the cards. Here that is asked for in 0.5.16 to 0.5.18, too. (With data parallel attention
later releases ask each card for itself again: sglang #39886, open.)
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.names import PARALLEL_STATE
from deepseek_v4_sm120.sglang_patches.scope import is_ours


def replace_available_memory(original: Callable) -> Callable:
    """For get_available_gpu_memory(device, gpu_id, ...), as DSPARK's worker and its sampler know it: both ask once, on
    every card. A host without us would not take part, so with several where all have us alike (several_hosts.py)."""

    @functools.wraps(original)
    def get_available_gpu_memory(device, gpu_id, **given):
        if given or not is_ours() or models_served.may_have_unlike_hosts():
            return original(device, gpu_id, **given)
        cards = importlib.import_module(PARALLEL_STATE).get_tp_group()
        return original(device, gpu_id, distributed=cards.world_size > 1, cpu_group=cards.cpu_group)

    return get_available_gpu_memory
