"""What the judge's numbers say: RIGHT, a fault, or that they cannot say it. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field

EMBEDDING, CONTEXT, GIVEN = "embedding", "the drafts' context", "the streams that drafts begin with"
BEGUN, NUMBERS = "the tokens that drafts begin with", "rows of requests"
EXACT = {BEGUN: "are others", NUMBERS: "have what is no number"}  # of which none may be off
PART = "a part of it is missing"  # the share is how much
SHARE = 0.25  # of a known fault in an error; an engine that has it would be at 1
CLEAR = 0.04  # a fault's share is told where chance alone would make of it less than this,
CHANCE, SURE = 0.2, 2.5  # the coarsest right engine has less of; and so many times what it has is none of chance
STRONG = 0.01  # and the fault at least so much of the output: bf16's own rounding of it is a tenth of that
OTHERWISE = 0.02  # of the rows, that may be another choice; they count neither as error nor as fault
LAYER_SHARE = 0.5  # the same of one layer alone, whose rows are few
LAYER_OTHERWISE, FEW = 0.25, 2
TIMES = 2.0  # a layer's error, of what the coarsest right engine's rounding makes of the same: what is more is wrong
LEAST = 0.01  # relative error that is none: some roundings to bf16
PART_SHARE, PART_CLEAR = 0.08, 0.015  # of PART: an eighth is what one of eight cards adds
UNIT_SHARE, TWICE, UNIT_CLEAR = 0.5, -0.8, 0.1  # of a head, an expert, a page of keys; -1: it is there twice
NAMED = 4  # units of a layer by name, the others by their number
PLAIN = ("target, extend", "target, decode")  # passes that must have been seen
VERIFIED = ("target, extend", "target, target_verify")
BLOCKS = (*VERIFIED, "block, target_verify")
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
    return {
        name: one["share"]
        for name, one in group["faults"].items()
        if one["reach"] < (PART_CLEAR if name == PART else CLEAR)
        and one["strength"] >= STRONG
        and abs(one["chance"]) < (PART_SHARE / 2 if name == PART else CHANCE)
    }


def told_units(group: dict) -> dict:
    """{unit: its share} of those that can be told."""
    units = group["units"].items()
    return {name: one["share"] for name, one in units if one["reach"] < UNIT_CLEAR and abs(one["chance"]) < CHANCE}


def is_there(fault: str, group: dict, least: float) -> bool:
    """Of one that can be told: by its share, and by what rounding makes of that."""
    one = group["faults"].get(fault)
    least = PART_SHARE if fault == PART else least
    return one is not None and fault in told(group) and abs(one["share"]) > max(least, SURE * abs(one["chance"]))


def of(
    groups: list[dict], layers: int, wanted: tuple[str, ...], tokens: list[dict] | None = None, drawn: bool = False
) -> Verdict:
    """layers: of the model; wanted: the kinds of passes that must be there; tokens: what tokens.py found, None: it was
    not asked; drawn: the MTP block's drafts need not be the greatest."""
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
    if tokens is not None:
        _of_tokens(tokens, wanted, found, drawn)
        lacks = [mode for mode in wanted if mode.startswith("draft") and (GIVEN, mode) not in _seen(groups)]
        if lacks:
            found.unjudged.append(f"nobody saw where their streams came from: passes of the kind {' and '.join(lacks)}")
    for mode in wanted if layers else ():
        if not mode.startswith("target"):
            continue
        for part in ("attention", "experts"):
            seen = {n for g in groups if g["mode"] == mode and g["what"].startswith(part) for n in g["layers"]}
            if seen and len(seen) != layers:
                found.unjudged.append(f"{part} of {layers - len(seen)} layers were not seen ({mode})")
    for mode in dict.fromkeys(group["mode"] for group in groups):
        of_mode = [group for group in groups if group["mode"] == mode]
        every, could = ({fault for group in of_mode for fault in of(group)} for of in (lambda g: g["faults"], told))
        if every - could:
            found.notes.append(f"{mode}: could not be told, whether there or not: {', '.join(sorted(every - could))}")
        if unsure := _alone(of_mode, every & could):
            found.notes.append(f"{mode}: could not be told of each layer alone: {', '.join(unsure)}")
    if groups and not any(told(group) for group in groups):
        found.unjudged.append("no known fault could be told from rounding")
    return found


