"""Numbers as a trained model has them, and as no random ones are: every operator's kernels as compiled for SM120.

A few channels thousands of times the others (massive activations), rows next to nothing, streams of very different
size, heads that look at the first token alone, scores of 100 and more, clamps that are met, scales at both ends of
their range. Every number is judged by itself, by what its own terms are: what an outlier is worth in one output is no
excuse for another, which does not read it.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch

from deepseek_v4_sm120.ops import all_reduce as all_reduce_op
from deepseek_v4_sm120.ops import bf16_linear, bf16_linear_draft_head, fp8_linear, mhc, mxfp4_moe, sparse_decode, wo_a
from deepseek_v4_sm120.ops import compressor as compressor_op
from deepseek_v4_sm120.ops import index_select as index_op
from deepseek_v4_sm120.reference import all_reduce as all_reduce_reference
from deepseek_v4_sm120.reference import bf16_linear_draft_head as head_reference
from deepseek_v4_sm120.reference import compressor as compressor_reference
from deepseek_v4_sm120.reference import fp8_linear as fp8_reference
from deepseek_v4_sm120.reference import index_select as index_reference
from deepseek_v4_sm120.reference import kv_pages
from deepseek_v4_sm120.reference import mhc as mhc_reference
from deepseek_v4_sm120.reference import mxfp4_moe as moe_reference
from deepseek_v4_sm120.reference import sparse_decode as sparse_reference
from deepseek_v4_sm120.reference import wo_a as wo_a_reference
from deepseek_v4_sm120.reference.accuracy import strict_error
from deepseek_v4_sm120.specs import bounds
from deepseek_v4_sm120.specs import compressor as compressor_spec
from deepseek_v4_sm120.specs import fp8_linear as fp8_spec
from deepseek_v4_sm120.specs import index_select as index_spec
from deepseek_v4_sm120.specs import mhc as mhc_spec
from deepseek_v4_sm120.specs import mxfp4_moe as moe_spec
from deepseek_v4_sm120.specs import sparse_decode as sparse_spec
from deepseek_v4_sm120.specs import wo_a as wo_a_spec
from tests.emulator.emulated import emulated, generator, group, on_cards

BF16, FLOAT32 = 2.0**-8, 2.0**-24  # of a number, by rounding it once
SUMS = 64 * FLOAT32  # of the magnitudes that a sum in float32 has
MASSIVE = (3, 101, 301)  # channels


def trained(rows: int, inputs: int, seed: int, massive: float = 1e5) -> torch.Tensor:
    """[rows, inputs] bf16 of 0.01, but for three channels; the last row is next to nothing."""
    x = 0.01 * torch.randn(rows, inputs, generator=generator(seed))
    x[:, MASSIVE] = massive * torch.tensor([1.0, -0.05, 0.002]) * (1 + 0.1 * torch.randn(rows, 3))
    x[-1] *= 1e-30 / massive
    return x.bfloat16()


def excess(found, truth, magnitudes, roundings: float) -> float:
    """The worst number's error beyond its roundings, in that of its terms' magnitudes."""
    beyond = (found.double() - truth).abs() - roundings * truth.abs()
    assert bool(found.isfinite().all())
    return float((beyond.clamp_min(0) / magnitudes.clamp_min(1e-300)).max())


def of_product(found, x, weight, roundings: float) -> float:
    x, weight = x.double(), weight.double()
    return excess(found, x @ weight.T, x.abs() @ weight.abs().T, roundings)


# ---- dense layers


@pytest.mark.parametrize("rows", [1, 9, 33])
def test_bf16_linear(rows):
    x, weight = trained(rows, 512, rows), torch.randn(64, 512, generator=generator(7)).bfloat16()
    weight[::2, MASSIVE] = 0
    with emulated(seed=1, most_instructions=400):
        found = bf16_linear.bf16_linear(x, weight)
    assert of_product(found, x, weight, 0) < SUMS


SCALES = {
    "UE8M0": torch.tensor([[0, 1, 2, 100], [127, 119, 90, 60]], dtype=torch.uint8),
    "float32": torch.tensor([[1e-40, 0.0, 1e-38, 1e-30], [1e-3, 1e-10, 3e-39, 1e-20]]),
}


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("rows", [1, 9, 70])
def test_fp8_linear(rows, kind):
    """Scales that are zero, subnormal, and far from their neighbours'."""
    codes, scale = fp8_spec.make_weight(1, 256, 512, generator(rows))[0][0], SCALES[kind]
    codes.view(torch.uint8)[::2, MASSIVE] = 0
    x = trained(rows, 512, rows)
    with emulated(seed=1, most_instructions=400):
        found = fp8_linear.fp8_linear(x, codes, scale)
    values = torch.exp2(scale.double() - 127) if kind == "UE8M0" else scale.double()
    weight = codes.double() * values.repeat_interleave(128, 0).repeat_interleave(128, 1)
    for some in (slice(0, 128), slice(128, 256)):
        truth, least = (x.double() @ weight[some].T).abs(), torch.finfo(torch.bfloat16).tiny
        assert (
            of_product(torch.where(truth < least, x.double() @ weight[some].T, found[:, some]), x, weight[some], BF16)
            < SUMS
        )
    assert strict_error(found, fp8_reference.fp8_linear(x, codes, scale)) < bounds.FP8_LINEAR.truth


