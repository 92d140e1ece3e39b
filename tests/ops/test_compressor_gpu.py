"""ops.compressor on the GPU against the reference: state, entries, bits, hostile plans, graphs, large pools."""

from __future__ import annotations

import pytest
import torch

from deepseek_v4_sm120.ops import compressor as op
from deepseek_v4_sm120.ops.compressor import compressor
from deepseek_v4_sm120.reference import compressor as reference
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.specs.compressor import KINDS, make_inputs

pytestmark = pytest.mark.gpu


def _lengths(kind, rows):
    """Groups that end, first groups, and rows in the middle of one."""
    ratio = KINDS[kind][0]
    pattern = (ratio, 2 * ratio, 1, 7 * ratio, ratio + 1, 3 * ratio - 1, 16 * ratio)
    return [pattern[i % len(pattern)] for i in range(rows)]


def _same_state(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def _run(inputs):
    made = inputs.copy()
    compressor(**made.arguments())
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", (1, 2, 7, 64, 512))
def test_state_and_entries(kind, rows):
    ratio, head_dim, fp4 = KINDS[kind]
    inputs = make_inputs(kind, _lengths(kind, rows), seed=rows)
    ours, truth = _run(inputs), inputs.copy()
    ended, entries = reference.compressor(**truth.arguments())
    assert _same_state(ours.state, truth.state)
    stored = reference.read(ours.cache, ours.page_size, ours.out_loc[ended], head_dim, fp4)
    assert relative_error(stored, entries) < KINDS[kind].rounding
    rounded = reference.read(truth.cache, truth.page_size, truth.out_loc[ended], head_dim, fp4)
    assert relative_error(stored, rounded) < 0.02
    # few numbers, and the indexer's float32 scales, fall on the other side of a rounding; nothing else is touched
    differs = ours.cache != truth.cache
    assert float(differs.sum()) <= 0.01 * entries.numel() + (4 if kind == "index" else 0) * len(ended) + 1
    entry_pages = torch.unique(ours.out_loc[ended] // ours.page_size)
    untouched = torch.ones(ours.cache.shape[0], dtype=torch.bool, device="cuda")
    untouched[entry_pages] = False
    assert torch.equal(ours.cache[untouched], inputs.cache[untouched])


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_has_the_bits_it_has_among_others(kind):
    inputs = make_inputs(kind, _lengths(kind, 40), seed=3)
    together = _run(inputs)
    slots = together.state.view(-1, together.state.shape[2])
    for row in (0, 1, 3, 7, 39):
        alone = _run(inputs.rows(slice(row, row + 1)))
        written = int(inputs.plan.view(torch.int32)[row, 1])
        assert torch.equal(alone.state.view(-1, slots.shape[1])[written], slots[written])
        page, entry = divmod(int(inputs.out_loc[row]), inputs.page_size)
        if inputs.plan.view(torch.int32)[row, 0] % KINDS[kind][0] == 0:
            changed = alone.cache[page] != inputs.cache[page]
            assert bool(changed.any()) and torch.equal(alone.cache[page][changed], together.cache[page][changed])
    assert torch.equal(_run(inputs).cache, together.cache)


@pytest.mark.parametrize("kind", KINDS)
def test_token_by_token(kind):
    """A request of many groups, one launch right behind the other, through a ring of the size that SGLang gives it."""
    ratio, head_dim, fp4 = KINDS[kind]
    steps, ring = 6 * ratio + 2, 8 if ratio == 4 else 128
    inputs = make_inputs(kind, [1] * 8, seed=9)
    tokens = torch.randn((steps, inputs.kv_score.shape[1]), device="cuda")
    state = torch.full((ring // ratio + 1, ratio, tokens.shape[1]), float("nan"), device="cuda")
    plans = torch.zeros((steps, 4), dtype=torch.int32)
    for i in range(steps):
        write, before = ratio + i % ring, ratio + (i - ratio) % ring
        plans[i] = torch.tensor([i + 1, write, before // ratio, write // ratio])
    plans, out_loc = plans.to("cuda").view(torch.uint8), torch.arange(steps, device="cuda") // ratio + 1
    given = {**inputs.arguments(), "state": state}
    torch.cuda.synchronize()
    for i in range(steps):
        step = slice(i, i + 1)
        compressor(**{**given, "kv_score": tokens[step], "plan": plans[step], "out_loc": out_loc[step]})
    layer = [inputs.ape, inputs.norm_weight, inputs.norm_eps, inputs.freqs_cis]
    on_host = [value.cpu() if isinstance(value, torch.Tensor) else value for value in layer]
    expected = reference.entries_of(tokens.cpu(), *on_host, ratio)
    slots = torch.arange(1, expected.shape[0] + 1, device="cuda")
    stored = reference.read(inputs.cache, inputs.page_size, slots, head_dim, fp4)
    assert relative_error(stored.cpu(), expected) < KINDS[kind].rounding


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_plans_write_nothing_where_they_point_outside(kind):
    ratio = KINDS[kind][0]
    inputs = make_inputs(kind, [2 * ratio] * 10, seed=4)
    steps, far = inputs.plan.view(torch.int32), 2**31 - 1
    for row in (0, 1):  # their token goes nowhere: what lies in its place counts
        inputs.state[int(steps[row, 3]), ratio - 1] = 1.0
    steps[0, 1], steps[1, 1], steps[2, 3], steps[3, 3] = -1, far, -1, far
    inputs.out_loc[4], inputs.out_loc[5] = -1, 2**62
    steps[6, 0] = 0
    steps[7, 0] = 2**31 - ratio  # no such position
    steps[8, 2] = -7  # read by groups of 4 only
    ours, truth = _run(inputs), inputs.copy()
    ended, _ = reference.compressor(**truth.arguments())
    assert set(ended.tolist()) == ({0, 1, 9} if ratio == 4 else {0, 1, 8, 9})
    assert _same_state(ours.state, truth.state)
    for row in range(10):
        page, entry = divmod(int(inputs.out_loc[row]), inputs.page_size)
        if row in ended.tolist() or not 0 <= page < inputs.cache.shape[0]:
            continue
        if page not in (inputs.out_loc[ended] // inputs.page_size).tolist():
            assert torch.equal(ours.cache[page], inputs.cache[page])
    assert int((ours.cache != truth.cache).sum()) <= 0.01 * inputs.cache.numel()


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_is_not_the_last_of_the_group_that_it_ends(kind):
    """The plan says where it goes: it is written, then the group is read."""
    ratio = KINDS[kind][0]
    inputs = make_inputs(kind, [2 * ratio] * 3, seed=10)
    steps = inputs.plan.view(torch.int32)
    for row, place in enumerate((0, ratio // 2, ratio - 2)):
        own = int(steps[row, 3])
        inputs.state[own, ratio - 1] = inputs.state[own, place].nan_to_num()
        steps[row, 1] = own * ratio + place
    ours, truth = _run(inputs), inputs.copy()
    ended, entries = reference.compressor(**truth.arguments())
    assert len(ended) == 3 and _same_state(ours.state, truth.state)
    stored = reference.read(ours.cache, ours.page_size, ours.out_loc, *KINDS[kind][1:])
    assert relative_error(stored, entries) < KINDS[kind].rounding


@pytest.mark.parametrize("kind", KINDS)
def test_padded_rows_of_a_graph(kind):
    """They share a slot, a length of 1 and the dummy entry: nothing of the others changes."""
    padded = make_inputs(kind, [*_lengths(kind, 8), *[1] * 24], seed=6)
    steps = padded.plan.view(torch.int32)
    steps[8:] = torch.tensor([1, int(steps[8, 1]), 0, int(steps[8, 3])], device="cuda")
    padded.kv_score[8:] = float("nan")
    ours = _run(padded)
    alone = _run(padded.rows(slice(0, 8)))
    assert torch.equal(ours.cache, alone.cache)
    keep = torch.ones(ours.state.shape[0] * ours.state.shape[1], dtype=torch.bool, device="cuda")
    keep[steps[8, 1].long()] = False
    width = ours.state.shape[2]
    assert _same_state(ours.state.view(-1, width)[keep], alone.state.view(-1, width)[keep])


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_replays_it_on_what_the_tensors_hold_then(kind):
    first, then = make_inputs(kind, [1] * 9, seed=1), make_inputs(kind, _lengths(kind, 9), seed=2)
    expected = _run(then)
    static = first.copy()
    compressor(**static.arguments())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compressor(**static.arguments())
        compressor(**static.arguments())  # once more changes nothing: the token is written before it is read
    for name, value in then.arguments().items():
        if isinstance(value, torch.Tensor):
            getattr(static, name).copy_(value)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(static.cache, expected.cache) and _same_state(static.state, expected.state)


def test_two_streams_at_once():
    """The compressors of a layer run side by side."""
    made = [make_inputs(kind, _lengths(kind, 32), seed=8) for kind in ("c128", "c128", "index")]
    expected = [_run(inputs) for inputs in made]
    streams = [torch.cuda.Stream() for _ in made]
    torch.cuda.synchronize()
    for _ in range(10):
        for inputs, stream in zip(made, streams, strict=True):
            with torch.cuda.stream(stream):
                compressor(**inputs.arguments())
    torch.cuda.synchronize()
    for inputs, wanted in zip(made, expected, strict=True):
        assert torch.equal(inputs.cache, wanted.cache)


@pytest.mark.parametrize("kind", ("c4", "c128", "index"))
def test_pools_beyond_2_to_the_31_bytes(kind):
    ratio, head_dim, fp4 = KINDS[kind]
    inputs = make_inputs(kind, [2 * ratio], seed=5)
    expected = _run(inputs)
    _, width = inputs.state.shape[1:]
    pages = 2**31 // (4 * ratio * width) + inputs.state.shape[0] + 8
    state = torch.empty((pages, ratio, width), device="cuda")
    shift = pages - inputs.state.shape[0]
    state[shift:] = inputs.state
    cache_pages = 2**31 // inputs.cache.stride(0) + inputs.cache.shape[0] + 8
    cache = torch.empty((cache_pages, inputs.cache.stride(0)), dtype=torch.uint8, device="cuda")
    cache_shift = cache_pages - inputs.cache.shape[0]
    cache[cache_shift:] = inputs.cache
    steps = inputs.plan.view(torch.int32)
    steps += torch.tensor([0, shift * ratio, shift if ratio == 4 else 0, shift], dtype=torch.int32, device="cuda")
    out_loc = inputs.out_loc + cache_shift * inputs.page_size
    assert int(steps[0, 1]) * width * 4 > 2**31 and int(out_loc[0]) // inputs.page_size * cache.stride(0) > 2**31
    compressor(**{**inputs.arguments(), "state": state, "cache": cache, "out_loc": out_loc})
    assert torch.equal(cache[cache_shift:], expected.cache)
    assert _same_state(state[shift:], expected.state)


@pytest.mark.parametrize("kind", KINDS)
def test_strides_and_page_gaps(kind):
    inputs = make_inputs(kind, _lengths(kind, 12), seed=7, gap=64)
    packed = _run(make_inputs(kind, _lengths(kind, 12), seed=7))
    wide = torch.full((12, inputs.kv_score.shape[1] + 64), float("nan"), device="cuda")
    wide[:, : inputs.kv_score.shape[1]] = inputs.kv_score
    made = inputs.copy()
    compressor(**{**made.arguments(), "kv_score": wide[:, : inputs.kv_score.shape[1]]})
    assert torch.equal(made.cache, packed.cache)


def test_infinite_scores_and_cleared_state():
    """SGLang clears a state to values 0 and scores -inf: such a token has no weight."""
    inputs = make_inputs("c4", [8], seed=11)
    before = int(inputs.plan.view(torch.int32)[0, 2])
    inputs.state[before, :, :1024], inputs.state[before, :, 1024:] = 0.0, float("-inf")
    ours, truth = _run(inputs), inputs.copy()
    ended, entries = reference.compressor(**truth.arguments())
    stored = reference.read(ours.cache, ours.page_size, ours.out_loc[ended], 512, False)
    assert bool(entries.isfinite().all()) and relative_error(stored, entries) < KINDS["c4"].rounding


def test_no_rows():
    inputs = make_inputs("c128", [128])
    assert compressor(**inputs.rows(slice(0, 0)).arguments()) is None
    assert op.MAX_ROWS == 512


@pytest.mark.parametrize("rows", (1, 8))
@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_that_the_launch_in_front_writes(kind, rows):
    """The plan is read ahead of that launch's end too, where it may be the one before: same bits as one by one.

    A compressor's token goes to its state as it came, so one whose state holds the plan writes it directly in front.
    """
    given = make_inputs(kind, [3 * KINDS[kind][0]] * rows, seed=9)
    steps = given.plan.view(torch.int32)
    others = torch.full_like(steps, -1)  # nothing to do; far outside
    middle = steps - torch.tensor([1, 0, 0, 0], dtype=torch.int32, device="cuda")  # the same, but no group ends
    plans = [steps, others, steps.roll(1, 0), middle, steps.roll(1, 0), steps]

    def run(waits):
        made, writer = given.copy(), make_inputs("c4", [2], seed=10)
        slot = int(writer.plan.view(torch.int32)[0, 1])
        made.plan = writer.state.view(-1, writer.state.shape[-1])[slot, : 4 * rows].view(torch.uint8).view(rows, 16)
        tokens = [writer.kv_score.clone() for _ in plans]
        for token, plan in zip(tokens, plans, strict=True):
            token.view(torch.int32)[0, : 4 * rows] = plan.flatten()
        caches = [given.copy().cache for _ in plans]  # ahead: a copy would stand between the launches
        torch.cuda.synchronize()
        for token, cache in zip(tokens, caches, strict=True):
            compressor(**{**writer.arguments(), "kv_score": token})
            waits()
            compressor(**{**made.arguments(), "cache": cache})
            waits()
        torch.cuda.synchronize()
        return torch.stack(caches), made.state

    one_by_one, state = run(torch.cuda.synchronize)
    cache, state_at_once = run(lambda: None)
    assert torch.equal(cache, one_by_one) and _same_state(state_at_once, state)
