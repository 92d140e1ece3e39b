"""THE table: every SGLang name that we touch, why, in which versions, and until when. The only file that spells them,
but for its other parts, the files of rows/, names.py and defaults.py, SGLang's own defaults that
we change.

Adding an operator: a Patch row here, an adapter in adapters/, an op in ops/; a fault of SGLang's, a module in fixes/.
Reviewing a release: read what `python3 tests/patching/review.py RELEASE` shows, mend rows, adapters and fixes, then
record it: reviewed.json and known_files/.
"""

import functools
from pathlib import Path

from deepseek_v4_sm120.patching import known_files, ledger, reads
from deepseek_v4_sm120.patching.contract import Bound, ConsumedKeys, Parameters
from deepseek_v4_sm120.patching.spec import Patch, StandIn, Table, Target
from deepseek_v4_sm120.sglang_patches.defaults import DEFAULTS
from deepseek_v4_sm120.sglang_patches.names import (
    ATTENTION,
    BACKEND,
    EXTENSION,
    INDEXER,
    MODEL,
    direct_updates,
    handed_over,
    targets_of,
)
from deepseek_v4_sm120.sglang_patches.rows.all_reduce import ALL_REDUCE, NCCL_START
from deepseek_v4_sm120.sglang_patches.rows.attention import (
    DRAFT_CHAIN,
    HELD_LATENTS,
    LOADED_PREFIXES,
    PLAIN_ANGLES,
    STEP_TABLES,
    UPDATED_SINKS,
)
from deepseek_v4_sm120.sglang_patches.rows.bf16_linear import BF16_LINEAR, DEALT_PRODUCTS
from deepseek_v4_sm120.sglang_patches.rows.compressor import COMPRESSOR
from deepseek_v4_sm120.sglang_patches.rows.draft import DRAFT_INPUT
from deepseek_v4_sm120.sglang_patches.rows.dspark import (
    DSPARK_GRAPHS,
    DSPARK_LENGTHS,
    DSPARK_PENALTIES,
    DSPARK_WINDOWS,
    MIN_P_DSPARK,
)
from deepseek_v4_sm120.sglang_patches.rows.first_uses import FIRST_REQUESTS, PLAIN_SCALING
from deepseek_v4_sm120.sglang_patches.rows.grammars import CALLS_OR_ANSWERS, OWN_NAMES
from deepseek_v4_sm120.sglang_patches.rows.http_server import (
    ARGUMENT_NAMES,
    ASSISTANT_MARKS,
    BILLING_LINES,
    BLANKS_BEFORE_CALLS,
    CALL_ORDER,
    CUT_ARGUMENTS,
    CUT_CHARACTERS,
    DEFAULT_THINKING,
    DEVELOPER_ITEMS,
    DEVELOPER_MESSAGES,
    DISCONNECTS,
    ECHOED_ITEMS,
    EFFORT_LEVELS,
    EMPTY_STOPS,
    FATAL_REQUESTS,
    JSON_ANSWERS,
    KNOWN_SCHEMAS,
    MAX_OUTPUT_TOKENS,
    PROMPTS_ASIDE,
    RESPONSE_ERRORS,
    SAMPLE_SEEDS,
    SAMPLED_STATES,
    SCRAPES_ASIDE,
    STOP_SEQUENCES,
    STORED_RESPONSES,
    STRICT_SCHEMAS,
    SYSTEM_REMINDERS,
    TEXT_PARTS,
    THINK_MARKS,
    THOUGHT_COUNTS,
    THOUGHT_HISTORY,
    TOKEN_LOGPROBS,
    TOKEN_TEXTS,
    TOOL_FIELDS,
    TOOL_NAMESPACES,
    TOOL_STRINGS,
    TURN_PHASES,
    UNCHOSEN_TOOLS,
    UNKNOWN_TOKENS,
    WHOLE_CHARACTERS,
)
from deepseek_v4_sm120.sglang_patches.rows.index_select import DEALT_INDEX, INDEX_SELECT
from deepseek_v4_sm120.sglang_patches.rows.last_turns import KNOWN_TURNS, LAST_TURNS, UNSEEN_PICTURES
from deepseek_v4_sm120.sglang_patches.rows.layers import LAYERS
from deepseek_v4_sm120.sglang_patches.rows.lm_head import DRAFT_HEAD, REPRODUCIBLE_HEAD
from deepseek_v4_sm120.sglang_patches.rows.long_calls import LONG_CALLS
from deepseek_v4_sm120.sglang_patches.rows.mhc import (
    DEALT_STREAMS,
    FUSION_MODULE,
    MHC,
    PROMPTS_IN_HALVES,
)
from deepseek_v4_sm120.sglang_patches.rows.sampling import (
    ASKED_TOKENS,
    CERTAIN_TOKENS,
    DRAFT_PROBABILITIES,
    GREEDY_ARGMAX,
    LOGPROB_PIECES,
    MIN_P_TOKENS,
    MIN_P_VERIFY,
    MIN_TOKENS,
    PENALTIES,
    PROMPT_LOGPROBS,
    REPRODUCIBLE_SAMPLING,
    SEEDED_DRAWS,
)
from deepseek_v4_sm120.sglang_patches.rows.scheduler import (
    ABORT_NAMES,
    CACHED_BEGINNING,
    FENCED_COPIES,
    FIRST_STOPS,
    FREED_WINDOWS,
    GRAMMAR_ENDS,
    GRAMMARS,
    IDLE_CHECKS,
    LONGEST_PROMPT,
    MIXED_CHUNKS,
    MIXED_GRAMMARS,
    OWN_OUTPUTS,
    PADDED_ROWS,
    PREEMPTED_REQUESTS,
    PREFIX_WALKS,
    PROMPTS_ALONE,
    REPLACED_SESSIONS,
    SHARED_BEGINNINGS,
    SHORT_PROMPTS,
    STORED_PAGES,
    STRIPPED_THOUGHTS,
    WAITING_CHUNKS,
    WAITING_PROMPTS,
)
from deepseek_v4_sm120.sglang_patches.rows.wo_a import INIT_PARAMETERS, WO_A

