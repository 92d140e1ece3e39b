"""SGLang's clearing of what rejected drafts left in the compressors' state -> `ops.compressor.clear_drafts`.

Behind every verification `DeepSeekV4TokenToKVPool.clear_unaccepted_c128_draft_states` launches a kernel for each layer
with groups of 128, one behind the other on the step's stream. Ours is one launch, with the same bits. The original's
are running sums (SGLANG_OPT_USE_ONLINE_COMPRESS), which it leaves alone, and a bf16 state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from deepseek_v4_sm120.ops import compressor as op
from deepseek_v4_sm120.settings import settings
from deepseek_v4_sm120.sglang_patches import device_gate, shadow

CLEARED = "compressor_drafts"  # in shadow mode, which has a line for it


def replace_clear_drafts(original: Callable) -> Callable:
    """For DeepSeekV4TokenToKVPool.clear_unaccepted_c128_draft_states(..) -> None."""
    beside = settings().shadow

    @functools.wraps(original)
    def clear_unaccepted_c128_draft_states(self, req_pool_indices, seq_lens, accept_lens, num_draft_tokens):
        given = (req_pool_indices, seq_lens, accept_lens)
        call = arguments(self.compress_state_pools, given, num_draft_tokens)
        if call is None:
            return original(self, *given, num_draft_tokens)
        if beside:
            return _serve_beside(given, call, lambda: original(self, *given, num_draft_tokens))
        return op.clear_drafts(*given, **call)

    return clear_unaccepted_c128_draft_states


def arguments(pools: Sequence, given: tuple, tokens: int) -> dict | None:
    """The others of ops.compressor.clear_drafts, or None where the operator does not take the call."""
    pools = [pool for pool in pools if pool is not None and pool.ratio == op.LONG]
    states, rings = [pool.kv_score_buffer.kv_score for pool in pools], {pool.ring_size for pool in pools}
    requests, lengths, accepted = given
    taken = (
        tokens > 1
        and requests.numel() > 0
        and requests.dim() == 1
        and requests.shape == lengths.shape == accepted.shape
        and (requests.dtype, lengths.dtype, accepted.dtype) == (torch.int64, torch.int64, torch.int32)
        and len(rings) == 1
        and len(states) <= op.most_states()
        and {(state.dtype, state.shape) for state in states} == {(torch.float32, states[0].shape)}
        and states[0].shape[1:] == (op.width(op.LONG, op.KV_DIM),)  # running sums have another
        and all(t.is_contiguous() and t.device == requests.device for t in (*states, *given))
        and device_gate.serves(requests.device)
    )
    return {"states": states, "ring": rings.pop(), "tokens": tokens} if taken else None


def _serve_beside(given: tuple, call: dict, original: Callable[[], None]) -> None:
    """Shadow mode: ours on a copy of the slots in question, then the original on the live states; bits are compared."""
    (requests, lengths, accepted), ring, tokens = given, call["ring"], call["tokens"]
    behind = torch.arange(tokens, device=requests.device)
    slots = (requests[:, None] * ring + (lengths[:, None] + behind) % ring).flatten()
    ours = [state[slots] for state in call["states"]]
    own = torch.arange(len(requests), device=requests.device)
    op.clear_drafts(own, torch.zeros_like(lengths), accepted, states=ours, ring=tokens, tokens=tokens)
    original()
    both = zip(ours, call["states"], strict=True)
    pairs = [(mine.view(torch.int32), state[slots].view(torch.int32)) for mine, state in both]
    shape = {"rows": len(requests), "tokens": tokens}
    shadow.record(CLEARED, pairs, identity=CLEARED, shape=shape, relative_l2=0.0)
