"""Terms whose last addition is left to the boundary: which, what the boundary is given, and what all others see."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches.adapters import mhc as boundary
from deepseek_v4_sm120.sglang_patches.adapters import mhc_owed_terms as adapter
from deepseek_v4_sm120.sglang_patches.adapters import mhc_sum, mxfp4_moe
from deepseek_v4_sm120.sglang_patches.adapters.mhc_owed_sum import OwedSum
from tests.adapters.test_mhc_sum import CHANGES, HIDDEN, RANKS, group, x_of  # noqa: F401

SCALING = 1.5
ADDED = x_of(3) + SCALING * (x_of(3) + 1)


def layer_with(wo_b=None):
    return SimpleNamespace(self_attn=SimpleNamespace(wo_b=wo_b))


def in_a_layer(call, layer=None):
    """What a layer gets that calls it."""
    return mhc_sum.replace_layer_forward(lambda self: call())(layer or layer_with())


def linear(outputs=HIDDEN, inputs=256):
    return SimpleNamespace(weight=torch.empty(outputs, inputs))


@pytest.fixture(autouse=True)
def made(group, monkeypatch):  # noqa: F811
    """What the operators' own kernels made."""
    seen = []
    monkeypatch.setattr(adapter.op, "takes_terms", lambda rows, hidden, group: rows <= 8)
    monkeypatch.setattr(adapter.linear_op, "splits_of", lambda *sizes: 4 if is_few(*sizes) else 8)
    monkeypatch.setattr(adapter.linear_op, "fp8_linear_unmerged", lambda x, *_: torch.full((4, len(x), HIDDEN), 0.25))
    monkeypatch.setattr(adapter.linear_op, "merge", lambda partial: seen.append("merged") or partial.sum(0).bfloat16())
    monkeypatch.setattr(
        adapter.experts_op,
        "add_shared",
        lambda shared, routed, *, scaling: seen.append("added") or shared + scaling * routed,
    )
    return seen


def is_few(rows, outputs, inputs, index) -> bool:
    return rows <= 9 and (outputs, inputs) == (HIDDEN, 256)


def of_wo_b(rows=3, *, inputs=256, layer=None):
    wo_b = linear(inputs=inputs)
    return in_a_layer(lambda: adapter.of_product(wo_b, x_of(rows, hidden=inputs), None), layer or layer_with(wo_b))


def of_experts(rows=3):
    return in_a_layer(lambda: adapter.of_experts(x_of(rows), x_of(rows) + 1, SCALING))


def test_the_experts_adapter_says_which_output_is_scaled(made):
    term = in_a_layer(lambda: mxfp4_moe._add(x_of(3), x_of(3) + 1, SCALING))
    assert torch.equal(term.run(), ADDED) and made == ["added"]


def test_a_boundary_is_given_what_has_to_be_added(made, group):  # noqa: F811
    term = of_wo_b()
    assert (term.shape, term.dtype, term.ndim, len(term)) == ((3, HIDDEN), torch.bfloat16, 2, 3) and not made
    f, options = term.for_boundary()
    assert f.shape == (4, 3, HIDDEN) and options == {}
    f, options = of_experts().for_boundary()
    assert torch.equal(f, x_of(3)) and torch.equal(options["routed"], x_of(3) + 1) and options["scaling"] == SCALING
    owed = in_a_layer(lambda: sys.modules[mhc_sum.PARALLEL_STATE]._TP.all_reduce(of_experts()))
    assert owed.shape == (3, HIDDEN) and owed.is_contiguous() and not made
    f, options = owed.for_boundary()
    assert torch.equal(f, x_of(3)) and set(options) == {"routed", "scaling", "sum_over", "tag"}
    assert options["sum_over"] is group.ca_comm.sums and not made and not group.sums


