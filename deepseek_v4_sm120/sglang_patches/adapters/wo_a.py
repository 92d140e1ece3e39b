"""wo_a of SGLang's DeepSeek-V4 attention -> `ops.wo_a`, with the weights as the checkpoint has them.

SGLang makes wo_a a bf16 layer, expands the checkpoint's E4M3 while it loads, and multiplies by torch.einsum, behind a
kernel that takes the rotary embedding of the attention's output back. Here:

    MQALayer.__init__              makes it an E4M3 layer with its scales (`store`)
    DeepseekV4ForCausalLM.load_weights, _dequant_fp8_wo_a_streaming
                                   hand the checkpoint's tensors through as they are (`AsStored`); bf16 that was
                                   expanded from E4M3, as in sgl-project's FP8 conversions, becomes that again
    _model_load_weights_direct, dynamic_import
                                   refuse SGLang's bf16, which would be cast without scales
    MQALayer.forward               is SGLang's, with a scope around it. Its `self.wo_a.weight.view(groups, outputs, -1)`
                                   gives `Groups`, whose einsum is our product
    fused_rope_inplace             inside that forward, for a step's rows: puts the rotation off to the product

What SGLang makes E4M3 itself (SGLANG_OPT_FP8_WO_A_GEMM where it can be had), DSpark's own attention and DeepSeek-V4.1
are not touched, nor are weights that SGLang hands over or moves about (handed_over.py). Decided once per layer, when it
is made (`keeps`); a layer whose checkpoint has bf16 that never was E4M3 is SGLang's again (`_give_back`).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from deepseek_v4_sm120.ops import fp8_linear_weights
from deepseek_v4_sm120.ops import wo_a as op
from deepseek_v4_sm120.ops.shared import limits
from deepseek_v4_sm120.settings import settings
from deepseek_v4_sm120.sglang_patches import device_gate, shadow
from deepseek_v4_sm120.sglang_patches.adapters import dense_rows, direct_updates, handed_over
from deepseek_v4_sm120.sglang_patches.adapters.kept_weights import KeptWeights
from deepseek_v4_sm120.sglang_patches.adapters.waiting import Scope, Waiting, way_out
from deepseek_v4_sm120.specs import bounds

PATCH = "wo_a"

WEIGHT, SCALE, PARAMETER = ".wo_a.weight", ".wo_a.scale", ".wo_a.weight_scale_inv"
(BLOCKS,) = limits.LIMITS[PATCH]["block"].values
SCALE_DTYPES = (torch.float32, torch.float8_e8m0fnu)
SCALE_WORDS = " or ".join(map(str, SCALE_DTYPES))
EXPANDED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NO_SCALES = torch.empty(0)  # in the place of those that an expanded weight does not have
NEVER_E4M3 = "the checkpoint has bf16 weights that no E4M3 is"


kept = KeptWeights(PATCH, "in FP8")

# ---- the layer: E4M3 from the start


class StoredWeight(torch.nn.Parameter):
    """wo_a's E4M3 bytes [groups * outputs, inputs]. Viewed by groups it is what the model multiplies with: `Groups`."""

    scale: torch.nn.Parameter
    for_shadow: torch.Tensor | None = None  # bf16 [groups * outputs, inputs]
    is_read = False  # a forward has taken it: captured graphs may have its address

    def view(self, *shape):
        if len(shape) != 3:
            return super().view(*shape)
        self.is_read = True
        return Groups(self, shape)


def keeps(attention, quant_config, prefix: str) -> bool:
    """True for a bf16 wo_a whose checkpoint is block-scaled E4M3, of the shape that ops.wo_a takes, on our GPU."""
    layer = attention.wo_a
    weight = getattr(layer, "weight", None)
    return (
        weight is not None
        and weight.dtype == torch.bfloat16  # else SGLang itself keeps another type
        and device_gate.serves(weight.device)
        and not getattr(attention, "is_dsv41", False)
        and quant_config is not None
        and quant_config.get_name() == "fp8"
        and getattr(quant_config, "is_checkpoint_fp8_serialized", False)
        and limits.takes(PATCH, block=_as_tuple(getattr(quant_config, "weight_block_size", None)))
        and type(quant_config.get_quant_method(layer, prefix)).__name__ == "Fp8LinearMethod"  # not one that is left out
        and limits.takes(
            PATCH,
            head_dim=attention.head_dim,
            rotated=attention.qk_rope_head_dim,
            o_lora=attention.o_lora_rank,
            group_inputs=weight.shape[1],
        )
        and not handed_over.are_sglangs(PATCH)
    )


