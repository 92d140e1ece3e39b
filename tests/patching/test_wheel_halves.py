"""SGLang's forward, batch and coordinator, taken out of the wheels and run on the CPU with both patches in them: in
halves as whole. And what the adapter relies on in each release: what layers ask a batch for, what a forward leaves on
its attention backend, and the names that say when a batch is left whole."""

import ast
import dataclasses
from contextlib import nullcontext
from types import MethodType, SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches.adapters import alike, halves_batch
from deepseek_v4_sm120.sglang_patches.adapters import halves as adapter
from deepseek_v4_sm120.sglang_patches.rows.mhc import MTP_MODEL
from tests.adapters.test_halves import Attention, Coordinator, asked, in_place
from tests.adapters.test_halves_batch import batch_of
from tests.patching.test_wheel_all_reduce import NCCL, OnACard, coordinator_of
from tests.patching.test_wheel_mhc_sum import QuietContext
from tests.patching.test_wheel_wo_a import Quiet, definition, source, take
from tests.patching.wheels import WheelSources, every_release, since, tree

FIRST = "0.5.13"
BATCH = "sglang.srt.model_executor.forward_batch_info"
LAYERS, WIDTH = 3, 4
# Fields that an ordinary prompt's batch of this model leaves empty: of other models, of data, context and expert
# parallelism, of graphs, of what batches are left whole for. A batch in which one says something is left whole.
EMPTY = {
    *("encoder_cached", "encoder_lens", "encoder_lens_cpu", "encoder_out_cache_loc", "input_embeds", "lora_ids"),
    *("mamba_clear_indices", "mamba_cow_dst_indices", "mamba_cow_src_indices", "mamba_track_indices"),
    *("mamba_track_mask", "mamba_track_seqlens", "mamba_prefill_track_mask_cpu", "mamba_track_seqlens_cpu"),
    *("mm_inputs", "mm_token_modalities", "mm_input_embeds", "mrope_positions", "multi_item_delimiter_indices"),
    *("replace_embeds", "replace_positions", "token_type_ids", "token_indices_to_pool", "decision_layouts"),
    *("global_forward_mode", "global_num_tokens_cpu", "global_num_tokens_gpu", "global_num_tokens_padded_cpu"),
    *("global_num_tokens_for_logprob_cpu", "global_num_tokens_for_logprob_gpu", "original_global_num_tokens_cpu"),
    *("global_late_layer_num_tokens_cpu", "global_dp_buffer_len", "dp_spec_prefill_coordination_applied"),
    *("_original_batch_size", "_original_forward_mode", "_original_num_tokens", "attn_tp_sequence_sharded"),
    *("num_token_non_padded", "global_num_token_non_padded", "dcp_kv_mask", "attn_cp_metadata", "residual_stream"),
    *("tbo_split_seq_index", "tbo_children", "tbo_parent_token_range", "ngram_embedding_info", "engram_history"),
    *("engram_staged_rows", "out_cache_loc_dsv4", "out_cache_loc_virtual", "origin_out_cache_loc"),
    *("watermark_context_hash_history", "watermark_prompt_tail_ids", "dllm_prompt_mask", "max_seq_len_override"),
    *("encoder_swa_replay", "encoder_swa_row_floor", "encoder_swa_compress_rows"),
}
# attributes that are no fields: what the class computes, and what SGLang sets aside while it pads a batch
COMPUTED = {"can_run_tbo", "hidden_states_backup", "output_cache_loc_backup", "use_pin_memory"}
ASKING = (  # the modules whose code runs between a model's forward and its sums
    *(adapter.MODEL, adapter.BACKEND, "sglang.srt.models.deepseek_v4_boundary", "sglang.srt.models.deepseek_v2"),
    *("sglang.srt.layers.attention.dsv4.indexer", "sglang.srt.layers.attention.dsv4.compressor"),
    *("sglang.srt.layers.attention.dsv4.compressor_v2", "sglang.srt.models.deepseek_common.moe_transport"),
    *("sglang.srt.layers.moe.topk", "sglang.srt.layers.moe.hash_topk"),
)


