"""What the ranks of other hosts run (--nnodes): a server stops where one of them is without us, or has other code,
SGLang or settings.

Each rank computes the same streams, draws the same tokens and lets in the same requests for itself, so all have to run
the same code: where one forgets a grammar that another still has, they are in different exchanges, and wait for each
other for ever. On one host a server's processes inherit that (patching/verdict.py). Over several each rank leaves in
the store by which the ranks found each other what it runs, and looks for the others': where all make the
tensor-parallel group, or, of a server that asks for no custom sums there, in front of the layers. A rank without us
leaves nothing, takes no part and is waited for no longer than that; nothing is asked of the cards. What was found is
told at once, and stops a rank in front of its layers, as a patch does that does not fit.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import time
from importlib.util import find_spec
from pathlib import Path

import torch

import deepseek_v4_sm120
from deepseek_v4_sm120 import patching
from deepseek_v4_sm120.ops.shared import extension
from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.patching.spec import PatchError
from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.names import CONTEXT, SERVER_ARGS

NOTE = "several_hosts"
# where the group is made all come at once, behind an exchange of SGLang's; to the layers by way of imports, from disks
WAIT_S, LAYERS_WAIT_S, LOOK_S = 20.0, 180.0, 0.05
LAST_LOOK_S = 5.0  # the store ends with the process that has it, which is to stop behind those who look there
ALIKE = "all of them run this code of deepseek_v4_sm120 with these settings"
REMEDY = "answers would be wrong, and ranks part and hang: mount the same folder on all hosts, with the same settings"
# of SGLang's arguments those by which each rank's scheduler decides for itself which batch is next, and of what form
DECIDING = (
    *("chunked_prefill_size", "max_prefill_tokens", "max_running_requests", "max_total_tokens", "context_length"),
    *("schedule_policy", "schedule_conservativeness", "prefill_decode_interval", "enable_mixed_chunk", "page_size"),
    *("disable_radix_cache", "disable_overlap_schedule", "swa_full_tokens_ratio", "swa_prefix_tails", "kv_cache_dtype"),
    *("speculative_algorithm", "speculative_num_steps", "speculative_num_draft_tokens", "speculative_eagle_topk"),
    *("speculative_dspark_block_size", "enable_hierarchical_cache", "enable_priority_scheduling", "grammar_backend"),
    "prefill_decode_interval_min_bs",
)
_found: str | None = None  # by this process
ALL_THE_SAME = "DSV4_SM120_ON_BROKEN=warn there, where ours is, starts all the same"


def stop_unless_alike() -> None:
    """PatchError in a rank that is about to make its layers, where the ranks of a server of several hosts differ."""
    if not (models_served.has_several_hosts() and models_served.has_served_card()):
        return
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return
    text = ask(LAYERS_WAIT_S)
    is_tolerated = patching.active_engine().settings.on_broken == "warn" or models_served.has_ranks_that_come_and_go()
    if text != ALIKE and not is_tolerated:
        report.write()
        raise PatchError(f"deepseek_v4_sm120 {report.our_version()}: {NOTE}: {text}. {ALL_THE_SAME}")


def ask(wait_s: float = WAIT_S) -> str:
    """compare's, by this process once, wherever it is asked first, with the store that all ranks of the server have."""
    global _found
    if _found is None:
        store = torch.distributed.distributed_c10d._get_default_store()
        _found = compare(torch.distributed.get_rank(), torch.distributed.get_world_size(), store, wait_s)
    return _found


def compare(rank: int, ranks: int, store, wait_s: float = WAIT_S) -> str:
    """What the server's ranks have of this rank's, in words, told in the log where it is not the same on all. store:
    torch.distributed's, which all of them have."""
    own = _what_runs()
    store.set(_key(rank), json.dumps(own))
    told = _told(ranks, store, wait_s)
    store.set(_looked(rank), "")
    others = [_differing(number, theirs, own) for number, theirs in enumerate(told) if theirs not in (None, own)]
    without = [str(number) for number, theirs in enumerate(told) if theirs is None]
    if without:
        of = "rank" if len(without) == 1 else "ranks"
        others.insert(0, f"{of} {', '.join(without)} of {ranks} without deepseek_v4_sm120, or with DSV4_SM120=off")
    text = f"{'; '.join(others)}. {REMEDY}" if others else ALIKE
    report.add_note(NOTE, lambda: f"{NOTE}: {text}")
    if others:
        report.warn(f"deepseek_v4_sm120: {NOTE}: {text}")
        _wait_for([_looked(number) for number, theirs in enumerate(told) if theirs is not None], store, LAST_LOOK_S)
    else:
        models_served.know_that_hosts_are_alike()
    return text


def _key(rank: int) -> str:
    return f"deepseek_v4_sm120 of rank {rank}"


def _looked(rank: int) -> str:
    return f"{_key(rank)}: it has looked"


def _wait_for(keys: list[str], store, wait_s: float) -> None:
    end = time.monotonic() + wait_s
    while not store.check(keys) and time.monotonic() < end:
        time.sleep(LOOK_S)


def _told(ranks: int, store, wait_s: float) -> list[dict | None]:
    """What each rank has left there; None: nothing in that time."""
    keys = [_key(rank) for rank in range(ranks)]
    _wait_for(keys, store, wait_s)
    return [json.loads(store.get(key)) if store.check([key]) else None for key in keys]


def _what_runs() -> dict[str, object]:
    """JSON-able. Of the folder what runs, not its documents or when it was built: hosts may have built it each."""
    engine = patching.active_engine()
    profile = engine.profile.describe() or {}
    arguments = server_arguments()
    only_look = {patch.name for patch in engine.table.patches if patch.variable}  # as `layers` does, on one rank
    return {
        "release": deepseek_v4_sm120.__version__,
        "code": _code(),
        "kernels": extension.describe().get("code"),
        engine.host: engine.version,
        "arguments": {name: str(getattr(arguments, name, None)) for name in DECIDING},
        "patches": sorted(engine.in_place() - only_look),
        "DSV4_SM120_SET": dict(sorted(engine.settings.choices.items())),
        "DSV4_SM120_SHADOW": engine.settings.shadow,
        "DSV4_SM120_FORCE": engine.settings.force,
        "DSV4_SM120_PROFILE": {name: profile.get(name) for name in ("winners", "left_out")},
    }


def server_arguments():
    """SGLang's, as a rank has them."""
    context = importlib.import_module(CONTEXT) if find_spec(CONTEXT) is not None else None
    if hasattr(context, "get_server_args"):  # 0.5.15 and later
        return context.get_server_args()
    return importlib.import_module(SERVER_ARGS).get_global_server_args()


def _code() -> str:
    """A digest of our Python, which decides on the batches."""
    package = Path(deepseek_v4_sm120.__file__).parent
    files = sorted(package.rglob("*.py"))
    found = {str(path.relative_to(package)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]


def _differing(rank: int, theirs: dict, own: dict) -> str:
    """The first that is another one there."""
    name = next(name for name in {**own, **theirs} if own.get(name) != theirs.get(name))
    there, here = theirs.get(name), own.get(name)
    if name == "arguments":
        there, here = ({k: v for k, v in some.items() if there[k] != here[k]} for some in (there, here))
    if name == "patches":
        there, here = (sorted({*some}.difference(others)) for some, others in ((there, here), (here, there)))
        return f"rank {rank} has {', '.join(there) or 'no others'} in place, and not {', '.join(here) or 'fewer'}"
    return f"rank {rank} has another {name}: {str(there)[:80]}, here {str(here)[:80]}"
