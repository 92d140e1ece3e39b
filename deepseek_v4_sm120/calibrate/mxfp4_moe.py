"""mxfp4_moe for `calibrate`: the routed experts of a layer on one rank, as SGLang's expert methods call them.

What is compared follows SGLang's default on SM120: from 0.5.16 on FlashInfer's CUTLASS kernels with MXFP8 activations,
before that Marlin with bf16. `ours, mxfp8` is what the patch runs under the former above 256 rows; where it is wrong
or slower, the patch keeps bf16 there. Block sizes are not chosen here, see NOTE.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass

from deepseek_v4_sm120.calibrate.provider import OURS, STOCK, Provider, is_installed, our_problem, sglang_version
from deepseek_v4_sm120.plan import memory, roofline
from deepseek_v4_sm120.plan.models import FLASH

ERROR = "relative error against float64"
NOTE = (
    "The block sizes of the prefill kernels come from kernels/mxfp4_moe_table.py; bench/tune_moe.py of a checkout "
    "chooses them for this card. Tune, build, then calibrate."
)
OURS_MXFP8 = f"{OURS}, mxfp8"
DECODE_ROWS = 256  # ops/mxfp4_moe.py; here because the shapes need no torch (a test compares)
PREFILL_ROWS, CHECKED_PREFILL_ROWS = 2048, 264
FULL_CHECK_ROWS, FEWER_EXPERTS = 8, 32  # above so many rows a check has fewer experts: float64 is slow on these cards
TORCH_ROWS = 8
MAX_ERROR = {OURS: 0.004, OURS_MXFP8: 0.06}  # MXFP8's own rounding is 0.045
LOOSE_ERROR = 0.08

MARLIN = "sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe"
REPACK = "sglang.srt.layers.quantization.marlin_utils_fp4"
WORKSPACE = "sglang.srt.layers.quantization.marlin_utils"
CUTLASS_SINCE = (0, 5, 16)


@dataclass(frozen=True)
class Case:
    rows: int
    inter: int

    @property
    def name(self) -> str:
        return f"{'decode' if self.rows <= DECODE_ROWS else 'prefill'}, {self.rows} rows x {self.inter}"

    @property
    def bytes_per_call(self) -> int:
        touched = roofline.distinct_experts(FLASH, self.rows)
        return int(touched * memory.expert_bytes(FLASH) * self.inter / FLASH.expert_width)


def cases(*, tp: int, context: int, concurrency: int, quick: bool) -> list[Case]:
    """Decode, verify and a prefill chunk of this plan; the context plays no part."""
    rows = {1, concurrency} if quick else {1, concurrency, 2 * concurrency, 64}
    return [Case(count, FLASH.expert_width // tp) for count in (*sorted(rows), PREFILL_ROWS)]


def _is_prefill(case: Case) -> bool:
    return case.rows > DECODE_ROWS


def max_error(provider: str, case: Case) -> float:
    return MAX_ERROR.get(provider, LOOSE_ERROR)


def providers() -> tuple[Provider, ...]:
    mxfp8 = functools.partial(_ours, activations="mxfp8")
    return (
        Provider(OURS, our_problem, _ours, packages=("triton",)),
        Provider(OURS_MXFP8, _mxfp8_problem, mxfp8, _is_prefill, ("triton",), optional=True),
        Provider(STOCK, _stock_problem, _stock, packages=("sglang",)),
        Provider("marlin", _other_marlin_problem, Marlin, packages=("sglang",)),
        Provider("torch", lambda: None, _torch, lambda case: case.rows <= TORCH_ROWS),
    )


# ---- inputs


def correctness_inputs(case: Case) -> list:
    """One call of uniform routing; the experts that no row names are NaN."""
    from deepseek_v4_sm120.reference.mxfp4_moe_inputs import Shape, make_inputs

    rows = min(case.rows, CHECKED_PREFILL_ROWS)
    experts = FLASH.experts if rows <= FULL_CHECK_ROWS else FEWER_EXPERTS
    return [make_inputs(Shape(rows, FLASH.hidden, case.inter, experts), seed=rows, device="cuda")]


class TimingInputs:
    """Calls on one layer's weights, 3.4 GB / TP. Few rows deal their experts from a deck, so that none comes again
    before all others have; more rows touch more bytes in one call than a cache holds."""

    def __init__(self, device: str = "cuda"):
        import torch

        self.device = device
        self.generator = torch.Generator(device=device).manual_seed(0)
        self.layers: dict[int, object] = {}

    def layer(self, inter: int):
        """Inputs with every expert's weights."""
        if inter not in self.layers:
            from deepseek_v4_sm120.reference.mxfp4_moe_inputs import Shape, make_inputs

            rows = 4 * FLASH.experts  # so many that every expert is named: the others' weights are NaN
            self.layers[inter] = make_inputs(Shape(rows, FLASH.hidden, inter, FLASH.experts), device=self.device)
        return self.layers[inter]

    def calls(self, case: Case, count: int) -> list:
        import torch

        from deepseek_v4_sm120.reference.mxfp4_moe_inputs import Inputs, Shape, routed_ids, routed_weights

        one = self.layer(case.inter)
        uniform = Shape(case.rows, FLASH.hidden, case.inter, FLASH.experts)
        deck = torch.randperm(FLASH.experts, generator=self.generator, device=self.device).to(torch.int32)
        pairs = case.rows * uniform.topk
        found = []
        for number in range(count):
            if pairs <= FLASH.experts // 4:
                dealt = torch.arange(number * pairs, (number + 1) * pairs, device=self.device) % FLASH.experts
                ids = deck[dealt].view(case.rows, uniform.topk)
            else:
                ids = routed_ids(uniform, self.generator)
            shape = (case.rows, FLASH.hidden)
            hidden = torch.randn(shape, generator=self.generator, device=self.device).bfloat16()
            weights = routed_weights(uniform, self.generator)
            found.append(Inputs(hidden, ids, weights, one.w13, one.w13_scale, one.w2, one.w2_scale))
        return found


