"""Requests near one that does not fit, which would."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.models_table import TENSOR_PARALLEL
from deepseek_v4_sm120.commands.plan import launch
from deepseek_v4_sm120.commands.plan.models import FLASH, FP4, FP8
from deepseek_v4_sm120.commands.plan.request import Request

EXPERTS = "mxfp4_moe"
LEAST_CONTEXT = 1024
FP4_CHECKPOINT = f"the FP4 checkpoint ({FLASH.path})"


def remedies(request: Request) -> list[str]:
    """Each by itself; where nothing is enough by itself, the least of cards, context and streams at once."""
    return list(_one_by_one(request)) or list(_at_once(request))


def _one_by_one(r: Request) -> Iterator[str]:
    found = next((tp for tp in TENSOR_PARALLEL if tp > r.gpus and _fits(r, **_of(r, tp))), None)
    if found:
        yield _cards(r, found)
    found = next((n for n in _halved(r.context, LEAST_CONTEXT) if _fits(r, context=n)), None)
    if found:
        yield f"--context {found}"
    if r.speculation and _fits(r, speculation=None):
        yield "--spec none"
    found = next((n for n in _halved(r.concurrency, 1) if _fits(r, concurrency=n)), None)
    if found:
        yield f"--concurrency {found}"
    if r.shadow and EXPERTS in r.replaced:
        others = tuple(op for op in r.replaced if op != EXPERTS)
        if _fits(r, replaced=others, switched_off=(*r.switched_off, EXPERTS)):
            yield f"DSV4_SM120_SET={EXPERTS}=off, to compare all but the experts"
    if (with_fp4 := _with_fp4(r)) is not None and _fits(with_fp4):
        yield FP4_CHECKPOINT


def _at_once(r: Request) -> Iterator[str]:
    """The fewest cards on which it fits, and the fewest halvings there of context and streams; of FP8 experts that fit
    nowhere the same with FP4."""
    for tp in (tp for tp in TENSOR_PARALLEL if tp >= r.gpus):
        contexts, streams = [r.context, *_halved(r.context, LEAST_CONTEXT)], [r.concurrency, *_halved(r.concurrency, 1)]
        pairs = sorted((i + j, i, j) for i in range(len(contexts)) for j in range(len(streams)))
        for _, i, j in pairs:
            if _fits(r, **_of(r, tp), context=contexts[i], concurrency=streams[j]):
                words = [_cards(r, tp)] * (tp > r.gpus)
                words += [f"--context {contexts[i]}"] * (i > 0) + [f"--concurrency {streams[j]}"] * (j > 0)
                yield " with ".join(words[:2]) + "".join(f" and {word}" for word in words[2:])
                return
    if (with_fp4 := _with_fp4(r)) is not None:
        yield from (f"{FP4_CHECKPOINT} on {found}" for found in remedies(with_fp4)[:1])


def _of(r: Request, cards: int) -> dict[str, int]:
    """So many cards: in more hosts where these are several, or have no place for another."""
    grows = r.nodes > 1 or r.card.is_hosts
    return {"gpus": cards, "nodes": cards // r.gpus_of_host} if grows else {"gpus": cards}


def _cards(r: Request, cards: int) -> str:
    return f"--nodes {cards // r.gpus_of_host}" if "nodes" in _of(r, cards) else f"{cards} cards"


def _with_fp4(r: Request) -> Request | None:
    """The same of the checkpoint as it was released, where it has one."""
    if r.model.expert_format != FP8 or r.model.hidden != FLASH.hidden:
        return None
    return dataclasses.replace(r, model=dataclasses.replace(r.model, expert_format=FP4))


def _halved(number: int, least: int) -> list[int]:
    return [number >> i for i in range(1, number.bit_length()) if number >> i >= least]


def _fits(r: Request, **changes) -> bool:
    try:
        return launch.make(dataclasses.replace(r, **changes)).fits
    except CommandError:
        return False
