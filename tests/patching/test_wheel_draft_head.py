"""What the drafts' head relies on in each release, taken out of the wheels and run on the CPU with ours in it: whose
the head is, who multiplies with it, that its copy is made before the capture and again when weights are loaded."""

import ast
from types import MethodType, SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.ops import bf16_linear_draft_head as op
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.reference.bf16_linear_draft_head import draft_head as reference
from deepseek_v4_sm120.sglang_patches import device_gate, models_served
from deepseek_v4_sm120.sglang_patches.adapters import bf16_linear
from deepseek_v4_sm120.sglang_patches.adapters import bf16_linear_draft_head as adapter
from deepseek_v4_sm120.sglang_patches.adapters.kept_weights import KeptWeights
from deepseek_v4_sm120.sglang_patches.rows.lm_head import LM_HEAD, MODEL
from tests.patching.test_wheel_wo_a import definition, take
from tests.patching.wheels import every_release, fetch, since

FIRST, DSPARK_FIRST = "0.5.14", "0.5.16"
LOGITS = LM_HEAD.partition(":")[0]
MTP, DSPARK = "sglang.srt.models.deepseek_v4_nextn", "sglang.srt.models.deepseek_v4_dspark"
EAGLE = "sglang.srt.speculative.eagle_worker_v2"
SPARK = "sglang.srt.speculative.dspark_components.dspark_worker_v2"
SCHEDULER = "sglang.srt.managers.scheduler"
OUTPUTS, INPUTS = 192, 1024


@pytest.fixture
def ours(monkeypatch):
    shapes = []

    def operator(x, copy, weight, *, out_dtype):
        shapes.append(x.shape[0])
        return reference(x, copy, weight).to(out_dtype)

    monkeypatch.setattr(models_served, "announced", lambda: {"model_type": "deepseek_v4"})
    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(op, "draft_head", operator)
    monkeypatch.setattr(adapter, "heads", [])
    monkeypatch.setattr(adapter, "kept", KeptWeights(adapter.PATCH, "in INT4"))
    return shapes


class UnquantizedEmbeddingMethod:
    pass


class Head(torch.nn.Module):
    quant_method, org_vocab_size = UnquantizedEmbeddingMethod(), OUTPUTS

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(OUTPUTS, INPUTS, generator=generator).bfloat16()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)


class Processor(torch.nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.use_fp32_lm_head = self.use_fp32_lm_head_output = wide
        self.rl_on_policy_target = None


class Model(torch.nn.Module):
    wo_a_fp8 = False

    def __init__(self, seed, wide=False):
        super().__init__()
        self.lm_head, self.model = Head(seed), torch.nn.Module()
        self.model.embed_tokens, self.logits_processor = Head(seed + 1), Processor(wide)
        self.model.start_layer = self.model.end_layer = 0
        self.model.layers = []


def x_of(rows):
    return torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(rows)).bfloat16()


def stock_head(version):
    servers = SimpleNamespace(rl_on_policy_target=None)
    names = {"torch": torch, "use_intel_amx_backend": lambda head: False, "get_global_server_args": lambda: servers}
    names["should_apply_lm_head_quant_method"] = lambda head, method: False
    return take(fetch(version), names, "LogitsProcessor._compute_lm_head", LOGITS)


def of_model(version, name):
    device = SimpleNamespace(empty_cache=lambda: None, synchronize=lambda: None)
    names = {"torch": SimpleNamespace(get_device_module=lambda: device), "MQALayer": type("MQALayer", (), {})}
    return take(fetch(version), names, f"DeepseekV4ForCausalLM.{name}", MODEL)


@every_release(FIRST)
@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "float32"])
def test_the_mtp_drafts_head(version, ours, wide):
    stock = stock_head(version)
    compute = adapter.replace_lm_head(bf16_linear.replace_lm_head(stock))  # as a reproducible server has them
    hand_over = adapter.replace_set_embed_and_head(of_model(version, "set_embed_and_head"))
    loaded = adapter.replace_loading(of_model(version, "post_load_weights"))
    target, draft = Model(1, wide), Model(5, wide)
    get = of_model(version, "get_embed_and_head")
    hand_over(draft, *get(target))
    assert draft.lm_head.weight is target.lm_head.weight and draft.lm_head is not target.lm_head
    x = x_of(3)
    found = compute(draft.logits_processor, x, draft.lm_head)
    theirs = stock(draft.logits_processor, x, draft.lm_head)
    assert ours == [3] and (found.dtype, found.shape) == (theirs.dtype, theirs.shape)
    assert 0.05 < relative_error(found, theirs.double()) < 0.14
    stock_only = adapter.replace_lm_head(stock)
    assert torch.equal(stock_only(target.logits_processor, x, target.lm_head), theirs) and ours == [3]
    with torch.no_grad():
        target.lm_head.weight.copy_(Head(9).weight)
    loaded(target)
    again = compute(draft.logits_processor, x, draft.lm_head)
    assert relative_error(again, stock(draft.logits_processor, x, Head(9)).double()) < 0.14
    if since(version, "0.5.23"):  # a buffer of the caller's that ours leaves alone: the caller copies
        buffer = torch.full((3, OUTPUTS), 7.0)
        assert torch.equal(compute(draft.logits_processor, x, draft.lm_head, out=buffer), again)


