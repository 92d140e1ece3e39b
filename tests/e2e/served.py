"""What the stages of servers over HTTP (soak_stage.py, start_stage.py, shortage_stage.py) share: their command line and
what they leave; and a server of the harness's model with what a user has on top (a grammar backend, a tool parser), and
with the plugin that tells what its schedulers hold and compile."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bench.serving.server_process import ServerProcess
from tests.e2e.faults_stage import missing_for_http, release
from tests.e2e.serving_stage import environment_of, flags
from tests.e2e.stages import SIDE_BY_SIDE_ENVIRONMENT
from tests.e2e.what_ran import commit, device

REPO = Path(__file__).resolve().parent.parent.parent
_catching = threading.Lock()  # environment_of takes the process's own exec for a moment
WATCH = Path(__file__).resolve().parent / "watch_plugin"
END = 20_000  # characters of a log's start, and of its end, that are kept


def parser(stage: str, about: str, port: int) -> argparse.ArgumentParser:
    """With what each stage takes. port: of its first server."""
    found = argparse.ArgumentParser(description=about)
    found.add_argument("--harness", type=Path, default=Path(os.environ.get("E2E_HARNESS", REPO / ".e2e/tools")))
    found.add_argument("--patch", type=Path, default=REPO / "build", help="the built folder that users mount")
    found.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    found.add_argument("--models", type=Path, default=Path("/tmp/models_serving"))
    found.add_argument("--work", type=Path, default=Path(f"/tmp/dsv4_sm120_{stage}"), help="the servers' logs, whole")
    found.add_argument("--port", type=int, default=port, help="of the first; the others' are 1,500 apart")
    found.add_argument("--limit-s", type=float, default=190)
    found.add_argument("--start-s", type=float, default=120, help="that a server may take to start")
    found.add_argument("--commit", help="of the patch, where this is a copy without git")
    return found


def run(name: str, arguments: argparse.Namespace, clear: Callable[[Path], None], make: Callable) -> int:
    """A stage from its arguments to collect.py's verdict. clear: of what an earlier run left in --work. What is made
    has run(), command, its options as they were asked, and found(), what collect.py reads under the stage's name."""
    for folder in ("harness", "patch", "out", "models", "work"):
        setattr(arguments, folder, getattr(arguments, folder).resolve())
    for path in (arguments.harness / "run_engine.py", arguments.patch / "sitecustomize.py"):
        if not path.exists():
            raise SystemExit(f"{name}_stage: {path} does not exist (--harness, --patch)")
    if missing := missing_for_http():
        raise SystemExit(f"{name}_stage: SGLang's HTTP front needs {', '.join(missing)} (README: Servers over HTTP)")
    arguments.out.mkdir(parents=True, exist_ok=True)
    clear(arguments.work)
    arguments.work.mkdir(parents=True, exist_ok=True)
    stage = make(arguments)
    stage.run()
    table = as_stage(name, arguments, stage)
    logs = [(log.stem, log.read_text(errors="replace")) for log in sorted(arguments.work.glob("*.log"))]
    (arguments.out / f"{name}_logs.txt").write_text("\n".join(f"==== {of}\n{ends(log)}" for of, log in logs))
    path = arguments.out / f"stage_{name}.json"
    path.write_text(json.dumps(table, indent=1))
    collect = Path(__file__).with_name("collect.py")
    return subprocess.run([sys.executable, str(collect), str(path)], check=False).returncode


def ends(log: str) -> str:
    """A log's start and its end: where the time to the first token goes, and how the server ended."""
    return log if len(log) <= 2 * END else f"{log[:END]}\n...\n{log[-END:]}"


def as_stage(name: str, arguments: argparse.Namespace, stage) -> dict:
    """In the form of run_stage's files."""
    return {
        "stage": name,
        "device": device(),
        "date": time.strftime("%Y-%m-%d"),
        "commit": arguments.commit or commit(arguments.patch),
        "command": f"python3 tests/e2e/{name}_stage.py {stage.command}".strip(),
        "cases": {},
        "differences": [],
        name: {"sglang": release(), **stage.found()},
    }


def server(name: str, harness, options, port: int, work: Path, environment: dict, watch: Path) -> ServerProcess:
    """Not started. Its log is work/name.log; `watch` is where the plugin writes."""
    arguments, _ = harness.engine_args(options)
    arguments.pop("skip_tokenizer_init")
    arguments["tool_call_parser"] = "deepseekv4"
    if importlib.util.find_spec("xgrammar") is not None:
        arguments["grammar_backend"] = "xgrammar"
    with _catching:
        base = environment_of(harness, options)
    base = {k: v for k, v in base.items() if not k.startswith(("DSV4_", "E2E_FORCE"))}
    base |= SIDE_BY_SIDE_ENVIRONMENT | {"SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0", "E2E_WATCH": str(watch)}
    base["PYTHONPATH"] = os.pathsep.join(filter(None, (base.get("PYTHONPATH"), str(WATCH))))
    words = [sys.executable, "-m", "sglang.launch_server", "--port", str(port), *flags(arguments)]
    url = f"http://127.0.0.1:{port}"
    return ServerProcess(name, f"exec {shlex.join(words)}", url, work / f"{name}.log", base | environment)


def compiles(watch: Path, begin: float, end: float) -> list | None:
    """[[seconds behind `begin`, kernel, did Triton compile it, seconds]] of the schedulers; None: the plugin never
    wrote."""
    every = [json.loads(line) for path in sorted(watch.glob("*.compiles")) for line in path.read_text().splitlines()]
    found = [[round(at - begin, 2), *rest] for at, *rest in every if begin <= at < end]
    return found if any(watch.glob("*.json")) else None
