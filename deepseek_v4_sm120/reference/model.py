"""A whole layer of DeepSeek-V4-Flash in float64, from the checkpoint's own tensors: what an engine computes between a
token's number and its hidden state, composed of the operators' references and of what lies between them.

    streams = the token's embedding, four times
    each sublayer:   y = norm(pre of the streams)        f = attention(y of all tokens so far) or experts(y)
                     streams = post of f and the streams
    end:             norm(pre of the streams), by the head's own weights

    attention        q = rotated(unit(wq_b norm(wq_a y))), k = rotated(norm(wkv y)), kept as E4M3; each query sees the
                     128 newest tokens, itself among them, and of the entries that are complete (a group of 4 or 128
                     tokens) all, or in layers of 4 the 512 that the index ranks highest; one softmax over both with
                     the sink; the sum is rotated back; wo_a by groups, wo_b
    experts          6 of them by sqrt(softplus(router y)) + bias, or by the token's number in the first layers, weights
                     normalised times 1.5; and one that all share

Nothing is rounded but what a cache stores: keys and index keys are E4M3 with their scales. `Rules` holds what an engine
gets wrong easily; the defaults are the model, any other value is a known fault, by which a check shows that it would
see one.

Source: DeepSeek's inference/model.py and config.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from deepseek_v4_sm120.reference import compressor, fp8_linear, kv_pages, mhc, mxfp4_moe, router_topk

HEAD_DIM = 512
ROTATED = 64
INDEX_DIM = 128
E4M3_MAX = 448.0
AMAX_FLOOR = 1e-4
ROWS = 64  # queries at a time
FAR = 1 << 40


@dataclass(frozen=True)
class Rules:
    """What the model says, where engines have been seen, or are likely, to differ."""

    window: int = 128  # newest tokens that a query sees
    sees_itself: bool = True
    sees_before: int = FAR  # positions from here on are not seen, but by none of the rows themselves: a blind draft
    position: int = 0  # added to the queries' positions, not to the keys'
    yarn_without_entries: bool = False  # layers of ratio 0 by the angles of the others
    yarn: bool = True
    entries_early: int = 0  # how many entries are seen before they are complete; negative: too late
    overlap: bool = True  # of groups of 4
    ape: bool = True
    index_topk: int | None = None  # None: the config's
    index: Rules | None = None  # those by which the index ranks entries; None: these
    sink: bool = True
    rotates_back: bool = True
    unit_queries: bool = True
    hashed: bool = True  # the first layers route by the token's number
    bias_in_weights: bool = False
    renormalize: bool = True
    routed_scale: float | None = None
    shared_expert: bool = True
    swiglu_limit: bool = True
    mixing_turned: bool = False  # the streams' mixing matrix, transposed


@dataclass(frozen=True)
class Config:
    """The numbers of config.json that a layer needs."""

    heads: int
    groups: int
    index_heads: int
    index_topk: int
    topk: int
    hash_layers: int
    routed_scale: float
    swiglu_limit: float
    ratios: tuple[int, ...]
    eps: float
    sinkhorn_iters: int
    theta: float
    compress_theta: float
    yarn_factor: float
    yarn_original: int
    yarn_fast: float
    yarn_slow: float

    @classmethod
    def of(cls, raw: Mapping) -> Config:
        yarn = raw["rope_scaling"]
        return cls(
            heads=raw["num_attention_heads"],
            groups=raw["o_groups"],
            index_heads=raw["index_n_heads"],
            index_topk=raw["index_topk"],
            topk=raw["num_experts_per_tok"],
            hash_layers=raw["num_hash_layers"],
            routed_scale=raw["routed_scaling_factor"],
            swiglu_limit=raw["swiglu_limit"],
            ratios=tuple(raw["compress_ratios"]),
            eps=raw["rms_norm_eps"],
            sinkhorn_iters=raw["hc_sinkhorn_iters"],
            theta=raw["rope_theta"],
            compress_theta=raw["compress_rope_theta"],
            yarn_factor=yarn["factor"],
            yarn_original=yarn["original_max_position_embeddings"],
            yarn_fast=yarn["beta_fast"],
            yarn_slow=yarn["beta_slow"],
        )


class Weights:
    """The tensors whose names begin with `prefix`, in float64; quantised ones by their scales."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], prefix: str = ""):
        self.tensors, self.prefix = tensors, prefix

    def under(self, prefix: str) -> Weights:
        return Weights(self.tensors, self.prefix + prefix)

    def raw(self, name: str) -> torch.Tensor:
        return self.tensors[self.prefix + name]

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def __call__(self, name: str) -> torch.Tensor:
        """`name`.weight, dequantised where it has a scale, or the tensor of that name itself."""
        if f"{name}.weight" not in self:
            return self.raw(name).double()
        weight = self.raw(f"{name}.weight")
        if f"{name}.scale" not in self:
            return weight.double()
        scale = self.raw(f"{name}.scale")
        scale = scale if scale.dtype == torch.float32 else scale.view(torch.uint8)
        if weight.dtype == torch.float8_e4m3fn:
            return fp8_linear.dequantized(weight, scale)
        return mxfp4_moe.dequantize(weight.view(torch.uint8), scale)

    def product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Of all a request's tokens: whoever asks again with more of them may keep it."""
        return x @ self(name).T


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    unit = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return unit if weight is None else unit * weight


