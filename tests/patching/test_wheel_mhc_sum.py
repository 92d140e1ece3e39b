"""Two layers of SGLang's, taken out of the wheels and run on the CPU over stand-ins: the row-parallel projection behind
the attention, the experts, the boundaries between them and the post behind the last, with the sums put off and without.
"""

import ast
import contextlib
import fnmatch
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches import device_gate, models_served
from deepseek_v4_sm120.sglang_patches.adapters import mhc as boundary
from deepseek_v4_sm120.sglang_patches.adapters import mhc_owed_terms as terms
from deepseek_v4_sm120.sglang_patches.adapters import mhc_sum as adapter
from tests.adapters.test_mhc_sum import HIDDEN, RANKS, Coordinator
from tests.patching.test_wheel_wo_a import QUIET, Quiet, definition, take
from tests.patching.wheels import every_release, since

FIRST, BY_BOUNDARIES = "0.5.13", "0.5.23"
MOE_MODEL, MOE_UTILS = "sglang.srt.models.deepseek_v2", "sglang.srt.layers.moe.utils"
LINEAR = "sglang.srt.layers.linear"
FUSED_MODULE = "sglang.srt.models.deepseek_common.amd.deepseek_v4_fused_mhc"
PREPARE = "sglang.srt.layers.layer_boundary.prepare"
OUTPUT = "sglang.srt.layers.layer_boundary.output"
HOOKS = "sglang.srt.model_executor.hook_manager"
HC_BOUNDARY = "sglang.srt.models.deepseek_v4_boundary"
DP_ATTENTION = "sglang.srt.layers.dp_attention"
MOE_TRANSPORT = "sglang.srt.models.deepseek_common.moe_transport"
EPS = 1e-6


class QuietContext(Quiet):
    """Also for `with`."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


class Part:
    """Called, it is its `forward`; what it was not given is quiet."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)

    def __getattr__(self, name):
        return QUIET


# ---- numbers in place of the hyper-connections: enough to see who added what, when


def post_of(f, streams, post, comb):
    return (streams.float() * 0.5 + f.float()[:, None] * 0.25).to(torch.bfloat16)


def mhc(f, streams, post, comb, *weights, sum_over=None, tag=0, routed=None, scaling=1.0, **options):
    """ops.mhc: the ranks' terms are alike."""
    sums.append(None if sum_over is None else tag)
    forms.append("unmerged" if f.ndim == 3 else "whole" if routed is None else "unadded")
    f = merge(f) if f.ndim == 3 else f if routed is None else f + scaling * routed
    new = post_of(f if sum_over is None else RANKS * f, streams, post, comb)
    return new, post.view(-1, 4), comb, new.float().mean(1).to(torch.bfloat16)


def merge(partial):
    return partial.sum(0).to(torch.bfloat16)


def add_shared(shared, routed, *, scaling):
    finished.append("added")
    return shared.add_(routed, alpha=scaling)


sums: list[int | None] = []  # of every boundary: the tag, None: f was complete
forms: list[str] = []  # of the terms that came to it
finished: list[str] = []  # terms that somebody else looked at


@pytest.fixture
def group(monkeypatch):
    module = ModuleType(adapter.PARALLEL_STATE)
    module._TP, module._PDMUX_PREFILL_TP_GROUP = Coordinator(), None
    module._ATTN_TP, module._PP = module._TP, SimpleNamespace(world_size=1)
    monkeypatch.setitem(sys.modules, adapter.PARALLEL_STATE, module)
    monkeypatch.setattr(boundary.op, "mhc", mhc)
    monkeypatch.setattr(boundary.op, "mhc_post", lambda f, streams, post, comb: post_of(f, streams, post, comb))
    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(terms.op, "takes_terms", terms.op.takes_sum)  # whose blocks are all resident
    monkeypatch.setattr(terms.experts_op, "add_shared", add_shared)
    monkeypatch.setattr(terms.linear_op, "merge", lambda partial: finished.append("merged") or merge(partial))
    monkeypatch.setattr(terms.linear_op, "splits_of", lambda *sizes: terms.op.TERM_SPLITS)
    monkeypatch.setattr(terms.linear_op, "fp8_linear_unmerged", lambda x, *_: (x * 0.5).float() * SHARES)
    for seen in (sums, forms, finished):
        seen.clear()
    return module._TP


