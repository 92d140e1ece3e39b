"""Argument resolution and imports of SGLang's real wheels, on two faked SM120 cards, with our folder on PYTHONPATH.

0.5.12 has no SM120 branch and must get through with our settings. What this cannot see: kernels. The indexer of 0.5.12
has none for SM120 (its TileLang and torch variants both refuse the lengths that they are given), so that release
serves only with an operator of ours in that place.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
from build_artifact import write_dist_info

import deepseek_v4_sm120
from deepseek_v4_sm120.sglang_patches.adapters.argument_defaults import OTHER_EXPERTS
from deepseek_v4_sm120.sglang_patches.defaults import DEFAULTS
from tests.e2e import stages
from tests.patching.started import CONFIG, RESOLVES
from tests.patching.stored_folder import stored_folder
from tests.patching.test_several_servers import SERVERS
from tests.patching.wheels import content, every_release, fetch, since, unpacked

NVFP4 = {"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}

RESOLVE = (
    RESOLVES
    + """    from deepseek_v4_sm120 import patching
    engine = patching.active_engine()
    arguments = ServerArgs(model_path=MODEL, tp_size=2, skip_tokenizer_init=True, **MORE)
    names = ("attention_backend", "moe_runner_backend", "page_size", "chunked_prefill_size", "max_running_requests")
    resolved = arguments
    if hasattr(arguments, "resolve_once"):  # 0.5.20 and later
        from sglang.srt.arg_groups.overrides import resolved_view
        arguments.resolve_once()
        resolved = resolved_view(arguments)
        names += ("prefill_decode_interval",)
    print(json.dumps({
        "arguments": {name: getattr(resolved, name) for name in names},
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("SGLANG_", "_DSV4"))},
        "states": {c.default: [c.state, c.reason] for c in engine.steering.outcomes} if engine else {},
    }))
"""
)
SPECULATION = (
    RESOLVES
    + """    names, found = ("algorithm", "num_draft_tokens", "draft_model_path"), []
    for more in MORE:
        resolved = arguments = ServerArgs(model_path=MODEL, tp_size=2, skip_tokenizer_init=True, **more)
        if hasattr(arguments, "resolve_once"):
            from sglang.srt.arg_groups.overrides import resolved_view
            arguments.resolve_once()
            resolved = resolved_view(arguments)
        found.append({name: getattr(resolved, "speculative_" + name) for name in names})
    print(json.dumps(found))
"""
)
WORKER = """
    import importlib, json, os, sys
    sys.path[1:1] = [MACHINE]
    import sm120_machine
    sys.path += [WHEEL, PACKAGES]
    import sglang
    from sglang.srt.environ import envs
    from sglang.srt.layers.deep_gemm_wrapper import configurer
    from sglang.srt.layers.quantization import mxfp4_marlin_moe
    import sglang.srt.layers.attention.deepseek_v4_backend
    import sglang.srt.models.deepseek_v4 as model
    import sglang.srt.managers.scheduler  # the preflight: every row is checked here
    from deepseek_v4_sm120 import patching
    print(json.dumps({
        "deep_gemm": configurer.ENABLE_JIT_DEEPGEMM,
        "marlin": mxfp4_marlin_moe.is_sm90_supported(),
        "wo_a": model._FP8_WO_A_GEMM,
        "topk_v2": envs.SGLANG_OPT_USE_TOPK_V2.get(),
        "records": {r.patch.name: r.state for r in patching.active_engine().records},
    }))
