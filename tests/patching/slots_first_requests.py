"""Which forms of its kernels a release's own scheduler asks Triton for: by the first requests of ours, and by random
load behind them. What slots_random_load asks beside its own cases."""

from array import array

from deepseek_v4_sm120.sglang_patches.fixes import first_requests
from tests.patching import slots_model as model
from tests.patching import slots_random_load as load
from tests.patching import slots_server
from tests.patching.slots_server import everything

ROOM = {"tokens": 400, "windows": 200, "chunk": 8}  # pages
CASES = {  # the server, a day's seed, the rounds without which something of it is not met
    "plain": ({"requests": 4}, 3, ("alone",)),
    "EAGLE": ({"requests": 4, "drafts": 4}, 7, ("alone", "odd")),
}
LEFT_OUT = {"first": (), "alone": ("at once",), "odd": (f"of {first_requests.ROWS}",)}
STEPS, LONGEST = 60, 590

asked: set[tuple[str, int]] = set()


def noted(name, function, form):
    def kernel(*args, **kwargs):
        asked.add((name, form(args)))
        return function(*args, **kwargs)

    return kernel


def listen():
    """To the launches of the allocator's kernels, whose form is a power of two of SGLang's, and of the one that writes
    a batch's slots."""
    paged, seen = everything().paged, slots_server.Kernel
    for name, at in (("alloc_extend_kernel", 5), ("alloc_decode_kernel", 4)):
        setattr(paged, name, seen(noted(name, getattr(paged, name).function, lambda args, at=at: args[at])))
    assign = noted("assign_req_to_token_pool", slots_server.assign_slots, lambda args: paged.next_power_of_2(args[-1]))
    slots_server.Worker.prompts = prompts(slots_server.Worker.prompts)
    for module in (everything().allocation, everything().eagle_utils):
        module.assign_req_to_token_pool_func = assign


def prompts(original):
    """Of a pass over prompts SGLang's kernels are told the requests, to a power of two, and the rows."""

    def noted_prompts(self, batch):
        requests, rows = len(batch.reqs), sum(batch.extend_lens)
        power = everything().paged.next_power_of_2(requests)
        asked.add((f"prompts, {kind(requests)} requests, {kind(rows)} rows", power))
        return original(self, batch)

    return noted_prompts


def kind(number):
    """As Triton tells whole numbers apart."""
    return "one" if number == 1 else "whole sixteens" if number % 16 == 0 else "some"


def server(version, case, seed):
    one = load.Load(version, ROOM | case, seed)
    allocator = one.scheduler.token_to_kv_pool_allocator
    for part in (allocator.full_attn_allocator, allocator.swa_attn_allocator):
        part.use_triton_kernels = True
    return one


def ask(one, name, given):
    """A request of first_requests on this scheduler, whose vocabulary and pages are small."""
    text, most = [10 + token % 5 for token in given["input_ids"]], given["sampling_params"]["max_new_tokens"]
    request = everything().request(name, array("q", text), most, 0, False)
    one.worker.truths[name], one.live[name] = model.Truth(text, 10**9), (request, len(text), most)
    one.scheduler._add_request_to_queue(request)


def of_first_requests(version, case, is_left_out) -> set:
    """As they arrive: the first of a round is read while the others come."""
    asked.clear()
    one, overlap = server(version, case, 0), True
    first_requests.PAGE = model.PAGE
    for kind, bodies in first_requests.rounds(ROOM["chunk"] * model.PAGE, LONGEST, case["requests"], True):
        if is_left_out(kind):
            continue
        for number, given in enumerate(bodies):
            ask(one, f"{kind} {number}", given)
            if number == 0:
                load.turn(one.scheduler, overlap)
        one.run(0)
    return set(asked)


def of_a_day(version, case, seed) -> set:
    asked.clear()
    server(version, case, seed).run(STEPS)
    return set(asked)


def of_suite(version) -> dict:
    """case -> {whose: [kernel and form]}: a day's, the first requests', and theirs without those of several at once, or
    without those whose rows are whole sixteens"""
    listen()
    found = {}
    for name, (case, seed, needed) in CASES.items():
        found[name] = {"day": sorted(of_a_day(version, case, seed))}
        for whose in ("first", *needed):
            words = LEFT_OUT[whose]
            met = of_first_requests(version, case, lambda kind, words=words: any(word in kind for word in words))
            found[name][whose] = sorted(met)
    return found
