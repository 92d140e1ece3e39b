"""SGLang's indexer, taken out of the wheels and run on the CPU by ranks that are threads, both patches in it: all have
the lists of the whole call. And what the adapter relies on in each release: groups, modes, exchanges, schedules."""

import ast
import enum
import threading
from types import MethodType, SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches.adapters import index_select as select_adapter
from deepseek_v4_sm120.sglang_patches.adapters import index_select_dealt as adapter
from deepseek_v4_sm120.sglang_patches.table import INDEXER, METADATA
from tests.adapters.test_index_select import K, expected, stock_logits, stock_topk
from tests.adapters.test_index_select_dealt import COLUMNS, Ranks, inputs_of, on_the_cpu, scored  # noqa: F401
from tests.patching.test_wheel_wo_a import Quiet, definition, source, take
from tests.patching.wheels import every_release, since, tree

BATCH = "sglang.srt.model_executor.forward_batch_info"
FIRST, RANKS = "0.5.13", 2
_this = threading.local()  # coordinator: the rank's


class PagedIndexerMetadata:
    """The fields that the indexer reads, under the names of all releases. cut: rows of a chunk of a schedule."""

    page_size, compressed_page_size, c4_page_size = 256, 64, 64
    topk_metadata = topk_metadata_chunks = None

    def __init__(self, inputs, cut):
        self.page_table, rows = inputs.page_table, inputs.q.shape[0]
        self.compressed_seq_lens = self.c4_seq_lens = inputs.lengths
        self.max_compressed_seq_len = self.max_c4_seq_len = 64 * COLUMNS
        self.rows_per_chunk = cut
        self.deep_gemm_metadata = None if cut is None else [torch.zeros(1)] * -(-rows // cut)


class Backend(Quiet):
    """DeepseekV4AttnBackend as far as its indexer asks it, for one prompt."""

    debug_use_external_c4_sparse_indices, hisparse_coordinator = False, None

    def __init__(self, version, inputs, cut, raw):
        self.inputs, rows = inputs, inputs.q.shape[0]
        self.out = torch.full((rows, K), -9, dtype=torch.int32)
        indexer_metadata = PagedIndexerMetadata(inputs, cut)
        core = SimpleNamespace(positions=torch.zeros(rows), page_table=inputs.page_table, c4_sparse_raw_indices=raw)
        core.c4_sparse_page_indices = self.out
        self.forward_metadata = SimpleNamespace(indexer_metadata=indexer_metadata, core_metadata=core)
        self.forward_metadata.core_attn_metadata = core
        keys = inputs.k_pages.view(inputs.k_pages.shape[0], -1)
        self.token_to_kv_pool = SimpleNamespace(get_index_k_with_scale_buffer=lambda layer_id: keys)
        self.prepared = (inputs.q[:, 0], inputs.weights[:, :, None])
        self.prepared += () if since(version, "0.5.15") else (keys,)

    def _forward_prepare_normal(self, **_):
        return self.prepared

    def _get_nonpaged_indexer_plan(self, **_):
        return None


def chunks(num_rows, rows_per_chunk):
    return [slice(start, min(start + rows_per_chunk, num_rows)) for start in range(0, num_rows, rows_per_chunk)]


def indexer_of(wheel, version):
    """run(coordinator, inputs, cut, raw) -> the lists that C4Indexer.forward leaves in the wheel's backend."""
    topk = select_adapter.replace_topk(stock_topk)
    names = {
        **{"torch": torch, "F": torch.nn.functional, "PagedIndexerMetadata": PagedIndexerMetadata},
        **{"get_global_indexer_capturer": lambda: None, "iter_row_chunks": chunks, "_SM120_INDEXER_M_CHUNK": 5},
        **{"topk_transform_512": topk, "topk_transform_paged": topk},
        "GIVEN": {"fp8_paged_mqa_logits": select_adapter.replace_logits(stock_logits)},
    }
    inner = take(wheel, names, "C4IndexerBackendMixin.forward_c4_indexer", INDEXER)
    forward = adapter.replace_forward(select_adapter.replace_forward(inner))
    outer = take(wheel, {}, "C4Indexer.forward", INDEXER)

    def run(coordinator, inputs, cut=None, raw=None):
        _this.coordinator = coordinator
        backend, indexer = Backend(version, inputs, cut, raw), Quiet()
        backend.forward_c4_indexer = MethodType(forward, backend)
        mode = SimpleNamespace(is_decode=lambda: False, is_extend_without_speculative=lambda: True)
        mode.is_idle = mode.is_target_verify = lambda: False
        rows = inputs.q.shape[0]
        batch = SimpleNamespace(forward_mode=mode, extend_seq_lens_cpu=[rows], extend_prefix_lens_cpu=[700])
        outer(indexer, x=torch.zeros(rows, 4), q_lora=torch.zeros(rows, 4), forward_batch=batch, attn_backend=backend)
        return backend.out

    return run


@pytest.fixture
def rank_of(monkeypatch):
    monkeypatch.setattr(adapter, "_group", lambda: _this.coordinator)


@every_release(FIRST)
def test_the_wheels_indexer_gives_all_ranks_the_lists_of_the_whole_call(version, sglang_wheel, rank_of):
    run, inputs = indexer_of(sglang_wheel(version), version), [inputs_of(11, rank=rank) for rank in range(RANKS)]

    def with_entries(coordinator):
        raw = torch.full((11, K), -9, dtype=torch.int32)
        return run(coordinator, inputs[coordinator.rank_in_group], raw=raw), raw

    assert torch.equal(run(None, inputs[0]), expected(inputs[0])[0]) and scored == [11]
    for (slots, entries), one in zip(Ranks(RANKS).each(with_entries), inputs, strict=True):
        assert torch.equal(slots, expected(one)[0]) and torch.equal(entries, expected(one)[1])
    assert sorted(scored) == [5, 6, 11]


@every_release("0.5.20")
def test_rows_that_each_card_cuts_by_itself_are_not_dealt(version, sglang_wheel, rank_of, monkeypatch):
    """0.5.21 and later: by the free memory of the card, so one may have two chunks where another has three."""
    monkeypatch.setattr(adapter, "is_worth_it", lambda *sizes: True)
    run, inputs = indexer_of(sglang_wheel(version), version), inputs_of(11)
    gathers = SimpleNamespace(world_size=RANKS, rank_in_group=0)  # has no all-gather
    assert torch.equal(run(gathers, inputs, cut=5), expected(inputs)[0])
    assert scored == [5, 5, 1]


@every_release(FIRST)
def test_rows_are_cut_only_where_there_is_a_schedule(version, sglang_wheel):
    """The one branch without DeepGEMM's metadata, which the torch and TileLang logits of SM120 get, cuts nothing."""
    made = definition(sglang_wheel(version), "PagedIndexerMetadata.__post_init__", METADATA)
    (choice,) = (n for n in made.body if isinstance(n, ast.If) and "deep_gemm_metadata" in ast.unparse(n))
    assert [ast.unparse(statement) for statement in choice.body] == ["self.deep_gemm_metadata = None"]
    assert "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH" in ast.unparse(choice.test)
    outside = "\n".join(ast.unparse(n) for n in made.body if n is not choice)
    assert "rows_per_chunk =" not in outside and "_SM120_INDEXER_M_CHUNK" not in outside
    assert ("_mqa_logits_budget" in ast.unparse(choice)) == since(version, "0.5.21")


@every_release(FIRST)
def test_a_prompt_is_what_the_mode_calls_extend_without_speculation(version, sglang_wheel):
    names = {"IntEnum": enum.IntEnum, "auto": enum.auto}
    mode = take(sglang_wheel(version), names, "ForwardMode", BATCH)
    dealt = {member.name for member in mode if member.is_extend_without_speculative()}
    assert dealt - {"SPLIT_PREFILL", "DLLM_EXTEND"} == {"EXTEND", "MIXED"}
    assert {"DECODE", "IDLE", "TARGET_VERIFY"} <= {member.name for member in mode} - dealt
    assert not [name for name in dealt if "DRAFT" in name]


@every_release(FIRST)
def test_a_prompts_batch_has_its_lengths_on_the_host(version, sglang_wheel):
    """Of all ranks alike: the scheduler's lists, where the rows come of them."""
    made = definition(sglang_wheel(version), "ForwardBatch.init_new", BATCH)
    (given,) = [
        n
        for n in ast.walk(made)
        if isinstance(n, ast.If) and "isinstance(extend_seq_lens, list)" in ast.unparse(n.test)
    ]
    words = [ast.unparse(n) for n in given.body]
    for name in ("extend_seq_lens", "extend_prefix_lens"):
        assert {f"ret.{name}_cpu = {name}", f"ret.{name}_cpu = list({name})"} & set(words)


@every_release(FIRST)
def test_the_attentions_group_is_the_tensor_parallel_one_where_the_sizes_match(version, sglang_wheel):
    wheel = sglang_wheel(version)
    made = definition(wheel, "initialize_model_parallel", adapter.PARALLEL_STATE)
    same = [n for n in ast.walk(made) if isinstance(n, ast.If) and ast.unparse(n.body[0]) == "_ATTN_TP = _TP"]
    assert [ast.unparse(n.test) for n in same] == ["attn_tp_size == tensor_model_parallel_size"]
    tp, others = object(), {"_ATTN_TP": object(), "_MOE_EP": object(), "_ENABLE_PDMUX_P_TP": False}
    published = SimpleNamespace(tp_group=tp, attn_tp_group=others["_ATTN_TP"], moe_ep_group=others["_MOE_EP"])
    names = {"_TP": tp, **others, "get_parallel": lambda: published, "_PDMUX_PREFILL_TP_GROUP": "multiplexed"}
    functions = ("get_tp_group", "get_attn_tp_group", "get_moe_ep_group")
    found = [take(wheel, dict(names), name, adapter.PARALLEL_STATE) for name in functions]
    assert [function() for function in found] == [tp, others["_ATTN_TP"], others["_MOE_EP"]]
    if since(version, "0.5.21"):
        assert "'tp_group': _TP" in ast.unparse(made) and "'attn_tp_group': _ATTN_TP" in ast.unparse(made)
    else:
        multiplexed = take(wheel, names | {"_ENABLE_PDMUX_P_TP": True}, "get_tp_group", adapter.PARALLEL_STATE)
        assert multiplexed() == "multiplexed"
    assert ("_DCP: " in source(wheel, adapter.PARALLEL_STATE)) == since(version, "0.5.15")


@every_release(FIRST)
def test_the_number_of_hosts_is_in_the_arguments(version, sglang_wheel):
    wheel = sglang_wheel(version)
    has_context = since(version, "0.5.14") and definition(wheel, "get_server_args", adapter.CONTEXT) is not None
    assert has_context == since(version, "0.5.15")
    if not has_context:
        assert definition(wheel, "get_global_server_args", adapter.SERVER_ARGS) is not None
    assert "nnodes" in source(wheel, adapter.SERVER_ARGS)


@every_release(FIRST)
@pytest.mark.parametrize("has_pynccl", [True, False])
def test_the_groups_all_gather_takes_bytes(version, has_pynccl, sglang_wheel):
    """One after the other by rank, by NCCL whichever way; on a side stream of torch's or on ours."""
    wheel, seen = sglang_wheel(version), []

    def gather(output, input, group=None):
        seen.append(group)
        output.copy_(torch.cat((input, 1 + input)))

    distributed = SimpleNamespace(all_gather_into_tensor=gather)
    names = {"torch": SimpleNamespace(distributed=distributed, uint8=torch.uint8), "is_hip": lambda: False}
    names["all_gather_single"] = gather
    body = take(wheel, names, "GroupCoordinator._all_gather_into_tensor", adapter.PARALLEL_STATE)
    group = Quiet()
    group.ca_comm = group.pymscclpp_comm = None
    nccl = SimpleNamespace(disabled=False, all_gather=gather)
    nccl.change_state = lambda enable: threading.Lock()
    group.pynccl_comm, group.device_group = nccl if has_pynccl else None, "cards"
    lists, output = torch.arange(6, dtype=torch.uint8).view(3, 2), torch.empty(6, 2, dtype=torch.uint8)
    body(group, output, lists)
    assert torch.equal(output, torch.cat((lists, 1 + lists))) and seen == [None if has_pynccl else "cards"]
    outer = definition(wheel, "GroupCoordinator.all_gather_into_tensor", adapter.PARALLEL_STATE)
    assert [a.arg for a in outer.args.args] == ["self", "output", "input"]


@every_release(FIRST)
def test_the_indexer_is_on_a_side_stream_only_where_the_call_says_so(version, sglang_wheel):
    """The model's forwards that put the indexer on a stream of its own hand it `enable_multi_stream`."""
    for node in ast.walk(tree(sglang_wheel(version), "sglang.srt.models.deepseek_v4")):
        if not isinstance(node, ast.With) or "cuda.stream(" not in ast.unparse(node.items[0]):
            continue
        calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and ast.unparse(n.func) == "self.indexer"]
        assert all("enable_multi_stream=True" in ast.unparse(call) for call in calls)
