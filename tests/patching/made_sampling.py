"""What conftest.py's tree has of SGLang 0.5.17's sampling and drafts, as far as rows of ours name it."""

SAMPLER = """
def top_k_top_p_min_p_sampling_from_probs_torch(
    probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions
):
    pass

class Sampler:
    def forward(
        self, logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions
    ):
        return logits_output

    def _sync_token_ids_across_tp(self, batch_next_token_ids, sampling_info): pass
"""
EAGLE = "def eagle_sample(verify_input, batch, logits_output, grammar_mask=None):\n    return grammar_mask\n"
DRAFT_GRAPHS = "class EAGLEDraftCudaGraphRunner:\n    def execute(self, forward_batch):\n        return forward_batch\n"
DRAFT_EXTEND_GRAPHS = (
    "class EAGLEDraftExtendCudaGraphRunner:\n    def execute(self, forward_batch):\n        return forward_batch\n"
)
LOGPROBS = """
def get_token_ids_logprobs_raw(
    logprobs, token_ids_logprobs_list, stage, extend_logprob_pruned_lens_cpu=None, no_copy_to_cpu=False
):
    return [], []
"""
