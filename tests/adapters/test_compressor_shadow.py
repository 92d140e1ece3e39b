"""The compressors' shadow mode: ours on a copy, what is compared to the original's, and what is chance in both."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.reference import compressor as reference
from deepseek_v4_sm120.sglang_patches import device_gate, shadow
from deepseek_v4_sm120.sglang_patches.adapters import compressor as adapter
from deepseek_v4_sm120.specs import bounds
from deepseek_v4_sm120.specs.compressor import KINDS, Request, copy_of_pages, make_inputs, make_step
from tests.adapters.test_compressor import (  # noqa: F401
    Backend,
    CompressorDecodePlan,
    CompressorPrefillPlan,
    calls,
    given_of,
    lengths,
    made_for,
    step_of,
)


@pytest.fixture
def shadowed(monkeypatch, calls):  # noqa: F811
    shadow.reset()
    monkeypatch.setattr(shadow, "_start_writer", lambda: None)

    def turn(mode):
        monkeypatch.setattr(adapter, "settings", lambda: SimpleNamespace(shadow=mode))

    yield turn
    shadow.reset()


def run_beside(inputs, backend) -> list[bool]:
    """Of each run of the original: whether ours had left the live tensors as they were."""
    before, seen = inputs.copy(), []

    def original(self, **given):
        state = inputs.state.view(torch.int32)
        seen.append(torch.equal(inputs.cache, before.cache) and torch.equal(state, before.state.view(torch.int32)))
        reference.compressor(**inputs.arguments())

    adapter.replace_all_in_one(original)(backend, **given_of(inputs))
    return seen


def recorded(patch="compressor"):
    """The only record of what a compressor stored, or of its state."""
    (record,) = [record for record in shadow.report() if record["patch"] == patch]
    return record


@pytest.mark.parametrize("mode", ["1", "ours"])
@pytest.mark.parametrize("kind", KINDS)
def test_shadow_mode_runs_ours_on_a_copy_and_the_original_on_the_live_tensors(shadowed, calls, kind, mode):  # noqa: F811
    inputs, backend = made_for(kind)
    expected = inputs.copy()
    reference.compressor(**expected.arguments())
    shadowed(mode)
    seen = run_beside(inputs, backend)
    assert seen == [True] and calls == [5] * (2 if mode == "ours" else 1)
    assert torch.equal(inputs.cache, expected.cache)
    for record in (recorded(), recorded("compressor_state")):
        assert (record["calls"], record["bad_calls"], record["left_out"]) == (1, 0, 0)
        assert record["relative_l2_max"] == 0.0 and record["shape"]["rows"] == 5


@pytest.mark.parametrize("mode", ["1", "ours"])
@pytest.mark.parametrize("kind", KINDS)
def test_shadow_mode_of_a_verification(shadowed, calls, kind, mode):  # noqa: F811
    """Ours on a copy; in both modes the live tensors are the original's, which were read before."""
    inputs, backend = step_of(kind)
    expected = inputs.copy()
    reference.compressor(**expected.arguments())
    shadowed(mode)
    seen = run_beside(inputs, backend)
    assert seen == [True] and calls == [19]
    assert torch.equal(inputs.cache, expected.cache)
    assert torch.equal(inputs.state.view(torch.int32), expected.state.view(torch.int32))
    for record in (recorded(), recorded("compressor_state")):
        assert (record["calls"], record["bad_calls"], record["relative_l2_max"]) == (1, 0, 0.0)
        assert record["left_out"] == 0

    def wrong(self, **given):
        reference.compressor(**inputs.arguments())
        entries = inputs.plan.view(torch.int32)
        row = int(entries[entries[:, 0] != -1][0, 1]) & 0xFFFF
        page, entry = divmod(int(inputs.out_loc[row]), inputs.page_size)
        first = entry * (64 if kind == "index_fp4" else 128 if kind == "index" else 576)
        inputs.cache[page, first : first + 64] ^= 0x88

    inputs, backend = step_of(kind, seed=1)
    adapter.replace_all_in_one(wrong)(backend, **given_of(inputs))
    assert sum(record["bad_calls"] for record in shadow.report()) == 1


