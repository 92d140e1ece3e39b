#!/usr/bin/env python3
"""What becomes of a real server with our sums between two cards when its processes are killed, stopped or doubled.

They are stock SGLang's, 6 layers, TP2, all started side by side.

usage: faults_stage.py [--harness DIR] [--patch build] [--out $OUT] [--only CASE ..] [--limit-s 280] [--served auto]

killed_rank1, killed_rank0   kill -9 of a rank's scheduler while it decodes: all of the server ends within 15 s, and
                             the rank is named
stalled_then_killed          the same, the rank stopped before, so that the other one is in a sum: that is named, too
killed_detokenizer           the same of the detokenizer
stalled                      SIGSTOP of rank 1 for 10 s, SIGCONT: the answer goes on, with an undisturbed one's bits
two_engines                  two servers on the same cards answer at once: the bits of each alone
stopped                      SIGTERM of the main process, as a container's stop: all of it ends within 10 s
restarted                    the server whose rank 0 was killed once more, on the same ports: the same bits
eagle314, eager              EAGLE 3/1/4; prefix cache on and CUDA graphs off: the text of plain decode with graphs
memory_saver                 --enable-memory-saver, KV cache released and resumed: the same bits; "not shown" where
                             torch_memory_saver is not installed

Nothing is left: no process of any server, nothing new in /dev/shm but what SGLang itself leaves when it is killed, the
cards' memory as before (by nvidia-smi, NVML or torch; where none of them says it, that is a bar that is not met).
OUT/stage_faults2.json is what collect.py reads; beside it are the lines of the servers' logs that say who ended, and
the logs' ends.

SGLang's wait for CUDA coredumps is off: where a scheduler is still there 5 s after another died, the main process
sleeps for 60 s before it ends all, and that is not what is judged here.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(REPO)]

from bench.serving.endpoint import Endpoint  # noqa: E402
from bench.serving.server_errors import ServerError  # noqa: E402
from bench.serving.server_process import STOP_S as SERVER_STOP_S  # noqa: E402
from bench.serving.server_process import ServerDied, ServerProcess  # noqa: E402
from tests.e2e import cards_memory  # noqa: E402
from tests.e2e.cards_memory import used_mib  # noqa: E402
from tests.e2e.made_tokenizer import write_tokenizer  # noqa: E402
from tests.e2e.serving_stage import environment_of, flags, load_harness  # noqa: E402
from tests.e2e.stages import EVERY_CALL, SIDE_BY_SIDE_ENVIRONMENT, eagle, sums  # noqa: E402
from tests.e2e.what_ran import commit, device  # noqa: E402

STAGE = "faults2"
END_S, STOP_S = 15.0, 10.0  # the bars: until all of a server has ended
GIVEN_UP_S = 45.0  # what has not ended by then does not
PROMPTS = (5, 130, 700, 1500)
NEW, LONG_NEW, ENDLESS = 32, 1200, 12000  # tokens of an answer
MARK = "DSV4_FAULTS_SERVER"  # a variable of all processes of one server
OPTIONS = [
    "--variant",
    "flash6h",
    "--prompts",
    "5",
    "--graph-bs",
    "1",
    "8",
    "--max-total-tokens",
    "40000",
    "--mem",
    "0.9",
]
OPTIONS += sums(2) + ["--set", 'json_model_override_args="{\\"n_routed_experts\\": 64}"']
ENCODER = "deepseek_recipe"  # of this model's chats, where a release asks for it
FOR_HTTP = ("openai_harmony", "openai", "uvloop", "uvicorn", "fastapi", "aiohttp", "orjson", "jinja2", "requests")
IN_A_SUM = re.compile(
    r"all_reduce: rank (\d+) waited in vain for rank (\d+), in call \d+, (?:sum \d+ of a graph|outside of graphs), of"
)
OF_SGLANG = ("sgl_shm_mq_", "sglang_", "sem.loky-")  # what it leaves in /dev/shm where it is killed
ENDED = re.compile(r"rank (\d+) \(process \d+\) has ended")
DIED = re.compile(r"SIG(TERM|QUIT) received|closed by peer|reset by peer|kill_process_tree called|live scheduler")
CRASHED = re.compile(r"Subprocess (\w+) \(pid=\d+\) crashed")
# case -> the servers that it is done to; cases of a server in their order
SERVERS = {
    "first": ("two_engines", "stalled", "killed_rank1"),
    "second": ("two_engines", "stalled_then_killed"),
    "third": ("killed_rank0", "restarted"),
    "fourth": ("stopped",),
    "fifth": ("killed_detokenizer",),
    "eagle": ("eagle314",),
    "eager": ("eager",),
    "saver": ("memory_saver",),
}
MORE = {"eagle": eagle(3), "eager": ["--radix", "--eager"], "saver": ["--set", "enable_memory_saver=true"]}
CASES = tuple(dict.fromkeys(case for cases in SERVERS.values() for case in cases))
ESSENTIAL = tuple(case for name in ("first", "second", "third", "fourth") for case in SERVERS[name])


def say(text: str) -> None:
    print(f"faults_stage: {text}", flush=True)


# ---- what is there


def processes_of(session: int, mark: str) -> dict[int, str]:
    """{pid: command} of the living processes of a session, and of those that left it but have its mark."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        with contextlib.suppress(OSError):
            is_ours = os.getsid(pid) == session or f"{MARK}={mark}".encode() in (folder / "environ").read_bytes()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if is_ours and state not in "ZX":
                found[pid] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return found


