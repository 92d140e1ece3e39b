"""Small SGLang-like trees on disk, and Pythons that run with our folder first on PYTHONPATH."""

import importlib
import logging
import sys
import textwrap
from pathlib import Path

import pytest

from deepseek_v4_sm120 import patching
from deepseek_v4_sm120.patching import import_hook, report
from deepseek_v4_sm120.sglang_patches import device_gate, models_served
from tests.loaded_python import Loaded
from tests.patching import wheels
from tests.patching.made_http import MESSAGES, RESPONSES
from tests.patching.made_sampling import DRAFT_EXTEND_GRAPHS, DRAFT_GRAPHS, EAGLE, LOGPROBS, SAMPLER
from tests.patching.made_scheduler import CHECKS, STAGES, TREE_CORE
from tests.patching.small_host import HOST
from tests.patching.started import Python, loaded, places, python_with_ours, resolving, run  # noqa: F401  fixtures

REPO = Path(__file__).resolve().parents[2]

KEYS = """
    q = kwargs["q"]
    read = [kwargs["k_cache"], kwargs["head_dim_v"], kwargs["indices"]]
    for name in (kwargs.get("softmax_scale"), kwargs.get("topk_length"), kwargs.get("attn_sink"),
                 kwargs.get("extra_k_cache"), kwargs.get("extra_indices_in_kvcache"), kwargs.get("extra_topk_length")):
        read.append(name)
"""
SM120_FUNCTION = f"def flash_mla_with_kvcache_sm120(**kwargs):{KEYS}    return (kwargs, q)\n"

BACKEND = """
from sglang.srt.utils.common import is_sm120_supported
_is_sm120, PAGE_INDEX_ALIGNED_SIZE = is_sm120_supported(), 64

class DeepseekV4AttnBackend:
    def forward(self, q, k, v, layer, forward_batch, compress_ratio, save_kv_cache=True, attn_sink=None, **_):
        from sglang.kernels.ops.attention.flash_mla_sm120 import flash_mla_with_kvcache_sm120
        return flash_mla_with_kvcache_sm120(q=q, k_cache=k, head_dim_v=512, indices=v)

    def init_forward_metadata_dspark_draft_block(
        self, max_seq_len, req_pool_indices, seq_lens, seq_lens_cpu, out_cache_loc, block_size
    ):
        return seq_lens_cpu

    def make_forward_metadata_from_raw_decode(self, raw_metadata):
        return raw_metadata

    def expand_extend_with_same_length(self, *, bs, qo_len, seq_lens, req_pool_indices): pass

def _pad_last_dim(x, multiples_of=PAGE_INDEX_ALIGNED_SIZE): pass

class DeepseekV4MultiStepBackend(DeepseekV4AttnBackend):
    def init_forward_metadata_in_graph(self, forward_batch):
        return forward_batch
"""

EXPERTS = """
class {name}:
    def process_weights_after_loading(self, layer):
        return layer

    def apply(self, layer, dispatch_output):
        return dispatch_output
"""
FP8 = """
class Fp8LinearMethod:
    def apply(self, layer, x, bias=None):
        return "original linear", x
"""
INDEXER = """
from sglang.srt.utils.common import is_sm120_supported

def topk_transform_512(scores, seq_lens, page_tables, out_page_indices, page_size, out_raw_indices=None):
    return "original top-k", scores
def topk_transform_512_v2(scores, seq_lens, page_tables, out_page_indices, page_size, metadata):
    return "original top-k 2", scores
def topk_transform_512_pytorch_vectorized(scores, *arguments):
    return "torch top-k", scores
def topk_transform_512_flashinfer_unfused(scores, *arguments):
    return "FlashInfer top-k", scores
def fp8_paged_mqa_logits_torch(
    q_fp8, kvcache_fp8, weight, seq_lens, page_table, deep_gemm_metadata, max_seq_len, clean_logits=True
):
    return "original torch logits"

class C4Indexer:
    def compute_weights(self, x, skip_scale=False):
        return "original weights", x

class C4IndexerBackendMixin:
    def forward_c4_indexer(self, x, q_lora, c4_indexer, forward_batch, topk=topk_transform_512):
        from sglang.kernels.ops.attention.dsa.tilelang_kernel import tilelang_fp8_paged_mqa_logits as fn
        return topk(fn(x, x, x, x, x, None, 64, False), x, x, x, 64)
"""
TILELANG = """
def tilelang_fp8_paged_mqa_logits(
    q_fp8, kvcache_fp8, weight, seq_lens, page_table, deep_gemm_metadata, max_seq_len, clean_logits=True
):
    return 'original logits'
"""

