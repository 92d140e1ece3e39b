#!/usr/bin/env python3
"""Builds the folder that users mount: the package, its compiled module per Python ABI, sitecustomize.py, dist-info.

build_docker.sh, the Dockerfile and tests/run.py all call this script, so what CI checks is what the image builds.
Needs Python 3.11+, g++ and the network: pybind11 and ninja, and nvcc where none is found, come from PyPI into
.build-cache/. No GPU, no torch, no SGLang.

Why a written build.ninja and not CMake with scikit-build-core: one set of CUDA objects serves several Python ABIs,
which a wheel build per interpreter cannot express; the flags are one list in this file; there is no configure step.
"""

from __future__ import annotations

import argparse
import ast
import base64
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

if sys.version_info < (3, 11):
    sys.exit(f"build_artifact: needs Python 3.11 or newer, this is {sys.version.split()[0]} ({sys.executable})")

import tomllib

REPO = Path(__file__).resolve().parent.parent
CSRC = REPO / "csrc"
PACKAGE = REPO / "deepseek_v4_sm120"

# 120a: RTX PRO 6000 and RTX 50. 121a: GB10. 90a: H100 and H200, where the kernels are validated. Cubins only, no PTX:
# an architecture-specific target ("a") has no forward compatibility to offer.
ARCHS = ("120a", "121a", "90a")
OLDEST_CUDA = (12, 9)
MAX_SHARED_BYTES = 101_376  # what one block can have on SM120: 99 KiB
NEWEST_GLIBC = (2, 34)  # SGLang's own wheels are manylinux_2_34
# Everything else is static. libstdc++ stays shared: with a copy of its own, this module would share pybind11's
# exception translators with other modules in the process, but not the exception state that they rethrow from.
ALLOWED_NEEDED = (
    *("libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"),
    *("ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"),
)

CUDA_FLAGS = (
    *("-O3", "-std=c++17", "--expt-relaxed-constexpr", "-lineinfo", "-Xptxas=-v"),
    *("-Xcompiler=-fPIC", "-Xcompiler=-fvisibility=hidden"),
)
CXX_FLAGS = ("-O2", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
# The version script keeps all but the init function private: static cudart must not export its symbols to, or take them
# from, the libcudart that torch loads.
LINK_FLAGS = ("-shared", "-Wl,--version-script=exports.map", "-Wl,--as-needed", "-Wl,-z,noexecstack")
EXPORTS = "{ global: PyInit__C; local: *; };\n"

TOOL_WHEELS = ("pybind11==3.0.4", "ninja==1.13.0")
CUDA_WHEELS = (
    *("nvidia-cuda-nvcc==13.0.88", "nvidia-cuda-crt==13.0.88", "nvidia-nvvm==13.0.88"),
    *("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-cccl==13.0.85"),
)


class BuildError(Exception):
    """A reason for which no artifact is made, in words for whoever called the script."""


@dataclass(frozen=True)
class Toolkit:
    nvcc: Path
    version: tuple[int, int]
    include: Path
    cudart: Path  # libcudart_static.a


@dataclass(frozen=True)
class Interpreter:
    path: str
    version: str  # "3.12"
    include: str
    ext_suffix: str  # ".cpython-312-x86_64-linux-gnu.so"

    @property
    def module(self) -> str:
        return f"_C{self.ext_suffix}"


@dataclass(frozen=True)
class KernelUse:
    """What ptxas said of one kernel on one architecture; device functions that were not inlined count with it."""

    kernel: str
    arch: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    static_shared_bytes: int


def say(text: str) -> None:
    print(f"build_artifact: {text}", flush=True)


def run(command: list[str | Path]) -> str:
    """Output of a command; BuildError with the end of what it printed when it fails."""
    done = subprocess.run([str(c) for c in command], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        raise BuildError(f"exit {done.returncode} of: {shlex.join(str(c) for c in command)}\n{done.stdout[-6000:]}")
    return done.stdout


# tools


def private_venv(cache: Path, wheels: tuple[str, ...]) -> tuple[Path, Path]:
    """(scripts, site-packages) of a venv under the cache with exactly these wheels; a finished one is used again."""
    digest = hashlib.sha256(" ".join((sys.version, *wheels)).encode()).hexdigest()[:12]
    venv = cache / f"venv-{digest}"
    if not (venv / "complete").exists():
        say(f"installing {', '.join(wheels)} into {venv}")
        shutil.rmtree(venv, ignore_errors=True)
        run([sys.executable, "-m", "venv", venv])
        run(
            [
                venv / "bin/python",
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                "--no-deps",
                *wheels,
            ]
        )
        (venv / "complete").touch()
    return venv / "bin", Path(sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)}))


