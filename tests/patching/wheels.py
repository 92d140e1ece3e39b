"""The releases that reviewed.json knows, and their wheels: fetched once from PyPI, read in place, parsed once.

python3 -m tests.patching.wheels        fetches all that is not in the cache
"""

import ast
import contextlib
import fcntl
import functools
import os
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version

from deepseek_v4_sm120.patching import contract, ledger
from deepseek_v4_sm120.patching.sources import Parsed, digest, parse
from deepseek_v4_sm120.sglang_patches.table import LEDGER

RELEASES = tuple(ledger.read(LEDGER).releases)
REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements-sglang.txt"
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


def every_release(first: str = RELEASES[0]):
    """Parametrizes a test with `version`: all releases from `first` on, one after the other within a file."""
    return pytest.mark.parametrize("version", [r for r in RELEASES if since(r, first)], scope="module")


def since(version: str, first: str) -> bool:
    """Whether a release is `first` or a later one, its post releases included."""
    return Version(version) >= Version(first)


def cache_folder() -> Path:
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("DSV4_WHEEL_CACHE") or user_cache / "deepseek-v4-sm120" / "wheels")


@contextlib.contextmanager
def in_turn(name: str):
    """The folder of the cache, while no other process is at the same."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


@functools.cache
def fetch(version: str) -> Path:
    """The wheel's file; from PyPI where the cache does not have it."""
    with in_turn(version) as folder:
        if not list(folder.glob(f"sglang-{version}-*.whl")):
            command = [*PIP, "download", "--no-deps", "--only-binary=:all:", "--python-version", "3.12"]
            for glibc in (34, 28, 17):
                command += ["--platform", f"manylinux_2_{glibc}_x86_64"]
            words = [*command, "--dest", str(folder), f"sglang=={version}"]
            done = subprocess.run(words, capture_output=True, text=True)
            assert done.returncode == 0, f"cannot fetch the wheel of SGLang {version}: {done.stderr}"
        (wheel,) = folder.glob(f"sglang-{version}-*.whl")
        return wheel


@functools.cache
def unpacked(version: str) -> Path:
    """The wheel's folder, for imports; kept beside the wheels with what Python compiles there."""
    wheel = fetch(version)
    folder = wheel.with_name(f"{wheel.stem}-unpacked")
    with in_turn(version):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=wheel.parent) as fresh, zipfile.ZipFile(wheel) as opened:
                members = [m for m in opened.namelist() if not m.startswith("sglang/multimodal_gen/")]
                opened.extractall(f"{fresh}/whole", members)
                os.rename(f"{fresh}/whole", folder)
    return folder


