"""Every attribute that an adapter reads of an object of SGLang's is one that the object's class defines, in every
release that the adapter is for; what is asked for with a default, in one of them at least. So no adapter meets an
AttributeError in a release that never ran with it, and none asks for a name that nobody ever had."""

import ast
import functools
from collections.abc import Iterable

import pytest
from packaging.specifiers import SpecifierSet

from deepseek_v4_sm120.sglang_patches.names import ATTENTION, DSPARK, DSPARK_SINCE, EVERY, MODEL
from deepseek_v4_sm120.sglang_patches.rows.http_server import (
    CHAT,
    MESSAGES,
    OPENAI,
    PARSE,
    READER,
    RECIPE_READER,
    SINCE_RECIPE,
    TOKENIZER_MANAGER,
)
from deepseek_v4_sm120.sglang_patches.rows.mhc import CUDA_LAYER, LAYER, MTP_MODEL
from deepseek_v4_sm120.sglang_patches.rows.scheduler import ADDER, PIPELINE, REQUEST, SCHEDULER, SWA_CACHE
from deepseek_v4_sm120.sglang_patches.rows.scheduler import BATCH as SCHEDULE_BATCH
from deepseek_v4_sm120.sglang_patches.table import (
    BACKEND,
    CUTLASS_EXPERTS,
    FP8_METHOD,
    INDEXER,
    MARLIN_EXPERTS,
    SM120_ATTENTION_0_5_14,
    TABLE,
)
from tests.patching import attributes
from tests.patching.attributes import Read, Release
from tests.patching.attributes_of_others import GUARDED, OF_FIXES, OF_SHARED, OF_TENSORS_AND_OTHERS, OURS
from tests.patching.wheels import RELEASES, every_release, fetch

SRT, TEXT_OF = "sglang.srt", "text of "
READS_THOUGHTS = f"{READER.partition(':')[0]}:BaseReasoningFormatDetector"
CHAT_REQUEST, CHAT_TEXT = (
    ((f"{OPENAI}.protocol:ChatCompletion{name}",),) for name in ("Request", "MessageContentTextPart")
)
CHAT_CALL = {"call": ((f"{OPENAI}.protocol:ToolCall",),), "call.function": ((f"{OPENAI}.protocol:FunctionResponse",),)}
OF_RECIPE = {of: ((f"{RECIPE_READER.partition(':')[0]}:Recipe{of}Delta",),) for of in ("Output", "ToolCall")}
CHAT_MESSAGES = tuple((f"{OPENAI}.protocol:ChatCompletionMessage{kind}Param",) for kind in ("Generic", "User"))
POLICY = ADDER.partition(":")[0]
UNIFIED_CACHE = f"{SRT}.mem_cache.unified_radix_cache:UnifiedRadixCache"
STATE = f"{SRT}.distributed.parallel_state"
GROUP = f"{STATE}:GroupCoordinator"
BATCH = f"{SRT}.model_executor.forward_batch_info"
CONTEXT = f"{SRT}.runtime_context"
SERVER_ARGS = f"{SRT}.server_args"
ARGUMENTS = (f"{SERVER_ARGS}:ServerArgs", f"{SRT}.arg_groups.fields.parallel:Parallel")
CUSTOM_SUM = f"{SRT}.distributed.device_communicators.custom_all_reduce:CustomAllreduce"
LINEAR = f"{SRT}.layers.linear"
UNQUANTIZED = f"{SRT}.layers.quantization.unquant"
BF16_WEIGHT = f"{UNQUANTIZED}:UnquantizedLinearMethod.create_weights(layer)"
VOCABULARY = f"{SRT}.layers.vocab_parallel_embedding"
LM_HEAD = (f"{VOCABULARY}:ParallelLMHead", f"{UNQUANTIZED}:UnquantizedEmbeddingMethod.create_weights(layer)")
PROCESSOR = f"{SRT}.layers.logits_processor:LogitsProcessor"
FP8_WEIGHT = (f"{FP8_METHOD}.create_weights(layer)", f"{FP8_METHOD}.create_fp8_weight_(layer)")
FP8_CONFIG = f"{FP8_METHOD.partition(':')[0]}:Fp8Config"
MOE = f"{SRT}.layers.moe"
EXPERTS = (
    f"{MOE}.fused_moe_triton.layer:FusedMoE",
    f"{FP8_CONFIG.partition(':')[0]}:Fp8MoEMethod.create_weights(layer)",
    f"{MARLIN_EXPERTS}.create_weights(layer)",
)
DISPATCHER = f"{MOE}.token_dispatcher.standard"
POOL = f"{SRT}.mem_cache.deepseek_v4_memory_pool"
STATES = f"{SRT}.mem_cache.deepseek_v4_compress_state"
ALLOCATORS = tuple(
    (f"{SRT}.mem_cache.{module}:SWATokenToKVPoolAllocator",) for module in ("swa_memory_pool", "allocator.swa")
)
PLANS = tuple(
    (f"{place}.dsv4.compress:CompressorPrefillPlan",) for place in ("sglang.jit_kernel", "sglang.kernels.ops.attention")
)
ONLINE = tuple(
    (f"{place}.dsv4.online_c128_mtp:OnlineC128MTPController",)
    for place in ("sglang.jit_kernel", "sglang.kernels.ops.attention", f"{SRT}.layers.attention")
)
HALF = tuple(f"{function}:half" for function in ("_half", "first_half", "second_half"))
BREAKS = f"{SRT}.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"
PREFILL_GRAPHS = f"{SRT}.model_executor.runner.prefill_cuda_graph_runner:PrefillCudaGraphRunner"
NORM = f"{SRT}.layers.layernorm:RMSNorm"
STAGES = tuple(f"{DSPARK.partition(':')[0]}:{name}" for name in ("DSparkV4Stage", "DSparkV4CudaStage"))
ANY_LAYER = ((LAYER,), (CUDA_LAYER,), (STAGES[0],), (STAGES[1],))
LAST_STAGE = tuple((DSPARK_SINCE, stage) for stage in STAGES)
SAMPLING_INFO = ((f"{SRT}.sampling.sampling_batch_info:SamplingBatchInfo",),)
SAMPLING_PARAMS = ((f"{SRT}.sampling.sampling_params:SamplingParams",),)
LOGITS_OUTPUT = ((f"{SRT}.layers.logits_processor:LogitsProcessorOutput",),)
ORCHESTRATOR = ((f"{SRT}.sampling.penaltylib.orchestrator:BatchedPenalizerOrchestrator",),)
VERIFIED = ("eagle_info:Eagle", "ngram_info:Ngram", "frozen_kv_mtp_info:FrozenKVMTP")
PENALIZERS = tuple(
    f"{module}:Batched{module.title().replace('_', '')}"
    for module in ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens")
)
PREFILL = ">=0.5.13,<0.5.16"  # what paged_prefill reads

