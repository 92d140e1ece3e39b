"""SGLang's own attention forward and checkpoint loading, taken out of the wheels and run on the CPU over stand-ins,
with our wo_a in it and without: the same projection from the same checkpoint, and nothing is expanded."""

import ast
import builtins
import concurrent.futures
import copy
import functools
import itertools
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.patching import contract
from deepseek_v4_sm120.reference import wo_a as reference
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.sglang_patches import device_gate
from deepseek_v4_sm120.sglang_patches.adapters import wo_a as adapter
from deepseek_v4_sm120.sglang_patches.rows.wo_a import MODEL
from deepseek_v4_sm120.specs.fp8_linear import make_weight
from deepseek_v4_sm120.specs.wo_a import make_freqs_cis
from tests.adapters.wo_a_layer import GROUPS, HEADS, INPUTS, OUTPUTS, Expansion, Fp8Config, Linear, Operator, rope
from tests.patching import wheels
from tests.patching.wheels import WheelSources, every_release, since

LAYERS = 2
STREAMING = "_dequant_fp8_wo_a_streaming"
EXPANDERS = (STREAMING, "_dequant_fp8_wo_a", "_prepare_deepseek_v4_weights")
MTP = "sglang.srt.models.deepseek_v4_nextn"
FP8 = "sglang.srt.layers.quantization.fp8"


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

    def __le__(self, other):
        return False

    __lt__ = __gt__ = __ge__ = __le__

    def __iadd__(self, other):
        return self

    def __add__(self, other):
        return other


QUIET = Quiet()


NO_FUSION = "current_mhc_post_fusion"  # 0.5.21: asked with `is None`; DeepSeek-V4.1's


def given_imports(node):
    """The node, or a copy of it where it has imports inside of functions: these give what the test has for them in
    GIVEN, and quiet names; nothing of SGLang. All that has none is the node's own."""
    changed = {}
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        if statements := getattr(node, name, None):
            made = [new for one in statements for new in (_given(one) if isinstance(one, ast.ImportFrom) else [one])]
            made = [given_imports(one) for one in made]
            if any(new is not one for new, one in itertools.zip_longest(made, statements)):
                changed[name] = made
    if changed:
        node = copy.copy(node)
        vars(node).update(changed)
    return node


def _given(node):
    names = [(alias.name, alias.asname or alias.name) for alias in node.names]
    return [ast.parse(f"{name} = GIVEN.get({asked!r}, QUIET)").body[0] for asked, name in names]


class Mxfp8SwizzledInput(tuple):
    """DeepSeek-V4.1's, which the code asks for with isinstance."""


def source(wheel, module=MODEL) -> str:
    return WheelSources(wheel).read(module)


def definition(wheel, qualname, module=MODEL):
    return wheels.definition(wheel, module, qualname)


@functools.cache
def compiled(node):
    """(code that defines it, the names it uses); of a definition that several releases have once"""
    node = given_imports(node)
    future = ast.parse("from __future__ import annotations").body
    code = compile(ast.Module([*future, node], []), "wheel", "exec")
    return code, {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not hasattr(builtins, n.id)}


def take(wheel, names: dict, qualname, module=MODEL):
    """The definition, with `names` as its globals, and quiet ones where they lack something; None: there is none."""
    if (node := definition(wheel, qualname, module)) is None:
        return None
    code, used = compiled(node)
    names.setdefault("GIVEN", {NO_FUSION: lambda: None})
    for name in {"QUIET", *used}:
        names.setdefault(name, QUIET)
    exec(code, names)
    return names[qualname.rpartition(".")[2]]


class Model(torch.nn.Module):
    """DeepseekV4ForCausalLM as far as load_weights needs it, with two layers of `attention`."""

    num_fused_shared_experts, wo_a_fp8, quant_config = 0, False, None
    config = SimpleNamespace(num_hidden_layers=LAYERS, n_routed_experts=0, num_nextn_predict_layers=1)
    pp_group = SimpleNamespace(is_first_rank=True, is_last_rank=True)

    def __init__(self, attention, rank, ranks):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.start_layer, self.model.end_layer = 0, LAYERS
        self.model.layers = torch.nn.ModuleList()
        for index in range(LAYERS):
            layer = torch.nn.Module()
            layer.self_attn = attention((rank, ranks), index, Fp8Config(), f"model.layers.{index}.self_attn")
            self.model.layers.append(layer)

    def post_load_weights(self, is_nextn=False, weight_names=None):
        pass

    _prewarm_mhc_kernels = _prewarm_mhc_pre_kernels = post_load_weights


