"""How the log-probabilities of prompts are told over HTTP: each release's own code on the CPU, with ours in it."""

import copy
import random
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches.fixes import echoed_prompts, token_texts
from deepseek_v4_sm120.sglang_patches.rows.http_server import OPENAI, TOKENIZER_MANAGER
from tests.patching.test_wheel_answers import Record
from tests.patching.test_wheel_wo_a import QUIET, take
from tests.patching.wheels import every_release, fetch

pytestmark = pytest.mark.usefixtures("served_card")

MODULE, CLASS = TOKENIZER_MANAGER.split(":")
UTILS, COMPLETIONS = f"{OPENAI}.utils", f"{OPENAI}.serving_completions"
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


# ---- echoed_prompts

PROMPT = {"input_token_logprobs": [(None, 5, "a"), (-1.0, 6, "b")], "input_top_logprobs": [None, [(-0.5, 7, "c")]]}
DRAWN = {"output_token_logprobs": [(-2.0, 8, "d")], "output_top_logprobs": [[(-2.0, 8, "d")]]}
OF_PROMPT = (["a", "b"], [None, -1.0], [None, {"c": -0.5}])
WITH_DRAWN = (["a", "b", "d"], [None, -1.0, -2.0], [None, {"c": -0.5}, {"d": -2.0}])


def completed(version, asked, meta, *, ours=True):
    """Of each answer what is told of its log-probabilities."""
    wheel = fetch(version)
    lists = {"LogProbs": lambda: Record(tokens=[], token_logprobs=[], text_offset=[], top_logprobs=[])}
    lists["_lossless_token_text"] = lambda tokenizer, token, text: text
    names = {"to_openai_style_logprobs": take(wheel, lists, "to_openai_style_logprobs", UTILS)}
    names |= {"CompletionResponseChoice": Record, "CompletionResponse": Record, "SglExt": Record}
    method = take(wheel, names, "OpenAIServingCompletion._build_completion_response", COMPLETIONS)
    method = echoed_prompts.replace_response(method) if ours else method
    made = SimpleNamespace(tokenizer_manager=QUIET, _prepare_echo_prompts=lambda request: ["ab"] * 2)
    meta = {"id": "x", "finish_reason": {"type": "length"}, "weight_version": "1"} | meta
    given = [{"text": "", "meta_info": copy.deepcopy(meta)} for _ in range(2)]
    kept = copy.deepcopy(given)
    told = method(made, Record(**{"n": 1, "logprobs": 1, "echo": True, "model": "m"} | asked), given, 0)
    assert given == kept  # SGLang's own notes stay
    found = [one.logprobs for one in told.choices]
    return [one and (one.tokens, one.token_logprobs, one.top_logprobs) for one in found]


@every_release()
def test_a_completion_of_no_tokens_has_its_prompts_alone(version):
    assert completed(version, {"max_tokens": 0}, PROMPT | DRAWN, ours=False) == [WITH_DRAWN] * 2  # so it is needed
    of_top = DRAWN | {"output_token_logprobs": []}  # of a pass in which nobody wants tokens
    for drawn in (DRAWN, of_top, {}):
        assert completed(version, {"max_tokens": 0}, PROMPT | drawn) == [OF_PROMPT] * 2


def test_one_of_a_token_has_its_own():
    for most in (1, None):
        assert completed("0.5.23", {"max_tokens": most}, PROMPT | DRAWN) == [WITH_DRAWN] * 2
    assert completed("0.5.23", {"max_tokens": 0, "logprobs": None}, PROMPT | DRAWN) == [None] * 2


def test_elsewhere_what_was_drawn_is_told(elsewhere):
    assert completed("0.5.23", {"max_tokens": 0}, PROMPT | DRAWN) == [WITH_DRAWN] * 2
