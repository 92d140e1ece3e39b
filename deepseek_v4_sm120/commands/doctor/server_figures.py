"""How fast a running server is, by a few requests of random tokens, which no prefix cache has: first tokens of prompts,
steps behind them, steps of several streams. Standard library only."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.doctor import http_get
from deepseek_v4_sm120.commands.doctor.server import Answers

LENGTHS = (1024, 8192, 32_000)
STREAMS, SHORT = (1, 8), 64  # at once, of prompts of so many tokens
NEW = 64
TIMES = 2
FIRST, LAST = 1000, 100_000  # what the tokens are taken from: no special ones
LIMIT_S = 120.0  # of one request: 32,000 tokens took 2.3 s on two H200


@dataclass(frozen=True)
class Timed:
    """seconds until all were answered; steps: verifications of the one that had the most, None without speculation."""

    seconds: float
    steps: int | None


def figures(base: str, api_key: str | None, answers: Answers) -> Iterator[str]:
    """A line for each; CommandError where the server does not answer any more, or not so."""
    running = {name: (answers.metrics or {}).get(name) for name in ("num_running_reqs", "num_queue_reqs")}
    yield f"before: {', '.join(f'{name} {value}' for name, value in running.items())} (None: no metrics)"
    told = (answers.get("context_length"), answers.get("max_total_num_tokens"))
    most = min((one for one in told if one), default=LENGTHS[0] + NEW)
    for length in LENGTHS:
        if length + NEW >= most:
            yield f"a prompt of {length} tokens: not asked, the server has {most}"
            continue
        prompt, seconds = [], []
        for _ in range(TIMES):
            prompt = _prompt(length)
            seconds.append(_asked(base, api_key, [prompt], 1).seconds)
        yield (
            f"a prompt of {length} tokens: first token after {_ms(seconds)} ms, {length / min(seconds):.0f} tokens/s; "
            f"behind it {_steps(base, api_key, [prompt])}"
        )
    for count in STREAMS:
        if count > (answers.most_running or count):
            yield f"{count} streams: not asked, the server runs {answers.most_running}"
            continue
        prompts = [_prompt(SHORT) for _ in range(count)]
        yield f"{count} stream(s): {_steps(base, api_key, prompts)}"


def _steps(base: str, api_key: str | None, prompts: list[list[int]]) -> str:
    """What NEW tokens more take behind prompts that are cached by then; in words."""
    _asked(base, api_key, prompts, NEW)
    ones = [_asked(base, api_key, prompts, 1).seconds for _ in range(TIMES)]
    several = [_asked(base, api_key, prompts, 1 + NEW) for _ in range(TIMES)]
    best = min(several, key=lambda one: one.seconds)
    text = f"1 and {1 + NEW} tokens after {_ms(ones)} and {_ms([one.seconds for one in several])} ms"
    left = (best.seconds - min(ones)) * 1e3
    if left <= 0:
        return text
    text += f": {left / NEW:.2f} ms a token of each, {len(prompts) * NEW / left * 1e3:.0f} tokens/s of all"
    return text + (f", {left / best.steps:.2f} ms for each of {best.steps} verifications" if best.steps else "")


def _ms(seconds: list[float]) -> str:
    return " / ".join(f"{one * 1e3:.1f}" for one in seconds)


def _prompt(length: int) -> list[int]:
    drawn = random.SystemRandom()
    return [drawn.randrange(FIRST, LAST) for _ in range(length)]


def _asked(base: str, api_key: str | None, prompts: list[list[int]], new: int) -> Timed:
    start = time.perf_counter()
    found, _ = http_get.generate(base, api_key, prompts, new, LIMIT_S)
    seconds = time.perf_counter() - start
    said = [one.get("meta_info") for one in found if isinstance(one, dict)]
    if len(said) != len(prompts) or not all(
        isinstance(one, dict) and one.get("completion_tokens") == new for one in said
    ):
        raise CommandError(f"{base}/generate does not answer with {new} tokens behind each of {len(prompts)} prompts")
    steps = [one.get("spec_verify_ct") for one in said]
    return Timed(seconds, max(steps) if all(type(one) is int for one in steps) else None)
