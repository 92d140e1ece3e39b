"""Bad input: a clear error that names the argument, what was expected and what came, before any launch. CPU only."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from deepseek_v4_sm120.ops.mxfp4_moe import mxfp4_moe
from deepseek_v4_sm120.reference.mxfp4_moe_inputs import Shape, make_inputs

GOOD = make_inputs(Shape(3, hidden=256, inter=128, experts=4, topk=2), device="cpu")
NAMES = [field.name for field in dataclasses.fields(GOOD) if field.name != "shape"]


def call(**changes):
    return mxfp4_moe(**{**{name: getattr(GOOD, name) for name in NAMES}, **changes})


def test_good_input_gets_as_far_as_the_device():
    with pytest.raises(RuntimeError, match=r"hidden.device must be a CUDA device, got cpu"):
        call()
    with pytest.raises(RuntimeError, match="CUDA"):
        call(w13=GOOD.w13.view(torch.int8), w13_scale=GOOD.w13_scale.view(torch.float8_e8m0fnu))


BAD = {
    "hidden dtype": (
        {"hidden": GOOD.hidden.float()},
        TypeError,
        "hidden.dtype must be torch.bfloat16, got torch.float32",
    ),
    "hidden shape": ({"hidden": GOOD.hidden[0]}, ValueError, r"hidden.shape must be \[rows, hidden\], got \[256\]"),
    "hidden stride": ({"hidden": GOOD.hidden.T.contiguous().T}, ValueError, "hidden's strides must be"),
    "hidden address": (
        {"hidden": torch.zeros(4000, dtype=torch.bfloat16)[1:769].view(3, 256)},
        ValueError,
        "hidden must start on a 16-byte boundary",
    ),
    "w13 dtype": (
        {"w13": GOOD.w13.float()},
        TypeError,
        "w13.dtype must be torch.uint8 or torch.int8, got torch.float32",
    ),
    "w13 shape": ({"w13": GOOD.w13[:, :, :64]}, ValueError, r"w13.shape must be \[4, 256, 128\], got \[4, 256, 64\]"),
    "w13 odd": ({"w13": GOOD.w13[:, :255]}, ValueError, r"w13.shape must be \[experts, 2 \* inter, hidden / 2\]"),
    "w13 transposed": (
        {"w13": GOOD.w13.transpose(1, 2).contiguous().transpose(1, 2)},
        ValueError,
        "w13's strides must be",
    ),
    "scale dtype": (
        {"w2_scale": GOOD.w2_scale.float()},
        TypeError,
        "w2_scale.dtype must be torch.uint8 or torch.float8_e8m0",
    ),
    "scale shape": (
        {"w13_scale": GOOD.w13_scale[:, :, :4]},
        ValueError,
        r"w13_scale.shape must be \[4, 256, 8\], got \[4, 256, 4\]",
    ),
    "w2 shape": ({"w2": GOOD.w2[:2]}, ValueError, r"w2.shape must be \[4, 256, 64\], got \[2, 256, 64\]"),
    "ids dtype": ({"topk_ids": GOOD.topk_ids.long()}, TypeError, "topk_ids.dtype must be torch.int32, got torch.int64"),
    "ids rows": ({"topk_ids": GOOD.topk_ids[:2]}, ValueError, r"topk_ids.shape must be \[3, topk\], got \[2, 2\]"),
    "ids stride": (
        {"topk_ids": GOOD.topk_ids.T.contiguous().T},
        ValueError,
        r"topk_ids.stride\(1\) must be 1, got 3",
    ),
    "weights dtype": (
        {"topk_weights": GOOD.topk_weights.half()},
        TypeError,
        "topk_weights.dtype must be torch.float32",
    ),
    "weights shape": (
        {"topk_weights": GOOD.topk_weights[:, :1]},
        ValueError,
        r"topk_weights.shape must be \[3, 2\], got \[3, 1\]",
    ),
    "map dtype": ({"expert_map": torch.zeros(4)}, TypeError, "expert_map.dtype must be torch.int32, got torch.float32"),
    "map shape": ({"expert_map": torch.zeros(0, dtype=torch.int32)}, ValueError, r"expert_map.shape must be \[ids\]"),
    "activations": ({"activations": "fp4"}, ValueError, "activations must be one of bf16, mxfp8, got 'fp4'"),
    "out dtype": ({"out": torch.zeros(3, 256)}, TypeError, "out.dtype must be torch.bfloat16"),
    "out shape": (
        {"out": torch.zeros(2, 256, dtype=torch.bfloat16)},
        ValueError,
        r"out.shape must be hidden's, \[3, 256\], got \[2, 256\]",
    ),
    "out is hidden": ({"out": GOOD.hidden}, ValueError, "out must not overlap hidden"),
    "out overlaps itself": (
        {"out": torch.zeros(256, dtype=torch.bfloat16).expand(3, 256)},
        ValueError,
        "out's rows must not overlap",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    changes, error, words = BAD[name]
    with pytest.raises(error, match=words) as caught:
        call(**changes)
    assert str(caught.value).startswith("mxfp4_moe: ")
