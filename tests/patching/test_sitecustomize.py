"""sitecustomize.py and the whole start-up, in interpreters of their own."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
SEAMS = {"DSV4_SM120_FORCE": "seams"}  # its replacements need neither torch nor the compiled module
IS_PATCHED = "from sglang.srt.server_args import is_sm120_supported; print(is_sm120_supported())"


def test_patches_a_process_that_imports_sglang(python, tree):
    assert python(IS_PATCHED, path=[tree()], env=SEAMS).stdout == "True\n"


def test_without_a_switch_the_predicate_is_the_very_original(python, tree):
    assert python(IS_PATCHED + "; print(is_sm120_supported.__module__)", path=[tree()]).stdout == (
        "False\nsglang.srt.utils.common\n"
    )


def test_off_switches_all_of_it_off(python, tree):
    left = "import sys; print([x for x in [*sys.modules, *map(repr, sys.meta_path)] if 'deepseek_v4' in x])"
    done = python(f"{IS_PATCHED}; {left}", path=[tree()], env={**SEAMS, "DSV4_SM120": "off"})
    assert done.stdout == "False\n[]\n"


def test_chains_the_shadowed_sitecustomize_first_and_once(python, tree, tmp_path, write_tree):
    neighbour = write_tree(
        tmp_path / "neighbour",
        {
            "sitecustomize.py": """
                import sys
                print("neighbour", __name__, "deepseek_v4_sm120.patching" in sys.modules)
            """
        },
    )
    done = python(IS_PATCHED, path=[neighbour, tree()], env=SEAMS)
    assert done.stdout == "neighbour sitecustomize False\nTrue\n"


def test_two_copies_of_ours_and_a_neighbour(python, tree, tmp_path, write_tree):
    copy = write_tree(tmp_path / "copy", {"sitecustomize.py": (REPO / "sitecustomize.py").read_text()})
    neighbour = write_tree(tmp_path / "neighbour", {"sitecustomize.py": "print('neighbour')"})
    done = python(IS_PATCHED, path=[copy, neighbour, tree()], env=SEAMS)
    assert done.stdout == "neighbour\nTrue\n" and done.stderr.count("failed") == 0


@pytest.mark.parametrize("is_first", [True, False])
def test_a_neighbour_that_chains_as_well_ends(python, tree, tmp_path, write_tree, is_first):
    text = """
        import os, sys
        from importlib.machinery import PathFinder
        from importlib.util import module_from_spec
        here = os.path.dirname(os.path.abspath(__file__))
        print("neighbour")
        spec = PathFinder.find_spec("sitecustomize", [p for p in sys.path if os.path.abspath(p) != here])
        spec.loader.exec_module(module_from_spec(spec))
    """
    neighbour = write_tree(tmp_path / "neighbour", {"sitecustomize.py": text})
    copy = write_tree(tmp_path / "copy", {"sitecustomize.py": (REPO / "sitecustomize.py").read_text()})
    path = [neighbour, copy, tree()] if is_first else [copy, neighbour, tree()]
    done = python(IS_PATCHED, path=path, env=SEAMS)
    assert done.stdout.endswith("True\n") and done.stdout.count("neighbour") <= 2 and done.stderr.count("failed") == 0


def test_a_raising_neighbour_is_reported_and_stops_nothing(python, tree, tmp_path, write_tree):
    neighbour = write_tree(tmp_path / "neighbour", {"sitecustomize.py": "raise RuntimeError('neighbour is ill')"})
    done = python(IS_PATCHED, path=[neighbour, tree()], env=SEAMS)
    assert done.stdout == "True\n"
    assert "neighbour is ill" in done.stderr and "the sitecustomize that ours shadows" in done.stderr


def test_an_exception_of_ours_stops_no_interpreter(python, tmp_path, write_tree):
    copy = write_tree(tmp_path / "copy", {"sitecustomize.py": (REPO / "sitecustomize.py").read_text()})
    write_tree(copy, {"deepseek_v4_sm120/__init__.py": "raise RuntimeError('half a folder')"})
    done = python("print('alive')", path=[copy], ours=False)
    assert done.stdout == "alive\n" and "half a folder" in done.stderr


@pytest.mark.parametrize("flag", ["-I", "-S", "-E"])
def test_isolated_interpreters_start_without_us(python, flag):
    done = python("import sys; print('deepseek_v4_sm120' in sys.modules)", flags=[flag])
    assert done.stdout == "False\n" and done.stderr == ""


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_multiprocessing_children(python, tree, tmp_path, method):
    script = tmp_path / "main.py"
    script.write_text(
        f"""
