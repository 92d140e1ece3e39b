"""What is in one row changes no bit of another: every operator's kernels as compiled for SM120, a batch beside the same
batch in which every second row is what no row should be.

First the odd rows are spoilt and the even ones compared, then the other way round, so that every place is a spoilt one
and one beside it. A spoilt row has NaN, infinity, the greatest number, the least and zeros, in turn; ids of no expert;
lengths below and beyond all; pages and slots of garbage; keys that only it names, spoilt too.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import pytest
import torch

from deepseek_v4_sm120.ops import all_reduce as all_reduce_op
from deepseek_v4_sm120.ops import (
    bf16_linear,
    fp8_linear,
    index_select,
    mhc,
    mxfp4_moe,
    router_topk,
    sparse_decode,
    wo_a,
)
from deepseek_v4_sm120.ops import compressor as compressor_op
from deepseek_v4_sm120.ops import fp8_linear_draft_input as draft_op
from deepseek_v4_sm120.reference import compressor as compressor_reference
from deepseek_v4_sm120.reference import kv_pages
from deepseek_v4_sm120.reference.sparse_decode import valid_candidates
from deepseek_v4_sm120.specs import all_reduce as all_reduce_spec
from deepseek_v4_sm120.specs import compressor as compressor_spec
from deepseek_v4_sm120.specs import fp8_linear as fp8_spec
from deepseek_v4_sm120.specs import index_select as index_spec
from deepseek_v4_sm120.specs import mhc as mhc_spec
from deepseek_v4_sm120.specs import mxfp4_moe as moe_spec
from deepseek_v4_sm120.specs import sparse_decode as sparse_spec
from deepseek_v4_sm120.specs import wo_a as wo_a_spec
from tests.emulator.emulated import emulated, generator, group, on_cards, ran

BORDERS = (2, 8, 9, 16, 17, 32, 33)  # rows on both sides of where the launchers take another kernel
NO_ID = (-1, 2**31 - 1, -(2**31), 5000, 0)
LENGTHS = (0, 2**31 - 1, -1, 1, -(2**31))


def spoil(tensor: torch.Tensor, spoilt: torch.Tensor, values=None) -> torch.Tensor:
    """A copy of [rows, ..] whose rows `spoilt` hold one of `values` each, by default what a float can be at worst."""
    if values is None:
        numbers = torch.finfo(tensor.dtype)
        least = torch.finfo(torch.bfloat16 if tensor.dtype == torch.bfloat16 else torch.float32).smallest_normal / 2
        values = (math.nan, math.inf, numbers.max, least, -math.inf, 0.0)
    found = tensor.clone()
    for number, row in enumerate(spoilt.nonzero()[:, 0].tolist()):
        found[row] = values[(number + row) % len(values)]
    return found


def apart(call: Callable, rows: int, batch: Callable, *, requests: torch.Tensor | None = None, **choices) -> None:
    """call(batch(spoilt)) -> a tensor, or several, [rows, ..]: those that are not spoilt are as in the clean batch.
    requests: of each row; by default every row is one's own."""
    parity = (torch.arange(rows) if requests is None else requests) % 2 == 1
    found = []
    for spoilt in (torch.zeros(rows, dtype=torch.bool), parity, ~parity):
        with emulated(**{"seed": 1, "most_instructions": 400, "multiprocessors": 4} | choices):
            results = call(**batch(spoilt))
        results = results if isinstance(results, tuple | list) else (results,)
        found.append((spoilt, [one.contiguous().view(torch.uint8).reshape(rows, -1) for one in results]))
    _, clean = found[0]
    for spoilt, results in found[1:]:
        changed = False
        for one, other in zip(results, clean, strict=True):
            differs = (one != other).any(1)
            assert not differs[~spoilt].any(), f"rows {(differs & ~spoilt).nonzero()[:, 0].tolist()} of {rows}"
            changed |= bool(differs[spoilt].any())
        assert changed or not spoilt.any(), "what is spoilt is not read"


