"""Prompts in halves within SGLang's breakable graphs, by the release's own capture. A graph is the operators that torch
ran, done again; ranks are threads; and the rows of the model read what earlier rows of their prompt have written."""

import ast
import contextlib
import contextvars
import copy
import functools
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepseek_v4_sm120.ops.shared import cuda_tensors
from deepseek_v4_sm120.sglang_patches.adapters import halves_in_graphs as adapter
from deepseek_v4_sm120.sglang_patches.adapters import prompts_in_halves as eager
from tests.adapters.dealt_streams_model import Ranks, _this
from tests.adapters.test_prompts_in_halves import CONTEXT, HIDDEN, LAYERS, POOL, One, batch_of, in_halves
from tests.patching.test_wheel_wo_a import definition
from tests.patching.wheels import WheelSources, content, every_release, fetch

FIRST, ROWS, PAGE = "0.5.23", 16, 8
GRAPH = 64  # rows of a captured pass
NOWHERE = 6 * CONTEXT  # where padded rows are written
_context = contextvars.ContextVar("context")
CONTEXT_OF, WEAK_OF = adapter._context, adapter._weak


class Graph:
    """torch.cuda.CUDAGraph on the CPU: what ran between begin and end, which CUDA wants in one thread."""

    def capture_begin(self, pool=None, capture_error_mode="global"):
        assert not is_capturing.get()[0], "another graph is under capture"
        is_capturing.get()[0] = True
        self.thread, self.mode = threading.get_ident(), Recorder()
        self.mode.__enter__()

    def capture_end(self):
        assert threading.get_ident() == self.thread, "a capture ends in the thread that began it"
        self.mode.__exit__(None, None, None)
        is_capturing.get()[0] = False

    def replay(self):
        for function, arguments, named, found in self.mode.ran:
            again = function(*arguments, **named)
            if isinstance(found, torch.Tensor) and again.data_ptr() != found.data_ptr():
                found.copy_(again)


is_capturing = contextvars.ContextVar("is_capturing")  # of a rank: a list of one


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ran = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        found = function(*arguments, **(named or {}))
        self.ran.append((function, arguments, named or {}, found))
        return found


@pytest.fixture
def sglang(monkeypatch, version):
    """SGLang's module of breakable graphs, on the CPU."""
    in_halves(monkeypatch, ROWS, PAGE)
    cuda_utils = ModuleType("cuda_utils")
    cuda_utils.checkCudaErrors = None
    package = adapter.BREAKABLE.rpartition(".")[0]
    monkeypatch.setitem(sys.modules, f"{package}.cuda_utils", cuda_utils)
    utils = ModuleType("sglang.srt.utils")
    device = SimpleNamespace(
        current_stream=lambda *device: None, Stream=SimpleNamespace(wait_stream=lambda stream, other: None)
    )
    vars(utils).update(get_device_module=lambda: device, is_hip=lambda: False, is_xpu=lambda: False)
    monkeypatch.setitem(sys.modules, "sglang.srt.utils", utils)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    found = ModuleType(adapter.BREAKABLE)
    path = adapter.BREAKABLE.replace(".", "/") + ".py"
    exec(compile(content(fetch(version), path), path, "exec"), vars(found))
    vars(found)["_weak_ref_if_tensor"] = lambda x: x
    monkeypatch.setitem(sys.modules, adapter.BREAKABLE, found)
    monkeypatch.setattr(adapter, "_context", _context.get)
    monkeypatch.setattr(adapter, "_weak", lambda x: x)
    return found


class Metadata:
    """Captured kernels and breaks have this object; a replay writes into it."""

    def __init__(self, rows):
        self.rows = rows


