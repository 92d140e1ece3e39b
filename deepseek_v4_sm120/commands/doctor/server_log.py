"""What of a server's log may be posted: its last start whole, behind "ready" only what tells of faults and of speed. No
line of `--log-requests`, which has prompts and answers; of errors that quote what they were given only the name."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator

from deepseek_v4_sm120.commands.serve.command import READY

BEGINS = "server_args="  # in SGLang's first line of a start, in all releases
FIRST, LAST, BEFORE = 150, 250, 20  # lines of a start, and in front of it
MOST_KEPT = 10_000  # lines of a start until it is over
MOST_FAULTS, MOST_PASSES = 120, 12
LINE, ARGUMENTS = 600, 20_000  # signs that are kept of a line, and of that with all arguments
OF_REQUESTS = re.compile(r"\b(?:Receive|Finish)[\w ]*: obj=|request\.(?:received|finished)|ReqInput\(|\bmessages=")
PASSES = ("Prefill batch", "Decode batch")
FAULTS = re.compile(
    r"(?i)deepseek_v4_sm120|Traceback \(most|fatal python error|watchdog timeout|hit an exception|SIGQUIT|"
    r"out of memory|cuda error|nccl (?:warn|error)|illegal memory access|unspecified launch failure|"
    r"segmentation fault|^killed$"
)
OF_SCHEMAS = "grammar"  # in lines that quote a request's schema
FRAME = re.compile(r'^(?:\[[^\]]*\] )?\s+(?:File "|\^|~|\S)')
ERROR = re.compile(r"^(?:\[[^\]]*\] )?([\w.]+(?:Error|Exception|Exit|Interrupt))\b(:.*)?$")
# whose words are of code and cards, not of what a request said
WITH_WORDS = re.compile(
    r"(?:Runtime|Assertion|Import|ModuleNotFound|Memory|OS|Timeout|Attribute|Patch|Accelerator)Error"
)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def excerpt(lines: Iterable[str]) -> Iterator[str]:
    """lines: of the log, from its beginning."""
    start, faults, passes, left_out = _read(lines)
    if not start and not faults and not any(passes.values()):
        yield "nothing in it that could be shown"
        return
    yield from start[: FIRST + BEFORE]
    if len(start) > FIRST + BEFORE + LAST:
        yield "[lines of the start left out]"
    yield from start[FIRST + BEFORE :][-LAST:]
    yield f"[behind the start: faults, and the last {MOST_PASSES} passes of each kind; {left_out} other lines left out]"
    yield from faults
    for kind in passes.values():
        yield from kind


def _read(lines: Iterable[str]) -> tuple[list[str], list[str], dict[str, deque], int]:
    """(the last start, faults behind it, passes behind it, how many lines are not among these)."""
    start: list[str] = []
    faults: deque[str] = deque(maxlen=MOST_FAULTS)
    passes = {kind: deque(maxlen=MOST_PASSES) for kind in PASSES}
    is_start, has_begun, is_frame, left_out = True, False, False, 0
    for raw in lines:
        line = _ESCAPE.sub("", raw.rstrip("\r\n").rpartition("\r")[2])
        is_request, is_pass = OF_REQUESTS.search(line) is not None, any(kind in line for kind in PASSES)
        if is_start and not has_begun and (is_request or is_pass):  # no start: what is in front may be of requests, too
            is_start = False
            start.clear()
        if is_request:
            is_frame, left_out = False, left_out + 1
            continue
        if BEGINS in line:
            ended = start if is_start else list(faults)  # why there is another start, or what was said in front of it
            start, is_start, has_begun, left_out = [*ended[-BEFORE:], line[:ARGUMENTS]], True, True, 0
            faults.clear()
            for kind in passes.values():
                kind.clear()
            continue
        if is_start:
            start.append(line[:LINE])
            is_start = READY not in line
            del start[FIRST + BEFORE : -MOST_KEPT]
            continue
        kept, is_frame = _behind(line, is_frame)
        if kept is not None:
            faults.append(kept)
        elif (kind := next((kind for kind in PASSES if kind in line), None)) is not None:
            passes[kind].append(line[:LINE])
        else:
            left_out += 1
    return start, list(faults), passes, left_out


def _behind(line: str, is_frame: bool) -> tuple[str | None, bool]:
    """(what is kept of a line behind the start, whether the next may be a traceback's)."""
    error = ERROR.match(line)
    if error is not None:
        is_told = not error[2] or (WITH_WORDS.search(error[1]) and OF_SCHEMAS not in error[2])
        return (line if is_told else f"{line[: error.end(1)]}: what it says is left out")[:LINE], False
    if FAULTS.search(line) and OF_SCHEMAS not in line:
        return line[:LINE], "Traceback" in line or is_frame
    if is_frame and FRAME.match(line):
        return line[:LINE], True
    return None, False
