"""The latents that the window's keys are made of are kept until they are made, where a layer's work is in a graph.

There a layer's work is dealt to streams: of one product's result, the latents, the first stream makes the queries, and
another one the window's keys. Up to 0.5.18 SGLang lets go of the latents once the keys' kernel is asked for. Their
memory was taken on the first stream, so that the allocator has it there for what is made next, wq_b's input in FP8 or
its output, and no order stands between that and the keys' kernel: keys that are partly something else are in the cache
for as long as the window has them, and nothing says so. Whether it comes to that hangs on what else is free, and on
which kernel begins first. From 0.5.18 on prompts in graphs (prefill_graphs) go this way too, with long kernels
(sglang #36547 mended it in 0.5.19).

Here the product's result is held until SGLang's code has had the first stream wait for the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from deepseek_v4_sm120.sglang_patches.scope import is_ours


def replace_prepare(original: Callable) -> Callable:
    """For MQALayer._forward_prepare_multi_stream(self, ..), whose streams are joined where it returns."""

    @functools.wraps(original)
    def _forward_prepare_multi_stream(self, *args, **kwargs):
        product = getattr(self, "wqkv_a", None)  # with SGLANG_OPT_FUSE_WQA_WKV=0 the keys' stream makes its own latents
        if product is None or torch.compiler.is_compiling() or not is_ours():
            return original(self, *args, **kwargs)
        held = []
        hook = product.register_forward_hook(lambda module, given, result: held.append(result))
        try:
            return original(self, *args, **kwargs)
        finally:
            hook.remove()

    return _forward_prepare_multi_stream
