"""A conversation that ends with a turn of the assistant's: the turn stays what it is, or the answer goes on from it.

SGLang reads such a turn as if the user had said its words, and forgets its thoughts and calls (0.5.12 to 0.5.23).

- Over /v1/messages (Anthropic's API) the answer goes on from the last turn's text and does not repeat it, by that API's
  documentation: who writes `{` there is to get the rest of an object. So it does here, unless the turn has calls.
- Over the other APIs the turn stands, with its thoughts and calls and its end, and another one is asked for, as
  deepseek-recipe, DeepSeek's own conversion, has it, and as any other turn of the conversation does. recipe, which
  makes the prompts from 0.5.23 on, refuses calls without a result there as elsewhere.
- `continue_final_message` goes on from a text behind closed thoughts, as recipe has it: the turn's own, or none. Up to
  0.5.22 SGLang writes the text into the thoughts, and tells all of the answer as thoughts; later it does the second of
  a text in parts. From 0.5.23 on recipe refuses to go on where a request has tools or calls, as agents' have: here it
  writes the turn with its end, which is cut off. In all releases a grammar (response_format, a required call) waits
  for the end of thoughts that are closed already, and holds nothing. A turn of thoughts alone goes on in them. Text
  that has the marks itself (`<think>`, `</think>`) stays SGLang's up to 0.5.22.

This runs in the process that answers over HTTP, where no GPU is asked.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.fixes.default_thinking import asks_for_thoughts
from deepseek_v4_sm120.sglang_patches.prompt_messages import text_part
from deepseek_v4_sm120.sglang_patches.scope import answers_for_ours, is_our_encoding

ASSISTANT, TOOL, TEXT, BETWEEN = "assistant", "tool", "text", "\n\n"  # as recipe puts a text's parts together
END, MARK, OPEN, CLOSE, THINKING = "<｜end▁of▁sentence｜>", "<｜Assistant｜>", "<think>", "</think>", "thinking"


def replace_convert(original: Callable) -> Callable:
    """For AnthropicServing._convert_to_chat_completion_request(self, anthropic_request) -> the chat API's request."""

    @functools.wraps(original)
    def _convert_to_chat_completion_request(self, anthropic_request):
        made = original(self, anthropic_request)
        ends_so = anthropic_request.messages and anthropic_request.messages[-1].role == ASSISTANT
        if not ends_so or not answers_for_ours(self.openai_serving_chat):
            return made
        turn = made.messages[-1]
        if turn.role == ASSISTANT and not turn.tool_calls and _text(turn) is not None:
            turn.content = _text(turn)
            made.continue_final_message = True
        return made

    return _convert_to_chat_completion_request


def replace_last(original: Callable) -> Callable:
    """For OpenAIServingChat._handle_last_assistant_message(self, messages, request) -> the messages for the encoder,
    and the text that is put behind its prompt."""

    @functools.wraps(original)
    def _handle_last_assistant_message(self, messages, request):
        last = messages[-1] if messages else {}
        if last.get("role") != ASSISTANT or _has_task(request) or not answers_for_ours(self):
            return original(self, messages, request)
        if not request.continue_final_message:
            return messages, None
        text = last["content"]
        if not isinstance(text, str) or OPEN in text or CLOSE in text:
            return original(self, messages, request)
        if asks_for_thoughts(request):
            text = (last.get("reasoning_content") or "") + (CLOSE + text if text else "")
        return messages[:-1] or [{"role": "system", "content": ""}], text

    return _handle_last_assistant_message


def replace_encode(original: Callable) -> Callable:
    """For encode_messages(messages, thinking_mode, ..) of DeepSeek-V4's encoder, which asks for no answer behind a turn
    of the assistant's."""

    @functools.wraps(original)
    def encode_messages(messages, thinking_mode, *args, **more):
        prompt = original(messages, thinking_mode, *args, **more)
        ends_so = messages and messages[-1].get("role") == ASSISTANT
        if not ends_so or not prompt.endswith(END) or not models_served.has_served_card():
            return prompt
        return prompt + MARK + (OPEN if thinking_mode == THINKING else CLOSE)

    return encode_messages


