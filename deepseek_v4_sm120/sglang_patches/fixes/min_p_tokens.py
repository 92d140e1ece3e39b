"""The token of a request with min_p is sent from one card to the others, so that they cannot part.

Every card samples for itself, from the same logits with the same random numbers, and SGLang sends no token round: by
default it trusts that all kernels in front of it add up in one order. For requests with min_p they do not. Their
probabilities are renormalised by FlashInfer first (`top_k_renorm_probs`, `top_p_renorm_probs`), which adds up by float
atomics: the same input gives other last bits from call to call, and once in 10^5 to 10^7 draws another token on one of
the cards (flashinfer #4831, #5034; sglang #38565). From there on the cards compute with different tokens, and wait for
each other for ever where one of them ends the answer. What samples without min_p goes by a kernel that is
deterministic; speculation sends its decisions round by itself, for EAGLE in all releases that are patched, for DSPARK
from 0.5.19 on.

SGLang's own switch (SYNC_TOKEN_IDS_ACROSS_TP) is for all batches, and takes the least of the cards' tokens, of which
the log-probabilities that were taken before know nothing. Here the first card's token is taken, whose
log-probabilities are the ones that are told.

With several hosts (--nnodes) it is sent where all have us alike (several_hosts.py): the cards of one that lacks this
folder would not take it.

Where --attn-cp-size stands beside data parallel attention, several cards have one batch, and SGLang's group for tokens
is that of a batch's heads alone. So the token goes round those that share the prompts' rows as well. Not so with
--enable-prefill-cp, which has one rank of data parallelism: there that group is of all cards.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator

import torch.distributed

from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.names import PARALLEL_STATE
from deepseek_v4_sm120.sglang_patches.scope import is_ours


def replace_sync_token_ids(original: Callable) -> Callable:
    """For Sampler._sync_token_ids_across_tp(self, batch_next_token_ids [requests], sampling_info), which changes the
    tokens in place. All cards of the group ask alike: what a batch samples by is the same on all."""

    @functools.wraps(original)
    def _sync_token_ids_across_tp(self, batch_next_token_ids, sampling_info):
        is_asked = sampling_info.need_min_p_sampling and not sampling_info.is_all_greedy
        if is_asked and is_ours() and not models_served.may_have_unlike_hosts():
            for group in _groups(self.tp_sync_group):
                first = torch.distributed.get_global_rank(group, 0)
                torch.distributed.broadcast(batch_next_token_ids, src=first, group=group)
        return original(self, batch_next_token_ids, sampling_info)

    return _sync_token_ids_across_tp


def _groups(of_heads) -> Iterator:
    """Of cards that have one batch, by which the first one's token comes to all of them, one behind the other."""
    of_rows = importlib.import_module(PARALLEL_STATE)._ATTN_CP
    for group in dict.fromkeys((of_heads, of_heads if of_rows is None else of_rows.device_group)):
        if torch.distributed.get_world_size(group) > 1:
            yield group
