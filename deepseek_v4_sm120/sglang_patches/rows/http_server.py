"""The rows of table.py that are the processes' that answer over HTTP: prompts, answers, and clients that go away."""

from deepseek_v4_sm120.patching.contract import Bound, Parameters
from deepseek_v4_sm120.patching.spec import Patch
from deepseek_v4_sm120.sglang_patches.names import targets_of_fix

PARSE = "sglang.srt.function_call.deepseekv32_detector:DeepSeekV32Detector._parse_parameters_from_xml"
WHOLE = ("self", "invoke_content")
SINCE_RECIPE = ">=0.5.23,<0.6"

OPENAI = "sglang.srt.entrypoints.openai"
CHAT = f"{OPENAI}.serving_chat:OpenAIServingChat"
MESSAGES = "sglang.srt.entrypoints.anthropic.serving:AnthropicServing"
PROCESS = f"{CHAT}._process_tool_call_stream"
OF_PROMPT = Parameters(("self", "request", "tools", "is_multimodal"))
RECIPE = f"{OPENAI}.serving_deepseek_recipe:DeepSeekRecipeChatEncodingAdapter"
READER = "sglang.srt.parser.reasoning_parser:ReasoningParser"
RECIPE_READER = "sglang.srt.parser.deepseek_recipe_output:DeepSeekRecipeOutputParser"
RESPONSES = f"{OPENAI}.serving_responses:OpenAIServingResponses"
RESPONSES_REQUEST = f"{OPENAI}.protocol:ResponsesRequest"
OF_ENCODE = Parameters(("self", "body", "*", "effort", "task=None", "image_urls=None"))
OF_INPUT, OF_TRANSLATED = ("self", "request", "prev_response=None"), ("*", "tool_adapter=None")
TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager:TokenizerManager"
SAMPLING = "sglang.srt.sampling.sampling_params:SamplingParams"
VALIDATOR = f"{OPENAI}.serving_chat:Draft202012Validator"
ADD_METRICS = "sglang.srt.utils.common:add_prometheus_middleware"
CUSTOM_INPUT = f"{OPENAI}.responses_adapters:decode_custom_tool_input_prefix"
FIND_PRINTABLE = "sglang.srt.managers.detokenizer_manager:find_printable_text"

_tool_strings, _effort_levels, _think_marks, _cut_characters, _turn_phases, _stop_sequences = map(
    targets_of_fix, ("tool_strings", "effort_levels", "think_marks", "cut_characters", "turn_phases", "stop_sequences")
)
_token_logprobs, _prompts_aside, _sample_seeds, _argument_names, _fatal_requests = map(
    targets_of_fix, ("token_logprobs", "prompts_aside", "sample_seeds", "argument_names", "fatal_requests")
)

TOOL_STRINGS = Patch(
    name="tool_strings",
    why="the parser of tool calls strips the strings of their arguments: indentation in front and line ends behind are "
    "lost, so that an editor does not find what it is to replace, and files end without a line end. DeepSeek's own "
    "parser and prompt take them as is, as do vLLM and SGLang's parser of DeepSeek-V4.1 (frontend-crates #247); a "
    "stream that max_tokens ends within a call tells the call as a whole one, and up to 0.5.15 one whose last call has "
    "no arguments tells these as no JSON",
    targets=(
        _tool_strings(
            f"{CHAT}._check_for_unstreamed_tool_args",
            "check_unstreamed",
            Parameters(("self", "parser", "content", "request", "index")),
            ">=0.5.16,<0.5.21",
        ),
        _tool_strings(
            f"{CHAT}._check_for_unstreamed_tool_args",
            "check_quoted",
            Parameters(("self", "parser", "content", "request", "index")),
            "<0.5.16",
        ),
        _tool_strings(PARSE, "parse_partial_parameters", Parameters((*WHOLE, "allow_partial=False")), "<0.5.21"),
        _tool_strings(PARSE, "parse_parameters", Parameters(WHOLE), ">=0.5.21,<0.5.23"),
    ),
    absent="from 0.5.23 on DeepSeek's own parser reads the answers (deepseek-recipe)",
    retire="with SGLang 0.5.22",
)

