"""What ends a program from outside, for those that have started servers."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

# Ctrl-C comes as KeyboardInterrupt anyway; the terminal that is closed. Under nohup that one is ignored, and stays so
ENDS = (signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """SIGTERM: by a supervisor or an orchestrator, which has a limit of its own and then kills, or by `kill`."""


@contextlib.contextmanager
def as_interrupts() -> Iterator[None]:
    """ENDS raise KeyboardInterrupt within, in the main thread, so that what stops a server at Ctrl-C does so then."""
    before = {one: signal.signal(one, _interrupt) for one in ENDS if signal.getsignal(one) != signal.SIG_IGN}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _interrupt(number: int, _) -> None:
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt
