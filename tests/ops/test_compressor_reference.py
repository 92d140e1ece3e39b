"""The compressor's reference: the state's way against a request's tokens taken at once, and what must not count."""

from __future__ import annotations

import pytest
import torch

from deepseek_v4_sm120.ops import compressor as op
from deepseek_v4_sm120.reference import compressor as reference
from deepseek_v4_sm120.reference import kv_pages
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.specs.compressor import (
    KINDS,
    PAGE_SIZES,
    Request,
    decoded,
    make_inputs,
    make_plan,
    make_step,
    page_bytes,
    planned,
)
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


@pytest.mark.parametrize("tokens", (1, 4, 6, 8))
@pytest.mark.parametrize("kind", KINDS)
def test_many_tokens_at_once_are_decode_steps(kind, tokens):
    """State and cache to the byte, at all places of a group, in the first group too; other state is NaN."""
    ratio, head_dim, fp4 = KINDS[kind]
    requests = [Request(2 * ratio - 4 + i if i else 0, tokens) for i in range(9)]
    inputs = make_step(kind, requests, device="cpu", padding=5)
    at_once, one_by_one = inputs.copy(), inputs.copy()
    rows, entries = reference.compressor(**at_once.arguments())
    found = {}
    for step in decoded(one_by_one, requests):
        ended, of_step = reference.compressor(**step.arguments())
        found |= dict(zip(step.out_loc[ended].tolist(), of_step, strict=True))
    assert len(rows) == len(found) > 0 and bool(entries.isfinite().all())
    assert relative_error(entries, torch.stack([found[slot] for slot in at_once.out_loc[rows].tolist()])) < 1e-12
    assert torch.equal(at_once.cache, one_by_one.cache) and bool((at_once.cache != inputs.cache).any())
    assert torch.equal(at_once.state.view(torch.int32), one_by_one.state.view(torch.int32))


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_at_once_has_the_entries_of_its_tokens(kind):
    """In chunks through a ring that holds one window: what a chunk writes lies where it has read."""
    ratio, head_dim, fp4 = KINDS[kind]
    generator, ring = torch.Generator().manual_seed(7), 8 if ratio == 4 else 128
    layer, width = _layer(kind, generator), op.width(ratio, head_dim)
    tokens = torch.randn((3 * ratio + 50, width), generator=generator)
    state = torch.full((2 * ring // ratio, ratio, width), float("nan"))
    page_size = PAGE_SIZES[ratio, head_dim]
    cache = torch.zeros((-(-200 // page_size), page_bytes(page_size, head_dim, fp4)), dtype=torch.uint8)
    found, before = [], 0
    for chunk in (ratio + 1, 30, 2, len(tokens)):
        new = tokens[before : before + chunk]
        entries, writes = planned(ratio, [Request(before, len(new))], [ring], ring)
        plan = [(length, row | held << 16, *pages) for length, row, held, *pages in entries]
        rows, made = reference.compressor(
            new,
            state,
            plan=make_plan(plan, "cpu"),
            writes=torch.tensor(writes, dtype=torch.int32).view(-1, 2).view(torch.uint8),
            out_loc=torch.arange(before, before + len(new)) // ratio,
            cache=cache,
            page_size=page_size,
            fp4=fp4,
            **layer,
        )
        found += made
        before += len(new)
    expected = reference.entries_of(tokens, ratio=ratio, **layer)
    assert len(found) == len(expected) and relative_error(torch.stack(found), expected) < 1e-12


def test_many_tokens_that_point_outside_write_nothing():
    """Of an entry length, row, tokens of the state and pages; its slot; a write's row and slot."""
    inputs = make_step("c4", [Request(6, 4)] * 9, device="cpu")
    entries, writes = inputs.plan.view(torch.int32), inputs.writes.view(torch.int32)
    there = (entries[:, 0] != -1).nonzero()[:, 0].tolist()
    assert len(there) == 9
    for line, (column, value) in zip(
        there,
        ((0, 2**30), (0, -2), (1, 9999), (1, 2 | 3 << 16), (2, -1), (3, 2**31 - 1), (0, 0), (1, -65536)),
        strict=False,
    ):
        entries[line, column] = value
    kept = int(entries[there[8], 1]) & 0xFFFF  # beside it the last but one, of which all 8 tokens are the state's
    writes[0], writes[1], writes[2, 1] = torch.tensor([99, 0]), torch.tensor([3, 2**31 - 1]), -5
    made = inputs.copy()
    rows, _ = reference.compressor(**made.arguments())
    assert sorted(rows.tolist()) == sorted([kept, 0])
    inputs.out_loc[kept] = -1
    rows, _ = reference.compressor(**inputs.copy().arguments())
    assert rows.tolist() == [0]
    changed = (made.state != inputs.state) & ~(made.state.isnan() & inputs.state.isnan())
    assert 0 < int(changed.flatten(0, 1).any(dim=1).sum()) <= len(writes) - 3


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
