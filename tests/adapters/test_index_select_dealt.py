"""A prompt's index rows, dealt to ranks that are threads, with the reference in the operator's place: each has the
lists of its own whole call, in pages of its own; and when the ranks deal, which all must answer alike."""

from __future__ import annotations

import dataclasses
import random
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.ops import index_select as op
from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.reference import index_select as reference
from deepseek_v4_sm120.settings import Settings
from deepseek_v4_sm120.sglang_patches import device_gate, models_served, shadow
from deepseek_v4_sm120.sglang_patches.adapters import index_select as select_adapter
from deepseek_v4_sm120.sglang_patches.adapters import index_select_dealt as adapter
from deepseek_v4_sm120.specs.index_select import Shape, make_inputs, make_queries
from tests.adapters.test_index_select import (
    K,
    Mixin,
    by_reference,
    expected,
    stock_logits,
    stock_topk,
    topk_by_reference,
)
from tests.ops.all_reduce_emulated import in_gloo

COLUMNS = 3
IS_WORTH_IT = adapter.is_worth_it


class Ranks:
    """What the ranks of a group share: lists that meet."""

    def __init__(self, count: int):
        self.count, self.barrier, self.parts = count, threading.Barrier(count, timeout=60), [None] * count

    def of(self, rank: int) -> SimpleNamespace:
        def gather(output, input):
            assert output.is_contiguous() and input.is_contiguous()
            assert output.shape == (self.count * input.shape[0], input.shape[1])
            assert output.dtype == input.dtype == torch.uint8, "which every way of SGLang's takes"
            self.parts[rank] = input
            self.barrier.wait()
            output.copy_(torch.cat(self.parts))
            self.barrier.wait()

        return SimpleNamespace(world_size=self.count, rank_in_group=rank, all_gather_into_tensor=gather)

    def each(self, body) -> list:
        """body(coordinator) in a thread for each rank."""
        found: list = [None] * self.count

        def run(rank):
            found[rank] = body(self.of(rank))

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert None not in found
        return found


scored: list[int] = []  # rows of each call of the operator


