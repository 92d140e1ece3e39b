"""What a server of this model writes and reads, by SGLang's own slots: each slot holds the hash of the prefix whose
token it stands for, so that a wrong one is seen at the first row that reads it.

The proportions are the model's (a page holds two windows and two long groups), its sizes are a sixteenth. Pools: the
windows, C4's entries and state (by the windows' slots), the long groups' entries and state (by the request's row).
"""

from dataclasses import dataclass

import numpy as np

PAGE, WINDOW = 16, 8
SHORT, LONG = 4, 8  # tokens of a group; the short ones overlap
STOP = 7  # a token
FIRST = 10  # of the tokens that the model says
_WORD = (1 << 64) - 1


class Wrong(AssertionError):
    """A slot that does not hold what is read of it, or a token that is not the request's."""


def mixed(hashed: int, token: int) -> int:
    hashed = ((hashed ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) & _WORD
    return ((hashed ^ hashed >> 29) * 0x94D049BB133111EB & _WORD) or 1


class Truth:
    """A request's tokens and the hash of each prefix: the prompt, then what the model says, which ends now and then."""

    def __init__(self, prompt: list[int], stops: int):
        self.tokens, self.hashes, self.stops = list(prompt), [], stops

    def hash_at(self, position: int) -> int:
        while len(self.hashes) <= position:
            self.hashes.append(mixed(self.hashes[-1] if self.hashes else 1, self.token(len(self.hashes))))
        return self.hashes[position]

    def token(self, position: int) -> int:
        while len(self.tokens) <= position:
            hashed = self.hash_at(len(self.tokens) - 1) >> 8
            self.tokens.append(STOP if hashed % self.stops == 0 else FIRST + hashed % 50)
        return self.tokens[position]

    def between(self, start: int, end: int) -> np.ndarray:
        return np.array([self.hash_at(position) for position in range(start, end)], dtype=np.uint64)


@dataclass
class Rows:
    """A request's rows of a pass: tokens from `start` on, to be written to slots."""

    truth: Truth
    name: str
    request: int
    start: int
    tokens: list[int]
    slots: list[int]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def hashes(self) -> list[int]:
        found, hashed = [], self.truth.hash_at(self.start - 1) if self.start else 1
        for token in self.tokens:
            found.append(hashed := mixed(hashed, int(token)))
        return found


class Pools:
    """speculative: rings of states are twice a window, as SGLang's are."""

    groups = (SHORT, LONG)  # that a pass has, beside the windows

    def __init__(self, tokens: int, window_tokens: int, requests: int, speculative: bool):
        self.short_ring, self.long_ring = (16, 2 * LONG) if speculative else (2 * SHORT, LONG)
        self.short_kept = self.short_ring - 2 * SHORT + 2 if speculative else 0  # c_plan.cuh's mtp_pad
        self.long_kept = self.long_ring - LONG + 2 if speculative else 0
        empty = {
            **{"windows": window_tokens + PAGE, "short_state": (window_tokens // PAGE + 1) * self.short_ring},
            **{"long_state": (requests + 1) * self.long_ring},
            **{"short": (tokens + PAGE) // SHORT, "long": (tokens + PAGE) // LONG},
        }
        for name, size in empty.items():
            setattr(self, name, np.zeros(size, dtype=np.uint64))
        self.rows = 0

    def short_slot(self, window_slot):
        return window_slot // PAGE * self.short_ring + window_slot % self.short_ring

    def long_slot(self, request, position):
        return request * self.long_ring + position % self.long_ring

    def is_kept(self, position: int, end: int) -> bool:
        """Whether a pass with many rows of a request that ends at `end` leaves its token's short state."""
        first = min(end // SHORT * SHORT - SHORT, end - self.short_kept)
        return position >= first or position % PAGE >= PAGE - SHORT

    def run(self, batch: list[Rows], windows_of: np.ndarray, slots_of: np.ndarray, *, decode: bool) -> None:
        """One pass: what each layer does. windows_of: full slot -> window slot; slots_of: (request, position) -> it."""
        written = [(rows, rows.hashes(), self._window_slots(rows, windows_of, slots_of)) for rows in batch]
        for _, hashes, places in written:
            self.windows[places] = np.array(hashes, dtype=np.uint64)
        if decode:
            self._leave_states(written, decode)
        for rows, hashes, _ in written:
            self._compress(rows, hashes, windows_of, slots_of[rows.request], decode)
        if not decode:
            self._leave_states(written, decode)
        for rows, hashes, _ in written:
            self._attend(rows, hashes, windows_of, slots_of[rows.request])
            self.rows += len(rows.tokens)

    def forget_rejected(self, rows: Rows, accepted: int) -> None:
        """ops.compressor.clear_drafts."""
        for position in range(rows.start + accepted, rows.end):
            self.long_state[self.long_slot(rows.request, position)] = 0

    def _window_slots(self, rows, windows_of, slots_of):
        if list(slots_of[rows.request, rows.start : rows.end]) != list(rows.slots):
            raise Wrong(f"{rows.name}: the slots of {rows.start} to {rows.end} are not its row's")
        places = windows_of[np.asarray(rows.slots)]
        if min(rows.slots) < PAGE or (places < PAGE).any():
            raise Wrong(f"{rows.name}: no slot to write from {rows.start} to {rows.end}")
        return places

    def _leave_states(self, written, decode):
        for rows, hashes, places in written:
            first = min(rows.end // LONG * LONG, rows.end - self.long_kept)
            for position, hashed, place in zip(range(rows.start, rows.end), hashes, places, strict=True):
                if SHORT in self.groups and (decode or self.is_kept(position, rows.end)):
                    self.short_state[self.short_slot(place)] = hashed
                if LONG in self.groups and (decode or position >= first):
                    self.long_state[self.long_slot(rows.request, position)] = hashed

    def _compress(self, rows, hashes, windows_of, row, decode):
        for index, position in enumerate(range(rows.start, rows.end)):
            for group, length, pool in ((SHORT, 2 * SHORT, self.short), (LONG, LONG, self.long)):
                if (position + 1) % group or group not in self.groups:
                    continue
                for read in range(max(0, position - length + 1), position + 1 if decode else min(rows.start, position)):
                    is_short = group == SHORT
                    place = self.short_slot(windows_of[row[read]]) if is_short else self.long_slot(rows.request, read)
                    held = (self.short_state if is_short else self.long_state)[place]
                    if held != (rows.truth.hash_at(read) if read < rows.start else hashes[read - rows.start]):
                        raise Wrong(f"{rows.name}: state of {read} for the group of {group} that ends at {position}")
                pool[rows.slots[index] // group] = hashes[index]

    def _attend(self, rows, hashes, windows_of, row):
        first = max(0, rows.start - WINDOW + 1)
        expected = np.concatenate([rows.truth.between(first, rows.start), np.array(hashes, dtype=np.uint64)])
        held = self.windows[windows_of[row[first : rows.end]]]
        if (held != expected).any():
            raise Wrong(f"{rows.name}: window of {rows.start} at {first + int((held != expected).argmax())}")
        for group in self.groups:
            pool = self.short if group == SHORT else self.long
            ends = range(group - 1, rows.end, group)
            expected = [rows.truth.hash_at(e) if e < rows.start else hashes[e - rows.start] for e in ends]
            held = pool[row[list(ends)] // group] if ends else np.array([])
            if list(held) != expected:
                raise Wrong(f"{rows.name}: entries of groups of {group} up to {rows.end}")
