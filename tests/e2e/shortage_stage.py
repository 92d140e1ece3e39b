#!/usr/bin/env python3
"""What a server does where a disk or its card's memory has run out: stock SGLang's processes, 6 layers, one card.

usage: shortage_stage.py [--harness DIR] [--patch build] [--out $OUT] [--limit-s 190] [--one-card]

full_reports     DSV4_SM120_REPORT on a full disk: the server starts, says so once, and answers with the same bits
full_cache       Triton's folder of compiled kernels on a full disk: it starts, or ends with a message that says so
second_engine    a second server on the card of one that is there: both answer with the same bits
oom_at_start     somebody else's process holds the card but for --leave-start-mib: the server ends with a message that
                 says so, and leaves nothing; a start without that process works
oom_under_load   the rest of the card is taken while it serves, then long prompts come: each is answered rightly or
                 refused, none hangs; once the memory is back it answers with the same bits, if need be after a restart

--one-card: what the first card's servers are asked, and once they have ended, what the second's are.

A full disk is a tmpfs of 64 KiB, filled; where it cannot be mounted, /dev/full stands for the reports' folder, and a
folder below /dev/null for Triton's. OUT/stage_shortage.json is what collect.py reads, beside it the logs' ends.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(REPO)]

from bench.serving.endpoint import Endpoint  # noqa: E402
from bench.serving.server_errors import ServerError, ServerTimeout  # noqa: E402
from bench.serving.server_process import ServerDied  # noqa: E402
from tests.e2e import served  # noqa: E402
from tests.e2e.callers_cards import of_callers  # noqa: E402
from tests.e2e.faults_stage import MARK, processes_of  # noqa: E402
from tests.e2e.made_tokenizer import write_tokenizer  # noqa: E402
from tests.e2e.serving_stage import load_harness  # noqa: E402
from tests.e2e.stages import EVERY_CALL, FEW_EXPERTS, REPRODUCIBLE, sets  # noqa: E402

STAGE = "shortage"
MODEL = {"json_model_override_args": json.dumps(FEW_EXPERTS), "swa_full_tokens_ratio": 0.5}
OPTIONS = ["--variant", "flash6h", "--radix", "--mem", "0.9", "--context", "24000", "--max-total-tokens", "200000"]
OPTIONS += ["--graph-bs", "1", "8", *sets(**MODEL)]
PROMPTS, NEW = (5, 130, 700, 1500), 16
LONG, LONG_AT_ONCE = 16_000, 4
GIVEN_UP_S = 45.0
DISK_BYTES = 64 << 10
NO_SPACE = re.compile(r"No space left on device|Not a directory|Permission denied|Read-only file system")
NO_REPORTS = re.compile(r"no reports in DSV4_SM120_REPORT=\S+: ")
NO_MEMORY = re.compile(r"out of memory|OutOfMemory|Not enough memory", re.IGNORECASE)
CASES = ("full_reports", "full_cache", "second_engine", "oom_at_start", "oom_under_load")


def say(text: str) -> None:
    print(f"shortage_stage: {text}", flush=True)


@contextlib.contextmanager
def full_disk(folder: Path, stands_for_it: str):
    """(a folder on a disk without a free byte, what it is)."""
    folder.mkdir(parents=True, exist_ok=True)
    line = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(line, capture_output=True, text=True).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        yield Path(stands_for_it), f"{stands_for_it}: a tmpfs could not be mounted"
        return
    try:
        with contextlib.suppress(OSError), open(folder / "filled", "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        yield folder, f"a tmpfs of {DISK_BYTES >> 10} KiB, filled"
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


@contextlib.contextmanager
def eaten(command: list[str], card: str, leave_mib: int):
    """While it is entered, somebody else's process holds the card's memory but for `leave_mib`."""
    line = [*command, str(leave_mib)]
    eater = subprocess.Popen(
        line,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": of_callers(card)},
    )
    try:
        said = eater.stdout.readline()
        if not said.startswith("ate"):
            raise RuntimeError(f"the process that takes the card's memory said {said!r}")
        yield
    finally:
        eater.stdin.close()
        eater.wait()


class Server:
    def __init__(self, name: str, card: str, stage: Stage, **environment: str):
        self.name, self.stage, self.mark = name, stage, uuid.uuid4().hex
        number = len(stage.servers)
        stage.servers.append(self)
        where = ["--models", str(stage.arguments.models), "--patch", str(stage.arguments.patch)]
        options = stage.harness.parse(["run", *OPTIONS, *where])
        seen = {MARK: self.mark, "CUDA_VISIBLE_DEVICES": of_callers(card)}
        of = EVERY_CALL | REPRODUCIBLE | seen | environment
        work, port = stage.arguments.work, stage.arguments.port + 1500 * number
        self.process = served.server(name, stage.harness, options, port, work, of, watch=work / f"{name}_watch")
        ask_s = stage.arguments.ask_s
        self.endpoint = Endpoint(self.process.url, timeout_s=ask_s, total_s=ask_s)

    def come_up(self) -> float:
        self.process.start()
        return self.wait()

    def wait(self) -> float:
        seconds = self.process.wait_ready(min(self.stage.arguments.start_s, self.stage.left_s()))
        say(f"{self.name}: ready after {seconds:.1f} s")
        return seconds

    def ask(self, length: int) -> list:
        prompt = self.stage.harness.ids(length, self.stage.vocabulary, 1)
        answer = self.endpoint.generate(prompt, NEW, top=1, ignore_eos=True)
        return [answer.ids, answer.logprobs]

    def answers(self) -> list:
        return [self.ask(length) for length in PROMPTS]

    def log(self) -> str:
        if self.process.process.poll() is not None:
            self.process.writer.join(5.0)
        return self.process.log.read_text(errors="replace") if self.process.log.exists() else ""

    def living(self) -> list[str]:
        return list(processes_of(self.process.process.pid, self.mark).values())

    def end(self, words: re.Pattern) -> dict:
        """How it ended: seconds until none of its processes lives (None: some do, for longer than anybody would wait),
        what is left, and whether the log says `words`."""
        start, seconds = time.monotonic(), None
        while seconds is None and time.monotonic() < start + self.stage.arguments.given_up_s:
            self.process.process.poll()
            seconds = None if self.living() else round(time.monotonic() - start, 2)
            time.sleep(0.1)
        is_said = bool(words.search(self.log()))
        return {"seconds_to_the_end": seconds, "processes_left": self.living(), "is_said": is_said}


class Stage:
    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.deadline = time.monotonic() + arguments.limit_s
        self.harness = load_harness(arguments.harness)
        _, model = self.harness.engine_args(self.harness.parse(["run", *OPTIONS, "--models", str(arguments.models)]))
        self.vocabulary = self.harness.vocab_of(model)
        write_tokenizer(Path(model), self.vocabulary)
        self.servers: list[Server] = []
        self.told: dict[str, dict] = {}
        self.right: list | None = None  # the answers of a server that lacks nothing, once `is_right` is done
        self.is_right: concurrent.futures.Future = concurrent.futures.Future()

    def left_s(self) -> float:
        return max(1.0, self.deadline - time.monotonic())

    def compared(self, *answers: list) -> dict:
        if self.right is None:
            raise RuntimeError("there are no answers to compare with")
        pairs = [pair for one in answers for pair in zip(one, self.right, strict=True)]
        return {"answers": len(pairs), "differ": sum(a != b for a, b in pairs)}

    def outcome(self, server: Server, words: re.Pattern) -> dict:
        """Of a server that was started: whether it comes up, and if not, how it ends."""
        try:
            server.wait()
        except ServerDied as error:
            say(str(error)[:600])
            return {"started": False, **server.end(words)}
        return {"started": True}

    def on_first_card(self) -> None:
        """Three beside one another; the plain one is what all answers are held against."""
        work = self.arguments.work
        with (
            full_disk(work / "reports", "/dev/full") as (reports, what),
            full_disk(work / "kernels", "/dev/null/kernels") as (kernels, other),
            concurrent.futures.ThreadPoolExecutor(2) as pool,
        ):
            plain = Server("plain", "0", self)
            second = Server("second", "0", self, DSV4_SM120_REPORT=str(reports))
            third = Server("third", "0", self, TRITON_CACHE_DIR=str(kernels))
            third.process.start()
            list(pool.map(Server.come_up, (plain, second)))
            self.right = plain.answers()
            self.is_right.set_result(None)
            both = list(pool.map(Server.answers, (plain, second)))
            self.told["second_engine"] = self.compared(*both)
            told = len(NO_REPORTS.findall(second.log()))
            self.told["full_reports"] = {"disk": what, "is_said": told > 0, "told": told}
            self.told["full_reports"] |= self.compared(second.answers())
            seen = self.outcome(third, NO_SPACE)
            self.told["full_cache"] = {"disk": other, **seen}
            if seen["started"]:
                self.told["full_cache"] |= self.compared(third.answers())

    def on_second_card(self) -> None:
        arguments = self.arguments
        card = "0" if arguments.one_card else "1"
        starved = Server("starved", card, self)
        with eaten(arguments.eater, card, arguments.leave_start_mib):
            starved.process.start()
            at_start = self.outcome(starved, NO_MEMORY)
        if at_start["started"]:
            at_start["problem"] = "it started: --leave-start-mib is too much"
        starved.process.stop()
        fed = Server("fed", card, self)
        at_start["restart_s"] = fed.come_up()
        self.is_right.result(self.left_s())  # what the other card's server answers
        self.told["oom_at_start"] = at_start | self.compared(fed.answers())
        with eaten(arguments.eater, card, arguments.leave_load_mib):
            under, said = self.under_load(fed)
        if under["ended"]:
            under |= fed.end(NO_MEMORY)
            fed.process.stop()
            fed = Server("fed_again", card, self)
            under["restart_s"] = fed.come_up()
        under["other_long"] = sum(fed.ask(length) != answer for length, answer in said.items())
        self.told["oom_under_load"] = under | self.compared(fed.answers())

    def under_load(self, server: Server) -> tuple[dict, dict]:
        """Long prompts at once, most of them new: how each ended, and {length: answer}."""
        said = {}
        with concurrent.futures.ThreadPoolExecutor(LONG_AT_ONCE) as pool:
            jobs = {LONG + i: pool.submit(server.ask, LONG + i) for i in range(LONG_AT_ONCE)}
            ends = {"answered": 0, "refused": 0, "hung": 0}
            for length, job in jobs.items():
                try:
                    said[length] = job.result()
                    ends["answered"] += 1
                except ServerTimeout:
                    ends["hung"] += 1
                except ServerError:
                    ends["refused"] += 1
        time.sleep(self.arguments.rest_s)  # a server that ends does so within
        has_ended = not server.endpoint.is_ready()
        is_short = has_ended or ends["answered"] < LONG_AT_ONCE
        return {**ends, "ended": has_ended, "no_shortage": int(not is_short)}, said

    def run(self) -> None:
        parts = [lambda: self.guarded(self.on_first_card), lambda: self.guarded(self.on_second_card)]
        if self.arguments.one_card:
            first, second = parts
            parts = [lambda: (first(), self.stop(), second())]
        try:
            with concurrent.futures.ThreadPoolExecutor(len(parts)) as pool:
                for done in [pool.submit(part) for part in parts]:
                    done.result()
        finally:
            self.stop()

    def stop(self) -> None:
        with concurrent.futures.ThreadPoolExecutor(len(self.servers)) as pool:
            list(pool.map(lambda server: server.process.stop(), self.servers))

    def guarded(self, part) -> None:
        """A part that breaks is one that failed: its cases that are not done say so."""
        try:
            part()
        except (ServerDied, ServerError, RuntimeError, OSError, TimeoutError) as error:
            say(f"{part.__name__}: {error}")
            self.told[part.__name__] = {"problem": f"{type(error).__name__}: {str(error)[:400]}"}
            if not self.is_right.done():
                self.is_right.set_result(None)

    @property
    def command(self) -> str:
        return "--one-card" if self.arguments.one_card else ""

    def found(self) -> dict:
        cases = {case: self.told.pop(case, {"problem": "it was not reached"}) for case in CASES}
        left = [line for server in self.servers if server.process.process for line in server.living()]
        return {"cases": cases, "broke": self.told, "processes": left}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = served.parser(STAGE, __doc__.splitlines()[0], port=15000)
    parser.add_argument("--ask-s", type=float, default=60.0, help="that an answer may take")
    parser.add_argument("--rest-s", type=float, default=5.0, help="from the last answer of a server that may end")
    parser.add_argument("--given-up-s", type=float, default=GIVEN_UP_S)
    parser.add_argument("--one-card", action="store_true", help="all servers share the first card")
    parser.add_argument("--leave-start-mib", type=int, default=3000, help="of the card, less than the weights")
    parser.add_argument("--leave-load-mib", type=int, default=200)
    eater = [sys.executable, str(Path(__file__).with_name("eater.py"))]
    parser.add_argument("--eater", nargs="+", default=eater, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def clear(work: Path) -> None:
    for old in work.glob("*.log"):
        old.unlink()


def main() -> int:
    return served.run(STAGE, parse(sys.argv[1:]), clear, Stage)


if __name__ == "__main__":
    sys.exit(main())
