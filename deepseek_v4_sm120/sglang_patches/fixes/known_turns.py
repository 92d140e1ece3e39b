"""A conversation's turns are made tokens once, not with each of its requests.

A client sends the whole conversation with every turn, and SGLang makes all of it tokens anew, up to 0.5.21 (over
/v1/responses still) in the loop that answers over HTTP: of an agent's 200,000 tokens that takes half a second of a
core, behind each call of a tool, for a turn whose prompt is in the prefix cache but for a few hundred tokens; and all
streams stand still meanwhile. No thread of SGLang's is known.

A tokenizer looks for its added tokens first, and makes what is between them tokens by itself. So a prompt can be cut in
front of `<｜User｜>` and `<｜Assistant｜>`, which are such tokens, and its tokens are those of its pieces, one behind
the other. Here a piece's tokens are kept by its text; those used last stay. deepseek-recipe (0.5.23) takes what a
message says for plain text, whatever mark it spells: there a piece is known by where its marks are, too, and what is
between them is made tokens by the checkpoint's tokenizer without the added ones. This runs in the process that answers
over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import sys
import threading
from array import array
from collections.abc import Callable, Iterable

from deepseek_v4_sm120.sglang_patches.instead import Instead
from deepseek_v4_sm120.sglang_patches.scope import ENCODING, answers_for_ours, is_our_encoding

MARKS = ("<｜User｜>", "<｜Assistant｜>")  # of which a prompt of several turns has one at least for each
_MARK = re.compile("<｜(?:User|Assistant)｜>")
KEPT_BYTES = 64 << 20  # of texts and tokens: some 4 million tokens of English
KNOWN = "_dsv4_sm120_known_turns"
ASKED = ("", "a", " a", "a  ", "\n", " \n\na", "é日")  # in front of a mark and behind it


def replace_apply_template(original: Callable) -> Callable:
    """For OpenAIServingChat._apply_jinja_template(self, request, tools, is_multimodal), which asks its tokenizer
    manager's tokenizer for the tokens of the prompt's text."""

    @functools.wraps(original)
    def _apply_jinja_template(self, request, tools, is_multimodal):
        if answers_for_ours(self):
            manager = self.tokenizer_manager
            known = getattr(manager, KNOWN, None)
            if known is None:
                setattr(manager, KNOWN, known := KnownTexts(manager.tokenizer))
            self = copy.copy(self)
            self.tokenizer_manager = Instead(manager, tokenizer=known)
        return original(self, request, tools, is_multimodal)

    return _apply_jinja_template


def replace_init(original: Callable) -> Callable:
    """For DeepSeekRecipe.__init__(self, chat_encoding_spec, tokenizer), whose _encoding has a conversation's tokens."""

    @functools.wraps(original)
    def __init__(self, chat_encoding_spec, tokenizer):
        original(self, chat_encoding_spec, tokenizer)
        if chat_encoding_spec == ENCODING:
            self._encoding = KnownConversations(self._encoding, tokenizer)
            if is_our_encoding(chat_encoding_spec):  # a second's work, before the server answers
                self._encoding.plain = without_added(tokenizer)

    return __init__


class Pieces:
    """The tokens of texts that were asked for last."""

    def __init__(self):
        self.known, self.bytes, self.lock = {}, 0, threading.Lock()  # a key's (tokens, bytes as they were counted)

    def tokens(self, key, make: Callable[[], Iterable[int] | None]) -> array | None:
        """make: -> the tokens of `key`, a text or a tuple that begins with one; None where they are not to be known."""
        with self.lock:
            found = self.known.pop(key, None)
            if found is not None:
                self.known[key] = found
                return found[0]
        made = make()
        if made is None:
            return None
        found = array("i", made)
        with self.lock:
            if key not in self.known:
                # not counted again where it goes: a text is larger once somebody has asked Python for its UTF-8
                size = self.size(key, found)
                self.known[key] = found, size
                self.bytes += size
            while self.bytes > KEPT_BYTES:
                _, size = self.known.pop(next(iter(self.known)))
                self.bytes -= size
        return found

    @staticmethod
    def size(key, tokens: array) -> int:
        text, places = (key, ()) if isinstance(key, str) else key
        return sys.getsizeof(text) + sys.getsizeof(places) + sys.getsizeof(tokens)


