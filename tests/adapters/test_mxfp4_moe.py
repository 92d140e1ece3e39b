"""The adapters of the experts on method objects as SGLang makes them; the reference is in the operator's place."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from deepseek_v4_sm120 import patching, settings
from deepseek_v4_sm120.ops.shared.limits import LIMITS, OneOf
from deepseek_v4_sm120.patching import profile, report
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.reference.mxfp4_moe import mxfp4_moe as reference
from deepseek_v4_sm120.sglang_patches import device_gate, shadow
from deepseek_v4_sm120.sglang_patches.adapters import mxfp4_moe as adapter
from deepseek_v4_sm120.specs import mxfp4_moe
from deepseek_v4_sm120.specs.mxfp4_moe import Shape, make_inputs

SMALL = Shape(3, hidden=256, inter=128, experts=8)


class StandardDispatchOutput(NamedTuple):
    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_output: object


class StandardCombineInput(NamedTuple):
    hidden_states: torch.Tensor


class StandardDispatcher:
    def __init__(self, ids_are_global=False):
        self.skip_local_expert_mapping = ids_are_global


@dataclass(frozen=True)
class Recorded:
    """What distinguishes the versions and backends: how scales are stored, w13's order, who maps ids."""

    name: str
    scale_dtype: torch.dtype
    cutlass: bool = False
    ep_rank: int = 0


RECORDED = [
    Recorded("0.5.12 marlin", torch.float32),
    Recorded("0.5.17 marlin", torch.float8_e8m0fnu),
    Recorded("0.5.23 marlin, second rank", torch.float8_e8m0fnu, ep_rank=1),
    Recorded("0.5.17 flashinfer_mxfp4", torch.float8_e8m0fnu, cutlass=True),
    Recorded("0.5.23 flashinfer_mxfp4, second rank", torch.float8_e8m0fnu, cutlass=True, ep_rank=1),
]


def parameter(tensor):
    return torch.nn.Parameter(tensor, requires_grad=False)


def stored_scale(scale, dtype):
    return torch.exp2(scale.float() - 127) if dtype == torch.float32 else scale.view(dtype)


class Method:
    """What both classes have; `process` and `apply` are what the patch finds and keeps as the original."""

    def __init__(self, cutlass):
        self._fp8 = SimpleNamespace(process_weights_after_loading=lambda layer: layer.log.append("fp8"))
        if cutlass:
            self.load_up_proj_weight_first = True


def original_process(self, layer):
    layer.log.append("repacked")
    layer.w13_weight = parameter(torch.zeros(1, dtype=torch.int32))


def original_apply(self, layer, dispatch_output):
    layer.log.append("applied")
    return StandardCombineInput(dispatch_output.hidden_states * 2)


Method.apply = adapter.replace_marlin_apply(original_apply)


def engine_layer(recorded, inputs):
    config = SimpleNamespace(activation="silu", is_gated=True, gemm1_alpha=None, swiglu_limit=inputs.swiglu_limit)
    return SimpleNamespace(
        w13_weight=parameter(inputs.w13.view(torch.int8).clone()),
        w2_weight=parameter(inputs.w2.view(torch.int8).clone()),
        w13_weight_scale_inv=parameter(stored_scale(inputs.w13_scale.clone(), recorded.scale_dtype)),
        w2_weight_scale_inv=parameter(stored_scale(inputs.w2_scale.clone(), recorded.scale_dtype)),
        moe_runner_config=config,
        dispatcher=StandardDispatcher(ids_are_global=recorded.cutlass),
        moe_ep_rank=recorded.ep_rank,
        top_k=inputs.topk_ids.shape[1],
        log=[],
    )


def engine_inputs(recorded):
    """Weights are finite everywhere: float32 scales have no byte 255. The limit is not the operator's default."""
    shape = dataclasses.replace(SMALL, rows=24, up_first=recorded.cutlass, swiglu_limit=7.0)
    if recorded.cutlass and recorded.ep_rank:
        shape = dataclasses.replace(shape, first_expert=8, all_experts=16)
    return make_inputs(shape, device="cpu")


def dispatched(inputs):
    topk = SimpleNamespace(topk_ids=inputs.topk_ids, topk_weights=inputs.topk_weights)
    return StandardDispatchOutput(inputs.hidden, None, topk)


