#!/usr/bin/env python3
"""Does a long prompt freeze the streams that decode? The real engine, before and after.

usage: interleaving.py --harness DIR [--patch build] [--out $OUT] [--only CASE ..] [--limit-s 560]

Four streams decode; when each has written WARM tokens, one prompt of 65,536 tokens arrives. Measured from its arrival
to its first token: the time between two tokens of a stream (median, 95th percentile, greatest) and its tokens/s,
beside the same before the prompt; and the prompt's time to its first token. Each case is one start of the engine
(SGLang 0.5.17, whose scheduler always prefers prefill; our patch prefill_interval is what 0.5.20 has as
--prefill-decode-interval). OUT/interleaving.json has the rows in the form of bench/results.
"""

import argparse
import ast
import asyncio
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPO = HERE.parent.parent
STREAMS, STREAM_PROMPT, WARM, LONG_PROMPT = 4, 512, 48, 65_536
STREAM_TOKENS = 1000  # of a stream, more than it can write until the prompt's first token
SETTING = "prefill_decode_interval_0_5_17"
# case -> (prefill chunk, decode steps after each chunk, mixed chunks)
CASES = {
    "stock": (8192, 0, False),
    "stock, chunk 2048": (2048, 0, False),
    "interval 8": (8192, 8, False),
    "chunk 4096, interval 11 (the plan's)": (4096, 11, False),
    "stock, mixed chunk 2048": (2048, 0, True),
}


def gaps(times, begin, end):
    """Seconds between tokens of one stream, the later one in (begin, end]; and the wait that `end` cuts."""
    inside = [b - a for a, b in zip(times, times[1:], strict=False) if begin < b <= end]
    last = max((t for t in times if t <= end), default=begin)
    later = [t for t in times if t > end]
    return inside + ([later[0] - last] if later and later[0] - last > end - last > 0 else [])


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def figures(streams, arrival, first):
    """What the streams saw from the prompt's arrival to its first token, in ms and tokens/s."""
    waits = [g for times in streams for g in gaps(times, arrival, first)]
    quiet = [g for times in streams for g in gaps(times, times[8], arrival)]
    counts = [sum(arrival < t <= first for t in times) for times in streams]
    return {
        "ITL before the prompt, median, ms": 1e3 * percentile(quiet, 0.5),
        "ITL while it prefills, median, ms": 1e3 * percentile(waits, 0.5),
        "ITL while it prefills, 95th percentile, ms": 1e3 * percentile(waits, 0.95),
        "ITL while it prefills, greatest, ms": 1e3 * max(waits, default=float("nan")),
        "tokens/s of a stream while it prefills": sum(counts) / len(counts) / (first - arrival),
        "time to the prompt's first token, s": first - arrival,
    }


class Measurement:
    """One long prompt among the streams of a running engine."""

    def __init__(self, engine, prompts, long_prompt):
        self.engine, self.prompts, self.long_prompt = engine, prompts, long_prompt
        self.times = [[] for _ in prompts]
        self.first = None

    async def generate(self, prompt, new):
        sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        return await self.engine.async_generate(input_ids=prompt, sampling_params=sampling, stream=True)

    async def stream(self, index):
        seen = 0
        async for chunk in await self.generate(self.prompts[index], STREAM_TOKENS):
            now, written = time.perf_counter(), chunk["meta_info"]["completion_tokens"]
            self.times[index] += [now] * (written - seen)
            seen = written

    async def run(self):
        streams = [asyncio.ensure_future(self.stream(i)) for i in range(len(self.prompts))]
        while min(map(len, self.times)) < WARM:
            await asyncio.sleep(0.005)
        arrival = time.perf_counter()
        async for _ in await self.generate(self.long_prompt, 1):
            self.first = self.first or time.perf_counter()
        await asyncio.gather(*streams)  # to their ends: an aborted stream of 0.5.17 may never say that it has ended
        if any(times[-1] <= self.first for times in self.times):
            raise RuntimeError(
                f"a stream wrote its {STREAM_TOKENS} tokens before the prompt's first: nothing to measure"
            )
        return figures(self.times, arrival, self.first)


def operators(patch):
    """OPS of the built folder, read without importing it: it must not hook this process before the engine's."""
    tree = ast.parse((patch / "deepseek_v4_sm120/__init__.py").read_text())
    (found,) = [node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "OPS"]
    return ast.literal_eval(found)


