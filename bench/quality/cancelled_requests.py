"""Gate 9: cancelled requests leave nothing behind: a storm of them changes no later answer, frees its memory, and harms
no request beside it.

In each round many requests are sent at once. Of four, one is left by its client in the middle of its stream, one before
its first byte has come (in the queue or the prefill), one is ended through /abort_request, and one is let alone: that
one must come whole, and asked again alone, after the storm, it may not part by a token that is not among the 20 best
there (a batch may move what is closer: that is only counted). Then the server must say (/v1/loads) that nothing runs or
waits, and that no more of the KV cache is in use than before. Prompts that were asked twice before the storm are asked
again: where the two answers were the same to the bit, log-probabilities too, so must the third be (a tie is none of the
storm's where the answer is another one again when it is asked once more); where the server wavers by itself, ties are
stated as everywhere, and what is wider by no more than three times its own difference lets nothing be said.

INCOMPLETE: no load is told; no request was seen running, or none held a token; an answer beside the storm is another
one alone and log-probabilities are refused, so that nobody can say by how much; no abort was confirmed by the end of
its stream; or the server was idle so late that the requests may have run to their own end, cancelled or not.

Not seen: memory outside of the KV cache's own count, that of the host, and what only many hours of this would show.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from bench.quality import greedy, server_load, whole
from bench.quality.server_load import Load
from bench.quality.verdict import Verdict, at_least, endpoint_of
from bench.serving.answers import Answer
from bench.serving.endpoint import Endpoint
from bench.serving.server_errors import ServerError, ServerRefused

NAME = "cancelled-requests"
LEAVES, LEAVES_EARLY, ABORTED, STAYS = "leaves", "leaves early", "aborted", "stays"
KINDS = (LEAVES, LEAVES_EARLY, ABORTED, STAYS)
SEEN_TOKENS = (1, 2, 5, 11, 23)  # after so many a request is cancelled
EARLY_S = (0.0, 0.02, 0.1, 0.3)  # or so long after it was sent
WATCH_S = 0.02
PACE_TOKENS = 5  # from which on a stream tells its pace
OWN_END_SHARE = 0.5  # of the time to the requests' own end: idle before that, or they may have come to it


@dataclass(frozen=True)
class Outcome:
    """What became of one request. `left`: tokens that it had still to make when it was cancelled, at `gone_s`
    (time.monotonic); `token_s`: seconds a token until then, None: not known.
    """

    kind: str
    faults: tuple[str, ...] = ()
    confirmed: bool = False  # it was ended before its time, and the server says so
    left: int = 0
    gone_s: float = 0.0
    token_s: float | None = None
    prompt: int = 0  # of a request that nobody cancelled: which prompt, and what came
    answer: Answer | None = None


class Storm:
    def __init__(self, endpoint: Endpoint, options: argparse.Namespace, prompts: list[list[int]]):
        self.endpoint, self.options, self.prompts = endpoint, options, prompts
        self.most = Load(0, 0, 0)

    def one(self, index: int) -> Outcome:
        kind, prompt = KINDS[index % len(KINDS)], self.prompts[index % len(self.prompts)]
        if kind == STAYS:
            found = self.stays(prompt, f"request {index}, which nobody cancelled")
            return replace(found, prompt=index % len(self.prompts))
        # SGLang aborts by the beginning of a name: these have one length
        rid = uuid.uuid4().hex
        body = self.endpoint.generate_body(prompt, self.options.storm_new, 0, True) | {"stream": True, "rid": rid}
        if kind == LEAVES_EARLY:
            self.endpoint.leave("/generate", body, EARLY_S[index // len(KINDS) % len(EARLY_S)])
            return Outcome(kind, left=self.options.storm_new, gone_s=time.monotonic())
        return self.cancelled(kind, body, SEEN_TOKENS[index // len(KINDS) % len(SEEN_TOKENS)])

    def stays(self, prompt: list[int], where: str) -> Outcome:
        answer = self.endpoint.generate(prompt, self.options.new, ignore_eos=True)
        if answer.finish == "abort":
            return Outcome(STAYS, (f"{where}: aborted: {answer.finish_message or 'it does not say why'}",))
        wrong = tuple(whole.faults(answer, self.options.new, where))
        return Outcome(STAYS, wrong, answer=None if wrong else answer)

    def cancelled(self, kind: str, body: dict, enough: int) -> Outcome:
        """Cancel a stream after `enough` tokens."""
        answer, first_s, gone = Answer([], ""), None, None
        events = self.endpoint.events("/generate", body)
        try:
            for event in events:
                answer, now_s = answer.followed_by(Answer.of(event, f"{self.endpoint.url}/generate")), time.monotonic()
                first_s = now_s if first_s is None else first_s
                made = len(answer.ids)
                if made >= enough and gone is None:
                    token_s = (now_s - first_s) / (made - 1) if made >= PACE_TOKENS else None
                    gone = Outcome(kind, left=self.options.storm_new - made, gone_s=now_s, token_s=token_s)
                    if kind == LEAVES:
                        return gone
                    self.endpoint.abort(body["rid"])
        except ServerRefused:  # an error in the stream: how an aborted one may end
            if gone is None:
                raise
            return replace(gone, confirmed=True)
        finally:
            events.close()
        if gone is None:  # ended before it could be cancelled, far from the tokens that were asked for
            why = f"finish_reason {answer.finish!r} {answer.finish_message} after {len(answer.ids)} tokens"
            asked = f"a request for {self.options.storm_new} tokens, ended before anybody cancelled it"
            return Outcome(kind, (f"{asked}: {why}",))
        return replace(gone, confirmed=answer.finish == "abort" and len(answer.ids) < self.options.storm_new)

    def round(self, number: int) -> list[Outcome]:
        count = self.options.requests
        with server_load.Watch(self.endpoint, WATCH_S) as watch, ThreadPoolExecutor(max_workers=count) as pool:
            found = list(pool.map(self.one, range(number * count, (number + 1) * count)))
        if watch.error is not None:
            raise watch.error
        self.most = Load(*map(max, zip(vars(self.most).values(), vars(watch.most).values(), strict=True)))
        return found


def own_end_s(outcomes: list[Outcome]) -> tuple[float, float] | None:
    """(when the first request was cancelled, when the first of them would have made its last token at the pace that was
    seen), time.monotonic; None: not known.
    """
    paces, gone = [one.token_s for one in outcomes if one.token_s], [one for one in outcomes if one.left]
    if not paces or not gone:
        return None
    pace = statistics.median(paces)
    return min(one.gone_s for one in gone), min(one.gone_s + one.left * pace for one in gone)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=32, help="at once in each round; three of four are cancelled")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--num-prompts", type=int, default=6, help="asked before and after the storm")
    parser.add_argument("--length", type=int, default=200, help="tokens of the shortest prompt; others are longer")
    parser.add_argument("--new", type=int, default=64, help="output tokens of what is not cancelled")
    parser.add_argument("--storm-new", type=int, default=4096, help="output tokens asked for by what is cancelled")
    parser.add_argument("--settle", type=float, default=60.0, help="seconds until nothing may run or wait any more")


def is_same(one: Answer, other: Answer) -> bool:
    """To the bit, as far as it is told."""
    return one.ids == other.ids and one.logprobs == other.logprobs


class Answers:
    """The prompts' answers, each alone and with an emptied cache. `top`: 0 where log-probabilities are refused."""

    def __init__(self, endpoint: Endpoint, options: argparse.Namespace, prompts: list[list[int]]):
        self.endpoint, self.options, self.prompts, self.top = endpoint, options, prompts, greedy.TOP

    def ask(self, when: str) -> tuple[list[Answer], list[str]]:
        """(the answers, what is wrong with them)."""
        answers, wrong = [], []
        for index, prompt in enumerate(self.prompts):
            server_load.empty_cache(self.endpoint, self.options.settle)
            answers.append(self.one(prompt))
            wrong += whole.faults(answers[-1], self.options.new, f"prompt {index}, {when}", logprobs=bool(self.top))
        return answers, wrong

    def one(self, prompt: list[int]) -> Answer:
        try:
            return self.endpoint.generate(prompt, self.options.new, top=self.top, ignore_eos=True)
        except ServerRefused as error:
            if error.status != 400 or not self.top:
                raise
        self.top = 0
        return self.endpoint.generate(prompt, self.options.new, ignore_eos=True)

    def wavers(self, first: list[Answer], second: list[Answer]) -> str:
        """Where the server itself, asked twice, parts by more than a tie, "" if nowhere."""
        for index, (a, b) in enumerate(zip(first, second, strict=True)):
            place = greedy.divergence(self.endpoint, index, self.prompts[index], a, b, self.options.tie)
            if place is not None and not place.tie:
                return place.text("before the storm", "again before it")
        return ""

    def changes(self, first: list[Answer], second: list[Answer], after: list[Answer]) -> tuple[list[str], int, str]:
        """(what the storm changed; the ties that it did not; what it may have changed, or the server by itself)."""
        found, ties, doubt = [], 0, ""
        for index, (a, b, c) in enumerate(zip(first, second, after, strict=True)):
            place = greedy.divergence(self.endpoint, index, self.prompts[index], a, c, self.options.tie)
            if place is None and a.logprobs == c.logprobs:
                continue
            is_wide, is_steady = place is not None and not place.tie, is_same(a, b)
            said = f"prompt {index}: a log-probability differs by {greedy.logprob_difference(a, c):.4g} after it"
            said = said if place is None else place.text("before the storm", "after it")
            if is_wide and (place.gap == math.inf or place.gap > greedy.AS_WIDE * greedy.own_difference(a, b)):
                found.append(said)
            elif is_wide:
                doubt = doubt or said
            elif is_steady and self.stays(index, c):
                found.append(said)
            else:
                ties += place is not None
        return found, ties, doubt

    def stays(self, index: int, after: Answer) -> bool:
        """Whether an answer after the storm is the same once more: else the server wavers by itself, if seldom."""
        server_load.empty_cache(self.endpoint, self.options.settle)
        return is_same(self.one(self.prompts[index]), after)


