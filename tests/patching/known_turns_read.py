"""Conversations made tokens by 0.5.23's renderer over deepseek-recipe, without and with ours around it.

A program of its own, because it imports SGLang's modules from a wheel:

    python3 -m tests.patching.known_turns_read 0.5.23        JSON: what differs, and how much was made tokens
"""

import importlib
import json
import random
import sys
import threading
import types

from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.fixes import known_turns
from tests.patching.recipe_answers_read import HOME, MARKS
from tests.patching.wheels import fetch, packages
from tests.wheel_pools import Wheel

SPECIAL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜System｜>", *MARKS)
MERGES = (("Ġ", "a"), ("a", "b"), ("Ċ", "Ċ"), ("ĠĠ", "Ġ"), ("Ġ", "Ġ"), ("<", "ï"), (">", "Ċ"), ("ab", "a"))
WORDS = ("ab", " a", "aba", "\n", "\n\n", "  ", "日本", "😀", "<", "<｜", "｜>", "x > y", "User", "é")
SPELT = ("<｜User｜>", "<think>", "</think>", "｜DSML｜", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")
SEEDS, TURNS, MANY = 8, 4, 3_000


class Counting:
    """A tokenizer that knows how many characters it has made tokens."""

    def __init__(self, tokenizer):
        self.tokenizer, self.characters = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    @classmethod
    def from_str(cls, text):
        return cls(importlib.import_module("tokenizers").Tokenizer.from_str(text))

    def encode(self, text, **more):
        self.characters += len(text)
        return self.tokenizer.encode(text, **more)


def tokenizer(**of_marks):
    """Bytes, some of which are merged, and DeepSeek's marks."""
    tokenizers = importlib.import_module("tokenizers")
    known = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [*known, *("".join(pair) for pair in MERGES if pair[0] != "ĠĠ"), "ĠĠ", "ĠĠĠ"]
    merges = sorted(MERGES, key=lambda pair: pair[0] in ("ĠĠ", "ab"))
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.add_tokens([tokenizers.AddedToken(mark, normalized=False, **of_marks) for mark in SPECIAL])
    return Counting(made)


def text(chance, marks: bool) -> str:
    words = [*WORDS, *(SPELT if marks and chance.random() < 0.1 else ())]
    return "".join(chance.choices(words, k=chance.randint(0, 12)))


def turns(seed: int, *, marks=False) -> list[dict]:
    """What a client sends, with one request more for each user's message and tool's result."""
    chance, made = random.Random(seed), [{"role": "system", "content": text(random.Random(0), marks)}]
    for turn in range(TURNS):
        made.append({"role": "user", "content": text(chance, marks) or "U"})
        said = {"role": "assistant", "content": text(chance, marks), "reasoning_content": text(chance, marks)}
        if chance.random() < 0.6:
            arguments = {"a b"[: chance.randint(1, 3)]: text(chance, marks), "n": chance.randint(0, 9)}
            function = {"name": "run", "arguments": json.dumps(arguments)}
            call = {"id": f"call_{turn}", "type": "function", "function": function}
            made.append(said | {"tool_calls": [call]})
            made.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": text(chance, marks)})
        made.append(said | {"reasoning_content": text(chance, marks)})
    return made


def requests(messages: list[dict]):
    for end, message in enumerate(messages, 1):
        if message["role"] in ("user", "tool"):
            tools = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]
            yield {"messages": messages[:end], "thinking": True, "tools": tools}


def compared(stock, ours, seeds, **more) -> dict:
    """-> requests whose tokens differ, and how many of those by recipe itself there were."""
    found = {"asked": 0, "differ": [], "recipe's": 0}
    for seed in seeds:
        for request in requests(turns(seed, **more)):
            by_recipe = ours._encoding._original.calls
            is_same = ours.encode(request) == stock.encode(request)
            found["differ"] += [] if is_same else [seed]
            found["asked"] += 1
            found["recipe's"] += ours._encoding._original.calls - by_recipe
    return found


class Recipes:
    """recipe's encoding, which knows how often it was asked for tokens, and the last prompt's text."""

    def __init__(self, encoding):
        self.encoding, self.calls, self.prompt = encoding, 0, ""

    def __getattr__(self, name):
        return getattr(self.encoding, name)

    def render_conversation(self, conversation):
        made = self.encoding.render_conversation(conversation)
        self.prompt = made.prompt
        return made

    def encode(self, conversation):
        self.calls += 1
        return self.encoding.encode(conversation)


