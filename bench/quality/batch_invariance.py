"""Gate 3: one prompt alone, and the same prompt among 31 others, must get the same answer, with the same
log-probabilities.

A server that passes gives a user the same text whatever else it is doing. Stock kernels do not promise that: they may
choose other splits for other batches. Parting at a tie is stated and, unless --strict, is no fault. A prompt that is
answered otherwise when it is asked alone twice, by a third as much in a log-probability or where two tokens part, shows
that this is not company's doing: INCOMPLETE, unless --strict.

The others are streamed: the prompt is sent when each has its first token, and none may have its last before the prompt
has its own. A server that runs fewer at once leaves the gate incomplete. Half of them are sampled (`--sampled`): as
SGLang comes, one such request has the greedy ones beside it sampled, too, so that of equal logits any may be chosen. A
server that answers them as if they were greedy has sampled nothing beside the prompt, and leaves the gate incomplete.
Those that are not sampled, of the first prompt's company, are asked alone as well: a place in the batch may be wrong
that the prompt never had.
"""

from __future__ import annotations

import argparse
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from bench.quality import greedy, in_flight, whole
from bench.quality.verdict import Verdict, at_least, endpoint_of
from bench.serving.answers import Answer
from bench.serving.endpoint import Endpoint, Interval

NAME = "batch-invariance"
TEMPERATURE = 1.0  # of those that are sampled
LONGER = 4  # times as many tokens are asked of the others, so that they are still at work when the prompt's answer ends


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--others", type=int, default=31)
    parser.add_argument("--sampled", type=int, help="of the others, with a temperature (default: half of them)")
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--length", type=int, default=200)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument(
        "--strict", action="store_true", help="also a tie, or any difference of a log-probability, is a fault"
    )


def among_others(
    endpoint: Endpoint, prompt: list[int], others: list[list[int]], new: int, top: int, sampled: int
) -> tuple[Answer, list[Answer], int]:
    """(the answer to `prompt` asked while `others` are being decoded, the first `sampled` of them with a temperature;
    theirs; how many of them ran all the while)."""
    news, begun, ended = threading.Condition(), set(), []

    def other(index: int) -> tuple[Answer, Interval]:
        def arrived() -> None:
            with news:
                begun.add(index)
                news.notify_all()

        try:
            temperature = TEMPERATURE if index < sampled else 0.0
            return endpoint.stream(
                others[index], LONGER * new, ignore_eos=True, on_token=arrived, temperature=temperature
            )
        finally:
            with news:
                ended.append(index)
                news.notify_all()

    with ThreadPoolExecutor(max_workers=len(others)) as pool:
        waiting = [pool.submit(other, index) for index in range(len(others))]
        with news:  # one that has ended before all have begun: they do not run at once, and waiting on is of no use
            news.wait_for(lambda: len(begun) == len(others) or ended)
        begin_s = time.monotonic()
        answer = endpoint.generate(prompt, new, top=top, ignore_eos=True)
        end_s = time.monotonic()
        found = [one.result() for one in waiting]
    return answer, [one for one, _ in found], in_flight.around([times for _, times in found], begin_s, end_s)


