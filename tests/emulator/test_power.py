"""What the emulator notices: kernels of which one wait is left out give other bits, or end in an error, under one of a
few schedules. Where that is not so the test says which waits, and why nothing can be seen."""

from __future__ import annotations

import re

import pytest
import torch

from deepseek_v4_sm120.ops import bf16_linear, fp8_linear, mhc
from deepseek_v4_sm120.ops import compressor as compressor_op
from deepseek_v4_sm120.specs import compressor
from deepseek_v4_sm120.specs import fp8_linear as fp8_spec
from deepseek_v4_sm120.specs import mhc as mhc_spec
from tests.emulator.emulated import (
    MOST_OF_MUTANTS,
    MOST_OF_RIGHT,
    EmulatorError,
    at_most,
    choose,
    emulated,
    library,
    ptx,
)

SCHEDULES = 12
BARRIER = r"^\s*(?:@%p\d+ )?bar\.sync[^;]*;"
FRONT = r"griddepcontrol\.wait;"


def bf16():
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(n, 1024, generator=generator).bfloat16() for n in (9, 32))
    return lambda: [bf16_linear.bf16_linear(x, weight)]


def fp8():
    weight, scale = fp8_spec.make_weight(1, 128, 1024, torch.Generator().manual_seed(2))
    x = fp8_spec.make_x(3, 1, 1024, torch.Generator().manual_seed(3))
    return lambda: [fp8_linear.fp8_linear(x[:, 0], weight[0], scale[0])]


def boundary(kernels: str, twice: bool = False):
    inputs = mhc_spec.make_inputs(mhc_spec.Shape(2), seed=4, device="cpu").boundary()

    def call():
        first = mhc.mhc(**inputs, kernels=kernels)
        if not twice:
            return list(first)
        streams, post, comb, y = first  # a layer behind a layer
        return list(mhc.mhc(**inputs | {"streams": streams, "post": post, "comb": comb, "f": y}, kernels=kernels))

    return call


def compressed():
    made = compressor.make_inputs("c128", (128, 256, 640), seed=6, device="cpu")

    def call():
        given = made.copy()
        compressor_op.compressor(**given.arguments())
        return [given.cache, given.state]

    return call


def mutants(texts: dict[str, str], wait: str, instead: str = " "):
    """(line, name of the kernel, its text with `instead` in place of one wait) of each wait in the kernels' texts."""
    for name, text in texts.items():
        for found in re.finditer(wait, text, re.MULTILINE):
            line = text.count("\n", 0, found.start() + 1) + 1
            yield line, name, f"{text[: found.start()]}{found.expand(instead)}{text[found.end() :]}"


def seen(call, good, seed: int) -> bool:
    try:
        choose(
            seed=seed,
            multiprocessors=(2, 8, 40)[seed % 3] if seed else 8,
            most_instructions=(300, 12, 3000)[seed // 3 % 3],
        )
        return not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(call(), good, strict=True))
    except EmulatorError:
        return True


# (what is called, kernels, which waits, how many of them may go unseen: those before memory is written again, which at
# these sizes is the last time it is read)
CASES = {
    "bf16_linear": (bf16, "bf16_linear_kernel", BARRIER, 0),
    "fp8_linear": (fp8, "fp8_linear.*kernel", BARRIER, 2),
    "compressor": (compressed, "compressor.*long_kernel", BARRIER, 1),
    "mhc, two launches": (lambda: boundary("split"), "mhc.*(mix|finish)_kernel", BARRIER, 0),
    "mhc, one launch": (lambda: boundary("fused"), "mhc.*fused_kernel", BARRIER, 1),
    "mhc, the kernel in front": (lambda: boundary("split", twice=True), "mhc.*(mix|finish)_kernel", FRONT, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_a_wait_that_is_left_out_is_noticed(case):
    make, part, wait, most_unseen = CASES[case]
    with emulated(seed=0, multiprocessors=40):
        call = make()
        good = [one.clone() for one in call()]
        launches = library().emulator_ran
        ran = {name: text for name, text in ptx().items() if re.search(part, name) and launches(name.encode())}
        with at_most(MOST_OF_RIGHT):
            assert not any(seen(call, good, seed) for seed in range(SCHEDULES)), "what is whole differs"
        found, unseen = 0, []
        for line, name, text in mutants(ran, wait):
            library().emulator_ptx(text.encode())
            try:
                found += 1
                with at_most(MOST_OF_MUTANTS):
                    if not any(seen(call, good, seed) for seed in range(SCHEDULES)):
                        unseen.append(line)
            finally:
                choose()
                library().emulator_ptx(ran[name].encode())
    assert found and len(unseen) <= most_unseen, f"{len(unseen)} of {found}: {unseen}"
