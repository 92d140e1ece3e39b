"""`calibrate`: run every provider, decide, print the table that one can post, write the profile."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from deepseek_v4_sm120 import OPS
from deepseek_v4_sm120.commands import console, workers
from deepseek_v4_sm120.commands.calibrate import worker
from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.disclosure import redacted
from deepseek_v4_sm120.commands.doctor import facts, nvidia_smi
from deepseek_v4_sm120.commands.doctor.gpu_checks import IDLE_MEMORY_MIB
from deepseek_v4_sm120.commands.ending import as_interrupts
from deepseek_v4_sm120.commands.models_table import TENSOR_PARALLEL
from deepseek_v4_sm120.ops.shared import extension
from deepseek_v4_sm120.patching import json_file, profile
from deepseek_v4_sm120.patching.sources import Sources, package_version
from deepseek_v4_sm120.sglang_patches.defaults import DEFAULTS
from deepseek_v4_sm120.specs.provider import OURS, STOCK

WORKER_SECONDS = 600  # of one provider of one operator
DEVICE_SECONDS = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpus",
        type=int,
        default=2,
        choices=TENSOR_PARALLEL,
        help="cards of the plan; shapes are those of one (default: 2)",
    )
    parser.add_argument("--context", type=int, default=393_216, help="longest request in tokens (default: 393216)")
    parser.add_argument("--concurrency", type=int, default=8, help="streams at the same time (default: 8)")
    parser.add_argument(
        "--operators",
        nargs="+",
        choices=OPS,
        default=list(OPS),
        metavar="NAME",
        help=f"{', '.join(OPS)} (default: all)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    parser.add_argument(
        "--limit-s",
        type=float,
        metavar="SECONDS",
        help="decide by what is measured when so much time is over, and name what was not reached (default: no limit)",
    )
    parser.add_argument("--out", default="dsv4-profile.json", help="file to write (default: dsv4-profile.json)")
    parser.add_argument("--json", action="store_true", help="print the profile instead of the table")


def run(arguments: argparse.Namespace) -> int:
    """Exit status 1 when one of ours is wrong on this card."""
    if not 1024 <= arguments.context <= 1 << 20:
        raise CommandError(f"--context must be 1024 to {1 << 20} tokens, got {arguments.context}")
    if not 1 <= arguments.concurrency <= 256:
        raise CommandError(f"--concurrency must be 1 to 256, got {arguments.concurrency}")
    if arguments.limit_s is not None and not arguments.limit_s > 0:
        raise CommandError(f"--limit-s must be more than 0 seconds, got {arguments.limit_s}")
    out = Path(arguments.out)
    check_out(arguments.out)
    console.temporary_folder()
    device, uuids = _device()
    if facts.is_container(root := Path("/")) and not facts.is_mounted(root, out.resolve()):
        console.say(f"calibrate: {out} is lost with this container; --out a file in a mounted folder stays", sys.stderr)
    for text in disturbances(nvidia_smi.read(facts.run_command).gpus, uuids):
        console.say(f"calibrate: {text}", sys.stderr)
    clock = Clock(arguments.limit_s)
    shapes = {
        "tp": arguments.gpus,
        "context": arguments.context,
        "concurrency": arguments.concurrency,
        "quick": arguments.quick,
    }
    names, not_here = asked_here(list(dict.fromkeys(arguments.operators)), shapes, len(uuids))
    with as_interrupts():  # the time is over then, and what was measured until there is written
        results = measure(names, shapes, clock)
    not_reached = [name for name, found in results.items() if not found[OURS].get("cases") and not found[OURS]["wrong"]]
    operators = {name: decide(name, found) for name, found in results.items() if name not in not_reached}
    found = redacted(as_profile(operators, device, shapes) | {"not_reached": not_reached, "not_here": not_here})
    try:
        json_file.put(out, json.dumps(found, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        console.print_json(found)  # minutes of measuring are not lost
        raise CommandError(f"--out: {out} cannot be written: {error.strerror}; what it would hold is above") from error
    if arguments.json:
        console.print_json(found)
    else:
        show(found)
        if found["identity"]["sglang"] is None:
            console.say("\nSGLang is not installed here: a server, which has one, will not use this profile")
        console.say(f"\nWritten to {out}. The server reads it with DSV4_SM120_PROFILE={out.resolve()}")
    return int(any(name.startswith(OURS) for one in operators.values() for name in one["wrong"]))


def disturbances(gpus: Sequence[nvidia_smi.Gpu], uuids: Sequence[str] = ()) -> list[str]:
    """What on these cards would change the times, so that a server leaves out what is faster. uuids: of those that CUDA
    sees; where nvidia-smi knows none of them so (MIG), all of the machine are looked at."""
    gpus = [gpu for gpu in gpus if (gpu.uuid or "").removeprefix("GPU-") in uuids] or gpus
    busy = [f"GPU {gpu.index} ({gpu.memory_used} MiB)" for gpu in gpus if gpu.memory_used > IDLE_MEMORY_MIB]
    slow = [f"GPU {gpu.index} ({', '.join(gpu.slowdowns)})" for gpu in gpus if gpu.slowdowns]
    found = [f"in use already: {', '.join(busy)}; beside another process times are of both: stop it"] if busy else []
    return found + ([f"clocks are held down: {', '.join(slow)}: `doctor` says what helps"] if slow else [])


def check_out(given: str) -> None:
    """Try before the run what is written after it. CommandError says why the profile cannot be put there."""
    try:
        out = Path(given).resolve()  # what a link points to
        exists = out.exists()
        if not given or out.is_dir():
            raise CommandError(f"--out must be a file to write, got the folder {given or '.'}")
        if exists and not out.is_file():
            raise CommandError(f"--out must be a file to write, {given} is a device or FIFO")
        if not out.parent.is_dir():
            raise CommandError(f"--out: there is no folder {out.parent}")
        if facts.is_mount_point(Path("/"), out):
            raise CommandError(f"--out: {given} is a mount of its own, which no file can replace; mount its folder")
        if exists:
            with open(out, "ab"):
                pass
        with json_file.draft(out.parent, b""):
            pass
    except (OSError, RuntimeError) as error:  # RuntimeError: links that point to each other
        raise CommandError(f"--out: {given:.200} cannot be written: {getattr(error, 'strerror', error)}") from error


def asked_here(names: list[str], shapes: dict, cards: int) -> tuple[list[str], dict[str, str]]:
    """(the operators that a machine with so many cards can measure, why not the others)."""
    described = {name: getattr(worker.operator(name), "not_here", None) for name in names}
    reasons = {name: ask(shapes, cards) for name, ask in described.items() if ask is not None}
    not_here = {name: why for name, why in reasons.items() if why is not None}
    return [name for name in names if name not in not_here], not_here


def _device() -> tuple[str, list[str]]:
    """(the first card's name, of each its UUID); CommandError where torch sees none. Asked in another process: this one
    stays free of CUDA."""
    if importlib.util.find_spec("torch") is None:
        raise CommandError(f"torch is not installed for {sys.executable}; run this in SGLang's image")
    question = (
        "import json, torch.cuda as c; cards = range(c.is_available() and c.device_count()); "
        "print(json.dumps([[one.name, str(one.uuid)] for one in map(c.get_device_properties, cards)]))"
    )
    try:
        done = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, timeout=DEVICE_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"no GPU to calibrate on: the driver does not answer in {DEVICE_SECONDS} s") from error
    cards = [] if done.returncode else json.loads((done.stdout.strip().splitlines()[-1:] or ["[]"])[0])
    if not cards:
        words = (done.stderr.strip().splitlines() or ["torch sees no CUDA device"])[-1]
        raise CommandError(f"no GPU to calibrate on: {words}")
    return cards[0][0], [uuid for _, uuid in cards]


class Clock:
    """The time that the user grants, in seconds; None: as long as it takes."""

    def __init__(self, seconds: float | None = None):
        self.end = math.inf if seconds is None else time.monotonic() + seconds

    def left(self) -> float:
        return self.end - time.monotonic()

    def stop(self) -> None:
        self.end = -math.inf


@dataclass(frozen=True)
class Job:
    """One provider of one operator; `cases`: the names of those that it takes, whose calls touch so many bytes."""

    operator: str
    provider: str
    cases: tuple[str, ...]
    bytes: int


@dataclass
class Answers:
    """What a worker has said about a job."""

    cases: list[dict] = field(default_factory=list)
    problem: str | None = None
    found: dict | None = None
    is_done: bool = False


def measure(names: list[str], shapes: dict, clock: Clock) -> dict[str, dict[str, dict]]:
    """What became of every provider that takes a shape of the plan: {operator: {provider: result}}.

    result  {"problem": why it does not run here}, or {"cases": [...], "wrong": words or None, "not_reached": [names]}
    """
    results: dict[str, dict[str, dict]] = {name: {} for name in names}
    rounds: tuple[list[Job], ...] = ([], [], [])  # ours with its ways, then stock: what decides comes first
    for name in names:
        described = worker.operator(name)
        cases = described.cases(**shapes)
        for provider in described.providers():
            taken = [case for case in cases if provider.handles(case)]
            if taken:
                turn = 0 if provider.name.startswith(OURS) else 1 if provider.name == STOCK else 2
                results[name][provider.name] = {"problem": absent} if (absent := provider.absent()) else {}
                size = sum(case.bytes_per_call for case in taken)
                rounds[turn].append(Job(name, provider.name, tuple(case.name for case in taken), size))
    progress = console.Progress(sum(map(len, rounds)))
    for jobs in rounds:
        waiting = []
        # the short ones first, so that what they leave is for the others; ways of ours behind ours
        for job in sorted(jobs, key=lambda job: (job.provider not in (OURS, STOCK), job.bytes)):
            if result := results[job.operator][job.provider]:
                progress.step(f"{job.operator}: {job.provider}: {outcome(result)}")
            else:
                waiting.append(job)
        while waiting:  # a process that ends early leaves the rest to another
            found = run_worker(waiting, shapes, clock, progress)
            for job, result in zip(waiting, found, strict=False):
                results[job.operator][job.provider] = result
            waiting = waiting[len(found) :]
        for name in names:
            if problem := results[name].get(OURS, {}).get("problem"):  # nothing to compare, no reason to rule us out
                raise CommandError(f"{name} cannot run here: {problem}")
    return results


def run_worker(jobs: list[Job], shapes: dict, clock: Clock, progress: console.Progress) -> list[dict]:
    """Results of the first jobs, of as many as one process came to; of all of them when the time is over."""
    results, started = [], time.monotonic()

    def job_left() -> float:
        return WORKER_SECONDS - (time.monotonic() - started)

    def ended(job: Job, answers: Answers, crash: str | None) -> None:
        results.append(as_result(job, answers, crash))
        seconds = f", {time.monotonic() - started:.0f} s" if answers.cases else ""
        progress.step(f"{job.operator}: {job.provider}: {outcome(results[-1])}{seconds}")

    words = [sys.executable, "-m", "deepseek_v4_sm120.commands.calibrate.worker", json.dumps(shapes)]
    words.append(json.dumps([(job.operator, job.provider) for job in jobs]))
    words.append(json.dumps(clock.left() if math.isfinite(clock.left()) else None))
    answers = Answers()
    with tempfile.TemporaryFile() as stderr:
        if clock.left() > 0:
            process = workers.start(words, stderr, worker_environment())
            try:
                for answer in workers.answers(process, lambda: min(clock.left(), job_left())):
                    job = jobs[len(results)]
                    if "job" in answer:
                        answers, started = Answers(), time.monotonic()
                    elif "case" in answer:
                        answers.cases.append(answer)
                        if "skipped" not in answer:
                            progress.note(f"{job.operator}: {job.provider}: {in_words(answer)}")
                    elif "problem" in answer:
                        answers.problem = answer["problem"]
                    elif "found" in answer:
                        answers.found = answer["found"]
                    elif "done" in answer:
                        answers.is_done = True
                        ended(job, answers, None)
                        answers = Answers()
            except KeyboardInterrupt:
                clock.stop()
            finally:
                code = workers.end(process, workers.LAST_WORDS_S if min(clock.left(), job_left()) > 0 else 0.0)
            last = workers.last_words(stderr, code)
        while len(results) < len(jobs) and clock.left() <= 0:  # the job under way, and those behind it
            ended(jobs[len(results)], answers, None)
            answers = Answers()
    if len(results) < len(jobs):
        ended(jobs[len(results)], answers, last if job_left() > 0 else f"not ready after {WORKER_SECONDS} s")
    return results


def worker_environment() -> dict[str, str]:
    """Stock is stock: no patch of ours. DeepGEMM compiles what is called, not all numbers of rows that there are."""
    return {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"} | os.environ | {"DSV4_SM120": "off"}


def as_result(job: Job, answers: Answers, crash: str | None) -> dict:
    if answers.problem is not None:
        return {"problem": answers.problem}
    bad, wrong = [answer for answer in answers.cases if "allowed" in answer], None
    if bad:
        wrong = in_words(bad[0])
    elif crash is not None:
        wrong = f"crashed after {len(answers.cases)} case(s): {crash}"
    result = {"cases": answers.cases, "wrong": wrong} | ({"found": answers.found} if answers.found else {})
    reached = {answer["case"] for answer in answers.cases}
    if crash is None and (missing := [name for name in job.cases if name not in reached]):
        result["not_reached"] = missing
    return result


def in_words(answer: dict) -> str:
    """A worker's answer about a case."""
    if "us" in answer:
        return f"{answer['case']}: {answer['us']:.1f} us ({answer['error']:.4f})"
    error = "not finite" if answer["error"] is None else f"{answer['error']:.4f}"
    return f"{answer['case']}: relative error {error}, allowed {answer['allowed']}"


def outcome(result: dict) -> str:
    """A provider's result in a few words."""
    if "problem" in result:
        return f"does not run here: {result['problem']}"
    if result["wrong"]:
        return f"wrong: {result['wrong']}"
    times, missing = [case["us"] for case in result["cases"] if "us" in case], len(result.get("not_reached", ()))
    words = [f"{missing} shape(s) not reached"] if missing else []
    if times:
        mean = math.exp(sum(map(math.log, times)) / len(times))
        words.insert(0, f"{mean:.1f} us" + (f", mean of {len(times)} shapes" if len(times) > 1 else ""))
    return "; ".join(words)


def decide(name: str, results: dict[str, dict]) -> dict:
    """Ours, unless it is wrong here, or stock is right and faster over the shapes that both ran.

    Faster: by the geometric mean over the cases; cases of one `point` (as many rows) add up, each as often as a step
    calls it. Optional ways of ours count as ours where they are right and faster; the others are `left_out`, with why.
    """
    wrong = {provider: found["wrong"] for provider, found in results.items() if found.get("wrong")}
    times = {
        provider: {case["case"]: case for case in found.get("cases", ()) if "us" in case}
        for provider, found in results.items()
        if provider not in wrong
    }
    ours, left_out = dict(times.get(OURS, {})), {}
    for way in (provider.name for provider in worker.operator(name).providers() if provider.optional):
        ratio = _ratio(times.get(OURS, {}), times.get(way, {}))
        if way in wrong:
            left_out[way] = wrong[way]
        elif ratio is not None and ratio < 1.0:
            left_out[way] = f"takes {1 / ratio:.2f} times as long as {OURS}"
        else:
            ours |= times.get(way, {})
    ratio = _ratio(times.get(STOCK, {}), ours)
    can_run = OURS not in wrong and "problem" not in results.get(OURS, {"problem": ""})
    winner = OURS if can_run and (ratio is None or ratio >= 1.0) else STOCK
    return {"winner": winner, "stock_over_ours": ratio, "wrong": wrong, "left_out": left_out, "providers": results}


def _ratio(these: dict[str, dict], those: dict[str, dict]) -> float | None:
    """How many times as long these take over the cases of both; None without such."""
    points = defaultdict(lambda: [0.0, 0.0])
    for name in these.keys() & those.keys():
        one, calls = these[name], these[name].get("calls", 1)
        for i, found in enumerate((one, those[name])):
            points[one.get("point", name)][i] += calls * found["us"]
    return math.exp(sum(math.log(a / b) for a, b in points.values()) / len(points)) if points else None


def as_profile(operators: dict[str, dict], device: str, shapes: dict) -> dict:
    here = profile.here(package_version("sglang", Sources()))
    return {
        "format": profile.FORMAT,
        "identity": asdict(here) | {"device": here.device or device},
        "build": {key: extension.describe()[key] for key in ("git_commit", "code", "cuda_version")},
        "date": datetime.date.today().isoformat(),
        "plan": shapes,
        "operators": operators,
    }


def show(found: dict) -> None:
    """The tables of a profile."""
    identity, commit = found["identity"], found["build"]["git_commit"] or "commit unknown"
    console.say(
        f"\n{identity['device']}, driver {identity['driver'] or '?'}, SGLang {identity['sglang'] or 'not installed'}, "
        f"deepseek_v4_sm120 {identity['package']} ({commit}); TP{found['plan']['tp']}"
    )
    for name, measured in found["operators"].items():
        providers = measured["providers"]
        ran = [p for p in providers if providers[p].get("cases")]
        cases = list(dict.fromkeys(c["case"] for p in ran for c in providers[p]["cases"]))
        rows = [(case, *(_cell(providers[p]["cases"], case) for p in ran)) for case in cases]
        if rows:
            title = f"{name}: microseconds a call, cold caches ({worker.operator(name).ERROR})"
            console.print_table(title, ("case", *ran), rows)
        for found_before in [providers[p]["found"] for p in ran if "found" in providers[p]]:
            header, *pairs = map(tuple, found_before["table"])
            console.print_table(f"{name}: {found_before['text']}", header, pairs)
        for p, why in measured["wrong"].items():
            console.say(f"WRONG  {p}: {why}")
        for p in [p for p in providers if "problem" in providers[p]]:
            console.say(f"not run  {p}: {providers[p]['problem']}")
        for p in [p for p in providers if providers[p].get("not_reached")]:
            missing = "; ".join(providers[p]["not_reached"]) if p in ran else "none of its shapes was"
            console.say(f"not reached  {p}: {missing}")
        for p, why in measured["left_out"].items():
            console.say(f"left out  {p}: {why}")
        console.say(f"{name}: {_verdict(name, measured)}")
    for name in found["not_reached"]:
        console.say(f"{name}: not reached, so the shipped default holds")
    for name, why in found["not_here"].items():
        console.say(f"{name}: {why}, so the shipped default holds")


def _verdict(name: str, measured: dict) -> str:
    ratio = measured["stock_over_ours"]
    is_off = measured["winner"] == OURS and any(row.name == name and not row.on for row in DEFAULTS)
    by_choice = f" with DSV4_SM120_SET={name}=on" if is_off else ""
    beside = f"; stock takes {ratio:.2f} times ours" if ratio else ""
    return f"{measured['winner']} is used{by_choice}{beside}"


def _cell(cases: list[dict], case: str) -> str:
    found = next((c for c in cases if c["case"] == case), None)
    if found is None or "skipped" in found:
        return "-"
    if "us" not in found:
        return "WRONG"
    return f"{found['us']:.1f} ({found['error']:.4f}){' eager' if found['how'] == 'eager' else ''}"
