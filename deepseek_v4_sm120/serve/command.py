"""`serve`: the planned server as a child of this process. Its log goes through unchanged, stages are named."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from deepseek_v4_sm120.console import CommandError
from deepseek_v4_sm120.plan import command as plan_command
from deepseek_v4_sm120.plan import launch

PACKAGE_FOLDER = Path(__file__).resolve().parent.parent.parent
READY_TIMEOUT_S = 3600
STOP_TIMEOUT_S = 30
LAST_WORDS_S = 5  # to read what the server wrote while it stopped
POLL_S = 0.5
# words of SGLang's log -> the stage that begins there
STAGES = (
    ("Load weight begin", "loading weights"),
    ("Loading safetensors", "loading weights"),
    ("Load weight end", "weights are loaded"),
    ("Memory pool end", "the KV cache is allocated"),
    ("autotun", "tuning kernels"),
    ("Capture cuda graph begin", "capturing CUDA graphs"),
    ("Capture cuda graph end", "graphs are captured"),
    ("Uvicorn running", "warming up"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    plan_command.add_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=30000, help="port to listen on (default: 30000)")
    parser.add_argument("--dry-run", action="store_true", help="print the command and stop")
    parser.add_argument(
        "extra", nargs=argparse.REMAINDER, help="after --: arguments for sglang.launch_server; they win"
    )


def run(arguments: argparse.Namespace) -> int:
    extra = arguments.extra[1:] if arguments.extra[:1] == ["--"] else arguments.extra
    plan = launch.make(plan_command.request_of(arguments))
    if not plan.fits:
        raise CommandError(plan_command.why_not(plan))
    words, dropped = command_line(plan, arguments.host, arguments.port, extra)
    added = environment(plan, os.environ, arguments.profile)
    for name in dropped:
        _say(f"[serve] yours instead of the plan's: {name}")
    shown = " ".join(f"{name}={shlex.quote(value)}" for name, value in added.items())
    _say(f"[serve] {shown} {shlex.join(words)}")
    if arguments.dry_run:
        return 0
    _check_machine(arguments)
    return supervise(words, {**os.environ, **added}, f"http://{_reachable(arguments.host)}:{arguments.port}")


def command_line(plan: launch.Plan, host: str, port: int, extra: list[str]) -> tuple[list[str], list[str]]:
    """(words, planned flags that the user's own replace)."""
    own = {word.partition("=")[0] for word in extra if word.startswith("--")}
    kept = [flag for flag in plan.flags if flag.name not in own]
    dropped = [flag.name for flag in plan.flags if flag.name in own]
    words = [sys.executable, "-m", "sglang.launch_server", "--host", host, "--port", str(port)]
    words += [word for flag in kept for word in (flag.name, flag.value) if word]
    return words + extra, dropped


def environment(plan: launch.Plan, environ: Mapping[str, str], profile: str | None) -> dict[str, str]:
    """What is added to the environment; of the plan's variables those that the user has not set."""
    behind = [p for p in environ.get("PYTHONPATH", "").split(os.pathsep) if p and Path(p).resolve() != PACKAGE_FOLDER]
    added = {"PYTHONPATH": os.pathsep.join([str(PACKAGE_FOLDER), *behind])}
    planned = {flag.name: flag.value for flag in plan.environment}
    planned["DSV4_SM120_REPORT"] = str(Path(tempfile.gettempdir(), f"dsv4-{os.getpid()}"))
    added |= {name: value for name, value in planned.items() if name not in environ and name != "PYTHONPATH"}
    if profile is not None:
        from deepseek_v4_sm120.patching import profile as profiles

        try:
            profiles.read(profile)
        except profiles.ProfileError as error:
            raise CommandError(str(error)) from error
        added["DSV4_SM120_PROFILE"] = str(Path(profile).resolve())
    return added


def _check_machine(arguments: argparse.Namespace) -> None:
    if importlib.util.find_spec("sglang") is None:
        raise CommandError(f"SGLang is not installed for {sys.executable}; `plan` prints a docker command")
    from deepseek_v4_sm120.doctor import facts, nvidia_smi

    gpus = nvidia_smi.read(facts.run_command)
    if not gpus.gpus:
        raise CommandError(f"no GPU to serve on: {gpus.problem}")
    if arguments.gpus is not None and len(gpus.gpus) < arguments.gpus:
        raise CommandError(f"--gpus {arguments.gpus}, but this machine has {len(gpus.gpus)}")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((arguments.host, arguments.port))
        except OSError as error:
            raise CommandError(f"cannot listen on {arguments.host}:{arguments.port}: {error.strerror}") from error


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "::", "") else host


