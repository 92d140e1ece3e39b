"""What the first process of a server decided about the patches, in one variable for those that it starts: all of them
run the same code, also where a file is gone by then or a library does not load in one of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path

import deepseek_v4_sm120
from deepseek_v4_sm120.patching import VERDICT

REMEDY = "What to do: start it again, with whatever started it"
MOST_CHARACTERS = 64 << 10  # Linux takes 128 KiB in one variable; above this, children read the profile themselves


@dataclass(frozen=True)
class Verdict:
    """For this host version and this folder of ours: the patches that are left out, and why; the profile as it was
    read (None: there was none, or it is too long to hand on); of which build the process is (`build`)."""

    identity: tuple[str, ...]
    left_out: Mapping[str, str]
    profile: Mapping | None = None
    build: str | None = None

    def hand_over(self, environ: MutableMapping[str, str]) -> None:
        text = json.dumps(asdict(self))
        if len(text) > MOST_CHARACTERS:
            text = json.dumps({**asdict(self), "profile": None})
        environ[VERDICT] = text


def identity(version: str | None) -> tuple[str, ...]:
    """Whom a verdict is for: the host's version, ours, and our folder."""
    return str(version), deepseek_v4_sm120.__version__, str(_package())


def _package() -> Path:
    return Path(deepseek_v4_sm120.__file__).resolve().parent


def build() -> str | None:
    """A digest of the build's list of files (RECORD) as it lies beside us now; None where there is none to be read: in
    a checkout, or where the folder was taken away."""
    try:
        listed = (_package().parent / deepseek_v4_sm120.RECORD).read_bytes()
    except OSError:
        return None
    return hashlib.sha256(listed).hexdigest()


def replaced(began_with: str | None, verdict: Verdict | None) -> str | None:
    """Why this process, which began with that build, may run another one than the process that started it, or half of
    it; None where all is one build."""
    if build() == began_with and (verdict is None or verdict.build == began_with):
        return None
    return f"{_package().parent} was made anew, or taken away, while this server started: it would run two builds"


def inherited(environ: Mapping[str, str], version: str | None) -> Verdict | None:
    """The verdict of the process that started this one; None without one, or where it is about another installation
    (a server that starts a server)."""
    text = environ.get(VERDICT)
    if not text:
        return None
    found = json.loads(text)
    if tuple(found["identity"]) != identity(version):
        return None
    return Verdict(tuple(found["identity"]), found["left_out"], found["profile"], found.get("build"))
