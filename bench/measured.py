#!/usr/bin/env python3
"""Makes docs/measured.md from bench/results/*.json; with `--check` it only tells whether that is stale.

Every figure of the project that was measured stands in a result file, and is shown here and nowhere else: with its bar
where an issue named one, with what ran beside it in the same run, with device, date, commit and command. Standard
library only.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO)]

from bench.serving import report  # noqa: E402

RESULTS, PAGE = REPO / "bench/results", REPO / "docs/measured.md"
RELEASE = re.compile(r"_sglang_(?P<release>[0-9.]+(post[0-9]+)?)(_(?P<device>[a-z0-9]+))?$")
CITED = "0.5.17"  # the release whose end-to-end sections other pages link to, by titles without a release
COMMAND = "python3 bench/measured.py"

HEAD = f"""# Measured

Made by `{COMMAND}` from the files of `bench/results`; a test says when it is stale. Do not edit it.

No figure here is an SM120 figure: nobody has run this on one. The device of each run stands above its tables; it is a
stand-in, and its times are to be read beside the peers of the same run. `bar` is what an issue of this project asked
for; one that was missed says so. On your card: `python3 bench/<operator>.py` measures an operator,
`python3 -m deepseek_v4_sm120 calibrate` all of them beside SGLang's own, and `bench/serving/compare.py` two servers.
Designs, predictions and causes: [notes/](notes/README.md).
"""


@dataclass(frozen=True)
class Section:
    """How one result file is shown. `metrics`: those that are shown, {metric: unit}; the greatest of `errors` is
    told in a line. `by_metric`: the metrics are the columns (one implementation a row), else the implementations."""

    title: str
    text: str
    metrics: dict[str, str]
    errors: tuple[str, ...] = ("relative_error",)
    by_metric: bool = False
    only: str = ""  # of the cases, those that contain this


MICROSECONDS = {"us": "microseconds a call"}
OF_READ = MICROSECONDS | {"read_share": "share of read bandwidth"}
SHADOW = {
    "calls": "calls",
    "relative L2 of a call, greatest": "relative L2, greatest",
    "relative L2 of a call, mean": "mean",
    "calls above the bound": "above the bound",
}
STEP = {
    "decode step, ms, worst": "decode step, ms, slower of three",
    "decode step, ms, best": "best",
    "decode step within a run, ms, worst": "within a run, slower of three",
    "decode step within a run, ms, best": "within, best",
    "prefill, ms, best": "prefill, ms",
    "launches per step": "launches a step",
    "kernel time per step, us": "kernel time a step, us",
    "launching a step's graph, us of the host": "graph's launch, us of the host",
}
SECTIONS = {
    "serving_h200": Section("Serving", "Two servers behind HTTP in turn: stock, and with this folder mounted.", {}),
    "serving_two_cards_h200": Section("Serving over two cards", "The same; of random drafts none is accepted.", {}),
    "e2e_whole_step_sglang": Section("The decode step and a long prompt", "", STEP, (), True, "flash43"),
    "e2e_chain2_sglang": Section("The decode step over two cards", "Each with its sums, by NVLink.", STEP, (), True),
    "e2e_chain4_sglang": Section(
        "The decode step over four cards, all 256 experts",
        "Each with the sums that it has there, over NVLink.",
        STEP,
        (),
        True,
    ),
    "e2e_two_cards_sglang": Section(
        "Two cards", "By NCCL with NVLink, without SGLang's own all-reduce.", STEP, (), True, "flash43"
    ),
    "e2e_four_cards_sglang": Section(
        "Four cards", "The same over four, with all 256 experts.", STEP, (), True, "flash43"
    ),
    "e2e_speculation_sglang": Section(
        "Speculation",
        "Random weights: no draft is accepted, so a step is a token. Greedy text of a speculating engine beside that "
        "of one that does not speculate.",
        STEP | {"answers": "answers", "answers that differ": "that differ", "first token that differs": "from token"},
        (),
        True,
    ),
    "e2e_accepted_sglang": Section(
        "Speculation with drafts that are accepted",
        "Six layers, random weights, reproducible sums: drafts overwritten by the text of the server that does not "
        "speculate, none, half or all of them right. Greedy text beside that text.",
        {
            "answers": "answers",
            "answers that differ": "that differ",
            "tokens a verification": "tokens a verification",
            "verifications off what the drafts must take, greatest": "verifications off, greatest",
        },
        (),
        True,
        "drafts",
    ),
    "e2e_start_sglang": Section(
        "Start",
        "From a server's start to its first token, six layers, 64 experts, two servers side by side; and what waits at "
        "the first time of a shape (tests/e2e/start_stage.py). Kernels of ours in Triton's folder there were until "
        "2026-12-01.",
        {},
    ),
    "e2e_layers_sglang": Section(
        "Every sublayer beside float64", "Six layers, their inputs. A fault's share is 1 where an engine has it.", {}
    ),
    "e2e_shortage_sglang": Section(
        "Where a disk or the card's memory runs out", "Servers of six layers, one card each.", {}
    ),
    "e2e_soak_sglang": Section(
        "Soak",
        "Servers of six layers side by side, each under 64 streams of every kind of request (tests/e2e/soak_stage.py), "
        "all calls together. A slope is judged by what is sure of it: less two standard errors, in both halves of a "
        "call. Triton compiled kernels of ours until 2026-12-01. What grows, by a look that day (plain beside stock, "
        "390 s), is malloc's heap in the scheduler, 49 MB, ever more slowly, stock's 64, and no object of Python.",
        {},
    ),
    "e2e_reproducible43_sglang": Section(
        "A reproducible server, all layers",
        "43 layers with 16 experts, whose routers choose.",
        {
            "answers": "answers",
            "answers that differ": "that differ",
            "log-probability difference, greatest": "log-probability difference, greatest",
        },
        (),
        True,
    ),
    "e2e_reproducible_sglang": Section(
        "A reproducible server",
        "Six layers, random weights, forced tokens: every log-probability to the last bit.",
        {
            "answers": "answers",
            "answers that differ": "that differ",
            "log-probability difference, greatest": "log-probability difference, greatest",
        },
        (),
        True,
    ),
    "e2e_features_sglang": Section(
        "Features together",
        "Six layers, random weights, an engine a feature: [features.md](features.md) has the whole matrix.",
        {"answers": "answers", "answers that differ": "that differ", "a defect": "a defect"},
        (),
        True,
    ),
    "e2e_prompts_sglang": Section(
        "Short prompts, and many at once",
        "43 layers with 32 experts, engines in turn; passes of at most 8,192 rows, by a trace of kernels. Prefill "
        "graphs are SGLang's, `--cuda-graph-backend-prefill breakable`. Their bits: six layers, `reproducible=on`.",
        {
            "time to all first tokens, ms, best": "time to all first tokens, ms",
            "from a token of the stream to the next, longest, ms": "longest pause of a stream beside",
            "pass 1, the card without a kernel, ms": "idle in pass 1",
            "pass 1, launches": "launches in pass 1",
            "pass 4, traced, ms": "pass 4, ms",
            "pass 4, the card without a kernel, ms": "idle in pass 4",
            "answers that differ": "answers that differ",
        },
        (),
        True,
    ),
    "e2e_halves_sglang": Section(
        "Prompts in halves",
        "43 layers with 16 experts over two cards, NCCL through host memory, engines in turn. Experts are in bf16 by "
        "the kernels of `E2E_AS_SM120=wide`, which every card takes by itself since 2026-12-01.",
        {
            "time to all first tokens, ms, best": "time to all first tokens, ms",
            "time to all first tokens, ms, worst": "worst",
            "time to all first tokens, of the whole's": "of the whole's",
            "NCCL's sums on a card, ms": "NCCL's sums, ms",
            "the sums' time that is not hidden, share of the whole's sums": "sums not hidden",
        },
        (),
        True,
        "flash43",
    ),
    "e2e_streams_sglang": Section(
        "A prompt's streams, dealt to two cards",
        "43 layers with 16 experts over two cards, engines in turn.",
        {
            "time to all first tokens, ms, best": "time to all first tokens, ms",
            "time to all first tokens, of the whole's": "of the whole's",
            "NCCL's sums on a card, ms": "NCCL's sums, ms",
        },
        (),
        True,
        "flash43",
    ),
    "e2e_products_sglang": Section(
        "The compressors' products, dealt to the cards",
        "43 layers with 32 experts, our sums, engines in turn, three rounds.",
        {
            "decode step, ms, median of rounds in turn": "decode step, ms, median of rounds",
            "decode step within a run, ms, best": "within a run, ms, best",
            "decode step, median of rounds in turn, of the whole's": "of the whole's",
        },
        (),
        True,
        "flash43",
    ),
    "prompt_sums_h200": Section(
        "A prompt's sums, by NCCL's settings",
        "Through host memory; products of 4,096 rows. Copy engines were cut off by a limit of 140 s.",
        {},
    ),
    "e2e_dealt_index_sglang": Section(
        "A prompt's index rows, dealt to two cards",
        "43 layers, engines in turn.",
        {"time to the first token, ms, best": "time to the first token, ms", "prefill, ms, best": "prefill, ms"},
        (),
        True,
        "flash43",
    ),
    "e2e_sums_sglang": Section(
        "The sums between the cards",
        "Six layers over two cards, random weights, forced tokens: two engines, and one prompt sent twice. Every sum "
        "beside SGLang's own, and all other calls, are in the file.",
        {
            "log-probability difference, greatest": "log-probability difference, greatest",
            "the run against its own repetition": "against its own repetition",
        },
        (),
        True,
        "two processes",
    ),
    "e2e_sums_step_sglang": Section(
        "A step with the sums between the cards",
        "43 layers over two cards by NVLink, two engines at a time, timed in turn. The slower is of four repetitions: "
        "engines vary by 5% and more at batch 1.",
        STEP | {"decode step, ms, worst": "decode step, ms, slower of four"},
        (),
        True,
        "flash43",
    ),
    "e2e_faults_sglang": Section(
        "Faults on two cards",
        "Six layers over two cards, our sums, servers side by side: what was done to each, and what became of it. Who "
        "was named, and what else was seen, is in the file.",
        {
            "seconds until all its processes have ended": "seconds to the end",
            "messages that lack who ended": "unnamed",
            "messages that lack rank, call and sum": "sum unnamed",
            "processes left": "processes left",
            "entries left in /dev/shm": "left in /dev/shm",
            "answers that differ": "answers that differ",
        },
        (),
        True,
    ),
    "e2e_experts_sglang": Section(
        "Prompts' experts as on SM120",
        "Kernels that a 12.x card takes, in a Hopper engine: `wide` (W4A16), which it takes by itself since 2026-12-01 "
        "(Triton's until then), and `scaled` (W4A8), which multiplies in bf16 there.",
        SHADOW
        | {
            "calls above 256 rows by its kernel": "its calls above 256 rows",
            "calls above 256 rows by another kernel": "others' calls",
            "answers that differ": "answers that differ",
            "log-probability difference, mean": "log-probability difference, mean",
            "share of positions with the same greatest token": "same greatest token",
        },
        (),
        True,
    ),
    "e2e_operators_sglang": Section(
        "Every call beside the original", "Shadow mode on the engine's live inputs.", SHADOW, (), True, "shadow"
    ),
    "e2e_index_seams_sglang": Section(
        "The same through SGLang's SM120 branches", "`DSV4_SM120_FORCE=seams`.", SHADOW, (), True, "shadow"
    ),
    "e2e_sglang": Section(
        "Attention beside the originals, and the same answer twice",
        "Random weights: rounding moves their log-probabilities, so stock is compared with itself too.",
        SHADOW
        | {
            "log-probability difference, mean": "log-probability difference, mean",
            "share of positions with the same greatest token": "same greatest token",
        },
        (),
        True,
    ),
    "gates_h200": Section(
        "The gates",
        "Four servers of a cut-down model with random weights: only equality means anything. Read each verdict beside "
        "that of stock: against itself under load, and with speculation, stock fails as well and by more; the oracle "
        "holds ours to stock's own rounding, which moves tokens where weights are random.",
        {},
        (),
    ),
    "interleaving_h200": Section("A long prompt among streams", "Nothing of ours but the interval.", {}, ()),
    "sparse_decode_h200": Section(
        "sparse_decode",
        "Cold caches, graph replay. Since then a row of up to 5 leaves (C128 at 1K) is one block's, and merges are "
        "shorter: 2 us less there, 0.4 to 1.6 at C4 "
        "([notes](notes/sparse_decode.md#few-rows-what-a-call-at-1k-context-is-made-of)).",
        MICROSECONDS,
    ),
    "sparse_prefill_h200": Section("sparse_decode, prompts", "", {"tflops": "TFLOP/s"}),
    "sparse_prefill_pairs_h200": Section(
        "sparse_decode, prompts: the kernel for few rows in pairs",
        "Its bits are those of the kernel for few rows. From 16 to 512 rows: where it begins to pay. With 32 and 64 "
        "heads as it was before the next section.",
        {"tflops": "TFLOP/s"} | MICROSECONDS,
    ),
    "sparse_prefill_wide_h200": Section(
        "sparse_decode, prompts: 32 heads at once", "The same bits again.", {"tflops": "TFLOP/s"} | MICROSECONDS
    ),
    "index_select_h200": Section(
        "index_select",
        "Logits, exact top-k and page transform together.",
        MICROSECONDS | {"logits_tflops": "logits, TFLOP/s", "topk_share": "share of the top-k"},
        ("logit_error",),
    ),
    "mxfp4_moe_h200": Section(
        "mxfp4_moe",
        "Of one layer, weights cold. Ours from 512 rows on are Triton's kernels, which ran on SM90 until 2026-12-01; "
        "what runs since is `wide` of the prompts below.",
        MICROSECONDS | {"read_share": "share of read bandwidth", "tflops": "TFLOP/s"},
    ),
    "mxfp4_moe_tp4_h100": Section(
        "mxfp4_moe at four cards, H100",
        "A rank's share of one layer, weights cold.",
        MICROSECONDS | {"read_share": "share of read bandwidth", "ratio": "to ours without"},
    ),
    "mxfp4_moe_prompts_h200": Section(
        "mxfp4_moe, prompts",
        "In bf16. Triton's, which ran on SM90 until 2026-12-01: by wgmma, and by mma.sync, compiled as for SM120 with "
        "its table's blocks and with the fastest. W4A8: the kernel that SM120 runs by an instruction of its own, here "
        "with two products for one.",
        MICROSECONDS | {"tflops": "TFLOP/s", "ratio": "a FLOP's time to TP1's"},
    ),
    "fp8_linear_h200": Section(
        "fp8_linear",
        "In chains of the same call. Up to 8 rows, outputs of 4096 and more than 1,024 inputs (wo_b among them) are "
        "split since, which is slower in such a chain and faster in a layer.",
        OF_READ,
        ("relative_error",),
    ),
    "fp8_linear_draft_input_h200": Section("fp8_linear, what a draft begins with", "", MICROSECONDS),
    "fp8_linear_128_rows_h200": Section("fp8_linear from 65 rows on", "", MICROSECONDS, ("relative_error",)),
    "layer_h200": Section(
        "A layer, by launches",
        "A C4 layer's kernels as in an engine, without the router's top-k and the sums between cards, and one FP8 "
        "layer of it launched otherwise. The lower, the better; differences below 0.5 are none.",
        {"us": "us a layer"},
    ),
    "wo_a_h200": Section("wo_a", "", MICROSECONDS),
    "bf16_linear_h200": Section("bf16_linear", "", OF_READ),
    "bf16_linear_draft_head_h200": Section("bf16_linear, a draft's head", "", OF_READ),
    "router_topk_h200": Section(
        "router_topk",
        "By itself, with logits in the L2; then a chain at TP2: boundary, router's logits, choice, experts, and on a "
        "second stream the shared expert, microseconds a layer.",
        MICROSECONDS,
    ),
    "all_reduce_h200": Section(
        "all_reduce",
        "The slowest rank's time of a sum in a graph, NCCL in the same run; NVLink between the cards, and host memory "
        "stands for a machine whose peers do not work. Then what a sum adds to a boundary of mhc, the gather of "
        "logits, and very many sums beside other work, every bit looked at. Between runs of a "
        "machine single figures move by a microsecond.",
        {"call_us": "microseconds a sum", "wrong bits": "wrong bits"},
        (),
    ),
    "all_reduce_without_peers_h200": Section(
        "all_reduce without peers",
        "The same with NCCL_P2P_DISABLE=1, before sums went inside of boundaries: NCCL, too, goes through host memory.",
        {"call_us": "microseconds a sum"},
        (),
    ),
    "the_house_h200": Section(
        "The folds that were deleted; load, build and tests",
        "SwiGLU and norm in fp8_linear's launch, the queries' norm in the attention's. SGLang 0.5.17.",
        {
            "step_ms_best": "ms a step",
            "step_ms_worst": "slowest",
            "gain_of_a_step": "share gained by the folds",
            "ms_more_than_uncompressed": "ms more than uncompressed",
            "seconds": "s",
            "MB": "MB",
        },
        (),
        True,
    ),
    "compressor_h200": Section(
        "compressor", 'Before the plan was a hint; since then: "Before and after" below.', MICROSECONDS
    ),
    "compressor_verification_h200": Section(
        "compressor, verification",
        "A step of speculation's rows; SGLang's own in the same run, bytes compared.",
        MICROSECONDS | {"bytes_apart": "bytes apart"},
    ),
    "mhc_h200": Section(
        "mhc",
        "",
        MICROSECONDS | {"copy_share": "share of copy bandwidth"},
        tuple(f"relative_error_{n}" for n in ("streams", "y")),
    ),
    "before_after_h200": Section(
        "Before and after the loads went behind the wait",
        "Kernels and engine of two builds in one run: what correct order and waits of their own cost.",
        MICROSECONDS | {"decode step, ms, best": "decode step, ms, best"},
        (),
    ),
    "calibrate_h200": Section(
        "calibrate",
        "Every implementation that was installed.",
        {"stock's time over ours": "stock's time over ours"} | MICROSECONDS,
        ("error",),
    ),
}


def number(value: object) -> str:
    if value is None:
        return "not measured"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def cell(rows: list[dict]) -> str:
    """A value, with its bars: of two issues each may have set one."""
    barred = [row for row in rows if row["bar"] is not None]
    bars = "; ".join(f"bar {number(row['bar'])}{'' if row['met'] else ', **missed**'}" for row in barred)
    return f"{number(barred[0]['value'])} ({bars})" if barred else number(rows[-1]["value"]) if rows else ""


def unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def table(rows: list[dict], first: str, line: str, column: str, names: dict[str, str] | None = None) -> str:
    """Rows as a table: `line` and `column` are the keys that make lines and columns."""
    columns = unique(row[column] for row in rows)
    found = defaultdict(list)
    for row in rows:
        found[row[line], row[column]].append(row)
    header = (first, *((names or {}).get(name, name) for name in columns))
    lines = unique(row[line] for row in rows)
    return report.markdown_table(header, ((name, *(cell(found[name, c]) for c in columns)) for name in lines))


def tables(rows: list[dict], section: Section) -> Iterator[str]:
    elsewhere = [row for row in rows if section.only not in row["case"]]
    rows = [row for row in rows if section.only in row["case"]]
    if not any(row["metric"] in section.metrics for row in rows) and (section.metrics or not rows):
        raise ValueError(f"{section.title}: the result file has no row that SECTIONS shows of it")
    if not section.metrics:
        yield table([row | {"line": f"{row['case']}, {row['metric']}"} for row in rows], "what", "line", "impl")
    elif section.by_metric:
        wanted = [
            row | {"line": f"{row['case']}, {row['impl']}"}
            for metric in section.metrics
            for row in rows
            if row["metric"] == metric
        ]
        yield table(wanted, "what", "line", "metric", section.metrics)
    else:
        units: dict[str, list[dict]] = {}  # the rows of each table; what is told of the first's cases are columns of it
        for metric, unit in section.metrics.items():
            wanted = [row for row in rows if row["metric"] == metric]
            first = next(iter(units.values()), [])
            if {row["case"] for row in wanted} <= {row["case"] for row in first}:
                first += [row | {"impl": f"{row['impl']}, {unit}"} for row in wanted]
            else:
                units[unit] = wanted
        yield from (table(wanted, unit, "case", "impl") for unit, wanted in units.items())
    shown = {*section.metrics, *section.errors}
    hidden = [row for row in rows if section.metrics and row["metric"] not in shown] + elsewhere
    if besides := "; ".join(f"{r['case']}, {r['metric']} {cell([r])}" for r in hidden if r["met"] is False):
        yield f"Besides: {besides}."
    for error in section.errors:
        if worst := max((row["value"] for row in rows if row["metric"] == error), default=None):
            yield f"Greatest `{error}` of these: {number(worst)}."


def text_of(value: object) -> str:
    return "; ".join(map(str, value)) if isinstance(value, list) else str(value)


def origin(found: dict) -> str:
    """Where and how a file's figures were measured."""
    device = found.get("device") or report.gpu_names(found["machine"])
    device = device.get("name", device) if isinstance(device, dict) else device
    about = [f"Device {text_of(device)}", f"date {found.get('date') or found['machine']['date'][:10]}"]
    about.append(f"commit {found.get('commit') or found['machine']['commit']}")
    ceilings = ", ".join(f"{name} {number(value)}" for name, value in (found.get("ceilings") or {}).items())
    lines = ["; ".join(about) + (f"; ceilings: {ceilings}" if ceilings else "") + "."]
    lines += [f"Command: `{command}`" for command in unique([text_of(found["command"])])]
    notes = [text_of(found.get("note", "")), *found.get("notes", [])]
    lines += [f"Note: {note}" for note in unique(filter(None, notes))]
    return "\n\n".join(lines)


