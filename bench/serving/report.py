"""A comparison as Markdown and as one HTML page with its plots inside. Reads only what compare.py wrote as JSON."""

from __future__ import annotations

import base64
import html
import json
import re
import statistics
from collections import Counter
from collections.abc import Iterator

from bench.serving.cells import KINDS
from bench.serving.machine import gpu_names
from bench.serving.measures import HEADLINES, METRICS, PERCENTILES, SPECULATION, Change, Spread, percentile

FOOT = (
    "Medians over the rounds, least and greatest in brackets; 'within noise': the ranges touch. "
    "Ranges of equal servers stay apart by chance in 1 of 10 rows with three rounds, in 1 of 35 with four, in 1 of 126 "
    "with five; fewer than three rounds get no verdict."
)
CODE, BY_CODE = re.compile(r"`([^`]*)`"), r"<code>\1</code>"
MAX_LENGTH_DIFFERENCE = 0.1  # of the greater median
UNMEASURED = ("NOT MEASURED", "PARTLY MEASURED")  # in place of a metric
NAMES = "What the tables name"
GAPS = f"Time between two tokens, {KINDS['intrusion']}, all rounds together"
GAPS_HEADER = ("cell", "side", "gaps", "number", *(f"p{p}, ms" for p in PERCENTILES), "greatest, ms")
# of the hundreds of server arguments, those that a reader asks for first
SHOWN_FLAGS = (
    "tp_size",
    "dp_size",
    "ep_size",
    "quantization",
    "kv_cache_dtype",
    "attention_backend",
    "moe_runner_backend",
    "chunked_prefill_size",
    "mem_fraction_static",
    "max_running_requests",
    "disable_radix_cache",
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_num_draft_tokens",
)


def spreads(entry: dict) -> dict[str, dict[str, Spread]]:
    """{metric: {side: Spread}} of a cell, from its rounds without problems."""
    found: dict[str, dict[str, Spread]] = {}
    for letter, runs in entry["runs"].items():
        for name in METRICS:
            values = [run["values"][name] for run in runs if name in run["values"] and not run["problems"]]
            if values:
                found.setdefault(name, {})[letter] = Spread.of(values)
    return found


