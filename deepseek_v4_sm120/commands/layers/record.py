"""What a server recorded (sglang_patches/layer_record.py), beside the requests that it was sent: whose rows are whose,
and whether all of it is there. What is not whole is `Unjudged`, never right."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from deepseek_v4_sm120.commands.layers.asking import SENT
from deepseek_v4_sm120.reference.mhc import STREAMS
from deepseek_v4_sm120.sglang_patches.rows.layers import FACTS

PROMPT, VERIFY = "EXTEND", "TARGET_VERIFY"
CHAINED = "DECODE"  # the mode of a draft behind a draft
BLOCK = "block"  # the kind of DSPARK's drafts


class Unjudged(Exception):
    """Why a record says nothing of the engine, in one sentence."""


@dataclass(frozen=True)
class Segment:
    """The rows of one request in a pass; `source`: whose inputs are those of the positions before, where any are."""

    request: int
    start: int
    rows: slice
    source: int | None
    following: tuple = ()  # of each row the token that the answer has behind it; None: it is not known
    given: tuple = ()  # of each row of a draft's the token that it must have; None: it is not known

    @property
    def end(self) -> int:
        return self.start + self.rows.stop - self.rows.start


@dataclass
class Sent:
    """The requests: of each its tokens, prompt and answer, and how many of them are the prompt."""

    tokens: list[list[int]]
    prompts: list[int]
    _slots: dict = field(default_factory=dict)  # SGLang's place of a request -> which it is
    _known: dict = field(default_factory=dict)  # (kind, request) -> positions of which the inputs are known
    _seen: dict = field(default_factory=dict)  # (request, whether of its prompt) -> positions that the target computed
    _as_sent: dict = field(default_factory=dict)  # request -> up to where its last verification has what was answered
    others: int = 0  # rows of requests that are none of these

    @classmethod
    def of(cls, requests: Iterable[dict]) -> Sent:
        lists = [one.get(name) for one in requests for name in ("input_ids", "output_ids") if isinstance(one, dict)]
        if not lists or not all(isinstance(one, list | None) and set(map(type, one or [0])) == {int} for one in lists):
            raise Unjudged(f"{SENT} has no requests with their tokens")
        pairs = [(one["input_ids"], one.get("output_ids") or []) for one in requests]
        return cls([[*prompt, *answer] for prompt, answer in pairs], [len(prompt) for prompt, _ in pairs])

    def segments(self, record: dict) -> list[Segment]:
        """Of a pass, in the order in which they ran."""
        found, kind, mode = [], record["kind"], record["mode"]
        tokens = record["tokens"].tolist()
        for slot, start, rows in layout(record):
            if kind == "target" and mode == PROMPT:
                self._slots[slot] = self._whose(slot, start, tokens[rows])
            request = self._slots.get(slot)
            if request is None:
                self.others += rows.stop - rows.start
                continue
            if kind == "target":
                self._check(request, start, tokens[rows], mode)
            following = self._following(request, start, tokens[rows]) if kind == "target" else ()
            source = self._source("target" if kind == BLOCK else kind, request, start, mode)
            given = self._given(kind, request, start, rows.stop - rows.start, mode) if kind != "target" else ()
            found.append(Segment(request, start, rows, source, following, given))
            if kind != BLOCK:
                self._known[kind, request] = found[-1].end
        return found

    def _whose(self, slot: int, start: int, tokens: list[int]) -> int | None:
        """Which request has these tokens there: the one that had the place, or the first that was not seen so far."""
        end = start + len(tokens)
        fitting = [i for i, whole in enumerate(self.tokens) if end <= self.prompts[i] and whole[start:end] == tokens]
        if start and self._slots.get(slot) in fitting:
            return self._slots[slot]
        unseen = [i for i in fitting if not self._seen.get((i, True), set()) & set(range(start, end))]
        return next(iter(unseen or fitting), None)

    def _check(self, request: int, start: int, tokens: list[int], mode: str) -> None:
        whole, answer = self.tokens[request], len(self.tokens[request]) > self.prompts[request]
        if mode != PROMPT and answer and start < len(whole) and whole[start] != tokens[0]:
            raise Unjudged(
                f"a pass ({mode.lower()}) has token {tokens[0]} at position {start} of request {request}, whose answer "
                f"has {whole[start]} there: rows of another request, or of another run"
            )
        same = [start + i < len(whole) and whole[start + i] == one for i, one in enumerate(tokens)]
        self._as_sent[request] = start + (same.index(False) if False in same else len(same))
        seen = self._seen.setdefault((request, mode == PROMPT), set())
        seen.update(start + i for i, one in enumerate(tokens) if start + i >= len(whole) or whole[start + i] == one)

    def _following(self, request: int, start: int, tokens: list[int]) -> tuple:
        """Of an answer's tokens, behind rows that hold what was answered."""
        whole, prompt = self.tokens[request], self.prompts[request]
        as_sent = [whole[start : start + i + 1] == tokens[: i + 1] for i in range(len(tokens))]
        at = range(start + 1, start + 1 + len(tokens))
        known = [ok and prompt <= i < len(whole) for ok, i in zip(as_sent, at, strict=True)]
        return tuple(whole[i] if ok else None for ok, i in zip(known, at, strict=True))

    def _given(self, kind: str, request: int, start: int, count: int, mode: str) -> tuple:
        """Each row of the MTP block has the token behind its own position; a block of DSPARK's begins with the one at
        its own. Which a draft has behind another draft, and behind one that was refused, no answer says."""
        whole = self.tokens[request]
        if kind == BLOCK:
            return (whole[start] if start < len(whole) else None,)
        most = len(whole) if mode == PROMPT else self._as_sent.get(request, 0) if mode != CHAINED else 0
        at = range(start, start + count)
        return tuple(whole[i + 1] if i < most and i + 1 < len(whole) else None for i in at)

    def _source(self, kind: str, request: int, start: int, mode: str) -> int | None:
        """None: there is nothing before. A prefix that the cache had is another request's."""
        if start == 0:
            return None
        whole = self.tokens[request][:start]
        for one in (request, *reversed(range(len(self.tokens)))):
            same = one == request or (start <= self.prompts[one] and self.tokens[one][:start] == whole)
            if same and self._known.get((kind, one), 0) >= start:
                if one != request and kind == "target":
                    self._seen.setdefault((request, True), set()).update(range(start))
                return one
        raise Unjudged(f"nothing is known of the first {start} tokens of a request ({kind}, {mode.lower()})")

    def missing(self) -> list[str]:
        """In words, what of the requests no pass was seen to compute."""
        found = []
        for i, (whole, prompt) in enumerate(zip(self.tokens, self.prompts, strict=True)):
            lacks = set(range(prompt)) - self._seen.get((i, True), set())
            if lacks:
                found.append(f"{len(lacks)} of {prompt} tokens of the prompt of request {i}")
            answered = self._seen.get((i, False), set())
            # the last token of an answer is given to no pass
            lacks = set(range(prompt, len(whole) - 1)) - answered
            if lacks or not answered:
                found.append(f"tokens of the answer to request {i}")
        return found


