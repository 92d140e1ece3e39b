"""Starts a side's server from its command, waits for it, notices its death, stops it with all its children."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from bench.serving.endpoint import Endpoint
from deepseek_v4_sm120.commands.disclosure import redacted

# environment that changes how a server computes; what differs here between the sides is a difference of flags
WATCHED_ENVIRONMENT = (
    "SGLANG_",
    "SGL_",
    "DSV4_",
    "CUDA_",
    "NCCL_",
    "PYTORCH_",
    "TORCH",
    "FLASHINFER_",
    "TRITON_",
    "TVM_",
    "OMP_",
    "PYTHONPATH",
)
# what a server makes up at every start
NOT_WATCHED = ("SGLANG_RUN_ID",)
STOP_S = 30.0
LAST_WORDS_S = 5.0  # to read what the server wrote before it ended


class ServerDied(Exception):
    """The server's process has ended."""


def is_watched(name: str) -> bool:
    return name.startswith(WATCHED_ENVIRONMENT) and name not in NOT_WATCHED


def watched_environment(pid: int) -> dict[str, str]:
    """The environment of the processes in the group of `pid`, as far as it matters and can be read. Later ones win."""
    found: dict[str, str] = {}
    group = os.getpgid(pid)
    for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            if os.getpgid(int(folder.name)) != group:
                continue
            entries = (folder / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        for entry in entries:
            name, _, value = entry.decode(errors="replace").partition("=")
            if is_watched(name):
                found[name] = value
    return found


def command_of(pid: int) -> str:
    """A running process's command as it may be shown."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    return shlex.join(redacted([word.decode(errors="replace") for word in words]))


class ServerProcess:
    """`command` is a shell line. Its process group is ours, so that stop() ends the workers too. What it says goes to
    the file `log`, but for keys: SGLang writes its arguments there.
    """

    def __init__(self, name: str, command: str, url: str, log: Path, environment: dict[str, str] | None = None):
        self.name, self.command, self.url, self.log = name, command, url, log
        self.environment = environment or {}
        self.process: subprocess.Popen | None = None
        self.writer: threading.Thread | None = None
        self.started_s = 0.0

    def start(self) -> None:
        if Endpoint(self.url).is_ready():
            raise ServerDied(f"{self.name}: something already answers at {self.url}; stop it or choose another port")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        log = open(self.log, "a", errors="backslashreplace")  # noqa: SIM115
        self.process = subprocess.Popen(
            ["bash", "-c", self.command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="backslashreplace",
            env={**os.environ, **self.environment},
            start_new_session=True,
        )
        self.writer = threading.Thread(target=self._write, args=(self.process.stdout, log), daemon=True)
        self.writer.start()

    def _write(self, lines, log) -> None:
        """Reads to the end, whatever becomes of the file: a server whose words nobody takes would stop."""
        is_written = True
        with lines, contextlib.suppress(OSError), log:  # closing tries once more to write what is left
            for line in lines:
                try:
                    if is_written:
                        log.write(redacted(line))
                        log.flush()
                except OSError as error:
                    print(f"{self.name}: its log {self.log} ends early: {error.strerror}", file=sys.stderr)
                    is_written = False

    def wait_ready(self, timeout_s: float) -> float:
        """Seconds until the server answered; raises ServerDied with the end of its log otherwise."""
        begin = time.monotonic()
        endpoint = Endpoint(self.url)
        while not endpoint.is_ready():
            self.check_alive()
            if time.monotonic() - begin > timeout_s:
                raise ServerDied(f"{self.name}: not ready after {timeout_s:g} s; its log ends: {self.tail()}")
            time.sleep(0.2)
        self.started_s = time.monotonic() - begin
        return self.started_s

    def check_alive(self) -> None:
        if self.process is None or self.process.poll() is not None:
            code = None if self.process is None else self.process.returncode
            raise ServerDied(f"{self.name}: the server ended (exit code {code}); its log ends: {self.tail()}")

    def tail(self) -> str:
        if self.writer is not None and self.process.poll() is not None:
            self.writer.join(LAST_WORDS_S)
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        return " | ".join(lines[-3:]) or "(empty)"

    def stop(self, wait_s: float = STOP_S) -> None:
        """Interrupt, then kill what is left of the group: a GPU must be free before the other side starts."""
        if self.process is None:
            return
        for number, most_s in ((signal.SIGTERM, wait_s), (signal.SIGKILL, STOP_S)):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                break
            deadline = time.monotonic() + most_s
            while time.monotonic() < deadline and self._group_lives():
                self.process.poll()
                time.sleep(0.05)
            if not self._group_lives():
                break
        self.process.wait()
        self.writer.join(LAST_WORDS_S)

    def _group_lives(self) -> bool:
        self.process.poll()
        try:
            os.killpg(self.process.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def watched_environment(self) -> dict[str, str]:
        return watched_environment(self.process.pid)
