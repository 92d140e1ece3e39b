"""What soak_stage.py sends to one server, from a process of its own: streams that each send one request after another,
of every kind in turn, until the time is up. Prompts are token ids; number n is the same request in every run.
"""

from __future__ import annotations

import http.client
import itertools
import math
import random
import threading
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from bench.quality import greedy, server_load, whole
from bench.quality.cancelled_requests import ABORTED, EARLY_S, LEAVES, Storm
from bench.serving.answers import Answer
from bench.serving.endpoint import Endpoint
from bench.serving.server_errors import ServerError, ServerRefused

KINDS = (  # in turn; one that this server cannot take is a `plain` one
    *("plain", "sampled", "prefix", "plain", "streamed", "logprobs", "plain", "leaves", "prefix", "several", "plain"),
    *("aborted", "grammar", "chat", "leaves_early", "marker", "plain", "too_long", "malformed"),
)
OPTIONAL = ("logprobs", "grammar", "chat")  # asked once, alone, before the load
SHORTEST = 24
FEWEST_NEW, MOST_NEW = 16, 256
STORM_NEW = 4096  # of an answer that is cancelled
SEEN = (1, 3, 9, 21)  # tokens after which it is
DOCUMENTS, DOCUMENT, TAIL = 4, 5800, 60  # shared prefixes: how many, their tokens, and a request's own
LEAST_LONGEST = 6000  # tokens of the longest prompt: documents and markers fit
SAMPLED = ({}, {"min_p": 0.01}, {"frequency_penalty": 0.3, "repetition_penalty": 1.1, "min_new_tokens": 8})
SEVERAL = 3
MARKERS, MARKER_NEW = (9, 420, 1900, 5200), 24
GRAMMAR_WORDS = (7, 8)  # tokens of the made tokenizer
GRAMMAR_NEW, CHAT_NEW = 24, 24
MALFORMED = (  # bodies of /generate that are to be refused
    b'{"input_ids": [5, 6], "sampling_params": {"temperature": -1}}',
    b'{"input_ids": [5, 6',
    b"{}",
    b'{"input_ids": [5, 6], "sampling_params": {"max_new_tokens": -5}}',
    b'{"input_ids": [5, 6], "sampling_params": {"top_p": 7}}',
)
TOOL = {
    "type": "function",
    "function": {
        "name": "w9",
        "parameters": {"type": "object", "properties": {"w5": {"type": "string"}}, "required": ["w5"]},
    },
}
MOST_FAULTS = 200  # then the load ends: nothing more is to be learned
FAULT_S = 0.05  # a stream waits after one: a dead server is not to be asked a thousand times
SETTLE_S, RUNNING_S = 20.0, 0.5


@dataclass(frozen=True)
class Spec:
    """A server and what it is asked. `same`: what of a marker's answer must repeat, "bits" or "text"; `answers`: those
    of the markers, asked alone: under load they are asked where these are given."""

    url: str
    vocabulary: int
    context: int
    longest: int  # tokens of a prompt
    streams: int
    same: str
    seed: int = 1
    left_out: tuple[str, ...] = ()
    answers: tuple | None = None
    used: int | None = None  # tokens of the KV cache in use with nothing running, where that is known


def share(number: int, step: float) -> float:
    """Evenly spread over [0, 1): any stretch of numbers has as many small ones as another."""
    return number * step % 1.0


def length(number: int, longest: int) -> int:
    """Tokens of a prompt: most are short, one of twenty is longer than half of the longest."""
    return round(SHORTEST * (longest / SHORTEST) ** (share(number, (math.sqrt(5) - 1) / 2) ** 2))


def new_tokens(number: int) -> int:
    return FEWEST_NEW + round((MOST_NEW - FEWEST_NEW) * share(number, math.sqrt(2) - 1) ** 2)


def tokens(what: str, count: int, vocabulary: int) -> list[int]:
    return random.Random(what).choices(range(10, vocabulary), k=count)


def said(answer: Answer, same: str) -> tuple:
    return (tuple(answer.ids), tuple(answer.logprobs) if same == "bits" else ())


