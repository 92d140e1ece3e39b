"""SGLang's Marlin experts (W4A16), prepared and called as SGLang does; runs where SGLang is installed."""

from __future__ import annotations

import dataclasses
import importlib.util

import torch

from deepseek_v4_sm120.calibrate import mxfp4_moe


def problem() -> str | None:
    """Why Marlin cannot run here, or None."""
    return None if importlib.util.find_spec("sglang") is not None else "sglang is not installed"


class Marlin:
    """One layer's experts in Marlin's layout. `inputs`: reference.mxfp4_moe_inputs.Inputs, left as they are."""

    def __init__(self, inputs):
        self.inputs, self.experts = inputs, mxfp4_moe.Marlin()

    def __call__(self, hidden, topk_ids, topk_weights) -> torch.Tensor:
        own = {"hidden": hidden, "topk_ids": topk_ids, "topk_weights": topk_weights}
        return self.experts(dataclasses.replace(self.inputs, **own))
