"""Finds, explains and loads _C, the compiled module, and with it the kernels' library beside it, which it needs.
Standard library only; nothing happens at import.

find(), explain() and describe() read files; only load(), problem() and build_info() open the two. Before that their
sizes and digests are compared with RECORD, which the build writes: a library that is cut off or another one does not
fail to load, it kills the process (SIGBUS). What somebody put into a folder without RECORD is checked for being
complete.
"""

import base64
import csv
import functools
import hashlib
import importlib.util
import json
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import deepseek_v4_sm120
from deepseek_v4_sm120 import RECORD

LIBRARY = "libdeepseek_v4_sm120.so"  # the kernels, for every Python's _C
ARCHS = ("120f",)  # that a build has unless others are asked for; csrc/build_artifact.py says why
_NAME = "deepseek_v4_sm120._C"
_PACKAGE = Path(__file__).resolve().parents[2]
_REMEDY = "copy the folder that the build made again, as a whole, or rebuild it with ./build_docker.sh"
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
        try:
            built = _describe_file(path).get("version")
            fault = _fault(path) or _fault(path.with_name(LIBRARY)) or _absent(path.parent.parent)
        except (OSError, ValueError) as error:
            return f"deepseek_v4_sm120: {path} and the files beside it cannot be read: {error}"
        if built is None or built == deepseek_v4_sm120.__version__:
            return f"deepseek_v4_sm120: {fault}" if fault else None
        return (
            f"deepseek_v4_sm120: {path} was built for version {built}, the Python files beside it are "
            f"{deepseek_v4_sm120.__version__}; rebuild the folder with ./build_docker.sh and mount it as a whole"
        )
    places = " and ".join(map(str, folders()))
    python = f"Python {sys.version_info.major}.{sys.version_info.minor} ({sys.executable})"
    others = sorted(p.name for folder in folders() for p in folder.glob("_C*.so"))
    if others:
        found = f"found {', '.join(others)}, which are for other Pythons"
        remedy = (
            "SGLang's images run 3.12, for which ./build_docker.sh builds in Docker; for another one that has its "
            "headers: python3 csrc/build_artifact.py --python PATH"
        )
    else:
        found = "found no _C*.so at all"
        remedy = (
            "build with ./build_docker.sh and put the folder that it makes (build/) on PYTHONPATH, not the checkout"
        )
    wanted = f"need _C{EXTENSION_SUFFIXES[0]} in {places}"
    return f"deepseek_v4_sm120: no compiled module for {python}: {wanted}, {found}; {remedy}"


def _fault(path: Path) -> str | None:
    """Why this file of the build must not be opened, and what to do, beginning with its path."""
    if not path.is_file():
        return f"{path} is missing: {_REMEDY}"
    status = path.stat()
    damage = _damage(path, status.st_size, status.st_mtime_ns, status.st_ino)
    return f"{path} {damage}" if damage else None


@functools.lru_cache(maxsize=8)
def _damage(path: Path, size: int, *_changes: int) -> str | None:
    """What of a file is not as it was built, and what to do; once per process and state of the file."""
    record = path.parent.parent / RECORD
    if not record.is_file():
        return _incomplete(path, size)
    name = f"{path.parent.name}/{path.name}"
    row = next((row for row in _lines(record) if row and row[0] == name), None)
    if row is None or len(row) != 3:
        return f"was not made by this build: {record} has no such file; {_REMEDY}"
    if str(size) != row[2]:
        return f"has {size} bytes, {record} says {row[2]}: it is cut off, or of another build; {_REMEDY}"
    found = _digest(path)
    if found != row[1]:
        return f"is {found}, {record} says {row[1]}: it is damaged, or of another build; {_REMEDY}"
    return None


