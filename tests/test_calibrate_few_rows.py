"""calibrate's small operators without a GPU: shapes, judgement, how SGLang's own are called."""

import sys
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.ops import compressor as compressor_op
from deepseek_v4_sm120.ops import fp8_linear as fp8_op
from deepseek_v4_sm120.ops import mhc as mhc_op
from deepseek_v4_sm120.ops import wo_a as wo_a_op
from deepseek_v4_sm120.specs import bf16_linear, bounds, compressor, fp8_linear, mhc, provider, router_topk, wo_a
from deepseek_v4_sm120.specs.provider import OURS, STOCK

SHAPES = {"tp": 2, "context": 131_072, "concurrency": 8, "quick": True}


def torch_provider(described):
    return next(p for p in described.providers() if p.name == "torch").build()


def test_the_shapes_of_the_small_operators():
    more = SHAPES | {"quick": False}
    assert [c.rows for c in mhc.cases(**SHAPES)] == [1, 8, 2048] and mhc_op.MANY_ROWS <= 2048
    assert [c.rows for c in mhc.cases(**more)] == [1, 8, 16, 32, 64, 2048]
    assert {c.rows for c in bf16_linear.cases(**more)} == {1, 8, 16, 32, 64}
    assert {c.rows for c in fp8_linear.cases(**more)} == {1, 8, 16, 32, 64}
    assert {c.rows for c in fp8_linear.cases(**SHAPES | {"concurrency": 500})} == {1, 256}
    of_a_step = [c for c in bf16_linear.cases(**SHAPES) if c.rows == 1]
    assert [(c.matrix.outputs, c.calls) for c in of_a_step] == [(2048, 21), (1024, 20), (512, 21), (256, 43), (64, 21)]
    of_a_step = {c.matrix.name: (c.matrix.outputs, c.matrix.inputs, c.calls) for c in fp8_linear.cases(**SHAPES)}
    assert of_a_step["wo_b"] == (4096, 4096, 43) and of_a_step["index_wq_b"] == (8192, 1024, 21)
    assert "wo_a" not in of_a_step and sum(calls for *_, calls in of_a_step.values()) == 236
    assert [c.name for c in wo_a.cases(**SHAPES)] == [f"4 x [1024, 4096], {rows} rows" for rows in (1, 8, 2048)]
    assert [c.rotates for c in wo_a.cases(**SHAPES)] == [True, True, False]
    assert wo_a_op.FP8_ROWS < wo_a.CHECKED_PREFILL_ROWS <= wo_a.PREFILL_ROWS
    assert wo_a.cases(**SHAPES | {"tp": 8})[0].bytes_per_call == 4 << 20
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
    assert fp8_linear.error("torch", result, inputs) < bounds.FP8_LINEAR.truth
    assert fp8_linear.error("torch", result.roll(1, dims=1), inputs) > 0.5
    inputs.x, x = quantized_activations(inputs.x), inputs.x  # what stock computes
    result = torch_provider(fp8_linear)(inputs)
    inputs.x = x
    assert bounds.FP8_LINEAR.truth < fp8_linear.error(STOCK, result, inputs) < bounds.FP8_LINEAR.others
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


