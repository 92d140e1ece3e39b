"""The adapters of the hyper-connections on layers as SGLang makes them; the reference is in the operator's place."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120 import settings
from deepseek_v4_sm120.reference import mhc as reference
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.sglang_patches import device_gate, models_served, shadow
from deepseek_v4_sm120.sglang_patches.adapters import handed_over
from deepseek_v4_sm120.sglang_patches.adapters import mhc as adapter
from deepseek_v4_sm120.specs import bounds
from deepseek_v4_sm120.specs.mhc import Shape, make_inputs

EPS = 1e-6
OURS = {"model_type": "deepseek_v4", "hidden": 4096, "streams": 4, "pre_of_sublayer_before": False}


def operator_pre(streams, fn, scale, base, *, norm_weight, norm_eps, rms_eps, hc_eps, post_scale, sinkhorn_iters):
    assert post_scale == 2.0
    options = {"norm_weight": norm_weight, "norm_eps": norm_eps, "rms_eps": rms_eps, "eps": hc_eps}
    y, post, comb = reference.mhc_pre(streams, fn, scale, base, iters=sinkhorn_iters, **options)
    return post.float(), comb.float(), y.to(torch.bfloat16)


def operator_post(f, streams, post, comb):
    assert post.is_contiguous() and comb.is_contiguous()
    return reference.mhc_post(f, streams, post.view(-1, 4), comb).to(torch.bfloat16)


def operator(f, streams, post, comb, fn, scale, base, **options):
    new = operator_post(f, streams, post, comb)
    return new, *operator_pre(new, fn, scale, base, **options)


def operator_head(streams, fn, scale, base, *, rms_eps, hc_eps):
    return reference.mhc_head(streams, fn, scale, base, rms_eps=rms_eps, eps=hc_eps).to(torch.bfloat16)


@pytest.fixture
def served(monkeypatch):
    """The gate is open for the CPU; the reference computes and its calls are listed."""
    calls = []

    def listed(name, function):
        def call(*args, **kwargs):
            calls.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(adapter.op, name, call)

    for name, function in [
        ("mhc", operator),
        ("mhc_pre", operator_pre),
        ("mhc_post", operator_post),
        ("mhc_head", operator_head),
    ]:
        listed(name, function)
    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(device_gate, "serves_current_device", lambda: True)
    return calls


class Norm:
    """As much of SGLang's RMSNorm as is read; its result is that of a sum rounded before its squares."""

    def __init__(self, weight):
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.variance_epsilon = EPS

    def __call__(self, y):
        root = (y.double().square().mean(1, keepdim=True) + EPS).sqrt()
        return (y.double() / root * self.weight.double()).to(torch.bfloat16)


LAYER = SimpleNamespace(rms_norm_eps=EPS, hc_eps=EPS, hc_sinkhorn_iters=20, hc_mult=4)


def original_hc_pre(self, x, hc_fn, hc_scale, hc_base, norm=None, forward_batch=None):
    """Stock's torch path: not normed."""
    y, post, comb = reference.mhc_pre(x, hc_fn, hc_scale, hc_base)
    return y.to(torch.bfloat16), post.float(), comb.float(), False


def original_hc_post(self, x, residual, post, comb):
    return operator_post(x, residual, post.contiguous(), comb)


def original_fused(x, residual, post, comb, fn, scale, base, rms_eps, pre_eps, sink_eps, post_scale, iters, **norm):
    new = operator_post(x, residual, post, comb)
    options = {"norm_weight": norm["norm_weight"], "norm_eps": norm["norm_eps"]}
    y, new_post, new_comb = reference.mhc_pre(new, fn, scale, base, **options)
    return new, new_post.float().unsqueeze(-1), new_comb.float(), y.to(torch.bfloat16)


def forbidden(*args, **kwargs):
    raise AssertionError("the original was called")


def fused_arguments(inputs):
    """As 0.5.17's layer and 0.5.20's boundary pass them: twelve by position, post as [rows, 4, 1]."""
    post = inputs.post.unsqueeze(-1)
    mixes = (inputs.fn, inputs.scale, inputs.base)
    return (inputs.f, inputs.streams, post, inputs.comb, *mixes, EPS, EPS, EPS, 2.0, 20)