def _digest(path: Path) -> str:
    """As RECORD has it."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256") if sys.version_info >= (3, 11) else hashlib.sha256(file.read())
    return "sha256=" + base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()


def stale() -> str | None:
    """Which of the operators' files of a checkout are not those that its build/ was made of, and what to do: what they
    hand to the module there may be what another one takes."""
    path = find()
    if path is None or path.parent == _PACKAGE or not os.access(path.parent.parent / RECORD, os.R_OK):
        return None
    whole = [row for row in _lines(path.parent.parent / RECORD) if len(row) == 3]  # the last may be cut off
    operators = [row for row in whole if row[0].startswith(f"{_PACKAGE.name}/ops/") and row[0].endswith(".py")]
    files = {_PACKAGE.parent / name: digest for name, digest, _ in operators}
    if not (others := [file.name for file, digest in files.items() if not file.is_file() or _digest(file) != digest]):
        return None
    return (
        f"{_PACKAGE.parent} is a checkout, and its build/ was made of other files than its {_few(others)}: calls may "
        "fail or be wrong; build again with ./build_docker.sh, and put the folder build/ itself on PYTHONPATH"
    )


def absent_sources() -> str | None:
    """Which Python files of the package the folder that the build made lacks, and what to do."""
    try:
        return _absent(_PACKAGE.parent, lambda name: name.startswith(f"{_PACKAGE.name}/") and name.endswith(".py"))
    except (OSError, ValueError) as error:
        return f"{_PACKAGE.parent / RECORD} cannot be read ({error}): {_REMEDY}"


def _absent(folder: Path, asked: Callable[[str], bool] = bool) -> str | None:
    """Which files of the build the folder lacks, and what to do."""
    record = folder / RECORD
    if not record.is_file():
        return None
    # what runs; without a digest are pip's
    names = [name for name, *about in _lines(record) if any(about) and not name.startswith(record.parent.name)]
    if not (gone := [name for name in names if asked(name) and not (folder / name).is_file()]):
        return None
    return f"{folder} lacks {_few(gone)} of {record}: {_REMEDY}"


def _few(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{', ...' if names[3:] else ''}"


def _lines(record: Path) -> list[list[str]]:
    """As they are: [file, digest, size], or less of it."""
    with open(record, newline="") as lines:
        return list(csv.reader(lines))


def _incomplete(path: Path, size: int) -> str | None:
    """Whether a 64-bit ELF file ends before its section headers do: they are its last part."""
    header = struct.Struct("<16sHHIQQQIHHHHHH")
    with open(path, "rb") as file:
        begin = file.read(header.size)
    if len(begin) < header.size or begin[:4] != b"\x7fELF":
        return "is no library; rebuild it with ./build_docker.sh"
    fields = header.unpack(begin)
    wanted = fields[6] + fields[11] * fields[12]  # e_shoff + e_shentsize * e_shnum
    if size < wanted:
        return f"has {size} bytes and should have {wanted}: it is cut off; copy it again, or rebuild it"
    return None


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


def problem() -> str | None:
    """Why load() fails, the loader's words too; None where it does not."""
    if (found := explain()) is not None:
        return found
    try:
        load()
    except ImportError as error:
        return str(error)
    return None


def build_info() -> dict:
    """What the loaded module says of itself: version, git_commit, cuda_version, archs, python."""
    return load().build_info()


def archs_for(capabilities: Iterable[tuple[int, int]]) -> str:
    """What csrc/build_artifact.py --archs is told for these cards: SM120's code, and what else they need."""
    others = [f"{major}{minor}a" for major, minor in capabilities if not any(runs_on(a, (major, minor)) for a in ARCHS)]
    return ",".join((*ARCHS, *others))


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether code for `arch` runs on this compute capability: "90a" on 9.0 alone, "120f" on its family, 12.0 and 12.1.

    CUDA Programming Guide, Compute Capabilities, "Family-Specific Compatibility".
    """
    major, minor = divmod(int(arch.removeprefix("sm_").rstrip("af")), 10)
    return capability[0] == major and (capability[1] >= minor if arch.endswith("f") else capability[1] == minor)


def describe() -> dict:
    """The same from the files alone, plus `file` and `problem` (None, or why load() would fail)."""
    path = find()
    info = _describe_file(path) if path is not None else {}
    keys = ("version", "git_commit", "code", "cuda_version", "archs", "glibc")
    return {"file": str(path) if path else None, "problem": explain(), **{key: info.get(key) for key in keys}}
