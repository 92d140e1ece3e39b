"""Answers with tool calls, read by a release's own parsers, without and with ours around them; and thoughts, read where
the reader is told of them and where not.

A program of its own, because it imports SGLang's modules from a wheel:

    python3 -m tests.patching.tool_calls_read 0.5.22        JSON: what each case became, by way
"""

import asyncio
import functools
import importlib
import inspect
import json
import logging
import random
import re
import sys
from types import SimpleNamespace

from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.fixes import long_calls, think_marks, tool_strings
from deepseek_v4_sm120.sglang_patches.rows.http_server import CHAT, PROCESS
from tests.patching import response_calls_read
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import fetch, packages
from tests.wheel_pools import Stub, Wheel

HOME = "sglang.srt.function_call"
REAL = tuple(
    f"{HOME}.{name}"
    for name in ("base_format_detector", "core_types", "utils", "deepseekv32_detector", "deepseekv4_detector")
)
PARSER, OPENAI = "sglang.srt.parser", "sglang.srt.entrypoints.openai"
OF_THOUGHTS = (
    *(f"{PARSER}.reasoning_parser", f"{PARSER}.inkling_tokenizer", f"{OPENAI}.encoding_dsv4"),
    *(f"{HOME}.{name}" for name in ("kimik3_format", "muse_glimmer_format")),
)
THOUGHT, ANSWER = "First a thought.", "Then the answer."
CHAT_MODULE, _, CHAT_CLASS = CHAT.partition(":")
MARK = "｜DSML｜"
IN_FRONT = "Let me look."
OPENED = {"opened": "<think>Hm.</think>Done."}
MARKED = {"text": "Use <think> and </think>, each once.", "call": f"{IN_FRONT} <{MARK}x>echo '<think>'</{MARK}x>"}
CASES = {
    "indented": {"command": "    return x\n"},
    "blanks alone": {"command": "  \n", "o": "\t"},
    "inner blanks": {"command": "\n\n  if x:\n\n\n  y  ", "n": 3},
    "nothing": {"command": ""},
    "SGLang's own marks": {"command": " find /tmp/parameter invoke </p> \n", "o": {"a": [1, " b "]}},
    "quotes": {"command": ' a\\n"b"\\ \n'},
    "JSON in it": {"command": ' {"a": " b "} \n'},
    "no string": {"n": 12, "o": [True, None, 1.5]},
    "below zero": {"n": -7, "o": [-1, {"a": -0.5}], "command": "-"},
}
WAYS = (0, 1, 2, 3, 5, 10_000)  # tokens of a piece; 0: the answer as a whole
IN_TURNS = 10  # ways whose pieces have other numbers of tokens, and of each release others


def written(block: str, arguments: dict) -> str:
    """As the model writes a call: two of them, the second with its arguments as JSON."""
    parameters = "".join(
        f'<{MARK}parameter name="{name}" string="{str(isinstance(value, str)).lower()}">'
        f"{value if isinstance(value, str) else json.dumps(value)}</{MARK}parameter>\n"
        for name, value in arguments.items()
    )
    first = f'<{MARK}invoke name="run">\n{parameters}</{MARK}invoke>\n'
    second = f'<{MARK}invoke name="run">\n{{"command": " as JSON "}}\n</{MARK}invoke>\n'
    return f"{IN_FRONT}\n\n<{MARK}{block}>\n{first}{second}</{MARK}{block}>"


@functools.cache  # every reader has the same
def pieces(text: str, way) -> list[str]:
    """DeepSeek's mark is one token, as in its vocabulary; for the rest words, blanks and signs do."""
    tokens, found, at = re.findall(rf"{MARK}| ?[A-Za-z]+|\n+|\s|\d+|[^\w\s]|_", text), [], 0
    assert "".join(tokens) == text
    chance = random.Random(str(way))
    while at < len(tokens):
        many = way if isinstance(way, int) else chance.randint(1, 5)
        found.append("".join(tokens[at : at + many]))
        at += many
    return found


