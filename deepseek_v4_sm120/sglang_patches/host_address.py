"""By which address of this host the others reach it, where a server has several (--nnodes): in the network in which
they find each other.

The first rank tells the others of a queue by sockets, beside NCCL and gloo, and SGLang tells them the first interface
of the host that it finds: Wi-Fi, Docker's. From another host that may lead nowhere; then all ranks wait for ever behind
NCCL's start, and "CustomAllreduce is disabled because this process group spans across nodes" is the log's last line
(seen by others on pairs of DGX Sparks: MiaAI-Lab/Qwen3.8-Flash-Next-Dual-DGX-Sparks #3, #9). SGLang's own
way out is SGLANG_HOST_IP; here it is set, in the process that resolves the arguments, to the address by which this host
reaches --dist-init-addr. What a user has set stays.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, MutableMapping

VARIABLES = ("SGLANG_HOST_IP", "HOST_IP")  # SGLang asks them in this order, in all releases
_set: str | None = None  # by us, in this process


def tell(read: Callable, environ: MutableMapping[str, str]) -> str | None:
    """Sets it for the server whose arguments `read` has; the address, None where nothing was set."""
    global _set
    where = read("dist_init_addr", None)
    if read("nnodes", 1) == 1 or not where or any(environ.get(name) for name in VARIABLES):
        return None
    if read("disaggregation_mode", "null") != "null":  # what others are told there is the way of the KV cache
        return None
    found = towards(where)
    if found is not None:
        environ[VARIABLES[0]] = _set = found
    return found


def forget(environ: MutableMapping[str, str]) -> None:
    """A process that begins to resolve another server's arguments."""
    global _set
    if _set is not None and environ.get(VARIABLES[0]) == _set:
        del environ[VARIABLES[0]]
    _set = None


def towards(where: str) -> str | None:
    """This host's address on the way to address:port; None where there is no way, or none that leaves the host."""
    host, _, port = where.rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as way:
            way.connect(address)  # of a datagram's socket nothing is sent
            own = way.getsockname()[0]
    except (OSError, ValueError, IndexError):
        return None
    return None if ipaddress.ip_address(own.partition("%")[0]).is_loopback else own
