"""`python3 -m deepseek_v4_sm120.commands.calibrate.worker SHAPES JOBS SECONDS`: jobs one by one, told in lines of JSON.

    {"job": [operator, provider]}                           begun
    {"case", "us", "error", "how", "point", "calls"}        checked and timed
    {"case", "error", "allowed"} or {"case", "skipped"}     wrong, so not timed; not for this provider
    {"found"}                                               what was found out before the first case
    {"problem"}                                             cannot run here
    {"done"}

An error ends this process and nothing else: it is the result of the job that was begun last. With a limit of SECONDS
(else null) a job begins no case after its share of what is left, so that a slow one leaves time to those behind it.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import sys
import time

from deepseek_v4_sm120.commands.workers import end_with_parent, say

MAX_CALLS = 512
EAGER_CALLS = 5


def operator(name: str):
    """The module that describes an operator."""
    return importlib.import_module(f"deepseek_v4_sm120.specs.{name}")


def check(described, provider: str, call, case) -> float:
    """Greatest error over the case's correctness inputs; inf where one is not a number."""
    errors = [described.error(provider, call(inputs), inputs) for inputs in described.correctness_inputs(case)]
    return max(error if math.isfinite(error) else math.inf for error in errors)


def microseconds(call, inputs: list) -> tuple[float, str]:
    """(time of a call, how): by graph, or eagerly where an implementation cannot be captured."""
    import torch

    from deepseek_v4_sm120.commands.calibrate import timing

    for one in inputs if hasattr(call, "ready") else ():
        call.ready(one)
    try:
        return timing.graph_microseconds([lambda one=one: call(one) for one in inputs]), "graph"
    except RuntimeError as error:
        if "captur" not in str(error).lower():
            raise
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    few = inputs[:EAGER_CALLS]
    start.record()
    for one in few:
        call(one)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / len(few), "eager"


def checked_and_timed(described, provider, case, call, inputs) -> tuple[float, float | None, str]:
    """(error, microseconds or None where it is wrong, how); an operator of several cards does it with all of them."""
    if hasattr(described, "measure"):
        return described.measure(provider.name, case)
    from deepseek_v4_sm120.commands.calibrate import timing

    error = check(described, provider.name, call, case)
    if not error <= described.max_error(provider.name, case):
        return error, None, ""
    count = min(MAX_CALLS, timing.layers_for_cold_caches(case.bytes_per_call))
    return error, *microseconds(call, inputs.calls(case, count))


def run_job(name: str, provider_name: str, shapes: dict, until: float = math.inf) -> None:
    """Says what became of one provider of one operator. until: the time after which no case is begun."""
    import torch

    described = operator(name)
    provider = next(p for p in described.providers() if p.name == provider_name)
    if not torch.cuda.is_available():
        say(problem=f"torch {torch.__version__} sees no CUDA device")
        return
    if (problem := provider.problem()) is not None:
        say(problem=problem)
        return
    call, inputs = provider.build(), described.TimingInputs()
    for case in described.cases(**shapes):
        if not provider.handles(case):
            say(case=case.name, skipped="not for this shape")
            continue
        if time.monotonic() >= until:
            break
        error, time_us, how = checked_and_timed(described, provider, case, call, inputs)
        allowed = described.max_error(provider.name, case)
        if not error <= allowed:
            say(case=case.name, error=None if error == float("inf") else error, allowed=allowed)
            continue
        in_step = {key: getattr(case, key) for key in ("point", "calls") if hasattr(case, key)}
        say(case=case.name, error=error, us=round(time_us, 2), how=how, **in_step)
        torch.cuda.empty_cache()
    if hasattr(described, "found") and (found := described.found(provider.name)) is not None:
        say(found=found)
    torch.cuda.synchronize()  # an error of a kernel is this job's, not the next one's


def main(argv: list[str]) -> int:
    import torch

    shapes, jobs, seconds = map(json.loads, argv)
    end = math.inf if seconds is None else time.monotonic() + seconds
    for number, (name, provider) in enumerate(jobs):
        say(job=[name, provider])
        now = time.monotonic()
        run_job(name, provider, shapes, until=now + (end - now) / (len(jobs) - number))
        say(done=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(sys.argv[1:]))
