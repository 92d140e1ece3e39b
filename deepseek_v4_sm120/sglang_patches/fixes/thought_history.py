"""Thoughts of earlier turns that come back over /v1/messages are thoughts in the prompt, too.

A client of Anthropic's API (Claude Code, for one) sends the thoughts of each earlier turn with it. From 0.5.14, which
answers with thoughts there, to 0.5.18 SGLang writes them with their marks into the turn's text; DeepSeek-V4's encoder
closes the turn's thoughts, of which it knows none, in front of that. So each turn says `</think><think>` and the
thoughts as text: a form that the model was never shown, and that it may learn from the conversation. From 0.5.19 on
they are handed over as the turn's thoughts (sglang #35480), as the chat API has always done.

Here the request is read without them, and each turn is given its own. This runs in the process that answers over HTTP,
where no GPU is asked.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import answers_for_ours

KIND, ROLE = "thinking", "assistant"


def replace_convert(original: Callable) -> Callable:
    """For AnthropicServing._convert_to_chat_completion_request(self, anthropic_request) -> the chat API's request, with
    one message for each of the assistant's."""

    @functools.wraps(original)
    def _convert_to_chat_completion_request(self, anthropic_request):
        of_turns = [_thoughts(turn) for turn in anthropic_request.messages if turn.role == ROLE]
        if not any(of_turns) or not answers_for_ours(self.openai_serving_chat):
            return original(self, anthropic_request)
        without = copy.copy(anthropic_request)
        without.messages = [_without_thoughts(turn) for turn in anthropic_request.messages]
        made = original(self, without)
        turns = [message for message in made.messages if message.role == ROLE]
        if len(turns) != len(of_turns):
            return original(self, anthropic_request)
        for turn, thoughts in zip(turns, of_turns, strict=True):
            turn.reasoning_content = thoughts or None
        return made

    return _convert_to_chat_completion_request


def _thoughts(turn) -> str:
    blocks = [] if isinstance(turn.content, str) else turn.content
    return "\n".join(block.thinking for block in blocks if block.type == KIND and block.thinking)


def _without_thoughts(turn):
    if turn.role != ROLE or isinstance(turn.content, str):
        return turn
    made = copy.copy(turn)
    made.content = [block for block in turn.content if block.type != KIND]
    return made