METADATA = "sglang.srt.layers.attention.dsv4.metadata"
SM120_ATTENTION_0_5_14 = "sglang.srt.layers.attention.flash_mla_sm120"  # 0.5.13 to 0.5.15
SM120_ATTENTION = "sglang.kernels.ops.attention.flash_mla_sm120"
SM120_CALL = "flash_mla_with_kvcache_sm120"
FP8_METHOD = "sglang.srt.layers.quantization.fp8:Fp8LinearMethod"
MARLIN_EXPERTS = "sglang.srt.layers.quantization.mxfp4_marlin_moe:Mxfp4MarlinMoEMethod"
SHARED_ADD = "sglang.srt.models.deepseek_v2:maybe_fuse_routed_scale_and_shared_add"
CUTLASS_EXPERTS = "sglang.srt.layers.quantization.mxfp4_flashinfer_cutlass_moe:Mxfp4FlashinferCutlassMoEMethod"
LEDGER = Path(__file__).with_name("reviewed.json")
KNOWN_FILES = Path(__file__).with_name("known_files")
READS = Path(__file__).with_name("reads.json")

SM120_KEYS = (
    "q",
    "k_cache",
    "head_dim_v",
    "softmax_scale",
    "indices",
    "topk_length",
    "attn_sink",
    "extra_k_cache",
    "extra_indices_in_kvcache",
    "extra_topk_length",
)
FLASH_MLA_PARAMETERS = (
    *("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata"),
    *("num_splits=...", "softmax_scale=None", "causal=False", "is_fp8_kvcache=False", "indices=None"),
    *("attn_sink=None", "extra_k_cache=None", "extra_indices_in_kvcache=None", "topk_length=None"),
    "extra_topk_length=None",
)
FLASH_MLA = Parameters(FLASH_MLA_PARAMETERS, imported=True)
SM120 = ConsumedKeys(SM120_KEYS)
PLANNED = Parameters((), further="any", imported=True)
SGL_KERNEL = Parameters((*FLASH_MLA_PARAMETERS[:9], "descale_q=None", "descale_k=None", *FLASH_MLA_PARAMETERS[9:]))
FLASH_MLA_INTERFACE = Parameters((*SGL_KERNEL.signature, "kv_format=None", "*", "use_legacy=True"))

_attention, _experts = map(targets_of, ("sparse_decode", "mxfp4_moe"))
_linear = targets_of("fp8_linear")

