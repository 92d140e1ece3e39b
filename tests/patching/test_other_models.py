"""DeepSeek-V4.1 and V4-Pro through SGLang's own classes: arguments resolved, layers built (other_models_layers.py), and
what each of our adapters says of them; then the table of models_served.py that says the same to readers.

Configurations: V4.1-Flash's and Pro's as published (data/*_config.json), as far as SGLang reads them.
"""

import json
import os
import subprocess
from functools import partial
from pathlib import Path

import pytest

from deepseek_v4_sm120 import OPS
from deepseek_v4_sm120 import __main__ as status_command
from deepseek_v4_sm120.commands import models_table
from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.doctor import model_checks
from deepseek_v4_sm120.commands.plan import models
from deepseek_v4_sm120.ops.shared import extension
from deepseek_v4_sm120.ops.shared.limits import LIMITS
from deepseek_v4_sm120.sglang_patches import device_gate, models_served
from deepseek_v4_sm120.sglang_patches.adapters import argument_defaults
from tests.patching.wheels import unpacked

HERE = Path(__file__).resolve().parent
DATA = HERE.parent / "data"
CONFIGS = {name: json.loads((DATA / f"{name}_config.json").read_text()) for name in ("flash", "pro", "v41")}


@pytest.fixture(autouse=True)
def nobody_told(monkeypatch):
    monkeypatch.setattr(models_served, "_announced", None)


# ---- SGLang's own classes, as on the first of two cards


