"""Plots of a comparison, by matplotlib. Where it is missing there is a message and no plot; nothing else suffers."""

from __future__ import annotations

import importlib.util
import io

from bench.serving.machine import gpu_names
from bench.serving.report import spreads

COLORS = {"A": "#777777", "B": "#0b6e99"}
NO_MATPLOTLIB = (
    "No plots: matplotlib is not installed for this Python. After `pip install matplotlib`, "
    "`compare.py --from OUT/result.json` draws them from the result."
)
# caption -> (kind of cell, metric, what is on the x axis, its label, the y axis)
LINES = {
    "Decode rate against context": (
        "depth",
        "stream_tok_s",
        "prompt_tokens",
        "tokens of context",
        "tokens/s, one stream",
    ),
    "Throughput against concurrency": ("concurrent", "total_tok_s", "streams", "streams", "tokens/s, all streams"),
    "Time to first token of a unique prompt": ("prefill", "ttft_ms", "prompt_tokens", "tokens of prompt", "ms"),
    "Prefill rate": ("prefill", "prefill_tok_s", "prompt_tokens", "tokens of prompt", "tokens/s"),
}
LATENCY = "Inter-token latency while a long prompt is filled"


def problem() -> str | None:
    """Why there can be no plots, or None."""
    return NO_MATPLOTLIB if importlib.util.find_spec("matplotlib") is None else None


def draw(result: dict) -> dict[str, bytes]:
    """{caption: PNG} of the variants that may be compared. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    found = {}
    for variant in result["variants"]:
        if variant["refused"]:
            continue
        suffix = f" ({variant['name']})" if len(result["variants"]) > 1 else ""
        for caption, line in LINES.items():
            if figure := _line_plot(variant, *line):
                found[caption + suffix] = _png(figure, caption + suffix, result)
        if figure := _latency_plot(variant):
            found[LATENCY + suffix] = _png(figure, LATENCY + suffix, result)
    return found


def _png(figure, caption: str, result: dict) -> bytes:
    """A picture that still says what it shows when somebody posts it alone."""
    import matplotlib.pyplot as plt

    figure.suptitle(f"{caption}\n{result['title']}; {gpu_names(result['machine'])}", fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=100, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)
    return buffer.getvalue()


def _label(variant: dict, letter: str) -> str:
    return f"{letter}: {variant['sides'][letter]['label']}"


def _line_plot(variant: dict, kind: str, metric: str, axis: str, x_label: str, y_label: str):
    """The figure, None where there is nothing to draw."""
    import matplotlib.pyplot as plt

    points: dict[str, list] = {"A": [], "B": []}
    for entry in variant["cells"]:
        if entry["cell"]["kind"] == kind:
            for letter, spread in spreads(entry).get(metric, {}).items():
                points[letter].append((entry["cell"][axis], spread))
    if not any(points.values()):
        return None
    figure, axes = plt.subplots(figsize=(7, 4))
    for letter, found in points.items():
        found.sort(key=lambda point: point[0])
        if not found:
            continue
        medians = [s.median for _, s in found]
        errors = [[s.median - s.low for _, s in found], [s.high - s.median for _, s in found]]
        x = [place for place, _ in found]
        axes.errorbar(x, medians, errors, marker="o", capsize=3, color=COLORS[letter], label=_label(variant, letter))
    places = sorted({place for found in points.values() for place, _ in found})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{n // 1024}K" if n >= 1024 else str(n) for n in places])
    axes.set_ylim(bottom=0)
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _latency_plot(variant: dict):
    """The share of gaps that last longer than x: the tail is what a reader of a stream feels."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    drawn = False
    for entry in variant["cells"]:
        for letter, runs in entry["runs"].items():
            for when, style in (("during", "-"), ("otherwise", ":")):
                pool = sorted(value for run in runs for value in run.get("pools", {}).get(when, []))
                if pool:
                    drawn = True
                    share = [1 - rank / len(pool) for rank in range(len(pool))]
                    axes.step(pool, share, style, color=COLORS[letter], label=f"{_label(variant, letter)}, {when}")
    if not drawn:
        plt.close(figure)
        return None
    axes.set(xscale="log", yscale="log", xlabel="gap between tokens, ms", ylabel="share of gaps at least as long")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
