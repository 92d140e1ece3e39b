"""What collect.py says of the stage `soak` (soak_stage.py), summed over its calls.

A series (memory, a second apart, in blocks) has a slope an hour with its standard error. What grows without end grows
in both halves of a load, so it is judged by what is sure of it in each: the slope less two errors, the lesser of the
two; one step up is in one half. Throughput is judged alike: the last tenth against the first, less two errors, by how
much tenths stray about their line. What an hour would show and two minutes cannot is said by the errors.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter

STOCK = "stock"  # a peer: without bars
GRAPHS = "graphs"  # of prompts
IMPLEMENTATIONS = {
    "plain": "ours, as shipped",
    "reproducible": "ours, reproducible",
    "eagle314": "ours, reproducible, EAGLE 3/1/4",
    "eagle": "ours, as shipped, EAGLE 3/1/4",
    "tp2": "ours, reproducible, two cards",
    GRAPHS: "ours, reproducible, prefill graphs",
    "dspark3": "ours, reproducible, DSPARK with a block of 3",
    STOCK: "SGLang stock",
}
ISSUE = 23
SURE = 2.0  # standard errors
TENTHS = 10
HOST = "host memory"  # of all processes; "host memory of ROLE": of those
# of a card: by the driver; by torch's allocators of the schedulers, what they gave out and what they hold; the rest, in
# which CUDA's own, loaded kernels, NCCL's buffers and what we allocate past torch are
DRIVERS, ALLOCATED, RESERVED = "memory of the card", "allocated by torch", "reserved by torch"
BESIDE = "memory of the card beside torch's"
SLOPE_BARS = {HOST: 100.0, DRIVERS: 100.0, BESIDE: 100.0}  # MiB an hour of which one is sure
LOSS_BAR = 2.0  # per cent of throughput
# with nothing running, after the load more than before it: what a client's leftovers may be
MORE_BARS = {"file handles": 8, "threads": 8, "processes": 0, "entries in /dev/shm": 0, "KV tokens in use": 0}
MORE_BARS |= {"streams with words": 0, "words given to captures": 0, "entries of caches without limit": 0}
MORE_BARS |= {"entries of our modules' lists, sets, dicts": 0, "memory of torch's allocator, MiB": 64}
REPORTED = ("host memory, MiB", "entries of caches with a limit", "passes in halves")
FIRST_FAULTS = 5
HOURS = "hours under load"
OF_CARDS = "soak, card "  # how their cases begin


def line(points: list) -> tuple[float, float]:
    """(slope, its standard error) by least squares; of fewer than three points nothing is known."""
    if len(points) < 3:
        return 0.0, math.inf
    middle, mean = statistics.fmean(t for t, _ in points), statistics.fmean(v for _, v in points)
    spread = sum((t - middle) ** 2 for t, _ in points)
    slope = sum((t - middle) * (v - mean) for t, v in points) / spread
    left = sum((v - mean - slope * (t - middle)) ** 2 for t, v in points)
    return slope, math.sqrt(left / (len(points) - 2) / spread)


def pooled(found: list) -> tuple[float, float]:
    """The mean of (value, error) by their weights; an exact one beside others has an error of nearly nothing."""
    weights = [1 / max(error, 1e-9) ** 2 for _, error in found]
    if not sum(weights):
        return 0.0, math.inf
    total = sum(weights)
    return sum(w * value for w, (value, _) in zip(weights, found, strict=True)) / total, 1 / math.sqrt(total)


def an_hour(points: list) -> tuple[float, float]:
    slope, error = line(points)
    return 3600 * slope, 3600 * error


def slope_rows(add, what: str, calls: list) -> None:
    """calls: a series each, [[seconds, value]]."""
    slope, error = pooled([an_hour(points) for points in calls])
    halves = [[an_hour(p[: len(p) // 2]) for p in calls], [an_hour(p[len(p) // 2 :]) for p in calls]]
    sure = max(0.0, min(value - SURE * off for value, off in map(pooled, halves)))
    is_known = all(math.isfinite(off) for half in halves for _, off in half)  # of each call: else nobody looked there
    add(f"{what}, MiB an hour", slope if is_known else None)
    add(f"{what}, standard error, MiB an hour", error if is_known else None)
    add(f"{what}, MiB an hour of which one is sure", sure if is_known else None, SLOPE_BARS.get(what))


def added(calls: list, signs: tuple = ()) -> list:
    """Series of the same blocks of time as one, where all have a value. signs: 1 or -1 each; none: all are added."""
    values = [dict(points) for points in calls]
    times = [t for t, _ in calls[0] if all(t in of for of in values)] if calls else []
    return [[t, sum(sign * of[t] for sign, of in zip(signs or [1] * len(values), values, strict=True))] for t in times]


def tenths(buckets: list) -> list:
    size = len(buckets) / TENTHS
    edges = [round(i * size) for i in range(TENTHS + 1)]
    return [statistics.fmean(buckets[a:b]) for a, b in zip(edges, edges[1:], strict=False) if b > a]


def change(buckets: list) -> tuple[float, float]:
    """(last tenth against the first, its standard error), per cent of the first; tenths stray about their line."""
    means = tenths(buckets)
    if len(means) < TENTHS or means[0] <= 0:
        return 0.0, math.inf
    points = list(enumerate(means))
    slope, _ = line(points)
    middle = statistics.fmean(means)
    left = [v - middle - slope * (i - (TENTHS - 1) / 2) for i, v in points]
    error = math.sqrt(2 * sum(x * x for x in left) / (TENTHS - 2))
    return 100 * (means[-1] / means[0] - 1), 100 * error / means[0]


def throughput_rows(add, calls: list) -> None:
    changes, seconds = [change(buckets) for buckets in calls], sum(map(len, calls))
    (value, error), is_known = pooled(changes), all(math.isfinite(off) for _, off in changes)
    add("tokens/s", sum(map(sum, calls)) / seconds if seconds else None)
    add("tokens/s, last tenth against the first, %", value if is_known else None)
    add("tokens/s, last tenth against the first, standard error, %", error if is_known else None)
    sure = max(0.0, -value - SURE * error)
    add("tokens/s, loss of which one is sure, %", sure if is_known else None, LOSS_BAR)


def more(calls: list, what: str) -> float | None:
    """The most that a call has after its load more than before it; None: a call does not say."""
    pairs = [(call["idle"].get("before", {}).get(what), call["idle"].get("after", {}).get(what)) for call in calls]
    return None if any(None in pair for pair in pairs) else max(after - before for before, after in pairs)


def server_rows(row, name: str, calls: list) -> list:
    """calls: what each soak_stage has of this server."""
    rows, ours = [], name != STOCK

    def add(metric, value, bar=None):
        rows.append(row(f"soak, {name}", IMPLEMENTATIONS[name], metric, value, bar if ours else None, ISSUE))

    problems = [call["problem"] for call in calls if call["problem"]]
    add("calls that broke", len(problems), 0)
    for problem in problems[:FIRST_FAULTS]:
        add(f"broke: {problem[:200]}", None)
    calls = [call for call in calls if "load" in call]
    if not calls:
        return rows
    loads = [call["load"] for call in calls]
    add(HOURS, sum(load["seconds"] for load in loads) / 3600)
    counts = sum((Counter(load["counts"]) for load in loads), Counter())
    add("requests", sum(counts.values()))
    for kind, count in sorted(counts.items()):
        add(f"requests, {kind}", count)
    add("output tokens", sum(load["output_tokens"] for load in loads))
    add("prompt tokens", sum(load["prompt_tokens"] for load in loads))
    add("ran at once, at most", max((load["ran_at_once"] or 0 for load in loads), default=None))
    left_out = {kind: why for call in calls for kind, why in call["left_out"].items()}
    for kind, why in left_out.items():
        add(f"not shown: {kind}: {why[:200]}", None)
    wanted = {kind for load in loads for kind in load["kinds"]} - set(left_out)
    add("kinds of requests of which none went well", len({k for k in wanted if not counts[k]}), 0)
    add("prompt tokens from the prefix cache", sum(load["cached_tokens"] for load in loads))
    ended = sum((Counter(load["ended"]) for load in loads), Counter())
    for how, count in sorted(ended.items()):
        add(f"ended: {how}", count)
    faults = [text for load in loads for text in load["faults"]]
    add("faults", len(faults), 0)
    for text in faults[:FIRST_FAULTS]:
        add(f"fault: {text[:200]}", None)
    add("times that it did not come to rest", sum(call["stuck"] for call in calls), 0)
    marker_rows(add, calls)
    each = (call["series"] for call in calls)
    for what in [HOST, *sorted({what for series in each for what in series} - {HOST})]:
        told = [call["series"][what] for call in calls if what in call["series"]]
        slope_rows(add, what, [call["series"].get(what, []) for call in calls] if what == HOST else told)
    throughput_rows(add, [load["buckets"] for load in loads])
    for what, bar in {**MORE_BARS, **dict.fromkeys(REPORTED)}.items():
        add(f"{what}, after less before", more(calls, what), bar)
    if name == GRAPHS:
        passes = [call["prefills"]["true"] for call in calls]
        add("prefill passes in graphs", sum(passes))
        add("calls without a prefill pass in graphs", passes.count(0), 0)
    compile_rows(add, calls)
    return rows


def marker_rows(add, calls: list) -> None:
    markers = [call["markers"] for call in calls]
    add("marker answers, alone, before and after", sum(one["alone"] for one in markers))
    add("marker answers, alone, that differ", *none_of(markers, "alone", "alone_differ"))
    if len(markers) > 1:
        differ = differ_between([one["digest"] for one in markers])
        add("marker answers, alone, that differ from another call's", differ, 0)
    if any(one["is_asked_under_load"] for one in markers):
        add("marker answers under load", sum(one["under_load"] for one in markers))
        add("marker answers under load that differ", *none_of(markers, "under_load", "under_load_differ"))
    for text in [text for one in markers for text in one["texts"]][:FIRST_FAULTS]:
        add(f"marker that differs: {text[:200]}", None)


def none_of(markers: list, asked: str, differ: str) -> tuple:
    """(how many differ, the bar): of none that was asked, none differs."""
    return sum(one[differ] for one in markers) if all(one[asked] for one in markers) else None, 0


def differ_between(digests: list) -> int:
    return sum(digest != digests[0] for digest in digests if digest)


def compile_rows(add, calls: list) -> None:
    """compiles: [seconds into the load, name, did it compile, seconds]; None: nobody listened."""
    heard = [call["compiles"] for call in calls]
    add("calls in which nobody listened to Triton", sum(found is None for found in heard), 0)
    if None in heard:
        return
    every = [one for found in heard for one in found]
    for what, chosen in (
        ("kernels of SGLang's that Triton compiled under load", [c for c in every if c[2]]),
        ("kernels of SGLang's that Triton loaded under load", [c for c in every if not c[2]]),
    ):
        add(what, len(chosen), None)
        names = Counter(one[1] for one in chosen if one[2])
        for name, number in names.most_common(FIRST_FAULTS):
            first = min(one[0] for one in chosen if one[1] == name)
            add(f"compiled under load: {name}, {number} times, first at {first:.0f} s", None)


def card_rows(row, cards: dict) -> list:
    """{(card, does stock have a server there): {what of it is known: a series of each call}}"""
    rows = []
    for (card, has_stock), known in sorted(cards.items()):
        case, impl = f"{OF_CARDS}{card}, all servers", "all servers of a call" + ", stock's too" * has_stock

        def add(metric, value, bar=None, case=case, impl=impl, judged=not has_stock):
            rows.append(row(case, impl, metric, value, bar if judged else None, ISSUE))

        for what, calls in known.items():
            slope_rows(add, what, calls)
            rises = [points[-1][1] - points[0][1] for points in calls if points]
            add(f"{what}, end less beginning, MiB", max(rises, default=None))
    return rows


def of_card(card: str, soak: dict) -> dict:
    """{what is known of a card: its series}; of a call that did not ask torch the driver's alone."""
    found = {DRIVERS: soak["cards"].get(card, [])}
    if "allocators" in soak:
        of_torch = soak["allocators"].get(card, {})
        found |= {what: of_torch.get(what, []) for what in (ALLOCATED, RESERVED)}
        found[BESIDE] = added([found[DRIVERS], found[RESERVED]], (1, -1))
    return found


