"""On a card the checks run in a process of their own: one that crashes, after which CUDA answers no more, or that does
not end is a failure, and those behind it are asked in another process.

`python3 -m deepseek_v4_sm120.commands.selftest.apart FIRST QUICK REQUIRE_GPU` is such a process:

    {"begins"}    the check's number
    {"outcome"}   what came of it
    {"is_lost"}   true: CUDA answers no more in this process, which ends
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict, replace

from deepseek_v4_sm120.commands import selftest, workers
from deepseek_v4_sm120.specs.check import Check

LIMIT_S = 600.0  # of one check: whole seconds on a card that is free, but others may hold it


def outcomes(todo: Sequence[Check], quick: bool, require_gpu: bool) -> Generator[selftest.Outcome, None, None]:
    """Of each check, in their order, as soon as it is there."""
    told: list[selftest.Outcome] = []
    while len(told) < len(todo):
        has_begun = yield from _of_process(todo, told, quick, require_gpu)
        if not has_begun:  # nor would another one
            yield from (replace(told[-1], operator=check.operator, check=check.name) for check in todo[len(told) :])
            return


def _of_process(
    todo: Sequence[Check], told: list[selftest.Outcome], quick: bool, require_gpu: bool
) -> Generator[selftest.Outcome, None, bool]:
    """Outcomes of those that are not told, which they are then, until one process ends; the last one may be what ended
    it. Returns whether a check began in it."""
    first, is_running, begun = len(told), False, time.monotonic()

    def left() -> float:
        return LIMIT_S - (time.monotonic() - begun)

    def tell(outcome: selftest.Outcome) -> selftest.Outcome:
        told.append(outcome)
        return outcome

    words = [sys.executable, "-m", __name__, *map(json.dumps, (first, quick, require_gpu))]
    with tempfile.TemporaryFile() as stderr:
        process, patience = workers.start(words, stderr), 0.0  # none for one that is interrupted
        try:
            for answer in workers.answers(process, left):
                if "begins" in answer:
                    is_running, begun = True, time.monotonic()
                elif "outcome" in answer:
                    is_running, begun = False, time.monotonic()
                    yield tell(selftest.Outcome(**answer["outcome"]))
                    if answer["is_lost"] or len(told) == len(todo):
                        patience = workers.LAST_WORDS_S
                        return True
            in_time = left() > 0
            patience = workers.LAST_WORDS_S if in_time else 0.0
        finally:
            code = workers.end(process, patience)
            last = workers.last_words(stderr, code)
    has_begun = is_running or len(told) > first
    if in_time and has_begun and not is_running:  # it ended between two checks: the next process asks that one
        return True
    why = f"its process ended: {last}" if in_time else f"not at its end after {LIMIT_S:.0f} s"
    why += "" if in_time or code is not None else f"; {last}"
    check = todo[len(told)]
    yield tell(selftest.Outcome(check.operator, check.name, selftest.FAIL, why, round(LIMIT_S - left(), 3)))
    return has_begun


def _lost() -> str | None:
    """Why CUDA answers no more in this process."""
    import torch

    try:
        torch.cuda.synchronize()
    except Exception as error:  # whatever it is, this process is of no use any more
        return f"{type(error).__name__}: {error}"
    return None


def main(argv: Sequence[str]) -> int:
    first, quick, require_gpu = map(json.loads, argv)
    todo, missing = list(selftest.checks(quick)), selftest.what_is_missing(require_gpu)
    is_gone = "GPU" in missing  # which whoever started this process has seen
    missing = selftest.what_is_missing(require_gpu=True) if is_gone else missing
    for number in range(first, len(todo)):
        workers.say(begins=number)
        outcome = selftest.run_check(todo[number], missing, require_gpu)
        lost = None if is_gone else _lost()
        if lost is not None and outcome.result == selftest.PASS:  # a kernel that ended behind the answer
            outcome = replace(outcome, result=selftest.FAIL, detail=lost)
        workers.say(outcome=asdict(outcome), is_lost=lost is not None)
        if lost is not None:
            return 1
    return 0


if __name__ == "__main__":
    workers.end_with_parent()
    sys.exit(main(sys.argv[1:]))
