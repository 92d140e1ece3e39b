"""The stage `drawn2` of run_stage.py: requests that sample with min_p, in an engine of two cards whose ranks write down
which tokens they drew (drawn_plugin), and with which they went on. FlashInfer's renormalisation adds up in another
order from call to call, so two ranks draw other tokens now and then; from there on they must not compute with them."""

import json
import os
from pathlib import Path

ISSUE = 23
PLUGIN = Path(__file__).resolve().parent / "drawn_plugin"
OURS, FOLDER = "drawn2_min_p", "E2E_DRAWN"
IMPLEMENTATIONS = {OURS: "ours, every operator on, two cards"}
PHASE = "drawn"
LEAST_DRAWS = 100_000
# all of them by FlashInfer's kernels, one of four greedy. min_p so small that it leaves many tokens
SAMPLING = (
    {"temperature": 1.0, "min_p": 0.001},
    {"temperature": 1.5, "min_p": 0.0001, "top_p": 0.95},
    {"temperature": 0.8, "min_p": 0.02, "top_k": 200, "top_p": 0.9},
    {"temperature": 0},
)
PROMPTS, ROUNDS = 64, 6  # at once; one after the other


def cases(make, options, ours):
    """options: of two cards with our sums; ours: environment of a patched engine."""
    return [make(OURS, [*options, "--phases", PHASE], environment=ours)]


def folder(name, work):
    return work / f"{name}_drawn"


def environment(case, work):
    """What the plugin needs, in a folder without what an earlier try left."""
    if case.name not in IMPLEMENTATIONS:
        return {}
    for old in folder(case.name, work).glob("*.jsonl"):
        old.unlink()
    paths = filter(None, (str(PLUGIN), os.environ.get("PYTHONPATH")))
    return {"PYTHONPATH": os.pathsep.join(paths), FOLDER: str(folder(case.name, work))}


def counted(at):
    """Of the ranks' files in a folder: ranks, steps that all of them wrote, draws, and those that are not the same on
    all ranks: as drawn, and as gone on with. A step of other requests than the first rank's counts as all its draws."""
    ranks = [path.read_text().splitlines() for path in sorted(at.glob("*.jsonl"))]
    found = {"ranks": len(ranks), "steps": min(map(len, ranks), default=0), "draws": 0, "drawn": 0, "gone_on": 0}
    for lines in zip(*ranks, strict=False):
        steps = [json.loads(line) for line in lines]
        found["draws"] += len(steps[0][0])
        for i, what in enumerate(("drawn", "gone_on")):
            tokens = [step[i] for step in steps]
            same = all(len(one) == len(tokens[0]) for one in tokens)
            columns = zip(*tokens, strict=True) if same else ()
            found[what] += sum(len(set(column)) > 1 for column in columns) if same else len(tokens[0])
    return found


def rows(cases, row):
    """collect.py's rows of the cases of a stage. Nothing is shown by one rank, or by few draws."""
    if OURS not in cases:
        return []
    drawn = cases[OURS].get(PHASE) or {"ranks": 0, "steps": 0, "draws": 0, "drawn": None, "gone_on": None}
    case, impl = "flash6h, two cards, 64 requests at once, three of four with min_p", IMPLEMENTATIONS[OURS]
    shown = drawn["ranks"] > 1 and drawn["draws"] > 0
    return [
        row(case, impl, "draws", drawn["draws"], issue=ISSUE),
        row(case, impl, f"draws, missing to {LEAST_DRAWS:,}", max(0, LEAST_DRAWS - drawn["draws"]), 0, ISSUE),
        row(case, impl, "ranks that wrote, missing to 2", max(0, 2 - drawn["ranks"]), 0, ISSUE),
        row(case, impl, "draws that differ between the ranks", drawn["drawn"] if shown else None, issue=ISSUE),
        row(case, impl, "draws with which they went on that differ", drawn["gone_on"] if shown else None, 0, ISSUE),
    ]
