"""Gate 2: greedy text with and without speculation, at rising concurrency, must be the same but for stated ties.

Speculation only guesses ahead; the verifier decides. A token that the model without speculation would not choose is a
fault of the verifier, of its cache, or of the batch it ran in.
"""

from __future__ import annotations

import argparse

from bench.quality import greedy
from bench.quality.verdict import Verdict
from bench.serving.endpoint import Endpoint

NAME = "speculation-equality"
CONCURRENCIES = (1, 8, 32)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--without", required=True, help="address of the same server without speculation")
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(CONCURRENCIES))
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--length", type=int, default=200, help="tokens of the shortest prompt; others are longer")
    parser.add_argument("--new", type=int, default=128, help="output tokens a prompt")


def run(options: argparse.Namespace) -> Verdict:
    speculating, plain = Endpoint(options.url, options.timeout), Endpoint(options.without, options.timeout)
    if not speculating.server_info().get("speculative_algorithm"):
        raise ValueError(f"speculation-equality: {options.url} does not speculate; the gate would prove nothing")
    if plain.server_info().get("speculative_algorithm"):
        raise ValueError(f"speculation-equality: {options.without} speculates; it is to be the reference")
    lengths = [options.length + 17 * (index % 16) for index in range(options.num_prompts)]
    prompts = greedy.prompts_for(plain, options.prompts, lengths, options.seed)
    settings = {"max_new_tokens": options.new, "ignore_eos": True}
    expected = plain.generate_many(prompts, 1, **settings)
    findings, figures, faults = [], {}, 0
    for concurrency in options.concurrency:
        if concurrency > 1:  # does the batch alone, without speculation, change an answer?
            greedy.forget(plain)
            crowded = plain.generate_many(prompts, concurrency, **settings)
            same = sum(one.ids == other.ids for one, other in zip(crowded, expected, strict=True))
            figures[f"equal_without_speculation_at_{concurrency}"] = same
        greedy.forget(speculating)
        answers = speculating.generate_many(prompts, concurrency, **settings)
        parted = [
            place
            for index, prompt in enumerate(prompts)
            if (place := greedy.divergence(plain, index, prompt, expected[index], answers[index], options.tie))
        ]
        ties = sum(place.tie for place in parted)
        faults += len(parted) - ties
        figures |= {f"equal_at_{concurrency}": len(prompts) - len(parted), f"ties_at_{concurrency}": ties}
        parted.sort(key=lambda place: place.tie)
        findings += [f"concurrency {concurrency}, {p.text('without', 'with speculation')}" for p in parted]
    summary = (
        f"{len(prompts)} prompts, {options.new} tokens each, concurrency {', '.join(map(str, options.concurrency))}: "
        f"{faults} answers differ by more than a tie (log-probabilities within {options.tie:g} without speculation)"
    )
    moved = [len(prompts) - figures[f"equal_without_speculation_at_{c}"] for c in options.concurrency if c > 1]
    if any(moved):  # then not every difference is speculation's
        summary += f"; the batch alone, without speculation, changes {', '.join(map(str, moved))} of {len(prompts)}"
    return Verdict(NAME, faults == 0, summary, findings, figures)
