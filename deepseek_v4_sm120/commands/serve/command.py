"""`serve`: the planned server as a child of this process. Its log goes through but for keys, stages are named."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from deepseek_v4_sm120.commands import speculation, streaming_session
from deepseek_v4_sm120.commands.console import CommandError, encodable, temporary_folder
from deepseek_v4_sm120.commands.disclosure import HIDDEN, printable, redacted
from deepseek_v4_sm120.commands.doctor import facts, nvidia_smi, visible
from deepseek_v4_sm120.commands.doctor.http_get import get
from deepseek_v4_sm120.commands.ending import Terminated, as_interrupts
from deepseek_v4_sm120.commands.plan import choices, host_cache, hosts, launch, stages
from deepseek_v4_sm120.commands.plan import command as plan_command
from deepseek_v4_sm120.commands.plan.request import Flag, Plan
from deepseek_v4_sm120.settings import REPORT, read_choices

PACKAGE_FOLDER = Path(__file__).resolve().parents[3]
STOP_TIMEOUT_S = 30
LOOPBACK = ("127.0.0.1", "::1", "localhost")
# by which SGLang takes other cards than the first ones, or other weights
OTHER_CARDS = {"--base-gpu-id", "--gpu-id-step", "--model-path", "--model", "--cpu-offload-gb"}.union(
    *speculation.SIZES
)
OF_HOSTS = {"--nnodes", "--node-rank", "--dist-init-addr", "--nccl-init-addr"}
SLOTS, GRAPHS = "--max-running-requests", "--cuda-graph-max-bs"  # the second with -decode from 0.5.14 on
CHOICES = "DSV4_SM120_SET"  # of which the plan's names are added to the user's
CONFIG = "--config"  # of a file whose arguments stand in front of these
OTHER_DRAFTER = "--speculative-draft-model"  # with -path, too: weights of another folder
LAST_WORDS_S = 5  # to read what the server wrote while it stopped
POLL_S, STILL_S = 0.5, 30.0
PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when the thread that started it ends
# words of SGLang's log -> the stage that begins there
STAGES = (
    ("Load weight begin", "loading weights"),
    ("Loading safetensors", "loading weights"),
    ("Load weight end", "weights are loaded"),
    ("Memory pool end", "the KV cache is allocated"),
    # not "autotune" alone: SGLang logs all its arguments, and one of them has that word
    ("FlashInfer autotune with", "tuning kernels"),
    ("Autotuning process starts", "tuning kernels"),
    ("CUDA graph begin", "capturing CUDA graphs"),
    ("CUDA graph end", "graphs are captured"),
    ("Uvicorn running", "warming up"),
)
# words by which its log tells that a card's memory, not a KV cache's, is too little -> what to do, by the stage
POOLS = ("Not enough memory. Please try", "leave no GPU memory for the KV cache", "leaves no room for the full")
SHORT = ("CUDA out of memory", "CUDA error: out of memory", "cudaErrorMemoryAllocation")  # torch's, ours
SHORT += ("[CUDA]: out of memory", "'out of memory'", "CUBLAS_STATUS_ALLOC_FAILED")  # Triton's, NCCL's, cuBLAS'
NO_POOL = (
    "above 0.93 of --mem-fraction-static ranks were lost hours later: fewer --max-running-requests or "
    "--swa-prefix-tails, no speculation, or more cards"
)
ADVICE = {
    "starting": "is another process on the cards?",
    "loading weights": "is another process on the cards? Else more cards",
    "capturing CUDA graphs": "a --mem-fraction-static that is 0.02 less, or DSV4_SM120_SET=prefill_graphs=off",
}
SERVING = "a --mem-fraction-static that is 0.02 less, or half the --chunked-prefill-size"
READY = "The server is fired up and ready to roll"  # its own word, where nobody is heard at the address, as behind TLS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [PLAN'S ARGUMENTS] [--host HOST] [--port PORT] [--dry-run] [-- SGLANG'S ARGUMENTS]"
    parser.epilog = "Behind --: arguments for sglang.launch_server; they win."
    plan_command.add_request_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=30000, help="port to listen on (default: 30000)")
    parser.add_argument("--node-rank", type=int, help="with --nodes: this host's number, 0 for the first")
    parser.add_argument("--dry-run", action="store_true", help="print the command and stop")


def run(arguments: argparse.Namespace) -> int:
    """arguments.extra: what stands behind --."""
    extra = arguments.extra
    host, port = _address(arguments.host, str(arguments.port), "")
    check_hosts(arguments, extra)
    check_stages(arguments.pp_size, extra)
    plan = launch.make(plan_command.request_of(arguments))
    if not plan.fits:
        raise CommandError(plan_command.why_not(plan))
    host_cache.refuse(plan, extra, os.environ)
    if arguments.nodes > 1:
        plan = hosts.of_host(plan, arguments.node_rank)
    words, dropped = command_line(plan, host, port, extra)
    own_host, own_port = _last(extra, "--host"), _last(extra, "--port")  # they win, so that is where it will answer
    host = host if own_host is None else own_host
    host, port = _address(host, str(port) if own_port is None else own_port, " behind --")
    added = environment(plan, os.environ, plan.request.profile)
    tolerated = unsafe(plan, words, {**os.environ, **added})
    for name in dropped:
        _say(f"[serve] yours instead of the plan's: {name}")
    if CONFIG in extra:
        _say(f"[serve] {CONFIG}: its file is not read here; stages, speculation and the like of it nobody has planned")
    taken_cards, gpus = cards_of(words), plan.request.gpus
    if taken_cards != gpus:
        _say(
            f"[serve] with your own arguments the server takes {taken_cards} card(s), the plan is for {gpus}: its "
            f"memory and flags are those of {gpus}; --gpus in front of -- plans others"
        )
    for text in (*plan.request.profile_told, *tolerated, *choices.in_vain(plan.request)):
        _say(f"[serve] {text}")
    shown = " ".join(f"{name}={shlex.quote(value)}" for name, value in redacted(added).items())
    line = shlex.join(redacted(words)).replace(f"'{HIDDEN}'", HIDDEN)
    _say(printable(f"[serve] {shown} {line}"))
    if arguments.dry_run:
        return 0
    ratio = None if taken_cards != gpus else host_cache.asked_ratio(plan, extra)
    problem = host_cache.too_little(plan, ratio, host_cache.available_bytes(Path("/")))
    if problem is not None:
        raise CommandError(problem)
    _check_machine(arguments.gpus if taken_cards == gpus else taken_cards // arguments.nodes, host, port)
    for text in [] if OTHER_CARDS.intersection(word.partition("=")[0] for word in extra) else taken(plan):
        _say(f"[serve] {text}")
    if host in LOOPBACK and facts.is_container(Path("/")):
        _say(f"[serve] nobody outside of this container reaches {host}: --host 0.0.0.0 listens for all")
    is_secure = _last(extra, "--ssl-certfile") is not None
    return supervise(words, {**os.environ, **added}, _url(host, port, "https" if is_secure else "http"))


def check_hosts(arguments: argparse.Namespace, extra: list[str]) -> None:
    """CommandError where a server of several hosts is asked for in a way that its plan would be of another one."""
    own = {word.partition("=")[0] for word in extra}
    if said := own.intersection(OF_HOSTS):
        raise CommandError(
            f"{', '.join(sorted(said))} behind --: a plan is for so many hosts; say in front of it "
            "--gpus <cards of one host> --nodes N --node-rank K --dist-init-addr <first host>:PORT"
        )
    if arguments.nodes == 1:
        if arguments.node_rank is not None:
            raise CommandError("--node-rank is for several hosts: --nodes")
        return
    if arguments.node_rank is None or not 0 <= arguments.node_rank < arguments.nodes:
        raise CommandError(
            f"--nodes {arguments.nodes} wants this host's number: --node-rank 0 to {arguments.nodes - 1}"
        )
    if arguments.dist_init_addr is None:
        raise CommandError(f"--nodes {arguments.nodes} wants --dist-init-addr: the first host's address and a port")


def check_stages(planned: int, extra: list[str]) -> None:
    """CommandError where stages are asked for in a way that the plan would be of another server."""
    if (said := parallel(extra, pp_size=planned).pp_size) != planned:
        raise CommandError(
            f"{stages.FLAG} behind --: a plan is for so many stages, which divide its cards; say in front of it "
            f"--gpus <all cards> {stages.FLAG} {said}"
        )


def parallel(words: list[str], **unsaid: int) -> argparse.Namespace:
    """What SGLang's argparse makes of the sizes in its command line; unsaid: what those are that it does not say, 1."""
    parser = speculation.Parser(add_help=False)
    speculation.add_sizes(parser)
    parser.add_argument("--dp-size", "--data-parallel-size", type=int, default=1)
    parser.add_argument("--enable-dp-attention", action="store_true")
    parser.set_defaults(**unsaid)
    return parser.parse_known_args(words)[0]