MODEL = """
from sglang.srt.utils.common import is_sm120_supported

def fused_rope_inplace(q, k, freqs_cis, positions, inverse=False):
    return "original rotation"

def _dequant_fp8_wo_a_streaming(weights):
    yield "original expansion"

class MQALayer:
    def __init__(self, config, layer_id, quant_config=None, prefix="", alt_streams=None, compress_ratio_override=None):
        self.wo_a = object()

    def forward(self, x, positions, forward_batch, x_quant=None):
        return "original attention"

    def _forward_prepare_multi_stream(self, x, positions, forward_batch, attn_backend, q_out=None, x_quant=None):
        return "original streams"

class DeepseekV4ForCausalLM:
    def __init__(self):
        self.model = object()

    def load_weights(self, weights, is_nextn=False):
        return weights

    def post_load_weights(self, is_nextn=False, weight_names=None):
        pass

    def set_embed_and_head(self, embed, head):
        pass

def _is_fused_mhc_post_pre_enabled():
    return False

class DeepseekV4DecoderLayer:
    def hc_pre(self, x, hc_fn, hc_scale, hc_base, norm=None, forward_batch=None):
        return x, x, x, False

    def hc_post(self, x, residual, post, comb):
        return residual

    def forward(self, positions, hidden_states, input_ids, forward_batch, input_ids_global):
        return hidden_states
"""
SCHEDULE_BATCH = """
class Req:
    def effective_kv_committed_len(self):
        return 0
    def update_finish_state(self, new_accepted_len=1): pass

class ScheduleBatch:
    def cumulate_penalty_output_tokens(self):
        pass

    def prepare_for_extend(self):
        pass

    def mix_with_running(self, running_batch):
        pass
"""
SCHEDULER = """
started = True

class Scheduler:
    def abort_request(self, recv_req): pass
    def _get_new_batch_prefill_raw(self, prefill_delayer_single_pass, running_batch):
        return None, running_batch

    def _should_defer_prefill(self, running_batch): pass
    def run_event_loop(self): pass
"""
SCHEDULE_POLICY = """
class PrefillAdder:
    def preempt_to_schedule(self, req, server_args): pass
    def add_chunked_req(self, req): pass
    def _select_prefill_admission(self, req, *, total_tokens, host_hit_length): pass
"""
PENALTY_LIBRARY = """
class BatchedPenalizerOrchestrator:
    def apply(self, logits, repeat=None): pass
"""
RESULTS = """
class SchedulerBatchResultProcessor:
    def process_batch_result_prefill(self, batch, result):
        pass

    def _apply_prefill_logprobs(
        self, *, req, i, logits_output, extend_input_len_per_req, extend_logprob_start_len_per_req, next_token_ids,
        logprob_pt,
    ):
        return logprob_pt

    def _apply_chunked_prefill_logprobs(
        self,
        *,
        req,
        i,
        logits_output,
        extend_input_len_per_req,
        extend_logprob_start_len_per_req,
        logprob_pt,
    ):
        return logprob_pt
"""
DRAFT_INPUT = """
class DFlashDraftInputV2:
    def prepare_for_decode(self, batch): pass
"""
ACCEPTANCE = """
def accept_draft_tokens(
    *, candidates, target_logits, draft_block, sampling_info, draft_input, gamma, verify_num_draft_tokens
):
    return candidates

def verify_logits_adjustments_are_noop(sampling_info):
    return True
"""
DSPARK_COMPONENTS, FREE_MEMORY = "srt/speculative/dspark_components", "def get_available_gpu_memory(*_): pass"
CHAIN = "from sglang.kernels.ops.speculative.reject_sampling import chain_speculative_sampling_triton\n"
WORKER = """
class TpModelWorker:
    def get_worker_info(self):
        return 4096, 16384, 8, None, 4095, 4090, 0, "cuda"
"""
GRAMMARS = """
class BaseGrammarBackend:
    def set_cache(self, key, value):
        self.cache[key] = value
"""
XGRAMMAR = "from sglang.srt.constrained.xgrammar import GrammarCompiler\n"
BITMASK = "def apply_token_bitmask_inplace_triton(logits, bitmask, indices=None):\n    return logits\n"
TOOL_CALLS = """
class DeepSeekV32Detector:
    def _parse_parameters_from_xml(self, invoke_content, allow_partial=False):
        return "{}"
"""
READER = """
class ReasoningParser:
    def parse_non_stream(self, full_text):
        return "", full_text

    def parse_stream_chunk(self, chunk_text):
        return "", chunk_text
"""
CHAT = """
class Draft202012Validator: pass

class OpenAIServingChat:
    def _check_for_unstreamed_tool_args(self, parser, content, request, index):
        return None

    async def _process_tool_call_stream(self, index, delta, parser_dict, content, request, has_tool_calls,
                                        continuous_usage_stats=False):
        yield delta

    def _get_reasoning_from_request(self, request):
        return False

    def _handle_last_assistant_message(self, messages, request): return messages, None
    def _validate_media_content(self, request): return None
    def _convert_to_internal_request(self, request, raw_request=None): return request, request

    def _apply_jinja_template(self, request, tools, is_multimodal):
        return request

    def _process_response_logprobs(self, ret_item):
        return ret_item

    def _process_streaming_logprobs(self, content, n_prev_token, total_output_logprobs):
        return content
"""
TAGS = "class BaseFormatDetector:\n    def get_structural_tag("
TAGS += "self, tools=None, tool_choice='auto', thinking_mode=False, parallel_tool_calls=True):\n        return None\n"
SAMPLING_PARAMS = "class SamplingParams:\n    def normalize(self, tokenizer):\n        pass\n"
STORAGE = "class HiCacheStorage:\n    def register_mem_host_pool_v2(self, host_pool, host_pool_name):\n        pass\n"
STORAGE += "class HiCacheFile:\n    def _get_suffixed_key(self, key):\n        return key\n"
RESPONSES_REQUEST = "class ResponsesRequest:\n    def to_sampling_params("
RESPONSES_REQUEST += "self, default_max_tokens=None, default_params=None):\n        return {}\n"
ANSWERS = """
def find_printable_text(text):
    return text

class TokenizerManager:
    async def _handle_batch_output(self, recv_obj):
        return recv_obj

    def _validate_one_request(self, obj, input_ids):
        return obj

    def _send_one_request(self, tokenized_obj):
        return tokenized_obj
    def detokenize_logprob_tokens(self, token_logprobs_val, token_logprobs_idx, decode_to_text): return []
"""
MTP_MODEL = """
class DeepseekV4ModelNextN:
    def forward(self, input_ids, positions, forward_batch, input_embeds=None): return input_embeds
    def hc_head(self, x, hc_fn, hc_scale, hc_base):
        return x
"""
DSPARK_MODEL = """
class DeepseekV4ForCausalLMDSpark:
    def attach_shared_modules(self, *, embed_tokens, lm_head):
        self.lm_head = lm_head

    def collapse_hc_head(self, x):
        return x

    def _logits_from_x_post_hc(self, x_post_hc):
        return x_post_hc

    def load_weights(self, weights):
        pass
"""
LOGITS_PROCESSOR = """
class LogitsProcessor:
    def _compute_lm_head(self, hidden_states, lm_head, embedding_bias=None):
        return hidden_states
"""
MHC_KERNELS = """
def mhc_fused_post_pre(x, residual, post_layer_mix, comb_res_mix, fn, hc_scale, hc_base, rms_eps, hc_pre_eps,
                       hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat, n_splits=1, tile_n=1, *, norm_weight=None,
                       norm_eps=None):
    return residual, post_layer_mix, comb_res_mix, x
"""
COMPRESSOR = """
class CompressorBackendMixin:
    def _forward_compress_all_in_one(self, *, kv_score_buffer, out_loc):
        return "original compressor"

def create_paged_compressor_data(compress_ratio, *, is_prefill, token_to_kv_pool, req_to_token, req_pool_indices,
                                 seq_lens, extend_lens=None, seq_lens_cpu=None, extend_lens_cpu=None,
                                 use_prefill_cuda_graph=False, num_q_tokens=None, online_state_slot_offset=0):
    return "original plan"
"""
STATE_POOL = """
class DeepSeekV4TokenToKVPool:
    def clear_unaccepted_c128_draft_states(self, req_pool_indices, seq_lens, accept_lens, num_draft_tokens):
        return "original states"
"""
GATE = """
class MoEGate:
    def forward(self, hidden_states, gemm_output_zero_allocator=None, forward_batch=None):
        return hidden_states
"""
COMMUNICATOR = "def dispatch_custom_allreduce(group, device):\n    return 'original communicator'\n"
GRAPHS = "class PrefillCudaGraphRunner:\n    def execute(self, forward_batch, **kwargs):\n        pass\n"
COPIES = "class HybridCacheController:\n" + "".join(
    f"    def start_{kind}(self):\n        pass\n\n" for kind in ("loading", "writing")
)
NCCL = "class PyNcclCommunicator:\n    def __init__(self, group, device):\n        pass\n"
PARALLEL_STATE = """
_WORLD = None


class GroupCoordinator:
    def __init__(self, group_ranks, device):
        from sglang.srt.distributed.device_communicators.custom_all_reduce import dispatch_custom_allreduce
        self.ca_comm = dispatch_custom_allreduce(group=group_ranks, device=device)

    def all_gather(self, input_, dim=-1, output_tensor_list=None):
        return input_
"""
MHC_HEAD = "def fused_hc_head(x, hc_fn, hc_scale, hc_base, norm_eps, hc_eps):\n    return x\n"
SHARED_ADD = (
    "def maybe_fuse_routed_scale_and_shared_add(experts, routed, shared, routed_scaling_factor):\n    return routed\n"
)
CHOICE = """
def biased_topk_jit_kernel_impl(
    hidden_states, gating_output, correction_bias, topk, renormalize, scoring_func="sigmoid",
    num_fused_shared_experts=0, routed_scaling_factor=None, num_token_non_padded=None,
    expert_location_dispatch_info=None, apply_routed_scaling_factor_on_output=False,
):
    return gating_output, topk
"""
LOADER = "".join(
    f"class {name}:\n    def load_model(self, *, model_config, device_config):\n        return model_config\n"
    for name in ("ShardedStateLoader", "PreshardedModelLoader", "RemoteModelLoader", "RemoteInstanceModelLoader")
)
HOLDER = "def check_ipc_quant_support(quant_method, quant_config, *, where):\n    pass\n"
DIRECT = "def _model_load_weights_direct(model, named_tensors):\n    return model\n"
DIRECT += "def dynamic_import(func_path):\n    return lambda model, named_tensors: model\n"

