#!/usr/bin/env python3
"""index_select against its bars: `python3 bench/index_select.py [--quick] [--no-prefill] [--commit HASH] [--out FILE]`.

Logits, top-k and page transform together, cold caches, graph replay. Peers: torch.topk over our logits in the same run;
DeepGEMM's Hopper logits (no top-k, warm caches) as quoted below, since it is not installed where this runs.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import needs_torch  # noqa: F401
import torch

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "bench")]

import common  # noqa: E402

from deepseek_v4_sm120.ops.index_select import index_select, mqa_logits, topk_select  # noqa: E402
from deepseek_v4_sm120.ops.shared import extension  # noqa: E402
from deepseek_v4_sm120.reference import index_select as reference  # noqa: E402
from deepseek_v4_sm120.specs.index_select import Inputs, allowed_logit_error, make_queries, new_pages  # noqa: E402

ISSUE = 5
DEVICE = "cuda"
K = 512
FLOP_PER_PAIR = 2 * 64 * 128
TEMPLATE_PAGES = 512
QUOTED_FROM = "an H200 of the same kind, warm caches, logits alone, 2026-11-21"


@dataclass(frozen=True)
class Case:
    rows: int
    entries: int
    bar_us: float | None
    fp4: bool = False
    rows_per_request: int = 1
    columns: int | None = None  # of the page table, where wider than the entries
    times_each_page: int = 1  # in the page table of a row: logits that tie
    quoted: tuple[tuple[str, float], ...] = ()

    @property
    def name(self) -> str:
        count = f"{self.entries // 1024}K" if self.entries >= 1024 else str(self.entries)
        words = [f"{self.rows} x {count}", "FP4" if self.fp4 else "FP8"]
        words += [f"{self.rows_per_request} rows a request"] if self.rows_per_request > 1 else []
        words += [f"captured for {self.columns // 4}K tokens"] if self.columns else []
        words += [f"each page {self.times_each_page} times"] if self.times_each_page > 1 else []
        return ", ".join(words)

    @property
    def bytes(self) -> int:
        requests = -(-self.rows // self.rows_per_request)
        return requests * self.entries // self.times_each_page * (68 if self.fp4 else 132)


CASES = (
    Case(1, 256, None),
    Case(1, 2048, None),
    Case(1, 16384, 10.0),
    Case(1, 32768, 12.0, quoted=(("DeepGEMM logits", 4.4),)),
    Case(1, 262144, 26.0, quoted=(("DeepGEMM logits", 8.8),)),
    Case(8, 32768, 22.0),
    Case(64, 32768, 110.0, quoted=(("DeepGEMM logits", 76.0),)),
    Case(1, 16384, None, columns=4096),
    Case(8, 2048, None, columns=4096),
    Case(64, 2048, None),
    Case(4, 32768, None, rows_per_request=4),
    Case(32, 32768, None, rows_per_request=4),
    Case(64, 32768, None, times_each_page=2),
    Case(1, 262144, None, times_each_page=8),
    Case(1, 32768, None, fp4=True),
    Case(1, 262144, None, fp4=True),
    Case(64, 32768, None, fp4=True),
)
FP4_RATIO_BAR = 0.75
PREFILL_ROWS, PREFILL_ENTRIES = 8192, 32768
PREFILL_TFLOPS_BAR, TOPK_SHARE_BAR = 300.0, 0.25


class Pool:
    """A large pool of random keys, no two alike, as real logits do not tie: a template, each copy with other signs.

    Large, so that addresses are what the caches see.
    """

    def __init__(self, fp4: bool, generator: torch.Generator):
        template = new_pages(TEMPLATE_PAGES, fp4, device=DEVICE)
        keys = torch.randn((TEMPLATE_PAGES * 64, 128), generator=generator, device=DEVICE)
        reference.write_keys(template, torch.arange(TEMPLATE_PAGES * 64, device=DEVICE), keys)
        size = TEMPLATE_PAGES * template.stride(0)
        copies = max(1, common.total_memory() // 16 // size)
        storage = template.as_strided((1, size), (size, 1)).expand(copies, size).contiguous()
        signs = int.from_bytes((b"\x88" if fp4 else b"\x80") * 8, "little", signed=True)
        words = storage.view(torch.int64).view(copies, TEMPLATE_PAGES, -1)[..., : 64 * (64 if fp4 else 128) // 8]
        for copy in words:
            copy ^= torch.randint(-(2**63), 2**63 - 1, copy.shape, generator=generator, device=DEVICE) & signs
        shape = (copies * TEMPLATE_PAGES, *template.shape[1:])
        self.pages = storage.view(-1).as_strided(shape, template.stride())


def make_layers(
    case: Case, pool: Pool, generator: torch.Generator, lengths: torch.Tensor | None = None
) -> list[Inputs]:
    """The calls of a case, one per layer, with caches of their own."""
    requests, used = -(-case.rows // case.rows_per_request), -(-case.entries // 64)
    layers = common.layers_for_cold_caches(case.bytes)
    order = torch.randperm(pool.pages.shape[0], generator=generator, device=DEVICE).to(torch.int32)
    found = []
    for layer in range(layers):
        q, q_scales = make_queries(case.rows, case.fp4, generator)
        start = torch.arange(requests * used, device=DEVICE) + layer * requests * used
        table = torch.zeros((requests, case.columns or used), dtype=torch.int32, device=DEVICE)
        distinct = order[start % order.numel()].view(requests, used)[:, : used // case.times_each_page]
        table[:, :used] = distinct.repeat(1, case.times_each_page)
        every = torch.full((case.rows,), case.entries, dtype=torch.int32, device=DEVICE)
        found.append(
            Inputs(
                q=q,
                k_pages=pool.pages,
                weights=torch.randn((case.rows, 64), generator=generator, device=DEVICE) * 0.01,
                lengths=every if lengths is None else lengths,
                page_table=table.repeat_interleave(case.rows_per_request, dim=0)[: case.rows].contiguous(),
                q_scales=q_scales,
            )
        )
    return found


def check(case: Case, inputs: Inputs) -> float:
    """Relative error of the logits of the last row; a wrong selection ends the benchmark."""
    entries = torch.empty((case.rows, K), dtype=torch.int32, device=DEVICE)
    index_select(**inputs.arguments(), rows_per_request=case.rows_per_request, entries=entries)
    last = {n: t[-1:] for n, t in inputs.arguments().items() if n != "k_pages" and t is not None}
    one = Inputs(k_pages=inputs.k_pages, **last)
    ours, truth = mqa_logits(**one.arguments()), reference.mqa_logits(**one.arguments())
    length = int(one.lengths[0])
    error = float((ours - truth)[0, :length].abs().max() / truth[0, :length].abs().max())
    _, expected = reference.topk_select(ours, one.lengths, k=K)
    if not torch.equal(entries[-1:], expected) or not error <= allowed_logit_error(case.fp4):
        raise SystemExit(f"{case.name}: wrong (error of the logits {error:.1e}): not timed")
    return error


def time_of(call, layers: list[Inputs]) -> float:
    return common.graph_microseconds([lambda one=one: call(one) for one in layers])


def run_case(report: common.Report, case: Case, pool: Pool, generator: torch.Generator, peers: bool) -> float:
    layers = make_layers(case, pool, generator)
    error = check(case, layers[0])
    hint = case.rows_per_request
    ours = time_of(lambda one: index_select(**one.arguments(), rows_per_request=hint), layers)
    width = 64 * layers[0].page_table.shape[1]
    scores = torch.empty((case.rows, width), device=DEVICE)
    logits = time_of(lambda one: mqa_logits(**one.arguments(), rows_per_request=hint, out=scores), layers)
    report.add(common.row(ISSUE, case.name, "ours", "us", round(ours, 2), case.bar_us))
    report.add(common.row(ISSUE, case.name, "ours, logits alone", "us", round(logits, 2)))
    report.add(common.row(ISSUE, case.name, "ours", "logit_error", error, allowed_logit_error(case.fp4)))
    floor = report.ceilings["empty_launch_us"] + case.bytes / report.ceilings["copy_gbs"] / 1e3
    report.add(common.row(ISSUE, case.name, "ours", "floor_share", round(floor / ours, 3)))
    text = f"{case.name}: {ours:.2f} us (bar {case.bar_us}), logits alone {logits:.2f}, floor share {floor / ours:.2f}"
    if peers and case.entries >= K:
        select = common.graph_microseconds([lambda: topk_select(scores, layers[0].lengths, k=K)] * 8)
        theirs = common.graph_microseconds([lambda: torch.topk(scores, K, sorted=False)] * 8)
        report.add(common.row(ISSUE, case.name, "ours, topk_select alone, warm", "us", round(select, 2)))
        report.add(common.row(ISSUE, case.name, "torch.topk alone, warm", "us", round(theirs, 2)))
        text += f", topk_select {select:.2f}, torch.topk {theirs:.2f}"
    for name, value in case.quoted:
        report.add(common.row(ISSUE, case.name, name, "us", value, note=f"quoted: {QUOTED_FROM}"))
        text += f", {name} quoted {value}"
    print(text, flush=True)
    return ours


def at_least(case: str, metric: str, value: float, bar: float) -> common.Row:
    return common.Row(ISSUE, case, "ours", metric, round(value, 2), bar, value >= bar, "at least")


def run_prefill(report: common.Report, pool: Pool, generator: torch.Generator) -> None:
    case = Case(PREFILL_ROWS, PREFILL_ENTRIES, None, rows_per_request=PREFILL_ROWS)
    first = 4 * PREFILL_ENTRIES - PREFILL_ROWS + 1
    lengths = ((first + torch.arange(PREFILL_ROWS, device=DEVICE)) // 4).to(torch.int32)
    one = make_layers(case, pool, generator, lengths)[0]
    check(case, one)
    name = f"prefill, {PREFILL_ROWS} rows x {PREFILL_ENTRIES // 1024}K causal"
    pairs = int(lengths.sum())
    scores = torch.empty((PREFILL_ROWS, PREFILL_ENTRIES), device=DEVICE)
    out = torch.empty((PREFILL_ROWS, K), dtype=torch.int32, device=DEVICE)
    logits = common.graph_microseconds([lambda: mqa_logits(**one.arguments(), rows_per_request=9, out=scores)] * 2)
    both = common.graph_microseconds([lambda: index_select(**one.arguments(), rows_per_request=9, out=out)] * 2)
    tflops, share = pairs * FLOP_PER_PAIR / logits / 1e6, both / logits - 1
    report.add(at_least(name, "logits_tflops", tflops, PREFILL_TFLOPS_BAR))
    report.add(common.row(ISSUE, name, "ours", "select_us", round(both, 1)))
    report.add(common.row(ISSUE, name, "ours", "topk_share", round(share, 3), TOPK_SHARE_BAR))
    both_tflops = pairs * FLOP_PER_PAIR / both / 1e6
    report.add(common.row(ISSUE, name, "ours", "select_tflops", round(both_tflops, 1)))
    print(f"{name}: logits {logits:.0f} us, {tflops:.0f} TFLOP/s; all {both:.0f} us, {both_tflops:.0f} TFLOP/s; "
          f"top-k adds {share:.3f}", flush=True)  # fmt: skip


def f16_mma_tflops() -> float:
    """A ceiling: cuBLAS bf16, which uses wgmma where there is one."""
    a = torch.randn((8192, 8192), device=DEVICE, dtype=torch.bfloat16)
    return 2 * 8192**3 / common.graph_microseconds([lambda: a @ a] * 2) / 1e6


def plot(report: common.Report, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [row for row in report.rows if row.metric == "us"]
    names = list(dict.fromkeys(row.case for row in timed))
    impls = list(dict.fromkeys(row.impl for row in timed))
    figure, axis = pyplot.subplots(figsize=(13, 5))
    for number, impl in enumerate(impls):
        points = [(names.index(row.case), row.value) for row in timed if row.impl == impl]
        axis.plot(*zip(*points, strict=True), marker="osD^v<>"[number % 7], linestyle="", label=impl)
    bars = [(names.index(row.case), row.bar) for row in timed if row.bar is not None]
    axis.plot(*zip(*bars, strict=True), marker="_", markersize=22, linestyle="", color="red", label="bar")
    axis.set(yscale="log", ylabel="us per call", title=f"index_select, {torch.cuda.get_device_name()}, cold caches")
    axis.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
    axis.grid(True, which="both", alpha=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only the cases that have a bar, no peers")
    parser.add_argument("--no-prefill", action="store_true")
    parser.add_argument("--commit", default="unknown", help="where the copy that runs has no history")
    parser.add_argument("--out", type=Path, default=REPO / "bench/results/index_select.json")
    arguments = parser.parse_args()
    common.require_gpu()
    for kernel in extension.load().kernel_attributes():
        if kernel["name"].startswith("index"):
            print("  ".join(f"{name} {value}" for name, value in kernel.items()))
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    report = common.Report("index_select", arguments.commit, common.ceilings() | {"bf16_gemm_tflops": f16_mma_tflops()})
    print(report.ceilings, flush=True)
    times = {}
    for fp4 in (False, True):
        pool = Pool(fp4, generator)
        for case in (one for one in CASES if one.fp4 == fp4 and (one.bar_us or one.fp4 or not arguments.quick)):
            times[case] = run_case(report, case, pool, generator, not arguments.quick)
        if not fp4 and not arguments.no_prefill:
            run_prefill(report, pool, generator)
        del pool
        torch.cuda.empty_cache()
    one_row = {one.fp4: us for one, us in times.items() if one.name.startswith("1 x 256K") and one.times_each_page == 1}
    ratio = one_row[True] / one_row[False]
    report.add(common.row(ISSUE, "1 x 256K, FP4 to FP8", "ours", "ratio", round(ratio, 3), FP4_RATIO_BAR))
    report.write(arguments.out)
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        print("no matplotlib: no plot")
    else:
        plot(report, arguments.out.with_suffix(".png"))
    missed = [f"{row.case} {row.metric}: {row.value}, bar {row.bar}" for row in report.rows if row.met is False]
    print(f"FP4 / FP8 at 256K: {ratio:.3f}", *[f"MISSED {line}" for line in missed], sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
