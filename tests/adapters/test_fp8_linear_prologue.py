"""What the adapter puts off to a product, on modules as SGLang makes them; the reference is in the operator's place."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120 import settings
from deepseek_v4_sm120.reference import fp8_linear as reference
from deepseek_v4_sm120.sglang_patches import device_gate, shadow
from deepseek_v4_sm120.sglang_patches.adapters import fp8_linear as adapter
from deepseek_v4_sm120.specs.fp8_linear import make_gates_and_ups, make_norm_weight, make_weight, make_x
from tests.adapters.fp8_product import checked_product, made_before

INPUTS, LIMIT, EPS = 256, 10.0, 1e-6


def original_apply(self, layer, x, bias=None):
    layer.log.append("apply")
    out = reference.fp8_linear(x, layer.weight, layer.weight_scale_inv).to(torch.bfloat16)
    return out if bias is None else out + bias


def silu_and_mul_clamp(input, output, swiglu_limit):
    log.append("silu")
    output.copy_(reference.gated(input, swiglu_limit))


log: list[str] = []


class Method:
    block_quant, use_marlin, use_mxfp8 = True, False, False


class Linear(torch.nn.Module):
    """A linear layer as far as the adapter looks at it, by default with a method whose apply is ours."""

    input_is_parallel = True

    def __init__(self, outputs, inputs=INPUTS, *, method=None, seed=1):
        super().__init__()
        weight, scale = make_weight(1, outputs, inputs, torch.Generator().manual_seed(seed))
        self.weight, self.weight_scale_inv, self.bias, self.log = weight[0], scale[0], None, log
        self.quant_method = method() if method else type("Fp8LinearMethod", (Method,), {"apply": apply()})()

    def forward(self, x):
        return self.quant_method.apply(self, x, self.bias), None


def apply():
    return adapter.replace_apply(original_apply)


class MLP(torch.nn.Module):
    def __init__(self, down, limit=LIMIT):
        super().__init__()
        self.down_proj, self.swiglu_limit = down, limit
        self.silu = adapter.replace_silu_and_mul_clamp(silu_and_mul_clamp)

    def between(self, x):
        return x

    def plain_forward(self, gate_up):
        x = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self.silu(gate_up, x, self.swiglu_limit)
        return self.down_proj(self.between(x))[0]

    forward = adapter.replace_mlp_forward(plain_forward)


class Norm(torch.nn.Module):
    def __init__(self, inputs=INPUTS, dtype=torch.bfloat16):
        super().__init__()
        weight = make_norm_weight(inputs, torch.Generator().manual_seed(2)).to(dtype)
        self.weight, self.variance_epsilon = torch.nn.Parameter(weight, requires_grad=False), EPS

    def forward(self, x):
        log.append("norm")
        return reference.normalized(x, self.weight, self.variance_epsilon)


class Attention(torch.nn.Module):
    def plain_init(self, indexer=True, norm=None, **more):
        super().__init__()
        self.q_norm, self.wq_b = norm or Norm(), Linear(512)
        self.indexer = SimpleNamespace(wq_b=Linear(128, seed=3)) if indexer else None
        self.__dict__.update(more)

    __init__ = adapter.replace_attention_init(plain_init)

    def forward(self, x):
        latent = self.q_norm(x)
        queries = [self.wq_b(latent)[0]]
        if self.indexer is not None:
            count = min(x.shape[0], latent.shape[0])
            queries.append(self.indexer.wq_b(latent[:count])[0])
        return queries


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """The gate is open for the CPU; the reference computes what passes the operator's own checks."""
    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(adapter.process, "has_our_model", True)
    monkeypatch.setattr(adapter.op, "fp8_linear", checked_product(log))
    monkeypatch.setattr(adapter.op, "takes_prologue", lambda name, outputs, inputs: inputs <= 2048)
    monkeypatch.setattr(adapter.op, "normalized", made_before(log))
    log.clear()


def gates(rows=4, inputs=INPUTS):
    return make_gates_and_ups(rows, inputs, torch.Generator().manual_seed(rows))


def latent(rows=4, inputs=INPUTS):
    """A part of longer rows, as the model has it."""
    return make_x(rows, 1, inputs + 512, torch.Generator().manual_seed(rows))[:, 0, :inputs]


