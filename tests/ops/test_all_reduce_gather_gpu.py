"""Gathers between ranks on real cards, between sums of the same group: threads of one process on one card, and
processes, with the cards in turn (test_all_reduce_gpu.py says what that can show)."""

import pytest
import torch

from deepseek_v4_sm120.ops import all_reduce as op
from deepseek_v4_sm120.reference.all_reduce import all_gather as reference
from deepseek_v4_sm120.specs.all_reduce import (
    differing,
    gathered,
    in_threads,
    make_logits,
    make_terms,
    misplaced,
    summed,
)
from tests.ops.all_reduce_groups import in_processes
from tests.ops.test_all_reduce_gpu import EVERY_WAY, ROUNDS

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

VOCABULARY = 129_280


def logits_of(ranks, rows, seed, **options):
    return make_logits(ranks, rows, seed, device="cuda", **options)


def most_rows(ranks):
    """Of ranks on one card, whose blocks must all be resident, as they wait for each other: beside four ranks' there is
    no room for those of a second launch."""
    return {2: op.GATHERED_ROWS, 4: 32, 8: 7}[ranks]


@pytest.mark.parametrize("group", EVERY_WAY, indirect=True)
def test_every_rank_has_what_all_sent_to_the_bit(group):
    """Of the real vocabulary, sums of many rows and few between the gathers, in every generation of places."""
    ranks, streams = len(group), [torch.cuda.Stream() for _ in group]
    for turn, rows in enumerate((1, 2, 7, 64, 1, 32, 33, 1, 8, 64, 3, 1, 1, 5)):
        rows = min(rows, most_rows(ranks))
        sent = logits_of(ranks, rows, turn)
        assert sent[0].shape == (rows, VOCABULARY // ranks)
        outs = gathered(group, sent, streams)
        assert [tuple(out.shape) for out in outs] == [(rows, VOCABULARY)] * ranks
        assert [misplaced(out, sent) for out in outs] == [0] * ranks
        if turn % 3 != 1:
            terms = make_terms(ranks, (1, 200, 9)[turn % 3], turn, device="cuda", hard=True)
            assert [differing(out, terms) for out in summed(group, terms, streams)] == [0] * ranks


@pytest.mark.parametrize("group", [(2, "peer"), (2, "host")], indirect=True)
@pytest.mark.parametrize("columns", [4, 12, 1000, 64_640, 100_004])
def test_float32_and_other_widths(group, columns):
    streams = [torch.cuda.Stream() for _ in group]
    for turn, rows in enumerate((1, 3, 31, 64, 2)):
        for dtype, width in ((torch.float32, columns), (torch.bfloat16, 2 * columns)):
            sent = logits_of(len(group), rows, turn, columns=width, dtype=dtype)
            assert [misplaced(out, sent) for out in gathered(group, sent, streams)] == [0] * len(group)


@pytest.mark.parametrize("group", [(2, "host"), (2, "peer")], indirect=True)
def test_rows_up_to_what_is_taken_one_by_one(group):
    ranks, streams = len(group), [torch.cuda.Stream() for _ in group]
    everything = logits_of(ranks, op.GATHERED_ROWS, 3)
    whole = gathered(group, everything, streams)[0].view(torch.int32)
    for rows in range(1, op.GATHERED_ROWS + 1):
        sent = [logits[-rows:] for logits in everything]
        assert all(one.gathers(x) for one, x in zip(group, sent, strict=True))
        for out in gathered(group, sent, streams):
            assert torch.equal(out.view(torch.int32), whole[-rows:])


def test_nans_and_infinities_stay_what_they_are():
    """On all ranks the same NaN, also in a rank's own columns."""
    group, streams = in_threads(2), [torch.cuda.Stream() for _ in range(2)]
    for dtype in op.GATHERED:
        sent = [torch.full((3, 1024), -torch.inf, dtype=dtype, device="cuda") for _ in group]
        sent[0][0, :32].view(torch.int32).fill_(-1)
        sent[1][1, 5], sent[1][2, 7] = torch.nan, torch.inf
        outs, expected = gathered(group, sent, streams), torch.cat(sent, 1)
        for out in outs:
            assert torch.equal(out.isnan(), expected.isnan()) and torch.equal(out.nan_to_num(), expected.nan_to_num())
            assert torch.equal(out.view(torch.int32), outs[0].view(torch.int32))
        assert int(expected.isnan().sum()) == 33
    for one in group:
        one.close()


def test_a_result_in_given_memory():
    group, streams = in_threads(2), [torch.cuda.Stream() for _ in range(2)]
    sent = logits_of(2, 40, 1)
    outs = [torch.full((42, VOCABULARY), 7.0, dtype=torch.bfloat16, device="cuda") for _ in group]
    torch.cuda.synchronize()
    for one, x, out, stream in zip(group, sent, outs, streams, strict=True):
        with torch.cuda.stream(stream):
            assert op.all_gather(x, one, out=out[1:41]).data_ptr() == out[1:].data_ptr()
    torch.cuda.synchronize()
    for out in outs:
        assert misplaced(out[1:41], sent) == 0 and (out[0] == 7.0).all() and (out[41] == 7.0).all()
    for one in group:
        one.close()


@pytest.mark.parametrize("group", [(2, "peer"), (4, "host")], indirect=True)
def test_graphs_are_replayed_beside_eager_calls(group):
    """A step's end: a sum, the gather, a draft's gather, a sum."""
    ranks, streams = len(group), [torch.cuda.Stream() for _ in group]
    sent, wide = logits_of(ranks, 8, 0), logits_of(ranks, 3, 1, columns=4096, dtype=torch.float32)
    terms = make_terms(ranks, 8, 0, device="cuda")
    gathered(group, sent, streams)
    graphs, outs = [], []
    for one, x, y, term, stream in zip(group, sent, wide, terms, streams, strict=True):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outs.append((one(term), op.all_gather(x, one), op.all_gather(y, one), one(term)))
        graphs.append(graph)
    for turn in range(12):
        fresh = logits_of(ranks, 8, 100 + turn), logits_of(ranks, 3, 200 + turn, columns=4096, dtype=torch.float32)
        fresh += (make_terms(ranks, 8, 300 + turn, device="cuda"),)
        for old, new in zip((sent, wide, terms), fresh, strict=True):
            for a, b in zip(old, new, strict=True):
                a.copy_(b)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for first, logits, other, second in outs:
            assert not differing(first, terms) and not differing(second, terms)
            assert not misplaced(logits, sent) and not misplaced(other, wide)
        if turn % 3 == 0:
            assert [misplaced(out, sent) for out in gathered(group, sent, streams)] == [0] * ranks


@pytest.mark.parametrize("transport", op.TRANSPORTS)
def test_a_rank_that_does_not_come_is_named(transport):
    group = in_threads(2, transport=transport, patience_s=0.2, traps=False)
    gathered(group, logits_of(2, 3, 0), [torch.cuda.Stream() for _ in group])
    torch.cuda.synchronize()
    assert [one.fault() for one in group] == [None, None]
    op.all_gather(logits_of(2, 3, 1)[1], group[1], tag=87)
    torch.cuda.synchronize()
    assert "rank 1 waited in vain for rank 0, in call 1, gather 87 of a graph, of 3 rows" in group[1].fault()
    assert group[0].fault() is None
    for one in group:
        one.close()


# ---- processes


def between_processes(rank, ranks, device, gather, transport):
    group = op.AllReduce(rank, ranks, device, gather, transport=transport)
    for turn, rows in enumerate((1, 8, 64, 1, 33)):
        sent, terms = logits_of(ranks, rows, turn), make_terms(ranks, 8 * rows, turn, device="cuda")
        assert not misplaced(op.all_gather(sent[rank], group), sent)
        assert not differing(group(terms[rank]), terms)
    torch.cuda.synchronize()
    gather(None)
    group.close()


@pytest.mark.parametrize("ranks, transport", [(2, "peer"), (2, "host"), (4, "peer"), (4, "host")])
def test_between_processes(ranks, transport):
    in_processes(ranks, between_processes, transport)


def many(rank, ranks, device, gather, transport):
    """Random rows under a second load on the same card, a sum between the gathers, each word checked."""
    group = op.AllReduce(rank, ranks, device, gather, transport=transport)
    load, other = torch.randn(2048, 2048, device=device), torch.cuda.Stream()
    generator = torch.Generator().manual_seed(7)
    done = wrong = 0
    while done < ROUNDS // 10:
        rows = int(torch.randint(1, op.GATHERED_ROWS + 1, (), generator=generator))
        sent, term = logits_of(ranks, rows, done), make_terms(ranks, rows, done, device="cuda")[rank]
        expected, x = reference(sent).view(torch.int32), sent[rank].clone()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        gather(None)
        with torch.cuda.graph(graph):
            bad = torch.zeros((), dtype=torch.int64, device=device)
            for _ in range(10):
                bad += (op.all_gather(x, group).view(torch.int32) != expected).sum()
                group(term)
        for _ in range(10):
            with torch.cuda.stream(other):
                load @ load
            graph.replay()
            wrong += int(bad)
            done += 10
    torch.cuda.synchronize()
    assert done > 0 and sum(gather(wrong)) == 0
    group.close()


@pytest.mark.parametrize("ranks, transport", [(2, "peer"), (2, "host"), (4, "peer")])
def test_many_gathers_under_load_have_no_wrong_word(ranks, transport, monkeypatch):
    if torch.cuda.device_count() < ranks:  # processes take turns on a card: a wait is a time slice
        monkeypatch.setenv("ALL_REDUCE_TEST_ROUNDS", "1000")
    in_processes(ranks, many, transport)