DISCONNECTS = Patch(
    name="disconnects",
    why="a request whose client leaves the stream is generated to its max_tokens, and holds a request slot until then: "
    "its state is dropped before the abort, which then finds none (sglang #36333, #37833; #35255 mended it)",
    targets=(
        targets_of_fix("disconnects")(
            f"{TOKENIZER_MANAGER}._discard_pending_req_states",
            "discard",
            Parameters(("self", "obj")),
            ">=0.5.18,<0.5.20",
        ),
    ),
    absent="SGLang ends them itself",
    retire="with SGLang 0.5.19",
)

DEFAULT_THINKING = Patch(
    name="default_thinking",
    why="with SGLANG_DEFAULT_THINKING=1 prompts open the thoughts, and what reads the answers does not know of it: up "
    "to 0.5.22 thoughts arrive as text, and in all releases response_format and a required tool call hold the thoughts "
    "to their grammar, so that the answer stays empty; so do thoughts that a reasoning effort asks for over "
    "/v1/responses in 0.5.16",
    targets=(
        targets_of_fix("default_thinking")(
            f"{RESPONSES}._is_thinking_enabled_for_request",
            "responses_thinking",
            Parameters(("self", "request")),
            ">=0.5.14,<0.5.17",
        ),
        targets_of_fix("default_thinking")(
            f"{CHAT}._get_reasoning_from_request", "reasoning_of_request", Parameters(("self", "request"))
        ),
    ),
    retire="when SGLang decides at one place whether an answer begins with thoughts",
)

DEVELOPER_MESSAGES = Patch(
    name="developer_messages",
    why="messages of the role developer, in which OpenAI's newer clients give their instructions, are left out of "
    "prompts with thoughts and without tools, and are the user's in all others",
    targets=(
        targets_of_fix("developer_messages")(f"{CHAT}._apply_jinja_template", "apply_template", OF_PROMPT, "<0.5.23"),
    ),
    absent="SGLang takes them for the system's",
    retire="with SGLang 0.5.22",
)

UNCHOSEN_TOOLS = Patch(
    name="unchosen_tools",
    why='tools are in the prompt though tool_choice is "none", where nobody reads calls: the markup of a call is the '
    "text of the answer (sglang #35736)",
    targets=(
        targets_of_fix("unchosen_tools")(f"{CHAT}._apply_jinja_template", "apply_template", OF_PROMPT, "<0.5.22"),
    ),
    absent="SGLang leaves them out itself",
    retire="with SGLang 0.5.21",
)

TOOL_FIELDS = Patch(
    name="tool_fields",
    why="tools are in the prompt with the fields of SGLang's own record: the description in front of the name, what "
    'was left out as null, and "strict": false behind all, where DeepSeek\'s own service writes name, description and '
    "parameters",
    targets=(
        targets_of_fix("tool_fields")(
            f"{OPENAI}.encoding_dsv4:render_tools", "render_tools", Parameters(("tools",)), "<0.5.23"
        ),
    ),
    absent="from 0.5.23 on DeepSeek's own encoder writes the prompt (deepseek-recipe)",
    retire="with SGLang 0.5.22",
)

TEXT_PARTS = Patch(
    name="text_parts",
    why="the parts of a message's text are put together by a blank, so that a reminder or a file goes on in the last "
    "line of the one before; DeepSeek's encoder has an empty line between them",
    targets=(targets_of_fix("text_parts")(f"{CHAT}._apply_jinja_template", "apply_template", OF_PROMPT, "<0.5.23"),),
    absent="from 0.5.23 on DeepSeek's own encoder puts them together (deepseek-recipe)",
    retire="with SGLang 0.5.22",
)

