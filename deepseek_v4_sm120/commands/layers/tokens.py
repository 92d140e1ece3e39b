"""Whether the tokens that an engine went on with are those that its own last rows say: greedy, as it was asked.

Of an answer, and of the MTP block's drafts: the greatest of the vocabulary's weights times `out`. Of DSPARK's: of its
streams through the last stage's head, and the Markov head's of the token in front. What is further below the greatest
than a near tie is `off`.
"""

from __future__ import annotations

import torch

from deepseek_v4_sm120.reference import draft_block

TIE = 0.25  # of a row's logits' deviation: FP8's rounding of the head's inputs makes a tenth of it
NO_MARKOV, OF_FIRST = "no Markov head", "the Markov head of the block's first token alone"
NEXT, DRAFTED = "the answer's tokens", "the drafts' tokens"


def of_answers(weights, rows: torch.Tensor, following: list, what: str = NEXT) -> dict | None:
    """rows [n, hidden], what the vocabulary's weights are multiplied with; following: the tokens, or None."""
    known = [i for i, token in enumerate(following) if token is not None]
    if not known:
        return None
    found = draft_block.logits(weights.raw("head.weight"), rows[known])
    return {"what": what, "rows": len(known), "off": off(found, [following[i] for i in known]), "otherwise": {}}


def of_drafts(weights, rows: torch.Tensor, before: list, first: list, following: list) -> dict | None:
    """before: the token in front of each; first: the one that its block begins with."""
    known = [i for i, token in enumerate(following) if token is not None]
    if not known:
        return None
    given, asked = draft_block.logits(weights.raw("head.weight"), rows[known]), [following[i] for i in known]
    in_front, anchors = (torch.tensor([one[i] for i in known], device=rows.device) for one in (before, first))
    otherwise = {NO_MARKOV: given, OF_FIRST: given + draft_block.markov(weights.tensors, anchors)}
    return {
        **{"what": DRAFTED, "rows": len(known)},
        "off": off(given + draft_block.markov(weights.tensors, in_front), asked),
        "otherwise": {name: off(one, asked) for name, one in otherwise.items()},
    }


def off(logits: torch.Tensor, tokens: list[int]) -> int:
    if not all(0 <= token < logits.shape[1] for token in tokens):
        return len(tokens)
    had = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    return int((~(logits.amax(dim=1) - had <= TIE * logits.std(dim=1))).sum())
