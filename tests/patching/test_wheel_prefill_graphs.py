"""SGLang's breakable prefill graphs around ours, by the wheels' own code: a pass of padded rows is captured in graphs
that end at each attention, which runs between them, for the rows that there are, at the capture and at every replay."""

import functools
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches.adapters import sparse_decode
from deepseek_v4_sm120.sglang_patches.names import MODEL
from tests.patching import test_wheel_wo_a as wo_a
from tests.patching.test_wheel_wo_a import QUIET, source, take
from tests.patching.wheels import every_release, fetch, since

FIRST = "0.5.14"  # with --cuda-graph-backend-prefill
BREAKS = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"
RUNNER = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner"
ARGUMENTS, HOOK = "sglang.srt.server_args", "sglang.srt.arg_groups.cuda_graph_hook"
ROWS, HEADS, PADDED = 8, 16, 64

operator = pytest.fixture(wo_a.operator.__wrapped__)


class Capture:
    """As much of a BreakableCUDAGraphCapture as a break asks."""

    _barrier_fn = None

    def __init__(self):
        self.cuda_graph = SimpleNamespace(_break_fns=[])
        self.ends = self.begins = 0

    def _end_current_segment(self):
        self.ends += 1

    def _begin_new_segment(self):
        self.begins += 1


def breakable(wheel, capture):
    """The wheel's eager_on_graph while `capture` is under way. Its weak references are the tensors themselves."""
    names = {"torch": torch, "_weak_ref_if_tensor": lambda x: x, "functools": functools}
    names["_current_capture_var"] = SimpleNamespace(get=lambda: capture)
    for name in ("_copy_output", "_EagerOnGraphCallable"):
        take(wheel, names, name, BREAKS)
    return take(wheel, names, "eager_on_graph", BREAKS)


def attention(wheel, context, backend):
    """The wheel's deepseek_v4_attention_with_output, without its registration as torch's operator."""
    names = {"get_tc_piecewise_forward_context": lambda: context, "get_attn_backend": lambda: backend}
    names["register_custom_op"] = names["register_split_op"] = lambda **_: lambda function: function
    return take(wheel, names, "deepseek_v4_attention_with_output", MODEL)


def batch(rows):
    return SimpleNamespace(
        num_token_non_padded_cpu=rows, global_num_token_non_padded_cpu=rows, out_cache_loc=torch.arange(ROWS)
    )


@every_release(FIRST)
def test_attention_of_a_replay_is_ours_of_the_rows_that_there_are(version):
    """Outside of the layer's forward, whose scopes are gone: the backend's forward is told the layer all the same."""
    wheel, told, capture = fetch(version), [], Capture()

    def of_backend(self, q, k, v, layer, forward_batch, compress_ratio, save_kv_cache=True, attn_sink=None, **_):
        heads = sparse_decode._backend.layer.tp_q_head_num
        told.append((q.shape[0], q.shape[1], heads, len(forward_batch.out_cache_loc), compress_ratio))
        return 2 * q

    forward = sparse_decode.replace_backend_forward(of_backend)
    backend = SimpleNamespace()
    backend.forward = lambda *args, **kwargs: forward(backend, *args, **kwargs)
    context = SimpleNamespace(forward_batch=batch(ROWS), attention_layers=[SimpleNamespace(tp_q_head_num=HEADS)])
    run = breakable(wheel, capture)(True)(attention(wheel, context, backend))
    q, out = torch.ones(ROWS, PADDED, 4), torch.full((ROWS, PADDED, 4), 7.0)
    run(q, q, out, 0, 4, torch.zeros(PADDED), False)
    assert (capture.ends, capture.begins) == (1, 1) and bool((out == 2).all())
    q.fill_(3.0)
    context.forward_batch = batch(5)
    (replay,) = capture.cuda_graph._break_fns
    replay()
    assert told == [(ROWS, PADDED, HEADS, ROWS, 4), (5, PADDED, HEADS, 5, 4)]
    assert sparse_decode._backend.layer is None
    behind = 0.0 if since(version, "0.5.21") else 2.0  # before, whatever the memory held: ours must not mind
    assert bool((out[:5] == 6).all()) and bool((out[5:] == behind).all())
    assert len(context.forward_batch.out_cache_loc) == ROWS


@every_release(FIRST)
@pytest.mark.parametrize("rows", [5, 300])
def test_a_layer_captured_in_two_graphs_gives_what_it_gives_eagerly(version, rows, monkeypatch, operator):
    """wo_a takes the rotation of what the break wrote, not of what the backend returned."""
    wheel, capture, given = fetch(version), Capture(), wo_a.inputs(rows, 1)
    context = SimpleNamespace(forward_batch=batch(rows), attention_layers=[SimpleNamespace(tp_q_head_num=HEADS)])
    eager, _ = wo_a.Tree(wheel, monkeypatch, patched=True).run(*given)
    backend = SimpleNamespace(forward=lambda **_: given[0].clone())
    break_at = breakable(wheel, capture)(True)(attention(wheel, context, backend))
    names = {"is_in_breakable_cuda_graph": lambda: True, "bcg_deepseek_v4_attention_with_output": break_at}
    mode = type("Mode", (type(QUIET),), {"is_extend": lambda self: True})()
    captured, _ = wo_a.Tree(
        wheel, monkeypatch, patched=True, names=names, batch={"forward_mode": mode}
    ).run(*given)  # fmt: skip
    assert len(capture.cuda_graph._break_fns) == wo_a.LAYERS
    assert operator.calls == [(rows, rows <= 256)] * 2 * wo_a.LAYERS
    assert torch.equal(captured, eager)


@every_release(FIRST)
@pytest.mark.parametrize("is_asked", [True, False])
def test_who_asks_for_them_gets_them(version, is_asked):
    """SGLang rules them out for this model, for memory that the index logits would take: not where the user asked."""
    wheel, left_out = fetch(version), []
    config = SimpleNamespace(prefill=SimpleNamespace(backend="breakable"))
    asked = {("prefill", "backend")} if is_asked else set()
    resolved = SimpleNamespace(cuda_graph_config=config, pp_size=1, get_model_config=lambda: QUIET)
    arguments = SimpleNamespace(_cuda_graph_config_locked=asked, **vars(resolved))
    names = {"Phase": SimpleNamespace(PREFILL="prefill"), "resolving_view": lambda _: resolved}
    names["Backend"] = SimpleNamespace(BREAKABLE="breakable", FULL="full", TC_PIECEWISE="tc_piecewise", DISABLED="off")
    rule = "heavy capture-pool memory pressure"
    if since(version, "0.5.19"):
        names["disable_breakable_cudagraph_if_incompatible"] = left_out.append
        decide, module = take(wheel, names, "apply_cuda_graph_compatibility", HOOK), HOOK
    else:
        arguments._disable_breakable_cudagraph_if_incompatible = lambda: left_out.append(arguments)
        decide, module = take(wheel, names, "ServerArgs._apply_cuda_graph_compatibility", ARGUMENTS), ARGUMENTS
    decide(arguments)
    assert left_out == ([] if is_asked else [arguments])
    assert (rule in source(wheel, module)) is since(version, "0.5.15")


@every_release("0.5.17")
def test_a_pass_is_padded_to_no_more_than_twice_its_rows(version):
    """What docs/operating.md says of `--cuda-graph-bs-prefill`."""
    assert "_MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR = 2" in source(fetch(version), RUNNER)