ASSISTANT_MARKS = Patch(
    name="assistant_marks",
    why="a prompt that ends with the system's message asks for no answer, so that the model goes on with its text; and "
    "a turn of the assistant's behind the system's, or behind another one, has no mark. DeepSeek's own conversion has "
    "it in front of each",
    targets=(
        targets_of_fix("assistant_marks")(
            f"{OPENAI}.encoding_dsv4:render_message",
            "render_message",
            Parameters(("index", "messages", "thinking_mode", "drop_thinking=True"), "any"),
            "<0.5.23",
        ),
    ),
    absent="from 0.5.23 on DeepSeek's own encoder writes the prompt (deepseek-recipe)",
    retire="with SGLang 0.5.22",
)

CUT_ARGUMENTS = Patch(
    name="cut_arguments",
    why="a call that comes back with arguments that are no JSON object, as one that max_tokens cut off, is refused "
    "with 400, and with it each later request of its conversation; DeepSeek's encoder writes what there is",
    targets=(
        targets_of_fix("cut_arguments")(
            f"{CHAT}._apply_jinja_template", "apply_template", OF_PROMPT, ">=0.5.14,<0.5.23"
        ),
    ),
    absent="up to 0.5.13, and from 0.5.23 on, they are written as DeepSeek's encoder has them",
    retire="with SGLang 0.5.22",
)

EFFORT_LEVELS = Patch(
    name="effort_levels",
    why="reasoning_effort has the levels of the checkpoints from 0731 on for all: the first ones think with their "
    "greatest effort where nothing is asked for, and read at max a text that they have never seen (0.5.18 to 0.5.22 "
    "tell the two apart, sglang #33140)",
    targets=(
        _effort_levels(
            f"{OPENAI}.chat_encoding_adapters:build_chat_encoding_adapter", "build", Parameters(("ctx",)), SINCE_RECIPE
        ),
        _effort_levels(f"{RECIPE}._encode", "encode", OF_ENCODE, SINCE_RECIPE),
    ),
    absent="up to 0.5.17 all have the first levels, which are wrong for 0731; 0.5.18 to 0.5.22 ask the checkpoint",
    retire="when SGLang asks the checkpoint again which levels it knows",
)

JSON_ANSWERS = Patch(
    name="json_answers",
    why="an answer to response_format whose schema is for a string, a number, or true and false arrives as blanks: "
    "deepseek-recipe keeps of it what is in braces or brackets",
    targets=(
        targets_of_fix("json_answers")(
            f"{RECIPE}._new_output_parser", "new_output_parser", Parameters(("self", "request")), SINCE_RECIPE
        ),
    ),
    absent="up to 0.5.22 nothing is taken out of JSON",
    retire="when deepseek-recipe keeps such answers",
)

THOUGHT_HISTORY = Patch(
    name="thought_history",
    why="thoughts of earlier turns that come over /v1/messages are written into the turns' text, behind thoughts that "
    "are closed already, so that the model reads marks where it has never seen them (sglang #35480 mended it)",
    targets=(
        targets_of_fix("thought_history")(
            f"{MESSAGES}._convert_to_chat_completion_request",
            "convert",
            Parameters(("self", "anthropic_request")),
            ">=0.5.14,<0.5.19",
        ),
    ),
    absent="before 0.5.14 there are no thoughts over /v1/messages, from 0.5.19 on they are the turns' own",
    retire="with SGLang 0.5.18",
)

THINK_MARKS = Patch(
    name="think_marks",
    why="a <think> in the text, or in the arguments of a call, is taken for the beginning of thoughts: what follows is "
    "among the thoughts, and the call is lost, or a part of it is told as a whole",
    targets=(
        _think_marks(f"{READER}.parse_non_stream", "parse_non_stream", Parameters(("self", "full_text")), "<0.5.23"),
        _think_marks(
            f"{READER}.parse_stream_chunk", "parse_stream_chunk", Parameters(("self", "chunk_text")), "<0.5.23"
        ),
    ),
    absent="from 0.5.23 on DeepSeek's own parser reads the answers (deepseek-recipe)",
    retire="with SGLang 0.5.22",
)

