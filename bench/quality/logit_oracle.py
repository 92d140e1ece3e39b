"""Gate 1: the same prompts against a reference, position by position.

The reference is another server, or a file saved from one. At every output position with the same context the greedy
token and the twenty best log-probabilities are compared. Where the answers part, the candidate is asked again from the
reference's own prefix, so that one difference early does not hide the rest.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.quality import greedy
from bench.quality.verdict import Verdict
from bench.serving.endpoint import Answer, Endpoint

NAME = "logit-oracle"
FORMAT = "logit-oracle 1"
LENGTHS = (16, 64, 256, 700, 1024, 3000)
RESTARTS = 12  # a prompt
OVERLAPS = (1, 5, 20)


@dataclass
class Alignment:
    """Sums over positions with one context."""

    positions: int = 0
    same_token: int = 0
    shared: int = 0
    error_sum: float = 0.0
    error_max: float = 0.0
    chosen_error_max: float = 0.0
    overlap: dict[int, float] = field(default_factory=lambda: dict.fromkeys(OVERLAPS, 0.0))
    lost: int = 0  # positions that could not be compared: too many restarts

    def add(self, reference: list[tuple[float, int]], candidate: list[tuple[float, int]], same_token: bool) -> None:
        """One position: the best (log-probability, id) of both, best first; whether both chose the same token.

        What was chosen need not be the best: between the logits and the answer there is a sampler.
        """
        self.positions += 1
        self.same_token += same_token
        theirs = {token: logprob for logprob, token in candidate}
        for count in OVERLAPS:
            mine = {token for _, token in reference[:count]}
            self.overlap[count] += len(mine & {token for _, token in candidate[:count]}) / len(mine)
        for rank, (logprob, token) in enumerate(reference):
            if token in theirs:
                error = abs(logprob - theirs[token])
                self.shared += 1
                self.error_sum += error
                self.error_max = max(self.error_max, error)
                if rank == 0:
                    self.chosen_error_max = max(self.chosen_error_max, error)

    def figures(self) -> dict[str, float]:
        count = max(1, self.positions)
        found = {"positions": self.positions, "positions_lost": self.lost, "token_match": self.same_token / count}
        found |= {f"top{k}_overlap": total / count for k, total in self.overlap.items()}
        found["logprob_error_mean"] = self.error_sum / max(1, self.shared)
        return found | {"logprob_error_max": self.error_max, "greedy_logprob_error_max": self.chosen_error_max}


def record(endpoint: Endpoint, prompts: list[list[int]], new: int) -> dict:
    """The reference's answers, JSON-able."""
    answers = []
    for prompt in prompts:
        greedy.forget(endpoint)
        answers.append(endpoint.generate(prompt, new, top=greedy.TOP, ignore_eos=True))
    if any(len(answer.tops) != len(answer.ids) for answer in answers):
        raise ValueError(f"{endpoint.url} gives no log-probabilities; the oracle needs them")
    pairs = zip(prompts, answers, strict=True)
    return {"format": FORMAT, "entries": [{"prompt": prompt, "answer": asdict(answer)} for prompt, answer in pairs]}


def align(endpoint: Endpoint, prompt: list[int], reference: Answer, found: Alignment) -> str | None:
    """Compare one answer with the reference's; says where they first part."""
    begin, first = 0, None
    for _ in range(RESTARTS):
        left = len(reference.ids) - begin
        greedy.forget(endpoint)
        answer = endpoint.generate([*prompt, *reference.ids[:begin]], left, top=greedy.TOP, ignore_eos=True)
        for step, top in enumerate(answer.tops):
            same = answer.ids[step] == reference.ids[begin + step]
            found.add(reference.tops[begin + step], top, same)
            if not same:
                if first is None:
                    place, (value, token) = begin + step, reference.tops[begin + step][0]
                    theirs = {one: number for number, one in top}.get(token, float("nan"))
                    first = (
                        f"position {place}: reference chose {token} ({value:.4f}), candidate {answer.ids[step]} "
                        f"({answer.logprobs[step]:.4f}; the reference's token has {theirs:.4f})"
                    )
                begin += step + 1
                break
        else:
            return first
        if begin >= len(reference.ids):
            return first
    found.lost += len(reference.ids) - begin
    return first


def compare(endpoint: Endpoint, reference: dict) -> tuple[Alignment, list[str]]:
    found, places = Alignment(), []
    for index, entry in enumerate(reference["entries"]):
        values = entry["answer"] | {"tops": [[tuple(t) for t in step] for step in entry["answer"]["tops"]]}
        if place := align(endpoint, entry["prompt"], Answer(**values), found):
            places.append(f"prompt {index} ({len(entry['prompt'])} tokens), {place}")
    return found, places


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--reference", help="address of a server, or a file written with --save")
    parser.add_argument("--save", type=Path, help="only record this server's answers, as the reference of later runs")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="prompt lengths in tokens")
    parser.add_argument("--new", type=int, default=48, help="output tokens a prompt")
    parser.add_argument("--min-token-match", type=float, default=0.98)
    parser.add_argument("--max-mean-error", type=float, default=0.05, help="mean log-probability error of the best 20")


def run(options: argparse.Namespace) -> Verdict:
    endpoint = Endpoint(options.url, options.timeout)
    if options.save:
        prompts = greedy.prompts_for(endpoint, options.prompts, options.lengths, options.seed)
        options.save.parent.mkdir(parents=True, exist_ok=True)
        options.save.write_text(json.dumps(record(endpoint, prompts, options.new)))
        return Verdict(NAME, None, f"saved {len(prompts)} reference answers to {options.save}")
    if not options.reference:
        raise ValueError("logit-oracle: give --reference (an address or a file), or --save")
    if Path(options.reference).is_file():
        reference = json.loads(Path(options.reference).read_text())
        if reference.get("format") != FORMAT:
            raise ValueError(f"logit-oracle: {options.reference} is no file of {FORMAT}")
    else:
        prompts = greedy.prompts_for(endpoint, options.prompts, options.lengths, options.seed)
        reference = record(Endpoint(options.reference, options.timeout), prompts, options.new)
    if not reference["entries"]:
        raise ValueError("logit-oracle: the reference is empty")
    found, places = compare(endpoint, reference)
    floor, _ = compare(endpoint, record(endpoint, [e["prompt"] for e in reference["entries"]], options.new))
    figures = found.figures()
    figures |= {
        f"self_{name}": floor.figures()[name] for name in ("token_match", "logprob_error_mean", "logprob_error_max")
    }
    passed = (
        figures["token_match"] >= options.min_token_match and figures["logprob_error_mean"] <= options.max_mean_error
    )
    summary = (
        f"{figures['token_match']:.2%} of {found.positions} greedy tokens match (bar {options.min_token_match:.0%}), "
        f"mean log-probability error {figures['logprob_error_mean']:.4f} (bar {options.max_mean_error:g}); "
        "self_: the candidate against itself"
    )
    return Verdict(NAME, passed, summary, places, figures)
