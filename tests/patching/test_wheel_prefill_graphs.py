"""SGLang's breakable prefill graphs around ours, by the wheels' own code: a pass of padded rows is captured in graphs
that end at each attention, which runs between them, for the rows that there are, at the capture and at every replay."""

import ast
import functools
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from packaging.specifiers import SpecifierSet

from deepseek_v4_sm120 import patching
from deepseek_v4_sm120.sglang_patches import device_gate
from deepseek_v4_sm120.sglang_patches.adapters import argument_defaults, prefill_graphs, sparse_decode
from deepseek_v4_sm120.sglang_patches.names import MODEL
from deepseek_v4_sm120.sglang_patches.table import PREFILL_GRAPHS
from tests.patching import test_wheel_wo_a as wo_a
from tests.patching.test_wheel_reproducible import Server, View, declare
from tests.patching.test_wheel_wo_a import QUIET, source, take
from tests.patching.wheels import every_release, fetch, members, since

FIRST = "0.5.14"  # with --cuda-graph-backend-prefill
BREAKS = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"
RUNNER = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner"
BACKEND = "sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend"
ARGUMENTS, HOOK = "sglang.srt.server_args", "sglang.srt.arg_groups.cuda_graph_hook"
PARALLEL, WHERE_ASKED = "sglang.srt.arg_groups.parallel_hook", "apply_inkling_prefill_cuda_graph_default"
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


class Arguments(Server):
    """A server's arguments as far as graphs are concerned, with a list of decisions where a release keeps one."""

    def __init__(self, architecture="DeepseekV4ForCausalLM", model_type="deepseek_v4", **given):
        graphs = ("cuda_graph_backend_decode", "cuda_graph_max_bs_decode", "cuda_graph_bs_decode")
        graphs += ("cuda_graph_max_seq_len_prefill", "cuda_graph_prefill_max_context", "cuda_graph_tc_compiler")
        plain = dict.fromkeys(graphs) | prefill_graphs.PLAIN | {"disable_decode_cuda_graph": False}
        super().__init__(**(plain | given))
        config = SimpleNamespace(architectures=[architecture], to_dict=lambda: {"model_type": model_type})
        model = SimpleNamespace(hf_config=config, is_multimodal_piecewise_cuda_graph_supported=False)
        self.get_model_config = lambda: model


@pytest.fixture
def asked(monkeypatch):
    """DSV4_SM120_SET=prefill_graphs=640, on a GPU that we serve."""
    monkeypatch.setattr(patching, "value", {"prefill_graphs": 640}.__getitem__)
    monkeypatch.setattr(device_gate, "serves_current_device", lambda: True)


def resolution(version, monkeypatch):
    """resolve(arguments) -> the prefill graphs' (backend, rows): where SGLang asks for other models' graphs, with ours
    in its place, then what the release makes of the arguments, and its rules."""
    wheel, is_function = fetch(version), since(version, "0.5.19")
    overrides = ModuleType(argument_defaults.OVERRIDES)
    if is_function:
        overrides.declare_resolution, overrides.resolving_view = declare, View
    monkeypatch.setitem(sys.modules, argument_defaults.OVERRIDES, overrides)
    left_out = []

    class Config(SimpleNamespace):
        pass

    def default():
        return Config(prefill=SimpleNamespace(backend="breakable", bs=None), decode=SimpleNamespace(backend="full"))

    def with_phase(config, phase, **changes):
        return Config(**(vars(config) | {phase: SimpleNamespace(**(vars(getattr(config, phase)) | changes))}))

    names = {
        "with_phase": with_phase,
        **{"resolving_view": View, "declare_resolution": declare, "model_config_of": lambda s: s.get_model_config()},
        **{
            "default_cuda_graph_config": default,
            "CudaGraphConfig": Config,
            "parse_connector_type": lambda path: "none",
        },
        "Phase": SimpleNamespace(PREFILL="prefill", DECODE="decode"),
        "Backend": SimpleNamespace(
            BREAKABLE="breakable", FULL="full", TC_PIECEWISE="tc_piecewise", DISABLED="disabled"
        ),
        "disable_breakable_cudagraph_if_incompatible": left_out.append,
    }
    prefix, module = ("", HOOK) if is_function else ("ServerArgs._", ARGUMENTS)
    default_of_models, parse, decide = (
        take(wheel, names, f"{prefix}{name}", module)
        for name in (
            "apply_inkling_prefill_cuda_graph_default",
            "parse_cuda_graph_config",
            "apply_cuda_graph_compatibility",
        )
    )
    (target,) = [t for t in PREFILL_GRAPHS.targets if version in SpecifierSet(t.sglang)]
    assert (HOOK in target.where) == is_function
    ours = getattr(prefill_graphs, target.replacement.rpartition(":")[2])(default_of_models)

    def resolve(arguments):
        left_out.clear()
        arguments._disable_breakable_cudagraph_if_incompatible = lambda: left_out.append(arguments)
        for step in (ours, parse, decide):
            step(arguments)
        prefill = arguments.now("cuda_graph_config").prefill
        return "left out" if left_out else prefill.backend, prefill.bs

    return resolve


