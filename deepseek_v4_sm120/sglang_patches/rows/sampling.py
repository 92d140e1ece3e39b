"""The rows of table.py that are the sampling's: of a reproducible server, of requests with min_p or penalties."""

from deepseek_v4_sm120.patching.contract import Bound, Parameters
from deepseek_v4_sm120.patching.spec import Patch
from deepseek_v4_sm120.sglang_patches.names import DSPARK_VERIFY, EXTENSION, targets_of, targets_of_fix

SAMPLER = "sglang.srt.layers.sampler:Sampler"
PROBS = Parameters(("self", "probs", "sampling_info", "positions", "simple_sampling_case"))
VERIFY = ("verify_input", "batch", "logits_output")
MASK, GRAMMAR_MASK, UNO = "vocab_mask=None", "grammar_mask=None", "uno_target_max_top_k=None"
WATERMARK = ("*", "watermark_state=None", "watermark_full_mask=True")
COUNTING = ">=0.5.14,<0.6"
SINCE = ">=0.5.23,<0.6"  # verification's kernels are names of the module
DRAW = "sglang.srt.layers.sampler:top_k_top_p_min_p_sampling_from_probs_torch"
OF_DRAW = ("probs", "top_ks", "top_ps", "min_ps", "need_min_p_sampling", "sampling_seed", "positions")
FILTERED, MOST = "return_filtered_probs=False", "max_top_k=None"
EAGLE = "sglang.srt.speculative.eagle_utils"
EAGLE_SAMPLE = f"{EAGLE}:eagle_sample"
PENALTY_LIBRARY = "sglang.srt.sampling.penaltylib.orchestrator"
RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor:SchedulerBatchResultProcessor"
OF_TOKENS = Parameters(("logprobs", "token_ids_logprobs_list", "stage"), further="any")
OF_RESULT = ("req", "i", "logits_output", "extend_input_len_per_req", "extend_logprob_start_len_per_req")

DRAFT_EXTEND = "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner:EAGLEDraftExtendCudaGraphRunner.execute"
OF_FORWARD = ("self", "logits_output", "sampling_info", "return_logprob", "top_logprobs_nums", "token_ids_logprobs")
OF_FORWARD += ("positions",)
OF_FORWARD_SINCE = Parameters((*OF_FORWARD, "*", "logprob_logits=None"))

_sampling, _argmax = map(targets_of, ("sampling", "greedy_argmax"))
_min_p_verify = targets_of_fix("min_p_verify")
_penalties, _prompt_logprobs = targets_of_fix("penalties"), targets_of_fix("prompt_logprobs")
_seeded_draws, _min_tokens = targets_of_fix("seeded_draws"), targets_of_fix("min_tokens")
_asked_tokens, _pieces = targets_of_fix("asked_tokens"), targets_of_fix("logprob_pieces")
LOGITS = "sglang.srt.layers.logits_processor:LogitsProcessor"
PIECES = ("pruned_states", "sample_indices", "input_logprob_indices", "token_to_seq_idx", "lm_head", "logits_metadata")
_certain_tokens, CHAIN = targets_of_fix("certain_tokens"), "reject_sampling:chain_speculative_sampling_triton"
CUMULATE = "sglang.srt.managers.schedule_batch:ScheduleBatch.cumulate_penalty_output_tokens"
MIX = "sglang.srt.managers.schedule_batch:ScheduleBatch.mix_with_running"
VERIFIED_BLOCKS = Parameters(("self", "*", "batch"), further="keyword-only")
EAGLE_SAMPLES = {  # what follows VERIFY, by release
    ">=0.5.14,<0.5.17": (MASK,),
    ">=0.5.17,<0.5.20": (GRAMMAR_MASK,),
    ">=0.5.20,<0.5.22": (GRAMMAR_MASK, UNO),
    ">=0.5.22,<0.6": (GRAMMAR_MASK, UNO, *WATERMARK),
}


def _eagle_samples(target):
    return (
        target(EAGLE_SAMPLE, "eagle_sample", Parameters((*VERIFY, *more)), sglang)
        for sglang, more in EAGLE_SAMPLES.items()
    )


REPRODUCIBLE_SAMPLING = Patch(
    name="reproducible_sampling",
    why="one request that samples makes the greedy ones beside it sampled, too: of equal logits one is drawn, and "
    "their log-probabilities have other bits. Under a mixed load on two H200 six of eight greedy answers were others "
    "than alone",
    targets=(
        _sampling(f"{SAMPLER}.__init__", "sampler_init", Parameters(("self",)), ">=0.5.17,<0.6"),
        _sampling(f"{SAMPLER}._sample_from_probs", "sample_from_probs", PROBS, ">=0.5.14,<0.6"),
        *_eagle_samples(_sampling),
    ),
    default="reproducible",
    absent="0.5.12 and 0.5.13 were not looked at",
    retire="when SGLang takes a greedy request's argmax in every batch",
)