def cards_of(words: list[str]) -> int:
    """So many a server takes that is started so, in all its hosts: data parallel attention divides those of tensors."""
    found = parallel(words)
    return (found.tp_size or 1) * (found.pp_size or 1) * (1 if found.enable_dp_attention else found.dp_size or 1)


def _address(host: str, port: str, where: str) -> tuple[str, int]:
    """(host without brackets, port); CommandError for what no server can listen on."""
    name = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not name or not all(c.isalnum() or c in ".-:_%" for c in name) or name.startswith("-"):
        raise CommandError(f"--host{where} must be an address or a name of this machine, got {host!r}")
    if not (port.isascii() and port.isdigit() and 1 <= int(port[:6]) <= 65535):
        raise CommandError(f"--port{where} must be 1 to 65535, got {port}")
    return name, int(port)


def _last(words: list[str], flag: str) -> str | None:
    """The value that a command line gives a flag, None where it does not."""
    found = None
    for i, word in enumerate(words):
        if word == flag:
            found = words[i + 1] if i + 1 < len(words) else ""
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


def command_line(plan: Plan, host: str, port: int, extra: list[str]) -> tuple[list[str], list[str]]:
    """(words, planned flags that the user's own replace)."""
    own = {word.partition("=")[0] for word in extra if word.startswith("--")}
    slots, batches = _last(extra, SLOTS), plan.request.stages
    kept = [_with_slots(flag, slots, batches) for flag in plan.flags if flag.name not in own]
    dropped = [flag.name for flag in plan.flags if flag.name in own]
    words = [sys.executable, "-m", "sglang.launch_server", "--host", host, "--port", str(port)]
    words += [word for flag in kept for word in (flag.name, flag.value) if word]
    return words + extra, dropped


