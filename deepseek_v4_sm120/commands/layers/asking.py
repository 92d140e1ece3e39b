"""What a server is asked while it records, and how it is told to. Standard library only.

The prompts are random tokens, so that no prefix cache has any of them: of five tokens, of more than two groups of 128,
of more tokens than the index may choose entries for, and two in one batch.
"""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deepseek_v4_sm120.commands.console import CommandError, one_line
from deepseek_v4_sm120.commands.doctor import http_get
from deepseek_v4_sm120.patching import json_file
from deepseek_v4_sm120.sglang_patches.rows.layers import ASKED, FACTS

SENT = "sent.json"
ALONE, TOGETHER = (5, 270, 2600), (9, 140)
NEW = 4  # tokens of each answer
FIRST, LAST = 1000, 100_000  # what the tokens are taken from: no special ones
FLUSH = [1, 2, 3]  # the tokens of a last request, behind which nothing of the others is left unwritten
ROW_BYTES = 2  # of a number
LIMIT_S = 300.0
LOOK_S = 0.2


@dataclass(frozen=True)
class Asked:
    """A record that is to be made."""

    name: str
    folder: Path
    rows: int
    bytes: int

    @property
    def place(self) -> Path:
        return self.folder / self.name


def prompts_of(alone: list[int], together: list[int], vocabulary: int) -> list[list[list[int]]]:
    """Requests, those of a list at once."""
    drawn = random.SystemRandom()
    last = min(LAST, vocabulary)

    def one(length: int) -> list[int]:
        return [drawn.randrange(min(FIRST, last // 2), last) for _ in range(length)]

    return [[one(length)] for length in alone] + ([[one(length) for length in together]] if together else [])


def bytes_of(rows: int, config: dict) -> int:
    """What a record of so many rows takes on the disk, drafts in it, too."""
    inputs = 2 * config["num_hidden_layers"] + 1
    streams, stages = config.get("hc_mult", 4), len(config.get("dspark_target_layer_ids") or ())
    drafts = max(3, 3 * stages) + streams  # of DSPARK: what it is given, and two inputs a stage
    return rows * (inputs + drafts) * config["hidden_size"] * ROW_BYTES


@contextlib.contextmanager
def asked(folder: Path, rows: int, most_bytes: int) -> Iterator[Asked]:
    """A server that looks into the folder records, until this ends."""
    one = Asked(f"{int(time.time())}x{secrets.token_hex(4)}", folder, rows, most_bytes)
    path = folder / ASKED
    try:
        if path.exists():
            raise CommandError(f"{path} is there: another `layers` records; if none runs, delete it")
        folder.mkdir(parents=True, exist_ok=True)
        json_file.put(path, json.dumps({"id": one.name, "rows": rows, "bytes": most_bytes}))
    except OSError as error:
        raise CommandError(f"{folder} cannot be written to: {error.strerror}") from error
    try:
        yield one
    finally:
        path.unlink(missing_ok=True)


def send(url: str, api_key: str | None, groups: list[list[list[int]]], new: int, tell: Callable) -> list[dict]:
    """The requests with their answers."""
    found = []
    for together in groups:
        tell(f"asks for {new} tokens behind {' and '.join(str(len(prompt)) for prompt in together)}")
        for prompt, answer in zip(together, _answers(url, api_key, together, new), strict=True):
            found.append({"input_ids": prompt, "output_ids": answer})
    _answers(url, api_key, [FLUSH], 1)
    return found


def _answers(url: str, api_key: str | None, prompts: list[list[int]], new: int) -> list[list[int]]:
    answers, text = http_get.generate(url, api_key, prompts, new, LIMIT_S)
    tokens = [one.get("output_ids") if isinstance(one, dict) else None for one in answers]
    if len(tokens) != len(prompts) or not all(isinstance(one, list) and one for one in tokens):
        raise CommandError(f"{url}/generate does not answer as SGLang does: {one_line(text, 120)!r}")
    return [one[-new:] for one in tokens]


def keep(one: Asked, requests: list[dict], model: str | None) -> None:
    """Beside what the server recorded, if it did."""
    if not (one.place / FACTS).is_file():
        raise CommandError(
            f"the server recorded nothing in {one.place}: start it with DSV4_SM120_LAYERS={one.folder}, a folder that "
            "it and this command see under one path"
        )
    json_file.put(one.place / SENT, json.dumps({"id": one.name, "model": model, "requests": requests}))
