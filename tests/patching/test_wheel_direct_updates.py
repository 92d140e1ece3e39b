"""update_weights_from_tensor of each release, with load_format="direct" and with the name of a --custom-weight-loader
that writes by the parameters' names, taken out of the wheels and run on the CPU with ours in it: what would be stored
as something else is refused whole, all else is written as SGLang writes it."""

from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.ops import bf16_linear_draft_head as head_op
from deepseek_v4_sm120.sglang_patches import device_gate, models_served
from deepseek_v4_sm120.sglang_patches.adapters import bf16_linear_draft_head, mxfp4_moe, wo_a
from deepseek_v4_sm120.sglang_patches.adapters.kept_weights import KeptWeights
from deepseek_v4_sm120.sglang_patches.names import FIND_LOADER, LOAD_DIRECT, MODEL_RUNNER
from deepseek_v4_sm120.specs.fp8_linear import make_weight
from tests.adapters.wo_a_layer import Expansion, Linear
from tests.patching.conftest import DIRECT
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import every_release, fetch, since

UPDATER, LOADER = f"{MODEL_RUNNER}_components.weight_updater", "sglang.srt.model_loader.weight_utils"
WO_A, EXPERTS = "layers.0.wo_a", "layers.0.experts"
ROWS, INPUTS = 256, 512
CUSTOM = "of_the_user.loads"  # module.function
every_way = pytest.mark.parametrize("way", ["direct", CUSTOM])


class Layer(torch.nn.Module):
    """wo_a and experts, ours where `kept`, and a norm."""

    def __init__(self, kept):
        super().__init__()
        self.wo_a, self.experts = Linear(outputs=ROWS, inputs=INPUTS), torch.nn.Module()
        self.norm = parameter(torch.ones(8, dtype=torch.bfloat16))
        for name in ("w13_weight", "w13_weight_scale_inv"):
            setattr(self.experts, name, parameter(torch.zeros(2, 4, 8, dtype=torch.uint8)))
        if kept:
            wo_a.store(self.wo_a, Expansion())
            setattr(self.experts, mxfp4_moe.KEPT, SimpleNamespace())
        for tensor in self.parameters():
            tensor.data.view(torch.uint8).zero_()


class Model(torch.nn.Module):
    def __init__(self, *, kept=True):
        super().__init__()
        self.layers, self.lm_head = torch.nn.ModuleList([Layer(kept)]), torch.nn.Module()
        self.lm_head.weight = parameter(torch.ones(128, 1024, dtype=torch.bfloat16))
        self.logits_processor = torch.nn.Module()


def parameter(tensor):
    return torch.nn.Parameter(tensor, requires_grad=False)


@pytest.fixture(autouse=True)
def gate(monkeypatch):
    monkeypatch.setattr(models_served, "announced", lambda: {"model_type": "deepseek_v4"})
    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(bf16_linear_draft_head, "heads", [])
    for adapter in (wo_a, bf16_linear_draft_head):
        monkeypatch.setattr(adapter, "kept", KeptWeights(adapter.PATCH, "in FP8"))


def update(version, model, named_tensors, way="direct"):
    """The release's own method, with the functions that it writes with as our rows replace them."""
    wheel = fetch(version)
    of, module = ("WeightUpdater", UPDATER) if since(version, "0.5.16") else ("ModelRunner", MODEL_RUNNER)
    loader = take(wheel, {}, "default_weight_loader", LOADER)
    direct = take(wheel, {"default_weight_loader": loader}, LOAD_DIRECT, module)
    found = {CUSTOM: lambda model, named: direct(model, iter(named))}.__getitem__
    writes = direct
    for adapter, name in ((bf16_linear_draft_head, "loading"), (mxfp4_moe, "direct"), (wo_a, "direct")):
        writes = getattr(adapter, f"replace_{name}")(writes)
        found = getattr(adapter, f"replace_{name}_custom")(found)
    device_module = SimpleNamespace(current_device=lambda: "cpu")
    names = {
        LOAD_DIRECT: writes,
        FIND_LOADER: found,
        "torch": SimpleNamespace(get_device_module=lambda device: device_module),
        "_unwrap_tensor": lambda tensor, tp_rank, device: tensor.to(device),
        "_unsupported_derived_weight_cache_error": lambda *model: None,
    }
    runner = SimpleNamespace(model=model, get_model=lambda: model, device="cpu", tp_rank=0)
    runner.server_args = SimpleNamespace(custom_weight_loader=[CUSTOM])  # up to 0.5.15
    runner.custom_weight_loaders = {CUSTOM: None}
    runner._assert_weight_cache_inactive = lambda name: None
    return take(wheel, names, f"{of}.update_weights_from_tensor", module)(runner, named_tensors, load_format=way)


def bytes_of(model):
    return [tensor.data.view(torch.uint8).clone() for tensor in model.parameters()]


NORM = ("layers.0.norm", torch.full((8,), 3.0, dtype=torch.bfloat16))
REFUSED = {
    "wo_a in bf16": (
        (f"{WO_A}.weight", torch.ones(ROWS, INPUTS, dtype=torch.bfloat16)),
        ("wo_a: ", "must be torch.float8_e4m3fn, with the scales", "got torch.bfloat16 [256, 512]", "wo_a=off"),
    ),
    "wo_a's scales as bytes": (
        (f"{WO_A}.weight_scale_inv", torch.full((2, 4), 127, dtype=torch.uint8)),
        ("wo_a: ", "must be torch.float32 or torch.float8_e8m0fnu", "got torch.uint8 [2, 4]"),
    ),
    **{
        f"experts' {name}": (
            (f"{EXPERTS}.{name}", torch.ones(2, 4, 8, dtype=torch.uint8)),  # SGLang's layout can have the same shape
            ("mxfp4_moe: ", "must be the checkpoint's, expert by expert", "got torch.uint8 [2, 4, 8]", "mxfp4_moe=off"),
        )
        for name in ("w13_weight", "w13_weight_scale_inv")
    },
}


