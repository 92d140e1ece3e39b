"""The fake server's requests in flight: how they are decoded together, what /v1/loads tells, what /abort_request and a
client that goes away end. The shapes are those of SGLang 0.5.12 to 0.5.23 (srt/entrypoints/v1_loads.py,
io_struct.AbortReq).
"""

from __future__ import annotations

import itertools
import select
import socket
import threading
import time
from dataclasses import dataclass, field

MAX_TOKENS = 100_000


@dataclass(eq=False)
class Live:
    """A request that runs. `tokens`: of the KV cache that it holds; `samples`: it has a temperature."""

    rid: str
    tokens: int
    samples: bool = False
    is_aborted: threading.Event = field(default_factory=threading.Event)


class Requests:
    """`held`: tokens that nobody gives back (a leak to order). `cancelled`: requests ended before their time so far."""

    def __init__(self):
        self.lock, self.names = threading.Lock(), itertools.count()
        self.live: list[Live] = []
        self.held = self.cancelled = 0

    def begin(self, rid: str | None, tokens: int, samples: bool = False) -> Live:
        found = Live(rid or f"own-{next(self.names)}", tokens, samples)
        with self.lock:
            self.live.append(found)
        return found

    def end(self, live: Live, cancelled: bool) -> None:
        with self.lock:
            self.live.remove(live)
            self.cancelled += cancelled

    def any_samples(self) -> bool:
        with self.lock:
            return any(one.samples for one in self.live)

    def abort(self, rid: str, abort_all: bool = False) -> None:
        """As in SGLang: its tokenizer manager knows only whole ids, its scheduler takes all that begin with one."""
        with self.lock:
            is_known = any(one.rid == rid for one in self.live)
            for one in self.live:
                if abort_all or (is_known and one.rid.startswith(rid)):
                    one.is_aborted.set()

    def loads(self, in_flight: int, version: str) -> dict:
        """/v1/loads. `in_flight`: requests that have come and have no answer."""
        with self.lock:
            running, used = len(self.live), self.held + sum(one.tokens for one in self.live)
        load = {"timestamp": time.time(), "dp_rank": 0, "num_running_reqs": running}
        load |= {"num_waiting_reqs": max(0, in_flight - running), "num_waiting_uncached_tokens": 0}
        load |= {"num_used_tokens": used, "num_total_tokens": used, "max_total_num_tokens": MAX_TOKENS}
        load |= {"token_usage": used / MAX_TOKENS, "gen_throughput": 0.0, "cache_hit_rate": 0.0, "utilization": 0.0}
        return {"timestamp": "2026-01-01T00:00:00+00:00", "version": version, "loads": [load]}


class Batch:
    """Requests that are decoded together: each makes a token a step, so none runs ahead of one that the machine keeps
    waiting. `with batch:` is a request's time in it.
    """

    def __init__(self):
        self.changed = threading.Condition()
        self.members = self.arrived = self.steps = 0

    def __enter__(self) -> None:
        with self.changed:
            self.members += 1

    def __exit__(self, *_) -> None:
        with self.changed:
            self.members -= 1
            self._release()

    def step(self) -> None:
        """Until all are at their next token."""
        with self.changed:
            self.arrived += 1
            step = self.steps
            self._release()
            self.changed.wait_for(lambda: self.steps > step)

    def _release(self) -> None:
        if self.arrived and self.arrived == self.members:
            self.arrived = 0
            self.steps += 1
            self.changed.notify_all()


def has_left(connection: socket.socket) -> bool:
    """Whether the client has closed its end."""
    if not select.select([connection], [], [], 0)[0]:
        return False
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except ConnectionError:
        return True
