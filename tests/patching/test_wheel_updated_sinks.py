"""The attention sinks that a card computes with behind an update of the weights: each release's own copy of a card's
heads, and its own ends of a load, run on the CPU with ours and without."""

import ast
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches.fixes.updated_sinks import replace_end, replace_loading, replace_loading_custom
from deepseek_v4_sm120.sglang_patches.names import DSPARK, LOAD_DIRECT, LOADER, MODEL, MODEL_RUNNER, POST_LOAD
from deepseek_v4_sm120.sglang_patches.rows.attention import UPDATED_SINKS
from tests.patching.review import is_for
from tests.patching.test_wheel_dspark_penalties import taken
from tests.patching.test_wheel_wo_a import definition, take
from tests.patching.wheels import RELEASES, content, every_release, fetch, since

BASE = f"{MODEL}:MqaAttentionBase"
LOCAL, HEADS, OLD, NEW = "_attn_sink_local", 128, 1.0, 2.0
PADDED = 64
every_one = every_release("0.5.14")
pytestmark = pytest.mark.usefixtures("opened")


class Attention(torch.nn.Module):
    """Of one card of several, as far as sinks go."""

    compress_ratio = 0

    def __init__(self, version, rank, ranks):
        super().__init__()
        self.attn_sink = torch.nn.Parameter(sinks(OLD), requires_grad=False)
        self.n_heads, self.n_local_heads = HEADS, HEADS // ranks
        names = ["attn_tp_rank"] * since(version, "0.5.16") + ["tp_rank"] * (not since(version, "0.5.17"))
        vars(self).update(dict.fromkeys(names, rank))
        self.attn_tp_size = ranks
        self._attn_sink_local = self.attn_sink if ranks == 1 and not since(version, "0.5.17") else None

    def setup_mega_attention(self):
        pass


class Model(torch.nn.Module):
    wo_a_fp8 = False

    def __init__(self, version, rank, ranks):
        super().__init__()
        layer = torch.nn.Module()
        layer.self_attn, layer.refresh_mhc_norm_weight_cache = Attention(version, rank, ranks), lambda: None
        self.model = torch.nn.Module()
        self.model.layers, self.model.start_layer, self.model.end_layer = torch.nn.ModuleList([layer]), 0, 1

    @property
    def attention(self):
        return self.model.layers[0].self_attn


class Draft(torch.nn.Module):
    """DSPARK's."""

    confidence_head, config, num_fused_shared_experts = None, SimpleNamespace(n_routed_experts=0), 0

    def __init__(self, version, rank, ranks):
        super().__init__()
        stage = torch.nn.Module()
        stage.self_attn, stage.refresh_mhc_norm_weight_cache = Attention(version, rank, ranks), lambda: None
        self.stages = torch.nn.ModuleList([stage])

    @property
    def attention(self):
        return self.stages[0].self_attn


class Own(torch.nn.Module):
    pass


def sinks(factor):
    return factor * torch.arange(1, HEADS + 1, dtype=torch.float32)


def computed_with(version, attention):
    """What a forward of the release's hands to its kernels."""
    if (local := taken(version, f"{BASE}._local_attn_sink")) is not None:
        attention.refresh_attn_sink_cache = lambda: taken(version, f"{BASE}.refresh_attn_sink_cache")(attention)
        return local(attention)
    forward = definition(fetch(version), "MQALayer.forward")
    [once] = [node for node in ast.walk(forward) if isinstance(node, ast.If) and LOCAL in ast.unparse(node.test)]
    code = compile(ast.Module([once], []), "wheel", "exec")
    exec(code, {"self": attention, "padded_num_heads": PADDED})
    return attention._attn_sink_local


def post_load(version, *, ours):
    kinds = dict(MQALayer=Attention, DeepseekV4DecoderLayer=Own, DeepseekV4PlatformDecoderLayer=Own)
    found = taken(version, POST_LOAD, _FP8_WO_A_GEMM=False, isinstance=isinstance, **kinds)
    return replace_loading(found) if ours else found


