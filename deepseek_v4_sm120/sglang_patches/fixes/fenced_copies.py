"""A hierarchical cache's copies wait for the step of the model that still writes where they read or write.

A request that has ended is given back while the step after it, which was launched before its end was known, still
writes its last token: its last page may be taken at once for what comes back from the host. What is computed on the
model's own stream later is later than that write. The copies of a hierarchical cache are on streams of their own, which
wait for what the scheduler's stream waited for, and that is the step's reads of shared buffers alone (0.5.14 and later;
in 0.5.12 nothing). So the step writes its token into a page of another prompt's prefix behind the copy: the answer goes
on from it, and nothing says so. SGLang has such copies wait from 0.5.19 on (#36738).

The other way round, a page that this last token makes full is kept on the host as soon as the request ends: the copy
may read it before the step has written it, and what comes back later lacks a token. SGLang has these wait from 0.5.23
on. Here both do, as there: the copies' stream waits for the model's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import is_ours

FORWARDS = "_dsv4_sm120_forwards"  # of a cache controller: the stream on which its scheduler runs the model


def replace_run_event_loop(original: Callable) -> Callable:
    """For Scheduler.run_event_loop(self), which is entered once, when all is built."""

    @functools.wraps(original)
    def run_event_loop(self):
        controller = getattr(self.tree_cache, "cache_controller", None)
        if controller is not None and is_ours():
            setattr(controller, FORWARDS, self.tp_worker.model_runner.forward_stream)
        return original(self)

    return run_event_loop


def replace_start_loading(original: Callable) -> Callable:
    """For start_loading(self) of HybridCacheController, and of HiCacheController where that one has none of its own."""

    @functools.wraps(original)
    def start_loading(self):
        if self.load_queue:
            wait_for_forwards(self, "load_stream", "host_to_device_stream")
        return original(self)

    return start_loading


def replace_start_writing(original: Callable) -> Callable:
    """For start_writing(self) of the same."""

    @functools.wraps(original)
    def start_writing(self):
        if self.write_queue:
            wait_for_forwards(self, "write_stream", "device_to_host_stream")
        return original(self)

    return start_writing


def wait_for_forwards(controller, until_0_5_17: str, since_0_5_18: str) -> None:
    """The stream of these copies waits for all steps that were launched; no step: there is nothing to wait for."""
    forwards = getattr(controller, FORWARDS, None)
    if forwards is not None:
        engine = getattr(controller, "l2_transfer_engine", None)
        copies = getattr(controller, until_0_5_17) if engine is None else getattr(engine, since_0_5_18)
        copies.wait_stream(forwards)
