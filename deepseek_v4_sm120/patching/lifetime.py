"""Of which process a report is, so that who reads it later knows whether that one still runs: reports of a server that
has ended stay in their folder, and the next process may have its number. Standard library only."""

import os

ELSEWHERE = "of another container or machine, or of this one before it was started anew"
MOST = 1 << 22  # Linux gives no higher number to a process


def namespace() -> str | None:
    """The kernel that runs and this process's namespace of process numbers; None where /proc does not tell."""
    boot = "/proc/sys/kernel/random/boot_id"
    if not all(map(os.path.exists, ("/proc/self/ns/pid", boot))):
        return None
    with open(boot) as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def of_this() -> dict:
    """What `has_ended` goes by, JSON-able."""
    return {"namespace": namespace(), "began": _began(os.getpid())}


def has_ended(report: dict) -> bool:
    """Whether the process of a report is gone; False where its number is one of another container or machine."""
    said, pid, here = report.get("process"), report.get("pid"), namespace()
    if here is None or not isinstance(said, dict) or said.get("namespace") != here:
        return False
    if type(pid) is not int or not 0 < pid <= MOST:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's, whose /proc may be hidden
        return False
    return _began(pid) != said.get("began")


def is_elsewhere(report: dict) -> bool:
    """Whether nobody can see from here if its process runs: a container that is started anew has another namespace, a
    machine another boot. Its number is that of some other process here, or of none."""
    said, here = report.get("process"), namespace()
    return here is not None and not (isinstance(said, dict) and said.get("namespace") == here)


def _began(pid: int) -> int | None:
    """When a process began, in the kernel's ticks; None where it is gone or waits for its parent to hear of its end."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])