# ---- SwiGLU


@pytest.mark.parametrize("rows", (1, 4))
def test_the_gates_go_to_the_product(rows):
    mlp, x = MLP(Linear(384)), gates(rows)
    out = mlp(x)
    assert log == ["gated"]
    assert torch.equal(out, mlp.plain_forward(x)) and log == ["gated", "silu", "plain"]


def change(**changes):
    def to(mlp):
        for name, value in changes.items():
            setattr(mlp if hasattr(mlp, name) else mlp.down_proj, name, value)

    return to


UNGATED = {
    "257 rows": (None, gates(257), ["silu", "apply"]),
    "5 rows": (None, gates(5), ["silu", "plain"]),
    "256 rows": (None, gates(256), ["silu", "plain"]),
    "a bias": (change(bias=torch.ones(384, dtype=torch.bfloat16)), gates(), ["silu", "apply"]),
    "split inputs": (change(input_is_parallel=False), gates(), ["silu", "plain"]),
    "another method": (
        change(quant_method=type("M", (Method,), {"apply": original_apply})()),
        gates(),
        ["silu", "apply"],
    ),
    "Marlin": (lambda mlp: setattr(mlp.down_proj.quant_method, "use_marlin", True), gates(), ["silu", "apply"]),
}


@pytest.mark.parametrize("name", UNGATED)
def test_what_is_not_ours_is_gated_before(name):
    alter, x, expected = UNGATED[name]
    mlp = MLP(Linear(384))
    wanted = mlp.plain_forward(x)
    if alter:
        alter(mlp)
    log.clear()
    out = mlp(x)
    assert log == expected
    assert name == "a bias" or torch.equal(out, wanted)


def test_too_many_inputs_are_gated_before():
    mlp = MLP(Linear(128, 4096))
    mlp(gates(2, 4096))
    assert log == ["silu", "plain"]


def test_without_a_limit_nothing_is_put_off():
    mlp = MLP(Linear(384), limit=None)

    def forward(self, x):
        assert adapter._mlp.layer is None
        return self.down_proj(x)[0]

    adapter.replace_mlp_forward(forward)(mlp, latent())
    assert log == ["plain"]


def test_outside_of_the_forward_nothing_is_put_off():
    mlp = MLP(Linear(384))
    mlp.plain_forward(gates())
    assert log == ["silu", "plain"]


def test_gates_that_nobody_takes():
    class Forgets(MLP):
        @adapter.replace_mlp_forward
        def forward(self, gate_up):
            self.silu(gate_up, gate_up.new_empty(gate_up.shape[0], INPUTS), LIMIT)

    with pytest.raises(RuntimeError, match="put off to a product that SGLang did not take.*fp8_linear=off"):
        Forgets(Linear(384))(gates())
    assert adapter._mlp.layer is None and not adapter._mlp.waiting(adapter.Gates)
    assert MLP(Linear(384))(gates()).shape == (4, 384)  # and the next one is well


def test_another_product_before_the_gates():
    class Copies(MLP):
        def between(self, x):
            return x.clone()

    class MultipliesAnother(MLP):
        def between(self, x):
            return self.other(x)[0]

    one, other = Copies(Linear(384)), MultipliesAnother(Linear(384))
    other.other = Linear(INPUTS)
    for mlp in (one, other):
        with pytest.raises(RuntimeError, match="something else before the gates"):
            mlp(gates())
        assert not adapter._mlp.waiting(adapter.Gates)


# ---- RMSNorm


@pytest.mark.parametrize("indexer", (True, False))
@pytest.mark.parametrize("rows", (1, 4, 5, 256))
def test_the_latent_is_normalised_by_its_products_or_once_before(rows, indexer):
    attention, x = Attention(indexer), latent(rows)
    found = attention(x)
    products = 1 + indexer
    assert log == (["normalised"] * products if rows <= 4 else ["made before", *["plain"] * products])
    made = reference.normalized(x, attention.q_norm.weight, EPS)
    for out, layer in zip(found, [attention.wq_b, *([attention.indexer.wq_b] if indexer else [])], strict=True):
        assert torch.equal(out, reference.fp8_linear(made, layer.weight, layer.weight_scale_inv).to(torch.bfloat16))