SHARES = torch.tensor([0.5, 0.25, 0.125, 0.125]).view(-1, 1, 1)  # of the parts of wo_b's inputs
FUSED = boundary.replace_fused_post_pre(None)


def product(layer, x, bias=None):
    """Of wo_b, as fp8_linear.py has it; inputs are halved."""
    found = terms.of_product(layer, x, None)
    return x * 0.5 if found is None else found


def shared_add(experts, x, shared, scale):
    """As mxfp4_moe.py has it."""
    found = terms.of_experts(shared, x, 1.0)
    return x + shared if found is None else found


def names_of(wheel, group) -> dict:
    """What SGLang's code calls; sums by the coordinator, as its functions do."""
    sized = {"tp_size": RANKS, "attn_tp_size": RANKS, "moe_tp_size": RANKS, "moe_ep_size": 1, "attn_dp_size": 1}
    parallel = SimpleNamespace(tp_group=group, attn_tp_group=group, **sized)
    no_backend = SimpleNamespace(is_none=lambda: True)
    names = {
        **{"torch": torch, "nullcontext": contextlib.nullcontext, "_is_cuda": True, "len": len, "hasattr": hasattr},
        "use_symmetric_memory": lambda *args, **kwargs: contextlib.nullcontext(),
        "get_group_rank_size": lambda group: (0, RANKS),
        "tensor_model_parallel_all_reduce": lambda x, **_: group.all_reduce(x),
        "moe_tensor_model_parallel_all_reduce": lambda x: group.all_reduce(x),
        "get_tensor_model_parallel_world_size": lambda: RANKS,
        "get_parallel": lambda: parallel,
        "get_forward": QuietContext,
        "get_moe_a2a_backend": lambda: no_backend,
        "maybe_fuse_routed_scale_and_shared_add": shared_add,
        "KTEPWrapperMethod": int,
        "mhc_fused_post_pre": FUSED,
        "_get_mhc_ops": lambda: SimpleNamespace(mhc_fused_post_pre=FUSED),
        "get_mhc_ops": lambda: SimpleNamespace(mhc_fused_post_pre=FUSED),
        "_is_fused_mhc_post_pre_enabled": lambda: True,
        "try_fused_hc_post_pre": lambda *args: None,
        "try_mhc_fused_post_pre_boundary": lambda *args, **kwargs: None,
        "is_sglang_mhc_post_pre_enabled": lambda: True,
    }
    names["GIVEN"] = {"get_mhc_ops": names["get_mhc_ops"], "_get_mhc_ops": names["_get_mhc_ops"]}
    names["GIVEN"] |= {name: names[name] for name in names if name.endswith("_all_reduce")}
    if definition(wheel, "apply_mhc_post_pre_boundary", FUSED_MODULE) is not None:
        names["apply_mhc_post_pre_boundary"] = take(wheel, dict(names), "apply_mhc_post_pre_boundary", FUSED_MODULE)
        names["GIVEN"]["apply_mhc_post_pre_boundary"] = names["apply_mhc_post_pre_boundary"]
    if definition(wheel, "post_experts_all_reduce", MOE_UTILS) is not None:
        experts = dict(names)
        take(wheel, experts, "_post_experts_sum", MOE_UTILS)
        names["post_experts_all_reduce"] = take(wheel, experts, "post_experts_all_reduce", MOE_UTILS)
        names["GIVEN"]["post_experts_all_reduce"] = names["post_experts_all_reduce"]
    return names