def test_shadow_mode_has_nothing_to_compare_of_tokens_that_end_no_group(shadowed, calls):  # noqa: F811
    """A prompt's plan has no lines then (seen on a card: it was an IndexError)."""
    inputs, backend = step_of("c128")
    backend.plan = backend.plan._replace(plan_c=inputs.plan[:0])
    seen = []
    shadowed("1")

    def original(self, **given):
        seen.append(given)
        reference.compressor(**inputs.arguments() | {"plan": inputs.plan[:0]})

    adapter.replace_all_in_one(original)(backend, **given_of(inputs))
    (record,) = shadow.report()
    assert len(seen) == len(calls) == 1 and record["patch"] == "compressor_state"
    assert (record["calls"], record["bad_calls"]) == (1, 0)


@pytest.mark.parametrize("make", [made_for, step_of])
@pytest.mark.parametrize("kind", KINDS)
def test_shadow_mode_sees_one_bit_of_the_state(shadowed, calls, kind, make):  # noqa: F811
    """Of a slot that the call writes; what it does not write is nobody's result."""
    shadowed("1")
    for is_written in (False, True):
        shadow.reset()
        inputs, backend = make(kind)
        lines = inputs.plan.view(torch.int32)[:, 1] if make is made_for else inputs.writes.view(torch.int32)[:, 1]
        slots = inputs.state.view(torch.int32).view(-1, inputs.state.shape[2])
        places = set(lines[lines >= 0].tolist())
        place = max(places) if is_written else min(set(range(len(slots))) - places)

        def original(self, inputs=inputs, slots=slots, place=place, **given):
            reference.compressor(**inputs.arguments())
            slots[place, -1] ^= 1

        adapter.replace_all_in_one(original)(backend, **given_of(inputs))
        assert recorded("compressor_state")["bad_calls"] == is_written and recorded()["bad_calls"] == 0


def test_shadow_mode_finds_a_wrong_entry_and_leaves_out_rows_that_end_no_group(shadowed, calls):  # noqa: F811
    inputs, backend = made_for("c4")

    def original(self, **given):
        reference.compressor(**inputs.arguments())
        page, entry = divmod(int(inputs.out_loc[2]), inputs.page_size)
        inputs.cache[page, entry * 576 : entry * 576 + 64] ^= 0x80

    shadowed("1")
    adapter.replace_all_in_one(original)(backend, **given_of(inputs))
    assert recorded()["bad_calls"] == 1 and recorded()["relative_l2_max"] > bounds.COMPRESSOR.shadow

    shadow.reset()
    inputs = make_inputs("c4", [5, 6, 7], device="cpu")
    inputs.cache[:] = 0x7F
    backend = Backend(CompressorDecodePlan(4, inputs.plan))
    adapter.replace_all_in_one(lambda self, **given: reference.compressor(**inputs.arguments()))(
        backend, **given_of(inputs)
    )
    assert (recorded()["bad_calls"], recorded()["nonfinite_original"]) == (0, 0)