def serving(found: dict) -> Iterator[str]:
    for variant in found["variants"]:
        labels = (f"{letter}: {side['label']}" for letter, side in variant["sides"].items())
        header = ("cell", "metric", *labels, "B / A", "verdict")
        if len(found["variants"]) > 1:
            yield f"{variant['name']}:"
        yield from (f"INCOMPLETE: {reason}" for reason in variant["incomplete"])
        yield report.markdown_table(header, report.table_rows(variant))


def bars(files: dict[str, dict]) -> str:
    """Of every file with bars: how many, and how many were missed."""
    lines = []
    for stem, found in files.items():
        rows = [row for row in found.get("rows", ()) if row["bar"] is not None]
        if rows:
            issues = ", ".join(map(str, sorted({row["issue"] for row in rows})))
            missed = sum(not row["met"] for row in rows)
            lines.append((title(stem), issues, str(len(rows)), str(len(rows) - missed), str(missed)))
    return report.markdown_table(("result", "issues", "bars", "met", "missed"), iter(lines))


def kind(stem: str) -> str:
    """The key in SECTIONS: the end-to-end files of all releases of SGLang are of one kind each."""
    return RELEASE.sub("_sglang", stem)


def age(stem: str) -> list[int]:
    """Sorts the files of a kind, the newest release first."""
    found = RELEASE.search(stem)
    return [-int(number) for number in re.findall(r"\d+", found["release"])] if found else []


