"""The adapters on functions and objects as SGLang makes them; the reference is in the operator's place."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120 import settings
from deepseek_v4_sm120.reference.bf16_linear import bf16_linear as reference
from deepseek_v4_sm120.sglang_patches import device_gate, shadow
from deepseek_v4_sm120.sglang_patches.adapters import bf16_linear as adapter


class UnquantizedLinearMethod:
    pass


class ReplicatedLinear:
    def __init__(self, weight, bias=None, method=None):
        self.weight, self.bias, self.quant_method = weight, bias, method or UnquantizedLinearMethod()

    def __call__(self, x):
        return (x.float() @ self.weight.float().T).bfloat16(), None


class ReplicatedLinearWithLoRA(ReplicatedLinear):
    pass


@pytest.fixture
def served(monkeypatch):
    """The gate open, the reference in the operator's place; what it was called with."""
    calls = []

    def op(x, weight, *, out_dtype=torch.float32):
        calls.append((tuple(x.shape), tuple(weight.shape), out_dtype))
        return reference(x, weight).to(out_dtype)

    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(adapter.op, "bf16_linear", op)
    return calls


def tensors(rows=2, inputs=512, outputs=8):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=generator).bfloat16()
    return x, torch.randn(outputs, inputs, generator=generator).bfloat16()


def original(x, y, *, hpc_kernel_min_m=None):
    return "original" if y.shape[0] in (6, 8) else "of a weight that is none"


def test_the_compressors_projection(served):
    x, weight = tensors()
    replaced = adapter.replace_linear_bf16_fp32(original)
    out = replaced(x, weight)
    assert out.dtype == torch.float32 and served == [((2, 512), (8, 512), torch.float32)]
    torch.testing.assert_close(out.double(), reference(x, weight), rtol=1e-5, atol=1e-4)
    assert replaced.__name__ == "original"


@pytest.mark.parametrize(
    "call",
    [
        lambda f: f(*tensors(rows=257)),
        lambda f: f(*tensors(inputs=128)),
        lambda f: f(*tensors(outputs=6)),
        lambda f: f(tensors()[0], tensors()[1].float()),
        lambda f: f(tensors()[0].float(), tensors()[1]),
        lambda f: f(tensors()[0][None], tensors()[1]),
        lambda f: f(*tensors(), hpc_kernel_min_m=4),
    ],
    ids=["257 rows", "128 inputs", "6 outputs", "float32 weight", "float32 x", "3 dims", "keyword"],
)
def test_what_the_operator_does_not_take_is_the_originals(served, call):
    assert call(adapter.replace_linear_bf16_fp32(original)) == "original" and served == []


def test_closed_gate(served, monkeypatch):
    monkeypatch.setattr(device_gate, "serves", lambda device: False)
    assert adapter.replace_linear_bf16_fp32(original)(*tensors()) == "original" and served == []


def stock_compute_weights(self, x, skip_scale=False):
    out, _ = self.weights_proj(x)
    return out if skip_scale else out * self.weight_scale


@pytest.mark.parametrize("skip_scale", [False, True])
def test_the_indexers_head_weights(served, skip_scale):
    x, weight = tensors(outputs=64)
    indexer = SimpleNamespace(weights_proj=ReplicatedLinear(weight), weight_scale=0.0625)
    found = adapter.replace_compute_weights(stock_compute_weights)(indexer, x, skip_scale=skip_scale)
    assert served == [((2, 512), (64, 512), torch.bfloat16)]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, stock_compute_weights(indexer, x, skip_scale), rtol=0.01, atol=1e-3)


@pytest.mark.parametrize(
    "layer",
    [
        lambda weight: ReplicatedLinearWithLoRA(weight),
        lambda weight: ReplicatedLinear(weight, bias=torch.zeros(64)),
        lambda weight: ReplicatedLinear(weight, method=object()),
        ReplicatedLinear,
    ],
    ids=["LoRA", "bias", "quantised", "257 rows"],
)
def test_a_layer_that_is_not_plain_is_the_originals(served, layer):
    x, weight = tensors(outputs=64)
    indexer = SimpleNamespace(weights_proj=layer(weight), weight_scale=0.0625)
    x = x.repeat(129, 1)[:257] if layer is ReplicatedLinear else x
    found = adapter.replace_compute_weights(stock_compute_weights)(indexer, x)
    assert served == [] and torch.equal(found, stock_compute_weights(indexer, x))