SPARSE_DECODE = Patch(
    name="sparse_decode",
    why="the sparse attention of every layer and mode: stock has no SM120 kernel (0.5.12), a Triton kernel that reads "
    "the cache once per head (0.5.14), FlashInfer's behind a page copy (0.5.17 and later); bench/sparse_decode.py",
    targets=(
        # 0.5.12, the preview image, trees with the pip package flash_mla
        _attention("flash_mla:flash_mla_with_kvcache", "flash_mla", FLASH_MLA, "<0.5.13"),
        _attention(f"{SM120_ATTENTION_0_5_14}:{SM120_CALL}", "sm120", SM120, ">=0.5.13,<0.5.16", BACKEND),
        _attention(f"{SM120_ATTENTION}:{SM120_CALL}", "sm120", SM120, ">=0.5.16,<0.6", BACKEND),
    ),
    needs=(EXTENSION,),
    retire="when the stock kernel is faster on SM120 (bench/sparse_decode.py)",
)

SPARSE_DECODE_HOPPER = Patch(
    name="sparse_decode_hopper",
    why="validation only: SGLang's call on other GPUs, so that ours is compared with FlashMLA's Hopper kernel. Extend "
    "goes through it too with SGLANG_OPT_FLASHMLA_SPARSE_PREFILL=0 and at most 11,673 rows, else through another one",
    targets=(
        # of sglang-kernel; the backend imports it at the call
        _attention(
            "sgl_kernel.flash_mla:flash_mla_with_kvcache", "sgl_kernel", SGL_KERNEL, ">=0.5.13,<0.5.23", BACKEND
        ),
        # in front of the wheel sgl-flash-mla; the backend takes it from the module when it is made
        _attention(
            "sglang.kernels.ops.attention.flash_mla_interface:flash_mla_with_kvcache",
            *("flash_mla_interface", FLASH_MLA_INTERFACE, ">=0.5.23,<0.6", BACKEND),
        ),
    ),
    needs=(EXTENSION,),
    modes=("ops",),
    retire="never: it is a test",
)

EXPERTS = Parameters(("self", "layer"))
EXPERTS_APPLY = Parameters(("self", "layer", "dispatch_output"))
SHARED_ADD_PARAMETERS = Parameters(("experts", "routed", "shared", "routed_scaling_factor"), imported=True)

MXFP4_MOE = Patch(
    name="mxfp4_moe",
    why="the routed experts of FP4 checkpoints: stock raises on SM120 (0.5.12), runs Marlin with an unfused clamp, by "
    "--moe-runner-backend marlin, or six kernels with MXFP8 activations (0.5.16 and later); bench/mxfp4_moe.py",
    targets=(
        *direct_updates(_experts, "direct"),
        *handed_over(),
        _experts(f"{MARLIN_EXPERTS}.process_weights_after_loading", "marlin_process", EXPERTS),
        _experts(f"{MARLIN_EXPERTS}.apply", "marlin_apply", EXPERTS_APPLY),
        _experts(f"{CUTLASS_EXPERTS}.process_weights_after_loading", "cutlass_process", EXPERTS, ">=0.5.16,<0.6"),
        _experts(f"{CUTLASS_EXPERTS}.apply", "cutlass_apply", EXPERTS_APPLY, ">=0.5.16,<0.6"),
        # the add in front of a boundary, which torch's kernel does not let begin
        _experts(SHARED_ADD, "shared_add", SHARED_ADD_PARAMETERS, ">=0.5.13,<0.6"),
    ),
    needs=(EXTENSION,),
    retire="when the stock experts are faster on SM120 (bench/mxfp4_moe.py)",
)

CHOICE = Parameters(
    (
        *("hidden_states", "gating_output", "correction_bias", "topk", "renormalize", 'scoring_func="sigmoid"'),
        *("num_fused_shared_experts=0", "routed_scaling_factor=None", "num_token_non_padded=None"),
        *("expert_location_dispatch_info=None", "apply_routed_scaling_factor_on_output=False"),
    ),
    further="any",
)


def _choice(name: str, sglang: str) -> Target:
    return targets_of("router_topk")("sglang.srt.layers.moe.topk:biased_topk_jit_kernel_impl", name, CHOICE, sglang)


