"""Prompts in halves that take turns: where a batch is cut, what the halves are, and that a model whose rows read what
earlier rows of their prompt have written gives the whole's numbers, by ranks that are threads."""

from __future__ import annotations

import gc
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.commands.plan import memory
from deepseek_v4_sm120.ops.shared import cuda_tensors
from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.adapters import prompt_passes
from deepseek_v4_sm120.sglang_patches.adapters import prompts_in_halves as adapter
from deepseek_v4_sm120.sglang_patches.adapters.mhc_owed_sum import OwedSum
from deepseek_v4_sm120.sglang_patches.adapters.prompts_in_halves import Cut
from tests.adapters.dealt_streams_model import Failed, Ranks, _this, among_cards

ROWS, PAGE, HIDDEN, LAYERS, CONTEXT = 32, 8, 4, 3, 256
PAGE_OF_ALL = adapter.PAGE


@pytest.fixture(autouse=True)
def state(monkeypatch):
    return in_halves(monkeypatch, ROWS, PAGE)


def in_halves(monkeypatch, rows, page):
    """The adapter as in a server whose passes all go in halves of so many rows."""
    found = among_cards(monkeypatch, adapter, rows)
    found._PP = SimpleNamespace(world_size=1)
    monkeypatch.setattr(adapter, "PAGE", page)
    monkeypatch.setattr(adapter, "least_rows", lambda: rows)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    return found


class Work:
    """A sum that is under way: x has it from `wait` on."""

    def __init__(self, x, terms):
        self._x, self._terms = x, terms
        x.fill_(-1)

    def wait(self):
        self._x.copy_(sum(self._terms))


def all_reduce(x, group, async_op):
    assert async_op and x.is_contiguous()
    return Work(x, group.meet("sum", x))


# ---- where


@pytest.mark.parametrize(
    ("lengths", "before", "rows", "request_", "offset", "is_within"),
    [
        ([8192], [0], 4096, 0, 4096, True),
        ([8192], [100], 3996, 0, 3996, True),  # at a multiple of a page of the prompt
        ([1024] * 8, [0] * 8, 4096, 3, 1024, False),
        ([100, 8092], [5, 7], 4189, 1, 4089, True),
        ([2, 8190], [0, 256], 4098, 1, 4096, True),
        ([4000, 200, 3992], [0, 0, 0], 4000, 0, 4000, False),  # near enough to the middle
        ([3000, 1000, 1000, 3192], [0] * 4, 4000, 1, 1000, False),
        ([200, 200], [0, 0], 200, 0, 200, False),
        ([20, 90, 10], [0, 250, 0], 26, 1, 6, True),
        ([20, 90, 10], [0, 0, 0], 20, 0, 20, False),  # the page is where a prompt begins
        ([20, 90, 10], [0, 166, 0], 20, 0, 20, False),  # or ends
        ([3584, 4608], [0, 0], 3584, 0, 3584, False),  # a sixteenth of the rows from the middle
        ([3583, 4609], [0, 0], 4095, 1, 512, True),
    ],
)
def test_where_a_batch_is_cut(monkeypatch, lengths, before, rows, request_, offset, is_within):
    monkeypatch.setattr(adapter, "PAGE", 256)
    cut = Cut(lengths, before)
    assert (cut.rows, cut.request, cut.offset, cut.is_within) == (rows, request_, offset, is_within)
    assert cut.whole == sum(lengths) and cut.least == min(rows, sum(lengths) - rows)


@pytest.mark.parametrize(
    ("lengths", "before", "at", "rows"),
    [
        ([40, 24], [3, 0], 40, 40),
        ([38, 26], [0, 0], 40, 38),
        ([64], [0], 32, 32),
        ([64], [3], 32, 29),
        ([20], [0], 40, 20),
    ],
)
def test_where_a_batch_is_cut_that_has_to_be_cut_at_a_row(lengths, before, at, rows):
    """By graphs: there, if it can be, however near the end of a prompt is."""
    cut = Cut(lengths, before, at)
    assert (cut.rows, cut.whole) == (rows, sum(lengths))


def test_a_page_is_sglangs_of_the_cache():
    assert PAGE_OF_ALL == memory.PAGE_TOKENS


