"""Gate 2: greedy text with and without speculation, at rising concurrency, must be the same but for stated ties.

Speculation only guesses ahead; the verifier decides. A token that the model without speculation would not choose is a
fault of the verifier, of its cache, or of the batch it ran in. Answers are streamed, so that it is seen how many really
ran at once: a server that runs fewer than the concurrency says leaves the gate incomplete.
"""

from __future__ import annotations

import argparse

from bench.quality import greedy, in_flight, whole
from bench.quality.verdict import Verdict, at_least, endpoint_of
from bench.serving.answers import Answer
from bench.serving.endpoint import Endpoint

NAME = "speculation-equality"
CONCURRENCIES = (1, 8, 32)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--without", required=True, help="address of the same server without speculation")
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(CONCURRENCIES))
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--length", type=int, default=200, help="tokens of the shortest prompt; others are longer")
    parser.add_argument("--new", type=int, default=128, help="output tokens a prompt")


def check(options: argparse.Namespace, speculating: Endpoint, plain: Endpoint) -> None:
    """Raise ValueError where the gate would prove nothing."""
    at_least(NAME, 1, num_prompts=options.num_prompts, length=options.length, concurrency=min(options.concurrency))
    at_least(NAME, 2, new=options.new)
    if max(options.concurrency) > options.num_prompts:
        raise ValueError(
            f"{NAME}: --concurrency {max(options.concurrency)} needs as many prompts, got --num-prompts "
            f"{options.num_prompts}"
        )
    if not speculating.server_info().get("speculative_algorithm"):
        raise ValueError(f"{NAME}: {options.url} does not speculate; the gate would prove nothing")
    if plain.server_info().get("speculative_algorithm"):
        raise ValueError(f"{NAME}: {options.without} speculates; it is to be the reference")


def parted(
    plain: Endpoint, prompts: list[list[int]], expected: list[Answer], answers: list[Answer], tie: float
) -> list[greedy.Divergence]:
    """Where answers leave the expected ones: faults first, then ties."""
    found = [
        place
        for index, prompt in enumerate(prompts)
        if (place := greedy.divergence(plain, index, prompt, expected[index], answers[index], tie))
    ]
    return sorted(found, key=lambda place: place.tie)


def run(options: argparse.Namespace) -> Verdict:
    speculating, plain = endpoint_of(options), endpoint_of(options, options.without)
    check(options, speculating, plain)
    lengths = [options.length + 17 * (index % 16) for index in range(options.num_prompts)]
    prompts = greedy.prompts_for(plain, options.prompts, lengths, options.seed)
    expected = plain.generate_many(prompts, 1, max_new_tokens=options.new, ignore_eos=True)
    for index, answer in enumerate(expected):
        whole.demand(answer, options.new, f"{plain.url}, prompt {index}")
    findings, figures, faults, serialised, notes, moved = [], {}, 0, "", [], []
    for concurrency in options.concurrency:
        if concurrency > 1:  # does the batch alone, without speculation, change an answer?
            greedy.forget(plain)
            crowded, measured = in_flight.streamed(plain, prompts, concurrency, options.new)
            for index, answer in enumerate(crowded):
                whole.demand(answer, options.new, f"{plain.url}, concurrency {concurrency}, prompt {index}")
            same = sum(one.ids == other.ids for one, other in zip(crowded, expected, strict=True))
            figures[f"equal_without_speculation_at_{concurrency}"] = same
            moved.append(len(prompts) - same)
            if measured < concurrency:
                notes.append(f"what the batch alone changes at {concurrency} was seen at {measured} requests at once")
        greedy.forget(speculating)
        answers, measured = in_flight.streamed(speculating, prompts, concurrency, options.new)
        figures[f"ran_at_once_at_{concurrency}"] = measured
        if measured < concurrency and not serialised:
            serialised = in_flight.serialised(speculating, measured, concurrency, f"--concurrency {max(1, measured)}")
        wrong = [
            one
            for index, answer in enumerate(answers)
            for one in whole.faults(answer, options.new, f"concurrency {concurrency}, prompt {index}")
        ]
        places = [] if wrong else parted(plain, prompts, expected, answers, options.tie)
        ties = sum(place.tie for place in places)
        faults += len(wrong) + len(places) - ties
        figures |= {f"equal_at_{concurrency}": len(prompts) - len(places) - len(wrong), f"ties_at_{concurrency}": ties}
        findings += wrong + [f"concurrency {concurrency}, {p.text('without', 'with speculation')}" for p in places]
    summary = (
        f"{len(prompts)} prompts, {options.new} tokens each, concurrency {', '.join(map(str, options.concurrency))}: "
        f"{faults} answers differ by more than a tie (log-probabilities within {options.tie:g} without speculation)"
    )
    if any(moved):  # then not every difference is speculation's
        summary += f"; the batch alone, without speculation, changes {', '.join(map(str, moved))} of {len(prompts)}"
    incomplete = "" if faults else serialised or whole.says_nothing([answer.ids for answer in expected])
    return Verdict(NAME, faults == 0, summary, findings, figures, notes, incomplete)