def unlike(answer: tuple, alone: tuple) -> str:
    """How what was `said` differs from what was said alone; "" where it does not."""
    (ids, logprobs), (alone_ids, alone_logprobs) = answer, alone
    if (first := greedy.first_difference(ids, alone_ids)) is not None:
        return f"another text from token {first} on"
    if logprobs != alone_logprobs:
        greatest = max((abs(a - b) for a, b in zip(logprobs, alone_logprobs, strict=False)), default=float("nan"))
        return f"the same text, log-probabilities up to {greatest:.2g} apart"
    return ""


@dataclass
class Seen:
    """What a load has brought; JSON-able but for `lock`."""

    begin: float = 0.0
    end: float = 0.0
    answers: list = field(default_factory=list)  # (asked at, whole at, its tokens)
    counts: Counter = field(default_factory=Counter)  # of each kind that went as it must
    faults: list = field(default_factory=list)
    ended: Counter = field(default_factory=Counter)  # how refusals and cancelled streams ended
    prompt_tokens: int = 0
    cached_tokens: int = 0
    markers: int = 0
    markers_differ: list = field(default_factory=list)
    ran_at_once: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def as_dict(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "lock"}


class Load:
    def __init__(self, spec: Spec):
        self.spec, self.seen, self.numbers = spec, Seen(), itertools.count()
        self.endpoint = Endpoint(spec.url, timeout_s=120.0, total_s=240.0)
        self.storm = Storm(self.endpoint, Namespace(storm_new=STORM_NEW), [])
        self.documents = [tokens(f"document {i}", DOCUMENT, spec.vocabulary) for i in range(DOCUMENTS)]

    # ---- requests: each returns (tokens of its answer, faults)

    def prompt(self, number: int) -> list[int]:
        return tokens(f"{self.spec.seed} {number}", length(number, self.spec.longest), self.spec.vocabulary)

    def whole(self, answer: Answer, new: int, where: str, logprobs: bool = False) -> tuple[int, list[str]]:
        with self.seen.lock:
            self.seen.prompt_tokens += answer.prompt_tokens
            self.seen.cached_tokens += answer.cached_tokens
        return len(answer.ids), whole.faults(answer, new, where, logprobs=logprobs)

    def asked(self, prompt: Sequence[int], new: int, where: str, **sampling) -> tuple[int, list[str]]:
        body = self.endpoint.generate_body(prompt, new, 0, True)
        body["sampling_params"] |= sampling
        return self.whole(Answer.of(self.endpoint.post("/generate", body)), new, where)

    def plain(self, number: int, where: str):
        return self.asked(self.prompt(number), new_tokens(number), where)

    def sampled(self, number: int, where: str):
        """In turn plainly, with min_p, which goes by other kernels, and with penalties, which count tokens."""
        more = SAMPLED[number // len(KINDS) % len(SAMPLED)]
        return self.asked(self.prompt(number), new_tokens(number), where, temperature=0.8, top_p=0.95, **more)

    def prefix(self, number: int, where: str):
        own = tokens(f"tail {number}", TAIL, self.spec.vocabulary)
        return self.asked(self.documents[number // len(KINDS) % DOCUMENTS] + own, new_tokens(number), where)

    def streamed(self, number: int, where: str):
        answer, _ = self.endpoint.stream(self.prompt(number), FEWEST_NEW, ignore_eos=True)
        return self.whole(answer, FEWEST_NEW, where)

    def logprobs(self, number: int, where: str):
        answer = self.endpoint.generate(self.prompt(number), FEWEST_NEW, top=1, ignore_eos=True)
        return self.whole(answer, FEWEST_NEW, where, logprobs=True)

    def several(self, number: int, where: str):
        """n > 1; one of two answers the same, all of the right length."""
        prompt = self.prompt(number)[:2048]
        body = self.endpoint.generate_body(prompt, FEWEST_NEW, 0, True)
        body["sampling_params"] |= {"n": SEVERAL, "temperature": 0.8}
        found = self.endpoint.several(body)
        counted = [self.whole(answer, FEWEST_NEW, where) for answer in found]
        faults = [fault for _, told in counted for fault in told]
        if len(found) != SEVERAL:
            faults.append(f"{where}: {len(found)} answers where {SEVERAL} were asked for")
        return sum(made for made, _ in counted), faults

    def grammar(self, number: int, where: str):
        body = self.endpoint.generate_body(self.prompt(number)[:2048], GRAMMAR_NEW, 0, True)
        body["sampling_params"]["regex"] = f"({'|'.join(f'w{i}' for i in GRAMMAR_WORDS)}){{{GRAMMAR_NEW}}}"
        answer = Answer.of(self.endpoint.post("/generate", body))
        made, faults = self.whole(answer, GRAMMAR_NEW, where)
        if not set(answer.ids) <= set(GRAMMAR_WORDS):
            faults.append(f"{where}: tokens that its grammar does not have: {answer.ids[:8]}")
        return made, faults

    def chat(self, number: int, where: str):
        """A chat with a tool."""
        content = " ".join(f"w{i}" for i in tokens(f"chat {number}", 50, self.spec.vocabulary))
        body = {"messages": [{"role": "user", "content": content}], "tools": [TOOL], "max_tokens": CHAT_NEW}
        found = self.endpoint.post("/v1/chat/completions", {"model": "default", **body, "ignore_eos": True})
        made = (found.get("usage") or {}).get("completion_tokens")
        if made != CHAT_NEW or not found.get("choices"):
            return 0, [
                f"{where}: {made} tokens where {CHAT_NEW} were asked for, {len(found.get('choices') or [])} choices"
            ]
        return made, []

    def cancelled(self, kind: str, number: int) -> tuple[int, list[str]]:
        rid = f"soak{self.spec.seed:04d}x{number:09d}"
        prompt = self.prompt(number)[: max(SHORTEST, self.spec.longest - STORM_NEW)]
        body = self.endpoint.generate_body(prompt, STORM_NEW, 0, True) | {"stream": True, "rid": rid}
        enough = SEEN[number % len(SEEN)]
        outcome = self.storm.cancelled(kind, body, enough)
        self.note_end(f"{kind}: {'confirmed' if outcome.confirmed else 'ended'}")
        return enough, list(outcome.faults)

    def leaves(self, number: int, where: str):
        return self.cancelled(LEAVES, number)

    def aborted(self, number: int, where: str):
        return self.cancelled(ABORTED, number)

    def leaves_early(self, number: int, where: str):
        body = self.endpoint.generate_body(self.prompt(number), MOST_NEW, 0, True) | {"stream": True}
        self.endpoint.leave("/generate", body, EARLY_S[number % len(EARLY_S)])
        return 0, []

    def too_long(self, number: int, where: str):
        prompt = tokens(f"long {number}", self.spec.context + 1 + number % 100, self.spec.vocabulary)
        return 0, self.refused(lambda: self.endpoint.generate(prompt, FEWEST_NEW), where)

    def malformed(self, number: int, where: str):
        data = MALFORMED[number // len(KINDS) % len(MALFORMED)]
        return 0, self.refused(lambda: self.raw(data), where)

    def raw(self, data: bytes) -> Answer:
        """Bytes as the body of /generate."""
        connection = http.client.HTTPConnection(self.endpoint.host, self.endpoint.port, timeout=60.0)
        try:
            connection.request("POST", "/generate", data, self.endpoint.headers)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise ServerRefused(text[:200], response.status)
        return Answer([], text[:200])

    def refused(self, ask: Callable[[], Answer], where: str) -> list[str]:
        """It must be, by the status or the end of its answer."""
        try:
            answer = ask()
        except ServerRefused as error:
            self.note_end(f"{where.split()[0]}: refused with {error.status}")
            return [] if 400 <= error.status < 600 else [f"{where}: {error}"]
        if answer.finish == "abort":
            self.note_end(f"{where.split()[0]}: aborted")
            return []
        return [f"{where}: taken: {answer.text[:80]!r}"]

    def marker(self, number: int, where: str):
        index = number // len(KINDS) % len(MARKERS)
        answer = self.ask_marker(index)
        how = unlike(said(answer, self.spec.same), self.spec.answers[index])
        with self.seen.lock:
            self.seen.markers += 1
            self.seen.markers_differ += [f"prompt of {MARKERS[index]} tokens, request {number}: {how}"] if how else []
        return self.whole(answer, MARKER_NEW, where)

    def ask_marker(self, index: int) -> Answer:
        """Where the server refuses log-probabilities, Spec.same is "text", and none are asked for."""
        prompt = tokens(f"marker {index}", MARKERS[index], self.spec.vocabulary)
        top = 1 if self.spec.same == "bits" else 0
        return self.endpoint.generate(prompt, MARKER_NEW, top=top, ignore_eos=True)

    # ---- the load

    def note_end(self, how: str) -> None:
        with self.seen.lock:
            self.seen.ended[how] += 1

    def kind(self, number: int) -> str:
        found = KINDS[number % len(KINDS)]
        cannot = found in self.spec.left_out or (found == "marker" and self.spec.answers is None)
        return "plain" if cannot else found

    def one(self, number: int) -> None:
        kind = self.kind(number)
        where, begin = f"{kind} request {number}", time.monotonic()
        try:
            made, faults = getattr(self, kind)(number, where)
        except ServerError as error:
            made, faults = 0, [f"{where}: {type(error).__name__}: {str(error)[:300]}"]
        with self.seen.lock:
            self.seen.answers.append((begin, time.monotonic(), made))
            self.seen.counts[kind] += not faults
            self.seen.faults += faults
        if faults:
            time.sleep(FAULT_S)

    def stream(self, until: float, turn: int) -> None:
        """Until then, and each kind in its turn, for which a busy machine may leave a short load no time."""
        while len(self.seen.faults) < MOST_FAULTS:
            number = next(self.numbers)
            if number >= turn and time.monotonic() >= until:
                break
            self.one(number)

    def run(self, seconds: float, first: int) -> dict:
        """All streams, `seconds` long and until each has its last answer; every kind is asked."""
        self.numbers, turn = itertools.count(first), first + len(KINDS)
        self.seen.begin = time.monotonic()
        until = self.seen.begin + seconds
        with server_load.Watch(self.endpoint, RUNNING_S) as watch, ThreadPoolExecutor(self.spec.streams) as pool:
            list(pool.map(self.stream, [until] * self.spec.streams, [turn] * self.spec.streams))
        self.seen.end = min(until, time.monotonic())
        self.seen.ran_at_once = None if watch.error else watch.most.running
        return self.seen.as_dict()


# ---- what the stage has done in the process of the load


def told(what: Callable, *arguments) -> object:
    """What `what` returns; what a server did wrong as a RuntimeError, which comes out of this process whole."""
    try:
        return what(*arguments)
    except ServerError as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


def run(spec: Spec, seconds: float, first: int) -> dict:
    return Load(spec).run(seconds, first)


def missing(spec: Spec) -> dict[str, str]:
    """{optional kind: why this server does not take it}; "bits" among them: it refuses log-probabilities."""
    load, found = Load(spec), {}
    for kind in OPTIONAL:
        try:
            _, faults = getattr(load, kind)(2, kind)
        except ServerError as error:
            faults = [str(error)[:200]]
        if faults:
            found[kind] = faults[0]
    return found


def quiet(spec: Spec) -> dict:
    """With nothing running: the markers' answers, each with an emptied cache, and what stays of the KV cache in use."""
    load = Load(spec)
    before, _ = server_load.until_idle(load.endpoint, SETTLE_S)
    answers = []
    for index in range(len(MARKERS)):
        server_load.empty_cache(load.endpoint, SETTLE_S)
        answers.append(said(load.ask_marker(index), spec.same))
    server_load.empty_cache(load.endpoint, SETTLE_S)
    after, _ = server_load.until_idle(load.endpoint, SETTLE_S, used=spec.used)
    stuck = f"{before.text()} {SETTLE_S:g} s after the load" if not before.is_idle else ""
    return {"answers": tuple(answers), "used": after.used, "stuck": stuck}
