"""The rows of table.py for what answers and calls are held to, in the processes that answer over HTTP."""

from deepseek_v4_sm120.patching.contract import Parameters
from deepseek_v4_sm120.patching.spec import Patch
from deepseek_v4_sm120.sglang_patches.names import targets_of_fix
from deepseek_v4_sm120.sglang_patches.rows.http_server import CHAT, RESPONSES, RESPONSES_REQUEST, SINCE_RECIPE

TAGS = "sglang.srt.function_call.base_format_detector:BaseFormatDetector.get_structural_tag"
OF_TAG = ("self", "tools=None", "tool_choice='auto'", "thinking_mode=False")
SINCE_XGRAMMARS_OWN, FORMATS_OF_RESPONSES = ">=0.5.13,<0.6", ">=0.5.18,<0.6"
OF_MAKE = ("self", "request", "prev_response", "tokenizer")
OF_PARAMS = ("stop=None", "tool_call_constraint=None")

_own_names, _calls_or_answers = targets_of_fix("own_names"), targets_of_fix("calls_or_answers")

OWN_NAMES = Patch(
    name="own_names",
    why="where a call is required, or any tool is strict, the arguments of tools that are not strict may have names of "
    "letters, digits and underscores alone, so that a tool with others (-A, user-id, filter[name]) lacks them",
    targets=(
        _own_names(TAGS, "tag", Parameters(OF_TAG), ">=0.5.13,<0.5.17"),
        _own_names(TAGS, "tag", Parameters((*OF_TAG, "parallel_tool_calls=True")), ">=0.5.17,<0.6"),
    ),
    absent="0.5.12 takes names from each tool's schema",
    retire="when XGrammar lets such arguments have any names",
)

CALLS_OR_ANSWERS = Patch(
    name="calls_or_answers",
    why="a request with tools and a schema for its answer, as agents send it with each turn, is held to the schema "
    "from the first token on, so that no tool can be called; over /v1/responses it is refused where a tool is strict",
    targets=(
        _calls_or_answers(
            f"{CHAT}._convert_to_internal_request",
            "convert",
            Parameters(("self", "request", "raw_request=None")),
            SINCE_XGRAMMARS_OWN,
        ),
        _calls_or_answers(f"{RESPONSES}._make_request", "make", Parameters(OF_MAKE, is_async=True), ">=0.5.18,<0.5.23"),
        _calls_or_answers(
            f"{RESPONSES}._make_request",
            "make",
            Parameters((*OF_MAKE, "*", "tool_adapter=None"), is_async=True),
            SINCE_RECIPE,
        ),
        _calls_or_answers(
            f"{RESPONSES_REQUEST}.to_sampling_params",
            "to_sampling_params",
            Parameters(("self", "default_max_tokens=...", "default_params=None", *OF_PARAMS)),
            FORMATS_OF_RESPONSES,
        ),
    ),
    absent="0.5.12 has other grammars of calls",
    retire="when SGLang lets the model call a tool where an answer has a schema",
)
