"""Gate 1: the same prompts against a reference, position by position.

The reference is another server, or a file saved from one. At every output position with the same context the greedy
token and the twenty best log-probabilities are compared. Where the answers part, the candidate is asked again from the
reference's own prefix, so that one difference early does not hide the rest.

Judged are the share of equal greedy tokens, the share of the twenty best that both have, and the mean error of their
log-probabilities; a token that the candidate has not among its best is at least as far off as its last one. Whatever
the means, it fails where one of the two chose a token that the other has not among its twenty best, or where a
position's lists share fewer than five. A bar that the candidate misses as well against itself, asked twice, says
nothing of it, unless by tokens that part by more than three ties, nor do fewer equal tokens than a server at the bar
has by chance of so many positions: INCOMPLETE.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field
from pathlib import Path

from bench.quality import greedy, saved, whole
from bench.quality.verdict import Verdict, at_least, check_bar, endpoint_of, too_few
from bench.serving.answers import Answer
from bench.serving.endpoint import Endpoint

NAME = "logit-oracle"
LENGTHS = (16, 64, 256, 700, 1024, 3000)
RESTARTS = 12  # a prompt
OVERLAPS = (1, 5, greedy.TOP)
FEWEST_SHARED = 5  # of the best 20 of one position: rounding moves some in and out, not most of them
MIN_SHARED = 0.9  # of the best 20, over all positions
MATCH = "greedy tokens that match"


@dataclass
class Alignment:
    """Sums over positions with one context."""

    positions: int = 0
    same_token: int = 0
    weighed: int = 0
    error_sum: float = 0.0
    error_max: float = 0.0
    chosen_error_max: float = 0.0
    overlap: dict[int, float] = field(default_factory=lambda: dict.fromkeys(OVERLAPS, 0.0))
    lost: int = 0  # positions that could not be compared: too many restarts
    wide: int = 0  # those of other tokens by more than AS_WIDE ties

    def add(self, reference: list[tuple[float, int]], candidate: list[tuple[float, int]], same_token: bool) -> int:
        """One position: the best (log-probability, id) of both, best first; whether both chose the same token. Returns
        how many of the reference's best the candidate has too.

        What was chosen need not be the best: between the logits and the answer there is a sampler.
        """
        self.positions += 1
        self.same_token += same_token
        theirs = {token: logprob for logprob, token in candidate}
        last = min(theirs.values())
        for count in OVERLAPS:
            mine = {token for _, token in reference[:count]}
            self.overlap[count] += len(mine & {token for _, token in candidate[:count]}) / len(mine)
        for rank, (logprob, token) in enumerate(reference):
            # one that the candidate does not list has at most the log-probability of the last that it does
            error = abs(logprob - theirs[token]) if token in theirs else max(0.0, logprob - last)
            self.weighed += 1
            self.error_sum += error
            self.error_max = max(self.error_max, error)
            if rank == 0:
                self.chosen_error_max = max(self.chosen_error_max, error)
        return sum(token in theirs for _, token in reference)

    def figures(self) -> dict[str, float]:
        count = max(1, self.positions)
        found = {"positions": self.positions, "positions_lost": self.lost, "token_match": self.same_token / count}
        found |= {f"top{k}_overlap": total / count for k, total in self.overlap.items()}
        found["logprob_error_mean"] = self.error_sum / max(1, self.weighed)
        return found | {"logprob_error_max": self.error_max, "greedy_logprob_error_max": self.chosen_error_max}


def position_faults(place: int, reference: Answer, answer: Answer, step: int, shared: int) -> list[str]:
    """What no rounding explains, at output position `place` of the reference, which is `step` of the candidate's."""
    found, best, theirs = [], reference.tops[place], answer.tops[step]
    mine, other, where = reference.ids[place], answer.ids[step], f"position {place}"
    if other not in {token for _, token in best}:
        found.append(f"{where}: the reference has the candidate's token {other} not among its best {len(best)}")
    if mine not in {token for _, token in theirs}:
        found.append(f"{where}: the candidate has the reference's token {mine} not among its best {len(theirs)}")
    if shared < FEWEST_SHARED:
        found.append(f"{where}: only {shared} of the best {len(best)} tokens are the reference's")
    return found


def align(endpoint: Endpoint, prompt: list[int], reference: Answer, found: Alignment) -> tuple[str, list[str]]:
    """Compare one answer with the reference's: (where they first part, "" nowhere; what fails whatever the means)."""
    begin, first, faults = 0, "", []
    for _ in range(RESTARTS):
        left = len(reference.ids) - begin
        greedy.forget(endpoint)
        answer = endpoint.generate([*prompt, *reference.ids[:begin]], left, top=greedy.TOP, ignore_eos=True)
        if wrong := whole.faults(answer, left, "the candidate's answer", logprobs=True, top=greedy.TOP):
            return first, faults + wrong
        for step, top in enumerate(answer.tops):
            place = begin + step
            same = answer.ids[step] == reference.ids[place]
            shared = found.add(reference.tops[place], top, same)
            faults += position_faults(place, reference, answer, step, shared)
            if not same:
                ids = reference.ids[place], answer.ids[step]
                found.wide += greedy.moved((reference.tops[place], top), *ids) > greedy.AS_WIDE * greedy.TIE
                value, token = reference.tops[place][0]
                theirs = {one: number for number, one in top}.get(token, float("nan"))
                first = first or (
                    f"position {place}: reference chose {reference.ids[place]} (its best {token}: {value:.4f}), "
                    f"candidate {answer.ids[step]} ({answer.logprobs[step]:.4f}; the reference's best has {theirs:.4f})"
                )
                begin += step + 1
                break
        else:
            return first, faults
        if begin >= len(reference.ids):
            return first, faults
    found.lost += len(reference.ids) - begin
    return first, faults


