"""What a server says of its own load (/v1/loads: SGLang 0.5.12 to 0.5.23), and a cache that is empty when it must be.

`used` are the tokens of the KV cache that running requests hold; what only the prefix cache keeps is not among them. So
a server without a request has none in use, and what stays in use then is lost until the cache is emptied.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from bench.serving.answers import mapping, sequence
from bench.serving.endpoint import Endpoint
from bench.serving.server_errors import ServerError, ServerNonsense, ServerRefused

POLL_S = 0.05


@dataclass(frozen=True)
class Load:
    """Sums over the data-parallel ranks."""

    running: int
    waiting: int
    used: int

    @property
    def is_idle(self) -> bool:
        return self.running == 0 and self.waiting == 0

    def text(self) -> str:
        return f"{self.running} running, {self.waiting} waiting, {self.used} tokens in use"


def load_of(endpoint: Endpoint) -> Load:
    what = f"{endpoint.url}/v1/loads"
    try:
        found = endpoint.get("/v1/loads", timeout_s=30.0)
    except ServerRefused as error:
        if error.status != 404:
            raise
        raise ServerRefused(f"{error}; without it nobody knows what a cancelled request leaves behind", 404) from error
    ranks = [mapping(one, f"{what}: loads") for one in sequence(found.get("loads"), f"{what}: loads")]
    if not ranks:
        raise ServerNonsense(f"{what}: no rank tells its load")

    def total(name: str) -> int:
        values = [rank.get(name) for rank in ranks]
        for value in values:
            if not isinstance(value, int) or isinstance(value, bool):
                raise ServerNonsense(f"{what}: {name}: expected a whole number, got {value!r:.60}")
        return sum(values)

    return Load(total("num_running_reqs"), total("num_waiting_reqs"), total("num_used_tokens"))


class Watch:
    """While it is entered, asks for the load every `period_s`. `most`: the greatest of each number; `error`: why there
    is none any more.
    """

    def __init__(self, endpoint: Endpoint, period_s: float = POLL_S):
        self.endpoint, self.period_s = endpoint, period_s
        self.most, self.error = Load(0, 0, 0), None
        self._is_over, self._thread = threading.Event(), threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._is_over.is_set():
            try:
                load = load_of(self.endpoint)
            except ServerError as error:
                self.error = error
                return
            self.most = Load(*map(max, zip(vars(self.most).values(), vars(load).values(), strict=True)))
            self._is_over.wait(self.period_s)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._is_over.set()
        self._thread.join()


def until_idle(endpoint: Endpoint, patience_s: float, used: int | None = None) -> tuple[Load, float]:
    """(the load, seconds waited) as soon as nothing runs or waits, and no more than `used` tokens are in use; what it
    is after `patience_s`, if that never comes.
    """
    begin = time.monotonic()
    while True:
        load, waited = load_of(endpoint), time.monotonic() - begin
        if (load.is_idle and (used is None or load.used <= used)) or waited > patience_s:
            return load, waited
        time.sleep(POLL_S)


def empty_cache(endpoint: Endpoint, patience_s: float = 10.0) -> None:
    """Empty the prefix cache. SGLang refuses it with 400 while a request is not yet put away, and says so no longer
    than `patience_s`; any other refusal is raised at once.
    """
    begin = time.monotonic()
    while True:
        try:
            return endpoint.flush_cache()
        except ServerRefused as error:
            if error.status != 400 or time.monotonic() - begin > patience_s:
                raise
        time.sleep(POLL_S)
