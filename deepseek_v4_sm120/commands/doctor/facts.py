"""Everything that the checks look at, read once. Tests hand in another root, other variables and their own commands."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from deepseek_v4_sm120 import patching
from deepseek_v4_sm120.commands.doctor import cpus, networks, nvidia_smi, pci, servers, visible
from deepseek_v4_sm120.commands.plan import cards
from deepseek_v4_sm120.patching import lifetime

PACKAGES = ("sglang", "torch", "triton", "flashinfer-python", "sgl-deep-gemm", "sglang-kernel", "tilelang")
IN_KUBERNETES = "KUBERNETES_SERVICE_HOST"  # in every container there
# variable -> where the cache is without it, relative to the home folder; and the libraries that fill it
WORKSPACE = "FLASHINFER_WORKSPACE_BASE"
CACHES = {
    "TVM_FFI_CACHE_DIR": ".cache/tvm-ffi",
    "TRITON_CACHE_DIR": ".triton/cache",
    WORKSPACE: ".cache/flashinfer",
    "TILELANG_CACHE_DIR": ".tilelang/cache",
    "SGLANG_DG_CACHE_DIR": ".cache/deep_gemm",
}


@dataclass(frozen=True)
class Cache:
    variable: str
    path: Path
    is_filled: bool
    survives: bool  # on a mount of its own, or outside of a container
    is_closed: bool = False  # to the user that asks, who cannot read or write it


@dataclass
class Facts:
    """This machine and this process. `versions`: package -> version or None; `pins`: what SGLang itself requires."""

    smi: nvidia_smi.Smi
    pci: list[pci.PciPath] = field(default_factory=list)
    iommu_groups: int = 0
    xids: dict[str, tuple[int, ...]] | None = None  # of the kernel's log; None: not readable
    aspm: str = ""  # the kernel's policy of links that sleep; "": not told
    cpus: cpus.Cpus = field(default_factory=cpus.Cpus)
    networks: networks.Networks = field(default_factory=networks.Networks)
    host_memory: tuple[int, int] | None = None  # MiB: all of it, and what the system says is available
    environ: Mapping[str, str] = field(default_factory=dict)
    server_environ: dict[int, dict[str, str]] = field(default_factory=dict)
    servers: dict[int, int] = field(default_factory=dict)  # process that reports -> the first one of its server
    versions: dict[str, str | None] = field(default_factory=dict)
    pins: dict[str, str] = field(default_factory=dict)
    shm_bytes: int | None = None
    is_container: bool = False
    limits: dict[str, int] = field(default_factory=dict)
    sitecustomize: list[str] = field(default_factory=list)
    package: str = ""
    is_isolated: bool = False
    caches: list[Cache] = field(default_factory=list)
    nvcc: str | None = None
    status: dict | None = None
    status_problem: str | None = None
    probe: dict | None = None
    probe_problem: str | None = None
    is_serving: bool = False  # a server answered: --url
    hosts: int | None = None  # that it runs on, as it says

    @property
    def used(self) -> set[int]:
        """nvidia-smi's numbers of the cards that torch sees; where the probe does not tell, of those that
        CUDA_VISIBLE_DEVICES leaves."""
        probe = self.probe or {}
        ends = {pair[end] for pair in probe.get("peers") or () for end in ("from", "to")}
        seen = ends | {int(number) for number in probe.get("links") or ()}
        left = {gpu.index for gpu in visible.named(self.smi.gpus, self.environ) or () if gpu is not None}
        return seen or left or {gpu.index for gpu in self.smi.gpus}


def run_command(command: list[str], timeout_s: float = 20) -> str | None:
    """Output of a command, of one that fails, too, for nvidia-smi says why there; None when it does not exist, hangs,
    or fails without a word."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 or done.stdout.strip() else None


def gather(root: Path, environ: Mapping[str, str], run: nvidia_smi.Run = run_command, port: int | None = None) -> Facts:
    """root: "/" in real life. port: of several servers here only that one's reports count. Reads only; starts nothing
    but nvidia-smi and dmesg."""
    smi = nvidia_smi.read(run)
    home = Path(environ.get("HOME", "/root"))
    in_container = is_container(root, environ)
    found = Facts(
        smi=smi,
        pci=[pci.read_path(root / "sys", gpu.bus_id) for gpu in smi.gpus],
        iommu_groups=pci.iommu_groups(root / "sys"),
        aspm=pci.aspm_policy(root / "sys"),
        xids=nvidia_smi.read_xids(run(["dmesg"])),
        networks=networks.read(root),
        host_memory=_host_memory(root),
        environ=dict(environ),
        shm_bytes=_size(root / "dev/shm"),
        is_container=in_container,
        limits={name: resource.getrlimit(getattr(resource, name))[0] for name in ("RLIMIT_MEMLOCK", "RLIMIT_NOFILE")},
        sitecustomize=[str(p) for p in sitecustomize_files(sys.path, sys.modules.get("sitecustomize"))],
        package=str(Path(__file__).resolve().parents[3]),
        is_isolated=bool(sys.flags.isolated or sys.flags.no_site or sys.flags.ignore_environment),
        caches=[_cache(root, *item, in_container) for item in cache_folders(environ, home).items()],
        nvcc=_nvcc(environ),
    )
    found.versions, found.pins = _versions()
    found.status, found.status_problem = _status()
    processes = (found.status or {}).get("processes", [])
    found.servers = servers.first_ones(root, [one["pid"] for one in processes if not lifetime.is_elsewhere(one)])
    if port is not None and (first := servers.first_at(root, found.servers, port)) is not None:
        found.servers = {pid: one for pid, one in found.servers.items() if one == first}
        found.status["processes"] = [one for one in processes if one["pid"] in found.servers]
    pids = list(found.servers)
    found.cpus = cpus.read(root, pids)
    found.server_environ = {pid: e for pid in pids if (e := _environ_of(root, pid)) is not None}
    return found


