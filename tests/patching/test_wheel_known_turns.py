"""Conversations made tokens: each release's own way to the prompt, with ours and without."""

import ctypes
import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.fixes import known_turns
from tests.patching.test_wheel_chat_requests import TOOL, Record, before_recipe, in_cache, serving, thinks_by_default
from tests.patching.wheels import every_release

__all__ = ["in_cache", "thinks_by_default"]
REPO = Path(__file__).resolve().parents[2]
MARKS = ("<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<think>", "</think>")
LONG, NUMBERS = "a word, " * 300, {}  # a part -> its token


pytestmark = pytest.mark.usefixtures("served_card", "thinks_by_default")


class Tokenizer:
    """Marks, and in what is between them words with the blank in front, and signs. It knows how many characters it was
    given. begins: with a token of its own; takes: blanks in front of a mark are a part of it."""

    def __init__(self, *, begins=False, takes=False):
        marks = "|".join(map(re.escape, MARKS))
        self.marks, self.parts = re.compile(f"{' *' * takes}({marks})"), re.compile(r" ?\w+|\s+(?!\S)|\s+|.", re.DOTALL)
        self.characters, self.first = 0, [0] * begins

    def encode(self, text, **more):
        self.characters += len(text)
        between = self.marks.split(text)
        parts = [[one] if i % 2 else self.parts.findall(one) for i, one in enumerate(between)]
        return [*self.first, *(NUMBERS.setdefault(part, len(NUMBERS) + 1) for of_one in parts for part in of_one)]


def request(*texts):
    """texts: the user's and the assistant's in turn; the last one is asked for."""
    roles = ("user", "assistant")
    messages = [Record(role=roles[i % 2], content=text, tools=None, tool_calls=None) for i, text in enumerate(texts)]
    given = {"reasoning_effort": None, "task": None, "continue_final_message": False, "stop": None}
    return Record(messages=messages, chat_template_kwargs={"thinking": True}, tools=[TOOL], tool_choice="auto", **given)


def asking(version, tokenizer, *, ours, **more):
    """request -> tokens"""
    chat = serving(version, ours=False, **more)
    chat.tokenizer_manager = manager = SimpleNamespace(tokenizer=tokenizer)
    method = type(chat)._apply_jinja_template
    type(chat)._apply_jinja_template = known_turns.replace_apply_template(method) if ours else method

    def ask(request):
        found = chat._apply_jinja_template(request, [TOOL.model_dump()], False).prompt_ids
        assert chat.tokenizer_manager is manager and manager.tokenizer is tokenizer
        return found

    return ask


TURNS = (
    *("Hello", " I am here.  ", "<｜User｜> is a mark, and so is </think>", "Yes.\n\n", "  \n<｜Assistant｜>", ""),
    *("Is <｜Assistan｜> one?", "No: <｜", "User｜>", "no", "Hello", "Hello"),
)


@before_recipe
def test_a_growing_conversation_has_its_tokens(version):
    """Whatever its texts spell; and of what was said before nothing is made tokens again."""
    ours = asking(version, Tokenizer(), ours=True)
    tokenizer = Tokenizer()
    stock = asking(version, tokenizer, ours=False)
    for end in range(1, len(TURNS), 2):
        assert ours(request(*TURNS[:end])) == stock(request(*TURNS[:end]))
    of_ours, of_stock, turns, tokenizers = [], [], [], (Tokenizer(), Tokenizer())
    asked = [asking(version, one, ours=of) for of, one in zip((True, False), tokenizers, strict=True)]
    for number in range(6):
        turns.append(f"{number} {LONG}")
        before = [one.characters for one in tokenizers]
        found = [ask(request(*turns)) for ask in asked]
        assert found[0] == found[1] and isinstance(found[0], list)
        new = [one.characters - was for one, was in zip(tokenizers, before, strict=True)]
        of_ours.append(new[0])
        of_stock.append(new[1])
        turns.append(f"{number} said {LONG}")
    assert max(of_ours[1:]) < 2.2 * len(LONG) and of_stock[-1] > 10 * len(LONG)


@before_recipe
def test_tokenizers_that_cannot_be_cut_are_asked_for_all(version):
    for kind in ({"begins": True}, {"takes": True}):
        ours, stock = (asking(version, Tokenizer(**kind), ours=of) for of in (True, False))
        for end in (1, 3, 5):
            asked = request(*(f"{text}   " for text in TURNS[:end]))
            assert ours(asked) == stock(asked), kind


