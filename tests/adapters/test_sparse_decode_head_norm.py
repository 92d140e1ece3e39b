"""The queries' norm put off to the attention, on a forward as SGLang's; the reference is in the operator's place.
SGLang's own forwards are run in tests/patching/test_wheel_head_norm.py."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120 import settings
from deepseek_v4_sm120.ops.shared.checks import Call
from deepseek_v4_sm120.reference import sparse_decode as reference
from deepseek_v4_sm120.sglang_patches import device_gate, shadow
from deepseek_v4_sm120.sglang_patches.adapters import sparse_decode as attention
from deepseek_v4_sm120.sglang_patches.adapters import sparse_decode_head_norm as adapter
from deepseek_v4_sm120.sglang_patches.adapters import waiting
from deepseek_v4_sm120.sglang_patches.adapters.attention_forward import FORWARD, replace_forward
from deepseek_v4_sm120.specs.sparse_decode import NORM_EPS, make_freqs_cis
from tests.adapters.test_sparse_decode import LAYOUT, Recorded, engine_call

MODULE = "head_norm_test_model"


def forward_mode(kind="decode"):
    return SimpleNamespace(is_decode=lambda: kind == "decode", is_target_verify=lambda: kind == "verify")


def norm_rope(q_input, q_output, eps, freqs_cis, positions):
    """fused_q_norm_rope; counts."""
    norm_rope.calls.append(tuple(q_input.shape))
    q_output.copy_(reference.normed_and_rotated(q_input[:, None], eps, freqs_cis, positions)[:, 0])


class Operator:
    """ops.sparse_decode: its own check of the norm, then the reference. Notes whether a call normed."""

    def __init__(self):
        self.calls = []

    def __call__(self, q, kv_pages, indices, *, out=None, return_lse=False, prefill=None, **named):
        norm = [named.get(name) for name in ("head_norm_eps", "freqs_cis", "positions")]
        attention.op._check_query_norm(Call("sparse_decode", "q", q), q.shape[0], *norm, prefill)
        self.calls.append(norm[0] is not None)
        result, lse = reference.sparse_decode(q, kv_pages, indices, **named)
        result = result.to(torch.bfloat16) if out is None else out.copy_(result)
        return (result, lse) if return_lse else result


def use(monkeypatch, **chosen):
    made = settings.Settings(**chosen)
    for module in (adapter, attention, shadow):
        monkeypatch.setattr(module, "settings", lambda: made)


class Model:
    """The model's module with our replacements in it; `operator`, `norm_rope` and `stock` say who ran."""

    def __init__(self, monkeypatch):
        self.module, self.operator, self.stock = ModuleType(MODULE), Operator(), []
        norm_rope.calls = []
        monkeypatch.setitem(sys.modules, MODULE, self.module)
        monkeypatch.setattr(device_gate, "serves", lambda device: True)
        monkeypatch.setattr(attention, "kv_page_layout", lambda: LAYOUT)
        monkeypatch.setattr(attention.op, "sparse_decode", self.operator)
        self.module.is_in_breakable_cuda_graph = lambda: False

    def stock_attention(self, **call):
        self.stock.append(call["q"].clone())
        return reference.sparse_decode(
            call["q"],
            call["k_cache"],
            call["indices"],
            topk_length=call["topk_length"],
            attn_sink=call["attn_sink"],
            extra_kv_pages=call["extra_k_cache"],
            extra_indices=call["extra_indices_in_kvcache"],
            extra_topk_length=call["extra_topk_length"],
        )[0].to(torch.bfloat16), None

    def layer(self, replace=attention.replace_sm120):
        """A layer of SGLang's MQALayer as far as q goes; `x` is wq_b's output, `batch.what` what to do differently."""
        module, run = self.module, replace(self.stock_attention)
        module.fused_q_norm_rope = adapter.replace_norm_rope(norm_rope)

        def forward(self, x, positions, forward_batch, x_quant=None):
            batch = forward_batch
            q_out = None if batch.padded is None else batch.padded[:, : x.shape[1]]
            q_out = torch.full_like(x, float("nan")) if q_out is None else q_out
            for _ in range(batch.what != "no norm"):
                module.fused_q_norm_rope(x, q_out, NORM_EPS, self.freqs_cis, positions)
            if batch.what == "no attention":
                return x
            q = q_out if batch.padded is None else batch.padded
            q = q.clone() if batch.what == "other tensor" else q
            call = batch.call | {"q": q.unsqueeze(1)} | batch.changes
            out = run(**call)[0]
            return out.squeeze(1)[:, : x.shape[1]]

        forward.__module__ = MODULE
        made = type("MQALayer", (torch.nn.Module,), {"forward": replace_forward(forward)})()
        made.freqs_cis = make_freqs_cis(100, "cpu")
        return made


def batch_of(rows=3, heads=16, *, kind="decode", what="", padded=None, **changes):
    recorded = Recorded("", rows, padded or heads, heads, torch.uint8, 64, 128)
    whole = torch.full((rows, padded, 512), float("nan"), dtype=torch.bfloat16) if padded else None
    call = engine_call(recorded)
    return SimpleNamespace(forward_mode=forward_mode(kind), call=call, what=what, padded=whole, changes=changes)


