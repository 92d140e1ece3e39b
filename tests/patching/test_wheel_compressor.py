"""SGLang's own compressor call, taken out of the wheels and run on the CPU over stand-ins: with its two launches, and
with ours in the method's place. The same state and cache from both, for every compressor of the model."""

import ast
import copy
import enum
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from packaging.specifiers import SpecifierSet

from deepseek_v4_sm120.patching import contract
from deepseek_v4_sm120.reference import compressor as reference
from deepseek_v4_sm120.sglang_patches import device_gate
from deepseek_v4_sm120.sglang_patches.adapters import compressor as adapter
from deepseek_v4_sm120.sglang_patches.rows.compressor import COMPRESSOR, MODULE
from deepseek_v4_sm120.specs.compressor import KINDS, Request, make_inputs, make_step, planned
from tests.patching.test_wheel_wo_a import QUIET, compiled
from tests.patching.wheels import RELEASES, content, every_release, members, since, tree

METHOD = "_forward_compress_all_in_one"
SERVED = "0.5.14"  # and later
LAYOUTS = enum.Enum("KVLayout", "V4 V41")


class Plan(NamedTuple):
    compress_ratio: int
    plan_d: torch.Tensor

    @property
    def is_decode(self):
        return True


class PlanOfMany(NamedTuple):
    compress_ratio: int
    plan_c: torch.Tensor
    plan_w: torch.Tensor

    @property
    def is_decode(self):
        return False


def class_of(wheel) -> ast.ClassDef:
    return contract.find_definition(tree(wheel, MODULE), "CompressorBackendMixin")


def mixin(wheel, launches: list):
    """CompressorBackendMixin of the wheel; its two kernels are the reference's two halves."""

    def compress_forward(*, kv_score_buffer, kv_score_input, ape, plan, head_dim, compress_ratio, out=None, is_online):
        launches.append("compress_forward")
        assert out is None and not is_online
        if not plan.is_decode:
            return pooled_of_many(kv_score_buffer, kv_score_input, ape, *plan)
        length, write, before, own = plan.plan_d.view(torch.int32).long().unbind(dim=1)
        kv_score_buffer.view(-1, kv_score_buffer.shape[2])[write] = kv_score_input
        groups_before = kv_score_buffer[before.clamp_min(0)] if compress_ratio == 4 else None
        return reference.pool(kv_score_buffer[own], groups_before, length > 4, ape)

    def compress_norm_rope_store(
        kv, plan, *, norm_weight, norm_eps, freq_cis, out_loc, kvcache, page_size, use_fp4=False, **others
    ):
        launches.append("compress_norm_rope_store")
        assert not any(value not in (None, False, LAYOUTS.V4) for value in others.values()), others
        length, place = plan[1].view(torch.int32).long().unbind(dim=1)[:2]
        ended = length % plan.compress_ratio == 0 if plan.is_decode else length != -1
        freqs = freq_cis[(length - plan.compress_ratio)[ended]]
        entries = reference.finish(kv[ended], norm_weight, norm_eps, freqs)
        slots = out_loc if plan.is_decode else out_loc[place & 0xFFFF]
        reference.store(kvcache, page_size, slots[ended], entries, use_fp4)

    names = {
        "torch": torch,
        **{"QUIET": QUIET, "GIVEN": {}},
        "KVLayout": LAYOUTS,
        "cast": lambda kind, value: value,
        "is_overlap_compress": lambda ratio: ratio == 4,
        "_use_online_compress": lambda ratio: False,
        "compress_forward": compress_forward,
        "compress_norm_rope_store": compress_norm_rope_store,
    }
    code, _ = compiled(class_of(wheel))
    for name in ("_is_hip", "envs", "Optional", "torch"):
        names.setdefault(name, QUIET)
    exec(code, names)
    return names["CompressorBackendMixin"]


def pooled_of_many(state, kv_score, ape, ratio, plan_c, plan_w):
    """SGLang's flash_c4_prefill or flash_c128_prefill and the write behind it, entry by entry."""
    head_dim = ape.shape[1]
    pooled, window = torch.zeros((len(plan_c), head_dim), dtype=torch.float64), 8 if ratio == 4 else 128
    for line, (length, place, before, own) in enumerate(plan_c.view(torch.int32).tolist()):
        if length == -1:
            continue
        row, held = place & 0xFFFF, place >> 16
        tokens = []
        for i in range(window if ratio == 128 or length > 4 else 4):
            i += 0 if ratio == 128 or length > 4 else 4
            page = before if window - i > ratio else own
            tokens.append(state[page, i % ratio] if i < held else kv_score[row - window + 1 + i])
        groups = torch.stack(tokens).unflatten(0, (-1, ratio))
        groups_before = groups[:1] if ratio == 4 else None
        pooled[line] = reference.pool(groups[-1:], groups_before, torch.tensor([length > 4]), ape)[0]
    for row, slot in plan_w.view(torch.int32).tolist():
        if row != -1:
            state.view(-1, state.shape[2])[slot] = kv_score[row]
    return pooled