def read_toolkit(nvcc: Path) -> Toolkit:
    """The toolkit behind this nvcc, which may be a wrapper script elsewhere."""
    release = re.search(r"release (\d+)\.(\d+)", run([nvcc, "--version"]))
    if release is None:
        raise BuildError(f"{nvcc} --version names no release")
    top = re.search(
        r"^#\$ TOP=(.*)$", run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull]), re.MULTILINE
    )
    if top is None:
        raise BuildError(f"{nvcc} --dryrun names no toolkit folder")
    root = Path(top[1].strip()).resolve()
    folders = [root / "lib64", root / "lib", *sorted(root.glob("targets/*/lib"))]
    cudart = next((f / "libcudart_static.a" for f in folders if (f / "libcudart_static.a").exists()), None)
    if cudart is None:
        raise BuildError(f"no libcudart_static.a in {', '.join(map(str, folders))} (toolkit of {nvcc})")
    include = next(
        (f for f in (root / "include", *sorted(root.glob("targets/*/include"))) if (f / "cuda_runtime.h").exists()),
        None,
    )
    if include is None:
        raise BuildError(f"no cuda_runtime.h under {root} (toolkit of {nvcc})")
    return Toolkit(nvcc, (int(release[1]), int(release[2])), include, cudart)


def find_toolkit(asked: str | None, cache: Path) -> Toolkit:
    """--nvcc, else CUDA_HOME, else PATH, else PyPI wheels. Only one that was asked for by name may end the build."""
    wanted = ".".join(map(str, OLDEST_CUDA))
    if asked and asked != "pypi":
        toolkit = read_toolkit(Path(asked).absolute())
        if toolkit.version < OLDEST_CUDA:
            raise BuildError(f"--nvcc {asked} is CUDA {toolkit.version}, needed is {wanted} or newer")
        return toolkit
    candidates = [Path(os.environ["CUDA_HOME"], "bin/nvcc")] if os.environ.get("CUDA_HOME") else []
    candidates += [Path(found)] if (found := shutil.which("nvcc")) else []
    for nvcc in candidates if asked is None else ():
        try:
            toolkit = read_toolkit(nvcc)
        except (BuildError, OSError) as error:
            say(f"passing over {nvcc}: {error}")
            continue
        if toolkit.version >= OLDEST_CUDA:
            return toolkit
        say(f"passing over {nvcc}: CUDA {toolkit.version}, needed is {wanted} or newer")
    _, packages = private_venv(cache, CUDA_WHEELS)
    return read_toolkit(packages / "nvidia/cu13/bin/nvcc")


def read_interpreter(path: str) -> Interpreter:
    script = (
        "import json, sys, sysconfig as s;"
        "print(json.dumps(dict(path=sys.executable, version='%d.%d' % sys.version_info[:2],"
        " include=s.get_path('include'), ext_suffix=s.get_config_var('EXT_SUFFIX'))))"
    )
    # -I: another project's PYTHONPATH or sitecustomize must not speak into the answer.
    done = subprocess.run([path, "-I", "-c", script], text=True, capture_output=True)
    if done.returncode != 0:
        raise BuildError(f"{path} does not run: {done.stderr.strip()[:200]}")
    interpreter = Interpreter(**json.loads(done.stdout))
    if tuple(map(int, interpreter.version.split("."))) < (3, 10):
        raise BuildError(f"{path} is Python {interpreter.version}, needed is 3.10 or newer")
    if not Path(interpreter.include, "Python.h").exists():
        raise BuildError(f"{path} has no {interpreter.include}/Python.h (install its -dev package)")
    return interpreter


