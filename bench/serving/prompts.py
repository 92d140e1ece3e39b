"""Prompts of exact token lengths, all different, the same in every run with the same seed.

`random` prompts are uniform token ids: they need no tokenizer, exercise the kernels, and say nothing of speculation,
whose acceptance depends on the text. `text` prompts are made sentences, code and questions, cut to length by the
server's own tokenizer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

RANDOM_IDS = range(1000, 100_000)  # ordinary tokens of DeepSeek-V4's vocabulary of 129,280
BEGIN, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜></think>"


def _parts(text: str) -> list[str]:
    return text.split("|")


_WHO = _parts(
    "the baker|a young surveyor|our neighbour|the night guard|an old pilot|the librarian|her cousin|the engineer"
)
_DID = _parts("repaired|described|counted|painted|lost|measured|borrowed|sold|sketched|carried|found|ignored")
_WHAT = _parts(
    "a copper kettle|the northern bridge|seven letters|a clock|the harbour map|two lanterns|an orchard|the ledger"
)
_WHERE = _parts(
    "near the river|behind the station|in the old mill|at the market|on the island|under the stairs|by the lake"
)
_WHEN = _parts("before dawn|in late autumn|after the storm|on a Tuesday|during the festival|years ago|last winter")
_WHY = _parts(
    "because nobody asked|to settle a bet|as the rules required|for no clear reason|so that the children could see it"
)
_TASKS = (
    "Explain to a new colleague, in detail, how {what} could be {did} {where}, and what can go wrong.",
    "Write a long story in which {who} {did} {what} {where} {when}.",
    "Write a Python class that records who {did} {what}, with methods to add, search and print, and tests for each.",
    "Compare three ways in which {who} might have {did} {what} {when}, with the advantages of each.",
)


def sentence(source: random.Random) -> str:
    pick = source.choice
    return f"{pick(_WHO)} {pick(_DID)} {pick(_WHAT)} {pick(_WHERE)} {pick(_WHEN)}, {pick(_WHY)}.".capitalize()


def prose(num_words: int, seed: int) -> str:
    """At least `num_words` words of plain English, different from the first sentence on for different seeds."""
    source = random.Random(f"prose {seed}")
    found = [f"Entry {source.randrange(10**9)}."]
    words = 0
    while words < num_words:
        found.append(sentence(source))
        words += found[-1].count(" ") + 1
    return " ".join(found)


def task(seed: int) -> str:
    """A request for a long answer."""
    source = random.Random(f"task {seed}")
    fill = {"who": source.choice(_WHO), "did": source.choice(_DID), "what": source.choice(_WHAT)}
    fill |= {"where": source.choice(_WHERE), "when": source.choice(_WHEN)}
    return f"Case {source.randrange(10**6)}. " + source.choice(_TASKS).format(**fill)


def random_ids(length: int, seed: int) -> list[int]:
    if length < 1:
        raise ValueError(f"random_ids: length must be at least 1, got {length}")
    source = random.Random(f"ids {seed}")
    return [source.choice(RANDOM_IDS) for _ in range(length)]


class PromptSource:
    """Token ids of prompts. `tokenize`: text to ids, needed for kind "text" only."""

    def __init__(self, kind: str, tokenize: Callable[[str], Sequence[int]] | None = None):
        if kind not in ("text", "random"):
            raise ValueError(f"the kind of prompts must be text or random, got {kind!r}")
        if kind == "text" and tokenize is None:
            raise ValueError("text prompts need a tokenizer")
        self.kind, self.tokenize = kind, tokenize

    def ids(self, length: int, seed: int) -> list[int]:
        """A whole prompt of `length` token ids. Text: a made document, then a request that calls for a long answer."""
        if self.kind == "random":
            return random_ids(length, seed)
        head = self._head()
        if length <= len(head):
            return self.end(length, seed)
        return head + self.end(length - len(head), seed)

    def beginning(self, length: int, seed: int) -> list[int]:
        """The first `length` token ids of prompts that share a long document; `end` completes one."""
        if self.kind == "random":
            return random_ids(length, seed)
        head = self._head()
        return (head + self.document(max(0, length - len(head)), seed))[:length]

    def end(self, length: int, seed: int) -> list[int]:
        """`length` token ids: running text as far as there is room, then the request."""
        if self.kind == "random":
            return random_ids(length, seed)
        request = list(self.tokenize(f"\n\n{task(seed)}{ASSISTANT}"))
        if len(request) > length:
            return request[-length:]
        return self.document(length - len(request), seed) + request

    def _head(self) -> list[int]:
        return list(self.tokenize(BEGIN + USER))

    def document(self, length: int, seed: int) -> list[int]:
        """`length` token ids of running text, no request in it."""
        if self.kind == "random":
            return random_ids(length, seed) if length else []
        words = length + 16
        while True:
            found = list(self.tokenize(prose(words, seed)))
            if len(found) >= length:
                return found[:length]
            words *= 2
