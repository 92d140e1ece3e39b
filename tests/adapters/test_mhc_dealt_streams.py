"""A prompt's streams dealt to ranks: by ranks that are threads, and then processes of a gloo group, a model of SGLang's
form has the bits of the whole boundaries; who takes a sum that was put off; and what keeps a pass whole."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120 import settings
from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.adapters import mhc as boundary
from deepseek_v4_sm120.sglang_patches.adapters import mhc_dealt_streams as adapter
from deepseek_v4_sm120.sglang_patches.adapters import mhc_sum, prompt_passes
from deepseek_v4_sm120.sglang_patches.adapters.mhc_dealt_streams import Shares, SumOfShares
from deepseek_v4_sm120.sglang_patches.adapters.mhc_owed_sum import finished
from tests.adapters.dealt_streams_model import (
    HIDDEN,
    LAYERS,
    ROWS,
    SUMS,
    Coordinator,
    Embedding,
    Failed,
    Layer,
    Model,
    PatchedEmbedding,
    PatchedLayer,
    PatchedModel,
    Ranks,
    _this,
    among_threads,
    both,
    exact,
    fused,
    patched,
    run,
    seen,
    settle,
)
from tests.ops.all_reduce_emulated import in_gloo


@pytest.fixture
def state(monkeypatch):
    return among_threads(monkeypatch)


# ---- shares


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_every_row_is_in_one_share_and_what_is_behind_the_last_is_zero(ranks):
    for rows in (*range(1, 40), 8191):
        x = torch.arange(1, 2 * rows + 1).view(rows, 2)
        shares = [Shares(SimpleNamespace(world_size=ranks, rank_in_group=rank), rows, 2) for rank in range(ranks)]
        own = torch.cat([one.own(x) for one in shares])
        assert {one.each for one in shares} == {-(-rows // ranks)} and len(own) == ranks * shares[0].each
        assert torch.equal(own[:rows], x) and not own[rows:].any()


@pytest.mark.parametrize("rows", [1, 3, 8, 13])
def test_terms_stay_and_their_sum_is_gathered(state, rows):
    def body(coordinator):
        term = exact(torch.arange(rows * HIDDEN).view(rows, HIDDEN).float(), coordinator.rank_in_group)
        shares, before = Shares(coordinator, rows, HIDDEN), term.clone()
        found = shares.gathered(shares.summed(term))
        assert torch.equal(term, before) and found.shape == term.shape and found.is_contiguous()
        return torch.equal(found, coordinator.all_reduce(term))

    assert Ranks(4).each(body) == [True] * 4


# ---- passes


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("more", [0, 1, 2, 3, 7])
def test_a_dealt_pass_has_the_bits_of_the_whole(state, ranks, more):
    """Rows that do not divide among them, down to a rank whose share is padded."""
    rows = ROWS * ranks + more
    each = -(-rows // ranks)
    for (whole, _), (found, streams), boundaries, calls in both(ranks, rows, captures=None if more else False):
        assert torch.equal(found, whole) and bool(whole.any()) and streams is None
        assert boundaries == [each] * (2 * LAYERS), "a boundary has a share's rows"
        padded = each * ranks
        sums = [call for call in calls if call[0] != "all-gather"]
        assert sums == [("reduce-scatter", padded)] * SUMS, "and no sum is whole"
        assert calls[:3] == [("reduce-scatter", padded), ("all-gather", each), ("reduce-scatter", padded)]
        assert calls[-1] == ("all-gather", each) and len(calls) == SUMS + 2 * LAYERS + 1


def test_the_last_rank_may_have_no_row_at_all(state, monkeypatch):
    """Five rows of four ranks; no server comes here, where a share has ROWS and more."""
    monkeypatch.setattr(adapter, "ROWS", 1)
    for (whole, _), (found, _), boundaries, _ in both(4, 5):
        assert torch.equal(found, whole) and boundaries == [2] * (2 * LAYERS)


@pytest.mark.parametrize("ranks", [2, 4])
def test_captured_streams_are_whole(state, ranks):
    for whole, found, _, calls in both(ranks, ROWS * ranks + 1, captures=True):
        assert torch.equal(found[0], whole[0]) and torch.equal(found[1], whole[1])
        assert [kind for kind, _ in calls[-2:]] == ["all-gather"] * 2


def test_boundaries_that_are_a_post_and_a_pre(state):
    def body(coordinator):
        rank = coordinator.rank_in_group
        whole, _ = run(Model(2, rank, is_fused=False), 9)
        found, _ = run(patched(2, rank, is_fused=False), 9)
        return torch.equal(found, whole) and seen.rows == [5] * (2 * LAYERS)

    assert Ranks(2).each(body) == [True] * 2


@pytest.mark.parametrize(
    ("rows", "options"),
    [(7, {}), (1, {}), (9, {"is_prompt": False}), (0, {"is_prompt": False}), (0, {})],
    ids=["few rows", "one row", "decode or verify", "an idle rank", "nothing"],
)
def test_other_passes_are_whole(state, rows, options):
    for whole, found, boundaries, calls in both(2, rows, **options):
        assert all(map(torch.equal, whole, found)) and boundaries == [rows] * (2 * LAYERS)
        assert calls == [("sum", rows)] * SUMS
    assert not adapter._seen and not adapter._left


def test_passes_of_all_kinds_one_behind_the_other(state):
    """Chunks, a batch's decode steps, and prompts with decode rows among them."""
    passes = [(13, {}), (8, {}), (3, {"is_prompt": False}), (9, {"captures": True}), (7, {}), (8, {}), (21, {})]

    def body(coordinator):
        rank = coordinator.rank_in_group
        stock, model = Model(2, rank), patched(2, rank)
        same = []
        for rows, options in passes:
            whole, found = run(stock, rows, **options), run(model, rows, **options)
            same.append(torch.equal(whole[0], found[0]) and (found[1] is None or torch.equal(whole[1], found[1])))
        depth, one = 0, coordinator.all_reduce
        while hasattr(one, "__wrapped__"):
            depth, one = depth + 1, one.__wrapped__
        return same, depth

    assert Ranks(2).each(body) == [([True] * len(passes), 1)] * 2
    assert adapter._seen == {"passes": 2 * 5, "rows": 2 * (13 + 8 + 9 + 8 + 21)}


