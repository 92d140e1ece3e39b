"""What weak memory lets be seen and what not, by programs of a few instructions: a writer's block and a reader's."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.emulator.emulated import called, choose, emulated, library, run

SEEDS = 60
POLL = """
$again:
ld.relaxed.gpu.global.u32 %r3, [%rd1+64];
setp.eq.u32 %p3, %r3, 0;
@%p3 bra $again;"""
DATA, FLAG = "st.global.u32 [%rd1], 1;", "st.relaxed.gpu.global.u32 [%rd1+64], 1;"
LATER = "ld.global.u32 %r4, [%rd1];"
FENCE = "fence.acq_rel.gpu;"
OTHER_THREAD = """
setp.eq.u32 %p3, %r2, 32;
@%p3 st.global.u32 [%rd1], 1;
{between}
@%p2 bra $done;
fence.acq_rel.gpu;
st.relaxed.gpu.global.u32 [%rd1+64], 1;
"""
TWICE = """
ld.relaxed.gpu.global.u32 %r3, [%rd1];
ld.relaxed.gpu.global.u32 %r4, [%rd1];"""
# name -> (writer, reader, what the reader may find as (%r3, %r4), which of it must be found)
PROGRAMS = {
    "a message, fenced": (DATA + FENCE + FLAG, POLL + FENCE + LATER, {(1, 1)}, ()),
    "a message, released and acquired": (
        DATA + "red.release.gpu.global.add.u32 [%rd1+64], 1;",
        POLL.replace("relaxed", "acquire") + LATER,
        {(1, 1)},
        (),
    ),
    **{
        f"a message, fenced by {fence}": (DATA + f"{fence};" + FLAG, POLL + f"{fence};" + LATER, {(1, 1)}, ())
        for fence in ("membar.gl", "membar.sys", "fence.sc.gpu", "fence.acq_rel.sys")
    },
    "a message, stored with its release": (
        DATA + FLAG.replace("relaxed", "release"),
        POLL.replace("relaxed", "acquire") + LATER,
        {(1, 1)},
        (),
    ),
    "a message, exchanged": (
        DATA + "atom.release.gpu.global.exch.b32 %r5, [%rd1+64], 1;",
        POLL.replace("ld.relaxed.gpu.global.u32 %r3, [%rd1+64]", "atom.acquire.gpu.global.or.b32 %r3, [%rd1+64], 0")
        + LATER,
        {(1, 1)},
        (),
    ),
    "a message, exchanged without an order": (
        DATA + "atom.global.exch.b32 %r5, [%rd1+64], 1;",
        POLL + FENCE + LATER,
        {(1, 0), (1, 1)},
        {(1, 0)},
    ),
    **{
        f"a block's fence, {fence}": (DATA + f"{fence};" + FLAG, POLL + FENCE + LATER, {(1, 0), (1, 1)}, {(1, 0)})
        for fence in ("membar.cta", "fence.sc.cta")
    },
    "no fence of the writer": (DATA + FLAG, POLL + FENCE + LATER, {(1, 0), (1, 1)}, {(1, 0)}),
    "no fence of the reader": (DATA + FENCE + FLAG, POLL + LATER, {(1, 0), (1, 1)}, {(1, 0)}),
    "a fence of the block": (
        DATA + FENCE.replace("gpu", "cta") + FLAG,
        POLL + FENCE + LATER,
        {(1, 0), (1, 1)},
        {(1, 0)},
    ),
    "from the L2, without a fence": (
        DATA + FENCE + FLAG,
        POLL + LATER.replace("ld.global", "ld.global.cg"),
        {(1, 0), (1, 1)},
        {(1, 0)},
    ),
    "read-only memory that is written": (
        DATA + FENCE + FLAG,
        POLL + FENCE + LATER.replace("ld.global", "ld.global.nc"),
        {(1, 0), (1, 1)},
        {(1, 0)},
    ),
    "another thread's store behind a barrier": (
        OTHER_THREAD.format(between="bar.sync 0;"),
        POLL + FENCE + LATER,
        {(1, 1)},
        (),
    ),
    "another thread's store without a barrier": (
        OTHER_THREAD.format(between=""),
        POLL + FENCE + LATER,
        {(1, 0), (1, 1)},
        {(1, 0)},
    ),
    "one address": (
        DATA + DATA.replace(", 1;", ", 2;"),
        TWICE,
        {(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)},
        {(0, 0), (2, 2), (0, 2)},
    ),
    "its own store": ("", "st.global.u32 [%rd1], 5; mov.u32 %r3, 1;" + LATER, {(1, 5)}, ()),
    "a vector": (
        "mov.u32 %r5, 1; st.relaxed.gpu.global.v2.u32 [%rd1], {%r5, %r5};",
        "ld.relaxed.gpu.global.v2.u32 {%r3, %r4}, [%rd1];",
        {(0, 0), (0, 1), (1, 0), (1, 1)},
        {(0, 1)},
    ),
}
TEXT = """
.visible .entry litmus(.param .u64 memory)
{
.reg .pred %p<4>;
.reg .b32 %r<8>;
.reg .b64 %rd<4>;
ld.param.u64 %rd1, [memory];
mov.u32 %r1, %ctaid.x;
mov.u32 %r2, %tid.x;
setp.ne.u32 %p1, %r1, 0;
setp.ne.u32 %p2, %r2, 0;
@%p1 bra $reader;
THREAD
WRITER
bra $done;
$reader:
@%p2 bra $done;
READER
st.global.u32 [%rd1+128], %r3;
st.global.u32 [%rd1+132], %r4;
$done:
ret;
}
"""


def found(writer: str, reader: str, weak: bool) -> set[tuple[int, int]]:
    both = "%p2 " in writer  # the writer's threads, else one of them
    text = TEXT.replace("THREAD", "" if both else "@%p2 bra $done;")
    library().emulator_ptx(text.replace("WRITER", writer).replace("READER", reader).encode())
    outcomes = set()
    for seed in range(SEEDS):
        choose(seed=seed, most_instructions=(4, 40)[seed % 2], weak=weak)
        memory = torch.zeros(64, dtype=torch.int32)
        words = (ctypes.c_uint64 * 1)(memory.data_ptr())
        called(library().emulator_launch(b"litmus", (ctypes.c_uint32 * 5)(2, 1, 1, 64, 0), words, 8))
        run()
        outcomes.add((int(memory[32]), int(memory[33])))
    return outcomes


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_reader_finds(name):
    writer, reader, allowed, must = PROGRAMS[name]
    with emulated():
        outcomes = found(writer, reader, weak=True)
        assert outcomes <= allowed and outcomes >= set(must), outcomes


def test_strong_memory_is_seen_by_all_at_once():
    """But for who comes first: a message has come with its flag, a vector as a whole."""
    with emulated():
        assert found(DATA + FLAG, POLL + LATER, weak=False) == {(1, 1)}
        assert found(*PROGRAMS["a vector"][:2], weak=False) == {(0, 0), (1, 1)}


def test_a_launch_behind_sees_all_and_a_failed_one_loses_what_waits():
    stores = "\n".join(f"st.global.u32 [%rd1+{4 * at}], 7;" for at in range(32))
    with emulated():
        for end, least in (("", 32), ("trap;", 0)):
            text = TEXT.replace("THREAD", "@%p2 bra $done;").replace("READER", "bra $done;")
            library().emulator_ptx(text.replace("WRITER", stores + end).encode())
            fewest = 32
            for seed in range(20):
                choose(seed=seed, weak=True)
                memory = torch.zeros(64, dtype=torch.int32)
                words = (ctypes.c_uint64 * 1)(memory.data_ptr())
                called(library().emulator_launch(b"litmus", (ctypes.c_uint32 * 5)(1, 1, 1, 64, 0), words, 8))
                failed = library().emulator_run()
                assert bool(failed) == bool(end)
                fewest = min(fewest, int((memory == 7).sum()))
            assert fewest == least
