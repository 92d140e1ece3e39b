"""Answers that end within a character, read by 0.5.23's reader over deepseek-recipe, without and with ours around it.

A program of its own, because it imports SGLang's modules from a wheel:

    python3 -m tests.patching.recipe_answers_read 0.5.23        JSON: what each case became, by way
"""

import importlib
import json
import sys

from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.fixes import cut_characters
from tests.patching.wheels import fetch, packages
from tests.wheel_pools import Wheel

HOME = "sglang.srt.parser.deepseek_recipe_"
MARKS = ("<think>", "</think>", "｜DSML｜", "<｜Assistant｜>", "<｜User｜>", "<｜image｜>", "STOP")
STOP = 256 + MARKS.index("STOP")  # its token
TEXT, SMILE = "A long answer, with é and 日本. ", "😀"
LENGTH, ABORT, END = {"type": "length", "length": 1}, {"type": "abort"}, {"type": "stop", "matched": None}
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
    "ended by a token": (TEXT + "\N{REPLACEMENT CHARACTER}STOP", 0, {"type": "stop", "matched": STOP}, (), False),
    "ended within a character": (TEXT + SMILE, 2, END, (), False),
    "nothing": ("", 0, LENGTH, (), False),
    "a part of a character alone": (SMILE, 1, LENGTH, (), False),
}
REPLACED = {"feed": "feed", "finish": "finish", "_cut_at_stop_string": "cut", "_release_pending_ids": "release"}
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


def read(reader, recipe, case: str, way: int) -> list[str]:
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
    told = [*(made.feed(step) for step in steps), made.finish(last, reason)]
    assert made.num_consumed_tokens == len(ids)
    return ["".join(one.reasoning for one in told), "".join(one.content for one in told)]


def main(version: str) -> dict:
    sys.path.append(str(packages()))
    sys.meta_path.insert(0, Wheel(fetch(version), (f"{HOME}output", f"{HOME}renderer")))
    reader = importlib.import_module(f"{HOME}output").DeepSeekRecipeOutputParser
    recipe = importlib.import_module(f"{HOME}renderer").DeepSeekRecipe("dsv4", tokenizer())

    def all_ways() -> dict:
        return {case: {str(way): read(reader, recipe, case, way) for way in WAYS} for case in CASES}

    found = {"stock": all_ways()}
    for name, ours in REPLACED.items():
        setattr(reader, name, getattr(cut_characters, f"replace_{ours}")(getattr(reader, name)))
    found["elsewhere"] = all_ways()
    models_served.announce({"model_type": "deepseek_v4"}, {})
    models_served.announce_served_card({})
    return found | {"ours": all_ways()}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
