"""EAGLE's drafts, followed from pass to pass: what the MTP block is given, and what becomes of what it says.

A row of the block at position p is given the token at p + 1, and streams: where it goes over what is known or was
verified, the target's at p; behind another draft the block's own at p - 1. What it says is the token at p + 2, which
the next verification has in its place. Without this a block that computes rightly, of another row's streams or of
tokens that nobody answered, would look right, and so would guesses that are not its own: only less would be accepted.

Of DSPARK's blocks the tokens alone are followed: the one that is known, and the masks behind it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch

from deepseek_v4_sm120.commands.layers.record import CHAINED, PROMPT, VERIFY
from deepseek_v4_sm120.commands.layers.verdict import BEGUN


@dataclass
class Chain:
    """A place is a pass, and a judged row of it."""

    places: dict = field(default_factory=lambda: defaultdict(dict))  # (kind, request) -> {position: the newest place}
    behind: dict = field(default_factory=dict)  # kind -> the streams behind all rows of its passes: exact, coarse
    begun: dict = field(default_factory=lambda: defaultdict(lambda: [0, 0]))  # mode -> rows that were asked, wrong ones

    def picked(self, mode: str, segment) -> torch.Tensor:
        """Of the block's rows those to judge: of a prompt's the same as of the target's, of others all."""
        rows, of_target = range(segment.end - segment.start), self.places["target", segment.request]
        known = [i for i in rows if segment.start + i in of_target] if mode == PROMPT else rows
        return torch.tensor([*known], dtype=torch.long)

    def take(self, kind: str, mode: str, made, segments, tokens: torch.Tensor) -> None:
        """A pass, in the order in which they ran; segments: their rows among `tokens`, those of the whole pass."""
        begin = 0
        for segment, pick in zip(segments, made.picks, strict=True):
            own, positions = tokens[segment.rows].tolist(), (segment.start + pick).tolist()
            if kind == "draft":
                of, back = ("draft", 1) if mode == CHAINED else ("target", 0)
                known = self.places[of, segment.request]
                made.sources += [known.get(position - back) for position in positions]
            elif mode == VERIFY:
                self.verified(segment, own)
            self.count(made.mode, own, segment.given)
            newest = self.places[kind, segment.request]
            for position in range(segment.start, segment.end):
                newest.pop(position, None)  # of an earlier pass, and refused
            newest.update((position, (made, begin + i)) for i, position in enumerate(positions))
            begin += len(positions)

    def count(self, mode: str, tokens: list[int], given: tuple) -> None:
        known = [(token, one) for token, one in zip(tokens, given, strict=False) if one is not None]
        if known:
            self.begun[mode][0] += len(known)
            self.begun[mode][1] += sum(token != one for token, one in known)

    def verified(self, segment, tokens: list[int]) -> None:
        """Behind the token that is known are the drafts, in their order."""
        drafted = self.places["draft", segment.request]
        for place in range(1, len(tokens)):
            guessed, begun = (drafted.get(segment.start + place - back) for back in (2, 1))
            if guessed is not None and is_chained(guessed) == (place > 1):
                guessed[0].following[guessed[1]] = tokens[place]
            if begun is not None and is_chained(begun):
                self.count(begun[0].mode, [int(begun[0].tokens[begun[1]])], (tokens[place],))

    def keep(self, kind: str, passes: list, streams: torch.Tensor, rounded: torch.Tensor) -> None:
        begin = 0
        for one in passes:
            one.begin, begin = begin, begin + len(one.tokens)
        self.behind[kind] = streams.flatten(1), rounded.flatten(1)

    def given(self, passes: list):
        """(mode, the streams that rows were given, what they are exactly, what a coarse right engine makes of them)."""
        for mode in dict.fromkeys(one.mode for one in passes):
            kind = "draft" if mode.endswith(CHAINED.lower()) else "target"
            every = [(p.hidden[i], at) for p in passes if p.mode == mode for i, at in enumerate(p.sources) if at]
            if every and kind in self.behind:
                rows = torch.tensor([one.begin + row for _, (one, row) in every])
                seen = torch.stack([hidden for hidden, _ in every])
                yield mode, seen, *(one[rows.to(one.device)] for one in self.behind[kind])

    def said(self) -> list[dict]:
        """As tokens.py says it."""
        none = {"what": BEGUN, "otherwise": {}}
        return [none | {"mode": mode, "rows": rows, "off": off} for mode, (rows, off) in self.begun.items()]


def is_chained(place: tuple) -> bool:
    return place[0].mode.endswith(CHAINED.lower())
