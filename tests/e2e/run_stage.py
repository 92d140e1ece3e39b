#!/usr/bin/env python3
"""Run one stage of the end-to-end validation on a GPU machine: real SGLang, stock against patched.

usage: run_stage.py STAGE [--harness DIR] [--patch build] [--out $OUT] [--jobs 2] [--limit-s 560] [--only CASE ..]

A stage is a list of cases; a case is one start of the engine (engine_case.py) with its own patch, environment and
options. Raw answers stay in --work; OUT/stage_STAGE.json gets what collect.py reads: differences of answers (by the
harness's own `compare`), shadow records, timings, kernels. Cases that only answer may run side by side (--jobs);
cases that are timed run alone. The limit covers the stage: cases that have not ended by then are stopped and say so.
"""

import argparse
import concurrent.futures
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPO = HERE.parent.parent
sys.path[:0] = [str(REPO), str(HERE)]

import accepted_stage  # noqa: E402
import drawn_stage  # noqa: E402
import experts_stage  # noqa: E402
import features_stage  # noqa: E402
import halves_stage  # noqa: E402
import prompts_stage  # noqa: E402
import returns_stage  # noqa: E402
import shared_cards  # noqa: E402
from stages import DIFFERENCES, SAMES, SIDE_BY_SIDE_ENVIRONMENT, STAGES, TEXTS  # noqa: E402
from what_ran import commit, device, read_json  # noqa: E402

SUFFIXES = ("", "_bench", "_text", "_same", "_features", "_drawn")  # of what an engine writes
PARTS = ("single", "batch")
STOPPED = "stopped at the limit"
FIRST_PORT, PORTS = 10000, 22000  # below those that Linux gives to whoever asks for any
SHELF = "E2E_JIT_SHELF"
NCCL_PORT = 100  # behind an engine's port: SGLang would ask Linux for one, and others may have it by then


def environment(case, arguments):
    kept = SIDE_BY_SIDE_ENVIRONMENT | {k: v for k, v in os.environ.items() if not k.startswith(("DSV4_SM120", "E2E_"))}
    reports = {"DSV4_SM120_REPORT": str(arguments.work / f"{case.name}_reports")} if case.patched else {}
    own = accepted_stage.environment(case, arguments.work) | features_stage.environment(case, arguments)
    own |= drawn_stage.environment(case, arguments.work) | experts_stage.environment(case)
    own |= shared_cards.environment(arguments, own.get("PYTHONPATH", kept.get("PYTHONPATH")))
    return kept | case.environment | reports | own | shelf(case, arguments)


def shelf(case, arguments):
    """The harness's folder of compiled modules, a copy for each engine: two that add the same module would collide."""
    full = os.environ.get(SHELF)
    if not full or not Path(full).is_dir():
        return {}
    own = arguments.work / f"{case.name}_shelf"
    shutil.copytree(full, own, dirs_exist_ok=True)
    return {SHELF: str(own)}


def command(case, arguments, number):
    line = [sys.executable, str(HERE / "engine_case.py"), "--harness", str(arguments.harness), *case.options]
    port = arguments.first_port + arguments.port_step * number
    line += ["--name", case.name, "--out", str(arguments.work), "--set", f"port={port}"]
    line += ["--set", f"nccl_port={port + NCCL_PORT}", *features_stage.options(case, arguments)]
    in_turn = case.takes_turns and arguments.ranks_a_card == 1
    line += ["--turns", str(arguments.turns), "--engines", str(arguments.engines)] if in_turn else []
    return [*line, "--patch", str(arguments.patch)] if case.patched else line


def run_case(case, arguments, number, deadline):
    """What is known about an engine that has ended; others may wait for that."""
    try:
        return run_engine(case, arguments, number, deadline)
    finally:
        arguments.ended[case.name].set()


