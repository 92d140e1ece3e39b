"""What index_select is measured by: index logits, top-512 and page transform together, as a C4 layer calls them.

Stock is SGLang's pair for SM120: fp32 logits of the whole width, then top-k version 1. What inputs do not read is
poison (NaN bytes).
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deepseek_v4_sm120.commands.plan.memory import INDEX_KEY_BYTES
from deepseek_v4_sm120.commands.plan.models import FLASH
from deepseek_v4_sm120.ops import index_select as op
from deepseek_v4_sm120.reference import index_select as reference
from deepseek_v4_sm120.reference.index_select import FP4_BYTES, PAGE
from deepseek_v4_sm120.specs import bounds
from deepseek_v4_sm120.specs.check import ON_GPU, Check, Failure, same, within
from deepseek_v4_sm120.specs.provider import (
    OURS,
    STOCK,
    Provider,
    is_installed,
    our_problem,
    sglang_version,
    unpatched,
)

ERROR = "share of the chosen entries that do not belong there"
POOL_BYTES, TEMPLATE_PAGES = 512 << 20, 512
PREFILL_ROWS, CHECKED_PREFILL_ROWS = 2048, 264  # a chunk; as many rows as make the operator cut its scratch otherwise
CHECKED_PREFILL_ENTRIES = 6000
TORCH_ENTRIES = 1 << 20  # beyond so many, an implementation that gathers all keys as fp32 is not asked

TILELANG_SINCE = (0, 5, 16)
TILELANG = ("sglang.kernels.ops.attention.dsa.tilelang_kernel", "tilelang_fp8_paged_mqa_logits")
TORCH_SM120 = ("sglang.srt.layers.attention.dsv4.indexer", "fp8_paged_mqa_logits_torch_sm120")  # 0.5.13 to 0.5.15
# SGLang's top-k on SM120 is version 1; newest home first
TOPK = (
    ("sglang.kernels.ops.attention.dsv4.topk", "topk_transform_paged"),
    ("sglang.kernels.ops.attention.dsv4.topk", "topk_transform_512"),
    ("sglang.jit_kernel.dsv4.topk", "topk_transform_512"),
)


# ---- inputs


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
    distinct: int | None = None  # keys of a request, which come again and again: ties; None: all


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
    width = FP4_BYTES if fp4 else reference.FP8_BYTES
    stride = PAGE * width + gap
    storage = torch.full((num_pages * stride,), fill, dtype=torch.uint8, device=device)
    return storage.as_strided((num_pages, PAGE, 1, width), (stride, width, width, 1))


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
    needed = max(1, -(-max(0, int(lengths.max())) // PAGE))
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
        longest = min(int(own.max()), used * PAGE)
        if longest > 0:
            entries = torch.arange(longest, device=device)
            slots = table[request, entries // PAGE].to(torch.int64) * PAGE + entries % PAGE
            keys = torch.randn((longest, reference.DIM), generator=generator, device=device)
            keys *= torch.rand((longest, 1), generator=generator, device=device) * 4
            reference.write_keys(k_pages, slots, keys if shape.distinct is None else keys[entries % shape.distinct])
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


def allowed_logit_error(fp4: bool) -> float:
    """Of ours, as a share of the row's greatest, on this GPU."""
    native = not fp4 and torch.cuda.is_available() and op.has_fp8_mma(torch.cuda.current_device())
    return bounds.INDEX_SELECT_NATIVE_FP8 if native else bounds.INDEX_SELECT.truth


# ---- self-test


def checks(quick: bool) -> Iterator[Check]:
    yield Check("index_select", "top-k by sorting", _check_topk_by_sorting)
    for fp4 in (False, True):
        name = "FP4" if fp4 else "FP8"
        yield Check("index_select", f"{name} logits", functools.partial(_check_logits, fp4), ON_GPU)
        yield Check("index_select", f"{name} selection", functools.partial(_check_selection, fp4, quick), ON_GPU)
    yield Check("index_select", "slots of dealt entries", _check_dealt_slots, ON_GPU)