def error(provider: str, result, inputs) -> float:
    from deepseek_v4_sm120.reference.accuracy import relative_error
    from deepseek_v4_sm120.reference.mxfp4_moe import mxfp4_moe

    return relative_error(result, mxfp4_moe(**inputs.arguments()))


# ---- ours


def _mxfp8_problem() -> str | None:
    import torch

    from deepseek_v4_sm120.ops.mxfp4_moe import BLOCK_SCALED_MAJOR

    if torch.cuda.get_device_capability()[0] != BLOCK_SCALED_MAJOR:
        return "this GPU has no block-scaled instructions"
    return our_problem()


def _ours(activations: str = "bf16"):
    from deepseek_v4_sm120.ops.mxfp4_moe import mxfp4_moe

    return lambda inputs: mxfp4_moe(**inputs.arguments(), activations=activations)


# ---- others


def _is_cutlass() -> bool:
    """Whether SGLang's default here is FlashInfer's CUTLASS kernels with MXFP8 activations."""
    import torch

    version = sglang_version()
    return version is not None and version >= CUTLASS_SINCE and torch.cuda.get_device_capability()[0] == 12


def _stock_problem() -> str | None:
    if not _is_cutlass():
        return _marlin_problem()
    return None if is_installed("flashinfer") else "FlashInfer, which SGLang's default needs, is not installed"


def _stock():
    return Cutlass() if _is_cutlass() else Marlin()


def _marlin_problem() -> str | None:
    return None if is_installed(MARLIN) else "this SGLang has no Marlin experts"


def _other_marlin_problem() -> str | None:
    return _marlin_problem() if _is_cutlass() else "is what stock runs here"


class Prepared:
    """Calls with weights in another layout, made once for each set of weights."""

    def __init__(self):
        self.weights = self.layout = None

    def __call__(self, inputs):
        if self.weights is not inputs.w13:
            self.weights = self.layout = None  # frees the former
            self.weights, self.layout = inputs.w13, self.prepare(inputs)
        return self.run(inputs)

    def prepare(self, inputs):
        raise NotImplementedError

    def run(self, inputs):
        raise NotImplementedError


