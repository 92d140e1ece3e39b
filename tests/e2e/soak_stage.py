#!/usr/bin/env python3
"""A soak of the real engine: servers side by side, each under 64 streams of every kind of request (soak_load.py), and
once a second what they hold; what it comes to is in soak_rows.py.

usage: soak_stage.py [--harness DIR] [--patch build] [--out $OUT] [--only SERVER ..] [--seconds 90] [--limit-s 190]
                     [--one-card]

plain          6 layers, 64 experts, one card, as shipped: markers are asked alone, before and after the load
reproducible   the same with reproducible=on: markers are asked under the load as well, and repeat to the bit
eagle314       reproducible=on, EAGLE 3/1/4, the next card: markers repeat to the token; eagle: as shipped
tp2            reproducible=on, over both cards with our sums
graphs         reproducible=on, prompts to 2,048 tokens in graphs
dspark3        reproducible=on, DSPARK with a block of 3
stock          SGLang alone: what it leaves and gathers by itself

Each starts, is warmed up by the same load for --warm-s, comes to rest, is looked at, runs for --seconds, comes to rest
and is looked at again. Prompts to --longest tokens; what a server cannot be asked (a grammar without xgrammar) is
named.
OUT/stage_soak.json is what collect.py reads; it adds up those of several calls: `collect.py CALL1/stage_soak.json ..`.
OUT/soak_logs.txt has the servers' logs, long ones without their middle.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import hashlib
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(REPO)]

from bench.serving.server_errors import ServerError  # noqa: E402
from bench.serving.server_process import ServerDied  # noqa: E402
from tests.e2e import served, soak_load  # noqa: E402
from tests.e2e.callers_cards import of_callers, stages_number  # noqa: E402
from tests.e2e.faults_stage import MARK, processes_of  # noqa: E402
from tests.e2e.made_tokenizer import write_tokenizer  # noqa: E402
from tests.e2e.prompts_stage import SETTING, prefills  # noqa: E402
from tests.e2e.serving_stage import load_harness  # noqa: E402
from tests.e2e.soak_rows import ALLOCATED, HOST, RESERVED, added  # noqa: E402
from tests.e2e.stages import (  # noqa: E402
    EVERY_CALL,
    FEW_EXPERTS,
    PAGED_EXTEND,
    PAGED_INDEX,
    REPRODUCIBLE,
    dspark,
    eagle,
    sets,
    sums,
)

STAGE = "soak"
RESERVE_S = 30.0  # of the limit: the last requests, the second look, the servers' end
LOOK_S = 5.0  # from one search for a server's processes to the next
STALE_S = 5.0  # what the plugin wrote before says nothing
# torch's, 32 for each scheduler, 12 GB that end once they had nothing to do for a while: a leak could hide beside it
COMPILER = "compile_worker"
ROLE = re.compile(r"sglang::([a-z_]+)")
MODEL = {"json_model_override_args": json.dumps(FEW_EXPERTS), "swa_full_tokens_ratio": 0.5}
GRAPHS_OF_PROMPTS = {name: f"{value},{SETTING}" for name, value in REPRODUCIBLE.items()}
GRAPHS = ("1", "2", "4", "8", "16", "32", "64")
MOST_FAULT_TEXTS = 30
EVERY = {"host memory, MiB": "mib", "file handles": "handles", "threads": "threads", "processes": "processes"}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A server. cards: those that it sees; same: what of a marker's answer repeats; under_load: of those, too."""

    cards: str
    options: tuple = ()
    environment: dict = dataclasses.field(default_factory=dict)
    patched: bool = True
    same: str = "bits"
    under_load: bool = True

    def sees(self, one_card: bool) -> str:
        """As CUDA_VISIBLE_DEVICES names them."""
        return of_callers("0" if one_card else self.cards)


SERVERS = {
    "plain": Kind("0", under_load=False),
    "eagle314": Kind("1", tuple(eagle(3)), REPRODUCIBLE, same="text"),
    "tp2": Kind("0,1", tuple(sums(2)), REPRODUCIBLE),
    "reproducible": Kind("0", environment=REPRODUCIBLE),
    "eagle": Kind("1", tuple(eagle(3)), same="text", under_load=False),
    "graphs": Kind("0", environment=GRAPHS_OF_PROMPTS),
    "dspark3": Kind("1", tuple(dspark(**FEW_EXPERTS)), REPRODUCIBLE, same="text"),
    "stock": Kind("0", patched=False, under_load=False),
}
ESSENTIAL = ("plain", "eagle314", "tp2")


