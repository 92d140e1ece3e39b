#!/usr/bin/env python3
"""sparse_decode against its bars and its peers: `python3 bench/sparse_decode.py [--quick] [--cases TEXT] [--out FILE]`.

Prints a compact table last; writes every number as JSON and, where matplotlib is installed, a plot beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import needs_torch  # noqa: F401
import torch

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "bench")]

import common  # noqa: E402
from sparse_decode_cases import (  # noqa: E402
    C4,
    CASES,
    PAGE_TABLE_CASES,
    QUOTED_FROM,
    VERIFY_CASES,
    VERIFY_RATIO_BAR,
    WIDTH_PAIRS,
    WIDTH_RATIO_BAR,
    Case,
)

from deepseek_v4_sm120.ops.shared import extension  # noqa: E402
from deepseek_v4_sm120.ops.sparse_decode import sparse_decode  # noqa: E402
from deepseek_v4_sm120.reference import kv_pages  # noqa: E402
from deepseek_v4_sm120.reference.accuracy import relative_error  # noqa: E402
from deepseek_v4_sm120.reference.sparse_decode import sparse_decode as reference  # noqa: E402
from deepseek_v4_sm120.specs import bounds  # noqa: E402
from deepseek_v4_sm120.specs.provider import Provider, is_installed  # noqa: E402
from deepseek_v4_sm120.specs.sparse_decode import (  # noqa: E402
    SMALL_CANDIDATES,
    SWA_WIDTH,
    Inputs,
    flashmla,
    flashmla_problem,
    rms_rows,
    triton,
    triton_problem,
)

DEVICE = "cuda"
PEERS = (  # called as SGLang calls them
    Provider(
        "FlashMLA", flashmla_problem, functools.partial(flashmla, one_schedule=True), lambda case: case.heads == 64
    ),
    Provider("Triton", triton_problem, triton, lambda c: c.rows * (SWA_WIDTH + c.kind.length) <= SMALL_CANDIDATES),
)
SWA_PAGE = 256
GATHERED_BYTES = 608  # of a random row: 576 of data, and a 32-byte sector for its 8 scale bytes
TEMPLATE_SLOTS = 1 << 16
CONTEXT_SLOTS = 1 << 14  # C4 entries of a 64K-token request: a row's 512 picks lie among so many


# ---- inputs: one pool per page size, filled once; every layer of every case is a view of it


class Pools:
    """Large pools of random rows. Slots repeat a template's values; addresses are what the caches see."""

    def __init__(self, generator: torch.Generator):
        self._generator = generator
        self._pools: dict[int, torch.Tensor] = {}
        self._bytes = common.total_memory() // 12

    def pages(self, page_size: int) -> torch.Tensor:
        """[pages, page_size, 1, 584]: all of the pool for a page size."""
        if page_size not in self._pools:
            template = kv_pages.pack_rows(rms_rows(TEMPLATE_SLOTS, self._generator), page_size)
            copies = max(1, self._bytes // (template.shape[0] * template.stride(0)))
            stride = template.stride(0)
            storage = torch.empty((copies, template.shape[0] * stride), dtype=torch.uint8, device=DEVICE)
            storage.copy_(template.as_strided((1, storage.shape[1]), (storage.shape[1], 1)).expand_as(storage))
            shape = (copies * template.shape[0], page_size, 1, kv_pages.TOKEN_BYTES)
            self._pools[page_size] = storage.as_strided(shape, (stride, kv_pages.TOKEN_BYTES, kv_pages.TOKEN_BYTES, 1))
        return self._pools[page_size]


@dataclass(frozen=True)
class Layers:
    """The calls of one case, one per layer."""

    case: Case
    inputs: list[Inputs]
    bytes_per_call: int


def bytes_of(case: Case, shared_rows: bool) -> int:
    """What a call must move at least: distinct cache rows, q, out and indices."""
    requests = 1 if shared_rows else case.rows
    candidates = requests * (SWA_WIDTH + case.kind.length)
    activations = 2 * case.rows * case.heads * kv_pages.HEAD_DIM * 2
    return candidates * GATHERED_BYTES + activations + 4 * case.rows * (SWA_WIDTH + case.kind.length)


def distinct(rows: int, width: int, slots: int, generator: torch.Generator) -> torch.Tensor:
    """[rows, width] distinct slots per row, ascending: one random slot of each of `width` strata."""
    stratum = slots // width
    offset = torch.randint(0, stratum, (rows, width), generator=generator, device=DEVICE)
    return torch.arange(width, device=DEVICE) * stratum + offset


def shuffled(slots: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return slots.gather(1, torch.rand(slots.shape, generator=generator, device=DEVICE).argsort(dim=1))


def window_indices(rows: int, pages: int, shared: bool, generator: torch.Generator) -> torch.Tensor:
    """Newest first, a run of one page per request; rows of one request follow each other by one token."""
    requests = 1 if shared else rows
    page = torch.randint(0, pages, (requests,), generator=generator, device=DEVICE).expand(rows)
    newest = torch.randint(SWA_WIDTH + 8, SWA_PAGE - 8, (requests,), generator=generator, device=DEVICE).expand(rows)
    if shared:
        newest = newest + torch.arange(rows, device=DEVICE)
    return (page * SWA_PAGE + newest)[:, None] - torch.arange(SWA_WIDTH, device=DEVICE)


def extra_indices(case: Case, slots: int, shared: bool, generator: torch.Generator) -> torch.Tensor:
    """C4: unordered picks of the request's context; C128: the request's pages, ascending, all entries."""
    kind, requests = case.kind, 1 if shared else case.rows
    if kind.page_size == 2:
        page = distinct(requests, kind.length // 2, slots // 2, generator)
        chosen = (2 * page[:, :, None] + torch.arange(2, device=DEVICE)).flatten(1).expand(case.rows, -1)
    else:
        context = min(slots, requests * CONTEXT_SLOTS) // requests
        base = torch.arange(requests, device=DEVICE)[:, None] * context
        chosen = shuffled(base + distinct(requests, kind.length, context, generator), generator).expand(case.rows, -1)
        if shared:  # each row of the request picks a tenth of its own
            own = distinct(case.rows, kind.length, context, generator)
            draw = torch.rand(chosen.shape, generator=generator, device=DEVICE)
            chosen = torch.where(draw < 0.1, own, chosen)
    padded = torch.full((case.rows, 1, kind.width), -1, dtype=torch.int32, device=DEVICE)
    padded[:, 0, : kind.length] = chosen
    return padded


def make_layers(
    case: Case, pools: Pools, generator: torch.Generator, shared: bool = False, more_bytes: int = 0
) -> Layers:
    """more_bytes: what else a layer moves, for callers that time more than the attention."""
    bytes_per_call = bytes_of(case, shared) + more_bytes
    count = common.layers_for_cold_caches(bytes_per_call)
    swa = pools.pages(SWA_PAGE)
    swa_pages = swa.shape[0] // count
    extra = pools.pages(case.kind.page_size) if case.kind.page_size else None
    inputs = []
    for layer in range(count):
        q = torch.randn((case.rows, 1, case.heads, kv_pages.HEAD_DIM), generator=generator, device=DEVICE)
        one = Inputs(
            q=q.to(torch.bfloat16),
            kv_pages=swa[layer * swa_pages : (layer + 1) * swa_pages],
            indices=window_indices(case.rows, swa_pages, shared, generator).to(torch.int32)[:, None],
            topk_length=torch.full((case.rows,), SWA_WIDTH, dtype=torch.int32, device=DEVICE),
            attn_sink=torch.randn((case.heads,), generator=generator, device=DEVICE),
        )
        if extra is not None:
            pages = extra.shape[0] // count
            one.extra_kv_pages = extra[layer * pages : (layer + 1) * pages]
            one.extra_indices = extra_indices(case, pages * case.kind.page_size, shared, generator)
            one.extra_topk_length = torch.full((case.rows,), case.kind.length, dtype=torch.int32, device=DEVICE)
        inputs.append(one)
    return Layers(case, inputs, bytes_per_call)


# ---- measuring


def error_of(call: Callable[[Inputs], torch.Tensor], inputs: Inputs) -> float:
    out = call(inputs)
    return relative_error(out, reference(**inputs.arguments())[0])


def ours(inputs: Inputs) -> torch.Tensor:
    return sparse_decode(**inputs.arguments())


def time_layers(call: Callable[[Inputs], object], layers: Layers) -> float:
    return common.graph_microseconds([lambda one=one: call(one) for one in layers.inputs])


def gated_time(layers: Layers) -> tuple[float, float]:
    """(microseconds, relative error) of ours; a wrong result ends the benchmark."""
    error = max(error_of(ours, layers.inputs[layer]) for layer in (0, -1))
    common.gate(layers.case.name, error, bounds.SPARSE_DECODE.truth)
    return time_layers(ours, layers), error


def floor_microseconds(layers: Layers, ceilings: dict[str, float]) -> float:
    """An empty launch, then the bytes at the copy bandwidth."""
    return ceilings["empty_launch_us"] + layers.bytes_per_call / ceilings["copy_gbs"] / 1e3


def run_cases(report: common.Report, cases: list[Case], pools: Pools, generator) -> None:
    for case in cases:
        layers = make_layers(case, pools, generator)
        microseconds, error = gated_time(layers)
        for issue, bar in case.bars:
            report.add(common.row(issue, case.name, "ours", "us", round(microseconds, 2), bar))
        share = floor_microseconds(layers, report.ceilings) / microseconds
        report.add(common.row(3, case.name, "ours", "floor_share", round(share, 3)))
        report.add(common.row(2, case.name, "ours", "relative_error", round(error, 6), bounds.SPARSE_DECODE.truth))
        quoted = " ".join(f"{name} {value}" for name, value in case.quoted)
        print(f"{case.name}: {microseconds:.2f} us, floor {share:.2f}, error {error:.5f}; quoted {quoted}", flush=True)


def run_peers(report: common.Report, cases: list[Case], pools: Pools, chosen: list[Provider], generator) -> None:
    """The same shapes through other implementations; their errors are reported, not judged."""
    for case in cases:
        for peer in (one for one in chosen if one.handles(case)):
            layers, call = make_layers(case, pools, generator), peer.build()
            error = error_of(call, layers.inputs[0])
            microseconds = time_layers(call, layers)
            report.add(common.row(3, case.name, peer.name, "us", round(microseconds, 2)))
            report.add(common.row(3, case.name, peer.name, "relative_error", min(round(error, 6), 1e9)))
            print(f"{case.name}, {peer.name}: {microseconds:.2f} us, error {error:.5f}", flush=True)


def run_width_pairs(report: common.Report, pairs, pools: Pools, generator) -> None:
    """A short request costs the same in tensors as wide as a 1M context."""
    for own, wide in pairs:
        own_us, _ = gated_time(make_layers(own, pools, generator))
        wide_us, _ = gated_time(make_layers(wide, pools, generator))
        report.add(common.row(3, own.name, "ours", "us", round(own_us, 2)))
        report.add(common.row(3, wide.name, "ours", "us", round(wide_us, 2)))
        report.add(
            common.row(3, wide.name, "ours", "ratio", round(wide_us / own_us, 3), WIDTH_RATIO_BAR, "to own width")
        )
        print(f"{wide.name}: {wide_us:.2f} us, {wide_us / own_us:.3f} of {own_us:.2f} us", flush=True)


def run_verification(report: common.Report, cases, pools: Pools, generator) -> None:
    """Adjacent rows of one request against as many separate requests."""
    for case in cases:
        separate_us, _ = gated_time(make_layers(case, pools, generator))
        shared_us, _ = gated_time(make_layers(case, pools, generator, shared=True))
        name = f"{case.name}, one request"
        report.add(common.row(3, case.name, "ours", "us", round(separate_us, 2), note="separate requests"))
        report.add(common.row(3, name, "ours", "us", round(shared_us, 2)))
        ratio = round(shared_us / separate_us, 3)
        report.add(common.row(3, name, "ours", "ratio", ratio, VERIFY_RATIO_BAR, "to separate requests"))
        print(f"{name}: {shared_us:.2f} us, {ratio:.3f} of separate requests' {separate_us:.2f} us", flush=True)


def with_page_table(inputs: Inputs) -> Inputs:
    """The same call with the second cache's list as the page table that it came from."""
    page_size = inputs.extra_kv_pages.shape[1]
    table = torch.div(inputs.extra_indices[:, 0, ::page_size], page_size, rounding_mode="floor")
    return dataclasses.replace(inputs, page_table=table.contiguous())


def run_page_tables(report: common.Report, cases, pools: Pools, generator) -> None:
    """C128's candidates from lengths and page table against their list: the same bits, time and memory of the two."""
    for case in cases:
        layers = make_layers(case, pools, generator)
        list_us, _ = gated_time(layers)
        tables = [with_page_table(one) for one in layers.inputs]
        if not torch.equal(ours(tables[0]), sparse_decode(**tables[0].table_arguments())):
            raise SystemExit(f"{case.name}: list and page table differ")
        arguments = [one.table_arguments() for one in tables]
        table_us = common.graph_microseconds([lambda one=one: sparse_decode(**one) for one in arguments])
        for impl, us, tensor in (
            ("ours, list", list_us, tables[0].extra_indices),
            ("ours, page table", table_us, tables[0].page_table),
        ):
            report.add(common.row(4, case.name, impl, "us", round(us, 2)))
            report.add(common.row(4, case.name, impl, "index_bytes", tensor.numel() * tensor.element_size()))
        print(f"{case.name}: list {list_us:.2f} us, page table {table_us:.2f} us", flush=True)


def run_host_time(report: common.Report, pools: Pools, generator) -> None:
    layers = make_layers(Case("C4", 1, 16, C4), pools, generator)
    microseconds = common.host_microseconds(lambda: ours(layers.inputs[0]))
    name = "eager call, C4, 1 x 16 heads"
    report.add(common.row(3, name, "ours", "host_us", round(microseconds, 2)), common.eager_row(3, name))
    print(f"host time of an eager call: {microseconds:.1f} us", flush=True)


def print_kernels() -> None:
    for kernel in extension.load().kernel_attributes():
        print("  ".join(f"{name} {value}" for name, value in kernel.items()))


# ---- reporting


def summary(report: common.Report, cases: list[Case], names: list[str]) -> str:
    """One line per case: ours, the bar, the floor share, peers that ran, peers that are quoted."""
    values = {(row.case, row.impl, row.metric): row for row in report.rows}
    lines = []
    for case in cases:
        microseconds = values[case.name, "ours", "us"].value
        bars = " ".join(
            f"{bar:g}{'' if microseconds <= bar else ' MISSED'}" for _, bar in sorted(case.bars, reverse=True)
        )
        ran = [values.get((case.name, name, "us")) for name in names]
        quoted = dict(case.quoted)
        cells = [case.name, f"{microseconds:.2f}", bars, f"{values[case.name, 'ours', 'floor_share'].value:.2f}"]
        cells += ["" if one is None else f"{one.value:.1f}" for one in ran]
        cells += [quoted.get(name, "") for name in ("FlashInfer", "FlashInfer + copy", "FlashMLA", "Triton")]
        lines.append(tuple(cells))
    header = ("case", "ours us", "bar", "floor", *(f"{name} run" for name in names), "FI", "FI+copy", "FM", "Triton")
    return common.table(header, lines)


def ratios(report: common.Report) -> str:
    found = [row for row in report.rows if row.metric == "ratio"]
    lines = [(row.case, f"{row.value:.3f}", f"{row.bar:g}{'' if row.met else ' MISSED'}", row.note) for row in found]
    return common.table(("case", "ratio", "bar", ""), lines) if lines else ""


def middle(text: str) -> float:
    """A quoted time, ranges by their middle."""
    ends = [float(part) for part in text.split("-")]
    return sum(ends) / len(ends)


def plot(report: common.Report, cases: list[Case], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [("C4", 64), ("C4", 16), ("C128 at 512K", 64)]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(15, 4.5))
    for axis, (family, heads) in zip(axes, panels, strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for case in (one for one in cases if (one.family, one.heads) == (family, heads)):
            measured = {row.impl: row.value for row in report.rows if row.case == case.name and row.metric == "us"}
            for name, value in measured.items():
                lines.setdefault(name, []).append((case.rows, value))
            for name, text in case.quoted:
                if name not in measured:
                    lines.setdefault(f"{name} (quoted)", []).append((case.rows, middle(text)))
        for name, points in lines.items():
            style = {"linewidth": 2.5, "color": "black"} if name == "ours" else {"linewidth": 1.2}
            axis.plot(*zip(*points, strict=True), marker="o", label=name, **style)
        axis.set(title=f"{family}, {heads} heads", xlabel="rows", ylabel="us per call", xscale="log", yscale="log")
        axis.grid(True, which="both", alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.suptitle(f"sparse_decode, {torch.cuda.get_device_name()}, cold caches, CUDA graph replay")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a third of the table, no ratios")
    parser.add_argument("--cases", default="", help="only cases whose name contains this text")
    parser.add_argument("--no-peers", action="store_true", help="run no other implementation")
    parser.add_argument("--page-tables", action="store_true", help="C128 by list and by page table alone")
    parser.add_argument("--out", type=Path, default=REPO / "bench/results/sparse_decode.json")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    common.require_gpu()
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    pools = Pools(generator)
    cases = [case for case in CASES if arguments.cases in case.name and (case.quick or not arguments.quick)]
    found = [] if arguments.no_peers else [peer for peer in PEERS if peer.problem() is None]
    for peer in PEERS:
        print(f"{peer.name}: {'not asked for' if arguments.no_peers else peer.problem() or 'run'}")
    report = common.Report("sparse_decode", extension.build_info()["git_commit"], common.ceilings())
    print(torch.cuda.get_device_name(), report.ceilings)
    print_kernels()
    if arguments.page_tables:
        run_page_tables(report, PAGE_TABLE_CASES, pools, generator)
        run_host_time(report, pools, generator)
        report.write(arguments.out)
        return 0
    run_cases(report, cases, pools, generator)
    if not arguments.quick:
        run_width_pairs(report, [pair for pair in WIDTH_PAIRS if arguments.cases in pair[0].name], pools, generator)
        run_verification(report, [case for case in VERIFY_CASES if arguments.cases in case.name], pools, generator)
        run_page_tables(report, [case for case in PAGE_TABLE_CASES if arguments.cases in case.name], pools, generator)
    run_host_time(report, pools, generator)
    report.write(arguments.out)  # before the peers: what they do wrong must not cost our numbers
    run_peers(report, cases, pools, found, generator)
    report.write(arguments.out)
    print(f"\nFI, FI+copy, FM, Triton: quoted ({QUOTED_FROM}); columns marked `run` are of this run\n")
    print(ratios(report))
    print(summary(report, cases, [peer.name for peer in found]))
    missed = sum(row.met is False for row in report.rows)
    print(f"{sum(row.met is True for row in report.rows)} bars met, {missed} missed; {arguments.out}")
    if is_installed("matplotlib"):
        plot(report, cases, arguments.out.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
