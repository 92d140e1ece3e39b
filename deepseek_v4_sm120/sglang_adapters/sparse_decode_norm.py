"""SGLang's norm and rotary embedding of the queries, put off to the attention that reads them.

    MQALayer.forward     is SGLang's; in decode and verify, up to ops.sparse_decode's MAX_NORM_ROWS rows, its queries
                         may wait
    fused_q_norm_rope    inside that forward: leaves its output unwritten and notes what it would have done (`Note`)
    the attention        takes the note (`take`) and does it on the way in; `settle` before SGLang's own attention

A call waits only where this layer's last one of the same mode and number of rows came to ops.sparse_decode with that
very tensor: the first one of each runs as it is, and is watched. So whatever else chooses SGLang's attention (another
backend, padded heads, a chip's own branch), nothing waits for what will not come. The bits are the same either way.
In shadow mode nothing waits, and both attentions get the same queries. Prompts do not come here: in a breakable graph
their attention runs between graphs.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepseek_v4_sm120 import device_gate, models_served
from deepseek_v4_sm120.ops import sparse_decode as op
from deepseek_v4_sm120.settings import settings

PATCH = "q_norm"
IN_BREAKABLE_GRAPH = "is_in_breakable_cuda_graph"  # of the model's module, 0.5.14 and later
OFF = "start with DSV4_SM120_SET=sparse_decode=off"


@dataclass
class Note:
    """A call of fused_q_norm_rope, `original`: q [rows, heads, 512] into q_out, maybe the front of more heads."""

    q: torch.Tensor
    q_out: torch.Tensor
    eps: float
    freqs_cis: torch.Tensor
    positions: torch.Tensor
    original: Callable
    done: bool = False

    def run(self) -> None:
        self.original(self.q, self.q_out, self.eps, self.freqs_cis, self.positions)
        self.done = True

    def is_of(self, q: torch.Tensor, heads: int) -> bool:
        """Whether the first `heads` of the attention's q [rows, 1, any, 512] are q_out."""
        rows, own_heads, _ = self.q_out.shape
        return (q.data_ptr(), q.stride(0), q.shape[0], heads) == (
            *(self.q_out.data_ptr(), self.q_out.stride(0)),
            *(rows, own_heads),
        )


class _Forward(threading.local):
    """The attention's forward that this thread is in, if its queries may wait; and their note."""

    layer: object | None = None
    call: tuple[bool, int] | None = None  # (decode or verify, rows)
    note: Note | None = None


_forward = _Forward()
_served: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # layer -> calls that came to ops.sparse_decode


def replace_forward(original: Callable) -> Callable:
    """For MQALayer.forward."""
    shadow = settings().shadow

    @functools.wraps(original)
    def forward(self, x, positions, forward_batch, *args, **kwargs):
        if shadow or not _may_wait(x, forward_batch, original.__module__):
            return original(self, x, positions, forward_batch, *args, **kwargs)
        _forward.layer, _forward.call = self, (forward_batch.forward_mode.is_decode(), x.shape[0])
        try:
            result = original(self, x, positions, forward_batch, *args, **kwargs)
            if _forward.note is not None and not _forward.note.done:
                raise RuntimeError(f"sparse_decode: the queries wait for an attention that SGLang did not call: {OFF}")
            return result
        finally:
            _forward.layer = _forward.call = _forward.note = None

    return forward


def _may_wait(x, forward_batch, module: str) -> bool:
    """Decode, or verify outside of a breakable graph, of as many rows as the operator norms; on our GPU."""
    if not (0 < x.shape[0] <= op.MAX_NORM_ROWS and device_gate.serves(x.device)):
        return False
    mode = forward_batch.forward_mode
    if not mode.is_target_verify():
        return mode.is_decode()
    in_breakable_graph = getattr(sys.modules[module], IN_BREAKABLE_GRAPH, None)
    return in_breakable_graph is None or not in_breakable_graph()


def replace_norm_rope(original: Callable) -> Callable:
    """For fused_q_norm_rope, as the model imported it."""

    @functools.wraps(original)
    def fused_q_norm_rope(q_input, q_output, eps, freqs_cis, positions):
        if _forward.layer is None or not _can_wait(q_input, q_output, eps, freqs_cis, positions):
            return original(q_input, q_output, eps, freqs_cis, positions)
        _forward.note = Note(q_input, q_output, eps, freqs_cis, positions, original)
        if _forward.call not in _served.get(_forward.layer, ()):
            _forward.note.run()
        return None

    return fused_q_norm_rope


def _can_wait(q, q_out, eps, freqs_cis, positions) -> bool:
    """True for what ops.sparse_decode norms and rotates itself; fixed by the arguments' kinds."""
    return (
        eps is not None
        and q.dtype == q_out.dtype == torch.bfloat16
        and q.shape == q_out.shape
        and q.dim() == 3
        and q.shape[0] == _forward.call[1]
        and models_served.takes(PATCH, heads=q.shape[1], head_dim=q.shape[2])
        and q.is_contiguous()
        and freqs_cis.dtype == torch.complex64
        and freqs_cis.is_contiguous()
        and positions.is_contiguous()
        and positions.dim() == 1
    )


def take(q: torch.Tensor, heads: int) -> Note | None:
    """What is still to be done to an attention's q [rows, 1, any, 512], whose first `heads` are read; None: nothing.

    For every call that ops.sparse_decode computes. Raises RuntimeError where other queries wait than these.
    """
    note, _forward.note = _forward.note, None
    if note is None:
        return None
    if note.is_of(q, heads):
        if not note.done:
            return note
        _served.setdefault(_forward.layer, set()).add(_forward.call)
    elif not note.done:
        raise RuntimeError(f"sparse_decode: SGLang's attention reads other queries than those that wait: {OFF}")
    return None


def settle() -> None:
    """Norms and rotates what waits: before an attention of SGLang's own."""
    if _forward.note is not None and not _forward.note.done:
        _forward.note.run()
