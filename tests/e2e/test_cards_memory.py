"""Memory of the cards by what is there: a made nvidia-smi, a made NVML, a made torch."""

import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent.parent
ASKED = "from tests.e2e import cards_memory as c; print(c.way(), c.used_mib(), c.used_mib())"
LIBRARY = """
#include <stdio.h>
#include <stdlib.h>
struct memory { unsigned long long total, free, used; };
static int asked;
int nvmlInit_v2() { return 0; }
int nvmlShutdown() { return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = atoi(getenv("CARDS")); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned card, void** handle) { *handle = (void*)(size_t)(card + 1); return 0; }
int nvmlDeviceGetMemoryInfo(void* handle, struct memory* found) {
  found->total = 96ull << 30;
  found->used = ((size_t)handle * 1000 << 20) + ((unsigned long long)asked++ << 20);
  found->free = found->total - found->used;
  return atoi(getenv("STATUS"));
}
"""
TORCH = """
import os
class cuda:
    device_count = staticmethod(lambda: int(os.environ["OF_TORCH"]))
    mem_get_info = staticmethod(lambda card: ((90 - card) << 30, 96 << 30))
"""


@pytest.fixture
def said(tmp_path):
    """said(nvidia_smi, cards, status, of_torch) -> what is printed: way, twice the MiB in use"""
    (tmp_path / "nvml.c").write_text(LIBRARY)
    (tmp_path / "bin").mkdir()
    (tmp_path / "torch.py").write_text(TORCH)
    library = str(tmp_path / "libnvidia-ml.so.1")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, str(tmp_path / "nvml.c")], check=True)

    def ask(nvidia_smi=None, cards="2", status="0", of_torch="0"):
        if nvidia_smi is not None:
            (tmp_path / "bin/nvidia-smi").write_text(f"#!/bin/sh\n{nvidia_smi}\n")
            (tmp_path / "bin/nvidia-smi").chmod(0o755)
        environment = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "LD_LIBRARY_PATH": str(tmp_path)}
        environment |= {"CARDS": cards, "STATUS": status, "OF_TORCH": of_torch, "PYTHONPATH": f"{REPO}:{tmp_path}"}
        done = subprocess.run([sys.executable, "-c", ASKED], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return ask


def test_the_first_that_answers_says_it(said):
    assert said() == ["NVML", "3005", "3009"]  # (1000 + 2) and (2000 + 3), behind the two calls that chose it
    assert said("echo 100; echo 900") == ["nvidia-smi", "1000", "1000"]
    assert said("echo 100; exit 9") == ["NVML", "3005", "3009"]
    assert said("echo '[N/A]'") == ["NVML", "3005", "3009"]


def test_where_nothing_says_it_there_is_no_number(said):
    for cards, status in (("0", "0"), ("2", "3")):
        assert said(cards=cards, status=status) == ["None", "None", "None"]
    assert said(cards="0", of_torch="2") == ["torch", str((6 + 7) << 10), str((6 + 7) << 10)]