def row_parallel(wheel, names):
    """wo_b, of inputs that are halved; its forward is the wheel's."""
    forward = take(wheel, dict(names), "RowParallelLinear.forward", LINEAR)
    return type("RowParallelLinear", (Part,), {"forward": forward})(
        **{"quant_method": SimpleNamespace(apply=product), "weight": torch.empty(HIDDEN, HIDDEN), "bias": None},
        **{"skip_bias_add": False, "input_is_parallel": True},
        **{"reduce_results": True, "tp_size": RANKS, "tp_rank": 0, "use_dp_attention_reduce": False},
        **{"use_decode_attn_tp": False, "parallel_group": "tp"},
    )


def experts(wheel, names):
    """DeepseekV2MoE with the wheel's forward_normal around what experts and shared experts give."""
    forward = take(wheel, dict(names), "DeepseekV2MoE.forward_normal", MOE_MODEL)

    def run(self, x, forward_batch=None, *, input_ids=None, input_ids_global=None, **_):
        return forward(self, x, input_ids_global=input_ids_global)

    class Experts(Part):
        def forward(self, x, topk_output, **_):
            return x * 0.75

    def _forward_shared_experts(self, x, *args, **_):
        return x * 0.125

    members = {"forward": run, "_forward_shared_experts": _forward_shared_experts}
    return type("DeepseekV2MoE", (Part,), members)(
        **{"experts": Experts(quant_method=None), "tp_size": RANKS, "_shared_expert_tp1": False},
        **{"_fuse_shared_experts_inside_sbo": False, "reduce_results": True, "is_deepseek_v4": False},
        **{"_maybe_quant_moe_input_once": lambda *args: None, "is_hash": False, "shared_experts": QUIET},
    )


def layer(wheel, names, *, patched, forward="DeepseekV4DecoderLayer.forward"):
    """A decoder layer with the wheel's forward."""
    wo_b = row_parallel(wheel, names)
    if definition(wheel, "MQALayer._project_wo_b") is not None:
        project = take(wheel, dict(names), "MQALayer._project_wo_b")
    else:
        text = ast.unparse(definition(wheel, "MQALayer.forward"))
        assert text.count("self.wo_b(") == 1 and text.endswith("return o")  # between them, only another group's sum

        def project(self, o):
            o, _ = self.wo_b(o.flatten(1))
            return o

    def attend(self, x, positions, forward_batch, x_quant=None, **options):
        return project(self, x, **options)

    attention = type("MQALayer", (Part,), {"forward": attend})(wo_b=wo_b, attn_tp_size=RANKS, tp_size=RANKS)
    attention.maybe_use_decode_attn_tp = lambda batch: contextlib.nullcontext()
    forward = take(wheel, names, forward)
    members = {
        "forward": adapter.replace_layer_forward(forward) if patched else forward,
        "_run_moe_ffn_dp_sync": take(wheel, dict(names), "DeepseekV4DecoderLayer._run_moe_ffn_dp_sync"),
        "hc_post": boundary.replace_hc_post(None),
        "hc_pre": lambda self, x, *args, **kwargs: (x.float().mean(1).bfloat16(), *coefficients(x.shape[0]), True),
    }
    members = {name: member for name, member in members.items() if member is not None}
    weights = {"fn": torch.zeros(24, 4 * HIDDEN), "scale": torch.ones(3), "base": torch.zeros(24)}
    hc = {f"hc_{set_}_{name}": value for set_ in ("attn", "ffn") for name, value in weights.items()}
    norms = {f"_{name}_layernorm_weight_bf16": torch.ones(HIDDEN).bfloat16() for name in ("input", "post_attention")}
    return type("DeepseekV4DecoderLayer", (Part,), members)(
        **{"self_attn": attention, "mlp": experts(wheel, names), "use_fused_mhc_post_pre": True, "hc_mult": 4},
        **{"rms_norm_eps": EPS, "hc_eps": EPS, "hc_sinkhorn_iters": 20, "dsa_enable_prefill_cp": False},
        **{"input_layernorm": SimpleNamespace(variance_epsilon=EPS)},
        **{"post_attention_layernorm": SimpleNamespace(variance_epsilon=EPS)},
        **hc,
        **norms,
    )