def who_is_named(log: str) -> dict:
    """What a server's log says of those that ended: in a sum [(who says it, who did not come)], ranks, subprocesses."""
    return {
        "in_a_sum": [[int(a), int(b)] for a, b in IN_A_SUM.findall(log)],
        "ranks": [int(r) for r in ENDED.findall(log)],
        "subprocesses": CRASHED.findall(log),
    }


def lines_of_who_ended(log: str) -> str:
    known = (IN_A_SUM, ENDED, CRASHED, DIED)
    return "\n".join(line[:400] for line in log.splitlines() if any(one.search(line) for one in known))


def names_rank(named: dict, rank: int) -> bool:
    in_a_sum = any(lost == rank for _, lost in named["in_a_sum"])
    return in_a_sum or rank in named["ranks"] or f"scheduler_{rank}" in named["subprocesses"]


# ---- a server


class Server:
    """launch_server (or faults_engine.py) with all processes of a real one."""

    def __init__(self, name: str, stage: Stage):
        self.name, self.stage, self.mark = name, stage, uuid.uuid4().hex
        self.port = stage.arguments.port + 1500 * list(SERVERS).index(name)
        self.process: ServerProcess | None = None
        self.startup_s: float | None = None

    def start(self) -> None:
        stage = self.stage
        options = stage.harness.parse(["run", *OPTIONS, *MORE.get(self.name, []), *stage.where])
        arguments, _ = stage.harness.engine_args(options)
        environment = stage.environment | {MARK: self.mark}
        if stage.served == "http":
            arguments.pop("skip_tokenizer_init")
            words = [sys.executable, "-m", "sglang.launch_server", "--port", str(self.port), *flags(arguments)]
        else:
            words = [sys.executable, str(Path(__file__).with_name("faults_engine.py")), "--port", str(self.port)]
            words += ["--engine", json.dumps(arguments)]
        log = stage.arguments.work / f"{self.name}.log"
        url = f"http://127.0.0.1:{self.port}"
        self.process = ServerProcess(self.name, f"exec {shlex.join(words)}", url, log, environment)
        self.process.start()

    def wait_ready(self) -> None:
        self.startup_s = self.process.wait_ready(min(self.stage.arguments.start_s, self.stage.left_s()))
        say(f"{self.name}: ready after {self.startup_s:.1f} s")

    def ask(self, length: int, new: int) -> list:
        """Every bit of an answer to a prompt of `length` tokens: its tokens, and their log-probabilities."""
        asked = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        ids = self.stage.harness.ids(length, self.stage.vocabulary, 1)
        body = {"input_ids": ids, "sampling_params": asked, "return_logprob": True}
        found = Endpoint(self.process.url, timeout_s=120.0, total_s=120.0).post("/generate", body)
        meta = found["meta_info"]["output_token_logprobs"]
        return [found["output_ids"], [step[0] for step in meta]]

    def answers(self) -> list:
        return [self.ask(length, NEW) for length in PROMPTS]

    def living(self) -> dict[int, str]:
        return processes_of(self.process.process.pid, self.mark)

    def pid_of(self, role: str) -> int:
        """scheduler_TP0, scheduler_TP1, detokenizer: by the title that SGLang gives its processes."""
        found = [pid for pid, line in self.living().items() if re.match(rf"sglang::{role}\b", line)]
        if len(found) != 1:
            raise RuntimeError(f"{self.name}: expected one process {role}, got {len(found)} of {self.living()}")
        return found[0]

    def seconds_to_the_end(self) -> float | None:
        """Until none of its processes lives; None: some do, for longer than anybody would wait."""
        start = time.monotonic()
        while time.monotonic() < start + self.stage.arguments.given_up_s:
            self.process.process.poll()  # reaps it
            if not self.living():
                return round(time.monotonic() - start, 2)
            time.sleep(0.1)
        return None

    def log(self) -> str:
        if self.process.process.poll() is not None:
            self.process.writer.join(5.0)
        return self.process.log.read_text(errors="replace")


