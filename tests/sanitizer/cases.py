"""Small calls that reach the kernels of every operator but those for several cards, each judged by the reference.

A process for an operator runs all of its calls under one of compute-sanitizer's tools, which makes a kernel 10 to 1000
times slower. So shapes are as small as the operator takes, and `multiprocessors` tells it of fewer than there are where
that lets fewer blocks reach a kernel. `python3 -m tests.sanitizer.cases OPERATOR` runs them without a tool.

all_reduce and mhc's kernel with a sum inside are left out: their blocks wait for those of other cards.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from deepseek_v4_sm120.ops import (
    bf16_linear,
    bf16_linear_draft_head,
    fp8_linear,
    fp8_linear_draft_input,
    mhc,
    mxfp4_moe,
    router_topk,
    sparse_decode,
    wo_a,
)
from deepseek_v4_sm120.ops.shared import cuda_tensors
from deepseek_v4_sm120.reference import bf16_linear as bf16_reference
from deepseek_v4_sm120.reference import bf16_linear_draft_head as head_reference
from deepseek_v4_sm120.reference import fp8_linear as fp8_reference
from deepseek_v4_sm120.reference import mhc as mhc_reference
from deepseek_v4_sm120.reference import mxfp4_moe as moe_reference
from deepseek_v4_sm120.reference import router_topk as router_reference
from deepseek_v4_sm120.reference import sparse_decode as sparse_reference
from deepseek_v4_sm120.reference import wo_a as wo_a_reference
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.specs import bf16_linear as bf16_spec
from deepseek_v4_sm120.specs import bounds
from deepseek_v4_sm120.specs import compressor as compressor_spec
from deepseek_v4_sm120.specs import fp8_linear as fp8_spec
from deepseek_v4_sm120.specs import index_select as index_spec
from deepseek_v4_sm120.specs import mhc as mhc_spec
from deepseek_v4_sm120.specs import mxfp4_moe as moe_spec
from deepseek_v4_sm120.specs import sparse_decode as sparse_spec
from deepseek_v4_sm120.specs import wo_a as wo_a_spec
from deepseek_v4_sm120.specs.check import Failure, same, within

WHOLE_CARD = 132  # multiprocessors of the card that shapes here were chosen for


@dataclass(frozen=True)
class Case:
    """`run` launches on tensors of a device and returns what judges the results, or None: it has judged them."""

    name: str
    run: Callable[[str], Callable[[], object] | None]
    multiprocessors: int | None = None  # that the operator is told of; None: the card's


@contextlib.contextmanager
def multiprocessors(count: int | None) -> Iterator[None]:
    known = cuda_tensors.num_sms
    if count is not None:
        cuda_tensors.num_sms = lambda index: count
    try:
        yield
    finally:
        cuda_tensors.num_sms = known


def _generator(device: str, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


# ---- dense layers


def _bf16(rows: int, outputs: int, device: str, **tuning):
    x, weight = (
        torch.randn(n, 512, generator=_generator(device, n), device=device).bfloat16() for n in (rows, outputs)
    )
    out = torch.empty(rows, outputs, device=device)
    bf16_linear._launch(x, weight, out, **tuning)
    return lambda: within(relative_error(out, bf16_reference.bf16_linear(x, weight)), bounds.BF16_LINEAR.truth)


def _draft_head(rows: int, dtype: torch.dtype, device: str):
    weight, copy = bf16_spec.make_head(96, _generator(device, rows), hidden=1024)
    x = bf16_spec.make_x(rows, _generator(device, rows), hidden=1024)
    out = bf16_linear_draft_head.draft_head(x, copy, weight, out_dtype=dtype)
    bound = bounds.DRAFT_HEAD.truth if dtype == torch.float32 else bounds.BF16_LINEAR_BF16_OUT
    return lambda: within(relative_error(out, head_reference.draft_head(x, copy, weight)), bound)


def _bf16_cases() -> Iterator[Case]:
    """Tiles of 4, 8 and 16 outputs for 1, 2 and 4 tiles of rows by all warps and by few, more rows, and both sizes of
    square tiles."""
    for outputs in (36, 40, 64):
        for rows, warps in ((1, 8), (1, 16), (9, 16), (17, 8), (17, 16)):
            yield Case(f"{rows} x {outputs}, {warps} warps", functools.partial(_bf16, rows, outputs, warps=warps), 4)
    for outputs in (36, 424, 832):
        yield Case(f"33 x {outputs}", functools.partial(_bf16, 33, outputs), WHOLE_CARD)
    yield Case("33 x 60, square tiles of 64", functools.partial(_bf16, 33, 60), 4)
    yield Case("70 x 200, square tiles of 128", functools.partial(_bf16, 70, 200), 1)
    for rows, dtype in ((1, torch.float32), (10, torch.bfloat16)):
        yield Case(f"draft head, {rows} rows", functools.partial(_draft_head, rows, dtype), 3)


def _router(rows: int, experts: int, dtype: torch.dtype, log1p: bool, device: str):
    generator = _generator(device, experts)
    logits = torch.randn(rows, experts, generator=generator, device=device).to(dtype)
    bias = torch.randn(experts, generator=generator, device=device) * 0.1
    weights, ids = router_topk.router_topk(logits, bias, 6, log1p=log1p)

    def judge():
        expected = router_reference.router_topk(logits, bias, 6)
        same(ids.long(), expected[1].long(), "experts and the reference's")
        allowed = bounds.ROUTER_TOPK.truth if log1p else 1e-4  # log(1 + exp(x)) keeps fewer digits below zero
        within(relative_error(weights, expected[0]), allowed)

    return judge


def _argmax(rows: int, columns: int, device: str):
    x = torch.randn(rows, columns + 8, generator=_generator(device, rows), device=device)[:, :columns]
    found = router_topk.row_argmax(x)
    return lambda: same(found, router_reference.row_argmax(x), "places")


def _router_cases() -> Iterator[Case]:
    yield Case("argmax of 3 rows", functools.partial(_argmax, 3, 9000))
    for experts in (32, 64, 128, 256, 384, 500):
        for rows, dtype, log1p in ((1, torch.float32, True), (5, torch.float32, False), (5, torch.bfloat16, True)):
            name = f"{rows} x {experts}, {dtype}, {'log1p' if log1p else 'log'}".replace("torch.", "")
            yield Case(name, functools.partial(_router, rows, experts, dtype, log1p))


def _fp8(rows: int, tuning: dict, rotates: bool, inputs: int, device: str):
    """Two groups of 256 outputs; eight slices of 20 blocks of inputs are of two lengths."""
    options = {"outputs": 256, "inputs": inputs, "table": 64, "ue8m0": not rotates}
    x, weight, scale, freqs, positions = wo_a_spec.make_wo_a(rows, 2, _generator(device, rows), **options)
    out = torch.empty(rows, 2, 256, dtype=torch.bfloat16, device=device)
    rotation = wo_a._rotation(freqs, positions) if rotates else fp8_linear.NO_ROTATION
    fp8_linear._run(x, weight, scale, out, rotation=rotation, **tuning)

    def judge():
        given = (freqs, positions) if rotates else ()
        truth = (wo_a_reference.wo_a if rotates else fp8_reference.fp8_grouped_linear)(x, weight, scale, *given)
        within(relative_error(out, truth), bounds.FP8_LINEAR.truth)

    return judge


TILES = {16: ((1, 4), (2, 4)), 32: ((1, 4), (2, 4), (2, 8)), 33: ((1, 4), (2, 4), (2, 8))}  # rows: row_tiles, warp_rows


def _fp8_tunings(rotates: bool) -> Iterator[tuple[int, dict]]:
    """Few rows, each number of warps beside each other; tiles, one and two slices in turn; units of 64 and 128 rows."""
    yield 3, {}
    for warp_rows in (1, 4, 8):
        yield 8, {"warp_rows": warp_rows}
    for rows, choices in TILES.items():
        for row_tiles, warp_rows in choices:
            for in_turn in (1, 2) if warp_rows == 8 else (1,):
                yield rows, {"row_tiles": row_tiles, "warp_rows": warp_rows, "in_turn": in_turn}
    for in_turn in (1, 8):
        for row_tiles in (1, 2):
            yield 135, {"in_turn": in_turn, "row_tiles": row_tiles}


def _fp8_of(rotates: bool) -> Iterator[Case]:
    for rows, tuning in _fp8_tunings(rotates):
        name = ", ".join([f"{rows} rows", *(f"{key} {value}" for key, value in tuning.items())])
        yield Case(name, functools.partial(_fp8, rows, tuning, rotates, 2560))
    yield Case("8 rows, two slices", functools.partial(_fp8, 8, {"warp_rows": 8}, rotates, 1024))


def _latent_norm(rows: int, device: str):
    """Of latents in wider rows."""
    x = torch.randn(rows, 1536, generator=_generator(device, rows), device=device).bfloat16()[:, :1024]
    weight = torch.randn(1024, generator=_generator(device, 1), device=device).bfloat16()
    out = fp8_linear.latent_norm(x, weight, 1e-6)
    truth = fp8_reference.latent_norm(x, weight, 1e-6)
    return lambda: within(relative_error(out, truth), bounds.LATENT_NORM.truth)


def _draft_input(tokens: int, inputs: int, entries: int | None, device: str):
    (hidden, table, *halves), by = fp8_spec.make_draft_input(
        tokens, 256, inputs, _generator(device, tokens), entries=entries
    )
    out = fp8_linear_draft_input.draft_input(hidden, table, *halves, **by)
    truth = fp8_reference.draft_input(hidden, table, *halves, **by)
    return lambda: within(relative_error(out, truth), bounds.DRAFT_INPUT.truth)


def _fp8_cases() -> Iterator[Case]:
    yield from _fp8_of(False)
    for tokens, inputs, entries, count in ((1, 2048, 50, 8), (3, 2048, None, None), (20, 512, 50, None)):
        name = f"a draft's input, {tokens} tokens of {inputs}"
        yield Case(name, functools.partial(_draft_input, tokens, inputs, entries), count)
    yield Case("latent norm, 5 rows", functools.partial(_latent_norm, 5))


def _wo_a_expanded(rows: int, device: str):
    x, weight, scale, *_ = wo_a_spec.make_wo_a(rows, 2, _generator(device, rows), outputs=128, inputs=1024)
    out = wo_a.wo_a(x, weight, scale)
    return lambda: within(relative_error(out, wo_a_reference.wo_a(x, weight, scale)), bounds.WO_A.truth)


def _wo_a_cases() -> Iterator[Case]:
    yield from _fp8_of(True)
    yield Case("257 rows, weights expanded", functools.partial(_wo_a_expanded, wo_a.FP8_ROWS + 1))


# ---- attention and indexer

EXTRAS = {
    "window": None,
    "C4": sparse_spec.CacheShape(64, 192, lengths=(192, 3, 100), masked=0.1),
    "C128": sparse_spec.CacheShape(2, 256, lengths=(130, 64), ascending=True),
}
TABLES = {
    f"table of pages of {size}": sparse_spec.CacheShape(size, 256, lengths=(250, 0, 77), tables=2, masked=0.1)
    for size in (2, 64)
}
LONG = {"long C128": sparse_spec.CacheShape(2, 1536, lengths=(1535, 1400), ascending=True)}
ATTENTION = (  # kernel, heads, arguments, multiprocessors
    ("blocks share a row", 16, {"prefill": False, "pairs": False}, 24),
    ("a block a row", 64, {"prefill": False, "pairs": False}, 1),
    ("pairs", 16, {"prefill": False, "pairs": True}, 2),
    ("wide", 24, {"prefill": False, "pairs": True}, 2),
    ("stacked", 8, {"prefill": True}, 2),
    ("prefill", 64, {"prefill": True}, 2),
)


def _attention(rows: int, heads: int, extra, kernel: dict, device: str):
    shape = sparse_spec.Shape(rows, heads, sparse_spec.WINDOW, extra)
    inputs = sparse_spec.make_inputs(shape, seed=heads, device=device)
    given = inputs.arguments() if extra is None or extra.tables is None else inputs.table_arguments()
    out, lse = sparse_decode.sparse_decode(**given, **kernel, return_lse=True)

    def judge():
        truth, true_lse = sparse_reference.sparse_decode(**inputs.arguments())
        within(relative_error(out, truth), bounds.SPARSE_DECODE.truth)
        within(relative_error(lse, true_lse), bounds.SPARSE_DECODE_LSE, "relative error of lse")

    return judge


def _attention_cases() -> Iterator[Case]:
    for kernel, heads, given, count in ATTENTION:
        long = LONG if not given["prefill"] and not given["pairs"] else {}
        for name, extra in (EXTRAS | TABLES | long).items():
            rows = 9 if given["prefill"] else 3
            yield Case(f"{kernel}, {name}", functools.partial(_attention, rows, heads, extra, given), count)
    for heads in (16, 32):
        given = functools.partial(_attention, 9, heads, EXTRAS["C4"], {"prefill": True})
        yield Case(f"stacked, {heads} heads", given, 2)


def _checked(check, device: str) -> None:
    check.run()


def _checks_of(spec, *left_out: str) -> Iterator[Case]:
    """The self-test's own, which are small; they judge themselves."""
    for check in spec.checks(False):
        if check.name not in ("two references", *left_out):
            yield Case(check.name, functools.partial(_checked, check))