def coefficients(rows):
    return torch.ones(rows, 4), torch.ones(rows, 4, 4)


def streams_of(rows):
    return torch.arange(rows * 4 * HIDDEN).remainder(48).view(rows, 4, HIDDEN).bfloat16()


def two_layers(wheel, group, rows, *, patched):
    """(streams behind the last layer, sums that the group made)"""
    names, before = names_of(wheel, group), group.sums
    state = (streams_of(rows), None, None, None)
    for one in (layer(wheel, names, patched=patched), last := layer(wheel, names, patched=patched)):
        value, *rest = state
        state = one(QUIET, value, QUIET, QUIET, QUIET, *rest)
    return last.hc_post(*state), group.sums - before


# ---- from 0.5.23 on: layers of boundaries, which finish a sublayer's sum where they read the next one's input


class Stream:
    """A forward's residual, and what its last sublayer left."""

    def __init__(self, streams):
        self.written, self.owed, self.update = streams, None, None


class Boundary(Part):
    """A stage's boundary: the wheel's way from what is owed to the read, without the choice of steps and layouts."""

    def prepare(self, hidden, stream, read_context):
        entry = {"step": self.step, "is_plain_add": False, "carried_fusions": (), "read": self.read}
        owed, residual = (hidden, None) if stream.owed is None else (stream.owed, stream.written)
        update = Part(is_plain_add=False) if stream.update is None else stream.update
        x, stream.written = self.run_entry(owed, residual, stream, self.norm, **entry, update=update)
        return x

    def finish(self, output, stream):
        stream.owed, stream.update = output, self.update
        return output

    def transport_context(self, stream):
        return Part(input_ids=None, input_ids_global=None, do_shared_local=False, return_moe_output=False)

    @contextlib.contextmanager
    def exit(self, stream):
        yield SimpleNamespace(finish=lambda partial: self.finish(self.moe_output(partial), stream))


def kinds_of_output(wheel, names) -> dict:
    complete = take(wheel, dict(names), "UnreducedOutput.complete", OUTPUT)
    unreduced = type("UnreducedOutput", (Part,), {"complete": complete})
    complete = take(wheel, dict(names), "MoeFinalize.complete", MOE_TRANSPORT)
    finalize = type("MoeFinalize", (Part,), {"complete": complete})
    return {"UnreducedOutput": unreduced, "DeferredFinalize": finalize, "DeclaredSum": int}


def layer_of_boundaries(wheel, names, kinds, *, patched):
    made = layer(wheel, names, patched=patched, forward="DeepseekV4CudaDecoderLayer.forward")
    made.self_attn.wo_b.reduce_results = made.mlp.reduce_results = False
    group = names["get_parallel"]().tp_group
    unreduced, finalize = kinds["UnreducedOutput"], kinds["DeferredFinalize"]
    entry = dict(names) | kinds
    entry["complete_owed"] = take(wheel, dict(names) | kinds, "complete_owed", OUTPUT)
    _, run_entry, step = (
        take(wheel, entry, f"_{name}", PREPARE) for name in ("run_read_fusions", "run_entry", "update_read")
    )
    members = {"update_and_read": take(wheel, dict(names) | STATE, "HcReadCall.update_and_read", HC_BOUNDARY)}
    members |= {"read": take(wheel, dict(names) | STATE, "HcReadCall.read", HC_BOUNDARY)}
    members |= {"_parameters": take(wheel, dict(names), "HcReadCall._parameters", HC_BOUNDARY)}
    members |= {"init_residual": staticmethod(lambda streams: streams)}
    kind = type("HcReadCall", (Part,), members)

    def owed(**attributes):
        return unreduced(complete_sum=None, reduce_to_dp_local=None, group=group, **attributes)

    def updated(output, state):
        return made.hc_post(output, state.streams, state.post, state.comb)

    update = type("HcUpdate", (Part,), {})(is_plain_add=False, update=updated)
    for name, norm in (("attn", made.input_layernorm), ("ffn", made.post_attention_layernorm)):
        read = kind(layer=made, attention=name == "attn", bind=None, completing_fusions=())
        stage = Boundary(read=read, norm=norm, update=update, run_entry=run_entry)
        stage.step = lambda *args, read=read, **call: step(*args, pre_move=None, enters_stack=True, read=read, **call)
        stage.moe_output = lambda partial: partial if RANKS == 1 else finalize(partial=partial, pieces=None)
        setattr(made, f"{name}_boundary", stage)

    def attend(x, positions, batch, quantized):
        output = made.self_attn(x, positions, batch, defer_all_reduce=True)
        return output if RANKS == 1 else owed(partial=output.partial)

    made._run_boundary_attention = attend
    made.boundary_pre_from_prev, made.boundary_mhc_fusions = False, True
    return made


