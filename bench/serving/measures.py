"""From raw request timings to figures: what each metric is, medians with spread, distributions. No means anywhere.

Times of a request (seconds): start_time, ttft (first token), latency (last token), itl (gaps between tokens; tokens
that come together, as after a verified draft, share the gap: bench_serving's convention).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.serving.answers import is_acceptance
from bench.serving.cells import Cell

PERCENTILES = (50, 90, 99)
MIN_ROUNDS = 3
MIN_EFFECT = 0.01  # a smaller difference is no news, however steady
REUSED_MIN_PROMPT_CACHED = 0.9  # a depth cell counts as reused when this share of the prompt came from the cache
UNIQUE_MAX_CACHED = 0.02  # of a unique prompt: it may share its first tokens with another,
COMMON_START_TOKENS = 16  # which is this many at most


@dataclass(frozen=True)
class Metric:
    """unit, which way is better, and what it is for a reader of the report"""

    name: str
    unit: str
    higher_is_better: bool
    words: str = ""


METRICS = {
    metric.name: metric
    for metric in (
        Metric(
            "stream_tok_s", "tok/s", True, "decode rate of one stream: tokens after its first, by the time for them"
        ),
        Metric("total_tok_s", "tok/s", True, "output tokens of all streams, from the first start to the last end"),
        Metric("itl_p50_ms", "ms", False, "time between two tokens of a stream, median"),
        Metric("itl_p99_ms", "ms", False, "time between two tokens of a stream, 99th percentile"),
        Metric("itl_max_ms", "ms", False, "time between two tokens of a stream, greatest"),
        Metric("ttft_ms", "ms", False, "time to the first token, from the request"),
        Metric("prefill_tok_s", "tok/s", True, "prompt tokens by the time to the first token, one prompt at a time"),
        Metric("fill_ttft_ms", "ms", False, "time to the first token of the request that filled the prefix cache"),
        Metric("acceptance_length", "tokens", True, "tokens of a step of speculation, as the server reports it"),
        Metric("verifier_steps_s", "steps/s", True, "steps of speculation: stream_tok_s by acceptance_length"),
    )
}
# what of a cell goes into the table, first the one that is plotted
HEADLINES = {
    "single": ("stream_tok_s", "ttft_ms", "itl_p99_ms"),
    "concurrent": ("total_tok_s", "stream_tok_s", "ttft_ms"),
    "depth": ("stream_tok_s", "itl_p50_ms", "ttft_ms", "fill_ttft_ms"),
    "prefill": ("prefill_tok_s",),
    "intrusion": ("itl_p50_ms", "itl_p99_ms", "itl_max_ms"),
}
SPECULATION = ("acceptance_length", "verifier_steps_s")


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks."""
    if not values:
        raise ValueError("percentile: no values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def problems(cell: Cell, outputs: Sequence[dict], ignore_eos: bool) -> list[str]:
    """Why these outputs are no measurement; empty if they are."""
    found = []
    failed = [output for output in outputs if not output.get("success")]
    if failed:
        error = (failed[0].get("error") or "no reason given").strip().splitlines()
        found.append(f"{len(failed)} of {len(outputs)} requests failed: {error[-1][:200] if error else ''}")
    good = [output for output in outputs if output.get("success")]
    if any(not output["ttft"] for output in good):
        found.append("a request gave no token: does the server send text? (--skip-tokenizer-init does not)")
    if ignore_eos and good:
        asked = [cell.output_tokens] * len(outputs)
        if cell.kind == "intrusion":
            asked[-1] = 1
        pairs = [(o["output_len"], count) for o, count in zip(outputs, asked, strict=True) if o.get("success")]
        short = [got for got, count in pairs if got < count]
        if short:
            found.append(
                f"{len(short)} answers are shorter than the {cell.output_tokens} tokens asked for: {short[:4]}"
            )
        if long := [got for got, count in pairs if got > count]:
            found.append(
                f"{len(long)} answers are counted longer than the {cell.output_tokens} tokens asked for: {long[:4]}; "
                "rates would be too high"
            )
    if cell.kind != "depth":
        pairs = [(o.get("cached_tokens") or 0, n) for o, n in zip(outputs, prompt_lengths(cell), strict=True)]
        hit = [cached for cached, length in pairs if cached > max(COMMON_START_TOKENS, UNIQUE_MAX_CACHED * length)]
        if hit:
            found.append(f"{len(hit)} unique prompts were partly in the prefix cache (up to {max(hit)} tokens)")
    return found


def prompt_lengths(cell: Cell) -> list[int]:
    if cell.kind == "intrusion":
        return [cell.prompt_tokens] * cell.streams + [cell.long_tokens]
    return [cell.prompt_tokens] * cell.requests


def decode_rate(output: dict) -> float | None:
    """Tokens a second after the first token, None for a single token."""
    if output["output_len"] < 2 or output["latency"] <= output["ttft"]:
        return None
    return (output["output_len"] - 1) / (output["latency"] - output["ttft"])


def token_times(output: dict) -> list[float]:
    """When each token after the first came, on the client's clock."""
    return list(itertools.accumulate(output["itl"], initial=output["start_time"] + output["ttft"]))[1:]


def split_gaps(streams: Sequence[dict], start: float, end: float) -> tuple[list[float], list[float]]:
    """(gaps that overlap [start, end], the others), seconds. A wait that a stream felt is whole, not cut at the
    border.
    """
    inside, outside = [], []
    for output in streams:
        for gap, at in zip(output["itl"], token_times(output), strict=True):
            (inside if at >= start and at - gap <= end else outside).append(gap)
    return inside, outside


def figures(cell: Cell, outputs: Sequence[dict], fill: dict | None = None) -> tuple[dict[str, float], dict[str, list]]:
    """({metric: value} of one run, {name: pooled milliseconds}). Only called where `problems` found none."""
    values: dict[str, float] = {}
    pools: dict[str, list[float]] = {}
    streams = list(outputs)
    if cell.kind == "intrusion":
        streams, late = streams[: cell.streams], streams[cell.streams]
        window = late["start_time"], late["start_time"] + late["ttft"]
        if silent := sum(output["start_time"] + output["ttft"] > late["start_time"] for output in streams):
            raise ValueError(f"the long prompt came before {silent} of {len(streams)} streams had a token")
        felt, calm = split_gaps(streams, *window)
        if not felt:
            raise ValueError("no stream was still decoding when the long prompt came; raise output_tokens")
        pools = {"during": [gap * 1e3 for gap in felt], "otherwise": [gap * 1e3 for gap in calm]}
        values["ttft_ms"] = late["ttft"] * 1e3
        gaps = pools["during"]
    else:
        gaps = [gap * 1e3 for output in streams for gap in output["itl"]]
        pools = {"itl": gaps}
        values["ttft_ms"] = statistics.median(output["ttft"] for output in streams) * 1e3
    if gaps:
        values |= {"itl_p50_ms": percentile(gaps, 50), "itl_p99_ms": percentile(gaps, 99), "itl_max_ms": max(gaps)}
    rates = [rate for output in streams if (rate := decode_rate(output)) is not None]
    if rates and cell.kind != "intrusion":
        values["stream_tok_s"] = statistics.median(rates)
    if cell.kind == "concurrent":
        begin = min(output["start_time"] for output in streams)
        end = max(output["start_time"] + output["latency"] for output in streams)
        values["total_tok_s"] = sum(output["output_len"] for output in streams) / (end - begin)
    if cell.kind == "prefill":
        values["prefill_tok_s"] = cell.prompt_tokens / statistics.median(output["ttft"] for output in streams)
    if fill is not None:
        values["fill_ttft_ms"] = fill["ttft"] * 1e3
    told = [output.get("spec_accept_length") for output in streams]
    lengths = [length for length in told if is_acceptance(length)]
    if lengths and "stream_tok_s" in values:
        values["acceptance_length"] = statistics.median(lengths)
        values["verifier_steps_s"] = values["stream_tok_s"] / values["acceptance_length"]
    return values, pools


def cached_share(outputs: Sequence[dict], prompt_tokens: int) -> float | None:
    """The share of the prompts' tokens that came from the prefix cache, median over the requests; None: not told."""
    if any("cached_tokens" not in output for output in outputs):
        return None
    return statistics.median((output.get("cached_tokens") or 0) / prompt_tokens for output in outputs)


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest over the rounds of one side."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), len(values))


@dataclass(frozen=True)
class Change:
    """B against A. `better` and `worse` only when the ranges do not touch and the medians differ by MIN_EFFECT."""

    ratio: float
    verdict: str

    @classmethod
    def of(cls, metric: Metric, a: Spread, b: Spread) -> Change:
        ratio = b.median / a.median if a.median else float("inf")
        if min(a.rounds, b.rounds) < MIN_ROUNDS:
            return cls(ratio, "too few rounds")
        if a.low <= b.high and b.low <= a.high:
            return cls(ratio, "within noise")
        if abs(ratio - 1) < MIN_EFFECT:
            return cls(ratio, f"within {MIN_EFFECT:.0%}")
        return cls(ratio, "better" if (b.median > a.median) == metric.higher_is_better else "worse")
