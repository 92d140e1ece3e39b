"""Gate 7: tool calls and reasoning through the parsers (--tool-call-parser deepseekv4 --reasoning-parser deepseek-v4).

Each case is asked streamed and not. Markup of any kind, control tokens, reasoning and foreign script must not stand in
`content`; a sum must be right; arguments must be JSON with the fields asked for and no others; each call has an id of
its own; `finish_reason` is tool_calls where there are calls and stop where there are none; both ways must give the same
calls, content and reasoning. A server that gives another answer when it is asked the same again, not streamed, is no
fault of the stream: then the two ways cannot be compared, and the gate is incomplete. So it is where a server says that
it was started without a parser.
"""

from __future__ import annotations

import argparse
import json
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field

from bench.quality import greedy, whole
from bench.quality.verdict import Verdict, at_least, endpoint_of
from bench.serving.endpoint import Endpoint, ServerRefused

NAME = "tool-calls"
PARSERS = {"tool_call_parser": "deepseekv4", "reasoning_parser": "deepseek-v4"}  # SGLang's arguments, without a default
# what templates of this model and of others put around calls, thoughts and turns, with the pipes of either width
TAGS = "think|thinking|invoke|parameters?|tool_calls?|function_calls?|functions?|tool_response|tool_outputs?_begin"
LEAK = re.compile(
    rf"[｜|]\s*/?DSML|DSML\s*[｜|]|<\s*/?\s*[｜|]|[｜|]>|</?\s*(?:\w+:)?(?:{TAGS})\b|\[/?TOOL_CALLS?\]", re.IGNORECASE
)
ALPHABETS = {"LATIN", "DIGIT", "GREEK"}  # the first words of the names of letters of English text and formulas
NOTE = re.compile(r'(?:a )?"quoted" <tag> & more\.?')
FOUR = re.compile(r"\b(?:4|four)\b", re.IGNORECASE)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city. A remark, if there is one, goes into note word for word.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "note": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@dataclass(frozen=True)
class Case:
    """What is asked, and the cities of the calls that must come; None: no tool is offered."""

    name: str
    question: str
    cities: tuple[str, ...] | None
    thinking: bool = False
    fields: tuple[str, ...] = field(default=("city",))
    sum: re.Pattern | None = None  # what must stand in the content


CASES = (
    Case("one call", "What is the weather in Rome? Use the tool.", ("Rome",)),
    Case("two calls", "What is the weather in Paris and in Rome? Call the tool once for each.", ("Paris", "Rome")),
    Case(
        "awkward characters",
        'Weather in Paris, please, and pass on this note word for word: a "quoted" <tag> & more. Use the tool.',
        ("Paris",),
        fields=("city", "note"),
    ),
    Case("a call after thinking", "What is the weather in Oslo? Use the tool.", ("Oslo",), thinking=True),
    Case("tools offered, none needed", "How much is two and two? Answer in one sentence.", (), sum=FOUR),
    Case("no tools", "How much is two and two? Answer in one sentence.", None, sum=FOUR),
    Case("thinking, no tools", "How much is two and two? Answer in one sentence.", None, thinking=True, sum=FOUR),
)


def body_of(case: Case, model: str) -> dict:
    found: dict = {"model": model, "messages": [{"role": "user", "content": case.question}], "max_tokens": 1024}
    if case.cities is not None:
        found["tools"] = [WEATHER]
    found["chat_template_kwargs"] = {"thinking": case.thinking}
    return found


def calls_of(message: dict) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