STATE = {
    "HcUpdate": Part,
    "ReadState": lambda *state, call: SimpleNamespace(
        **dict(zip(("streams", "post", "comb", "quantized"), state, strict=True))
    ),
}


def two_layers_of_boundaries(wheel, group, rows, *, patched):
    names, before = names_of(wheel, group), group.sums
    names["hc_boundary"], names["residual_batch"] = (
        QUIET,
        SimpleNamespace(written_residual=lambda stream: stream.written),
    )
    names["mhc"] = SimpleNamespace(AttnOutput=lambda partial: SimpleNamespace(partial=partial), MHC_POST_MULT_VALUE=2.0)
    stream, kinds = Stream(streams_of(rows)), kinds_of_output(wheel, names)
    value = stream.written
    for _ in range(2):
        last = layer_of_boundaries(wheel, names, kinds, patched=patched)
        value = last(QUIET, value, QUIET, stream, QUIET)
    owed = stream.owed if RANKS == 1 else stream.owed.complete()
    return last.ffn_boundary.update.update(owed, stream.written), group.sums - before


def ways(wheel, version, group, rows, *, patched):
    run = two_layers_of_boundaries if since(version, BY_BOUNDARIES) else two_layers
    return run(wheel, group, rows, patched=patched)


@every_release(FIRST)
@pytest.mark.parametrize("rows", [1, 64, 65])
def test_the_sums_of_two_layers(version, rows, group, sglang_wheel):
    wheel = sglang_wheel(version)
    expected, made = ways(wheel, version, group, rows, patched=False)
    assert made == 4 and sums == [None] * 3 and forms == ["whole"] * 3 and not finished
    sums.clear(), forms.clear()
    found, made = ways(wheel, version, group, rows, patched=True)
    # wo_b's, the experts' and wo_b's again inside; the last one in front of the post
    assert (made, sums) == ((1, [1, 2, 3]) if rows <= 64 else (4, [None] * 3))
    assert torch.equal(found, expected) and found.float().std() > 0
    # their last additions, too; the experts' in front of the post is made there
    assert (forms, finished) == (
        (["unmerged", "unadded", "unmerged"], ["added"]) if rows <= 64 else (["whole"] * 3, [])
    )


class Alone(Coordinator):
    """The group of one card, as SGLang's all_reduce is there."""

    world_size = 1

    def __init__(self):
        super().__init__()
        self.ca_comm = None

    def all_reduce(self, input_):
        return input_


@every_release(FIRST)
def test_two_layers_of_one_card(version, group, sglang_wheel, monkeypatch):
    """wo_b's parts come to both boundaries behind it, and nobody else looks at them."""
    state, wheel, rows = sys.modules[adapter.PARALLEL_STATE], sglang_wheel(version), 3
    state._TP = state._ATTN_TP = one = Alone()
    monkeypatch.setattr(sys.modules[__name__], "RANKS", 1)
    monkeypatch.setattr(boundary.op, "takes_own_terms", lambda like: True)
    expected, _ = ways(wheel, version, one, rows, patched=False)
    assert sums == [None] * 3 and forms == ["whole"] * 3 and not finished
    forms.clear()
    found, _ = ways(wheel, version, one, rows, patched=True)
    assert forms == ["unmerged", "whole", "unmerged"] and not finished
    assert torch.equal(found, expected) and found.float().std() > 0