# adapter -> what an object is called there -> the kinds of objects that it may be, each the places that give it its
# attributes (attributes.Release.defines); a kind is there where its first place is. In front of a kind, the releases
# whose objects come there. TEXT_OF a module: of objects that SGLang makes of its settings, what that module reads
ANTHROPIC = f"{MESSAGES.partition('.serving')[0]}.protocol"
OF_ANTHROPIC, OF_TURN = (((f"{ANTHROPIC}:Anthropic{name}",),) for name in ("MessagesRequest", "Message"))
OF_TEXT = (("<0.5.14", f"{ANTHROPIC}:AnthropicContentBlock"), (">=0.5.14", f"{ANTHROPIC}:TextBlock"))
OBJECTS = {
    "plain_angles": {"config": ((f"{SRT}.configs.deepseek_v4:DeepSeekV4Config",),)},
    "draft_chain": {"raw_metadata": ((f"{BACKEND}:DSV4RawDecodeMetadata",),)},
    "greedy_argmax": {
        "output": LOGITS_OUTPUT,
        "sampling_info": SAMPLING_INFO,
        "batch": ((SCHEDULE_BATCH,),),
        "batch.forward_mode": ((f"{BATCH}:ForwardMode",),),
        "batch.sampling_info": SAMPLING_INFO,
        "runner": ((f"{SRT}.speculative.eagle_draft_extend_cuda_graph_runner:EAGLEDraftExtendCudaGraphRunner",),),
        "runner.model_runner": ((f"{SRT}.model_executor.model_runner:ModelRunner",),),
        "context": ((">=0.5.17", CONTEXT),),
        "settings": (("<0.5.17", *ARGUMENTS), (">=0.5.17", f"{TEXT_OF}{SRT}.speculative.eagle_worker_v2")),
        "self.eagle_worker": ((f"{SRT}.speculative.eagle_worker_v2:EagleDraftWorker",),),
    },
    "all_reduce": {
        "coordinator": ((GROUP,),),
        "group": ((GROUP,),),
        "context": ((">=0.5.14", CONTEXT),),
        "context.get_schedule()": ((">=0.5.18", f"{TEXT_OF}{CONTEXT}"),),
        "arguments": (("<0.5.18", *ARGUMENTS),),
        "importlib.import_module(SERVER_ARGS)": ((SERVER_ARGS,),),
        "importlib.import_module(PARALLEL_STATE)": ((STATE,),),
    },
    "argument_defaults": {
        "sys.modules.get(ENVIRON)": ((f"{SRT}.environ",),),
        "server_args": (ARGUMENTS,),
        "declarations": ((">=0.5.19", f"{SRT}.arg_groups.overrides"),),
        "importlib.import_module(MODEL_CONFIG)": ((">=0.5.19", f"{SRT}.arg_groups.model_override_base"),),
        "found": ((f"{SRT}.configs.model_config:ModelConfig",),),
    },
    "bf16_linear": {
        "gate": ((f"{SRT}.models.deepseek_v2:MoEGate",),),
        "head": (LM_HEAD,),
        "lm_head": (LM_HEAD,),
        "layer": ((f"{LINEAR}:ReplicatedLinear", BF16_WEIGHT),),
        "replace_compute_weights:self.weights_proj": ((f"{LINEAR}:ReplicatedLinear", BF16_WEIGHT),),
        "module['get_exec']()": ((">=0.5.17", f"{TEXT_OF}{SRT}.models.deepseek_v2"),),
        "module['get_exec']().deterministic": ((">=0.5.17", f"{TEXT_OF}{SRT}.models.deepseek_v2"),),
        "module[name]()": (("<0.5.17", f"{TEXT_OF}{SRT}.models.deepseek_v2"),),
        "processor": ((PROCESSOR,),),
    },
    "compressor": {
        "given['norm']": ((NORM,),),
        **{f"{function}:plan": PLANS for function in ("arguments", "replace_create_data")},
        "token_to_kv_pool": ((f"{POOL}:DeepSeekV4TokenToKVPool",),),
    },
    "compressor_drafts": {
        "pool": ((f"{STATES}:CompressStatePool",),),
        "pool.kv_score_buffer": ((f"{STATES}:KVAndScore",),),
    },
    "bf16_linear_dealt": {"state": ((STATE,),), "tp": ((GROUP,),)},
    "fp8_linear": {"layer": (FP8_WEIGHT,), "method": ((FP8_METHOD,),), "norm": ((NORM,),)} | OF_SHARED,
    "fp8_linear_draft_input": {
        "model": ((MTP_MODEL,),),
        "forward_batch": ((f"{BATCH}:ForwardBatch",),),
        "forward_batch.spec_info": ((f"{SRT}.speculative.eagle_info:EagleDraftInput",),),
        **dict.fromkeys(("projection", "model.h_proj"), ((f"{LINEAR}:ReplicatedLinear", *FP8_WEIGHT),)),
        "norm": ((NORM,),),
        **dict.fromkeys(("embedding", "table"), ((f"{VOCABULARY}:VocabParallelEmbedding", LM_HEAD[1]),)),
    },
    "bf16_linear_draft_head": {
        "lm_head": (LM_HEAD,),
        "args[0]": ((f"{MODEL}:DeepseekV4ForCausalLM",), (DSPARK,)),
        "getattr(args[0], 'lm_head', None)": (LM_HEAD,),
        **{f"replace_{name}:self.lm_head": (LM_HEAD,) for name in ("attach", "dspark_logits", "set_embed_and_head")},
    },
    "index_select": {
        "c4_indexer": ((f"{INDEXER}:C4Indexer",),),
        "forward_batch": ((f"{BATCH}:ForwardBatch",),),
        "forward_batch.forward_mode": ((f"{BATCH}:ForwardMode",),),
    },
    "index_select_dealt": {
        "context": ((">=0.5.14", CONTEXT),),
        "context.get_server_args()": ((">=0.5.15", *ARGUMENTS),),
        "importlib.import_module(SERVER_ARGS)": ((SERVER_ARGS,),),
        "importlib.import_module(SERVER_ARGS).get_global_server_args()": (("<0.5.15", *ARGUMENTS),),
        "state": ((STATE,),),
        **{name: ((GROUP,),) for name in ("coordinator", "decode_context", "group", "tp", "state.get_moe_ep_group()")},
        "forward_batch": ((f"{BATCH}:ForwardBatch",),),
        "forward_batch.forward_mode": ((f"{BATCH}:ForwardMode",),),
    },
    "mhc": {
        "last": LAST_STAGE,
        "model.stages[-1]": LAST_STAGE,
        "layer": ANY_LAYER,
        "model": ((MTP_MODEL,),),
        "_serve_dspark_head:model": ((DSPARK_SINCE, DSPARK),),
        "replace_dspark_head:model": ((DSPARK_SINCE, DSPARK),),
        "norm": ((NORM,),),
    },
    "mhc_dealt_streams": {
        "state": ((STATE,),),
        "tp": ((GROUP,),),
        "model": ((f"{MODEL}:DeepseekV4Model",),),
        "forward_batch": ((f"{BATCH}:ForwardBatch",),),
        "forward_batch.forward_mode": ((f"{BATCH}:ForwardMode",),),
        "mode": ((f"{BATCH}:CaptureHiddenMode",),),
    },
    "prompt_passes": {
        "state": ((STATE,),),
        **{name: ((GROUP,),) for name in ("coordinator", "decode_context", "tp", "state.get_moe_ep_group()")},
        "pipeline": ((GROUP,),),
        "custom": ((CUSTOM_SUM,),),
        "other": ((f"{SRT}.distributed.device_communicators.pynccl:PyNcclCommunicator",),),
    },
    "prompts_in_halves": {
        "state": ((STATE,),),
        "capturers": ((f"{SRT}.state_capturer.routed_experts",),),
        "recorders": ((f"{SRT}.eplb.expert_distribution",),),
        "tp": ((GROUP,),),
        **{name: ((f"{BATCH}:ForwardBatch",),) for name in ("batch", *HALF)},
        "backend": ((f"{BACKEND}:DeepseekV4AttnBackend",),),
        "backend.token_to_kv_pool": ((f"{POOL}:DeepSeekV4TokenToKVPool",),),
        "backend.model_runner": ((f"{SRT}.model_executor.model_runner:ModelRunner",),),
        "backend.model_runner.model_config": ((f"{SRT}.configs.model_config:ModelConfig",),),
        "backend.online_c128_mtp": ONLINE,
    },
    "halves_in_graphs": {
        **{name: ((f"{BATCH}:ForwardBatch",),) for name in ("batch", "made", "forward_batch")},
        "backend": ((f"{BACKEND}:DeepseekV4AttnBackend",),),
        "backend.model_runner": ((f"{SRT}.model_executor.model_runner:ModelRunner",),),
        "state": ((STATE,),),
        "runner": ((PREFILL_GRAPHS,),),
        "runner.model_runner": ((f"{SRT}.model_executor.model_runner:ModelRunner",),),
        "capture": ((f"{BREAKS}:BreakableCUDAGraphCapture",),),
        "capture.cuda_graph": ((f"{BREAKS}:BreakableCUDAGraph",),),
        "importlib.import_module(BREAKABLE)": ((BREAKS,),),
        "importlib.import_module(WEAK)": ((f"{SRT}.model_executor.runner_backend_utils.weak_ref_tensor",),),
        "importlib.import_module(CONTEXT)": (
            (f"{SRT}.model_executor.runner_backend_utils.tc_piecewise_cuda_graph.context_manager",),
        ),
        "_context()": (
            (
                f"{SRT}.model_executor.runner_backend_utils.tc_piecewise_cuda_graph.context_manager:"
                "TcPiecewiseForwardContext",
            ),
        ),
        "key": ((f"{SRT}.model_executor.runner.shape_key:ShapeKey",),),
    },
    **{"scope": {"serving": ((CHAT,),)}, "prompts_aside": {"chat": ((CHAT,),)}},
    "cut_characters": {"told": OF_RECIPE["Output"]},
    "default_thinking": {
        "replace_responses_thinking:request": ((f"{OPENAI}.protocol:ResponsesRequest",),),
        "importlib.import_module(PROTOCOL)": ((f"{OPENAI}.protocol",),),
        **{"request": CHAT_REQUEST, "importlib.import_module(ENVIRON)": ((f"{SRT}.environ",),)},
        "importlib.import_module(ENVIRON).envs": ((f"{SRT}.environ:Envs",),),
    },
    "blanks_before_calls": {
        **{"request": CHAT_REQUEST, "message": CHAT_MESSAGES[:1]},
        **dict.fromkeys(("(last := parts[-1])", "last"), CHAT_TEXT),
    },
    "billing_lines": {"anthropic_request": OF_ANTHROPIC, "block": OF_TEXT},
    "stop_sequences": {
        "anthropic_request": OF_ANTHROPIC,
        "response": ((f"{OPENAI}.protocol:ChatCompletionResponse",),),
        "choice": ((f"{OPENAI}.protocol:ChatCompletionResponseChoice",),),
        "made": ((f"{ANTHROPIC}:AnthropicMessagesResponse",),),
    },
    "thought_counts": {"recv_obj": ((f"{SRT}.managers.io_struct:BatchStrOutput",),)},
    **dict.fromkeys(
        ("unknown_tokens", "fatal_requests"),
        {
            "obj": ((f"{SRT}.managers.io_struct:GenerateReqInput",),),
            "self.model_config": ((f"{SRT}.configs.model_config:ModelConfig",),),
        },
    ),
    **dict.fromkeys(("echoed_items", "tool_namespaces"), {"request": ((f"{OPENAI}.protocol:ResponsesRequest",),)}),
    "sample_seeds": {
        "tokenized_obj": ((f"{SRT}.managers.io_struct:TokenizedGenerateReqInput",),),
        **dict.fromkeys(("shared", "tokenized_obj.sampling_params"), SAMPLING_PARAMS),
    },
    "known_turns": {"manager": ((TOKENIZER_MANAGER,),)},
    "sampled_states": {"obj": ((f"{SRT}.managers.io_struct:GenerateReqInput",),)},
    "token_logprobs": {
        "serving": ((CHAT,),),
        "serving.tokenizer_manager": ((TOKENIZER_MANAGER,),),
        "importlib.import_module(PROTOCOL)": ((f"{OPENAI}.protocol",),),
        "told": ((f"{OPENAI}.protocol:ChoiceLogprobs",),),
        "one": ((f"{OPENAI}.protocol:ChatCompletionTokenLogprob",),),
    },
    "developer_messages": {"request": CHAT_REQUEST, "message": CHAT_MESSAGES},
    "text_parts": {"request": CHAT_REQUEST, "message": CHAT_MESSAGES, "part": CHAT_TEXT},
    "unseen_pictures": {"request": CHAT_REQUEST, "message": CHAT_MESSAGES, "part": CHAT_TEXT},
    "cut_arguments": {"request": CHAT_REQUEST, "message": CHAT_MESSAGES[:1], **CHAT_CALL},
    "argument_names": {"told": OF_RECIPE["Output"], "call": OF_RECIPE["ToolCall"]},
    "effort_levels": {"ctx": ((f"{OPENAI}.chat_encoding_adapters:ChatEncodingAdapterContext",),)},
    "disconnects": {
        "obj": ((f"{SRT}.managers.io_struct:BaseReq",),),
        "state": ((f"{TOKENIZER_MANAGER.partition(':')[0]}:ReqState",),),
        "state.time_stats": ((f"{SRT}.observability.req_time_stats:APIServerReqTimeStats",),),
    },
    "last_turns": {
        **{"anthropic_request": OF_ANTHROPIC, "anthropic_request.messages[-1]": OF_TURN},
        **dict.fromkeys(("request", "ends", "made"), CHAT_REQUEST),
        **dict.fromkeys(("turn", "m", "request.messages[-1]"), CHAT_MESSAGES[:1]),
        "part": CHAT_TEXT,
        "self.deepseek_recipe": ((SINCE_RECIPE, f"{SRT}.parser.deepseek_recipe_renderer:DeepSeekRecipe"),),
    },
    **OF_FIXES,
    "json_answers": {
        "request": CHAT_REQUEST,
        "response_format": ((f"{OPENAI}.protocol:ResponseFormat",),),
        "asked": ((f"{OPENAI}.protocol:JsonSchemaResponseFormat",),),
    },
    "handed_over": {"offloader": ((f"{SRT}.utils.offloader",),)},
    "mhc_sum": {
        "coordinator": ((GROUP,),),
        "mscclpp": ((f"{SRT}.distributed.device_communicators.pymscclpp:PyMscclppCommunicator",),),
        "state": ((STATE,),),
        "state._PP": ((GROUP,),),
    },
    "mhc_owed_terms": {
        "linear": (FP8_WEIGHT,),
        "layers.layer": ANY_LAYER,
        "getattr(layers.layer, 'self_attn', None)": ((ATTENTION,),),
    },
    "longest_prompt": {
        "self.model_runner": ((f"{SRT}.model_executor.model_runner:ModelRunner",),),
        "self.model_runner.token_to_kv_pool_allocator": ALLOCATORS,
    },
    "min_p_tokens": {
        "sampling_info": SAMPLING_INFO,
        "importlib.import_module(PARALLEL_STATE)": ((STATE,),),
        "of_rows": ((GROUP,),),
    },
    "min_p_verify": {
        "batch": ((SCHEDULE_BATCH,),),
        "info": SAMPLING_INFO,
    },
    "mxfp4_moe": {
        "layer": (EXPERTS,),
        "layer.dispatcher": ((f"{DISPATCHER}:StandardDispatcher",),),
        "config": ((f"{MOE}.moe_runner.base:MoeRunnerConfig",),),
        "layer.moe_runner_config": ((f"{MOE}.moe_runner.base:MoeRunnerConfig",),),
        **dict.fromkeys(("method", "type(method)"), ((MARLIN_EXPERTS,), (CUTLASS_EXPERTS,))),
        "_replace_process:self._fp8": ((f"{FP8_METHOD.partition(':')[0]}:Fp8MoEMethod",),),
        "dispatch_output": ((f"{DISPATCHER}:StandardDispatchOutput",),),
        "original": ((f"{DISPATCHER}:StandardCombineInput",),),
        "sys.modules[type(dispatch_output).__module__]": ((DISPATCHER,),),
        "_serve:routed": ((f"{MOE}.topk:StandardTopKOutput",),),
    },
    "dspark_graphs": {"importlib.import_module(PARALLEL_STATE)": ((STATE,),), "cards": ((GROUP,),)},
    "dspark_windows": {"batch": ((SCHEDULE_BATCH,),)},
    "min_p_dspark": {"sampling_info": SAMPLING_INFO},
    "dspark_penalties": {
        "batch": ((SCHEDULE_BATCH,),),
        "batch.sampling_info": SAMPLING_INFO,
        "batch.sampling_info.penalizer_orchestrator": ORCHESTRATOR,
        "sampling_info": SAMPLING_INFO,
    },
    "penalties": {
        "request": ((REQUEST,),),
        "params": SAMPLING_PARAMS,
        "penalizer": tuple((f"{SRT}.sampling.penaltylib.{kind}Penalizer",) for kind in PENALIZERS),
        "self.sampling_info": SAMPLING_INFO,
        "self.sampling_info.penalizer_orchestrator": ORCHESTRATOR,
    },
    "min_tokens": {
        **{"request": ((REQUEST,),), "request.sampling_params": SAMPLING_PARAMS},
        **dict.fromkeys(("batch", "running_batch"), ((SCHEDULE_BATCH,),)),
        **{"batch.sampling_info": SAMPLING_INFO, "batch.sampling_info.penalizer_orchestrator": ORCHESTRATOR},
        "algorithm": ((f"{SRT}.speculative.spec_info:SpeculativeAlgorithm",),),
        "penalizer": ((f"{SRT}.sampling.penaltylib.{PENALIZERS[-1]}Penalizer",),),
        "verify_input": tuple((f"{SRT}.speculative.{kind}VerifyInput",) for kind in VERIFIED),
        "result": ((">=0.5.18", f"{SRT}.speculative.dspark_components.dspark_verify:TargetVerifyResult"),),
        **dict.fromkeys(("logits_output", "result.logits_output"), LOGITS_OUTPUT),
    },
    "prompt_logprobs": {
        "batch": ((SCHEDULE_BATCH,),),
        "result": ((f"{SRT}.managers.utils:GenerationBatchResult",),),
        "request": ((REQUEST,),),
        "processor": (
            (f"{SRT}.managers.scheduler_components.logprob_result_processor:SchedulerLogprobResultProcessor",),
        ),
    },
    "sampling": {
        "verify_input": tuple((f"{SRT}.speculative.{kind}VerifyInput",) for kind in VERIFIED),
        "batch": ((SCHEDULE_BATCH,),),
        "batch.forward_mode": ((f"{BATCH}:ForwardMode",),),
        "info": SAMPLING_INFO,
        "sampling_info": SAMPLING_INFO,
        "logits_output": LOGITS_OUTPUT,
    },
    "preempted_requests": {"adder": ((ADDER,),), "self.running_batch": ((SCHEDULE_BATCH,),)},
    "mixed_chunks": dict.fromkeys(("running", "running_batch"), ((SCHEDULE_BATCH,),)),
    "prompts_alone": {"batch": ((SCHEDULE_BATCH,),)},
    "own_outputs": dict.fromkeys(("scheduler.pp_group", "scheduler.attn_tp_group"), ((GROUP,),))
    | {"scheduler": ((SCHEDULER, PIPELINE),), "given": ((f"{BATCH}:PPProxyTensors",),)}
    | {"scheduler.spec_algorithm": ((f"{SRT}.speculative.spec_info:SpeculativeAlgorithm",),)}
    | {"stage": ((">=0.5.21", PIPELINE),)},
    "waiting_prompts": {"running_batch": ((SCHEDULE_BATCH,),), "head": ((REQUEST,),)}
    | {"scheduler": ((SCHEDULER,),), "scheduler.pp_group": ((GROUP,),)},
    "short_prompts": {
        **{"adder": ((ADDER,),), "scheduler": ((SCHEDULER,),), "scheduler.pp_group": ((GROUP,),)},
        **{"running_batch": ((SCHEDULE_BATCH,),), "request": ((REQUEST,),), "request.sampling_params": SAMPLING_PARAMS},
        **{"found": ((f"{POLICY}:_PrefillAdmission",),), "importlib.import_module(POLICY)": ((POLICY,),)},
        "importlib.import_module(POLICY).AddReqResult": ((f"{POLICY}:AddReqResult",),),
        "scheduler.tree_cache": ((UNIFIED_CACHE,),),
    },
    "waiting_chunks": {
        **{"adder": ((ADDER,),), "type(adder.running_batch)": ((SCHEDULE_BATCH,),)},
        **dict.fromkeys(("req", "request"), ((REQUEST,),)),
        "cache": (("<0.5.22", f"{SRT}.mem_cache.chunk_cache:SWAChunkCache"), (">=0.5.22", UNIFIED_CACHE)),
    },
    "shared_beginnings": {
        "cache": ((SWA_CACHE,),),
        "cache.swa_lru_list": ((f"{SWA_CACHE.partition(':')[0]}:LRUList",),),
        "cache.token_to_kv_pool_allocator": ALLOCATORS,
        "node": ((f"{SWA_CACHE.partition(':')[0]}:TreeNode",),),
        **dict.fromkeys(("key", "node.key"), ((f"{SRT}.mem_cache.radix_cache:RadixKey",),)),
    },
    "fenced_copies": {
        "controller": ((f"{SRT}.managers.cache_controller:HiCacheController",),),
        "self.tree_cache": ((UNIFIED_CACHE,),),
        "self.tp_worker": ((f"{SRT}.managers.tp_worker:TpModelWorker",),),
        "self.tp_worker.model_runner": ((f"{SRT}.model_executor.model_runner:ModelRunner",),),
    },
    "replaced_sessions": {
        "req": ((f"{SRT}.managers.io_struct:TokenizedGenerateReqInput",),),
        "asked": ((f"{SRT}.managers.io_struct:SessionParams",),),
        "node": ((f"{SRT}.session.session_controller:SessionReqNode",),),
    },
    "first_stops": {"request": ((REQUEST,),), "params": SAMPLING_PARAMS},
    "stored_pages": {"host_pool": ((f"{SRT}.mem_cache.memory_pool_host:DeepSeekV4StateHostPool",),)},
    "loaded_prefixes": {
        "self.model_runner": ((f"{SRT}.model_executor.model_runner:ModelRunner",),),
        "pool": ((f"{POOL}:DeepSeekV4TokenToKVPool",),),
        "counter": ((f"{SRT}.managers.cache_controller:LayerDoneCounter",),),
    },
    "updated_sinks": {
        "model": ((f"{MODEL}:DeepseekV4ForCausalLM",), (DSPARK_SINCE, DSPARK)),
        **dict.fromkeys(("module", "attention"), ((ATTENTION,),)),
    },
    "scheduling": {"running_batch": ((SCHEDULE_BATCH,),)},
    "stripped_thoughts": {
        "request": ((">=0.5.19", REQUEST),),
        "record": (("<0.5.19", REQUEST), (">=0.5.19", f"{SRT}.managers.schedule_batch:ReqKvInfo")),
    },
    "sparse_decode": {
        "_backend.layer": ((f"{SRT}.layers.radix_attention:RadixAttention",),),
        "backend": ((BACKEND + ":DeepseekV4AttnBackend",),),
        "importlib.import_module(SM120_ATTENTION_0_5_14)": ((PREFILL, SM120_ATTENTION_0_5_14),),
        "metadata": ((PREFILL, BACKEND + ":DSV4AttnMetadata"),),
        "pool": ((PREFILL, f"{POOL}:DeepSeekV4TokenToKVPool"),),
        "pool.swa_kv_pool": ((PREFILL, f"{POOL}:DeepSeekV4SingleKVPool"),),
        "sys.modules[original.__module__]": (("<0.5.16", SM120_ATTENTION_0_5_14),),  # others: test_wheel_attention.py
    },
    "unchosen_tools": dict.fromkeys(("request", "made"), CHAT_REQUEST),
    "system_reminders": {"anthropic_request": OF_ANTHROPIC, "message": OF_TURN, "block": OF_TEXT},
    "thought_history": {
        **{"anthropic_request": OF_ANTHROPIC, "turn": OF_TURN},
        "block": ((f"{ANTHROPIC}:ThinkingBlock",),),
        **{"made": CHAT_REQUEST, "message": CHAT_MESSAGES[:1]},
    },
    "tool_strings": {
        "detector": ((f"{PARSE.partition(':')[0]}:DeepSeekV32Detector",),),
        "parser": ((f"{SRT}.function_call.function_call_parser:FunctionCallParser",),),
    },
    "think_marks": dict.fromkeys(("detector", "self.detector"), ((READS_THOUGHTS,),)),
    "wo_a": {
        "attention": ((ATTENTION,),),
        "FORWARD.layer": ((ATTENTION,),),
        "layer": ((f"{LINEAR}:ColumnParallelLinear", BF16_WEIGHT),),
        "getattr(FORWARD.layer, 'wo_a', None)": ((f"{LINEAR}:ColumnParallelLinear", BF16_WEIGHT),),
        "quant_config": ((FP8_CONFIG,),),
        "sys.modules[original.__module__]": ((MODEL,),),
    },
}


