#!/usr/bin/env python3
"""A step of the KV compressors, decode and verification: `python3 bench/compressor.py [--quick] [--out FILE]`.

Cold state and cache: a graph's calls have states, caches, projections, weights and plans of their own, together over
twice the L2. "none": no row ends a group, which is most steps of one stream; "all": every row does; "mixed": the rows
are at all places of a group, as many streams are. Verification: streams with 2 to 8 rows each, at all places. Beside
SGLang's pair of launches, of a verification three, where SGLang is installed; of those the bytes of state and cache
that are others than ours are counted, whose bar is none for a verification (0.5.20 and later; before, C128 is merged in
another order). --drafts: only what clears the slots of rejected drafts behind a verification, all layers of Flash a
call, of which SGLang launches a kernel each.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import needs_torch  # noqa: F401
import torch

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "bench")]

import common  # noqa: E402

from deepseek_v4_sm120.ops.compressor import MAX_ROWS, clear_drafts, compressor  # noqa: E402
from deepseek_v4_sm120.ops.shared import extension  # noqa: E402
from deepseek_v4_sm120.reference import compressor as reference  # noqa: E402
from deepseek_v4_sm120.reference.accuracy import relative_error  # noqa: E402
from deepseek_v4_sm120.specs.compressor import (  # noqa: E402
    CLEANUP,
    CLEANUP_HOMES,
    KINDS,
    LAYERS,
    Drafts,
    Inputs,
    Request,
    make_drafts,
    make_inputs,
    make_step,
    stock_launches,
)
from deepseek_v4_sm120.specs.provider import first_installed, sglang_version, unpatched  # noqa: E402

ISSUE, VERIFY_ISSUE, DRAFTS_ISSUE = 7, 21, 24
ROWS = (1, 8, 32, 128, 512)
QUICK_ROWS = (1, 32)
ENDS = ("none", "mixed", "all")
STOCK = "SGLang's own"
VERIFIED = ((1, 2), (1, 4), (1, 6), (1, 8), (8, 4), (32, 4), (32, 6), (64, 4))  # streams, rows of each
DRAFTS = ((1, 4), (8, 4), (32, 4), (1, 8))  # streams, rows of each
DRAFTS_CALLS = 20
SAME_ORDER = (0, 5, 20)  # from then on SGLang merges the tokens of C128 in our order
LEAST_CALLS, MOST_CALLS = 20, 200


@dataclass(frozen=True)
class Case:
    kind: str
    rows: int
    ends: str

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.rows} rows, {self.ends} of them end a group"

    def lengths(self) -> list[int]:
        ratio = KINDS[self.kind][0]
        if self.ends == "mixed":
            return [2 * ratio + 1 + row % ratio for row in range(self.rows)]
        return [3 * ratio - (self.ends == "none")] * self.rows

    def read_bytes(self) -> int:
        """Of state, by one call."""
        ratio, token = KINDS[self.kind].ratio, 4 * KINDS[self.kind].width
        ended = sum(length % ratio == 0 for length in self.lengths())
        return self.rows * token + ended * ratio * token

    def make(self) -> Inputs:
        return make_inputs(self.kind, self.lengths())

    issue, most_of_stock = ISSUE, None


@dataclass(frozen=True)
class VerifyCase:
    kind: str
    streams: int
    tokens: int
    ends: bool = True

    issue = VERIFY_ISSUE

    @property
    def name(self) -> str:
        return f"{self.kind}, verification, {self.streams} x {self.tokens} rows{'' if self.ends else ', no group ends'}"

    @property
    def most_of_stock(self) -> float | None:
        """The bar: so much of SGLang's time."""
        return 0.5 if self.streams * self.tokens == 4 else None

    def requests(self) -> list[Request]:
        """At all places of a group; one stream ends one, or none does."""
        ratio = KINDS[self.kind].ratio
        first = 3 * ratio - 1 - self.tokens // 2 if self.ends else 2 * ratio
        return [Request(first + stream * ratio // self.streams, self.tokens) for stream in range(self.streams)]

    def read_bytes(self) -> int:
        """Of state, written and read."""
        ratio, token = KINDS[self.kind].ratio, 4 * KINDS[self.kind].width
        ended = sum((r.before + r.tokens) // ratio - r.before // ratio for r in self.requests())
        return (self.streams * self.tokens + ended * ratio) * token

    def make(self) -> Inputs:
        return make_step(self.kind, self.requests())


def cases(rows: tuple[int, ...] = ROWS) -> list[Case]:
    return [Case(kind, count, ends) for kind in KINDS for count in rows for ends in ENDS]


def verify_cases() -> list[VerifyCase]:
    """31 of 32 steps of a stream with 4 rows end no group of 128."""
    every = [VerifyCase(kind, *shape) for kind in KINDS for shape in VERIFIED]
    return [*every, VerifyCase("c128", 1, 4, ends=False)]


def implementations() -> dict[str, Callable[[Inputs], Callable[[], None]]]:
    found = {"ours": lambda inputs: lambda: compressor(**inputs.arguments())}
    if importlib.util.find_spec("sglang") is not None:
        run = stock_launches()
        found[STOCK] = lambda inputs: lambda: run(inputs)
    return found


def bytes_apart(inputs: Inputs) -> int:
    """Of state and cache, ours and SGLang's."""
    ours, theirs = inputs.copy(), inputs.copy()
    compressor(**ours.arguments())
    stock_launches()(theirs)
    return sum(
        int((getattr(ours, name).view(torch.uint8) != getattr(theirs, name).view(torch.uint8)).sum())
        for name in ("state", "cache")
    )


def check(case: Case | VerifyCase, inputs: Inputs) -> float:
    _, head_dim, fp4 = KINDS[case.kind]
    ours, truth = inputs.copy(), inputs.copy()
    compressor(**ours.arguments())
    ended, entries = reference.compressor(**truth.arguments())
    error = relative_error(reference.read(ours.cache, ours.page_size, ours.out_loc[ended], head_dim, fp4), entries)
    return common.gate(case.name, error, KINDS[case.kind].rounding)


def run_case(report: common.Report, case: Case | VerifyCase) -> None:
    made = case.make()
    error = check(case, made)
    layers = min(max(LEAST_CALLS, common.layers_for_cold_caches(case.read_bytes())), MOST_CALLS)
    copies = [Inputs(**{n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in made.arguments().items()})]
    copies += [made.copy() for _ in range(layers - 1)]
    found = {
        impl: round(common.graph_microseconds([make_call(one) for one in copies]), 2)
        for impl, make_call in implementations().items()
    }
    stock = found.get(STOCK)
    bar = round(stock * case.most_of_stock, 2) if stock and case.most_of_stock else None
    for impl, us in found.items():
        report.add(common.row(case.issue, case.name, impl, "us", us, bar if impl == "ours" else None))
    report.add(common.row(case.issue, case.name, "ours", "relative_error", round(error, 6), KINDS[case.kind].rounding))
    if stock:
        has_ours_order = (sglang_version() or SAME_ORDER) >= SAME_ORDER or case.kind != "c128"
        bar = 0 if case.issue == VERIFY_ISSUE and has_ours_order else None
        report.add(common.row(case.issue, case.name, STOCK, "bytes_apart", bytes_apart(made), bar))


def drafts_implementations() -> dict[str, Callable[[Drafts], None]]:
    found = {"ours": lambda made: clear_drafts(**made.arguments())}
    home = first_installed(CLEANUP_HOMES)
    if home is not None:
        clear = unpatched(home, CLEANUP)
        found[STOCK] = lambda made: [
            clear(
                *(state, made.requests, made.lengths, made.accepted), ring_size=made.ring, num_draft_tokens=made.tokens
            )
            for state in made.states
        ]
    return found


def run_drafts(report: common.Report, streams: int, tokens: int) -> None:
    """Nothing is accepted but the first row of each stream; the states of all calls are over twice the L2."""
    case, layers = f"rejected drafts, {streams} x {tokens} rows, {LAYERS['c128']} layers", LAYERS["c128"]
    copies = [make_drafts(streams, tokens, layers, seed=seed) for seed in range(DRAFTS_CALLS)]
    for made in copies:
        made.accepted.fill_(1)
    impls = drafts_implementations()
    for name, clear in impls.items():
        result, truth = copies[0].copy(), copies[0].copy()
        clear(result)
        reference.clear_drafts(**truth.arguments())
        pairs = zip(result.states, truth.states, strict=True)
        apart = sum(int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in pairs)
        report.add(common.row(DRAFTS_ISSUE, case, name, "bytes_apart", apart, 0))
    found = {
        name: round(common.graph_microseconds([lambda clear=clear, made=made: clear(made) for made in copies]), 2)
        for name, clear in impls.items()
    }
    for name, us in found.items():
        bar = round(found[STOCK] / 4, 2) if STOCK in found and name == "ours" else None
        report.add(common.row(DRAFTS_ISSUE, case, name, "us", us, bar))


def summary(report: common.Report) -> str:
    values = {(row.case, row.impl, row.metric): row.value for row in report.rows}
    impls = [impl for impl in dict.fromkeys(row.impl for row in report.rows)]
    lines = []
    for name in dict.fromkeys(row.case for row in report.rows):
        found = [values.get((name, impl, "us")) for impl in impls]
        lines.append((name, *("" if value is None else f"{value:.2f}" for value in found)))
    return common.table(("case", *(f"{impl} us" for impl in impls)), lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROWS} rows only")
    parser.add_argument("--drafts", action="store_true", help="only what clears rejected drafts")
    parser.add_argument("--commit", default=None, help="of the measured tree (default: the build's)")
    parser.add_argument("--out", type=Path, default=REPO / "bench/results/compressor.json")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    common.require_gpu()
    report = common.Report("compressor", arguments.commit or extension.build_info()["git_commit"], common.ceilings())
    print(torch.cuda.get_device_name(), report.ceilings, flush=True)
    for shape in DRAFTS if arguments.drafts else ():
        run_drafts(report, *shape)
    for case in [] if arguments.drafts else [*cases(QUICK_ROWS if arguments.quick else ROWS), *verify_cases()]:
        run_case(report, case)
    report.write(arguments.out)
    print(summary(report), flush=True)
    print(f"{arguments.out}")
    return 0


if __name__ == "__main__":
    assert max(ROWS) <= MAX_ROWS
    sys.exit(main())
