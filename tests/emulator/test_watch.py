"""Accesses to shared memory that nothing puts in order, and reads of what nobody has written.

Each kind is noticed, by the sanitizer's own controls (tests/sanitizer/controls.cu); and the operators' kernels have
none but those in the table here.
"""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from deepseek_v4_sm120.ops import mxfp4_moe, sparse_decode
from deepseek_v4_sm120.specs import mxfp4_moe as moe_spec
from deepseek_v4_sm120.specs import sparse_decode as sparse_spec
from tests.emulator.build import HERE, build_artifact
from tests.emulator.emulated import EmulatorError, at_most, called, choose, emulated, library, ptx, reports, run, taken
from tests.sanitizer import cases
from tests.sanitizer import sanitizer_tools as tools

REPO = HERE.parent.parent
THREADS = 256

# (part of the kernel's name, part of the report, why it may be): with a test that it reaches no result
HARMLESS = (
    # rows of pairs without a local expert, which no product has written: what becomes of them nobody reads
    ("mxfp4_moe14prepare_kernel", "reads what nobody has written"),
    # behind a row's last leaf: values of a stage that may be filled meanwhile, loaded as any leaf's, never multiplied
    ("sparse_decode_wide_kernel", "race: writes, "),
    ("sparse_decode_wide_kernel", "race: reads, "),
)


@functools.cache
def controls() -> dict[str, str]:
    """The controls' kernels as PTX: (control, is it the faulty one) -> its name."""
    toolkit = build_artifact.find_toolkit(None, build_artifact.CACHE)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "controls.ptx"
        command = [str(toolkit.nvcc), "-std=c++17", "-I.", "-arch=compute_120f", "-ptx", "-o", str(made)]
        subprocess.run([*command, "tests/sanitizer/controls.cu"], cwd=REPO, capture_output=True, check=True)
        text = made.read_text()
    for variable, name in re.findall(r"^(?:\.weak |\.visible )?(\.shared [^;]* (\w+)\[?\d*\]?;)\n", text, re.MULTILINE):
        text = text.replace(f"{variable}\n", "")  # of two kernels: each its own
        parts = re.split(r"(?=^\.visible \.entry)", text, flags=re.MULTILINE)
        text = "".join(part.replace("\n{\n", f"\n{{\n{variable}\n", 1) if name in part else part for part in parts)
    library().emulator_ptx(text.encode())
    names = re.findall(r"\.entry (\w+)", text)
    return {(re.search(r"control\d+([a-z_]+)ILb", name)[1], "ILb1E" in name): name for name in names}


def watched(control: str, fault: bool, seed: int = 1, unwritten: bool = False) -> list[str]:
    name = controls()[control, fault]
    given = torch.ones(THREADS + 4, dtype=torch.int32)
    with emulated():
        choose(seed=seed, watched=True, most_instructions=20)
        memory = torch.zeros(THREADS + 4, dtype=torch.int32)
        memory.copy_(given)
        out = torch.zeros(THREADS, dtype=torch.int32)
        if unwritten:
            library().emulator_unwritten(memory.data_ptr(), memory.nbytes)
        sizes = (ctypes.c_uint32 * 5)(1, 1, 1, THREADS, 4 * THREADS)
        parameters = (ctypes.c_uint64 * 2)(memory.data_ptr(), out.data_ptr())
        called(library().emulator_launch(name.encode(), sizes, parameters, 16))
        try:
            with at_most(1_000_000):
                run()
        except EmulatorError as error:  # some faults make it wait for ever
            if not (fault and "does not end" in str(error)):
                raise
        return reports()


NAMES = {tool: [one.name for one in tools.CONTROLS[tool]] for tool in tools.TOOLS}


@pytest.mark.parametrize("control", sorted({*NAMES["racecheck"], *NAMES["synccheck"], *NAMES["initcheck"]}))
def test_right_controls_are_not_reported(control):
    """Those among them that compute-sanitizer misunderstands."""
    for seed in range(4):
        assert watched(control, False, seed) == []