# asked for with a default, of an object that may be another than the one above: its wrapper
OF_WRAPPERS = {("bf16_linear", "head", "set_lora"): f"{SRT}.lora.layers:ParallelLMHeadWithLoRA"}

SERVES = {
    **dict.fromkeys(("halves_trial", "turns"), "prompts_in_halves"),
    "prompt_passes": "mhc_dealt_streams",
    "mhc_owed_terms": "mhc_sum",
    "scope": "default_thinking",
}  # modules without rows of their own -> in whose releases they read

release = functools.cache(lambda version: Release(fetch(version)))
is_in = functools.cache(lambda version, specifiers: version in SpecifierSet(specifiers))
TARGETS = [target for patch in TABLE.patches for target in patch.targets]
FILES = sorted(attributes.FILES)


def has_rows(adapter: str, version: str) -> bool:
    name = SERVES.get(adapter, adapter)
    prefix = f"{attributes.FILES[name][0]}.{name}:"
    return any(is_in(version, t.sglang) for t in TARGETS if t.replacement.startswith(prefix))


def kinds_of(adapter: str, read: Read) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(releases, places) of each kind of object that is read; none where it is not SGLang's."""
    if read.of == "self":
        return tuple((spec, (where,)) for spec, where in attributes.classes_of_self(adapter, read.function))
    known, ours = OBJECTS.get(adapter, {}), OURS["*"] | OURS.get(adapter, set())
    found = known.get(f"{read.function}:{read.of}", known.get(read.of))
    is_dotted = all(word.isidentifier() for word in read.of.split("."))
    is_imported = is_dotted and read.of.partition(".")[0] in attributes.imported(adapter)
    if found is None and (is_imported or read.of in ours or read.name in OF_TENSORS_AND_OTHERS):
        return ()
    assert found is not None, (
        f"{adapter}, {read.module}.py:{read.line}: what is {read.of}, of which .{read.name} is read?"
    )
    return tuple((kind[0], kind[1:]) if kind[0][0] in "<>=" else (EVERY, kind) for kind in found)