def read(detector, text: str, way, tools) -> list:
    """[the words in front, [name, arguments] of each call]"""
    if way == 0:
        found = detector.detect_and_parse(text, tools)
        return [found.normal_text, *([call.name, json.loads(call.parameters)] for call in found.calls)]
    told = [detector.parse_streaming_increment(piece, tools) for piece in pieces(text, way)]
    if "tools" in inspect.signature(getattr(detector, "finish", main)).parameters:
        told.append(detector.finish(tools))
    calls = {}
    for call in (call for one in told for call in one.calls):
        name, arguments = calls.get(call.tool_index, ("", ""))
        calls[call.tool_index] = (name + (call.name or ""), arguments + (call.parameters or ""))
    return ["".join(one.normal_text or "" for one in told), *([n, json.loads(a)] for n, a in calls.values())]


def thoughts(is_told: bool) -> list:
    """[thoughts, text] of an answer behind a prompt that thinks, as a whole and in pieces; what is read by default."""
    module = importlib.import_module(f"{PARSER}.reasoning_parser")
    made = [module.ReasoningParser("deepseek-v4", stream_reasoning=True, force_reasoning=is_told) for _ in range(2)]
    whole = made[0].parse_non_stream(f"{THOUGHT}</think>{ANSWER}")
    told = [made[1].parse_stream_chunk(piece) for piece in (THOUGHT, "</think>", ANSWER)]
    streamed = ["".join(one[i] or "" for one in told) for i in range(2)]
    return [[whole[0] or "", whole[1]], streamed, made[0].detector.reasoning_default]


def marked(is_told: bool, cases: dict = MARKED) -> dict:
    """[thoughts, text] of an answer in whose text, or in whose call, a mark stands, by the case and way."""
    module, found = importlib.import_module(f"{PARSER}.reasoning_parser"), {}
    for case, answer in cases.items():
        text = f"{THOUGHT}</think>{answer}" if is_told else answer
        for way in (0, 1, 3, "marks"):
            parser = module.ReasoningParser("deepseek-v4", stream_reasoning=True, force_reasoning=is_told)
            if way == 0:
                told = [parser.parse_non_stream(text)]
            else:
                cut = re.split("(</?think>)", answer) if way == "marks" else pieces(answer, way)
                cut = [THOUGHT, "</think>", *cut] if is_told else cut
                told = [parser.parse_stream_chunk(piece) for piece in cut]
            found[f"{case}, {way}"] = ["".join(one[i] or "" for one in told) for i in range(2)]
    return found


CUT_OFF = written("tool_calls", {"command": "rm -rf /srv/a/b"}).partition("/a/b")[0]
BARE = f'{IN_FRONT}\n\n<{MARK}tool_calls>\n<{MARK}invoke name="run">\n</{MARK}invoke>\n</{MARK}tool_calls>'


def cut_off(tools, replace, reason: str, answer: str = CUT_OFF) -> list[str]:
    """[the arguments of a call that ends within its string, what is told of them at the stream's end]"""
    detector = importlib.import_module(f"{HOME}.deepseekv4_detector").DeepSeekV4Detector()
    told = [call for piece in pieces(answer, 1) for call in detector.parse_streaming_increment(piece, tools).calls]
    sent = []

    def made(**given):
        sent.append(given.get("arguments"))
        return SimpleNamespace(model_dump_json=lambda: "")

    kinds = ("ToolCall", "FunctionResponse", "ChatCompletionResponseStreamChoice", "DeltaMessage")
    names = {kind: made for kind in (*kinds, "ChatCompletionStreamResponse")}
    clock = SimpleNamespace(time=lambda: 0)
    names |= {
        "json": json,
        "hasattr": hasattr,
        "isinstance": isinstance,
        "len": len,
        "str": str,
        "time": clock,
        "int": int,
    }
    last = replace(take(fetch(sys.argv[1]), names, f"{CHAT_CLASS}._check_for_unstreamed_tool_args", CHAT_MODULE))
    content = {"meta_info": {"id": "", "finish_reason": {"type": reason}}}
    last(None, SimpleNamespace(detector=detector), content, SimpleNamespace(model=""), 0)
    return ["".join(call.parameters for call in told), "".join(filter(None, sent))]