CAPTURED = [8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640]


@every_release("0.5.17")
def test_the_setting_asks_in_the_users_place(version, asked, monkeypatch):
    """For our model on our GPU alone, and not where the user has spoken, or where nobody has read what would happen."""
    resolve = resolution(version, monkeypatch)
    assert resolve(Arguments()) == ("breakable", CAPTURED)
    assert resolve(Arguments(cuda_graph_backend_prefill="disabled"))[0] == "disabled"
    assert resolve(Arguments(disable_prefill_cuda_graph=True))[0] == "disabled"
    assert resolve(Arguments(cuda_graph_bs_prefill=[4])) == ("left out", [4])
    for other in ({"pp_size": 2}, {"enable_lora": True}, {"speculative_algorithm": "DSPARK"}, {"attn_cp_size": 2}):
        assert resolve(Arguments(**other))[1] is None, other
    with_mtp = resolve(Arguments(speculative_algorithm="EAGLE"))[1]
    assert with_mtp == (CAPTURED if since(version, "0.5.23") else None)
    assert resolve(Arguments(architecture="LlamaForCausalLM", model_type="llama")) == ("left out", None)
    assert resolve(Arguments(model_type="deepseek_v41")) == ("left out", None)
    assert resolve(Arguments(architecture="InklingForConditionalGeneration", model_type="inkling"))[0] == "full"
    monkeypatch.setattr(device_gate, "serves_current_device", lambda: False)
    assert resolve(Arguments()) == ("left out", None)
    monkeypatch.setattr(device_gate, "serves_current_device", lambda: True)
    for change in ((patching, "value", lambda default: 0), (prefill_graphs, "config_of", lambda server_args: None)):
        with monkeypatch.context() as changed:
            changed.setattr(*change)
            assert resolve(Arguments()) == ("left out", None)


def test_they_are_asked_for_where_nothing_else_is(asked, monkeypatch):
    """And told. By itself each of these leaves them out."""
    others = dict.fromkeys(("nnodes", "pp_size", "dp_size", "dcp_size", "attn_cp_size", "attn_dp_size"), 2)
    others |= {"cuda_graph_backend_prefill": "full", "cuda_graph_bs_prefill": [4], "cuda_graph_max_bs_prefill": 8}
    others |= {"cuda_graph_config": "{}", "moe_a2a_backend": "deepep", "disaggregation_mode": "prefill"}
    flags = ("disable_prefill_cuda_graph", "disable_cuda_graph", "enable_prefill_cp", "enable_two_batch_overlap")
    others |= dict.fromkeys((*flags, "enable_memory_saver", "enable_lora"), True) | {"speculative_algorithm": "DSPARK"}
    said, ask = [], prefill_graphs.replace_function(lambda server_args: None)
    monkeypatch.setattr(prefill_graphs.report, "info", said.append)
    for name, value in others.items():
        arguments = Arguments(**{name: value})
        before = dict(vars(arguments))
        ask(arguments)
        assert vars(arguments) == before and not said, name
    ask(Arguments())
    assert len(said) == 1 and "prefill passes of 4 to 640 rows are captured" in said[0]


