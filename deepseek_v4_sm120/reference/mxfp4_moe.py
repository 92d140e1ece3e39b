"""Truth for ops/mxfp4_moe.py, from the definition, in float64. Two formulations that share no arithmetic.

    W  = E2M1 code * 2^(UE8M0 byte - 127), one byte per 32 inputs; the even input is in a byte's low nibble
    g, u = W1 x, W3 x                     h = silu(min(g, limit)) * clamp(u, -limit, limit)
    out  = routed_scaling * sum_k weight_k * (W2 h)_k

E2M1: bit 3 is the sign, the rest indexes 0, .5, 1, 1.5, 2, 3, 4, 6. UE8M0 255 is NaN. The gate is clamped from above
only. An id that names no local expert adds nothing, and nothing of that expert is read.

Nothing is rounded here, so the errors of all implementations are measured against the same numbers. `activations`
"mxfp8" is the one exception: it quantises what the two products read, as MXFP8 kernels do (E4M3, one power-of-two
scale per 32 values, the smallest with which the greatest value stays within 448).
"""

from __future__ import annotations

import functools

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP = 32  # inputs per scale byte
E4M3_MAX = 448.0
ACTIVATIONS = ("bf16", "mxfp8")


def decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K / 2] -> float64 [..., K]."""
    values = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float64, device=packed.device)
    every = torch.arange(256, device=packed.device)
    pairs = values[torch.stack((every & 15, every >> 4), dim=-1)]  # of each byte
    return torch.nn.functional.embedding(packed.int(), pairs).flatten(-2)


def decode_ue8m0(scale: torch.Tensor) -> torch.Tensor:
    """uint8 -> float64: 2^(byte - 127), NaN for 255."""
    exponent = scale.double() - 127
    return torch.where(scale == 255, torch.full_like(exponent, float("nan")), torch.exp2(exponent))


def dequantize(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K / 2] and uint8 [..., K / 32] -> float64 [..., K]."""
    values = decode_e2m1(packed).unflatten(-1, (-1, GROUP))
    return values.mul_(decode_ue8m0(scale).unsqueeze(-1)).flatten(-2)


@functools.cache
def _pairs(device) -> torch.Tensor:
    """float64 [byte of two codes]: the bits of both in float32, for a look-up of one number is the fastest that is."""
    every = torch.arange(256, dtype=torch.uint8, device=device)
    return decode_e2m1(every[:, None]).float().view(torch.float64).flatten()


