"""Every form that the emulator knows is asked for by a test, kernels have no other ones, and an instruction that is
only near one of them is refused by its own text; so are blocks of more threads than a card takes."""

from __future__ import annotations

import ctypes
import itertools
import re

import numpy as np
import pytest

from tests.emulator.emulated import emulated, library, ptx, run
from tests.emulator.test_forms import HEAD, KINDS, forms, of_registers, refused

# the beginning of a name -> where else it is asked for
ELSEWHERE = {
    **{name: "test_moves_of_pieces" for name in ("mov.b32 {", "mov.b32 r{", "mov.b64 {", "mov.b64 d{")},
    "lop3": "test_every_table_of_lop3",
    **{name: "test_loads_stores_and_atomics" for name in KINDS},
    **{name: "test_forms_of_warps.py: test_shuffles" for name in ("shfl",)},
    **{
        name: "test_forms_of_warps.py: test_what_a_warp_says_and_sums"
        for name in ("vote", "match", "redux", "elect", "activemask")
    },
    **{name: "test_forms_of_warps.py: test_matrices" for name in ("ldmatrix", "stmatrix")},
    "mma": "test_forms_of_warps.py: test_products",
    "cp.async": "test_forms_of_warps.py: test_asynchronous_copies, test_copies_in_bulk_and_mbarriers",
    "mbarrier": "test_forms_of_warps.py: test_copies_in_bulk_and_mbarriers",
    "bar.red": "test_forms_of_warps.py: test_barriers_that_say",
    "bar.arrive": "test_forms_of_warps.py: test_who_arrives_at_a_barrier",
    **{name: "test_watch.py, test_power.py: what they put in order" for name in ("bar.sync", "bar.warp.sync")},
    **{name: "test_litmus.py" for name in ("membar", "fence.acq_rel", "fence.sc")},
    **{
        name: "test_forms_of_warps.py: test_what_changes_no_number"
        for name in ("setmaxnreg", "prefetch", "nanosleep", "fence.")
    },
    "griddepcontrol": "test_weak_memory.py, test_power.py: waits that are left out",
    "clock": "communicating.py: given_up waits by it",
    **{name: "every program here" for name in ("bra", "ret", "exit", "trap")},
}


def test_each_form_is_asked_for_somewhere():
    every = {(name, shape) for name, shapes in forms().items() for shape in shapes}
    left = [f"{name} {shape}" for name, shape in every - {*of_registers()}]
    assert [form for form in left if not any(form.startswith(name) for name in ELSEWHERE)] == []
    assert [name for name in ELSEWHERE if not any(form.startswith(name) for form in left)] == []


def test_kernels_have_no_other_instructions():
    """Those too of kernels that no test here runs."""
    used = set()
    for text in ptx().values():
        used |= set(
            re.findall(r"^\s*(?:\{\s*)?(?:@!?%p\d+\s+)?([a-z]\w*(?:\.[\w:]+)*)\s*(?=[\s;])", text, re.MULTILINE)
        )
    clocks = {"mov.u32", "mov.u64"}
    assert len(used) > 250
    assert {name for name in used if name not in forms()} - clocks == set()


