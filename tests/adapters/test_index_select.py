"""The adapter of SGLang's indexer, on the CPU: ops.index_select is replaced by the reference where it would launch."""

from __future__ import annotations

import functools
import hashlib
import types

import pytest
import torch

from deepseek_v4_sm120.reference import index_select as reference
from deepseek_v4_sm120.settings import Settings
from deepseek_v4_sm120.sglang_patches import device_gate, shadow
from deepseek_v4_sm120.sglang_patches.adapters import index_select as adapter
from deepseek_v4_sm120.specs.index_select import Shape, make_inputs

K = 64
LENGTHS = (100, 64, 3, 0, 190)


def by_reference(q, k_pages, weights, lengths, page_table, *, k, q_scales, rows_per_request, out, entries):
    calls.append(rows_per_request)
    slots, chosen = reference.index_select(q, k_pages, weights, lengths, page_table, k=k, q_scales=q_scales)
    out.copy_(slots)
    if entries is not None:
        entries.copy_(chosen)


def topk_by_reference(scores, lengths, *, k, logits):
    _, entries = reference.topk_select(scores, lengths, k=k)
    logits.copy_(scores.gather(1, entries.clamp_min(0).long()).masked_fill(entries < 0, -torch.inf))


calls: list[int] = []


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    calls.clear()
    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(adapter, "index_select", by_reference)
    monkeypatch.setattr(adapter, "topk_select", topk_by_reference)
    monkeypatch.setattr(shadow, "_start_writer", lambda: None)
    shadow.reset()
    yield
    shadow.reset()


def mode(monkeypatch, **values):
    for module in (adapter, shadow):
        monkeypatch.setattr(module, "settings", lambda: Settings(**values))


def stock_logits(q, cache, weights, lengths, page_table, schedule, width, clean_logits):
    """What SGLang's functions compute; unwritten beyond the length, here garbage that would win."""
    values, scales = q if isinstance(q, tuple) else (q, None)
    logits = reference.mqa_logits(values, cache, weights, lengths.reshape(-1), page_table, q_scales=scales)
    return torch.where(logits == -torch.inf, 1e30, logits).float()


def stock_topk(scores, seq_lens, page_tables, out, page_size, out_raw_indices=None):
    raw = out_raw_indices
    slots, entries = reference.topk_select(scores, seq_lens.reshape(-1), k=out.shape[1], page_table=page_tables)
    order = torch.randperm(out.shape[1]) if int(seq_lens.min()) > out.shape[1] else torch.arange(out.shape[1])
    out.copy_(slots[:, order])  # unordered where the row is longer than k
    if raw is not None:
        raw.copy_(entries[:, order])


def stock_topk_v2(scores, seq_lens, page_tables, out, page_size, metadata, out_raw_indices=None):
    stock_topk(scores, seq_lens, page_tables, out, page_size, out_raw_indices)


class Mixin:
    """SGLang's flow between the two functions, for one call."""

    def __init__(self, logits, topk, inputs, *, raw=None, plan=None, lengths=None):
        self.logits, self.topk, self.inputs, self.raw, self.plan = logits, topk, inputs, raw, plan
        self.lengths = inputs.lengths if lengths is None else lengths
        self.out = torch.full((inputs.q.shape[0], K), -9, dtype=torch.int32)

    def forward_c4_indexer(self, x, q_lora, c4_indexer, forward_batch, skip_compressor=False):
        i = self.inputs
        q = i.q if i.q_scales is None else (i.q, i.q_scales)
        width = 64 * i.page_table.shape[1]
        scores = self.logits(q, i.k_pages, i.weights, self.lengths, i.page_table, None, width, False)
        self.seen = scores
        plan = () if self.plan is None else (self.plan,)
        self.topk(scores, i.lengths, i.page_table, self.out, 64, *plan, self.raw)


def run(mixin, *, decode=True):
    batch = types.SimpleNamespace(forward_mode=types.SimpleNamespace(is_decode=lambda: decode))
    indexer = types.SimpleNamespace(use_fp4_indexer=mixin.inputs.q_scales is not None)
    adapter.replace_forward(Mixin.forward_c4_indexer)(mixin, torch.zeros(1), None, indexer, batch)
    return mixin.out


