"""What the setting `reproducible` changes in each adapter: more rows go the way of few, nothing else does."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.ops import all_reduce as all_reduce_op
from deepseek_v4_sm120.ops.shared.limits import STEP_ROWS
from deepseek_v4_sm120.patching.steering import OFF as OFF_HERE
from deepseek_v4_sm120.patching.steering import ON as ON_HERE
from deepseek_v4_sm120.patching.steering import USER
from deepseek_v4_sm120.reference.bf16_linear import bf16_linear as product
from deepseek_v4_sm120.settings import Settings
from deepseek_v4_sm120.sglang_patches import device_gate, models_served, shadow
from deepseek_v4_sm120.sglang_patches.adapters import (
    all_reduce,
    argument_defaults,
    bf16_linear,
    compressor,
    dense_rows,
    fp8_linear,
    mxfp4_moe,
    sparse_decode,
    wo_a,
)
from deepseek_v4_sm120.sglang_patches.defaults import REPRODUCIBLE

ON = Settings(choices={"reproducible": "on"})
OFF = Settings(choices={"reproducible": "off"})


@pytest.fixture(params=[False, True], ids=["off", "on"])
def on(request, monkeypatch):
    """Whether the setting is on, in every adapter; the gate is open for the CPU."""
    for module in (all_reduce, bf16_linear, compressor, mxfp4_moe, shadow, sparse_decode, wo_a):
        monkeypatch.setattr(module, "settings", lambda: ON if request.param else OFF)
    monkeypatch.setattr(dense_rows, "MOST_ROWS", sys.maxsize if request.param else STEP_ROWS)
    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(device_gate, "serves_current_device", lambda: True)
    return request.param


def test_the_setting():
    assert ON.reproducible and not OFF.reproducible and not Settings().reproducible
    assert not Settings(choices={"mhc": "on"}).reproducible


@pytest.mark.parametrize(("text", "most"), [("reproducible=on", sys.maxsize), ("mhc=on", STEP_ROWS)])
def test_dense_layers_read_it_once(torch_python, text, most):
    code = "from deepseek_v4_sm120.sglang_patches.adapters import dense_rows; print(dense_rows.MOST_ROWS)"
    given = os.environ | {"DSV4_SM120_SET": text}
    done = subprocess.run([*torch_python(), "-c", code], env=given, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(most)]


@pytest.mark.parametrize("rows", [0, 1, STEP_ROWS, STEP_ROWS + 1, 8192, 1 << 20])
def test_dense_layers_take_all_rows(on, rows):
    assert dense_rows.are_ours(rows) is (0 < rows <= STEP_ROWS or (on and rows > 0))
    x = torch.empty(rows, 128, dtype=torch.bfloat16)
    assert fp8_linear.has_few_rows(x) is dense_rows.are_ours(rows)
    assert bf16_linear.takes(x.repeat(1, 4)[:2048], torch.empty(8, 512, dtype=torch.bfloat16)) is dense_rows.are_ours(
        min(rows, 2048)
    )
    freqs = torch.ones(4, 32, dtype=torch.complex64)
    positions = torch.zeros(rows, dtype=torch.int64)
    assert wo_a._may_wait(x, freqs, positions) is dense_rows.are_ours(rows)


def test_wo_a_and_the_experts_are_asked_for_the_bits_of_few_rows(on, monkeypatch):
    monkeypatch.setattr(wo_a.op, "wo_a", lambda *args, reproducible, **given: reproducible)
    groups = SimpleNamespace(weight=None, weight_scale=None)
    assert wo_a._multiply(groups, None, None) is on
    monkeypatch.setattr(mxfp4_moe.op, "mxfp4_moe", lambda *args, reproducible, **given: reproducible)
    experts = mxfp4_moe.Experts(None, None, None, None, 0, False, 10.0, "mxfp8")
    assert mxfp4_moe._run(experts, None, None, None) is on


def test_attention_is_the_kernel_for_few_rows(on, monkeypatch):
    monkeypatch.setattr(sparse_decode.op, "sparse_decode", lambda q, *args, prefill, **given: prefill)
    call = sparse_decode.Call(
        **{name: None for name in ("k_cache", "indices", "softmax_scale", "topk_length", "attn_sink", "extra_k_cache")},
        **{name: None for name in ("extra_indices", "extra_topk_length")},
        **{"q": torch.zeros(2048, 1, 64, 8), "head_dim_v": 8, "is_sparse_fp8": True, "args": (), "kwargs": {}},
    )
    computed, _ = sparse_decode._serve(call, return_lse=False)
    assert computed is (False if on else None)


# ---- the router and the head


class MoEGate:
    is_deepseek_v4 = True
    weight = torch.zeros(16, 512, dtype=torch.bfloat16)


def test_the_router_is_ours_beside_deterministic_inference(on, monkeypatch):
    monkeypatch.setattr(bf16_linear.op, "bf16_linear", lambda x, weight: "ours")
    execution = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=True))
    module = {"get_exec": lambda: execution}
    exec("def forward(self, hidden_states, allocator=None, batch=None):\n    return 'original'", module)
    x = torch.zeros(3, 512, dtype=torch.bfloat16)
    assert bf16_linear.replace_gate(module["forward"])(MoEGate(), x) == ("ours" if on else "original")


class UnquantizedEmbeddingMethod:
    pass


class Processor:
    def __init__(self, **given):
        self.use_fp32_lm_head, self.rl_on_policy_target = False, None
        vars(self).update(given)


def head(weight, **given):
    return SimpleNamespace(weight=weight, quant_method=UnquantizedEmbeddingMethod(), **given)


def stock_head(self, hidden_states, lm_head, embedding_bias=None, *, out=None):
    return "original"


@pytest.fixture
def logits(monkeypatch):
    """Our head, for our model; what it was asked for."""
    calls = []

    def op(x, weight, *, out_dtype=torch.float32, out=None):
        calls.append((x.shape[0], out_dtype, out is not None))
        result = product(x, weight).to(out_dtype)
        return result if out is None else out.copy_(result)

    monkeypatch.setattr(models_served, "announced", lambda: {"model_type": "deepseek_v4"})
    monkeypatch.setattr(bf16_linear.op, "bf16_linear", op)
    return calls


def states(rows=300):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 512, generator=generator).bfloat16()
    return x, torch.randn(24, 512, generator=generator).bfloat16()


@pytest.mark.parametrize("on", [True], indirect=True)
@pytest.mark.parametrize(
    "processor", [Processor(), Processor(use_fp32_lm_head=True), Processor(use_fp32_lm_head_output=True)]
)
def test_the_head_rounds_as_it_was_asked_to(on, logits, processor):
    x, weight = states()
    found = bf16_linear.replace_lm_head(stock_head)(processor, x, head(weight))
    wide = processor.use_fp32_lm_head or getattr(processor, "use_fp32_lm_head_output", False)
    assert found.dtype == (torch.float32 if wide else torch.bfloat16) and logits == [(300, found.dtype, False)]
    torch.testing.assert_close(found.double(), product(x, weight), rtol=0.01, atol=0.2)


@pytest.mark.parametrize("on", [True], indirect=True)
@pytest.mark.parametrize("fits", [True, False])
def test_the_head_writes_float32_where_the_graph_wants_it(on, logits, fits):
    """0.5.23: the graph's buffer is as wide as the whole vocabulary; a rank's share may not be."""
    x, weight = states(2)
    out = torch.zeros(2, 24 if fits else 48)
    found = bf16_linear.replace_lm_head(stock_head)(Processor(use_fp32_lm_head=True), x, head(weight), out=out)
    assert logits == [(2, torch.float32, fits)] and (found.data_ptr() == out.data_ptr()) is fits


@pytest.mark.parametrize("on", [True], indirect=True)
@pytest.mark.parametrize(
    "given",
    [
        lambda x, w: (Processor(), x, head(w, set_lora=None)),
        lambda x, w: (Processor(), x, head(w, bias=torch.zeros(24))),
        lambda x, w: (Processor(), x, SimpleNamespace(weight=w, quant_method=object())),
        lambda x, w: (Processor(rl_on_policy_target="fsdp"), x, head(w)),
        lambda x, w: (Processor(), x, head(w), torch.zeros(24)),
        lambda x, w: (Processor(), x.float(), head(w)),
    ],
    ids=["LoRA", "bias", "quantised", "RL", "embedding bias", "float32"],
)
def test_another_head_is_the_originals(on, logits, given):
    assert bf16_linear.replace_lm_head(stock_head)(*given(*states(2))) == "original" and logits == []


@pytest.mark.parametrize("told", [None, {"model_type": "llama"}])
@pytest.mark.parametrize("on", [True], indirect=True)
def test_another_models_head_is_the_originals(on, logits, told, monkeypatch):
    monkeypatch.setattr(models_served, "announced", lambda: told)
    x, weight = states(2)
    assert bf16_linear.replace_lm_head(stock_head)(Processor(), x, head(weight)) == "original" and logits == []


def test_shadow_mode_compares_heads_and_not_one_buffer(logits, monkeypatch):
    """SGLang's product writes to `out`: ours must not be what it then finds there."""
    both = Settings(choices={"reproducible": "on"}, shadow="1")
    for module in (bf16_linear, shadow):
        monkeypatch.setattr(module, "settings", lambda: both)
    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    shadow.reset()
    x, weight = states(2)
    out = torch.zeros(2, 24)

    def other(self, hidden_states, lm_head, embedding_bias=None, *, out=None):
        return out.copy_(1.5 * product(hidden_states, lm_head.weight))

    bf16_linear.replace_lm_head(other)(Processor(use_fp32_lm_head=True), x, head(weight), out=out)
    (record,) = shadow.report()
    assert (record["patch"], record["calls"], record["bad_calls"]) == ("bf16_linear", 1, 1)
    shadow.reset()


