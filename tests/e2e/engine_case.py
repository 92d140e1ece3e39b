#!/usr/bin/env python3
"""One start of the real engine: answers to fixed prompts, decode timings, kernels of a decode step.

usage: engine_case.py --harness DIR [--phases answer bench profile] [--batches 8 32] [options of run_engine.py]

The harness (a folder with run_engine.py, which builds offline engine arguments, prompts of token ids and a forced
continuation) is only called. `answer` writes OUT/NAME.json in the form of `run_engine.py run`, which its `diff` reads;
`bench` and `profile` write OUT/NAME_bench.json. The patch and its switches come from --patch and the environment.
"""

import argparse
import collections
import glob
import gzip
import json
import math
import os
import sys
import time

PROFILED_STEPS = 23
SETTLE_S = 3.0  # shadow mode's writer runs twice a second, and shutting the engine down kills its processes
PARTS = ("single", "batch")


def parse(argv):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--harness", required=True)
    parser.add_argument("--phases", nargs="+", choices=["answer", "bench", "profile"], default=["answer"])
    parser.add_argument("--batches", nargs="*", type=int, default=[])
    return parser.parse_known_args(argv)


def batch_lengths(size):
    """Prompt lengths of a batch: 5 to about 1,000 tokens, all different."""
    return [5 + (991 // size) * i for i in range(size)]


def is_bad(logprob):
    return logprob is None or not math.isfinite(logprob)


class Case:
    def __init__(self, harness, options):
        import sglang

        self.harness, self.options = harness, options
        arguments, model = harness.engine_args(options)
        if options.forced:
            arguments["enable_fp32_lm_head"] = True
        else:
            arguments.setdefault("swa_full_tokens_ratio", 0.5)  # whole prompts fit the sliding-window pool: no queueing
        self.vocabulary = harness.vocab_of(model)
        started = time.time()
        self.engine = sglang.Engine(**arguments)
        self.result = {"name": options.name, "variant": options.variant, "args": arguments}
        self.result |= {"sglang": sglang.__version__, "startup_s": time.time() - started}
        print(f"[{options.name}] engine up after {self.result['startup_s']:.1f} s", flush=True)

    def write(self, suffix, data):
        os.makedirs(self.options.out, exist_ok=True)
        with open(os.path.join(self.options.out, f"{self.options.name}{suffix}.json"), "w") as f:
            json.dump(data, f, default=str)

    def ask(self, prompts):
        options = self.options
        return self.engine.generate(
            input_ids=prompts,
            sampling_params={"temperature": 0, "max_new_tokens": options.new, "ignore_eos": True},
            return_logprob=True,
            top_logprobs_num=options.top,
            logprob_start_len=[max(0, len(p) - options.prompt_positions) for p in prompts],
        )

    def answer(self, batches):
        result = {**self.result, "single": {}, "batch": {}}
        for length in [int(n) for n in self.options.prompts.split(",") if n]:
            for _ in range(self.options.repeat):
                started = time.time()
                answer = self.harness.slim(self.ask([self.harness.ids(length, self.vocabulary, 1)])[0])
                result["single"].setdefault(str(length), []).append(answer)
                print(f"[{self.options.name}] prompt {length}: {time.time() - started:.2f} s", flush=True)
        for size in batches:
            lengths = batch_lengths(size)
            prompts = [self.harness.ids(n, self.vocabulary, 2) for n in lengths]
            started = time.time()
            for n, answer in zip(lengths, self.ask(prompts), strict=True):
                result["batch"][f"{size}x{n}"] = [self.harness.slim(answer)]
            print(f"[{self.options.name}] batch of {size}: {time.time() - started:.2f} s", flush=True)
        answers = [a for part in PARTS for repeated in result[part].values() for a in repeated]
        logprobs = [x for a in answers for x in a["logprobs"]]
        tops = [t[0] for a in answers for part in ("top", "prompt_top") for step in a[part] for t in step]
        result["logprobs"] = len(logprobs) + len(tops)
        result["bad_logprobs"] = sum(map(is_bad, logprobs)) + sum(map(is_bad, tops))
        self.write("", result)

    def generate(self, batch, length, new, seed):
        prompts = [self.harness.ids(length, self.vocabulary, seed + i) for i in range(batch)]
        started = time.perf_counter()
        self.engine.generate(
            input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        )
        return time.perf_counter() - started

    def bench(self, batch):
        length, new = self.options.in_len[0], self.options.out_len
        self.generate(batch, length, 8, 1)
        pairs = [
            (self.generate(batch, length, 1, 100 + i), self.generate(batch, length, 1 + new, 100 + i))
            for i in range(self.options.reps)
        ]
        steps_ms = sorted(1e3 * (long - short) / new for short, long in pairs)
        row = {
            "in_len": length,
            "out_len": new,
            "prefill_ms": 1e3 * min(short for short, _ in pairs),
            "step_ms_best": steps_ms[0],
            "step_ms_median": steps_ms[len(steps_ms) // 2],
        }
        print(f"[{self.options.name}] batch {batch}: step {row['step_ms_best']:.3f} ms best", flush=True)
        return row

    def profile(self, batch):
        """Launches and busy time of a decode step, from the graph's own events in the engine's profiler."""
        folder = os.path.join(self.options.out, f"{self.options.name}_trace_{batch}")
        length = self.options.in_len[0]
        self.generate(batch, length, 8, 5)
        self.engine.start_profile(output_dir=folder, activities=["GPU"], profile_id=f"bs{batch}")
        self.generate(batch, length, PROFILED_STEPS + 1, 5)
        self.engine.stop_profile()
        time.sleep(SETTLE_S)
        traces = sorted(glob.glob(folder + "/**/*.json.gz", recursive=True), key=os.path.getmtime)
        if not traces:
            raise RuntimeError(f"the profiler left no trace in {folder}")
        with gzip.open(traces[-1], "rt") as f:
            events = json.load(f)["traceEvents"]
        kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in e]
        in_graph = [e for e in kernels if e.get("args", {}).get("graph node id") or e.get("args", {}).get("graph id")]
        by_name = collections.defaultdict(lambda: [0, 0.0])
        for event in in_graph:
            entry = by_name[event["name"][:120]]
            entry[0] += 1
            entry[1] += event["dur"]
        table = [[name, n / PROFILED_STEPS, us / PROFILED_STEPS] for name, (n, us) in by_name.items()]
        row = {
            "launches_per_step": len(in_graph) / PROFILED_STEPS,
            "busy_us_per_step": sum(t[2] for t in table),
            "launches_outside_graphs": len(kernels) - len(in_graph),
            "kernels": sorted(table, key=lambda t: -t[2]),
        }
        print(f"[{self.options.name}] batch {batch}: {row['launches_per_step']:.0f} launches a step", flush=True)
        return row


def main():
    own, rest = parse(sys.argv[1:])
    sys.path.insert(0, os.path.abspath(own.harness))
    import run_engine as harness

    options = harness.parse(["run", *rest])
    options.forced = "answer" in own.phases
    if options.forced and len(own.phases) > 1:
        raise SystemExit("engine_case: `answer` forces the continuation, which costs launches; time separately")
    if options.forced:
        os.environ["E2E_FORCE"] = "1"
    harness.__file__ = os.path.abspath(__file__)  # what its reexec starts again, with the engine's PYTHONPATH
    harness.reexec(options)
    options.graph_bs = options.graph_bs or sorted(set(options.bs))
    case = Case(harness, options)
    if options.forced:
        case.answer(own.batches)
    rows = {}
    for batch in options.bs if not options.forced else []:
        rows[batch] = {}
        for phase in own.phases:
            rows[batch].update(case.bench(batch) if phase == "bench" else case.profile(batch))
            case.write("_bench", {**case.result, "rows": rows})
    time.sleep(SETTLE_S)
    case.engine.shutdown()


if __name__ == "__main__":
    main()