def _index_selection(fp4: bool, shape: index_spec.Shape, device: str):
    inputs = index_spec.make_inputs(shape, device=device)
    given = inputs.arguments()
    slots = index_spec.op.index_select(**given, rows_per_request=shape.rows_per_request)
    logits = index_spec.op.mqa_logits(**given)
    alone = index_spec.op.topk_select(
        logits, inputs.lengths, page_table=inputs.page_table, num_pages=inputs.k_pages.shape[0]
    )

    def judge():
        truth = index_spec.reference.mqa_logits(**given)
        inside = truth > -torch.inf
        error = float(((logits - truth).abs()[inside]).max() / truth[inside].abs().max())
        within(error, index_spec.allowed_logit_error(fp4), "error of the greatest logit")
        table, pages = inputs.page_table, inputs.k_pages.shape[0]
        expected = index_spec.reference.topk_select(logits, inputs.lengths, page_table=table, num_pages=pages)
        same(slots, expected[0], "slots and those of the sorted logits")
        same(alone, expected[0], "slots of given logits and of those sorted")

    return judge


def _dealt(dtype: torch.dtype, device: str):
    generator = _generator(device, 1)
    ranks, rows, columns, pages = 4, 10, 40, 50
    table = torch.randint(-1, pages + 9, (rows, columns), generator=generator, dtype=torch.int32, device=device)
    most = index_spec.PAGE * columns + 64
    dealt = torch.randint(-1, most, (ranks, 3, 512), generator=generator, dtype=torch.int32, device=device).to(dtype)
    slots = index_spec.op.dealt_slots(dealt, table, num_pages=pages)

    def judge():
        expected = index_spec.reference.dealt_slots(dealt, table, num_pages=pages)
        same(slots, expected[0], "slots and the reference's")

    return judge


