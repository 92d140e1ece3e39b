"""Every operator under NVIDIA's compute-sanitizer: python3 tests/run.py --sanitize [TOOL ...].

    memcheck   reads and writes out of bounds        racecheck  races in shared memory
    synccheck  misuse of barriers                    initcheck  reads of what nobody has written

First the controls: small kernels with a planted fault, which a tool must report, and without one, which it must not.
Beside them all calls without a tool, judged by the references: they must reach every kernel of this card. Then the same
calls under each tool, a process for each operator; each must make all of its calls, and none may be reported. An
operator's call with a fault that is planted in its arguments must be.
Some controls are right and known to be reported: where a tool does so, its reports of the kernels that do the same are
set aside, counted, and the other kernels run again by themselves (sanitizer_tools.IDIOMS). Where a tool ends by a fault
of its own, the other calls run again by themselves, and the call that it lost once more with no kernel to look at. What
it then has not looked at is a fault, but for kernels in which there is nothing to see (NOTHING_TO_SEE).

all_reduce, and mhc with a sum inside, need several cards and are left out. Logs are kept where something failed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.sanitizer import sanitizer_tools as tools

REPO = Path(__file__).resolve().parent.parent.parent
OPERATORS = (  # longest first
    *("sparse_decode", "mxfp4_moe", "index_select", "compressor", "mhc", "fp8_linear", "wo_a", "bf16_linear"),
    "router_topk",
)
PLANTED = {"memcheck": "short", "initcheck": "unwritten"}
PLANTED_IN = {"bf16_linear": ("dsv4::bf16_linear",)}  # operator: kernels that must be named
ARCHS = {9: "90a", 12: "120f"}  # by the card's major capability
# kernels that no call here reaches: those for several cards, the self-test's probes
LEFT_OUT = ("dsv4::all_reduce::", "dsv4::card::", "dsv4::mhc::summing_kernel")
OTHER_CARDS = {  # by capability, too: FP8 keys are multiplied as they are, or as f16
    9: ("dsv4::index_select::score_kernel<1,",),
    12: ("dsv4::index_select::score_kernel<0,",),
}
CONTROL_LIMIT_S, CALLS_LIMIT_S = 60, 300  # of a process
FIRST_PORT, PORTS = 49_200, 10


def say(text: str) -> None:
    print(f"sanitize: {text}", flush=True)


class Problem(Exception):
    """Why nothing could be checked."""


@dataclass
class Finished:
    """A process that has ended: exit status (None: it ran past its limit), what it printed, and how long it took."""

    status: int | None
    printed: str
    seconds: float


@dataclass
class Runner:
    """Starts processes, each with ports and a log of its own."""

    sanitizer: Path
    logs: Path
    environment: dict[str, str]
    limit_s: float = CALLS_LIMIT_S  # of an operator's calls
    ports: Iterator[int] = field(default_factory=lambda: itertools.count(FIRST_PORT, PORTS))

    def run(self, command: Sequence[str | Path], limit_s: float) -> Finished:
        begin, words = time.monotonic(), [str(word) for word in command]
        options = {"cwd": REPO, "env": self.environment, "text": True, "start_new_session": True}
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
        try:
            printed, status = process.communicate(timeout=limit_s)[0], process.returncode
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            printed, status = process.communicate()[0], None
        return Finished(status, printed, time.monotonic() - begin)

    def under(
        self, tool: str, name: str, program: Sequence[str], limit_s: float, **given
    ) -> tuple[Finished, tools.Report]:
        log = self.logs / f"{tool}.{name}.log"
        ended = self.run(tools.command(self.sanitizer, tool, log, program, port=next(self.ports), **given), limit_s)
        log.with_suffix(".out").write_text(ended.printed)
        return ended, tools.read(log.read_text(errors="replace") if log.exists() else "")


def calls(operator: str, *options: str | Path) -> list[str]:
    return [sys.executable, "-m", "tests.sanitizer.cases", operator, *map(str, options)]


# ---- judgements, apart from what runs


def judge_control(control: tools.Control, fault: bool, ended: Finished, report: tools.Report) -> tuple[str, str]:
    """("ok", "blind", "misunderstood" or "failed", in words)"""
    ended_well = ended.status is not None and report.finished
    if fault and not (ended_well and report.total):
        how = f"does not report {control.what}" if ended_well else f"does not end where there is {control.what}"
        return ("failed" if control.required else "blind"), how
    if fault:
        return "ok", "reported"
    if control.idiom and report.total:
        return "misunderstood", f"reports a kernel that is right ({control.name}): {_told(report)}"
    if not ended_well:
        return "failed", f"did not end under the tool ({control.name}): {_tail(ended.printed)}"
    if report.total or report.others:
        return "failed", f"reports a kernel that is right ({control.name}): {_told(report)}"
    if ended.status != 0:
        return "failed", f"a kernel that is right fails under it ({control.name}): {_tail(ended.printed)}"
    return "ok", "not reported"


def under_way(found: dict | None) -> str | None:
    """The call in which a process ended; one that ended well was in none."""
    return found.get("under_way") if found else None


def lost_call(report: tools.Report, found: dict | None) -> str | None:
    """The call in which the tool ended by a fault of its own: the process with it, or all calls from there on."""
    if not report.lost or found is None:
        return None
    of_the_card = (name for name, text in found["failures"].items() if "CUDA error" in text)
    return next(of_the_card, under_way(found))


def judge_lost(
    tool: str, calls_lost: dict[str, dict[str, int]], by_itself: dict[str, bool], launched: dict[str, int]
) -> tuple[list[str], list[str]]:
    """(what is wrong, what is said) of calls that a tool has lost. `calls_lost`: call -> kernel -> launches of it;
    `by_itself`: whether the tool loses it where it looks at no kernel, too; `launched`: by all calls."""
    wrong, said = [], []
    nothing, sums = tools.nothing_to_see(tool), summed(calls_lost)
    for call, kernels in calls_lost.items():
        nowhere_else = {name for name in kernels if launched.get(name, 0) <= sums[name]}
        where = "at no kernel" if by_itself[call] else f"at {_names(kernels)}"
        text = f"it loses a call, {call}, where it looks {where}"
        if not kernels:
            wrong.append(f"{text}, and without a tool that launches nothing of ours")
            continue
        unseen = nowhere_else if by_itself[call] else set(kernels)
        if unknown := {name for name in unseen if tools.base_name(name) not in nothing}:
            wrong.append(f"{text}, and so has not looked at {_names(unknown)}")
        else:
            said.append(f"{text}; not looked at: {_names(nowhere_else) or 'nothing that other calls do not have'}")
    return wrong, said


def _names(kernels: Iterable[str]) -> str:
    return ", ".join(sorted({tools.base_name(name) for name in kernels}))


def judge_calls(tool: str, expected: list[str], ended: Finished, report: tools.Report, found: dict | None) -> list[str]:
    """What is wrong with an operator's run; `found`: what the process wrote of itself."""
    wrong = []
    if report.total:
        wrong.append(_told(report))
    if report.others and tool != "initcheck":
        wrong.append(f"of no kernel of ours: {_told(tools.Report(report.others, report.others, True))}")
    if report.total + sum(report.others.values()) >= tools.PRINT_LIMIT:
        wrong.append(f"{tools.PRINT_LIMIT} reports, the most that are written: more may be missing")
    if ended.status is None:
        wrong.append(f"ran past its limit, {ended.seconds:.0f} s (--limit)")
    elif found is None:
        wrong.append(f"wrote no result, exit {ended.status}: {_tail(ended.printed)}")
    else:
        wrong += [f"{name}: {text}" for name, text in found["failures"].items()]
        if under_way(found):
            wrong.append(f"ended in a call, {under_way(found)}")
        if found["done"] != expected and not found["failures"]:
            wrong.append(f"made {len(found['done'])} of {len(expected)} calls")
        if ended.status != 0 and not found["failures"]:
            wrong.append(f"exit {ended.status}: {_tail(ended.printed)}")
    if not expected:
        wrong.append("no calls at all")
    if not report.finished:
        wrong.append("the tool wrote no summary")
    return wrong


