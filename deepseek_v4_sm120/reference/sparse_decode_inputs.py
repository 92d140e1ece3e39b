"""Inputs of sparse_decode as production makes them, and hostile ones: generated on the tensor's own device.

Every byte that the specification says is not read is 0xFF (NaN as E4M3, as bf16 and as UE8M0): all slots that no valid
candidate names, pad bytes, scale pads and page tails. Positions beyond a row's length name such slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from deepseek_v4_sm120.reference import kv_pages as pages_of
from deepseek_v4_sm120.reference.sparse_decode import indices_of_page_table, valid_candidates

SWA_WIDTH = 128  # the sliding window: what every layer attends to
POSITIONS = 4096  # of a freqs_cis, unless a test makes a longer one
NORM_EPS = 1e-6
MASKED = (-1, -(2**31), 2**31 - 1)  # a negative slot and one beyond every pool


@dataclass(frozen=True)
class CacheShape:
    """One paged cache and the index tensor that goes with it."""

    page_size: int
    width: int
    lengths: tuple[int, ...] | int | None = None  # per row, repeated; None: no length tensor
    ascending: bool = False  # C128 lists are ascending, C4 lists unordered
    pool_slots: int | None = None  # None: about twice what the rows can name
    masked: float = 0.0  # share of candidates (with `tables`: of pages) replaced by a masked index
    tables: int | None = None  # of the second cache: rows have all entries of one of so many page tables


@dataclass(frozen=True)
class Shape:
    """One call."""

    rows: int
    heads: int
    main: CacheShape = CacheShape(256, SWA_WIDTH, lengths=SWA_WIDTH)
    extra: CacheShape | None = None
    sink: bool = True
    query_scale: float = 1.0
    wide_scales: bool = False  # tiles with maxima from 1e-4 to 1e4, but a score spread of about 1
    flashmla: bool = False  # FlashMLA's own distributions, sinks infinite in both directions included
    norm: bool = False  # q as the projection leaves it, still to be normed and rotated; heads from 1e-2 to 1e2


@dataclass
class Inputs:
    """Arguments of ops.sparse_decode; `arguments()` passes them on, the candidates as lists."""

    q: torch.Tensor
    kv_pages: torch.Tensor
    indices: torch.Tensor
    topk_length: torch.Tensor | None = None
    attn_sink: torch.Tensor | None = None
    extra_kv_pages: torch.Tensor | None = None
    extra_indices: torch.Tensor | None = None
    extra_topk_length: torch.Tensor | None = None
    softmax_scale: float | None = None
    shape: Shape | None = field(default=None, repr=False)
    page_table: torch.Tensor | None = None  # what extra_indices lists, where the shape says `tables`
    page_table_rows: torch.Tensor | None = None
    q_norm_eps: float | None = None
    freqs_cis: torch.Tensor | None = None
    positions: torch.Tensor | None = None

    def arguments(self) -> dict:
        left_out = ("shape", "page_table", "page_table_rows")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def table_arguments(self) -> dict:
        """The same call with the page table instead of the second cache's list."""
        table = {"extra_page_table": self.page_table, "extra_page_table_rows": self.page_table_rows}
        return {**self.arguments(), "extra_indices": None, **table}

    def with_q(self, q: torch.Tensor) -> Inputs:
        """The same call with a q that is normed and rotated."""
        return replace(self, q=q, q_norm_eps=None, freqs_cis=None, positions=None)


def rms_rows(count: int, generator: torch.Generator, dtype=torch.bfloat16) -> torch.Tensor:
    """[count, 512] random rows of root mean square 1, like the model's normalised K."""
    rows = torch.randn((count, pages_of.HEAD_DIM), generator=generator, device=generator.device)
    return (rows * torch.rsqrt(rows.square().mean(dim=1, keepdim=True))).to(dtype)


