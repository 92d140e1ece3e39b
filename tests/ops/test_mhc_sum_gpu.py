"""A boundary that adds what the cards send: two ranks as threads on one card, and processes, cards in turn.

Of ranks on one card all blocks must be resident together; processes take turns there instead.
"""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from deepseek_v4_sm120.ops import all_reduce
from deepseek_v4_sm120.ops import mhc as op
from deepseek_v4_sm120.ops.mhc import mhc, mhc_head
from deepseek_v4_sm120.reference import mhc as reference
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.reference.all_reduce import all_reduce as sum_of
from deepseek_v4_sm120.specs.all_reduce import in_threads
from deepseek_v4_sm120.specs.bounds import MHC
from deepseek_v4_sm120.specs.mhc import FORMS, Shape, errors, leave_additions, make_inputs, make_terms
from tests.ops.all_reduce_groups import in_processes
from tests.ops.test_mhc_gpu import equal

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

TOGETHER = (1, 2, 3, 4, 5, 8, 9, 15, 16)  # rows of which two calls are resident at once on 132 multiprocessors
ALONE = (1, 4, 5, 16, 17, 31, 33, 48, 64, 65, 200)


def boundary(inputs, f, **way):
    return mhc(**{**inputs.boundary(), "f": f}, **way)


def unnormed(inputs, f, **way):
    return mhc(**{**inputs.boundary(), "f": f, "norm_weight": None}, **way)


def head(inputs, f, **way):
    last = {"f": f, "post": inputs.post, "comb": inputs.comb, "norm_weight": inputs.norm_weight}
    return mhc_head(**inputs.head(), **last, **way)


def alone(algorithm, term, *, sum_over):
    return (sum_over(term, algorithm=algorithm),)


@pytest.fixture
def pair(request):
    made = in_threads(2, max_rows=512, transport=getattr(request, "param", "peer"))
    yield made
    torch.cuda.synchronize()
    for one in made:
        one.close()


def on_streams(group, streams, terms, call) -> list:
    """call(term, sum_over=), each on a stream of its own, all of them queued before any is waited for."""
    results = []
    for one, stream, term in zip(group, streams, terms, strict=True):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            results.append(call(term, sum_over=one))
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    return results


@pytest.mark.parametrize("pair", all_reduce.TRANSPORTS, indirect=True)
def test_the_bits_of_a_sum_and_a_boundary_behind_it(pair, device):
    streams = [torch.cuda.Stream(device) for _ in pair]
    for rows in TOGETHER:
        inputs = make_inputs(Shape(rows), seed=rows, device=device)
        terms = make_terms(inputs, 2, rows)
        f = sum_of(terms)
        for call in (boundary, unnormed, head):
            expected = call(inputs, f, kernels="split")
            for _ in range(3):
                found = on_streams(pair, streams, terms, partial(call, inputs, kernels="fused"))
                assert all(equal(one, expected) for one in found), (call, rows)
        by_default = on_streams(pair, streams, terms, partial(boundary, inputs))
        assert all(equal(one, boundary(inputs, f)) for one in by_default)
        inputs.f = reference.summed(terms)
        assert all(value < MHC.truth for value in errors(inputs, by_default[0]).values())


def test_all_words_of_nan_zeros_and_infinities(pair, device):
    """What looks like a place that nobody has written to, and like a word that has not come."""
    streams = [torch.cuda.Stream(device) for _ in pair]
    for rows in (1, 7, 16):
        inputs = make_inputs(Shape(rows), seed=rows, device=device)
        terms = make_terms(inputs, 2, rows)
        for rank, term in enumerate(terms):
            words = term.view(torch.int16)[rows // 2]
            for at, word in enumerate((-1, -1, 0x7F80, -0x80, -0x8000, 0, 0x7F7F, 0x7FFF)):
                words[rank * 3 + at :: 97 + rank] = word
        terms[0][rows - 1, :2048], terms[1][rows - 1, :2048] = 0.0, -0.0
        expected = boundary(inputs, sum_of(terms), kernels="split")
        found = on_streams(pair, streams, terms, partial(boundary, inputs, kernels="fused"))
        assert all(equal(one, expected) for one in found)
    torch.cuda.synchronize()
    words = op._exchange(device.index or 0)
    assert not any(bool(buffer.any()) for buffer in (words._store, *words._by_stream.values()))


def boundary_of(inputs, term, **way):
    f, options = term
    return boundary(inputs, f, **options, **way)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pair", all_reduce.TRANSPORTS, indirect=True)
def test_terms_without_their_last_addition(pair, form, device):
    streams = [torch.cuda.Stream(device) for _ in pair]
    for rows in TOGETHER:
        inputs = make_inputs(Shape(rows), seed=rows, device=device)
        given, finished = leave_additions(form, make_terms(inputs, 2, rows), rows)
        expected = boundary(inputs, sum_of(finished), kernels="split")
        found = on_streams(pair, streams, given, partial(boundary_of, inputs))
        assert all(equal(one, expected) for one in found), rows
    f, options = given[0]
    with pytest.raises(ValueError, match="needs a boundary that makes its sum inside .*, got 16 rows, kernels split"):
        boundary(inputs, f, sum_over=pair[0], kernels="split", **options)
    if form == "routed":  # not written
        assert torch.equal(f, make_terms(inputs, 2, rows)[0])


@pytest.mark.parametrize("pair", all_reduce.TRANSPORTS, indirect=True)
def test_sums_of_all_kinds_follow_each_other(pair, device):
    """Alone in one hop and two, inside of boundaries, in front of them: the same places, the same turns."""
    streams, dice = [torch.cuda.Stream(device) for _ in pair], random.Random(7)
    for turn in range(80):
        kind = dice.choice(("one_shot", "two_shot", "fused", "split"))
        rows = dice.choice((1, 64, 512) if kind == "two_shot" else TOGETHER)
        inputs = make_inputs(Shape(rows), seed=turn, device=device)
        terms = make_terms(inputs, 2, turn)
        f = sum_of(terms)
        if kind in ("fused", "split"):
            call, expected = partial(boundary, inputs, kernels=kind), boundary(inputs, f, kernels="split")
        else:
            call, expected = partial(alone, kind), (f,)
        assert all(equal(one, expected) for one in on_streams(pair, streams, terms, call)), (turn, kind, rows)


def test_graphs_beside_eager_calls(pair, device):
    streams, inputs = [torch.cuda.Stream(device) for _ in pair], make_inputs(Shape(8), device=device)
    terms = make_terms(inputs, 2)
    weights = {name: getattr(inputs, name) for name in ("fn", "scale", "base", "norm_weight")}

    def chain(term, sum_over):
        first = boundary(inputs, term, sum_over=sum_over)
        between = sum_over(first[3])
        return *first, between, *mhc(between, *first[:3], **weights, sum_over=sum_over)

    on_streams(pair, streams, terms, chain)
    graphs, kept = [], []
    for one, stream, term in zip(pair, streams, terms, strict=True):
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=stream):
            kept.append(chain(term, one))
    for turn in range(12):
        for term, new in zip(terms, make_terms(inputs, 2, 100 + turn), strict=True):
            term.copy_(new)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        first = boundary(inputs, sum_of(terms))
        between = sum_of([first[3]] * 2)
        expected = (*first, between, *mhc(sum_of([between] * 2), *first[:3], **weights))
        assert all(equal(one, expected) for one in kept)
        if turn % 3 == 0:
            assert all(equal(one, expected) for one in on_streams(pair, streams, terms, chain))


