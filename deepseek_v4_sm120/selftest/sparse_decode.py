"""Self-test of sparse_decode."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

from deepseek_v4_sm120.selftest.check import ON_GPU, Check, Failure

SPARSE_DECODE_EXTRAS = {
    "window": None,
    "C4": {"page_size": 64, "width": 512, "lengths": 512},
    "C128 at 8K, captured for 1M": {"page_size": 2, "width": 8192, "lengths": 64, "ascending": True},
    "C128 at 512K": {"page_size": 2, "width": 4096, "lengths": 4096, "ascending": True},
}


def checks(quick: bool) -> Iterator[Check]:
    yield Check("sparse_decode", "two references", functools.partial(_check_two_references, quick))
    for name, extra in SPARSE_DECODE_EXTRAS.items():
        if not (quick and name == "C128 at 512K"):
            yield Check("sparse_decode", name, functools.partial(_check_sparse_decode, extra, quick), ON_GPU)
    yield Check("sparse_decode", "C128 by page table", _check_page_table, ON_GPU)
    yield Check("sparse_decode", "q normed within", _check_norm, ON_GPU)
    yield Check("sparse_decode", "graph replay", _check_graph_replay, ON_GPU)


def _check_two_references(quick: bool) -> str:
    """The float64 definition against a float32 online softmax with its own byte decoder, at real widths."""
    from deepseek_v4_sm120.reference import sparse_decode as reference
    from deepseek_v4_sm120.reference.accuracy import relative_error
    from deepseek_v4_sm120.reference.sparse_decode_inputs import CacheShape, Shape, make_inputs

    extras = [CacheShape(64, 512, lengths=(512, 3), masked=0.05)]
    if not quick:
        extras.append(CacheShape(2, 4096, lengths=(4096, 64), ascending=True))
    worst = 0.0
    for extra in extras:
        inputs = make_inputs(Shape(2, 64, CacheShape(256, 128, lengths=128), extra), device="cpu")
        one, one_lse = reference.sparse_decode(**inputs.arguments())
        other, other_lse = reference.sparse_decode_online(**inputs.arguments())
        worst = max(worst, relative_error(other, one), relative_error(other_lse, one_lse))
    if worst > 2e-6:
        raise Failure(f"relative difference {worst:.1e}, allowed 2e-6")
    return f"relative difference {worst:.1e}"


def _check_sparse_decode(extra: dict | None, quick: bool) -> str:
    """DeepSeek-V4-Flash's shapes on one to eight GPUs: 8 to 64 heads, 1 to 64 rows."""
    from deepseek_v4_sm120.ops.sparse_decode import sparse_decode
    from deepseek_v4_sm120.reference.accuracy import MAX_RELATIVE_ERROR, relative_error
    from deepseek_v4_sm120.reference.sparse_decode import sparse_decode as reference
    from deepseek_v4_sm120.reference.sparse_decode_inputs import CacheShape, Shape, make_inputs

    window = CacheShape(256, 128, lengths=128)
    all_heads, all_rows = ((16, 64), (1, 8)) if quick else ((8, 16, 32, 64), (1, 8, 64))
    worst = 0.0
    for heads, rows in itertools.product(all_heads, all_rows):
        shape = Shape(rows, heads, window, None if extra is None else CacheShape(**extra))
        inputs = make_inputs(shape, device="cuda")
        out, lse = sparse_decode(**inputs.arguments(), return_lse=True)
        truth, true_lse = reference(**inputs.arguments())
        error, lse_error = relative_error(out, truth), relative_error(lse, true_lse)
        if error > MAX_RELATIVE_ERROR or lse_error > 1e-4:
            allowed = f"allowed {MAX_RELATIVE_ERROR} and 1e-4"
            raise Failure(f"{rows} rows, {heads} heads: relative error {error:.5f}, of lse {lse_error:.1e}, {allowed}")
        worst = max(worst, error)
    return f"rows {all_rows} x heads {all_heads}: relative error at most {worst:.5f}"


def _check_page_table() -> str:
    """Candidates from lengths and a page table against their list, in both kernels, to the bit."""
    import torch

    from deepseek_v4_sm120.ops.sparse_decode import sparse_decode
    from deepseek_v4_sm120.reference.sparse_decode_inputs import CacheShape, Shape, make_inputs

    window = CacheShape(256, 128, lengths=128)
    for page_size, heads, prefill in itertools.product((2, 64), (16, 64), (False, True)):
        extra = CacheShape(page_size, 4096, lengths=(4096, 64, 0, 777), tables=3, masked=0.05)
        inputs = make_inputs(Shape(12, heads, window, extra))
        expected = sparse_decode(**inputs.arguments(), prefill=prefill)
        found = sparse_decode(**inputs.table_arguments(), prefill=prefill)
        if not torch.equal(found, expected):
            case = f"{heads} heads, page size {page_size}, {'many' if prefill else 'few'} rows"
            raise Failure(f"{case}: {int((found != expected).sum())} of {found.numel()} elements differ")
    return "equal to the list of the same candidates, bit by bit"


def _check_norm() -> str:
    """Norm and rotation of q within the call against the same float32 operations before it, to the bit."""
    import torch

    from deepseek_v4_sm120.ops.sparse_decode import sparse_decode
    from deepseek_v4_sm120.reference.sparse_decode import normed_and_rotated_by_warps
    from deepseek_v4_sm120.reference.sparse_decode_inputs import CacheShape, Shape, make_inputs

    window, extra = CacheShape(256, 128, lengths=128), CacheShape(64, 512, lengths=(512, 300))
    for heads, rows in itertools.product((8, 64), (1, 64)):
        inputs = make_inputs(Shape(rows, heads, window, extra, norm=True))
        found = sparse_decode(**inputs.arguments())
        q = normed_and_rotated_by_warps(inputs.q, inputs.q_norm_eps, inputs.freqs_cis, inputs.positions)
        expected = sparse_decode(**inputs.with_q(q).arguments())
        if not torch.equal(found, expected):
            case = f"{rows} rows, {heads} heads"
            raise Failure(f"{case}: {int((found != expected).sum())} of {found.numel()} elements differ")
    return "equal to norm and rotation before the call, bit by bit"


def _check_graph_replay() -> str:
    """Captured, replayed with other contents, compared to the bit with an eager call."""
    import torch

    from deepseek_v4_sm120.ops.sparse_decode import sparse_decode
    from deepseek_v4_sm120.reference.sparse_decode_inputs import CacheShape, Shape, make_inputs

    shape = Shape(8, 16, CacheShape(256, 128, lengths=128), CacheShape(64, 512, lengths=512))
    static, fresh = make_inputs(shape, seed=1), make_inputs(shape, seed=2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sparse_decode(**static.arguments())
    for name, value in static.arguments().items():
        if torch.is_tensor(value):
            value.copy_(getattr(fresh, name))
    for _ in range(3):
        graph.replay()
    expected = sparse_decode(**fresh.arguments())
    if not torch.equal(out, expected):
        raise Failure(f"{int((out != expected).sum())} of {out.numel()} elements differ from an eager call")
    return "equal to an eager call, bit by bit"
