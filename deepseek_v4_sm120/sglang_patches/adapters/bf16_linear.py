"""SGLang's small bf16 projections -> `ops.bf16_linear`.

The compressors' kv and gate projection (`linear_bf16_fp32`, float32 out), the router's logits (`MoEGate`, float32 out)
and the indexer's head weights (`weights_proj`, bf16 out) read few rows of hidden state against 0.5 to 17 MB of weights.
cuBLAS takes two launches for it (split-K and its reduction), ours one. For a step's rows (dense_rows.py); for more, and
for what the operator does not take, the original runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from deepseek_v4_sm120.ops import bf16_linear as op
from deepseek_v4_sm120.sglang_patches import device_gate, shadow
from deepseek_v4_sm120.sglang_patches.adapters import dense_rows
from deepseek_v4_sm120.specs import bounds

PATCH = "bf16_linear"


def takes(x, weight) -> bool:
    return (
        isinstance(x, torch.Tensor)
        and isinstance(weight, torch.Tensor)
        and op.takes(x, weight)
        and dense_rows.are_ours(x.shape[0])
        and device_gate.serves(x.device)
    )


def _beside(serve: Callable, original: Callable, operands: Callable) -> Callable:
    """`serve`, in shadow mode beside the original. operands: of a call's arguments, (x, weight)."""
    comparison = shadow.Comparison(
        tensors=lambda ours, theirs, *_: [(ours, theirs)],
        identity=lambda *call: operands(*call)[1].data_ptr(),
        shape=lambda *call: _shape(*operands(*call)),
        relative_l2=bounds.BF16_LINEAR.shadow,
    )
    return shadow.shadowed(PATCH, serve, original, comparison)


def replace_linear_bf16_fp32(original: Callable) -> Callable:
    """For linear_bf16_fp32(x, weight) -> [rows, outputs] float32, as compressor.py imported it."""

    def serve(x, weight):
        return op.bf16_linear(x, weight)

    serve = _beside(serve, original, lambda x, weight: (x, weight))

    @functools.wraps(original)
    def linear_bf16_fp32(x, y, *args, **kwargs):
        if args or kwargs or not takes(x, y):
            return original(x, y, *args, **kwargs)
        return serve(x, y)

    return linear_bf16_fp32


def replace_gate(original: Callable) -> Callable:
    """For MoEGate.forward(self, hidden_states, ..) -> [rows, experts] float32: the router of DeepSeek-V4's layers.

    Deterministic inference is the original's: there the rows of one batch must take one kernel, however many they are.
    """
    module = original.__globals__

    def is_deterministic() -> bool:
        if "get_exec" in module:  # 0.5.17 and later
            return module["get_exec"]().deterministic.enable_deterministic_inference
        name = "get_server_args" if "get_server_args" in module else "get_global_server_args"  # 0.5.16, and before
        return module[name]().enable_deterministic_inference

    def serve(self, hidden_states, gemm_output_zero_allocator=None, forward_batch=None):
        return op.bf16_linear(hidden_states, self.weight)

    serve = _beside(serve, original, lambda self, hidden_states, *_: (hidden_states, self.weight))

    @functools.wraps(original)
    def forward(self, hidden_states, gemm_output_zero_allocator=None, forward_batch=None):
        ours = _is_v4_gate(self) and takes(hidden_states, self.weight) and not is_deterministic()
        return (serve if ours else original)(self, hidden_states, gemm_output_zero_allocator, forward_batch)

    return forward


def replace_compute_weights(original: Callable) -> Callable:
    """For C4Indexer.compute_weights(self, x, skip_scale=False) -> [rows, heads] bf16."""

    def serve(self, x, skip_scale=False):
        out = op.bf16_linear(x, self.weights_proj.weight, out_dtype=torch.bfloat16)
        return out if skip_scale else out * self.weight_scale

    serve = _beside(serve, original, lambda self, x, *_: (x, self.weights_proj.weight))

    @functools.wraps(original)
    def compute_weights(self, x, skip_scale=False):
        if not _is_plain(self.weights_proj) or not takes(x, self.weights_proj.weight):
            return original(self, x, skip_scale)
        return serve(self, x, skip_scale)

    return compute_weights


def _is_v4_gate(gate) -> bool:
    return gate.is_deepseek_v4 is True and type(gate).__name__ == "MoEGate"


def _is_plain(layer) -> bool:
    """SGLang's own unquantised layer without bias: nothing wraps it (LoRA) and nothing is added."""
    return (
        type(layer).__name__ == "ReplicatedLinear"
        and getattr(layer, "bias", None) is None
        and type(getattr(layer, "quant_method", None)).__name__ == "UnquantizedLinearMethod"
    )


def _shape(x, weight) -> dict[str, int]:
    return {"rows": x.shape[0], "outputs": weight.shape[0]}