@pytest.mark.parametrize("rows", BORDERS)
@pytest.mark.parametrize("outputs", [36, 64])
def test_bf16_linear(rows, outputs):
    x, weight = (torch.randn(n, 512, generator=generator(n)).bfloat16() for n in (rows, outputs))

    def call(x, **tuning):
        out = torch.empty(rows, outputs)
        bf16_linear._launch(x, weight, out, **tuning)
        return out

    for choices, tuning in (
        ({}, {}),
        ({"multiprocessors": 200}, {"warps": 8}),
        ({"multiprocessors": 16}, {"warps": 16}),
    ):
        apart(functools.partial(call, **tuning), rows, lambda spoilt: {"x": spoil(x, spoilt)}, **choices)


WARPS = [{"warp_rows": 4}, {"warp_rows": 8}]
TILES = [{"row_tiles": r, "warp_rows": w, "in_turn": t} for r, w, t in ((1, 4, 1), (2, 4, 1), (2, 8, 2))]
UNITS = [{"in_turn": 8, "row_tiles": 1}, {"in_turn": 1, "row_tiles": 2}]


@pytest.mark.parametrize(
    "rows, tunings",
    [(2, WARPS), (8, WARPS), (9, TILES[:2]), (17, TILES), (64, TILES), (65, UNITS[:1]), (130, UNITS[1:])],
)
def test_fp8_linear(rows, tunings):
    weight, scale = fp8_spec.make_weight(1, 256, 2048, generator(rows))
    x = fp8_spec.make_x(rows, 1, 2048, generator(rows))

    def call(x, **tuning):
        out = torch.empty(rows, 1, 256, dtype=torch.bfloat16)
        fp8_linear._run(x, weight, scale, out, **tuning)
        return out

    for tuning in ({}, *tunings)[rows > 64 :]:
        apart(functools.partial(call, **tuning), rows, lambda spoilt: {"x": spoil(x, spoilt)})


@pytest.mark.parametrize("rows", [2, 12])
def test_fp8_linear_unmerged(rows):
    weight, scale = fp8_spec.make_weight(1, 256, 2048, generator(rows))
    x = fp8_spec.make_x(rows, 1, 2048, generator(rows))[:, 0]

    def call(x):
        partial = fp8_linear.fp8_linear_unmerged(x, weight[0], scale[0])
        return partial.transpose(0, 1), fp8_linear.merge(partial)

    apart(call, rows, lambda spoilt: {"x": spoil(x, spoilt)}, multiprocessors=8)


def test_row_argmax():
    x = torch.randn(5, 8200, generator=generator(1))
    apart(router_topk.row_argmax, 5, lambda spoilt: {"x": spoil(x, spoilt)})


def test_latent_norm():
    x, weight = torch.randn(5, 1024, generator=generator(1)).bfloat16(), torch.ones(1024).bfloat16()
    apart(lambda x: fp8_linear.latent_norm(x, weight, 1e-6), 5, lambda spoilt: {"x": spoil(x, spoilt)})


@pytest.mark.parametrize("rows", [2, 5])
def test_draft_input(rows):
    (hidden, table, *halves), by = fp8_spec.make_draft_input(rows, 256, 2048, generator(rows), entries=50)

    def batch(spoilt):
        return {"hidden": spoil(hidden, spoilt), "ids": spoil(by["ids"], spoilt, (-1, 50))}

    apart(lambda hidden, ids: draft_op.draft_input(hidden, table, *halves, ids=ids), rows, batch, multiprocessors=8)


@pytest.mark.parametrize("rows", [2, 9, 65])
def test_wo_a_with_its_rotation(rows):
    x, weight, scale, freqs, positions = wo_a_spec.make_wo_a(
        rows, 2, generator(rows), outputs=128, inputs=1024, table=64
    )

    def batch(spoilt):
        return {"x": spoil(x, spoilt), "positions": spoil(positions, spoilt, (0, 63))}

    apart(lambda x, positions: wo_a.wo_a(x, weight, scale, freqs_cis=freqs, positions=positions), rows, batch)


@pytest.mark.parametrize("experts", [8, 256, 384])
def test_router_topk(experts):
    logits, bias = torch.randn(9, experts, generator=generator(1)), torch.randn(experts, generator=generator(2)) * 0.1
    apart(lambda x: router_topk.router_topk(x, bias, 6), 9, lambda spoilt: {"x": spoil(logits, spoilt)})


