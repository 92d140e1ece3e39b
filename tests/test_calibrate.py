"""calibrate without a GPU: the decision, the profile, the workers' protocol, the providers' arithmetic on the CPU."""

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120 import OPS
from deepseek_v4_sm120.calibrate import (
    OPERATORS,
    bf16_linear,
    command,
    fp8_linear,
    index_select,
    mhc,
    mxfp4_moe,
    provider,
    sparse_decode,
    worker,
)
from deepseek_v4_sm120.calibrate.provider import OURS, STOCK
from deepseek_v4_sm120.console import CommandError
from deepseek_v4_sm120.ops import bf16_linear as bf16_op
from deepseek_v4_sm120.ops import fp8_linear as fp8_op
from deepseek_v4_sm120.ops import index_select as index_op
from deepseek_v4_sm120.ops import mhc as mhc_op
from deepseek_v4_sm120.ops import mxfp4_moe as moe_op
from deepseek_v4_sm120.ops import sparse_decode as op
from deepseek_v4_sm120.patching import profile

SHAPES = {"tp": 2, "context": 131_072, "concurrency": 8, "quick": True}


def times(**microseconds):
    cases = [{"case": name, "us": us, "error": 0.001, "how": "graph"} for name, us in microseconds.items()]
    return {"cases": cases, "wrong": None}


WRONG = {"cases": [{"case": "C4", "error": 0.3, "allowed": 0.003}], "wrong": "C4: relative error 0.3000, allowed 0.003"}


@pytest.mark.parametrize(
    ("ours", "stock", "winner", "ratio"),
    [
        (times(a=10, b=10), times(a=20, b=20), OURS, 2.0),
        (times(a=10, b=10), times(a=5, b=10), STOCK, 0.5**0.5),
        (times(a=10), {"problem": "not installed"}, OURS, None),
        (WRONG, times(a=5), STOCK, None),
        (times(a=10), WRONG, OURS, None),
        ({"problem": "no module"}, times(a=5), STOCK, None),
        (times(a=10), times(b=5), OURS, None),
    ],
)
def test_who_is_used(ours, stock, winner, ratio):
    found = command.decide("sparse_decode", {OURS: ours, STOCK: stock, "torch": times(a=900)})
    assert (found["winner"], found["stock_over_ours"]) == (winner, pytest.approx(ratio) if ratio else None)
    assert set(found["wrong"]) == {name for name, result in {OURS: ours, STOCK: stock}.items() if result is WRONG}


def test_the_profile_is_what_the_patch_table_reads(tmp_path, monkeypatch, capsys):
    results = {OURS: WRONG, STOCK: times(C4=5), "x": {"problem": "absent"}}
    operators = {"sparse_decode": command.decide("sparse_decode", results)}
    found = command.as_profile(operators, "NVIDIA RTX PRO 6000", SHAPES) | {"not_reached": ["mhc"]}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(found))
    monkeypatch.setattr(profile, "here", lambda sglang: profile.identity_of(found))
    read = profile.consult(str(path), None)
    assert "ours: C4: relative error 0.3000" in read.against("sparse_decode")
    command.show(found, path)
    text = capsys.readouterr().out
    assert "WRONG  ours: C4" in text and "not run  x: absent" in text and "stock is used" in text
    assert "mhc: not reached, so the shipped default holds" in text


def in_step(us, point, calls):
    found = zip(us, calls, strict=True)
    return [{"case": f"{point}, {n}", "us": t, "point": point, "calls": c} for n, (t, c) in enumerate(found)]


def test_a_verdict_weighs_what_a_step_calls_often():
    """Within a point times add up by their calls; points count alike."""
    ours = {"cases": in_step((10, 10), "1 rows", (1, 9)) + in_step((40, 10), "8 rows", (1, 9)), "wrong": None}
    stock = {"cases": in_step((90, 10), "1 rows", (1, 9)) + in_step((40, 10), "8 rows", (1, 9)), "wrong": None}
    found = command.decide("fp8_linear", {OURS: ours, STOCK: stock})
    assert found["stock_over_ours"] == pytest.approx((180 / 100) ** 0.5)


@pytest.mark.parametrize(
    ("stock", "verdict"),
    [
        (times(a=13), "ours is used; stock takes 1.30 times ours, so it is switched on"),
        (times(a=8), "stock is used; stock takes 0.80 times ours"),
        (times(b=8), "off, as by default: nothing to compare with"),
        (WRONG, "off, as by default: nothing to compare with"),
        ({"problem": "not installed"}, "off, as by default: nothing to compare with"),
    ],
)
def test_an_operator_that_is_off_by_default_is_switched_on_only_by_a_comparison(stock, verdict):
    measured = command.decide("fp8_linear", {OURS: times(a=10), STOCK: stock})
    decided = command.profile.Profile("p.json", {"fp8_linear": measured})
    assert command._verdict("fp8_linear", measured, decided) == verdict
    assert bool(decided.favours("fp8_linear")) == verdict.endswith("switched on")


