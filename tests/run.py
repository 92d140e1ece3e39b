#!/usr/bin/env python3
"""The test command: builds the artifact, then ruff, clang-format and pytest.

    python3 tests/run.py [pytest arguments]          what needs no GPU, in an environment of its own (requirements.txt)
    python3 tests/run.py --gpu [pytest arguments]    the tests marked gpu, with this interpreter's own torch and pytest,
                                                     and several processes where it has pytest-xdist
    python3 tests/run.py --sanitize [tools]          every operator under compute-sanitizer, likewise (tests/sanitizer)

The environment is kept under XDG_CACHE_HOME (default ~/.cache) and made anew when tests/requirements.txt changes.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from deepseek_v4_sm120.ops.shared import extension  # noqa: E402

REQUIREMENTS = REPO / "tests/requirements.txt"
BUILD = [str(REPO / "csrc/build_artifact.py")]
GPU_DEVICES = (Path("/dev/nvidia0"), Path("/dev/dxg"))
GPU_PROCESSES = 6  # that share a card; each test has a few GB at most
PRESENT = """
import sys
from deepseek_v4_sm120.ops.shared import extension
built = extension.describe()
has_code = any(extension.runs_on(arch, ({})) for arch in built["archs"] or ())
sys.exit(built["problem"] or (None if has_code else f"the build has code for {{built['archs']}} alone"))
"""
NO_TESTS = 5  # pytest's exit code where nothing was selected


def say(text: str) -> None:
    print(f"tests/run.py: {text}", flush=True)


def clean_environment() -> dict[str, str]:
    """Without what would make the tests speak about another checkout, or about the caller's DSV4 switches, or each
    process compile what it imports."""
    strangers = {"PYTHONPATH", "PYTHONHOME", "PYTEST_ADDOPTS", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"}
    return {k: v for k, v in os.environ.items() if k not in strangers and not k.startswith("DSV4_")}


def private_python() -> Path:
    """Python of the cached environment that holds tests/requirements.txt."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepseek-v4-sm120"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        (cache / "lock").touch()
    except OSError as error:
        raise SystemExit(
            f"tests/run.py: {cache} cannot be written ({error.strerror}); XDG_CACHE_HOME names another"
        ) from error
    digest = hashlib.sha256(sys.version.encode() + REQUIREMENTS.read_bytes()).hexdigest()[:12]
    venv = cache / f"tests-{digest}"
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (venv / "complete").exists():
            say(f"installing tests/requirements.txt into {venv}")
            shutil.rmtree(venv, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
            pip = [str(venv / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*pip, "--no-compile", "-r", str(REQUIREMENTS)], check=True)
            (venv / "complete").touch()
    return venv / "bin/python"


def prepared(environment: dict[str, str]) -> tuple[str, list[subprocess.Popen]]:
    """(the private Python, processes: one fetches what tests will ask for, one compiles the tests); all of it beside
    the build, and behind it where both want a core."""
    os.nice(10)  # this thread, and what it starts
    python = str(private_python())
    quiet = {"env": environment, "cwd": REPO, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = [[python, "-m", "tests.patching.wheels"]]  # a test says what cannot be fetched
    if not (REPO / "tests/__pycache__").exists():  # what collects does not compile all tests when the build has ended
        started.append([python, "-m", "pytest", "--collect-only", "-q"])
    return python, [subprocess.Popen(command, **quiet) for command in started]


def run_without_gpu(arguments: list[str]) -> int:
    environment = clean_environment()
    with ThreadPoolExecutor(1) as beside:
        preparing = beside.submit(prepared, environment)
        # The build runs on the interpreter that started us: it must need the standard library only.
        code = subprocess.run([sys.executable, *BUILD], env=environment, cwd=REPO).returncode
        python, (fetching, *compiling) = preparing.result()
    for process in compiling:  # a build that was there is done at once: what collects compiles the rest itself
        process.kill()
    if code:
        fetching.kill()
        return code
    cpp = (p for folder in ("csrc", "tests/emulator") for p in sorted((REPO / folder).rglob("*")))
    sources = [p for p in cpp if p.suffix in (".cpp", ".cu", ".cuh", ".h")]
    checks = {
        "ruff": [python, "-m", "ruff", "check", "--output-format=concise", "."],
        "ruff format": [python, "-m", "ruff", "format", "--check", "."],
        "clang-format": [str(Path(python).with_name("clang-format")), "--dry-run", "-Werror", *map(str, sources)],
    }
    faulty = [name for name, lint in checks.items() if subprocess.run(lint, env=environment, cwd=REPO).returncode]
    # A file's tests stay together: its wheels are unpacked and its interpreters started once. Three processes more than
    # cores, for those that wait for servers, and of each one thread, for threads that wait for each other take a core
    # too; in the order of conftest.py, which has the long files early.
    spread = ["-p", "tests.forks", "--forks", str((os.cpu_count() or 1) + 3)]
    costs = ["-p", "tests.processor_time", *([] if arguments else ["--whole-suite"])]
    command = [python, "-m", "pytest", "-m", "not gpu", *spread, *costs, *arguments]
    tests = subprocess.run(command, env=environment | {"OMP_NUM_THREADS": "1"}, cwd=REPO).returncode
    fetching.kill()
    if any(device.exists() for device in GPU_DEVICES):
        say("this machine has a GPU; its tests were not selected. Run them with: python3 tests/run.py --gpu")
    if faulty:
        say(f"{' and '.join(faulty)} found faults, see above pytest's output")
    return tests or len(faulty)


def prepared_gpu(environment: dict[str, str], *needed: str) -> str | None:
    """The card's capability, once there is a build for this interpreter; None: why not is said."""
    modules = ", ".join([*needed, "torch"])
    probe = f"import {modules}; print('%d.%d' % torch.cuda.get_device_capability(), torch.cuda.get_device_name())"
    found = subprocess.run([sys.executable, "-c", probe], text=True, capture_output=True)
    if found.returncode != 0:
        say(f"{sys.executable} needs {' and '.join([*needed, 'a torch'])} that sees a GPU:\n{found.stderr.strip()}")
        return None
    capability, name = found.stdout.strip().split(" ", 1)
    say(f"GPU {name}, capability {capability}")
    present = [sys.executable, "-c", PRESENT.format(capability.replace(".", ", "))]
    if subprocess.run(present, env=environment, cwd=REPO).returncode != 0:
        own = extension.archs_for([tuple(map(int, capability.split(".")))])
        build = [sys.executable, *BUILD, "--python", sys.executable, "--archs", own]
        if subprocess.run(build, env=environment, cwd=REPO).returncode:
            return None
    return capability


def run_sanitized(arguments: list[str]) -> int:
    environment = clean_environment()
    if (capability := prepared_gpu(environment)) is None:
        return 1
    command = [sys.executable, "-m", "tests.sanitizer", "--capability", capability, *arguments]
    return subprocess.run(command, env=environment, cwd=REPO).returncode


def run_on_gpu(arguments: list[str]) -> int:
    """The gpu tests. Here a skipped test is a failed one: whoever asked for the GPU wants to know what ran on it."""
    # simulated ranks wait for each other on one card: with fewer connections some would share a queue, in order
    environment = clean_environment() | {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    if (capability := prepared_gpu(environment, "pytest")) is None:
        return 1
    selection = "gpu" if capability.startswith("12.") else "gpu and not sm120"
    codes, skipped = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number, words in enumerate(gpu_passes(selection, importlib.util.find_spec("xdist") is not None, arguments)):
            log = Path(folder, f"pytest{number}.xml")
            command = [sys.executable, "-m", "pytest", f"--junitxml={log}", *words]
            code = subprocess.run(command, env=environment, cwd=REPO).returncode
            codes.append(code if log.exists() else code or 1)
            cases = ElementTree.parse(log).iter("testcase") if log.exists() else ()
            skipped += [case.get("name") for case in cases if case.find("skipped") is not None]
    if skipped:
        say(f"FAILED: {len(skipped)} GPU tests were skipped: {', '.join(skipped[:8])}")
    return outcome(codes) or bool(skipped)


def outcome(codes: list[int]) -> int:
    """Of passes, of which one may have none of the tests that were asked for, but not all."""
    ran = [code for code in codes if code != NO_TESTS]
    return next((code for code in ran if code), 0) if ran else NO_TESTS


def gpu_passes(selection: str, has_xdist: bool, arguments: list[str]) -> list[list[str]]:
    """pytest's words for each pass: with pytest-xdist what can share the card side by side, then what cannot. One where
    the caller has a number of processes, or a selection, which would stand in the place of both passes' own."""
    if not has_xdist or any(word.startswith(("-n", "--numprocesses", "-m")) for word in arguments):
        return [["-m", selection, *arguments]]
    spread = ["-n", str(GPU_PROCESSES), "--dist", "worksteal"]
    return [
        ["-m", f"{selection} and not alone", *spread, *arguments],
        ["-m", f"{selection} and alone", *arguments],
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="run the tests marked gpu with this interpreter")
    parser.add_argument("--sanitize", action="store_true", help="run every operator under compute-sanitizer's tools")
    options, arguments = parser.parse_known_args()
    if options.sanitize:
        return run_sanitized(arguments)
    return run_on_gpu(arguments) if options.gpu else run_without_gpu(arguments)


if __name__ == "__main__":
    sys.exit(main())
