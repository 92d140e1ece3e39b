"""What a reproducible server relies on in each release, taken out of the wheels and run on the CPU: SGLang's own flag
for deterministic inference and the head, with ours in their places."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.reference.bf16_linear import bf16_linear as product
from deepseek_v4_sm120.sglang_patches import device_gate, models_served
from deepseek_v4_sm120.sglang_patches.adapters import argument_defaults, bf16_linear
from deepseek_v4_sm120.sglang_patches.table import REPRODUCIBLE_ARGUMENTS
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import every_release, fetch, since

FIRST = "0.5.14"
HOOK, ARGUMENTS = "sglang.srt.arg_groups.attention_hook", argument_defaults.SERVER_ARGS
LISTS = ("DETERMINISTIC_ATTENTION_BACKEND_CHOICES", "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND")
OVERRIDES = "sglang.srt.arg_groups.overrides"
LOGITS = "sglang.srt.layers.logits_processor"


@pytest.fixture
def ours(monkeypatch):
    monkeypatch.setattr(models_served, "announced", lambda: {"model_type": "deepseek_v4"})
    monkeypatch.setattr(device_gate, "serves_current_device", lambda: True)
    monkeypatch.setattr(device_gate, "serves", lambda device: True)


class Server(SimpleNamespace):
    """A server's arguments as far as the flag looks at them, with a list of decisions where a release keeps one."""

    def __init__(self, **given):
        names = ("rl_on_policy_target", "flashinfer_allreduce_fusion_backend", "enable_aiter_allreduce_fusion")
        plain = {"enable_deterministic_inference": True, "attention_backend": "dsv4", "sampling_backend": "flashinfer"}
        plain |= {"disable_custom_all_reduce": False, "disable_radix_cache": False, "model_path": "a path"}
        super().__init__(**(dict.fromkeys(names) | plain | {"tp_size": 2, "_resolved_overrides": []} | given))

    def now(self, name):
        decided = [fields[name] for _, fields in self._resolved_overrides if name in fields]
        return decided[-1] if decided else getattr(self, name)


class View:
    def __init__(self, server):
        self.server = server

    def __getattr__(self, name):
        return self.server.now(name)


def declare(server, source, **fields):
    server._resolved_overrides.append((source, fields))


def resolution(wheel, version, environ, lists):
    """What the release does with the flag, its passes and its lists among it."""
    platform = SimpleNamespace(is_hip=False, is_sm100=False, is_sm120=True)
    names = {
        **lists,
        **{"get_platform": lambda: platform, "is_hip": lambda: False, "os": SimpleNamespace(environ=environ)},
        **{"declare_resolution": declare, "resolving_view": View, "resolved_view": View},
        "register_post_process": lambda one: one,
    }
    passes = {
        name: take(wheel, dict(names, GIVEN=dict(lists)), name, OVERRIDES)
        for name in ("_deterministic_attention_backend", "_deterministic_sampling_backend")
        if since(version, "0.5.15")
    }

    def run_post_process_pass(server, one):
        declare(server, "a pass", **(one(View(server)) if one in passes.values() else {}))

    names |= passes
    names["run_post_process_pass"] = run_post_process_pass
    names["GIVEN"] = dict(names)
    if since(version, "0.5.19"):
        return take(wheel, names, "handle_deterministic_inference", HOOK)
    return take(wheel, names, "ServerArgs._handle_deterministic_inference", ARGUMENTS)


@every_release(FIRST)
@pytest.mark.parametrize("disabled", [False, True])
def test_the_flag_is_accepted_and_sums_stay_as_they_were(version, ours, disabled, monkeypatch):
    lists = {name: ["fa3", "triton"] for name in LISTS}
    environ = {}
    stock = resolution(fetch(version), version, environ, lists)
    with pytest.raises(ValueError, match="attention backends are supported for deterministic inference"):
        stock(Server())

    arguments = ModuleType(ARGUMENTS)
    vars(arguments).update(lists)
    monkeypatch.setitem(sys.modules, ARGUMENTS, arguments)
    overrides = ModuleType(OVERRIDES)
    if since(version, "0.5.19"):
        overrides.declare_resolution, overrides.resolving_view = declare, View
    monkeypatch.setitem(sys.modules, OVERRIDES, overrides)
    (target,) = [t for t in REPRODUCIBLE_ARGUMENTS.targets if (":handle" in t.where) == since(version, "0.5.19")]
    replace = getattr(argument_defaults, target.replacement.rpartition(":")[2])
    server = Server(disable_custom_all_reduce=disabled)
    replace(stock)(server)
    assert server.now("disable_custom_all_reduce") is disabled and environ["NCCL_ALGO"] == "allreduce:tree"
    assert server.now("disable_radix_cache") is False and server.now("sampling_backend") == "pytorch"
    assert server.now("attention_backend") == "dsv4"
    not_asked = Server(enable_deterministic_inference=False)
    replace(stock)(not_asked)
    assert not_asked.now("sampling_backend") == "flashinfer"


class UnquantizedEmbeddingMethod:
    pass


@every_release(FIRST)
@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "float32"])
def test_the_head_of_the_release_and_ours_agree(version, ours, wide, monkeypatch):
    """As the release computes it on the CPU, by torch; ours on exact products."""
    asked = []

    def op(x, weight, *, out_dtype=torch.float32, out=None):
        asked.append(out_dtype)
        return product(x, weight).to(out_dtype)

    monkeypatch.setattr(bf16_linear.op, "bf16_linear", op)
    servers = SimpleNamespace(rl_on_policy_target=None)
    names = {"torch": torch, "use_intel_amx_backend": lambda head: False, "get_global_server_args": lambda: servers}
    names["should_apply_lm_head_quant_method"] = lambda head, method: False
    stock = take(fetch(version), names, "LogitsProcessor._compute_lm_head", LOGITS)
    processor = SimpleNamespace(use_fp32_lm_head=wide, use_fp32_lm_head_output=False, rl_on_policy_target=None)
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(rows, 512, generator=generator).bfloat16() for rows in (5, 24))
    head = SimpleNamespace(weight=weight, quant_method=UnquantizedEmbeddingMethod())
    theirs, found = stock(processor, x, head), bf16_linear.replace_lm_head(stock)(processor, x, head)
    assert asked == [torch.float32 if wide else torch.bfloat16] and found.dtype == theirs.dtype
    torch.testing.assert_close(found, theirs, rtol=1e-5 if wide else 0.01, atol=1e-4 if wide else 0.05)
