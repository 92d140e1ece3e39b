"""What tests rely on in emulated.py: ranks that are threads, and that a failed call leaves nothing to the next one."""

from __future__ import annotations

import ctypes
import math
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from deepseek_v4_sm120.ops.shared import cuda_tensors
from tests.emulator import communicating as calls
from tests.emulator.emulated import EmulatorError, called, card, choose, emulated, library, ptx
from tests.emulator.test_weak_memory import same

REPO = Path(__file__).resolve().parents[2]


def test_a_thread_has_its_own_card():
    """Entered and left by two at the same time, in an order in which a card of all would stay another's."""
    both_in, first_out = threading.Barrier(2), threading.Event()

    def rank(number: int) -> int:
        with card(number):
            both_in.wait(10)
            if number == 2:
                assert first_out.wait(10)
            stream = cuda_tensors.current_stream(0)
        first_out.set()
        return stream

    with emulated():
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(rank, (1, 2))) == [2, 3]
        assert cuda_tensors.current_stream(0) == 1


def test_a_failed_call_leaves_no_words():
    """The compressor's counters stand where they stood when a block ended the kernel."""
    with emulated(multiprocessors=40):
        call = calls.compressed()
        good = [one.clone() for one in call()]
        (name,) = [name for name in ptx() if library().emulator_ran(name.encode())]
        arrives = "atom.acq_rel.gpu.global.add"
        before, after = ptx()[name].split(arrives)
        library().emulator_ptx(f"{before}{arrives}{after.replace(';', '; trap;', 1)}".encode())
        try:
            with pytest.raises(EmulatorError, match="trap"):
                choose(multiprocessors=40, weak=True)
                same(call(), good)
        finally:
            library().emulator_ptx(ptx()[name].encode())
        choose(multiprocessors=40, weak=True)
        assert same(call(), good)


def test_the_emulator_and_the_build_are_two_modules_in_either_order(torch_python):
    """A process that has one must not be given it for the other: pybind11 keeps a module by its name."""
    loads = ["one = emulated.module()", "other = extension.load()"]
    for order in (loads, loads[::-1]):
        code = "from deepseek_v4_sm120.ops.shared import extension; from tests.emulator import emulated; "
        code += "; ".join(order) + "; assert one is not other and one.__file__ != other.__file__, one.__file__"
        subprocess.run([*torch_python(), "-c", code], check=True, cwd=REPO)


ROUNDED = {  # instruction: what it computes, exactly but for sqrt, which is some 2^-90 below
    "add.{mode}.f32 {to}, %f1, %f2;": lambda a, b: a + b,
    "sub.{mode}.f32 {to}, %f1, %f2;": lambda a, b: a - b,
    "mul.{mode}.f32 {to}, %f1, %f2;": lambda a, b: a * b,
    "div.{mode}.f32 {to}, %f1, %f2;": lambda a, b: a / b,
    "fma.{mode}.f32 {to}, %f1, %f2, %f1;": lambda a, b: a * b + a,
    "rcp.{mode}.f32 {to}, %f2;": lambda a, b: 1 / b,
    "sqrt.{mode}.f32 {to}, %f2;": lambda a, b: Fraction(math.isqrt(math.floor(b * 4**100)), 2**100),
}
MODES = ("rn", "rm", "rp", "rz")
ROUNDS = """.visible .entry rounds(.param .u64 given)
{
.reg .pred %p<2>;
.reg .f32 %f<9>;
.reg .b32 %r<9>;
.reg .b64 %rd<9>;
ld.param.u64 %rd1, [given];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd2, %r1, 16;
add.s64 %rd3, %rd1, %rd2;
ld.global.v2.f32 {%f1, %f2}, [%rd3];
setp.lt.u32 %p1, %r1, 40;
@%p1 bra $there;
ret;
$there:
ROUNDED
st.global.v4.f32 [%rd3], {%f3, %f4, %f5, %f6};
ret;
}
"""


def rounded(exact, mode):
    """A number to float32, in the middle between two to the even one, as np.float32 does."""
    near = np.float32(float(exact))
    around = [np.nextafter(near, np.float32(way)) for way in (-np.inf, np.inf)]
    below = max(one for one in (near, *around) if Fraction(float(one)) <= exact)
    above = min(one for one in (near, *around) if Fraction(float(one)) >= exact)
    nearest = min((near, below, above), key=lambda one: abs(Fraction(float(one)) - exact))
    return float({"rn": nearest, "rm": below, "rp": above, "rz": below if exact > 0 else above}[mode])


@pytest.mark.parametrize("instruction", ROUNDED, ids=lambda text: text.split(".")[0])
def test_floats_round_by_their_mode(instruction):
    """In a whole warp, and in one of which eight lanes are left."""
    given = torch.zeros(64, 4)
    given[:, 0], given[:, 1] = 1 + 2.0**-23, 0.7
    given[::2, 0] *= -1
    text = "\n".join(instruction.format(mode=mode, to=f"%f{3 + n}") for n, mode in enumerate(MODES))
    name = f"rounds_{instruction.split('.')[0]}"
    with emulated():
        library().emulator_ptx(ROUNDS.replace("ROUNDED", text).replace("rounds", name).encode())
        out = given.clone()
        sizes = (ctypes.c_uint32 * 5)(1, 1, 1, 64, 0)
        called(library().emulator_launch(name.encode(), sizes, (ctypes.c_uint64 * 1)(out.data_ptr()), 8))
        found = out.tolist()
    a, b = (Fraction(float(one)) for one in given[1, :2])
    expected = [[rounded(ROUNDED[instruction](sign * a, b), mode) for mode in MODES] for sign in (-1, 1)]
    assert len({*expected[0], *expected[1]}) >= 2 and found[:40] == expected * 20
    assert found[40:] == given[40:].tolist()
