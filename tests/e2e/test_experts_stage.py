"""The stage of prompts' experts as on SM120 without a card: a stand-in for the engine and the real control flow, what
rows make of an engine that ran another kernel, and what the plugin changes in our package and in SGLang's."""

import ast
import importlib.util
import json
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.ops import index_select
from deepseek_v4_sm120.ops import mxfp4_moe as op
from deepseek_v4_sm120.ops.shared import cuda_tensors
from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.sglang_patches.adapters import mxfp4_moe as adapter
from tests.e2e import collect, experts_stage
from tests.e2e.test_scripts import machine, rows_of  # noqa: F401
from tests.patching import wheels

RELEASES = ("0.5.17", "0.5.23")  # that the stages run


def test_every_engine_and_its_rows(machine):  # noqa: F811
    ended = machine("experts", "--jobs", "5")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    path = machine.out / "stage_experts.json"
    stage = json.loads(path.read_text())
    cases = stage["cases"]
    assert set(cases) == {"experts_stock", *experts_stage.ANSWERS, *experts_stage.BESIDE}
    assert {name for name, case in cases.items() if "--moe flashinfer_mxfp4" in case["command"]} == {"experts_scaled"}
    assert "E2E_AS_SM120" not in cases["experts_stock"]["command"]
    assert {name for name, case in cases.items() if "_SHADOW=1" in case["command"]} == set(experts_stage.BESIDE)
    assert {name for name, case in cases.items() if "_FORCE=ops" not in case["command"]} == {"experts_stock"}
    compared = {(d["run"], d["against"]) for d in stage["differences"]}
    assert ("experts_wide", "experts_stock") in compared and ("experts_scaled", "experts_wide") in compared
    rows = rows_of(path)
    own = [r for r in rows if r["metric"] == "the run against its own repetition" and r["bar"] is not None]
    assert own and all(r["met"] for r in own) and {r["impl"][:4] for r in own} == {"ours"}
    assert len([r for r in rows if "missing to 32" in r["metric"] and r["met"]]) == len(cases) - 1
    # the stand-in has records of attention alone
    assert {r["metric"] for r in rows if r["met"] is False} == {"shadow calls recorded: none"}


def test_bits_of_two_processes_and_once_more(machine):  # noqa: F811
    ended = machine("experts_same", "--jobs", "4", FAKE_UNLIKE="same_experts_wide_again")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    stage = json.loads((machine.out / "stage_experts_same.json").read_text())
    assert all("fp8_index" in case["command"] and "_FORCE=ops" in case["command"] for case in stage["cases"].values())
    assert {(s["run"], s["against"]): (s["answers"], s["differ"]) for s in stage["sames"]} == {
        ("same_experts_wide_again", "same_experts_wide"): (16, 8),
        ("same_experts_wide", "same_experts_wide"): (16, 0),
        ("same_experts_scaled_again", "same_experts_scaled"): (16, 0),
        ("same_experts_scaled", "same_experts_scaled"): (16, 0),
    }


def test_routers_beside_the_originals(machine):  # noqa: F811
    machine("experts_router")
    cases = json.loads((machine.out / "stage_experts_router.json").read_text())["cases"]
    assert ["E2E_AS_SM120=wide,fp8_index" in case["command"] for case in cases.values()] == [True, False]
    assert ["E2E_AS_SM120=scaled,sms=48" in case["command"] for case in cases.values()] == [False, True]
    assert all("DSV4_SM120_SHADOW=1" in case["command"] for case in cases.values())


def test_sglangs_own_branches_with_ours(machine):  # noqa: F811
    assert machine("experts_seams").returncode == 0
    path = machine.out / "stage_experts_seams.json"
    stage = json.loads(path.read_text())
    [command] = [case["command"] for case in stage["cases"].values()]
    assert "DSV4_SM120_FORCE=seams" in command and "E2E_AS_SM120=scaled,fp8_index" in command
    assert "--moe flashinfer_mxfp4" in command and "FLASHMLA_SPARSE_PREFILL" not in command
    assert [(s["answers"], s["differ"]) for s in stage["sames"]] == [(16, 0)]
    assert all(r["met"] for r in rows_of(path) if r["bar"] is not None)


def test_an_engine_that_ran_another_kernel_has_failed(machine):  # noqa: F811
    machine("experts", "--only", "experts_wide", FAKE_KERNEL="scaled")
    rows = {r["metric"]: r for r in rows_of(machine.out / "stage_experts.json") if r["case"] == "experts_wide"}
    missing, others = (
        rows["calls above 256 rows by its kernel, missing to 32"],
        rows["calls above 256 rows by another kernel"],
    )
    assert (missing["value"], missing["met"], others["value"], others["met"]) == (32, False, 32, False)


def test_an_engine_that_counted_nothing_has_failed():
    [missing] = [
        r
        for r in experts_stage.rows({"experts_scaled": {"reports": [{"found": {}}]}}, collect.row)
        if "missing" in r["metric"]
    ]
    assert (missing["value"], missing["met"]) == (32, False)


