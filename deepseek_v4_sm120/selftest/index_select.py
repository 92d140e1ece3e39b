"""Self-test of index_select."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from deepseek_v4_sm120.selftest.check import ON_GPU, Check, Failure


def checks(quick: bool) -> Iterator[Check]:
    yield Check("index_select", "top-k by sorting", _check_topk_by_sorting)
    for fp4 in (False, True):
        name = "FP4" if fp4 else "FP8"
        yield Check("index_select", f"{name} logits", functools.partial(_check_index_logits, fp4), ON_GPU)
        yield Check("index_select", f"{name} selection", functools.partial(_check_index_selection, fp4, quick), ON_GPU)


def _check_topk_by_sorting() -> str:
    """The reference's order on ties, signed zeros and NaN, worked out by hand."""
    import torch

    from deepseek_v4_sm120.reference.index_select import topk_select

    nan, inf = float("nan"), float("inf")
    scores = torch.tensor([[0.0, -0.0, 1.0, nan, -inf, 0.0, 1.0]])
    for k, expected in ((3, [0, 2, 6]), (5, [0, 1, 2, 5, 6]), (6, [0, 1, 2, 4, 5, 6])):
        found = topk_select(scores, torch.tensor([7]), k=k)[1][0].tolist()
        if found != expected:
            raise Failure(f"k = {k}: {found}, not {expected}")
    return "ties to the lower entry, -0 equals +0, NaN last"


def _check_index_logits(fp4: bool) -> str:
    import torch

    from deepseek_v4_sm120.ops.index_select import has_fp8_mma, mqa_logits
    from deepseek_v4_sm120.reference import index_select as reference
    from deepseek_v4_sm120.reference.index_select_inputs import Shape, make_inputs

    native = not fp4 and has_fp8_mma(torch.cuda.current_device())
    allowed = reference.MAX_LOGIT_ERROR_NATIVE_FP8 if native else reference.MAX_LOGIT_ERROR
    inputs = make_inputs(Shape(3, (1000, 64, 700), fp4))
    ours, truth = mqa_logits(**inputs.arguments()), reference.mqa_logits(**inputs.arguments())
    inside = truth > -torch.inf
    error = float(((ours - truth).abs()[inside]).max() / truth[inside].abs().max())
    if not error <= allowed:
        raise Failure(f"error {error:.1e} of the greatest logit, allowed {allowed:.0e}")
    return f"error {error:.1e} of the greatest logit, allowed {allowed:.0e}"


def _check_index_selection(fp4: bool, quick: bool) -> str:
    """The exact top-k of our own logits: one row, many, rows of one request together, a captured width."""
    import torch

    from deepseek_v4_sm120.ops.index_select import index_select, mqa_logits
    from deepseek_v4_sm120.reference import index_select as reference
    from deepseek_v4_sm120.reference.index_select_inputs import Shape, make_inputs

    shapes = [Shape(1, (16384,), fp4), Shape(9, (3000, 512, 0, 5000), fp4), Shape(8, (4000, 4001), fp4, 4)]
    shapes += [Shape(2, (700, 20000), fp4, columns=4096)] + ([] if quick else [Shape(1, (262144,), fp4)])
    for shape in shapes:
        inputs = make_inputs(shape)
        more = {"rows_per_request": shape.rows_per_request}
        entries = torch.empty((shape.rows, 512), dtype=torch.int32, device="cuda")
        slots = index_select(**inputs.arguments(), entries=entries, **more)
        logits = mqa_logits(**inputs.arguments())  # without the hint: it must not matter
        table, pages = inputs.page_table, inputs.k_pages.shape[0]
        expected = reference.topk_select(logits, inputs.lengths, page_table=table, num_pages=pages)
        wrong = int((slots != expected[0]).sum() + (entries != expected[1]).sum())
        if wrong:
            raise Failure(f"{shape}: {wrong} slots or entries differ")
    return f"{len(shapes)} shapes: the exact top-512 of the logits, ties included"
