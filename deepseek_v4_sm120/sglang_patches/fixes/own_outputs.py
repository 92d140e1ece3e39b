"""The last stage of a pipeline goes on with the tokens that it has drawn, not with their echo.

With --pp-size the last stage sends what a step gave (tokens, log-probabilities) to the first one, and each stage sends
it on to the next, until the last gets back what it had sent. It waits for that: only then does it end the step's
requests, plan the next step and prepare its launch. But the stage in front of it sends the echo behind its own next
launch. So with one stream, of which one batch goes round, both stages' work on the host is done one after the other,
in front of each stage's work on the card, as it never is with one card, where it is done beside the card's work.

Here the last stage keeps a copy, made on the stream and at the place of the send, and takes it where it would receive;
its own message says so ("__kept__"), and the stage in front of it does not send that on. What each stage does, and in
which order, stays; the last one waits less. Who sends and who does not is agreed on: the stage in front has said with
what goes from layer to layer that it knows this ("__knows_kept__"); one that is without us, on another host or another
card, says nothing, and the echo goes round. Not with several cards in a stage, where a message is put together of what
its cards send; nor with speculation or PD disaggregation, whose loops nobody has looked at for this.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable

import torch

from deepseek_v4_sm120.sglang_patches.scope import is_ours

OUTPUT, PROXY, KEPT, KNOWS = "output", "proxy", "__kept__", "__knows_kept__"  # kinds of messages, words in them
FOUND, QUEUE = "deepseek_v4_sm120_knows_kept", "deepseek_v4_sm120_kept"  # attributes of a scheduler


def replace_send_dict(original: Callable) -> Callable:
    """For SchedulerPPMixin._pp_send_dict_to_next_stage up to 0.5.20: its current stream has waited for the step."""
    return sends(original, lambda scheduler, outputs: copied(outputs))


def replace_send_dict_on_stream(original: Callable) -> Callable:
    """The same from 0.5.21 on, which waits for the step on the stream of the sends, where there is one."""

    def copy(stage, outputs):
        with stage.pp_comm_stream_ctx:
            return copied(outputs), stage._pp_record_comm_event()

    return sends(original, copy)


def sends(original: Callable, copy: Callable) -> Callable:
    """copy: scheduler, outputs that were sent -> what _pp_recv_dict_from_prev_stage gives of them."""

    @functools.wraps(original)
    def _pp_send_dict_to_next_stage(self, tensor_dict, async_send=True, msg_type="default", *args, **kwargs):
        if msg_type == OUTPUT and is_keeper(self):
            tensor_dict[KEPT] = True
            works = original(self, tensor_dict, async_send, msg_type, *args, **kwargs)
            kept(self).append(copy(self, tensor_dict))
            return works
        if is_in_front_of_last(self):
            if msg_type == OUTPUT and KEPT in tensor_dict:
                return []
            if msg_type == PROXY:
                tensor_dict[KNOWS] = "yes"  # a text, as the kind of a message is
        return original(self, tensor_dict, async_send, msg_type, *args, **kwargs)

    return _pp_send_dict_to_next_stage


def replace_recv_dict(original: Callable) -> Callable:
    """For SchedulerPPMixin._pp_recv_dict_from_prev_stage(self) -> the dict of a step; from 0.5.21 on also an event."""

    @functools.wraps(original)
    def _pp_recv_dict_from_prev_stage(self):
        return kept(self).popleft() if is_keeper(self) else original(self)

    return _pp_recv_dict_from_prev_stage


def replace_recv_proxy(original: Callable) -> Callable:
    """For SchedulerPPMixin._pp_recv_proxy_tensors(self) -> what the layers in front gave, None in the first stage."""

    @functools.wraps(original)
    def _pp_recv_proxy_tensors(self):
        given = original(self)
        if given is not None:
            vars(self)[FOUND] = given.tensors.pop(KNOWS, None) is not None
        return given

    return _pp_recv_proxy_tensors


def is_keeper(scheduler) -> bool:
    """Whether this is the last stage, of one card, of a server that nobody drafts for and that reads and answers, and
    the stage in front knows what it says. The same from the first step on."""
    is_plain = scheduler.spec_algorithm.is_none() and scheduler.disaggregation_mode.name == "NULL"
    is_alone = scheduler.pp_group.is_last_rank and scheduler.attn_tp_group.world_size == 1
    return is_alone and is_plain and vars(scheduler).get(FOUND, False) and is_ours()


def is_in_front_of_last(scheduler) -> bool:
    return scheduler.pp_group.rank_in_group == scheduler.pp_group.world_size - 2


def kept(scheduler) -> deque:
    """What was sent and not yet taken, in the order of the steps."""
    return vars(scheduler).setdefault(QUEUE, deque())


def copied(outputs: dict) -> dict:
    """The tensors may lie in buffers of a graph, which its next replay writes."""
    return {name: one.clone() if isinstance(one, torch.Tensor) else one for name, one in outputs.items()}
