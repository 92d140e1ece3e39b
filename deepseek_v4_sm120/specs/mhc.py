"""What mhc is measured by: a whole boundary between two sublayers, which a layer calls twice; sizes are every rank's.

Stock follows SGLang's defaults: its fused boundary from 0.5.18 on; before that post and pre, in TileLang with the norm,
or, on SM120, post in TileLang and pre in torch with an RMSNorm behind it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from deepseek_v4_sm120.commands.plan.models import FLASH
from deepseek_v4_sm120.ops import mhc as op
from deepseek_v4_sm120.ops.all_reduce import TRANSPORTS
from deepseek_v4_sm120.ops.shared import cuda_tensors, extension
from deepseek_v4_sm120.reference import mhc as reference
from deepseek_v4_sm120.reference.accuracy import relative_error, strict_error
from deepseek_v4_sm120.reference.all_reduce import all_reduce as sum_of_ranks
from deepseek_v4_sm120.reference.mhc import EPS, MIXES, POST_SCALE, SINKHORN_ITERS, STREAMS, sinkhorn
from deepseek_v4_sm120.specs import all_reduce, bounds
from deepseek_v4_sm120.specs.check import ON_GPU, Check, Failure, NotRun, same, within
from deepseek_v4_sm120.specs.provider import (
    OURS,
    STOCK,
    Provider,
    first_installed,
    is_sm120,
    our_problem,
    rows_of,
    set_up_deep_gemm,
    sglang_version,
)

MOST_ROWS = 64  # of a decode step
MIX_SCALE = 2.0  # of what is checked: so far from doubly stochastic that an eps, or an iteration, left out shows
PREFILL_ROWS = 2048
# A coefficient's error counts so many times for ours: what it may be is that much less
COEFFICIENTS_COUNT = round(bounds.MHC.truth / bounds.MHC_COEFFICIENTS)
ERROR = (
    "greatest relative error of streams, post, comb and y against float64; "
    f"of ours, post's and comb's count {COEFFICIENTS_COUNT} times"
)

HOMES = ("sglang.kernels.ops.layernorm.mhc", "sglang.srt.layers.mhc")
FUSED, FUSED_SINCE, FUSED_BY_DEFAULT_SINCE = "fused", (0, 5, 13), (0, 5, 18)
# what SGLang sets on SM120 when a server starts
ON_SM120 = {"SGLANG_OPT_USE_TILELANG_MHC_PRE": "0", "SGLANG_OPT_DEEPGEMM_HC_PRENORM": "0"}
# what these kernels' wrappers ask of a server, and the answers of one rank without parallelism
WITHOUT_SERVER = {
    "use_symmetric_memory": lambda *_, **__: contextlib.nullcontext(),
    "is_allocation_symmetric": lambda: False,
    "get_tp_group": lambda: None,
    "get_parallel": lambda: SimpleNamespace(tp_group=None),
    "is_dsa_prefill_cp_round_robin_split": lambda: False,
    "is_nsa_prefill_cp_round_robin_split": lambda: False,
}


# ---- inputs


@dataclass(frozen=True)
class Shape:
    """`x_scale`: of the streams and of the sublayer's output. `mix_scale`: of the logits behind sigmoid and softmax."""

    rows: int
    hidden: int = FLASH.hidden
    x_scale: float = 1.0
    mix_scale: float = 1.0


@dataclass
class Inputs:
    f: torch.Tensor
    streams: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    fn: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor
    norm_weight: torch.Tensor
    head_fn: torch.Tensor
    head_scale: torch.Tensor
    head_base: torch.Tensor

    def boundary(self) -> dict:
        names = ("f", "streams", "post", "comb", "fn", "scale", "base", "norm_weight")
        return {name: getattr(self, name) for name in names}

    def pre(self) -> dict:
        return {name: getattr(self, name) for name in ("streams", "fn", "scale", "base", "norm_weight")}

    def post_only(self) -> dict:
        return {name: getattr(self, name) for name in ("f", "streams", "post", "comb")}

    def head(self) -> dict:
        return {"streams": self.streams, "fn": self.head_fn, "scale": self.head_scale, "base": self.head_base}