def test_whoever_else_looks_gets_the_finished_term(made, group):  # noqa: F811
    one, other = of_wo_b(), of_experts()
    assert torch.equal(one + 0, torch.ones(3, HIDDEN)) and torch.equal(torch.relu(other), ADDED)
    assert made == ["merged", "added"] and torch.equal(one * 2, one.run() * 2) and len(made) == 2, "made once"
    f, options = one.for_boundary()
    assert isinstance(f, torch.Tensor) and f.ndim == 2 and options == {}
    assert torch.equal(group.all_reduce(of_experts()), RANKS * ADDED) and group.sums == 1  # no layer runs
    owed = in_a_layer(lambda: group.all_reduce(of_wo_b()))
    assert torch.equal(owed + 0, RANKS * torch.ones(3, HIDDEN)) and made.count("merged") == 2


@pytest.mark.parametrize("name", CHANGES)
def test_where_the_sum_is_not_in_a_boundary_terms_are_whole(name, group):  # noqa: F811
    CHANGES[name](group)
    assert of_wo_b() is None and of_experts() is None


@pytest.fixture
def alone(group, monkeypatch):  # noqa: F811
    """One card."""
    group.ca_comm, group.world_size = None, 1
    monkeypatch.setattr(adapter.op, "takes_own_terms", lambda like: True)
    return group


def test_on_one_card_a_product_comes_to_the_boundary_itself(alone, made, monkeypatch):
    term, given = of_wo_b(mhc_sum.OWN_ROWS), []
    assert of_wo_b(9) is None and of_experts(3) is None and not made
    monkeypatch.setattr(boundary.op, "mhc", lambda f, *_, **options: given.append((f, options)) or (f, f, f, f))
    numbers = (1e-6, 1e-6, 1e-6, 2.0, 20)
    serve = lambda x: boundary._serve_boundary(x, *[torch.zeros(8, 4)] * 6, *numbers)  # noqa: E731
    serve(term)
    assert given[0][0].shape == (4, 8, HIDDEN) and "routed" not in given[0][1] and not made
    monkeypatch.setattr(adapter.op, "takes_own_terms", lambda like: False)  # of the boundary's stream
    serve(term)
    assert torch.equal(given[1][0], torch.ones(8, HIDDEN, dtype=torch.bfloat16)) and made == ["merged"]
    assert of_wo_b(8) is None


@pytest.mark.parametrize("ranks", [None, 2])
def test_without_a_sum_of_ours_only_one_card_leaves_an_addition(alone, ranks):
    alone.world_size = ranks
    assert of_wo_b() is None


@pytest.mark.parametrize("name", ["another attention's group", "PD multiplexing", "pipeline parallelism"])
def test_one_card_of_several_leaves_none(name, alone):
    state = sys.modules[mhc_sum.PARALLEL_STATE]
    assert of_wo_b() is not None
    if name == "another attention's group":
        state._ATTN_TP = object()
    elif name == "PD multiplexing":
        state._PDMUX_PREFILL_TP_GROUP = object()
    else:
        state._PP.world_size = 2
    assert of_wo_b() is None


def test_who_is_wo_b_and_how_many_rows():
    assert of_wo_b(8) is not None and of_experts(8) is not None
    assert of_wo_b(9) is None and of_experts(9) is None
    assert of_wo_b(layer=layer_with(linear())) is None and of_wo_b(layer=object()) is None
    assert of_wo_b(inputs=512) is None, "made in other parts"
    wo_b = linear()
    assert adapter.of_product(wo_b, x_of(3, hidden=256), None) is None, "no layer runs"
    assert adapter.of_experts(x_of(3), x_of(3), SCALING) is None


def test_a_sum_that_is_no_boundarys_gets_a_finished_term(group, made):  # noqa: F811
    """SGLang may sum by another way than the one that was there when the term was made."""

    def call():
        term = adapter.of_experts(x_of(3), x_of(3) + 1, SCALING)
        assert isinstance(term, OwedSum)
        group.symmetric = True
        return group.all_reduce(term)

    assert torch.equal(in_a_layer(call), RANKS * ADDED) and made == ["added"] and group.sums == 1
