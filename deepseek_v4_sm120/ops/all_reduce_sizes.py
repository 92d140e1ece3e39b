"""How large sums and gathers between cards may be, and a group's memory. Standard library only, for `plan`."""

from __future__ import annotations

from deepseek_v4_sm120.ops.shared import extension

RANKS = (2, 4, 8)
MAX_ROWS = 512  # that a server's sums take; its decode and verify steps must all be within, or none
ONE_ORDER_RANKS = 2  # up to so many terms have one order, whoever adds them
ONE_SHOT_ROWS = 64  # the most that everybody sends to everybody; more go by way of their owner
VALUES = 8  # bf16 that a thread moves
GATHERED_ROWS = 64  # of a call that a server's gathers take: a decode or verify step's logits
# Of a compressor's product that is dealt to the cards. Up to so many its kernel reads the weights once, and at two
# cards the 4 KB a row that come over PCIe (50 GB/s) take 2.6 us for the 5 that half of the weights take less. Places of
# as many rows of sums hold them in one launch, and are 4 MiB and more: what cudaMalloc makes below 2 may lie in a block
# with others, and another process opens the block
DEALT_ROWS = 32


def vectors(max_rows: int, hidden: int) -> dict[str, int]:
    """Of a call with one hop, and of one with two, at most."""
    one_shot = min(ONE_SHOT_ROWS, max_rows) * hidden // VALUES
    return {"one_shot_vectors": one_shot, "two_shot_vectors": max_rows * hidden // VALUES}


def slot_vectors(ranks: int, transport: str, hidden: int, max_rows: int = MAX_ROWS) -> int:
    """What a rank sends in one launch of a gather, at most, of VALUES bf16: the places are those of a group's sums."""
    return extension.load().all_reduce_slot_vectors(ranks=ranks, transport=transport, **vectors(max_rows, hidden))


def places_bytes(ranks: int, transport: str, hidden: int, max_rows: int = MAX_ROWS) -> int:
    """Memory of a group, of each card ("peer") or of the host, once."""
    return extension.load().all_reduce_places_bytes(ranks=ranks, transport=transport, **vectors(max_rows, hidden))
