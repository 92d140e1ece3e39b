"""Self-test of wo_a."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from deepseek_v4_sm120.selftest.check import ON_GPU, Check, Failure


def checks(quick: bool) -> Iterator[Check]:
    yield Check("wo_a", "two references", _check_two_rotations, ("torch",))
    for groups in (2,) if quick else (2, 8):
        yield Check("wo_a", f"{groups} groups, few rows", functools.partial(_check_few_rows, groups), ON_GPU)
    yield Check("wo_a", "4 groups, 300 rows", functools.partial(_check_prompt, 4), ON_GPU)


def _check_two_rotations() -> str:
    """The rotation by complex numbers against one by matrices."""
    import torch

    from deepseek_v4_sm120.reference.wo_a import rotated_back, rotated_back_by_matrices
    from deepseek_v4_sm120.reference.wo_a_inputs import make_wo_a

    x, _, _, freqs_cis, positions = make_wo_a(4, 2, torch.Generator().manual_seed(1), outputs=128, inputs=1024)
    one, other = (f(x, freqs_cis, positions) for f in (rotated_back, rotated_back_by_matrices))
    if not torch.equal(one, other):
        raise Failure(f"{int((one != other).sum())} numbers of {one.numel()} differ")
    return "the same bits"


def _check_few_rows(groups: int) -> str:
    """1, 8 and 64 rows with their rotation against float64; a row's bits among the others."""
    import torch

    from deepseek_v4_sm120.ops.wo_a import MAX_ROWS, wo_a
    from deepseek_v4_sm120.reference.accuracy import relative_error
    from deepseek_v4_sm120.reference.wo_a import wo_a as reference
    from deepseek_v4_sm120.reference.wo_a_inputs import make_wo_a

    generator = torch.Generator("cuda").manual_seed(groups)
    x, weight, scale, freqs_cis, positions = make_wo_a(MAX_ROWS, groups, generator)
    together = wo_a(x, weight, scale, freqs_cis=freqs_cis, positions=positions)
    error = relative_error(together, reference(x, weight, scale, freqs_cis, positions))
    if not error <= 0.0025:
        raise Failure(f"relative error {error:.5f}, allowed 0.0025")
    for rows in (1, 8):
        alone = wo_a(x[:rows], weight, scale, freqs_cis=freqs_cis, positions=positions[:rows])
        if not torch.equal(alone, together[:rows]):
            raise Failure(f"{rows} rows alone differ from the first {rows} of {MAX_ROWS}")
    return f"relative error {error:.5f}; rows alone equal the rows among others"


def _check_prompt(groups: int) -> str:
    """A prompt's rows: the product with weights that are expanded for it."""
    import torch

    from deepseek_v4_sm120.ops.wo_a import wo_a
    from deepseek_v4_sm120.reference.accuracy import relative_error
    from deepseek_v4_sm120.reference.wo_a import wo_a as reference
    from deepseek_v4_sm120.reference.wo_a_inputs import make_wo_a

    x, weight, scale, *_ = make_wo_a(300, groups, torch.Generator("cuda").manual_seed(groups))
    held = torch.cuda.memory_allocated()
    error = relative_error(wo_a(x, weight, scale), reference(x, weight, scale))
    if not error <= 0.0025:
        raise Failure(f"relative error {error:.5f}, allowed 0.0025")
    if (kept := torch.cuda.memory_allocated() - held) > 0:
        raise Failure(f"{kept} bytes are still allocated")
    return f"relative error {error:.5f}; no memory kept"
