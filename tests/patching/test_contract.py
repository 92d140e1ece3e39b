"""Contracts and digests: read by ast, never imported."""

import ast

import pytest

from deepseek_v4_sm120.patching import contract
from deepseek_v4_sm120.patching.contract import Bound, ConsumedKeys, Parameters

FUNCTION = '''
def f(q, *, scale=None, **kwargs):
    """What it does."""
    a = kwargs["a"]  # a comment
    b = kwargs.get("b", kwargs.pop("c", None))
    if "d" in kwargs:
        a = f"{a!r:>{scale}} of {b=}" if (n := len(a)) > 1 else a[..., 1:2]
    other["e"], other.get("g")
    return lambda *x, y=1: (a, *x, y)
'''


def definition(source, name="f"):
    return contract.find_definition(ast.parse(source), name)


def reader(**modules):
    return {name.replace("__", "."): text for name, text in modules.items()}.get


def test_consumed_keys_and_parameters():
    assert contract.consumed_keys(definition(FUNCTION)) == {"q", "scale", "a", "b", "c", "d"}
    assert contract.parameters(definition(FUNCTION)) == ("q", "scale", "**kwargs")
    assert contract.parameters(definition("def f(a, /, b, *c, d, **e): pass")) == ("a", "b", "*c", "d", "**e")


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (("q", "scale", "a", "b", "c", "d"), None),
        (("q", "scale", "a", "b", "c", "d", "z"), "consumed keys: missing z; unexpected none"),
        (("q", "scale", "a", "b", "c"), "consumed keys: missing none; unexpected d"),
    ],
)
def test_consumed_keys_contract(names, problem):
    assert contract.check("m:f", ConsumedKeys(names), None, reader(m=FUNCTION)).problem == problem


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("def f(a, b): pass", None),
        ("async def f(a, b=1): pass", None),
        ("def f(b, a): pass", "parameters: expected the order a, b; found b, a"),
        ("def f(a, *, c): pass", "parameters: missing b; unexpected c"),
        ("f = 1", "expected a function, found an assignment"),
        ("class f: pass", "expected a function, found a class"),
        ("def g(): f = 1", "m does not define f"),
    ],
)
def test_parameters_contract(source, problem):
    assert contract.check("m:f", Parameters(("a", "b")), None, reader(m=source)).problem == problem


def test_missing_module():
    assert contract.check("m.n:f", Bound(), None, reader()).problem == "there is no module m.n"


def test_methods_conditionals_and_the_last_binding():
    source = "if x:\n  class C:\n    def f(self): pass\nelse:\n  try:\n    from a import C\n  except E:\n    C = None\n"
    assert isinstance(definition(source, "C"), ast.Assign)
    assert isinstance(definition("class C:\n  if x:\n    def f(self): pass", "C.f"), ast.FunctionDef)
    assert definition("class C:\n  def f(self): pass", "C.g") is None


def test_follows_reexports_for_functions_only():
    read = reader(pkg="from .impl import g as f", pkg__impl="def g(a, b): pass")
    assert contract.check("pkg:f", Parameters(("a", "b")), None, read).problem is None
    direct = contract.check("pkg.impl:g", Parameters(("a", "b")), None, read)
    assert contract.check("pkg:f", Parameters(("a", "b")), None, read).digest == direct.digest
    assert contract.check("pkg:f", Bound(), None, read).digest != direct.digest
    loop = reader(a="from b import f", b="from a import f")
    assert contract.check("a:f", Parameters(()), None, loop).problem == "a does not define f"


def test_caller_may_pass_only_what_is_known():
    function = "def f(**k): return k['a'], k['b']"
    keys = ConsumedKeys(("a", "b"))
    for call, problem in [
        ("f(a=1)", None),
        ("x.f(a=1, b=2)", None),
        ("f(a=1, z=2)", "c passes z to f, which we do not know"),
        ("f(**all)", "c passes ** to f, which we do not know"),
        ("g(a=1)", "c does not call f any more"),
    ]:
        assert contract.check("m:f", keys, "c", reader(m=function, c=f"def run(): {call}")).problem == problem


SAME = [
    FUNCTION.replace("  # a comment", ""),
    FUNCTION.replace('"""What it does."""', '"""Said otherwise."""'),
    FUNCTION.replace('    """What it does."""\n', ""),
    FUNCTION.replace("kwargs.get(", "kwargs . get(\n        "),
    FUNCTION.replace("def f(q, *, scale=None, **kwargs)", "def f(\n    q,\n    *,\n    scale=None,\n    **kwargs,\n)"),
    FUNCTION.replace('kwargs["a"]', "kwargs['a']"),
]
DIFFERENT = [
    FUNCTION.replace("> 1", "> 2"),
    FUNCTION.replace("!r", "!s"),
    FUNCTION.replace('"b"', '"bb"'),
    FUNCTION.replace("y=1", "y=True"),
    FUNCTION.replace("scale=None", "scale"),
    FUNCTION.replace("def f", "async def f"),
]


def test_digest_sees_code_and_nothing_else():
    digest = contract.digest_of(definition(FUNCTION))
    assert [contract.digest_of(definition(source)) for source in SAME] == [digest] * len(SAME)
    others = [contract.digest_of(definition(source)) for source in DIFFERENT]
    assert digest not in others and len(set(others)) == len(DIFFERENT)


def test_digest_is_the_same_on_every_python():
    """The value was made with 3.10 to 3.13; a Python that parses differently fails here, not in the field."""
    assert contract.digest_of(definition(FUNCTION)) == "c1f9c1bac2fd7305"


def test_import_digest_is_of_the_one_name():
    one = contract.digest_of(definition("from a import b, f", "f"))
    assert one == contract.digest_of(definition("from a import (f, z)", "f"))
    assert one != contract.digest_of(definition("from b import f", "f"))