@pytest.mark.parametrize("rows, kernels", [(2, "fused"), (9, "fused"), (17, "split"), (33, "many")])
def test_mhc(rows, kernels):
    inputs = mhc_spec.make_inputs(mhc_spec.Shape(rows), seed=rows, device="cpu")
    given, head = inputs.boundary(), inputs.head()
    of_rows = ("f", "streams", "post", "comb")

    def batch(spoilt):
        return {name: spoil(given[name], spoilt) for name in of_rows}

    apart(lambda **spoilt: mhc.mhc(**given | spoilt, kernels=kernels), rows, batch, multiprocessors=40)
    if kernels != "many":
        apart(lambda **spoilt: mhc.mhc_head(**head | spoilt, kernels=kernels), rows, batch, multiprocessors=40)
    assert ran({"split": "finish_kernel"}.get(kernels, f"{kernels}_kernel"))


@pytest.mark.parametrize("rows, form", [(2, "routed"), (9, "unmerged")])
def test_mhc_that_makes_the_last_addition(rows, form):
    inputs = mhc_spec.make_inputs(mhc_spec.Shape(rows), seed=rows, device="cpu")
    ((f, left),), _ = mhc_spec.leave_additions(form, [inputs.f], rows)

    def batch(spoilt):
        if form == "routed":
            return {"f": f, "routed": spoil(left["routed"], spoilt)}
        return {"f": spoil(f.transpose(0, 1), spoilt).transpose(0, 1).contiguous()}

    given = inputs.boundary() | {name: value for name, value in left.items() if name != "routed"}
    apart(lambda **spoilt: mhc.mhc(**given | spoilt), rows, batch, multiprocessors=40)
    assert ran("adding_kernel")


# ---- experts


def moe_batch(given: dict) -> Callable:
    """Spoilt rows go to the experts of the others; half of them name none beside."""

    def batch(spoilt):
        ids = given["topk_ids"].clone()
        for number, row in enumerate(spoilt.nonzero()[:, 0].tolist()):
            ids[row, 0] = NO_ID[number % len(NO_ID)]
            if number % 4 == 3:
                ids[row] = ids[row, 1]
        return {
            "hidden": spoil(given["hidden"], spoilt),
            "topk_ids": ids,
            "topk_weights": spoil(given["topk_weights"], spoilt),
        }

    return batch


@pytest.mark.parametrize("rows, hidden, reproducible", [(2, 4096, False), (9, 4096, True), (5, 7168, False)])
def test_mxfp4_moe_of_few_rows(rows, hidden, reproducible):
    """Groups of four pairs of an expert, and of as many as there are."""
    shape = moe_spec.Shape(rows, hidden, inter=256, experts=3, topk=2)
    given = moe_spec.make_inputs(shape, seed=rows, device="cpu").arguments()
    call = functools.partial(mxfp4_moe.mxfp4_moe, reproducible=reproducible)
    apart(lambda **spoilt: call(**given | spoilt), rows, moe_batch(given))


@pytest.mark.parametrize("way", ["exact", "wide", "scaled"])
def test_mxfp4_moe_of_many_rows(way, monkeypatch):
    monkeypatch.setattr(mxfp4_moe, "DECODE_ROWS", 0)
    rows = 5 if way == "exact" else 70
    sizes = {"hidden": 4096, "inter": 256} if way == "exact" else {"hidden": 512, "inter": 256}
    given = moe_spec.make_inputs(moe_spec.Shape(rows, **sizes, experts=3, topk=2), seed=4, device="cpu").arguments()
    options = {"exact": {"reproducible": True}, "wide": {}, "scaled": {"activations": "mxfp8"}}[way]
    apart(lambda **spoilt: mxfp4_moe.mxfp4_moe(**given | spoilt, **options), rows, moe_batch(given))


def test_add_shared():
    shared, routed = (torch.randn(5, 256, generator=generator(n)).bfloat16() for n in (1, 2))
    apart(lambda x: mxfp4_moe.add_shared(shared.clone(), x, scaling=1.5), 5, lambda s: {"x": spoil(routed, s)})


# ---- attention


