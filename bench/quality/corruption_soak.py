"""Gate 6: hours of mixed lengths and concurrency; every answer is looked at for the marks of silent corruption.

What is looked for in a text, and what is not caught, stands in corruption_marks.py. Beside it an answer must end as it
says: so many tokens where it ended by length, more than a few words where it stopped by itself, as every request asks
for a long answer. It must not be its own prompt again, and not another request's answer: each request has a case
number, asks for it at the beginning, and fails where another request's is named; most answers must name their own, else
nobody knows whose they are. Of all answers together, a foreign letter here and there (in one answer a quoted name) and
ends within a sentence are looked at as well. Every other answer is streamed, and four requests share a document, so
that the prefix cache is used. The prompts are English, and English is asked for.

Every request is a line of the state (--state, see soak_state.py), so that a soak can be stopped and taken up again,
and a find can be sent again by its number. A soak that is taken up sends at least one more wave: without an answer of
this run there is no PASS. A request that failed, or that the server aborted, is kept with its text, is sent again when
the soak is taken up, and lets it end INCOMPLETE even if it is answered then; only a new state can pass after that.
Time counts while every request of a wave gets its answer.

SGLang does not say over HTTP which build of the patch runs: --report names the folder of DSV4_SM120_REPORT, then it
counts as part of the server's identity. How many requests really ran at once is told, as /v1/loads said it
(`ran_at_once`), and decides nothing: a server with --max-running-requests 8 soaks at 8.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.quality import server_load
from bench.quality.corruption_marks import marks, stray_letters
from bench.quality.soak_state import State, difference, digest, identity
from bench.quality.verdict import Verdict, at_least, endpoint_of, too_few
from bench.serving.answers import Answer
from bench.serving.endpoint import Endpoint
from bench.serving.prompts import ASSISTANT, BEGIN, USER, prose, task
from bench.serving.server_errors import ServerError

NAME = "corruption-soak"
CONCURRENCIES = (1, 2, 4, 8, 16, 32)
WORDS = (0, 50, 300, 1500, 6000)  # of the document before the request
OUTPUTS = (64, 256, 1024)
SHARED = 4  # requests, one behind the other, with the same document
FEWEST_OUTPUT = 32  # tokens: room for the case's name
WATCH_S = 0.1
LEAST_WORDS = 20  # of an answer that stopped by itself
MAX_SAME_SHARE = 0.25  # of the answers, each to another request, that may be the same text as another
MAX_UNNAMED_SHARE = 0.25  # of the answers that do not begin as they were asked to
CASE_DIGITS = 5  # from here on a number is a request's own; smaller ones count things
ECHO_WORDS, ECHO_SHARE = 8, 0.8  # stretches of so many words; share of an answer's that stand in its prompt
MAX_STRAY_SHARE = 0.02  # of the answers with letters of a foreign script, be they too few for a mark
MAX_OPEN_SHARE = 0.5  # of the answers that stopped by themselves, within a sentence
FEWEST = 3  # of those, to speak of a share


def request(number: int, seed: int, longest_words: int) -> tuple[str, int]:
    """(prompt, output tokens) of request `number`: the same in every run with this seed."""
    first = number - number % SHARED
    words = min(random.Random(f"soak {seed} {first}").choice(WORDS), longest_words)
    document = prose(words, seed * 1_000_003 + first) + "\n\n" if words else ""
    asked = f'{task(seed * 1_000_003 + number)} Begin with the words "Case {case(number, seed)}:". Answer in English.'
    return f"{BEGIN}{USER}{document}{asked}{ASSISTANT}", random.Random(f"output {seed} {number}").choice(OUTPUTS)


def case(number: int, seed: int) -> str:
    """The number that request `number` is known by in its own text."""
    return re.match(r"Case (\d+)\.", task(seed * 1_000_003 + number)).group(1)


def wave_sizes(seed: int, first: int) -> Iterator[int]:
    """How many requests are in flight in each wave."""
    source = random.Random(f"waves {seed} {first}")
    while True:
        yield source.choice(CONCURRENCIES)


def failure(answer: Answer, prompt: str) -> str:
    """Why an answer is none, "" if it is one."""
    if answer.finish not in ("stop", "length"):
        return f"finish_reason {answer.finish!r} after {len(answer.ids)} tokens"
    if answer.prompt_tokens < len(prompt.split()):  # a word has a token at least
        return f"the server counts {answer.prompt_tokens} prompt tokens of {len(prompt.split())} words"
    return ""


def whose_marks(text: str, prompt: str, own: str, cases: dict[str, int]) -> list[str]:
    """Whether an answer is another request's (`cases`: case number -> request), or its own prompt again."""
    others = [one for one in re.findall(r"\bCase (\d+)\b", text) if one != own and len(one) >= CASE_DIGITS]
    found = [f"case {one} is request {cases[one]}'s, not this one's" for one in others if one in cases][:1]
    words, asked = text.split(), f" {' '.join(prompt.split())} "
    stretches = [" ".join(words[place : place + ECHO_WORDS]) for place in range(len(words) - ECHO_WORDS + 1)]
    if len(words) >= LEAST_WORDS and sum(one in asked for one in stretches) >= ECHO_SHARE * len(stretches):
        found.append(f"its own prompt again: {text[:60]!r}")
    return found


