"""The row of table.py that puts the head norm of the queries and their rotary embedding off to the attention.

0.5.12, 0.5.13    at TP1; above, the rank's heads lie at an offset that the attention does not tell, and stay SGLang's
0.5.14 to 0.5.23  all; from 0.5.21 on there are calls without the norm (DeepSeek-V4.1), which are SGLang's
all               DSpark's attention (0.5.16 and later) imports the function for itself and keeps it
"""

from deepseek_v4_sm120.patching.contract import Parameters
from deepseek_v4_sm120.patching.spec import Patch
from deepseek_v4_sm120.sglang_patches.names import EXTENSION, MODEL, attention_forward, targets_of

NORM_ROPE = f"{MODEL}:fused_q_norm_rope"
NORM_ROPE_PARAMETERS = Parameters(("q_input", "q_output", "eps", "freqs_cis", "positions"))
FORWARD_PARAMETERS = Parameters(("self", "x", "positions", "forward_batch"), further="any")


HEAD_NORM = Patch(
    name="head_norm",
    why="RMS norm and rotary embedding of the queries are a launch of their own in front of each attention, 43 a step, "
    "which reads them right after; bench/sparse_decode.py --norms",
    targets=(
        targets_of("sparse_decode_head_norm")(NORM_ROPE, "norm_rope", NORM_ROPE_PARAMETERS),
        attention_forward(FORWARD_PARAMETERS),
    ),
    needs=(EXTENSION,),
    serves="sparse_decode",
    retire="with sparse_decode",
)
