"""Run in a Python of its own, with our folder first on PYTHONPATH: resolves SGLang's arguments for one model after the
other and builds layers of it by SGLang's own classes, without memory (meta tensors), as on one of two SM120 cards.

    other_models_layers.py MACHINE WHEEL PACKAGES KIND=FOLDER[:UNTOLD] ...

Prints, as its last line, JSON: what our adapters say of each. UNTOLD: as in a process that nobody told the model.
"""

import importlib
import json
import sys

machine, wheel, packages, *wanted = sys.argv[1:]
sys.path[1:1] = [machine]
import sm120_machine  # noqa: E402

sys.path += [wheel, packages]
import torch  # noqa: E402

TP = 2
ROWS = 4


class Group:
    """Stands for a process group, of which nothing but the width is asked while layers are built."""

    world_size, rank_in_group, rank, local_rank, is_first_rank, is_last_rank = TP, 0, 0, 0, True, True

    def __getattr__(self, name):
        return sm120_machine.StandIn()


def resolve(folder):
    """(arguments, hf_config); the process is published as a scheduler's."""
    from sglang.srt import runtime_context
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.server_args import ServerArgs

    flags = {"moe_runner_backend": "flashinfer_mxfp4", "disable_shared_experts_fusion": True}
    arguments = ServerArgs(model_path=folder, tp_size=TP, skip_tokenizer_init=True, **flags)
    arguments.resolve_once()
    runtime_context.get_parallel().clear_stamp()  # of the model before
    runtime_context.publish(arguments, role="scheduler")
    names = runtime_context._derived_widths()
    groups = {name: Group() for name in names if name.endswith("_group")}
    ranks = {name: 0 for name in names if name.endswith("_rank")}
    runtime_context.get_parallel()._stamp.update(groups | ranks)
    initialize_moe_config()
    return arguments, model_config_of(arguments).hf_config


def build(config, layer_id):
    """A decoder layer of the wheel's, on the meta device; without the rotary table that only other chips read."""
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    model = importlib.import_module("sglang.srt.models.deepseek_v4")
    model.get_rope_wrapper = lambda **_: torch.nn.Identity()
    quantized = config.quantization_config
    method = Fp8Config.from_config(quantized if isinstance(quantized, dict) else quantized.to_dict())
    method.is_fp4_experts = True
    torch.set_default_dtype(torch.bfloat16)
    kind = getattr(model, "DeepseekV4DecoderLayerBase", None) or model.DeepseekV4DecoderLayer  # its name from 0.5.23 on
    with torch.device("meta"):
        layer = kind(config, layer_id, method, prefix=f"model.layers.{layer_id}")
    return layer


def linears(layer):
    attention, shared = layer.self_attn, getattr(layer.mlp, "shared_experts", None)  # None: fused into the routed ones
    index = [("indexer.wq_b", attention.indexer.wq_b)] if hasattr(attention.indexer, "wq_b") else []
    of_experts = [] if shared is None else [("gate_up_proj", shared.gate_up_proj), ("down_proj", shared.down_proj)]
    of_attention = [("wqkv_a", attention.wqkv_a), ("wq_b", attention.wq_b), ("wo_b", attention.wo_b)]
    return [*of_attention, *of_experts, *index]


def describe(layer):
    """What each adapter says of the layer's own parts."""
    from deepseek_v4_sm120.sglang_patches.adapters import bf16_linear, fp8_linear, mhc, mxfp4_moe

    attention, experts = layer.self_attn, layer.mlp.experts
    hidden = layer.hidden_size
    x = torch.empty((ROWS, hidden), device="meta", dtype=torch.bfloat16)
    streams = torch.empty((ROWS, layer.hc_mult, hidden), device="meta", dtype=torch.bfloat16)
    mixes = (layer.hc_attn_fn, layer.hc_attn_scale, layer.hc_attn_base)
    heads = type(attention)._kernel_num_heads
    return {
        "wo_a": type(attention.wo_a.weight).__name__,
        "fp8_linear": {name: fp8_linear.keeps(linear.quant_method, linear) for name, linear in linears(layer)},
        "unpadded": heads(attention, ROWS) == attention.n_local_heads,
        "stock's heads": heads.__wrapped__(attention, ROWS),
        "experts": [type(experts.quant_method).__name__, mxfp4_moe.keeps(experts.quant_method, experts)],
        "router": bf16_linear._is_v4_gate(layer.mlp.gate) and bf16_linear.takes(x, layer.mlp.gate.weight),
        "mhc": mhc._takes(streams, *mixes, mhc.op.MIXES),
        "fused boundary": layer.use_fused_mhc_post_pre,
        "indexer": type(attention.indexer).__name__,
        "compressor": type(attention.compressor).__name__,
    }


def run(kind, folder):
    from deepseek_v4_sm120 import patching
    from deepseek_v4_sm120.sglang_patches import device_gate, models_served

    folder, _, untold = folder.partition(":")
    arguments, config = resolve(folder)
    from sglang.srt.arg_groups.overrides import resolved_view

    choices = patching.active_engine().steering.outcomes
    found = {
        "told": models_served.announced()["model_type"],
        "gate": device_gate.serves_current_device(),
        "prefill_decode_interval": resolved_view(arguments).prefill_decode_interval,
        "default": next([c.state, c.reason] for c in choices if c.default == "prefill_decode_interval"),
        "type": config.model_type,
    }
    if untold:
        models_served._announced = None
    # no tensor is on a GPU here: the rest of the gate decides
    device_gate.serves = lambda device: models_served.serves_this_process()
    layers = (2, 21) if kind == "v41" else (2, 3)
    return {**found, "layers": [describe(build(config, layer_id)) for layer_id in layers]}


answers = {}
for kind, _, place in (one.partition("=") for one in wanted):
    answers[kind] = run(kind.partition(" ")[0], place)
print(json.dumps(answers))
