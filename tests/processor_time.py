"""What the tests cost, and that they do not grow without a word: tests/run.py loads this into pytest (`-p`).

Processor time, own and of child processes, not hours of the clock: a machine that others use as well makes a run
longer, hardly a test's seconds. By how much it is slower than the one on which MOST was found tells a loop that each
process of the run goes through now and then, among the tests; what is judged is divided by that. At the end the slowest
files and tests are told. A run of the whole suite fails where all tests together, or one alone, take more than MOST,
which is about half (one: three times) more than what they took when it was written (1,124 s, the longest one 14,
where the loop took 3.7 ms): make them cheaper, or put another figure here and say in its commit what it buys. What
fixtures take at their ends, among it the processes of loaded_python.py, is no single test's.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from pathlib import Path

import pytest

MOST = {"all tests": 1900.0, "one test": 60.0}  # seconds of PACE_S's machine
PACE_S, TURNS = 0.004, 40_000  # what the loop takes there
TOLD_FILES, TOLD_TESTS = 10, 5
SPENT, ENDS, PACE = "processor_s", "ends_s", "pace_s"


def spent() -> float:
    """Seconds of this process, and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def pace() -> float:
    begin, value = time.process_time(), 1
    for turn in range(TURNS):
        value = (value * 31 + turn) & 0xFFFF
    return time.process_time() - begin


def too_much(tests: dict[str, float], ends: float, paces: list[float], most: dict[str, float]) -> list[str]:
    """What is over the bar, in words. tests: seconds by name, without `ends`, the fixtures'; paces: what the loop took
    beside them."""
    slower = statistics.median(paces) / PACE_S
    found, total = [], (sum(tests.values()) + ends) / slower
    name = max(tests, key=tests.get)
    for what, seconds in (("all tests", total), ("one test", tests[name] / slower)):
        if seconds > most[what]:
            which = f" ({name})" if what == "one test" else ""
            found.append(f"{what}{which}: {seconds:.1f} processor seconds, of which {most[what]:g} may be")
    return found


class Costs:
    """Of a process that runs tests: puts them into its reports. Of the one that is told of all: keeps and judges."""

    def __init__(self, config: pytest.Config):
        self.judges = config.getoption("whole_suite")
        self.begin = self.called = spent()
        self.ends, self.file = 0.0, None
        self.tests: dict[str, float] = {}
        self.paces: list[float] = []
        self.wrong: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid):
        self.begin = self.called = spent()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if call.when != "teardown":
            self.called = spent()
        else:
            report.user_properties.append((SPENT, self.called - self.begin))
            report.user_properties.append((ENDS, spent() - self.called))
            if item.path != self.file:
                self.file = item.path
                report.user_properties.append((PACE, pace()))
        return report

    def pytest_runtest_logreport(self, report):
        told = dict(report.user_properties) if report.when == "teardown" else {}
        if SPENT in told:
            self.tests[report.nodeid] = told[SPENT]
            self.ends += told[ENDS]
        if PACE in told:
            self.paces.append(told[PACE])

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session, exitstatus):
        begin = spent()
        yield
        self.ends += spent() - begin  # of a process that all tests share
        if self.judges and exitstatus == 0 and self.tests:
            self.wrong = too_much(self.tests, self.ends, self.paces, MOST)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED if self.wrong else exitstatus

    def pytest_terminal_summary(self, terminalreporter):
        if not self.tests or not self.paces:
            return
        files = Counter()
        for name, seconds in self.tests.items():
            files[name.partition("::")[0]] += seconds
        slower, total = statistics.median(self.paces) / PACE_S, sum(self.tests.values()) + self.ends
        terminalreporter.write_sep("=", "processor time")
        said = (
            f"{total:.0f} s in {len(self.tests)} tests, {total / slower:.0f} s where the loop takes {PACE_S * 1e3:g} ms"
        )
        terminalreporter.write_line(f"{said} (here {slower * PACE_S * 1e3:.1f})")
        terminalreporter.write_line(f"{self.ends:7.1f} s  ends of fixtures")
        for most in (files.most_common(TOLD_FILES), Counter(self.tests).most_common(TOLD_TESTS)):
            for name, seconds in most:
                terminalreporter.write_line(f"{seconds:7.1f} s  {name}")
        for one in self.wrong:
            terminalreporter.write_line(f"FAILED: {one}; {Path(__file__).name} says what to do", red=True)


def pytest_addoption(parser):
    parser.addoption("--whole-suite", action="store_true", help="fail where the tests cost more than is agreed")


def pytest_configure(config):
    config.pluginmanager.register(Costs(config), "processor-time")