def replace_reasoning(original: Callable) -> Callable:
    """For OpenAIServingChat._get_reasoning_from_request(self, request) -> whether the answer begins with thoughts."""

    @functools.wraps(original)
    def _get_reasoning_from_request(self, request):
        told = original(self, request)
        if not told or not request.continue_final_message or _has_task(request) or not answers_for_ours(self):
            return told
        text = _last_text(request)
        return not text or (OPEN in text and CLOSE not in text)

    return _get_reasoning_from_request


def replace_encode_messages(original: Callable) -> Callable:
    """For DeepSeekRecipeChatEncodingAdapter.encode_messages(self, *, messages, request, tools, thinking, image_data) ->
    the prompt's tokens."""

    @functools.wraps(original)
    def encode_messages(self, *, messages, request, tools, thinking, image_data):
        more = {"messages": messages, "tools": tools, "thinking": thinking, "image_data": image_data}
        if not is_our_encoding(self._spec) or _has_task(request) or _last_text(request) is None:
            return original(self, request=request, **more)
        if not request.continue_final_message:
            return original(self, request=_in_parts(request), **more)
        if not _is_refused(request, tools):
            return original(self, request=_in_one(request), **more)
        text, ends = _last_text(request), copy.copy(request)
        ends.continue_final_message = False
        if not text and not tools:
            ends.messages = ends.messages[:-1]
            return original(self, request=ends, **more)
        tokens = original(self, request=_in_parts(ends), **more)
        behind = self.deepseek_recipe.encode_text(_behind(text, thinking))
        assert tokens[-len(behind) :] == behind, "deepseek-recipe ends a turn in another way"
        return tokens[: -len(behind)]

    return encode_messages


def _is_refused(request, tools) -> bool:
    """Whether recipe goes on from no text here: not where there are tools or calls."""
    return bool(tools) or any(m.role == TOOL or getattr(m, "tool_calls", None) for m in request.messages)


def _behind(text: str, thinking: bool) -> str:
    """What recipe writes behind a last turn that has ended; behind one of thoughts alone, that they have, too."""
    return (CLOSE if thinking and not text else "") + END + MARK + (OPEN if thinking else CLOSE)


def replace_new_output_parser(original: Callable) -> Callable:
    """For DeepSeekRecipeChatEncodingAdapter._new_output_parser(self, request) -> what reads an answer of the request's;
    it looks for a text to go on from that is no list."""

    @functools.wraps(original)
    def _new_output_parser(self, request):
        if request.continue_final_message and is_our_encoding(self._spec) and _last_text(request) is not None:
            request = _in_one(request)
        return original(self, request)

    return _new_output_parser


def _has_task(request) -> bool:
    """A task of DeepSeek's own has another end of the prompt."""
    return getattr(request, "task", None) is not None


def _last_text(request) -> str | None:
    """That of a last turn that is the assistant's."""
    turn = request.messages[-1] if request.messages else None
    return _text(turn) if turn is not None and turn.role == ASSISTANT else None


def _text(turn) -> str | None:
    """None: something else is in it."""
    parts = turn.content
    if not isinstance(parts, list):
        return parts or ""
    return BETWEEN.join(part.text for part in parts) if all(part.type == TEXT for part in parts) else None


def _in_one(request):
    return _with_content(request, _last_text(request))


def _in_parts(request):
    """SGLang takes a text in one for the user's, and leaves a list as it is."""
    if isinstance(request.messages[-1].content, list):
        return request
    return _with_content(request, [text_part(_last_text(request))])


def _with_content(request, content):
    request, turn = copy.copy(request), copy.copy(request.messages[-1])
    turn.content = content
    request.messages = [*request.messages[:-1], turn]
    return request