def judge_planted(operator: str, ended: Finished, report: tools.Report) -> list[str]:
    if any(name in kernel for _, kernel in report.faults for name in PLANTED_IN[operator]):
        return []
    return [f"does not report a fault planted in {operator}'s arguments: {_told(report) or _tail(ended.printed)}"]


def instances(built: list[str], launched: dict[str, int], major: int) -> tuple[list[str], list[str]]:
    """(launched, not launched) of the module's kernels of such a card, with their template arguments."""
    squeezed = {_squeezed(_plain(name)) for name in launched}
    wanted = [name for name in built if not name.startswith((*LEFT_OUT, *OTHER_CARDS[major]))]
    return [n for n in wanted if _squeezed(n) in squeezed], [n for n in wanted if _squeezed(n) not in squeezed]


def _plain(name: str) -> str:
    """Without return type and parameters."""
    name = name.removeprefix("void ").replace("(anonymous namespace)", "@")
    depth = 0
    for at, letter in enumerate(name):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0:
            name = name[:at]
            break
    return name.replace("@", "(anonymous namespace)")


def _squeezed(name: str) -> str:
    """As both ways to write a template's arguments: `(int)4`, `4`, `(bool)1`, `true`."""
    for word in ("(int)", "(bool)", "(unsigned int)", " "):
        name = name.replace(word, "")
    return name.replace("true", "1").replace("false", "0")