def left_behind(endpoint: Endpoint, before: Load, load: Load, settle_s: float) -> list[str]:
    """What the storm has left in the server. `load`: what it says after it."""
    if not load.is_idle:
        return [f"{settle_s:g} s after every client has gone: {load.text()}"]
    if load.used > before.used:
        return [f"{load.used - before.used} tokens of the KV cache are not given back: {load.text()}"]
    try:
        server_load.empty_cache(endpoint, settle_s)
    except ServerRefused as error:
        if error.status != 400:
            raise
        return [f"nothing runs or waits, and yet the cache cannot be emptied: {error}"]
    return []


class Aftermath:
    """What the rounds of a storm have shown. `doubt`: why it was no storm, or proves nothing."""

    def __init__(self, endpoint: Endpoint, options: argparse.Namespace, prompts: list[list[int]]):
        self.endpoint, self.options = endpoint, options
        self.sky, self.before = Storm(endpoint, options, prompts), server_load.load_of(endpoint)
        self.outcomes: list[Outcome] = []
        self.faults: list[str] = []
        self.idle_s, self.doubt, self.moved = 0.0, "", 0

    def round(self, number: int) -> bool:
        """Whether another one makes sense."""
        found = self.sky.round(number)
        load, waited_s = server_load.until_idle(self.endpoint, self.options.settle, self.before.used)
        self.outcomes += found
        self.idle_s = max(self.idle_s, waited_s)
        self.faults += [fault for one in found for fault in one.faults]
        if (times := own_end_s(found)) is None:
            self.doubt = self.doubt or "no request was cancelled in its middle"
        elif load.is_idle and time.monotonic() - times[0] > OWN_END_SHARE * (times[1] - times[0]):
            self.doubt = self.doubt or (
                f"the server was idle {time.monotonic() - times[0]:.1f} s after the first request was cancelled, and "
                f"they would have come to their own end after {times[1] - times[0]:.1f} s: take a greater --storm-new"
            )
        behind = left_behind(self.endpoint, self.before, load, self.options.settle)
        self.faults += [f"round {number + 1}: {fault}" for fault in behind]
        return not behind

    def rounds(self) -> None:
        try:
            for number in range(self.options.rounds):
                if not self.round(number):
                    break
        except ServerError as error:  # what was found before it stands
            self.doubt = f"in the storm: {error}"
            return
        if self.sky.most.running == 0:
            self.doubt = f"{self.endpoint.url}/v1/loads told of no running request in the storm: is it this server's?"
        elif self.sky.most.used <= self.before.used:
            self.doubt = f"{self.endpoint.url}/v1/loads told of running requests, and of no token in use for them"
        if not any(one.confirmed for one in self.outcomes):
            self.doubt = self.doubt or "no stream ended with finish_reason 'abort' after /abort_request"

    def beside(self, judged: bool) -> None:
        """Ask what nobody cancelled once more, alone: a token that is not among the best 20 there is no rounding.
        judged: the server tells log-probabilities; else differences are only counted.
        """
        alone: dict[int, Answer] = {}
        for one in self.outcomes:
            if one.answer is None:
                continue
            prompt = self.sky.prompts[one.prompt]
            if one.prompt not in alone:
                greedy.forget(self.endpoint)
                alone[one.prompt] = self.endpoint.generate(prompt, self.options.new, ignore_eos=True)
            pair = alone[one.prompt], one.answer
            if pair[0].ids == pair[1].ids or not judged:
                self.moved += pair[0].ids != pair[1].ids
                continue
            place = greedy.divergence(self.endpoint, one.prompt, prompt, *pair, self.options.tie)
            self.moved += not place.tie
            if place.second_logprob is None:
                self.faults.append(f"beside the storm, {place.text('alone', 'in it')}")

    def figures(self) -> dict[str, float]:
        return {
            "requests": len(self.outcomes),
            "cancelled": sum(one.kind != STAYS for one in self.outcomes),
            "aborts_confirmed": sum(one.confirmed for one in self.outcomes),
            "ran_at_once": self.sky.most.running,
            "tokens_in_use_max": self.sky.most.used,
            "tokens_in_use_before": self.before.used,
            "idle_after_s": self.idle_s,
            "moved_beside": self.moved,
        }


