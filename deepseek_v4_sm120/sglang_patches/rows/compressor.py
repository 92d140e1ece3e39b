"""The row of table.py that is the KV compressors'.

0.5.12, 0.5.13    SGLang's: 0.5.12's call does not have the slots of the compressed entries, 0.5.12.post1 and 0.5.13
                  have them as int32, and the operator takes int64
0.5.14 to 0.5.23  decode steps are ours, verification and short prompts too; the plans are the same in all of them
0.5.15 and later  what rejected drafts left in the state is cleared in one launch, not one a layer
0.5.14 to 0.5.17  what the plan of a verification has of the state to be written is completed
"""

from deepseek_v4_sm120.patching.contract import Parameters
from deepseek_v4_sm120.patching.spec import Patch
from deepseek_v4_sm120.sglang_patches.names import EXTENSION, targets_of

MODULE = "sglang.srt.layers.attention.dsv4.compressor_v2"
ALL_IN_ONE = f"{MODULE}:CompressorBackendMixin._forward_compress_all_in_one"
CLEAR_DRAFTS = "sglang.srt.mem_cache.deepseek_v4_memory_pool:DeepSeekV4TokenToKVPool.clear_unaccepted_c128_draft_states"
ANY_KEYWORDS = Parameters(("self",), further="keyword-only")

COMPRESSOR = Patch(
    name="compressor",
    why="the KV compressors of a step: stock launches pooling and norm-rope-store apart, 124 launches a step of Flash "
    "where one each is 62, and a third for a verification's state; bench/compressor.py. Before 0.5.18 a verification "
    "of more than 4 tokens loses state that a rejection goes back to. Behind a verification, from 0.5.15 on, stock "
    "clears what rejected tokens left in C128's state by a launch a layer, ours by one for all",
    targets=(
        targets_of("compressor_drafts")(
            CLEAR_DRAFTS,
            "clear_drafts",
            Parameters(("self", "req_pool_indices", "seq_lens", "accept_lens", "num_draft_tokens")),
            ">=0.5.15,<0.6",
        ),
        targets_of("compressor")(ALL_IN_ONE, "all_in_one_0_5_14", ANY_KEYWORDS, ">=0.5.14,<0.5.20"),
        targets_of("compressor")(ALL_IN_ONE, "all_in_one", ANY_KEYWORDS, ">=0.5.20,<0.6"),
        targets_of("compressor")(
            f"{MODULE}:create_paged_compressor_data",
            "create_data",
            Parameters(
                (
                    *("compress_ratio", "*", "is_prefill", "token_to_kv_pool", "req_to_token", "req_pool_indices"),
                    *("seq_lens", "extend_lens=None", "seq_lens_cpu=None", "extend_lens_cpu=None"),
                    *("use_prefill_cuda_graph=...", "num_q_tokens=None"),
                ),
                further="keyword-only",
            ),
            ">=0.5.14,<0.5.18",
        ),
    ),
    needs=(EXTENSION,),
    absent="0.5.12 and 0.5.13 do not give it the slots of the compressed entries as int64",
    retire="when stock runs a compressor's decode step in one launch (bench/compressor.py)",
)
