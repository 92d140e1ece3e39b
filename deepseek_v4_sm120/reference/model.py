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

Nothing is rounded but what a cache stores: keys and index keys are E4M3 with their scales, index keys and queries E2M1
where the server was told so. `Rules` holds what an engine gets wrong easily; the defaults are the model, any other
value is a known fault, by which a check shows that it would see one; but for `rounds`, which is what the coarsest right
engine does: what goes into a quantised product is E4M3 by 128s with scales 2^n, queries and the softmax's weights by
64s, and what comes out of a product is bf16.

Source: DeepSeek's inference/model.py and config.json.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from deepseek_v4_sm120.reference import compressor, fp8_linear, index_select, kv_pages, mhc, mxfp4_moe, router_topk

HEAD_DIM = 512
ROTATED = 64
INDEX_DIM = 128
E4M3_MAX = 448.0
AMAX_FLOOR = 1e-4
ROWS = 64  # queries at a time
FAR = 1 << 40
REACH = 129  # positions of the widest window that is asked for, as a rule
PAGE = 256  # positions whose keys and entries an engine keeps together


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
    index_share: float = 1.0  # of the config's index_topk
    index: Rules | None = None  # those by which the index ranks entries; None: these
    sink: bool = True
    rotates_back: bool = True
    unit_queries: bool = True
    hashed: bool = True  # the first layers route by the token's number
    next_expert: bool = False  # in place of the last that is chosen: what a near tie may be decided for
    bias_in_weights: bool = False
    renormalize: bool = True
    routed_scale: float | None = None
    shared_expert: bool = True
    swiglu_limit: bool = True
    mixing_turned: bool = False  # the streams' mixing matrix, transposed
    rounds: bool = False


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
    index_fp4: bool = False  # the index's queries and keys are E2M1: the server's choice, not config.json's

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
        return x.double() @ self(name).T


def coarse(x: torch.Tensor, group: int = 128) -> torch.Tensor:
    """x [.., n] as E4M3 with a scale 2^n for each `group` of its numbers, the smallest with which none is cut off."""
    parts = x.unflatten(-1, (-1, group)) if x.shape[-1] % group == 0 else x[..., None, :]
    scale = torch.exp2(torch.ceil(torch.log2(parts.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30) / E4M3_MAX)))
    return ((parts / scale).float().to(torch.float8_e4m3fn).double() * scale).flatten(-2)


def given(x: torch.Tensor, rounds: bool) -> torch.Tensor:
    """What a quantised product is given of x."""
    return coarse(mhc.bf16(x)) if rounds else x


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    unit = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return unit if weight is None else unit * weight


