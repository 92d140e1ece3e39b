#!/usr/bin/env python3
"""sparse_decode on prompts against its bars: `python3 bench/sparse_prefill.py [--quick] [--out FILE]`.

Rows are neighbouring tokens of one prompt: their windows, newest token first as SGLang lists them, are shifted by one,
their C4 picks are drawn from the same context, their C128 lists are all entries. Cases with a context end at it: their
C128 lists grow with the row, and C4 picks are drawn anew for each row or, where the name says so, kept from the row
before but for a tenth: a guess at what neighbours share, not measured on a model. TFLOP/s count 2 x 1024 x heads x
valid candidates a row. All kernels are timed for every case (`prefill` and `pairs` forced; pairs where no row is too
long for them, above 16 heads 32 at once); `ours` is the one that a call without them takes. --pairs: the shapes that
may go so, and from how many rows on they would pay.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

import needs_torch  # noqa: F401
import torch

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "bench")]

import common  # noqa: E402

from deepseek_v4_sm120.ops import sparse_decode as op  # noqa: E402
from deepseek_v4_sm120.ops.shared import extension  # noqa: E402
from deepseek_v4_sm120.reference import kv_pages  # noqa: E402
from deepseek_v4_sm120.reference.accuracy import relative_error  # noqa: E402
from deepseek_v4_sm120.reference.sparse_decode import sparse_decode as reference  # noqa: E402
from deepseek_v4_sm120.specs import bounds  # noqa: E402
from deepseek_v4_sm120.specs.sparse_decode import SWA_WIDTH, Inputs, rms_rows  # noqa: E402

DEVICE = "cuda"
HISTORY = 32768  # tokens before the first row
LEAF, PAIR_LEAVES = 32, 40  # candidates; of a row that may go in pairs (csrc/sparse_decode/config.h)
BLOCK_HEADS = 16  # that go in pairs; more at 32 at once
SAMPLED_ROWS = 48  # compared with the reference
ISSUE, PAIRS_ISSUE = 4, 22
FLASHMLA = "459-590 from a dequantised flat cache, 281-359 paged; Triton 0.9 (H200, November 2026)"


@dataclass(frozen=True)
class Case:
    """One chunk of a prompt. `width`: C4 picks or C128 entries; `bar` in TFLOP/s."""

    rows: int
    heads: int
    width: int
    page_size: int
    bar: float | None = None
    context: int | None = None  # tokens up to the last row: C128 lists end at their rows
    issue: int = ISSUE
    kept: float = 0.0  # share of a row's C4 picks that are the row's before it

    @property
    def name(self) -> str:
        second = f" + {self.width} in {self.page_size}-token pages" if self.width else ""
        where = f", the end of {self.context // 1024}K" if self.context else ""
        kept = f", {self.kept:.0%} of the picks those of the row before" if self.kept else ""
        return f"{self.rows} rows x {self.heads} heads, 128{second}{where}{kept}"

    def lengths(self) -> torch.Tensor:
        """Candidates in the second cache, of each row."""
        if self.context is None or self.page_size == 64:
            return torch.full((self.rows,), self.width)
        return (self.context - self.rows + torch.arange(self.rows) + 1) // 128


def _cases() -> list[Case]:
    bars = {64: 240, 32: 200, 16: 200, 8: 70}
    issues = {32: PAIRS_ISSUE, 16: PAIRS_ISSUE}
    cases = [
        Case(rows, heads, 512, 64, bars[heads], issue=issues.get(heads, ISSUE))
        for heads in (64, 32, 16, 8)
        for rows in (2048, 8192)
    ]
    cases += [Case(8192, 32, 1024, 64, issue=PAIRS_ISSUE)]
    cases += [Case(rows, 64, 1024, 2, 270) for rows in (2048, 8192)]
    return [*cases, Case(2048, 128, 1024, 64), Case(2048, 64, 4096, 2)]


def _structured_cases() -> list[Case]:
    """Rows as a prompt has them, on one to eight cards."""
    cases = []
    for heads in (8, 16, 32, 64):
        cases += [Case(2048, heads, context // 128, 2, context=context) for context in (32768, 262144)]
        cases += [Case(2048, heads, 512, 64, context=32768, kept=0.9), Case(2048, heads, 0, 64)]
    return cases


CASES = _cases()
STRUCTURED_CASES = _structured_cases()
PAGE_TABLE_CASES = [Case(2048, 64, 1024, 2), Case(2048, 64, 4096, 2), Case(2048, 16, 1024, 2)]
TABLE_PAGES = 4096  # of a context of 1M tokens
MEETING_ROWS = (
    64,
    96,
    128,
    256,
    op.PREFILL_ROWS - 1,
)  # 64 heads, C4: where the kernels meet, and where the predicate switches


PAIR_MEETING_ROWS = (16, 32, 64, 128, 256, 512)


def make_inputs(case: Case, generator: torch.Generator) -> Inputs:
    rows, tokens = case.rows, case.context or HISTORY + case.rows
    main = kv_pages.pack_rows(rms_rows(-(-(SWA_WIDTH + rows) // 256) * 256, generator), 256)
    token = torch.arange(rows, device=DEVICE)
    one = Inputs(
        q=torch.randn((rows, 1, case.heads, kv_pages.HEAD_DIM), generator=generator, device=DEVICE).to(torch.bfloat16),
        kv_pages=main,
        indices=(token[:, None] + torch.arange(SWA_WIDTH, device=DEVICE).flip(0)).to(torch.int32)[:, None],
        topk_length=torch.full((rows,), SWA_WIDTH, dtype=torch.int32, device=DEVICE),
        attn_sink=torch.randn((case.heads,), generator=generator, device=DEVICE),
    )
    if case.width:
        slots = tokens // 4 if case.page_size == 64 else max(case.width, 2)
        one.extra_kv_pages = kv_pages.pack_rows(rms_rows(-(-slots // 256) * 256, generator), case.page_size)
        if case.page_size == 64:
            picks = _picks(case, slots, generator)
        else:
            picks = torch.arange(case.width, device=DEVICE).expand(rows, -1)
        one.extra_indices = picks.to(torch.int32).contiguous()[:, None]
        one.extra_topk_length = case.lengths().to(torch.int32).to(DEVICE)
    return one


def _picks(case: Case, slots: int, generator: torch.Generator) -> torch.Tensor:
    """[rows, width] distinct slots: drawn for each row, or those of the row before but for some, ascending."""
    scores = torch.rand((case.rows, slots), generator=generator, device=DEVICE)
    if not case.kept:
        return scores.topk(case.width, dim=1).indices
    new = round(case.width * (1 - case.kept))
    picks = [scores[0].topk(case.width).indices]
    for row in scores[1:]:
        old = picks[-1]
        order = torch.randperm(case.width, generator=generator, device=DEVICE)
        others = row.scatter(0, old, -1.0).topk(new).indices
        picks.append(torch.cat([old[order[new:]], others]))
    return torch.stack(picks).sort(dim=1).values


def sample(inputs: Inputs, out: torch.Tensor) -> float:
    """Relative error of some rows."""
    chosen = torch.linspace(0, out.shape[0] - 1, SAMPLED_ROWS, device=DEVICE).long()
    arguments = inputs.arguments()
    for name in ("q", "indices", "topk_length", "extra_indices", "extra_topk_length"):
        if arguments.get(name) is not None:
            arguments[name] = arguments[name][chosen]
    return relative_error(out[chosen], reference(**arguments)[0])


PREFILL, DECODE, PAIRS = "ours, prefill kernel", "ours, decode kernel", "ours, decode kernel in pairs"
WIDE = "ours, decode kernel, 32 heads at once"
FORCED = {
    PREFILL: {"prefill": True},
    DECODE: {"prefill": False, "pairs": False},
    PAIRS: {"prefill": False, "pairs": True},
    WIDE: {"prefill": False, "pairs": True},
}


def chosen(case: Case) -> str:
    """What a call takes by itself."""
    if op.takes_prefill(case.rows, case.heads, case.page_size if case.width else 1, False):
        return PREFILL
    return kernels(case)[-1] if case.rows >= op.PAIR_ROWS else DECODE


def kernels(case: Case) -> list[str]:
    """Those that there are for it."""
    leaves = -(-SWA_WIDTH // LEAF) + -(-case.width // LEAF)
    in_pairs = WIDE if case.heads > BLOCK_HEADS else PAIRS
    return [PREFILL, DECODE, *([in_pairs] if leaves <= PAIR_LEAVES else [])]


def time_case(inputs: Inputs, impl: str, calls: int) -> float:
    call = functools.partial(op.sparse_decode, **inputs.arguments(), out=torch.empty_like(inputs.q), **FORCED[impl])
    return common.graph_microseconds([call] * calls)


def tflops(case: Case, microseconds: float) -> float:
    candidates = SWA_WIDTH * case.rows + int(case.lengths().sum())
    return 2 * 1024 * case.heads * candidates / microseconds / 1e6


def run_case(report: common.Report, case: Case, generator) -> str:
    inputs = make_inputs(case, generator)
    error = common.gate(case.name, sample(inputs, op.sparse_decode(**inputs.arguments())), bounds.SPARSE_DECODE.truth)
    found = {impl: tflops(case, time_case(inputs, impl, 2)) for impl in kernels(case)}
    ours = found[chosen(case)]
    met = None if case.bar is None else ours >= case.bar
    report.add(common.Row(case.issue, case.name, "ours", "tflops", round(ours, 1), case.bar, met))
    report.add(common.row(ISSUE, case.name, "ours", "relative_error", round(error, 6), bounds.SPARSE_DECODE.truth))
    for impl, rate in found.items():
        report.add(common.row(ISSUE, case.name, impl, "tflops", round(rate, 1)))
    share = ours / report.ceilings["mma_bf16_tflops"] if report.ceilings["mma_bf16_tflops"] else 0.0
    report.add(common.row(ISSUE, case.name, "ours", "mma_share", round(share, 3)))
    verdict = "" if met is None else f"bar {case.bar:g}{'' if met else ' MISSED'}"
    return (
        f"{case.name}: {ours:.0f} TFLOP/s ({share:.2f} of mma.sync) {verdict}; "
        f"{'; '.join(f'{impl} {rate:.0f}' for impl, rate in found.items())}; error {error:.5f}"
    )


def run_meeting(report: common.Report, generator) -> list[str]:
    """Both kernels at row counts up to where the predicate switches."""
    lines = []
    for rows in MEETING_ROWS:
        case = Case(rows, 64, 512, 64)
        inputs = make_inputs(case, generator)
        found = {impl: time_case(inputs, impl, 8) for impl in (PREFILL, DECODE)}
        at_switch = rows == op.PREFILL_ROWS - 1
        ratio = max(found.values()) / min(found.values())
        for impl, microseconds in found.items():
            report.add(common.row(ISSUE, case.name, impl, "us", round(microseconds, 1)))
        if at_switch:
            report.add(common.row(ISSUE, case.name, "ours", "ratio", round(ratio, 3), 1.1, "slower to faster kernel"))
        lines.append(f"{case.name}: {'; '.join(f'{impl} {us:.1f} us' for impl, us in found.items())}")
    return lines


def run_pairs(report: common.Report, generator, quick: bool, of_heads: list[int]) -> None:
    """C4's cases by all kernels; then fewer rows, in pairs and not, which must have the same bits."""
    for case in CASES:
        if case.page_size == 64 and case.heads in of_heads and not (quick and case.rows > 2048):
            print(run_case(report, case, generator), flush=True)
    for heads, rows in itertools.product(of_heads, PAIR_MEETING_ROWS):
        case = Case(rows, heads, 512, 64)
        inputs = make_inputs(case, generator)
        impls = kernels(case)[1:]
        both = [op.sparse_decode(**inputs.arguments(), **FORCED[impl]) for impl in impls]
        if not torch.equal(*both):
            raise SystemExit(f"{case.name}: other bits in pairs")
        found = {impl: time_case(inputs, impl, 8) for impl in impls}
        for impl, microseconds in found.items():
            report.add(common.row(ISSUE, case.name, impl, "us", round(microseconds, 1)))
        print(f"{case.name}: {'; '.join(f'{impl} {us:.1f} us' for impl, us in found.items())}", flush=True)