@pytest.fixture(scope="module")
def layers(loaded, places, tmp_path_factory):
    """layers(version) -> {model: what the adapters say}; one interpreter for all models of a release."""
    made = {}

    def build(version):
        if version not in made:
            wanted = []
            for name in ("v41", "pro"):
                folder = tmp_path_factory.mktemp(name)
                (folder / "config.json").write_text((DATA / f"{name}_config.json").read_text())
                wanted += [f"{name}={folder}", *([f"v41 untold={folder}:untold"] if name == "v41" else [])]
            script = HERE / "other_models_layers.py"
            command = [*loaded.command, str(script), str(HERE), str(unpacked(version)), places["PACKAGES"], *wanted]
            ours = {"PYTHONPATH": str(HERE.parents[1]), "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
            inherited = {k: v for k, v in os.environ.items() if not k.startswith(("DSV4_SM120", "_DSV4", "PYTHON"))}
            env = inherited | ours | {"SGLANG_SM120_FLASHMLA_BACKEND": "triton"}
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
            assert done.returncode == 0, done.stderr[-6000:]
            made[version] = json.loads(done.stdout.splitlines()[-1])
        return made[version]

    return build


VERSIONS = ("0.5.21", "0.5.23")  # the first that has DeepSeek-V4.1, and the last


@pytest.mark.parametrize("version", VERSIONS)
def test_v41_is_sglangs_own_in_every_part(layers, version):
    found = layers(version)["v41"]
    assert (found["type"], found["told"], found["gate"]) == ("deepseek_v41", "deepseek_v41", False)
    assert found["prefill_decode_interval"] == 0 and found["default"][0] == "NOT APPLICABLE"
    assert "DeepSeek-V4.1: never run" in found["default"][1]
    for layer in found["layers"]:
        assert layer["wo_a"] != "StoredWeight"
        assert layer["unpadded"] is False and layer["stock's heads"] == 64  # V4.1's kernels read the padded heads
        assert layer["experts"] == ["Mxfp4FlashinferCutlassMoEMethod", False]
        assert not any((layer["router"], layer["mhc"], layer["fused boundary"], *layer["fp8_linear"].values()))


@pytest.mark.parametrize("version", VERSIONS)
def test_v41_where_nobody_told_the_model(layers, version):
    """A worker that did not inherit its parent's environment: shapes and flags alone decide, at load as at the call."""
    for layer in layers(version)["v41 untold"]["layers"]:
        assert layer["wo_a"] != "StoredWeight"
        assert layer["unpadded"] is False and layer["experts"][1] is False
        assert not any((layer["mhc"], layer["fused boundary"], *layer["fp8_linear"].values()))
        assert layer["router"] is True  # the same product of other widths; test_other_models_numbers.py
        assert {layer["indexer"], layer["compressor"]} <= {"DeepseekV41Indexer", "DeepseekV41Compressor", "NoneType"}


@pytest.mark.parametrize("version", VERSIONS)
def test_pro_is_ours_in_every_part(layers, version):
    found = layers(version)["pro"]
    assert (found["type"], found["told"], found["gate"]) == ("deepseek_v4", "deepseek_v4", True)
    assert found["prefill_decode_interval"] == 8 and found["default"][0] == "ON"  # behind V4.1's in one process
    for layer in found["layers"]:
        assert layer["wo_a"] == "StoredWeight" and layer["unpadded"]
        assert layer["experts"] == ["Mxfp4FlashinferCutlassMoEMethod", True]
        assert all((layer["router"], layer["mhc"], layer["fused boundary"], *layer["fp8_linear"].values()))
        assert layer["compressor"] == "Compressor" and layer["indexer"] in ("C4Indexer", "NoneType")


# ---- the gate


def test_a_parent_tells_its_children(monkeypatch):
    environ = {}
    models_served.announce(CONFIGS["v41"], environ)
    assert not models_served.serves_this_process()
    monkeypatch.setattr(models_served, "_announced", models_served._UNASKED)
    assert models_served.announced(environ)["hidden"] == 5120 and not models_served.serves_this_process()
    assert not models_served.is_compiled()
    models_served.announce(CONFIGS["flash"], environ, torch_compile=True)
    assert models_served.serves_this_process() and models_served.is_compiled()
    monkeypatch.setattr(models_served, "_announced", models_served._UNASKED)
    assert models_served.announced(environ)["torch_compile"] is True and not models_served.has_served_card()
    models_served.announce_served_card(environ)
    assert models_served.has_served_card()
    monkeypatch.setattr(models_served, "_announced", models_served._UNASKED)
    assert models_served.announced(environ)["on_served_card"] is True
    monkeypatch.setattr(models_served, "_announced", models_served._UNASKED)
    assert models_served.announced({}) is None and models_served.serves_this_process()


def test_no_device_is_served_for_another_model(monkeypatch):
    class Device:
        type, index = "cuda", 0

    monkeypatch.setattr(device_gate, "_answers", {0: True})
    assert device_gate.serves(Device())
    monkeypatch.setattr(models_served, "_announced", {"model_type": "deepseek_v41"})
    assert not device_gate.serves(Device()) and not device_gate.serves_current_device()


@pytest.mark.parametrize("sealed", [False, True])
def test_the_hook_finds_the_model_in_every_kind_of_arguments(monkeypatch, sealed):
    """Up to 0.5.18 the arguments have the configuration, from 0.5.19 on a function beside them."""
    from types import ModuleType, SimpleNamespace

    config = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: CONFIGS["v41"]))
    module = ModuleType("overrides")
    module.model_config_of = lambda arguments: config
    monkeypatch.setitem(argument_defaults.importlib.sys.modules, argument_defaults.MODEL_CONFIG, module)
    told, seen, given = [], [], {"enable_torch_compile": True, "nnodes": 1, "forward_hooks": [{}], "tp_size": 4}
    aside = SimpleNamespace(steering=SimpleNamespace(set_aside=lambda why: told.append(why[:12])))
    monkeypatch.setattr(argument_defaults.patching, "active_engine", lambda: aside)
    monkeypatch.setattr(argument_defaults.report, "write", lambda engine: told.append(engine))
    monkeypatch.setattr(argument_defaults.torch_compile, "keep_out", lambda: told.append("no frame of ours"))
    monkeypatch.setattr(models_served, "announce", lambda found, **more: told.append((found["model_type"], more)))
    arguments = SimpleNamespace(**given) if sealed else SimpleNamespace(get_model_config=lambda: config, **given)
    argument_defaults.replace_apply_defaults(lambda *given: seen.append(given))(arguments, "DeepseekV4ForCausalLM")
    asked = {"torch_compile": True, "is_looked_into": True, "several_hosts": False, "ranks_come_and_go": False}
    asked["summing_ranks"] = 4
    assert told == [("deepseek_v41", asked), "no frame of ours", "DeepSeek-V4.", aside]
    assert seen == [(arguments, "DeepseekV4ForCausalLM")]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, None),
        ({"nnodes": 2}, "several_hosts"),
        ({"elastic_ep_backend": "mooncake"}, "ranks_come_and_go"),
        ({"debug_tensor_dump_output_folder": "/a/folder"}, "is_looked_into"),
        ({"msprobe_dump_config": "/a/config.json"}, "is_looked_into"),
        ({"forward_hooks": []}, None),
    ],
    ids=str,
)
def test_what_a_server_was_asked_for(given, found):
    """With what a release lacks, and what it has without a value."""
    from types import SimpleNamespace

    for others in ({}, {"forward_hooks": None, "elastic_ep_backend": None, "nnodes": 1}):
        asked = argument_defaults._asked(partial(getattr, SimpleNamespace(**{**others, **given})))
        assert [name for name, is_so in asked.items() if is_so] == ([found] if found else [])


