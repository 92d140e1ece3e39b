"""The rows of table.py that are the hyper-connections': which calls become `ops.mhc`, in which versions; and the sums
in front of its boundaries.

What each version has (the preview image, older than 0.5.12, was not looked at: there mHC is SGLang's):

    0.5.12            no fused boundary: a post and a pre, which norms as well, are two calls of ours (3 launches)
    0.5.13 to 0.5.17  the boundary exists, off by default (and up to 0.5.16 never on where the TileLang pre is off, as
                      it is on SM120); we turn it on. 0.5.13's hc_pre does not get the batch
    0.5.18 to 0.5.22  on by default for SM120 where both TileLang switches allow it; we turn it on for every choice
    0.5.23            the same calls behind layer boundaries (models/deepseek_v4_boundary.py), class renamed;
                      DeepSeek-V4.1 (hidden 5120, `pre` of the sublayer before) is SGLang's

The layers' forward is ours for the sums between the cards that are put off into the boundaries, and on one card for
wo_b's last addition: from 0.5.13 on, which has both them and the object that makes the sums. A layer whose batches
take turns (two-batch overlap) runs its parts by themselves; what they ask for is summed there.
"""

from deepseek_v4_sm120.patching.contract import Parameters
from deepseek_v4_sm120.patching.spec import Patch
from deepseek_v4_sm120.sglang_patches.defaults import DEALT_STREAMS as OF_DEALT_STREAMS
from deepseek_v4_sm120.sglang_patches.names import BACKEND, DSPARK, DSPARK_SINCE, EXTENSION, MODEL, targets_of

LAYER = f"{MODEL}:DeepseekV4DecoderLayer"
LAYER_BASE = f"{MODEL}:DeepseekV4DecoderLayerBase"
CUDA_LAYER = f"{MODEL}:DeepseekV4CudaDecoderLayer"
MTP_MODEL = "sglang.srt.models.deepseek_v4_nextn:DeepseekV4ModelNextN"
FUSION_MODULE = "sglang.srt.models.deepseek_common.amd.deepseek_v4_fused_mhc"
KERNELS = "sglang.kernels.ops.layernorm"
OLD_KERNELS = "sglang.srt.layers"  # up to 0.5.15
FUSED = "mhc_fused_post_pre"
SWITCH = "_is_fused_mhc_post_pre_enabled"

FUSED_PARAMETERS = Parameters(
    ("x", "residual", "post_layer_mix", "comb_res_mix", "fn", "hc_scale", "hc_base", "rms_eps", "hc_pre_eps")
    + ("hc_sinkhorn_eps", "hc_post_mult_value", "sinkhorn_repeat", "n_splits=...", "tile_n=...")
    + ("*", "norm_weight=None", "norm_eps=None")
)
OLD_PRE_PARAMETERS = Parameters(("self", "x", "hc_fn", "hc_scale", "hc_base", "norm=None"))
PRE_PARAMETERS = Parameters((*OLD_PRE_PARAMETERS.signature, "forward_batch=..."))
POST_PARAMETERS = Parameters(("self", "x", "residual", "post", "comb"))
HEAD_PARAMETERS = Parameters(("x", "hc_fn", "hc_scale", "hc_base", "norm_eps", "hc_eps"))
MODEL_HEAD_PARAMETERS = Parameters(("self", "x", "hc_fn", "hc_scale", "hc_base"))


STEPS = ("DeepseekV4MultiStepBackend",)  # of drafts: no prompts

_target, _sum = targets_of("mhc"), targets_of("mhc_sum")
_in_graphs = targets_of("halves_in_graphs")
LAYER_FORWARD = Parameters(("self",), further="any")
MODEL_FORWARD = f"{MODEL}:DeepseekV4Model.forward"
MODEL_FORWARD_PARAMETERS = Parameters(
    ("self", "input_ids", "positions", "forward_batch", "input_embeds", "pp_proxy_tensors=None")
)
OF_EMBEDDING = Parameters(("self", "input_"), overridden_by=("ParallelLMHead",))
EMBEDDING = "sglang.srt.layers.vocab_parallel_embedding:VocabParallelEmbedding.forward"

