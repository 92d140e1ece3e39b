#!/usr/bin/env python3
"""From a server's start to its first token, and what compiles behind it: stock and ours, 6 layers.

usage: start_stage.py [--harness DIR] [--patch build] [--out $OUT] [--cards 1] [--one-card | --only-starts] ..

--cards 1   three waves of two servers, stock on one card and ours on the other. The first makes both waves after it
            warm: SGLang's kernels are in their folders then; in the third they change cards
--one-card  the first two of these waves, both servers on one card
--cards 2   TP2, one server after the other: stock, ours, stock
--only-starts  one server after the other: stock, and behind it, where SGLang's kernels are in their folders, ours,
            stock, stock, ours. They are asked for nothing but a first token. For what a start differs by from the next

Of each: seconds from the process's start to the first token, and what its log says of the parts. Then it is asked for
shapes of every kind three times: the first time beyond the others is a pause, and what Triton compiled meanwhile is
listed. OUT/stage_start.json is what collect.py reads; OUT/start_logs.txt has the servers' logs, long ones without
their middle.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(REPO)]

from bench.serving.answers import Answer  # noqa: E402
from bench.serving.endpoint import Endpoint  # noqa: E402
from bench.serving.server_errors import ServerError  # noqa: E402
from bench.serving.server_process import ServerDied  # noqa: E402
from tests.e2e import served  # noqa: E402
from tests.e2e.callers_cards import of_callers  # noqa: E402
from tests.e2e.made_tokenizer import write_tokenizer  # noqa: E402
from tests.e2e.serving_stage import load_harness  # noqa: E402
from tests.e2e.stages import EVERY_CALL, FEW_EXPERTS, PAGED_EXTEND, PAGED_INDEX, sets, sums  # noqa: E402
from tests.e2e.start_rows import FIRST, FIRST_OURS, OURS, STOCK  # noqa: E402

STAGE = "start"
# waves of (server, the cards that it sees); a wave's servers start side by side
WAVES = {
    1: (((FIRST, "0"), (FIRST_OURS, "1")), ((STOCK, "0"), (OURS, "1")), ((OURS, "0"), (STOCK, "1"))),
    2: (((FIRST, "0,1"),), ((OURS, "0,1"),), ((STOCK, "0,1"),)),
}
ALTERNATING = (FIRST, OURS, STOCK, STOCK, OURS)  # of --only-starts
ON_ONE_CARD = tuple(tuple((kind, "0") for kind, _ in wave) for wave in WAVES[1][:2])  # of --one-card
MODEL = {"json_model_override_args": json.dumps(FEW_EXPERTS), "swa_full_tokens_ratio": 0.5}
OPTIONS = ["--variant", "flash6h", "--radix", "--mem", "0.9", "--context", "24000", "--max-total-tokens", "200000"]
OPTIONS += ["--graph-bs", "1", "2", "4", "8", "16", "32", *sets(**MODEL)]
NEW, TIMES = 6, 3
# name -> prompts of one request (their lengths), and what is asked beside it
SHAPES = {
    **{f"prompt of {n} tokens": ([n], {}) for n in (5, 130, 300, 700, 2100, 8200, 20000)},
    "batch of 2 short prompts": ([9, 11], {}),
    "batch of 2 prompts of 1,000": ([1000, 1001], {}),
    "batch of 3": ([64, 65, 66], {}),
    "batch of 8": (list(range(300, 308)), {}),
    "batch of 32": (list(range(64, 96)), {}),
    "batch of 48, above the graphs": (list(range(20, 68)), {}),
    "sampled": ([40], {"temperature": 0.8, "top_p": 0.9}),
    "penalties": ([40], {"frequency_penalty": 0.5, "presence_penalty": 0.5}),
    "n = 3": ([40], {"n": 3, "temperature": 0.8}),
    "log-probabilities": ([200], {"return_logprob": True, "top_logprobs_num": 5}),
}
OF_THE_BODY = ("return_logprob", "top_logprobs_num")
# the last under both its names: until 0.5.20, and from 0.5.21 on
PARTS = re.compile(
    r"(Load weight end|Capture [\w ]*?graph end|Init (?:torch distributed|parallel) ends)\b[^\n]*?elapsed=([\d.]+)"
)
# folders that compilers keep what they made in, by their variables and where those are not set
FOLDERS = {
    "TRITON_CACHE_DIR": ".triton/cache",
    "TVM_FFI_CACHE_DIR": ".cache/tvm-ffi",
    "TILELANG_CACHE_DIR": ".tilelang",
}
FOLDERS |= {"SGLANG_DG_CACHE_DIR": ".cache/deep_gemm", "SGLANG_JIT_CACHE_DIR": ".cache/sglang"}
FOLDERS |= {"FLASHINFER_WORKSPACE_BASE": ".cache/flashinfer", "TORCHINDUCTOR_CACHE_DIR": ".cache/inductor"}


def say(text: str) -> None:
    print(f"start_stage: {text}", flush=True)


def folder_of(variable: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / FOLDERS[variable])


def files() -> set[Path]:
    """What compilers have written."""
    folders = {folder_of(variable) for variable in FOLDERS}
    return {path for folder in folders if folder.exists() for path in folder.rglob("*") if path.is_file()}


def parts(log: str) -> dict[str, float]:
    """Seconds that SGLang's log tells of, of the slower rank; a part that comes again (a draft's) adds up."""
    found: dict[str, dict[str, float]] = {}
    for line in log.splitlines():
        for what, seconds in PARTS.findall(line):
            rank = (re.findall(r"\bTP(\d+)\b", line) or ["0"])[0]
            ranks = found.setdefault(what.removesuffix(" end").removesuffix(" ends"), {})
            ranks[rank] = ranks.get(rank, 0.0) + float(seconds)
    return {what: round(max(ranks.values()), 2) for what, ranks in found.items()}


class Start:
    """A server from its start to its end."""

    def __init__(self, kind: str, cards: str, number: int, stage: Stage):
        arguments, self.kind, self.stage = stage.arguments, kind, stage
        self.name, self.is_ours = f"{number}_{kind}", kind in (OURS, FIRST_OURS)
        where = ["--models", str(arguments.models)] + (["--patch", str(arguments.patch)] if self.is_ours else [])
        environment = EVERY_CALL if self.is_ours else PAGED_EXTEND | PAGED_INDEX
        environment = environment | {"CUDA_VISIBLE_DEVICES": of_callers(cards)}
        options = stage.harness.parse(["run", *OPTIONS, *(sums(2) if "," in cards else []), *where])
        self.watch = arguments.work / f"{self.name}_watch"
        port = arguments.port + 1500 * number
        self.process = served.server(
            self.name, stage.harness, options, port, arguments.work, environment, watch=self.watch
        )
        self.endpoint = Endpoint(self.process.url, timeout_s=120.0, total_s=120.0)
        self.found = {"kind": kind, "cards": cards, "problem": None}

    def run(self) -> None:
        begin = time.monotonic()
        try:
            self.process.start()
            self.found["ready_s"] = self.process.wait_ready(min(self.stage.arguments.start_s, self.stage.left_s()))
            self.ask([5], 1, 0)
            self.found["first_token_s"] = time.monotonic() - begin
            say(f"{self.name}: first token after {self.found['first_token_s']:.1f} s")
            shapes = {} if self.stage.arguments.only_starts else SHAPES
            self.found["served"] = {shape: self.times(*asked) for shape, asked in shapes.items()}
            time.sleep(self.stage.arguments.rest_s)  # the plugin writes once a second
            self.found["compiles"] = served.compiles(self.watch, begin, time.monotonic())
            self.found["parts"] = parts(self.process.log.read_text(errors="replace"))
        except (ServerDied, ServerError, OSError) as error:
            self.found["problem"] = f"{type(error).__name__}: {str(error)[:400]}"
            say(f"{self.name}: {self.found['problem']}")

    def times(self, lengths: list[int], asked: dict) -> list[float]:
        """Seconds of each of TIMES requests of one shape, none of whose prompts is known."""
        took = []
        for turn in range(1, TIMES + 1):
            begin = time.monotonic()
            self.ask(lengths, NEW, turn, **asked)
            took.append(round(time.monotonic() - begin, 4))
        return took

    def ask(self, lengths: list[int], new: int, turn: int, **asked) -> list[Answer]:
        prompts = [self.stage.harness.ids(n, self.stage.vocabulary, 100 * turn + i) for i, n in enumerate(lengths)]
        body = {"sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}, "input_ids": prompts}
        for name, value in asked.items():
            (body if name in OF_THE_BODY else body["sampling_params"])[name] = value
        answers = self.endpoint.several(body)
        expected = len(lengths) * asked.get("n", 1)
        if [len(answer.ids) for answer in answers] != [new] * expected:
            raise ServerError(f"{expected} answers of {new} tokens expected, got {[len(a.ids) for a in answers]}")
        return answers


def waves(arguments: argparse.Namespace) -> tuple:
    if arguments.only_starts:
        return tuple(((kind, "0,1" if arguments.cards == 2 else "0"),) for kind in ALTERNATING)
    return ON_ONE_CARD if arguments.one_card else WAVES[arguments.cards]


class Stage:
    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.deadline = time.monotonic() + arguments.limit_s
        self.harness = load_harness(arguments.harness)
        _, model = self.harness.engine_args(self.harness.parse(["run", *OPTIONS, "--models", str(arguments.models)]))
        self.vocabulary = self.harness.vocab_of(model)
        write_tokenizer(Path(model), self.vocabulary)
        self.starts, self.files = [], 0

    def left_s(self) -> float:
        return max(1.0, self.deadline - time.monotonic())

    def run(self) -> None:
        number = 0
        for wave in waves(self.arguments):
            starts = [Start(kind, cards, number + i, self) for i, (kind, cards) in enumerate(wave)]
            number += len(wave)
            before = files()
            try:
                with concurrent.futures.ThreadPoolExecutor(len(wave)) as pool:
                    list(pool.map(Start.run, starts))
            finally:
                with concurrent.futures.ThreadPoolExecutor(len(wave)) as pool:
                    list(pool.map(lambda start: start.process.stop(), starts))
            self.starts += [start.found for start in starts]
            if any(kind == OURS for kind, _ in wave):  # of the last one that has a warm server of ours
                self.files = len(files() - before)

    @property
    def command(self) -> str:
        said = {" --one-card": self.arguments.one_card, " --only-starts": self.arguments.only_starts}
        return f"--cards {self.arguments.cards}" + "".join(word for word, is_set in said.items() if is_set)

    def found(self) -> dict:
        arguments = self.arguments
        found = {"cards": arguments.cards, "starts": self.starts, "files": self.files}
        return found | {"only_starts": arguments.only_starts}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = served.parser(STAGE, __doc__.splitlines()[0], port=15000)
    parser.add_argument("--cards", type=int, choices=tuple(WAVES), default=1, help="of a server; the stage needs two")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--one-card", action="store_true", help="all servers share the first card")
    only.add_argument("--only-starts", action="store_true", help="two starts of each where all is warm, in turn")
    parser.add_argument("--rest-s", type=float, default=1.5)
    arguments = parser.parse_args(argv)
    if arguments.one_card and arguments.cards > 1:
        parser.error("--one-card: servers of --cards 2 need two")
    return arguments


def clear(work: Path) -> None:
    shutil.rmtree(work, ignore_errors=True)


def main() -> int:
    return served.run(STAGE, parse(sys.argv[1:]), clear, Stage)


if __name__ == "__main__":
    sys.exit(main())
