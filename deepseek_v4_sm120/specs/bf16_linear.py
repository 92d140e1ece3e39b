"""What bf16_linear is measured by: the bf16 projections of compressors, router and indexer, few rows.

A verdict of calibrate weighs each matrix by the layers that have it. Nothing of it is divided by TP.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from deepseek_v4_sm120.commands.plan.models import FLASH
from deepseek_v4_sm120.ops import bf16_linear as op
from deepseek_v4_sm120.ops import bf16_linear_draft_head as draft_head
from deepseek_v4_sm120.ops.shared import cuda_tensors
from deepseek_v4_sm120.ops.shared.limits import STEP_ROWS
from deepseek_v4_sm120.reference import bf16_linear as reference
from deepseek_v4_sm120.reference import bf16_linear_draft_head as draft_head_reference
from deepseek_v4_sm120.reference.accuracy import relative_error, strict_error
from deepseek_v4_sm120.specs import bounds
from deepseek_v4_sm120.specs.check import ON_GPU, Check, Failure, same, within
from deepseek_v4_sm120.specs.provider import (
    OURS,
    STOCK,
    Provider,
    error_of,
    first_installed,
    is_installed,
    our_problem,
    rows_of,
    unpatched,
)

ERROR = "relative error against float64"
# where two scores are alike another one may have been computed by the head: then it differs by the copy's rounding
DRAFT_HEAD_CHOSEN = 0.005

# SGLang's function for compressors and router, newest home first
LINEAR = "linear_bf16_fp32"
LINEAR_HOMES = (
    "sglang.kernels.ops.gemm.bf16_fp32",
    "sglang.kernels.ops.attention.dsv4.gemm",
    "sglang.jit_kernel.dsv4.gemm",
    "sglang.jit_kernel.deepseek_v4",
)
# What MoEGate.forward takes instead for few rows: 0.5.20 and later, then 0.5.16 to 0.5.19
TINY_GEMM = ("sglang.kernels.ops.gemm.tiny_gemm", "tiny_gemm_bf16")
TINY_GEMM_ROWS = ("sglang.srt.models.deepseek_common.utils", "tiny_router_gemm_max_tokens")
ROUTER_GEMM_HOMES = ("sglang.kernels.ops.gemm.dsv3_router_gemm", "sglang.jit_kernel.dsv3_router_gemm")  # from 0.5.15 on
ROUTER_GEMM = "dsv3_router_gemm"
ROUTER_GEMM_ROWS = 16


@dataclass(frozen=True)
class Matrix:
    """A weight [outputs, hidden] and how many layers have it."""

    name: str
    outputs: int
    layers: int
    bf16_out: bool = False


ROUTER, HEAD_WEIGHTS = "router", "index head weights"
# A compressor's kv and gate; C4 keeps two of each, because its windows overlap
MATRICES = (
    Matrix("C4 compressor", 4 * FLASH.head_dim, FLASH.layers_c4),
    Matrix("C128 compressor", 2 * FLASH.head_dim, FLASH.layers_c128),
    Matrix("index compressor", 4 * FLASH.index_dim, FLASH.layers_c4),
    Matrix(ROUTER, FLASH.experts, FLASH.layers),
    Matrix(HEAD_WEIGHTS, FLASH.index_heads, FLASH.layers_c4, bf16_out=True),
)


# ---- inputs


@dataclass
class Inputs:
    matrix: Matrix
    x: torch.Tensor  # [rows, hidden] bf16
    weight: torch.Tensor  # [outputs, hidden] bf16


def make_x(rows: int, generator: torch.Generator, *, hidden=FLASH.hidden, gap=0) -> torch.Tensor:
    """[rows, hidden] bf16, rows `gap` numbers apart."""
    x = torch.randn(rows, hidden + gap, generator=generator, device=generator.device).bfloat16()
    return x[:, :hidden]


def make_weight(outputs: int, generator: torch.Generator, *, hidden=FLASH.hidden) -> torch.Tensor:
    """[outputs, hidden] bf16."""
    return torch.randn(outputs, hidden, generator=generator, device=generator.device).bfloat16() * 0.02


def make_head(outputs: int, generator: torch.Generator, *, hidden=FLASH.hidden) -> tuple[torch.Tensor, torch.Tensor]:
    """(a head's weight, its copy for drafts)"""
    weight = make_weight(outputs, generator, hidden=hidden)
    copy = draft_head.empty(weight)
    draft_head.fill(weight, copy)
    return weight, copy


def others_than_the_heads(x: torch.Tensor, weight: torch.Tensor, copy: torch.Tensor) -> int:
    """Of the rows whose greatest logit the head has alone, by more than a sum's rounding, how many guess otherwise."""
    found, exact = draft_head.draft_head(x, copy, weight), reference.bf16_linear(x, weight)
    first, second = exact.topk(2).values.unbind(1)
    is_clear = first - second > 1e-4 * exact.abs().amax(1)
    return int(((found.argmax(1) != exact.argmax(1)) & is_clear).sum())


# ---- self-test


def checks(quick: bool) -> Iterator[Check]:
    yield Check("bf16_linear", "two references", _check_references)
    for outputs in (64, 2048):
        yield Check("bf16_linear", f"{outputs} outputs", functools.partial(_check_outputs, outputs), ON_GPU)
    yield Check("bf16_linear", "a head's outputs", _check_head, ON_GPU)
    yield Check("bf16_linear", "what drafts guess with", _check_draft_head, ON_GPU)


def _check_references() -> str:
    """A float64 product against exactly rounded sums."""
    generator = torch.Generator().manual_seed(1)
    x, weight = make_x(2, generator, hidden=512), make_weight(8, generator, hidden=512)
    difference = relative_error(reference.bf16_linear_by_sums(x, weight), reference.bf16_linear(x, weight))
    return within(difference, bounds.REFERENCES_AGREE, "relative difference")


def _check_outputs(outputs: int) -> str:
    """A step's most rows against float64; the bits of one row and of 40 among them."""
    generator = torch.Generator("cuda").manual_seed(outputs)
    x, weight = make_x(STEP_ROWS, generator), make_weight(outputs, generator)
    return _check_rows(x, weight, (1, 40))


def _check_head() -> str:
    """So many outputs that the kernel with the largest tiles takes them: one for each multiprocessor."""
    outputs = 128 * cuda_tensors.num_sms(torch.cuda.current_device())
    generator = torch.Generator("cuda").manual_seed(outputs)
    return _check_rows(make_x(48, generator), make_weight(outputs, generator), (1, 33))


def _check_draft_head() -> str:
    """A card's share of a vocabulary: scores by the copy, the best by the head, guesses, the bits of few rows."""
    generator = torch.Generator("cuda").manual_seed(5)
    weight, copy = make_head(FLASH.vocab // 8, generator)
    x = make_x(20, generator)
    logits = draft_head.draft_head(x, copy, weight)
    truth = draft_head_reference.draft_head(x, copy, weight)
    error = within(relative_error(logits, truth), DRAFT_HEAD_CHOSEN)
    most = logits.argmax(1, keepdim=True)
    best = relative_error(logits.gather(1, most), reference.bf16_linear(x, weight).gather(1, most))
    within(best, bounds.BF16_LINEAR.truth)
    if others := others_than_the_heads(x, weight, copy):
        raise Failure(f"{others} of 20 guesses are not the head's own")
    for rows in (1, 9):
        same(draft_head.draft_head(x[:rows], copy, weight), logits[:rows], f"{rows} rows alone and among {len(x)}")
    return f"{error}; guesses are the head's own; rows alone equal the rows among others"


def _check_rows(x, weight, few: tuple[int, ...]) -> str:
    out = op.bf16_linear(x, weight)
    error = within(strict_error(out, reference.bf16_linear(x, weight)), bounds.BF16_LINEAR.truth)
    for rows in few:
        same(op.bf16_linear(x[:rows], weight), out[:rows], f"{rows} rows alone and among {len(x)}")
    return f"{error}; rows alone equal the rows among others"


# ---- calibrate: the shapes of a plan


@dataclass(frozen=True)
class Case:
    matrix: Matrix
    rows: int

    @property
    def name(self) -> str:
        return f"{self.matrix.name}, {self.rows} rows"

    @property
    def point(self) -> str:
        return f"{self.rows} rows"

    @property
    def calls(self) -> int:
        return self.matrix.layers

    @property
    def bytes_per_call(self) -> int:
        return 2 * FLASH.hidden * (self.matrix.outputs + self.rows)


def cases(*, tp: int, context: int, concurrency: int, quick: bool) -> list[Case]:
    """What a decode step calls; more rows are cuBLAS's with us, too."""
    return [Case(matrix, rows) for rows in rows_of(concurrency, quick, STEP_ROWS) for matrix in MATRICES]


def max_error(provider: str, case: Case) -> float:
    if provider != OURS:
        return bounds.BF16_LINEAR.others
    return bounds.BF16_LINEAR_BF16_OUT if case.matrix.bf16_out else bounds.BF16_LINEAR.truth


def _inputs(case: Case, count: int, generator: torch.Generator) -> list[Inputs]:
    def one() -> Inputs:
        weight = make_weight(case.matrix.outputs, generator)
        return Inputs(case.matrix, make_x(case.rows, generator), weight)

    return [one() for _ in range(count)]


def correctness_inputs(case: Case, device: str = "cuda") -> list[Inputs]:
    return _inputs(case, 2, torch.Generator(device).manual_seed(case.rows))


class TimingInputs:
    """Weights of its own for every call."""

    def __init__(self, device: str = "cuda"):
        self.generator = torch.Generator(device).manual_seed(0)

    def calls(self, case: Case, count: int) -> list[Inputs]:
        return _inputs(case, count, self.generator)


def error(provider: str, result, inputs: Inputs) -> float:
    return error_of(provider, result, reference.bf16_linear(inputs.x, inputs.weight))


# ---- who computes it


def providers() -> tuple[Provider, ...]:
    return (
        Provider(OURS, our_problem, _ours),
        Provider(STOCK, _stock_problem, _stock, packages=("sglang",)),
        Provider("cublas", lambda: None, lambda: cublas),
    )


def _ours():
    def call(inputs: Inputs):
        out_dtype = torch.bfloat16 if inputs.matrix.bf16_out else torch.float32
        return op.bf16_linear(inputs.x, inputs.weight, out_dtype=out_dtype)

    return call


def cublas(inputs: Inputs):
    if inputs.matrix.bf16_out:
        return torch.nn.functional.linear(inputs.x, inputs.weight)
    return torch.mm(inputs.x, inputs.weight.t(), out_dtype=torch.float32)


def _has(module: str, name: str) -> bool:
    return is_installed(module) and hasattr(importlib.import_module(module), name)


def _stock_problem() -> str | None:
    return None if first_installed(LINEAR_HOMES) else f"this SGLang has no {LINEAR}"


def _router(linear: Callable) -> tuple[Callable, int]:
    """(the router's GEMM for few rows, up to how many), as MoEGate chooses it."""
    if _has(*TINY_GEMM):  # 0.5.17 has a module of this name with another function
        rows = unpatched(*TINY_GEMM_ROWS)(
            num_experts=FLASH.experts, hidden_size=FLASH.hidden, weight_dtype=torch.bfloat16
        )
        tiny = unpatched(*TINY_GEMM)
        return lambda x, weight: tiny(x, weight, out_dtype=torch.float32, max_m=rows), rows
    home = first_installed(ROUTER_GEMM_HOMES)
    if home is not None and _has(home, ROUTER_GEMM):
        router = unpatched(home, ROUTER_GEMM)
        return lambda x, weight: router(x, weight, out_dtype=torch.float32), ROUTER_GEMM_ROWS
    return linear, op.MAX_ROWS


def _stock():
    linear = getattr(importlib.import_module(first_installed(LINEAR_HOMES)), LINEAR)
    router, router_rows = _router(linear)

    def call(inputs: Inputs):
        if inputs.matrix.bf16_out:  # an unquantised ReplicatedLinear
            return torch.nn.functional.linear(inputs.x, inputs.weight)
        is_tiny = inputs.matrix.name == ROUTER and inputs.x.shape[0] <= router_rows
        return (router if is_tiny else linear)(inputs.x, inputs.weight)

    return call
