"""Gate 4: a fact at a known depth of a long, made document must be found. Nothing is downloaded."""

from __future__ import annotations

import argparse
import itertools
import random
import re

from bench.quality import whole
from bench.quality.verdict import Verdict, at_least, check_bar, endpoint_of, too_few
from bench.serving.prompts import ASSISTANT, BEGIN, USER, prose

NAME = "needle"
LENGTHS = (4096, 32768, 131072)
DEPTHS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
NAMES = ("Arbuckle", "Birtwhistle", "Cavendish", "Drummond", "Ellsworth", "Fairweather", "Greenhalgh", "Hathersage")
WORDS_A_TOKEN = 0.7  # of English prose; the real number of tokens is in the figures
IN_FRONT = ("", "\n", "one\n", "one two\n")  # 0 to 3 tokens: the compressors pool four
MIN_LENGTH_SHARE = 0.5  # a server that counts fewer tokens of a document has not read all of it


def question(length: int, depth: float, seed: int, shift=0) -> tuple[str, str]:
    """(prompt, the number to be found): about `length` tokens of prose with one fact at `depth` (0 start, 1 end).

    shift: so many tokens stand in front, so the fact lies elsewhere in its groups of four.
    """
    source = random.Random(f"needle {length} {depth} {seed}")
    name, numbers = source.choice(NAMES), source.sample(range(10_000, 100_000), len(IN_FRONT))
    number = str(numbers[shift])  # what the place before was answered is not right here
    sentences = re.findall(r"[^.]+\.", prose(int(length * WORDS_A_TOKEN), seed * 31 + int(depth * 100)))
    sentences.insert(round(depth * len(sentences)), f" The secret number of {name} is {number}.")
    asked = f"\n\nWhat is the secret number of {name}? Answer with the number alone."
    return BEGIN + USER + IN_FRONT[shift] + "".join(sentences) + asked + ASSISTANT, number


def numbers_in(text: str) -> set[str]:
    """As digits: 12,345 and 12 345 are 12345."""
    return {re.sub(r"\D", "", one) for one in re.findall(r"\d{1,3}(?:[,' \u202f\u00a0]\d{3})+(?!\d)|\d+", text)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="about this many tokens")
    parser.add_argument("--depths", type=float, nargs="+", default=list(DEPTHS), help="0 start, 1 end")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--every-place", action="store_true", help="each four times, at all places of a group of four")
    parser.add_argument("--min-score", type=float, default=1.0)


def run(options: argparse.Namespace) -> Verdict:
    endpoint = endpoint_of(options)
    at_least(NAME, 1, repeats=options.repeats, lengths=min(options.lengths))
    check_bar(NAME, options.min_score)
    bad = [depth for depth in options.depths if not 0 <= depth <= 1]
    if bad:
        raise ValueError(f"needle: --depths must lie between 0 and 1, got {bad}")
    findings, asked, found, grid, tokens = [], 0, 0, {}, 0
    places, by_length = len(IN_FRONT) if options.every_place else 1, {}
    for length in options.lengths:
        for depth in options.depths:
            for repeat, shift in itertools.product(range(options.repeats), range(places)):
                prompt, number = question(length, depth, options.seed + repeat, shift)
                answer = endpoint.generate(prompt, 24)
                where = f"{length} tokens, depth {depth:g}"
                whole.demand_end(answer, where)
                if answer.prompt_tokens < length * MIN_LENGTH_SHARE:
                    raise whole.NotWhole(f"{where}: the server counts {answer.prompt_tokens} prompt tokens")
                right = numbers_in(answer.text) == {number}  # the number, and no other one beside it
                asked, found, tokens = asked + 1, found + right, max(tokens, answer.prompt_tokens)
                for table, key in ((grid, f"{length} at {depth:g}"), (by_length, answer.prompt_tokens % 4)):
                    cell = table.setdefault(key, [0, 0])
                    cell[0], cell[1] = cell[0] + right, cell[1] + 1
                if not right:
                    place = f"{answer.prompt_tokens} tokens, depth {depth:g}"
                    findings.append(f"{place}: expected {number}, got {answer.text.strip()[:60]!r}")
    score = found / asked
    summary = f"{found} of {asked} found (bar {options.min_score:.0%})"
    figures = {"score": score, "longest_prompt_tokens": tokens}
    details = {"found_of_asked": grid, "found_of_asked_by_tokens_modulo_4": by_length}
    few = too_few(found, asked, options.min_score)
    return Verdict(NAME, score >= options.min_score, summary, findings, figures, details=details, incomplete=few)