class Backend:
    hisparse_coordinator, forward_metadata = None, None
    online_c128_mtp, token_to_kv_pool = SimpleNamespace(enabled=lambda: False), SimpleNamespace()
    model_runner = SimpleNamespace(is_draft_worker=False, model_config=SimpleNamespace(hidden_size=HIDDEN))

    def rows_of(self, batch):
        lengths, before = batch.extend_seq_lens.tolist(), batch.extend_prefix_lens_cpu
        assert batch.seq_lens.tolist() == [n + first for n, first in zip(lengths, before, strict=True)]
        return [
            POOL[index, : first + row + 1]
            for index, n, first in zip(batch.req_pool_indices.tolist(), lengths, before, strict=True)
            for row in range(n)
        ]

    def init(self, batch):
        self.forward_metadata = Metadata(self.rows_of(batch))

    def init_for_capture(self, batch):
        self.forward_metadata = Metadata([torch.tensor([NOWHERE])] * len(batch.input_ids))
        return self.forward_metadata

    def init_for_replay(self, captured, batch, *, static_forward_batch=None):
        captured.rows = self.rows_of(batch)
        assert len(captured.rows) == batch.extend_num_tokens == static_forward_batch.global_num_token_non_padded_cpu
        assert static_forward_batch.extend_num_tokens == len(captured.rows) == int(batch.num_token_non_padded)
        self.forward_metadata = captured
        return captured


Backend.init_for_capture_in_halves = adapter.replace_init_for_capture(Backend.init_for_capture)
Backend.init_for_replay_in_halves = adapter.replace_init_for_replay(Backend.init_for_replay)
Backend.init_in_halves = eager.replace_init_forward_metadata(Backend.init)


class Model:
    """Whose attention is a break, as SGLang's. counts: of each layer the batch's rows that are no padding."""

    def __init__(self, sglang, backend, coordinator):
        self.backend, self.coordinator, self.held, self.counted = backend, coordinator, set(), []
        self.look, self.fails, self.has_more = sglang.eager_on_graph(True)(self.looked_at), False, False
        self.cache = torch.zeros(LAYERS, NOWHERE + 1, HIDDEN, dtype=torch.long)
        self.attention = sglang.eager_on_graph(True)(self.attend)

    def attend(self, x, out, layer):
        batch, slots = _context.get().forward_batch, self.backend.forward_metadata.rows
        real = batch.global_num_token_non_padded_cpu
        assert len(slots) == real <= len(x) and batch.extend_num_tokens == batch.num_token_non_padded_cpu == real
        assert int(batch.num_token_non_padded) == real
        assert sum(batch.extend_seq_lens_cpu) == real and batch.batch_size == len(batch.seq_lens) == len(batch.rids)
        assert batch.seq_lens_sum == int(batch.seq_lens.sum())
        assert torch.equal(self.cache[layer][batch.out_cache_loc[:real]], x[:real])
        if self.fails:
            raise RuntimeError("a break's own")
        self.held.add(cuda_tensors._held)
        out[:real] = torch.stack([self.cache[layer][each].sum(0) for each in slots]).remainder(97)
        out[real:] = 0

    def looked_at(self, input_ids, positions):
        """What a break finds: the half's rows, and its metadata."""
        batch, metadata = _context.get().forward_batch, self.backend.forward_metadata
        assert batch.input_ids.data_ptr() == input_ids.data_ptr() and len(batch.input_ids) == len(input_ids)
        assert batch.positions.data_ptr() == positions.data_ptr() and len(batch.positions) == len(positions)
        assert len(metadata.rows) == batch.extend_num_tokens

    def forward(self, input_ids, positions, batch, input_embeds, pp_proxy_tensors=None):
        rank, kept = self.coordinator.rank_in_group, []
        self.look(input_ids, positions)
        for count in (batch.num_token_non_padded, batch.global_num_token_non_padded):
            self.counted.append(None if count is None else count + 0)  # by a graph, at each replay anew
        x = self.coordinator.all_reduce(input_ids[:, None].repeat(1, HIDDEN) * (rank + 1))
        for layer in range(LAYERS):
            self.looked_at(input_ids, positions)  # while it is captured, too
            self.cache[layer][batch.out_cache_loc] = x
            out = torch.empty_like(x)
            self.attention(x, out, layer)
            x = self.coordinator.all_reduce(out * (rank + 1)).remainder(89)
            kept.append(x)
            x = self.coordinator.all_reduce(x * positions[:, None] * (rank + 2)).remainder(83)
        if self.has_more and input_ids.storage_offset():  # the second half
            two = self.coordinator.all_reduce(torch.ones_like(x))
            self.look(input_ids, positions)
            x = x * (two - 1)
        return (x * 3, None), kept