"""


def test_arguments_resolve_to_what_the_gpu_can_run(run):
    found = run(RESOLVE)
    assert found["arguments"] == {
        "attention_backend": "dsv4",
        "moe_runner_backend": "marlin",
        "page_size": 256,
        "chunked_prefill_size": 8192,
        "max_running_requests": 256,
    }
    wanted = {
        "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
        "SGLANG_OPT_USE_TOPK_V2": "0",
        "SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2": "0",
        "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1",
    }
    assert wanted.items() <= found["environment"].items()
    assert wanted.items() <= json.loads(found["environment"]["_DSV4_SM120_CHILD_ENVIRONMENT"]).items()


def test_what_the_user_set_stays(run):
    own = {"SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2": "1", "SGLANG_DSV4_FP4_EXPERTS": "0"}
    found = run(RESOLVE, more="{'moe_runner_backend': 'triton'}", **own)
    assert found["arguments"]["moe_runner_backend"] == "triton"
    assert found["environment"]["SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2"] == "1"
    assert found["states"]["custom_all_reduce_v1"] == ["USER'S OWN", "kept SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2=1"]
    assert found["states"]["fp4_experts_marlin"] == ["NOT APPLICABLE", "SGLANG_DSV4_FP4_EXPERTS=0"]


def test_experts_that_sglang_finds_to_be_fp8_are_not_given_to_marlin(run, tmp_path):
    """Marlin's backend has no runner for them: the first forward ends with an AttributeError. Nobody has to say it."""
    config = {name: value for name, value in CONFIG.items() if name != "expert_dtype"}
    for name in ("fp8", "fp4"):
        (tmp_path / name).mkdir()
    model = stored_folder(tmp_path / "fp8", "F8_E4M3", "scale", config=config)
    found = run(RESOLVE.replace("MODEL", repr(str(model))))
    assert found["arguments"]["moe_runner_backend"] == "auto"
    assert found["states"]["fp4_experts_marlin"] == ["NOT APPLICABLE", "SGLANG_DSV4_FP4_EXPERTS=0"]
    assert "SGLANG_DSV4_FP4_EXPERTS" not in found["environment"]
    of_fp4 = stored_folder(tmp_path / "fp4", "I8", "scale", config=config)
    assert run(RESOLVE.replace("MODEL", repr(str(of_fp4))))["arguments"]["moe_runner_backend"] == "marlin"
    servers = [(str(folder), {}) for folder in (model, of_fp4)]
    of_fp8, none = run(SERVERS, more=repr(servers), version="0.5.23", DSV4_SM120_SET="reproducible=on")
    not_reproducible, of_the_model = of_fp8["notes"]
    assert "NOT REPRODUCIBLE" in not_reproducible and of_the_model == THEIRS.format(
        "mxfp4_moe (expert_format fp8", "fp4"
    )
    assert none["notes"] == []


THEIRS = "model: SGLang's own code runs in place of {}, made for {})"


CONVERSIONS = (  # what a configuration has, and whose its parts are then
    ({"quantization_config": CONFIG["quantization_config"] | NVFP4}, [("mxfp4_moe (expert_format nvfp4", "fp4")]),
    ({"n_routed_experts": 154}, [("bf16_linear (experts 154", "a multiple of 4")]),
    ({"n_routed_experts": 192, "num_experts_per_tok": 4}, []),
)


@pytest.mark.parametrize("version", ["0.5.17", "0.5.23"], scope="module")
def test_what_a_conversion_leaves_to_sglang_is_in_its_reports(run, tmp_path, version):
    """Of servers one behind the other: each has its own alone (test_several_servers.py)."""
    is_reproducible, servers = version == "0.5.23", []
    for number, (changes, _) in enumerate(CONVERSIONS):
        (tmp_path / str(number)).mkdir()
        (tmp_path / f"{number}/config.json").write_text(json.dumps(CONFIG | changes))
        servers.append((str(tmp_path / str(number)), {}))
    asked = {"DSV4_SM120_SET": "reproducible=on"} if is_reproducible else {}
    notes = [one["notes"] for one in run(SERVERS, more=repr(servers), version=version, **asked)]
    assert [note for note in notes[0] if "NOT REPRODUCIBLE" in note] == [OTHER_EXPERTS] * is_reproducible
    notes[0] = notes[0][is_reproducible:]
    assert notes == [[THEIRS.format(*one) for one in theirs] for _, theirs in CONVERSIONS]


