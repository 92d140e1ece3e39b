"""The rows of table.py that are the process's that answers over HTTP: tool calls, and clients that go away."""

from deepseek_v4_sm120.patching.contract import Parameters
from deepseek_v4_sm120.patching.spec import Patch
from deepseek_v4_sm120.sglang_patches.names import targets_of

PARSE = "sglang.srt.function_call.deepseekv32_detector:DeepSeekV32Detector._parse_parameters_from_xml"
WHOLE = ("self", "invoke_content")

TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager:TokenizerManager"

_tool_strings = targets_of("tool_strings")

TOOL_STRINGS = Patch(
    name="tool_strings",
    why="the parser of tool calls strips the strings of their arguments: indentation in front and line ends behind are "
    "lost, so that an editor does not find what it is to replace, and files end without a line end. DeepSeek's own "
    "parser and prompt take them as is, as do vLLM and SGLang's parser of DeepSeek-V4.1 (frontend-crates #247)",
    targets=(
        _tool_strings(PARSE, "parse_partial_parameters", Parameters((*WHOLE, "allow_partial=False")), "<0.5.21"),
        _tool_strings(PARSE, "parse_parameters", Parameters(WHOLE), ">=0.5.21,<0.5.23"),
    ),
    absent="from 0.5.23 on DeepSeek's own parser reads the answers (deepseek-recipe)",
    retire="with SGLang 0.5.22",
)

DISCONNECTS = Patch(
    name="disconnects",
    why="a request whose client leaves the stream is generated to its max_tokens, and holds a request slot until then: "
    "its state is dropped before the abort, which then finds none (sglang #36333, #37833; #35255 mended it)",
    targets=(
        targets_of("disconnects")(
            f"{TOKENIZER_MANAGER}._discard_pending_req_states",
            "discard",
            Parameters(("self", "obj")),
            ">=0.5.18,<0.5.20",
        ),
    ),
    absent="SGLang ends them itself",
    retire="with SGLang 0.5.19",
)
