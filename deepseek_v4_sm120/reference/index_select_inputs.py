"""Inputs for tests, benchmarks and the self-test of index_select; what is not to be read is poison (NaN bytes)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_v4_sm120.reference import index_select as reference


@dataclass(frozen=True)
class Shape:
    """lengths are repeated over the rows; rows_per_request adjacent rows share a page table."""

    rows: int
    lengths: tuple[int, ...]
    fp4: bool = False
    rows_per_request: int = 1
    columns: int | None = None  # of the page table; None: what the greatest length needs
    spare_pages: int = 3  # in the pool, used by nobody
    page_gap: int = 0  # bytes between pages beyond their own, a multiple of 16
    negative_weights: bool = True


@dataclass
class Inputs:
    q: torch.Tensor
    k_pages: torch.Tensor
    weights: torch.Tensor
    lengths: torch.Tensor
    page_table: torch.Tensor
    q_scales: torch.Tensor | None = None

    def arguments(self) -> dict:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def new_pages(num_pages: int, fp4: bool, *, gap: int = 0, fill: int = 0xFF, device="cpu") -> torch.Tensor:
    """A pool [pages, 64, 1, 132 or 68] of bytes `fill`; 0xFF is NaN as E4M3, as fp32 and as UE8M0."""
    width = reference.FP4_BYTES if fp4 else reference.FP8_BYTES
    stride = reference.PAGE * width + gap
    storage = torch.full((num_pages * stride,), fill, dtype=torch.uint8, device=device)
    return storage.as_strided((num_pages, reference.PAGE, 1, width), (stride, width, width, 1))


def make_queries(rows: int, fp4: bool, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor | None]:
    device = generator.device
    q = torch.randn((rows, 1, reference.HEADS, reference.DIM), generator=generator, device=device)
    if not fp4:
        return (q * 60).clamp(-448, 448).to(torch.float8_e4m3fn), None
    packed, exponents = reference.quantise_fp4(q)
    words = exponents.to(torch.int64)
    scales = words[..., 0] | words[..., 1] << 8 | words[..., 2] << 16 | words[..., 3] << 24
    return packed, scales.to(torch.int32)


def make_inputs(shape: Shape, *, seed: int = 0, device="cuda") -> Inputs:
    generator = torch.Generator(device=device).manual_seed(seed)
    rows = shape.rows
    lengths = torch.tensor([shape.lengths[i % len(shape.lengths)] for i in range(rows)], dtype=torch.int32)
    needed = max(1, -(-max(0, int(lengths.max())) // reference.PAGE))
    columns = needed if shape.columns is None else shape.columns
    used = min(needed, columns)
    requests = -(-rows // shape.rows_per_request)
    num_pages = requests * used + shape.spare_pages
    pages = torch.randperm(num_pages, generator=generator, device=device)[: requests * used].to(torch.int32)
    table = torch.full((requests, columns), 2**31 - 1, dtype=torch.int32, device=device)
    table[:, :used] = pages.view(requests, used)
    k_pages = new_pages(num_pages, shape.fp4, gap=shape.page_gap, device=device)
    for request in range(requests):
        own = lengths[request * shape.rows_per_request : (request + 1) * shape.rows_per_request]
        longest = min(int(own.max()), used * reference.PAGE)
        if longest > 0:
            entries = torch.arange(longest, device=device)
            slots = (
                table[request, entries // reference.PAGE].to(torch.int64) * reference.PAGE + entries % reference.PAGE
            )
            keys = torch.randn((longest, reference.DIM), generator=generator, device=device)
            reference.write_keys(
                k_pages, slots, keys * torch.rand((longest, 1), generator=generator, device=device) * 4
            )
    q, q_scales = make_queries(rows, shape.fp4, generator)
    weights = torch.randn((rows, reference.HEADS), generator=generator, device=device) * 0.01
    return Inputs(
        q=q,
        k_pages=k_pages,
        weights=weights if shape.negative_weights else weights.abs(),
        lengths=lengths.to(device),
        page_table=table.repeat_interleave(shape.rows_per_request, dim=0)[:rows].contiguous(),
        q_scales=q_scales,
    )
