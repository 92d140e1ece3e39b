"""What collect.py says of the stage `start` (start_stage.py)."""

from __future__ import annotations

import statistics

STOCK, OURS, FIRST, FIRST_OURS = "stock", "ours", "stock_first", "ours_first"
IMPLEMENTATIONS = {
    STOCK: "SGLang stock, kernels in their folders",
    FIRST: "SGLang stock, the call's first",
    OURS: "ours, kernels in their folders",
    FIRST_OURS: "ours, the call's first",
}
ISSUE = 23
# kinds beside each other, by cards of a server: the call's first where they start side by side, since both lack
# SGLang's kernels then
PEERS = {1: ((OURS, STOCK), (FIRST_OURS, FIRST)), 2: ((OURS, STOCK),)}
MORE_S = 5.0  # the bar: seconds from the process's start to the first token beyond stock's
PAUSE_S = 0.5  # the bar: what a shape's first time may take beyond its next ones, above what stock's does
BEYOND_WARM = "seconds to the first token beyond warm stock's, mean"
BEYOND_BESIDE = "seconds to the first token beyond stock's beside it, mean"
TOLD_S = 0.3  # pauses from which on a shape is named


def pauses(start: dict) -> dict:
    """{shape: seconds that its first time took beyond the better of the next two}"""
    return {shape: max(0.0, took[0] - min(took[1:])) for shape, took in start["served"].items()}


def rows(row, stages: list) -> list:
    """stages: `start` of each stage file."""
    return [one for stage in stages for one in stage_rows(row, stage)]


def stage_rows(row, stage: dict) -> list:
    case = "start, one card" if stage["cards"] == 1 else "start, two cards"
    starts, found = stage["starts"], []

    def add(kind, metric, value, bar=None):
        found.append(row(case, IMPLEMENTATIONS[kind], metric, value, bar, ISSUE))

    well = {kind: [s for s in starts if s["kind"] == kind and not s["problem"]] for kind in IMPLEMENTATIONS}
    for start in starts:
        add(start["kind"], "starts that broke", int(bool(start["problem"])), 0)
        if start["problem"]:
            add(start["kind"], f"broke: {start['problem'][:200]}", None)
    for kind, of in well.items():
        for start in of:
            add(kind, "seconds to the first token", start["first_token_s"])
            for what, seconds in start["parts"].items():
                add(kind, f"of these, {what}, s", seconds)
        for start in of:
            compile_rows(add, kind, start)
    if stage.get("only_starts"):
        add(OURS, BEYOND_WARM, _mean_first_token(well[OURS], well[STOCK]), MORE_S)
        return found
    for kind, peer in PEERS[stage["cards"]]:
        metric = BEYOND_BESIDE if peer == FIRST else BEYOND_WARM
        add(kind, metric, _mean_first_token(well[kind], well[peer]), MORE_S)
        most = {k: _longest_pause(well[k]) for k in (kind, peer)}
        add(kind, "longest pause of a shape's first time, s", most[kind])
        beyond = None if None in most.values() else max(0.0, most[kind] - most[peer])
        add(kind, "longest pause of a shape's first time beyond stock's, s", beyond, PAUSE_S)
        add(peer, "longest pause of a shape's first time, s", most[peer])
    add(OURS, "files that compilers wrote while servers were asked", stage["files"])
    return found


def _longest_pause(starts: list) -> float | None:
    return max((pause for start in starts for pause in pauses(start).values()), default=None)


def _mean_first_token(of: list, beyond: list) -> float | None:
    ours, others = ([start["first_token_s"] for start in starts] for starts in (of, beyond))
    return statistics.fmean(ours) - statistics.fmean(others) if ours and others else None


def compile_rows(add, kind: str, start: dict) -> None:
    """What Triton compiled of SGLang's behind the first token, and which shapes waited at their first time."""
    heard = start["compiles"]
    behind = [one for one in heard or () if one[0] > start["first_token_s"] and one[2]]
    add(kind, "kernels of SGLang's that Triton compiled while serving", None if heard is None else len(behind))
    for at, name, _, seconds in behind:
        add(kind, f"compiled while serving, {at:.0f} s from the start: {name}, {seconds:.1f} s", None)
    for shape, seconds in sorted(pauses(start).items(), key=lambda one: -one[1]):
        if seconds >= TOLD_S:
            add(kind, f"pause at the first {shape}, s", seconds)