def angles(config: Config, ratio: int, yarn: bool = True, yarn_without_entries: bool = False) -> torch.Tensor:
    """[32] float64: radians a position of each rotated pair, of a layer with that ratio."""
    theta = config.compress_theta if ratio or yarn_without_entries else config.theta
    pair = torch.arange(ROTATED // 2, dtype=torch.float64)
    plain = theta ** (-2 * pair / ROTATED)
    if not yarn or not (ratio or yarn_without_entries):
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


def stored_index(rows: torch.Tensor, fp4: bool = False) -> torch.Tensor:
    """Index queries or keys [.., 128]: E4M3 with a float32 scale each, or E2M1 with a scale 2^n for each 32."""
    if fp4:
        packed, exponents = index_select.quantise_fp4(rows)
        return index_select.fp4_values(packed) * index_select.ue8m0(exponents).repeat_interleave(32, dim=-1)
    scale = rows.abs().amax(dim=-1, keepdim=True).clamp_min(AMAX_FLOOR) / E4M3_MAX
    return (rows / scale).float().to(torch.float8_e4m3fn).double() * scale


def entries(weights: Weights, tokens: torch.Tensor, ratio: int, by: torch.Tensor, eps: float, ape, overlap):
    """[tokens // ratio, 512 or 128]: of what wkv and wgate make of the tokens' inputs, with the layer's angles; not yet
    as they are stored."""
    groups = tokens.shape[0] // ratio
    own, added = tokens[: groups * ratio].view(groups, ratio, -1), weights("ape") * ape
    before = None
    overlaps = torch.zeros(groups, dtype=torch.bool, device=own.device)
    if ratio == 4:
        before, overlaps = own.roll(1, dims=0), (torch.arange(groups, device=own.device) > 0) & overlap
        added = torch.cat(added.chunk(2, dim=1))  # of the group before, then of its own
    pooled = compressor.pool(own, before, overlaps, added)
    turn = by * (torch.arange(groups, device=own.device) * ratio)[:, None]
    return compressor.finish(pooled, weights("norm"), eps, torch.polar(torch.ones_like(turn), turn))


def complete(at: torch.Tensor, count: int, ratio: int, early: int) -> torch.Tensor:
    """bool [rows, count]: the entries that end at or before the token of each row."""
    seen = (at + 1) // ratio + early
    return torch.arange(count, device=at.device) < seen[:, None]


def visible(at: torch.Tensor, token: torch.Tensor, rules: Rules) -> torch.Tensor:
    """bool [rows, tokens]: those of `token`, positions, that are in the window of each."""
    row = at[:, None]
    newest = row if rules.sees_itself else row - 1
    return (token <= newest) & (token > newest - rules.window) & (token < rules.sees_before)


@dataclass
class Projected:
    """What rows' inputs make before norm and rotation: queries [rows, heads, 512], the index's [rows, heads, 128]."""

    queries: torch.Tensor
    of_index: torch.Tensor | None

    @classmethod
    def of(cls, config: Config, weights: Weights, rows: torch.Tensor, ratio: int, rounds: bool) -> Projected:
        latent = rms_norm(given(rows, rounds) @ weights("wq_a").T, weights("q_norm"), config.eps)
        latent = given(latent, rounds)
        queries = (latent @ weights("wq_b").T).view(len(rows), config.heads, HEAD_DIM)
        of_index = latent @ weights("indexer.wq_b").T if ratio == 4 else None
        return cls(queries, None if of_index is None else of_index.view(len(rows), config.index_heads, INDEX_DIM))

    def split(self, lengths: list[int]) -> list[Projected]:
        of_index = [None] * len(lengths) if self.of_index is None else self.of_index.split(lengths)
        return [Projected(*pair) for pair in zip(self.queries.split(lengths), of_index, strict=True)]


@dataclass
class Read:
    """What one softmax of attention is made of: keys of tokens, then entries; back: by which angles its sum is turned
    back, if it is; pages: in which each key is kept."""

    queries: torch.Tensor
    keys: torch.Tensor
    seen: torch.Tensor
    pages: torch.Tensor
    back: torch.Tensor | None
    rounds: bool
    sinks: bool


class Asked:
    """A request's rows at the positions `at`, where x [tokens, hidden] are its inputs: whatever Rules they are asked
    by, what those have alike is made once. projected: of these rows, {rounds: Projected}."""

    def __init__(self, config: Config, weights: Weights, x: torch.Tensor, ratio: int, at, projected: Mapping):
        self.config, self.weights, self.ratio = config, weights, ratio
        self.x, self.at, self.projected = x, at, projected
        for name in ("near", "plain_keys", "keys", "of_tokens", "stored", "index_keys", "chosen"):
            setattr(self, name, functools.cache(getattr(self, name)))  # none is told of rules that it does not ask

    def by(self, yarn: bool, yarn_without_entries: bool = False) -> torch.Tensor:
        return angles(self.config, self.ratio, yarn, yarn_without_entries).to(self.x.device)

    def near(self, reach: int) -> torch.Tensor:
        """The positions that any row can have in its window: of a long prompt few."""
        row, token = self.at[:, None], torch.arange(len(self.x), device=self.x.device)
        return ((token <= row) & (token > row - reach)).any(dim=0).nonzero()[:, 0]

    def plain_keys(self, reach: int, rounds: bool) -> torch.Tensor:
        """Not yet rotated."""
        return plain_keys_of(self.config, self.weights, self.x[self.near(reach)].double(), rounds)

    def keys(self, reach: int, rounds: bool, yarn: bool, yarn_without_entries: bool) -> torch.Tensor:
        turn = self.by(yarn, yarn_without_entries) * self.near(reach)[:, None]
        return stored_key(rotated(self.plain_keys(reach, rounds), turn))

    def of_tokens(self, name: str) -> torch.Tensor:
        weights = self.weights.under(name)
        return torch.cat([weights.product("wkv", self.x), weights.product("wgate", self.x)], dim=1)

    def entries(self, name: str, yarn: bool, ape: bool, overlap: bool) -> torch.Tensor:
        weights, tokens = self.weights.under(name), self.of_tokens(name)
        return entries(weights, tokens, self.ratio, self.by(yarn), self.config.eps, ape, overlap)

    def stored(self, yarn: bool, ape: bool, overlap: bool) -> torch.Tensor:
        return stored_key(mhc.bf16(self.entries("compressor.", yarn, ape, overlap)))

    def index_keys(self, yarn: bool, ape: bool, overlap: bool) -> torch.Tensor:
        return stored_index(self.entries("indexer.compressor.", yarn, ape, overlap), self.config.index_fp4)

    def chosen(self, rounds, position, yarn, ape, overlap, early: int, share: float) -> torch.Tensor:
        """bool [rows, entries]: those of 4 tokens that the index ranks highest among the complete ones."""
        rows, config, keys = self.x[self.at].double(), self.config, self.index_keys(yarn, ape, overlap)
        turn = self.by(yarn) * (self.at + position)[:, None]
        queries = rotated(self.projected[rounds].of_index, turn) @ compressor.hadamard(INDEX_DIM, rows.device)
        head_weights = rows @ self.weights("indexer.weights_proj").T * (INDEX_DIM * config.index_heads) ** -0.5
        queries = mhc.bf16(queries) if config.index_fp4 else queries  # keys are not rounded in front of E2M1
        scores = torch.relu(stored_index(queries, config.index_fp4) @ keys.T)  # [rows, heads, entries]
        logits = torch.einsum("rhe,rh->re", scores, head_weights)
        logits = logits.masked_fill(~complete(self.at, len(keys), 4, early), -math.inf)
        most = len(keys) if math.isinf(share) else round(config.index_topk * share)
        best = logits.topk(min(most, len(keys)), dim=1).indices
        return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, best, True) & (logits > -math.inf)

    def read(self, rules: Rules) -> Read:
        reach = max(rules.window, REACH) + 1
        token = self.near(reach)
        keys = self.keys(reach, rules.rounds, rules.yarn, rules.yarn_without_entries)
        seen, pages = visible(self.at, token, rules), token // PAGE
        turn = self.by(rules.yarn, rules.yarn_without_entries) * (self.at + rules.position)[:, None]
        if self.ratio and len(self.x) >= self.ratio:
            found = self.stored(rules.yarn, rules.ape, rules.overlap)
            seen_entries = complete(self.at, len(found), self.ratio, rules.entries_early)
            if self.ratio == 4:
                by = rules.index or rules
                of_index = (by.rounds, by.position, by.yarn, by.ape, by.overlap, by.entries_early, by.index_share)
                seen_entries &= self.chosen(*of_index)
            keys, seen = torch.cat([keys, found]), torch.cat([seen, seen_entries], dim=1)
            pages = torch.cat([pages, torch.arange(len(found), device=pages.device) * self.ratio // PAGE])
        return read_of(self.config, self.projected[rules.rounds].queries, keys, seen, pages, turn, rules)


def read_of(config: Config, queries, keys, seen, pages, turn, rules: Rules) -> Read:
    queries = rotated(rms_norm(queries, None, config.eps) if rules.unit_queries else queries, turn)
    if rules.rounds:
        queries = torch.cat([coarse(queries[..., :-ROTATED], 64), mhc.bf16(queries[..., -ROTATED:])], dim=-1)
    back = -turn if rules.rotates_back else None
    return Read(queries, keys, seen, pages, back, rules.rounds, rules.sink)


def attention(
    config: Config, weights: Weights, x: torch.Tensor, ratio: int, *, first=0, at=None, rules=None
) -> torch.Tensor:
    """[rows, hidden] float64, of the rows at the positions `at`, or from `first` on, where x [tokens, hidden] are a
    request's inputs."""
    rules, x = rules or Rules(), x.double()
    at = torch.arange(first, x.shape[0], device=x.device) if at is None else at
    every = {rounds: Projected.of(config, weights, x[at], ratio, rounds) for rounds in rounds_of(rules)}
    out = attended(weights, Asked(config, weights, x, ratio, at, every).read(rules))
    return answered(config, weights, out, rules.rounds)


def rounds_of(rules: Rules) -> set[bool]:
    return {rules.rounds, (rules.index or rules).rounds}


def plain_keys_of(config: Config, weights: Weights, x: torch.Tensor, rounds: bool) -> torch.Tensor:
    return rms_norm(given(x, rounds) @ weights("wkv").T, weights("kv_norm"), config.eps)


def attended(weights: Weights, read: Read, seen: torch.Tensor | None = None) -> torch.Tensor:
    """[rows, heads, 512]: one softmax over what is seen and the sink, summed, rotated back."""
    some = zip(read.queries.split(ROWS), (read.seen if seen is None else seen).split(ROWS), strict=True)
    out = torch.cat([attend(queries, read.keys, of, weights, read) for queries, of in some])
    return out if read.back is None else rotated(out, read.back)


def answered(config: Config, weights: Weights, out: torch.Tensor, rounds: bool = False) -> torch.Tensor:
    """[rows, hidden]: what attention summed through both output projections."""
    grouped = given(out.reshape(len(out), config.groups, -1), rounds)
    wo_a = weights("wo_a").view(config.groups, -1, grouped.shape[2])
    return given(torch.einsum("rgi,goi->rgo", grouped, wo_a).flatten(1), rounds) @ weights("wo_b").T


def without_head(config: Config, wo_a: torch.Tensor, wo_b: torch.Tensor, head: int, out: torch.Tensor) -> torch.Tensor:
    """[rows, hidden]: what `answered` loses without it."""
    each = config.heads // config.groups
    group, number = divmod(head, each)
    of_head = wo_a.view(config.groups, -1, each, HEAD_DIM)[group, :, number]
    return -(out[:, head] @ of_head.T) @ wo_b.unflatten(1, (config.groups, -1))[:, group].T


def pages_of(read: Read) -> list[int]:
    """Those of which some key is seen, and without which each row sees others."""
    pages = read.pages[read.seen.any(dim=0)].unique().tolist()
    return [page for page in pages if bool((read.seen & (read.pages != page)).any(dim=1).all())]


def without_page(weights: Weights, read: Read, page: int) -> torch.Tensor:
    """`attended` without what is kept in it."""
    return attended(weights, read, read.seen & (read.pages != page))


def attend(queries, keys, seen, weights, read: Read) -> torch.Tensor:
    some = seen.any(dim=0)  # most of a long prompt no row sees
    keys, seen = keys[some], seen[:, some]
    scores = torch.einsum("rhd,nd->rhn", queries, keys) * HEAD_DIM**-0.5
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    sink = weights("attn_sink")[None, :, None].expand(len(queries), -1, 1)
    scores = torch.cat([scores, sink if read.sinks else torch.full_like(sink, -math.inf)], dim=2)
    shares = torch.softmax(scores, dim=2).nan_to_num(0.0)[..., :-1]
    return torch.einsum("rhn,nd->rhd", coarse(shares, 64) if read.rounds else shares, keys)


def experts(config: Config, weights: Weights, x: torch.Tensor, tokens: torch.Tensor, *, hashed, rules=None):
    """[rows, hidden] float64 of inputs x [rows, hidden] and the tokens' numbers; hashed: this layer routes by those."""
    rules, x = rules or Rules(), x.double()
    ids, shares, _ = routed(config, weights, x, tokens, hashed=hashed, rules=rules)
    limit = config.swiglu_limit if rules.swiglu_limit else None
    made = (outputs(weights, x, ids, limit, rules.rounds) * shares[..., None]).sum(dim=1)
    return made + mlp(weights.under("shared_experts."), x, limit, rules.rounds) * rules.shared_expert


def routed(config: Config, weights: Weights, x: torch.Tensor, tokens: torch.Tensor, *, hashed, rules):
    """(experts int64, their shares float64, [rows, topk] each; by how much the last was ahead of the next [rows])."""
    logits = x @ weights("gate").T
    bias = weights("gate.bias") if "gate.bias" in weights else torch.zeros(logits.shape[1], device=x.device)
    scores, by = router_topk.ranked(logits, bias)
    if hashed and rules.hashed:
        ids, margin = weights.raw("gate.tid2eid").long()[tokens.long()], torch.full_like(by[:, 0], math.inf)
    else:
        ranked = torch.sort(by, dim=1, descending=True, stable=True)
        last, is_choice = config.topk - 1, by.shape[1] > config.topk
        ids = ranked.indices[:, [*range(last), last + rules.next_expert]]
        behind = ranked.values[:, last + 1] if is_choice else -math.inf
        margin = ranked.values[:, last] - behind
    scale = config.routed_scale if rules.routed_scale is None else rules.routed_scale
    weighted = by if rules.bias_in_weights else scores
    return ids, router_topk.weights_of(weighted, ids, renormalize=rules.renormalize, scale=scale), margin


def outputs(weights: Weights, x: torch.Tensor, ids: torch.Tensor, limit: float | None, *every: bool) -> torch.Tensor:
    """[rows, topk, hidden], before their shares: of each row's experts; of each of `every`, whether it rounds, if more
    than one are asked."""
    every = every or (False,)
    found = torch.empty(len(every), *ids.shape, x.shape[1], dtype=torch.float64, device=x.device)
    for expert in ids.unique().tolist():
        rows, slots = (ids == expert).nonzero(as_tuple=True)
        found[:, rows, slots] = mlps(weights.under(f"experts.{expert}."), x[rows], limit, every)
    return found if len(every) > 1 else found[0]


def mlp(weights: Callable, x: torch.Tensor, limit: float | None, rounds: bool = False) -> torch.Tensor:
    """[rows, hidden]"""
    return mlps(weights, x, limit, (rounds,))[0]


def mlps(weights: Callable, x: torch.Tensor, limit: float | None, every: tuple[bool, ...]) -> torch.Tensor:
    """[len(every), rows, hidden]: of each, whether it rounds; each matrix is read once. weights: float64, or float32,
    in which the products then are: their sums err by 1e-6 of the result."""

    def product(x, weight):
        return (x.flatten(0, 1).to(weight.dtype) @ weight.T).double().unflatten(0, (len(every), -1))

    x = torch.stack([given(x, rounds) for rounds in every])
    inner = mxfp4_moe.swiglu(product(x, weights("w1")), product(x, weights("w3")), limit)
    return product(torch.stack([given(one, rounds) for one, rounds in zip(inner, every, strict=True)]), weights("w2"))


def mixing(config: Config, weights: Weights, kind: str, norm: str, streams: torch.Tensor):
    """(y, post, comb) of the streams in front of the sublayer `kind`, attn or ffn."""
    fn, scale, base = (weights.raw(f"hc_{kind}_{part}").double() for part in ("fn", "scale", "base"))
    mixes = mhc.mixes(streams, fn, config.eps)
    post = mhc.POST_SCALE * torch.sigmoid(mixes[:, 4:8] * scale[1] + base[4:8])
    comb = mhc.sinkhorn((mixes[:, 8:] * scale[2] + base[8:]).view(-1, 4, 4), config.sinkhorn_iters)
    return mixed(config, streams, mixes, scale, base, weights(norm)), post, comb


def entering(config: Config, weights: Weights, kind: str, norm: str, streams: torch.Tensor) -> torch.Tensor:
    """`mixing`'s y alone."""
    fn, scale, base = (weights.raw(f"hc_{kind}_{part}").double() for part in ("fn", "scale", "base"))
    return mixed(config, streams, mhc.mixes(streams, fn[:4], config.eps), scale, base, weights(norm))


def mixed(config, streams, mixes, scale, base, norm) -> torch.Tensor:
    pre = torch.sigmoid(mixes[:, :4] * scale[0] + base[:4]) + mhc.EPS
    return rms_norm(torch.einsum("rj,rjh->rh", pre, streams.double()), norm, config.eps)


def behind(f, streams, post, comb, rules=None) -> torch.Tensor:
    """The streams behind a sublayer whose output is f."""
    rules = rules or Rules()
    return mhc.mhc_post(f, streams, post, comb.transpose(1, 2) if rules.mixing_turned else comb)


def head(config: Config, weights: Weights, streams: torch.Tensor, norm: str = "norm") -> torch.Tensor:
    """[rows, hidden]: what the vocabulary's weights are multiplied with."""
    fn, scale, base = (weights.raw(f"hc_head_{part}").double() for part in ("fn", "scale", "base"))
    pre = torch.sigmoid(mhc.mixes(streams, fn, config.eps) * scale + base) + mhc.EPS
    return rms_norm(torch.einsum("rj,rjh->rh", pre, streams.double()), weights(norm), config.eps)


@dataclass(frozen=True)
class DraftRules:
    """What the MTP block's layer begins with, and where an engine may differ."""

    token: bool = True  # its half of the sum
    streams: bool = True
    token_normed: bool = True
    streams_normed: bool = True
    each: bool = True  # stream has a norm of its own
    exchanged: bool = False  # the two matrices


def draft_streams(
    config: Config, weights: Weights, embedded, streams: torch.Tensor, rules=None, draft=None
) -> torch.Tensor:
    """[rows, 4, hidden]: what the MTP block's layer begins with, of the tokens' embeddings and the target's streams."""
    rounds, draft, streams = (rules or Rules()).rounds, draft or DraftRules(), streams.double()
    names = ("h_proj", "e_proj") if draft.exchanged else ("e_proj", "h_proj")
    whole = streams.shape[1:] if draft.each else (1, streams[0].numel())
    token = rms_norm(embedded.double(), weights("enorm"), config.eps) if draft.token_normed else embedded.double()
    unit = rms_norm(streams.view(len(streams), *whole), None, config.eps).view(streams.shape) * weights("hnorm")
    of_token = given(token, rounds) @ weights(names[0]).T * draft.token
    of_streams = given(unit if draft.streams_normed else streams, rounds) @ weights(names[1]).T * draft.streams
    return of_token[:, None] + of_streams