@pytest.mark.parametrize("rows", [1, 9])
def test_a_choice_of_experts_is_judged_by_the_experts_and_by_their_weights(rows):
    case = router_topk.Case(rows)
    allowed = max(router_topk.max_error(name, case) for name in (OURS, STOCK))
    for inputs in router_topk.correctness_inputs(case, "cpu"):
        weights, ids = torch_provider(router_topk)(inputs)
        assert router_topk.error(OURS, (weights, ids), inputs) < router_topk.max_error(OURS, case)
        others = (weights, (ids + 1) % inputs.bias.numel())
        repeated = (weights, ids[:, [0, 0, *range(2, ids.shape[1])]])
        lighter = (weights * torch.tensor([0.99, *[1.0] * (ids.shape[1] - 1)]), ids)
        fewer = (weights[:, 1:] / weights[:, 1:].sum(dim=1, keepdim=True), ids[:, 1:])
        last_left_out = tuple(part[:, :-1] for part in (weights / weights[:, :-1].sum(dim=1, keepdim=True), ids))
        for wrong in (others, repeated, lighter, (weights * torch.nan, ids), fewer, last_left_out):
            assert router_topk.error(STOCK, wrong, inputs) > allowed
        assert router_topk.error(STOCK, (weights[:0], ids[:0]), inputs) > allowed


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
        for module in (bf16_linear, provider):
            monkeypatch.setattr(module, "is_installed", lambda name: name.rpartition(".")[2] in installed)
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
    del functions["tiny_gemm_bf16"]  # 0.5.17: the module is there, the function is not
    assert calls({"gemm", "tiny_gemm", "dsv3_router_gemm"}, 1, "router") == ["router"]


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
    from deepseek_v4_sm120.specs.mhc import Shape, make_inputs

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
    monkeypatch.setattr(provider, "is_installed", lambda name: True)
    monkeypatch.setattr(mhc, "set_up_deep_gemm", lambda: None)
    monkeypatch.setattr(mhc, "is_sm120", lambda: sm120)
    monkeypatch.setattr(mhc, "sglang_version", lambda: version)
    monkeypatch.delenv("SGLANG_OPT_DEEPGEMM_HC_PRENORM", raising=False)
    result = mhc._stock()(inputs)
    assert found == called and mhc.error(STOCK, result, inputs) < bounds.MHC.others
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
    assert len(stock.layer.made) == 1  # the former weights are let go


@pytest.mark.parametrize("prefill", [False, True])
def test_the_output_projection_is_judged_with_its_rotation(prefill):
    case = next(c for c in wo_a.cases(**SHAPES | {"tp": 8, "concurrency": 3}) if c.rotates != prefill and c.rows > 1)
    (inputs,) = wo_a.correctness_inputs(case, "cpu")
    result = torch_provider(wo_a)(inputs)
    assert result.shape == (wo_a.CHECKED_PREFILL_ROWS if prefill else 3, 1024)
    assert 0.001 < wo_a.error("torch", result, inputs) < bounds.WO_A.truth
    assert wo_a.error(OURS, result.roll(1, dims=1), inputs) > 0.5
    if prefill:
        assert not inputs.rotation
        return
    kept, inputs.rotation = inputs.rotation, {}
    without = torch_provider(wo_a)(inputs)
    inputs.rotation = kept
    assert wo_a.error(OURS, without, inputs) > bounds.WO_A.others


def test_stock_rotates_a_copy_in_place_and_expands_every_weight_once(monkeypatch):
    from deepseek_v4_sm120.reference.wo_a import rotated_back

    def rope(q, k, freqs_cis, positions, inverse=False):
        assert k is None and inverse and q.shape == (3, 8, 64) and q.stride() == (4096, 512, 1)
        whole = torch.zeros(*q.shape[:2], 512, dtype=q.dtype)
        whole[..., -64:] = q
        q.copy_(rotated_back(whole.flatten(1)[:, None], freqs_cis, positions).view(whole.shape)[..., -64:])

    monkeypatch.setattr(provider, "is_installed", lambda module: module == "sglang.jit_kernel.dsv4")
    monkeypatch.setattr(wo_a, "unpatched", lambda module, name: {"fused_rope_inplace": rope}[name])
    assert wo_a._stock_problem() is None
    case = next(c for c in wo_a.cases(**SHAPES | {"tp": 8, "concurrency": 3}) if c.rows == 3)
    stock, calls = wo_a.Stock(), wo_a.TimingInputs("cpu").calls(case, 2)
    for inputs in calls:
        stock.ready(inputs)
    copies, before = dict(stock.expanded.made), calls[0].x.clone()
    assert len(copies) == 2 and {c.dtype for c in copies.values()} == {torch.bfloat16}
    assert wo_a.error(STOCK, stock(calls[0]), calls[0]) < 0.002
    assert torch.equal(calls[0].x, before) and calls[0].x is calls[1].x
    assert all(stock.expanded.made[address] is copy for address, copy in copies.items())
    (other,) = wo_a.correctness_inputs(case, "cpu")
    assert wo_a.error(STOCK, stock(other), other) < 0.002 and len(stock.expanded.made) == 1  # the former are let go
    monkeypatch.setattr(provider, "is_installed", lambda module: False)
    assert "no fused_rope_inplace" in wo_a._stock_problem()


COMPRESSORS = compressor.cases(**SHAPES | {"concurrency": 9})