@pytest.fixture
def inputs():
    return make_inputs(Shape(3), device="cpu")


def test_a_boundary_is_one_call(served, inputs):
    fused = adapter.replace_fused_post_pre(forbidden)
    streams, post, comb, y = fused(*fused_arguments(inputs), norm_weight=inputs.norm_weight, norm_eps=EPS)
    assert served == ["mhc"]
    truth = reference.mhc(**inputs.boundary())
    assert post.shape == (3, 4, 1) and comb.shape == (3, 4, 4)
    for found, expected in [(streams, truth.streams), (post[..., 0], truth.post), (comb, truth.comb), (y, truth.y)]:
        assert relative_error(found, expected) < 1e-4


def test_a_layer_by_itself_is_a_post_and_a_normed_pre(served, inputs):
    norm = Norm(inputs.norm_weight)
    streams = adapter.replace_hc_post(forbidden)(LAYER, inputs.f, inputs.streams, inputs.post, inputs.comb)
    pre = adapter.replace_hc_pre(forbidden)
    mixes = (inputs.fn, inputs.scale, inputs.base)
    y, post, comb, normed = pre(LAYER, streams, *mixes, norm=norm, forward_batch=object())
    assert served == ["mhc_post", "mhc_pre"] and normed is True
    truth = reference.mhc(**inputs.boundary())
    assert relative_error(y, truth.y) < 1e-4 and relative_error(comb, truth.comb) < 1e-6
    assert post.shape == (3, 4)
    plain, *_, normed = pre(LAYER, streams, *mixes)
    assert normed is False and relative_error(norm(plain), truth.y) < 0.004
    assert pre(LAYER, streams, *mixes, Norm(inputs.norm_weight.float()))[3] is False  # SGLang norms then


def test_heads(served, inputs):
    mixes = (inputs.head_fn, inputs.head_scale, inputs.head_base)
    truth = reference.mhc_head(**inputs.head())
    found = adapter.replace_fused_head(forbidden)(inputs.streams, *mixes, norm_eps=EPS, hc_eps=EPS)
    assert relative_error(found, truth) < 1e-4
    found = adapter.replace_hc_head(forbidden)(LAYER, inputs.streams, *mixes)
    assert relative_error(found, truth) < 1e-4 and served == ["mhc_head", "mhc_head"]


def test_dsparks_head(served, inputs):
    last = SimpleNamespace(hc_head_fn=inputs.head_fn, hc_head_scale=inputs.head_scale, hc_head_base=inputs.head_base)
    model = SimpleNamespace(stages=[None, last], norm_eps=EPS, hc_eps=EPS)
    found = adapter.replace_dspark_head(forbidden)(model, inputs.streams)
    assert relative_error(found, reference.mhc_head(**inputs.head())) < 1e-4 and served == ["mhc_head"]
    collapse = adapter.replace_dspark_head(lambda model, x: ("original", x))
    y = inputs.streams[:, 0]
    without = SimpleNamespace(stages=[SimpleNamespace(hc_head_fn=None, hc_head_scale=None, hc_head_base=None)])
    assert collapse(without, y) == ("original", y), "DeepSeek-V4.1's has no streams left"
    for other in (inputs.streams.float(), inputs.streams[..., :2048].contiguous()):
        assert collapse(model, other)[0] == "original" and served == ["mhc_head"]