def defined(version: str, where: str, name: str) -> bool | None:
    """Whether a place gives an object this attribute; None: the release does not have the place."""
    if where.startswith(TEXT_OF):
        text = release(version).text(where.removeprefix(TEXT_OF))
        return None if text is None else f".{name}" in text
    names = release(version).defines(where)
    return None if names is None else name in names


def kinds_in(version: str, adapter: str, read: Read) -> list[tuple[str, ...]]:
    """The places of the kinds of objects that a release has there."""
    kinds = [places for spec, places in kinds_of(adapter, read) if is_in(version, spec)]
    return [places for places in kinds if defined(version, places[0], read.name) is not None] or kinds


def missing(adapter: str, version: str, found: Iterable[Read]) -> list[str]:
    """Of what an adapter reads without a default: what one of the kinds of objects of a release does not define."""
    texts = []
    for read in (read for read in sorted(found) if read.required):
        guard = GUARDED.get((adapter, read.of, read.name))
        for places in kinds_in(version, adapter, read):
            asked = guard is None or any(defined(version, place, guard) for place in places)
            if asked and not any(defined(version, place, read.name) for place in places):
                where = f"{adapter}, {read.module}.py:{read.line}"
                texts.append(f"{where}: {read.of}.{read.name} is not in {' or '.join(places)}")
    return texts


