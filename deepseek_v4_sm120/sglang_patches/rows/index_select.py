"""The rows of table.py that are the index's: its logits and its choice, and how a prompt's are dealt to the cards."""

from deepseek_v4_sm120.patching.contract import Parameters
from deepseek_v4_sm120.patching.spec import Patch, Target
from deepseek_v4_sm120.sglang_patches.names import EXTENSION, INDEXER, targets_of

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
_index = targets_of("index_select")
LOGITS = Parameters(
    ("q_fp8", "kvcache_fp8", "weight", "seq_lens", "page_table", "deep_gemm_metadata", "max_seq_len")
    + ("clean_logits=...",)
)
FORWARD_C4_INDEXER = f"{INDEXER}:C4IndexerBackendMixin.forward_c4_indexer"
FORWARD_C4_INDEXER_PARAMETERS = Parameters(("self", "x", "q_lora", "c4_indexer", "forward_batch"), further="any")
OF_TOPK = ("scores", "seq_lens", "page_tables", "out_page_indices", "page_size")
TOPK = Parameters(OF_TOPK, further="any", imported=True)
OTHER_TOPK = Parameters(("scores",), further="any")


def _topk(name: str, sglang: str) -> Target:
    return _index(f"{INDEXER}:topk_transform_{name}", "topk", TOPK, sglang)


def _other_topk(name: str, sglang: str) -> Target:
    return _index(f"{INDEXER}:topk_transform_{name}", "other_topk", OTHER_TOPK, sglang)


INDEX_SELECT = Patch(
    name="index_select",
    why="index logits and top-k of the C4 layers: stock keeps fp32 logits of [rows, captured context] between a kernel "
    "that reads all keys once per query and one that has a block per row; bench/index_select.py",
    targets=(
        _index(FORWARD_C4_INDEXER, "forward", FORWARD_C4_INDEXER_PARAMETERS, "<0.6"),
        # the logits that SGLang picks on SM120: torch up to 0.5.15, then TileLang
        _index(f"{INDEXER}:fp8_paged_mqa_logits_torch", "logits", LOGITS, "<0.5.13"),
        _index(f"{INDEXER}:fp8_paged_mqa_logits_torch_sm120", "logits", LOGITS, ">=0.5.13,<0.5.16"),
        _index(f"{TILELANG}:tilelang_fp8_paged_mqa_logits", "logits", LOGITS, ">=0.5.16,<0.6"),
        # SGLang's own top-k, as the indexer imported it
        _topk("512", "<0.5.20"),
        _topk("512_v2", "<0.5.20"),
        _topk("paged", ">=0.5.20,<0.6"),
        _topk("paged_v2", ">=0.5.20,<0.6"),
        # explicit choices: these get stock logits
        _other_topk("512_pytorch_vectorized", "<0.5.20"),
        _other_topk("512_flashinfer_unfused", ">=0.5.17,<0.5.20"),
        _other_topk("512_flashinfer_fused", ">=0.5.19,<0.5.20"),
        _other_topk("pytorch_vectorized", ">=0.5.20,<0.6"),
        _other_topk("flashinfer_unfused", ">=0.5.20,<0.6"),
        _other_topk("flashinfer_fused", ">=0.5.20,<0.6"),
    ),
    needs=(EXTENSION,),
    retire="when the stock pair is faster on SM120 and needs no logits tensor (bench/index_select.py)",
)

DEALT_INDEX = Patch(
    name="dealt_index",
    why="the indexer is replicated: under tensor parallelism every card scores all rows of a prompt, 35 TFLOP a layer "
    "and chunk of 8,192 at a million tokens. Each takes its share of the rows, and the lists are gathered",
    targets=(
        targets_of("index_select_dealt")(FORWARD_C4_INDEXER, "forward", FORWARD_C4_INDEXER_PARAMETERS, ">=0.5.13,<0.6"),
    ),
    needs=(EXTENSION,),
    default="dealt_index",
    serves="index_select",
    absent="its groups and exchanges were read from 0.5.13 on; on SM120 0.5.12's indexer is DeepGEMM's unless told",
    retire="when SGLang divides the rows itself",
)