@pytest.fixture
def here(monkeypatch):
    return in_place(monkeypatch.setattr, monkeypatch.setitem)


# ---- the model's forward


class Layer:
    """Asks for two sums, called as SGLang's; `cache` makes a token depend on those before it."""

    def __init__(self, attention, all_reduce):
        self.attention, self.all_reduce = attention, all_reduce
        self.cache = torch.zeros(9_000, dtype=torch.float64)

    def __call__(self, positions, hidden_states, forward_batch, input_ids, input_ids_global, **_):
        assert torch.equal(positions, forward_batch.positions) and torch.equal(input_ids, input_ids_global)
        if isinstance(self.attention.forward_metadata, SimpleNamespace):
            assert self.attention.forward_metadata is forward_batch
        self.cache[positions] = hidden_states[:, 0, 0]
        seen = self.cache.cumsum(0)[positions]
        hidden_states = (hidden_states + self.all_reduce(seen[:, None].clone())[:, :, None]) % 1009
        hidden_states = (hidden_states + self.all_reduce(2 * hidden_states.flatten(1)).view_as(hidden_states)) % 1009
        return hidden_states, None, None, None


class Packer:
    """0.5.23's: one tensor of all that is captured."""

    def __init__(self, count):
        self.count, self.found = count, []

    def slot(self, like):
        self.found.append(torch.empty_like(like))
        return self.found[-1]

    append = extend = None

    def finalize(self):
        return torch.cat(self.found, dim=-1)


def model_of(wheel, attention, all_reduce, captured):
    names = {
        **{"torch": torch, "nullcontext": nullcontext, "get_attn_backend": lambda: attention},
        "get_global_expert_distribution_recorder": QuietContext,
        "AuxHiddenStatePacker": Packer,
        "GIVEN": {
            "hc_broadcast": lambda x, count: x.unsqueeze(1).repeat(1, count, 1),
            "mhc_stream_mean": lambda x, out: out.copy_(x.mean(dim=1)),
        },
    }
    pipeline = SimpleNamespace(is_first_rank=True, is_last_rank=True, world_size=1)
    model = Quiet()
    vars(model).update(
        embed_tokens=lambda ids: all_reduce(ids.double()[:, None].repeat(1, WIDTH)),
        **{"pp_group": pipeline, "hc_mult": 2, "hidden_size": WIDTH, "start_layer": 0, "end_layer": LAYERS},
        layers=[Layer(attention, all_reduce) for _ in range(LAYERS)],
        dspark_layers_to_capture=captured,
        hc_head=lambda x, *_: x.sum(dim=1),
        norm=lambda x: x + 1,
    )
    if definition(wheel, "DeepseekV4Model._forward_impl") is not None:
        model._forward_impl = MethodType(take(wheel, dict(names), "DeepseekV4Model._forward_impl"), model)
    return model, take(wheel, names, "DeepseekV4Model.forward")


def flat(found):
    return [found] if isinstance(found, torch.Tensor) else [tensor for part in found for tensor in flat(part)]


@every_release(FIRST)
@pytest.mark.parametrize("captured", [None, [0, 2]], ids=["", "hidden states captured"])
def test_the_wheels_forward_in_halves_as_whole(version, captured, sglang_wheel, here, monkeypatch):
    if captured and not since(version, "0.5.16"):
        captured = None  # nothing captures before
    wheel, coordinator = sglang_wheel(version), Coordinator()
    monkeypatch.setattr(adapter, "_start_beside", coordinator.start_beside)
    replaced = adapter.replace_all_reduce(Coordinator.all_reduce)
    whole, forward = model_of(wheel, here.attention, coordinator.all_reduce, captured)
    halves, _ = model_of(wheel, here.attention, lambda x: replaced(coordinator, x), captured)
    batch = batch_of([2500], [256])
    expected = asked(forward, whole, batch)
    coordinator.rows.clear()
    found = asked(adapter.replace_model_forward(forward), halves, batch)
    assert adapter._seen == {"forwards": 1, "rows": 2500}
    assert len(flat(found)) == len(flat(expected)) == (2 if not captured else 3 if since(version, "0.5.23") else 4)
    assert all(map(torch.equal, flat(found), flat(expected))) and type(found) is type(expected)
    assert coordinator.rows == [1280, 1220] * (1 + 2 * LAYERS)


