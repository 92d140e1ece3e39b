"""Random load on a release's own scheduler, pools, allocators and prefix cache, beside `slots_model`.

A program of its own, because it imports SGLang's modules from a wheel:

    python3 -m tests.patching.slots_random_load 0.5.23 [SEEDS]  JSON: what each case and each wrong SGLang came to, and
                                                                SGLang alone where ours mends it; 0 SEEDS: that alone;
                                                                "suite": the seeds that meet most in few steps

Requests arrive, are read in chunks, go on, draft, end, are aborted, retracted, paused, evicted and flushed; the model
says what follows from what it is given, so that each answer is known. The GPU's kernels stand in as torch; a step's
result is known one step later, as on a GPU. The prefix cache's tree is SGLang's own in Python: that in Rust, which
0.5.21 and later run, is built for another Python than the tests'.
"""

import contextlib
import importlib
import json
import logging
import os
import random
import sys
import traceback
import warnings
from array import array
from collections import Counter

from tests.patching import slots_model as model
from tests.patching.slots_server import Wheel, everything, install, scheduler_of
from tests.patching.wheels import since

STEPS, SEEDS = 250, "4"
CASES = {  # what is asked of the server; sizes in tokens
    "plain": {},
    "tight": {"windows": 11, "chunk": 2, "requests": 8},
    "no prefix cache": {"radix": False, "windows": 20},
    "EAGLE": {"drafts": 4, "windows": 14},
    "EAGLE, one at a time": {"drafts": 2, "overlap": False},
    "mixed": {"mixed": True, "windows": 16},
}
# Of 14 seeds those in whose 100 steps the most of five faults are met: windows given back a page early, states kept of
# no page's end, windows that stay taken, requests that are retracted and keep theirs, a flush that leaves the tree.
SUITE = dict(zip(CASES, (12, 2, 12, 10, 2, 1), strict=True))
STEPS_OF_SUITE = 100
MENDED = {  # where SGLang alone goes wrong: up to which release, the server, seeds, steps
    "priorities": ("0.6", {"priority": True, "windows": 11, "requests": 4, "chunk": 2, "radix": False}, (3, 18), 120),
    "two chunks": ("0.6", {"radix": False, "windows": 6}, (0, 5), 60),
    "mixed, full": ("0.5.22", {"mixed": True, "windows": 14}, (12, 14), 80),
}


class Load:
    """One server and what is asked of it, by a seed."""

    def __init__(self, version, case, seed):
        self.chance = random.Random(seed)
        self.case = {"windows": 16, "chunk": 4, "requests": 6, "drafts": 0, "overlap": True, "radix": True} | case
        self.case = (
            {"tokens": 60} | self.case | {"mixed": case.get("mixed", False), "priority": case.get("priority", False)}
        )
        self.scheduler, self.worker, self.ended = self.server(version)
        self.live, self.texts, self.arrived = {}, [], 0

    def server(self, version):
        return scheduler_of(version, self.case, self.chance)

    def arrive(self):
        chance = self.chance
        text = list(chance.choice(self.texts)) if self.texts and chance.random() < 0.75 else []
        text = text[: chance.randint(0, len(text))] if chance.random() < 0.5 else text
        text = (text + [chance.randint(10, 14) for _ in range(chance.randint(1, chance.choice([3, 20, 90])))])[:300]
        most = chance.randint(1, chance.choice([2, 10, 60, 120]))
        name, self.arrived = f"request {self.arrived}", self.arrived + 1
        request = everything().request(name, array("q", text), most, chance.randint(0, 3), self.case["priority"])
        self.worker.truths[name] = model.Truth(text, chance.choice([10, 40, 200]))
        self.live[name] = (request, len(text), most)
        self.scheduler._add_request_to_queue(request)

    def step(self):
        self.advance()
        case, scheduler, chance = self.case, self.scheduler, self.chance.random()
        modules = everything()
        if chance < 0.2 and len(self.live) < 12:
            for _ in range(self.chance.choice([1, 1, 4])):
                self.arrive()
        elif chance < 0.215 and self.live:
            scheduler.abort_request(modules.AbortReq(rid=self.chance.choice(list(self.live))))
        elif chance < 0.22:
            scheduler.pause_generation(
                modules.PauseGenerationReqInput(mode=self.chance.choice(["in_place", "retract"]))
            )
            if self.chance.random() < 0.5:
                scheduler.flush_cache()
            scheduler.continue_generation(modules.ContinueGenerationReqInput(torch_empty_cache=False))
        ran = turn(scheduler, case["overlap"])
        self.look_at_answers()
        return ran

    def look_at_answers(self):
        for request in self.ended.taken(self.live):
            _, start, most = self.live.pop(request.rid)
            truth, said = self.worker.truths[request.rid], list(request.output_ids)
            expected = [truth.token(start + index) for index in range(most)]
            if model.STOP in expected:
                expected = expected[: expected.index(model.STOP) + 1]
            said = said[: request.finished_len] if getattr(request, "finished_len", None) else said
            aborted = "ABORT" in type(request.finished_reason).__name__ or request.finished_reason is None
            short = min(len(said), len(expected)) if aborted or not self.ended.cuts else len(said)
            if said[:short] != expected[:short] or not aborted and len(said) < len(expected):
                raise model.Wrong(f"{request.rid} said {said}, not {expected}")
            self.worker.seen["aborted" if aborted else "answered"] += 1
            self.texts = [*self.texts[-20:], [truth.token(index) for index in range(start + len(said))]]

    def run(self, steps):
        for _ in range(steps):
            self.step()
        idle = 0
        while self.live or idle < 3:
            self.advance()
            idle = 0 if turn(self.scheduler, self.case["overlap"]) else idle + 1
            self.look_at_answers()
            if idle > 100:
                raise model.Wrong(f"{sorted(self.live)} wait for ever")

    def advance(self):
        """Nothing goes on beside a turn here."""


