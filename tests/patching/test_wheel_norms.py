"""The norms, rotations and roundings between our operators: SGLang's own kernels out of the wheel, compiled for a CPU,
against the specification in float64. Queries, the window's keys, the index's queries, what the compressors' long
prompts store, the rotation back of an attention's output. Positions to the model's last, rows of zeros, of denormals,
with channels as large as a trained model's, without a slot. The releases from 0.5.16 on were run with this, those
before with slots as they take them (of 32 bits up to 0.5.13, none below 0 up to 0.5.15); the suite has the last."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from tests.patching.kernels_on_cpu import arguments_of, call, compiled, text_of
from tests.patching.wheels import every_release, fetch

EPS, LONGEST, WINDOW_PAGE = 1e-6, 1 << 20, 256
POSITIONS = torch.tensor([0, 128, 127, 65536, LONGEST - 128, LONGEST - 1, 3, 524287, 1000])
ROWS = len(POSITIONS)
NOPE, ROPE, GROUP = 448, 64, 64
ONE_ROUNDING, TWO_ROUNDINGS = 2**-8, 1.5 * 2**-8  # of bf16, relative to a rotated pair; of a norm and a rotation
HALF, BEHIND_BF16 = 0.5001, 0.54  # a step of E4M3, and of what bf16 has rounded before
KEYS = {"DType": "bf16_t", "kHeadDim": "512", "kRopeDim": "64", "kPageSize": str(WINDOW_PAGE), "kUsePDL": "false"}
KEYS |= {"kApplyNorm": "true", "kLayout": "deepseek_v4::KVLayout::V4", "kBf16Store": "false", "kPreshuffleSize": "0"}
POOLS = {"c4": (512, 64, 4), "c128": (512, 2, 128), "index": (128, 64, 4)}  # values, entries of a page, ratio
MAIN = """
CALL(queries, FusedQNormRopeKernel<@FusedQNormRopeKernel>::forward(
    view(t[0], {n[0], n[1], 512}), view(t[1], {n[0], n[2], 512}).heads(n[1]), view(t[2], {n[3], 64}),
    view(t[3], {n[0]}), 1e-6f))
CALL(keys, FusedKNormRopeFlashMLAKernel<@FusedKNormRopeFlashMLAKernel>::forward(
    view(t[0], {n[0], 512}, n[1]), view(t[1], {512}), view(t[2], {n[2], 64}), view(t[3], {n[0]}), view(t[4], {n[0]}),
    view(t[5], {n[3], n[4]}), 1e-6f))
CALL(index_queries, FusedQIndexerRopeHadamardQuantKernel<@FusedQIndexerRopeHadamardQuantKernel>::forward(
    view(t[0], {n[0], n[1], 128}), view(t[1], {n[0], n[1], 128}), view(t[2], {n[0], n[1]}), view(t[3], {n[0], n[1], 1}),
    0.25, view(t[4], {n[2], 64}), view(t[5], {n[0]})))
"""
STORE = """CALL(@name, FusedNormRopeKernel<@FusedNormRopeKernel>::forward(
    view(t[0], {n[0], @values}), view(t[1], {n[0], 16}), view(t[2], {@values}), 1e-6f, view(t[3], {n[1], 64}),
    view(t[4], {n[2]}), view(t[5], {n[3], n[4]}), n[5], @ratio))
"""
ROTATION = """CALL(rotation, FusedQKRopeKernel<false>::forward(
    view(t[0], {n[0], n[1], 64}, n[2]).heads(n[1], n[3]), {}, view(t[1], {n[4], 64}), view(t[2], {n[0]}), n[5]))
"""


def with_arguments(calls: str, text: str, given: dict[str, str]) -> str:
    for name in {part.split(">")[0] for part in calls.split("<@")[1:]}:
        calls = calls.replace(f"<@{name}>", f"<{arguments_of(text, name, given)}>")
    return calls


@functools.cache
def kernels(version: str):
    wheel = fetch(version)
    shared = [
        text_of(wheel, f"sgl_kernel/deepseek_v4/{name}.cuh") for name in ("fp8_utils", "kv_layout", "compress_v2")
    ]
    parts = []
    for name, calls in {"main_norm_rope": MAIN, "rope": ROTATION, "fused_norm_rope_v2": ""}.items():
        text = text_of(wheel, f"csrc/deepseek_v4/{name}.cuh")
        calls = with_arguments(calls, text, KEYS)
        for pool, (values, entries, ratio) in POOLS.items() if not calls else ():
            given = KEYS | {"DType": "float", "kHeadDim": str(values), "kPageSize": str(entries)}
            store = STORE.replace("@name", pool).replace("@values", str(values)).replace("@ratio", str(ratio))
            calls += with_arguments(store, text, given)
        parts.append(("\n".join([*shared, text]), calls))
    return compiled(*parts)


def angles(positions) -> torch.Tensor:
    """exp(j angle) [rows, 32]: theta 160,000 and YaRN, pair by pair; any would do here (test_wheel_rotations.py)."""
    by_pair = [160000 ** (-i / 32) * (1 - 15 / 16 * min(max((i - 15) / 10, 0), 1)) for i in range(32)]
    turned = positions.double()[:, None] * torch.tensor(by_pair, dtype=torch.float64)
    return torch.polar(torch.ones_like(turned), turned)


def table(positions) -> torch.Tensor:
    """SGLang's [positions, 64], of which only these rows are there."""
    made = torch.empty(LONGEST, ROPE)  # no page of it is touched but these
    made[positions] = torch.view_as_real(angles(positions)).flatten(1).float()
    return made