@pytest.fixture
def plugin(monkeypatch):
    path = experts_stage.PLUGIN / "as_sm120.py"
    spec = importlib.util.spec_from_file_location("as_sm120", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for place, names in (
        (op, ("BLOCK_SCALED_MAJOR", *module.KERNELS)),
        (adapter, ("replace_marlin_process", "replace_marlin_apply")),
        (index_select, ("has_fp8_mma",)),
        (cuda_tensors, ("num_sms",)),
    ):
        for name in names:  # what the plugin sets is undone
            monkeypatch.setattr(place, name, getattr(place, name))
    monkeypatch.setattr(report, "_notes", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    return module


def many_rows(monkeypatch, plugin, activations):
    """What a Hopper card's call of many rows comes to, and what was counted."""
    ran = []
    for name in plugin.KERNELS:
        monkeypatch.setattr(op, name, lambda *_, name=name, **__: ran.append(name))
    plugin.count()
    weights = op.Weights(*(torch.empty(shape, dtype=torch.uint8, device="meta") for shape in (
        (8, 1024, 2048), (8, 1024, 128), (8, 4096, 256), (8, 4096, 16))), up_first=False)  # fmt: skip
    check = SimpleNamespace(device=None, refuse=lambda *why: ran.append(why), multiple=lambda *_: None)
    monkeypatch.setattr(op.extension, "load", lambda: SimpleNamespace(mxfp4_moe_max_tiled_experts=1024))
    op._check_many(check, 4096, 512, 8, weights)
    op._many_rows(SimpleNamespace(device=None), weights, None, 10.0, None, activations, False)
    return ran, dict(plugin.counts)


@pytest.mark.parametrize(
    "word, activations, ran, counted",
    [
        ("wide", "bf16", "_sorted_rows", "wide"),
        ("scaled", "mxfp8", "_scaled_rows", "scaled"),
    ],
)
def test_what_a_hopper_card_takes_by_the_plugin(monkeypatch, plugin, word, activations, ran, counted):
    plugin.CHOICES[word]()
    assert many_rows(monkeypatch, plugin, activations) == ([ran], {counted: 1})
    assert report._notes[experts_stage.FOUND][1]() == {counted: 1}


def test_exact_sums_are_not_taken_for_wide(monkeypatch, plugin):
    monkeypatch.setattr(op, "_sorted_rows", lambda *_, **__: None)
    plugin.count()
    op._sorted_rows(None, exact=True)
    op._sorted_rows(None, exact=False)
    assert plugin.counts == {"exact": 1, "wide": 1}


def test_each_kernels_count_is_written_at_powers_of_two(monkeypatch, plugin):
    written = []
    monkeypatch.setattr(report, "write", lambda: written.append(dict(plugin.counts)))
    for name in plugin.KERNELS:
        monkeypatch.setattr(op, name, lambda: None)
    plugin.count()
    for _ in range(5):
        op._scaled_rows()
    op._sorted_rows()
    assert written == [{"scaled": 1}, {"scaled": 2}, {"scaled": 4}, {"scaled": 5, "wide": 1}]


def test_marlins_method_asks_for_mxfp8_where_scaled_is_asked_for(monkeypatch, plugin):
    plugin.scaled()
    asked = []
    monkeypatch.setattr(adapter, "_replace_process", lambda original, *, mxfp8: asked.append(mxfp8))
    monkeypatch.setattr(adapter, "_replace_apply", lambda original, bound: asked.append(bound))
    adapter.replace_marlin_process(None)
    adapter.replace_marlin_apply(None)
    assert asked == [True, adapter.bounds.MXFP4_MOE_MXFP8.shadow] and op.multiplies_block_scaled()


def test_register_takes_all_that_is_named(monkeypatch, plugin):
    hooks = []
    registry = ModuleType("hook_registry")
    registry.HookRegistry = SimpleNamespace(register=lambda *hook: hooks.append(hook))
    registry.HookType = SimpleNamespace(AFTER="after")
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", registry)
    monkeypatch.setenv("E2E_AS_SM120", "wide,fp8_index,sms=48")
    plugin.register()
    assert index_select.has_fp8_mma(0) and cuda_tensors.num_sms(0) == 48
    assert hooks == [(plugin.DUMMY_WEIGHTS, plugin.swapped, "after")] and experts_stage.FOUND in report._notes


def test_the_weights_of_every_method_compute_the_same(plugin):
    def layer(up_first):
        names = {"w13_weight": torch.int8, "w13_weight_scale_inv": torch.float8_e8m0fnu}
        tensors = {n: torch.arange(48, dtype=torch.uint8).view(2, 8, 3).view(dtype) for n, dtype in names.items()}
        return SimpleNamespace(quant_method=SimpleNamespace(load_up_proj_weight_first=up_first), **tensors)

    layers = [layer(True), layer(False), SimpleNamespace()]
    plugin.swapped(None, SimpleNamespace(modules=lambda: layers))
    plain = torch.arange(48, dtype=torch.uint8).view(2, 8, 3)
    for name in ("w13_weight", "w13_weight_scale_inv"):
        assert torch.equal(getattr(layers[1], name).view(torch.uint8), plain)
        swapped = getattr(layers[0], name).view(torch.uint8)
        assert torch.equal(swapped[:, :4], plain[:, 4:]) and torch.equal(swapped[:, 4:], plain[:, :4])


@pytest.mark.parametrize("release", RELEASES)
def test_the_plugins_places_are_there(plugin, release):
    wheel = wheels.fetch(release)
    module, _, function = plugin.DUMMY_WEIGHTS.rpartition(".")
    text = wheels.content(wheel, f"{module.replace('.', '/')}.py")
    [found] = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == function]
    assert found.args.args[0].arg == "model"
    method = wheels.content(wheel, "sglang/srt/layers/quantization/mxfp4_flashinfer_cutlass_moe.py")
    assert "def load_up_proj_weight_first" in method
    choice = wheels.content(wheel, "sglang/srt/layers/quantization/fp8.py")
    hopper = re.search(r"is_flashinfer_mxfp4\(\):(.*?)return Mxfp4FlashinferCutlassMoEMethod", choice, re.DOTALL)
    assert hopper and re.search(r"is_sm90", hopper.group(1)), "a Hopper engine takes that class, too"