EACH = 48  # of long_calls in this program, whose calls are shorter
LONG = "".join(f"    if x[{i}] < -{i} and y > '\\n':  # 😀\n" for i in range(18)) + f"# {MARK}\n" + 'x = ["a"]\n' * 18
LONG_ANSWER = written("tool_calls", {"command": LONG, "n": -7, "o": {"a": LONG[:200]}})
ENDS = {  # of a stream: the answer, why it ended
    "whole": (LONG_ANSWER, "stop"),
    "cut off": (LONG_ANSWER[: len(LONG)], "length"),
}


def streamed(tools, replace, case: str, way) -> dict:
    """A long call over the chat API: what is told of it, how often the parser was asked and of how many characters, and
    the most steps that told nothing behind the call's name."""
    detector, asked, told = importlib.import_module(f"{HOME}.deepseekv4_detector").DeepSeekV4Detector(), [], [[]]

    def parse(text):
        asked.append(len(detector._buffer) + len(text))
        found = detector.parse_streaming_increment(text, tools)
        return found.normal_text, found.calls

    def made(**given):
        told[-1].append([given.get("name"), given["arguments"]] if "arguments" in given else given.get("content"))

    def chunk(**_):
        unseen.append("chunk")
        return SimpleNamespace(model_dump_json=lambda: "chunk")

    kinds = ("ToolCall", "FunctionResponse", "ChatCompletionResponseStreamChoice", "DeltaMessage")
    unseen, names = [], dict.fromkeys(kinds, made) | {"ChatCompletionStreamResponse": chunk}
    names |= {"time": SimpleNamespace(time=lambda: 0), "JsonArrayParser": type("JsonArrayParser", (), {})}
    step = replace(take(fetch(sys.argv[1]), names, PROCESS.partition(":")[2], CHAT_MODULE))
    nothing = ("_effective_tools", "_get_history_tool_calls_cnt", "_process_tool_call_id")
    chat = SimpleNamespace(**{name: lambda *_: None for name in nothing})
    parser = SimpleNamespace(detector=detector, parse_stream_chunk=parse, parse_stream_end=lambda: ("", []))
    answer, reason = ENDS[case]
    *texts, last = pieces(answer, way)

    async def stream():
        for text, why in (*((text, None) for text in texts), (last, {"type": reason})):
            content = {"meta_info": {"id": "", "finish_reason": why}}
            async for event in step(chat, 0, text, {0: parser}, content, SimpleNamespace(model="", tools=tools), {}):
                unseen.remove(event.removeprefix("data: ").strip())
            told.append([])

    asyncio.run(stream())
    calls = [call for one in told for call in one if isinstance(call, list)]
    silent = "".join("t" if any(isinstance(call, list) for call in one) else "." for one in told).strip(".")
    return {
        "told": ["".join(call[i] or "" for call in calls) for i in range(2)],
        "buffer": detector._buffer,
        "unseen": unseen,
        "asked": len(asked),
        "read": sum(asked),
        "silent": max(map(len, re.split("t+", silent))),
    }


def prefixes() -> list:
    """[of two texts, what they begin with: SGLang's, ours] where these differ."""
    module, chance, found = importlib.import_module(f"{HOME}.utils"), random.Random(0), []
    ours = long_calls.replace_common_prefix(None)
    for _ in range(500):
        first = "".join(chance.choices("abé", k=chance.randint(0, 9)))
        second = first[: chance.randint(0, 9)] + "".join(chance.choices("abé", k=chance.randint(0, 9)))
        both = [function(first, second) for function in (module._find_common_prefix, ours)]
        found += [[first, second, *both]] if both[0] != both[1] else []
    return found


def all_streamed(tools, replace) -> dict:
    return {case: streamed(tools, replace, case, 2) for case in ENDS}


def responded(replace, case: str, **given) -> dict:
    """The same over /v1/responses; nothing of a release that streams no calls there."""
    answer, reason = ENDS[case]
    return response_calls_read.streamed(sys.argv[1], replace, pieces(answer, 2), reason, **given)


