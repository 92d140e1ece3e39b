"""Finding and reading a module's source, and a package's version, on disk: nothing is imported."""

import ast
import sys
from pathlib import Path

from deepseek_v4_sm120.patching import import_hook


class Sources:
    """Module name -> source file and text, as the import system would find it (namespace packages included).

    `stand_ins` maps the name of a top-level module to the package file that serves where the real one is missing.
    """

    def __init__(self, stand_ins: dict[str, str] | None = None):
        self._stand_ins = stand_ins or {}
        self._texts: dict[str, str | None] = {}

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

    def read(self, module: str) -> str | None:
        """Source text of the module, None if it does not exist."""
        if module not in self._texts:
            path = self.path(module)
            self._texts[module] = path.read_text(encoding="utf-8") if path else None
        return self._texts[module]

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


def package_version(package: str, sources: Sources) -> str | None:
    """The version written in the package's own files, else its distribution's; None if neither tells."""
    for module in (f"{package}._version", f"{package}.version", package):
        text = sources.read(module)
        version = _literal_version(text) if text else None
        if version:
            return version
    if sources.path(package) is None:
        return None
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _literal_version(text: str) -> str | None:
    for statement in ast.parse(text).body:  # module level only: a fallback inside an except clause is not the version
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if any(isinstance(t, ast.Name) and t.id == "__version__" for t in targets):
            value = getattr(statement, "value", None)
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                return value.value
    return None
