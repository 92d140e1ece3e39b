"""The build's own refusals: each check must be able to fail."""

import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import build_artifact
import build_results
import build_wheels
import pytest
from build_artifact import KernelUse
from build_results import BuildError, Results

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1kPf' for 'sm_120a'
ptxas info    : Function properties for _Z1kPf
    {stack} bytes stack frame, {spills} bytes spill stores, {spills} bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, {shared} bytes smem
ptxas info    : Compile time = 27.160 ms
"""
SHARED = {"k": 1024}


@pytest.mark.parametrize(
    ("stack", "spills", "shared", "accepted"),
    [(0, 0, 101_376, True), (8, 0, 0, False), (0, 4, 0, False), (0, 0, 101_377, False)],
)
def test_kernel_bounds(stack, spills, shared, accepted):
    uses = build_artifact.read_ptxas(LOG.format(stack=stack, spills=spills, shared=shared))
    assert uses == [KernelUse("_Z1kPf", "120a", 40, stack, 2 * spills, shared)]
    if accepted:
        build_artifact.check_kernels(uses, SHARED)
    else:
        with pytest.raises(BuildError, match="_Z1kPf sm_120a"):
            build_artifact.check_kernels(uses, SHARED)


@pytest.mark.parametrize("shared", [{}, {"k": 101_377}])
def test_dynamic_shared_memory_bound(shared):
    with pytest.raises(BuildError):
        build_artifact.check_kernels([], shared)


def test_interleaved_log_is_refused():
    lines = LOG.format(stack=0, spills=0, shared=0).splitlines()
    with pytest.raises(BuildError, match="begins before"):
        build_artifact.read_ptxas("\n".join([*lines[:2], *lines[1:]]))
    with pytest.raises(BuildError, match="never ended"):
        build_artifact.read_ptxas("\n".join(lines[:4]))


def test_a_kernel_that_spills_is_seen_in_this_compilers_own_log(tmp_path):
    source = tmp_path / "spill.cu"
    source.write_text(
        "__global__ void __maxnreg__(24) k(float* p) { float a[64];\n"
        "#pragma unroll\nfor (int i = 0; i < 64; i++) a[i] = p[i * 32 + threadIdx.x];\n__syncthreads();\n"
        "#pragma unroll\nfor (int i = 0; i < 64; i++) p[i * 64 + threadIdx.x] = a[63 - i] * a[(i * 7) % 64]; }\n"
    )
    toolkit = build_artifact.find_toolkit(None, build_artifact.CACHE)
    command = [
        toolkit.nvcc,
        "-gencode=arch=compute_90a,code=sm_90a",
        "-O3",
        "-Xptxas=-v",
        "-c",
        source,
        "-o",
        tmp_path / "spill.o",
    ]
    log = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout
    (use,) = build_artifact.read_ptxas(log)
    assert use.arch == "90a" and use.spill_bytes > 0
    with pytest.raises(BuildError):
        build_artifact.check_kernels([use], SHARED)


def test_library_with_a_stranger_in_needed_is_refused(tmp_path):
    library = tmp_path / "lib.so"
    source = tmp_path / "lib.c"
    source.write_text('#include <stdio.h>\nint f(void) { return puts("x"); }\n')
    stranger = tmp_path / "libtorch.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", stranger, source], check=True)
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,--no-as-needed", "-o", library, source, stranger], check=True)
    with pytest.raises(BuildError, match="libtorch.so"):
        build_artifact.check_library(library)


@pytest.fixture
def sources(tmp_path) -> Path:
    """A csrc/ of one source and what it includes."""
    folder = tmp_path / "csrc"
    (folder / "op").mkdir(parents=True)
    (folder / "common.h").write_text("#define ANSWER 42\n")
    (folder / "op/op.h").write_text('#pragma once\n#include "../common.h"\n')
    (folder / "op/op.cpp").write_text('#include "op/op.h"\n#include <cstdio>\nint f() { return ANSWER; }\n')
    return folder


def compiled(sources: Path, tools: str = "gcc", *flags: str) -> Path:
    results = Results(sources.parent / "results", sources, tools)
    return results.make(["g++", "-I.", *flags, "-c", "op/op.cpp"], results.included(sources / "op/op.cpp"), ".o")


def test_what_was_made_of_the_same_content_is_not_made_again(sources, capsys):
    first = compiled(sources)
    assert "for op/op.cpp" in capsys.readouterr().out and first.stat().st_size > 0
    for path in sources.rglob("*"):
        os.utime(path, (0, 0))
    assert compiled(sources) == first
    clone = shutil.copytree(sources, sources.parent / "clone/csrc")
    (clone.parent / "results").symlink_to(first.parent)
    assert compiled(clone).samefile(first)
    assert capsys.readouterr().out == ""


def test_what_goes_into_a_result_makes_another(sources, monkeypatch):
    made = [compiled(sources), compiled(sources, "another gcc"), compiled(sources, "gcc", "-O1")]
    for name in ("common.h", "op/op.h", "op/op.cpp"):
        (sources / name).write_text((sources / name).read_text() + "// changed\n")
        made.append(compiled(sources))
    monkeypatch.setenv("CPATH", str(sources))
    made.append(compiled(sources))
    assert len(set(made)) == len(made) and all(path.exists() for path in made)


def test_a_command_that_fails_leaves_no_result(sources):
    (sources / "op/op.h").write_text("#error of the test\n")
    for _ in range(2):
        with pytest.raises(BuildError, match="of the test"):
            compiled(sources)


def test_a_header_that_is_not_there_is_named(sources):
    (sources / "op/op.h").write_text('#include "nowhere.h"\n')
    with pytest.raises(BuildError, match="op.h includes nowhere.h"):
        compiled(sources)


def test_results_that_nobody_used_go(sources):
    kept, first = compiled(sources), compiled(sources, "gcc", "-O1")
    old = time.time() - (build_results.UNUSED_DAYS + 1) * 86400
    for path in (first, first.with_name(f"{first.name}.log")):
        os.utime(path, (old, old))
    assert compiled(sources) == kept and [*first.parent.glob(f"{first.name}*")] == []
    assert compiled(sources, "gcc", "-O1").exists()


def test_a_result_that_another_build_takes_away_meanwhile_stops_nothing(sources):
    folder = sources.parent / "results"
    folder.mkdir(exist_ok=True)
    (folder / "1-a.o").symlink_to(folder / "gone")  # is listed, and not there when it is looked at
    Results(folder, sources, "tools")


def test_texts_that_are_made_at_once_are_each_their_own(sources):
    results = Results(sources.parent / "results", sources, "tools")
    contents = [f"{i % 40}\n" * 20_000 for i in range(200)]
    with ThreadPoolExecutor(8) as pool:
        assert [path.read_text() for path in pool.map(results.text, contents)] == contents
    assert len([*results.folder.iterdir()]) == 40


def test_the_longest_are_in_the_tree():
    assert all((build_artifact.CSRC / name).is_file() for name in build_artifact.LONGEST)


def test_failing_build_leaves_the_earlier_folder(tmp_path):
    out = tmp_path / "build"
    (out / "deepseek_v4_sm120").mkdir(parents=True)
    (out / "sitecustomize.py").touch()
    with pytest.raises(RuntimeError), build_artifact.published(out) as fresh:
        (fresh / "half").touch()
        raise RuntimeError("the compiler fell over")
    assert [p.name for p in tmp_path.iterdir()] == ["build"]
    assert (out / "sitecustomize.py").exists() and not (out / "half").exists()
    with build_artifact.published(out) as fresh:
        (fresh / "whole").touch()
    (kept,) = [p for p in tmp_path.iterdir() if p != out]
    assert [p.name for p in out.iterdir()] == ["whole"] and (kept / "sitecustomize.py").exists()


@pytest.mark.parametrize("builder", ["toolchain", "docker"])
def test_a_container_keeps_the_folder_that_it_has_mounted(tmp_path, builder):
    """A mount is of a folder, not of its path: without it `status` in a running server's container says that there is
    nothing of ours, and a process that the server starts runs without us, without a word. Until the next build."""
    engine, out = tmp_path / "bin/docker", tmp_path / "a build"
    engine.parent.mkdir()
    engine.write_text(ENGINE)
    engine.chmod(0o755)
    package = out / "deepseek_v4_sm120"
    package.mkdir(parents=True)
    (package / "table.py").touch()
    mounted = os.open(package, os.O_RDONLY)
    for has_it in (True, False):
        if builder == "docker":
            environ = os.environ | {"PATH": f"{engine.parent}:{os.environ['PATH']}"}
            subprocess.run([build_artifact.REPO / "build_docker.sh", "--out", out], env=environ, check=True)
        else:
            with build_artifact.published(out) as fresh:
                (fresh / "made").touch()
        assert (os.listdir(mounted) == ["table.py"]) is has_it
        (out / "made").rename(out / "sitecustomize.py")  # what an artifact may have
        assert len([*tmp_path.glob(".*")]) == 1
    os.close(mounted)


def test_whoever_a_container_runs_as_can_read_the_folder(tmp_path, monkeypatch):
    """Else it would run without us, without a word, where the one who built it has a umask of 077."""
    monkeypatch.setattr(build_artifact, "build", lambda options: (options.out / "ops").mkdir(parents=True))
    monkeypatch.setattr(sys, "argv", ["build_artifact.py", "--out", str(tmp_path / "build")])
    before = os.umask(0o077)
    try:
        assert build_artifact.main() == 0
    finally:
        os.umask(before)
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in ("build", "build/ops")} == {0o755}


# a docker whose builds make one file
ENGINE = """#!/bin/sh
for last; do case $last in *dest=*) touch "${last##*dest=}/made";; --help) echo --output;; esac; done
"""


@pytest.mark.parametrize("base", ["", "mirror.example/python@sha256:0a b"])
def test_the_image_that_builds_is_the_one_that_is_named(tmp_path, base):
    """By BUILD_BASE; without it the Dockerfile's own, which an empty argument would take away."""
    engine, told = tmp_path / "bin/docker", tmp_path / "told"
    engine.parent.mkdir()
    engine.write_text(ENGINE + f'case $* in *--help) ;; build*) printf "%s\\n" "$@" > "{told}";; esac\n')
    engine.chmod(0o755)
    environ = {**os.environ, "PATH": f"{engine.parent}:{os.environ['PATH']}", "BUILD_BASE": base}
    command = [build_artifact.REPO / "build_docker.sh", "--out", tmp_path / "out"]
    subprocess.run(command, env=environ, check=True, capture_output=True)
    words = told.read_text().splitlines()
    given = {words[n + 1].partition("=")[0]: words[n + 1] for n, word in enumerate(words) if word == "--build-arg"}
    assert set(given) == {"GIT_COMMIT"} | ({"BUILD_BASE"} if base else set())
    assert given.get("BUILD_BASE", "") == (f"BUILD_BASE={base}" if base else "")
    dockerfile = (build_artifact.REPO / "Dockerfile").read_text()
    assert "\nARG BUILD_BASE=python:3.12-slim-bookworm\n" in dockerfile.partition("\nFROM ")[0]
    assert "\nFROM ${BUILD_BASE} AS build\n" in dockerfile