def _with_slots(flag: Flag, slots: str | None, batches: int) -> Flag:
    """Graphs for as many requests as the user lets run, steps of more are several times slower without; and batches of
    stages that hold as many."""
    is_whole = slots is not None and slots.isascii() and slots.isdigit() and int(slots[:6]) > 0
    if not is_whole or not flag.name.startswith((GRAPHS, stages.BATCH)):
        return flag
    return replace(flag, value=slots if batches == 1 else str(math.ceil(int(slots[:6]) / batches)))


def unsafe(plan: Plan, words: list[str], environ: Mapping[str, str]) -> list[str]:
    """What is known to go wrong with what this very command line starts, and tolerated; CommandError otherwise."""
    r = plan.request
    found = speculation.of_command(words, environ, r.model.dspark_block)
    if found is not None and r.model.no_drafter and not any(word.startswith(OTHER_DRAFTER) for word in words):
        raise CommandError(f"--speculative-algorithm: {r.model.name} has nothing to draft with: {r.model.no_drafter}")
    tolerated = speculation.refuse_if_unsafe(r.version, found, r.replaced, insist=r.insist, release=r.sglang)
    return tolerated + streaming_session.refuse_if_asked_for(words, r.insist)


def environment(plan: Plan, environ: Mapping[str, str], profile: str | None) -> dict[str, str]:
    """What is added to the environment; of the plan's variables those that the user has not set."""
    behind = [p for p in environ.get("PYTHONPATH", "").split(os.pathsep) if p and Path(p).resolve() != PACKAGE_FOLDER]
    added = {"PYTHONPATH": os.pathsep.join([str(PACKAGE_FOLDER), *behind])}
    planned = {flag.name: flag.value for flag in plan.environment}
    planned[REPORT] = str(Path(temporary_folder(), f"dsv4-{os.getpid()}"))
    added |= {name: value for name, value in planned.items() if name not in environ and name != "PYTHONPATH"}
    if CHOICES in environ and CHOICES in planned:
        own = read_choices(environ[CHOICES])
        added[CHOICES] = ",".join(f"{name}={value}" for name, value in (read_choices(planned[CHOICES]) | own).items())
    if profile is not None:  # the plan has looked at it
        added["DSV4_SM120_PROFILE"] = str(Path(profile).resolve())
    return added


