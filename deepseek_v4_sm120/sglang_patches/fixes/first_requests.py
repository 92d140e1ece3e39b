"""What is compiled, loaded or allocated at a first use is, before the server says that it is ready.

SGLang's warm-up is one greedy request of a few tokens. All else that requests bring is met for the first time while
others' streams run, and every card's scheduler, and so every stream, waits for it:

- from 0.5.21 on the first sampled step with EAGLE has nvcc compile the kernel that accepts drafts;
- Triton compiles SGLang's allocator of KV pages anew for each power of two that a batch of prompts, or of running
  requests, has reached, 0.2 to 0.7 s each on a slow core; so the tables of a prompt's rows, where the rows are a
  multiple of 16 once more; and the mask of a grammar. Each is loaded beside torch's memory, of which SGLang's own log
  warns from 0.5.18 on;
- the first whole chunk of a prompt grows torch's pool, and its sums, and a draw that is sent to all cards, are NCCL's
  first of their kind.

Here, behind SGLang's own warm-up and before its log says "ready", the server answers a few short requests of each kind:
a prompt of a chunk and one row, more of it from the cache, two that sample, one with a schema, these at once, and
batches to each power of two. /health says 503 meanwhile, as during SGLang's. With what was compiled at an earlier start
that is a matter of seconds; the log says how long it took. In the prefix cache stays that one prompt, until others need
its room: a page is more than the others have.

A start that works without them works with them:
- what is refused is told and stops nothing, and is not asked beside others: where a schema left no token, and the draw
  of a batch has its row, the card's assertion ends the server (seen with a vocabulary that cannot spell it);
- what is not answered in time is aborted by name: a prompt that never has room keeps all others waiting, and up to
  0.5.16, in 0.5.18 and in 0.5.19 a task that is cancelled leaves its request in the scheduler's queue;
- the long ones may end at once: those that may not are let in by other rules where there is no prefix cache, and wait
  for ever where the windows' pool is smaller than a chunk. Where chunks have no bound the prompt is short;
- a start that ends within them, or whose scheduler stands still there, until SGLang's watchdog ends it, is followed by
  one that leaves them out (start_mark.py). The first process of a container cannot kill itself, and ends by an exit
  that looks to us like Ctrl-C: so that one is followed by such a start, too.

Not with data parallel attention, whose ranks would each need their own, nor where prefill and decode are apart, nor
where several processes answer over HTTP, of which each has a warm-up; nor where SGLang's watchdog is to end a scheduler
that compiles for a while, or tensors are dumped. This runs in that process, in the thread of SGLang's warm-up, for
which its loop waits when it ends.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import importlib
import inspect
import threading
import time
from collections.abc import Callable, Container, Iterator

from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.sglang_patches import models_served, start_mark
from deepseek_v4_sm120.sglang_patches.adapters.argument_defaults import accessors

PATCH, HTTP_SERVER, EXECUTE = "first_requests", "sglang.srt.entrypoints.http_server", "execute_warmup_func"
REQUESTS = "sglang.srt.managers.io_struct"
PAGE = 256  # tokens, of this model in all releases
TOKENS, LONG_TOKENS = 4, 16  # of an answer: a few steps with drafts, too; as many as others need to join
ROWS = 16  # a kernel that is told how many rows there are has a form of its own where they are a multiple of this
BATCHES = (1, 2, 4, 8, 12, 16, 24, 32)  # to each power of two, and between them where it is a multiple itself
CHUNK = 2 * PAGE  # where chunks have no bound: a longer prompt may fit no pool, and keeps all behind it waiting
LIMIT_S = 180.0  # of all: /health says 503 meanwhile, and what is not compiled by then goes on being compiled
BEAT_S, SILENT_S = 1.0, 5.0  # how often the loop is asked whether it runs, and how long for its answer
WATCHDOG_S = 300.0  # SGLang's default: a shorter one may end a scheduler while nvcc runs
SLOW_S = 1.0
SCHEMA = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'
KINDS = {
    "sampled": {"temperature": 1.0},
    "sampled of few tokens": {"temperature": 1.0, "top_p": 0.9, "top_k": 20},
    "with a schema": {"json_schema": SCHEMA, "ignore_eos": False},  # it ends where the schema is complete
}


def prompt(number: int, length: int) -> list[int]:
    """Tokens of the vocabulary's midst, no two prompts with the same first one; the same ones at every start."""
    return [1000 + (7919 * index + 101 * number) % 20000 for index in range(length)]


