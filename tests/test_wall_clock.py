"""A clock that jumps (NTP, a suspended machine, a container's host) must neither end a wait of ours nor keep it up."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PACKAGE = REPO / "deepseek_v4_sm120"
# what reads the wall clock, and what a date may be written with
WALL = {"time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.ctime", "time.strftime", "time.asctime"}
WALL |= {"datetime.datetime.now", "datetime.datetime.utcnow", "datetime.datetime.today", "datetime.date.today"}
WALL |= {"time.clock_gettime", "time.clock_gettime_ns"}
DATES = {"commands/calibrate/command.py": {"datetime.date.today"}}  # of a profile
DATES |= {"commands/doctor/attached.py": {"datetime.datetime.now"}}  # of a file for an issue
DATES |= dict.fromkeys(("commands/layers/asking.py", "sglang_patches/layer_record.py"), {"time.time"})  # of a record
IMPORTED = re.compile(r"^\s*(import|from) (.*, )?(time|datetime)\b", re.MULTILINE)
# of C++ and CUDA; a kernel's clock (globaltimer) is the card's own
WALL_IN_C = re.compile(r"system_clock|CLOCK_REALTIME|gettimeofday|\btime\s*\(\s*(NULL|nullptr|0)\s*\)|utc_clock")
SHIM = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long jump(void) { static int calls; return ++calls % 2 ? 86400 : -86400; }
int clock_gettime(clockid_t id, struct timespec* t) {
  long failed = syscall(SYS_clock_gettime, id, t);
  if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) t->tv_sec += jump();
  return failed;
}
int gettimeofday(struct timeval* t, void* zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  t->tv_sec = now.tv_sec, t->tv_usec = now.tv_nsec / 1000;
  return 0;
}
time_t time(time_t* out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}
"""
WAITS = """
import queue, select, socket, subprocess, sys, threading, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.doctor import http_get
from deepseek_v4_sm120.patching import report_files

times = [time.time() for _ in range(4)]
assert max(times) - min(times) > 86400, "the clock does not jump"

def took(wait, least):
    begin = time.monotonic()
    wait()
    seconds = time.monotonic() - begin
    assert least <= seconds < 20, (wait, seconds)

def silent():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        try:
            http_get.get(f"http://127.0.0.1:{server.getsockname()[1]}/")
        except CommandError as error:
            assert "has not answered whole" in str(error), error
        else:
            raise AssertionError("a silent server answered")

def worker():
    try:
        subprocess.run(["sleep", "60"], timeout=0.2)
    except subprocess.TimeoutExpired:
        pass

def empty():
    try:
        queue.Queue().get(timeout=0.2)
    except queue.Empty:
        pass

http_get.LIMIT_S = 0.2
took(silent, 0.15)
took(worker, 0.15)
took(empty, 0.15)
took(lambda: threading.Event().wait(0.2), 0.15)  # the watch over the other ranks, the shadow's writer
took(lambda: select.poll().poll(200), 0.15)
folder = Path(sys.argv[2])
text = '{"deepseek_v4_sm120": "1", "pid": 5, "patches": [], "notes": [], "shadow_summary": []}'
for _ in range(3):  # a report is known again by what a jump does not change
    report_files.replace(folder, 5, text)
assert len(report_files.read(folder)[0]) == 1
print("all waits kept their time")
"""


def dotted(node: ast.expr) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([*([node.id] if isinstance(node, ast.Name) else []), *parts[::-1]])


def wall_clocks(text: str) -> set[str]:
    """What of WALL a module names, by whatever name it imports it."""
    tree, names = ast.parse(text), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(a.asname or a.name): a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {(a.asname or a.name): f"{node.module}.{a.name}" for a in node.names}
    found = {dotted(node) for node in ast.walk(tree) if isinstance(node, (ast.Attribute, ast.Name))}
    whole = {".".join(filter(None, (names.get(f.partition(".")[0], f.partition(".")[0]), f.partition(".")[2])))
             for f in found}  # fmt: skip
    return whole & WALL


def test_nothing_of_ours_looks_at_the_wall_clock():
    assert wall_clocks("import time as t\nfrom datetime import datetime\nt.time()\ndatetime.now()") == {
        "time.time",
        "datetime.datetime.now",
    }
    assert wall_clocks("from time import time\nimport datetime\ntime()\ndatetime.date.today()") == {
        "time.time",
        "datetime.date.today",
    }
    texts = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    found = {name: wall_clocks(text) for name, text in texts.items() if IMPORTED.search(text)}
    assert len(found) > 5 and {name: used for name, used in found.items() if used} == DATES
    sources = [path for pattern in ("*.cu", "*.cuh", "*.h", "*.cpp") for path in (REPO / "csrc").rglob(pattern)]
    assert len(sources) > 30
    assert [str(path) for path in sources if WALL_IN_C.search(path.read_text())] == []


def test_waits_keep_their_time_under_a_clock_that_jumps(tmp_path):
    """A day forth and back with every look at it."""
    source, shim = tmp_path / "shim.c", tmp_path / "shim.so"
    source.write_text(SHIM)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(shim), str(source)], check=True)
    line = [sys.executable, "-c", WAITS, str(REPO), str(tmp_path / "reports")]
    environment = os.environ | {"LD_PRELOAD": str(shim)}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "all waits kept their time" in done.stdout, done.stdout + done.stderr
