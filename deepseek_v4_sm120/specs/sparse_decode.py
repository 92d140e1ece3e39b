"""What sparse_decode is measured by, in decode and in prompts.

Inputs are as production makes them, and hostile ones. Every byte that the specification says is not read is 0xFF (NaN
as E4M3, as bf16 and as UE8M0): all slots that no valid candidate names, pad bytes, scale pads and page tails. Positions
beyond a row's length name such slots.

Stock is SGLang's function for SM120.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from deepseek_v4_sm120.commands.plan.memory import KV_TOKEN_BYTES
from deepseek_v4_sm120.commands.plan.models import FLASH
from deepseek_v4_sm120.ops import sparse_decode as op
from deepseek_v4_sm120.reference import kv_pages
from deepseek_v4_sm120.reference import sparse_decode as reference
from deepseek_v4_sm120.reference.accuracy import Tolerance, relative_error, strict_error
from deepseek_v4_sm120.reference.sparse_decode import indices_of_page_table, valid_candidates
from deepseek_v4_sm120.specs import bounds
from deepseek_v4_sm120.specs.check import ON_GPU, Check, same, within
from deepseek_v4_sm120.specs.provider import (
    OURS,
    STOCK,
    Provider,
    error_of,
    first_installed,
    is_installed,
    our_problem,
    unpatched,
)

ERROR = "relative error against float64"
# of FlashMLA's own tests, element by element
FLASHMLA_OUT = Tolerance(absolute=1e-3, relative=2.01 / 128, cosine=5e-6)
FLASHMLA_LSE = Tolerance(absolute=1e-6, relative=8.01 / 65536)
LSE = Tolerance(absolute=2e-5, relative=FLASHMLA_LSE.relative)  # single scores near zero have no relative accuracy

# SGLang's SM120 function, newest home first (sglang_patches/table.py has the versions)
STOCK_MODULES = ("sglang.kernels.ops.attention.flash_mla_sm120", "sglang.srt.layers.attention.flash_mla_sm120")
STOCK_NAME = "flash_mla_with_kvcache_sm120"
TRITON_MODULE, TRITON_NAME = "sglang.kernels.ops.attention.flash_mla_sm120_triton", "flash_mla_sparse_decode_triton"
FLASHMLA_MODULES = ("sglang.kernels.ops.attention.flash_mla_interface", "sgl_kernel.flash_mla", "flash_mla")
SWA_PAGE, POOL_BYTES = 256, 768 << 20
PREFILL_ROWS, CHECKED_PREFILL_ROWS = 2048, 520  # a chunk; as many rows as make the operator take its other kernel
SMALL_CANDIDATES = 16 * 640  # beyond so many, what is slow is not asked


# ---- inputs


SWA_WIDTH = FLASH.window  # the sliding window: what every layer attends to
SINK_SCALE = 4.0  # of some heads as much as thousands of candidates; the first one's is as much as all that a row has
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
    served: bool = False  # what a server gives: -1 is all that is masked, and slot 0, which padding names, has numbers


WINDOW = CacheShape(SWA_PAGE, SWA_WIDTH, lengths=SWA_WIDTH)
C4 = CacheShape(64, 512, lengths=512)


@dataclass(frozen=True)
class Shape:
    """One call."""

    rows: int
    heads: int
    main: CacheShape = WINDOW
    extra: CacheShape | None = None
    sink: bool = True
    query_scale: float = 1.0
    wide_scales: bool = False  # tiles with maxima from 1e-4 to 1e4, but a score spread of about 1
    flashmla: bool = False  # FlashMLA's own distributions, sinks infinite in both directions included


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

    def arguments(self) -> dict:
        left_out = ("shape", "page_table", "page_table_rows")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def table_arguments(self) -> dict:
        """The same call with the page table instead of the second cache's list."""
        table = {"extra_page_table": self.page_table, "extra_page_table_rows": self.page_table_rows}
        return {**self.arguments(), "extra_indices": None, **table}


