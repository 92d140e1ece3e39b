"""THE table: every SGLang name that we touch, why, in which versions, and until when. The only file that spells them,
but for its other parts, the files sglang_patches_*.py beside it, and sglang_settings.py, SGLang's own defaults that
we change.

Adding an operator: a Patch row here, an adapter in sglang_adapters/, an op in ops/. Reviewing a release: read the
definitions that tests/patching/test_wheels.py calls UNREVIEWED, then add version and digest to `reviewed`.
"""

from deepseek_v4_sm120.patching.contract import Bound, ConsumedKeys, Parameters
from deepseek_v4_sm120.patching.spec import MODES, Patch, StandIn, Table, Target
from deepseek_v4_sm120.sglang_patches_compressor import COMPRESSOR
from deepseek_v4_sm120.sglang_patches_fp8_linear import PROLOGUES
from deepseek_v4_sm120.sglang_patches_mhc import MHC
from deepseek_v4_sm120.sglang_patches_q_norm import Q_NORM
from deepseek_v4_sm120.sglang_patches_wo_a import WO_A
from deepseek_v4_sm120.sglang_settings import SETTINGS

BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend"
INDEXER = "sglang.srt.layers.attention.dsv4.indexer"
MODEL = "sglang.srt.models.deepseek_v4"
SM120_ATTENTION_0_5_14 = "sglang.srt.layers.attention.flash_mla_sm120"  # 0.5.13 to 0.5.15
ADAPTER = "deepseek_v4_sm120.sglang_adapters.sparse_decode"
INDEX_ADAPTER = "deepseek_v4_sm120.sglang_adapters.index_select"
SEAMS = "deepseek_v4_sm120.sglang_adapters.platform_seams"
EXPERTS = "deepseek_v4_sm120.sglang_adapters.mxfp4_moe"
FP8_METHOD = "sglang.srt.layers.quantization.fp8:Fp8LinearMethod"
LINEAR_ADAPTER = "deepseek_v4_sm120.sglang_adapters.bf16_linear"
MARLIN_EXPERTS = "sglang.srt.layers.quantization.mxfp4_marlin_moe:Mxfp4MarlinMoEMethod"
CUTLASS_EXPERTS = "sglang.srt.layers.quantization.mxfp4_flashinfer_cutlass_moe:Mxfp4FlashinferCutlassMoEMethod"
EXTENSION = "deepseek_v4_sm120.extension:load"

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
    "q",
    "k_cache",
    "block_table",
    "cache_seqlens",
    "head_dim_v",
    "tile_scheduler_metadata",
    "num_splits",
    "softmax_scale",
    "causal",
    "is_fp8_kvcache",
    "indices",
    "attn_sink",
    "extra_k_cache",
    "extra_indices_in_kvcache",
    "topk_length",
    "extra_topk_length",
)
SGL_KERNEL_PARAMETERS = FLASH_MLA_PARAMETERS[:9] + ("descale_q", "descale_k") + FLASH_MLA_PARAMETERS[9:]

SPARSE_DECODE = Patch(
    name="sparse_decode",
    why="the sparse attention of every layer and mode: stock has no SM120 kernel (0.5.12), a Triton kernel that reads "
    "the cache once per head (0.5.14), FlashInfer's behind a page copy (0.5.17 and later); bench/sparse_decode.py",
    targets=(
        Target(
            where="flash_mla:flash_mla_with_kvcache",  # 0.5.12, the preview image, trees with the pip package flash_mla
            sglang="<0.5.13",
            contract=Parameters(FLASH_MLA_PARAMETERS),
            replacement=f"{ADAPTER}:replace_flash_mla",
            reviewed={"0.5.12": "d40be1b51ab0a97c"},  # our stand-in's; the real package is on no index
        ),
        Target(
            where=f"{SM120_ATTENTION_0_5_14}:flash_mla_with_kvcache_sm120",
            sglang=">=0.5.13,<0.5.16",
            contract=ConsumedKeys(SM120_KEYS),
            replacement=f"{ADAPTER}:replace_sm120",
            reviewed={"0.5.14": "f36f6856b0c66f24"},
            caller=BACKEND,
        ),
        Target(
            where="sglang.kernels.ops.attention.flash_mla_sm120:flash_mla_with_kvcache_sm120",
            sglang=">=0.5.16,<0.6",
            contract=ConsumedKeys(SM120_KEYS),
            replacement=f"{ADAPTER}:replace_sm120",
            reviewed={"0.5.17": "13917ae59b9e1101", "0.5.20": "6bc29bd2c2d101be", "0.5.23": "6bc29bd2c2d101be"},
            caller=BACKEND,
        ),
    ),
    needs=(EXTENSION,),
    modes=("sm120", "ops", "seams"),
    retire="when the stock kernel is faster on SM120 (bench/sparse_decode.py)",
)

