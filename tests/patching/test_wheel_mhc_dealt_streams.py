"""Dealt streams with SGLang's own code around them, taken out of the wheels and run on the CPU by ranks that are
threads: the model's forward, its embedding and two layers of each release. And what becomes of what the model gives:
who reads the streams in front of the head, and what a pass is told by."""

import ast
import enum
import threading
from contextlib import nullcontext
from functools import total_ordering
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches import device_gate
from deepseek_v4_sm120.sglang_patches.adapters import mhc as boundary
from deepseek_v4_sm120.sglang_patches.adapters import mhc_dealt_streams as adapter
from deepseek_v4_sm120.sglang_patches.names import MODEL
from deepseek_v4_sm120.sglang_patches.rows.mhc import EMBEDDING
from tests.adapters import dealt_streams_model as ranks_of_threads
from tests.adapters.dealt_streams_model import ROWS, Ranks, _this, tokens
from tests.adapters.test_mhc_sum import HIDDEN
from tests.patching import test_wheel_mhc_sum as layers
from tests.patching.test_wheel_wo_a import QUIET, definition, take
from tests.patching.wheels import WheelSources, every_release, since, tree

FIRST, BY_BOUNDARIES, RANKS = "0.5.13", "0.5.23", 2
BATCH = "sglang.srt.model_executor.forward_batch_info"
LOGITS = "sglang.srt.layers.logits_processor"
STATE = adapter.PARALLEL_STATE
LAYERS = 2
SUMS = 1 + 2 * LAYERS
_one_at_a_time = threading.Lock()  # the wheels' archives
DEALT = adapter.replace_fused_post_pre(layers.FUSED)


@pytest.fixture(autouse=True)
def state(monkeypatch):
    found = ranks_of_threads.among_threads(monkeypatch)
    monkeypatch.setattr(adapter.limits, "takes", lambda patch, **_: True)
    monkeypatch.setattr(boundary.op, "mhc", mhc)
    monkeypatch.setattr(boundary.op, "mhc_post", layers.post_of)
    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    seen.clear()
    return found


def mhc(f, streams, post, comb, *weights, **options):
    assert len(f) == len(streams) == len(post) == len(comb)
    seen.append(len(f))
    return layers.mhc(f, streams, post, comb, *weights, **options)


seen: list[int] = []  # rows of each boundary


# ---- a model of the wheel's code


def embedding_of(wheel, names, *, patched):
    """VocabParallelEmbedding with the wheel's forward; a rank has every second token."""
    module, _, qualname = EMBEDDING.partition(":")
    masked = {
        "get_masked_input_and_mask": lambda ids, *_: (ids, ids.remainder(RANKS) != _this.coordinator.rank_in_group)
    }
    forward = take(wheel, dict(names) | masked, qualname, module)
    table = torch.arange(ranks_of_threads.TOKENS * HIDDEN).remainder(53).view(-1, HIDDEN).bfloat16()

    def shard(ids):  # 0.5.16 and later
        return torch.where((ids.remainder(RANKS) == _this.coordinator.rank_in_group)[:, None], table[ids], 0)

    kind = type("VocabParallelEmbedding", (layers.Part,), {})
    kind.forward = adapter.replace_embedding_forward(forward) if patched else forward
    method = SimpleNamespace(embedding=lambda layer, ids: table[ids])
    sizes = {"tp_size": RANKS, "use_attn_tp_group": False, "num_embeddings": len(table)}
    return kind(**sizes, quant_method=method, _embed_local_shard=shard)


def layers_of(wheel, version, names, *, patched):
    if since(version, BY_BOUNDARIES):
        kinds = layers.kinds_of_output(wheel, names)
        made = [layers.layer_of_boundaries(wheel, names, kinds, patched=False) for _ in range(LAYERS)]
    else:
        made = [layers.layer(wheel, names, patched=False) for _ in range(LAYERS)]
    for kind in map(type, made if patched else ()):
        kind.hc_pre, kind.hc_post = adapter.replace_hc_pre(kind.hc_pre), adapter.replace_hc_post(kind.hc_post)
    return made


def start(batch):
    batch.written = batch.owed = batch.update = None


def names_of(wheel, *, patched):
    names = layers.names_of(wheel, _this.coordinator)
    if patched:  # each way in which a release finds the boundary
        ops = SimpleNamespace(mhc_fused_post_pre=DEALT)
        names |= {"mhc_fused_post_pre": DEALT, "_get_mhc_ops": lambda: ops, "get_mhc_ops": lambda: ops}
        names["GIVEN"] |= {name: names[name] for name in ("_get_mhc_ops", "get_mhc_ops")}
    read = SimpleNamespace(
        start=start,
        clear=lambda batch: None,
        written_residual=lambda batch: batch.written,
        read_output=lambda hidden, batch, *_: batch.update.update(batch.owed.complete(), batch.written),
    )
    names |= {"residual_batch": read, "hc_boundary": QUIET}
    names["mhc"] = SimpleNamespace(AttnOutput=lambda partial: SimpleNamespace(partial=partial), MHC_POST_MULT_VALUE=2.0)
    names |= {"get_global_expert_distribution_recorder": layers.QuietContext, "getattr": getattr, "range": range}
    names["GIVEN"] |= {"mega_gate_forward_scope": nullcontext}
    names["GIVEN"] |= {"hc_broadcast": lambda x, streams: x.unsqueeze(1).repeat(1, streams, 1)}
    return names


