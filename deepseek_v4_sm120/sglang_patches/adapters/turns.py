"""Two functions that take turns: one of them runs at a time, each in a thread of its own, until it says `next`.

The first runs in the caller's thread, the second in a thread that is kept for this. What a thread has for itself is the
caller's there: contextvars, the CUDA device and stream, inference mode. A `waiting.Scope` begins anew.

Whose turn it is depends on the two functions alone, so ranks that run the same ones go through the same order.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch


class OtherFailed(RuntimeError):
    """Ends a function whose other one has raised; `Turns.run` raises what that one did."""


class Turns:
    def __init__(self):
        self._may_go = (threading.Semaphore(0), threading.Semaphore(0))
        self._is_over = [False, False]
        self._error: BaseException | None = None

    def run(self, first: Callable, second: Callable) -> tuple:
        """What both return. Raises what one of them raises, when both have ended."""
        try:
            return self._run_both(first, second)
        finally:
            self._error = None  # which has the frames of both

    def _run_both(self, first: Callable, second: Callable) -> tuple:
        inside = functools.partial(self._in_worker, second, _Place())
        behind = _worker().submit(contextvars.copy_context().run, inside)
        try:
            found = self._run(0, first)
        except OtherFailed:
            return behind.result()  # raises
        except BaseException:
            behind.exception()  # waits
            raise
        return found, behind.result()

    def is_over(self, number: int) -> bool:
        """Whether function `number` has ended."""
        return self._is_over[number]

    def next(self, number: int) -> None:
        """Called by function `number`: the other's turn, until that says so or has returned."""
        if not self.is_over(1 - number):
            self._may_go[1 - number].release()
            self._may_go[number].acquire()
        if self._error is not None:
            raise OtherFailed from self._error

    def _run(self, number: int, function: Callable):
        try:
            return function()
        except BaseException as error:
            self._error = self._error or error
            raise
        finally:
            self._is_over[number] = True
            self._may_go[1 - number].release()

    def _in_worker(self, function: Callable, place: _Place):
        self._may_go[1].acquire()
        return self._run(1, functools.partial(self._at, place, function))

    def _at(self, place: _Place, function: Callable):
        if self._error is not None:  # the first never came to its `next`
            raise OtherFailed from self._error
        with place.entered():
            return function()


class _Place:
    """What a thread has for itself, as the one that makes this has it."""

    def __init__(self):
        self._inference, self._grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._stream is not None:
                stack.enter_context(torch.cuda.device(self._stream.device))
                stack.enter_context(torch.cuda.stream(self._stream))
                self._stream.query()  # the driver's calls find the device's context in a thread that has called once
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            yield


_kept = threading.local()  # worker: of a caller's thread


def _worker() -> ThreadPoolExecutor:
    if not hasattr(_kept, "worker"):
        _kept.worker = ThreadPoolExecutor(1, thread_name_prefix="deepseek_v4_sm120_turns")
    return _kept.worker
