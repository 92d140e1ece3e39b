"""The rows of table.py that are the head's: reproducible sums of the model's own, and INT4 for what drafts guess with.

0.5.14 to 0.5.23  the MTP draft's `lm_head` is a layer of its own whose weight is the target's (set_embed_and_head);
                  its logits are LogitsProcessor's
0.5.16 to 0.5.23  DSPARK's draft is handed the target's layer (attach_shared_modules) and multiplies itself
"""

from deepseek_v4_sm120.patching.contract import Parameters
from deepseek_v4_sm120.patching.spec import Patch
from deepseek_v4_sm120.sglang_patches.names import (
    DSPARK,
    DSPARK_SINCE,
    EXTENSION,
    MODEL,
    POST_LOAD,
    POST_LOAD_PARAMETERS,
    direct_updates,
    targets_of,
)

LM_HEAD = "sglang.srt.layers.logits_processor:LogitsProcessor._compute_lm_head"
OF_LM_HEAD = ("self", "hidden_states", "lm_head", "embedding_bias=None")
SINCE = ">=0.5.14,<0.6"

_projection, _draft = map(targets_of, ("bf16_linear", "bf16_linear_draft_head"))

REPRODUCIBLE_HEAD = Patch(
    name="reproducible_head",
    why="the logits: cuBLAS's sums depend on the number of requests",
    targets=(
        _projection(LM_HEAD, "lm_head", Parameters(OF_LM_HEAD), ">=0.5.14,<0.5.23"),
        _projection(LM_HEAD, "lm_head", Parameters((*OF_LM_HEAD, "*", "out=None")), ">=0.5.23,<0.6"),
    ),
    needs=(EXTENSION,),
    default="reproducible",
    serves="bf16_linear",
    absent="0.5.12 and 0.5.13 were not looked at",
    retire="when SGLang's head has one order of sums",
)

DRAFT_HEAD = Patch(  # behind the one above: what is put on top of it sees a draft's call first
    name="draft_head",
    why="a draft's logits are a guess that verification judges, and its bf16 head 1.06 GB a guess: 245 us of an H200, "
    "three times in a step of EAGLE 3/1/4 (8.43 ms). In INT4 a quarter of the bytes, and the best come of the head "
    "itself; the text is the model's own either way",
    targets=(
        _draft(LM_HEAD, "lm_head", Parameters(OF_LM_HEAD), ">=0.5.14,<0.5.23"),
        _draft(LM_HEAD, "lm_head", Parameters((*OF_LM_HEAD, "*", "out=None")), ">=0.5.23,<0.6"),
        _draft(
            f"{MODEL}:DeepseekV4ForCausalLM.set_embed_and_head",
            "set_embed_and_head",
            Parameters(("self", "embed", "head")),
            SINCE,
        ),
        _draft(POST_LOAD, "loading", POST_LOAD_PARAMETERS, SINCE),
        *direct_updates(_draft, "loading", "0.5.14"),
        _draft(
            f"{DSPARK}.attach_shared_modules",
            "attach",
            Parameters(("self", "*", "embed_tokens", "lm_head")),
            DSPARK_SINCE,
        ),
        _draft(f"{DSPARK}._logits_from_x_post_hc", "dspark_logits", Parameters(("self", "x_post_hc")), DSPARK_SINCE),
    ),
    needs=(EXTENSION,),
    default="draft_head",
    serves="bf16_linear",
    absent="0.5.12 and 0.5.13 were not looked at",
    retire="when SGLang drafts with a quantised head on SM120",
)