def body(number: int, length: int, tokens: int = TOKENS, **params) -> dict:
    """Greedy, and of so many tokens, where `params` say nothing else."""
    given = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": tokens} | params
    return {"input_ids": prompt(number, length), "sampling_params": given, "log_metrics": False}


def rounds(
    chunk: int, longest: int, slots: int, has_grammars: bool, refused: Container[str] = ()
) -> Iterator[tuple[str, list[dict]]]:
    """(what it is, requests that are asked at once), one round behind the other.

    longest   tokens that a request may have
    slots     requests that run at once, at most
    refused   rounds that were not answered whole, as far as they were asked: such a kind is not asked beside others
    """
    kinds = {name: params for name, params in KINDS.items() if has_grammars or "json_schema" not in params}
    of_chunk = min(chunk + 1, longest - 3 * PAGE)  # admission asks for a page, or two, more than a prompt has
    if of_chunk > PAGE:
        yield "a chunk and a row", [body(0, of_chunk, ignore_eos=False)]
        yield "more of it, from the cache", [body(0, of_chunk + PAGE // 2, ignore_eos=False)]
    numbers = iter(range(1, 1000))
    for kind, params in kinds.items():
        yield kind, [body(next(numbers), 5, **params)]
    at_once = [{}, *(params for kind, params in kinds.items() if kind not in refused)] * 2
    yield "all at once", [body(next(numbers), 5 + extra, LONG_TOKENS, **one) for extra, one in enumerate(at_once)]
    for batch in BATCHES:
        if batch < 2 * slots:  # the first request is read alone, the others as one batch; then all run
            odd = [body(next(numbers), 3 + (index == 1), LONG_TOKENS) for index in range(batch + 1)]
            yield f"{batch + 1} at once", odd
            yield f"{batch + 1} at once, of {ROWS}", [body(next(numbers), ROWS) for _ in range(batch + 1)]


def replace_warm_up(original: Callable) -> Callable:
    """For _wait_and_warmup(server_args, ..): it runs the warm-up that it is given, or SGLang's, then says "ready"."""
    called = inspect.signature(original)

    @functools.wraps(original)
    def _wait_and_warmup(*args, **kwargs):
        given = called.bind(*args, **kwargs)
        given.apply_defaults()
        if models_served.has_served_card():
            given.arguments[EXECUTE] = functools.partial(_execute, given.arguments[EXECUTE])
        return original(*given.args, **given.kwargs)

    return _wait_and_warmup


def _execute(execute: Callable, server_args):
    """SGLang's own first; what it answers: whether the server runs."""
    if runs := execute(server_args):
        try:
            _ask_before_ready(server_args)
        except Exception as error:  # of a release that nobody has read: the server is up, and "ready" is next
            report.warn(f"deepseek_v4_sm120: {PATCH}: not asked: {type(error).__name__}: {error}")
    return runs


def _ask_before_ready(server_args) -> None:
    manager = importlib.import_module(HTTP_SERVER)._global_state.tokenizer_manager
    read, _ = accessors(server_args)
    if not _is_asked_here(manager, read):
        return
    is_up = manager.server_status
    manager.server_status = type(is_up).Starting
    try:
        with start_mark.marked(PATCH) as mark:
            if mark.ended_within:
                report.warn(
                    f"deepseek_v4_sm120: {PATCH}: not asked: an earlier start with these arguments ended or stood "
                    f'still within "{mark.ended_within}"; the next start asks again '
                    f"(DSV4_SM120_SET={PATCH}=off: none does)"
                )
            else:
                _ask(manager, read, mark)
    finally:
        manager.server_status = is_up


def _is_asked_here(manager, read: Callable) -> bool:
    is_plain = read("dp_size", 1) == read("attn_dp_size", 1) == 1 and read("disaggregation_mode", "null") == "null"
    is_plain = is_plain and read("tokenizer_worker_num", 1) == 1
    is_plain = is_plain and not read("debug_tensor_dump_output_folder", None)
    is_plain = is_plain and (read("watchdog_timeout", None) or WATCHDOG_S) >= WATCHDOG_S
    return is_plain and manager.is_generation and manager.event_loop is not None


def _ask(manager, read: Callable, mark) -> None:
    chunk, slots = read("chunked_prefill_size", None) or 0, read("max_running_requests", None)
    longest = min(n for n in (manager.context_len, manager.max_req_input_len) if n)
    has_grammars = manager.tokenizer is not None and read("grammar_backend", None) != "none"
    took, refused, began = {}, set(), time.monotonic()
    found = rounds(chunk if chunk > 0 else CHUNK, longest, slots or BATCHES[-1], has_grammars, refused)
    # said first: should one of them end the server, this is the last line of its log that tells which
    report.info(f"deepseek_v4_sm120: first requests of each kind are asked (DSV4_SM120_SET={PATCH}=off: not)")
    asked = asyncio.run_coroutine_threadsafe(
        _answer_all(manager, found, took, refused, began + LIMIT_S, mark), manager.event_loop
    )
    why = _until_answered(asked, manager, mark)
    asked.cancel()
    slow = [f"{name} {seconds:.1f} s" for name, seconds in took.items() if seconds >= SLOW_S]
    text = f"first requests of {len(took)} kinds answered in {time.monotonic() - began:.1f} s"
    text += f" ({', '.join(slow)})" if slow else ""
    report.add_note(PATCH, lambda: f"{PATCH}: {text}", lambda: dict(took))
    report.info(f"deepseek_v4_sm120: {text}, so that no stream waits for what they need")
    if why is not None:
        report.warn(f"deepseek_v4_sm120: {PATCH}: behind {next(reversed(took), 'none')}: {why!s}")
    report.write()


def _until_answered(asked: concurrent.futures.Future, manager, mark):
    """Waits; None, or why not all were answered. A loop that ends waits for this thread, and answers nothing then: at
    Ctrl-C, or where a rank has ended, and a container's first process, which cannot kill itself, ends by an exit."""
    loop = manager.event_loop
    while not loop.is_closed():
        beat = threading.Event()
        loop.call_soon_threadsafe(beat.set)
        done, _ = concurrent.futures.wait([asked], BEAT_S)
        if done and not asked.cancelled():
            return asked.exception()
        if done or not beat.wait(SILENT_S):
            break
    if not manager.gracefully_exit:
        mark.stay()
    return "given up: the loop that answers over HTTP has ended or stands still, as where the server ends"


async def _answer_all(manager, found, took: dict[str, float], refused: set[str], until: float, mark) -> None:
    """until: on time.monotonic(); what is not answered then is given up, and so are the rounds behind it."""
    make = importlib.import_module(REQUESTS).GenerateReqInput
    for name, bodies in found:
        if manager.gracefully_exit:
            return
        mark.note(name)
        began = time.monotonic()
        requests = [make(**one) for one in bodies]
        answers = {asyncio.ensure_future(_answer(manager, request)): request for request in requests}
        try:
            done, left = await asyncio.wait(answers, timeout=max(until - began, 0))
            if left:
                for answer in left:  # by name: then the scheduler forgets it, and says so
                    manager.abort_request(answers[answer].rid)
                _, silent = await asyncio.wait(left, timeout=SILENT_S)
                if silent:  # the scheduler stands still: SGLang's watchdog may end it when we are long gone
                    mark.stay()
                raise TimeoutError(f"given up after {LIMIT_S:.0f} s, within {name}")
        finally:
            for answer in answers:
                answer.cancel()
        took[name] = time.monotonic() - began
        errors = [error for error in (answer.result() for answer in done) if error is not None]
        for error in {str(error) or type(error).__name__ for error in errors}:
            refused.add(name)
            report.warn(f"deepseek_v4_sm120: {PATCH}: {name}: not answered: {error}")


async def _answer(manager, request) -> Exception | None:
    """Why it was refused, or nothing."""
    try:
        async for _ in manager.generate_request(request, None):
            pass
    except Exception as error:
        return error
