"""The rows of table.py for what is compiled at its first use, while streams wait for it."""

from deepseek_v4_sm120.patching.contract import Parameters
from deepseek_v4_sm120.patching.spec import Patch
from deepseek_v4_sm120.sglang_patches.names import targets_of_fix

SINCE = ">=0.5.14,<0.6"  # what earlier releases do with such requests was not looked at
HTTP_SERVER = "sglang.srt.entrypoints.http_server"
REPETITION = "sglang.srt.sampling.penaltylib.repetition_penalty"

FIRST_REQUESTS = Patch(
    name="first_requests",
    why="SGLang's warm-up is one greedy request of a few tokens. What the first sampled one with EAGLE, the first "
    "schema, the first whole chunk and each larger batch need is compiled, by nvcc or Triton, and loaded while all "
    "streams wait for it",
    targets=(
        targets_of_fix("first_requests")(
            f"{HTTP_SERVER}:_wait_and_warmup",
            "warm_up",
            Parameters(("server_args", "launch_callback=None", "execute_warmup_func=..."), further="any"),
            SINCE,
        ),
    ),
    retire="when SGLang's warm-up meets all that its users ask for",
    absent="what earlier releases do with such requests was not looked at",
)

PLAIN_SCALING = Patch(
    name="plain_scaling",
    why="the first request with a repetition_penalty, and the first batch of several that has one, wait for "
    "torch.compile, and so do all streams: seconds, in each process anew",
    targets=(
        targets_of_fix("plain_scaling")(
            f"{REPETITION}:apply_scaling_penalties",
            "apply",
            Parameters(("logits", "scaling_penalties")),
            rebound=True,
        ),
    ),
    retire="when SGLang does not compile it",
)
