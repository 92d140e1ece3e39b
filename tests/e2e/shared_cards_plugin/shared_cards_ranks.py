"""SGLang plugin (entry point group sglang.srt.plugins): several ranks of an engine on each card (../shared_cards.py).

E2E_RANKS_A_CARD: how many. SGLang gives each rank a card of its own and asks `maybe_reindex_device_id`, in the process
that starts the ranks, which one that is; `--gpu-id-step 0`, which would say the same of one card, is refused. SGLang's
own sums, which want a card for each rank, are NCCL's, as they are of more than two cards without NVLink.
"""

import contextlib
import os

VARIABLE = "E2E_RANKS_A_CARD"
STARTERS = ("sglang.srt.entrypoints.engine", "sglang.srt.managers.data_parallel_controller")
FUNCTION = "maybe_reindex_device_id"
COMMUNICATORS = "sglang.srt.distributed.device_communicators"
SUMS = tuple(f"{COMMUNICATORS}.{module}" for module in ("custom_all_reduce", "custom_all_reduce_v2"))
ASKED = "can_use_custom_all_reduce_with_nvlink"  # None: it cannot


@contextlib.contextmanager
def shared(original, gpu_id):
    """Around it: the card that this rank shares, in place of one of its own."""
    with original(gpu_id // int(os.environ[VARIABLE])) as card:
        yield card


def cannot(_original, *_, **__):
    return None


def register():
    if VARIABLE not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for module in STARTERS:
        HookRegistry.register(f"{module}.{FUNCTION}", shared, HookType.AROUND)
    for module in SUMS:
        HookRegistry.register(f"{module}.{ASKED}", cannot, HookType.AROUND)