def of_other_types(dispatch):
    """Ids and weights as another router of SGLang's may give them."""
    topk = dispatch.topk_output
    routed = SimpleNamespace(topk_ids=topk.topk_ids.long(), topk_weights=topk.topk_weights.double())
    return dispatch._replace(topk_output=routed)


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.fixture
def served(monkeypatch):
    """The gate is open for the CPU, the reference computes, SGLang's module of the outputs is this one."""
    calls = []

    def operator(*args, activations, reproducible, **kwargs):
        hidden, topk_ids, topk_weights, *_ = args
        assert (hidden.dtype, topk_ids.dtype, topk_weights.dtype) == (torch.bfloat16, torch.int32, torch.float32)
        calls.append(activations)
        return reference(*args, **kwargs).to(torch.bfloat16)

    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    small = {"hidden": OneOf((SMALL.hidden,)), "inter": OneOf((SMALL.inter,))}
    monkeypatch.setitem(LIMITS, "mxfp4_moe", {**LIMITS["mxfp4_moe"], **small})
    monkeypatch.setattr(adapter.op, "mxfp4_moe", operator)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0))
    monkeypatch.setattr(adapter, "kept", adapter.KeptWeights("mxfp4_moe", "of experts"))
    monkeypatch.setattr(report, "_notes", {})
    module = ModuleType("dispatch")
    module.StandardCombineInput = StandardCombineInput
    monkeypatch.setitem(sys.modules, "dispatch", module)
    monkeypatch.setattr(StandardDispatchOutput, "__module__", "dispatch")
    return calls


def replaced(cutlass):
    """(process, apply) as the patch puts them in the class."""
    make = adapter.replace_cutlass_apply if cutlass else adapter.replace_marlin_apply
    Method.apply = make(original_apply)
    process = adapter.replace_cutlass_process if cutlass else adapter.replace_marlin_process
    return process(original_process), Method.apply


def test_a_subclass_that_computes_itself_gets_the_weights_that_it_knows(served):
    """Wherever it is defined: process is inherited, and ours would leave the weights as they were loaded."""

    class Later(Method):
        def apply(self, layer, dispatch_output):
            return original_apply(self, layer, dispatch_output)

    class Same(Method):
        pass

    process, _ = replaced(cutlass=True)
    for kind, is_ours in ((Later, False), (Same, True)):
        layer = engine_layer(RECORDED[4], engine_inputs(RECORDED[4]))
        process(kind(cutlass=True), layer)
        assert ("repacked" in layer.log) != is_ours and hasattr(layer, adapter.KEPT) == is_ours


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda r: r.name)
def test_a_layer_is_loaded_without_a_repack_and_computed(served, recorded):
    inputs = engine_inputs(recorded)
    layer, method = engine_layer(recorded, inputs), Method(recorded.cutlass)
    address = layer.w13_weight.data_ptr()
    process, apply = replaced(recorded.cutlass)
    with default_dtype(torch.bfloat16):  # as SGLang loads a model
        process(method, layer)
    assert layer.log == ["fp8"] and layer.w13_weight.data_ptr() == address
    for found in (apply(method, layer, dispatched(inputs)), apply(method, layer, of_other_types(dispatched(inputs)))):
        assert isinstance(found, StandardCombineInput) and layer.log == ["fp8"]
        assert relative_error(found.hidden_states, reference(**inputs.arguments())) < 0.004
    assert served == ["mxfp8" if recorded.cutlass else "bf16"] * 2
    assert layer.w13_weight_scale_inv.dtype == torch.float8_e8m0fnu  # float32 scales have made room for bytes
    assert torch.equal(
        layer.w13_weight_scale_inv.view(torch.uint8)[inputs.topk_ids[0, 0] % 8],
        inputs.w13_scale[inputs.topk_ids[0, 0] % 8],
    )


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda r: r.name)
def test_weights_that_are_loaded_again_are_computed_with(served, recorded):
    """As update_weights does: into the layer's parameters, by what SGLang noted on them; captured graphs hold their
    addresses."""
    inputs = engine_inputs(recorded)
    layer, method = engine_layer(recorded, inputs), Method(recorded.cutlass)
    for name in adapter.SCALE_NAMES:
        getattr(layer, name).weight_loader = lambda parameter, loaded: parameter.data.copy_(loaded)
    process, apply = replaced(recorded.cutlass)
    process(method, layer)
    before, addresses = apply(method, layer, dispatched(inputs)).hidden_states, addresses_of(layer)
    layer.w2_weight.data.bitwise_xor_(-0x78)  # the sign of each second code
    scale = layer.w13_weight_scale_inv
    scale.weight_loader(scale, (inputs.w13_scale - 1).view(torch.float8_e8m0fnu))
    for _ in range(2):  # from tensors nothing is processed, from disk all is
        others = apply(method, layer, dispatched(inputs)).hidden_states
        given = inputs.arguments() | {"w2": inputs.w2 ^ 0x88, "w13_scale": inputs.w13_scale - 1}
        assert relative_error(others, reference(**given)) < 0.004 and not torch.equal(others, before)
        process(method, layer)
    assert addresses_of(layer) == addresses and adapter.kept.layers == 1