def say(text: str) -> None:
    print(f"soak_stage: {text}", flush=True)


# ---- what is held


def of_process(pid: int) -> dict | None:
    """Of a process: resident MiB, threads, file handles; None once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        handles = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    told = dict(entry.split(":", 1) for entry in status.splitlines() if ":" in entry)
    if "VmRSS" not in told:  # a zombie
        return None
    return {"mib": int(told["VmRSS"].split()[0]) / 1024, "threads": int(told["Threads"]), "handles": handles}


def of_processes(pids) -> dict:
    found = [one for pid in pids if (one := of_process(pid)) is not None]
    return {name: sum(one[name] for one in found) for name in ("mib", "threads", "handles")} | {"processes": len(found)}


def role_of(command: str) -> str:
    """Which of a server's processes it is, by what SGLang calls it; a scheduler's rank is left out."""
    role = ROLE.search(command)
    return role[1].rstrip("_") if role else "front"


def blocks(points: list, begin: float, end: float, block_s: float) -> list:
    """[[seconds from `begin`, mean]] of whole blocks of time."""
    found = []
    for i in range(int((end - begin) / block_s)):
        inside = [v for t, v in points if begin + i * block_s <= t < begin + (i + 1) * block_s]
        found += [[(i + 0.5) * block_s, statistics.fmean(inside)]] if inside else []
    return found


def told_last(points: list, begin: float, end: float, block_s: float) -> list:
    """The same of what holds until something else is told, for STALE_S at most: what was told last in front of a
    block's end."""
    found = []
    for i in range(int((end - begin) / block_s)):
        until = begin + (i + 1) * block_s
        inside = [v for t, v in points if until - STALE_S < t < until]
        found += [[(i + 0.5) * block_s, inside[-1]]] if inside else []
    return found


def buckets(answers: list, begin: float, end: float) -> list:
    """Tokens of each second; an answer's are spread evenly over the time from its request to its end."""
    found = [0.0] * int(end - begin)
    for asked, whole, tokens in answers:
        if not tokens or whole <= asked:
            continue
        for i in range(max(0, int(asked - begin)), min(len(found), int(whole - begin) + 1)):
            inside = min(whole, begin + i + 1) - max(asked, begin + i)
            found[i] += tokens * max(0.0, inside) / (whole - asked)
    return found