CUT_CHARACTERS = Patch(
    name="cut_characters",
    why="an answer that max_tokens ends within a character of several tokens arrives empty where it is not streamed, "
    "and without its last step where it is: deepseek-recipe waits for the rest of the character with all of the text; "
    "so does one that a stop ends behind such a character",
    targets=(
        _cut_characters(f"{RECIPE_READER}.feed", "feed", Parameters(("self", "token_ids")), SINCE_RECIPE),
        _cut_characters(
            f"{RECIPE_READER}.finish",
            "finish",
            Parameters(("self", "token_ids", "finish_reason", "*", "keep_matched_stop=False")),
            SINCE_RECIPE,
        ),
        _cut_characters(
            f"{RECIPE_READER}._cut_at_stop_string",
            "cut",
            Parameters(("self", "token_ids", "stop", "*", "keep_stop")),
            SINCE_RECIPE,
        ),
        _cut_characters(f"{RECIPE_READER}._release_pending_ids", "release", Parameters(("self",)), SINCE_RECIPE),
    ),
    absent="up to 0.5.22 the text itself is read",
    retire="when deepseek-recipe tells what is in front of such a character",
)

ARGUMENT_NAMES = Patch(
    name="argument_names",
    why='the arguments of a call are no JSON where the name of one has a blank ("First Name"): deepseek-recipe ends '
    "the name at the blank, and leaves out the quote behind it",
    targets=(
        _argument_names(
            f"{RECIPE_READER}.__init__",
            "init",
            Parameters(("self", "deepseek_recipe", "*", "thinking_stage", "parse_tool_calls"), further="any"),
            SINCE_RECIPE,
        ),
        _argument_names(f"{RECIPE_READER}._deltas", "deltas", Parameters(("self", "chunks")), SINCE_RECIPE),
    ),
    absent="up to 0.5.22 SGLang reads the calls itself, and the names as they are",
    retire="when deepseek-recipe reads such names",
)

BLANKS_BEFORE_CALLS = Patch(
    name="blanks_before_calls",
    why="the empty line in front of a turn's calls is told in streams as the end of its words, and written once more "
    "by the encoder when the turn comes back: the prefix cache ends in front of each turn's calls, and the model reads "
    "lines that it never wrote",
    targets=(
        targets_of_fix("blanks_before_calls")(f"{CHAT}._apply_jinja_template", "apply_template", OF_PROMPT, "<0.5.21"),
    ),
    absent="from 0.5.21 on SGLang tells the words without it",
    retire="with SGLang 0.5.20",
)

CALL_ORDER = Patch(
    name="call_order",
    why="deepseek-recipe sorts the tool calls of a turn and their results by their ids, which are random: every second "
    "pair of calls is in the next prompt the other way round, so that the model reads what it did not do, and the "
    "prefix cache ends there",
    targets=(targets_of_fix("call_order")(f"{RECIPE}._encode", "encode", OF_ENCODE, SINCE_RECIPE),),
    absent="up to 0.5.22 calls stay as they stand, and results are sorted by them",
    retire="when deepseek-recipe sorts by the calls' places, or SGLang's ids begin with them",
)

TURN_PHASES = Patch(
    name="turn_phases",
    why="a turn that comes back over /v1/responses with the phase that SGLang gave its words is taken apart: thoughts, "
    "words and calls are turns of their own, each with its end and closed thoughts in front",
    targets=(
        _turn_phases(f"{RESPONSES}._construct_input_messages", "construct", Parameters(OF_INPUT), ">=0.5.20,<0.5.23"),
        _turn_phases(
            f"{RESPONSES}._construct_input_messages", "construct", Parameters((*OF_INPUT, *OF_TRANSLATED)), SINCE_RECIPE
        ),
    ),
    absent="up to 0.5.19 there are no phases",
    retire="when SGLang puts together a turn whatever its phases",
)

BILLING_LINES = Patch(
    name="billing_lines",
    why="the line that Claude Code puts at the head of its system prompt for Anthropic's books is another one in each "
    "request: the prefix cache ends there, and each turn's whole conversation is read anew (sglang #21064)",
    targets=(
        targets_of_fix("billing_lines")(
            f"{MESSAGES}._convert_to_chat_completion_request", "convert", Parameters(("self", "anthropic_request"))
        ),
    ),
    retire="when SGLang leaves that line out itself",
)

