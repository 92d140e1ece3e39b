"""The row of table.py that records what every sublayer is given, where DSV4_SM120_LAYERS names a folder for it."""

from deepseek_v4_sm120 import LAYERS as VARIABLE
from deepseek_v4_sm120.patching.contract import Parameters
from deepseek_v4_sm120.patching.spec import Patch, Target
from deepseek_v4_sm120.sglang_patches.names import ATTENTION, DSPARK, DSPARK_SINCE, MODEL_RUNNER
from deepseek_v4_sm120.sglang_patches.rows.mhc import MODEL_FORWARD, MODEL_FORWARD_PARAMETERS, MTP_MODEL

ASKED, FACTS = "asked.json", "server.json"  # files: what is to be recorded, and what the server is
SINCE = ">=0.5.14,<0.6"
EXPERTS = "sglang.srt.models.deepseek_v2:DeepseekV2MoE.forward"


def _target(where: str, name: str, parameters: Parameters, sglang: str = SINCE) -> Target:
    replacement = f"deepseek_v4_sm120.sglang_patches.layer_record:replace_{name}"
    return Target(where=where, sglang=sglang, contract=parameters, replacement=replacement)


LAYERS = Patch(
    name="layers",
    why="whether the engine computes the model cannot be seen from outside: `layers` compares what every sublayer was "
    "given with float64 from the checkpoint's files",
    targets=(  # behind all others, which these wrap
        _target(MODEL_FORWARD, "model_forward", MODEL_FORWARD_PARAMETERS),
        _target(
            f"{MTP_MODEL}.forward",
            "draft_forward",
            Parameters(("self", "input_ids", "positions", "forward_batch"), further="any"),
        ),
        _target(
            f"{DSPARK}.forward",
            "block_forward",
            Parameters(("self", "input_ids", "positions", "forward_batch"), further="any"),
            DSPARK_SINCE,
        ),
        _target(
            f"{DSPARK.partition(':')[0]}:DSparkAttention.forward",
            "draft_attention_forward",
            Parameters(("self", "positions", "hidden_states"), further="any"),
            DSPARK_SINCE,
        ),
        _target(f"{ATTENTION}.forward", "attention_forward", Parameters(("self", "x"), further="any")),
        _target(EXPERTS, "experts_forward", Parameters(("self", "hidden_states"), further="any")),
        _target(
            f"{MODEL_RUNNER}:ModelRunner.forward",
            "runner_forward",
            Parameters(("self", "forward_batch"), further="any"),
        ),
    ),
    variable=VARIABLE,
    absent="0.5.12 and 0.5.13 were not looked at",
    retire="never: it is a test",
)