class Busy:
    """A long answer that a server is at, in a thread; `problem`: how it ended where it did not end well."""

    def __init__(self, server: Server, new: int, for_s: float):
        self.answer, self.problem, self.ended_s = None, None, None
        self._thread = threading.Thread(target=self._run, args=(server, new), daemon=True)
        self._thread.start()
        time.sleep(for_s)
        if not self._thread.is_alive():
            raise RuntimeError(f"{server.name}: its long answer had ended before the fault: {self.problem}")

    def _run(self, server, new):
        try:
            self.answer = server.ask(PROMPTS[1], new)
        except (ServerError, OSError) as error:
            self.problem = str(error)[:300]
        self.ended_s = time.monotonic()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)


# ---- the cases: each returns what it saw


class Stage:
    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.deadline = time.monotonic() + arguments.limit_s
        self.harness = load_harness(arguments.harness)
        self.where = ["--patch", str(arguments.patch), "--models", str(arguments.models)]
        options = self.harness.parse(["run", *OPTIONS, *self.where])
        _, model = self.harness.engine_args(options)
        environment = environment_of(self.harness, options)
        environment = {k: v for k, v in environment.items() if not k.startswith(("DSV4_", "E2E_FORCE"))}
        self.environment = environment | EVERY_CALL
        self.environment |= SIDE_BY_SIDE_ENVIRONMENT | {"SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
        self.vocabulary = self.harness.vocab_of(model)
        write_tokenizer(Path(model), self.vocabulary)
        missing = missing_for_http()
        self.served = arguments.served if arguments.served != "auto" else "offline" if missing else "http"
        if missing:
            say(f"not here: {', '.join(missing)}; the servers are {self.served}")
        wanted = {name for name, cases in SERVERS.items() if set(cases) & set(arguments.only)}
        wanted |= {"first"} if wanted & set(MORE) else set()  # what their text is held against
        self.servers = {name: Server(name, self) for name in SERVERS if name in wanted}
        self.found: dict[str, dict] = {}
        self.alone: dict[str, list] = {}

    def left_s(self) -> float:
        return max(1.0, self.deadline - time.monotonic())

    def wants(self, case: str) -> bool:
        return case in self.arguments.only

    def run_case(self, case: str, do, *arguments) -> None:
        """A case that breaks is one that failed, and the others go on."""
        started = time.monotonic()
        try:
            seen = do(*arguments)
        except (ServerDied, ServerError, RuntimeError, OSError, KeyError, TypeError) as error:
            traceback.print_exc()
            seen = {"problem": f"{type(error).__name__}: {str(error)[:600]}"}
        self.found[case] = seen | {"seconds": round(time.monotonic() - started, 1)}
        say(f"{case}: {json.dumps(self.found[case])[:700]}")

    def killed(self, server: Server, role: str, rank: int | None, is_stalled: bool = False) -> dict:
        busy = Busy(server, ENDLESS, self.arguments.busy_s)
        pid = server.pid_of(role)
        if is_stalled:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(1.0)
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        seen = {"seconds_to_the_end": server.seconds_to_the_end()}
        busy.join(5.0)
        seen |= {"processes_left": list(server.living().values()), "named": who_is_named(server.log())}
        seen |= {"client": busy.problem, "client_s": None if busy.ended_s is None else round(busy.ended_s - at, 2)}
        named = seen["named"]
        seen["is_named"] = names_rank(named, rank) if rank is not None else role in named["subprocesses"]
        seen["is_named_in_a_sum"] = [1 - rank, rank] in named["in_a_sum"] if rank is not None else None
        return seen

    def stalled(self, server: Server) -> dict:
        pid, start = server.pid_of("scheduler_TP1"), time.monotonic()
        undisturbed = server.ask(PROMPTS[1], LONG_NEW)
        busy = Busy(server, LONG_NEW, 0.3 * (time.monotonic() - start))
        start = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(self.arguments.stall_s)
            went_on = busy.ended_s is not None
        finally:
            os.kill(pid, signal.SIGCONT)
        busy.join(60.0)
        if went_on:
            raise RuntimeError(f"{server.name}: the answer ended while rank 1 was stopped: nothing was stalled")
        seen = {"stalled_s": round(time.monotonic() - start, 1), "problem": busy.problem}
        seen |= {"answers": 1, "differ": int(busy.answer != undisturbed), "named": who_is_named(server.log())}
        return seen

    def two_engines(self, one: Server, other: Server) -> dict:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            jobs = [pool.submit(server.answers) for server in (one, other)]
            found = [job.result() for job in jobs]
        pairs = [(x, y) for name, answers in zip((one.name, other.name), found, strict=True)
                 for x, y in zip(answers, self.alone[name], strict=True)]  # fmt: skip
        pairs += list(zip(self.alone[one.name], self.alone[other.name], strict=True))
        return {"answers": len(pairs), "differ": sum(x != y for x, y in pairs)}

    def stopped(self, server: Server) -> dict:
        server.ask(PROMPTS[0], NEW)
        os.kill(server.process.process.pid, signal.SIGTERM)
        seen = {"seconds_to_the_end": server.seconds_to_the_end()}
        return seen | {"processes_left": list(server.living().values())}

    def restarted(self, server: Server) -> dict:
        server.start()
        server.wait_ready()
        pairs = list(zip(server.answers(), self.alone[server.name], strict=True))
        return {"startup_s": server.startup_s, "answers": len(pairs), "differ": sum(x != y for x, y in pairs)}

    def same_text(self, server: Server) -> dict:
        """Tokens as those of the first server, which decodes plainly, in graphs; with the bits that differ, too."""
        pairs = list(zip(server.answers(), self.alone["first"], strict=True))
        again = server.answers() if server.name == "eager" else []  # from the prefix cache
        pairs += list(zip(again, self.alone["first"], strict=False))
        return {
            "answers": len(pairs),
            "differ": sum(x[0] != y[0] for x, y in pairs[: len(PROMPTS)]),
            "differ_from_the_prefix_cache": sum(x[0] != y[0] for x, y in pairs[len(PROMPTS) :]),
            "differ_in_a_bit": sum(x != y for x, y in pairs),
        }

    def memory_saver(self, server: Server) -> dict:
        before, at_first = server.answers(), used_mib()
        asked = Endpoint(server.process.url, timeout_s=60.0, total_s=60.0)
        with contextlib.suppress(ServerError):  # its answer has no content
            asked.post("/release_memory_occupation", {"tags": ["kv_cache"]})
        time.sleep(2.0)
        released = used_mib()
        with contextlib.suppress(ServerError):
            asked.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
        pairs = list(zip(server.answers(), before, strict=True))
        given_back = None if None in (at_first, released) else at_first - released
        return {"answers": len(pairs), "differ": sum(x != y for x, y in pairs), "given_back_mib": given_back}

    def cases_of(self, server: Server) -> None:
        """Those that are done to one server, one after the other, while others' are done to theirs."""
        by_name = {
            "stalled": functools.partial(self.stalled, server),
            "killed_rank1": functools.partial(self.killed, server, "scheduler_TP1", 1),
            "stalled_then_killed": functools.partial(self.killed, server, "scheduler_TP1", 1, True),
            "killed_rank0": functools.partial(self.killed, server, "scheduler_TP0", 0),
            "killed_detokenizer": functools.partial(self.killed, server, "detokenizer", None),
            "stopped": functools.partial(self.stopped, server),
            "restarted": functools.partial(self.restarted, server),
            "eagle314": functools.partial(self.same_text, server),
            "eager": functools.partial(self.same_text, server),
            "memory_saver": functools.partial(self.memory_saver, server),
        }
        for case in SERVERS[server.name]:
            if case in by_name and self.wants(case):
                self.run_case(case, by_name[case])

    def without_memory_saver(self) -> None:
        if "saver" in self.servers and importlib.util.find_spec("torch_memory_saver") is None:
            del self.servers["saver"]
            self.found["memory_saver"] = {"not_shown": "torch_memory_saver is not installed here", "seconds": 0.0}

    def run(self) -> dict:
        before = {"shm": set(os.listdir(self.arguments.shared_memory)), "mib": used_mib()}
        self.without_memory_saver()
        try:
            with concurrent.futures.ThreadPoolExecutor(len(SERVERS)) as pool:
                up = {name: pool.submit(self.is_up, server) for name, server in self.servers.items()}
                up = {name for name, job in up.items() if job.result()}
                for name in [name for name in ("first", "second", "third") if name in up]:  # what each answers alone
                    with contextlib.suppress(ServerError):  # whoever needs it says so
                        self.alone[name] = self.servers[name].answers()
                if self.wants("two_engines"):
                    pair = [self.servers.get(name) for name in ("first", "second")]
                    self.run_case("two_engines", self.two_engines, *pair)
                jobs = [pool.submit(self.cases_of, self.servers[name]) for name in self.servers if name in up]
                for job in jobs:
                    job.result()
        finally:
            started = [server.process for server in self.servers.values() if server.process]
            with concurrent.futures.ThreadPoolExecutor(len(SERVERS)) as pool:
                list(pool.map(lambda process: process.stop(self.arguments.stop_s), started))
        for case in self.arguments.only:
            self.found.setdefault(case, {"problem": "its server did not start", "seconds": 0.0})
        return self.left_behind(before)

    def is_up(self, server: Server) -> bool:
        try:
            server.start()
            server.wait_ready()
        except ServerDied as error:
            say(str(error))
            return False
        return True

    def left_behind(self, before: dict) -> dict:
        """Once all has ended: a driver takes a moment to give memory back."""
        end = time.monotonic() + self.arguments.give_back_s
        while (used := used_mib()) is not None and before["mib"] is not None:
            if used <= before["mib"] + 64 or time.monotonic() > end:
                break
            time.sleep(0.5)
        ours = [server.living() for server in self.servers.values() if server.process is not None]
        new = sorted(set(os.listdir(self.arguments.shared_memory)) - before["shm"])
        by_kind = {kind: [name for name in new if name.startswith(kind)] for kind in OF_SGLANG}
        by_kind = {kind: names for kind, names in by_kind.items() if names}
        others = [name for name in new if not name.startswith(OF_SGLANG)]
        say(f"left in /dev/shm: {', '.join(others) or 'nothing'}; by SGLang: {json.dumps(by_kind)}")
        return {
            "shm": others,
            "shm_of_sglang": by_kind,
            "processes": [line for living in ours for line in living.values()],
            "gpu_mib": None if None in (used, before["mib"]) else max(0, used - before["mib"]),
            "gpu_mib_by": cards_memory.way(),
        }

    def as_stage(self, left: dict) -> dict:
        """In the form of run_stage's files."""
        ways = {name: re.findall(r"cards sum by way of ([\w' ]+?)[:(]", server.log() if server.process else "")
                for name, server in self.servers.items()}  # fmt: skip
        return {
            "stage": STAGE,
            "device": device(),
            "date": time.strftime("%Y-%m-%d"),
            "commit": self.arguments.commit or commit(self.arguments.patch),
            "command": f"python3 tests/e2e/faults_stage.py --only {' '.join(self.arguments.only)}",
            "cases": {},
            "differences": [],
            "faults": {"cases": self.found, "left": left, "ways": ways, "served": self.served, "sglang": release()},
        }


def told_of_sglang(expression: str) -> str:
    """A Python expression over importlib.metadata as `m`, in a process of its own; empty where SGLang is not here."""
    line = [sys.executable, "-c", f"import importlib.metadata as m; print({expression})"]
    return subprocess.run(line, capture_output=True, text=True).stdout.strip()


def missing_for_http() -> list[str]:
    """What SGLang's HTTP front needs and is not here."""
    asked = told_of_sglang("*(m.requires('sglang') or ()), sep='\\n'")
    needs = [*FOR_HTTP, *([ENCODER] if ENCODER.replace("_", "-") in asked else [])]
    return [name for name in needs if importlib.util.find_spec(name) is None]


def release() -> str:
    return told_of_sglang("m.version('sglang')") or "unknown"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--harness", type=Path, default=Path(os.environ.get("E2E_HARNESS", REPO / ".e2e/tools")))
    parser.add_argument("--patch", type=Path, default=REPO / "build", help="the built folder that users mount")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--models", type=Path, default=Path("/tmp/models_serving"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/dsv4_sm120_faults"), help="the servers' logs, whole")
    parser.add_argument("--only", nargs="+", choices=(*CASES, "all"), default=list(ESSENTIAL), metavar="CASE")
    parser.add_argument("--served", choices=("auto", "http", "offline"), default="auto")
    parser.add_argument("--port", type=int, default=20000, help="of the first; the others' are 1,500 apart")
    parser.add_argument("--limit-s", type=float, default=280)
    parser.add_argument("--start-s", type=float, default=150, help="that a server may take to start")
    parser.add_argument("--stall-s", type=float, default=10.0)
    parser.add_argument("--busy-s", type=float, default=1.0, help="from a request to the fault")
    parser.add_argument("--given-up-s", type=float, default=GIVEN_UP_S)
    parser.add_argument("--stop-s", type=float, default=SERVER_STOP_S, help="from asking a server to end to killing it")
    parser.add_argument("--give-back-s", type=float, default=10.0, help="that a driver may take to have memory back")
    parser.add_argument("--shared-memory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--commit", help="of the patch, where this is a copy without git")
    arguments = parser.parse_args(argv)
    arguments.only = list(CASES) if "all" in arguments.only else arguments.only
    return arguments


def main() -> int:
    arguments = parse(sys.argv[1:])
    for name in ("harness", "patch", "out", "models", "work"):
        setattr(arguments, name, getattr(arguments, name).resolve())
    for path in (arguments.harness / "run_engine.py", arguments.patch / "sitecustomize.py"):
        if not path.exists():
            raise SystemExit(f"faults_stage: {path} does not exist (--harness, --patch)")
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.work.mkdir(parents=True, exist_ok=True)
    for old in arguments.work.glob("*.log"):  # a server's log is read for who is named in it
        old.unlink()
    stage = Stage(arguments)
    left = stage.run()
    logs = [(log.stem, log.read_text(errors="replace")) for log in sorted(arguments.work.glob("*.log"))]
    told = [f"==== {name}, who ended\n{lines_of_who_ended(log)}" for name, log in logs]
    told += [f"==== {name}\n{log[-30_000:]}" for name, log in logs]
    (arguments.out / "faults_logs.txt").write_text("\n".join(told))
    path = arguments.out / f"stage_{STAGE}.json"
    path.write_text(json.dumps(stage.as_stage(left), indent=1))
    collect = Path(__file__).with_name("collect.py")
    return subprocess.run([sys.executable, str(collect), str(path)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