SYSTEM_REMINDERS = Patch(
    name="system_reminders",
    why="system messages within a conversation over /v1/messages, which Claude Code adds at each turn, are put at the "
    "head of the prompt: each new one moves the whole conversation, which is read anew. DeepSeek's own conversion "
    "leaves them where they are, as reminders of the user's turn",
    targets=(
        targets_of_fix("system_reminders")(
            f"{MESSAGES}._convert_to_chat_completion_request",
            "convert",
            Parameters(("self", "anthropic_request")),
            ">=0.5.15,<0.6",
        ),
    ),
    absent="up to 0.5.13 such messages are refused, and 0.5.14 moves them as it reads a request",
    retire="when SGLang leaves them where they are",
)

DEVELOPER_ITEMS = Patch(
    name="developer_items",
    why="a developer's messages within a conversation over /v1/responses, which Codex adds, are put at the head of the "
    "prompt: each new one moves the whole conversation, which is read anew. DeepSeek's own conversion leaves them "
    "where they are, in the user's turn",
    targets=(
        targets_of_fix("developer_items")(
            f"{RESPONSES}._response_input_history", "history", Parameters(("self", "request")), ">=0.5.20,<0.6"
        ),
    ),
    absent="up to 0.5.19 a conversation is put together elsewhere",
    retire="when SGLang leaves them where they are",
)

STOP_SEQUENCES = Patch(
    name="stop_sequences",
    why="an answer over /v1/messages that one of the request's stop_sequences ended is told as one that the model "
    "ended itself: end_turn, and no sequence (sglang #33153, open)",
    targets=(
        _stop_sequences(
            f"{MESSAGES}._generate_anthropic_stream",
            "generate",
            Parameters(
                ("self", "adapted_request", "processed_request", "anthropic_request", "raw_request"),
                is_generator=True,
                is_async=True,
            ),
        ),
        _stop_sequences(f"{MESSAGES}._convert_response", "convert", Parameters(("self", "response"))),
    ),
    retire="when SGLang tells the sequence",
)

WHOLE_CHARACTERS = Patch(
    name="whole_characters",
    why="where a step of several tokens ends within a character, less is counted as told than was told: text of an "
    "answer is told twice, Chinese with emoji above all",
    targets=(targets_of_fix("whole_characters")(FIND_PRINTABLE, "printable", Parameters(("text",), imported=True)),),
    retire="when SGLang never counts less as told than it has told",
)

THOUGHT_COUNTS = Patch(
    name="thought_counts",
    why="with speculation the thoughts behind an answer's end stay counted: reasoning_tokens is more than "
    "completion_tokens",
    targets=(
        targets_of_fix("thought_counts")(
            f"{TOKENIZER_MANAGER}._handle_batch_output", "handle", Parameters(("self", "recv_obj"), is_async=True)
        ),
    ),
    retire="when SGLang counts what is answered",
)

MAX_OUTPUT_TOKENS = Patch(
    name="max_output_tokens",
    why="/v1/responses takes two tokens away from max_output_tokens: answers end early, and a request for one is "
    "refused",
    targets=(
        targets_of_fix("max_output_tokens")(
            f"{RESPONSES_REQUEST}.to_sampling_params",
            "to_sampling_params",
            Parameters(("self", "default_max_tokens=...", "default_params=None"), further="any"),
        ),
    ),
    retire="when SGLang takes the number as it is",
)

UNKNOWN_TOKENS = Patch(
    name="unknown_tokens",
    why="prompts of tokens are taken as they are: one that is not in the vocabulary is read beyond the end of the "
    "table by which this model's first layers choose experts, which may end the server",
    targets=(
        targets_of_fix("unknown_tokens")(
            f"{TOKENIZER_MANAGER}._validate_one_request", "validate", Parameters(("self", "obj", "input_ids"))
        ),
    ),
    retire="when SGLang refuses such prompts",
)