@every_release("0.5.17")
@pytest.mark.parametrize("given", [{"dp_size": 2, "enable_dp_attention": True}, {"attn_dp_size": 2}], ids=str)
def test_data_parallel_attention_has_none_however_it_is_spelled(version, given, asked, monkeypatch):
    """From 0.5.22 on the old flags are the new one's by the time that graphs are asked for, and dp_size is 1."""
    has_width = since(version, "0.5.22")
    if "attn_dp_size" in given and not has_width:
        return  # no such argument
    resolve = resolution(version, monkeypatch)
    arguments = Arguments(**({"attn_dp_size": 1, "enable_dp_attention": False} if has_width else {}) | given)
    if has_width:
        names = {"resolving_view": View, "declare_resolution": declare}
        take(fetch(version), names, "handle_deprecated_dp_attention", PARALLEL)(arguments)
        assert (arguments.now("attn_dp_size"), arguments.now("dp_size")) == (2, 1)
        steps = source(fetch(version), "sglang.srt.arg_groups.pipeline")
        order = [steps.index(f"run_hook({name}, ") for name in ("handle_deprecated_dp_attention", WHERE_ASKED)]
        assert order == sorted(order)
    assert resolve(arguments)[1] is None


@every_release("0.5.17")
def test_the_arguments_that_are_looked_at_are_the_releases(version):
    text = "\n".join(source(fetch(version), module) for module in fields_of(version))
    for name in prefill_graphs.PLAIN:
        assert f"\n    {name}: " in text, name
    for name in prefill_graphs.PLAIN_SINCE_0_5_22:
        assert (f"\n    {name}: " in text) is since(version, "0.5.22"), name


def fields_of(version):
    """The modules of a release that have its arguments."""
    files = (m for m in members(fetch(version)) if m.startswith("sglang/srt/arg_groups/fields/") and m.endswith(".py"))
    return [ARGUMENTS, *(m.removesuffix(".py").replace("/", ".") for m in files if "__init__" not in m)]


def test_captured_rows_end_with_the_number_of_the_setting():
    assert prefill_graphs.captured_rows(640) == CAPTURED
    assert prefill_graphs.captured_rows(100)[-2:] == [96, 100] and prefill_graphs.captured_rows(4) == [4]
    assert prefill_graphs.captured_rows(8192)[-2:] == [6144, 8192]
    for most in (9, 1025, 12288, 12289, 16384, 32768, 999_999):  # else what lies between is in no graph
        rows = prefill_graphs.captured_rows(most)
        assert rows[-1] == most and all(a < b <= 2 * a for a, b in zip(rows, rows[1:], strict=False)), rows
    for rows, more in zip(CAPTURED, CAPTURED[1:], strict=False):
        assert more <= 2 * rows  # else SGLang would run a pass between them without a graph


@every_release("0.5.17")
def test_they_are_captured_behind_the_pools_and_before_decodes(version):
    """So their memory is what --mem-fraction-static leaves (commands/plan/memory.py): no release sizes this model's
    pools again behind the capture."""
    wheel = fetch(version)
    made = ast.unparse(wo_a.definition(wheel, "Scheduler.init_model_worker", "sglang.srt.managers.scheduler"))
    assert 0 < made.index("self.init_memory_pools()") < made.index("self.init_all_cuda_graphs()")
    setup = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup"
    both = ast.unparse(wo_a.definition(wheel, "capture_cuda_graphs", setup))
    assert 0 < both.index("capture_prefill_graph(") < both.index("capture_decode_graph(")
    place = (argument_defaults.OVERRIDES, "") if since(version, "0.5.19") else (ARGUMENTS, "ServerArgs.")
    again = wo_a.definition(wheel, f"{place[1]}post_capture_kv_sizing_planned", place[0])
    last = [ast.unparse(n) for n in again.body if isinstance(n, ast.If)][-1]
    assert last == "if is_deepseek_v4(hf_config) or is_minimax_sparse(hf_config):\n    return False"


@every_release("0.5.17")
def test_each_size_keeps_tables_as_wide_as_the_context(version):
    """What `plan` counts for each captured number of rows, besides one pool for all."""
    backend = "sglang.srt.layers.attention.deepseek_v4_backend"
    name = "DeepseekV4AttnBackend.init_forward_metadata_for_breakable_cuda_graph_capture"
    made = ast.unparse(wo_a.definition(fetch(version), name, backend))
    assert "MAX_SEQ_LEN_FOR_CAPTURE" in made or "_prefill_graph_context_width" in made
    runner = ast.unparse(
        wo_a.definition(fetch(version), "PrefillCudaGraphRunner._init_forward_metadata_for_capture", RUNNER)
    )
    key = "shape_key" if since(version, "0.5.21") else "num_tokens"
    assert f"self.attn_metadata_buffers[{key}] = metadata" in runner
    assert "get_or_create_global_graph_memory_pool" in source(fetch(version), BACKEND)