def test_a_cut_is_near_the_middle_and_at_a_page_or_between_prompts():
    draw = torch.Generator().manual_seed(3)
    cuts = 0
    for _ in range(2000):
        count = int(torch.randint(1, 6, (1,), generator=draw))
        lengths = torch.randint(1, 300, (count,), generator=draw).tolist()
        before = torch.randint(0, 300, (count,), generator=draw).tolist()
        cut = Cut(lengths, before)
        if cut.least == 0:  # a single prompt that is shorter than a page or so
            continue
        cuts += 1
        inside = sum(lengths[: cut.request])
        assert cut.rows == inside + cut.offset and 0 < cut.offset <= lengths[cut.request]
        assert cut.is_within is (cut.offset < lengths[cut.request])
        if cut.is_within:
            assert (before[cut.request] + cut.offset) % PAGE == 0
            assert abs(cut.rows - cut.whole / 2) <= PAGE
    assert cuts > 1900


# ---- a model whose rows read earlier ones


class Backend:
    """Metadata: of each row the slots of its prompt up to itself, as the batch's lengths say."""

    hisparse_coordinator = None

    def __init__(self, pool):
        self.pool = pool
        self.model_runner = SimpleNamespace(is_draft_worker=False, model_config=SimpleNamespace(hidden_size=HIDDEN))
        self.online_c128_mtp = SimpleNamespace(enabled=lambda: False)
        self.forward_metadata = None
        self.token_to_kv_pool = SimpleNamespace()

    def init(self, batch):
        rows = []
        for index, length, extend, prefix, cpu in zip(
            batch.req_pool_indices.tolist(),
            batch.seq_lens.tolist(),
            batch.extend_seq_lens.tolist(),
            batch.extend_prefix_lens_cpu,
            batch.seq_lens_cpu.tolist(),
            strict=True,
        ):
            assert length == cpu == prefix + extend
            rows += [self.pool[index, : prefix + row + 1] for row in range(extend)]
        starts = torch.tensor([0, *batch.extend_seq_lens.tolist()]).cumsum(0)[:-1]
        assert torch.equal(batch.extend_start_loc, starts) and batch.batch_size == len(starts)
        assert len(rows) == len(batch.input_ids) == batch.extend_num_tokens == int(batch.num_token_non_padded)
        assert batch.seq_lens_sum == int(batch.seq_lens.sum()) and len(batch.rids) == len(starts)
        assert isinstance(batch.seq_lens_sum, int) and batch.extend_seq_lens_cpu == batch.extend_seq_lens.tolist()
        assert batch.extend_prefix_lens_cpu == batch.extend_prefix_lens.tolist()
        counts = (batch.global_num_token_non_padded, batch.num_token_non_padded_cpu)
        assert counts == (len(rows), len(rows)) and isinstance(counts[0], torch.Tensor)
        self.forward_metadata = rows


class Model:
    def __init__(self, backend, cache, coordinator, ends_at=None):
        self.backend, self.cache, self.coordinator, self.ends_at = backend, cache, coordinator, ends_at
        self.held = set()  # multiprocessors that kernels left to the sums

    def forward(self, input_ids, positions, batch, input_embeds, pp_proxy_tensors=None):
        rank, kept = self.coordinator.rank_in_group, []
        x = self.coordinator.all_reduce(input_ids[:, None].repeat(1, HIDDEN) * (rank + 1))
        for layer in range(LAYERS):
            assert torch.equal(batch.positions, positions) and torch.equal(batch.input_ids, input_ids)
            if self.ends_at == (layer, len(input_ids)):
                raise Failed
            self.held.add(cuda_tensors._held)
            self.cache[layer][batch.out_cache_loc] = x
            seen = torch.stack([self.cache[layer][slots].sum(0) for slots in self.backend.forward_metadata])
            x = self.coordinator.all_reduce(seen.remainder(97) * (rank + 1)).remainder(89)
            kept.append(x)
            x = self.coordinator.all_reduce(x * positions[:, None] * (rank + 2)).remainder(83)
        return (x * 3, None), kept


Model.forward_in_halves = adapter.replace_model_forward(Model.forward)
Backend.init_in_halves = adapter.replace_init_forward_metadata(Backend.init)


