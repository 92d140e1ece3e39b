"""A prompt in graphs waits for what a hierarchical cache is still loading of its prefix.

A prefix comes back from the host layer by layer beside the pass, and what reads a layer's pools waits for that layer
where SGLang's code asks for the pool. In a pass that is a captured graph, breakable or piecewise, such code runs at the
breaks alone, which are the attention's. The indexer's and the compressors' is in the graphs, where nothing waits: a
layer's indexer begins when the layer before is there. It selects by keys that have not come yet, of whoever had the
pages before, and a compressor goes on from such a state. Nothing says so, and what is computed so is cached.

SGLang captures no prompts of this model unless it is asked, by DSV4_SM120_SET=prefill_graphs or by
--cuda-graph-backend-prefill. Here such a pass waits for all layers, by the same events.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import is_ours


def replace_execute(original: Callable) -> Callable:
    """For PrefillCudaGraphRunner.execute(self, forward_batch, **kwargs), which replays on the current stream."""

    @functools.wraps(original)
    def execute(self, forward_batch, **kwargs):
        if is_ours():
            wait_for_loads(self.model_runner.token_to_kv_pool)
        return original(self, forward_batch, **kwargs)

    return execute


def wait_for_loads(pool) -> None:
    """The current stream waits for every layer of the load that this batch is for; nothing where there is none."""
    counter = getattr(pool, "layer_transfer_counter", None)
    if counter is not None and counter.consumer_index >= 0:
        for layer in range(counter.num_layers):
            counter.wait_until(layer)
