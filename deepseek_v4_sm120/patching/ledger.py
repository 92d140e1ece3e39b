"""Which definitions of which release of the host a human has read: a JSON file {release: {"module:qualname": digest}}.

Written by tests/patching/review.py, read by the engine of each process, once.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Ledger:
    """releases: release -> where -> digest. problem: why it could not be read; then nothing counts as reviewed."""

    releases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    problem: str | None = None

    def of(self, where: str) -> dict[str, str]:
        """Release -> digest of one definition, in the order of the file, which is that of the releases."""
        return {release: known[where] for release, known in self.releases.items() if where in known}


@functools.cache
def read(path: Path) -> Ledger:
    """The ledger in a file. A damaged one stops no server: everything is unreviewed then, and says why."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        return Ledger(problem=f"{path} cannot be read: {error}")
    is_ledger = isinstance(found, dict) and all(
        isinstance(known, dict) and all(isinstance(digest, str) for digest in known.values())
        for known in found.values()
    )
    return Ledger(found) if is_ledger else Ledger(problem=f"{path} is not {{release: {{where: digest}}}}")