_expected = {}


def expected(inputs):
    """The reference's lists, worked out once for arguments of the same bits."""
    given = inputs.arguments()
    key = repr({name: digest_of(value) for name, value in given.items()})
    if key not in _expected:
        _expected[key] = reference.index_select(**given, k=K)
    return tuple(lists.clone() for lists in _expected[key])


def digest_of(value):
    if not isinstance(value, torch.Tensor):
        return value
    content = value.contiguous().view(torch.uint8).numpy()
    return value.dtype, value.shape, hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("fp4", [False, True])
@pytest.mark.parametrize("with_raw", [False, True])
def test_served_without_logits(fp4, with_raw):
    inputs = make_inputs(Shape(5, LENGTHS, fp4), device="cpu")
    raw = torch.full((5, K), -9, dtype=torch.int32) if with_raw else None
    logits, topk = adapter.replace_logits(stock_logits), adapter.replace_topk(stock_topk)
    mixin = Mixin(logits, topk, inputs, raw=raw)
    assert torch.equal(run(mixin), expected(inputs)[0])
    assert isinstance(mixin.seen, adapter.Deferred) and calls == [1]
    if with_raw:
        assert torch.equal(raw, expected(inputs)[1])


def test_version_2_with_its_plan_and_lengths_of_two_dimensions():
    inputs = make_inputs(Shape(5, LENGTHS), device="cpu")
    raw, plan = torch.full((5, K), -9, dtype=torch.int32), torch.zeros(5, 4, dtype=torch.int32)
    topk = adapter.replace_topk(stock_topk_v2)
    for given in (raw, None):
        mixin = Mixin(
            adapter.replace_logits(stock_logits), topk, inputs, raw=given, plan=plan, lengths=inputs.lengths[:, None]
        )
        assert torch.equal(run(mixin, decode=False), expected(inputs)[0])
    assert torch.equal(raw, expected(inputs)[1]) and calls == [adapter.SHARED_PAGES] * 2


def test_a_topk_that_takes_more_than_we_know_is_the_originals():
    """A later release's: what it means is in its own code alone."""
    seen = []

    def later(scores, seq_lens, page_tables, out, page_size, out_raw_indices=None, first_entry=0):
        seen.append((type(scores), first_entry))
        stock_topk(scores, seq_lens, page_tables, out, page_size, out_raw_indices)

    inputs = make_inputs(Shape(5, LENGTHS), device="cpu")
    topk = adapter.replace_topk(later)
    mixin = Mixin(adapter.replace_logits(stock_logits), functools.partial(topk, first_entry=7), inputs)
    assert torch.equal(run(mixin).sort(1).values, expected(inputs)[0].sort(1).values)
    assert isinstance(mixin.seen, adapter.Deferred) and seen == [(torch.Tensor, 7)] and calls == []


def test_outside_of_the_indexer_logits_are_the_originals():
    inputs = make_inputs(Shape(5, LENGTHS), device="cpu")
    mixin = Mixin(adapter.replace_logits(stock_logits), adapter.replace_topk(stock_topk), inputs)
    mixin.forward_c4_indexer(None, None, None, None)
    assert isinstance(mixin.seen, torch.Tensor) and calls == []
    assert adapter._forward.layer is None


def test_another_topk_gets_stock_logits():
    inputs = make_inputs(Shape(5, LENGTHS), device="cpu")
    mixin = Mixin(adapter.replace_logits(stock_logits), adapter.replace_other_topk(stock_topk), inputs)
    assert torch.equal(run(mixin), expected(inputs)[0])
    assert isinstance(mixin.seen, adapter.Deferred) and calls == []


