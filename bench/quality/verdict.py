"""What a gate says: passed or not, why, and everything needed to see it again. And what every gate does with its
options: the server that is asked, and counts that must not be zero.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.serving.endpoint import Endpoint
from deepseek_v4_sm120.commands.disclosure import printable

REDACTED = "[api key]"
CHANCE = 0.01  # what a server at its bar misses it by no more seldom than this is no fault of it


def endpoint_of(options: argparse.Namespace, url: str | None = None) -> Endpoint:
    """The server under test, or the one at `url`, with the time limits and the key of the command line."""
    return Endpoint(url or options.url, options.timeout, options.api_key, options.total_timeout)


def at_least(gate: str, least: int, **values: float) -> None:
    """Raise ValueError (wrong usage) unless each option of these names (as argparse stores them) is so great: a run
    that asks for nothing must not end with a verdict.
    """
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{gate}: --{name.replace('_', '-')} must be at least {least}, got {value:g}")


def check_bar(gate: str, score: float, name: str = "min-score") -> None:
    """Raise ValueError (wrong usage) unless this option is a bar that can be missed and can be met."""
    if not 0 < score <= 1:
        raise ValueError(f"{gate}: --{name} must be above 0 and at most 1, got {score:g}")


def too_few(right: int, asked: int, bar: float) -> str:
    """Why `right` of `asked`, below `bar`, do not say that the server is: one that is right in just that share is right
    in no more of them in CHANCE of such runs or more. "" if they do, or are not below it.
    """
    if asked < 1 or right >= bar * asked or bar >= 1:
        return ""
    each = (math.log(bar), math.log1p(-bar), math.lgamma(asked + 1))
    chance = sum(
        math.exp(each[2] - math.lgamma(k + 1) - math.lgamma(asked - k + 1) + k * each[0] + (asked - k) * each[1])
        for k in range(right + 1)
    )
    if chance < CHANCE:
        return ""
    return (
        f"{right} of {asked} is below the bar, {bar:.0%}, by no more than a server at the bar is by chance in "
        f"{chance:.0%} of such runs: ask more"
    )


def without(value: object, secret: str | None) -> object:
    """`value` (of JSON's types) with `secret` replaced in every text."""
    if not secret:
        return value
    if isinstance(value, str):
        return value.replace(secret, REDACTED)
    if isinstance(value, dict):
        return {without(name, secret): without(one, secret) for name, one in value.items()}
    return [without(one, secret) for one in value] if isinstance(value, (list, tuple)) else value


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

    def text(self, secret: str | None = None) -> str:
        lines = [f"{self.gate}: {self.word}: {self.incomplete or self.summary}"]
        lines += [f"  {name} {value:.6g}" for name, value in self.figures.items()]
        lines += [f"  - {finding}" for finding in self.findings[:20]]
        if len(self.findings) > 20:
            lines.append(f"  - and {len(self.findings) - 20} more, in the JSON")
        return printable(without("\n".join([*lines, *(f"  note: {note}" for note in self.notes)]), secret))

    def write(self, path: Path, command: str, secret: str | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        found = without({"date": now, "command": command, "verdict": self.word, **asdict(self)}, secret)
        path.write_text(json.dumps(found, indent=1) + "\n")


def markdown(files: dict[str, Path]) -> str:
    """A table of the verdicts in these JSON files, {what the row is called: file}. ValueError: one holds no verdict."""
    lines = ["| gate | verdict | what it saw |", "|---|---|---|"]
    for name, path in files.items():
        try:
            found = json.loads(path.read_text())
            figures = ", ".join(f"{name} {value:.4g}" for name, value in found["figures"].items())
            seen = "; ".join(filter(None, [found["incomplete"] or found["summary"], figures, *found["notes"]]))
            lines.append(f"| {name} | {found['verdict']} | {seen.replace('|', '/')} |")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} holds no verdict of a gate ({type(error).__name__}: {error})") from error
    return "\n".join(lines)
