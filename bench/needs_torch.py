"""Imported by benchmarks in front of torch: where that is missing, `--help` works, and all else ends in one line."""

from __future__ import annotations

import sys
from importlib import util
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import MagicMock

ABSENT = ("torch", "triton")  # what a module names at its import, and no option of a benchmark hangs on


class _StandIns(MetaPathFinder, Loader):
    """Modules that have every name, for a process that prints its help and ends."""

    def find_spec(self, name, path=None, target=None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in ABSENT else None

    def create_module(self, spec: ModuleSpec) -> MagicMock:
        return MagicMock(name=spec.name)

    def exec_module(self, module) -> None:
        pass


if util.find_spec("torch") is None:
    if not {"-h", "--help"} & set(sys.argv[1:]):
        program = Path(sys.argv[0]).name
        raise SystemExit(f"{program}: torch is not installed for {sys.executable}; run this in SGLang's image")
    sys.meta_path.append(_StandIns())