def _index_cases() -> Iterator[Case]:
    """Rows alone and of one request; shorter than k, empty, several lists to merge."""
    shapes = {
        "a row": {"rows": 1, "lengths": (3000,)},
        "rows": {"rows": 5, "lengths": (1500, 512, 0, 700)},
        "rows of a request": {"rows": 5, "lengths": (1000, 1001), "rows_per_request": 5},
        "wide table": {"rows": 2, "lengths": (700, 5000), "columns": 64},
    }
    for fp4 in (False, True):
        for name, options in shapes.items():
            shape = index_spec.Shape(**options, fp4=fp4)
            yield Case(f"{'FP4' if fp4 else 'FP8'}, {name}", functools.partial(_index_selection, fp4, shape))
    for dtype in (torch.int32, torch.int16):
        yield Case(f"dealt entries, {dtype}".replace("torch.", ""), functools.partial(_dealt, dtype))


# ---- compressors and hyper-connections


def _compressor_cases() -> Iterator[Case]:
    yield from _checks_of(compressor_spec)


def _boundary(rows: int, kernels: str, hidden: int, device: str):
    inputs = mhc_spec.make_inputs(mhc_spec.Shape(rows, hidden), seed=rows, device=device)
    found = mhc.mhc(**inputs.boundary(), kernels=kernels)

    def judge():
        for name, error in mhc_spec.errors(inputs, found).items():
            within(error, mhc_spec.ALLOWED[name], f"relative error of {name}")

    return judge


