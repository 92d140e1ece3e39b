"""Finds, explains and loads _C, the compiled module. Standard library only; nothing happens at import.

find(), explain() and describe() read file names and build_info.json; only load() and build_info() open the library.
"""

import importlib.util
import json
import sys
import threading
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import deepseek_v4_sm120

_NAME = "deepseek_v4_sm120._C"
_PACKAGE = Path(__file__).resolve().parent
_lock = threading.Lock()


def folders() -> list[Path]:
    """Where _C is looked for: beside this file; in a source checkout also in its build/ folder."""
    checkout = _PACKAGE.parent
    built = [checkout / "build" / _PACKAGE.name] if (checkout / "csrc").is_dir() else []
    return [_PACKAGE, *built]


def find() -> Path | None:
    """The module's file for this interpreter, or None; explain() says why."""
    candidates = (folder / f"_C{EXTENSION_SUFFIXES[0]}" for folder in folders())
    return next((path for path in candidates if path.is_file()), None)


def _describe_file(path: Path) -> dict:
    beside = path.with_name("build_info.json")
    return json.loads(beside.read_text()) if beside.is_file() else {}


def explain() -> str | None:
    """Why _C cannot be loaded, as far as the files tell, and what to do; None when nothing is wrong."""
    path = find()
    if path is not None:
        built = _describe_file(path).get("version")
        if built is None or built == deepseek_v4_sm120.__version__:
            return None
        return (
            f"deepseek_v4_sm120: {path} was built for version {built}, the Python files beside it are "
            f"{deepseek_v4_sm120.__version__}; rebuild the folder with ./build_docker.sh and mount it as a whole"
        )
    places = " and ".join(map(str, folders()))
    python = f"Python {sys.version_info.major}.{sys.version_info.minor} ({sys.executable})"
    others = sorted(p.name for folder in folders() for p in folder.glob("_C*.so"))
    if others:
        found = f"found {', '.join(others)}, which are for other Pythons"
        remedy = f"rebuild with: python3 csrc/build_artifact.py --python {sys.executable}"
    else:
        found = "found no _C*.so at all"
        remedy = (
            "build with ./build_docker.sh and put the folder that it makes (build/) on PYTHONPATH, not the checkout"
        )
    wanted = f"need _C{EXTENSION_SUFFIXES[0]} in {places}"
    return f"deepseek_v4_sm120: no compiled module for {python}: {wanted}, {found}; {remedy}"


def load() -> ModuleType:
    """_C, loaded once. ImportError says which file was found, for which Python it is, and how to rebuild."""
    if (module := sys.modules.get(_NAME)) is not None:
        return module
    with _lock:
        if (module := sys.modules.get(_NAME)) is not None:
            return module
        if (problem := explain()) is not None:
            raise ImportError(problem, name=_NAME)
        path = find()
        spec = importlib.util.spec_from_file_location(_NAME, path)
        try:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except ImportError as error:
            raise ImportError(
                f"deepseek_v4_sm120: {path} does not load: {error}; rebuild it for this system with ./build_docker.sh",
                name=_NAME,
                path=str(path),
            ) from error
        if (built := module.build_info()["version"]) != deepseek_v4_sm120.__version__:
            raise ImportError(
                f"deepseek_v4_sm120: {path} is version {built}, the Python files are {deepseek_v4_sm120.__version__}; "
                "rebuild the folder with ./build_docker.sh and mount it as a whole",
                name=_NAME,
                path=str(path),
            )
        sys.modules[_NAME] = deepseek_v4_sm120._C = module
        return module


def build_info() -> dict:
    """What the loaded module says of itself: version, git_commit, cuda_version, archs, python."""
    return load().build_info()


def describe() -> dict:
    """The same from the files alone, plus `file` and `problem` (None, or why load() would fail)."""
    path = find()
    info = _describe_file(path) if path is not None else {}
    keys = ("version", "git_commit", "cuda_version", "archs", "glibc")
    return {"file": str(path) if path else None, "problem": explain(), **{key: info.get(key) for key in keys}}