SPARSE_DECODE_HOPPER = Patch(
    name="sparse_decode_hopper",
    why="validation only: SGLang's call on other GPUs, so that ours is compared with FlashMLA's Hopper kernel. Extend "
    "goes through it too with SGLANG_OPT_FLASHMLA_SPARSE_PREFILL=0 and at most 11,673 rows, else through another one",
    targets=(
        Target(
            where="sgl_kernel.flash_mla:flash_mla_with_kvcache",  # of sglang-kernel; the backend imports it at the call
            sglang=">=0.5.13,<0.5.23",
            contract=Parameters(SGL_KERNEL_PARAMETERS),
            replacement=f"{ADAPTER}:replace_sgl_kernel",
            reviewed={"0.5.17": "ab854e31a46e30d2"},  # of sglang-kernel 0.4.5, which 0.5.17 pins
            caller=BACKEND,
        ),
    ),
    needs=(EXTENSION,),
    modes=("ops",),
    retire="never: it is a test",
)

MXFP4_MOE = Patch(
    name="mxfp4_moe",
    why="the routed experts of FP4 checkpoints: stock raises on SM120 (0.5.12), runs Marlin with an unfused clamp, by "
    "--moe-runner-backend marlin, or six kernels with MXFP8 activations (0.5.16 and later); bench/mxfp4_moe.py",
    targets=(
        Target(
            where=f"{MARLIN_EXPERTS}.process_weights_after_loading",
            sglang=">=0.5.12,<0.6",
            contract=Parameters(("self", "layer")),
            replacement=f"{EXPERTS}:replace_marlin_process",
            reviewed={
                "0.5.12": "6856147747eaa5a2",
                "0.5.14": "cbe4552b1105d054",
                "0.5.17": "cbe4552b1105d054",
                "0.5.20": "62542b6cfa4eb95b",
                "0.5.23": "62542b6cfa4eb95b",
            },
        ),
        Target(
            where=f"{MARLIN_EXPERTS}.apply",
            sglang=">=0.5.12,<0.6",
            contract=Parameters(("self", "layer", "dispatch_output")),
            replacement=f"{EXPERTS}:replace_marlin_apply",
            reviewed={
                "0.5.12": "46da8327a373cdb4",
                "0.5.14": "c15c6fcab53e6047",
                "0.5.17": "bfa8edbd0a6a8b0d",
                "0.5.20": "bfa8edbd0a6a8b0d",
                "0.5.23": "bfa8edbd0a6a8b0d",
            },
        ),
        Target(
            where=f"{CUTLASS_EXPERTS}.process_weights_after_loading",
            sglang=">=0.5.16,<0.6",
            contract=Parameters(("self", "layer")),
            replacement=f"{EXPERTS}:replace_cutlass_process",
            reviewed={"0.5.17": "1b0d6ad6bd4b8623", "0.5.20": "d8b38b4abd50e76a", "0.5.23": "d8b38b4abd50e76a"},
        ),
        Target(
            where=f"{CUTLASS_EXPERTS}.apply",
            sglang=">=0.5.16,<0.6",
            contract=Parameters(("self", "layer", "dispatch_output")),
            replacement=f"{EXPERTS}:replace_cutlass_apply",
            reviewed={"0.5.17": "a60a31559c139f06", "0.5.20": "48e70296a35afa27", "0.5.23": "f52934b6ec0f0d6e"},
        ),
    ),
    needs=(EXTENSION,),
    modes=("sm120", "ops", "seams"),
    retire="when the stock experts are faster on SM120 (bench/mxfp4_moe.py)",
)