def model_of(wheel, version, *, patched):
    """DeepseekV4Model with the wheel's forward, of this thread's rank."""
    with _one_at_a_time:
        names = names_of(wheel, patched=patched)
        embedding = embedding_of(wheel, names, patched=patched)
        made = layers_of(wheel, version, names, patched=patched)
        members = {
            name: take(wheel, dict(names), f"DeepseekV4Model.{name}")
            for name in ("forward", "_forward_impl")
            if definition(wheel, f"DeepseekV4Model.{name}") is not None
        }
    if patched:
        members["forward"] = adapter.replace_model_forward(members["forward"])
    return type("DeepseekV4Model", (layers.Part,), members)(
        **{"embed_tokens": embedding, "layers": made, "start_layer": 0, "end_layer": LAYERS, "hc_mult": 4},
        **{"hidden_size": HIDDEN, "dspark_layers_to_capture": None, "use_fused_mhc_post_pre": True},
        **{"hc_pre_from_prev_sublayer": False, "_can_run_tbo": lambda batch: False, "norm": lambda x: x},
        pp_group=SimpleNamespace(is_first_rank=True, is_last_rank=True, world_size=1),
        hc_head=lambda x, *_: x.float().mean(1).bfloat16(),
    )


def batch_of(captures):
    made = layers.Stream(None)
    mode = SimpleNamespace(is_extend_without_speculative=lambda: True)
    made.forward_mode, made.tbo_children = mode, None
    made.capture_hidden_mode = SimpleNamespace(need_capture=lambda: captures)
    return made


def run(model, rows, captures=False):
    return model.forward(tokens(rows), QUIET, batch_of(captures), None)