def test_a_docker_build_that_fails_says_what_needs_no_docker(tmp_path):
    """Docker Hub may be out of reach, or over its limit; what was there stays."""
    engine, out = tmp_path / "bin/docker", tmp_path / "out"
    engine.parent.mkdir()
    (out / "deepseek_v4_sm120").mkdir(parents=True)
    engine.write_text("#!/bin/sh\ncase $* in *--help) echo --output;; build*) echo no hub >&2; exit 7;; esac\n")
    engine.chmod(0o755)
    path = f"{engine.parent}:{os.environ['PATH']}"
    command = [build_artifact.REPO / "build_docker.sh", "--out", out]
    done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("no hub\n")
    assert f'without Docker: python3 csrc/build_artifact.py --out "{out}"\n' in done.stderr
    assert sorted(tmp_path.iterdir()) == [engine.parent, out] and (out / "deepseek_v4_sm120").is_dir()


@pytest.mark.parametrize("builder", ["toolchain", "docker"])
def test_a_folder_with_anything_else_in_it_is_not_replaced(tmp_path, builder):
    """A checkout and a site-packages have deepseek_v4_sm120/ as well; what `docker build` writes is a stand-in's."""
    engine = tmp_path / "bin/docker"
    engine.parent.mkdir()
    engine.write_text(ENGINE)
    engine.chmod(0o755)

    def build(out):
        if builder == "docker":
            command = [build_artifact.REPO / "build_docker.sh", "--out", out]
            path = f"{engine.parent}:{os.environ['PATH']}"
            done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True)
            return done.stderr if done.returncode else ""
        try:
            with build_artifact.published(out) as fresh:
                (fresh / "made").touch()
        except BuildError as error:
            return str(error)
        return ""

    checkout = tmp_path / "checkout"
    for name in (".git", "deepseek_v4_sm120", "csrc"):
        (checkout / name).mkdir(parents=True)
    assert f"{checkout} holds .git, which no artifact has" in build(checkout)
    assert sorted(path.name for path in checkout.iterdir()) == [".git", "csrc", "deepseek_v4_sm120"]
    earlier = tmp_path / "earlier"
    for name in ("deepseek_v4_sm120", "deepseek_v4_sm120-0.1.0.dist-info", "__pycache__"):
        (earlier / name).mkdir(parents=True)
    (earlier / "sitecustomize.py").touch()
    for out in (earlier, tmp_path / "new"):
        assert build(out) == "" and [path.name for path in out.iterdir()] == ["made"]