@every_release(FIRST)
@pytest.mark.parametrize("local_rows", [0, 3])
def test_every_rank_makes_the_sum_that_is_scattered(version, local_rows, group, sglang_wheel):
    """With data-parallel attention SGLang's `dp_scatter` takes a rank's rows out of the experts' sum; of a rank that
    has none (an idle one) it takes nothing, and the other ranks' sums would wait for it."""
    sys.modules[adapter.PARALLEL_STATE]._ATTN_TP = Coordinator()
    copied = lambda out, summed, *_: out.copy_(summed[: len(out)])  # noqa: E731
    names = {"get_dp_local_info": lambda batch: (0, local_rows), "_note_dp_gather_in_prefill_graph": lambda: None}
    names["GIVEN"] = names | {"memcpy_triton": copied, "memcpy": copied}
    scatter = take(sglang_wheel(version), dict(names["GIVEN"]) | names, "dp_scatter", DP_ATTENTION)

    def forward(self, partial):
        scatter(local := torch.empty(local_rows, HIDDEN, dtype=torch.bfloat16), group.all_reduce(partial), None)
        return local

    partial = streams_of(3)[:, 0].contiguous()
    local = adapter.replace_layer_forward(forward)(object(), partial)
    assert group.sums == 1 and torch.equal(local, RANKS * partial[:local_rows])


class Summing(torch.nn.Module):
    """A layer's part that gives a sum of its group's."""

    def forward(self, x):
        return sys.modules[adapter.PARALLEL_STATE]._TP.all_reduce(x * 0.5)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Summing()

    def forward(self, x):
        return self.mlp(x)


@every_release(FIRST)
@pytest.mark.parametrize("announced", [True, False])
def test_a_function_of_the_users_gets_tensors(version, announced, group, sglang_wheel, monkeypatch):
    """--forward-hooks, by the release's own function. Not announced it gets what stands for a sum, or this would show
    nothing."""
    seen, model = [], torch.nn.Module()
    model.layers = torch.nn.ModuleList([Layer(), Layer()])

    def hook(module, given, returned):
        seen.append([isinstance(x, torch.Tensor) for x in (*given, returned)])

    register = take(
        sglang_wheel(version),
        {"resolve_callable": lambda path: lambda config: hook, "fnmatch": fnmatch, "logger": QUIET},
        "register_forward_hooks",
        HOOKS,
    )
    register(model, [{"name": "seen", "target_modules": ["layers.*"], "hook_factory": "of_the_user.looks"}])
    monkeypatch.setattr(models_served, "_announced", {"model_type": "deepseek_v4", "is_looked_into": announced})
    monkeypatch.setattr(Layer, "forward", adapter.replace_layer_forward(Layer.forward))
    x = torch.ones(2, HIDDEN, dtype=torch.bfloat16)
    for one in model.layers:
        x = one(x)
    assert len(seen) == 4 and all(map(all, seen)) is announced


@every_release(FIRST)
def test_a_stages_exchanges_run_beside_its_layers(version, sglang_wheel):
    """Why nothing is put off with pipeline parallelism: a batch is launched on a stream of its own, and behind that,
    in the loop, outputs are received from the stage before on the scheduler's, and gathered by attention's group."""
    wheel, mixin = sglang_wheel(version), "sglang.srt.managers.scheduler_pp_mixin"
    loop, launch, receive = (
        ast.unparse(definition(wheel, f"SchedulerPPMixin.{name}", mixin))
        for name in ("event_loop_pp", "_pp_launch_batch", "_pp_recv_dict_from_prev_stage")
    )
    assert "with self.forward_stream_ctx:" in launch
    assert loop.rindex("_pp_commit_send_output_work_and_preprocess_output_tensors(") > loop.index("_pp_launch_batch(")
    assert "forward_stream" not in loop + receive and "attn_tp_group" in receive