def find_interpreters(asked: list[str]) -> list[Interpreter]:
    """The ones that were asked for, else the running Python and a python3.12 (SGLang's wheels are cp312)."""
    if asked:
        found = [read_interpreter(path) for path in asked]
    else:
        pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
        candidates = [
            shutil.which("python3.12"),
            *sorted(map(str, pyenv.glob("versions/3.12*/bin/python3.12"))),
            sys.executable,
        ]
        found = []
        for path in filter(None, candidates):
            try:
                found.append(read_interpreter(path))
            except BuildError as error:
                say(f"passing over {str(error).splitlines()[0]}")
    by_abi = {i.ext_suffix: i for i in reversed(found)}
    if not by_abi:
        raise BuildError("no usable Python; name one with --python PATH")
    if not any(i.version == "3.12" for i in found):
        say("WARNING: no Python 3.12 found; SGLang's images run 3.12 and will not load this artifact; see --python")
    return sorted(by_abi.values(), key=lambda i: i.ext_suffix)


# compile


def write_build_file(
    folder: Path,
    toolkit: Toolkit,
    pybind11: Path,
    interpreters: list[Interpreter],
    archs: list[str],
    defines: dict[str, str],
) -> list[Path]:
    """build.ninja in folder; returns the CUDA objects, relative to it. Paths are quoted for the shell and for ninja."""

    def quoted(*words: object) -> str:
        return shlex.join(str(w) for w in words).replace("$", "$$")

    def name(path: Path | str) -> str:
        return re.sub(r"([$ :])", r"$\1", str(path))

    sources = sorted(CSRC.glob("**/*.cu"))
    if not sources:
        raise BuildError(f"no CUDA source under {CSRC}")
    compiler = os.environ.get("CXX") or "g++"
    gencode = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
    cuda = quoted(toolkit.nvcc, "-ccbin", compiler, *CUDA_FLAGS, *gencode, "--threads", len(archs), "-I", CSRC)
    cxx = quoted(compiler, *CXX_FLAGS, *(f'-D{k}="{v}"' for k, v in defines.items()), "-I", CSRC, "-isystem", pybind11)
    link_end = quoted(toolkit.cudart, "-ldl", "-lrt", "-lpthread")
    lines = [
        "rule cuda",
        "  description = nvcc $in",
        f"  command = {cuda} -MD -MF $out.d -c $in -o $out > $out.ptxas 2>&1 || (cat $out.ptxas; exit 1)",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule cxx",
        "  description = g++ $in, Python $python",
        f"  command = {cxx} -isystem $include -isystem {quoted(toolkit.include)} -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        "  description = link $out",
        f"  command = {quoted(compiler, *LINK_FLAGS)} -o $out $in {link_end}",
    ]
    objects = []
    for source in sources:
        objects.append("cuda/" + str(source.relative_to(CSRC).with_suffix(".o")))
        lines.append(f"build {name(objects[-1])} | {name(objects[-1] + '.ptxas')}: cuda {name(source)}")
    for i in interpreters:
        lines.append(f"build bindings{i.ext_suffix}.o: cxx {name(CSRC / 'bindings.cpp')}")
        lines += [f"  python = {i.version}", f"  include = {quoted(i.include)}"]
        inputs = f"bindings{i.ext_suffix}.o {' '.join(map(name, objects))}"
        lines.append(f"build {i.module}: link {inputs} | exports.map {name(toolkit.cudart)}")
    text = "\n".join(lines) + "\n"
    for path, content in ((folder / "build.ninja", text), (folder / "exports.map", EXPORTS)):
        if not path.exists() or path.read_text() != content:
            path.write_text(content)
    return [Path(o) for o in objects]