FATAL_REQUESTS = Patch(
    name="fatal_requests",
    why="numbers and kinds that fit no answer are handed to the scheduler as they are, and an error there ends the "
    "server for all: a top_k of 2**31 and more (sglang #17646), more log-probabilities than the vocabulary has tokens "
    "(#40076, open), logprob_start_len below -1, no prompt at all, a max_new_tokens that is no whole number, and up to "
    "0.5.21 over /generate a schema that is no text or a stop token that is null; up to 0.5.16 a stop_regex that does "
    "not compile, up to 0.5.13 a temperature that is NaN",
    targets=(
        _fatal_requests(f"{SAMPLING}.normalize", "normalize", Parameters(("self", "tokenizer")), "<0.5.17"),
        _fatal_requests(
            f"{TOKENIZER_MANAGER}._validate_one_request", "validate", Parameters(("self", "obj", "input_ids"))
        ),
    ),
    retire="when SGLang refuses such requests",
)

EMPTY_STOPS = Patch(
    name="empty_stops",
    why="an empty string among the stops is in every text: the answer is empty, and over after one token (sglang "
    "#38712, open)",
    targets=(targets_of_fix("empty_stops")(f"{SAMPLING}.normalize", "normalize", Parameters(("self", "tokenizer"))),),
    retire="when SGLang leaves them out, or refuses them",
)

ECHOED_ITEMS = Patch(
    name="echoed_items",
    why="a message that comes back over /v1/responses with its id, as a response's output has it, is refused with 400: "
    "the second turn of each conversation of clients that append the output to their input; so is a call's result in "
    "parts",
    targets=(
        targets_of_fix("echoed_items")(
            f"{RESPONSES}.create_responses",
            "create",
            Parameters(("self", "request", "raw_request=None"), is_async=True),
            ">=0.5.14,<0.5.18",
        ),
    ),
    absent="up to 0.5.13 no conversation is put together from items, from 0.5.18 on they are taken",
    retire="with SGLang 0.5.17",
)

TOOL_NAMESPACES = Patch(
    name="tool_namespaces",
    why="tools in a namespace, as Codex sends those of each MCP server over /v1/responses, are left out of the prompt "
    "without a word, so that the model has none of them; SGLang hands them over for another model alone",
    targets=(
        targets_of_fix("tool_namespaces")(
            f"{RESPONSES}.create_responses",
            "create",
            Parameters(("self", "request", "raw_request=None"), is_async=True),
            SINCE_RECIPE,
        ),
    ),
    absent="up to 0.5.13 namespaces are refused, up to 0.5.22 SGLang has no way to hand them over",
    retire="when SGLang hands them over whatever the model",
)

RESPONSE_ERRORS = Patch(
    name="response_errors",
    why="what the scheduler ends with 503 or 500, a full queue for one, is answered over /v1/responses by 400 where it "
    "is not streamed, so that clients do not try again",
    targets=(
        targets_of_fix("response_errors")(
            f"{RESPONSES}.responses_full_generator",
            "full",
            Parameters(("self", "request", "sampling_params", "result_generator"), further="any", is_async=True),
        ),
    ),
    retire="when SGLang answers by the error's own status",
)

TOKEN_LOGPROBS = Patch(
    name="token_logprobs",
    why="the bytes of a token that is a piece of a character are told as U+FFFD's in the log-probabilities of chat "
    "answers, and up to 0.5.20 a stream's step of several tokens has the first one's alternatives for all of them",
    targets=(
        _token_logprobs(f"{CHAT}._process_response_logprobs", "response", Parameters(("self", "ret_item"))),
        _token_logprobs(
            f"{CHAT}._process_streaming_logprobs",
            "streaming",
            Parameters(("self", "content", "n_prev_token", "total_output_logprobs")),
        ),
    ),
    retire="when SGLang tells the bytes of DeepSeek's tokens",
)

OF_TEXTS = Parameters(("self", "token_logprobs_val", "token_logprobs_idx", "decode_to_text"))
TOKEN_TEXTS = Patch(
    name="token_texts",
    why="the log-probabilities of a prompt (lm-evaluation-harness asks for them) are told with the text of each token "
    "and of each alternative, made one by one in the loop that answers over HTTP: all streams stand still for 1.6 to "
    "2.7 s where 100,000 tokens have one alternative each",
    targets=(targets_of_fix("token_texts")(f"{TOKENIZER_MANAGER}.detokenize_logprob_tokens", "detokenize", OF_TEXTS),),
    retire="when SGLang asks the tokenizer for a token's text once, or not in that loop",
)