@every_release(FIRST)
def test_the_draft_has_a_forward_of_its_own(version, sglang_wheel):
    """Which is not patched: its chunks are one layer."""
    assert definition(sglang_wheel(version), "DeepseekV4ModelNextN.forward", MTP_MODEL.partition(":")[0]) is not None
    named = ast.unparse(definition(sglang_wheel(version), "DeepseekV4ForCausalLM.forward"))
    assert "self.model.forward(input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)" in named


# ---- the batch


@dataclasses.dataclass
class Mixin:
    """ForwardBatch's base, of which this model's layers ask nothing."""


@every_release(FIRST)
def test_the_wheels_batch_of_a_prompt_is_known_and_is_cut(version, sglang_wheel):
    names = {"dataclass": dataclasses.dataclass, "ForwardBatchDeepSeekMHAMixin": Mixin, "Optional": None}
    kind = take(sglang_wheel(version), names | {"Set": set, "Dict": dict}, "ForwardBatch", BATCH)
    fields = {field.name for field in dataclasses.fields(kind)}
    given = {name: value for name, value in vars(batch_of([5000, 300], [256, 0])).items() if name in fields}
    batch = kind(**given, lora_ids=[None, None], mm_inputs=[None, None])
    assert halves_batch.unknown_in(batch) == []
    first, second = halves_batch.halves_of(batch, halves_batch.cut_of([5000, 300], [256, 0]))
    assert type(first) is type(second) is kind
    assert (first.batch_size, first.extend_seq_lens_cpu, first.seq_lens.tolist()) == (1, [2560], [2816])
    assert (second.batch_size, second.extend_seq_lens.tolist()) == (2, [2440, 300])
    assert second.extend_prefix_lens.tolist() == [2816, 0] and second.extend_start_loc.tolist() == [0, 2440]
    assert {*halves_batch.TOKENS, *adapter.NEEDED, "batch_size", "extend_num_tokens"} <= fields
    unknown = fields - halves_batch.KNOWN - {"mm_inputs", "lora_ids"}
    assert unknown and all(not halves_batch._says_something(getattr(batch, name)) for name in unknown)


@every_release(FIRST)
def test_what_fills_a_batch_is_known_or_left_empty_by_a_prompt(version, sglang_wheel):
    """Of all that the class's own methods set; what is in neither list would leave every prompt whole."""
    made, names = definition(sglang_wheel(version), "ForwardBatch", BATCH), set()
    for node in ast.walk(made):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "cls":
            names |= {keyword.arg for keyword in node.keywords}
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if ast.unparse(node.value) in ("self", "ret") else set()
    assert {"positions", "extend_seq_lens_cpu", "lora_ids"} <= names
    assert sorted(names - halves_batch.KNOWN - EMPTY - COMPUTED) == []


