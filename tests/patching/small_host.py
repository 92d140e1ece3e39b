"""A small host package on disk and a table of its own, for the engine: no SGLang name, no torch, no compiled module."""

from deepseek_v4_sm120.patching.contract import Bound, ConsumedKeys, Parameters, check
from deepseek_v4_sm120.patching.engine import Engine
from deepseek_v4_sm120.patching.known_files import KnownFiles
from deepseek_v4_sm120.patching.ledger import Ledger
from deepseek_v4_sm120.patching.reads import Reads
from deepseek_v4_sm120.patching.sources import parse
from deepseek_v4_sm120.patching.spec import Patch, Table, Target
from deepseek_v4_sm120.settings import Settings

FUNCTION = "def f(**kwargs):\n    return kwargs['a'] + kwargs.get('b', 0)\n"
NOTHING, UNREAD = KnownFiles(), Reads()
HOST = {
    "eng_host/__init__.py": "",
    "eng_host/_version.py": "__version__ = '1.2.0'\n",
    "eng_host/main.py": "",
    "eng_host/kernels.py": FUNCTION,
    "eng_host/caller.py": "from eng_host import kernels\ndef run(): return kernels.f(a=1)\n",
    "eng_host/model.py": """
        class Model:
            def __init__(self, weights="loaded"):
                self.weights = weights
            def heads(self, n):
                return 64
    """,
    "eng_host/arguments.py": "def resolve(arguments):\n    return arguments\n",
    "eng_ours/__init__.py": """
        import functools
        def replace(original):
            @functools.wraps(original)
            def ours(*args, **kwargs):
                return ("ours", original(*args, **kwargs))
            return ours
        made = []
        def shared(original):
            if original in made:
                return original
            @functools.wraps(original)
            def once(*args, **kwargs):
                return ("shared", original(*args, **kwargs))
            made.append(once)
            return once
        def flag(original):
            return True
        def fine(): pass
        def missing(): raise ImportError("no compiled module for this Python; build it")
    """,
}


def digest(source=FUNCTION):
    return check("m:f", Bound(), None, {"m": parse(source)}.get).digest


def function_target(**changes):
    given = {
        "where": "eng_host.kernels:f",
        "sglang": ">=1.2,<1.5",
        "contract": ConsumedKeys(("a", "b")),
        "replacement": "eng_ours:replace",
        "caller": "eng_host.caller",
    }
    return Target(**{**given, **changes})


def make(
    *targets,
    settings=None,
    start=True,
    supported=">=1,<2",
    stand_ins=(),
    known=NOTHING,
    reviewed=(),
    reads=UNREAD,
    agrees=None,
    **patch,
):
    patches = (Patch(name="job", why="test", targets=targets or (function_target(),), retire="never", **patch),)
    more = {"supported": supported, "stand_ins": stand_ins, "known": known, "reviewed": reviewed, "reads": reads}
    more["agrees"] = agrees
    return start_engine(patches, settings, start, **more)


def start_engine(
    patches,
    settings=None,
    start=True,
    supported=">=1,<2",
    stand_ins=(),
    known=NOTHING,
    reviewed=(),
    reads=UNREAD,
    agrees=None,
):
    ledger = Ledger({"1.2.0": {"eng_host.kernels:f": digest(), **dict(reviewed)}})
    table = Table(
        supported=supported,
        preflight="eng_host.main",
        patches=tuple(patches),
        stand_ins=stand_ins,
        resolved_at="eng_host.arguments:resolve",
        built_at="eng_host.model:Model.__init__",
        reviewed=lambda: ledger,
        known=lambda version: known,
        reads=lambda: reads,
        agrees=agrees,
    )
    engine = Engine(table, host="eng_host", settings=settings or Settings())
    if start:
        engine.start()
    return engine


def states(engine):
    return [record.state for record in engine.records]


def enter():
    """What the host does with our model: the first process resolves the arguments, then a worker makes the layers."""
    from eng_host import arguments, model

    assert arguments.resolve("asked") == "asked"
    return model.Model().weights


BROKEN_HOSTS = [
    ({"eng_host/kernels.py": FUNCTION.replace("'b'", "'c'")}, "consumed keys: missing b; unexpected c"),
    ({"eng_host/kernels.py": "g = 1"}, "eng_host.kernels does not define f"),
    ({"eng_host/kernels.py": None}, "there is no module eng_host.kernels"),
    ({"eng_host/caller.py": "def run(k): return k.f(a=1, new=2)"}, "passes new to f, which we do not know"),
]
# a target in another module, which fits HOST
HEADS = {"where": "eng_host.model:Model.heads", "contract": Parameters(("self", "n")), "caller": None}
