"""Where each release has what the rows of the processes that answer over HTTP replace: patch -> its last target."""

from deepseek_v4_sm120.sglang_patches.rows import first_uses, grammars
from deepseek_v4_sm120.sglang_patches.rows import http_server as http
from deepseek_v4_sm120.sglang_patches.rows.last_turns import RECIPE_ENCODER
from tests.patching.wheels import since

EVERYWHERE = {
    **dict.fromkeys(("billing_lines", "stop_sequences"), http.MESSAGES),
    **dict.fromkeys(("default_thinking", "token_logprobs"), http.CHAT),
    **dict.fromkeys(("thought_counts", "unknown_tokens", "fatal_requests"), http.TOKENIZER_MANAGER),
    **dict.fromkeys(("sample_seeds", "token_texts"), http.TOKENIZER_MANAGER),
    "whole_characters": http.FIND_PRINTABLE,
    "max_output_tokens": http.RESPONSES_REQUEST,
    **dict.fromkeys(("response_errors", "stored_responses"), http.RESPONSES),
    "empty_stops": http.SAMPLING,
    "unseen_pictures": http.CHAT,
    "known_schemas": http.VALIDATOR,
    "scrapes_aside": http.ADD_METRICS,
    "plain_scaling": first_uses.REPETITION,
}
LAST_OF_TURNS = {False: http.MESSAGES, True: http.RECIPE}  # since recipe
LAST_OF_KNOWN = {False: http.CHAT, True: RECIPE_ENCODER}
LAST_OF_CALLS = {False: http.CHAT, True: http.CUSTOM_INPUT}  # since a call is told when it is whole
BETWEEN = {  # where, from a release on, before another
    "tool_strings": (http.PARSE, "0.5.12", "0.5.23"),
    "think_marks": (http.READER, "0.5.12", "0.5.23"),
    "developer_messages": (http.CHAT, "0.5.12", "0.5.23"),
    "unchosen_tools": (http.CHAT, "0.5.12", "0.5.22"),
    "blanks_before_calls": (http.CHAT, "0.5.12", "0.5.21"),
    **dict.fromkeys(("tool_fields", "assistant_marks"), (f"{http.OPENAI}.encoding_dsv4", "0.5.12", "0.5.23")),
    "text_parts": (http.CHAT, "0.5.12", "0.5.23"),
    "cut_arguments": (http.CHAT, "0.5.14", "0.5.23"),
    "echoed_items": (http.RESPONSES, "0.5.14", "0.5.18"),
    "first_requests": (first_uses.HTTP_SERVER, "0.5.14", "0.6"),
    "developer_items": (http.RESPONSES, "0.5.20", "0.6"),
    "system_reminders": (http.MESSAGES, "0.5.15", "0.6"),
    "thought_history": (http.MESSAGES, "0.5.14", "0.5.19"),
    "disconnects": (http.TOKENIZER_MANAGER, "0.5.18", "0.5.20"),
    "sampled_states": (http.TOKENIZER_MANAGER, "0.5.18", "0.5.22"),
    "prompts_aside": (http.MESSAGES, "0.5.22", "0.6"),
    "own_names": (grammars.TAGS, "0.5.13", "0.6"),
    "turn_phases": (http.RESPONSES, "0.5.20", "0.6"),
    **dict.fromkeys(("effort_levels", "json_answers", "call_order", "strict_schemas"), (http.RECIPE, "0.5.23", "0.6")),
    "tool_namespaces": (http.RESPONSES, "0.5.23", "0.6"),
    **dict.fromkeys(("cut_characters", "argument_names"), (http.RECIPE_READER, "0.5.23", "0.6")),
}


def expected(version: str) -> dict[str, str]:
    there = {name: where for name, (where, *ends) in BETWEEN.items() if [since(version, end) for end in ends] == [1, 0]}
    has_recipe = since(version, "0.5.23")
    of_turns = {"last_turns": LAST_OF_TURNS[has_recipe], "known_turns": LAST_OF_KNOWN[has_recipe]}
    both = {"calls_or_answers": http.RESPONSES_REQUEST if since(version, "0.5.18") else http.CHAT}
    both = both if since(version, "0.5.13") else {}
    return EVERYWHERE | there | both | of_turns | {"long_calls": LAST_OF_CALLS[since(version, "0.5.21")]}
