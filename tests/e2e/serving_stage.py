#!/usr/bin/env python3
"""The serving comparison and the equality gates against the real engine, stock and patched beside each other on a GPU.

usage: serving_stage.py [--harness DIR] [--patch build] [--out $OUT] [--mode ops] [--variant flash6h] [--limit-s 240]

Starts two HTTP servers with the harness's cut-down model (random weights, a made tokenizer: one word a token), runs
bench/serving/compare.py on their addresses, then the gates that random weights leave a meaning, then tries both with
speculation (the draft layer has random weights too, so acceptance is nil; the verifier is what is tested).
With --spec nothing but compare.py runs, and starts the servers itself, without speculation and with EAGLE 3/1/4;
--cards 2 gives each server two cards.
Every part is guarded and has its own limit; what is done stays in OUT: result.json, report.md, report.html, plots,
gates/*.json, gates.md, and the ends of the servers' logs.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import threading
import time
import traceback
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(REPO)]

from bench.quality import gates, speculation_equality  # noqa: E402
from bench.quality.verdict import markdown  # noqa: E402
from bench.serving import compare, identity  # noqa: E402
from bench.serving.endpoint import Endpoint  # noqa: E402
from bench.serving.server_process import ServerDied, ServerProcess  # noqa: E402
from tests.e2e.collect import row  # noqa: E402
from tests.e2e.made_tokenizer import write_tokenizer  # noqa: E402
from tests.e2e.stages import PAGED_EXTEND, PAGED_INDEX, SIDE_BY_SIDE_ENVIRONMENT  # noqa: E402
from tests.e2e.what_ran import commit, device  # noqa: E402

ISSUE = 9
COMPARED = ("stock", "patched")
SPECULATING = {"speculating": "patched", "stock_speculating": "stock"}  # and the server without that it is held against
NAMES = (*COMPARED, *SPECULATING)
AFTER_COMPARE_S = 80.0  # for the gates and the speculating servers
GRACE_S = 10.0  # of the limit, for writing what is done
GRAPHS = ["1", "2", "4", "8", "16", "32"]
CELLS = "single,concurrency,depth 8K,prefill 1K,prefill 8K,intrusion"  # of the quick matrix, what four minutes hold
SPECULATION = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 1,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 2,
}
SPECULATION_OF_USERS = SPECULATION | {"speculative_num_steps": 3, "speculative_num_draft_tokens": 4}
NOTES = (
    "cut-down model with random weights: times and equality mean something, quality does not",
    "an H200 in validation mode, not an SM120 card: no figure here is an SM120 figure",
    "both servers have the same GPUs; while one is measured the other is idle",
)


def say(text: str) -> None:
    print(f"serving_stage: {text}", flush=True)


def load_harness(folder: Path):
    sys.path.insert(0, str(folder))
    import run_engine

    return run_engine


def environment_of(harness, options) -> dict[str, str]:
    """What the harness would start the engine with: it replaces this process, so its call is caught."""
    caught: list[dict] = []
    original, os.execve = os.execve, lambda program, arguments, environment: caught.append(environment)
    try:
        os.environ.pop("E2E_REEXEC", None)
        harness.reexec(options)
    finally:
        os.execve = original
    return caught[0]


def flags(arguments: dict) -> list[str]:
    """Engine arguments as launch_server's options."""
    found = []
    for key, value in arguments.items():
        option = "--" + key.replace("_", "-")
        if value is True:
            found.append(option)
        elif isinstance(value, (list, tuple)):
            found += [option, *map(str, value)]
        elif value not in (None, False):
            found += [option, str(value)]
    return found


