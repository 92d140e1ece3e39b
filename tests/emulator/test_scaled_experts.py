"""The experts for many rows with MXFP8 activations, by SM120's block-scaled product of E2M1 and E4M3, which no card of another
architecture has: against the reference and against Triton's form of the same."""

from __future__ import annotations

import math

import pytest
import torch

from deepseek_v4_sm120.ops import mxfp4_moe
from deepseek_v4_sm120.ops.triton import mxfp4_moe as kernels
from deepseek_v4_sm120.reference import mxfp4_moe as reference
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.specs import bounds
from deepseek_v4_sm120.specs import mxfp4_moe as spec
from tests.emulator.emulated import emulated, ran
from tests.emulator.triton_kernels import on_emulator

SCHEDULES = {
    "short turns": {"seed": 1, "most_instructions": 12, "multiprocessors": 3},
    "long turns": {"seed": 2, "most_instructions": 800, "multiprocessors": 8},
}
schedules = pytest.mark.parametrize("choices", SCHEDULES.values(), ids=list(SCHEDULES))


@pytest.fixture(autouse=True)
def many_rows(monkeypatch):
    monkeypatch.setattr(mxfp4_moe, "DECODE_ROWS", 0)


def experts(inputs, choices):
    with emulated(**choices):
        found = mxfp4_moe.mxfp4_moe(**inputs.arguments(), activations="mxfp8")
    assert ran("scaled_kernel")
    return found


def right(inputs):
    return reference.mxfp4_moe(**inputs.arguments(), activations="mxfp8")


@schedules
@pytest.mark.parametrize("up_first", [False, True])
def test_against_the_reference(choices, up_first):
    """Inter of one unit and of two; tiles of all heights, two of an expert among them."""
    shape = spec.Shape(120, 512, 256 if up_first else 128, experts=3, masked=0.1, topk=2, up_first=up_first)
    inputs = spec.make_inputs(shape, seed=3, device="cpu")
    inputs.topk_ids[:70, 0] = 2
    assert relative_error(experts(inputs, choices), right(inputs)) < bounds.MXFP4_MOE_MXFP8_ROUNDED
