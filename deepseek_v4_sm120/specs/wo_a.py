"""What wo_a is measured by: the first half of the output projection, of a rank's groups; a layer calls it once.

Stock is what SGLang's attention does for the same call on SM120, from the attention's output to wo_b's input:
up to op.FP8_ROWS rows the launch that takes the rotary embedding back, in place; torch.einsum on weights that are bf16
since they were loaded; the copy that lays the result out for wo_b. For a prompt the launch that rotates is SGLang's
with ours too, before the call, so neither has it. `product` is stock without that launch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deepseek_v4_sm120.ops import wo_a as op
from deepseek_v4_sm120.reference import wo_a as reference
from deepseek_v4_sm120.reference.accuracy import strict_error
from deepseek_v4_sm120.reference.fp8_linear import dequantized
from deepseek_v4_sm120.specs import bounds
from deepseek_v4_sm120.specs.check import ON_GPU, Check, Failure, same, within
from deepseek_v4_sm120.specs.fp8_linear import Matrix, make_loaded_weights, make_weight, make_x, matrices
from deepseek_v4_sm120.specs.provider import (
    OURS,
    STOCK,
    PerWeight,
    Provider,
    error_of,
    first_installed,
    our_problem,
    rows_of,
    unpatched,
)

ERROR = "relative error against float64 of the rounded input"
OUTPUTS, INPUTS = 1024, 4096  # of a group of 8 heads; a rank has 8 / TP groups
POSITIONS = 5000
PREFILL_ROWS = 2048
CHECKED_PREFILL_ROWS = 300  # float64 is slow; more than the operator multiplies without expanding its weights

ROPE = "fused_rope_inplace"
ROPE_HOMES = (  # newest first
    "sglang.kernels.ops.attention.dsv4",
    "sglang.jit_kernel.dsv4",
    "sglang.jit_kernel.deepseek_v4",
)


# ---- inputs


@dataclass
class Inputs:
    x: torch.Tensor  # [rows, groups, inputs] bf16, the attention's output
    weight: torch.Tensor  # [groups, outputs, inputs] E4M3
    scale: torch.Tensor  # [groups, outputs / 128, inputs / 128] float32, powers of two as SGLang loads them
    rotation: dict  # freqs_cis and positions, or nothing where x is rotated already


def make_freqs_cis(count: int, device) -> torch.Tensor:
    """[count, 32] complex64: e^(i p 10000^(-j / 32))."""
    powers = torch.arange(reference.ROTATED // 2, dtype=torch.float64, device=device) / (reference.ROTATED // 2)
    angles = torch.arange(count, dtype=torch.float64, device=device)[:, None] * 10000.0**-powers
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def make_wo_a(
    rows: int, groups: int, generator: torch.Generator, *, outputs=OUTPUTS, inputs=INPUTS, table=POSITIONS, **options
):
    """(x, weight, scale, freqs_cis, positions), the positions in no order; options: make_weight's."""
    device = generator.device
    weight, scale = make_weight(groups, outputs, inputs, generator, **options)
    positions = torch.randint(0, table, (rows,), generator=generator, device=device)
    return make_x(rows, groups, inputs, generator), weight, scale, make_freqs_cis(table, device), positions


# ---- self-test


def checks(quick: bool) -> Iterator[Check]:
    yield Check("wo_a", "two references", _check_references)
    for groups in (2,) if quick else (2, 8):
        yield Check("wo_a", f"{groups} groups, few rows", functools.partial(_check_few_rows, groups), ON_GPU)
    yield Check("wo_a", "4 groups, 300 rows", functools.partial(_check_prompt, 4), ON_GPU)


def _check_references() -> str:
    """The rotation by complex numbers against one by matrices."""
    x, _, _, freqs_cis, positions = make_wo_a(4, 2, torch.Generator().manual_seed(1), outputs=128, inputs=1024)
    ways = (reference.rotated_back, reference.rotated_back_by_matrices)
    same(*(way(x, freqs_cis, positions) for way in ways), "two rotations")
    return "the same bits"


def _check_few_rows(groups: int) -> str:
    """A step's most rows with their rotation against float64; a row's bits among the others."""
    generator = torch.Generator("cuda").manual_seed(groups)
    x, weight, scale, freqs_cis, positions = make_wo_a(op.FP8_ROWS, groups, generator)
    together = op.wo_a(x, weight, scale, freqs_cis=freqs_cis, positions=positions)
    truth = reference.wo_a(x, weight, scale, freqs_cis, positions)
    error = within(strict_error(together, truth), bounds.WO_A.truth)
    for rows in (1, 8, 64):
        alone = op.wo_a(x[:rows], weight, scale, freqs_cis=freqs_cis, positions=positions[:rows])
        same(alone, together[:rows], f"{rows} rows alone and among {op.FP8_ROWS}")
    return f"{error}; rows alone equal the rows among others"


def _check_prompt(groups: int) -> str:
    """A prompt's rows: the product with weights that are expanded for it."""
    x, weight, scale, *_ = make_wo_a(300, groups, torch.Generator("cuda").manual_seed(groups))
    held = torch.cuda.memory_allocated()
    error = strict_error(op.wo_a(x, weight, scale), reference.wo_a(x, weight, scale))
    told = within(error, bounds.WO_A.truth)
    if (kept := torch.cuda.memory_allocated() - held) > 0:
        raise Failure(f"{kept} bytes are still allocated")
    return f"{told}; no memory kept"


