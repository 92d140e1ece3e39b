"""A budget of thoughts by --enable-strict-thinking: each release's own grammar of it, over the drafts of a verification
and without speculation (docs/mended.md)."""

import random

import pytest
import torch

from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import every_release, fetch

SINCE, VOCABULARY, WIDTH, LENGTH = "0.5.17", 64, 4, 24
END_OF_ANSWER, END_OF_THOUGHTS = 1, 7
CHAIN = torch.tensor([*range(1, WIDTH), -1])


class Grammar:
    """SGLang's base of grammars, as far as that of thoughts asks."""

    _finished = False


def set_filter(mask, tokens, row, is_allowed=True, reset_vocab_mask=True):
    """XGrammar's, on the host."""
    mask[row] = (0 if is_allowed else -1) if reset_vocab_mask else mask[row]
    for token in tokens:
        bit = torch.tensor(1 << token % 32).to(torch.int32)
        mask[row, token // 32] = mask[row, token // 32] | bit if is_allowed else mask[row, token // 32] & ~bit


def grammar_of(version, budget):
    names = {"BaseGrammarObject": Grammar}
    matcher = "sglang.srt.utils.token_sequence_matcher"
    names["TokenSequenceMatcher"] = take(fetch(version), {}, "TokenSequenceMatcher", matcher)
    kind = take(fetch(version), names, "ReasonerGrammarObject", "sglang.srt.constrained.reasoner_grammar_backend")
    given = dict(think_excluded_token_ids=[END_OF_ANSWER], enable_token_filter=True, token_filter_fn=set_filter)
    made = kind(grammar=None, think_end_ids=[END_OF_THOUGHTS], **given)
    made.maybe_init_reasoning(True)
    made.max_think_tokens = budget
    return made


def liked(answer):
    """What the model would say next, the likeliest first: it would think for ever."""
    others = [token for token in range(2, VOCABULARY) if token != END_OF_THOUGHTS]
    random.Random(f"{answer}").shuffle(others)
    return [*others, END_OF_THOUGHTS, END_OF_ANSWER]


def said(answer, mask):
    return next(token for token in liked(answer) if int(mask[token // 32]) >> token % 32 & 1)


def answered(version, budget, drafts=None):
    """The answer's tokens; `drafts` gives those of a step."""
    grammar, answer = grammar_of(version, budget), []
    traverse = take(fetch(version), {"torch": torch}, "traverse_tree", "sglang.srt.speculative.spec_utils")
    while len(answer) < LENGTH:
        mask = torch.full((WIDTH, VOCABULARY // 32), -1, dtype=torch.int32)
        guesses, step = drafts(answer) if drafts and answer else [], []
        if guesses:
            tokens = torch.tensor([answer[-1], *guesses])
            traverse(CHAIN, torch.full((WIDTH,), -1), tokens, grammar, mask, vocab_size=VOCABULARY)
        else:
            grammar.fill_vocab_mask(mask, 0)
        for row in range(len(guesses) + 1):
            step.append(said(answer + step, mask[row]))
            if guesses[row : row + 1] != step[row : row + 1]:
                break
        for token in step:
            grammar.accept_token(token)
        answer += step
    return answer[:LENGTH]


@every_release(SINCE)
@pytest.mark.parametrize("budget", [0, 1, 5, 11, -1])
def test_thoughts_end_at_their_budget_with_speculation_too(version, budget):
    draw = random.Random(budget)

    def drafts(answer):
        guesses = []
        for _ in range(WIDTH - 1):
            wrong = draw.choice([END_OF_THOUGHTS, draw.randrange(VOCABULARY)])
            guesses.append(liked(answer + guesses)[0] if draw.random() < 0.7 else wrong)
        return guesses

    alone = answered(version, budget)
    assert (alone.index(END_OF_THOUGHTS) if END_OF_THOUGHTS in alone else -1) == budget
    assert all(answered(version, budget, drafts) == alone for _ in range(4))
