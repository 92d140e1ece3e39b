"""What router_topk is measured by: the choice of a row's experts, in the layers whose router is learned.

Nothing of it is divided by TP. Stock is SGLang's own function of 0.5.15 and later.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deepseek_v4_sm120.commands.plan.models import FLASH
from deepseek_v4_sm120.ops import router_topk as op
from deepseek_v4_sm120.ops.shared.limits import STEP_ROWS
from deepseek_v4_sm120.reference import router_topk as reference
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.specs import bounds
from deepseek_v4_sm120.specs.check import ON_GPU, Check, Failure, same, within
from deepseek_v4_sm120.specs.provider import (
    OURS,
    STOCK,
    Provider,
    first_installed,
    our_problem,
    rows_of,
    sglang_version,
    unpatched,
)

ERROR = "relative error of the weights against float64, or by how much a chosen expert is below the last that should be"
TOPK = FLASH.experts_per_token
KINDS = ("normal", "ties", "low", "wide", "nan", "infinite")

GATE = "moe_fused_gate"
HOMES = ("sglang.kernels.ops.moe.moe_fused_gate", "sglang.jit_kernel.moe_fused_gate")
TRITON_SINCE, LOG1P_SINCE = (0, 5, 15), (0, 5, 20)


# ---- inputs


@dataclass
class Inputs:
    logits: torch.Tensor  # [rows, experts] float32
    bias: torch.Tensor  # [experts] float32


def make_inputs(rows: int, generator: torch.Generator, *, experts=FLASH.experts, kind="normal") -> Inputs:
    """kind: ties (a few values, of the bias, too), low (below where 1 + exp(x) keeps digits), wide, nan, infinite."""
    device = generator.device
    x = torch.randn(rows, experts, generator=generator, device=device)
    bias = torch.randn(experts, generator=generator, device=device) * 0.1
    draw = torch.rand(rows, experts, generator=generator, device=device)
    if kind == "ties":
        x, bias = (x * 4).round() / 4, (bias * 8).round() / 8
    elif kind == "low":
        x = 5 * x - 20
    elif kind == "wide":
        x = 30 * x
    elif kind == "nan":
        x = x.masked_fill(draw < 0.02, float("nan"))
        x[::7] = float("nan")
    elif kind == "infinite":
        x = x.masked_fill(draw < 0.02, float("inf")).masked_fill(draw > 0.98, -float("inf"))
    return Inputs(x, bias)


# ---- self-test


def checks(quick: bool) -> Iterator[Check]:
    yield Check("router_topk", "two references", _check_references)
    for kind in KINDS[:4]:
        yield Check("router_topk", f"logits: {kind}", functools.partial(_check_kind, kind), ON_GPU)
    yield Check("router_topk", "NaN, infinity, padding", _check_hostile, ON_GPU)
    yield Check("router_topk", "argmax of a vocabulary", _check_argmax, ON_GPU)


def _check_references() -> str:
    """Float64 tensors against Python's numbers."""
    inputs = make_inputs(5, torch.Generator().manual_seed(1), experts=16, kind="ties")
    one = reference.router_topk(inputs.logits, inputs.bias, TOPK)
    other = reference.router_topk_by_numbers(inputs.logits, inputs.bias, TOPK)
    same(one[1], other[1], "ids of two references")
    return within(relative_error(other[0], one[0]), bounds.REFERENCES_AGREE, "relative difference")


def _check_kind(kind: str) -> str:
    inputs = make_inputs(STEP_ROWS, torch.Generator("cuda").manual_seed(7), kind=kind)
    found = op.router_topk(inputs.logits, inputs.bias, TOPK)
    said = within(error(OURS, found, inputs), bounds.ROUTER_TOPK.truth)
    for rows in (1, 40):
        for one, many in zip(op.router_topk(inputs.logits[:rows], inputs.bias, TOPK), found, strict=True):
            same(one, many[:rows], f"{rows} rows alone and among {STEP_ROWS}")
    return f"{said}; rows alone equal the rows among others"


def _check_hostile() -> str:
    generator, real = torch.Generator("cuda").manual_seed(8), torch.tensor([50], dtype=torch.int32, device="cuda")
    for kind in KINDS[4:]:
        inputs = make_inputs(64, generator, kind=kind)
        weights, ids = op.router_topk(inputs.logits, inputs.bias, TOPK, real_rows=real)
        expected = reference.router_topk(inputs.logits, inputs.bias, TOPK, real_rows=real)[1]
        differing = int((ids != expected).any(1).sum())
        if differing or weights[50:].any():
            raise Failure(
                f"{kind}: {differing} rows with other experts, {int((weights[50:] != 0).sum())} weights of padding"
            )
    return "the reference's experts, none of padded rows"


