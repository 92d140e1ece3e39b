"""The row of table.py that is the tool calls' of an answer."""

from deepseek_v4_sm120.patching.contract import Parameters
from deepseek_v4_sm120.patching.spec import Patch
from deepseek_v4_sm120.sglang_patches.names import targets_of

PARSE = "sglang.srt.function_call.deepseekv32_detector:DeepSeekV32Detector._parse_parameters_from_xml"
WHOLE = ("self", "invoke_content")

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