@pytest.mark.parametrize("where", [(0, 0), (1, 0), (2, 1)])
def test_an_error_in_the_middle_leaves_nothing_behind(state, where):
    def body(coordinator):
        rank = coordinator.rank_in_group
        model = patched(2, rank)
        whole, _ = run(Model(2, rank), 9)
        with pytest.raises(Failed):
            run(model, 9, fails_at=where)
        assert adapter._pass.layer is None and not adapter._pass.waiting(SumOfShares)
        coordinator.calls.clear()
        few = run(model, 3)
        assert coordinator.calls == [("sum", 3)] * SUMS and len(few[1]) == 3
        return torch.equal(run(model, 9)[0], whole)

    assert Ranks(2).each(body) == [True] * 2


# ---- whoever else looks


def in_a_pass(body, ranks=2, rows=9):
    """body(shares) of each rank in a dealt pass, where sums are the coordinator's."""

    def of(coordinator):
        shares = Shares(coordinator, rows, HIDDEN)
        adapter._deal_sums_of(coordinator)
        with adapter._pass.enter(shares, embedding=None):
            return body(shares)

    return Ranks(ranks).each(of)


def term_of(shares):
    return exact(torch.arange(shares.rows * HIDDEN).view(-1, HIDDEN).float(), shares.coordinator.rank_in_group)


def whole_of(shares):
    return sum(
        exact(torch.arange(shares.rows * HIDDEN).view(-1, HIDDEN).float(), rank).float() for rank in range(2)
    ).bfloat16()


