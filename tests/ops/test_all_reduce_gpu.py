"""Sums between ranks on real cards: threads of one process on one card, and processes, cards in turn."""

import pytest
import torch

from deepseek_v4_sm120.ops import all_reduce as op
from deepseek_v4_sm120.reference.all_reduce import all_reduce as reference
from tests.ops.all_reduce_groups import in_processes, in_threads

pytestmark = pytest.mark.gpu

HIDDEN = 4096
EVERY_WAY = [(ranks, transport) for ranks in op.RANKS for transport in op.TRANSPORTS]


def make_terms(ranks, rows, seed, hard=True):
    """bf16 terms; with `hard`: NaNs of all bits, infinities, zeros of both signs and the largest numbers among them."""
    generator = torch.Generator("cuda").manual_seed(seed)
    terms = [torch.randn(rows, HIDDEN, device="cuda", generator=generator).bfloat16() for _ in range(ranks)]
    if hard:
        for rank, term in enumerate(terms):
            words = term.view(torch.int16).flatten()
            for at, word in enumerate((-1, -1, 0x7F80, -0x80, -0x8000, 0, 0x7F7F, 0x7FFF)):
                words[rank * 3 + at :: 97 + rank] = word
    return terms


def same_bits(a, b):
    nan = a.isnan()
    assert torch.equal(nan, b.isnan())
    assert torch.equal(a.view(torch.int16)[~nan], b.view(torch.int16)[~nan])
    return True


@pytest.fixture
def group(request):
    ranks, transport = request.param
    made = in_threads(ranks, max_rows=512, transport=transport)
    yield made
    torch.cuda.synchronize()
    for one in made:
        one.close()


def summed(group, terms, streams, **options):
    outs = []
    for one, term, stream in zip(group, terms, streams, strict=True):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            outs.append(one(term, **options))
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    return outs


@pytest.mark.parametrize("group", EVERY_WAY, indirect=True)
def test_every_rank_has_the_bits_of_the_specification(group):
    streams = [torch.cuda.Stream() for _ in group]
    for turn, rows in enumerate((1, 2, 7, 8, 9, 64, 3, 512, 1, 65, 200, 1, 1, 64, 512, 512, 5)):
        terms = make_terms(len(group), rows, turn)
        ways = ("one_shot", "two_shot") if rows <= op.ONE_SHOT_ROWS else ("two_shot",)
        for algorithm in ways:
            outs = summed(group, terms, streams, algorithm=algorithm)
            expected = reference(terms)
            assert all(
                same_bits(out, expected) and torch.equal(out.view(torch.int16), outs[0].view(torch.int16))
                for out in outs
            )


@pytest.mark.parametrize("group", [(2, "peer"), (4, "host")], indirect=True)
def test_graphs_are_replayed_beside_eager_calls(group):
    streams, rows = [torch.cuda.Stream() for _ in group], 8
    terms = make_terms(len(group), rows, 0, hard=False)
    summed(group, terms, streams)
    graphs, outs = [], []
    for one, term, stream in zip(group, terms, streams, strict=True):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            first = one(term)
            outs.append((first, one(first)))
        graphs.append(graph)
    for turn in range(12):
        for term, new in zip(terms, make_terms(len(group), rows, 100 + turn), strict=True):
            term.copy_(new)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        once = reference(terms)
        assert all(
            same_bits(first, once) and same_bits(second, reference([once] * len(group))) for first, second in outs
        )
        if turn % 3 == 0:
            assert all(same_bits(out, once) for out in summed(group, terms, streams))


@pytest.mark.parametrize("transport", op.TRANSPORTS)
def test_in_place(transport):
    group = in_threads(2, max_rows=512, transport=transport)
    for rows in (1, 64, 512):
        terms = make_terms(2, rows, rows)
        expected, streams = reference(terms), [torch.cuda.Stream() for _ in group]
        for one, term, stream in zip(group, terms, streams, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                one(term, out=term, algorithm="two_shot")
        torch.cuda.synchronize()
        assert all(same_bits(term, expected) for term in terms)
    for one in group:
        one.close()


@pytest.mark.parametrize("transport", op.TRANSPORTS)
def test_a_rank_that_does_not_come_is_named(transport):
    group = in_threads(2, max_rows=8, transport=transport, patience_s=0.2, traps=False)
    summed(group, make_terms(2, 3, 0), [torch.cuda.Stream() for _ in group])
    assert [one.fault() for one in group] == [None, None]
    group[0](make_terms(1, 3, 1)[0], tag=86)
    torch.cuda.synchronize()
    assert "rank 0 waited in vain for rank 1, in call 1, of 3 rows, tag 86" in group[0].fault()
    assert group[1].fault() is None
    for one in group:
        one.close()


def between_processes(rank, ranks, device, gather, transport):
    group = op.AllReduce(rank, ranks, device, gather, max_rows=512, transport=transport)
    for turn, rows in enumerate((1, 8, 64, 512, 1, 64)):
        terms = make_terms(ranks, rows, turn)
        assert same_bits(group(terms[rank]), reference(terms))
    torch.cuda.synchronize()
    gather(None)
    group.close()


@pytest.mark.parametrize("ranks, transport", [(2, "peer"), (2, "host"), (4, "peer"), (4, "host")])
def test_between_processes(ranks, transport):
    """On one card, too: processes take turns there."""
    in_processes(ranks, between_processes, transport)