def make_inputs(shape: Shape, seed: int = 0, device: str | torch.device = "cuda") -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size, scale=1.0):
        return torch.randn(size, generator=generator, device=device) * scale

    rows, hidden = shape.rows, shape.hidden
    # the streams share a part, as a residual's copies do, so that their sums do not cancel
    common = normal(rows, 1, hidden)
    streams = (common + 0.5 * normal(rows, STREAMS, hidden)) * shape.x_scale
    width = (STREAMS * hidden) ** -0.5
    return Inputs(
        f=normal(rows, hidden, scale=shape.x_scale).to(torch.bfloat16),
        streams=streams.to(torch.bfloat16),
        post=2 * torch.sigmoid(normal(rows, STREAMS)),
        comb=sinkhorn(normal(rows, STREAMS, STREAMS).double()).float(),
        fn=normal(MIXES, STREAMS * hidden, scale=width),
        scale=(1.0 + 0.2 * normal(3)) * shape.mix_scale,
        base=normal(MIXES),
        norm_weight=(1.0 + 0.1 * normal(hidden)).to(torch.bfloat16),
        head_fn=normal(STREAMS, STREAMS * hidden, scale=width),
        head_scale=(1.0 + 0.2 * normal(1)) * shape.mix_scale,
        head_base=normal(STREAMS),
    )


def make_terms(inputs: Inputs, ranks: int, seed: int = 0) -> list[torch.Tensor]:
    """What as many cards add up to an f like the inputs': bf16, one a card."""
    generator = torch.Generator(inputs.f.device).manual_seed(seed)
    scale = inputs.f.float().std() * ranks**-0.5
    shape, device = inputs.f.shape, inputs.f.device
    return [(torch.randn(shape, generator=generator, device=device) * scale).bfloat16() for _ in range(ranks)]


OUTPUTS = ("streams", "post", "comb", "y")  # of a boundary
FORMS = ("routed", "unmerged")  # of terms whose last addition is left to the boundary


def leave_additions(form: str, terms: list[torch.Tensor], seed: int = 0) -> tuple[list[tuple], list[torch.Tensor]]:
    """([(f, options of ops.mhc)], what they are when added: bf16, by torch), one of each a card."""
    generator = torch.Generator(terms[0].device).manual_seed(seed)
    shape, device = (op.TERM_SPLITS, *terms[0].shape), terms[0].device
    others = [torch.randn(shape, generator=generator, device=device) for _ in terms]
    if form == "unmerged":
        parts = [other * term.float() for other, term in zip(others, terms, strict=True)]
        return [(one, {}) for one in parts], [((a + b) + (c + d)).bfloat16() for a, b, c, d in parts]
    routed, scaling = [other[0].bfloat16() for other in others], 1.5
    given = [(term, {"routed": one, "scaling": scaling}) for term, one in zip(terms, routed, strict=True)]
    return given, [term.add(one, alpha=scaling) for term, one in zip(terms, routed, strict=True)]


# ---- self-test


def checks(quick: bool) -> Iterator[Check]:
    yield Check("mhc", "two references", _check_references)
    for rows in (1, 64, 200) if quick else (1, 8, 64, 200, 1000):
        yield Check("mhc", f"{rows} rows", functools.partial(_check_rows, rows), ON_GPU)
    yield Check("mhc", "a row alone and among others", _check_invariance, ON_GPU)
    yield Check("mhc", "post, pre and head", _check_parts, ON_GPU)
    yield Check("mhc", "a last addition that the boundary makes", _check_additions, ON_GPU)
    for transport in TRANSPORTS:
        run = functools.partial(_check_sum, transport)
        yield Check("mhc", f"with a sum of two ranks on one card, {transport} memory", run, ON_GPU)


def _check_references() -> str:
    """Loops and divided matrices against whole products and scalings."""
    inputs = make_inputs(Shape(3, hidden=512), device="cpu")
    one, other = reference.mhc(**inputs.boundary()), reference.mhc_by_products(**inputs.boundary())
    worst = max(relative_error(getattr(other, name), getattr(one, name)) for name in ("post", "comb"))
    return within(worst, bounds.REFERENCES_AGREE, "relative difference")


