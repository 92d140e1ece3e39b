"""The adapter on Fp8LinearMethod and layers as SGLang makes them; the reference is in the operator's place."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120 import settings
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.reference.fp8_linear import dequantized, quantized_activations
from deepseek_v4_sm120.reference.fp8_linear import fp8_linear as reference
from deepseek_v4_sm120.sglang_patches import device_gate, shadow
from deepseek_v4_sm120.sglang_patches.adapters import fp8_linear as adapter
from deepseek_v4_sm120.specs.fp8_linear import make_weight, make_x


def original(self, layer, x, bias=None):
    """What stock computes: E4M3 activations."""
    layer.log.append("original")
    if isinstance(x, tuple):
        return "quantised once"
    rows = x.reshape(-1, x.shape[-1])
    weight = layer.weight.float().double() if layer.plain else dequantized(layer.weight, layer.weight_scale_inv)
    out = (quantized_activations(rows) @ weight.T).to(torch.bfloat16)
    return (out if bias is None else out + bias).view(*x.shape[:-1], out.shape[-1])


def make(rows=5, *, ue8m0=False):
    generator = torch.Generator().manual_seed(rows)
    weight, scale = make_weight(1, 256, 384, generator, ue8m0=ue8m0)
    method = SimpleNamespace(block_quant=True, use_marlin=False, use_mxfp8=False)
    layer = SimpleNamespace(weight=weight[0], weight_scale_inv=scale[0], log=[], plain=False)
    return method, layer, make_x(rows, 1, 384, generator)[:, 0]


@pytest.fixture
def served(monkeypatch):
    """The gate is open for the CPU; the reference computes what passes the operator's own checks."""
    shapes = []

    def operator(x, weight, scale, *, whole=False):
        adapter.op.check_product("fp8_linear", x, "rows, inputs", weight, scale)
        shapes.append(tuple(x.shape))
        return reference(x, weight, scale).to(torch.bfloat16)

    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(adapter.process, "has_our_model", True)
    monkeypatch.setattr(adapter.op, "fp8_linear", operator)
    return shapes


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("rows", [1, 64, 256])
def test_few_rows_are_ours(served, rows, ue8m0):
    method, layer, x = make(rows, ue8m0=ue8m0)
    out = adapter.replace_apply(original)(method, layer, x)
    assert relative_error(out, reference(x, layer.weight, layer.weight_scale_inv)) < 0.002
    assert layer.log == [] and served == [(rows, 384)]


def test_other_shapes_and_strides_of_x(served):
    method, layer, x = make(6)
    apply = adapter.replace_apply(original)
    expected = apply(method, layer, x)
    assert torch.equal(apply(method, layer, x.view(2, 3, 384)), expected.view(2, 3, 256))
    wide = torch.zeros(6, 401, dtype=torch.bfloat16)
    wide[:, 3:387] = x
    assert torch.equal(apply(method, layer, wide[:, 3:387]), expected)
    assert torch.equal(apply(method, layer, x.T.contiguous().T), expected)
    assert layer.log == []


def test_the_last_addition_is_left_to_a_boundary_for_rows_alone(served, monkeypatch):
    method, layer, x = make(6)
    apply = adapter.replace_apply(original)
    monkeypatch.setattr(adapter.mhc_owed_terms, "of_product", lambda *given: given)
    linear, rows, scale = apply(method, layer, x)
    assert (linear is layer, rows is x, scale is layer.weight_scale_inv) == (True,) * 3 and served == []
    assert apply(method, layer, x.view(2, 3, 384)).shape == (2, 3, 256) and len(served) == 1


def test_x_is_copied_only_where_the_operator_cannot_read_it():
    x = torch.zeros(4, 768, dtype=torch.bfloat16)
    for mine, is_read in ((x, True), (x[:, 8:], True), (x[:, 1:385], False), (x[:, ::2], False), (x[1:], True)):
        rows = adapter.as_rows(mine)
        assert (rows.data_ptr() == mine.data_ptr()) == is_read and rows.data_ptr() % 16 == 0
        assert rows.stride(1) == 1 and rows.stride(0) % 8 == 0 and torch.equal(rows, mine)
    narrow = torch.zeros(4, 401, dtype=torch.bfloat16)[:, :384]
    assert adapter.as_rows(narrow).data_ptr() != narrow.data_ptr()


@pytest.mark.parametrize("is_dsv41", [False, True])
def test_an_attention_is_made_as_ever_and_only_ours_says_whose_the_process_is(is_dsv41, monkeypatch):
    monkeypatch.setattr(adapter, "process", adapter.Process())

    def made(self, *args, **kwargs):
        self.args, self.kwargs, self.is_dsv41 = args, kwargs, is_dsv41

    layer = SimpleNamespace()
    adapter.replace_attention_init(made)(layer, 1, name="a")
    assert (layer.args, layer.kwargs) == ((1,), {"name": "a"}) and adapter.process.has_our_model is not is_dsv41


class Norm:
    """SGLang's, as MQALayer makes q_norm."""

    def __init__(self, **attributes):
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.ones(1024, dtype=torch.bfloat16)), 1e-6
        vars(self).update(attributes)

    def forward(self, x, *further, residual=None):
        return "original"


def attention_with(norm, **attributes):
    made = adapter.replace_attention_init(lambda self: vars(self).update(q_norm=norm, **attributes))
    made(layer := SimpleNamespace())
    return layer.q_norm.forward


@pytest.fixture
def normed(served, monkeypatch):
    seen = []
    monkeypatch.setattr(adapter.op, "latent_norm", lambda x, weight, eps: seen.append((tuple(x.shape), eps)) or x * 2)
    return seen


def latent(rows, dtype=torch.bfloat16):
    return torch.ones(rows, 1536, dtype=dtype)[:, :1024]