@every_release(FIRST)
def test_what_layers_ask_a_batch_for_is_known_or_empty(version, sglang_wheel):
    wheel = sglang_wheel(version)
    fields = {
        node.target.id for node in definition(wheel, "ForwardBatch", BATCH).body if isinstance(node, ast.AnnAssign)
    }
    asked_for = set()
    for module in ASKING:
        if WheelSources(wheel).path(module) is None:
            continue
        for node in ast.walk(tree(wheel, module)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "forward_batch":
                asked_for.add(node.attr)
    assert {"forward_mode", "out_cache_loc", "seq_lens_cpu"} <= asked_for
    assert sorted(asked_for & fields - halves_batch.KNOWN - EMPTY) == []
    kept = {name for name in asked_for & set(halves_batch.KEPT) if name in fields}
    same_for_both = {"forward_mode", "spec_info", "dp_padding_mode", "capture_hidden_mode", "is_extend_in_batch"}
    of_v41 = {"return_logprob", "extend_logprob_start_lens_cpu", "top_logprobs_nums"}
    assert kept <= same_for_both | of_v41, "what a layer asks for must be cut, or mean the same in both halves"


# ---- the attention backend


@every_release(FIRST)
def test_a_forward_leaves_nothing_else_on_its_backend(version, sglang_wheel):
    """Between two turns `forward_metadata` is all that a half has there: nothing else is assigned by what runs."""
    wheel = sglang_wheel(version)
    running = (
        *("init_forward_metadata", "_build_forward_metadata", "init_forward_metadata_prefill", "store_cache"),
        *("make_core_attn_metadata", "init_forward_metadata_indexer", "expand_prefill_casually", "forward"),
        *("_forward_attention", "get_swa_out_cache_loc", "init_forward_metadata_in_graph"),
    )
    found = set()
    for name in running:
        made = definition(wheel, f"DeepseekV4AttnBackend.{name}", adapter.BACKEND)
        nodes = ast.walk(made) if made is not None else ()
        found |= {
            node.attr
            for node in nodes
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
        }
    of_v41 = {"tail_forward_metadata", "encoder_replay", "encoder_row_floor"}  # the same for both halves: empty
    assert "forward_metadata" in found and found <= {"forward_metadata", *of_v41}
    written = ast.unparse(definition(wheel, "DeepseekV4AttnBackend.init_forward_metadata", adapter.BACKEND))
    assert "self.forward_metadata = self._build_forward_metadata(forward_batch)" in written
    assert "self.hisparse_coordinator = " in source(wheel, adapter.BACKEND)


@every_release(FIRST)
def test_the_names_that_say_when_a_batch_is_left_whole(version, sglang_wheel):
    wheel = sglang_wheel(version)
    sources = WheelSources(wheel)
    fields = "".join(
        sources.read(member.removesuffix(".py").replace("/", "."))
        for member in sources.members
        if member == "sglang/srt/server_args.py" or "/arg_groups/fields/" in member and member.endswith(".py")
    )
    assert [name for name in adapter.OTHERS if f"    {name}: " not in fields] == []
    model = source(wheel, adapter.MODEL)
    for name in ("get_is_capture_mode", "is_in_breakable_cuda_graph"):
        assert f"    {name},\n" in model and f"{name}()" in model
    assert "    SGLANG_OPT_USE_ONLINE_COMPRESS = Env" in source(wheel, adapter.ENVIRON)
    context = ast.unparse(definition(wheel, "get_attn_backend", adapter.FORWARD_CONTEXT))
    assert "return get_forward_context().attn_backend" in context
    assert "global _current" in source(wheel, adapter.FORWARD_CONTEXT), "both threads see one context"
    assert "EXTEND = auto()" in source(wheel, BATCH)
    assert alike.PARALLEL_STATE == "sglang.srt.distributed.parallel_state"


# ---- the coordinator


@every_release(FIRST)
def test_the_wheels_coordinator_sums_in_turn(version, sglang_wheel, monkeypatch):
    """NCCL's, in place, each half's when it is asked for; what comes back is what was given."""
    coordinator, order = coordinator_of(sglang_wheel(version), None), []

    def start_beside(call):
        found = call()
        order.append((found.shape[0], float(found[0, 0])))
        return found, lambda: order.append(("waited", found.shape[0]))

    monkeypatch.setattr(adapter, "_start_beside", start_beside)
    served = adapter.replace_all_reduce(type(coordinator).all_reduce)
    turns = adapter.Turns(lambda i: None)

    def half(i, rows):
        def run():
            adapter._running.hand_over = lambda: turns.hand_over(i)
            x = torch.ones(rows, 8, dtype=torch.bfloat16).as_subclass(OnACard)
            return served(coordinator, x) is x and served(coordinator, x) is x

        return run

    assert turns.run(half(0, 1024), half(1, 1100)) == [True, True]
    adapter._running.hand_over = None
    assert order == [
        *((1024, NCCL), (1100, NCCL), ("waited", 1024), (1024, NCCL), ("waited", 1100), (1100, NCCL)),
        *(("waited", 1024), ("waited", 1100)),
    ]


def test_the_stand_in_for_the_backend_is_what_the_wheels_have():
    assert {"forward_metadata", "init_forward_metadata", "hisparse_coordinator"} <= {*dir(Attention())}