def _check_machine(num_gpus: int | None, host: str, port: int) -> None:
    if importlib.util.find_spec("sglang") is None:
        raise CommandError(f"SGLang is not installed for {sys.executable}; `plan` prints a docker command")
    gpus = nvidia_smi.read(facts.run_command)
    if not gpus.gpus:
        raise CommandError(f"no GPU to serve on: {gpus.problem}")
    if num_gpus is not None and len(gpus.gpus) < num_gpus:
        raise CommandError(f"{num_gpus} cards are asked for, but this machine has {len(gpus.gpus)}")
    if num_gpus is not None and 0 < len(left := visible.names(os.environ)) < num_gpus:
        raise CommandError(f"{num_gpus} cards are asked for, but {visible.VISIBLE}={','.join(left)} leaves {len(left)}")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CommandError(f"cannot listen on {_url(host, port)}: {reason}") from error


def taken(plan: Plan) -> list[str]:
    """A sentence for each card of the plan that has no room for its weights now, as beside another server; of several
    kinds CUDA has an order of its own."""
    gpus, needed = nvidia_smi.read(facts.run_command).gpus, plan.weights / (1 << 20)
    cards = (
        plan_command.cards(gpus, os.environ)[: plan.request.gpus_of_host]
        if len({gpu.name for gpu in gpus}) == 1
        else []
    )
    return [
        f"GPU {gpu.index} has {gpu.memory_free} of {gpu.memory_total} MiB free, for {needed:.0f}"
        f" of weights: is another server on it, or one that just ends? {visible.VISIBLE} chooses others"
        for gpu in cards
        if gpu is not None and gpu.memory_total and gpu.memory_free < needed
    ]


def _url(host: str, port: int, scheme: str = "http") -> str:
    """Where the server can be reached from this machine."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{reachable}]:{port}" if ":" in reachable else f"{scheme}://{reachable}:{port}"


# ---- the child

_writing = threading.Lock()


def _say(text: str) -> None:
    """A whole line at once: the server's log and our own words come from two threads. Colours of the log stay."""
    line = encodable(redacted(text), sys.stdout)
    with _writing:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def supervise(words: list[str], environ: Mapping[str, str], url: str) -> int:
    """Run the server until it ends or a signal of ending.ENDS comes; returns its exit status, 0 after a clean stop."""
    libc, us = ctypes.CDLL(None), os.getpid()

    def end_with_us() -> None:
        """Of a `serve` that is killed nothing else tells the server, which would keep the cards and the port."""
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != us:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        child = subprocess.Popen(
            words,
            preexec_fn=end_with_us,  # no other thread runs yet
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="backslashreplace",
            start_new_session=True,
        )
    except OSError as error:
        raise CommandError(f"{words[0]} does not start: {error.strerror}") from error
    log = _Log(child)
    with as_interrupts():
        try:
            is_up = _wait_until_healthy(child, log, url)
            if is_up:
                _show_status(environ, url)
            code = child.wait()
            log.join(LAST_WORDS_S)
            _say(f"[serve] the server ended with status {code}{'' if is_up else ' before it answered'}")
            if code and log.lacked is not None:
                _say(f"[serve] a card's memory was too little {log.lacked}; `plan` says what fits")
            return 1 if code else 0
        except KeyboardInterrupt as told:
            _end(child, log, None if isinstance(told, Terminated) else STOP_TIMEOUT_S)
            log.join(LAST_WORDS_S)
            return 0
        finally:
            if child.poll() is None:
                stop(child)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # workers that outlived a server that died