# ---- calibrate: the shapes of a plan


@dataclass(frozen=True)
class Case:
    matrix: Matrix
    rows: int

    @property
    def name(self) -> str:
        return f"{self.matrix.groups} x [{self.matrix.outputs}, {self.matrix.inputs}], {self.rows} rows"

    @property
    def rotates(self) -> bool:
        return self.rows <= op.FP8_ROWS

    @property
    def bytes_per_call(self) -> int:
        return self.matrix.bytes


def cases(*, tp: int, context: int, concurrency: int, quick: bool) -> list[Case]:
    """A decode step's rows, and a prefill chunk's."""
    (matrix,) = (matrix for matrix in matrices(tp) if matrix.name == "wo_a")
    return [Case(matrix, rows) for rows in (*rows_of(concurrency, quick, op.FP8_ROWS), PREFILL_ROWS)]


def max_error(provider: str, case: Case) -> float:
    return bounds.WO_A.truth if provider == OURS else bounds.WO_A.others


def _inputs(case: Case, rows: int, weights: list[tuple], generator) -> list[Inputs]:
    """One for each of `weights`, all with the same x."""
    device, rotation = generator.device, {}
    if case.rotates:
        positions = torch.randint(0, POSITIONS, (rows,), generator=generator, device=device)
        rotation = {"freqs_cis": make_freqs_cis(POSITIONS, device), "positions": positions}
    x = make_x(rows, case.matrix.groups, case.matrix.inputs, generator)
    return [Inputs(x, *one, rotation) for one in weights]


def correctness_inputs(case: Case, device: str = "cuda") -> list[Inputs]:

    generator = torch.Generator(device).manual_seed(case.rows)
    rows = case.rows if case.rotates else CHECKED_PREFILL_ROWS
    return _inputs(case, rows, make_loaded_weights(case.matrix, 1, generator), generator)


class TimingInputs:
    """Weights of its own for every call; x is warm, as its producer leaves it."""

    def __init__(self, device: str = "cuda"):
        self.generator = torch.Generator(device).manual_seed(0)
        self.weights: list[tuple] = []  # a plan has one matrix

    def calls(self, case: Case, count: int) -> list[Inputs]:
        self.weights = self.weights or make_loaded_weights(case.matrix, count, self.generator)
        return _inputs(case, case.rows, self.weights, self.generator)


def error(provider: str, result, inputs: Inputs) -> float:
    """result [rows, groups * outputs]."""
    truth = reference.wo_a(inputs.x, inputs.weight, inputs.scale, **inputs.rotation)
    return error_of(provider, result, truth.flatten(1))


# ---- who computes it


def providers() -> tuple[Provider, ...]:
    return (
        Provider(OURS, our_problem, _ours),
        Provider(STOCK, _stock_problem, Stock, packages=("sglang",)),
        Provider("torch", lambda: None, Expanded),
    )


def _ours():
    return lambda inputs: op.wo_a(inputs.x, inputs.weight, inputs.scale, **inputs.rotation).flatten(1)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[rows, groups * outputs] of x [rows, groups, inputs] and bf16 weights [groups, outputs, inputs]."""
    return torch.einsum(op.EQUATION, x, weight).flatten(1)


class Expanded:
    """torch.einsum on a bf16 copy of the weights, made ahead of the clock; the rotation by torch's complex numbers."""

    def __init__(self):
        self.expanded = PerWeight(self.expand)

    def ready(self, inputs: Inputs) -> None:
        self.expanded(inputs)

    def expand(self, inputs: Inputs):

        groups = zip(inputs.weight, inputs.scale, strict=True)
        return torch.stack([dequantized(*group).bfloat16() for group in groups])

    def rotated(self, x, freqs_cis, positions):
        """A new tensor of x's shape."""
        return reference.rotated_back(x, freqs_cis, positions)

    def __call__(self, inputs: Inputs):

        x = self.rotated(inputs.x, **inputs.rotation) if inputs.rotation else inputs.x
        return product(x, self.expanded(inputs))


def _stock_problem() -> str | None:
    return None if first_installed(ROPE_HOMES) else f"this SGLang has no {ROPE}"


class Stock(Expanded):
    """As SGLang's attention has it on SM120. Its kernel rotates in place: a copy of x, made ahead of the clock."""

    def __init__(self):
        super().__init__()
        self.rope = unpatched(first_installed(ROPE_HOMES), ROPE)
        self.x, self.copy = None, None

    def ready(self, inputs: Inputs) -> None:
        super().ready(inputs)
        self.copied(inputs.x)

    def copied(self, x):
        if self.x is not x:
            self.x, self.copy = x, x.clone()
        return self.copy

    def rotated(self, x, freqs_cis, positions):
        x = self.copied(x)
        heads = x.view(x.shape[0], -1, reference.HEAD)
        self.rope(heads[..., -reference.ROTATED :], None, freqs_cis, positions=positions, inverse=True)
        return x