_ENTRY = re.compile(r"ptxas info\s+: Compiling entry function '(\S+)' for 'sm_(\w+)'")
_FUNCTION = re.compile(r"ptxas info\s+: Function properties for (\S+)")
_STACK = re.compile(r"\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"ptxas info\s+: Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def read_ptxas(text: str) -> list[KernelUse]:
    """Kernels of one `ptxas -v` log; BuildError when it cannot be attributed, which must not pass as "no spills"."""
    uses, entry, stack, spills = [], None, None, 0
    for line in text.splitlines():
        if found := _ENTRY.match(line):
            if entry is not None:
                raise BuildError(f"ptxas log: {found[1]} begins before {entry[0]} ended")
            entry, stack, spills = (found[1], found[2]), None, 0
        elif found := _STACK.match(line):
            stack = (stack or 0) + int(found[1])
            spills += int(found[2]) + int(found[3])
        elif found := _USED.match(line):
            if entry is None or stack is None:
                raise BuildError(f"ptxas log: register count without a kernel: {line.strip()}")
            shared = _SHARED.search(line)
            uses.append(KernelUse(*entry, int(found[1]), stack, spills, int(shared[1]) if shared else 0))
            entry = None
    if entry is not None:
        raise BuildError(f"ptxas log: {entry[0]} never ended")
    return uses


def demangled(names: list[str]) -> list[str]:
    """C++ names without return type and parameters, as people write them."""
    full = run(["c++filt", *names]).splitlines()
    return [re.sub(r"^void ", "", re.sub(r"\((?!anonymous).*$", "", n)) for n in full]


def compile_all(folder: Path, objects: list[Path], ninja: Path, archs: list[str]) -> list[KernelUse]:
    """Runs ninja; returns what ptxas said of every kernel on every architecture."""
    done = subprocess.run(
        [ninja, "-C", folder, "-j", str(os.cpu_count() or 1)], env=os.environ | {"NINJA_STATUS": "  [%f/%t] "}
    )
    if done.returncode != 0:
        raise BuildError("the compilation failed, see above")
    uses = []
    for log in (folder / f"{o}.ptxas" for o in objects):
        text = log.read_text()
        for line in text.splitlines():
            if "warning" in line.lower():
                say(line)
        uses += read_ptxas(text)
    if not uses:
        raise BuildError("ptxas reported no kernel at all; the resource checks would check nothing")
    uses = [
        KernelUse(**asdict(u) | {"kernel": k}) for u, k in zip(uses, demangled([u.kernel for u in uses]), strict=True)
    ]
    for kernel in {u.kernel for u in uses}:
        seen = sorted(u.arch for u in uses if u.kernel == kernel)
        if seen != sorted(archs):
            raise BuildError(f"{kernel} was compiled for {seen}, expected {sorted(archs)}")
    return sorted(uses, key=lambda u: (u.kernel, archs.index(u.arch)))


# checks


def check_kernels(uses: list[KernelUse], shared: dict[str, int]) -> None:
    faults = [
        f"{u.kernel} sm_{u.arch}: stack {u.stack_bytes} B, spills {u.spill_bytes} B"
        for u in uses
        if u.stack_bytes or u.spill_bytes
    ]
    faults += [
        f"{u.kernel} sm_{u.arch}: {u.static_shared_bytes} B static shared"
        for u in uses
        if u.static_shared_bytes > MAX_SHARED_BYTES
    ]
    faults += [f"{name}: {size} B of shared memory" for name, size in shared.items() if size > MAX_SHARED_BYTES]
    if not shared:
        faults.append("_C.kernel_shared_bytes() is empty")
    if faults:
        limit = f"allowed are no stack frame, no spill and at most {MAX_SHARED_BYTES} B of shared memory"
        raise BuildError(f"{limit}; found:\n  " + "\n  ".join(faults))


def check_library(library: Path) -> str:
    """Newest GLIBC version that this library needs; BuildError for a library or a symbol that users may not have."""
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", run(["readelf", "-dW", library]))
    versions = {
        tuple(map(int, v.split("."))) for v in re.findall(r"Name: GLIBC_([\d.]+)", run(["readelf", "-VW", library]))
    }
    if not needed or not versions:
        raise BuildError(f"readelf shows no NEEDED or no GLIBC version in {library.name}")
    strangers = sorted(set(needed) - set(ALLOWED_NEEDED))
    if strangers:
        raise BuildError(f"{library.name} needs {', '.join(strangers)}; allowed are {', '.join(ALLOWED_NEEDED)}")
    newest = ".".join(map(str, max(versions)))
    if max(versions) > NEWEST_GLIBC:
        promised = ".".join(map(str, NEWEST_GLIBC))
        raise BuildError(f"{library.name} needs GLIBC {newest}, SGLang's wheels promise {promised}: build in Docker")
    return newest


def ask_module(interpreter: Interpreter, folder: Path) -> dict:
    """build_info() and kernel_shared_bytes() of the module in folder, by the Python that it was built for."""
    script = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import _C;"
        "print(json.dumps(dict(build_info=_C.build_info(), shared=_C.kernel_shared_bytes())))"
    )
    return json.loads(run([interpreter.path, "-I", "-B", "-c", script, folder]).splitlines()[-1])


