"""A run of tests in several processes, which are forks of the one that collected them: `-p tests.forks --forks N`.

pytest-xdist's processes import and collect all tests each, for which this suite's take ten seconds of a processor. Here
that is done once, and each fork has what was imported. A file's tests stay in one process, those of several files too
where these are marked as one (`together`), and files begin in the order of the collection. Files whose tests are marked
so (`waits`: for servers, for time) are for two processes of five, as long as there are any, and the others' last: so
neither are there moments when all wait, nor ones when none does. Each process takes the next file when it comes to the
last test of the one before, and sends reports; this one hands them on to pytest as if it had run the tests. Of a
process that ends early the tests that it did not finish have failed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import selectors
import signal
import sys
import traceback
import warnings

import pytest
from _pytest.reports import TestReport

SIZE = 4  # bytes of a number in a pipe
WAITING = 0.4  # of the processes, those that have files that wait first


def renew_thread_pool() -> None:
    """torch's, of a fork: the first thread that asks makes it anew, and of two at once the other one finds none
    ("Invalid thread pool!", once in a run of 17,000 tests)."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(torch.get_num_threads())


def pytest_addoption(parser):
    parser.addoption("--forks", type=int, default=0, help="processes that run the tests; 0: this one does")


def pytest_configure(config):
    asked_otherwise = hasattr(config, "workerinput") or config.getoption("numprocesses", None) is not None  # xdist's
    if config.getoption("forks") and not asked_otherwise:
        config.pluginmanager.register(Forks(config), "forks")


