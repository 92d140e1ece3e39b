"""Keeps one load_generator.py running and gives it jobs: importing SGLang once is dear, and both sides get the same
one.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent / "load_generator.py"


class GeneratorFailed(Exception):
    """The load generator could not be started, died, or did not answer in time."""


@dataclass(frozen=True)
class Row:
    prompt: list[int]
    output_tokens: int
    delay_s: float = 0.0


class Generator:
    """`python`: an interpreter that has SGLang. `log`: where bench_serving's own output goes. Use as a context
    manager.
    """

    def __init__(self, python: str, log: Path, start_s: float = 180.0, environment: dict[str, str] | None = None):
        self.python, self.log, self.start_s = python, log, start_s
        self.environment = dict(os.environ if environment is None else environment)
        # our patch is for servers; a client must not be changed by what is compared
        self.environment["DSV4_SM120"] = "off"
        self.process: subprocess.Popen | None = None
        self.folder = Path(tempfile.mkdtemp(prefix="serving_bench_"))
        self.module, self.versions = "", {}
        self._jobs = self._begin = 0

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *_) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> None:
        if self.process is not None and self.process.poll() is None:
            return
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            self._begin = log.tell()
            self.process = subprocess.Popen(
                [self.python, str(SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self.environment,
            )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, args=(self.process, self._answers), daemon=True).start()
        word, _, text = self._answer(self.start_s).partition(" ")
        if word != "ready":
            raise GeneratorFailed(f"the load generator did not start: {self.tail()}")
        found = json.loads(text)
        self.module, self.versions = found["module"], found["versions"]

    @staticmethod
    def _read(process: subprocess.Popen, answers: queue.Queue[str]) -> None:
        for line in process.stdout:
            answers.put(line.strip())
        answers.put("")  # it has ended

    def _answer(self, timeout_s: float) -> str:
        try:
            return self._answers.get(timeout=timeout_s)
        except queue.Empty:
            self.stop()
            raise GeneratorFailed(f"no result within {timeout_s:g} s; the load generator was stopped") from None

    def tail(self) -> str:
        """The last that this process has said; the log keeps those of earlier ones."""
        lines = self.log.read_bytes()[self._begin :].decode(errors="replace").strip().splitlines()
        return " | ".join(lines[-3:]) or "it said nothing"

    def run(
        self, base_url: str, backend: str, model: str, rows: list[Row], streams: int, ignore_eos: bool, timeout_s: float
    ) -> dict:
        """The raw outputs of bench_serving for the rows: {"outputs": [...], "failure": None or a traceback}."""
        self.start()
        self._jobs += 1
        job, result = self.folder / f"job{self._jobs}.json", self.folder / f"result{self._jobs}.json"
        content = {
            "base_url": base_url,
            "backend": backend,
            "model": model,
            "streams": streams,
            "ignore_eos": ignore_eos,
        }
        content |= {"rows": [vars(row) for row in rows], "result": str(result)}
        job.write_text(json.dumps(content))
        try:
            self.process.stdin.write(f"{job}\n")
            self.process.stdin.flush()
        except OSError as error:
            raise GeneratorFailed(f"the load generator has died: {self.tail()}") from error
        answer = self._answer(timeout_s)
        if not answer.startswith("done "):
            raise GeneratorFailed(f"the load generator failed ({answer or 'it ended'}): {self.tail()}")
        found = json.loads(result.read_text())
        job.unlink()
        result.unlink()
        return found

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