def problems_of(entry: dict) -> list[str]:
    unreached = [f"{letter}: not begun" for letter, runs in entry["runs"].items() if not runs]
    return unreached + [
        f"{letter}, round {run['round'] + 1}: {problem}"
        for letter, runs in entry["runs"].items()
        for run in runs
        for problem in run["problems"]
    ]


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def spread_text(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return number(spread.median) + (f" ({number(spread.low)} - {number(spread.high)})" if spread.rounds > 1 else "")


def table_rows(variant: dict) -> Iterator[tuple[str, ...]]:
    """(cell, metric, A, B, ratio, verdict); a cell that is no measurement on either side is one row that says so."""
    for entry in variant["cells"]:
        cell, problems = entry["cell"], problems_of(entry)
        found = spreads(entry)
        shown = [*HEADLINES[cell["kind"]], *SPECULATION]
        rows = [
            (
                cell["name"],
                f"{name}, {METRICS[name].unit}",
                spread_text(found[name].get("A")),
                spread_text(found[name].get("B")),
                *change_texts(name, found[name]),
            )
            for name in shown
            if name in found
        ]
        yield from rows
        for problem in problems[:3]:
            yield (cell["name"], "NOT MEASURED" if not rows else "PARTLY MEASURED", "", "", "", problem)


def change_texts(name: str, found: dict[str, Spread]) -> tuple[str, str]:
    if "A" not in found or "B" not in found:
        return "-", "one side only"
    change = Change.of(METRICS[name], found["A"], found["B"])
    return f"{change.ratio:.3f}", change.verdict


def cache_notes(variant: dict) -> list[str]:
    """Prefix-cache hits, apart from the figures."""
    found = []
    for entry in variant["cells"]:
        for letter, runs in entry["runs"].items():
            shares = [run["cached_share"] for run in runs if "cached_share" in run]
            if shares and entry["cell"]["kind"] == "depth":
                known = None not in shares
                what = f"{min(shares):.0%} of the prefix came from the cache" if known else "cache hits are not known"
                text = f"{entry['cell']['name']}, {letter}: {what}"
                found.append(text + "".join(f"; {run['note']}" for run in runs[:1] if "note" in run))
    return found


def length_notes(variant: dict) -> list[str]:
    """Cells in which the two sides' answers have other lengths: figures of those are no comparison of speed alone."""
    found = []
    for entry in variant["cells"]:
        medians = {}
        for letter, runs in entry["runs"].items():
            lengths = [one["output_len"] for run in runs if not run["problems"] for one in run.get("requests", ())]
            if lengths:
                medians[letter] = statistics.median(lengths)
        if len(medians) == 2 and abs(medians["B"] - medians["A"]) > MAX_LENGTH_DIFFERENCE * max(medians.values()):
            found.append(
                f"{entry['cell']['name']}: the answers of A have {medians['A']:g} tokens, those of B {medians['B']:g} "
                "(medians): do both give right answers?"
            )
    return found


def distribution_rows(variant: dict) -> Iterator[tuple[str, ...]]:
    """(cell, side, when, number of gaps, percentiles..., greatest) of the intrusion cells, all rounds together."""
    for entry in variant["cells"]:
        for letter, runs in entry["runs"].items():
            for when in ("during", "otherwise"):
                pool = [value for run in runs for value in run.get("pools", {}).get(when, [])]
                if pool:
                    points = [number(percentile(pool, p)) for p in PERCENTILES]
                    yield entry["cell"]["name"], letter, when, str(len(pool)), *points, number(max(pool))


def markdown_table(header: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(
        "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def side_lines(letter: str, side: dict) -> list[str]:
    who = side["identity"]
    if who is None:
        return [f"- {letter} = {side['label']}: never reached"]
    clocks = side["clocks"]
    seen = f"{clocks['sm_mhz']:g} MHz, {clocks['temperature_c']:g} C" if clocks and clocks["sm_mhz"] else "not seen"
    found = [
        f"- {letter} = {side['label']}: SGLang {who['version']}, model {who['model']}, patch {patch_text(who)}, "
        f"clocks {seen}",
        f"  - command: `{who['command'] or 'not started by this program, ' + who['url']}`",
    ]
    shown = {name: who["flags"][name] for name in SHOWN_FLAGS if who["flags"].get(name) is not None}
    if shown:
        found.append(
            "  - flags: " + ", ".join(f"{name} {value}" for name, value in shown.items()) + "; all in the JSON"
        )
    if who["cache_tokens"]:
        found.append(f"  - room for {who['cache_tokens']:,} tokens in the KV cache")
    found += [f"  - not known: {text}" for text in who["unknown"]]
    return found


def patch_text(who: dict) -> str:
    if who["patch"] is None:
        return "not known"
    states = sorted(set(who["patch"].values()))
    names = {state: ", ".join(sorted(n for n, own in who["patch"].items() if own == state)) for state in states}
    return "; ".join(f"{state}: {of}" for state, of in names.items()) or "none (stock)"


def labels(variant: dict) -> dict[str, str]:
    return {letter: f"{letter}: {side['label']}" for letter, side in variant["sides"].items()}


def header(variant: dict) -> tuple[str, ...]:
    return ("cell", "metric", *labels(variant).values(), "B / A", "verdict")


def releases(result: dict) -> str:
    """Of SGLang and its model, as far as the servers told."""
    known = [side["identity"] for variant in result["variants"] for side in variant.get("sides", {}).values()]
    found = dict.fromkeys(f"SGLang {who['version']} with {who['model']}" for who in known if who)
    return "; ".join(found) or "not known"


def outcome(variant: dict) -> str:
    """Of a variant, in one line: how many figures are better, worse, or neither."""
    if variant["refused"]:
        return "no comparison: A and B differ in more than the intended change"
    rows = list(table_rows(variant))
    verdicts = Counter(row[-1] for row in rows if row[1] not in UNMEASURED)
    worse = ", ".join(f"{row[0]} ({row[1].split(',')[0]})" for row in rows if row[-1] == "worse")
    told = [f"better in {verdicts['better']} of {verdicts.total()} figures"] if verdicts else []
    told += [f"worse in {verdicts['worse']}" + (f": {worse}" if worse else "")] if told else []
    told += [f"{v} in {count}" for v, count in sorted(verdicts.items()) if v not in ("better", "worse")]
    missing = len({row[0] for row in rows if row[1] in UNMEASURED})
    told += [f"{missing} cell{'s' if missing > 1 else ''} not or partly measured"] if missing else []
    told += ["INCOMPLETE, see below"] if variant["incomplete"] else []
    return f"{variant['sides']['B']['label']} is " + "; ".join(told) if told else "nothing was measured"


def rounds_begun(result: dict) -> set[int]:
    """How many rounds the cells have, side by side; {0} where there is none."""
    cells = [entry for variant in result["variants"] for entry in variant.get("cells", ())]
    return {len(runs) for entry in cells for runs in entry["runs"].values()} or {0}


def first_lines(result: dict) -> list[str]:
    """What a stranger has to know first: what was compared, on what, what came out, and what to believe."""
    names = {letter: side["label"] for variant in result["variants"] for letter, side in
             variant.get("sides", {}).items()}  # fmt: skip
    compared = " against ".join(f"{letter} = {label}" for letter, label in sorted(names.items())) or "nothing"
    asked, begun = result["settings"].get("rounds", 0), rounds_begun(result)
    few_to_many = " to ".join(map(str, sorted({min(begun), max(begun)})))
    rounds = f"{asked} rounds" if begun == {asked} else f"{few_to_many} of {asked} rounds"
    found = [
        f"- compared: {compared}; the one intended change: {', '.join(result['changes'])}",
        f"- on: {gpu_names(result['machine'])}; {releases(result)}",
        f"- how: both sides in turn on one host, {rounds} of every cell, by SGLang's own bench_serving",
    ]
    found += [f"- {variant['name']}: {outcome(variant)}" for variant in result["variants"] if variant.get("sides")]
    believe = ["fewer than three rounds: no difference here has a verdict"] if max(begun) < 3 else []
    return found + [f"- to know before believing it: {note}" for note in [*result["notes"], *believe]]


def glossary(result: dict) -> list[str]:
    """The kinds of cells and the metrics that the tables name."""
    entries = [entry for variant in result["variants"] for entry in variant.get("cells", ())]
    kinds = dict.fromkeys(entry["cell"]["kind"] for entry in entries)
    shown = dict.fromkeys(name for kind in kinds for name in HEADLINES[kind])
    shown |= dict.fromkeys(name for name in SPECULATION for entry in entries if name in spreads(entry))
    cells = {kind: ", ".join(dict.fromkeys(e["cell"]["name"] for e in entries if e["cell"]["kind"] == kind))
             for kind in kinds}  # fmt: skip
    found = [f"- {cells[kind]}: {KINDS[kind]}" for kind in kinds]
    way = {True: "more is better", False: "less is better"}
    return found + [f"- {n}: {METRICS[n].words}; {way[METRICS[n].higher_is_better]}" for n in shown]


def machine_lines(result: dict) -> list[str]:
    there, settings = result["machine"], result["settings"]
    drivers = sorted({gpu["driver_version"] for gpu in there["gpus"]})
    driver, host = ", ".join(drivers) or "not known", f"{there['processor']}, {there['cores']} cores"
    generator = result["generator"] or "not started"
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return [
        f"- {gpu_names(there)}; driver {driver}; {host}",
        f"- {there['date']}, commit {there['commit'] or 'not known'}, load generator {generator}",
        f"- in the load generator's Python: {versions or 'not known'}",
        f"- {settings['rounds']} rounds asked for, {settings['prompts']} prompts, seed {settings['seed']}, "
        f"matrix {result['matrix']}; intended change: {', '.join(result['changes'])}",
        f"- command: `{result['command']}`",
    ]


def state_lines(variant: dict) -> list[str]:
    found = []
    if variant["refused"]:
        found += ["**No comparison: A and B differ in more than the intended change.**", ""]
        found += [f"- {reason}" for reason in variant["refused"]]
    if variant["incomplete"]:
        found += ["", "**INCOMPLETE: the session ended early; what is below is what was measured until then.**", ""]
        found += [f"- {reason}" for reason in variant["incomplete"]]
    return found


def variant_markdown(variant: dict) -> list[str]:
    found = [f"## {variant['name']}", ""]
    for letter, side in variant["sides"].items():
        found += side_lines(letter, side)
    found += ["", *state_lines(variant), ""]
    if variant["refused"]:
        return found  # no figures side by side
    found += [markdown_table(header(variant), table_rows(variant)), "", FOOT, ""]
    distribution = list(distribution_rows(variant))
    if distribution:
        found += [f"{GAPS}:", "", markdown_table(GAPS_HEADER, iter(distribution)), ""]
    if lengths := length_notes(variant):
        found += ["**Answers of different length:**", "", *[f"- {note}" for note in lengths], ""]
    notes = cache_notes(variant)
    if notes:
        found += ["Prefix cache:", "", *[f"- {note}" for note in notes], ""]
    return found


def markdown(result: dict) -> str:
    found = [f"# {result['title']}", "", *first_lines(result), "", f"{NAMES}:", "", *glossary(result), ""]
    for variant in result["variants"]:
        found += variant_markdown(variant)
    found += ["## The run", "", *machine_lines(result), ""]
    if result["machine"]["topology"]:
        found += ["PCIe topology:", "", "```", result["machine"]["topology"], "```", ""]
    return "\n".join(found)


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } td, th { border: 1px solid #ccc; padding: 2px 8px; text-align: left }
td:not(:last-child) { white-space: nowrap } td:last-child { max-width: 28em }
code, pre { background: #f4f4f4; overflow-x: auto } img { max-width: 100% } .bad { color: #a00; font-weight: bold }
.better { color: #063 } .worse { color: #a00 }
"""


def html_table(header: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    def line(cells: tuple[str, ...], tag: str) -> str:
        kind = next((c for c in ("better", "worse") if c in cells), "")
        return f"<tr class='{kind}'>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    return "<table>" + line(header, "th") + "".join(line(cells, "td") for cells in rows) + "</table>"


def html_items(lines: list[str]) -> str:
    """Items of a Markdown list, one level; what stands in backticks is code."""
    texts = [html.escape(line.strip().removeprefix("- ")) for line in lines if line.strip()]
    return "<ul>" + "".join(f"<li>{CODE.sub(BY_CODE, text)}</li>" for text in texts) + "</ul>"


def html_page(result: dict, plots: dict[str, bytes], plot_problem: str | None) -> str:
    """One file, nothing fetched from anywhere. `plots`: {caption: PNG}."""
    parts = [
        f"<!doctype html><meta charset='utf-8'><title>{html.escape(result['title'])}</title><style>{STYLE}</style>"
    ]
    parts += [f"<h1>{html.escape(result['title'])}</h1>", html_items(first_lines(result))]
    parts += [f"<p>{NAMES}:</p>", html_items(glossary(result))]
    for variant in result["variants"]:
        parts.append(f"<h2>{html.escape(variant['name'])}</h2>")
        state = state_lines(variant)
        if state:
            parts.append("<div class='bad'>" + html_items([line.replace("**", "") for line in state]) + "</div>")
        if not variant["refused"]:
            parts.append(html_table(header(variant), table_rows(variant)))
            parts.append(f"<p>{html.escape(FOOT)}</p>")
            distribution = list(distribution_rows(variant))
            if distribution:
                parts += [f"<p>{html.escape(GAPS)}:</p>", html_table(GAPS_HEADER, iter(distribution))]
            parts.append(html_items(cache_notes(variant)))
            if lengths := length_notes(variant):
                parts.append("<p class='bad'>Answers of different length:</p>" + html_items(lengths))
        for letter, side in variant["sides"].items():
            parts.append(html_items(side_lines(letter, side)))
            who = side["identity"] or {}
            everything = json.dumps({key: who.get(key) for key in ("flags", "environment", "patch")}, indent=1)
            parts.append(
                f"<details><summary>{letter}: all flags</summary><pre>{html.escape(everything)}</pre></details>"
            )
    for caption, image in plots.items():
        data = base64.b64encode(image).decode()
        parts.append(
            f"<h3>{html.escape(caption)}</h3><img alt='{html.escape(caption)}' src='data:image/png;base64,{data}'>"
        )
    parts += ["<h2>The run</h2>", html_items(machine_lines(result))]
    if plot_problem:
        parts.append(f"<p class='bad'>{html.escape(plot_problem)}</p>")
    if result["machine"]["topology"]:
        parts.append(f"<h3>PCIe topology</h3><pre>{html.escape(result['machine']['topology'])}</pre>")
    return "\n".join(parts)
