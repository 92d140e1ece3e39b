"""wo_a for `calibrate`: the first half of the output projection, of a rank's groups; a layer calls it once.

Stock is what its attention does on SM120: the launch that takes the rotary embedding back, in place, then torch.einsum
on weights that are bf16 since they were loaded, and the copy that lays the result out for wo_b. For a prompt that
launch is SGLang's with ours too, so neither has it there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepseek_v4_sm120.calibrate.provider import (
    OURS,
    STOCK,
    PerWeight,
    Provider,
    first_installed,
    our_problem,
    rows_of,
    unpatched,
)

if TYPE_CHECKING:
    from deepseek_v4_sm120.reference.fp8_linear_inputs import Matrix

ERROR = "relative error against float64 of the rounded input"
MOST_ROWS = 64  # ops/wo_a.py rotates up to so many; here because the shapes need no torch (a test compares)
PREFILL_ROWS = 2048
CHECKED_PREFILL_ROWS = 160  # float64 is slow; more than the operator multiplies without expanding its weights
MAX_ERROR = 0.0025
LOOSE_ERROR = 0.01
POSITIONS = 5000

ROPE = "fused_rope_inplace"
ROPE_HOMES = (  # newest first
    "sglang.kernels.ops.attention.dsv4",
    "sglang.jit_kernel.dsv4",
    "sglang.jit_kernel.deepseek_v4",
)


@dataclass(frozen=True)
class Case:
    matrix: Matrix
    rows: int

    @property
    def name(self) -> str:
        return f"{self.matrix.groups} x [{self.matrix.outputs}, {self.matrix.inputs}], {self.rows} rows"

    @property
    def rotates(self) -> bool:
        return self.rows <= MOST_ROWS

    @property
    def bytes_per_call(self) -> int:
        return self.matrix.bytes


@dataclass
class Inputs:
    x: object  # [rows, groups, inputs] bf16, the attention's output
    weight: object  # [groups, outputs, inputs] E4M3
    scale: object  # [groups, outputs / 128, inputs / 128] float32, powers of two as SGLang loads them
    rotation: dict  # freqs_cis and positions, or nothing where x is rotated already


def cases(*, tp: int, context: int, concurrency: int, quick: bool) -> list[Case]:
    """A decode step's rows, and a prefill chunk's."""
    from deepseek_v4_sm120.reference.fp8_linear_inputs import matrices

    (matrix,) = (matrix for matrix in matrices(tp) if matrix.name == "wo_a")
    return [Case(matrix, rows) for rows in (*rows_of(concurrency, quick, MOST_ROWS), PREFILL_ROWS)]


def max_error(provider: str, case: Case) -> float:
    return MAX_ERROR if provider == OURS else LOOSE_ERROR


def providers() -> tuple[Provider, ...]:
    return (
        Provider(OURS, our_problem, _ours),
        Provider(STOCK, _stock_problem, Stock, packages=("sglang",)),
        Provider("torch", lambda: None, Expanded),
    )


# ---- inputs


def _inputs(case: Case, rows: int, weights: list[tuple], generator) -> list[Inputs]:
    """One for each of `weights`, all with the same x."""
    import torch

    from deepseek_v4_sm120.reference.fp8_linear_inputs import make_x
    from deepseek_v4_sm120.reference.wo_a_inputs import make_freqs_cis

    device, rotation = generator.device, {}
    if case.rotates:
        positions = torch.randint(0, POSITIONS, (rows,), generator=generator, device=device)
        rotation = {"freqs_cis": make_freqs_cis(POSITIONS, device), "positions": positions}
    x = make_x(rows, case.matrix.groups, case.matrix.inputs, generator)
    return [Inputs(x, *one, rotation) for one in weights]


def correctness_inputs(case: Case, device: str = "cuda") -> list[Inputs]:
    import torch

    from deepseek_v4_sm120.reference.fp8_linear_inputs import make_loaded_weights

    generator = torch.Generator(device).manual_seed(case.rows)
    rows = case.rows if case.rotates else CHECKED_PREFILL_ROWS
    return _inputs(case, rows, make_loaded_weights(case.matrix, 1, generator), generator)


class TimingInputs:
    """Weights of its own for every call; x is warm, as its producer leaves it."""

    def __init__(self, device: str = "cuda"):
        import torch

        self.generator = torch.Generator(device).manual_seed(0)
        self.weights: list[tuple] = []  # a plan has one matrix

    def calls(self, case: Case, count: int) -> list[Inputs]:
        from deepseek_v4_sm120.reference.fp8_linear_inputs import make_loaded_weights

        self.weights = self.weights or make_loaded_weights(case.matrix, count, self.generator)
        return _inputs(case, case.rows, self.weights, self.generator)


def error(provider: str, result, inputs: Inputs) -> float:
    """result [rows, groups * outputs]."""
    from deepseek_v4_sm120.reference.accuracy import relative_error
    from deepseek_v4_sm120.reference.wo_a import wo_a

    return relative_error(result, wo_a(inputs.x, inputs.weight, inputs.scale, **inputs.rotation).flatten(1))


# ---- providers


def _ours():
    from deepseek_v4_sm120.ops.wo_a import wo_a

    return lambda inputs: wo_a(inputs.x, inputs.weight, inputs.scale, **inputs.rotation).flatten(1)


class Expanded:
    """torch.einsum on a bf16 copy of the weights, made ahead of the clock; the rotation by torch's complex numbers."""

    def __init__(self):
        self.expanded = PerWeight(self.expand)

    def ready(self, inputs: Inputs) -> None:
        self.expanded(inputs)

    def expand(self, inputs: Inputs):
        import torch

        from deepseek_v4_sm120.reference.fp8_linear import dequantized

        groups = zip(inputs.weight, inputs.scale, strict=True)
        return torch.stack([dequantized(*group).bfloat16() for group in groups])

    def rotated(self, x, freqs_cis, positions):
        """A new tensor of x's shape."""
        from deepseek_v4_sm120.reference.wo_a import rotated_back

        return rotated_back(x, freqs_cis, positions)

    def __call__(self, inputs: Inputs):
        import torch

        from deepseek_v4_sm120.reference.wo_a import EQUATION

        x = self.rotated(inputs.x, **inputs.rotation) if inputs.rotation else inputs.x
        return torch.einsum(EQUATION, x, self.expanded(inputs)).flatten(1)


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
        from deepseek_v4_sm120.reference.wo_a import HEAD, ROTATED

        x = self.copied(x)
        heads = x.view(x.shape[0], -1, HEAD)
        self.rope(heads[..., HEAD - ROTATED :], None, freqs_cis, positions=positions, inverse=True)
        return x
