"""ops.fp8_linear: every bad argument gets an error that names it, before any launch. On the CPU good ones end at the
device."""

from __future__ import annotations

import pytest
import torch

from deepseek_v4_sm120.ops.fp8_linear import fp8_grouped_linear, fp8_linear, gated, normalized, takes


def arguments(rows=3, outputs=256, inputs=384):
    return {
        "x": torch.zeros(rows, inputs, dtype=torch.bfloat16),
        "weight": torch.zeros(outputs, inputs, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "weight_scale": torch.ones(outputs // 128, inputs // 128),
    }


def grouped(rows=3, groups=2, outputs=256, inputs=384):
    return {
        "x": torch.zeros(rows, groups, inputs, dtype=torch.bfloat16),
        "weight": torch.zeros(groups, outputs, inputs, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "weight_scale": torch.ones(groups, outputs // 128, inputs // 128),
    }


def out(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


BAD = {
    "x.dtype must be torch.bfloat16, got torch.float32": (TypeError, {"x": torch.zeros(3, 384)}),
    "x.shape must be [rows, inputs], got [3, 1, 384]": (ValueError, {"x": out(3, 1, 384)}),
    "x's strides must be [a multiple of 8, 1], got [1, 3]": (ValueError, {"x": out(384, 3).T}),
    "x must start on a 16-byte boundary": (ValueError, {"x": out(3, 392)[:, 4:388]}),
    "weight.dtype must be torch.float8_e4m3fn": (TypeError, {"weight": torch.zeros(256, 384, dtype=torch.uint8)}),
    "weight.shape must be [outputs, 384], got [256, 256]": (ValueError, arguments(inputs=256) | {"x": out(3, 384)}),
    "multiples of 128, got 200 and 384": (
        ValueError,
        {"weight": torch.zeros(200, 384, dtype=torch.uint8).view(torch.float8_e4m3fn)},
    ),
    "weight_scale.dtype must be": (TypeError, {"weight_scale": torch.ones(2, 3, dtype=torch.int32)}),
    "weight_scale.shape must be [2, 3], got [3, 2]": (ValueError, {"weight_scale": torch.ones(3, 2)}),
    "out.dtype must be": (TypeError, {"out": out(3, 256, dtype=torch.float32)}),
    "out.shape must be [3, 256], got [3, 128]": (ValueError, {"out": out(3, 128)}),
    "out's strides must be": (ValueError, {"out": out(3, 258)[:, :256]}),
    "out's elements must not overlap": (ValueError, {"out": out(1, 256).expand(3, 256)}),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_arguments(words):
    error, changes = BAD[words]
    with pytest.raises(error) as caught:
        fp8_linear(**{**arguments(), **changes})
    assert words in str(caught.value) and str(caught.value).startswith("fp8_linear: ")


def gates_and_ups(**more):
    return {"x": out(3, 768), "swiglu_limit": 10.0, **more}


def unnormalized(**more):
    return {"norm_weight": out(384), "norm_eps": 1e-6, **more}


BAD_PROLOGUES = {
    "x must have gates and as many ups with swiglu_limit, got 385 of both": (ValueError, gates_and_ups(x=out(1, 385))),
    "weight.shape must be [outputs, 192], got [256, 384]": (ValueError, gates_and_ups(x=out(3, 384))),
    "swiglu_limit must be positive and finite in bf16, got 0": (ValueError, gates_and_ups(swiglu_limit=0)),
    "swiglu_limit must be positive and finite in bf16, got nan": (ValueError, gates_and_ups(swiglu_limit=float("nan"))),
    "swiglu_limit must be positive and finite in bf16, got 3.4e+38": (ValueError, gates_and_ups(swiglu_limit=3.4e38)),
    "norm_weight and norm_eps must be given together": (ValueError, {"norm_eps": 1e-6}),
    "swiglu_limit and norm_weight must not be given together": (ValueError, gates_and_ups(**unnormalized())),
    "norm_weight.dtype must be torch.bfloat16": (TypeError, unnormalized(norm_weight=torch.zeros(384))),
    "norm_weight must be contiguous [384], got [256] with strides [1]": (
        ValueError,
        unnormalized(norm_weight=out(256)),
    ),
    "norm_weight must be contiguous [384], got [384] with": (ValueError, unnormalized(norm_weight=out(768)[::2])),
    "norm_weight must start on a 16-byte boundary": (ValueError, unnormalized(norm_weight=out(385)[1:])),
    "norm_eps must be positive, got 0.0": (ValueError, unnormalized(norm_eps=0.0)),
}


@pytest.mark.parametrize("words", BAD_PROLOGUES)
def test_bad_prologues(words):
    error, changes = BAD_PROLOGUES[words]
    with pytest.raises(error) as caught:
        fp8_linear(**{**arguments(), **changes})
    assert words in str(caught.value) and str(caught.value).startswith("fp8_linear: ")


def test_bad_arguments_of_what_goes_before():
    for bad, words in (
        (lambda: gated(out(3, 768).float(), 10.0), "gated: x.dtype must be torch.bfloat16"),
        (lambda: gated(out(3, 768), -1.0), "gated: swiglu_limit must be positive"),
        (lambda: gated(out(3, 24), 1.0), "gated: x must have gates and ups, each a multiple of 8, got 24 of both"),
        (lambda: normalized(out(3, 384), out(256), 1e-6), "normalized: norm_weight must be contiguous"),
        (lambda: normalized(out(3, 388), out(388), 1e-6), "normalized: x's strides must be"),
        (lambda: normalized(out(1, 388), out(388), 1e-6), "normalized: inputs must be a multiple of 8, got 388"),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            bad()
        assert words in str(caught.value)


def test_out_over_x():
    memory = out(3, 384)
    good = arguments(outputs=384)
    with pytest.raises(ValueError, match="out must not overlap x"):
        fp8_linear(**{**good, "x": memory, "out": memory})


def test_groups_must_follow_each_other():
    good = grouped()
    with pytest.raises(ValueError, match="weight's groups must follow each other"):
        fp8_grouped_linear(**{**good, "weight": grouped(groups=4)["weight"][::2]})
    with pytest.raises(ValueError, match="weight_scale's groups must follow each other"):
        fp8_grouped_linear(**{**good, "weight_scale": grouped(groups=4)["weight_scale"][::2]})
    with pytest.raises(ValueError, match=r"weight.shape must be \[2, outputs, 384\], got \[4, 256, 384\]"):
        fp8_grouped_linear(**{**good, "weight": grouped(groups=4)["weight"]})


def test_good_arguments_end_at_the_device():
    for run, good in ((fp8_linear, arguments()), (fp8_grouped_linear, grouped())):
        with pytest.raises(RuntimeError, match="x.device must be a CUDA device, got cpu"):
            run(**good)
    for good in (gates_and_ups(), unnormalized()):
        with pytest.raises(RuntimeError, match="x.device must be a CUDA device, got cpu"):
            fp8_linear(**{**arguments(), **good})
    for run, good in ((gated, (out(3, 768), 10.0)), (normalized, (out(3, 384), out(384), 1e-6))):
        with pytest.raises(RuntimeError, match="x.device must be a CUDA device, got cpu"):
            run(*good)
    for run, good in ((fp8_linear, arguments()), (fp8_grouped_linear, grouped())):
        with pytest.raises(RuntimeError, match="x.device must be a CUDA device, got cpu"):
            run(**{**good, "weight_scale": good["weight_scale"].to(torch.float8_e8m0fnu)})


def test_takes_says_what_the_operator_would():
    good = arguments()
    weight, scale = good["weight"], good["weight_scale"]
    assert (
        takes(weight, scale) and takes(weight, scale.T.contiguous().T) and takes(weight, scale.to(torch.float8_e8m0fnu))
    )
    assert takes(grouped()["weight"], grouped()["weight_scale"])
    refused = {
        "bf16": (weight.to(torch.bfloat16), scale),
        "packed scales": (weight, torch.ones(256, 1, dtype=torch.int32)),
        "blocks of 64": (weight, torch.ones(4, 6)),
        "row scales": (weight, torch.ones(256, 1)),
        "an odd stride": (torch.zeros(256, 392, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, :384], scale),
        "transposed": (torch.zeros(384, 256, dtype=torch.uint8).view(torch.float8_e4m3fn).T, scale),
        "odd sizes": (weight[:200], scale),
        "groups apart": (grouped(groups=4)["weight"][::2], grouped()["weight_scale"]),
    }
    assert [name for name, (w, s) in refused.items() if takes(w, s)] == []
