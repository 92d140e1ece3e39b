"""The experts' grouped GEMMs as Triton compiles them for sm_120a, run on the emulator against the reference."""

from __future__ import annotations

import pytest

from deepseek_v4_sm120.ops import mxfp4_moe
from deepseek_v4_sm120.ops.triton import mxfp4_moe as kernels
from deepseek_v4_sm120.reference import mxfp4_moe as reference
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.specs import bounds
from deepseek_v4_sm120.specs import mxfp4_moe as spec
from tests.emulator.emulated import emulated
from tests.emulator.triton_kernels import _loaded, on_emulator


@pytest.fixture(scope="module")
def inputs():
    return spec.make_inputs(spec.Shape(40, hidden=256, inter=256, experts=3, masked=0.1, topk=2), seed=5, device="cpu")


def test_w4a16(inputs, monkeypatch):
    monkeypatch.setattr(mxfp4_moe, "DECODE_ROWS", 0)
    with emulated(seed=5, multiprocessors=4, most_instructions=100), on_emulator(kernels):
        found = mxfp4_moe.mxfp4_moe(**inputs.arguments(), wide=False)
    assert relative_error(found, reference.mxfp4_moe(**inputs.arguments())) < bounds.MXFP4_MOE.truth
    ptx = "".join(made.asm["ptx"] for key, (_, made) in _loaded.items() if key[0] == "_gate_up_kernel")
    assert "e2m1" in ptx or "bf16.bf16.f32" in ptx
