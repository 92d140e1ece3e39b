"""Finding and reading a module's source, and a package's version, on disk: nothing is imported."""

import ast
import hashlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from deepseek_v4_sm120.patching import import_hook

_RELEASE = re.compile(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-z0-9]+([-_.][a-z0-9]+)*)?", re.IGNORECASE)


@dataclass(frozen=True)
class Parsed:
    """A module's syntax tree, or in words why there is none: "cannot be parsed: line 3: invalid syntax"."""

    tree: ast.Module | None
    problem: str | None = None


def parse(source: bytes | str) -> Parsed:
    """Python source as it is on disk, in the encoding that it declares."""
    try:
        return Parsed(ast.parse(source))
    except SyntaxError as error:  # bad encodings and NUL bytes too
        line = f"line {error.lineno}: " if error.lineno else ""
        return Parsed(None, f"cannot be parsed: {line}{error.msg}")
    except (ValueError, RecursionError) as error:  # NUL bytes before Python 3.12; nested too deeply
        return Parsed(None, f"cannot be parsed: {error}")


def digest(content: bytes) -> str:
    """Thirty-two hex digits of a file's bytes."""
    return hashlib.sha256(content).hexdigest()[:32]


class Sources:
    """Module name -> source file and text, as the import system would find it (namespace packages included).

    `stand_ins` maps the name of a top-level module to the package file that serves where the real one is missing.
    """

    def __init__(self, stand_ins: dict[str, str] | None = None):
        self._stand_ins = stand_ins or {}
        self._parsed: dict[str, Parsed | None] = {}
        self._digests: dict[str, str | None] = {}
        self.problems: list[str] = []  # of what was parsed: one sentence a module

    def path(self, module: str) -> Path | None:
        loaded = getattr(sys.modules.get(module), "__file__", None)
        if loaded and loaded.endswith(".py"):
            return Path(loaded)
        top, *rest = module.split(".")
        for folder in self._folders(top):
            base = Path(folder, *rest)
            for candidate in (base / "__init__.py", base.with_suffix(".py")):
                if (rest or candidate.name == "__init__.py") and candidate.is_file():
                    return candidate
        return self._single_file(top) if not rest else None

    def parse(self, module: str) -> Parsed | None:
        """The module's syntax tree, None if it does not exist. Each is parsed once; `forget` drops them."""
        if module not in self._parsed:
            path = self.path(module)
            self._parsed[module] = None if path is None else _parse_file(path)
            if path is not None and self._parsed[module].problem:
                self.problems.append(f"{module} {self._parsed[module].problem}")
        return self._parsed[module]

    def digest(self, module: str) -> str | None:
        """Of the module's file as it lies there, None if there is none to be read. Each is read once."""
        if module not in self._digests:
            path = self.path(module)
            try:
                self._digests[module] = None if path is None else digest(path.read_bytes())
            except OSError:  # who parses it says why
                self._digests[module] = None
        return self._digests[module]

    def read(self, module: str) -> str | None:
        """Source text of the module, None if it does not exist."""
        path = self.path(module)
        return path.read_text(encoding="utf-8", errors="replace") if path else None

    def forget(self) -> None:
        """Drop the trees, which are some megabytes each: whoever asks again pays again."""
        self._parsed.clear()
        self._digests.clear()

    def _folders(self, top: str) -> list[str]:
        spec = import_hook.find_without_hooks(top)
        if spec is not None:
            return list(spec.submodule_search_locations or ())
        return [str(Path(self._stand_ins[top]).parent)] if top in self._stand_ins else []

    @staticmethod
    def _single_file(top: str) -> Path | None:
        spec = import_hook.find_without_hooks(top)
        origin = spec.origin if spec is not None else None
        return Path(origin) if origin and origin.endswith(".py") else None


def _parse_file(path: Path) -> Parsed:
    try:
        return parse(path.read_bytes())
    except OSError as error:
        return Parsed(None, f"cannot be read: {error.strerror or error}")


def package_version(package: str, sources: Sources) -> str | None:
    """The version written in the package's own files, else its distribution's; None if neither tells. A file that
    cannot be parsed tells none, and is among `sources.problems`."""
    for module in (f"{package}._version", f"{package}.version", package):
        parsed = sources.parse(module)
        version = _literal_version(parsed.tree) if parsed is not None and parsed.tree is not None else None
        if version:
            return version
    if sources.path(package) is None:
        return None
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def tells_release(version: str | None) -> bool:
    """Whether a version says of which release, or build between two, the code is: by PEP 440 as setuptools writes it,
    and not 0.0.0.devN, which is a checkout without tags."""
    return version is not None and _RELEASE.fullmatch(version) is not None and not version.startswith("0.0.0")


def _literal_version(tree: ast.Module) -> str | None:
    for statement in tree.body:  # module level only: a fallback inside an except clause is not the version
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if any(isinstance(t, ast.Name) and t.id == "__version__" for t in targets):
            value = getattr(statement, "value", None)
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                return value.value
    return None
