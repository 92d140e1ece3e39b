"""`calibrate`: run every provider, decide, print the table that one can post, write the profile."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from deepseek_v4_sm120 import console, extension
from deepseek_v4_sm120.calibrate import OPERATORS, worker
from deepseek_v4_sm120.calibrate.provider import OURS, STOCK
from deepseek_v4_sm120.console import CommandError
from deepseek_v4_sm120.patching import profile
from deepseek_v4_sm120.patching.sources import Sources, package_version

WORKER_SECONDS = 600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpus",
        type=int,
        default=2,
        choices=(1, 2, 4, 8),
        help="cards of the plan; shapes are those of one (default: 2)",
    )
    parser.add_argument("--context", type=int, default=393_216, help="longest request in tokens (default: 393216)")
    parser.add_argument("--concurrency", type=int, default=8, help="streams at the same time (default: 8)")
    parser.add_argument(
        "--operators",
        nargs="+",
        choices=OPERATORS,
        default=list(OPERATORS),
        metavar="NAME",
        help=f"{', '.join(OPERATORS)} (default: all)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    parser.add_argument("--out", default="dsv4-profile.json", help="file to write (default: dsv4-profile.json)")
    parser.add_argument("--json", action="store_true", help="print the profile instead of the table")


def run(arguments: argparse.Namespace) -> int:
    """Exit status 1 when one of ours is wrong on this card."""
    if not 1024 <= arguments.context <= 1 << 20:
        raise CommandError(f"--context must be 1024 to {1 << 20} tokens, got {arguments.context}")
    if not 1 <= arguments.concurrency <= 256:
        raise CommandError(f"--concurrency must be 1 to 256, got {arguments.concurrency}")
    out = Path(arguments.out)
    if not out.resolve().parent.is_dir():
        raise CommandError(f"--out: there is no folder {out.resolve().parent}")
    device = _device()
    shapes = {
        "tp": arguments.gpus,
        "context": arguments.context,
        "concurrency": arguments.concurrency,
        "quick": arguments.quick,
    }
    operators = {
        name: calibrate(name, shapes, progress)
        for name, progress in _with_progress(list(dict.fromkeys(arguments.operators)))
    }
    found = as_profile(operators, device, shapes)
    try:
        out.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise CommandError(f"{out} cannot be written: {error.strerror}") from error
    if arguments.json:
        console.print_json(found)
    else:
        show(found, out)
    return int(any(name.startswith(OURS) for one in operators.values() for name in one["wrong"]))


def _with_progress(names: list[str]):
    total = sum(len(worker.operator(name).providers()) for name in names)
    progress = console.Progress(total)
    return [(name, progress) for name in names]


def _device() -> str:
    """The card's name; CommandError where torch sees none. Asked in another process: this one stays free of CUDA."""
    if importlib.util.find_spec("torch") is None:
        raise CommandError(f"torch is not installed for {sys.executable}; run this in SGLang's image")
    question = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    done = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True)
    name = done.stdout.strip().splitlines()[-1:] or [""]
    if done.returncode or not name[0]:
        words = (done.stderr.strip().splitlines() or ["torch sees no CUDA device"])[-1]
        raise CommandError(f"no GPU to calibrate on: {words}")
    return name[0]


def calibrate(name: str, shapes: dict, progress: console.Progress) -> dict:
    """All providers of one operator that take a shape of the plan: what `decide` says."""
    described = worker.operator(name)
    results, cases = {}, described.cases(**shapes)
    for provider in described.providers():
        if not any(map(provider.handles, cases)):
            progress.step(f"{name}: {provider.name}, for none of these shapes")
            continue
        started = time.monotonic()
        absent = provider.absent()
        results[provider.name] = {"problem": absent} if absent else run_worker(name, provider.name, shapes)
        progress.step(f"{name}: {provider.name}, {time.monotonic() - started:.0f} s")
        if provider.name == OURS and "problem" in results[OURS]:  # nothing to compare, and no reason to rule us out
            raise CommandError(f"{name} cannot run here: {results[OURS]['problem']}")
    return decide(results, [provider.name for provider in described.providers() if provider.optional])