def angles(config: Config, ratio: int, rules: Rules) -> torch.Tensor:
    """[32] float64: radians a position of each rotated pair, of a layer with that ratio."""
    theta = config.compress_theta if ratio or rules.yarn_without_entries else config.theta
    pair = torch.arange(ROTATED // 2, dtype=torch.float64)
    plain = theta ** (-2 * pair / ROTATED)
    if not rules.yarn or not (ratio or rules.yarn_without_entries):
        return plain

    def pair_of(rotations: float) -> float:
        return ROTATED * math.log(config.yarn_original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(config.yarn_fast)), 0)
    high = min(math.ceil(pair_of(config.yarn_slow)), ROTATED - 1)
    ramp = ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain * (1 - ramp) + plain / config.yarn_factor * ramp


def rotated(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """x [rows, .., n], whose last 64 numbers are turned by the angles `by` [rows, 32], in pairs of neighbours."""
    turn = torch.polar(torch.ones_like(by), by).view(by.shape[0], *[1] * (x.dim() - 2), by.shape[1])
    pairs = torch.view_as_complex(x[..., -ROTATED:].unflatten(-1, (-1, 2)).contiguous()) * turn
    return torch.cat([x[..., :-ROTATED], torch.view_as_real(pairs).flatten(-2)], dim=-1)


def stored_key(rows: torch.Tensor) -> torch.Tensor:
    """Keys [n, 512] as the cache holds them."""
    codes, exponents = kv_pages.quantize_nope(rows[:, : kv_pages.NOPE_DIM])
    scale = torch.exp2(exponents.double() - 127).repeat_interleave(kv_pages.TILE_DIM, dim=1)
    return torch.cat([codes.view(torch.float8_e4m3fn).double() * scale, mhc.bf16(rows[:, kv_pages.NOPE_DIM :])], dim=1)


def stored_index(rows: torch.Tensor) -> torch.Tensor:
    """Index queries or keys [.., 128]: E4M3 with a float32 scale each."""
    scale = rows.abs().amax(dim=-1, keepdim=True).clamp_min(AMAX_FLOOR) / E4M3_MAX
    return (rows / scale).float().to(torch.float8_e4m3fn).double() * scale


def entries(weights: Weights, x: torch.Tensor, ratio: int, by: torch.Tensor, eps: float, rules: Rules) -> torch.Tensor:
    """[tokens // ratio, 512 or 128]: of the tokens' inputs x, with the layer's angles; not yet as they are stored."""
    groups = x.shape[0] // ratio
    tokens = torch.cat([weights.product("wkv", x), weights.product("wgate", x)], dim=1)[: groups * ratio]
    own, ape = tokens.view(groups, ratio, -1), weights("ape") * rules.ape
    before = None
    overlaps = torch.zeros(groups, dtype=torch.bool, device=x.device)
    if ratio == 4:
        before, overlaps = own.roll(1, dims=0), (torch.arange(groups, device=x.device) > 0) & rules.overlap
        ape = torch.cat(ape.chunk(2, dim=1))  # of the group before, then of its own
    pooled = compressor.pool(own, before, overlaps, ape)
    turn = by * (torch.arange(groups, device=x.device) * ratio)[:, None]
    return compressor.finish(pooled, weights("norm"), eps, torch.polar(torch.ones_like(turn), turn))


def chosen(config, weights, latent, x, first, by, rules) -> torch.Tensor:
    """bool [rows, entries]: those of 4 tokens that the index ranks highest among the complete ones."""
    rows = x[first:]
    positions = torch.arange(first, x.shape[0], device=x.device) + rules.position
    keys = stored_index(entries(weights.under("compressor."), x, 4, by, config.eps, rules))
    queries = (latent @ weights("wq_b").T).view(len(rows), config.index_heads, INDEX_DIM)
    queries = rotated(queries, by * positions[:, None]) @ compressor.hadamard(INDEX_DIM, x.device)
    head_weights = rows @ weights("weights_proj").T * (INDEX_DIM * config.index_heads) ** -0.5
    scores = torch.relu(stored_index(queries) @ keys.T)  # [rows, heads, entries]
    logits = torch.einsum("rhe,rh->re", scores, head_weights).masked_fill(
        ~complete(first, x.shape[0], len(keys), 4, rules, x.device), -math.inf
    )
    best = logits.topk(min(rules.index_topk or config.index_topk, len(keys)), dim=1).indices
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, best, True) & (logits > -math.inf)


