"""Answers that end within a character, read by 0.5.23's reader over deepseek-recipe, without and with ours around it.

A program of its own, because it imports SGLang's modules from a wheel:

    python3 -m tests.patching.recipe_answers_read 0.5.23        JSON: what each case became, by way
"""

import importlib
import itertools
import json
import random
import sys
import types

from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.fixes import cut_characters
from tests.patching.wheels import fetch, packages
from tests.wheel_pools import Wheel

HOME = "sglang.srt.parser.deepseek_recipe_"
MARKS = ("<think>", "</think>", "｜DSML｜", "<｜Assistant｜>", "<｜User｜>", "<｜image｜>", "STOP")
STOP = 256 + MARKS.index("STOP")  # its token
TEXT, SMILE, UNKNOWN = "A long answer, with é and 日本. ", "😀", "\N{REPLACEMENT CHARACTER}"
LENGTH, ABORT, END = {"type": "length", "length": 1}, {"type": "abort"}, {"type": "stop", "matched": None}
BLANK = {"type": "stop", "matched": "\n\n"}
CASES = {  # text, tokens of it left out at the end, why it ended, stops, whether it is thoughts
    "cut": (TEXT + SMILE, 1, LENGTH, (), False),
    "cut after a byte": (TEXT + SMILE, 3, LENGTH, (), False),
    "cut in thoughts": (TEXT + SMILE, 2, LENGTH, (), True),
    "cut, with a stop": (TEXT + SMILE, 2, LENGTH, ("a stop",), False),
    "cut behind another, with a stop": (TEXT + SMILE * 2, 2, LENGTH, ("a stop",), False),
    "aborted": (TEXT + SMILE, 2, ABORT, (), False),
    "cut behind a character": (TEXT + SMILE, 0, LENGTH, (), False),
    "whole": (TEXT + SMILE + "!", 0, END, (), False),
    "stopped": (TEXT + SMILE + "a stop", 0, {"type": "stop", "matched": "a stop"}, ("a stop",), False),
    "stopped by a token": (TEXT + SMILE + "STOP", 0, {"type": "stop", "matched": "STOP"}, ("STOP",), False),
    "stopped by rare characters": (TEXT + SMILE * 2, 0, {"type": "stop", "matched": SMILE * 2}, (SMILE * 2,), False),
    "ended by a token": (TEXT + UNKNOWN + "STOP", 0, {"type": "stop", "matched": STOP}, (), False),
    "ended within a character": (TEXT + SMILE, 2, END, (), False),
    "stopped behind an unknown one": (f"{TEXT}{UNKNOWN}\n\n", 0, BLANK, ("\n\n",), False),
    "stopped behind unknown ones": (
        TEXT + UNKNOWN * 9 + "\n\n",
        0,
        {"type": "stop", "matched": "\n\n"},
        ("\n\n",),
        False,
    ),
    "unknown ones within": (f"{UNKNOWN * 9}a{UNKNOWN * 9}b. No stop", 0, END, ("\n\n",), False),
    "nothing": ("", 0, LENGTH, (), False),
    "a part of a character alone": (SMILE, 1, LENGTH, (), False),
}
CALL = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="run">\n'
    '<｜DSML｜parameter name="o" string="{}">{}</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)
PARTS = (
    "a word",
    " ",
    "\n",
    "</think>",
    "日本",
    "é",
    SMILE,
    "👩\u200d👧",
    UNKNOWN,
    "<",
    "｜DSML｜",
    "STOP",
    '{"a": "\\n"}',
)
STOPS = ((), ("\n\n",), (SMILE * 2,), ("STOP", "本é"), ("d<",), ("word 日", SMILE))
REPLACED = {"feed": "feed", "finish": "finish", "_cut_at_stop_string": "cut", "_release_pending_ids": "release"}
SEEDS, LONG = 500, 1000
WAYS = (0, 1, 2, 3, 5, 6)  # tokens of a step; 0: the answer as a whole


