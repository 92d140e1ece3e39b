"""Builds the emulator: _C of this interpreter, of the artifact's own objects, with the emulator for CUDA's runtime."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent / "csrc")]
import build_artifact  # noqa: E402
from build_results import Results, locked, run  # noqa: E402
from build_wheels import TOOL_WHEELS, private_venv  # noqa: E402

# What nvcc and this compiler round must be the same: nothing is fused that the text does not fuse.
# With -O3 what an instruction does to 32 lanes is done to vectors of them; elsewhere more than -O1 takes longer to
# compile than it is worth.
FLAGS = ("-std=c++20", "-march=native", "-ffp-contract=off", "-fPIC", "-Wall", "-Wextra")
# Each compiled as one, for what all of them include takes as long as each of them; the rest is a third, for two cores.
PRODUCTS = ("products.cpp", "watch.cpp")
LANES = ("arithmetic.cpp", "conversions.cpp", "memory.cpp")
OPTIONS = argparse.Namespace(archs=list(build_artifact.ARCHS), nvcc_flags=build_artifact.NVCC_FLAGS)


@functools.cache
def built() -> tuple[Path, list[Path]]:
    """(the module's file, files of PTX): of the artifact's cache, which is full when the test command comes here."""
    cache, compiler = build_artifact.CACHE, os.environ.get("CXX") or "g++"
    toolkit = build_artifact.find_toolkit(None, cache)
    pybind11 = private_venv(cache, TOOL_WHEELS) / "pybind11/include"
    tools = toolkit.banner + run([compiler, "--version"])
    interpreter = build_artifact.read_interpreter(sys.executable)
    defines = {"DSV4_VERSION": build_artifact.__version__, "DSV4_GIT_COMMIT": "emulator", "DSV4_ARCHS": "emulator"}
    results = Results(cache / "results", build_artifact.CSRC, tools)
    own = Results(cache / "emulator", HERE, tools + processor())
    with locked(cache / "emulator.lock"):  # of all workers of a test run one builds
        objects, bindings = build_artifact.compile_all(
            results, toolkit, compiler, pybind11, [interpreter], OPTIONS, defines
        )

        def compiled(names: tuple[str, ...], level: str) -> Path:
            source = own.text("".join(f'#include "{name}"\n' for name in names))
            command = [compiler, *FLAGS, level, "-I.", "-isystem", toolkit.include, "-x", "c++", "-c", source]
            return own.make(command, own.included(source), ".o")

        rest = {path.name for path in HERE.glob("*.cpp")} - {*PRODUCTS, *LANES}
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            units = ((tuple(sorted(rest)), "-O1"), (LANES, "-O3"), (PRODUCTS, "-O3"))
            emulator = list(pool.map(lambda unit: compiled(*unit), units))
        link = [compiler, "-shared", "-Wl,-Bsymbolic", *objects, *bindings, *emulator]
        module = own.make([*link, "-ldl", "-lrt", "-lpthread"], [], ".so")
    folders = [path.with_name(f"{path.name}.kept") for path in objects]
    return module, [text for folder in folders if folder.is_dir() for text in chosen(folder)]


def chosen(folder: Path) -> list[Path]:
    """Of a unit that is compiled for each of a family's chips, that of RTX PRO 6000; of one alone nvcc says no name."""
    return sorted(folder.glob("*compute_120*.ptx")) or sorted(folder.glob("*.ptx"))


def processor() -> str:
    """What -march=native may depend on: a cache may be on a disk of two machines."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