def complete(first, tokens, count, ratio, rules, device) -> torch.Tensor:
    """bool [tokens - first, count]: the entries that end at or before each of the tokens."""
    seen = (torch.arange(first, tokens, device=device) + 1) // ratio + rules.entries_early
    return torch.arange(count, device=device) < seen[:, None]


def visible(first: int, tokens: int, rules: Rules, device) -> torch.Tensor:
    """bool [tokens - first, tokens]: the window of each."""
    row, token = torch.arange(first, tokens, device=device)[:, None], torch.arange(tokens, device=device)
    newest = row if rules.sees_itself else row - 1
    return (token <= newest) & (token > newest - rules.window) & (token < rules.sees_before)


def attention(config: Config, weights: Weights, x: torch.Tensor, ratio: int, *, first=0, rules=None) -> torch.Tensor:
    """[tokens - first, hidden] float64, of the rows `first` on, where x [tokens, hidden] are a request's inputs."""
    rules, x = rules or Rules(), x.double()
    tokens, rows = x.shape[0], x[first:]
    by = angles(config, ratio, rules).to(x.device)
    positions = torch.arange(tokens, device=x.device)
    latent = rms_norm(rows @ weights("wq_a").T, weights("q_norm"), config.eps)
    queries = (latent @ weights("wq_b").T).view(len(rows), config.heads, HEAD_DIM)
    queries = rms_norm(queries, None, config.eps) if rules.unit_queries else queries
    queries = rotated(queries, by * (positions[first:] + rules.position)[:, None])
    keys = rms_norm(weights.product("wkv", x), weights("kv_norm"), config.eps)
    keys = stored_key(rotated(keys, by * positions[:, None]))
    seen = visible(first, tokens, rules, x.device)
    if ratio and tokens >= ratio:
        found = entries(weights.under("compressor."), x, ratio, by, config.eps, rules)
        seen_entries = complete(first, tokens, len(found), ratio, rules, x.device)
        if ratio == 4:
            of_index = rules.index or rules
            turn = angles(config, ratio, of_index).to(x.device)
            seen_entries &= chosen(config, weights.under("indexer."), latent, x, first, turn, of_index)
        keys, seen = torch.cat([keys, stored_key(mhc.bf16(found))]), torch.cat([seen, seen_entries], dim=1)
    some = zip(queries.split(ROWS), seen.split(ROWS), strict=True)
    out = torch.cat([attend(q, keys, s, weights, rules) for q, s in some])
    if rules.rotates_back:
        out = rotated(out, -by * (positions[first:] + rules.position)[:, None])
    grouped = out.reshape(len(rows), config.groups, -1)
    wo_a = weights("wo_a").view(config.groups, -1, grouped.shape[2])
    return torch.einsum("rgi,goi->rgo", grouped, wo_a).flatten(1) @ weights("wo_b").T


def attend(queries, keys, seen, weights, rules) -> torch.Tensor:
    """[rows, heads, 512]: one softmax over what is seen and the sink."""
    scores = torch.einsum("rhd,nd->rhn", queries, keys) * HEAD_DIM**-0.5
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    sink = weights("attn_sink")[None, :, None].expand(len(queries), -1, 1)
    scores = torch.cat([scores, sink if rules.sink else torch.full_like(sink, -math.inf)], dim=2)
    return torch.einsum("rhn,nd->rhd", torch.softmax(scores, dim=2).nan_to_num(0.0)[..., :-1], keys)


