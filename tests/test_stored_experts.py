"""The format of a checkpoint's experts: by its weights, as SGLang's own look at them says, else by its configuration;
and what `status`, `plan` and `doctor` make of checkpoints whose configuration alone says another."""

import argparse
import json
import os
import re
import struct
from pathlib import Path

import pytest

from deepseek_v4_sm120.commands import models_table
from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.doctor import model_checks
from deepseek_v4_sm120.commands.plan import command as plan_command
from deepseek_v4_sm120.commands.plan import launch, models
from deepseek_v4_sm120.commands.serve import command as serve
from deepseek_v4_sm120.patching.json_file import JsonFileError
from deepseek_v4_sm120.sglang_patches import models_served, stored_experts
from tests.patching.stored_folder import CONFIG, stored_folder
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import fetch
from tests.test_plan import request

FP8 = CONFIG["quantization_config"]


def plan_request(*words):
    parser = argparse.ArgumentParser()
    plan_command.add_arguments(parser)
    return plan_command.request_of(parser.parse_args(words))


NVFP4 = {**FP8, "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16, "ignore": ["mtp.*"]}


@pytest.mark.parametrize(
    "dtype, more, found",
    [
        ("I8", ("scale",), "fp4"),
        ("U8", ("scale",), "fp4"),
        ("F8_E4M3", ("scale",), "fp8"),
        ("U8", ("weight_scale", "weight_scale_2", "input_scale"), "nvfp4"),
        ("BF16", (), "bf16"),
    ],
)
def test_weights_tell_it_whatever_the_configuration_says(tmp_path, dtype, more, found):
    assert stored_experts.stored(stored_folder(tmp_path, dtype, *more)) == found
    read = models_served.read_config(tmp_path)[1]
    assert models_served.expert_format(read) == (found or "fp4")


@pytest.mark.parametrize("version", ["0.5.14", "0.5.23"])
@pytest.mark.parametrize("dtype, found", [("I8", "fp4"), ("U8", "fp4"), ("F8_E4M3", "fp8")])
def test_it_is_what_sglang_finds(tmp_path, version, dtype, found):
    given = {"os": os, "json": json, "struct": struct, "Path": Path, "re": re}
    for name in ("_ROUTED_EXPERT_KEY_RE", "probe_routed_expert_weight_dtype"):
        probe = take(fetch(version), given, name, "sglang.srt.model_loader.weight_utils")
    place = stored_folder(tmp_path, dtype, "scale")
    assert probe(str(place)) == dtype and stored_experts.stored(place) == found


@pytest.mark.parametrize(
    "config, found",
    [
        (CONFIG, "fp4"),
        ({**CONFIG, "expert_dtype": "fp8"}, "fp8"),
        ({**CONFIG, "quantization_config": NVFP4}, "nvfp4"),  # which keeps "fp4"
        ({**CONFIG, "quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({key: value for key, value in CONFIG.items() if key != "expert_dtype"}, None),
    ],
)
def test_what_a_configuration_alone_tells(config, found):
    assert stored_experts.told(config) == models_served.expert_format(config) == found
    served = {verdict.operator: verdict for verdict in models_served.verdicts(config, 2)}["mxfp4_moe"]
    assert served.served is (found in ("fp4", None))
    assert served.served or f"expert_format {found}, made for fp4" in served.why


def test_experts_of_no_known_type_are_not_planned_as_the_configurations(tmp_path):
    """A bf16 conversion's configuration says "fp4" still: its experts have four times the bytes."""
    place = stored_folder(tmp_path, "BF16")
    with pytest.raises(CommandError, match="experts in 'bf16' are not fp4 or fp8"):
        models.find(str(place), None)


def test_a_folder_of_nvfp4_is_told_and_not_planned(tmp_path):
    place = stored_folder(tmp_path, "U8", "weight_scale_2", config={**CONFIG, "quantization_config": NVFP4})
    rows = {row["operator"]: row for row in models_table.of_model(str(place), 2)["operators"]}
    assert not rows["mxfp4_moe"]["served"] and "nvfp4" in rows["mxfp4_moe"]["why"]
    assert rows["wo_a"]["served"] and rows["fp8_linear"]["served"]
    (found,) = model_checks.findings(str(place), None, 2)
    assert "mxfp4_moe (expert_format nvfp4, made for fp4)" in found.found
    with pytest.raises(CommandError, match="experts in 'nvfp4' are not fp4 or fp8"):
        models.find(str(place), None)


def test_a_folder_of_fp8_conversions_is_planned_as_one(tmp_path):
    """Their config.json has no expert_dtype, so those of FP4 were reckoned, on two cards that do not hold FP8."""
    config = {key: value for key, value in CONFIG.items() if key != "expert_dtype"}
    model = models.find(str(stored_folder(tmp_path, "F8_E4M3", "scale", config=config)), None)
    assert model.expert_format == models.FP8
    plan = launch.make(request(model=model, gpus=2))
    assert not plan.fits and plan.weights > 130e9
    assert {flag.name: flag.value for flag in launch.make(request(model=model, gpus=4)).environment}[
        "SGLANG_DSV4_FP4_EXPERTS"
    ] == "0"


def drop_from_index(place, beginning):
    index = json.loads((place / stored_experts.INDEX).read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if not name.startswith(beginning)}
    (place / stored_experts.INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("what", ["no tensors", "no blocks", "nothing said"])
def test_a_checkpoint_without_its_drafter_is_planned_without_speculation(tmp_path, what):
    """SGLang loads the model, and then stops at the number in config.json; or drafts with memory that nobody wrote."""
    numbers = {"no tensors": 1, "no blocks": 0, "nothing said": None}
    config = {**CONFIG, "num_nextn_predict_layers": numbers[what]}
    if what == "nothing said":
        del config["num_nextn_predict_layers"]
    stored_folder(tmp_path, "I8", "scale", config=config)
    if what == "no tensors":
        drop_from_index(tmp_path, "mtp.")
    words = "index.json has no tensor of a drafter" if what == "no tensors" else "num_nextn_predict_layers"
    asked = ["--model", str(tmp_path), "--gpus", "4", "--memory", "96", "--context", "65536", "--sglang", "0.5.23"]
    plan = launch.make(plan_request(*asked))
    assert plan.request.speculation is None and [note for note in plan.notes if words in note]
    assert not [flag.name for flag in plan.flags if "speculative" in flag.name]
    for more in (["--spec", "mtp"], ["--block", "1"]):
        with pytest.raises(CommandError, match=f"nothing to draft with: .*{words}"):
            launch.make(plan_request(*asked, *more))
    command = ["--speculative-algorithm", "EAGLE", "--speculative-eagle-topk", "1"]
    with pytest.raises(CommandError, match=f"nothing to draft with: .*{words}"):
        serve.unsafe(plan, command, {})
    assert serve.unsafe(plan, [*command, "--speculative-draft-model-path", "/another"], {}) == []


@pytest.mark.parametrize("name", ["mtp.0.attn.wo_a.weight", "model.layers.43.mlp.gate.weight", "layers.43.x"])
@pytest.mark.parametrize("drafter", [{}, {"dspark_block_size": 5, "dspark_target_layer_ids": [1, 2]}])
def test_a_checkpoint_with_its_drafter_is_planned_with_it(tmp_path, name, drafter):
    """By the names that SGLang's loading takes; DSPARK's has no number of blocks to obey."""
    stored_folder(
        tmp_path, "I8", "scale", config={**CONFIG, "num_nextn_predict_layers": 3 if drafter else 1, **drafter}
    )
    drop_from_index(tmp_path, "mtp.")
    index = json.loads((tmp_path / stored_experts.INDEX).read_text())
    index["weight_map"][name] = "model-00001.safetensors"
    (tmp_path / stored_experts.INDEX).write_text(json.dumps(index))
    assert models.find(str(tmp_path), None).no_drafter is None


def test_a_configuration_alone_is_planned_with_its_drafter(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert models.find(str(tmp_path), None).no_drafter is None


@pytest.mark.parametrize("quantized", [None, {"quant_method": "fp8"}, {**FP8, "weight_block_size": [1, 32]}])
def test_dense_layers_of_unknown_sizes_are_not_planned(tmp_path, quantized):
    config = {**CONFIG, "quantization_config": quantized}
    with pytest.raises(CommandError, match="does not say dense layers in FP8 with scales of 128 x 128 weights"):
        models.find(str(stored_folder(tmp_path, config=config)), None)


def test_while_a_download_goes_on_the_experts_that_are_there_tell_it(tmp_path):
    """Of an FP8 conversion whose first shard is still to come the configuration, which says nothing, was asked: FP4."""
    config = {key: value for key, value in CONFIG.items() if key != "expert_dtype"}
    stored_folder(tmp_path, "F8_E4M3", "scale", config=config)
    index = json.loads((tmp_path / stored_experts.INDEX).read_text())
    index["weight_map"] = {"layers.0.ffn.experts.0.w1.weight": "model-00000.safetensors", **index["weight_map"]}
    (tmp_path / stored_experts.INDEX).write_text(json.dumps(index))
    assert models.find(str(tmp_path), None).expert_format == models.FP8


@pytest.mark.parametrize("damaged", [stored_experts.INDEX, "model-00001.safetensors"])
def test_what_is_no_index_and_no_shard_is_one_sentence(tmp_path, damaged):
    stored_folder(tmp_path, "I8", "scale")
    (tmp_path / damaged).write_bytes(b"\xff" * 20)
    with pytest.raises(JsonFileError, match=damaged):
        models_served.read_config(tmp_path)


def test_a_checkpoint_that_sees_images_is_told_to_be_served_without(tmp_path):
    place = stored_folder(tmp_path, config={**CONFIG, "vision_n_layers": 32, "vision_dim": 1024})
    assert "images are not read" in models_table.of_model(str(place), 2)["note"]
    found = list(model_checks.findings(str(place), None, 2))
    assert [finding.state for finding in found] == ["WARN", "OK"] and "images are not read" in found[0].found
    model = models.find(str(place), None)
    assert models_served.SEES_IMAGES in launch.make(request(model=model)).notes
    assert not models_served.sees_images({"model_type": "deepseek_v41", "vision_n_layers": 32})
