"""What is put off to fp8_linear's products, in SGLang's own code, taken out of the wheels and run on the CPU over
stand-ins: the shared experts' forward with the row-parallel layer under it, and the attention's preparation on one
stream and on several, with the layers that take the normalised queries."""

import ast
import contextlib
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.reference import fp8_linear as reference
from deepseek_v4_sm120.sglang_patches import device_gate
from deepseek_v4_sm120.sglang_patches.adapters import fp8_linear as adapter
from deepseek_v4_sm120.sglang_patches.rows.fp8_linear import MLP_MODEL
from deepseek_v4_sm120.sglang_patches.table import INDEXER
from deepseek_v4_sm120.specs.fp8_linear import make_gates_and_ups, make_norm_weight, make_weight, make_x
from tests.adapters.fp8_product import checked_product, made_before
from tests.patching.test_wheel_wo_a import QUIET, Quiet, definition, take
from tests.patching.wheels import every_release, since, tree

LINEAR = "sglang.srt.layers.linear"
RANKS = 2
RANK = 384  # q_lora_rank
calls: list[str] = []


class QuietContext(Quiet):
    """Also for `with`, as streams are."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def __getattr__(self, name):
        return self


QUIET_CONTEXT = QuietContext()


class Torch:
    """torch, whose streams and events do nothing."""

    cuda = QUIET_CONTEXT

    def __getattr__(self, name):
        return getattr(torch, name)


class Part:
    """Called, it is its `forward`; what it was not given is quiet."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)

    def __getattr__(self, name):
        return QUIET


class Method:
    """Fp8LinearMethod as far as the adapter looks at it; `apply` computes without rounding the activations."""

    block_quant, use_marlin, use_mxfp8 = True, False, False

    def apply(self, layer, x, bias=None):
        assert bias is None and isinstance(x, torch.Tensor)
        calls.append("stock")
        return reference.fp8_linear(x, layer.weight, layer.weight_scale_inv).to(torch.bfloat16)


class OurMethod(Method):
    apply = adapter.replace_apply(Method.apply)


def linear(wheel, kind, outputs, inputs, *, patched, seed):
    """A layer with the wheel's forward, on the first of two ranks; an all-reduce doubles what it is given."""
    weight, scale = make_weight(1, outputs, inputs, torch.Generator().manual_seed(seed))
    names = {
        **{"torch": torch, "use_symmetric_memory": lambda *args, **kwargs: contextlib.nullcontext()},
        "get_group_rank_size": lambda group: (0, RANKS),
        "tensor_model_parallel_all_reduce": lambda tensor, **_: calls.append("all-reduce") or 2 * tensor,
        "tensor_model_parallel_quant_all_reduce": lambda tensor, **_: pytest.fail("an all-reduce of rounded numbers"),
    }
    forward = take(wheel, names, f"{kind}.forward", LINEAR)
    members = {"forward": forward}
    return type(kind, (Part,), members)(
        **{"weight": weight[0], "bias": None, "skip_bias_add": False},
        **{"weight_scale_inv": scale[0], "quant_method": (OurMethod if patched else Method)()},
        **{"input_is_parallel": True, "reduce_results": True, "tp_size": RANKS, "tp_rank": 0, "gather_output": False},
        **{"use_dp_attention_reduce": False, "use_decode_attn_tp": False},
    )


@pytest.fixture(autouse=True)
def operator(monkeypatch):
    """The gate is open; the reference computes what passes our operator's own checks."""
    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(adapter.process, "has_our_model", True)
    monkeypatch.setattr(adapter.op, "fp8_linear", checked_product(calls))
    monkeypatch.setattr(adapter.op, "takes_prologue", lambda name, outputs, inputs: True)
    monkeypatch.setattr(adapter.op, "normalized", made_before(calls))
    calls.clear()


# ---- the shared experts


def silu_and_mul_clamp(input, output, swiglu_limit):
    calls.append("silu")
    output.copy_(reference.gated(input, swiglu_limit))


