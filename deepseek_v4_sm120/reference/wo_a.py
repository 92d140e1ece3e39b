"""What wo_a computes, twice, in float64: the specification, and a second formulation that shares nothing with it.

The attention's output of a token at position p carries p's rotary embedding in the last 64 of each head's 512 numbers,
32 pairs (a, b). It is taken back: (a + i b) * conj(freqs_cis[p]), in float32, rounded to bf16. Then, for each group of
heads, the product with that group's E4M3 weights and their scale per 128 x 128 block.

Source: DeepSeek's inference/model.py (MLA.forward: apply_rotary_emb with inverse=True, then wo_a).
"""

from __future__ import annotations

import torch

from deepseek_v4_sm120.reference import fp8_linear

HEAD = 512
ROTATED = 64


def wo_a(x, weight, weight_scale, freqs_cis=None, positions=None) -> torch.Tensor:
    """[rows, groups, outputs] float64. x [rows, groups, inputs] bf16, freqs_cis [any, 32] complex64, or None."""
    if freqs_cis is not None:
        x = rotated_back(x, freqs_cis, positions)
    return fp8_linear.fp8_grouped_linear(x, weight, weight_scale)


def rotated_back(x: torch.Tensor, freqs_cis: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """x, bf16, without its rotary embedding, by complex numbers."""
    heads = x.unflatten(-1, (-1, HEAD)).clone()
    pairs = torch.view_as_complex(heads[..., HEAD - ROTATED :].double().unflatten(-1, (-1, 2)).contiguous())
    turned = pairs * freqs_cis.to(torch.complex128).conj()[positions.long()][:, None, None, :]
    heads[..., HEAD - ROTATED :] = torch.view_as_real(turned).flatten(-2).to(x.dtype)
    return heads.flatten(-2)


def rotated_back_by_matrices(x: torch.Tensor, freqs_cis: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The same, row by row: a head times an orthogonal 512 x 512 matrix."""
    rows = []
    for row, position in zip(x.unflatten(-1, (-1, HEAD)), positions.tolist(), strict=True):
        matrix = torch.eye(HEAD, dtype=torch.float64, device=x.device)
        for pair, factor in enumerate(freqs_cis[position].tolist()):
            a = HEAD - ROTATED + 2 * pair
            matrix[a, a] = matrix[a + 1, a + 1] = factor.real
            matrix[a + 1, a], matrix[a, a + 1] = factor.imag, -factor.imag
        rows.append((row.double() @ matrix).to(x.dtype).flatten(-2))
    return torch.stack(rows)