def batch_of(lengths, before, pool, mode="EXTEND", **further):
    rows = sum(lengths)
    requests = [5 - number for number in range(len(lengths))]
    spans = [(index, first, first + n) for index, n, first in zip(requests, lengths, before, strict=True)]
    whole = [n + first for n, first in zip(lengths, before, strict=True)]
    return SimpleNamespace(
        forward_mode=SimpleNamespace(name=mode),
        input_ids=torch.arange(rows).remainder(61),
        positions=torch.cat([torch.arange(first, end) for _, first, end in spans]),
        out_cache_loc=torch.cat([pool[index, first:end] for index, first, end in spans]),
        batch_size=len(lengths),
        req_pool_indices=torch.tensor(requests),
        seq_lens=torch.tensor(whole),
        seq_lens_cpu=torch.tensor(whole),
        seq_lens_sum=sum(whole),
        orig_seq_lens=torch.tensor(whole),
        extend_num_tokens=rows,
        extend_seq_lens=torch.tensor(lengths, dtype=torch.int32),
        extend_seq_lens_cpu=list(lengths),
        extend_prefix_lens=torch.tensor(before, dtype=torch.int32),
        extend_prefix_lens_cpu=list(before),
        extend_start_loc=torch.tensor([0, *lengths]).cumsum(0)[:-1].int(),
        extend_logprob_start_lens_cpu=[0] * len(lengths),
        num_token_non_padded=torch.tensor(rows),
        num_token_non_padded_cpu=rows,
        global_num_token_non_padded=torch.tensor(rows),
        rids=[str(index) for index in requests],
        lora_ids=None,
        mm_inputs=None,
        **further,
    )


POOL = torch.randperm(6 * CONTEXT, generator=torch.Generator().manual_seed(1)).view(6, CONTEXT)


def passes(coordinator, batches, in_halves, ends_at=None):
    """What the model gives for batches behind each other, and the rows of each sum."""
    backend = Backend(POOL)
    cache = torch.zeros(LAYERS, 6 * CONTEXT, HIDDEN, dtype=torch.long)
    model = Model(backend, cache, coordinator, ends_at)
    init = backend.init_in_halves if in_halves else backend.init
    forward = model.forward_in_halves if in_halves else model.forward
    found = []
    for lengths, before in batches:
        batch = batch_of(lengths, before, POOL)
        kept = {
            name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in vars(batch).items()
        }
        init(batch)
        whole = backend.forward_metadata
        (x, none), layers = forward(batch.input_ids, batch.positions, batch, None)
        assert none is None and backend.forward_metadata is whole and not hasattr(batch, adapter.PASS)
        assert not in_halves or sum(lengths) < 2 * ROWS or min(model.held) >= adapter.SUM_SMS
        model.held.clear()
        assert all(torch.equal(value, kept[n]) for n, value in vars(batch).items() if isinstance(value, torch.Tensor))
        found += [x, *layers, cache.clone()]
    return found, coordinator.calls


def of_this_rank(coordinator, *given, **further):
    """Threads of a rank's own know whose they are."""

    def all_reduce_of_the_rank(x):
        _this.coordinator = coordinator
        return type(coordinator).all_reduce(coordinator, x)

    coordinator.all_reduce = all_reduce_of_the_rank
    return passes(coordinator, *given, **further)


BATCHES = {
    "one prompt": [([100], [0])],
    "chunks of one": [([100], [0]), ([90], [100]), ([7], [190])],
    "prompts beside each other": [([20] * 4, [0] * 4), ([30, 30, 20], [20, 20, 20])],
    "one that is cut": [([20, 90, 10], [3, 0, 1])],
    "behind a prefix": [([10, 80], [0, 64]), ([70, 5], [10, 144])],
}


@pytest.mark.parametrize("batches", BATCHES.values(), ids=BATCHES)
def test_a_pass_in_halves_has_the_numbers_of_the_whole(batches):
    def body(coordinator):
        whole, _ = of_this_rank(coordinator, batches, False)
        coordinator.calls.clear()
        found, calls = of_this_rank(coordinator, batches, True)
        return all(map(torch.equal, whole, found)) and len(whole) == len(found), list(calls)

    for same, calls in Ranks(2).each(body):
        assert same
        expected = []
        for lengths, before in batches:
            cut = Cut(lengths, before)
            halves = [cut.rows, cut.whole - cut.rows] if cut.whole >= 2 * ROWS else [cut.whole]
            expected += [("sum", rows) for _ in range(1 + 2 * LAYERS) for rows in halves]
        assert calls == expected, "the halves' sums are in turns"
    big = [sum(lengths) for lengths, _ in batches if sum(lengths) >= 2 * ROWS]
    assert adapter._seen["passes"] == 2 * len(big) and adapter._seen["rows"] == 2 * sum(big) and not adapter._left
    assert adapter._seen["sums"] == 2 * len(big) * 2 * (1 + 2 * LAYERS)