def addresses_of(layer):
    kept = getattr(layer, adapter.KEPT)
    return [t.data_ptr() for t in (kept.w13, kept.w13_scale, kept.w2, kept.w2_scale)]


def test_status_tells_the_memory(served):
    inputs = engine_inputs(RECORDED[1])
    process, _ = replaced(False)
    for _ in range(3):
        process(Method(False), engine_layer(RECORDED[1], inputs))
    ((describe, _),) = report._notes.values()
    assert "3 layers" in describe() and "GB of experts" in describe() and "shadow" not in describe()
    assert adapter.kept.weight_bytes == 3 * sum(
        t.numel() for t in (inputs.w13, inputs.w13_scale, inputs.w2, inputs.w2_scale)
    )


def change(**changes):
    def apply(layer):
        for name, value in changes.items():
            holder = layer.moe_runner_config if hasattr(layer.moe_runner_config, name) else layer
            setattr(holder, name, value)

    return apply


def configured(**changes):
    return lambda layer: vars(layer.moe_runner_config).update(changes)


def weights(w13=(8, 256, 128), w2=(8, 256, 64), dtype=torch.int8):
    return change(
        w13_weight=parameter(torch.zeros(w13, dtype=dtype)), w2_weight=parameter(torch.zeros(w2, dtype=dtype))
    )


