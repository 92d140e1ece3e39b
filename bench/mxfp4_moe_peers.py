"""SGLang's Marlin experts (W4A16), prepared and called as SGLang does; runs where SGLang is installed."""

from __future__ import annotations

import importlib
import importlib.util

import torch

MARLIN = "sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe"
REPACK = "sglang.srt.layers.quantization.marlin_utils_fp4"
WORKSPACE = "sglang.srt.layers.quantization.marlin_utils"


def problem() -> str | None:
    """Why Marlin cannot run here, or None."""
    return None if importlib.util.find_spec("sglang") is not None else "sglang is not installed"


class Marlin:
    """One layer's experts in Marlin's layout. `inputs`: reference.mxfp4_moe_inputs.Inputs, left as they are."""

    def __init__(self, inputs):
        layer = torch.nn.Module()
        for name, tensor in (("w13_weight", inputs.w13), ("w2_weight", inputs.w2)):
            setattr(layer, name, torch.nn.Parameter(tensor.view(torch.int8).clone(), requires_grad=False))
        for name, tensor in (("w13_weight_scale_inv", inputs.w13_scale), ("w2_weight_scale_inv", inputs.w2_scale)):
            scale = tensor.clone().view(torch.float8_e8m0fnu)
            setattr(layer, name, torch.nn.Parameter(scale, requires_grad=False))
        layer.orig_dtype = torch.bfloat16
        importlib.import_module(REPACK).prepare_moe_mxfp4_layer_for_marlin(layer)
        self.layer = layer
        self.limit = inputs.swiglu_limit
        self.fused_marlin_moe = importlib.import_module(MARLIN).fused_marlin_moe
        self.make_workspace = importlib.import_module(WORKSPACE).marlin_make_workspace

    def __call__(self, hidden, topk_ids, topk_weights) -> torch.Tensor:
        layer = self.layer
        return self.fused_marlin_moe(
            hidden_states=hidden,
            w1=layer.w13_weight,
            w2=layer.w2_weight,
            w1_scale=layer.w13_weight_scale,
            w2_scale=layer.w2_weight_scale,
            gating_output=topk_weights,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            workspace=self.make_workspace(hidden.device, max_blocks_per_sm=4),
            num_bits=4,
            is_k_full=True,
            inplace=False,
            clamp_limit=self.limit,
        )
