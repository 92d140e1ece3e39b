"""Gate 3: one prompt alone, and the same prompt among 31 others, must get the same answer, with the same
log-probabilities.

A server that passes gives a user the same text whatever else it is doing. Stock kernels do not promise that: they may
choose other splits for other batches. Parting at a tie is stated and, unless --strict, is no fault.
"""

from __future__ import annotations

import argparse
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from bench.quality import greedy
from bench.quality.verdict import Verdict
from bench.serving.endpoint import Answer, Endpoint

NAME = "batch-invariance"
SETTLE_S = 0.05  # the others are being decoded when the prompt arrives


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--others", type=int, default=31)
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--length", type=int, default=200)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument(
        "--strict", action="store_true", help="also a tie, or any difference of a log-probability, is a fault"
    )


def among_others(endpoint: Endpoint, prompt: list[int], others: list[list[int]], new: int, top: int) -> Answer:
    """The answer to `prompt` while `others`, which are given four times as many tokens, are being decoded."""
    begun = threading.Barrier(len(others) + 1)

    def other(ids: list[int]) -> None:
        begun.wait()
        endpoint.generate(ids, 4 * new, ignore_eos=True)

    with ThreadPoolExecutor(max_workers=len(others)) as pool:
        waiting = [pool.submit(other, ids) for ids in others]
        begun.wait()
        time.sleep(SETTLE_S)
        answer = endpoint.generate(prompt, new, top=top, ignore_eos=True)
        for one in waiting:
            one.result()
    return answer


def logprob_difference(first: Answer, second: Answer) -> float:
    """The greatest difference of the chosen tokens' log-probabilities as far as the texts agree."""
    end = greedy.first_difference(first.ids, second.ids)
    pairs = list(zip(first.logprobs, second.logprobs, strict=False))[:end]
    return max((abs(a - b) for a, b in pairs), default=0.0)


def run(options: argparse.Namespace) -> Verdict:
    endpoint = Endpoint(options.url, options.timeout)
    if options.others < 1:
        raise ValueError(f"batch-invariance: --others must be at least 1, got {options.others}")
    lengths = [options.length + 61 * index for index in range(options.num_prompts)]
    prompts = greedy.prompts_for(endpoint, options.prompts, lengths, options.seed)
    others_lengths = [max(8, options.length // 2 + 23 * (index % 19)) for index in range(options.others)]
    findings, faults, ties, worst, own = [], 0, 0, 0.0, 0.0
    for index, prompt in enumerate(prompts):
        greedy.forget(endpoint)
        alone = endpoint.generate(prompt, options.new, top=1, ignore_eos=True)
        greedy.forget(endpoint)
        again = endpoint.generate(prompt, options.new, top=1, ignore_eos=True)
        greedy.forget(endpoint)
        own = max(own, logprob_difference(alone, again))
        if (place := greedy.divergence(endpoint, index, prompt, alone, again, options.tie)) is not None:
            findings.append(f"alone and alone again: {place.text('first', 'second')}")
            faults += not place.tie or options.strict
        others = greedy.prompts_for(endpoint, options.prompts, others_lengths, options.seed + 1 + index)
        crowded = among_others(endpoint, prompt, others, options.new, top=1)
        difference = logprob_difference(alone, crowded)
        worst = max(worst, difference)
        if options.strict and difference > 0:
            faults += 1
            findings.append(
                f"prompt {index}: a log-probability differs by {difference:.4g} among {options.others} others"
            )
        if (place := greedy.divergence(endpoint, index, prompt, alone, crowded, options.tie)) is not None:
            ties += place.tie
            faults += not place.tie or options.strict
            findings.append(place.text("alone", f"among {options.others} others"))
    figures = {
        "prompts": len(prompts),
        "ties": ties,
        "logprob_difference_max": worst,
        "logprob_difference_alone_max": own,
    }
    summary = (
        f"{len(prompts)} prompts alone and among {options.others} others: {faults} "
        + ("differences" if options.strict else f"differences wider than a tie ({options.tie:g})")
        + ", greatest difference of a log-probability before that "
        + f"{worst:.4g} (alone twice: {own:.4g})"
    )
    return Verdict(NAME, faults == 0, summary, findings, figures)