def test_without_us_it_stays_at_what_cannot_start(run):
    found = run(RESOLVE, DSV4_SM120="off")
    assert found["arguments"]["moe_runner_backend"] == "auto"
    assert "SGLANG_ENABLE_JIT_DEEPGEMM" not in found["environment"]


def test_a_worker_imports_with_the_parents_decision(run):
    handover = run(RESOLVE)["environment"]["_DSV4_SM120_CHILD_ENVIRONMENT"]
    found = run(WORKER, _DSV4_SM120_CHILD_ENVIRONMENT=handover)
    assert (found["deep_gemm"], found["wo_a"], found["topk_v2"], found["marlin"]) == (False, False, False, True)
    assert found["records"]["sparse_decode"] in ("READY", "APPLIED")
    assert found["records"]["marlin_on_sm120"] == "APPLIED"


@pytest.mark.parametrize("version", ["0.5.14", "0.5.17", "0.5.20", "0.5.23"], scope="module")
def test_later_releases_resolve_with_our_settings(run, version):
    found = run(RESOLVE, version=version)
    assert found["arguments"]["attention_backend"] == "dsv4"
    assert found["arguments"].get("prefill_decode_interval", 8) == 8
    assert not [name for name, (state, _) in found["states"].items() if state == "USER'S OWN"]
    on = {name for name, (state, _) in found["states"].items() if state == "ON"}
    later = {"prefill_decode_interval"} if version in ("0.5.20", "0.5.23") else set()
    assert on == {"dealt_index", "grammar_looks"} | later | ({"prompts_in_halves"} if version == "0.5.23" else set())


