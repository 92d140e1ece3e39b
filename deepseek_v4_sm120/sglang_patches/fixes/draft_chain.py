"""With EAGLE each draft behind the first attends to its own token, and to the drafts before it.

A step's first draft comes of the pass over what was verified. Each further one is a pass of one token at the position
behind it, whose keys are written in front of the attention. SGLang keeps the lengths of what is verified meanwhile, and
this model's backend makes each pass's window of these: a pass does not see its own token, nor those of the passes
before. Verification judges every draft, so answers are right; second and later guesses are worse than the weights make
them. Other backends add the pass's number and one (sglang #24750, closed, did so here), from 0.5.20 on this model's on
AMD's cards, too.

Here they are added where a pass's metadata are made, within graphs and without.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches import device_gate


def replace_decode_metadata(original: Callable) -> Callable:
    """For DeepseekV4AttnBackend.make_forward_metadata_from_raw_decode(self, raw_metadata). A draft has such a backend
    for each of its passes; the model's own steps are told their length with their token."""

    @functools.wraps(original)
    def make_forward_metadata_from_raw_decode(self, raw_metadata):
        lengths = raw_metadata.seq_lens
        if self.speculative_num_steps > 1 and device_gate.serves(lengths.device):
            written = lengths + (self.speculative_step_id + 1)
            raw_metadata = dataclasses.replace(raw_metadata, seq_lens=written)
        return original(self, raw_metadata)

    return make_forward_metadata_from_raw_decode
