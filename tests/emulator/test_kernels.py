"""Every operator's kernels as they are compiled for SM120, run on the emulator against the operators' references.

Small shapes, schedules of blocks and warps by several seeds. What is looked for is what a card of another architecture
cannot show: code that only SM120 has, orders that a card does not happen to take, four and eight cards.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch

from deepseek_v4_sm120.ops import all_reduce as all_reduce_op
from deepseek_v4_sm120.ops import bf16_linear, fp8_linear, mhc, mxfp4_moe, router_topk, sparse_decode, wo_a
from deepseek_v4_sm120.ops import fp8_linear_draft_input as draft_op
from deepseek_v4_sm120.reference import all_reduce as all_reduce_reference
from deepseek_v4_sm120.reference import fp8_linear as fp8_reference
from deepseek_v4_sm120.reference import mxfp4_moe as moe_reference
from deepseek_v4_sm120.reference import router_topk as router_reference
from deepseek_v4_sm120.reference import sparse_decode as sparse_reference
from deepseek_v4_sm120.reference import wo_a as wo_a_reference
from deepseek_v4_sm120.reference.accuracy import strict_error
from deepseek_v4_sm120.specs import all_reduce, bounds, compressor, index_select
from deepseek_v4_sm120.specs import fp8_linear as fp8_spec
from deepseek_v4_sm120.specs import mhc as mhc_spec
from deepseek_v4_sm120.specs import mxfp4_moe as moe_spec
from deepseek_v4_sm120.specs import sparse_decode as sparse_spec
from deepseek_v4_sm120.specs import wo_a as wo_a_spec
from tests.emulator import emulated as emulator
from tests.emulator.emulated import emulated, generator, group, on_cards, ran

SEEDS = (1, 2)
# schedules: turns of a few instructions, and long ones; cards of few multiprocessors, so that blocks wait for a place
CHOICES = {
    "short turns": {"most_instructions": 12, "multiprocessors": 3},
    "long turns": {"most_instructions": 800, "multiprocessors": 8},
}
schedules = pytest.mark.parametrize(
    "choices", [{"seed": seed, **one} for one, seed in zip(CHOICES.values(), SEEDS, strict=True)], ids=list(CHOICES)
)


def same(one, other) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@schedules
@pytest.mark.parametrize("rows, outputs", [(1, 64), (9, 36), (33, 64), (70, 200)])
def test_bf16_linear(choices, rows, outputs):
    x, weight = (torch.randn(n, 512, generator=generator(n)).bfloat16() for n in (rows, outputs))
    with emulated(**choices):
        found = bf16_linear.bf16_linear(x, weight)
        alone = bf16_linear.bf16_linear(x[-1:], weight)
        for warps in (8, 16):
            bf16_linear._launch(x, weight, other := torch.full_like(found, torch.nan), warps=warps)
            assert same(other, found)
    assert strict_error(found, x.double() @ weight.double().T) < 1e-6
    assert same(found[-1:], alone) and ran("bf16_linear")


@schedules
@pytest.mark.parametrize("ranks, transport", [(2, "peer"), (2, "host"), (4, "peer")])
def test_a_product_dealt_to_cards_is_the_whole_to_the_bit(choices, ranks, transport):
    """Each multiplies its outputs, behind it the gather of a group beside that of the sums, which come in between."""

    def step(dealt, sums, x, own, term):
        return all_reduce_op.all_gather(bf16_linear.bf16_linear(x, own), dealt), sums(term)

    with emulated(**choices):
        dealt, sums = group(ranks, max_rows=1, hidden=512, transport=transport), group(ranks, max_rows=16, hidden=512)
        for turn, rows in enumerate((1, 9, 1, 33)):
            x, weight = (torch.randn(n, 512, generator=generator(n + turn)).bfloat16() for n in (rows, 64))
            terms = [term.clone() for term in x[:8].expand(ranks, -1, -1)]
            whole = bf16_linear.bf16_linear(x, weight)
            for gathered, _ in on_cards(step, dealt, sums, [x] * ranks, weight.chunk(ranks), terms):
                assert same(gathered, whole), (turn, rows)
        for one in (*dealt, *sums):
            one.close()
    assert ran("bf16_linear") and ran("all_reduce")


@schedules
@pytest.mark.parametrize("rows", [1, 5])
def test_router_topk(choices, rows):
    """Logits that a kernel in front may still be writing; what SGLang's own kernel gives is in test_router_topk.py."""
    x, weight = (torch.randn(n, 512, generator=generator(n)).bfloat16() for n in (rows, 256))
    bias = torch.randn(256, generator=generator(7)) * 0.1
    with emulated(**choices):
        logits = bf16_linear.bf16_linear(x, weight)
        weights, ids = router_topk.router_topk(logits, bias, 6)
        again = router_topk.router_topk(logits[-1:], bias, 6)
    expected = router_reference.router_topk(logits, bias, 6)
    assert torch.equal(ids.long(), expected[1]) and strict_error(weights, expected[0]) < bounds.ROUTER_TOPK.truth
    assert same(weights[-1:], again[0]) and same(ids[-1:], again[1]) and ran("router_topk")


