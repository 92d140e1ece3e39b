"""compressor for `calibrate`: a decode step of a layer's KV compressors; all sizes are every rank's.

Stock is SGLang's two launches, pooling and norm-rope-store, from 0.5.14 on; what 0.5.12 has stays there with us too.
A case is a kind of compressor at a number of rows, where no row's token ends its group, or every so many-th row's does
(at least one). A verdict weighs the two as often as rows at random places of their groups are either.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, replace

from deepseek_v4_sm120.calibrate.provider import (
    OURS,
    STOCK,
    Provider,
    first_installed,
    our_problem,
    rows_of,
    sglang_version,
)
from deepseek_v4_sm120.plan.models import FLASH

ERROR = "greatest relative error of the entries against float64, the cache's rounding in it; infinite: a wrong state"
MOST_ROWS = 64  # of a decode step
MAX_ERROR = 0.04  # E4M3 with a scale for 64 gives 0.026
SINCE = (0, 5, 14)
HOMES = ("sglang.kernels.ops.attention.dsv4", "sglang.jit_kernel.dsv4")  # newest first


@dataclass(frozen=True)
class Kind:
    """A compressor by its name in reference/compressor_inputs.py, and how many layers have it."""

    name: str
    ratio: int
    layers: int

    @property
    def token_bytes(self) -> int:
        head_dim = FLASH.index_dim if self.name == "index" else FLASH.head_dim
        return 4 * (4 if self.ratio == 4 else 2) * head_dim


KINDS = (Kind("c4", 4, FLASH.layers_c4), Kind("c128", 128, FLASH.layers_c128), Kind("index", 4, FLASH.layers_c4))


@dataclass(frozen=True)
class Case:
    kind: Kind
    rows: int
    ends: bool

    @property
    def name(self) -> str:
        return f"{self.kind.name}, {self.rows} rows, {'a group ends' if self.ends else 'no group ends'}"

    @property
    def point(self) -> str:
        return f"{self.rows} rows"

    @property
    def calls(self) -> float:
        none = (1 - 1 / self.kind.ratio) ** self.rows
        return self.kind.layers * (1 - none if self.ends else none)

    @property
    def ended(self) -> int:
        return -(-self.rows // self.kind.ratio) if self.ends else 0

    @property
    def bytes_per_call(self) -> int:
        """Of state."""
        return (self.rows + self.ended * self.kind.ratio) * self.kind.token_bytes

    def places(self, turn: int) -> list[int]:
        """Of each row's token in its group, from 1 on; `ratio`: it ends it. Other ones in each turn."""
        ratio, among = self.kind.ratio, self.kind.ratio - 1
        return [
            ratio if self.ends and (row - turn) % min(ratio, self.rows) == 0 else 1 + (row + turn) % among
            for row in range(self.rows)
        ]

    @property
    def turns(self) -> int:
        """After so many the same state would be read or written again."""
        return min(self.kind.ratio, self.rows) if self.ends else self.kind.ratio - 1


@dataclass
class Call:
    """`inputs` are written; `before`: as they were, None where nobody asks."""

    inputs: object
    before: object = None


def cases(*, tp: int, context: int, concurrency: int, quick: bool) -> list[Case]:
    rows = rows_of(concurrency, quick, MOST_ROWS)
    return [Case(kind, count, ends) for count in rows for kind in KINDS for ends in (False, True)]


def max_error(provider: str, case: Case) -> float:
    return MAX_ERROR


def providers() -> tuple[Provider, ...]:
    return (
        Provider(OURS, our_problem, _ours),
        Provider(STOCK, _stock_problem, _stock, packages=("sglang",)),
        # some hundred launches a call, which take their time to capture
        Provider("torch", lambda: None, lambda: _on_inputs(in_torch), lambda case: case.rows == 1 and case.ends),
    )


# ---- inputs


def correctness_inputs(case: Case, device: str = "cuda") -> list[Call]:
    """In the middle of a request, and in its first group; what must not be read is NaN."""
    from deepseek_v4_sm120.reference.compressor_inputs import make_inputs

    made = []
    for groups in (2, 0):
        lengths = [groups * case.kind.ratio + place for place in case.places(0)]
        before = make_inputs(case.kind.name, lengths, seed=case.rows, device=device)
        made.append(Call(before.copy(), before))
    return made


class TimingInputs:
    """Calls that find their state in memory: other tokens of the same pages in turn, then other pages."""

    def __init__(self, device: str = "cuda"):
        self.device = device

    def calls(self, case: Case, count: int) -> list[Call]:
        from deepseek_v4_sm120.reference.compressor_inputs import make_inputs

        ratio = case.kind.ratio
        pages = make_inputs(case.kind.name, [3 * ratio] * case.rows, device=self.device)
        pages.state.normal_()
        copies = [pages, *(pages.copy() for _ in range(math.ceil(count / case.turns) - 1))]
        turns = [_other_places(case, pages, turn) for turn in range(min(count, case.turns))]
        both = [(turns[i % case.turns], copies[i // case.turns]) for i in range(count)]
        return [Call(replace(turn, state=copy.state, cache=copy.cache)) for turn, copy in both]


def _other_places(case: Case, pages, turn: int):
    """The same requests with their tokens at the places of that turn."""
    import torch

    from deepseek_v4_sm120.reference.compressor_inputs import make_plan

    ratio, places, device = case.kind.ratio, case.places(turn), pages.plan.device
    plan = [
        (2 * ratio + place, own * ratio + place - 1, before, own)
        for place, (_, _, before, own) in zip(places, pages.plan.view(torch.int32).tolist(), strict=True)
    ]
    ends = torch.tensor([place == ratio for place in places], device=device)
    return replace(pages, plan=make_plan(plan, device), out_loc=torch.where(ends, pages.out_loc, 0))


def error(provider: str, result: Call, inputs: Call) -> float:
    """Of the entries; a row in the middle of a group must have put its token into the state."""
    import torch

    from deepseek_v4_sm120.reference import compressor as reference
    from deepseek_v4_sm120.reference.accuracy import relative_error

    done, truth = result.inputs, inputs.before.copy()
    ended, entries = reference.compressor(**truth.arguments())
    rest = torch.ones(done.plan.shape[0], dtype=torch.bool, device=done.plan.device)
    rest[ended] = False
    written = done.plan.view(torch.int32)[rest, 1].long()
    if not torch.equal(done.state.flatten(0, 1)[written], done.kv_score[rest]):
        return math.inf
    if not len(ended):
        return 0.0
    head_dim = done.norm_weight.shape[0]
    return relative_error(reference.read(done.cache, done.page_size, done.out_loc[ended], head_dim, done.fp4), entries)


# ---- providers


def _on_inputs(run):
    def call(inputs: Call) -> Call:
        run(inputs.inputs)
        return inputs

    return call


def _ours():
    from deepseek_v4_sm120.ops.compressor import compressor

    return _on_inputs(lambda inputs: compressor(**inputs.arguments()))


def in_torch(inputs) -> None:
    """Every row as if it ended its group, in float64; who does not has the cache's entry that nobody reads."""
    import torch

    from deepseek_v4_sm120.reference import compressor as reference

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
    """SGLang's own two: run(inputs) -> None."""
    dsv4 = importlib.import_module(first_installed(HOMES))

    def run(inputs) -> None:
        ratio = inputs.state.shape[1]
        plan = dsv4.CompressorDecodePlan(ratio, inputs.plan)
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