ROUTER_TOPK = Patch(
    name="router_topk",
    why="the choice of a row's experts, behind the router's logits and in front of everything of the experts: stock's "
    "Triton kernel adds 2.2 to 2.6 us to a layer at one row and lets the experts in at its end; bench/router_topk.py",
    targets=(
        _choice("log", ">=0.5.15,<0.5.20"),
        _choice("log1p", ">=0.5.20,<0.5.21"),
        _choice("masked", ">=0.5.21,<0.6"),
    ),
    needs=(EXTENSION,),
    default="router_topk",
    absent="up to 0.5.14 another kernel, whose ties go by its threads",
    retire="when the stock kernel is as fast (bench/router_topk.py)",
)

REPRODUCIBLE_ARGUMENTS = Patch(
    name="reproducible_arguments",
    why="--enable-deterministic-inference, with which each request has a seed, refuses this model's attention and puts "
    "custom sums between the cards aside, ours among them",
    targets=(
        targets_of("argument_defaults")(
            "sglang.srt.server_args:ServerArgs._handle_deterministic_inference",
            "deterministic_method",
            Parameters(("self",)),
            ">=0.5.14,<0.5.19",
        ),
        targets_of("argument_defaults")(
            "sglang.srt.arg_groups.attention_hook:handle_deterministic_inference",
            "deterministic",
            Parameters(("server_args",)),
            ">=0.5.19,<0.6",
        ),
    ),
    default="reproducible",
    absent="0.5.12 and 0.5.13 were not looked at",
    retire="when SGLang takes the flag for this model",
)

FP8_LINEAR = Patch(
    name="fp8_linear",
    why="the dense FP8 layers, up to 256 rows: stock quantises the activations in a launch of its own before each GEMM "
    "(Triton up to 0.5.15, then CUTLASS; DeepGEMM on Hopper), and a row's bits change with their number. On an H200 "
    "faster than the pair up to 32 rows, slower at 64; that SM120 needs hardly longer for 64 rows than for its weights "
    "is reckoned, not measured: docs/notes/fp8_linear.md",
    targets=(
        _linear(f"{ATTENTION}.__init__", "attention_init", INIT_PARAMETERS),
        _linear(f"{FP8_METHOD}.apply", "apply", Parameters(("self", "layer", "x", "bias=None"))),
    ),
    needs=(EXTENSION,),
    retire="when the stock GEMM and its quantisation are faster on SM120 for few rows (bench/fp8_linear.py)",
)

UNPADDED_HEADS = Patch(
    name="unpadded_heads",
    why="above TP1 the queries are padded to 64 heads for kernels that need it; ours takes the rank's own heads",
    targets=(
        # before, the rank's heads are not the first ones; from 0.5.20 on DSPARK's draft and other GPUs alone pad
        _attention(
            f"{BACKEND}:DeepseekV4AttnBackend.forward",
            "backend_forward",
            Parameters(("self", "q", "k", "v", "layer"), further="any"),
            ">=0.5.14,<0.6",
        ),
        _attention(
            f"{MODEL}:MqaAttentionBase._kernel_num_heads",
            "kernel_num_heads",
            Parameters(("self", "num_tokens")),
            ">=0.5.20,<0.6",
        ),
    ),
    needs=(EXTENSION,),
    serves="sparse_decode",
    absent="up to 0.5.13 the rank's heads lie at an offset that the call does not tell: all are computed",
    retire="with sparse_decode",
)

PAGED_PREFILL = Patch(
    name="paged_prefill",
    why="extend above 11,673 rows, in 0.5.15 of any size, copies the history to bf16 for a kernel without SM120 code; "
    "0.5.16 asks for the GPU first. sparse_decode reads the pages in place",
    targets=(
        _attention(
            f"{BACKEND}:DeepseekV4AttnBackend._forward_prefill_sparse",
            "forward_prefill_sparse",
            Parameters(
                (
                    *("self", "q", "layer_id", "compress_ratio", "forward_batch", "token_to_kv_pool"),
                    *("core_attn_metadata", "attn_sink"),
                )
            ),
            ">=0.5.13,<0.5.16",
            BACKEND,
        ),
    ),
    needs=(EXTENSION,),
    modes=("sm120", "seams"),
    serves="sparse_decode",
    absent="0.5.12 has no such prefill, and from 0.5.16 on SM120 does not go there",
    retire="with SGLang 0.5.15",
)

