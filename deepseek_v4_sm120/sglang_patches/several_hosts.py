"""What the ranks of other hosts run (--nnodes): told where one of them is without us, or has another build or settings.

Each rank computes the same streams and draws the same tokens for itself, so all have to run the same code. On one host
a server's processes inherit that (patching/verdict.py). Over several each rank leaves in the store by which the ranks
found each other what it runs, and looks for the others' where all make the tensor-parallel group. A rank without us
leaves nothing, takes no part and is waited for no longer than WAIT_S; nothing is asked of the cards.
"""

from __future__ import annotations

import json
import time

import torch

import deepseek_v4_sm120
from deepseek_v4_sm120 import patching
from deepseek_v4_sm120.patching import report

NOTE = "several_hosts"
WAIT_S, LOOK_S = 20.0, 0.05  # all come here at once, behind an exchange of SGLang's
ALIKE = "all of them run this build of deepseek_v4_sm120 with these settings"
REMEDY = "answers may be wrong, and ranks part and hang: mount the same folder everywhere, with the same settings"


def compare(rank: int, ranks: int, store) -> str:
    """What the server's ranks have of this rank's, in words, told in the log where it is not the same on all. store:
    torch.distributed's, which all of them have."""
    own = _what_runs()
    store.set(_key(rank), json.dumps(own))
    told = _told(ranks, store)
    others = [_differing(number, theirs, own) for number, theirs in enumerate(told) if theirs not in (None, own)]
    without = [str(number) for number, theirs in enumerate(told) if theirs is None]
    if without:
        of = "rank" if len(without) == 1 else "ranks"
        others.insert(0, f"{of} {', '.join(without)} of {ranks} without deepseek_v4_sm120, or with DSV4_SM120=off")
    text = f"{'; '.join(others)}. {REMEDY}" if others else ALIKE
    report.add_note(NOTE, lambda: f"{NOTE}: {text}")
    if others:
        report.warn(f"deepseek_v4_sm120: {NOTE}: {text}")
    return text


def ask() -> None:
    """For all ranks of the server, which make their groups at the same time."""
    store = torch.distributed.distributed_c10d._get_default_store()
    compare(torch.distributed.get_rank(), torch.distributed.get_world_size(), store)


def _key(rank: int) -> str:
    return f"deepseek_v4_sm120 of rank {rank}"


def _told(ranks: int, store) -> list[dict | None]:
    """What each rank has left there; None: nothing in WAIT_S."""
    end, keys = time.monotonic() + WAIT_S, [_key(rank) for rank in range(ranks)]
    while not store.check(keys) and time.monotonic() < end:
        time.sleep(LOOK_S)
    return [json.loads(store.get(key)) if store.check([key]) else None for key in keys]


def _what_runs() -> dict[str, object]:
    """JSON-able; of a checkout there is no build."""
    engine = patching.active_engine()
    profile = engine.profile.describe() or {}
    return {
        "release": deepseek_v4_sm120.__version__,
        "build": engine.build,
        engine.host: engine.version,
        "patches": sorted(engine.in_place()),
        "DSV4_SM120_SET": dict(sorted(engine.settings.choices.items())),
        "DSV4_SM120_SHADOW": engine.settings.shadow,
        "DSV4_SM120_PROFILE": {name: profile.get(name) for name in ("winners", "left_out")},
    }


def _differing(rank: int, theirs: dict, own: dict) -> str:
    """The first that is another one there."""
    name = next(name for name in {**own, **theirs} if own.get(name) != theirs.get(name))
    there, here = theirs.get(name), own.get(name)
    if name == "patches":
        there, here = (sorted({*some}.difference(others)) for some, others in ((there, here), (here, there)))
        return f"rank {rank} has {', '.join(there) or 'no others'} in place, and not {', '.join(here) or 'fewer'}"
    return f"rank {rank} has another {name}: {str(there)[:80]}, here {str(here)[:80]}"