EVERYTHING = """
    import asyncio, importlib, json, pkgutil, sys
    asyncio.set_event_loop_policy = lambda policy: None  # of uvloop, which is stood in
    sys.path[1:1] = [MACHINE]
    import sm120_machine
    sys.path += [WHEEL, PACKAGES]
    import sglang.srt.managers.scheduler
    import sglang.srt.models
    import sglang.srt.speculative
    from sglang.srt.server_args import ServerArgs
    from deepseek_v4_sm120 import patching
    from deepseek_v4_sm120.sglang_patches import models_served
    found = []
    for more in MORE:
        resolved = arguments = ServerArgs(model_path=MODEL, tp_size=2, skip_tokenizer_init=True, **more)
        if hasattr(arguments, "resolve_once"):
            from sglang.srt.arg_groups.overrides import resolved_view
            arguments.resolve_once()
            resolved = resolved_view(arguments)
        ranks = getattr(resolved, "attn_cp_size", None), resolved.enable_dp_attention
        found.append([resolved.attention_backend, resolved.speculative_num_draft_tokens, *ranks])
        of_experts = arguments if not more else of_experts
    engine = patching.active_engine()
    modules = {r.target.module for r in engine.records if r.state == "READY"}
    users = {sglang.srt.models: "deepseek_v4", sglang.srt.speculative: ("eagle", "dspark", "frozen")}
    for package, prefix in users.items():
        names = [module.name for module in pkgutil.iter_modules(package.__path__)]
        modules |= {f"{package.__name__}.{name}" for name in names if name.startswith(prefix)}
    for module in sorted(modules):
        importlib.import_module(module)
    engine.audit()

    import torch
    from types import SimpleNamespace
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.linear import ReplicatedLinear
    from sglang.srt.layers.moe import MoeRunnerConfig, topk
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.moe.token_dispatcher import standard
    from sglang.srt.layers.moe.utils import MoeRunnerBackend
    from sglang.srt.layers.quantization import fp8
    from sglang.srt.server_args import set_global_server_args_for_scheduler
    from deepseek_v4_sm120.sglang_patches import device_gate
    from deepseek_v4_sm120.sglang_patches.adapters import fp8_linear, mxfp4_moe
    set_global_server_args_for_scheduler(of_experts)
    parallel_state._TP = SimpleNamespace(world_size=2, rank_in_group=0)
    device_gate.serves = lambda device: True
    experts = []
    def operator(hidden, topk_ids, topk_weights, w13, w13_scale, w2, w2_scale, **more):
        named = {name: more[name] for name in ("swiglu_limit", "up_first", "activations")}
        experts.append([hidden.shape[0], str(w13_scale.dtype), list(w13_scale.shape), named])
        return torch.zeros_like(hidden)
    mxfp4_moe.op.mxfp4_moe = operator
    config = fp8.Fp8Config.from_config(json.load(open(MODEL + "/config.json"))["quantization_config"])
    config.is_fp4_experts = True  # as the loader says it
    for backend in BACKENDS:
        fp8.get_moe_runner_backend = lambda: MoeRunnerBackend(backend)
        layer = object.__new__(FusedMoE)
        torch.nn.Module.__init__(layer)
        layer.hidden_size, layer.num_experts, layer.num_local_experts, layer.top_k, layer.layer_id = 4096, 4, 4, 2, 3
        layer.moe_tp_size, layer.moe_tp_rank, layer.moe_ep_size, layer.moe_ep_rank = 2, 0, 1, 0
        layer.moe_runner_config = MoeRunnerConfig(activation="silu", swiglu_limit=10.0)
        layer.dispatcher = object.__new__(standard.StandardDispatcher)
        method = config.get_quant_method(layer, "model.layers.3.mlp.experts")
        method.create_weights(layer, 4, 4096, 256, torch.bfloat16, weight_loader=None)
        method.create_moe_runner(layer, layer.moe_runner_config)
        method.process_weights_after_loading(layer)
        routed = topk.StandardTopKOutput(torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 4))
        rows = standard.StandardDispatchOutput(torch.zeros(3, 4096, dtype=torch.bfloat16), None, routed)
        assert method.apply(layer, rows).hidden_states.shape == (3, 4096)

    linear = ReplicatedLinear(4096, 1024, bias=False, quant_config=config, prefix="model.layers.3.self_attn.wq_a")
    linear.weight_scale_inv.data.fill_(1.0)
    linear.quant_method.process_weights_after_loading(linear)
    dense = []
    def of_rows(x, weight, scale, *, whole):
        dense.append([list(x.shape), str(weight.dtype), list(weight.shape), str(scale.dtype), list(scale.shape)])
        return torch.zeros(3, 1024, dtype=torch.bfloat16)
    fp8_linear.op.fp8_linear, fp8_linear.process.has_our_model = of_rows, True
    assert linear(torch.zeros(3, 4096, dtype=torch.bfloat16))[0].shape == (3, 1024)
    print(json.dumps({
        "arguments": found,
        "experts": experts,
        "dense": dense,
        "told": models_served.announced()["model_type"],
        "records": [[r.name, r.where, r.state, r.reason, r.by_name] for r in engine.records],
    }))
"""


# Context parallelism of prompts is no data-parallel attention: SGLang's hook of this model asks for that up to 0.5.21,
# and what follows takes it back where it has one rank. So tokens, and EAGLE's decisions, go round all cards
# (fixes/min_p_tokens.py).
OVER_CARDS = {"0.5.17": {"enable_dsa_prefill_context_parallel": True}}
OVER_CARDS |= dict.fromkeys(("0.5.18", "0.5.21"), {"enable_prefill_cp": True, "cp_strategy": "interleave"})


