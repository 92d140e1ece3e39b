"""The row of table.py that cuts long prompts' chunks in two halves: adapters/halves.py."""

from deepseek_v4_sm120.patching.contract import Parameters
from deepseek_v4_sm120.patching.spec import Patch
from deepseek_v4_sm120.sglang_patches.names import MODEL, targets_of

_halves = targets_of("halves")
HALVES_SINCE = ">=0.5.13,<0.6"

HALVES = Patch(
    name="halves",
    why="the sums between the cards of a prompt's chunk are NCCL's, 87 of 64 MB at 8,192 rows, and the cards are idle "
    "meanwhile: over host memory or PCIe a quarter of the chunk's time. In two halves, one's sums run beside the "
    "other's products",
    targets=(
        _halves(
            f"{MODEL}:DeepseekV4Model.forward",
            "model_forward",
            Parameters(("self", "input_ids", "positions", "forward_batch", "input_embeds", "pp_proxy_tensors=None")),
            HALVES_SINCE,
        ),
        _halves(
            "sglang.srt.distributed.parallel_state:GroupCoordinator.all_reduce",
            "all_reduce",
            Parameters(("self", "input_")),
            HALVES_SINCE,
        ),
    ),
    default="halves",
    absent="0.5.12 has neither a context that tells the forward's attention backend nor sums that are ours",
    retire="when SGLang overlaps a prompt's sums without data and expert parallelism",
)