@pytest.mark.parametrize(
    ("way", "left_out", "ratio"),
    [
        (times(b=5), None, 2**0.5),
        (times(b=20), "takes 2.00 times as long as ours", 1.0),
        (WRONG, "C4: relative error 0.3000, allowed 0.003", 1.0),
        ({"problem": "not on this GPU"}, None, 1.0),
    ],
)
def test_a_way_of_ours_that_loses_is_left_out_and_not_the_operator(way, left_out, ratio):
    name = mxfp4_moe.OURS_MXFP8
    found = command.decide("mxfp4_moe", {OURS: times(a=10, b=10), name: way, STOCK: times(a=10, b=10)})
    assert found["winner"] == OURS and found["stock_over_ours"] == pytest.approx(ratio)
    assert found["left_out"] == ({name: left_out} if left_out else {})


def test_every_operator_has_a_file_here():
    assert set(OPERATORS) <= set(OPS)
    assert {"sparse_decode", "index_select", "mxfp4_moe", "bf16_linear", "fp8_linear", "mhc"} <= set(OPERATORS)
    for name in OPERATORS:
        described = worker.operator(name)
        names = [p.name for p in described.providers()]
        assert names[0] == OURS and STOCK in names and len(set(names)) == len(names)
        assert all(p.name.startswith(OURS) for p in described.providers() if p.optional)
        cases = described.cases(**SHAPES)
        assert cases and len({c.name for c in cases}) == len(cases) and all(c.bytes_per_call > 0 for c in cases)
        assert isinstance(described.ERROR, str)
        assert all(described.max_error(OURS, case) <= described.max_error(STOCK, case) for case in cases)
        assert callable(described.error) and callable(described.correctness_inputs) and described.TimingInputs


def test_the_shapes_are_those_of_the_plan():
    cases = sparse_decode.cases(**SHAPES)
    assert {c.heads for c in cases} == {32} and {c.rows for c in cases} == {1, 8}
    assert {(c.page_size, c.length, c.width) for c in cases} == {(0, 0, 0), (64, 512, 512), (2, 1024, 1024)}
    assert len(sparse_decode.cases(**SHAPES | {"quick": False})) > len(cases)
    assert op.PREFILL_ROWS <= sparse_decode.CHECKED_PREFILL_ROWS <= sparse_decode.PREFILL_ROWS


def on_cpu(monkeypatch, module):
    make = module.make_inputs
    monkeypatch.setattr(module, "make_inputs", lambda shape, seed=0, device="": make(shape, seed=seed, device="cpu"))


def torch_provider(described):
    return next(p for p in described.providers() if p.name == "torch").build()


@pytest.mark.parametrize("kind", ["window", "C4", "C128 at 1K"])
def test_the_torch_provider_is_right(kind, monkeypatch):
    from deepseek_v4_sm120.reference import sparse_decode_inputs

    on_cpu(monkeypatch, sparse_decode_inputs)
    case = next(c for c in sparse_decode.cases(**SHAPES | {"context": 1024}) if c.kind == kind)
    call = torch_provider(sparse_decode)
    for inputs in sparse_decode.correctness_inputs(case):
        assert sparse_decode.error("torch", call(inputs), inputs) < 0.003


