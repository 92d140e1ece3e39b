"""What marks corruption in a text, one lie a row, and what must not."""

from __future__ import annotations

import random

import pytest

from bench.quality.corruption_marks import marks
from bench.serving.prompts import prose

TEXT = prose(300, 9)
WORDS = TEXT.split()
SENTENCE = "The old engineer described a copper kettle near the river so that all of the children could see it daily."


def every(step: int, *inserts: str) -> str:
    """English text with one of `inserts` behind every `step`-th word."""
    return " ".join(f"{w} {inserts[i // step % len(inserts)]}" if i % step == 5 else w for i, w in enumerate(WORDS))


def scrambled(pieces: str, count: int = 90) -> str:
    source = random.Random(1)
    return " ".join(source.choice(pieces.split()) for _ in range(count))


def first_of(text: str, words: int) -> str:
    return " ".join(text.split()[:words])


LIES = {
    "foreign words": ("The answer is 的时候 of the day.", "foreign script"),
    "a foreign word": ("Он пошёл home.", "foreign script"),
    "12 foreign characters in 300 words": (every(80, "的时候"), "foreign script (12 of"),
    "single foreign characters": (every(70, "的"), "foreign script"),
    "a foreign letter in a word": (TEXT.replace("baker", "bak\u0435r", 1), "foreign script (1 of"),
    "East Asian punctuation": (TEXT.replace(", ", "，", 1), "foreign script (1 of"),
    "a Greek word": (f"{TEXT} και όχι", "foreign script"),
    "Thai": (f"{TEXT} สวัสดี", "foreign script"),
    "mojibake": (f"{TEXT} It\u00e2\u20ac\u2122s there.", "mojibake"),
    "two words in a loop": ("the same the same the same the same the same the same", "repetition"),
    "one word": ("no no no no no no no", "repetition"),
    "one letter": ("a" * 40, "repetition"),
    "exclamation marks": ("!" * 200, "repetition: '!'"),
    "exclamation marks behind text": (f"{TEXT} !!!!!!!!!", "repetition: '!'"),
    "dots and hyphens": (f"{TEXT} {'.-' * 80}", "flood"),
    "dots and hyphens alone": (".-" * 30, "flood"),
    "dots within a line": (f"{first_of(TEXT, 30)} ..........----------.......... {TEXT}", "flood"),
    "hyphens without an end": ("-" * 500, "flood"),
    "rule under rule": (f"{TEXT}\n" + ("-" * 60 + "\n") * 6, "rule under rule"),
    "one emoji": (f"{TEXT} {'🙂' * 20}", "repetition"),
    "one emoji with spaces": (f"{TEXT} {'🙂 ' * 20}", "repetition"),
    "emoji": (f"{TEXT} {'🙂🎉🚀' * 10}", "flood"),
    "emoji in every sentence": (every(6, "🙂", "🎉", "🚀"), "flood"),
    **{
        f"{size} words in a loop": (f"{TEXT} {(' '.join(WORDS[5 : 5 + size]) + ' ') * 3}", "repetition")
        for size in range(9, 31)
    },
    "a sentence that comes back": (
        " ".join(f"{s}. {SENTENCE}" for s in TEXT.split(". ")[:6]),
        "the same sentence",
    ),
    "every word doubled": (" ".join(f"{w} {w}" for w in WORDS), "words doubled"),
    "30 words doubled": (" ".join(WORDS[:99] + [w for x in WORDS[99:130] for w in (x, x)]), "doubled"),
    "every pair doubled": (" ".join(" ".join(WORDS[i : i + 2] * 2) for i in range(0, 100, 2)), "every 2 words again"),
    "pieces of words": (scrambled("prei tion aling ced stru wor ely ible mpt rast cle vor gle oom"), "no English"),
    "pieces between words": (every(8, "tion", "ingly", "ment", "wh", "ough"), "pieces of words"),
    "words without sentences": (scrambled("kettle river bridge letter clock map lantern orchard"), "no English"),
    "German": (
        "Der alte Ingenieur hat die Brücke nicht repariert, weil niemand ihn gefragt hat. Er ist dann mit dem Kessel "
        "nach Hause gegangen und hat dort auf seine Freunde gewartet, die aber erst am nächsten Tag gekommen sind.",
        "German, not English",
    ),
    "a German sentence": (f"{TEXT} Der Bäcker hat die Brücke repariert, weil niemand ihn gefragt hat.", "German words"),
    "German words": (every(9, "und", "nicht", "auch", "wurde", "sich"), "German words"),
    "German nouns": (every(60, "schöne", "größere", "Mühle", "übrige", "gehörte"), "foreign words"),
    "a French sentence": (
        f"{TEXT} L'ingénieur a réparé le pont parce que personne ne l'avait demandé.",
        "French words",
    ),
    "French words": (every(9, "dans", "les", "une", "avec", "mais"), "French words"),
    "a Spanish sentence": (f"{TEXT} El panadero no estaba porque también tenía que ir hasta la casa.", "Spanish"),
    "a broken character": ("broken \ufffd text", "characters that are none"),
    "a bell": ("a bell \x07 here", "characters that are none"),
    "a terminal's colour": (f"{TEXT} \x1b[31mred\x1b[0m", "characters that are none"),
    "what is left of it": (f"{TEXT} [31mred[0m", "a terminal escape"),
    "a line that is overwritten": (f"{TEXT}\rover it", "carriage return"),
    "text turned around": (f"{TEXT} \u202eabc", "characters that are none"),
    "an invisible character": (f"{TEXT} a\u200bb", "characters that are none"),
    "a private character": (f"{TEXT} \ue000", "characters that are none"),
    "pieces of the tokenizer": (f"{TEXT} ▁the Ġword", "tokenizer's own mark"),
    "a control token": ("text <｜User｜> text", "control token"),
    "the end of reasoning": ("thought</think>text", "control token"),
    "an ASCII control token": (f"{TEXT} <|im_end|>", "control token"),
    "DSML with ASCII pipes": (f'{TEXT} <|DSML|invoke name="get">', "control token"),
    "DSML with ASCII pipes, cut": (f"{TEXT} <|DSML|", "control token"),
    "half a control token": (f"{TEXT} <｜DS", "control token"),
    "markup that is cut": ('<｜DSML｜invoke name="x"', "not closed"),
    "markup that crosses": ('<｜DSML｜tool_calls><｜DSML｜invoke name="x"></｜DSML｜tool_calls>', "closes nothing"),
    "markup that stays open": ("<｜DSML｜tool_calls>", "never closed"),
    "markup that nobody asked for": ("<｜DSML｜tool_calls></｜DSML｜tool_calls>", "though no tool was offered"),
    "<invoke cut off": (f"{TEXT} <invoke", "though no tool was offered"),
    "<invo cut off": (f"{TEXT} <invo", "though no tool was offered"),
    "<invoke with a name cut off": (f'{TEXT} <invoke name="get_wea', "though no tool was offered"),
    "<function_calls>": (f"{TEXT} <function_calls>", "though no tool was offered"),
    "nothing": ("  \n", "empty"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_marked(lie):
    text, mark = LIES[lie]
    assert any(mark in found for found in marks(text)), marks(text)


def test_what_is_cut_off_by_length_is_marked_as_well():
    """An answer ends where its tokens end: the marks do not wait for a sentence's end."""
    for lie in ("12 foreign characters in 300 words", "every word doubled", "German words", "French words"):
        assert marks(LIES[lie][0][:-7]), lie


ORDINARY = {
    "plain": "A plain answer, with numbers 1, 2, 3 and a formula: α + β = γ.",
    "loanwords": "She said 'naïve café' and wrote x² ≤ 4; the façade of the château was in Zürich, and so was José.",
    "a table and a rule": "| a | b |\n|---|---|\n| 1 | 2 |\n" + "-" * 80,
    "code": "```python\nfor i in range(3):\n    print(i)\n```",
    "a short echo": "one two one two one two, three",
    "a foreign word quoted": "The word for mountain is 山, and it is pronounced shan; " + prose(200, 1),
    "names": "Ludwig van Beethoven, Simone de Beauvoir, Vincent van Gogh and Ludwig Mies van der Rohe were no friends "
    "of Charles de Gaulle, although the Los Angeles Times once said so in El Paso and La Paz.",
    "markdown": "# The kettle\n\n---\n\n## What can go wrong\n\n1. **Leaks** - water comes out.\n2. **Rust** - it "
    "does that...\n\n* * *\n\n> It is what it is!!! Really?!\n\n" + "=" * 60 + "\n\n- [x] done\n- [ ] not done ✅\n",
    "a table of many rows": "| name | yes | no |\n| --- | :---: | ---: |\n" + "| one | ✓ | ✗ |\n" * 12,
    "formulas": "The energy is $E = mc^2$, so $$\\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2}$$, Δx·Δp ≥ ħ.",
    "a class": "Here:\n\n```python\n# " + "-" * 70 + "\nclass Ledger:\n    def __init__(self):\n        self.rows "
    "= [0, 0, 0, 0, 0, 0, 0]\n\n    def add(self, who, what):\n        self.rows.append((who, what))\n\n"
    + "        self.assertEqual(len(ledger.rows), 1)\n" * 3
    + "```\n\nIt keeps what was added, in the order in which it came, and you can search it.",
    "code cut off by length": "Here is the class:\n\n```python\nclass Ledger:\n    def add(self, row: dict[str,",
    "a list of words": "Tools you need:\n\n- copper kettle\n- iron hammer\n- lanterns\n- rope\n- map\n- ledger\n" * 2,
    "dialogue": '"No, no, no!" she said. "That, that is not what I had had in mind... or is it?" He laughed: "Ha ha!"',
    "a directory": "```\nproject/\n├── src/\n│   ├── main.py\n│   └── ledger.py\n└── tests/\n```\n\nTests are apart.",
    "HTML that was asked for": "Use `<parameter>` or `<div>` here; a pipe in Elixir is |> and in F# it is <| as well.",
    "the prompts' own sentences": prose(400, 3),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_text_bears_no_mark(name):
    assert marks(ORDINARY[name]) == []


@pytest.mark.parametrize("length", [5, 30, 100, 400])
def test_running_english_bears_no_mark(length):
    assert [seed for seed in range(40) if marks(prose(length, seed))] == []


def test_the_english_texts_of_this_python_bear_no_mark():
    """Half a million characters of reference manual: prose, grammar, tables and code without fences."""
    topics = pytest.importorskip("pydoc_data.topics").topics
    found = {name: marked for name, text in topics.items() if (marked := marks(text[:6000]))}
    assert len(topics) > 50 and found == {}
