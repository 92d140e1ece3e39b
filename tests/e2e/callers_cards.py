"""Cards as a stage numbers them, from 0, and as the machine does: CUDA_VISIBLE_DEVICES may leave the caller others."""

from __future__ import annotations

import os


def _seen() -> list[str]:
    """The caller's cards, each a number or the beginning of its UUID; none: all that there are."""
    return [card for card in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if card]


def of_callers(cards: str) -> str:
    """A stage's cards as CUDA_VISIBLE_DEVICES names them: of those that the caller's own leaves."""
    seen, numbers = _seen(), [int(card) for card in cards.split(",")]
    if not seen:
        return cards
    if max(numbers) >= len(seen):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES leaves {len(seen)} cards ({','.join(seen)}), asked is for number {cards}"
        )
    return ",".join(seen[number] for number in numbers)


def stages_number(index: str, uuid: str) -> str | None:
    """A stage's number of the card that nvidia-smi has under these; None: the caller does not see it."""
    seen = _seen()
    places = (str(place) for place, card in enumerate(seen) if card == index or uuid.startswith(card))
    return next(places, None) if seen else index
