"""Self-test of mhc."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from deepseek_v4_sm120.selftest.check import ON_GPU, Check, Failure


def checks(quick: bool) -> Iterator[Check]:
    yield Check("mhc", "two references", _check_two_mhc_references)
    for rows in (1, 64) if quick else (1, 8, 64, 1000):
        yield Check("mhc", f"{rows} rows", functools.partial(_check_mhc, rows), ON_GPU)
    yield Check("mhc", "a row alone and among others", _check_mhc_invariance, ON_GPU)


def _check_two_mhc_references() -> str:
    """Loops and divided matrices against whole products and scalings."""
    from deepseek_v4_sm120.reference import mhc as reference
    from deepseek_v4_sm120.reference.accuracy import relative_error
    from deepseek_v4_sm120.reference.mhc_inputs import Shape, make_inputs

    inputs = make_inputs(Shape(3, hidden=512), device="cpu")
    one, other = reference.mhc(**inputs.boundary()), reference.mhc_by_products(**inputs.boundary())
    worst = max(relative_error(getattr(other, name), getattr(one, name)) for name in ("post", "comb"))
    if worst > 1e-12:
        raise Failure(f"relative difference {worst:.1e}, allowed 1e-12")
    return f"relative difference {worst:.1e}"


def _check_mhc(rows: int) -> str:
    """A whole boundary against float64."""
    from deepseek_v4_sm120.ops.mhc import mhc
    from deepseek_v4_sm120.reference import mhc as reference
    from deepseek_v4_sm120.reference.accuracy import relative_error
    from deepseek_v4_sm120.reference.mhc_inputs import Shape, make_inputs

    inputs = make_inputs(Shape(rows))
    streams, post, comb, y = mhc(**inputs.boundary())
    weights = {name: getattr(inputs, name) for name in ("fn", "scale", "base", "norm_weight")}
    true_y, true_post, true_comb = reference.mhc_pre(streams, **weights)
    bf16, coefficients = reference.MAX_ERROR_BF16, reference.MAX_ERROR_COEFFICIENTS
    errors = {
        "streams": (relative_error(streams, reference.mhc_post(**inputs.post_only())), bf16),
        "post": (relative_error(post, true_post), coefficients),
        "comb": (relative_error(comb, true_comb), coefficients),
        "y": (relative_error(y, true_y), bf16),
    }
    for name, (error, allowed) in errors.items():
        if not error <= allowed:
            raise Failure(f"relative error of {name} {error:.1e}, allowed {allowed:.1e}")
    return "relative errors " + ", ".join(f"{name} {error:.1e}" for name, (error, _) in errors.items())


def _check_mhc_invariance() -> str:
    import torch

    from deepseek_v4_sm120.ops.mhc import MANY_ROWS, mhc
    from deepseek_v4_sm120.reference.mhc_inputs import Shape, make_inputs

    rows = MANY_ROWS + 63
    inputs = make_inputs(Shape(rows)).boundary()
    together = mhc(**inputs)
    for row in (0, 17, rows - 1):
        alone = {name: inputs[name][row : row + 1] for name in ("f", "streams", "post", "comb")}
        for one, all_rows in zip(mhc(**{**inputs, **alone}), together, strict=True):
            if not torch.equal(one[0], all_rows[row]):
                raise Failure(f"row {row} alone differs from row {row} of {rows}")
    return f"equal, bit by bit, among {rows}"
