"""What fp8_linear is measured by: the dense FP8 matrices of a rank, few rows, as SGLang's Fp8LinearMethod gets them.

Stock is whatever that method calls here: DeepGEMM, CUTLASS or Triton, with the quantisation of the activations before
it. A verdict of calibrate weighs each matrix by the layers that have it. There scales are powers of two in float32, as
SGLang loads them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from deepseek_v4_sm120.commands.plan.models import FLASH
from deepseek_v4_sm120.ops import fp8_linear as op
from deepseek_v4_sm120.ops import fp8_linear_draft_input as draft_op
from deepseek_v4_sm120.ops.shared.limits import STEP_ROWS
from deepseek_v4_sm120.reference import fp8_linear as reference
from deepseek_v4_sm120.reference.accuracy import relative_error, strict_error
from deepseek_v4_sm120.reference.fp8_linear import BLOCK
from deepseek_v4_sm120.specs import bounds
from deepseek_v4_sm120.specs.check import ON_GPU, Check, NotRun, same, within
from deepseek_v4_sm120.specs.provider import (
    OURS,
    STOCK,
    PerWeight,
    Provider,
    error_of,
    is_installed,
    our_problem,
    rows_of,
    set_up_deep_gemm,
)

ERROR = "relative error against float64 of unrounded activations"
TORCH_ROWS = 8

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


# ---- inputs


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
    device = generator.device
    x = torch.randn((rows, groups, inputs), generator=generator, device=device)
    x *= torch.exp(0.7 * torch.randn((inputs,), generator=generator, device=device))
    large = torch.rand((inputs,), generator=generator, device=device) < 0.002
    return torch.where(large, 30 * x, x).to(torch.bfloat16)


def make_weight(groups: int, outputs: int, inputs: int, generator: torch.Generator, *, ue8m0=False):
    """([groups, outputs, inputs] E4M3 of every finite code, [groups, outputs / 128, inputs / 128] scales)."""
    device = generator.device
    codes = torch.randint(0, 254, (groups, outputs, inputs), generator=generator, device=device, dtype=torch.uint8)
    codes += (codes >= 0x7F).to(torch.uint8)  # 0 .. 0x7e, 0x80 .. 0xfe: all but the NaNs
    shape = (groups, outputs // BLOCK, inputs // BLOCK)
    if ue8m0:
        # near each other: a block far below its neighbours would hide what is wrong with it
        scale = torch.randint(118, 122, shape, generator=generator, device=device, dtype=torch.uint8)
    else:
        scale = 0.001 + 0.01 * torch.rand(shape, generator=generator, device=device)
    return codes.view(torch.float8_e4m3fn), scale


@dataclass
class Inputs:
    """Of a product as a layer has it."""

    x: torch.Tensor  # [rows, inputs] bf16
    weight: torch.Tensor  # [outputs, inputs] E4M3
    scale: torch.Tensor  # [outputs / 128, inputs / 128] float32


def make_draft_input(rows: int, outputs: int, inputs: int, generator, *, streams=4, entries=None) -> tuple[tuple, dict]:
    """Arguments of draft_input: ids where there are entries, of a table in wider rows."""
    device, halves = generator.device, []
    for scale_format in (True, False):
        weight, scale = make_weight(1, outputs, inputs, generator, ue8m0=scale_format)
        norm = (1 + 0.3 * torch.randn(inputs, generator=generator, device=device)).bfloat16()
        halves.append(draft_op.Half(norm, 1e-6, weight[0], scale[0]))
    hidden = make_x(rows, streams, inputs, generator)
    embedded = make_x(entries or rows, 1, inputs + 8, generator)[:, 0, :inputs]
    if entries is None:
        return (hidden, embedded, *halves), {}
    return (hidden, embedded, *halves), {"ids": torch.randint(0, entries, (rows,), generator=generator, device=device)}


def make_loaded_weights(matrix: Matrix, count: int, generator: torch.Generator) -> list[tuple]:
    """make_weight's of `count` layers, each [groups, ..]; scales as SGLang loads them: powers of two, float32."""
    weight, scale = make_weight(count * matrix.groups, matrix.outputs, matrix.inputs, generator, ue8m0=True)
    both = (weight, reference.scale_values(scale).float())
    return list(zip(*(t.view(count, matrix.groups, *t.shape[1:]) for t in both), strict=True))


# ---- self-test


def checks(quick: bool) -> Iterator[Check]:
    yield Check("fp8_linear", "two references", _check_references)
    for size in ((1, 8192, 1024), (1, 4096, 2048), (2, 1024, 4096))[: 2 if quick else 3]:
        yield Check("fp8_linear", "{} x [{}, {}]".format(*size), functools.partial(_check_size, *size), ON_GPU)
    yield Check("fp8_linear", "sums of parts of the inputs", _check_unmerged, ON_GPU)
    yield Check("fp8_linear", "the latent's norm", _check_latent_norm, ON_GPU)
    yield Check("fp8_linear", "what a draft's block begins with", _check_draft_input, ON_GPU)


def _check_references() -> str:
    """Dequantised weights against weights decoded from their bits, block by block."""
    generator = torch.Generator().manual_seed(1)
    x, (weight, scale) = make_x(3, 1, 384, generator)[:, 0], make_weight(1, 256, 384, generator)
    one = reference.fp8_linear(x, weight[0], scale[0])
    difference = relative_error(reference.fp8_linear_by_bits(x, weight[0], scale[0]), one)
    return within(difference, bounds.REFERENCES_AGREE, "relative difference")


