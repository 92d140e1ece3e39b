"""Other implementations of sparse decode that can run on this machine, called as SGLang calls them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from sparse_decode_cases import Case

from deepseek_v4_sm120.reference.sparse_decode_inputs import Inputs


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module.split(".")[0]) is not None and importlib.util.find_spec(module) is not None


@dataclass(frozen=True)
class Peer:
    name: str
    problem: Callable[[], str | None]  # why it cannot run here
    handles: Callable[[Case], bool]
    build: Callable[[], Callable[[Inputs], torch.Tensor]]


def _flashmla_module() -> str | None:
    return next((name for name in ("sgl_kernel.flash_mla", "flash_mla") if is_installed(name)), None)


def _flashmla_problem() -> str | None:
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        return "no kernel for this GPU"
    return None if _flashmla_module() else "neither sgl_kernel nor flash_mla is installed"


def _flashmla() -> Callable[[Inputs], torch.Tensor]:
    """One scheduling object for all layers of a step, as SGLang keeps it."""
    module = importlib.import_module(_flashmla_module())
    metadata = module.get_mla_metadata()[0]

    def call(inputs: Inputs) -> torch.Tensor:
        extra = inputs.extra_kv_pages
        return module.flash_mla_with_kvcache(
            q=inputs.q,
            k_cache=inputs.kv_pages.view(torch.float8_e4m3fn),
            block_table=None,
            cache_seqlens=None,
            head_dim_v=inputs.q.shape[-1],
            tile_scheduler_metadata=metadata,
            softmax_scale=inputs.q.shape[-1] ** -0.5,
            is_fp8_kvcache=True,
            indices=inputs.indices,
            attn_sink=inputs.attn_sink,
            extra_k_cache=None if extra is None else extra.view(torch.float8_e4m3fn),
            extra_indices_in_kvcache=inputs.extra_indices,
            topk_length=inputs.topk_length,
            extra_topk_length=inputs.extra_topk_length,
        )[0]

    return call


TRITON_MODULE = "sglang.kernels.ops.attention.flash_mla_sm120_triton"


def _triton_problem() -> str | None:
    return None if is_installed("sglang") and is_installed(TRITON_MODULE) else "sglang is not installed"


def _triton() -> Callable[[Inputs], torch.Tensor]:
    decode = importlib.import_module(TRITON_MODULE).flash_mla_sparse_decode_triton

    def call(inputs: Inputs) -> torch.Tensor:
        extra = (inputs.extra_kv_pages, inputs.extra_indices, inputs.extra_topk_length)
        dim = inputs.q.shape[-1]
        return decode(
            inputs.q, inputs.kv_pages, inputs.indices, inputs.topk_length, inputs.attn_sink, dim, dim**-0.5, *extra
        )[0].view_as(inputs.q)

    return call


PEERS = (
    Peer("FlashMLA", _flashmla_problem, lambda case: case.heads == 64, _flashmla),
    Peer("Triton", _triton_problem, lambda case: case.rows * (128 + case.kind.length) <= 16 * 640, _triton),
)
