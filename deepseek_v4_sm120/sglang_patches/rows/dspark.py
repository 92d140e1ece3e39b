"""The rows of table.py that are DSPARK's: the waiting of its draft and its graphs, the windows that its answers keep,
and what requests ask of sampling."""

from deepseek_v4_sm120.patching.contract import Bound, Parameters
from deepseek_v4_sm120.patching.spec import Patch
from deepseek_v4_sm120.sglang_patches.names import BACKEND, DSPARK_INPUT, DSPARK_SINCE, DSPARK_VERIFY, targets_of_fix

PREPARE = f"{DSPARK_INPUT}:DFlashDraftInputV2.prepare_for_decode"
PREPARE_PARAMETERS = Parameters(("self", "batch"))
ACCEPT, ARE_NOOP = f"{DSPARK_VERIFY}:accept_draft_tokens", f"{DSPARK_VERIFY}:verify_logits_adjustments_are_noop"
ACCEPTED = ("*", "candidates", "target_logits", "draft_block", "sampling_info")
KERNELS = "sglang.kernels.ops.speculative.dspark.dspark_accept"
KERNELS_0_5_16 = "sglang.srt.speculative.dspark_components.kernels.dspark_accept"
CHAIN = "chain_speculative_sampling_triton"
COUNTED = ">=0.5.18,<0.6"  # a request's steps are counted

COMPONENTS, FREE_MEMORY = "sglang.srt.speculative.dspark_components", "get_available_gpu_memory"

_graphs, _min_p, _penalties = map(targets_of_fix, ("dspark_graphs", "min_p_dspark", "dspark_penalties"))

DSPARK_LENGTHS = Patch(
    name="dspark_lengths",
    why="DSPARK's draft fetches the requests' lengths from the GPU in every step, so the host waits for the "
    "verification and the GPU for the host: 0.3 ms of an H200's step of 7.8. Nobody reads them there",
    targets=(
        targets_of_fix("dspark_lengths")(
            f"{BACKEND}:DeepseekV4AttnBackend.init_forward_metadata_dspark_draft_block",
            "draft_block",
            Parameters(("self", "max_seq_len", "req_pool_indices", "seq_lens", "seq_lens_cpu"), further="any"),
            ">=0.5.16,<0.5.24",  # who reads them is outside of the definition: read and run release by release
        ),
    ),
    absent="before 0.5.16 there is no DSPARK, and who reads them was read up to 0.5.23",
    retire="when SGLang does not ask for them",
)

DSPARK_GRAPHS = Patch(
    name="dspark_graphs",
    why="each card asks its own free memory whether DSPARK's draft goes into graphs; where cards differ at the limit "
    "the server hangs at its start, or at the first request that samples (sglang #39886 has the same, open)",
    targets=(
        _graphs(f"{COMPONENTS}.dspark_worker_v2:{FREE_MEMORY}", "available_memory", Bound(), ">=0.5.16,<0.5.19"),
        _graphs(f"{COMPONENTS}.dspark_draft_sampler:{FREE_MEMORY}", "available_memory", Bound(), ">=0.5.17,<0.5.19"),
    ),
    absent="before 0.5.16 there is no DSPARK, from 0.5.19 on SGLang asks for the least of the cards",
    retire="with SGLang 0.5.18",
)

DSPARK_WINDOWS = Patch(
    name="dspark_windows",
    why="with DSPARK no token of an answer gives its slot of the sliding windows back: where all answers together have "
    "a tenth of what the KV cache holds, requests are retracted, and a single one ends with an error (sglang #33805)",
    targets=(targets_of_fix("dspark_windows")(PREPARE, "prepare_for_decode", PREPARE_PARAMETERS, ">=0.5.16,<0.5.18"),),
    absent="before 0.5.16 there is no DSPARK, from 0.5.18 on SGLang frees them itself",
    retire="with SGLang 0.5.17",
)

MIN_P_DSPARK = Patch(
    name="min_p_dspark",
    why="a request's min_p is ignored where DSPARK verifies its drafts: tokens are drawn that it forbids, without a "
    "word (sglang #10617, open)",
    targets=(
        _min_p(ACCEPT, "accept", Parameters(ACCEPTED, further="keyword-only"), DSPARK_SINCE),
        _min_p(f"{KERNELS_0_5_16}:{CHAIN}", "verify", Bound(), ">=0.5.16,<0.5.17"),
        _min_p(f"{KERNELS}:{CHAIN}", "verify", Bound(), ">=0.5.17,<0.6"),
        _min_p(ARE_NOOP, "are_noop", Parameters(("sampling_info",)), DSPARK_SINCE),
    ),
    absent="before 0.5.16 there is no DSPARK",
    retire="when DSPARK's verification knows min_p",
)

DSPARK_PENALTIES = Patch(
    name="dspark_penalties",
    why="with DSPARK a request's penalties and min_tokens are left out from the second token on, without a word: no "
    "token is counted, and verification asks for the sums by a name that nothing has (sglang #33493, #28242, open)",
    targets=(
        _penalties(
            "sglang.srt.speculative.dflash_utils:apply_dflash_verify_logits_adjustments",
            "adjustments",
            Parameters(("*", "next_token_logits", "sampling_info", "draft_token_num")),
            COUNTED,
        ),
        _penalties(PREPARE, "prepare_for_decode", PREPARE_PARAMETERS, COUNTED),
        _penalties(ARE_NOOP, "are_noop", Parameters(("sampling_info",)), COUNTED),
    ),
    absent="up to 0.5.17 DSPARK does not count a request's steps, by which a new state of its penalties is known",
    retire="when SGLang counts and penalises with DSPARK",
)