def _told(report: tools.Report) -> str:
    most = report.faults.most_common(4)
    return "; ".join(f"{count} x {what}, {kernel or 'no kernel'}" for (what, kernel), count in most)


def _tail(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-400:] or "nothing printed"


# ---- the check


def compile_controls(folder: Path, capability: str) -> Path:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = next(filter(None, map(shutil.which, (f"{home}/bin/nvcc", "nvcc", "/usr/local/cuda/bin/nvcc"))), None)
    if nvcc is None:
        raise Problem("no nvcc in CUDA_HOME, PATH or /usr/local/cuda: the controls are compiled on the spot")
    arch = ARCHS[int(capability.split(".")[0])]
    program = folder / "controls"
    command = [nvcc, "-std=c++17", "-I.", "-gencode", f"arch=compute_{arch},code=sm_{arch}", "-o", str(program)]
    made = subprocess.run([*command, "tests/sanitizer/controls.cu"], cwd=REPO, text=True, capture_output=True)
    if made.returncode != 0:
        raise Problem(f"the controls do not compile: {made.stdout}{made.stderr}")
    return program


def run_controls(
    pool: ThreadPoolExecutor, runner: Runner, program: Path, chosen: Sequence[str]
) -> tuple[list[str], dict[str, set[str]]]:
    """(what is wrong, tool -> right controls that it reports)"""
    todo = [(tool, control, fault) for tool in chosen for control in tools.CONTROLS[tool] for fault in (True, False)]
    todo = [(tool, control, fault) for tool, control, fault in todo if not (fault and control.what == tools.NO_FAULT)]

    def one(tool: str, control: tools.Control, fault: bool) -> tuple[str, str]:
        name = f"control.{control.name}.{'fault' if fault else 'right'}"
        words = [str(program), control.name, *(["fault"] if fault else [])]
        return judge_control(control, fault, *runner.under(tool, name, words, CONTROL_LIMIT_S))

    wrong, seen, misunderstood = [], dict.fromkeys(chosen, 0), {tool: set() for tool in chosen}
    for (tool, control, fault), (verdict, text) in zip(todo, pool.map(lambda one_of: one(*one_of), todo), strict=True):
        if verdict == "ok":
            seen[tool] += fault
        elif verdict == "blind":
            say(f"{tool}: {text}; the check is blind to it here")
        elif verdict == "misunderstood":
            misunderstood[tool].add(control.name)
            say(f"{tool}: {text}; reports of kernels that do the same are set aside")
        else:
            wrong.append(f"{tool}: {text}")
            say(f"FAILED {wrong[-1]}")
    for tool, count in seen.items():
        say(f"{tool}: {count} of {sum(c.what != tools.NO_FAULT for c in tools.CONTROLS[tool])} planted faults reported")
    return wrong, misunderstood


def kernels_of(found: dict | None) -> dict[str, int]:
    """Of ours, that a process launched: name -> launches."""
    kernels = (found or {}).get("kernels") or {}
    return {name: count for name, count in kernels.items() if tools.is_ours(name)}


def kernels_of_call(runner: Runner, operator: str, call: str) -> dict[str, int]:
    """Without a tool."""
    out = runner.logs / f"plain.{operator}.call.json"
    out.unlink(missing_ok=True)
    runner.run(calls(operator, "--kernels", "--out", out, "--only", call), runner.limit_s)
    return kernels_of(json.loads(out.read_text()) if out.exists() else None)


def run_plainly(pool: ThreadPoolExecutor, runner: Runner, chosen: Sequence[str]) -> tuple[dict, dict, list[str]]:
    """All calls without a tool: (operator -> names of its calls, operator -> kernel -> launches, what is wrong)."""

    def one(operator: str) -> tuple[Finished, dict | None]:
        out = runner.logs / f"plain.{operator}.json"
        ended = runner.run(calls(operator, "--kernels", "--out", out), runner.limit_s)
        return ended, json.loads(out.read_text()) if out.exists() else None

    expected, launched, wrong = {}, {}, []
    for operator, (ended, found) in zip(chosen, pool.map(one, chosen), strict=True):
        failures = found["failures"] if found else {}
        if found is None or failures or ended.status != 0:
            why = "; ".join(f"{name}: {text}" for name, text in failures.items()) or _tail(ended.printed)
            wrong.append(f"{operator} without a tool: {why}")
            say(f"FAILED {wrong[-1]}")
        expected[operator] = found["done"] if found else []
        launched[operator] = ours = kernels_of(found)
        launches = f"{len(expected[operator])} calls, {sum(ours.values())} launches"
        say(f"{operator}: {launches}, {ended.seconds:.0f} s without a tool")
    return expected, launched, wrong