def updated(version, end, rank=1, ranks=4, *, of=Model, copy=computed_with):
    """(sinks of a forward behind an update whose `end` is this, those it should have)"""
    model = of(version, rank, ranks)
    before = copy(version, model.attention)
    own = slice(rank * HEADS // ranks, (rank + 1) * HEADS // ranks)
    assert torch.equal(before[: HEADS // ranks], sinks(OLD)[own])
    end(model)
    after = copy(version, model.attention)
    assert after.data_ptr() == before.data_ptr(), "captured graphs read it"
    assert ranks == 1 or not after[HEADS // ranks :].any()
    return after[: HEADS // ranks], sinks(NEW)[own]


def loads(version, *, ours, is_nextn=False):
    def end(model):
        model.attention.attn_sink.data.copy_(sinks(NEW))
        post_load(version, ours=ours)(model, is_nextn=is_nextn)

    return end


def directly(version, *, ours, custom=False):
    wheel = fetch(version)
    module = f"{MODEL_RUNNER}_components.weight_updater" if since(version, "0.5.16") else MODEL_RUNNER
    loader = take(wheel, {}, "default_weight_loader", "sglang.srt.model_loader.weight_utils")
    direct = take(wheel, {"default_weight_loader": loader}, LOAD_DIRECT, module)
    if ours:
        direct = replace_loading_custom(lambda name: direct)("a.b") if custom else replace_loading(direct)
    return lambda model: direct(model, [("model.layers.0.self_attn.attn_sink", sinks(NEW))])


def computed_with_dspark(version, attention):
    own = taken(version, f"{DSPARK.partition(':')[0]}:DSparkAttention._local_attn_sink", _PAD_NUM_HEADS=PADDED)
    return computed_with(version, attention) if own is None else own(attention)


def loads_dspark(version, *, ours, named=True):
    """named: by the checkpoint's names; else another process writes, and the session's end is told."""

    def method(name):
        found = taken(
            version,
            f"{DSPARK}.{name}",
            _dequant_fp8_wo_a_streaming=list,
            default_weight_loader=lambda parameter, loaded: parameter.data.copy_(loaded),
        )
        places = {target.where for target in UPDATED_SINKS.targets if is_for(target.sglang, version)}
        return replace_loading(found) if ours and f"{DSPARK}.{name}" in places else found

    def end(model):
        remap, post_load = taken(version, f"{DSPARK}._remap_dspark_weight_name"), method("post_load_weights")
        model._remap_dspark_weight_name = lambda name: remap(model, name)
        model._assert_confidence_head_loaded = lambda **_: None
        model.post_load_weights = lambda: post_load(model)
        if named:
            method("load_weights")(model, [("mtp.0.attn.attn_sink", sinks(NEW))])
        else:
            model.attention.attn_sink.data.copy_(sinks(NEW))
            model.post_load_weights()

    return end


@every_release("0.5.16")
@pytest.mark.parametrize(("rank", "ranks"), [(0, 2), (3, 4), (7, 8), (0, 1)])
def test_dsparks_draft_has_the_new_weights_sinks_behind_an_update(version, rank, ranks):
    given = dict(rank=rank, ranks=ranks, of=Draft, copy=computed_with_dspark)
    old, expected = updated(version, loads_dspark(version, ours=False), **given)
    assert torch.equal(old, expected) == (ranks == 1), "in SGLang alone"
    assert torch.equal(*updated(version, loads_dspark(version, ours=True), **given))


@every_release("0.5.23")
def test_and_where_another_process_writes_them(version):
    given = dict(of=Draft, copy=computed_with_dspark)
    assert not torch.equal(*updated(version, loads_dspark(version, ours=False, named=False), **given))
    assert torch.equal(*updated(version, loads_dspark(version, ours=True, named=False), **given))


@pytest.mark.parametrize("version", ["0.5.21", "0.5.22"])
def test_and_where_its_class_has_no_end_of_a_load(version):
    """The session's own end, behind a write by another process."""

    wheel, (module, kind) = fetch(version), DSPARK.split(":")
    assert definition(wheel, f"{kind}.post_load_weights", module) is None

    def ended(ours):
        names = {"post_load_weights": take(wheel, {}, "post_load_weights", LOADER)}
        place = f"{MODEL_RUNNER}_components.weight_updater"
        found = take(wheel, names, "WeightUpdater.end_weight_update", place)

        def end(model):
            model.attention.attn_sink.data.copy_(sinks(NEW))
            updater = SimpleNamespace(get_model=lambda: model, device="cpu")
            (replace_end(found) if ours else found)(updater, run_post_load=True)

        return end

    given = dict(of=Draft, copy=computed_with_dspark)
    assert not torch.equal(*updated(version, ended(False), **given))
    assert torch.equal(*updated(version, ended(True), **given))


@every_one
@pytest.mark.parametrize("is_nextn", [False, True])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 2), (1, 2), (3, 4), (7, 8), (0, 1)])
def test_a_forward_behind_an_update_has_the_new_weights_sinks(version, rank, ranks, is_nextn):
    found, expected = updated(version, loads(version, ours=True, is_nextn=is_nextn), rank, ranks)
    assert torch.equal(found, expected)


@every_one
@pytest.mark.parametrize("custom", [False, True])
def test_and_behind_one_past_load_weights(version, custom):
    found, expected = updated(version, directly(version, ours=True, custom=custom))
    assert torch.equal(found, expected)


@every_one
def test_in_sglang_alone_it_has_the_old_ones(version):
    """But the target's from 0.5.23 on."""
    asks = {"target": loads(version, ours=False), "draft": loads(version, ours=False, is_nextn=True)}
    asks["direct"] = directly(version, ours=False)
    fresh = {what for what, end in asks.items() if torch.equal(*updated(version, end))}
    assert fresh == ({"target"} if since(version, "0.5.23") else set())


@every_one
def test_a_copy_of_an_inference_tensor_is_written_too(version):
    model = Model(version, 1, 2)
    with torch.inference_mode():
        copied = computed_with(version, model.attention)
    assert copied.is_inference()
    loads(version, ours=True, is_nextn=True)(model)
    assert torch.equal(copied[:64], sinks(NEW)[64:])


@every_one
def test_a_copy_made_where_a_decode_step_deals_the_heads_otherwise_is_left(version):
    """Context parallelism of prompts has all heads on each card, but in a decode step, whose share is not known."""
    model = Model(version, 1, 4)
    copied = computed_with(version, model.attention).clone()
    model.attention.attn_tp_size, model.attention.tp_rank = 1, 0
    model.attention.attn_tp_rank, model.attention.n_local_heads = 0, HEADS
    loads(version, ours=True, is_nextn=True)(model)
    assert torch.equal(model.attention._attn_sink_local, copied)


@every_one
@pytest.mark.parametrize(("model", "card"), [("deepseek_v4", False), ("llama", True), (None, True)])
def test_elsewhere_it_stays_sglangs(version, model, card, opened):
    opened(model, card)
    found, expected = updated(version, loads(version, ours=True, is_nextn=True))
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("version", [version for version in RELEASES if not since(version, "0.5.14")])
def test_before_there_is_no_copy(version):
    assert LOCAL not in content(fetch(version), f"{MODEL.replace('.', '/')}.py")


@every_one
def test_what_was_never_run_is_left_for_the_first_forward(version):
    model = Model(version, 1, 4)
    replace_loading(lambda model: None)(model)
    assert model.attention._attn_sink_local is None


def test_what_the_load_returns_comes_through():
    assert replace_loading(lambda model, named: (True, named))(SimpleNamespace(modules=list), "x") == (True, "x")


@pytest.mark.parametrize("runs", [True, False])
def test_the_end_of_an_update_is_told_to_sglang(runs):
    told, updater = [], SimpleNamespace(get_model=torch.nn.Module)
    replace_end(lambda self, *, run_post_load: told.append((self, run_post_load)))(updater, run_post_load=runs)
    assert told == [(updater, runs)]
