"""Gate 7: tool calls and reasoning through the parsers (--tool-call-parser deepseekv4 --reasoning-parser deepseek-v4).

Each case is asked streamed and not. DSML markup, control tokens and reasoning must not stand in `content`; arguments
must be JSON with the fields asked for; both ways must give the same calls.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass, field

from bench.quality.verdict import Verdict
from bench.serving.endpoint import Endpoint

NAME = "tool-calls"
LEAK = re.compile(r"｜DSML｜|<｜|｜>|</?think>|</?(?:invoke|parameter|tool_calls)\b")
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
    Case("tools offered, none needed", "How much is two and two? Answer in one sentence.", ()),
    Case("no tools", "How much is two and two? Answer in one sentence.", None),
    Case("thinking, no tools", "How much is two and two? Answer in one sentence.", None, thinking=True),
)


def body_of(case: Case, model: str) -> dict:
    found: dict = {"model": model, "messages": [{"role": "user", "content": case.question}], "max_tokens": 1024}
    if case.cities is not None:
        found["tools"] = [WEATHER]
    found["chat_template_kwargs"] = {"thinking": case.thinking}
    return found


def calls_of(message: dict) -> list[tuple[str, str]]:
    return [
        (c["function"].get("name") or "", c["function"].get("arguments") or "") for c in message.get("tool_calls") or []
    ]


def faults_of(case: Case, message: dict) -> list[str]:
    """What is wrong with one answer."""
    found, content = [], message.get("content") or ""
    if leak := LEAK.search(content):
        place = leak.start()
        found.append(f"markup in content: {content[max(0, place - 20) : place + 40]!r}")
    if leak := LEAK.search(message.get("reasoning_content") or ""):
        found.append(f"markup in reasoning_content: {leak.group(0)!r}")
    if case.thinking and not message.get("reasoning_content"):
        found.append("no reasoning_content though thinking was asked for")
    if not case.thinking and message.get("reasoning_content"):
        found.append("reasoning_content though no thinking was asked for")
    if not case.cities and not content.strip():
        found.append("content is empty")
    calls = calls_of(message)
    cities = []
    for name, arguments in calls:
        try:
            values = json.loads(arguments)
        except ValueError:
            found.append(f"the arguments are no JSON: {arguments[:60]!r}")
            continue
        if name != WEATHER["function"]["name"]:
            found.append(f"a call of {name!r}, which was not offered")
        missing = [key for key in case.fields if not isinstance(values, dict) or key not in values]
        if missing:
            found.append(f"the arguments lack {', '.join(missing)}: {arguments[:60]!r}")
        elif isinstance(values, dict):
            cities.append(str(values["city"]).split(",")[0])
            if case.fields == ("city", "note") and '"quoted" <tag> & more' not in values["note"]:
                found.append(f"the note has changed: {values['note']!r}")
    expected = sorted(case.cities or ())
    if len(calls) != len(expected) or (sorted(cities) != expected and not found):
        found.append(f"expected calls for {list(case.cities or ())}, got {calls}")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="the served model's name; default: the first that the server lists")
    parser.add_argument("--repeats", type=int, default=1)


def run(options: argparse.Namespace) -> Verdict:
    endpoint = Endpoint(options.url, options.timeout)
    if options.model:
        endpoint.check_model(options.model)
    model = options.model or endpoint.models()[0]
    findings, answers = [], 0
    for case in CASES * options.repeats:
        body = body_of(case, model)
        whole, streamed = endpoint.chat(body), endpoint.chat_stream(body)
        answers += 2
        for way, message in (("not streamed", whole), ("streamed", streamed)):
            findings += [f"{case.name}, {way}: {fault}" for fault in faults_of(case, message)]
        pairs = [[(name, json_or_text(arguments)) for name, arguments in calls_of(m)] for m in (whole, streamed)]
        if pairs[0] != pairs[1]:
            findings.append(f"{case.name}: streamed and not streamed differ: {pairs[1]} and {pairs[0]}")
    summary = f"{len(findings)} faults in {answers} answers of {len(CASES)} cases, streamed and not"
    return Verdict(NAME, not findings, summary, findings, {"faults": len(findings), "answers": answers})


def json_or_text(arguments: str) -> object:
    """Arguments compared as values: the order of fields and spaces is free."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
