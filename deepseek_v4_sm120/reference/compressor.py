"""What a step of a compressor computes, in float64; and the same entries straight from a request's tokens.

A token's projection of its layer's input is, for groups of 4 tokens, [kv for the group after | kv for its own | score
for the group after | score for its own], head_dim each, and for groups of 128 [kv | score]. An entry of a group of 4
pools 8 tokens, the group before by its first halves and its own by its second ones; the first group pools its own 4.
An entry of 128 pools its 128. Pooling is, for each dimension by itself, sum(kv softmax(score + ape)). Then RMSNorm,
rotation of the last 64 numbers by the position of the group's first token, for the indexer (128 numbers) the
Walsh-Hadamard transform times 128^-0.5, and the cache's own rounding.

What a group still needs of earlier steps is kept in `state`, [pages, ratio, width], one page for a group. Scores are
kept without ape. Decode sees one token of a request a step, which is written before it is read; of many tokens a step
(`writes`) a group's are rows of the step, as far as they are its own, and state as it was before.

Source: DeepSeek's inference/model.py (Compressor); where SGLang differs (float32 into the norm, scores without ape),
SGLang.
"""

from __future__ import annotations

import functools

import torch

from deepseek_v4_sm120.reference import index_select, kv_pages

ROTATED = 64
INDEX_DIM = 128


