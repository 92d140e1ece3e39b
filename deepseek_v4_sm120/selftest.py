"""`python3 -m deepseek_v4_sm120 selftest`: every operator against its reference on this machine, GPU or not.

Prints one line per check: PASS, FAIL, or NOT RUN and why. Exit status 1 when anything failed. `--quick` leaves out the
larger shapes, `--json` prints the same for a program.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from deepseek_v4_sm120 import OPS, __version__, extension
from deepseek_v4_sm120.patching import report

PASS, FAIL, NOT_RUN = "PASS", "FAIL", "NOT RUN"
ON_GPU = ("torch", "module", "GPU")


class Failure(Exception):
    """What a check found wrong."""


@dataclass(frozen=True)
class Check:
    """One line of the table. `run` returns a detail or raises Failure."""

    operator: str
    name: str
    run: Callable[[], str]
    needs: tuple[str, ...] = ("torch",)


@dataclass(frozen=True)
class Outcome:
    operator: str
    check: str
    result: str
    detail: str
    seconds: float


def checks(quick: bool) -> Iterator[Check]:
    """All checks in the order in which they are run."""
    yield Check("build", "compiled module", _check_build, ("module",))
    yield Check("build", "kernels on this GPU", _check_kernels, ON_GPU)
    yield Check("kv_page_layout", "compiled against reference", _check_layout, ("torch", "module"))
    yield Check("kv_page_layout", "golden page", _check_golden_page)
    for operator in OPS:
        yield from CHECKS_OF[operator](quick)


# ---- build and page layout


def _check_build() -> str:
    info = extension.build_info()
    source = f"version {info['version']}, commit {info['git_commit']}"
    return f"{source}, CUDA {info['cuda_version']}, for {' '.join(info['archs'])}"


def _check_kernels() -> str:
    import torch

    kernels = extension.load().kernel_attributes()
    if not kernels:
        raise Failure("the module names no kernel")
    spilled = [kernel["name"] for kernel in kernels if kernel["local_bytes"]]
    if spilled:
        raise Failure(f"kernels with local memory (spills): {', '.join(spilled)}")
    blocks = min(kernel["blocks_per_sm"] for kernel in kernels)
    registers = max(kernel["registers"] for kernel in kernels)
    return (
        f"{torch.cuda.get_device_name()}: {len(kernels)} kernels, <= {registers} registers, >= {blocks} blocks per SM"
    )


def _check_layout() -> str:
    from deepseek_v4_sm120.kv_page_layout import kv_page_layout
    from deepseek_v4_sm120.reference import kv_pages

    layout = kv_page_layout()
    own_reading = {
        "nope_dim": kv_pages.NOPE_DIM,
        "rope_dim": kv_pages.ROPE_DIM,
        "head_dim": kv_pages.HEAD_DIM,
        "data_bytes": kv_pages.DATA_BYTES,
        "scale_bytes": kv_pages.SCALE_BYTES,
        "token_bytes": kv_pages.TOKEN_BYTES,
        "tile_dim": kv_pages.TILE_DIM,
        "page_align": kv_pages.PAGE_ALIGN,
    }
    wrong = [
        f"{name} {getattr(layout, name)}, not {value}"
        for name, value in own_reading.items()
        if getattr(layout, name) != value
    ]
    for page_size in (256, 64, 2):
        if layout.page_bytes(page_size) != kv_pages.page_bytes(page_size):
            wrong.append(
                f"page_bytes({page_size}) {layout.page_bytes(page_size)}, not {kv_pages.page_bytes(page_size)}"
            )
    if wrong:
        raise Failure("; ".join(wrong))
    return f"{layout.token_bytes} bytes a token, 256-token pages of {layout.page_bytes(256)} bytes"


GOLDEN_VALUES = (
    (0, 448.0),
    (1, 1.0),
    (64, 449.0),
    (65, -1.0),
    (128, 1e-4),
    (192, 17.0),
    (193, 448.0),
    (448, 1.0),
    (449, -2.0),
)
GOLDEN_BYTES = (
    (0, "7E 38"),
    (64, "76 B0"),
    (128, "7D"),
    (192, "58 7E"),
    (448, "80 3F 00 C0"),
    (576, "7F 80 69 7F 69 69 69 EE"),
)


def _check_golden_page() -> str:
    """A one-token page worked out by hand: rounding to even, round-up scales, the floor, untouched pad bytes."""
    import torch

    from deepseek_v4_sm120.reference import kv_pages

    row = torch.zeros(1, kv_pages.HEAD_DIM)
    for column, value in GOLDEN_VALUES:
        row[0, column] = value
    expected = bytearray(576) + bytearray([0xEE]) * 576
    for offset, text in GOLDEN_BYTES:
        expected[offset : offset + len(bytes.fromhex(text))] = bytes.fromhex(text)
    page = kv_pages.pack_rows(row, 1, fill=0xEE)
    got = bytes(page.as_strided((page.stride(0),), (1,)).tolist())
    wrong = [
        f"byte {at}: {got[at]:02X}, not {expected[at]:02X}" for at in range(len(expected)) if got[at] != expected[at]
    ]
    if wrong:
        raise Failure("; ".join(wrong[:4]))
    back = kv_pages.read_rows(page, torch.tensor([0]))[0, [0, 64, 192, 448, 449]].tolist()
    if back != [448.0, 448.0, 16.0, 1.0, -2.0]:
        raise Failure(f"reads back as {back}")
    return f"{len(expected)} bytes as worked out by hand"


# ---- sparse_decode

SPARSE_DECODE_EXTRAS = {
    "window": None,
    "C4": {"page_size": 64, "width": 512, "lengths": 512},
    "C128 at 8K, captured for 1M": {"page_size": 2, "width": 8192, "lengths": 64, "ascending": True},
    "C128 at 512K": {"page_size": 2, "width": 4096, "lengths": 4096, "ascending": True},
}


def _sparse_decode_checks(quick: bool) -> Iterator[Check]:
    yield Check("sparse_decode", "two references", functools.partial(_check_two_references, quick))
    for name, extra in SPARSE_DECODE_EXTRAS.items():
        if not (quick and name == "C128 at 512K"):
            yield Check("sparse_decode", name, functools.partial(_check_sparse_decode, extra, quick), ON_GPU)
    yield Check("sparse_decode", "C128 by page table", _check_page_table, ON_GPU)
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


# ---- index_select


def _index_select_checks(quick: bool) -> Iterator[Check]:
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


# ---- mxfp4_moe


def _mxfp4_moe_checks(quick: bool) -> Iterator[Check]:
    yield Check("mxfp4_moe", "two references", _check_two_expert_references, ("torch",))
    for rows in (1, 8, 64) if quick else (1, 8, 64, 128, 1000):
        run = functools.partial(_check_mxfp4_moe, rows, "bf16")
        yield Check("mxfp4_moe", f"{rows} rows", run, (*ON_GPU, "triton") if rows > 128 else ON_GPU)
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


# ---- bf16_linear


def _bf16_linear_checks(quick: bool) -> Iterator[Check]:
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


# ---- mhc


def _mhc_checks(quick: bool) -> Iterator[Check]:
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


# ---- fp8_linear


def _fp8_linear_checks(quick: bool) -> Iterator[Check]:
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


CHECKS_OF: dict[str, Callable[[bool], Iterator[Check]]] = {
    "sparse_decode": _sparse_decode_checks,
    "index_select": _index_select_checks,
    "mxfp4_moe": _mxfp4_moe_checks,
    "bf16_linear": _bf16_linear_checks,
    "mhc": _mhc_checks,
    "fp8_linear": _fp8_linear_checks,
}


# ---- running and printing


def _missing() -> dict[str, tuple[str, str]]:
    """What the checks need and this machine lacks: name -> (result, reason)."""
    missing = {}
    if (problem := extension.explain()) is not None:
        missing["module"] = (FAIL, problem)
    if importlib.util.find_spec("torch") is None:
        return {**missing, "torch": (FAIL, f"torch is not installed for {sys.executable}")}
    import torch

    if importlib.util.find_spec("triton") is None:
        missing["triton"] = (FAIL, f"triton is not installed for {sys.executable}")
    if not torch.cuda.is_available():
        missing["GPU"] = (NOT_RUN, f"no GPU: torch {torch.__version__} sees no CUDA device")
    elif problem is None and (reason := _foreign_gpu()) is not None:
        missing["GPU"] = (NOT_RUN, reason)
    elif torch.cuda.get_device_capability()[0] != 12:
        missing["block-scaled FP8"] = (NOT_RUN, f"{torch.cuda.get_device_name()} has no block-scaled mma.sync")
    return missing


def _foreign_gpu() -> str | None:
    """Why this GPU cannot run the module, or None. sm_120a code runs on capability 12.0 alone, sm_90a on 9.0."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    built = extension.build_info()["archs"]
    if any(arch.removeprefix("sm_").rstrip("af") == f"{major}{minor}" for arch in built):
        return None
    return f"{torch.cuda.get_device_name()} has capability {major}.{minor}; the module is built for {' '.join(built)}"