SCHED_META = Patch(
    name="sched_meta",
    why="FlashMLA's tile schedule: planned by CUDA code that has no SM120 build, and unused by our kernel",
    targets=(_attention("flash_mla:get_mla_metadata", "sched_meta", PLANNED, "<0.5.13"),),
    modes=("sm120", "seams"),
    serves="sparse_decode",
    absent="from 0.5.13 on SM120 needs no such schedule",
    retire="with SGLang 0.5.12",
)


ARGUMENT_DEFAULTS = Patch(
    name="argument_defaults",
    why="the places where SGLang resolves arguments, of any model: nothing holds of a server before; and of this one: "
    "defaults.py is applied there",
    stays="without it no process is told which model it serves, so that all mends do nothing, without a word, and the "
    "operators take other models' calls; each default has a name of its own",
    targets=(
        targets_of("argument_defaults")(
            "sglang.srt.server_args:ServerArgs._handle_model_specific_adjustments",
            "adjustments_method",
            Parameters(("self",)),
            "<0.5.19",
        ),
        targets_of("argument_defaults")(
            "sglang.srt.arg_groups.model_hook:handle_model_specific_adjustments",
            "adjustments",
            Parameters(("server_args",)),
            ">=0.5.19,<0.6",
        ),
        targets_of("argument_defaults")(
            "sglang.srt.arg_groups.deepseek_v4_hook:apply_deepseek_v4_defaults",
            "apply_defaults",
            Parameters(("server_args", "model_arch")),
        ),
    ),
    retire="with the last of them",
)

PREFILL_GRAPHS = Patch(
    name="prefill_graphs",
    why="a prompt of a thousand tokens waits for its launches; SGLang's breakable prefill graphs leave this model out "
    "for the memory of its index logits, of which ours has none. Asked for where SGLang asks for other models' graphs, "
    "ahead of the rules that leave them out",
    targets=(
        targets_of("prefill_graphs")(
            "sglang.srt.server_args:ServerArgs._apply_inkling_prefill_cuda_graph_default",
            "method",
            Parameters(("self",)),
            ">=0.5.17,<0.5.19",
        ),
        targets_of("prefill_graphs")(
            "sglang.srt.arg_groups.cuda_graph_hook:apply_inkling_prefill_cuda_graph_default",
            "function",
            Parameters(("server_args",)),
            ">=0.5.19,<0.5.23",
        ),
        targets_of("prefill_graphs")(
            "sglang.srt.arg_groups.cuda_graph_hook:apply_inkling_prefill_cuda_graph_default",
            "with_mtp",
            Parameters(("server_args",)),
            ">=0.5.23,<0.6",
        ),
    ),
    default="prefill_graphs",
    serves="index_select",
    absent="its graphs of this model were read from 0.5.17 on",
    retire="when SGLang captures this model's prefill by default",
)

MARLIN_ON_SM120 = Patch(
    name="marlin_on_sm120",
    why="0.5.12's Marlin experts refuse every GPU but SM90; the kernel is compiled on the machine and runs on SM120",
    targets=(
        targets_of("argument_defaults")(
            "sglang.srt.layers.quantization.mxfp4_marlin_moe:is_sm90_supported",
            "marlin_gate",
            Bound(),
            ">=0.5.12,<0.5.13",
        ),
    ),
    modes=("sm120",),
    absent="from 0.5.13 on Marlin accepts SM120 itself",
    retire="with SGLang 0.5.12",
)

PREFILL_INTERVAL = Patch(
    name="prefill_interval",
    why="one long prompt's chunks all run before anybody else's next token; later releases have an argument for it",
    targets=(
        targets_of("scheduling")(
            "sglang.srt.managers.scheduler:Scheduler._get_new_batch_prefill_raw",
            "new_batch_prefill",
            Parameters(("self", "prefill_delayer_single_pass", "running_batch")),
            ">=0.5.17,<0.5.18",
        ),
    ),
    default="prefill_decode_interval_0_5_17",
    absent="it holds 0.5.17's chunks back; 0.5.19 and later have --prefill-decode-interval",
    retire="with SGLang 0.5.17",
)


def _seams(name: str, sglang: str, *places: str) -> tuple[Target, ...]:
    return tuple(targets_of("platform_seams")(where, name, Bound(), sglang) for where in places)