class Stage:
    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.deadline = time.monotonic() + arguments.limit_s
        self.harness = load_harness(arguments.harness)
        self.servers: dict[str, ServerProcess] = {}
        self.gave_up = False
        self.ports = dict(zip(NAMES, arguments.ports, strict=True))
        self.gpus = dict(zip(NAMES, arguments.gpus, strict=True)) if arguments.gpus else {}
        self.reports = {name: arguments.out / f"patch_reports_{name}" for name in NAMES}

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def options(self, patched: bool):
        words = ["run", "--variant", self.arguments.variant, "--models", str(self.arguments.models)]
        words += ["--context", str(self.arguments.context), "--max-total-tokens", "400000", "--graph-bs", *GRAPHS]
        words += ["--radix"] if self.arguments.radix else []
        return self.harness.parse(words + (["--patch", str(self.arguments.patch)] if patched else []))

    def prepared(self, name: str, patched: bool, extra: dict | None = None) -> tuple[list[str], dict]:
        """A server's command, and what it has in its environment."""
        options = self.options(patched)
        arguments, model = self.harness.engine_args(options)
        arguments.pop("skip_tokenizer_init")
        arguments.setdefault("swa_full_tokens_ratio", 0.5)  # whole prompts fit the sliding-window pool: no queueing
        if self.arguments.cards > 1:  # with a communicator, which is asked for ours
            arguments |= {"tp_size": self.arguments.cards, "enforce_disable_flashinfer_allreduce_fusion": True}
        write_tokenizer(Path(model), self.harness.vocab_of(model))
        environment = environment_of(self.harness, options)
        environment = {key: value for key, value in environment.items() if not key.startswith("DSV4_")}
        environment |= SIDE_BY_SIDE_ENVIRONMENT
        if self.arguments.only_gates:  # every server's prompts as they are ours in a patched one, whose bits repeat
            environment |= PAGED_EXTEND | PAGED_INDEX
        if patched:
            environment["DSV4_SM120_FORCE"] = self.arguments.mode
            environment["DSV4_SM120_SET"] = self.arguments.choices
        if name in self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus[name]
        words = [sys.executable, "-m", "sglang.launch_server", "--port", str(self.ports[name])]
        return [*words, *flags({**arguments, **(extra or {})})], environment

    def start(self, name: str, patched: bool, extra: dict | None = None) -> None:
        words, environment = self.prepared(name, patched, extra)
        self.reports[name].mkdir(parents=True, exist_ok=True)
        environment["DSV4_SM120_REPORT"] = str(self.reports[name])
        url = f"http://127.0.0.1:{self.ports[name]}"
        command, log = f"exec {shlex.join(words)}", self.arguments.out / f"{name}.log"
        server = ServerProcess(name, command, url, log, environment)
        self.servers[name] = server
        server.start()

    def ready(self, name: str, limit_s: float) -> None:
        say(f"{name}: ready after {self.servers[name].wait_ready(max(1.0, min(limit_s, self.left_s()))):.1f} s")

    def wait_for_the_gpu(self) -> None:
        """Until --wait-for's file exists: what else runs on this GPU while the servers start must have ended."""
        path = self.arguments.wait_for
        while path is not None and not path.exists() and not self.gave_up:
            time.sleep(0.2)

    def unforeseen(self) -> list[str]:
        """Server arguments that differ though both were given the same: named, so that the report says so."""
        infos = [Endpoint(self.servers[name].url).server_info() for name in COMPARED]
        return [key for key in identity.differing(*infos) if key not in identity.NOT_FLAGS]

    def compared(self, limit_s: float) -> list[str]:
        """What compare.py is told of any servers."""
        arguments = self.arguments
        title = f"Stock against patched ({arguments.mode}), {arguments.variant}, validation mode"
        words = ["--change", "patch", "--matrix", arguments.matrix, "--prompts", "random", "--only", arguments.cells]
        words += ["--rounds", str(arguments.rounds), "--cell-timeout", "60", "--out", str(arguments.out)]
        words += ["--title", title + (f", {arguments.cards} cards" if arguments.cards > 1 else "")]
        words += ["--limit-s", str(max(20.0, limit_s))]
        known = arguments.commit or commit(arguments.patch)  # a checkout that was carried here has an older one's git
        words += ["--commit", known] if known else []
        return words + [word for note in NOTES for word in ("--note", note)]

    def compare(self) -> None:
        after_s = 2 * GRACE_S if self.arguments.only_compare else AFTER_COMPARE_S
        words = self.compared(self.left_s() - after_s)
        for letter, name in zip("ab", COMPARED, strict=True):
            words += [f"--{letter}-label", name, f"--{letter}-url", self.servers[name].url]
            words += [f"--{letter}-pid", str(self.servers[name].process.pid)]
            words += [f"--{letter}-report", str(self.reports[name])]
        for key in self.unforeseen():
            words += ["--change", f"flag:{key}"]
            same = "though they were started with the same flags"
            words += ["--note", f"the servers report different values of {key} {same}"]
        say(f"compare.py ended with {compare.main(words)}")

    def compare_speculating(self) -> None:
        """As a user does it: compare.py starts both servers, without speculation and with it."""
        start_s = self.arguments.spec_start_s
        words = self.compared((self.left_s() - GRACE_S) / 2 - start_s)
        for letter, name in zip("ab", COMPARED, strict=True):
            server, environment = self.prepared(name, name == "patched")
            own = [f"{key}={value}" for key, value in environment.items() if os.environ.get(key) != value]
            words += [f"--{letter}-label", name, f"--{letter}-cmd", f"exec {shlex.join(['env', *own, *server])}"]
        words += ["--both-at-once", "--start-timeout", str(2 * start_s)]
        say(f"compare.py ended with {compare.main([*words, '--spec', shlex.join(flags(SPECULATION_OF_USERS))])}")

    def gate(self, label: str, name: str, server: str, *more: str) -> None:
        folder = self.arguments.out / "gates" / label
        words = [name, "--url", self.servers[server].url, "--prompts", "random", "--random-weights", "--timeout", "60"]
        say(f"{label}: {name} ended with {gates.main([*words, '--out', str(folder), *more])}")

    def gates(self) -> None:
        stock = self.servers["stock"].url
        oracle = ["--lengths", "16", "130", "700", "1000", "--new", "32"]
        self.guarded(self.gate, "oracle_stock_against_itself", "logit-oracle", "stock", "--reference", stock, *oracle)
        self.guarded(self.gate, "oracle_patched", "logit-oracle", "patched", "--reference", stock, *oracle)
        batch = ["--num-prompts", "3", "--new", "48", "--others", str(self.arguments.others)]
        for name in COMPARED:
            self.guarded(self.gate, f"batch_{name}", "batch-invariance", name, *batch)

    def start_speculating(self) -> None:
        for name, without in SPECULATING.items():
            self.start(name, without == "patched", SPECULATION)

    def speculation(self, name: str, without: str) -> None:
        self.ready(name, self.arguments.speculation_s)
        most = self.arguments.others + 1
        equality = ["--without", self.servers[without].url, "--num-prompts", str(most), "--new", "32"]
        equality += ["--concurrency", *(str(n) for n in speculation_equality.CONCURRENCIES if n <= most)]
        self.gate(f"speculation_{without}", "speculation-equality", name, *equality)

    def speculations(self) -> None:
        if not self.arguments.only_gates:
            if self.left_s() < 45:
                return say("speculation: not tried, no time left")
            self.start_speculating()
        for name, without in SPECULATING.items():
            self.guarded(self.speculation, name, without)

    def guarded(self, part, *arguments) -> None:
        try:
            part(*arguments)
        except ServerDied as error:
            say(f"{part.__name__}: {error}")
        except Exception:  # a part less is no reason to lose the others; the trace is in the log
            traceback.print_exc()

    def run(self) -> int:
        if self.arguments.spec:  # it ends its servers itself, within its own limits
            self.guarded(self.compare_speculating)
            return 0
        watchdog = threading.Timer(max(1.0, self.left_s() - GRACE_S), self.give_up)
        watchdog.daemon = True
        watchdog.start()
        try:
            for name in COMPARED:
                self.start(name, name == "patched")
            if self.arguments.only_gates:
                self.start_speculating()
            for name in COMPARED:
                self.ready(name, self.arguments.start_s)
            self.wait_for_the_gpu()
            if not self.arguments.only_gates and not self.gave_up:
                self.guarded(self.compare)
            if not self.arguments.only_compare and not self.gave_up:
                self.guarded(self.gates)
                self.guarded(self.speculations)
        except ServerDied as error:
            say(str(error))
            return 1
        finally:
            watchdog.cancel()
            self.finish()
        return 3 if self.gave_up else 0

    def give_up(self) -> None:
        """Without servers every part ends by itself and writes what it has; who does not is ended."""
        say(f"the limit of {self.arguments.limit_s:g} s is near: stopped, what is done is kept")
        self.gave_up = True
        last = threading.Timer(GRACE_S, os._exit, (3,))
        last.daemon = True
        last.start()
        self.stop_servers()

    def result_file(self, files: dict[str, Path]) -> dict:
        """The gates in the form of bench/results."""
        arguments, found = self.arguments, []
        for case, path in files.items():
            gate = json.loads(path.read_text())
            figures = {"verdict": gate["verdict"], **gate["figures"]}
            found += [row(case, gate["gate"], metric, value, issue=ISSUE) for metric, value in figures.items()]
        return {
            "device": device(),
            "date": time.strftime("%Y-%m-%d"),
            "commit": arguments.commit or commit(arguments.patch),
            "command": f"python3 tests/e2e/serving_stage.py --variant {arguments.variant} --mode {arguments.mode} "
            f"--choices '{arguments.choices}'{' --only-gates' if arguments.only_gates else ''}",
            "ceilings": {},
            "rows": found,
        }

    def stop_servers(self) -> None:
        for server in self.servers.values():
            server.stop()

    def finish(self) -> None:
        files = {path.parent.name: path for path in sorted((self.arguments.out / "gates").glob("*/*.json"))}
        if files:
            (self.arguments.out / "gates.md").write_text(markdown(files) + "\n")
            (self.arguments.out / "gates.json").write_text(json.dumps(self.result_file(files), indent=1) + "\n")
            print(markdown(files), flush=True)
        self.stop_servers()
        for name in self.servers:
            log = self.arguments.out / f"{name}.log"
            lines = log.read_text(errors="replace").splitlines()
            log.write_text("\n".join(lines[:40] + ["..."] + lines[-160:] if len(lines) > 200 else lines) + "\n")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--harness", type=Path, default=Path(os.environ.get("E2E_HARNESS", REPO / ".e2e/tools")))
    parser.add_argument("--patch", type=Path, default=REPO / "build", help="the built folder that users mount")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "serving")
    parser.add_argument("--models", type=Path, default=Path("/tmp/models_serving"))
    parser.add_argument("--variant", default="flash6h", help="flash6h for the gates; flash43e64 for true step times")
    parser.add_argument("--ports", type=int, nargs=len(NAMES), default=[30100, 32100, 34100, 36100], help="far apart")
    parser.add_argument("--gpus", nargs=len(NAMES), help="which GPU each server has: stock, patched, and speculating")
    parser.add_argument("--commit", help="of the patch, where this is a copy without git")
    parser.add_argument("--mode", default="ops", choices=("ops", "seams"))
    parser.add_argument(
        "--choices",
        help="DSV4_SM120_SET of the patched server; for the gates wo_a=off, since dummy weights fill our E4M3 wo_a "
        "with other numbers than stock's bf16",
    )
    parser.add_argument("--matrix", default="quick")
    parser.add_argument("--cells", default=CELLS, help="words of cell names, comma-separated")
    parser.add_argument("--context", type=int, default=40960, help="tokens; deeper cells need more")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--others", type=int, default=31, help="requests beside one, of the gates that ask many at once"
    )
    parser.add_argument("--no-radix", dest="radix", action="store_false", help="without the prefix cache")
    parser.add_argument("--limit-s", type=float, default=240)
    parser.add_argument("--start-s", type=float, default=110, help="that the two servers may take to start")
    parser.add_argument("--speculation-s", type=float, default=60, help="that a speculating server may take to start")
    parser.add_argument("--wait-for", type=Path, help="measure only when this file exists")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--only-compare", action="store_true")
    only.add_argument("--only-gates", action="store_true")
    only.add_argument("--spec", action="store_true", help="only compare, without speculation and with EAGLE 3/1/4")
    parser.add_argument("--cards", type=int, default=1, help="of a server")
    parser.add_argument("--spec-start-s", type=float, default=60, help="that both servers may take to start, of --spec")
    arguments = parser.parse_args(argv)
    if arguments.choices is None:
        arguments.choices = "" if arguments.only_compare or arguments.spec else "wo_a=off"
    return arguments


def main() -> int:
    arguments = parse(sys.argv[1:])
    for name in ("harness", "patch", "out", "models"):
        setattr(arguments, name, getattr(arguments, name).resolve())
    for path in (arguments.harness / "run_engine.py", arguments.patch / "sitecustomize.py"):
        if not path.exists():
            raise SystemExit(f"serving_stage: {path} does not exist (--harness, --patch)")
    arguments.out.mkdir(parents=True, exist_ok=True)
    return Stage(arguments).run()


if __name__ == "__main__":
    sys.exit(main())