def test_what_may_not_be_replaced_is_told_before_anything_is_compiled(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["build_artifact.py", "--out", str(build_artifact.REPO)])
    monkeypatch.setattr(build_artifact, "find_toolkit", lambda *_: pytest.fail("a compiler was looked for"))
    assert build_artifact.main() == 1
    assert f"FAILED: {build_artifact.REPO} holds " in capsys.readouterr().err
    (tmp_path / "file").touch()
    monkeypatch.setattr("sys.argv", ["build_artifact.py", "--out", str(tmp_path / "file")])
    assert build_artifact.main() == 1 and "is not a folder" in capsys.readouterr().err


def test_a_user_without_a_home_folder_builds_where_he_says(tmp_path):
    """`docker run --user 1000`: no HOME, and no name for that number."""
    code = (
        "import os, pwd, runpy, sys\n"
        "def unknown(number): raise KeyError(number)\n"
        "pwd.getpwuid = unknown; del os.environ['HOME']\n"
        f"build = runpy.run_path({str(build_artifact.REPO / 'csrc/build_artifact.py')!r})\n"
        "from deepseek_v4_sm120.sglang_patches import models_served\n"
        "print(build['CACHE'])\n"
        "try: models_served.read_config('~/model')\n"
        "except models_served.json_file.JsonFileError as error: print(error)\n"
    )
    environ = {name: value for name, value in os.environ.items() if name not in ("XDG_CACHE_HOME", "PYTHONPATH")}
    done = subprocess.run([sys.executable, "-c", code], env=environ | {"HOME": "/"}, capture_output=True, text=True)
    told = "/.cache/deepseek-v4-sm120/build\n~/model cannot be read: No such file or directory\n"
    assert (done.stdout, done.stderr) == (told, "")


