"""What contracts were found to be like in a release's own files when this package was made: so no server parses them.

A JSON file a release, {"files": {module: digest of its file}, "fits": {question: "DIGEST MODULE .."}}: digest of a
definition, and the modules that were read for it. Written by tests/patching/review.py. An answer is for that very
question (target, contract, caller) about those very bytes; whatever differs, and what did not fit, is parsed.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deepseek_v4_sm120.patching.contract import Contract, Finding


@dataclass(frozen=True)
class KnownFiles:
    """problem: why what is there could not be read; then everything is parsed."""

    files: Mapping[str, str] = field(default_factory=dict)
    fits: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None

    def finding(
        self, where: str, contract: Contract, caller: str | None, digest_of: Callable[[str], str | None]
    ) -> Finding | None:
        """What `contract.check` would find; None where nobody knows. digest_of: module -> digest of its file here."""
        fit = self.fits.get(question(where, contract, caller))
        if fit is None:
            return None
        definition, *modules = fit.split()
        are_same = all(digest_of(module) == self.files[module] for module in modules)
        return Finding(None, definition) if are_same else None


def question(where: str, contract: Contract, caller: str | None) -> str:
    return hashlib.sha256(repr((where, contract, caller)).encode()).hexdigest()[:16]


def nothing(release: str | None) -> KnownFiles:
    return KnownFiles()


@functools.cache
def read(folder: Path, release: str | None) -> KnownFiles:
    """Of a release that nobody recorded: nothing."""
    path = folder / f"{release}.json"
    if not path.exists():
        return KnownFiles()
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        return KnownFiles(problem=f"{path} cannot be read, so that a start takes longer: {error}")
    if not _is_right(found):
        return KnownFiles(problem=f"{path} is not what its name says, so that a start takes longer")
    return KnownFiles(found["files"], found["fits"])


def _is_right(found: object) -> bool:
    if not isinstance(found, dict) or found.keys() != {"files", "fits"}:
        return False
    files, fits = found["files"], found["fits"]
    if not all(
        isinstance(one, dict) and all(isinstance(words, str) for words in one.values()) for one in (files, fits)
    ):
        return False
    read = [fit.split()[1:] for fit in fits.values()]
    return all(modules and files.keys() >= set(modules) for modules in read)