@pytest.mark.parametrize("ends_at", [(0, 48), (1, 52), (2, 48)])
def test_what_a_half_raises_is_raised_and_the_next_pass_is_right(ends_at):
    batches = [([100], [0])]

    def body(coordinator):
        whole, _ = of_this_rank(coordinator, batches, False)
        with pytest.raises(Failed):
            of_this_rank(coordinator, batches, True, ends_at=ends_at)
        assert adapter._running.layer is None
        return all(map(torch.equal, whole, of_this_rank(coordinator, batches, True)[0]))

    assert Ranks(2).each(body) == [True, True] and cuda_tensors._held == 0


# ---- whether


class One:
    """A coordinator of two ranks."""

    world_size, ca_comm, device_group = 2, None, None
    all_reduce = staticmethod(lambda x: x)

    def is_symmetric_memory_enabled(self):
        return False


def why(*, lengths=(100,), before=None, mode="EXTEND", backend=None, **further):
    _this.coordinator = further.pop("coordinator", One())
    backend = backend or Backend(POOL)
    batch = batch_of(list(lengths), list(before or [0] * len(lengths)), POOL, mode)
    vars(batch).update(further)
    vars(backend)["init"] = lambda batch: None
    adapter.replace_init_forward_metadata(lambda self, batch: None)(backend, batch)
    return (*adapter._left, *(["in halves"] if hasattr(batch, adapter.PASS) else []))


def test_an_ordinary_batch_goes_in_halves():
    assert why() == ("in halves",)
    assert why(lora_ids=[None], mm_inputs=[None]) == ("in halves",)


@pytest.mark.parametrize("mode", ["MIXED", "DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2", "SPLIT_PREFILL", "IDLE"])
def test_other_modes_are_not_looked_at(mode):
    assert why(mode=mode) == ()


def test_under_torchs_compiler_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert why() == ()
    forward = adapter.replace_model_forward(lambda self, input_ids, *_, **__: len(input_ids))
    batch = batch_of([100], [0], POOL)
    setattr(batch, adapter.PASS, "a pass of another batch")
    assert forward(None, batch.input_ids, batch.positions, batch, None) == 100 and hasattr(batch, adapter.PASS)


@pytest.mark.parametrize("given", [{}, {"input_embeds": torch.zeros(100, HIDDEN)}, {"rows": 99}])
def test_a_pass_that_is_another_than_was_planned_goes_whole(given):
    """With all that the model was given."""

    def forward(self, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors=None):
        return len(input_ids), input_embeds, pp_proxy_tensors

    batch, rows = batch_of([100], [0], POOL), given.get("rows", 100)
    setattr(batch, adapter.PASS, SimpleNamespace(is_kept=False, rows=100, run=lambda model, whole: "in halves"))
    asked = batch.input_ids[:rows], batch.positions[:rows], batch, given.get("input_embeds")
    found = adapter.replace_model_forward(forward)(None, *asked, pp_proxy_tensors="others")
    assert found == ((rows, asked[3], "others") if given else "in halves")


def test_few_rows_and_drafts_are_not_looked_at():
    assert why(lengths=(2 * ROWS - 1,)) == ()
    assert why(extend_seq_lens_cpu=None) == why(extend_seq_lens_cpu=[]) == why(extend_prefix_lens_cpu=None) == ()
    draft = Backend(POOL)
    draft.model_runner.is_draft_worker = True
    assert why(backend=draft) == ()


