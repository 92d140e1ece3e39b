#!/usr/bin/env python3
"""Milliseconds of extension.load() and of each launcher's first call, in fresh processes. GPU only.

    python3 bench/load_time.py [FOLDER ..] [--processes 5]

FOLDER is what csrc/build_artifact.py made (default: build/). What compression costs is seen beside a second one, made
with `--nvcc-flags=--compress-mode=none --out FOLDER`. The calls are the quick self-test's: at the first of a launcher
CUDA unpacks its source's kernels and loads them; `later` is the median of the others, also of other shapes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import BuiltinFunctionType

import needs_torch  # noqa: F401

REPO = Path(__file__).resolve().parent.parent


def measure(folder: str) -> dict[str, list[float]]:
    """Milliseconds of each call in this process, by launcher, between two synchronisations."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(f"no GPU: torch {torch.__version__} sees no CUDA device")
    sys.path.insert(0, folder)
    from deepseek_v4_sm120 import OPS
    from deepseek_v4_sm120.ops.shared import extension
    from deepseek_v4_sm120.specs.check import ON_GPU, NotRun

    torch.zeros(1, device="cuda")
    found: dict[str, list[float]] = {}

    def timed(name, function, *arguments, **keywords):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        result = function(*arguments, **keywords)
        torch.cuda.synchronize()
        found.setdefault(name, []).append((time.perf_counter() - begin) * 1e3)
        return result

    def launcher(name, function):
        def call(*arguments, **keywords):
            launches = "stream" in keywords and not torch.cuda.is_current_stream_capturing()
            return timed(name, function, *arguments, **keywords) if launches else function(*arguments, **keywords)

        return call

    module = timed("load", extension.load)
    if not Path(module.__file__).is_relative_to(folder):
        raise SystemExit(f"{folder} is no folder that the build made: {module.__file__} was loaded")
    for name, function in vars(module).copy().items():
        if isinstance(function, BuiltinFunctionType):
            setattr(module, name, launcher(name, function))
    # two sums wait for each other, so neither may be synchronised alone
    for operator in (name for name in OPS if name != "all_reduce"):
        for check in importlib.import_module(f"deepseek_v4_sm120.specs.{operator}").checks(True):
            try:
                if set(ON_GPU) <= set(check.needs):
                    check.run()
            except NotRun:
                continue
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", default=[REPO / "build"])
    parser.add_argument("--processes", type=int, default=5, help="fresh ones for each folder")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child)))
        return 0
    for folder in (f.resolve() for f in options.folders):
        command = [sys.executable, str(Path(__file__).resolve()), "--child", str(folder)]
        runs = []
        for _ in range(options.processes):
            done = subprocess.run(command, text=True, stdout=subprocess.PIPE)
            if done.returncode:
                return done.returncode  # it has said why
            runs.append(json.loads(done.stdout.splitlines()[-1]))
        size = sum(path.stat().st_size for path in (folder / "deepseek_v4_sm120").glob("lib*.so"))
        print(f"\n{folder}, kernels {size / 1e6:.1f} MB, ms, median of {len(runs)} processes\n{'':32}  first  later")
        for name in runs[0]:
            later = [ms for run in runs for ms in run[name][1:]]
            shown = f"{statistics.median(later):5.2f}" if later else ""
            print(f"{name:32} {statistics.median(run[name][0] for run in runs):6.2f}  {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
