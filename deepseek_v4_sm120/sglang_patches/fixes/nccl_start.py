"""A start that waits in NCCL says so.

The first thing that passes between the cards is NCCL's sum of one number, made with each of SGLang's communicators
while the groups are made. Where the driver offers copies between cards that move nothing (ACS, IOMMU, boards of
workstations), it waits for ever: no line, no limit of time, and the watchdog is not there yet (NCCL #1999; rtx6kpro
#15, on two RTX PRO 6000). The probe of our sums would find the same, and comes behind it.

Said once, by the first rank; the wait itself is left as it is.
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

PATIENCE_S = 60.0  # NCCL's start on two to eight cards of a host takes one to some seconds


def replace_init(original: Callable) -> Callable:
    """For PyNcclCommunicator.__init__(self, group, device, ..), which ends with that sum."""

    @functools.wraps(original)
    def __init__(self, group, *args, **kwargs):
        if not _tells(group):
            return original(self, group, *args, **kwargs)
        teller = threading.Timer(PATIENCE_S, _tell)
        teller.daemon = True
        teller.start()
        try:
            return original(self, group, *args, **kwargs)
        finally:
            teller.cancel()

    return __init__


def _tells(group) -> bool:
    """In the first rank of our own model's server on cards that we serve; other hosts are waited for longer, and for
    other reasons."""
    return (
        models_served.has_served_card()
        and not models_served.has_several_hosts()
        and isinstance(group, torch.distributed.ProcessGroup)  # not one that a trainer's process is in
        and torch.distributed.get_rank(group) == 0
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