def test_calls_that_we_do_not_know_are_the_originals(monkeypatch):
    inputs = make_inputs(Shape(5, LENGTHS), device="cpu")
    good = (inputs.q, inputs.k_pages, inputs.weights, inputs.lengths, inputs.page_table, None, 192, False)
    assert adapter.takes(good)
    for position, other in (
        (0, inputs.q[:, :, :32]),
        (0, inputs.q.float()),
        (1, inputs.k_pages[:, :32]),
        (1, inputs.k_pages[..., :68]),
        (2, inputs.weights.double()),
        (3, inputs.lengths.long()),
        (4, inputs.page_table.long()),
        (0, inputs.q[:, 0]),
        (0, inputs.q.expand(-1, 2, -1, -1)),
        (0, (inputs.q, inputs.weights)),
        (1, inputs.k_pages.view(torch.int8).to(torch.int16)),
        (1, inputs.k_pages[:, :, 0]),
    ):
        assert not adapter.takes((*good[:position], other, *good[position + 1 :])), position
    assert not adapter.takes(good[:7])
    monkeypatch.setattr(device_gate, "serves", lambda device: False)
    assert not adapter.takes(good)
    seen = []
    forward = adapter.replace_forward(lambda *args, **kwargs: seen.append((adapter._forward.layer, kwargs)))
    forward(None, torch.zeros(1), None, None, None, skip_compressor=True)
    assert seen == [(None, {"skip_compressor": True})]


@pytest.mark.parametrize(
    ("changes", "is_ours"),
    [
        ({}, True),
        ({"page_size": 32}, False),
        ({"out": torch.zeros(1, 1025, dtype=torch.int32)}, False),
        ({"out": torch.zeros(1, K, dtype=torch.int64)}, False),
        ({"seq_lens": torch.zeros(1, dtype=torch.int64)}, False),
        ({"page_tables": None}, False),
        ({"page_tables": torch.zeros(1, 4, dtype=torch.int64)}, False),
    ],
)
def test_which_selections_are_ours(changes, is_ours):
    given = {"seq_lens": torch.zeros(1, dtype=torch.int32), "page_tables": torch.zeros(1, 4, dtype=torch.int32)}
    given |= {"out": torch.zeros(1, K, dtype=torch.int32), "page_size": 64}
    assert adapter.takes_selection(**(given | changes)) is is_ours


def test_raw_indices_are_those_of_the_slots_shape():
    out, raw, plan = torch.zeros(5, K), torch.zeros(5, K), torch.zeros(5, 4)
    for rest, kwargs, found in (((), {}, None), ((raw,), {}, raw), ((plan, raw), {}, raw), ((plan, None), {}, None),
                                ((plan,), {}, None), ((plan,), {"out_raw_indices": raw}, raw)):  # fmt: skip
        assert adapter._raw_indices(rest, kwargs, out) is found


@pytest.mark.parametrize(("page_size", "k"), [(32, K), (64, 1025)])
def test_a_selection_that_we_do_not_make_gets_stock_logits(page_size, k):
    inputs, seen = make_inputs(Shape(1, (100,)), device="cpu"), []
    deferred = adapter.Deferred(inputs.q, None, inputs.k_pages, inputs.weights, 1, lambda *args: ("logits", args), (7,))
    out = torch.zeros(1, k, dtype=torch.int32)
    adapter.replace_topk(lambda *args: seen.append(args))(deferred, inputs.lengths, inputs.page_table, out, page_size)
    ((scores, *others),) = seen
    assert scores == ("logits", (7,)) and others[2] is out and others[3] == page_size


def deep_gemm(monkeypatch):
    package = types.ModuleType("deep_gemm")
    package.fp8_paged_mqa_logits = package.fp8_fp4_paged_mqa_logits = stock_logits
    monkeypatch.setitem(adapter.sys.modules, "deep_gemm", package)
    return package


@pytest.mark.parametrize(("force", "fp4", "deferred"), [(None, False, False), (None, True, True), ("ops", False, True)])
def test_deep_gemm_is_deferred_for_fp4_and_in_ops_mode_only(monkeypatch, force, fp4, deferred):
    mode(monkeypatch, force=force)
    package = deep_gemm(monkeypatch)
    inputs = make_inputs(Shape(5, LENGTHS, fp4), device="cpu")
    name = "fp8_fp4_paged_mqa_logits" if fp4 else "fp8_paged_mqa_logits"
    mixin = Mixin(lambda *args: getattr(package, name)(*args), adapter.replace_topk(stock_topk), inputs)
    assert torch.equal(run(mixin), expected(inputs)[0])
    assert isinstance(mixin.seen, adapter.Deferred) == deferred
    assert package.fp8_paged_mqa_logits is stock_logits and package.fp8_fp4_paged_mqa_logits is stock_logits


