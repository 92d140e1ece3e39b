"""SGLang's FP8 linear method -> `ops.fp8_linear`.

Every dense FP8 layer of the model (wqkv_a, wq_b, wo_b, the indexer's wq_b, the shared experts, the MTP projections) is
an `Fp8LinearMethod`, whichever GEMM it chose; its `apply` is replaced. The function that it stores is not touched: code
that compares it by identity (quantise-once in deepseek_v2.py) sees SGLang's own.

A step's rows of bf16 activations (dense_rows.py) go to our operator: x is not quantised. The choice depends on the
number of rows, and on what is fixed for a layer, never on contents. All else is the original's: more rows; x that is
already quantised (a tuple); a bias; MXFP8 and Marlin layers; weights or scales in a layout that the operator does not
read (DeepGEMM's packed scales, blocks other than 128 x 128).

Of few rows of wo_b the last addition is left to the boundary that makes the sum between the cards, or on one card to
the one behind it: mhc_owed_terms.py. On one card the shared expert's few rows are not made in parts (fp8_linear's
`whole`): several cards' were not timed so.

wo_a, grouped and applied by the model itself, is an operator of its own: wo_a.py beside this file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepseek_v4_sm120.ops import fp8_linear as op
from deepseek_v4_sm120.sglang_patches import device_gate, shadow
from deepseek_v4_sm120.sglang_patches.adapters import dense_rows, mhc_owed_terms
from deepseek_v4_sm120.sglang_patches.adapters.mhc_owed_sum import layers
from deepseek_v4_sm120.specs import bounds

PATCH = "fp8_linear"
WHOLE_ROWS = 4  # of the shared expert's: a layer of one card takes as long or less so, and 2.4 us more at 8 rows


def has_few_rows(x) -> bool:
    """True for a step's rows of bf16, in any number of leading dimensions."""
    is_bf16 = isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16
    return is_bf16 and x.numel() > 0 and dense_rows.are_ours(x.numel() // x.shape[-1])


def as_rows(x) -> torch.Tensor:
    """x as [rows, inputs] with strides and an address that the operator takes; a copy only where they are others."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    aligned = rows.stride(-1) == 1 and rows.stride(0) % 8 == 0 and rows.data_ptr() % 16 == 0
    return rows if aligned else rows.clone(memory_format=torch.contiguous_format)


@dataclass
class Process:
    """Fp8LinearMethod is every FP8 model's: it is ours once this process has made an attention of DeepSeek-V4."""

    has_our_model: bool = False


process = Process()


def keeps(method, layer) -> bool:
    """True for block-scaled E4M3 weights as the checkpoint has them, of our model, on a GPU that we serve."""
    weight, scale = layer.weight, getattr(layer, "weight_scale_inv", None)
    return (
        process.has_our_model
        and bool(method.block_quant)
        and not getattr(method, "use_marlin", False)
        and not getattr(method, "use_mxfp8", False)
        and device_gate.serves(weight.device)
        and op.takes(weight, scale)
    )


def is_beside_others(linear) -> bool:
    """Whether it is the running layer's shared expert's, of one card, whose kernels wait for places between the routed
    experts': what has a launch less behind it comes to its place sooner."""
    if layers.known.get("has_sum", True):  # outside of a layer, too
        return False
    shared = getattr(getattr(layers.layer, "mlp", None), "shared_experts", None)
    return shared is not None and (linear is shared.gate_up_proj or linear is shared.down_proj)


def _serve(_method, layer, x, _bias=None):
    rows, scale = as_rows(x), layer.weight_scale_inv
    if x.dim() == 2 and (term := mhc_owed_terms.of_product(layer, rows, scale)) is not None:
        return term
    whole = rows.shape[0] <= WHOLE_ROWS and is_beside_others(layer)
    out = op.fp8_linear(rows, layer.weight, scale, whole=whole)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])


def _tensors(ours, original, *_) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(ours.reshape(-1, ours.shape[-1]), original.reshape(-1, original.shape[-1]))]


def _identity(_method, layer, *_) -> int:
    return layer.weight.data_ptr()


def _shape(_method, layer, x, *_) -> dict[str, int]:
    outputs, inputs = layer.weight.shape
    return {"rows": x.numel() // inputs, "outputs": outputs, "inputs": inputs}


def replace_apply(original: Callable) -> Callable:
    """For Fp8LinearMethod.apply."""
    comparison = shadow.Comparison(
        tensors=_tensors, identity=_identity, shape=_shape, relative_l2=bounds.FP8_LINEAR.shadow
    )
    serve = shadow.shadowed(PATCH, _serve, original, comparison)

    @functools.wraps(original)
    def apply(self, layer, x, bias=None):
        if bias is not None or not has_few_rows(x) or not keeps(self, layer):
            return original(self, layer, x, bias)
        return serve(self, layer, x)

    return apply


def _latent_norm(norm, original: Callable) -> Callable:
    """For the forward of MQALayer's q_norm, whose result wq_b and the indexer's multiply: of a step's rows ours."""

    def serve(x):
        return op.latent_norm(x, norm.weight.data, norm.variance_epsilon)

    comparison = shadow.Comparison(
        tensors=lambda ours, theirs, x: [(ours, theirs)],
        identity=lambda x: norm.weight.data_ptr(),
        shape=lambda x: {"rows": x.shape[0], "inputs": x.shape[1]},
        relative_l2=bounds.LATENT_NORM.shadow,
    )
    serve = shadow.shadowed(PATCH, serve, original, comparison)

    @functools.wraps(original)
    def forward(x, *args, **kwargs):
        is_ours = not args and not kwargs and has_few_rows(x) and not torch.compiler.is_compiling()
        if not is_ours or not op.takes_latent(x, norm.weight.data) or not device_gate.serves(x.device):
            return original(x, *args, **kwargs)
        return serve(x)

    return forward


def is_plain(norm) -> bool:
    """True for an RMSNorm over all inputs that rounds once."""
    return getattr(norm, "variance_size_override", None) is None and not getattr(norm, "cast_x_before_out_mul", False)


def replace_attention_init(original: Callable) -> Callable:
    """For MQALayer.__init__: from here on the process has our model, and the attention's latent norm is ours."""

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        is_ours, norm = not getattr(self, "is_dsv41", False), getattr(self, "q_norm", None)
        process.has_our_model |= is_ours
        if is_ours and norm is not None and is_plain(norm):
            norm.forward = _latent_norm(norm, norm.forward)

    return __init__
