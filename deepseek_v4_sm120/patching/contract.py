"""What a target's definition must look like, read from its source by `ast`: the target is not imported.

Used at run time, at the preflight and by the tests over the real wheels, so that all three see the same thing.
"""

import ast
import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from deepseek_v4_sm120.patching.sources import Parsed

Parse = Callable[[str], "Parsed | None"]  # module name -> its syntax tree, None if there is no such module
Function = ast.FunctionDef | ast.AsyncFunctionDef

_MAX_REEXPORTS = 5
# Decorators that leave alone what a function is called with and what it gives, by their last name
_TRANSPARENT = ("compile", "disable", "inference_mode", "no_grad", "override")
HANDED_THROUGH = "..."  # as a default in Parameters
_PLATFORMS = ("Amd", "AMD", "Hip", "HIP", "Rocm", "Npu", "NPU", "Ascend", "Xpu", "XPU", "Cpu", "CPU", "Musa", "MUSA")
# (is async, yields) -> what it is
_CALLED = {
    (False, False): "a plain function",
    (False, True): "a generator",
    (True, False): "an async function",
    (True, True): "an async generator",
}


@dataclass(frozen=True)
class ConsumedKeys:
    """A plain function taking `**kwargs` (or named parameters) that reads exactly these names."""

    names: tuple[str, ...]

    def violation(self, node: ast.AST) -> str | None:
        if not isinstance(node, Function):
            return f"expected a function, found {_kind(node)}"
        if node.args.posonlyargs:
            return f"parameters: {node.args.posonlyargs[0].arg} is positional-only, expected keywords"
        return _how_it_is_called(node) or _difference("consumed keys", set(self.names), consumed_keys(node))