OF_A_BATCH = {
    "rows behind those of its prompts": {"input_ids": torch.zeros(101, dtype=torch.long)},
    "a batch with input_embeds": {"input_embeds": torch.zeros(100, HIDDEN)},
    "a batch with encoder_swa_row_floor": {"encoder_swa_row_floor": torch.zeros(1), "encoder_swa_replay": False},
    "a batch with tbo_children, out_cache_loc_virtual": {"tbo_children": [1], "out_cache_loc_virtual": [2]},
    "a batch with global_num_tokens_cpu": {"global_num_tokens_cpu": [100]},
    "images": {"mm_inputs": [None, object()]},
    "adapters (LoRA)": {"lora_ids": ["one"]},
}


@pytest.mark.parametrize(("reason", "given"), OF_A_BATCH.items(), ids=OF_A_BATCH)
def test_what_keeps_a_pass_whole(reason, given):
    assert why(**given) == (reason,)


class Recorder:
    """SGLang's of the use of experts, one of which records."""


class Recording(Recorder):
    pass


@pytest.mark.parametrize("recorder", [Recorder(), Recording(), None])
@pytest.mark.parametrize("capturer", [None, object()])
def test_what_looks_at_experts_keeps_passes_whole(monkeypatch, capturer, recorder):
    """One takes rows for the first of a pass, the other a layer for one that runs once."""
    capturers = SimpleNamespace(get_global_experts_capturer=lambda: capturer)
    recorders = SimpleNamespace(
        get_global_expert_distribution_recorder=lambda: recorder, _ExpertDistributionRecorderReal=Recording
    )
    monkeypatch.setitem(sys.modules, adapter.CAPTURERS, capturers)
    monkeypatch.setitem(sys.modules, adapter.RECORDERS, recorders)
    returned = ("the experts of rows are returned (--enable-return-routed-experts)",)
    recorded = ("the use of experts is recorded (--expert-distribution-recorder-mode)",)
    others = recorded if isinstance(recorder, Recording) else ("in halves",)
    assert why() == (returned if capturer else others)


def test_nothing_of_a_pass_is_kept_by_a_cycle(state):
    """Metadata of halves are as large as the whole's: gone with the pass, whenever Python looks for cycles."""
    _this.coordinator = One()
    backend = Backend(POOL)
    vars(backend)["init"] = lambda batch: None

    def init(self, batch):
        self.forward_metadata = Recorder()

    batch = batch_of([100], [0], POOL)
    gc.disable()
    try:
        adapter.replace_init_forward_metadata(init)(backend, batch)
        alive = [weakref.ref(half.metadata) for half in getattr(batch, adapter.PASS).halves.both]
        assert all(one() is not None for one in alive)
        delattr(batch, adapter.PASS)
        assert [one() for one in alive] == [None, None]
    finally:
        gc.enable()


def test_a_batch_that_cannot_be_cut_near_its_middle(monkeypatch):
    monkeypatch.setattr(adapter, "PAGE", 256)
    assert why(lengths=(20, 60, 20)) == (f"no place to cut it into halves of {ROWS} rows",)
    adapter._left.clear()
    assert why(lengths=(23, 77)) == (f"no place to cut it into halves of {ROWS} rows",)
    adapter._left.clear()
    assert why(lengths=(24, 76)) == ("in halves",), "three quarters of them are enough"


def set_to(monkeypatch, **asked):
    made = SimpleNamespace(**{"reproducible": False, "shadow": 0, "choices": {}} | asked)
    for module in (adapter, prompt_passes):
        monkeypatch.setattr(module, "settings", lambda: made)


V41S = (
    ("pool", "request_window", object()),
    ("", "low_ratios", (1, 2)),
    ("", "enable_decoder_swa_bounded_replay", True),
)


def test_what_keeps_a_servers_passes_whole(state, monkeypatch):
    backend = Backend(POOL)
    backend.hisparse_coordinator = object()
    online = Backend(POOL)
    online.online_c128_mtp = SimpleNamespace(enabled=lambda: True)
    assert why(backend=backend) == ("a cache that is sparse on the host (HiSparse)",)
    adapter._left.clear()
    assert why(backend=online) == ("compressors with states of their own",)
    adapter._left.clear()
    for part, name, value in V41S:
        newer = Backend(POOL)
        setattr(newer.token_to_kv_pool if part else newer, name, value)
        assert why(backend=newer) == ("what DeepSeek-V4.1 keeps beside its metadata",)
        adapter._left.clear()
    alone = One()
    alone.world_size = 1
    assert why(coordinator=alone) == (), "one card is not asked"
    adapter._left.clear()
    state.experts = 2
    assert why() == ("expert parallelism",)
    state.experts = 1
    adapter._left.clear()
    set_to(monkeypatch, reproducible=True)
    assert why() == ("in halves",), "of two terms NCCL has the same order"
    four = One()
    four.world_size = 4
    assert why(coordinator=four) == (prompt_passes.ONE_ORDER,)
    adapter._left.clear()
    monkeypatch.setattr(models_served, "is_looked_into", lambda: True)
    assert why() == ("what modules return is looked at (--forward-hooks)",)


