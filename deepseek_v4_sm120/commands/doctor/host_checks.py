"""Checks of the container, its limits, and the environment variables of communication and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from deepseek_v4_sm120.commands.doctor.facts import Facts
from deepseek_v4_sm120.commands.doctor.finding import Finding, fail, not_run, ok, warn

LEAST_SHM_BYTES = 4 << 30
LEAST_OPEN_FILES = 4096
LEAST_LOCKED_BYTES = 64 << 20
UNLIMITED = -1

# variable -> (values that matter, what they cost, fix); None: any value
NCCL_COSTS: dict[str, tuple[tuple[str, ...] | None, str, str]] = {
    "NCCL_P2P_DISABLE": (("1",), "all-reduces above 2 cards go through host memory", "unset it where peers move data"),
    "NCCL_SHM_DISABLE": (("1",), "ranks talk over sockets where peers cannot", "unset it; docker run --ipc=host"),
    "NCCL_P2P_LEVEL": (("LOC", "NVL", "0", "1"), "peer copies over PCIe are off", "NCCL_P2P_LEVEL=SYS, or unset it"),
    "NCCL_DEBUG": (("TRACE",), "writes a line per operation", "NCCL_DEBUG=WARN"),
    "NCCL_ALGO": (None, "pins an algorithm that is right for one size only", "unset it"),
    "NCCL_PROTO": (("Simple",), "small all-reduces of decode want LL or LL128", "unset it"),
    "NCCL_MAX_NCHANNELS": (("1", "2"), "prefill's large all-reduces use a part of the link", "unset it"),
    "CUDA_LAUNCH_BLOCKING": (("1",), "every kernel waits for the one before it", "unset it"),
    "TORCH_CUDA_SANITIZER": (("1",), "for debugging only", "unset it"),
}
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def checks(facts: Facts) -> Iterator[Finding]:
    """All findings about the host and the environment, of this process and of patched servers that we may look into."""
    yield from _shared_memory(facts)
    yield from _limits(facts)
    for whose, environ in {"this process": facts.environ, **_servers(facts)}.items():
        yield from _variables(whose, environ)
        yield from _allocator(whose, environ, len(facts.smi.gpus))


def _servers(facts: Facts) -> dict[str, Mapping[str, str]]:
    return {f"server process {pid}": environ for pid, environ in facts.server_environ.items()}


def _shared_memory(facts: Facts) -> Iterator[Finding]:
    where = "container" if facts.is_container else "machine"
    if facts.shm_bytes is None:
        yield not_run("/dev/shm", "there is no /dev/shm")
    elif facts.shm_bytes < LEAST_SHM_BYTES:
        yield (fail if len(facts.smi.gpus) > 1 else warn)(
            "/dev/shm",
            f"{facts.shm_bytes >> 20} MiB in this {where}",
            "NCCL and SGLang's own queues between ranks fail with bus errors or fall back to sockets",
            "docker run --ipc=host (or --shm-size=16g); in Kubernetes an emptyDir with medium Memory at /dev/shm",
        )
    else:
        yield ok("/dev/shm", f"{facts.shm_bytes / 2**30:.0f} GiB in this {where}")


def _limits(facts: Facts) -> Iterator[Finding]:
    locked, files = (facts.limits.get(name, UNLIMITED) for name in ("RLIMIT_MEMLOCK", "RLIMIT_NOFILE"))
    complaints = []
    if 0 <= locked < LEAST_LOCKED_BYTES:
        complaints.append(f"locked memory {locked >> 10} KiB")
    if 0 <= files < LEAST_OPEN_FILES:
        complaints.append(f"{files} open files")
    if complaints:
        yield warn(
            "ulimits",
            ", ".join(complaints),
            "pinned host buffers (HiCache, RDMA) and many connections fail under load",
            "docker run --ulimit memlock=-1 --ulimit nofile=65535:65535",
        )
    else:
        yield ok("ulimits", "locked memory and open files suffice")


def _variables(whose: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    name = f"variables of {whose}"
    found = False
    for variable, (values, cost, fix) in NCCL_COSTS.items():
        value = environ.get(variable)
        if value and (values is None or value in values):
            found = True
            yield warn(name, f"{variable}={value}", cost, fix)
    if not found:
        yield ok(name, "nothing that is known to cost speed")


def _allocator(whose: str, environ: Mapping[str, str], num_gpus: int) -> Iterator[Finding]:
    for variable in ALLOCATOR:
        value = environ.get(variable, "")
        if "expandable_segments:true" in value.lower().replace(" ", "") and num_gpus != 1:
            yield fail(
                f"allocator of {whose}",
                f"{variable}={value}",
                "custom all-reduce shares buffers by handles that expandable segments do not have: illegal accesses, "
                "wrong sums (sglang 11957)",
                f"unset {variable}, or start with --disable-custom-all-reduce",
            )
