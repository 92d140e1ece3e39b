"""SGLang's breakable prefill graphs for our model, where DSV4_SM120_SET=prefill_graphs asks for them.

A pass is captured as graphs that end at each layer's attention, which runs between them for the rows that there are; a
pass of fewer rows than a captured one is padded to it, to twice its rows at most. SGLang rules this model out, unless
the user asked. So it is asked for in the user's place, ahead of the rules: where SGLang asks for other models' graphs.
Not where the user said anything about prefill graphs, nor with what nobody has read beside them (`PLAIN`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120 import patching
from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.sglang_patches import device_gate, models_served
from deepseek_v4_sm120.sglang_patches.adapters.argument_defaults import accessors, config_of
from deepseek_v4_sm120.sglang_patches.defaults import CAPTURED_ROWS

DEFAULT = "prefill_graphs"
# none more than twice the one before, else what lies between has no graph; closer where a padded row costs most
ROWS = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 3072, 4096, 6144)
MTP = ("EAGLE",)  # --speculative-algorithm: the model's own draft layer
# server argument -> its value where the user did not speak of graphs, and passes are those of tensor parallelism alone
PLAIN = {
    **{"cuda_graph_backend_prefill": None, "cuda_graph_bs_prefill": None, "cuda_graph_max_bs_prefill": None},
    **{"cuda_graph_config": None, "disable_prefill_cuda_graph": False, "disable_cuda_graph": False},
    **{"nnodes": 1, "pp_size": 1, "dp_size": 1, "dcp_size": 1, "attn_cp_size": 1, "enable_prefill_cp": False},
    **{"moe_a2a_backend": "none", "enable_two_batch_overlap": False, "disaggregation_mode": "null"},
    **{"enable_memory_saver": False, "enable_lora": False, "speculative_algorithm": None},
}
# The same from 0.5.22 on: data parallel attention, however the user spelled it; dp_size is 1 beside it
PLAIN_SINCE_0_5_22 = {"attn_dp_size": 1}


def captured_rows(most: int) -> list[int]:
    """Those of the passes that are captured, at most so many."""
    found = [rows for rows in ROWS if rows < most]
    while found and 2 * found[-1] < most:
        found.append(2 * found[-1])
    return [*found, most]


def worth_capturing(cards: int) -> int:
    """Rows of a pass up to which the hosts take longer than so many cards: launches cost the same for any number of
    rows, whose work the cards share."""
    return CAPTURED_ROWS * cards


def replace_function(original: Callable, speculation: tuple[str, ...] = ()) -> Callable:
    """For apply_inkling_prefill_cuda_graph_default(server_args), of 0.5.19 and later."""
    plain = {name: (None, value) for name, value in (PLAIN | PLAIN_SINCE_0_5_22).items()}
    plain["speculative_algorithm"] += speculation

    @functools.wraps(original)
    def apply_inkling_prefill_cuda_graph_default(server_args):
        original(server_args)
        read, write = accessors(server_args)
        most = patching.value(DEFAULT)
        if not most or any(read(name, None) not in values for name, values in plain.items()):
            return
        config = config_of(server_args)
        if config is None or config.get("model_type") not in models_served.MODEL_TYPES:
            return
        if device_gate.serves_current_device():
            rows = captured_rows(most)
            write("cuda_graph_backend_prefill", "breakable")
            write("cuda_graph_bs_prefill", rows)
            asked = f"as DSV4_SM120_SET={DEFAULT} asks"
            passes = f"prefill passes of {rows[0] // 2} to {most} rows"
            report.info(f"deepseek_v4_sm120: {passes} are captured in graphs, {asked}")

    return apply_inkling_prefill_cuda_graph_default


def replace_with_mtp(original: Callable) -> Callable:
    """The same of 0.5.23, where an engine with the model's own drafts was seen to say the same with them."""
    return replace_function(original, MTP)


def replace_method(original: Callable) -> Callable:
    """The same up to 0.5.18, where it is a method of the arguments."""
    apply = replace_function(original)

    @functools.wraps(original)
    def _apply_inkling_prefill_cuda_graph_default(self):
        return apply(self)

    return _apply_inkling_prefill_cuda_graph_default