class Tree:
    """One wheel's model module as we run it: forward and loading are SGLang's, the rest stands in. names, batch: of it,
    what says something in this run."""

    def __init__(self, wheel, monkeypatch, *, patched, names=None, batch=None):
        self.wheel, self.patched, self.expansion = wheel, patched, Expansion()
        self.names, self.batch, self.weights = names or {}, batch or {}, checkpoint
        self.log = None
        self.module = ModuleType("wheel_wo_a_model")
        self.module._dequant_fp8 = self.expansion
        monkeypatch.setitem(sys.modules, self.module.__name__, self.module)

    def replaced(self, name, original):
        return getattr(adapter, f"replace_{name}")(original) if self.patched else original

    def attention(self, backend):
        """MQALayer: the forward is the wheel's, the __init__ has its parameters and makes what forward reads."""
        names = {"torch": torch, "get_attn_backend": lambda: backend, "Mxfp8SwizzledInput": Mxfp8SwizzledInput}
        names |= self.names | {"fused_rope_inplace": self.replaced("rope", rope)}
        take(self.wheel, names, "_apply_wo_a_bf16_matmul")
        forward = take(self.wheel, names, "MQALayer.forward")

        def __init__(
            self, config, layer_id, quant_config=None, prefix="", alt_streams=None, compress_ratio_override=None
        ):
            torch.nn.Module.__init__(self)
            rank, ranks = config
            self.wo_a = Linear(rank, ranks)
            self.n_local_groups, self.o_lora_rank = GROUPS // ranks, OUTPUTS
            self.head_dim, self.qk_rope_head_dim, self.n_local_heads = 512, 64, HEADS // ranks

        def quiet(self, name):
            return self.__dict__.get("_modules", {}).get(name, QUIET)

        __init__.__module__ = self.module.__name__
        members = {"tp_size": 1, "attn_tp_size": 1, "is_dsv41": False, "__getattr__": quiet}
        members["wo_b"] = staticmethod(lambda o, **_: (o, None))  # what wo_a gave, flattened
        members["_project_wo_b"] = lambda self, o, defer_all_reduce: o.flatten(1)
        members["_kernel_num_heads"] = lambda self, rows: self.n_local_heads
        members["__init__"], members["forward"] = (
            self.replaced("init", __init__),
            adapter.replace_forward(forward) if self.patched else forward,
        )
        return type("MQALayer", (torch.nn.Module,), members)

    def load(self, model, weights):
        names = {
            **{"torch": torch, "concurrent": concurrent, "DEEPSEEK_V4_STACKED_PARAMS_MAPPING": []},
            "get_layer_id": lambda name: int(name.split(".")[2]),
            "_clone_if_runai_streamed_tensor": lambda tensor: tensor,
            "maybe_executor_submit": lambda func, func_args, **_: func(*func_args),
        }
        if self.log is not None:
            names["logger"] = self.log
        for name in EXPANDERS:
            take(self.wheel, names, name)
        names["_dequant_fp8"] = self.expansion
        if STREAMING in names:
            names[STREAMING] = self.replaced("expansion", names[STREAMING])
        remap = take(self.wheel, names, "DeepseekV4ForCausalLM.remap_weight_name_to_dpsk_hf_format")
        model.remap_weight_name_to_dpsk_hf_format = getattr(remap, "__func__", remap)
        loader = self.replaced("load_weights", take(self.wheel, names, "DeepseekV4ForCausalLM.load_weights"))
        loader(model, iter(weights.items()))

    def run(self, o, freqs_cis, positions, *, rank=0, ranks=1):
        """What wo_a gives in each layer, [layers, rows, outputs], with the checkpoint loaded; and the model."""
        backend = SimpleNamespace(forward=lambda **kwargs: o.clone())
        model = Model(self.attention(backend), rank, ranks)
        self.load(model, self.weights())
        batch, outs = Quiet(), []
        vars(batch).update(self.batch, attn_backend=backend)
        for layer in model.model.layers:
            layer.self_attn.freqs_cis = freqs_cis
            layer.self_attn._forward_prepare = lambda *args, **kwargs: (o, None)
            layer.self_attn.attn_mqa = SimpleNamespace(layer_id=0, v_head_dim=512)
            outs.append(layer.self_attn.forward(torch.zeros((o.shape[0], 8), dtype=o.dtype), positions, batch))
        return torch.stack(outs), model


def checkpoint():
    """Names as in the released one: E4M3 weights and UE8M0 scales, in either order."""
    generator, found = torch.Generator().manual_seed(0), {}
    for index in range(LAYERS):
        weight, scale = make_weight(1, GROUPS * OUTPUTS, INPUTS, generator, ue8m0=True)
        pair = [("weight", weight[0]), ("scale", scale[0].view(torch.float8_e8m0fnu))]
        for kind, tensor in pair if index % 2 else reversed(pair):
            found[f"layers.{index}.attn.wo_a.{kind}"] = tensor
    return found