MHC = Patch(
    name="mhc",
    why="hyper-connections: at a boundary stock runs post, a product in torch or TileLang, Sinkhorn, a weighted sum "
    "and the RMSNorm one by one, above 32 rows with a product on ceil(rows / 32) blocks; bench/mhc.py",
    targets=(
        _target(f"{MODEL}:{SWITCH}", "fusion_enabled", Parameters(()), ">=0.5.13,<0.5.19"),
        _target(f"{FUSION_MODULE}:{SWITCH}", "fusion_enabled", Parameters(()), ">=0.5.19,<0.6"),
        _target(f"{OLD_KERNELS}.mhc:{FUSED}", "fused_post_pre", FUSED_PARAMETERS, ">=0.5.13,<0.5.16"),
        _target(f"{KERNELS}.mhc:{FUSED}", "fused_post_pre", FUSED_PARAMETERS, ">=0.5.16,<0.6"),
        _target(f"{LAYER}.hc_pre", "hc_pre", OLD_PRE_PARAMETERS, ">=0.5.12,<0.5.14"),
        _target(f"{LAYER}.hc_pre", "hc_pre", PRE_PARAMETERS, ">=0.5.14,<0.5.23"),
        _target(f"{LAYER_BASE}.hc_pre", "hc_pre", PRE_PARAMETERS, ">=0.5.23,<0.6"),
        _target(f"{LAYER}.hc_post", "hc_post", POST_PARAMETERS, ">=0.5.12,<0.5.23"),
        _target(f"{LAYER_BASE}.hc_post", "hc_post", POST_PARAMETERS, ">=0.5.23,<0.6"),
        _sum(f"{LAYER}.forward", "layer_forward", LAYER_FORWARD, ">=0.5.13,<0.5.23"),
        _sum(f"{CUDA_LAYER}.forward", "layer_forward", LAYER_FORWARD, ">=0.5.23,<0.6"),
        _target(f"{OLD_KERNELS}.mhc_head:fused_hc_head", "fused_head", HEAD_PARAMETERS, ">=0.5.12,<0.5.16"),
        _target(f"{KERNELS}.mhc_head:fused_hc_head", "fused_head", HEAD_PARAMETERS, ">=0.5.16,<0.6"),
        _target(f"{MTP_MODEL}.hc_head", "hc_head", MODEL_HEAD_PARAMETERS, ">=0.5.12,<0.6"),
        _target(f"{DSPARK}.collapse_hc_head", "dspark_head", Parameters(("self", "x")), DSPARK_SINCE),
    ),
    needs=(EXTENSION,),
    retire="when stock's boundary is one operator on SM120, and faster (bench/mhc.py)",
)

_dealt = targets_of("mhc_dealt_streams")

DEALT_STREAMS = Patch(
    name=OF_DEALT_STREAMS,
    why="all cards keep all rows' streams and make the same boundaries: 0.5 ms of each of a chunk's 86 on SM120, and "
    "32 KB a row. With a share each, between a reduce-scatter and an all-gather that move the bytes of the sum, time "
    "and memory are divided by the cards",
    targets=(  # behind mhc's, which these wrap
        _dealt(MODEL_FORWARD, "model_forward", MODEL_FORWARD_PARAMETERS, ">=0.5.13,<0.6"),
        _dealt(EMBEDDING, "embedding_forward", OF_EMBEDDING, ">=0.5.13,<0.6"),
        _dealt(f"{OLD_KERNELS}.mhc:{FUSED}", "fused_post_pre", FUSED_PARAMETERS, ">=0.5.13,<0.5.16"),
        _dealt(f"{KERNELS}.mhc:{FUSED}", "fused_post_pre", FUSED_PARAMETERS, ">=0.5.16,<0.6"),
        _dealt(f"{LAYER}.hc_pre", "hc_pre", OLD_PRE_PARAMETERS, ">=0.5.13,<0.5.14"),
        _dealt(f"{LAYER}.hc_pre", "hc_pre", PRE_PARAMETERS, ">=0.5.14,<0.5.23"),
        _dealt(f"{LAYER_BASE}.hc_pre", "hc_pre", PRE_PARAMETERS, ">=0.5.23,<0.6"),
        _dealt(f"{LAYER}.hc_post", "hc_post", POST_PARAMETERS, ">=0.5.13,<0.5.23"),
        _dealt(f"{LAYER_BASE}.hc_post", "hc_post", POST_PARAMETERS, ">=0.5.23,<0.6"),
    ),
    default=OF_DEALT_STREAMS,
    serves="mhc",
    absent="0.5.12 has no fused boundary",
    retire="when SGLang deals the rows between sublayers itself",
)

PROMPTS_IN_HALVES = Patch(
    name="prompts_in_halves",
    why="a layer's two sums of a prompt's rows run while the card waits: over PCIe or host memory a quarter of the "
    "time of a chunk and more. In two halves that take turns, one's sums run beside the other's products",
    targets=(
        targets_of("prompts_in_halves")(
            f"{BACKEND}:DeepseekV4AttnBackend.init_forward_metadata",
            "init_forward_metadata",
            Parameters(("self", "forward_batch"), overridden_by=STEPS),
            ">=0.5.14,<0.6",
        ),
        targets_of("prompts_in_halves")(MODEL_FORWARD, "model_forward", MODEL_FORWARD_PARAMETERS, ">=0.5.14,<0.6"),
        _in_graphs(
            f"{BACKEND}:DeepseekV4AttnBackend.init_forward_metadata_for_breakable_cuda_graph_capture",
            "init_for_capture",
            Parameters(("self", "forward_batch"), overridden_by=STEPS),
            ">=0.5.23,<0.6",
        ),
        _in_graphs(
            f"{BACKEND}:DeepseekV4AttnBackend.prepare_forward_metadata_for_breakable_cuda_graph_replay",
            "init_for_replay",
            Parameters(
                ("self", "capture_metadata", "forward_batch", "*", "static_forward_batch=None"), overridden_by=STEPS
            ),
            ">=0.5.23,<0.6",
        ),
        _in_graphs(
            "sglang.srt.model_executor.runner.prefill_cuda_graph_runner:PrefillCudaGraphRunner.can_run_graph",
            "can_run_graph",
            Parameters(("self", "forward_batch")),
            ">=0.5.23,<0.6",
        ),
    ),
    default="prompts_in_halves",
    absent="0.5.12 and 0.5.13 were not read for it",
    retire="when SGLang's two-batch overlap serves plain tensor parallelism",
)
