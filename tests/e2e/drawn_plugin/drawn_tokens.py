"""SGLang plugin (entry point group sglang.srt.plugins): what tokens each rank draws, and which it goes on with.

Between the two stands Sampler._sync_token_ids_across_tp, where SGLang, or we, make the ranks agree. $E2E_DRAWN gets a
file a rank, `<rank>.jsonl`, of a line a step: [tokens drawn, tokens gone on with]. Steps are written EVERY at a time,
so the last few may be missing.
"""

import functools
import json
import os
from pathlib import Path

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler.__init__"  # behind it all is imported, and ours in place
EVERY = 32
_steps = []


def write(path, steps):
    lines = [json.dumps([tokens.tolist() for tokens in step]) for step in steps]
    with open(path, "a") as file:
        file.write("\n".join([*lines, ""]))


def noted(original, folder):
    """The function with what it got and what it left kept; nothing waits for the device but the writing."""
    import torch

    @functools.wraps(original)
    def sync(self, batch_next_token_ids, sampling_info):
        drawn = batch_next_token_ids.clone()
        result = original(self, batch_next_token_ids, sampling_info)
        _steps.append((drawn, batch_next_token_ids.clone()))
        if len(_steps) == EVERY:
            write(folder / f"{torch.distributed.get_rank()}.jsonl", _steps)
            _steps.clear()
        return result

    return sync


def hook(*_, **__):
    from sglang.srt.layers.sampler import Sampler

    folder = Path(os.environ["E2E_DRAWN"])
    folder.mkdir(parents=True, exist_ok=True)
    Sampler._sync_token_ids_across_tp = noted(Sampler._sync_token_ids_across_tp, folder)


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(SCHEDULER, hook, HookType.AFTER)