class MoEGate:
    def __init__(self, weight, is_deepseek_v4=True):
        self.weight, self.is_deepseek_v4 = weight, is_deepseek_v4


def gate_with(module):
    """MoEGate.forward as a module that holds these names defines it."""
    source = """
def forward(self, hidden_states, gemm_output_zero_allocator=None, forward_batch=None):
    return "original", gemm_output_zero_allocator, forward_batch
"""
    exec(source, module)  # its globals are the module's, as in SGLang
    return adapter.replace_gate(module["forward"])


def execution(deterministic):
    return SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=deterministic))


MODULES = {
    "0.5.14": lambda on: {"get_global_server_args": lambda: SimpleNamespace(enable_deterministic_inference=on)},
    "0.5.16": lambda on: {"get_server_args": lambda: SimpleNamespace(enable_deterministic_inference=on)},
    "0.5.17": lambda on: {"get_exec": lambda: execution(on)},
}


@pytest.mark.parametrize("version", MODULES)
def test_the_routers_logits(served, version):
    x, weight = tensors(outputs=256)
    out = gate_with(MODULES[version](False))(MoEGate(weight), x, forward_batch="batch")
    assert served == [((2, 512), (256, 512), torch.float32)]
    torch.testing.assert_close(out.double(), reference(x, weight), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("version", MODULES)
def test_deterministic_inference_keeps_the_originals_router(served, version):
    x, weight = tensors(outputs=256)
    found = gate_with(MODULES[version](True))(MoEGate(weight), x, "zeros", forward_batch="batch")
    assert found == ("original", "zeros", "batch") and served == []


@pytest.mark.parametrize("rows, is_v4", [(257, True), (2, False)], ids=["257 rows", "another model"])
def test_routers_that_are_not_ours(served, rows, is_v4):
    x, weight = tensors(rows=rows, outputs=256)
    found = gate_with({})(MoEGate(weight, is_v4), x)  # whether inference is deterministic is not asked
    assert found == ("original", None, None) and served == []


SHADOWED = {
    "compressor": lambda x, weight: (
        adapter.replace_linear_bf16_fp32(lambda x, y: x.float() @ y.float().T),
        (x, weight),
    ),
    "router": lambda x, weight: (
        adapter.replace_gate(module_gate({"get_exec": lambda: execution(False), "torch": torch})),
        (MoEGate(weight), x),
    ),
    "head weights": lambda x, weight: (
        adapter.replace_compute_weights(stock_compute_weights),
        (SimpleNamespace(weights_proj=ReplicatedLinear(weight), weight_scale=0.0625), x),
    ),
}


def module_gate(module):
    source = "def forward(self, x, zeros=None, batch=None):\n    return x.float() @ self.weight.float().T\n"
    exec(source, module)
    return module["forward"]


@pytest.mark.parametrize("name", SHADOWED)
def test_shadow_compares_each_projection_with_its_original(served, monkeypatch, name):
    monkeypatch.setattr(shadow, "settings", lambda: settings.Settings(shadow="1"))
    shadow.reset()
    function, call = SHADOWED[name](*tensors(outputs=256))
    function(*call)
    (record,) = shadow.report()
    assert record["patch"] == "bf16_linear" and (record["calls"], record["bad_calls"]) == (1, 0)
    assert record["shape"] == {"rows": 2, "outputs": 256}
    operator = adapter.op.bf16_linear
    monkeypatch.setattr(adapter.op, "bf16_linear", lambda *args, **kwargs: 1.1 * operator(*args, **kwargs))
    function(*call)
    assert shadow.report()[0]["bad_calls"] == 1
    shadow.reset()