@schedules
@pytest.mark.parametrize("rows, ue8m0", [(1, False), (6, True), (40, False), (70, True)])
def test_fp8_linear(choices, rows, ue8m0):
    weight, scale = fp8_spec.make_weight(1, 256, 512, generator(rows), ue8m0=ue8m0)
    x = fp8_spec.make_x(rows, 1, 512, generator(rows))
    with emulated(**choices):
        found = fp8_linear.fp8_linear(x[:, 0], weight[0], scale[0])
        alone = fp8_linear.fp8_linear(x[:1, 0], weight[0], scale[0])
    assert strict_error(found, fp8_reference.fp8_linear(x[:, 0], weight[0], scale[0])) < bounds.FP8_LINEAR.truth
    assert same(found[:1], alone)


@schedules
@pytest.mark.parametrize("rows", [2, 12])
def test_fp8_linear_unmerged(choices, rows):
    weight, scale = fp8_spec.make_weight(1, 256, 2048, generator(rows), ue8m0=True)
    x = fp8_spec.make_x(rows, 1, 2048, generator(rows))[:, 0]
    with emulated(**choices | {"multiprocessors": 8}):
        partial = fp8_linear.fp8_linear_unmerged(x, weight[0], scale[0])
        assert len(partial) == fp8_linear.splits_of(rows, 256, 2048, 0) > 1 and not ran("merge_kernel")
        assert same(fp8_linear.merge(partial), fp8_linear.fp8_linear(x, weight[0], scale[0])) and ran("merge_kernel")


@schedules
def test_latent_norm(choices):
    """Of a latent that lies in a wider row, which a kernel in front may still be writing."""
    x = torch.randn(5, 1536, generator=generator(1)).bfloat16()
    w = torch.randn(1024, generator=generator(2)).bfloat16()
    weight, scale = fp8_spec.make_weight(1, 1536, 512, generator(3), ue8m0=True)
    with emulated(**choices):
        found, alone = fp8_linear.latent_norm(x[:, :1024], w, 1e-6), fp8_linear.latent_norm(x[3:4, :1024], w, 1e-6)
        latent = fp8_linear.fp8_linear(x[:, :512], weight[0], scale[0])
        behind = fp8_linear.latent_norm(latent[:, :1024], w, 1e-6)
    for one, source in ((found, x), (behind, latent)):
        truth = fp8_reference.latent_norm(source[:, :1024], w, 1e-6)
        assert strict_error(one, truth) < bounds.LATENT_NORM.truth
    assert same(found[3:4], alone) and ran("norm_kernel")


@schedules
@pytest.mark.parametrize("rows, streams, inputs, by_ids", [(2, 4, 2048, 1), (3, 4, 256, 0), (5, 2, 2048, 1)])
def test_draft_input(choices, rows, streams, inputs, by_ids):
    """Both products in parts that the sum adds up, or whole; the embedding by ids and by rows."""
    entries = 9 if by_ids else None
    (hidden, table, *halves), by = fp8_spec.make_draft_input(
        rows, 256, inputs, generator(rows), streams=streams, entries=entries
    )
    with emulated(**choices | {"multiprocessors": 8}):
        found = draft_op.draft_input(hidden, table, *halves, **by)
        assert ran("draft_sum_kernel") and not ran("merge_kernel")
        normed = draft_op._norms(hidden, table, *halves, by.get("ids"))
        apart = [
            fp8_linear.fp8_linear(x, half.weight, half.weight_scale) for x, half in zip(normed, halves, strict=True)
        ]
        assert same(found, apart[1][:, None] + apart[0].view(rows, streams, -1))
        one = {name: value[1:2].int() for name, value in by.items()}
        assert same(found[1:2], draft_op.draft_input(hidden[1:2], table if by_ids else table[1:2], *halves, **one))
        for ids in (-1, 9) if by_ids else ():
            lost = draft_op.draft_input(hidden[:1], table, *halves, ids=torch.tensor([ids]))
            assert lost.isnan().all()
    for made, half, x in zip(
        normed, halves, (hidden.flatten(0, 1), table[by["ids"]] if by_ids else table), strict=True
    ):
        assert strict_error(made, fp8_reference.latent_norm(x, half.norm, half.eps)) < bounds.LATENT_NORM.truth
    truth = fp8_reference.draft_input(hidden, table, *halves, **by)
    assert strict_error(found, truth) < bounds.DRAFT_INPUT.truth


