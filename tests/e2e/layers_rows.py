"""What collect.py says of the stage `layers` (layers_stage.py)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent.parent)]

from deepseek_v4_sm120.commands.layers import verdict  # noqa: E402

ISSUE = 23
BESIDE = {"layers_ours": "layers_stock", "layers_eagle314": "layers_stock_eagle314"}  # whose error ours is measured by
IMPLEMENTATIONS = {
    "layers_ours": "ours, every operator on",
    "layers_fp4_index": "ours, every operator on, index cache in FP4",
    "layers_eagle314": "ours, every operator on, EAGLE 3/1/4",
    "layers_eagle314_blind": "ours, every operator on, EAGLE 3/1/4, draft_chain=off",
    "layers_stock": "SGLang stock (FlashMLA, Hopper)",
    "layers_stock_eagle314": "SGLang stock (FlashMLA, Hopper), EAGLE 3/1/4",
    "layers_ours_tp2": "ours, every operator on, two cards",
    "layers_eagle314_tp2": "ours, every operator on, EAGLE 3/1/4, two cards",
}
MOST_OF_STOCK = 1.0
PLANTED = {"layers_eagle314_blind": "blind behind the first draft"}  # a fault that the case is there to show


def rows(row, stages: list) -> list:
    """stages: `layers` of each stage file."""
    cases = {name: case for stage in stages for name, case in stage["cases"].items()}
    return [one for name, case in cases.items() for one in case_rows(row, name, case, cases.get(BESIDE.get(name)))]


def case_rows(row, name: str, case: dict, stock: dict | None) -> list:
    found, judged = [], case["patched"] and name not in PLANTED
    errors = {(g["what"], g["mode"]): g["error"] for g in (stock or {"groups": []})["groups"]}

    def add(what, metric, value, bar=None):
        found.append(row(f"layers, {what}", IMPLEMENTATIONS[name], metric, value, bar, ISSUE))

    broke = case["exit"] != 0 or case["compared"] != 0
    add("all", "an engine or its comparison that broke", int(broke), 0)
    was_planted = False
    seen = {group["mode"] for group in case["groups"]}
    add(
        "all",
        "kinds of passes that nobody saw",
        len(set(verdict.DRAFTED if "eagle" in name else verdict.PLAIN) - seen),
        0,
    )
    if "missing" in case:
        add("all", "parts of requests that nobody saw", len(case["missing"]), 0)
    for one in case.get("tokens", ()):
        is_exact = one["what"] in verdict.EXACT or one["mode"].startswith("target")
        bar = 0 if is_exact else verdict.OTHERWISE * one["rows"]
        add(f"{one['what']}, {one['mode']}", f"wrong ones of {one['rows']}", one["off"], bar if judged else None)
    for group in case["groups"]:
        what = f"{group['what']}, {group['mode']}"
        add(what, f"relative error beside float64, {group['rows']} rows", group["error"])
        stocks = errors.get((group["what"], group["mode"]))
        if stocks:
            ours = None if group["error"] is None else group["error"] / stocks
            add(what, "relative error, of stock's", ours, MOST_OF_STOCK)
        bar = verdict.OTHERWISE * group["rows"] if judged else None
        add(what, "rows of another choice (experts, entries)", group["outliers"], bar)
        told = verdict.told(group)
        if not told:
            continue
        worst = max(told, key=lambda fault: abs(told[fault]))
        add(what, f"greatest share of {len(told)} known faults", abs(told[worst]), verdict.SHARE if judged else None)
        for fault in [fault for fault in told if abs(told[fault]) > verdict.SHARE]:
            add(what, f"share of a fault: {fault}", told[fault])
        planted = PLANTED.get(name)
        if planted in told:
            add(what, f"share of the fault that is there, {planted}, off 1", abs(told[planted] - 1), verdict.SHARE)
        was_planted |= planted in told
    if name in PLANTED and not broke:
        add("all", "a planted fault that was not told", int(not was_planted), 0)
    return found
