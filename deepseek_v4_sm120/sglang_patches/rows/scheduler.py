"""The row of table.py that is the scheduler's: which prompts are accepted."""

from deepseek_v4_sm120.patching.contract import Parameters
from deepseek_v4_sm120.patching.spec import Patch
from deepseek_v4_sm120.sglang_patches.names import targets_of

WORKER = "sglang.srt.managers.tp_worker:TpModelWorker"

LONGEST_PROMPT = Patch(
    name="longest_prompt",
    why="prompts of the last 250 tokens that the KV cache holds are accepted and never let in: they and all requests "
    "behind them wait until their client gives up; with --allow-auto-truncate every prompt that is too long "
    "(sglang #29249, open)",
    targets=(targets_of("longest_prompt")(f"{WORKER}.get_worker_info", "worker_info", Parameters(("self",))),),
    retire="when SGLang refuses what it can never let in",
)
