#!/usr/bin/env python3
"""The critical path of a decode step: what every kernel and every gap on it waits for, from traces of torch's profiler.

    python3 bench/timeline.py TRACE.json.gz [TRACE.json.gz ...] [--clock] [--out FILE]

One trace a rank. A step lies between the ends of two kernels that --end names (the sampler's argmax). The path is
walked back from its last end to the step before. A kernel that began before its predecessor on the same stream had
ended was launched programmatically and waits for it; any other waits for the latest end before its own begin, on
whatever stream ("joins" where that is another stream's). What a kernel adds is the time from there to its own end, less
the gap between the two; gaps and additions are the step, whole. A kernel that is off the path adds nothing, however
long it runs.

Sums between cards (--sum): with several ranks, the rank whose n-th sum is the shortest waited for nobody, so that is
the exchange itself, and what others take longer is skew, which a faster exchange does not shorten.

The host, where the trace has its CUDA calls: how often and how long by name, and how long the card waited for it: stood
idle until the call had ended that launched what came next. Tracing makes calls longer than they are without.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import statistics
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

END = r"ArgMaxOps"
SUM = r"nccl\w*All|all_reduce::|mhc::summing|cross_device_reduce"
PROGRAMMATIC, LAUNCH, JOIN = "programmatic", "launch", "joins"
KINDS, CALLS = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")
WIDTH = 64  # characters of a kernel's name


@dataclass(frozen=True)
class Kernel:
    """Of the card, or a call of the host's. begin, end: us. stream (of a call its thread), launched_by: None where the
    profiler does not say; the latter is a number that a kernel and the call that launched it share."""

    name: str
    stream: object
    begin: float
    end: float
    launched_by: object = None


@dataclass(frozen=True)
class Link:
    """One kernel of the path. us: `gap` between the end of what it waited for and its begin, `adds` from there."""

    kernel: Kernel
    waits_for: str
    how: str
    gap: float
    adds: float


def short(name: str) -> str:
    """A kernel's name without its return type, namespaces and arguments."""
    name = re.sub(r"^(void|__global__) ", "", name)
    name = re.sub(r"\(anonymous namespace\)::", "", name)
    head = re.match(r"(?:\w+::)*([^(]*)", name)
    return (head[1] if head and head[1] else name)[:WIDTH]


def kernels_of(trace: dict | list) -> list[Kernel]:
    """What ran on the GPU, by its begin. ValueError: there is nothing."""
    found = _found(trace, KINDS)
    if not found:
        raise ValueError("it holds no kernel; was the profiler started with activities GPU?")
    return found


def calls_of(trace: dict | list) -> list[Kernel]:
    """The host's CUDA calls, by their begin; none where the profiler did not look. ValueError: it is no trace."""
    return _found(trace, CALLS)


def _found(trace: dict | list, kinds: Sequence[str]) -> list[Kernel]:
    events = trace if isinstance(trace, list) else trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise ValueError("it is no trace of torch's profiler: no list of traceEvents")
    try:
        found = [
            Kernel(
                *(one["name"], one.get("tid"), float(one["ts"]), float(one["ts"]) + float(one["dur"])),
                (one.get("args") or {}).get("correlation"),
            )
            for one in events
            if one.get("cat") in kinds and "dur" in one
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"it is no trace of torch's profiler: {type(error).__name__}: {error}") from error
    return sorted(found, key=lambda kernel: (kernel.begin, kernel.end))


def steps_of(kernels: Sequence[Kernel], end: str, skip: int) -> list[list[Kernel]]:
    """Of each step the kernel that ended the one before, then its own; without the first `skip` steps."""
    ends = [place for place, kernel in enumerate(kernels) if re.search(end, kernel.name)]
    found = [list(kernels[a : b + 1]) for a, b in zip(ends, ends[1:], strict=False)][skip:]
    if not found:
        raise ValueError(f"no whole step behind the first {skip}: {len(ends)} kernels match --end {end!r}")
    return found


def critical_path(step: Sequence[Kernel]) -> list[Link]:
    """From the end of the step before, whose last kernel is step[0], to the last end of this one."""
    origin = step[0]
    own = sorted((one for one in step[1:] if one.end > origin.end), key=lambda kernel: (kernel.end, kernel.begin))
    order = {id(one): place for place, one in enumerate(own)}
    now, path = own[-1], []
    while now is not origin:
        same = [one for one in (origin, *own) if one.stream == now.stream and one.begin < now.begin]
        before = max(same, key=lambda one: one.begin, default=None)
        if before is None or not now.begin < before.end <= now.end:
            # older profilers round to us: of two that took none at one instant, each ended when the other began
            ended = [one for one in own[: order[id(now)]] if one.end <= now.begin]
            ties = [one for one in ended if one.end == ended[-1].end]
            before = next((one for one in ties if one.stream == now.stream), ties[-1] if ties else origin)
        early = before.end > now.begin
        how = PROGRAMMATIC if early else LAUNCH if before.stream == now.stream else JOIN
        start = max(now.begin, before.end)
        path.append(Link(now, before.name, how, start - min(start, before.end), now.end - start))
        now = before
    return path[::-1]


