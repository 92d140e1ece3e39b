"""A made model whose layers ask for two sums each, whole and in halves: the same results, the sums of all ranks in one
order, every sum waited for, errors of either half; and when a batch is left whole."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.ops.shared import cuda_tensors
from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.settings import Settings
from deepseek_v4_sm120.sglang_patches.adapters import alike
from deepseek_v4_sm120.sglang_patches.adapters import halves as adapter
from tests.adapters.test_halves_batch import batch_of
from tests.adapters.test_turns import LIMIT_S, within
from tests.ops.all_reduce_emulated import in_gloo

LAYERS, POISON, SLOTS = 3, -(1 << 40), 12_000
BATCHES = {
    "one prompt": ([5000], [0]),
    "behind a prefix": ([2100], [4096]),
    "eight prompts": ([300] * 8, [0] * 8),
    "ragged": ([700, 3, 900, 1500], [0, 256, 31, 512]),
}


class Attention:
    """DeepseekV4AttnBackend, as far as the adapter asks it: its metadata is the batch that it is of."""

    hisparse_coordinator = None

    def __init__(self):
        self.forward_metadata, self.made = "of the whole", []

    def init_forward_metadata(self, batch):
        self.forward_metadata = batch
        self.made.append(batch)


CARD_SMS = 188


class Coordinator:
    """The group of the ranks. A sum is on its way until it is waited for: who looks before finds POISON."""

    world_size = 2

    def __init__(self, rank=0, add=None):
        self.rank, self.rows, self.threads, self.under_way = rank, [], [], []
        self.add = add or (lambda x: x.mul_(3))

    def all_reduce(self, input_):
        self.rows.append(input_.shape[0])
        self.threads.append(threading.current_thread())
        self.add(input_)
        return input_

    def start_beside(self, call):
        found = call()
        hidden = found.clone()
        found.fill_(POISON)
        self.under_way.append(found)

        def wait():
            found.copy_(hidden)
            self.under_way.pop(next(i for i, x in enumerate(self.under_way) if x is found))

        return found, wait


class Model:
    """Integers, so that every result is exact. A token's attention is the sum of its request's entries so far, in the
    layer's cache, at the places that the batch says."""

    def __init__(self, coordinator, attention):
        self.coordinator, self.attention, self.pp_group = coordinator, attention, SimpleNamespace(world_size=1)
        self.cache = torch.arange(LAYERS * 9 * SLOTS).view(LAYERS, 9, SLOTS) % 97
        self.fails, self.sms = (lambda batch, layer: None), set()

    def sum(self, x):
        return self.coordinator.all_reduce(x * (5 + self.coordinator.rank))

    def forward(self, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors=None):
        assert torch.equal(input_ids, forward_batch.input_ids) and torch.equal(positions, forward_batch.positions)
        x = self.sum(input_ids.clone())
        for layer in range(LAYERS):
            if isinstance(self.attention.forward_metadata, SimpleNamespace):
                assert self.attention.forward_metadata is forward_batch, "the other half's"
            places = forward_batch.out_cache_loc
            self.cache[layer, places // 1_000_000, places % 1_000_000] = x
            seen, start = torch.empty_like(x), 0
            asked = zip(
                *(forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist()),
                *(forward_batch.extend_prefix_lens.tolist(), forward_batch.extend_seq_lens_cpu),
                strict=True,
            )
            for request, end, prefix, length in asked:
                assert end == prefix + length
                seen[start : start + length] = self.cache[layer, request - 50, :end].cumsum(0)[prefix:]
                start += length
            x = (x + self.sum(seen)) % 10_007
            self.fails(forward_batch, layer)
            self.sms.add(cuda_tensors.stream_sms(0, 0))
            x = (x + self.sum(x * x + positions + layer)) % 10_007
        return (x, torch.stack((x, positions), 1)), [x + 1, x + 2]


@pytest.fixture(autouse=True)
def here(monkeypatch):
    return in_place(monkeypatch.setattr, monkeypatch.setitem)


def in_place(put, put_item):
    """SGLang's modules as far as the adapter asks them, of a server of two cards; its parts, to be changed."""
    attention, told = Attention(), SimpleNamespace(**dict.fromkeys(adapter.OTHERS))
    modules = {
        adapter.FORWARD_CONTEXT: {"get_attn_backend": lambda: attention},
        adapter.BACKEND: {"DeepseekV4AttnBackend": Attention},
        adapter.MODEL: {"get_is_capture_mode": lambda: False, "is_in_breakable_cuda_graph": lambda: False},
        adapter.ENVIRON: {"envs": SimpleNamespace(SGLANG_OPT_USE_ONLINE_COMPRESS=SimpleNamespace(get=lambda: False))},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        put_item(sys.modules, name, module)
    put(alike, "tensor_parallel_group", lambda: "the group")
    put(alike, "server_arguments", lambda: told)
    put(torch.cuda, "is_current_stream_capturing", lambda: False)
    put(report, "_notes", {})
    put(cuda_tensors.extension, "load", lambda: SimpleNamespace(stream_sms=lambda stream, sms: sms))
    put(cuda_tensors, "num_sms", lambda index: CARD_SMS)
    adapter._seen.clear()
    return SimpleNamespace(attention=attention, arguments=told, modules=modules)


def patched(put, coordinator, attention):
    """A model with both patches in place; its forward, and that without."""
    put(adapter, "_start_beside", coordinator.start_beside)
    whole, halves = Model(coordinator, attention), Model(coordinator, attention)
    replaced = adapter.replace_all_reduce(Coordinator.all_reduce)
    halves.coordinator = SimpleNamespace(
        rank=coordinator.rank, world_size=2, all_reduce=lambda x: replaced(coordinator, x)
    )
    return whole, halves, adapter.replace_model_forward(Model.forward)


def asked(forward, model, batch, **more):
    arguments = {"input_embeds": None, "pp_proxy_tensors": None} | more
    return within(LIMIT_S, lambda: forward(model, batch.input_ids, batch.positions, batch, **arguments))


def tensors(found):
    (x, streams), aux = found
    assert isinstance(found, tuple) and isinstance(found[0], tuple) and isinstance(aux, list)
    return [x, streams, *aux]


@pytest.mark.parametrize("name", BATCHES)
def test_in_halves_as_whole(name, here, monkeypatch):
    lengths, prefixes = BATCHES[name]
    coordinator = Coordinator()
    whole, halves, forward = patched(monkeypatch.setattr, coordinator, here.attention)
    batch = batch_of(lengths, prefixes)
    expected = tensors(asked(Model.forward, whole, batch))
    rows = sum(lengths)
    assert coordinator.rows == [rows] * (1 + 2 * LAYERS)
    coordinator.rows.clear(), coordinator.threads.clear()
    found = tensors(asked(forward, halves, batch))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(whole.cache, halves.cache)
    first = here.attention.made[0].extend_num_tokens
    assert coordinator.rows == [first, rows - first] * (1 + 2 * LAYERS), "the sums are strictly in turn"
    assert len(set(coordinator.threads)) == 2 and coordinator.under_way == []
    assert here.attention.forward_metadata == "of the whole"
    assert adapter._seen == {"forwards": 1, "rows": rows}
    assert whole.sms == {CARD_SMS} and halves.sms == {CARD_SMS - adapter.SUM_SMS}, "left to the sums, in both halves"
    assert cuda_tensors.stream_sms(0, 0) == CARD_SMS


def as_a_rank(rank, ranks, gather):
    """Every batch whole and in halves, with gloo's sums; what was summed, and whether the results are the same."""
    parts = in_place(setattr, lambda mapping, name, value: mapping.__setitem__(name, value))
    found = []
    for lengths, prefixes in BATCHES.values():
        coordinator = Coordinator(rank, torch.distributed.all_reduce)
        whole, halves, forward = patched(setattr, coordinator, parts.attention)
        batch = batch_of(lengths, prefixes)
        expected = tensors(asked(Model.forward, whole, batch))
        coordinator.rows.clear()
        same = all(map(torch.equal, tensors(asked(forward, halves, batch)), expected))
        found.append((same, expected[0].sum().item(), coordinator.rows))
    return found


def test_ranks_of_a_gloo_group_sum_in_one_order_and_have_what_the_whole_has():
    one, other = in_gloo(2, as_a_rank)
    assert one == other and len(one) == len(BATCHES)
    for same, total, rows in one:
        assert same and total and len(rows) == 2 * (1 + 2 * LAYERS)


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_an_error_of_either_half_is_raised_and_leaves_nothing_behind(half, layer, here, monkeypatch):
    coordinator = Coordinator()
    _, model, forward = patched(monkeypatch.setattr, coordinator, here.attention)

    def fails(batch, at):
        if at == layer and batch is here.attention.made[half]:
            raise ValueError(f"of half {half}, layer {layer}")

    model.fails = fails
    with pytest.raises(ValueError, match=f"of half {half}, layer {layer}"):
        asked(forward, model, batch_of([4096]))
    assert here.attention.forward_metadata == "of the whole" and coordinator.under_way == []
    assert adapter._running.hand_over is None and adapter._seen == {}
    model.fails = lambda batch, at: None
    here.attention.made.clear()
    expected = tensors(asked(Model.forward, Model(Coordinator(), here.attention), batch_of([4096])))
    assert all(map(torch.equal, tensors(asked(forward, model, batch_of([4096]))), expected)), "the next one is as ever"


def test_an_error_of_the_metadata_is_raised_before_any_layer(here, monkeypatch):
    coordinator = Coordinator()
    _, model, forward = patched(monkeypatch.setattr, coordinator, here.attention)

    def refuse(batch):
        raise RuntimeError("no metadata")

    monkeypatch.setattr(here.attention, "init_forward_metadata", refuse)
    with pytest.raises(RuntimeError, match="no metadata"):
        asked(forward, model, batch_of([4096]))
    assert coordinator.rows == [] and here.attention.forward_metadata == "of the whole"


# ---- when a batch is left whole


def changes(**what):
    return what


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("mode MIXED", changes(batch={"forward_mode": SimpleNamespace(name="MIXED")})),
        ("mode TARGET_VERIFY", changes(batch={"forward_mode": SimpleNamespace(name="TARGET_VERIFY")})),
        ("shadow mode", changes(settings=Settings(shadow="1"))),
        ("dealt_index", changes(settings=Settings(choices={"dealt_index": "on"}))),
        ("a graph", changes(capturing=True)),
        ("a graph", changes(model={"get_is_capture_mode": lambda: True})),
        ("a graph", changes(model={"is_in_breakable_cuda_graph": lambda: True})),
        ("embeddings", changes(call={"input_embeds": torch.zeros(1)})),
        ("embeddings", changes(call={"pp_proxy_tensors": object()})),
        ("embeddings", changes(pp=2)),
        ("without seq_lens_cpu", changes(batch={"seq_lens_cpu": None})),
        ("a padded batch", changes(batch={"out_cache_loc": torch.zeros(5000)})),
        ("a padded batch", changes(batch={"extend_seq_lens_cpu": [4095]})),
        ("a batch with tbo_children", changes(batch={"tbo_children": [1, 2]})),
        ("attention by Another", changes(attention=type("Another", (Attention,), {})())),
        ("hisparse", changes(hisparse=object())),
        ("SGLANG_OPT_USE_ONLINE_COMPRESS", changes(online=True)),
        ("enable_return_routed_experts", changes(arguments={"enable_return_routed_experts": True})),
        ("enable_two_batch_overlap", changes(arguments={"enable_two_batch_overlap": True})),
        ("expert_distribution_recorder_mode", changes(arguments={"expert_distribution_recorder_mode": "stat"})),
        ("no group", changes(group=None)),
    ],
)
def test_a_batch_that_is_left_whole(why, change, here, monkeypatch):
    coordinator = Coordinator()
    _, model, forward = patched(monkeypatch.setattr, coordinator, here.attention)
    batch = batch_of([4096])
    vars(batch).update(change.get("batch", {}))
    vars(here.arguments).update(change.get("arguments", {}))
    model.pp_group.world_size = change.get("pp", 1)
    here.attention.hisparse_coordinator = change.get("hisparse")
    for name, value in change.get("model", {}).items():
        monkeypatch.setattr(sys.modules[adapter.MODEL], name, value)
    if "attention" in change:
        monkeypatch.setattr(sys.modules[adapter.FORWARD_CONTEXT], "get_attn_backend", lambda: change["attention"])
    if "online" in change:
        envs = sys.modules[adapter.ENVIRON].envs
        monkeypatch.setattr(envs.SGLANG_OPT_USE_ONLINE_COMPRESS, "get", lambda: True)
    if "group" in change:
        monkeypatch.setattr(alike, "tensor_parallel_group", lambda: None)
    if "settings" in change:
        monkeypatch.setattr(adapter, "settings", lambda: change["settings"])
    if "capturing" in change:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    seen = []
    forward = adapter.replace_model_forward(lambda *given: seen.append(given) or "the original's")
    arguments = {"input_embeds": None, "pp_proxy_tensors": None} | change.get("call", {})
    given = (model, batch.input_ids, batch.positions, batch, *arguments.values())
    assert forward(*given) == "the original's" and all(a is b for a, b in zip(seen[0], given, strict=True))
    ((said, count),) = adapter._seen.items()
    assert why in said and count == 1 and here.attention.made == []
    describe, found = report._notes[adapter.PATCH]
    assert f"1 whole: {said}" in describe() and found() == {said: 1}


