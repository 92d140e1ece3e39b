"""SGLang's own attention forward and checkpoint loading, taken out of the wheels and run on the CPU over stand-ins, with
our wo_a in it and without: the same projection from the same checkpoint, and nothing is expanded."""

import ast
import builtins
import collections
import concurrent.futures
import sys
import typing
import types
import zipfile

import pytest
import torch

from deepseek_v4_sm120 import device_gate, settings, shadow
from deepseek_v4_sm120.patching import contract
from deepseek_v4_sm120.reference import wo_a as reference
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.reference.fp8_linear_inputs import make_weight
from deepseek_v4_sm120.reference.wo_a_inputs import make_freqs_cis
from deepseek_v4_sm120.sglang_adapters import wo_a as adapter
from deepseek_v4_sm120.sglang_patches_wo_a import MODEL
from tests.patching.test_wheels import VERSIONS

GROUPS, RANK, INPUTS = 4, 128, 1024  # of all ranks; two heads a group
HEADS = GROUPS * INPUTS // 512
LAYERS = 2


class Quiet:
    """Any name that the code under test looks up and that says nothing here: false, empty, and so is all it gives."""

    def __bool__(self):
        return False

    def __iter__(self):
        return iter(())

    def __getattr__(self, name):
        return self

    def __call__(self, *args, **kwargs):
        return self

    def __getitem__(self, key):
        return self

    def __lt__(self, other):
        return False

    __le__ = __gt__ = __ge__ = __lt__

    def __iadd__(self, other):
        return other

    __radd__ = __iadd__


class Names(dict):
    """Globals of code that is run by itself."""

    def __missing__(self, name):
        if hasattr(builtins, name):
            raise KeyError(name)
        return QUIET


QUIET = Quiet()


def model_tree(wheel) -> ast.Module:
    return ast.parse(zipfile.ZipFile(wheel).read(MODEL.replace(".", "/") + ".py"))


def unimported(tree):
    """Imports inside of functions give quiet names, so that nothing of SGLang is needed."""

    class Imports(ast.NodeTransformer):
        def visit_ImportFrom(self, node):
            return [ast.parse(f"{a.asname or a.name} = QUIET").body[0] for a in node.names]

    return Imports().visit(tree)


def take(tree, names: dict, *qualnames):
    """The definitions, compiled with `names` and quiet ones as globals; returns them in order."""
    found = []
    for qualname in qualnames:
        node = contract.find_definition(tree, qualname)
        node = unimported(ast.fix_missing_locations(node))
        used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        for name in used:
            if name not in names and not hasattr(builtins, name):
                names[name] = QUIET
        future = ast.parse("from __future__ import annotations").body
        exec(compile(ast.fix_missing_locations(ast.Module([*future, node], [])), "wheel", "exec"), names)
        found.append(names[node.name])
    return found


def rope(q, k, freqs_cis, positions, inverse=False):
    """SGLang's kernel: in place, float32."""
    assert k is None
    pairs = torch.view_as_complex(q.float().unflatten(-1, (-1, 2)).contiguous())
    factors = freqs_cis[positions.long()][:, None]
    q.copy_(torch.view_as_real(pairs * (factors.conj() if inverse else factors)).flatten(-2).to(q.dtype))


def operator(x, weight, weight_scale, *, freqs_cis=None, positions=None):
    adapter.op.linear._check_x("wo_a", x, 3, ("rows", "groups", "inputs"))
    adapter.op.linear._check_weight("wo_a", weight, weight_scale, x, tuple(x.shape[1:]))
    adapter.op._check_rotation(x, freqs_cis, positions)
    operator.calls.append((x.shape[0], freqs_cis is not None))
    return reference.wo_a(x, weight, weight_scale, freqs_cis, positions).to(torch.bfloat16)


class Linear(torch.nn.Module):
    """ColumnParallelLinear, as far as wo_a's is used: SGLang's own loader, by rows."""

    def __init__(self, rows, inputs, rank, dtype=torch.bfloat16):
        super().__init__()
        self.tp_rank = rank
        self.quant_method = types.SimpleNamespace(process_weights_after_loading=lambda layer: None)
        self.weight = torch.nn.Parameter(torch.empty(rows, inputs, dtype=dtype), requires_grad=False)
        self.weight.output_dim, self.weight.input_dim, self.weight.weight_loader = 0, 1, self.weight_loader

    def weight_loader(self, param, loaded_weight):
        size = param.shape[param.output_dim]
        shard = loaded_weight.narrow(param.output_dim, self.tp_rank * size, size)
        assert shard.shape == param.shape
        param.data.copy_(shard)