# ---- compressors, sums


def test_the_compressors_of_earlier_releases_are_their_own(on, monkeypatch):
    monkeypatch.setattr(compressor, "arguments", lambda plan, given: {"asked": True})
    monkeypatch.setattr(compressor.op, "compressor", lambda **call: "ours")
    backend = SimpleNamespace(_get_paged_compress_metadata=lambda ratio: None)
    given = {"compress_ratio": 128, "kv_score_input": torch.zeros(1, 1)}
    earlier = compressor.replace_all_in_one_0_5_14(lambda self, **given: "original")
    assert earlier(backend, **given) == ("original" if on else "ours")
    assert compressor.replace_all_in_one(lambda self, **given: "original")(backend, **given) == "ours"


class Group(all_reduce_op.AllReduce):
    def __init__(self):
        self.rank, self.ranks, self.device, self.max_rows, self.hidden = 0, 2, torch.device("cpu"), 512, 64


class Theirs:
    disabled = False

    def should_custom_ar(self, x):
        return False


@pytest.mark.parametrize(("rows", "pieces"), [(512, [512]), (513, [512, 1]), (2048, [512] * 4)])
def test_sums_of_many_rows_are_made_in_pieces(on, rows, pieces, monkeypatch):
    made = []

    def op(x, group, *, out=None, tag):
        made.append(x.shape[0])
        return 2 * x if out is None else out.copy_(2 * x)

    monkeypatch.setattr(all_reduce.op, "all_reduce", op)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ours = all_reduce.Communicator(Theirs(), Group())
    x = torch.arange(rows, dtype=torch.bfloat16)[:, None].repeat(1, 64)
    assert ours.should_custom_ar(x) is (on or rows <= 512)
    if ours.should_custom_ar(x):
        assert torch.equal(ours.custom_all_reduce(x), 2 * x) and made == pieces
    assert not ours.should_custom_ar(x[:, :32]) and not ours.should_custom_ar(x.float())


