"""The layers without compression turn queries and keys by the angles that they were trained with.

DeepSeek-V4 has two of RoPE: layers with compressed entries theta 160,000 with YaRN, the layers without (Flash's first
two, and the MTP block) theta 10,000 alone. From 0.5.14 to 0.5.17 SGLang puts YaRN on both, so that the slow pairs of
those layers turn up to 16 times slower: within their window of 128 tokens at most 0.037 rad off (sglang #34788 mended
it in 0.5.18; 0.5.12 and 0.5.13 are right). Nothing but the table of angles is another: queries, keys and outputs of a
layer all read it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import is_ours

_built: list[int] = []  # the compression ratios of the layers that are being built


def replace_attention_init(original: Callable) -> Callable:
    """For MQALayer.__init__(self, config, layer_id, .., compress_ratio_override=None), which asks for its angles."""

    @functools.wraps(original)
    def __init__(self, config, layer_id, quant_config=None, prefix="", alt_streams=None, compress_ratio_override=None):
        ratio = config.compress_ratios[layer_id] if compress_ratio_override is None else compress_ratio_override
        _built.append(ratio)
        try:
            original(self, config, layer_id, quant_config, prefix, alt_streams, compress_ratio_override)
        finally:
            _built.pop()

    return __init__


def replace_precompute(original: Callable) -> Callable:
    """For precompute_freqs_cis(dim, seqlen, original_seq_len, base, ..), whose original_seq_len is 0 without YaRN."""

    @functools.wraps(original)
    def precompute_freqs_cis(**given):
        if _built[-1:] == [0] and is_ours():
            given["original_seq_len"] = 0
        return original(**given)

    return precompute_freqs_cis
