"""Whether an answer is what was asked for: so many tokens, an end for that reason, a log-probability for each.

What is there and wrong is a fault of the server under test. What is missing, or was given up by the server itself,
lets nothing be judged: NotWhole. Of a reference both are NotWhole, as nothing can be judged by it. And answers that are
whole may still say nothing: a token again and again, or one answer to different prompts, is equal on any two servers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench.serving.answers import Answer
from bench.serving.server_errors import ServerError

MAX_CYCLE = 4  # tokens: a shorter or equal stretch that repeats itself to the end is a stuck answer
MAX_EMPTY_SHARE = 0.25  # of the prompts, whose answers may say nothing
FLAT = 8  # best tokens that are all as likely to the bit: logits that nobody has written
ROUNDING = 1e-3  # a log-probability may be above 0 by that


class NotWhole(ServerError):
    """An answer lacks what was asked for, so that nothing can be judged by it."""


def demand_end(answer: Answer, where: str) -> None:
    """Raise NotWhole where the server itself gave the answer up, or does not say how it ended."""
    if answer.finish == "abort":
        raise NotWhole(f"{where}: the server aborted the request: {answer.finish_message or 'it does not say why'}")
    if answer.finish is None:
        raise NotWhole(f"{where}: the answer has no finish_reason")


def length_faults(answer: Answer, new: int, where: str) -> list[str]:
    """Of an answer to `new` tokens with ignore_eos: it ends at that length and nowhere else."""
    demand_end(answer, where)
    found = []
    if len(answer.ids) != new:
        found.append(f"{where}: {len(answer.ids)} tokens where {new} were asked for (finish_reason {answer.finish!r})")
    elif answer.finish != "length":
        found.append(f"{where}: finish_reason {answer.finish!r} where 'length' must end {new} tokens with ignore_eos")
    elif answer.completion_tokens not in (None, new):
        found.append(f"{where}: {new} tokens, of which the server counts {answer.completion_tokens}")
    return found


def _number_fault(number: float) -> str:
    """What is wrong with a log-probability, "" if nothing."""
    if not math.isfinite(number):
        return f"{number} (null and NaN in JSON) is no log-probability"
    return f"{number:.4g} is no log-probability: it is above 0" if number > ROUNDING else ""


def logprob_faults(answer: Answer, where: str) -> list[str]:
    """Of the chosen tokens' log-probabilities, which were asked for."""
    if len(answer.logprobs) < len(answer.ids):
        raise NotWhole(f"{where}: {len(answer.logprobs)} log-probabilities for {len(answer.ids)} tokens")
    if answer.logprob_ids != answer.ids:
        return [f"{where}: the log-probabilities are of other tokens than the answer's"]
    wrong = [(place, said) for place, one in enumerate(answer.logprobs) if (said := _number_fault(one))]
    return [f"{where}, output position {place}: {said}" for place, said in wrong[:1]]


def top_faults(answer: Answer, top: int, where: str) -> list[str]:
    """Of the `top` best of each position, which were asked for: as many, best first, of different tokens, not all as
    likely, and the chosen one among them as likely as it is said to be.
    """
    if len(answer.tops) < len(answer.ids):
        raise NotWhole(f"{where}: the {top} best tokens of {len(answer.tops)} of {len(answer.ids)} positions")
    found = []
    for place, step in enumerate(answer.tops):
        here, numbers = f"{where}, output position {place}", [logprob for logprob, _ in step]
        if len(step) < top:
            raise NotWhole(f"{here}: {len(step)} best tokens where {top} were asked for")
        if said := next(filter(None, map(_number_fault, numbers)), ""):
            found.append(f"{here}: {said}")
        elif len(step) > top or len({token for _, token in step}) < len(step):
            found.append(f"{here}: the {top} best tokens repeat a token, or are more than asked for")
        elif any(first < second for first, second in zip(numbers, numbers[1:], strict=False)):
            found.append(f"{here}: the {top} best tokens do not stand best first")
        elif len(step) >= FLAT and numbers[0] == numbers[-1]:
            found.append(f"{here}: the {top} best tokens are all as likely, {numbers[0]:.4f}")
        elif place < len(answer.logprobs) and (said := _other_number(answer, place)):
            found.append(f"{here}: {said}")
    return found[:1]


def _other_number(answer: Answer, place: int) -> str:
    """Where the chosen token stands among the best with another log-probability than its own, "" where it does not."""
    chosen, own = answer.ids[place], answer.logprobs[place]
    listed = next((logprob for logprob, token in answer.tops[place] if token == chosen), own)
    if abs(listed - own) <= ROUNDING:
        return ""
    return f"token {chosen} has log-probability {own:.4f}, and {listed:.4f} among the best"


def faults(answer: Answer, new: int, where: str, logprobs: bool = False, top: int = 0) -> list[str]:
    """What is wrong with an answer of the server under test to `new` tokens with ignore_eos. NotWhole: see above."""
    found = length_faults(answer, new, where)
    if not found and logprobs:
        found = logprob_faults(answer, where)
    if not found and top:
        found = top_faults(answer, top, where)
    return found


def demand(answer: Answer, new: int, where: str, logprobs: bool = False, top: int = 0) -> None:
    """Raise NotWhole unless a reference's answer is what was asked for."""
    if found := faults(answer, new, where, logprobs, top):
        raise NotWhole(f"nothing can be judged by this reference: {found[0]}")


def is_stuck(ids: Sequence[int]) -> bool:
    """Whether the second half of an answer is one stretch of at most MAX_CYCLE tokens again and again."""
    tail = ids[len(ids) // 2 :]
    return any(
        len(tail) >= 3 * size and all(a == b for a, b in zip(tail, tail[size:], strict=False))
        for size in range(1, MAX_CYCLE + 1)
    )


def says_nothing(answers: Sequence[Sequence[int]]) -> str:
    """Why answers (token ids, each to another prompt) would be equal on any two servers, "" if they would not."""
    stuck = sum(map(is_stuck, answers))
    same = len(answers) - len({tuple(ids) for ids in answers})
    if stuck + same <= MAX_EMPTY_SHARE * len(answers):
        return ""
    return (
        f"these answers say nothing: of {len(answers)}, {stuck} repeat at most {MAX_CYCLE} tokens to their end and "
        f"{same} are the same as another prompt's; such answers are equal on any two servers"
    )
