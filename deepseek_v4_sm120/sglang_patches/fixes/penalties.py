"""Every token of an answer counts for its penalties once, however many of them a step brings.

Before each decode step SGLang counts one token of each request for its frequency, presence and repetition penalties and
for min_tokens: the last one of its answer. A step with speculation brings several, and the others are never counted
(sglang #33643): with 1.8 tokens a step a frequency penalty has 1/1.8 of its strength, a token that is repeated may
never be penalised, and the end of the answer is forbidden for 1.8 times min_tokens. So it is with what was answered
before a request was retracted, with speculation and without: its penalties begin from nothing.

Here the others are counted, too, behind the original: those between what was counted before and the last one. A request
that has not decoded since its prompt was read has nothing counted: its state is new.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from deepseek_v4_sm120.sglang_patches.scope import is_ours

COUNTED = "_dsv4_sm120_counted"  # of a request: the tokens of its answer that are counted

# classes of SGLang's -> of the penalty that a token has, and of the sum of them
GIVEN = {
    "BatchedFrequencyPenalizer": ("frequency_penalties", "cumulated_frequency_penalties"),
    "BatchedPresencePenalizer": ("presence_penalties", "cumulated_presence_penalties"),
    "BatchedRepetitionPenalizer": ("repetition_penalties", "cumulated_repetition_penalties"),
}
ADDED = "BatchedFrequencyPenalizer"  # the others are there or not
LENGTHS = "BatchedMinNewTokensPenalizer"


def replace_cumulate(original: Callable) -> Callable:
    """For ScheduleBatch.cumulate_penalty_output_tokens(self), called before a decode step where a request has a
    penalty or min_tokens."""

    @functools.wraps(original)
    def cumulate_penalty_output_tokens(self):
        original(self)
        if not is_ours():
            return
        left_out = list(tokens_left_out(self.reqs))
        if left_out:
            pinned = torch.device(self.device).type == "cuda"
            told = torch.tensor(list(zip(*left_out, strict=True)), pin_memory=pinned)
            rows, tokens = told.to(self.device, non_blocking=True)
            for penalizer in self.sampling_info.penalizer_orchestrator.penalizers.values():
                if penalizer.is_prepared():
                    count(penalizer, rows, tokens)

    return cumulate_penalty_output_tokens


def tokens_left_out(requests) -> Iterator[tuple[int, int]]:
    """(row, token) of all tokens that are in the answers and not counted, but for each one's last, the original's."""
    for row, request in enumerate(requests):
        if has_penalty(request.sampling_params):
            start = getattr(request, COUNTED, 0) if request.decode_batch_idx else 0
            yield from ((row, token) for token in request.output_ids[start:-1])
            setattr(request, COUNTED, len(request.output_ids))


def has_penalty(params) -> bool:
    penalties = params.frequency_penalty or params.presence_penalty or params.min_new_tokens
    return bool(penalties) or params.repetition_penalty != 1.0


def count(penalizer, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    """What the penalizer does with a token of each request, for these alone. rows, tokens: [tokens] int64."""
    kind = type(penalizer).__name__
    if kind == LENGTHS:
        penalizer.len_output_tokens.index_add_(0, rows, penalizer.len_output_tokens.new_ones(len(rows), 1))
    elif kind in GIVEN:
        given, cumulated = (getattr(penalizer, name) for name in GIVEN[kind])
        cumulated.index_put_((rows, tokens), given[rows, 0], accumulate=kind == ADDED)
