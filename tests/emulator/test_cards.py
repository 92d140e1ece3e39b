"""What the launchers make of cards of 16 to 256 multiprocessors, RTX PRO 4000 to 6000, RTX 5090 and GB10 among them:
every launch of a model's calls is one that an SM120 card takes, and no bit of a result depends on the card."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch

from deepseek_v4_sm120.ops import all_reduce as all_reduce_op
from deepseek_v4_sm120.ops import (
    bf16_linear,
    fp8_linear,
    index_select,
    mhc,
    mxfp4_moe,
    router_topk,
    sparse_decode,
    wo_a,
)
from deepseek_v4_sm120.specs import fp8_linear as fp8_spec
from deepseek_v4_sm120.specs import index_select as index_spec
from deepseek_v4_sm120.specs import mhc as mhc_spec
from deepseek_v4_sm120.specs import mxfp4_moe as moe_spec
from deepseek_v4_sm120.specs import sparse_decode as sparse_spec
from tests.emulator.emulated import emulated, generator, group, on_cards, ptx, taken

CARDS = (16, 24, 36, 48, 63, 70, 84, 110, 132, 170, 188, 256)
MOST_SHARED, MOST_THREADS, MOST_BLOCKS = 101376, 1024, (2**31 - 1, 65535, 65535)
STEPS = (1, 2, 3, 4, 8, 16, 31, 32, 47, 64, 65, 95, 96, 127, 128, 129, 187, 256)
PROMPTS = (257, 512, 1024, 4096, 8192)
ROWS = (*STEPS, *PROMPTS)
FP8, FP32, INT64, UINT8 = torch.float8_e4m3fn, torch.float32, torch.int64, torch.uint8


def empty(*shape, dtype=torch.bfloat16):
    """Nobody reads it, so there is no memory behind it."""
    return torch.empty(shape, dtype=dtype)


def int32(*shape):
    return empty(*shape, dtype=torch.int32)


def experts_calls():
    for tp, rows in itertools.product((1, 2, 4, 8), ROWS):
        inter = 2048 // tp
        sizes = ((2 * inter, 2048), (2 * inter, 128), (4096, inter // 2), (4096, inter // 32))
        weights = [empty(256, *size, dtype=UINT8) for size in sizes]
        given = (empty(rows, 4096), int32(rows, 6), empty(rows, 6, dtype=FP32), *weights)
        for options in ({}, {"activations": "mxfp8"}, {"reproducible": True}):
            yield rows, functools.partial(mxfp4_moe.mxfp4_moe, *given, **options)


LINEAR = ((128, 128), (1536, 4096), (4096, 512), (4096, 4096), (4096, 8192), (16384, 1024), (129280, 4096))


def linear_calls():
    for (outputs, inputs), rows in itertools.product(LINEAR, ROWS):
        weight = empty(outputs, inputs, dtype=FP8), empty(outputs // 128, inputs // 128, dtype=FP32)
        yield rows, functools.partial(fp8_linear.fp8_linear, empty(rows, inputs), *weight)
    for groups, rows in itertools.product((1, 2, 4, 8), STEPS):
        weight = empty(groups, 1024, 4096, dtype=FP8), empty(groups, 8, 32, dtype=FP32)
        rotation = {"freqs_cis": empty(64, 32, dtype=torch.complex64), "positions": empty(rows, dtype=INT64)}
        yield rows, functools.partial(wo_a.wo_a, empty(rows, groups, 4096), *weight, **rotation)
    for outputs, rows in itertools.product((4, 64, 256, 1024, 129280), ROWS):
        yield rows, functools.partial(bf16_linear.bf16_linear, empty(rows, 4096), empty(outputs, 4096))
    for experts, rows in itertools.product((256, 384), ROWS):
        logits, bias = empty(rows, experts, dtype=FP32), empty(experts, dtype=FP32)
        yield rows, functools.partial(router_topk.router_topk, logits, bias, 6)


def attention_calls():
    one = sparse_spec.make_inputs(sparse_spec.Shape(1, 8, extra=sparse_spec.CacheShape(2, 64)), device="cpu")
    for heads, width, rows in itertools.product((64, 32, 16, 8), (0, 512, 2048, 8192), ROWS):
        extra = {"extra_kv_pages": one.extra_kv_pages, "extra_indices": int32(rows, 1, width)} if width else {}
        given = (empty(rows, 1, heads, 512), one.kv_pages, int32(rows, 1, 128))
        yield rows, functools.partial(sparse_decode.sparse_decode, *given, **extra)


def index_calls():
    for fp4, columns, rows in itertools.product((False, True), (1, 40, 512, 4096, 16384), ROWS):
        q = empty(rows, 1, 64, 64 if fp4 else 128, dtype=UINT8 if fp4 else FP8)
        given = (index_spec.new_pages(2, fp4), empty(rows, 64, dtype=FP32), int32(rows), int32(1, columns))
        given = (q, *given[:-1], given[-1].expand(rows, columns))
        for hint in (1, 2):
            scales = {"q_scales": int32(rows, 1, 64)} if fp4 else {}
            yield rows, functools.partial(index_select.index_select, *given, rows_per_request=hint, **scales)
    for width, rows in itertools.product((64, 32768, 262144), ROWS):
        scores = empty(1, width, dtype=FP32).expand(rows, width)
        yield rows, functools.partial(index_select.topk_select, scores, int32(rows))


def boundary_calls():
    one = mhc_spec.make_inputs(mhc_spec.Shape(1), device="cpu")
    for rows in ROWS:
        sizes = {"f": (rows, 4096), "streams": (rows, 4, 4096), "post": (rows, 4), "comb": (rows, 4, 4)}
        given = {name: empty(*size, dtype=getattr(one, name).dtype) for name, size in sizes.items()}
        yield rows, functools.partial(mhc.mhc, **one.boundary() | given)
        yield rows, functools.partial(mhc.mhc_head, **one.head() | {"streams": given["streams"]})


CALLS = {
    "experts": experts_calls,
    "linear layers and the router": linear_calls,
    "attention": attention_calls,
    "index": index_calls,
    "boundaries": boundary_calls,
}


FOR_BLOCKS, FOR_CARDS = "mhc12fused_kernel", "mhc14summing_kernel"  # what they wait for


def test_kernels_that_wait_have_these_names():
    for name in (FOR_BLOCKS, FOR_CARDS):
        assert any(name in kernel for kernel in ptx()), name


def check(launches, rows: int, sms: int) -> None:
    assert launches
    for one in launches:
        told = (one, rows, sms)
        assert all(1 <= n <= most for n, most in zip(one.blocks, MOST_BLOCKS, strict=True)), told
        assert one.threads <= MOST_THREADS and one.shared <= MOST_SHARED and one.resident >= 1, told
        places = one.resident * sms
        if FOR_BLOCKS in one.kernel:  # a row's block waits, the others need a place beside them
            assert rows < places, told
        if FOR_CARDS in one.kernel:  # all wait, for the other cards
            assert one.blocks[0] <= places, told
        if one.is_cooperative:
            assert one.blocks[0] <= places and one.blocks[0] % 32 == 0, told


@pytest.mark.parametrize("operator", CALLS)
def test_every_launch_is_one_that_the_card_takes(operator):
    calls = list(CALLS[operator]())
    for sms in CARDS:
        with emulated(runs=False, multiprocessors=sms):
            for rows, call in calls:
                call()
                check(taken(), rows, sms)


@pytest.mark.parametrize("transport", all_reduce_op.TRANSPORTS)
@pytest.mark.parametrize("ranks", [2, 8])
def test_every_sum_is_one_that_the_card_takes(ranks, transport):
    one = mhc_spec.make_inputs(mhc_spec.Shape(1), device="cpu")
    for sms in (16, 48, 110, 188):
        with emulated(runs=False, multiprocessors=sms):
            cards = group(ranks, transport=transport, hidden=4096, max_rows=512)
            for rows in (1, 4, 8, 16, 17, 31, 64, 512):
                f = [empty(rows, 4096) for _ in cards]
                sizes = {"streams": (rows, 4, 4096), "post": (rows, 4), "comb": (rows, 4, 4)}
                given = {name: empty(*size, dtype=getattr(one, name).dtype) for name, size in sizes.items()}
                on_cards(all_reduce_op.all_reduce, f, cards)
                check(taken(), rows, sms)
                boundary = one.boundary() | given
                on_cards(lambda f, card: mhc.mhc(**boundary | {"f": f}, sum_over=card), f, cards)  # noqa: B023
                check(taken(), rows, sms)
            for card in cards:
                card.close()


# ---- blocks of a step's layers

# Of blocks that have a multiprocessor to themselves a few more than there are multiprocessors take two turns. Half as
# many, of twice the outputs, take one that is as long as one of these, and read x half as often.
# (outputs, inputs), rows -> blocks by the card's multiprocessors; 132: as timed
BLOCKS = {
    "bf16": {
        ((2048, 4096), 1): {132: 128, 170: 128, 188: 128},
        ((1024, 4096), 32): {48: 64, 110: 64, 132: 128, 170: 128, 188: 128},
        ((1024, 4096), 64): {110: 128, 132: 128, 170: 128, 188: 128},
        ((512, 4096), 64): {48: 64, 110: 64, 132: 128, 188: 128},
        ((256, 4096), 128): {110: 64, 132: 128, 188: 128},
    },
    "fp8": {
        ((16384, 1024), 32): {48: 64, 110: 64, 120: 64, 132: 128, 188: 128},
        ((8192, 1024), 64): {48: 32, 110: 64, 120: 64, 132: 128, 188: 128},
        ((2048, 4096), 32): {48: 32, 110: 64, 132: 128, 188: 128},
        ((3072, 7168), 32): {132: 96, 188: 96, 256: 192},
    },
}


def layer(kind: str, outputs: int, inputs: int, rows: int):
    if kind == "bf16":
        return functools.partial(bf16_linear.bf16_linear, empty(rows, inputs), empty(outputs, inputs))
    weight = empty(outputs, inputs, dtype=FP8), empty(outputs // 128, inputs // 128, dtype=FP32)
    return functools.partial(fp8_linear.fp8_linear, empty(rows, inputs), *weight)


@pytest.mark.parametrize("kind", BLOCKS)
def test_no_second_turn_for_the_few_blocks_that_larger_ones_would_save(kind):
    for (size, rows), wanted in BLOCKS[kind].items():
        for sms, blocks in wanted.items():
            with emulated(runs=False, multiprocessors=sms):
                layer(kind, *size, rows)()
                assert math.prod(taken()[0].blocks) == blocks, (size, rows, sms)


# ---- bits


def attention():
    extra = sparse_spec.CacheShape(64, 1536, lengths=(1536, 700, 130), masked=0.1)
    inputs = sparse_spec.make_inputs(sparse_spec.Shape(3, 16, extra=extra), device="cpu")
    return functools.partial(sparse_decode.sparse_decode, **inputs.arguments())


def index():
    inputs = index_spec.make_inputs(index_spec.Shape(3, (1500, 64, 900)), device="cpu")
    return functools.partial(index_select.index_select, **inputs.arguments())


def linear(rows):
    (weight, scale), x = fp8_spec.make_weight(1, 512, 2048, generator(1)), fp8_spec.make_x(rows, 1, 2048, generator(2))
    return functools.partial(fp8_linear.fp8_linear, x[:, 0], weight[0], scale[0])


def projection():
    x, weight = (torch.randn(rows, 512, generator=generator(rows)).bfloat16() for rows in (33, 1024))
    return functools.partial(bf16_linear.bf16_linear, x, weight)


def test_products_beside_the_queries_leave_them_half_of_a_multiprocessor():
    """The compressors', and the index's head weights up to 8 rows; the router's logits are waited for at once."""
    wanted = {(64, 1): 8, (64, 8): 8, (64, 9): 16, (256, 1): 16, (512, 1): 8, (512, 32): 8, (2048, 8): 8}
    for (outputs, rows), warps in wanted.items():
        with emulated(runs=False, multiprocessors=188):
            bf16_linear.bf16_linear(empty(rows, 4096), empty(outputs, 4096))
            assert taken()[0].threads == 32 * warps, (outputs, rows)