@every_release("0.5.13")
def test_all_that_we_replace_is_replaced_in_the_real_modules_and_nothing_keeps_the_original(run, version):
    """Every default that changes what is replaced is asked for, and what servers are started with resolves. A layer of
    FP4 experts and a dense one go through SGLang's own classes, from their weights to their call, with stand-ins for
    our operators."""
    asked = [
        ({}, None),
        ({"dp_size": 2, "enable_dp_attention": True}, None),
        ({"ep_size": 2}, None),
        ({"enable_torch_compile": True}, None),
    ]
    for steps in (1, 3, 5):
        eagle = {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1, "speculative_num_steps": steps}
        asked.append((eagle | {"speculative_num_draft_tokens": steps + 1}, steps + 1))
    if since(version, "0.5.14"):  # what `reproducible` lets through
        asked.append(({"enable_deterministic_inference": True}, None))
    if since(version, "0.5.16"):
        config = json.dumps({**stages.DSPARK_CONFIG, "num_hidden_layers": 6})
        asked.append(({"speculative_algorithm": "DSPARK", "json_model_override_args": config}, 4))
    if prompts := OVER_CARDS.get(version):
        hook = content(fetch(version), "sglang/srt/arg_groups/deepseek_v4_hook.py")
        assert "enable_dp_attention = True" in hook or "enable_dp_attention=True" in hook
        asked.append((prompts, None))
    everything = ("reproducible", "draft_head", "router_topk", "dealt_streams", "dealt_products", "prefill_graphs")
    everything += ("prefill_decode_interval_0_5_17", "prompts_in_halves")
    choices = ",".join(f"{name}=on" for name in everything)
    backends = ["marlin", "flashinfer_mxfp4"][: 2 if since(version, "0.5.16") else 1]
    code = EVERYTHING.replace("BACKENDS", repr(backends))
    asks = {"DSV4_SM120_SET": choices, "DSV4_SM120_LAYERS": "/absent"}
    found = run(code, more=repr([more for more, _ in asked]), version=version, **asks)
    assert found["dense"] == [[[3, 4096], "torch.float8_e4m3fn", [1024, 4096], "torch.float32", [8, 32]]]
    assert [one[:2] for one in found["arguments"]] == [["dsv4", tokens] for _, tokens in asked]
    assert not prompts or (found["arguments"][-1][2:] == [2, False] and found["arguments"][1][3])
    of_marlin = {"swiglu_limit": 10.0, "up_first": False, "activations": "bf16"}
    of_cutlass = of_marlin | {"up_first": True, "activations": "mxfp8"}
    assert (
        found["experts"]
        == [  # the call of each backend
            [3, "torch.uint8", [4, 512, 128], more] for more in (of_marlin, of_cutlass)[: len(backends)]
        ]
    )
    assert found["told"] == "deepseek_v4"
    elsewhere = (f"sglang {version} has no such place", "only in DSV4_SM120_FORCE=", ", for SGLang ")
    for name, where, state, reason, by_name in found["records"]:
        in_place = state == "APPLIED" or (state == "NOT APPLICABLE" and any(why in reason for why in elsewhere))
        assert in_place and by_name == [], f"{name} at {where}: {state}, {reason}; the original is at {by_name}"


@pytest.mark.parametrize("version", ["0.5.17", "0.5.23"])
def test_the_speculation_that_the_stages_and_the_plan_ask_for(run, places, version):
    """tests/e2e's DSPARK on a cut-down model, with a block of its own and with the checkpoint's; EAGLE's rows are its
    steps and one, whatever is given."""
    config = json.dumps({**stages.DSPARK_CONFIG, "num_hidden_layers": 6})
    dspark = {"speculative_algorithm": "DSPARK", "json_model_override_args": config}
    eagle = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 2, "speculative_eagle_topk": 1}
    asked = [dspark | {"speculative_dspark_block_size": 6}, dspark, eagle | {"speculative_num_draft_tokens": 8}]
    of_six, by_checkpoint, of_eagle = run(SPECULATION, more=repr(asked), version=version)
    assert (of_six["algorithm"], of_six["num_draft_tokens"]) == ("DSPARK", 7)
    assert of_six["draft_model_path"] == places["MODEL"]  # the drafter is the checkpoint's own
    assert by_checkpoint["num_draft_tokens"] == stages.DSPARK_CONFIG["dspark_block_size"] + 1
    assert of_eagle["num_draft_tokens"] == 3


