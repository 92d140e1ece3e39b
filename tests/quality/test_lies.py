"""A server that lies passes no gate: every lie of lying_server.py against every gate that it concerns."""

from __future__ import annotations

import ast
import zipfile

import pytest

from bench.quality import gates
from tests.quality import lying_server, quiet_lies, state_lies
from tests.quality.test_gates import PACE, reference, run  # noqa: F401
from tests.serving.conftest import wheel

LIES = [*lying_server.LIES, *state_lies.LIES, *quiet_lies.LIES]
ROWS = [(lie, gate, verdict) for lie in LIES for gate, verdict in lie.gates.items()]
# a lie is as loud to fewer: the numbers of the gates' own tests, made smaller (what stands last counts)
FEWER = {
    "speculation-equality": ("--num-prompts", "8", "--concurrency", "1", "8"),
    "batch-invariance": ("--others", "7"),
    "corruption-soak": ("--hours", "0.00003"),
    "cancelled-requests": ("--requests", "8", "--settle", "0.6"),
}
CODES = {"FAIL": gates.FAILED, "INCOMPLETE": gates.INCOMPLETE}


def liar(serve, gate, lie, **settings):
    """The server under test; `settings` come before those of the lie."""
    pace = PACE if gate in (*lying_server.EQUALITY, state_lies.CANCELLED) else {}
    accept_length = 2 if gate == "speculation-equality" else 1
    return serve(*lie.faults, lie=lie.say, **{**pace, "accept_length": accept_length, **settings, **lie.server})


@pytest.mark.parametrize(("lie", "gate", "verdict"), ROWS, ids=[f"{lie.name}-{gate}" for lie, gate, _ in ROWS])
def test_a_liar_is_not_passed(lie, gate, verdict, run, serve):  # noqa: F811
    other = reference(gate, serve)
    if other and (lie.both or lie.only_other):
        other = [other[0], serve(lie=lie.say).url]
    honest = lying_server.Lie("none", {})
    server = liar(serve, gate, honest if lie.only_other else lie)
    code, found = run(gate, server, *other, *FEWER.get(gate, ()), *lie.arguments)
    assert (code, found["verdict"]) == (CODES[verdict], verdict), found
    assert lie.words in str([found["incomplete"], found["summary"], found["findings"]]), found


def test_every_gate_has_a_lie_of_its_own_and_hears_those_that_are_told_to_all():
    own = {gate for lie in LIES if lie not in lying_server.TO_ALL for gate in lie.gates}
    assert own == set(gates.GATES), "a gate without a lie is not known to see anything: add a row to lying_server.py"
    for lie in lying_server.TO_ALL:
        assert set(lie.gates) == set(gates.GATES), lie.name


def test_no_lie_is_expected_to_pass():
    assert {verdict for _, _, verdict in ROWS} == {"FAIL", "INCOMPLETE"}
    assert len({lie.name for lie in LIES}) == len(LIES)


def fields(tree: ast.Module, name: str) -> set[str]:
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {node.target.id for node in found.body if isinstance(node, ast.AnnAssign)}


@pytest.mark.parametrize("version", ["0.5.14", "0.5.17", "0.5.23"])
def test_the_honest_server_has_the_real_ones_names(version, serve):
    """Every field that the fake server gives in a chat and in meta_info is one of the release's own."""
    with zipfile.ZipFile(wheel(version)) as archive:
        read = {name: archive.read(f"sglang/srt/{name}").decode() for name in (
            "entrypoints/openai/protocol.py", "managers/tokenizer_manager.py", "managers/schedule_batch.py",
        )}  # fmt: skip
    protocol = ast.parse(read["entrypoints/openai/protocol.py"])
    seen = []
    server = serve(lie=lambda handler, content: seen.append((handler.path, content)) or content)
    from bench.serving.endpoint import Endpoint

    endpoint = Endpoint(server.url, 5)
    body = {"messages": [{"role": "user", "content": "Rome?"}]}
    body["tools"] = [{"type": "function", "function": {"name": "get_weather"}}]
    endpoint.chat(body)
    endpoint.chat_stream(body)
    endpoint.generate([1, 2], 3, top=2, ignore_eos=True)
    whole, *events = [content for path, content in seen if path == lying_server.CHAT]
    assert set(whole) <= fields(protocol, "ChatCompletionResponse")
    choice = whole["choices"][0]
    assert set(choice) <= fields(protocol, "ChatCompletionResponseChoice")
    assert set(choice["message"]) <= fields(protocol, "ChatMessage")
    assert set(choice["message"]["tool_calls"][0]) <= fields(protocol, "ToolCall")
    for event in events:
        assert set(event) <= fields(protocol, "ChatCompletionStreamResponse")
        assert set(event["choices"][0]) <= fields(protocol, "ChatCompletionResponseStreamChoice")
        assert set(event["choices"][0]["delta"]) <= fields(protocol, "DeltaMessage")
    answer = next(content for path, content in seen if path == lying_server.GENERATE)
    for name in (*answer, *answer["meta_info"]):
        assert f'"{name}"' in read["managers/tokenizer_manager.py"], name
    for name in ("abort", "length", "stop", "matched", "message"):
        assert f'"{name}"' in read["managers/schedule_batch.py"], name