def title(stem: str) -> str:
    """That of its section; files of other releases than the one that the project's pages cite say theirs, and those of
    another device than the H200."""
    if kind(stem) not in SECTIONS:
        return stem
    found = RELEASE.search(stem)
    release = f", SGLang {found['release']}" if found and found["release"] != CITED else ""
    device = f", {found['device'].upper()}" if found and found["device"] else ""
    return SECTIONS[kind(stem)].title + release + device


def link(heading: str) -> str:
    place = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
    return f"[{heading}](#{place})"


def page(files: dict[str, dict]) -> str:
    contents = ", ".join(link(name) for name in ("Bars", *map(title, files)))
    parts = [HEAD, f"Here: {contents}.", "## Bars", bars(files)]
    for stem, found in files.items():
        section = SECTIONS.get(kind(stem), Section(stem, "", {}))
        parts += [f"## {title(stem)}", section.text, f"File `bench/results/{stem}.json`. {origin(found)}"]
        parts += serving(found) if "variants" in found else tables(found["rows"], section)
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def results() -> dict[str, dict]:
    """{stem: content} of every result file, those of SECTIONS first and in its order."""
    places = {name: place for place, name in enumerate(SECTIONS)}
    stems = [path.stem for path in RESULTS.glob("*.json")]
    ordered = sorted(stems, key=lambda stem: (places.get(kind(stem), len(places)), age(stem), stem))
    return {stem: json.loads((RESULTS / f"{stem}.json").read_text()) for stem in ordered}


def write_or_check(where: Path, made: str, description: str, command: str, arguments: list[str] | None = None) -> int:
    """The command line of what makes a page: writes it, or with --check says whether it is as it would be written."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where the page is stale")
    if parser.parse_args(arguments).check:
        fresh = where.exists() and where.read_text() == made
        print(f"{where.relative_to(REPO)} is {'as its results are' if fresh else f'stale: {command}'}")
        return 0 if fresh else 1
    where.parent.mkdir(exist_ok=True)
    where.write_text(made)
    return 0


def main(arguments: list[str] | None = None) -> int:
    return write_or_check(PAGE, page(results()), __doc__, COMMAND, arguments)


if __name__ == "__main__":
    sys.exit(main())