@pytest.mark.parametrize("rows", [1, 5])
def test_wo_a_at_the_last_position(rows):
    """Heads with massive dimensions; rotations of the last of 1,048,576 positions. Of four outputs one reads what is
    rotated alone, one all but the massive dimensions."""
    _, codes, scale, _, positions = wo_a_spec.make_wo_a(rows, 2, generator(rows), outputs=128, inputs=1024, table=64)
    heads = codes.view(torch.uint8).unflatten(2, (-1, 512))
    heads[:, ::4, :, :448], heads[:, 1::4][..., MASSIVE] = 0, 0
    x = torch.cat([trained(rows, 512, group) for group in range(4)], 1).view(rows, 2, 1024)
    freqs = torch.empty(1 << 20, 32, dtype=torch.complex64)
    positions = (1 << 20) - 1 - torch.arange(rows, dtype=positions.dtype)
    angles = positions.double()[:, None] * 1e4 ** (-torch.arange(32) / 32.0)
    freqs[positions.long()] = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
    with emulated(seed=1, most_instructions=400):
        found = wo_a.wo_a(x, codes, scale, freqs_cis=freqs, positions=positions)
    turned = wo_a_reference.rotated_back(x, freqs, positions)
    for i, of_group in enumerate(codes):
        weight = of_group.double() * scale[i].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        assert of_product(found[:, i], turned[:, i], weight, BF16) < BF16  # of x rotated, some fall on the other side


def test_the_drafts_head():
    """Groups of zeros, of subnormals, with one outlier, and with what is no number; x with massive channels."""
    weight = torch.randn(320, 1024, generator=generator(1)).bfloat16()
    weight[:128, :128], weight[:128, 128:256], weight[5, 300], weight[200, 400] = 0, 1e-39, 3e4, math.nan
    copy = bf16_linear_draft_head.empty(weight)
    bf16_linear_draft_head.fill(weight, copy)
    kept = head_reference.dequantised(copy)
    is_number = torch.ones(320, 1024, dtype=torch.bool)
    is_number[200, 384:448] = False
    assert bool(kept[~is_number].isnan().all()) and not kept[:128, :128].any()
    scales = weight.double().view(320, 16, 64).abs().amax(2, keepdim=True) / 7
    error = (kept - weight.double()).view(320, 16, 64).abs()
    assert bool((error <= 0.53 * scales + 1e-39)[is_number.view(320, 16, 64)].all())
    x = trained(2, 1024, 1, 100.0)
    with emulated(seed=1, most_instructions=400):
        found = bf16_linear_draft_head.draft_head(x, copy, weight).double()
    exact, scores = x.double() @ weight.double().T, x.double() @ kept.T
    assert bool(found[:, 200].isnan().all())
    numbers = [n for n in range(320) if n != 200]
    terms = (x.double().abs() @ kept.abs().T)[:, numbers]
    near = (found - scores)[:, numbers].abs() <= 5e-4 * terms  # beside a massive channel sums begin far off
    anew = (found - exact)[:, numbers].abs() <= 1e-6 * terms
    assert bool((near | anew).all()) and bool((near.sum(1) >= len(numbers) - 4).all())