def compare(endpoint: Endpoint, reference: dict) -> tuple[Alignment, list[str], list[str]]:
    """(sums, faults, where answers part)."""
    found, faults, places = Alignment(), [], []
    for index, entry in enumerate(reference["entries"]):
        place, wrong = align(endpoint, entry["prompt"], Answer(**entry["answer"]), found)
        name = f"prompt {index} ({len(entry['prompt'])} tokens), "
        faults += [name + one for one in wrong]
        places += [name + place] if place else []
    return found, faults, places


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--reference", help="address of a server, or a file written with --save")
    parser.add_argument("--save", type=Path, help="only record this server's answers, as the reference of later runs")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="prompt lengths in tokens")
    parser.add_argument("--new", type=int, default=48, help="output tokens a prompt")
    parser.add_argument("--min-token-match", type=float, default=0.98)
    parser.add_argument("--min-overlap", type=float, default=MIN_SHARED, help="share of the best 20 that both have")
    parser.add_argument("--max-mean-error", type=float, default=0.05, help="mean log-probability error of the best 20")


def reference_of(options: argparse.Namespace, endpoint: Endpoint) -> dict:
    if saved.is_file(NAME, options.reference):
        return saved.read(NAME, Path(options.reference))
    other = endpoint_of(options, options.reference)
    prompts = greedy.prompts_for(endpoint, options.prompts, options.lengths, options.seed)
    return saved.record(NAME, other, prompts, options.new)


def is_itself(options: argparse.Namespace, endpoint: Endpoint) -> bool:
    """Whether --reference is the address of the server under test."""
    return not saved.is_file(NAME, options.reference) and endpoint.is_same_as(endpoint_of(options, options.reference))


def below(figures: dict[str, float], options: argparse.Namespace) -> set[str]:
    """The bars that these figures miss."""
    met = {
        MATCH: figures["token_match"] >= options.min_token_match,
        f"the best {greedy.TOP} that are shared": figures[f"top{greedy.TOP}_overlap"] >= options.min_overlap,
        "the mean error": figures["logprob_error_mean"] <= options.max_mean_error,
    }
    return {name for name, is_met in met.items() if not is_met}


def run(options: argparse.Namespace) -> Verdict:
    at_least(NAME, 1, new=options.new, lengths=min(options.lengths))
    check_bar(NAME, options.min_token_match, "min-token-match")
    check_bar(NAME, options.min_overlap, "min-overlap")
    if not 0 <= options.max_mean_error < math.inf:
        raise ValueError(f"{NAME}: --max-mean-error must be at least 0 and finite, got {options.max_mean_error:g}")
    if bool(options.reference) == bool(options.save):
        raise ValueError(f"{NAME}: give --reference (an address or a file), or --save")
    endpoint = endpoint_of(options)
    if options.save:
        saved.must_be_writable(options.save)
        prompts = greedy.prompts_for(endpoint, options.prompts, options.lengths, options.seed)
        return saved.write(NAME, options.save, saved.record(NAME, endpoint, prompts, options.new))
    reference = reference_of(options, endpoint)
    found, faults, places = compare(endpoint, reference)
    figures = found.figures()
    missed = below(figures, options)
    passed, incomplete = not faults and not missed, ""
    if not faults:  # a candidate whose answers are no answers has nothing to be compared with itself
        floor, _, _ = compare(
            endpoint, saved.record(NAME, endpoint, [e["prompt"] for e in reference["entries"]], options.new)
        )
        names = ("token_match", "logprob_error_mean", "logprob_error_max")
        figures |= {f"self_{name}": floor.figures()[name] for name in names}
        own = below(floor.figures(), options)
        if floor.wide > (1 - options.min_token_match) * floor.positions:  # no rounding makes these
            own.discard(MATCH)
        left = missed - own
        if missed and not left:
            incomplete = f"asked twice, the candidate misses the same bars against itself: {', '.join(sorted(missed))}"
        elif left == {MATCH}:
            incomplete = too_few(found.same_token, found.positions, options.min_token_match)
            incomplete += " (a greater --new, more --lengths)" if incomplete else ""
    overlap = figures[f"top{greedy.TOP}_overlap"]
    summary = (
        f"{figures['token_match']:.2%} of {found.positions} greedy tokens match (bar {options.min_token_match:.0%}), "
        f"{overlap:.2%} of the best {greedy.TOP} are shared (bar {options.min_overlap:.0%}), "
        f"mean log-probability error {figures['logprob_error_mean']:.4f} (bar {options.max_mean_error:g}); "
        f"{len(faults)} faults that fail whatever the means; self_: the candidate against itself"
    )
    notes = []
    if passed and found.lost:
        incomplete = (
            f"{found.lost} of {found.lost + found.positions} positions were not compared: a prompt is given up after "
            f"{RESTARTS} differences; take a smaller --new and more --lengths"
        )
    elif passed:
        incomplete = whole.says_nothing([entry["answer"]["ids"] for entry in reference["entries"]])
    if passed and is_itself(options, endpoint):
        passed = None
        notes.append("the reference is the server under test: this shows its own noise, and nothing of what is right")
    return Verdict(NAME, passed, summary, faults + places, figures, notes, incomplete)
