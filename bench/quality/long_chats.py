"""Gate 8: long chats, with reasoning and without: each turn's answer is the same whether the turns before it come from
the prefix cache or are computed anew.

A chat grows turn by turn, as clients send it: the whole of it every time, so that the server takes from its cache what
it knows. With reasoning the thoughts of earlier turns are left out of the next prompt, as SGLang's encoding of this
model does, so the chat leaves the cached path in its middle. Then every turn is asked twice more: with an emptied
cache, and at once again, with all of it cached. All three must be the same greedy tokens, but for stated ties.

The server's own count of cached tokens must show it: none with the emptied cache, at least half of what is shared
otherwise, never more than is shared; else the gate is INCOMPLETE, since nothing was compared. So it is where a server
that is asked twice with an emptied cache differs by a third as much, and more. One chat at a time.

Not looked at: the chat route and its parsers (tool-calls does), several chats that share the cache at once, prefixes
that come back from host memory or disk.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from bench.quality import greedy, server_load, whole
from bench.quality.verdict import Verdict, at_least, endpoint_of
from bench.serving.answers import Answer
from bench.serving.endpoint import Endpoint
from bench.serving.prompts import ASSISTANT, USER, PromptSource, task

NAME = "long-chats"
THINK, END_OF_THOUGHT, END = "<｜Assistant｜><think>", "</think>", "<｜end▁of▁sentence｜>"
LEAST_CACHED = 0.5  # of what a prompt shares with what was computed before
QUESTION = 24  # tokens of a question where the prompts are random


@dataclass
class Turn:
    """A prompt of a chat, and the answer that it got when the chat grew. `shared`: tokens that it begins like."""

    where: str
    prompt: list[int]
    grown: Answer
    shared: int


class Chat:
    """Builds the prompts of one chat, as token ids: text goes through the server's tokenizer."""

    def __init__(self, endpoint: Endpoint, kind: str, thinks: bool, seed: int):
        self.endpoint, self.kind, self.thinks, self.seed = endpoint, kind, thinks, seed
        self.source = PromptSource(kind, endpoint.tokenize)

    def ids(self, text: str, length: int, number: int) -> list[int]:
        """`text`, or `length` random ids."""
        return self.endpoint.tokenize(text) if self.kind == "text" else self.source.ids(length, self.seed + number)

    def opening(self) -> list[int]:
        """What the model's answer begins behind."""
        return self.ids(THINK if self.thinks else ASSISTANT, 2, 1 + self.thinks)

    def first(self, length: int) -> list[int]:
        """The first message: a document of `length` tokens and a question."""
        return self.source.beginning(length, self.seed) + self.ids(f"\n\n{task(self.seed)}", QUESTION, 3)

    def next(self, answer: Answer, number: int) -> list[int]:
        """What follows the messages so far: the answer as a client sends it back, and the next question."""
        if self.kind == "random":
            kept = answer.ids[len(answer.ids) // 2 :] if self.thinks else answer.ids
            return self.source.ids(2, self.seed + 1) + kept + self.source.ids(QUESTION, self.seed + 4 + number)
        said = answer.text.rpartition(END_OF_THOUGHT)[2] if self.thinks else answer.text
        return self.endpoint.tokenize(f"{ASSISTANT}{said}{END}{USER}{task(self.seed + number)}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chats", type=int, default=2, help="with reasoning, and as many without")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--length", type=int, default=2000, help="tokens of the document in the first message")
    parser.add_argument("--new", type=int, default=192, help="output tokens a turn")


class Comparison:
    """What was found so far."""

    def __init__(self, endpoint: Endpoint, options: argparse.Namespace):
        self.endpoint, self.options = endpoint, options
        self.findings: list[str] = []
        self.not_compared: list[str] = []  # why a turn says nothing of the cache
        self.faults = self.ties = self.compared = 0
        self.are_whole = True
        self.least_cached = 1.0
        self.cold: list[list[int]] = []

    def ask(self, prompt: list[int], where: str) -> Answer:
        answer = self.endpoint.generate(prompt, self.options.new, ignore_eos=True)
        wrong = whole.faults(answer, self.options.new, where)
        self.faults += len(wrong)
        self.findings += wrong
        self.are_whole = self.are_whole and not wrong
        return answer

    def see_cached(self, answer: Answer, shared: int, where: str) -> None:
        """Whether the server took from its cache what it could: `shared` tokens."""
        if shared == 0:
            if answer.cached_tokens:
                self.not_compared.append(f"{where}: {answer.cached_tokens} cached tokens in an emptied cache")
            return
        self.least_cached = min(self.least_cached, answer.cached_tokens / shared)
        if answer.cached_tokens > shared:
            self.not_compared.append(f"{where}: {answer.cached_tokens} cached tokens where {shared} are shared")
        elif answer.cached_tokens < LEAST_CACHED * shared:
            self.not_compared.append(
                f"{where}: {answer.cached_tokens} of {shared} shared tokens came from the cache (is it off, as with "
                "--disable-radix-cache, or too small for one chat?)"
            )

    def grow(self, chat: Chat, name: str) -> list[Turn]:
        """Ask turn after turn, each with what the one before left in the cache."""
        server_load.empty_cache(self.endpoint)
        messages, known, turns = chat.first(self.options.length), [], []
        for number in range(self.options.turns):
            prompt, where = messages + chat.opening(), f"{name}, turn {number + 1}"
            answer = self.ask(prompt, f"{where}, as the chat grew")
            first = greedy.first_difference(prompt, known)
            shared = len(prompt) if first is None else first
            if number:
                self.see_cached(answer, shared, f"{where}, as the chat grew")
            turns.append(Turn(where, prompt, answer, shared))
            known = prompt + answer.ids
            messages = messages + chat.next(answer, number + 1)
        return turns

    def blame(self, turn: Turn, place: greedy.Divergence) -> None:
        """The cache, unless a server differs by as much without it."""
        if greedy.is_own(self.endpoint, turn.prompt, self.options.new, place):
            self.not_compared.append(f"{turn.where}: asked twice with an emptied cache, the server differs from itself")
        else:
            self.faults += 1

    def compare(self, turn: Turn, index: int) -> None:
        """The same prompt with an emptied cache, and once more with all of it cached."""
        server_load.empty_cache(self.endpoint)
        cold = self.ask(turn.prompt, f"{turn.where}, cold")
        self.see_cached(cold, 0, f"{turn.where}, cold")
        again = self.ask(turn.prompt, f"{turn.where}, again")
        self.see_cached(again, len(turn.prompt), f"{turn.where}, again")
        self.cold.append(cold.ids)
        if not self.are_whole:  # answers that are none need no comparison
            return
        ways = [("once more from the cache", again)] + ([("as the chat grew", turn.grown)] if index else [])
        for way, answer in ways:
            self.compared += 1
            place = greedy.divergence(self.endpoint, index, turn.prompt, cold, answer, self.options.tie)
            if place is not None:
                self.ties += place.tie
                self.findings.append(f"{turn.where}: {place.text('with an emptied cache', way)}")
                if not place.tie:
                    self.blame(turn, place)


def run(options: argparse.Namespace) -> Verdict:
    at_least(NAME, 1, chats=options.chats, length=options.length)
    at_least(NAME, 2, turns=options.turns, new=options.new)
    endpoint = endpoint_of(options)
    found = Comparison(endpoint, options)
    for thinks in (False, True):
        for number in range(options.chats):
            name = f"chat {number + 1} {'with' if thinks else 'without'} reasoning"
            chat = Chat(endpoint, options.prompts, thinks, options.seed * 100_000 + 1000 * (2 * number + thinks))
            turns = found.grow(chat, name)
            for index, turn in enumerate(turns):
                found.compare(turn, index)
    figures = {"answers_compared": found.compared, "ties": found.ties, "least_cached_share": found.least_cached}
    figures["longest_prompt"] = max((len(turn.prompt) for turn in turns), default=0)
    summary = (
        f"{2 * options.chats} chats of {options.turns} turns, half of them with reasoning: {found.faults} answers from "
        f"the cache differ from those without it by more than a tie ({options.tie:g})"
    )
    incomplete = "" if found.faults else "; ".join(found.not_compared[:3]) or whole.says_nothing(found.cold)
    return Verdict(NAME, found.faults == 0, summary, found.findings, figures, [], incomplete)
