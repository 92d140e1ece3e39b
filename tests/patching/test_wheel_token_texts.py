"""The texts of tokens whose log-probabilities are told: each release's own code on the CPU, with ours in it."""

import random

import pytest

from deepseek_v4_sm120.sglang_patches.fixes import token_texts
from deepseek_v4_sm120.sglang_patches.rows.http_server import TOKENIZER_MANAGER
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import every_release, fetch

pytestmark = pytest.mark.usefixtures("served_card")

MODULE, CLASS = TOKENIZER_MANAGER.split(":")
ONE, ALTERNATIVES = "detokenize_logprob_tokens", "detokenize_top_logprobs_tokens"


class Tokenizer:
    """Every fifth token is a piece of a character, as text the same as the others of them."""

    def __init__(self, mark):
        self.mark, self.asked = mark, []

    def batch_decode(self, rows):
        assert all(len(row) == 1 for row in rows)
        self.asked += [token for (token,) in rows]
        return ["\ufffd" if token % 5 == 0 else f"{self.mark}{token}" for (token,) in rows]


def manager(version, *, ours):
    methods = {name: take(fetch(version), {}, f"{CLASS}.{name}", MODULE) for name in (ONE, ALTERNATIVES)}
    if ours:
        methods[ONE] = token_texts.replace_detokenize(methods[ONE])
    made = type("Manager", (), methods)()
    made.tokenizer = Tokenizer("a")
    return made


def told(made, seed, *, text=True):
    """Of a prompt and its alternatives, of which the first place has none, then of an answer's next token."""
    chance = random.Random(seed)
    prompt = [chance.randrange(40) for _ in range(60)]
    alternatives = [None, *([chance.randrange(40) for _ in range(3)] for _ in prompt[1:])]
    numbers = [None, *(-chance.random() for _ in prompt[1:])]
    rows = [row and [-chance.random() for _ in row] for row in alternatives]
    return [
        made.detokenize_logprob_tokens(numbers, prompt, text),
        made.detokenize_top_logprobs_tokens(rows, alternatives, text),
        made.detokenize_logprob_tokens([-0.5], [41], text),
        made.detokenize_logprob_tokens([], [], text),
    ]


@every_release()
def test_they_are_told_as_sglang_tells_them_and_made_once(version):
    theirs, ours = (manager(version, ours=ours) for ours in (False, True))
    for seed in range(3):
        assert told(ours, seed) == told(theirs, seed)
    assert len(theirs.tokenizer.asked) == 3 * (60 + 59 * 3 + 1)  # so the row is needed
    assert sorted(ours.tokenizer.asked) == [*range(40), 41]


def test_another_tokenizer_has_its_own():
    made = manager("0.5.23", ours=True)
    assert told(made, 0)[0][1][2] in ("\ufffd", f"a{told(made, 0)[0][1][1]}")
    made.tokenizer = Tokenizer("b")
    assert {text[0] for _, _, text in told(made, 0)[0]} == {"b", "\ufffd"}
    made.tokenizer = Tokenizer("a")
    assert {text[0] for _, _, text in told(made, 0)[0]} == {"a", "\ufffd"}


def test_without_text_nobody_is_asked():
    made = manager("0.5.23", ours=True)
    assert told(made, 0, text=False) == told(manager("0.5.23", ours=False), 0, text=False)
    assert made.tokenizer.asked == []
    made.tokenizer = None  # as with --skip-tokenizer-init
    assert made.detokenize_logprob_tokens([-0.5], [41], False) == [(-0.5, 41, None)]


def test_elsewhere_it_is_sglangs(elsewhere):
    made = manager("0.5.23", ours=True)
    told(made, 0)
    assert len(made.tokenizer.asked) == 60 + 59 * 3 + 1