Model.forward_in_halves = eager.replace_model_forward(Model.forward)


class Runner:
    """SGLang's prefill runner of one captured size, as far as halves see it."""

    capture_num_tokens = [GRAPH]

    def __init__(self, sglang, model, backend):
        self.sglang, self.model, self.backend, self.attn_metadata_buffers = sglang, model, backend, {}
        self.model_runner = SimpleNamespace(attn_backend=backend)
        self.static = {name: torch.zeros(GRAPH, dtype=torch.long) for name in eager.ROW_FIELDS}
        self.static["out_cache_loc"].fill_(NOWHERE)

    def _pad_to_bucket(self, rows, sizes):
        return min(size for size in sizes if size >= rows)

    def capture(self, **changes):
        batch = batch_of([GRAPH], [0], POOL)
        vars(batch).update(self.static, **{"global_num_token_non_padded_cpu": GRAPH} | changes)
        metadata = self.backend.init_for_capture_in_halves(batch)
        self.attn_metadata_buffers = {Key(GRAPH): metadata}

        def forward():
            return self.model.forward_in_halves(batch.input_ids, batch.positions, batch, None)

        with given(batch):
            for _ in range(2):
                forward()
            self.graph = self.sglang.BreakableCUDAGraph()
            with self.sglang.BreakableCUDAGraphCapture(self.graph):
                self.found = forward()

    def can_run_graph(self, batch):
        return len(batch.input_ids) <= GRAPH

    def replay(self, batch):
        rows = len(batch.input_ids)
        for name, fixed in self.static.items():
            fixed.fill_(NOWHERE if name == "out_cache_loc" else 0)[:rows] = getattr(batch, name)
        static = copy.copy(batch)
        vars(static).update(self.static)
        [metadata] = self.attn_metadata_buffers.values()
        found = self.backend.init_for_replay_in_halves(metadata, batch, static_forward_batch=static)
        whole = self.backend.forward_metadata
        assert found is whole is metadata
        with given(static) as context:
            self.graph.replay()
            assert self.backend.forward_metadata is whole and context.forward_batch is static
        halves = getattr(metadata, adapter._HALVES, None)
        assert halves is None or halves._whole == (), "nothing of a batch is kept"
        (x, none), kept = self.found
        assert none is None
        return [x[:rows].clone(), *(each[:rows].clone() for each in kept)]


class Key(SimpleNamespace):
    def __init__(self, size):
        super().__init__(size=size)

    def __hash__(self):
        return self.size


Runner.can_run_graph_in_halves = adapter.replace_can_run_graph(Runner.can_run_graph)


@contextlib.contextmanager
def given(batch):
    context = SimpleNamespace(forward_batch=batch)
    token = _context.set(context)
    yield context
    _context.reset(token)


def of_this_rank(coordinator):
    """Threads of a rank's own know whose they are; graphs are a rank's."""
    is_capturing.set([False])

    def all_reduce(x):
        _this.coordinator = coordinator
        return type(coordinator).all_reduce(coordinator, x)

    coordinator.all_reduce = all_reduce


def pass_of(lengths, before):
    return batch_of(lengths, before, POOL, global_num_token_non_padded_cpu=sum(lengths))


def whole_of(model, backend, batch):
    backend.init(batch)
    with given(batch):
        (x, _), kept = model.forward(batch.input_ids, batch.positions, batch, None)
    return [x, *kept]


FITTING = {
    "the graph's rows": [([64], [0]), ([64], [64])],
    "fewer": [([50], [0]), ([33], [56])],
    "prompts beside each other": [([16] * 4, [0] * 4), ([20, 12, 25], [3, 0, 5])],
    "one that is cut": [([24, 40], [7, 0]), ([60], [24])],
}