def _check_size(groups: int, outputs: int, inputs: int) -> str:
    """A step's most rows against float64; a row's bits among the others."""
    most, generator = STEP_ROWS, torch.Generator("cuda").manual_seed(outputs)
    x, (weight, scale) = make_x(most, groups, inputs, generator), make_weight(groups, outputs, inputs, generator)
    together = op.fp8_grouped_linear(x, weight, scale)
    truth = reference.fp8_grouped_linear(x, weight, scale)
    error = within(strict_error(together, truth), bounds.FP8_LINEAR_WIDE)
    for rows in (1, 8, 16, 32, 64):
        same(op.fp8_grouped_linear(x[:rows], weight, scale), together[:rows], f"{rows} rows alone and among {most}")
    return f"{error}; rows alone equal the rows among others"


def _check_unmerged() -> str:
    """wo_b at two and four cards as a boundary gets it: the merged product's bits."""
    seen = set()
    for inputs in (4096, 2048):
        generator = torch.Generator("cuda").manual_seed(inputs)
        x, (weight, scale) = make_x(STEP_ROWS, 1, inputs, generator)[:, 0], make_weight(1, 4096, inputs, generator)
        for rows in (1, 8, STEP_ROWS):
            if (splits := op.splits_of(rows, 4096, inputs, x.device.index)) == 1:
                continue
            seen.add(splits)
            apart = op.fp8_linear_unmerged(x[:rows], weight[0], scale[0])
            whole = op.fp8_linear(x[:rows], weight[0], scale[0])
            same(op.merge(apart), whole, f"{rows} rows of {inputs} inputs in {splits} parts and whole")
    if not seen:
        raise NotRun("this card cuts no inputs of these sizes")
    return f"in {' and '.join(map(str, sorted(seen)))} parts as the whole"


def _check_latent_norm() -> str:
    generator = torch.Generator("cuda").manual_seed(3)
    x = make_x(STEP_ROWS, 1, op.NORM_INPUTS, generator)[:, 0]
    weight = torch.randn(op.NORM_INPUTS, generator=generator, device="cuda").bfloat16()
    together = op.latent_norm(x, weight, 1e-6)
    error = within(strict_error(together, reference.latent_norm(x, weight, 1e-6)), bounds.LATENT_NORM.truth)
    same(op.latent_norm(x[5:6], weight, 1e-6), together[5:6], f"a row alone and among {STEP_ROWS}")
    return error


def _check_draft_input() -> str:
    """Against float64, by ids and by rows; a token among others, whose products are made in other parts."""
    generator = torch.Generator("cuda").manual_seed(5)
    (hidden, table, *halves), by = make_draft_input(STEP_ROWS // 4, FLASH.hidden, FLASH.hidden, generator, entries=300)
    together = draft_op.draft_input(hidden, table, *halves, **by)
    truth = reference.draft_input(hidden, table, *halves, **by)
    error = within(strict_error(together, truth), bounds.DRAFT_INPUT.truth)
    for rows in (1, 2, 8, 33):
        own = by["ids"][:rows]
        for given in ({"embedded": table, "ids": own}, {"embedded": table[own]}):
            alone = draft_op.draft_input(hidden[:rows], *(given.pop("embedded"), *halves), **given)
            same(alone, together[:rows], f"{rows} tokens alone and among {len(hidden)}")
    return f"{error}; tokens alone equal the tokens among others"


# ---- calibrate: the shapes of a plan


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


def cases(*, tp: int, context: int, concurrency: int, quick: bool) -> list[Case]:
    """What a decode step calls; more rows are SGLang's with us, too."""
    chosen = [matrix for matrix in matrices(tp) if matrix.name in LAYERS]
    return [Case(matrix, rows) for rows in rows_of(concurrency, quick, STEP_ROWS) for matrix in chosen]


def max_error(provider: str, case: Case) -> float:
    return bounds.FP8_LINEAR.truth if provider == OURS else bounds.FP8_LINEAR.others


def _weights(matrix: Matrix, count: int, generator) -> list[tuple]:
    return [(weight[0], scale[0]) for weight, scale in make_loaded_weights(matrix, count, generator)]


def _x(case: Case, generator):
    return make_x(case.rows, 1, case.matrix.inputs, generator)[:, 0]


def correctness_inputs(case: Case, device: str = "cuda") -> list[Inputs]:
    generator = torch.Generator(device).manual_seed(case.rows)
    return [Inputs(_x(case, generator), *one) for one in _weights(case.matrix, 1, generator)]


class TimingInputs:
    """Weights of its own for every call; x is warm, as its producer leaves it."""

    def __init__(self, device: str = "cuda"):
        self.generator = torch.Generator(device).manual_seed(0)
        self.weights: dict[Matrix, list[tuple]] = {}

    def calls(self, case: Case, count: int) -> list[Inputs]:
        if case.matrix not in self.weights:
            self.weights[case.matrix] = _weights(case.matrix, count, self.generator)
        x = _x(case, self.generator)
        return [Inputs(x, *one) for one in self.weights[case.matrix]]


def error(provider: str, result, inputs: Inputs) -> float:
    return error_of(provider, result, reference.fp8_linear(inputs.x, inputs.weight, inputs.scale))


# ---- who computes it


def providers() -> tuple[Provider, ...]:
    return (
        Provider(OURS, our_problem, _ours),
        Provider(STOCK, _stock_problem, Stock, packages=("sglang",)),
        Provider("torch", lambda: None, lambda: dequantized_product, lambda case: case.rows <= TORCH_ROWS),
    )


def _ours():
    return lambda inputs: op.fp8_linear(inputs.x, inputs.weight, inputs.scale)


def dequantized_product(inputs: Inputs):
    """Plain torch: the weights in float32, then one product."""
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
