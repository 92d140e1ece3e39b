"""Self-test of bf16_linear."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from deepseek_v4_sm120.selftest.check import ON_GPU, Check, Failure


def checks(quick: bool) -> Iterator[Check]:
    yield Check("bf16_linear", "two references", _check_two_linear_references, ("torch",))
    for outputs in (64, 2048):
        yield Check("bf16_linear", f"{outputs} outputs", functools.partial(_check_bf16_linear, outputs), ON_GPU)


def _check_two_linear_references() -> str:
    """A float64 product against exactly rounded sums."""
    import torch

    from deepseek_v4_sm120.reference import bf16_linear as reference
    from deepseek_v4_sm120.reference.accuracy import relative_error

    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(n, 512, generator=generator).bfloat16() for n in (2, 8))
    difference = relative_error(reference.bf16_linear_by_sums(x, weight), reference.bf16_linear(x, weight))
    if difference > 1e-12:
        raise Failure(f"relative difference {difference:.1e}, allowed 1e-12")
    return f"relative difference {difference:.1e}"


def _check_bf16_linear(outputs: int) -> str:
    """One row and 32 against float64; the row's bits among the others."""
    import torch

    from deepseek_v4_sm120.ops.bf16_linear import MAX_ROWS, bf16_linear
    from deepseek_v4_sm120.reference.accuracy import relative_error
    from deepseek_v4_sm120.reference.bf16_linear import bf16_linear as reference

    generator = torch.Generator("cuda").manual_seed(outputs)
    x, weight = (torch.randn(n, 4096, generator=generator, device="cuda").bfloat16() for n in (MAX_ROWS, outputs))
    out = bf16_linear(x, weight)
    error = relative_error(out, reference(x, weight))
    if not error <= 1e-5:
        raise Failure(f"relative error {error:.1e}, allowed 1e-5")
    if not torch.equal(bf16_linear(x[:1], weight)[0], out[0]):
        raise Failure("row 0 alone differs from row 0 of 32")
    return f"relative error {error:.1e}; a row alone equals the row among others"