class Marlin(Prepared):
    """SGLang's Marlin experts (W4A16), prepared and called as SGLang does."""

    def prepare(self, inputs):
        import torch

        layer = torch.nn.Module()
        for name, tensor in (("w13_weight", inputs.w13), ("w2_weight", inputs.w2)):
            setattr(layer, name, torch.nn.Parameter(tensor.view(torch.int8).clone(), requires_grad=False))
        for name, tensor in (("w13_weight_scale_inv", inputs.w13_scale), ("w2_weight_scale_inv", inputs.w2_scale)):
            scale = tensor.clone().view(torch.float8_e8m0fnu)
            setattr(layer, name, torch.nn.Parameter(scale, requires_grad=False))
        layer.orig_dtype = torch.bfloat16
        importlib.import_module(REPACK).prepare_moe_mxfp4_layer_for_marlin(layer)
        layer.workspace = importlib.import_module(WORKSPACE).marlin_make_workspace(inputs.w13.device, 4)
        return layer

    def run(self, inputs):
        layer = self.layout
        return importlib.import_module(MARLIN).fused_marlin_moe(
            hidden_states=inputs.hidden,
            w1=layer.w13_weight,
            w2=layer.w2_weight,
            w1_scale=layer.w13_weight_scale,
            w2_scale=layer.w2_weight_scale,
            gating_output=inputs.topk_weights,
            topk_weights=inputs.topk_weights,
            topk_ids=inputs.topk_ids,
            workspace=layer.workspace,
            num_bits=4,
            is_k_full=True,
            inplace=False,
            clamp_limit=inputs.swiglu_limit,
        )


class Cutlass(Prepared):
    """FlashInfer's CUTLASS experts (W4A8), as fused_experts_none_to_flashinfer_mxfp4 of SGLang calls them on SM120."""

    tuned: frozenset = frozenset()

    def prepare(self, inputs):
        import flashinfer
        import torch

        half = inputs.w13.shape[1] // 2
        swapped = [torch.cat((t[:, half:], t[:, :half]), dim=1) for t in (inputs.w13, inputs.w13_scale)]  # up first
        scales = [flashinfer.block_scale_interleave(s).reshape_as(s) for s in (swapped[1], inputs.w2_scale)]
        one = torch.ones(inputs.w13.shape[0], dtype=torch.float32, device=inputs.w13.device)
        return {
            "fc1_expert_weights": swapped[0].view(torch.int64),
            "fc2_expert_weights": inputs.w2.view(torch.int64),
            "quant_scales": [scales[0].view(torch.int32), one, scales[1].view(torch.int32), one],
            "swiglu_limit": one * inputs.swiglu_limit,
        }

    def run(self, inputs):
        from flashinfer.autotuner import autotune

        key = (inputs.hidden.shape[0], inputs.w13.shape)
        if key in self.tuned:
            return self._run(inputs)
        self.tuned |= {key}
        with autotune():  # as the server does before it captures graphs
            return self._run(inputs)

    def _run(self, inputs):
        import torch
        from flashinfer import mxfp8_quantize
        from flashinfer.fused_moe import cutlass_fused_moe
        from flashinfer.fused_moe.core import ActivationType

        rows = inputs.hidden.shape[0]
        x, scale = mxfp8_quantize(inputs.hidden, is_sf_swizzled_layout=True, alignment=32)
        out = torch.empty_like(inputs.hidden)
        cutlass_fused_moe(
            input=x,
            token_selected_experts=inputs.topk_ids,
            token_final_scales=inputs.topk_weights,
            output_dtype=out.dtype,
            input_sf=scale,
            use_mxfp8_act_scaling=True,
            activation_type=ActivationType.Swiglu,
            tune_max_num_tokens=1 << max(0, rows - 1).bit_length(),
            output=out,
            **self.layout,
        )
        return out


def _torch():
    """Dequantise a row's experts, then products in bf16."""
    import torch

    from deepseek_v4_sm120.reference.mxfp4_moe import E2M1, GROUP, swiglu

    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.bfloat16, device=device)

    def dequantized(packed, scale):
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
        exponents = torch.exp2(scale.float() - 127).bfloat16()
        return table[codes.int()] * exponents.repeat_interleave(GROUP, dim=-1)

    def call(inputs):
        out = torch.empty_like(inputs.hidden)
        for row, ids in enumerate(inputs.topk_ids.long()):
            both = dequantized(inputs.w13[ids], inputs.w13_scale[ids]) @ inputs.hidden[row]
            gate, up = both.float().chunk(2, dim=1)
            h = swiglu(gate, up, inputs.swiglu_limit).bfloat16()
            y = (dequantized(inputs.w2[ids], inputs.w2_scale[ids]) @ h[:, :, None])[:, :, 0].float()
            out[row] = inputs.routed_scaling * (inputs.topk_weights[row] @ y)
        return out

    return call
