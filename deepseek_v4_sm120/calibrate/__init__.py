"""`python3 -m deepseek_v4_sm120 calibrate`: every implementation of every operator on this card, checked, then timed.

provider.py        what an implementation is
<operator>.py      one operator, each of OPS; the whole of what adding one takes:
                     cases(tp, context, concurrency, quick) -> cases with name and bytes_per_call; where several add up
                                                               in a step: `point` (as many rows) and `calls` (of a step)
                     providers()                            -> Providers, `ours` first, `stock` among them
                     correctness_inputs(case)               -> inputs of a few hostile calls
                     error(provider, result, inputs)        -> float, in words ERROR
                     max_error(provider, case)              -> what is allowed of it
                     TimingInputs().calls(case, count)      -> inputs that each find cold caches
                     NOTE (optional)                        -> a sentence below its table
worker.py          providers one after the other in a process of its own: a crash is a result, not the end
command.py         runs the workers, ours first, then stock, then the others; decides, prints the table, writes the
                   profile (patching/profile.py reads it), also of what was reached when the time is over
"""
