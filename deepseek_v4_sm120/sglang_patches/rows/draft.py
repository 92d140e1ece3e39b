"""The row of table.py that is the MTP draft's block's own: what it begins with."""

from deepseek_v4_sm120.patching.contract import Parameters
from deepseek_v4_sm120.patching.spec import Patch
from deepseek_v4_sm120.sglang_patches.names import EXTENSION, targets_of
from deepseek_v4_sm120.sglang_patches.rows.mhc import MTP_MODEL

DRAFT_INPUT = Patch(
    name="draft_input",
    why="a draft's block begins with an embedding, two norms, two projections, what adds up their parts, and a sum, "
    "eight launches one behind the other: 28 us of an H200, three times in a step of EAGLE 3/1/4. In four launches",
    targets=(
        targets_of("fp8_linear_draft_input")(
            f"{MTP_MODEL}.forward",
            "forward",
            Parameters(("self", "input_ids", "positions", "forward_batch", "input_embeds=None")),
            ">=0.5.14,<0.6",
        ),
    ),
    needs=(EXTENSION,),
    serves="fp8_linear",
    only_read=True,
    absent="0.5.12 and 0.5.13 were not looked at",
    retire="when SGLang begins a draft's block by as few launches",
)