def summed(launched: dict[str, dict[str, int]]) -> dict[str, int]:
    return dict(sum((Counter(kernels) for kernels in launched.values()), Counter()))


def check_reach(launched: dict[str, int], capability: str, all_operators: bool) -> list[str]:
    from deepseek_v4_sm120.ops.shared import extension

    major = int(capability.split(".")[0])
    info = json.loads(extension.find().with_name("build_info.json").read_text())
    built = [kernel["kernel"] for kernel in info["kernels"] if kernel["arch"] == ARCHS[major]]
    there, missing = instances(built, launched, major)
    say(f"{len(there)} of {len(there) + len(missing)} compiled instances of kernels are called")
    return [f"no call reaches {name}" for name in missing] if all_operators else []


def others_than(left_out: Iterable[str], launched: dict[str, int]) -> list[str]:
    """What stands in the mangled names of the kernels that were launched, but for those (their base names)."""
    bases = {tools.base_name(name) for name in launched} - set(left_out)
    names = {base.rsplit("::", 1)[-1] for base in bases}
    return sorted(f"{len(name)}{name}" for name in names)


@dataclass
class Run:
    """A process of an operator's calls under a tool, judged. aside: reports that say nothing; lost: the call in which
    the tool ended by a fault of its own."""

    ended: Finished
    report: tools.Report
    aside: Counter
    wrong: list[str]
    lost: str | None


@dataclass
class ToolRun:
    """All operators under a tool. expected: operator -> names of its calls; launched: operator -> kernel -> launches,
    without a tool; set_aside: what the tool is known to misread."""

    runner: Runner
    tool: str
    expected: dict[str, list[str]]
    launched: dict[str, dict[str, int]]
    set_aside: Sequence[tools.Idiom]

    def calls_under(self, operator: str, name: str, chosen: list[str], kernels: Sequence[str] | None = None) -> Run:
        out = self.runner.logs / f"{self.tool}.{name}.json"
        out.unlink(missing_ok=True)
        unjudged = ["--unjudged"] if self.tool == "initcheck" else []
        only = ["--only", *chosen] if chosen != self.expected[operator] else []
        given = {} if kernels is None else {"kernels": kernels}
        command = calls(operator, "--out", out, *unjudged, *only)
        ended, report = self.runner.under(self.tool, name, command, self.runner.limit_s, **given)
        full = report.total + sum(report.others.values()) >= tools.PRINT_LIMIT
        report, aside = report.without(self.set_aside)
        found = json.loads(out.read_text()) if out.exists() else None
        wrong = judge_calls(self.tool, chosen, ended, report, found)
        if full and aside:
            wrong.append(f"{tools.PRINT_LIMIT} reports, the most that are written: more may be missing")
        return Run(ended, report, aside, wrong, lost_call(report, found))

    def one(self, operator: str) -> tuple[str, Finished, tools.Report, list[str]]:
        """Again and again: without a call that the tool loses, without kernels whose reports are set aside where it may
        have ended the process by them or lost what is behind them."""
        left_out, lost, faults, number = set(), [], [], 0
        while True:
            chosen = [call for call in self.expected[operator] if call not in lost]
            kernels = others_than(left_out, self.launched[operator]) if left_out else None
            run = self.calls_under(operator, f"{operator}.{number}" if number else operator, chosen, kernels)
            number += 1
            if run.aside:
                say(f"{self.tool} {operator}: set aside: {_told(tools.Report(run.aside, Counter(), True))}")
            misread = {tools.base_name(kernel) for _, kernel in run.aside} - left_out
            why = "; ".join(run.wrong)
            if run.lost in chosen:
                lost.append(run.lost)
                say(f"{self.tool} {operator}: again without a call, {run.lost}, since: {why}")
                if len(chosen) == 1:
                    run.wrong.append("it loses all calls, so nothing was checked")
                    break
            elif misread and run.wrong and self.tool != "initcheck":
                left_out |= misread
                if not others_than(left_out, self.launched[operator]):
                    run.wrong.append("it has no other kernels, so nothing of it was checked")
                    if (self.tool, operator) in tools.MISREAD and not run.report.total:
                        say(f"{self.tool} {operator}: checks nothing of it, as on other cards")
                        run.wrong.clear()
                    break
                say(f"{self.tool} {operator}: again without {', '.join(sorted(misread))}, since: {why}")
            else:
                break
            faults += [_told(run.report)] if run.report.total else []
        name = operator + ", the other kernels" * bool(left_out) + ", the other calls" * bool(lost)
        return name, run.ended, run.report, faults + run.wrong + self.once_more(operator, lost)

    def once_more(self, operator: str, lost: list[str]) -> list[str]:
        """What is wrong of the calls that the tool has lost."""
        of_call = {call: kernels_of_call(self.runner, operator, call) for call in lost}
        # initcheck always looks at all
        by_itself = {
            call: self.tool != "initcheck"
            and self.calls_under(operator, f"{operator}.none", [call], [tools.NO_KERNEL]).lost == call
            for call in lost
        }
        wrong, said = judge_lost(self.tool, of_call, by_itself, self.launched[operator])
        for text in said:
            say(f"{self.tool} {operator}: {text}")
        return wrong

    def plant(self, operator: str) -> tuple[str, Finished, tools.Report, list[str]]:
        program = calls(operator, "--plant", PLANTED[self.tool])
        ended, report = self.runner.under(self.tool, f"{operator}.planted", program, self.runner.limit_s)
        return f"{operator}, planted fault", ended, report, judge_planted(operator, ended, report)

    def all(self, pool: ThreadPoolExecutor) -> list[str]:
        """What is wrong."""
        planted = PLANTED_IN if self.tool in PLANTED else ()
        pending = [pool.submit(self.one, operator) for operator in self.expected]
        pending += [pool.submit(self.plant, operator) for operator in self.expected if operator in planted]
        wrong = []
        for future in pending:
            name, ended, report, found = future.result()
            others = f", {sum(report.others.values())} of other kernels" if report.others else ""
            told = f"{'FAILED ' if found else ''}{self.tool} {name}: {report.total} reported{others}"
            say(f"{told}, {ended.seconds:.0f} s")
            for text in found:
                say(f"    {text}")
            wrong += [f"{self.tool} {name}: {text}" for text in found]
        return wrong