def test_the_latents_norm_is_ours_for_a_steps_rows(normed):
    forward = attention_with(Norm())
    for rows in (1, 64, 256):
        assert torch.equal(forward(latent(rows)), 2 * latent(rows))
    assert normed == [((rows, 1024), 1e-6) for rows in (1, 64, 256)]


@pytest.mark.parametrize("x", [latent(257), latent(0), latent(3, torch.float32), latent(3)[:, :512], latent(4)[None]])
def test_other_latents_are_the_originals(normed, x):
    assert attention_with(Norm())(x) == "original" and not normed


@pytest.mark.parametrize(
    "norm, attributes",
    [
        (Norm(variance_size_override=512), {}),
        (Norm(cast_x_before_out_mul=True), {}),
        (Norm(), {"is_dsv41": True}),
        (Norm(weight=torch.ones(1024)), {}),
    ],
)
def test_other_norms_are_the_originals(normed, norm, attributes):
    assert attention_with(norm, **attributes)(latent(3)) == "original" and not normed


def test_a_norm_that_is_given_more_is_the_originals(normed, monkeypatch):
    forward = attention_with(Norm())
    assert forward(latent(3), latent(3)) == forward(latent(3), residual=latent(3)) == "original" and not normed
    for owner, name, answer in ((torch.compiler, "is_compiling", True), (device_gate, "serves", False)):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, lambda *_, answer=answer: answer)
            assert forward(latent(3)) == "original" and not normed


def change(**changes):
    return lambda method, layer: [setattr(method if hasattr(method, n) else layer, n, v) for n, v in changes.items()]


REFUSED = {
    "257 rows": (None, lambda x: x.repeat(52, 1)[:257]),
    "no rows": (None, lambda x: x[:0]),
    "another dtype": (None, lambda x: x.half()),
    "quantised once": (None, lambda x: (x.to(torch.float8_e4m3fn), torch.ones(5, 3))),
    "no blocks": (change(block_quant=False), None),
    "Marlin": (change(use_marlin=True), None),
    "MXFP8": (change(use_mxfp8=True), None),
    "expanded weights": (change(weight=torch.zeros(256, 384, dtype=torch.bfloat16), plain=True), None),
    "packed scales": (change(weight_scale_inv=torch.ones(256, 1, dtype=torch.int32), plain=True), None),
    "no scales": (change(weight_scale_inv=None, plain=True), None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_rest_is_the_originals(served, name):
    method, layer, x = make()
    alter, other_x = REFUSED[name]
    if alter:
        alter(method, layer)
    adapter.replace_apply(original)(method, layer, x if other_x is None else other_x(x))
    assert layer.log == ["original"] and served == []


def test_a_bias_another_model_and_another_gpu_are_the_originals(served, monkeypatch):
    method, layer, x = make()
    apply = adapter.replace_apply(original)
    apply(method, layer, x, torch.zeros(256, dtype=torch.bfloat16))
    for owner, name, no in ((adapter.process, "has_our_model", False), (device_gate, "serves", lambda device: False)):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, no)
            apply(method, layer, x, bias=None)
    assert layer.log == ["original"] * 3 and served == []


def test_versions_without_a_switch_have_none(served):
    """0.5.12's method has no use_mxfp8 where the checkpoint is block-scaled."""
    method, layer, x = make()
    del method.use_mxfp8, method.use_marlin
    adapter.replace_apply(original)(method, layer, x)
    assert served == [(5, 384)]


def test_the_shared_experts_products_are_whole(served, monkeypatch):
    """Of the layer of one card that runs, and no other layer's or product's; not of more rows than gain by it."""
    asked, (method, *_, rows) = [], make()
    x = rows[: adapter.WHOLE_ROWS]
    monkeypatch.setattr(adapter.op, "fp8_linear", lambda *given, whole: asked.append(whole) or x)
    gate_up, down, other = (make()[1] for _ in range(3))
    shared = SimpleNamespace(gate_up_proj=gate_up, down_proj=down)
    running = SimpleNamespace(mlp=SimpleNamespace(shared_experts=shared))
    apply = adapter.replace_apply(original)
    with adapter.layers.enter(running, has_sum=False):
        for linear in (gate_up, down, other):
            apply(method, linear, x)
        apply(method, gate_up, rows)
    with adapter.layers.enter(running, has_sum=True):
        apply(method, gate_up, x)
    with adapter.layers.enter(SimpleNamespace(mlp=SimpleNamespace(shared_experts=None)), has_sum=False):
        apply(method, gate_up, x)
    apply(method, gate_up, x)
    assert len(rows) == len(x) + 1 and asked == [True, True, False, False, False, False, False]


@pytest.mark.parametrize("keep", ["1", "ours"])
def test_shadow_compares_with_fp8_activations(served, monkeypatch, keep):
    monkeypatch.setattr(shadow, "settings", lambda: settings.Settings(shadow=keep))
    shadow.reset()
    method, layer, x = make()
    apply = adapter.replace_apply(original)
    out = apply(method, layer, x)
    ours = reference(x, layer.weight, layer.weight_scale_inv).to(torch.bfloat16)
    assert torch.equal(out, ours) == (keep == "ours")
    (record,) = shadow.report()
    assert record["patch"] == "fp8_linear" and (record["calls"], record["bad_calls"]) == (1, 0)
    assert record["shape"] == {"rows": 5, "outputs": 256, "inputs": 384} and record["relative_l2_max"] > 0.01
    monkeypatch.setattr(adapter.op, "fp8_linear", lambda x, w, s, whole: 1.1 * ours)
    apply(method, layer, x)
    assert shadow.report()[0]["bad_calls"] == 1
    shadow.reset()
