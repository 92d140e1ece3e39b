"""SGLang plugin (entry point group sglang.srt.plugins): drafts that are accepted, in an engine of random weights.

What a server without speculation said is read from a run's _text.json; in front of each verification the drafts are
overwritten by it, so that verification accepts as many as are meant to be: E2E_DRAFTS is none, half or all. The draft
model runs as ever, and its caches are what verification makes of them. E2E_TEXT is the file; prompts are known by
their length. Requests that it does not have keep their own drafts.

EAGLE of 0.5.16 and later (the last step of its draft), DSPARK of the same (what its proposer returns).
"""

import functools
import importlib
import json
import os

KINDS = ("none", "half", "all")
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler.__init__"  # behind it all is imported and captured
EAGLE, BUILD = "sglang.srt.speculative.eagle_worker_v2", "build_eagle_verify_input"
DSPARK, PROPOSER, PROPOSE = "sglang.srt.speculative.dspark_components.dspark_draft", "DraftBlockProposer", "propose"


def is_right(kind, index):
    """Whether the draft of a continuation's token `index` is the right one; of half, every second by chance, fixed."""
    return kind == "all" or (kind == "half" and (index * 2654435761 >> 13) % 2 == 0)


def forced(kind, text):
    """Drafts for a continuation: the token, or another one."""
    return [token if is_right(kind, i) else max(token - 1, 0) + (token == 0) for i, token in enumerate(text)]


def verifications(kind, tokens, drafts):
    """How many a continuation of `tokens` takes: the first is prefill's, each gives what it accepts and one more."""
    done, count = 1, 0
    while done < tokens:
        accepted = next((i for i in range(drafts) if not is_right(kind, done + i)), drafts)
        done, count = done + accepted + 1, count + 1
    return count


@functools.cache
def texts():
    """{length of the prompt: its continuation}"""
    with open(os.environ["E2E_TEXT"]) as file:
        result = json.load(file)
    answers = {**result["batch"], **result["single"]}
    return {int(name.split("x")[1]): answer["ids"] for name, answer in answers.items()}


@functools.cache
def table(device):
    """(row of each prompt's length, [prompts and one, tokens] the drafts on the device; the last row is nobody's)"""
    import torch

    known = {length: forced(os.environ["E2E_DRAFTS"], text) for length, text in texts().items()}
    longest = max(map(len, known.values()))
    rows = [text + [0] * (longest - len(text)) for text in known.values()] + [[0] * longest]
    return {length: i for i, length in enumerate(known)}, torch.tensor(rows, dtype=torch.int64, device=device)


def overwrite(batch, drafts):
    """drafts [requests, n], in place, by what the requests are to be drafted; nothing waits for the device.

    seq_lens counts the prompt and all tokens of the answer but the last: what is drafted first comes behind that.
    """
    import torch

    with torch.inference_mode():
        row_of, known = table(str(drafts.device))
        lengths = [len(request.origin_input_ids) for request in batch.reqs]
        there = functools.partial(torch.tensor, device=drafts.device)
        rows = there([row_of.get(length, len(known) - 1) for length in lengths])
        index = batch.seq_lens.to(drafts.device).long() - there(lengths) + 1
        index = index[:, None] + torch.arange(drafts.shape[1], device=drafts.device)
        ours = known[rows[:, None], index.clamp(0, known.shape[1] - 1)].to(drafts.dtype)
        is_known = there([length in row_of for length in lengths])[:, None]
        drafts.copy_(torch.where(is_known & (index < known.shape[1]), ours, drafts))


def of_eagle(original):
    @functools.wraps(original)
    def build(batch, draft_input, parents, scores, drafts, *args, **kwargs):
        if not batch.forward_mode.is_idle():
            overwrite(batch, drafts)
        return original(batch, draft_input, parents, scores, drafts, *args, **kwargs)

    return build


def of_dspark(original):
    @functools.wraps(original)
    def propose(self, *, batch, **kwargs):
        proposal = original(self, batch=batch, **kwargs)
        drafts = proposal.draft_block.draft_tokens
        overwrite(batch, drafts)
        verified = getattr(proposal, "verify_ids", None)  # 0.5.23: the last token and the drafts, laid out already
        if verified is not None:
            verified[:, 1:].copy_(drafts)
        return proposal

    return propose


def hook(*_, **__):
    for place, name, made in (
        (importlib.import_module(EAGLE), BUILD, of_eagle),
        (getattr(importlib.import_module(DSPARK), PROPOSER), PROPOSE, of_dspark),
    ):
        setattr(place, name, made(getattr(place, name)))


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if os.environ.get("E2E_DRAFTS") in KINDS:
        HookRegistry.register(SCHEDULER, hook, HookType.AFTER)