def test_in_0_5_23_the_user_decides_and_a_variable_reaches_the_children(run):
    found = run(RESOLVE, more="{'prefill_decode_interval': 0}", version="0.5.23", DSV4_SM120_SET="reproducible=on")
    assert found["arguments"]["prefill_decode_interval"] == 0
    assert found["states"]["prefill_decode_interval"] == ["USER'S OWN", "kept prefill_decode_interval=0"]
    handover = json.loads(found["environment"]["_DSV4_SM120_CHILD_ENVIRONMENT"])
    (looks,) = (row.environment for row in DEFAULTS if row.name == "grammar_looks")
    assert handover == {**looks, "SGLANG_OPT_FLASHMLA_SPARSE_PREFILL": "0"}


@pytest.mark.parametrize(
    ("left_out", "told"),
    [
        ("", [({}, []), ({"tp_size": 4, "disable_custom_all_reduce": True}, ["all_reduce"]), ({}, [])]),
        # two cards' sums have one order
        (",fp8_linear=off,all_reduce=off", [({}, ["fp8_linear"]), ({"tp_size": 4}, ["fp8_linear", "all_reduce"])]),
    ],
)
def test_a_server_that_cannot_be_reproducible_by_its_settings_says_so(run, left_out, told):
    """As two settings that contradict each other: at its start, and in its report."""
    asked = repr([(None, more) for more, _ in told])
    found = run(SERVERS, more=asked, version="0.5.23", DSV4_SM120_SET=f"reproducible=on{left_out}")
    for (_, names), one in zip(told, found, strict=True):
        notes = [note.partition(":") for note in one["notes"] if "NOT REPRODUCIBLE" in note]
        assert [said.split(", ") for said, *_ in notes] == ([names] if names else [])