def rotated(x, turn) -> torch.Tensor:
    """The last 64 of x, in pairs of neighbours."""
    pairs = torch.view_as_complex(x[..., -ROPE:].double().unflatten(-1, (-1, 2)).contiguous())
    turn = turn if pairs.dim() == 2 else turn[:, None]
    return torch.cat([x[..., :-ROPE].double(), torch.view_as_real(pairs * turn).flatten(-2)], dim=-1)


def normal(x, weight=1.0) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def rotated_with_hadamard(x, turn) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < x.shape[-1]:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return rotated(x, turn) @ matrix * x.shape[-1] ** -0.5


def hostile(*shape, seed=0) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    x[1] = 0
    x[2] *= 1e4
    x[3, ..., 5], x[4, ..., -3] = 3000, -20000  # a channel of a trained model
    x[5], x[6] = x[5] * 1e-6, 1e-40
    return x


def pair_size(x) -> torch.Tensor:
    pairs = x.unflatten(-1, (-1, 2)).norm(dim=-1, keepdim=True)
    return pairs.expand(*pairs.shape[:-1], 2).flatten(-2)


def demand_bf16(found, true, roundings):
    assert ((found.double() - true).abs() <= roundings * pair_size(true) + 1e-39).all()


def demand_e4m3(codes, scale, true, steps=HALF):
    """The nearest codes of true / scale."""
    found = codes.view(torch.float8_e4m3fn).double() * scale
    size = (true / scale).abs().clamp(2.0**-6, 448)
    assert ((found - true).abs() <= steps * torch.exp2(size.log2().floor() - 3) * scale).all()


def power_of_two(largest) -> torch.Tensor:
    return torch.exp2((largest.clamp_min(1e-4) / 448 * (1 - 1e-7)).log2().ceil())


def demand_entry(cache, page_entries, slot, true, steps):
    """An entry of 584 bytes; the bytes that it takes are set to 0xAB."""
    page, place = divmod(slot, page_entries)
    row = cache[page, place * 576 : place * 576 + 576]
    scales = cache[page, page_entries * 576 + place * 8 :][:7]
    groups, scale = true[:NOPE].view(7, GROUP), torch.exp2(scales.double() - 127)
    by_bf16 = groups.bfloat16().double()
    assert (
        (scale - power_of_two(groups.abs().amax(1)))
        .eq(0)
        .logical_or(scale == power_of_two(by_bf16.abs().amax(1)))
        .all()
    )
    demand_e4m3(row[:NOPE].view(7, GROUP).contiguous(), scale[:, None], groups, steps)
    demand_bf16(row[NOPE:].contiguous().view(torch.bfloat16), true[NOPE:], ONE_ROUNDING)
    row.fill_(0xAB), scales.fill_(0xAB)


@every_release("0.5.23")
def test_queries(version):
    heads, padded = 3, 5
    q, out = hostile(ROWS, heads, 512).bfloat16(), torch.full((ROWS, padded, 512), math.nan, dtype=torch.bfloat16)
    call(
        kernels(version),
        "queries",
        [ROWS, heads, padded, LONGEST],
        [q, out, table(POSITIONS), POSITIONS],
    )
    demand_bf16(out[:, :heads], rotated(normal(q), angles(POSITIONS)), TWO_ROUNDINGS)
    assert out[:, heads:].isnan().all()