SM120_SEAMS = Patch(
    name="sm120_seams",
    why="validation only: the modules that choose and run DeepSeek-V4's attention, indexer and mHC are told that the "
    "GPU is SM120. Argument resolution then forces what SM120 users get: TileLang indexer, top-k v1, torch mHC, bf16 "
    "wo_a",
    targets=(
        # up to 0.5.18: the predicate as each module imported it, and one global frozen from it
        *_seams(
            "predicate",
            ">=0.5.13,<0.5.19",
            "sglang.srt.server_args:is_sm120_supported",
            f"{INDEXER}:is_sm120_supported",
        ),
        *_seams("flag", ">=0.5.13,<0.5.19", f"{BACKEND}:_is_sm120"),
        *_seams("predicate", ">=0.5.17,<0.5.19", f"{MODEL}:is_sm120_supported"),
        # from 0.5.19: the platform object as each module imported it, and one global frozen from it
        *_seams(
            "get_platform",
            ">=0.5.19,<0.6",
            "sglang.srt.arg_groups.model_hook:get_platform",
            f"{BACKEND}:get_platform",
            f"{INDEXER}:get_platform",
            f"{MODEL}:get_platform",
            f"{FUSION_MODULE}:get_platform",
        ),
        *_seams("flag", ">=0.5.20,<0.6", f"{METADATA}:_IS_SM120"),
        *_seams("get_platform", ">=0.5.21,<0.6", "sglang.srt.mem_cache.deepseek_v4_memory_pool:get_platform"),
    ),
    modes=("seams",),
    absent="0.5.12 asks nowhere for SM120",
    retire="never: it is a test",
)

# What DSV4_SM120_FORCE=seams leaves at the truth, because an SM120 answer there selects code that another GPU cannot
# run, or says nothing about our seams. On an H200 the engine then runs with --moe-runner-backend marlin and the dense
# GEMM backend that SGLang picks there (DeepGEMM), or --fp8-gemm-backend triton. The stock SM120 attention, where we do
# not serve or in shadow mode, needs SGLANG_SM120_FLASHMLA_BACKEND=triton: FlashInfer's kernel has SM120 code only.
LEFT_AT_TRUTH = {
    "sglang.srt.utils.common": "the predicate itself: everything below asks it",
    "sglang.srt.layers.quantization.fp8_utils": "dense FP8 GEMM: the SM120 CUTLASS kernel is compiled for sm_120a only",
    "sglang.kernels.ops.gemm.fp8_blockwise_gemm": "asserts SM120 before it compiles that kernel",
    "sglang.kernels.ops.quantization.fp8_kernel": "Triton stages for 99 KB of shared memory: tuning",
    "sglang.kernels.ops.gemm.fused_a_gemm": "chooses a CuTe DSL kernel for SM120",
    "sglang.srt.layers.deep_gemm_wrapper.configurer": "DeepGEMM stays on: it is the machine's dense GEMM",
    "sglang.srt.arg_groups.overrides": "would turn --moe-runner-backend auto into flashinfer_mxfp4, whose kernel "
    "(MXFP8 x MXFP4) needs SM120; pass marlin",
    "sglang.srt.layers.quantization.mxfp4_flashinfer_cutlass_moe": "MXFP8 activations: block-scaled FP8 instructions",
    "sglang.srt.layers.quantization.mxfp4_marlin_moe": "accepts SM90 as well",
    "sglang.srt.layers.moe.fused_moe_triton.triton_kernels_moe": "Triton MoE tuning, not on this path",
    "sglang.kernels.ops.layernorm.mhc": "TileLang compile flags (0.5.20: no warp specialisation on SM120), asked by a "
    "local import; the kernels compile either way",
    "sgl_kernel": "loads its library for the machine's own capability",
}

