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
    for kind, outputs, inputs in (("gated", 4096, 2048), ("normalised", 8192, 1024)):
        name = f"[{outputs}, {inputs}], x {kind} on its way in"
        yield Check("fp8_linear", name, functools.partial(_check_prologue, kind, outputs, inputs), ON_GPU)


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


def _check_prologue(kind: str, outputs: int, inputs: int) -> str:
    """1, 4, 5 and 64 rows: what is made of x against float64, and the product against that of x made before."""
    import torch

    from deepseek_v4_sm120.ops.fp8_linear import MADE_ROWS, MAX_ROWS, fp8_linear, gated, normalized
    from deepseek_v4_sm120.reference import fp8_linear as reference
    from deepseek_v4_sm120.reference.accuracy import relative_error
    from deepseek_v4_sm120.reference.fp8_linear_inputs import make_gates_and_ups, make_norm_weight, make_weight, make_x

    generator = torch.Generator("cuda").manual_seed(inputs)
    (weight,), (scale,) = make_weight(1, outputs, inputs, generator)
    if kind == "gated":
        x, arguments = make_gates_and_ups(MAX_ROWS, inputs, generator), {"swiglu_limit": 10.0}
        made, truth = gated(x, **arguments), reference.gated(x, 10.0)
    else:
        x = make_x(MAX_ROWS, 1, inputs, generator)[:, 0]
        arguments = {"norm_weight": make_norm_weight(inputs, generator), "norm_eps": 1e-6}
        made, truth = normalized(x, **arguments), reference.normalized(x, *arguments.values())
    error = relative_error(made, truth.double())
    if not error <= 0.0005:  # the reference's bf16 but for ties
        raise Failure(f"x {kind}: relative error {error:.5f}, allowed 0.0005")
    together = fp8_linear(made, weight, scale)
    for rows in (1, MADE_ROWS, MADE_ROWS + 1, MAX_ROWS):
        if not torch.equal(fp8_linear(x[:rows], weight, scale, **arguments), together[:rows]):
            raise Failure(f"{rows} rows {kind} on their way in differ from rows {kind} before")
    return f"x {kind}: {error:.5f} off the reference's bf16; the product's bits are those of x {kind} before"