MHC_BOUNDARY = """
    import importlib, json, sys
    sys.path[1:1] = [MACHINE]
    import sm120_machine
    sys.path += [WHEEL, PACKAGES]
    import torch
    import sglang.srt.models.deepseek_v4 as model
    import sglang.srt.models.deepseek_v4_nextn as nextn
    import sglang.srt.models.deepseek_v4_dspark as dspark
    from deepseek_v4_sm120 import patching
    from deepseek_v4_sm120.sglang_patches import device_gate
    from deepseek_v4_sm120.sglang_patches.adapters import mhc as adapter

    calls = []
    def stand_in(name, result):
        def call(*args, **kwargs):
            calls.append(name)
            return result
        setattr(adapter.op, name, call)
    rows = torch.zeros(3, 4096, dtype=torch.bfloat16)
    streams, post, comb = torch.zeros(3, 4, 4096, dtype=torch.bfloat16), torch.zeros(3, 4), torch.zeros(3, 4, 4)
    stand_in("mhc", (streams, post, comb, rows))
    stand_in("mhc_pre", (post, comb, rows))
    stand_in("mhc_post", streams)
    stand_in("mhc_head", rows)
    device_gate.serves = lambda device: True
    from deepseek_v4_sm120.sglang_patches import models_served
    models_served.announce({"model_type": "deepseek_v4", "hidden_size": 4096, "hc_mult": 4})  # as resolved arguments do

    NAMES = ("mhc", "draft_head", "dealt_streams")
    fn, scale, base = torch.zeros(24, 16384), torch.zeros(3), torch.zeros(24)
    fused = importlib.import_module("sglang.srt.models.deepseek_common.amd.deepseek_v4_fused_mhc")
    switch = getattr(model, "_is_fused_mhc_post_pre_enabled", None) or fused._is_fused_mhc_post_pre_enabled
    get_ops = getattr(model, "get_mhc_ops", None) or model._get_mhc_ops
    norm = {"norm_weight": torch.ones(4096, dtype=torch.bfloat16), "norm_eps": 1e-6}
    numbers = (1e-6, 1e-6, 1e-6, 2.0, 20)
    boundary = get_ops().mhc_fused_post_pre(rows, streams, post[:, :, None], comb, fn, scale, base, *numbers, **norm)
    if hasattr(fused, "apply_mhc_post_pre_boundary"):
        more = (4, 1e-6, 1e-6, 2.0, 20, norm["norm_weight"], 1e-6)
        arguments = (rows, streams, post, comb, fn, scale, base, *more)
        applied = fused.apply_mhc_post_pre_boundary(*arguments, fn_transpose=True)
        assert applied[2].shape == (3, 4) and applied[4] is True

    layer_class = getattr(model, "DeepseekV4DecoderLayerBase", None) or model.DeepseekV4DecoderLayer
    layer = object.__new__(layer_class)
    torch.nn.Module.__init__(layer)
    layer.rms_norm_eps, layer.hc_eps, layer.hc_sinkhorn_iters, layer.hc_mult = 1e-6, 1e-6, 20, 4
    norm_module = model.RMSNorm(4096, eps=1e-6).bfloat16()
    pre = layer.hc_pre(streams, fn, scale, base, norm=norm_module, forward_batch=None)
    posted = layer.hc_post(rows, streams, post, comb)
    head = nextn.DeepseekV4ModelNextN.hc_head(layer, streams, fn[:4], scale[:1], base[:4])
    importlib.import_module("sglang.srt.model_executor.model_runner_components.weight_updater")
    heads = importlib.import_module("sglang.kernels.ops.layernorm.mhc_head")
    heads.fused_hc_head(streams, fn[:4], scale[:1], base[:4], norm_eps=1e-6, hc_eps=1e-6)
    layer.hc_head_fn, layer.hc_head_scale, layer.hc_head_base = fn[:4], scale[:1], base[:4]
    layer.stages, layer.norm_eps = [layer], 1e-6
    dspark.DeepseekV4ForCausalLMDSpark.collapse_hc_head(layer, streams)
    print(json.dumps({
        "calls": calls,
        "switch": bool(switch()),
        "post": list(boundary[1].shape),
        "normed": pre[3],
        "shapes": [list(t.shape) for t in (pre[0], pre[1], pre[2], posted, head)],
        "records": sorted({(r.name, r.state) for r in patching.active_engine().records if r.name in NAMES}),
    }))
"""


@pytest.mark.parametrize("version", ["0.5.17", "0.5.23"])
def test_mhc_calls_of_the_real_model_reach_ours(run, version):
    """SGLang's own layer, boundary and heads, imported from the wheel, with stand-ins for our four operators. With them
    all that the drafts' head and dealt streams replace is imported, too."""
    found = run(MHC_BOUNDARY, version=version, DSV4_SM120_SET="draft_head=on,dealt_streams=on")
    fused = ["mhc"] * (2 if version == "0.5.23" else 1)
    assert found["calls"] == [*fused, "mhc_pre", "mhc_post", *["mhc_head"] * 3]
    assert found["switch"] is True and found["post"] == [3, 4, 1] and found["normed"] is True
    assert found["shapes"] == [[3, 4096], [3, 4], [3, 4, 4], [3, 4, 4096], [3, 4096]]
    assert found["records"] == [[name, "APPLIED"] for name in ("dealt_streams", "draft_head", "mhc")]


