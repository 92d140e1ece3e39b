"""The adapter on a backend as SGLang makes it; the reference is in the operator's place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from deepseek_v4_sm120.reference import compressor as reference
from deepseek_v4_sm120.sglang_patches import device_gate, shadow
from deepseek_v4_sm120.sglang_patches.adapters import compressor as adapter
from deepseek_v4_sm120.specs import bounds
from deepseek_v4_sm120.specs.compressor import KINDS, Request, copy_of_pages, make_inputs, make_step, planned
from tests.adapters.test_sparse_decode import LAYOUT


class CompressorDecodePlan(NamedTuple):
    compress_ratio: int
    plan_d: torch.Tensor

    @property
    def is_decode(self):
        return True


class CompressorPrefillPlan(NamedTuple):
    compress_ratio: int
    plan_c: torch.Tensor
    plan_w: torch.Tensor

    @property
    def is_decode(self):
        return False


class Backend:
    def __init__(self, plan):
        self.plan = plan

    def _get_paged_compress_metadata(self, compress_ratio):
        assert self.plan.compress_ratio == compress_ratio
        return self.plan


def given_of(inputs) -> dict:
    """The keywords of SGLang's call: the state and ape in the shapes that the pool and the checkpoint have."""
    ratio, head_dim = inputs.state.shape[1], inputs.norm_weight.shape[0]
    return {
        "kv_score_buffer": inputs.state.view(-1, inputs.state.shape[2]),
        "kv_score_input": inputs.kv_score,
        "ape": inputs.ape.view(ratio, -1),
        "head_dim": head_dim,
        "norm": SimpleNamespace(weight=inputs.norm_weight, variance_epsilon=inputs.norm_eps),
        "freqs_cis_cache": inputs.freqs_cis,
        "kv_cache": inputs.cache,
        "is_indexer": head_dim == 128,
        "rotate": head_dim == 128,
        "compress_ratio": ratio,
        "page_size": inputs.page_size,
        "out_loc": inputs.out_loc,
        "use_fp4_indexer": inputs.fp4,
        "bf16_store": False,
    }


@pytest.fixture
def calls(monkeypatch):
    """The gate open, the reference in the operator's place; the rows it was called with."""
    found = []

    def op(**arguments):
        found.append(arguments["kv_score"].shape[0])
        reference.compressor(**arguments)

    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(adapter.op, "compressor", op)
    monkeypatch.setattr(adapter, "kv_page_layout", lambda: LAYOUT)
    return found


def lengths(kind):
    ratio = KINDS[kind][0]
    return [2 * ratio, 2 * ratio + 1, ratio, 3 * ratio - 1, 5 * ratio]


def made_for(kind):
    inputs = make_inputs(kind, lengths(kind), device="cpu")
    return inputs, Backend(CompressorDecodePlan(inputs.state.shape[1], inputs.plan))


@pytest.mark.parametrize("kind", KINDS)
def test_a_decode_step_is_ours(calls, kind):
    inputs, backend = made_for(kind)
    expected = inputs.copy()
    reference.compressor(**expected.arguments())
    replaced = adapter.replace_all_in_one(lambda self, **given: pytest.fail("the original ran"))
    given = given_of(inputs)
    if kind != "index_fp4":
        del given["use_fp4_indexer"]
    assert replaced(backend, **given) is None and calls == [5]
    assert torch.equal(inputs.cache, expected.cache)
    assert torch.equal(inputs.state.view(torch.int32), expected.state.view(torch.int32))


def step_of(kind, tokens=4, **options):
    """A verification, and the backend whose plans it has."""
    ratio = KINDS[kind].ratio
    requests = [Request(before, tokens) for before in (2 * ratio - 2, 0, 3 * ratio - 1, ratio + 1)]
    inputs = make_step(kind, requests, **{"device": "cpu", "padding": 3, **options})
    return inputs, Backend(CompressorPrefillPlan(ratio, inputs.plan, inputs.writes))


@pytest.mark.parametrize("slots", (0, 5))
@pytest.mark.parametrize("kind", KINDS)
def test_a_verification_is_ours(calls, kind, slots):
    """With padding, and with more slots than rows."""
    inputs, backend = step_of(kind)
    expected = inputs.copy()
    reference.compressor(**expected.arguments())
    given = given_of(inputs)
    given["out_loc"] = torch.cat([inputs.out_loc, torch.zeros(slots, dtype=torch.int64)])
    replaced = adapter.replace_all_in_one(lambda self, **given: pytest.fail("the original ran"))
    assert replaced(backend, **given) is None and calls == [19]
    assert torch.equal(inputs.cache, expected.cache)
    assert torch.equal(inputs.state.view(torch.int32), expected.state.view(torch.int32))


