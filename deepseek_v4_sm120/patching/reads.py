"""What our replacements read of the host's objects, by name, and whether a host that nobody has looked at still has it.

A JSON file {module of ours: [[name, "module:Class" or "module", ..], ..]}, of the newest release that was reviewed: one
of the places has the name there. A contract speaks of the functions that are replaced, this of what those that stand
for them go on to ask: a name that is gone would end a server in the middle of its work.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

Text = Callable[[str], str | None]  # module name -> its source text, None where there is no such module
_MAX_IMPORTS = 3


@dataclass(frozen=True)
class Reads:
    """problem: why the file could not be read; then nothing is asked."""

    names: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    problem: str | None = None

    def missing(self, module: str, text: Text) -> str | None:
        """The first name that a module of ours reads and that the host has no more, in words. What was moved out of
        sight, or was never told where it is, counts as there."""
        for name, *places in self.names.get(module, ()):
            homes = [_home(place, text) for place in places]
            if None not in homes and not any(_has(text(home), name) for home in homes):
                return f"{' and '.join(places)} has no {name} any more, which what stands for it reads"
        return None


def _home(place: str, text: Text) -> str | None:
    """The module in whose text a class is, followed through imports; None where that leads nowhere."""
    module, _, kind = place.partition(":")
    for _ in range(_MAX_IMPORTS):
        found = text(module)
        if found is None:
            return None
        if not kind or _has(found, f"class {kind}"):
            return module
        imported = re.search(rf"^\s*from (\S+) import (?:\([^)]*?|[^(\n]*?)\b{kind}\b", found, re.MULTILINE)
        if imported is None or imported[1].startswith("."):
            return None
        module = imported[1]
    return None


def _has(text: str, words: str) -> bool:
    """Whether the words stand there whole. A pattern that began with their border would be tried at every letter."""
    return re.search(rf"{words}(?<!\w{words})\b", text) is not None


def nothing() -> Reads:
    return Reads()


@functools.cache
def read(path: Path) -> Reads:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        return Reads(problem=f"{path} cannot be read, so what ours read of the host is not looked for: {error}")
    is_right = isinstance(found, dict) and all(
        isinstance(entry, list) and len(entry) > 1 and all(isinstance(word, str) for word in entry)
        for entries in found.values()
        for entry in (entries if isinstance(entries, list) else [None])
    )
    if not is_right:
        return Reads(problem=f"{path} is not what its name says, so what ours read of the host is not looked for")
    return Reads({module: tuple(map(tuple, entries)) for module, entries in found.items()})
