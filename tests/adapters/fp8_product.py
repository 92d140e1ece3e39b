"""ops.fp8_linear for tests of its adapter without a GPU: the operator's own checks, then the reference."""

from __future__ import annotations

from collections.abc import Callable

import torch

from deepseek_v4_sm120.ops import fp8_linear as op
from deepseek_v4_sm120.reference import fp8_linear as reference


def checked_product(log: list) -> Callable:
    """A function in fp8_linear's place, which notes in `log` what it was asked to make of x."""

    def product(x, weight, scale, *, swiglu_limit=None, norm_weight=None, norm_eps=None):
        check = op.check_product("fp8_linear", x, "rows, inputs", weight, scale, 2 if swiglu_limit else 1)
        op._check_prologue(check, x, swiglu_limit, norm_weight, norm_eps)
        log.append("gated" if swiglu_limit else "normalised" if norm_weight is not None else "plain")
        if swiglu_limit:
            x = reference.gated(x, swiglu_limit)
        elif norm_weight is not None:
            x = reference.normalized(x, norm_weight, norm_eps)
        return reference.fp8_linear(x, weight, scale).to(torch.bfloat16)

    return product


def made_before(log: list) -> Callable:
    """A function in normalized's place, which notes its call in `log`."""

    def normalized(x, norm_weight, norm_eps):
        log.append("made before")
        return reference.normalized(x, norm_weight, norm_eps)

    return normalized
