"""What the build takes from PyPI: by version, and by the digest of each file, so that what compiles the kernels is the
same bytes for everybody, whatever index or mirror they come from. Nothing of it is run while it is installed.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import sysconfig
from pathlib import Path

from build_results import locked, run, say

# as a requirements file has them: x86-64's file, then aarch64's
TOOL_WHEELS = ("pybind11==3.0.4 --hash=sha256:961720ee652da51d531b7b2451a6bd2bc042b0106e6d9baa48ecb7d58034ce63",)
CUDA_WHEELS = (
    "nvidia-cuda-nvcc==13.0.88 --hash=sha256:56fe502eb77625a12f25172caa3cdddb4e4c8ba2c8c17dba44b164761b380f03"
    " --hash=sha256:c7ff28f86a24effdc6c034fa15230c549a273e4771b10a7fec14996f8cf3307f",
    "nvidia-cuda-crt==13.0.88 --hash=sha256:2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4"
    " --hash=sha256:ee2ea2a97073e02ee62bb27841f437332be2c248e3eac013df07997ada39c003",
    "nvidia-nvvm==13.0.88 --hash=sha256:c5f41ffeb6466944a026dfa5317d7d85355c119bbec279205d22f1869d1054e0"
    " --hash=sha256:c4376a291d72d22a315d9d2f69bdae8f8cd83a627f75bad395cee49a0fe65dc1",
    "nvidia-cuda-runtime==13.0.96 --hash=sha256:7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548"
    " --hash=sha256:ef9bcbe90493a2b9d810e43d249adb3d02e98dd30200d86607d8d02687c43f55",
    "nvidia-cuda-cccl==13.0.85 --hash=sha256:e0da7ad981f3a8aff08241b5bfc1af868742a63e2762f53a5171c492ef242649"
    " --hash=sha256:6f0203e29fed809ee2b7fe9b1344df66ecab990c37d6a2e0e189b26d6c97ed7c",
)


def private_venv(cache: Path, wheels: tuple[str, ...]) -> Path:
    """site-packages of a venv under the cache with exactly these wheels; a finished one is used again, by the digests
    too: one that was installed when others, or none, were asked for is another."""
    names = [wheel.partition(" ")[0] for wheel in wheels]
    digest = hashlib.sha256(" ".join((sys.version, *wheels)).encode()).hexdigest()[:12]
    venv = cache / f"venv-{digest}"
    with locked(venv.with_suffix(".lock")):
        if not (venv / "complete").exists():
            say(f"installing {', '.join(names)} into {venv}")
            shutil.rmtree(venv, ignore_errors=True)
            run([sys.executable, "-m", "venv", venv])
            (venv / "requirements.txt").write_text("\n".join(wheels))
            pip = [venv / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
            run([*pip, "--only-binary=:all:", "--require-hashes", "-r", venv / "requirements.txt"])
            (venv / "complete").touch()
    return Path(sysconfig.get_path("purelib", "venv", vars={"base": str(venv), "platbase": str(venv)}))  # not Debian's
