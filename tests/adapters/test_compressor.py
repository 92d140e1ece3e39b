"""The adapter on a backend as SGLang makes it; the reference is in the operator's place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from deepseek_v4_sm120.reference import compressor as reference
from deepseek_v4_sm120.sglang_patches import device_gate
from deepseek_v4_sm120.sglang_patches.adapters import compressor as adapter
from deepseek_v4_sm120.specs.compressor import KINDS, Request, make_inputs, make_step, planned
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
    assert replaced(None, **given_of(prompt)) == "original"  # the backend is not asked for a plan
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
    adapter.replace_create_data(planner(128, 4, asked))(128, token_to_kv_pool=Pool(128), **given)
    decode = {name: value for name, value in given.items() if name not in ("extend_lens", "num_q_tokens")}
    replaced(4, token_to_kv_pool=Pool(16), **{**decode, "is_prefill": False})
    monkeypatch.setattr(device_gate, "serves", lambda device: False)
    replaced(4, token_to_kv_pool=Pool(16), **given)
    assert asked == [True, True, False, True]