EXTRAS = {
    "window": None,
    "C4": sparse_spec.CacheShape(64, 96, lengths=(96, 50, 33)),
    "C128": sparse_spec.CacheShape(2, 160, lengths=(130, 64, 159), ascending=True),
    "C128 by table": sparse_spec.CacheShape(2, 160, lengths=(130, 64, 159), tables=3),
}
KERNELS = {
    "sparse_decode_kernel": {"prefill": False, "pairs": False},
    "pairs_kernel": {"prefill": False, "pairs": True},
    "wide_kernel": {"prefill": False, "pairs": True},
    "stacked_kernel": {"prefill": True},
    "sparse_prefill_kernel": {"prefill": True},
}


def spoil_keys(pages, indices, lengths, spoilt):
    """A copy of a pool of [pages, ..]: what valid candidates of spoilt rows alone name is NaN, infinite or the
    greatest there is, byte by byte."""
    page_size, strides = pages.shape[1], pages.stride()
    slots = pages.shape[0] * page_size
    valid = valid_candidates(indices, slots, lengths)
    own = indices[:, 0][valid & spoilt[:, None]].unique()
    others = indices[:, 0][valid & ~spoilt[:, None]].unique()
    own = own[~torch.isin(own, others)]
    size = (pages.shape[0] - 1) * strides[0] + page_size * 584
    storage = pages.as_strided((size,), (1,)).clone()
    found = storage.as_strided(pages.shape, strides)
    for number, slot in enumerate(own.tolist()):
        page, entry = divmod(slot, page_size)
        data = storage[page * strides[0] + entry * 576 :][:576]
        scales = storage[page * strides[0] + page_size * 576 + entry * 8 :][:7]
        kind = number % 4
        if kind == 0:
            data[:], scales[:] = 0x7F, 0xFF
        elif kind == 1:
            data[448:].view(torch.bfloat16)[:] = math.inf
        elif kind == 2:
            data[:448], scales[:] = 0x7E, 254
        else:
            scales[number % 7] = 255
    return found


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize(
    "kernel, heads, rows",
    [
        *(("sparse_decode_kernel", 16, 5), ("pairs_kernel", 16, 5), ("wide_kernel", 24, 3)),
        *(("stacked_kernel", 8, 9), ("stacked_kernel", 24, 3), ("sparse_prefill_kernel", 64, 3)),
    ],
)
def test_sparse_decode(kernel, heads, rows, extra):
    shape = sparse_spec.Shape(rows, heads, dataclasses.replace(sparse_spec.WINDOW, lengths=(128, 77, 5)), EXTRAS[extra])
    inputs = sparse_spec.make_inputs(shape, seed=heads, device="cpu")
    by_table = inputs.page_table is not None
    given = inputs.table_arguments() if by_table else inputs.arguments()

    def batch(spoilt):
        found = {"q": spoil(given["q"], spoilt)}
        caches = [("kv_pages", "indices", "topk_length")]
        caches += [("extra_kv_pages", "extra_indices", "extra_topk_length")] if EXTRAS[extra] else []
        for pages, indices, lengths in caches:
            listed = getattr(inputs, indices)
            found[pages] = spoil_keys(given[pages], listed, given[lengths], spoilt)
            found[lengths] = given[lengths].clone()
            if not (by_table and pages != "kv_pages"):
                found[indices] = listed.clone()
            for number, row in enumerate(spoilt.nonzero()[:, 0].tolist()):
                if number % 3 == 1:
                    found[lengths][row] = LENGTHS[row % len(LENGTHS)]
                if number % 3 == 2 and indices in found:
                    every_other = found[indices][row, 0, ::2]
                    every_other.copy_(torch.tensor(NO_ID).repeat(99)[: len(every_other)])
        if by_table:
            found["extra_page_table_rows"] = given["extra_page_table_rows"].clone()
            found["extra_page_table_rows"][spoilt.nonzero()[::3, 0]] = -7
        return found

    def call(**spoilt):
        out, lse = sparse_decode.sparse_decode(**given | spoilt, **KERNELS[kernel], return_lse=True)
        return out, lse

    # where there is a second cache, rows for few heads are of several blocks
    apart(call, rows, batch, multiprocessors=32 if kernel == "sparse_decode_kernel" and EXTRAS[extra] else 2)
    assert ran("pairs_kernel" if by_table and kernel == "wide_kernel" else kernel)


