"""What SGLang's planner of groups says over many steps of several requests: its own text, out of the wheel and compiled
for a CPU, on the host and on the device, beside the tokens that each group is made of. Chunks of any length, pages,
cached beginnings, windows that are given to others, verified rows of which some are rejected, padding. Each token has a
number of its own, also those that are rejected. All releases from 0.5.18 on were run with this, older ones with their
device's plan and up to 4 rows; the suite has the last one."""

from __future__ import annotations

import functools
import random

import pytest
import torch

from tests.patching.kernels_on_cpu import call, compiled, text_of
from tests.patching.wheels import RELEASES, fetch

PAGE, WINDOW, REQUESTS, LONGEST, PAGES = 32, 128, 5, 640, 200  # pages of 32 have more borders, and fit any ring of 4's
IN_TURN = "static uint32_t add_in_turn(uint32_t* to, uint32_t n) { return *to += n, *to - n; }\n"
CALLS = """
CALL(plan_of_many, {
  std::vector<char> scratch(24 * n[1] + 16);
  auto lengths = view(t[3], {n[0]}), extended = view(t[4], {n[0]});
  lengths.kind = extended.kind = n[2] ? kDLGPU : kDLCPU;
  const auto made = @plan_compress_prefill(
      view(t[0], {n[0]}), view(t[1], {n[3], n[4]}), view(t[2], {n[5]}), lengths, extended,
      view(scratch.data(), {24 * n[1]}).on_host(), n[1], n[6], @page, n[7], false, false);
  static_cast<int64_t*>(t[7])[0] = made.first.shape[0];
  static_cast<int64_t*>(t[7])[1] = made.second.shape[0];
  std::memcpy(t[5], made.first.data, 16 * made.first.shape[0]);
  std::memcpy(t[6], made.second.data, 8 * made.second.shape[0]);
})
CALL(plan_of_step, {
  const auto made = @plan_compress_decode(
      view(t[0], {n[0]}), view(t[1], {n[3], n[4]}), view(t[2], {n[5]}), view(t[3], {n[0]}), n[6], @page, n[7], false);
  std::memcpy(t[4], made.data, 16 * n[0]);
})
"""
PADDING = 0  # of a request's row: nobody's


@functools.cache
def planner():
    wheel = fetch(RELEASES[-1])
    lines = text_of(wheel, "sgl_kernel/deepseek_v4/compress_v2.cuh")
    text = text_of(wheel, "csrc/deepseek_v4/c_plan.cuh").replace("atomicAdd", "add_in_turn")
    calls = CALLS.replace("@plan", "sglang::host::compress::plan").replace("@page", "n[6] == 4 ? n[8] : 256")
    return compiled((IN_TURN + lines + text, calls))


class Request:
    def __init__(self, tokens, computed, pages, own):
        self.tokens, self.computed, self.pages, self.own = tokens, computed, pages, own
        self.prompt, self.behind = len(tokens), 0  # pages whose window is given to others


