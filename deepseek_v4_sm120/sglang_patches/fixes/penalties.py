"""Every token of an answer counts for its penalties once, however many of them a step brings, and what else runs.

Before each decode step SGLang counts one token of each request for its frequency, presence and repetition penalties and
for min_tokens: the last one that it knows of its answer. That is not every token once:

- A step with speculation brings several, and the others are never counted (sglang #33643): with 1.8 tokens a step a
  frequency penalty has 1/1.8 of its strength, a token that is repeated may never be penalised, and the end of the
  answer is forbidden for 1.8 times min_tokens. So it is with what was answered before a request was retracted.
- With the overlap of steps, SGLang's default, the last token known is the one before the last. A prompt that is read
  between two steps lets the next one know it all: one token is left out, and the last one is counted in that step and
  again in the one behind. At the first step no token is known, and the prompt's last one is counted.

Here, behind the original, each token that is known is counted once, and the prompt's not at all. min_tokens counts the
step in flight, too: at least one token more than at the step before. A request that has not decoded since its prompt
was read has nothing counted: its state is new.

And without that overlap the penalties are applied in the order of a set of classes, which is another one in each
process: with a repetition penalty beside another one each card has logits of its own. Here the repetition's is the
last, as with the overlap.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from deepseek_v4_sm120.sglang_patches.scope import is_ours

COUNTED = "_dsv4_sm120_counted"  # of a request: the tokens of its answer that are counted
LENGTH = "_dsv4_sm120_length"  # of a request: the tokens of its answer for min_tokens, at the step before

# classes of SGLang's -> of the penalty that a token has, of the sum of them, and what is in it without a token
GIVEN = {
    "BatchedFrequencyPenalizer": ("frequency_penalties", "cumulated_frequency_penalties", 0.0),
    "BatchedPresencePenalizer": ("presence_penalties", "cumulated_presence_penalties", 0.0),
    "BatchedRepetitionPenalizer": ("repetition_penalties", "cumulated_repetition_penalties", 1.0),
}
ADDED = "BatchedFrequencyPenalizer"  # the others are there or not
LENGTHS = "BatchedMinNewTokensPenalizer"


class Changes(NamedTuple):
    """To what the original counted. Each (row, number): a token, or of how many more an answer is long."""

    left_out: list[tuple[int, int]]
    again: list[tuple[int, int]]
    never: list[tuple[int, int]]  # tokens that are none of the answer
    longer: list[tuple[int, int]]


def replace_cumulate(original: Callable) -> Callable:
    """For ScheduleBatch.cumulate_penalty_output_tokens(self), called before a decode step where a request has a
    penalty or min_tokens."""

    @functools.wraps(original)
    def cumulate_penalty_output_tokens(self):
        original(self)
        if not is_ours():
            return
        changes = changes_of(self.reqs)
        if any(changes):
            told = Changes(*(on_device(pairs, self.device) for pairs in changes))
            for penalizer in self.sampling_info.penalizer_orchestrator.penalizers.values():
                if penalizer.is_prepared():
                    change(penalizer, told)

    return cumulate_penalty_output_tokens


def replace_apply(original: Callable) -> Callable:
    """For BatchedPenalizerOrchestrator.apply(self, logits, repeat=None), of steps without overlap."""

    @functools.wraps(original)
    def apply(self, logits, repeat=None):
        if repeat is None and is_ours():
            in_order = sorted(self.penalizers, key=lambda kind: (kind.is_multiplicative, kind.__name__))
            self.penalizers = {kind: self.penalizers[kind] for kind in in_order}
        return original(self, logits, repeat)

    return apply


def changes_of(requests: Iterable) -> Changes:
    changes = Changes([], [], [], [])
    for row, request in enumerate(requests):
        if not has_penalty(request.sampling_params):
            continue
        answer, is_new = request.output_ids, not request.decode_batch_idx
        known, before = len(answer), 0 if is_new else getattr(request, COUNTED, 0)
        length = 1 + (0 if is_new else getattr(request, LENGTH, 0))  # the original's
        if not known:
            changes.never.append((row, request.origin_input_ids[-1]))
        elif known == before:
            changes.again.append((row, answer[-1]))
        changes.left_out.extend((row, token) for token in answer[before:-1])
        if known > length:
            changes.longer.append((row, known - length))
        setattr(request, COUNTED, known)
        setattr(request, LENGTH, max(known, length))
    return changes


def has_penalty(params) -> bool:
    penalties = params.frequency_penalty or params.presence_penalty or params.min_new_tokens
    return bool(penalties) or params.repetition_penalty != 1.0


def on_device(pairs: list[tuple[int, int]], device: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not pairs:
        return None
    pinned = torch.device(device).type == "cuda"
    rows, numbers = torch.tensor(list(zip(*pairs, strict=True)), pin_memory=pinned).to(device, non_blocking=True)
    return rows, numbers


def change(penalizer, told: Changes) -> None:
    """told: each (rows, numbers) [pairs] int64, or None."""
    kind = type(penalizer).__name__
    if kind == LENGTHS and told.longer:
        rows, more = told.longer
        penalizer.len_output_tokens.index_add_(0, rows, more[:, None].to(penalizer.len_output_tokens.dtype))
    elif kind in GIVEN:
        given, cumulated = (getattr(penalizer, name) for name in GIVEN[kind][:2])
        if told.left_out:
            rows, tokens = told.left_out
            cumulated.index_put_((rows, tokens), given[rows, 0], accumulate=kind == ADDED)
        if told.again and kind == ADDED:
            rows, tokens = told.again
            cumulated.index_put_((rows, tokens), -given[rows, 0], accumulate=True)
        if told.never:
            cumulated[told.never] = GIVEN[kind][2]