BF16_LINEAR = Patch(
    name="bf16_linear",
    why="the bf16 projections of compressors, router and indexer for up to 32 rows: cuBLAS takes two launches "
    "(split-K and its reduction) and a multiple of the time that the bytes need; bench/bf16_linear.py",
    targets=(
        Target(
            where="sglang.srt.layers.attention.dsv4.compressor:linear_bf16_fp32",
            sglang=">=0.5.12,<0.6",
            contract=Bound(),  # keywords, where a caller has any, go to the original
            replacement=f"{LINEAR_ADAPTER}:replace_linear_bf16_fp32",
            reviewed={
                "0.5.12": "d8d03ea7980370cf",
                "0.5.14": "807591cd84255b1b",
                "0.5.17": "d9ece2fafe7b7827",
                "0.5.20": "d9ece2fafe7b7827",
                "0.5.23": "1792bd426b86361f",
            },
        ),
        Target(
            where="sglang.srt.models.deepseek_v2:MoEGate.forward",
            sglang=">=0.5.12,<0.6",
            contract=Parameters(("self", "hidden_states", "gemm_output_zero_allocator", "forward_batch")),
            replacement=f"{LINEAR_ADAPTER}:replace_gate",
            reviewed={
                "0.5.12": "f4f53b6795545505",
                "0.5.14": "e1fe1fa125c30c67",
                "0.5.17": "0efab4f78894bb3c",
                "0.5.20": "fcfea8fc22af0aed",
                "0.5.23": "41eb795b35f95e1e",
            },
        ),
        Target(
            where=f"{INDEXER}:C4Indexer.compute_weights",
            sglang=">=0.5.12,<0.6",
            contract=Parameters(("self", "x", "skip_scale")),
            replacement=f"{LINEAR_ADAPTER}:replace_compute_weights",
            reviewed={
                "0.5.12": "b04b41deacdc98de",
                "0.5.14": "b04b41deacdc98de",
                "0.5.17": "b04b41deacdc98de",
                "0.5.20": "b04b41deacdc98de",
                "0.5.23": "b04b41deacdc98de",
            },
        ),
    ),
    needs=(EXTENSION,),
    modes=("sm120", "ops", "seams"),
    retire="when the stock projections are as fast on SM120 (bench/bf16_linear.py)",
)

FP8_LINEAR = Patch(
    name="fp8_linear",
    why="the dense FP8 layers, up to 64 rows: stock quantises the activations in a launch of its own before each GEMM "
    "(Triton up to 0.5.15, then CUTLASS; DeepGEMM on Hopper). On an H200 1.6 times as fast as the pair at 1 row, 1.16 "
    "at 8, slower at 64; that SM120 needs hardly longer for 64 rows than for its weights is reckoned, not measured: "
    "bench/NOTES.md",
    targets=(
        *PROLOGUES,
        Target(
            where=f"{FP8_METHOD}.apply",
            sglang=">=0.5.12,<0.6",
            contract=Parameters(("self", "layer", "x", "bias")),
            replacement="deepseek_v4_sm120.sglang_adapters.fp8_linear:replace_apply",
            reviewed={
                "0.5.12": "d90366a0b0d097bf",
                "0.5.14": "ff7163103d9a7a98",
                "0.5.17": "b412ac2835e20458",
                "0.5.20": "8f4aa5256c300082",
                "0.5.23": "28b38c86cb4b24c7",
            },
        ),
    ),
    needs=(EXTENSION,),
    modes=("sm120", "ops", "seams"),
    retire="when the stock GEMM and its quantisation are faster on SM120 for few rows (bench/fp8_linear.py)",
)

UNPADDED_HEADS = Patch(
    name="unpadded_heads",
    why="above TP1 the queries are padded to 64 heads for kernels that need it; ours takes the rank's own heads",
    targets=(
        Target(
            where=f"{BACKEND}:DeepseekV4AttnBackend.forward",
            sglang=">=0.5.13,<0.5.20",
            contract=Parameters(
                ("self", "q", "k", "v", "layer", "forward_batch", "compress_ratio", "save_kv_cache", "attn_sink", "**_")
            ),
            replacement=f"{ADAPTER}:replace_backend_forward",
            reviewed={"0.5.14": "7da962da28620918", "0.5.17": "476ca3dfdcac7bf1"},
        ),
        Target(
            where=f"{MODEL}:MqaAttentionBase._kernel_num_heads",
            sglang=">=0.5.20,<0.6",
            contract=Parameters(("self", "num_tokens")),
            replacement=f"{ADAPTER}:replace_kernel_num_heads",
            reviewed={"0.5.20": "bb41bfd8b57e71f1", "0.5.23": "bb41bfd8b57e71f1"},
        ),
    ),
    needs=(EXTENSION,),
    modes=("sm120", "ops", "seams"),
    serves="sparse_decode",
    retire="with sparse_decode",
)