def _end(child: subprocess.Popen, log: _Log, limit_s: float | None) -> None:
    """What it says goes to a terminal that may be gone. Told again, it does not wait any longer."""
    log.pass_on(f"[serve] stopping{'' if limit_s else ' when the requests that run are answered; again: at once'}")
    why = "told again"
    try:
        if stop(child, limit_s):
            return
        why = f"still there after {limit_s:g} s"
    except KeyboardInterrupt:
        stop(child, 0)
    log.pass_on(f"[serve] {why}: killed")


def stop(child: subprocess.Popen, limit_s: float | None = STOP_TIMEOUT_S) -> bool:
    """SIGTERM to the server, which answers what it has, then ends its workers; what is left of its session after the
    limit (None: of who stops us) is killed. Whether the server ended by itself."""
    has_ended = True
    with contextlib.suppress(ProcessLookupError):
        child.terminate()
    try:
        child.wait(limit_s)
    except subprocess.TimeoutExpired:
        has_ended = False
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    return has_ended


class _Log(threading.Thread):
    """Passes the server's lines on and names the stages that begin in them."""

    def __init__(self, child: subprocess.Popen):
        super().__init__(daemon=True)
        self.child, self.stage, self.started = child, "starting", time.monotonic()
        self.is_heard, self.is_ready, self.lacked = True, False, None  # of memory: what to do
        self.start()

    def run(self) -> None:
        for line in self.child.stdout:  # to the end, heard or not: a server whose words nobody takes would stop
            self.pass_on(line.rstrip("\n"))
            self.is_ready = self.is_ready or READY in line
            self.lacked = self.lacked or self._lacks(line)
            stage = next((name for words, name in STAGES if words.lower() in line.lower()), self.stage)
            if stage != self.stage:
                self.stage = stage
                self.pass_on(f"[serve] {time.monotonic() - self.started:5.0f} s  {stage}")

    def _lacks(self, line: str) -> str | None:
        """Where a card's memory is too little, and what to do."""
        if any(words in line for words in POOLS):
            return f"for the KV cache: {NO_POOL}"
        if any(words in line for words in SHORT):
            return f"while serving: {SERVING}" if self.is_ready else f"{self.stage}: {ADVICE.get(self.stage, SERVING)}"
        return None

    def pass_on(self, text: str) -> None:
        try:
            if self.is_heard:
                _say(text)
        except BrokenPipeError:  # `| head`
            self.is_heard = False
        except OSError:  # a full disk, a terminal that is gone: this line is lost
            pass


def _wait_until_healthy(child: subprocess.Popen, log: _Log, url: str) -> bool:
    """Whether it is up; False where it has ended. A first start may take hours, in which SGLang says nothing: it
    fetches the weights, or all ranks read them from a slow disk."""
    told = time.monotonic()
    while child.poll() is None:
        is_ready = log.is_ready  # before it is asked, which then answers
        with contextlib.suppress(CommandError):  # nobody there yet, or still warming up
            if get(f"{url}/health") is not None:
                _say(f"[serve] {time.monotonic() - log.started:5.0f} s  answers at {url}")
                return True
        if is_ready:
            _say(f"[serve] {time.monotonic() - log.started:5.0f} s  is ready, as it says; not seen at {url}")
            return True
        if time.monotonic() - told > STILL_S:
            told = time.monotonic()
            _say(f"[serve] {told - log.started:5.0f} s  still {log.stage}")
        time.sleep(POLL_S)
    return False


def _show_status(environ: Mapping[str, str], url: str) -> None:
    subprocess.run([sys.executable, "-m", "deepseek_v4_sm120", "status"], env=environ, check=False)
    # a shell without job control starts `serve &` with SIGINT ignored: that Ctrl-C is meant for others
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    stops = f"`kill {os.getpid()}`" if ignored else "Ctrl-C"
    reports = f"{REPORT}={shlex.quote(environ[REPORT])} " if environ.get(REPORT) else ""
    doctor = f"{reports}python3 -m deepseek_v4_sm120 doctor --url {url}"
    _say(f"[serve] `{doctor}` names what is slow; {stops} stops the server")
