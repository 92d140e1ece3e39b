"""ops.compressor on the GPU against the reference: state, entries, bits, hostile plans, graphs, large pools."""

from __future__ import annotations

import pytest
import torch

from deepseek_v4_sm120.ops import compressor as op
from deepseek_v4_sm120.ops.compressor import compressor
from deepseek_v4_sm120.reference import compressor as reference
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.specs import bounds
from deepseek_v4_sm120.specs.compressor import KINDS, Request, decoded, make_drafts, make_inputs, make_step, planned

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
    assert relative_error(stored, rounded) < bounds.COMPRESSOR_STORED
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


# ---- many tokens of a request in a step: verification, short prompts


def _same_as_the_reference(inputs, kind):
    """State to the bit, entries within the cache's rounding, and no other page of the cache."""
    ratio, head_dim, fp4 = KINDS[kind]
    ours, truth = _run(inputs), inputs.copy()
    rows, entries = reference.compressor(**truth.arguments())
    assert _same_state(ours.state, truth.state)
    stored = reference.read(ours.cache, ours.page_size, ours.out_loc[rows], head_dim, fp4)
    assert not len(rows) or relative_error(stored, entries) < KINDS[kind].rounding
    assert float((ours.cache != truth.cache).sum()) <= 0.01 * entries.numel() + 4 * len(rows)
    untouched = torch.ones(ours.cache.shape[0], dtype=torch.bool, device="cuda")
    untouched[ours.out_loc[rows] // ours.page_size] = False
    assert torch.equal(ours.cache[untouched], inputs.cache[untouched])
    return ours, rows


def _requests(kind, count, tokens):
    ratio = KINDS[kind].ratio
    return [Request(3 * ratio - 4 + i if i % 9 else 0, tokens) for i in range(count)]


@pytest.mark.parametrize("tokens", (1, 2, 4, 6, 8))
@pytest.mark.parametrize("kind", KINDS)
def test_many_tokens_at_once_have_the_bits_of_decode(kind, tokens):
    requests = _requests(kind, 17, tokens)
    inputs = make_step(kind, requests, padding=3)
    ours, rows = _same_as_the_reference(inputs, kind)
    one_by_one = inputs.copy()
    for step in decoded(one_by_one, requests):
        compressor(**step.arguments())
    assert _same_state(ours.state, one_by_one.state) and torch.equal(ours.cache, one_by_one.cache) and len(rows)


@pytest.mark.parametrize("streams", (1, 8, 64))
@pytest.mark.parametrize("kind", KINDS)
def test_ragged_verifications(kind, streams):
    ratio = KINDS[kind].ratio
    requests = [Request(2 * ratio - 5 + i, 1 + i * 5 % 8) for i in range(streams)]
    inputs = make_step(kind, requests, seed=streams, padding=min(40, 512 - 8 * streams))
    ours, rows = _same_as_the_reference(inputs, kind)
    shuffled = torch.randperm(len(inputs.plan), device="cuda")
    again = inputs.copy()
    again.plan, again.writes = inputs.plan[shuffled].contiguous(), inputs.writes[shuffled.flip(0)].contiguous()
    again = _run(again)
    assert _same_state(again.state, ours.state) and torch.equal(again.cache, ours.cache)


@pytest.mark.parametrize("rows", (1, 30, 200, 512))
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_through_a_ring_that_holds_one_window(kind, rows):
    """What a step writes lies where its groups are read: they see the state of before, in whatever order blocks run."""
    ratio = KINDS[kind].ratio
    half = rows // 2
    requests = [Request(5 * ratio + 3, rows - half), *([Request(2 * ratio - 1, half)] if half else [])]
    inputs = make_step(kind, requests, ring=8 if ratio == 4 else 128, seed=rows)
    expected, _ = _same_as_the_reference(inputs, kind)
    for _ in range(20):
        found = _run(inputs)
        assert _same_state(found.state, expected.state) and torch.equal(found.cache, expected.cache)


@pytest.mark.parametrize("kind", KINDS)
def test_entries_and_writes_that_point_outside(kind):
    ratio = KINDS[kind].ratio
    inputs = make_step(kind, [Request(3 * ratio - 2, 4)] * 9)
    entries, writes = inputs.plan.view(torch.int32), inputs.writes.view(torch.int32)
    there = (entries[:, 0] != -1).nonzero()[:, 0].tolist()
    bad = ((0, 2**30), (0, -2), (1, 9999), (1, 0), (2, -1), (3, 2**31 - 1), (0, 0))
    for line, (column, value) in zip(there[:7], bad, strict=True):
        entries[line, column] = value
    inputs.out_loc[int(entries[there[7], 1]) & 0xFFFF] = 2**62
    writes[0], writes[1], writes[2, 1] = torch.tensor([99, 0]), torch.tensor([3, 2**31 - 1]), -5
    _, rows = _same_as_the_reference(inputs, kind)
    assert len(rows) == (1 if ratio == 4 else 2)  # groups of 128 have none before


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_replays_a_verification_on_other_plans(kind):
    first, then = (
        make_step(kind, _requests(kind, 8, tokens), seed=tokens, padding=8 * (4 - tokens)) for tokens in (2, 4)
    )
    expected = _run(then)
    static = first.copy()
    compressor(**static.arguments())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compressor(**static.arguments())
    for name, value in then.arguments().items():
        if isinstance(value, torch.Tensor):
            getattr(static, name).copy_(value)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(static.cache, expected.cache) and _same_state(static.state, expected.state)
    for _ in range(3):  # words of the blocks that find each other are zero again
        for name in ("state", "cache"):
            getattr(static, name).copy_(getattr(then, name))
        graph.replay()
        assert torch.equal(static.cache, expected.cache) and _same_state(static.state, expected.state)


@pytest.mark.parametrize("kind", KINDS)
def test_verifications_behind_each_other_without_a_wait(kind):
    """Each reads the state that the one in front has written, its plan as a hint before that has ended."""
    ratio = KINDS[kind].ratio
    ring = 16 if ratio == 4 else 256
    inputs = make_step(kind, [Request(0, 4)])
    steps, tokens = [], torch.randn((3 * ratio + 16, inputs.kv_score.shape[1]), device="cuda")
    for before in range(0, len(tokens) - 4, 3):  # three of four are kept
        entries, writes = planned(ratio, [Request(before, 4)], [0], ring)
        lines = [(length, row | held << 16, *pages) for length, row, held, *pages in entries] or [(-1, 0, -1, -1)]
        plans = [torch.tensor(p, dtype=torch.int32).view(torch.uint8).cuda() for p in (lines, writes)]
        steps.append((plans, tokens[before : before + 4].contiguous(), torch.arange(before, before + 4) // ratio + 1))
    steps = [(plans, new, slots.cuda()) for plans, new, slots in steps]

    def run(wait):
        made = inputs.copy()
        made.state.fill_(float("nan"))
        torch.cuda.synchronize()
        for (plan, writes), new, slots in steps:
            step = {"plan": plan, "writes": writes, "kv_score": new, "out_loc": slots}
            compressor(**{**made.arguments(), **step})
            wait()
        torch.cuda.synchronize()
        return made

    at_once, one_by_one = run(lambda: None), run(torch.cuda.synchronize)
    assert torch.equal(at_once.cache, one_by_one.cache) and _same_state(at_once.state, one_by_one.state)
    ratio, head_dim, fp4 = KINDS[kind]
    layer = [inputs.ape, inputs.norm_weight, inputs.norm_eps, inputs.freqs_cis]
    on_host = [value.cpu() if isinstance(value, torch.Tensor) else value for value in layer]
    expected = reference.entries_of(tokens[: 3 * ratio].cpu(), *on_host, ratio)
    slots = torch.arange(1, len(expected) + 1, device="cuda")
    stored = reference.read(at_once.cache, at_once.page_size, slots, head_dim, fp4)
    assert relative_error(stored.cpu(), expected) < KINDS[kind].rounding


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


@pytest.mark.parametrize("requests, tokens, layers", [(1, 4, 20), (33, 2, 64), (200, 8, 3)])
def test_rejected_drafts_of_all_layers(requests, tokens, layers):
    """Eagerly and in a graph that is replayed with other numbers: every bit of every state."""
    made = make_drafts(requests, tokens, layers, ring=128)
    graph, again = torch.cuda.CUDAGraph(), made.copy()
    with torch.cuda.graph(graph):
        op.clear_drafts(**again.arguments())
    for ours, run in ((made, lambda: op.clear_drafts(**made.arguments())), (again, graph.replay)):
        truth = ours.copy()
        run()
        reference.clear_drafts(**truth.arguments())
        assert all(_same_state(mine, theirs) for mine, theirs in zip(ours.states, truth.states, strict=True))
        made.accepted.random_(0, tokens + 1)
        made.lengths.random_(0, 1000)