@schedules
@pytest.mark.parametrize("in_turn", [1, 2, 4, 8])
def test_fp8_linear_of_many_rows(choices, in_turn):
    """Eight slices of two lengths; units of 64 and of 128 rows, some in one block; NaN where it stays."""
    weight, scale = fp8_spec.make_weight(1, 128, 2176, generator(in_turn), ue8m0=in_turn == 2)
    x = fp8_spec.make_x(135, 1, 2176, generator(in_turn))
    weight.view(torch.uint8)[0, 5, 7], x[130, 0, 3] = 0x7F, torch.nan
    with emulated(**choices):
        few = torch.cat([fp8_linear.fp8_grouped_linear(part, weight, scale) for part in x.split(8)])
        for row_tiles in (1, 2):
            out = torch.empty_like(few)
            fp8_linear._run(x, weight, scale, out, in_turn=in_turn, row_tiles=row_tiles)
            assert same(out, few), row_tiles


@schedules
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_wo_a_with_its_rotation(choices, rows):
    x, weight, scale, freqs, positions = wo_a_spec.make_wo_a(
        rows, 2, generator(rows), outputs=128, inputs=1024, table=64
    )
    with emulated(**choices):
        found = wo_a.wo_a(x, weight, scale, freqs_cis=freqs, positions=positions)
    assert strict_error(found, wo_a_reference.wo_a(x, weight, scale, freqs, positions)) < bounds.WO_A.truth


def _checks(spec, leave_out=()):
    return [
        pytest.param(c, id=f"{c.operator}: {c.name}")
        for c in spec.checks(True)
        if "references" not in c.name and c.name not in leave_out
    ]


@pytest.mark.parametrize("check", [*_checks(compressor), *_checks(index_select, ("top-k by sorting",))])
def test_what_a_server_checks_of_itself(check):
    """The self-test's own checks; of index_select by SM120's product of E4M3."""
    with emulated(seed=len(check.name), most_instructions=40):
        check.run()


EXTRAS = {
    "window": None,
    "C4": sparse_spec.CacheShape(64, 192, lengths=(192, 3, 100), masked=0.1),
    "C128": sparse_spec.CacheShape(2, 256, lengths=(130, 64), ascending=True),
}


@schedules
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize(
    "heads, kernel",
    [(16, {}), (64, {}), (16, {"pairs": True}), (24, {"pairs": True}), (8, {"prefill": True}), (64, {"prefill": True})],
    ids=str,
)
def test_sparse_decode(choices, extra, heads, kernel):
    rows = 5 if kernel.get("prefill") else 3
    inputs = sparse_spec.make_inputs(
        sparse_spec.Shape(rows, heads, sparse_spec.WINDOW, EXTRAS[extra]), seed=heads, device="cpu"
    )
    with emulated(**choices):
        out, lse = sparse_decode.sparse_decode(**inputs.arguments(), **{"prefill": False, **kernel}, return_lse=True)
        few = (
            sparse_decode.sparse_decode(**inputs.arguments(), prefill=False, pairs=False) if "pairs" in kernel else out
        )
    truth, true_lse = sparse_reference.sparse_decode(**inputs.arguments())
    assert strict_error(out, truth) < bounds.SPARSE_DECODE.truth
    assert strict_error(lse, true_lse) < bounds.SPARSE_DECODE_LSE
    assert same(out, few)
    name = (
        "prefill"
        if "prefill" in kernel
        else "sparse_decode_kernel"
        if not kernel
        else "wide"
        if heads > 16
        else "pairs"
    )
    assert ran(name)