def cut(text: str) -> list[tuple[int, int]]:
    """Where the pieces of a prompt begin and end."""
    starts = [0, *(found.start() for found in _MARK.finditer(text) if found.start())]
    return list(zip(starts, [*starts[1:], len(text)], strict=True))


class KnownTexts(Instead):
    """A tokenizer that makes a prompt's pieces tokens once."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer, pieces=Pieces(), is_cut=None)

    def encode(self, text, *args, **more):
        if args or more or not isinstance(text, str):
            return self._original.encode(text, *args, **more)
        if self.is_cut is None:
            self.is_cut = may_cut(self._original.encode)
        if not self.is_cut:
            return self._original.encode(text)
        found = []
        for start, end in cut(text):
            piece = text[start:end]
            found.extend(self.pieces.tokens(piece, functools.partial(self._original.encode, piece)))
        return found


def may_cut(encode: Callable[[str], list[int]]) -> bool:
    """Whether a text's tokens are those of what is in front of a mark, and of what begins with it: not where a
    tokenizer adds tokens of its own, or takes blanks around a mark for a part of it."""
    marks = [encode(mark) for mark in MARKS]
    ways = [(front, mark, behind) for front in ASKED for mark in MARKS for behind in ASKED]
    whole = all(encode(front + mark + behind) == encode(front) + encode(mark + behind) for front, mark, behind in ways)
    return whole and encode("") == [] and all(len(tokens) == 1 for tokens in marks)


class KnownConversations(Instead):
    """deepseek-recipe's encoding, which makes a prompt's pieces tokens once. tokenizer: the `tokenizers.Tokenizer`
    from which recipe has its own."""

    def __init__(self, encoding, tokenizer):
        super().__init__(encoding, tokenizer=tokenizer, pieces=Pieces(), plain=None)

    def encode(self, conversation):
        if not is_our_encoding(ENCODING):
            return self._original.encode(conversation)
        if self.plain is None:
            self.plain = without_added(self.tokenizer)
        rendered = self._original.render_conversation(conversation)
        found = self.tokens(rendered.prompt, rendered.special_ranges)
        return self._original.encode(conversation) if found is None else found

    def tokens(self, prompt: str, marks: list[tuple[int, int]]) -> list[int] | None:
        """marks: where in the prompt recipe's own are. None where one of them is no token."""
        starts = [0, *(start for start, end in marks if start and prompt[start:end] in MARKS), len(prompt)]
        found, at = [], 0
        for start, end in zip(starts, starts[1:], strict=False):
            places = []
            while at < len(marks) and marks[at][0] < end:
                places += [place - start for place in marks[at]]
                at += 1
            key = (prompt[start:end], tuple(places))
            tokens = self.pieces.tokens(key, functools.partial(self.made, *key))
            if tokens is None:
                return None
            found.extend(tokens)
        return found

    def made(self, text: str, places: tuple[int, ...]) -> list[int] | None:
        """The tokens of a piece, with marks at these places."""
        found, behind = [], 0
        for start, end in zip(places[::2], places[1::2], strict=True):
            mark = self.tokenizer.token_to_id(text[start:end])
            if mark is None:
                return None
            found += [*self.plain.encode(text[behind:start], add_special_tokens=False).ids, mark]
            behind = end
        return found + self.plain.encode(text[behind:], add_special_tokens=False).ids


def without_added(tokenizer):
    """A tokenizer to which a mark is a text as any other."""
    return type(tokenizer).from_str(json.dumps(json.loads(tokenizer.to_str()) | {"added_tokens": []}))
