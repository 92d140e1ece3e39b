"""mhc's blocks that wait for each other: graphs side by side, few multiprocessors, a wait that has no end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from deepseek_v4_sm120.ops import mhc as op
from deepseek_v4_sm120.ops.mhc import mhc
from deepseek_v4_sm120.ops.shared import cuda_tensors, extension
from deepseek_v4_sm120.specs.mhc import Shape, make_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

SCRIPT = Path(__file__).with_name("mhc_side_by_side.py")
FEW_SMS = (1, 2, 7, 31, 48)


def run(case: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, case], capture_output=True, text=True, timeout=180, **options)


@pytest.mark.parametrize("case", ["two-graphs", "green-8", "green-24"])
def test_calls_that_could_wait_for_ever_come_back(case):
    """With words from a ring, two graphs of 85 calls hung or had each other's sums; with as many blocks as the device
    holds, a green context refused the kernel for many rows."""
    done = run(case)
    assert (done.returncode, done.stdout.strip()) == (0, "right"), done.stderr[-2000:]


@pytest.mark.parametrize("case", ["fused-out-of-patience", "many-out-of-patience"])
def test_a_wait_without_end_is_a_launch_failure(case):
    done = run(case)
    assert done.stdout.startswith("stopped: ") and "launch failure" in done.stdout, (done.stdout, done.stderr[-2000:])


def test_a_card_that_processes_share_has_kernels_that_begin_block_by_block():
    """Four ranks of an H200 stood still: a cooperative launch waited for places that another rank's sums held."""
    own = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control")
    assert extension.load().mhc_card_is_shared() == own.exists()
    control = shutil.which("nvidia-cuda-mps-control", path=f"{os.environ['PATH']}:/usr/local/nvidia/bin")
    if control is None:  # the driver's; where it is not, nobody shares by it
        return
    with tempfile.TemporaryDirectory() as folder:  # short: sockets lie in it
        service = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipes", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in service.values():
            Path(path).mkdir()
        # the service has all cards: a client's CUDA_VISIBLE_DEVICES counts those that the service sees
        others = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        options = {"env": others | service, "timeout": 60, "check": True}
        subprocess.run([control, "-d"], **options)
        try:
            done = run("shared-card", env=os.environ | service)
        finally:
            subprocess.run([control], input=b"quit\n", **options)
    assert (done.returncode, done.stdout.strip()) == (0, "right"), done.stderr[-2000:]


@pytest.mark.parametrize("num_sms", FEW_SMS)
def test_any_number_of_multiprocessors_has_the_same_bits(num_sms, device, monkeypatch):
    """The launcher told to assume so few: it takes what fits there, and its grids are no larger."""
    monkeypatch.setattr(cuda_tensors, "num_sms", lambda index: num_sms)
    monkeypatch.setattr(cuda_tensors, "stream_sms", lambda index, stream: num_sms)
    for rows in (1, 2, 13, 64, 95, 96, 128, 257, 1000):
        inputs = make_inputs(Shape(rows), seed=rows, device=device)
        expected = mhc(**inputs.boundary(), kernels="split")
        assert all(torch.equal(a, b) for a, b in zip(mhc(**inputs.boundary()), expected, strict=True)), rows
        torch.cuda.synchronize()


def test_what_does_not_fit_is_refused_by_name(device, monkeypatch):
    inputs = make_inputs(Shape(128), device=device)
    monkeypatch.setattr(cuda_tensors, "stream_sms", lambda index, stream: 2)
    for kernels in ("fused", "many"):
        with pytest.raises(RuntimeError, match="128 rows on 2 multiprocessors; the split kernels take any number"):
            mhc(**inputs.boundary(), kernels=kernels)


def test_what_is_chosen_fits(device):
    index, fits = device.index or 0, extension.load().mhc_fits
    for num_sms in (*range(1, 50), 132, 188):
        for rows in (1, 2, 3, 12, 64, 95, 96, 128, 129, 256, 257, 8192):
            chosen = op._kernels_of(rows, 4096, True, num_sms, index)
            assert fits(kernels=chosen, rows=rows, num_sms=num_sms)
            wanted = "fused" if rows <= 128 else "many" if rows >= op.MANY_ROWS else "split"
            assert chosen == (wanted if fits(kernels=wanted, rows=rows, num_sms=num_sms) else "split")
    assert op._kernels_of(128, 4096, True, 188, index) == "fused"
    assert op._kernels_of(8, 7168, True, 132, index) == "split"