@pytest.mark.parametrize("leaves", [5, 8, 20, 36, 48])
def test_sparse_decode_over_blocks(leaves):
    """A row's bits do not know by how many blocks it is computed: of two and more, a merge has room for all units at
    once or not, and a block one round of vectors or two."""
    entries = 32 * (leaves - 4)
    extra = sparse_spec.CacheShape(2, entries, lengths=(entries - 1, entries - 40), ascending=True)
    inputs = sparse_spec.make_inputs(sparse_spec.Shape(2, 16, sparse_spec.WINDOW, extra), seed=leaves, device="cpu")

    def call(multiprocessors: int, **kernel):
        with emulated(seed=leaves, multiprocessors=multiprocessors):
            return sparse_decode.sparse_decode(**inputs.arguments(), prefill=False, return_lse=True, **kernel)

    whole = call(1, pairs=leaves <= 40)
    assert ran("pairs" if leaves <= 40 else "sparse_decode_kernel")
    for blocks in (1, 2, 3, 5, 7, 8, 20, 32):
        assert all(same(*both) for both in zip(call(2 * blocks, pairs=False), whole, strict=True)), blocks
        assert ran("sparse_decode_kernel")


def test_sparse_decode_when_a_rows_counter_wraps(monkeypatch):
    """A row's counter grows by 64 a call: by 2**32 within 65 minutes of 400 steps a second and 43 layers."""
    extra = sparse_spec.CacheShape(64, 192, lengths=(192, 190), ascending=True)
    inputs = sparse_spec.make_inputs(sparse_spec.Shape(2, 16, sparse_spec.WINDOW, extra), seed=3, device="cpu")
    made: dict = {}
    monkeypatch.setattr(emulator, "_words_of", made)
    with emulated(seed=3, multiprocessors=6):
        first = sparse_decode.sparse_decode(**inputs.arguments(), prefill=False, pairs=False)
        (control,) = made.values()
        counters = control.nonzero()[:, 0].tolist()
        assert len(counters) == 2 and set(control[counters].tolist()) == {64}, "of each row, which blocks share"
        control[counters] = -128
        found = [sparse_decode.sparse_decode(**inputs.arguments(), prefill=False, pairs=False) for _ in range(3)]
    assert all(same(one, first) for one in found) and set(control[counters].tolist()) == {64}


@schedules
@pytest.mark.parametrize("rows, kernels", [(1, "fused"), (3, "split"), (17, "fused"), (40, "many")])
def test_mhc(choices, rows, kernels):
    shape = mhc_spec.Shape(rows, mix_scale=mhc_spec.MIX_SCALE)
    inputs = mhc_spec.make_inputs(shape, seed=rows, device="cpu")
    choices = choices | {
        "multiprocessors": 40
    }  # fused_kernel and many_kernel are taken where all their blocks are resident
    with emulated(**choices):
        found = mhc.mhc(**inputs.boundary(), kernels=kernels)
        other = mhc.mhc(**inputs.boundary(), kernels="split")
        errors = mhc_spec.errors(inputs, found)
    assert all(value < mhc_spec.ALLOWED[name] for name, value in errors.items()), errors
    assert all(map(same, found, other))
    assert ran({"fused": "fused_kernel", "split": "finish_kernel", "many": "many_kernel"}[kernels])


@schedules
@pytest.mark.parametrize("rows", [4, 18])
def test_mhc_that_makes_the_last_addition(choices, rows):
    """The bits of the addition by a launch and a boundary behind it, also of what is no number; call behind call."""
    inputs = mhc_spec.make_inputs(mhc_spec.Shape(rows), seed=rows, device="cpu")
    ((parts, _),), _ = mhc_spec.leave_additions("unmerged", [inputs.f], rows)
    ((f, left),), _ = mhc_spec.leave_additions("routed", [inputs.f], rows)
    for place, number in enumerate((math.nan, math.inf, -math.inf, -0.0, 1e-42, 3e38) if rows == 4 else ()):
        parts[place % 4, 3, place::97] = left["routed"][3, place::89] = number
    given = inputs.boundary()
    with emulated(**choices | {"multiprocessors": 40}):
        merged = fp8_linear.merge(parts)
        added = mxfp4_moe.add_shared(f.clone(), left["routed"], scaling=left["scaling"])
        for _ in range(2 if rows == 4 else 1):
            for term, further, whole in ((parts, {}, merged), (f, left, added)):
                expected = mhc.mhc(**given | {"f": whole}, kernels="split")
                found = mhc.mhc(**given | {"f": term}, **further)
                assert all(map(same, found, expected))
                given = given | dict(zip(("streams", "post", "comb"), found[:3], strict=True))
    assert ran("adding_kernel") == (4 if rows == 4 else 2) and not ran("fused_kernel")
    assert ran("merge_kernel") and ran("add_shared_kernel")