def queries(rows=3, heads=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, heads, 512, generator=generator) * 5).to(torch.bfloat16)
    return x, torch.randint(0, 100, (rows,), generator=generator)


@pytest.fixture
def model(monkeypatch):
    use(monkeypatch)
    return Model(monkeypatch)


def test_the_first_call_is_watched_and_the_next_ones_wait(model):
    layer, (x, positions) = model.layer(), queries()
    outs = [layer.forward(x, positions, batch_of()) for _ in range(3)]
    assert model.operator.calls == [False, True, True] and norm_rope.calls == [(3, 16, 512)] and not model.stock
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2]) and not bool(outs[0].isnan().any())
    layer.forward(*queries(2), batch_of(2))
    layer.forward(*queries(3), batch_of(3, kind="verify"))
    assert model.operator.calls[3:] == [False, False], "another number of rows and another mode are watched first"
    layer.forward(*queries(2), batch_of(2))
    layer.forward(*queries(3), batch_of(3, kind="verify"))
    assert model.operator.calls[5:] == [True, True]
    other = model.layer()
    other.forward(x, positions, batch_of())
    assert model.operator.calls[-1] is False, "and so is another layer"


def test_the_operator_gets_what_the_norm_would_have_got(model, monkeypatch):
    layer, (x, positions) = model.layer(), queries()
    layer.forward(x, positions, batch_of())
    seen = {}

    def operator(q, *args, **named):
        seen.update(named, q=q)
        return model.operator(q, *args, **named)

    monkeypatch.setattr(attention.op, "sparse_decode", operator)
    layer.forward(x, positions, batch_of())
    assert seen["q"].data_ptr() == x.data_ptr() and seen["q"].shape == (3, 1, 16, 512)
    assert seen["head_norm_eps"] == NORM_EPS and seen["freqs_cis"] is layer.freqs_cis and seen["positions"] is positions


def test_padded_heads(model):
    """Above TP1 of 0.5.14 and 0.5.17 the norm writes to the front of 64 heads, and the backend tells how many count."""
    layer, (x, positions) = model.layer(), queries(2, 8)
    for _ in range(2):
        layer.forward(x, positions, batch_of(2, 8, padded=64))
    assert model.operator.calls == [False, False], "64 heads are read, 8 are normed: nothing waits"

    class Backend:
        def forward(self, q, k, v, layer, forward_batch):
            return model_layer.forward(x, positions, batch_of(2, 8, padded=64))

    model_layer, inside = model.layer(), attention.replace_backend_forward(Backend.forward)
    outs = [inside(None, None, None, None, SimpleNamespace(tp_q_head_num=8), None) for _ in range(2)]
    assert model.operator.calls[2:] == [False, True] and torch.equal(*outs) and outs[0].shape == (2, 8, 512)


@pytest.mark.parametrize("kind", ["extend", "idle"])
def test_other_modes_never_wait(model, kind):
    layer, (x, positions) = model.layer(), queries()
    for _ in range(3):
        layer.forward(x, positions, batch_of(kind=kind))
    assert model.operator.calls == [False] * 3 and len(norm_rope.calls) == 3


def test_verify_in_a_breakable_graph_never_waits(model):
    layer, (x, positions) = model.layer(), queries()
    layer.forward(x, positions, batch_of(kind="verify"))
    model.module.is_in_breakable_cuda_graph = lambda: True
    layer.forward(x, positions, batch_of(kind="verify"))
    assert model.operator.calls == [False, False]
    layer.forward(x, positions, batch_of(kind="decode"))
    layer.forward(x, positions, batch_of(kind="decode"))
    assert model.operator.calls == [False, False, False, True], "decode's attention is part of such a graph"


def test_a_model_without_breakable_graphs(model):
    del model.module.is_in_breakable_cuda_graph  # 0.5.12
    layer, (x, positions) = model.layer(), queries()
    for _ in range(2):
        layer.forward(x, positions, batch_of(kind="verify"))
    assert model.operator.calls == [False, True]


def test_rows_up_to_the_operators_limit(model, monkeypatch):
    monkeypatch.setattr(attention.op, "MAX_NORM_ROWS", 3)
    layer = model.layer()
    for rows in (3, 4, 3, 4):
        layer.forward(*queries(rows), batch_of(rows))
    assert model.operator.calls == [False, False, True, False]
    empty = torch.zeros(0, 16, 512, dtype=torch.bfloat16)
    batch = batch_of(1, what="no attention")
    assert layer.forward(empty, torch.zeros(0, dtype=torch.int64), batch) is empty


def test_another_gpu_is_untouched(model, monkeypatch):
    monkeypatch.setattr(device_gate, "serves", lambda device: False)
    layer, (x, positions) = model.layer(), queries()
    for _ in range(2):
        layer.forward(x, positions, batch_of())
    assert model.operator.calls == [] and len(model.stock) == len(norm_rope.calls) == 2


