"""A prompt's log-probabilities are made in pieces of its rows, so that a long one does not end the server.

Up to 0.5.15 SGLang makes them of all rows of a pass at once, [rows, vocabulary] in float32 and twice: 8.5 GB of 8,192
rows, which a card that is filled by its KV cache does not have, and the server ends for all. It has a way in pieces of
2,048, off by default (SGLANG_ENABLE_LOGITS_PROCESSER_CHUNK), which counts requests wrongly where one ends in a piece:
alternatives are told twice, and those of others. 0.5.16 mended it and has it on (sglang #31498).

Here the pieces are on, and each goes through SGLang's own process_input_logprobs, told how many rows of it are whose;
what it answers is put together by request.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable

import torch

from deepseek_v4_sm120.sglang_patches.scope import is_ours

LISTS = [f"input_{of}_logprobs_{what}" for of in ("top", "token_ids") for what in ("val", "idx")]  # an entry a request


def replace_init(original: Callable) -> Callable:
    """For LogitsProcessor.__init__(self, config, ..)."""

    @functools.wraps(original)
    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if is_ours():
            self.enable_logprobs_chunk = True

    return init


def replace_by_chunk(original: Callable) -> Callable:
    """For LogitsProcessor.process_input_logprobs_by_chunk(self, pruned_states [rows, hidden], sample_indices,
    input_logprob_indices, token_to_seq_idx, lm_head, logits_metadata) -> InputLogprobsResult, and the logits
    [requests, vocabulary] of each request's last row. A request has a row for each log-probability, one at least."""

    @functools.wraps(original)
    def process_input_logprobs_by_chunk(self, pruned_states, *indices_and_head):
        *_, lm_head, metadata = indices_and_head
        if hasattr(lm_head, "set_lm_head_pass") or not is_ours():  # an adapter that counts SGLang's own pieces
            return original(self, pruned_states, *indices_and_head)
        ends = list(itertools.accumulate(max(asked, 1) for asked in metadata.extend_logprob_pruned_lens_cpu))
        token_ids, results, sampled = metadata.extend_input_logprob_token_ids_gpu, [], []
        for begin in range(0, ends[-1], self.logprobs_chunk_size):
            piece = range(begin, min(begin + self.logprobs_chunk_size, ends[-1]))
            result, last = _of_piece(self, pruned_states, lm_head, metadata, ends, piece, token_ids)
            sampled.append(last)
            if result is not None:
                results.append(result)
                token_ids = token_ids[len(result.input_token_logprobs) :]
        return _joined(results), torch.cat(sampled)

    return process_input_logprobs_by_chunk


def _of_piece(processor, states, lm_head, metadata, ends: list[int], piece: range, token_ids):
    """The log-probabilities of the piece's rows, None of none, and the logits of those that are a request's last."""
    logits = processor._get_logits(states[piece.start : piece.stop], lm_head, metadata)
    last = logits[[end - 1 - piece.start for end in ends if end - 1 in piece]]
    numbers, unasked = [], []
    for asked, begin, end in zip(metadata.extend_logprob_pruned_lens_cpu, [0, *ends], ends, strict=False):
        rows = len(range(max(begin, piece.start), min(end, piece.stop)))
        numbers.append(rows if asked else 0)
        unasked += [begin - piece.start] if rows and not asked else []
    if not any(numbers):
        return None, last
    if unasked:
        logits = logits[[row for row in range(len(piece)) if row not in unasked]]
    of_piece = copy.copy(metadata)
    of_piece.extend_logprob_pruned_lens_cpu = numbers
    of_piece.extend_input_logprob_token_ids_gpu = token_ids[: sum(numbers)]
    return processor.process_input_logprobs(logits, of_piece), last


def _joined(results):
    """One result of the pieces': the lists of each request behind each other."""
    joined = {"input_token_logprobs": torch.cat([result.input_token_logprobs for result in results])}
    for name in LISTS:
        of_pieces = [getattr(result, name) for result in results]
        if of_pieces[0] is not None:
            joined[name] = [list(itertools.chain(*parts)) for parts in zip(*of_pieces, strict=True)]
    return dataclasses.replace(results[0], **joined)
