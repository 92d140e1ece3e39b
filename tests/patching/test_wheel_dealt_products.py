"""What bf16_linear_dealt.py relies on in each release: when a compressor's product may run, beside what, and that
nothing else of a step sums or gathers then. The fork of a layer's streams is each release's own, run on the CPU."""

import ast
import contextlib
import re

import pytest

from deepseek_v4_sm120.sglang_patches.adapters.all_reduce import PARALLEL_STATE, SERVER_ARGS
from deepseek_v4_sm120.sglang_patches.names import INDEXER, MODEL
from deepseek_v4_sm120.sglang_patches.rows.bf16_linear import COMPRESSORS_PRODUCT
from tests.patching.test_wheel_wo_a import Quiet, definition, source, take
from tests.patching.wheels import every_release, since, tree

FIRST = "0.5.14"
ATTENTION = "MQALayer"
COMPRESSORS = "sglang.srt.layers.attention.dsv4.compressor_v2"
# what cards wait for each other in, as SGLang's names have it; those of context parallelism, which is left out
EXCHANGES = re.compile(r"\w*(?:all_reduce|all_gather|reduce_scatter|all_to_all|tensor_model_parallel)\w*")
OF_CONTEXT = re.compile(r"cp_all_gather_rerange\w*")


class Stream:
    """A stream by what has run before the next of its work: names."""

    current = None

    def __init__(self, name):
        self.name, self.behind = name, set()

    def wait_stream(self, other):
        self.behind |= other.behind

    def record_event(self):
        return set(self.behind)

    def wait_event(self, event):
        self.behind |= event


class Work:
    """What is launched -> (stream, behind what)."""

    def __init__(self):
        self.launched = {}

    def __call__(self, name, result=None):
        def launch(*args, **kwargs):
            stream = Stream.current
            self.launched[name] = stream.name, set(stream.behind)
            stream.behind.add(name)
            return result

        return launch


class Cuda:
    """torch.cuda, as far as the fork asks it."""

    @staticmethod
    def current_stream():
        return Stream.current

    @staticmethod
    @contextlib.contextmanager
    def stream(stream):
        outer, Stream.current = Stream.current, stream
        yield
        Stream.current = outer


def forked(wheel, version, compress_ratio):
    """A layer's attention up to its join, from a boundary on; what was launched, and what the join is behind."""
    work, main = Work(), Stream("main")
    attention, Stream.current = Quiet(), main
    work("boundary")()
    attention.alt_streams = [Stream(name) for name in ("keys", "compressor", "indexer")]
    attention.fuse_wqa_wkv, attention.layer_id = True, 2
    attention.wqkv_a = work("wqkv_a", (None, None))
    attention._compute_q_a = work("q_a", (None, None) if since(version, "0.5.19") else None)
    attention._compute_kv_to_cache, attention._compute_q_b = work("keys"), work("q_b")
    attention.indexer, attention.compressor = work("index") if compress_ratio == 4 else None, object()
    backend = Quiet()
    backend.forward_core_compressor = work("product")
    fork = take(wheel, {"torch": type("torch", (), {"cuda": Cuda})}, f"{ATTENTION}._forward_prepare_multi_stream")
    fork(attention, None, None, None, backend)
    return work.launched, main.behind


@every_release(FIRST)
@pytest.mark.parametrize("compress_ratio", [4, 128])
def test_a_product_runs_between_a_layers_boundary_and_its_attention(version, compress_ratio, sglang_wheel):
    launched, behind = forked(sglang_wheel(version), version, compress_ratio)
    beside = {"wqkv_a", "q_a", "keys", "q_b", *(["index"] if compress_ratio == 4 else [])}
    assert launched["product"] == ("compressor", {"boundary"}), "on a stream of its own, behind the boundary alone"
    assert set(launched) == {"boundary", "product", *beside} and behind == set(launched)
    assert {name: stream for name, (stream, _) in launched.items()} == {
        **dict(boundary="main", wqkv_a="main", q_a="main", q_b="main", keys="keys", product="compressor"),
        **(dict(index="indexer") if compress_ratio == 4 else {}),
    }