@every_release(DSPARK_FIRST)
@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "float32"])
@pytest.mark.parametrize("sharded", [False, True], ids=["gathered", "sharded"])
def test_dsparks_head(version, ours, wide, sharded):
    wheel = fetch(version)
    names = {"torch": torch, "F": torch.nn.functional, "gather_and_crop_vocab": lambda local, head: local[:, :190]}
    names["project_through_lm_head"] = lambda x, head: torch.matmul(x, head.weight.T)
    qualname = "DeepseekV4ForCausalLMDSpark._logits_from_x_post_hc"
    stock = take(wheel, names, qualname, DSPARK)
    attach = take(wheel, {}, "DeepseekV4ForCausalLMDSpark.attach_shared_modules", DSPARK)
    draft, head = torch.nn.Module(), Head(3)
    draft.stages = [SimpleNamespace(norm=lambda x: 2 * x)]
    draft.markov_head = SimpleNamespace(configure_tp_shard=lambda lm_head: None)
    draft.uses_own_vocab_modules, draft._use_fp32_lm_head, draft._opt_markov_w2_tp_shard = False, wide, sharded
    MethodType(adapter.replace_attach(attach), draft)(embed_tokens=Head(4), lm_head=head)
    assert draft.lm_head is head and not hasattr(head, adapter.COPY)
    x = x_of(10)
    found, theirs = adapter.replace_dspark_logits(stock)(draft, x), stock(draft, x)
    assert ours == [10] and (found.dtype, found.shape) == (theirs.dtype, theirs.shape)
    assert 0.05 < relative_error(found, theirs.double()) < 0.14


def calls(node):
    """Names that are called, as they are written, in the order of the source."""
    found = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
    return [ast.unparse(n.func) for n in sorted(found, key=lambda n: (n.lineno, n.col_offset))]


@every_release(FIRST)
def test_the_copy_is_made_before_graphs_are_captured(version):
    """The scheduler's order: pools, in whose allocation the draft gets its head, then graphs."""
    wheel = fetch(version)
    worker = "EagleDraftWorker" if definition(wheel, "EagleDraftWorker", EAGLE) else "EagleDraftWorkerBase"
    made = calls(definition(wheel, f"{worker}.alloc_memory_pool", EAGLE))
    assert "self.init_lm_head" in made
    handed = calls(definition(wheel, f"{worker}.init_lm_head", EAGLE))
    assert "self.draft_runner.model.set_embed_and_head" in handed
    order = calls(definition(wheel, "Scheduler", SCHEDULER))
    assert order.index("self.draft_worker.alloc_memory_pool") < order.index("self.draft_worker.init_cuda_graphs")


@every_release(DSPARK_FIRST)
def test_dspark_attaches_when_it_is_made(version):
    made = definition(fetch(version), "DSparkWorkerV2.__init__", SPARK)
    assert "self.draft_model.attach_shared_modules" in calls(made)


@every_release(FIRST)
def test_a_draft_has_a_processor_of_its_own_and_gives_it_its_head(version):
    wheel = fetch(version)
    made = ast.unparse(definition(wheel, "DeepseekV4ForCausalLMNextN.__init__", MTP))
    assert "self.logits_processor = LogitsProcessor(config)" in made and "self.lm_head = ParallelLMHead(" in made
    forward = definition(wheel, "DeepseekV4ForCausalLMNextN.forward", MTP)
    (call,) = [
        n for n in ast.walk(forward) if isinstance(n, ast.Call) and ast.unparse(n.func) == "self.logits_processor"
    ]
    assert "self.lm_head" in [ast.unparse(argument) for argument in call.args]
    assert definition(wheel, "DeepseekV4ForCausalLMNextN.set_embed_and_head", MTP) is None, "the model's own"


@every_release(FIRST)
def test_loading_ends_with_what_makes_the_copy_again(version):
    wheel = fetch(version)
    load = calls(definition(wheel, "DeepseekV4ForCausalLM.load_weights", MODEL))
    assert load.count("self.post_load_weights") == 1
    after = load[load.index("self.post_load_weights") + 1 :]
    assert not [name for name in after if "weight_loader" in name or "load_weight" in name]
    assert "super().post_load_weights" in calls(definition(wheel, "DeepseekV4ForCausalLMNextN.post_load_weights", MTP))


@every_release(FIRST)
def test_logits_of_all_kinds_come_from_one_product(version):
    """Of what LogitsProcessor multiplies with a head, `_compute_lm_head` is all."""
    processor = definition(fetch(version), "LogitsProcessor", LOGITS)
    functions = [node for node in processor.body if isinstance(node, ast.FunctionDef)]
    products = {
        function.name
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and "lm_head.weight" in ast.unparse(node)
    }
    assert products == {"_compute_lm_head"}