SAMPLED_STATES = Patch(
    name="sampled_states",
    why="a stream of several answers to one prompt leaves all but one of its first notes of them, each with the "
    "prompt, for as long as the server runs, and a server that is asked to stop waits for them",
    targets=(
        targets_of_fix("sampled_states")(
            f"{TOKENIZER_MANAGER}._handle_batch_request",
            "batch",
            Parameters(("self", "obj"), further="any", is_generator=True, is_async=True),
            ">=0.5.18,<0.5.22",
        ),
    ),
    absent="SGLang drops them itself",
    retire="with SGLang 0.5.21",
)

OF_SEND = ("self", "tokenized_obj")
SAMPLE_SEEDS = Patch(
    name="sample_seeds",
    why="a request for several answers gives all of them its seed, so that with --enable-deterministic-inference they "
    "are the same (sglang #28805, open)",
    targets=(
        _sample_seeds(f"{TOKENIZER_MANAGER}._send_one_request", "send", Parameters(OF_SEND), "<0.5.20"),
        _sample_seeds(
            f"{TOKENIZER_MANAGER}._send_one_request", "send", Parameters(OF_SEND, is_async=True), ">=0.5.20,<0.6"
        ),
    ),
    retire="when SGLang gives each a seed of its own",
)

STRICT_SCHEMAS = Patch(
    name="strict_schemas",
    why="deepseek-recipe refuses strict schemas that DeepSeek's own service cannot hold, of answers and of tools: "
    "optional properties, maps, constants, dates. SGLang's grammar holds answers to them, and 0.5.22 takes them",
    targets=(targets_of_fix("strict_schemas")(f"{RECIPE}._encode", "encode", OF_ENCODE, SINCE_RECIPE),),
    absent="up to 0.5.22 schemas are not looked at for a prompt",
    retire="when recipe is given schemas without that word",
)

OF_MESSAGES = Parameters(("self", "chat_request", "anthropic_request", "raw_request"), is_async=True)
PROMPTS_ASIDE = Patch(
    name="prompts_aside",
    why="while a long prompt of /v1/messages is made tokens, all streams of the server stand still; the chat API's are "
    "made in a thread",
    targets=(
        _prompts_aside(f"{MESSAGES}._handle_streaming", "handle", OF_MESSAGES, ">=0.5.22,<0.6"),
        _prompts_aside(f"{MESSAGES}._handle_non_streaming", "handle", OF_MESSAGES, ">=0.5.22,<0.6"),
    ),
    absent="up to 0.5.21 the chat API's stop them, too",
    retire="when SGLang makes these in a thread",
)

SCRAPES_ASIDE = Patch(
    name="scrapes_aside",
    why="while /metrics is written, which Prometheus asks for each few seconds, all streams of the server stand still",
    targets=(targets_of_fix("scrapes_aside")(ADD_METRICS, "add", Parameters(("app",)), rebound=True),),
    retire="when SGLang writes them beside the loop that answers",
)

KNOWN_SCHEMAS = Patch(
    name="known_schemas",
    why="the schema of each tool is judged anew with each request that brings it, in the loop that answers over HTTP: "
    "with an agent's hundred tools all streams stand still for half a second and more at each of its turns",
    targets=(targets_of_fix("known_schemas")(VALIDATOR, "validator", Bound()),),
    retire="when SGLang judges a schema once, or not in that loop",
)

STORED_RESPONSES = Patch(
    name="stored_responses",
    why="each response over /v1/responses is stored with its whole conversation, unless a client says "
    "\"store\": false, and none is forgotten: agents' turns fill the host's memory in days",
    targets=(
        targets_of_fix("stored_responses")(
            f"{RESPONSES}.__init__",
            "init",
            Parameters(("self", "tokenizer_manager", "template_manager"), further="keyword-only"),
        ),
    ),
    retire="when SGLang bounds what it stores",
)
