"""Puts the folder that a build made in the place of the earlier one."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from build_results import BuildError, say

IN_AN_ARTIFACT = re.compile(r"deepseek_v4_sm120(-.+\.dist-info)?|sitecustomize\.py|__pycache__")  # build_docker.sh too


def check_replaceable(out: Path) -> None:
    """BuildError where `out` holds anything but an earlier artifact: what is in it will be deleted."""
    if out.exists() and not out.is_dir():
        raise BuildError(f"{out} is not a folder; choose another --out")
    if foreign := sorted(path.name for path in out.glob("*") if not IN_AN_ARTIFACT.fullmatch(path.name)):
        raise BuildError(f"{out} holds {foreign[0]}, which no artifact has; choose another --out, or an empty folder")


@contextmanager
def published(out: Path) -> Iterator[Path]:
    """A folder beside out that takes its place when the block ends well, and vanishes when it does not. What was there
    stays beside it until the next build: containers that have it mounted would see an empty one, in which `status`
    finds nothing of ours and a process that a server starts runs without us. build_docker.sh does the same."""
    check_replaceable(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = (out.parent / f".{out.name}.{word}-{os.getpid()}" for word in ("new", "old"))
    shutil.rmtree(old, ignore_errors=True)
    fresh.mkdir()
    try:
        yield fresh
        if out.exists():
            out.rename(old)
        fresh.rename(out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        if old.exists() and not out.exists():
            old.rename(out)
    for earlier in out.parent.glob(f".{out.name}.old-*"):
        if earlier != old:
            shutil.rmtree(earlier, ignore_errors=True)
    if old.exists():
        say(f"{old} keeps what was there, for containers that have it mounted, until the next build")
