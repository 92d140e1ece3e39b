"""With drafts min_tokens forbids the end of an answer as long as without them, and no token longer.

A request's min_tokens takes the ends from its logits until so many tokens are there. Where drafts are verified SGLang
does so by one count for all rows of a block, and by what it knew of the answer when the step was prepared: with the
overlap of steps, its default, that is a step ago. A row far into the block may stand behind min_tokens, and a whole
block does where the step in flight brought what was missing: the end is forbidden there, too, and the answer goes on
with what the model finds second best.

Here each row of a block is judged by its own place: by the verified length, which the GPU knows, and the prompt's,
which a retraction does not change. The count of SGLang's forbids nothing then.

From 0.5.19 on answers with drafts may run beside a prompt's chunk (--enable-mixed-chunk), where their token is drawn
by that count. There it is the number of tokens that the host knows: it may lack those of a step, and forbid as much
longer, but not shorter.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable

import torch

from deepseek_v4_sm120.sglang_patches.fixes.penalties import LENGTHS
from deepseek_v4_sm120.sglang_patches.scope import is_ours


def replace_cumulate(original: Callable) -> Callable:
    """For ScheduleBatch.cumulate_penalty_output_tokens(self), called before a decode step."""

    @functools.wraps(original)
    def cumulate_penalty_output_tokens(self):
        original(self)
        if is_ours() and is_verified(self.spec_algorithm):
            for penalizer in counts_of(self):
                penalizer.len_output_tokens = torch.maximum(penalizer.len_output_tokens, penalizer.min_new_tokens)

    return cumulate_penalty_output_tokens


def replace_mix(original: Callable) -> Callable:
    """For ScheduleBatch.mix_with_running(self, running_batch), whose counts become the pass's."""

    @functools.wraps(original)
    def mix_with_running(self, running_batch):
        if is_ours() and is_verified(running_batch.spec_algorithm):
            for penalizer in counts_of(running_batch):
                counted = penalizer.len_output_tokens
                known = [[len(request.output_ids)] for request in running_batch.reqs]
                made = torch.tensor(known, dtype=counted.dtype, pin_memory=counted.device.type == "cuda")
                penalizer.len_output_tokens = made.to(counted.device, non_blocking=True)
        return original(self, running_batch)

    return mix_with_running


def replace_eagle_sample(original: Callable) -> Callable:
    """For eagle_sample(verify_input, batch, logits_output, ..), in front of penalties and grammars."""

    @functools.wraps(original)
    def eagle_sample(verify_input, batch, logits_output, *args, **kwargs):
        early = early_ends(batch.reqs) if is_ours() else []
        if early:
            forbid(early, logits_output.next_token_logits, verify_input.positions.view(len(batch.reqs), -1))
        return original(verify_input, batch, logits_output, *args, **kwargs)

    return eagle_sample


def replace_run_non_compact(original: Callable) -> Callable:
    """For TargetVerifyExecutor.run_non_compact(self, *, batch, ..) -> a result with the logits of all blocks, which
    decides for such a batch outside of the graph (dspark_penalties.py)."""

    @functools.wraps(original)
    def run_non_compact(self, *, batch, **given):
        result = original(self, batch=batch, **given)
        forbid_in_blocks(batch, result)
        return result

    return run_non_compact


def replace_run_compact(original: Callable) -> Callable:
    """For TargetVerifyExecutor.run_compact(self, *, batch, ..) -> (the same, hidden states)."""

    @functools.wraps(original)
    def run_compact(self, *, batch, **given):
        result, hidden = original(self, batch=batch, **given)
        forbid_in_blocks(batch, result)
        return result, hidden

    return run_compact


def counts_of(batch) -> list:
    """SGLang's penalizers that count for min_tokens, where a request has it."""
    found = batch.sampling_info.penalizer_orchestrator.penalizers.values()
    return [penalizer for penalizer in found if type(penalizer).__name__ == LENGTHS and penalizer.is_prepared()]


def is_verified(algorithm) -> bool:
    """Whether what a batch says is verified by one of the functions above."""
    is_dspark = getattr(algorithm, "is_dspark", None)  # 0.5.16 and later
    return algorithm.is_eagle() or (is_dspark is not None and is_dspark())


def forbid_in_blocks(batch, result) -> None:
    early = early_ends(batch.reqs) if is_ours() else []
    if early:
        logits = result.logits_output.next_token_logits
        width = torch.arange(len(logits) // len(batch.reqs), device=logits.device)
        forbid(early, logits, batch.seq_lens[:, None] + width)


def early_ends(requests: Iterable) -> list[tuple[int, int, int]]:
    """(row, an end's token, the first position whose row may say it) of requests that may be too short; that one is
    long enough is known a step late, which costs nothing."""
    found = []
    for row, request in enumerate(requests):
        least = request.sampling_params.min_new_tokens
        if len(request.output_ids) < least:
            first = len(request.origin_input_ids) + least - 1  # its row says the token behind min_tokens others
            found.extend((row, token, first) for token in ends_of(request))
    return found


def ends_of(request) -> set[int]:
    """What SGLang takes for the end of an answer."""
    tokenizer = request.tokenizer
    ends = set(request.sampling_params.stop_token_ids or ()) | set(request.eos_token_ids or ())
    if tokenizer is not None:
        ends |= {*(tokenizer.additional_stop_token_ids or ()), tokenizer.eos_token_id}
    return ends - {None}


def forbid(early: list[tuple[int, int, int]], logits: torch.Tensor, positions: torch.Tensor) -> None:
    """In place. logits: [requests * width, vocabulary]; positions: [requests, width]. The host does not wait."""
    pinned = logits.device.type == "cuda"
    rows, tokens, first = torch.tensor(early, pin_memory=pinned).to(logits.device, non_blocking=True).unbind(1)
    blocks, is_early = logits.unflatten(0, positions.shape), positions[rows] < first[:, None]
    blocks[rows, :, tokens] = blocks[rows, :, tokens].masked_fill(is_early, -math.inf)
