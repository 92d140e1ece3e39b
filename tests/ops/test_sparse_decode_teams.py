"""The teams of the kernel for few rows, in every order in which their barriers let them run.

What each team does to the barriers is read from its source, in the order in which it stands there, and so are the
sizes of the rings and buffers: the model is of the code as it is. Two warps stand for the value team, one for each
other team. Checked is that a warp folds every unit by that unit's factors, and that nobody waits for ever.
"""

import re
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parent.parent.parent / "csrc/sparse_decode"
BARRIERS = ("full", "free", "scored", "scores_read", "weighed", "folded")
STAGED = ("full", "free")  # one a stage; the others one a buffer
TEAMS = {
    "gather": ("gather.cuh", "struct Gatherer", "fill(leaf, current, stage)"),
    "score": ("score.cuh", "void run_score_team", None),
    "softmax": ("softmax.cuh", "void run_softmax_team", None),
    "value": ("value.cuh", "void run_value_team", None),
}
WARPS = ("gather", "score", "softmax", "value", "value")
ARRIVALS = {"full": 1, "free": 3, "scored": 1, "scores_read": 1, "weighed": 1, "folded": 2}
STEP = re.compile(
    r"\bbarriers\.(\w+)\((?:[^()]|\(\))*\)\.(wait|arrive)\("
    r"|(fold_unit_stats|fold_vectors|unit_sync|unit_factors)\b(?=\()"
)


def constant(name: str) -> int:
    text = (SOURCES / "config.h").read_text()
    if found := re.search(rf"constexpr int {name} = (\d+);", text):
        return int(found[1])
    raise AssertionError(f"config.h has no {name}")


def factor_buffers() -> int:
    """How many units' factors there is room for: the first dimension, where there are two."""
    dimensions = re.search(r"float2 unit_factors((?:\[\w+\])+);", (SOURCES / "config.h").read_text())[1]
    names = re.findall(r"\[(\w+)\]", dimensions)
    return constant(names[0]) if len(names) == 2 else 1


def program(team: str) -> tuple[list[tuple[str, str]], list[str]]:
    """What a warp of the team does for a leaf, and at the end of a unit, as its source has it."""
    name, begin, _ = TEAMS[team]
    text = re.sub(r"//.*", "", (SOURCES / name).read_text())
    body = text[text.index(begin) :]
    leaf, unit = [], []
    for found in STEP.finditer(body):
        if found[1]:
            leaf.append((found[2], found[1]))
        else:
            unit.append(found[3])
    if team == "gather":  # fill() stands before run(), which calls it behind its wait
        assert body.index("barriers.free(stage).wait(") < body.index(TEAMS[team][2])
        leaf = [("wait", "free"), ("arrive", "full")]
    return leaf, unit


def steps(team: str, units: list[int]) -> list[tuple]:
    """A warp's whole run: ("wait" or "arrive", barrier, leaf), ("sync", unit), ("write" or "read", unit)."""
    leaf_steps, unit_steps = program(team)
    named = {"fold_unit_stats": "write", "fold_vectors": "read", "unit_sync": "sync"}
    run, leaf = [], 0
    for unit, leaves in enumerate(units):
        for _ in range(leaves):
            run += [(what, barrier, leaf) for what, barrier in leaf_steps]
            leaf += 1
        for what in unit_steps:
            if named[what] == "read" and unit == 0:
                continue  # the first unit is folded into nothing
            run.append((named[what], unit))
    return run


class Block:
    """All that runs; a state is each warp's place in its steps and, by buffer, the unit whose factors are there."""

    def __init__(self, units: list[int], buffers: int):
        self.rings = {b: constant("kStages") if b in STAGED else constant("kBuffers") for b in BARRIERS}
        self.runs = [steps(team, units) for team in WARPS]
        self.buffers = buffers
        # by warp: arrivals at each barrier and leaf before each place, as places of those arrivals
        self.arrivals: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for warp, run in enumerate(self.runs):
            for place, step in enumerate(run):
                if step[0] == "arrive":
                    self.arrivals.setdefault(step[1:], []).append((warp, place))
        self.syncs = {
            (warp, step[1]): place
            for warp, run in enumerate(self.runs)
            for place, step in enumerate(run)
            if step[0] == "sync"
        }
        for (barrier, _), who in self.arrivals.items():
            assert len(who) == ARRIVALS[barrier], (barrier, who)

    def may_go(self, places: tuple[int, ...], warp: int) -> bool:
        step = self.runs[warp][places[warp]]
        if step[0] == "wait":
            _, barrier, leaf = step
            awaited = leaf - self.rings[barrier] if barrier in ("free", "scores_read", "folded") else leaf
            return awaited < 0 or all(places[w] > at for w, at in self.arrivals[barrier, awaited])
        if step[0] == "sync":  # all that come to it have come
            return all(places[w] >= at for (w, unit), at in self.syncs.items() if unit == step[1])
        return True

    def wrong_reads(self) -> set[tuple[int, int]]:
        """(unit whose factors were wanted, unit whose factors were there) in any order of steps."""
        start = ((0,) * len(WARPS), (None,) * self.buffers)
        seen, pending, wrong = {start}, [start], set()
        while pending:
            places, factors = pending.pop()
            moved = False
            for warp, run in enumerate(self.runs):
                if places[warp] == len(run) or not self.may_go(places, warp):
                    continue
                moved = True
                step, after = run[places[warp]], factors
                if step[0] == "write":
                    at = step[1] % self.buffers
                    after = (*factors[:at], step[1], *factors[at + 1 :])
                elif step[0] == "read" and factors[step[1] % self.buffers] != step[1]:
                    wrong.add((step[1], factors[step[1] % self.buffers]))
                state = ((*places[:warp], places[warp] + 1, *places[warp + 1 :]), after)
                if state not in seen:
                    seen.add(state)
                    pending.append(state)
            assert moved or all(p == len(r) for p, r in zip(places, self.runs, strict=True)), f"all wait at {places}"
        return wrong


def test_steps_are_those_of_the_sources():
    assert program("score")[0] == [
        ("wait", "full"),
        ("wait", "scores_read"),
        ("arrive", "scored"),
        ("arrive", "free"),
    ]
    assert program("softmax") == (
        [("wait", "scored"), ("arrive", "scores_read"), ("wait", "folded"), ("arrive", "weighed")],
        ["fold_unit_stats", "unit_sync"],
    )
    assert program("value") == (
        [("wait", "full"), ("arrive", "free"), ("wait", "weighed"), ("arrive", "folded")],
        ["unit_sync", "fold_vectors"],
    )


@pytest.mark.parametrize("last", range(1, 5))
def test_a_unit_is_folded_by_its_own_factors(last):
    """Units of four leaves are longer than every ring, so they show what those of eight do, in fewer states."""
    assert max(constant("kStages"), constant("kBuffers")) < 4 <= 1 << constant("kMinLongUnitLog2")
    assert Block([4, 4, last], factor_buffers()).wrong_reads() == set()


@pytest.mark.parametrize(("last", "expected"), [(1, {(1, 2)}), (2, {(1, 2)}), (3, set()), (4, set())])
def test_one_buffer_would_not_do(last, expected):
    """What the second buffer is for: a last unit of one or two leaves, as many as there are buffers of weights."""
    assert Block([4, 4, last], 1).wrong_reads() == expected