class Cards(threading.Thread):
    """nvidia-smi's own loop; `points`: {card: [(time, MiB)]}, none where it is missing. Of the
    caller's cards, numbered as the stage does."""

    def __init__(self):
        super().__init__(daemon=True)
        line = ["nvidia-smi", "--query-gpu=index,uuid,memory.used", "--format=csv,noheader,nounits", "-lms", "1000"]
        self.points: dict[str, list] = {}
        try:
            self.process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            self.process = None
            say("no nvidia-smi: nothing is known of the cards' memory")

    def run(self) -> None:
        for line in self.process.stdout if self.process else ():
            index, uuid, used = (line.strip().split(", ") + ["", ""])[:3]
            card = stages_number(index, uuid)
            if card is not None and used.isdigit():
                self.points.setdefault(card, []).append((time.monotonic(), int(used)))

    def stop(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()


# ---- a server


class Server:
    def __init__(self, name: str, stage: Stage):
        self.name, self.kind, self.stage, self.mark = name, SERVERS[name], stage, uuid.uuid4().hex
        self.port = stage.arguments.port + 1500 * list(SERVERS).index(name)
        self.watch = stage.arguments.work / f"{name}_watch"
        self.points: list = []  # (time, MiB of each role's processes)
        self.allocators: dict = {}  # (card, ALLOCATED or RESERVED) -> {process: [(time, MiB)]}
        self.commands, self.looked = {}, -LOOK_S
        self.found: dict = {"problem": None, "left_out": {}, "stuck": 0}
        self.pool: concurrent.futures.ProcessPoolExecutor | None = None
        self.spec = soak_load.Spec(
            url=f"http://127.0.0.1:{self.port}", vocabulary=stage.vocabulary, longest=stage.arguments.longest,
            context=stage.context, streams=stage.arguments.streams, same=self.kind.same,
            seed=1 + list(SERVERS).index(name),
        )  # fmt: skip
        kind, where = self.kind, ["--patch", str(stage.arguments.patch)] if self.kind.patched else []
        environment = EVERY_CALL if kind.patched else PAGED_EXTEND | PAGED_INDEX
        cards = kind.sees(stage.arguments.one_card)
        environment = environment | kind.environment | {MARK: self.mark, "CUDA_VISIBLE_DEVICES": cards}
        options = stage.harness.parse(["run", *stage.options, *kind.options, *where])
        self.process = served.server(
            name, stage.harness, options, self.port, stage.arguments.work, environment, watch=self.watch
        )

    def start(self) -> None:
        """Made in __init__, one server after another: what a harness starts an engine with is caught from its exec."""
        self.process.start()

    def come_up(self) -> None:
        self.start()
        stage = self.stage
        self.found["startup_s"] = self.process.wait_ready(min(stage.arguments.start_s, stage.left_s()))
        say(f"{self.name}: ready after {self.found['startup_s']:.1f} s")
        spawn = multiprocessing.get_context("spawn")
        self.pool = concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn)

    def ask(self, what, *arguments):
        """Done in the process of its load."""
        return self.pool.submit(soak_load.told, what, self.spec, *arguments).result()

    def living(self) -> dict[int, str]:
        every = processes_of(self.process.process.pid, self.mark)
        return {pid: command for pid, command in every.items() if COMPILER not in command}

    def sample(self) -> None:
        """Looks for new processes now and then: that takes as long as the machine has any."""
        now = time.monotonic()
        if now - self.looked >= LOOK_S:
            self.commands, self.looked = self.living(), now
        mib = Counter()
        for pid, command in self.commands.items():
            if (held := of_process(pid)) is not None:
                mib[role_of(command)] += held["mib"]
        self.points.append((now, mib))
        self.note_allocators()

    def note_allocators(self) -> None:
        """What the plugin says that torch holds of each card, which it numbers as the server does."""
        numbers = ("0" if self.stage.arguments.one_card else self.kind.cards).split(",")
        for path in self.watch.glob("*.json"):
            told = json.loads(path.read_text())
            for number, sizes in told["cards"].items():
                for what, size in zip((ALLOCATED, RESERVED), sizes, strict=True):
                    of_card = self.allocators.setdefault((numbers[int(number)], what), {})
                    points = of_card.setdefault(path.stem, [])
                    if not points or points[-1][0] < told["at"]:
                        points.append((told["at"], size / 2**20))

    # ---- the phases

    def warm(self) -> None:
        missing = self.ask(soak_load.missing)
        self.found["left_out"] = missing
        for kind, why in missing.items():
            say(f"{self.name}: not asked for {kind}: {why}")
        if "logprobs" in missing:
            self.spec = dataclasses.replace(self.spec, same="text")
        self.spec = dataclasses.replace(self.spec, left_out=tuple(missing))
        self.ask(soak_load.run, self.stage.arguments.warm_s, 0)

    def look(self, when: str) -> dict:
        """At rest: the markers' answers, and what is held."""
        self.process.check_alive()
        quiet = self.ask(soak_load.quiet)
        if quiet["stuck"]:
            say(f"{self.name}: {quiet['stuck']}")
            self.found["stuck"] += 1
        time.sleep(self.stage.arguments.rest_s)
        held = of_processes(self.living())
        idle = {what: held[name] for what, name in EVERY.items()} | self.watched()
        idle |= {"KV tokens in use": quiet["used"], "entries in /dev/shm": len(os.listdir(self.stage.shared_memory))}
        self.found.setdefault("idle", {})[when] = idle
        return quiet

    def watched(self) -> dict:
        """What the plugin says of the schedulers, summed; {} where it says nothing."""
        found = [json.loads(path.read_text()) for path in sorted(self.watch.glob("*.json"))]
        found = [one for one in found if time.monotonic() - one["at"] < STALE_S]
        if not found:
            return {}
        return {
            "streams with words": sum(one["words"]["streams"] for one in found),
            "words given to captures": sum(one["words"]["given"] for one in found),
            "entries of caches without limit": sum(one["cached_without_limit"] for one in found),
            "entries of caches with a limit": sum(one["cached"] for one in found),
            "entries of our modules' lists, sets, dicts": sum(sum(one["contained"].values()) for one in found),
            "memory of torch's allocator, MiB": sum(one["allocated"] for one in found) / 2**20,
            "contained": [one["contained"] for one in found],
            "passes in halves": sum(one["halves"] for one in found),
        }

    def first_look(self) -> None:
        quiet = self.look("before")
        self.alone = quiet["answers"]
        answers = self.alone if self.kind.under_load else None
        self.spec = dataclasses.replace(self.spec, answers=answers, used=quiet["used"])

    def prefills(self) -> Counter:
        return Counter(prefills([self.process.log.read_text(errors="replace")]))

    def load(self, seconds: float) -> None:
        ramp_s, before = self.stage.arguments.ramp_s, self.prefills()
        seen = self.ask(soak_load.run, seconds, 19 * 5000)  # 19 kinds: numbers that the warm-up did not have
        begin, end = seen["begin"] + ramp_s, seen["end"]
        kinds = set(soak_load.KINDS) - ({"marker"} if self.spec.answers is None else set())
        self.found["load"] = {
            "seconds": seen["end"] - seen["begin"],
            "counts": dict(seen["counts"]),
            "kinds": sorted(kinds),
            "faults": seen["faults"][:MOST_FAULT_TEXTS] + ["more"] * max(0, len(seen["faults"]) - MOST_FAULT_TEXTS),
            "ended": dict(seen["ended"]),
            "output_tokens": sum(tokens for _, _, tokens in seen["answers"]),
            "prompt_tokens": seen["prompt_tokens"],
            "cached_tokens": seen["cached_tokens"],
            "ran_at_once": seen["ran_at_once"],
            "buckets": buckets(seen["answers"], begin, end),
        }
        self.found["prefills"] = {ran: count - before[ran] for ran, count in self.prefills().items()}
        self.seen, self.judged = seen, (begin, end)
        series = {HOST: [(t, mib.total()) for t, mib in self.points]}
        for role in sorted({role for _, mib in self.points for role in mib}):
            series[f"{HOST} of {role}"] = [(t, mib[role]) for t, mib in self.points]
        block_s = self.stage.arguments.block_s
        self.found["series"] = {what: blocks(points, begin, end, block_s) for what, points in series.items()}
        self.found["compiles"] = served.compiles(self.watch, seen["begin"], end)
        say(f"{self.name}: {sum(seen['counts'].values())} requests, {len(seen['faults'])} faults")

    def last_look(self) -> None:
        answers = self.look("after")["answers"]
        places = zip(soak_load.MARKERS, answers, self.alone, strict=True)
        differ = [f"prompt of {n} tokens, alone after the load" for n, a, b in places if a != b]
        self.found["markers"] = {
            "alone": 2 * len(answers),
            "alone_differ": len(differ),
            "is_asked_under_load": self.spec.answers is not None,
            "under_load": self.seen["markers"],
            "under_load_differ": len(self.seen["markers_differ"]),
            "texts": differ + self.seen["markers_differ"][:MOST_FAULT_TEXTS],
            "digest": hashlib.sha256(repr(self.alone).encode()).hexdigest()[:16],
        }

    def end(self) -> str:
        """How it ended, where it did within a moment."""
        try:
            for _ in range(20):
                self.process.check_alive()
                time.sleep(0.1)
        except ServerDied as error:
            return str(error)
        return ""

    def stop(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)
        self.process.stop()


