"""The attention that 0.5.23 calls on other GPUs (DSV4_SM120_FORCE=ops): its module in front of the wheel
sgl-flash-mla, run over a stand-in of that wheel, taken and called as the backend's own lines take and call it; and the
backend's forward of 0.5.21 and later, which tells how many of the padded heads carry data."""

import ast
import functools
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.patching import contract
from deepseek_v4_sm120.sglang_patches.adapters import sparse_decode as adapter
from deepseek_v4_sm120.sglang_patches.table import BACKEND
from tests.adapters.test_sparse_decode import (  # noqa: F401
    RECORDED,
    engine_call,
    flash_mla_call,
    served,
    truth,
)
from tests.patching.wheels import content, every_release, tree

INTERFACE = "sglang.kernels.ops.attention.flash_mla_interface"
TP4 = RECORDED[3]


@pytest.fixture
def interface(version, sglang_wheel, monkeypatch):
    """The wheel's module, patched; `.stock` holds the calls that came to sgl-flash-mla."""
    stock = []

    def flash_mla_with_kvcache(**kwargs):
        stock.append(kwargs)
        return torch.zeros_like(kwargs["q"]), None

    package = types.ModuleType("flash_mla")
    package.flash_mla_with_kvcache, package.__path__ = flash_mla_with_kvcache, []
    inner = types.ModuleType("flash_mla.flash_mla_interface")
    inner.FlashMLASchedMeta = type("FlashMLASchedMeta", (), {})
    mega = types.ModuleType("flash_mla.fused_norm_rope_attn_rope_cast")
    package.fused_norm_rope_attn_rope_cast = mega
    made = types.ModuleType(INTERFACE)
    homes = {INTERFACE.rpartition(".")[0]: types.ModuleType("attention"), INTERFACE: made}
    for name in ("sglang", "sglang.kernels", "sglang.kernels.ops"):
        homes[name] = types.ModuleType(name)
    for module in homes.values():
        module.__path__ = []
    homes[INTERFACE.rpartition(".")[0]].flash_mla_interface = made
    for module in (package, inner, mega):
        homes[module.__name__] = module
    for name, module in homes.items():
        monkeypatch.setitem(sys.modules, name, module)
    source = content(sglang_wheel(version), INTERFACE.replace(".", "/") + ".py")
    exec(compile(source, "wheel", "exec"), vars(made))
    made.flash_mla_with_kvcache = adapter.replace_flash_mla_interface(made.flash_mla_with_kvcache)
    made.stock = stock
    return made


def taken_by_the_constructor(wheel, interleaved: bool):
    """self._flash_mla_with_kvcache, by the constructor's own lines."""
    (block,) = [
        node for node in ast.walk(contract.find_definition(tree(wheel, BACKEND), "DeepseekV4AttnBackend.__init__"))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "is_cuda()"
    ]  # fmt: skip
    layout = SimpleNamespace(get_swa_key_layout=lambda: SimpleNamespace(is_interleaved=interleaved))
    backend = SimpleNamespace(token_to_kv_pool=layout)
    exec(compile(ast.Module(block.body, []), "wheel", "exec"), {"self": backend, "functools": functools})
    return backend._flash_mla_with_kvcache


def called_by_the_backend(wheel, function, call, schedule):
    """The backend's own call of it, with the tensors of `call`."""
    whole = contract.find_definition(tree(wheel, BACKEND), "DeepseekV4AttnBackend._forward_attention")
    (made,) = [
        node for node in ast.walk(whole)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "flash_mla_with_kvcache"
    ]  # fmt: skip
    names = {
        "flash_mla_with_kvcache": function,
        "self": SimpleNamespace(head_dim_v=call["head_dim_v"], softmax_scale=call["softmax_scale"]),
        "flashmla_metadata": schedule,
        "q": call["q"],
        "swa_k_cache": call["k_cache"],
        "swa_page_indices": call["indices"],
        "swa_topk_lengths": call["topk_length"],
        "attn_sink": call["attn_sink"],
        "extra_k_cache": call["extra_k_cache"],
        "extra_indices": call["extra_indices_in_kvcache"],
        "extra_topk_lengths": call["extra_topk_length"],
    }
    return eval(compile(ast.fix_missing_locations(ast.Expression(made)), "wheel", "eval"), names)


@every_release("0.5.23")
@pytest.mark.parametrize("recorded", RECORDED[:3], ids=lambda r: r.name)
def test_the_backends_call_comes_to_ours(version, recorded, interface, sglang_wheel, served):  # noqa: F811
    wheel, call = sglang_wheel(version), engine_call(recorded)
    schedule = sys.modules["flash_mla.flash_mla_interface"].FlashMLASchedMeta()
    function = taken_by_the_constructor(wheel, interleaved=False)
    out, lse = called_by_the_backend(wheel, function, call, schedule)
    assert len(served) == 1 and not interface.stock and not vars(schedule)  # left empty for the next stock call
    expected, expected_lse = truth(call, recorded.real_heads)
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2**-7)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=1e-4)


@every_release("0.5.23")
def test_other_formats_and_kernels_are_sglangs(version, interface, sglang_wheel, served):  # noqa: F811
    """The caches of DeepSeek-V4.1 by the constructor's partial; a format that is named; what is no sparse FP8 call."""
    wheel, call = sglang_wheel(version), engine_call(RECORDED[1])
    schedule = sys.modules["flash_mla.flash_mla_interface"].FlashMLASchedMeta()
    called_by_the_backend(wheel, taken_by_the_constructor(wheel, interleaved=True), call, schedule)
    assert interface.stock[-1]["use_legacy"] is False
    whole = flash_mla_call(call) | {"tile_scheduler_metadata": schedule}
    for different in ({"kv_format": "V32_NO_ROPE"}, {"causal": True}, {"indices": call["indices"].long()}):
        interface.flash_mla_with_kvcache(**whole | different)
        assert all(interface.stock[-1][name] is value for name, value in different.items())
    assert len(interface.stock) == 4 and not served
    interface.flash_mla_with_kvcache(**whole)
    assert len(served) == 1 and len(interface.stock) == 4


@every_release("0.5.21")
def test_only_the_heads_that_carry_data_are_computed(version, sglang_wheel, served):  # noqa: F811
    """0.5.21 and later pad above TP1 on other GPUs, and for DSPARK's draft on SM120 as well."""
    call = engine_call(TP4)
    attention = adapter.replace_sgl_kernel(lambda **kwargs: None)
    names = {}
    found = contract.find_definition(tree(sglang_wheel(version), BACKEND), "DeepseekV4AttnBackend.forward")
    exec(compile(ast.Module([found], []), "wheel", "exec"), names)
    backend = SimpleNamespace(
        _forward_attention=lambda *args: attention(**flash_mla_call(call))[0],
        token_to_kv_pool=SimpleNamespace(request_window=None),
    )
    layer = SimpleNamespace(tp_q_head_num=TP4.real_heads, layer_id=3)
    forward = adapter.replace_backend_forward(names["forward"])
    out = forward(backend, call["q"], None, None, layer, SimpleNamespace(), 4)
    assert served[0]["q"].shape[2] == TP4.real_heads and out.shape == call["q"].shape
    expected, _ = truth(call, TP4.real_heads)
    torch.testing.assert_close(out[:, :, : TP4.real_heads].double(), expected, atol=2e-2, rtol=2**-7)
