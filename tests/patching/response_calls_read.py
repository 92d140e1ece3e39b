"""A long call over /v1/responses, streamed by a release's own code: for tool_calls_read.py."""

import asyncio
import importlib
import inspect
import json
from types import SimpleNamespace

from deepseek_v4_sm120.sglang_patches.rows.http_server import RESPONSES
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import fetch

DETECTOR = "sglang.srt.function_call.deepseekv4_detector"
MODULE, _, CLASS = RESPONSES.partition(":")
OUTER, INNER = (f"{CLASS}.{name}responses_stream_generator_non_harmony" for name in ("", "_"))  # INNER: 0.5.20's
TOOLS = [SimpleNamespace(function=SimpleNamespace(name="run", parameters={}))]


class Event(SimpleNamespace):
    def model_dump(self, **_):
        return {name: value for name, value in vars(self).items() if isinstance(value, str | int)}

    def model_dump_json(self, **_):
        return json.dumps(self.model_dump())


class Events:
    def __getattr__(self, name):
        return Event


def generator(version: str, parse, is_incremental: bool):
    """(the method that makes a stream's events, what it is a method of)"""
    settings = SimpleNamespace(incremental_streaming_output=is_incremental)
    detector = SimpleNamespace(supports_structural_tag=lambda: True)
    parser = SimpleNamespace(detector=detector, parse_stream_chunk=parse, parse_stream_end=lambda: ("", []))
    kinds = ("FunctionToolCall", "OutputMessage", "ReasoningItem", "OutputText")
    names = {f"Response{kind}": type(kind, (Event,), {}) for kind in kinds} | {"UsageInfo": Event}
    reader = type("FunctionCallParser", (), {"__new__": lambda *_, **__: parser})
    made = SimpleNamespace(id="", status="", model_dump=dict)
    names |= {"openai_responses_types": Events(), "FunctionCallParser": reader, "json": json, "orjson": OrJson}
    names |= {"JsonArrayParser": type("JsonArrayParser", (), {}), "get_serving": lambda: settings}
    names |= {"ResponsesResponse": SimpleNamespace(from_request=lambda *_, **__: made), "random_uuid": lambda: "0" * 32}
    outer, inner = (take(fetch(version), dict(names), name, MODULE) for name in (OUTER, INNER))
    server = SimpleNamespace(
        tool_call_parser="deepseekv4",
        reasoning_parser=None,
        enable_prompt_tokens_details=False,
        enable_response_store=False,
        tokenizer_manager=SimpleNamespace(tokenizer=None, server_args=settings),
        _response_tools_to_chat_tools=lambda request: request.tools,
        _wants_reasoning_summary=lambda request: False,
        _tool_parser_owns_format=lambda parser: True,
        _status_from_finish_reason=lambda *_: ("completed", None),
        _error_from_finish_reason=lambda *_: None,
        _terminal_stream_event=lambda *_, **__: Event(type="response.completed"),
    )
    server._responses_stream_generator_non_harmony = lambda *given, **named: inner(server, *given, **named)
    return outer, server


class OrJson:
    loads = staticmethod(json.loads)

    @staticmethod
    def dumps(payload):
        return json.dumps(payload).encode()


def streamed(
    version: str, replace, texts: list[str], reason: str, *, is_incremental=False, tools=TOOLS, in_dicts=False
):
    """What is told of a call, how often the parser was asked and of how many characters, and the most steps that told
    nothing behind the call's name."""
    detector, asked, told = importlib.import_module(DETECTOR).DeepSeekV4Detector(), [], [[]]

    def parse(text):
        asked.append(len(detector._buffer) + len(text))
        found = detector.parse_streaming_increment(text, TOOLS)
        return found.normal_text, found.calls

    outer, server = generator(version, parse, is_incremental)
    if outer is None:
        return {}
    context, seen = SimpleNamespace(last_output=None), []

    async def counted(steps):
        async for step in steps:
            seen.append(step)
            yield step

    def of_steps(server, request, sampling_params, result_generator, *given, **named):
        return outer(server, request, sampling_params, counted(result_generator), *given, **named)

    async def steps():
        text = ""
        for i, piece in enumerate(texts):
            text = piece if is_incremental else text + piece
            why = {"type": reason} if i + 1 == len(texts) else None
            context.last_output = {"text": text, "meta_info": {"finish_reason": why, "completion_tokens": i}}
            yield context.last_output if in_dicts else context
            told.append([])

    async def stream():
        request = SimpleNamespace(tools=tools, tool_choice="auto", effective_tool_choice=lambda: "auto", store=False)
        request.reasoning, request.custom_tool_names = None, set
        given = (request, None, steps(), "", None, SimpleNamespace(), 1)
        more = {"require_reasoning": False} if "require_reasoning" in inspect.signature(outer).parameters else {}
        async for event in replace(of_steps)(server, *given, **more):
            told[-1].append(json.loads(event.partition("data: ")[2]))

    asyncio.run(stream())
    events = [event for one in told for event in one]
    kinds = [event["type"].removeprefix("response.") for event in events]
    silent = "".join("t" if any("arguments" in event["type"] for event in one) else "." for one in told).strip(".")
    return {
        "arguments": "".join(e["delta"] for e in events if e["type"].endswith("arguments.delta")),
        "text": "".join(e["delta"] for e in events if e["type"].endswith("output_text.delta")),
        "steps": [len(texts), len(seen)],
        "items": [kind for kind in kinds if not kind.endswith("delta")],
        "buffer": detector._buffer,
        "asked": len(asked),
        "read": sum(asked),
        "silent": max(map(len, silent.split("t"))),
    }