import multiprocessing, os

def child(pipe):
    from sglang.srt.server_args import is_sm120_supported
    pipe.send((is_sm120_supported(), os.getpid()))

if __name__ == "__main__":
    context = multiprocessing.get_context({method!r})
    here, there = context.Pipe()
    process = context.Process(target=child, args=(there,))
    process.start()
    answer, pid = here.recv()
    process.join()
    print(answer, pid != os.getpid())
"""
    )
    assert python(script, path=[tree()], env=SEAMS).stdout == "True True\n"


CHILDREN = """
    import multiprocessing, sys
    def child(answer):
        import sglang.srt.managers.scheduler
        answer.put("deepseek_v4_sm120" in sys.modules)
    if __name__ == "__main__":
        import sglang.srt.managers.scheduler
        context = multiprocessing.get_context("spawn")
        answer = context.Queue()
        for _ in range(2):
            process = context.Process(target=child, args=(answer,))
            process.start()
            print(answer.get())
            process.join()
"""


def test_a_server_and_its_children_warn_once(python, tree, tmp_path):
    """Of a variable that is none of ours, a folder for reports that is none, and a patch that does not fit."""
    script = tmp_path / "server.py"
    script.write_text(textwrap.dedent(CHILDREN))
    host = tree({"sglang/kernels/ops/attention/flash_mla_sm120.py": "other = 1"})
    env = {"DSV4_SM120_REPROT": "/somewhere", "DSV4_SM120_REPORT": "/dev/null"}
    done = python(script, path=[host], env=env)
    assert done.stdout == "True\nTrue\n"
    for words in ("DSV4_SM120_REPROT is none of ours", "no reports in DSV4_SM120_REPORT=/dev/null", "does not define"):
        assert done.stderr.count(words) == 1, words


def test_a_relative_folder_for_reports_is_one_place_for_all_processes_of_a_server(
    python, python_with_torch, tree, tmp_path
):
    """Wherever they work; the first one says which, once, and so do `status` and what `doctor` asks."""
    script = tmp_path / "server.py"
    script.write_text("import os; os.chdir('/')\n" + textwrap.dedent(CHILDREN))
    started = {"path": [tree()], "env": {"DSV4_SM120_REPORT": "reports"}, "cwd": tmp_path}
    done = python(script, **started)
    assert done.stdout == "True\nTrue\n" and len(list((tmp_path / "reports").glob("*.json"))) == 3
    words = f"DSV4_SM120_REPORT=reports is relative to {tmp_path}: here, and in what is started from here, it is"
    assert done.stderr.count(words) == 1 and done.stderr.count(f"it is {tmp_path / 'reports'};") == 1
    status = "from deepseek_v4_sm120.__main__ import main; main(['status'])"
    # -S: no sitecustomize, as where only `python -m` has our folder
    for start, way in ((python_with_torch, {}), (python, {"flags": ["-S"], "path": []})):
        shown = start(status, **started | way).stdout
        assert shown.count(f"warning: {words}") == 1 and shown.count("\npid ") == 3
    absolute = {"env": {"DSV4_SM120_REPORT": str(tmp_path / "reports")}, "path": [tree()]}
    assert "is relative to" not in python_with_torch(status, **absolute).stdout + python(script, **absolute).stderr


def test_a_relative_profile_is_the_same_file_for_all_processes(python, tree, tmp_path):
    script = "import os; os.chdir('/'); from deepseek_v4_sm120.settings import settings; print(settings().profile)"
    found = python(script, path=[tree()], env={"DSV4_SM120_PROFILE": "profile.json"}, cwd=tmp_path)
    assert found.stdout == f"{tmp_path / 'profile.json'}\n"


@pytest.mark.parametrize("entry", [".", "", "sub/.."])
def test_a_relative_entry_of_pythonpath_is_told(tree, tmp_path, entry):
    """The parent has us; a child that starts elsewhere would not."""
    copied = tmp_path / "copied"
    shutil.copytree(REPO / "deepseek_v4_sm120", copied / "deepseek_v4_sm120", ignore=shutil.ignore_patterns("*.so"))
    shutil.copyfile(REPO / "sitecustomize.py", copied / "sitecustomize.py")
    (copied / "sub").mkdir()
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("DSV4_SM120", "PYTHON"))}
    environ |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": os.pathsep.join([entry, str(tree())])}
    code = "import os; os.chdir('/'); import sglang; from deepseek_v4_sm120.__main__ import main; main(['status'])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=copied, env=environ, capture_output=True, text=True, check=True)
    words = f"PYTHONPATH has our folder as {entry!r}, relative to {copied}: a process that starts elsewhere runs"
    assert done.stderr.count(words) == 1 and f"write {copied}" in done.stderr and words in done.stdout
    absolute = {**environ, "PYTHONPATH": os.pathsep.join([entry, str(copied), str(tree())])}
    done = subprocess.run(command, cwd=copied, env=absolute, capture_output=True, text=True, check=True)
    assert "runs without" not in done.stderr + done.stdout


TYPEGUARD = """
    import importlib.machinery, sys
    class Finder:  # as typeguard's import hook: for its packages it asks PathFinder, and nobody else
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "sglang":
                return importlib.machinery.PathFinder.find_spec(name, path, target)
    sys.meta_path.insert(0, Finder())