REFUSED = {
    "another activation": change(activation="gelu"),
    "not gated": change(is_gated=False),
    "GPT-OSS's clamp": change(gemm1_alpha=1.7),
    "biases": change(w13_weight_bias=torch.zeros(1)),
    "FP8 experts": change(w13_weight=parameter(torch.zeros(8, 256, 256).to(torch.float8_e4m3fn))),
    "odd sizes": change(w13_weight=parameter(torch.zeros(8, 192, 128, dtype=torch.int8))),
    "another dispatcher": change(dispatcher=SimpleNamespace()),
    "a bias of the second product": change(w2_weight_bias=torch.zeros(1)),
    "no combination": configured(no_combine=True),
    "weighted on the way in": configured(apply_router_weight_on_input=True),
    "scales of another type": change(w2_weight_scale_inv=parameter(torch.ones(8, 128, 4, dtype=torch.bfloat16))),
    "flat weights": weights((8, 256), (8, 256)),
    "wide weights": weights(dtype=torch.int16),
    "a hidden size of its own": weights(w13=(8, 256, 64)),
    "a width of its own": weights(w2=(8, 256, 32)),
    "a size that nobody built": weights(w13=(8, 256, 64), w2=(8, 128, 64)),
    "too many experts of a token": change(top_k=13),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_layers_are_left_to_the_original(served, name):
    layer = engine_layer(RECORDED[1], engine_inputs(RECORDED[1]))
    REFUSED[name](layer)
    process, apply = replaced(False)
    process(Method(False), layer)
    apply(Method(False), layer, dispatched(engine_inputs(RECORDED[1])))
    assert layer.log == ["repacked", "applied"] and served == []


def test_a_method_with_another_activation_is_left_to_the_original(served):
    layer, method = engine_layer(RECORDED[1], engine_inputs(RECORDED[1])), Method(False)
    weights()(layer)  # the sizes that the others depart from
    assert adapter.keeps(method, layer)
    method._use_swiglu_step = True
    assert not adapter.keeps(method, layer)


def test_another_gpu_is_left_to_the_original(served, monkeypatch):
    monkeypatch.setattr(device_gate, "serves", lambda device: False)
    layer = engine_layer(RECORDED[1], engine_inputs(RECORDED[1]))
    process, apply = replaced(False)
    process(Method(False), layer)
    apply(Method(False), layer, dispatched(engine_inputs(RECORDED[1])))
    assert layer.log == ["repacked", "applied"]


@pytest.mark.parametrize(
    ("capability", "left_out", "activations"),
    [
        ((9, 0), (), "bf16"),
        ((12, 1), (), "mxfp8"),
        ((12, 0), (mxfp4_moe.OURS_MXFP8,), "bf16"),
    ],
)
def test_activations_are_mxfp8_where_there_are_instructions_and_the_profile_has_them(
    capability, left_out, activations, served, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    found = {"mxfp4_moe": {"winner": "ours", "left_out": dict.fromkeys(left_out, "wrong on this card")}}
    monkeypatch.setattr(patching, "_engine", SimpleNamespace(profile=profile.Profile("p.json", found)))
    [problem] = [one.problem() for one in mxfp4_moe.providers() if one.name == mxfp4_moe.OURS_MXFP8]
    assert ("block-scaled" in (problem or "")) == (capability[0] != 12)
    inputs = engine_inputs(RECORDED[3])
    layer = engine_layer(RECORDED[3], inputs)
    process, apply = replaced(True)
    process(Method(True), layer)
    apply(Method(True), layer, dispatched(inputs))
    assert set(served) == {activations} and mxfp4_moe.OURS_MXFP8 == adapter.WAY_MXFP8


def test_packed_topk_is_refused_in_words(served):
    inputs = engine_inputs(RECORDED[1])
    layer = engine_layer(RECORDED[1], inputs)
    process, apply = replaced(False)
    process(Method(False), layer)
    packed = StandardDispatchOutput(inputs.hidden, None, SimpleNamespace(packed_topk_ids=inputs.topk_ids))
    with pytest.raises(ValueError, match="topk_output must have topk_ids and topk_weights"):
        apply(Method(False), layer, packed)


@pytest.mark.parametrize("keep", ["1", "ours"])
def test_shadow_keeps_a_copy_and_compares(served, monkeypatch, keep):
    monkeypatch.setattr(adapter, "settings", lambda: settings.Settings(shadow=keep))
    monkeypatch.setattr(shadow, "settings", lambda: settings.Settings(shadow=keep))
    shadow.reset()
    inputs = engine_inputs(RECORDED[1])
    layer = engine_layer(RECORDED[1], inputs)
    process, apply = replaced(False)
    said = []
    monkeypatch.setattr(adapter.report, "warn_once", said.append)
    process(Method(False), layer)
    assert len(said) == 1 and "DSV4_SM120_SET=mxfp4_moe=off" in said[0], "before the memory is taken"
    assert layer.log == ["repacked"] and adapter.kept.shadow_copy_bytes > 0
    out = apply(Method(False), layer, dispatched(inputs)).hidden_states
    assert layer.log == ["repacked", "applied"]
    assert torch.equal(out, inputs.hidden * 2) == (keep == "1")
    (record,) = shadow.report()
    assert record["patch"] == "mxfp4_moe" and record["calls"] == 1 and record["bad_calls"] == 1
    assert record["shape"] == {"rows": 24, "inter": 128}
    shadow.reset()


def original_shared_add(experts, routed, shared, routed_scaling_factor):
    """As SGLang's: in place for these experts' methods, else the other way round."""
    if shared is None:
        return routed.mul_(routed_scaling_factor)
    if experts.is_fp4:
        return shared.add_(routed, alpha=routed_scaling_factor)
    routed += shared
    return routed


@pytest.mark.parametrize("kept, rows, ours", [(True, 1, 1), (True, 256, 1), (True, 257, 0), (False, 3, 0)])
def test_the_shared_add_of_a_step_is_ours(monkeypatch, kept, rows, ours):
    calls = []

    def add_shared(shared, routed, *, scaling):
        calls.append(scaling)
        return shared.add_(routed, alpha=scaling)

    monkeypatch.setattr(adapter.op, "add_shared", add_shared)
    monkeypatch.setattr(adapter, "settings", settings.Settings)
    experts = SimpleNamespace(is_fp4=kept, **{adapter.KEPT: object()} if kept else {})
    routed, shared = torch.randn(rows, 16).bfloat16(), torch.randn(rows, 16).bfloat16()
    expected = original_shared_add(experts, routed.clone(), shared.clone(), 1.5)
    found = adapter.replace_shared_add(original_shared_add)(experts, routed, shared, 1.5)
    assert torch.equal(found, expected) and calls == [1.5] * ours
    assert found is (shared if kept else routed)
    scaled = adapter.replace_shared_add(original_shared_add)(experts, routed.clone(), None, 1.5)
    assert torch.equal(scaled, routed * 1.5) and len(calls) == ours


def test_shadow_compares_the_shared_add_to_the_bit(monkeypatch):
    def wrong(shared, routed, *, scaling):
        shared.add_(routed, alpha=scaling)[0, 0] += 1.0
        return shared

    for module in (adapter, shadow):
        monkeypatch.setattr(module, "settings", lambda: settings.Settings(shadow="1"))
    experts = SimpleNamespace(is_fp4=True, **{adapter.KEPT: object()})
    for add, bad in ((lambda shared, routed, *, scaling: shared.add_(routed, alpha=scaling), 0), (wrong, 1)):
        shadow.reset()
        monkeypatch.setattr(adapter.op, "add_shared", add)
        shared, routed = torch.ones(2, 16).bfloat16(), torch.ones(2, 16).bfloat16()
        found = adapter.replace_shared_add(original_shared_add)(experts, routed, shared, 1.0)
        (record,) = shadow.report()
        assert torch.equal(found, torch.full((2, 16), 2.0).bfloat16()) and record["bad_calls"] == bad
    shadow.reset()
