"""The head norm, RMS norm of each head of the queries with their rotary embedding, put off to their attention.

    MQALayer.forward     is SGLang's (attention_forward.py); in decode and verify, up to ops.sparse_decode's
                         MAX_NORM_ROWS rows, its queries may wait
    fused_q_norm_rope    inside that forward: leaves its output unwritten and puts off what it would have done
    the attention        takes the `Queries` and does it on the way in; they are settled before SGLang's own attention

A call waits only where an earlier one of this layer, of the same mode and number of rows, came to ops.sparse_decode
with that very tensor (waiting.py). So whatever else chooses SGLang's attention (another backend, padded heads, a chip's
own branch), nothing waits for what will not come. The bits are the same either way. In shadow mode nothing waits: both
attentions get the same queries. Nor do prompts come here: in a breakable graph their attention runs between graphs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepseek_v4_sm120.ops import sparse_decode as op
from deepseek_v4_sm120.ops.shared import limits
from deepseek_v4_sm120.settings import settings
from deepseek_v4_sm120.sglang_patches import device_gate
from deepseek_v4_sm120.sglang_patches.adapters.attention_forward import FORWARD
from deepseek_v4_sm120.sglang_patches.adapters.waiting import Waiting

PATCH = "head_norm"
IN_BREAKABLE_GRAPH = "is_in_breakable_cuda_graph"  # of the model's module, 0.5.14 and later


@dataclass(eq=False)
class Queries(Waiting):
    """A call of fused_q_norm_rope, `original`: q [rows, heads, 512] into q_out, maybe the front of more heads."""

    operator = "sparse_decode"
    untaken = "the queries wait for an attention that SGLang did not call"
    mistaken = "SGLang's attention reads other queries than those that wait"

    q: torch.Tensor
    q_out: torch.Tensor
    eps: float
    freqs_cis: torch.Tensor
    positions: torch.Tensor
    original: Callable

    def run(self) -> None:
        self.original(self.q, self.q_out, self.eps, self.freqs_cis, self.positions)

    def is_of(self, q: torch.Tensor, heads: int) -> bool:
        """Whether the first `heads` of the attention's q [rows, 1, any, 512] are q_out."""
        rows, own_heads, _ = self.q_out.shape
        return (q.data_ptr(), q.stride(0), q.shape[0], heads) == (
            *(self.q_out.data_ptr(), self.q_out.stride(0)),
            *(rows, own_heads),
        )


def _given(name: str, position: int):
    """An argument of the attention's forward (self, x, positions, forward_batch, ...) that this thread is in."""
    args, kwargs = FORWARD.known["args"], FORWARD.known["kwargs"]
    return kwargs[name] if name in kwargs else args[position]


def _is_of_few_rows() -> bool:
    """Decode, or verify outside of a breakable graph, of as many rows as the operator norms; on our GPU."""
    x, mode = _given("x", 0), _given("forward_batch", 2).forward_mode
    if not (0 < x.shape[0] <= op.MAX_NORM_ROWS and device_gate.serves(x.device)):
        return False
    if not mode.is_target_verify():
        return mode.is_decode()
    in_breakable_graph = getattr(sys.modules[FORWARD.known["module"]], IN_BREAKABLE_GRAPH, None)
    return in_breakable_graph is None or not in_breakable_graph()


def replace_norm_rope(original: Callable) -> Callable:
    """For fused_q_norm_rope, as the model imported it."""
    shadow = settings().shadow

    @functools.wraps(original)
    def fused_q_norm_rope(q_input, q_output, eps, freqs_cis, positions):
        call = (q_input, q_output, eps, freqs_cis, positions)
        if shadow or FORWARD.layer is None or not _is_of_few_rows() or not _may_wait(*call):
            return original(*call)
        is_decode = _given("forward_batch", 2).forward_mode.is_decode()
        FORWARD.put_off(Queries(*call, original), is_decode, q_input.shape[0])
        return None

    return fused_q_norm_rope


def _may_wait(q, q_out, eps, freqs_cis, positions) -> bool:
    """True for what ops.sparse_decode norms and rotates itself; fixed by the arguments' kinds."""
    return (
        eps is not None
        and q.dtype == q_out.dtype == torch.bfloat16
        and q.shape == q_out.shape
        and q.dim() == 3
        and q.shape[0] == _given("x", 0).shape[0]
        and limits.takes(PATCH, heads=q.shape[1], head_dim=q.shape[2])
        and q.is_contiguous()
        and freqs_cis.dtype == torch.complex64
        and freqs_cis.is_contiguous()
        and positions.is_contiguous()
        and positions.dim() == 1
    )