def test_what_a_step_has_of_compressors():
    assert compressor.MOST_ROWS <= compressor_op.MAX_ROWS and len(COMPRESSORS) == 12
    for kind, layers in compressor.LAYERS.items():
        ratio, head_dim, _ = compressor.KINDS[kind]
        none, some = (c for c in COMPRESSORS if c.kind == kind and c.rows == 9)
        assert none.calls + some.calls == pytest.approx(layers)
        assert none.bytes_per_call == 9 * 4 * compressor_op.width(ratio, head_dim) < some.bytes_per_call
    one = {(c.kind, c.ends): c.calls for c in COMPRESSORS if c.rows == 1}
    assert one["c4", True] == pytest.approx(21 / 4) and one["c128", True] == pytest.approx(20 / 128)
    for case in COMPRESSORS:
        for turn in range(case.turns):
            places = case.places(turn)
            assert len(places) == case.rows and all(1 <= place <= case.ratio for place in places)
            assert (case.ratio in places) == case.ends
        assert case.places(0).count(case.ratio) == case.ended
        assert case.rows == 1 or case.turns == 1 or case.places(0) != case.places(1)


@pytest.mark.parametrize("case", COMPRESSORS, ids=lambda case: case.name)
def test_a_compressor_is_judged_by_entries_and_state(case):
    run = torch_provider(compressor)
    for inputs in compressor.correctness_inputs(case, "cpu"):
        assert compressor.error("torch", run(inputs), inputs) < bounds.COMPRESSOR.others
        write, own = inputs.inputs.plan.view(torch.int32)[:, 1], inputs.inputs.plan.view(torch.int32)[:, 3]
        if case.ends:
            inputs.inputs.cache[int(inputs.inputs.out_loc.max()) // inputs.inputs.page_size].bitwise_xor_(0x55)
            assert compressor.error("torch", inputs, inputs) > bounds.COMPRESSOR.others
        else:
            inputs.inputs.state.flatten(0, 1)[int(write[-1]), 3] += 1
            assert compressor.error("torch", inputs, inputs) == float("inf")
        assert len(set(own.tolist())) == case.rows


def test_timed_compressors_find_other_state_each_time():
    for case in COMPRESSORS:
        count = 2 * case.turns + 1 if case.turns < 9 else 5
        calls = compressor.TimingInputs("cpu").calls(case, count)
        touched = [
            (call.inputs.state.data_ptr(), call.inputs.plan.view(torch.int32)[:, 1][:1].item()) for call in calls
        ]
        if not case.ends:
            assert len(set(touched)) == count
        ended = [(call.inputs.state.data_ptr(), tuple((call.inputs.out_loc > 0).tolist())) for call in calls]
        assert len(set(ended)) == (count if case.ends else len({call.inputs.state.data_ptr() for call in calls}))
        compressor.in_torch(calls[0].inputs)
        assert calls[0].before is None and torch.isfinite(calls[0].inputs.state).all()


@pytest.mark.parametrize(
    ("version", "home", "problem"),
    [
        ((0, 5, 12), "sglang.jit_kernel.dsv4", "keeps its own"),
        ((0, 5, 14), "sglang.jit_kernel.dsv4", None),
        ((0, 5, 23), "sglang.kernels.ops.attention.dsv4", None),
        ((0, 5, 23), None, "no such"),
    ],
)
def test_the_stock_compressor_of_a_release(version, home, problem, monkeypatch):
    called = []

    def compress_forward(**given):
        called.append(sorted(given))
        return "kv"

    def compress_norm_rope_store(kv, plan, **given):
        assert kv == "kv" and plan[0] == 4 and "use_fp4" not in given
        called.append(sorted(given))

    module = SimpleNamespace(
        compress_forward=compress_forward,
        compress_norm_rope_store=compress_norm_rope_store,
        CompressorDecodePlan=lambda *given: given,
    )
    monkeypatch.setattr(compressor, "sglang_version", lambda: version)
    monkeypatch.setattr(provider, "is_installed", lambda name: name == home)
    monkeypatch.setattr(compressor.importlib, "import_module", lambda name: {home: module}[name])
    found = compressor._stock_problem()
    assert (found is None) if problem is None else (problem in found)
    if problem is None:
        (inputs, _) = compressor.correctness_inputs(COMPRESSORS[0], "cpu")
        assert compressor._stock()(inputs) is inputs and [len(names) for names in called] == [6, 6]
