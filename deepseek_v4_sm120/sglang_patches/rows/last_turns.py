"""The rows of table.py for conversations: how they end, their pictures, and how often they are made tokens."""

from deepseek_v4_sm120.patching.contract import Parameters
from deepseek_v4_sm120.patching.spec import Patch
from deepseek_v4_sm120.sglang_patches.names import targets_of_fix
from deepseek_v4_sm120.sglang_patches.rows.http_server import CHAT, MESSAGES, OF_PROMPT, OPENAI, RECIPE, SINCE_RECIPE

_target, _pictures, _known = map(targets_of_fix, ("last_turns", "unseen_pictures", "known_turns"))
OF_RECIPE = Parameters(("self", "chat_encoding_spec", "tokenizer"))
RECIPE_ENCODER = "sglang.srt.parser.deepseek_recipe_renderer:DeepSeekRecipe"
OF_ENCODER = Parameters(("messages", "thinking_mode"), further="any")

LAST_TURNS = Patch(
    name="last_turns",
    why="a conversation that ends with a turn of the assistant's is read as if the user had said its words, without "
    "its thoughts and calls; over /v1/messages, where Anthropic's API goes on from them, too. What "
    "continue_final_message goes on from is among the thoughts up to 0.5.22, and with tools it is refused from 0.5.23 "
    "on; a grammar waits there for the end of thoughts that are closed",
    targets=(
        _target(f"{OPENAI}.encoding_dsv4:encode_messages", "encode", OF_ENCODER, "<0.5.23"),
        _target(
            f"{CHAT}._handle_last_assistant_message", "last", Parameters(("self", "messages", "request")), "<0.5.23"
        ),
        _target(f"{CHAT}._get_reasoning_from_request", "reasoning", Parameters(("self", "request"))),
        _target(
            f"{MESSAGES}._convert_to_chat_completion_request", "convert", Parameters(("self", "anthropic_request"))
        ),
        _target(
            f"{RECIPE}.encode_messages",
            "encode_messages",
            Parameters(("self", "*", "messages", "request", "tools", "thinking", "image_data")),
            SINCE_RECIPE,
        ),
        _target(f"{RECIPE}._new_output_parser", "new_output_parser", Parameters(("self", "request")), SINCE_RECIPE),
    ),
    retire="when SGLang leaves such turns as they are, and goes on from them over /v1/messages",
)

UNSEEN_PICTURES = Patch(
    name="unseen_pictures",
    why="a request with a picture is refused (400), and with it each later one of its conversation, so that an agent "
    "that has read one is at its end; up to 0.5.16 the picture is left out without a word. DeepSeek's own conversion "
    "writes [Unsupported Image]",
    targets=(
        _pictures(f"{CHAT}._apply_jinja_template", "apply_template", OF_PROMPT, "<0.5.23"),
        _pictures(f"{CHAT}._validate_media_content", "validate", Parameters(("self", "request")), ">=0.5.17,<0.6"),
    ),
    retire="when SGLang hands pictures to deepseek-recipe whatever the model",
)

KNOWN_TURNS = Patch(
    name="known_turns",
    why="the whole conversation is made tokens anew with each of its requests, an agent's 200,000 behind each call of "
    "a tool: half a second of a core, up to 0.5.21 in the loop that answers over HTTP, where all streams wait",
    targets=(
        _known(f"{CHAT}._apply_jinja_template", "apply_template", OF_PROMPT, "<0.5.23"),
        _known(f"{RECIPE_ENCODER}.__init__", "init", OF_RECIPE, SINCE_RECIPE),
    ),
    retire="when SGLang makes tokens of what is new in a conversation alone",
)