def _rows(count: int, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    if shape.flashmla:
        values = torch.randn((count, pages_of.HEAD_DIM), generator=generator, device=generator.device) / 10
        return values.clamp(-1, 1).to(torch.bfloat16)
    if not shape.wide_scales:
        return rms_rows(count, generator)
    rows = rms_rows(count, generator, torch.float32)
    tiles = rows[:, : pages_of.NOPE_DIM].reshape(count, pages_of.NUM_TILES, pages_of.TILE_DIM)
    decades = torch.rand((count, pages_of.NUM_TILES), generator=generator, device=rows.device) * 8 - 4
    tiles *= (10.0**decades / tiles.abs().amax(dim=-1))[..., None]
    return rows


def _lengths(cache: CacheShape, rows: int, device) -> torch.Tensor | None:
    if cache.lengths is None:
        return None
    values = (cache.lengths,) if isinstance(cache.lengths, int) else cache.lengths
    return torch.tensor([values[row % len(values)] for row in range(rows)], dtype=torch.int32, device=device)


def _indices(cache: CacheShape, rows: int, generator: torch.Generator) -> tuple[torch.Tensor, int]:
    """([rows, 1, width] int32, slots of the pool). Distinct within a row where the pool is large enough."""
    device, count = generator.device, rows * cache.width
    slots = cache.pool_slots or max(cache.width, min(2 * count, 65_536))
    slots = -(-slots // cache.page_size) * cache.page_size
    chosen = torch.empty((rows, cache.width), dtype=torch.int64, device=device)
    if cache.width * 8 < slots:  # stratified: one slot per stratum is distinct without a permutation of the pool
        stratum = slots // max(1, cache.width)
        offset = torch.randint(0, stratum, (rows, cache.width), generator=generator, device=device)
        chosen = torch.arange(cache.width, device=device) * stratum + offset
        if not cache.ascending:
            order = torch.rand((rows, cache.width), generator=generator, device=device).argsort(dim=1)
            chosen = chosen.gather(1, order)
    else:
        keys = torch.rand((rows, slots), generator=generator, device=device)
        chosen = keys.argsort(dim=1)[:, : cache.width]
        if cache.ascending:
            chosen = chosen.sort(dim=1).values
    if cache.masked:
        draw = torch.rand((rows, cache.width), generator=generator, device=device)
        kind = torch.randint(0, len(MASKED), (rows, cache.width), generator=generator, device=device)
        chosen = torch.where(draw < cache.masked, torch.tensor(MASKED, device=device)[kind], chosen)
    return chosen.to(torch.int32)[:, None, :], slots


def _page_tables(cache: CacheShape, rows: int, generator: torch.Generator):
    """(indices, slots of the pool, page table [tables, pages], table of each row): distinct pages in no order."""
    device, columns = generator.device, -(-cache.width // cache.page_size)
    num_pages = max(1, 2 * cache.tables * columns)
    table = torch.randperm(num_pages, generator=generator, device=device)[: cache.tables * columns]
    if cache.masked:
        draw = torch.rand(table.shape, generator=generator, device=device)
        kind = torch.randint(0, len(MASKED), table.shape, generator=generator, device=device)
        table = torch.where(draw < cache.masked, torch.tensor(MASKED, device=device)[kind], table)
    table = table.to(torch.int32).view(cache.tables, columns)
    table_rows = torch.randint(0, cache.tables, (rows,), generator=generator, device=device).to(torch.int32)
    indices = indices_of_page_table(table, cache.page_size, num_pages, table_rows)
    return indices, num_pages * cache.page_size, table, table_rows


def _cache(cache: CacheShape, shape: Shape, generator: torch.Generator):
    """(pool, indices, lengths, page tables): only slots that a valid candidate names hold numbers, all else is 0xFF."""
    if cache.tables is None:
        (indices, slots), tables = _indices(cache, shape.rows, generator), (None, None)
    else:
        indices, slots, *tables = _page_tables(cache, shape.rows, generator)
    lengths = _lengths(cache, shape.rows, generator.device)
    pages = pages_of.new_pages(slots // cache.page_size, cache.page_size, fill=0xFF, device=generator.device)
    live = indices[:, 0, :][valid_candidates(indices, slots, lengths)].unique()
    pages_of.write_rows(pages, live, _rows(live.numel(), shape, generator))
    return pages, indices, lengths, *tables


def _sink(shape: Shape, generator: torch.Generator) -> torch.Tensor | None:
    if not shape.sink:
        return None
    sink = torch.randn((shape.heads,), generator=generator, device=generator.device)
    if shape.flashmla:
        draw = torch.randn((shape.heads,), generator=generator, device=generator.device)
        sink = sink.masked_fill(draw > 0.5, float("inf")).masked_fill(draw < -0.5, -float("inf"))
    return sink


def make_freqs_cis(count: int, device) -> torch.Tensor:
    """[count, 32] complex64: the rotations of positions 0 .. count - 1."""
    inverse = 160_000.0 ** -(torch.arange(32, dtype=torch.float64, device=device) / 32)
    angles = torch.arange(count, dtype=torch.float64, device=device)[:, None] * inverse
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def _query_norm(shape: Shape, generator: torch.Generator) -> dict:
    if not shape.norm:
        return {}
    positions = torch.randint(0, POSITIONS, (shape.rows,), generator=generator, device=generator.device)
    freqs_cis = make_freqs_cis(POSITIONS, generator.device)
    return {"q_norm_eps": NORM_EPS, "freqs_cis": freqs_cis, "positions": positions}


def make_inputs(shape: Shape, *, seed: int = 0, device="cuda") -> Inputs:
    """Random inputs of a shape; the same seed gives the same inputs on the same device type."""
    generator = torch.Generator(device=device).manual_seed(seed)
    pages, indices, lengths, *_ = _cache(shape.main, shape, generator)
    extra = _cache(shape.extra, shape, generator) if shape.extra is not None else (None,) * 5
    q = torch.randn((shape.rows, 1, shape.heads, pages_of.HEAD_DIM), generator=generator, device=device)
    if shape.flashmla:
        q = q.clamp(-1, 1)
    q = q * shape.query_scale
    if shape.norm:
        q = q * 10 ** (torch.rand(q.shape[:3], generator=generator, device=device) * 4 - 2)[..., None]
    return Inputs(
        q=q.to(torch.bfloat16),
        kv_pages=pages,
        indices=indices,
        topk_length=lengths,
        attn_sink=_sink(shape, generator),
        extra_kv_pages=extra[0],
        extra_indices=extra[1],
        extra_topk_length=extra[2],
        softmax_scale=None if not shape.wide_scales else pages_of.HEAD_DIM**-0.5 * 1e-3,
        shape=shape,
        page_table=extra[3],
        page_table_rows=extra[4],
        **_query_norm(shape, generator),
    )