GREEDY_ARGMAX = Patch(
    name="greedy_argmax",
    why="the argmax of a step's logits is torch's, one block a row: 27 us of an H200 for 129,280 of them, once in a "
    "greedy step and twice in one of EAGLE's. The same tokens, in some 4 us",
    targets=(
        _argmax(f"{SAMPLER}.forward", "forward", Parameters(OF_FORWARD), ">=0.5.14,<0.5.22"),
        _argmax(f"{SAMPLER}.forward", "forward", OF_FORWARD_SINCE, ">=0.5.22,<0.6"),
        *_eagle_samples(_argmax),
        _argmax(DRAFT_EXTEND, "execute", Parameters(("self", "forward_batch")), ">=0.5.14,<0.5.20"),
        _argmax(DRAFT_EXTEND, "execute", Parameters(("self", "forward_batch", "select_index")), ">=0.5.20,<0.6"),
    ),
    needs=(EXTENSION,),
    absent="0.5.12 and 0.5.13 were not looked at",
    retire="when torch or SGLang shares a row out to more of the card",
)

MIN_P_TOKENS = Patch(
    name="min_p_tokens",
    why="for a request with min_p each card draws from probabilities whose last bits differ from card to card: once in "
    "100,000 to 10 million tokens two draw different ones, compute on with them, and hang where one ends "
    "(sglang #38565). A broadcast in the steps of such requests alone",
    targets=(
        targets_of_fix("min_p_tokens")(
            f"{SAMPLER}._sync_token_ids_across_tp",
            "sync_token_ids",
            Parameters(("self", "batch_next_token_ids", "sampling_info")),
        ),
    ),
    retire="when FlashInfer's renormalisation has one order of sums wherever SGLang calls it (flashinfer #4831)",
)

MIN_P_VERIFY = Patch(
    name="min_p_verify",
    why="a request's min_p is ignored where its drafts are verified: tokens are drawn that it forbids, without a word "
    "(sglang #10617, open)",
    targets=(
        _min_p_verify(EAGLE_SAMPLE, "eagle_sample", Parameters((*VERIFY, GRAMMAR_MASK, UNO, *WATERMARK)), SINCE),
        *(
            _min_p_verify(f"{EAGLE}:{kernel}", "verify", Bound(), SINCE)
            for kernel in ("tree_speculative_sampling_target_only", "chain_speculative_sampling_triton")
        ),
    ),
    absent="up to 0.5.22 the module has no name for the function that draws",
    retire="when SGLang's verification knows min_p",
)

PENALTIES = Patch(
    name="penalties",
    why="with speculation one token of a step is counted for a request's penalties and min_tokens, of the several that "
    "it brings: penalties are weaker, answers that should end do not; and none of what was answered before a request "
    "was retracted (sglang #33643, open). Each prompt that is read meanwhile lets one token be left out and another be "
    "counted twice. Without the overlap of steps the order of penalties is another one on each card: two may part, and "
    "hang",
    targets=(
        _penalties(CUMULATE, "cumulate", Parameters(("self",)), COUNTING),
        _penalties(
            f"{PENALTY_LIBRARY}:BatchedPenalizerOrchestrator.apply",
            "apply",
            Parameters(("self", "logits", "repeat=None")),
            COUNTING,
        ),
    ),
    only_read=True,
    absent="0.5.12 and 0.5.13 count at several places",
    retire="when SGLang counts each token once, and applies penalties in one order",
)

MIN_TOKENS = Patch(
    name="min_tokens",
    why="with drafts min_tokens forbids the end of an answer for up to two blocks longer than without: answers go on "
    "with the model's second choice",
    targets=(
        _min_tokens(CUMULATE, "cumulate", Parameters(("self",)), COUNTING),
        _min_tokens(MIX, "mix", Parameters(("self", "running_batch")), ">=0.5.19,<0.6"),
        *_eagle_samples(_min_tokens),
        # of an earlier DSPARK nobody counts, and nothing is forbidden: dspark_penalties
        *(
            _min_tokens(f"{DSPARK_VERIFY}:TargetVerifyExecutor.{way}", way, VERIFIED_BLOCKS, ">=0.5.18,<0.6")
            for way in ("run_non_compact", "run_compact")
        ),
    ),
    absent="0.5.12 and 0.5.13 count at several places",
    retire="when SGLang judges each row of a block by its own place",
)

DRAFT_PROBABILITIES = Patch(
    name="draft_probabilities",
    why="with --speculative-use-rejection-sampling and more than one draft the probabilities that drafts were drawn by "
    "lie in memory that the next graph writes over before verification reads them: answers may be drawn from neither",
    targets=(
        targets_of_fix("draft_probabilities")(
            "sglang.srt.speculative.eagle_draft_cuda_graph_runner:EAGLEDraftCudaGraphRunner.execute",
            "execute",
            Parameters(("self", "forward_batch")),
            ">=0.5.14,<0.5.21",
        ),
    ),
    absent="before 0.5.14 there is no such flag, from 0.5.21 on SGLang copies them",
    retire="with SGLang 0.5.20",
)

