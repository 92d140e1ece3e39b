"""A start does not wait in NCCL by peers that move nothing, and one that waits says so.

The first thing that passes between the cards is NCCL's sum of one number, made with each of SGLang's communicators
while the groups are made. Where the driver offers copies between cards that move nothing (ACS, IOMMU, boards of
workstations), it waits for ever: no line, no limit of time, and the watchdog is not there yet (NCCL #1999; rtx6kpro
#15, on two RTX PRO 6000). Where they move something wrong, NCCL's sums are wrong, without a word.

The probe of our sums finds out the same, with an end to each wait, so it is asked in front: where peers fail, NCCL is
told to leave them, unless the user has said anything of that. Where there is no probe, the wait is left as it is, and
said once, by the first rank. So it is between several hosts, where the way is a network that NCCL has chosen, at times
one that does not lead to the others (Wi-Fi, Docker's).
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable

import torch

from deepseek_v4_sm120.ops.all_reduce_probe import NCCL_P2P, REMEDY
from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.adapters import all_reduce

PATIENCE_S = 60.0  # NCCL's start on two to eight cards takes one to some seconds; hosts have found each other by then


def replace_init(original: Callable) -> Callable:
    """For PyNcclCommunicator.__init__(self, group, device, ..), which ends with that sum."""

    @functools.wraps(original)
    def __init__(self, group, device, *args, **kwargs):
        if not _is_ours(group):
            return original(self, group, device, *args, **kwargs)
        is_first, has_others = torch.distributed.get_rank(group) == 0, models_served.has_several_hosts()
        if not has_others:
            _leave_peers_that_fail(group, device, is_first)
        if not is_first:
            return original(self, group, device, *args, **kwargs)
        teller = threading.Timer(PATIENCE_S, _tell_of_hosts if has_others else _tell)
        teller.daemon = True
        teller.start()
        try:
            return original(self, group, device, *args, **kwargs)
        finally:
            teller.cancel()

    return __init__


def _is_ours(group) -> bool:
    """In our own model's server on cards that we serve; not a group that a trainer's process is in."""
    return models_served.has_served_card() and isinstance(group, torch.distributed.ProcessGroup)


def _leave_peers_that_fail(group, device, is_first: bool) -> None:
    """NCCL reads the variable when it makes its first communicator, which is behind this, on all ranks alike."""
    verdict = all_reduce.find_ahead(group, device)
    if verdict is None or not verdict.peers_fail or os.environ.get(NCCL_P2P):
        return
    os.environ[NCCL_P2P] = "1"
    if is_first:
        peer = verdict.ways["peer"]
        report.warn(
            f"deepseek_v4_sm120: the cards' own memory fails between them ({peer.problem}), where NCCL "
            f"would wait for ever or sum wrong: it goes by host memory, as with {NCCL_P2P}=1, prompts slower for it "
            f"(with {NCCL_P2P}=0 it goes by peers all the same). To have them work: {REMEDY}"
        )


def _tell_of_hosts() -> None:
    report.warn(
        f"deepseek_v4_sm120: NCCL's first sum between the hosts has not come back for {PATIENCE_S:.0f} s. Where it "
        "never does, it has taken a network that does not lead to the others: NCCL_SOCKET_IFNAME and "
        "GLOO_SOCKET_IFNAME name the interface, NCCL_IB_HCA the devices, on each host; `doctor` looks at them, and "
        "NCCL_DEBUG=INFO says what it took"
    )


def _tell() -> None:
    text = f"NCCL's first sum between the cards has not come back for {PATIENCE_S:.0f} s. "
    if os.environ.get(NCCL_P2P, "0") in ("", "0"):
        text += (
            "Where it never does, the driver offers copies between them that move nothing: end this server, and start "
            f"it with {NCCL_P2P}=1. To have them move something: {REMEDY}"
        )
    else:
        text += f"{NCCL_P2P} is set, so it is not by the cards' own memory: NCCL_DEBUG=INFO says where it waits"
    report.warn(f"deepseek_v4_sm120: {text}")