@pytest.mark.parametrize(
    ("given", "reproducible", "ranks"),
    [
        ({}, False, 4),
        ({"disable_custom_all_reduce": True}, False, 0),
        ({"disable_custom_all_reduce": True}, True, 0),
        ({"enable_deterministic_inference": True}, False, 0),
        ({"enable_deterministic_inference": True}, True, 4),
    ],
    ids=str,
)
def test_how_many_ranks_may_sum_by_ours(given, reproducible, ranks, monkeypatch):
    """None where the user does without the sums that ours stand behind."""
    from types import SimpleNamespace

    from deepseek_v4_sm120.settings import Settings

    choices = {"reproducible": "on"} if reproducible else {}
    monkeypatch.setattr(argument_defaults, "settings", lambda: Settings(choices=choices))
    asked = argument_defaults._asked(partial(getattr, SimpleNamespace(tp_size=4, **given)))
    assert asked["summing_ranks"] == ranks


def test_sglangs_dumper_looks_too(monkeypatch):
    asked = partial(argument_defaults._asked, lambda name, default: default)
    assert not asked()["is_looked_into"]
    monkeypatch.setenv("DUMPER_ENABLE", "1")
    assert asked()["is_looked_into"]


# ---- the table


def test_every_operator_is_in_the_table_and_its_sizes_are_what_configurations_tell():
    assert set(OPS) <= set(LIMITS)
    told = set(models_served.sizes(CONFIGS["flash"]))
    assert {name for limits in LIMITS.values() for name in limits} == told
    assert set(models_served.sizes(CONFIGS["v41"])) == told


def test_the_tables_sizes_are_the_binarys():
    module = extension.load()
    limits = LIMITS["mxfp4_moe"]
    for hidden in (*range(1024, 9216, 1024), 5120):
        for inter in range(128, 3328, 64):
            taken = hidden in limits["hidden"] and inter in limits["inter"]
            assert taken == (not module.mxfp4_moe_problem(hidden=hidden, inter=inter, experts=8, pairs=8)), inter
    most, topk = limits["experts"].most, limits["experts_per_token"].most
    assert not module.mxfp4_moe_problem(hidden=4096, inter=2048, experts=most, pairs=256 * topk)
    assert module.mxfp4_moe_problem(hidden=4096, inter=2048, experts=most + 1, pairs=8)
    assert module.mxfp4_moe_problem(hidden=4096, inter=2048, experts=8, pairs=256 * (topk + 1))
    assert LIMITS["index_select"]["index_topk"].most == module.INDEX_MAX_K
    assert LIMITS["index_select"]["index_heads"].values == (module.INDEX_HEADS,)
    assert module.router_topk_limits == tuple(
        LIMITS["router_topk"][name].most for name in ("experts", "experts_per_token")
    )