def truth(o, freqs_cis, positions, rank, ranks):
    """The reference over this rank's part of the checkpoint, [layers, rows, outputs]."""
    stored, groups, outs = checkpoint(), GROUPS // ranks, []
    for index in range(LAYERS):
        weight = stored[f"layers.{index}.attn.wo_a.weight"].view(GROUPS, OUTPUTS, INPUTS)
        scale = stored[f"layers.{index}.attn.wo_a.scale"].view(torch.uint8).view(GROUPS, OUTPUTS // 128, -1)
        part = slice(rank * groups, (rank + 1) * groups)
        x = o.view(o.shape[0], groups, INPUTS)
        outs.append(reference.wo_a(x, weight[part], scale[part], freqs_cis, positions).flatten(1))
    return torch.stack(outs)


@pytest.fixture(autouse=True)
def operator(monkeypatch):
    """The gate is open; the reference computes what passes our operator's own checks."""
    made = Operator()
    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(adapter.op, "wo_a", made)
    monkeypatch.setattr(adapter, "kept", adapter.KeptWeights("wo_a", "in FP8"))
    adapter._serve.cache_clear()
    return made


def inputs(rows, ranks):
    generator = torch.Generator().manual_seed(rows)
    o = torch.randn((rows, HEADS // ranks, 512), generator=generator).to(torch.bfloat16)
    return o, make_freqs_cis(300, "cpu"), torch.randint(0, 300, (rows,), generator=generator)


@every_release()
@pytest.mark.parametrize("rows, rank, ranks", [(1, 0, 1), (5, 1, 2), (64, 3, 4), (257, 0, 2)])
def test_the_wheels_own_forward_projects_with_the_wheels_own_loading(
    version, rows, rank, ranks, sglang_wheel, monkeypatch, operator
):
    wheel, given = sglang_wheel(version), inputs(rows, ranks)
    stock = Tree(wheel, monkeypatch, patched=False)
    expected, model = stock.run(*given, rank=rank, ranks=ranks)
    assert len(stock.expansion.shapes) == LAYERS and operator.calls == []
    assert {layer.self_attn.wo_a.weight.dtype for layer in model.model.layers} == {torch.bfloat16}
    ours = Tree(wheel, monkeypatch, patched=True)
    found, model = ours.run(*given, rank=rank, ranks=ranks)
    assert ours.expansion.shapes == [] and operator.calls == [(rows, rows <= 256)] * LAYERS
    assert {layer.self_attn.wo_a.weight.dtype for layer in model.model.layers} == {torch.float8_e4m3fn}
    exact = truth(*given, rank, ranks)
    for result in (found, expected):
        assert relative_error(result, exact) < 0.0025


def converted(change=lambda weight: weight):
    """As sgl-project's FP8 conversions have it: DeepSeek's own convert.py makes wo_a bf16, and its scales are gone."""
    pairs = checkpoint()
    for name in [name for name in pairs if name.endswith(".weight")]:
        scale = pairs.pop(name.replace(".weight", ".scale"))
        pairs[name] = change(Expansion()(pairs[name], scale))
    return pairs


class Log(Quiet):
    def __init__(self):
        self.said = []

    def warning(self, text, *_):
        self.said.append(text)


@every_release()
@pytest.mark.parametrize("was_e4m3", [True, False])
def test_a_checkpoint_with_bf16_weights_and_no_scales(version, was_e4m3, sglang_wheel, monkeypatch, operator):
    """SGLang takes them as they are; ours make E4M3 of what was E4M3, and leave other numbers to SGLang. No parameter
    is told to be without weights."""
    wheel, rows = sglang_wheel(version), 5
    monkeypatch.setattr(adapter.handed_over, "tell", lambda *told: None)
    given, found = inputs(rows, 2), {}
    for patched in (False, True):
        tree = Tree(wheel, monkeypatch, patched=patched)
        tree.weights = converted if was_e4m3 else lambda: converted(lambda weight: weight * 1.17)
        tree.log = Log()
        found[patched], model = tree.run(*given, rank=1, ranks=2)
        assert tree.log.said == [] and tree.expansion.shapes == []
    assert operator.calls == ([(rows, True)] * LAYERS if was_e4m3 else [])
    is_ours = [isinstance(layer.self_attn.wo_a.weight, adapter.StoredWeight) for layer in model.model.layers]
    assert is_ours == [was_e4m3] * LAYERS
    if was_e4m3:
        for result in found.values():
            assert relative_error(result, truth(*given, 1, 2)) < 0.0025
    else:
        assert torch.equal(found[True], found[False])


@every_release()
def test_what_the_adapter_takes_from_the_model_is_there(version, sglang_wheel):
    wheel = sglang_wheel(version)
    assert contract.parameters(definition(wheel, "_dequant_fp8")) == ("weight", "scale")  # for the shadow's copy
    base = "MQALayer" if not since(version, "0.5.16") else "MqaAttentionBase"
    init = ast.unparse(definition(wheel, f"{base}.__init__"))
    for name in ("wo_a", "head_dim", "qk_rope_head_dim", "o_lora_rank", "n_local_groups"):
        assert f"self.{name} = " in init or f"self.{name}: " in init, name
    assert "torch.bfloat16" in init  # wo_a's own dtype, where it is not quantised
    assert "super().load_weights(weights, is_nextn=True)" in source(wheel, MTP)
    configuration = source(wheel, FP8)
    for text in ("class Fp8LinearMethod", "self.is_checkpoint_fp8_serialized = ", "self.weight_block_size = "):
        assert text in configuration
    named = definition(wheel, "Fp8Config.get_name", FP8)
    assert "'fp8'" in ast.unparse(named.body[-1])
    rope_uses = [line for line in source(wheel).splitlines() if "inverse=True" in line]
    assert 1 <= len(rope_uses) <= 4
