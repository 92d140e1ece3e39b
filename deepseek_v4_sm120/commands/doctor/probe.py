"""Run as a process of its own: what only a GPU can tell. Prints lines of JSON; whoever starts it sets a time limit.

Peer copies are reported as possible by drivers on machines where nothing arrives, or where the copy never ends; so a
pattern is written on one card, copied, read back on the other and compared. Links sleep at rest, so the generation is
read while host copies run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from deepseek_v4_sm120.commands.doctor import nvidia_smi
from deepseek_v4_sm120.commands.doctor.facts import run_command

PEER_BYTES = 64 << 20
LOAD_SECONDS = 2.0
TIMED_COPIES = 8
TIMES, TIMES_S = 5, 0.5  # once more while all before took no longer: of eight cards 56 pairs are asked
NO_SUMS = "--no-sums"


def peers(torch) -> list[dict]:
    """Each ordered pair of cards: what is reported, whether the data arrives, and how fast."""
    count = torch.cuda.device_count()
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    named = numbers(torch, nvidia_smi.read(run_command).gpus)
    return [_pair(torch, i, j) | {"from": named[i], "to": named[j]} for i, j in pairs]


def numbers(torch, gpus: Sequence[nvidia_smi.Gpu]) -> list[int]:
    """nvidia-smi's number of each card that torch sees: CUDA_VISIBLE_DEVICES leaves some out, and CUDA counts the
    fastest first. What nvidia-smi does not name so, such as a MIG slice, has torch's."""
    known = {(gpu.uuid or "").removeprefix("GPU-"): gpu.index for gpu in gpus}
    seen = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    return [known.get(uuid, i) for i, uuid in enumerate(seen)]


def _pair(torch, i: int, j: int) -> dict:
    reported = torch.cuda.can_device_access_peer(i, j)
    source = torch.arange(PEER_BYTES // 4, dtype=torch.int32, device=f"cuda:{i}") * 2654435761 + i
    target = torch.zeros_like(source, device=f"cuda:{j}")
    target.copy_(source)
    torch.cuda.synchronize(i)
    torch.cuda.synchronize(j)
    moved = bool(torch.equal(target.cpu(), source.cpu()))

    def copies() -> None:
        for _ in range(TIMED_COPIES):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(i)
        torch.cuda.synchronize(j)

    rate = TIMED_COPIES * PEER_BYTES / fastest_s(copies) / 1e9
    return {"reported": reported, "moved": moved, "gbs": round(rate, 2)}


def fastest_s(call: Callable[[], None]) -> float:
    """Seconds of the fastest of TIMES calls, fewer of slow ones: what a server's own work on the cards takes away is no
    link's."""
    found = []
    while len(found) < TIMES and sum(found) < TIMES_S:
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def links(torch) -> dict[str, list[int]]:
    """Generation and width of the link of every card that torch sees while host copies run, by nvidia-smi's index."""
    count = torch.cuda.device_count()
    host = torch.empty(32 << 20, dtype=torch.uint8, pin_memory=True)
    buffers = [torch.empty(32 << 20, dtype=torch.uint8, device=f"cuda:{i}") for i in range(count)]
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    end, question = time.monotonic() + LOAD_SECONDS, None
    while question is None or question.poll() is None:
        if question is None and time.monotonic() > end - LOAD_SECONDS / 2:  # the links are awake by then
            question = subprocess.Popen(["nvidia-smi", "-q", "-x"], stdout=pipe, stderr=nothing, text=True)
        for buffer in buffers:
            buffer.copy_(host, non_blocking=True)
        for i in range(count):
            torch.cuda.synchronize(i)
        if time.monotonic() > end + 10:
            break
    text = question.communicate()[0]
    smi = nvidia_smi.read(lambda command: text if "-x" in command else run_command(command))
    busy = numbers(torch, smi.gpus)  # others sleep
    known = [g for g in smi.gpus if g.index in busy and None not in (g.link_generation[0], g.link_width[0])]
    return {str(g.index): [g.link_generation[0], g.link_width[0]] for g in known}


def sums(torch) -> dict | None:
    """What a server's probe of all_reduce would find between as many of the cards as it can take; None: too few, or no
    kernels. Its ranks are threads here, their processes are as a server's."""
    from deepseek_v4_sm120.commands.plan.models import FLASH
    from deepseek_v4_sm120.ops import all_reduce_probe, all_reduce_sizes
    from deepseek_v4_sm120.ops.shared import extension
    from deepseek_v4_sm120.specs.all_reduce import Meeting

    ranks = max((count for count in all_reduce_sizes.RANKS if count <= torch.cuda.device_count()), default=0)
    if not ranks or extension.problem() is not None:
        return None
    meeting = Meeting(ranks, timeout=all_reduce_probe.WHOLE_S)
    with ThreadPoolExecutor(ranks) as pool:

        def ask(rank: int):
            return all_reduce_probe.probe(rank, ranks, rank, meeting.gather(rank), hidden=FLASH.hidden)

        return list(pool.map(ask, range(ranks)))[0].as_dict()


def main() -> int:
    import torch

    if not torch.cuda.is_available():
        print(json.dumps({"problem": f"torch {torch.__version__} sees no CUDA device"}))
        return 1
    print(json.dumps({"links": links(torch), "peers": peers(torch)}), flush=True)
    if NO_SUMS not in sys.argv:
        print(json.dumps({"sums": sums(torch)}))
    return 0


def run(python: str, timeout_s: float, with_sums: bool = True) -> tuple[dict | None, str | None]:
    """(what the probe found, why it found nothing, or not all)."""
    words, problem = [python, "-m", "deepseek_v4_sm120.commands.doctor.probe"], None
    words += [] if with_sums else [NO_SUMS]
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=timeout_s)
        out, err = done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        out, err = ((text or b"").decode(errors="replace") for text in (error.stdout, error.stderr))
        problem = f"the copies did not end within {timeout_s:.0f} s: suspect peer copies, ACS"
    except OSError as error:
        return None, f"{python} does not run: {error}"
    found = {}
    for line in out.splitlines():
        found |= json.loads(line) if line.startswith("{") else {}
    if "problem" in found:
        return None, found["problem"]
    if not found and problem is None:
        return None, f"the probe failed: {(err.strip().splitlines() or ['no output'])[-1][:200]}"
    return {"links": {}, "peers": [], "sums": None} | found, problem


if __name__ == "__main__":
    sys.exit(main())
