"""SGLang's MXFP4 expert methods -> `ops.mxfp4_moe`.

Two method classes hold the routed experts of an FP4 checkpoint, chosen by --moe-runner-backend: `marlin`, which keeps
bf16 activations, and from 0.5.16 on `flashinfer_mxfp4`, which quantises them to MXFP8. Both load the checkpoint's
bytes, repack them for their kernels, and multiply. Two methods of each are replaced:

    process_weights_after_loading   leaves the checkpoint's bytes where they are: no repacking, no second copy
    apply                           one call of ops.mxfp4_moe

Bytes for one layout can be of the other's size and type, so what writes a kept layer's by their own names is refused
(load_format="direct", a --custom-weight-loader).

The user's flag keeps its meaning for prefill: above 256 rows `marlin` is W4A16 with us too, and `flashinfer_mxfp4` is
W4A8 where the GPU has block-scaled instructions and the profile does not leave that out. Up to 256 rows it is W4A16,
and at all rows where the server is reproducible.

Who applies the routed scaling (1.5): never these methods. Up to 0.5.18 the model does, behind the experts, for exactly
these classes; from 0.5.19 on the router's weights contain it. So `routed_scaling` is 1.0 in the call.
0.5.13's own SM120 branch of `marlin` scales as well, so the 1.5 counts twice there: shadow mode shows the difference.

Expert parallelism: the dispatcher has made the ids local, with -1 for other ranks', or (flashinfer_mxfp4) left them
global, and then the rank's first expert is subtracted.

Decided once per layer, when its weights have been loaded (`keeps`): a layer that we do not keep is repacked and run
by the original, and so is one whose weights SGLang hands over or moves about (handed_over.py). Checkpoints with FP8 or
NVFP4 experts use other classes and are not touched.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepseek_v4_sm120 import patching
from deepseek_v4_sm120.ops import mxfp4_moe as op
from deepseek_v4_sm120.ops.shared import limits
from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.settings import settings
from deepseek_v4_sm120.sglang_patches import device_gate, shadow
from deepseek_v4_sm120.sglang_patches.adapters import direct_updates, handed_over, mhc_owed_terms
from deepseek_v4_sm120.sglang_patches.adapters.kept_weights import KeptWeights
from deepseek_v4_sm120.specs import bounds

PATCH = "mxfp4_moe"
WAY_MXFP8 = "ours, mxfp8, wide"  # what `calibrate` calls it; a profile that leaves it out leaves bf16

TWICE = (
    f"{PATCH}: shadow mode holds the experts twice, for which two cards of 96 GB have no room: "
    f"DSV4_SM120_SET={PATCH}=off compares all the others"
)
KEPT = "_dsv4_sm120_experts"  # attribute of a layer that we keep
SCALE_NAMES = ("w13_weight_scale_inv", "w2_weight_scale_inv")


@dataclass(frozen=True)
class Experts:
    """A layer's weights in the checkpoint's layout, and how to call the operator with them."""

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    first_expert: int
    up_first: bool
    swiglu_limit: float | None
    activations: str

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.w13, self.w13_scale, self.w2, self.w2_scale))


kept = KeptWeights(PATCH, "of experts in the checkpoint's layout")


def keeps(method, layer) -> bool:
    """True for a layer whose experts ops.mxfp4_moe computes: FP4, gated SiLU without biases, sizes it was made for.

    With others few rows would fall to the kernels for many, which do not take all: DeepSeek-V4.1's (hidden 5120, 2304
    wide) are such.
    """
    w13, w2 = layer.w13_weight, layer.w2_weight
    config = layer.moe_runner_config
    return (
        device_gate.serves(w13.device)
        and w13.ndim == w2.ndim == 3
        and w13.dtype in (torch.int8, torch.uint8)
        and w13.shape[2] * 2 == w2.shape[1]
        and w13.shape[1] == w2.shape[2] * 4
        and limits.takes(
            PATCH, hidden=w2.shape[1], inter=w13.shape[1] // 2, experts=w13.shape[0], experts_per_token=layer.top_k
        )
        and all(getattr(layer, name).dtype in _SCALE_DTYPES for name in SCALE_NAMES)
        and config.activation == "silu"
        and getattr(config, "is_gated", True)
        and getattr(config, "gemm1_alpha", None) is None
        and not getattr(config, "apply_router_weight_on_input", False)
        and not getattr(config, "no_combine", False)
        and not getattr(method, "_use_swiglu_step", False)
        and getattr(layer, "w13_weight_bias", None) is None
        and getattr(layer, "w2_weight_bias", None) is None
        and type(layer.dispatcher).__name__ == "StandardDispatcher"
        and getattr(type(method).apply, "computes", None) == KEPT  # of a subclass with one of its own: repacked weights
        and not handed_over.are_sglangs(PATCH)
    )


_SCALE_DTYPES = (torch.float8_e8m0fnu, torch.uint8, torch.float32)


def scale_bytes(scale: torch.Tensor) -> torch.Tensor:
    """UE8M0 bytes of a scale parameter: its own memory, or of float32 powers of two (up to 0.5.15) a new one."""
    scale = scale.data
    if scale.dtype != torch.float32:
        return scale.view(torch.uint8)
    found = torch.empty(scale.shape, dtype=torch.uint8, device=scale.device)
    for expert in range(scale.shape[0]):  # one at a time: the peak stays small
        found[expert] = (scale[expert].contiguous().view(torch.int32) >> 23).to(torch.uint8)
    return found


def _experts(method, layer, *, mxfp8: bool) -> Experts:
    mxfp8 = mxfp8 and op.multiplies_block_scaled(layer.w13_weight.device)
    mxfp8 = mxfp8 and patching.left_out(PATCH, WAY_MXFP8) is None
    ids_are_global = bool(getattr(layer.dispatcher, "skip_local_expert_mapping", False))
    return Experts(
        w13=layer.w13_weight.data,
        w13_scale=scale_bytes(layer.w13_weight_scale_inv),
        w2=layer.w2_weight.data,
        w2_scale=scale_bytes(layer.w2_weight_scale_inv),
        first_expert=layer.moe_ep_rank * layer.w13_weight.shape[0] if ids_are_global else 0,
        up_first=bool(getattr(method, "load_up_proj_weight_first", False)),
        swiglu_limit=layer.moe_runner_config.swiglu_limit,
        activations="mxfp8" if mxfp8 else "bf16",
    )


def _replace_scales(layer, experts: Experts) -> None:
    """float32 scale parameters give way to their bytes, so that loading does not cost memory but frees some. What
    SGLang noted on them stays: it loads weights once more by that."""
    for name, found in zip(SCALE_NAMES, (experts.w13_scale, experts.w2_scale), strict=True):
        loaded = getattr(layer, name)
        if loaded.dtype == torch.float32:
            parameter = torch.nn.Parameter(found.view(torch.float8_e8m0fnu), requires_grad=False)
            vars(parameter).update(vars(loaded))
            setattr(layer, name, parameter)


def _replace_process(original: Callable, *, mxfp8: bool) -> Callable:
    @functools.wraps(original)
    def process_weights_after_loading(self, layer):
        if not keeps(self, layer):
            return original(self, layer)
        if settings().shadow:  # the original repacks, perhaps in place: ours get copies
            report.warn_once(TWICE)
            experts = _experts(self, layer, mxfp8=mxfp8)
            names = ("w13", "w13_scale", "w2", "w2_scale")
            copies = {name: getattr(experts, name).clone() for name in names}
            original(self, layer)
            experts = Experts(**{**vars(experts), **copies})
            kept.shadow_copy_bytes += experts.bytes
        else:
            self._fp8.process_weights_after_loading(layer)  # as the original does first
            experts = _experts(self, layer, mxfp8=mxfp8)
            _replace_scales(layer, experts)
            handed_over.keep_here(layer, PATCH)
        if getattr(layer, KEPT, None) is None:
            kept.add(experts.bytes)
        setattr(layer, KEPT, experts)
        return None

    return process_weights_after_loading


def replace_marlin_process(original: Callable) -> Callable:
    """For Mxfp4MarlinMoEMethod.process_weights_after_loading."""
    return _replace_process(original, mxfp8=False)


def replace_cutlass_process(original: Callable) -> Callable:
    """For Mxfp4FlashinferCutlassMoEMethod.process_weights_after_loading (0.5.16 and later)."""
    return _replace_process(original, mxfp8=True)


def replace_direct(original: Callable) -> Callable:
    """For _model_load_weights_direct."""
    return direct_updates.refusing(original, PATCH, _expected_of_direct)


def replace_direct_custom(original: Callable) -> Callable:
    """For dynamic_import, where a --custom-weight-loader is looked up."""
    return direct_updates.refusing_custom(original, PATCH, _expected_of_direct)


def _expected_of_direct(layer, name: str, _tensor) -> str | None:
    """SGLang's repacked bytes and the checkpoint's can have the same shape and type."""
    kept_here = getattr(layer, KEPT, None) is not None
    return "the checkpoint's, expert by expert" if kept_here else None


def _run(experts: Experts, hidden, topk_ids, topk_weights):
    return op.mxfp4_moe(
        hidden,
        topk_ids,
        topk_weights,
        experts.w13,
        experts.w13_scale,
        experts.w2,
        experts.w2_scale,
        swiglu_limit=experts.swiglu_limit,
        first_expert=experts.first_expert,
        up_first=experts.up_first,
        activations=experts.activations,
        reproducible=settings().reproducible,
    )


def _as(dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)  # a `to` that does nothing takes longer than a check


def _serve(method, layer, dispatch_output):
    experts: Experts = getattr(layer, KEPT)
    routed = dispatch_output.topk_output
    if not hasattr(routed, "topk_ids"):
        raise ValueError(
            f"mxfp4_moe: topk_output must have topk_ids and topk_weights (standard format), got "
            f"{type(routed).__name__}: "
            "run without SGLANG_OPT_USE_FUSED_GATE_TOPK, or with DSV4_SM120=off"
        )
    topk_ids, topk_weights = _as(torch.int32, routed.topk_ids), _as(torch.float32, routed.topk_weights)
    out = _run(experts, dispatch_output.hidden_states, topk_ids, topk_weights)
    # the module that defines what came in defines what goes out
    return sys.modules[type(dispatch_output).__module__].StandardCombineInput(hidden_states=out)


def _tensors(ours, original, *_) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(ours.hidden_states, original.hidden_states)]


def _identity(_method, layer, _dispatch_output) -> int:
    return getattr(layer, KEPT).w13.data_ptr()


def _shape(_method, layer, dispatch_output) -> dict[str, int]:
    return {"rows": dispatch_output.hidden_states.shape[0], "inter": getattr(layer, KEPT).w13.shape[1] // 2}


def _replace_apply(original: Callable, relative_l2: float) -> Callable:
    comparison = shadow.Comparison(tensors=_tensors, identity=_identity, shape=_shape, relative_l2=relative_l2)
    serve = shadow.shadowed(PATCH, _serve, original, comparison)

    @functools.wraps(original)
    def apply(self, layer, dispatch_output):
        if getattr(layer, KEPT, None) is None:
            return original(self, layer, dispatch_output)
        return serve(self, layer, dispatch_output)

    apply.computes = KEPT
    return apply


def replace_marlin_apply(original: Callable) -> Callable:
    """For Mxfp4MarlinMoEMethod.apply."""
    return _replace_apply(original, bounds.MXFP4_MOE.shadow)


def replace_cutlass_apply(original: Callable) -> Callable:
    """For Mxfp4FlashinferCutlassMoEMethod.apply (0.5.16 and later)."""
    return _replace_apply(original, bounds.MXFP4_MOE_MXFP8.shadow)


class _Shared:
    """The shared expert's output while SGLang decides how the routed experts' is added to it: `add_` is ours."""

    def __init__(self, tensor: torch.Tensor, add: Callable):
        self.tensor, self.add = tensor, add

    def add_(self, routed: torch.Tensor, *, alpha: float = 1.0) -> torch.Tensor:
        return self.add(self.tensor, routed, alpha)


def _add(shared: torch.Tensor, routed: torch.Tensor, alpha: float) -> torch.Tensor | mhc_owed_terms.OwedTerm:
    if (term := mhc_owed_terms.of_experts(shared, routed, alpha)) is not None:
        return term
    shared = shared.clone() if settings().shadow else shared  # the original adds to it, too
    return op.add_shared(shared, routed, scaling=alpha)


SHARED_COMPARISON = shadow.Comparison(
    tensors=lambda ours, theirs, *_: [(ours, theirs)],
    identity=lambda *_: "shared expert",
    shape=lambda shared, *_: {"rows": shared.shape[0], "hidden": shared.shape[1]},
    relative_l2=0.0,
)


def replace_shared_add(original: Callable) -> Callable:
    """For maybe_fuse_routed_scale_and_shared_add: of the rows of decode and verify, where the boundary waits for it."""

    add = shadow.shadowed(
        PATCH, _add, lambda shared, routed, alpha: shared.add_(routed, alpha=alpha), SHARED_COMPARISON
    )

    @functools.wraps(original)
    def shared_add(experts, routed, shared, routed_scaling_factor):
        if shared is not None and _takes_shared(experts, routed, shared):
            shared = _Shared(shared, add)
        return original(experts, routed, shared, routed_scaling_factor)

    return shared_add


def _takes_shared(experts, routed, shared) -> bool:
    """Experts that we keep: SGLang adds theirs by `shared.add_`."""
    return (
        getattr(experts, KEPT, None) is not None
        and 0 < routed.shape[0] <= op.DECODE_ROWS
        and routed.dtype == shared.dtype == torch.bfloat16
        and routed.shape == shared.shape
        and routed.is_contiguous()
        and shared.is_contiguous()
    )