# what each was taken for before there was a table; None: it was refused then, too
NEAR = {
    "add.sat.s32 %r0, %r1, %r2": "add",
    "sub.sat.s32 %r0, %r1, %r2": "sub",
    "mad.hi.sat.s32 %r0, %r1, %r2, %r3": "mad.hi",
    "add.cc.u32 %r0, %r1, %r2": "add",
    "min.relu.s32 %r0, %r1, %r2": "min",
    "shf.l.clamp.b32.foo %r0, %r1, %r2, %r3": "shf",
    "prmt.b32.f4e %r0, %r1, %r2, %r3": "prmt",
    "max.xorsign.abs.f32 %r0, %r1, %r2": "max",
    "setp.lt.ftz.f32 %p0, %r1, %r2": "setp.lt",
    "add.ftz.f16x2 %r0, %r1, %r2": "add",
    "fma.rn.relu.bf16x2 %r0, %r1, %r2, %r3": "fma, rounded twice",
    "fma.rn.f16x2 %r0, %r1, %r2, %r3": "fma, rounded twice",
    "mul.rn.sat.f16x2 %r0, %r1, %r2": "mul",
    "fma.rz.f32x2 %d0, %d1, %d2, %d3": "fma.rn",
    "add.rn.ftz.f32x2 %d0, %d1, %d2": "add.rn",
    "sin.approx.f32 %r0, %r1": "the sine, rounded",
    "cvt.rz.bf16.f32 %h0, %r1": "cvt.rn",
    "cvt.rn.relu.bf16x2.f32 %r0, %r1, %r2": "cvt.rn",
    "cvt.rn.satfinite.relu.e4m3x2.f32 %h0, %r1, %r2": "cvt without relu",
    "cvt.rn.satfinite.e5m2x2.f32 %h0, %r1, %r2": "a move",
    "cvt.rni.f32.f32 %r0, %r1": "a move",
    "cvt.rz.f32.s32 %r0, %r1": "cvt.rn",
    "cvt.sat.u8.s32 %r0, %r1": "its lowest bits",
    "cvt.rzi.ftz.s32.f32 %r0, %r1": "cvt.rzi",
    "ld.global.b128 %d0, [%d60]": "eight of the bytes",
    "ld.local.u32 %r0, [%d60]": "ld.global",
    "ld.const.u32 %r0, [%d60]": "ld.global",
    "ld.shared::cluster.u32 %r0, [%r1]": "ld.global",
    "ld.volatile.global.u32 %r0, [%d60]": "ld.relaxed",
    "ld.acquire.cta.global.u32 %r0, [%d60]": "ld",
    "ld.relaxed.cluster.global.u32 %r0, [%d60]": "ld.relaxed.gpu",
    "ld.global.L2::cache_hint.u32 %r0, [%d60], %d1": "a load of two",
    "ld.global.v8.f32 {%r0, %r1, %r2, %r3, %r4, %r5, %r6, %r7}, [%d60]": None,
    "ld.shared.v4.u64 {%d0, %d1, %d2, %d3}, [%r1]": "a load of 32 bytes, which shared memory has not",
    "st.async.shared::cluster.u32 [%r0], %r1": "st.global",
    "st.release.cta.global.u32 [%d60], %r1": "st",
    "red.release.cluster.gpu.global.add.u32 [%d60], %r1": "red.release.gpu",
    "red.release.cta.global.add.u32 [%d60], %r1": "red",
    "atom.cta.global.add.u32 %r0, [%d60], %r1": "atom.gpu",
    "atom.global.add.noftz.f16x2 %r0, [%d60], %r1": "integers' sum",
    "atom.global.add.f64 %d0, [%d60], %d1": "integers' sum",
    "atom.global.exch.b128 %d0, [%d60], %d1": "an exchange of four bytes",
    "cp.async.cg.shared.global.L2::cache_hint [%r0], [%d60], 16, %d1": "so many bytes as the policy is",
    "cp.async.ca.shared.global [%r0], [%d60], 4, %p1": "so many bytes as the predicate's word is",
    "cp.async.mbarrier.arrive.shared.b64 [%r0]": "the one with .noinc",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r0], [%d60], 16, [%r1], "
    "%h1": "a copy to one",
    "fence.acq_rel.cluster": "fence.acq_rel.gpu",
    "fence.acquire.gpu": "fence.acq_rel.gpu",
    "fence.proxy.alias": "nothing",
    "discard.global.L2 [%d60], 128": "nothing",
    "createpolicy.fractional.L2::evict_last.b64 %d0, 0f3F800000": "nothing",
    "match.any.sync.b64 %r0, %d1, 0xffffffff": "its lower half",
    "redux.sync.max.f32 %r0, %r1, 0xffffffff": "integers' maximum",
    "shfl.sync.near.b32 %r0, %r1, %r2, %r3, 0xffffffff": "shfl.sync.idx",
    "mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [%r0]": "one that releases",
    "mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 %p0, [%r0], 0": "one that acquires",
    "mma.sp.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32 {%r0, %r1, %r2, %r3}, {%r4, %r5, %r6, %r7}, {%r8, %r9}, "
    "{%r10, %r11, %r12, %r13}": "a dense one",
    "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32 {%r0, %r1, %r2, %r3}, {%r4, %r5, %r6, %r7}, {%r8, %r9}, "
    "{%r10, %r11, %r12, %r13}": "one of E4M3",
    "bar.sync 0, 64, 1": "bar.sync 0, 64",
    "barrier.sync 0": "bar.sync, of whole warps",
    "mov.u32 %r0, %clock_hi": "%clock",
    "mov.b32 %r0, 0b101x": "0",
    "mov.u32 %r0, 12ab": "12",
    "mov.u32 %r0, 0x1ffffffff": "its lower half",
    "add.s32 %r0, !%r1, %r2": "add of %r1",
    "setp.eq.s32 !%p0, %r1, %r2": "setp of %p0",
    "add.s32 %r0, %r1": "whatever was behind it",
    "add.s32 %r0, %p1, %r2": "a word of predicates",
    "add.s64 %d0, %r1, %d2": None,
    "popc.b64 %r0, %r1": "its neighbours, too",
}


