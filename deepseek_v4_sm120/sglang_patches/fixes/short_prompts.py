"""Short prompts are read beside the chunks of a long one, not behind all of it.

A pass belongs to the prompt that is read in chunks: SGLang gives it all of the pass's tokens, and looks at the queue
with what is left, which is nothing until its last chunk. So who asks a short question waits until a prompt of a million
tokens is read, and the ones that wait in front of it: minutes, on a server with room for all (all releases; from 0.5.21
on not with --schedule-policy shortest-prefill-first, by which on a busy server a long prompt may wait for ever).

Here every second chunk is shorter by what those of the next 16 prompts in the queue need that fit in whole; a page is
the chunk's at least. So the long prompt has half of the passes' tokens, and of the KV cache stays what it still needs.
Who does not fit waits as before, is not cut (SGLang can have one prompt in chunks), and keeps its place. With
--enable-priority-scheduling nobody of a lower priority is let in beside the long one, nor before who does not fit and
might have to wait for its answer. Where nobody was let in after all (no slot, no room), chunks are whole again until
the queue is another, or what runs has another size.

Cards decide alike: by the queue and by what SGLang's prefix cache holds. Not with several hosts, unless all
have us alike (several_hosts.py), nor with pipeline parallelism, LoRA, chunks of aligned lengths, or without a prefix
cache.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from deepseek_v4_sm120.sglang_patches.scope import decides_alike

POLICY = "sglang.srt.managers.schedule_policy"
LOOKED_AT = 16  # prompts of the queue: each is looked up in the prefix cache


@dataclass
class Turn:
    """A scheduler's passes of a prompt in chunks."""

    is_whole: bool = False  # the next one, because the last one was shared
    in_vain: tuple | None = None  # the queue and what ran, where nobody was let in
    adder: object = None  # of this pass, where its chunk is shorter
    queue: list = field(default_factory=list)  # as it stood in front of it


_turns: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_looking: list = []  # (scheduler, its turn, its state) while it looks for prompts; it is one thread
_shared = weakref.WeakSet()  # adders of passes whose chunk is shorter


def replace_next_prompts(original: Callable) -> Callable:
    """For Scheduler._get_new_batch_prefill_raw(self, prefill_delayer_single_pass, running_batch) -> batch, running."""

    @functools.wraps(original)
    def _get_new_batch_prefill_raw(self, prefill_delayer_single_pass, running_batch):
        asked = {"prefill_delayer_single_pass": prefill_delayer_single_pass, "running_batch": running_batch}
        if not _may_share(self):
            return original(self, **asked)
        turn = _turns.setdefault(self, Turn())
        state = tuple(request.rid for request in self.waiting_queue[:LOOKED_AT]), len(running_batch.reqs)
        _looking.append((self, turn, state))
        try:
            return original(self, **asked)
        finally:
            _looking.clear()
            if turn.adder is not None:
                turn.is_whole = len(turn.adder.can_run_list) > 1
                turn.in_vain = None if turn.is_whole else state
                turn.adder = None
                places = {id(request): place for place, request in enumerate(turn.queue)}
                self.waiting_queue.sort(key=lambda request: places.get(id(request), len(places)))
                turn.queue = []

    return _get_new_batch_prefill_raw


def _may_share(scheduler) -> bool:
    if scheduler.chunked_req is None or not scheduler.waiting_queue:
        return False
    has_no_prefixes = getattr(scheduler.tree_cache, "disable", True)
    others = scheduler.enable_lora, scheduler.truncation_align_size, has_no_prefixes
    return not any(others) and decides_alike(scheduler.pp_group.world_size)


def replace_add_chunk(original: Callable) -> Callable:
    """For PrefillAdder.add_chunked_req(self, req) -> the request while chunks of it are left; asked first in a pass."""

    @functools.wraps(original)
    def add_chunked_req(self, req):
        kept = _kept_for_others(self, req) if _looking else 0
        if not kept:
            return original(self, req)
        _shared.add(self)
        self.rem_chunk_tokens -= kept
        left = original(self, req)
        self.rem_chunk_tokens += kept
        return left

    return add_chunked_req


def _kept_for_others(adder, chunked) -> int:
    """The tokens of this pass that its chunk leaves to others, who are the first in the queue until it is made up."""
    scheduler, turn, state = _looking[-1]
    is_whole, turn.is_whole = turn.is_whole, False
    room = adder.rem_chunk_tokens
    if is_whole or turn.in_vain == state or room is None or _unread(chunked) <= room:
        return 0
    sign = scheduler.enable_priority_scheduling and (-1 if scheduler.schedule_low_priority_values_first else 1)
    fit, kept = _fitting(adder, chunked, scheduler.waiting_queue[:LOOKED_AT], room, sign)
    turn.in_vain = None if fit else state
    if fit:
        turn.adder, turn.queue, taken = adder, scheduler.waiting_queue, set(map(id, fit))
        scheduler.waiting_queue = fit + [request for request in turn.queue if id(request) not in taken]
    return kept


def _fitting(adder, chunked, waiting: list, room: int, sign: int) -> tuple[list, int]:
    """-> who fits in whole beside a chunk, and into the KV cache beside all of its prompt; the tokens of these. sign:
    of priorities by which the queue is sorted, the greatest first times it; 0: of none."""
    fit, kept, page, least = [], 0, adder.page_size, _rank(chunked, sign)
    most_said = importlib.import_module(POLICY).CLIP_MAX_NEW_TOKENS
    free = adder.rem_total_tokens - _unread(chunked) - _unsaid(chunked, most_said)
    for request in waiting:
        if _rank(request, sign) < least:
            break
        if request.session is not None:  # what it goes on from is its session's, and is taken when it is looked up
            least = _rank(request, sign)
            continue
        request.init_next_round_input(adder.tree_cache)
        needed = -(-(_unread(request) - request.host_hit_length) // page) * page
        held = len(request.full_untruncated_fill_ids) + _unsaid(request, most_said) + page
        if kept + needed <= room - page and held < free:
            fit, kept, free = [*fit, request], kept + needed, free - held
        else:
            least = _rank(request, sign)
    return fit, kept


def _rank(request, sign: int) -> int:
    return sign * request.priority if sign else 0


def _unread(request) -> int:
    since_0_5_22 = getattr(request, "prefix_len", None)
    read = len(request.prefix_indices) if since_0_5_22 is None else since_0_5_22
    return len(request.full_untruncated_fill_ids) - read


def _unsaid(request, most: int) -> int:
    return min(max(request.sampling_params.max_new_tokens - len(request.output_ids), 0), most)


def replace_select(original: Callable) -> Callable:
    """For PrefillAdder._select_prefill_admission(self, req, *, ...) -> an admission, or why there is none."""

    @functools.wraps(original)
    def _select_prefill_admission(self, req, **given):
        found = original(self, req, **given)
        if self in _shared and getattr(found, "is_chunked", False):
            return importlib.import_module(POLICY).AddReqResult.OTHER
        return found

    return _select_prefill_admission
