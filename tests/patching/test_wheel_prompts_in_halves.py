"""Prompts in halves with SGLang's own code around them, taken out of the wheels and run on the CPU by ranks that are
threads: each release's model, embedding and two layers; its batches; and what its backend keeps of a batch."""

import ast
import re
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.patching.engine import READY
from deepseek_v4_sm120.sglang_patches import device_gate
from deepseek_v4_sm120.sglang_patches.adapters import mhc as boundary
from deepseek_v4_sm120.sglang_patches.adapters import prompts_in_halves as adapter
from deepseek_v4_sm120.sglang_patches.names import BACKEND
from tests.adapters.dealt_streams_model import Ranks, _this, tokens
from tests.adapters.test_mhc_sum import HIDDEN
from tests.adapters.test_prompts_in_halves import in_halves
from tests.patching import test_wheel_mhc_dealt_streams as models
from tests.patching import test_wheel_mhc_sum as layers
from tests.patching.test_wheel_wo_a import definition
from tests.patching.test_wheels import found_in, inspect_wheel  # noqa: F401
from tests.patching.wheels import WheelSources, every_release, since

FIRST, RANKS, ROWS, PAGE = "0.5.14", 2, 16, 4
GRAPHS_SINCE = "0.5.23"
BATCH, RUNNERS = models.BATCH, "sglang.srt.model_executor"


@pytest.fixture(autouse=True)
def state(monkeypatch):
    found = in_halves(monkeypatch, ROWS, PAGE)
    monkeypatch.setattr(boundary.op, "mhc", models.mhc)
    monkeypatch.setattr(boundary.op, "mhc_post", layers.post_of)
    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    models.seen.clear()
    return found


def batch_of(lengths, before):
    rows, whole = sum(lengths), [n + m for n, m in zip(lengths, before, strict=True)]
    made = models.batch_of(False)
    made.forward_mode.name = "EXTEND"
    vars(made).update(
        input_ids=tokens(rows),
        positions=torch.arange(rows),
        out_cache_loc=torch.arange(rows),
        batch_size=len(lengths),
        req_pool_indices=torch.arange(len(lengths)),
        seq_lens=torch.tensor(whole),
        seq_lens_cpu=torch.tensor(whole),
        extend_seq_lens=torch.tensor(lengths),
        extend_seq_lens_cpu=list(lengths),
        extend_prefix_lens=torch.tensor(before),
        extend_prefix_lens_cpu=list(before),
        extend_start_loc=torch.tensor([0, *lengths]).cumsum(0)[:-1],
    )
    for name in (*adapter._NOT_CUT, "mm_inputs", "lora_ids", "rids"):
        vars(made).setdefault(name, None)
    return made


class Backend:
    """Whose metadata is the number of rows that it was asked for."""

    hisparse_coordinator, forward_metadata = None, None
    online_c128_mtp, token_to_kv_pool = SimpleNamespace(enabled=lambda: False), SimpleNamespace()
    model_runner = SimpleNamespace(is_draft_worker=False, model_config=SimpleNamespace(hidden_size=HIDDEN))

    def init(self, batch):
        self.forward_metadata = batch.extend_num_tokens if hasattr(batch, "extend_num_tokens") else len(batch.input_ids)


def halved(model, coordinator, backend):
    """The model's forward in halves, each of which knows its rank and finds its own metadata."""
    whole = type(model).forward

    def forward(self, input_ids, positions, batch, input_embeds, pp_proxy_tensors=None):
        _this.coordinator = coordinator
        assert backend.forward_metadata == len(input_ids) == len(positions)
        found = whole(self, input_ids, positions, batch, input_embeds, pp_proxy_tensors)
        assert backend.forward_metadata == len(input_ids)
        return found

    return adapter.replace_model_forward(forward)


