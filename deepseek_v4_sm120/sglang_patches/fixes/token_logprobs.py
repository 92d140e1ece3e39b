"""The log-probabilities of a chat answer are each token's own, streamed or not, and its bytes are the token's.

Up to 0.5.20 a stream whose step brings several tokens, as with speculation, tells the first token's alternatives
(`top_logprobs`) for all of them, and of alternatives whose text is the same one alone: those that are pieces of a
character are all U+FFFD as text. Their `bytes`, from which OpenAI's API has one put characters together again, are
U+FFFD's in all releases: 0.5.21 and later have a table for it, but ask the vocabulary's first tokens whether it holds,
and DeepSeek's first ones are its marks, which are not written in bytes.

Here alternatives are taken token by token, and bytes from the token itself. This runs in the process that answers over
HTTP, where no GPU is asked.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import answers_for_ours

PROTOCOL = "sglang.srt.entrypoints.openai.protocol"
UNKNOWN = "\ufffd"
PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that byte-level vocabularies write as themselves


def replace_response(original: Callable) -> Callable:
    """For OpenAIServingChat._process_response_logprobs(self, ret_item) -> those of an answer that is not streamed."""

    @functools.wraps(original)
    def _process_response_logprobs(self, ret_item):
        told = original(self, ret_item)
        return as_they_are(self, told, ret_item["meta_info"], 0) if answers_for_ours(self) else told

    return _process_response_logprobs


def replace_streaming(original: Callable) -> Callable:
    """For OpenAIServingChat._process_streaming_logprobs(self, content, n_prev_token, total_output_logprobs) -> those of
    a step, of an answer's so far or (--incremental-streaming-output) the step's alone."""

    @functools.wraps(original)
    def _process_streaming_logprobs(self, content, n_prev_token, total_output_logprobs):
        told = original(self, content, n_prev_token, total_output_logprobs)
        if not answers_for_ours(self):
            return told
        of_step = len(content["meta_info"]["output_token_logprobs"]) == len(told.content)
        return as_they_are(self, told, content["meta_info"], 0 if of_step else n_prev_token)

    return _process_streaming_logprobs


def as_they_are(serving, told, given: dict, first: int):
    """What is told of the tokens from `first` on, from what is given: (log-probability, token, text) each."""
    alternative = importlib.import_module(PROTOCOL).TopLogprob
    tokens, rows = given["output_token_logprobs"][first:], (given.get("output_top_logprobs") or [])[first:]
    tokenizer = serving.tokenizer_manager.tokenizer
    for place, (one, (_, token, _)) in enumerate(zip(told.content, tokens, strict=False)):
        one.bytes = bytes_of(tokenizer, token, one.token)
        if place < len(rows):
            one.top_logprobs = [
                alternative(token=text or "", bytes=bytes_of(tokenizer, token, text or ""), logprob=logprob)
                for logprob, token, text in rows[place] or ()
            ]
    return told


def bytes_of(tokenizer, token: int, text: str) -> list[int]:
    if UNKNOWN in text:
        letters, table = tokenizer.convert_ids_to_tokens(token), byte_of()
        if letters and all(letter in table for letter in letters):
            return [table[letter] for letter in letters]
    return list(text.encode())


@functools.cache
def byte_of() -> dict[str, int]:
    """letter -> byte, of vocabularies whose tokens are bytes: what is no letter by itself has one from 256 on."""
    others = [byte for byte in range(256) if byte not in PLAIN]
    return {chr(byte): byte for byte in PLAIN} | {chr(256 + place): byte for place, byte in enumerate(others)}