@every_release()
@every_way
@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_stored_as_something_else_is_refused_before_anything_is_written(version, what, way):
    model, (given, words) = Model(), REFUSED[what]
    before = bytes_of(model)
    with pytest.raises(ValueError) as raised:
        update(version, model, [NORM, given], way)
    for word in (given[0], f"load_format={way!r}", "nothing was written", *words):
        assert word in str(raised.value)
    assert all(map(torch.equal, bytes_of(model), before))
    stock = Model(kept=False)
    if "scales" not in what:  # SGLang has no such parameter
        assert update(version, stock, [NORM, given], way) == (True, "Success")
        found = dict(stock.named_parameters())
        assert torch.equal(found[given[0]], given[1]) and torch.equal(found[NORM[0]], NORM[1])


@every_release()
@every_way
@pytest.mark.parametrize("scales", [torch.float32, torch.float8_e8m0fnu])
def test_what_we_keep_can_be_given(version, scales, way):
    model = Model()
    weight, scale = make_weight(1, ROWS, INPUTS, torch.Generator().manual_seed(1), ue8m0=True)
    scale = scale[0].view(torch.float8_e8m0fnu)
    given = [NORM, (f"{WO_A}.weight", weight[0]), (f"{WO_A}.weight_scale_inv", scale.to(scales))]
    assert update(version, model, given, way) == (True, "Success")
    layer = model.layers[0]
    assert torch.equal(layer.wo_a.weight.data.view(torch.uint8), weight[0].view(torch.uint8))
    assert torch.equal(layer.wo_a.weight_scale_inv.data, torch.exp2(scale.view(torch.uint8).float() - 127))
    assert torch.equal(layer.norm, NORM[1])


@every_release("0.5.14")
@every_way
def test_the_drafts_copy_of_the_head_is_made_again(version, way):
    model = Model()
    bf16_linear_draft_head.keep(model.logits_processor, model.lm_head.weight)
    (head,) = bf16_linear_draft_head.heads
    new = torch.randn(128, 1024, generator=torch.Generator().manual_seed(2)).bfloat16()
    update(version, model, [("lm_head.weight", new)], way)
    copy = head_op.empty(new)
    head_op.fill(new, copy)
    assert torch.equal(head.copy, copy)


@every_release()
def test_a_checkpoints_names_are_the_users_loaders_own(version):
    """They go through load_weights, which looks at them itself."""
    given = [("layers.0.attn.wo_a.weight", torch.ones(1)), ("layers.0.ffn.experts.0.w1.weight", torch.ones(1))]
    with pytest.raises(KeyError, match="attn.wo_a"):  # of the function that stands for the user's
        update(version, Model(), given, CUSTOM)


@every_release()
def test_a_name_that_is_no_parameter_is_sglangs_error(version):
    with pytest.raises(KeyError, match="no_such"):
        update(version, Model(), [("layers.0.no_such.weight", torch.ones(1))])


RUN = """
    import torch
    from MODULE import _model_load_weights_direct, dynamic_import
    from types import SimpleNamespace
    from deepseek_v4_sm120.sglang_patches.adapters import bf16_linear_draft_head, mxfp4_moe, wo_a
    model = torch.nn.Module()
    model.wo_a, model.experts, model.lm_head = torch.nn.Module(), torch.nn.Module(), torch.nn.Linear(2, 2)
    head = SimpleNamespace(source=model.lm_head.weight, fill=lambda: print("copied"))
    bf16_linear_draft_head.heads.append(head)
    model.wo_a.weight = wo_a.StoredWeight(torch.zeros(2, 2).to(torch.float8_e4m3fn), requires_grad=False)
    setattr(model.experts, mxfp4_moe.KEPT, "kept")
    for load in (_model_load_weights_direct, dynamic_import("of_the_user.loads")):
        for name in ("wo_a.weight", "experts.w2_weight", "norm.weight"):
            try:
                print("written" if load(model, [(name, torch.zeros(2))]) is model else "lost")
            except ValueError as error:
                print(str(error).partition(":")[0])
"""


@pytest.mark.parametrize(
    "version, module, chosen, said",
    [
        ("0.5.17", UPDATER, "", ["wo_a", "mxfp4_moe", "written"]),
        ("0.5.17", UPDATER, "wo_a=off", ["written", "mxfp4_moe", "written"]),
        ("0.5.17", UPDATER, "draft_head=on", ["wo_a", "mxfp4_moe", "copied", "written"]),
        ("0.5.15", MODEL_RUNNER, "mxfp4_moe=off", ["wo_a", "written", "written"]),
    ],
)
def test_the_table_puts_it_there(python_with_torch, tree, version, module, chosen, said):
    changes = {"sglang/_version.py": f"__version__ = '{version}'\n"}
    if module == MODEL_RUNNER:
        changes |= {f"{MODEL_RUNNER.replace('.', '/')}.py": DIRECT, f"{UPDATER.replace('.', '/')}.py": None}
    more = {"DSV4_SM120_SET": chosen} if chosen else {}
    done = python_with_torch(RUN.replace("MODULE", module), path=[tree(changes)], env=more)
    assert done.stdout.split() == said + said, done.stderr  # SGLang's function, then the user's