def _as_tuple(block) -> tuple | None:
    return None if block is None else tuple(block)


def store(layer, expand: Callable) -> None:
    """Replace a linear layer's bf16 parameter, still empty, by E4M3 and its scales, with what SGLang notes on it.

    expand: SGLang's (weight, scale) -> bf16, for shadow mode.
    """
    expanded = layer.weight
    noted = dict(vars(expanded))
    rows, inputs = expanded.shape
    empty = functools.partial(torch.empty, device=expanded.device)
    weight = StoredWeight(empty((rows, inputs), dtype=torch.float8_e4m3fn), requires_grad=False)
    blocks = (rows // BLOCKS[0], inputs // BLOCKS[1])
    weight.scale = torch.nn.Parameter(empty(blocks, dtype=torch.float32), requires_grad=False)
    for name, value in noted.items():
        setattr(weight, name, value)
        setattr(weight.scale, name, value)
    weight.weight_loader = _loads(layer, expanded)
    weight.scale.weight_loader = _checked_scale(expanded.weight_loader)
    expanded.data = expanded.data.new_empty(0)
    layer.weight, layer.weight_scale_inv = weight, weight.scale
    if settings().shadow:
        layer.quant_method = _ExpandedForShadow(layer.quant_method, expand)
    kept.add(_bytes(weight))
    handed_over.keep_here(layer, PATCH)


def _bytes(weight: StoredWeight) -> int:
    return weight.numel() + 4 * weight.scale.numel()


def _loads(layer, expanded: torch.nn.Parameter) -> Callable:
    """The loader of a layer that is ours, for E4M3, and for what somebody has expanded from E4M3.

    expanded: SGLang's own parameter, without memory; it has some while weights are looked at.
    """
    load = expanded.weight_loader

    @functools.wraps(load)
    def weight_loader(param, loaded_weight, *args, **kwargs):
        if loaded_weight.dtype == param.dtype:
            return load(param, loaded_weight, *args, **kwargs)
        if loaded_weight.dtype not in EXPANDED_DTYPES:
            raise ValueError(_unknown_type(param, loaded_weight))
        expanded.data = torch.empty(param.shape, dtype=torch.bfloat16, device=param.device)
        load(expanded, loaded_weight, *args, **kwargs)
        found = fp8_linear_weights.recovered(expanded.data)
        if found is None:
            return _give_back(layer, expanded)
        for parameter, values in zip((param, param.scale), found, strict=True):
            parameter.data.copy_(values)
        expanded.data = expanded.data.new_empty(0)
        return None

    weight_loader.checks_dtype = True
    return weight_loader


def _give_back(layer, expanded: torch.nn.Parameter) -> None:
    """The layer is as SGLang made it, with its weights; ValueError where a forward has taken ours."""
    weight = layer.weight
    if weight.is_read:
        raise ValueError(way_out(PATCH, f"{NEVER_E4M3}, and the server that they are loaded into has E4M3"))
    handed_over.tell(PATCH, NEVER_E4M3)
    del layer.weight_scale_inv
    layer.weight = expanded
    if isinstance(layer.quant_method, _ExpandedForShadow):
        layer.quant_method = layer.quant_method.method
    kept.remove(_bytes(weight))
    handed_over.let_go(layer)


def _unknown_type(param, loaded_weight) -> str:
    given = f"must be {param.dtype}, as its quantization_config says, got {loaded_weight.dtype}"
    return way_out(PATCH, f"the checkpoint's weight {given}")


def _checked(load: Callable) -> Callable:
    """Of a bf16 layer: E4M3 would be cast without its scales."""

    @functools.wraps(load)
    def weight_loader(param, loaded_weight, *args, **kwargs):
        if loaded_weight.dtype == torch.float8_e4m3fn:
            raise ValueError(_unknown_type(param, loaded_weight))
        return load(param, loaded_weight, *args, **kwargs)

    weight_loader.checks_dtype = True
    return weight_loader


def _checked_scale(load: Callable) -> Callable:
    """As SGLang's expansion, which takes these two: bytes would be copied as the numbers that they are not."""

    @functools.wraps(load)
    def weight_loader(param, loaded_weight, *args, **kwargs):
        if loaded_weight is NO_SCALES:  # param has them from the weight
            return None
        if loaded_weight.dtype not in SCALE_DTYPES:
            raise ValueError(f"{PATCH}: the checkpoint's scales must be {SCALE_WORDS}, got {loaded_weight.dtype}")
        return load(param, loaded_weight, *args, **kwargs)

    return weight_loader


class _ExpandedForShadow:
    """In shadow mode, in the place of the layer's method: once the weights are there, SGLang expands a copy of them."""

    def __init__(self, method, expand: Callable):
        self.method, self._expand = method, expand

    def __getattr__(self, name):
        return getattr(self.method, name)

    def process_weights_after_loading(self, layer) -> None:
        self.method.process_weights_after_loading(layer)
        weight = layer.weight
        expanded = self._expand(weight.data, weight.scale.data)
        if weight.for_shadow is None:
            weight.for_shadow = expanded
            kept.shadow_copy_bytes += 2 * weight.numel()
        else:  # loaded again: captured graphs read this memory
            weight.for_shadow.copy_(expanded)


def replace_init(original: Callable) -> Callable:
    """For MQALayer.__init__."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        prefix = given.arguments["prefix"]
        if keeps(self, given.arguments["quant_config"], f"{prefix}.wo_a" if prefix else "wo_a"):
            store(self.wo_a, sys.modules[original.__module__]._dequant_fp8)

    return __init__


# ---- the checkpoint: nothing is expanded


class AsStored:
    """A checkpoint's (name, tensor) pairs with wo_a's scales under their parameter's name, and NO_SCALES behind weights
    that have none: nothing left to expand, and no parameter that was not loaded."""

    def __init__(self, weights: Iterable):
        self._weights = weights

    def __iter__(self):
        scaled, expanded = set(), set()  # layers
        for name, tensor in self._weights:
            name = name.removesuffix(SCALE) + PARAMETER if name.endswith(SCALE) else name
            yield name, tensor
            if name.endswith(PARAMETER):
                scaled.add(name.removesuffix(PARAMETER))
            if name.endswith(WEIGHT) and tensor.dtype in EXPANDED_DTYPES:
                expanded.add(name.removesuffix(WEIGHT))
                yield name.removesuffix(WEIGHT) + PARAMETER, NO_SCALES
            if both := scaled & expanded:  # scales that would be written over those that the weights were given
                what = f"the checkpoint has scales for {both.pop()}{WEIGHT}, which is not E4M3"
                raise ValueError(way_out(PATCH, what))


def replace_load_weights(original: Callable) -> Callable:
    """For DeepseekV4ForCausalLM.load_weights, which the MTP model's calls."""

    @functools.wraps(original)
    def load_weights(self, weights, *args, **kwargs):
        of_wo_a = [parameter for name, parameter in self.named_parameters() if f".{name}".endswith(WEIGHT)]
        others = [parameter for parameter in of_wo_a if not isinstance(parameter, StoredWeight)]
        if len(others) == len(of_wo_a):
            return original(self, weights, *args, **kwargs)
        for parameter in others:  # layers that are not ours get what the checkpoint has, too: it must not be E4M3
            load = getattr(parameter, "weight_loader", None)
            if load is not None and not hasattr(load, "checks_dtype"):
                parameter.weight_loader = _checked(load)
        return original(self, AsStored(weights), *args, **kwargs)

    return load_weights


def replace_expansion(original: Callable) -> Callable:
    """For _dequant_fp8_wo_a_streaming (0.5.17 and later; before, nothing is expanded where no scale is named so)."""

    @functools.wraps(original)
    def _dequant_fp8_wo_a_streaming(weights):
        return weights if isinstance(weights, AsStored) else original(weights)

    return _dequant_fp8_wo_a_streaming


def replace_direct(original: Callable) -> Callable:
    """For _model_load_weights_direct."""
    return direct_updates.refusing(original, PATCH, _expected_of_direct)


def replace_direct_custom(original: Callable) -> Callable:
    """For dynamic_import, where a --custom-weight-loader is looked up."""
    return direct_updates.refusing_custom(original, PATCH, _expected_of_direct)


def _expected_of_direct(layer, name: str, tensor: torch.Tensor) -> str | None:
    if not isinstance(getattr(layer, "weight", None), StoredWeight):
        return None
    if name == "weight" and tensor.dtype != torch.float8_e4m3fn:
        return "torch.float8_e4m3fn, with the scales as weight_scale_inv"
    if name == "weight_scale_inv" and tensor.dtype not in SCALE_DTYPES:
        return SCALE_WORDS
    return None


# ---- the forward: rotation and product

FORWARD = Scope()


def replace_forward(original: Callable) -> Callable:
    """For MQALayer.forward."""

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        with FORWARD.enter(self):
            return original(self, *args, **kwargs)

    return forward


@dataclass(eq=False)
class Rotation(Waiting):
    """What a call of fused_rope_inplace, `original`, would have done: rotate `rotated` [rows, heads, 64], in place."""

    operator = PATCH
    untaken = "the rotation was put off to a product that SGLang did not take"
    mistaken = "SGLang multiplies another tensor than the one it rotates"

    rotated: torch.Tensor
    freqs_cis: torch.Tensor
    positions: torch.Tensor
    original: Callable

    def is_of(self, x) -> bool:
        """Whether `rotated` is the last 64 of each head of x [rows, groups, inputs]."""
        first = x.data_ptr() + (op.HEAD_INPUTS - op.ROTATED) * x.element_size()
        return (self.rotated.data_ptr(), self.rotated.shape[0]) == (first, x.shape[0])

    def run(self) -> None:
        self.original(self.rotated, None, self.freqs_cis, self.positions, True)


def replace_rope(original: Callable) -> Callable:
    """For fused_rope_inplace, as the model imported it."""

    @functools.wraps(original)
    def fused_rope_inplace(q, k, freqs_cis, positions, inverse=False):
        ours = isinstance(getattr(getattr(FORWARD.layer, "wo_a", None), "weight", None), StoredWeight)
        if ours and inverse and k is None and _may_wait(q, freqs_cis, positions):
            FORWARD.put_off(Rotation(q, freqs_cis, positions, original))
            return None
        return original(q, k, freqs_cis, positions, inverse)

    return fused_rope_inplace


def _may_wait(q, freqs_cis, positions) -> bool:
    """True for a step's rows, which ops.wo_a rotates itself; fixed by their number and the arguments' kinds."""
    return (
        dense_rows.are_ours(q.shape[0])
        and q.dtype == torch.bfloat16
        and freqs_cis.dtype == torch.complex64
        and freqs_cis.is_contiguous()
        and positions.is_contiguous()
        and positions.dim() == 1
    )


class Groups:
    """Stands where the model expects wo_a's weights [groups, outputs, inputs]: knows the one product taken of them."""

    def __init__(self, stored: StoredWeight, shape):
        self.stored = stored
        self.weight = stored.data.view(shape)
        self.weight_scale = stored.scale.data.view(shape[0], shape[1] // BLOCKS[0], -1)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is not torch.einsum or args[0] != op.EQUATION or not isinstance(args[2], cls):
            name = getattr(function, "__name__", function)
            what = f"SGLang calls {name} with the FP8 weights, einsum {op.EQUATION!r} is known"
            raise TypeError(way_out(PATCH, what))
        return _serve()(args[2], args[1], FORWARD.take(Rotation, args[1]))


def _multiply(groups: Groups, x, rotation: Rotation | None):
    freqs_cis, positions = (rotation.freqs_cis, rotation.positions) if rotation else (None, None)
    given = {"freqs_cis": freqs_cis, "positions": positions, "reproducible": settings().reproducible}
    return op.wo_a(x, groups.weight, groups.weight_scale, **given)


def _multiply_expanded(groups: Groups, x, rotation: Rotation | None):
    """What SGLang computes, of the shadow's bf16 copy; its rotation is in place, so x is copied."""
    if rotation is not None:
        x = x.contiguous().clone()
        heads = x.view(x.shape[0], -1, op.HEAD_INPUTS)
        rotation.original(heads[..., -op.ROTATED :], None, rotation.freqs_cis, rotation.positions, True)
    return torch.einsum(op.EQUATION, x, groups.stored.for_shadow.view(groups.weight.shape))


def _tensors(ours, original, *_) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(ours.flatten(1), original.flatten(1))]


def _identity(groups: Groups, *_) -> int:
    return groups.weight.data_ptr()


def _shape(groups: Groups, x, _rotation) -> dict[str, int]:
    return {"rows": x.shape[0], "groups": groups.weight.shape[0]}


@functools.cache
def _serve() -> Callable:
    comparison = shadow.Comparison(tensors=_tensors, identity=_identity, shape=_shape, relative_l2=bounds.WO_A.shadow)
    return shadow.shadowed(PATCH, _multiply, _multiply_expanded, comparison)