@every_release()
def test_what_adapters_read_is_there(version):
    assert [
        text for one in FILES if has_rows(one, version) for text in missing(one, version, attributes.reads(one))
    ] == []


@pytest.mark.parametrize("adapter", FILES)
def test_what_is_asked_for_with_a_default_is_in_some_release(adapter):
    for read in (read for read in sorted(attributes.reads(adapter)) if not read.required):
        wrapper = OF_WRAPPERS.get((adapter, read.of, read.name))
        found = [
            version
            for version in reversed(RELEASES)
            if has_rows(adapter, version)
            for places in ([(wrapper,)] if wrapper else kinds_in(version, adapter, read))
            if any(defined(version, place, read.name) for place in places)
        ]
        where = f"{adapter}, {read.module}.py:{read.line}"
        assert found or not kinds_of(adapter, read), f"{where}: no release has {read.of}.{read.name}"


MADE_UP = """
def replace_forward(original):
    def forward_c4_indexer(self, x, q_lora, c4_indexer, forward_batch):
        forward_batch.made_up, forward_batch.forward_mode.made_up, x.shape
        getattr(forward_batch, "made_up_too"), getattr(forward_batch, "asked_for", None)
        return self.made_up_of_the_mixin, c4_indexer.index_topk
    return forward_c4_indexer
"""


def test_a_made_up_name_is_found():
    found = attributes.reads_of(ast.parse(MADE_UP), "index_select")
    texts = missing("index_select", RELEASES[-1], found)
    assert [text.partition(" is not in ")[0].partition(": ")[2] for text in texts] == [
        *("forward_batch.made_up", "forward_batch.made_up_too", "forward_batch.forward_mode.made_up"),
        "self.made_up_of_the_mixin",
    ]
    (asked,) = [read for read in found if not read.required]
    assert not any(
        defined(RELEASES[-1], *places, asked.name) for places in kinds_in(RELEASES[-1], "index_select", asked)
    )
    stranger = attributes.reads_of(ast.parse("def f(stranger):\n    return stranger.layers"), "index_select")
    with pytest.raises(AssertionError, match="what is stranger, of which .layers is read"):
        missing("index_select", RELEASES[-1], stranger)


def test_every_object_that_is_named_is_read():
    for adapter, objects in OBJECTS.items():
        read = attributes.reads(adapter)
        words = {one.of for one in read} | {f"{one.function}:{one.of}" for one in read}
        assert set(objects) <= words, adapter
        assert OURS.get(adapter, set()) <= words, adapter
