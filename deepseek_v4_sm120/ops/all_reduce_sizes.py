"""How large sums between cards may be, and the memory that a group holds. Standard library only, for `plan`."""

from __future__ import annotations

from deepseek_v4_sm120.ops.shared import extension

RANKS = (2, 4, 8)
MAX_ROWS = 512  # that a server's sums take; its decode and verify steps must all be within, or none
ONE_SHOT_ROWS = 64  # the most that everybody sends to everybody; more go by way of their owner
VALUES = 8  # bf16 that a thread moves


def vectors(max_rows: int, hidden: int) -> dict[str, int]:
    """Of a call with one hop, and of one with two, at most."""
    one_shot = min(ONE_SHOT_ROWS, max_rows) * hidden // VALUES
    return {"one_shot_vectors": one_shot, "two_shot_vectors": max_rows * hidden // VALUES}


def places_bytes(ranks: int, transport: str, hidden: int, max_rows: int = MAX_ROWS) -> int:
    """Memory of a group, of each card ("peer") or of the host, once."""
    return extension.load().all_reduce_places_bytes(ranks=ranks, transport=transport, **vectors(max_rows, hidden))
