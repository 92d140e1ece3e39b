"""The row of table.py that is the waiting of DSPARK's draft."""

from deepseek_v4_sm120.patching.contract import Parameters
from deepseek_v4_sm120.patching.spec import Patch
from deepseek_v4_sm120.sglang_patches.names import BACKEND, targets_of

DSPARK_LENGTHS = Patch(
    name="dspark_lengths",
    why="DSPARK's draft fetches the requests' lengths from the GPU in every step, so the host waits for the "
    "verification and the GPU for the host: 0.3 ms of an H200's step of 7.8. Nobody reads them there",
    targets=(
        targets_of("dspark_lengths")(
            f"{BACKEND}:DeepseekV4AttnBackend.init_forward_metadata_dspark_draft_block",
            "draft_block",
            Parameters(("self", "max_seq_len", "req_pool_indices", "seq_lens", "seq_lens_cpu"), further="any"),
            ">=0.5.16,<0.5.24",  # who reads them is outside of the definition: read and run release by release
        ),
    ),
    absent="before 0.5.16 there is no DSPARK",
    retire="when SGLang does not ask for them",
)