def rows(row, soaks: list) -> list:
    """soaks: `soak` of each stage file."""
    names = list(dict.fromkeys(name for soak in soaks for name in soak["servers"]))
    found = [one for n in names for one in server_rows(row, n, [s["servers"][n] for s in soaks if n in s["servers"]])]
    cards: dict = {}
    for soak in soaks:
        for card in soak["cards"]:
            for what, series in of_card(card, soak).items():
                cards.setdefault((card, STOCK in soak["servers"]), {}).setdefault(what, []).append(series)
    if soaks and not cards:
        cards = {("unknown", False): {DRIVERS: [[]]}}  # nobody looked: a bar that is missed
    return found + card_rows(row, cards)


def beside_longer(old: list, fresh: list) -> list:
    """Of `fresh`, a later call's rows, those that take the place of `old`'s or stand beside them: a server's stay that
    was under load for longer before, the cards' where any was. A short call's slopes have such errors that no bar is
    missed by them; a bar that it misses all the same stands until a load that is no shorter, and so do its words."""
    before, now = ({r["case"]: r["value"] for r in rows if r["metric"] == HOURS} for rows in (old, fresh))
    stay = {case for case, hours in now.items() if hours < before.get(case, 0)}
    if max(now.values(), default=0) < max(before.values(), default=0):
        stay |= {r["case"] for r in fresh if r["case"].startswith(OF_CARDS)}
    for case in sorted(stay):
        print(f"collect: {case}: a load before was longer, its rows stay")
    is_told = {r["case"] for r in fresh if r["met"] is False}
    return [r for r in fresh if r["case"] not in stay or r["met"] is False or _is_word(r) and r["case"] in is_told]


def _is_word(row: dict) -> bool:
    return row["metric"].startswith(("fault: ", "broke: ", "marker that differs: "))
