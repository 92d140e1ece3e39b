"""What the first process of a server decided about the patches, in one variable for those that it starts: all of them
run the same code, also where a file is gone by then or a library does not load in one of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path

import deepseek_v4_sm120
from deepseek_v4_sm120.patching import VERDICT

MOST_CHARACTERS = 64 << 10  # Linux takes 128 KiB in one variable; above this, children read the profile themselves


@dataclass(frozen=True)
class Verdict:
    """For this host version and this folder of ours: the patches that are left out, and why; the profile as it was
    read (None: there was none, or it is too long to hand on)."""

    identity: tuple[str, ...]
    left_out: Mapping[str, str]
    profile: Mapping | None = None

    def hand_over(self, environ: MutableMapping[str, str]) -> None:
        text = json.dumps(asdict(self))
        if len(text) > MOST_CHARACTERS:
            text = json.dumps({**asdict(self), "profile": None})
        environ[VERDICT] = text


def identity(version: str | None) -> tuple[str, ...]:
    """Whom a verdict is for: the host's version, ours, and our folder."""
    return str(version), deepseek_v4_sm120.__version__, str(Path(deepseek_v4_sm120.__file__).resolve().parent)


def inherited(environ: Mapping[str, str], version: str | None) -> Verdict | None:
    """The verdict of the process that started this one; None without one, or where it is about another installation
    (a server that starts a server)."""
    text = environ.get(VERDICT)
    if not text:
        return None
    found = json.loads(text)
    verdict = Verdict(tuple(found["identity"]), found["left_out"], found["profile"])
    return verdict if verdict.identity == identity(version) else None
