"""sitecustomize.py and the whole start-up, in interpreters of their own."""

import os
import subprocess
import sys
import time
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


def test_a_wrong_setting_stops_sglang_and_nothing_else(python, tree):
    wrong = {"DSV4_SM120_FORCE": "sometimes"}
    assert python("print('alive')", path=[tree()], env=wrong).stdout == "alive\n"
    code = """
        for _ in range(2):
            try:
                import sglang
            except ValueError as error:
                print(error)
    """
    expected = "DSV4_SM120_FORCE must be unset or one of ops, seams; got 'sometimes'\n"
    assert python(code, path=[tree()], env=wrong).stdout == 2 * expected


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


def test_nothing_heavy_is_loaded_before_sglang(python):
    loaded = set(python.json("import sys, json; print(json.dumps(sorted(sys.modules)))"))
    bare = set(python.json("import sys, json; print(json.dumps(sorted(sys.modules)))", ours=False))
    ours = {m for m in loaded if m.startswith("deepseek_v4_sm120")}
    assert ours == {"deepseek_v4_sm120", "deepseek_v4_sm120.patching", "deepseek_v4_sm120.patching.import_hook"}
    heavy = {"torch", "dataclasses", "inspect", "ast", "importlib.metadata", "packaging", "logging", "traceback"}
    assert not loaded & heavy
    assert len(loaded - bare - ours) < 20


def test_start_up_costs_less_than_15_ms():
    """The best of many alternating runs: noise only ever adds."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("DSV4_SM120", "PYTHON"))}
    best = {}
    for _ in range(15):
        for name, path in (("with", str(REPO)), ("without", "")):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", "pass"], env={**environ, "PYTHONPATH": path}, check=True)
            best[name] = min(best.get(name, 1e9), time.perf_counter() - start)
    assert best["with"] - best["without"] < 0.015, best