@pytest.mark.parametrize("place", ["/proc/nowhere", "file/below"])
def test_a_home_folder_that_cannot_be_written_is_told_with_what_names_another(place, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").touch()
    cache = tmp_path / place
    monkeypatch.setattr("sys.argv", ["build_artifact.py", "--out", str(tmp_path / "out"), "--cache", str(cache)])
    monkeypatch.setattr(build_artifact, "find_toolkit", lambda *_: pytest.fail("a compiler was looked for"))
    assert build_artifact.main() == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "FAILED" in line]
    assert f"FAILED: {cache} cannot be written (" in line and line.endswith(
        "--cache DIR or XDG_CACHE_HOME names another"
    )
    done = subprocess.run(
        [sys.executable, build_artifact.REPO / "tests/run.py"],
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "cannot be written (" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["--out"], ["--out", ""], ["--out="]])
def test_no_folder_to_build_into_is_told(words):
    done = subprocess.run([build_artifact.REPO / "build_docker.sh", *words], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "build_docker.sh: --out needs a folder\n")


def test_a_folder_that_docker_cannot_mount_is_refused(tmp_path):
    """Its --output and --mount are lists with commas: the one fails late, the other wherever somebody pastes it."""
    for name in ("a,b", 'a"b'):
        command = [build_artifact.REPO / "build_docker.sh", "--out", tmp_path / name]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2 and f"{tmp_path / name} has a comma or a quotation mark" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("python", sorted({sys.executable, "/usr/bin/python3"}))