def layout(record: dict) -> Iterator[tuple[int, int, slice]]:
    """(place, first position, rows) of each request; of a captured pass rows at position 0 are nobody's."""
    positions, requests = record["positions"].tolist(), record["requests"].tolist()
    lengths = record.get("lengths")
    if not requests or (lengths is None and len(positions) % len(requests)):
        raise Unjudged(f"a pass has {len(positions)} rows of {len(requests)} requests ({record['mode'].lower()})")
    each = [len(positions) // len(requests)] * len(requests) if lengths is None else lengths.tolist()
    if sum(each) > len(positions) or len(each) != len(requests):
        raise Unjudged(f"a pass of {len(positions)} rows has requests of {each}")
    begin = 0
    for request, length in zip(requests, each, strict=True):
        rows = slice(begin, begin + length)
        begin += length
        at = positions[rows]
        if not at or (lengths is None and at[0] == 0):
            continue
        if at != list(range(at[0], at[0] + length)):
            raise Unjudged(f"rows of a request are at positions {at[:9]}, expected one after the other")
        yield request, at[0], rows


def read(folder: Path) -> Iterator[dict]:
    """The passes, in the order in which they ran. Their tensors are mapped, not read."""
    paths = sorted(folder.glob("*.pt"))
    if [path.stem for path in paths] != [f"{i:05d}" for i in range(len(paths))]:
        raise Unjudged(f"{folder} lacks passes: it has {len(paths)}, numbered up to {paths[-1].stem}")
    for path in paths:
        try:
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise Unjudged(f"{path} is cut off, or no pass of ours ({type(error).__name__})") from error
        wrong = problem(found)
        if wrong is not None:
            raise Unjudged(f"{path}: {wrong}")
        yield found


def problem(one) -> str | None:
    """What a pass lacks."""
    tensors = ("tokens", "positions", "requests", "out")
    if not isinstance(one, dict) or not all(isinstance(one.get(name), torch.Tensor) for name in tensors):
        return "no pass of ours"
    if not isinstance(one.get("y"), list) or not all(isinstance(y, torch.Tensor) for y in one["y"]):
        return "no pass of ours"
    rows, hidden = len(one["tokens"]), one["out"].shape[-1]
    if one.get("kind") == BLOCK:
        hidden //= STREAMS
    if one.get("kind") not in ("target", "draft", BLOCK) or not isinstance(one.get("mode"), str):
        return "of no kind"
    if one["kind"] == "draft" and tuple(getattr(one.get("hidden"), "shape", ())) != (rows, STREAMS * hidden):
        return "a draft without the streams that it goes on from"
    if one["out"].dim() != 2 or len(one["out"]) != rows:
        return f"not {rows} rows behind the last layer (a pass that ran in parts: prompts_in_halves)"
    if len(one["positions"]) != rows or any(tuple(y.shape) != (rows, hidden) for y in one["y"]):
        return f"not {rows} rows of {hidden} in every layer (a pass that ran in parts: prompts_in_halves)"
    return None


def facts_of(folder: Path) -> dict:
    from deepseek_v4_sm120.commands.layers.checkpoint import loaded

    return loaded(folder / FACTS) if (folder / FACTS).is_file() else {}