def text_faults(name: str, text: str) -> Iterator[str]:
    """What is wrong with one English text, `name` of the message."""
    if leak := LEAK.search(text):
        yield f"markup in {name}: {text[max(0, leak.start() - 20) : leak.start() + 40]!r}"
    foreign = [c for c in text if c.isalpha() and unicodedata.name(c, "UNKNOWN").split()[0] not in ALPHABETS]
    if foreign:
        place = text.index(foreign[0])
        yield f"foreign script in {name}: {text[max(0, place - 20) : place + 20]!r}"
    bad = [c for c in text if c == "\ufffd" or (unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t\r")]
    if bad:
        yield f"characters that are none in {name}: the first {bad[0]!r}"


def call_faults(case: Case, message: dict) -> Iterator[str]:
    """What is wrong with the calls of one answer."""
    calls, cities, wrong = calls_of(message), [], False
    for name, arguments in calls:
        values, said = parsed(arguments), []
        own = WEATHER["function"]["parameters"]["properties"]
        others = sorted(values.keys() - own.keys()) if isinstance(values, dict) else []
        missing = [key for key in case.fields if not isinstance(values, dict) or key not in values]
        if not isinstance(values, dict):
            said.append(f"the arguments are no JSON object: {arguments[:60]!r}")
        elif missing:
            said.append(f"the arguments lack {', '.join(missing)}: {arguments[:60]!r}")
        elif others:
            said.append(f"arguments that the tool does not have, {', '.join(others)}: {arguments[:60]!r}")
        else:
            cities.append(str(values["city"]).split(",")[0])
            if "note" in case.fields and not NOTE.fullmatch(str(values["note"]).strip()):
                said.append(f"the note has changed: {values['note']!r}")
        if name != WEATHER["function"]["name"]:
            said.append(f"a call of {name!r}, which was not offered")
        said += text_faults("the arguments", arguments)
        wrong = wrong or bool(said)
        yield from said
    ids = [call["id"] for call in message["tool_calls"]]
    if not all(ids) or len(set(ids)) < len(ids):
        yield f"the ids of the calls are missing or the same: {ids}"
    expected = sorted(case.cities or ())
    if len(calls) != len(expected) or (sorted(cities) != expected and not wrong):
        yield f"expected calls for {list(case.cities or ())}, got {calls}"


def faults_of(case: Case, message: dict) -> list[str]:
    """What is wrong with one answer."""
    content, reasoning = message["content"], message["reasoning_content"]
    found = [*text_faults("content", content), *text_faults("reasoning_content", reasoning)]
    if case.thinking and not reasoning.strip():
        found.append("no reasoning_content though thinking was asked for")
    if not case.thinking and reasoning.strip():
        found.append("reasoning_content though no thinking was asked for")
    if not case.cities and not content.strip():
        found.append("content is empty")
    elif case.sum and not case.sum.search(content):
        found.append(f"the sum is wrong or not told: {content[:60]!r}")
    found += call_faults(case, message)
    expected = "tool_calls" if case.cities else "stop"
    if message["finish_reason"] != expected:
        found.append(f"finish_reason is {message['finish_reason']!r}, expected {expected!r}")
    return found


def said(message: dict) -> dict:
    """What both ways must have in common. White space at the ends is free (parsers cut it where calls follow), ids are
    new for every answer, and arguments are compared as values.
    """
    calls = [(name, parsed(arguments, arguments)) for name, arguments in calls_of(message)]
    return {
        "calls": calls,
        "content": message["content"].strip(),
        "reasoning_content": message["reasoning_content"].strip(),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="the served model's name; default: the first that the server lists")
    parser.add_argument("--repeats", type=int, default=1)


def asked(endpoint: Endpoint, body: dict, streamed: bool, where: str) -> dict:
    """One answer, without prefixes that others left. NotWhole: the server aborted it."""
    greedy.forget(endpoint)
    message = endpoint.chat_stream(body) if streamed else endpoint.chat(body)
    if message["finish_reason"] == "abort":
        raise whole.NotWhole(f"{where}: the server aborted the request")
    return message


def differences(endpoint: Endpoint, case: Case, body: dict, first: dict, second: dict) -> tuple[list[str], str]:
    """(in what the streamed answer, `second`, differs; why that cannot be said)."""
    one, other = said(first), said(second)
    parts = [name for name in one if one[name] != other[name]]
    if not parts:
        return [], ""
    again = said(asked(endpoint, body, False, case.name))
    if any(again[name] != one[name] for name in parts):
        return [], f"{case.name}: asked again, not streamed, the server gives another answer: the stream is not judged"
    differ = f"{case.name}: streamed and not streamed differ in"
    return [f"{differ} {name}: {other[name]!r} and {one[name]!r}" for name in parts], ""


def without_parsers(endpoint: Endpoint) -> str:
    """Why a server cannot have calls or reasoning to judge, by what it says of its own flags; "" if it says nothing."""
    try:
        info = endpoint.server_info()
    except ServerRefused as error:
        if error.status != 404:
            raise
        return ""
    lacks = [name for name in PARSERS if name in info and info[name] is None]
    flags = " and ".join(f"--{name.replace('_', '-')} {PARSERS[name]}" for name in lacks)
    return f"{endpoint.url} was started without {flags}: what the model says is not parsed" if lacks else ""


def run(options: argparse.Namespace) -> Verdict:
    at_least(NAME, 1, repeats=options.repeats)
    endpoint = endpoint_of(options)
    if options.model:
        endpoint.check_model(options.model)
    model = options.model or endpoint.models()[0]
    if lacks := without_parsers(endpoint):
        return Verdict(NAME, None, "", incomplete=lacks)
    findings, answers, incomplete = [], 0, ""
    for case in CASES * options.repeats:
        body = body_of(case, model)
        messages = {way: asked(endpoint, body, way == "streamed", case.name) for way in ("not streamed", "streamed")}
        answers += len(messages)
        for way, message in messages.items():
            findings += [f"{case.name}, {way}: {fault}" for fault in faults_of(case, message)]
        differ, why = differences(endpoint, case, body, *messages.values())
        findings += differ
        incomplete = incomplete or why
    summary = f"{len(findings)} faults in {answers} answers of {len(CASES)} cases, streamed and not"
    figures = {"faults": len(findings), "answers": answers}
    return Verdict(NAME, not findings, summary, findings, figures, incomplete="" if findings else incomplete)


def parsed(arguments: str, otherwise: object = None) -> object:
    """The JSON value of a call's arguments: the order of fields and spaces is free."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return otherwise