def is_open(answer: Answer) -> bool:
    """Whether it stopped by itself, within a sentence."""
    end = answer.text.rstrip()[-1:]
    return answer.finish == "stop" and (end.isalnum() or end == ",")


def end_marks(answer: Answer, asked: int) -> list[str]:
    """What is wrong with where an answer ends."""
    found, words = [], len(answer.text.split())
    if len(answer.ids) > asked or (answer.finish == "length" and len(answer.ids) != asked):
        found.append(f"finish_reason {answer.finish!r} after {len(answer.ids)} of {asked} tokens")
    if answer.finish == "stop" and words < LEAST_WORDS:
        found.append(f"an answer of {words} words to a request for a long one")
    if answer.text and len(answer.text) < len(answer.ids) // 2:  # of ordinary text a token has four
        found.append(f"{len(answer.ids)} tokens, but a text of {len(answer.text)} characters")
    return found


def progress(state: State, total_s: float) -> None:
    share = min(1.0, state.seconds / total_s)
    bar = "#" * int(30 * share) + "." * (30 - int(30 * share))
    marked, hours = sum(bool(entry["marks"]) for entry in state.answers), (state.seconds / 3600, total_s / 3600)
    text = f"[{bar}] {share:4.0%}  {hours[0]:.2f} of {hours[1]:.2f} h, {len(state.answers)} answers, {marked} marked"
    end = "" if sys.stderr.isatty() else "\n"
    print(f"\r{text}" if sys.stderr.isatty() else text, end=end, file=sys.stderr, flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hours", type=float, default=2.0, help="of soaking in all, earlier runs with this --state included"
    )
    parser.add_argument(
        "--state", type=Path, default=Path("soak.jsonl"), help="the log; one of the same soak is continued"
    )
    parser.add_argument("--report", type=Path, help="folder of DSV4_SM120_REPORT of the server: which patch it runs")
    parser.add_argument("--longest-words", type=int, default=WORDS[-1], help="of the documents before a request")
    parser.add_argument("--longest-output", type=int, default=OUTPUTS[-1])
    parser.add_argument("--max-marked", type=int, default=0, help="answers that may bear a mark")


def soak(endpoint: Endpoint, options: argparse.Namespace, state: State) -> str:
    """Wave after wave until the time is up, at least one; says why it ended early, if it did."""
    try:
        return waves(endpoint, options, state)
    except KeyboardInterrupt:  # what was found until then stands
        return f"interrupted; the same command with --state {state.path} goes on"


def waves(endpoint: Endpoint, options: argparse.Namespace, state: State) -> str:
    total_s, sizes = options.hours * 3600, wave_sizes(options.seed, state.next_number())
    cases = {case(number, options.seed): number for number in range(state.next_number())}

    def one(number: int, size: int) -> str:
        """Send a request and note what came; why it failed, if it did."""
        prompt, output = request(number, options.seed, options.longest_words)
        output = min(output, options.longest_output)
        entry = {"number": number, "in_flight": size}
        try:
            is_streamed = number % 2 == 1
            answer = endpoint.stream(prompt, output)[0] if is_streamed else endpoint.generate(prompt, output)
            failed, text = failure(answer, prompt), answer.text
        except ServerError as error:
            failed, text = str(error), ""
        if failed:
            state.add(entry | {"failed": failed, "prompt": prompt, "max_new_tokens": output, "text": text})
            return f"request {number}: {failed}"
        own = case(number, options.seed)
        found = marks(text) + end_marks(answer, output) + whose_marks(text, prompt, own, cases)
        entry |= {"prompt_tokens": answer.prompt_tokens, "cached_tokens": answer.cached_tokens}
        entry |= {"output_tokens": len(answer.ids), "finish": answer.finish, "is_named": f"Case {own}" in text}
        entry |= {"is_open": is_open(answer), "stray_letters": stray_letters(text)}
        state.add(entry | {"marks": found, "digest": digest(answer.text)} | ({"text": answer.text} if found else {}))
        return ""

    while True:
        begin, size = time.monotonic(), next(sizes)
        numbers = state.numbers(2 * size)
        cases |= {case(number, options.seed): number for number in numbers}
        with server_load.Watch(endpoint, WATCH_S) as watch, ThreadPoolExecutor(max_workers=size) as pool:
            failed = list(filter(None, pool.map(one, numbers, [size] * len(numbers))))
        if failed:
            progress(state, total_s)
            return f"{len(failed)} of {len(numbers)} requests failed: {failed[0]}"
        ran = {} if watch.error else {"ran_at_once": watch.most.running}
        state.add({"number": max(numbers), "wave_s": time.monotonic() - begin} | ran)
        progress(state, total_s)
        if state.seconds >= total_s:
            return ""