@dataclass(frozen=True)
class Parameters:
    """A plain function with exactly these parameters, in this order, each as `def` writes it without a type.

    "x"           no default: our replacement must be given it
    "norm=None"   this default: our replacement fills it in itself (or the function has none, and is always given it)
    "norm=..."    any default or none: our replacement hands through what it is given
    "*", "/"      what follows is keyword-only, what precedes positional-only; "*name" and "**name" the variadic ones

    further: which parameters may follow, all handed through: None, "any" or "keyword-only".
    is_generator, is_async: the function is one that yields, that is awaited, or both; so is what stands for it.
    imported: the module has the name from another one, and is the only one for which it is replaced.
    overridden_by: subclasses in its module that have a method of their own in its place, which stays.
    """

    signature: tuple[str, ...]
    further: Literal["any", "keyword-only"] | None = None
    is_generator: bool = False
    is_async: bool = False
    imported: bool = field(default=False, repr=False)  # known_files/ knows a question by its repr
    overridden_by: tuple[str, ...] = field(default=(), repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Without defaults and markers, the variadic ones with their stars."""
        return tuple(one.name for one in self.expected)

    @functools.cached_property
    def expected(self) -> "tuple[Parameter, ...]":
        function = ast.parse(f"def f({', '.join(self.signature)}): pass").body[0]
        return described_parameters(function)

    def violation(self, node: ast.AST) -> str | None:
        if not isinstance(node, Function):
            return f"expected a function, found {_kind(node)}"
        expected, found = self.expected, described_parameters(node)
        rest = found[len(expected) :] if self.further else ()
        found = found[: len(found) - len(rest)]
        return (
            _how_it_is_called(node, (self.is_async, self.is_generator))
            or _order_violation(tuple(p.name for p in expected), tuple(p.name for p in found))
            or next(filter(None, map(Parameter.violation, expected, found)), None)
            or (_no_positional(rest) if self.further == "keyword-only" else None)
        )


@dataclass(frozen=True)
class Parameter:
    """One parameter of a definition; `default` is its source text, None where it has none."""

    name: str
    kind: str
    default: str | None

    def violation(self, found: "Parameter") -> str | None:
        """What is different in `found`, the host's parameter of the same name."""
        if found.kind != self.kind:
            return f"parameters: {self.name} is {found.kind}, expected {self.kind}"
        if self.default == HANDED_THROUGH or found.default in (None, self.default):
            return None
        if self.default is None:
            return f"parameters: {self.name} may be left out (it is {found.default} then), and we do not know that"
        return f"parameters: the default of {self.name} is {found.default}, expected {self.default}"


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


def check(where: str, contract: Contract, caller: str | None, parse: Parse) -> Finding:
    """Check the definition of "module:qualname", and the calls of it in `caller`, against the contract."""
    module, _, qualname = where.partition(":")
    node, problem = definition(module, qualname, contract, parse)
    if node is None:
        return Finding(problem)
    problem = contract.violation(node) or _overridden(module, qualname, contract, parse)
    if problem is None and caller is not None:
        problem = _caller_violation(caller, qualname, contract, parse)
    return Finding(problem, digest_of(node))


def definition(module: str, qualname: str, contract: Contract, parse: Parse) -> tuple[ast.AST | None, str | None]:
    """(the definition, None) or (None, why there is none). Followed through `from x import name` and `name = other`
    where the contract speaks of a function that its module imports; another one that is found so has been moved, and
    whoever calls it by its new place or name would have the original."""
    first, wanted = module, qualname
    for _ in range(_MAX_REEXPORTS):
        parsed = parse(module)
        if parsed is None and module == first:
            return None, f"there is no module {module}"
        if parsed is not None and parsed.problem:
            return None, f"{module} {parsed.problem}"
        node = None if parsed is None else find_definition(parsed.tree, qualname)
        if isinstance(contract, Bound) and node is not None:
            return node, None
        if isinstance(node, ast.ImportFrom):
            module, qualname = _imported_module(module, node), node.names[0].name
        elif _is_alias(node) and "." not in qualname and node.value.id != qualname:
            qualname = node.value.id
        elif node is None:
            break
        elif (module, qualname) == (first, wanted) or getattr(contract, "imported", False):
            return node, None
        else:
            return None, f"{wanted} of {first} is {module}:{qualname} now, and who calls that has the original"
    return None, f"{first} does not define {wanted}"


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
    return tuple(one.name for one in described_parameters(function))


def described_parameters(function: Function) -> tuple[Parameter, ...]:
    """The parameters in order, with their kinds and the source text of their defaults."""
    args = function.args
    positional = args.posonlyargs + args.args
    defaults = [None] * (len(positional) - len(args.defaults)) + args.defaults
    found = []
    for index, (arg, default) in enumerate(zip(positional, defaults, strict=True)):
        kind = "positional-only" if index < len(args.posonlyargs) else "positional or keyword"
        found.append(Parameter(arg.arg, kind, _text(default)))
    found += [Parameter("*" + args.vararg.arg, "variadic", None)] if args.vararg else []
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found.append(Parameter(arg.arg, "keyword-only", _text(default)))
    found += [Parameter("**" + args.kwarg.arg, "variadic", None)] if args.kwarg else []
    return tuple(found)


def _text(default: ast.expr | None) -> str | None:
    return None if default is None else ast.unparse(default)


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


def _overridden(module: str, qualname: str, contract: Contract, parse: Parse) -> str | None:
    """What has the method's place in a subclass of its class in the same module, and is none of another platform's."""
    of, _, method = qualname.rpartition(".")
    if not of:
        return None
    classes = [node for node in _flat(parse(module).tree.body) if isinstance(node, ast.ClassDef)]
    known, own = {of}, getattr(contract, "overridden_by", ())
    for one in classes:  # a class is below its bases
        if known.isdisjoint(filter(None, map(_called_name, one.bases))):
            continue
        known.add(one.name)
        found = [node for node in one.body if isinstance(node, Function) and node.name == method]
        is_elsewhere = one.name in own or any(map(one.name.__contains__, _PLATFORMS))
        if found and not is_elsewhere and not _goes_on(found[-1]):
            return f"{one.name} has a {method} of its own, in which nothing is replaced"
    return None


def _goes_on(method: Function) -> bool:
    """Whether it calls super().method."""
    calls = (node.func for node in ast.walk(method) if isinstance(node, ast.Call))
    attributes = (func for func in calls if isinstance(func, ast.Attribute) and func.attr == method.name)
    return any(isinstance(f.value, ast.Call) and _called_name(f.value.func) == "super" for f in attributes)


def _is_alias(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)


def _imported_module(module: str, node: ast.ImportFrom) -> str:
    """Absolute name of what `node` imports from; a re-export is read as coming from a package `__init__`."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - node.level + 1]
    return ".".join(base + ([node.module] if node.module else []))


def _caller_violation(caller: str, qualname: str, contract: Contract, parse: Parse) -> str | None:
    parsed = parse(caller)
    if parsed is None:
        return f"there is no module {caller}, which should call {qualname}"
    if parsed.problem:
        return f"{caller}, which should call {qualname}, {parsed.problem}"
    known = {n for n in getattr(contract, "names", ()) if not n.startswith("*")}
    calls = passed_keywords(parsed.tree, qualname.rpartition(".")[2])
    if not calls:
        return f"{caller} does not call {qualname} any more"
    if isinstance(contract, ConsumedKeys) and _passes_by_position(parsed.tree, qualname):
        return f"{caller} passes arguments to {qualname} by position, we know keywords"
    unknown = sorted(set().union(*calls) - known) if known else []
    return f"{caller} passes {', '.join(unknown)} to {qualname}, which we do not know" if unknown else None


def _passes_by_position(tree: ast.AST, qualname: str) -> bool:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    return any(_called_name(call.func) == qualname.rpartition(".")[2] for call in calls)


def _how_it_is_called(function: Function, expected: tuple[bool, bool] = (False, False)) -> str | None:
    """What makes a call of the function another one than expected: async, a generator or none, a decorator."""
    yields = any(isinstance(node, ast.Yield | ast.YieldFrom) for node in _own_nodes(function))
    found = (isinstance(function, ast.AsyncFunctionDef), yields)
    if found != expected:
        return f"expected {_CALLED[expected]}, found {_CALLED[found]}"
    decorators = [ast.unparse(node) for node in function.decorator_list if _last_name(node) not in _TRANSPARENT]
    return f"expected {_CALLED[expected]}, found it decorated with @{', @'.join(decorators)}" if decorators else None


def _own_nodes(function: Function):
    """The nodes of a function's body, but not those of functions inside of it."""
    left = list(function.body)
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, Function | ast.Lambda | ast.ClassDef):
            left.extend(ast.iter_child_nodes(node))


def _last_name(decorator: ast.expr) -> str | None:
    return _called_name(decorator.func if isinstance(decorator, ast.Call) else decorator)


def _no_positional(rest: tuple[Parameter, ...]) -> str | None:
    found = [p for p in rest if p.kind != "keyword-only" and not p.name.startswith("**")]
    return f"parameters: {found[0].name} is {found[0].kind}, expected keyword-only" if found else None


def _order_violation(expected: tuple[str, ...], found: tuple[str, ...]) -> str | None:
    if found == expected:
        return None
    unordered = _difference("parameters", set(expected), set(found))
    return unordered or f"parameters: expected the order {', '.join(expected)}; found {', '.join(found)}"


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
    for name, value in ast.iter_fields(node):
        if name == "body" and documented:
            value = value[1:]
        if value is None or value == [] or name in ("ctx", "kind", "type_comment"):
            continue
        parts.append(f"{name}={_normal_form(value)}")
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
