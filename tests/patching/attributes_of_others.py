"""What adapters read of objects that are not SGLang's, and what they read where something else is there, for
test_wheel_attributes.py, which has no room for what `abort_names`, `first_requests`, `fp8_linear` read of SGLang's."""

import torch

from deepseek_v4_sm120.sglang_patches.fixes.calls_or_answers import CALLS, JUDGE
from deepseek_v4_sm120.sglang_patches.rows.first_uses import HTTP_SERVER
from deepseek_v4_sm120.sglang_patches.rows.http_server import CHAT, OPENAI, RESPONSES_REQUEST, TOKENIZER_MANAGER
from deepseek_v4_sm120.sglang_patches.rows.mhc import CUDA_LAYER, LAYER
from deepseek_v4_sm120.sglang_patches.rows.scheduler import BATCH, REQUEST, SCHEDULER

SRT = "sglang.srt"
OF_ABORTS = {
    "recv_req": ((f"{SRT}.managers.io_struct:AbortReq",),),
    **{"one": ((REQUEST,),), "batch": ((BATCH,),), "scheduler": ((SCHEDULER,),)},
    "entry": ((f"{SRT}.disaggregation.decode:DecodeRequest",),),
    "scheduler.grammar_manager": ((f"{SRT}.constrained.grammar_manager:GrammarManager",),),
}

OF_FIRST_REQUESTS = {
    "manager": ((TOKENIZER_MANAGER,),),
    "importlib.import_module(HTTP_SERVER)": ((HTTP_SERVER,),),
    "importlib.import_module(HTTP_SERVER)._global_state": ((f"{HTTP_SERVER}:_GlobalState",),),
    "importlib.import_module(REQUESTS)": ((f"{SRT}.managers.io_struct",),),
    "answers[answer]": ((f"{SRT}.managers.io_struct:GenerateReqInput",),),
    "type(is_up)": ((f"{TOKENIZER_MANAGER.partition(':')[0]}:ServerStatus",),),
}

OF_SHARED = {  # experts, of the layer that runs
    "layers.layer": ((LAYER,), (CUDA_LAYER,)),
    "getattr(layers.layer, 'mlp', None)": ((f"{SRT}.models.deepseek_v2:DeepseekV2MoE",),),
    "shared": ((f"{SRT}.models.deepseek_v2:DeepseekV2MLP",),),
}

OF_GRAMMARS = {  # what requests are held to
    "calls_or_answers": {
        "importlib.import_module(CALLS)": ((CALLS,),),
        "importlib.import_module(JUDGE)": ((">=0.5.21", JUDGE),),
        "parser": ((f"{CALLS}:FunctionCallParser",),),
        "made": ((f"{SRT}.managers.io_struct:GenerateReqInput",),),
        "processed": ((f"{OPENAI}.protocol:MessageProcessingResult",),),
        "replace_make:request": ((">=0.5.18", RESPONSES_REQUEST),),
        "request": ((f"{OPENAI}.protocol:ChatCompletionRequest",),),
        "request.response_format": ((f"{OPENAI}.protocol:ResponseFormat",),),
        "serving": ((CHAT,),),
        "manager": ((TOKENIZER_MANAGER,),),
        "manager.server_args": (("<0.5.17", f"{SRT}.server_args:ServerArgs"),),
    },
    "mixed_grammars": {
        "batch": ((BATCH,),),
        "batch.forward_mode": ((f"{SRT}.model_executor.forward_batch_info:ForwardMode",),),
        "batch.spec_algorithm": ((f"{SRT}.speculative.spec_info:SpeculativeAlgorithm",),),
    },
}

OF_LONG_CALLS = {
    "parser": (("<0.5.21", f"{SRT}.function_call.base_format_detector:BaseFormatDetector"),),
    "parser_dict.get(index)": ((f"{SRT}.function_call.function_call_parser:FunctionCallParser",),),
    "request": (("<0.5.21", f"{OPENAI}.protocol:ResponsesRequest"),),
    "step": (("<0.5.21", f"{SRT}.entrypoints.context:SimpleContext"),),
}

OF_WALKS = {
    "self[:page_size]": ((f"{SRT}.mem_cache.radix_cache:RadixKey",),),
    "state": ((">=0.5.17", f"{SRT}.mem_cache.unified_cache.unified_tree_core:_InsertWalkState"),),
}
OF_FIXES = {"long_calls": OF_LONG_CALLS, "abort_names": OF_ABORTS, "first_requests": OF_FIRST_REQUESTS, **OF_GRAMMARS}
OF_FIXES["prefix_walks"] = OF_WALKS
OF_FIXES["logprob_pieces"] = {
    "metadata": ((f"{SRT}.layers.logits_processor:LogitsMetadata",),),
    "processor": ((f"{SRT}.layers.logits_processor:LogitsProcessor",),),
    "result": ((f"{SRT}.layers.utils.logprob:InputLogprobsResult",),),
    "lm_head": ((f"{SRT}.lora.layers:ParallelLMHeadWithLoRA",),),
}