class Forks:
    def __init__(self, config: pytest.Config):
        self.config, self.hook = config, config.hook
        self.out: int | None = None  # in a fork: where reports go
        self.held: list[tuple[str, dict]] = []  # there: what is told when its test is over, in one piece
        self.ended: dict[int, str] = {}  # forks that did not end well -> how
        self.finished: set[str] = set()
        self.processes: dict[int, int] = {}  # end of its pipe -> process

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        if session.testsfailed or self.config.option.collectonly:
            return None  # pytest's own says what there is to say
        files = [list(tests) for _, tests in itertools.groupby(session.items, lambda i: getattr(i, "together", i.path))]
        self.config._tmp_path_factory.getbasetemp()
        queues = [filled(files, waits) for waits in (False, True)]
        count = min(self.config.getoption("forks"), len(files))
        for number in range(count):
            reading, writing = os.pipe()
            sys.stdout.flush()
            sys.stderr.flush()
            if (process := os.fork()) == 0:
                self.out = writing
                own = in_order(queues, number, count)
                self._be_a_fork(session, number, lambda own=own: next_of(own, files))
            os.close(writing)
            self.processes[reading] = process
        for queue in queues:
            os.close(queue)
        terminal = self.config.pluginmanager.getplugin("terminalreporter")
        terminal.showfspath = False  # letters alone, for the files' are mixed
        try:
            self._listen(session)
        finally:
            for process in self.processes.values():  # a test that failed is the last one, or somebody has had enough
                os.kill(process, signal.SIGTERM)
        for item in session.items:
            if item.nodeid not in self.finished:
                how = "; ".join(self.ended.values())
                text = f"not run to its end: a process of the run ended ({how})"
                self.hook.pytest_runtest_logreport(
                    report=TestReport(item.nodeid, item.location, {}, "failed", text, "call")
                )
        return True

    # ---- in the process that collected

    def _listen(self, session) -> None:
        selector = selectors.DefaultSelector()
        for reading in self.processes:
            selector.register(reading, selectors.EVENT_READ)
        while self.processes:
            for key, _ in selector.select():
                size = int.from_bytes(read(key.fd, SIZE), "little")
                if size:
                    for name, told in pickle.loads(read(key.fd, size)):
                        self._tell(name, told)
                        if session.shouldfail:
                            raise session.Failed(session.shouldfail)
                    continue
                selector.unregister(key.fd)
                os.close(key.fd)
                process = self.processes.pop(key.fd)
                if status := os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
                    self.ended[process] = f"exit code {status}" if status > 0 else f"signal {-status}"

    def _tell(self, name: str, told: dict) -> None:
        if name == "pytest_runtest_logreport":
            report = self.hook.pytest_report_from_serializable(config=self.config, data=told["report"])
            if report.when == "teardown":
                self.finished.add(report.nodeid)
            told = {"report": report}
        elif name == "pytest_warning_recorded":
            text, file, line = told.pop("warning")
            told["warning_message"] = warnings.WarningMessage(UserWarning(text), UserWarning, file, line)
            self.hook.pytest_warning_recorded.call_historic(kwargs=told)
            return
        getattr(self.hook, name)(**told)

    # ---- in a fork

    def _be_a_fork(self, session, number: int, take) -> None:
        code = 3
        try:
            self._prepare(number)
            renew_thread_pool()
            tests = take()
            while tests:
                following = []
                for test, after in zip(tests, [*tests[1:], None], strict=True):
                    if after is None and not session.shouldfail:
                        following = take()
                        after = following[0] if following else None
                    self.hook.pytest_runtest_protocol(item=test, nextitem=after)
                    if session.shouldfail or session.shouldstop:
                        break
                tests = [] if session.shouldfail or session.shouldstop else following
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            self._send()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _prepare(self, number: int) -> None:
        """A place of its own for files, and for what tests print."""
        plugins, factory = self.config.pluginmanager, self.config._tmp_path_factory
        plugins.unregister(plugins.getplugin("terminalreporter"))
        factory._basetemp = factory._basetemp / f"fork-{number}"
        factory._basetemp.mkdir(mode=0o700)
        capture = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()

    def _hold(self, name: str, **told) -> None:
        if self.out is not None:
            self.held.append((name, told))

    def _send(self) -> None:
        """Each piece wakes who is told, who takes a core from a test."""
        if self.held:
            data = pickle.dumps(self.held)
            data, self.held = len(data).to_bytes(SIZE, "little") + data, []
            while data:
                data = data[os.write(self.out, data) :]

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        if self.out is not None:
            data = self.hook.pytest_report_to_serializable(config=self.config, report=report)
            self._hold("pytest_runtest_logreport", report=data)

    def pytest_runtest_logstart(self, nodeid, location):
        self._hold("pytest_runtest_logstart", nodeid=nodeid, location=location)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid, location):
        self._hold("pytest_runtest_logfinish", nodeid=nodeid, location=location)
        self._send()

    def pytest_warning_recorded(self, warning_message, when, nodeid, location):
        text = f"{warning_message.category.__name__}: {warning_message.message}"
        warning = (text, warning_message.filename, warning_message.lineno)
        self._hold("pytest_warning_recorded", warning=warning, when=when, nodeid=nodeid, location=location)


def read(file: int, size: int) -> bytes:
    """All of it, or nothing where the other end is closed."""
    found = b""
    while len(found) < size:
        with contextlib.suppress(InterruptedError):
            if not (part := os.read(file, size - len(found))):
                return b""
            found += part
    return found


def filled(files: list[list[pytest.Item]], waits: bool) -> int:
    """A pipe with the numbers of the files that wait, or of the others, and nothing behind them."""
    queue, filling = os.pipe()
    numbers = (number for number, tests in enumerate(files) if getattr(tests[0], "waits", False) == waits)
    os.write(filling, b"".join(number.to_bytes(SIZE, "little") for number in numbers))
    os.close(filling)
    return queue


def in_order(queues: list[int], number: int, count: int) -> list[int]:
    """As the process `number` of `count` takes from them."""
    return queues[::-1] if number < round(count * WAITING) else queues


def next_of(queues: list[int], files: list[list[pytest.Item]]) -> list[pytest.Item]:
    number = next(filter(None, (read(queue, SIZE) for queue in queues)), b"")
    return files[int.from_bytes(number, "little")] if number else []
