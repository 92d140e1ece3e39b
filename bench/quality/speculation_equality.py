"""Gate 2: greedy text with and without speculation, at rising concurrency, must be the same but for stated ties.

Speculation only guesses ahead; the verifier decides. A token that the model without speculation would not choose is a
fault of the verifier, of its cache, or of the batch it ran in. Answers are streamed, so that it is seen how many really
ran at once: a server that runs fewer than the concurrency says leaves the gate incomplete. So does one that announces
speculation and counts no step of it, in no answer and not in /server_info, or in no answer of one concurrency only.

A server whose answers the batch alone changes by more than a tie, without speculation, shows so how wide its own
rounding is: what differs by no more than three times that (and is among the 20 best) may be either's, and leaves the
gate incomplete.

The server without speculation is another one, or, where the cards hold one at a time, a file that --save has written of
it: its answers, its best at every position, by which ties are judged, and what the batch alone changed.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from bench.quality import greedy, in_flight, saved, whole
from bench.quality.verdict import Verdict, at_least, endpoint_of
from bench.serving.answers import Answer, first_state, is_acceptance
from bench.serving.endpoint import Endpoint

NAME = "speculation-equality"
CONCURRENCIES = (1, 8, 32)
FEWEST_NEW = 2  # output tokens: the first comes of the prompt, not of speculation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--without", help="address of the same server without speculation, or a file of --save")
    parser.add_argument("--save", type=Path, help="only record this server, which does not speculate, for --without")
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(CONCURRENCIES))
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--length", type=int, default=200, help="tokens of the shortest prompt; others are longer")
    parser.add_argument("--new", type=int, default=128, help="output tokens a prompt")


@dataclass
class Plain:
    """What is known without speculation. endpoint: None where it comes from a file."""

    endpoint: Endpoint | None
    prompts: list[list[int]]
    expected: list[Answer]
    # concurrency -> (answers that the batch alone changed, requests that ran at once, the widest gap of such a change;
    # files of old have no gap)
    crowds: dict[str, list]

    @property
    def new(self) -> int:
        return len(self.expected[0].ids)

    @property
    def own_gap(self) -> float | None:
        """The widest gap by which the batch alone, without speculation, has changed an answer; None: none was."""
        return max((gap for changed, _, *gaps in self.crowds.values() if changed for gap in gaps), default=None)


def check(options: argparse.Namespace) -> None:
    """ValueError where the gate would prove nothing."""
    at_least(NAME, 1, num_prompts=options.num_prompts, length=options.length, concurrency=min(options.concurrency))
    at_least(NAME, FEWEST_NEW, new=options.new)
    if bool(options.without) == bool(options.save):
        raise ValueError(f"{NAME}: give --without (an address, or a file of --save), or --save")


def must_not_speculate(endpoint: Endpoint) -> None:
    if endpoint.server_info().get("speculative_algorithm"):
        raise ValueError(f"{NAME}: {endpoint.url} speculates; it is to be the reference")


def must_suffice(options: argparse.Namespace, prompts: int, whose: str) -> None:
    if max(options.concurrency) > prompts:
        raise ValueError(
            f"{NAME}: --concurrency {max(options.concurrency)} needs as many prompts, got {whose} {prompts}"
        )


def crowded(plain: Plain, endpoint: Endpoint, concurrency: int) -> list:
    """(answers that the batch alone, without speculation, changes; requests that ran at once; the widest gap)."""
    greedy.forget(endpoint)
    answers, measured = in_flight.streamed(endpoint, plain.prompts, concurrency, plain.new)
    for index, answer in enumerate(answers):
        whole.demand(answer, plain.new, f"{endpoint.url}, concurrency {concurrency}, prompt {index}")
    gaps = [place.gap for place in parted(plain, answers, 0.0)]
    return [len(gaps), measured, max(filter(math.isfinite, gaps), default=0.0)]


def save(options: argparse.Namespace, endpoint: Endpoint) -> Verdict:
    must_not_speculate(endpoint)
    must_suffice(options, options.num_prompts, "--num-prompts")
    saved.must_be_writable(options.save)
    found = saved.record(NAME, endpoint, prompts_of(options, endpoint), options.new)
    plain = from_record(found)
    found["crowds"] = {str(c): crowded(plain, endpoint, c) for c in options.concurrency if c > 1}
    return saved.write(NAME, options.save, found)


def from_record(found: dict) -> Plain:
    answers = [Answer(**entry["answer"]) for entry in found["entries"]]
    return Plain(None, [entry["prompt"] for entry in found["entries"]], answers, found.get("crowds", {}))


def _are_crowds(found, prompts: int) -> bool:
    return isinstance(found, dict) and all(
        isinstance(one, list)
        and [type(number) for number in one] in ([int, int], [int, int, float])
        and 0 <= one[0] <= prompts
        and all(map(math.isfinite, one))
        for one in found.values()
    )


def prompts_of(options: argparse.Namespace, endpoint: Endpoint) -> list[list[int]]:
    lengths = [options.length + 17 * (index % 16) for index in range(options.num_prompts)]
    return greedy.prompts_for(endpoint, options.prompts, lengths, options.seed)


def without(options: argparse.Namespace) -> Plain:
    """The reference, from its file or its server."""
    if saved.is_file(NAME, options.without):
        plain = from_record(saved.read(NAME, Path(options.without)))
        same_length = all(len(answer.ids) == plain.new for answer in plain.expected)
        if plain.new < FEWEST_NEW or not same_length or not _are_crowds(plain.crowds, len(plain.prompts)):
            raise ValueError(f"{NAME}: {options.without} is not as --save wrote it")
        must_suffice(options, len(plain.prompts), "a file with")
        return plain
    must_suffice(options, options.num_prompts, "--num-prompts")
    endpoint = endpoint_of(options, options.without)
    must_not_speculate(endpoint)
    prompts = prompts_of(options, endpoint)
    expected = endpoint.generate_many(prompts, 1, max_new_tokens=options.new, ignore_eos=True)
    for index, answer in enumerate(expected):
        whole.demand(answer, options.new, f"{endpoint.url}, prompt {index}")
    return Plain(endpoint, prompts, expected, {})


def never_drafted(endpoint: Endpoint, drafted: dict[int, bool]) -> str:
    """Why nothing shows that the server has speculated, "" if something does. `drafted`: concurrency -> whether an
    answer counts a step of it. Where some do, the others are taken at their word: what /server_info says is of all
    times.
    """
    if all(drafted.values()):
        return ""
    if any(drafted.values()):
        without = ", ".join(str(concurrency) for concurrency, is_counted in drafted.items() if not is_counted)
        return (
            f"{endpoint.url} has speculated, but at concurrency {without} no answer counts a step of it: is it "
            "switched off there?"
        )
    if is_acceptance(first_state(endpoint.server_info()).get("avg_spec_accept_length")):
        return ""
    return (
        f"{endpoint.url} announces speculation, and no answer (spec_accept_length, spec_verify_ct) nor /server_info "
        "(avg_spec_accept_length) counts a step of it: it may never have drafted"
    )


def parted(plain: Plain, answers: list[Answer], tie: float) -> list[greedy.Divergence]:
    """Where answers leave the expected ones: faults first, then ties."""
    found = [
        place
        for index, prompt in enumerate(plain.prompts)
        if (place := greedy.divergence(plain.endpoint, index, prompt, plain.expected[index], answers[index], tie))
    ]
    return sorted(found, key=lambda place: place.tie)


def run(options: argparse.Namespace) -> Verdict:
    check(options)
    speculating = endpoint_of(options)
    if options.save:
        return save(options, speculating)
    if not speculating.server_info().get("speculative_algorithm"):
        raise ValueError(f"{NAME}: {options.url} does not speculate; the gate would prove nothing")
    plain = without(options)
    prompts, expected, new = plain.prompts, plain.expected, plain.new
    findings, figures, faults, own, serialised, notes, moved = [], {}, 0, 0, "", [], []
    drafted = {}
    if plain.endpoint is not None:  # does the batch alone, without speculation, change an answer?
        plain.crowds |= {str(c): crowded(plain, plain.endpoint, c) for c in options.concurrency if c > 1}
    if plain.own_gap is not None:
        figures["widest_gap_without_speculation"] = plain.own_gap
    for concurrency in options.concurrency:
        if str(concurrency) in plain.crowds:
            changed, measured = plain.crowds[str(concurrency)][:2]
            figures[f"equal_without_speculation_at_{concurrency}"] = len(prompts) - changed
            moved.append(changed)
            if measured < concurrency:
                notes.append(f"what the batch alone changes at {concurrency} was seen at {measured} requests at once")
        elif concurrency > 1:
            notes.append(f"what the batch alone changes at {concurrency} is not in the file")
        greedy.forget(speculating)
        answers, measured = in_flight.streamed(speculating, prompts, concurrency, new)
        drafted[concurrency] = any(answer.speculated for answer in answers)
        figures[f"ran_at_once_at_{concurrency}"] = measured
        if measured < concurrency and not serialised:
            serialised = in_flight.serialised(speculating, measured, concurrency, f"--concurrency {max(1, measured)}")
        wrong = [
            one
            for index, answer in enumerate(answers)
            for one in whole.faults(answer, new, f"concurrency {concurrency}, prompt {index}")
        ]
        places = [] if wrong else parted(plain, answers, options.tie)
        ties = sum(place.tie for place in places)
        as_wide = -math.inf if plain.own_gap is None else greedy.AS_WIDE * plain.own_gap
        moved_so = sum(not place.tie and place.gap <= as_wide for place in places)
        own += moved_so
        faults += len(wrong) + len(places) - ties - moved_so
        figures |= {f"equal_at_{concurrency}": len(prompts) - len(places) - len(wrong), f"ties_at_{concurrency}": ties}
        findings += wrong + [f"concurrency {concurrency}, {p.text('without', 'with speculation')}" for p in places]
    summary = (
        f"{len(prompts)} prompts, {new} tokens each, concurrency {', '.join(map(str, options.concurrency))}: "
        f"{faults} answers differ by more than a tie (log-probabilities within {options.tie:g} without speculation)"
    )
    if any(moved):  # then not every difference is speculation's
        summary += f"; the batch alone, without speculation, changes {', '.join(map(str, moved))} of {len(prompts)}"
    incomplete = ""
    if not faults and own:
        incomplete = (
            f"{own} answers differ by more than a tie ({options.tie:g}), and without speculation the batch alone "
            f"changes one by {plain.own_gap:.4g}: nobody can say which of the two did it. Take servers that give the "
            "same answer in company (those that batch-invariance passes)"
        )
    elif not faults:
        nothing = whole.says_nothing([answer.ids for answer in expected])
        incomplete = serialised or nothing or never_drafted(speculating, drafted)
    return Verdict(NAME, faults == 0, summary, findings, figures, notes, incomplete)
