"""The kernels of csrc/all_reduce and the sum inside of mhc's, their own text, compiled for the CPU and run in turns
on a memory that holds stores back, tears them and mixes their order (all_reduce_on_cpu.cpp). No GPU. What the text says
must not be, is seen to fail.
"""

import itertools
import subprocess

import pytest

from tests.ops import all_reduce_emulated as emulated

FEW, MANY = 8, 100  # calls; most of what is wrong is seen in few
# what a program that is not right says, in its first word: bits; somebody waits for what never comes; the state's
# count. "late" is none of them: somebody was out of patience, and what was waited for did come
WRONG, WAITS, ARRIVALS = "wrong", "waits", "arrivals"


AS_THEY_ARE = -1


@pytest.fixture(scope="module")
def program():
    made = ((f"4, {str(transport == 'host').lower()}", tuple(changes)) for transport, _, *changes in NOT_SO.values())
    return emulated.program(tuple(made))


def run(program, ranks, transport, calls, seed, faulty=-1, patience_ms=100_000, slow=-1, text=AS_THEY_ARE):
    words = [program, *map(str, (ranks, transport, calls, seed, faulty, patience_ms, slow, text))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("transport", ["peer", "host"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_has_the_sum_in_rank_order_and_what_all_sent(program, ranks, transport, seed):
    """One hop, two, and inside of a boundary, and gathers between them: all sizes, in place too; NaNs of all bits, both
    zeros, infinities."""
    for calls in (FEW, MANY):
        assert run(program, ranks, transport, calls, seed) == (0, f"{calls} calls\n")


@pytest.mark.parametrize(("transport", "seed", "calls"), [("peer", 0, 40), ("host", 2, 40)])
def test_so_have_eight(program, transport, seed, calls):
    assert run(program, 8, transport, calls, seed, patience_ms=300_000) == (0, f"{calls} calls\n")


@pytest.mark.parametrize("transport", ["peer", "host"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_that_ends_is_told_by_all_others(program, ranks, transport):
    assert run(program, ranks, transport, 20, 7, faulty=ranks - 1, patience_ms=300) == (
        0,
        f"told {ranks - 1} of {ranks - 1}\n",
    )


def is_seen(said: tuple[int, str], due: tuple[str, ...]) -> bool:
    """Whether a run ended with a verdict, and that is one that is due; not by a crash, nor for want of patience."""
    code, words = said
    return code == 1 and words.partition(":")[0] in due


@pytest.mark.parametrize("transport, seed", [("peer", 0), ("host", 1), ("peer", 2)])
def test_who_is_only_late_is_not_taken_for_who_never_comes(program, transport, seed):
    """One rank comes to the middle call when the others have given it up."""
    code, words = run(program, 4, transport, 8, seed, patience_ms=600, slow=2)
    assert code == 1 and words.startswith("late: call 4 ")
    assert not is_seen((code, words), (WRONG, WAITS, ARRIVALS))


@pytest.mark.parametrize("transport", ["peer", "host"])
def test_the_probes_pings_come_and_are_answered(program, transport):
    assert run(program, 1, transport, 30, 0) == (0, "30 rounds\n")
    for dead in (0, 1):
        assert run(program, 1, transport, 30, 0, faulty=dead) == (0, "0 came\n")


WIPES = "turn.wipe(mine.part * kMixThreads + thread, parts * kMixThreads);"
NOT_SO = {
    "three generations": ("host", (WAITS,), ("kArrivalsLog2 = 10;", "kArrivalsLog2 = 10, kGenerations = 3;")),
    "the call before is wiped": ("host", (WAITS,), ("(call + 2) % kGenerations", "(call + 3) % kGenerations")),
    "the call three before is wiped": ("peer", (WAITS,), ("(call + 2) % kGenerations", "(call + 1) % kGenerations")),
    "nothing is wiped": ("peer", (WRONG,), ("turn.wipe(thread, threads);", "")),
    "NaNs are sent as they are": ("peer", (WAITS,), ("v.x = v.x == kNothing ? kOtherNaNs : v.x;", "")),
    "one word of a vector is looked at": (
        "peer",
        (WRONG,),
        (" && v.y != kNothing && v.z != kNothing && v.w != kNothing", ""),
    ),
    "a block arrives before its threads have read whose turn it is": (
        "peer",
        (WAITS, WRONG),
        ("__syncthreads();\n  if (threadIdx.x == 0) turn", "if (threadIdx.x == 0) turn"),
    ),
    "the first block does not fill up": ("peer", (ARRIVALS, WAITS), ("kArrivals - (parts - 1)", "kArrivals")),
    "terms are added in the order of distance": (
        "peer",
        (WRONG,),
        ("r == p.rank ? own : load_system(place(r))", "r == 0 ? own : load_system(place((p.rank + r) % kRanks))"),
        ("terms[r] = load_system(place(r));\n  }", "terms[r] = load_system(place((p.rank + r) % kRanks));\n  }"),
    ),
    "a boundary wipes nothing": ("host", (WRONG,), (WIPES, "")),
    "a boundary wipes what its first slice can": (
        "peer",
        (WRONG,),
        (WIPES, WIPES.replace("mine.part * kMixThreads + thread", "thread")),
    ),
    "each thread of a slice arrives": ("peer", (WRONG,), ("if (thread == 0) turn.arrive", "turn.arrive")),
    "a boundary's slices count for one": (
        "peer",
        (ARRIVALS, WAITS),
        ("mine.part == 0, parts)", "mine.part == 0, 1)"),
    ),
    "slices of a short tile lie as far apart as of a whole one": (
        "host",
        (WRONG,),
        ("slice * rows * kRowVectors", "slice * kSliceVectors"),
    ),
    "a boundary sends NaNs as they are": (
        "peer",
        (WAITS,),
        ("turn.send(mine.place, all_reduce::sendable(mine.term))", "turn.send(mine.place, mine.term)"),
    ),
    "sums come to the rows as they are": ("peer", (WAITS,), ("return make_uint4(~v.x, ~v.y, ~v.z, ~v.w)", "return v")),
    "a row looks at one word of a sum": ("peer", (WRONG,), (" && v.y != 0 && v.z != 0 && v.w != 0", "")),
    "a gather is not wiped": ("peer", (WRONG,), ("is_two_shot ? 0 :", "algorithm != Algorithm::kOneShot ? 0 :")),
    "a gather is wiped where a sum's terms are": (
        "host",
        (WRONG,),
        (
            "algorithm == Algorithm::kOneShot ? p.sizes.one_shot_vectors : p.sizes.slot(kHost)",
            "p.sizes.one_shot_vectors",
        ),
    ),
    "a gather sends NaNs as they are": ("peer", (WAITS,), ("own = sendable(x[v]);", "own = x[v];")),
    "a gather keeps its own NaNs": (
        "peer",
        (WRONG,),
        ("out[place(v, p.rank)] = own;", "out[place(v, p.rank)] = x[v];"),
    ),
    "a gather lays the ranks one behind the other": (
        "host",
        (WRONG,),
        ("v + (static_cast<int64_t>(v / p.row_vectors) * (kRanks - 1) + of) * p.row_vectors", "v + of * p.vectors"),
    ),
    "all calls leave what a sum of one hop does": (
        "peer",
        (WRONG,),
        ("* kAlgorithms + static_cast<uint32_t>(algorithm)", "* kAlgorithms"),
    ),
    "rows leave their sums": ("peer", (WRONG,), ("store_relaxed(from[i], make_uint4(0, 0, 0, 0));", "")),
}


@pytest.fixture
def broken(program):
    """broken(name) -> (what runs it, what is due)"""

    def make(name):
        (transport, due, *_), number = NOT_SO[name], list(NOT_SO).index(name)
        return lambda calls, seed: run(program, 4, transport, calls, seed, patience_ms=1000, text=number), due

    return make


@pytest.mark.parametrize("name", NOT_SO)
def test_what_would_be_wrong_is_seen(broken, name):
    run_it, due = broken(name)
    said = []
    for calls, seed in itertools.product((FEW, MANY), range(3)):
        said.append(run_it(calls, seed))
        if is_seen(said[-1], due):
            return
    pytest.fail(f"{due} is due: {said}")


def test_every_plan_has_a_sum_that_is_zero(broken):
    """Which is nothing, where sums come as they are."""
    run_it, due = broken("sums come to the rows as they are")
    for seed in range(3):
        assert is_seen(said := run_it(MANY, seed), due), said
