"""Contracts and digests: read by ast, never imported."""

import ast

import pytest

from deepseek_v4_sm120.patching import contract
from deepseek_v4_sm120.patching.contract import Bound, ConsumedKeys, Parameters
from deepseek_v4_sm120.patching.sources import parse

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
    return {name.replace("__", "."): parse(text) for name, text in modules.items()}.get


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
        ("def f(b, a): pass", "parameters: expected the order a, b; found b, a"),
        ("def f(a, *, c): pass", "parameters: missing b; unexpected c"),
        ("f = 1", "expected a function, found an assignment"),
        ("class f: pass", "expected a function, found a class"),
        ("def g(): f = 1", "m does not define f"),
    ],
)
def test_parameters_contract(source, problem):
    assert contract.check("m:f", Parameters(("a", "b")), None, reader(m=source)).problem == problem


NORM = Parameters(("self", "x", "norm=None", "batch=...", "*", "scale=1.0"))


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("def f(self, x, norm=None, batch=None, *, scale=1.0): pass", None),
        ("def f(self, x, norm=None, batch=SENTINEL, *, scale=1.0): pass", None),  # handed through
        ("def f(self, x, norm, batch, *, scale): pass", None),  # always given then
        ("@torch.compile(dynamic=True)\ndef f(self, x, norm=None, batch=None, *, scale=1.0): pass", None),
        ("@torch.no_grad()\n@override\ndef f(self, x, norm=None, batch=None, *, scale=1.0): pass", None),
        ("def f(self, x, norm=(), batch=None, *, scale=1.0): pass", "the default of norm is (), expected None"),
        ("def f(self, x, norm=None, batch=None, *, scale=2.0): pass", "the default of scale is 2.0, expected 1.0"),
        ("def f(self, x=0, norm=None, batch=0, *, scale=1.0): pass", "x may be left out (it is 0 then), and we do not"),
        ("def f(self, x, norm=None, *, batch=None, scale=1.0): pass", "batch is keyword-only, expected positional or"),
        ("def f(self, x, norm=None, batch=None, scale=1.0): pass", "scale is positional or keyword, expected keyword-"),
        ("def f(self, x, /, norm=None, batch=None, *, scale=1.0): pass", "self is positional-only, expected"),
        ("async def f(self, x, norm=None, batch=None, *, scale=1.0): pass", "found an async function"),
        ("def f(self, x, norm=None, batch=None, *, scale=1.0): yield x", "a plain function, found a generator"),
        ("@staticmethod\ndef f(self, x, norm=None, batch=None, *, scale=1.0): pass", "decorated with @staticmethod"),
        ("@classmethod\ndef f(self, x, norm=None, batch=None, *, scale=1.0): pass", "decorated with @classmethod"),
        ("@property\ndef f(self, x, norm=None, batch=None, *, scale=1.0): pass", "decorated with @property"),
        ("@a.wrap(1)\ndef f(self, x, norm=None, batch=None, *, scale=1.0): pass", "decorated with @a.wrap(1)"),
    ],
)
def test_how_a_function_is_called_is_in_the_contract(source, problem):
    found = contract.check("m:f", NORM, None, reader(m=source)).problem
    assert (found is None) if problem is None else (problem in (found or "")), found


def test_a_generator_is_expected_where_the_contract_says_so():
    generator = Parameters(("x",), is_generator=True)
    assert contract.check("m:f", generator, None, reader(m="def f(x):\n  yield from x")).problem is None
    inner = "def f(x):\n  def g():\n    yield 1\n  return g()"
    assert contract.check("m:f", Parameters(("x",)), None, reader(m=inner)).problem is None
    plain = contract.check("m:f", generator, None, reader(m=inner)).problem
    assert plain == "expected a generator, found a plain function"


def test_what_is_awaited_is_expected_where_the_contract_says_so():
    awaited, iterated = (Parameters(("x",), is_async=True, is_generator=yields) for yields in (False, True))
    plain, yielding = "async def f(x): pass", "async def f(x): yield x"
    assert contract.check("m:f", awaited, None, reader(m=plain)).problem is None
    assert contract.check("m:f", iterated, None, reader(m=yielding)).problem is None
    found = contract.check("m:f", awaited, None, reader(m=yielding)).problem
    assert found == "expected an async function, found an async generator"
    found = contract.check("m:f", awaited, None, reader(m=plain.removeprefix("async "))).problem
    assert found == "expected an async function, found a plain function"


@pytest.mark.parametrize(
    ("further", "source", "problem"),
    [
        ("any", "def f(self, x, y, *args, z=1, **kwargs): pass", None),
        ("any", "def f(self): pass", "parameters: missing x; unexpected none"),
        ("any", "def f(x, self, y): pass", "parameters: expected the order self, x; found x, self"),
        ("keyword-only", "def f(self, x, *, y, z=1, **kwargs): pass", None),
        ("keyword-only", "def f(self, x, y): pass", "y is positional or keyword, expected keyword-only"),
        ("keyword-only", "def f(self, x, *args): pass", "*args is variadic, expected keyword-only"),
        (None, "def f(self, x, y): pass", "parameters: missing none; unexpected y"),
    ],
)
def test_parameters_that_follow_are_handed_through(further, source, problem):
    found = contract.check("m:f", Parameters(("self", "x"), further=further), None, reader(m=source)).problem
    assert (found is None) if problem is None else (problem in (found or "")), found


