"""Where a step brings several tokens, the first of them that ends the answer ends it, as without drafts.

With speculation SGLang asks of all tokens of a step at once whether the answer ends: for its strings (`stop`) in the
order in which the request names them, then for its patterns (`stop_regex`), then for ends and `stop_token_ids`; up to
0.5.17 for `max_tokens` first, and from 0.5.18 on a stop behind `max_tokens` counts as its length. Whatever is found so
ends the answer, although another one is in front of it. With `"stop": ["\\n", ".", ","]` an answer of " Paris, France."
ends at the point, where " Paris" is what a server without drafts answers; and what is behind the end of the answer is
told where a stop follows in the same step. vLLM had the first (#49391, mended there); of SGLang's (#31599) the last
was mended in 0.5.18.

Here a step that ends the answer is asked again, token by token; where a pattern is asked for, each step: one that holds
behind a token in the middle may hold no longer behind the last one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import is_ours


def replace_update(original: Callable) -> Callable:
    """For Req.update_finish_state(self, new_accepted_len=1), behind the step whose tokens are the answer's last."""
    return asked_again(original, lambda params: params.stop_regex_strs)


def replace_older_update(original: Callable) -> Callable:
    """The same up to 0.5.13, where a string is looked for in so many of the last tokens as it has characters: in a
    longer step it may be in front of them (sglang #23802 mended it). 0.5.12 calls it check_finished."""
    return asked_again(original, lambda params: params.stop_regex_strs or params.stop_strs)


def asked_again(original: Callable, is_unsure: Callable) -> Callable:
    """is_unsure(a request's sampling_params): whether a step may have ended the answer that seems not to."""

    @functools.wraps(original)
    def update_finish_state(self, new_accepted_len=1):
        if new_accepted_len < 2 or self.finished() or self.to_finish or not is_ours():
            return original(self, new_accepted_len)
        step = self.output_ids[-new_accepted_len:]
        original(self, new_accepted_len)
        if self.finished() or is_unsure(self.sampling_params):
            end_at_the_first(self, step, original)

    return update_finish_state


def end_at_the_first(request, step, original: Callable) -> None:
    """step: its tokens, as they were drawn. A grammar has taken them all by now, and ends with the last one if at all:
    the others do not know of it."""
    request.finished_reason = request.finished_len = None
    grammar, request.grammar = request.grammar, None
    del request.output_ids[-len(step) :]
    for left, token in zip(reversed(range(len(step))), step, strict=True):
        request.output_ids.append(token)
        if not left:
            request.grammar = grammar
        original(request, 1)  # nothing, once it has ended
        if request.finished() and request.finished_len is None:
            request.finished_len = len(request.output_ids)
