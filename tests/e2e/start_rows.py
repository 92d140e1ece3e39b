"""What collect.py says of the stage `start` (start_stage.py)."""

from __future__ import annotations

import statistics

STOCK, OURS, COLD, FIRST = "stock", "ours", "ours_cold", "stock_first"
IMPLEMENTATIONS = {
    STOCK: "SGLang stock, kernels in their folders",
    FIRST: "SGLang stock, the call's first",
    OURS: "ours, kernels in their folders",
    COLD: "ours, none of our kernels in Triton's folder",
}
ISSUE = 23
# cards of a server: whom one without our kernels is held against, the call's first where they start side by side, since
# both lack SGLang's own then
COLDS_PEER = {1: FIRST, 2: STOCK}
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
    for kind, peer in ((OURS, STOCK), (COLD, COLDS_PEER[stage["cards"]])):
        metric = BEYOND_BESIDE if peer == FIRST else BEYOND_WARM
        add(kind, metric, _mean_first_token(well[kind], well[peer]), MORE_S)
        most = {k: _longest_pause(well[k]) for k in (kind, peer)}
        add(kind, "longest pause of a shape's first time, s", most[kind])
        beyond = None if None in most.values() else max(0.0, most[kind] - most[peer])
        add(kind, "longest pause of a shape's first time beyond stock's, s", beyond, PAUSE_S)
    for peer in dict.fromkeys((STOCK, COLDS_PEER[stage["cards"]])):
        add(peer, "longest pause of a shape's first time, s", _longest_pause(well[peer]))
    if COLDS_PEER[stage["cards"]] != STOCK:
        add(COLD, BEYOND_WARM, _mean_first_token(well[COLD], well[STOCK]))
    add(OURS, "files that compilers wrote while servers were asked", stage["files"])
    return found


def _longest_pause(starts: list) -> float | None:
    return max((pause for start in starts for pause in pauses(start).values()), default=None)


def _mean_first_token(of: list, beyond: list) -> float | None:
    ours, others = ([start["first_token_s"] for start in starts] for starts in (of, beyond))
    return statistics.fmean(ours) - statistics.fmean(others) if ours and others else None


def compile_rows(add, kind: str, start: dict) -> None:
    """What Triton did before the first token and behind it, and which shapes waited at their first time."""
    heard, bar = start["compiles"], 0 if kind in (OURS, COLD) else None
    metric = "kernels of ours that Triton compiled while serving"
    if heard is None:
        add(kind, metric, None, bar)
    else:
        before = [one for one in heard if one[0] <= start["first_token_s"]]
        behind = [one for one in heard if one[0] > start["first_token_s"] and one[3]]
        add(kind, "kernels of ours at the start: Triton's seconds", sum(one[4] for one in before if one[2]))
        add(kind, "kernels of ours that Triton compiled at the start", sum(one[2] and one[3] for one in before))
        add(kind, metric, sum(one[2] for one in behind), bar)
        add(kind, "kernels of SGLang's that Triton compiled while serving", sum(not one[2] for one in behind))
        for at, name, is_ours, _, seconds in behind:
            of = "ours" if is_ours else "SGLang's"
            add(kind, f"compiled while serving, {at:.0f} s from the start: {name} ({of}), {seconds:.1f} s", None)
    for shape, seconds in sorted(pauses(start).items(), key=lambda one: -one[1]):
        if seconds >= TOLD_S:
            add(kind, f"pause at the first {shape}, s", seconds)
