"""SGLang's choice of a row's experts -> `ops.router_topk`, for DeepSeek-V4's learned router (sqrt(softplus), a bias).

SGLang's Triton kernel has one warp for a row, and lets its successor in when it has stored next to everything. Ours has
its ids and its weights, to the bit. It is the innermost function that is replaced: physical experts, recorders, padding
and what the experts are given stay SGLang's.

The original takes shared experts among the routed ones, packed ids and log1p of DeepSeek-V4.1, other scoring functions,
and a prompt's rows, but where the server is to be reproducible.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from deepseek_v4_sm120.ops import router_topk as op
from deepseek_v4_sm120.sglang_patches import device_gate, shadow
from deepseek_v4_sm120.sglang_patches.adapters import dense_rows
from deepseek_v4_sm120.specs import bounds

PATCH = "router_topk"
SCORING = "sqrtsoftplus"


def replace_log(original: Callable) -> Callable:
    """0.5.15 to 0.5.19: log(1 + exp(x)); padded rows are masked by who calls it."""
    return _replaced(original, log1p=False, masks=False)


def replace_log1p(original: Callable) -> Callable:
    """0.5.20."""
    return _replaced(original, log1p=True, masks=False)


def replace_masked(original: Callable) -> Callable:
    """0.5.21 and later: padded rows are masked in the same launch."""
    return _replaced(original, log1p=True, masks=True)


def _replaced(original: Callable, *, log1p: bool, masks: bool) -> Callable:
    """For biased_topk_jit_kernel_impl(..) -> (weights [rows, topk] float32, ids [rows, topk] int32)."""
    in_pairs = op.triton_adds_in_pairs()

    def serve(_hidden_states, logits, bias, topk, renormalize, _scoring, _shared, factor, count, _physical, is_scaled):
        return op.router_topk(
            logits,
            bias,
            topk,
            log1p=log1p,
            renormalize=renormalize,
            scale=(factor or 1.0) if is_scaled else 1.0,
            real_rows=_count(count) if masks else None,
            in_pairs=in_pairs,
        )

    comparison = shadow.Comparison(
        tensors=lambda ours, theirs, *_, **__: [(ours[0], theirs[0]), (ours[1].float(), theirs[1].float())],
        identity=lambda hidden_states, logits, bias, *_, **__: bias.data_ptr(),
        shape=lambda hidden_states, logits, *_, **__: {"rows": logits.shape[0], "experts": logits.shape[1]},
        relative_l2=bounds.ROUTER_TOPK.shadow,
    )
    serve = shadow.shadowed(PATCH, serve, original, comparison)

    @functools.wraps(original)
    def biased_topk_jit_kernel_impl(
        hidden_states,
        gating_output,
        correction_bias,
        topk,
        renormalize,
        scoring_func="sigmoid",
        num_fused_shared_experts=0,
        routed_scaling_factor=None,
        num_token_non_padded=None,
        expert_location_dispatch_info=None,
        apply_routed_scaling_factor_on_output=False,
        *further,
        **named,
    ):
        ours = (
            scoring_func == SCORING
            and not num_fused_shared_experts
            and not further
            and not any(map(_is_given, named.values()))
            and has_few_rows(gating_output)
            and takes(gating_output, correction_bias, topk, _count(num_token_non_padded) if masks else None)
        )
        given = (hidden_states, gating_output, correction_bias, topk, renormalize, scoring_func)
        given += (num_fused_shared_experts, routed_scaling_factor, num_token_non_padded)
        given += (expert_location_dispatch_info, apply_routed_scaling_factor_on_output)
        return serve(*given) if ours else original(*given, *further, **named)

    return biased_topk_jit_kernel_impl


def has_few_rows(logits) -> bool:
    """True for a step's rows."""
    return isinstance(logits, torch.Tensor) and logits.ndim == 2 and dense_rows.are_ours(logits.shape[0])


def takes(logits, bias, topk, real_rows) -> bool:
    """Of a step's rows."""
    return op.takes(logits, bias, topk, real_rows) and device_gate.serves(logits.device)


def _count(number):
    """SGLang's number of rows, of no dimension or of one, as the operator has it."""
    return number.reshape(1) if isinstance(number, torch.Tensor) and number.numel() == 1 else number


def _is_given(value) -> bool:
    """Of a later release's arguments: more than None, False or 0."""
    return isinstance(value, torch.Tensor) or bool(value)