def open_ends(answers: list[dict]) -> tuple[int, int, str]:
    """(answers that stopped by themselves within a sentence, of how many, why so few say nothing): lists end so."""
    stopped = [entry for entry in answers if entry["finish"] == "stop"]
    opens = sum(entry["is_open"] for entry in stopped)
    return opens, len(stopped), too_few(len(stopped) - opens, len(stopped), 1 - MAX_OPEN_SHARE)


def faults_of_all(answers: list[dict]) -> list[str]:
    """What no answer shows by itself, and all of them do."""
    strays = sum(entry["stray_letters"] > 0 for entry in answers)
    (opens, stopped, few), found = open_ends(answers), []
    if strays >= FEWEST and strays > MAX_STRAY_SHARE * len(answers):
        found.append(f"letters of a foreign script in {strays} of {len(answers)} answers, a few in each")
    if opens > MAX_OPEN_SHARE * stopped and not few:
        found.append(f"{opens} of {stopped} answers that stopped by themselves do so within a sentence")
    return found


def unfinished(state: State, ended: str, changed: str) -> str:
    """Why the soak cannot pass though no mark was found, "" if it can."""
    if ended:
        return ended
    if changed:
        return f"the server that ended is not the one that began: {changed}"
    if not state.fresh:
        return "no answer came in this run"
    if state.failures:
        first = state.failures[0]
        return (
            f"{len(state.failures)} requests have failed in this soak, the first: request {first['number']}: "
            f"{first['failed']}; once the reason is gone, begin a new --state"
        )
    texts = Counter(entry.get("digest") for entry in state.answers)
    if (same := len(state.answers) - len(texts)) > MAX_SAME_SHARE * len(state.answers):
        return f"{same} of {len(state.answers)} answers, each to another request, are the same text as another's"
    opens, stopped, few = open_ends(state.answers)
    if few and opens >= FEWEST:
        return (
            f"{opens} of {stopped} answers that stopped by themselves do so within a sentence: too few to say, soak on"
        )
    unnamed = sum(not entry["is_named"] for entry in state.answers)
    if unnamed > MAX_UNNAMED_SHARE * len(state.answers):
        return (
            f"{unnamed} of {len(state.answers)} answers do not name the case that they were asked to begin with: "
            "nothing shows that they answer their own requests"
        )
    return ""


def run(options: argparse.Namespace) -> Verdict:
    if not 0 < options.hours < 1e6:
        raise ValueError(f"corruption-soak: --hours must be above 0, got {options.hours:g}")
    at_least(NAME, 0, longest_words=options.longest_words, max_marked=options.max_marked)
    at_least(NAME, FEWEST_OUTPUT, longest_output=options.longest_output)
    endpoint = endpoint_of(options)
    server = identity(endpoint, options.report)
    asked = {name: getattr(options, name) for name in ("seed", "longest_words", "longest_output")}
    state = State(options.state, server | {"asked": asked})
    if state.word:
        print(f"corruption-soak: {state.word}", file=sys.stderr, flush=True)
    ended = soak(endpoint, options, state)
    changed = ""
    if not ended:
        try:
            changed = difference(server, identity(endpoint, options.report))
        except ServerError as error:
            ended = f"the server was lost after its last answer: {error}"
    marked = [entry for entry in state.answers if entry["marks"]]
    findings = [f"request {e['number']} ({e['in_flight']} in flight): {'; '.join(e['marks'])}" for e in marked]
    findings += [f"request {e['number']} ({e['in_flight']} in flight) failed: {e['failed']}" for e in state.failures]
    figures = {"answers": len(state.answers), "answers_of_this_run": len(state.fresh), "failed": len(state.failures)}
    figures |= {"marked": len(marked), "hours": state.seconds / 3600}
    figures["from_the_cache"] = sum(entry["cached_tokens"] > 0 for entry in state.answers)
    figures["output_tokens"] = sum(entry["output_tokens"] for entry in state.answers)
    summary = f"{len(marked)} of {len(state.answers)} answers bear a mark of corruption (allowed {options.max_marked})"
    of_all = faults_of_all(state.answers)
    findings += of_all
    passed = len(marked) <= options.max_marked and not of_all
    incomplete = unfinished(state, ended, changed)
    notes = [incomplete] if incomplete and not passed else []
    notes += [state.word] if state.word else []
    ran = [entry["ran_at_once"] for entry in state.entries if "ran_at_once" in entry]
    if ran:
        figures["ran_at_once"] = max(ran)
    else:
        notes.append("how many requests ran at once is not known (no /v1/loads)")
    if server["patch"] is None:
        notes.append("which build of the patch runs is not known (no --report)")
    # a mark that was found stays found, also when the server died afterwards
    return Verdict(NAME, passed, summary, findings, figures, notes, incomplete if passed else "")
