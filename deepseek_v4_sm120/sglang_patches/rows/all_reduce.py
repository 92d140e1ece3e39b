"""The rows of table.py that lie between the cards: the sums, and the start of NCCL."""

from deepseek_v4_sm120.patching.contract import Parameters
from deepseek_v4_sm120.patching.spec import Patch
from deepseek_v4_sm120.sglang_patches.names import EXTENSION, NCCL, targets_of, targets_of_fix

ALL_REDUCE = Patch(
    name="all_reduce",
    why="the sums between the cards, 87 a step, up to 512 rows: above 2 cards on PCIe they are NCCL's, 16 to 30 us "
    "each and rounded at every hop; and the gather of the logits, up to 64 rows; bench/all_reduce.py",
    targets=(
        targets_of("all_reduce")(
            "sglang.srt.distributed.device_communicators.custom_all_reduce:dispatch_custom_allreduce",
            "dispatch",
            Parameters(("group", "device")),
            ">=0.5.13,<0.6",
            "sglang.srt.distributed.parallel_state",
        ),
        targets_of("all_reduce")(
            "sglang.srt.distributed.parallel_state:GroupCoordinator.all_gather",
            "all_gather",
            Parameters(("self", "input_", "dim=-1", "output_tensor_list=None")),
            ">=0.5.13,<0.6",
        ),
    ),
    needs=(EXTENSION,),
    ahead=("sglang.srt.managers.scheduler", "deepseek_v4_sm120.sglang_patches.all_reduce_ahead:start"),
    absent="0.5.12 asks for a class before there is a group",
    retire="when SGLang's own sums are as fast, and the same bits in every batch (bench/all_reduce.py)",
)

NCCL_START = Patch(
    name="nccl_start",
    why="a start waits for ever in NCCL's first sum, without a line, where the driver offers copies between cards that "
    "move nothing",
    targets=(
        targets_of_fix("nccl_start")(
            f"{NCCL}:PyNcclCommunicator.__init__", "init", Parameters(("self", "group", "device"), further="any")
        ),
    ),
    retire="when SGLang says where a start waits",
)
