"""A request with tools and a schema for its answer is answered by a call or by the schema, as the model chooses.

Agents send both with each turn (OpenAI's Agents SDK with an `output_type`): tools to find out, and a schema for the
last answer. SGLang holds all of the answer to the schema, so that no call can be written: the model makes up an answer
where it would have asked (0.5.12 to 0.5.23; vLLM has the same, #39929). Up to 0.5.17 that holds of a call that is
required, too, which later releases refuse. Over /v1/responses (0.5.18 to 0.5.23) a request with both is refused where a
tool is strict, as those of that SDK are.

Here the grammar is for either, and for calls alone where one is required: from its first token behind the thoughts on
the answer is the schema's or a call in DeepSeek-V4's syntax. Words in front of a call, without a grammar the model's
own, are in neither: who began with words that are no call would have to call. With XGrammar, SGLang's default, alone:
other backends do not know its structural tags. This runs in the process that answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import answers_for_ours

FORMATS, SCHEMA, TAG, XGRAMMAR = ("json_schema", "json_object"), "json_schema", "structural_tag", "xgrammar"
CALLS = "sglang.srt.function_call.function_call_parser"
JUDGE = "sglang.srt.constrained.json_schema_validation"  # 0.5.21 and later
AUTO, REQUIRED, CONSTRAINT = "auto", "required", "tool_call_constraint"


def replace_convert(original: Callable) -> Callable:
    """For OpenAIServingChat._convert_to_internal_request(self, request, raw_request=None) -> what the scheduler is
    asked for, and the request; /v1/messages asks it, too."""

    @functools.wraps(original)
    def _convert_to_internal_request(self, request, *args, **more):
        made, request = original(self, request, *args, **more)
        if answers_for_ours(self) and _asks_for_both(self, request):
            calls = _required(self, _tools(self, request), request.tool_choice, request.parallel_tool_calls)
            hold_to_either(made.sampling_params, calls, request.tool_choice == AUTO)
        return made, request

    return _convert_to_internal_request


class Beside(tuple):
    """(kind, grammar) of calls that may be in place of an answer by a schema."""


def replace_make(original: Callable) -> Callable:
    """For OpenAIServingResponses._make_request(self, request, ..) -> .., what was made of its messages (None for
    harmony's models)."""

    @functools.wraps(original)
    async def _make_request(self, request, *args, **more):
        *others, processed = await original(self, request, *args, **more)
        if answers_for_ours(self) and request.has_json_schema_constraint() and request.effective_tool_choice() == AUTO:
            tools = self._response_tools_to_chat_tools(request)
            calls = _required(self, tools, AUTO, request.parallel_tool_calls is not False) if tools else None
            processed.tool_call_constraint = processed.tool_call_constraint if calls is None else Beside(calls)
        return *others, processed

    return _make_request


def replace_to_sampling_params(original: Callable) -> Callable:
    """For ResponsesRequest.to_sampling_params(self, .., tool_call_constraint) -> what the scheduler is asked for; with
    a schema it refuses calls."""

    @functools.wraps(original)
    def to_sampling_params(self, *args, **more):
        calls = more.get(CONSTRAINT)
        if not isinstance(calls, Beside):
            return original(self, *args, **more)
        params = original(self, *args, **more | {CONSTRAINT: None})
        hold_to_either(params, calls, True)
        return params

    return to_sampling_params


def hold_to_either(params: dict, calls, or_answer: bool) -> None:
    """Of what the scheduler is asked for, the schema becomes a structural tag; without `calls` nothing is changed."""
    if not params.get(SCHEMA) or calls is None or calls[0] != TAG:
        return
    schema, tag = json.loads(params[SCHEMA]), calls[1].model_dump(by_alias=True)
    if "format" not in tag:  # of a parser whose calls XGrammar does not know (--tool-call-parser of another model)
        return
    if or_answer:
        if importlib.util.find_spec(JUDGE) is not None:
            importlib.import_module(JUDGE).validate_xgrammar_json_schema(schema)  # or an error, as the scheduler has it
        tag["format"] = {"type": "or", "elements": [{"type": SCHEMA, SCHEMA: schema}, tag["format"]]}
    params.pop(SCHEMA)
    params[TAG] = json.dumps(tag)


def _asks_for_both(serving, request) -> bool:
    has_format = request.response_format is not None and request.response_format.type in FORMATS
    return has_format and request.tool_choice != "none" and bool(_tools(serving, request))


def _tools(serving, request):
    """From 0.5.17 on a system message's own are among them."""
    return serving._effective_tools(request) if hasattr(serving, "_effective_tools") else request.tools


def _required(serving, tools, choice, in_parallel: bool):
    """(kind, grammar) of one or more calls, as SGLang has them where one is required; None: it has none."""
    if not serving.tool_call_parser or _backend(serving.tokenizer_manager) != XGRAMMAR:
        return None
    parser = importlib.import_module(CALLS).FunctionCallParser(tools, serving.tool_call_parser)
    choice = REQUIRED if choice == AUTO else choice
    return parser.get_structure_constraint(choice, parallel_tool_calls=in_parallel, thinking_mode=False)


def _backend(manager) -> str:
    if hasattr(manager, "config_value"):  # 0.5.17 and later
        return manager.config_value("grammar_backend")
    return manager.server_args.grammar_backend
