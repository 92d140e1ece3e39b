"""Calls of the kernels whose blocks or cards tell each other something: each gives the tensors that it has made.

Where words are looked at while a kernel runs, the looker is a kernel on another card: the host's stand-in.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

from deepseek_v4_sm120.ops import all_reduce as all_reduce_op
from deepseek_v4_sm120.ops import compressor as compressor_op
from deepseek_v4_sm120.ops import fp8_linear, mhc, sparse_decode
from deepseek_v4_sm120.ops import index_select as index_select_op
from deepseek_v4_sm120.specs import all_reduce, compressor, index_select
from deepseek_v4_sm120.specs import fp8_linear as fp8_spec
from deepseek_v4_sm120.specs import mhc as mhc_spec
from deepseek_v4_sm120.specs import sparse_decode as sparse_spec
from tests.emulator.emulated import EmulatorError, called, card, group, library, on_cards, run

Call = Callable[[], list[torch.Tensor]]

# Copies a fault's words once `told` is one, as the thread does that watches a rank.
LOOKER = """
.version 9.0
.target sm_120f
.address_size 64
.visible .entry looker(.param .u64 fault, .param .u64 seen)
{
.reg .pred %p<2>;
.reg .b32 %r<8>;
.reg .b64 %rd<4>;
ld.param.u64 %rd1, [fault];
ld.param.u64 %rd2, [seen];
$again:
ld.acquire.sys.global.u32 %r1, [%rd1];
setp.eq.u32 %p1, %r1, 0;
@%p1 bra $again;
ld.relaxed.sys.global.u32 %r2, [%rd1+4];
ld.relaxed.sys.global.u32 %r3, [%rd1+8];
ld.relaxed.sys.global.u32 %r4, [%rd1+12];
ld.relaxed.sys.global.u32 %r5, [%rd1+16];
st.global.u32 [%rd2], %r1;
st.global.u32 [%rd2+4], %r2;
st.global.u32 [%rd2+8], %r3;
st.global.u32 [%rd2+12], %r4;
st.global.u32 [%rd2+16], %r5;
ret;
}
"""


def compressed(many: bool = False) -> Call:
    if many:
        requests = [compressor.Request(379 + i if i else 0, 4) for i in range(3)]
        made = compressor.make_step("c128", requests, seed=6, device="cpu")
    else:
        made = compressor.make_inputs("c128", (128, 256, 640), seed=6, device="cpu")

    def call():
        both = [made.copy(), made.copy()]
        for given in both:  # a call finds the words as the one in front has left them
            compressor_op.compressor(**given.arguments())
        return [one for given in both for one in (given.cache, given.state)]

    return call


def boundary(kernels: str, rows: int) -> Call:
    """A layer behind a layer."""
    inputs = mhc_spec.make_inputs(mhc_spec.Shape(rows), seed=4, device="cpu").boundary()

    def call():
        streams, post, comb, y = mhc.mhc(**inputs, kernels=kernels)
        return list(mhc.mhc(**inputs | {"streams": streams, "post": post, "comb": comb, "f": y}, kernels=kernels))

    return call


def boundary_that_adds(rows: int) -> Call:
    """A product's last addition, in a boundary; and one behind it of both experts' outputs."""
    inputs = mhc_spec.make_inputs(mhc_spec.Shape(rows), seed=4, device="cpu")
    ((parts, _),), _ = mhc_spec.leave_additions("unmerged", [inputs.f], 4)

    def call():
        given = inputs.boundary()
        streams, post, comb, y = mhc.mhc(**given | {"f": parts})
        given |= {"streams": streams, "post": post, "comb": comb}
        return list(mhc.mhc(**given, routed=y, scaling=1.5))

    return call


def attention() -> Call:
    extra = sparse_spec.CacheShape(64, 192, lengths=(192, 3, 100), masked=0.1)
    inputs = sparse_spec.make_inputs(sparse_spec.Shape(2, 16, sparse_spec.WINDOW, extra), seed=16, device="cpu")

    def call():
        given = inputs.arguments() | {"prefill": False, "pairs": False, "return_lse": True}
        return [one for _ in range(2) for one in sparse_decode.sparse_decode(**given)]

    return call


def product(rows: int, **tuning) -> Call:
    """Of splits, which a kernel behind adds; a product of its outputs; and one of splits again."""
    first, second = (
        fp8_spec.make_weight(1, 128, inputs, torch.Generator().manual_seed(inputs)) for inputs in (2048, 128)
    )
    x = fp8_spec.make_x(rows, 1, 2048, torch.Generator().manual_seed(3))

    def call():
        def of(x, weight, scale, **tuning):
            out = torch.empty(rows, 1, 128, dtype=torch.bfloat16)
            fp8_linear._run(x, weight, scale, out, **tuning)
            return out

        one = of(x, *first, **tuning)
        return [one, of(one, *second), of(x, *first, **tuning)]

    return call


def selection() -> Call:
    inputs = index_select.make_inputs(index_select.Shape(2, (3000, 700)), seed=1, device="cpu")

    def call():
        return [index_select_op.index_select(**inputs.arguments()) for _ in range(2)]

    return call


def sums(transport: str, algorithm: str, ranks: int = 2, hidden: int = 256) -> Call:
    """Some calls behind each other, as the generations of places take turns."""
    terms = [all_reduce.make_terms(ranks, rows, rows, hidden=hidden) for rows in (1, 2, 1, 3, 1, 2)]
    call_one = functools.partial(all_reduce_op.all_reduce, algorithm=algorithm)
    if algorithm == "gather":
        call_one = all_reduce_op.all_gather

    def call():
        cards = group(ranks, transport=transport, hidden=hidden, max_rows=8)
        try:
            results = [one for sent in terms for one in on_cards(call_one, sent, cards)]
            run()
            return results
        finally:
            _let_go(cards)

    return call


def boundary_behind_a_sum(ranks: int = 2) -> Call:
    shapes = [mhc_spec.make_inputs(mhc_spec.Shape(rows), seed=rows, device="cpu") for rows in (1, 2)]
    terms = [mhc_spec.make_terms(inputs, ranks, inputs.boundary()["streams"].shape[0]) for inputs in shapes]

    def call():
        cards = group(ranks, transport="peer", hidden=4096, max_rows=8)
        try:
            results = []
            for inputs, sent in zip(shapes, terms, strict=True):
                call_one = functools.partial(_behind_a_sum, inputs.boundary())
                results += [one for of_rank in on_cards(call_one, sent, cards) for one in of_rank]
            run()
            return results
        finally:
            _let_go(cards)

    return call


def _behind_a_sum(boundary: dict, f, one):
    return mhc.mhc(**{**boundary, "f": f}, sum_over=one, kernels="fused")


def given_up(algorithm: str, traps: bool) -> Call:
    """Rank 1 does not come. What the words say: where the kernel ends its process, once that is over; else to who looks
    while it runs."""
    terms = all_reduce.make_terms(2, 3, 1, hidden=256)

    def call():
        cards = group(2, hidden=256, max_rows=8, patience_s=1e-6, traps=traps)
        try:
            seen = torch.zeros(6, dtype=torch.int32)
            fault = cards[0]._fault
            with card(0):
                all_reduce_op.all_reduce(terms[0], cards[0], algorithm=algorithm, tag=7)
            if not traps:
                with card(1):
                    _look(fault, seen)
            try:
                run()
            except EmulatorError as error:
                if not (traps and "trap" in str(error)):
                    raise
                seen = fault
            return [seen.clone()]
        finally:
            _let_go(cards)

    return call


def _look(fault, seen) -> None:
    library().emulator_ptx(LOOKER.encode())
    words = (ctypes.c_uint64 * 2)(fault.data_ptr(), seen.data_ptr())
    called(library().emulator_launch(b"looker", (ctypes.c_uint32 * 5)(1, 1, 1, 1, 0), words, 16))


def _let_go(cards) -> None:
    """Of memory and threads; a launch that has failed may have left what runs."""
    for one in cards:
        one._watch.end()
        one._memory.close()