PAGED_PREFILL = Patch(
    name="paged_prefill",
    why="extend above 11,673 rows, in 0.5.15 of any size, copies the history to bf16 for a kernel without SM120 code; "
    "0.5.16 asks for the GPU first. sparse_decode reads the pages in place",
    targets=(
        Target(
            where=f"{BACKEND}:DeepseekV4AttnBackend._forward_prefill_sparse",
            sglang=">=0.5.13,<0.5.16",
            contract=Parameters(
                (
                    *("self", "q", "layer_id", "compress_ratio", "forward_batch", "token_to_kv_pool"),
                    *("core_attn_metadata", "attn_sink"),
                )
            ),
            replacement=f"{ADAPTER}:replace_forward_prefill_sparse",
            reviewed={"0.5.14": "7d948c1e049d185f"},
            caller=BACKEND,
        ),
    ),
    needs=(EXTENSION,),
    serves="sparse_decode",
    retire="with SGLang 0.5.15",
)

SCHED_META = Patch(
    name="sched_meta",
    why="FlashMLA's tile schedule: planned by CUDA code that has no SM120 build, and unused by our kernel",
    targets=(
        Target(
            where="flash_mla:get_mla_metadata",
            sglang="<0.5.13",
            contract=Bound(),
            replacement=f"{ADAPTER}:replace_sched_meta",
            reviewed={"0.5.12": "75cb7364486c8e5d"},
        ),
    ),
    serves="sparse_decode",
    retire="with SGLang 0.5.12",
)


ARGUMENT_DEFAULTS = Patch(
    name="argument_defaults",
    why="the place where SGLang resolves this model's arguments: sglang_settings.py is applied there",
    targets=(
        Target(
            where="sglang.srt.arg_groups.deepseek_v4_hook:apply_deepseek_v4_defaults",
            sglang=">=0.5.12,<0.6",
            contract=Parameters(("server_args", "model_arch")),
            replacement="deepseek_v4_sm120.sglang_adapters.argument_defaults:replace_apply_defaults",
            reviewed={
                "0.5.12": "e8b556a12df90f80",
                "0.5.14": "d0293a8acdce312c",
                "0.5.17": "481b45ec921f171d",
                "0.5.20": "a3b8837de4056da1",
                "0.5.23": "e8fcbf998c3ee743",
            },
        ),
    ),
    modes=MODES,
    retire="with the last setting",
)

MARLIN_ON_SM120 = Patch(
    name="marlin_on_sm120",
    why="0.5.12's Marlin experts refuse every GPU but SM90; the kernel is compiled on the machine and runs on SM120",
    targets=(
        Target(
            where="sglang.srt.layers.quantization.mxfp4_marlin_moe:is_sm90_supported",
            sglang=">=0.5.12,<0.5.13",
            contract=Bound(),
            replacement="deepseek_v4_sm120.sglang_adapters.argument_defaults:replace_marlin_gate",
            reviewed={"0.5.12": "4b35d2c5815d32dc"},
        ),
    ),
    modes=("sm120",),
    retire="with SGLang 0.5.12",
)

PREFILL_INTERVAL = Patch(
    name="prefill_interval",
    why="one long prompt's chunks all run before anybody else's next token; later releases have an argument for it",
    targets=(
        Target(
            where="sglang.srt.managers.scheduler:Scheduler._get_new_batch_prefill_raw",
            sglang=">=0.5.17,<0.5.18",
            contract=Parameters(("self", "prefill_delayer_single_pass", "running_batch")),
            replacement="deepseek_v4_sm120.sglang_adapters.scheduling:replace_new_batch_prefill",
            reviewed={"0.5.17": "1aa796d9f30f8472"},
        ),
    ),
    modes=MODES,
    setting="prefill_decode_interval_0_5_17",
    retire="with SGLang 0.5.17",
)

# DeepGEMM's logits, which forward_c4_indexer imports at the call: (q, cache, weights, lengths, page table, ...)
DEEP_GEMM = "deep_gemm"
DEEP_GEMM_LOGITS = "fp8_paged_mqa_logits"
DEEP_GEMM_LOGITS_FP4 = "fp8_fp4_paged_mqa_logits"
# What users set to choose SGLang's own indexer or top-k; `status` shows the ones that are set
INDEXER_CHOICES = (
    "SGLANG_OPT_USE_TILELANG_INDEXER",
    "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH",
    "SGLANG_OPT_USE_TOPK_V2",
    "SGLANG_TOPK_TRANSFORM_512_TORCH",
    "SGLANG_OPT_DSV4_NONPAGED_INDEXER",
)
TILELANG = "sglang.kernels.ops.attention.dsa.tilelang_kernel"