class Fp8LinearMethod:
    pass


class Fp8Config:
    is_checkpoint_fp8_serialized, weight_block_size = True, [128, 128]

    def get_name(self):
        return "fp8"

    def get_quant_method(self, layer, prefix):
        assert prefix.endswith(".wo_a")
        return Fp8LinearMethod()


def projected(o):
    """wo_b, so that what forward returns is what wo_a gave."""
    return o.clone(), None


projected.reduce_results = True


def attention_class(tree, names, patched):
    """MQALayer with its forward out of the wheel; made by an __init__ of ours with the wheel's parameters."""
    (forward,) = take(tree, names, "MQALayer.forward")

    def __init__(self, config, layer_id, quant_config=None, prefix="", alt_streams=None, compress_ratio_override=None):
        torch.nn.Module.__init__(self)
        rank, ranks = config
        self.wo_a = Linear(GROUPS * RANK // ranks, INPUTS, rank)
        self.n_local_groups, self.o_lora_rank = GROUPS // ranks, RANK
        self.head_dim, self.qk_rope_head_dim = 512, 64
        self.n_heads, self.n_local_heads = HEADS, HEADS // ranks

    def __getattr__(self, name):
        try:
            return torch.nn.Module.__getattr__(self, name)
        except AttributeError:
            return QUIET

    members = {"__getattr__": __getattr__, "wo_b": staticmethod(projected), "tp_size": 1, "attn_tp_size": 1}
    members |= {"use_mega_attention": False, "is_dsv41": False, "_project_wo_b": lambda self, o, defer: projected(o.flatten(1))[0]}
    members |= {"_kernel_num_heads": lambda self, rows: self.n_local_heads}
    members["__init__"] = adapter.replace_init(__init__) if patched else __init__
    members["forward"] = adapter.replace_forward(forward) if patched else forward
    return type("MQALayer", (torch.nn.Module,), members)


class Model(torch.nn.Module):
    """DeepseekV4ForCausalLM, as far as load_weights and wo_a need it."""

    def __init__(self, attention, rank=0, ranks=1):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList()
        for index in range(LAYERS):
            layer = torch.nn.Module()
            layer.self_attn = attention((rank, ranks), index, Fp8Config(), f"model.layers.{index}.self_attn")
            self.model.layers.append(layer)
        self.model.start_layer, self.model.end_layer = 0, LAYERS
        self.config = types.SimpleNamespace(num_hidden_layers=LAYERS, n_routed_experts=0, num_nextn_predict_layers=1)
        self.num_fused_shared_experts, self.wo_a_fp8, self.quant_config = 0, False, None
        self.pp_group = types.SimpleNamespace(is_first_rank=True, is_last_rank=True)

    def post_load_weights(self, is_nextn=False, weight_names=None):
        pass

    _prewarm_mhc_kernels = _prewarm_mhc_kernels_at_load = post_load_weights


def checkpoint(seed=0):
    """Names as in the released one: E4M3 weights, UE8M0 scales, in this order and in the other."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for index in range(LAYERS):
        weight, scale = make_weight(1, GROUPS * RANK, INPUTS, generator, ue8m0=True)
        pair = [("weight", weight[0]), ("scale", scale[0].view(torch.float8_e8m0fnu))]
        for kind, tensor in pair if index % 2 else reversed(pair):
            found[f"layers.{index}.attn.wo_a.{kind}"] = tensor
    return found


def load(tree, names, model, weights, patched):
    names |= {"concurrent": concurrent, "DEEPSEEK_V4_STACKED_PARAMS_MAPPING": [], "default_weight_loader": None}
    names |= {"envs": Quiet(), "torch": torch, "logger": QUIET, "Set": set, "Dict": dict}
    names |= {"get_layer_id": lambda name: int(name.split(".")[2])}
    names |= {"should_async_load": lambda tensor: False, "_clone_if_runai_streamed_tensor": lambda tensor: tensor}
    names |= {"maybe_executor_submit": lambda func, func_args, **_: func(*func_args)}
    take(tree, names, "_dequant_fp8")
    names["_dequant_fp8"] = expand
    helpers = [name for name in EXPANDERS if contract.find_definition(tree, name) is not None]
    take(tree, names, *helpers)
    if patched and "_dequant_fp8_wo_a_streaming" in names:
        names["_dequant_fp8_wo_a_streaming"] = adapter.replace_expansion(names["_dequant_fp8_wo_a_streaming"])
    (remap,) = take(tree, names, "DeepseekV4ForCausalLM.remap_weight_name_to_dpsk_hf_format")
    (loader,) = take(tree, names, "DeepseekV4ForCausalLM.load_weights")
    model.remap_weight_name_to_dpsk_hf_format = remap.__func__ if isinstance(remap, staticmethod) else remap
    loader = adapter.replace_load_weights(loader) if patched else loader
    loader(model, iter(weights.items()))


EXPANDERS = ("_dequant_fp8_wo_a_streaming", "_dequant_fp8_wo_a", "_prepare_deepseek_v4_weights")
expanded_by_sglang = []


def expand(weight, scale):
    """_dequant_fp8, without einops."""
    expanded_by_sglang.append(tuple(weight.shape))
    wide = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (weight.float() * wide).to(torch.bfloat16)


@pytest.fixture(autouse=True)
def served(monkeypatch):
    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(adapter.op, "wo_a", operator)
    monkeypatch.setattr(adapter, "memory", adapter.Memory())
    operator.calls = []
    expanded_by_sglang.clear()
    adapter._serve.cache_clear()
    yield
    adapter._serve.cache_clear()


def forward_names(o, patched):
    """Names of forward's: the attention backend answers `o`."""
    backend = types.SimpleNamespace(forward=lambda **kwargs: o.clone())
    names = {"torch": torch, "QUIET": QUIET, "TYPE_CHECKING": False, "get_attn_backend": lambda: backend, "slice": slice}
    names["fused_rope_inplace"] = adapter.replace_rope(rope) if patched else rope
    return names, backend


def made(wheel, o, patched, rank=0, ranks=1):
    tree = model_tree(wheel)
    names, backend = forward_names(o, patched)
    if contract.find_definition(tree, "_apply_wo_a_bf16_matmul") is not None:
        take(tree, names, "_apply_wo_a_bf16_matmul")
    module = types.ModuleType(MODEL)
    module._dequant_fp8 = expand
    sys.modules[__name__]._dequant_fp8 = expand
    model = Model(attention_class(tree, names, patched), rank, ranks)
    load(model_tree(wheel), {"QUIET": QUIET}, model, checkpoint(), patched)
    return model, backend


def run(model, backend, o, freqs_cis, positions):
    batch = Quiet()
    batch.attn_backend = backend
    outs = []
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.freqs_cis = freqs_cis
        attention._forward_prepare = lambda *args, **kwargs: (o, None)
        outs.append(attention.forward(torch.zeros(o.shape[0], 8), positions, batch))
    return torch.stack(outs)


def inputs(rows, ranks):
    generator = torch.Generator().manual_seed(rows)
    o = torch.randn((rows, HEADS // ranks, 512), generator=generator).to(torch.bfloat16)
    return o, make_freqs_cis(300, "cpu"), torch.randint(0, 300, (rows,), generator=generator)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("rows, ranks", [(1, 1), (5, 2), (64, 4), (65, 2)])
def test_the_projection_of_the_wheels_own_forward(version, rows, ranks, sglang_wheel):
    wheel = sglang_wheel(version)
    o, freqs_cis, positions = inputs(rows, ranks)
    stock = run(*made(wheel, o, False, 0, ranks), o, freqs_cis, positions)
    assert len(expanded_by_sglang) == LAYERS and not operator.calls
    rank = ranks - 1
    ours_model, backend = made(wheel, o, True, rank, ranks)
    assert len(expanded_by_sglang) == LAYERS  # no more than stock's
    for layer in ours_model.model.layers:
        weight = layer.self_attn.wo_a.weight
        assert (weight.dtype, weight.device.type) == (torch.float8_e4m3fn, "cpu")
    ours = run(ours_model, backend, o, freqs_cis, positions)
    assert operator.calls == [(rows, rows <= 64)] * LAYERS
    stored, share = checkpoint(), GROUPS * RANK // ranks
    for index in range(LAYERS):
        part = slice(rank * share, (rank + 1) * share)
        weight = stored[f"layers.{index}.attn.wo_a.weight"][part].view(GROUPS // ranks, RANK, INPUTS)
        scale = stored[f"layers.{index}.attn.wo_a.scale"].view(torch.uint8)[part.start // 128 : part.stop // 128]
        x = o.reshape(rows, GROUPS // ranks, INPUTS)
        truth = reference.wo_a(x, weight, scale.view(GROUPS // ranks, -1, INPUTS // 128), freqs_cis, positions)
        assert relative_error(ours[index].view(truth.shape), truth) < 0.0025
    if rank == 0:
        assert relative_error(ours, stock.double()) < 0.004
