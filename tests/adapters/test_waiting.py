"""What is put off: that it is done once, by who was meant, and that nothing is left or seen elsewhere; then the scopes
of the adapters, in forwards within forwards, after errors and in two threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches import device_gate
from deepseek_v4_sm120.sglang_patches.adapters import index_select, sparse_decode
from deepseek_v4_sm120.sglang_patches.adapters.waiting import Scope, Waiting


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


def test_what_is_left_raises():
    scope, left = Scope(), Sum([1])
    what = "^sums: a sum was left: start with DSV4_SM120_SET=sums=off$"
    with pytest.raises(RuntimeError, match=what), scope.enter(Layer()):
        scope.put_off(left)
    assert left.runs == 0 and scope.layer is None and scope.waiting(Sum) == []


def test_another_taken_first():
    scope, waiting = Scope(), Strict([1])
    with scope.enter(Layer()):
        scope.put_off(waiting)
        with pytest.raises(RuntimeError, match="another tensor is read: start with DSV4_SM120_SET=sums=off"):
            scope.take(Strict, [2])
        assert scope.take(Strict, waiting.x) is waiting and scope.take(Strict, [2]) is None


def test_a_forward_within_a_forward_has_its_own_and_gives_back_the_outer_ones():
    scope, outer, inner, x = Scope(), Layer(), Layer(), [1]
    with scope.enter(outer, rows=1, of=1):
        waiting = Sum(x)
        scope.put_off(waiting)
        for error in (None, KeyError, RuntimeError):
            try:
                with scope.enter(inner, rows=2):
                    assert (scope.layer, scope.known) == (inner, {"rows": 2}) and scope.take(Sum, x) is None
                    scope.put_off(Sum(y := [2]))
                    if error:
                        raise error("the forward's own")
                    assert scope.take(Sum, y)
            except (KeyError, RuntimeError) as raised:
                assert type(raised) is error and "the forward's own" in str(raised), "not that something is left"
            assert (scope.layer, scope.known) == (outer, {"rows": 1, "of": 1}) and scope.waiting(Sum) == [waiting]
        assert scope.take(Sum, x) is waiting


def in_another_thread(do):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(do).result()


def test_a_scope_is_a_threads():
    scope, x = Scope(), [1]
    with scope.enter(Layer()):
        scope.put_off(Sum(x))
        assert in_another_thread(lambda: (scope.layer, scope.take(Sum, x), scope.waiting(Sum))) == (None, None, [])
        assert scope.take(Sum, x)


# ---- the adapters' scopes


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
