"""The row of table.py that is of what the attention keeps beside its parameters."""

from deepseek_v4_sm120.patching.contract import Parameters
from deepseek_v4_sm120.patching.spec import Patch
from deepseek_v4_sm120.sglang_patches.names import (
    DSPARK,
    DSPARK_SINCE,
    POST_LOAD,
    POST_LOAD_PARAMETERS,
    direct_updates,
    targets_of_fix,
)

_sinks = targets_of_fix("updated_sinks")

UPDATED_SINKS = Patch(
    name="updated_sinks",
    why="on several cards the attention computes with a copy of its heads' sinks from the first forward: behind an "
    "update of the weights with the old ones, and nothing says so (0.5.23: the draft's, and load_format=direct)",
    targets=(
        _sinks(POST_LOAD, "loading", POST_LOAD_PARAMETERS, ">=0.5.14,<0.6"),
        # DSPARK's draft has ends of a load of its own
        _sinks(f"{DSPARK}.load_weights", "loading", Parameters(("self", "weights")), DSPARK_SINCE),
        _sinks(f"{DSPARK}.post_load_weights", "loading", POST_LOAD_PARAMETERS, ">=0.5.23,<0.6"),
        *direct_updates(_sinks, "loading", "0.5.14"),
    ),
    retire="when SGLang writes every such copy again",
    absent="0.5.12 and 0.5.13 read the parameter",
)