def experts(config: Config, weights: Weights, x: torch.Tensor, tokens: torch.Tensor, *, hashed, rules=None):
    """[rows, hidden] float64 of inputs x [rows, hidden] and the tokens' numbers; hashed: this layer routes by those."""
    rules, x = rules or Rules(), x.double()
    ids, shares = routed(config, weights, x, tokens, hashed=hashed, rules=rules)
    limit = config.swiglu_limit if rules.swiglu_limit else None
    made = (outputs(weights, x, ids, limit) * shares[..., None]).sum(dim=1)
    return made + mlp(weights.under("shared_experts."), x, limit) * rules.shared_expert


def routed(config: Config, weights: Weights, x: torch.Tensor, tokens: torch.Tensor, *, hashed, rules):
    """(experts int64, their shares float64), [rows, topk] each."""
    logits = x @ weights("gate").T
    bias = weights("gate.bias") if "gate.bias" in weights else torch.zeros(logits.shape[1], device=x.device)
    scores, by = router_topk.ranked(logits, bias)
    if hashed and rules.hashed:
        ids = weights.raw("gate.tid2eid").long()[tokens.long()]
    else:
        ids = torch.sort(by, dim=1, descending=True, stable=True).indices[:, : config.topk]
    scale = config.routed_scale if rules.routed_scale is None else rules.routed_scale
    weighted = by if rules.bias_in_weights else scores
    return ids, router_topk.weights_of(weighted, ids, renormalize=rules.renormalize, scale=scale)


def outputs(weights: Weights, x: torch.Tensor, ids: torch.Tensor, limit: float | None) -> torch.Tensor:
    """[rows, topk, hidden]: of each row's experts, before their shares."""
    found = torch.empty(*ids.shape, x.shape[1], dtype=torch.float64, device=x.device)
    for expert in ids.unique().tolist():
        rows, slots = (ids == expert).nonzero(as_tuple=True)
        found[rows, slots] = mlp(weights.under(f"experts.{expert}."), x[rows], limit)
    return found


def mlp(weights: Weights, x: torch.Tensor, limit: float | None) -> torch.Tensor:
    return mxfp4_moe.swiglu(x @ weights("w1").T, x @ weights("w3").T, limit) @ weights("w2").T


def mixing(config: Config, weights: Weights, kind: str, norm: str, streams: torch.Tensor):
    """(y, post, comb) of the streams in front of the sublayer `kind`, attn or ffn."""
    fn, scale, base = (weights.raw(f"hc_{kind}_{part}").double() for part in ("fn", "scale", "base"))
    mixes = mhc.mixes(streams, fn, config.eps)
    pre = torch.sigmoid(mixes[:, :4] * scale[0] + base[:4]) + mhc.EPS
    post = mhc.POST_SCALE * torch.sigmoid(mixes[:, 4:8] * scale[1] + base[4:8])
    comb = mhc.sinkhorn((mixes[:, 8:] * scale[2] + base[8:]).view(-1, 4, 4), config.sinkhorn_iters)
    return rms_norm(torch.einsum("rj,rjh->rh", pre, streams.double()), weights(norm), config.eps), post, comb


def behind(f, streams, post, comb, rules=None) -> torch.Tensor:
    """The streams behind a sublayer whose output is f."""
    rules = rules or Rules()
    return mhc.mhc_post(f, streams, post, comb.transpose(1, 2) if rules.mixing_turned else comb)


def head(config: Config, weights: Weights, streams: torch.Tensor, norm: str = "norm") -> torch.Tensor:
    """[rows, hidden]: what the vocabulary's weights are multiplied with."""
    fn, scale, base = (weights.raw(f"hc_head_{part}").double() for part in ("fn", "scale", "base"))
    pre = torch.sigmoid(mhc.mixes(streams, fn, config.eps) * scale + base) + mhc.EPS
    return rms_norm(torch.einsum("rj,rjh->rh", pre, streams.double()), weights(norm), config.eps)


def draft_streams(config: Config, weights: Weights, embedded: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """[rows, 4, hidden]: what the MTP block's layer begins with, of the tokens' embeddings and the target's streams."""
    of_token = rms_norm(embedded.double(), weights("enorm"), config.eps) @ weights("e_proj").T
    of_streams = rms_norm(streams.double(), weights("hnorm"), config.eps) @ weights("h_proj").T
    return of_token[:, None] + of_streams