def with_page_table(inputs: Inputs) -> Inputs:
    """One request's page table, as wide as a context of 1M tokens, and the list that SGLang makes of it."""
    rows, page_size = inputs.q.shape[0], inputs.extra_kv_pages.shape[1]
    table = torch.full((1, TABLE_PAGES), -1, dtype=torch.int32, device=DEVICE)
    own = -(-inputs.extra_indices.shape[2] // page_size)
    table[0, :own] = torch.arange(own, device=DEVICE)
    listed = torch.full((rows, 1, TABLE_PAGES * page_size), -1, dtype=torch.int32, device=DEVICE)
    listed[:, :, : inputs.extra_indices.shape[2]] = inputs.extra_indices
    rows_of_table = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    return dataclasses.replace(inputs, extra_indices=listed, page_table=table, page_table_rows=rows_of_table)


def run_page_tables(report: common.Report, generator) -> None:
    """C128's candidates from lengths and a request's page table against their list, captured for 1M tokens."""
    for case in PAGE_TABLE_CASES:
        inputs = with_page_table(make_inputs(case, generator))
        forms = {"ours, list": inputs.arguments(), "ours, page table": inputs.table_arguments()}
        out = [op.sparse_decode(**arguments) for arguments in forms.values()]
        if not torch.equal(*out):
            raise SystemExit(f"{case.name}: list and page table differ")
        held = inputs.extra_indices.numel() * 4, (inputs.page_table.numel() + inputs.page_table_rows.numel()) * 4
        cells = []
        for (impl, arguments), index_bytes in zip(forms.items(), held, strict=True):
            call = functools.partial(op.sparse_decode, **arguments, out=out[0])
            microseconds = common.graph_microseconds([call] * 2)
            name = f"{case.name}, captured for 1M"
            report.add(common.row(ISSUE, name, impl, "tflops", round(tflops(case, microseconds), 1)))
            report.add(common.row(ISSUE, name, impl, "index_bytes", index_bytes))
            cells.append(f"{impl} {tflops(case, microseconds):.0f} TFLOP/s, {index_bytes / 1e6:.2f} MB")
        print(f"{name}: {'; '.join(cells)}", flush=True)


MMA_SOURCE = r"""
extern "C" __global__ void mma_rate(float* out, int rounds) {
  float d[8][4] = {};
  unsigned a[4] = {threadIdx.x, 1, 2, 3}, b[2] = {4, threadIdx.x};
  for (int i = 0; i < rounds; ++i)
#pragma unroll
    for (int k = 0; k < 8; ++k)
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                   "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                   : "+f"(d[k][0]), "+f"(d[k][1]), "+f"(d[k][2]), "+f"(d[k][3])
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  float sum = 0;
  for (int k = 0; k < 8; ++k) sum += d[k][0];
  if (sum == 12345.f) out[0] = sum;
}
"""


def mma_rate() -> float:
    """bf16 mma.sync from registers alone, TFLOP/s; 0 where this torch cannot compile a kernel."""
    compile_kernel = getattr(torch.cuda, "_compile_kernel", None)
    if compile_kernel is None:
        return 0.0
    kernel, out = compile_kernel(MMA_SOURCE, "mma_rate"), torch.zeros(1, device=DEVICE)
    sms, threads, rounds = torch.cuda.get_device_properties(0).multi_processor_count, 256, 4000

    def call():
        kernel((sms * 4, 1, 1), (threads, 1, 1), (out, rounds))

    call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    best = 0.0
    for _ in range(5):
        start.record()
        call()
        end.record()
        end.synchronize()
        flop = sms * 4 * (threads // 32) * rounds * 8 * 2 * 16 * 8 * 16
        best = max(best, flop / start.elapsed_time(end) / 1e9)
    return best


def plot(report: common.Report, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in report.rows if row.metric == "tflops" and row.impl in FORCED]
    names = list(dict.fromkeys(row.case for row in rows))
    figure, axis = pyplot.subplots(figsize=(11, 5))
    for offset, impl in ((-0.27, PREFILL), (0, DECODE), (0.27, PAIRS), (0.27, WIDE)):
        values = {row.case: row.value for row in rows if row.impl == impl}
        places = [(index + offset, values[name]) for index, name in enumerate(names) if name in values]
        axis.barh(*zip(*places, strict=True), 0.27, label=impl)
    for index, name in enumerate(names):
        bar = next((row.bar for row in report.rows if row.case == name and row.metric == "tflops" and row.bar), None)
        if bar:
            axis.plot([bar, bar], [index - 0.4, index + 0.4], color="black", linewidth=2)
    axis.set(yticks=range(len(names)), yticklabels=names, xlabel="TFLOP/s (black: the bar)")
    axis.invert_yaxis()
    axis.legend(fontsize=8)
    figure.suptitle(f"sparse attention of prompts, {torch.cuda.get_device_name()}")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2,048 rows only")
    parser.add_argument("--pairs", action="store_true", help="the kernel for few rows in pairs alone")
    parser.add_argument("--heads", type=int, nargs="+", default=[64, 32, 16, 8], help="of --pairs")
    parser.add_argument("--out", type=Path, default=REPO / "bench/results/sparse_prefill.json")
    arguments = parser.parse_args()
    common.require_gpu()
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    ceilings = common.ceilings() | {"mma_bf16_tflops": round(mma_rate(), 1)}
    report = common.Report("sparse_prefill", extension.build_info()["git_commit"], ceilings)
    print(torch.cuda.get_device_name(), report.ceilings)
    if arguments.pairs:
        run_pairs(report, generator, arguments.quick, arguments.heads)
        report.write(arguments.out)
        return 0
    for case in CASES:
        if not arguments.quick or case.rows == 2048:
            print(run_case(report, case, generator), flush=True)
    for case in STRUCTURED_CASES:
        print(run_case(report, case, generator), flush=True)
    print(*run_meeting(report, generator), sep="\n")
    run_page_tables(report, generator)
    report.write(arguments.out)
    print(f"quoted, 64 heads: FlashMLA {FLASHMLA}")
    print(
        f"{sum(row.met is True for row in report.rows)} bars met, {sum(row.met is False for row in report.rows)} missed"
    )
    try:
        plot(report, arguments.out.with_suffix(".png"))
    except ImportError:
        print("matplotlib is not installed: no plot")
    return 0


if __name__ == "__main__":
    sys.exit(main())