def experts(rows, hidden=4096, **options):
    """Of other widths by the kernels for many rows."""
    shape = moe_spec.Shape(rows, hidden=hidden, inter=256, experts=2, ids="uniform", topk=2)
    given = moe_spec.make_inputs(shape, device="cpu").arguments()
    return functools.partial(mxfp4_moe.mxfp4_moe, **given, **options)


def boundary(rows):
    return functools.partial(mhc.mhc, **mhc_spec.make_inputs(mhc_spec.Shape(rows), device="cpu").boundary())


BITS = {
    "attention": attention,
    "index": index,
    **{f"linear layer, {rows} rows": functools.partial(linear, rows) for rows in (8, 40, 70)},
    "projection": projection,
    "experts of few rows": functools.partial(experts, 5),
    "experts of many rows": functools.partial(experts, 12, 512),
    "experts of many rows, MXFP8": functools.partial(experts, 12, 512, activations="mxfp8"),
    "boundary": functools.partial(boundary, 33),
}


@pytest.mark.parametrize("operator", BITS)
def test_no_bit_depends_on_the_card(operator):
    """On cards of which at least two are given other launches."""
    call, results, launches = BITS[operator](), [], set()
    for sms in (15, 84, 188):
        with emulated(multiprocessors=sms, most_instructions=2000):
            call()
            launches.add(tuple((one.kernel, one.blocks) for one in taken()))
            found = call()
        results += [found if isinstance(found, tuple) else (found,)]
    assert len(launches) > 1
    for other in results[1:]:
        assert all(
            torch.equal(*(t.contiguous().view(UINT8) for t in two)) for two in zip(results[0], other, strict=True)
        )