def test_functions_that_take_keys_are_plain_too():
    keys = ConsumedKeys(("a",))
    for source, problem in [
        ("async def f(**k): return k['a']", "expected a plain function, found an async function"),
        ("@staticmethod\ndef f(**k): return k['a']", "found it decorated with @staticmethod"),
        ("def f(a, /): return a", "a is positional-only, expected keywords"),
    ]:
        assert problem in contract.check("m:f", keys, None, reader(m=source)).problem
    by_position = reader(m="def f(a): return a", c="f(1)")
    assert "passes arguments to f by position" in contract.check("m:f", keys, "c", by_position).problem


def test_an_alias_is_followed_to_its_function():
    read = reader(m="from n import g as f\n", n="def h(a, b): pass\ng = h\n")
    assert contract.check("m:f", Parameters(("a", "b"), imported=True), None, read).problem is None
    loop = reader(m="f = g\ng = f\n")
    assert contract.check("m:f", Parameters(()), None, loop).problem == "m does not define f"


UNPARSABLE = [
    (b"def f(:\n  pass\n", "m cannot be parsed: line 1: "),
    (b"# fine\n\xff\xfe = 1\n", "m cannot be parsed: "),
    (b"# -*- coding: no-such -*-\n", "m cannot be parsed: "),
    (b"f = 1\x00\n", "m cannot be parsed: "),
    (b"f = " + b"(" * 5000, "m cannot be parsed: "),
]


@pytest.mark.parametrize(("data", "words"), UNPARSABLE)
def test_a_file_that_cannot_be_parsed_is_a_finding(data, words):
    """As the target's module, as the one that it is imported from, and as the caller."""
    parsed = {"m": parse(data), "good": parse("def f(a): pass"), "again": parse("from m import f")}
    finding = contract.check("m:f", Parameters(("a",)), None, parsed.get)
    assert finding.problem.startswith(words) and finding.digest is None and "\n" not in finding.problem
    assert contract.check("again:f", Parameters(("a",)), None, parsed.get).problem.startswith(words)
    called = contract.check("good:f", Parameters(("a",)), "m", parsed.get).problem
    assert called.startswith("m, which should call f, cannot be parsed: ")


def test_encodings_are_those_that_the_file_declares():
    latin = "# -*- coding: latin-1 -*-\nname = '\xe9'\n".encode("latin-1")
    assert parse(latin).problem is None
    assert contract.digest_of(definition("name = '\xe9'\n", "name")) == contract.digest_of(
        contract.find_definition(parse(latin).tree, "name")
    )
    assert parse(b"\xef\xbb\xbff = 1\n").problem is None


def test_missing_module():
    assert contract.check("m.n:f", Bound(), None, reader()).problem == "there is no module m.n"


def test_methods_conditionals_and_the_last_binding():
    source = "if x:\n  class C:\n    def f(self): pass\nelse:\n  try:\n    from a import C\n  except E:\n    C = None\n"
    assert isinstance(definition(source, "C"), ast.Assign)
    assert isinstance(definition("class C:\n  if x:\n    def f(self): pass", "C.f"), ast.FunctionDef)
    assert definition("class C:\n  def f(self): pass", "C.g") is None


def test_follows_reexports_for_functions_only():
    read = reader(pkg="from .impl import g as f", pkg__impl="def g(a, b): pass")
    imported = Parameters(("a", "b"), imported=True)
    assert contract.check("pkg:f", imported, None, read).problem is None
    direct = contract.check("pkg.impl:g", Parameters(("a", "b")), None, read)
    assert contract.check("pkg:f", imported, None, read).digest == direct.digest
    assert contract.check("pkg:f", Bound(), None, read).digest != direct.digest
    loop = reader(a="from b import f", b="from a import f")
    assert contract.check("a:f", Parameters(()), None, loop).problem == "a does not define f"


@pytest.mark.parametrize(
    ("source", "now"), [("from .impl import f", "pkg.impl:f"), ("def f_v2(a): pass\nf = f_v2", "pkg:f_v2")]
)
def test_a_function_that_was_moved_is_another_one(source, now):
    """What is put in the old place serves those alone who look there."""
    read = reader(pkg=source, pkg__impl="def f(a): pass")
    problem = contract.check("pkg:f", Parameters(("a",)), None, read).problem
    assert problem == f"f of pkg is {now} now, and who calls that has the original"
    defined_here = reader(pkg="def f(a): pass")
    assert contract.check("pkg:f", Parameters(("a",), imported=True), None, defined_here).problem is None


BASE = "class C:\n  def f(self, x): pass\n"


@pytest.mark.parametrize(
    ("below", "found"),
    [
        *(("class D(C):\n  def f(self, x): pass", "D"), ("if x:\n  class D(m.C):\n    async def f(self): pass", "D")),
        ("class D(C): pass\nclass E(D):\n  def f(self, x): return self.f(x)", "E"),
        *(("class D(C):\n  def g(self): pass", None), ("class D(Other):\n  def f(self): pass", None)),
        ("class D(C):\n  def f(self, x): return super().f(x)", None),
        *(("class D2(C):\n  def f(self, x): pass", None), ("class CHip(C):\n  def f(self, x): pass", None)),
    ],
)
def test_a_subclass_with_a_method_of_its_own_is_not_served_by_ours(below, found):
    expected = Parameters(("self", "x"), overridden_by=("D2",))
    problem = contract.check("m:C.f", expected, None, reader(m=BASE + below)).problem
    assert problem == (found and f"{found} has a f of its own, in which nothing is replaced")


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