def run(options: argparse.Namespace) -> Verdict:
    at_least(NAME, 1, rounds=options.rounds, num_prompts=options.num_prompts, length=options.length)
    at_least(NAME, len(KINDS), requests=options.requests)
    at_least(NAME, 2, new=options.new)
    at_least(NAME, 2 * max(SEEN_TOKENS), storm_new=options.storm_new)
    at_least(NAME, 0.1, settle=options.settle)
    endpoint = endpoint_of(options)
    before, _ = server_load.until_idle(endpoint, options.settle)
    if not before.is_idle:
        incomplete = f"the server is busy with others' requests ({before.text()}): the gate needs it alone"
        return Verdict(NAME, None, "", incomplete=incomplete)
    lengths = [options.length + 61 * index for index in range(options.num_prompts)]
    prompts = greedy.prompts_for(endpoint, options.prompts, lengths, options.seed)
    answers = Answers(endpoint, options, prompts)
    first, wrong = answers.ask("before the storm")
    second, wrong_again = answers.ask("again before the storm")
    if wrong + wrong_again:
        return Verdict(NAME, False, f"{len(wrong + wrong_again)} faults before the storm", wrong + wrong_again)
    if place := answers.wavers(first, second):
        incomplete = f"the server gives other answers by itself, without any storm: {place}"
        return Verdict(NAME, None, "", incomplete=incomplete)
    server_load.until_idle(endpoint, options.settle)
    noise = greedy.prompts_for(
        endpoint, options.prompts, [options.length + 37 * (index % 16) for index in range(32)], options.seed + 1
    )
    aftermath = Aftermath(endpoint, options, noise)
    aftermath.rounds()
    faults, lost, ties, doubt = aftermath.faults, "", 0, ""
    try:
        after, wrong = answers.ask("after the storm")
        changed, ties, doubt = ([], 0, "") if wrong else answers.changes(first, second, after)
        faults += wrong + changed
        aftermath.beside(bool(answers.top))
    except ServerError as error:
        lost = f"after the storm: {error}"
    figures = aftermath.figures()
    wavers = sum(a.ids != b.ids for a, b in zip(first, second, strict=True))
    figures |= {"prompts": len(prompts), "wavered_before": wavers, "ties": ties}
    summary = (
        f"{figures['cancelled']} of {figures['requests']} requests cancelled in {options.rounds} rounds; "
        f"{len(faults)} faults in {len(prompts)} later answers, the requests beside them, the queue and the KV cache"
    )
    notes = [] if answers.top else ["log-probabilities are refused: later answers are compared by their tokens alone"]
    unjudged = f"other log-probabilities before the storm already, and then {doubt}" if doubt else ""
    if figures["moved_beside"] and not answers.top:
        unjudged = (
            f"{figures['moved_beside']} answers beside the storm are others than alone, and without log-probabilities "
            "nobody can say whether a batch may move them so"
        )
    incomplete = aftermath.doubt or lost or unjudged or whole.says_nothing([answer.ids for answer in first])
    return Verdict(NAME, not faults, summary, faults, figures, notes, "" if faults else incomplete)