def mlp(wheel, *, patched, limit=10.0):
    names = {"torch": torch, "silu_and_mul_clamp": silu_and_mul_clamp}
    if patched:
        names["silu_and_mul_clamp"] = adapter.replace_silu_and_mul_clamp(silu_and_mul_clamp)
    forward = take(wheel, names, "DeepseekV2MLP.forward", MLP_MODEL)
    made = type("DeepseekV2MLP", (Part,), {"forward": adapter.replace_mlp_forward(forward) if patched else forward})
    return made(
        **{"swiglu_limit": limit, "tp_size": RANKS, "use_fused_clamp_act_mul": False, "is_replicated": False},
        **{"_enable_nvfp4_gemm_swiglu_fusion": False, "_fused_clamp_fp8_checked": True},
        act_fn=lambda x: calls.append("SiluAndMul") or reference.gated(x, 3e38),
        gate_up_proj=lambda x: (x, None),  # the forward's x is what it gives
        down_proj=linear(wheel, "RowParallelLinear", 512, 256, patched=patched, seed=1),
    )


@every_release()
@pytest.mark.parametrize("rows", (1, 4, 64, 65))
def test_the_shared_experts_forward_with_its_all_reduce(version, rows, sglang_wheel):
    wheel, x = sglang_wheel(version), make_gates_and_ups(rows, 256, torch.Generator().manual_seed(rows))
    expected = mlp(wheel, patched=False)(x)
    assert calls == ["silu", "stock", "all-reduce"]
    calls.clear()
    found = mlp(wheel, patched=True)(x)
    made = ["gated"] if rows <= 4 else ["silu", "plain" if rows <= 64 else "stock"]
    assert calls == [*made, "all-reduce"]
    assert torch.equal(found, expected)


@every_release()
def test_without_a_limit_the_forward_is_the_wheels(version, sglang_wheel):
    x = make_gates_and_ups(3, 256, torch.Generator().manual_seed(0))
    mlp(sglang_wheel(version), patched=True, limit=None)(x)
    assert calls == ["SiluAndMul", "plain", "all-reduce"]


# ---- the queries


class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        weight = make_norm_weight(RANK, torch.Generator().manual_seed(5))
        self.weight, self.variance_epsilon = torch.nn.Parameter(weight, requires_grad=False), 1e-6

    def forward(self, x):
        calls.append("norm")
        return reference.normalized(x, self.weight, self.variance_epsilon)


def attention(wheel, *, patched, indexed):
    """MQALayer with the wheel's preparation; the rest of what it does stands in."""
    names = {"torch": Torch(), "fused_q_norm_rope": lambda q, out, *_: out.copy_(q), "len": len}
    members = {}
    for name in ("_forward_prepare", "_forward_prepare_multi_stream", "_compute_q_a", "_compute_q_b"):
        base = "MQALayer" if definition(wheel, f"MQALayer.{name}") is not None else "MqaAttentionBase"
        members[name] = take(wheel, names, f"{base}.{name}")
    if definition(wheel, "MQALayer._normalize_q_lora") is not None:
        members["_normalize_q_lora"] = take(wheel, names, "MQALayer._normalize_q_lora")

    index = None
    if indexed:
        fused = {"torch": torch, "fused_q_indexer_rope_hadamard_quant": lambda q, weights, *_: (q, weights)}
        compute_q = take(wheel, fused, "C4Indexer.compute_q", INDEXER)
        index = Part(
            wq_b=linear(wheel, "ReplicatedLinear", 256, RANK, patched=patched, seed=7), n_local_heads=2, head_dim=128
        )

        def forward(self, *, x, q_lora, forward_batch, **_):
            rows = q_lora[: min(x.shape[0], q_lora.shape[0])]
            forward_batch.index_queries = compute_q(self, rows, QUIET, QUIET)[0]

        index.forward = forward.__get__(index)

    def __init__(self):
        Part.__init__(self, q_norm=Norm(), indexer=index, alt_streams=[QUIET_CONTEXT] * 3, n_local_heads=4)
        self.wq_b = linear(wheel, "ColumnParallelLinear", 512, RANK, patched=patched, seed=6)
        self.wqkv_a, self.q_lora_rank, self.fuse_wqa_wkv = (lambda x: (x, None)), RANK, True
        self.head_dim, self.compress_ratio, self.is_dsv41, self.q_head_norm = 128, 4, False, True

    members["__init__"] = adapter.replace_attention_init(__init__) if patched else __init__
    return type("MQALayer", (Part,), members)()


