"""Self-test of the card itself: what our kernels take for granted of it, asked by small kernels (csrc/card).

Each check says what depends on its answer. The probes' spins all have an end and the host waits no longer than
PATIENCE_S, so a card that answers otherwise gives FAIL, not a hang. What judges an answer is apart from what asks, so
that wrong answers can be tried without a card.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deepseek_v4_sm120.specs.check import ON_GPU, Check, Failure, NotRun

PATIENCE_S = 20.0

# Kernels of this module of which, on some path, no thread waits for the kernel in front. What comes behind such a
# kernel is ordered behind what came before it only if the card orders it so.
KERNELS_THAT_RETURN_WITHOUT_WAITING = ()
HOLD_NS = 1_000_000
CHAIN_REPEATS = 4

EXCHANGE_PAIRS, EXCHANGE_ROUNDS = 32, 64  # pairs of blocks at most, two blocks a pair, one a multiprocessor
EXCHANGE_REPEATS = 4

SLEEP_PAIRS, SLEEP_ROUNDS = 16, 40
BUSY_NS = 100_000_000
MAX_SLEEP_US = 100.0  # median from a flag's raising to its being seen: a nap is 0.1 us

# Of sums of E4M3 products. A logit of index_select is four chained mma of 32 products each, and its 1e-3 of the
# greatest logit (reference/index_select.py) is what 13 bits give; so many have Hopper's own FP8 sums (wgmma).
NEEDED_BITS = 13
MOST_BITS = 23  # fp32 has no more behind its first
ROWS, COLUMNS, DEPTH, F16_DEPTH = 16, 8, 32, 16  # of an mma of E4M3, and of f16
MAX_SCALED_ERROR = (DEPTH + 1) * 2.0**-NEEDED_BITS  # of the sum of magnitudes: each term cut off at the needed bits


def checks(quick: bool) -> Iterator[Check]:
    yield Check("card", "programmatic chain, one thread of the middle waits", _check_waiting_chain, ON_GPU)
    yield Check("card", "programmatic chain, the middle returns at once", _check_returning_chain, ON_GPU)
    yield Check("card", "programmatic chain, plain loads behind the wait", _check_plain_loads, ON_GPU)
    for own_flags, name in ((True, "words that are their own flags"), (False, "payloads behind a counter")):
        yield Check("card", f"blocks to blocks: {name}", functools.partial(_check_exchange, own_flags), ON_GPU)
    yield Check("card", "nanosleep spins beside a busy stream", _check_sleep, ON_GPU)
    yield Check("card", "bits that sums of E4M3 products keep", _check_bits, ON_GPU)
    yield Check("card", "sums of f16 products that fp32 holds", _check_f16_sums, ON_GPU)
    yield Check("card", "block-scaled mma against software", _check_block_scaled, (*ON_GPU, "block-scaled FP8"))


# ---- programmatic chains


@dataclass(frozen=True)
class Seen:
    """What the last kernel of a chain read."""

    written: bool  # what the first kernel wrote
    early_ns: int  # how long before the first kernel's end; negative: after it
    asked: int = 0  # its blocks that had read what was there before, by a plain load ahead of their wait
    stale: int = 0  # and those that found it again by a plain load behind the wait


def overtaken(chains: list[Seen]) -> int:
    """How many last kernels read before the first kernel had written."""
    return sum(not seen.written for seen in chains)


def judge_control(controls: list[Seen]) -> None:
    """NotRun where a second kernel that does not wait does not overtake: the probe would see no wrong order."""
    if not controls or overtaken(controls) < len(controls) or any(seen.early_ns <= 0 for seen in controls):
        raise NotRun(
            f"of {len(controls)} kernels that do not wait {overtaken(controls)} overtook the one in front: launches do "
            "not overlap here (CUDA_LAUNCH_BLOCKING, a profiler, a debugger?)"
        )


def judge_waiting_chain(controls: list[Seen], chains: list[Seen]) -> str:
    judge_control(controls)
    if not chains or (count := overtaken(chains)):
        raise Failure(
            f"the third kernel read before the first had written in {count if chains else 0} of {len(chains)} chains: "
            "every kernel here relies on one waiting thread being enough for all that come behind"
        )
    return f"the third kernel is behind the first in {len(chains)} of {len(chains)}, eager and captured"


def judge_returning_chain(controls: list[Seen], chains: list[Seen]) -> str:
    judge_control(controls)
    if not chains:
        raise Failure("no chain was asked")
    count = overtaken(chains)
    if not count:
        return f"the third kernel is behind the first in {len(chains)} of {len(chains)}, eager and captured"
    found = f"the third kernel read before the first had written in {count} of {len(chains)} chains"
    if KERNELS_THAT_RETURN_WITHOUT_WAITING:
        raise Failure(f"{found}, and these return without waiting: {', '.join(KERNELS_THAT_RETURN_WITHOUT_WAITING)}")
    return (
        f"{found}; all kernels here wait on every path, so none relies on it. A programmatic kernel of another library "
        "that returns without waiting, between two of ours, would not be safe"
    )


def judge_plain_loads(controls: list[Seen], chains: list[Seen]) -> str:
    judge_control(controls)
    blocks = min((seen.asked for seen in chains), default=0)
    if not blocks:
        raise NotRun("no block had read what was there before: it began too late to have an old line in its L1")
    if (late := overtaken(chains)) or (stale := sum(seen.stale for seen in chains)):
        found = (
            f"{late} kernels read ahead of the one in front" if late else f"{stale} blocks read old lines of their L1"
        )
        raise Failure(f"behind the wait {found}: every kernel here reads so what kernels in front have written")
    return f"{blocks} blocks and more, of {len(chains)} chains, found what was written where their L1 had the old line"


def _chains(middle: str, third_waits: bool) -> list[Seen]:
    return [_chain(middle, third_waits, captured) for captured in (False, True) for _ in range(CHAIN_REPEATS)]


def _chain(middle: str, third_waits: bool, captured: bool) -> Seen:
    import torch

    words = torch.zeros(32 + 3, dtype=torch.int32, device="cuda")  # the value has a line of its own
    times = torch.zeros(2, dtype=torch.int64, device="cuda")

    def launch(hold_ns: int) -> None:
        addresses = {"value": words.data_ptr(), "seen": words[32:].data_ptr(), "times": times.data_ptr()}
        made = {"hold_ns": hold_ns, "middle": middle, "third_waits": third_waits}
        _module().card_chain(**addresses, **made, stream=_stream())

    launch(0)  # the kernels are loaded, which would take as long as the first holds
    wait("a chain of kernels")
    words.zero_()
    wait("a fill")
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch(HOLD_NS)
        graph.replay()
    else:
        launch(HOLD_NS)
    wait("a chain of kernels")
    written, read = times.tolist()
    seen, asked, stale = words[32:].tolist()
    return Seen(seen == _module().CARD_WRITTEN, written - read, asked, stale)


def _check_waiting_chain() -> str:
    return judge_waiting_chain(_chains("none", False), _chains("one thread waits", True))


def _check_returning_chain() -> str:
    return judge_returning_chain(_chains("none", False), _chains("returns", True))


def _check_plain_loads() -> str:
    return judge_plain_loads(_chains("none", False), _chains("none", True))


# ---- flags between blocks


def judge_exchange(answer: list[int], expected: int, words_left: int, dependents: str) -> str:
    """answer: values as they were sent, values otherwise, waits that were given up."""
    right, wrong, given_up = answer
    if right == expected and not (wrong or given_up or words_left):
        return f"{right} values came as they were sent, without a fence"
    raise Failure(
        f"of {expected} values {right} came as they were sent and {wrong} otherwise, {given_up} waits were given up, "
        f"{words_left} words were not left zero: {dependents} cannot be trusted on this card"
    )


def _check_exchange(own_flags: bool) -> str:
    import torch

    threads = _module().CARD_EXCHANGE_THREADS
    pairs, rounds = min(EXCHANGE_PAIRS, _num_sms() // 2), EXCHANGE_ROUNDS
    if not pairs:
        raise NotRun("one multiprocessor: two blocks need not be resident at once")

    def zeros(*size: int):
        return torch.zeros(size, dtype=torch.int32, device="cuda")

    words = zeros(pairs, rounds, 2, threads, 4) if own_flags else zeros(4)
    payload, answer = zeros(pairs, 2, 2, threads), zeros(3)
    for _ in range(EXCHANGE_REPEATS):
        counters = zeros(pairs, 2, 32)
        tensors = {"words": words, "payload": payload, "counters": counters, "answer": answer}
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        _module().card_exchange(**addresses, pairs=pairs, rounds=rounds, own_flags=own_flags, stream=_stream())
        wait("an exchange between blocks")
    expected = EXCHANGE_REPEATS * pairs * rounds * 2 * threads
    dependents = "mhc up to 128 rows" if own_flags else "sparse_decode, the compressor of 128 and mhc of many rows"
    return judge_exchange(answer.tolist(), expected, int(words.count_nonzero()), dependents)


# ---- spins that sleep


def judge_sleep(busy: list[int], times: list[tuple[int, int]]) -> str:
    """busy: begin and end of the busy stream's kernel, ns; times: each flag's raising and its being seen, 0: never."""
    never = sum(not (raised and seen) for raised, seen in times)
    if never or not times:
        raise Failure(f"{never} of {len(times)} flags were not seen: mhc of many rows waits like that")
    begin, end = busy
    if min(raised for raised, _ in times) < begin or max(seen for _, seen in times) > end:
        raise NotRun("the busy stream's kernel was not beside the spins all the time")
    waits = sorted(seen - raised for raised, seen in times)
    median, most = waits[len(waits) // 2] / 1e3, waits[-1] / 1e3
    if not 0 <= median <= MAX_SLEEP_US:
        found = f"a flag is seen after {median:.1f} us (median)"
        raise Failure(f"{found}, allowed {MAX_SLEEP_US}: mhc of many rows waits like that")
    return f"{len(waits)} flags seen after {median:.1f} us (median), {most:.1f} at most"


def _check_sleep() -> str:
    import torch

    pairs = min(SLEEP_PAIRS, max(_num_sms() // 2, 1))
    flags = torch.zeros(pairs, SLEEP_ROUNDS, 2, dtype=torch.int32, device="cuda")
    times = torch.zeros(pairs, SLEEP_ROUNDS, 2, dtype=torch.int64, device="cuda")
    busy, sink = torch.zeros(2, dtype=torch.int64, device="cuda"), torch.zeros(1, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(2)]

    def launch(hold_ns: int) -> None:
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[0]):
            addresses = {"times": busy.data_ptr(), "sink": sink.data_ptr()}
            _module().card_busy(**addresses, hold_ns=hold_ns, num_sms=_num_sms(), stream=_stream())
        time.sleep(hold_ns / 1e10)  # until it surely has begun
        with torch.cuda.stream(streams[1]):
            addresses = {"flags": flags.data_ptr(), "times": times.data_ptr()}
            _module().card_sleep(**addresses, pairs=pairs, rounds=SLEEP_ROUNDS, stream=_stream())
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        wait("spins beside a busy stream")

    launch(0)
    flags.zero_()
    times.zero_()
    launch(BUSY_NS)
    return judge_sleep(busy.tolist(), [tuple(pair) for pair in times.reshape(-1, 2).tolist()])


# ---- sums of the tensor cores


def _power(exponent: int) -> float:
    return 2.0**exponent


def bit_problems(torch, shift: int, depth: int = DEPTH):
    """(a, b, c) and the exact sums of mma problems in which a term lies `shift` bits below the greatest.

    Two for the accumulator as the greatest, the small product at each of `depth` places, and four with a product as the
    greatest, at the first or the last place of a half. fp32 values that E4M3 and f16 hold, [n, 16, depth],
    [n, 8, depth], [n, 16, 8].
    """
    a, b = torch.zeros(6, ROWS, depth), torch.zeros(6, COLUMNS, depth)
    row, place_in_half = torch.arange(ROWS), torch.arange(ROWS) % (depth // 2)
    c, exact = torch.zeros(6, ROWS, COLUMNS), torch.zeros(6, ROWS, COLUMNS, dtype=torch.float64)

    def factors(exponent: int) -> tuple[float, float]:
        return _power(exponent - exponent // 2), _power(exponent // 2)

    for half in range(2):
        x, y = factors(10 - shift)
        a[half, row, depth // 2 * half + place_in_half] = x
        b[half], c[half] = y, _power(10)
        exact[half] = _power(10) + _power(10 - shift)
    for i, (half, place) in enumerate(((0, depth - 1), (1, 0), (0, depth // 2), (1, depth // 2 - 1)), start=2):
        x, y = factors(16 - shift)
        a[i, row, depth // 2 * half + place_in_half] = x
        a[i, :, place] = _power(8)
        b[i] = y
        b[i, :, place] = _power(8)
        exact[i] = _power(16) + _power(16 - shift)
    return a, b, c, exact


def kept_bits(multiply: Callable, torch, depth: int = DEPTH) -> int:
    """How far below the greatest term of a sum another still counts in full. multiply(a, b, c) -> sums, as an mma."""
    for shift in range(1, MOST_BITS + 1):
        a, b, c, exact = bit_problems(torch, shift, depth)
        if not torch.equal(multiply(a, b, c).double(), exact):
            return shift - 1
    return MOST_BITS


def judge_bits(bits: int) -> str:
    if bits < NEEDED_BITS:
        raise Failure(
            f"{bits} bits, needed {NEEDED_BITS}: scores of index_select where FP8 mma is native (SM120) and mxfp4_moe "
            "with MXFP8 activations are less accurate than they say"
        )
    return f"{bits} bits below the greatest term, needed {NEEDED_BITS}"


def integer_problems(torch):
    """Full f16 mma of integers, all sums of magnitudes below 2^24: (a, b, c) and the exact sums."""
    generator = torch.Generator().manual_seed(2)
    shapes = (64, ROWS, F16_DEPTH), (64, COLUMNS, F16_DEPTH), (64, ROWS, COLUMNS)
    a, b, c = (
        torch.randint(-most, most + 1, shape, generator=generator).float()
        for most, shape in zip((900, 900, 3_500_000), shapes, strict=True)
    )
    return a, b, c, a.double() @ b.double().mT + c.double()


def judge_f16_sums(multiply: Callable, torch) -> str:
    """multiply(a, b, c) -> sums, as an mma of f16."""
    bits = kept_bits(multiply, torch, F16_DEPTH)
    a, b, c, exact = integer_problems(torch)
    wrong = int((multiply(a, b, c).double() != exact).sum())
    if bits < MOST_BITS or wrong:
        raise Failure(
            f"{bits} bits below the greatest term, needed {MOST_BITS}, and {wrong} of {exact.numel()} sums of integers "
            "below 2^24 are inexact: mxfp4_moe with `reproducible` has other bits for many rows than for few"
        )
    return f"{exact.numel()} sums of integers below 2^24 are exact; {bits} bits below the greatest term"


def _check_f16_sums() -> str:
    import torch

    return judge_f16_sums(functools.partial(_products, dtype=torch.float16), torch)


def _products(a, b, c, a_scale=None, b_scale=None, *, dtype=None):
    """a b^T + c of each problem by one mma; values to E4M3 on their way, or to `dtype`, f16."""
    import torch

    a, b = (x.to(dtype or torch.float8_e4m3fn).cuda().contiguous() for x in (a, b))
    c = c.float().cuda().contiguous()
    d = torch.full_like(c, float("nan"))
    scales = [None if scale is None else scale.cuda().contiguous() for scale in (a_scale, b_scale)]
    a_address, b_address = (0 if scale is None else scale.data_ptr() for scale in scales)
    tensors = {"a": a.data_ptr(), "b": b.data_ptr(), "c": c.data_ptr(), "d": d.data_ptr()}
    given = {"a_scale": a_address, "b_scale": b_address, "count": a.shape[0], "f16": dtype is not None}
    _module().card_products(**tensors, **given, stream=_stream())
    wait("a product")
    return d.cpu()


def _check_bits() -> str:
    import torch

    return judge_bits(kept_bits(_products, torch))


def scaled_problems(torch, exact: bool):
    """Operands and UE8M0 scales of 64 mma problems; `exact`: small integers, whose sums any chip has exactly."""
    generator = torch.Generator().manual_seed(1)
    shapes = (64, ROWS, DEPTH), (64, COLUMNS, DEPTH), (64, ROWS, COLUMNS)
    if exact:
        a, b, c = (torch.randint(-8, 9, shape, generator=generator).float() for shape in shapes)
    else:
        a, b, c = (torch.randn(shape, generator=generator) for shape in shapes)
    a, b = (x.to(torch.float8_e4m3fn).float() for x in (a, b))
    a_scale, b_scale = (torch.randint(110, 145, shape[:2], generator=generator).to(torch.uint8) for shape in shapes[:2])
    powers = torch.exp2((a_scale.double()[:, :, None] - 127) + (b_scale.double()[:, None, :] - 127))
    c = (c.double() * powers).float()
    return a, b, c, a_scale, b_scale, powers


def judge_block_scaled(multiply: Callable, torch) -> str:
    """multiply(a, b, c, a_scale, b_scale), as the block-scaled mma, against float64."""
    worst = 0.0
    for exact in (True, False):
        a, b, c, a_scale, b_scale, powers = scaled_problems(torch, exact)
        truth = a.double() @ b.double().mT * powers + c.double()
        magnitude = a.double().abs() @ b.double().abs().mT * powers + c.double().abs()
        difference = (multiply(a, b, c, a_scale, b_scale).double() - truth).abs()
        error = float((difference / magnitude.clamp_min(1e-300)).max())
        allowed = 0.0 if exact else MAX_SCALED_ERROR
        if not error <= allowed:
            kind = "small integers" if exact else "normal values"
            raise Failure(
                f"{kind}: error {error:.1e} of the sum of magnitudes, allowed {allowed:.1e}: mxfp4_moe with MXFP8 "
                "activations is wrong on this card"
            )
        worst = max(worst, error)
    return f"small integers exactly; normal values with error {worst:.1e} of the sum of magnitudes"


def _check_block_scaled() -> str:
    import torch

    return judge_block_scaled(_products, torch)


# ---- asking


def wait(what: str) -> None:
    """Until the current stream has done all that was asked of it; Failure where it does not come back."""
    import torch

    event = torch.cuda.Event()
    event.record()
    poll(event.query, what)


def poll(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        if time.monotonic() > deadline:
            raise Failure(f"{what} did not come back within {PATIENCE_S:g} s; what is asked of this GPU next may hang")
        time.sleep(0.0005)


def _module():
    from deepseek_v4_sm120.ops.shared import extension

    return extension.load()


def _stream() -> int:
    import torch

    return torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())


def _num_sms() -> int:
    import torch

    from deepseek_v4_sm120.ops.shared.cuda_tensors import num_sms

    return num_sms(torch.cuda.current_device())