def _parts(rows: int, kernels: str, hidden: int, device: str):
    """A post, a pre, and heads with and without a post in front."""
    inputs = mhc_spec.make_inputs(mhc_spec.Shape(rows, hidden), seed=rows, device=device)
    streams = mhc.mhc_post(**inputs.post_only())
    pre = mhc.mhc_pre(**{**inputs.pre(), "streams": streams}, kernels=kernels)
    head = {**inputs.head(), "norm_weight": inputs.norm_weight}
    last = {name: getattr(inputs, name) for name in ("f", "post", "comb")}
    behind_post = mhc.mhc_head(**head, **last, kernels=kernels)
    alone = mhc.mhc_head(**{**head, "streams": streams}, kernels=kernels)

    def judge():
        for name, error in mhc_spec.errors(inputs, (streams, *pre)).items():
            within(error, mhc_spec.ALLOWED[name], f"relative error of {name}")
        same(behind_post[0], streams, "streams of a head and of a post")
        same(behind_post[1], alone, "a head behind its post and alone")
        truth = mhc_reference.mhc_head(**{**head, "streams": streams})
        within(relative_error(alone, truth), bounds.MHC.truth, "relative error of the head")

    return judge


def _last_addition(rows: int, form: str, device: str):
    """Of f, by the boundary itself."""
    inputs = mhc_spec.make_inputs(mhc_spec.Shape(rows), seed=rows, device=device)
    ((f, left),), (added,) = mhc_spec.leave_additions(form, [inputs.f], rows)
    found = mhc.mhc(**inputs.boundary() | {"f": f}, **left)

    def judge():
        inputs.f = added
        for name, error in mhc_spec.errors(inputs, found).items():
            within(error, mhc_spec.ALLOWED[name], f"relative error of {name}")

    return judge