def _alone(groups: list[dict], faults: set) -> list[str]:
    """The faults that a single layer may have unseen, and how many of those that were asked."""
    layers = [layer for group in groups for layer in group["layers"].values()]
    asked = {fault: [layer for layer in layers if fault in layer["faults"]] for fault in sorted(faults)}
    unsure = {fault: [layer for layer in of if fault not in told(layer)] for fault, of in asked.items()}
    return [f"{fault} ({len(unsure[fault])} of {len(asked[fault])})" for fault in asked if unsure[fault]]


def _seen(groups: list[dict]) -> set:
    return {(group["what"], group["mode"]) for group in groups if group["rows"]}


def _of_tokens(tokens: list[dict], wanted: tuple[str, ...], found: Verdict, drawn: bool) -> None:
    asked = [one for one in tokens if one["what"] not in EXACT and not (drawn and one["mode"].startswith("draft"))]
    for one in asked:
        where, few = f"{one['what']}, {one['mode']}", 1 if one["rows"] < 1 / OTHERWISE else 0
        # a near tie is not off: of an answer's none may be, of drafts those that a smaller copy of the head missed
        most = 0 if one["mode"].startswith("target") else max(OTHERWISE * one["rows"], few)
        if one["off"] > most or 0 < one["rows"] == one["off"]:
            as_if = [name for name, off in one["otherwise"].items() if off <= OTHERWISE * one["rows"]]
            why = f": {' or '.join(as_if)}" if as_if else ""
            found.faults.append(f"{where}: {one['off']} of {one['rows']} are not the greatest of their rows{why}")
    for one in tokens:
        if one["what"] in EXACT and one["off"]:
            said = EXACT[one["what"]]
            found.faults.append(f"{one['what']}, {one['mode']}: {one['off']} of {one['rows']} {said}")
    modes = {one["mode"] for one in asked if one["rows"]}
    lacks = [mode for mode in wanted if mode not in modes and not (drawn and mode.startswith("draft"))]
    if lacks:
        found.unjudged.append(f"no token was seen behind passes of the kind {' and '.join(lacks)}: ask for more, --new")


def _of_group(group: dict, found: Verdict) -> None:
    where = f"{group['what']}, {group['mode']}"
    few = 1 if group["rows"] < 1 / OTHERWISE else 0  # of which one may be another choice, but not the only one
    if group["outliers"] > max(OTHERWISE * group["rows"], few) or 0 < group["rows"] == group["outliers"]:
        found.faults.append(
            f"{where}: {group['outliers']} of {group['rows']} rows are more than half off, or no numbers"
        )
    if group["odd"] > max(OTHERWISE * group["rows"], few) or 0 < group["rows"] == group["odd"]:
        found.faults.append(f"{where}: {group['odd']} of {group['rows']} rows are further off than rounding makes them")
    for fault, share in told(group).items():
        if is_there(fault, group, SHARE):
            found.faults.append(f"{where}: {fault}, {share:.2f} of it")
    _of_units(where, group, found)
    for number, layer in group["layers"].items():
        at = f"{where}, layer {number}"
        for name, said in (("outliers", "more than half off"), ("odd", "further off than rounding makes them")):
            if layer[name] >= FEW and layer[name] > LAYER_OTHERWISE * layer["rows"]:
                found.faults.append(f"{at}: {layer[name]} of {layer['rows']} rows are {said}")
        if layer["error"] is not None and not layer["error"] <= max(TIMES * layer["rounding"], LEAST):
            found.faults.append(
                f"{at}: a relative error of {layer['error']:.3f}, where rounding makes {layer['rounding']:.3f}"
            )
        for fault, share in told(layer).items():
            if is_there(fault, layer, LAYER_SHARE) and not is_there(fault, group, SHARE):
                found.faults.append(f"{at}: {fault}, {share:.2f} of it")
        _of_units(at, layer, found)


def _of_units(where: str, group: dict, found: Verdict) -> None:
    wrong = {name: share for name, share in told_units(group).items() if not TWICE < share < UNIT_SHARE}
    if wrong:
        names = ", ".join(f"{name} ({share:.2f})" for name, share in list(wrong.items())[:NAMED])
        more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
        found.faults.append(f"{where}: missing, or others in their place: {names}{more}")