@every_release(FIRST)
@pytest.mark.parametrize("more", [0, 1])
def test_the_wheels_model_has_the_bits_of_the_whole(version, more, sglang_wheel):
    wheel, rows = sglang_wheel(version), RANKS * ROWS + more
    each = -(-rows // RANKS)

    def body(coordinator):
        whole = run(model_of(wheel, version, patched=False), rows)
        before = list(coordinator.calls)
        coordinator.calls.clear()
        model = model_of(wheel, version, patched=True)
        found = run(model, rows)
        calls = list(coordinator.calls)
        same = [torch.equal(one, other) for one, other in zip(run(model, rows, captures=True), whole, strict=True)]
        assert whole[0].shape == (rows, HIDDEN) and whole[1].shape == (rows, 4 * HIDDEN) and whole[0].float().std() > 0
        return torch.equal(found[0], whole[0]) and found[1] is None and all(same), before, calls

    for same, before, calls in Ranks(RANKS).each(body):
        assert same and before == [("sum", rows)] * SUMS
        gathers = [("all-gather", each)] * (SUMS - 1) + [("all-gather", each)]
        assert calls.count(("reduce-scatter", each * RANKS)) == SUMS, "the embedding's and every sublayer's"
        assert [call for call in calls if call[0] == "all-gather"] == gathers and len(calls) == SUMS + len(gathers)
    assert sorted(set(seen)) == [each, rows] and seen.count(each) == 2 * seen.count(rows)


@every_release(FIRST)
def test_few_rows_are_as_ever(version, sglang_wheel):
    wheel, rows = sglang_wheel(version), RANKS * ROWS - 1

    def body(coordinator):
        whole = run(model_of(wheel, version, patched=False), rows)
        found = run(model_of(wheel, version, patched=True), rows)
        return all(map(torch.equal, whole, found)) and coordinator.calls == [("sum", rows)] * (2 * SUMS)

    assert Ranks(RANKS).each(body) == [True] * RANKS


# ---- who reads what the model gives


@every_release(FIRST)
def test_only_the_logits_processor_reads_the_streams(version, sglang_wheel):
    """And of them V4.1's, which has late layers, the rows that are no padding."""
    forward = definition(sglang_wheel(version), "DeepseekV4ForCausalLM.forward")
    (call,) = (n for n in ast.walk(forward) if isinstance(n, ast.Call) and ast.unparse(n.func) == "self.model.forward")
    assert [ast.unparse(one) for one in call.args] == [
        *("input_ids", "positions", "forward_batch", "input_embeds", "pp_proxy_tensors")
    ]
    assert not call.keywords
    reads = [n for n in ast.walk(forward) if isinstance(n, ast.Name) and n.id == "pre_hc_head"]
    loads = [n for n in reads if isinstance(n.ctx, ast.Load)]
    (given,) = (
        k for n in ast.walk(forward) if isinstance(n, ast.Call) for k in n.keywords if "pre_hc_head" in ast.unparse(k)
    )
    late = [n for n in ast.walk(forward) if isinstance(n, ast.If) and "late_layer_start" in ast.unparse(n.test)]
    inside = [n for place in (given, *late) for n in ast.walk(place)]
    assert given.arg == "hidden_states_before_norm" and loads and all(n in inside for n in loads)
    assert len(late) == since(version, "0.5.21")


@every_release(FIRST)
def test_the_models_forward_has_one_caller(version, sglang_wheel):
    calls = [ast.unparse(n.func) for n in ast.walk(tree(sglang_wheel(version), MODEL)) if isinstance(n, ast.Call)]
    assert [one for one in calls if one in ("self.model.forward", "self.model", "model.forward")] == [
        "self.model.forward"
    ]


class Mode:
    """A batch's mode: only what it is called is true."""

    def __init__(self, *names):
        self.names = names

    def __getattr__(self, name):
        return lambda *_, **__: name in self.names


@every_release(FIRST)
@pytest.mark.parametrize("with_logprobs", [False, True])
def test_a_prompt_whose_states_nobody_captures_needs_no_streams(version, with_logprobs, sglang_wheel):
    wheel = sglang_wheel(version)
    names = {"torch": torch, "is_pin_memory_available": lambda: False}
    pruned = take(wheel, dict(names), "LogitsProcessor._get_pruned_states", LOGITS)
    stored = take(wheel, dict(names), "LogitsProcessor._get_hidden_states_to_store", LOGITS)
    metadata = layers.Part(
        **{"forward_mode": Mode("is_extend"), "extend_return_logprob": with_logprobs, "padded_static_len": -1},
        **{"extend_seq_lens": torch.tensor([3, 4]), "extend_seq_lens_cpu": [3, 4], "capture_hidden_mode": Mode()},
        extend_logprob_start_lens_cpu=[0, 1],
    )
    hidden, streams = torch.randn(7, 8), torch.randn(7, 32)

    def of(streams):
        found = pruned(layers.Part(), hidden, streams, None, metadata)
        return found[0], stored(layers.Part(), hidden, streams, None, found[0], found[1], None, found[3], metadata)

    (without, nothing), (having, nothing_either) = of(None), of(streams)
    assert torch.equal(without, having) and len(without) in (2, 6) and nothing is nothing_either is None
    metadata.capture_hidden_mode = Mode("need_capture", "is_full")
    assert of(streams)[1] is streams, "captured, they are what is given back"


# ---- what a pass is told by


@every_release(FIRST)
def test_capture_is_asked_of_the_batch(version, sglang_wheel):
    names = {"IntEnum": enum.IntEnum, "auto": enum.auto, "total_ordering": total_ordering}
    mode = take(sglang_wheel(version), names, "CaptureHiddenMode", BATCH)
    assert {one.name: one.need_capture() for one in mode} == {"NULL": False, "LAST": True, "FULL": True}
    batch = definition(sglang_wheel(version), "ForwardBatch", BATCH)
    fields = {ast.unparse(n.target): n.value for n in batch.body if isinstance(n, ast.AnnAssign)}
    assert ast.unparse(fields["capture_hidden_mode"]) == ast.unparse(fields["tbo_children"]) == "None"
    told = ast.unparse(definition(sglang_wheel(version), "LogitsMetadata.from_forward_batch", LOGITS))
    assert "capture_hidden_mode=forward_batch.capture_hidden_mode" in told, "the processor asks the same, behind it"


@every_release(FIRST)
def test_no_rank_has_a_part_of_the_rows_to_begin_with(version, sglang_wheel):
    """This model's embedding is always summed: SGLang's attention on scattered inputs leaves it out."""
    wheel = sglang_wheel(version)
    (asked,) = (
        n
        for n in ast.walk(definition(wheel, "DeepseekV4ForCausalLM.__init__"))
        if isinstance(n, ast.Call) and ast.unparse(n.func).endswith(".init_context")
    )
    assert [(k.arg, ast.unparse(k.value)) for k in asked.keywords] == [("is_dsa", "True")]
    places = ("sglang.srt.layers.layer_boundary.adapters.attention", "sglang.srt.layers.communicator")
    (place, *_) = (one for one in places if "class AttnTpContext" in (WheelSources(wheel).read(one) or ""))
    allowed = ast.unparse(definition(wheel, "AttnTpContext.init_context", place))
    assert "not is_dsa" in allowed and "is_mhc=True" not in allowed


@every_release(FIRST)
def test_attentions_group_is_the_tensor_parallel_one_only_where_it_has_all_its_ranks(version, sglang_wheel):
    made = definition(sglang_wheel(version), "initialize_model_parallel", STATE)
    whole = [n for n in ast.walk(made) if isinstance(n, ast.If) and "_ATTN_TP = _TP" in map(ast.unparse, n.body)]
    assert [ast.unparse(n.test) for n in whole] == ["attn_tp_size == tensor_model_parallel_size"]
