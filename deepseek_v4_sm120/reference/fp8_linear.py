"""What fp8_linear computes, twice, in float64: the specification, and a second formulation that shares nothing with it.

    y[t, n] = sum over k of x[t, k] * w[n, k] * scale[n / 128, k / 128]

x bf16, w E4M3 (1 sign, 4 exponent, 3 mantissa bits, bias 7, no infinities, 0x7f and 0xff NaN), scale float32 or UE8M0
(2^(byte - 127), 255 NaN). The FP8-activation path of stock SGLang also rounds x: per row and 128 inputs, to E4M3
(`quantized_activations`).

Source: DeepSeek's inference/kernel.py (act_quant, fp8_gemm).
"""

from __future__ import annotations

import torch

BLOCK = 128
E4M3_MAX = 448.0


def fp8_linear(x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """[rows, outputs] float64: dequantised weights, one product."""
    return x.double() @ dequantized(weight, weight_scale).T


def fp8_grouped_linear(x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """[rows, groups, outputs] float64."""
    groups = [fp8_linear(x[:, g], weight[g], weight_scale[g]) for g in range(weight.shape[0])]
    return torch.stack(groups, dim=1)


def dequantized(weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """[outputs, inputs] float64."""
    scale = scale_values(weight_scale)
    if not weight.shape[0] % BLOCK and not weight.shape[1] % BLOCK:
        outputs, inputs = (size // BLOCK for size in weight.shape)
        blocks = decoded(weight).view(outputs, BLOCK, inputs, BLOCK)
        return blocks.mul_(scale[:outputs, None, :inputs, None]).view(weight.shape)
    scale = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return weight.double() * scale[: weight.shape[0], : weight.shape[1]]


def decoded(weight: torch.Tensor) -> torch.Tensor:
    """E4M3 in float64, by a look-up, which is faster than torch's conversion by several times."""
    every = torch.arange(256, dtype=torch.uint8, device=weight.device).view(torch.float8_e4m3fn).double()
    return every.index_select(0, weight.contiguous().view(torch.uint8).flatten().int()).view(weight.shape)


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """float64 values of float32 or UE8M0 scales."""
    if scale.dtype == torch.float32:
        return scale.double()
    exponents = scale.view(torch.uint8).double()
    return torch.where(exponents == 255, torch.nan, torch.exp2(exponents - 127))


def fp8_linear_by_bits(x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """The same from the bits, block by block: weights decoded by hand, each block of inputs scaled after its sum."""
    codes = weight.view(torch.uint8).to(torch.int64)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    significand = torch.where(exponent > 0, mantissa + 8, mantissa)  # value = significand * 2^(max(exponent, 1) - 10)
    magnitude = significand.double() * torch.exp2((exponent.clamp(min=1) - 10).double())
    value = torch.where(codes >> 7 == 1, -magnitude, magnitude)
    value = torch.where((codes & 0x7F) == 0x7F, torch.nan, value)
    outputs, inputs = weight.shape
    scale, total = scale_values(weight_scale), torch.zeros(x.shape[0], outputs, dtype=torch.float64, device=x.device)
    row = torch.arange(outputs, device=x.device) // BLOCK
    for block in range(inputs // BLOCK):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        total += torch.einsum("tk,nk->tn", x[:, part].double(), value[:, part]) * scale[row, block]
    return total


def quantized_activations(x: torch.Tensor, *, power_of_two: bool = False) -> torch.Tensor:
    """x as the FP8-activation path sees it, float64: E4M3 with a scale per row and 128 inputs."""
    rows, inputs = x.shape
    blocks = x.double().view(rows, inputs // BLOCK, BLOCK)
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-10) / E4M3_MAX
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    return ((blocks / scale).float().to(torch.float8_e4m3fn).double() * scale).view(rows, inputs)


def latent_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[rows, inputs] float64: RMSNorm of the queries' latent. Source: DeepSeek's inference/model.py (RMSNorm)."""
    x = x.double()
    return x / (x.square().mean(1, keepdim=True) + eps).sqrt() * weight.double()


def draft_input(hidden, embedded, of_hidden, of_embedded, *, ids=None) -> torch.Tensor:
    """[rows, streams, outputs] float64: what a draft's block begins with, of two halves with norm, eps, weight and
    weight_scale; `ids` choose rows of `embedded`. Source: DeepSeek's inference/model.py (MTPBlock)."""
    rows, streams, inputs = hidden.shape
    embedded = embedded if ids is None else embedded[ids.long()]
    products = [
        fp8_linear(latent_norm(x, half.norm, half.eps), half.weight, half.weight_scale)
        for x, half in ((hidden.reshape(-1, inputs), of_hidden), (embedded, of_embedded))
    ]
    return products[0].view(rows, streams, -1) + products[1][:, None]
