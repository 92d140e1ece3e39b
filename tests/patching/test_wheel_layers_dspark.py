"""DSPARK's draft of each release around the recorder, on the CPU, and what `layers` takes for the draft's truth beside
the release's own functions: which rows see what, and what the target gives."""

import ast
import inspect
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.commands.layers import record
from deepseek_v4_sm120.reference import draft_block
from deepseek_v4_sm120.reference.draft_block import BlockRules
from deepseek_v4_sm120.reference.model import Rules
from deepseek_v4_sm120.sglang_patches import layer_record
from deepseek_v4_sm120.sglang_patches.names import DSPARK, MODEL
from tests.patching.test_wheel_layers import batch_of, recorder  # noqa: F401  a fixture
from tests.patching.test_wheel_wo_a import definition, take
from tests.patching.wheels import every_release, since, tree

FIRST, MODULE = "0.5.16", DSPARK.partition(":")[0]
HIDDEN, STAGES, ROWS = 8, 2, 3
CLASS = "DeepseekV4ForCausalLMDSpark"


class Stage:
    """What it hands on is its experts' output; V4.1's `pre` comes back from 0.5.21 to 0.5.22."""

    def __init__(self, attention, experts, with_pre):
        self.attention, self.experts, self.with_pre = attention, experts, with_pre

    def __call__(self, positions, streams, batch, *pre):
        y = self.attention(None, positions, streams[:, 0] + 1, batch)
        streams = streams + self.experts(None, y + 1)[:, None]
        return (streams, None) if self.with_pre else streams


@every_release(FIRST)
def test_the_drafts_own_forward_is_recorded(version, sglang_wheel, recorder, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    replaced, wheel = layer_record.hooks_of(lambda: recorder), sglang_wheel(version)
    attention = replaced["draft_attention"](lambda layer, positions, hidden_states, batch: hidden_states * 2)
    experts = replaced["experts"](lambda layer, hidden_states: hidden_states * 3)

    class Output(SimpleNamespace):
        pass

    names = {"_is_cuda": False, "LogitsProcessorOutput": Output, "get_global_expert_distribution_recorder": Quiet}
    forward = take(wheel, names, f"{CLASS}.forward", MODULE)
    with_pre = "x, pre = stage" in ast.unparse(tree(wheel, MODULE))
    model = SimpleNamespace(stages=[Stage(attention, experts, with_pre)] * STAGES, hc_pre_from_prev_sublayer=False)
    inner = take(wheel, dict(names), f"{CLASS}._forward_impl", MODULE)
    model._forward_impl = None if inner is None else inner.__get__(model)
    embedded = torch.arange(ROWS * HIDDEN).view(ROWS, 1, HIDDEN).expand(-1, 4, -1).bfloat16()
    model.forward_embed = lambda tokens: embedded
    positions, tokens = torch.arange(5, 5 + ROWS), torch.tensor([9, 2, 2])
    result = replaced["block"](forward)(model, tokens, positions, batch_of("TARGET_VERIFY"))
    recorder.look(SimpleNamespace())
    (one,) = record.read(tmp_path / "a1")
    assert (one["kind"], one["mode"], "lengths" in one) == ("block", "TARGET_VERIFY", False)
    assert torch.equal(one["out"], result.hidden_states.flatten(1)) and one["tokens"].tolist() == [9, 2, 2]
    assert len(one["y"]) == 2 * STAGES and torch.equal(one["y"][0], embedded[:, 0] + 1)
    assert torch.equal(one["y"][1], (embedded[:, 0] + 1) * 2 + 1)


class Quiet:
    def disable_this_region(self):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


@every_release(FIRST)
def test_its_attention_is_called_with_what_is_noted(version, sglang_wheel):
    """Its second argument, by place, of which a stage's norm is given to it."""
    found = [
        call
        for call in ast.walk(tree(sglang_wheel(version), MODULE))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "self.self_attn"
    ]
    assert found
    for call in found:
        signature = inspect.signature(layer_record.replace_draft_attention_forward(lambda: 0), follow_wrapped=False)
        given = signature.bind(None, *call.args, **{one.arg: one.value for one in call.keywords}).arguments
        assert ast.unparse(given["positions"]) == "positions" and given["hidden_states"] is call.args[1]
    assert "rope_original_seq_len=0" in ast.unparse(definition(sglang_wheel(version), "DSparkAttention", MODULE))


@every_release(FIRST)
def test_what_the_target_gives_is_told_from_its_streams(version, sglang_wheel):
    """((hidden, streams), context), of a server that drafts by DSPARK, (hidden, streams) of others."""
    model = definition(sglang_wheel(version), "DeepseekV4Model", MODEL)
    forms = [ast.unparse(one.value) for one in ast.walk(model) if isinstance(one, ast.Return) and one.value]
    with_context = [
        form for form in forms if form.startswith("((hidden_states, pre_hc_head), dspark_aux_hidden_states")
    ]
    assert len(with_context) == 1 and forms.count("(hidden_states, pre_hc_head)") == 1
    out, streams, parts = torch.ones(2, 3), torch.ones(2, 12), [torch.full((2, 3), float(i)) for i in range(2)]
    assert set(layer_record.ends_of((out, streams))) == {"out"}
    for context in (parts, torch.cat(parts, dim=1)):
        found = layer_record.ends_of(((out, streams), context))
        assert found["out"] is not streams and torch.equal(found["out"], out)
        assert torch.equal(found["context"], torch.cat(parts, dim=1))
    taken = "completed.mean(dim=1)" if not since(version, "0.5.23") else "mhc_stream_mean(completed"
    assert taken in ast.unparse(model)


@every_release(FIRST)
@pytest.mark.parametrize("prefix", [3, 200])
def test_what_a_row_sees_is_the_releases(version, sglang_wheel, prefix):
    """The slots of the window before the block and of the block, for each of its rows."""
    wheel = sglang_wheel(version)
    older = "sglang.srt.speculative.dspark_components.kernels.dspark_attn_metadata"
    newer = "sglang.kernels.ops.speculative.dspark.dspark_attn_metadata"
    module = newer if since(version, "0.5.17") else older
    names = {"torch": torch, "DsparkWindowGather": lambda **given: SimpleNamespace(**given)}
    names["ceil_align"] = lambda number, to: -(-number // to) * to
    take(wheel, names, "_compact_dspark_window_then_block", module)
    gather, build = (
        take(wheel, names, name, module) for name in ("compute_dspark_window_gather", "build_dspark_swa_page_indices")
    )
    lengths = torch.arange(prefix + 1, prefix + 1 + ROWS)
    window = gather(
        seq_lens_casual=lengths,
        req_pool_indices_repeated=torch.zeros(ROWS, dtype=torch.int64),
        block_size=ROWS,
        swa_window=128,
    )
    slots, counts = build(
        req_to_token=torch.arange(1000)[None],
        full_to_swa_mapping=torch.arange(1000),
        req_pool_indices_per_request=window.req_pool_indices_per_request,
        offsets=window.offsets,
        invalid=window.invalid,
        out_loc=torch.arange(prefix, prefix + ROWS),
        context_lens=window.context_lens,
        block_size=ROWS,
        swa_window=128,
        page_index_aligned_size=64,
    )
    n = min(prefix, 129)
    seen = draft_block.seen_by(n, ROWS, Rules(), BlockRules(), "cpu")
    for row in range(ROWS):
        of_release = set(slots[row, : counts[row]].tolist()) - {-1}
        assert of_release == {prefix - n + i for i in seen[row].nonzero()[:, 0].tolist()}
