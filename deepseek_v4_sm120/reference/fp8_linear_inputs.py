"""Random inputs of fp8_linear, and the matrices of DeepSeek-V4-Flash that it multiplies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch  # imported where tensors are made: who asks for the matrices alone needs none


@dataclass(frozen=True)
class Matrix:
    """One of the model's FP8 matrices on a rank; groups > 1 (or wo_a) is the grouped form."""

    name: str
    tp: int
    groups: int
    outputs: int
    inputs: int

    @property
    def bytes(self) -> int:
        return self.groups * self.outputs * self.inputs

    @property
    def label(self) -> str:
        groups = f"{self.groups} x " if self.name == "wo_a" else ""
        return f"{self.name}, TP{self.tp}, {groups}[{self.outputs}, {self.inputs}]"


def matrices(tp: int) -> list[Matrix]:
    """Of a layer on a rank. wqkv_a and the index queries are replicated."""
    return [
        Matrix("wqkv_a", tp, 1, 1536, 4096),
        Matrix("wq_b", tp, 1, 32768 // tp, 1024),
        Matrix("index_wq_b", tp, 1, 8192, 1024),
        Matrix("wo_a", tp, 8 // tp, 1024, 4096),
        Matrix("wo_b", tp, 1, 4096, 8192 // tp),
        Matrix("shared_gate_up", tp, 1, 4096 // tp, 4096),
        Matrix("shared_down", tp, 1, 4096, 2048 // tp),
    ]


def make_x(rows: int, groups: int, inputs: int, generator: torch.Generator) -> torch.Tensor:
    """[rows, groups, inputs] bf16 as activations are: channels of different size, a few large ones."""
    import torch

    device = generator.device
    x = torch.randn((rows, groups, inputs), generator=generator, device=device)
    x *= torch.exp(0.7 * torch.randn((inputs,), generator=generator, device=device))
    large = torch.rand((inputs,), generator=generator, device=device) < 0.002
    return torch.where(large, 30 * x, x).to(torch.bfloat16)


def make_weight(groups: int, outputs: int, inputs: int, generator: torch.Generator, *, ue8m0=False):
    """([groups, outputs, inputs] E4M3 of every finite code, [groups, outputs / 128, inputs / 128] scales)."""
    import torch

    from deepseek_v4_sm120.reference.fp8_linear import BLOCK

    device = generator.device
    codes = torch.randint(0, 254, (groups, outputs, inputs), generator=generator, device=device, dtype=torch.uint8)
    codes += (codes >= 0x7F).to(torch.uint8)  # 0 .. 0x7e, 0x80 .. 0xfe: all but the NaNs
    shape = (groups, outputs // BLOCK, inputs // BLOCK)
    if ue8m0:
        scale = torch.randint(112, 122, shape, generator=generator, device=device, dtype=torch.uint8)
    else:
        scale = 0.001 + 0.01 * torch.rand(shape, generator=generator, device=device)
    return codes.view(torch.float8_e4m3fn), scale


def make_loaded_weights(matrix: Matrix, count: int, generator: torch.Generator) -> list[tuple]:
    """make_weight's of `count` layers, each [groups, ..]; scales as SGLang loads them: powers of two, float32."""
    from deepseek_v4_sm120.reference.fp8_linear import scale_values

    weight, scale = make_weight(count * matrix.groups, matrix.outputs, matrix.inputs, generator, ue8m0=True)
    both = (weight, scale_values(scale).float())
    return list(zip(*(t.view(count, matrix.groups, *t.shape[1:]) for t in both), strict=True))


def make_gates_and_ups(rows: int, inputs: int, generator: torch.Generator) -> torch.Tensor:
    """[rows, 2 * inputs] bf16: what a SwiGLU takes, with some beyond a limit of 10 on either side."""
    import torch

    return (4 * torch.randn((rows, 2 * inputs), generator=generator, device=generator.device)).to(torch.bfloat16)


def make_norm_weight(inputs: int, generator: torch.Generator) -> torch.Tensor:
    """[inputs] bf16 around 1."""
    import torch

    return (1 + 0.2 * torch.randn((inputs,), generator=generator, device=generator.device)).to(torch.bfloat16)


def make_one_to_one(inputs: int, device):
    """Weights [inputs, inputs] and scales of the matrix that changes nothing: out is what was made of x."""
    import torch

    from deepseek_v4_sm120.reference.fp8_linear import BLOCK

    weight = torch.eye(inputs, device=device).to(torch.float8_e4m3fn)
    return weight, torch.ones(inputs // BLOCK, inputs // BLOCK, device=device)
