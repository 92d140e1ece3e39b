"""`python3 -m deepseek_v4_sm120.calibrate.worker OPERATOR PROVIDER JSON`: one JSON line per case, checked, then timed.

A wrong result is not timed. A CUDA error ends this process and nothing else.
"""

from __future__ import annotations

import importlib
import json
import math
import sys

MAX_CALLS = 512
EAGER_CALLS = 5


def operator(name: str):
    """The module that describes an operator."""
    return importlib.import_module(f"deepseek_v4_sm120.calibrate.{name}")


def say(**values) -> None:
    print(json.dumps(values), flush=True)


def check(described, provider: str, call, case) -> float:
    """Greatest error over the case's correctness inputs; inf where one is not a number."""
    errors = [described.error(provider, call(inputs), inputs) for inputs in described.correctness_inputs(case)]
    return max(error if math.isfinite(error) else math.inf for error in errors)


def microseconds(call, inputs: list) -> tuple[float, str]:
    """(time of a call, how): by graph, or eagerly where an implementation cannot be captured."""
    import torch

    from deepseek_v4_sm120 import timing

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


def main(argv: list[str]) -> int:
    import torch

    from deepseek_v4_sm120 import timing

    described = operator(argv[0])
    provider = next(p for p in described.providers() if p.name == argv[1])
    if not torch.cuda.is_available():
        say(problem=f"torch {torch.__version__} sees no CUDA device")
        return 0
    if (problem := provider.problem()) is not None:
        say(problem=problem)
        return 0
    call, inputs = provider.build(), described.TimingInputs()
    for case in described.cases(**json.loads(argv[2])):
        if not provider.handles(case):
            say(case=case.name, skipped="not for this shape")
            continue
        error = check(described, provider.name, call, case)
        if not error <= described.max_error(provider.name):
            allowed = described.max_error(provider.name)
            say(case=case.name, error=None if error == float("inf") else error, allowed=allowed)
            continue
        count = min(MAX_CALLS, timing.layers_for_cold_caches(case.bytes_per_call))
        time_us, how = microseconds(call, inputs.calls(case, count))
        say(case=case.name, error=error, us=round(time_us, 2), how=how)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
