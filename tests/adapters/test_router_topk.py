"""The adapter on functions as SGLang makes them; the reference is in the operator's place."""

from __future__ import annotations

import pytest
import torch

from deepseek_v4_sm120.reference.router_topk import router_topk as reference
from deepseek_v4_sm120.sglang_patches import device_gate, shadow
from deepseek_v4_sm120.sglang_patches.adapters import dense_rows
from deepseek_v4_sm120.sglang_patches.adapters import router_topk as adapter

REPLACED = {"0.5.15": adapter.replace_log, "0.5.20": adapter.replace_log1p, "0.5.21": adapter.replace_masked}


@pytest.fixture
def served(monkeypatch):
    """The gate open, the reference in the operator's place; what it was called with."""
    calls = []

    def op(router_logits, bias, topk, *, log1p, renormalize, scale, real_rows, in_pairs):
        calls.append({"log1p": log1p, "scale": scale, "real_rows": real_rows})
        found = reference(router_logits, bias, topk, renormalize=renormalize, scale=scale, real_rows=real_rows)
        return found[0].float(), found[1].int()

    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(adapter.op, "router_topk", op)
    return calls


def original(
    hidden_states,
    gating_output,
    correction_bias,
    topk,
    renormalize,
    scoring_func="sigmoid",
    num_fused_shared_experts=0,
    routed_scaling_factor=None,
    num_token_non_padded=None,
    expert_location_dispatch_info=None,
    apply_routed_scaling_factor_on_output=False,
    packed_out=None,
    sqrtsoftplus_log1p=False,
    router_logits_partials=None,
    num_shared_append=0,
):
    """0.5.22's; before, without the last ones."""
    return "original", topk, scoring_func, num_fused_shared_experts, routed_scaling_factor


def call(rows=3, experts=16, **changes) -> dict:
    """As select_experts calls it, by keywords."""
    generator = torch.Generator().manual_seed(rows)
    given = {
        "hidden_states": torch.zeros(rows, 8),
        "gating_output": torch.randn(rows, experts, generator=generator),
        "correction_bias": torch.randn(experts, generator=generator),
        "topk": 6,
        "renormalize": True,
        "scoring_func": "sqrtsoftplus",
        "num_fused_shared_experts": 0,
        "routed_scaling_factor": 1.5,
        "num_token_non_padded": None,
        "expert_location_dispatch_info": None,
        "apply_routed_scaling_factor_on_output": False,
    }
    return given | changes


@pytest.mark.parametrize("version", REPLACED)
def test_the_routers_choice(served, version):
    given = call()
    weights, ids = REPLACED[version](original)(**given)
    expected = reference(given["gating_output"], given["correction_bias"], 6)
    assert torch.equal(ids.long(), expected[1]) and ids.dtype == torch.int32 and weights.dtype == torch.float32
    torch.testing.assert_close(weights, expected[0].float())
    assert served == [{"log1p": version != "0.5.15", "scale": 1.0, "real_rows": None}]
    assert REPLACED[version](original).__name__ == "original"


@pytest.mark.parametrize("factor, scale", [(1.5, 1.5), (None, 1.0)])
def test_the_factor_where_the_weights_have_it(served, factor, scale):
    given = call(apply_routed_scaling_factor_on_output=True, routed_scaling_factor=factor)
    weights, _ = adapter.replace_log1p(original)(**given)
    torch.testing.assert_close(weights.sum(1), torch.full((3,), scale))
    assert served[0]["scale"] == scale


@pytest.mark.parametrize("count", [torch.tensor(2, dtype=torch.int32), torch.tensor([2], dtype=torch.int32)])
def test_padded_rows_where_the_release_masks_them_here(served, count):
    weights, ids = adapter.replace_masked(original)(**call(num_token_non_padded=count))
    assert ids[2].tolist() == [-1] * 6 and weights[2].tolist() == [0.0] * 6 and bool((ids[:2] >= 0).all())
    for replace in (adapter.replace_log, adapter.replace_log1p):  # where they do not, nobody asks what it is
        for other in (count, count.long()):
            _, ids = replace(original)(**call(num_token_non_padded=other))
            assert bool((ids >= 0).all())
    assert [one["real_rows"] is None for one in served] == [False, *[True] * 4]


@pytest.mark.parametrize(
    "changes",
    [
        {"scoring_func": "sigmoid"},
        {"num_fused_shared_experts": 1},
        {"packed_out": torch.zeros(3, 6)},
        {"sqrtsoftplus_log1p": True},
        {"router_logits_partials": torch.zeros(1)},
        {"num_shared_append": 1},
        {"topk": 9},
        {"correction_bias": None},
        {"correction_bias": torch.zeros(16).half()},
        {"gating_output": torch.zeros(3, 16).half()},
        {"gating_output": torch.zeros(16, 16).T[:3]},
        {"num_token_non_padded": torch.zeros(1, dtype=torch.int64)},
        {"num_token_non_padded": torch.zeros(2, dtype=torch.int32)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_the_operator_does_not_take_is_the_originals(served, changes):
    given = call(**changes)
    found = adapter.replace_masked(original)(**given)
    assert found == original(**given) and served == []


def test_what_says_nothing_changes_nothing(served):
    given = call(packed_out=None, sqrtsoftplus_log1p=False, router_logits_partials=None, num_shared_append=0)
    assert len(adapter.replace_masked(original)(**given)) == 2 and len(served) == 1
    asked = ("hidden_states", "gating_output", "correction_bias", "topk", "renormalize", "scoring_func")
    assert len(adapter.replace_masked(original)(**{name: given[name] for name in asked})) == 2 and len(served) == 2
    more = [*call().values(), None]  # by position, the first of those that we do not know
    assert adapter.replace_masked(original)(*more)[0] == "original"


def test_rows_of_a_prompt_are_the_originals(served, monkeypatch):
    replaced = adapter.replace_log1p(original)
    assert len(replaced(**call(rows=256))) == 2
    assert replaced(**call(rows=257))[0] == "original" and replaced(**call(rows=0))[0] == "original"
    monkeypatch.setattr(dense_rows, "MOST_ROWS", 1 << 40)  # where the server is to be reproducible
    assert len(replaced(**call(rows=257))) == 2


def test_closed_gate(served, monkeypatch):
    monkeypatch.setattr(device_gate, "serves", lambda device: False)
    assert adapter.replace_log1p(original)(**call())[0] == "original" and served == []


def test_shadow_sees_another_expert(served, monkeypatch):
    recorded = []
    monkeypatch.setattr(adapter.shadow, "shadowed", lambda patch, serve, original, how: recorded.append(how) or serve)
    ours = adapter.replace_log1p(original)(**call())
    (how,) = recorded
    other = (ours[0], ours[1].flip(1))
    given = list(call().values())
    assert how.shape(*given) == {"rows": 3, "experts": 16} and how.identity(*given) == given[2].data_ptr()
    for theirs, is_same in ((ours, True), (other, False)):
        found = shadow.difference(how.tensors(ours, theirs, *given))
        assert (float(found["relative_l2"]) <= how.relative_l2) == is_same
