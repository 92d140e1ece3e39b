"""The format of a checkpoint's experts: by its weights, as SGLang's own look at them says, else by its configuration;
and what `status`, `plan` and `doctor` make of checkpoints whose configuration alone says another."""

import json
import os
import re
import struct
from pathlib import Path

import pytest

from deepseek_v4_sm120.commands import models_table
from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.doctor import model_checks
from deepseek_v4_sm120.commands.plan import launch, models
from deepseek_v4_sm120.patching.json_file import JsonFileError
from deepseek_v4_sm120.sglang_patches import models_served, stored_experts
from tests.patching.stored_folder import CONFIG, stored_folder
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import fetch
from tests.test_plan import request

FP8 = CONFIG["quantization_config"]
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
