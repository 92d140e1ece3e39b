"""calibrate on this GPU: every implementation that needs no SGLang is right, and the profile says so."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepseek_v4_sm120 import OPS
from deepseek_v4_sm120.specs.provider import OURS

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)}


@pytest.mark.gpu
@pytest.mark.alone
def test_ours_and_torch_are_right_on_every_shape_of_a_plan(tmp_path):
    words = ["--gpus", "4", "--context", "16384", "--concurrency", "3", "--quick", "--out", "profile.json"]
    words = [sys.executable, "-m", "deepseek_v4_sm120", "calibrate", *words]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "profile.json").read_text())
    # sums need a card for each rank
    alone = [name for name in OPS if name not in found["not_here"]]
    assert list(found["operators"]) == alone and not found["not_reached"]
    assert set(found["not_here"]) == ({"all_reduce"} if torch.cuda.device_count() < 4 else set())
    for name, measured in found["operators"].items():
        ran = {p: result for p, result in measured["providers"].items() if "problem" not in result}
        assert OURS in ran and len(ran) > 1, name
        wrong = {p: why for p, why in measured["wrong"].items() if p.startswith(OURS) or p in ("torch", "cublas")}
        assert not wrong, (name, wrong)
        assert all("us" in case or "skipped" in case for case in ran[OURS]["cases"]), name


@pytest.mark.gpu
@pytest.mark.alone
def test_a_limit_leaves_a_profile_of_what_was_reached(tmp_path):
    words = ["--gpus", "1", "--context", "131072", "--limit-s", "7", "--out", "profile.json"]
    words = [sys.executable, "-m", "deepseek_v4_sm120", "calibrate", *words]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT, timeout=30)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "profile.json").read_text())
    assert list(found["not_here"]) == ["all_reduce"], "one card has nothing to sum"
    assert "not reached" in done.stdout and {*found["operators"], *found["not_reached"], "all_reduce"} == set(OPS)