def test_strides_that_the_operator_does_not_take():
    attention, x = Attention(), latent()
    expected = attention(x)
    odd = torch.zeros(4, INPUTS + 3, dtype=torch.bfloat16)[:, 3:]
    odd.copy_(x)
    assert all(torch.equal(a, b) for a, b in zip(attention(odd), expected, strict=True))


@pytest.mark.parametrize("count", (4, 20))
def test_fewer_rows_for_the_indexer(count):
    attention, x = Attention(), latent(count)
    rows = attention.q_norm(x)
    assert rows.shape == (count, INPUTS) and rows[:3].shape == (3, INPUTS)
    assert torch.equal(attention.indexer.wq_b(rows[:3])[0], attention(x)[1][:3])


def foreign(layer):
    layer.quant_method = type("M", (Method,), {"apply": original_apply})()


NORMALIZED_BEFORE = {
    "257 rows": (lambda a: None, {}, 257),
    "no rows": (lambda a: None, {}, 0),
    "another wq_b": (lambda a: foreign(a.wq_b), {}, 5),
    "another indexer": (lambda a: foreign(a.indexer.wq_b), {}, 5),
    "a bias": (lambda a: setattr(a.indexer.wq_b, "bias", torch.zeros(128, dtype=torch.bfloat16)), {}, 5),
    "float32 weights": (lambda a: None, {"norm": Norm(dtype=torch.float32)}, 5),
    "DeepSeek-V4.1": (lambda a: None, {"is_dsv41": True}, 5),
}


@pytest.mark.parametrize("name", NORMALIZED_BEFORE)
def test_what_is_not_ours_is_normalised_before(name):
    alter, more, rows = NORMALIZED_BEFORE[name]
    attention = Attention(**more)
    alter(attention)
    out = attention.q_norm(latent(rows))
    assert isinstance(out, torch.Tensor) and log == ["norm"]


@pytest.mark.parametrize("option", ("variance_size_override", "cast_x_before_out_mul"))
def test_norms_of_another_kind_stay(option):
    norm = Norm()
    setattr(norm, option, 128)
    assert isinstance(Attention(norm=norm).q_norm(latent()), torch.Tensor)


def test_nobody_else_can_read_it():
    rows = Attention().q_norm(latent())
    with pytest.raises(AttributeError, match="reads dtype of rows that are not normalised yet.*fp8_linear=off"):
        rows.dtype  # noqa: B018
    with pytest.raises(TypeError, match="takes 0 of rows"):
        rows[0]
    with pytest.raises(TypeError):
        torch.add(rows, 1)
    with pytest.raises(TypeError):
        rows + 1


def test_a_product_that_is_no_longer_ours_gets_them_normalised(monkeypatch):
    attention, x = Attention(), latent()
    expected, rows = attention(x), attention.q_norm(x)
    attention.wq_b.quant_method.use_marlin = True
    log.clear()
    assert torch.equal(attention.wq_b(rows)[0], expected[0]) and log == ["norm", "apply"]


# ---- shadow mode


@pytest.mark.parametrize("keep", ("1", "ours"))
def test_shadow_runs_both_from_the_same_inputs(monkeypatch, keep):
    monkeypatch.setattr(shadow, "settings", lambda: settings.Settings(shadow=keep))
    shadow.reset()
    mlp, attention = MLP(Linear(384)), Attention()
    gated, queries = mlp(gates()), attention(latent())
    assert log == ["gated", "silu", "apply", *["normalised", "norm", "apply"] * 2]
    records = shadow.report()
    assert [record["shape"] for record in records] == [
        {"rows": 4, "outputs": outputs, "inputs": INPUTS} for outputs in (384, 512, 128)
    ]
    assert all((r["calls"], r["bad_calls"], r["relative_l2_max"]) == (1, 0, 0.0) for r in records)
    monkeypatch.setattr(adapter.op, "fp8_linear", lambda x, *a, **k: 1.1 * gated if "swiglu_limit" in k else queries[0])
    out = mlp(gates())
    assert shadow.report()[0]["bad_calls"] == 1
    assert torch.equal(out, gated) == (keep == "1")
    shadow.reset()
