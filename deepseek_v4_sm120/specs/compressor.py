"""What compressor is measured by: a step of a layer's KV compressors, decode's or verification's; sizes are a rank's.

Stock is SGLang's two launches, pooling and norm-rope-store (of many tokens a request a third, which writes the state),
from 0.5.14 on; what 0.5.12 has stays there with us too.
A case of calibrate is a kind of compressor at a number of rows, where no row's token ends its group, or every so
many-th row's does (at least one). A verdict weighs the two as often as rows at random places of their groups are
either.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from deepseek_v4_sm120.commands.plan.models import FLASH
from deepseek_v4_sm120.ops import compressor as op
from deepseek_v4_sm120.reference import compressor as reference
from deepseek_v4_sm120.reference import index_select, kv_pages
from deepseek_v4_sm120.reference.accuracy import relative_error, strict_error
from deepseek_v4_sm120.specs import bounds
from deepseek_v4_sm120.specs.check import ON_GPU, Check, Failure, same, within
from deepseek_v4_sm120.specs.provider import (
    OURS,
    STOCK,
    Provider,
    first_installed,
    our_problem,
    rows_of,
    sglang_version,
)
from deepseek_v4_sm120.specs.wo_a import make_freqs_cis

# The error of ours against the reference's own rounding counts so many times: what it may be is that much less
STORED_COUNTS = bounds.COMPRESSOR.others / bounds.COMPRESSOR_STORED
ERROR = "greatest relative error of the entries against float64, the cache's rounding in it; infinite: a wrong state"
MOST_ROWS = 64  # of a decode step
SINCE = (0, 5, 14)
HOMES = ("sglang.kernels.ops.attention.dsv4", "sglang.jit_kernel.dsv4")  # newest first
CLEANUP = "clear_unaccepted_c128_draft_states"
CLEANUP_HOMES = (  # newest first
    *("sglang.kernels.ops.kvcache.dsv4_c128_cleanup", "sglang.kernels.ops.attention.dsv4.c128_cleanup"),
    "sglang.jit_kernel.dsv4.c128_cleanup",
)
POSITIONS = 4096
PAGE_SIZES = {(4, 512): 64, (128, 512): 2, (4, 128): 64}  # of the cache, by (ratio, head_dim)


class Kind(NamedTuple):
    ratio: int
    head_dim: int
    fp4: bool = False

    @property
    def width(self) -> int:
        return (4 if self.ratio == 4 else 2) * self.head_dim

    @property
    def rounding(self) -> float:
        """What is allowed of many entries."""
        return bounds.COMPRESSOR_FP4 if self.fp4 else bounds.COMPRESSOR.truth


KINDS = {
    "c4": Kind(4, FLASH.head_dim),
    "c128": Kind(128, FLASH.head_dim),
    "index": Kind(4, FLASH.index_dim),
    "index_fp4": Kind(4, FLASH.index_dim, fp4=True),
}
LAYERS = {"c4": FLASH.layers_c4, "c128": FLASH.layers_c128, "index": FLASH.layers_c4}  # that have the kind


# ---- inputs


@dataclass
class Inputs:
    """The arguments of ops.compressor and of the reference."""

    kv_score: torch.Tensor
    state: torch.Tensor
    ape: torch.Tensor
    plan: torch.Tensor
    norm_weight: torch.Tensor
    norm_eps: float
    freqs_cis: torch.Tensor
    out_loc: torch.Tensor
    cache: torch.Tensor
    page_size: int
    fp4: bool
    writes: torch.Tensor | None = None  # of many tokens a request

    def arguments(self) -> dict:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def copy(self) -> Inputs:
        """With state and cache of its own."""
        return Inputs(**{**self.arguments(), "state": self.state.clone(), "cache": copy_of_pages(self.cache)})

    def rows(self, chosen) -> Inputs:
        """Some of a decode step's rows, with state and cache of their own."""
        parts = {name: getattr(self, name)[chosen].contiguous() for name in ("kv_score", "plan", "out_loc")}
        return Inputs(**{**self.copy().arguments(), **parts})


def copy_of_pages(cache: torch.Tensor) -> torch.Tensor:
    copied = torch.empty_strided(cache.shape, cache.stride(), dtype=cache.dtype, device=cache.device)
    return copied.copy_(cache)


