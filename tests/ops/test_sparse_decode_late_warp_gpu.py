"""The kernel for few rows with a warp of the value team held back: the same bits, for every length of the last unit.

Built here, of the sources beside it (late_value_warp.cu): the delay is in no module that is shipped.
"""

import subprocess
from pathlib import Path

import build_artifact
import pytest

REPO = Path(__file__).resolve().parent.parent.parent


@pytest.mark.gpu
def test_late_value_warps_change_no_bit(device, tmp_path):
    import torch

    nvcc = build_artifact.find_toolkit(None, build_artifact.CACHE).nvcc
    arch = "{}{}a".format(*torch.cuda.get_device_capability(device))
    program = tmp_path / "late_value_warp"
    source = Path(__file__).with_name("late_value_warp.cu")
    flags = [f for f in build_artifact.CUDA_FLAGS if not f.startswith("-Xptxas")]
    gencode = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    command = [nvcc, *flags, gencode, "-I", build_artifact.CSRC, source, "-o", program]
    built = subprocess.run([str(c) for c in command], text=True, capture_output=True)
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([program], text=True, capture_output=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1] == "SAME BITS"
