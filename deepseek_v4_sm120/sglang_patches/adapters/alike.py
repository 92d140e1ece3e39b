"""What all ranks of a server have alike, and so may decide by: a rank that decides otherwise waits for the others for
ever. Their group is named here, the mode, the rows and the lengths of a batch are the callers' business."""

from __future__ import annotations

import functools
import importlib
from importlib.util import find_spec

import torch

from deepseek_v4_sm120.settings import settings
from deepseek_v4_sm120.sglang_patches import device_gate, models_served
from deepseek_v4_sm120.sglang_patches.adapters.all_reduce import CONTEXT, PARALLEL_STATE, SERVER_ARGS

RANKS = (2, 4, 8)


def tensor_parallel_group():
    """The coordinator of the ranks that all have the rows of a prompt; None: they are not all alike."""
    state = importlib.import_module(PARALLEL_STATE)
    tp, decode_context = state._TP, getattr(state, "_DCP", None)  # 0.5.15 and later
    is_alone = (
        tp.world_size in RANKS
        and tp is state.get_tp_group()  # not the second one that multiplexed prompts have
        and tp is state.get_attn_tp_group()  # neither data nor context parallel attention
        and state.get_moe_ep_group().world_size == 1
        and (decode_context is None or decode_context.world_size == 1)
        and see_the_same_cards(tp.world_size)
    )
    return tp if is_alone else None


@functools.cache
def see_the_same_cards(ranks: int) -> bool:
    """Whether the ranks are on one host, which alone tells their settings, and all see all cards, every one served."""
    count = torch.cuda.device_count()
    return (
        models_served.serves_this_process()
        and server_arguments().nnodes == 1
        and count >= ranks
        and all(
            device_gate.serves_capability(torch.cuda.get_device_capability(index), settings().force)
            for index in range(count)
        )
    )


def server_arguments():
    """As the user gave them; what SGLang resolves later is elsewhere in 0.5.19 and later."""
    context = importlib.import_module(CONTEXT) if find_spec(CONTEXT) is not None else None
    if hasattr(context, "get_server_args"):  # 0.5.15 and later
        return context.get_server_args()
    return importlib.import_module(SERVER_ARGS).get_global_server_args()
