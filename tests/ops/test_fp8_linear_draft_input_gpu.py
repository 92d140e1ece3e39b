"""ops.fp8_linear_draft_input on the GPU: against the reference, against its parts to the bit, in graphs."""

from __future__ import annotations

import pytest
import torch

from deepseek_v4_sm120.ops import fp8_linear
from deepseek_v4_sm120.ops import fp8_linear_draft_input as op
from deepseek_v4_sm120.reference import fp8_linear as reference
from deepseek_v4_sm120.reference.accuracy import strict_error
from deepseek_v4_sm120.specs.bounds import DRAFT_INPUT, LATENT_NORM
from deepseek_v4_sm120.specs.fp8_linear import make_draft_input

pytestmark = pytest.mark.gpu

MOST, ENTRIES = 70, 1000


@pytest.fixture(scope="module", params=[4096, 7168])
def made(request):
    generator = torch.Generator("cuda").manual_seed(request.param)
    return make_draft_input(MOST, 4096, request.param, generator, entries=ENTRIES)


def same(one, other) -> bool:
    return torch.equal(one.contiguous().view(torch.int16), other.contiguous().view(torch.int16))


def test_against_the_reference_and_its_parts(made):
    """By ids and by rows, in any number of tokens the same bits: those of two products and torch's addition."""
    (hidden, table, *halves), by = made
    together = op.draft_input(hidden, table, *halves, **by)
    assert strict_error(together, reference.draft_input(hidden, table, *halves, **by)) < DRAFT_INPUT.truth
    normed = op._norms(hidden, table, *halves, by["ids"])
    for x, source, half in zip(normed, (hidden.flatten(0, 1), table[by["ids"]]), halves, strict=True):
        assert strict_error(x, reference.latent_norm(source, half.norm, half.eps)) < LATENT_NORM.truth
    parts = [fp8_linear.fp8_linear(x, h.weight, h.weight_scale) for x, h in zip(normed, halves, strict=True)]
    assert same(together, parts[1][:, None] + parts[0].view(MOST, 4, -1))
    for tokens in (1, 2, 3, 8, 9, 16, 17, 33, 64, 69):
        ids = by["ids"][:tokens]
        for embedded, given in ((table, ids), (table, ids.int()), (table[ids], None)):
            assert same(op.draft_input(hidden[:tokens], embedded, *halves, ids=given), together[:tokens]), tokens


def test_what_is_wrong_stays_in_its_token(made):
    (hidden, table, *halves), by = made
    right = op.draft_input(hidden, table, *halves, **by)
    hidden, ids = hidden.clone(), by["ids"].clone()
    hidden[3, 2, 5], ids[7], ids[9] = torch.nan, ENTRIES, -1
    found = op.draft_input(hidden, table, *halves, ids=ids)
    assert found[3, 2].isnan().all() and found[7].isnan().all() and found[9].isnan().all()
    kept = [token for token in range(MOST) if token not in (3, 7, 9)]
    assert same(found[kept], right[kept]) and same(found[3, :2], right[3, :2]) and same(found[3, 3], right[3, 3])


def test_in_a_graph_behind_what_writes_its_inputs(made):
    (hidden, table, *halves), by = made
    inputs, ids = torch.zeros_like(hidden[:8]), torch.zeros_like(by["ids"][:8])
    graph, out = torch.cuda.CUDAGraph(), None
    op.draft_input(inputs, table, *halves, ids=ids)
    with torch.cuda.graph(graph):
        x, chosen = inputs + 0, ids + 0
        out = op.draft_input(x, table, *halves, ids=chosen)
    for first in (0, 20, 40):
        inputs.copy_(hidden[first : first + 8])
        ids.copy_(by["ids"][first : first + 8])
        graph.replay()
        assert same(out, op.draft_input(inputs, table, *halves, ids=ids))


def test_no_tokens(made):
    (hidden, table, *halves), by = made
    assert op.draft_input(hidden[:0], table, *halves, ids=by["ids"][:0]).shape == (0, 4, 4096)