def compressor(
    kv_score, state, ape, plan, *, norm_weight, norm_eps, freqs_cis, out_loc, cache, page_size, fp4=False, writes=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes state and cache; (rows that end a group, their entries [n, head_dim] float64 before the cache rounds)."""
    if writes is not None:
        layer = (ape, norm_weight, norm_eps, freqs_cis)
        return _many_tokens(kv_score, state, layer, plan, writes, out_loc, cache, page_size, fp4)
    ratio = state.shape[1]
    length, write, before, own = plan.view(torch.int32).long().unbind(dim=1)
    slots = state.view(-1, state.shape[2])
    writes = (write >= 0) & (write < slots.shape[0])
    slots[write[writes]] = kv_score[writes]

    position, overlaps = length - ratio, (length > 4) & (ratio == 4)
    inside = _inside(position, freqs_cis.shape[0]) & _inside(own, state.shape[0])
    inside &= _inside(out_loc, cache.shape[0] * page_size) & (_inside(before, state.shape[0]) | ~overlaps)
    ended = (inside & (length % ratio == 0)).nonzero()[:, 0]
    groups_before = state[torch.where(overlaps, before, 0)[ended]] if ratio == 4 else None
    pooled = pool(state[own[ended]], groups_before, overlaps[ended], ape)
    entries = finish(pooled, norm_weight, norm_eps, freqs_cis[position[ended]])
    store(cache, page_size, out_loc[ended], entries, fp4)
    return ended, entries


def _many_tokens(kv_score, state, layer, plan, writes, out_loc, cache, page_size, fp4):
    """The same of a step with many tokens of a request: groups by `plan`, from the state before any of `writes`."""
    ratio, (ape, norm_weight, norm_eps, freqs_cis) = state.shape[1], layer
    window = 8 if ratio == 4 else ratio
    length, place, before, own = plan.view(torch.int32).long().unbind(dim=1)
    row, held, position = place & 0xFFFF, (place >> 16 & 0xFFFF).clamp(max=window), length - ratio
    overlaps = (length > 4) & (ratio == 4)
    first = torch.where(overlaps | (ratio != 4), held, held.clamp(min=4))  # of the window, that is a row of the step
    inside = (length != -1) & _inside(position, freqs_cis.shape[0]) & (row < kv_score.shape[0])
    inside &= row - (window - 1) + first >= 0
    inside &= _inside(own, state.shape[0]) | (held <= window - ratio)
    inside &= _inside(before, state.shape[0]) | ~overlaps | (held == 0)
    inside &= _inside(out_loc[row.clamp(max=len(out_loc) - 1)], cache.shape[0] * page_size)
    row, held, before, own, overlaps, position = (t[inside] for t in (row, held, before, own, overlaps, position))

    def tokens(page, i):  # [n, ratio, width]: those of a group, whose first is the window's i-th
        places = torch.arange(i, i + ratio, device=row.device)
        from_state, of_step = state[page.clamp(0, state.shape[0] - 1)], row[:, None] - (window - 1) + places
        is_held = (places < held[:, None])[:, :, None]
        return torch.where(is_held, from_state, kv_score[of_step.clamp(0, kv_score.shape[0] - 1)])

    pooled = pool(tokens(own, window - ratio), tokens(before, 0) if ratio == 4 else None, overlaps, ape)
    entries = finish(pooled, norm_weight, norm_eps, freqs_cis[position])
    store(cache, page_size, out_loc[row], entries, fp4)
    of, slot = writes.view(torch.int32).long().unbind(dim=1)
    slots = state.view(-1, state.shape[2])
    written = _inside(of, kv_score.shape[0]) & _inside(slot, slots.shape[0])
    slots[slot[written]] = kv_score[of[written]]
    return row, entries


def clear_drafts(requests, lengths, accepted, *, states, ring, tokens) -> None:
    """Writes 0 and -inf, values and scores, to the slots of tokens that were not accepted, in every layer's state."""
    behind = torch.arange(tokens, device=requests.device)
    slots = requests[:, None] * ring + (lengths[:, None] + behind) % ring
    rejected = slots[(behind >= accepted[:, None]) & _inside(slots, states[0].shape[0])]
    for state in states:
        values, scores = state.chunk(2, dim=1)
        values[rejected], scores[rejected] = 0.0, -torch.inf


def _inside(index: torch.Tensor, size: int) -> torch.Tensor:
    return (index >= 0) & (index < size)


def pool(own: torch.Tensor, before: torch.Tensor | None, overlaps: torch.Tensor, ape: torch.Tensor) -> torch.Tensor:
    """[n, head_dim] float64 from the tokens [n, ratio, width] of groups and, for groups of 4, of those before them,
    which count where `overlaps` [n]."""
    if before is None:
        kv, score = own.double().chunk(2, dim=2)
    else:
        _, kv, _, score = own.double().chunk(4, dim=2)
        kv_before, _, score_before, _ = before.double().chunk(4, dim=2)
        counts = overlaps[:, None, None]
        kv = torch.cat([torch.where(counts, kv_before, 0.0), kv], dim=1)
        score = torch.cat([torch.where(counts, score_before, -torch.inf), score], dim=1)
    return (kv * torch.softmax(score + ape.double(), dim=1)).sum(dim=1)


def finish(pooled: torch.Tensor, norm_weight, norm_eps: float, freqs_cis: torch.Tensor) -> torch.Tensor:
    """Norm, rotation (freqs_cis [n, 32]) and, for the indexer, the Hadamard transform of pooled [n, head_dim]."""
    x = pooled * torch.rsqrt(pooled.square().mean(dim=1, keepdim=True) + norm_eps) * norm_weight.double()
    pairs = torch.view_as_complex(x[:, -ROTATED:].unflatten(1, (-1, 2)).contiguous()) * freqs_cis.to(torch.complex128)
    x = torch.cat([x[:, :-ROTATED], torch.view_as_real(pairs).flatten(1)], dim=1)
    return x @ hadamard(INDEX_DIM, x.device) if x.shape[1] == INDEX_DIM else x


@functools.cache
def hadamard(size: int, device="cpu") -> torch.Tensor:
    """Sylvester's matrix times size^-0.5: element (i, j) is negative where i & j has an odd number of bits. All callers
    have the same one."""
    numbers = torch.arange(size, device=device)
    common = numbers[:, None] & numbers
    signs = torch.ones((size, size), dtype=torch.float64, device=device)
    for bit in range(size.bit_length()):
        signs = torch.where((common >> bit & 1).bool(), -signs, signs)
    return signs * size**-0.5


def store(cache: torch.Tensor, page_size: int, slots: torch.Tensor, entries: torch.Tensor, fp4: bool) -> None:
    """Entries [n, 512 or 128] into slots [n] of a cache [pages, bytes]."""
    stride = (cache.stride(0), 0, 0, 1)
    if entries.shape[1] == INDEX_DIM:
        width = index_select.FP4_BYTES if fp4 else index_select.FP8_BYTES
        pages = cache.as_strided((cache.shape[0], page_size, 1, width), (stride[0], width, width, 1))
        index_select.write_keys(pages, slots, entries.float())
        return
    width = kv_pages.TOKEN_BYTES
    pages = cache.as_strided((cache.shape[0], page_size, 1, width), (stride[0], width, width, 1))
    kv_pages.write_rows(pages, slots, entries.float().bfloat16())


def read(cache: torch.Tensor, page_size: int, slots: torch.Tensor, head_dim: int, fp4: bool) -> torch.Tensor:
    """The entries [n, head_dim] float64 that slots [n] of a cache hold."""
    if head_dim == INDEX_DIM:
        width = index_select.FP4_BYTES if fp4 else index_select.FP8_BYTES
        pages = cache.as_strided((cache.shape[0], page_size, 1, width), (cache.stride(0), width, width, 1))
        keys, scales = index_select.read_keys(pages, slots)
        return keys * scales[:, None]
    width = kv_pages.TOKEN_BYTES
    pages = cache.as_strided((cache.shape[0], page_size, 1, width), (cache.stride(0), width, width, 1))
    return kv_pages.read_rows(pages, slots)


def entries_of(tokens: torch.Tensor, ape, norm_weight, norm_eps, freqs_cis, ratio: int) -> torch.Tensor:
    """All entries [tokens // ratio, head_dim] float64 of a request's tokens [n, width], without a state: loops over the
    dimensions' terms, exponentials and sums written out."""
    head_dim, found = norm_weight.shape[0], []
    for group in range(tokens.shape[0] // ratio):
        first = group * ratio
        terms = [(ratio + i if ratio == 4 else i, first + i, ratio == 4) for i in range(ratio)]
        if ratio == 4 and group > 0:
            terms += [(i, first - 4 + i, False) for i in range(4)]
        weights, total = torch.zeros(head_dim, dtype=torch.float64), torch.zeros(head_dim, dtype=torch.float64)
        for bias, token, own_half in terms:
            half = head_dim if own_half else 0
            score_at = (2 * head_dim if ratio == 4 else head_dim) + half
            power = torch.exp(tokens[token, score_at : score_at + head_dim].double() + ape[bias].double())
            weights += power
            total += power * tokens[token, half : half + head_dim].double()
        found.append(finish((total / weights)[None], norm_weight, norm_eps, freqs_cis[first : first + 1]))
    return torch.cat(found)