CERTAIN_TOKENS = Patch(
    name="certain_tokens",
    why="where a draft is refused of a token that draft and model are certain of, by the greatest random number or for "
    "another one, nothing may be left to draw of, and the vocabulary's last token is taken: a word from nowhere",
    targets=(
        _certain_tokens(f"sglang.srt.speculative.{CHAIN}", "verify", Bound(), ">=0.5.14,<0.5.16"),
        _certain_tokens(f"sglang.kernels.ops.speculative.{CHAIN}", "verify", Bound(), ">=0.5.16,<0.6", rebound=True),
    ),
    absent="before 0.5.14 nothing is drawn of what is left",
    retire="when SGLang's kernel takes the model's likeliest where nothing is left",
)

PROMPT_LOGPROBS = Patch(
    name="prompt_logprobs",
    why="log-probabilities of prompts are dealt out by counting, and a request that was retracted meanwhile is not "
    "counted: those behind it in the same pass are told the numbers of other requests' tokens (sglang #36938, open). "
    "Up to 0.5.18 the retracted one is told all of its own one token too late (#26510 mended it)",
    targets=(
        _prompt_logprobs(
            f"{RESULTS}.process_batch_result_prefill", "process", Parameters(("self", "batch", "result")), COUNTING
        ),
        _prompt_logprobs(
            f"{RESULTS}._apply_prefill_logprobs",
            "apply",
            Parameters(("self", "*", *OF_RESULT, "next_token_ids", "logprob_pt")),
            ">=0.5.14,<0.5.20",
        ),
        _prompt_logprobs(
            f"{RESULTS}._apply_prefill_logprobs",
            "apply",
            Parameters(("self", "*", *OF_RESULT, "next_token_ids", "logprob_pt", "store=True")),
            ">=0.5.20,<0.6",
        ),
        _prompt_logprobs(
            f"{RESULTS}._apply_chunked_prefill_logprobs",
            "apply",
            Parameters(("self", "*", *OF_RESULT, "logprob_pt")),
            COUNTING,
        ),
    ),
    only_read=True,
    absent="0.5.12 and 0.5.13 were not looked at",
    retire="when SGLang counts those that it passes over",
)

ASKED_TOKENS = Patch(
    name="asked_tokens",
    why="a request with token_ids_logprob ends the server as soon as another one is answered in the same step: who has "
    "none has an empty list, which is asked for tolist like the others' tensors (sglang #34719, open)",
    targets=(
        _asked_tokens("sglang.srt.layers.utils.logprob:get_token_ids_logprobs_raw", "raw", OF_TOKENS, "<0.5.16"),
        _asked_tokens(
            "sglang.srt.layers.logprob_processor:get_token_ids_logprobs_raw", "raw", OF_TOKENS, ">=0.5.16,<0.5.21"
        ),
    ),
    absent="from 0.5.21 on all are tensors",
    retire="with SGLang 0.5.20",
)

LOGPROB_PIECES = Patch(
    name="logprob_pieces",
    why="a long prompt whose log-probabilities are asked for has all of a pass's rows by the vocabulary in float32, "
    "twice: 8.5 GB of 8,192, and the server ends where a card has less. SGLang's own way in pieces is off, and tells "
    "wrong alternatives (sglang #31498 mended it)",
    targets=(
        _pieces(f"{LOGITS}.__init__", "init", Parameters(("self", "config"), further="any"), "<0.5.16"),
        _pieces(f"{LOGITS}.process_input_logprobs_by_chunk", "by_chunk", Parameters(("self", *PIECES)), "<0.5.16"),
    ),
    absent="from 0.5.16 on SGLang's pieces are on, and right",
    retire="with SGLang 0.5.15",
)

SEEDED_DRAWS = Patch(
    name="seeded_draws",
    why="with --enable-deterministic-inference a request with a seed draws another token where one beside it is greedy "
    "or has a top_k, top_p or min_p: its noise is that of a token's place in an order then (sglang #35697, open); and "
    "one with min_p ends the server (#33695, open)",
    targets=(
        _seeded_draws(DRAW, "sampling", Parameters(OF_DRAW), ">=0.5.14,<0.5.20"),
        _seeded_draws(DRAW, "sampling", Parameters((*OF_DRAW, "*", FILTERED)), ">=0.5.20,<0.5.22"),
        _seeded_draws(DRAW, "sampling", Parameters((*OF_DRAW, "*", FILTERED, MOST)), ">=0.5.22,<0.6"),
    ),
    absent="0.5.12 and 0.5.13 were not looked at",
    retire="when SGLang draws by tokens in every batch, with min_p, too",
)
