"""The row of table.py for tool calls that write a long text."""

from deepseek_v4_sm120.patching.contract import Parameters
from deepseek_v4_sm120.patching.spec import Patch
from deepseek_v4_sm120.sglang_patches.names import targets_of_fix
from deepseek_v4_sm120.sglang_patches.rows.http_server import CUSTOM_INPUT, PROCESS, RESPONSES

OF_STEP = (
    "self",
    "index",
    "delta",
    "parser_dict",
    "content",
    "request",
    "has_tool_calls",
    "continuous_usage_stats=False",
)
OF_RESPONSES = (
    *("self", "request", "sampling_params", "result_generator", "model_name", "tokenizer", "request_metadata"),
    "created_time=None",
)
_long_calls = targets_of_fix("long_calls")

LONG_CALLS = Patch(
    name="long_calls",
    why="what was written of a call is read anew with each step of a stream, in the loop that answers over HTTP: where "
    "a call writes a file of a hundred thousand characters, all other streams wait for tens of milliseconds a step",
    targets=(
        _long_calls(CUSTOM_INPUT, "custom_input", Parameters(("buffer",), imported=True), ">=0.5.20,<0.6"),
        _long_calls(
            "sglang.srt.function_call.utils:_find_common_prefix",
            "common_prefix",
            Parameters(("s1", "s2"), imported=True),
            "<0.5.21",
        ),
        *(
            _long_calls(
                f"{RESPONSES}.responses_stream_generator_non_harmony",
                "responses",
                Parameters((*OF_RESPONSES, *more), is_generator=True, is_async=True),
                sglang,
            )
            for more, sglang in (((), ">=0.5.14,<0.5.17"), (("*", "require_reasoning"), ">=0.5.17,<0.5.21"))
        ),
        _long_calls(PROCESS, "process", Parameters(OF_STEP, is_generator=True, is_async=True), "<0.5.18"),
        _long_calls(
            PROCESS,
            "process",
            Parameters((*OF_STEP, "flush=False"), is_generator=True, is_async=True),
            ">=0.5.18,<0.5.21",
        ),
    ),
    retire="with SGLang 0.5.20; the first one when SGLang goes on where it was in a custom tool's call",
)