def _check_topk_by_sorting() -> str:
    """The reference's order on ties, signed zeros and NaN, worked out by hand."""
    nan, inf = float("nan"), float("inf")
    scores = torch.tensor([[0.0, -0.0, 1.0, nan, -inf, 0.0, 1.0]])
    for k, expected in ((3, [0, 2, 6]), (5, [0, 1, 2, 5, 6]), (6, [0, 1, 2, 4, 5, 6])):
        found = reference.topk_select(scores, torch.tensor([7]), k=k)[1][0].tolist()
        if found != expected:
            raise Failure(f"k = {k}: {found}, not {expected}")
    return "ties to the lower entry, -0 equals +0, NaN last"


def _check_logits(fp4: bool) -> str:
    inputs, allowed = make_inputs(Shape(3, (1000, 64, 700), fp4)), allowed_logit_error(fp4)
    ours, truth = op.mqa_logits(**inputs.arguments()), reference.mqa_logits(**inputs.arguments())
    inside = truth > -torch.inf
    off, greatest = ((t.abs().where(inside, 0.0)).amax(dim=1) for t in (ours - truth, truth))
    told = within(float((off / greatest).max()), allowed, "error as a share of the row's greatest logit")
    return f"{told}, allowed {allowed:g}"


def _check_selection(fp4: bool, quick: bool) -> str:
    """The exact top-k of our own logits: one row, many, rows of one request together, a captured width."""
    shapes = [Shape(1, (16384,), fp4), Shape(9, (3000, 512, 0, 5000), fp4), Shape(8, (4000, 4001), fp4, 4)]
    shapes += [Shape(2, (700, 20000), fp4, columns=4096), Shape(2, (3000, 9001), fp4, distinct=700)] + (
        [] if quick else [Shape(1, (262144,), fp4)]
    )
    for shape in shapes:
        inputs = make_inputs(shape)
        entries = torch.empty((shape.rows, FLASH.index_topk), dtype=torch.int32, device="cuda")
        slots = op.index_select(**inputs.arguments(), entries=entries, rows_per_request=shape.rows_per_request)
        logits = op.mqa_logits(**inputs.arguments())  # without the hint: it must not matter
        table, pages = inputs.page_table, inputs.k_pages.shape[0]
        expected = reference.topk_select(logits, inputs.lengths, page_table=table, num_pages=pages)
        same(slots, expected[0], f"{shape}: slots and those of the sorted logits")
        same(entries, expected[1], f"{shape}: entries and those of the sorted logits")
        alone = op.topk_select(logits, inputs.lengths, page_table=table, num_pages=pages)
        same(alone, expected[0], f"{shape}: slots of given logits and of those sorted")
    return f"{len(shapes)} shapes: the exact top-512 of the logits, ties included"


def _check_dealt_slots() -> str:
    """Entries of both widths, none, and what is outside of table or pool; rows that do not divide by the ranks."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    ranks, rows, columns, pages = 4, 1030, 1023, 5000
    table = torch.randint(-1, pages + 9, (rows, columns), generator=generator, dtype=torch.int32, device="cuda")
    lists = (ranks, math.ceil(rows / ranks), FLASH.index_topk)
    dealt = torch.randint(-1, PAGE * columns + 64, lists, generator=generator, dtype=torch.int32, device="cuda")
    for dtype in (torch.int32, torch.int16):
        entries = torch.empty((rows, FLASH.index_topk), dtype=torch.int32, device="cuda")
        slots = op.dealt_slots(dealt.to(dtype), table, num_pages=pages, entries=entries)
        expected = reference.dealt_slots(dealt.to(dtype), table, num_pages=pages)
        same(slots, expected[0], f"{dtype}: slots")
        same(entries, expected[1], f"{dtype}: entries")
    return f"{rows} rows of {ranks} ranks"


# ---- calibrate: the shapes of a plan


@dataclass(frozen=True)
class Case:
    """One call shape. `entries`: of a row's index cache; `rows_per_request`: adjacent rows with one page table."""

    kind: str
    rows: int
    entries: int
    fp4: bool = False
    rows_per_request: int = 1

    @property
    def name(self) -> str:
        count = f"{self.entries // 1024}K" if self.entries >= 1024 else str(self.entries)
        return f"{self.kind}, {self.rows} x {count} entries"

    @property
    def columns(self) -> int:
        return max(1, math.ceil(self.entries / PAGE))

    @property
    def bytes_per_call(self) -> int:
        requests = math.ceil(self.rows / self.rows_per_request)
        queries = self.rows * FLASH.index_heads * FLASH.index_dim // (2 if self.fp4 else 1)
        return requests * self.entries * (FP4_BYTES if self.fp4 else INDEX_KEY_BYTES) + queries


