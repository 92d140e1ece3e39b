"""What a gate says: passed or not, why, and everything needed to see it again."""

from __future__ import annotations

import datetime
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass
class Verdict:
    """`passed` None: the gate ran and says nothing (random weights), or could not finish (`incomplete`)."""

    gate: str
    passed: bool | None
    summary: str
    findings: list[str] = field(default_factory=list)  # each a fault, or a tie that was accepted and is stated
    figures: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    incomplete: str = ""
    details: dict = field(default_factory=dict)

    @property
    def word(self) -> str:
        if self.incomplete:
            return "INCOMPLETE"
        return {True: "PASS", False: "FAIL", None: "NO VERDICT"}[self.passed]

    def text(self) -> str:
        lines = [f"{self.gate}: {self.word}: {self.incomplete or self.summary}"]
        lines += [f"  {name} {value:.6g}" for name, value in self.figures.items()]
        lines += [f"  - {finding}" for finding in self.findings[:20]]
        if len(self.findings) > 20:
            lines.append(f"  - and {len(self.findings) - 20} more, in the JSON")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def write(self, path: Path, command: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        path.write_text(
            json.dumps({"date": now, "command": command, "verdict": self.word, **asdict(self)}, indent=1) + "\n"
        )


def markdown(files: dict[str, Path]) -> str:
    """A table of the verdicts in these JSON files, {what the row is called: file}."""
    lines = ["| gate | verdict | what it saw |", "|---|---|---|"]
    for name, path in files.items():
        found = json.loads(path.read_text())
        figures = ", ".join(f"{name} {value:.4g}" for name, value in found["figures"].items())
        seen = "; ".join(filter(None, [found["incomplete"] or found["summary"], figures, *found["notes"]]))
        lines.append(f"| {name} | {found['verdict']} | {seen.replace('|', '/')} |")
    return "\n".join(lines)
