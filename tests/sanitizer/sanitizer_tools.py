"""compute-sanitizer's tools: their command lines, their reports, and by which controls each shows what it sees.

Standard library only. What each can see, by NVIDIA's manual and by controls.cu, which is run first:

memcheck   out of bounds and misaligned accesses, asynchronous and bulk copies among them. Every tensor is a cudaMalloc
           of its own with PADDING bytes behind it that nobody may touch
racecheck  hazards in shared memory between threads of a block. Nothing in global memory, nothing between blocks
synccheck  barriers to which not all come, mbarriers that are not initialised
initcheck  reads of global memory that nobody has written. All kernels run under it, as it has to see who writes; only
           ours are judged

Seen on 2026-11-27, an H100 with CUDA 13.0's tools, the first run with the controls of IDIOMS: of the planted faults
memcheck reported 4 of 4, synccheck 2 of 2, initcheck 3 of 3, racecheck 6 of 9. It does not see that a named barrier is
missing, and ring and ring_of_registers hang under it where a stage is filled too early. Of the right controls racecheck
reported ring_of_leaders and ring_of_copies, synccheck barrier_of_roles, and no other was. Without a tool all 186 calls
are right and launch 141 of the 143 compiled kernels, which took 90 s with the controls; memcheck took 13 s, racecheck
161, synccheck 12, initcheck 22. memcheck reported nothing. What the others did has been judged by the emulator, which
knows the order of any two accesses (tests/emulator/watch.h), and by NVIDIA's manual:

initcheck  right: mhc's many_kernel loaded the padding behind a row's sums, sorted_kernel and wide_kernel where a tile
           begins that is none. No result knew of it; both are mended, and are reported no more. prepare_kernel reads
           rows without a local expert (2,336 reports), which no result knows of either
synccheck  wrong of sparse_decode_kernel and sparse_decode_pairs_kernel, whose warps come to a barrier from several
           places of the code: PTX asks for one place of a warp's threads alone. All of the latter's reports were of the
           warp of its group that has the rotary dimensions, at that warp's place. It ends the process at the first such
           report, so it had not come to sparse_decode_wide_kernel and both prefill kernels, which do the same; an
           H200's did on 2026-11-29, and reported all five: it checks nothing of this operator (MISREAD). And it
           counts too few mbarriers in dynamic shared memory, warns, and ends the process: --num-cuda-barriers tells it
racecheck  wrong of the eight kernels that hand stages over by mbarriers where a leader, or copies, arrive. Of the last
           that it came to, scaled_kernel, each report is of cp.async into a stage and ldmatrix from one; as this card
           has it, without block-scaled products, its PTX was on the emulator once, by hand. Before 2025.4 the tool
           takes cp.async.mbarrier.arrive for an arrival of the thread; later notes mend more of mbarriers. Of one
           process it lost hazards behind the most that it keeps: so the rest runs again
racecheck  lost wo_a's process, both times: "failed to handle a hardware exception". It was behind the reports of all of
           units_kernel's calls, so in one of the last two: "8 rows, two slices", whose kernels it has run elsewhere, or
           "257 rows, weights expanded", which is expand_kernel and cuBLAS's product. It is not known yet whether it is
           lost where it looks at no kernel, too. From now on the check finds that out (LOST, NOTHING_TO_SEE)

The emulator saw one order missing that racecheck has not: prefill's warps read a fold and wrote it with shuffles
between, which carry no order of memory. What was written depended on what was read, so nothing could go wrong; mended.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

OURS = "4dsv4"  # in the mangled names of all CUDA kernels of ours: their namespace
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
PADDING = 4096
PREFIX = "========="
PRINT_LIMIT = 5_000

# Of a block. What the tools count for themselves is too few where barriers lie in dynamic shared memory; then synccheck
# ends the process. Kernels here have 14 at most; others report that 64 to 65,536 are taken.
BARRIERS = ("--num-cuda-barriers", "1024")
OPTIONS = {
    "memcheck": ("--padding", str(PADDING), "--report-api-errors", "no"),  # torch asks for what is not there
    "racecheck": ("--racecheck-report", "analysis", *BARRIERS),
    "synccheck": BARRIERS,
    "initcheck": (),
}


NO_FAULT = "no fault of this tool's"  # asked only whether it is reported where it is right


@dataclass(frozen=True)
class Control:
    """A kernel of controls.cu. `required`: a tool that does not report its fault checks nothing. Of the others the
    check says so: hazards of that kind are not seen. `idiom`: the right one may be reported, and if so, reports of
    kernels that do the same are worth nothing (IDIOMS)."""

    name: str
    what: str
    required: bool = False
    idiom: bool = False


CONTROLS = {
    "memcheck": (
        Control("past_global", "a load of 4 bytes past an allocation", True),
        Control("past_cp_async", "cp.async past an allocation", True),
        Control("past_shared", "a store past dynamic shared memory", True),
        Control("past_bulk", "cp.async.bulk past an allocation"),
    ),
    "racecheck": (
        Control("all_threads", "a missing __syncthreads", True),
        Control("named_barrier", "a read across the halves that bar.sync has apart"),
        Control("cp_async_waited", "a missing cp.async.wait_all"),
        Control("cp_async_barrier", "a missing wait for cp.async.mbarrier.arrive"),
        Control("bulk_copy", "a missing wait for cp.async.bulk's mbarrier"),
        Control("ring", "a stage filled before it was emptied, by mbarriers"),
        Control("ring_of_registers", "the same behind setmaxnreg"),
        Control("ring_of_leaders", "the same where a warp's leader tells for all", idiom=True),
        Control("ring_of_copies", "the same of copies", idiom=True),
    ),
    "synccheck": (
        Control("divergent", "half a warp at a barrier", True),
        Control("barrier_init", "an mbarrier that is not initialised"),
        Control("named_barrier", NO_FAULT),
        Control("ring", NO_FAULT),
        Control("cp_async_barrier", NO_FAULT),
        Control("bulk_copy", NO_FAULT),
        Control("ring_of_registers", NO_FAULT),
        Control("ring_of_leaders", NO_FAULT),
        Control("ring_of_copies", NO_FAULT),
        Control("barrier_of_roles", NO_FAULT, idiom=True),
    ),
    "initcheck": (
        Control("unwritten", "a load of what nobody has written", True),
        Control("unwritten_cp_async", "cp.async of it"),
        Control("unwritten_bulk", "cp.async.bulk of it"),
    ),
}


@dataclass(frozen=True)
class Idiom:
    """Reports that say nothing: of `kernels`, by `tool`, in words that match `what`, in a run in which the tool has
    reported one of `controls`, kernels that do the same and are right. Such a run is made again without those of them
    that were reported: what the tool may have lost by them it sees then. `proof`: the test by which they are right on
    the emulator, which knows what the tool does not."""

    tool: str
    kernels: tuple[str, ...]
    what: str
    controls: tuple[str, ...]
    why: str
    proof: str


OPERATORS_IN_ORDER = "tests/emulator/test_watch.py::test_operators_have_their_accesses_in_order"
IDIOMS = (
    Idiom(
        "racecheck",
        (
            "dsv4::sparse_decode::sparse_decode_kernel",
            "dsv4::mxfp4_moe::sorted_kernel",
            "dsv4::mxfp4_moe::wide_kernel",
            "dsv4::mxfp4_moe::scaled_kernel",
            "dsv4::mhc::many_kernel",
            "dsv4::fp8_linear::units_kernel",
            "dsv4::fp8_linear::tile_kernel",
            "dsv4::bf16_linear::bf16_linear_tile_kernel",
        ),
        r"Race reported between",
        ("ring_of_leaders", "ring_of_copies"),
        "stages handed over by mbarriers at which a warp's leader, or cp.async.mbarrier.arrive, arrives",
        OPERATORS_IN_ORDER,
    ),
    Idiom(
        "synccheck",
        (
            "dsv4::sparse_decode::sparse_decode_kernel",
            "dsv4::sparse_decode::pairs::sparse_decode_pairs_kernel",
            "dsv4::sparse_decode::pairs::sparse_decode_wide_kernel",
            "dsv4::sparse_decode::prefill::sparse_prefill_kernel",
            "dsv4::sparse_decode::prefill::sparse_prefill_stacked_kernel",
        ),
        r"Divergent thread\(s\) in block",
        ("barrier_of_roles",),
        "warps of several jobs come to a barrier at several places of the code, which PTX allows",
        OPERATORS_IN_ORDER,
    ),
    Idiom(
        "initcheck",
        ("dsv4::mxfp4_moe::prepare_kernel",),
        r"read of size 16 bytes",
        (),  # the tool is right
        "rows of pairs without a local expert are prepared with the others, and read by nobody",
        "tests/emulator/test_watch.py::test_rows_of_no_expert_reach_no_result",
    ),
)


MISREAD = (("synccheck", "sparse_decode"),)  # operators of which a tool was seen to misread every kernel, by an idiom


@dataclass(frozen=True)
class NothingToSee:
    """Kernels that have nothing in them which `tool` looks at, so that nothing is missed where it loses their process.
    `proof`: the test that asks for it."""

    tool: str
    kernels: tuple[str, ...]
    why: str
    proof: str


NOTHING_TO_SEE = (
    NothingToSee(
        "racecheck",
        ("dsv4::wo_a::expand_kernel",),
        "no shared memory",
        "tests/emulator/test_watch.py::test_kernels_in_which_racecheck_has_nothing_to_see",
    ),
)
LOST = "Internal Sanitizer Error"  # of a record by which a tool says that it is at its end, not the program
NO_KERNEL = "no_kernel_has_this_in_its_name"


def nothing_to_see(tool: str) -> set[str]:
    return {kernel for one in NOTHING_TO_SEE if one.tool == tool for kernel in one.kernels}


def base_name(kernel: str) -> str:
    """Without return type, template arguments and parameters."""
    name = kernel.removeprefix("void ").replace("(anonymous namespace)", "@")
    return re.split(r"[<(]", name)[0].replace("@", "(anonymous namespace)")


def idioms(tool: str, misunderstood: Iterable[str]) -> list[Idiom]:
    """Those that hold, where the tool has reported these right controls."""
    reported = set(misunderstood)
    return [one for one in IDIOMS if one.tool == tool and (not one.controls or reported & set(one.controls))]


def find() -> Path | None:
    """compute-sanitizer of CUDA_HOME, PATH, or where toolkits are installed."""
    folders = [Path(os.environ["CUDA_HOME"])] if os.environ.get("CUDA_HOME") else []
    folders += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    found = [folder / "bin/compute-sanitizer" for folder in folders]
    if on_path := shutil.which("compute-sanitizer"):
        found.insert(len(folders) and bool(os.environ.get("CUDA_HOME")), Path(on_path))
    return next((path for path in found if os.access(path, os.X_OK)), None)


def command(
    sanitizer: Path,
    tool: str,
    log: Path,
    program: Sequence[str],
    *,
    port: int,
    kernels: Sequence[str] = (OURS,),
) -> list[str]:
    """The program under a tool. `port`: the first of ten by which the tool talks to it; each run has its own.
    `kernels`: what the names of those that it looks at have in them."""
    kernels = () if tool == "initcheck" else kernels
    filters = [word for name in kernels for word in ("--kernel-name", f"kernel_substring={name}")]
    always = ["--tool", tool, "--log-file", str(log), "--print-limit", str(PRINT_LIMIT), "--show-backtrace", "device"]
    places = ["--port", str(port), "--launch-timeout", "120", "--target-processes", "application-only"]
    return [str(sanitizer), *always, *places, *OPTIONS[tool], *filters, *program]


@dataclass(frozen=True)
class Report:
    """What a tool wrote. `faults`: (what, kernel) -> how often; `others`: of kernels that are not ours, or of none."""

    faults: Counter
    others: Counter
    finished: bool

    @property
    def lost(self) -> bool:
        """The tool ended by a fault of its own."""
        return any(LOST in what for what, _ in self.others)

    @property
    def total(self) -> int:
        return sum(self.faults.values())

    def without(self, set_aside: Sequence[Idiom]) -> tuple[Report, Counter]:
        """The rest, and what these are about."""
        aside = Counter()
        for (what, kernel), count in self.faults.items():
            if any(base_name(kernel) in one.kernels and re.search(one.what, what) for one in set_aside):
                aside[what, kernel] = count
        return Report(self.faults - aside, self.others, self.finished), aside


SUMMARY = re.compile(r"(ERROR|RACECHECK) SUMMARY: (\d+)")
# what is no record: what a tool says of itself and of the program
TELLING = re.compile(r"COMPUTE-SANITIZER|SUMMARY|Target application returned an error|^Saved|Copyright|Version")
PLACE = re.compile(r"\s(?:at|in|and \w+ access at)\s+(.*?)(?:\+0x[0-9a-f]+)?(?: in \S+:\d+)?\s*$")
NUMBERS = re.compile(r"0x[0-9a-f]+|\(\d+,\d+,\d+\)")


def is_ours(place: str) -> bool:
    return "dsv4::" in place or OURS in place


def _records(text: str) -> Iterator[list[str]]:
    """The lines of each record, without the prefix: those that are indented follow one that is not."""
    record: list[str] = []
    for line in text.splitlines():
        if not line.startswith(PREFIX):
            continue
        told = line[len(PREFIX) :]
        if told.startswith("     ") and record:
            record.append(told)
            continue
        if record:
            yield record
        record = [told.strip()] if told.strip() and not TELLING.search(told) else []
    if record:
        yield record


def read(text: str) -> Report:
    faults, others = Counter(), Counter()
    for first, *rest in _records(text):
        places = [found[1] for line in (f" {first}", *rest) if (found := PLACE.search(line))]
        what = NUMBERS.sub("*", first.split(" at ")[0]).strip()
        kernel = next((place for place in places if is_ours(place)), None)
        if kernel is None and any(is_ours(line) for line in rest):
            kernel = next(line.strip() for line in rest if is_ours(line))
        (others if kernel is None else faults)[what, (kernel or next(iter(places), "")).split("(")[0]] += 1
    return Report(faults, others, bool(SUMMARY.search(text)))