def rms_rows(count: int, generator: torch.Generator, dtype=torch.bfloat16) -> torch.Tensor:
    """[count, 512] random rows of root mean square 1, like the model's normalised K."""
    rows = torch.randn((count, kv_pages.HEAD_DIM), generator=generator, device=generator.device)
    return (rows * torch.rsqrt(rows.square().mean(dim=1, keepdim=True))).to(dtype)


def _rows(count: int, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    if shape.flashmla:
        values = torch.randn((count, kv_pages.HEAD_DIM), generator=generator, device=generator.device) / 10
        return values.clamp(-1, 1).to(torch.bfloat16)
    if not shape.wide_scales:
        return rms_rows(count, generator)
    rows = rms_rows(count, generator, torch.float32)
    tiles = rows[:, : kv_pages.NOPE_DIM].reshape(count, kv_pages.NUM_TILES, kv_pages.TILE_DIM)
    decades = torch.rand((count, kv_pages.NUM_TILES), generator=generator, device=rows.device) * 8 - 4
    tiles *= (10.0**decades / tiles.abs().amax(dim=-1))[..., None]
    return rows


def _given_lengths(cache: CacheShape) -> tuple[int, ...]:
    given = cache.width if cache.lengths is None else cache.lengths
    return (given,) if isinstance(given, int) else given


def _lengths(cache: CacheShape, rows: int, device) -> torch.Tensor | None:
    if cache.lengths is None:
        return None
    values = _given_lengths(cache)
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
        kinds = 1 if cache.served else len(MASKED)
        kind = torch.randint(0, kinds, (rows, cache.width), generator=generator, device=device)
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
    pages = kv_pages.new_pages(slots // cache.page_size, cache.page_size, fill=0xFF, device=generator.device)
    live = indices[:, 0, :][valid_candidates(indices, slots, lengths)]
    live = torch.cat([live, live.new_zeros(int(cache.served))]).unique()
    kv_pages.write_rows(pages, live, _rows(live.numel(), shape, generator))
    return pages, indices, lengths, *tables


def _most(cache: CacheShape) -> int:
    """Candidates of a row."""
    return min(max(*_given_lengths(cache), 0), cache.width)


def _sink(shape: Shape, generator: torch.Generator) -> torch.Tensor | None:
    if not shape.sink:
        return None
    sink = torch.randn((shape.heads,), generator=generator, device=generator.device)
    if not shape.flashmla:
        sink *= SINK_SCALE
        sink[0] = math.log(max(1, sum(_most(cache) for cache in (shape.main, shape.extra) if cache is not None)))
    else:
        draw = torch.randn((shape.heads,), generator=generator, device=generator.device)
        sink = sink.masked_fill(draw > 0.5, float("inf")).masked_fill(draw < -0.5, -float("inf"))
    return sink


def make_inputs(shape: Shape, *, seed: int = 0, device="cuda") -> Inputs:
    """Random inputs of a shape; the same seed gives the same inputs on the same device type."""
    generator = torch.Generator(device=device).manual_seed(seed)
    pages, indices, lengths, *_ = _cache(shape.main, shape, generator)
    extra = _cache(shape.extra, shape, generator) if shape.extra is not None else (None,) * 5
    q = torch.randn((shape.rows, 1, shape.heads, kv_pages.HEAD_DIM), generator=generator, device=device)
    if shape.flashmla:
        q = q.clamp(-1, 1)
    return Inputs(
        q=(q * shape.query_scale).to(torch.bfloat16),
        kv_pages=pages,
        indices=indices,
        topk_length=lengths,
        attn_sink=_sink(shape, generator),
        extra_kv_pages=extra[0],
        extra_indices=extra[1],
        extra_topk_length=extra[2],
        softmax_scale=None if not shape.wide_scales else kv_pages.HEAD_DIM**-0.5 * 1e-3,
        shape=shape,
        page_table=extra[3],
        page_table_rows=extra[4],
    )


# ---- self-test


CHECKED_WINDOW = dataclasses.replace(WINDOW, lengths=(SWA_WIDTH, 5, 77))
CHECKED_EXTRAS = {
    "window": None,
    "C4": dataclasses.replace(C4, masked=0.02),
    "C128 at 8K, captured for 1M": CacheShape(2, 8192, lengths=64, ascending=True),
    "C128 at 512K": CacheShape(2, 4096, lengths=4096, ascending=True),
}


def checks(quick: bool) -> Iterator[Check]:
    yield Check("sparse_decode", "two references", functools.partial(_check_references, quick))
    for name, extra in CHECKED_EXTRAS.items():
        if not (quick and name == "C128 at 512K"):
            yield Check("sparse_decode", name, functools.partial(_check_shapes, extra, quick), ON_GPU)
    yield Check("sparse_decode", "kernels for prompts", _check_prompts, ON_GPU)
    yield Check("sparse_decode", "C128 by page table", _check_page_table, ON_GPU)
    yield Check("sparse_decode", "graph replay", _check_graph_replay, ON_GPU)


def _check_references(quick: bool) -> str:
    """The float64 definition against a float32 online softmax with its own byte decoder, at real widths."""
    extras = [CacheShape(64, 512, lengths=(512, 3), masked=0.05)]
    if not quick:
        extras.append(CacheShape(2, 4096, lengths=(4096, 64), ascending=True))
    worst = 0.0
    for extra in extras:
        inputs = make_inputs(Shape(2, 64, WINDOW, extra), device="cpu")
        both = (way(**inputs.arguments()) for way in (reference.sparse_decode_online, reference.sparse_decode))
        worst = max(worst, *(relative_error(other, one) for other, one in zip(*both, strict=True)))
    return within(worst, bounds.SPARSE_DECODE_REFERENCES, "relative difference")


def _check_shapes(extra: CacheShape | None, quick: bool) -> str:
    """DeepSeek-V4-Flash's shapes on one to eight GPUs: 8 to 64 heads, 1 to 64 rows, short windows among them."""
    all_heads, all_rows = ((16, 64), (1, 8)) if quick else ((8, 16, 32, 64), (1, 8, 64))
    worst = 0.0
    for heads, rows in itertools.product(all_heads, all_rows):
        worst = max(
            worst, _error_of(make_inputs(Shape(rows, heads, CHECKED_WINDOW, extra)), f"{rows} rows, {heads} heads")
        )
    return f"rows {all_rows} x heads {all_heads}: relative error at most {worst:.5f}"


def _error_of(inputs: Inputs, case: str, **kernel) -> float:
    """Of out, against float64; Failure where it or that of lse is more than is allowed."""
    out, lse = op.sparse_decode(**inputs.arguments(), **kernel, return_lse=True)
    truth, true_lse = reference.sparse_decode(**inputs.arguments())
    error = strict_error(out, truth)
    within(error, bounds.SPARSE_DECODE.truth, f"{case}: relative error")
    within(strict_error(lse, true_lse), bounds.SPARSE_DECODE_LSE, f"{case}: relative error of lse")
    return error


def _check_prompts() -> str:
    """The one for many rows against float64, with few heads stacked; the one in pairs to the bit as few rows."""
    worst, c128 = 0.0, CacheShape(2, 1024, lengths=(1024, 64), ascending=True)
    for heads, extra in itertools.product((8, 32, 64), (None, C4, c128)):
        inputs = make_inputs(Shape(33, heads, WINDOW, extra))
        worst = max(worst, _error_of(inputs, f"many rows, {heads} heads", prefill=True))
        pairs, few = (op.sparse_decode(**inputs.arguments(), prefill=False, pairs=pairs) for pairs in (True, False))
        same(pairs, few, f"{heads} heads in pairs and by the kernel for few rows")
    return f"relative error at most {worst:.5f}; in pairs equal to few rows, bit by bit"


def _check_page_table() -> str:
    """Candidates from lengths and a page table against their list, in both kernels, to the bit."""
    for page_size, heads, prefill in itertools.product((2, 64), (16, 64), (False, True)):
        extra = CacheShape(page_size, 4096, lengths=(4096, 64, 0, 777), tables=3, masked=0.05)
        inputs = make_inputs(Shape(12, heads, WINDOW, extra))
        both = (op.sparse_decode(**i, prefill=prefill) for i in (inputs.table_arguments(), inputs.arguments()))
        same(*both, f"{heads} heads, page size {page_size}, {'many' if prefill else 'few'} rows: table and list")
    return "equal to the list of the same candidates, bit by bit"


def _check_graph_replay() -> str:
    """Captured, replayed with other contents, compared to the bit with an eager call."""
    static, fresh = (make_inputs(Shape(8, 16, WINDOW, C4), seed=seed) for seed in (1, 2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op.sparse_decode(**static.arguments())
    for name, value in static.arguments().items():
        if torch.is_tensor(value):
            value.copy_(getattr(fresh, name))
    for _ in range(3):
        graph.replay()
    same(out, op.sparse_decode(**fresh.arguments()), "a replay and an eager call")
    return "equal to an eager call, bit by bit"


# ---- calibrate: the shapes of a plan


@dataclass(frozen=True)
class Case:
    """One call shape: rows, a rank's heads, the second cache's page size, valid entries and captured width."""

    kind: str
    rows: int
    heads: int
    page_size: int = 0
    length: int = 0
    width: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.rows} x {self.heads} heads"

    @property
    def bytes_per_call(self) -> int:
        candidates = self.rows * (FLASH.window + self.length)
        return candidates * KV_TOKEN_BYTES + 2 * self.rows * self.heads * FLASH.head_dim * 2


def cases(*, tp: int, context: int, concurrency: int, quick: bool) -> list[Case]:
    """What a decode step of this plan calls."""
    heads = FLASH.heads // tp
    c4 = min(FLASH.index_topk, context // 4)
    c128 = max(1, context // 128)
    width = math.ceil(c128 / 64) * 64
    rows = sorted({1, concurrency} if quick else {1, concurrency, 2 * concurrency, 64})
    found = []
    for count in rows:
        found.append(Case("window", count, heads))
        found.append(Case("C4", count, heads, 64, c4, FLASH.index_topk))
        found.append(Case(f"C128 at {context // 1024}K", count, heads, 2, c128, width))
    if not quick:
        found.append(Case("C4", PREFILL_ROWS, heads, 64, c4, FLASH.index_topk))
    return found


def _is_prefill(case: Case) -> bool:
    return case.rows == PREFILL_ROWS


def _is_small(case: Case) -> bool:
    return case.rows * (FLASH.window + case.length) <= SMALL_CANDIDATES


def max_error(provider: str, case: Case) -> float:
    return bounds.SPARSE_DECODE.truth if provider.startswith(OURS) else bounds.SPARSE_DECODE.others


def correctness_inputs(case: Case, device: str = "cuda") -> list:
    """A few calls with masked entries and short lengths, NaN in every byte that must not be read. SGLang's own kernels
    know no slot beyond the pool: they would read there, or write."""
    rows = CHECKED_PREFILL_ROWS if _is_prefill(case) else min(case.rows, 8)
    window = CacheShape(SWA_PAGE, FLASH.window, lengths=(FLASH.window, 5, 77), masked=0.02, served=True)
    extra = None
    if case.page_size:
        lengths = (case.length, max(1, case.length // 3), 1)
        ascending = case.page_size == 2
        masked = 0.0 if ascending else 0.02
        extra = CacheShape(case.page_size, case.width, lengths, ascending, masked=masked, served=True)
    return [
        make_inputs(Shape(rows, case.heads, window, extra), seed=seed, device=device)
        for seed in range(1 if _is_prefill(case) else 2)
    ]


class TimingInputs:
    """Calls whose rows lie all over large pools, so that each finds cold caches."""

    def __init__(self):
        self.generator = torch.Generator(device="cuda").manual_seed(0)
        self.pools: dict[int, object] = {}

    def pool(self, page_size: int):
        """[pages, page_size, 1, 584] of random rows that repeat a template."""
        if page_size not in self.pools:
            template = kv_pages.pack_rows(rms_rows(1 << 14, self.generator), page_size)
            pages, stride = template.shape[0], template.stride(0)
            copies = max(1, POOL_BYTES // (pages * stride))
            flat = template.as_strided((1, pages * stride), (pages * stride, 1)).repeat(copies, 1)
            shape = (copies * pages, page_size, 1, kv_pages.TOKEN_BYTES)
            self.pools[page_size] = flat.as_strided(shape, (stride, kv_pages.TOKEN_BYTES, kv_pages.TOKEN_BYTES, 1))
        return self.pools[page_size]

    def calls(self, case: Case, count: int) -> list:
        def random(slots: int, width: int) -> torch.Tensor:
            shape = (count, case.rows, 1, width)
            return torch.randint(0, slots, shape, generator=self.generator, device="cuda", dtype=torch.int32)

        q = torch.randn(
            (count, case.rows, 1, case.heads, FLASH.head_dim), generator=self.generator, device="cuda"
        ).bfloat16()
        swa = self.pool(SWA_PAGE)
        indices = random(swa.shape[0] * SWA_PAGE, FLASH.window)
        lengths = torch.full((case.rows,), FLASH.window, dtype=torch.int32, device="cuda")
        sink = torch.randn((case.heads,), generator=self.generator, device="cuda")
        found = [Inputs(q[i], swa, indices[i], lengths, sink) for i in range(count)]
        if case.page_size:
            extra = self.pool(case.page_size)
            chosen = random(extra.shape[0] * case.page_size, case.width)
            chosen[..., case.length :] = -1
            extra_lengths = torch.full((case.rows,), case.length, dtype=torch.int32, device="cuda")
            for i, inputs in enumerate(found):
                inputs.extra_kv_pages, inputs.extra_indices, inputs.extra_topk_length = extra, chosen[i], extra_lengths
        return found


def error(provider: str, result, inputs) -> float:
    return error_of(provider, result, reference.sparse_decode(**inputs.arguments())[0])


# ---- who computes it


def providers() -> tuple[Provider, ...]:
    return (
        Provider(OURS, our_problem, _ours),
        Provider(f"{OURS}, decode kernel", our_problem, functools.partial(_ours, False, False), _is_prefill),
        Provider(f"{OURS}, decode kernel in pairs", our_problem, functools.partial(_ours, False, True), _is_prefill),
        Provider(f"{OURS}, prefill kernel", our_problem, functools.partial(_ours, True), _is_prefill),
        Provider(STOCK, _stock_problem, _stock, packages=("sglang",)),
        Provider("triton", triton_problem, triton, _is_small, ("sglang",)),
        Provider("flashmla", flashmla_problem, flashmla, lambda case: case.heads == 64),
        Provider("torch", lambda: None, _torch, lambda case: case.rows * (FLASH.window + case.length) <= 8 * 640),
    )


def _ours(prefill: bool | None = None, pairs: bool | None = None):
    """The operator as it is called, or with one of its kernels."""
    return lambda inputs: op.sparse_decode(**inputs.arguments(), prefill=prefill, pairs=pairs)


def _stock_problem() -> str | None:
    return None if first_installed(STOCK_MODULES) else "SGLang 0.5.13 or newer is not installed"


def _keywords(inputs) -> dict:
    extra = inputs.extra_kv_pages
    return {
        "q": inputs.q,
        "k_cache": inputs.kv_pages.view(torch.float8_e4m3fn),
        "head_dim_v": inputs.q.shape[-1],
        "softmax_scale": inputs.q.shape[-1] ** -0.5,
        "indices": inputs.indices,
        "topk_length": inputs.topk_length,
        "attn_sink": inputs.attn_sink,
        "extra_k_cache": None if extra is None else extra.view(torch.float8_e4m3fn),
        "extra_indices_in_kvcache": inputs.extra_indices,
        "extra_topk_length": inputs.extra_topk_length,
    }


def _stock():
    function = unpatched(first_installed(STOCK_MODULES), STOCK_NAME)
    return lambda inputs: function(**_keywords(inputs))[0]


def triton_problem() -> str | None:
    return None if is_installed(TRITON_MODULE) else "SGLang 0.5.16 or newer is not installed"


def triton():
    decode = unpatched(TRITON_MODULE, TRITON_NAME)

    def call(inputs):
        dim = inputs.q.shape[-1]
        extra = (inputs.extra_kv_pages, inputs.extra_indices, inputs.extra_topk_length)
        first = (inputs.q, inputs.kv_pages, inputs.indices, inputs.topk_length, inputs.attn_sink)
        return decode(*first, dim, dim**-0.5, *extra)[0].view_as(inputs.q)

    return call


def flashmla_problem() -> str | None:
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        return "has no kernel for this GPU"
    return None if first_installed(FLASHMLA_MODULES) else "neither sgl_kernel nor flash_mla is installed"


def flashmla(one_schedule: bool = False):
    """With a tile schedule for each set of lengths: FlashMLA's first call with a new one fills it in. The engine makes
    one a step, so it is not timed. `one_schedule`: for all calls, whose lengths are equal in tensors of their own.
    """
    module = first_installed(FLASHMLA_MODULES)
    function, metadata = unpatched(module, "flash_mla_with_kvcache"), unpatched(module, "get_mla_metadata")
    fixed = {"block_table": None, "cache_seqlens": None, "is_fp8_kvcache": True}
    schedule = {"lengths": None}

    def call(inputs):
        lengths = (inputs.topk_length, inputs.extra_topk_length)
        former = schedule["lengths"]
        if former is None or not (one_schedule or all(map(operator.is_, lengths, former))):
            schedule.update(lengths=lengths, made=metadata()[0])
        return function(**_keywords(inputs), **fixed, tile_scheduler_metadata=schedule["made"])[0]

    return call


def _torch():
    """Plain float32 torch: gather, dequantise, two matrix products."""

    def gathered(pages, indices, lengths):
        slots = pages.shape[0] * pages.shape[1]
        valid = valid_candidates(indices, slots, lengths)
        chosen = indices[:, 0, :].clamp(0, slots - 1)
        keys = kv_pages.read_rows(pages, chosen.flatten(), torch.float32).view(*chosen.shape, -1)
        return keys.masked_fill(~valid[..., None], 0.0), valid

    def call(inputs):
        parts = [gathered(inputs.kv_pages, inputs.indices, inputs.topk_length)]
        if inputs.extra_kv_pages is not None:
            parts.append(gathered(inputs.extra_kv_pages, inputs.extra_indices, inputs.extra_topk_length))
        keys, valid = (torch.cat(both, dim=1) for both in zip(*parts, strict=True))
        scale = inputs.q.shape[-1] ** -0.5 if inputs.softmax_scale is None else inputs.softmax_scale
        scores = torch.einsum("rhd,rkd->rhk", inputs.q[:, 0].float(), keys) * scale
        scores = scores.masked_fill(~valid[:, None], float("-inf"))
        sink = inputs.attn_sink[None, :, None].expand(scores.shape[0], -1, 1)
        weights = torch.cat([scores, sink], dim=2).softmax(dim=2)[..., :-1]
        return torch.einsum("rhk,rkd->rhd", weights, keys)[:, None].to(inputs.q.dtype)

    return call
