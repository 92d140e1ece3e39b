"""A compressor's product dealt to ranks on real cards: shares of the outputs on one card, and processes with the cards
in turn, which fork and join the gather's stream as SGLang's layers do, between the sums of another group."""

import os

import pytest
import torch

from deepseek_v4_sm120.ops import all_reduce, bf16_linear
from deepseek_v4_sm120.ops.all_reduce_sizes import DEALT_ROWS
from deepseek_v4_sm120.reference.all_reduce import all_reduce as summed
from deepseek_v4_sm120.specs.all_reduce import make_terms
from deepseek_v4_sm120.specs.bf16_linear import make_weight, make_x
from tests.ops.all_reduce_groups import in_processes

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

ROUNDS = int(os.environ.get("DEALT_PRODUCTS_TEST_ROUNDS", "400"))  # replays of LAYERS layers each
LAYERS, HIDDEN, OUTPUTS = 20, 4096, (2048, 1024)


def make(rows, outputs, seed, hidden=HIDDEN):
    generator = torch.Generator("cuda").manual_seed(seed)  # the same on all cards of a kind, which ranks compare
    return make_x(rows, generator, hidden=hidden), make_weight(outputs, generator, hidden=hidden)


@pytest.mark.parametrize("hidden, outputs", [(4096, 2048), (4096, 1024), (7168, 2048)])
@pytest.mark.parametrize("ranks", all_reduce.RANKS)
def test_an_outputs_bits_do_not_depend_on_the_others(ranks, hidden, outputs, device):
    for rows in (*range(1, DEALT_ROWS + 1), 33, 64, 100):
        x, weight = make(rows, outputs, rows, hidden)
        whole = bf16_linear.bf16_linear(x, weight).view(torch.int32)
        shares = [bf16_linear.bf16_linear(x, share) for share in weight.chunk(ranks)]
        assert torch.equal(torch.cat(shares, 1).view(torch.int32), whole), rows


def step(x, term, weights, dealt, sums, side, load):
    """Layers of a step: a boundary's sum; beside it, until the attention, a compressor's product on the side stream and
    others' work on this one. (how many words are wrong, the last sum)"""
    main, wrong = torch.cuda.current_stream(), torch.zeros((), dtype=torch.int64, device=x.device)
    for layer in range(LAYERS):
        weight, whole = weights[layer % len(weights)]
        term = sums(term)
        side.wait_stream(main)
        share = weight.shape[0] // dealt.ranks
        with torch.cuda.stream(side):
            own = weight[dealt.rank * share : (dealt.rank + 1) * share]
            found = all_reduce.all_gather(bf16_linear.bf16_linear(x, own), dealt, tag=layer + 1)
            different = (found.view(torch.int32) != whole).sum()
        load @ load
        main.wait_stream(side)
        wrong += different
    return wrong, term


def between_processes(rank, ranks, device, gather, transport):
    sums = all_reduce.AllReduce(rank, ranks, device, gather, transport=transport)
    dealt = all_reduce.AllReduce(
        *(rank, ranks, device, gather), max_rows=DEALT_ROWS, transport=transport, name="dealt_products"
    )
    side, load = torch.cuda.Stream(), torch.randn(2048, 2048, device=device)
    for rows in (1, 8, DEALT_ROWS):
        assert dealt.gathers(torch.empty(rows, OUTPUTS[0] // ranks, device=device))
        x = make(rows, 4, rows)[0]
        weights = [make(1, outputs, outputs)[1] for outputs in OUTPUTS]
        held = [(weight, bf16_linear.bf16_linear(x, weight).view(torch.int32)) for weight in weights]
        term = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device=device)
        eager, _ = step(x, term, held, dealt, sums, side, load)
        torch.cuda.synchronize()
        gather(None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured, _ = step(x, term, held, dealt, sums, side, load)
        wrong = int(eager)
        for _ in range(ROUNDS):
            graph.replay()
            wrong += int(captured)
        assert sum(gather(wrong)) == 0, f"rows {rows}"
    terms = make_terms(ranks, 8, 3, device="cuda")
    assert torch.equal(sums(terms[rank]).view(torch.int16), summed(terms).view(torch.int16)), (
        "the sums' turns are whole"
    )
    torch.cuda.synchronize()
    gather(None)
    assert (dealt.fault(), sums.fault()) == (None, None)
    dealt.close()
    sums.close()


@pytest.mark.parametrize("ranks, transport", [(2, "peer"), (2, "host"), (4, "peer"), (4, "host")])
def test_layers_of_steps_between_processes(ranks, transport, monkeypatch):
    if torch.cuda.device_count() < ranks:  # processes take turns on a card: a wait is a time slice
        monkeypatch.setenv("DEALT_PRODUCTS_TEST_ROUNDS", "8")
    in_processes(ranks, between_processes, transport)
