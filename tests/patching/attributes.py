"""What our adapters read of SGLang's objects, by `ast`, and what a release's classes define. Nothing is imported.

reads(adapter)      every attribute that one of FILES reads, by the words it is written with
Release.defines     the names that a class (with its bases), a function's parameter or a module has in a wheel
"""

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from deepseek_v4_sm120 import sglang_patches
from deepseek_v4_sm120.sglang_patches import adapters, fixes
from deepseek_v4_sm120.sglang_patches.table import TABLE
from tests.patching.wheels import WheelSources

PLACES = ((adapters, "[!_]*.py"), (fixes, "[!_]*.py"), (sglang_patches, "scope.py"))
FILES = {  # a module's name -> (its package, its file)
    path.stem: (package.__name__, path)
    for package, pattern in PLACES
    for path in Path(package.__file__).parent.glob(pattern)
}
# what several of FILES share: read for each of them that imports it, as if it stood there
SHARED = {"prompt_messages": Path(sglang_patches.__file__).with_name("prompt_messages.py")}
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
# what a class has of a base that is not SGLang's
OF_BASES = {"Module": frozenset(dir(torch.nn.Module())), "NamedTuple": frozenset(dir(tuple)) | {"_replace"}}


@dataclass(frozen=True, order=True)
class Read:
    """`of.name` in an adapter's function. required: it is not asked for with a default, or whether it is there."""

    of: str
    name: str
    required: bool
    function: str
    line: int
    module: str


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse((SHARED.get(module) or FILES[module][1]).read_text())


@functools.cache
def modules_of(adapter: str) -> tuple[str, ...]:
    """An adapter, and what is SHARED that it imports."""
    froms = [node for node in ast.walk(tree_of(adapter)) if isinstance(node, ast.ImportFrom)]
    names = {node.module.rpartition(".")[2] for node in froms} | {alias.name for node in froms for alias in node.names}
    return adapter, *(module for module in SHARED if module in names)


@functools.cache
def reads(adapter: str) -> frozenset[Read]:
    return frozenset().union(*(reads_of(tree_of(module), module) for module in modules_of(adapter)))


def reads_of(tree: ast.Module, module: str) -> frozenset[Read]:
    return frozenset(_reads(tree, module, "", False))


@functools.cache
def imported(adapter: str) -> frozenset[str]:
    """Names that an adapter imports."""
    nodes = (node for module in modules_of(adapter) for node in ast.walk(tree_of(module)))
    imports = (node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))
    return frozenset((alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names)


def _reads(node: ast.AST, module: str, inside: str, is_own: bool) -> Iterator[Read]:
    """inside: the outermost function; is_own: in a method of a class of the adapter's, where self is ours."""
    for child in ast.iter_child_nodes(node):
        found = None
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Load):
            found = child.value, child.attr, True
        elif isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and len(child.args) > 1:
            asked = child.args[1]
            if child.func.id in ("getattr", "hasattr") and isinstance(asked, ast.Constant):
                found = child.args[0], asked.value, child.func.id == "getattr" and len(child.args) == 2
        if found is not None:
            of = ast.unparse(found[0])
            if not (is_own and of.partition(".")[0] == "self"):
                yield Read(of, *found[1:], inside, child.lineno, module)
        name = child.name if isinstance(child, FUNCTION) and not inside else inside
        yield from _reads(child, module, name, is_own or isinstance(child, ast.ClassDef))


@functools.cache
def classes_of_self(adapter: str, function: str) -> list[tuple[str, str]]:
    """(releases, "module:Class") of the methods that `replace_*` functions of this adapter stand for, which are
    `function`, or call it or are made by it."""
    callers = {
        name
        for node in tree_of(adapter).body
        if isinstance(node, ast.FunctionDef | ast.Assign)
        and any(isinstance(inner, ast.Name) and inner.id == function for inner in ast.walk(node))
        for name in ([node.name] if isinstance(node, ast.FunctionDef) else map(ast.unparse, node.targets))
    }
    names = {f"{FILES[adapter][0]}.{adapter}:{name}" for name in {*callers, function}}
    targets = [target for patch in TABLE.patches for target in patch.targets if target.replacement in names]
    return [(t.sglang, f"{t.module}:{t.qualname.rpartition('.')[0]}") for t in targets if "." in t.qualname]


