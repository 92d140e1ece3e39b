"""What is kept of responses: each release's own statements that store and find them, with ours and without."""

import ast
import asyncio
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches.fixes import stored_responses as fix
from deepseek_v4_sm120.sglang_patches.rows.http_server import RESPONSES
from tests.patching.test_wheel_wo_a import definition, take
from tests.patching.wheels import every_release, fetch, since

MODULE, _, CLASS = RESPONSES.partition(":")
STORES = {"request.store", "persist", "self.enable_response_store and request.store"}

pytestmark = pytest.mark.usefixtures("served_card")


class Response(SimpleNamespace):
    __pydantic_fields_set__ = frozenset()

    def model_dump(self, **_):
        return vars(self)


def storing(version, what, but="nothing"):
    """The statements that store, as coroutines of what they name."""
    whole = definition(fetch(version), CLASS, MODULE)
    named = [n for n in ast.walk(whole) if isinstance(n, ast.If) and ast.unparse(n.test) in STORES]
    for statement in named:
        text = ast.unparse(statement)
        if f"self.{what}[" in text and f"self.{but}[" not in text:
            wanted = ast.parse("async def store(self, request, messages, response, final_response, persist=True): pass")
            wanted.body[0].body, names = [statement], {}
            exec(compile(ast.fix_missing_locations(wanted), "wheel", "exec"), names)
            yield names["store"]


def serving(version, *, ours=True, spec="dsv4"):
    """The release's own two dicts, and what asks them."""
    wheel = fetch(version)
    made = type(CLASS, (), {"_make_not_found_error": lambda self, name: None})
    for name in ("retrieve_responses", "_response_input_history", "_construct_input_messages"):
        if definition(wheel, f"{CLASS}.{name}", MODULE) is not None:
            setattr(made, name, take(wheel, {}, f"{CLASS}.{name}", MODULE))
    (begun,) = [
        ast.unparse(n.targets[0] if isinstance(n, ast.Assign) else n.target) + " = {}"
        for n in ast.walk(definition(wheel, f"{CLASS}.__init__", MODULE))
        if isinstance(n, ast.AnnAssign) and ast.unparse(n).startswith("self.msg_store") and ast.unparse(n.value) == "{}"
    ]

    def __init__(self, tokenizer_manager, template_manager, *, tool_server=None):
        assert (tokenizer_manager, template_manager, tool_server) == ("tokens", "templates", "tools")
        self.response_store, self.response_store_lock = {}, asyncio.Lock()
        exec(begun, {"self": self})
        self.chat_encoding_spec, self.use_harmony, self.enable_response_store = spec, False, True

    made.__init__ = fix.replace_init(__init__) if ours else __init__
    return made("tokens", "templates", tool_server="tools")


def asks(name, before=None):
    said = [{"role": "user", "content": f"{name} x"}]
    return SimpleNamespace(request_id=name, store=True, previous_response_id=before, input=said)


async def answers(version, one, number):
    behind = list(storing(version, "response_store"))  # answers as a whole and, from 0.5.14 on, streams
    (before,) = storing(version, "msg_store", but="response_store")
    assert len(behind) == (2 if since(version, "0.5.14") else 1)
    for index in range(number):
        request = asks(f"resp_{index}")
        response = Response(id=request.request_id, status="completed", output=[])
        await before(one, request, request.input, None, None)
        await behind[index % len(behind)](one, request, request.input, response, response)


@every_release()
def test_the_last_ones_are_found_and_the_others_forgotten(version, monkeypatch):
    monkeypatch.setattr(fix, "KEPT", 8)

    async def kept(**given):
        one = serving(version, **given)
        await answers(version, one, 20)
        found = [index for index in range(20) if await one.retrieve_responses(f"resp_{index}") is not None]
        for index in found:
            assert one.msg_store[f"resp_{index}"][0]["content"].startswith(f"resp_{index} ")
        return found, len(one.msg_store), len(one.response_store)

    assert asyncio.run(kept()) == (list(range(12, 20)), 8, 8)
    for others in ({"ours": False}, {"spec": "dsv41"}):
        assert asyncio.run(kept(**others)) == (list(range(20)), 20, 20), "as SGLang has it"


