"""Attention sinks of new weights are what a running server computes with.

With the heads dealt to several cards each card's attention keeps its own heads' sinks beside the parameter, copied at
the first forward; captured graphs read that copy. Up to 0.5.22 nothing writes it again: behind an update of the weights
(update_weights_from_disk, _tensor, _distributed) every answer is computed with the old weights' sinks and the new
weights' rest, and nothing says so. So a server that starts with dummy weights has dummy sinks for good. From 0.5.23 on
SGLang writes the target's again, but neither a draft's nor behind load_format="direct".

Here the copy is made again behind each load, in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from deepseek_v4_sm120.sglang_patches.adapters import direct_updates
from deepseek_v4_sm120.sglang_patches.scope import is_ours


def replace_loading(original: Callable) -> Callable:
    """For what has written the weights of a model, its first argument: DeepseekV4ForCausalLM.post_load_weights, which
    the MTP draft's calls, DSPARK's load_weights and post_load_weights, and _model_load_weights_direct."""

    @functools.wraps(original)
    def load(*args, **kwargs):
        result = original(*args, **kwargs)
        if is_ours():
            refresh(args[0])
        return result

    return load


def replace_loading_custom(original: Callable) -> Callable:
    """For dynamic_import, where a --custom-weight-loader is looked up: it writes as `replace_loading`'s do."""
    return direct_updates.finding(original, lambda found, _: replace_loading(found))


def replace_end(original: Callable) -> Callable:
    """For WeightUpdater.end_weight_update(self, *, run_post_load), which tells that another process has written: up to
    0.5.22 DSPARK's draft has no post_load_weights that it would call."""

    @functools.wraps(original)
    def end_weight_update(self, *, run_post_load):
        original(self, run_post_load=run_post_load)
        if is_ours():
            refresh(self.get_model())

    return end_weight_update


def refresh(model) -> None:
    """Of each attention of the model that has such a copy: its own heads' sinks; what pads them stays 0. Left is the
    copy of an attention that has all heads but in its decode steps (context parallelism of prompts)."""
    with torch.inference_mode():  # a forward that made the copy may have been in it
        for module in model.modules():
            copied = getattr(module, "_attn_sink_local", None)
            if copied is not None and module.n_local_heads < module.n_heads:
                own = own_sinks(module)
                copied[: len(own)].copy_(own)


def own_sinks(attention) -> torch.Tensor:
    rank = getattr(attention, "attn_tp_rank", None)  # 0.5.16 and later
    rank = getattr(attention, "tp_rank", 0) if rank is None else rank
    return attention.attn_sink.data[rank * attention.n_local_heads :][: attention.n_local_heads]