@pytest.mark.parametrize("transport", all_reduce.TRANSPORTS)
def test_a_rank_that_does_not_come_is_named(transport, device):
    group = in_threads(2, max_rows=8, transport=transport, patience_s=0.2, traps=False)
    inputs = make_inputs(Shape(3), device=device)
    mhc(**inputs.boundary(), sum_over=group[0], tag=86, kernels="fused")
    torch.cuda.synchronize()
    assert "rank 0 waited in vain for rank 1, in call 0, sum 86 of a graph, of 3 rows" in group[0].fault()
    assert group[1].fault() is None
    for one in group:
        one.close()


def between_processes(rank, ranks, device, gather, transport):
    group = all_reduce.AllReduce(rank, ranks, device, gather, max_rows=512, transport=transport)
    for turn, rows in enumerate(ALONE):
        inputs = make_inputs(Shape(rows), seed=turn, device=device)
        terms = make_terms(inputs, ranks, turn)
        expected = boundary(inputs, sum_of(terms), kernels="split")
        fused = rows <= group.one_shot_rows and op._fits_summing(rows, group.num_sms, device.index)
        for kernels in ("fused", None, "split") if fused else (None, "split"):
            found = boundary(inputs, terms[rank], sum_over=group, kernels=kernels)
            assert equal(found, expected), (rows, kernels)
        for form in FORMS if op.takes_terms(rows, group.hidden, group) else ():
            given, finished = leave_additions(form, terms, turn)
            f, options = given[rank]
            found = boundary(inputs, f, sum_over=group, **options)
            assert equal(found, boundary(inputs, sum_of(finished), kernels="split")), (rows, form)
    truth = reference.mhc_post(**{**inputs.post_only(), "f": reference.summed(terms)})
    assert relative_error(found[0], truth) < MHC.truth
    torch.cuda.synchronize()
    gather(None)
    group.close()


@pytest.mark.parametrize("transport", all_reduce.TRANSPORTS)
@pytest.mark.parametrize("ranks", all_reduce.RANKS)
def test_between_processes(ranks, transport):
    in_processes(ranks, between_processes, transport)


def test_what_does_not_fit_is_a_sum_of_its_own(pair, device, monkeypatch):
    """As on few multiprocessors: the bits stay."""
    inputs, streams = make_inputs(Shape(8), device=device), [torch.cuda.Stream(device) for _ in pair]
    terms = make_terms(inputs, 2)
    expected = boundary(inputs, sum_of(terms), kernels="split")
    for one in pair:
        one.num_sms = 24
    assert all(equal(one, expected) for one in on_streams(pair, streams, terms, partial(boundary, inputs)))
    with pytest.raises(RuntimeError, match="8 rows on 24 multiprocessors; a sum of its own and the boundary behind it"):
        boundary(inputs, terms[0], sum_over=pair[0], kernels="fused")
    pair[0].num_sms = 1000
    monkeypatch.setattr(op.cuda_tensors, "stream_sms", lambda index, stream: 1000)
    wide = make_inputs(Shape(65), device=device)
    with pytest.raises(RuntimeError, match="the sum's places take 32768 vectors of 8, got 33280"):
        boundary(wide, wide.f, sum_over=pair[0], kernels="fused")