def _run(check: Check, missing: dict[str, tuple[str, str]]) -> Outcome:
    for need in check.needs:
        if need in missing:
            return Outcome(check.operator, check.name, *missing[need], 0.0)
    start = time.perf_counter()
    try:
        result, detail = PASS, check.run()
    except Failure as failure:
        result, detail = FAIL, str(failure)
    except Exception as error:  # the table goes on; the error is its result
        result, detail = FAIL, f"{type(error).__name__}: {error}"
    return Outcome(check.operator, check.name, result, detail, round(time.perf_counter() - start, 3))


def _table(outcomes: list[Outcome]) -> str:
    rows = report.table([(o.operator, o.check, o.result, o.detail) for o in outcomes])
    counts = {result: sum(outcome.result == result for outcome in outcomes) for result in (PASS, FAIL, NOT_RUN)}
    total = ", ".join(f"{count} {result}" for result, count in counts.items())
    return f"deepseek_v4_sm120 {__version__} self-test\n{rows}\n{total}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m deepseek_v4_sm120 selftest", description=__doc__)
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.add_argument("--quick", action="store_true", help="without the larger shapes")
    arguments = parser.parse_args(argv)
    missing = _missing()
    outcomes = [_run(check, missing) for check in checks(arguments.quick)]
    if arguments.json:
        print(json.dumps({"version": __version__, "checks": [asdict(outcome) for outcome in outcomes]}, indent=1))
    else:
        print(_table(outcomes))
    return int(any(outcome.result == FAIL for outcome in outcomes))
