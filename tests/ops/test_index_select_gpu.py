"""ops.index_select on a GPU: logits against float64, the chosen against the exact top-k of our logits, hostile inputs.

Bytes that the specification does not read are NaN (specs/index_select.py). Kernels run before the reference.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.ops import index_select as op
from deepseek_v4_sm120.ops.index_select import index_select, mqa_logits, topk_select
from deepseek_v4_sm120.reference import index_select as reference
from deepseek_v4_sm120.sglang_patches.adapters import index_select as adapter
from deepseek_v4_sm120.sglang_patches.adapters import index_select_dealt
from deepseek_v4_sm120.specs.index_select import Inputs, Shape, allowed_logit_error, make_inputs, new_pages

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["f16", "fp8"])
def fp8_mma(request, monkeypatch):
    """Both FP8 kernels: f16 MMA (SM90's choice) and FP8 MMA (SM120's; emulated on SM90)."""
    monkeypatch.setattr(op, "has_fp8_mma", lambda index: request.param == "fp8")


def logits_of(inputs: Inputs, **more) -> torch.Tensor:
    """Our logits, with -inf where a row has none (the kernel leaves these unwritten)."""
    width = inputs.page_table.shape[1] * reference.PAGE
    out = torch.full((inputs.q.shape[0], width), -math.inf, device=inputs.q.device)
    return mqa_logits(**inputs.arguments(), out=out, **more)


def check_logits(case, inputs: Inputs, **more) -> None:
    ours = logits_of(inputs, **more)
    truth = reference.mqa_logits(**inputs.arguments())
    inside = truth > -math.inf
    assert torch.equal(inside, ours > -math.inf), f"{case}: other entries were written"
    scale = torch.where(inside, truth.abs(), 0.0).amax(dim=1, keepdim=True).clamp_min(1e-30)
    error = torch.where(inside, (ours - truth).abs() / scale, 0.0)
    allowed = allowed_logit_error(inputs.q_scales is not None)
    assert float(error.max()) <= allowed, f"{case}: error {float(error.max()):.2e} of the row's greatest"


def select(inputs: Inputs, k=512, **more):
    rows, device = inputs.q.shape[0], inputs.q.device
    out = torch.full((rows, k), -7, dtype=torch.int32, device=device)
    entries, logits = out.clone(), torch.full((rows, k), -7.0, device=device)
    index_select(**inputs.arguments(), k=k, out=out, entries=entries, logits=logits, **more)
    alone = index_select(**inputs.arguments(), k=k, **more)
    assert torch.equal(out, alone), "with and without the optional results"
    return out, entries, logits


def check_selection(case, inputs: Inputs, k=512, **more) -> None:
    """Against the exact top-k of our own logits."""
    out, entries, chosen = select(inputs, k, **more)
    logits = logits_of(inputs, **more)
    table, pages = inputs.page_table, inputs.k_pages.shape[0]
    slots, expected = reference.topk_select(logits, inputs.lengths, k=k, page_table=table, num_pages=pages)
    wrong = (entries != expected).any(dim=1).nonzero().flatten().tolist()
    assert not wrong, f"{case}: rows {wrong[:8]} choose other entries"
    assert torch.equal(out, slots), f"{case}: slots"
    values = logits.gather(1, expected.clamp_min(0).to(torch.int64)).masked_fill(expected < 0, -math.inf)
    assert torch.equal(chosen.nan_to_num(), values.nan_to_num()), f"{case}: logits of the chosen"


@pytest.mark.parametrize("rows_per_request", [1, 2, 4, 8])
@pytest.mark.parametrize("fp4", [False, True])
def test_logits(fp4, rows_per_request, fp8_mma, device):
    for rows, lengths in ((1, (1,)), (1, (300,)), (5, (63, 64, 65, 0, 129)), (9, (2049, 5000, 4096))):
        shape = Shape(rows, lengths, fp4, rows_per_request)
        inputs = make_inputs(shape, seed=rows, device=device)
        check_logits(shape, inputs, rows_per_request=rows_per_request)


@pytest.mark.parametrize("k", [512, 1024, 1, 77])
@pytest.mark.parametrize("fp4", [False, True])
def test_selection(fp4, k, fp8_mma, device):
    for rows, lengths, per_request in (
        (1, (16384,), 1),
        (1, (40000,), 1),
        (8, (511, 512, 513, 0, 1, 3000, 1025, 1024), 1),
        (7, (2048, 2049, 9000, 700), 1),
        (8, (6000, 6001, 6002, 6003), 4),
        (6, (6000, 6001, 6002), 3),
        (40, (1500, 4000, 0), 1),
    ):
        shape = Shape(rows, lengths, fp4, per_request)
        check_selection(shape, make_inputs(shape, seed=rows + k, device=device), k, rows_per_request=per_request)


def test_long_rows(device):
    check_selection("1M tokens", make_inputs(Shape(1, (262144,)), device=device))
    check_selection("beyond", make_inputs(Shape(2, (270001, 200), fp4=True, rows_per_request=2), device=device))


def test_prefill(device):
    """A chunk of causal rows of one request, then rows of two requests, tiled over the boundary."""
    lengths = tuple((9000 + i) // 4 for i in range(1500))
    check_selection(
        "prefill", make_inputs(Shape(1500, lengths, rows_per_request=1500), device=device), rows_per_request=9
    )
    shape = Shape(301, tuple(range(400, 701)), rows_per_request=150)
    check_selection("two requests", make_inputs(shape, device=device), rows_per_request=150)


def test_wide_table_and_wrong_hint(device):
    shape = Shape(6, (700, 3000, 64), columns=4096)
    inputs = make_inputs(shape, device=device)
    for hint in (1, 8):
        check_selection(f"captured for 1M, hint {hint}", inputs, rows_per_request=hint)


def test_a_rows_result_does_not_depend_on_the_batch(device, fp8_mma):
    for fp4 in (False, True):
        inputs = make_inputs(Shape(24, (5000, 5001, 5002, 5003), fp4, rows_per_request=4), device=device)
        logits, chosen = logits_of(inputs), select(inputs)
        assert torch.equal(logits, logits_of(inputs, rows_per_request=4))
        for ours, hinted in zip(chosen, select(inputs, rows_per_request=4), strict=True):
            assert torch.equal(ours, hinted)
        for row in (0, 5, 23):
            cut = {n: t[row : row + 1] for n, t in inputs.arguments().items() if n != "k_pages" and t is not None}
            one = Inputs(k_pages=inputs.k_pages, **cut)
            assert torch.equal(logits_of(one), logits[row : row + 1])
            for ours, alone in zip(chosen, select(one), strict=True):
                assert torch.equal(ours[row : row + 1], alone)


def test_nan_and_pages_outside_the_pool(device):
    inputs = make_inputs(Shape(3, (3000, 3000, 3000)), device=device)
    page = inputs.page_table[0, 5].item()
    raw = inputs.k_pages.view(torch.uint8)
    raw.as_strided((8192,), (1,), page * raw.stride(0))[: 20 * 128] = 0x7F  # 20 keys of NaN
    inputs.page_table[1, 7], inputs.page_table[1, 20:40] = -1, 2**30
    inputs.weights[2] = math.nan  # all of the row
    check_selection("nan", inputs)
    out, entries, _ = select(inputs)
    assert not bool(((entries[0] >= 320) & (entries[0] < 340)).any())
    assert torch.equal(entries[2], torch.arange(512, device=device, dtype=torch.int32))
    few = dataclasses.replace(inputs, lengths=torch.tensor([700, 1300, 600], dtype=torch.int32, device=device))
    few.page_table[1, 4:] = -5
    check_selection("fewer numbers than k", few)
    assert int((select(few)[0][1] == -1).sum()) == 512 - 256


SCORES = {
    "constant": lambda n, g: torch.full((3, n), 0.25),
    "zeros of both signs": lambda n, g: torch.where(torch.rand((3, n), generator=g) < 0.5, -0.0, 0.0),
    "three values": lambda n, g: torch.randint(-1, 2, (3, n), generator=g).float(),
    "normal": lambda n, g: torch.randn((3, n), generator=g),
    "negative": lambda n, g: -torch.rand((3, n), generator=g) - 1,
    "ascending": lambda n, g: torch.arange(n).float().repeat(3, 1),
    "descending": lambda n, g: -torch.arange(n).float().repeat(3, 1),
    "narrow": lambda n, g: 1 + torch.randint(0, 300, (3, n), generator=g) * 2.0**-23,
    "wide": lambda n, g: (
        torch.exp2(torch.rand((3, n), generator=g) * 250 - 125) * (torch.rand((3, n), generator=g) - 0.5)
    ),
    "few large": lambda n, g: torch.where(torch.rand((3, n), generator=g) < 0.01, 1e30, 1e-30),
    "k-th below zero": lambda n, g: torch.randn((3, n), generator=g) - 2.6,
    "none above zero": lambda n, g: -(torch.randn((3, n), generator=g) + 0.5).clamp_min(0),
    "infinities": lambda n, g: torch.randint(-1, 2, (3, n), generator=g) * math.inf,
    "mostly nan": lambda n, g: torch.where(
        torch.rand((3, n), generator=g) < 0.9, math.nan, torch.randn((3, n), generator=g)
    ),
}


@pytest.mark.parametrize("kind", SCORES)
def test_topk_of_hostile_scores(kind, device):
    generator = torch.Generator().manual_seed(1)
    for n in (1, 511, 513, 5000, 70000, 300000):
        scores = SCORES[kind](n, generator).to(device)
        for lengths in ((n, n - 1, max(n // 2, 1)), (0, -4, n + 9)):
            sizes = torch.tensor(lengths, dtype=torch.int32, device=device)
            logits = torch.empty((3, 512), device=device)
            found = topk_select(scores, sizes, logits=logits)
            expected, _ = reference.topk_select(scores, sizes)
            assert torch.equal(found, expected), f"{kind}, {n} scores, lengths {lengths}"
            values = scores.gather(1, expected.clamp_min(0).to(torch.int64)).masked_fill(expected < 0, -math.inf)
            assert torch.equal(logits.nan_to_num(), values.nan_to_num())


def test_topk_of_rows_that_one_block_reads_whole(device):
    """As many rows as the chip has blocks: a list may cover more entries than its offsets can count."""
    generator = torch.Generator().manual_seed(2)
    n = 200000
    scores = torch.cat(
        (SCORES["descending"](n, generator), SCORES["normal"](n, generator), SCORES["k-th below zero"](n, generator))
    )
    scores = scores.repeat(20, 1).to(device)
    sizes = torch.arange(n, n - 180, -1, dtype=torch.int32, device=device)
    assert torch.equal(topk_select(scores, sizes), reference.topk_select(scores, sizes)[0])


def test_topk_with_a_page_table_and_gaps(device):
    scores = torch.randn((9, 2100), device=device)[:, :2000]
    table = torch.randperm(9 * 40, device=device).to(torch.int32).view(9, 40)[:, :32]
    lengths = torch.tensor([2000, 100, 513, 0, 1999, 600, 700, 800, 900], dtype=torch.int32, device=device)
    entries = torch.empty((9, 512), dtype=torch.int32, device=device)
    found = topk_select(scores, lengths, page_table=table, num_pages=300, entries=entries)
    slots, expected = reference.topk_select(scores, lengths, page_table=table, num_pages=300)
    assert torch.equal(found, slots) and torch.equal(entries, expected)


def test_slices_merge_to_the_whole(device):
    inputs = make_inputs(Shape(2, (6000, 4000)), device=device)
    _, whole, _ = select(inputs)
    parts = []
    for first, columns in ((0, 48), (48, 46)):
        cut = dataclasses.replace(
            inputs,
            page_table=inputs.page_table[:, first : first + columns],
            lengths=(inputs.lengths - 64 * first).clamp(0, 64 * columns).to(torch.int32),
        )
        _, entries, logits = select(cut)
        parts.append((torch.where(entries >= 0, entries + 64 * first, -1), logits))
    merged = topk_select(torch.cat([p[1] for p in parts], 1), torch.full((2,), 1024, dtype=torch.int32, device=device))
    found = torch.cat([p[0] for p in parts], 1).gather(1, merged.to(torch.int64))
    assert torch.equal(found, whole)


def test_views_gaps_and_pages_past_2_31_bytes(device):
    inputs = make_inputs(Shape(4, (900, 1000), page_gap=64), device=device)
    wide = torch.zeros((4, 1, 70, 256), dtype=torch.uint8, device=device).fill_(0x7F).view(torch.float8_e4m3fn)
    wide[:, :, :64, :128] = inputs.q
    table = torch.full((4, 40), -3, dtype=torch.int32, device=device)
    table[:, : inputs.page_table.shape[1]] = inputs.page_table
    weights = torch.full((4, 99), math.nan, device=device)
    weights[:, :64] = inputs.weights
    view = dataclasses.replace(
        inputs, q=wide[:, :, :64, :128], page_table=table[:, :16], weights=weights[:, :64], lengths=inputs.lengths
    )
    expected = select(inputs)
    for ours, other in zip(select(view), expected, strict=True):
        assert torch.equal(ours, other)
    far = 2**31 // 8448 + 50
    pool = new_pages(far + inputs.k_pages.shape[0], False, device=device)
    pool[far:].view(torch.uint8).copy_(inputs.k_pages)
    moved = dataclasses.replace(inputs, k_pages=pool, page_table=inputs.page_table + far)
    _, entries, logits = select(moved)
    assert torch.equal(entries, expected[1]) and torch.equal(logits, expected[2])


def test_graph_replay_follows_the_lengths(device):
    inputs = make_inputs(Shape(3, (9000,)), device=device)
    index_select(**inputs.arguments())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = index_select(**inputs.arguments())
    for lengths in ((9000, 5, 0), (1, 9000, 600), (513, 512, 8999)):
        inputs.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        for _ in range(2):
            graph.replay()
        assert torch.equal(out, index_select(**inputs.arguments()))


@pytest.mark.parametrize(
    ("rows", "columns", "limit"),
    [
        (256, 4096, 64 << 20),
        (64, 16384, 64 << 20),
        (1, 4096, 64 << 20),
        (2048, 4096, 256 << 20),
        (65536, 64, 256 << 20),
    ],
)
def test_scratch_is_bounded_whatever_the_context(rows, columns, limit, device):
    """Work is short, tensors are as wide as captured ones: what counts is what the allocator gave."""
    inputs = make_inputs(Shape(1, (600,), columns=columns), device=device)
    many = Inputs(
        q=inputs.q.expand(rows, -1, -1, -1).contiguous(),
        k_pages=inputs.k_pages,
        weights=inputs.weights.expand(rows, -1).contiguous(),
        lengths=inputs.lengths.expand(rows).contiguous(),
        page_table=inputs.page_table.expand(rows, -1),
    )
    out = torch.empty((rows, 512), dtype=torch.int32, device=device)
    for hint in (1, 4):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        index_select(**many.arguments(), rows_per_request=hint, out=out)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before <= limit
        assert torch.equal(out, index_select(**inputs.arguments()).expand(rows, -1))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("fp4", [False, True])
@pytest.mark.parametrize(("ranks", "rows"), [(2, 1024), (2, 515), (4, 1030), (8, 257)])
def test_rows_dealt_to_ranks_have_the_bits_of_the_whole_call(ranks, rows, fp4, wide, device):
    """All ranks on this card, one after the other, each with pages of its own: its own rows first, then what it makes
    of all of them. wide: a table of 65,536 entries a row and more, whose lists are of 32 bits."""
    lengths = tuple(300 + 4700 * row // rows for row in range(rows))
    columns = 1024 if wide else None
    base = make_inputs(Shape(rows, lengths, fp4, rows_per_request=64, columns=columns), device=device)
    inputs = [_in_other_pages(base, rank) for rank in range(ranks)]
    wholes = [select(one, rows_per_request=adapter.SHARED_PAGES)[:2] for one in inputs]
    assert not torch.equal(wholes[0][0], wholes[1][0]) and torch.equal(wholes[0][1], wholes[1][1])
    parts: list[torch.Tensor] = []

    def run(rank, gather):
        one = inputs[rank]
        deferred = adapter.Deferred(one.q, one.q_scales, one.k_pages, one.weights, 4, None, ())
        coordinator = SimpleNamespace(world_size=ranks, rank_in_group=rank, all_gather_into_tensor=gather)
        select_rows = functools.partial(adapter._select, deferred, one.lengths[:, None], one.page_table)
        out, entries = torch.full_like(wholes[rank][0], -7), torch.full_like(wholes[rank][0], -7)
        index_select_dealt.deal(coordinator, select_rows, one.page_table, len(one.k_pages), out, entries)
        return out, entries

    for rank in range(ranks):
        run(rank, lambda output, input: (parts.append(input.clone()), output.zero_()))
    assert parts[0].shape == (-(-rows // ranks), 512 * (4 if wide else 2))
    for rank, (slots, chosen) in enumerate(wholes):
        out, entries = run(rank, lambda output, input: output.copy_(torch.cat(parts)))
        assert torch.equal(out, slots) and torch.equal(entries, chosen)


def _in_other_pages(inputs: Inputs, rank: int) -> Inputs:
    """The same keys where another rank has them."""
    count, device = len(inputs.k_pages), inputs.k_pages.device
    moved = torch.randperm(count, generator=torch.Generator().manual_seed(rank)).to(device)
    table = inputs.page_table.long()
    table = torch.where(table < count, moved[table.clamp_max(count - 1)], table).to(torch.int32)
    return dataclasses.replace(inputs, k_pages=inputs.k_pages[moved.argsort()], page_table=table)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
@pytest.mark.parametrize(("ranks", "rows", "k", "columns"), [(1, 3, 1, 1), (2, 7, 512, 1023), (8, 3, 1024, 90)])
def test_slots_of_dealt_entries(ranks, rows, k, columns, dtype, device):
    """None, entries outside of the table and pages outside of the pool are -1; nothing beside the lists is written."""
    generator = torch.Generator().manual_seed(k)
    width, each = 64 * columns, -(-rows // ranks)
    dealt = torch.randint(-1, width + 64, (ranks, each, k), generator=generator)
    dealt[:, :, -1] = -1
    tables = torch.randint(-2, 50, (rows, columns + 3), generator=generator, dtype=torch.int32)
    tables[:, columns:] = 7  # not this call's
    dealt, table = dealt.to(dtype).to(device), tables.to(device)[:, :columns]
    memory = torch.full((2, rows, k + 5), -9, dtype=torch.int32, device=device)
    out, entries = memory[0, :, :k], memory[1, :, :k]
    assert op.dealt_slots(dealt, table, num_pages=41, out=out, entries=entries) is out
    slots, found = reference.dealt_slots(dealt, table, num_pages=41)
    assert torch.equal(out, slots) and torch.equal(entries, found) and (k == 1 or found.ge(0).any())
    assert memory[:, :, k:].eq(-9).all()
    assert torch.equal(op.dealt_slots(dealt, table, num_pages=41), slots)


def test_slots_of_dealt_entries_in_a_graph_and_of_many_rows(device):
    rows, k = 70_001, 8
    table = torch.arange(rows, dtype=torch.int32, device=device)[:, None]
    dealt = torch.zeros((2, 35_001, k), dtype=torch.int16, device=device)
    out = torch.empty((rows, k), dtype=torch.int32, device=device)
    op.dealt_slots(dealt, table, num_pages=rows, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.dealt_slots(dealt, table, num_pages=rows, out=out)
    for value in (0, 63):
        dealt.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, (64 * table + value).expand(-1, k))