SERVER_ARGS = "from sglang.srt.utils.common import is_sm120_supported\n"
SERVER_ARGS += "class ServerArgs:\n    def _handle_model_specific_adjustments(self):\n        pass\n"

TREE_0_5_17 = {
    "sglang/__init__.py": "",
    "sglang/_version.py": "__version__ = version = '0.5.17'\n",
    "sglang/srt/managers/scheduler.py": SCHEDULER,
    "sglang/srt/managers/scheduler_pp_mixin.py": STAGES,
    "sglang/srt/managers/schedule_policy.py": SCHEDULE_POLICY,
    "sglang/srt/managers/scheduler_components/invariant_checker.py": CHECKS,
    "sglang/srt/session/session_controller.py": "class Session:\n    def create_req(self, req):\n        return req\n",
    "sglang/srt/arg_groups/deepseek_v4_hook.py": "def apply_deepseek_v4_defaults(server_args, model_arch):\n    pass\n",
    "sglang/srt/utils/common.py": "def is_sm120_supported():\n    return False\n"
    "def add_prometheus_middleware(app): pass\n",
    "sglang/srt/server_args.py": SERVER_ARGS,
    "sglang/srt/distributed/parallel_state.py": PARALLEL_STATE,
    "sglang/srt/distributed/device_communicators/custom_all_reduce.py": COMMUNICATOR,
    "sglang/srt/distributed/device_communicators/pynccl.py": NCCL,
    "sglang/srt/model_executor/runner/prefill_cuda_graph_runner.py": GRAPHS,
    "sglang/srt/mem_cache/hybrid_cache/hybrid_cache_controller.py": COPIES,
    "sglang/srt/mem_cache/hicache_storage.py": STORAGE,
    "sglang/srt/mem_cache/radix_cache.py": "class RadixKey:\n    def match(self, other, page_size=1): pass\n",
    "sglang/srt/mem_cache/unified_cache/unified_tree_core.py": TREE_CORE,
    "sglang/srt/layers/attention/deepseek_v4_backend.py": BACKEND,
    "sglang/srt/layers/attention/dsv4/indexer.py": INDEXER,
    "sglang/kernels/ops/attention/dsa/tilelang_kernel.py": TILELANG,
    "sglang/srt/layers/attention/dsv4/compressor.py": "def linear_bf16_fp32(x, y):\n    return x\n",
    "sglang/srt/layers/attention/dsv4/compressor_v2.py": COMPRESSOR,
    "sglang/srt/mem_cache/deepseek_v4_memory_pool.py": STATE_POOL,
    "sglang/srt/model_executor/model_runner_components/weight_updater.py": DIRECT,
    "sglang/srt/model_loader/loader.py": LOADER,
    "sglang/srt/weight_cache/protocol.py": HOLDER,
    "sglang/srt/models/deepseek_v2.py": SHARED_ADD + GATE,
    "sglang/srt/models/deepseek_v4.py": MODEL,
    "sglang/srt/models/deepseek_v4_nextn.py": MTP_MODEL,
    "sglang/srt/models/deepseek_v4_dspark.py": DSPARK_MODEL,
    "sglang/srt/layers/logits_processor.py": LOGITS_PROCESSOR,
    "sglang/srt/layers/sampler.py": SAMPLER,
    "sglang/srt/layers/logprob_processor.py": LOGPROBS,
    "sglang/srt/managers/schedule_batch.py": SCHEDULE_BATCH,
    "sglang/srt/managers/scheduler_components/batch_result_processor.py": RESULTS,
    "sglang/srt/sampling/penaltylib/orchestrator.py": PENALTY_LIBRARY,
    "sglang/srt/speculative/dflash_info_v2.py": DRAFT_INPUT,
    "sglang/srt/speculative/eagle_utils.py": EAGLE,
    "sglang/srt/speculative/eagle_draft_cuda_graph_runner.py": DRAFT_GRAPHS,
    "sglang/srt/speculative/eagle_draft_extend_cuda_graph_runner.py": DRAFT_EXTEND_GRAPHS,
    "sglang/srt/speculative/dspark_components/dspark_verify.py": ACCEPTANCE,
    **dict.fromkeys((f"sglang/{DSPARK_COMPONENTS}/dspark_{n}.py" for n in ("worker_v2", "draft_sampler")), FREE_MEMORY),
    "sglang/kernels/ops/speculative/reject_sampling.py": "def chain_speculative_sampling_triton(*args):\n    pass\n",
    "sglang/kernels/ops/speculative/dspark/dspark_accept.py": CHAIN,
    "sglang/srt/managers/tp_worker.py": WORKER,
    "sglang/srt/constrained/base_grammar_backend.py": GRAMMARS,
    "sglang/srt/constrained/xgrammar.py": "class GrammarCompiler:\n    pass\n",
    "sglang/srt/constrained/xgrammar_backend.py": XGRAMMAR,
    "sglang/kernels/ops/grammar/bitmask_ops.py": BITMASK,
    "sglang/srt/function_call/deepseekv32_detector.py": TOOL_CALLS,
    "sglang/srt/function_call/base_format_detector.py": TAGS,
    "sglang/srt/function_call/utils.py": "def _find_common_prefix(s1, s2):\n    return s1\n",
    "sglang/srt/entrypoints/openai/serving_chat.py": CHAT,
    "sglang/srt/entrypoints/http_server.py": "def _execute_server_warmup(server_args): return True\n"
    "def _wait_and_warmup(server_args, launch_callback=None, execute_warmup_func=_execute_server_warmup): pass\n",
    "sglang/srt/sampling/penaltylib/repetition_penalty.py": "def apply_scaling_penalties(logits, scaling_penalties):\n"
    "    pass\n",
    "sglang/srt/entrypoints/openai/encoding_dsv4.py": "def encode_messages(messages, thinking_mode): pass\n"
    "def render_tools(tools):\n    return tools\n"
    "def render_message(index, messages, thinking_mode, drop_thinking=True):\n    return ''\n",
    "sglang/srt/parser/reasoning_parser.py": READER,
    "sglang/srt/entrypoints/anthropic/serving.py": MESSAGES,
    "sglang/srt/entrypoints/openai/protocol.py": RESPONSES_REQUEST,
    "sglang/srt/entrypoints/openai/serving_responses.py": RESPONSES,
    "sglang/srt/entrypoints/openai/responses_adapters.py": "def decode_custom_tool_input_prefix(buffer): pass\n",
    "sglang/srt/sampling/sampling_params.py": SAMPLING_PARAMS,
    **dict.fromkeys((f"sglang/srt/managers/{name}_manager.py" for name in ("detokenizer", "tokenizer")), ANSWERS),
    "sglang/srt/layers/moe/topk.py": CHOICE,
    "sglang/kernels/ops/layernorm/mhc.py": MHC_KERNELS,
    "sglang/kernels/ops/layernorm/mhc_head.py": MHC_HEAD,
    "sglang/kernels/ops/attention/flash_mla_sm120.py": SM120_FUNCTION,
    "sglang/kernels/ops/attention/deepseek_v4_rope.py": "def precompute_freqs_cis(**given):\n    return given\n",
    "sglang/srt/layers/quantization/fp8.py": FP8,
    "sglang/srt/layers/quantization/mxfp4_marlin_moe.py": EXPERTS.format(name="Mxfp4MarlinMoEMethod"),
    "sglang/srt/layers/quantization/mxfp4_flashinfer_cutlass_moe.py": EXPERTS.format(
        name="Mxfp4FlashinferCutlassMoEMethod"
    ),
}