@pytest.mark.parametrize("case", index_select.cases(**SHAPES | {"context": 4096}), ids=lambda case: case.name)
def test_a_selection_is_judged_by_its_entries(case, monkeypatch):
    from deepseek_v4_sm120.reference import index_select as reference
    from deepseek_v4_sm120.reference import index_select_inputs

    on_cpu(monkeypatch, index_select_inputs)
    monkeypatch.setattr(index_select, "CHECKED_PREFILL_ROWS", 9)
    for one in index_select.correctness_inputs(case):
        assert int(one.inputs.page_table.max()) < one.inputs.k_pages.shape[0]
        right, _ = reference.index_select(**one.inputs.arguments(), k=512)
        assert index_select.error(OURS, right, one) == 0.0
        assert index_select.error("torch", torch_provider(index_select)(one), one) == 0.0
        longest = int(one.inputs.lengths.argmax())
        chosen = int((right >= 0).sum())
        missing, twice, strange = right.clone(), right.clone(), right.clone()
        missing[longest, 7], twice[longest, 7], strange[longest, 7] = -1, right[longest, 8], 1 << 30
        for wrong in (missing, twice, strange):
            assert index_select.error(STOCK, wrong, one) == pytest.approx(1 / chosen)
        worst = reference.mqa_logits(**one.inputs.arguments())[longest].where(
            torch.arange(one.inputs.page_table.shape[1] * 64) < one.inputs.lengths[longest], torch.inf
        )
        lowest = int(worst.argmin())
        slot = int(one.inputs.page_table[longest, lowest // 64]) * 64 + lowest % 64
        if int(one.inputs.lengths[longest]) > 512 and slot not in right[longest]:
            swapped = right.clone()
            swapped[longest, 7] = slot
            assert index_select.error(STOCK, swapped, one) == pytest.approx(1 / chosen)


def test_the_indexer_is_asked_for_what_the_plan_calls():
    cases = index_select.cases(**SHAPES | {"context": 393_216, "quick": False})
    assert {c.entries for c in cases} == {98_304} and {c.fp4 for c in cases} == {True, False}
    assert {(c.kind, c.rows) for c in cases} >= {("decode", 1), ("decode", 8), ("verify", 16), ("prefill", 2048)}
    assert index_select.PREFILL_ROWS > index_select.CHECKED_PREFILL_ROWS > index_op.DECODE_ROWS


@pytest.mark.parametrize(("version", "handled"), [(None, True), ((0, 5, 14), False), ((0, 5, 17), True)])
def test_the_stock_indexer_of_a_release(version, handled, monkeypatch):
    monkeypatch.setattr(index_select, "sglang_version", lambda: version)
    prefill = next(c for c in index_select.cases(**SHAPES) if c.kind == "prefill")
    assert index_select._stock_handles(prefill) == handled  # 0.5.14 gathers all keys of all rows as fp32
    assert not index_select._stock_handles(index_select.Case("decode", 1, 4096, fp4=True))
    if version is None:
        assert "no index logits for SM120" in index_select._stock_problem()


def test_the_experts_are_those_of_a_rank(monkeypatch):
    cases = mxfp4_moe.cases(**SHAPES)
    assert {c.inter for c in cases} == {1024} and [c.rows for c in cases] == [1, 8, 2048]
    assert cases[0].bytes_per_call == pytest.approx(6 * 13_369_344 / 2, rel=0.02)
    assert mxfp4_moe.DECODE_ROWS == moe_op.DECODE_ROWS < mxfp4_moe.CHECKED_PREFILL_ROWS
    mxfp8 = next(p for p in mxfp4_moe.providers() if p.name == mxfp4_moe.OURS_MXFP8)
    assert [c.rows for c in cases if mxfp8.handles(c)] == [2048]


def test_the_torch_experts_are_right():
    from deepseek_v4_sm120.reference.mxfp4_moe_inputs import Shape, make_inputs

    inputs = make_inputs(Shape(3, 256, 128, 16, routed_scaling=1.5), device="cpu")
    result = torch_provider(mxfp4_moe)(inputs)
    assert mxfp4_moe.error("torch", result, inputs) < 0.01
    assert mxfp4_moe.error("torch", result.roll(1, dims=0), inputs) > 0.5


@pytest.mark.parametrize("case", index_select.cases(**SHAPES | {"context": 4096}), ids=lambda case: case.name)
def test_what_is_timed_of_the_indexer(case, monkeypatch):
    monkeypatch.setattr(index_select, "POOL_BYTES", 4 << 20)
    calls = index_select.TimingInputs("cpu").calls(case, 2)
    one, other = (call.inputs for call in calls)
    assert one.q.shape[0] == case.rows and one.page_table.shape == (case.rows, case.columns)
    assert int(one.lengths.max()) <= case.entries <= 64 * case.columns
    assert not torch.equal(one.page_table[0], other.page_table[0]) and one.page_table.is_contiguous()
    few = dataclasses.replace(one, q=one.q[:2], weights=one.weights[:2], lengths=one.lengths[:2])
    few = dataclasses.replace(few, page_table=one.page_table[:2], q_scales=None if not case.fp4 else one.q_scales[:2])
    call = index_select.Call(few)
    assert index_select.error("torch", torch_provider(index_select)(call), call) == 0.0


def test_what_is_timed_of_the_experts(monkeypatch):
    monkeypatch.setattr(mxfp4_moe, "FLASH", dataclasses.replace(mxfp4_moe.FLASH, hidden=256))
    timing = mxfp4_moe.TimingInputs("cpu")
    calls = timing.calls(mxfp4_moe.Case(1, 128), 43)
    dealt = torch.cat([inputs.topk_ids[0] for inputs in calls])
    assert dealt[:256].unique().numel() == 256  # nobody comes again before all have been dealt
    assert int((calls[0].w13_scale == 255).sum()) == 0  # every expert's weights are there
    for rows in (8, 300):
        (inputs,) = timing.calls(mxfp4_moe.Case(rows, 128), 1)
        assert inputs.hidden.shape == (rows, 256) and inputs.topk_ids.shape == (rows, 6)
        assert all(len(set(ids)) == 6 for ids in inputs.topk_ids.tolist()) and inputs.w13 is calls[0].w13


def test_flashmla_gets_a_schedule_for_each_set_of_lengths(monkeypatch):
    used = []
    functions = {
        "get_mla_metadata": lambda: (object(), None),
        "flash_mla_with_kvcache": lambda **how: (used.append(how["tile_scheduler_metadata"]),),
    }
    monkeypatch.setattr(sparse_decode, "is_installed", lambda name: True)
    monkeypatch.setattr(sparse_decode, "unpatched", lambda module, name: functions[name])
    monkeypatch.setattr(sparse_decode, "_keywords", lambda inputs: {})
    call = next(p for p in sparse_decode.providers() if p.name == "flashmla").build()
    a, b = object(), object()
    for lengths in ((a, None), (a, None), (a, b), (a, None)):
        call(SimpleNamespace(topk_length=lengths[0], extra_topk_length=lengths[1]))
    assert used[0] is used[1] and len({id(made) for made in used}) == 3


def test_experts_in_another_layout_are_prepared_once():
    prepared = []

    class Other(mxfp4_moe.Prepared):
        def prepare(self, inputs):
            prepared.append(inputs)
            return len(prepared)

        def run(self, inputs):
            return self.layout

    one, two, call = SimpleNamespace(w13=object()), SimpleNamespace(w13=object()), Other()
    assert [call(i) for i in (one, one, two, two, one)] == [1, 1, 2, 2, 3]


def test_the_shapes_of_the_small_operators():
    assert (bf16_linear.MOST_ROWS, fp8_linear.MOST_ROWS) == (bf16_op.MAX_ROWS, fp8_op.MAX_ROWS)
    more = SHAPES | {"quick": False}
    assert [c.rows for c in mhc.cases(**SHAPES)] == [1, 8, 2048] and mhc_op.MANY_ROWS <= 2048
    assert [c.rows for c in mhc.cases(**more)] == [1, 8, 16, 32, 64, 2048]
    assert {c.rows for c in bf16_linear.cases(**more)} == {1, 8, 16, 32}
    assert {c.rows for c in fp8_linear.cases(**more)} == {1, 8, 16, 32, 64}
    assert {c.rows for c in fp8_linear.cases(**SHAPES | {"concurrency": 200})} == {1, 64}
    of_a_step = [c for c in bf16_linear.cases(**SHAPES) if c.rows == 1]
    assert [(c.matrix.outputs, c.calls) for c in of_a_step] == [(2048, 21), (1024, 20), (512, 21), (256, 43), (64, 21)]
    of_a_step = {c.matrix.name: (c.matrix.outputs, c.matrix.inputs, c.calls) for c in fp8_linear.cases(**SHAPES)}
    assert of_a_step["wo_b"] == (4096, 4096, 43) and of_a_step["index_wq_b"] == (8192, 1024, 21)
    assert "wo_a" not in of_a_step and sum(calls for *_, calls in of_a_step.values()) == 236
    assert mhc.Case(8).bytes_per_call == pytest.approx(8 * 10 * 8192 + 24 * 65536, rel=0.01)


@pytest.mark.parametrize("rows", [1, 9])
def test_a_boundary_is_judged_by_each_output(rows):
    for inputs in mhc.correctness_inputs(mhc.Case(rows), "cpu"):
        right = torch_provider(mhc)(inputs)
        assert 0.001 < mhc.error("torch", right, inputs) < mhc.max_error("torch", mhc.Case(rows))
        for place in range(4):
            wrong = [part.clone() for part in right]
            wrong[place].view(-1)[3] += 30 * wrong[place].abs().max()
            assert mhc.error("torch", wrong, inputs) > mhc.max_error("torch", mhc.Case(rows)), place
        coarse = [right[0], right[1] * (1 + 1e-5), *right[2:]]  # fine for others, not for ours
        assert mhc.error("torch", coarse, inputs) < 0.01 and mhc.error(OURS, coarse, inputs) > 0.0049
    assert len(mhc.TimingInputs("cpu").calls(mhc.Case(rows), 2)) == 2


@pytest.mark.parametrize("case", [c for c in fp8_linear.cases(**SHAPES) if c.matrix.bytes < 5 << 20], ids=str)
def test_the_torch_fp8_layer_is_right(case):
    from deepseek_v4_sm120.reference.fp8_linear import quantized_activations

    (inputs,) = fp8_linear.correctness_inputs(case, "cpu")
    result = torch_provider(fp8_linear)(inputs)
    assert fp8_linear.error("torch", result, inputs) < fp8_linear.MAX_ERROR
    assert fp8_linear.error("torch", result.roll(1, dims=1), inputs) > 0.5
    inputs.x, x = quantized_activations(inputs.x), inputs.x  # what stock computes
    result = torch_provider(fp8_linear)(inputs)
    inputs.x = x
    assert fp8_linear.MAX_ERROR < fp8_linear.error(STOCK, result, inputs) < fp8_linear.LOOSE_ERROR
    one, other = fp8_linear.TimingInputs("cpu").calls(case, 2)
    assert one.weight.data_ptr() != other.weight.data_ptr() and one.scale.dtype == torch.float32
    assert torch.equal(one.scale, torch.exp2(one.scale.log2().round())) and fp8_op.takes(one.weight, one.scale)


def test_a_bf16_layer_is_judged_by_what_it_returns():
    for case in (c for c in bf16_linear.cases(**SHAPES) if c.rows == 8):
        one, other = bf16_linear.correctness_inputs(case, "cpu")
        product = one.x.float() @ one.weight.float().t()
        allowed = bf16_linear.max_error(OURS, case)
        assert bf16_linear.error(OURS, product, one) < 1e-5 <= allowed
        assert (bf16_linear.error(OURS, product.bfloat16(), one) < allowed) == case.matrix.bf16_out
        assert bf16_linear.error(OURS, product, other) > 0.5
    assert len(bf16_linear.TimingInputs("cpu").calls(case, 3)) == 3


def test_stock_takes_its_own_kernel_for_the_router(monkeypatch):
    """Up to 16 rows where SGLang has one; else what compressors take."""
    called = []
    functions = {
        "linear_bf16_fp32": lambda x, weight: called.append("linear"),
        "dsv3_router_gemm": lambda x, weight, out_dtype: called.append("router"),
        "tiny_gemm_bf16": lambda x, weight, out_dtype, max_m: called.append(f"tiny {max_m}"),
        "tiny_router_gemm_max_tokens": lambda **how: 4,
    }
    monkeypatch.setattr(bf16_linear, "unpatched", lambda module, name: functions[name])
    monkeypatch.setattr(bf16_linear.importlib, "import_module", lambda name: SimpleNamespace(**functions))

    def calls(installed, rows, matrix):
        called.clear()
        monkeypatch.setattr(bf16_linear, "is_installed", lambda module: module.rpartition(".")[2] in installed)
        chosen = next(m for m in bf16_linear.MATRICES if m.name == matrix)
        x = torch.zeros(rows, 4096, dtype=torch.bfloat16)
        bf16_linear._stock()(bf16_linear.Inputs(chosen, x, torch.zeros(64, 4096, dtype=torch.bfloat16)))
        return called

    assert calls({"gemm"}, 1, "router") == ["linear"] == calls({"gemm", "tiny_gemm"}, 1, "C4 compressor")
    assert calls({"gemm", "dsv3_router_gemm"}, 16, "router") == ["router"]
    assert calls({"gemm", "dsv3_router_gemm"}, 17, "router") == ["linear"]
    assert calls({"bf16_fp32", "tiny_gemm"}, 4, "router") == ["tiny 4"]
    assert calls({"bf16_fp32", "tiny_gemm"}, 5, "router") == ["linear"]
    assert calls({"gemm"}, 1, "index head weights") == []  # torch's own


@pytest.mark.parametrize(
    ("version", "sm120", "called"),
    [
        ((0, 5, 12), False, ["post", "pre"]),
        ((0, 5, 17), False, ["post", "pre"]),
        ((0, 5, 17), True, ["post", "sinkhorn"]),
        ((0, 5, 20), True, ["fused"]),
        ((0, 5, 23), False, ["fused"]),
    ],
)
def test_the_stock_boundary_of_a_release(version, sm120, called, monkeypatch):
    """The pieces that SGLang calls by default, with a server's answers made up, in the operator's order."""
    from deepseek_v4_sm120.reference import mhc as reference
    from deepseek_v4_sm120.reference.mhc_inputs import Shape, make_inputs

    inputs, found = make_inputs(Shape(2), device="cpu"), []
    truth = torch_provider(mhc)(inputs)

    def needs_server():
        raise AssertionError("no server here")

    def pre(*arguments, norm_weight, norm_eps):
        found.append("pre")
        assert arguments[4:] == (1e-6, 1e-6, 1e-6, 2.0, 20) and norm_eps == 1e-6
        module.get_tp_group()
        return truth[1].unsqueeze(-1), truth[2], truth[3]

    def fused(f, streams, post, comb, fn, scale, base, *numbers, norm_weight, norm_eps):
        found.append("fused")
        assert post.shape == (2, 4, 1) and numbers == (1e-6, 1e-6, 1e-6, 2.0, 20)
        return truth[0], truth[1].unsqueeze(-1), truth[2], truth[3]

    def sinkhorn(mixes, scale, base, streams, iterations, eps):
        found.append("sinkhorn")
        z = mixes[:, 0]
        pre = torch.sigmoid(z[:, :4] * scale[0] + base[:4]) + eps
        post = 2 * torch.sigmoid(z[:, 4:8] * scale[1] + base[4:8])
        comb = reference.sinkhorn((z[:, 8:] * scale[2] + base[8:]).view(-1, 4, 4), iterations, eps)
        return pre[:, None], post[:, None], comb[:, None]

    def post(f, streams, post, comb):
        found.append("post")
        return truth[0]

    def rmsnorm(y, weight, eps):
        return (torch.nn.functional.rms_norm(y.float(), (4096,), eps=eps) * weight.float()).bfloat16()

    module = SimpleNamespace(mhc_post=post, mhc_pre=pre, mhc_fused_post_pre=fused, hc_split_sinkhorn=sinkhorn)
    module.get_tp_group = module.is_allocation_symmetric = needs_server
    monkeypatch.setattr(mhc.importlib, "import_module", lambda name: module)
    monkeypatch.setitem(sys.modules, "sgl_kernel", SimpleNamespace(rmsnorm=rmsnorm))
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(mhc, "is_installed", lambda name: True)
    monkeypatch.setattr(mhc, "set_up_deep_gemm", lambda: None)
    monkeypatch.setattr(mhc, "is_sm120", lambda: sm120)
    monkeypatch.setattr(mhc, "sglang_version", lambda: version)
    monkeypatch.delenv("SGLANG_OPT_DEEPGEMM_HC_PRENORM", raising=False)
    result = mhc._stock()(inputs)
    assert found == called and mhc.error(STOCK, result, inputs) < mhc.LOOSE_ERROR
    assert (mhc.os.environ.get("SGLANG_OPT_DEEPGEMM_HC_PRENORM") == "0") == sm120
    monkeypatch.setenv("SGLANG_OPT_DEEPGEMM_HC_PRENORM", "")  # undone with the test
    beside = mhc._fused_problem()
    assert (
        ("has no fused" in (beside or "")) == (version < (0, 5, 13))
        and ("fused" in called) == (beside is not None)
        or version < (0, 5, 13)
    )


@pytest.mark.parametrize(("enabled", "switch", "set_to"), [(True, True, [True]), (True, False, []), (False, True, [])])
def test_deep_gemm_launches_as_in_a_server(enabled, switch, set_to, monkeypatch):
    found = []
    modules = {
        provider.DEEP_GEMM_WRAPPER: SimpleNamespace(ENABLE_JIT_DEEPGEMM=enabled),
        "deep_gemm": SimpleNamespace(set_pdl=found.append),
        "sglang.srt.environ": SimpleNamespace(envs=SimpleNamespace()),
    }
    monkeypatch.setattr(provider.importlib, "import_module", lambda name: modules[name])
    provider.set_up_deep_gemm()
    assert found == []  # 0.5.12 has no such switch
    setattr(modules["sglang.srt.environ"].envs, provider.DEEP_GEMM_PDL, SimpleNamespace(get=lambda: switch))
    provider.set_up_deep_gemm()
    assert found == set_to


class FakeMethod:
    """What Fp8LinearMethod is to the provider."""

    class Fp8Config:
        @classmethod
        def from_config(cls, config):
            assert config["weight_block_size"] == [128, 128]
            return cls()

    class Fp8LinearMethod:
        def __init__(self, config):
            self.prepared = 0

        def process_weights_after_loading(self, layer):
            assert layer.weight_scale_inv.format_ue8m0 is False and layer.orig_dtype == torch.bfloat16
            self.prepared += 1

        def apply(self, layer, x, bias=None):
            return fp8_linear.dequantized_product(fp8_linear.Inputs(x, layer.weight, layer.weight_scale_inv))


@pytest.mark.parametrize("takes_arguments", [True, False])
def test_the_stock_fp8_layer_is_prepared_once_for_every_weight(takes_arguments, monkeypatch):
    chosen = []
    utils = SimpleNamespace(get_exec=lambda: pytest.fail("no server here"))
    if takes_arguments:
        utils.initialize_fp8_gemm_config = lambda arguments: chosen.append(arguments.fp8_gemm_runner_backend)
    else:
        utils.initialize_fp8_gemm_config = lambda: chosen.append(utils.get_exec().kernel.fp8_gemm_runner_backend)
    modules, of_server = {fp8_linear.UTILS: utils, fp8_linear.METHOD: FakeMethod}, utils.get_exec
    monkeypatch.setattr(fp8_linear.importlib, "import_module", lambda name: modules[name])
    monkeypatch.setattr(fp8_linear, "set_up_deep_gemm", lambda: None)
    stock = fp8_linear.Stock()
    assert chosen == ["auto"] and utils.get_exec is of_server
    case = next(c for c in fp8_linear.cases(**SHAPES) if c.matrix.name == "shared_down")
    calls = fp8_linear.TimingInputs("cpu").calls(case, 3)
    for inputs in calls:
        stock.ready(inputs)
    for inputs in (*calls, *calls):
        assert fp8_linear.error(STOCK, stock(inputs), inputs) < 0.002
    assert stock.method.prepared == 3
    stock.ready(fp8_linear.correctness_inputs(case, "cpu")[0])
    assert len(stock.layers) == 1  # the former weights are let go


# ---- the workers

WORKER = """
import json, sys, time
from deepseek_v4_sm120.calibrate import worker
shapes, jobs, seconds = map(json.loads, sys.argv[1:])
print("noise")
for name, provider in jobs:
    worker.say(job=[name, provider])
    what = WHAT.get(f"{name} {provider}", WHAT.get(provider, {"us": 10.0}))
    for case in worker.operator(name).cases(**shapes):
        if "sleep" in what:
            print("{still here", flush=True)
            time.sleep(what["sleep"])
        if "problem" in what:
            worker.say(problem=what["problem"])
            break
        if "crash" in what:
            raise RuntimeError(what["crash"])
        worker.say(case=case.name, **({"error": 0.001, "how": "graph"} | what))
        what.pop("crash_later", None) and sys.exit("illegal access")
    worker.say(done=True)
"""


@pytest.fixture
def workers(tmp_path, monkeypatch):
    """workers(what) -> measure(names, ..) with workers that answer as told; `started`: their jobs."""
    script, started, real = tmp_path / "worker.py", [], subprocess.Popen
    monkeypatch.setenv("PYTHONPATH", str(Path(worker.__file__).parents[2]))

    def popen(words, **how):
        started.append([tuple(job) for job in json.loads(words[4])])
        assert how["env"]["DSV4_SM120"] == "off" and how["start_new_session"]
        return real([sys.executable, str(script), *words[3:]], **how)

    def prepare(**what):
        script.write_text(WORKER.replace("WHAT", repr(what)))
        monkeypatch.setattr(command.subprocess, "Popen", popen)
        return started

    return prepare


NAMES = ["mxfp4_moe", "mhc"]


def everything_is_installed(monkeypatch):
    monkeypatch.setattr(provider.importlib.util, "find_spec", lambda name: object())


def test_what_decides_is_run_first_and_by_one_process_each(workers, monkeypatch, capsys):
    everything_is_installed(monkeypatch)
    started = workers(stock={"us": 44.4}, torch={"problem": "too large"})
    results = command.measure(NAMES, SHAPES, command.Clock())
    ours = [("mxfp4_moe", OURS), ("mxfp4_moe", mxfp4_moe.OURS_MXFP8), ("mhc", OURS)]
    others = [("mxfp4_moe", "marlin"), ("mxfp4_moe", "torch"), ("mhc", "fused"), ("mhc", "torch")]
    assert started == [ours, [("mxfp4_moe", STOCK), ("mhc", STOCK)], others]
    assert [c["us"] for c in results["mhc"][STOCK]["cases"]] == [44.4] * 3 and results["mhc"][STOCK]["wrong"] is None
    assert "not_reached" not in results["mhc"][STOCK] and results["mhc"]["torch"] == {"problem": "too large"}
    told = capsys.readouterr().err
    assert "  mhc: stock: boundary, 8 rows: 44.4 us (0.0010)\n" in told
    assert "mhc: stock: 44.4 us, mean of 3 shapes, 0 s\n" in told
    assert "9/9 mhc: torch: does not run here: too large\n" in told


def test_a_crash_is_a_result_and_the_others_run_in_another_process(workers, monkeypatch, capsys):
    everything_is_installed(monkeypatch)
    started = workers(**{"mxfp4_moe stock": {"crash": "illegal access"}, "marlin": {"us": 5.0, "crash_later": True}})
    results = command.measure(NAMES, SHAPES, command.Clock())
    assert results["mxfp4_moe"][STOCK]["wrong"] == "crashed after 0 case(s): RuntimeError: illegal access"
    assert results["mxfp4_moe"]["marlin"]["wrong"] == "crashed after 1 case(s): illegal access"
    assert started[2] == [("mhc", STOCK)] and started[4][0] == ("mxfp4_moe", "torch")
    assert all(results["mhc"][p]["wrong"] is None for p in (OURS, STOCK, "fused", "torch"))
    assert "mxfp4_moe: stock: wrong: crashed after 0 case(s): RuntimeError: illegal" in capsys.readouterr().err


def test_a_wrong_result_is_told_and_never_used(workers, monkeypatch, capsys):
    everything_is_installed(monkeypatch)
    workers(stock={"error": None, "allowed": 0.003})
    results = command.measure(["mhc"], SHAPES, command.Clock())
    assert results["mhc"][STOCK]["wrong"] == "boundary, 1 rows: relative error not finite, allowed 0.003"
    assert command.decide("mhc", results["mhc"])["winner"] == OURS
    assert "mhc: stock: wrong: boundary, 1 rows: relative error not finite" in capsys.readouterr().err


def test_when_the_time_is_over_what_was_reached_stays(workers, monkeypatch, capsys, tmp_path):
    everything_is_installed(monkeypatch)
    monkeypatch.setattr(command, "_device", lambda: "GPU A")
    workers(**{"mxfp4_moe stock": {"us": 44.4}, "mhc stock": {"us": 44.4, "sleep": 30}})
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    words = ["--quick", "--limit-s", "6", "--out", str(tmp_path / "p.json"), "--operators", *NAMES]
    began = time.monotonic()
    assert command.run(parser.parse_args(words)) == 0 and time.monotonic() - began < 12
    found, told = json.loads((tmp_path / "p.json").read_text()), capsys.readouterr()
    moe, small = (found["operators"][name] for name in NAMES)
    assert moe["stock_over_ours"] == pytest.approx(4.44) and small["stock_over_ours"] is None
    assert small["winner"] == OURS and small["wrong"] == {} and found["not_reached"] == []
    assert len(small["providers"][STOCK]["not_reached"]) == 3 == len(small["providers"]["torch"]["not_reached"])
    assert "not reached  stock: none of its shapes was" in told.out and "not reached" in told.err


def test_an_operator_that_was_not_reached_gets_no_verdict(workers, monkeypatch, capsys, tmp_path):
    everything_is_installed(monkeypatch)
    monkeypatch.setattr(command, "_device", lambda: "GPU A")
    workers(**{"mhc ours": {"us": 1.0, "sleep": 30}})
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    words = ["--quick", "--limit-s", "3", "--out", str(tmp_path / "p.json"), "--operators", *NAMES, "--json"]
    assert command.run(parser.parse_args(words)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["not_reached"] == ["mhc"] and list(found["operators"]) == ["mxfp4_moe"]
    assert profile.read(tmp_path / "p.json") == found


def test_a_worker_that_is_never_ready_is_wrong(workers, monkeypatch):
    monkeypatch.setattr(command, "WORKER_SECONDS", 2)
    workers(torch={"us": 1.0, "sleep": 30})
    results = command.measure(["mhc"], SHAPES, command.Clock())
    assert results["mhc"]["torch"]["wrong"] == "crashed after 0 case(s): not ready after 2 s"


def test_a_provider_whose_package_is_absent_starts_no_worker(workers, monkeypatch):
    monkeypatch.setattr(provider.importlib.util, "find_spec", lambda name: None if name == "sglang" else object())
    started = workers()
    found = command.measure(["index_select"], SHAPES, command.Clock())["index_select"]
    assert found[STOCK] == {"problem": "SGLang is not installed"} and found[OURS]["cases"]
    assert not any(job[1] == STOCK for jobs in started for job in jobs)


def test_a_provider_for_none_of_the_shapes_is_not_asked(workers):
    started = workers()
    found = command.measure(["sparse_decode"], SHAPES, command.Clock())["sparse_decode"]
    started = [job for jobs in started for job in jobs]
    assert OURS in found and "ours, prefill kernel" not in found
    assert ("sparse_decode", OURS) in started and ("sparse_decode", "ours, prefill kernel") not in started


def test_a_module_that_does_not_load_writes_no_verdict(workers):
    workers(ours={"problem": "no compiled module"})
    with pytest.raises(CommandError, match="mhc cannot run here: no compiled module"):
        command.measure(["mhc"], SHAPES, command.Clock())


def worker_says(jobs, seconds=None):
    words = [sys.executable, "-m", "deepseek_v4_sm120.calibrate.worker", *map(json.dumps, (SHAPES, jobs, seconds))]
    done = subprocess.run(words, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(worker.MARK)]
    return [json.loads(line.removeprefix(worker.MARK)) for line in lines]


def test_the_worker_itself_tells_that_there_is_no_gpu():
    jobs = [["sparse_decode", OURS], ["mhc", "torch"]]
    found = worker_says(jobs)
    assert [line["job"] for line in found if "job" in line] == jobs and found.count({"done": True}) == 2
    assert all("sees no CUDA device" in line["problem"] for line in found if "problem" in line) and len(found) == 6


def test_a_slow_job_leaves_time_to_those_behind_it(monkeypatch):
    """A job begins no case after its share of what is left; an unused share is for the others."""
    now, asked, monotonic = [100.0], [], worker.time
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def run_job(name, provider_name, shapes, until):
        asked.append(until - now[0])
        now[0] += {"a": 2.0, "b": 12.0, "c": 0.0}[name]

    monkeypatch.setattr(worker, "run_job", run_job)
    worker.main([json.dumps(SHAPES), json.dumps([["a", OURS], ["b", OURS], ["c", OURS]]), "30.0"])
    assert asked == pytest.approx([10.0, 14.0, 16.0]) and monotonic is time
