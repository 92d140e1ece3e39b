"""SGLang's offloader, its loaders of what its layers have made, and its holder of weights for others, taken out of the
wheels and run on the CPU with ours in them: SGLang's own layers stay, and what is saved, held and computed is SGLang's.
"""

import ast
import collections
import concurrent.futures
import contextlib
import glob
import hashlib
import json
import os
import shutil
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.sglang_patches import device_gate
from deepseek_v4_sm120.sglang_patches.adapters import handed_over, mxfp4_moe, wo_a
from deepseek_v4_sm120.sglang_patches.names import LOADER
from deepseek_v4_sm120.sglang_patches.table import CUTLASS_EXPERTS
from deepseek_v4_sm120.specs.fp8_linear import make_weight
from tests.adapters.test_mxfp4_moe import RECORDED, SMALL, Method, engine_inputs, engine_layer, replaced, served  # noqa: F401
from tests.adapters.wo_a_layer import GROUPS, INPUTS, OUTPUTS, Expansion, Fp8Config, Linear
from tests.patching.test_wheel_wo_a import (
    LAYERS,
    Quiet,
    Tree,
    checkpoint,
    inputs,
    operator,  # noqa: F401
    source,
    take,
    truth,
)
from tests.patching.test_wheel_wo_a import Model as TwoAttentions
from tests.patching.wheels import WheelSources, fetch

OFFLOADER = handed_over.OFFLOADER
PROTOCOL = "sglang.srt.weight_cache.protocol"
CUTLASS, METHOD = CUTLASS_EXPERTS.split(":")
ROWS = 3


def releases(*versions):
    """Those whose definitions differ, by reviewed.json."""
    return pytest.mark.parametrize("version", versions, scope="module")


@pytest.fixture(autouse=True)
def untold(monkeypatch):
    monkeypatch.setattr(handed_over, "process", handed_over.Process())
    monkeypatch.setattr(report, "_notes", {})
    monkeypatch.delenv(report.TOLD, raising=False)
    monkeypatch.setattr(device_gate, "serves", lambda device: device.type != "meta")


# ---- layers' weights on the host


class TorchWithTwoDevices:
    """torch, for which the CPU is the GPU: the host that the offloader looks for is another device."""

    def __getattr__(self, name):
        return getattr(torch, name)

    device = staticmethod(lambda name: None)


