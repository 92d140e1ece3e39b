"""run_stage.py --ranks-a-card: an engine over more ranks than there are cards.

What four or eight cards compute, asked of one or two: bits and texts, every call of a rank's own widths, what an engine
refuses. By CUDA's multi-process service a card's processes run side by side, each on its share of the multiprocessors
(four of an H200: 32), so kernels that wait for another rank's find it running. Without that service cards take turns
of milliseconds. NCCL takes several ranks of a card from 2.30 on. A step's time there says nothing about cards of one's
own, so nothing is timed; of the way between the cards it says that the protocols hold, not that a bus carries them.

What agrees is shown; what does not needs cards of its own. The service caps how many multiprocessors a rank has and
does not part them, so ranks have the same ones. A kernel that begins only as a whole (our boundary of many rows, a
cooperative launch) then waits for a place that the sums of a rank ahead hold, and those for it. On an H200, four ranks,
engines stood still three times; that boundary with sums of 725 rows alone had not one round in 8 s, with the two
launches that `mhc` takes where processes share a card 16,200 in 5; with them both engines of all 43 layers answered
all. Eight ranks have no sums of ours, on one card nor on two: the driver has no memory for the probe's processes beside
them, with 116 GB of the card's free, so such an engine's bits say nothing.

How many multiprocessors a rank has matters to others, too: with 46 of an H200 (36%) torch.mm and torch.bmm of 257 rows
and more, alone in their process, had wrong numbers and NaN in nearly every call (torch 2.11, cuBLAS of CUDA 13.0), with
14, 32, 66 and 132 none; our kernels none at any of them.
"""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

PLUGIN = Path(__file__).resolve().parent / "shared_cards_plugin"
VARIABLE = "E2E_RANKS_A_CARD"
RANKS = (1, 2, 4, 8)
CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
KEY = "ranks_a_card"  # of a stage's file, where they share


def folders(work):
    return {PIPES: str(work / "mps"), LOGS: str(work / "mps_log")}


def environment(arguments, path):
    """Of an engine. path: its PYTHONPATH so far."""
    if (ranks := arguments.ranks_a_card) == 1:
        return {}
    return {
        **folders(arguments.work),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // ranks),
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_MAX_NCHANNELS": "4",  # blocks that wait for other ranks', and so keep theirs from a place
        "PYTHONPATH": os.pathsep.join(filter(None, (str(PLUGIN), path))),
        VARIABLE: str(ranks),
    }


def why_not(cases, ranks):
    """Why these cases cannot be asked of ranks that share a card, or None."""
    if timed := [case.name for case in cases if case.is_timed and ranks > 1]:
        return f"--ranks-a-card: a time on a card that ranks share says nothing: {', '.join(timed)}"
    if ranks > 1 and not shutil.which(CONTROL):
        return f"--ranks-a-card: {CONTROL} is not on PATH: it belongs to NVIDIA's driver"
    return None


@contextlib.contextmanager
def service(arguments):
    """The service of all cards, for as long as engines run; its clients are those that know its folder, so nobody
    else's processes. It must see all cards: a client's CUDA_VISIBLE_DEVICES counts those that it sees."""
    if arguments.ranks_a_card == 1:
        yield
        return
    for folder in folders(arguments.work).values():
        Path(folder).mkdir(parents=True, exist_ok=True)
    mine = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    control = {"env": mine | folders(arguments.work), "timeout": 60}
    subprocess.run([CONTROL, "-d"], check=True, **control)
    try:
        yield
    finally:
        subprocess.run([CONTROL], input=b"quit\n", check=False, **control)


def ranks_of(stages):
    """How many ranks shared a card, in all of these files."""
    found = {stage.get(KEY, 1) for stage in stages}
    if len(found) > 1:
        raise SystemExit(f"collect: files of one number of ranks a card, not of {sorted(found)}: one call for each")
    return found.pop()


def told(stages, table):
    """A table whose implementations and runs say that ranks shared cards."""
    if (ranks := ranks_of(stages)) == 1:
        return table
    words = f", {ranks} ranks a card"
    rows = [one | {"impl": one["impl"] + words} for one in table["rows"]]
    return table | {"rows": rows, "runs": {name + words: run for name, run in table["runs"].items()}}