def table(paths: Sequence[Sequence[Link]]) -> list[dict]:
    """The paths' links by kernel and by what it waited for, the most time first; times are us a step."""
    sums: dict[tuple, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for path in paths:
        for link in path:
            row = sums[short(link.kernel.name), short(link.waits_for), link.how]
            row[0] += 1
            row[1] += link.gap
            row[2] += link.adds
    steps = len(paths)
    rows = [
        {
            "kernel": kernel,
            "waits_for": waits,
            "how": how,
            "a_step": n / steps,
            "gap_us": gap / steps,
            "adds_us": us / steps,
        }
        for (kernel, waits, how), (n, gap, us) in sums.items()
    ]
    return sorted(rows, key=lambda row: -(row["gap_us"] + row["adds_us"]))


def off_path(steps: Sequence[Sequence[Kernel]], paths: Sequence[Sequence[Link]]) -> list[dict]:
    """Kernels that ran beside the path: us a step that they were busy and that nobody waited for."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for step, path in zip(steps, paths, strict=True):
        on = {id(link.kernel) for link in path}
        for kernel in step:
            if id(kernel) not in on and kernel is not step[0]:
                sums[short(kernel.name)][0] += 1
                sums[short(kernel.name)][1] += kernel.end - kernel.begin
    rows = [{"kernel": name, "a_step": n / len(steps), "busy_us": us / len(steps)} for name, (n, us) in sums.items()]
    return sorted(rows, key=lambda row: -row["busy_us"])


def sums_of_ranks(ranks: Sequence[Sequence[Sequence[Kernel]]], pattern: str) -> dict | None:
    """{sums a step, exchange_us: the shortest rank's, skew_us: [each rank's above it]}, us a step, means; None without
    any. ranks[r][s]: kernels of step s. ValueError: the ranks do not have the same sums.
    """
    found = [[[one for one in step[1:] if re.search(pattern, one.name)] for step in steps] for steps in ranks]
    steps = min(len(one) for one in found)
    found = [one[len(one) - steps :] for one in found]  # the ranks' traces end together
    counts = {tuple(len(step) for step in one) for one in found}
    if len(counts) > 1:
        raise ValueError(f"the ranks' steps do not have the same number of sums that match {pattern!r}")
    if not any(map(sum, counts)):
        return None
    exchange, skew = 0.0, [0.0] * len(ranks)
    for step in range(steps):
        for same in zip(*(one[step] for one in found), strict=True):
            took = [one.end - one.begin for one in same]
            exchange += min(took)
            for rank, us in enumerate(took):
                skew[rank] += us - min(took)
    number = sum(len(step) for step in found[0])
    return {
        "sums_a_step": number / steps,
        "exchange_us": exchange / steps,
        "skew_us": [us / steps for us in skew],
    }


def host(steps: Sequence[Sequence[Kernel]], calls: Sequence[Kernel]) -> dict | None:
    """{calls: [{call, a_step, us}]: means; late_us: {median, greatest}}, us a step; None without any call. late_us: in
    which the card was idle until the call had ended that launched its next kernel."""
    if not calls:
        return None
    begin, end = steps[0][0].end, max(one.end for one in steps[-1])
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for call in calls:
        if begin <= call.end <= end:
            sums[call.name][0] += 1
            sums[call.name][1] += call.end - call.begin
    rows = [{"call": name, "a_step": n / len(steps), "us": us / len(steps)} for name, (n, us) in sums.items()]
    by_number = {call.launched_by: call for call in calls if call.launched_by is not None}
    late = []
    for origin, *own in steps:
        latest, waited = origin.end, 0.0
        for one in own:
            launched = by_number[one.launched_by].end if one.launched_by in by_number else latest
            waited += max(0.0, min(one.begin, launched) - latest)
            latest = max(latest, one.end)
        late.append(waited)
    calls_by_us = sorted(rows, key=lambda row: -row["us"])
    return {"calls": calls_by_us, "late_us": {"median": statistics.median(late), "greatest": max(late)}}


def length_of(path: Sequence[Link]) -> float:
    return sum(link.gap + link.adds for link in path)


def report(ranks: Sequence[Sequence[Sequence[Kernel]]], pattern: str, calls: Sequence[Kernel] = ()) -> dict:
    """calls: the host's of the first rank."""
    steps = ranks[0]
    paths = [critical_path(step) for step in steps]
    lengths = list(map(length_of, paths))
    return {
        "steps": len(steps),
        "step_us": {"median": statistics.median(lengths), "least": min(lengths), "greatest": max(lengths)},
        "kernels_a_step": sum(map(len, steps)) / len(steps) - 1,
        "on_the_path_a_step": sum(map(len, paths)) / len(paths),
        "gaps_us": sum(link.gap for path in paths for link in path) / len(paths),
        "path": table(paths),
        "off_the_path": off_path(steps, paths),
        "sums": sums_of_ranks(ranks, pattern) if len(ranks) > 1 else None,
        "host": host(steps, calls),
    }


