"""What a pass in graphs reads of a prefix that a hierarchical cache is still loading: every release's own counter of
layers, pool's wait and runner's replay over a stand-in for the graphs, with ours and without; and which of the model's
code runs at the graphs' breaks, where alone SGLang waits."""

import ast
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches.fixes.loaded_prefixes import replace_execute, wait_for_loads
from deepseek_v4_sm120.sglang_patches.names import MODEL
from deepseek_v4_sm120.sglang_patches.table import LOADED_PREFIXES
from tests.patching.test_wheel_prefill_graphs import RUNNER, Capture, breakable
from tests.patching.test_wheel_wo_a import Quiet, definition, take
from tests.patching.wheels import every_release, fetch, since, tree

FIRST = "0.5.14"
LOADING = "sglang.srt.managers.cache_controller"
POOL = "sglang.srt.mem_cache.deepseek_v4_memory_pool"
WAIT = "DeepSeekV4TokenToKVPool.wait_layer_transfer"
READ_IN_GRAPHS = ("get_attention_compress_states", "get_indexer_compress_states", "get_index_k_with_scale_buffer")
LAYERS = 4

pytestmark = pytest.mark.usefixtures("opened")


class Event:
    """Of a layer's load: nobody knows when it is there but who has waited for it."""

    def record(self):
        pass

    def query(self):
        return True


class Stream:
    def __init__(self):
        self.waited = []

    def wait_event(self, event):
        self.waited.append(event)


class Runner(Quiet):
    """A PrefillCudaGraphRunner whose passes are graphs that end at each layer's attention."""

    def __init__(self, version, pool, replay):
        batch = SimpleNamespace(input_ids=range(8), positions=range(8))
        self.load_batch = lambda *_, **__: (batch, None) if since(version, "0.5.23") else batch
        self.model_context = self._no_context
        model = SimpleNamespace(forward=lambda *_, **__: replay())
        self.model_runner = SimpleNamespace(token_to_kv_pool=pool, model=model, attn_backend=None)
        self.backend = SimpleNamespace(replay_session=nullcontext)
        self.layer_model = SimpleNamespace(forward=None)  # of 0.5.14 and 0.5.15
        self._is_full_backend = self.enable_cp_bcg_capture = self.enable_cp_v2_bcg_capture = False
        self._uses_eager_prefill_tail = lambda: True
        self._execute_body_capture = lambda *_, **__: replay()
        self._shape_key = lambda *_: SimpleNamespace(variant_label=None)

    def _no_context(self):
        return nullcontext()


def passed(version, *, ours, loads=True):
    """(layer, what reads it) of each read of a layer's pools whose load nobody had waited for, in a captured pass that
    goes on from a prefix that is being loaded (or not: loads)."""
    wheel, stream, capture, unwaited = fetch(version), Stream(), Capture(), []
    device = SimpleNamespace(Event=Event, current_stream=lambda: stream)
    names = {"device_module": device}
    take(wheel, names, "LayerLoadingEvent", LOADING)
    counter = take(wheel, names, "LayerDoneCounter", LOADING)(LAYERS)
    pool = SimpleNamespace(layer_transfer_counter=counter, start_layer=0)
    wait, events = take(wheel, {}, WAIT, POOL), None

    def read(layer, by):
        if events is not None and events[layer] not in stream.waited:
            unwaited.append((layer, by))

    def index(layer):  # a segment of the graphs: what it asks of the pool is asked while it is captured
        wait(pool, layer)
        capture.cuda_graph.segments.append(layer)
        read(layer, "indexer")

    def attend(layer):
        wait(pool, layer)
        read(layer, "attention")

    attention = breakable(wheel, capture)(True)(attend)
    capture.cuda_graph.segments = []
    for layer in range(LAYERS):
        index(layer)
        attention(layer)

    def replay():
        for layer, attend_again in zip(capture.cuda_graph.segments, capture.cuda_graph._break_fns, strict=True):
            read(layer, "indexer")
            attend_again()

    if loads:
        counter.set_consumer(counter.update_producer())
        events = counter.events[counter.consumer_index].load_events
    execute = take(wheel, _contexts(), "PrefillCudaGraphRunner.execute", RUNNER)
    (replace_execute(execute) if ours else execute)(Runner(version, pool, replay), SimpleNamespace())
    assert capture.ends == capture.begins == LAYERS
    return unwaited


def _contexts():
    """What 0.5.14 and 0.5.15 enter around a replay, and of which kind its result may be."""
    names = {name: lambda *_, **__: nullcontext() for name in ("forward_context", "set_tc_piecewise_forward_context")}
    return names | {"LogitsProcessorOutput": Event, "EmbeddingPoolerOutput": type(None)}


@every_release(FIRST)
def test_nothing_is_read_that_was_not_waited_for(version):
    assert passed(version, ours=True) == []
    assert passed(version, ours=True, loads=False) == []


@every_release(FIRST)
def test_in_sglang_alone_a_layers_indexer_begins_when_the_layer_before_is_there(version):
    assert passed(version, ours=False) == [(layer, "indexer") for layer in range(LAYERS)]
    assert passed(version, ours=False, loads=False) == []


@every_release(FIRST)
@pytest.mark.parametrize(("model", "card"), [("deepseek_v4", False), ("llama", True), (None, True)])
def test_elsewhere_it_stays_sglangs(version, model, card, opened):
    opened(model, card)
    assert passed(version, ours=True) == passed(version, ours=False)


@every_release(FIRST)
def test_a_graphs_breaks_have_neither_the_indexer_nor_the_compressors(version):
    """Those of V4.1 alone, which has them in a function of its own, are not looked at."""
    wheel = fetch(version)
    names = {
        call.args[0].id
        for call in ast.walk(tree(wheel, MODEL))
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("eager_on_graph(")
    }
    assert "deepseek_v4_attention_with_output" in names
    texts = [ast.unparse(definition(wheel, name, MODEL)) for name in names]
    assert not re.search(r"forward_(core|indexer)_compressor|\.indexer\(", "\n".join(texts))
    for name in READ_IN_GRAPHS:
        text = ast.unparse(definition(wheel, f"DeepSeekV4TokenToKVPool.{name}", POOL))
        assert "self.wait_layer_transfer(layer_id)" in text


def test_the_row_is_for_every_release_with_such_graphs():
    (target,) = LOADED_PREFIXES.targets
    assert target.sglang == f">={FIRST},<0.6"


def test_where_nothing_is_loaded_nothing_is_waited_for():
    """Without a hierarchical cache, and where a pass has no prefix to load."""
    for pool in (SimpleNamespace(), SimpleNamespace(layer_transfer_counter=None)):
        wait_for_loads(pool)
    counter, waited = SimpleNamespace(consumer_index=-1, num_layers=2), []
    counter.wait_until = waited.append
    wait_for_loads(SimpleNamespace(layer_transfer_counter=counter))
    assert waited == []
    counter.consumer_index = 0
    wait_for_loads(SimpleNamespace(layer_transfer_counter=counter))
    assert waited == [0, 1]
