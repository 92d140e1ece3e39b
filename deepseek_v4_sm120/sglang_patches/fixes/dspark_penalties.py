"""Penalties and min_tokens hold for requests whose drafts DSPARK verifies.

A request's frequency, presence and repetition penalties and its min_tokens are sums over its answer that are added to
its logits. With DSPARK nobody counts the answer's tokens, and the adjustment of the verified logits asks for the sums
by a name that nothing has (sglang #33493, #28242): they are left out from the second token on, and nothing says so.

Here the tokens are counted before each step, where EAGLE counts them, and the sums are put on each row of a request's
block, as EAGLE's verification does. A step of such a request decides on the adjusted logits, outside of the graph: the
way of a logit_bias. Within a block a token does not know of the ones before it, as with EAGLE.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch

from deepseek_v4_sm120.sglang_patches.scope import is_ours


def replace_prepare_for_decode(original: Callable) -> Callable:
    """For DFlashDraftInputV2.prepare_for_decode(self, batch), which counts the batch's steps: what is counted of the
    answers is counted before."""

    @functools.wraps(original)
    def prepare_for_decode(self, batch):
        if batch.sampling_info.penalizer_orchestrator.is_required and is_ours():
            batch.cumulate_penalty_output_tokens()
        return original(self, batch)

    return prepare_for_decode


def replace_are_noop(original: Callable) -> Callable:
    """For verify_logits_adjustments_are_noop(sampling_info): whether the logits of a graph may be decided on in it."""

    @functools.wraps(original)
    def verify_logits_adjustments_are_noop(sampling_info):
        return original(sampling_info) and not (is_penalised(sampling_info) and is_ours())

    return verify_logits_adjustments_are_noop


def replace_adjustments(original: Callable) -> Callable:
    """For apply_dflash_verify_logits_adjustments(next_token_logits [requests * width, vocabulary], sampling_info,
    draft_token_num), in place. It is told of no sums: in one case it would add them itself."""

    @functools.wraps(original)
    def apply_dflash_verify_logits_adjustments(*, next_token_logits, sampling_info, draft_token_num):
        if is_penalised(sampling_info) and is_ours():
            added, scaled = sampling_info.acc_additive_penalties, sampling_info.acc_scaling_penalties
            penalise(next_token_logits.unflatten(0, (-1, draft_token_num)), added, scaled)
            sampling_info = dataclasses.replace(sampling_info, acc_additive_penalties=None, acc_scaling_penalties=None)
        return original(
            next_token_logits=next_token_logits, sampling_info=sampling_info, draft_token_num=draft_token_num
        )

    return apply_dflash_verify_logits_adjustments


def is_penalised(sampling_info) -> bool:
    """Whether a request of the batch has a sum: None where SGLang has no requests."""
    return sampling_info is not None and not (
        sampling_info.acc_additive_penalties is None and sampling_info.acc_scaling_penalties is None
    )


def penalise(logits: torch.Tensor, added: torch.Tensor | None, scaled: torch.Tensor | None) -> None:
    """In place, in SGLang's order. logits: [requests, width, vocabulary]; added, scaled: [requests, vocabulary]. By
    rows of a block, as what is computed meanwhile has the size of all that it is computed for."""
    for rows in logits.unbind(1):
        if added is not None:
            rows.add_(added)
        if scaled is not None:
            rows.copy_(torch.where(rows < 0, rows * scaled, rows / scaled))
