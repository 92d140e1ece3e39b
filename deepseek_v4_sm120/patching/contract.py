"""What a target's definition must look like, read from its source by `ast`: the target is not imported.

Used at run time, at the preflight and by the tests over the real wheels, so that all three see the same thing.
"""

import ast
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

ReadSource = Callable[[str], str | None]  # module name -> source text, None if there is no such module
Function = ast.FunctionDef | ast.AsyncFunctionDef

_MAX_REEXPORTS = 5


@dataclass(frozen=True)
class ConsumedKeys:
    """A function taking `**kwargs` (or named parameters) that reads exactly these names."""

    names: tuple[str, ...]

    def violation(self, node: ast.AST) -> str | None:
        if not isinstance(node, Function):
            return f"expected a function, found {_kind(node)}"
        return _difference("consumed keys", set(self.names), consumed_keys(node))


@dataclass(frozen=True)
class Parameters:
    """A function with exactly these parameters, in this order; `*name` and `**name` for the variadic ones."""

    names: tuple[str, ...]

    def violation(self, node: ast.AST) -> str | None:
        if not isinstance(node, Function):
            return f"expected a function, found {_kind(node)}"
        found = parameters(node)
        if found == self.names:
            return None
        unordered = _difference("parameters", set(self.names), set(found))
        return unordered or f"parameters: expected the order {', '.join(self.names)}; found {', '.join(found)}"


@dataclass(frozen=True)
class Bound:
    """A name that the module binds: by assignment, import or definition."""

    def violation(self, node: ast.AST) -> str | None:
        return None


Contract = ConsumedKeys | Parameters | Bound


@dataclass(frozen=True)
class Finding:
    """What checking one target gave: `problem` is None if the contract holds."""

    problem: str | None
    digest: str | None = None


def check(where: str, contract: Contract, caller: str | None, read_source: ReadSource) -> Finding:
    """Check the definition of "module:qualname", and the calls of it in `caller`, against the contract."""
    module, _, qualname = where.partition(":")
    source = read_source(module)
    if source is None:
        return Finding(f"there is no module {module}")
    node = _definition(module, qualname, contract, read_source)
    if node is None:
        return Finding(f"{module} does not define {qualname}")
    digest = digest_of(node)
    problem = contract.violation(node)
    if problem is None and caller is not None:
        problem = _caller_violation(caller, qualname, contract, read_source)
    return Finding(problem, digest)


def find_definition(tree: ast.Module, qualname: str) -> ast.AST | None:
    """The last statement that binds the name at module level (also under `if` and `try`), or in the class it names."""
    body: list[ast.stmt] = tree.body
    found = None
    for name in qualname.split("."):
        found = None
        for statement in _flat(body):
            found = _binding(statement, name) or found
        if found is None:
            return None
        body = getattr(found, "body", [])
    return found


