"""What the user sees: one log line, warnings, a JSON file per process, the status table."""

import atexit
import json
import logging
import os
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import deepseek_v4_sm120
from deepseek_v4_sm120 import REPORT, patching
from deepseek_v4_sm120.patching import lifetime, report_files
from deepseek_v4_sm120.patching.steering import NOT_APPLICABLE, ON
from deepseek_v4_sm120.settings import unknown_variables
from deepseek_v4_sm120.sglang_patches import device_gate

TOLD = "_DSV4_SM120_TOLD"  # checksums of what was told: children inherit it and do not say it again; no user's setting

_LOGGER = logging.getLogger("deepseek_v4_sm120")
_write_lock = threading.Lock()
# patch name -> (one line for status, what it is made of), both asked when the report is written
_notes: dict[str, tuple[Callable[[], str], Callable[[], dict]]] = {}


def our_version() -> str:
    return deepseek_v4_sm120.__version__


def info(text: str) -> None:
    _say(logging.INFO, text)


def warn(text: str) -> None:
    _say(logging.WARNING, text)


def warn_once(text: str) -> None:
    """A warning that a server's processes would all repeat: the first one says it."""
    mark = f"{zlib.crc32(text.encode()):08x}"
    told = [known for known in os.environ.get(TOLD, "").split(",") if known]
    if mark not in told:
        os.environ[TOLD] = ",".join((*told, mark))
        warn(text)


def surroundings() -> list[str]:
    """What is wrong around us and stops nothing: variables that are none of ours, places that others may not find."""
    of_path = filter(None, (patching.relative_entry(), patching.other_copies()))
    return [*unknown_variables(os.environ), *patching.relative_places(), *of_path]


def _say(level: int, text: str) -> None:
    """Through the host's logging where it is set up, else to stderr: early in a process nothing is."""
    if logging.getLogger().handlers and _LOGGER.isEnabledFor(level):
        _LOGGER.log(level, text)
    else:
        sys.stderr.write(f"{text}\n" if text.startswith("deepseek_v4_sm120") else f"deepseek_v4_sm120: {text}\n")


def summary(engine) -> str:
    """One line: what is in place in this process, what waits, what is left out."""
    names, told = {}, set()
    for state in ("BROKEN", "APPLIED", "READY", "UNSUPPORTED"):  # a patch with several places is told once
        found = [r.patch.name for r in engine.records if r.state == state and r.patch.name not in told]
        names[state] = list(dict.fromkeys(found))
        told.update(found)
    unreviewed = list(dict.fromkeys(r.patch.name for r in engine.records if r.review.startswith("UNREVIEWED")))
    parts = [f"deepseek_v4_sm120 {our_version()} pid {os.getpid()}: {engine.release}"]
    if engine.settings.force:
        parts.append(f"VALIDATION MODE {engine.settings.force}")
    if engine.settings.shadow:
        parts.append(f"SHADOW MODE {engine.settings.shadow}: each call runs ours and SGLang's")
    parts += [f"{state.lower()} {', '.join(found)}" for state, found in names.items() if found]
    parts += [f"UNREVIEWED {', '.join(unreviewed)}"] if unreviewed else []
    return "; ".join(parts)


def as_dict(engine) -> dict:
    """Everything that is known about this process, JSON-able."""
    import dataclasses

    return {
        "deepseek_v4_sm120": our_version(),
        "pid": os.getpid(),
        "process": lifetime.of_this(),
        "command": sys.argv[:1],
        "python": sys.version.split()[0],
        engine.host: engine.version,
        "settings": dataclasses.asdict(engine.settings),
        "patches": [
            {
                "patch": r.patch.name,
                "target": r.where,
                "state": r.state,
                "reason": r.reason,
                "review": r.review,
                "digest": r.digest,
                "still_original_in": r.by_name,
            }
            for r in engine.records
        ],
        "defaults": default_rows(engine),
        "profile": engine.profile.describe(),
        "stops": engine.disagreements + engine.problems(),
        "notes": [describe() for describe, _ in list(_notes.values())],
        "found": {name: found() for name, (_, found) in list(_notes.items())},
        "devices_served": {str(index): served for index, served in device_gate.answers().items()},
        **_shadow(engine),
    }


def default_rows(engine) -> list[dict]:
    """The changed defaults. One that is on by patches alone is as little in place as they are, and their own rows say
    why."""
    in_place, rows = engine.in_place(), engine.steering.as_rows()
    patches = [record.patch for record in engine.records]
    for row in rows:
        by = {patch.name for patch in patches if row["default"] in (patch.name, patch.default)}
        if row["state"] == ON and by and not row["would_set"] and in_place.isdisjoint(by):
            row["state"], row["reason"] = NOT_APPLICABLE, f"without {', '.join(sorted(by))}"
    return rows


def _shadow(engine) -> dict:
    """The shadow's measurements; shadow.report() reads host memory only, so any thread may ask at any time."""
    shadow = sys.modules.get("deepseek_v4_sm120.sglang_patches.shadow") if engine.settings.shadow else None
    if shadow is None:
        return {"shadow": [], "shadow_summary": []}
    rows = shadow.report()
    return {"shadow": rows, "shadow_summary": [shadow.describe(line) for line in shadow.summary(rows)]}


def add_note(patch_name: str, describe: Callable[[], str], found: Callable[[], dict] = dict) -> None:
    """`status` shows describe() for this process, --json found() too, JSON-able; they must make no CUDA call."""
    _notes[patch_name] = describe, found


def forget_notes() -> None:
    """What was noted of an earlier server of this process."""
    _notes.clear()


def start(engine) -> None:
    """Write the first report and see to it that the last state is written; nothing without DSV4_SM120_REPORT."""
    if engine.settings.report:
        write(engine)
        atexit.register(write, engine)


def write(engine=None) -> None:
    """This process's file in DSV4_SM120_REPORT (report_files.py), replaced as a whole; any thread may ask for it. What
    prevents it is told once and stops nothing."""
    engine = engine or patching.active_engine()
    if engine is None or not engine.settings.report:
        return
    with _write_lock:
        try:
            text = json.dumps(as_dict(engine), indent=1)
            report_files.replace(Path(engine.settings.report), os.getpid(), text)
        except OSError as error:
            why = error.strerror or str(error)
            warn_once(f"no reports in {REPORT}={engine.settings.report}: {why}; all else goes on")


def by_reason(problems: list[str]) -> list[str]:
    """Of sentences "<patch>: <reason>" one for each reason, with all its patches."""
    found: dict[str, list[str]] = {}
    for problem in problems:
        name, _, reason = problem.partition(": ")
        is_of_a_patch = reason and " " not in name
        found.setdefault(reason if is_of_a_patch else problem, []).extend([name] if is_of_a_patch else [])
    return [": ".join(filter(None, (", ".join(names), reason))) for reason, names in found.items()]


def table(rows: list[tuple[str, ...]]) -> str:
    """Left-aligned columns; the last one is free text."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)] + [0]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)