@pytest.mark.parametrize("rows, ids, most_instructions", [(1, "uniform", 12), (1, "one", 800), (9, "few", 100)])
def test_mxfp4_moe_of_few_rows(rows, ids, most_instructions, monkeypatch):
    """And, reproducible, by the kernel that sorts a prompt's pairs by their expert."""
    shape = moe_spec.Shape(rows, inter=256, experts=3, ids=ids, masked=0.1, topk=2)
    inputs = moe_spec.make_inputs(shape, seed=rows, device="cpu")
    given = inputs.arguments()
    few = {name: given[name][:1] for name in ("hidden", "topk_ids", "topk_weights")}
    with emulated(seed=rows, most_instructions=most_instructions):
        found, alone = mxfp4_moe.mxfp4_moe(**given), mxfp4_moe.mxfp4_moe(**given | few)
        exact = mxfp4_moe.mxfp4_moe(**given, reproducible=True)
        monkeypatch.setattr(mxfp4_moe, "DECODE_ROWS", 0)
        by_expert = mxfp4_moe.mxfp4_moe(**given, reproducible=True)
        weights = mxfp4_moe.Weights(*map(given.get, ("w13", "w13_scale", "w2", "w2_scale", "up_first")))
        routing = mxfp4_moe.Routing(given["topk_ids"], given["topk_weights"], 0, None, given["routed_scaling"])
        wide = torch.empty_like(found)
        mxfp4_moe._sorted_rows(given["hidden"], weights, routing, given["swiglu_limit"], wide, exact=False)
    expected = moe_reference.mxfp4_moe(**given)
    assert strict_error(found, expected) < bounds.MXFP4_MOE.truth > strict_error(wide, expected)
    assert same(found[:1], alone) and same(exact, by_expert) and ran("sorted_kernel") and ran("wide_kernel")


@pytest.mark.parametrize("inter", [384, 512, 768, 1024, 1536, 2048, 3072])
def test_mxfp4_moe_of_few_rows_of_each_size(inter):
    """Each has kernels of its own for the second product; other tests have 256, which is one of eight cards'."""
    shape = moe_spec.Shape(2, inter=inter, experts=1, topk=1)
    given = moe_spec.make_inputs(shape, seed=inter, device="cpu").arguments()
    one = given | {name: given[name][:1] for name in ("hidden", "topk_ids", "topk_weights")}
    expected = moe_reference.mxfp4_moe(**given)
    with emulated(seed=inter, multiprocessors=8, most_instructions=800):
        for few, options in ((given, {}), (one, {}), (one, {"reproducible": True})):
            found = mxfp4_moe.mxfp4_moe(**few, **options)
            assert strict_error(found, expected[: len(found)]) < bounds.MXFP4_MOE.truth
    assert ran("experts_kernel") and ran("down_sum_kernel")


def test_wide_kernels_take_sizes_that_few_rows_do_not():
    shape = moe_spec.Shape(5, hidden=512, inter=896, experts=3, topk=2)
    inputs = moe_spec.make_inputs(shape, seed=5, device="cpu")
    given = inputs.arguments()
    with emulated(seed=5, most_instructions=100):
        found = mxfp4_moe.mxfp4_moe(**given)
    assert strict_error(found, moe_reference.mxfp4_moe(**given)) < bounds.MXFP4_MOE.truth and ran("wide_kernel")


HIDDEN = 512


