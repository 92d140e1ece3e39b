"""What is put off: that it is done once, by who was meant, and that nothing is left or seen elsewhere; then the scopes
of the adapters, in forwards within forwards, after errors and in two threads."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches import device_gate
from deepseek_v4_sm120.sglang_patches.adapters import fp8_linear, index_select, sparse_decode
from deepseek_v4_sm120.sglang_patches.adapters.attention_forward import FORWARD, replace_forward
from deepseek_v4_sm120.sglang_patches.adapters.waiting import Scope, Waiting
from tests.adapters.test_fp8_linear_prologue import MLP, Linear, gates, log, served  # noqa: F401  fixture
from tests.adapters.test_sparse_decode_head_norm import batch_of, model, queries  # noqa: F401  fixture


class Layer:
    """Of a model: what a scope belongs to, or whose call waits."""


class Sum(Waiting):
    """A sum that a later sublayer takes, of any number at once: what the exchange between cards will put off."""

    operator, untaken = "sums", "a sum was left"

    def __init__(self, x):
        self.x, self.runs = x, 0

    def is_of(self, x):
        return x is self.x

    def run(self):
        self.runs += 1


class Strict(Sum):
    mistaken = "another tensor is read"


def test_several_wait_at_once_and_are_taken_in_any_order():
    scope, parts = Scope(), [[1], [2], [3]]
    with scope.enter(Layer()):
        sums = [Sum(x) for x in parts]
        for waiting in sums:
            scope.put_off(waiting)
        assert scope.take(Sum, [2]) is None, "an equal tensor is another one"
        assert scope.take(Sum, parts[1]) is sums[1] and scope.take(Sum, parts[1]) is None
        assert scope.take(Strict, parts[0]) is None, "of another kind"
        assert [scope.take(Sum, x) for x in (parts[2], parts[0])] == [sums[2], sums[0]]
    assert [waiting.runs for waiting in sums] == [0, 0, 0]


def test_what_is_left_raises_and_what_was_settled_does_not():
    scope, left, settled = Scope(), Sum([1]), Sum([2])
    what = "^sums: a sum was left: start with DSV4_SM120_SET=sums=off$"
    with pytest.raises(RuntimeError, match=what), scope.enter(Layer()):
        scope.put_off(left)
    with scope.enter(Layer()):
        scope.put_off(settled)
        scope.settle(Sum)
        scope.settle(Sum)
        assert scope.take(Sum, settled.x) is None
    assert (left.runs, settled.runs) == (0, 1) and scope.layer is None


def test_another_taken_first():
    scope, waiting = Scope(), Strict([1])
    with scope.enter(Layer()):
        scope.put_off(waiting)
        with pytest.raises(RuntimeError, match="another tensor is read: start with DSV4_SM120_SET=sums=off"):
            scope.take(Strict, [2])
        assert scope.take(Strict, waiting.x) is waiting and scope.take(Strict, [2]) is None


def test_the_first_of_each_call_is_watched():
    scope, layer, x = Scope(), Layer(), [1]

    def forward(*call, taken=True, of=layer):
        waiting = Sum(x)
        with scope.enter(of):
            scope.put_off(waiting, *call)
            if taken:
                assert scope.take(Sum, x) is (None if waiting.runs else waiting)
        return waiting.runs

    assert [forward("decode", 1, taken=False) for _ in range(2)] == [1, 1], "nobody comes: it never waits"
    assert [forward("decode", 1) for _ in range(3)] == [1, 0, 0]
    assert forward("decode", 2) == forward("verify", 1) == forward("decode", 1, of=Layer()) == 1


def test_a_forward_within_a_forward_has_its_own_and_gives_back_the_outer_ones():
    scope, outer, inner, x = Scope(), Layer(), Layer(), [1]
    with scope.enter(outer, rows=1):
        waiting = Sum(x)
        scope.put_off(waiting)
        for error in (None, KeyError, RuntimeError):
            try:
                with scope.enter(inner, rows=2):
                    assert (scope.layer, scope.known) == (inner, {"rows": 2}) and scope.take(Sum, x) is None
                    scope.put_off(Sum([2]))
                    if error:
                        raise error("the forward's own")
                    scope.settle(Sum)
            except (KeyError, RuntimeError) as raised:
                assert type(raised) is error and "the forward's own" in str(raised), "not that something is left"
            assert (scope.layer, scope.known) == (outer, {"rows": 1}) and scope.waiting(Sum) == [waiting]
        assert scope.take(Sum, x) is waiting


def in_another_thread(do):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(do).result()


def test_a_scope_is_a_threads():
    scope, x = Scope(), [1]
    with scope.enter(Layer()):
        scope.put_off(Sum(x))
        assert in_another_thread(lambda: (scope.layer, scope.take(Sum, x), scope.waiting(Sum))) == (None, None, [])
        scope.settle(Sum)


# ---- the adapters' scopes


def test_an_mlp_within_an_mlp(served):  # noqa: F811
    """The outer one's gates still go to its product, and one inside that is not ours, or fails, changes nothing."""

    class Outer(MLP):
        def between(self, x):
            with contextlib.suppress(AttributeError):
                self.inner(self.inner_gates)
            return x

    foreign = MLP(Linear(384))
    foreign.down_proj.bias = torch.zeros(384, dtype=torch.bfloat16)
    ours = MLP(Linear(384, seed=5))
    for inner, given, inside in ((ours, gates(), ["gated"]), (foreign, gates(), ["silu", "apply"]), (ours, None, [])):
        mlp = Outer(Linear(384))
        mlp.inner, mlp.inner_gates = inner, given
        log.clear()
        mlp(gates())
        assert log == [*inside, "gated"] and fp8_linear._mlp.layer is None