def test_deep_gemm_is_restored_with_the_last_of_two_forwards_at_once(monkeypatch):
    package, name = deep_gemm(monkeypatch), "fp8_paged_mqa_logits"
    one, other = (adapter._deferring_deep_gemm((name,)) for _ in range(2))
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert getattr(package, name).__wrapped__ is stock_logits
    other.__exit__(None, None, None)
    assert getattr(package, name) is stock_logits


# ---- shadow mode


def shadow_run(monkeypatch, keep, stock=stock_topk):
    mode(monkeypatch, shadow=keep)
    inputs = make_inputs(Shape(4, (300, 200, 170, 190)), device="cpu")
    raw = torch.full((4, K), -9, dtype=torch.int32)
    mixin = Mixin(adapter.replace_logits(stock_logits), adapter.replace_topk(stock), inputs, raw=raw)
    run(mixin)
    records = {r["patch"]: r for r in shadow.report()}
    return inputs, mixin.out, raw, records


@pytest.mark.parametrize("keep", ["1", "ours"])
def test_shadow_keeps_what_the_mode_says_and_finds_equal_sets(monkeypatch, keep):
    inputs, out, raw, records = shadow_run(monkeypatch, keep)
    slots, entries = expected(inputs)
    assert torch.equal(out, slots) == (keep == "ours") and torch.equal(out.sort(1).values, slots.sort(1).values)
    assert torch.equal(raw, entries) == (keep == "ours")
    record = records[adapter.PATCH]
    assert record["calls"] == 1 and record["bad_calls"] == 0 and record["absolute_error_max"] == 0
    assert record["shape"] == {"rows": 4, "width": 320, "k": K, "fp4": 0}
    assert records[adapter.WITHIN_TOLERANCE]["absolute_error_max"] == 0


def test_shadow_counts_entries_that_differ(monkeypatch):
    def wrong(scores, seq_lens, page_tables, out, page_size, out_raw_indices=None):
        stock_topk(scores, seq_lens, page_tables, out, page_size, out_raw_indices)
        ascending = scores[2, : int(seq_lens[2])].argsort()
        for place, entry in enumerate(ascending[:3].tolist()):  # the three least in the place of three chosen
            best = int(ascending[-1 - place])
            where = (out[2] == page_tables[2, best // 64] * 64 + best % 64).nonzero()[0, 0]
            out[2, where] = page_tables[2, entry // 64] * 64 + entry % 64

    _, _, _, records = shadow_run(monkeypatch, "1", wrong)
    record = records[adapter.PATCH]
    assert record["bad_calls"] == 1 and record["absolute_error_max"] == 3
    assert records[adapter.WITHIN_TOLERANCE]["absolute_error_max"] == 0


def test_an_entry_chosen_twice_is_one_too_few():
    scores, lengths = torch.tensor([[10.0, 5.0, 4.0, 1.0]]), torch.full((1,), 4, dtype=torch.int32)
    stock = torch.tensor([[2, 0, 1, -1]], dtype=torch.int32)
    for ours, wrong in (((0, 1, 2, -1), 0), ((0, 1, 1, -1), 1), ((0, 0, 0, -1), 2)):
        entries = torch.tensor([ours], dtype=torch.int32)
        assert adapter.compare_sets(scores, lengths, entries, entries, stock)[0].tolist() == [wrong]
    few, lengths = torch.tensor([[0, -1, -1, -1]], dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    assert adapter.compare_sets(scores, lengths, few, few, few)[0].tolist() == [0]  # -1 is no entry


def test_sets_near_the_threshold_and_of_other_sizes():
    scores = torch.tensor([[10.0, 5.0, 4.999, 1.0], [10.0, 5.0, 4.0, 1.0], [10.0, 5.0, 4.0, 1.0]])
    lengths = torch.full((3,), 4, dtype=torch.int32)
    ours = torch.tensor([[0, 2], [0, 2], [0, 1]], dtype=torch.int32)
    stock = torch.tensor([[1, 0], [1, 0], [0, -1]], dtype=torch.int32)
    wrong, tolerated = adapter.compare_sets(scores, lengths, ours, ours, stock)
    assert wrong.tolist() == [0, 1, 1] and tolerated.tolist() == [1, 0, 1]