REFUSED = {
    "no rows": lambda i: {"streams": i.streams[:0], "f": i.f[:0], "post": i.post[:0], "comb": i.comb[:0]},
    "another width": lambda i: {"streams": i.streams[..., :2048].contiguous(), "f": i.f[:, :2048].contiguous()},
    "two streams": lambda i: {"streams": i.streams[:, :2].contiguous()},
    "half": lambda i: {"streams": i.streams.half(), "f": i.f.half()},
    "transposed": lambda i: {"streams": i.streams.transpose(1, 2).contiguous().transpose(1, 2)},
    "bf16 weights": lambda i: {"fn": i.fn.to(torch.bfloat16)},
    "bf16 scales": lambda i: {"scale": i.scale.to(torch.bfloat16)},
    "a bf16 base": lambda i: {"base": i.base.to(torch.bfloat16)},
    "weights of fewer mixes": lambda i: {"fn": i.fn[:8].contiguous()},
    "transposed weights": lambda i: {"fn": i.fn.T.contiguous().T},
}
OTHER_OUTPUTS = {
    "float32": lambda i: {"f": i.f.float()},
    "of another width": lambda i: {"f": i.f[:, :2048].contiguous()},
    "of fewer rows": lambda i: {"f": i.f[:1]},
    "by streams": lambda i: {"f": i.f[:, None]},
    "transposed": lambda i: {"f": i.f.T.contiguous().T},
    "quantised": lambda i: {"f": (i.f, None)},
}


@pytest.mark.parametrize("name", OTHER_OUTPUTS)
def test_another_output_of_the_sublayer_is_left_to_the_original(served, inputs, name):
    vars(inputs).update(OTHER_OUTPUTS[name](inputs))
    fused = adapter.replace_fused_post_pre(lambda *args, **kwargs: "original")
    assert fused(*fused_arguments(inputs), norm_weight=inputs.norm_weight, norm_eps=EPS) == "original"
    post = adapter.replace_hc_post(lambda *args: "original")
    assert post(LAYER, inputs.f, inputs.streams, inputs.post, inputs.comb) == "original" and served == []


def test_mixes_of_another_type_are_left_to_the_original(served, inputs):
    post = adapter.replace_hc_post(lambda *args: "original")
    for mixes in ((inputs.post.half(), inputs.comb), (inputs.post, inputs.comb.half())):
        assert post(LAYER, inputs.f, inputs.streams, *mixes) == "original" and served == []


@pytest.mark.parametrize("name", REFUSED)
def test_other_calls_are_left_to_the_original(served, inputs, name):
    for field, value in REFUSED[name](inputs).items():
        setattr(inputs, field, value)
    fused = adapter.replace_fused_post_pre(lambda *args, **kwargs: "original")
    assert fused(*fused_arguments(inputs), norm_weight=inputs.norm_weight, norm_eps=EPS) == "original"
    pre = adapter.replace_hc_pre(lambda *args, **kwargs: "original")
    assert pre(LAYER, inputs.streams, inputs.fn, inputs.scale, inputs.base) == "original"
    assert served == []


def test_two_epsilons_and_other_norm_weights_are_left_to_the_original(served, inputs):
    fused = adapter.replace_fused_post_pre(lambda *args, **kwargs: "original")
    arguments = list(fused_arguments(inputs))
    for weight in (inputs.norm_weight.float(), inputs.norm_weight.repeat(2)[::2]):
        assert fused(*arguments, norm_weight=weight, norm_eps=EPS) == "original"
    arguments[9] = 1e-3
    assert fused(*arguments, norm_weight=inputs.norm_weight, norm_eps=EPS) == "original" and served == []


def test_another_gpu_is_left_to_the_original(served, inputs, monkeypatch):
    monkeypatch.setattr(device_gate, "serves", lambda device: False)
    monkeypatch.setattr(device_gate, "serves_current_device", lambda: False)
    post = adapter.replace_hc_post(lambda *args: "original")
    assert post(LAYER, inputs.f, inputs.streams, inputs.post, inputs.comb) == "original"
    monkeypatch.setattr(models_served, "_announced", OURS)
    assert adapter.replace_fusion_enabled(lambda: False)() is False
    assert adapter.replace_fusion_enabled(lambda: True)() is True and served == []


@pytest.mark.parametrize(
    ("told", "fused"),
    [
        (OURS, True),
        (OURS | {"hidden": 6144}, False),
        (None, False),  # a model whose arguments are not resolved as DeepSeek-V4's
    ],
)
def test_the_fused_boundary_is_on_for_a_model_whose_boundaries_we_serve(served, monkeypatch, told, fused):
    monkeypatch.setattr(models_served, "_announced", told)
    assert adapter.replace_fusion_enabled(lambda: False)() is fused
    assert adapter.replace_fusion_enabled(lambda: True)() is True