class Comparison:
    """What was found so far, and how one more pair of answers is judged."""

    def __init__(self, endpoint: Endpoint, options: argparse.Namespace):
        self.endpoint, self.options = endpoint, options
        self.findings: list[str] = []
        self.faults = self.ties = 0
        self.worst = self.own = 0.0
        self.alone: list[list[int]] = []
        self.company = options.others
        self.doubt = ""  # where answers part that may do so without any company
        self.not_drawn = 0  # of the first prompt's company: sampled, and yet the greedy answer

    def ask_alone(self, prompt: list[int], where: str) -> Answer:
        greedy.forget(self.endpoint)
        answer = self.endpoint.generate(prompt, self.options.new, top=1, ignore_eos=True)
        self.look(answer, self.options.new, where)
        return answer

    def look(self, answer: Answer, new: int, where: str, logprobs: bool = True) -> None:
        wrong = whole.faults(answer, new, where, logprobs)
        self.faults += len(wrong)
        self.findings += wrong

    def part(self, index: int, prompt: list[int], first: Answer, second: Answer, names: tuple[str, str]) -> None:
        """Where two answers to one prompt part, and whether that is a fault."""
        place = greedy.divergence(self.endpoint, index, prompt, first, second, self.options.tie)
        if place is None:
            return
        self.ties += place.tie
        self.findings.append(place.text(*names))
        if place.tie or self.options.strict:
            self.faults += self.options.strict
        elif greedy.is_own(self.endpoint, prompt, self.options.new, place):
            self.doubt = self.doubt or place.text(*names)
        else:
            self.faults += 1

    def see_others(self, prompts: list[list[int]], answers: list[Answer]) -> None:
        """Whether the `answers` to `prompts`, which ran beside each other and the prompt, begin as they do alone."""
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            alone = self.ask_alone(prompt, f"other {number}, alone")
            begun = replace(answer, ids=answer.ids[: self.options.new])
            self.part(0, prompt, alone, begun, (f"other {number} alone", "in company"))

    def see_drawn(self, prompts: list[list[int]], answers: list[Answer]) -> None:
        """Whether a temperature was heeded: the `answers` to `prompts` beside the greedy ones."""
        greedy.forget(self.endpoint)
        asked = {"max_new_tokens": LONGER * self.options.new, "ignore_eos": True}
        plain = self.endpoint.generate_many(prompts, len(prompts), **asked)
        self.not_drawn = sum(one.ids == other.ids for one, other in zip(plain, answers, strict=True))

    def prompt(self, index: int, prompt: list[int], others: list[list[int]]) -> None:
        """One prompt alone, again alone, and among the others."""
        options, before = self.options, self.faults
        alone, again = (self.ask_alone(prompt, f"prompt {index}, {name}") for name in ("alone", "alone again"))
        self.alone.append(alone.ids)
        if self.faults > before:  # answers that are none need no comparison
            return
        self.own = max(self.own, greedy.logprob_difference(alone, again))
        greedy.forget(self.endpoint)
        crowded, theirs, company = among_others(self.endpoint, prompt, others, options.new, 1, options.sampled)
        self.look(crowded, options.new, f"prompt {index}, among {options.others} others")
        for number, answer in enumerate(theirs):
            self.look(answer, LONGER * options.new, f"prompt {index}, other {number}", logprobs=False)
        self.company = min(self.company, company)
        if self.faults > before:
            return
        if index == 0:  # the company itself, of one prompt: it takes as long as many prompts
            self.see_others(others[options.sampled :], theirs[options.sampled :])
            if options.sampled:
                self.see_drawn(others[: options.sampled], theirs[: options.sampled])
        self.part(index, prompt, alone, again, ("alone", "alone again"))
        difference = greedy.logprob_difference(alone, crowded)
        self.worst = max(self.worst, difference)
        if options.strict and difference > 0:
            self.faults += 1
            self.findings.append(
                f"prompt {index}: a log-probability differs by {difference:.4g} among {options.others} others"
            )
        self.part(index, prompt, alone, crowded, ("alone", f"among {options.others} others"))


def run(options: argparse.Namespace) -> Verdict:
    endpoint = endpoint_of(options)
    at_least(NAME, 1, others=options.others, num_prompts=options.num_prompts, length=options.length)
    at_least(NAME, 2, new=options.new)
    options.sampled = options.others // 2 if options.sampled is None else options.sampled
    at_least(NAME, 0, sampled=options.sampled)
    if options.sampled > options.others:
        raise ValueError(f"{NAME}: --sampled must be at most --others, {options.others}, got {options.sampled}")
    lengths = [options.length + 61 * index for index in range(options.num_prompts)]
    prompts = greedy.prompts_for(endpoint, options.prompts, lengths, options.seed)
    others_lengths = [max(8, options.length // 2 + 23 * (index % 19)) for index in range(options.others)]
    found = Comparison(endpoint, options)
    for index, prompt in enumerate(prompts):
        others = greedy.prompts_for(endpoint, options.prompts, others_lengths, options.seed + 1 + index)
        found.prompt(index, prompt, others)
    figures = {
        "prompts": len(prompts),
        "ties": found.ties,
        "ran_at_once": found.company + 1,
        "sampled": options.sampled,
        "logprob_difference_max": found.worst,
        "logprob_difference_alone_max": found.own,
    }
    summary = (
        f"{len(prompts)} prompts alone and among {options.others} others ({options.sampled} sampled): "
        f"{found.faults} "
        + ("differences" if options.strict else f"differences wider than a tie ({options.tie:g})")
        + ", greatest difference of a log-probability before that "
        + f"{found.worst:.4g} (alone twice: {found.own:.4g})"
    )
    incomplete = ""
    if not found.faults and found.doubt:
        incomplete = f"the server gives other answers by itself, without any company: {found.doubt}"
    elif not found.faults and found.company < options.others:
        instead = f"--others {max(1, found.company)}"
        incomplete = in_flight.serialised(endpoint, found.company + 1, options.others + 1, instead)
    elif not found.faults:
        incomplete = whole.says_nothing(found.alone)
        if not incomplete and found.not_drawn > options.sampled / 2:
            incomplete = (
                f"of {options.sampled} requests with temperature {TEMPERATURE:g}, {found.not_drawn} got the greedy "
                f"answer of {LONGER * options.new} tokens: nothing was sampled beside the prompt. --sampled 0 asks for "
                "no more"
            )
    return Verdict(NAME, not found.faults, summary, found.findings, figures, incomplete=incomplete)