@pytest.mark.parametrize("transport", all_reduce_op.TRANSPORTS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@schedules
def test_sums_between_cards(choices, ranks, transport):
    """Calls of several sizes behind each other, as the generations of places take turns; terms that are no numbers."""
    with emulated(**choices | {"multiprocessors": 4}):
        cards = group(ranks, transport=transport, hidden=HIDDEN, max_rows=32)
        for call, rows in enumerate((1, 3, 32, 2, 7, 1, 16)):
            terms = all_reduce.make_terms(ranks, rows, call, hidden=HIDDEN, hard=True)
            for algorithm in ("one_shot", "two_shot"):
                sums = on_cards(functools.partial(all_reduce_op.all_reduce, algorithm=algorithm), terms, cards)
                assert [all_reduce.differing(one, terms) for one in sums] == [0] * ranks
                assert all(same(one, sums[0]) for one in sums)
        sent = all_reduce.make_logits(ranks, 2, 5, columns=264)
        gathered = on_cards(all_reduce_op.all_gather, sent, cards)
        expected = all_reduce_reference.all_gather(sent)
        assert all(torch.equal(one.isnan(), expected.isnan()) for one in gathered)
        assert all(torch.equal(one.nan_to_num(), expected.nan_to_num()) for one in gathered)
        assert [one.fault() for one in cards] == [None] * ranks
        for one in cards:
            one.close()


@pytest.mark.parametrize("algorithm", all_reduce_op.ALGORITHMS)
@pytest.mark.parametrize("transport", all_reduce_op.TRANSPORTS)
@schedules
def test_sums_between_cards_when_the_counter_wraps(choices, transport, algorithm):
    """It grows by 1,024 a call: by 2**32 within two minutes of 400 steps a second and 86 sums. What a call leaves has
    to be wiped by the one two behind it, on both sides of the border."""
    with emulated(**choices | {"multiprocessors": 4}):
        cards = group(2, transport=transport, hidden=HIDDEN, max_rows=32)
        for one in cards:
            one._state[0] = -5 << 10
        for call, rows in enumerate((3, 1, 32, 2, 7, 1, 16, 5, 32, 1)):
            terms = all_reduce.make_terms(2, rows, call, hidden=HIDDEN)
            sums = on_cards(functools.partial(all_reduce_op.all_reduce, algorithm=algorithm), terms, cards)
            assert [all_reduce.differing(one, terms) for one in sums] == [0, 0]
        assert [int(one._state[0]) for one in cards] == [5 << 10] * 2
        for one in cards:
            one.close()


def _behind_a_sum(boundary: dict, f, one, call=mhc.mhc, **left):
    return call(**{**boundary, "f": f}, sum_over=one, kernels="fused", **left)


@pytest.mark.parametrize(
    "ranks, transport, most_instructions", [(2, "host", 12), (2, "peer", 800), (4, "peer", 100), (4, "host", 100)]
)
def test_mhc_behind_a_sum(ranks, transport, most_instructions):
    """The kernel that sums on its way: the bits of a sum and a boundary behind it, or the head, several in a row."""
    with emulated(seed=ranks, most_instructions=most_instructions, multiprocessors=188):  # blocks wait for other cards
        cards = group(ranks, transport=transport, hidden=4096, max_rows=8)
        for rows in (1, 3):
            inputs = mhc_spec.make_inputs(mhc_spec.Shape(rows), seed=rows, device="cpu")
            terms = mhc_spec.make_terms(inputs, ranks, rows)
            expected = mhc.mhc(**{**inputs.boundary(), "f": all_reduce_reference.all_reduce(terms)}, kernels="split")
            call = functools.partial(_behind_a_sum, inputs.boundary())
            found = on_cards(call, terms, cards)
            assert all(same(a, b) for of_rank in found for a, b in zip(of_rank, expected, strict=True))
            if rows == 1:
                last = {**inputs.head(), "post": inputs.post, "comb": inputs.comb, "norm_weight": inputs.norm_weight}
                expected = mhc.mhc_head(**last, f=all_reduce_reference.all_reduce(terms), kernels="split")
                found = on_cards(functools.partial(_behind_a_sum, last, call=mhc.mhc_head), terms, cards)
                assert all(same(a, b) for of_rank in found for a, b in zip(of_rank, expected, strict=True))
        if most_instructions == 800:
            # terms without their last addition, the same on all cards
            routed, partial = terms[1], torch.stack([*terms, *terms][: mhc.TERM_SPLITS]).float() * 1.37
            added = mxfp4_moe.add_shared(terms[0].clone(), routed, scaling=1.5)
            for f, left, whole in (
                (terms[0], {"routed": routed, "scaling": 1.5}, added),
                (partial, {}, fp8_linear.merge(partial)),
            ):
                summed = all_reduce_reference.all_reduce([whole] * ranks)
                expected = mhc.mhc(**{**inputs.boundary(), "f": summed}, kernels="split")
                found = on_cards(functools.partial(_behind_a_sum, inputs.boundary(), **left), [f] * ranks, cards)
                assert all(same(a, b) for of_rank in found for a, b in zip(of_rank, expected, strict=True))
        for one in cards:
            one.close()
    for is_head in (0, 1):
        assert ran(f"summing_kernelILb{is_head}ELi{ranks}ELb{int(transport == 'host')}E")
    assert all(ran(name) == (most_instructions == 800) for name in ("merge_kernel", "add_shared_kernel"))