def _mhc_cases() -> Iterator[Case]:
    for rows, kernels, hidden in (
        *((1, "fused", 4096), (3, "fused", 4096), (17, "fused", 4096)),
        *((3, "split", 4096), (17, "split", 4096), (3, "split", 7168), (40, "many", 4096)),
    ):
        yield Case(f"{rows} rows, {kernels}, {hidden}", functools.partial(_boundary, rows, kernels, hidden))
    for rows, form in ((3, "unmerged"), (17, "unmerged"), (3, "routed")):
        yield Case(f"{rows} rows, {form}", functools.partial(_last_addition, rows, form))
    for kernels, hidden in (("fused", 4096), ("split", 4096), ("split", 7168)):
        yield Case(f"parts, {kernels}, {hidden}", functools.partial(_parts, 3, kernels, hidden))


# ---- experts


def _moe(shape: moe_spec.Shape, given: dict, most_few: int | None, device: str):
    """most_few: rows above which the kernels for many are taken; None: the operator's own."""
    inputs = moe_spec.make_inputs(shape, seed=shape.rows, device=device)
    known = mxfp4_moe.DECODE_ROWS
    mxfp4_moe.DECODE_ROWS = known if most_few is None else most_few
    try:
        out = mxfp4_moe.mxfp4_moe(**inputs.arguments(), **given)
    finally:
        mxfp4_moe.DECODE_ROWS = known
    mxfp8 = given.get("activations") == "mxfp8"

    def judge():
        truth = moe_reference.mxfp4_moe(**inputs.arguments(), **({"activations": "mxfp8"} if mxfp8 else {}))
        within(relative_error(out, truth), bounds.MXFP4_MOE_MXFP8_ROUNDED if mxfp8 else bounds.MXFP4_MOE.truth)

    return judge


def _add_shared(device: str):
    shared, routed = (torch.randn(3, 4096, generator=_generator(device, n), device=device).bfloat16() for n in (1, 2))
    expected = shared.clone().add_(routed, alpha=1.5)
    mxfp4_moe.add_shared(shared, routed, scaling=1.5)
    return lambda: same(shared, expected, "the sum and torch's")


INTERS = (256, 384, 512, 768, 1024, 1536, 2048, 3072)


def _moe_calls() -> Iterator[tuple[str, moe_spec.Shape, dict, int | None]]:
    two = {"experts": 2, "topk": 2}
    for inter in INTERS:
        for name, given in (("", {}), (", exact", {"reproducible": True})):
            yield f"one row, inter {inter}{name}", moe_spec.Shape(1, inter=inter, **two), given, None
    for name, given in (("", {}), (", exact", {"reproducible": True})):
        yield f"one row, Pro{name}", moe_spec.Shape(1, hidden=7168, inter=256, **two), given, None
        for inter in INTERS:
            yield f"3 rows, inter {inter}{name}", moe_spec.Shape(3, inter=inter, masked=0.1, **two), given, None
        yield f"3 rows, Pro{name}", moe_spec.Shape(3, hidden=7168, inter=384, masked=0.1, **two), given, None
        for inter in (512, 1024, 2048):
            yield f"70 rows, inter {inter}{name}", moe_spec.Shape(70, inter=inter, experts=2, ids="few"), given, None
        few = moe_spec.Shape(70, inter=256, experts=8, masked=0.1)
        yield f"70 rows{name}", few, given, None
        yield f"70 rows, as a prompt's{name}", few, given, 0
    prompt = moe_spec.Shape(40, hidden=768, inter=896, experts=4, topk=2, masked=0.1, wide_scales=True)
    yield "40 rows, wide", prompt, {}, None
    yield "40 rows, MXFP8", prompt, {"activations": "mxfp8"}, None


