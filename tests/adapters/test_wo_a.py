"""The adapter on an attention as SGLang makes it; the reference is in the operator's place. SGLang's own forward and
loading are run in tests/patching/test_wheel_wo_a.py."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120 import settings
from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.reference import wo_a as reference
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.sglang_patches import device_gate, shadow
from deepseek_v4_sm120.sglang_patches.adapters import handed_over
from deepseek_v4_sm120.sglang_patches.adapters import wo_a as adapter
from deepseek_v4_sm120.specs.fp8_linear import make_weight
from deepseek_v4_sm120.specs.wo_a import make_freqs_cis
from tests.adapters.wo_a_layer import GROUPS, HEADS, INPUTS, OUTPUTS, Expansion, Fp8Config, Linear, Operator, rope

MODULE = "wo_a_test_model"


def use(monkeypatch, **chosen):
    made = settings.Settings(**chosen)
    for module in (adapter, shadow):
        monkeypatch.setattr(module, "settings", lambda: made)
    adapter._serve.cache_clear()


@pytest.fixture
def model(monkeypatch):
    """The model's module with our replacements in it, on a GPU that we serve; `operator` and `expansion` count."""
    module = ModuleType(MODULE)
    module.operator, module._dequant_fp8 = Operator(), Expansion()

    def __init__(self, config, layer_id, quant_config=None, prefix="", alt_streams=None, compress_ratio_override=None):
        torch.nn.Module.__init__(self)
        self.wo_a = Linear()
        self.head_dim, self.qk_rope_head_dim, self.o_lora_rank, self.n_local_groups = 512, 64, OUTPUTS, GROUPS
        for name, value in config.items():
            setattr(self, name, value)

    def forward(self, x, positions, forward_batch, x_quant=None):
        """SGLang's, from the attention's output on; forward_batch is what to do differently."""
        o = x.clone()
        if "no rotation" not in forward_batch:
            module.fused_rope_inplace(o[..., -64:], None, self.freqs_cis, positions=positions, inverse=True)
        if "other tensor" in forward_batch:
            o = o.clone()
        if "no product" in forward_batch:
            return o
        o = o.view(o.shape[0], self.n_local_groups, -1)
        weight = self.wo_a.weight.view(self.n_local_groups, self.o_lora_rank, -1)
        if "bmm" in forward_batch:
            return torch.bmm(o.transpose(0, 1), weight)
        return torch.einsum("tgd,gdr->tgr" if "transposed" in forward_batch else "tgd,grd->tgr", o, weight)

    __init__.__module__ = MODULE
    module.fused_rope_inplace = adapter.replace_rope(rope)
    module.MQALayer = type(
        "MQALayer",
        (torch.nn.Module,),
        {"__init__": adapter.replace_init(__init__), "forward": adapter.replace_forward(forward)},
    )
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(adapter.op, "wo_a", module.operator)
    monkeypatch.setattr(adapter, "kept", adapter.KeptWeights("wo_a", "in FP8"))
    use(monkeypatch)
    yield module
    adapter._serve.cache_clear()
    shadow.reset()
    for name in ("wo_a", "wo_a_handed_over"):
        report._notes.pop(name, None)


def stored(seed=4):
    weight, scale = make_weight(1, GROUPS * OUTPUTS, INPUTS, torch.Generator().manual_seed(seed), ue8m0=True)
    return weight[0], scale[0].view(torch.float8_e8m0fnu)


def attention(model, quant_config=None, **changes):
    made = model.MQALayer(changes, 3, quant_config or Fp8Config(), prefix="model.layers.3.self_attn")
    made.freqs_cis = make_freqs_cis(100, "cpu")
    return made


def loaded(model, **changes):
    made = attention(model, **changes)
    weight, scale = stored()
    for name, tensor in (("weight", weight), ("weight_scale_inv", scale)):
        param = getattr(made.wo_a, name)
        param.weight_loader(param, tensor)
    made.wo_a.quant_method.process_weights_after_loading(made.wo_a)
    return made


def inputs(rows):
    generator = torch.Generator().manual_seed(rows)
    o = torch.randn((rows, HEADS, 512), generator=generator).to(torch.bfloat16)
    return o, torch.randint(0, 100, (rows,), generator=generator)