def test_a_sum_that_somebody_looks_at_is_whole_and_its_share_is_of_it(state):
    def body(shares):
        found = shares.coordinator.all_reduce(term_of(shares))
        assert isinstance(found, SumOfShares) and (found.shape, found.ndim) == ((9, HIDDEN), 2) and len(found) == 9
        assert not shares.coordinator.calls, "put off"
        assert torch.equal(found + 0, whole_of(shares)) and shares.coordinator.calls == [("sum", 9)]
        looks = (lambda x: 2 + x, lambda x: x[1:], lambda x: x == x + 0, lambda x: [*x][3], lambda x: x @ x.T)
        assert all(torch.equal(look(found), look(whole_of(shares))) for look in looks)
        found[0] = 7
        assert finished(found)[0].eq(7).all() and found in {found}
        with pytest.raises(RuntimeError, match="ambiguous"):
            bool(found)
        assert torch.equal(found.own_rows(), shares.own(finished(found))) and len(shares.coordinator.calls) == 1
        whole, options = shares.coordinator.all_reduce(term_of(shares)).for_boundary()
        return torch.equal(whole, whole_of(shares)) and options == {}

    assert in_a_pass(body) == [True] * 2


def form_of(x):
    return x.shape, x.dtype, x.ndim, x.device, x.is_cuda, x.is_cpu, x.stride(), x.is_contiguous(), x.layout, x.numel()


def test_a_share_that_is_made_is_gathered_for_who_looks_later(state):
    def body(shares):
        found = shares.coordinator.all_reduce(term := term_of(shares))
        held, form = weakref.ref(term), [form_of(found), form_of(term)]
        del term
        assert torch.equal(found.own_rows(), shares.own(whole_of(shares))) and held() is None, "terms are let go"
        assert form == [form_of(found)] * 2
        found.own_rows()
        assert torch.equal(finished(found), whole_of(shares)) and torch.equal(found.for_boundary()[0], whole_of(shares))
        return shares.coordinator.calls

    assert in_a_pass(body) == [[("reduce-scatter", 10), ("all-gather", 5)]] * 2


def test_a_sum_that_nobody_takes_is_an_error(state):
    def body(shares):
        shares.coordinator.all_reduce(term_of(shares))
        return "not None"

    def fails(shares):
        with pytest.raises(RuntimeError, match="dealt_streams: .* nobody asked for it: .*=dealt_streams=off"):
            outer = adapter._pass.layer
            with adapter._pass.enter(outer, embedding=None):
                body(shares)
        return not adapter._pass.waiting(SumOfShares)

    assert in_a_pass(fails) == [True] * 2


def test_other_sums_of_a_pass_are_made_as_ever(state):
    def body(shares):
        others = (torch.ones(8, HIDDEN).bfloat16(), torch.ones(9, HIDDEN), torch.ones(9, 2 * HIDDEN).bfloat16())
        found = [shares.coordinator.all_reduce(x) for x in others]
        return all(type(x) is torch.Tensor and x.eq(2).all() for x in found)

    assert in_a_pass(body) == [True] * 2


def test_a_sum_that_was_made_elsewhere_is_cut(state):
    """Another way to sum than the group's: whole rows come to the boundary."""

    class Elsewhere(PatchedLayer):
        def sublayer(self, y, number):
            return finished(super().sublayer(y, number))

    def body(coordinator):
        rank = coordinator.rank_in_group
        whole, _ = run(Model(2, rank), 9)
        found, _ = run(patched(2, rank, layer=Elsewhere), 9)
        return torch.equal(found, whole) and seen.rows == [5] * (2 * LAYERS)

    assert Ranks(2).each(body) == [True] * 2


def test_an_embedding_that_is_wrapped_leaves_the_streams_whole(state):
    """LoRA's has the layer inside; and another's embedding is never cut."""

    class Wrapped(Embedding):
        def forward(self, input_):
            inner = object.__new__(PatchedEmbedding)
            inner.table = self.table
            return finished(inner.forward(input_))

    def body(coordinator):
        rank = coordinator.rank_in_group
        whole, streams = run(Model(2, rank), 9, captures=True)
        found, same = run(patched(2, rank, embedding=Wrapped), 9, captures=True)
        return torch.equal(found, whole) and torch.equal(same, streams) and seen.rows == [9] * (2 * LAYERS)

    assert Ranks(2).each(body) == [True] * 2


