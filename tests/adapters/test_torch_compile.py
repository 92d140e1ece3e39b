"""--enable-torch-compile: Dynamo around our adapters and what they keep. The operator is SGLang's call's end here: a
stand-in that asks, as the real ones do, for what a process keeps (functools.cache) and for a tensor's address."""

import pytest
import torch

import deepseek_v4_sm120
from deepseek_v4_sm120.ops import compressor
from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.adapters import torch_compile
from tests.adapters.test_wo_a import adapter, inputs, loaded, model  # noqa: F401

OURS = deepseek_v4_sm120.__path__[0] + "/"


@pytest.fixture
def traced(monkeypatch):
    """compile(function): by Dynamo, as it is; the source files of what it traced come into the list."""
    from torch._dynamo import trace_rules  # seconds, which others that only collect these tests need not take

    known, files = list(trace_rules.SKIP_DIRS), []

    def backend(graph, _):
        files.extend(line for node in graph.graph.nodes for line in (node.stack_trace or "").splitlines())
        return graph.forward

    torch._dynamo.reset()
    yield lambda function: (torch.compile(torch.no_grad()(function), backend=backend), files)
    trace_rules.SKIP_DIRS[:] = known
    trace_rules._recompile_re()
    torch._dynamo.reset()


@pytest.fixture
def layer(model, monkeypatch):  # noqa: F811
    """An attention whose operator asks for a kernel's words; `made`: how often those were."""
    made, operator = loaded(model), adapter.op.wo_a
    made.made = []

    class Words:
        def __init__(self, *_, **__):
            made.made.append(self)

    def wo_a(x, *args, **kwargs):
        compressor._arrivals(0)
        return operator(x, *args, **kwargs)

    monkeypatch.setattr(compressor, "ZeroedWords", Words)
    monkeypatch.setattr(adapter.op, "wo_a", wo_a)
    compressor._arrivals.cache_clear()
    yield made
    compressor._arrivals.cache_clear()


@pytest.mark.parametrize("announced", [True, False])
def test_none_of_ours_is_traced(layer, traced, announced, monkeypatch):
    """Where it is announced; where not, the same lines are, or this test would show nothing."""
    monkeypatch.setattr(models_served, "_announced", {"model_type": "deepseek_v4", "torch_compile": announced})
    torch_compile.keep_out()
    o, positions = inputs(5)
    expected = layer.forward(o, positions, ())
    compiled, lines = traced(lambda x: layer(x * 1, positions, ()) + 1)
    assert torch.equal(compiled(o), expected + 1)
    ours = [line for line in lines if OURS in line]
    assert lines and bool(ours) != announced
    assert len(layer.made) == 1