@every_release()
@pytest.mark.parametrize("path", ("_forward_prepare", "_forward_prepare_multi_stream"))
@pytest.mark.parametrize("rows, indexed", [(1, True), (64, True), (4, False), (65, True)])
def test_the_attentions_own_preparation(version, path, rows, indexed, sglang_wheel):
    wheel, x = sglang_wheel(version), make_x(rows, 1, RANK + 128, torch.Generator().manual_seed(rows))[:, 0]

    def run(patched):
        calls.clear()
        batch = Quiet()
        vars(batch)["index_queries"] = torch.zeros(0)
        q = getattr(attention(wheel, patched=patched, indexed=indexed), path)(x, QUIET, batch, QUIET)
        return (q[0] if isinstance(q, tuple) else q), batch.index_queries

    expected = run(False)
    assert sorted(calls) == sorted(["norm", *["stock"] * (1 + indexed)])
    found = run(True)
    few = ["normalised"] * (1 + indexed) if rows <= 4 else ["made before", *["plain"] * (1 + indexed)]
    assert sorted(calls) == (few if rows <= 64 else ["norm", *["stock"] * (1 + indexed)])
    assert found[0].shape == (rows, 4, 128) and (found[1].shape[0] == rows) == indexed
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


READERS = ("C4Indexer.compute_q", "C4Indexer.forward", "C4IndexerBackendMixin.forward_c4_indexer")


@every_release()
def test_nothing_else_is_done_with_the_queries_latent(version, sglang_wheel):
    """On its way to the indexer's product it is handed on, cut, or asked for its rows; a stand-in can do that."""
    wheel = sglang_wheel(version)
    read = tree(wheel, INDEXER)
    parents = {child: node for node in ast.walk(read) for child in ast.iter_child_nodes(node)}
    uses = [n for n in ast.walk(read) if isinstance(n, ast.Name) and n.id == "q_lora" and isinstance(n.ctx, ast.Load)]
    assert len(uses) >= 5 and all(definition(wheel, name, INDEXER) is not None for name in READERS)
    for use in uses:
        parent = parents[use]
        assert (
            isinstance(parent, ast.Call | ast.keyword)
            or (isinstance(parent, ast.Attribute) and parent.attr == "shape")
            or (isinstance(parent, ast.Subscript) and isinstance(parent.slice, ast.Slice))
            or (isinstance(parent, ast.IfExp) and isinstance(parents[parent], ast.Call))
        ), ast.unparse(parents[parent])


@every_release()
def test_the_norm_and_the_layers_have_these_names(version, sglang_wheel):
    wheel = sglang_wheel(version)
    base = "MQALayer" if not since(version, "0.5.16") else "MqaAttentionBase"
    init = ast.unparse(definition(wheel, f"{base}.__init__"))
    assert "self.q_norm = RMSNorm(self.q_lora_rank, eps=self.eps)" in init and "self.wq_b = " in init
    assert "self.indexer" in ast.unparse(definition(wheel, "MQALayer.__init__"))
    norm = ast.unparse(definition(wheel, "RMSNorm", "sglang.srt.layers.layernorm"))
    for name in ("variance_epsilon", "variance_size_override", "cast_x_before_out_mul", "weight"):
        assert f"self.{name} = " in norm, name
    made = SimpleNamespace(text=ast.unparse(definition(wheel, "DeepseekV2MLP.__init__", MLP_MODEL)))
    assert "self.swiglu_limit = swiglu_limit" in made.text and "self.down_proj = RowParallelLinear(" in made.text
