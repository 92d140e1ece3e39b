"""Kernels whose blocks or cards tell each other something, where global memory keeps no more than PTX promises: their
bits are those that they have where all is seen at once, which test_kernels.py holds against the references.

And what is noticed: of what orders memory, one instruction at a time is left out or made weaker. What nobody can see
here is said with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from tests.emulator import communicating as calls
from tests.emulator.emulated import (
    MOST_INSTRUCTIONS,
    MOST_OF_MUTANTS,
    MOST_OF_RIGHT,
    EmulatorError,
    at_most,
    choose,
    emulated,
    library,
    ptx,
    run,
)
from tests.emulator.test_power import mutants

SIZES = {"multiprocessors": (2, 8, 40), "most_instructions": (300, 12, 3000)}
PATIENCE, LESS_PATIENCE = "200001;", "4001;"  # of a block of sparse_decode, in clocks
# what orders memory -> what is there instead; a fence: nothing
WITHOUT = {
    "fence": (r"membar\.(?:gl|sys);", " "),
    "release": (r"\b(red|atom|st)\.release\b", r"\1.relaxed"),
    "release of both": (r"\batom\.acq_rel\b", "atom.acquire"),
    "acquire of both": (r"\batom\.acq_rel\b", "atom.release"),
    "acquire": (r"\bld\.acquire\b", "ld.relaxed"),
    "acquiring load": (r"\bld\.acquire[^;]*;", " "),
    "wait for the kernel in front": (r"griddepcontrol\.wait;", " "),
}
AT_ONCE = "atomics act at once and in their order here; this fence stands between two of a thread"
LEAVES = "who waits gives up before it is told"
GIVES_UP = "of the give-up path, which is not taken here"
WHILE_IT_RUNS = "the words are seen while the kernel runs; the fence is for where it ends"
FOR_ALL = "the fence behind the last word is one for all words"
FIRST = "the first kernel, whose inputs are there"
MERGES = {"multiprocessors": 8}  # with fewer a row is one block's


@dataclass
class Case:
    make: Callable[[], calls.Call]
    seeds: int = 6
    fixed: dict = field(default_factory=dict)  # of SIZES
    text: Callable[[str], str] = lambda text: text  # what is run instead of a kernel's


CASES = {
    "compressor": Case(calls.compressed),
    "compressor, many tokens": Case(lambda: calls.compressed(True)),
    "mhc, many rows": Case(lambda: calls.boundary("many", 20), 3, {"multiprocessors": 40}),
    "mhc, one launch": Case(lambda: calls.boundary("fused", 2), 4, {"multiprocessors": 40}),
    "mhc, one launch that adds": Case(lambda: calls.boundary_that_adds(2), 2, {"multiprocessors": 40}),
    "mhc, two launches": Case(lambda: calls.boundary("split", 2), 4),
    "mhc behind a sum": Case(calls.boundary_behind_a_sum, 1, {"multiprocessors": 188}),
    "sparse_decode": Case(calls.attention, 4, MERGES),
    "sparse_decode, little patience": Case(
        calls.attention, 4, MERGES, lambda text: text.replace(PATIENCE, LESS_PATIENCE)
    ),
    "fp8_linear": Case(lambda: calls.product(9, row_tiles=1, warp_rows=4, in_turn=1)),
    "fp8_linear, few rows": Case(lambda: calls.product(3, warp_rows=4)),
    "index_select": Case(calls.selection),
    **{
        f"{algorithm} by {transport}": Case(lambda t=transport, a=algorithm: calls.sums(t, a), 9)
        for algorithm in ("one_shot", "two_shot", "gather")
        for transport in ("peer", "host")
    },
    "two_shot of four": Case(lambda: calls.sums("host", "two_shot", 4), 9),
    "gives up": Case(lambda: calls.given_up("one_shot", False), 9),
    "gives up and ends": Case(lambda: calls.given_up("one_shot", True), 9),
}

# (case, of WITHOUT, schedules)
POWER = [
    ("compressor", "release of both", 30),
    ("compressor", "acquire of both", 30),
    ("compressor, many tokens", "release of both", 30),
    ("compressor, many tokens", "acquire of both", 30),
    ("mhc, many rows", "release", 30),
    ("mhc, many rows", "acquire", 30),
    ("sparse_decode", "release of both", 30),
    ("sparse_decode", "acquire of both", 30),
    ("sparse_decode", "acquire", 30),
    ("sparse_decode", "acquiring load", 30),
    ("sparse_decode, little patience", "fence", 30),
    ("sparse_decode, little patience", "acquire", 30),
    ("gives up", "fence", 60),
    ("gives up and ends", "fence", 20),
    ("fp8_linear", "wait for the kernel in front", 30),
    ("fp8_linear, few rows", "wait for the kernel in front", 30),
    ("index_select", "wait for the kernel in front", 30),
    ("one_shot by peer", "wait for the kernel in front", 30),
]


@dataclass(frozen=True)
class Unseen:
    """An instruction that is not noticed. kernel: of its name; what: of what around() says of it, and of no other."""

    kernel: str
    what: str
    why: str


UNSEEN = {
    ("sparse_decode", "acquire"): Unseen("sparse_decode_kernel", "membar.gl; >> ld.acquire", GIVES_UP),
    ("sparse_decode, little patience", "fence"): Unseen(
        "sparse_decode_kernel", ">> membar.gl; << mov.u32 %r, %ctaid.z;", AT_ONCE
    ),
    ("sparse_decode, little patience", "acquire"): Unseen("sparse_decode_kernel", "%clock64; >> ld.acquire", LEAVES),
    ("gives up", "fence"): Unseen("one_shot_kernel", ">> membar.sys; << ld.param.u8", WHILE_IT_RUNS),
    ("gives up and ends", "fence"): Unseen("one_shot_kernel", ">> membar.sys; << mov.b32 %r, 1;", FOR_ALL),
    ("fp8_linear, few rows", "wait for the kernel in front"): Unseen(
        "linear_kernelINS0_6ConfigILi4E", ">> griddepcontrol.wait;", FIRST
    ),
    ("index_select", "wait for the kernel in front"): Unseen("score_kernel", ">> griddepcontrol.wait;", FIRST),
}


def begin(case: Case, seed: int, weak: bool = True) -> None:
    """A schedule; seed 0 of strong memory is the one that has the bits."""
    sizes = {name: values[seed // 3**at % 3] for at, (name, values) in enumerate(SIZES.items())}
    choose(**{"seed": seed, **sizes, "weak": weak} | case.fixed)


def same(found, good) -> bool:
    run()
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, good, strict=True))


def prepared(case: Case):
    """(call, its bits, the texts of the kernels that ran); within `emulated()`."""
    call = case.make()
    begin(case, 0, weak=False)
    good = [one.clone() for one in call()]
    texts = {name: case.text(text) for name, text in ptx().items() if library().emulator_ran(name.encode())}
    for text in texts.values():
        library().emulator_ptx(text.encode())
    return call, good, texts


def instruction(line: str) -> str:
    """Without the numbers of registers and labels, which an edit anywhere may change; "": the line has none."""
    code = line.partition("//")[0].strip()
    code = "" if code.endswith(":") or code[:1] in (".", "{", "}", "(", ")") else code
    return " ".join(re.sub(r"(%[fhpr][ds]?|\$L__BB)[\d_]+\b", r"\1", code).split())


def around(text: str, line: int) -> str:
    """`before >> it << behind`: the instruction of a line, between its neighbours."""
    lines = [instruction(one) for one in text.split("\n")]
    before = next((one for one in reversed(lines[: line - 1]) if one), "")
    behind = next((one for one in lines[line:] if one), "")
    return f"{before} >> {lines[line - 1]} << {behind}"


def excused(every, texts, unseen: Unseen) -> int:
    """Which of the mutants may go unnoticed."""
    assert ">>" in unseen.what, f"{unseen.what!r} does not say which instruction it is"
    found = [
        at
        for at, (line, kernel, _) in enumerate(every)
        if unseen.kernel in kernel and unseen.what in around(texts[kernel], line)
    ]
    assert len(found) == 1, f"{unseen.what!r} of {unseen.kernel} names {len(found)} instructions: {found}"
    return found[0]


def put_back(texts) -> None:
    choose()
    for name in texts:
        library().emulator_ptx(ptx()[name].encode())


@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_the_same(name):
    case = CASES[name]
    has_mutants = any(name == one for one, _, _ in POWER)
    with emulated(), at_most(MOST_OF_RIGHT if has_mutants else MOST_INSTRUCTIONS):
        call, good, texts = prepared(case)
        assert not name.startswith("gives up") or good[0].tolist()[:5] == [1, 1, 0, 7, 3]
        try:
            for seed in range(case.seeds):
                begin(case, seed)
                assert same(call(), good), f"seed {seed}"
        finally:
            put_back(texts)


def is_whole(case: Case, call, good, seed: int) -> bool:
    begin(case, seed)
    try:
        return same(call(), good)
    except EmulatorError:
        return False


@pytest.mark.parametrize("name, kind, seeds", POWER, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_left_out_is_noticed(name, kind, seeds):
    """And what is whole is right in the schedules that notice it, of which test_the_bits_are_the_same has only the
    first ones: else it might be these, or how long they take, that is noticed."""
    case, (pattern, instead) = CASES[name], WITHOUT[kind]
    with emulated():
        call, good, texts = prepared(case)
        every, missed, notice = list(mutants(texts, pattern, instead)), [], set()
        may_be = {excused(every, texts, UNSEEN[name, kind])} if (name, kind) in UNSEEN else set()
        assert len(may_be) < len(every), "nothing is left out"
        try:
            for at, (line, kernel, text) in enumerate(every):
                if at in may_be:
                    continue
                library().emulator_ptx(text.encode())
                with at_most(MOST_OF_MUTANTS):
                    seed = next((one for one in range(seeds) if not is_whole(case, call, good, one)), None)
                missed += [line] if seed is None else []
                notice |= {seed} - {None}
                library().emulator_ptx(texts[kernel].encode())
            with at_most(MOST_OF_RIGHT):
                assert [one for one in notice if one >= case.seeds and not is_whole(case, call, good, one)] == []
        finally:
            put_back(texts)
    assert not missed, f"{len(missed)} of {len(every) - len(may_be)}: {missed}"


MADE = """
$L__BB0_1:
	membar.gl;
	// begin inline asm
	ld.acquire.gpu.global.u32 %r7, [%rd1];
	// end inline asm
	shr.u32 	%r8, %r7, 6;
	mov.u64 	%rd18, %clock64;