def test_sparse_decode_of_neighbouring_tokens():
    """A request's windows, whose tiles are one: keys of later rows lie in the tiles of earlier ones."""
    rows, heads = 16, 8
    inputs = sparse_spec.make_inputs(sparse_spec.Shape(rows, heads), seed=3, device="cpu")
    given = inputs.arguments()
    last = torch.arange(rows) + 300
    given["indices"] = (last[:, None] - torch.arange(128)).int()[:, None]
    given["kv_pages"] = kv_pages.new_pages(3, 256, fill=0xFF)
    live = given["indices"].unique().long()
    kv_pages.write_rows(given["kv_pages"], live, sparse_spec.rms_rows(len(live), generator(4)))
    spoilt = torch.arange(rows) >= 5
    pages = spoil_keys(given["kv_pages"], given["indices"], given["topk_length"], spoilt)
    found = []
    for of_keys in (given["kv_pages"], pages):
        with emulated(seed=1, most_instructions=400):
            found.append(sparse_decode.sparse_decode(**given | {"kv_pages": of_keys}, prefill=True))
        assert ran("stacked_kernel")
    clean, other = found
    assert torch.equal(other[~spoilt], clean[~spoilt]) and bool(other[spoilt].isnan().any())


@pytest.mark.parametrize("fp4", [False, True])
@pytest.mark.parametrize("per_request", [1, 4])
def test_index_select(per_request, fp4):
    """A spoilt row's queries, weights, length and table; its request's keys where it is the only one of it."""
    rows = 9
    shape = index_spec.Shape(rows, (700, 300, 1500, 40, 3000), fp4, per_request, columns=64)
    inputs = index_spec.make_inputs(shape, seed=3, device="cpu")
    given = inputs.arguments()

    def batch(spoilt):
        found = {"weights": spoil(given["weights"], spoilt), "lengths": spoil(given["lengths"], spoilt, LENGTHS)}
        found["page_table"] = given["page_table"].clone()
        found["page_table"][:, -1] = 0  # behind every length: a page of another
        found["page_table"][spoilt.nonzero()[::2, 0]] = torch.tensor(NO_ID, dtype=torch.int32).repeat(20)[:64]
        found["q"] = given["q"].clone()
        found["q"].view(torch.uint8)[spoilt] = 0x7F
        if per_request == 1:
            storage = given["k_pages"].flatten(1).clone()
            for row in spoilt.nonzero()[:, 0].tolist():
                pages = given["page_table"][row]
                storage[pages[pages < len(storage)].long()] = 0x7F
            found["k_pages"] = storage.view(given["k_pages"].shape)
        return found

    def call(**spoilt):
        entries, logits = torch.empty((rows, 512), dtype=torch.int32), torch.empty((rows, 512))
        slots = index_select.index_select(
            **given | spoilt, rows_per_request=per_request, entries=entries, logits=logits
        )
        return slots, entries, logits

    apart(call, rows, batch, multiprocessors=12 * per_request)