def run_worker(name: str, provider: str, shapes: dict) -> dict:
    """{"problem"} or {"cases": [...], "wrong": words or None}."""
    words = [sys.executable, "-m", "deepseek_v4_sm120.calibrate.worker", name, provider, json.dumps(shapes)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=WORKER_SECONDS)
        lines, code, stderr = done.stdout.splitlines(), done.returncode, done.stderr
    except subprocess.TimeoutExpired as error:
        lines, code, stderr = (error.stdout or b"").decode().splitlines(), 1, f"not ready after {WORKER_SECONDS} s"
    answers = [json.loads(line) for line in lines if line.startswith("{")]
    problem = next((a["problem"] for a in answers if "problem" in a), None)
    if problem is not None:
        return {"problem": problem}
    cases = [a for a in answers if "case" in a]
    bad = [a for a in cases if "allowed" in a]
    wrong = None
    if bad:
        error = "not finite" if bad[0]["error"] is None else f"{bad[0]['error']:.4f}"
        wrong = f"{bad[0]['case']}: relative error {error}, allowed {bad[0]['allowed']}"
    if code:
        last = (stderr.strip().splitlines() or ["no message"])[-1][:200]
        wrong = wrong or f"crashed after {len(cases)} case(s): {last}"
    return {"cases": cases, "wrong": wrong}


def decide(results: dict[str, dict], optional: Iterable[str] = ()) -> dict:
    """Ours, unless it is wrong here, or stock is right and faster over the shapes that both ran (geometric mean).

    optional: ways of ours that count as ours where they are right and faster; the others are `left_out`, with why.
    """
    wrong = {name: found["wrong"] for name, found in results.items() if found.get("wrong")}
    times = {
        name: {c["case"]: c["us"] for c in found.get("cases", ()) if "us" in c}
        for name, found in results.items()
        if name not in wrong
    }
    ours, left_out = dict(times.get(OURS, {})), {}
    for way in optional:
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


def _ratio(these: dict[str, float], those: dict[str, float]) -> float | None:
    """How many times as long these take over the cases of both; None without such."""
    both = [case for case in these if case in those]
    return math.exp(sum(math.log(these[c] / those[c]) for c in both) / len(both)) if both else None


def as_profile(operators: dict[str, dict], device: str, shapes: dict) -> dict:
    here = profile.here(package_version("sglang", Sources()))
    return {
        "format": profile.FORMAT,
        "identity": asdict(here) | {"device": here.device or device},
        "build": {key: extension.describe()[key] for key in ("git_commit", "cuda_version")},
        "date": datetime.date.today().isoformat(),
        "plan": shapes,
        "operators": operators,
    }


def show(found: dict, out: Path) -> None:
    identity, commit = found["identity"], found["build"]["git_commit"] or "commit unknown"
    print(
        f"\n{identity['device']}, driver {identity['driver'] or '?'}, SGLang {identity['sglang'] or 'not installed'}, "
        f"deepseek_v4_sm120 {identity['package']} ({commit}); TP{found['plan']['tp']}"
    )
    for name, measured in found["operators"].items():
        providers = measured["providers"]
        ran = [p for p in providers if "cases" in providers[p]]
        cases = list(dict.fromkeys(c["case"] for p in ran for c in providers[p]["cases"]))
        rows = [(case, *(_cell(providers[p]["cases"], case) for p in ran)) for case in cases]
        if rows:
            title = f"{name}: microseconds a call, cold caches ({worker.operator(name).ERROR})"
            console.print_table(title, ("case", *ran), rows)
        if note := getattr(worker.operator(name), "NOTE", None):
            print(note)
        for p, why in measured["wrong"].items():
            print(f"WRONG  {p}: {why}")
        for p in [p for p in providers if "problem" in providers[p]]:
            print(f"not run  {p}: {providers[p]['problem']}")
        for p, why in measured["left_out"].items():
            print(f"left out  {p}: {why}")
        ratio = measured["stock_over_ours"]
        beside = f"; stock takes {ratio:.2f} times ours" if ratio else ""
        print(f"{name}: {measured['winner']} is used{beside}")
    print(f"\nWritten to {out}. The server reads it with DSV4_SM120_PROFILE={out.resolve()}")


def _cell(cases: list[dict], case: str) -> str:
    found = next((c for c in cases if c["case"] == case), None)
    if found is None or "skipped" in found:
        return "-"
    if "us" not in found:
        return "WRONG"
    return f"{found['us']:.1f} ({found['error']:.4f}){' eager' if found['how'] == 'eager' else ''}"
