"""What is around the router's choice in the real wheels: who calls it with what, what SGLang does beside it."""

from __future__ import annotations

import ast

from packaging.version import Version

from deepseek_v4_sm120.patching.contract import find_definition
from deepseek_v4_sm120.sglang_patches.adapters.router_topk import SCORING
from deepseek_v4_sm120.sglang_patches.table import CHOICE, ROUTER_TOPK
from deepseek_v4_sm120.specs import router_topk as spec
from tests.patching import triton_router
from tests.patching.wheels import WheelSources, every_release, fetch, since

MODULE, NAME = ROUTER_TOPK.targets[0].where.split(":")
# Keywords that the rows do not name: what it takes for the adapter to leave a call to the original
OTHERS = {"packed_out", "sqrtsoftplus_log1p", "router_logits_partials", "num_shared_append"}


def parsed(version: str, module: str = MODULE) -> ast.Module:
    return ast.parse(WheelSources(fetch(version), {}).read(module))


@every_release("0.5.15")
def test_it_is_called_by_keywords_that_are_known(version):
    """By select_experts alone, under the function's own name or one that is bound to it there."""
    tree = parsed(version)
    users = [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and NAME in ast.unparse(n) and n.name != NAME]
    assert users == ["select_experts"]
    text = ast.unparse(find_definition(tree, "select_experts"))
    called = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in (NAME, "_biased_topk")
    ]
    (call,) = called
    assert not call.args and {k.arg for k in call.keywords if k.arg} == set(CHOICE.names)
    extra = {ast.unparse(k.value) for k in call.keywords if k.arg is None}
    assert extra <= {"_packed_kwargs"} and bool(extra) == since(version, "0.5.21")
    parameters = {a.arg for a in find_definition(tree, NAME).args.args}
    assert parameters - set(CHOICE.names) <= OTHERS


@every_release("0.5.15")
def test_what_the_adapter_hands_on_is_what_sglang_hands_on(version):
    """Logits, bias, topk, factor; padding only where the row for the release says so."""
    text = ast.unparse(find_definition(parsed(version), NAME))
    (call,) = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == spec.GATE
    ]
    given = {k.arg: ast.unparse(k.value) for k in call.keywords}
    assert [ast.unparse(a) for a in call.args] == ["gating_output", "correction_bias"]
    same = ("topk", "scoring_func", "num_fused_shared_experts", "renormalize", "routed_scaling_factor")
    assert {given[name] for name in same} == set(same)
    assert ("num_token_non_padded" in given) == since(version, "0.5.21")
    if since(version, "0.5.21"):
        masks = ast.unparse(find_definition(parsed(version), "_fused_gate_masks_padded_rows"))
        assert f"return _is_cuda and (not _use_aiter) and (scoring_func == '{SCORING}')" in masks


@every_release()
def test_calibrate_finds_the_stock_kernel(version, monkeypatch):
    sources, numbers = WheelSources(fetch(version), {}), Version(version).release
    homes = [home for home in spec.HOMES if sources.read(home) is not None]
    assert len(homes) == 1
    tree = parsed(version, homes[0])
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert spec.GATE in names and (triton_router.KERNEL in names) == (numbers >= spec.TRITON_SINCE)
    if numbers < spec.TRITON_SINCE:
        return
    assert ("log1p_z" in triton_router.source_in(fetch(version))) == (numbers >= spec.LOG1P_SINCE)
    monkeypatch.setattr(spec, "sglang_version", lambda: numbers)
    assert spec.is_log1p() == (numbers >= spec.LOG1P_SINCE)
    gate = {a.arg for a in find_definition(tree, spec.GATE).args.args}
    assert {"scores", "bias", "topk", "scoring_func"} <= gate