def test_steps_of_many_rows_keep_our_sums(on):
    places = [all_reduce.Place(True, "here", 1024)] * 2
    assert (all_reduce._why_not(places) is None) is on


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_server_whose_sums_are_not_ours_is_told(on, ranks, monkeypatch):
    """Of two cards they have one order, whoever adds."""
    told = []
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: ranks)
    monkeypatch.setattr(all_reduce.report, "warn", told.append)
    monkeypatch.setattr(all_reduce.report, "add_note", lambda *given: None)
    monkeypatch.setattr(all_reduce.report, "write", lambda: None)
    left = all_reduce._left(Theirs(), "group", "no way")
    assert left.disabled is on and ("NOT REPRODUCIBLE" in told[0]) is (on and ranks > 2)


@pytest.mark.parametrize("state", [ON_HERE, USER, OFF_HERE])
def test_what_a_reproducible_server_does_without_is_named(state, monkeypatch):
    """Of two cards sums have one order; on four they are ours, or not in place for who does without custom sums."""
    monkeypatch.setattr(argument_defaults, "settings", lambda: ON)
    in_place = {"all_reduce", *REPRODUCIBLE}
    steering = SimpleNamespace(outcome={"reproducible": SimpleNamespace(state=state)}.__getitem__)

    def left_out(missing, **given):
        engine = SimpleNamespace(steering=steering, in_place=lambda: in_place - {missing})
        return argument_defaults._left_out(engine, lambda name, default: given.get(name, default))

    is_told = state != OFF_HERE
    assert left_out("fp8_linear", tp_size=4) == ["fp8_linear"] * is_told and left_out(None, tp_size=4) == []
    for given in (("all_reduce", {}), (None, {"disable_custom_all_reduce": True})):
        assert left_out(given[0], tp_size=4, **given[1]) == ["all_reduce"] * is_told
        assert left_out(given[0], tp_size=2, **given[1]) == left_out(given[0], **given[1]) == []