def run_engine(case, arguments, number, deadline):
    """Run one to its end or to the deadline."""
    for old in arguments.work.glob(f"{case.name}_reports/*.json"):
        old.unlink()
    if why := features_stage.why_not(case, arguments):
        print(f"== {case.name}: not run: {why}", flush=True)
        return {"exit": None, "seconds": 0.0, "command": "", "patched": case.patched, "log": [], "not_run": why}
    line = command(case, arguments, number)
    started = time.monotonic()
    ends = deadline if case.limit_s is None else min(deadline, started + case.limit_s)
    log_path = arguments.work / f"{case.name}.log"
    with open(log_path, "w") as log:
        process = subprocess.Popen(
            line, stdout=log, stderr=subprocess.STDOUT, env=environment(case, arguments), start_new_session=True
        )
        try:
            code = process.wait(max(0.1, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = STOPPED
    text = log_path.read_text(errors="replace").splitlines()
    said = [x for x in text if f"[{case.name}]" in x or "deepseek_v4_sm120" in x or "shadow " in x]
    print(f"== {case.name}: exit {code}, {time.monotonic() - started:.0f} s", *said[-12:], sep="\n   ", flush=True)
    if code != 0:
        print(*text[-30:], sep="\n   | ", flush=True)
    shown = " ".join(f"{k}={v}" for k, v in case.environment.items())
    return {
        "exit": code,
        "seconds": round(time.monotonic() - started, 1),
        "command": f"{shown} {shlex.join(['engine_case.py', *case.options])}".strip(),
        "patched": case.patched,
        "prefills": prompts_stage.prefills(text),
        "prefill_graphs_gib": prompts_stage.graphs_gib(text),
        "log": said[:40] + (text[-80:] if code != 0 else []),
        **({"by_stage": True} if code == STOPPED and ends == deadline else {}),
    }


def reports(case, work):
    """The patches and shadow records of the processes that patched something."""
    found = []
    for path in sorted(work.glob(f"{case.name}_reports/*.json")):
        report = read_json(path)
        if any(p["state"] == "APPLIED" for p in report["patches"]):
            applied = [{k: p[k] for k in ("patch", "target", "state", "review")} for p in report["patches"]]
            kept = {name: report[name] for name in ("pid", "shadow", "found")}
            found.append(kept | {"patches": applied})
    return found


def compare_answers(harness, ours, theirs):
    """By prompt: positions, agreement of the greatest token, |difference|; and of each run against its repetition."""
    rows = []
    for part in PARTS:
        for name in [n for n in ours[part] if n in theirs[part]]:
            a, b = ours[part][name], theirs[part][name]
            positions, agreement, mean, greatest = harness.compare(a[0], b[0])
            own = [harness.compare(x[0], x[1])[2:] for x in (a, b) if len(x) > 1]
            rows.append(
                {
                    "prompt": name if part == "batch" else f"1x{name}",
                    "positions": positions,
                    "same_greatest": agreement,
                    "mean": mean,
                    "greatest": greatest,
                    "repeated": [{"mean": m, "greatest": g} for m, g in own],
                }
            )
    return rows


def of_stage(pairs, arguments):
    """Those whose run is an engine of the stage: calls of other stages may leave answers in the same folder."""
    names = {case.name for case in STAGES[arguments.stage]}
    return [pair for pair in pairs if pair[1] in names]


def differences(arguments):
    sys.path.insert(0, str(arguments.harness))
    import run_engine as harness

    found = []
    for what, ours, theirs in of_stage(DIFFERENCES, arguments):
        a, b = (read_json(arguments.work / f"{name}.json") for name in (ours, theirs))
        if a and b:
            found.append({"what": what, "run": ours, "against": theirs, "rows": compare_answers(harness, a, b)})
    return found


def texts(arguments):
    """By part: answers, those that differ, and the first token that does."""
    found, others = [], {}
    for what, speculating, plain in of_stage(TEXTS, arguments):
        a, b = (read_json(arguments.work / f"{name}_text.json") for name in (speculating, plain))
        if not (a and b):
            continue
        for size in dict.fromkeys(name.split("x")[0] for part in PARTS for name in b[part]):
            pairs = [
                (a[part][n]["ids"], b[part][n]["ids"]) for part in PARTS for n in b[part] if n.split("x")[0] == size
            ]
            firsts = [accepted_stage.first_difference(x, y) for x, y in pairs if x != y]
            row = {"what": what, "run": speculating, "at_once": int(size), "answers": len(pairs), "differ": len(firsts)}
            answers = [a[part][n] for part in PARTS for n in b[part] if n.split("x")[0] == size]
            found.append(row | {"first": min(firsts, default=None)} | accepted_stage.acceptance(speculating, answers))
        for run, said, mine in ((speculating, what, a), (plain, "no speculation", b)):
            if "beside" in mine:
                others[run, "beside"] = {"what": said, "run": run} | beside_sampled(mine["beside"], b["batch"])
            if accepted_stage.ENDED in mine:
                others[run, "ended"] = {"what": said, "run": run} | accepted_stage.ended(mine["ended"], b["batch"])
    return found + list(others.values())


def beside_sampled(answers, plain):
    """Answers beside requests that sample, against those of as many prompts of the plain run without such."""
    pairs = [(one["ids"], plain[n]["ids"]) for n, one in answers.items()]
    firsts = [accepted_stage.first_difference(x, y) for x, y in pairs if x != y]
    counts = dict.fromkeys(("at_once", "beside", "answers"), len(pairs))
    return counts | {"differ": len(firsts), "first": min(firsts, default=None)}


def sames(arguments):
    """Of the pairs of SAMES that ran: answers, those of which a bit differs, the greatest difference of a number."""
    found = []
    for what, run, against in of_stage(SAMES, arguments):
        a, b = (read_json(arguments.work / f"{name}_same.json") for name in (run, against))
        if not (a and b):
            continue
        one_at_a_time = next(iter(b["groups"].values()))
        pairs = [(f"{n} #{i}", x, b["alone"][n][0]) for n, asked in a["alone"].items() for i, x in enumerate(asked)]
        groups = {} if (run, against) in halves_stage.ALONE else a["groups"]
        pairs += [(f"{n} of {g}", x, one_at_a_time[n]) for g, group in groups.items() for n, x in group.items()]
        steps = [(p, q) for _, x, y in pairs for p, q in zip(x["logprobs"], y["logprobs"], strict=True)]
        others = [name for name, x, y in pairs if x["digest"] != y["digest"]]
        row = {"what": what, "run": run, "against": against, "answers": len(pairs), "differ": len(others)}
        found.append(row | {"which": others, "greatest": max(abs(p - q) for p, q in steps)})
    return found


def result(cases, outcomes, arguments):
    found = {}
    for case in cases:
        files = (read_json(arguments.work / f"{case.name}{suffix}.json") for suffix in SUFFIXES)
        answers, timings, text, same, features, drawn = files
        entry = dict(outcomes[case.name], reports=reports(case, arguments.work))
        if wrote := text or same or features or drawn:
            entry |= {k: wrote[k] for k in ("sglang", "startup_s")}
        if text:
            entry["verified"] = [answer["verified"] for part in PARTS for answer in text[part].values()]
        if drawn:
            entry[drawn_stage.PHASE] = drawn[drawn_stage.PHASE]
        if answers and not case.is_timed:
            entry |= {k: answers[k] for k in ("sglang", "startup_s", "logprobs", "bad_logprobs")}
        if timings and case.is_timed:
            entry |= {
                k: timings[k]
                for k in ("sglang", "startup_s", "rows", "prefill", "prompts", returns_stage.PHASE)
                if k in timings
            }
        found[case.name] = entry
    return found


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--harness", type=Path, default=Path(os.environ.get("E2E_HARNESS", REPO / ".e2e/tools")))
    parser.add_argument("--patch", type=Path, default=REPO / "build", help="the built folder that users mount")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--work", type=Path, default=Path("/tmp/dsv4_sm120_e2e"))
    parser.add_argument("--jobs", type=int, default=2, help="untimed engines side by side")
    parser.add_argument("--limit-s", type=float, default=560)
    parser.add_argument("--first-port", type=int, default=FIRST_PORT, help="of the engines; another for a run beside")
    parser.add_argument("--ports", type=int, default=PORTS, help="how many there are for them")
    parser.add_argument("--only", nargs="+", help="only these cases of the stage")
    shared = "of an engine: shared_cards.py; engines run one after the other"
    parser.add_argument("--ranks-a-card", type=int, default=1, choices=shared_cards.RANKS, help=shared)
    return parser.parse_args(argv)


def main():
    arguments = parse(sys.argv[1:])
    deadline = arguments.deadline = time.monotonic() + arguments.limit_s
    for name in ("harness", "patch", "work", "out"):
        setattr(arguments, name, getattr(arguments, name).resolve())
    for path in (arguments.harness / "run_engine.py", arguments.patch / "sitecustomize.py"):
        if not path.exists():
            raise SystemExit(f"run_stage: {path} does not exist (--harness, --patch)")
    arguments.work.mkdir(parents=True, exist_ok=True)
    cases = [c for c in STAGES[arguments.stage] if not arguments.only or c.name in arguments.only]
    if not cases:
        known = [c.name for c in STAGES[arguments.stage]]
        raise SystemExit(f"run_stage: no such case; stage {arguments.stage} has {known}")
    if why := shared_cards.why_not(cases, arguments.ranks_a_card):
        raise SystemExit(f"run_stage: {why}")
    for case in cases:  # what an earlier stage or an earlier try left must not be taken for this run's
        for suffix in SUFFIXES:
            (arguments.work / f"{case.name}{suffix}.json").unlink(missing_ok=True)
    accepted_stage.check([c.name for c in cases], arguments.work)
    features_stage.prepare(cases, arguments)
    arguments.port_step = min(2000, arguments.ports // len(cases))
    arguments.turns, arguments.engines = arguments.work / "turns", sum(c.takes_turns for c in cases)
    arguments.turns.unlink(missing_ok=True)
    # engines that take turns wait until all of them are up
    alone = any(c.is_timed and not c.takes_turns for c in cases)
    jobs = 1 if alone or arguments.ranks_a_card > 1 else max(arguments.jobs, arguments.engines)
    with shared_cards.service(arguments), concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = {c.name: pool.submit(run_case, c, arguments, i, deadline) for i, c in enumerate(cases)}
        outcomes = {name: future.result() for name, future in futures.items()}
    only = f" --only {' '.join(arguments.only)}" if arguments.only else ""
    ranks = arguments.ranks_a_card
    shared = {shared_cards.KEY: ranks} if ranks > 1 else {}
    only += f" --ranks-a-card {ranks}" if shared else ""
    stage = {
        "stage": arguments.stage,
        "device": device(),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(arguments.patch),
        "command": f"python3 tests/e2e/run_stage.py {arguments.stage}{only}",
        "cases": result(cases, outcomes, arguments),
        "differences": differences(arguments),
        "texts": texts(arguments),
        "sames": sames(arguments),
        **shared,
    }
    if arguments.stage == "features":
        stage["features"] = features_stage.matrix(outcomes, arguments.work)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"stage_{arguments.stage}.json"
    path.write_text(json.dumps(stage))
    print(f"wrote {path.name}, {path.stat().st_size / 1e6:.2f} MB", flush=True)
    subprocess.run([sys.executable, str(HERE / "collect.py"), str(path)], check=False)
    failed = [o for o in outcomes.values() if o["exit"] != 0 and "not_run" not in o]
    defects = [line for line in stage.get("features", []) if features_stage.STATES[line["state"]]]
    sys.exit(1 if defects or (failed and "features" not in stage) else 0)


if __name__ == "__main__":
    main()
