"""What is known of the sums between the cards before there are groups, and the probe's process of a rank ahead of them.

A rank imports SGLang for 20 s and more before its cards' group is made, and the probe's process torch for 5. It is
started in front of the scheduler's module, the first that a rank alone imports: the package itself, torch and, as most
servers are started, the arguments are there by then. Standard library only.

Who else imports that module (0.5.13 to 0.5.23): the controller of data parallelism, and HTTP workers
(--tokenizer-worker-num), both by way of the controller's own module. That one tells them apart. So it does where the
user's script imports SGLang's engine at its top, and for ranks with data parallelism of the attention from 0.5.23 on,
whose first function is the controller's: their processes start with the probe, as without this.
"""

from __future__ import annotations

import sys

from deepseek_v4_sm120.ops import all_reduce_probe_process
from deepseek_v4_sm120.ops.all_reduce_sizes import RANKS
from deepseek_v4_sm120.ops.shared import limits
from deepseek_v4_sm120.sglang_patches import models_served

PATCH = "all_reduce"
CONTROLLER = "sglang.srt.managers.data_parallel_controller"


def start() -> None:
    """In a process that a server started, in front of the scheduler's module, with which a rank begins."""
    if CONTROLLER not in sys.modules and will_probe():
        all_reduce_probe_process.start_ahead()


def will_probe() -> bool:
    """Of a rank, as far as its parent told; asks no GPU."""
    return (
        takes_model()
        and models_served.has_served_card()
        and why_not_ask() is None
        and models_served.announced().get("summing_ranks") in RANKS
    )


def takes_model() -> bool:
    told = models_served.announced()
    return (
        told is not None
        and models_served.serves_this_process()
        and limits.takes(PATCH, **{name: told.get(name) for name in limits.LIMITS[PATCH]})
    )


def why_not_ask() -> str | None:
    """What keeps the ranks from asking each other at all: one that does not answer would be waited for."""
    if models_served.has_several_hosts():
        return "the server has several hosts (--nnodes), and ours are between the cards of one"
    if models_served.has_ranks_that_come_and_go():
        return "ranks may end and come back while the others go on (--elastic-ep-backend)"
    return None