def test_an_attention_that_is_not_ours_gets_normed_queries(model):
    """What was ours the last time and is not this time: the original attention finds its queries ready."""
    layer, (x, positions) = model.layer(), queries()
    expected = layer.forward(x, positions, batch_of())
    found = layer.forward(x, positions, batch_of(indices=batch_of().call["indices"].long()))
    assert len(model.stock) == 1 and len(norm_rope.calls) == 2 and model.operator.calls == [False]
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)
    layer.forward(x, positions, batch_of())
    assert model.operator.calls == [False, True]


def test_an_attention_that_was_never_ours_is_never_waited_for(model):
    layer, (x, positions) = model.layer(lambda stock: stock), queries()
    for _ in range(3):
        layer.forward(x, positions, batch_of())
    assert len(model.stock) == len(norm_rope.calls) == 3 and not bool(model.stock[-1].isnan().any())


UNKNOWN = {
    "no attention": "the queries wait for an attention that SGLang did not call",
    "other tensor": "SGLang's attention reads other queries than those that wait",
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_a_forward_that_does_something_else_raises(model, what):
    layer, (x, positions) = model.layer(), queries()
    layer.forward(x, positions, batch_of(what=what))  # watched: nothing waits yet
    layer.forward(x, positions, batch_of())
    with pytest.raises(RuntimeError, match=f"{UNKNOWN[what]}: .*DSV4_SM120_SET=sparse_decode=off"):
        layer.forward(x, positions, batch_of(what=what))
    layer.forward(x, positions, batch_of())  # nothing is left over
    assert FORWARD.layer is None and FORWARD.waiting(waiting.Waiting) == []


def refused(x, positions, freqs_cis):
    """Arguments of fused_q_norm_rope that the operator does not take, by what is different."""
    wide = torch.zeros(3, 16, 1024, dtype=torch.bfloat16)
    return {
        "no norm": (x, torch.zeros_like(x), None, freqs_cis, positions),
        "FP8 output": (x, torch.zeros(x.shape, dtype=torch.float8_e4m3fn), 1e-6, freqs_cis, positions),
        "half precision": (x.half(), torch.zeros_like(x.half()), 1e-6, freqs_cis, positions),
        "heads of 1024": (wide, wide.clone(), 1e-6, freqs_cis, positions),
        "strided queries": (wide[..., :512], torch.zeros_like(x), 1e-6, freqs_cis, positions),
        "other rows": (x[:2], torch.zeros_like(x[:2]), 1e-6, freqs_cis, positions),
        "double rotation": (x, torch.zeros_like(x), 1e-6, freqs_cis.to(torch.complex128), positions),
        "strided positions": (x, torch.zeros_like(x), 1e-6, freqs_cis, positions.repeat(2)[::2]),
    }


@pytest.mark.parametrize("name", refused(*queries(), make_freqs_cis(1, "cpu")))
def test_what_the_operator_does_not_take_is_the_originals(model, name):
    arguments = refused(*queries(), make_freqs_cis(100, "cpu"))[name]
    calls, (x, positions) = [], queries()
    replaced = adapter.replace_norm_rope(lambda *given: calls.append(given))
    batch = SimpleNamespace(forward_mode=forward_mode())
    with FORWARD.enter(torch.nn.Module(), module=MODULE, args=(x, positions, batch), kwargs={}):
        replaced(*arguments)
        assert len(calls) == 1 and FORWARD._waiting == []
        replaced(x, torch.zeros(3, 16, 512, dtype=torch.bfloat16), 1e-6, *arguments[3:4], positions)
        assert (FORWARD._waiting == []) == (name == "double rotation")


def test_outside_of_the_forward_the_norm_is_the_original(model):
    replaced = adapter.replace_norm_rope(norm_rope)
    (x, positions), out = queries(), torch.zeros(3, 16, 512, dtype=torch.bfloat16)
    replaced(x, out, 1e-6, make_freqs_cis(100, "cpu"), positions)
    assert norm_rope.calls == [(3, 16, 512)] and bool(out.any()) and replaced.__wrapped__ is norm_rope


def test_in_shadow_mode_nothing_waits(model, monkeypatch):
    """Ours and the original get the same queries, normed once."""
    use(monkeypatch, shadow="1")
    monkeypatch.setattr(shadow, "_start_writer", lambda: None)
    shadow.reset()
    layer, (x, positions), batch = model.layer(), queries(), batch_of()
    for _ in range(3):
        layer.forward(x, positions, batch)
    assert model.operator.calls == [False] * 3 and len(model.stock) == len(norm_rope.calls) == 3
    (record,) = shadow.report()
    assert (record["calls"], record["bad_calls"]) == (3, 0)
    shadow.reset()


def test_a_layer_that_is_gone_is_forgotten(model):
    layer, (x, positions) = model.layer(), queries()
    layer.forward(x, positions, batch_of())
    assert layer in waiting._taken
    count = len(waiting._taken)
    del layer
    assert len(waiting._taken) == count - 1