def test_topk_select_and_dealt_slots():
    scores, lengths = (
        torch.randn(7, 3000, generator=generator(1)),
        torch.tensor([3000, 700, 20, 2999, 1, 600, 513]).int(),
    )

    def batch(spoilt):
        return {"scores": spoil(scores, spoilt), "lengths": spoil(lengths, spoilt, LENGTHS)}

    apart(lambda scores, lengths: index_select.topk_select(scores, lengths), 7, batch)
    table = torch.randint(0, 90, (7, 20), generator=generator(2), dtype=torch.int32)
    dealt = torch.randint(-1, 1280, (2, 4, 512), generator=generator(3), dtype=torch.int32)

    def of_rows(spoilt):
        lists = dealt.clone()
        for row in spoilt.nonzero()[:, 0].tolist():
            lists[row % 2, row // 2] = NO_ID[row % len(NO_ID)]
        return {"dealt": lists, "page_table": spoil(table, spoilt, NO_ID)}

    apart(lambda dealt, page_table: index_select.dealt_slots(dealt, page_table, num_pages=90), 7, of_rows)


# ---- compressors


def compress(made, pages) -> tuple[torch.Tensor, torch.Tensor]:
    """(each row's pages of state [rows, ..], the entry at its place in the cache [rows, ..]) behind the call. What is
    nobody's stays as it was."""
    before, cache = made.state.clone(), made.cache.clone()
    compressor_op.compressor(**made.arguments())
    kept = torch.ones(len(before), dtype=torch.bool)
    kept[pages.clamp_min(0).unique()] = False
    assert torch.equal(made.state[kept].view(torch.int32), before[kept].view(torch.int32))
    head_dim, slots = made.norm_weight.shape[0], made.out_loc.clamp(0, cache.shape[0] * made.page_size - 1)
    entries = compressor_reference.read(made.cache, made.page_size, slots, head_dim, made.fp4)
    written = torch.where(pages[:, None, None] < 0, 0.0, made.state[pages.clamp_min(0)])
    return written, torch.where(slots[:, None] > 0, entries, 0.0)


def spoil_plan(made, line: int, number: int) -> None:
    """A row's line points outside, in one of many ways; or nowhere."""
    words = made.plan.view(torch.int32)
    if number % 4 == 1:
        words[line, 1:] = torch.tensor(NO_ID[1:4], dtype=torch.int32)
    elif number % 4 == 2:
        words[line], made.out_loc[line] = -1, -1
    elif number % 4 == 3:
        words[line, 0], made.out_loc[line] = 0, 2**40


@pytest.mark.parametrize("kind", compressor_spec.KINDS)
def test_compressor(kind):
    """Spoilt rows: projections, plans and places of the cache; NaN in their state, as whoever had it may have left."""
    ratio = compressor_spec.KINDS[kind].ratio
    rows = 13 if ratio == 4 else 7
    lengths = [ratio * (1 + row % 3) - (row % 5 == 4) for row in range(rows)]
    made = compressor_spec.make_inputs(kind, lengths, seed=2, device="cpu")
    pages = made.plan.view(torch.int32)[:, 3].long()

    def batch(spoilt):
        own = made.copy()
        own.plan, own.out_loc = own.plan.clone(), own.out_loc.clone()
        own.kv_score = spoil(made.kv_score, spoilt)
        for number, row in enumerate(spoilt.nonzero()[:, 0].tolist()):
            own.state[pages[row]] = math.nan
            spoil_plan(own, row, number)
        return {"own": own}

    apart(lambda own: compress(own, pages), rows, batch)


@pytest.mark.parametrize("kind", compressor_spec.KINDS)
@pytest.mark.parametrize("tokens", [3, 5])
def test_compressor_of_many_tokens(kind, tokens):
    """Of a verification or a short prompt: a spoilt request has its rows, its state, and its lines of both plans."""
    ratio = compressor_spec.KINDS[kind].ratio
    requests = [compressor_spec.Request(ratio * (i % 3) + ratio - 2, tokens) for i in range(6)]
    made = compressor_spec.make_step(kind, requests, padding=2, seed=tokens, device="cpu")
    rows = 6 * tokens + 2
    of = torch.cat([torch.arange(6).repeat_interleave(tokens), torch.tensor([1, 1])])
    writes, entries = made.writes.view(torch.int32), made.plan.view(torch.int32)
    pages = torch.full((rows,), -1)
    written = writes[writes[:, 0] >= 0].long()
    pages[written[:, 0]] = written[:, 1] // ratio

    def batch(spoilt):
        own = made.copy()
        own.plan, own.writes, own.out_loc = made.plan.clone(), made.writes.clone(), made.out_loc.clone()
        own.kv_score = spoil(made.kv_score, spoilt)
        lines = (writes[:, 0] >= 0) & spoilt[writes[:, 0]]
        own.state[(writes[lines, 1] // ratio).unique().long()] = math.nan
        own.writes.view(torch.int32)[lines.nonzero()[::3, 0]] = torch.tensor([2**31 - 1, -7], dtype=torch.int32)
        own.writes.view(torch.int32)[lines.nonzero()[1::3, 0], 1] = -(2**31)
        for number, line in enumerate(range(len(entries))):
            if entries[line, 0] > 0 and spoilt[int(entries[line, 1]) & 0xFFFF]:
                own.plan.view(torch.int32)[line, 2:] = NO_ID[number % 4]
        return {"own": own}

    apart(lambda own: compress(own, pages), rows, batch, requests=of)


def test_clear_drafts():
    made = compressor_spec.make_drafts(6, 4, 2, ring=128, seed=1, device="cpu")

    def batch(spoilt):
        requests, accepted = spoil(made.requests, spoilt, (-1, 2**40, 2**62)), made.accepted.clone()
        accepted[spoilt] = -(2**31)
        return {"requests": requests, "accepted": accepted, "lengths": spoil(made.lengths, spoilt, (0, 2**62))}

    def call(**spoilt):
        own = made.copy()
        compressor_op.clear_drafts(**own.arguments() | spoilt)
        rings = [(made.requests[:, None] * 128 + torch.arange(128)) for _ in own.states]
        return [state[ring].view(torch.int32) for state, ring in zip(own.states, rings, strict=True)]

    apart(call, 6, batch)


# ---- between cards


@pytest.mark.parametrize("transport", all_reduce_op.TRANSPORTS)
@pytest.mark.parametrize("rows", [2, 7, 33])
def test_sums_between_cards(transport, rows):
    """What is in a row of one card's term; numbers that an empty place holds too, among them."""
    ranks = 2
    terms = all_reduce_spec.make_terms(ranks, rows, 1, hidden=512)
    sent = all_reduce_spec.make_logits(ranks, rows, 1, columns=264)
    empty = [torch.tensor(word, dtype=torch.int16).view(torch.bfloat16).item() for word in (-1, 0x7FFF)]

    def call(found, logits):
        cards = group(ranks, transport=transport, hidden=512, max_rows=64)
        results = []
        for algorithm in all_reduce_op.ALGORITHMS:
            results += on_cards(functools.partial(all_reduce_op.all_reduce, algorithm=algorithm), found, cards)
        results += on_cards(all_reduce_op.all_gather, logits, cards)
        results = [one.clone() for one in results]
        for one in cards:
            one.close()
        return results

    def batch(spoilt):
        words = spoil(terms[1].view(torch.int16), spoilt, (-1, 0x7FFF, 0x7F80, -0x80, 0x7F7F)).view(torch.bfloat16)
        return {"found": [terms[0], words], "logits": [sent[0], spoil(sent[1], spoilt)]}

    assert all(map(math.isnan, empty))
    apart(call, rows, batch)


@pytest.mark.parametrize("term", ["whole", "routed", "unmerged"])
def test_mhc_behind_a_sum(term):
    """Of two cards, whose terms may lack their last addition; what is spoilt is in the second card's."""
    rows, ranks = 2, 2
    inputs = mhc_spec.make_inputs(mhc_spec.Shape(rows), seed=2, device="cpu")
    given, terms = inputs.boundary(), mhc_spec.make_terms(inputs, ranks, 2)
    if term == "unmerged":
        terms = [torch.stack([one] * mhc.TERM_SPLITS).float() * 1.37 for one in terms]
    left = {"routed": terms[0], "scaling": 1.5} if term == "routed" else {}

    def call(found):
        cards = group(ranks, transport="peer", hidden=4096, max_rows=8)
        both = on_cards(lambda f, one: mhc.mhc(**given | {"f": f}, sum_over=one, kernels="fused", **left), found, cards)
        results = [one.clone() for of_card in both for one in of_card]
        for one in cards:
            one.close()
        return results

    def batch(spoilt):
        by_rows = terms[1].transpose(0, -2)
        return {"found": [terms[0], spoil(by_rows, spoilt).transpose(0, -2).contiguous()]}

    apart(call, rows, batch, multiprocessors=80)  # blocks wait for other cards
    assert ran("summing_kernel")


LEAKS = {
    "a scale of all rows": lambda x: x / x.abs().amax(),
    "a weight of zero": lambda x: x + 0 * x.sum(0),
    "a way that one row chooses for all": lambda x: (
        x * 3 if bool(x.isfinite().all()) else (x.double() * 3.0001).float()
    ),
    "one place that is another's": lambda x: x.index_copy(0, torch.tensor([0]), x[-1:]),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_what_leaks_is_noticed(leak):
    x = torch.randn(6, 8, generator=generator(1))
    with pytest.raises(AssertionError, match="of 6"):
        apart(lambda x: LEAKS[leak](x), 6, lambda spoilt: {"x": spoil(x, spoilt)})
