"""The experts' grouped GEMMs as Triton compiles them for sm_120a, the block-scaled product of SM120 among them, run on
the emulator against the reference: what no card of another architecture can run."""

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


def error(inputs, against: str, activations: str, monkeypatch) -> float:
    monkeypatch.setattr(mxfp4_moe, "DECODE_ROWS", 0)
    with emulated(seed=5, multiprocessors=4, most_instructions=100), on_emulator(kernels):
        found = mxfp4_moe.mxfp4_moe(**inputs.arguments(), activations=activations, wide=False)
    return relative_error(found, reference.mxfp4_moe(**inputs.arguments(), activations=against))


def text_of(name: str) -> str:
    return "".join(made.asm["ptx"] for key, (_, made) in _loaded.items() if key[0] == name)


def test_w4a16(inputs, monkeypatch):
    assert error(inputs, "bf16", "bf16", monkeypatch) < bounds.MXFP4_MOE.truth
    assert "e2m1" in text_of("_gate_up_kernel") or "bf16.bf16.f32" in text_of("_gate_up_kernel")


def test_w4a8_block_scaled(inputs, monkeypatch):
    """Against a reference whose activations are rounded alike; and, far looser, against the truth."""
    assert error(inputs, "mxfp8", "mxfp8", monkeypatch) < bounds.MXFP4_MOE_MXFP8_ROUNDED
    assert 0.01 < error(inputs, "bf16", "mxfp8", monkeypatch) < 0.06
    for name in ("_gate_up_kernel", "_down_kernel"):
        assert "kind::mxf8f6f4.block_scale" in text_of(name)
