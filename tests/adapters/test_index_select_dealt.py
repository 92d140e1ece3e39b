"""A prompt's index rows, dealt to ranks that are threads, with the reference in the operator's place: the lists of all
are those of the whole call; and when the ranks deal, which all must answer alike."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.settings import Settings
from deepseek_v4_sm120.sglang_patches import device_gate, models_served, shadow
from deepseek_v4_sm120.sglang_patches.adapters import index_select as select_adapter
from deepseek_v4_sm120.sglang_patches.adapters import index_select_dealt as adapter
from deepseek_v4_sm120.specs.index_select import Shape, make_inputs
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


class Ranks:
    """What the ranks of a group share: lists that meet."""

    def __init__(self, count: int):
        self.count, self.barrier, self.parts = count, threading.Barrier(count, timeout=60), [None] * count

    def of(self, rank: int) -> SimpleNamespace:
        def gather(output, input):
            assert output.is_contiguous() and input.is_contiguous()
            assert output.shape == (self.count * input.shape[0], input.shape[1])
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


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    scored.clear()

    def select(q, *args, **kwargs):
        scored.append(q.shape[0])
        by_reference(q, *args, **kwargs)

    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(select_adapter, "index_select", select)
    monkeypatch.setattr(select_adapter, "topk_select", topk_by_reference)
    monkeypatch.setattr(adapter, "ENTRIES", 64 * COLUMNS)
    monkeypatch.setattr(adapter, "PAIRS", 8 * 64 * COLUMNS)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(shadow, "_start_writer", lambda: None)
    adapter._see_the_same_cards.cache_clear()
    shadow.reset()
    yield
    adapter._see_the_same_cards.cache_clear()
    shadow.reset()


def batch(is_prompt=True):
    mode = SimpleNamespace(is_decode=lambda: not is_prompt, is_extend_without_speculative=lambda: is_prompt)
    return SimpleNamespace(forward_mode=mode)


def prompt(coordinator, inputs, *, raw=None, plan=None):
    """SGLang's flow of a prompt with both patches in it, where the group may deal; what it has put in its lists."""
    logits, topk = select_adapter.replace_logits(stock_logits), select_adapter.replace_topk(stock_topk)
    mixin = Mixin(lambda *args: logits(*args[:5], plan, *args[6:]), topk, inputs, raw=raw)
    indexer = SimpleNamespace(use_fp4_indexer=inputs.q_scales is not None)
    forward = select_adapter.replace_forward(Mixin.forward_c4_indexer)
    with adapter._prompt.enter(coordinator):
        forward(mixin, torch.zeros(1), None, indexer, batch())
    return mixin.out


def inputs_of(rows, fp4=False):
    lengths = tuple(5 + 29 * row % 180 for row in range(rows))
    return make_inputs(Shape(rows, lengths, fp4, rows_per_request=3, columns=COLUMNS), device="cpu")


@pytest.mark.parametrize(("ranks", "rows"), [(2, 8), (2, 9), (4, 8), (4, 11), (4, 13), (8, 16), (8, 9), (8, 23)])
def test_all_have_the_lists_of_the_whole_call(ranks, rows):
    inputs = inputs_of(rows)
    for out in Ranks(ranks).each(lambda coordinator: prompt(coordinator, inputs)):
        assert torch.equal(out, expected(inputs)[0])
    assert sorted(scored) == sorted(len(range(rank, rows, ranks)) for rank in range(ranks))


@pytest.mark.parametrize("rows", [8, 10])
@pytest.mark.parametrize("fp4", [False, True])
def test_entries_where_they_are_asked_for_and_the_fp4_cache(rows, fp4):
    inputs = inputs_of(rows, fp4)

    def run(coordinator):
        raw = torch.full((rows, K), -9, dtype=torch.int32)
        return prompt(coordinator, inputs, raw=raw), raw

    for slots, entries in Ranks(4).each(run):
        assert torch.equal(slots, expected(inputs)[0]) and torch.equal(entries, expected(inputs)[1])