def test_sums_are_one_mechanisms(monkeypatch):
    set_to(monkeypatch, choices={"dealt_streams": "on"})
    assert why() == ("what has the same sums (dealt_streams)",)
    for off in ("off", "0"):
        set_to(monkeypatch, choices={"dealt_streams": off})
        adapter._left.clear()
        assert why() == ("in halves",)


def test_sums_that_sglangs_kernels_take_stay_theirs():
    """Asked of the smaller half's rows, which are the likelier ones."""
    coordinator, asked = One(), []
    coordinator.ca_comm = SimpleNamespace(disabled=False, should_custom_ar=lambda x: asked.append(x) or len(x) < 49)
    assert why(coordinator=coordinator) == ("others than NCCL sum",)
    assert [(tuple(x.shape), x.dtype) for x in asked] == [((48, HIDDEN), torch.bfloat16)]


def test_passes_that_are_captured_and_other_cards_are_left_whole(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert why() == ("under capture",)
    adapter._left.clear()
    counts = []
    monkeypatch.setattr(adapter, "see_the_same_cards", lambda count: bool(counts.append(count)))
    assert why() == (prompt_passes.OTHER_CARDS,) and counts == [One.world_size]


def test_what_is_summed_in_turns_are_a_halfs_rows():
    half, rows = adapter.Half(1, None, slice(3, 7)), torch.zeros(4, 2)
    assert half.sums(rows)
    assert not any(map(half.sums, (torch.zeros(4), rows[None], torch.zeros(5, 2), torch.zeros(2, 4).T, rows[:0])))


def test_other_sums_in_a_half_are_as_ever():
    coordinator, half = One(), adapter.Half(0, None, slice(0, 4))
    half.halves = SimpleNamespace(summed=lambda half, x: (half, x))
    coordinator.all_reduce = lambda x: ("as ever", x)
    prompt_passes.wrap_sums_of(coordinator, "gives_turns", adapter._sum_in_turn)
    other, rows = torch.ones(5, 2), torch.ones(4, 2)

    class Owed(OwedSum):
        def finish(self):
            return rows

    with adapter._running.enter(half):
        assert coordinator.all_reduce(other) == ("as ever", other)
        assert coordinator.all_reduce(Owed()) == (half, rows), "what a layer owes is put together in front of its sum"
    assert coordinator.all_reduce(rows) == ("as ever", rows)


@pytest.mark.parametrize("found", ["text", {"a": 1}, 3])
def test_what_is_no_tensor_is_not_put_together(found):
    with pytest.raises(TypeError, match=f"returned a {type(found).__name__}, .*prompts_in_halves=off"):
        adapter.together([(torch.zeros(1), found), (torch.zeros(1), found)])


def test_the_report_says_how_many_and_why_not():
    why()
    why(lora_ids=["one"])
    describe, found = report._notes[adapter.PATCH]
    assert describe() == (
        f"prompts_in_halves: 1 passes of {2 * ROWS} rows and more in halves that take turns; 1 whole: adapters (LoRA)"
    )
    assert found() == {"passes": 1, "rows": 100, "whole": {"adapters (LoRA)": 1}, "found": {}}


def test_kernels_leave_multiprocessors_to_the_sums(monkeypatch):
    monkeypatch.setattr(cuda_tensors, "_all_sms", lambda index: 132)
    with cuda_tensors.held(adapter.SUM_SMS):
        assert cuda_tensors.num_sms(0) == 132 - adapter.SUM_SMS
        with cuda_tensors.held(200):
            assert cuda_tensors.num_sms(0) == 1
    assert cuda_tensors.num_sms(0) == 132
