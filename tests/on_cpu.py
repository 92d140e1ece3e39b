"""C++ that tests compile for a CPU, kept by its content as the build keeps what it makes (csrc/build_results.py): from
one run of the tests to the next only what has changed is compiled, and of all workers of a run one does it."""

from __future__ import annotations

import ctypes
import functools
import re
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


class Numbered:
    """Of a library of several texts one: its functions, which have its number behind their names."""

    def __init__(self, library: ctypes.CDLL, number: int):
        self._library, self._number = library, number

    def __getattr__(self, name: str):
        return getattr(self._library, f"{name}_{self._number}")


def made_together(texts: list[str], *flags: str) -> list[Numbered]:
    """A library of texts, each in a namespace of its own, with extern "C" functions of the same names: what they
    include, which takes as long as the rest, is compiled once."""
    included = dict.fromkeys(line for text in texts for line in re.findall(r"^#include .*$", text, re.M))
    parts = ["\n".join(included)]
    for number, text in enumerate(texts):
        text = re.sub(r"^#include .*$", "", text, flags=re.M)
        text = re.sub(r'^(extern "C" \w+ \w+)\(', rf"\1_{number}(", text, flags=re.M)
        parts.append(f"namespace text_{number} {{\n{text}\n}}\n")
    library = ctypes.CDLL(str(made_of("\n".join(parts), *flags, "-shared", "-fPIC")))
    return [Numbered(library, number) for number in range(len(texts))]
