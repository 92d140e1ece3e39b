"""What a soak has seen, one JSON line a request, so that it can be stopped and taken up again.

The first line says whose it is: the server's model, version, launch flags and patch, and what the soak asks for. A
state of another server says nothing of this one: it is kept aside (NAME.old, NAME.old2, ...), with a word, and a new
one is begun. So is one whose server does not tell who it is. Values of flags are kept as digests: some are secrets.
"""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path

from bench.serving.endpoint import Endpoint, ServerRefused
from bench.serving.identity import NOT_FLAGS, patch_states
from deepseek_v4_sm120.patching.json_file import load

FORMAT = 3


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


def patch_of(report: Path | None) -> dict | None:
    """Version and states of our patch by the reports of its processes (DSV4_SM120_REPORT); None: not known."""
    if report is None:
        return None
    files = sorted(report.glob("*.json"))
    if not files:
        raise ValueError(f"corruption-soak: --report {report} holds no report of DSV4_SM120_REPORT")
    states, not_known = patch_states(report)
    if states is None:
        raise ValueError(f"corruption-soak: --report: {not_known[0]}")
    found = [load(path) for path in files]  # as patch_states has read them: regular files, limited, reports
    digests = {row.get("digest") for one in found for row in one["patches"]}
    versions = sorted({str(one.get("deepseek_v4_sm120")) for one in found})
    return {"versions": versions, "states": states, "targets": digest(sorted(map(str, digests)))}


def identity(endpoint: Endpoint, report: Path | None) -> dict:
    """Who the server is, as far as HTTP and the patch's reports tell. `flags` is {} where it has no /server_info."""
    try:
        info = endpoint.server_info()
    except ServerRefused as error:
        if error.status != 404:
            raise
        info = {}
    flags = {name: digest(value) for name, value in info.items() if name not in NOT_FLAGS}
    return {
        "models": sorted(endpoint.models()),
        "version": info.get("version"),
        "flags": flags,
        "patch": patch_of(report),
    }


def difference(old: dict, new: dict) -> str:
    """What tells two identities (or what was asked for) apart, "" if nothing does."""
    found = []
    for name in sorted(old.keys() | new.keys()):
        a, b = old.get(name), new.get(name)
        if a == b:
            continue
        if name == "flags" and isinstance(a, dict) and isinstance(b, dict):
            found += [f"flag {flag}" for flag in sorted(a.keys() | b.keys()) if a.get(flag) != b.get(flag)]
        else:
            found.append(f"{name} {a} there, {b} here")
    return ", ".join(found)


class State:
    """`path` for the server and the options in `head` (identity's keys and more). `word`: what was done with an
    existing file that is of another soak, "" if nothing.
    """

    def __init__(self, path: Path, head: dict):
        self.path, self.head, self.lock = path, {"soak": FORMAT, **head}, threading.Lock()
        self.entries: list[dict] = []
        self.word = ""
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        if lines and (why := self._why_not(lines[0])):
            aside = self._aside()
            path.rename(aside)
            self.word, lines = f"{path} is of another soak ({why}): kept as {aside}, a new one begins", []
        self.entries = [entry for line in lines[1:] if (entry := self._entry(line)) is not None]
        self.earlier = len(self.entries)
        path.write_text("\n".join(json.dumps(one) for one in [self.head, *self.entries]) + "\n")

    def _why_not(self, line: str) -> str:
        """Why a state that begins with this line cannot be continued here, "" if it can."""
        try:
            head = json.loads(line)
        except ValueError:
            return "its first line is no JSON"
        if not isinstance(head, dict) or head.get("soak") != FORMAT:
            return f"its first line is {line[:60]!r}"
        if not self.head["flags"]:
            return "this server has no /server_info, so that nobody knows whether it is the same"
        return difference(head, self.head)

    def _aside(self) -> Path:
        number = 1
        while (found := self.path.with_name(f"{self.path.name}.old{number if number > 1 else ''}")).exists():
            number += 1
        return found

    @staticmethod
    def _entry(line: str) -> dict | None:
        """None: a line that was cut by a crash. Its request is sent again."""
        try:
            found = json.loads(line)
        except ValueError:
            return None
        return found if isinstance(found, dict) and isinstance(found.get("number"), int) else None

    def add(self, entry: dict) -> None:
        with self.lock:
            self.entries.append(entry)
            with open(self.path, "a") as file:
                file.write(json.dumps(entry) + "\n")

    @property
    def answers(self) -> list[dict]:
        return [entry for entry in self.entries if "output_tokens" in entry]

    @property
    def failures(self) -> list[dict]:
        return [entry for entry in self.entries if "failed" in entry]

    @property
    def fresh(self) -> list[dict]:
        """The answers of this run."""
        return [entry for entry in self.entries[self.earlier :] if "output_tokens" in entry]

    @property
    def seconds(self) -> float:
        """Of waves that brought an answer to every request."""
        return sum(entry["wave_s"] for entry in self.entries if "wave_s" in entry)

    def next_number(self) -> int:
        return max((entry["number"] for entry in self.entries), default=-1) + 1

    def numbers(self, count: int) -> list[int]:
        """The next requests to send: what was sent and has no answer, failures among it, then new ones."""
        answered, new = {entry["number"] for entry in self.answers}, self.next_number()
        again = [number for number in range(new) if number not in answered][:count]
        return again + list(range(new, new + count - len(again)))