def run_case(name, arguments):
    """In a process of its own: start the engine, measure twice; the second counts, its kernels are all compiled."""
    sys.path.insert(0, str(arguments.harness))
    import run_engine as harness

    chunk, interval, mixed = CASES[name]
    words = [
        "run",
        "--free",
        "--variant",
        arguments.variant,
        "--context",
        str(LONG_PROMPT + 8192),
        "--chunk",
        str(chunk),
    ]
    words += ["--max-total-tokens", "1000000", "--graph-bs", "1", "2", "4", "--out", str(arguments.out)]
    words += ["--set", "enable_mixed_chunk=true"] if mixed else []
    if interval:
        words += ["--patch", str(arguments.patch)]
        off = [f"{operator}=off" for operator in operators(arguments.patch)]  # the interval is the only change
        os.environ |= {"DSV4_SM120_FORCE": "ops", "DSV4_SM120_SET": ",".join([f"{SETTING}={interval}", *off])}
    options = harness.parse(words)
    harness.__file__ = str(Path(__file__).resolve())  # what its reexec starts again, with the engine's PYTHONPATH
    harness.reexec(options)
    import sglang

    kwargs, model = harness.engine_args(options)
    kwargs["swa_full_tokens_ratio"] = 0.5  # the whole prompt fits the sliding-window pool: no queueing
    vocabulary = harness.vocab_of(model)
    engine = sglang.Engine(**kwargs)
    prompts = [harness.ids(STREAM_PROMPT, vocabulary, 11 + i) for i in range(STREAMS)]
    for prompt in prompts:  # one alone is a batch that the streams of an attempt may or may not be
        engine.generate(input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 2, "ignore_eos": True})
    for attempt in range(2):
        long_prompt = harness.ids(LONG_PROMPT, vocabulary, 99 + attempt)
        found = engine.loop.run_until_complete(Measurement(engine, prompts, long_prompt).run())
        print(f"[{name}] attempt {attempt}: {json.dumps(found)}", flush=True)
        time.sleep(1)
    (arguments.out / f"interleaving_{list(CASES).index(name)}.json").write_text(json.dumps(found))
    engine.shutdown()


def start(name, arguments, deadline):
    """Run one case as a child; its figures, or None when it failed or the limit came."""
    path = arguments.out / f"interleaving_{list(CASES).index(name)}.json"
    path.unlink(missing_ok=True)
    words = [sys.executable, str(HERE / "interleaving.py"), "--case", name, "--harness", str(arguments.harness)]
    words += ["--patch", str(arguments.patch), "--out", str(arguments.out), "--variant", arguments.variant]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DSV4_SM120", "E2E_"))}
    log_path = arguments.out / f"interleaving_{list(CASES).index(name)}.log"
    with open(log_path, "w") as log:
        child = subprocess.Popen(words, env=kept, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = child.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            code = f"stopped at the limit ({child.wait()})"
    if code != 0 or not path.exists():
        print(f"== {name}: exit {code}", *log_path.read_text(errors="replace").splitlines()[-25:], sep="\n   | ")
        return None
    return json.loads(path.read_text())


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--harness", type=Path, default=REPO / ".e2e/tools")
    parser.add_argument("--patch", type=Path, default=REPO / "build")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--variant", default="flash43e64")
    parser.add_argument("--limit-s", type=float, default=560)
    parser.add_argument("--only", nargs="+", choices=CASES)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    for name in ("harness", "patch", "out"):
        setattr(arguments, name, getattr(arguments, name).resolve())
    return arguments


def device():
    question = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(question, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return (done.stdout.strip().splitlines() or ["unknown"])[0]


def main():
    arguments = parse(sys.argv[1:])
    if arguments.case:
        return run_case(arguments.case, arguments)
    for path in (arguments.harness / "run_engine.py", arguments.patch / "sitecustomize.py"):
        if not path.exists():
            raise SystemExit(f"interleaving: {path} does not exist (--harness, --patch)")
    arguments.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + arguments.limit_s
    rows, failed = [], []
    for name in arguments.only or CASES:
        found = start(name, arguments, deadline)
        failed += [name] if found is None else []
        for metric, value in (found or {}).items():
            print(f"{name:40} {metric:45} {value:9.2f}", flush=True)
            keys = ("issue", "case", "impl", "metric", "value", "bar", "met")
            case = f"{STREAMS} streams, a prompt of {LONG_PROMPT} tokens, {arguments.variant}"
            rows.append(dict(zip(keys, (8, case, name, metric, round(value, 3), None, None), strict=True)))
    git = subprocess.run(["git", "-C", str(REPO), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    table = {
        "benchmark": "interleaving",
        "device": device(),
        "date": datetime.date.today().isoformat(),
        "commit": git.stdout.strip() or "unknown",
        "command": "python3 tests/e2e/interleaving.py " + " ".join(sys.argv[1:]),
        "ceilings": {},
        "rows": rows,
    }
    (arguments.out / "interleaving.json").write_text(json.dumps(table, indent=1) + "\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