def _write_tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return folder


@pytest.fixture
def write_tree():
    """write_tree(folder, {file name: text}) -> folder"""
    return _write_tree


@pytest.fixture
def tree(tmp_path):
    """A folder with an `sglang` that has what the table touches in 0.5.17; call with changes to it (None deletes)."""

    def make(changes: dict[str, str | None] | None = None) -> Path:
        files = {**TREE_0_5_17, **(changes or {})}
        return _write_tree(tmp_path / "host", {name: text for name, text in files.items() if text is not None})

    return make


@pytest.fixture
def python():
    return Python(sys.executable)


@pytest.fixture
def python_with_torch(torch_python):
    """For code that imports torch anyway; it takes no flags."""
    return Python(*torch_python())


@pytest.fixture(scope="session")
def python_interpreting(tmp_path_factory, program_python):
    """For code that asks Triton's interpreter, which is chosen when Triton is imported."""
    path, environ = (str(REPO),), {"TRITON_INTERPRET": "1"}
    modules = ("triton.language", "triton.runtime.interpreter", "tests.patching.draft_passes")
    folder = tmp_path_factory.mktemp("interpreting")
    interpreting = Loaded(folder, *modules, path=path, environ=environ, start=program_python())
    yield Python(*interpreting.command)
    interpreting.close()


