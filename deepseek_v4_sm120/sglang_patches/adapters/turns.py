"""Two calls of one process that take turns: one runs, the other waits until it is handed over to.

    run         the first call in this thread, the second in one of its own, until both have ended
    hand_over   in the call that runs: the other goes on, and this returns when it is this one's turn again

Strictly in turn: the first up to its first hand-over, the second up to its first, the first up to its second, and so
on; behind the end of one the other runs through. So what both do has one order, which is that of their own text,
whatever the threads' times are. What torch and Python keep for each thread (device, stream, gradients, inference mode,
context variables) is in the second thread as it is in the first.

An error of one ends both: the other one's `hand_over` raises Abandoned, and `run` raises the error itself, with its own
traceback.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable

import torch


class Abandoned(BaseException):
    """Ends a call whose other one has failed. No Exception: nobody between here and `run` may take it for an error."""


class Turns:
    """begin(i): what to put in place each time that call i's turn begins, 0 or 1."""

    def __init__(self, begin: Callable[[int], None]):
        self._begin = begin
        self._turn = (threading.Lock(), threading.Lock())  # free: its call may go on
        self._has_ended = [False, False]
        self._error: BaseException | None = None
        for lock in self._turn:
            lock.acquire()

    def run(self, first: Callable[[], object], second: Callable[[], object]) -> list:
        """What both return; the error of the one that failed first."""
        results = [None, None]

        def body(i: int, call: Callable[[], object]) -> None:
            try:
                self._go_on(i)
                results[i] = call()
            except Abandoned:
                pass
            except BaseException as error:
                if self._error is None:
                    self._error = error
            finally:
                self._has_ended[i] = True
                self._let_go_on(1 - i)

        def beside() -> None:
            self._turn[1].acquire()
            body(1, there)

        there = _as_in_this_thread(second)
        thread = threading.Thread(target=contextvars.copy_context().run, args=(beside,), daemon=True)
        thread.start()
        body(0, first)
        thread.join()
        if self._error is not None:
            raise self._error
        return results

    def hand_over(self, i: int) -> None:
        """In call i. Raises Abandoned where the other one has failed."""
        if not self._has_ended[1 - i] and self._error is None:
            self._let_go_on(1 - i)
            self._turn[i].acquire()
        self._go_on(i)

    def _go_on(self, i: int) -> None:
        if self._error is not None:
            raise Abandoned
        self._begin(i)

    def _let_go_on(self, i: int) -> None:
        if self._turn[i].locked():  # free where it has not come to wait yet, after an error
            self._turn[i].release()


def _as_in_this_thread(call: Callable[[], object]) -> Callable[[], object]:
    """`call` for another thread, with what torch keeps for each thread as it is in this one."""
    inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def there():
        if stream is not None:
            torch.cuda.set_device(stream.device)
        with torch.inference_mode(inference), torch.set_grad_enabled(gradients), torch.cuda.stream(stream):
            return call()

    return there
