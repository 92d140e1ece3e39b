"""Calls whose arguments have blanks in their names, read by 0.5.23's reader over deepseek-recipe, and with ours.

A program of its own, because it imports SGLang's modules from a wheel:

    python3 -m tests.patching.recipe_calls_read 0.5.23        JSON: the arguments of each case's call, by way
"""

import importlib
import json
import sys

from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.fixes import argument_names, cut_characters
from tests.patching.recipe_answers_read import END, HOME, REPLACED, WAYS, tokenizer
from tests.patching.wheels import fetch, packages
from tests.wheel_pools import Wheel

TAG = '<｜DSML｜parameter name="{}" string="{}">{}</｜DSML｜parameter>\n'
QUOTED = 'as in parameter name="a b" string="true">'
CASES = {  # the arguments, in their order
    "no blank": {"path": "a b", "count": 3},
    "a blank": {"First Name": "Ada"},
    "blanks": {"First Name": "Ada", "First Date": {"in words": "May 1"}, "count": -3, "Due  by ": "  x\n"},
    "rare": {"à la carte 日本": "é 日本", "👩 x": ["a b"]},
    "a tag in a string": {"text": QUOTED, "First Name": QUOTED},
    "a quotation mark": {"a b": 'say "a b"', "c": "parameter name="},
}
TEXT = (
    """No calls: parameter name="a b", a <b c="d e">, ｜DSML｜ as a "word of its own", ｜DSML｜parameter name="a b"."""
)


def answer(arguments: dict) -> str:
    """As the checkpoints' own encoder writes a call."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()}
    kinds = {name: "true" if isinstance(value, str) else "false" for name, value in arguments.items()}
    written = "".join(TAG.format(name, kinds[name], text) for name, text in texts.items())
    call = f'<｜DSML｜invoke name="run">\n{written}</｜DSML｜invoke>'
    return f"{TEXT}\n\n<｜DSML｜tool_calls>\n{call}\n</｜DSML｜tool_calls>"


def read(reader, recipe, arguments: dict, way: int, parse: bool) -> list[str]:
    """[text, arguments]"""
    ids = recipe.encode_text(answer(arguments))
    made = reader(recipe, thinking_stage=None, parse_tool_calls=parse)
    *steps, last = [ids[i : i + way] for i in range(0, len(ids), way)] if way else [ids]
    told = [*(made.feed(step) for step in steps), made.finish(last, END)]
    assert made.num_consumed_tokens == len(ids)
    calls = [call for one in told for call in one.tool_calls]
    assert [call.name for call in calls if call.name] == ["run"] * parse
    return ["".join(one.content for one in told), "".join(call.arguments for call in calls)]


def main(version: str) -> dict:
    sys.path.append(str(packages()))
    sys.meta_path.insert(0, Wheel(fetch(version), (f"{HOME}output", f"{HOME}renderer")))
    reader = importlib.import_module(f"{HOME}output").DeepSeekRecipeOutputParser
    recipe = importlib.import_module(f"{HOME}renderer").DeepSeekRecipe("dsv4", tokenizer())

    def all_ways(parse=True) -> dict:
        return {case: {way: read(reader, recipe, given, way, parse) for way in WAYS} for case, given in CASES.items()}

    found = {"stock": all_ways(), "stock, no calls": all_ways(False)}
    reader.__init__ = argument_names.replace_init(reader.__init__)
    reader._deltas = argument_names.replace_deltas(reader._deltas)
    found["elsewhere"] = all_ways()
    models_served.announce({"model_type": "deepseek_v4"}, {})
    models_served.announce_served_card({})
    found |= {"ours": all_ways(), "ours, no calls": all_ways(False)}
    for name, ours in REPLACED.items():
        setattr(reader, name, getattr(cut_characters, f"replace_{ours}")(getattr(reader, name)))
    return found | {"with cut_characters": all_ways()}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