@pytest.mark.parametrize("control", NAMES["racecheck"])
def test_races_are_reported_under_every_schedule(control):
    for seed in range(4):
        found = watched(control, True, seed)
        assert found and all(" race: " in line for line in found), found


@pytest.mark.parametrize("control", NAMES["initcheck"])
def test_reads_of_what_nobody_has_written_are_reported(control):
    found = watched(control, False, unwritten=True)
    assert found and all(" reads what nobody has written: " in line for line in found)


def test_misuse_of_barriers_is_noticed():
    assert any("a barrier of all threads where some have ended" in line for line in watched("divergent", True))
    assert any("an mbarrier that nobody has initialised" in line for line in watched("barrier_init", True))


HEAD = ".visible .entry small(.param .u64 given)\n{\n.reg .pred %p<9>;\n.reg .b32 %r<9>;\n.reg .b64 %rd<9>;\n"
HEAD += ".shared .align 16 .b8 memory[1024];\n"
WRITE = "mov.u32 %r1, %tid.x;\nshl.b32 %r2, %r1, 2;\nst.shared.u32 [%r2], %r1;\n"
READ = "xor.b32 %r3, %r2, 4;\nld.shared.u32 %r4, [%r3];\n"
ALL = "bar.warp.sync 0xffffffff;\n"
SHUFFLE = "shfl.sync.bfly.b32 %r5, %r4, 1, 31, 0xffffffff;\n"
# name -> (a program of a block of 64 threads, how what it is reported for begins; None: nothing)
PROGRAMS = {
    "another lane's word": (WRITE + READ, "race: writes"),
    "another lane's word behind the warp's barrier": (WRITE + ALL + READ, None),
    "another lane's word behind a shuffle": (WRITE + SHUFFLE + READ, "race: writes"),
    "a word that others have read": (
        WRITE + ALL + "ld.shared.u32 %r4, [0];\n" + SHUFFLE + "st.shared.u32 [0], %r4;\n",
        "race: ",
    ),
    "the same value of all": (WRITE + "bar.sync 0;\nmov.b32 %r4, 7;\nst.shared.u32 [512], %r4;\n", None),
    "other values of all": (WRITE + "st.shared.u32 [512], %r1;\n", "race: writes"),
    "an atomic of all": (WRITE + "red.shared.add.u32 [512], 1;\n", None),
    "bytes of a word": (WRITE + "bar.sync 0;\nst.shared.u8 [%r1], %r1;\n", None),
    "a barrier that not all live to see": (
        WRITE + "setp.lt.u32 %p2, %r1, 32;\n@%p2 bra $done;\nnanosleep.u32 9;\nnanosleep.u32 9;\nbar.sync 0;\n",
        "a barrier of all threads where some have ended",
    ),
    "a barrier of the others alone": (
        WRITE + "setp.lt.u32 %p2, %r1, 32;\n@%p2 bra $done;\nbar.sync 1, 32;\n" + READ,
        None,
    ),
    "an mbarrier that others may not have yet": (
        WRITE + "setp.ne.u32 %p2, %r1, 0;\n@%p2 bra $else;\nmbarrier.init.shared::cta.b64 [512], 63;\nbra $done;\n"
        "$else:\nnanosleep.u32 9;\nnanosleep.u32 9;\nmbarrier.arrive.shared::cta.b64 _, [512];\n",
        "",  # one or the other
    ),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_small_programs(program):
    text, expected = PROGRAMS[program]
    with emulated():
        library().emulator_ptx(f"{HEAD}{text}$done:\nret;\n}}\n".encode())
        seen = []
        for seed in range(6):
            choose(seed=seed, watched=True, most_instructions=4 if seed % 2 else 40)
            sizes = (ctypes.c_uint32 * 5)(1, 1, 1, 64, 0)
            called(library().emulator_launch(b"small", sizes, (ctypes.c_uint64 * 1)(0), 8))
            try:
                run()
            except EmulatorError:  # a barrier that is not there yet
                assert program.startswith("an mbarrier")
                continue
            seen.append(reports())
    assert seen
    if expected is None:
        assert seen == [[]] * len(seen)
    else:
        assert any(f"small: {expected}" in line for one in seen for line in one), seen
        if "barrier that" not in program:
            assert all(seen), "some schedules only"


FLAGGED = """.visible .entry small(.param .u64 given)
{
.reg .pred %p<9>;
.reg .b32 %r<9>;
.reg .b64 %rd<9>;
.shared .align 16 .b8 memory[8192];
ld.param.u64 %rd1, [given];
mov.u32 %r1, %tid.x;
mad.wide.u32 %rd2, %r1, 16, %rd1;
ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%rd2];
setp.ne.u32 %p1, %r2, 0;
setp.ne.u32 %p2, %r3, 0;
setp.ne.u32 %p3, %r1, WAITER;
shl.b32 %r6, %r1, 2;
@!%p3 mbarrier.init.shared::cta.b64 [8184], COUNT;
bar.sync 0;
ACCESS
@%p2 mbarrier.arrive.shared::cta.b64 _, [8184];
@%p3 bra $done;
$again:
mbarrier.try_wait.parity.shared::cta.b64 %p4, [8184], 0;
@!%p4 bra $again;
WAITED
$done:
ret;
}
"""
READERS = "@%p1 ld.shared.u32 %r7, [4096];", "st.shared.u32 [4096], %r1;"
WRITERS = (
    "@%p1 st.shared.u32 [%r6], %r1;",
    """mov.u32 %r8, 0;
$each:
ld.shared.u32 %r7, [%r8];
mul.wide.u32 %rd3, %r8, 4;
add.s64 %rd3, %rd3, %rd1;
st.global.u32 [%rd3+8], %r7;
add.u32 %r8, %r8, 4;
setp.lt.u32 %p5, %r8, BYTES;
@%p5 bra $each;
""",
)


def of_flagged(access: str, behind: str, threads: int, some: set[int], arrive: set[int], waiter: int):
    """(races, what the waiting thread found in all words): threads of `some` access shared memory, then those of
    `arrive` arrive at an mbarrier, for which one thread waits before its own access."""
    text = FLAGGED.replace("ACCESS", access).replace("WAITED", behind).replace("BYTES", str(4 * threads))
    text = text.replace("WAITER", str(waiter)).replace("COUNT", str(len(arrive)))
    with emulated():
        choose(seed=threads, watched=True, most_instructions=30)
        memory = torch.tensor([[t in some, t in arrive, 0, 0] for t in range(threads)], dtype=torch.int32)
        library().emulator_ptx(text.encode())
        sizes = (ctypes.c_uint32 * 5)(1, 1, 1, threads, 0)
        called(library().emulator_launch(b"small", sizes, (ctypes.c_uint64 * 1)(memory.data_ptr()), 8))
        run()
        lines = reports()
    assert all(" small: race: " in line for line in lines)
    return sum(int(line.split()[0]) for line in lines), memory[:, 2].tolist()


SETS = {  # threads, those that access, those that tell
    "two warps": (64, {1, 2, 5, 31, 32, 40, 63}, {2, 5, 40}),
    "all of them tell": (64, {1, 2, 5, 31, 32, 40, 63}, set(range(64))),
    "one lane of each of 32 warps": (1024, {33 * n % 1024 for n in range(32)}, {33 * n for n in range(0, 32, 3)}),
    "all of the first and of the last warp": (
        1024,
        {*range(32), *range(992, 1024)},
        {*range(7, 32), *range(992, 1009)},
    ),
}


@pytest.mark.parametrize("name", SETS)
def test_a_race_is_that_of_its_lanes_and_of_no_others(name):
    """Who has told the waiting thread is in order with it, lane by lane. Of readers of one word, whom a list of lanes
    holds together, as many are reported as have not told; of writers each by its own word, which is all bits set."""
    threads, some, arrive = SETS[name]
    waiter = threads - 3
    some, arrive = some - {waiter}, arrive - {waiter}
    silent = some - arrive
    assert of_flagged(*READERS, threads, some, arrive, waiter)[0] == len(silent)
    races, found = of_flagged(*WRITERS, threads, some, arrive, waiter)
    assert races == len(silent)
    assert found == [t if t in some - silent else -1 for t in range(threads)]


COPIES = """.visible .entry small(.param .u64 given)
{
.reg .pred %p<9>;
.reg .b32 %r<9>;
.reg .b64 %rd<9>;
.shared .align 16 .b8 memory[65536];
ld.param.u64 %rd1, [given];
mov.u32 %r1, %tid.x;
setp.ne.u32 %p1, %r1, 0;
mov.u32 %r2, 65024;
@%p1 bra $ready;
$init:
mbarrier.init.shared::cta.b64 [%r2], 1;
add.u32 %r2, %r2, 8;
setp.lt.u32 %p2, %r2, LAST;
@%p2 bra $init;
$ready:
bar.sync 0;
mov.u32 %r2, 65024;
mul.lo.u32 %r3, %r1, 992;
$copy:
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd1], 16, [%r2];
add.u32 %r3, %r3, 16;
add.u32 %r2, %r2, 8;
setp.lt.u32 %p2, %r2, LAST;
@%p2 bra $copy;
ld.shared.u32 %r4, [%r3+-16];
ret;
}
"""


def copied(barriers: int) -> list[str]:
    """Of 64 threads that ask for a copy by each mbarrier, and read the last one's without having waited."""
    with emulated():
        choose(seed=1, watched=True)
        memory = torch.zeros(4, dtype=torch.int32)
        library().emulator_ptx(COPIES.replace("LAST", str(65024 + 8 * barriers)).encode())
        sizes = (ctypes.c_uint32 * 5)(1, 1, 1, 64, 0)
        called(library().emulator_launch(b"small", sizes, (ctypes.c_uint64 * 1)(memory.data_ptr()), 8))
        run()
        return reports()


def test_so_many_writers_are_watched_and_no_more():
    """Of 64 threads, which are 128, and 64 by mbarrier: 4,096 at 62 of them, the last of whose copies race as the
    first would; one more ends the run."""
    (report,) = copied(62)
    assert report.startswith("64 small: race: writes, line 22: cp.async.bulk") and "; reads, line 27" in report
    with pytest.raises(EmulatorError, match="more than 4096 writers of a block's shared memory to watch"):
        copied(63)


# ---- the operators


def unexpected(found: list[str]) -> list[str]:
    return [line for line in found if not any(part in line and what in line for part, what in HARMLESS)]


def small(operator: str) -> list[cases.Case]:
    """The sanitizer's calls, but for those that take minutes here; sorted_kernel has a smaller one."""
    made = list(cases.OPERATORS[operator]())
    if operator == "mxfp4_moe":
        names = ("3 rows, inter 256", "3 rows, inter 256, exact", "40 rows, wide", "40 rows, MXFP8")
        few = moe_spec.Shape(17, inter=256, experts=2, topk=2, masked=0.1)
        by_expert = functools.partial(cases._moe, few, {"reproducible": True}, 0)
        return [*(case for case in made if case.name in names), cases.Case("17 rows, as a prompt's, exact", by_expert)]
    long = ("long C128", "135 rows, in_turn 1", "table of pages of 64")
    return [case for case in made if not any(part in case.name for part in long)]


def kernels_that_ran() -> set[str]:
    return {name for name in ptx() if library().emulator_ran(name.encode())}


@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_operators_have_their_accesses_in_order(operator):
    """Each kernel in the first of the calls that has it; and all of the operator's that the sanitizer's idioms name."""
    wrong, seen = {}, set()
    for case in small(operator):
        choices = {"seed": 1, "multiprocessors": 40, "most_instructions": 60}
        with emulated(**choices), cases.multiprocessors(case.multiprocessors):
            case.run("cpu")
            kernels = {launch.kernel for launch in taken()} | kernels_that_ran()
        if kernels <= seen and kernels:
            continue
        with emulated(**choices, watched=True), cases.multiprocessors(case.multiprocessors):
            case.run("cpu")
            run()
            seen |= kernels_that_ran()
            if found := unexpected(reports()):
                wrong[case.name] = found[:4]
    assert wrong == {}
    named = {kernel for one in tools.IDIOMS if one.proof == tools.OPERATORS_IN_ORDER for kernel in one.kernels}
    names = [kernel.split("::")[-1] for kernel in named if kernel.startswith(f"dsv4::{operator}::")]
    assert [name for name in names if not any(f"{len(name)}{name}" in kernel for kernel in seen)] == []
    assert (
        operator in FEW_OF or [kernel for kernel in ptx() if is_wanted(operator, kernel) and kernel not in seen] == []
    )


FEW_OF = ("sparse_decode", "mxfp4_moe")  # of which `small` leaves out what the sanitizer calls on a card
NOT_CALLED = ("mhc14summing_kernel", "index_select12score_kernelILi0E")  # with a sum of several cards; Hopper's


def is_wanted(operator: str, kernel: str) -> bool:
    """wo_a has those of fp8_linear that rotate."""
    home = "fp8_linear" if operator == "wo_a" and "Lb1E" in kernel else operator
    skipped = (*NOT_CALLED, "Lb1E") if operator == "fp8_linear" else NOT_CALLED
    return f"_ZN4dsv4{len(home)}{home}" in kernel and not any(name in kernel for name in skipped)


def test_kernels_in_which_racecheck_has_nothing_to_see():
    """Nothing of shared memory is in their text; of those that have some, something is."""
    texts = {name: text.split(".entry", 1)[1] for name, text in ptx().items()}
    assert (said := tools.nothing_to_see("racecheck"))
    for kernel in said:
        mangled = "".join(f"{len(part)}{part}" for part in kernel.split("::"))
        found = [text for name, text in texts.items() if f"_ZN{mangled}" in name]
        assert found and not any("shared" in text for text in found), kernel
    assert {"shared" in text for name, text in texts.items() if "13scaled_kernel" in name} == {True}


def of_masked_pairs(**choices):
    shape = moe_spec.Shape(2, inter=256, experts=5, topk=2, masked=0.3)  # more experts than pairs: tiles that are none
    given = moe_spec.make_inputs(shape, seed=4, device="cpu").arguments()
    with emulated(seed=1, multiprocessors=4, most_instructions=100, **choices):
        out = mxfp4_moe.mxfp4_moe(**given, reproducible=True)
        run()
        return out, reports()


def test_rows_of_no_expert_reach_no_result(monkeypatch):
    """Prepared with the others, whatever is in them."""
    monkeypatch.setattr(mxfp4_moe, "DECODE_ROWS", 0)
    first, found = of_masked_pairs(watched=True, poison=0)
    assert any("prepare_kernel" in line and "nobody has written" in line for line in found)
    assert unexpected(found) == []
    assert first.isfinite().all()
    assert torch.equal(of_masked_pairs(poison=0xFF)[0].view(torch.int16), first.view(torch.int16))  # NaN


def test_values_behind_a_rows_last_leaf_reach_no_result():
    """Where a read races it gives all bits set, which is NaN."""
    extra = sparse_spec.CacheShape(64, 192, lengths=(192, 3, 100), masked=0.1)
    inputs = sparse_spec.make_inputs(sparse_spec.Shape(5, 24, sparse_spec.WINDOW, extra), seed=24, device="cpu")

    def call(**choices):
        with emulated(multiprocessors=2, most_instructions=60, **choices):
            out = sparse_decode.sparse_decode(**inputs.arguments(), prefill=False, pairs=True)
            run()
            return out, reports()

    good = call(seed=1)[0]
    assert good.isfinite().all()
    for seed in (1, 2, 3):
        out, found = call(seed=seed, watched=True)
        assert any("race: writes, " in line and "wide_kernel" in line for line in found) and unexpected(found) == []
        assert torch.equal(out.view(torch.int16), good.view(torch.int16))