@every_release()
def test_an_answer_that_others_overtake_is_told(version, monkeypatch):
    """What it goes on from, and its own beginning, are forgotten until it is over."""
    monkeypatch.setattr(fix, "KEPT", 4)

    async def kept(behind):
        one, request = serving(version), asks("resp_long", "resp_0")
        (before,) = storing(version, "msg_store", but="response_store")
        await answers(version, one, 1)
        await before(one, request, request.input, None, None)
        for name in "abcdef":
            await before(one, asks(f"resp_{name}"), [], None, None)
        assert not {"resp_0", "resp_long"}.intersection(one.msg_store)
        response = Response(id="resp_long", status="completed", output=[])
        await behind(one, request, request.input, response, response)
        found = await one.retrieve_responses("resp_long")
        return found is response and [said["content"] for said in one.msg_store["resp_long"]]

    for behind in storing(version, "response_store"):
        assert asyncio.run(kept(behind)) == (since(version, "0.5.20") and ["resp_0 x", "resp_long x"])


@every_release()
def test_they_are_kept_and_asked_as_is_taken_for_granted(version):
    """Nothing of SGLang's forgets one, or asks a dict for more than ours answers."""
    whole = definition(fetch(version), CLASS, MODULE)
    for name in ("msg_store", "response_store"):
        at = [n for n in ast.walk(whole) if isinstance(n, ast.Attribute) and n.attr == name]
        parents = {id(child): n for n in ast.walk(whole) for child in ast.iter_child_nodes(n)}
        uses = {ast.unparse(parents[id(n)]).partition("(")[0].partition("[")[0] for n in at}
        assert uses <= {f"self.{name}", f"self.{name}.get", f"self.{name}: dict"}
        assert not any(isinstance(parents[id(parents[id(n)])], ast.Delete) for n in at)


def kept_of(*names, text="", status="completed"):
    kept = fix.Kept()
    for name in names:
        kept.messages[name] = [text]
        kept.responses[name] = Response(status=status)
    return kept


def test_what_was_used_last_stays(monkeypatch):
    monkeypatch.setattr(fix, "KEPT", 3)
    for use in (lambda k: k.messages["a"], lambda k: k.messages.get("a"), lambda k: k.responses.get("a")):
        kept = kept_of("a", "b", "c")
        use(kept)
        kept.messages["d"] = []
        assert set(kept.messages) == {"a", "c", "d"} and set(kept.responses) == {"a", "c"}
    assert kept.responses.get("b", "nothing") == "nothing"
    with pytest.raises(KeyError):
        kept.messages["b"]


def test_texts_have_a_bound_whoever_is_replaced(monkeypatch):
    monkeypatch.setattr(fix, "KEPT_LENGTH", 10_000)
    kept = kept_of(*"abcdefgh", text="x" * 2000)
    assert list(kept.messages) == list(kept.responses) == list("efgh")
    for _ in range(50):
        kept.messages["h"] = ["x" * 1900]
    assert list(kept.messages) == list("efgh") and kept.length == sum(kept.lengths.values()) < 10_000
    kept.messages["large"] = ["x" * 20_000]
    assert list(kept.messages) == ["large"] and not kept.responses, "the newest one always stays"
    kept.messages["i"] = []
    assert list(kept.messages) == ["i"] and 0 < kept.length < 100


@pytest.mark.parametrize("status", ["queued", "in_progress"])
def test_what_runs_in_the_background_stays(monkeypatch, status):
    monkeypatch.setattr(fix, "KEPT", 2)
    kept = kept_of("runs", status=status)
    for name in "abcd":
        kept.messages[name] = []
    assert list(kept.messages) == ["runs", "d"] and kept.responses.seen("runs").status == status
    kept.responses.seen("runs").status = "completed"
    kept.messages["e"] = []
    assert list(kept.messages) == ["d", "e"] and not kept.responses


def test_one_whose_messages_are_forgotten_is_not_kept(monkeypatch):
    monkeypatch.setattr(fix, "KEPT", 1)
    kept = kept_of("a", "b")
    kept.responses["a"] = Response(status="completed")
    assert list(kept.responses) == list(kept.messages) == ["b"]


def test_length_is_that_of_all_texts():
    within = {"role": "user", "content": [{"text": "x" * 70}, ("y" * 20, 5, None)]}
    assert fix.length(within) == 94 + 4 * fix.WORD
    assert fix.length(Response(output=[Response(text="x" * 500)])) > 500
    assert fix.length(SimpleNamespace(text="x" * 500)) == fix.WORD