@dataclass
class Call:
    inputs: Inputs
    rows_per_request: int = 1


def cases(*, tp: int, context: int, concurrency: int, quick: bool) -> list[Case]:
    """What the plan calls. The indexer is not divided by TP: every rank does all of it."""
    entries = context // 4
    rows = sorted({1, concurrency} if quick else {1, concurrency, 64})
    found = [Case("decode", count, entries) for count in rows]
    found.append(Case("verify", 2 * concurrency, entries, rows_per_request=2))
    found.append(Case("prefill", PREFILL_ROWS, entries, rows_per_request=PREFILL_ROWS))
    fp4_rows = {1} if quick else {1, concurrency}
    return found + [Case("decode, FP4 cache", count, entries, fp4=True) for count in sorted(fp4_rows)]


def _is_prefill(case: Case) -> bool:
    return case.rows_per_request == PREFILL_ROWS


def max_error(provider: str, case: Case) -> float:
    return 0.0


def correctness_inputs(case: Case, device: str = "cuda") -> list[Call]:
    """Rows of different lengths, short ones among them; NaN in every key that must not be read."""
    rows = CHECKED_PREFILL_ROWS if _is_prefill(case) else min(case.rows, 8)
    longest = min(case.entries, CHECKED_PREFILL_ENTRIES) if _is_prefill(case) else case.entries
    step = max(1, longest // rows)
    lengths = (longest, max(1, longest // 3), min(longest, FLASH.index_topk), 5)
    if case.rows_per_request > 1:  # causal: each row sees a little more
        lengths = tuple(max(1, longest - step * (rows - 1 - row)) for row in range(rows))
    shape = Shape(rows, lengths, case.fp4, min(case.rows_per_request, rows))
    found = [make_inputs(shape, seed=seed, device=device) for seed in range(1 if _is_prefill(case) else 2)]
    for inputs in found:  # pages behind a row's last: any page of the pool, as in SGLang's table
        inputs.page_table[inputs.page_table >= inputs.k_pages.shape[0]] = 0
    return [Call(inputs, case.rows_per_request) for inputs in found]


class TimingInputs:
    """Calls whose pages lie all over a large pool of keys, so that each finds cold caches."""

    def __init__(self, device: str = "cuda"):
        self.device = device
        self.generator = torch.Generator(device=device).manual_seed(0)
        self.pools: dict[bool, object] = {}

    def pool(self, fp4: bool):
        """[pages, 64, 1, 132 or 68]: a template of random keys, repeated."""
        if fp4 not in self.pools:
            template = new_pages(TEMPLATE_PAGES, fp4, device=self.device)
            count = TEMPLATE_PAGES * PAGE
            keys = torch.randn((count, FLASH.index_dim), generator=self.generator, device=self.device)
            reference.write_keys(template, torch.arange(count, device=self.device), keys)
            size = TEMPLATE_PAGES * template.stride(0)
            copies = math.ceil(POOL_BYTES / size)
            storage = template.as_strided((1, size), (size, 1)).repeat(copies, 1)
            shape = (copies * TEMPLATE_PAGES, *template.shape[1:])
            self.pools[fp4] = storage.view(-1).as_strided(shape, template.stride())
        return self.pools[fp4]

    def calls(self, case: Case, count: int) -> list[Call]:

        pool, requests = self.pool(case.fp4), math.ceil(case.rows / case.rows_per_request)
        order = torch.randperm(pool.shape[0], generator=self.generator, device=self.device).to(torch.int32)
        each = torch.arange(requests * case.columns, device=self.device)
        lengths = torch.full((case.rows,), case.entries, dtype=torch.int32, device=self.device)
        if _is_prefill(case):  # the last chunk of the context
            lengths = lengths - (torch.arange(case.rows, 0, -1, device=self.device) // 4).to(torch.int32)
        lengths = lengths.clamp_min(1)
        found = []
        for number in range(count):
            q, q_scales = make_queries(case.rows, case.fp4, self.generator)
            weights = torch.randn((case.rows, FLASH.index_heads), generator=self.generator, device=self.device) * 0.01
            table = order[(each + number * each.numel()) % order.numel()].view(requests, case.columns)
            table = table.repeat_interleave(case.rows_per_request, dim=0)[: case.rows].contiguous()
            found.append(Call(Inputs(q, pool, weights, lengths, table, q_scales), case.rows_per_request))
        return found


def error(provider: str, result, call: Call) -> float:
    """result: [rows, 512] int32 slots. Wrong, repeated or missing entries as a share of what should be there."""
    inputs = call.inputs
    truth = reference.mqa_logits(**inputs.arguments())
    tolerance, k = _tolerance(provider, inputs), result.shape[1]
    bad = expected = 0
    for row in range(result.shape[0]):
        length = int(inputs.lengths[row])
        entries = torch.arange(length, device=truth.device)
        slots = inputs.page_table[row, entries // PAGE].long() * PAGE + entries % PAGE
        ordered, entry_of = slots.sort()
        chosen = result[row][result[row] >= 0].long()
        at = torch.searchsorted(ordered, chosen).clamp_max(length - 1)
        known = ordered[at] == chosen
        distinct = entry_of[at[known]].unique()
        logits = truth[row, :length]
        threshold = logits.topk(min(k, length)).values[-1] - tolerance * logits.abs().max()
        good = int((logits[distinct] >= threshold).sum())
        expected += min(k, length)
        bad += max(min(k, length), chosen.numel()) - good
    return bad / expected


def _tolerance(provider: str, inputs: Inputs) -> float:
    """How far below the k-th an entry may lie: of ours twice a logit's error, the k-th's and the entry's."""
    return bounds.INDEX_SELECT.others if provider != OURS else 2 * allowed_logit_error(inputs.q_scales is not None)


# ---- who computes it


def providers() -> tuple[Provider, ...]:
    return (
        Provider(OURS, our_problem, _ours),
        Provider(STOCK, _stock_problem, _stock, _stock_handles, ("sglang",)),
        Provider("deep_gemm + torch.topk", _deep_gemm_problem, _deep_gemm, lambda c: not c.fp4, ("deep_gemm",)),
        Provider("torch", lambda: None, _torch, _is_small),
    )


def _is_small(case: Case) -> bool:
    return case.rows * case.entries <= TORCH_ENTRIES


def _ours():
    return lambda call: op.index_select(
        **call.inputs.arguments(), k=FLASH.index_topk, rows_per_request=call.rows_per_request
    )


def _stock_logits() -> tuple[str, str] | None:
    version = sglang_version() or TILELANG_SINCE
    if version < (0, 5, 13):
        return None
    return TILELANG if version >= TILELANG_SINCE else TORCH_SM120


def _stock_handles(case: Case) -> bool:
    return not case.fp4 and (_stock_logits() != TORCH_SM120 or _is_small(case))


def _stock_problem() -> str | None:
    if (logits := _stock_logits()) is None:
        return "this SGLang has no index logits for SM120 (0.5.13 and later have)"
    if not is_installed(logits[0]):
        return f"this SGLang has no {logits[0]}"
    return None if _stock_topk() else "this SGLang has none of the top-k functions that we know"


def _stock_topk():
    found = (getattr_or_none(module, name) for module, name in TOPK if is_installed(module))
    return next((function for function in found if function is not None), None)


def getattr_or_none(module: str, name: str):
    return getattr(importlib.import_module(module), name, None)


def _stock():
    """SGLang's pair for SM120: fp32 logits of the whole width, then top-k version 1."""
    logits, topk = unpatched(*_stock_logits()), _stock_topk()

    def call(one: Call):
        i = one.inputs
        out = torch.empty((i.q.shape[0], FLASH.index_topk), dtype=torch.int32, device=i.q.device)
        scores = logits(i.q, i.k_pages, i.weights, i.lengths, i.page_table, None, i.page_table.shape[1] * PAGE, False)
        topk(scores, i.lengths, i.page_table, out, PAGE, None)
        return out

    return call


def _deep_gemm_problem() -> str | None:
    if not is_installed("deep_gemm"):
        return "DeepGEMM does not import"
    return None if getattr_or_none("deep_gemm", "fp8_paged_mqa_logits") else "this DeepGEMM has no paged index logits"


def _deep_gemm():
    """DeepGEMM's logits with its own schedule (made once a step in the engine, so not timed), then torch.topk."""
    import deep_gemm

    schedule = {}

    def call(one: Call):
        i = one.inputs
        if schedule.get("lengths") is not i.lengths:
            lengths = i.lengths[:, None].contiguous()
            made = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE, deep_gemm.get_num_sms())
            schedule.update(lengths=i.lengths, columns=lengths, made=made)
        width = i.page_table.shape[1] * PAGE
        arguments = (i.q, i.k_pages, i.weights, schedule["columns"], i.page_table, schedule["made"], width, False)
        return _select(deep_gemm.fp8_paged_mqa_logits(*arguments), i)

    return call


def _torch():
    """Gather all keys as fp32, one product, torch.topk."""

    def keys(pages, table):
        """([rows, width, 128], [rows, width] or None) of FP8 or FP4 pages."""
        raw = pages.view(torch.uint8).flatten(1)[table.long()]
        rows = raw.shape[0]
        if pages.shape[3] == INDEX_KEY_BYTES:
            values, scale = raw.split((PAGE * FLASH.index_dim, PAGE * 4), dim=2)
            values = values.contiguous().view(torch.float8_e4m3fn).float().reshape(rows, -1, FLASH.index_dim)
            return values, scale.contiguous().view(torch.float32).reshape(rows, -1)
        values, scale = raw.split((PAGE * FLASH.index_dim // 2, PAGE * 4), dim=2)
        exponents = reference.ue8m0(scale.reshape(rows, -1, 4), torch.float32).repeat_interleave(32, dim=-1)
        codes = reference.fp4_values(values.reshape(rows, -1, FLASH.index_dim // 2), torch.float32)
        return codes * exponents, None

    def call(one: Call):
        i = one.inputs
        values, scale = keys(i.k_pages, i.page_table)
        q = reference.queries(i.q, i.q_scales).float()
        scores = torch.einsum("rhd,rnd->rhn", q, values).relu_()
        logits = torch.einsum("rhn,rh->rn", scores, i.weights)
        return _select(logits if scale is None else logits * scale, i)

    return call


def _select(logits, inputs):
    """torch.topk and the page transform: slots, -1 behind the last."""
    behind = torch.arange(logits.shape[1], device=logits.device) >= inputs.lengths[:, None]
    k = min(FLASH.index_topk, logits.shape[1])
    values, entries = logits.masked_fill(behind, float("-inf")).topk(k, sorted=False)
    slots = inputs.page_table.gather(1, entries // PAGE) * PAGE + (entries % PAGE).int()
    slots = slots.masked_fill(values == float("-inf"), -1)
    return torch.nn.functional.pad(slots, (0, FLASH.index_topk - k), value=-1)
