"""Prompts that wait, on a release's own scheduler: short ones behind a long one that is read in chunks, a long one that
has no room beside those that run. What slots_random_load asks beside its own cases, without and with ours."""

import random
from array import array
from collections import Counter

from tests.patching import slots_model as model
from tests.patching import slots_random_load as load
from tests.patching.slots_server import everything

CASE = {"tokens": 120, "windows": 30, "chunk": 4, "requests": 8}  # in pages
LONG, SECOND, SHORT = 30, 12, 20  # pages, pages, tokens
ARRIVALS = {3: "short 0", 5: "short 1", 6: "short 2"}  # behind the second long one
FULL = {"chunk": 2, "windows": 16, "requests": 8}
CROWDED, STREAMS, WAITS = {"tokens": 60, "windows": 30, "chunk": 8, "requests": 8}, (100, 160), 560
STEPS, STEPS_BETWEEN = 120, 20  # the load's; and of its looks, with ours


def passes(version, case, arrivals):
    """arrivals: turn -> (name, tokens, the answer's) -> for each prompt, the turns that read a part of it; how often
    one that is called "waits" was looked up"""
    one, chance, found, looks = load.Load(version, case, 1), random.Random(2), {}, 0

    def ask(name, tokens, most):
        text = [chance.randint(10, 14) for _ in range(tokens)]
        request = everything().request(name, array("q", text), most, 0, False)
        one.worker.truths[name], one.live[name] = model.Truth(text, 10**9), (request, tokens, most)
        one.scheduler._add_request_to_queue(request)
        return request

    def counted(look):
        def init_next_round_input(*args, **given):
            nonlocal looks
            looks += 1
            return look(*args, **given)

        return init_next_round_input

    for number in range(300):
        for asked in arrivals.get(number, ()):
            request = ask(*asked)
            if request.rid == "waits":
                request.init_next_round_input = counted(request.init_next_round_input)
        batch = load.turn(one.scheduler, True)
        if batch is not None and batch.forward_mode.is_extend():
            looks_then = looks
            for request in batch.reqs:
                found.setdefault(request.rid, []).append(number)
            if "waits" in found:
                break
        one.look_at_answers()
        if not one.live and number > max(arrivals):
            break
    else:
        raise model.Wrong(f"{sorted(one.live)} wait for ever")
    return found, looks_then


def behind_a_long_one(version):
    arrivals = {0: [("long", LONG * model.PAGE + 5, 4)], 2: [("second", SECOND * model.PAGE, 4)]}
    return passes(version, CASE, arrivals | {number: [(name, SHORT, 4)] for number, name in ARRIVALS.items()})[0]


def without_room(version):
    """-> the turn in which it is let in, how often it was looked up until then"""
    arrivals = {0: [(f"stream {most}", 200, most) for most in STREAMS], 8: [("waits", WAITS, 4)]}
    found, looks = passes(version, CROWDED, arrivals)
    return found["waits"][0], looks


def alone(version):
    return {"behind": behind_a_long_one(version), "without room": without_room(version)}


def with_ours(version):
    """-> the same with ours, and random load in which chunks were shorter for others and prompts were not looked up"""
    from deepseek_v4_sm120.sglang_patches import models_served
    from deepseek_v4_sm120.sglang_patches.fixes import short_prompts, waiting_prompts

    models_served.has_several_hosts = lambda: False
    seen, kept = Counter(), short_prompts._kept_for_others

    def counted(adder, chunked):
        tokens = kept(adder, chunked)
        seen["shorter"] += bool(tokens)
        return tokens

    with (
        load.changed(short_prompts, "_kept_for_others", counted),
        load.changed(waiting_prompts, "TOKENS_OF_A_STEP", model.PAGE),
    ):
        found = {"random": load.outcome(version, FULL, range(1), STEPS), "shorter": seen["shorter"]}
    with load.changed(waiting_prompts, "TOKENS_OF_A_STEP", WAITS // STEPS_BETWEEN):
        return found | alone(version)