# ---- --enable-deterministic-inference


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("disabled", [True, False])
@pytest.mark.parametrize("whose", ["ours", "another model's", "nobody told", "on another card"])
def test_the_flag_leaves_sums_and_attention_as_they_were(asked, disabled, whose, monkeypatch):
    ours = whose == "ours"
    told = {"another model's": {"model_type": "llama"}, "nobody told": None}.get(whose, {"model_type": "deepseek_v4"})
    lists = {
        "DETERMINISTIC_ATTENTION_BACKEND_CHOICES": ["triton"],
        "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND": ["triton"],
    }
    choices = SimpleNamespace(**lists)
    monkeypatch.setattr(argument_defaults.importlib, "import_module", lambda name: choices)
    monkeypatch.setattr(models_served, "announced", lambda: told)
    monkeypatch.setattr(device_gate, "serves_current_device", lambda: whose != "on another card")
    arguments = SimpleNamespace(enable_deterministic_inference=asked, disable_custom_all_reduce=disabled)

    def original(self):
        if self.enable_deterministic_inference:
            assert ("dsv4" in choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES) is ours
            self.disable_custom_all_reduce = True

    for _ in range(2):
        argument_defaults.replace_deterministic_method(original)(arguments)
    assert arguments.disable_custom_all_reduce is (disabled or (asked and not ours))
    wanted = ["triton", "dsv4"] if asked and ours else ["triton"]
    assert list(lists.values()) == [wanted, wanted]


@pytest.mark.parametrize(("ours", "theirs"), [(True, False), (False, True), (False, False)])
def test_marlins_experts_run_where_sglang_or_we_say_so(ours, theirs, monkeypatch):
    monkeypatch.setattr(device_gate, "serves_current_device", lambda: ours)
    assert argument_defaults.replace_marlin_gate(lambda device=None: theirs)(device="cuda") is (ours or theirs)