@every_release(FIRST)
@pytest.mark.parametrize(("lengths", "before"), [([48], [8]), ([16, 16], [0, 0]), ([3, 50, 9], [1, 6, 0])])
def test_the_wheels_model_has_the_bits_of_the_whole(version, lengths, before, sglang_wheel):
    wheel, cut = sglang_wheel(version), adapter.Cut(lengths, before)

    def body(coordinator):
        batch = batch_of(lengths, before)
        model = models.model_of(wheel, version, patched=False)
        whole = model.forward(batch.input_ids, batch.positions, batch, None)
        before_, backend = list(coordinator.calls), Backend()
        coordinator.calls.clear()
        batch = batch_of(lengths, before)
        adapter.replace_init_forward_metadata(Backend.init)(backend, batch)
        found = halved(model, coordinator, backend)(model, batch.input_ids, batch.positions, batch, None)
        same = [torch.equal(one, other) for one, other in zip(found, whole, strict=True)]
        assert whole[0].float().std() > 0 and backend.forward_metadata == cut.whole
        return all(same), before_, list(coordinator.calls)

    halves = [("sum", cut.rows), ("sum", cut.whole - cut.rows)]
    for same, before_, calls in Ranks(RANKS).each(body):
        assert same and before_ == [("sum", cut.whole)] * models.SUMS
        assert calls == halves * models.SUMS, "the embedding's and each sublayer's, by turns"
    assert adapter._seen["passes"] == RANKS and not adapter._left


@every_release(FIRST)
def test_the_places_fit(inspect_wheel, version):  # noqa: F811
    for chosen, rows in (("on", 0), ("2048", 2048)):
        made = inspect_wheel(version, patch=adapter.PATCH, **{adapter.PATCH: chosen})
        found = [(record.state, record.review) for record in found_in(made, patch=adapter.PATCH)]
        assert (
            found == [(READY, "reviewed")] * (5 if since(version, GRAPHS_SINCE) else 2)
            and made.steering.value(adapter.PATCH) == rows
        )


# ---- batches


def fields(wheel) -> dict:
    batch = definition(wheel, "ForwardBatch", BATCH)
    return {ast.unparse(n.target): ast.unparse(n.annotation) for n in batch.body if isinstance(n, ast.AnnAssign)}


# what a target's prompt has none of, or what nobody asks a half: the head is the whole batch's
OF_OTHERS = {
    *("encoder_lens", "encoder_out_cache_loc", "encoder_cached", "encoder_lens_cpu", "cross_attention_custom_mask"),
    *("hidden_states", "residual", "model_specific_states", "split_index", "mrope_positions", "topk_indices"),
    *("multi_item_delimiter_indices", "token_indices_to_pool", "decision_layouts", "dllm_prompt_mask"),
    *("dllm_input_preparation_state", "ngram_embedding_info", "engram_history", "engram_staged_rows", "dimensions"),
    *("replace_positions", "llada_image_conditioning_text_lens_cpu", "minimax_m3_precached_sparse_layers"),
    *("mm_token_modalities", "multi_gate_indices", "reuse_mtp_topk_indices", "reuse_dsa_topk_indices"),
    *("rids_int", "bootstrap_room_ids_int", "req_all_ids_flat", "req_all_ids_lens", "dcp_kv_mask", "_attn_output"),
    *("watermark_prompt_tail_ids", "watermark_context_hash_history", "origin_out_cache_loc"),
}
OF_THE_HEAD = {
    *("sampling_info", "temperature", "top_p", "top_logprobs_nums", "token_ids_logprobs", "next_token_logits_buffer"),
    *("extend_input_logprob_token_ids_gpu", "aux_hidden_states_buffer", "return_logprob", "spec_info"),
    *("capture_hidden_mode", "return_hidden_states_before_norm", "return_pooled_hidden_states", "is_prefill_only"),
    *("contains_last_prefill_chunk", "defer_logits_to_eager", "kv_loc_plan", "kv_loc_cols", "mm_inputs"),
}
# of data, context or two-batch parallelism, which keeps a pass whole; of graphs; and what halves have alike
OF_PARALLELISM = ("global_", "dp_", "tbo_", "original_global", "_original", "attn_tp_sequence_sharded", "mamba_")
ALIKE = {
    *("forward_mode", "spec_algorithm", "residual_stream", "out_cache_loc_is_physical", "padded_static_len"),
    *("is_extend_in_batch", "all_extend_in_batch", "full_prefill_cuda_graph_capture"),
}
IN_GRAPHS = ("can_run_", "forward_metadata_", "max_seq_len_")