def clock(path: Sequence[Link]) -> list[str]:
    """One step's path, in order: when each kernel begins and what it adds."""
    start = path[0].kernel.begin - path[0].gap
    return [
        f"{link.kernel.begin - start:9.1f}  gap {link.gap:6.1f}  adds {link.adds:6.1f}  {link.how:12}  "
        f"{short(link.kernel.name)}"
        for link in path
    ]


def text(found: dict, rows: int) -> list[str]:
    step = found["step_us"]
    lines = [
        f"{found['steps']} steps of {step['median']:.1f} us ({step['least']:.1f} to {step['greatest']:.1f}); "
        f"{found['kernels_a_step']:.0f} kernels a step, {found['on_the_path_a_step']:.0f} on the critical path; "
        f"gaps {found['gaps_us']:.1f} us a step",
        "   gap us   adds us   a step  how           kernel  <- what it waits for",
    ]
    for row in found["path"][:rows]:
        times = f"{row['gap_us']:9.1f} {row['adds_us']:9.1f} {row['a_step']:8.1f}"
        lines.append(f"{times}  {row['how']:12}  {row['kernel']}  <- {row['waits_for']}")
    lines.append("beside the path, busy us a step:")
    lines += [f"{row['busy_us']:9.1f} {row['a_step']:8.1f}  {row['kernel']}" for row in found["off_the_path"][:rows]]
    if found["sums"]:
        sums = found["sums"]
        skew = ", ".join(f"rank {rank} {us:.1f}" for rank, us in enumerate(sums["skew_us"]))
        lines.append(
            f"{sums['sums_a_step']:.0f} sums between cards a step: {sums['exchange_us']:.1f} us the exchange itself; "
            f"beyond it, waiting for other ranks: {skew}"
        )
    if found["host"]:
        lines.append("the host's CUDA calls, us a step:")
        lines += [f"{row['us']:9.1f} {row['a_step']:8.1f}  {row['call']}" for row in found["host"]["calls"][:rows]]
        late = found["host"]["late_us"]
        lines.append(f"the card waits for the host {late['median']:.1f} us a step (greatest {late['greatest']:.1f})")
    return lines


def load(path: Path, end: str, skip: int) -> tuple[list[list[Kernel]], list[Kernel]]:
    """A rank's steps and its host's calls. ValueError, with the file's name: it cannot be read, or has no steps."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
            trace = json.load(file)
        return steps_of(kernels_of(trace), end, skip), calls_of(trace)
    except OSError as problem:
        raise ValueError(f"{path}: {problem.strerror or problem}") from problem
    except (ValueError, EOFError, zlib.error) as problem:
        raise ValueError(f"{path}: {problem}") from problem


def regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error
    return text


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return int(text)

    return number


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "traces", type=Path, nargs="+", metavar="TRACE", help="of one rank each; the path is the first's"
    )
    parser.add_argument(
        "--end", type=regex, default=END, metavar="REGEX", help=f"kernel that ends a step (default {END})"
    )
    of_sums = f"kernels of sums between cards (default {SUM})"
    parser.add_argument("--sum", type=regex, default=SUM, metavar="REGEX", help=of_sums)
    parser.add_argument("--skip", type=at_least(0), default=5, metavar="STEPS", help="first steps left out (default 5)")
    parser.add_argument("--rows", type=at_least(1), default=40, help="greatest rows shown (default 40)")
    parser.add_argument("--clock", action="store_true", help="also the path of the step of median length, in order")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the figures as JSON")
    options = parser.parse_args(argv)
    try:
        ranks, calls = zip(*(load(path, options.end, options.skip) for path in options.traces), strict=True)
        found = report(ranks, options.sum, calls[0])
    except ValueError as problem:
        print(f"timeline: {problem}", file=sys.stderr)
        return 2
    print("\n".join(text(found, options.rows)))
    if options.clock:
        middle = sorted(map(critical_path, ranks[0]), key=length_of)
        print("\n".join(clock(middle[len(middle) // 2])))
    if options.out:
        try:
            options.out.write_text(json.dumps(found, indent=1) + "\n")
        except OSError as problem:
            print(f"timeline: --out {options.out}: {problem.strerror}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
