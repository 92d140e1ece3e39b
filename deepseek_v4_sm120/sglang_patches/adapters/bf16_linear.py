"""SGLang's small bf16 projections -> `ops.bf16_linear`.

The compressors' kv and gate projection (`linear_bf16_fp32`, float32 out), the router's logits (`MoEGate`, float32 out)
and the indexer's head weights (`weights_proj`, bf16 out) read few rows of hidden state against 0.5 to 17 MB of weights.
cuBLAS takes two launches for it (split-K and its reduction), ours one. For a step's rows (dense_rows.py); for more, and
for what the operator does not take, the original runs.

The head (`LogitsProcessor`) is replaced only where the server is to be reproducible: cuBLAS's sums depend on how many
rows it has, and a row there is a request.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from deepseek_v4_sm120.ops import bf16_linear as op
from deepseek_v4_sm120.settings import settings
from deepseek_v4_sm120.sglang_patches import device_gate, models_served, shadow
from deepseek_v4_sm120.sglang_patches.adapters import dense_rows
from deepseek_v4_sm120.specs import bounds

PATCH = "bf16_linear"


def takes(x, weight) -> bool:
    return (
        isinstance(x, torch.Tensor)
        and isinstance(weight, torch.Tensor)
        and x.ndim == 2
        and dense_rows.are_ours(x.shape[0])
        and op.takes(x, weight)
        and device_gate.serves(x.device)
    )


def _beside(serve: Callable, original: Callable, operands: Callable) -> Callable:
    """`serve`, in shadow mode beside the original. operands: of a call's arguments, (x, weight)."""
    comparison = shadow.Comparison(
        tensors=lambda ours, theirs, *_, **__: [(ours, theirs)],
        identity=lambda *call, **_: operands(*call)[1].data_ptr(),
        shape=lambda *call, **_: _shape(*operands(*call)),
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

    Deterministic inference is the original's: there the rows of one batch must take one kernel, however many they are;
    ours is that where the server is reproducible.
    """
    module, reproducible = original.__globals__, settings().reproducible

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
        ours = _is_v4_gate(self) and takes(hidden_states, self.weight) and (reproducible or not is_deterministic())
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


def replace_lm_head(original: Callable) -> Callable:
    """For LogitsProcessor._compute_lm_head(self, hidden_states, lm_head, embedding_bias=None, [*, out=None]) ->
    [rows, vocabulary] bf16, or float32 where SGLang was asked for that; the sums are the same."""

    def serve(self, hidden_states, lm_head, embedding_bias=None, *, out=None):
        if not has_float32_head(self):
            return op.bf16_linear(hidden_states, lm_head.weight, out_dtype=torch.bfloat16)
        fits = out is not None and out.shape == (hidden_states.shape[0], lm_head.weight.shape[0])
        alone = not settings().shadow  # else the original writes there
        return op.bf16_linear(hidden_states, lm_head.weight, out=out if fits and alone else None)

    serve = _beside(serve, original, lambda self, hidden_states, lm_head, *_, **__: (hidden_states, lm_head.weight))

    @functools.wraps(original)
    def _compute_lm_head(self, hidden_states, lm_head, embedding_bias=None, **kwargs):
        ours = embedding_bias is None and is_plain_head(self, lm_head) and takes(hidden_states, lm_head.weight)
        run = serve if ours else original
        return run(self, hidden_states, lm_head, embedding_bias, **kwargs)

    return _compute_lm_head


def has_float32_head(processor) -> bool:
    """--enable-fp32-lm-head, or from 0.5.23 on a configuration that asks for float32 logits."""
    return bool(processor.use_fp32_lm_head or getattr(processor, "use_fp32_lm_head_output", False))


def is_plain_head(processor, head) -> bool:
    """Our model's own unquantised head without bias: nothing wraps it (LoRA), and nobody trains with its numbers."""
    return (
        models_served.announced() is not None
        and models_served.serves_this_process()
        and not hasattr(head, "set_lora")
        and getattr(head, "bias", None) is None
        and type(getattr(head, "quant_method", None)).__name__ == "UnquantizedEmbeddingMethod"
        and getattr(processor, "rl_on_policy_target", None) is None
    )


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