def _check_rows(rows: int) -> str:
    """A whole boundary against float64."""
    inputs = make_inputs(Shape(rows, mix_scale=MIX_SCALE))
    found = errors(inputs, op.mhc(**inputs.boundary()))
    return ", ".join(within(value, ALLOWED[name], f"relative error of {name}") for name, value in found.items())


def _check_invariance() -> str:
    rows = op.MANY_ROWS + 63
    inputs = make_inputs(Shape(rows)).boundary()
    together = op.mhc(**inputs)
    for row in (0, 17, rows - 1):
        alone = {name: inputs[name][row : row + 1] for name in ("f", "streams", "post", "comb")}
        for one, all_rows in zip(op.mhc(**{**inputs, **alone}), together, strict=True):
            same(one[0], all_rows[row], f"row {row} alone and among {rows}")
    return f"equal, bit by bit, among {rows}"


def _check_additions() -> str:
    """Of one card: f's parts, and the routed experts', added where they are read, against a boundary of what torch
    adds."""
    inputs = make_inputs(Shape(4))
    if not op.takes_own_terms(inputs.f):
        raise NotRun("too few multiprocessors for the blocks of a boundary that adds")
    for form in FORMS:
        [(f, further)], [added] = leave_additions(form, [inputs.f])
        expected = op.mhc(**inputs.boundary() | {"f": added})
        for name, one, other in zip(OUTPUTS, op.mhc(**inputs.boundary() | {"f": f}, **further), expected, strict=True):
            same(one, other, f"{name} of a boundary that adds what is {form}")
    return "equal, bit by bit, to a boundary behind the addition"


def _check_parts() -> str:
    """Post and pre by themselves against a boundary, all bits; the head against float64."""
    for rows in (8, 200):
        inputs = make_inputs(Shape(rows))
        streams, post, comb, y = op.mhc(**inputs.boundary())
        same(op.mhc_post(**inputs.post_only()), streams, f"{rows} rows: streams of a post and of a boundary")
        parts = op.mhc_pre(**{**inputs.pre(), "streams": streams})
        for name, one, other in zip(OUTPUTS[1:], parts, (post, comb, y), strict=True):
            same(one, other, f"{rows} rows: {name} of a pre and of a boundary")
        head = {**inputs.head(), "norm_weight": inputs.norm_weight}
        of_last = {name: getattr(inputs, name) for name in ("f", "post", "comb")}
        found = op.mhc_head(**head, **of_last)
        same(found[0], streams, f"{rows} rows: streams of a head and of a boundary")
        head["streams"] = streams
        same(op.mhc_head(**head), found[1], f"{rows} rows: a head alone and behind its post")
        error = within(strict_error(found[1], reference.mhc_head(**head)), bounds.MHC.truth, "relative error of y")
    return f"parts equal the whole, bit by bit; head: {error}"


def _boundary(inputs: Inputs, term: tuple, sum_over, *, kernels: str):
    f, left = term
    return op.mhc(**{**inputs.boundary(), "f": f}, sum_over=sum_over, kernels=kernels, **left)


def _check_sum(transport: str) -> str:
    """The kernel that sums on its way against a sum and a boundary, all bits."""
    half = cuda_tensors.num_sms(torch.cuda.current_device()) // 2  # both ranks' blocks are resident together
    all_rows = [rows for rows in (1, 8, 16) if extension.load().mhc_fits_summing(rows=rows, num_sms=half)]
    if not all_rows:
        raise NotRun("too few multiprocessors for two ranks' blocks at once")
    group = all_reduce.in_threads(2, transport=transport)
    streams = [torch.cuda.Stream() for _ in group]
    for rows in all_rows:
        inputs = make_inputs(Shape(rows))
        terms = make_terms(inputs, 2)
        call = functools.partial(_boundary, inputs, kernels="fused")
        whole = "whole", ([(term, {}) for term in terms], terms)
        for form, (given, added) in (whole, *((form, leave_additions(form, terms)) for form in FORMS)):
            expected = _boundary(inputs, (sum_of_ranks(added), {}), None, kernels="split")
            for _ in range(3):
                found = all_reduce.summed(group, given, streams, call=call)
                pairs = [pair for of_rank in found for pair in zip(of_rank, expected, strict=True)]
                equal = all(torch.equal(*pair) for pair in pairs)  # waits
                if fault := next(filter(None, (one.fault() for one in group)), None):
                    raise Failure(fault)
                for pair in () if equal else pairs:
                    same(*pair, f"{rows} rows, terms {form}: a boundary with a sum, and one behind it,")
    for one in group:
        one.close()
    return f"rows {all_rows}: equal, bit by bit"