def warm_up(kind, requests, tokens, device="cpu"):
    """A capture's warm-up as 0.5.14 to 0.5.23 have it: requests of length 1, all with number 0, whose tables of slots,
    and the slots to write, are zeros; `tokens` more each in a verification, None: decode."""
    ratio = KINDS[kind].ratio
    ring = 2 * ratio if tokens is None else 4 * ratio if ratio == 4 else 2 * ratio
    made = [Request(1, tokens or 1)] * requests
    inputs = make_step(kind, made, device=device)
    entries, writes, first = [], [], 0
    for request in made:
        for j in range(request.tokens):
            position = request.before + j
            slot = 0 if ratio == 4 else position % ring  # groups of 4: by the table of slots, of zeros
            writes.append((first + j, slot))
            if (position + 1) % ratio == 0:
                window = 8 if ratio == 4 else ratio
                held = window - min(j + 1, window)
                entries.append((position + 1, first + j | held << 16, slot // ratio, slot // ratio))
        first += request.tokens
    inputs.out_loc.zero_()

    def lines(found, width):
        found = found + [(-1,) * width] * (first - len(found))
        return torch.tensor(found, dtype=torch.int64).to(torch.int32).to(device).view(torch.uint8)

    inputs.plan[:], inputs.writes = lines(entries, 4)[: len(inputs.plan)], lines(writes, 2)
    return inputs, Backend(CompressorPrefillPlan(ratio, inputs.plan, inputs.writes))


def in_any_order(inputs):
    """The original of a call whose rows write to one place: the entry that stays is another one than ours."""

    def original(self, **given):
        order = torch.arange(len(inputs.plan)).flip(0)
        reference.compressor(**inputs.arguments() | {"plan": inputs.plan[order].contiguous()})

    return original


@pytest.mark.parametrize(("requests", "left_out"), [(1, 0), (8, 8), (32, 32)])
def test_shadow_mode_leaves_out_what_is_chance_in_a_captures_warm_up(shadowed, calls, requests, left_out):  # noqa: F811
    """Seen with 0.5.17 and speculation: 8 and 32 requests were bad calls, one request never."""
    shadowed("1")
    inputs, backend = warm_up("c4", requests, tokens=4)
    adapter.replace_all_in_one(in_any_order(inputs))(backend, **given_of(inputs))
    assert (recorded()["bad_calls"], recorded()["left_out"]) == (0, left_out)
    state = recorded("compressor_state")
    assert (state["bad_calls"], state["left_out"]) == (0, 4 * requests)  # all tokens in one slot
    entries, states = (shadow.describe(line) for line in shadow.summary(shadow.report()))
    assert (f"{left_out} results not compared: several rows" in entries) == (left_out > 0)
    assert f"{4 * requests} results not compared: several rows" in states


@pytest.mark.parametrize("make", [made_for, step_of])
def test_shadow_mode_leaves_out_entries_that_several_rows_write(shadowed, calls, make):  # noqa: F811
    """Which of them writes last is chance; the entries beside them are compared, and a wrong one is found."""
    shadowed("1")
    found = {}
    for are_one, is_wrong in ((False, True), (True, True), (True, False)):
        shadow.reset()
        inputs, backend = make("c4")
        lines = inputs.plan.view(torch.int32)
        ended = lines[(lines[:, 0] > 0) & (lines[:, 0] % 4 == 0)]
        rows = (lines[:, 0] % 4 == 0).nonzero()[:, 0] if make is made_for else ended[:, 1] & 0xFFFF
        if are_one:
            inputs.out_loc[rows[:2]] = int(inputs.out_loc[rows[0]])

        def original(self, inputs=inputs, rows=rows, is_wrong=is_wrong, **given):
            reference.compressor(**inputs.arguments())
            for row in rows[:2].tolist() + rows[2:3].tolist() * is_wrong:
                page, entry = divmod(int(inputs.out_loc[row]), inputs.page_size)
                inputs.cache[page, entry * 576 : entry * 576 + 64] = 0x7E

        adapter.replace_all_in_one(original)(backend, **given_of(inputs))
        found[are_one, is_wrong] = recorded()["bad_calls"], recorded()["left_out"]
    assert found == {(False, True): (1, 0), (True, True): (1, 2), (True, False): (0, 2)}


@pytest.mark.parametrize(("kind", "of"), [("c4", "own"), ("c4", "before"), ("c128", "own"), ("c4", "none")])
def test_shadow_mode_leaves_out_groups_that_another_row_of_decode_writes_to(shadowed, calls, kind, of):  # noqa: F811
    """Rows put their tokens into the state before they read it, so an entry over such a slot is chance."""
    shadowed("1")
    inputs, backend = made_for(kind)
    ratio, plan = inputs.state.shape[1], inputs.plan.view(torch.int32)
    page = {"own": plan[0, 3], "before": plan[0, 2], "none": plan[1, 3]}[of]
    plan[1, 1] = page * ratio

    def original(self, **given):
        inputs.state[page, 0] = 3.0  # another row's came first
        last = inputs.arguments() | {"kv_score": inputs.kv_score.clone()}
        last["kv_score"][1] = -2.0 if of != "none" else last["kv_score"][1]
        reference.compressor(**last)
        inputs.state.view(-1, inputs.state.shape[2])[plan[1, 1]] = inputs.kv_score[1]

    adapter.replace_all_in_one(original)(backend, **given_of(inputs))
    assert (recorded()["bad_calls"], recorded()["left_out"]) == (0, int(of != "none"))


@pytest.mark.parametrize("make", [made_for, step_of])
def test_an_operator_that_lies_is_found_in_shadow_mode(shadowed, calls, monkeypatch, make):  # noqa: F811
    """One entry, or one token of the state, beside rows that are left out."""
    shadowed("1")
    honest = adapter.op.compressor
    for lie, patch in ((None, None), ("entry", "compressor"), ("state", "compressor_state")):
        shadow.reset()
        inputs, backend = make("c4")
        lines = inputs.plan.view(torch.int32)
        rows = (lines[:, 0] % 4 == 0).nonzero()[:, 0] if make is made_for else lines[lines[:, 0] > 0][:, 1] & 0xFFFF
        inputs.out_loc[rows[:2]] = int(inputs.out_loc[rows[0]])
        row = int(rows[2])

        def lying(lie=lie, row=row, **given):
            honest(**given)
            if lie == "entry":
                page, entry = divmod(int(given["out_loc"][row]), given["page_size"])
                given["cache"][page, entry * 576 : entry * 576 + 64] ^= 0x80
            if lie == "state":
                writes = given["plan"] if given["writes"] is None else given["writes"]
                slot = writes.view(torch.int32)[:, 1].max()
                given["state"].view(torch.int32).view(-1, given["state"].shape[2])[slot, 0] ^= 1

        def original(self, inputs=inputs, **given):
            reference.compressor(**inputs.arguments())

        monkeypatch.setattr(adapter.op, "compressor", lying)
        adapter.replace_all_in_one(original)(backend, **given_of(inputs))
        assert recorded()["left_out"] == 2
        assert [r["patch"] for r in shadow.report() if r["bad_calls"]] == ([patch] if patch else [])


@pytest.mark.parametrize("kind", KINDS)
def test_what_shadow_mode_reads_of_a_cache_is_what_the_reference_reads(calls, kind):  # noqa: F811
    _, head_dim, fp4 = KINDS[kind]
    inputs, _ = made_for(kind)
    ended, _ = reference.compressor(**inputs.arguments())
    slots = inputs.out_loc[ended]
    wanted = reference.read(copy_of_pages(inputs.cache), inputs.page_size, slots, head_dim, fp4)
    found = adapter._entries(inputs.cache, inputs.page_size, slots, head_dim, fp4)
    assert torch.equal(found.double(), wanted.float().double()) and bool((found != 0).any())


@pytest.mark.gpu
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_shadow_mode_in_a_graph(monkeypatch, kind, many):
    """On the GPU with the operator itself in both places: a replay copies, runs, compares and counts."""
    shadow.reset()
    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(adapter, "settings", lambda: SimpleNamespace(shadow="1"))

    def made():
        return step_of(kind, device="cuda")[0] if many else make_inputs(kind, lengths(kind))

    inputs = made()
    ratio = inputs.state.shape[1]
    plan = (
        CompressorPrefillPlan(ratio, inputs.plan, inputs.writes) if many else CompressorDecodePlan(ratio, inputs.plan)
    )
    backend = Backend(plan)
    replaced = adapter.replace_all_in_one(lambda self, **given: adapter.op.compressor(**inputs.arguments()))
    replaced(backend, **given_of(inputs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replaced(backend, **given_of(inputs))
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for patch in ("compressor", "compressor_state"):
        found = {record["captured"]: record["calls"] for record in shadow.report() if record["patch"] == patch}
        assert found == {False: 1, True: 3}
    assert all(record["bad_calls"] == record["relative_l2_max"] == 0 for record in shadow.report())
    if not many:  # a verification reads what the one before has written
        expected = made()
        adapter.op.compressor(**expected.arguments())
        assert torch.equal(expected.cache, inputs.cache)
    shadow.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [1, 8, 32])
def test_a_captures_warm_up_on_the_gpu(monkeypatch, requests):
    """The operator in both places: which request's entry stays in slot 0 is chance, and no call is a bad one."""
    shadow.reset()
    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(adapter, "settings", lambda: SimpleNamespace(shadow="1"))
    inputs, backend = warm_up("c4", requests, tokens=4, device="cuda")
    replaced = adapter.replace_all_in_one(lambda self, **given: adapter.op.compressor(**inputs.arguments()))
    for _ in range(20):
        replaced(backend, **given_of(inputs))
    torch.cuda.synchronize()
    assert (recorded()["bad_calls"], recorded()["left_out"]) == (0, 0 if requests == 1 else 20 * requests)
    assert recorded("compressor_state")["bad_calls"] == 0
    shadow.reset()