class Pool:
    """DeepSeekV4TokenToKVPool as far as forward_unified asks it."""

    uniform_fp8 = False

    def __init__(self, inputs):
        self.inputs = inputs
        self.layer_mapping = {0: (None, None, object())}

    def cache(self, layer_id):
        return self.inputs.cache

    get_index_k_with_scale_buffer = get_extra_key_buffer = cache

    def page_size(self, layer_id_or_ratio=None):
        return self.inputs.page_size

    get_index_k_page_size = get_extra_key_page_size = page_size

    def get_extra_key_layout(self, layer_id):
        return LAYOUTS.V4


class Compressor:
    """SGLang's module: its shapes are the checkpoint's."""

    def __init__(self, inputs):
        self.inputs, self.ratio, self.head_dim = inputs, inputs.state.shape[1], inputs.norm_weight.shape[0]
        self.is_in_indexer = self.rotate = self.head_dim == 128
        self.ape = inputs.ape.view(self.ratio, -1)
        self.norm = SimpleNamespace(weight=inputs.norm_weight, variance_epsilon=inputs.norm_eps)
        self.freqs_cis = inputs.freqs_cis

    def compute_kv_score(self, x, forward_batch):
        return self.inputs.kv_score

    def get_state_pool(self, backend):
        flat = self.inputs.state.view(-1, self.inputs.state.shape[2])
        return SimpleNamespace(kv_score_buffer=SimpleNamespace(kv_score=flat))


def run(mixin_class, inputs):
    backend = mixin_class.__new__(mixin_class)
    ratio = inputs.state.shape[1]
    core = SimpleNamespace(**{f"c{ratio}_out_loc": inputs.out_loc})
    plan = Plan(ratio, inputs.plan) if inputs.writes is None else PlanOfMany(ratio, inputs.plan, inputs.writes)
    backend.forward_metadata = SimpleNamespace(core_metadata=core, **{f"c{ratio}_compress_metadata": plan})
    backend.token_to_kv_pool, backend.enable_deepseek_v4_fp4_indexer = Pool(inputs), inputs.fp4
    mode = SimpleNamespace(is_idle=lambda: False)
    batch = SimpleNamespace(forward_mode=mode, token_to_kv_pool=backend.token_to_kv_pool, _original_forward_mode=None)
    compressor = Compressor(inputs)
    forward = backend.forward_indexer_compressor if compressor.is_in_indexer else backend.forward_core_compressor
    forward(torch.zeros(1), batch, 0, compressor)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", ("decode", "verification"))
@every_release(SERVED)
def test_every_compressor_of_a_step(sglang_wheel, monkeypatch, version, kind, step):
    ratio = KINDS[kind][0]
    stock = make_inputs(kind, [2 * ratio, ratio, 3 * ratio + 2, 5 * ratio, ratio - 1], device="cpu")
    if step == "verification":
        requests = [Request(before, 4) for before in (2 * ratio - 2, 0, 3 * ratio - 1, ratio + 1)]
        stock = make_step(kind, requests, device="cpu", padding=2)
    ours, launches, calls = stock.copy(), [], []
    backend = mixin(sglang_wheel(version), launches)
    run(backend, stock)
    assert launches == ["compress_forward", "compress_norm_rope_store"]

    def op(**arguments):
        calls.append(arguments["fp4"])
        reference.compressor(**arguments)

    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(adapter.op, "compressor", op)
    setattr(backend, METHOD, adapter.replace_all_in_one(getattr(backend, METHOD)))
    run(backend, ours)
    assert calls == [kind == "index_fp4"] and len(launches) == 2
    assert torch.equal(ours.cache, stock.cache)
    assert torch.equal(ours.state.view(torch.int32), stock.state.view(torch.int32))


def data_creator(wheel, ring, generate):
    """create_paged_compressor_data of the wheel, its planners `generate`'s."""

    class CompressorDecodePlan:
        @staticmethod
        def generate(compress_ratio, **given):
            return Plan(compress_ratio, generate.decode(compress_ratio, **given))

    class CompressorPrefillPlan:
        @staticmethod
        def generate(compress_ratio, **given):
            return PlanOfMany(compress_ratio, *generate.prefill(compress_ratio, **given))

    function = contract.find_definition(tree(wheel, MODULE), "create_paged_compressor_data")
    future = ast.parse("from __future__ import annotations").body
    names = {
        "torch": torch,
        "CompressorDecodePlan": CompressorDecodePlan,
        "CompressorPrefillPlan": CompressorPrefillPlan,
        "_use_online_compress": lambda ratio: False,
    }
    exec(compile(ast.fix_missing_locations(ast.Module([*future, copy.deepcopy(function)], [])), "wheel", "exec"), names)
    return names["create_paged_compressor_data"]


PLANNER = "deepseek_v4/c_plan.cuh"
CLAMP = "constexpr int32_t kMaxMTPDraftTokens = 4;"
BY_RING = "mtp_pad = ring_size > window_size ? ring_size - window_size + 2 : 0;"


