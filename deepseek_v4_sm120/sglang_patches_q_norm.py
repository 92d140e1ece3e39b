"""The rows of sglang_patches.py that put the queries' norm and rotary embedding off to `ops.sparse_decode`.

0.5.12            at TP1; above, the rank's heads lie at an offset that the attention does not tell, and stay SGLang's
0.5.14 to 0.5.23  all; 0.5.23 has calls without the norm (DeepSeek-V4.1), which are SGLang's
all               DSpark's attention (0.5.17 and later) imports the function for itself and keeps it
"""

from deepseek_v4_sm120.patching.contract import Contract, Parameters
from deepseek_v4_sm120.patching.spec import Patch, Target
from deepseek_v4_sm120.sglang_patches_wo_a import ATTENTION, FORWARD_VERSIONS, MODEL

NORM_ROPE = f"{MODEL}:fused_q_norm_rope"
NORM_ROPE_PARAMETERS = Parameters(("q_input", "q_output", "eps", "freqs_cis", "positions"))
NORM_ROPE_REVIEWED = {
    **dict.fromkeys(("0.5.12", "0.5.14", "0.5.17"), "81249df40356db0a"),
    "0.5.20": "367b5355303ba6d5",
    "0.5.23": "9c8b89e14f6b733d",
}


def _target(where: str, replacement: str, sglang: str, contract: Contract, reviewed: dict[str, str]) -> Target:
    return Target(
        where=where,
        sglang=sglang,
        contract=contract,
        replacement=f"deepseek_v4_sm120.sglang_adapters.sparse_decode_norm:replace_{replacement}",
        reviewed=reviewed,
    )


Q_NORM = Patch(
    name="q_norm",
    why="RMS norm and rotary embedding of the queries are a launch of their own in front of each attention, 43 a step, "
    "which reads them right after; bench/sparse_decode.py --norms",
    targets=(
        _target(NORM_ROPE, "norm_rope", ">=0.5.12,<0.6", NORM_ROPE_PARAMETERS, NORM_ROPE_REVIEWED),
        *(_target(f"{ATTENTION}.forward", "forward", *version) for version in FORWARD_VERSIONS),
    ),
    needs=("deepseek_v4_sm120.extension:load",),
    modes=("sm120", "ops", "seams"),
    serves="sparse_decode",
    retire="with sparse_decode",
)
