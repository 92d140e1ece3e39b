#!/usr/bin/env python3
"""One start of the real engine: answers to fixed prompts, decode timings, kernels of a decode step.

usage: engine_case.py --harness DIR [--phases PHASE ..] [--batches 8 32] [options of run_engine.py]

The harness (a folder with run_engine.py, which builds offline engine arguments, prompts of token ids and a forced
continuation) is only called. `answer` writes OUT/NAME.json in the form of `run_engine.py run`, which its `diff` reads;
`text` writes OUT/NAME_text.json: the tokens that the engine chooses by itself, greedily, one prompt at a time and in
batches, because a speculating one cannot be forced; `same` writes OUT/NAME_same.json, a digest of every
log-probability, of prompts asked whole and half from the prefix cache, and of others in groups of several sizes;
`bench` (step times), `profile` (kernels of a decode step), `prefill` (kernels of a long prompt's prefill) and `prompts`
(prompts_stage.py) write OUT/NAME_bench.json. The patch and its switches come from --patch and the environment. With
--turns FILE --engines N engines start side by side; when all N are up, they take turns for what is timed, or asked of
several cards, where kernels of two engines that wait for each other's ranks get in each other's way: who holds the
file's lock has the cards to itself. `features` and `features_text` write OUT/NAME_features.json
(features_engine.py), `drawn` OUT/NAME_drawn.json (drawn_stage.py). --rounds N times `bench` and `prompts` N times, each
in a turn of its own: an engine's step varies by some per cent from minute to minute, so engines are compared round by
round.
"""

import argparse
import collections
import contextlib
import fcntl
import glob
import gzip
import hashlib
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import statistics
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import accepted_stage  # noqa: E402
import drawn_stage  # noqa: E402
import prefill_beside  # noqa: E402
import prompts_stage  # noqa: E402
import returns_stage  # noqa: E402

PROFILED_STEPS = (8, 40)  # decode steps of the two profiled runs
SETTLE_S = 3.0  # shadow mode's writer runs twice a second, and shutting the engine down kills its processes
PARTS = ("single", "batch")
FORCED = ("answer", "same", "features")
TIMED = ("bench", "profile", "prefill", "prompts", returns_stage.PHASE)
REPEATED = ("bench", "prompts")  # phases of every round
ALONE = (*FORCED, "text", "features_text", drawn_stage.PHASE)  # an engine's only one: nothing is timed beside it
FEATURES = ("features", "features_text")  # features_engine.py
EXACT = ("output_token_logprobs", "output_top_logprobs", "input_top_logprobs")  # of an answer's meta_info, unrounded
LONG_PROMPT = 32_000  # tokens of the profiled prefill
LAST_PROMPT = 8  # tokens of the prompt that enters with the last of those that are timed
COMPANY = 8  # greedy prompts at once, beside as many that sample
BESIDE = f"{COMPANY} beside {COMPANY} that sample"
TEXT_S = 300.0  # how long for the text of the run beside it that drafts are taken from
OTHERS_START_S = 90.0  # how long an engine waits for the others; one that does not start must not cost the rest
OTHERS_ROUND_S = 60.0  # and for their turns of the round before


def parse(argv):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--harness", required=True)
    parser.add_argument("--phases", nargs="+", choices=[*ALONE, *TIMED], default=["answer"])
    parser.add_argument("--steps", nargs="+", default=[], help="of the phases features and features_text")
    parser.add_argument(
        "--prefill", nargs="*", default=[], metavar="NAME=JSON", help="of the engine beside: it prefills"
    )
    parser.add_argument("--answers-to", type=int, help="the pipe of an engine that prefills (prefill_beside.py)")
    parser.add_argument("--batches", nargs="*", type=int, default=[])
    parser.add_argument("--turns")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--profiled", nargs="+", type=int, help="batches of the phase profile; all, as it comes")
    parser.add_argument("--shapes", nargs="+", help="of the phase prompts: how many at once x tokens of each")
    return parser.parse_known_args(argv)