def planner_of(wheel) -> str:
    homes = ("sglang/jit_kernel/csrc/", "sglang/kernels/jit/csrc/")
    (text,) = [content(wheel, home + PLANNER) for home in homes if home + PLANNER in members(wheel)]
    return " ".join(text.split())


@every_release(SERVED)
def test_what_a_verification_writes_is_clamped_where_we_mend_it(sglang_wheel, version):
    text, target = planner_of(sglang_wheel(version)), COMPRESSOR.targets[-1]
    mended = SpecifierSet(target.sglang).contains(version)
    assert ((CLAMP in text), (BY_RING in text)) == (mended, not mended)


@pytest.mark.parametrize("version", [r for r in RELEASES if SpecifierSet(">=0.5.14,<0.5.18").contains(r)])
def test_a_verification_of_eight_tokens_keeps_what_a_rejection_needs(sglang_wheel, monkeypatch, version):
    """The wheel's own function, by host lists and by device tensors, over planners that write as its c_plan.cuh."""
    ratio, ring, requests = 4, 16, [Request(9, 8), Request(2, 8)]
    slots = torch.arange(64).view(2, 32)  # of a request's positions: its ring twice over

    def decode(compress_ratio, *, req_pool_indices, req_to_token, seq_lens, **_):
        slot = req_to_token[req_pool_indices, (seq_lens - 1) % ring]
        return torch.stack([seq_lens, slot, slot, slot], dim=1).to(torch.int32).view(torch.uint8)

    def prefill(compress_ratio, *, num_q_tokens, seq_lens, extend_lens, use_cuda_graph, **_):
        writes = [
            (8 * number + j, int(slots[number, (length - 8 + j) % ring]))
            for number, length in enumerate(seq_lens.tolist())
            for j in range(8)
            if length - 8 + j >= min(length // 4 * 4 - 4, length - 4)
        ]
        writes += [(-1, -1)] * (num_q_tokens - len(writes) if use_cuda_graph else 0)
        plan_w = torch.tensor(writes, dtype=torch.int32).view(torch.uint8)
        return torch.zeros((num_q_tokens, 16), dtype=torch.uint8), plan_w

    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    original = data_creator(sglang_wheel(version), ring, SimpleNamespace(decode=decode, prefill=prefill))
    pool = SimpleNamespace(
        swa_page_size=64, get_ring_size=lambda compress_ratio: ring, full_to_swa_index_mapping=torch.zeros(1)
    )
    given = {
        "is_prefill": True,
        "token_to_kv_pool": pool,
        "req_to_token": slots,
        "req_pool_indices": torch.tensor([0, 1], dtype=torch.int32),
        "seq_lens": torch.tensor([17, 10], dtype=torch.int32),
        "extend_lens": torch.tensor([8, 8], dtype=torch.int32),
    }
    expected = planned(ratio, requests, [0, 32], ring)[1]
    for how in (
        {"use_prefill_cuda_graph": True, "num_q_tokens": 16},
        {"seq_lens_cpu": [17, 10], "extend_lens_cpu": [8, 8]},
    ):
        found = adapter.replace_create_data(original)(ratio, **given, **how).plan_w.view(torch.int32).tolist()
        assert [tuple(pair) for pair in found] == expected and len(expected) == 16
        assert len([p for p in original(ratio, **given, **how).plan_w.view(torch.int32).tolist() if p[0] != -1]) < 16


@every_release(SERVED)
def test_the_adapter_knows_every_keyword(sglang_wheel, version):
    method = contract.find_definition(
        ast.Module([class_of(sglang_wheel(version))], []), f"CompressorBackendMixin.{METHOD}"
    )
    names = contract.parameters(method)
    assert names[0] == "self" and method.args.args[1:] == []  # the rest are keywords only
    assert set(names[1:]) <= {*adapter.NEEDED, *adapter.OTHERS} and set(adapter.NEEDED) <= set(names)


@pytest.mark.parametrize("version", [r for r in RELEASES if not since(r, SERVED)])
def test_before_it_there_are_no_slots_that_the_operator_takes(version, sglang_wheel):
    """0.5.12's call does not have them; 0.5.12.post1's and 0.5.13's are int32, so says the kernel that takes them."""
    wheel = sglang_wheel(version)
    method = contract.find_definition(ast.Module([class_of(wheel)], []), f"CompressorBackendMixin.{METHOD}")
    assert ("out_loc" in contract.parameters(method)) == (version != "0.5.12")
    kernel = "sglang/jit_kernel/csrc/deepseek_v4/fused_norm_rope_v2.cuh"
    assert "const int32_t* __restrict__ out_loc;" in content(wheel, kernel)
    assert "const int64_t* __restrict__ out_loc;" in content(sglang_wheel(SERVED), kernel)
    assert not any(SpecifierSet(target.sglang).contains(version) for target in COMPRESSOR.targets) and COMPRESSOR.absent
