"""Checks of the container, its limits, and the environment variables of communication and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from deepseek_v4_sm120.commands.doctor.facts import Facts
from deepseek_v4_sm120.commands.doctor.finding import Finding, fail, not_run, ok, warn

LEAST_SHM_BYTES = 4 << 30
LEAST_OPEN_FILES = 4096
LEAST_LOCKED_BYTES = 64 << 20
UNLIMITED = -1

UNSET = "unset it"
OFF = ("", "0", "-1", "false", "f", "no", "n", "off")  # in lower case, as all values are compared
# variable -> (values that matter, what they cost, fix); None: any but OFF
VARIABLE_COSTS: dict[str, tuple[tuple[str, ...] | None, str, str]] = {
    "NCCL_P2P_DISABLE": (
        ("1",),
        "NCCL's sums, a prompt's among them, go through host memory, on two cards as on more",
        "unset it where peers move data",
    ),
    "NCCL_SHM_DISABLE": (("1",), "ranks talk over sockets where peers cannot", "unset it; docker run --ipc=host"),
    "NCCL_P2P_LEVEL": (("loc", "nvl", "0", "1"), "peer copies over PCIe are off", "NCCL_P2P_LEVEL=SYS, or unset it"),
    "NCCL_DEBUG": (("trace",), "writes a line per operation", "NCCL_DEBUG=WARN"),
    "NCCL_ALGO": (None, "pins an algorithm that is right for one size only", UNSET),
    "NCCL_PROTO": (("simple",), "small all-reduces of decode want LL or LL128", UNSET),
    "NCCL_MAX_NCHANNELS": (("1", "2"), "prefill's large all-reduces use a part of the link", UNSET),
    "CUDA_LAUNCH_BLOCKING": (("1",), "every kernel waits for the one before it", UNSET),
    "CUDA_DEVICE_MAX_CONNECTIONS": (("1",), "the launches of all streams wait in one queue", UNSET),
    "TORCH_CUDA_SANITIZER": (("1",), "for debugging only", UNSET),
    "TORCH_DISTRIBUTED_DEBUG": (("detail",), "torch compares the ranks before each of its collectives", UNSET),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (
        ("0", "1"),
        "by any value, 0 too, each tensor is the driver's allocation",
        UNSET,
    ),
    "TRITON_INTERPRET": (None, "Triton's kernels run on the CPU, in Python", UNSET),
    "TRITON_ALWAYS_COMPILE": (None, "Triton's kernels are compiled anew by every process", UNSET),
    "SGLANG_TEST_RETRACT": (None, "SGLang takes requests out of the batch and computes them again, as a test", UNSET),
    "SGLANG_RADIX_FORCE_MISS": (None, "the prefix cache finds nothing: every prompt is read anew", UNSET),
    **dict.fromkeys(
        (
            *("SGLANG_IS_IN_CI", "SGLANG_DEBUG_MEMORY_POOL", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"),
            *("SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK", "SGLANG_INVARIANT_CHECK", "SGLANG_ENABLE_ASYNC_ASSERT"),
        ),
        (None, "checks of SGLang's own tests run between the steps, or in them", UNSET),
    ),
    "SGLANG_KERNEL_API_LOGLEVEL": (None, "a line of the log for every call of a kernel", UNSET),
}
# what SGLang makes up where they are set, for its own measurements
MADE_UP = {
    "SGLANG_SIMULATE_ACC_LEN": "how many drafts are right",
    "SGLANG_SIMULATE_UNIFORM_EXPERTS": "which experts a token takes",
    "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS": "which experts a token takes",
}
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def checks(facts: Facts) -> Iterator[Finding]:
    """All findings about the host and the environment, of this process and of patched servers that we may look into."""
    yield from _shared_memory(facts)
    yield from _limits(facts)
    for whose, environ in _environments(facts):
        yield from _variables(whose, environ)
        yield from _allocator(whose, environ, len(facts.smi.gpus))


def _environments(facts: Facts) -> list[tuple[str, Mapping[str, str]]]:
    """This process's, and the servers': those that have the same of what is looked at as one."""
    alike: dict[tuple, list[int]] = {}
    looked_at = (*VARIABLE_COSTS, *MADE_UP, *ALLOCATOR)
    for pid, environ in facts.server_environ.items():
        alike.setdefault(tuple(environ.get(name) for name in looked_at), []).append(pid)
    named = [(_named(pids), facts.server_environ[pids[0]]) for pids in alike.values()]
    return [("this process", facts.environ), *named]


def _named(pids: list[int]) -> str:
    return f"server process{'es' * (len(pids) > 1)} {', '.join(map(str, pids))}"


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
    for variable, (values, cost, fix) in VARIABLE_COSTS.items():
        if _matters(environ.get(variable, ""), values):
            found = True
            yield warn(name, f"{variable}={environ[variable]}", cost, fix)
    for variable, what in MADE_UP.items():
        if _matters(environ.get(variable, ""), None):
            found = True
            yield fail(name, f"{variable}={environ[variable]}", f"SGLang makes up {what}: answers are wrong", UNSET)
    if not found:
        yield ok(name, "nothing that is known to cost speed")


def _matters(value: str, values: tuple[str, ...] | None) -> bool:
    value = value.strip().lower()
    return value not in OFF if values is None else value in values


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