def turn(scheduler, overlap):
    """One turn of SGLang's loop of events -> the batch that it ran."""
    plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
    scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run

    def results():
        scheduler.process_batch_result(*scheduler.result_queue.popleft())

    if not overlap:
        if batch:
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        else:
            scheduler.on_idle()
    else:
        at_once = scheduler.is_disable_overlap_for_batch(batch, last_batch=scheduler.last_batch)
        if at_once:
            results()
        result = scheduler.run_batch(batch) if batch else None
        if batch:
            scheduler.result_queue.append((batch.copy(), result))
        if scheduler.last_batch and not at_once:
            results()
        elif not scheduler.last_batch and batch is None:
            scheduler.on_idle()
        scheduler.launch_batch_sample_if_needed(result, batch)
    scheduler.last_batch = batch
    return batch


def outcome(version, case, seeds, steps=STEPS, kind=None):
    """-> what was seen, and what went wrong in the first run that did. kind: another Load."""
    seen = Counter()
    for seed in seeds:
        load = None
        try:
            load = (kind or Load)(version, case, seed)
            load.run(steps)
        except Exception as problem:  # whatever ends a scheduler ends a server
            where = traceback.extract_tb(problem.__traceback__)[-1]
            return {"seen": seen, "wrong": f"seed {seed}: {type(problem).__name__} {problem} ({where.name})"[:400]}
        seen += load.worker.seen
        seen["rows"] += load.worker.pools.rows
    return {"seen": seen, "wrong": None}


@contextlib.contextmanager
def changed(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def wrong_ones(version):
    """SGLang with a fault in it, or our model of what a pass keeps, -> what is seen of it."""
    reserve = importlib.import_module("sglang.srt.speculative.eagle_utils")
    evicts = importlib.import_module("sglang.srt.mem_cache.unified_cache.components.swa")
    pools, owned = model.Pools, everything().Req
    early = evicts.free_swa_out_of_window_slots
    length = "owned_kv_len" if since(version, "0.5.21") else "effective_kv_committed_len"
    committed = getattr(owned, length)
    faults = {
        "windows are given back early": ("plain", evicts, "free_swa_out_of_window_slots", too_early(early)),
        "a page's last states are not kept": (
            "plain",
            pools,
            "is_kept",
            lambda self, position, end: position >= end - 4,
        ),
        "drafts take no new slots": ("EAGLE", reserve, "get_alloc_reserve_per_decode", lambda: 1),
        "one token more is the cache's": ("plain", owned, length, lambda self: committed(self) + 1),
    }
    for name, (case, owner, attribute, value) in faults.items():
        with changed(owner, attribute, value):
            yield name, outcome(version, CASES[case], range(20))["wrong"]


def too_early(original):
    def free_swa_out_of_window_slots(request, length, **given):
        return original(request, length + 2 * model.PAGE, **given)

    return free_swa_out_of_window_slots


def main():
    version = sys.argv[1]
    warnings.simplefilter("ignore")
    os.environ["SGLANG_DEBUG_MEMORY_POOL"] = "1"
    sys.meta_path.insert(0, Wheel(version))
    install(version)
    logging.disable(logging.WARNING)
    seeds = sys.argv[2] if sys.argv[2:] else SEEDS
    if seeds == "suite":
        cases = {name: outcome(version, CASES[name], [seed], STEPS_OF_SUITE) for name, seed in SUITE.items()}
    else:
        seeds = range(int(seeds))
        cases = {name: outcome(version, case, seeds) for name, case in CASES.items() if seeds}
    found = {"cases": cases, "wrong ones": dict(wrong_ones(version)) if seeds else {}}
    asked = {name: rest for name, (until, *rest) in MENDED.items() if not since(version, until)}
    found["alone"] = {name: outcome(version, *rest)["wrong"] for name, rest in asked.items()}
    if seeds:
        from tests.patching import slots_first_requests, slots_grammars, slots_waiting

        found["waiting"] = {"alone": slots_waiting.alone(version)}
        found["grammars"] = {"alone": slots_grammars.alone(version)}
        found["forms"] = slots_first_requests.of_suite(version)
    everything().take_ours()
    if seeds:
        found["waiting"]["ours"] = slots_waiting.with_ours(version)
        found["grammars"]["ours"] = slots_grammars.with_ours(version)
    found["with ours"] = {name: outcome(version, *rest) for name, rest in asked.items()}
    if seeds:
        from tests.patching import slots_hierarchy

        found["hierarchy"] = slots_hierarchy.of_suite(version)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