def dequantize_float32(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`dequantize` in float32, exact where a scale is no extreme one (2^-124 to 2^125), in a fraction of the time."""
    pairs = _pairs(packed.device).index_select(0, packed.flatten().int())
    values = pairs.view(torch.float32).view(*scale.shape, GROUP)
    return values.mul_(decode_ue8m0(scale).float().unsqueeze(-1)).flatten(-2)


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float | None) -> torch.Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit); no clamp where limit is None."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate) * up


def quantize_mxfp8(values: torch.Tensor) -> torch.Tensor:
    """float64 [..., K] -> the float64 that MXFP8 keeps of it: E4M3, a scale per 32 values, rounded up to 2^n."""
    groups = values.unflatten(-1, (-1, GROUP))
    greatest = groups.abs().amax(dim=-1, keepdim=True)
    exponent = torch.ceil(torch.log2((greatest / E4M3_MAX).clamp_min(2.0**-127)))
    scale = torch.exp2(exponent)
    kept = (groups / scale).to(torch.float32).to(torch.float8_e4m3fn).double()
    return (kept * scale).flatten(-2)


def local_experts(topk_ids, num_experts: int, *, first_expert: int = 0, expert_map=None) -> torch.Tensor:
    """int64 like topk_ids: the row of w13 and w2 that an id names, or -1."""
    ids = topk_ids.long()
    if expert_map is not None:
        known = (ids >= 0) & (ids < expert_map.numel())
        local = torch.where(known, expert_map.long()[ids.clamp(0, expert_map.numel() - 1)], -1)
    else:
        local = ids - first_expert
    return torch.where((ids >= 0) & (local >= 0) & (local < num_experts), local, -1)


def mxfp4_moe(
    hidden,
    topk_ids,
    topk_weights,
    w13,
    w13_scale,
    w2,
    w2_scale,
    *,
    routed_scaling: float = 1.0,
    swiglu_limit: float | None = 10.0,
    first_expert: int = 0,
    expert_map=None,
    up_first: bool = False,
    activations: str = "bf16",
):
    """Arguments as in ops/mxfp4_moe.py. Returns float64 [rows, hidden]. Expert by expert, dense products."""
    local = local_experts(topk_ids, w13.shape[0], first_expert=first_expert, expert_map=expert_map)
    keep = quantize_mxfp8 if activations == "mxfp8" else lambda values: values
    x = keep(hidden.double())
    out = torch.zeros(hidden.shape, dtype=torch.float64, device=hidden.device)
    inter = w13.shape[1] // 2
    for expert in local[local >= 0].unique().tolist():
        rows, slots = (local == expert).nonzero(as_tuple=True)
        both = x[rows] @ dequantize(w13[expert].view(torch.uint8), w13_scale[expert].view(torch.uint8)).T
        first, second = both[:, :inter], both[:, inter:]
        gate, up = (second, first) if up_first else (first, second)
        h = keep(swiglu(gate, up, swiglu_limit))
        y = h @ dequantize(w2[expert].view(torch.uint8), w2_scale[expert].view(torch.uint8)).T
        out.index_add_(0, rows, y * topk_weights[rows, slots].double()[:, None])
    return out * routed_scaling


def mxfp4_moe_by_bits(
    hidden,
    topk_ids,
    topk_weights,
    w13,
    w13_scale,
    w2,
    w2_scale,
    *,
    routed_scaling=1.0,
    swiglu_limit=10.0,
    first_expert=0,
    expert_map=None,
    up_first=False,
):
    """The same, pair by pair, with weights built from their bit fields as integers and the products by group of 32."""

    def halves(packed):  # twice the value, an integer: sign * (mantissa + 2 where normal) * 2^max(e - 1, 0)
        codes = torch.stack((packed.int() & 15, packed.int() >> 4), dim=-1).flatten(-2)
        e, m = (codes >> 1) & 3, codes & 1
        magnitude = torch.where(e == 0, m, (m + 2) << (e - 1).clamp_min(0))
        return torch.where(codes >= 8, -magnitude, magnitude)

    def product(packed, scale, vector):
        by_group = (halves(packed).double() * vector).unflatten(-1, (-1, GROUP)).sum(-1)
        return torch.ldexp(by_group, scale.int() - 128).sum(-1)

    out = torch.zeros(hidden.shape, dtype=torch.float64, device=hidden.device)
    inter = w13.shape[1] // 2
    for row in range(hidden.shape[0]):
        for slot in range(topk_ids.shape[1]):
            name = int(topk_ids[row, slot])
            if expert_map is None:
                expert = name - first_expert
            else:
                expert = int(expert_map[name]) if 0 <= name < expert_map.numel() else -1
            if name < 0 or not 0 <= expert < w13.shape[0]:
                continue
            both = product(w13[expert].view(torch.uint8), w13_scale[expert].view(torch.uint8), hidden[row].double())
            gate, up = (both[inter:], both[:inter]) if up_first else (both[:inter], both[inter:])
            if swiglu_limit is not None:
                gate = torch.minimum(gate, torch.tensor(swiglu_limit, dtype=gate.dtype, device=gate.device))
                up = torch.maximum(torch.minimum(up, gate.new_tensor(swiglu_limit)), gate.new_tensor(-swiglu_limit))
            h = gate / (1 + torch.exp(-gate)) * up
            y = product(w2[expert].view(torch.uint8), w2_scale[expert].view(torch.uint8), h)
            out[row] += routed_scaling * float(topk_weights[row, slot]) * y
    return out
