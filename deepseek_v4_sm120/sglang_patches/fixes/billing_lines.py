"""The line with which Claude Code begins its system prompt is in no prompt: it is another one in each request.

`x-anthropic-billing-header: cc_version=...; cc_entrypoint=cli; cch=fa690;` is the first text that Claude Code (from
2.1.36 on) sends over /v1/messages, for Anthropic's books. Its last word changes with every request. SGLang writes it at
the head of the prompt, so that the prefix cache ends there: each turn's whole conversation is read anew (sglang #21064;
vLLM and llama.cpp leave it out).

Here such a line is left out where a system prompt's text begins with it. This runs in the process that answers over
HTTP, where no GPU is asked.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import answers_for_ours

LINE = "x-anthropic-billing-header:"


def replace_convert(original: Callable) -> Callable:
    """For AnthropicServing._convert_to_chat_completion_request(self, anthropic_request) -> the chat API's request."""

    @functools.wraps(original)
    def _convert_to_chat_completion_request(self, anthropic_request):
        system = without_line(anthropic_request.system)
        if system is not anthropic_request.system and answers_for_ours(self.openai_serving_chat):
            anthropic_request = copy.copy(anthropic_request)
            anthropic_request.system = system
        return original(self, anthropic_request)

    return _convert_to_chat_completion_request


def without_line(system):
    """A system prompt, words or blocks, without that line; the very same where it has none."""
    if isinstance(system, str):
        return system.partition("\n")[2] if system.startswith(LINE) else system
    if not any(_begins_with_it(block) for block in system or ()):
        return system
    return [one for one in map(_block_without_line, system) if one is not None]


def _begins_with_it(block) -> bool:
    return block.type == "text" and (block.text or "").startswith(LINE)


def _block_without_line(block):
    """None where nothing else is in it."""
    if not _begins_with_it(block):
        return block
    rest = block.text.partition("\n")[2]
    if not rest:
        return None
    made = copy.copy(block)
    made.text = rest
    return made
