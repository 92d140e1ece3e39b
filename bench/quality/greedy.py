"""Greedy answers next to each other: where they part, and whether that was a tie.

Two right servers may part where the two best tokens are as likely as each other: logits in bf16 have a step of 0.125
at 16 to 32, so a difference of one step is rounding. Such a place is a tie, is stated with both log-probabilities,
and is no fault. Anything wider is one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.quality import whole
from bench.serving.answers import Answer
from bench.serving.endpoint import Endpoint
from bench.serving.prompts import PromptSource
from bench.serving.server_errors import ServerRefused

TIE = 0.125  # one step of a bf16 logit between 16 and 32, in natural logarithms
TOP = 20
AS_WIDE = 3.0  # times the widest that a server was seen to differ by from itself: the next may be so wide


@dataclass(frozen=True)
class Divergence:
    """The first place where two answers part. Log-probabilities by `judge`, None: not among its best `TOP`."""

    prompt: int
    position: int
    first_id: int | None
    second_id: int | None
    first_logprob: float | None
    second_logprob: float | None
    tie: bool

    @property
    def gap(self) -> float:
        """By how much `judge` holds one of the two for likelier; infinite where it has one not among its best."""
        known = None not in (self.first_logprob, self.second_logprob)
        return abs(self.first_logprob - self.second_logprob) if known else math.inf

    def text(self, first: str, second: str) -> str:
        def value(number: float | None) -> str:
            return f"below the best {TOP}" if number is None else f"{number:.4f}"

        return (
            f"prompt {self.prompt}, output position {self.position}: {first} chose {self.first_id} "
            f"({value(self.first_logprob)}), {second} chose {self.second_id} ({value(self.second_logprob)})"
            + (" - a tie" if self.tie else "")
        )


def prompts_for(endpoint: Endpoint, kind: str, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Token ids of prompts of these lengths, all different. `text` uses the server's tokenizer."""
    source = PromptSource(kind, endpoint.tokenize)
    return [source.ids(length, seed * 1000 + index) for index, length in enumerate(lengths)]


def forget(endpoint: Endpoint) -> None:
    """Empty the prefix cache where the server lets us: a reused prefix is another way of computing the same."""
    with contextlib.suppress(ServerRefused):
        endpoint.flush_cache()


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """The first position where the sequences differ (also where one ends), None where they are equal."""
    for position, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return position
    return None if len(first) == len(second) else min(len(first), len(second))


def judge(endpoint: Endpoint, context: Sequence[int], first: int, second: int, tie: float) -> tuple:
    """(log-probability of each of two tokens after `context` by `endpoint`, whether they tie). One token is decoded,
    with an emptied cache: a prefix that is wrong must not judge itself. NotWhole: the server does not give its `TOP`
    best.
    """
    forget(endpoint)
    answer = endpoint.generate(context, 1, top=TOP, ignore_eos=True)
    whole.demand(answer, 1, f"{endpoint.url}, asked which token is likelier", logprobs=True, top=TOP)
    return weigh(answer.tops[0], first, second, tie)


def weigh(tops: Sequence[tuple[float, int]], first: int, second: int, tie: float) -> tuple:
    """`judge`, where the best (log-probability, id) of that context are known."""
    best = {token: logprob for logprob, token in tops}
    a, b = best.get(first), best.get(second)
    # both among the best is not enough: they must be the best, else both servers chose badly
    tied = a is not None and b is not None and abs(a - b) <= tie and max(best.values()) - min(a, b) <= tie
    return a, b, tied


def logprob_difference(first: Answer, second: Answer) -> float:
    """The greatest difference of the chosen tokens' log-probabilities as far as the texts agree."""
    end = first_difference(first.ids, second.ids)
    pairs = list(zip(first.logprobs, second.logprobs, strict=True))[:end]
    return max((abs(a - b) for a, b in pairs), default=0.0)


def own_difference(first: Answer, second: Answer) -> float:
    """By how much a server that was asked the same twice differs from itself: as logprob_difference, or, where the two
    part, by how much each held its own token for likelier, together; infinite where one has the other's not among its
    best, or they were not told."""
    widest, place = logprob_difference(first, second), first_difference(first.ids, second.ids)
    if place is None:
        return widest
    if place >= min(map(len, (first.ids, second.ids, first.tops, second.tops))):
        return math.inf
    return max(widest, moved((first.tops[place], second.tops[place]), first.ids[place], second.ids[place]))


def moved(lists: Sequence[Sequence[tuple[float, int]]], first: int, second: int) -> float:
    """By how much two lists of the best hold one of two tokens for likelier, together; infinite where one lacks one."""
    weighed = [weigh(tops, first, second, 0.0)[:2] for tops in lists]
    return sum(math.inf if None in pair else abs(pair[0] - pair[1]) for pair in weighed)


def is_own(endpoint: Endpoint, prompt: Sequence[int], new: int, place: Divergence) -> bool:
    """Whether a server may have made a difference by itself: asked twice with an emptied cache it differs by no less
    than an AS_WIDEth (own_difference). NotWhole: as `judge`."""
    if place.gap == math.inf:
        return False
    answers = []
    for _ in range(2):
        forget(endpoint)
        answers.append(endpoint.generate(prompt, new, top=TOP, ignore_eos=True))
        whole.demand(answers[-1], new, f"{endpoint.url}, asked once more", logprobs=True, top=TOP)
    return place.gap <= AS_WIDE * own_difference(*answers)


def divergence(
    judge_endpoint: Endpoint | None, index: int, prompt: Sequence[int], first: Answer, second: Answer, tie: float
) -> Divergence | None:
    """Where two answers to one prompt part, judged by a third look at that very context, or without a server to ask by
    what the first answer had among its best there; None: equal."""
    position = first_difference(first.ids, second.ids)
    if position is None:
        return None
    ids = [answer.ids[position] if position < len(answer.ids) else None for answer in (first, second)]
    if None in ids:  # one has ended: no second token to weigh
        return Divergence(index, position, *ids, None, None, False)
    if judge_endpoint is None:
        return Divergence(index, position, *ids, *weigh(first.tops[position], *ids, tie))
    return Divergence(index, position, *ids, *judge(judge_endpoint, [*prompt, *first.ids[:position]], *ids, tie))