@pytest.mark.parametrize("rows", [1, 8, 2047])
def test_few_rows_are_not_even_asked_about(rows, monkeypatch):
    monkeypatch.setattr(adapter, "_why_whole", None)
    forward = adapter.replace_model_forward(lambda *given: given)
    batch = batch_of([rows])
    assert forward("model", batch.input_ids, batch.positions, batch, None)[1] is batch.input_ids
    assert forward("model", None, batch.positions, batch, None)[1] is None
    assert adapter._seen == {}


def test_an_argument_that_a_release_has_no_more_leaves_batches_whole(here):
    del here.arguments.enable_eplb
    batch = batch_of([4096])
    model = SimpleNamespace(pp_group=SimpleNamespace(world_size=1))
    assert "enable_eplb" in adapter._why_whole(model, batch.input_ids, batch.positions, batch, None, None)


def test_sums_outside_of_halves_and_of_one_rank_are_the_originals(monkeypatch):
    monkeypatch.setattr(adapter, "_start_beside", None)
    all_reduce = adapter.replace_all_reduce(lambda self, input_: (self, input_))
    group = SimpleNamespace(world_size=2)
    assert all_reduce(group, "x") == (group, "x")
    monkeypatch.setattr(adapter._running, "hand_over", lambda: None)
    alone = SimpleNamespace(world_size=1)
    assert all_reduce(alone, "x") == (alone, "x")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert all_reduce(group, "x") == (group, "x")


