"""Gate 6: hours of mixed lengths and concurrency; every answer is looked at for the marks of silent corruption.

The marks, as users have reported them: words in a foreign script, the same words again and again, characters that are
none, control tokens in the text, a tool call's markup that is cut or unbalanced, an answer that is empty. Every
request is one line of the log file (--state), so a soak can be stopped and taken up again, and a find can be sent
again by its number.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import threading
import time
import unicodedata
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.quality.verdict import Verdict, endpoint_of
from bench.serving.endpoint import Answer, Endpoint, ServerError
from bench.serving.prompts import ASSISTANT, BEGIN, USER, prose, task

NAME = "corruption-soak"
CONCURRENCIES = (1, 2, 4, 8, 16, 32)
WORDS = (0, 50, 300, 1500, 6000)  # of the document before the request
OUTPUTS = (64, 256, 1024)
SCRIPTS = {"LATIN", "DIGIT", "GREEK"}  # Greek letters are formulas
FOREIGN_SHARE = 0.01  # of the letters, and at least two: a quoted name may be foreign
REPEAT_WORDS, REPEAT_TIMES = 8, 6  # a stretch of up to so many words, so often in a row
CONTROL = re.compile(r"<｜[^｜]*｜>|</?think>")
MARKUP = re.compile(r"(</?)｜DSML｜(\w+)([^>]*)(>?)")


def foreign_script(text: str) -> str | None:
    letters = [char for char in text if char.isalpha()]
    foreign = [char for char in letters if unicodedata.name(char, "UNKNOWN").split()[0] not in SCRIPTS]
    if len(foreign) >= 2 and len(foreign) > FOREIGN_SHARE * len(letters):
        place = text.index(foreign[0])
        return f"foreign script ({len(foreign)} of {len(letters)} letters): {text[max(0, place - 20) : place + 20]!r}"
    return None


def repetition(text: str) -> str | None:
    """A stretch of words that follows itself REPEAT_TIMES times, or one character thirty-two times."""
    words = text.split()
    for size in range(1, REPEAT_WORDS + 1):
        run = 0
        for index in range(size, len(words)):
            run = run + 1 if words[index] == words[index - size] else 0
            if run >= size * (REPEAT_TIMES - 1) and any(
                any(c.isalnum() for c in w) for w in words[index - size : index]
            ):
                return f"repetition: {' '.join(words[index - size + 1 : index + 1])!r} {REPEAT_TIMES} times and more"
    stuck = re.search(r"(\w)\1{31}", text)
    return f"repetition: {stuck.group(1)!r} 32 times" if stuck else None


def broken_characters(text: str) -> str | None:
    bad = [char for char in text if char == "\ufffd" or (unicodedata.category(char) == "Cc" and char not in "\n\t\r")]
    return f"characters that are none: {len(bad)}, the first {bad[0]!r}" if bad else None


def control_tokens(text: str) -> str | None:
    found = CONTROL.search(text)
    return f"a control token in the text: {found.group(0)!r}" if found else None


def broken_markup(text: str) -> str | None:
    """Tool-call markup that is cut or does not balance. None was asked for, so even whole markup is worth a word."""
    open_tags: list[str] = []
    for begin, tag, _, end in MARKUP.findall(text):
        if not end:
            return f"broken tool-call markup: <{tag} is not closed"
        if begin == "<":
            open_tags.append(tag)
        elif not open_tags or open_tags.pop() != tag:
            return f"broken tool-call markup: </{tag}> closes nothing"
    if open_tags:
        return f"broken tool-call markup: <{open_tags[-1]}> is never closed"
    return "tool-call markup though no tool was offered" if "｜DSML｜" in text else None


def empty(text: str) -> str | None:
    return None if text.strip() else "an empty answer"


CHECKS = (foreign_script, repetition, broken_characters, control_tokens, broken_markup, empty)


def marks(text: str) -> list[str]:
    """The marks of corruption in an answer to an English request without tools."""
    return [mark for check in CHECKS if (mark := check(text))]


def request(number: int, seed: int, longest_words: int) -> tuple[str, int]:
    """(prompt, output tokens) of request `number`: the same in every run with this seed."""
    source = random.Random(f"soak {seed} {number}")
    words = min(source.choice(WORDS), longest_words)
    document = prose(words, seed * 1_000_003 + number) + "\n\n" if words else ""
    asked = task(seed * 1_000_003 + number)
    return f"{BEGIN}{USER}{document}{asked} Answer in English.{ASSISTANT}", source.choice(OUTPUTS)


def wave_sizes(seed: int, first: int) -> Iterator[int]:
    """How many requests are in flight in each wave."""
    source = random.Random(f"waves {seed} {first}")
    while True:
        yield source.choice(CONCURRENCIES)


class Log:
    """One JSON line a request. What is there already is not sent again."""

    def __init__(self, path: Path, seed: int):
        self.path, self.lock = path, threading.Lock()
        self.entries: list[dict] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.read_text().strip():
            head, *lines = path.read_text().splitlines()
            if json.loads(head) != {"soak": 1, "seed": seed}:
                raise ValueError(f"corruption-soak: {path} belongs to another soak: {head}")
            self.entries = [
                json.loads(line) for line in lines if line.endswith("}")
            ]  # a line cut by a crash is sent again
            path.write_text("\n".join([head, *(json.dumps(e) for e in self.entries)]) + "\n")
        else:
            path.write_text(json.dumps({"soak": 1, "seed": seed}) + "\n")

    def add(self, entry: dict) -> None:
        with self.lock:
            self.entries.append(entry)
            with open(self.path, "a") as file:
                file.write(json.dumps(entry) + "\n")

    @property
    def next_number(self) -> int:
        return max((entry["number"] for entry in self.entries), default=-1) + 1

    @property
    def seconds(self) -> float:
        return sum(entry["wave_s"] for entry in self.entries if "wave_s" in entry)


def progress(log: Log, total_s: float, spent_s: float) -> None:
    share = min(1.0, spent_s / total_s)
    bar = "#" * int(30 * share) + "." * (30 - int(30 * share))
    marked = sum(bool(entry["marks"]) for entry in log.entries)
    answers = sum("output_tokens" in entry for entry in log.entries)
    text = f"[{bar}] {share:4.0%}  {spent_s / 3600:.2f} of {total_s / 3600:.2f} h, {answers} answers, {marked} marked"
    print(
        f"\r{text}" if sys.stderr.isatty() else text,
        end="" if sys.stderr.isatty() else "\n",
        file=sys.stderr,
        flush=True,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hours", type=float, default=2.0, help="of soaking in all, earlier runs with this --state included"
    )
    parser.add_argument("--state", type=Path, default=Path("soak.jsonl"), help="the log; an existing one is continued")
    parser.add_argument("--longest-words", type=int, default=WORDS[-1], help="of the documents before a request")
    parser.add_argument("--longest-output", type=int, default=OUTPUTS[-1])
    parser.add_argument("--max-marked", type=int, default=0, help="answers that may bear a mark")


def soak(endpoint: Endpoint, options: argparse.Namespace, log: Log) -> str:
    """Wave after wave until the time is up; says why it ended early, if it did."""
    total_s, number = options.hours * 3600, log.next_number
    sizes = wave_sizes(options.seed, number)

    def one(index: int) -> None:
        prompt, output = request(index, options.seed, options.longest_words)
        answer: Answer = endpoint.generate(prompt, min(output, options.longest_output))
        entry = {"number": index, "prompt_tokens": answer.prompt_tokens, "output_tokens": len(answer.ids)}
        found = marks(answer.text)
        log.add(entry | {"in_flight": size, "marks": found} | ({"text": answer.text} if found else {}))

    while log.seconds < total_s:
        begin, size = time.monotonic(), next(sizes)
        with ThreadPoolExecutor(max_workers=size) as pool:
            waiting = [pool.submit(one, index) for index in range(number, number + 2 * size)]
            failures = [error for w in waiting if (error := w.exception()) is not None]
        number += 2 * size
        log.add({"number": number - 1, "wave_s": time.monotonic() - begin, "marks": []})
        progress(log, total_s, log.seconds)
        if failures:
            if not isinstance(failures[0], ServerError):
                raise failures[0]
            return f"{len(failures)} requests failed: {failures[0]}"
    return ""


def run(options: argparse.Namespace) -> Verdict:
    if options.hours <= 0:
        raise ValueError(f"corruption-soak: --hours must be positive, got {options.hours:g}")
    endpoint, log = endpoint_of(options), Log(options.state, options.seed)
    ended = soak(endpoint, options, log)
    answers = [entry for entry in log.entries if "output_tokens" in entry]
    marked = [entry for entry in answers if entry["marks"]]
    findings = [f"request {e['number']} ({e['in_flight']} in flight): {'; '.join(e['marks'])}" for e in marked]
    figures = {"answers": len(answers), "marked": len(marked), "hours": log.seconds / 3600}
    figures["output_tokens"] = sum(entry["output_tokens"] for entry in answers)
    summary = f"{len(marked)} of {len(answers)} answers bear a mark of corruption (allowed {options.max_marked})"
    passed = len(marked) <= options.max_marked and bool(answers)
    # a mark that was found stays found, also when the server died afterwards
    incomplete = ended if passed or not answers else ""
    return Verdict(NAME, passed, summary, findings, figures, [ended] if ended else [], incomplete)