def packages() -> Path:
    """The folder of the packages that the wheels need to be imported."""
    digest = zlib.crc32(REQUIREMENTS.read_bytes())
    with in_turn("packages") as wheels:
        folder = wheels.parent / f"sglang-packages-{sys.version_info.minor}-{digest:08x}"
        if not (folder / "complete").exists():
            command = [*PIP, "install", "--upgrade", "--no-compile", "--target", str(folder), "-r", str(REQUIREMENTS)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            (folder / "complete").touch()
    return folder


@functools.cache
def archive(wheel: Path) -> zipfile.ZipFile:
    _archives.append(zipfile.ZipFile(wheel))
    return _archives[-1]


_archives: list[zipfile.ZipFile] = []


def open_anew() -> None:
    """In a fork, which would share the archives' places with the others."""
    for one in _archives:
        one.fp = open(one.filename, "rb")  # noqa: SIM115  its own to close


os.register_at_fork(after_in_child=open_anew)


@functools.cache
def members(wheel: Path) -> frozenset[str]:
    return frozenset(archive(wheel).namelist())


def content(wheel: Path, member: str) -> str:
    return archive(wheel).read(member).decode()


def identity(wheel: Path, member: str) -> tuple[str, int, int]:
    """What only files of the same text have in common, from the archive's index: most are as in the release before."""
    info = archive(wheel).getinfo(member)
    return member, info.CRC, info.file_size


def parsed(wheel: Path, member: str) -> Parsed:
    key = identity(wheel, member)
    _wheels.setdefault(key, wheel)
    return _parsed(key)


_wheels: dict[tuple[str, int, int], Path] = {}  # where each text was first asked for


@functools.lru_cache(maxsize=160)  # of two releases: tests that are grouped by releases, or compare two, parse once
def _parsed(key: tuple[str, int, int]) -> Parsed:
    return parse(content(_wheels[key], key[0]))


def tree(wheel: Path, module: str) -> ast.Module:
    """A module's syntax tree, which all tests share: transform copies."""
    return WheelSources(wheel).parse(module).tree


def definition(wheel: Path, module: str, qualname: str) -> ast.AST | None:
    """contract.find_definition in a module, which tests share likewise; None where it has none. A function's or a
    method's lines alone are parsed where they are told by the text."""
    return _definition(_text_of(wheel, module), qualname)


@functools.cache
def _text_of(wheel: Path, module: str) -> tuple[str, int, int]:
    key = identity(wheel, str(WheelSources(wheel).path(module)))
    _wheels.setdefault(key, wheel)
    return key


@functools.lru_cache(maxsize=2000)
def _definition(key: tuple[str, int, int], qualname: str) -> ast.AST | None:
    lines = lines_of(_text(key), qualname)
    return contract.find_definition(_parsed(key).tree if lines is None else lines, qualname)


@functools.lru_cache(maxsize=8)
def _text(key: tuple[str, int, int]) -> str:
    return content(_wheels[key], key[0])


def lines_of(text: str, qualname: str) -> ast.Module | None:
    """A module of nothing but a function, or a class with nothing but a method, at its lines' numbers, or of nothing
    where the text has no such word; None where the name is bound a second time, in another way or place, or its lines
    do not stand for themselves."""
    outer, _, method = qualname.rpartition(".")
    if method not in text:
        return ast.Module([], [])
    begin, end = 0, len(text)
    for depth, name in enumerate(filter(None, (outer, method))):
        found = [line for line in lines_with(text, name, begin, end) if binding(name).search(text[slice(*line)])]
        if len(found) != 1 or not re.match(rf"{'    ' * depth}(async def|def|class) ", text[slice(*found[0])]):
            return None
        begin, end = found[0][0], end_of(text, found[0][1], end, depth)
    begin = with_decorators(text, begin, "    " * bool(outer))
    above = text.count("\n", 0, begin)
    head = "\n" * (above - 1) + f"class {outer}:\n" if outer else "\n" * above
    try:
        return ast.parse(head + text[begin:end])
    except SyntaxError:
        return None


@functools.cache
def binding(name: str) -> re.Pattern:
    """A line that may bind the name: definition, assignment, import."""
    ways = (
        *(
            rf"(?:async def|def|class)[ \t]+{name}\b",
            rf"(?:from|import)\b.*\b{name}\b",
            rf"(?:[\w.]+ as )?{name},?[ \t]*$",
        ),
        rf"(?:[\w*]+,[ \t]*)*{name}[ \t]*(?:,[^=(]*|:[^=]*)?=(?!=)",
    )
    return re.compile(rf"^[ \t]*(?:{'|'.join(ways)})")


def lines_with(text: str, word: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each line that has it."""
    at = text.find(word, begin, end)
    while at >= 0:
        first, last = text.rfind("\n", 0, at) + 1, text.find("\n", at)
        yield first, last if last >= 0 else len(text)
        at = text.find(word, last, end) if last >= 0 else -1


def end_of(text: str, begin: int, end: int, depth: int) -> int:
    """Where the next statement begins that is no deeper; a bracket closes one, a comment is none."""
    following = re.compile(rf"\n {{0,{4 * depth}}}[^\s#)\]}}]").search(text, begin, end)
    return following.start() + 1 if following else end


def with_decorators(text: str, begin: int, indent: str) -> int:
    """Where the decorators begin that stand right above."""
    above = text[max(0, text.rfind("\n\n", 0, begin)) : begin].splitlines(keepends=True)
    size, found = 0, 0
    for line in reversed(above):
        if not re.match(rf"{indent}[@#)\s]", line):
            break
        size += len(line)
        found = size if line.startswith(f"{indent}@") else found
    return begin - found


def built(version: str) -> str:
    """The day on which a release's wheel was packed, from its archive: yyyy-mm-dd."""
    wheel = fetch(version)
    (metadata,) = [m for m in members(wheel) if m.startswith("sglang-") and m.endswith(".dist-info/METADATA")]
    year, month, day, *_ = archive(wheel).getinfo(metadata).date_time
    return f"{year}-{month:02}-{day:02}"


class WheelSources:
    """What patching.sources.Sources is for an installed tree, for a wheel: only the members asked for are unpacked."""

    def __init__(self, wheel: Path, stand_ins: dict[str, str] | None = None):
        self.wheel, self.members = wheel, members(wheel)
        self.stand_ins = stand_ins or {}
        self.problems: list[str] = []
        self._identities: dict[str, object] = {}

    def path(self, module: str) -> Path | None:
        top, *rest = module.split(".")
        if top in self.stand_ins:
            base = Path(self.stand_ins[top]).parent.joinpath(*rest)
            return next((p for p in (base / "__init__.py", base.with_suffix(".py")) if p.is_file()), None)
        base = module.replace(".", "/")
        return next((Path(m) for m in (f"{base}/__init__.py", f"{base}.py") if m in self.members), None)

    def parse(self, module: str) -> Parsed | None:
        path = self.path(module)
        if path is None:
            return None
        return parse(path.read_bytes()) if path.is_absolute() else parsed(self.wheel, str(path))

    def digest(self, module: str) -> str | None:
        """None: an engine that asks a wheel shall parse it, whatever known_files/ has (`file_digest`)."""
        return None

    def file_digest(self, module: str) -> str | None:
        """Of the file as a wheel has it; none of ours, which are in no wheel."""
        path = self.path(module)
        is_in_it = path is not None and not path.is_absolute()
        return digest(archive(self.wheel).read(str(path))) if is_in_it else None

    def read(self, module: str) -> str | None:
        path = self.path(module)
        if path is None:
            return None
        return path.read_text() if path.is_absolute() else content(self.wheel, str(path))

    def forget(self) -> None:
        pass

    def check(self, where, expected: contract.Contract, caller: str | None) -> tuple[contract.Finding, frozenset[str]]:
        """contract.check, and the modules that it reads. It asks nothing but their text: where that of all is what it
        was in another release, so is the answer."""
        answers = _answers.setdefault((where, expected, caller), [])
        for read, found in answers:
            if all(self.identity(module) == was for module, was in read.items()):
                return found, frozenset(read)
        read = {}

        def noted(module: str) -> Parsed | None:
            read[module] = self.identity(module)
            return self.parse(module)

        answers.append((read, _check(where, expected, caller, noted)))
        return answers[-1][1], frozenset(read)

    def identity(self, module: str) -> object:
        """What two files of the same text have in common; None of what is not there."""
        if module not in self._identities:
            path = self.path(module)
            is_in_it = path is not None and not path.is_absolute()
            self._identities[module] = identity(self.wheel, str(path)) if is_in_it else path
        return self._identities[module]


def check_once(where, expected, caller, parse):
    """contract.check: of wheels each question once a text, whichever engine asks."""
    if getattr(parse, "__func__", None) is not WheelSources.parse:
        return _check(where, expected, caller, parse)
    return parse.__self__.check(where, expected, caller)[0]


_check = contract.check
_answers: dict[tuple, list[tuple[dict[str, object], contract.Finding]]] = {}


if __name__ == "__main__":
    for release in RELEASES:
        fetch(release)
    packages()
