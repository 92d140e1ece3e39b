"""Self-test of mxfp4_moe."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from deepseek_v4_sm120.selftest.check import ON_GPU, Check, Failure


def checks(quick: bool) -> Iterator[Check]:
    yield Check("mxfp4_moe", "two references", _check_two_expert_references, ("torch",))
    for rows in (1, 8, 64) if quick else (1, 8, 64, 256, 1000):
        run = functools.partial(_check_mxfp4_moe, rows, "bf16")
        yield Check("mxfp4_moe", f"{rows} rows", run, (*ON_GPU, "triton") if rows > 256 else ON_GPU)
    if not quick:
        run = functools.partial(_check_mxfp4_moe, 1000, "mxfp8")
        yield Check("mxfp4_moe", "1000 rows, MXFP8", run, (*ON_GPU, "triton", "block-scaled FP8"))
    yield Check("mxfp4_moe", "a row alone and among others", _check_batch_invariance, ON_GPU)


def _check_two_expert_references() -> str:
    """Dense float64 products against integer codes summed by group."""
    from deepseek_v4_sm120.reference import mxfp4_moe as reference
    from deepseek_v4_sm120.reference.accuracy import relative_error
    from deepseek_v4_sm120.reference.mxfp4_moe_inputs import Shape, make_inputs

    inputs = make_inputs(Shape(3, hidden=256, inter=128, experts=8, masked=0.2), device="cpu")
    one = reference.mxfp4_moe(**inputs.arguments())
    difference = relative_error(reference.mxfp4_moe_by_bits(**inputs.arguments()), one)
    if difference > 1e-12:
        raise Failure(f"relative difference {difference:.1e}, allowed 1e-12")
    return f"relative difference {difference:.1e}"


def _check_mxfp4_moe(rows: int, activations: str) -> str:
    """Flash's experts on four GPUs, against float64."""
    from deepseek_v4_sm120.ops.mxfp4_moe import mxfp4_moe
    from deepseek_v4_sm120.reference.accuracy import relative_error
    from deepseek_v4_sm120.reference.mxfp4_moe import mxfp4_moe as reference
    from deepseek_v4_sm120.reference.mxfp4_moe_inputs import Shape, make_inputs

    inputs = make_inputs(Shape(rows, inter=512, experts=64, masked=0.05))
    out = mxfp4_moe(**inputs.arguments(), activations=activations)
    error = relative_error(out, reference(**inputs.arguments(), activations=activations))
    allowed = 0.004 if activations == "bf16" else 0.01
    if not error <= allowed:
        raise Failure(f"relative error {error:.5f}, allowed {allowed}")
    return f"relative error {error:.5f}"


def _check_batch_invariance() -> str:
    import torch

    from deepseek_v4_sm120.ops.mxfp4_moe import mxfp4_moe
    from deepseek_v4_sm120.reference.mxfp4_moe_inputs import Shape, make_inputs

    inputs = make_inputs(Shape(64, inter=1024, experts=16)).arguments()
    together = mxfp4_moe(**inputs)
    for row in (0, 17, 63):
        alone = {name: inputs[name][row : row + 1] for name in ("hidden", "topk_ids", "topk_weights")}
        if not torch.equal(mxfp4_moe(**{**inputs, **alone})[0], together[row]):
            raise Failure(f"row {row} alone differs from row {row} of 64")
    return "equal, bit by bit"
