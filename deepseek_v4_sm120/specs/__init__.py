"""What an operator is measured by, one module for each of OPS. Self-test, calibrate, benchmarks and tests take theirs
from it; a server imports bounds.py alone.

bounds.py          what is allowed of each operator's results: one number for each meaning, and where it comes from
<operator>.py      one operator:
                     make_inputs and the like: its arguments, hostile ones by options; what must not be read is poison
                     checks(quick)      -> the self-test's Checks
                     ERROR, error(provider, result, inputs) -> float, how far off a result is, by the reference; of ours
                                        in its worst place, too
                     max_error(provider, case) -> what is allowed of it
                     providers()        -> who computes it: `ours` first, SGLang's own call as `stock`, others
                     cases(tp, context, concurrency, quick) -> shapes of a plan, with name and bytes_per_call; where
                                        several add up in a step: `point` (as many rows) and `calls` (of a step)
                     correctness_inputs(case)           -> inputs of a few hostile calls
                     TimingInputs().calls(case, count)  -> inputs that each find cold caches
check.py           what a check is
provider.py        what a provider is
"""
