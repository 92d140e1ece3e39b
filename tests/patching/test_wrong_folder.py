"""A folder that is not what a build made, and a name that nothing has: what is said then, and how often."""

import shutil
from pathlib import Path

import pytest

from deepseek_v4_sm120 import RECORD, patching
from deepseek_v4_sm120.ops.shared import extension
from deepseek_v4_sm120.patching import report
from tests.patching.test_table import FAKE_SM120, status

REPO = Path(__file__).resolve().parents[2]
SERVER = (
    FAKE_SM120
    + """
    import deepseek_v4_sm120.patching as patching
    patching.install()
    import sglang.srt.server_args
    from sglang.srt.arg_groups import deepseek_v4_hook
    deepseek_v4_hook.apply_deepseek_v4_defaults(None, "DeepseekV4ForCausalLM")
    """
)


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
    started = python(SERVER, **found)
    refused = started.stderr.partition("PatchError: ")[2]
    assert started.returncode == 1 and "cannot run here:\n  sparse_decode, " in refused, started.stderr
    assert refused.count("no compiled module") == 1 and "does not fit" not in started.stderr
    assert "What to do: mend what is named; or set DSV4_SM120_ON_BROKEN=warn" in refused


@pytest.fixture
def checkout(without_module):
    """A checkout as it is mounted by mistake, with what was built of it in build/."""
    shutil.copytree(without_module / "deepseek_v4_sm120", without_module / "build/deepseek_v4_sm120")
    (without_module / "csrc").mkdir()
    built = without_module / "build/deepseek_v4_sm120"
    for name in (extension.find().name, extension.LIBRARY):
        shutil.copyfile(extension.find().with_name(name), built / name)
    written = built.parent / RECORD
    written.parent.mkdir()
    files = [file for file in built.rglob("*") if file.is_file()]
    rows = [f"{file.relative_to(built.parent)},{extension._digest(file)},{file.stat().st_size}\n" for file in files]
    written.write_text("".join(rows))
    return without_module


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_checkout_whose_build_is_of_another_state_is_told(python, tree, checkout, is_changed):
    """As after `git pull` alone; by status, and by a server of our model on a card of ours. It starts."""
    if is_changed:
        with open(checkout / "deepseek_v4_sm120/ops/mhc.py", "a") as file:
            file.write("# later\n")
    told = f"{checkout} is a checkout, and its build/ was made of other files than its mhc.py: calls may fail"
    asked = {"path": [checkout, tree()], "ours": False, "check": False}
    assert (f"warning: {told}" in status(python, **asked).stdout) is is_changed
    done = python(SERVER, **asked)
    assert done.returncode == 0 and done.stderr.count(told) == is_changed, done.stderr


@pytest.mark.parametrize("is_first", [False, True])
def test_a_second_folder_of_ours_on_the_path_is_told(python, tree, without_module, is_first):
    """An image's own build beside a newer one that is mounted: the first runs, whichever was meant."""
    other = without_module.parent / "baked in"
    shutil.copytree(without_module, other)
    both = [other, without_module] if is_first else [without_module, other]
    found = status(python, path=[*both, tree()], ours=False, check=False)
    told = f"PYTHONPATH has our package in {both[1]}, too: {both[0]} is the one that runs"
    assert f"warning: {told}\n" in found.stdout
    done = python(
        "import sglang, deepseek_v4_sm120; print(deepseek_v4_sm120.__file__)", path=[*both, tree()], ours=False
    )
    assert done.stderr.count(told) == 1 and done.stdout.startswith(f"{both[0]}/")
    once = python("import sglang", path=[without_module, without_module, tree()], ours=False)
    assert "is the one that runs" not in once.stderr


@pytest.mark.parametrize("has_it", [False, True])
def test_a_folder_without_what_python_runs_first_is_told(python, tree, checkout, has_it):
    """As where the package itself is mounted into a folder that is on PYTHONPATH: all is READY, and nothing patched."""
    if not has_it:
        (checkout / "sitecustomize.py").unlink()
    found = status(python, path=[checkout, tree()], ours=False, check=False)
    assert found.returncode == 0 and "with what is READY" in found.stdout
    assert ("warning: our sitecustomize.py has not run in this Python" in found.stdout) is not has_it
    off = status(python, path=[checkout, tree()], ours=False, check=False, env={"DSV4_SM120": "off"})
    assert "sitecustomize.py has not run" not in off.stdout


def test_reasons_are_grouped():
    problems = ["a: no module", "wrong value of X: y", "b: other: thing", "c: no module", "no colon"]
    assert report.by_reason(problems) == ["a, c: no module", "wrong value of X: y", "b: other: thing", "no colon"]


@pytest.mark.parametrize("has_host", [True, False])
def test_a_name_that_nothing_has_is_told_with_the_nearest(python, tree, has_host):
    """Where SGLang is not found, too: `status` is asked on the host as well as in the image."""
    done = status(python, path=[tree()] if has_host else [], env={"DSV4_SM120_SET": "mch=off"}, check=False)
    assert done.returncode == 1 and done.stdout.count("DSV4_SM120_SET names mch (perhaps mhc?); it takes ") == 1


TABLE_FILE = "deepseek_v4_sm120/sglang_patches/table.py"
HALVES = {  # what became of which file -> what is told
    "gone": (TABLE_FILE, None, "ModuleNotFoundError: No module named 'deepseek_v4_sm120.sglang_patches.table'"),
    "cut off": (TABLE_FILE, "TABLE = (", "SyntaxError: '(' was never closed (table.py, line 1)"),
    "of another kind": (
        "deepseek_v4_sm120/settings.py",
        "raise OSError('Input/output error')",
        "OSError: Input/output",
    ),
}


@pytest.mark.parametrize("half", HALVES)
def test_half_a_folder_makes_no_import_of_sglang_fail(python, tree, without_module, half):
    """A Llama server, a client's tool: what would have run without us does; it is said in a line, and no traceback."""
    name, text, words = HALVES[half]
    if text is None:
        (without_module / name).unlink()
    else:
        (without_module / name).write_text(text)
    asked = {"path": [without_module, tree()], "ours": False, "check": False}
    code = "import sglang.srt.server_args, sys; print(sglang.srt.server_args.is_sm120_supported())"
    done = python(code, **asked)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"deepseek_v4_sm120: {without_module} cannot be loaded ({words}")
    assert line.endswith(
        "SGLang runs as without us; copy the folder that the build made again, as a whole, or rebuild "
        "it with ./build_docker.sh"
    )
    child = python(code, **asked, env={patching.VERDICT: "{}"})
    assert child.returncode == 1 and words.partition(" (")[0] in child.stderr, (
        "its parent has us: all of a server run the same code"
    )


def test_what_only_half_a_folder_lacks_is_no_fault_of_sglangs(python, tree, without_module):
    """Some patches lack the compiled module, and one a file of Python: no other release of ours would mend that."""
    (without_module / "deepseek_v4_sm120/sglang_patches/adapters/argument_defaults.py").unlink()
    refused = python(SERVER, path=[without_module, tree()], ours=False, check=False).stderr.partition("PatchError: ")[2]
    assert "cannot run here:\n" in refused and "argument_defaults" in refused, refused
    assert "What to do: mend what is named; or set" in refused and "use a release" not in refused
