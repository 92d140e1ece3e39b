"""What `calibrate` measured on this machine, read at start-up: a patch that was wrong or slower here is left out.

Standard library only, and no CUDA: which GPU and driver this is, the driver says in /proc. A profile of another machine
or of another release counts for nothing and is told; without one the shipped defaults hold. One that does not say of
which machine and release it is, or names what nobody knows, is a problem: the server does not start with it. One of
another build of this release holds, because what was wrong may be so still, and is told.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path

import deepseek_v4_sm120
from deepseek_v4_sm120.patching import json_file

FORMAT = 1
OURS, STOCK = "ours", "stock"
QUICK = "made with --quick, by fewer shapes"
PROC = Path("/proc/driver/nvidia")
MOST_BYTES = 16 << 20  # one with everything in it has 50 KB


class ProfileError(Exception):
    """Why a profile cannot be used, in one sentence."""


@dataclass(frozen=True)
class Identity:
    """What a profile is valid for. None: unknown here, not compared. A profile may lack SGLang, where none was, and the
    driver, where it has no /proc: such a one holds only where they are unknown, too.
    """

    device: str | None
    driver: str | None
    sglang: str | None
    package: str | None

    def differences(self, here: Identity) -> list[str]:
        """In words, for each fact that is known here and that the profile has otherwise, or not."""
        names = {"device": "GPU", "driver": "driver", "sglang": "SGLang", "package": "deepseek_v4_sm120"}
        return [
            f"{words} {getattr(self, name) or 'not known'}, not {getattr(here, name)}"
            for name, words in names.items()
            if getattr(here, name) not in (None, getattr(self, name))
        ]


@dataclass
class Profile:
    """Verdicts by patch, at the shapes of a server of `cards`. `problem` stops the server as a patch that does not fit
    would; `warnings`, why it is not used, and `outdated`, why a verdict may be of other code, are told once. `quick`:
    measured at fewer shapes, which is told wherever a verdict is."""

    path: str | None = None
    operators: dict[str, dict] = field(default_factory=dict)
    problem: str | None = None
    warnings: list[str] = field(default_factory=list)
    outdated: str | None = None
    cards: int | None = None
    quick: bool = False

    def against(self, patch: str) -> str | None:
        """Why this patch must not be applied here, None when the profile has nothing against it."""
        found = self.operators.get(patch)
        if found is None or found["winner"] == OURS:
            return None
        reasons = [f"{name}: {why}" for name, why in found.get("wrong", {}).items() if name.startswith(OURS)]
        made = f" ({QUICK})" if self.quick else ""
        return f"profile {self.path}{made}: " + ("; ".join(reasons) or f"{found['winner']} is faster on this machine")

    def left_out(self, patch: str, way: str) -> str | None:
        """Why the patch must do without one of its ways here ("ours, mxfp8"), None when it may use it."""
        return self.operators.get(patch, {}).get("left_out", {}).get(way)

    def of_other_cards(self, cards: int | None) -> str | None:
        """What is told of a server of so many cards, where the profile is of others; None where one is not known."""
        if None in (self.cards, cards) or self.cards == cards:
            return None
        return (
            f"profile {self.path} is of {self.cards} cards, this server has {cards}: other shapes, and other sums "
            f"between them; `calibrate --gpus {cards}` makes one of these"
        )

    def of_fewer_shapes(self) -> str | None:
        """What is told where the profile is taken; None of one that was made at all shapes."""
        return f"profile {self.path} was {QUICK}: without it `calibrate` decides better" if self.quick else None

    def handover(self) -> dict | None:
        """What children need of it, JSON-able; `of_parent` makes it a profile again."""
        if self.path is None:
            return None
        kept = ("winner", "wrong", "left_out", "stock_over_ours")
        operators = {name: {k: v for k, v in found.items() if k in kept} for name, found in self.operators.items()}
        told = {"problem": self.problem, "warnings": self.warnings, "outdated": self.outdated, "cards": self.cards}
        return {"path": self.path, "operators": operators, **told, "quick": self.quick}

    def describe(self) -> dict | None:
        if self.path is None:
            return None
        winners = {name: found["winner"] for name, found in self.operators.items()}
        left_out = {name: found["left_out"] for name, found in self.operators.items() if found.get("left_out")}
        wrong = {name: found["wrong"] for name, found in self.operators.items() if found.get("wrong")}
        told = {"problem": self.problem, "warnings": self.warnings, "outdated": self.outdated, "quick": self.quick}
        return {"path": self.path, "winners": winners, "left_out": left_out, "wrong": wrong, **told}


def verdicts(described: dict) -> str:
    """What Profile.describe says, in a line."""
    words = []
    for operator, winner in described["winners"].items():
        without = [way.removeprefix(f"{OURS}, ") for way in described["left_out"].get(operator, ())]
        words.append(f"{operator}: {winner}" + (f" without {', '.join(without)}" if without else ""))
    return ", ".join(words) + (f" ({QUICK})" if described.get("quick") else "")


def here(sglang: str | None, proc: Path = PROC) -> Identity:
    """This machine, as far as it can be told without CUDA."""
    return Identity(_device(proc), _driver(proc), sglang, deepseek_v4_sm120.__version__)


def build_info() -> dict:
    """What the build that lies beside us says of itself, {} in a checkout: git_commit, and `code`, a digest of what
    calibrate times."""
    path = Path(deepseek_v4_sm120.__file__).with_name("build_info.json")
    try:
        found = json_file.load(path) if path.is_file() else {}
    except json_file.JsonFileError:  # ops/shared/extension.py tells it, and stops a server of ours
        return {}
    return found if isinstance(found, dict) else {}


def _plan(found: dict) -> dict:
    """Of how many cards it is, and whether --quick made it; both only where the profile says so."""
    plan = found.get("plan")
    plan = plan if isinstance(plan, dict) else {}
    return {"cards": plan["tp"] if type(plan.get("tp")) is int else None, "quick": plan.get("quick") is True}


def _outdated(found: dict) -> str | None:
    """Why the verdicts may be of other code than what runs here, as the end of a sentence; None where that is the same
    or not known here."""
    made, ours = found.get("build"), build_info()
    made = made if isinstance(made, dict) else {}
    if ours.get("code") in (None, made.get("code")):
        return None
    commits = f"git {made.get('git_commit') or 'unknown'!s:.40}, not {ours.get('git_commit')}"
    return f"was made with another build of ours ({commits}): it holds until `calibrate` has made a new one"


def _device(proc: Path) -> str | None:
    names = set()
    for path in proc.glob("gpus/*/information"):
        lines = path.read_text(errors="replace").splitlines()
        names |= {line.partition(":")[2].strip() for line in lines if line.startswith("Model:")}
    return names.pop() if len(names) == 1 else None  # none visible, or a mixed machine: not compared


def _driver(proc: Path) -> str | None:
    path = proc / "version"
    words = path.read_text(errors="replace").split() if path.is_file() else []
    return next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()), None)


def read(path: str | Path) -> dict:
    """The profile in a file: whole, and of this format. ProfileError says what is wrong with it."""
    again = "write it again with `calibrate`"
    try:
        found = json_file.load(path, MOST_BYTES)
    except json_file.JsonFileError as error:
        raise ProfileError(f"profile {path} {error}; {again}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ProfileError(f"profile {path} is not one of ours, or of another release; {again}")
    if problem := _identity_problem(found.get("identity")):
        raise ProfileError(f"profile {path} is damaged: {problem}; {again}")
    operators = found.get("operators")
    if not isinstance(operators, dict):
        raise ProfileError(f"profile {path} is damaged: no operators; {again}")
    for name, verdict in operators.items():
        if problem := _verdict_problem(verdict):
            raise ProfileError(f"profile {path} is damaged: {name!r:.80} {problem}; {again}")
    return found


def _identity_problem(identity) -> str | None:
    """Why it does not say of which machine and release the profile is, None if it does."""
    names = [one.name for one in fields(Identity)]
    if not isinstance(identity, dict):
        return "no identity"
    if missing := [name for name in names if name not in identity]:
        return f"its identity lacks {', '.join(missing)}"
    for name in names:
        is_text = isinstance(identity[name], str) and identity[name].strip()
        if not is_text and not (identity[name] is None and name in ("driver", "sglang")):
            return f"the {name} of its identity is no text"
    return None


def _verdict_problem(found) -> str | None:
    """What is wrong with an operator's entry, None if nothing is."""
    if not isinstance(found, dict) or "winner" not in found:
        return "has no winner"
    if found["winner"] not in (OURS, STOCK):
        return f"has the winner {found['winner']!r:.80}, not {OURS} or {STOCK}"
    ratio = found.get("stock_over_ours")
    is_number = isinstance(ratio, int | float) and not isinstance(ratio, bool)
    if ratio is not None and not (is_number and 0 < ratio < math.inf):
        return f"has stock_over_ours {ratio!r:.80}, not a number above 0"
    for name in ("wrong", "left_out"):
        told = found.get(name, {})
        if not isinstance(told, dict) or not all(isinstance(why, str) for why in told.values()):
            return f"has {name} that is not a mapping of names to reasons"
    return None


