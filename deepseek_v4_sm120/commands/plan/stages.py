"""What a plan says where the layers are dealt to stages (--pp-size) in place of all layers' tensors to the cards.

Read in SGLang's code of each release: a stage has its layers, their caches and states; the first the embedding, the
last the head. --mem-fraction-static and what is left behind the weights are those of the card that has least, and the
tokens those of the stage that has room for the fewest, whose number all take.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.plan import memory
from deepseek_v4_sm120.commands.plan.request import Flag, Request

FLAG, BATCH = "--pp-size", "--pp-max-micro-batch-size"
PARTITION = "SGLANG_PP_LAYER_PARTITION"  # other layers a stage than an even share
SINCE = (0, 5, 13)  # 0.5.12 sizes the pools of each stage as those of all layers
NO_DRAFTS = (
    "SGLang stops up to 0.5.20; later it takes EAGLE with SGLANG_ENABLE_PP_SPEC=1, which nobody has run with us, and "
    "what a drafter holds beside stages is not planned"
)
# New tokens of prompts for each that is written, below which stages lost by each of the figures below: 0.0203 ms won of
# a prompt's token, 0.41 lost of one written with 32 streams; 0.64 with 8, 2.4 with one, which make 32 and 118
LEAST_READ = 20
# by us, in one run on two H200 without peers (sums through host memory), 0.5.23, 43 layers, 32 experts
FOR_WHICH_LOAD = (
    "stages pay where long prompts, or many at once, are read and little is written: on two H200 without peers "
    "(0.5.23) one prompt of 32,000 tokens took 1,609 ms, by tensors 2,257, 32 of 1,024 tokens 1,436 for 2,067; one of "
    "8,192 590 for 553, 8 of 1,024 556 for 527. They lose where text is written: a step of 1, 8, 32 streams took 6.4 "
    "to 8.7, 11.2 to 12.5, 24.3 to 26.6 ms, by tensors 3.7 to 4.0, 6.1, 10.9 to 11.2 (own_outputs=off 10.5 to 11.6, "
    f"13.5 to 15.2, 23.0 to 25.4). By that they pay from some {LEAST_READ} new tokens of prompts for each that is "
    "written, with 32 streams, from 120 with one; below leave out --pp-size. All this of prompts while nobody writes: "
    "where streams have steps between chunks, these wait for each other, and a prompt gains nothing by stages (with "
    "--prefill-decode-interval 0 it does, and all streams stand still). More stages, stages of several cards, and "
    "SM120 cards were not measured"
)


def check(r: Request) -> None:
    """CommandError for stages that are none, and for what is not planned beside them."""
    asked = f"--pp-size {r.stages}"
    if not 1 <= r.stages <= r.model.layers:
        raise CommandError(f"--pp-size must be 1 to {r.model.layers} stages, of a layer each at least, got {r.stages}")
    if r.stages == 1:
        return
    if r.nodes > 1:
        raise CommandError(f"{asked} with --nodes {r.nodes}: stages in several hosts are not planned")
    if r.gpus % r.stages:
        raise CommandError(f"{asked}: each stage has as many cards, --gpus {r.gpus} is no multiple of it")
    if r.version < SINCE:
        raise CommandError(f"{asked}: SGLang {r.sglang} sizes each stage's pools for all layers; take 0.5.13 or newer")
    if r.speculation is not None:
        raise CommandError(f"{asked} with {r.speculation.drafts}: {NO_DRAFTS}. Instead: --spec none, or no --pp-size")


def sized(r: Request, chunk: int, room: float) -> Callable[..., memory.Pools]:
    """memory.pools of this request by prefix_tails; of stages those of the one whose pools hold the fewest tokens in
    `room` bytes."""
    of_all = [
        functools.partial(
            *(memory.pools, m, r.version),
            **{"requests": r.concurrency, "chunk": chunk, "drafts": r.rows, "overlaps": r.stages == 1},
        )
        for m in r.model.of_stages(r.stages)
    ]
    return lambda **more: min((pools(**more) for pools in of_all), key=lambda pools: pools.tokens(room))


def least_prefix_tails(r: Request, chunk: int) -> int | None:
    """With which the sliding windows have room for a chunk in each stage; None: with SGLang's own number."""
    if r.stages == 1 or r.version < memory.PADDED_SINCE:
        return None
    return memory.prefix_tails_of_stages(r.model, r.concurrency, chunk, r.stages)


def flags(r: Request) -> list[Flag]:
    if r.stages == 1:
        return []
    layers = sorted({m.layers for m in r.model.of_stages(r.stages)})
    return [
        Flag(FLAG, str(r.stages), f"stages of {' and '.join(map(str, layers))} layers, {r.ranks} card(s) each"),
        Flag(BATCH, str(r.step_requests), f"{r.concurrency} stream(s) in {r.stages} batches, one in each stage"),
    ]


def notes(r: Request) -> list[str]:
    if r.stages == 1:
        return []
    return [FOR_WHICH_LOAD] + [f"no speculation with stages: {NO_DRAFTS}"] * (not r.model.no_drafter)