def test_a_private_venv_is_found_where_it_is(tmp_path, python):
    """By the Python that builds; Debian's and Ubuntu's own have another place for packages outside of a venv."""
    if not Path(python).exists():
        pytest.skip(f"there is no {python}")
    script = (
        "import sys; sys.path[:0] = sys.argv[2:]; import pathlib, subprocess; import build_wheels as b\n"
        "b.run = lambda c: 'venv' in c and subprocess.run([*map(str, c), '--without-pip'], check=True)\n"
        "print(b.private_venv(pathlib.Path(sys.argv[1]), ('one',)))"
    )
    command = [python, "-c", script, tmp_path, build_artifact.CSRC, build_artifact.REPO]
    found = Path(subprocess.run(command, text=True, capture_output=True, check=True).stdout.splitlines()[-1])
    assert found.is_dir() and found.is_relative_to(tmp_path)


def test_a_wheel_whose_bytes_are_others_is_not_installed(tmp_path, monkeypatch):
    """An index, a mirror or a proxy that hands out another file of that name and version; nor is one used that was
    installed by another digest."""
    wheel = tmp_path / "one-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr("one.py", "")
        made.writestr("one-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: one\nVersion: 1\n")
        made.writestr("one-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr("one-1.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    real = build_wheels.run

    def run(command):
        """With this Python's pip: one for each of the venvs is most of what making them takes."""
        if command[1:3] == ["-m", "venv"]:
            return real([*command, "--without-pip"])
        return real([sys.executable, "-m", "pip", "--python", *command[:1], *command[3:]])

    monkeypatch.setattr(build_wheels, "run", run)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    found = build_wheels.private_venv(tmp_path / "cache", (f"one==1 --hash=sha256:{digest}",))
    assert (found / "one.py").is_file()
    with pytest.raises(BuildError, match="DO NOT MATCH THE HASHES"):
        build_wheels.private_venv(tmp_path / "cache", (f"one==1 --hash=sha256:{'0' * 64}",))
    with pytest.raises(BuildError, match="Hashes are required"):
        build_wheels.private_venv(tmp_path / "cache", ("one==1",))
    monkeypatch.setattr(build_wheels, "run", lambda command: pytest.fail(f"{command}, though it is there"))
    assert build_wheels.private_venv(tmp_path / "cache", (f"one==1 --hash=sha256:{digest}",)) == found


def test_unusable_requests_say_what_was_found(tmp_path):
    with pytest.raises(BuildError, match="no-such-compiler does not run: No such file"):
        build_artifact.run(["no-such-compiler", "--version"])
    old = tmp_path / "nvcc"
    old.write_text("#!/bin/sh\necho nonsense\n")
    old.chmod(0o755)
    with pytest.raises(BuildError, match="names no release"):
        build_artifact.find_toolkit(str(old), tmp_path)
    with pytest.raises(BuildError, match="does not run"):
        build_artifact.find_interpreters(["/bin/false"])


def test_what_calibrate_times_is_told_apart_and_nothing_else(tmp_path, monkeypatch):
    """By content: a profile of it says so (patching/profile.py)."""
    for name in ("REPO", "CSRC", "PACKAGE"):
        monkeypatch.setattr(build_artifact, name, tmp_path / name.replace("REPO", ""))
    files = [tmp_path / name for name in ("CSRC/op/launch.cu", "CSRC/op/op.h", "PACKAGE/ops/op.py")]
    others = [tmp_path / name for name in ("PACKAGE/commands/doctor.py", "CSRC/build_artifact.py", "README.md")]
    for path in (*files, *others):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("as it was")
    found = [build_artifact.code("13.0")]
    for path in others:
        path.write_text("changed")
    assert build_artifact.code("13.0") == found[0] != build_artifact.code("13.1")
    for path in files:
        path.write_text("changed")
        found.append(build_artifact.code("13.0"))
    assert len(set(found)) == 1 + len(files)