def truth(o, positions, freqs_cis):
    weight, scale = stored()
    scale = scale.view(torch.uint8).view(GROUPS, OUTPUTS // 128, -1)
    x = o.view(o.shape[0], GROUPS, INPUTS)
    return reference.wo_a(x, weight.view(GROUPS, OUTPUTS, INPUTS), scale, freqs_cis, positions)


def test_the_layer_is_fp8_from_the_start(model):
    layer = loaded(model).wo_a
    weight, scale = stored()
    assert isinstance(layer.weight, torch.nn.Parameter) and not layer.weight.requires_grad
    assert torch.equal(layer.weight.data.view(torch.uint8), weight.view(torch.uint8))
    assert torch.equal(layer.weight_scale_inv.data, torch.exp2(scale.view(torch.uint8).float() - 127))
    assert set(dict(layer.named_parameters())) == {"weight", "weight_scale_inv"}
    assert (layer.weight.output_dim, layer.weight_scale_inv.output_dim) == (0, 0)
    assert layer.processed == [layer] and layer.quant_method.kind == "bf16" and model._dequant_fp8.shapes == []
    assert layer.weight.view(torch.uint8).dtype == torch.uint8 and layer.weight.view(-1).dim() == 1
    text = adapter.kept.describe()
    assert "1 layers" in text and "shadow" not in text and report._notes["wo_a"][0]() == text


@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({}, True),
        ({"q": torch.zeros(3, 64)}, False),
        ({"q": torch.zeros(0, 64, dtype=torch.bfloat16)}, False),
        ({"freqs_cis": torch.zeros(9, 32)}, False),
        ({"freqs_cis": torch.zeros(9, 64, dtype=torch.complex64)[:, ::2]}, False),
        ({"positions": torch.zeros(6, dtype=torch.int64)[::2]}, False),
        ({"positions": torch.zeros(3, 1, dtype=torch.int64)}, False),
    ],
)
def test_a_rotation_waits_where_the_operator_reads_its_arguments(changes, waits):
    given = {"q": torch.zeros(3, 64, dtype=torch.bfloat16), "freqs_cis": torch.zeros(9, 32, dtype=torch.complex64)}
    assert adapter._may_wait(**(given | {"positions": torch.zeros(3, dtype=torch.int64)} | changes)) is waits


@pytest.mark.parametrize(("inverse", "has_k"), [(False, False), (True, True)])
def test_within_the_forward_other_rotations_are_done_at_once(model, inverse, has_k):
    made, (o, positions) = loaded(model), inputs(3)
    calls = []
    rotate = adapter.replace_rope(lambda *call: calls.append(call))
    given = (o[..., -64:], o if has_k else None, made.freqs_cis, positions, inverse)
    with adapter.FORWARD.enter(made):
        rotate(*given)
        assert len(calls) == 1 and all(one is other for one, other in zip(calls[0], given, strict=True))


@pytest.mark.parametrize("rows", [1, 64, 256, 257])
def test_product_and_rotation(model, rows):
    made, (o, positions) = loaded(model), inputs(rows)
    out = made.forward(o, positions, ())
    assert relative_error(out, truth(o, positions, made.freqs_cis)) < 0.0025
    assert model.operator.calls == [(rows, rows <= 256)]
    model.operator.calls.clear()
    again = made.forward(o, positions, ("no rotation",))
    assert relative_error(again, truth(o, None, None)) < 0.0025 and model.operator.calls == [(rows, False)]


def test_outside_of_our_forward_the_rotation_is_sglangs(model):
    made, (o, positions) = loaded(model), inputs(3)
    for inverse in (True, False):
        expected, found = o[..., -64:].clone(), o[..., -64:].clone()
        rope(expected, None, made.freqs_cis, positions, inverse)
        model.fused_rope_inplace(found, None, made.freqs_cis, positions=positions, inverse=inverse)
        assert torch.equal(found, expected)