@every_release(FIRST)
@pytest.mark.parametrize("batches", FITTING.values(), ids=FITTING)
def test_graphs_in_halves_have_the_numbers_of_the_whole(sglang, version, batches):
    def body(coordinator):
        of_this_rank(coordinator)
        model, other = (Model(sglang, Backend(), coordinator) for _ in range(2))
        runner = Runner(sglang, model, model.backend)
        coordinator.pynccl_comm = SimpleNamespace(disabled=False)  # as while graphs are captured
        runner.capture()
        coordinator.pynccl_comm.disabled = True
        model.cache.zero_()
        model.held.clear()
        coordinator.calls.clear()
        same = []
        for lengths, before in batches:
            assert runner.can_run_graph_in_halves(pass_of(lengths, before))
            found = runner.replay(pass_of(lengths, before))
            rest = sum(lengths) - GRAPH // 2
            assert [int(count) for count in model.counted[-4:]] == [GRAPH // 2, GRAPH // 2, rest, rest]
            calls = list(coordinator.calls)
            expected = whole_of(other, other.backend, pass_of(lengths, before))
            coordinator.calls.clear()
            same += [*map(torch.equal, found, expected), torch.equal(model.cache[:, :-1], other.cache[:, :-1])]
            assert calls == [("sum", GRAPH // 2)] * 2 * (1 + 2 * LAYERS)
        assert min(model.held) >= eager.SUM_SMS, "attention between graphs leaves multiprocessors to the sums, too"
        return same

    for same in Ranks(2).each(body):
        assert len(same) == len(batches) * (LAYERS + 2) and all(same)
    assert eager._seen["passes"] == 2 * len(batches) and not eager._left and cuda_tensors._held == 0
    assert eager._seen["rows"] == 2 * sum(sum(lengths) for lengths, _ in batches)


@every_release(FIRST)
def test_graphs_that_were_captured_whole_are_as_ever(sglang, version, monkeypatch):
    """As a server's are that tries halves out."""
    monkeypatch.setattr(eager, "least_rows", lambda: 0)

    def body(coordinator):
        of_this_rank(coordinator)
        model, other = (Model(sglang, Backend(), coordinator) for _ in range(2))
        runner = Runner(sglang, model, model.backend)
        runner.capture()
        model.cache.zero_()
        coordinator.calls.clear()
        assert runner.can_run_graph_in_halves(pass_of([50], [3]))
        assert not runner.can_run_graph_in_halves(pass_of([GRAPH + 1], [0])), "more rows than SGLang's graphs have"
        found, calls = runner.replay(pass_of([50], [3])), list(coordinator.calls)
        assert calls == []  # a whole pass's sums are in the graphs
        return len(found) == len(whole_of(other, other.backend, pass_of([50], [3])))

    assert Ranks(2).each(body) == [True, True] and not eager._seen


@every_release(FIRST)
def test_a_replay_that_failed_leaves_nothing_to_the_next(sglang, version):
    def body(coordinator):
        of_this_rank(coordinator)
        model, other = (Model(sglang, Backend(), coordinator) for _ in range(2))
        runner = Runner(sglang, model, model.backend)
        runner.capture(global_num_token_non_padded=None)  # as SGLang may have it
        model.fails = True
        with pytest.raises(RuntimeError, match="a break's own"):
            runner.replay(pass_of([50], [8]))
        model.fails = False
        model.cache.zero_()
        model.held.clear()
        found = runner.replay(pass_of([50], [0]))
        assert max(model.held) <= 2 * eager.SUM_SMS, "of both ranks"
        return all(map(torch.equal, found, whole_of(other, other.backend, pass_of([50], [0]))))

    assert Ranks(2).each(body) == [True, True] and cuda_tensors._held == 0


@every_release(FIRST)
def test_a_half_that_has_more_sums_goes_on_alone(sglang, version):
    def body(coordinator):
        of_this_rank(coordinator)
        model, other = (Model(sglang, Backend(), coordinator) for _ in range(2))
        model.has_more = True
        runner = Runner(sglang, model, model.backend)
        runner.capture()
        model.cache.zero_()
        found = runner.replay(pass_of([50], [0]))
        return all(map(torch.equal, found, whole_of(other, other.backend, pass_of([50], [0]))))

    assert Ranks(2).each(body) == [True, True]


@every_release(FIRST)
def test_a_sum_runs_beside_the_other_half(sglang, version, monkeypatch):
    sums = torch.distributed.all_reduce

    def all_reduce(x, group, async_op):
        work, started = sums(x, group=group, async_op=async_op), len(group.order)
        group.order.append("start")
        return SimpleNamespace(wait=lambda: (group.order.append(started), work.wait()))

    def body(coordinator):
        of_this_rank(coordinator)
        coordinator.order = []
        model = Model(sglang, Backend(), coordinator)
        runner = Runner(sglang, model, model.backend)
        runner.capture()
        for graph in runner.graph._segments:
            graph.replay = functools.partial(coordinator.order.append, "graph")
        for _ in range(2):  # the second waits for nothing of the first
            coordinator.order.clear()
            runner.replay(pass_of([GRAPH], [0]))
        return coordinator.order

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    weak = []
    monkeypatch.setattr(adapter, "_weak", lambda x: weak.append(x) or x)
    for order in Ranks(2).each(body):
        waits = [(place, started) for place, started in enumerate(order) if isinstance(started, int)]
        assert len(waits) == order.count("start") == 2 * (1 + 2 * LAYERS)
        assert all("graph" in order[started:place] for place, started in waits)
    assert len(weak) == 2 * 2 * (1 + 2 * LAYERS), "no sum's memory is kept but by its graph"


@every_release(FIRST)
@pytest.mark.parametrize(("lengths", "before"), [([64], [4]), ([20], [0]), ([30, 34], [0, 0]), ([32], [0])])
def test_a_batch_that_is_cut_elsewhere_does_not_go_by_its_graphs(sglang, version, lengths, before):
    def body(coordinator):
        of_this_rank(coordinator)
        model = Model(sglang, Backend(), coordinator)
        runner = Runner(sglang, model, model.backend)
        runner.capture()
        return runner.can_run_graph_in_halves(pass_of(lengths, before))

    assert Ranks(2).each(body) == [False, False]


@every_release(FIRST)
def test_what_a_batch_has_keeps_it_from_its_graphs(sglang, version):
    def body(coordinator):
        of_this_rank(coordinator)
        model = Model(sglang, Backend(), coordinator)
        runner = Runner(sglang, model, model.backend)
        runner.capture()
        odd = pass_of([GRAPH], [0])
        odd.mm_inputs = [object()]
        mixed = batch_of([GRAPH], [0], POOL, "MIXED", global_num_token_non_padded_cpu=GRAPH)
        return [runner.can_run_graph_in_halves(batch) for batch in (pass_of([GRAPH], [0]), odd, mixed)]

    assert Ranks(2).each(body) == [[True, False, False]] * 2


@every_release(FIRST)
@pytest.mark.parametrize(
    "change",
    [{"least": 0}, {"least": GRAPH}, {"least": 33}, {"page": 128}, {"page": 64}, {"mode": "MIXED"}, {"draft": True}],
)
def test_passes_that_are_captured_whole(sglang, version, monkeypatch, change):
    monkeypatch.setattr(eager, "least_rows", lambda: change.get("least", ROWS))
    monkeypatch.setattr(eager, "PAGE", change.get("page", PAGE))
    _this.coordinator = SimpleNamespace(world_size=2)
    backend = Backend()
    backend.model_runner = SimpleNamespace(is_draft_worker=change.get("draft", False))
    batch = batch_of([GRAPH], [0], POOL, change.get("mode", "EXTEND"), global_num_token_non_padded_cpu=GRAPH)
    metadata = backend.init_for_capture_in_halves(batch)
    assert not hasattr(metadata, adapter._HALVES) and not hasattr(batch, eager.PASS) and not eager._left
    runner = Runner(sglang, None, backend)
    runner.attn_metadata_buffers = {Key(GRAPH): metadata}
    assert runner.can_run_graph_in_halves(pass_of([30], [0]))
    runner.attn_metadata_buffers = None
    assert runner.can_run_graph_in_halves(pass_of([30], [0]))


@every_release(FIRST)
@pytest.mark.parametrize("experts", [1, 2])
def test_why_a_pass_is_captured_whole(sglang, version, monkeypatch, experts):
    monkeypatch.setattr(eager, "least_rows", lambda: GRAPH // 2)
    sys.modules[adapter.PARALLEL_STATE].experts = experts
    _this.coordinator, backend = One(), Backend()
    metadata = backend.init_for_capture_in_halves(pass_of([GRAPH], [0]))
    assert hasattr(metadata, adapter._HALVES) is (experts == 1)
    assert eager._left == ({} if experts == 1 else {"captured: expert parallelism": 1})


@every_release(FIRST)
def test_the_graphs_of_a_size_are_asked(sglang, version):
    """Those of other sizes may be whole, or not there."""

    def body(coordinator):
        of_this_rank(coordinator)
        model = Model(sglang, Backend(), coordinator)
        runner = Runner(sglang, model, model.backend)
        runner.capture()
        runner.capture_num_tokens = [8, 16, GRAPH]
        runner.attn_metadata_buffers[Key(16)] = Metadata([])
        return [runner.can_run_graph_in_halves(pass_of([rows], [0])) for rows in (8, 16, 17, 40)]

    assert Ranks(2).each(body) == [[True, True, False, True]] * 2


@every_release(FIRST)
def test_what_is_asked_of_sglang_is_there(version, sglang_wheel, monkeypatch):
    context, weak = ModuleType(adapter.CONTEXT), ModuleType(adapter.WEAK)
    context.get_tc_piecewise_forward_context, weak.weak_ref_tensors = lambda: "context", lambda x: ("weak", x)
    for module in (context, weak):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert (CONTEXT_OF(), WEAK_OF(3)) == ("context", ("weak", 3))
    sources = WheelSources(sglang_wheel(version))
    assert "    get_tc_piecewise_forward_context,\n" in sources.read(adapter.CONTEXT)
    assert "weak_ref_tensors" in sources.read(adapter.WEAK)
    held = definition(sglang_wheel(version), "TcPiecewiseForwardContext", f"{adapter.CONTEXT}.context_manager")
    assert [ast.unparse(one) for one in held.decorator_list] == ["dataclass"], "whose batch may be another"


def capture_that_fails(sglang, coordinator, calls, made=lambda attend: attend):
    """A runner behind a capture whose attention, as `made`, raises what comes behind so many calls."""
    of_this_rank(coordinator)
    model, seen = Model(sglang, Backend(), coordinator), []
    runner = Runner(sglang, model, model.backend)

    def attend(x, out, layer):
        seen.append(layer)
        if len(seen) > calls:
            raise RuntimeError("the attention's own")
        out.zero_()

    model.attention = made(attend)
    with pytest.raises(RuntimeError, match="the attention's own"):
        runner.capture()
    return runner, model.backend


@every_release(FIRST)
def test_an_error_between_breaks_is_the_captures(sglang, version):
    """Where a graph is under capture, which SGLang ends."""

    def body(coordinator):
        capture_that_fails(sglang, coordinator, 4 * LAYERS)
        return is_capturing.get()

    assert Ranks(2).each(body) == [[False], [False]]


@every_release(FIRST)
def test_an_error_of_a_half_is_the_captures(sglang, version):
    def body(coordinator):
        calls = 4 * LAYERS + 3  # two passes and half of a layer
        runner, backend = capture_that_fails(sglang, coordinator, calls, sglang.eager_on_graph(True))
        return backend.forward_metadata is next(iter(runner.attn_metadata_buffers.values()))

    assert Ranks(2).each(body) == [True, True]