def test_a_report_is_written_at_powers_of_two(monkeypatch):
    written = []
    monkeypatch.setattr(report, "write", lambda: written.append(adapter._seen["forwards"]))
    for _ in range(9):
        adapter._seen["rows"] += 4096
        adapter._count("forwards")
    assert written == [1, 2, 4, 8]
    describe, found = report._notes[adapter.PATCH]
    assert describe() == "halves: 9 chunks of 2048 rows and more in halves, 36864 rows"
    assert found() == {"forwards": 9, "rows": 36864}


@pytest.mark.parametrize("found", ["text", {"a": 1}, None])
def test_what_is_no_tensor_is_not_joined(found):
    with pytest.raises(TypeError, match=f"tensors, in tuples or lists; got {type(found).__name__}"):
        adapter._joined([(torch.zeros(1), found), (torch.zeros(1), found)])


# ---- the stream beside


def test_a_sum_waits_for_the_products_before_it_and_the_products_for_the_sum(monkeypatch):
    did = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            did.append(f"{self.name} waits for {other.name}")

        def record_event(self):
            did.append(f"{self.name} records")
            return "the sum"

        def wait_event(self, event):
            did.append(f"{self.name} waits for {event}")

    class On:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            did.append(f"on {self.stream.name}")

        def __exit__(self, *_):
            did.append("off it")

    beside = Stream("side")
    monkeypatch.setattr(adapter, "_stream", lambda: beside)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("products"))
    monkeypatch.setattr(torch.cuda, "stream", On)
    found, wait = adapter._start_beside(lambda: did.append("summed") or "x")
    assert found == "x"
    wait()
    assert did == [
        *("side waits for products", "on side", "summed", "off it", "side records"),
        "products waits for the sum",
    ]