def test_fewer_rows_than_ranks_and_lists_with_gaps_between_their_rows():
    """Not for what `who_deals` lets through: `deal` is right for any number."""
    for rows in (1, 3, 5):
        lists = torch.arange(rows * K, dtype=torch.int32).view(rows, K)

        def run(coordinator, lists=lists, rows=rows):
            out = torch.full((rows, 2 * K), -9, dtype=torch.int32)
            adapter.deal(coordinator, lambda own, out, none: out.copy_(lists[own]), out[:, :K], None)
            return out

        for out in Ranks(4).each(run):
            assert torch.equal(out[:, :K], lists) and out[:, K:].eq(-9).all()


def test_few_rows_few_entries_and_rows_that_a_schedule_cuts_are_not_dealt(monkeypatch):
    coordinator = SimpleNamespace(world_size=2)  # a gather would fail
    whole = inputs_of(8)
    with adapter._prompt.enter(coordinator):
        assert adapter.who_deals(8, 192) is coordinator
        assert adapter.who_deals(7, 192) is None and adapter.who_deals(100, 191) is None
        with monkeypatch.context() as context:
            context.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            assert adapter.who_deals(8, 192) is None
    assert adapter.who_deals(8, 192) is None
    assert torch.equal(prompt(coordinator, inputs_of(7)), expected(inputs_of(7))[0])
    assert torch.equal(prompt(coordinator, whole, plan=torch.zeros(1)), expected(whole)[0])
    assert torch.equal(prompt(None, whole), expected(whole)[0]) and scored == [7, 8, 8]


# ---- shadow mode


@pytest.mark.parametrize("keep", ["1", "ours"])
@pytest.mark.parametrize("is_wrong", [False, True])
def test_shadow_mode_has_the_whole_lists_beside(keep, is_wrong, monkeypatch):
    for module in (select_adapter, shadow):
        monkeypatch.setattr(module, "settings", lambda: Settings(shadow=keep))
    inputs, record, one_at_a_time = inputs_of(9), shadow.record, threading.Lock()

    def record_alone(*args, **kwargs):  # ranks are threads here, and share the table
        with one_at_a_time:
            record(*args, **kwargs)

    monkeypatch.setattr(shadow, "record", record_alone)

    def run(coordinator):
        gather = coordinator.all_gather_into_tensor

        def all_gather_into_tensor(output, input):
            gather(output, input)
            output[1, 0] += is_wrong  # the second row of rank 0: row 2

        coordinator.all_gather_into_tensor = all_gather_into_tensor
        return prompt(coordinator, inputs)

    out, _ = Ranks(2).each(run)
    wanted = expected(inputs)[0].clone()
    wanted[2, 0] += is_wrong
    assert torch.equal(out, wanted) == (keep == "ours" or not is_wrong)
    (found,) = [r for r in shadow.report() if r["patch"] == adapter.PATCH]
    assert found["calls"] == 2 and found["shape"] == {"rows": 9, "width": 192, "k": K, "fp4": 0}
    assert found["bad_calls"] == 2 * is_wrong and found["absolute_error_max"] == float(is_wrong)


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
    adapter._see_the_same_cards.cache_clear()
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
    assert f"dealt to {tp.world_size} cards from {adapter.ENTRIES} entries on" in describe()
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
    forward = adapter.replace_forward(lambda *args, **kwargs: seen.append((adapter._prompt.layer, args, kwargs)))
    forward("self", "x", "q_lora", "c4_indexer", forward_batch=batch(is_prompt), **more)
    ((group, args, kwargs),) = seen
    assert group == ("a group" if may_deal else None) and adapter._prompt.layer is None
    assert args[:4] == ("self", "x", "q_lora", "c4_indexer") and kwargs == more


# ---- processes


def as_a_rank(rank, ranks, gather):
    """A prompt of a rank's, with torch's own all-gather between processes."""
    select_adapter.index_select = by_reference
    torch.cuda.is_current_stream_capturing = lambda: False
    device_gate.serves = lambda device: True
    adapter.ENTRIES, adapter.PAIRS = 64 * COLUMNS, 8 * 64 * COLUMNS
    coordinator = SimpleNamespace(
        world_size=ranks, rank_in_group=rank, all_gather_into_tensor=torch.distributed.all_gather_into_tensor
    )
    inputs = inputs_of(13)
    return prompt(coordinator, inputs), expected(inputs)[0]


def test_processes_of_a_gloo_group_have_the_lists_of_the_whole_call(torch_python):
    for out, whole in in_gloo(torch_python(), 2, as_a_rank):
        assert torch.equal(out, whole)