# ---- the stage


class Stage:
    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.deadline = time.monotonic() + arguments.limit_s
        self.shared_memory = arguments.shared_memory
        self.harness = load_harness(arguments.harness)
        self.context = arguments.longest + 512
        self.options = ["--variant", "flash6h", "--models", str(arguments.models), "--radix", "--mem", "0.9"]
        self.options += ["--context", str(self.context), "--max-total-tokens", str(arguments.max_total_tokens)]
        self.options += ["--max-running", str(arguments.streams), "--graph-bs", *GRAPHS, *sets(**MODEL)]
        _, model = self.harness.engine_args(self.harness.parse(["run", *self.options]))
        self.vocabulary = self.harness.vocab_of(model)
        write_tokenizer(Path(model), self.vocabulary)
        self.servers = {name: Server(name, self) for name in arguments.only}
        self.cards, self.is_over = Cards(), threading.Event()

    def left_s(self) -> float:
        return max(1.0, self.deadline - time.monotonic())

    def in_order(self) -> list[Server]:
        return [server for server in self.servers.values() if not server.found["problem"]]

    def phase(self, do, *arguments) -> None:
        """Done to all servers at once; one that breaks is out of the later phases, and the others go on."""

        def one(server: Server) -> None:
            try:
                do(server, *arguments)
            except (ServerDied, ServerError, RuntimeError, OSError, ValueError, KeyError) as error:
                why = f"{do.__name__}: {type(error).__name__}: {str(error)[:400]}"
                server.found["problem"] = "; ".join(dict.fromkeys(filter(None, (why, server.end()))))
                say(f"{server.name}: {server.found['problem']}")

        with concurrent.futures.ThreadPoolExecutor(len(SERVERS)) as pool:
            list(pool.map(one, self.in_order()))

    def sample(self) -> None:
        while not self.is_over.wait(self.arguments.period_s):
            for server in self.in_order():
                server.sample()

    def run(self) -> None:
        sampler = threading.Thread(target=self.sample, daemon=True)
        self.cards.start()
        try:
            self.phase(Server.come_up)
            sampler.start()
            self.phase(Server.warm)
            self.phase(Server.first_look)
            seconds = min(self.arguments.seconds, self.left_s() - RESERVE_S)
            say(f"{', '.join(server.name for server in self.in_order())}: {seconds:.0f} s of load")
            self.phase(Server.load, max(1.0, seconds))
            self.phase(Server.last_look)
        finally:
            self.is_over.set()
            self.cards.stop()
            with concurrent.futures.ThreadPoolExecutor(len(SERVERS)) as pool:
                list(pool.map(Server.stop, self.servers.values()))

    @property
    def command(self) -> str:
        return f"--only {' '.join(self.arguments.only)}"

    def found(self) -> dict:
        """A card's series is judged where all its servers were under load."""
        judged = [server.judged for server in self.servers.values() if "load" in server.found]
        window = (max(b for b, _ in judged), min(e for _, e in judged)) if judged else (0.0, 0.0)
        cards = {card: blocks(points, *window, self.arguments.block_s) for card, points in self.cards.points.items()}
        for server in self.servers.values():
            if "markers" not in server.found:
                server.found.pop("load", None)
                server.found["problem"] = server.found["problem"] or "it did not come to its end"
        found = {name: server.found for name, server in self.servers.items()}
        return {"servers": found, "cards": cards, "allocators": self.of_allocators(*window)}

    def of_allocators(self, begin: float, end: float) -> dict:
        """{card: {ALLOCATED or RESERVED: a series of all processes together}}"""
        each: dict = {}
        for server in self.servers.values():
            for (card, what), of_processes in server.allocators.items():
                series = [told_last(points, begin, end, self.arguments.block_s) for points in of_processes.values()]
                each.setdefault(card, {}).setdefault(what, []).extend(series)
        return {card: {what: added(series) for what, series in of_card.items()} for card, of_card in each.items()}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = served.parser(STAGE, __doc__.splitlines()[0], port=21000)
    parser.add_argument("--only", nargs="+", choices=tuple(SERVERS), default=list(ESSENTIAL), metavar="SERVER")
    parser.add_argument("--seconds", type=float, default=90, help="of load; less where the limit comes first")
    parser.add_argument("--warm-s", type=float, default=12)
    parser.add_argument(
        "--ramp-s", type=float, default=8, help="of load that are not judged: all streams begin at once"
    )
    parser.add_argument("--rest-s", type=float, default=2.5, help="before it is looked at: the plugin has written")
    parser.add_argument("--period-s", type=float, default=1.0, help="of samples")
    parser.add_argument("--block-s", type=float, default=4, help="of a point of a series")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--longest", type=int, default=65536, help="prompt, in tokens")
    parser.add_argument("--max-total-tokens", type=int, default=600_000)
    parser.add_argument("--shared-memory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--one-card", action="store_true", help="all servers share the first card")
    arguments = parser.parse_args(argv)
    if arguments.one_card and (wide := [name for name in arguments.only if "," in SERVERS[name].cards]):
        parser.error(f"--one-card: {', '.join(wide)} needs two; name the others by --only")
    if arguments.longest < soak_load.LEAST_LONGEST:
        parser.error(f"--longest must be at least {soak_load.LEAST_LONGEST}, got {arguments.longest}")
    return arguments


def clear(work: Path) -> None:
    for old in (*work.glob("*.log"), *work.glob("*_watch/*")):
        old.unlink()


def main() -> int:
    return served.run(STAGE, parse(sys.argv[1:]), clear, Stage)


if __name__ == "__main__":
    sys.exit(main())
