"""SGLang's FP8 linear method -> `ops.fp8_linear`.

Every dense FP8 layer of the model (wqkv_a, wq_b, wo_b, the indexer's wq_b, the shared experts, the MTP projections) is
an `Fp8LinearMethod`, whichever GEMM it chose; its `apply` is replaced. The function that it stores is not touched: code
that compares it by identity (quantise-once in deepseek_v2.py) sees SGLang's own.

A step's rows of bf16 activations (dense_rows.py) go to our operator: x is not quantised. The choice depends on the
number of rows, and on what is fixed for a layer, never on contents. All else is the original's: more rows; x that is
already quantised (a tuple); a bias; MXFP8 and Marlin layers; weights or scales in a layout that the operator does not
read (DeepGEMM's packed scales, blocks other than 128 x 128).

Two things that SGLang does to a product's input with a launch of their own are put off to the product, where it is ours
and has up to 4 rows. Decided when SGLang would have done them, by the layers and the number of rows:

    silu_and_mul_clamp    in DeepseekV2MLP.forward (the shared experts): leaves its output as it is, a `Gates` waits.
                          down_proj, with SGLang's own all-reduce around it, takes that output, and so the gates
    the latent norm       RMSNorm of the queries' latent, q_norm of MQALayer, whatever path calls it: gives
                          `Unnormalized`, which stands for its result until wq_b and the indexer's wq_b take it. It is
                          no tensor: nothing else can read it by mistake. From 5 rows on it already has them, by a
                          launch of ours with the same bits

SwiGLU has the bits of SGLang's kernel in either case.

wo_a, grouped and applied by the model itself, is an operator of its own: wo_a.py beside this file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepseek_v4_sm120.ops import fp8_linear as op
from deepseek_v4_sm120.sglang_patches import device_gate, shadow
from deepseek_v4_sm120.sglang_patches.adapters import dense_rows
from deepseek_v4_sm120.sglang_patches.adapters.waiting import Scope, Waiting, way_out
from deepseek_v4_sm120.specs import bounds

PATCH = "fp8_linear"


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
        and scale is not None
        and device_gate.serves(weight.device)
        and op.takes(weight, scale)
    )


def keeps_with(layer, prologue: str) -> bool:
    """True for a linear layer whose product is ours without a bias, and takes x with that prologue (ops.fp8_linear)."""
    method = getattr(layer, "quant_method", None)
    return (
        getattr(getattr(type(method), "apply", None), "takes_prologues", False)
        and getattr(layer, "bias", None) is None
        and keeps(method, layer)
        and op.takes_prologue(prologue, *layer.weight.shape)
    )


# ---- what waits for a product


@dataclass(eq=False)
class Gates(Waiting):
    """What a call of silu_and_mul_clamp, `original`, would have made of `gates_and_ups`, and written to `x`."""

    operator = PATCH
    untaken = "SwiGLU was put off to a product that SGLang did not take"
    mistaken = "SGLang multiplies something else before the gates that wait"

    gates_and_ups: torch.Tensor
    x: torch.Tensor
    limit: float
    original: Callable

    def is_of(self, layer, x) -> bool:
        return layer is _mlp.layer and x is self.x

    def product(self, layer) -> torch.Tensor:
        return op.fp8_linear(as_rows(self.gates_and_ups), layer.weight, layer.weight_scale_inv, swiglu_limit=self.limit)

    def run(self) -> torch.Tensor:
        self.original(self.gates_and_ups, self.x, self.limit)
        return self.x


class Unnormalized(Waiting):
    """Stands for the normalised rows of x where the model hands them on: knows the products taken of them.

    made_before: those rows, of a launch before all products; None where each product makes them itself.
    """

    def __init__(self, x: torch.Tensor, norm, original: Callable, made_before: torch.Tensor | None):
        self.x, self._norm, self._original, self._made_before = x, norm, original, made_before

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    def __getitem__(self, rows) -> Unnormalized:
        if not isinstance(rows, slice):
            raise TypeError(way_out(PATCH, f"SGLang takes {rows} of rows that are not normalised yet"))
        made_before = None if self._made_before is None else self._made_before[rows]
        return Unnormalized(self.x[rows], self._norm, self._original, made_before)

    def __getattr__(self, name):
        raise AttributeError(way_out(PATCH, f"SGLang reads {name} of rows that are not normalised yet"))

    def product(self, layer) -> torch.Tensor:
        if self._made_before is not None:
            return op.fp8_linear(self._made_before, layer.weight, layer.weight_scale_inv)
        norm = {"norm_weight": self._norm.weight.data, "norm_eps": self._norm.variance_epsilon}
        return op.fp8_linear(as_rows(self.x), layer.weight, layer.weight_scale_inv, **norm)

    def run(self) -> torch.Tensor:
        return self._original(self.x)


def _serve(_method, layer, x, _bias=None):
    if isinstance(x, Waiting):
        return x.product(layer)
    out = op.fp8_linear(as_rows(x), layer.weight, layer.weight_scale_inv)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])


def _tensors(ours, original, *_) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(ours.reshape(-1, ours.shape[-1]), original.reshape(-1, original.shape[-1]))]


def _identity(_method, layer, *_) -> int:
    return layer.weight.data_ptr()


def _shape(_method, layer, x, *_) -> dict[str, int]:
    outputs, inputs = layer.weight.shape
    rows = x if isinstance(x, torch.Tensor) else x.x
    return {"rows": rows.numel() // inputs, "outputs": outputs, "inputs": inputs}


def replace_apply(original: Callable) -> Callable:
    """For Fp8LinearMethod.apply."""

    def stock(method, layer, x, bias=None):
        return original(method, layer, x.run() if isinstance(x, Waiting) else x, bias)

    comparison = shadow.Comparison(
        tensors=_tensors, identity=_identity, shape=_shape, relative_l2=bounds.FP8_LINEAR.shadow
    )
    serve = shadow.shadowed(PATCH, _serve, stock, comparison)

    @functools.wraps(original)
    def apply(self, layer, x, bias=None):
        x = _mlp.take(Gates, layer, x) or x
        if isinstance(x, Waiting):
            return serve(self, layer, x) if bias is None and keeps(self, layer) else stock(self, layer, x, bias)
        if bias is not None or not has_few_rows(x) or not keeps(self, layer):
            return original(self, layer, x, bias)
        return serve(self, layer, x)

    apply.takes_prologues = True
    return apply


# ---- SwiGLU of the shared experts


_mlp = Scope()  # its layer is the down projection, where that is ours


def replace_mlp_forward(original: Callable) -> Callable:
    """For DeepseekV2MLP.forward."""

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        down = getattr(self, "down_proj", None)
        limited = getattr(self, "swiglu_limit", None) is not None and getattr(down, "input_is_parallel", False)
        with _mlp.enter(down if limited and keeps_with(down, "SWIGLU") else None):
            return original(self, *args, **kwargs)

    return forward


def replace_silu_and_mul_clamp(original: Callable) -> Callable:
    """For silu_and_mul_clamp, as the MLP's module imported it."""

    @functools.wraps(original)
    def silu_and_mul_clamp(input, output, swiglu_limit):
        if _mlp.layer is not None and _may_wait(input, output, swiglu_limit):
            return _mlp.put_off(Gates(input, output, swiglu_limit, original))
        return original(input, output, swiglu_limit)

    return silu_and_mul_clamp


