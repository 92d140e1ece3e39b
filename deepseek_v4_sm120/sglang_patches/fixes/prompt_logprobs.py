"""Log-probabilities are those of a request's own tokens, where one of the same pass was retracted meanwhile.

A pass over several prompts gives the log-probabilities of their tokens in one row, which the scheduler deals out by
counting. With the overlap of steps, SGLang's default, a request may be retracted before that: the step behind is
planned first, and where the KV cache has no room for it, those with the fewest tokens go, which are the ones just read.
Such a request is passed over, and what it has in the row is not: all behind it in the pass get the numbers of others,
and nothing says so (sglang #36938, open).

Here what was passed over is counted. And up to 0.5.18 the log-probability of such a request's first token is taken for
sent, which it is not: all that it is answered later are those of the tokens behind, and the last one is missing (sglang
#26510 mended it). Nothing is done in passes that nobody asked log-probabilities of.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from deepseek_v4_sm120.sglang_patches.scope import is_ours


class OfPass:
    """Of the pass whose results are dealt out: (place, how many log-probabilities) of each request passed over."""

    passed_over: tuple[tuple[int, int], ...] = ()


of_pass = OfPass()


def replace_process(original: Callable) -> Callable:
    """For SchedulerBatchResultProcessor.process_batch_result_prefill(self, batch, result)."""

    @functools.wraps(original)
    def process_batch_result_prefill(self, batch, result):
        if not (batch.return_logprob and any(map(is_passed_over, batch.reqs)) and is_ours()):
            return original(self, batch, result)
        of_pass.passed_over = tuple(passed_over(self.logprob_result_processor, batch.reqs, result))
        try:
            return original(self, batch, result)
        finally:
            of_pass.passed_over = ()
            for request in batch.reqs:
                if request.is_retracted:
                    sent = min(request.send_output_token_logprobs_offset, len(request.output_ids))
                    request.send_output_token_logprobs_offset = sent

    return process_batch_result_prefill


def replace_apply(original: Callable) -> Callable:
    """For _apply_prefill_logprobs and _apply_chunked_prefill_logprobs(self, *, i, logprob_pt, ..) -> where the next
    request's begin. i: the request's place in the pass."""

    @functools.wraps(original)
    def apply(self, **kwargs):
        skipped = sum(number for place, number in of_pass.passed_over if place < kwargs["i"])
        return original(self, **kwargs | {"logprob_pt": kwargs["logprob_pt"] + skipped}) - skipped

    return apply


def is_passed_over(request) -> bool:
    return request.is_retracted or (request.finished() and request.inflight_middle_chunks <= 0)


def passed_over(processor, requests, result) -> Iterator[tuple[int, int]]:
    lengths, starts = result.extend_input_len_per_req, result.extend_logprob_start_len_per_req
    for place, (request, length, start) in enumerate(zip(requests, lengths, starts, strict=True)):
        if is_passed_over(request):
            yield place, processor.calculate_num_input_logprobs(request, length, start)