TABLE = Table(
    supported=">=0.5.12,<0.6",
    preflight="sglang.srt.managers.scheduler",
    resolved_at="sglang.srt.arg_groups.deepseek_v4_hook:apply_deepseek_v4_defaults",
    built_at=f"{MODEL}:DeepseekV4ForCausalLM.__init__",
    agrees="deepseek_v4_sm120.sglang_patches.several_hosts:stop_unless_alike",
    reviewed=functools.partial(ledger.read, LEDGER),
    known=functools.partial(known_files.read, KNOWN_FILES),
    reads=functools.partial(reads.read, READS),
    patches=(
        *(SPARSE_DECODE, SPARSE_DECODE_HOPPER, UNPADDED_HEADS, PAGED_PREFILL, SCHED_META),
        *(REPRODUCIBLE_HEAD, REPRODUCIBLE_SAMPLING, REPRODUCIBLE_ARGUMENTS),
        *(INDEX_SELECT, DEALT_INDEX, MXFP4_MOE, BF16_LINEAR, DEALT_PRODUCTS, ROUTER_TOPK, FP8_LINEAR, DRAFT_HEAD, WO_A),
        *(MHC, DEALT_STREAMS, PROMPTS_IN_HALVES, COMPRESSOR, ALL_REDUCE, NCCL_START, DSPARK_LENGTHS, GREEDY_ARGMAX),
        *(CERTAIN_TOKENS, MIN_P_TOKENS, MIN_P_VERIFY, PENALTIES, DSPARK_PENALTIES, MIN_TOKENS, DSPARK_WINDOWS),
        *(
            MIN_P_DSPARK,
            LONGEST_PROMPT,
            CACHED_BEGINNING,
            GRAMMARS,
            GRAMMAR_ENDS,
            TOOL_STRINGS,
            DISCONNECTS,
            DEFAULT_THINKING,
        ),
        *(THOUGHT_HISTORY, DEVELOPER_MESSAGES, UNCHOSEN_TOOLS, EFFORT_LEVELS, JSON_ANSWERS, THINK_MARKS, LONG_CALLS),
        *(CUT_CHARACTERS, CALL_ORDER, TURN_PHASES, BLANKS_BEFORE_CALLS, BILLING_LINES, STOP_SEQUENCES),
        *(WHOLE_CHARACTERS, THOUGHT_COUNTS, UNKNOWN_TOKENS, MAX_OUTPUT_TOKENS, PROMPT_LOGPROBS, SEEDED_DRAWS),
        *(PROMPTS_ASIDE, FATAL_REQUESTS, EMPTY_STOPS, ECHOED_ITEMS, RESPONSE_ERRORS, TOKEN_LOGPROBS, TOOL_NAMESPACES),
        *(SAMPLED_STATES, STRICT_SCHEMAS, SAMPLE_SEEDS, TOOL_FIELDS, TEXT_PARTS, CUT_ARGUMENTS, ARGUMENT_NAMES),
        *(SYSTEM_REMINDERS, DEVELOPER_ITEMS, ASSISTANT_MARKS, SHARED_BEGINNINGS, STRIPPED_THOUGHTS),
        *(WAITING_CHUNKS, MIXED_CHUNKS),  # the first below PREEMPTED_REQUESTS, which is told what was let in at last
        *(PREEMPTED_REQUESTS, SHORT_PROMPTS, WAITING_PROMPTS, PADDED_ROWS, UPDATED_SINKS, LOADED_PREFIXES),
        *(FENCED_COPIES, FREED_WINDOWS, DSPARK_GRAPHS, DRAFT_CHAIN, FIRST_STOPS, STEP_TABLES, PLAIN_ANGLES),
        *(HELD_LATENTS, DRAFT_PROBABILITIES, REPLACED_SESSIONS, STORED_PAGES, ARGUMENT_DEFAULTS, PREFILL_GRAPHS),
        *(ASKED_TOKENS, KNOWN_SCHEMAS, FIRST_REQUESTS, PLAIN_SCALING, KNOWN_TURNS, OWN_NAMES, MIXED_GRAMMARS),
        *(CALLS_OR_ANSWERS, PREFIX_WALKS, IDLE_CHECKS, STORED_RESPONSES, TOKEN_TEXTS, LOGPROB_PIECES, SCRAPES_ASIDE),
        *(ABORT_NAMES, LAST_TURNS, UNSEEN_PICTURES),  # these two behind what they are told of, and TEXT_PARTS
        *(MARLIN_ON_SM120, PREFILL_INTERVAL, PROMPTS_ALONE, OWN_OUTPUTS, SM120_SEAMS, DRAFT_INPUT, LAYERS),
    ),
    defaults=DEFAULTS,
    stand_ins=(
        StandIn(
            name="flash_mla",
            why="SGLang 0.5.12 imports it inside its attention backend, but does not require it",
            package="deepseek_v4_sm120.sglang_patches.adapters.flash_mla_absent",
            sglang="<0.5.13",
            only_after=BACKEND,
            condition="deepseek_v4_sm120.sglang_patches.device_gate:serves_current_device",
        ),
    ),
)