# ---- the child

_writing = threading.Lock()


def _say(text: str) -> None:
    """A whole line at once: the server's log and our own words come from two threads."""
    with _writing:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def supervise(words: list[str], environ: Mapping[str, str], url: str) -> int:
    """Run the server until it ends or Ctrl-C (or SIGTERM) comes; returns its exit status, 0 after a clean stop."""
    try:
        child = subprocess.Popen(
            words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
    except OSError as error:
        raise CommandError(f"{words[0]} does not start: {error.strerror}") from error
    log = _Log(child)
    restore = signal.signal(signal.SIGTERM, _interrupt)
    try:
        is_up = _wait_until_healthy(child, log, url)
        if is_up:
            _show_status(environ, url)
        code = child.wait()
        log.join(LAST_WORDS_S)
        _say(f"[serve] the server ended with status {code}{'' if is_up else ' before it answered'}")
        return 1 if code else 0
    except KeyboardInterrupt:
        _say("[serve] stopping")
        stop(child)
        log.join(LAST_WORDS_S)
        return 0
    finally:
        signal.signal(signal.SIGTERM, restore)
        if child.poll() is None:
            stop(child)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # workers that outlived a server that died


def _interrupt(*_) -> None:
    raise KeyboardInterrupt


def stop(child: subprocess.Popen) -> None:
    """SIGTERM to the server, which ends its workers; what is left of its session after the limit is killed."""
    with contextlib.suppress(ProcessLookupError):
        child.terminate()
    try:
        child.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        _say(f"[serve] still there after {STOP_TIMEOUT_S} s: killed")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


class _Log(threading.Thread):
    """Passes the server's lines on and names the stages that begin in them."""

    def __init__(self, child: subprocess.Popen):
        super().__init__(daemon=True)
        self.child, self.stage, self.started = child, "starting", time.monotonic()
        self.last: deque[str] = deque(maxlen=5)
        self.start()

    def run(self) -> None:
        for line in self.child.stdout:
            _say(line.rstrip("\n"))
            self.last.append(line.strip())
            stage = next((name for words, name in STAGES if words.lower() in line.lower()), self.stage)
            if stage != self.stage:
                self.stage = stage
                _say(f"[serve] {time.monotonic() - self.started:5.0f} s  {stage}")


def _wait_until_healthy(child: subprocess.Popen, log: _Log, url: str) -> bool:
    end = time.monotonic() + READY_TIMEOUT_S
    told = time.monotonic()
    while child.poll() is None and time.monotonic() < end:
        with contextlib.suppress(urllib.error.URLError, OSError):
            if urllib.request.urlopen(f"{url}/health", timeout=5).status == 200:
                _say(f"[serve] {time.monotonic() - log.started:5.0f} s  answers at {url}")
                return True
        if time.monotonic() - told > 30:
            told = time.monotonic()
            _say(f"[serve] {told - log.started:5.0f} s  still {log.stage}")
        time.sleep(POLL_S)
    if child.poll() is None:
        raise CommandError(f"the server does not answer at {url} after {READY_TIMEOUT_S} s ({log.stage})")
    return False


def _show_status(environ: Mapping[str, str], url: str) -> None:
    subprocess.run([sys.executable, "-m", "deepseek_v4_sm120", "status"], env=environ, check=False)
    # a shell without job control starts `serve &` with SIGINT ignored: that Ctrl-C is meant for others
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    stops = f"`kill {os.getpid()}`" if ignored else "Ctrl-C"
    _say(f"[serve] `doctor --url {url}` names what is slow; {stops} stops the server")
