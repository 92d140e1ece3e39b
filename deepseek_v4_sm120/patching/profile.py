"""What `calibrate` measured on this machine, read at start-up: a patch that was wrong or slower here is left out.

Standard library only, and no CUDA: which GPU and driver this is, the driver says in /proc. A profile of another machine
or of another release counts for nothing and is told; without one the shipped defaults hold.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import deepseek_v4_sm120

FORMAT = 1
OURS, STOCK = "ours", "stock"
PROC = Path("/proc/driver/nvidia")


class ProfileError(Exception):
    """Why a profile cannot be used, in one sentence."""


@dataclass(frozen=True)
class Identity:
    """What a profile is valid for. None: unknown here, not compared."""

    device: str | None
    driver: str | None
    sglang: str | None
    package: str | None

    def differences(self, here: Identity) -> list[str]:
        """In words, for each fact that both sides know and that differs."""
        names = {"device": "GPU", "driver": "driver", "sglang": "SGLang", "package": "deepseek_v4_sm120"}
        return [
            f"{words} {getattr(self, name)}, not {getattr(here, name)}"
            for name, words in names.items()
            if None not in (getattr(self, name), getattr(here, name)) and getattr(self, name) != getattr(here, name)
        ]


@dataclass
class Profile:
    """Verdicts by patch. `problem` stops the server as a patch that does not fit would; `warnings` are told once."""

    path: str | None = None
    operators: dict[str, dict] = field(default_factory=dict)
    problem: str | None = None
    warnings: list[str] = field(default_factory=list)

    def against(self, patch: str) -> str | None:
        """Why this patch must not be applied here, None when the profile has nothing against it."""
        found = self.operators.get(patch)
        if found is None or found["winner"] == OURS:
            return None
        reasons = [f"{name}: {why}" for name, why in found.get("wrong", {}).items() if name.startswith(OURS)]
        return f"profile {self.path}: " + ("; ".join(reasons) or f"{found['winner']} is faster on this machine")

    def left_out(self, patch: str, way: str) -> str | None:
        """Why the patch must do without one of its ways here ("ours, mxfp8"), None when it may use it."""
        return self.operators.get(patch, {}).get("left_out", {}).get(way)

    def describe(self) -> dict | None:
        if self.path is None:
            return None
        winners = {name: found["winner"] for name, found in self.operators.items()}
        left_out = {name: found["left_out"] for name, found in self.operators.items() if found.get("left_out")}
        told = {"problem": self.problem, "warnings": self.warnings}
        return {"path": self.path, "winners": winners, "left_out": left_out, **told}


def verdicts(described: dict) -> str:
    """What Profile.describe says, in a line."""
    words = []
    for operator, winner in described["winners"].items():
        without = [way.removeprefix(f"{OURS}, ") for way in described["left_out"].get(operator, ())]
        words.append(f"{operator}: {winner}" + (f" without {', '.join(without)}" if without else ""))
    return ", ".join(words)


def here(sglang: str | None, proc: Path = PROC) -> Identity:
    """This machine, as far as it can be told without CUDA."""
    return Identity(_device(proc), _driver(proc), sglang, deepseek_v4_sm120.__version__)


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
    """The profile in a file; ProfileError says what is wrong with it."""
    try:
        found = json.loads(Path(path).read_text())
    except OSError as error:
        raise ProfileError(f"profile {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ProfileError(f"profile {path} is not JSON ({error}); write it again with `calibrate`") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ProfileError(f"profile {path} is not one of ours, or of another release; write it again with `calibrate`")
    operators, identity = found.get("operators"), found.get("identity")
    is_complete = isinstance(identity, dict) and isinstance(operators, dict)
    if not is_complete or not all(map(_is_verdict, operators.values())):
        raise ProfileError(f"profile {path} is damaged: an operator without a winner; write it again with `calibrate`")
    return found


def _is_verdict(found) -> bool:
    return (
        isinstance(found, dict)
        and isinstance(found.get("winner"), str)
        and isinstance(found.get("stock_over_ours"), int | float | None)
        and all(isinstance(found.get(name, {}), dict) for name in ("wrong", "left_out"))
    )


def identity_of(found: dict) -> Identity:
    return Identity(**{name: found["identity"].get(name) for name in ("device", "driver", "sglang", "package")})


def consult(path: str | None, sglang: str | None) -> Profile:
    """The profile that DSV4_SM120_PROFILE names, as far as it holds here."""
    if path is None:
        return Profile()
    try:
        found = read(path)
    except ProfileError as error:
        return Profile(path, problem=str(error))
    different = identity_of(found).differences(here(sglang))
    if different:
        text = f"profile {path} is of another machine or release ({'; '.join(different)}): the shipped defaults hold"
        return Profile(path, warnings=[text])
    return Profile(path, found["operators"])
