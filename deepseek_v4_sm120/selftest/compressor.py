"""Self-test of the compressor."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from deepseek_v4_sm120.selftest.check import ON_GPU, Check, Failure

ROUNDING = {"c4": 0.03, "c128": 0.03, "index": 0.03, "index_fp4": 0.15}  # of an entry, by the cache's format


def checks(quick: bool) -> Iterator[Check]:
    yield Check("compressor", "two references", _check_two_references, ("torch",))
    for kind in ("c4", "c128", "index") if quick else ROUNDING:
        yield Check("compressor", kind, functools.partial(_check_kind, kind), ON_GPU)


def _check_two_references() -> str:
    """Entries from a state against entries from a request's tokens."""
    import torch

    from deepseek_v4_sm120.reference.accuracy import relative_error
    from deepseek_v4_sm120.reference.compressor import compressor, entries_of
    from deepseek_v4_sm120.reference.compressor_inputs import make_inputs

    inputs = make_inputs("c4", [8], device="cpu")
    before, own = inputs.plan.view(torch.int32)[0, 2:].tolist()
    tokens = torch.cat([inputs.state[before], inputs.state[own, :3], inputs.kv_score]).nan_to_num()
    layer = (inputs.ape, inputs.norm_weight, inputs.norm_eps, inputs.freqs_cis)
    _, entries = compressor(**inputs.arguments())
    error = relative_error(entries, entries_of(tokens, *layer, 4)[1:])
    if not error <= 1e-9:
        raise Failure(f"relative error {error:.2e}, allowed 1e-9")
    return f"relative error {error:.1e}"


def _check_kind(kind: str) -> str:
    """1 and 40 rows at all places of a group against float64; a row's bits among the others."""
    import torch

    from deepseek_v4_sm120.ops.compressor import compressor
    from deepseek_v4_sm120.reference import compressor as reference
    from deepseek_v4_sm120.reference.accuracy import relative_error
    from deepseek_v4_sm120.reference.compressor_inputs import KINDS, make_inputs

    ratio, head_dim, fp4 = KINDS[kind]
    inputs = make_inputs(kind, [ratio * (1 + row % 5) + row % 2 for row in range(40)])
    ours, truth, alone = inputs.copy(), inputs.copy(), inputs.rows(slice(0, 1))
    for made in (ours, alone):
        compressor(**made.arguments())
    ended, entries = reference.compressor(**truth.arguments())
    if not torch.equal(ours.state.view(torch.int32), truth.state.view(torch.int32)):
        raise Failure("the state is not what the reference wrote")
    error = relative_error(reference.read(ours.cache, ours.page_size, ours.out_loc[ended], head_dim, fp4), entries)
    if not error <= ROUNDING[kind]:
        raise Failure(f"relative error {error:.5f}, allowed {ROUNDING[kind]}")
    one, among = (reference.read(m.cache, m.page_size, inputs.out_loc[:1], head_dim, fp4) for m in (alone, ours))
    if not torch.equal(one, among):
        raise Failure("a row alone differs from the row among 40")
    return f"relative error {error:.5f}; a row alone equals the row among others"