def test_plans_from_host_lists_have_as_many_lines_as_there_are(calls):
    inputs, _ = step_of("c4")
    entries, writes = (plan[plan.view(torch.int32)[:, 0] != -1].contiguous() for plan in (inputs.plan, inputs.writes))
    backend = Backend(CompressorPrefillPlan(4, entries, writes))
    adapter.replace_all_in_one(lambda self, **given: pytest.fail("the original ran"))(backend, **given_of(inputs))
    assert calls == [19] and len(entries) < 19 and len(writes) < 19


CHANGES = {
    "a bf16 state": {"kv_score_buffer": lambda v: v.bfloat16()},
    "bf16 weights": {"ape": lambda v: v.bfloat16()},
    "running sums": {"kv_score_buffer": lambda v: torch.zeros(256, 3 * 512)},
    "int32 slots": {"out_loc": lambda v: v.int()},
    "slots of more rows": {"out_loc": lambda v: torch.cat([v, v])},
    "a bf16 cache": {"kv_cache": lambda v: v.view(torch.bfloat16)},
    "bf16 store": {"bf16_store": lambda v: True},
    "another layout": {"kv_layout": lambda v: SimpleNamespace(name="V41")},
    "a cache of scales": {"kv_scale_cache": lambda v: torch.zeros(1)},
    "two buffers": {"fp8_2buff": lambda v: True},
    "an argument nobody knows": {"surprise": lambda v: None},
    "another head": {"head_dim": lambda v: 256},
    "pages of three": {"page_size": lambda v: 3},
    "pages of none": {"page_size": lambda v: 0},
    "an FP4 cache that is no indexer's": {"use_fp4_indexer": lambda v: True},
    "an indexer of 512": {"is_indexer": lambda v: True, "rotate": lambda v: True},
    "rotations of another width": {"freqs_cis_cache": lambda v: v[:, :16].contiguous()},
    "rotations apart": {"freqs_cis_cache": lambda v: v.T.contiguous().T},
    "real rotations": {"freqs_cis_cache": lambda v: v.real.contiguous()},
    "bf16 tokens": {"kv_score_input": lambda v: v.bfloat16()},
    "tokens apart": {"kv_score_input": lambda v: v.T.contiguous().T},
    "tokens of another width": {"kv_score_input": lambda v: v[:, :1024].contiguous()},
    "a bf16 norm": {"norm": lambda v: SimpleNamespace(weight=v.weight.bfloat16(), variance_epsilon=1e-6)},
    "a cache by entries": {"kv_cache": lambda v: v[:, None]},
    "a cache apart": {"kv_cache": lambda v: v.T.contiguous().T},
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_operator_does_not_take_is_the_originals(calls, name):
    inputs, backend = made_for("c4")
    given = given_of(inputs)
    for argument, change in CHANGES[name].items():
        given[argument] = change(given.get(argument))
    replaced = adapter.replace_all_in_one(lambda self, **given: sorted(given))
    assert replaced(backend, **given) == sorted(given) and calls == []


def test_both_plans_of_a_verification_are_looked_at(calls):
    step, _ = step_of("c4")
    given = given_of(step)
    assert adapter.arguments(CompressorPrefillPlan(4, step.plan, step.writes), given) is not None
    for plans in ((step.plan, step.writes.view(torch.int32)), (step.plan.view(torch.int32), step.writes)):
        assert adapter.arguments(CompressorPrefillPlan(4, *plans), given) is None


def test_groups_that_no_checkpoint_has_are_the_originals(calls):
    inputs, backend = made_for("index")
    given = given_of(inputs)
    assert adapter.arguments(backend.plan, given) is not None
    cut = {name: given[name][..., :256].contiguous() for name in ("kv_score_buffer", "kv_score_input")}
    assert adapter.arguments(backend.plan, given | cut | {"compress_ratio": 128}) is None


@pytest.mark.parametrize(
    ("plan", "is_one"),
    [
        (torch.zeros(4, 16, dtype=torch.uint8), True),
        (torch.zeros(5, 16, dtype=torch.uint8), False),
        (torch.zeros(4, 32, dtype=torch.uint8), False),
        (torch.zeros(4, 16, dtype=torch.int8), False),
        (torch.zeros(4, 32, dtype=torch.uint8)[:, ::2], False),
        (torch.zeros(4, 16, 1, dtype=torch.uint8), False),
    ],
)
def test_a_plan_has_a_line_of_bytes_for_every_row(plan, is_one):
    assert adapter._has_plan(plan, 16, 4) is is_one


def test_other_plans_other_rows_and_a_closed_gate_are_the_originals(calls, monkeypatch):
    inputs, backend = made_for("c4")
    given = given_of(inputs)
    replaced = adapter.replace_all_in_one(lambda self, **given: "original")
    sums = Backend(CompressorPrefillPlan(4, inputs.plan, inputs.plan))  # running sums' writes
    assert replaced(sums, **given) == "original"
    prompt = make_step("index", [Request(0, 513)], device="cpu")
    plans = CompressorPrefillPlan(4, prompt.plan, prompt.writes)
    assert replaced(Backend(plans), **given_of(prompt)) == "original"
    step, _ = step_of("c4")
    few_slots = {**given_of(step), "out_loc": step.out_loc[:-1]}
    assert replaced(Backend(CompressorPrefillPlan(4, step.plan, step.writes)), **few_slots) == "original"
    not_known = Backend(SimpleNamespace(compress_ratio=4))
    assert replaced(not_known, **given) == "original"
    assert replaced(backend, **{n: v for n, v in given.items() if n != "out_loc"}) == "original"  # 0.5.12's call
    many = make_inputs("index", [3] * 513, device="cpu")
    assert replaced(Backend(CompressorDecodePlan(4, many.plan)), **given_of(many)) == "original"
    none = inputs.rows(slice(0, 0))
    assert replaced(Backend(CompressorDecodePlan(4, none.plan)), **given_of(none)) == "original"
    monkeypatch.setattr(device_gate, "serves", lambda device: False)
    assert replaced(backend, **given) == "original" and calls == []


def test_the_layouts_of_later_releases_are_served_where_they_are_the_known_one(calls):
    inputs, backend = made_for("c128")
    given = given_of(inputs)
    given |= {"kv_layout": SimpleNamespace(name="V4"), "kv_scale_cache": None, "rope_cache": None, "fp8_2buff": False}
    adapter.replace_all_in_one(lambda self, **given: "original")(backend, **given, kv_cache_rope=None)
    assert calls == [5]


@pytest.fixture
def shadowed(monkeypatch, calls):
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
def test_shadow_mode_runs_ours_on_a_copy_and_the_original_on_the_live_tensors(shadowed, calls, kind, mode):
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
def test_shadow_mode_of_a_verification(shadowed, calls, kind, mode):
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


def test_shadow_mode_has_nothing_to_compare_of_tokens_that_end_no_group(shadowed, calls):
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
def test_shadow_mode_sees_one_bit_of_the_state(shadowed, calls, kind, make):
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


# ---- before 0.5.18: what the plan of a verification writes


class Pool:
    def __init__(self, ring):
        self.ring = ring

    def get_ring_size(self, compress_ratio):
        return self.ring


def planner(ring, kept_before, asked):
    """create_paged_compressor_data as 0.5.14 to 0.5.17 have it: of a request's tokens the last `kept_before` are
    written and what the group needs, in no order. A request's ring is its number's."""

    def create_paged_compressor_data(
        compress_ratio, *, is_prefill, token_to_kv_pool, req_to_token, req_pool_indices, seq_lens, extend_lens=None,
        seq_lens_cpu=None, extend_lens_cpu=None, use_prefill_cuda_graph=False, num_q_tokens=None,
    ):  # fmt: skip
        asked.append(is_prefill)
        if not is_prefill:
            assert bool((seq_lens > 0).all())
            slots = req_pool_indices * ring + (seq_lens - 1) % ring
            plan = torch.stack([seq_lens, slots, slots * 0, slots * 0], dim=1).to(torch.int32)
            return CompressorDecodePlan(compress_ratio, plan.view(torch.uint8))
        rows, found, first = num_q_tokens or sum(extend_lens_cpu), [], 0
        for number, length, new in zip(req_pool_indices.tolist(), seq_lens.tolist(), extend_lens.tolist(), strict=True):
            needed = length // compress_ratio * compress_ratio - (4 if compress_ratio == 4 else 0)
            for j in range(new):
                position = length - new + j
                if position >= min(needed, length - kept_before):
                    found.append((first + j, number * ring + position % ring))
            first += new
        plan_w = torch.tensor([*reversed(found), *[(-1, -1)] * (rows - len(found) if num_q_tokens else 0)])
        plan_c = torch.zeros((rows if num_q_tokens else 1, 16), dtype=torch.uint8)
        return CompressorPrefillPlan(compress_ratio, plan_c, plan_w.to(torch.int32).view(torch.uint8))

    return create_paged_compressor_data


@pytest.mark.parametrize("from_lists", (False, True))
@pytest.mark.parametrize("ratio", (4, 128))
def test_every_row_that_a_rejection_may_need_is_written(calls, ratio, from_lists):
    """What 0.5.18 plans itself; rows that belong to no request stay out."""
    ring, asked = (16, []) if ratio == 4 else (256, [])
    requests = [Request(2 * ratio + 1, 8), Request(0, 3), Request(3 * ratio - 2, 6), Request(ratio - 1, 1)]
    new = [request.tokens for request in requests]
    lengths = [request.before + request.tokens for request in requests]
    numbers = torch.tensor([3, 0, 5, 1])
    original = planner(ring, 0 if from_lists else 4, asked)
    given = {
        "is_prefill": True,
        "token_to_kv_pool": Pool(ring),
        "req_to_token": None,
        "req_pool_indices": numbers,
        "seq_lens": torch.tensor(lengths),
        "extend_lens": torch.tensor(new),
    }
    given |= {"seq_lens_cpu": lengths, "extend_lens_cpu": new} if from_lists else {"num_q_tokens": 20}
    plan = adapter.replace_create_data(original)(compress_ratio=ratio, **given)
    expected = planned(ratio, requests, [number * ring for number in numbers.tolist()], ring)[1]
    written = [tuple(pair) for pair in plan.plan_w.view(torch.int32).tolist() if pair[0] != -1]
    assert written == expected and asked == [True, False]
    before = original(ratio, **given).plan_w.view(torch.int32)
    assert int((before[:, 0] != -1).sum()) < len(expected)  # there is something to mend
    assert plan.plan_w.shape == (18 if from_lists else 20, 8) and plan.plan_w.dtype == torch.uint8


def test_plans_that_are_whole_stay_as_they_are(calls, monkeypatch):
    asked = []
    given = {
        "is_prefill": True,
        "req_to_token": None,
        "req_pool_indices": torch.tensor([0]),
        "seq_lens": torch.tensor([9]),
        "extend_lens": torch.tensor([8]),
        "num_q_tokens": 8,
    }
    replaced = adapter.replace_create_data(planner(8, 4, asked))
    replaced(4, token_to_kv_pool=Pool(8), **given)  # no speculation
    decode = {name: value for name, value in given.items() if name not in ("extend_lens", "num_q_tokens")}
    replaced(4, token_to_kv_pool=Pool(16), **{**decode, "is_prefill": False})
    monkeypatch.setattr(device_gate, "serves", lambda device: False)
    replaced(4, token_to_kv_pool=Pool(16), **given)
    assert asked == [True, False, True]


def test_shadow_mode_finds_a_wrong_entry_and_leaves_out_rows_that_end_no_group(shadowed, calls):
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


def warm_up(kind, requests, tokens):
    """A capture's warm-up as 0.5.14 to 0.5.23 have it: requests of length 1, all with number 0, whose tables of slots,
    and the slots to write, are zeros; `tokens` more each in a verification, None: decode."""
    ratio = KINDS[kind].ratio
    ring = 2 * ratio if tokens is None else 4 * ratio if ratio == 4 else 2 * ratio
    made = [Request(1, tokens or 1)] * requests
    inputs = make_step(kind, made, device="cpu")
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
        return torch.tensor(found, dtype=torch.int64).to(torch.int32).view(torch.uint8)

    inputs.plan[:], inputs.writes = lines(entries, 4)[: len(inputs.plan)], lines(writes, 2)
    return inputs, Backend(CompressorPrefillPlan(ratio, inputs.plan, inputs.writes))


def in_any_order(inputs):
    """The original of a call whose rows write to one place: the entry that stays is another one than ours."""

    def original(self, **given):
        order = torch.arange(len(inputs.plan)).flip(0)
        reference.compressor(**inputs.arguments() | {"plan": inputs.plan[order].contiguous()})

    return original


@pytest.mark.parametrize(("requests", "left_out"), [(1, 0), (8, 8), (32, 32)])
def test_shadow_mode_leaves_out_what_is_chance_in_a_captures_warm_up(shadowed, calls, requests, left_out):
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
def test_shadow_mode_leaves_out_entries_that_several_rows_write(shadowed, calls, make):
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
def test_shadow_mode_leaves_out_groups_that_another_row_of_decode_writes_to(shadowed, calls, kind, of):
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
def test_an_operator_that_lies_is_found_in_shadow_mode(shadowed, calls, monkeypatch, make):
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
def test_what_shadow_mode_reads_of_a_cache_is_what_the_reference_reads(calls, kind):
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