class Server:
    """rows: that a step verifies of a request at most; 0: a token at a time."""

    def __init__(self, library, ratio, rows, seed):
        self.library, self.ratio, self.rows, self.chance = library, ratio, rows, random.Random(seed)
        self.width = 2 * ratio if ratio == 4 else ratio
        self.ring = 2 * self.width if rows else self.width
        self.slots_of = torch.zeros((REQUESTS + 1, LONGEST + 4 * PAGE), dtype=torch.int32)
        self.to_window = torch.zeros(PAGES * PAGE, dtype=torch.int64)
        self.free, self.windows = (self.chance.sample(range(1, PAGES), PAGES - 1) for _ in range(2))
        self.state, self.requests, self.cached, self.numbers = {}, {}, [], 0
        self.seen = dict.fromkeys(("groups", "hits", "rejected", "taken"), 0)

    def new(self, count):
        self.numbers += count
        return list(range(self.numbers - count, self.numbers))

    def place(self, row, position):
        """Of a token's state."""
        if self.ratio == 128:
            return row * self.ring + position % self.ring
        slot = int(self.to_window[self.slots_of[row, position]])
        return slot // PAGE * self.ring + slot % self.ring

    def arrive(self):
        (row, *_) = self.chance.sample([row for row in range(1, REQUESTS + 1) if row not in self.requests], 1)
        tokens, pages = [], []
        if self.cached and self.chance.random() < 0.7:
            held, least = self.chance.choice(self.cached), max(PAGE, self.ratio)
            ends = [
                n for n in range(least, len(held.tokens) + 1, least) if n // PAGE > held.behind
            ]  # the window is there
            if ends:
                count = self.chance.choice(ends)
                tokens, pages = held.tokens[:count], held.pages[: count // PAGE]
                self.seen["hits"] += 1
        found = Request(tokens + self.new(self.chance.choice([1, 2, 3, 5, 30, 200])), len(tokens), pages, len(pages))
        for number, page in enumerate(pages):
            self.slots_of[row, number * PAGE : (number + 1) * PAGE] = page * PAGE + torch.arange(PAGE)
        self.requests[row] = found

    def give_pages(self, row, length):
        request = self.requests[row]
        while len(request.pages) * PAGE < length:
            page, window, first = self.free.pop(), self.windows.pop(), len(request.pages) * PAGE
            request.pages = [*request.pages, page]
            self.slots_of[row, first : first + PAGE] = page * PAGE + torch.arange(PAGE)
            self.to_window[page * PAGE : (page + 1) * PAGE] = window * PAGE + torch.arange(PAGE)

    def take_window(self, page):
        window = int(self.to_window[page * PAGE]) // PAGE
        self.to_window[page * PAGE : (page + 1) * PAGE] = 0
        self.windows.insert(self.chance.randint(0, len(self.windows)), window)

    def leave_window(self, row):
        """What lies behind a request's window is given to others."""
        request = self.requests[row]
        for number in range(max(request.own, request.behind), max(0, request.computed - WINDOW) // PAGE):
            self.take_window(request.pages[number])
            request.behind, self.seen["taken"] = number + 1, self.seen["taken"] + 1

    def end(self, row):
        request = self.requests.pop(row)
        kept = request.computed // PAGE if len(self.cached) < 3 else 0
        if kept > request.own:
            request.tokens = request.tokens[: kept * PAGE]
            self.cached.append(request)
        for number in range(max(kept, request.own), len(request.pages)):
            self.free.append(request.pages[number])
            if number >= request.behind:
                self.take_window(request.pages[number])

    def plan(self, rows, counts, tables, on_device):
        count = len(rows) + (self.chance.choice([0, 3, 40]) if on_device else 0)
        reads, writes = torch.full((count, 4), -7, dtype=torch.int32), torch.full((count, 2), -7, dtype=torch.int32)
        lines = torch.zeros(2, dtype=torch.int64)
        sizes = [len(counts), count, on_device, *self.slots_of.shape, len(self.to_window), self.ratio, self.ring, PAGE]
        call(self.library, "plan_of_many", sizes, [*tables, reads, writes, lines])
        found = [part[:end].tolist() for part, end in zip((reads, writes), lines.tolist(), strict=True)]
        return [sorted(line for line in part if line[0] != -1) for part in found]

    def many(self, given):
        """given: request's row -> its tokens of this pass. Groups are read in front of what the pass leaves."""
        starts = {row: self.requests[row].computed if row else 1 for row in given}
        rows = [(row, starts[row] + i) for row, tokens in given.items() for i in range(len(tokens))]
        flat, counts = [token for tokens in given.values() for token in tokens], [len(t) for t in given.values()]
        lengths = torch.tensor([starts[row] + n for row, n in zip(given, counts, strict=True)])
        tables = [torch.tensor(list(given)), self.slots_of, self.to_window, lengths, torch.tensor(counts)]
        reads, writes = self.plan(rows, counts, tables, True)
        assert self.plan(rows, counts, tables, False) == [reads, writes], "the host's plan is another one"
        ended = [index for index, (_, position) in enumerate(rows) if (position + 1) % self.ratio == 0]
        assert sorted(place & 0xFFFF for _, place, *_ in reads) == ended
        for length, place, before, own in reads:
            index, held = place & 0xFFFF, place >> 16
            (row, position), window = rows[index], range(self.width)
            assert length == position + 1
            places = [(before if self.width - i > self.ratio else own) * self.ratio + i % self.ratio for i in window]
            inside = [flat[index - self.width + 1 + i] if i >= held else self.state.get(places[i]) for i in window]
            self.check(row, position, inside, given[row])
        for index, place in writes:
            assert place == self.place(*rows[index])
            self.state[place] = flat[index]

    def check(self, row, position, found, tokens):
        if row == PADDING:
            return
        request, first = self.requests[row], position + 1 - self.width
        known = request.tokens[: request.computed] + tokens
        assert found[max(0, -first) :] == known[max(0, first) : position + 1], (row, position)
        self.seen["groups"] += 1

    def step(self, rows):
        """A token of each."""
        for row in rows:
            self.requests[row].computed += 1
        lengths = torch.tensor([*(self.requests[row].computed for row in rows), 1])
        lines, given = torch.zeros((len(lengths), 4), dtype=torch.int32), torch.tensor([*rows, PADDING])
        sizes = [len(lengths), 0, 1, *self.slots_of.shape, len(self.to_window), self.ratio, self.ring, PAGE]
        call(self.library, "plan_of_step", sizes, [given, self.slots_of, self.to_window, lengths, lines])
        for row, (length, write, before, own) in zip(rows, lines.tolist(), strict=False):
            position = self.requests[row].computed - 1
            assert length == position + 1 and write == self.place(row, position)
            self.state[write] = self.requests[row].tokens[position]
            if length % self.ratio == 0:
                window = [(before if self.width - i > self.ratio else own, i % self.ratio) for i in range(self.width)]
                self.check(row, position, [self.state.get(page * self.ratio + i) for page, i in window], [])

    def turn(self):
        chance = self.chance
        if len(self.requests) < REQUESTS and chance.random() < 0.4:
            self.arrive()
        for row, request in list(self.requests.items()):
            if request.computed >= request.prompt and (len(request.tokens) > LONGEST or chance.random() < 0.02):
                self.end(row)
        waiting = [row for row, request in self.requests.items() if request.computed < request.prompt]
        others = [row for row in self.requests if row not in waiting]
        if waiting and (not others or chance.random() < 0.5):
            self.read(waiting[: chance.randint(1, 3)])
        elif others:
            self.go_on(chance.sample(others, chance.randint(1, len(others))))

    def read(self, rows):
        given = {}
        for row in rows:
            request = self.requests[row]
            left, border = request.prompt - request.computed, PAGE - request.computed % PAGE
            count = min(left, self.chance.choice([*range(1, 10), border, PAGE, 90, left]))
            given[row] = request.tokens[request.computed : request.computed + count]
            self.give_pages(row, request.computed + count)
        self.many(given)
        for row, tokens in given.items():
            self.requests[row].computed += len(tokens)
            self.leave_window(row)

    def go_on(self, rows):
        for row in rows:
            request = self.requests[row]
            request.tokens = request.tokens[: request.computed] + self.new(1)
            self.give_pages(row, request.computed + 2 * self.rows + 1)
        if not self.rows:
            self.step(rows)
        else:
            is_ragged, given = self.chance.random() < 0.5, {}
            for row in rows:
                count = self.chance.randint(1, self.rows) if is_ragged else self.rows
                given[row] = [self.requests[row].tokens[-1], *self.new(count - 1)]
            self.many(given | ({} if is_ragged else {PADDING: self.new(self.rows)}))
            for row, tokens in given.items():
                right = self.chance.choice([1, len(tokens), self.chance.randint(1, len(tokens))])
                request = self.requests[row]
                request.tokens = request.tokens[: request.computed] + tokens[:right]
                request.computed, self.seen["rejected"] = (
                    request.computed + right,
                    self.seen["rejected"] + len(tokens) - right,
                )
        for row in rows:
            self.leave_window(row)


CASES = ((4, 0, 100), (4, 6, 70), (4, 10, 60), (128, 6, 100))  # groups of, rows that are verified, turns


def demand_each_groups_own_tokens(ratio, rows, turns):
    server = Server(planner(), ratio, rows, seed=3)
    for _ in range(turns):
        server.turn()
    return server.seen


@pytest.mark.parametrize(("ratio", "rows", "turns"), CASES)
def test_each_group_has_its_own_tokens(ratio, rows, turns):
    seen = demand_each_groups_own_tokens(ratio, rows, turns)
    assert seen["groups"] > (2 if ratio == 128 else 100) and seen["taken"] > 0, seen
    assert (seen["hits"] > 0 or ratio == 128) and (seen["rejected"] > 50) == bool(rows), seen


def test_more_rows_than_a_ring_keeps_are_noticed():
    """Of the 16 places of a page's ring 10 may be rejected ones: `plan` refuses more."""
    with pytest.raises(AssertionError):
        demand_each_groups_own_tokens(4, 12, 40)
