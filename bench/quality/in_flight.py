"""How many requests a server really ran at once: seen from the times at which their tokens came, not from how many were
sent. A server runs no more than its --max-running-requests; the rest wait in its queue, and a gate that takes their
company for granted proves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from bench.serving.answers import Answer, first_state
from bench.serving.endpoint import Endpoint, Interval
from bench.serving.server_errors import ServerError


def most_at_once(intervals: Sequence[Interval]) -> int:
    """The greatest number of answers that were between their first and their last token at one moment."""
    moments = [(one.first_s, 1) for one in intervals if one.first_s is not None]
    # what ends at the moment at which another begins did not run beside it: ends sort first
    moments += [(one.last_s, -1) for one in intervals if one.last_s is not None]
    running, most = 0, 0
    for _, change in sorted(moments):
        running += change
        most = max(most, running)
    return most


def around(intervals: Sequence[Interval], begin_s: float, end_s: float) -> int:
    """How many answers ran during all of that time (time.monotonic): tokens before it, and tokens after it."""
    return sum(
        one.first_s is not None and one.first_s <= begin_s and one.last_s is not None and one.last_s >= end_s
        for one in intervals
    )


def streamed(
    endpoint: Endpoint, prompts: Sequence[Sequence[int]], concurrency: int, new: int
) -> tuple[list[Answer], int]:
    """All prompts, `concurrency` at a time: the answers in their order, and how many really ran at once."""

    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        found = list(pool.map(lambda prompt: endpoint.stream(prompt, new, ignore_eos=True), prompts))
    return [answer for answer, _ in found], most_at_once([interval for _, interval in found])


def limit_of(endpoint: Endpoint) -> str:
    """What the server says of how many requests it runs, for a message; "" if it says nothing."""
    try:
        info = endpoint.server_info()
    except ServerError:  # what was measured stands without it
        return ""
    limit = first_state(info).get("effective_max_running_requests_per_dp") or info.get("max_running_requests")
    return f" (it says max_running_requests {limit})" if isinstance(limit, int) else ""


def serialised(endpoint: Endpoint, measured: int, needed: int, instead: str) -> str:
    """What INCOMPLETE says where fewer requests ran at once than the gate is about. `instead`: the gate's option."""
    buffered = "" if measured > 1 else " (nothing on the way may buffer streams)"
    return (
        f"{endpoint.url} ran {measured} requests at once where {needed} were to{limit_of(endpoint)}, by the times at "
        f"which their tokens came{buffered}: start it with --max-running-requests {needed} or more (and with room in "
        f"the KV cache for them), or take {instead}"
    )