@before_recipe
def test_other_models_and_cards_have_nothing_kept(version, monkeypatch):
    for spec, has_card in (("dsv32", True), ("dsv4", False)):
        monkeypatch.setattr(models_served, "has_served_card", lambda has_card=has_card: has_card)
        tokenizer = Tokenizer()
        chat = serving(version, ours=False, spec=spec)
        chat.tokenizer_manager = SimpleNamespace(tokenizer=tokenizer)

        def template(self, request, tools, is_multimodal, tokenizer=tokenizer):
            assert self.tokenizer_manager.tokenizer is tokenizer
            return "asked"

        assert known_turns.replace_apply_template(template)(chat, None, None, False) == "asked"
        assert vars(chat.tokenizer_manager) == {"tokenizer": tokenizer}


def test_what_is_asked_for_otherwise_is_the_tokenizers():
    calls = []
    tokenizer = SimpleNamespace(encode=lambda *args, **more: calls.append((args, more)) or [5], eos_token_id=7)
    known = known_turns.KnownTexts(tokenizer)
    assert known.encode("a", add_special_tokens=False) == known.encode(["a"]) == [5] and known.eos_token_id == 7
    assert calls == [(("a",), {"add_special_tokens": False}), ((["a"],), {})]


def test_what_was_used_last_is_kept(monkeypatch):
    pieces, made = known_turns.Pieces(), []

    def tokens(text):
        return list(pieces.tokens(text, lambda: made.append(text) or [1] * 100))

    size = pieces.size("a", known_turns.array("i", [1] * 100))
    monkeypatch.setattr(known_turns, "KEPT_BYTES", 2 * size)
    for text in ("a", "b", "a", "c", "a", "b"):
        assert tokens(text) == [1] * 100
    assert made == ["a", "b", "c", "b"] and pieces.bytes == 2 * size and list(pieces.known) == ["a", "b"]
    monkeypatch.setattr(known_turns, "KEPT_BYTES", size - 1)
    assert tokens("d") == [1] * 100 and pieces.bytes == 0 and pieces.known == {}


def test_a_text_that_grows_is_counted_as_it_was(monkeypatch):
    """Python keeps a text's UTF-8 beside it once a library has asked for it: those that are kept and those that are
    counted out may differ by that. Where more is counted in than out there is nothing left to give up in the end."""
    pieces, utf8 = known_turns.Pieces(), ctypes.pythonapi.PyUnicode_AsUTF8AndSize
    utf8.argtypes, utf8.restype = (ctypes.py_object, ctypes.c_void_p), ctypes.c_void_p
    monkeypatch.setattr(known_turns, "KEPT_BYTES", 4000)
    for number in range(40):
        for _ in range(2):
            text = "日本" * 100 + str(number)
            assert list(pieces.tokens(text, lambda text=text: [utf8(text, None) is None])) == [False]
        assert 0 < pieces.bytes <= 4000 and len(pieces.known) > min(2, number)


@functools.cache
def read(version: str) -> dict:
    command = [sys.executable, "-m", "tests.patching.known_turns_read", version]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@every_release("0.5.23")
def test_recipes_tokens_are_its_own(version):
    """With marks in words, with blanks around marks, in threads and with little room; words of a call are no call."""
    found = read(version)
    for case in ("plain", "plain, once more", "marks", "marks that take blanks", "unknown marks", "elsewhere"):
        assert found[case]["differ"] == [] and found[case]["asked"] > 8, case
    assert found["spelt"] == [True] * 4 and found["at once"] == 0
    assert found["V4.1"] == "DeepseekV41Encoding"


@every_release("0.5.23")
def test_recipe_is_asked_for_what_we_do_not_know(version):
    asked = {case: one["recipe's"] / one["asked"] for case, one in read(version).items() if type(one) is dict}
    assert asked.pop("elsewhere") == asked.pop("unknown marks") == 1
    assert set(asked.values()) == {0} and len(asked) == 4


@every_release("0.5.23")
def test_what_was_said_before_is_not_made_tokens_again(version):
    """Each request is longer than the one before by a turn of 6,000 characters."""
    found = read(version)
    assert len(found["characters"]) > 5 and max(found["characters"][1:]) < 6_600
    size, summed = found["kept"]
    assert 0 < size == summed <= 20_000