STOPS = """
    import json, sys
    sys.path[1:1] = [MACHINE]
    import sm120_machine
    sys.path += [WHEEL, PACKAGES]
    from sglang.srt.server_args import ServerArgs
    def resolve(model):
        arguments = ServerArgs(model_path=model, tp_size=2, skip_tokenizer_init=True)
        if hasattr(arguments, "resolve_once"):
            arguments.resolve_once()
    resolve(LLAMA)
    import sglang.srt.managers.scheduler
    from sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM  # as SGLang's registry imports every model
    from sglang.srt.models.llama import LlamaForCausalLM
    from deepseek_v4_sm120 import patching
    said = {}
    for name, stop in {"arguments": lambda: resolve(MODEL), "layers": lambda: DeepseekV4ForCausalLM(None)}.items():
        try:
            stop()
        except patching.engine.PatchError as error:
            said[name] = str(error)
    states = {r.patch.name: r.state for r in patching.active_engine().records}
    print(json.dumps({"said": said, "states": states}))
"""
LLAMA_CONFIG = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2, "vocab_size": 256},
    **{"max_position_embeddings": 2048, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6},
}


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """changed(version, member, old, new) -> a copy of that wheel with one file changed"""

    def make(version, member, old, new):
        folder = tmp_path_factory.mktemp("changed")
        shutil.copytree(unpacked(version) / "sglang", folder / "sglang", copy_function=os.symlink)
        text = (folder / member).read_text()
        assert text.count(old) >= 1, member
        (folder / member).unlink()
        (folder / member).write_text(text.replace(old, new))
        return folder

    return make


def test_a_release_that_does_not_fit_starts_with_llama_and_stops_with_ours(loaded, places, changed, tmp_path):
    """SGLang's own arguments, registry and classes; the attention has one argument more than we know."""
    old = "def _kernel_num_heads(self, num_tokens: int"
    wheel = changed("0.5.22", "sglang/srt/models/deepseek_v4.py", old, old + ", brand_new: None")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    code = STOPS
    for name, value in {**places, "WHEEL": str(wheel), "LLAMA": str(tmp_path)}.items():
        code = code.replace(name, repr(value))
    done = loaded(code, env={"HF_HUB_OFFLINE": "1"}, timeout=600)
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["said"]) == {"arguments", "layers"}
    assert all("unexpected" in text and "brand_new" in text for text in found["said"].values())
    assert found["states"]["unpadded_heads"] == "BROKEN" and found["states"]["index_select"] == "APPLIED"
    lines = [line for line in done.stderr.splitlines() if "does not fit sglang 0.5.22" in line]
    assert len(lines) == 1 and "any other runs as without us" in lines[0]


PLUGIN_DOOR = """
    import json, sys
    sys.path[1:1] = [MACHINE]
    import sm120_machine
    sys.path += [WHEEL, PACKAGES]
    import sglang.srt.managers.scheduler  # a worker's process has it and its closure before its first statement
    import sglang.srt.models.deepseek_v4
    assert "deepseek_v4_sm120" not in sys.modules
    from sglang.srt.plugins import load_plugins
    load_plugins()
    from deepseek_v4_sm120 import patching
    records = patching.active_engine().records
    print(json.dumps([[r.patch.name, r.where, r.state, r.reason] for r in records]))
"""


def test_the_plugin_entry_point_patches_what_is_imported_already(loaded, places, tmp_path):
    """SGLang's own plugin loader over the artifact's dist-info, in a Python that did not run our sitecustomize."""
    (tmp_path / "deepseek_v4_sm120").symlink_to(Path(deepseek_v4_sm120.__file__).parent)
    write_dist_info(tmp_path, [])
    code = PLUGIN_DOOR
    for name, value in {**places, "WHEEL": str(unpacked("0.5.23"))}.items():
        code = code.replace(name, repr(value))
    rows = loaded.json(code, ours=False, path=[tmp_path], env={"HF_HUB_OFFLINE": "1"}, timeout=600)
    assert [row for row in rows if row[2] == "BROKEN"] == []
    applied = {where for _, where, state, _ in rows if state == "APPLIED"}
    assert "sglang.srt.models.deepseek_v4:MQALayer.forward" in applied and len(applied) > 15
