"""A comparison as Markdown and as one HTML page with its plots inside. Reads only what compare.py wrote as JSON."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterator

from bench.serving.cells import KINDS
from bench.serving.machine import gpu_names
from bench.serving.measures import HEADLINES, METRICS, PERCENTILES, SPECULATION, Change, Spread, percentile

FOOT = (
    "Medians over the rounds, least and greatest in brackets; `ratio` is B over A. `within noise`: the ranges touch. "
    "Ranges of equal servers stay apart by chance in 1 of 10 rows with three rounds, in 1 of 35 with four, in 1 of 126 "
    "with five; fewer than three rounds get no verdict."
)


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
    return [
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
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


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
    return ", ".join(f"{name} {state}" for name, state in sorted(who["patch"].items())) or "none (stock)"


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
        f"- {settings['rounds']} rounds, {settings['prompts']} prompts, seed {settings['seed']}, "
        f"matrix {result['matrix']}; intended change: {', '.join(result['changes'])}",
        f"- command: `{result['command']}`",
        *[f"- note: {note}" for note in result["notes"]],
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
    found += [markdown_table(("cell", "metric", "A", "B", "ratio", "verdict"), table_rows(variant)), "", FOOT, ""]
    distribution = list(distribution_rows(variant))
    if distribution:
        header = ("cell", "side", "gaps", "number", *(f"p{p}, ms" for p in PERCENTILES), "greatest, ms")
        found += [f"Inter-token latency, {KINDS['intrusion']}:", "", markdown_table(header, iter(distribution)), ""]
    notes = cache_notes(variant)
    if notes:
        found += ["Prefix cache:", "", *[f"- {note}" for note in notes], ""]
    return found


def markdown(result: dict) -> str:
    found = [f"# {result['title']}", "", *machine_lines(result), ""]
    for variant in result["variants"]:
        found += variant_markdown(variant)
    if result["machine"]["topology"]:
        found += ["PCIe topology:", "", "```", result["machine"]["topology"], "```", ""]
    return "\n".join(found)


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } td, th { border: 1px solid #ccc; padding: 2px 8px; text-align: left }
code, pre { background: #f4f4f4; overflow-x: auto } img { max-width: 100% } .bad { color: #a00; font-weight: bold }
.better { color: #063 } .worse { color: #a00 }
"""


def html_table(header: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    def line(cells: tuple[str, ...], tag: str) -> str:
        kind = next((c for c in ("better", "worse") if c in cells), "")
        return f"<tr class='{kind}'>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    return "<table>" + line(header, "th") + "".join(line(cells, "td") for cells in rows) + "</table>"


def html_items(lines: list[str]) -> str:
    return (
        "<ul>"
        + "".join(f"<li>{html.escape(line.strip().lstrip('- '))}</li>" for line in lines if line.strip())
        + "</ul>"
    )


def html_page(result: dict, plots: dict[str, bytes], plot_problem: str | None) -> str:
    """One file, nothing fetched from anywhere. `plots`: {caption: PNG}."""
    parts = [
        f"<!doctype html><meta charset='utf-8'><title>{html.escape(result['title'])}</title><style>{STYLE}</style>"
    ]
    parts += [f"<h1>{html.escape(result['title'])}</h1>", html_items(machine_lines(result))]
    for variant in result["variants"]:
        parts.append(f"<h2>{html.escape(variant['name'])}</h2>")
        for letter, side in variant["sides"].items():
            parts.append(html_items(side_lines(letter, side)))
            who = side["identity"] or {}
            everything = json.dumps({key: who.get(key) for key in ("flags", "environment", "patch")}, indent=1)
            parts.append(
                f"<details><summary>{letter}: all flags</summary><pre>{html.escape(everything)}</pre></details>"
            )
        state = state_lines(variant)
        if state:
            parts.append("<div class='bad'>" + html_items([line.replace("**", "") for line in state]) + "</div>")
        if variant["refused"]:
            continue
        parts.append(html_table(("cell", "metric", "A", "B", "ratio", "verdict"), table_rows(variant)))
        parts.append(f"<p>{html.escape(FOOT)}</p>")
        header = ("cell", "side", "gaps", "number", *(f"p{p}, ms" for p in PERCENTILES), "greatest, ms")
        distribution = list(distribution_rows(variant))
        if distribution:
            parts.append(html_table(header, iter(distribution)))
        parts.append(html_items(cache_notes(variant)))
    for caption, image in plots.items():
        data = base64.b64encode(image).decode()
        parts.append(
            f"<h3>{html.escape(caption)}</h3><img alt='{html.escape(caption)}' src='data:image/png;base64,{data}'>"
        )
    if plot_problem:
        parts.append(f"<p class='bad'>{html.escape(plot_problem)}</p>")
    if result["machine"]["topology"]:
        parts.append(f"<h3>PCIe topology</h3><pre>{html.escape(result['machine']['topology'])}</pre>")
    return "\n".join(parts)
