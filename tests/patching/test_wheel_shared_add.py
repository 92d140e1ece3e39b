"""SGLang's own addition of the shared expert's output, taken out of the wheels: with ours in it the same numbers."""

import ast
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120 import settings
from deepseek_v4_sm120.sglang_patches.adapters import mxfp4_moe as adapter
from deepseek_v4_sm120.sglang_patches.table import CUTLASS_EXPERTS, MARLIN_EXPERTS, SHARED_ADD
from tests.patching.wheels import every_release, fetch, tree

FUNCTION = SHARED_ADD.partition(":")[2]
MODULE = "sglang.srt.layers.quantization.mxfp4_flashinfer_trtllm_moe"  # from where the model has it
PACK = "sglang.srt.layers.quantization.expert_pack"


@pytest.fixture
def methods(monkeypatch):
    """The methods' classes by name, where the function imports them from."""
    found = {}
    for where in (MARLIN_EXPERTS, CUTLASS_EXPERTS, f"{PACK}:ExpertPackMoEMethod"):
        module, name = where.split(":")
        found[name] = type(name, (), {})
        stand_in = ModuleType(module)
        setattr(stand_in, name, found[name])
        monkeypatch.setitem(sys.modules, module, stand_in)
    return found


@every_release("0.5.13")
@pytest.mark.parametrize("method", ["Mxfp4MarlinMoEMethod", "Mxfp4FlashinferCutlassMoEMethod"])
@pytest.mark.parametrize("in_topk", [False, True])
def test_a_step_adds_by_ours(version, method, in_topk, methods, monkeypatch):
    definition = next(n for n in tree(fetch(version), MODULE).body if getattr(n, "name", None) == FUNCTION)
    names = {"torch": torch, "Mxfp4FlashinferTrtllmMoEMethod": type("Trtllm", (), {})}
    exec(compile(ast.Module([definition], []), MODULE, "exec"), names)
    original, calls = names[FUNCTION], []

    def add_shared(shared, routed, *, scaling):
        calls.append(scaling)
        return shared.add_(routed, alpha=scaling)

    monkeypatch.setattr(adapter.op, "add_shared", add_shared)
    monkeypatch.setattr(adapter, "settings", settings.Settings)
    experts = SimpleNamespace(
        quant_method=methods[method](), should_fuse_routed_scaling_factor_in_topk=in_topk, **{adapter.KEPT: object()}
    )
    routed, shared = torch.randn(3, 16).bfloat16(), torch.randn(3, 16).bfloat16()
    expected = original(experts, routed.clone(), shared.clone(), 1.5)
    found = adapter.replace_shared_add(original)(experts, routed, shared, 1.5)
    assert torch.equal(found, expected) and found is shared and len(calls) == 1
    alone = adapter.replace_shared_add(original)(experts, routed.clone(), None, 1.5)
    assert torch.equal(alone, original(experts, routed.clone(), None, 1.5))