def test_states_of_another_number_of_rows_are_an_error(state):
    class Pruned(PatchedModel):
        forward = adapter.replace_model_forward(lambda *args: tuple(x[:2] for x in Model.forward(*args)))

    def body(coordinator):
        model = Pruned(2, coordinator.rank_in_group, embedding=PatchedEmbedding, layer=PatchedLayer)
        with pytest.raises(RuntimeError, match="dealt_streams: of 9 rows, 5 a rank, 2 came out: .*dealt_streams=off"):
            run(model, 9)
        return True

    assert Ranks(2).each(body) == [True] * 2


# ---- when, which all ranks must answer alike


def changes(state, module):
    other = SimpleNamespace(disabled=False, should_custom_ar=lambda x: len(x) < 10)

    def on(where, name, value):
        return lambda monkeypatch: monkeypatch.setattr(where, name, value, raising=False)

    said = {"reproducible": {"choices": {"reproducible": "on"}}, "shadow mode": {"shadow": "1"}}
    asked = {name: settings.Settings(**more) for name, more in said.items()}
    group = SimpleNamespace(world_size=2)
    return {
        **{name: on(prompt_passes, "settings", lambda one=one: one) for name, one in asked.items()},
        "torch compiles": on(models_served, "is_compiled", lambda: True),
        "pipeline": on(Model, "pp_group", group),
        "data or context parallel": on(type(state), "_ATTN_TP", property(lambda self: "a part")),
        "PD multiplexing": on(state, "_PDMUX_PREFILL_TP_GROUP", object()),
        "expert": on(state, "experts", 2),
        "decode context": on(state, "_DCP", group),
        "DSPARK": on(Model, "dspark_layers_to_capture", [0]),
        "hidden size": on(module.limits, "takes", lambda patch, hidden: False),
        "not all cards": on(module, "see_the_same_cards", lambda ranks: ranks != 2),
        "under capture": on(torch.cuda, "is_current_stream_capturing", lambda: True),
        "others than NCCL": on(Coordinator, "ca_comm", other),
    }


REASONS = [
    *("reproducible", "shadow mode", "torch compiles", "pipeline", "data or context parallel"),
    *("PD multiplexing", "expert", "decode context", "DSPARK", "hidden size", "not all cards", "under capture"),
    "others than NCCL",
]


@pytest.mark.parametrize("name", REASONS)
def test_what_keeps_a_pass_whole_is_told(state, name, monkeypatch):
    assert set(changes(state, adapter)) == set(REASONS)
    changes(state, adapter)[name](monkeypatch)
    for whole, found, boundaries, calls in both(2, 9):
        assert torch.equal(whole[0], found[0]) and torch.equal(whole[1], found[1])
        assert boundaries == [9] * (2 * LAYERS) and calls == [("sum", 9)] * SUMS
    describe, as_dict = report._notes[adapter.PATCH]
    (why,) = as_dict()["not_dealt"]
    assert name in why and f": {why}" in describe() and not adapter._seen


@pytest.mark.parametrize("options", [{"halves": [1, 2]}, {"given": torch.zeros(1)}], ids=["take turns", "embeddings"])
def test_a_pass_with_other_inputs_is_whole(state, options):
    for whole, found, _, calls in both(2, 9, **options):
        assert torch.equal(whole[0], found[0]) and calls == [("sum", 9)] * SUMS
    assert len(adapter._left) == 1


def test_one_card_has_all_rows(state):
    (((whole, _), (found, _), _, calls),) = both(1, 9)
    assert torch.equal(whole, found) and {kind for kind, _ in calls} == {"sum"}
    assert adapter._left == {"one card has all rows": 1}


