"""A custom tool's text while its call is written, over /v1/responses: each release's own reading of it, beside ours."""

import json
import random
from types import SimpleNamespace

from deepseek_v4_sm120.sglang_patches.fixes import long_calls
from deepseek_v4_sm120.sglang_patches.rows.http_server import CUSTOM_INPUT
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import content, every_release, fetch

MODULE, _, NAME = CUSTOM_INPUT.partition(":")
ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
PATCH = "".join(f"+    if x[{i}] < -{i} and y > '\\n':\t# \"é\" 😀\n" for i in range(40))
PARTS = ("a", '"', "\\", "\n", "\t", "/", "é", "日本", "😀", "\x01", "\u2028", "input", ":", "u0041", "\\u", "{}", " ")
ODD = (  # JSON that no encoder writes, and what is none
    '{"input": "a\\/b\\u0041\\uD83D\\uDE00c\\udc00d"}',
    '{"input": "a\nb\\x c"}',
    '{"input": "high \\ud83d and no low"}',
    '{"input": "high \\ud83d\\u0041"}',
    '{"input": "\\u12g4"}',
    '{"other": ": ", "input" : "b\\\\"}',
    '{"input of": "b", "input": "a"}',
    '{"input": 5}',
    '{"input": {"input": "a"}}',
    '{"text": "a"}',
    "*** Begin Patch",
    "",
)


def stock(version):
    names = {"CUSTOM_TOOL_INPUT_KEY": "input", "_SIMPLE_ESCAPES": ESCAPES}
    for helper in ("_payload_start", "_unicode_escape"):
        take(fetch(version), names, helper, MODULE)
    return take(fetch(version), names, NAME, MODULE)


def grown(text: str, chance) -> list[str]:
    """What there is of it behind each step."""
    ends = sorted({*chance.sample(range(len(text) + 1), k=min(len(text), 40)), len(text)})
    return [text[:end] for end in ends]


@every_release("0.5.20")
def test_the_text_is_sglangs_behind_each_step(version, served_card):
    """Of many streams at once, some of the same text; and of some that are not kept."""
    theirs, chance, told = stock(version), random.Random(0), 0
    for streams in (1, 5, long_calls.STREAMS + 3):
        ours = long_calls.replace_custom_input(theirs)
        texts = [PATCH, *("".join(chance.choices(PARTS, k=chance.randint(0, 40))) for _ in range(streams))]
        written = [json.dumps({"input": text}, ensure_ascii=chance.random() < 0.5) for text in texts]
        steps = [step for text in (*written, *ODD, written[0]) for step in enumerate(grown(text, chance))]
        for _, one in sorted(steps, key=lambda step: step[0]):
            assert ours(one) == theirs(one)
            told += theirs(one) != ""
        assert [ours(one) for one in written] == texts
    assert told > 500


@every_release("0.5.20")
def test_each_character_is_read_once(version, served_card, monkeypatch):
    read, text = [], long_calls.TEXT

    def match(buffer, at):
        found = text.match(buffer, at)
        read.append(len(found.group()))
        return found

    monkeypatch.setattr(long_calls, "TEXT", SimpleNamespace(match=match))
    ours, written = long_calls.replace_custom_input(stock(version)), json.dumps({"input": PATCH})
    others = [json.dumps({"input": f"{i}{PATCH}"}) for i in range(long_calls.STREAMS - 1)]
    texts, ends = (written, *others), range(0, len(written) + 1, 40)
    steps = [text[:end] for end in ends[:20] for text in texts]
    for step in steps + [text[:end] for text in texts for end in ends[20:]]:  # in turns, then one behind the other
        ours(step)
    wanted = [json.dumps(ours(text[: ends[-1]])) for text in texts]
    assert sum(read) == sum(map(len, wanted)) - 2 * len(wanted) > 70_000


def test_no_more_is_kept_than_of_so_many_streams(served_card):
    ours = long_calls.replace_custom_input(None)
    for i in range(3 * long_calls.STREAMS):
        ours(f'{{"input": "{i} a')
    (known,) = (cell.cell_contents for cell in ours.__closure__ if isinstance(cell.cell_contents, list))
    last = range(3 * long_calls.STREAMS - 1, 2 * long_calls.STREAMS - 1, -1)
    assert [text for _, _, text in known] == [f"{i} a" for i in last]


@every_release("0.5.20")
def test_it_is_asked_for_all_that_there_is_of_a_call(version):
    text = content(fetch(version), f"{MODULE.rpartition('.')[0].replace('.', '/')}/serving_responses.py")
    _, _, asked = text.split(NAME)
    assert asked.split()[:2] == ["(", 'state["arguments"]']


def test_other_models_and_cards_have_it_read_by_sglang(monkeypatch):
    monkeypatch.setattr(long_calls.models_served, "has_served_card", lambda: False)
    assert long_calls.replace_custom_input(str.upper)('{"input": "a') == '{"INPUT": "A'