def slots_by_reference(dealt, page_table, *, num_pages, out, entries):
    assert dealt.dtype == (torch.int16 if op.is_narrow(page_table) else torch.int32), "no more bytes than entries need"
    assert dealt.shape[1] == -(-len(page_table) // len(dealt)), "nor rows than there are"
    slots, found = reference.dealt_slots(dealt, page_table, num_pages=num_pages)
    out.copy_(slots)
    if entries is not None:
        entries.copy_(found)


def is_worth_it(ranks, rows, pairs, row_bytes):
    assert row_bytes == K * adapter.entry_type(None).itemsize
    return rows >= 8 and pairs > 0


@pytest.fixture(params=["16 bits", "32 bits"], autouse=True)
def on_the_cpu(request, monkeypatch):
    scored.clear()

    def select(q, *args, **kwargs):
        scored.append(q.shape[0])
        by_reference(q, *args, **kwargs)

    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(select_adapter, "index_select", select)
    monkeypatch.setattr(select_adapter, "topk_select", topk_by_reference)
    monkeypatch.setattr(op, "dealt_slots", slots_by_reference)
    monkeypatch.setattr(op, "is_narrow", lambda page_table: request.param == "16 bits")
    monkeypatch.setattr(adapter, "is_worth_it", is_worth_it)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(shadow, "_start_writer", lambda: None)
    adapter.see_the_same_cards.cache_clear()
    adapter._tell.cache_clear()
    shadow.reset()
    yield
    adapter.see_the_same_cards.cache_clear()
    adapter._tell.cache_clear()
    shadow.reset()


def batch(is_prompt=True):
    mode = SimpleNamespace(is_decode=lambda: not is_prompt, is_extend_without_speculative=lambda: is_prompt)
    return SimpleNamespace(forward_mode=mode, extend_seq_lens_cpu=[5, 3], extend_prefix_lens_cpu=[4, 400])


def prompt(coordinator, inputs, *, raw=None, plan=None):
    """SGLang's flow of a prompt with both patches in it, where the group may deal; what it has put in its lists."""
    logits, topk = select_adapter.replace_logits(stock_logits), select_adapter.replace_topk(stock_topk)
    mixin = Mixin(lambda *args: logits(*args[:5], plan, *args[6:]), topk, inputs, raw=raw)
    indexer = SimpleNamespace(use_fp4_indexer=inputs.q_scales is not None)
    forward = select_adapter.replace_forward(Mixin.forward_c4_indexer)
    with adapter._prompt.enter(coordinator, pairs=1):
        forward(mixin, torch.zeros(1), None, indexer, batch())
    return mixin.out


def inputs_of(rows, fp4=False, rank=0):
    """The same requests on each rank, in pages that only it has allotted so."""
    lengths = tuple(5 + 29 * row % 180 for row in range(rows))
    inputs = make_inputs(Shape(rows, lengths, fp4, rows_per_request=3, columns=COLUMNS), device="cpu")
    if not rank:
        return inputs
    moved = torch.randperm(len(inputs.k_pages), generator=torch.Generator().manual_seed(rank))
    table, is_page = inputs.page_table.long(), inputs.page_table < len(moved)
    table = torch.where(is_page, moved[table.clamp_max(len(moved) - 1)], table).to(torch.int32)
    return dataclasses.replace(inputs, k_pages=inputs.k_pages[moved.argsort()], page_table=table)


@pytest.mark.parametrize(("ranks", "rows"), [(2, 8), (2, 9), (4, 8), (4, 11), (4, 13), (8, 16), (8, 9), (8, 23)])
def test_all_have_the_lists_of_the_whole_call_whatever_pages_the_others_have(ranks, rows):
    """Slots that are gathered would be other ranks' pages."""
    inputs = [inputs_of(rows, rank=rank) for rank in range(ranks)]
    wanted = [expected(one) for one in inputs]
    for slots, entries in wanted[1:]:
        assert torch.equal(entries, wanted[0][1]) and not torch.equal(slots, wanted[0][0])
    found = Ranks(ranks).each(lambda coordinator: prompt(coordinator, inputs[coordinator.rank_in_group]))
    for out, (slots, _) in zip(found, wanted, strict=True):
        assert torch.equal(out, slots)
    assert sorted(scored) == sorted(len(range(rank, rows, ranks)) for rank in range(ranks))


@pytest.mark.parametrize("rows", [8, 10])
@pytest.mark.parametrize("fp4", [False, True])
def test_entries_where_they_are_asked_for_and_the_fp4_cache(rows, fp4):
    inputs = [inputs_of(rows, fp4, rank) for rank in range(4)]

    def run(coordinator):
        raw = torch.full((rows, K), -9, dtype=torch.int32)
        return prompt(coordinator, inputs[coordinator.rank_in_group], raw=raw), raw

    for (slots, entries), one in zip(Ranks(4).each(run), inputs, strict=True):
        assert torch.equal(slots, expected(one)[0]) and torch.equal(entries, expected(one)[1])


def test_fewer_rows_than_ranks_and_lists_with_gaps_between_their_rows():
    """Not for what `who_deals` lets through: `deal` is right for any number."""
    for rows in (1, 3, 5):
        lists = torch.arange(rows * K, dtype=torch.int32).view(rows, K)
        table = torch.arange(rows * 6, dtype=torch.int32).view(rows, 6)

        def run(coordinator, lists=lists, rows=rows, table=table):
            out = torch.full((rows, 2 * K), -9, dtype=torch.int32)
            adapter.deal(coordinator, lambda own, slots, part: part.copy_(lists[own]), table, 1000, out[:, :K], None)
            return out

        slots = 64 * table.gather(1, (lists // 64).long()) + lists % 64
        for out in Ranks(4).each(run):
            assert torch.equal(out[:, :K], slots) and out[:, K:].eq(-9).all()


def test_few_rows_and_rows_that_a_schedule_cuts_are_not_dealt(monkeypatch):
    coordinator = SimpleNamespace(world_size=2)  # a gather would fail
    whole = inputs_of(8)
    table, lists = whole.page_table, torch.empty(8, K)
    with adapter._prompt.enter(coordinator, pairs=1):
        assert adapter.who_deals(lists, table) is coordinator
        assert adapter.who_deals(lists[:7], table) is None
        with monkeypatch.context() as context:
            context.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            assert adapter.who_deals(lists, table) is None
    with adapter._prompt.enter(coordinator, pairs=0):
        assert adapter.who_deals(lists, table) is None
    assert adapter.who_deals(lists, table) is None
    assert torch.equal(prompt(coordinator, inputs_of(7)), expected(inputs_of(7))[0])
    assert torch.equal(prompt(coordinator, whole, plan=torch.zeros(1)), expected(whole)[0])
    assert torch.equal(prompt(None, whole), expected(whole)[0]) and scored == [7, 8, 8]


# rows, mean entries, bytes of a list -> the numbers of ranks that deal, as docs/notes/index_select.md has it
WORTH_IT = {
    (8192, 1024, 1024): (),  # the first chunk
    (8192, 3072, 1024): (2, 4, 8),
    (3617, 4548, 1024): (2, 4, 8),  # what is left of 20,001 tokens
    (8192, 3072, 2048): (),
    (8192, 31_744, 2048): (2, 4, 8),
    (512, 5000, 1024): (),
    (512, 16_000, 1024): (2, 4, 8),
    (1, 1_000_000, 2048): (),  # a row of a million tokens: 50 us
}


@pytest.mark.parametrize(("call", "dealing"), WORTH_IT.items())
def test_what_is_worth_the_exchange(call, dealing):
    rows, mean, row_bytes = call
    found = tuple(ranks for ranks in adapter.RANKS if IS_WORTH_IT(ranks, rows, rows * mean, row_bytes))
    assert found == dealing


# ---- shadow mode


@pytest.mark.parametrize("keep", ["1", "ours"])
@pytest.mark.parametrize("is_wrong", [False, True])
def test_shadow_mode_has_the_whole_lists_beside(keep, is_wrong, monkeypatch):
    for module in (select_adapter, shadow):
        monkeypatch.setattr(module, "settings", lambda: Settings(shadow=keep))
    inputs, record, one_at_a_time = [inputs_of(9, rank=rank) for rank in range(2)], shadow.record, threading.Lock()

    def record_alone(*args, **kwargs):  # ranks are threads here, and share the table
        with one_at_a_time:
            record(*args, **kwargs)

    monkeypatch.setattr(shadow, "record", record_alone)

    def run(coordinator):
        gather = coordinator.all_gather_into_tensor

        def all_gather_into_tensor(output, input):
            gather(output, input)
            output[1, 0] ^= is_wrong  # the second row of rank 0: row 2

        coordinator.all_gather_into_tensor = all_gather_into_tensor
        return prompt(coordinator, inputs[coordinator.rank_in_group])

    for out, one in zip(Ranks(2).each(run), inputs, strict=True):
        slots, entries = expected(one)
        assert entries[2, 0] < 64
        slots[2, 0] ^= is_wrong
        assert torch.equal(out, slots) == (keep == "ours" or not is_wrong)
    each = [r for r in shadow.report() if r["patch"] == adapter.PATCH]
    assert len(each) == 2, "a cache for each rank"
    for found in each:
        assert found["calls"] == 1 and found["shape"] == {"rows": 9, "width": 192, "k": K, "fp4": 0}
        assert found["bad_calls"] == is_wrong and found["absolute_error_max"] == float(is_wrong)


# ---- who deals: the same answer on all ranks, from what all have alike


def alike(monkeypatch, **changes):
    """SGLang's state of a server of four cards, as `changes` says; what the adapter makes of it."""
    told = {"ranks": 4, "nodes": 1, "cards": 4, "capability": (12, 0), "model": True, "ep": 1, "dcp": None} | changes
    monkeypatch.setattr(torch.cuda, "device_count", lambda: told["cards"])
    capabilities = told["capability"] if isinstance(told["capability"], list) else [told["capability"]] * told["cards"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    monkeypatch.setattr(models_served, "serves_this_process", lambda: told["model"])
    monkeypatch.setattr(adapter, "_nodes", lambda: told["nodes"])
    state, tp = ModuleType(adapter.PARALLEL_STATE), SimpleNamespace(world_size=told["ranks"])
    state._TP = tp
    state.get_tp_group = lambda: told.get("tp", tp)
    state.get_attn_tp_group = lambda: told.get("attention", tp)
    state.get_moe_ep_group = lambda: SimpleNamespace(world_size=told["ep"])
    if told["dcp"] is not None:
        state._DCP = SimpleNamespace(world_size=told["dcp"])
    monkeypatch.setitem(sys.modules, adapter.PARALLEL_STATE, state)
    adapter.see_the_same_cards.cache_clear()
    adapter._tell.cache_clear()
    return tp, adapter._group()


@pytest.mark.parametrize(
    "told", [{}, {"ranks": 2}, {"ranks": 8, "cards": 8}, {"cards": 8}, {"dcp": 1}, {"ranks": 2, "cards": 2}], ids=str
)
def test_a_group_that_may_deal(told, monkeypatch):
    notes: dict = {}
    monkeypatch.setattr(report, "_notes", notes)
    tp, found = alike(monkeypatch, **told)
    assert found is tp
    describe, as_dict = notes[adapter.PATCH]
    assert f"dealt to {tp.world_size} cards" in describe()
    assert as_dict()["ranks"] == tp.world_size


@pytest.mark.parametrize(
    "told",
    [
        {"ranks": 1},
        {"ranks": 3},
        {"ranks": 16, "cards": 16},
        {"tp": "multiplexed"},
        {"attention": "a part"},
        {"ep": 4},
        {"dcp": 2},
        {"nodes": 2},
        {"cards": 1},
        {"cards": 3},
        {"capability": (9, 0)},
        {"capability": [(12, 0), (12, 0), (12, 0), (9, 0)]},
        {"model": False},
    ],
    ids=str,
)
def test_a_group_that_may_not(told, monkeypatch):
    notes: dict = {}
    monkeypatch.setattr(report, "_notes", notes)
    assert alike(monkeypatch, **told)[1] is None and notes == {}


def test_the_number_of_hosts_is_asked_where_the_release_has_it(monkeypatch):
    found = {adapter.CONTEXT: None, adapter.SERVER_ARGS: None}
    monkeypatch.setattr(adapter, "find_spec", lambda name: found[name])
    monkeypatch.setattr(adapter.importlib, "import_module", lambda name: found[name])
    old = SimpleNamespace(get_global_server_args=lambda: SimpleNamespace(nnodes=2))
    found[adapter.SERVER_ARGS] = old
    assert adapter._nodes() == 2  # 0.5.12, 0.5.13
    found[adapter.CONTEXT] = SimpleNamespace(get_parallel=None)
    assert adapter._nodes() == 2  # 0.5.14
    found[adapter.CONTEXT] = SimpleNamespace(get_server_args=lambda: SimpleNamespace(nnodes=1))
    assert adapter._nodes() == 1


@pytest.mark.parametrize(
    ("is_prompt", "more", "may_deal"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"enable_multi_stream": False, "skip_compressor": True}, True),
        (True, {"enable_multi_stream": True}, False),
    ],
)
def test_only_a_prompt_on_the_forwards_own_stream_is_dealt(is_prompt, more, may_deal, monkeypatch):
    seen = []
    monkeypatch.setattr(adapter, "_group", lambda: "a group")
    forward = adapter.replace_forward(lambda *args, **kwargs: seen.append((*told(), args, kwargs)))

    def told():
        return adapter._prompt.layer, adapter._prompt.known

    forward("self", "x", "q_lora", "c4_indexer", forward_batch=batch(is_prompt), **more)
    ((group, known, args, kwargs),) = seen
    assert group == ("a group" if may_deal else None) and adapter._prompt.layer is None
    assert bool(known["pairs"]) is may_deal
    assert args[:4] == ("self", "x", "q_lora", "c4_indexer") and kwargs == more


def test_pairs_are_counted_by_what_the_host_knows_of_the_lengths():
    rows, before = [8192, 1, 70], [16_384, 4000, 0]
    counted = sum((first + i + 1) // 4 for n, first in zip(rows, before, strict=True) for i in range(n))
    found = adapter._pairs(SimpleNamespace(extend_seq_lens_cpu=rows, extend_prefix_lens_cpu=before))
    assert abs(found - counted) <= sum(rows)
    tensors = SimpleNamespace(extend_seq_lens_cpu=torch.tensor(rows), extend_prefix_lens_cpu=torch.tensor(before))
    assert adapter._pairs(tensors) == found  # padded batches of 0.5.13 to 0.5.15
    assert adapter._pairs(SimpleNamespace(extend_seq_lens_cpu=None, extend_prefix_lens_cpu=None)) == 0


# ---- processes


def as_a_rank(rank, ranks, gather):
    """A prompt of a rank's, with torch's own all-gather between processes."""
    select_adapter.index_select = by_reference
    torch.cuda.is_current_stream_capturing = lambda: False
    device_gate.serves = lambda device: True
    op.dealt_slots, op.is_narrow, adapter.is_worth_it = slots_by_reference, lambda page_table: True, is_worth_it
    coordinator = SimpleNamespace(
        world_size=ranks, rank_in_group=rank, all_gather_into_tensor=torch.distributed.all_gather_into_tensor
    )
    inputs = inputs_of(13, rank=rank)
    return prompt(coordinator, inputs), expected(inputs)[0]


def test_processes_of_a_gloo_group_have_the_lists_of_the_whole_call(program_python):
    for out, whole in in_gloo(program_python(), 2, as_a_rank):
        assert torch.equal(out, whole)


# ---- batches as a scheduler makes them


def chunk(seed):
    """([tokens before, rows] of each request, rows that pad them): prompts, what a cache had of others, drafts that are
    verified, rows of a decode step among them; sometimes fewer rows than ranks."""
    draw = random.Random(seed)
    kinds = ((0, 9), (draw.randrange(64, 1500), 7), (draw.randrange(900), 1), (draw.randrange(256, 300), 4))
    requests = [(before, draw.randint(1, most)) for before, most in draw.choices(kinds, k=draw.randint(1, 5))]
    return requests, draw.randrange(4)


def inputs_of_chunk(requests, padding, seed, rank):
    """As SGLang has them: rows of length 1 on page 0 behind the last, pages in an order that only this rank has."""
    longest = tuple((before + rows) // adapter.TOKENS for before, rows in requests)
    made = make_inputs(Shape(len(requests), longest, spare_pages=2), seed=seed, device="cpu")
    moved = torch.randperm(len(made.k_pages), generator=torch.Generator().manual_seed(rank))
    is_page = made.page_table < len(moved)
    table = torch.where(is_page, moved[made.page_table.long().clamp_max(len(moved) - 1)], made.page_table.long())
    table = table.int().repeat_interleave(torch.tensor([rows for _, rows in requests]), dim=0)
    lengths = [(before + row + 1) // adapter.TOKENS for before, rows in requests for row in range(rows)]
    rows, generator = len(lengths) + padding, torch.Generator().manual_seed(seed)
    q, _ = make_queries(rows, False, generator)
    return dataclasses.replace(
        made,
        q=q,
        k_pages=made.k_pages[moved.argsort()],
        weights=torch.randn(rows, 64, generator=generator) * 0.01,
        lengths=torch.tensor(lengths + [1] * padding, dtype=torch.int32),
        page_table=torch.nn.functional.pad(table, (0, 0, 0, padding)),
    )


def chunks_as_a_rank(rank, ranks, gather, seeds):
    """(whether a chunk was dealt, whether its slots and entries are the whole call's) of each."""
    select_adapter.index_select = by_reference
    torch.cuda.is_current_stream_capturing = lambda: False
    device_gate.serves = lambda device: True
    op.dealt_slots, op.is_narrow = slots_by_reference, lambda page_table: page_table.shape[1] % 2 == 0
    gathered, found = [], []

    def all_gather_into_tensor(output, input):
        gathered.append(input)
        torch.distributed.all_gather_into_tensor(output, input)

    group = {"world_size": ranks, "rank_in_group": rank, "all_gather_into_tensor": all_gather_into_tensor}
    adapter._group = lambda: SimpleNamespace(**group)
    forward = adapter.replace_forward(select_adapter.replace_forward(Mixin.forward_c4_indexer))
    logits, topk = select_adapter.replace_logits(stock_logits), select_adapter.replace_topk(stock_topk)
    for seed in seeds:
        adapter.PAIR_NS = (300.0, 3000.0)[seed % 2]  # as if these were long prompts, and some at the border
        requests, padding = chunk(seed)
        inputs, told = inputs_of_chunk(requests, padding, seed, rank), batch()
        told.extend_prefix_lens_cpu, told.extend_seq_lens_cpu = map(list, zip(*requests, strict=True))
        raw, dealt = torch.full((len(inputs.q), K), -9, dtype=torch.int32), len(gathered)
        mixin = Mixin(logits, topk, inputs, raw=raw)
        forward(mixin, torch.zeros(1), None, SimpleNamespace(use_fp4_indexer=False), forward_batch=told)
        slots, entries = expected(inputs)
        found.append((len(gathered) > dealt, torch.equal(mixin.out, slots) and torch.equal(raw, entries)))
    return found


@pytest.mark.parametrize("on_the_cpu", ["both"], indirect=True)
@pytest.mark.parametrize("ranks", [2, 4])
def test_chunks_of_all_kinds_have_the_lists_of_the_whole_call_and_all_ranks_deal_or_none(ranks, program_python):
    seeds = range(24)
    found = in_gloo(program_python(), ranks, chunks_as_a_rank, seeds)
    assert all(one == found[0] for one in found)
    dealt, right = zip(*found[0], strict=True)
    assert all(right) and 8 < sum(dealt) < len(seeds)
    rows = {sum(n for _, n in chunk(seed)[0]) + chunk(seed)[1] for seed in seeds if dealt[seed]}
    assert min(rows) < ranks or ranks == 2