def test_an_attention_within_an_attention(model):  # noqa: F811
    """A draft's forward between the norm and the attention of the target's."""
    target, draft, (x, positions) = model.layer(), model.layer(), queries()
    expected = [layer.forward(x, positions, batch_of()) for layer in (target, draft)]
    norm_rope = model.module.fused_q_norm_rope
    found = []

    def normed(*call):
        norm_rope(*call)
        if not found:
            found.append(None)
            found[0] = draft.forward(x, positions, batch_of())

    model.module.fused_q_norm_rope = normed
    found.append(target.forward(x, positions, batch_of()))
    assert model.operator.calls == [False, False, True, True]
    assert all(torch.equal(a, b) for a, b in zip(found, reversed(expected), strict=True))


def test_queries_that_are_normed_twice_and_read_once(model):  # noqa: F811
    """Before, the second call made the first one forgotten: its output stayed unwritten."""
    layer, (x, positions) = model.layer(), queries()
    layer.forward(x, positions, batch_of())
    norm_rope = model.module.fused_q_norm_rope

    def twice(q, q_out, *others):
        norm_rope(q, torch.empty_like(q_out), *others)
        norm_rope(q, q_out, *others)

    model.module.fused_q_norm_rope = twice
    with pytest.raises(RuntimeError, match="the queries wait for an attention that SGLang did not call"):
        layer.forward(x, positions, batch_of())


def test_the_backends_heads_and_the_indexer_are_a_threads(monkeypatch):
    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(index_select, "takes", lambda args: True)
    call = SimpleNamespace(q=torch.empty(1, 1, 64, 512, device="meta"))
    heads = sparse_decode.Call.heads.fget
    logits = index_select.replace_logits(lambda *args: "the original's")
    x = torch.zeros(1)

    def look(*_):
        return heads(call), type(logits(x, x, x, x, x, None, 1, False)).__name__

    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: True))
    backend = sparse_decode.replace_backend_forward(
        lambda self, q, k, v, layer: index_select.replace_forward(
            lambda *args: (look(), in_another_thread(look), index_select._forward.layer)
        )(self, x, None, None, batch)
    )
    inside, beside, layer = backend("backend", x, x, x, SimpleNamespace(tp_q_head_num=8))
    assert inside == (8, "Deferred") and beside == (64, "str") and layer == "backend"
    assert look() == (64, "str")


def test_an_indexer_that_is_not_ours_within_one_that_is(monkeypatch):
    monkeypatch.setattr(device_gate, "serves", lambda device: device.type == "cpu")
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: True))
    forward = index_select.replace_forward(
        lambda self, x, *_: (index_select._forward.layer, x.device.type == "cpu" and run(torch.empty(1, device="meta")))
    )

    def run(x):
        return forward("indexer", x, None, None, batch)

    assert run(torch.zeros(1)) == ("indexer", (None, False))


def test_the_attentions_forward_is_wrapped_once():
    def forward(self, x):
        return FORWARD.layer, FORWARD.known

    once = replace_forward(forward)
    assert replace_forward(once) is once and once.__wrapped__ is forward
    assert once("layer", x=3) == ("layer", {"module": __name__, "args": (), "kwargs": {"x": 3}})
    assert FORWARD.layer is None