def is_container(root: Path, environ: Mapping[str, str] = os.environ) -> bool:
    """By what Docker, Podman and Kubernetes leave in theirs; LXC's is kept as a machine is, and is none."""
    return IN_KUBERNETES in environ or any((root / mark).exists() for mark in (".dockerenv", "run/.containerenv"))


def sitecustomize_files(path: list[str], ran: ModuleType | None) -> list[Path]:
    """Every sitecustomize.py on the path, first the one that ran (`python -m` adds the current folder only later)."""
    here = patching.working_directory()  # None where it was removed
    first = [Path(ran.__file__)] if ran is not None and getattr(ran, "__file__", None) else []
    files = first + [Path(folder, "sitecustomize.py") for folder in path if folder and folder != here]
    there = [file for file in files if os.path.isfile(file)]  # False where this user may not look
    return list(dict.fromkeys(file.resolve() for file in there))


def _host_memory(root: Path) -> tuple[int, int] | None:
    told = cards.host_memory(root)
    return (told["MemTotal"], told["MemAvailable"]) if {"MemTotal", "MemAvailable"} <= told.keys() else None


def _size(folder: Path) -> int | None:
    return shutil.disk_usage(folder).total if folder.is_dir() else None


def _nvcc(environ: Mapping[str, str]) -> str | None:
    homes = [environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)] + ["/usr/local/cuda"]
    candidates = [Path(home, "bin/nvcc") for home in homes]
    return next((str(c) for c in candidates if os.path.isfile(c)), shutil.which("nvcc", path=environ.get("PATH")))


def cache_folders(environ: Mapping[str, str], home: Path) -> dict[str, Path]:
    """variable of CACHES -> the folder that the cache is in."""
    found = {name: Path(environ[name]) if environ.get(name) else home / place for name, place in CACHES.items()}
    if environ.get(WORKSPACE):
        found[WORKSPACE] = found[WORKSPACE] / CACHES[WORKSPACE]  # it names the folder that stands for the home folder
    return found


def volumes(caches: Mapping[str, Path]) -> str:
    """What `docker run` is told to keep them: one volume for all of a home folder's .cache."""
    tops = {path.parent if path.parent.name.startswith(".") else path for path in caches.values()}
    return " ".join(f"-v dsv4-{top.name.lstrip('.')}:{top}" for top in sorted(tops))


def _cache(root: Path, variable: str, path: Path, is_container: bool) -> Cache:
    folder = root / str(path).lstrip("/")
    try:
        is_filled, is_closed = bool(os.listdir(folder)), False
    except OSError as error:
        is_filled, is_closed = False, isinstance(error, PermissionError)
    nearest = next(place for place in (folder, *folder.parents) if os.path.exists(place))  # else it is made there
    is_closed = is_closed or not os.access(nearest, os.W_OK | os.X_OK)
    return Cache(variable, path, is_filled, not is_container or is_mounted(root, path), is_closed)


def is_mounted(root: Path, path: Path) -> bool:
    """Whether the path lies on a mount other than the container's own file system."""
    points = _mount_points(root)
    return any(point != "/" and (str(path) + "/").startswith(point.rstrip("/") + "/") for point in points)


def is_mount_point(root: Path, path: Path) -> bool:
    """Whether the path is what is mounted, as a file of the host may be: no other can be renamed to it."""
    return str(path) in _mount_points(root)


def _mount_points(root: Path) -> list[str]:
    mounts = root / "proc/self/mounts"
    lines = mounts.read_text(errors="replace").splitlines() if mounts.is_file() else []
    return [line.split()[1] for line in lines if len(line.split()) > 1]


def _versions() -> tuple[dict[str, str | None], dict[str, str]]:
    from importlib import metadata

    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    found = {name: version(name) for name in PACKAGES}
    if found["sglang"] is None:
        return found, {}
    required = [line.partition(";")[0] for line in metadata.requires("sglang") or () if "extra ==" not in line]
    pins = {}
    for line in required:
        name, separator, pin = line.replace(" ", "").partition("==")
        if separator:
            pins[name.partition("[")[0].lower().replace("_", "-")] = pin
    return found, pins


def _status() -> tuple[dict | None, str | None]:
    from deepseek_v4_sm120 import __main__
    from deepseek_v4_sm120.patching.spec import PatchError

    try:
        return __main__.status(), None
    except (PatchError, ValueError) as error:
        return None, str(error)


def _environ_of(root: Path, pid: int) -> dict[str, str] | None:
    """A running process's environment, None when it is gone or not ours to read."""
    try:
        data = (root / "proc" / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    pairs = (entry.partition("=") for entry in data.decode(errors="replace").split("\0") if "=" in entry)
    return {name: value for name, _, value in pairs}


def python() -> str:
    return sys.executable or shutil.which("python3") or os.fspath("python3")