REFUSED = {
    "another GPU": (None, {}),
    "no configuration": (False, {}),
    "another configuration": (Fp8Config("modelopt_fp4"), {}),
    "other blocks": (Fp8Config(weight_block_size=[1, 32]), {}),
    "bf16 checkpoint": (Fp8Config(is_checkpoint_fp8_serialized=False), {}),
    "left out": (Fp8Config(left_out=("model.layers.3.self_attn.wo_a",)), {}),
    "DeepSeek-V4.1": (None, {"is_dsv41": True}),
    "another head": (None, {"head_dim": 256}),
    "another rank": (None, {"o_lora_rank": 96}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_layers_are_left_as_they_are(model, monkeypatch, name):
    config, changes = REFUSED[name]
    monkeypatch.setattr(device_gate, "serves", lambda device: name != "another GPU")
    made = model.MQALayer(changes, 3) if config is False else attention(model, config, **changes)
    assert type(made.wo_a.weight) is torch.nn.Parameter and made.wo_a.weight.dtype == torch.bfloat16
    assert not hasattr(made.wo_a, "weight_scale_inv") and adapter.kept.layers == 0


def test_a_layer_that_sglang_made_fp8_is_sglangs(model):
    made = Linear()
    made.weight = torch.nn.Parameter(made.weight.data.to(torch.float8_e4m3fn), requires_grad=False)
    holder = SimpleNamespace(wo_a=made, head_dim=512, qk_rope_head_dim=64, o_lora_rank=OUTPUTS)
    assert not adapter.keeps(holder, Fp8Config(), "wo_a")
    del made.weight  # GGUF has none
    assert not adapter.keeps(holder, Fp8Config(), "wo_a")


def test_a_stock_layer_runs_the_very_original(model, monkeypatch):
    monkeypatch.setattr(device_gate, "serves", lambda device: False)
    made, (o, positions) = attention(model), inputs(5)
    made.wo_a.weight.data.copy_(model._dequant_fp8(*stored()))
    out = made.forward(o, positions, ())
    assert model.operator.calls == [] and relative_error(out, truth(o, positions, made.freqs_cis)) < 0.0025


def expanded():
    """What SGLang's expansion makes of `stored`, as sgl-project's FP8 conversions have it."""
    return Expansion()(*stored())


def load(layer, weight):
    """As load_weights does with what AsStored gives for a weight without scales."""
    parameters = dict(layer.named_parameters())
    for name, tensor in adapter.AsStored([("a.wo_a.weight", weight)]):
        parameter = parameters[name.rpartition(".")[2]]
        parameter.weight_loader(parameter, tensor)


@pytest.mark.parametrize("shadowed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bf16_that_was_expanded_is_e4m3_again(model, monkeypatch, dtype, shadowed):
    use(monkeypatch, shadow="1" if shadowed else None)
    made, (o, positions) = attention(model), inputs(5)
    layer = made.wo_a
    for _ in range(2):  # weights may be loaded again, into the memory that graphs read
        held = layer.weight.data_ptr(), layer.weight_scale_inv.data_ptr()
        load(layer, expanded().to(dtype))
        layer.quant_method.process_weights_after_loading(layer)
        weight, scale = layer.weight, layer.weight_scale_inv
        assert isinstance(weight, adapter.StoredWeight) and held == (weight.data_ptr(), scale.data_ptr())
        assert torch.equal(Expansion()(weight.data, scale.data), expanded())
        assert relative_error(made.forward(o, positions, ()), truth(o, positions, made.freqs_cis)) < 0.0025
    assert adapter.kept.layers == 1 and "wo_a_handed_over" not in report._notes
    if not shadowed:
        assert model.operator.calls == [(5, True)] * 2


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("shadow_too", [None, "1"])
def test_bf16_that_never_was_e4m3_is_sglangs(model, monkeypatch, reproducible, shadow_too):
    choices = {"reproducible": "on"} if reproducible else {}
    use(monkeypatch, choices=choices, shadow=shadow_too)
    monkeypatch.setattr(handed_over, "settings", adapter.settings)
    made, (o, positions) = attention(model), inputs(5)
    method = Linear().quant_method
    layer, weight = made.wo_a, torch.randn(GROUPS * OUTPUTS, INPUTS).to(torch.bfloat16)
    load(layer, weight)
    assert type(layer.weight) is torch.nn.Parameter and torch.equal(layer.weight, weight)
    assert set(dict(layer.named_parameters())) == {"weight"} and type(layer.quant_method) is type(method)
    assert not hasattr(layer, handed_over.NOT_EXPORTED) and adapter.kept.layers == adapter.kept.weight_bytes == 0
    told = report._notes["wo_a_handed_over"][0]()
    assert "wo_a: SGLang's own, as the checkpoint has bf16 weights" in told
    assert ("NOT REPRODUCIBLE" in told) is reproducible
    expected = o.clone()
    rope(expected[..., -64:], None, made.freqs_cis, positions, True)
    product = torch.einsum("tgd,grd->tgr", expected.view(5, GROUPS, -1), weight.view(GROUPS, OUTPUTS, -1))
    assert torch.equal(made.forward(o, positions, ()), product) and model.operator.calls == []
    stock = torch.nn.Sequential(made)
    seen = adapter.replace_load_weights(lambda self, weights: weights)(stock, [("a.wo_a.scale", 1)])
    assert seen == [("a.wo_a.scale", 1)]  # loaded again by SGLang alone, as E4M3 too


def test_bf16_that_never_was_e4m3_does_not_come_into_a_server_with_e4m3(model):
    made, (o, positions) = loaded(model), inputs(3)
    before = made.forward(o, positions, ())
    weight = made.wo_a.weight
    with pytest.raises(ValueError, match=r"the server that they are loaded into has E4M3: .*DSV4_SM120_SET=wo_a=off"):
        weight.weight_loader(weight, torch.randn(GROUPS * OUTPUTS, INPUTS).to(torch.bfloat16))
    assert torch.equal(made.forward(o, positions, ()), before)


def test_a_weight_of_another_type_is_told(model):
    weight = attention(model).wo_a.weight
    with pytest.raises(ValueError, match=r"must be torch.float8_e4m3fn.*got torch.int8: .*DSV4_SM120_SET=wo_a=off"):
        weight.weight_loader(weight, torch.zeros(GROUPS * OUTPUTS, INPUTS, dtype=torch.int8))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_scales_of_another_type_are_told_and_not_written(model, dtype):
    """SGLang's expansion takes float32 and E8M0; an exponent's byte would be stored as its number, 127 for 1."""
    scale = attention(model).wo_a.weight.scale
    scale.data.fill_(3.0)
    with pytest.raises(ValueError, match=r"scales must be torch.float32 or torch.float8_e8m0fnu, got torch."):
        scale.weight_loader(scale, torch.full(scale.shape, 127).to(dtype))
    assert (scale == 3.0).all()


UNKNOWN = {
    "bmm": (TypeError, "SGLang calls bmm with the FP8 weights"),
    "transposed": (TypeError, "SGLang calls einsum with the FP8 weights"),
    "other tensor": (RuntimeError, "multiplies another tensor than the one it rotates"),
    "no product": (RuntimeError, "put off to a product that SGLang did not take"),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_a_forward_that_does_something_else_raises(model, what):
    made, (o, positions) = loaded(model), inputs(4)
    error, words = UNKNOWN[what]
    with pytest.raises(error, match=words):
        made.forward(o, positions, (what,))
    made.forward(o, positions, ())  # nothing is left over
    assert model.operator.calls == [(4, True)]


def test_scales_get_their_parameters_name_and_the_rest_passes():
    weight, _ = stored()
    pairs = [("layers.0.attn.wo_a.scale", 1), ("layers.0.attn.wo_a.weight", weight), ("layers.0.attn.wo_b.scale", 3)]
    found = list(adapter.AsStored(iter(pairs)))
    assert found == [("layers.0.attn.wo_a.weight_scale_inv", 1), *pairs[1:]]


@pytest.mark.parametrize("scale_first", [False, True])
@pytest.mark.parametrize("kind", ["scale", "weight_scale_inv"])
def test_scales_of_bf16_weights_end_the_loading(kind, scale_first):
    """As SGLang's expansion does; they would be written over those that the weights were given."""
    pairs = [("layers.0.attn.wo_a.weight", expanded()), (f"layers.0.attn.wo_a.{kind}", stored()[1])]
    with pytest.raises(ValueError, match="scales for layers.0.attn.wo_a.weight, which is not E4M3: .*wo_a=off"):
        list(adapter.AsStored(reversed(pairs) if scale_first else pairs))


def test_only_models_with_our_layers_load_as_stored(model):
    def load_weights(self, weights, is_nextn=False):
        return expansion(weights), is_nextn

    expansion = adapter.replace_expansion(lambda weights: "expanded")
    load, ours = adapter.replace_load_weights(load_weights), torch.nn.Sequential(loaded(model))
    found, is_nextn = load(ours, [("a.wo_a.scale", 1)], is_nextn=True)
    assert list(found) == [("a.wo_a.weight_scale_inv", 1)] and is_nextn
    assert load(torch.nn.Sequential(Linear()), [("a.wo_a.scale", 1)]) == ("expanded", False)


@pytest.mark.parametrize("keep", ["1", "ours"])
@pytest.mark.parametrize(("rows", "told_rows"), [(6, 6), (260, "257-512")])
def test_shadow_compares_with_what_sglang_expands(model, monkeypatch, keep, rows, told_rows):
    use(monkeypatch, shadow=keep)
    shadow.reset()
    made, (o, positions) = loaded(model), inputs(rows)
    assert model._dequant_fp8.shapes == [(GROUPS * OUTPUTS, INPUTS)] and made.wo_a.processed == [made.wo_a]
    assert made.wo_a.quant_method.kind == "bf16" and "shadow" in adapter.kept.describe()
    before = o.clone()
    out = made.forward(o, positions, ())
    assert torch.equal(o, before) and relative_error(out, truth(o, positions, made.freqs_cis)) < 0.0025
    (record,) = shadow.report()
    assert (record["patch"], record["calls"], record["bad_calls"]) == ("wo_a", 1, 0)
    assert record["shape"] == {"rows": told_rows, "groups": GROUPS}
    weight = made.wo_a.weight
    weight.data.view(torch.uint8)[:, 5] ^= 0x80
    made.forward(o, positions, ())
    (record,) = shadow.report()
    assert (record["calls"], record["bad_calls"]) == (2, 1)
    held, told = weight.for_shadow.data_ptr(), adapter.kept.describe()
    made.wo_a.quant_method.process_weights_after_loading(made.wo_a)  # other weights were loaded
    made.forward(o, positions, ())
    assert shadow.report()[0]["bad_calls"] == 1
    assert (weight.for_shadow.data_ptr(), adapter.kept.describe()) == (held, told)
