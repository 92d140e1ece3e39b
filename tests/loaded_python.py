"""Pythons that begin with torch, or more, imported: forks of one process that did it, for tests that start many.

    Loaded(folder, "torch").command + [script or -c code, arguments]        where a test would start sys.executable

What is started is a real process, a thin one (loaded_start.py), with its own input, output, environment and end. It
hands these to the process that has imported (_serve), which forks: the fork has them as a Python started anew would,
PYTHONPATH and its sitecustomize included, and runs the code. Who kills the one kills the other. What it starts in turn
as sys.executable is one as well where its environment says CHILDREN=Loaded.python; their parent is another process.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import marshal
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import types
import weakref
from pathlib import Path

START = str(Path(__file__).with_name("loaded_start.py"))
CHILDREN = "LOADED_PYTHON_OF_CHILDREN"
set_by_imports: dict[str, str] = {}  # variables
compiled: dict[tuple, types.CodeType] = {}  # scripts that ran, by their path, time and size
# here and of what tests: what is imported and parsed lives long, and a test leaves a dozen objects in cycles
COLLECTOR = (50_000_000, 20, 20)
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # one: a fork has none of the others


class Loaded:
    """The process that has imported `modules`, from when a command is first asked for; `path` is behind its sys.path
    until then, `environ` in its environment; `start`: another one's command, of which it is a fork itself."""

    def __init__(
        self,
        folder: Path,
        *modules: str,
        path: tuple[str, ...] = (),
        environ: dict[str, str] | None = None,
        start: list[str] | None = None,
    ):
        self._address, self._modules = str(folder / "socket"), modules
        self._path, self._environ = path, environ or {}
        self._start = start or [sys.executable, "-s"]
        self._process: subprocess.Popen | None = None

    @property
    def command(self) -> list[str]:
        if self._process is None:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(self._address)
            listener.listen(64)
            words = [*self._start, __file__, "serve", str(listener.fileno()), os.pathsep.join(self._path)]
            environ = {k: v for k, v in os.environ.items() if not k.startswith(("DSV4_", "PYTHON"))}
            environ |= dict.fromkeys(THREADS, "1") | self._environ
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
            self._process = subprocess.Popen(
                [*words, *self._modules], env=environ, pass_fds=[listener.fileno()], **pipes
            )
            listener.close()
        return [sys.executable, "-I", "-S", START, self._address]

    @property
    def python(self) -> str:
        """A program that takes what stands behind `command`."""
        program = Path(self._address).with_name("python")
        program.write_text(f'#!/bin/sh\nexec {shlex.join(self.command)} "$@"\n')
        program.chmod(0o755)
        return str(program)

    def close(self) -> None:
        if self._process is not None:
            self._process.stdin.close()  # by which it ends
            self._process.wait()


def _asked(connection: socket.socket) -> tuple[list, list[int]] | None:
    """What is to run, and with which files; None where who asked has gone meanwhile."""
    size, files, _, _ = socket.recv_fds(connection, 8, 64)
    told, wanted = b"", int.from_bytes(size, "little") or 1
    while len(told) < wanted and (part := connection.recv(wanted - len(told))):
        told += part
    if len(size) == 8 and len(told) == wanted:
        return marshal.loads(told), files
    for file in files:
        os.close(file)
    return None


