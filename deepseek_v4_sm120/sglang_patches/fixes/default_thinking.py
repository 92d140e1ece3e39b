"""A server that thinks by default knows so when it reads the answers, too, and when it holds them to a grammar.

With SGLANG_DEFAULT_THINKING=1 SGLang opens the thoughts in the prompt (`<think>`) of every request that does not say
otherwise. Whether there are thoughts in front of the answer it decides at another place, which looks at the request
alone: there are none. So up to 0.5.22 the thoughts arrive as text, `</think>` among it; and in all releases a grammar
(`response_format`, `tool_choice` required or named, strict tools) holds from the first thought on: the JSON is written
in the thoughts' place, and the text is empty.

Over /v1/responses up to 0.5.16 a third place decides, by the parser alone. In 0.5.16 a reasoning effort, which Codex
asks for, opens the thoughts, too: there they are the text of each of its answers, and of the next prompt.

Here these places answer as the prompt was made. A request with a `task` has no thoughts in front. This runs in the
process that answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.scope import answers_for_ours

ENVIRON, PROTOCOL = "sglang.srt.environ", "sglang.srt.entrypoints.openai.protocol"


def replace_reasoning_of_request(original: Callable) -> Callable:
    """For OpenAIServingChat._get_reasoning_from_request(self, request) -> whether the answer begins with thoughts."""

    @functools.wraps(original)
    def _get_reasoning_from_request(self, request):
        told = original(self, request)
        if (
            told
            or not self.reasoning_parser
            or not answers_for_ours(self)
            or getattr(request, "task", None) is not None
        ):
            return told
        return asks_for_thoughts(request)

    return _get_reasoning_from_request


def replace_responses_thinking(original: Callable) -> Callable:
    """For OpenAIServingResponses._is_thinking_enabled_for_request(self, request) -> the same. The prompt is that of a
    chat request with its effort, which knows what the effort turns on."""

    @functools.wraps(original)
    def _is_thinking_enabled_for_request(self, request):
        told = original(self, request)
        if told or not self.reasoning_parser or not answers_for_ours(self):
            return told
        reasoning = request.reasoning
        effort = reasoning.effort if reasoning else None
        chat_request = importlib.import_module(PROTOCOL).ChatCompletionRequest
        messages = [{"role": "user", "content": ""}]
        return asks_for_thoughts(chat_request(model="", messages=messages, reasoning_effort=effort))

    return _is_thinking_enabled_for_request


def asks_for_thoughts(request) -> bool:
    """As the prompt is made: by the request, or by the server's environment."""
    asked = request.chat_template_kwargs or {}
    return bool(asked.get("thinking", importlib.import_module(ENVIRON).envs.SGLANG_DEFAULT_THINKING.get()))