"""


def test_a_finder_in_front_of_ours_leaves_nothing_unpatched(python, tree):
    assert python(textwrap.dedent(TYPEGUARD) + IS_PATCHED, path=[tree()], env=SEAMS).stdout == "False\n", (
        "the small tree imports nothing but itself, so no search reached us: the case for the second door"
    )
    host = tree({"sglang/__init__.py": "import colorsys  # anything that the finder in front does not answer\n"})
    assert python(textwrap.dedent(TYPEGUARD) + IS_PATCHED, path=[host], env=SEAMS).stdout == "True\n"


def test_the_second_door_patches_what_the_finder_in_front_brought_in(python_with_torch, tree):
    """What SGLang's load_plugins() calls, once the modules are there."""
    door = """
        import sglang.srt.server_args as module
        from sglang.srt.models import deepseek_v4
        from deepseek_v4_sm120 import patching
        assert patching.active_engine() is None
        patching.install()
        patching.install()
        print(module.is_sm120_supported(), deepseek_v4.is_sm120_supported(),
              sorted({r.state for r in patching.active_engine().records if r.patch.name == "sm120_seams"}))
        from sglang.srt.layers.attention import deepseek_v4_backend
        print(deepseek_v4_backend._is_sm120)
    """
    done = python_with_torch(textwrap.dedent(TYPEGUARD) + textwrap.dedent(door), path=[tree()], env=SEAMS)
    assert done.stdout == "True True ['APPLIED', 'READY']\nTrue\n"


def test_nothing_heavy_is_loaded_before_sglang(python):
    loaded = set(python.json("import sys, json; print(json.dumps(sorted(sys.modules)))"))
    bare = set(python.json("import sys, json; print(json.dumps(sorted(sys.modules)))", ours=False))
    ours = {m for m in loaded if m.startswith("deepseek_v4_sm120")}
    assert ours == {"deepseek_v4_sm120", "deepseek_v4_sm120.patching", "deepseek_v4_sm120.patching.import_hook"}
    heavy = {"torch", "dataclasses", "inspect", "ast", "importlib.metadata", "packaging", "logging", "traceback"}
    assert not loaded & heavy
    assert len(loaded - bare - ours) < 20


def test_start_up_costs_less_than_15_ms():
    """Processor time, the best of many alternating runs: noise only ever adds; a busy machine needs more of them."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("DSV4_SM120", "PYTHON"))}
    best = {"with": 1e9, "without": 1e9}
    for turn in range(90):
        for name, path in (("with", str(REPO)), ("without", "")):
            process = subprocess.Popen([sys.executable, "-c", "pass"], env={**environ, "PYTHONPATH": path})
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            assert process.returncode == 0
            best[name] = min(best[name], used.ru_utime + used.ru_stime)
        if turn >= 14 and best["with"] - best["without"] < 0.015:
            break
    assert best["with"] - best["without"] < 0.015, best