# what is ours, torch's or Python's, by adapter; "*": in any
OURS = {
    "*": {"settings()", "original", "kept", "engine", "engine.steering", "function"},
    "all_reduce": {"asked", "communicator", "communicator.sums", "found", "place", "places[0]", "verdict"},
    "argument_defaults": {"c", "v", "engine.profile", "found.hf_config", "engine.steering.outcome('reproducible')"},
    "bf16_linear_dealt": {"communicator", "communicator.product_tags", "group"},
    "prompt_passes": {"communicator"},
    "compressor": {"layout"},
    "effort_levels": {"file", "importlib.import_module('huggingface_hub')"},
    "fp8_linear": {"process"},
    "bf16_linear_draft_head": {"DraftHead", "found", "getattr(self, COPY)", "head"},
    **{
        "handed_over": {"_loading", "process"},
        "held_latents": {"product"},
        "own_outputs": {"kept(self)", "scheduler.disaggregation_mode"},
    },
    "index_select": {"_forward", "deferred", "scores"},
    "index_select_dealt": {"_prompt"},
    "mhc": {"x"},
    "mhc_dealt_streams": {"_pass", "_pass.layer", "f", "shares"},
    **dict.fromkeys(("mhc_owed_sum", "mhc_owed_terms"), {"x"}),
    "mhc_sum": {"ours", "ours.sums"},
    "min_p_verify": {"of_batch"},
    "mxfp4_moe": {"experts", "getattr(layer, KEPT)", "ours", "routed", "type(method).apply"},
    **dict.fromkeys(("sampling", "seeded_draws"), {"inspect.unwrap(original)"}),
    "sparse_decode": {"_backend", "call", "kv_page_layout()"},
    "cut_characters": {"encoded", "self._hf_tokenizer", "tokenizer"},
    "argument_names": {"chunk", "names", "recipe", "tokenizer"},
    **{
        "nccl_start": {"teller", "verdict", "peer"},
        "penalties": {"changes", "kind", "told"},
        "prompt_logprobs": {"of_pass"},
        "logprob_pieces": {"piece"},
    },
    **{"stop_sequences": {"listening"}, "unknown_tokens": {"asked"}, "echoed_items": {"raw_request"}},
    **{"prompts_aside": {"loop"}, "response_errors": {"error"}, "fenced_copies": {"copies"}},
    **{"stored_responses": {"one"}, "scrapes_aside": {"app", "route"}},
    **{"short_prompts": {"turn", "turn.adder"}, "abort_names": {"OF_ITS_OWN", "held"}, "last_turns": {"last"}},
    **{"token_logprobs": {"tokenizer"}, "tool_strings": {"parameter"}, "min_tokens": {"tokenizer"}},
    **{"known_schemas": {"hashed", "self.original"}, "token_texts": {"texts"}, "default_thinking": {"reasoning"}},
    "first_requests": {"answer", "asked", "beat", "called", "given", "loop", "mark"},
    "known_turns": {"_MARK", "found", "rendered", "super()", "tokenizer", "type(tokenizer)"},
    **{"calls_or_answers": {"calls[1]"}, "own_names": {"content", "formats", "node", "type(made)"}},  # XGrammar's
    "long_calls": {"START", "TEXT", "start", "whole"},
    "halves_trial": {"end", "found", "found[-1][2]", "rows", "start", "torch.cuda.Event(enable_timing=True)", "trial"},
    "prompts_in_halves": {
        *("_running", "_trials", "batch.forward_mode", "cut", "made"),
        *("half", "half.halves", "made.halves", "rows", "tried", "work"),
    },
    "halves_in_graphs": {
        *("batch.forward_mode", "cut", "half", "halves", "other", "work", "eager", "captured", "super()"),
    },
    "turns": {"_kept", "_worker()", "behind", "contextvars.copy_context()", "place", "stack"},
    "waiting": {"kind", "w", "waiting"},
    "wo_a": {
        *("FORWARD", "expanded", "given", "groups", "groups.stored", "load", "parameter", "rotation", "signature"),
        *("layer.quant_method", "param", "stored", "weight"),
    },
}
OF_TENSORS_AND_OTHERS = {name for one in (torch.Tensor, dict, list, str, set) for name in dir(one)} | {"__name__"}
# read where another attribute of the object is there: (adapter, object, attribute) -> that one
GUARDED = {
    ("all_reduce", "context", "get_schedule"): "max_speculative_num_draft_tokens",
    ("all_reduce", "context", "max_speculative_num_draft_tokens"): "max_speculative_num_draft_tokens",
    ("index_select_dealt", "context", "get_server_args"): "get_server_args",
    ("argument_defaults", "server_args", "get_model_config"): "get_model_config",
    ("waiting_chunks", "cache", "is_chunk_cache"): "is_chunk_cache",
    ("waiting_chunks", "request", "prefix_indices"): "prefix_indices",
    ("short_prompts", "request", "prefix_indices"): "prefix_indices",
    ("calls_or_answers", "serving", "_effective_tools"): "_effective_tools",
    ("calls_or_answers", "manager", "config_value"): "config_value",
}
