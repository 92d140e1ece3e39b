"""An argument whose name has a blank ("First Name") keeps its name, and the call its arguments.

deepseek-recipe (0.2.0), which reads all answers from 0.5.23 on, ends an argument's name at its first blank and forgets
the quote behind it: `{"First: "Ada"}` is what a client is told, which is no JSON, streamed or not. The checkpoints' own
encoder and parser take such names as they are.

Here recipe is given another character for a blank in a name, which is a blank again in what it tells. This runs in the
process that answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.instead import Instead

BLANK, INSTEAD = " ", "\U000f8f0b"  # instead: of a private plane, which nobody writes
MARK, NAME, END = "｜DSML｜", 'parameter name="', '"'
UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer says for bytes that are no character
NAMES = "_dsv4_sm120_names"


class Names:
    """Of one answer's tokens, handed over in their order: those with which the names of arguments have no blank.

    replaced: whether one had."""

    def __init__(self, tokenizer):
        self._tokenizer, self._mark = tokenizer, tokenizer.token_to_id(MARK)
        self._tag = None  # the text since the last mark, as long as it may be a name's
        self.replaced = False

    def without_blanks(self, token_ids) -> list[int]:
        return [made for token in token_ids for made in self._next(token)]

    def _next(self, token: int) -> list[int]:
        if token == self._mark:
            self._tag = ""
            return [token]
        if self._tag is None:
            return [token]
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        before, self._tag = self._tag, self._tag + text
        if not (self._tag.startswith(NAME) or NAME.startswith(self._tag)):
            self._tag = None
            return [token]
        start, end = max(len(NAME) - len(before), 0), len(text)
        if END in self._tag[len(NAME) :]:
            end = len(NAME) + self._tag[len(NAME) :].index(END) - len(before)
            self._tag = None
        name = text[start:end]
        if BLANK not in name or UNKNOWN in text:
            return [token]
        self.replaced = True
        made = text[:start] + name.replace(BLANK, INSTEAD) + text[end:]
        return self._tokenizer.encode(made, add_special_tokens=False).ids


def replace_init(original: Callable) -> Callable:
    """For DeepSeekRecipeOutputParser.__init__(self, deepseek_recipe, *, thinking_stage, parse_tool_calls, ...)."""

    @functools.wraps(original)
    def __init__(self, deepseek_recipe, *, thinking_stage, parse_tool_calls, **more):
        original(self, deepseek_recipe, thinking_stage=thinking_stage, parse_tool_calls=parse_tool_calls, **more)
        if parse_tool_calls and models_served.has_served_card():
            names = Names(self._hf_tokenizer)
            setattr(self, NAMES, names)
            self._recipe = _handed_over(self._recipe, names)

    return __init__


def _handed_over(recipe, names: Names) -> Instead:
    """Recipe, with chunks of tokens whose names have no blank."""
    chunk = recipe.InferenceChunk

    def tokens(token_ids, *more, **named):
        as_they_are = more or named  # log-probabilities are told of the tokens one by one
        return chunk.tokens(token_ids if as_they_are else names.without_blanks(token_ids), *more, **named)

    return Instead(recipe, InferenceChunk=Instead(chunk, tokens=tokens))


def replace_deltas(original: Callable) -> Callable:
    """For DeepSeekRecipeOutputParser._deltas(self, chunks) -> what was read."""

    @functools.wraps(original)
    def _deltas(self, chunks):
        told = original(self, chunks)
        names = getattr(self, NAMES, None)
        if names is None or not names.replaced:
            return told
        calls = tuple(
            type(call)(index=call.index, arguments=call.arguments.replace(INSTEAD, BLANK), name=call.name)
            for call in told.tool_calls
        )
        thoughts, text = (words.replace(INSTEAD, BLANK) for words in (told.reasoning, told.content))
        return type(told)(reasoning=thoughts, content=text, tool_calls=calls)

    return _deltas