def _serve(listener: socket.socket) -> tuple[list[str], list[str]]:
    """Comes back in forks alone: with what to run there, and what sys.path is to have in front. A fork's end is told to
    who asked for it; one whose asker has gone is ended."""
    running: dict[int, tuple[int, int, socket.socket]] = {}  # a fork's end, and its connection's number -> both, whose
    waiting = select.poll()
    for file in (listener.fileno(), 0):
        waiting.register(file, select.POLLIN)
    while True:
        ready = [file for file, _ in waiting.poll()]
        if 0 in ready:  # whoever tests has ended
            for child, _, _ in running.values():
                os.kill(child, signal.SIGKILL)
            os._exit(0)
        if ready[0] in running:
            _tell_the_end(ready[0], running, waiting)
            continue
        connection, _ = listener.accept()
        if (asked := _asked(connection)) is None:
            connection.close()
            continue
        told, files = asked
        _script(Path(told[2], told[0][0]))
        if (child := os.fork()) == 0:
            for one in (listener, connection, *{connection for _, _, connection in running.values()}):
                one.close()
            for end in {end for _, end, _ in running.values()}:
                os.close(end)
            return _become(told[0], files, *told[1:])
        for file in files:
            os.close(file)
        end = os.pidfd_open(child)
        for one in (end, connection.fileno()):
            running[one] = child, end, connection
            waiting.register(one, select.POLLIN)


def _tell_the_end(file: int, running: dict[int, tuple[int, int, socket.socket]], waiting: select.poll) -> None:
    """Of the fork whose end this is, or whose connection: then its asker has gone."""
    child, end, connection = running[file]
    if file != end:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])  # its processor time is then this one's children's
    for one in (end, connection.fileno()):
        waiting.unregister(one)
        del running[one]
    with contextlib.suppress(OSError):
        connection.sendall(status.to_bytes(8, "little", signed=True))
    connection.close()
    os.close(end)


def _become(words, files, places, folder, environ) -> tuple[list[str], list[str]]:
    """Files at the places that they had, folder, environment and the flags that it sets."""
    spare = max([*places, *files]) + 1
    for i, file in enumerate(files):  # out of the way first
        os.dup2(file, spare + i)
        os.close(file)
    for i, place in enumerate(places):
        os.dup2(spare + i, place)
        os.close(spare + i)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(set_by_imports | environ)
    sys.dont_write_bytecode = bool(environ.get("PYTHONDONTWRITEBYTECODE"))
    return words, [part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part]


def _script(path: Path) -> types.CodeType | None:
    """Compiled, once for all forks behind the first that runs it; None where there is none."""
    if not path.is_file():
        return None
    state = path.stat()
    key = (str(path), state.st_mtime_ns, state.st_size)
    if key not in compiled:
        with contextlib.suppress(SyntaxError):  # who runs it says so
            compiled[key] = compile(path.read_bytes(), path, "exec")
    return compiled.get(key)


def _as_main(words: list[str], path: list[str]) -> None:
    is_file = words[0] not in ("-c", "-m")
    sys.argv = words if is_file else [words[0], *words[2:]]
    sys.executable = os.environ.get(CHILDREN, sys.executable)
    sys.path[:0] = [part for part in path if part not in sys.path]
    importlib.invalidate_caches()
    with contextlib.suppress(ModuleNotFoundError):
        import sitecustomize  # noqa: F401
    sys.path.insert(0, str(Path(words[0]).resolve().parent) if is_file else "")
    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    code = _script(Path(words[0])) if is_file else compile(words[1], "<string>", "exec")
    if code is None:
        runpy.run_path(words[0], run_name="__main__")
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if is_file:
        main.__file__ = words[0]
    exec(code, main.__dict__)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        sys.path.pop(0)  # this file's folder
        gc.set_threshold(*COLLECTOR)  # forks have it too
        base, variables = [*sys.path], dict(os.environ)
        sys.path += [part for part in sys.argv[3].split(os.pathsep) if part]
        for name in sys.argv[4:]:
            importlib.import_module(name)
        sys.path[:] = base
        set_by_imports = {name: value for name, value in os.environ.items() if variables.get(name) != value}
        for registered in [*weakref.finalize._registry]:  # torch's operators, one by one
            registered.atexit = False
        gc.freeze()
        job = _serve(socket.socket(fileno=int(sys.argv[2])))
        status = 0
        try:
            _as_main(*job)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            if status and not isinstance(end.code, int):
                print(end.code, file=sys.stderr)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            status = 1
        threading._shutdown()  # as at the end of any Python, but for taking apart what was imported
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
