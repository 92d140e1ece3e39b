"""The compressor's reference: the state's way against a request's tokens taken at once, and what must not count."""

from __future__ import annotations

import pytest
import torch

from deepseek_v4_sm120.ops import compressor as op
from deepseek_v4_sm120.reference import compressor as reference
from deepseek_v4_sm120.reference import kv_pages
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.specs.compressor import KINDS, PAGE_SIZES, make_inputs, make_plan, page_bytes
from deepseek_v4_sm120.specs.wo_a import make_freqs_cis


def _layer(kind, generator):
    ratio, head_dim, fp4 = KINDS[kind]
    ape = torch.randn((8 if ratio == 4 else ratio, head_dim), generator=generator)
    weight = 1 + 0.2 * torch.randn(head_dim, generator=generator)
    return {"ape": ape, "norm_weight": weight, "norm_eps": 1e-6, "freqs_cis": make_freqs_cis(600, "cpu")}


@pytest.mark.parametrize("kind", KINDS)
def test_token_by_token_is_the_request_at_once(kind):
    """Two requests step by step through rings of the size that SGLang gives them; entries come out where groups end."""
    ratio, head_dim, fp4 = KINDS[kind]
    generator = torch.Generator().manual_seed(5)
    layer, width, ring = _layer(kind, generator), op.width(ratio, head_dim), 8 if ratio == 4 else 128
    lengths = (13, 10) if ratio == 4 else (256, 140)
    tokens = [torch.randn((n, width), generator=generator) for n in lengths]
    state = torch.full((2 * ring // ratio, ratio, width), float("nan"))
    page_size = PAGE_SIZES[ratio, head_dim]
    cache = torch.zeros((4, page_bytes(page_size, head_dim, fp4)), dtype=torch.uint8)
    found = {0: [], 1: []}
    for position in range(max(lengths)):
        active = [r for r in (0, 1) if position < lengths[r]]
        steps, out_loc = [], []
        for r in active:
            write, before = r * ring + position % ring, r * ring + (position - ratio) % ring
            steps.append((position + 1, write, before // ratio, write // ratio))
            out_loc.append(r * page_size + position // ratio)
        ended, entries = reference.compressor(
            torch.stack([tokens[r][position] for r in active]),
            state,
            plan=make_plan(steps, "cpu"),
            out_loc=torch.tensor(out_loc),
            cache=cache,
            page_size=page_size,
            fp4=fp4,
            **layer,
        )
        for row, entry in zip(ended.tolist(), entries, strict=True):
            found[active[row]].append(entry)
    for r in (0, 1):
        expected = reference.entries_of(tokens[r], ratio=ratio, **layer)
        assert len(found[r]) == lengths[r] // ratio == expected.shape[0] > 0
        assert relative_error(torch.stack(found[r]), expected) < 1e-12
        slots = r * page_size + torch.arange(expected.shape[0])
        stored = reference.read(cache, page_size, slots, head_dim, fp4)
        assert 0.001 < relative_error(stored, expected) < KINDS[kind].rounding


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_the_group_needs_is_read_and_written(kind):
    """make_inputs has NaN wherever nothing may be read: later tokens, the other halves, other pages."""
    ratio, head_dim, fp4 = KINDS[kind]
    inputs = make_inputs(kind, (ratio, 2 * ratio, 3 * ratio + 1, 1, ratio - 1, 5 * ratio), device="cpu")
    made = inputs.copy()
    ended, entries = reference.compressor(**made.arguments())
    assert ended.tolist() == [0, 1, 5] and bool(entries.isfinite().all())
    changed = (made.state != inputs.state) & ~(made.state.isnan() & inputs.state.isnan())
    written = changed.view(-1, changed.shape[2]).any(dim=1).nonzero()[:, 0]
    assert sorted(written.tolist()) == sorted(inputs.plan.view(torch.int32)[:, 1].tolist())
    stored = reference.read(made.cache, made.page_size, made.out_loc[ended], head_dim, fp4)
    assert relative_error(stored, entries) < KINDS[kind].rounding
    assert bool((made.cache != inputs.cache).any(dim=1).any())
    again = make_inputs(kind, (ratio, 2 * ratio, 3 * ratio + 1, 1, ratio - 1, 5 * ratio), device="cpu", seed=1)
    assert not torch.equal(again.kv_score, inputs.kv_score)


def test_a_plan_that_points_outside_writes_nothing():
    inputs = make_inputs("c4", (4, 8, 8, 8, 8, 4), device="cpu")
    steps = inputs.plan.view(torch.int32)
    steps[0, 1] = -1  # the token goes nowhere, but the group's other tokens are not complete without it
    inputs.state[steps[0, 3], 3] = 1.0
    steps[1, 2], steps[2, 3] = -1, 2**31 - 1
    inputs.out_loc[3] = -1
    steps[4, 0] = 2**30  # no such position
    made = inputs.copy()
    ended, _ = reference.compressor(**made.arguments())
    assert ended.tolist() == [0, 5]


def test_hadamard_is_orthogonal_and_symmetric():
    matrix = reference.hadamard(128)
    assert torch.equal(matrix, matrix.T)
    assert relative_error(matrix @ matrix, torch.eye(128, dtype=torch.float64)) < 1e-12
    assert bool((matrix[0] > 0).all()) and matrix[1, 1] < 0 < matrix[1, 2]


def test_sizes_are_the_operators():
    for kind in KINDS.values():
        ratio, head_dim, fp4 = kind
        assert kind.width == op.width(ratio, head_dim)
        page_size = PAGE_SIZES[ratio, head_dim]
        if head_dim == op.INDEX_DIM:
            bytes_of = op.entry_page_bytes(page_size, head_dim, fp4)
            assert page_bytes(page_size, head_dim, fp4) == bytes_of == (4352 if fp4 else 8448)
    assert (op.KV_DIM, op.ROTATED) == (kv_pages.HEAD_DIM, kv_pages.ROPE_DIM)
