"""What the judge's numbers say: RIGHT, a fault, or that they cannot say it. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field

EMBEDDING = "embedding"
SHARE = 0.25  # of a known fault in an error; an engine that has it would be at 1
CLEAR = 0.04  # a fault's share is told where chance alone would make of it less than this,
STRONG = 0.01  # and the fault at least so much of the output: bf16's own rounding of it is a tenth of that
OTHERWISE = 0.02  # of the rows, that may be another choice; they count neither as error nor as fault
LAYER_SHARE = 0.5  # the same of one layer alone, whose rows are few
LAYER_OTHERWISE, FEW = 0.25, 2
WRONG = 0.25  # relative error, a layer's: FP8's rounding was seen to make 0.09 of it
PLAIN = ("target, extend", "target, decode")  # passes that must have been seen
VERIFIED = ("target, extend", "target, target_verify")
DRAFTED = (*VERIFIED, "draft, extend", "draft, decode", "draft, draft_extend_v2")
RIGHT, FAULT, UNJUDGED = 0, 1, 2  # exit status


@dataclass
class Verdict:
    faults: list[str] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        """A fault that was seen is one, whatever was not seen besides."""
        return FAULT if self.faults else UNJUDGED if self.unjudged else RIGHT


def told(group: dict) -> dict:
    """{fault: its share} of those that can be told."""
    return {k: f["share"] for k, f in group["faults"].items() if f["reach"] < CLEAR and f["strength"] >= STRONG}


def of(groups: list[dict], layers: int, wanted: tuple[str, ...]) -> Verdict:
    """layers: of the model; wanted: the kinds of passes that must be there."""
    found = Verdict()
    lacks = [mode for mode in wanted if mode not in {group["mode"] for group in groups if group["rows"]}]
    if lacks:
        found.unjudged.append(f"nobody saw passes of the kind {' and '.join(lacks)}")
    of_embedding = [group for group in groups if group["what"] == EMBEDDING and group["mode"].startswith("target")]
    if of_embedding and all(2 * group["outliers"] > group["rows"] for group in of_embedding):
        found.unjudged.append(
            "the first layer was not given these tokens' embeddings: another checkpoint's record, rows in another "
            "order, or an engine whose embedding is wrong"
        )
        return found
    for group in groups:
        _of_group(group, found)
    for mode in wanted if layers else ():
        if not mode.startswith("target"):
            continue
        for part in ("attention", "experts"):
            seen = {n for g in groups if g["mode"] == mode and g["what"].startswith(part) for n in g["layers"]}
            if seen and len(seen) != layers:
                found.unjudged.append(f"{part} of {layers - len(seen)} layers were not seen ({mode})")
    could = {fault for group in groups for fault in told(group)}
    every = {fault for group in groups for fault in group["faults"]}
    if every - could:
        found.notes.append(f"could not be told, whether there or not: {', '.join(sorted(every - could))}")
    if groups and not could:
        found.unjudged.append("no known fault could be told from rounding")
    return found


def _of_group(group: dict, found: Verdict) -> None:
    where = f"{group['what']}, {group['mode']}"
    few = 1 if group["rows"] < 1 / OTHERWISE else 0  # of which one may be another choice, but not the only one
    if group["outliers"] > max(OTHERWISE * group["rows"], few) or 0 < group["rows"] == group["outliers"]:
        found.faults.append(
            f"{where}: {group['outliers']} of {group['rows']} rows are more than half off, or no numbers"
        )
    for fault, share in told(group).items():
        if abs(share) > SHARE:
            found.faults.append(f"{where}: {fault}, {share:.2f} of it")
    for number, layer in group["layers"].items():
        at = f"{where}, layer {number}"
        if layer["outliers"] >= FEW and layer["outliers"] > LAYER_OTHERWISE * layer["rows"]:
            found.faults.append(f"{at}: {layer['outliers']} of {layer['rows']} rows are more than half off")
        if layer["error"] is not None and layer["error"] > WRONG:
            found.faults.append(f"{at}: a relative error of {layer['error']:.2f}, which rounding does not make")
        for fault, share in told(layer).items():
            if abs(share) > LAYER_SHARE and abs(told(group).get(fault, 0.0)) <= SHARE:
                found.faults.append(f"{at}: {fault}, {share:.2f} of it")
