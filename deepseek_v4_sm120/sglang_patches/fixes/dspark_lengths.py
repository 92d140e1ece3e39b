"""DSPARK's draft asks the GPU for lengths that nobody reads, and so the host waits for the verification of every step.

`init_forward_metadata_dspark_draft_block` builds its attention's metadata from the requests' lengths on the device. It
wants them as a list too, and as DSPARK keeps none on the host it fetches one: `seq_lens.tolist()`, a copy and a
synchronisation in the middle of each step. Of that list the number is used, and the values by the branch of a CPU alone
(tests/patching/test_wheel_dspark_lengths.py runs each release's code with other values).

Here it is given as many times the longest that a request can be: an upper bound, and no copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from deepseek_v4_sm120.sglang_patches import device_gate


def replace_draft_block(original: Callable) -> Callable:
    """For DeepseekV4AttnBackend.init_forward_metadata_dspark_draft_block(self, ..., seq_lens, seq_lens_cpu, ...).

    Within a capture (0.5.23 tries to record this preparation, which the copy ends) it stays as it is.
    """

    @functools.wraps(original)
    def init_forward_metadata_dspark_draft_block(
        self, max_seq_len, req_pool_indices, seq_lens, seq_lens_cpu, *args, **kwargs
    ):
        if (
            seq_lens_cpu is None
            and device_gate.serves(seq_lens.device)
            and not torch.cuda.is_current_stream_capturing()
        ):
            longest = self.req_to_token.shape[1]
            seq_lens_cpu = torch.full(seq_lens.shape, longest, dtype=torch.int64, device="cpu")
        return original(self, max_seq_len, req_pool_indices, seq_lens, seq_lens_cpu, *args, **kwargs)

    return init_forward_metadata_dspark_draft_block
