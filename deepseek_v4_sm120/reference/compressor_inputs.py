"""Inputs for tests, benchmarks and the self-test of the compressor; what is not to be read is poison (NaN)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_v4_sm120.reference import index_select, kv_pages
from deepseek_v4_sm120.reference.wo_a_inputs import make_freqs_cis

POSITIONS = 4096
PAGE_SIZES = {(4, 512): 64, (128, 512): 2, (4, 128): 64}  # of the cache, by (ratio, head_dim)
KINDS = {"c4": (4, 512, False), "c128": (128, 512, False), "index": (4, 128, False), "index_fp4": (4, 128, True)}


@dataclass
class Inputs:
    """The arguments of ops.compressor and of the reference."""

    kv_score: torch.Tensor
    state: torch.Tensor
    ape: torch.Tensor
    plan: torch.Tensor
    norm_weight: torch.Tensor
    norm_eps: float
    freqs_cis: torch.Tensor
    out_loc: torch.Tensor
    cache: torch.Tensor
    page_size: int
    fp4: bool

    def arguments(self) -> dict:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def copy(self) -> Inputs:
        """With state and cache of its own."""
        return Inputs(**{**self.arguments(), "state": self.state.clone(), "cache": copy_of_pages(self.cache)})

    def rows(self, chosen) -> Inputs:
        """Some of the rows, with state and cache of their own."""
        parts = {name: getattr(self, name)[chosen].contiguous() for name in ("kv_score", "plan", "out_loc")}
        return Inputs(**{**self.copy().arguments(), **parts})


def copy_of_pages(cache: torch.Tensor) -> torch.Tensor:
    copied = torch.empty_strided(cache.shape, cache.stride(), dtype=cache.dtype, device=cache.device)
    return copied.copy_(cache)


def width_of(ratio: int, head_dim: int) -> int:
    return (4 if ratio == 4 else 2) * head_dim


def page_bytes(page_size: int, head_dim: int, fp4: bool) -> int:
    if head_dim == kv_pages.HEAD_DIM:
        return kv_pages.page_bytes(page_size)
    return page_size * (index_select.FP4_BYTES if fp4 else index_select.FP8_BYTES)


def make_plan(rows: list[tuple[int, int, int, int]], device) -> torch.Tensor:
    """[rows, 16] uint8 of (length, state slot, page of the group before, page of the group)."""
    return torch.tensor(rows, dtype=torch.int32, device=device).view(-1, 4).view(torch.uint8)


def make_inputs(kind: str, lengths, *, seed=0, device="cuda", spare_pages=3, gap=0, score_scale=3.0) -> Inputs:
    """A row for each of `lengths`, each of a request of its own, at most POSITIONS.

    Pages lie in no order. Of state only what a row may read is a number; where a row ends no group, out_loc is 0, the
    cache's dummy entry, and where there is no group before, its page is -1.
    """
    ratio, head_dim, fp4 = KINDS[kind]
    generator = torch.Generator(device=device).manual_seed(seed)
    width, rows = width_of(ratio, head_dim), len(lengths)

    def randn(*shape):
        return torch.randn(shape, generator=generator, device=device)

    kv_score = randn(rows, width)
    kv_score[:, width // 2 :] *= score_scale
    num_pages = 2 * rows + spare_pages
    state = torch.full((num_pages, ratio, width), float("nan"), device=device)
    pages = torch.randperm(num_pages, generator=generator, device=device).tolist()
    page_size = PAGE_SIZES[ratio, head_dim]
    slots = torch.randperm(rows + 2 * page_size, generator=generator, device=device).tolist()
    plan, out_loc = [], []
    for row, length in enumerate(lengths):
        before, own, i = pages[2 * row], pages[2 * row + 1], (length - 1) % ratio
        half = head_dim if ratio == 4 else 0
        for start in (half, width // 2 + half):
            state[own, :i, start : start + head_dim] = randn(i, head_dim) * (score_scale if start >= width // 2 else 1)
        if ratio == 4 and length > 4:
            for start in (0, width // 2):
                state[before, :, start : start + head_dim] = randn(4, head_dim) * (score_scale if start else 1)
        plan.append((length, own * ratio + i, before if length > ratio else -1, own))
        out_loc.append(slots[row] if length % ratio == 0 else 0)
    stride = page_bytes(page_size, head_dim, fp4) + gap
    num_cache_pages = -(-(rows + 2 * page_size) // page_size)
    storage = torch.full((num_cache_pages * stride,), 0xA5, dtype=torch.uint8, device=device)
    return Inputs(
        kv_score=kv_score,
        state=state,
        ape=randn(8 if ratio == 4 else ratio, head_dim),
        plan=make_plan(plan, device),
        norm_weight=1 + 0.2 * randn(head_dim),
        norm_eps=1e-6,
        freqs_cis=make_freqs_cis(POSITIONS, device),
        out_loc=torch.tensor(out_loc, dtype=torch.int64, device=device),
        cache=storage.as_strided((num_cache_pages, stride - gap), (stride, 1)),
        page_size=page_size,
        fp4=fp4,
    )
