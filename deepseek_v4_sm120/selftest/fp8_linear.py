"""Self-test of fp8_linear."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from deepseek_v4_sm120.selftest.check import ON_GPU, Check, Failure


def checks(quick: bool) -> Iterator[Check]:
    yield Check("fp8_linear", "two references", _check_two_fp8_references, ("torch",))
    sizes = ((1, 8192, 1024), (1, 4096, 2048)) if quick else ((1, 8192, 1024), (1, 4096, 2048), (2, 1024, 4096))
    for size in sizes:
        yield Check("fp8_linear", "{} x [{}, {}]".format(*size), functools.partial(_check_fp8_linear, *size), ON_GPU)


def _check_two_fp8_references() -> str:
    """Dequantised weights against weights decoded from their bits, block by block."""
    import torch

    from deepseek_v4_sm120.reference import fp8_linear as reference
    from deepseek_v4_sm120.reference.accuracy import relative_error
    from deepseek_v4_sm120.reference.fp8_linear_inputs import make_weight, make_x

    generator = torch.Generator().manual_seed(1)
    x, (weight, scale) = make_x(3, 1, 384, generator)[:, 0], make_weight(1, 256, 384, generator)
    one = reference.fp8_linear(x, weight[0], scale[0])
    difference = relative_error(reference.fp8_linear_by_bits(x, weight[0], scale[0]), one)
    if difference > 1e-12:
        raise Failure(f"relative difference {difference:.1e}, allowed 1e-12")
    return f"relative difference {difference:.1e}"


def _check_fp8_linear(groups: int, outputs: int, inputs: int) -> str:
    """1, 8, 16 and 64 rows against float64; a row's bits among the others."""
    import torch

    from deepseek_v4_sm120.ops.fp8_linear import MAX_ROWS, fp8_grouped_linear
    from deepseek_v4_sm120.reference.accuracy import relative_error
    from deepseek_v4_sm120.reference.fp8_linear import fp8_grouped_linear as reference
    from deepseek_v4_sm120.reference.fp8_linear_inputs import make_weight, make_x

    generator = torch.Generator("cuda").manual_seed(outputs)
    x, (weight, scale) = make_x(MAX_ROWS, groups, inputs, generator), make_weight(groups, outputs, inputs, generator)
    together = fp8_grouped_linear(x, weight, scale)
    error = relative_error(together, reference(x, weight, scale))
    if not error <= 0.002:
        raise Failure(f"relative error {error:.5f}, allowed 0.002")
    for rows in (1, 8, 16, 32):
        if not torch.equal(fp8_grouped_linear(x[:rows], weight, scale), together[:rows]):
            raise Failure(f"{rows} rows alone differ from the first {rows} of {MAX_ROWS}")
    return f"relative error {error:.5f}; rows alone equal the rows among others"