def _index(where: str, replacement: str, sglang: str, reviewed: dict[str, str], names: tuple[str, ...] = ()) -> Target:
    return Target(
        where=where,
        sglang=sglang,
        contract=Parameters(names) if names else Bound(),
        replacement=f"{INDEX_ADAPTER}:replace_{replacement}",
        reviewed=reviewed,
    )


INDEX_SELECT = Patch(
    name="index_select",
    why="index logits and top-k of the C4 layers: stock keeps fp32 logits of [rows, captured context] between a kernel "
    "that reads all keys once per query and one that has a block per row; bench/index_select.py",
    targets=(
        _index(
            f"{INDEXER}:C4IndexerBackendMixin.forward_c4_indexer",
            "forward",
            "<0.6",
            {
                "0.5.12": "280968036612965c",
                "0.5.14": "e6c37a47d3b43cc2",
                "0.5.17": "9939ac78d7425547",
                "0.5.20": "df5963106f535afb",
                "0.5.23": "1aead2dc6df941e3",
            },
        ),
        # the logits that SGLang picks on SM120: torch up to 0.5.15, then TileLang
        _index(f"{INDEXER}:fp8_paged_mqa_logits_torch", "logits", "<0.5.13", {"0.5.12": "aca49af674dd7109"}),
        _index(
            f"{INDEXER}:fp8_paged_mqa_logits_torch_sm120", "logits", ">=0.5.13,<0.5.16", {"0.5.14": "4eabbd1136a4ef9b"}
        ),
        _index(
            f"{TILELANG}:tilelang_fp8_paged_mqa_logits",
            "logits",
            ">=0.5.16,<0.6",
            {"0.5.17": "43a709112fee8ed8", "0.5.20": "43a709112fee8ed8", "0.5.23": "43a709112fee8ed8"},
        ),
        # SGLang's own top-k, as the indexer imported it
        _index(
            f"{INDEXER}:topk_transform_512",
            "topk",
            "<0.5.20",
            {"0.5.12": "93b190573e132513", "0.5.14": "1c68cee181fff17c", "0.5.17": "2052e4d7b1696863"},
        ),
        _index(
            f"{INDEXER}:topk_transform_512_v2",
            "topk",
            "<0.5.20",
            {"0.5.12": "4af335786bebdd5d", "0.5.14": "cd2a7c03aa0261d6", "0.5.17": "bb7e4834194b1f29"},
        ),
        _index(
            f"{INDEXER}:topk_transform_paged",
            "topk",
            ">=0.5.20,<0.6",
            {"0.5.20": "236b41b2ed380f16", "0.5.23": "236b41b2ed380f16"},
        ),
        _index(
            f"{INDEXER}:topk_transform_paged_v2",
            "topk",
            ">=0.5.20,<0.6",
            {"0.5.20": "d39f45e5d73c2cd2", "0.5.23": "d39f45e5d73c2cd2"},
        ),
        # explicit choices: these get stock logits
        _index(
            f"{INDEXER}:topk_transform_512_pytorch_vectorized",
            "other_topk",
            "<0.5.20",
            {"0.5.12": "635be9664aeb4535", "0.5.14": "6acb8a7fb22d46e9", "0.5.17": "beb253a0dfc955b6"},
        ),
        _index(
            f"{INDEXER}:topk_transform_512_flashinfer_unfused",
            "other_topk",
            ">=0.5.17,<0.5.20",
            {"0.5.17": "2dd73c673ff1bede"},
        ),
        _index(f"{INDEXER}:topk_transform_512_flashinfer_fused", "other_topk", ">=0.5.19,<0.5.20", {}),
        _index(
            f"{INDEXER}:topk_transform_pytorch_vectorized",
            "other_topk",
            ">=0.5.20,<0.6",
            {"0.5.20": "0f10ad7599afc5ee", "0.5.23": "0f10ad7599afc5ee"},
        ),
        _index(
            f"{INDEXER}:topk_transform_flashinfer_unfused",
            "other_topk",
            ">=0.5.20,<0.6",
            {"0.5.20": "942114d6ab0f9dc6", "0.5.23": "942114d6ab0f9dc6"},
        ),
        _index(
            f"{INDEXER}:topk_transform_flashinfer_fused",
            "other_topk",
            ">=0.5.20,<0.6",
            {"0.5.20": "a4da5a9becdb650c", "0.5.23": "a4da5a9becdb650c"},
        ),
    ),
    needs=(EXTENSION,),
    modes=("sm120", "ops", "seams"),
    retire="when the stock pair is faster on SM120 and needs no logits tensor (bench/index_select.py)",
)


