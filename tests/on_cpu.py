"""C++ that tests compile for a CPU, kept by its content as the build keeps what it makes (csrc/build_results.py): from
one run of the tests to the next only what has changed is compiled, and of all workers of a run one does it."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
HEADERS = REPO / "tests/ops"  # of what a text includes in quotes


@functools.cache
def _kept():
    if (csrc := str(REPO / "csrc")) not in sys.path:
        sys.path.insert(0, csrc)
    import build_artifact
    from build_results import Results, run

    return Results(build_artifact.CACHE / "tests", HEADERS, run(["g++", "--version"]))


def made_of(text: str, *flags: str) -> Path:
    """The program that g++ makes of the text, or with -shared the library. BuildError: what g++ said."""
    kept = _kept()
    from build_results import locked

    source = kept.text(text)
    with locked(source.with_suffix(".lock")):
        command = ["g++", "-std=c++20", *flags, "-I.", "-x", "c++", source]
        return kept.make(command, kept.included(source), ".made")