def _moe_cases() -> Iterator[Case]:
    for name, shape, given, most_few in _moe_calls():
        yield Case(name, functools.partial(_moe, shape, given, most_few))
    yield Case("shared expert added", _add_shared)


OPERATORS: dict[str, Callable[[], Iterator[Case]]] = {
    "sparse_decode": _attention_cases,
    "mxfp4_moe": _moe_cases,
    "index_select": _index_cases,
    "compressor": _compressor_cases,
    "mhc": _mhc_cases,
    "fp8_linear": _fp8_cases,
    "wo_a": _wo_a_cases,
    "bf16_linear": _bf16_cases,
    "router_topk": _router_cases,
}


# ---- a process of one operator


def run(case: Case, device: str, *, judged: bool = True) -> None:
    with multiprocessors(case.multiprocessors):
        judge = case.run(device)
        if device == "cuda":
            torch.cuda.synchronize()
        if judged and judge is not None:
            judge()


def short(tensor: torch.Tensor, missing: int) -> torch.Tensor:
    """The same shape on memory that ends so many bytes early: what a planted fault reads past."""
    memory = torch.empty(tensor.nbytes - missing, dtype=torch.uint8, device=tensor.device)
    memory.copy_(tensor.view(torch.uint8).flatten()[:-missing])
    shape = (*tensor.shape[:-1], tensor.shape[-1] * tensor.element_size())

    class Array:
        """Says that it is longer than it is."""

        kept = memory
        __cuda_array_interface__ = {"shape": shape, "typestr": "|u1", "data": (memory.data_ptr(), False), "version": 3}

    longer = torch.as_tensor(Array(), device=tensor.device).view(tensor.dtype)
    longer.memory = memory
    return longer


def _plant(operator: str, fault: str) -> None:
    """A call with weights that end early, or that nobody has written: to be reported of this operator's kernel."""
    assert operator in PLANTED
    x, weight = (torch.randn(n, 512, device="cuda").bfloat16() for n in (1, 64))
    bf16_linear.bf16_linear(x, short(weight, 64) if fault == "short" else torch.empty_like(weight))
    torch.cuda.synchronize()


PLANTED = ("bf16_linear",)


def _launched(run_all: Callable[[], None]) -> dict[str, int]:
    """How often each kernel was launched, by its name."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run_all()
        torch.cuda.synchronize()
    counts: dict[str, int] = {}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            counts[event.name] = counts.get(event.name, 0) + 1
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operator", choices=OPERATORS)
    parser.add_argument(
        "--out", type=Path, help="a file for what ran: cases, failures, which is under way, and kernels with --kernels"
    )
    parser.add_argument("--only", nargs="+", metavar="CASE", help="these alone, by their names (default: all)")
    parser.add_argument("--kernels", action="store_true", help="list launched kernels; without a tool only")
    parser.add_argument("--unjudged", action="store_true", help="without the references")
    parser.add_argument("--plant", choices=("short", "unwritten"), help="one call with this fault instead")
    options = parser.parse_args()
    if options.plant:
        _plant(options.operator, options.plant)
        return 0
    made = list(OPERATORS[options.operator]())
    if unknown := set(options.only or ()) - {case.name for case in made}:
        parser.error(f"{options.operator} has no {', '.join(sorted(unknown))}")
    done, failures = [], {}

    def tell(under_way: str | None, kernels: dict[str, int] | None = None) -> None:
        """Before each call, as what ends a process may leave it no time for another word."""
        if options.out:
            told = {"done": done, "failures": failures, "under_way": under_way, "kernels": kernels}
            part = options.out.with_suffix(".part")
            part.write_text(json.dumps(told))
            part.replace(options.out)

    def run_all():
        for case in made:
            if options.only and case.name not in options.only:
                continue
            tell(case.name)
            try:
                run(case, "cuda", judged=not options.unjudged)
                done.append(case.name)
            except Failure as failure:
                failures[case.name] = str(failure)
            except Exception as error:  # the others still run, unless the device is lost
                failures[case.name] = f"{type(error).__name__}: {error}".splitlines()[0]

    tell(None, _launched(run_all) if options.kernels else run_all())
    for name, text in failures.items():
        print(f"{options.operator}, {name}: {text}", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