class OffloadedLayer(torch.nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.self_attn = attention

    def forward(self, *args):
        return self.self_attn.forward(*args)


def offloader(version, monkeypatch):
    """The release's own for --cpu-offload-gb, in place as its model runner sets it before the model is made."""
    names = {"torch": TorchWithTwoDevices(), "BaseOffloader": object, "functional_call": torch.func.functional_call}
    names["is_pin_memory_available"] = lambda: False
    for name in ("_get_offloaded_device_state", "_get_resident_parameter_ids"):
        take(fetch(version), names, name, OFFLOADER)
    made = take(fetch(version), names, "OffloaderV1", OFFLOADER)(1 << 40)
    module = ModuleType(OFFLOADER)
    module.get_offloader = lambda: made
    monkeypatch.setitem(sys.modules, OFFLOADER, module)
    return made


@releases("0.5.12", "0.5.17", "0.5.22", "0.5.23")
def test_layers_whose_weights_lie_on_the_host_are_sglangs(version, monkeypatch, operator):  # noqa: F811
    made, (o, freqs_cis, positions) = offloader(version, monkeypatch), inputs(ROWS, 1)
    ours = Tree(fetch(version), monkeypatch, patched=True)
    backend = SimpleNamespace(forward=lambda **kwargs: o.clone())
    model = TwoAttentions(ours.attention(backend), 0, 1)
    layers = [made.maybe_offload_to_cpu(OffloadedLayer(layer.self_attn)) for layer in model.model.layers]
    ours.load(model, checkpoint())
    batch, outs = Quiet(), []
    batch.attn_backend = backend
    for layer in layers:
        layer.self_attn.freqs_cis = freqs_cis
        layer.self_attn._forward_prepare = lambda *args, **kwargs: (o, None)
        layer.self_attn.attn_mqa = SimpleNamespace(layer_id=0, v_head_dim=512)
        outs.append(layer.forward(torch.zeros((ROWS, 8), dtype=o.dtype), positions, batch))
    assert relative_error(torch.stack(outs), truth(o, freqs_cis, positions, 0, 1)) < 0.0025
    assert operator.calls == [] and len(ours.expansion.shapes) == LAYERS
    assert "--cpu-offload-gb" in report._notes["wo_a_handed_over"][0]()


def test_experts_on_the_host_are_not_held_on_the_card_as_well(served, monkeypatch):  # noqa: F811
    layer = engine_layer(RECORDED[0], engine_inputs(RECORDED[0]))
    assert mxfp4_moe.keeps(Method(False), layer)
    module = ModuleType(OFFLOADER)
    monkeypatch.setitem(sys.modules, OFFLOADER, module)
    module.get_offloader = type("NoopOffloader", (), {})
    said = []
    monkeypatch.setattr(report, "warn_once", said.append)
    assert mxfp4_moe.keeps(Method(False), layer) and report._notes == {} and not said
    for name in ("OffloaderV2", "OffloaderV1"):  # --offload-group-size, --cpu-offload-gb
        module.get_offloader = type(name, (), {})
        assert not mxfp4_moe.keeps(Method(False), layer)
    assert said == [report._notes["mxfp4_moe_handed_over"][0]()] * 2 and "NOT REPRODUCIBLE" not in said[0]
    monkeypatch.setattr(handed_over, "settings", lambda: SimpleNamespace(reproducible=True))
    assert not mxfp4_moe.keeps(Method(False), layer)
    assert "NOT REPRODUCIBLE" in report._notes["mxfp4_moe_handed_over"][0]()


# ---- what SGLang's layers have made of a checkpoint, saved and loaded


class Experts(torch.nn.Module):
    """Experts of the smallest shape, with the release's own method; SGLang's kernels want their scales in an order of
    their own, in the same memory."""

    def __init__(self, method, given):
        super().__init__()
        self.quant_method = method
        for name in ("w13_weight", "w2_weight"):
            setattr(self, name, torch.nn.Parameter(torch.zeros_like(getattr(given, name)), requires_grad=False))
        for name in mxfp4_moe.SCALE_NAMES:
            setattr(self, name, torch.nn.Parameter(torch.zeros_like(getattr(given, name)), requires_grad=False))
        self.moe_runner_config, self.dispatcher = given.moe_runner_config, given.dispatcher
        self.moe_ep_rank, self.top_k = given.moe_ep_rank, given.top_k


class Model(torch.nn.Module):
    def __init__(self, method, given):
        super().__init__()
        self.wo_a, self.experts = Linear(), Experts(method, given)
        attention = SimpleNamespace(wo_a=self.wo_a, head_dim=512, qk_rope_head_dim=64, o_lora_rank=1024)
        if method.patched and wo_a.keeps(attention, Fp8Config(), "wo_a"):
            wo_a.store(self.wo_a, Expansion())


def method_of(version, patched):
    given = {"block_scale_interleave": lambda scale: scale.flip(0, 1)}
    names = {"torch": torch, "GIVEN": given}
    process = take(fetch(version), names, f"{METHOD}.process_weights_after_loading", CUTLASS)
    members = {"_use_mxfp8_act_scaling": True, "_use_sm90_humming": False, "load_up_proj_weight_first": True}
    members |= {"patched": patched, "prefix": ""}
    members["_fp8"] = SimpleNamespace(process_weights_after_loading=lambda layer: None)
    members["process_weights_after_loading"] = mxfp4_moe.replace_cutlass_process(process) if patched else process
    members["apply"] = mxfp4_moe.replace_cutlass_apply(lambda method, layer, given: given)
    return type(METHOD, (), members)()


class Files:
    """safetensors' two functions."""

    def __init__(self, path, framework=None):
        with open(path, "rb") as file:
            self.tensors = torch.load(file)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def keys(self):
        return self.tensors.keys()

    def get_tensor(self, key):
        return self.tensors[key]


class Default:
    """DefaultModelLoader: initialises, loads, processes."""

    def __init__(self, load_config):
        self.load_config = load_config

    def _get_all_weights(self, model_config, model):
        return model_config.weights

    def load_weights_and_postprocess(self, model, weights, device):
        codes, scale = weights["wo_a"]
        if isinstance(model.wo_a.weight, wo_a.StoredWeight):
            model.wo_a.weight.data.copy_(codes)
            model.wo_a.weight.scale.data.copy_(scale)
        else:
            model.wo_a.weight.data.copy_(Expansion()(codes, scale))
        for name, parameter in model.experts.named_parameters():
            parameter.data.copy_(weights[name])
        model.experts.quant_method.process_weights_after_loading(model.experts)


def loader_of(version, kind, patched, make):
    """The release's own class; make: () -> the model that it initialises."""
    names = {
        **{"collections": collections, "concurrent": concurrent, "gc": Quiet(), "glob": glob, "hashlib": hashlib},
        **{"json": json, "os": os, "shutil": shutil, "time": time, "torch": torch, "nn": torch.nn},
        **{"DefaultModelLoader": Default, "BaseModelLoader": Default, "LoadFormat": SimpleNamespace(AUTO="auto")},
        **{"GemmaRMSNorm": Quiet, "RadixLinearAttention": Quiet},
        "_initialize_model": lambda *_: make(),
        "set_default_torch_dtype": lambda dtype: contextlib.nullcontext(),
        "device_loading_context": lambda module, device: contextlib.nullcontext(),
        "get_parallel": lambda: SimpleNamespace(tp_rank=0),
        "GIVEN": {"safe_open": Files, "save_file": torch.save, "get_tensor_model_parallel_rank": lambda: 0},
    }
    loader = take(fetch(version), names, kind, LOADER)
    if patched:
        loader.load_model = handed_over.replace_load_model(loader.load_model)
    return loader


def bytes_of(model):
    return {name: tensor.data.contiguous().view(torch.uint8) for name, tensor in model.named_parameters()}


def weights_of(given):
    """The checkpoint: wo_a in E4M3 with its scales, and the experts by the names of their parameters."""
    codes, scale = make_weight(1, GROUPS * OUTPUTS, INPUTS, torch.Generator().manual_seed(0))
    names = ("w13_weight", "w2_weight", *mxfp4_moe.SCALE_NAMES)
    return {"wo_a": (codes[0], scale[0]), **{name: getattr(given, name).data for name in names}}


def made_by_sglang(given):
    """A model that SGLang's own loading and processing have made of the checkpoint."""
    model = Model(method_of("0.5.17", False), given)
    Default(None).load_weights_and_postprocess(model, weights_of(given), "cpu")
    return model


CUTLASS_LAYER = RECORDED[3]


@releases("0.5.17", "0.5.23")
@pytest.mark.parametrize("saved_with, loaded_with", [(False, True), (True, False), (True, True)])
def test_what_is_presharded_is_sglangs_whoever_saves_and_loads(
    version,
    saved_with,
    loaded_with,
    served,  # noqa: F811
    monkeypatch,
    tmp_path,
):
    given = engine_layer(CUTLASS_LAYER, engine_inputs(CUTLASS_LAYER))
    config = SimpleNamespace(weights=weights_of(given), dtype=torch.bfloat16, is_draft_model=False, model_path="")
    config = {"model_config": config, "device_config": SimpleNamespace(device="cpu")}

    def load(patched):
        loader = loader_of(version, "PreshardedModelLoader", patched, lambda: Model(method_of(version, patched), given))
        loader._collect_shard_config = lambda self, model_config: {"tp": 1}  # its signature is of a model on "meta"
        loader._new_content_hasher = staticmethod(hashlib.sha256)
        loader._world_rank_and_size, loader._world_barrier = staticmethod(lambda: (0, 1)), staticmethod(lambda: None)
        extra = {"presharded_path": str(tmp_path)}
        return loader(SimpleNamespace(model_loader_extra_config=extra, load_format="presharded")).load_model(**config)

    monkeypatch.setattr(wo_a.limits, "takes", lambda of, **sizes: True)
    expected = made_by_sglang(given)
    scales = mxfp4_moe.SCALE_NAMES[0]
    interleaved = getattr(given, scales).data.view(torch.uint8).flip(0, 1)
    assert torch.equal(bytes_of(expected)[f"experts.{scales}"], interleaved)
    load(saved_with)
    (ready,) = tmp_path.glob("*/READY")
    found = load(loaded_with)
    assert ready.exists() and not hasattr(found.experts, mxfp4_moe.KEPT)
    assert bytes_of(found).keys() == bytes_of(expected).keys()
    for name, tensor in bytes_of(found).items():
        assert torch.equal(tensor, bytes_of(expected)[name]), name


@releases("0.5.12", "0.5.16", "0.5.21")
def test_a_sharded_state_of_sglangs_is_loaded_as_one(version, served, monkeypatch, tmp_path):  # noqa: F811
    """The experts' method is 0.5.17's: earlier releases have the loader, and experts that save parameters of others."""
    given = engine_layer(CUTLASS_LAYER, engine_inputs(CUTLASS_LAYER))
    monkeypatch.setattr(wo_a.limits, "takes", lambda of, **sizes: True)
    expected = bytes_of(made_by_sglang(given))
    torch.save(made_by_sglang(given).state_dict(), tmp_path / "model-rank-0-part-0.safetensors")
    loader = loader_of(version, "ShardedStateLoader", True, lambda: Model(method_of("0.5.17", True), given))
    config = SimpleNamespace(dtype=torch.bfloat16, model_path=str(tmp_path), revision=None)
    found = loader(SimpleNamespace(model_loader_extra_config=None, load_format="sharded_state")).load_model(
        model_config=config, device_config=SimpleNamespace(device="cpu")
    )
    for name, tensor in bytes_of(found).items():
        assert torch.equal(tensor, expected[name]), name
    words = [describe() for describe, _ in report._notes.values()]
    assert len(words) == 2 and all("ShardedStateLoader loads weights as SGLang's own layers" in text for text in words)


# ---- weights that are held for others


@releases("0.5.17", "0.5.20", "0.5.23")
def test_who_holds_weights_for_others_has_sglangs(version, served):  # noqa: F811
    layer, config = engine_layer(CUTLASS_LAYER, engine_inputs(CUTLASS_LAYER)), {"weight_block_size": [128, 128]}
    names = {"is_ipc_quant_supported": lambda method, given: method == "fp8" and given is config}
    names["UnsupportedQuantForIPCError"] = KeyError
    check = handed_over.replace_quant_support(take(fetch(version), names, "check_ipc_quant_support", PROTOCOL))
    check("fp8", config, where="client")
    with pytest.raises(KeyError):
        check("another", config, where="client")
    assert mxfp4_moe.keeps(Method(True), layer)
    check("fp8", config, where="daemon")
    check("fp8", config, where="client")
    assert not mxfp4_moe.keeps(Method(True), layer)
    for module in ("daemon", "ipc_loader"):  # by keyword, in front of the loading
        asked = source(fetch(version), f"sglang.srt.weight_cache.{module}").partition("check_ipc_quant_support(quant")
        assert "where=" in asked[2].partition(")")[0] and ".load_model(" not in asked[0]


EXPORTER = "sglang.srt.model_executor.model_runner_components.weight_exporter"


def test_weights_of_ours_are_neither_saved_nor_sent(served):  # noqa: F811
    """By 0.5.23's own look at all layers, in front of all that saves or sends; what is SGLang's is let through."""
    wheel, model = fetch("0.5.23"), torch.nn.Module()
    look = take(wheel, {}, "WeightExporter._weight_export_unsupported_reason", EXPORTER)
    exporter = SimpleNamespace(get_model=lambda: model)
    model.norm = torch.nn.Module()
    assert look(exporter) is None
    model.wo_a = Linear(outputs=256, inputs=512)
    wo_a.store(model.wo_a, Expansion())
    assert look(exporter).startswith("wo_a: ") and "DSV4_SM120_SET=wo_a=off" in look(exporter)
    model.wo_a = torch.nn.Module()
    process, _ = replaced(cutlass=False)
    layer = engine_layer(RECORDED[0], engine_inputs(RECORDED[0]))
    process(Method(RECORDED[0].cutlass), layer)
    model.experts = torch.nn.Module()
    vars(model.experts).update({name: value for name, value in vars(layer).items() if name == handed_over.NOT_EXPORTED})
    assert look(exporter).startswith("mxfp4_moe: ")
    text = source(wheel, EXPORTER)
    for name in ("save_remote_model", "save_sharded_model", "send_weights_to_remote_instance"):
        body = text.partition(f"def {name}(")[2].partition("\n    def ")[0]
        assert "_weight_export_" in body.partition("RemoteModelLoader")[0]


@pytest.mark.parametrize("name", [*handed_over.TWICE_REORDERED, "PreshardedModelLoader"])
@pytest.mark.parametrize("of_ours", [True, False])
def test_loaders_that_reorder_twice_are_told(name, of_ours, monkeypatch):
    said = []
    monkeypatch.setattr(handed_over, "is_ours", lambda: of_ours)
    monkeypatch.setattr(report, "warn_once", said.append)
    loader = type(name, (), {"load_model": handed_over.replace_load_model(lambda self, **given: given)})()
    assert loader.load_model(model_config=1, device_config=2) == {"model_config": 1, "device_config": 2}
    assert [text.startswith(f"{name}: answers will be wrong") for text in said] == (
        [True] if of_ours and name in handed_over.TWICE_REORDERED else []
    )


@pytest.mark.parametrize("version", ["0.5.12", "0.5.14", "0.5.17", "0.5.20", "0.5.23"])
@pytest.mark.parametrize("name", handed_over.TWICE_REORDERED)
def test_what_is_loaded_as_it_was_saved_is_reordered_again(name, version):
    """The loader calls post_load_weights behind the state, and that reorders where no loader of `ape`'s own has."""
    module = WheelSources(fetch(version)).read(LOADER)
    found = [c for c in ast.parse(module).body if isinstance(c, ast.ClassDef) and c.name == name]
    if not found:
        return
    assert "post_load_weights(" in ast.unparse(found[0])
    model = WheelSources(fetch(version)).read("sglang.srt.models.deepseek_v4")
    (post,) = [
        f for c in ast.parse(model).body if isinstance(c, ast.ClassDef) and c.name == "DeepseekV4ForCausalLM"
        for f in c.body if isinstance(f, ast.FunctionDef) and f.name == "post_load_weights"
    ]  # fmt: skip
    assert "ape_converted" in ast.unparse(post) and "apply_ape_hotfix()" in ast.unparse(post)