def tokenizer():
    """A token for each byte, DeepSeek's marks, and one for a whole stop."""
    tokenizers = importlib.import_module("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_tokens([tokenizers.AddedToken(mark, normalized=False) for mark in MARKS])
    return made


def read(reader, recipe, case: str, way: int, **of_finish) -> list[str]:
    """[thoughts, text]"""
    text, left_out, reason, stops, thinks = CASES[case]
    ids = recipe.encode_text(text)
    ids = ids[: len(ids) - left_out]
    made = reader(
        recipe,
        thinking_stage=recipe.parse_start(thinking=thinks),
        parse_tool_calls=True,
        separate_reasoning=True,
        stop=stops,
    )
    steps = [ids[i : i + way] for i in range(0, len(ids), way)] if way else [ids]
    *steps, last = steps or [[]]
    told = [*(made.feed(step) for step in steps), made.finish(last, reason, **of_finish)]
    assert made.num_consumed_tokens == len(ids)
    return ["".join(one.reasoning for one in told), "".join(one.content for one in told)]


def drawn(seed: int, recipe) -> tuple:
    """(tokens, why they end, stops, thinks, the steps' ends) of an answer."""
    chance = random.Random(seed)
    stops, thinks = chance.choice(STOPS), chance.random() < 0.5
    words = ["".join(chance.choices(PARTS, k=chance.randint(0, 8))) for _ in range(3)]
    call = chance.choice(("", CALL.format("true", words[1]), CALL.format("false", json.dumps({words[1]: -1e-9}))))
    ids, reason = recipe.encode_text(f"{words[0]}{'</think>' * thinks}{words[2]}\n\n{call}"), END
    if chance.random() < 0.4:
        ids, reason = ids[: chance.randint(1, len(ids))], chance.choice((LENGTH, ABORT))
    for end in range(1, len(ids) + 1) if stops else ():
        text = recipe.hf_tokenizer.decode(ids[:end], skip_special_tokens=False)
        matched = [stop for stop in stops if stop in text]
        if matched:
            ids, reason = ids[:end], {"type": "stop", "matched": matched[0]}
            break
    most = chance.choice((1, 2, 4, 9))
    ends = itertools.accumulate(chance.randint(1, most) for _ in ids)
    return ids, reason, stops, thinks, [end for end in ends if end < len(ids)]


def differ(reader, recipe) -> list[int]:
    """The seeds of answers that a stream does not tell as the whole is told."""
    found = []
    for seed in range(SEEDS):
        ids, reason, stops, thinks, ends = drawn(seed, recipe)
        both = []
        for cut in ([], ends):
            stage = recipe.parse_start(thinking=thinks)
            made = reader(recipe, thinking_stage=stage, parse_tool_calls=True, stop=stops)
            told = [made.feed(ids[start:end]) for start, end in zip([0, *cut], cut, strict=False)]
            told.append(made.finish(ids[cut[-1] if cut else 0 :], reason))
            calls = {}
            for call in (call for one in told for call in one.tool_calls):
                name, arguments = calls.get(call.index, ("", ""))
                calls[call.index] = (name + (call.name or ""), arguments + call.arguments)
            both.append(["".join(one.reasoning for one in told), "".join(one.content for one in told), calls])
        found += [seed] if both[0] != both[1] else []
    return found


def most_held(reader, recipe) -> int:
    """The most tokens that a reader with a stop keeps back, or remembers, of an answer of unknown characters."""
    made, held = reader(recipe, thinking_stage=None, parse_tool_calls=True, stop=("a stop",)), 0
    for token in recipe.encode_text(UNKNOWN * 100):
        made.feed([token])
        held = max(held, len(made._pending_ids), len(getattr(made, cut_characters.FED)))
    return held


def counting(recipe, made) -> list[int]:
    """How many tokens each of the reader's calls of its tokenizer decodes from now on."""
    lengths = []

    def decode(ids, **more):
        lengths.append(len(ids))
        return recipe.hf_tokenizer.decode(ids, **more)

    made._hf_tokenizer = types.SimpleNamespace(decode=decode, encode=recipe.hf_tokenizer.encode)
    return lengths


def longest_decoded(reader, recipe) -> int:
    """The most tokens that are read at once to cut a stop off an answer of unknown characters."""
    made = reader(recipe, thinking_stage=None, parse_tool_calls=True, stop=("STOP",))
    lengths = counting(recipe, made)
    made.finish(recipe.encode_text(f"{UNKNOWN * 100}STOP"), {"type": "stop", "matched": "STOP"})
    return max(lengths)


def decoded(reader, recipe) -> dict[str, float]:
    """Tokens decoded for each token of the answer, or of the stop and for each token of the stream."""
    text = "".join(random.Random(0).choices("abcdefgh \n", k=LONG))
    ids, found = recipe.encode_text(text), {}
    for case, matched in (("no text", r"\d{9}"), ("long stop", text[LONG // 2 :])):
        made = reader(recipe, thinking_stage=None, parse_tool_calls=True, stop=())
        lengths = counting(recipe, made)
        told = made.finish(ids, {"type": "stop", "matched": matched})
        assert text == told.content + (matched if case == "long stop" else "")
        found[case] = sum(lengths) / LONG
    made = reader(recipe, thinking_stage=None, parse_tool_calls=True, stop=("x" * (LONG // 2),))
    lengths = counting(recipe, made)
    told = [made.feed([token]) for token in ids]
    assert "".join(one.content for one in told) == text[: 1 - LONG // 2]  # all but what the stop may begin with
    return found | {"stream": sum(lengths) / (LONG // 2) / LONG}


def main(version: str) -> dict:
    sys.path.append(str(packages()))
    sys.meta_path.insert(0, Wheel(fetch(version), (f"{HOME}output", f"{HOME}renderer")))
    reader = importlib.import_module(f"{HOME}output").DeepSeekRecipeOutputParser
    recipe = importlib.import_module(f"{HOME}renderer").DeepSeekRecipe("dsv4", tokenizer())

    def all_ways() -> dict:
        return {case: {str(way): read(reader, recipe, case, way) for way in WAYS} for case in CASES}

    found = {"stock": all_ways(), "differ": differ(reader, recipe)}
    for name, ours in REPLACED.items():
        setattr(reader, name, getattr(cut_characters, f"replace_{ours}")(getattr(reader, name)))
    found["elsewhere"] = all_ways()
    models_served.announce({"model_type": "deepseek_v4"}, {})
    models_served.announce_served_card({})
    return found | {
        "ours": all_ways(),
        "with its stop": {
            case: [read(reader, recipe, case, way, keep_matched_stop=True) for way in WAYS]
            for case in CASES
            if CASES[case][2].get("matched") is not None
        },
        "most held": max(most_held(reader, recipe), longest_decoded(reader, recipe)),
        "decoded": decoded(reader, recipe),
        "differ, ours": differ(reader, recipe),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