def page_bytes(page_size: int, head_dim: int, fp4: bool) -> int:
    if head_dim == kv_pages.HEAD_DIM:
        return kv_pages.page_bytes(page_size)
    return page_size * (index_select.FP4_BYTES if fp4 else index_select.FP8_BYTES)


def make_plan(rows: list[tuple[int, int, int, int]], device) -> torch.Tensor:
    """[rows, 16] uint8 of (length, state slot, page of the group before, page of the group)."""
    return torch.tensor(rows, dtype=torch.int32, device=device).view(-1, 4).view(torch.uint8)


def make_inputs(kind: str, lengths, *, seed=0, device="cuda", spare_pages=3, gap=0, score_scale=3.0) -> Inputs:
    """A row for each of `lengths`, each of a request of its own, at most POSITIONS.

    Pages lie in no order. Of state only what a row may read is a number; where a row ends no group, out_loc is 0, the
    cache's dummy entry, and where there is no group before, its page is -1.
    """
    ratio, head_dim, fp4 = KINDS[kind]
    generator = torch.Generator(device=device).manual_seed(seed)
    width, rows = KINDS[kind].width, len(lengths)

    def randn(*shape):
        return torch.randn(shape, generator=generator, device=device)

    kv_score = randn(rows, width)
    kv_score[:, width // 2 :] *= score_scale
    num_pages = 2 * rows + spare_pages
    state = torch.full((num_pages, ratio, width), float("nan"), device=device)
    pages = torch.randperm(num_pages, generator=generator, device=device).tolist()
    page_size = PAGE_SIZES[ratio, head_dim]
    slots = torch.randperm(rows + 2 * page_size, generator=generator, device=device).tolist()
    plan, out_loc = [], []
    for row, length in enumerate(lengths):
        before, own, i = pages[2 * row], pages[2 * row + 1], (length - 1) % ratio
        half = head_dim if ratio == 4 else 0
        for start in (half, width // 2 + half):
            state[own, :i, start : start + head_dim] = randn(i, head_dim) * (score_scale if start >= width // 2 else 1)
        if ratio == 4 and length > 4:
            for start in (0, width // 2):
                state[before, :, start : start + head_dim] = randn(4, head_dim) * (score_scale if start else 1)
        plan.append((length, own * ratio + i, before if length > ratio else -1, own))
        out_loc.append(slots[row] if length % ratio == 0 else 0)
    stride = page_bytes(page_size, head_dim, fp4) + gap
    num_cache_pages = -(-(rows + 2 * page_size) // page_size)
    storage = torch.full((num_cache_pages * stride,), 0xA5, dtype=torch.uint8, device=device)
    return Inputs(
        kv_score=kv_score,
        state=state,
        ape=randn(8 if ratio == 4 else ratio, head_dim),
        plan=make_plan(plan, device),
        norm_weight=1 + 0.2 * randn(head_dim),
        norm_eps=1e-6,
        freqs_cis=make_freqs_cis(POSITIONS, device),
        out_loc=torch.tensor(out_loc, dtype=torch.int64, device=device),
        cache=storage.as_strided((num_cache_pages, stride - gap), (stride, 1)),
        page_size=page_size,
        fp4=fp4,
    )


@dataclass(frozen=True)
class Request:
    """Of a step with many tokens of each: it had `before` tokens, and has so many now."""

    before: int
    tokens: int


def slots_read(ratio: int) -> int:
    """Tokens of an entry's window."""
    return 2 * ratio if ratio == 4 else ratio


def planned(ratio: int, requests, rings, ring: int):
    """SGLang's plans (c_plan.cuh, 0.5.18 and later) of requests whose state's slots are `ring` from `rings` on:
    (entries (length, row, tokens that the state holds, page before, page), writes (row, slot))."""
    window, entries, writes, first_row = slots_read(ratio), [], [], 0
    kept = ring - window + 2 if ring > window else 0  # of the last tokens: what a rejection may need again
    for number, (request, start) in enumerate(zip(requests, rings, strict=True)):
        length = request.before + request.tokens
        first_write = min(length // ratio * ratio - (4 if ratio == 4 else 0), length - kept)
        for j in range(request.tokens):
            position, row = request.before + j, first_row + j
            if (position + 1) % ratio == 0:
                held = window - min(j + 1, window)
                pages = [(start + at % ring) // ratio for at in (max(position - ratio, 0), position)]
                entries.append((position + 1, row, held, *(pages if held else (-1, number))))
            if position >= first_write:
                writes.append((row, start + position % ring))
        first_row += request.tokens
    return entries, writes


def make_step(kind: str, requests, *, ring=None, padding=0, seed=0, device="cuda", score_scale=3.0) -> Inputs:
    """Many tokens of each of `requests` [Request]; the plans in no order and padded to all rows, of which the last
    `padding` belong to no request. ring: of a request's state, by default as SGLang has it with speculation.

    Of state only the window before the step is a number.
    """
    ratio, head_dim, fp4 = KINDS[kind]
    ring, width, window = ring or (16 if ratio == 4 else 256), KINDS[kind].width, slots_read(ratio)
    generator = torch.Generator(device=device).manual_seed(seed)
    rows = sum(request.tokens for request in requests)
    made = make_inputs(kind, [1] * (rows + padding), seed=seed, device=device, score_scale=score_scale)
    places = torch.randperm(len(requests) + 1, generator=generator, device=device).tolist()
    rings = [place * ring for place in places[: len(requests)]]
    state = torch.full(((len(requests) + 1) * ring, width), float("nan"), device=device)
    for request, start in zip(requests, rings, strict=True):
        for position in range(max(request.before - window + 1, 0), request.before):
            state[start + position % ring].normal_(generator=generator)
            state[start + position % ring, width // 2 :] *= score_scale
    entries, writes = planned(ratio, requests, rings, ring)
    out_loc = torch.zeros(rows + padding, dtype=torch.int64, device=device)
    slots = torch.randperm(made.cache.shape[0] * made.page_size - 1, generator=generator, device=device)[: len(entries)]
    if entries:
        out_loc[torch.tensor([row for _, row, *_ in entries], device=device)] = 1 + slots
    none = (-1, 0, -1, -1), (-1, -1)
    plans = []
    for found, empty in (
        ([(length, row | held << 16, *pages) for length, row, held, *pages in entries], none[0]),
        (writes, none[1]),
    ):
        padded = torch.tensor([*found, *[empty] * (rows + padding - len(found))], device=device)
        order = torch.randperm(rows + padding, generator=generator, device=device)
        plans.append(padded[order].to(torch.int32).contiguous().view(torch.uint8))
    return replace(
        made, state=state.view(-1, ratio, width), plan=plans[0], writes=plans[1], out_loc=out_loc.contiguous()
    )


@dataclass
class Drafts:
    """The arguments of ops.compressor.clear_drafts and of the reference."""

    requests: torch.Tensor
    lengths: torch.Tensor
    accepted: torch.Tensor
    states: list[torch.Tensor]
    ring: int
    tokens: int

    def arguments(self) -> dict:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def copy(self) -> Drafts:
        """With states of its own."""
        return replace(self, states=[state.clone() for state in self.states])


def make_drafts(requests: int, tokens: int, layers: int, *, ring=256, seed=0, device="cuda") -> Drafts:
    """Requests in no order, lengths that wrap around the ring, 0 to all tokens accepted; states of any bits."""
    generator = torch.Generator(device=device).manual_seed(seed)
    given = {"generator": generator, "device": device}
    lengths = torch.randint(0, 4 * ring, (requests,), **given)
    lengths[0] = 2 * ring - 1
    slots = -(-(requests + 2) * ring // 128) * 128
    least, most = -(1 << 31), (1 << 31) - 1
    states = [
        torch.randint(least, most, (slots, KINDS["c128"].width), **given).to(torch.int32).view(torch.float32)
        for _ in range(layers)
    ]
    return Drafts(
        requests=1 + torch.randperm(requests, **given),
        lengths=lengths,
        accepted=torch.randint(0, tokens + 1, (requests,), **given).to(torch.int32),
        states=states,
        ring=ring,
        tokens=tokens,
    )


# ---- self-test


def checks(quick: bool) -> Iterator[Check]:
    yield Check("compressor", "two references", _check_references)
    for kind in LAYERS if quick else KINDS:
        yield Check("compressor", kind, functools.partial(_check_kind, kind), ON_GPU)
        yield Check("compressor", f"{kind}, verification", functools.partial(_check_many, kind), ON_GPU)
    yield Check("compressor", "rejected drafts", _check_drafts, ON_GPU)


def _check_references() -> str:
    """Entries from a state against entries from a request's tokens."""
    inputs = make_inputs("c4", [8], device="cpu")
    before, own = inputs.plan.view(torch.int32)[0, 2:].tolist()
    tokens = torch.cat([inputs.state[before], inputs.state[own, :3], inputs.kv_score]).nan_to_num()
    layer = (inputs.ape, inputs.norm_weight, inputs.norm_eps, inputs.freqs_cis)
    _, entries = reference.compressor(**inputs.arguments())
    return within(relative_error(entries, reference.entries_of(tokens, *layer, 4)[1:]), bounds.REFERENCES_AGREE)


def _check_kind(kind: str) -> str:
    """1 and 40 rows at all places of a group against float64; a row's bits among the others."""
    ratio, head_dim, fp4 = KINDS[kind]
    inputs = make_inputs(kind, [ratio * (1 + row % 5) + row % 2 for row in range(40)])
    ours, truth, alone = inputs.copy(), inputs.copy(), inputs.rows(slice(0, 1))
    for made in (ours, alone):
        op.compressor(**made.arguments())
    ended, entries = reference.compressor(**truth.arguments())
    if not torch.equal(ours.state.view(torch.int32), truth.state.view(torch.int32)):
        raise Failure("the state is not what the reference wrote")
    stored, rounded = (reference.read(m.cache, m.page_size, m.out_loc[ended], head_dim, fp4) for m in (ours, truth))
    error = within(relative_error(stored, entries), KINDS[kind].rounding)
    # one number of FP4 is as much of a block as is allowed of it
    beside = (relative_error if fp4 else strict_error)(stored, rounded)
    within(beside, bounds.COMPRESSOR_STORED, "relative error against the reference's rounding")
    untouched = untouched_bytes(inputs, truth)
    same(ours.cache[untouched], inputs.cache[untouched], "bytes of the cache that are no entry's, before and after,")
    one, among = (reference.read(m.cache, m.page_size, inputs.out_loc[:1], head_dim, fp4) for m in (alone, ours))
    same(one, among, "a row alone and among 40")
    return f"{error}; a row alone equals the row among others"


def untouched_bytes(inputs: Inputs, written: Inputs) -> torch.Tensor:
    """Where the cache is what it was, bool [pages, bytes]. written: by the reference, from the same inputs."""
    other = inputs.copy()
    other.cache.bitwise_not_()
    reference.compressor(**other.arguments())
    return other.cache != written.cache


def _check_many(kind: str) -> str:
    """Four tokens of each of nine requests at all places of a group, at once and one after the other by decode."""
    ratio, head_dim, fp4 = KINDS[kind]
    requests = [Request(3 * ratio - 5 + i if i else 0, 4) for i in range(9)]
    at_once = make_step(kind, requests)
    step_by_step = at_once.copy()
    op.compressor(**at_once.arguments())
    for inputs in decoded(step_by_step, requests):
        op.compressor(**inputs.arguments())
    for name in ("state", "cache"):
        ours, theirs = (getattr(inputs, name).view(torch.uint8) for inputs in (at_once, step_by_step))
        same(ours, theirs, f"{name} of four tokens at once and one by one")
    return "four tokens of a request at once are the same bits as one by one"


def _check_drafts() -> str:
    """Five requests of four tokens in three layers, and all else of their states, against the reference."""
    ours = make_drafts(5, 4, 3)
    truth = ours.copy()
    op.clear_drafts(**ours.arguments())
    reference.clear_drafts(**truth.arguments())
    for layer, (mine, theirs) in enumerate(zip(ours.states, truth.states, strict=True)):
        same(mine.view(torch.int32), theirs.view(torch.int32), f"layer {layer}")
    return "the bits of the reference in every slot of three layers"


def decoded(inputs: Inputs, requests) -> Iterator[Inputs]:
    """make_step's inputs as decode steps, a token of each request a step; requests have as many tokens each."""
    ratio, width, device = inputs.state.shape[1], inputs.state.shape[2], inputs.state.device
    (tokens,) = {request.tokens for request in requests}
    ring = inputs.state.shape[0] * ratio // (len(requests) + 1)
    rows, slots = inputs.writes.view(torch.int32).unbind(dim=1)
    of_row = {row: slot for row, slot in zip(rows.tolist(), slots.tolist(), strict=True) if row >= 0}
    for j in range(tokens):
        plan, chosen = [], []
        for number, request in enumerate(requests):
            position, row = request.before + j, number * tokens + j
            start = of_row[row] // ring * ring
            pages = [(start + at % ring) // ratio for at in (max(position - ratio, 0), position)]
            plan.append((position + 1, of_row[row], *pages))
            chosen.append(row)
        places = torch.tensor(chosen, device=device)
        step = {"kv_score": inputs.kv_score[places].view(-1, width), "out_loc": inputs.out_loc[places]}
        yield replace(inputs, writes=None, plan=make_plan(plan, device), **step)


# ---- calibrate: the shapes of a plan


@dataclass(frozen=True)
class Case:
    kind: str
    rows: int
    ends: bool

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.rows} rows, {'a group ends' if self.ends else 'no group ends'}"

    @property
    def ratio(self) -> int:
        return KINDS[self.kind].ratio

    @property
    def point(self) -> str:
        return f"{self.rows} rows"

    @property
    def calls(self) -> float:
        none = (1 - 1 / self.ratio) ** self.rows
        return LAYERS[self.kind] * (1 - none if self.ends else none)

    @property
    def ended(self) -> int:
        return -(-self.rows // self.ratio) if self.ends else 0

    @property
    def bytes_per_call(self) -> int:
        """Of state."""
        return (self.rows + self.ended * self.ratio) * 4 * KINDS[self.kind].width

    def places(self, turn: int) -> list[int]:
        """Of each row's token in its group, from 1 on; `ratio`: it ends it. Other ones in each turn."""
        among = self.ratio - 1
        return [
            self.ratio if self.ends and (row - turn) % min(self.ratio, self.rows) == 0 else 1 + (row + turn) % among
            for row in range(self.rows)
        ]

    @property
    def turns(self) -> int:
        """After so many the same state would be read or written again."""
        return min(self.ratio, self.rows) if self.ends else self.ratio - 1


@dataclass
class Call:
    """`inputs` are written; `before`: as they were, None where nobody asks."""

    inputs: Inputs
    before: Inputs | None = None


def cases(*, tp: int, context: int, concurrency: int, quick: bool) -> list[Case]:
    rows = rows_of(concurrency, quick, MOST_ROWS)
    return [Case(kind, count, ends) for count in rows for kind in LAYERS for ends in (False, True)]


def max_error(provider: str, case: Case) -> float:
    return bounds.COMPRESSOR.others  # of ours too: a case may have one entry


def correctness_inputs(case: Case, device: str = "cuda") -> list[Call]:
    """In the middle of a request, and in its first group; what must not be read is NaN."""
    made = []
    for groups in (2, 0):
        lengths = [groups * case.ratio + place for place in case.places(0)]
        before = make_inputs(case.kind, lengths, seed=case.rows, device=device)
        made.append(Call(before.copy(), before))
    return made


class TimingInputs:
    """Calls that find their state in memory: other tokens of the same pages in turn, then other pages."""

    def __init__(self, device: str = "cuda"):
        self.device = device

    def calls(self, case: Case, count: int) -> list[Call]:
        ratio = case.ratio
        pages = make_inputs(case.kind, [3 * ratio] * case.rows, device=self.device)
        pages.state.normal_()
        copies = [pages, *(pages.copy() for _ in range(math.ceil(count / case.turns) - 1))]
        turns = [_other_places(case, pages, turn) for turn in range(min(count, case.turns))]
        both = [(turns[i % case.turns], copies[i // case.turns]) for i in range(count)]
        return [Call(replace(turn, state=copy.state, cache=copy.cache)) for turn, copy in both]


def _other_places(case: Case, pages, turn: int):
    """The same requests with their tokens at the places of that turn."""
    ratio, places, device = case.ratio, case.places(turn), pages.plan.device
    plan = [
        (2 * ratio + place, own * ratio + place - 1, before, own)
        for place, (_, _, before, own) in zip(places, pages.plan.view(torch.int32).tolist(), strict=True)
    ]
    ends = torch.tensor([place == ratio for place in places], device=device)
    return replace(pages, plan=make_plan(plan, device), out_loc=torch.where(ends, pages.out_loc, 0))


def error(provider: str, result: Call, inputs: Call) -> float:
    """Of the entries; a row in the middle of a group must have put its token into the state."""
    done, truth = result.inputs, inputs.before.copy()
    ended, entries = reference.compressor(**truth.arguments())
    rest = torch.ones(done.plan.shape[0], dtype=torch.bool, device=done.plan.device)
    rest[ended] = False
    written = done.plan.view(torch.int32)[rest, 1].long()
    if not torch.equal(done.state.flatten(0, 1)[written], done.kv_score[rest]):
        return math.inf
    if not len(ended):
        return 0.0
    head_dim, slots = done.norm_weight.shape[0], done.out_loc[ended]
    stored, rounded = (reference.read(c, done.page_size, slots, head_dim, done.fp4) for c in (done.cache, truth.cache))
    off = relative_error(stored, entries)
    return max(off, STORED_COUNTS * strict_error(stored, rounded)) if provider == OURS else off


# ---- who computes it


def providers() -> tuple[Provider, ...]:
    return (
        Provider(OURS, our_problem, _ours),
        Provider(STOCK, _stock_problem, _stock, packages=("sglang",)),
        # some hundred launches a call, which take their time to capture
        Provider("torch", lambda: None, lambda: _on_inputs(in_torch), lambda case: case.rows == 1 and case.ends),
    )


def _on_inputs(run):
    def call(inputs: Call) -> Call:
        run(inputs.inputs)
        return inputs

    return call


def _ours():
    return _on_inputs(lambda inputs: op.compressor(**inputs.arguments()))


def in_torch(inputs) -> None:
    """Every row as if it ended its group, in float64; who does not has the cache's entry that nobody reads."""
    length, write, before, own = inputs.plan.view(torch.int32).long().unbind(dim=1)
    ratio = inputs.state.shape[1]
    inputs.state.flatten(0, 1)[write] = inputs.kv_score
    overlaps = (length > ratio) & (ratio == 4)
    groups_before = inputs.state[before.clamp(min=0)] if ratio == 4 else None
    pooled = reference.pool(inputs.state[own], groups_before, overlaps, inputs.ape)
    freqs_cis = inputs.freqs_cis[(length - ratio).clamp(min=0)]
    entries = reference.finish(pooled, inputs.norm_weight, inputs.norm_eps, freqs_cis)
    reference.store(inputs.cache, inputs.page_size, inputs.out_loc, entries, inputs.fp4)


def _stock_problem() -> str | None:
    if (sglang_version() or SINCE) < SINCE:
        return "this SGLang keeps its own compressors, whatever is measured"
    return None if first_installed(HOMES) else "this SGLang has no such compressors"


def _stock():
    return _on_inputs(stock_launches())


def stock_launches():
    """SGLang's own two, of many tokens a request three: run(inputs) -> None."""
    dsv4 = importlib.import_module(first_installed(HOMES))

    def run(inputs) -> None:
        ratio = inputs.state.shape[1]
        if inputs.writes is None:
            plan = dsv4.CompressorDecodePlan(ratio, inputs.plan)
        else:
            plan = dsv4.CompressorPrefillPlan(ratio, inputs.plan, inputs.writes)
        kv = dsv4.compress_forward(
            kv_score_buffer=inputs.state,
            kv_score_input=inputs.kv_score,
            ape=inputs.ape,
            plan=plan,
            head_dim=inputs.norm_weight.shape[0],
            compress_ratio=ratio,
        )
        dsv4.compress_norm_rope_store(
            kv,
            plan,
            norm_weight=inputs.norm_weight,
            norm_eps=inputs.norm_eps,
            freq_cis=inputs.freqs_cis,
            out_loc=inputs.out_loc,
            kvcache=inputs.cache,
            page_size=inputs.page_size,
            **({"use_fp4": True} if inputs.fp4 else {}),
        )

    return run