def identity_of(found: dict) -> Identity:
    return Identity(**{one.name: found["identity"][one.name] for one in fields(Identity)})


def of_parent(handed: dict) -> Profile:
    """The profile as the process that started this one read it: the file may have changed or gone since. One of another
    build may hand over more; who enters the model says so (verdict.replaced)."""
    return Profile(**{one.name: handed[one.name] for one in fields(Profile) if one.name in handed})


def consult(path: str | None, sglang: str | None, machine: Identity | None = None) -> Profile:
    """The profile that DSV4_SM120_PROFILE names, as far as it holds here, or on `machine`."""
    if path is None:
        return Profile()
    try:
        found = read(path)
    except ProfileError as error:
        return Profile(path, problem=str(error))
    different = identity_of(found).differences(machine or here(sglang))
    if different:
        text = f"profile {path} is of another machine or release ({'; '.join(different)}): the shipped defaults hold"
        return Profile(path, warnings=[text])
    operators, outdated = found["operators"], _outdated(found)
    strangers = [name for name in operators if name not in deepseek_v4_sm120.OPS]
    if outdated:
        known = {name: verdict for name, verdict in operators.items() if name not in strangers}
        return Profile(path, known, outdated=f"profile {path} {outdated}", **_plan(found))
    if strangers:  # of this very release
        text = f"profile {path} is damaged: it names {strangers[0]!r:.80}, which is no operator; known: "
        return Profile(path, problem=text + ", ".join(deepseek_v4_sm120.OPS))
    return Profile(path, operators, **_plan(found))