# ---- calibrate: the shapes of a plan


@dataclass(frozen=True)
class Case:
    rows: int

    @property
    def name(self) -> str:
        return f"boundary, {self.rows} rows"

    @property
    def bytes_per_call(self) -> int:
        """Once each: f, old and new streams, y; post and comb in and out; fn."""
        streams, hidden = FLASH.streams, FLASH.hidden
        row = (2 * streams + 2) * hidden * 2 + 2 * streams * (1 + streams) * 4
        return self.rows * row + streams * (2 + streams) * streams * hidden * 4


def cases(*, tp: int, context: int, concurrency: int, quick: bool) -> list[Case]:
    """A decode step's rows, and a prefill chunk's."""
    return [Case(rows) for rows in (*rows_of(concurrency, quick, MOST_ROWS), PREFILL_ROWS)]


def max_error(provider: str, case: Case) -> float:
    return bounds.MHC.truth if provider == OURS else bounds.MHC.others


def correctness_inputs(case: Case, device: str = "cuda") -> list:
    """Streams of ordinary size, and large ones."""
    shapes = [Shape(case.rows, x_scale=scale, mix_scale=MIX_SCALE) for scale in (1.0, 30.0)]
    return [make_inputs(shape, seed=case.rows, device=device) for shape in shapes]


class TimingInputs:
    """Weights, streams and sublayer output of its own for every call."""

    def __init__(self, device: str = "cuda"):
        self.device = device

    def calls(self, case: Case, count: int) -> list:
        return [make_inputs(Shape(case.rows), seed=seed, device=self.device) for seed in range(count)]


ALLOWED = {
    "streams": bounds.MHC.truth,
    "post": bounds.MHC_COEFFICIENTS,
    "comb": bounds.MHC_COEFFICIENTS,
    "y": bounds.MHC.truth,
}


def errors(inputs: Inputs, result, rows: int | None = None, of=strict_error) -> dict[str, float]:
    """Of the first rows of (streams, post, comb, y). What follows the streams is judged by those that result has."""
    streams, post, comb, y = (part[:rows] for part in result)
    weights = {name: getattr(inputs, name) for name in ("fn", "scale", "base", "norm_weight")}
    true_y, true_post, true_comb = reference.mhc_pre(streams, **weights)
    true_streams = reference.mhc_post(**{name: value[:rows] for name, value in inputs.post_only().items()})
    return {
        "streams": of(streams, true_streams),
        "post": of(post.view_as(true_post), true_post),
        "comb": of(comb.view_as(true_comb), true_comb),
        "y": of(y, true_y),
    }


def error(provider: str, result, inputs: Inputs) -> float:
    of, count = (strict_error, COEFFICIENTS_COUNT) if provider == OURS else (relative_error, 1)
    found = errors(inputs, result, of=of)
    return max(value * (count if name in ("post", "comb") else 1) for name, value in found.items())


# ---- who computes it


def providers() -> tuple[Provider, ...]:
    return (
        Provider(OURS, our_problem, _ours),
        Provider(STOCK, _stock_problem, _stock, packages=("sglang",)),
        Provider(FUSED, _fused_problem, _fused, packages=("sglang",)),
        Provider("torch", lambda: None, lambda: lambda inputs: torch_boundary(**inputs.boundary())),
    )


def _ours():
    return lambda inputs: op.mhc(**inputs.boundary())