def check(options, runner: Runner) -> list[str]:
    begin, chosen = time.monotonic(), options.operators or OPERATORS
    program = compile_controls(runner.logs, options.capability)
    with ThreadPoolExecutor(options.jobs) as pool:
        wrong, misunderstood = run_controls(pool, runner, program, options.tools)
        expected, launched, faults = run_plainly(pool, runner, chosen)
        wrong += faults + check_reach(summed(launched), options.capability, not options.operators)
        say(f"controls and calls without a tool: {time.monotonic() - begin:.0f} s")
        for tool in options.tools:
            begin = time.monotonic()
            set_aside = tools.idioms(tool, misunderstood[tool])
            wrong += ToolRun(runner, tool, expected, launched, set_aside).all(pool)
            say(f"{tool}: {time.monotonic() - begin:.0f} s")
    return wrong


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tests/run.py --sanitize", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=f"of {', '.join(tools.TOOLS)} (default: all)")
    parser.add_argument("--operators", nargs="+", choices=OPERATORS, help="these alone (default: all)")
    parser.add_argument(
        "--jobs", type=int, default=min(6, os.cpu_count() or 1), help="processes at a time (%(default)s)"
    )
    parser.add_argument("--limit", type=float, default=CALLS_LIMIT_S, help="seconds of an operator (%(default)s)")
    parser.add_argument("--logs", type=Path, help="keep the tools' logs in this folder")
    parser.add_argument("--capability", default="9.0", help="of the card; tests/run.py says it")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.tools if name not in tools.TOOLS]:
        parser.error(f"no tool {', '.join(unknown)}; there are {', '.join(tools.TOOLS)}")
    options.tools = options.tools or list(tools.TOOLS)
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    sanitizer = tools.find()
    if sanitizer is None:
        say("no compute-sanitizer in CUDA_HOME, PATH or /usr/local/cuda; CUDA's toolkit has it")
        return 1
    logs = options.logs or Path(tempfile.mkdtemp(prefix="sanitize-"))
    logs.mkdir(parents=True, exist_ok=True)
    # each tensor a cudaMalloc of its own, so that the tools know where it ends and what of it was written
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        wrong = check(options, Runner(sanitizer, logs, environment, options.limit))
    except Problem as problem:
        say(f"FAILED {problem}")
        return 1
    for text in wrong:
        say(f"FAILED {text}")
    if wrong:
        say(f"{len(wrong)} faults; logs are in {logs}")
    else:
        say(f"passed: {', '.join(options.tools)}")
        if not options.logs:
            shutil.rmtree(logs)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