def test_where_torch_compiles_ours_does_nothing(state, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for whole, found, _, calls in both(2, 9):
        assert torch.equal(whole[0], found[0]) and calls == [("sum", 9)] * SUMS
    assert not adapter._left and not adapter._seen


def test_status_tells_how_many(state):
    both(2, 9)
    both(2, 12)
    describe, found = report._notes[adapter.PATCH]
    assert found() == {"ranks": 2, "passes": 4, "rows": 42, "not_dealt": {}}
    assert describe() == f"dealt_streams: 4 passes of {2 * ROWS} rows and more dealt to 2 cards"


# ---- beside the others


def test_with_a_layers_forward_that_puts_off_sums_of_few_rows(state, monkeypatch):
    """mhc_sum.py wraps the same all_reduce, for the length of a layer; whoever is first, sums are wrapped once each."""
    monkeypatch.setattr(mhc_sum, "all_reduce_of", lambda coordinator: SimpleNamespace(sums=None))
    monkeypatch.setattr(mhc_sum, "_who_can_wait", lambda coordinator, x: None)
    monkeypatch.setattr(mhc_sum.op, "summing_rows", lambda sums: 64)

    class Both(PatchedLayer):
        forward = mhc_sum.replace_layer_forward(Layer.forward)

    def body(coordinator):
        rank = coordinator.rank_in_group
        whole = {rows: run(Model(2, rank), rows)[0] for rows in (3, 9)}
        model = patched(2, rank, layer=Both)
        same = [torch.equal(run(model, rows)[0], whole[rows]) for rows in (3, 9, 3, 9, 9)]
        depth, one = 0, coordinator.all_reduce
        while hasattr(one, "__wrapped__"):
            depth, one = depth + 1, one.__wrapped__
        return same, depth

    assert Ranks(2).each(body) == [([True] * 5, 2)] * 2


def test_our_boundary_gets_a_share(state, monkeypatch):
    """What mhc.py has in SGLang's place, inside."""
    monkeypatch.setattr(boundary, "_takes", lambda *_: True)
    taken = []

    def mhc(f, streams, post, comb, *weights, **options):
        assert type(f) is torch.Tensor and len(f) == len(streams) and f.is_contiguous() and "sum_over" not in options
        taken.append(len(f))
        new, post, comb, y = fused(f, streams, post, comb, *weights)
        return new, post.squeeze(-1), comb, y

    monkeypatch.setattr(boundary.op, "mhc", mhc)

    class Ours(PatchedLayer):
        boundary = staticmethod(adapter.replace_fused_post_pre(boundary.replace_fused_post_pre(None)))

    def body(coordinator):
        rank = coordinator.rank_in_group
        whole, _ = run(Model(2, rank), 9)
        return torch.equal(run(patched(2, rank, layer=Ours), 9)[0], whole)

    assert Ranks(2).each(body) == [True] * 2 and taken == [5] * (2 * (2 * LAYERS - 1))


# ---- processes


class Grouped(Coordinator):
    """Of a process: torch's own collectives."""

    def __init__(self, ranks, rank):
        self.world_size, self.rank_in_group, self.device_group = ranks, rank, torch.distributed.group.WORLD

    def all_reduce(self, x):
        torch.distributed.all_reduce(x, group=self.device_group)
        return x


def as_a_rank(rank, ranks, gather, passes):
    """(passes that were dealt, whether each has the whole's bits)"""
    with pytest.MonkeyPatch.context() as monkeypatch:
        settle(monkeypatch)
        _this.coordinator = Grouped(ranks, rank)
        stock, model, same = Model(ranks, rank), patched(ranks, rank), []
        for rows, captures in passes:
            whole, found = (run(one, rows, captures=captures) for one in (stock, model))
            same.append(torch.equal(whole[0], found[0]) and (found[1] is None or torch.equal(whole[1], found[1])))
        return adapter._seen["passes"], same


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_of_a_gloo_group_have_the_bits_of_the_whole(ranks, program_python):
    passes = [(ROWS * ranks, False), (ROWS * ranks + 3, True), (ROWS * ranks - 1, False), (ROWS * ranks + 1, False)]
    found = in_gloo(program_python(), ranks, as_a_rank, passes)
    assert found == [(3, [True] * len(passes))] * ranks
