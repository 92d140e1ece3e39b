"""fp8_linear for `calibrate`: the dense FP8 matrices of a rank, few rows, as SGLang's Fp8LinearMethod gets them.

Stock is whatever that method calls here: DeepGEMM, CUTLASS or Triton, with the quantisation of the activations before
it. A verdict weighs each matrix by the layers that have it. Scales are powers of two in float32, as SGLang loads them.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

from deepseek_v4_sm120.calibrate.provider import (
    OURS,
    STOCK,
    PerWeight,
    Provider,
    is_installed,
    our_problem,
    rows_of,
    set_up_deep_gemm,
)
from deepseek_v4_sm120.plan.models import FLASH

if TYPE_CHECKING:
    from deepseek_v4_sm120.reference.fp8_linear_inputs import Matrix

ERROR = "relative error against float64 of unrounded activations"
MOST_ROWS = 64  # ops/fp8_linear.py; here because the shapes need no torch (a test compares)
TORCH_ROWS = 8
MAX_ERROR = 0.0025
LOOSE_ERROR = 0.06  # activations rounded to E4M3 give 0.026 to 0.04

METHOD = "sglang.srt.layers.quantization.fp8"
UTILS = "sglang.srt.layers.quantization.fp8_utils"
CONFIG = {  # of the checkpoint
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
# layers that have the matrix; wo_a is not an Fp8LinearMethod
LAYERS = {
    "wqkv_a": FLASH.layers,
    "wq_b": FLASH.layers,
    "index_wq_b": FLASH.layers_c4,
    "wo_b": FLASH.layers,
    "shared_gate_up": FLASH.layers,
    "shared_down": FLASH.layers,
}


@dataclass(frozen=True)
class Case:
    matrix: Matrix
    rows: int

    @property
    def name(self) -> str:
        return f"{self.matrix.name} [{self.matrix.outputs}, {self.matrix.inputs}], {self.rows} rows"

    @property
    def point(self) -> str:
        return f"{self.rows} rows"

    @property
    def calls(self) -> int:
        return LAYERS[self.matrix.name]

    @property
    def bytes_per_call(self) -> int:
        return self.matrix.bytes


@dataclass
class Inputs:
    x: object  # [rows, inputs] bf16
    weight: object  # [outputs, inputs] E4M3
    scale: object  # [outputs / 128, inputs / 128] float32


def cases(*, tp: int, context: int, concurrency: int, quick: bool) -> list[Case]:
    """What a decode step calls; more rows are SGLang's with us, too."""
    from deepseek_v4_sm120.reference.fp8_linear_inputs import matrices

    chosen = [matrix for matrix in matrices(tp) if matrix.name in LAYERS]
    return [Case(matrix, rows) for rows in rows_of(concurrency, quick, MOST_ROWS) for matrix in chosen]


def max_error(provider: str, case: Case) -> float:
    return MAX_ERROR if provider == OURS else LOOSE_ERROR


def providers() -> tuple[Provider, ...]:
    return (
        Provider(OURS, our_problem, _ours),
        Provider(STOCK, _stock_problem, Stock, packages=("sglang",)),
        Provider("torch", lambda: None, lambda: dequantized_product, lambda case: case.rows <= TORCH_ROWS),
    )


# ---- inputs


def _weights(matrix: Matrix, count: int, generator) -> list[tuple]:
    from deepseek_v4_sm120.reference.fp8_linear_inputs import make_loaded_weights

    return [(weight[0], scale[0]) for weight, scale in make_loaded_weights(matrix, count, generator)]


def _x(case: Case, generator):
    from deepseek_v4_sm120.reference.fp8_linear_inputs import make_x

    return make_x(case.rows, 1, case.matrix.inputs, generator)[:, 0]


def correctness_inputs(case: Case, device: str = "cuda") -> list[Inputs]:
    import torch

    generator = torch.Generator(device).manual_seed(case.rows)
    return [Inputs(_x(case, generator), *one) for one in _weights(case.matrix, 1, generator)]


class TimingInputs:
    """Weights of its own for every call; x is warm, as its producer leaves it."""

    def __init__(self, device: str = "cuda"):
        import torch

        self.generator = torch.Generator(device).manual_seed(0)
        self.weights: dict[Matrix, list[tuple]] = {}

    def calls(self, case: Case, count: int) -> list[Inputs]:
        if case.matrix not in self.weights:
            self.weights[case.matrix] = _weights(case.matrix, count, self.generator)
        x = _x(case, self.generator)
        return [Inputs(x, *one) for one in self.weights[case.matrix]]


def error(provider: str, result, inputs: Inputs) -> float:
    from deepseek_v4_sm120.reference.accuracy import relative_error
    from deepseek_v4_sm120.reference.fp8_linear import fp8_linear

    return relative_error(result, fp8_linear(inputs.x, inputs.weight, inputs.scale))


# ---- providers


def _ours():
    from deepseek_v4_sm120.ops.fp8_linear import fp8_linear

    return lambda inputs: fp8_linear(inputs.x, inputs.weight, inputs.scale)


def dequantized_product(inputs: Inputs):
    """Plain torch: the weights in float32, then one product."""
    from deepseek_v4_sm120.reference.fp8_linear import BLOCK

    scale = inputs.scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return (inputs.x.float() @ (inputs.weight.float() * scale).t()).to(inputs.x.dtype)


def _stock_problem() -> str | None:
    return None if is_installed(METHOD) else f"this SGLang has no {METHOD}"


def choose_backend(utils) -> None:
    """SGLang's own choice of its FP8 GEMM for this GPU, made from its arguments when a server starts."""
    if inspect.signature(utils.initialize_fp8_gemm_config).parameters:  # up to 0.5.19: the server's arguments
        utils.initialize_fp8_gemm_config(SimpleNamespace(fp8_gemm_runner_backend="auto", quantization="fp8"))
        return
    of_server, kernel = utils.get_exec, SimpleNamespace(fp8_gemm_runner_backend="auto")
    utils.get_exec = lambda: SimpleNamespace(kernel=kernel)
    try:
        utils.initialize_fp8_gemm_config()
    finally:
        utils.get_exec = of_server


class Stock:
    """SGLang's Fp8LinearMethod with a layer for every weight, prepared as after loading."""

    def __init__(self):
        set_up_deep_gemm()
        choose_backend(importlib.import_module(UTILS))
        module = importlib.import_module(METHOD)
        self.method = module.Fp8LinearMethod(module.Fp8Config.from_config(CONFIG))
        self.layer = self.ready = PerWeight(self.prepare)

    def prepare(self, inputs: Inputs):
        import torch

        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(inputs.weight, requires_grad=False)
        layer.weight_scale_inv = torch.nn.Parameter(inputs.scale, requires_grad=False)
        layer.weight_scale_inv.format_ue8m0 = False
        layer.input_scale, layer.orig_dtype = None, torch.bfloat16
        layer.deepgemm_mxfp8_input = False  # 0.5.23, as LinearBase has it
        layer.output_size_per_partition, layer.input_size_per_partition = inputs.weight.shape
        layer.logical_widths = [inputs.weight.shape[0]]
        self.method.process_weights_after_loading(layer)
        return layer

    def __call__(self, inputs: Inputs):
        return self.method.apply(self.layer(inputs), inputs.x)
