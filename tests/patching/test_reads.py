"""What replacements read of SGLang's objects, asked of a release that nobody has looked at."""

import json
import sys

import pytest

from deepseek_v4_sm120.patching import contract, engine
from deepseek_v4_sm120.patching import reads as of_host
from deepseek_v4_sm120.patching.engine import BROKEN, READY, Engine
from deepseek_v4_sm120.patching.reads import Reads
from deepseek_v4_sm120.settings import Settings
from deepseek_v4_sm120.sglang_patches.table import READS, TABLE
from tests.patching import reads
from tests.patching.small_host import FUNCTION, function_target, make
from tests.patching.test_wheel_attributes import release
from tests.patching.wheels import WheelSources, check_once, fetch

GONE = "eng_host.model:Model has no weights any more, which what stands for it reads"
MODEL = "class Model:\n    def __init__(self, other):\n        self.other = other\n"
OF_MODEL = Reads({"eng_ours": (("weights", "eng_host.model:Model"),)})


def test_the_file_is_of_the_newest_release_and_of_today():
    """Stale: python3 -m tests.patching.reads"""
    assert READS.read_text() == reads.text()
    told, text = TABLE.reads(), release(reads.NEWEST).text
    assert told.problem is None and len(told.names) > 40
    assert {module: told.missing(module, text) for module in told.names} == dict.fromkeys(told.names)
    named = {t.replacement.partition(":")[0] for patch in TABLE.patches for t in patch.targets}
    assert named >= set(told.names), "each is a module of replacements, else nobody asks"


@pytest.mark.parametrize(
    ("texts", "is_missing"),
    [
        ({"m": "class C:\n  def f(self): self.name = 1"}, False),
        ({"m": "class C:\n  def f(self): self.names = 1"}, True),
        ({"m": "class C:\n  def f(self): self.rename = self.surname_of = 1"}, True),
        ({"m": "# a subclass C\nfrom n import C", "n": "class C:\n  name: int"}, False),
        ({"m": "from n import (A,\n  C)", "n": "class C: pass"}, True),
        ({"m": "from n import C", "n": "class C:\n  name: int"}, False),
        *(({"m": "from .n import C"}, False), ({"m": "from n import C"}, False), ({"m": "x = 1"}, False), ({}, False)),
    ],
)
def test_a_name_is_looked_for_where_its_class_is(texts, is_missing):
    """A class that is nowhere to be seen may have it still."""
    assert (Reads({"ours": (("name", "m:C"),)}).missing("ours", texts.get) is not None) == is_missing
    assert Reads({"ours": (("name", "m:C"),)}).missing("others", texts.get) is None


def test_one_of_several_places_is_enough():
    told = Reads({"ours": (("name", "m", "n"),)})
    assert told.missing("ours", {"m": "", "n": "name"}.get) is None
    assert (
        told.missing("ours", {"m": "", "n": ""}.get) == "m and n has no name any more, which what stands for it reads"
    )


@pytest.mark.parametrize(
    "content", [None, "{", "[]", '{"m": 3}', '{"m": ["name"]}', '{"m": [["name"]]}', '{"m": [[1, 2]]}']
)
def test_a_damaged_file_is_told_and_nothing_is_asked(tmp_path, content):
    path = tmp_path / "reads.json"
    if content is not None:
        path.write_text(content)
    found = of_host.read(path)
    assert str(path) in found.problem and found.names == {}
    path.write_text(json.dumps({"m": [["name", "place"]]}))
    of_host.read.cache_clear()
    assert of_host.read(path) == Reads({"m": (("name", "place"),)})


@pytest.mark.parametrize(
    ("version", "state"),
    [("1.2.0", READY), ("1.2.0.dev3", READY), ("1.3", BROKEN), ("1.3.dev1+g1", BROKEN), ("0.0.0.dev1", BROKEN)],
)
def test_a_host_ahead_of_what_was_reviewed_is_asked(host, said, version, state):
    host({"eng_host/_version.py": f"__version__ = '{version}'", "eng_host/model.py": MODEL})
    (record,) = make(function_target(sglang=">=1,<2"), start=False, reads=OF_MODEL).survey()
    assert record.state == state and (record.problem == f"eng_host.kernels:f: {GONE}") == (state == BROKEN)


def test_a_reviewed_definition_is_not_enough_where_the_rest_is_new(host):
    host({"eng_host/_version.py": "__version__ = '1.3'", "eng_host/kernels.py": FUNCTION})
    (record,) = make(function_target(sglang=">=1,<2"), start=False, reads=OF_MODEL).survey()
    assert record.state == READY


@pytest.mark.parametrize(
    ("module", "name", "patch"),
    [
        ("sglang.srt.mem_cache.deepseek_v4_compress_state", "kv_score_buffer", "compressor"),
        ("sglang.srt.model_executor.forward_batch_info", "forward_mode", "index_select"),
        ("sglang.srt.managers.schedule_batch", "kv_committed_len", "stripped_thoughts"),
        ("sglang.srt.layers.moe.topk", "topk_weights", "mxfp4_moe"),
    ],
)
def test_the_next_release_with_a_renamed_attribute_is_refused(monkeypatch, module, name, patch):
    """Simulated: 0.5.23's wheel that calls itself 0.5.24."""
    monkeypatch.setitem(sys.modules, "deepseek_v4_sm120.ops.shared.extension", type(sys)("extension"))
    sys.modules["deepseek_v4_sm120.ops.shared.extension"].load = lambda: None
    monkeypatch.setattr(contract, "check", check_once)
    monkeypatch.setattr(engine, "package_version", lambda host, sources: "0.5.24")
    wheel = fetch("0.5.23")

    class Renamed(WheelSources):
        def read(self, asked):
            text = super().read(asked)
            return text.replace(name, f"{name}s_of_later") if asked == module else text

    states = {}
    for kind in (WheelSources, Renamed):
        monkeypatch.setattr(engine, "Sources", lambda stand_ins=None, kind=kind: kind(wheel, stand_ins))
        records = Engine(TABLE, host="sglang", settings=Settings()).survey()
        states[kind] = {r.name: r.reason for r in records if r.state == BROKEN}
    assert states[WheelSources] == {} and f"has no {name} any more" in states[Renamed][patch]
