"""What attention reads in a step beside its caches: the same tables by fewer launches, each some 2 us of a step's way.

    expand_extend_with_same_length   verification's rows and those of the pass behind it: two launches for six. SGLang
                                     counts lengths and requests anew each time, and gathers what is repeated
    _pad_last_dim                    a table that is wide enough is not copied: all but C128's are made so
    init_forward_metadata_in_graph   the graph of EAGLE's drafts makes the tables of those passes that there are. SGLang
                                     keeps a backend for each draft; the first comes of the pass over what was verified,
                                     which is another graph, so nothing looks at the last one's

Numbers and dtypes are SGLang's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from deepseek_v4_sm120.sglang_patches import device_gate
from deepseek_v4_sm120.sglang_patches.scope import is_ours

_before_the_last: dict[tuple, torch.Tensor] = {}  # (device, rows of a request) -> -rows + 1 .. 0


def replace_expand(original: Callable) -> Callable:
    """For DeepseekV4AttnBackend.expand_extend_with_same_length(self, *, bs, qo_len, seq_lens [bs], req_pool_indices)
    -> (lengths of each row, requests of each row), both [bs * qo_len]. seq_lens are those with the last row."""

    @functools.wraps(original)
    def expand_extend_with_same_length(self, *, bs, qo_len, seq_lens, req_pool_indices):
        steps = _steps(seq_lens.device, qo_len) if device_gate.serves(seq_lens.device) else None
        if steps is None:
            return original(self, bs=bs, qo_len=qo_len, seq_lens=seq_lens, req_pool_indices=req_pool_indices)
        return (seq_lens[:, None] + steps).flatten(), req_pool_indices[:bs].repeat_interleave(qo_len)

    return expand_extend_with_same_length


def _steps(device: torch.device, rows: int) -> torch.Tensor | None:
    """None: there is none yet, and what a capture makes is the graph's."""
    steps = _before_the_last.get((device, rows))
    if steps is None and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        with torch.inference_mode(False):  # else it could not be read outside of it
            steps = torch.arange(-rows + 1, 1, dtype=torch.int32, device=device)
        _before_the_last[device, rows] = steps
    return steps


def replace_pad_last_dim(original: Callable) -> Callable:
    """For _pad_last_dim(x, multiples_of=64): the one padded by -1, a copy even where nothing is to be padded."""

    @functools.wraps(original)
    def _pad_last_dim(x, *args, **kwargs):
        padded = is_padded(x, *args, **kwargs) and device_gate.serves(x.device)
        return x if padded else original(x, *args, **kwargs)

    return _pad_last_dim


def is_padded(x: torch.Tensor | None, multiples_of: int = 64) -> bool:
    """Whether the copy would be as x is, whose numbers lie side by side."""
    return x is not None and x.shape[-1] % multiples_of == 0 and x.is_contiguous()


def replace_metadata_in_graph(original: Callable) -> Callable:
    """For DeepseekV4MultiStepBackend.init_forward_metadata_in_graph(self, forward_batch)."""

    @functools.wraps(original)
    def init_forward_metadata_in_graph(self, forward_batch):
        every = self.attn_backends
        if not is_ours():
            return original(self, forward_batch)
        self.attn_backends = every[: self.speculative_num_steps - 1]
        try:
            return original(self, forward_batch)
        finally:
            self.attn_backends = every

    return init_forward_metadata_in_graph