def consumed_keys(function: Function) -> set[str]:
    """Named parameters, and the string keys read from the `**kwargs` parameter by [], get, pop, setdefault or `in`."""
    keys = {name for name in parameters(function) if not name.startswith("*")}
    if function.args.kwarg is None:
        return keys
    kwargs = function.args.kwarg.arg

    def is_kwargs(node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == kwargs

    for node in ast.walk(function):
        key = None
        if isinstance(node, ast.Subscript) and is_kwargs(node.value):
            key = node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_kwargs(node.func.value):
            if node.func.attr in ("get", "pop", "setdefault") and node.args:
                key = node.args[0]
        elif isinstance(node, ast.Compare) and len(node.comparators) == 1 and is_kwargs(node.comparators[0]):
            key = node.left
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            keys.add(key.value)
    return keys


def parameters(function: Function) -> tuple[str, ...]:
    """Parameter names in order, `*args` and `**kwargs` with their stars."""
    args = function.args
    names = [a.arg for a in args.posonlyargs + args.args]
    names += ["*" + args.vararg.arg] if args.vararg else []
    names += [a.arg for a in args.kwonlyargs]
    names += ["**" + args.kwarg.arg] if args.kwarg else []
    return tuple(names)


def passed_keywords(tree: ast.AST, name: str) -> list[set[str]]:
    """The keyword names of every call `name(...)` or `something.name(...)` in the tree; `**x` shows as "**"."""
    calls = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called_name(node.func) == name:
            calls.append({k.arg or "**" for k in node.keywords})
    return calls


def digest_of(node: ast.AST) -> str:
    """Sixteen hex digits that change when the code changes; not with comments, docstrings, formatting, or the Python
    (3.11 to 3.13) that parses it."""
    return hashlib.sha256(_normal_form(node).encode()).hexdigest()[:16]


def _definition(module: str, qualname: str, contract: Contract, read_source: ReadSource) -> ast.AST | None:
    """The definition, followed through `from x import name` where the contract speaks of a function."""
    for _ in range(_MAX_REEXPORTS):
        source = read_source(module)
        node = None if source is None else find_definition(ast.parse(source), qualname)
        if not isinstance(node, ast.ImportFrom) or isinstance(contract, Bound):
            return node
        module = _imported_module(module, node)
        qualname = node.names[0].name
    return None


def _imported_module(module: str, node: ast.ImportFrom) -> str:
    """Absolute name of what `node` imports from; a re-export is read as coming from a package `__init__`."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - node.level + 1]
    return ".".join(base + ([node.module] if node.module else []))


def _caller_violation(caller: str, qualname: str, contract: Contract, read_source: ReadSource) -> str | None:
    source = read_source(caller)
    if source is None:
        return f"there is no module {caller}, which should call {qualname}"
    known = {n for n in getattr(contract, "names", ()) if not n.startswith("*")}
    calls = passed_keywords(ast.parse(source), qualname.rpartition(".")[2])
    if not calls:
        return f"{caller} does not call {qualname} any more"
    unknown = sorted(set().union(*calls) - known) if known else []
    return f"{caller} passes {', '.join(unknown)} to {qualname}, which we do not know" if unknown else None


def _binding(statement: ast.stmt, name: str) -> ast.AST | None:
    if isinstance(statement, Function | ast.ClassDef):
        return statement if statement.name == name else None
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        names = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
        return statement if name in names else None
    if isinstance(statement, ast.Import | ast.ImportFrom):
        for alias in statement.names:
            if (alias.asname or alias.name) == name:  # that one name only: its neighbours are no part of the binding
                return type(statement)(**{**dict(ast.iter_fields(statement)), "names": [alias]})
    return None


def _flat(body: list[ast.stmt]):
    """The statements that run at this level: not those of functions and classes, but those under if, try and with."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for part in ("body", "handlers", "orelse", "finalbody"):
                for child in getattr(statement, part, []):
                    yield from _flat(child.body if isinstance(child, ast.ExceptHandler) else [child])


def _called_name(func: ast.expr) -> str | None:
    return func.id if isinstance(func, ast.Name) else func.attr if isinstance(func, ast.Attribute) else None


def _normal_form(node) -> str:
    """A dump of our own: `ast.dump` differs between Python versions in what it leaves out."""
    if isinstance(node, list):
        return "[" + ",".join(_normal_form(item) for item in node) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.JoinedStr):
        node = ast.JoinedStr(values=[v for v in node.values if not (isinstance(v, ast.Constant) and v.value == "")])
    documented = isinstance(node, Function | ast.ClassDef) and ast.get_docstring(node, clean=False) is not None
    parts = []
    for field, value in ast.iter_fields(node):
        if field == "body" and documented:
            value = value[1:]
        if value is None or value == [] or field in ("ctx", "kind", "type_comment"):
            continue
        parts.append(f"{field}={_normal_form(value)}")
    return f"{type(node).__name__}({','.join(parts)})"


def _difference(what: str, expected: set[str], found: set[str]) -> str | None:
    if expected == found:
        return None
    missing = ", ".join(sorted(expected - found)) or "none"
    extra = ", ".join(sorted(found - expected)) or "none"
    return f"{what}: missing {missing}; unexpected {extra}"


def _kind(node: ast.AST) -> str:
    return {ast.ClassDef: "a class", ast.Assign: "an assignment", ast.AnnAssign: "an assignment"}.get(
        type(node), type(node).__name__
    )
