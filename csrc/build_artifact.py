#!/usr/bin/env python3
"""Builds the folder that users mount.

In it are the package, the kernels' library, a module per Python ABI that loads it, sitecustomize.py, dist-info.
build_docker.sh, the Dockerfile and tests/run.py all call this script, so what CI checks is what the image builds.
Needs Python 3.11+, g++ and the network: pybind11, and nvcc where none is found, come from PyPI into the cache, which
all checkouts of a user share. No GPU, no torch, no SGLang.

Why no CMake with scikit-build-core: one library serves several Python ABIs, which a wheel build per interpreter cannot
express; the flags are one list in this file; there is no configure step. Why no ninja: it goes by the files' times,
which every checkout and clone changes. Here what a command made is kept by the content of all that it read.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path

if sys.version_info < (3, 11):
    sys.exit(f"build_artifact: needs Python 3.11 or newer, this is {sys.version.split()[0]} ({sys.executable})")

import tomllib

REPO = Path(__file__).resolve().parent.parent
CSRC = REPO / "csrc"
PACKAGE = REPO / "deepseek_v4_sm120"
HOME = Path("/", os.path.expanduser("~").lstrip("~"))  # a user without one, and without a name: as Docker has it
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or HOME / ".cache") / "deepseek-v4-sm120/build"

sys.path[:0] = [str(REPO), str(CSRC)]
from build_folder import check_replaceable, published  # noqa: E402
from build_results import BuildError, Results, check_writable, locked, run, say  # noqa: E402
from build_wheels import CUDA_WHEELS, TOOL_WHEELS, private_venv  # noqa: E402

from deepseek_v4_sm120 import RECORD, __version__  # noqa: E402
from deepseek_v4_sm120.ops.shared.extension import ARCHS, LIBRARY  # noqa: E402

# ARCHS: 120f, for RTX PRO 6000 and RTX 50 (12.0) and GB10 (12.1). Cubins only, no PTX: what is made for an architecture
# has no forward compatibility to offer. Of some kernels nvcc 13.0 makes other code for 120a than for its family: these
# are compiled for each, all others of 120a's are 120f's to the byte. H100 and H200, where the kernels are validated,
# serve nobody by us: 90a is built where it is asked for, as by `tests/run.py --gpu` on one.
EACH = ("sparse_decode/prefill", "sparse_decode/pairs", "fp8_linear/many", "mxfp4_moe/sorted", "mxfp4_moe/scaled")
OF_EACH = {f"{name}.cu": {"120f": ("120a", "121a")} for name in EACH}
PTX = "*.ptx"  # beside each object, for tests/emulator
OLDEST_CUDA = (12, 9)
MAX_SHARED_BYTES = 101_376  # what one block can have on SM120: 99 KiB
NEWEST_GLIBC = (2, 34)  # SGLang's own wheels are manylinux_2_34
# Everything else is static. libstdc++ stays shared: with a copy of its own, this module would share pybind11's
# exception translators with other modules in the process, but not the exception state that they rethrow from.
ALLOWED_NEEDED = (
    *("libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"),
    *("ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"),
)

# -O1 is the host's code, which chooses and launches; ptxas has its own -O3
CUDA_FLAGS = ("-O1", "-std=c++17", "--expt-relaxed-constexpr", "-Xptxas=-v", "-Xcompiler=-fPIC")
NVCC_FLAGS = "--compress-mode=size"
CXX_FLAGS = ("-O2", "-std=c++17", "-fPIC", "-Wall", "-Wextra")
BINDINGS_FLAGS = ("-O1",)  # a third of the compiler's time less; what they do is CPython's
# Version scripts keep all private but what is meant: static cudart must not export its symbols to, or take them from,
# the libcudart that torch loads. The library exports what the modules ask of it, the modules their init function.
LINK_FLAGS = ("-shared", "-Wl,--as-needed", "-Wl,-z,noexecstack")
# An old tag, RPATH: a library of the same name on LD_LIBRARY_PATH does not come first.
BESIDE = ("-Wl,--disable-new-dtags", "-Wl,-rpath,$ORIGIN")
# These by themselves and first, so that all cores are busy to the end.
LONGEST = (
    *("mxfp4_moe/launch.cu", "mhc/summing.cu", "bindings.cpp", "sparse_decode/prefill.cu", "fp8_linear/tile.cu"),
    *("sparse_decode/launch.cu", "bf16_linear/launch.cu", "mhc/launch.cu"),
    *("compressor/launch.cu", "mxfp4_moe/sorted.cu", "mxfp4_moe/scaled.cu", "sparse_decode/pairs.cu"),
)


@dataclass(frozen=True)
class Toolkit:
    nvcc: Path
    version: tuple[int, int]
    include: Path
    cudart: Path  # libcudart_static.a
    banner: str  # all that --version prints


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


# tools


def read_toolkit(nvcc: Path) -> Toolkit:
    """The toolkit behind this nvcc, which may be a wrapper script elsewhere."""
    banner = run([nvcc, "--version"])
    release = re.search(r"release (\d+)\.(\d+)", banner)
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
    return Toolkit(nvcc, (int(release[1]), int(release[2])), include, cudart, banner)


def find_toolkit(asked: str | None, cache: Path) -> Toolkit:
    """--nvcc, else CUDA_HOME, else PATH, else PyPI wheels. Only one that was asked for by name may end the build."""
    wanted = ".".join(map(str, OLDEST_CUDA))
    if asked and asked != "pypi":
        toolkit = read_toolkit(Path(asked).absolute())
        if toolkit.version < OLDEST_CUDA:
            raise BuildError(f"--nvcc {asked} is CUDA {toolkit.version}, needed is {wanted} or newer")
        return toolkit
    candidates = [Path(os.environ["CUDA_HOME"], "bin/nvcc").absolute()] if os.environ.get("CUDA_HOME") else []
    candidates += [Path(found).absolute()] if (found := shutil.which("nvcc")) else []
    for nvcc in candidates if asked is None else ():
        try:
            toolkit = read_toolkit(nvcc)
        except (BuildError, OSError) as error:
            say(f"passing over {nvcc}: {error}")
            continue
        if toolkit.version >= OLDEST_CUDA:
            return toolkit
        say(f"passing over {nvcc}: CUDA {toolkit.version}, needed is {wanted} or newer")
    return read_toolkit(private_venv(cache, CUDA_WHEELS) / "nvidia/cu13/bin/nvcc")


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
        pyenv = Path(os.environ.get("PYENV_ROOT", HOME / ".pyenv"))
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


def translation_units() -> list[list[Path]]:
    """The CUDA sources as they are compiled. Short ones take hardly longer than what they include: one of each operator
    together, as those of one operator have the same names for things of their own. What is beside a kernel may change
    its machine code: compare before and after, where these lists change."""
    by_operator: dict[Path, list[Path]] = {}
    alone = []
    for source in sorted(CSRC.glob("**/*.cu")):
        if str(source.relative_to(CSRC)) in {*LONGEST, *OF_EACH}:
            alone.append([source])
        else:
            by_operator.setdefault(source.parent, []).append(source)
    together = [[source for source in sources if source] for sources in zip_longest(*by_operator.values())]
    return alone + together


def archs_of(unit: list[Path], archs: list[str]) -> list[str]:
    each = OF_EACH.get(str(unit[0].relative_to(CSRC)), {})
    return [arch for asked in archs for arch in each.get(asked, (asked,))]


def compile_all(
    results: Results,
    toolkit: Toolkit,
    compiler: str,
    pybind11: Path,
    interpreters: list[Interpreter],
    options: argparse.Namespace,
    defines: dict[str, str],
) -> tuple[list[Path], list[Path]]:
    """Objects of the library, and one of bindings.cpp for each interpreter, longest first on all cores."""
    cuda = [toolkit.nvcc, "-ccbin", compiler, *CUDA_FLAGS, *options.nvcc_flags.split(), "-I.", "-x", "cu"]
    cxx = [compiler, *CXX_FLAGS, "-I.", "-isystem", toolkit.include]
    jobs, cores = [], os.cpu_count() or 1
    for unit in translation_units():
        archs = archs_of(unit, options.archs)
        gencode = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
        jobs.append((unit, [*cuda, *gencode, "--threads", min(len(gencode), max(cores // 2, 1))], [], PTX))
    if not jobs:
        raise BuildError(f"no CUDA source under {CSRC}")
    for source in sorted(set(CSRC.glob("**/*.cpp")) - {CSRC / "bindings.cpp"}):
        own = [f'-D{k}="{v}"' for k, v in defines.items()] if source.stem == "build_info" else []
        jobs.append(([source], [*cxx, *own], [], None))
    for i in interpreters:
        python = ["-fvisibility=hidden", "-isystem", i.include, "-isystem", pybind11]
        which = [Path(i.include, name) for name in ("patchlevel.h", "pyconfig.h")]
        jobs.append(([CSRC / "bindings.cpp"], [*cxx, *BINDINGS_FLAGS, *python], which, None))

    def compiled(job: tuple[list[Path], list, list, str | None]) -> Path:
        unit, command, which, kept = job
        names = [source.relative_to(CSRC) for source in unit]
        text = names[0] if len(unit) == 1 else results.text("".join(f'#include "{name}"\n' for name in names))
        reads = {path: None for source in unit for path in results.included(source)}
        return results.make([*command, "-c", text], [*reads, *which], ".o", kept)

    def place(job: tuple) -> int:
        name = "bindings.cpp" if len(job[0]) > 1 else str(job[0][0].relative_to(CSRC))
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    with ThreadPoolExecutor(cores) as pool:
        futures = {id(job): pool.submit(compiled, job) for job in sorted(jobs, key=place)}
        try:
            made = [futures[id(job)].result() for job in jobs]
        except BuildError:
            pool.shutdown(cancel_futures=True)
            raise
    return made[: -len(interpreters)], made[-len(interpreters) :]


def link(results: Results, toolkit: Toolkit, compiler: str, objects: list[Path], bindings: list[Path]) -> list[Path]:
    """The library and one module for each of `bindings`."""
    wanted = {name for path in bindings for name in re.findall(r"\b_ZNK?4dsv4\w+", run(["nm", "-u", path]))}
    exports = results.text(f"{{ global: {'; '.join(sorted(wanted))}; local: *; }};\n")
    library = [compiler, *LINK_FLAGS, "-Wl,-z,defs", "-Wl,-Bsymbolic", f"-Wl,-soname,{LIBRARY}"]
    library += [f"-Wl,--version-script={exports}", *objects, toolkit.cudart, "-ldl", "-lrt", "-lpthread"]
    made = results.make(library, [toolkit.cudart], ".so")
    init = results.text("{ global: PyInit__C; local: *; };\n")
    module = [compiler, *LINK_FLAGS, "-s", *BESIDE, f"-Wl,--version-script={init}"]
    return [made, *(results.make([*module, path, made], [], ".so") for path in bindings)]


_ENTRY = re.compile(r"ptxas info\s+: Compiling entry function '(\S+)' for 'sm_(\w+)'")
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


def kernel_uses(objects: list[Path], archs: list[str]) -> list[KernelUse]:
    """What ptxas said of every kernel on every architecture."""
    uses = []
    for log in (path.with_name(f"{path.name}.log") for path in objects):
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
    expected = {tuple(sorted(archs_of(unit, archs))) for unit in translation_units()}
    for kernel in {u.kernel for u in uses}:
        seen = tuple(sorted(u.arch for u in uses if u.kernel == kernel))
        if seen not in expected:
            raise BuildError(f"{kernel} was compiled for {seen}, expected {sorted(expected)}")
    return sorted(uses, key=lambda u: (u.kernel, u.arch))


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
    strangers = sorted(set(needed) - {*ALLOWED_NEEDED, LIBRARY})
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


def code(cuda_version: str) -> str:
    """A digest of all that calibrate times: the kernels' sources, the Python that launches them, the compiler. A
    profile says of which it is; a commit would say so of every word of documentation."""
    files = [path for suffix in ("cu", "cuh", "h", "cpp") for path in CSRC.rglob(f"*.{suffix}")]
    files += [*(PACKAGE / "ops").rglob("*.py")]
    found = {str(path.relative_to(REPO)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return hashlib.sha256(json.dumps([cuda_version, found], sort_keys=True).encode()).hexdigest()[:16]


def git_commit() -> str:
    """Commit of the checkout, "-dirty" when an input of the artifact differs from it; "unknown" outside git."""
    if not (REPO / ".git").exists() or shutil.which("git") is None:
        return "unknown"
    commit = subprocess.run(["git", "-C", REPO, "rev-parse", "--short=12", "HEAD"], text=True, capture_output=True)
    if commit.returncode != 0:
        return "unknown"
    inputs = ("csrc", "deepseek_v4_sm120", "sitecustomize.py", "pyproject.toml")
    changed = run(["git", "-C", REPO, "status", "--porcelain", "--", *inputs])
    return commit.stdout.strip() + ("-dirty" if changed.strip() else "")


def write_dist_info(folder: Path, interpreters: list[Interpreter]) -> None:
    """What pip would have written: it makes SGLang's plugin entry point discoverable and lets `pip list` show us."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    info = (folder / RECORD).parent
    (info / "licenses").mkdir(parents=True)
    shutil.copyfile(REPO / "LICENSE", info / "licenses/LICENSE")
    headers = [
        "Metadata-Version: 2.4",
        f"Name: {project['name']}",
        f"Version: {__version__}",
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
    (folder / RECORD).write_text("\n".join([*rows, f"{RECORD},,"]) + "\n")


def fill(folder: Path, interpreters: list[Interpreter], info: dict) -> None:
    """Copies what belongs into the artifact beside the library and the modules, and nothing else."""
    shutil.copyfile(REPO / "sitecustomize.py", folder / "sitecustomize.py")
    for source in sorted([*PACKAGE.rglob("*.py"), *(PACKAGE / "sglang_patches").rglob("*.json")]):
        target = folder / source.relative_to(REPO)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    (folder / "deepseek_v4_sm120/build_info.json").write_text(json.dumps(info, indent=1) + "\n")
    write_dist_info(folder, interpreters)


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
    for what, name in [("kernels", info["library"]), *((f"Python {v}", m) for v, m in info["pythons"].items())]:
        print(f"{what:14} {name} ({(out / 'deepseek_v4_sm120' / name).stat().st_size / 2**20:.1f} MiB)")
    print(f"{'GLIBC':14} {info['glibc']} or newer")
    print(f"{'time':14} {seconds:.0f} s", flush=True)


def build(options: argparse.Namespace) -> None:
    begin = time.monotonic()
    cache, out = options.cache.resolve(), options.out.resolve()
    check_replaceable(out)  # before anything is compiled
    check_writable(cache)
    with locked(cache / f"{hashlib.sha256(str(out).encode()).hexdigest()[:12]}.lock"):
        toolkit = find_toolkit(options.nvcc, cache)
        interpreters = find_interpreters(options.python)
        pybind11 = private_venv(cache, TOOL_WHEELS) / "pybind11/include"
        commit, compiler = options.git_commit or git_commit(), os.environ.get("CXX") or "g++"
        pythons = ", ".join(i.version for i in interpreters)
        say(f"CUDA {'.'.join(map(str, toolkit.version))} ({toolkit.nvcc}), Python {pythons}")
        results = Results(cache / "results", CSRC, toolkit.banner + run([compiler, "--version"]))
        archs = sorted({arch for unit in translation_units() for arch in archs_of(unit, options.archs)})
        defines = {"DSV4_VERSION": __version__, "DSV4_GIT_COMMIT": commit, "DSV4_ARCHS": " ".join(archs)}
        objects, bindings = compile_all(results, toolkit, compiler, pybind11, interpreters, options, defines)
        uses = kernel_uses(objects, options.archs)
        names = [LIBRARY, *(i.module for i in interpreters)]
        with published(out) as fresh:
            package = fresh / "deepseek_v4_sm120"
            package.mkdir()
            for name, made in zip(names, link(results, toolkit, compiler, objects, bindings), strict=True):
                shutil.copyfile(made, package / name)
            glibc = max((check_library(package / name) for name in names), key=lambda v: [*map(int, v.split("."))])
            answers = [ask_module(i, package) for i in interpreters]
            print_kernels(uses, answers[0]["shared"])
            check_kernels(uses, answers[0]["shared"])
            info = {
                "version": __version__,
                "git_commit": commit,
                "code": code(answers[0]["build_info"]["cuda_version"]),
                "cuda_version": answers[0]["build_info"]["cuda_version"],
                "archs": archs,
                "library": LIBRARY,
                "pythons": {i.version: i.module for i in interpreters},
                "glibc": glibc,
                "kernels": [asdict(u) for u in uses],
                "shared_bytes": answers[0]["shared"],
            }
            fill(fresh, interpreters, info)
    print_artifact(info, out, time.monotonic() - begin)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=REPO / "build", help="folder to make (default: the checkout's build/)"
    )
    parser.add_argument(
        "--nvcc", help="this nvcc, or 'pypi' for the one from PyPI wheels (default: CUDA_HOME, PATH, PyPI)"
    )
    parser.add_argument("--python", action="append", default=[], metavar="PATH", help="one to build for; repeatable")
    parser.add_argument(
        "--archs",
        type=lambda s: s.split(","),
        default=list(ARCHS),
        help=f"comma-separated ({','.join(ARCHS)}); 120f,90a for engines and tests on a Hopper card as well",
    )
    parser.add_argument(
        "--nvcc-flags", default=NVCC_FLAGS, help="beside what all builds have; -lineinfo for profilers (%(default)s)"
    )
    parser.add_argument("--git-commit", help="what build_info() reports (default: asked of git)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="objects and private tools")
    os.umask(0o022)  # a container may run as another user, who reads the folder
    try:
        build(parser.parse_args())
    except (BuildError, OSError) as error:  # of which OSError: a folder that cannot be written, a full disk
        print(f"build_artifact: FAILED: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