def torch_boundary(f, streams, post, comb, fn, scale, base, norm_weight):
    """The operator in float32 torch, each operation its own kernel."""
    new = post[:, :, None] * f[:, None].float() + (comb[:, :, :, None] * streams[:, :, None].float()).sum(1)
    new = new.to(torch.bfloat16)
    x = new.flatten(1).float()
    mixes = torch.nn.functional.linear(x, fn) * torch.rsqrt(x.square().mean(1, keepdim=True) + EPS)
    pre = torch.sigmoid(mixes[:, :4] * scale[0] + base[:4]) + EPS
    new_post = POST_SCALE * torch.sigmoid(mixes[:, 4:8] * scale[1] + base[4:8])
    new_comb = sinkhorn((mixes[:, 8:] * scale[2] + base[8:]).view(-1, STREAMS, STREAMS))
    y = (pre[:, :, None] * x.view(new.shape)).sum(1)
    y = y * torch.rsqrt(y.square().mean(1, keepdim=True) + EPS) * norm_weight.float()
    return new, new_post, new_comb, y.to(torch.bfloat16)


def _stock_problem() -> str | None:
    return None if first_installed(HOMES) else "this SGLang has no hyper-connections"


def _is_fused_by_default() -> bool:
    return (sglang_version() or FUSED_BY_DEFAULT_SINCE) >= FUSED_BY_DEFAULT_SINCE


def _fused_problem() -> str | None:
    if (sglang_version() or FUSED_SINCE) < FUSED_SINCE:
        return "this SGLang has no fused boundary"
    return "is what stock runs here" if _is_fused_by_default() else _stock_problem()


def _kernels():
    """SGLang's module, with answers for what it asks of a server."""
    if is_sm120():
        for name, value in ON_SM120.items():
            os.environ.setdefault(name, value)
    set_up_deep_gemm()
    module = importlib.import_module(first_installed(HOMES))
    for name in WITHOUT_SERVER.keys() & vars(module).keys():
        setattr(module, name, WITHOUT_SERVER[name])
    return module


def _stock():
    if _is_fused_by_default():
        return _fused()
    kernels = _kernels()
    return _torch_pre(kernels) if is_sm120() else _tilelang_pre(kernels)


# rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat
NUMBERS = (EPS, EPS, EPS, POST_SCALE, SINKHORN_ITERS)


def _fused():
    kernels = _kernels()

    def call(i):
        arguments = (i.f, i.streams, i.post.unsqueeze(-1), i.comb, i.fn, i.scale, i.base, *NUMBERS)
        return kernels.mhc_fused_post_pre(*arguments, norm_weight=i.norm_weight, norm_eps=NUMBERS[0])

    return call


def _tilelang_pre(kernels):
    def call(i):
        streams = kernels.mhc_post(i.f, i.streams, i.post, i.comb)
        norm = {"norm_weight": i.norm_weight, "norm_eps": NUMBERS[0]}
        return streams, *kernels.mhc_pre(streams, i.fn, i.scale, i.base, *NUMBERS, **norm)

    return call


def _torch_pre(kernels):
    """As DeepseekV4DecoderLayer.hc_pre with both TileLang's pre and DeepGEMM's product off; compiled as for a graph."""
    from sgl_kernel import rmsnorm

    eps, _, hc_eps, _, iterations = NUMBERS

    @torch.compile
    def mixes_of(streams, fn):
        flat = streams.flatten(1).float()
        root = torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
        return flat, (torch.nn.functional.linear(flat, fn) * root).unsqueeze(1)

    def call(i):
        streams = kernels.mhc_post(i.f, i.streams, i.post, i.comb)
        flat, mixes = mixes_of(streams, i.fn)
        pre, post, comb = kernels.hc_split_sinkhorn(mixes, i.scale, i.base, FLASH.streams, iterations, hc_eps)
        y = (pre.squeeze(1).unsqueeze(-1) * flat.view(streams.shape)).sum(dim=1).to(streams.dtype)
        return streams, post.squeeze(1), comb.squeeze(1), rmsnorm(y, i.norm_weight, eps)

    return call