@every_release(FIRST)
def test_every_field_of_a_batch_is_known(version, sglang_wheel):
    """A field that a new release has is looked at before a half may have the whole's."""
    own = {"batch_size", "seq_lens_sum", "extend_num_tokens", "num_token_non_padded", "num_token_non_padded_cpu"}
    known = own | ALIKE | OF_THE_HEAD | OF_OTHERS | {*adapter.ROW_FIELDS, *adapter.REQUESTS, *adapter._NOT_CUT}
    left = {name for name in fields(sglang_wheel(version)) if name not in known and not name.startswith(OF_PARALLELISM)}
    assert {name for name in left if not name.startswith(IN_GRAPHS)} == set()
    assert {*adapter.ROW_FIELDS, "seq_lens", "extend_start_loc"} <= set(fields(sglang_wheel(version)))


@every_release(FIRST)
def test_a_batch_takes_attributes_that_it_has_no_field_for(version, sglang_wheel):
    batch = definition(sglang_wheel(version), "ForwardBatch", BATCH)
    assert [ast.unparse(one) for one in batch.decorator_list] == ["dataclass"], "no slots: a copy is one of its dict"


# ---- the backend


def written_by(wheel, method: str) -> set:
    """Attributes of the backend that a method of it, and those that it calls, write."""
    found, seen, left = set(), set(), [method]
    while left:
        name = left.pop()
        node = None if name in seen else definition(wheel, f"DeepseekV4AttnBackend.{name}", BACKEND)
        seen.add(name)
        if node is None:
            continue
        for one in ast.walk(node):
            if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self":
                left += [one.attr]
                found |= {one.attr} if isinstance(one.ctx, ast.Store) else set()
    return found


@every_release(FIRST)
def test_what_a_backend_keeps_of_a_prompts_batch(version, sglang_wheel):
    """forward_metadata is each half's own. The others are of DeepSeek-V4.1, of verification and of graphs, or are what
    the next layer's call writes before it reads it."""
    found = written_by(sglang_wheel(version), "init_forward_metadata")
    newer = {"encoder_replay", "encoder_row_floor", "tail_forward_metadata"}  # of V4.1, the batch's own: both alike
    of_graphs = {"cuda_graph_swa_out_cache_loc", "draft_metadata_glued", "_verify_mask", "_early_verify_metadata_ids"}
    of_graphs |= {"extend_seq_lens_buffer", "_bcg_tail_capacity", "_bcg_tail_buffers"}
    assert "forward_metadata" in found
    assert found - {"forward_metadata"} - of_graphs <= (newer if since(version, "0.5.21") else set())


@every_release(FIRST)
def test_metadata_are_made_once_for_a_pass_in_front_of_it(version, sglang_wheel):
    """By the runner of eager passes, with the batch that the model is given, and before what is read is let go."""
    module = f"{RUNNERS}.runner.eager_runner"
    text = WheelSources(sglang_wheel(version)).read(module)
    calls = [
        (one.lineno, ast.unparse(one.func))
        for one in ast.walk(ast.parse(text))
        if isinstance(one, ast.Call) and "_extend" not in ast.unparse(one.func)
    ]
    made = [line for line, name in calls if name.endswith("model_runner.attn_backend.init_forward_metadata")]
    runs = [line for line, name in calls if name.endswith("model_runner.model.forward")]
    let_go = [line for line, name in calls if name in ("maybe_publish_prefill_shared_read_done",)]
    assert made and runs and any(first < then for first in made for then in runs)
    assert all(any(first < one for first in made) for one in let_go)


@every_release(FIRST)
def test_what_looks_at_experts_is_where_it_is_asked(version, sglang_wheel):
    """And what looks at the indexers' choices has rows for the first of a pass, too, but no tensor parallelism."""
    wheel = sglang_wheel(version)
    assert definition(wheel, "get_global_experts_capturer", adapter.CAPTURERS) is not None
    for name in ("get_global_expert_distribution_recorder", "_ExpertDistributionRecorderReal"):
        assert definition(wheel, name, adapter.RECORDERS) is not None
    of_indexers = WheelSources(wheel).read(adapter.CAPTURERS.rpartition(".")[0] + ".indexer_topk")
    assert re.search(r"attn_tp_size == 1\b|get_attention_tp_size\(\) == 1\b", of_indexers)