class Release:
    """A wheel's definitions, found in the text of its modules: parsing these files would take half a minute."""

    def __init__(self, wheel: Path):
        self._sources = WheelSources(wheel)
        self._texts: dict[str, str | None] = {}
        self._known: dict[str, frozenset[str] | None] = {}

    def text(self, module: str) -> str | None:
        if module not in self._texts:
            self._texts[module] = self._sources.read(module)
        return self._texts[module]

    def defines(self, where: str) -> frozenset[str] | None:
        """The names that an object has; None where the release does not have what defines it. where:

        "module:Class"                 an object of this class, or the class itself
        "module:Class.method(layer)"   what this function (or method) gives its parameter
        "module"                       the module
        """
        if where not in self._known:
            module, _, qualname = where.partition(":")
            found = None if self.text(module) is None else self._defines(module, qualname)
            self._known[where] = None if found is None else frozenset(found)
        return self._known[where]

    def _defines(self, module: str, qualname: str) -> Iterator[str] | None:
        if not qualname:
            return _top(self.text(module))
        qualname, _, parameter = qualname.rstrip(")").partition("(")
        outer, _, method = qualname.partition(".")
        block, module = self._definition(module, outer)
        if method and block is not None:
            block = _block(block, rf"    (?:async )?def {method}\b", r"^ {0,4}[^\s)]")
        if block is None:
            return None
        return _given(block, parameter) if parameter else self._members(module, block)

    def _members(self, module: str, block: str) -> Iterator[str]:
        yield from _own(block)
        yield from _given(block, "self")
        (bases,) = re.match(r"class \w+(?:\(([^)]*)\))?", block).groups(default="")
        for base in re.findall(r"[\w.]+", bases):
            name = base.rpartition(".")[2]
            yield from OF_BASES.get(name, ())
            found, where = self._definition(module, name)
            if found is not None and found is not block:
                yield from self._members(where, found)

    def _definition(self, module: str, name: str) -> tuple[str | None, str]:
        """The text of a class or function at the top of a module, and its module: followed through imports."""
        for _ in range(5):
            text = self.text(module)
            if text is None:
                break
            block = _block(text, rf"(?:class|def|async def) {name}\b", r"^[^\s#)\]}]")
            if block is not None:
                return block, module
            imported = _imports_of(text).get(name)
            if imported is None:
                break
            up, path, name = imported
            parts = module.split(".")[: -len(up)] if up else []
            module = ".".join([*parts, *([path] if path else [])])
        return None, module


def _block(text: str, start: str, end: str) -> str | None:
    """The last piece of a text that begins and ends so."""
    found = list(re.finditer(f"^{start}", text, re.MULTILINE))
    if not found:
        return None
    behind = re.compile(end, re.MULTILINE).search(text, found[-1].end())
    return text[found[-1].start() : behind.start() if behind else len(text)]


@functools.lru_cache(maxsize=512)
def _imports_of(text: str) -> dict[str, tuple[str, str, str]]:
    """Name that `from .. import ..` brings -> (dots, module, its name there), of the first that brings it."""
    found = {}
    for up, path, names in re.findall(r"^\s*from (\.*)(\S*) import (\([^)]*\)|[^(\n]*)", text, re.MULTILINE):
        for given, known in re.findall(r"(\w+)(?:\s+as\s+(\w+))?", names):
            found.setdefault(known or given, (up, path, given))
    return found


def _top(text: str) -> Iterator[str]:
    """Names that a module binds at its top."""
    for pair in re.findall(r"^(?:async def|def|class) (\w+)|^(\w+)\s*(?::[^=\n]*)?=[^=]", text, re.MULTILINE):
        yield from filter(None, pair)
    for names in re.findall(r"^from \S+ import (\([^)]*\)|[^(\n]*)", text, re.MULTILINE):
        yield from re.findall(r"\w+", names)


# The text is all that these ask, and most classes are those of the release before.
@functools.cache
def _own(block: str) -> tuple[str, ...]:
    """What a class's body binds."""
    pairs = re.findall(r"^    (?:async )?def (\w+)|^    (\w+)\s*(?::|=[^=])", block, re.MULTILINE)
    return tuple(name for pair in pairs for name in pair if name)


@functools.cache
def _given(block: str, name: str) -> tuple[str, ...]:
    """Attributes that a piece of code sets on what it calls `name`, or registers with it."""
    targets = rf"((?:\b{name}\.\w+\s*,\s*)*\b{name}\.\w+)(?:\s*,?\s*\)|\s*:[^=\n]*)?\s*=(?!=)"
    set_there = [one for several in re.findall(targets, block) for one in re.findall(rf"{name}\.(\w+)", several)]
    return (
        *set_there,
        *re.findall(rf"^\s*{name}\.(\w+)\s*:", block, re.MULTILINE),
        *re.findall(rf"\b{name}\.(?:register_\w+|add_module)\(\s*\"(\w+)\"", block),
        *re.findall(rf"\bsetattr\(\s*{name},\s*\"(\w+)\"", block),
    )