@pytest.mark.parametrize("name", ["flash", "pro"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_flash_and_pro_are_ours_at_every_tensor_parallelism(name, tp):
    for config in (CONFIGS[name], models_table.built_in(models.BUILT_IN[name])):
        assert [verdict for verdict in models_served.verdicts(config, tp) if not verdict.served] == []
    for field, key in models.FIELDS.items():
        assert getattr(models.BUILT_IN[name], field) == CONFIGS[name][key], key


def test_a_model_with_other_sizes_loses_what_they_concern_and_nothing_else():
    changed = CONFIGS["flash"] | {"hidden_size": 6144, "index_topk": 2048, "moe_intermediate_size": 1408}
    stock = {v.operator: v.why for v in models_served.verdicts(changed) if not v.served}
    assert set(stock) == {"index_select", "mxfp4_moe", "mhc", "all_reduce"}
    assert stock["mhc"] == "hidden 6144, made for 4096 or 7168"
    assert "inter 1408" in stock["mxfp4_moe"] and "hidden 6144" in stock["mxfp4_moe"]
    as_v41 = CONFIGS["flash"] | {"hc_pre_from_prev_sublayer": True, "text_config": None}
    assert [v.operator for v in models_served.verdicts(as_v41) if not v.served] == ["mhc"]
    of_fp8 = CONFIGS["flash"] | {"expert_dtype": "fp8"}
    assert [v.operator for v in models_served.verdicts(of_fp8) if not v.served] == ["mxfp4_moe"]
    at_3 = models_served.verdicts(CONFIGS["flash"], 3)
    assert {v.operator for v in at_3 if not v.served} == {"sparse_decode", "mxfp4_moe"}


def test_without_the_gate_v41s_sizes_are_beyond_most_operators():
    """What the adapters' predicates see, were the gate open; test_v41_where_nobody_told_the_model builds it."""
    sizes = models_served.sizes(CONFIGS["v41"], 2)
    assert sizes["pre_of_sublayer_before"]
    beyond = {op for op, limits in LIMITS.items() for name, limit in limits.items() if sizes[name] not in limit}
    assert beyond == {"index_select", "mxfp4_moe", "fp8_linear", "wo_a", "mhc", "all_reduce"}


def test_status_says_it(tmp_path, monkeypatch):
    rows = models_table.overview()
    assert set(rows) == set(LIMITS) and rows["mhc"] == {"V4-Flash": "ours", "V4-Pro": "ours", "V4.1": "SGLang's"}
    assert models_table.overview_text(rows)[0] == ("operator", "V4-Flash", "V4-Pro", "V4.1")
    found = models_table.of_model(str(DATA / "v41_config.json"), 4)
    assert found["note"].startswith("nothing of it is touched: DeepSeek-V4.1: never run")
    assert {row[1:] for row in models_table.of_model_text(found)[1:]} == {("SGLang's", "")}
    assert "never run with us" in models_table.of_model("pro", 8)["note"]
    assert models_table.of_model("flash", 2)["note"] == ""
    for tp in (3, 0, -1, 128):
        with pytest.raises(CommandError, match=f"--tp must be 1 or more and divide the model's 64 heads, got {tp}"):
            models_table.of_model("flash", tp)
    with pytest.raises(CommandError, match="--model must be flash, pro, flash-0731, a checkpoint"):
        models_table.of_model(str(tmp_path / "nothing"), 1)
    (tmp_path / "config.json").write_text("[]")
    (tmp_path / "odd").write_text('{"model_type": ["deepseek_v4"]}')
    os.mkfifo(tmp_path / "fifo")  # whoever only opened it would wait for ever
    odd = "no config.json of a model"
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(CommandError, match=odd):
        models_table.of_model("~/odd", 1)
    for name, words in (("", odd), ("odd", odd), ("fifo", "cannot be read: a FIFO")):
        with pytest.raises(CommandError, match=words):
            models_table.of_model(str(tmp_path / name), 1)


@pytest.mark.parametrize("model", [None, "pro", str(DATA / "v41_config.json")])
def test_status_calls_nothing_ours_that_is_not_in_place(model):
    """Both of its tables say the same of an operator; without SGLang there is but the model's shapes to go by."""
    states = {
        "mhc": [("OFF", "by choice")],
        "wo_a": [("READY", ""), ("NOT APPLICABLE", "")],
        "penalties": [("OFF", "")],
    }
    patches = [{"patch": p, "state": s, "reason": r} for p, rows in states.items() for s, r in rows]
    found = {"patches": patches, "host_folder": "/sglang", "models": models_table.overview(), "model": None}
    if model is not None:
        found["model"] = models_table.of_model(model, 8)

    def said(**changes):
        lines = "\n".join(status_command._model_part(found | changes)).splitlines()
        return {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line.startswith(("mhc", "wo_a"))}

    flash = ("ours ours SGLang's", "SGLang's here SGLang's here SGLang's")
    ours, not_here = {None: flash, "pro": ("ours", "SGLang's by choice")}.get(model, ("SGLang's", "SGLang's"))
    assert said() == {"mhc": not_here, "wo_a": ours}
    assert said(host_folder=None) == {"mhc": ours, "wo_a": ours}


def test_doctor_says_it(tmp_path):
    def said(*given):
        (finding,) = model_checks.findings(*given)
        return finding.state, finding.found

    assert said("deepseek-ai/DeepSeek-V4.1-Flash", "deepseek_v41", 8)[0] == "WARN"
    assert "none of the operators is for this model" in said("x", "deepseek_v41", 8)[1]
    assert said("deepseek-ai/DeepSeek-V4-Flash", "deepseek_v4", 2)[0] == "OK"
    assert said("x", None, 2)[0] == "NOT RUN" and said(None, None, None)[0] == "NOT RUN"
    (tmp_path / "config.json").write_text("{")
    state, text = said(str(tmp_path), "deepseek_v4", 2)
    assert state == "WARN" and "config.json is not JSON" in text
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["flash"] | {"hidden_size": 6144}))
    state, text = said(str(tmp_path), "deepseek_v4", 2)
    assert state == "WARN" and "mhc (hidden 6144, made for 4096 or 7168)" in text
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["flash"]))
    all_of_them = f"{len(LIMITS)} of {len(LIMITS)} operators"
    assert said(str(tmp_path), None, 2) == ("OK", f"deepseek_v4: {all_of_them} have its sizes")