@pytest.fixture(scope="session")
def sglang_wheel():
    """sglang_wheel(version) -> the wheel's file"""
    return wheels.fetch


@pytest.fixture
def host(tmp_path, monkeypatch, write_tree):
    """host(changes) writes the small package; modules, hooks and settings of it are removed afterwards"""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(device_gate, "_first_served", [])
    monkeypatch.setattr(device_gate, "serves_current_device", lambda: False)  # without torch; `gpu` changes it
    for variable in (report.TOLD, patching.VERDICT):  # what a server's first process leaves to the others
        monkeypatch.setenv(variable, "")

    def write(changes=None):
        files = {**HOST, **(changes or {})}
        write_tree(tmp_path, {name: text for name, text in files.items() if text is not None})
        importlib.invalidate_caches()

    yield write
    import_hook.forget()
    for name in set(sys.modules) - before:
        if name.startswith("eng_"):
            del sys.modules[name]


@pytest.fixture
def said(monkeypatch):
    """What the user was told, as (level, text)."""
    told = []
    monkeypatch.setattr(report, "_say", lambda level, text: told.append((logging.getLevelName(level), text)))
    return told


@pytest.fixture
def gpu(monkeypatch):
    """gpu(True): from here on the current GPU is one that we serve."""

    return lambda is_served: monkeypatch.setattr(device_gate, "serves_current_device", lambda: is_served)


@pytest.fixture
def opened(monkeypatch):
    """opened(model_type, by the card): the gate, behind its own question for the model."""
    import torch

    from deepseek_v4_sm120.sglang_patches import device_gate, models_served

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def opened(model, card=True):
        monkeypatch.setattr(models_served, "announced", lambda: {"model_type": model} if model else None)
        monkeypatch.setattr(device_gate, "_ask", lambda index: card)

    opened("deepseek_v4")
    return opened


@pytest.fixture
def served_card(monkeypatch):
    """In a process that answers over HTTP: its parent has told of our model and card."""
    monkeypatch.setattr(models_served, "has_served_card", lambda: True)


@pytest.fixture
def elsewhere(served_card, monkeypatch):
    monkeypatch.setattr(models_served, "has_served_card", lambda: False)