@every_release("0.5.23")
def test_the_windows_keys(version):
    """Out of wqkv_a's rows, into pages of 256; a row whose slot is negative is written nowhere."""
    latents = torch.full((ROWS, 1536), math.nan, dtype=torch.bfloat16)
    latents[:, 1024:] = hostile(ROWS, 512).bfloat16()
    weight = (1 + 0.3 * torch.randn(512, generator=torch.Generator().manual_seed(1))).bfloat16()
    slots = torch.tensor([0, 255, 256, 511, 300, 767, -1, 513, 2], dtype=torch.int32)
    around = torch.full((5, -(-WINDOW_PAGE * 584 // 576) * 576), 0xAB, dtype=torch.uint8)
    cache = around[1:4]
    kv, given = latents[:, 1024:], [weight, table(POSITIONS), POSITIONS, slots, cache]
    call(kernels(version), "keys", [ROWS, 1536, LONGEST, *cache.shape], [kv, *given])
    expected = rotated(normal(kv, weight.double()), angles(POSITIONS))
    for slot, true in zip(slots.tolist(), expected, strict=True):
        if slot >= 0:
            demand_entry(cache, WINDOW_PAGE, slot, true, HALF)
    assert (around == 0xAB).all(), "something else was written"


@every_release("0.5.23")
def test_the_indexs_queries(version):
    heads = 2
    q, codes = hostile(ROWS, heads, 128).bfloat16(), torch.zeros(ROWS, heads, 128, dtype=torch.uint8)
    weights, out = torch.linspace(-3, 900, ROWS * heads).view(ROWS, heads).bfloat16(), torch.zeros(ROWS, heads, 1)
    call(
        kernels(version),
        "index_queries",
        [ROWS, heads, LONGEST],
        [q, codes, weights, out, table(POSITIONS), POSITIONS],
    )
    true = rotated_with_hadamard(q, angles(POSITIONS))
    scale = true.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448
    demand_e4m3(codes, scale, true, 0.501)
    torch.testing.assert_close(out.double(), weights.double()[..., None] * 0.25 * scale, rtol=1e-6, atol=1e-45)


@pytest.mark.parametrize("decodes", [False, True])
@pytest.mark.parametrize("pool", POOLS)
@every_release("0.5.23")
def test_what_the_compressors_store(version, pool, decodes):
    """Of the plan's valid lines, at the first position of each line's group, where its token's slot is."""
    values, entries, ratio = POOLS[pool]
    firsts = POSITIONS // ratio * ratio
    plan, none = torch.zeros(ROWS, 4, dtype=torch.int32), 7
    plan[:, 0] = firsts + ratio
    plan[none, 0] += 1 if decodes else -plan[none, 0] - 1  # ends no group; is no line
    slots = torch.randperm(4 * entries + ROWS, generator=torch.Generator().manual_seed(2))[:ROWS]
    places = torch.zeros(ROWS if decodes else 3 * ROWS, dtype=torch.int64)
    plan[:, 1] = 0 if decodes else 3 * torch.arange(ROWS, dtype=torch.int32)
    places[:: 1 if decodes else 3] = slots
    row, weight = hostile(ROWS, values, seed=3), 1 + 0.3 * torch.randn(values)
    page_bytes = 132 * entries if pool == "index" else -(-entries * 584 // 576) * 576
    cache = torch.full((4 + ROWS // entries + 1, page_bytes), 0xAB, dtype=torch.uint8)
    numbers = [ROWS, LONGEST, len(places), *cache.shape, decodes]
    given = [row, plan, weight, table(firsts), places, cache]
    call(kernels(version), pool, numbers, given)
    for line, slot in enumerate(slots.tolist()):
        x = normal(row[line : line + 1], weight.double())
        if line == none:
            continue
        if pool != "index":
            demand_entry(cache, entries, slot, rotated(x, angles(firsts[line : line + 1]))[0], BEHIND_BF16)
            continue
        true, (page, place) = rotated_with_hadamard(x, angles(firsts[line : line + 1]))[0], divmod(slot, entries)
        codes, scales = cache[page, place * 128 :][:128], cache[page, 128 * entries + place * 4 :][:4]
        scale = true.abs().amax().clamp_min(1e-4) / 448
        torch.testing.assert_close(scales.contiguous().view(torch.float32)[0].double(), scale, rtol=1e-6, atol=0)
        demand_e4m3(codes.contiguous(), scale, true, 0.501)
        codes.fill_(0xAB), scales.fill_(0xAB)
    assert (cache == 0xAB).all(), "something else was written"


@every_release("0.5.23")
def test_the_rotation_back(version):
    """Of some of an output's heads in place, the rest untouched."""
    out = hostile(ROWS, 8, 512).bfloat16()
    kept, part = out.clone(), out[:, 2:6, NOPE:]
    call(kernels(version), "rotation", [ROWS, 4, 8 * 512, 512, LONGEST, 1], [part, table(POSITIONS), POSITIONS])
    demand_bf16(part, rotated(kept[:, 2:6, NOPE:], angles(POSITIONS).conj()), ONE_ROUNDING)
    part.copy_(kept[:, 2:6, NOPE:])
    assert torch.equal(out, kept)