def _may_wait(gates_and_ups, x, limit) -> bool:
    """True for rows for the down projection that its launch gates; fixed by their number and by the layer."""
    inputs = _mlp.layer.weight.shape[1]
    return (
        not _mlp.waiting(Gates)
        and has_few_rows(x)
        and x.shape[0] <= op.MADE_ROWS
        and limit > 0
        and gates_and_ups.dtype == torch.bfloat16
        and gates_and_ups.shape == (x.shape[0], 2 * inputs)
        and x.shape[1:] == (inputs,)
    )


# ---- the latent norm


def replace_attention_init(original: Callable) -> Callable:
    """For MQALayer.__init__."""

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        norm = getattr(self, "q_norm", None)
        process.has_our_model |= not getattr(self, "is_dsv41", False)
        if norm is not None and not getattr(self, "is_dsv41", False) and _is_plain(norm):
            norm.forward = _put_off(self, norm, norm.forward)

    return __init__


def _is_plain(norm) -> bool:
    """True for an RMSNorm over all inputs that rounds once."""
    return getattr(norm, "variance_size_override", None) is None and not getattr(norm, "cast_x_before_out_mul", False)


def _put_off(attention, norm, original: Callable) -> Callable:
    """The forward of `norm`, whose result `attention` gives to wq_b and to its indexer, and to nobody else."""

    @functools.wraps(original)
    def forward(x, *args, **kwargs):
        if args or kwargs or not _takes_latent(x, norm) or not all(map(_takes_norm, _consumers(attention))):
            return original(x, *args, **kwargs)
        many = x.shape[0] > op.MADE_ROWS
        made_before = op.normalized(as_rows(x), norm.weight.data, norm.variance_epsilon) if many else None
        return Unnormalized(x, norm, original, made_before)

    return forward


def _consumers(attention) -> list:
    indexer = getattr(attention, "indexer", None)
    return [attention.wq_b, *([] if indexer is None else [indexer.wq_b])]


def _takes_norm(layer) -> bool:
    return keeps_with(layer, "NORM")


def _takes_latent(x, norm) -> bool:
    weight = norm.weight
    return (
        has_few_rows(x)
        and x.dim() == 2
        and weight.dtype == torch.bfloat16
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
        and weight.shape == x.shape[1:]
    )