def batch_lengths(size):
    """Prompt lengths of a batch: 5 to about 1,000 tokens, all different."""
    return [5 + (991 // size) * i for i in range(size)]


def exact(answer):
    """All numbers of an answer as a digest, and those of its own tokens. NaN beside NaN must not be the same."""
    meta = answer["meta_info"]
    text = repr([answer["output_ids"], *(meta.get(name) for name in EXACT)])
    digest = hashlib.sha256(text.encode()).hexdigest()
    logprobs = [step[0] for step in meta["output_token_logprobs"]]
    if bad := [logprob for logprob in logprobs if is_bad(logprob)]:
        raise RuntimeError(f"{len(bad)} of {len(logprobs)} log-probabilities of an answer are no numbers, as {bad[0]}")
    return {"digest": digest, "logprobs": logprobs}


def is_reproducible():
    return "reproducible=on" in os.environ.get("DSV4_SM120_SET", "").split(",")


def is_bad(logprob):
    return logprob is None or not math.isfinite(logprob)


CARDS, HOSTS = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")  # as bench/timeline.py has them
GRAPH_LAUNCH = "cudaGraphLaunch"


def by_kernel(events, kinds=CARDS):
    """{kernel: (launches, us)} of a profiler trace; of HOSTS {call: (calls, us)}."""
    found = collections.defaultdict(lambda: (0, 0.0))
    for event in events:
        if event.get("cat") in kinds and "dur" in event:
            launches, us = found[event["name"][:120]]
            found[event["name"][:120]] = launches + 1, us + event["dur"]
    return dict(found)


def per_step(short, long, steps):
    """What each of `steps` more decode steps adds; prefill, which both runs have, cancels.

    Launches that no whole number a step explains are `uneven`: few of them, or the two prefills were not alike.
    """
    added = {}
    for name in short.keys() | long.keys():
        (n0, us0), (n1, us1) = short.get(name, (0, 0.0)), long.get(name, (0, 0.0))
        if n1 != n0:  # a kernel of prefill alone adds only the noise of its time
            added[name] = n1 - n0, us1 - us0
    table = [[name, n / steps, us / steps] for name, (n, us) in added.items()]
    return {
        "launches_per_step": sum(t[1] for t in table),
        "busy_us_per_step": sum(t[2] for t in table),
        "uneven_launches": sum(abs(n - steps * round(n / steps)) for n, _ in added.values()),
        "profiled_steps": steps,
        "kernels": sorted(table, key=lambda t: -t[2]),
    }


def must_not_be_retracted(answers):
    if retracted := sum(answer["meta_info"].get("num_retractions") or 0 for answer in answers):
        of = f"{retracted} of {len(answers)} requests were retracted"
        raise RuntimeError(f"{of}: the pool is too small to time a step")


class Case:
    def __init__(self, harness, options):
        import sglang

        self.harness, self.options, self.prompts = harness, options, {}
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
        self.engine.freeze_gc()  # as a server does behind its warm-up (0.5.18 and later), so that no step waits for it
        print(f"[{options.name}] engine up after {self.result['startup_s']:.1f} s", flush=True)

    def write(self, suffix, data):
        os.makedirs(self.options.out, exist_ok=True)
        path = os.path.join(self.options.out, f"{self.options.name}{suffix}.json")
        with open(path + ".part", "w") as f:
            json.dump(data, f, default=str)
        os.replace(path + ".part", path)  # whole: others may wait for it

    def sampling(self, beside):
        """Of as many requests as `beside` says, each with a temperature or greedy."""
        once = {"max_new_tokens": self.options.new, "ignore_eos": True}
        return [once | {"temperature": 1.0 if samples else 0} for samples in beside]

    def company(self, prompts):
        """(prompts, each followed by another of its length that is sampled; which are)"""
        others = [self.harness.ids(len(prompt), self.vocabulary, 4) for prompt in prompts]
        together = [one for pair in zip(prompts, others, strict=True) for one in pair]
        return together, [False, True] * len(prompts)

    def ask(self, prompts, beside=None):
        options = self.options
        return self.engine.generate(
            input_ids=prompts,
            sampling_params=self.sampling(beside or [False] * len(prompts)),
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

    def same(self, sizes):
        """Each prompt behind its first half and then once more, which the prefix cache has where there is one; then the
        prompts of the greatest batch in groups of each size."""
        result = {**self.result, "alone": {}, "groups": {}}
        for length in [int(n) for n in self.options.prompts.split(",") if n]:
            prompt = self.harness.ids(length, self.vocabulary, 1)
            _, *asked = (self.ask([ids])[0] for ids in (prompt[: length // 2], prompt, prompt))
            result["alone"][str(length)] = [exact(answer) for answer in asked]
            print(f"[{self.options.name}] prompt {length}", flush=True)
        lengths = batch_lengths(max(sizes))
        prompts = [self.harness.ids(n, self.vocabulary, 2) for n in lengths]
        for size in sizes:
            answers = [a for i in range(0, len(prompts), size) for a in self.ask(prompts[i : i + size])]
            result["groups"][str(size)] = {str(n): exact(a) for n, a in zip(lengths, answers, strict=True)}
            print(f"[{self.options.name}] groups of {size}", flush=True)
        if is_reproducible():
            answers = []
            for i in range(0, len(prompts), COMPANY):
                answers += self.ask(*self.company(prompts[i : i + COMPANY]))[::2]
            result["groups"][BESIDE] = {str(n): exact(a) for n, a in zip(lengths, answers, strict=True)}
            print(f"[{self.options.name}] groups of {BESIDE}", flush=True)
        self.write("_same", result)

    def text(self, batches):
        """The tokens of greedy answers, and how many verifications each took where the server speculates; of a
        reproducible server beside requests that sample, too. Drafts that are forced (drafts_plugin) are another run's
        text."""
        wait_for(os.environ.get("E2E_TEXT"))
        result = {**self.result, "single": {}, "batch": {}}
        lengths = [int(n) for n in self.options.prompts.split(",") if n]
        for part, sizes in (("single", [[n] for n in lengths]), ("batch", map(batch_lengths, batches))):
            for asked in sizes:
                prompts = [self.harness.ids(n, self.vocabulary, 3) for n in asked]
                greedy = self.sampling([False] * len(prompts))
                for n, answer in zip(
                    asked, self.engine.generate(input_ids=prompts, sampling_params=greedy), strict=True
                ):
                    kept = {"ids": answer["output_ids"], "verified": answer["meta_info"].get("spec_verify_ct")}
                    result[part][f"{len(asked)}x{n}"] = kept
                print(f"[{self.options.name}] text of {len(asked)} prompt(s) from {asked[0]} tokens", flush=True)
        if is_reproducible():
            lengths = batch_lengths(COMPANY)
            prompts, samples = self.company([self.harness.ids(n, self.vocabulary, 3) for n in lengths])
            answers = self.engine.generate(input_ids=prompts, sampling_params=self.sampling(samples))[::2]
            result["beside"] = {
                f"{COMPANY}x{n}": {"ids": answer["output_ids"]} for n, answer in zip(lengths, answers, strict=True)
            }
            print(f"[{self.options.name}] text of {BESIDE}", flush=True)
            result[accepted_stage.ENDED] = self.ended(lengths, result["batch"])
        self.write("_text", result)

    def ended(self, lengths, texts):
        """Prompts whose text is known, once more, to end by one of its tokens that min_tokens forbids before."""
        asked = {f"{COMPANY}x{n}": self.harness.ids(n, self.vocabulary, 3) for n in lengths}
        sampling = {name: accepted_stage.ending(texts[name]["ids"]) for name in asked if name in texts}
        sampling = {name: self.sampling([False])[0] | how for name, how in sampling.items() if how}
        if not sampling:
            return {}
        prompts = [asked[name] for name in sampling]
        answers = self.engine.generate(input_ids=prompts, sampling_params=list(sampling.values()))
        print(f"[{self.options.name}] text of {len(answers)} that end", flush=True)
        return {
            name: {"ids": answer["output_ids"], "finish": answer["meta_info"]["finish_reason"]["type"]}
            for name, answer in zip(sampling, answers, strict=True)
        }

    def drawn(self):
        """Requests that sample, and what the ranks drew and went on with."""
        prompts = [self.harness.ids(9 + i, self.vocabulary, 8) for i in range(drawn_stage.PROMPTS)]
        each = [drawn_stage.SAMPLING[i % len(drawn_stage.SAMPLING)] for i in range(len(prompts))]
        once = {"max_new_tokens": self.options.new, "ignore_eos": True}
        for number in range(drawn_stage.ROUNDS):
            self.engine.generate(input_ids=prompts, sampling_params=[once | one for one in each])
            print(f"[{self.options.name}] round {number + 1} of {drawn_stage.ROUNDS}", flush=True)
        folder = pathlib.Path(os.environ[drawn_stage.FOLDER])
        self.write("_drawn", {**self.result, drawn_stage.PHASE: drawn_stage.counted(folder)})

    def generate(self, batch, length, new, seed):
        prompts = [self.harness.ids(length, self.vocabulary, seed + i) for i in range(batch)]
        started = time.perf_counter()
        answers = self.engine.generate(
            input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        )
        seconds = time.perf_counter() - started
        must_not_be_retracted(answers)
        return seconds

    def first_tokens(self, batch, length, seed):
        """(seconds, answers) of prompts sent at once, a token each."""
        prompts = [self.harness.ids(length, self.vocabulary, seed + i) for i in range(batch)]
        once = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        started = time.perf_counter()
        answers = self.engine.generate(input_ids=prompts, sampling_params=once)
        return time.perf_counter() - started, answers

    def within_a_run(self, batch, length, new, seed):
        """Milliseconds of a decode step, from the streams' first tokens to their last: one prompt more, of a few tokens
        and asked for one, enters the last pass of theirs and ends with it. None where it did not come before them, or
        nobody says when."""
        prompts = [self.harness.ids(length, self.vocabulary, seed + i) for i in range(batch)]
        prompts.append(self.harness.ids(LAST_PROMPT, self.vocabulary, seed + batch))
        once = {"temperature": 0, "ignore_eos": True}
        asked = [once | {"max_new_tokens": 1 + new}] * batch + [once | {"max_new_tokens": 1}]
        answers = self.engine.generate(input_ids=prompts, sampling_params=asked)
        must_not_be_retracted(answers)
        *ends, began = [answer["meta_info"].get("e2e_latency") or 0.0 for answer in answers]
        return 1e3 * (max(ends) - began) / new if 0.0 < began < min(ends) else None

    def bench(self, batch):
        length, new = self.options.in_len[0], self.options.out_len
        self.generate(batch, length, 8, 1)
        pairs = [
            (self.generate(batch, length, 1, 100 + i), self.generate(batch, length, 1 + new, 100 + i))
            for i in range(self.options.reps)
        ]
        shorts, longs = ([pair[i] for pair in pairs] for i in (0, 1))
        # the least of each: a prefill that took long for once must not make a step look short
        row = {
            "in_len": length,
            "out_len": new,
            "prefill_ms": 1e3 * min(shorts),
            "step_ms_best": 1e3 * (min(longs) - min(shorts)) / new,
            "step_ms_worst": 1e3 * (max(longs) - min(shorts)) / new,
        }
        within = [self.within_a_run(batch, length, new, 100 + i) for i in range(self.options.reps)]
        if all(within):
            row |= {"within_ms_best": min(within), "within_ms_worst": max(within)}
        print(f"[{self.options.name}] batch {batch}: step {row['step_ms_best']:.3f} ms best", flush=True)
        return row

    def trace(self, batch, new, length=None):
        """{kernel: (launches, us)} of one run of `new` decode steps, its prefill included."""
        return by_kernel(self.events(batch, new, length or self.options.in_len[0]))

    def events(self, batch, new, length):
        """What the profiler saw of the cards, on rank 0."""
        folder = os.path.join(self.options.out, f"{self.options.name}_trace_{batch}_{length}_{new}")
        shutil.rmtree(folder, ignore_errors=True)  # an earlier run's trace must not be taken for this one's
        self.engine.start_profile(output_dir=folder, activities=["GPU"], profile_id=f"bs{batch}_{new}")
        self.generate(batch, length, 1 + new, returns_stage.TRACED)
        self.engine.stop_profile()  # returns when the trace is written
        traces = glob.glob(folder + "/**/*.json.gz", recursive=True)
        if len(traces) > 1:  # of several cards: a trace for each rank
            traces = [path for path in traces if re.search(r"TP-0\b", path)]
        if len(traces) != 1:
            raise RuntimeError(f"profile: expected one trace in {folder}, got {len(traces)}")
        with gzip.open(traces[0], "rt") as f:
            return json.load(f)["traceEvents"]

    def profile(self, batch):
        """Launches and busy time of a decode step: a longer run less a shorter one of the same prompts."""
        self.generate(batch, self.options.in_len[0], 1 + PROFILED_STEPS[0], 5)
        repeats = 1 if batch == 1 else 2  # several prompts may enter prefill together or one after the other
        length, steps = self.options.in_len[0], PROFILED_STEPS[1] - PROFILED_STEPS[0]
        kernels, launching = [], []
        for new in PROFILED_STEPS:
            seen = [self.events(batch, new, length) for _ in range(repeats)]
            kernels.append([by_kernel(events) for events in seen])
            launching.append(min(by_kernel(events, HOSTS).get(GRAPH_LAUNCH, (0, 0.0))[1] for events in seen))
        row = min((per_step(a, b, steps) for a, b in itertools.product(*kernels)), key=lambda r: r["uneven_launches"])
        row["graph_launch_us_per_step"] = (launching[1] - launching[0]) / steps  # 0: the profiler did not look
        if row["launches_per_step"] <= 0 or row["busy_us_per_step"] <= 0:
            raise RuntimeError(
                f"profile: {steps} more decode steps must add launches and time, got {row['launches_per_step']:.1f} "
                f"launches and {row['busy_us_per_step']:.1f} us a step"
            )
        print(f"[{self.options.name}] batch {batch}: {row['launches_per_step']:.1f} launches a step", flush=True)
        return row

    def prefill(self):
        """Kernels of one long prompt's prefill, with the time to its first token."""
        self.generate(1, LONG_PROMPT, 1, 6)
        seconds = min(self.generate(1, LONG_PROMPT, 1, 7 + i) for i in range(2))
        kernels = self.trace(1, 0, LONG_PROMPT)
        table = sorted(([name, n, us] for name, (n, us) in kernels.items()), key=lambda t: -t[2])
        row = {"prompt": LONG_PROMPT, "first_token_ms": 1e3 * seconds, "kernels": table}
        print(f"[{self.options.name}] prompt of {LONG_PROMPT}: {seconds:.3f} s to its first token", flush=True)
        return row

    def timed(self, phases, earlier, own):
        """The timed phases in their order; what is done is kept if a later one fails. earlier: the rows of the rounds
        before, None in the first. own: the options that are not the harness's."""
        result, rows = {**self.result, "rows": {}}, {}
        for batch in self.options.bs:
            rows[batch] = {}
            for phase in phases:
                if phase == "bench" or (phase == "profile" and batch in (own.profiled or self.options.bs)):
                    rows[batch].update(getattr(self, phase)(batch))
                if phase == "bench" and earlier:
                    rows[batch] = over_rounds(earlier[batch], rows[batch])
                self.write("_bench", {**result, "rows": rows})
        if "prefill" in phases:
            self.write("_bench", {**result, "rows": rows, "prefill": self.prefill()})
        if "prompts" in phases:
            self.prompts = prompts_stage.measure(self, own.shapes, self.prompts)
            self.write("_bench", {**result, "rows": rows, "prompts": self.prompts})
        if returns_stage.PHASE in phases:
            conversations = returns_stage.measure(self, prompts_stage.of_passes)
            self.write("_bench", {**result, "rows": rows, returns_stage.PHASE: conversations})
        return rows


def over_rounds(before, row):
    """The least and the greatest of all rounds, and each round's best."""
    rounds = [*before.get("step_ms_rounds", [before["step_ms_best"]]), row["step_ms_best"]]
    least, most = ("prefill_ms", "step_ms_best", "within_ms_best"), ("step_ms_worst", "within_ms_worst")
    both = before.keys() & row.keys()  # what every round could tell
    before = {k: value for k, value in before.items() if k in both or not k.startswith("within_")}
    extremes = {k: min(before[k], row[k]) for k in least if k in both}
    extremes |= {k: max(before[k], row[k]) for k in most if k in both}
    middle = statistics.median(rounds)
    return {**before, **extremes, "step_ms_rounds": rounds, "step_ms_middle_round": middle}


def wait_for(path):
    """Until the file is there."""
    deadline = time.monotonic() + TEXT_S
    while path is not None and not os.path.exists(path):
        if time.monotonic() > deadline:
            raise SystemExit(f"engine_case: {path} must be there within {TEXT_S:.0f} s, the text to be drafted")
        time.sleep(0.2)


@contextlib.contextmanager
def turn(path, engines, number=0):
    """Holds the lock of the file `path`, once all engines have started, and in later turns once those that have have
    had as many; without a path nobody shares the GPU."""
    if path is None:
        yield
        return
    with open(path, "a+") as file:
        if number == 0:
            tell(file, "up")
            wait_until(lambda: count(file, "up") >= engines, OTHERS_START_S)
        else:
            wait_until(lambda: count(file, "done") >= number * still_there(file), OTHERS_ROUND_S)
        fcntl.flock(file, fcntl.LOCK_EX)
        what = "gone"  # whose turn fails has no other
        try:
            yield
            what = "done"
        finally:
            tell(file, what)


def tell(file, what):
    file.write(f"{what}\n")
    file.flush()


def count(file, what):
    file.seek(0)
    return file.read().split().count(what)


def still_there(file):
    return count(file, "up") - count(file, "gone")


def wait_until(is_so, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not is_so():
        time.sleep(0.1)


def ask(case, own, beside):
    """The only phase of an engine that has one. beside: the engine that prefills for it, if any."""
    (phase,) = own.phases
    if phase in FEATURES:
        from features_engine import Rounds

        Rounds(case, exact, beside).run(own.steps)
    elif phase == drawn_stage.PHASE:
        case.drawn()
    else:
        {"answer": case.answer, "same": case.same, "text": case.text}[phase](own.batches)


def main():
    own, rest = parse(sys.argv[1:])
    sys.path.insert(0, os.path.abspath(own.harness))
    import run_engine as harness

    options = harness.parse(["run", *rest])
    options.forced = bool(set(own.phases) & set(FORCED))
    if len(own.phases) > 1 and set(own.phases) & set(ALONE):
        raise SystemExit(f"engine_case: {', '.join(ALONE)} are each asked of an engine of their own; time separately")
    if options.forced:
        os.environ["E2E_FORCE"] = "1"
    harness.__file__ = os.path.abspath(__file__)  # what its reexec starts again, with the engine's PYTHONPATH
    harness.reexec(options)
    options.graph_bs = options.graph_bs or sorted(set(options.bs))
    beside = None
    if own.prefill:
        beside = prefill_beside.Prefill(
            own.prefill, sys.argv[1:], options.name, harness.engine_args(options)[0]["port"]
        )
    case = Case(harness, options)
    if own.answers_to is not None:
        prefill_beside.serve(case.engine, own.answers_to)
    elif own.phases[0] in ALONE:
        with turn(own.turns, own.engines):
            ask(case, own, beside)
    else:
        rows = None
        for number in range(own.rounds):
            with turn(own.turns, own.engines, number):
                phases = [phase for phase in own.phases if number == 0 or phase in REPEATED]
                rows = case.timed(phases, rows, own)
    time.sleep(SETTLE_S)
    case.engine.shutdown()
    if beside is not None:
        beside.end()  # SGLang has ended all that this process had started


if __name__ == "__main__":
    main()
