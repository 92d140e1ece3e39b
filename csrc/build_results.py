"""Runs the build's commands and keeps what they make by the content of all they read; a file's time says nothing."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

UNUSED_DAYS = 14  # after which a result goes
# that speak to the compilers beside the command
SPEAKING = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH")


class BuildError(Exception):
    """A reason for which no artifact is made, in words for whoever called the script."""


def say(text: str) -> None:
    print(f"build_artifact: {text}", flush=True)


def run(command: list[str | Path], folder: Path | None = None) -> str:
    """Output of a command, run in `folder`; BuildError with the end of what it printed when it fails."""
    words = [str(c) for c in command]
    try:
        done = subprocess.run(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder)
    except OSError as error:
        raise BuildError(f"{words[0]} does not run: {error.strerror}") from error
    if done.returncode != 0:
        raise BuildError(f"exit {done.returncode} of: {shlex.join(words)}\n{done.stdout[-6000:]}")
    return done.stdout


def check_writable(cache: Path) -> None:
    """BuildError where nothing can be kept: a home folder is not always one's own, and not always writable."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        why = f"{cache} cannot be written ({error.strerror})"
        raise BuildError(f"{why}, and keeps what was compiled; --cache DIR or XDG_CACHE_HOME names another") from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Processes that want the same lock take turns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Results:
    """What commands made, named by a digest of the command, of the tools and of all files that it reads."""

    def __init__(self, folder: Path, sources: Path, tools: str):
        self.folder, self.sources = folder, sources.resolve()
        self.tools = [tools, [os.environ.get(name) for name in SPEAKING]]
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            with suppress(FileNotFoundError):  # another checkout's build has renamed or removed it meanwhile
                if path.stat().st_mtime < time.time() - UNUSED_DAYS * 86400:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    def included(self, source: Path) -> list[Path]:
        """The source and all of the sources that it includes. For what is in <> stand the versions of the tools."""
        found, pending = [], [source]
        while pending:
            found.append(path := pending.pop())
            for name in re.findall(r'^\s*#\s*include\s*"(.+?)"', path.read_text(), re.MULTILINE):
                inner = next((p for p in (path.parent / name, self.sources / name) if p.is_file()), None)
                if inner is None:
                    raise BuildError(f"{path} includes {name}, which is not in {self.sources}")
                if (inner := inner.resolve()) not in [*found, *pending]:
                    pending.append(inner)
        return found

    def text(self, content: str) -> Path:
        """A file that has this content; any thread may ask for one."""
        named = self.folder / f"{hashlib.sha256(content.encode()).hexdigest()}.txt"
        unfinished = named.with_name(f"{os.getpid()}-{threading.get_ident()}-{named.name}")
        unfinished.write_text(content)
        return unfinished.replace(named)

    def make(self, command: list[str | Path], reads: Iterable[Path], suffix: str, kept: str | None = None) -> Path:
        """What `command -o FILE`, run among the sources, makes of the files in `reads`; what it printed is in FILE.log.

        Results that are inputs of another command need not be in `reads`: their names say what they are. Of nvcc's
        intermediate files those whose names are like `kept` are in FILE.kept.
        """
        named = {str(f.resolve()).removeprefix(f"{self.sources}/"): f for f in reads}
        files = {name: hashlib.sha256(f.read_bytes()).hexdigest() for name, f in named.items()}
        key = json.dumps([self.tools, [str(word) for word in command], files, kept])
        result = self.folder / f"{hashlib.sha256(key.encode()).hexdigest()}{suffix}"
        log = result.with_name(f"{result.name}.log")
        folder = result.with_name(f"{result.name}.kept") if kept else None
        wanted = [path for path in (result, log, folder) if path]
        if not all(path.exists() for path in wanted):
            begin, unfinished = time.monotonic(), result.with_name(f"{os.getpid()}-{result.name}")
            with tempfile.TemporaryDirectory(dir=self.folder) as own:
                keep = ["--keep", "--keep-dir", own] if folder else []
                log.write_text(run([*command, *keep, "-o", unfinished], self.sources))
                if folder:
                    folder.mkdir(exist_ok=True)
                    for path in Path(own).glob(kept):
                        path.replace(folder / path.name)
            unfinished.rename(result)
            say(f"{time.monotonic() - begin:5.1f} s for {next((n for n in files if not os.path.isabs(n)), 'linking')}")
        for path in wanted:
            os.utime(path)
        return result
