"""What DSPARK's draft block is told of the lengths on the host, in each release: nothing reads it, and ours tells it
without asking the GPU."""

import ast
import json

import pytest
import torch

from deepseek_v4_sm120.sglang_patches import device_gate
from deepseek_v4_sm120.sglang_patches.fixes.dspark_lengths import replace_draft_block
from deepseek_v4_sm120.sglang_patches.table import BACKEND
from tests.patching.dspark_block import FIRST, LENGTHS
from tests.patching.wheels import WheelSources, every_release, fetch, since


@every_release(FIRST)
def test_the_metadata_are_the_same(version, python_interpreting):
    code = f"import json; from tests.patching.dspark_block import main; print(json.dumps(main({version!r})))"
    found = json.loads(python_interpreting(code, env={"TRITON_INTERPRET": "1"}).stdout)
    assert [name for name, holds in found.items() if not holds] == []
    assert len(found) == 7 + since(version, "0.5.21")


@pytest.mark.parametrize("case", ["other card", "capture", "told"])
def test_it_stays_sglangs(case, monkeypatch):
    """On another card, in a capture, and where the host was told."""
    given = []
    monkeypatch.setattr(device_gate, "serves", lambda device: case != "other card")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: case == "capture")
    told = torch.tensor(LENGTHS) if case == "told" else None
    replaced = replace_draft_block(lambda *args, **kwargs: given.append((args, kwargs)))
    replaced("self", 9, "indices", torch.tensor(LENGTHS), told, "locations", 3, dspark_swa_buffers=None)
    ((args, kwargs),) = given
    assert args[:3] == ("self", 9, "indices") and args[4] is told and args[5:] == ("locations", 3)
    assert kwargs == {"dspark_swa_buffers": None}


@every_release(FIRST)
def test_who_asks(version):
    """The graphs' preparation and the eager one."""
    tree = ast.parse(WheelSources(fetch(version)).read(BACKEND))
    methods = [m for c in tree.body if isinstance(c, ast.ClassDef) for m in c.body if isinstance(m, ast.FunctionDef)]
    called = "self.init_forward_metadata_dspark_draft_block("
    assert {m.name for m in methods if called in ast.unparse(m)} == {
        "init_forward_metadata_out_graph",
        "_build_forward_metadata",
    }