# ---- experts


def identity_experts(rows: int, hidden: int, inter: int = 256) -> moe_spec.Inputs:
    """One expert, of which out is h; half of gate's and up's rows have no weight at the massive channels."""
    inputs = moe_spec.make_inputs(moe_spec.Shape(rows, hidden, inter, experts=1, topk=1), seed=3, device="cpu")
    inputs.hidden, inputs.topk_weights = trained(rows, hidden, rows, 300.0) * 30, torch.ones(rows, 1)
    for channel in MASSIVE:
        inputs.w13[0, ::2, channel // 2] &= 0x0F if channel % 2 else 0xF0
        inputs.w13_scale[0, 1::2, channel // 32] -= 9
    h = torch.arange(inter)
    inputs.w2[:], inputs.w2_scale[:] = 0, 127
    inputs.w2[0, h, h // 2] = torch.where(h % 2 == 0, 0x02, 0x20).byte()
    return inputs


WAYS = {
    "few": (4096, {}),
    "sorted": (4096, {"reproducible": True}),
    "wide": (512, {}),
    "scaled": (512, {"activations": "mxfp8"}),
}


def experts(way: str, inputs, monkeypatch) -> torch.Tensor:
    monkeypatch.setattr(mxfp4_moe, "DECODE_ROWS", 256 if way == "few" else 0)
    with emulated(seed=1, most_instructions=400, multiprocessors=4):
        return mxfp4_moe.mxfp4_moe(**inputs.arguments(), **WAYS[way][1])


@pytest.mark.parametrize("way", WAYS)
def test_experts_beside_massive_activations(way, monkeypatch):
    inputs = identity_experts(6, WAYS[way][0])
    inter = inputs.w13.shape[1] // 2
    found = experts(way, inputs, monkeypatch)[:, :inter]
    x, weight = inputs.hidden.double(), moe_reference.dequantize(inputs.w13[0], inputs.w13_scale[0])
    if way == "scaled":
        x = moe_reference.quantize_mxfp8(x)
    # an error of gate or up is one of h: as SwiGLU's slopes, which are at most 1.1, and the other's greatest number
    both, magnitudes = x @ weight.T, x.abs() @ weight.abs().T * SUMS
    if way == "sorted":  # x to multiples of 2^-14 of the greatest power of two of 32
        grid = x.unflatten(1, (-1, 32)).abs().amax(2).log2().floor().exp2() * 2.0**-15
        magnitudes += grid.repeat_interleave(32, 1) @ weight.abs().T
    gate, up = both[:, :inter], both[:, inter:]
    truth = moe_reference.swiglu(gate, up, 10.0)
    allowed = 1.1 * magnitudes[:, :inter] * up.abs().clamp_max(10) + gate.abs().clamp_max(10) * magnitudes[:, inter:]
    if way == "scaled":
        groups = truth.unflatten(1, (-1, 32)).abs()
        allowed += (groups / 16).maximum(groups.amax(2, keepdim=True) * 2.0**-17).flatten(1)
    assert excess(found, truth, allowed + 1e-37, 2 * BF16) < 1
    assert float(truth[0, ::2].abs().median()) > 0.01, "there is something beside the massive channels"


GATES = (0.0, 0.1, 1.0, -1.0, 3.0, -5.0, 9.94, 10.0, 10.06, 50.0, 8e3, -10.0, -20.0, -80.0, -88.0, -104.0, -8e3)
# the last ones: halfway between two of E4M3, and on both sides of where a scale is the next power of two
UPS = (1.0, -9.94, 10.0, -10.06, 8e3, -8e3, -0.0, 1e-39, 1.0625, -1.1875, 1.75, 1.7578125)


@pytest.mark.parametrize("way", WAYS)
def test_experts_at_the_clamps(way, monkeypatch):
    """gate and up are two of a row's inputs."""
    inputs = identity_experts(len(GATES) * len(UPS), WAYS[way][0])
    inter = inputs.w13.shape[1] // 2
    inputs.w13[:], inputs.w13_scale[:] = 0, 127
    inputs.w13[0, :inter, 0], inputs.w13[0, inter:, 17] = 0x02, 0x02
    inputs.hidden = torch.zeros_like(inputs.hidden)
    inputs.hidden[:, 0], inputs.hidden[:, 34] = torch.tensor([(g, u) for g in GATES for u in UPS]).T.bfloat16()
    found = experts(way, inputs, monkeypatch)[:, :inter]
    is_rounded = way == "scaled"
    keep = moe_reference.quantize_mxfp8 if is_rounded else lambda values: values
    gate, up = keep(inputs.hidden.double())[:, [0, 34]].T
    truth = keep(moe_reference.swiglu(gate, up, 10.0)[:, None].expand(-1, inter))
    if is_rounded:  # but for what is next to nothing, and what falls halfway between two as h
        assert float(((found.double() - truth).abs() <= 1e-30).double().mean()) > 0.97
    assert excess(found, truth, truth.abs() * is_rounded * 2.0**-3 + 1e-30, 2 * BF16) <= 1


# ---- attention


def trained_keys(count: int, seed: int, first_tokens: torch.Tensor) -> torch.Tensor:
    """Rows of root mean square 1 with three massive dimensions; of first tokens nearly all is in three others."""
    rows = torch.randn(count, 512, generator=generator(seed))
    rows[:, [7, 300, 460]] *= torch.tensor([12.0, 6.0, 5.0])
    rows[first_tokens] *= 3e-3
    rows[first_tokens, 7], rows[first_tokens, 130], rows[first_tokens, 500] = -60.0, 8.0, 20.0
    return rows * rows.square().mean(1, keepdim=True).rsqrt()


SINKS = (0.0, -60.0, 60.0, -1e4, 300.0, 5.0, -math.inf)


@pytest.mark.parametrize("query_scale", [1.0, 8.0])
@pytest.mark.parametrize(
    "heads, kernel",
    [
        *((16, {"prefill": False, "pairs": False}), (16, {"prefill": False, "pairs": True})),
        *((64, {"prefill": False, "pairs": True}), (8, {"prefill": True}), (64, {"prefill": True})),
    ],
    ids=str,
)
def test_sparse_decode(heads, kernel, query_scale):
    """Half of the heads look at first tokens, whose values are next to nothing: logits up to 150, and sinks beyond."""
    extra = sparse_spec.CacheShape(64, 96, lengths=(96, 3), masked=0.1)
    shape = sparse_spec.Shape(2, heads, sparse_spec.WINDOW, extra)
    inputs = sparse_spec.make_inputs(shape, seed=heads, device="cpu")
    caches = [
        (inputs.kv_pages, inputs.indices, inputs.topk_length),
        (inputs.extra_kv_pages, inputs.extra_indices, inputs.extra_topk_length),
    ]
    for seed, (pages, indices, lengths) in enumerate(caches):
        slots = pages.shape[0] * pages.shape[1]
        live = indices[:, 0][sparse_reference.valid_candidates(indices, slots, lengths)].unique()
        kv_pages.write_rows(pages, live, trained_keys(len(live), seed, torch.arange(0, len(live), 37)))
    q = torch.randn(2, 1, heads, 512, generator=generator(heads)) * query_scale
    q[:, :, ::2, 7] -= query_scale * 20 * torch.rand(2, 1, heads // 2, generator=generator(1))
    inputs.q, inputs.attn_sink = q.bfloat16(), torch.tensor(SINKS).repeat(heads)[:heads]
    with emulated(seed=1, most_instructions=400):
        out, lse = sparse_decode.sparse_decode(**inputs.arguments(), **kernel, return_lse=True)
    truth, true_lse = sparse_reference.sparse_decode(**inputs.arguments())
    keys, valid = (
        torch.cat(both, 1)
        for both in zip(*(sparse_reference._gather(*cache, torch.float64) for cache in caches), strict=True)
    )
    scores = torch.einsum("rhd,rnd->rhn", inputs.q[:, 0].double(), keys) * 512**-0.5
    scores = scores.masked_fill(~valid[:, None], -math.inf)
    top = torch.maximum(scores.amax(-1), inputs.attn_sink.double())[..., None]
    weights = torch.exp(scores - top)
    weights /= weights.sum(-1, keepdim=True) + torch.exp(inputs.attn_sink.double()[:, None] - top)
    terms = torch.einsum("rhn,rnd->rhd", weights, keys.abs())
    # bf16 of out and of the weights; what weighs less than a millionth of a leaf's greatest may be nothing
    assert excess(out[:, 0], truth[:, 0], BF16 * terms + 1e-6 * weights.amax(-1, keepdim=True) + 1e-37, BF16) < 1
    assert float((lse.double() - true_lse).abs().max()) < 1e-4


# ---- the indexer


@pytest.mark.parametrize("fp4", [False, True])
@pytest.mark.parametrize("kind", ["all equal", "all zero", "zeros of both signs", "negative", "few above many equal"])
def test_index_select(kind, fp4):
    """Of equal logits the lowest entries, whatever their zeros' signs."""
    rows, length = 2, 1500
    inputs = index_spec.make_inputs(index_spec.Shape(rows, (length,), fp4, columns=24), seed=3, device="cpu")
    given = inputs.arguments()
    keys = given["k_pages"].flatten(1)
    keys[:] = keys[0]  # one page's, in all
    one = (keys[:, : 64 * (64 if fp4 else 128)].view(-1, 64, 64 if fp4 else 128), keys[:, 64 * (64 if fp4 else 128) :])
    for part in (one[0], one[1].view(-1, 64, 4)):
        part[:] = part[:, :1]
    best = []
    if kind == "all zero":
        given["q"].view(torch.uint8)[:] = 0
    elif kind == "zeros of both signs":
        given["q"].view(torch.uint8)[:] = 0x80 if not fp4 else 0x88
        given["weights"][:, ::2] *= -1
    elif kind == "negative":
        given["weights"] = -given["weights"].abs()
    elif kind == "few above many equal":
        given["weights"] = given["weights"].abs() + 0.1
        best = [64, 777, 1499]
        scales = one[1].view(-1, 64, 4)
        for entry in best:
            page = int(given["page_table"][0, entry // 64])
            place = scales[page, entry % 64]
            place.copy_(place + 1 if fp4 else (place.view(torch.float32) * 2).view(torch.uint8))
        given["page_table"][1] = given["page_table"][0]
    entries = torch.empty((rows, 512), dtype=torch.int32)
    logits = torch.empty((rows, 512))
    with emulated(seed=1, most_instructions=400, multiprocessors=6):
        index_op.index_select(**given, entries=entries, logits=logits)
    true = index_reference.mqa_logits(**given)[:, :length]
    assert bool(
        ((logits - true.gather(1, entries.long())).abs() <= bounds.INDEX_SELECT.truth * true.abs().amax()).all()
    )
    others = [entry for entry in range(length) if entry not in best][: 512 - len(best)]
    assert entries.tolist() == [sorted([*best, *others])] * rows
    assert len(logits[0].unique()) == 1 + bool(best) and (kind != "negative" or bool((logits <= 0).all()))


# ---- compressors


@pytest.mark.parametrize("kind", compressor_spec.KINDS)
@pytest.mark.parametrize("tokens", [1, 5])
def test_compressor(kind, tokens):
    """Scores of 100 and more, which leave one token; massive values beside ordinary ones."""
    ratio, head_dim, fp4 = compressor_spec.KINDS[kind]
    groups = [1 + row % 3 for row in range(6)]
    if tokens == 1:
        made = compressor_spec.make_inputs(kind, [ratio * n for n in groups], device="cpu", score_scale=60.0)
    else:
        requests = [compressor_spec.Request(ratio * n - 2, tokens) for n in groups]
        made = compressor_spec.make_step(kind, requests, seed=tokens, device="cpu", score_scale=60.0)
    for values in (made.kv_score, made.state):
        values[..., 5] *= 1e4
        values[..., head_dim - 3] *= 1e3
    made.norm_weight[[5, head_dim - 3]] = torch.tensor([1e-4, 1e-3])
    truth = made.copy()
    with emulated(seed=1, most_instructions=400, multiprocessors=6):
        compressor_op.compressor(**made.arguments())
    ended, entries = compressor_reference.compressor(**truth.arguments())
    assert len(ended) >= 6 and torch.equal(made.state.view(torch.int32), truth.state.view(torch.int32))
    stored, rounded = (
        compressor_reference.read(m.cache, m.page_size, made.out_loc[ended], head_dim, fp4) for m in (made, truth)
    )
    assert bool(entries.isfinite().all())
    # a number's own rounding is the reference's, but where a step's border lies between two float32 results
    differs = (stored - rounded).abs() > 1e-6 * rounded.abs()
    assert float(differs.double().mean()) < 0.01
    group = 32 if fp4 else 64 if head_dim == 512 else 128
    blocks = rounded.unflatten(1, (-1, group)).abs().amax(2, keepdim=True).expand(-1, -1, group).flatten(1)
    assert bool(
        ((stored - rounded).abs() <= (rounded.abs() / 2 if fp4 else rounded.abs() / 7) + blocks * 2.0**-8).all()
    )
    assert strict_error(stored, rounded) < bounds.COMPRESSOR_STORED * (4 if fp4 else 1)


# ---- hyper-connections


@pytest.mark.parametrize("rows, kernels", [(1, "fused"), (3, "split"), (17, "fused"), (40, "many")])
@pytest.mark.parametrize("mix_scale", [4.0, 40.0])
def test_mhc(rows, kernels, mix_scale):
    """Streams from 1e-6 to 1e5, mixes that are all but 0 and 1."""
    inputs = mhc_spec.make_inputs(mhc_spec.Shape(rows, mix_scale=mix_scale), seed=rows, device="cpu")
    sizes = torch.tensor([1.0, 1e-4, -0.01, 0.3])[:, None]
    streams = inputs.streams.float() * 0.01 * sizes
    streams[:, :, MASSIVE] = torch.tensor([1e5, -1e3, 30.0]) * sizes
    inputs.streams, inputs.f = streams.bfloat16(), (inputs.f.float() * 1e-3).bfloat16()
    inputs.base *= mix_scale / 4
    inputs.norm_weight[[*MASSIVE]] = 1e-3
    with emulated(seed=1, most_instructions=800, multiprocessors=40):
        found = mhc.mhc(**inputs.boundary(), kernels=kernels)
    new, post, comb, y = found
    old = {name: inputs.post_only()[name].double() for name in ("f", "streams", "post", "comb")}
    terms = mhc_reference.mhc_post(**{name: value.abs() for name, value in old.items()})
    assert excess(new, mhc_reference.mhc_post(**old), terms, BF16) < SUMS
    weights = {name: getattr(inputs, name) for name in ("fn", "scale", "base", "norm_weight")}
    true_y, true_post, true_comb = mhc_reference.mhc_pre(new, **weights)
    slack = 4e-7 * mix_scale  # a logit's own error: float32 of numbers up to several times mix_scale
    for one, truth in ((post.view_as(true_post), true_post), (comb.view_as(true_comb), true_comb)):
        assert float(((one.double() - truth).abs() / (truth + 1e-30)).max()) < 1e-5 + 8 * slack
    pre = torch.sigmoid(
        mhc_reference.mixes(new, inputs.fn)[:, :4] * inputs.scale[0].double() + inputs.base[:4].double()
    )
    terms = (pre[:, :, None] * new.double().abs()).sum(1)
    root = (true_y.abs() / (mhc_reference.collapse(new, pre + 1e-6).abs() + 1e-300)).median(1, keepdim=True).values
    assert excess(y, true_y, terms * root * inputs.norm_weight.double().abs() * 20, 2.5 * BF16) < 8 * slack + 2 * BF16


@pytest.mark.parametrize("size", [0.0, 1e-12, 1e-25, 1e-39])
@pytest.mark.parametrize("rows, kernels", [(1, "fused"), (3, "split"), (40, "many")])
def test_norms_of_rows_next_to_nothing(rows, kernels, size):
    """Squares that vanish, numbers below the normal range: eps is what divides."""
    inputs = mhc_spec.make_inputs(mhc_spec.Shape(rows, x_scale=size, mix_scale=4.0), seed=rows, device="cpu")
    x, norm_weight = inputs.streams[:, 0, :1024].contiguous(), torch.ones(1024).bfloat16()
    with emulated(seed=1, most_instructions=800, multiprocessors=40):
        new, post, comb, y = mhc.mhc(**inputs.boundary(), kernels=kernels)
        normed = fp8_linear.latent_norm(x, norm_weight, 1e-6)
    weights = {name: getattr(inputs, name) for name in ("fn", "scale", "base", "norm_weight")}
    true_y, true_post, true_comb = mhc_reference.mhc_pre(new, **weights)
    for one, truth in (
        (post.view_as(true_post), true_post),
        (comb.view_as(true_comb), true_comb),
    ):
        assert float(((one.double() - truth).abs() / truth).max()) < 1e-5
    least = 2.0**-133  # of bf16
    assert excess(y, true_y, true_y.abs() * BF16 + 1000 * least, 2 * BF16) <= 1
    assert (
        excess(normed, fp8_reference.latent_norm(x, norm_weight, 1e-6), torch.full_like(x, least).double(), BF16) <= 1
    )
    assert bool(y.any()) == bool(normed.any()) == (size > 0)


# ---- between cards


@pytest.mark.parametrize("algorithm", all_reduce_op.ALGORITHMS)
@pytest.mark.parametrize("transport", all_reduce_op.TRANSPORTS)
def test_sums_between_cards(transport, algorithm):
    """Beyond the greatest number on one card, infinities against each other, subnormals, cancellation of outliers."""
    most, least = torch.finfo(torch.bfloat16).max, 2.0**-133
    columns = torch.tensor(
        [[most, most], [most, -most], [math.inf, -math.inf], [math.inf, 1.0], [least, least], [-0.0, -0.0], [-0.0, 0.0],
         [3e4, -3e4], [3e4, 0.01], [256.0, 1.0], [257.0, 0.0]]
    )  # fmt: skip
    terms = [one.repeat(47)[:512].expand(3, -1).bfloat16().contiguous() for one in columns.T]
    with emulated(seed=1, most_instructions=100, multiprocessors=4):
        cards = group(2, transport=transport, hidden=512, max_rows=4)
        sums = on_cards(functools.partial(all_reduce_op.all_reduce, algorithm=algorithm), terms, cards)
        for one in cards:
            one.close()
    expected = all_reduce_reference.all_reduce(terms)
    assert torch.equal(sums[0].view(torch.int16), sums[1].view(torch.int16))
    assert torch.equal(sums[0].isnan(), expected.isnan()) and int(expected[0, :11].isinf().sum()) == 2
    assert torch.equal(sums[0].nan_to_num().view(torch.int16), expected.nan_to_num().view(torch.int16))
