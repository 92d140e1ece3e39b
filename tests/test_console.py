"""What the commands print: nothing that a terminal obeys, no secret, in every encoding."""

import io
import sys

import pytest

from deepseek_v4_sm120.commands import console
from deepseek_v4_sm120.commands.doctor.command import show
from deepseek_v4_sm120.commands.doctor.finding import warn

EVIL = "a\x1b[2J\x1b]0;x\x07\x9b1m\u202e\ud800 \U0001f600 --api-key CaNaRy"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8", "latin-1"])
@pytest.mark.parametrize(
    "tell",
    [
        lambda: console.say(EVIL),
        lambda: console.print_json({"x": EVIL, "api_key": "CaNaRy"}),
        lambda: console.print_table(EVIL, ("a", "b"), [[EVIL, f"line\nline {EVIL}"]]),
        lambda: show([warn(EVIL, f"line\nline {EVIL}", EVIL, EVIL)]),
        lambda: console.Progress(1).step(EVIL),
        lambda: console.Progress(1).note(EVIL),
    ],
    ids=["say", "json", "table", "findings", "step", "note"],
)
@pytest.mark.parametrize("is_terminal", [False, True])
def test_nothing_that_a_terminal_obeys(tell, encoding, is_terminal, monkeypatch):
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding=encoding, write_through=True)
    stream.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(console, "is_rich", lambda: False)  # with it, colours of its own are there
    tell()
    text = written.getvalue().decode(encoding)
    assert "a\\" in text and "CaNaRy" not in text
    allowed = "\n\r" if is_terminal else "\n"
    assert [c for c in text if not c.isprintable() and c not in allowed] == []


def test_a_strangers_words_take_one_line():
    assert console.one_line("a\n b\t c ") == "a b c" and len(console.one_line("x" * 1000)) == 200