def make_logits(kind: str, generator: torch.Generator, *, rows=5, columns=FLASH.vocab) -> torch.Tensor:
    """[rows, columns] float32 of an argmax that hangs on more than the numbers. kind: ties (few values, as of bf16),
    ends (the greatest is a part's first or last), zeros (none is greater, of both signs), low, infinite, nan."""
    x = torch.randn(rows, columns, generator=generator, device=generator.device)
    at = torch.randint(columns, (rows, 3), generator=generator, device=generator.device)
    if kind == "ties":
        return (x * 2).round() / 2
    if kind == "ends":
        ends = torch.tensor([columns - 1, op.PART_NUMBERS - 1, op.PART_NUMBERS, 0], device=x.device) % columns
        return x.scatter(1, ends[torch.arange(rows, device=x.device) % 4][:, None], 50.0)
    if kind == "zeros":
        return (-x.abs() - 1).scatter(1, at, torch.tensor([[-0.0, 0.0, -0.0]], device=x.device).expand(rows, 3))
    if kind == "low":
        return torch.full_like(x, -torch.inf).scatter(1, at[:, :1], -torch.finfo(torch.float32).max)
    if kind == "infinite":
        return x.scatter(1, at, torch.inf)
    return x.scatter(1, at, torch.tensor([[torch.nan, torch.inf, -torch.nan]], device=x.device).expand(rows, 3))


LOGITS = ("ties", "ends", "zeros", "low", "infinite", "nan")


def _check_argmax() -> str:
    generator = torch.Generator("cuda").manual_seed(9)
    for kind in LOGITS:
        logits = make_logits(kind, generator)
        same(op.row_argmax(logits), reference.row_argmax(logits), f"{kind}: places")
        same(op.row_argmax(logits), logits.argmax(-1), f"{kind}: torch's places")
    return f"the reference's places, and torch's, of {len(LOGITS)} kinds"


# ---- calibrate: the shapes of a plan


@dataclass(frozen=True)
class Case:
    rows: int

    @property
    def name(self) -> str:
        return f"{FLASH.experts} experts, {self.rows} rows"

    @property
    def point(self) -> str:
        return f"{self.rows} rows"

    @property
    def calls(self) -> int:
        return FLASH.layers - FLASH.hash_layers

    @property
    def bytes_per_call(self) -> int:
        return 4 * FLASH.experts * (self.rows + 1)


def cases(*, tp: int, context: int, concurrency: int, quick: bool) -> list[Case]:
    """What a decode step calls; a prompt's rows are SGLang's with us, too."""
    return [Case(rows) for rows in rows_of(concurrency, quick, STEP_ROWS)]


def max_error(provider: str, case: Case) -> float:
    return bounds.ROUTER_TOPK.truth if provider == OURS else bounds.ROUTER_TOPK.others


def correctness_inputs(case: Case, device: str = "cuda") -> list[Inputs]:
    generator = torch.Generator(device).manual_seed(case.rows)
    return [make_inputs(case.rows, generator, kind=kind) for kind in ("normal", "ties")]


class TimingInputs:
    """Logits and a bias of its own for every call."""

    def __init__(self, device: str = "cuda"):
        self.generator = torch.Generator(device).manual_seed(0)

    def calls(self, case: Case, count: int) -> list[Inputs]:
        return [make_inputs(case.rows, self.generator) for _ in range(count)]


def error(provider: str, result, inputs: Inputs) -> float:
    """The greater of both; finite logits. Which of two is chosen that are next to equal, nobody promises."""
    weights, ids = result
    if ids.shape != (len(inputs.logits), TOPK):
        return float("inf")
    scores, by = reference.ranked(inputs.logits, inputs.bias)
    last = by.sort(dim=1, descending=True).values[:, TOPK - 1 : TOPK]
    below = (last - by.gather(1, ids.long())).clamp_min(0).max().item()
    repeated = (ids.sort(dim=1).values.diff(dim=1) == 0).any().item()
    return max(relative_error(weights, reference.weights_of(scores, ids)), below, float("inf") if repeated else 0.0)


# ---- who computes it


def providers() -> tuple[Provider, ...]:
    return (
        Provider(OURS, our_problem, _ours),
        Provider(STOCK, _stock_problem, _stock, packages=("sglang",)),
        Provider("torch", lambda: None, lambda: in_torch),
    )


def is_log1p() -> bool:
    """Whether the release found here computes softplus so; as the newest where there is none."""
    return (sglang_version() or LOG1P_SINCE) >= LOG1P_SINCE


def _ours():
    release = {"log1p": is_log1p(), "in_pairs": op.triton_adds_in_pairs()}
    return lambda inputs: op.router_topk(inputs.logits, inputs.bias, TOPK, **release)


def in_torch(inputs: Inputs):
    scores = torch.nn.functional.softplus(inputs.logits).sqrt()
    ids = (scores + inputs.bias).topk(TOPK, dim=1).indices
    weights = scores.gather(1, ids)
    return weights / weights.sum(dim=1, keepdim=True), ids


def _stock_problem() -> str | None:
    if not first_installed(HOMES) or (sglang_version() or TRITON_SINCE) < TRITON_SINCE:
        return f"this SGLang has no {GATE} in Triton"
    return None


def _stock():
    gate = unpatched(first_installed(HOMES), GATE)
    return lambda inputs: gate(inputs.logits, inputs.bias, topk=TOPK, scoring_func="sqrtsoftplus")
