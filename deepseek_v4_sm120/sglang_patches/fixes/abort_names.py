"""Who leaves a request ends that one, and none whose name only begins alike.

SGLang's scheduler aborts each request whose name begins with the name that is asked for. Where clients choose the names
(`rid` over /generate and the chat API, or a gateway does it for them), `job-1` that is left, or aborted by
/abort_request, ends `job-10` and `job-1b` of others: the answers stop in their middle (0.5.12 to 0.5.23). The scheduler
itself aborts so as well, at a time limit for one.

SGLang makes longer names of one in two ways, and those are still meant where nothing has the name itself: `job_0`,
`job_1`, .. for the prompts of one request, and in 0.5.17 a name and 32 digits for the further answers of `n` above 1.
Here all others that begin so are hidden while the scheduler looks.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator

from deepseek_v4_sm120.sglang_patches.scope import is_ours

OF_ITS_OWN = re.compile(r"(_\d+)?(_[0-9a-f]{32})?")  # behind a request's name
HIDDEN = "\0"  # in front of a name: then it begins as no other does
LISTS = ("waiting_queue", "disagg_prefill_inflight_queue")
QUEUES = ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue", "disagg_decode_transfer_queue")
BATCHES, BATCH_LISTS = ("running_batch", "cur_batch", "last_batch"), ("running_mbs", "mbs")


def replace_abort(original: Callable) -> Callable:
    """For Scheduler.abort_request(self, recv_req). recv_req.rid: the name, without abort_all."""

    @functools.wraps(original)
    def abort_request(self, recv_req):
        if recv_req.abort_all or not is_ours():
            return original(self, recv_req)
        hidden = _others(recv_req.rid, {id(one): one for one in _requests(self)}.values())
        for one in hidden:
            one.rid = HIDDEN + one.rid
        try:
            return original(self, recv_req)
        finally:
            for one in hidden:
                one.rid = one.rid.removeprefix(HIDDEN)

    return abort_request


def _others(asked: str, requests) -> list:
    """The requests whose names begin with the one that is asked for, and that are not meant."""
    begin_so = [one for one in requests if one.rid.startswith(asked)]
    if any(one.rid == asked for one in begin_so):
        return [one for one in begin_so if one.rid != asked]
    return [one for one in begin_so if not OF_ITS_OWN.fullmatch(one.rid[len(asked) :])]


def _requests(scheduler) -> Iterator:
    """All that wait, are read or answered, some more than once. What a release, or a server, has not is empty."""
    held = vars(scheduler)
    yield from scheduler.grammar_manager.grammar_queue
    for name in LISTS:
        yield from held.get(name) or ()
    for queue in (held[name] for name in QUEUES if held.get(name) is not None):
        of_queue = vars(queue)
        yield from (getattr(entry, "req", entry) for entry in of_queue["queue"])  # decode's has more beside a request
        yield from of_queue.get("retracted_queue") or ()
    for batch in _batches(scheduler, held):
        yield from batch.reqs
    if held.get("chunked_req") is not None:
        yield held["chunked_req"]


def _batches(scheduler, held: dict) -> Iterator:
    batches = [held.get(name) for name in BATCHES]
    batches += (batch for batch, _ in held.get("result_queue") or ())
    for name in BATCH_LISTS:
        batches += held.get(name) or ()
    yield from (batch for batch in batches if batch is not None)
