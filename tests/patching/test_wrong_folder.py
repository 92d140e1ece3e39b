"""A folder that is not what a build made, and a name that nothing has: what is said then, and how often."""

import shutil
from pathlib import Path

import pytest

from deepseek_v4_sm120.patching import report
from tests.patching.test_table import FAKE_SM120, status

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def python(python_with_torch):
    return python_with_torch


@pytest.fixture
def without_module(tmp_path):
    """The folder without what was compiled."""
    folder = tmp_path / "folder"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(REPO / "deepseek_v4_sm120", folder / "deepseek_v4_sm120", ignore=ignored)
    shutil.copyfile(REPO / "sitecustomize.py", folder / "sitecustomize.py")
    return folder


def test_what_all_operators_lack_is_said_once(python, tree, without_module):
    """By status and by a server that does not start; and it is not SGLang's release that is at fault."""
    host = tree()
    found = {"path": [without_module, host], "ours": False, "check": False}
    done = status(python, **found)
    lacking = [line for line in done.stdout.splitlines() if line.startswith("  ") and "no compiled module" in line]
    assert done.returncode == 1 and len(lacking) == 1, done.stdout
    assert lacking[0].startswith("  sparse_decode, index_select, mxfp4_moe, ")
    assert f"\nSGLang            0.5.17, {host}/sglang\n" in done.stdout
    server = (
        FAKE_SM120
        + """
    import deepseek_v4_sm120.patching as patching
    patching.install()
    import sglang.srt.server_args
    from sglang.srt.arg_groups import deepseek_v4_hook
    deepseek_v4_hook.apply_deepseek_v4_defaults(None, "DeepseekV4ForCausalLM")
    """
    )
    started = python(server, **found)
    refused = started.stderr.partition("PatchError: ")[2]
    assert started.returncode == 1 and "cannot run here:\n  sparse_decode, " in refused, started.stderr
    assert refused.count("no compiled module") == 1 and "does not fit" not in started.stderr
    assert "What to do: mend what is named; or set DSV4_SM120_ON_BROKEN=warn" in refused


def test_reasons_are_grouped():
    problems = ["a: no module", "wrong value of X: y", "b: other: thing", "c: no module", "no colon"]
    assert report.by_reason(problems) == ["a, c: no module", "wrong value of X: y", "b: other: thing", "no colon"]


@pytest.mark.parametrize("has_host", [True, False])
def test_a_name_that_nothing_has_is_told_with_the_nearest(python, tree, has_host):
    """Where SGLang is not found, too: `status` is asked on the host as well as in the image."""
    done = status(python, path=[tree()] if has_host else [], env={"DSV4_SM120_SET": "mch=off"}, check=False)
    assert done.returncode == 1 and done.stdout.count("DSV4_SM120_SET names mch (perhaps mhc?); it takes ") == 1