def test_what_is_near_is_refused():
    """By its own text."""
    with emulated():
        taken = {text: refused(f"{text};") for text in NEAR}
        assert (
            refused("@!%p1 add.s32 %r0, %r1, -1;\nmov.b32 %r0, 0b101;\nvote.sync.any.pred %p0, !%p1, 0xffffffff;") == ""
        )
    assert [text for text, error in taken.items() if not error] == []
    named = [text for text, error in taken.items() if text not in error]
    assert [
        text
        for text in named
        if not any(what in taken[text] for what in ("12ab", "0b101x", "0x1ffffffff", "%clock_hi"))
    ] == []


MODIFIERS = (
    "sat",
    "ftz",
    "relu",
    "approx",
    "noftz",
    "NaN",
    "volatile",
    "cluster",
    "cta",
    "L2::cache_hint",
    "rz",
    "v8",
    "x2",
    "wide",
)


def operands(name: str, shape: str) -> str:
    """Such as a form's shape in forms.cpp asks for."""
    kind, count = name.split(".")[-1], itertools.count()
    wide = {"a": "r", "x": "d" if kind.endswith("64") or kind == "f32x2" else "r"}
    wide["y"] = "d" if kind in ("u32", "s32") else "r"

    def one(asked: str) -> str:
        asked = wide.get(asked, asked)
        return "_" if asked == "_" else "[%d1]" if asked == "m" else f"%{asked}{next(count) % 4}"

    def group(text: str) -> str:
        if text.startswith("{"):
            return f"{{{', '.join(map(one, text[1:-1]))}}}"
        return "|".join(map(one, text.split("|")))

    return ", ".join(map(group, re.findall(r"\{.*?\}|.(?:\|.)?", shape)))


def test_a_modifier_more_is_refused_or_known():
    """At each place of each form's name; what is known then is another one of them, asked for as such. With operands
    with which the form by itself is known."""
    known, tried = forms(), 0
    with emulated():
        for name in [name for name in known if name.split(".")[0] != "bra"][::7]:
            given = operands(name, known[name][0])
            words, error = name.split("."), refused(f"{name} {given};")
            assert error == "", error
            for at in range(1, len(words) + 1):
                other = ".".join([*words[:at], MODIFIERS[(tried := tried + 1) % len(MODIFIERS)], *words[at:]])
                if other not in known:
                    assert other in refused(f"{other} {given};"), other
    assert tried > 1000


LIMITS = [
    ("", 1024, ""),
    ("", 1025, "a block of 1025 threads"),
    (".maxntid 32, 4", 128, ""),
    (".maxntid 32, 4", 129, "a block of 129 threads"),
    (".maxntid 2048", 1025, "a block of 1025 threads"),
    (".reqntid 64", 64, ""),
    (".reqntid 64", 32, "and no other number"),
    (".reqnctapercluster 2", 32, "a directive that is not known"),
]


@pytest.mark.parametrize("limits, threads, error", LIMITS)
def test_blocks_of_more_threads_than_there_may_be_are_refused(limits, threads, error):
    """A block has at most 32 warps, which are bits of a word; all of the largest one run."""
    memory = np.zeros(1024, np.uint32)
    text = (
        HEAD.replace(")\n", f")\n{limits}\n", 1)
        + "mad.wide.u32 %d61, %r60, 4, %d60;\nst.global.u32 [%d61], 1;\nret;\n}\n"
    )
    with emulated():
        library().emulator_ptx(text.encode())
        library().emulator_allow(memory.ctypes.data, memory.nbytes)
        sizes = (ctypes.c_uint32 * 5)(1, 1, 1, threads, 0)
        failed = library().emulator_launch(b"form", sizes, (ctypes.c_uint64 * 1)(memory.ctypes.data), 8)
        assert bool(failed) == bool(error) and error in library().emulator_error().decode()
        run()
    assert memory.sum() == (0 if error else threads)