# artifact


def package_version() -> str:
    for node in ast.parse((PACKAGE / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "__version__" for t in node.targets
        ):
            return ast.literal_eval(node.value)
    raise BuildError(f"no __version__ in {PACKAGE / '__init__.py'}")


def git_commit() -> str:
    """Commit of the checkout, "-dirty" when an input of the artifact differs from it; "unknown" outside git."""
    if not (REPO / ".git").exists() or shutil.which("git") is None:
        return "unknown"
    commit = subprocess.run(["git", "-C", REPO, "rev-parse", "--short=12", "HEAD"], text=True, capture_output=True)
    if commit.returncode != 0:
        return "unknown"
    changed = run(
        [
            "git",
            "-C",
            REPO,
            "status",
            "--porcelain",
            "--",
            "csrc",
            "deepseek_v4_sm120",
            "sitecustomize.py",
            "pyproject.toml",
        ]
    )
    return commit.stdout.strip() + ("-dirty" if changed.strip() else "")


def write_dist_info(folder: Path, version: str, interpreters: list[Interpreter]) -> None:
    """What pip would have written: it makes SGLang's plugin entry point discoverable and lets `pip list` show us."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    info = folder / f"deepseek_v4_sm120-{version}.dist-info"
    (info / "licenses").mkdir(parents=True)
    shutil.copyfile(REPO / "LICENSE", info / "licenses/LICENSE")
    headers = [
        "Metadata-Version: 2.4",
        f"Name: {project['name']}",
        f"Version: {version}",
        f"Summary: {project['description']}",
        f"License-Expression: {project['license']}",
        "License-File: LICENSE",
        f"Requires-Python: {project['requires-python']}",
        "Description-Content-Type: text/markdown",
    ]
    (info / "METADATA").write_text("\n".join(headers) + "\n\n" + (REPO / "README.md").read_text())
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    tags = [f"Tag: cp{v}-cp{v}-{platform}" for v in (i.version.replace(".", "") for i in interpreters)]
    (info / "WHEEL").write_text(
        "\n".join(["Wheel-Version: 1.0", "Generator: build_artifact", "Root-Is-Purelib: false", *tags]) + "\n"
    )
    groups = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups))
    rows = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
        rows.append(f"{path.relative_to(folder)},sha256={digest},{path.stat().st_size}")
    (info / "RECORD").write_text("\n".join([*rows, f"{info.name}/RECORD,,"]) + "\n")


@contextmanager
def published(out: Path) -> Iterator[Path]:
    """A folder beside out that takes its place when the block ends well, and vanishes when it does not."""
    if out.exists() and any(out.iterdir()) and not (out / "deepseek_v4_sm120").is_dir():
        raise BuildError(f"{out} is not empty and holds no earlier artifact; choose another --out or empty it")
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = (out.parent / f".{out.name}.{word}-{os.getpid()}" for word in ("new", "old"))
    fresh.mkdir()
    try:
        yield fresh
        if out.exists():
            out.rename(old)
        fresh.rename(out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        if old.exists() and not out.exists():
            old.rename(out)
        shutil.rmtree(old, ignore_errors=True)


def fill(folder: Path, objects: Path, interpreters: list[Interpreter], info: dict) -> None:
    """Copies what belongs into the artifact, and nothing else."""
    shutil.copyfile(REPO / "sitecustomize.py", folder / "sitecustomize.py")
    for source in sorted([*PACKAGE.rglob("*.py"), PACKAGE / "reviewed.json"]):
        target = folder / source.relative_to(REPO)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    for i in interpreters:
        shutil.copyfile(objects / i.module, folder / "deepseek_v4_sm120" / i.module)
    (folder / "deepseek_v4_sm120/build_info.json").write_text(json.dumps(info, indent=1) + "\n")
    write_dist_info(folder, info["version"], interpreters)


def print_kernels(uses: list[KernelUse], shared: dict[str, int]) -> None:
    width = max(len(u.kernel) for u in uses)
    print(f"\n{'kernel':{width}}  {'arch':8} registers  stack  spills  static shared")
    for u in uses:
        numbers = f"{u.registers:9}  {u.stack_bytes:5}  {u.spill_bytes:6}  {u.static_shared_bytes:13}"
        print(f"{u.kernel:{width}}  sm_{u.arch:5} {numbers}")
    for name, size in shared.items():
        print(f"{name}: {size} of {MAX_SHARED_BYTES} B of shared memory per block")


def print_artifact(info: dict, out: Path, seconds: float) -> None:
    size = sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
    print(f"\n{'folder':14} {out} ({size / 2**20:.1f} MiB)")
    print(f"{'version':14} {info['version']}, commit {info['git_commit']}")
    print(f"{'CUDA':14} {info['cuda_version']}, cubins {' '.join('sm_' + a for a in info['archs'])}")
    for version, module in info["pythons"].items():
        library = out / "deepseek_v4_sm120" / module
        print(f"{'Python ' + version:14} {module} ({library.stat().st_size / 2**20:.1f} MiB)")
    print(f"{'GLIBC':14} {info['glibc']} or newer")
    print(f"{'time':14} {seconds:.0f} s", flush=True)


def build(options: argparse.Namespace) -> None:
    begin = time.monotonic()
    cache, out = options.cache.resolve(), options.out.resolve()
    objects = cache / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two builds in one checkout take turns
        toolkit = find_toolkit(options.nvcc, cache)
        interpreters = find_interpreters(options.python)
        scripts, packages = private_venv(cache, TOOL_WHEELS)
        version, commit = package_version(), options.git_commit or git_commit()
        pythons = ", ".join(i.version for i in interpreters)
        say(f"CUDA {'.'.join(map(str, toolkit.version))} ({toolkit.nvcc}), Python {pythons}")
        defines = {"DSV4_VERSION": version, "DSV4_GIT_COMMIT": commit, "DSV4_ARCHS": " ".join(options.archs)}
        logs = write_build_file(objects, toolkit, packages / "pybind11/include", interpreters, options.archs, defines)
        uses = compile_all(objects, logs, scripts / "ninja", options.archs)
        glibc = max(
            (check_library(objects / i.module) for i in interpreters), key=lambda v: tuple(map(int, v.split(".")))
        )
        answers = [ask_module(i, objects) for i in interpreters]
        print_kernels(uses, answers[0]["shared"])
        check_kernels(uses, answers[0]["shared"])
        info = {
            "version": version,
            "git_commit": commit,
            "cuda_version": answers[0]["build_info"]["cuda_version"],
            "archs": list(options.archs),
            "pythons": {i.version: i.module for i in interpreters},
            "glibc": glibc,
            "kernels": [asdict(u) for u in uses],
            "shared_bytes": answers[0]["shared"],
        }
        with published(out) as fresh:
            fill(fresh, objects, interpreters, info)
    print_artifact(info, out, time.monotonic() - begin)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=REPO / "build", help="folder to make (default: build/ in the checkout)"
    )
    parser.add_argument(
        "--nvcc", help="this nvcc, or 'pypi' for the one from PyPI wheels (default: CUDA_HOME, PATH, PyPI)"
    )
    parser.add_argument(
        "--python", action="append", default=[], metavar="PATH", help="a Python to build for; repeatable"
    )
    parser.add_argument(
        "--archs", type=lambda s: s.split(","), default=list(ARCHS), help="comma-separated, e.g. 90a, for a quick trial"
    )
    parser.add_argument("--git-commit", help="what build_info() reports (default: asked of git)")
    parser.add_argument("--cache", type=Path, default=REPO / ".build-cache", help="objects and private tools")
    try:
        build(parser.parse_args())
    except BuildError as error:
        print(f"build_artifact: FAILED: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