@pytest.mark.parametrize(
    ("offloader", "fused"), [("NoopOffloader", True), ("OffloaderV1", False), ("OffloaderV2", True)]
)
def test_the_fused_boundary_is_off_where_layers_lie_on_the_host(served, monkeypatch, offloader, fused):
    """Of the second offloader's, which moves experts alone, the norms stay on the card."""
    monkeypatch.setattr(models_served, "_announced", OURS)
    module = ModuleType(handed_over.OFFLOADER)
    module.get_offloader = type(offloader, (), {})
    monkeypatch.setitem(sys.modules, handed_over.OFFLOADER, module)
    assert adapter.replace_fusion_enabled(lambda: True)() is fused


@pytest.fixture
def shadow_mode(monkeypatch):
    def turn_on(keep):
        monkeypatch.setattr(adapter, "settings", lambda: settings.Settings(shadow=keep))
        monkeypatch.setattr(shadow, "settings", lambda: settings.Settings(shadow=keep))
        shadow.reset()

    yield turn_on
    shadow.reset()


@pytest.mark.parametrize("keep", ["1", "ours"])
def test_shadow_compares_every_output_by_itself(served, inputs, shadow_mode, keep):
    shadow_mode(keep)

    def wrong_comb(*args, **kwargs):
        streams, post, comb, y = original_fused(*args, **kwargs)
        return streams, post, comb * 1.01, y

    fused = adapter.replace_fused_post_pre(wrong_comb)
    found = fused(*fused_arguments(inputs), norm_weight=inputs.norm_weight, norm_eps=EPS)
    truth = reference.mhc(**inputs.boundary())
    assert (relative_error(found[2], truth.comb) > 0.005) == (keep == "1")
    records = {record["shape"]["output"]: record for record in shadow.report()}
    assert set(records) == {"streams", "post", "comb", "y"} and {r["patch"] for r in records.values()} == {"mhc"}
    assert {name for name, record in records.items() if record["bad_calls"]} == {"comb"}
    assert all(record["calls"] == 1 and record["shape"]["rows"] == 3 for record in records.values())


def test_shadow_judges_a_small_stream_beside_large_ones(served, inputs, shadow_mode):
    shadow_mode("1")
    sizes = torch.tensor([1e3, 1.0, 30.0, 1e-2])
    inputs.streams = (inputs.streams * sizes[:, None]).bfloat16()
    inputs.comb, inputs.f = torch.eye(4).expand(3, 4, 4).contiguous(), inputs.f * 0
    for wrong in (None, 3, 1, 0):
        shadow.reset()

        def original(*args, wrong=wrong, **kwargs):
            streams, *rest = original_fused(*args, **kwargs)
            if wrong is not None:
                streams = streams.clone()
                streams[2, wrong] = streams[1, wrong]
            return streams, *rest

        fused = adapter.replace_fused_post_pre(original)
        fused(*fused_arguments(inputs), norm_weight=inputs.norm_weight, norm_eps=EPS)
        (streams,) = (record for record in shadow.report() if record["shape"]["output"] == "streams")
        assert streams["bad_calls"] == (wrong is not None) and streams["shape"]["rows"] == 3, wrong


def test_shadow_norms_what_stock_has_not(served, inputs, shadow_mode):
    shadow_mode("1")
    pre = adapter.replace_hc_pre(original_hc_pre)
    norm = Norm(inputs.norm_weight)
    y, _, _, normed = pre(LAYER, inputs.streams, inputs.fn, inputs.scale, inputs.base, norm=norm)
    assert normed is False and served == ["mhc_pre"]  # the original's result, to be normed by SGLang
    adapter.replace_hc_post(original_hc_post)(LAYER, inputs.f, inputs.streams, inputs.post, inputs.comb)
    records = {record["shape"]["output"]: record for record in shadow.report()}
    assert set(records) == {"post", "comb", "y", "streams"}
    assert not any(record["bad_calls"] for record in records.values())
    assert 0 < records["y"]["relative_l2_max"] < bounds.MHC.shadow
    assert shadow.summary(shadow.report())[0]["calls"] == 4
