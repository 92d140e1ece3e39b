"""mhc for `calibrate`: a whole boundary between two sublayers, as a layer calls it twice; all sizes are every rank's.

What is compared follows SGLang's defaults: its fused boundary from 0.5.18 on; before that post and pre, in TileLang
with the norm, or, on SM120, post in TileLang and pre in torch with an RMSNorm behind it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from dataclasses import dataclass
from types import SimpleNamespace

from deepseek_v4_sm120.calibrate.provider import (
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
from deepseek_v4_sm120.plan.models import FLASH

MOST_ROWS = 64  # of a decode step
PREFILL_ROWS = 2048
LOOSE_ERROR = 0.01  # TF32 mixes give about 0.001 more than the rounding to bf16
# A coefficient's error counts so many times for ours: what it may be is that much less (reference/mhc.py)
COEFFICIENTS_COUNT = 500
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
    from deepseek_v4_sm120.reference.mhc import MAX_ERROR_BF16

    return MAX_ERROR_BF16 if provider == OURS else LOOSE_ERROR


def providers() -> tuple[Provider, ...]:
    return (
        Provider(OURS, our_problem, _ours),
        Provider(STOCK, _stock_problem, _stock, packages=("sglang",)),
        Provider(FUSED, _fused_problem, _fused, packages=("sglang",)),
        Provider("torch", lambda: None, lambda: lambda inputs: torch_boundary(**inputs.boundary())),
    )


# ---- inputs


def correctness_inputs(case: Case, device: str = "cuda") -> list:
    """Streams of ordinary size, and large ones."""
    from deepseek_v4_sm120.reference.mhc_inputs import Shape, make_inputs

    return [make_inputs(Shape(case.rows, x_scale=scale), seed=case.rows, device=device) for scale in (1.0, 30.0)]


class TimingInputs:
    """Weights, streams and sublayer output of its own for every call."""

    def __init__(self, device: str = "cuda"):
        self.device = device

    def calls(self, case: Case, count: int) -> list:
        from deepseek_v4_sm120.reference.mhc_inputs import Shape, make_inputs

        return [make_inputs(Shape(case.rows), seed=seed, device=self.device) for seed in range(count)]


def error(provider: str, result, inputs) -> float:
    """result: (streams, post, comb, y). The second half is judged by the streams that the first one gave."""
    from deepseek_v4_sm120.reference import mhc as reference
    from deepseek_v4_sm120.reference.accuracy import relative_error

    streams, post, comb, y = result
    weights = {name: getattr(inputs, name) for name in ("fn", "scale", "base", "norm_weight")}
    true_y, true_post, true_comb = reference.mhc_pre(streams, **weights)
    count = COEFFICIENTS_COUNT if provider == OURS else 1
    errors = (
        relative_error(streams, reference.mhc_post(**inputs.post_only())),
        relative_error(y, true_y),
        count * relative_error(post.view_as(true_post), true_post),
        count * relative_error(comb.view_as(true_comb), true_comb),
    )
    return max(errors)


# ---- providers


def _ours():
    from deepseek_v4_sm120.ops.mhc import mhc

    return lambda inputs: mhc(**inputs.boundary())


def torch_boundary(f, streams, post, comb, fn, scale, base, norm_weight):
    """The operator in float32 torch, each operation its own kernel."""
    import torch

    from deepseek_v4_sm120.reference.mhc import EPS, POST_SCALE, STREAMS, sinkhorn

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
    version = sglang_version()
    return version is not None and version >= FUSED_BY_DEFAULT_SINCE


def _fused_problem() -> str | None:
    if (sglang_version() or (0,)) < FUSED_SINCE:
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


def _numbers() -> tuple:
    """rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat"""
    from deepseek_v4_sm120.reference.mhc import EPS, POST_SCALE, SINKHORN_ITERS

    return EPS, EPS, EPS, POST_SCALE, SINKHORN_ITERS


def _fused():
    kernels, numbers = _kernels(), _numbers()

    def call(i):
        arguments = (i.f, i.streams, i.post.unsqueeze(-1), i.comb, i.fn, i.scale, i.base, *numbers)
        return kernels.mhc_fused_post_pre(*arguments, norm_weight=i.norm_weight, norm_eps=numbers[0])

    return call


def _tilelang_pre(kernels):
    numbers = _numbers()

    def call(i):
        streams = kernels.mhc_post(i.f, i.streams, i.post, i.comb)
        norm = {"norm_weight": i.norm_weight, "norm_eps": numbers[0]}
        return streams, *kernels.mhc_pre(streams, i.fn, i.scale, i.base, *numbers, **norm)

    return call


def _torch_pre(kernels):
    """As DeepseekV4DecoderLayer.hc_pre with both TileLang's pre and DeepGEMM's product off; compiled as for a graph."""
    import torch
    from sgl_kernel import rmsnorm

    eps, _, hc_eps, _, iterations = _numbers()

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
