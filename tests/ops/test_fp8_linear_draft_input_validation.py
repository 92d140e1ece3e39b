"""What draft_input refuses, and what it is asked before. CPU only."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from deepseek_v4_sm120.ops import fp8_linear_draft_input as op
from deepseek_v4_sm120.ops.shared import extension
from deepseek_v4_sm120.specs.fp8_linear import make_draft_input

ROWS, INPUTS, ENTRIES = 3, 512, 7


def made(by_ids=True):
    return make_draft_input(ROWS, 256, INPUTS, torch.Generator().manual_seed(1), entries=ENTRIES if by_ids else None)


def with_half(name, value):
    def changed(arguments):
        arguments[2:] = [arguments[2], dataclasses.replace(arguments[3], **{name: value(arguments[3])})]

    return changed


def with_argument(place, value):
    def changed(arguments):
        arguments[place] = value(arguments[place])

    return changed


BAD = {
    "hidden in float32": (with_argument(0, lambda x: x.float()), TypeError, "hidden.dtype must be torch.bfloat16"),
    "rows alone": (with_argument(0, lambda x: x[:, 0]), ValueError, r"hidden.shape must be \[rows, streams, inputs\]"),
    "gaps": (with_argument(0, lambda x: x.repeat(1, 2, 1)[:, ::2]), ValueError, "hidden must be contiguous"),
    "a part": (with_argument(0, lambda x: x[..., :128].clone()), ValueError, r"hidden.shape\[2\] must be a positive"),
    "wide": (with_argument(0, lambda x: x.repeat(1, 1, 17)), ValueError, r"hidden.shape\[2\] must be at most 8192"),
    "a table of others": (with_argument(1, lambda x: x[:, :256]), ValueError, "embedded.shape must be .entries, 512."),
    "an odd table": (with_argument(1, lambda x: x.repeat(1, 2)[:, 1:513]), ValueError, "embedded must start on"),
    "a norm in float32": (with_half("norm", lambda h: h.norm.float()), TypeError, "of_embedded.norm.dtype must be"),
    "a short norm": (with_half("norm", lambda h: h.norm[:256]), ValueError, r"of_embedded.norm.shape must be \[512\]"),
    "eps": (with_half("eps", lambda h: -1e-6), ValueError, "of_embedded.eps must be 0 or more, got -1e-06"),
    "no eps": (with_half("eps", lambda h: math.nan), ValueError, "of_embedded.eps must be 0 or more, got nan"),
    "bf16 weights": (with_half("weight", lambda h: h.weight.bfloat16()), TypeError, "weight.dtype must be"),
    "other outputs": (
        lambda arguments: [
            with_half("weight", lambda h: h.weight[:128])(arguments),
            with_half("weight_scale", lambda h: h.weight_scale[:1])(arguments),
        ],
        ValueError,
        r"of_embedded.weight.shape\[0\] must be of_hidden's, 256, got 128",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_refused(what):
    arguments, by = made()
    arguments, (change, raised, words) = list(arguments), BAD[what]
    change(arguments)
    with pytest.raises(raised, match=f"^draft_input: {words}"):
        op.draft_input(*arguments, **by)
    if not what.endswith(("table", "others")):
        assert not op.takes(arguments[0], *arguments[2:]) or what in ("eps", "no eps")


@pytest.mark.parametrize(
    "ids, raised", [(torch.zeros(ROWS), TypeError), (torch.zeros(ROWS + 1).long(), ValueError)], ids=["float", "more"]
)
def test_ids_are_of_the_rows(ids, raised):
    with pytest.raises(raised, match="^draft_input: ids"):
        op.draft_input(*made()[0], ids=ids)
    with pytest.raises(ValueError, match=r"^draft_input: embedded.shape must be \[3, 512\], got \[7, 512\]"):
        op.draft_input(*made()[0])


def test_what_it_takes_only_lacks_a_card():
    for by_ids in (True, False):
        arguments, by = made(by_ids)
        assert op.takes(arguments[0], *arguments[2:])
        with pytest.raises(RuntimeError, match="^draft_input: hidden.device must be a CUDA device"):
            op.draft_input(*arguments, **by)


def test_sizes_are_the_kernels():
    kernels = extension.load()
    assert (op.NORM_STEP, op.MOST_INPUTS) == (
        kernels.FP8_LINEAR_DRAFT_NORM_STEP,
        kernels.FP8_LINEAR_DRAFT_MOST_INPUTS,
    )


@pytest.mark.parametrize("sms, tokens", [(188, range(1, 17)), (132, range(1, 17)), (48, ())])
def test_products_are_made_in_parts_only_where_both_have_as_many(sms, tokens, monkeypatch):
    """Of up to 16 tokens of four streams; on a GB10, of 48 multiprocessors, never."""
    monkeypatch.setattr(op.linear.cuda_tensors, "num_sms", lambda index: sms)
    found = {count: op._parts(count, 4, (4096, 4096), 0) for count in (*range(1, 70), 1000)}
    assert found == dict.fromkeys(found, 1) | dict.fromkeys(tokens, 4)