def main(version: str) -> dict:
    logging.disable(logging.CRITICAL)
    sys.path.append(str(packages()))
    sys.meta_path.insert(0, Wheel(fetch(version), (*REAL, *OF_THOUGHTS)))
    sys.modules["transformers"] = Stub("transformers")  # of which the parsers take a name
    v32 = importlib.import_module(f"{HOME}.deepseekv32_detector").DeepSeekV32Detector
    v4 = importlib.import_module(f"{HOME}.deepseekv4_detector").DeepSeekV4Detector
    parameters = {"type": "object", "properties": {name: {} for name in ("command", "n", "o")}}
    tools = [SimpleNamespace(function=SimpleNamespace(name="run", parameters=parameters))]
    ways = [*WAYS, *(f"turns {version} {i}" for i in range(IN_TURNS))]
    few = [0, 1, ways[-1]]  # of what is asked for nothing but that it stays
    stock = v32._parse_parameters_from_xml
    is_partial = "allow_partial" in inspect.signature(stock).parameters
    replace = tool_strings.replace_parse_partial_parameters if is_partial else tool_strings.replace_parse_parameters

    def all_ways(of, block: str, ways=ways) -> dict:
        texts = {case: written(block, arguments) for case, arguments in CASES.items()}
        return {case: {str(way): read(of(), text, way, tools) for way in ways} for case, text in texts.items()}

    readers = importlib.import_module(f"{PARSER}.reasoning_parser").ReasoningParser
    found = {"marks": {str(is_told): marked(is_told) for is_told in (False, True)}, "opened": marked(False, OPENED)}
    for name in ("parse_non_stream", "parse_stream_chunk"):
        setattr(readers, name, getattr(think_marks, f"replace_{name}")(getattr(readers, name)))
    found["marks elsewhere"] = {str(is_told): marked(is_told) for is_told in (False, True)}
    if is_partial:
        found["cut"] = cut_off(tools, lambda original: original, "length")
        found["end elsewhere"] = cut_off(tools, tool_strings.replace_check_quoted, "stop", BARE)[1]
        long_calls.EACH = EACH
        found["long elsewhere"] = streamed(tools, long_calls.replace_process, "cut off", 2)
        found["responses, elsewhere"] = responded(long_calls.replace_responses, "cut off")
    found |= {"stock": all_ways(v4, "tool_calls"), "v3.2": all_ways(v32, "function_calls", few)}
    v32._parse_parameters_from_xml = replace(stock)
    found["elsewhere"] = all_ways(v4, "tool_calls", few)
    models_served.announce({"model_type": "deepseek_v4"}, {})
    models_served.announce_served_card({})
    found["marks of ours"] = {str(is_told): marked(is_told) for is_told in (False, True)}
    found["opened, ours"] = marked(False, OPENED)
    if is_partial:
        ways_to_end = ("length", "stop")
        found["long, stock"] = all_streamed(tools, lambda original: original)
        found |= {"long": all_streamed(tools, long_calls.replace_process), "prefixes": prefixes()}
        ours = long_calls.replace_responses
        found["responses, stock"] = {case: responded(lambda original: original, case) for case in ENDS}
        found["responses"] = {case: responded(ours, case, in_dicts=case == "whole") for case in ENDS}
        found["responses, new text alone"] = responded(ours, "cut off", is_incremental=True)
        found["responses, no tools"] = responded(ours, "cut off", tools=[])
        checks = (lambda original: original, tool_strings.replace_check_quoted)
        ends = ((BARE, "stop"), (CUT_OFF, "length"), (BARE.partition("</")[0], "length"))
        found["ends"] = [[cut_off(tools, check, reason, answer) for answer, reason in ends] for check in checks]
        found["cut, ours"] = [cut_off(tools, tool_strings.replace_check_unstreamed, reason) for reason in ways_to_end]
    found |= {"thoughts": {str(is_told): thoughts(is_told) for is_told in (False, True)}}
    return found | {"ours": all_ways(v4, "tool_calls"), "v3.2 beside ours": all_ways(v32, "function_calls", few)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