def _seam(where: str, replacement: str, sglang: str, digest: str, reviewed: tuple[str, ...]) -> Target:
    return Target(
        where=where,
        sglang=sglang,
        contract=Bound(),
        replacement=f"{SEAMS}:{replacement}",
        reviewed=dict.fromkeys(reviewed, digest),
    )


# (versions, digest of the binding, versions whose uses of it were read)
IMPORTED_PREDICATE_14 = (">=0.5.13,<0.5.19", "1e58558a9af6a6d9", ("0.5.14", "0.5.17"))
IMPORTED_PREDICATE_17 = (">=0.5.16,<0.5.19", "1e58558a9af6a6d9", ("0.5.17",))
FROZEN_BACKEND_FLAG = (">=0.5.13,<0.5.19", "93bfbc0866cac10b", ("0.5.14", "0.5.17"))
FROZEN_METADATA_FLAG = (">=0.5.20,<0.6", "31034dd003a331cd", ("0.5.20", "0.5.23"))
IMPORTED_PLATFORM = (">=0.5.19,<0.6", "68f5f8aadaddaa43", ("0.5.20", "0.5.23"))
IMPORTED_PLATFORM_20 = (">=0.5.20,<0.6", "68f5f8aadaddaa43", ("0.5.20", "0.5.23"))
IMPORTED_PLATFORM_23 = (">=0.5.21,<0.6", "68f5f8aadaddaa43", ("0.5.23",))

SM120_SEAMS = Patch(
    name="sm120_seams",
    why="validation only: the modules that choose and run DeepSeek-V4's attention, indexer and mHC are told that the "
    "GPU is SM120. Argument resolution then forces what SM120 users get: TileLang indexer, top-k v1, torch mHC, bf16 "
    "wo_a",
    targets=(
        # up to 0.5.18: the predicate as each module imported it, and one global frozen from it
        _seam("sglang.srt.server_args:is_sm120_supported", "replace_predicate", *IMPORTED_PREDICATE_14),
        _seam(f"{BACKEND}:_is_sm120", "replace_flag", *FROZEN_BACKEND_FLAG),
        _seam(f"{INDEXER}:is_sm120_supported", "replace_predicate", *IMPORTED_PREDICATE_14),
        _seam(f"{MODEL}:is_sm120_supported", "replace_predicate", *IMPORTED_PREDICATE_17),
        # from 0.5.19: the platform object as each module imported it, and one global frozen from it
        _seam("sglang.srt.arg_groups.model_hook:get_platform", "replace_get_platform", *IMPORTED_PLATFORM),
        _seam(f"{BACKEND}:get_platform", "replace_get_platform", *IMPORTED_PLATFORM),
        _seam(f"{INDEXER}:get_platform", "replace_get_platform", *IMPORTED_PLATFORM),
        _seam("sglang.srt.layers.attention.dsv4.metadata:_IS_SM120", "replace_flag", *FROZEN_METADATA_FLAG),
        _seam(f"{MODEL}:get_platform", "replace_get_platform", *IMPORTED_PLATFORM),
        _seam(
            "sglang.srt.models.deepseek_common.amd.deepseek_v4_fused_mhc:get_platform",
            "replace_get_platform",
            *IMPORTED_PLATFORM_20,
        ),
        _seam(
            "sglang.srt.mem_cache.deepseek_v4_memory_pool:get_platform", "replace_get_platform", *IMPORTED_PLATFORM_23
        ),
    ),
    modes=("seams",),
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
    patches=(
        *(SPARSE_DECODE, SPARSE_DECODE_HOPPER, UNPADDED_HEADS, Q_NORM, PAGED_PREFILL, SCHED_META),
        *(INDEX_SELECT, MXFP4_MOE, BF16_LINEAR, FP8_LINEAR, WO_A, MHC, COMPRESSOR),
        *(ARGUMENT_DEFAULTS, MARLIN_ON_SM120, PREFILL_INTERVAL, SM120_SEAMS),
    ),
    settings=SETTINGS,
    stand_ins=(
        StandIn(
            name="flash_mla",
            why="SGLang 0.5.12 imports it inside its attention backend, but does not require it",
            package="deepseek_v4_sm120.sglang_adapters.flash_mla_absent",
            sglang="<0.5.13",
            only_after=BACKEND,
            condition="deepseek_v4_sm120.device_gate:serves_current_device",
        ),
    ),
)