@every_release(FIRST)
def test_what_runs_beside_it_exchanges_nothing(version, sglang_wheel):
    """The queries', keys' and index's functions; the projections are replicated, or a rank's own columns."""
    wheel = sglang_wheel(version)
    names = (
        "_forward_prepare_multi_stream",
        "_forward_prepare",
        "_compute_q_a",
        "_compute_q_b",
        "_compute_kv_to_cache",
    )
    asked = [definition(wheel, f"{owner}.{name}") for name in names for owner in (ATTENTION, "MqaAttentionBase")]
    texts = [ast.unparse(one) for one in asked if one is not None]
    assert len(texts) >= 5
    texts += [source(wheel, INDEXER), source(wheel, COMPRESSORS)]
    for text in texts:
        found = {name for name in EXCHANGES.findall(text) if not OF_CONTEXT.fullmatch(name)}
        assert found == set(), found
    model = source(wheel, MODEL)
    assert EXCHANGES.search(model), "elsewhere there are some"
    assert re.search(r"self\.wqkv_a = ReplicatedLinear\(", model) and "gather_output=True" not in model
    assert source(wheel, INDEXER).count("ReplicatedLinear(") >= 2 and "ColumnParallel" not in source(wheel, INDEXER)


@every_release(FIRST)
def test_streams_of_their_own_are_for_captures(version, sglang_wheel):
    """Elsewhere a layer has one stream, so all that cards wait for is in its order."""
    forks = re.search(r"enable_multi_stream = \(\n(.*?)\n        \)", source(sglang_wheel(version), MODEL), re.S)[1]
    assert "and get_is_capture_mode()" in forks.partition(") or (")[0]
    assert "_is_npu" in forks.partition(") or (")[2] or ") or (" not in forks


@every_release(FIRST)
def test_drafts_have_no_compressor(version, sglang_wheel):
    wheel = sglang_wheel(version)
    assert "COMPRESS_RATIO_NEXTN_LAYER = 0\n" in source(wheel, f"{MODEL}_nextn")
    if since(version, "0.5.16"):
        assert "self.compress_ratio == 0" in source(wheel, f"{MODEL}_dspark")


@every_release(FIRST)
def test_nobody_else_calls_the_product(version, sglang_wheel):
    module, _, name = COMPRESSORS_PRODUCT.partition(":")
    wheel = sglang_wheel(version)
    calls = [n for n in ast.walk(tree(wheel, module)) if isinstance(n, ast.Call) and ast.unparse(n.func) == name]
    assert calls and {tuple(map(ast.unparse, call.args)) for call in calls} <= {
        *(("x", "self.wkv_gate.weight"), ("x", "weight")),
    }
    assert not any(call.keywords for call in calls)


@every_release(FIRST)
def test_two_batches_overlap_with_other_exchanges_alone(version, sglang_wheel):
    """Two-batch overlap asks for expert parallelism's all-to-all, or data parallel attention: products stay whole."""
    module = "sglang.srt.arg_groups.validation_hook" if since(version, "0.5.19") else SERVER_ARGS
    text = source(sglang_wheel(version), module)
    [asked] = re.findall(r"if \(?\s*[\w.]*enable_two_batch_overlap\s+and\s+[\w.]*moe_a2a_backend == \"none\"", text)
    assert asked


@every_release(FIRST)
def test_the_groups_that_are_asked_for_are_there(version, sglang_wheel):
    text = source(sglang_wheel(version), PARALLEL_STATE)
    for name in ("_TP", "_PP", "_ATTN_TP", "_PDMUX_PREFILL_TP_GROUP"):
        assert f"\n{name}: Optional[GroupCoordinator] = None" in text