def with_ours(renderer, made):
    its_class = type("DeepSeekRecipe", (renderer.DeepSeekRecipe,), {})
    its_class.__init__ = known_turns.replace_init(its_class.__init__)
    found = its_class("dsv4", made)
    found._encoding._original = Recipes(found._encoding._original)
    return found


def characters(ours) -> list[int]:
    """Of each request of a conversation with long texts: what was made tokens for it."""
    found, pad = [], "ab " * (MANY // 3)
    messages = [message | {"content": message["content"] + pad} for message in turns(7)]
    for request in requests(messages):
        before = ours._encoding.plain.characters if found else 0
        ours.encode(request)
        found.append(ours._encoding.plain.characters - before)
    return found


def at_once(stock, ours) -> int:
    """How many answers differ that several threads are given at once, where little is kept."""
    asked = [request for seed in range(6) for request in requests(turns(seed))]
    expected, wrong = [stock.encode(request) for request in asked], []

    def ask():
        wrong.extend(one for one, ids in zip(asked, expected, strict=True) if ours.encode(one) != ids)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(wrong)


def spelt(stock, ours) -> list[bool]:
    """Of a turn with a call, and of one whose words are that call's text: are the tokens as without us? Are the texts
    the same, and the tokens others?"""
    asked, *_ = (one for seed in range(9) for one in requests(turns(seed)) if one["messages"][-1]["role"] == "tool")
    *front, said, _ = asked["messages"]
    call, prompt = ours.encode(asked), ours._encoding._original.prompt
    turn = prompt.split("<｜Assistant｜>")[-2].partition("<｜end▁of▁sentence｜>")[0]
    words = {name: value for name, value in said.items() if name != "tool_calls"}
    words |= {"content": turn.partition("</think>")[2]}
    as_words = asked | {"messages": [*front, words, {"role": "user", "content": "U"}]}
    other = ours.encode(as_words)
    are_one = ours._encoding._original.prompt.startswith(prompt[: prompt.rindex("<｜User｜>")])
    return [call == stock.encode(asked), other == stock.encode(as_words), are_one, other[: len(call)] != call]


def main(version: str) -> dict:
    sys.path.append(str(packages()))
    sys.meta_path.insert(0, Wheel(fetch(version), (f"{HOME}output", f"{HOME}renderer")))
    renderer = importlib.import_module(f"{HOME}renderer")
    made = tokenizer()
    stock, ours = renderer.DeepSeekRecipe("dsv4", made), with_ours(renderer, made)
    found = {"elsewhere": compared(stock, ours, range(2))}
    models_served.announce({"model_type": "deepseek_v4"}, {})
    models_served.announce_served_card({})
    found |= {"plain": compared(stock, ours, range(SEEDS)), "marks": compared(stock, ours, range(SEEDS), marks=True)}
    found["plain, once more"] = compared(stock, ours, range(SEEDS))
    found["spelt"] = spelt(stock, ours)
    found["characters"] = characters(with_ours(renderer, made))
    greedy = tokenizer(rstrip=True, lstrip=True)
    pair = renderer.DeepSeekRecipe("dsv4", greedy), with_ours(renderer, greedy)
    found["marks that take blanks"] = compared(*pair, range(3))
    ours, known_turns.KEPT_BYTES = with_ours(renderer, made), 20_000
    unknown = with_ours(renderer, made)
    unknown._encoding.tokenizer = types.SimpleNamespace(token_to_id=lambda mark: None)
    unknown._encoding.plain = known_turns.without_added(made)
    found["unknown marks"] = compared(stock, unknown, range(2))
    found["at once"] = at_once(stock, ours)
    pieces = ours._encoding.pieces
    found["kept"] = [pieces.bytes, sum(pieces.size(key, tokens) for key, (tokens, _) in pieces.known.items())]
    other = type("DeepSeekRecipe", (renderer.DeepSeekRecipe,), {})
    other.__init__ = known_turns.replace_init(other.__init__)
    found["V4.1"] = type(other("dsv41", made)._encoding).__name__
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