$L__BB0_2:
	ld.acquire.gpu.global.u32 	%r9, [%rd1+8];
	add.s32 	%r9, %r9, 1;
"""
FIRST_ACQUIRE, SECOND_ACQUIRE = (Unseen("one_", f"{x} >> ld.acquire", "so") for x in ("membar.gl;", "%clock64;"))


def named(texts, unseen):
    """What the excused instruction loads, and from where."""
    every = list(mutants(texts, *WITHOUT["acquire"]))
    line, kernel, _ = every[excused(every, texts, unseen)]
    return texts[kernel].split("\n")[line - 1].split()[1:]


def test_excuses_are_of_what_is_run():
    assert UNSEEN.keys() <= {(name, kind) for name, kind, _ in POWER}


def test_an_excuse_is_of_its_instruction_wherever_that_stands():
    other = MADE.replace("%r9", "%r5")
    edited = "\tld.acquire.gpu.global.u32 %r3, [%rd2];\n\tadd.s32 \t%r4, %r3, %r2;\n" + MADE.replace("%r9", "%r41")
    edited = edited.replace("$L__BB0_2", "$L__BB0_12").replace("%rd18", "%rd77")
    for text, register in ((MADE, "%r9,"), (edited, "%r41,")):
        for texts in ({"one_kernel": text, "z_kernel": other}, {"a_kernel": other, "one_kernel": text}):
            assert named(texts, FIRST_ACQUIRE) == ["%r7,", "[%rd1];"]
            assert named(texts, SECOND_ACQUIRE) == [register, "[%rd1+8];"]


@pytest.mark.parametrize(
    "text", [MADE.replace("ld.acquire", "ld.relaxed", 1), MADE.replace("membar.gl;", ""), MADE + MADE], ids=str.__len__
)
def test_an_excuse_that_is_of_none_or_of_several_is_an_error(text):
    with pytest.raises(AssertionError, match=r"names [02] instructions"):
        named({"one_kernel": text}, FIRST_ACQUIRE)
