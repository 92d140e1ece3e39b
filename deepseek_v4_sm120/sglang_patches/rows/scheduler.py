"""The rows of table.py that are the scheduler's: which prompts are accepted, what of the cache and which grammars are
kept, and where those end."""

from deepseek_v4_sm120.patching.contract import Bound, Parameters
from deepseek_v4_sm120.patching.spec import Patch
from deepseek_v4_sm120.sglang_patches.names import targets_of_fix

WORKER = "sglang.srt.managers.tp_worker:TpModelWorker"
GRAMMAR_BACKEND = "sglang.srt.constrained.base_grammar_backend:BaseGrammarBackend"
SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
ADDER = "sglang.srt.managers.schedule_policy:PrefillAdder"
SWA_BUDGET = "sglang.srt.mem_cache.prefill_budget:SWAPrefillBudget"
SWA_CACHE = "sglang.srt.mem_cache.swa_radix_cache:SWARadixCache"
UNIFIED_CACHE = "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache"
TREE_CORE = "sglang.srt.mem_cache.unified_cache.unified_tree_core:UnifiedTreeCore"
REQUEST = "sglang.srt.managers.schedule_batch:Req"
XGRAMMAR = "sglang.srt.constrained.xgrammar_backend"
BITMASK = "bitmask_ops:apply_token_bitmask_inplace_triton"
OF_BITMASK = Parameters(("logits", "bitmask", "indices=None"))
CACHE_CONTROLLER = "sglang.srt.managers.cache_controller:HiCacheController"
HYBRID_CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller:HybridCacheController"
STORAGE = "sglang.srt.mem_cache.hicache_storage"
GRAPH_INPUTS = "sglang.srt.model_executor.cuda_graph_runner:DecodeInputBuffers"

_grammars = targets_of_fix("grammars")
_beginning, _thoughts = targets_of_fix("cached_beginning"), targets_of_fix("stripped_thoughts")
_preempted, _grammar_ends = targets_of_fix("preempted_requests"), targets_of_fix("grammar_ends")
_fenced, OF_SELF = targets_of_fix("fenced_copies"), Parameters(("self",))
_stored, _short = targets_of_fix("stored_pages"), targets_of_fix("short_prompts")
OF_NEXT_PROMPTS = Parameters(("self", "prefill_delayer_single_pass", "running_batch"))
_first_stops, ACCEPTED = targets_of_fix("first_stops"), Parameters(("self", "new_accepted_len=1"))
_alone, _own = targets_of_fix("prompts_alone"), targets_of_fix("own_outputs")
PIPELINE, SENT = "sglang.srt.managers.scheduler_pp_mixin:SchedulerPPMixin", ("self", "tensor_dict", "async_send=True")
_walks, OF_KEY = targets_of_fix("prefix_walks"), Parameters(("self", "key"))
OF_NODE, OF_PARENT = Parameters(("self", "node", "key", "value"), "any"), Parameters(("self", "parent", "key"), "any")
_idle = targets_of_fix("idle_checks")
CHECKS = "sglang.srt.managers.scheduler_components.invariant_checker:SchedulerInvariantChecker"
CHECKS_0_5_12 = "sglang.srt.managers.scheduler_runtime_checker_mixin:SchedulerRuntimeCheckerMixin"
_mixed, BATCH = targets_of_fix("mixed_chunks"), "sglang.srt.managers.schedule_batch:ScheduleBatch"

LONGEST_PROMPT = Patch(
    name="longest_prompt",
    why="prompts of the last 250 tokens that the KV cache holds are accepted and never let in: they and all requests "
    "behind them wait until their client gives up; with --allow-auto-truncate every prompt that is too long "
    "(sglang #29249, open)",
    targets=(targets_of_fix("longest_prompt")(f"{WORKER}.get_worker_info", "worker_info", Parameters(("self",))),),
    retire="when SGLang refuses what it can never let in",
)

CACHED_BEGINNING = Patch(
    name="cached_beginning",
    why="where the sliding windows hold hardly more than a chunk, a prompt that goes on from a cached one is never let "
    "in if its own cached beginning takes the room: it and all requests behind it wait, on an idle server, too (since "
    "sglang #32700)",
    targets=(
        _beginning(
            f"{ADDER}._swa_req_never_fits",
            "adder_never_fits",
            Parameters(("self", "extend_input_len", "max_new_tokens", "swa_host_hit_length=0")),
            ">=0.5.18,<0.5.21",
        ),
        _beginning(
            f"{SWA_BUDGET}.swa_never_fits",
            "budget_never_fits",
            Parameters(("self", "extend_input_len", "max_new_tokens", "**kwargs")),
            ">=0.5.21,<0.6",
        ),
    ),
    retire="when SGLang cuts a chunk that waits for what its own prompt holds",
    absent="up to 0.5.15 no chunk is cut, in 0.5.16 and 0.5.17 each that has no room",
)

SHARED_BEGINNINGS = Patch(
    name="shared_beginnings",
    why="where the sliding windows' slots of a beginning are given to others while a request that began with it runs, "
    "the next prompt that begins so frees what that request reads: its answer goes on from other prompts' text, and "
    "nothing says so (sglang #29352 mended it in 0.5.15)",
    targets=(
        targets_of_fix("shared_beginnings")(
            f"{SWA_CACHE}._insert_helper",
            "insert",
            Parameters(("self", "node", "key", "value", "update_kv_after_len", "swa_evicted_seqlen=0")),
            ">=0.5.12,<0.5.15",
        ),
    ),
    retire="with SGLang 0.5.14",
    absent="from 0.5.15 on SGLang keeps what is read",
)

PADDED_ROWS = Patch(
    name="padded_rows",
    why="a row that pads a step to a captured graph is the request that last had its place, and writes to the "
    "compressors' state that is found by it, which may be another request's by then: that one's answer goes on from a "
    "wrong entry, and nothing says so",
    targets=(
        targets_of_fix("padded_rows")(
            f"{GRAPH_INPUTS}.populate_from_forward_batch",
            "populate",
            Parameters(("self", "*", "forward_batch", "raw_bs", "raw_num_token", "bs"), further="keyword-only"),
            ">=0.5.12,<0.5.13",
        ),
    ),
    retire="with SGLang 0.5.12",
    absent="from 0.5.13 on SGLang's own padded rows are nobody's",
)

STRIPPED_THOUGHTS = Patch(
    name="stripped_thoughts",
    why="with --strip-thinking-cache a request that was retracted in its thoughts, or behind them, frees at its end "
    "what the prefix cache holds: an assertion ends the server, or slots have two owners and answers go on from "
    "others' text",
    targets=(
        _thoughts(f"{REQUEST}._cache_commit_len", "request_length", Parameters(("self",)), ">=0.5.12,<0.5.16"),
        _thoughts(f"{REQUEST}.effective_kv_committed_len", "request_length", Parameters(("self",)), ">=0.5.16,<0.5.19"),
        _thoughts(f"{REQUEST}.effective_kv_committed_len", "record_length", Parameters(("self",)), ">=0.5.19,<0.5.21"),
        _thoughts(f"{REQUEST}.owned_kv_len", "record_length", Parameters(("self",)), ">=0.5.21,<0.6"),
    ),
    retire="when SGLang frees nothing there that its prefix cache holds",
)

GRAMMARS = Patch(
    name="grammars",
    why="each schema, regular expression or strict set of tools that a request asks for is compiled and kept for ever, "
    "twice, by each card's process: 0.9 MB for one of 12 fields. Schemas with something of the request in them fill "
    "the host's memory in days (sglang #22196, closed without)",
    targets=(
        _grammars(f"{GRAMMAR_BACKEND}.set_cache", "set_cache", Parameters(("self", "key", "value"))),
        _grammars(f"{XGRAMMAR}:GrammarCompiler", "compiler", Bound()),
    ),
    retire="when SGLang bounds what it keeps",
)

GRAMMAR_ENDS = Patch(
    name="grammar_ends",
    why="where a schema, a regular expression or a required call is complete, XGrammar leaves the end alone, and "
    "min_tokens forbids it: no token is left. SGLang takes token 0, at which the answer breaks off; up to 0.5.19 the "
    "draw of a request with a temperature ends the server (vLLM #53665, mended there)",
    targets=(
        _grammar_ends(f"sglang.srt.constrained.triton_ops.{BITMASK}", "apply", OF_BITMASK, "<0.5.16"),
        _grammar_ends(f"sglang.kernels.ops.grammar.{BITMASK}", "apply", OF_BITMASK, ">=0.5.16,<0.6"),
    ),
    retire="when SGLang lets a grammar end that is complete",
)

PREEMPTED_REQUESTS = Patch(
    name="preempted_requests",
    why="with --enable-priority-scheduling requests that give way are put back in the order of a set, another on each "
    "card, whose schedulers may then wait for each other; up to 0.5.21 they are lost where nobody is let in after all. "
    "And who is let in for them beside a prompt that is read in chunks, where the sliding windows are short of room, "
    "costs that prompt's answer its first token, or the prompt all but its first chunk, or ends the server",
    targets=(
        _preempted(f"{ADDER}.preempt_to_schedule", "preempt", Parameters(("self", "req"), further="any")),
        _preempted(f"{ADDER}.add_chunked_req", "add_chunk", Parameters(("self", "req"))),
        _preempted(
            f"{SCHEDULER}._get_new_batch_prefill_raw",
            "next_prompts",
            Parameters(("self", "prefill_delayer_single_pass"), further="any"),
            ">=0.5.12,<0.5.22",
        ),
    ),
    retire="when SGLang keeps who gave way in a list",
)

WAITING_CHUNKS = Patch(
    name="waiting_chunks",
    why="without a prefix cache (--disable-radix-cache), where the sliding windows hold two chunks and a page or less, "
    "a long prompt waits for slots that only it holds, and that it gives back only with its next chunk: it and all "
    "requests behind it wait for ever, on an idle server, too (sglang #36458, open)",
    targets=(
        targets_of_fix("waiting_chunks")(
            f"{ADDER}.add_chunked_req", "add_chunk", Parameters(("self", "req")), ">=0.5.17,<0.6"
        ),
    ),
    retire="when SGLang gives back what a prompt's window has left before it asks for room",
    absent="up to 0.5.16 nobody has looked",
)

MIXED_CHUNKS = Patch(
    name="mixed_chunks",
    why="with --enable-mixed-chunk prompts that are let in take the slots which the pass's own answers need, and the "
    'allocation ends the server: "Decode out of memory" (0.5.22 asks first). And up to 0.5.18 an answer that sat out a '
    "pass, because a prompt asked for log-probabilities, goes on a position too far, and nothing says so",
    targets=(
        _mixed(
            f"{SCHEDULER}._get_new_batch_prefill_raw",
            "next_prompts",
            OF_NEXT_PROMPTS,
            ">=0.5.17,<0.5.22",
        ),
        _mixed(f"{BATCH}.prepare_for_extend", "prepare", OF_SELF, ">=0.5.17,<0.5.22"),
        _mixed(f"{BATCH}.mix_with_running", "mix", Parameters(("self", "running_batch")), ">=0.5.17,<0.5.19"),
    ),
    retire="with SGLang 0.5.21",
    absent="from 0.5.22 on SGLang asks first; up to 0.5.16 nobody has looked",
)

MIXED_GRAMMARS = Patch(
    name="mixed_grammars",
    why="with --enable-mixed-chunk and drafts an answer under a grammar (a schema, a required call) that runs beside a "
    "prompt's chunk is masked by where its grammar stood a step ago: the token is refused, and the answer breaks off",
    targets=(
        targets_of_fix("mixed_grammars")(
            f"{SCHEDULER}.is_disable_overlap_for_batch",
            "waits",
            Parameters(("self", "batch", "last_batch")),
            ">=0.5.19,<0.6",
        ),
    ),
    retire="when SGLang brings a grammar up to date before a mixed pass masks by it",
    absent="up to 0.5.18 nothing is mixed where there are drafts",
)

SHORT_PROMPTS = Patch(
    name="short_prompts",
    why="a prompt that is read in chunks has each pass for itself, so that a short one behind it waits until all of it "
    "is read: minutes behind a million tokens, on a server with room for both",
    targets=(
        _short(f"{SCHEDULER}._get_new_batch_prefill_raw", "next_prompts", OF_NEXT_PROMPTS, ">=0.5.20,<0.6"),
        _short(f"{ADDER}.add_chunked_req", "add_chunk", Parameters(("self", "req")), ">=0.5.20,<0.6"),
        _short(
            f"{ADDER}._select_prefill_admission",
            "select",
            Parameters(("self", "req", "*", "total_tokens", "host_hit_length"), further="keyword-only"),
            ">=0.5.20,<0.6",
        ),
    ),
    retire="when SGLang lets in what fits beside a chunk, in the queue's order",
    absent="up to 0.5.19 nobody has looked",
)

WAITING_PROMPTS = Patch(
    name="waiting_prompts",
    why="a prompt that waits for room in the KV cache is looked up in the prefix cache in front of every step of all "
    "streams: of 950,000 cached tokens 0.29 s a step up to 0.5.19, 0.01 s later",
    targets=(
        targets_of_fix("waiting_prompts")(
            f"{SCHEDULER}._get_new_batch_prefill_raw", "next_prompts", OF_NEXT_PROMPTS, ">=0.5.17,<0.6"
        ),
    ),
    retire="when SGLang remembers that there was no room",
    absent="up to 0.5.16 nobody has looked",
)

IDLE_CHECKS = Patch(
    name="idle_checks",
    why="an idle server looks through its whole prefix cache again and again, node by node in plain Python, and a "
    "request that comes waits for the end of it: with thousands of nodes, as agents' turns leave them, some 10 us for "
    "each, in front of every turn of an agent that is alone (sglang #36205 mended it in 0.5.19)",
    targets=(
        _idle(f"{CHECKS_0_5_12}._check_tree_cache", "check", OF_SELF, "<0.5.13"),
        _idle(f"{CHECKS}._check_tree_cache", "check", OF_SELF, ">=0.5.13,<0.5.19"),
    ),
    retire="with SGLang 0.5.18",
    absent="from 0.5.19 on SGLang does so in its own tests alone",
)

PREFIX_WALKS = Patch(
    name="prefix_walks",
    why="the prefix cache copies what is left of a prompt at each node of its tree, by context times turns, each time "
    "that a conversation is looked up and put in: all streams stand still for a tenth of a second and more several "
    "times a turn of 500,000 tokens",
    targets=(
        _walks(
            "sglang.srt.mem_cache.radix_cache:RadixKey.match",
            "match",
            Parameters(("self", "other", "page_size=1")),
            ">=0.5.12,<0.5.21",
        ),
        _walks(f"{SWA_CACHE}._match_prefix_helper", "find", OF_KEY, ">=0.5.12,<0.5.16"),
        _walks(f"{SWA_CACHE}._insert_helper", "insert", OF_NODE, ">=0.5.12,<0.5.16"),
        _walks(f"{SWA_CACHE}._add_new_node", "node", OF_PARENT, ">=0.5.12,<0.5.16"),
        _walks(f"{UNIFIED_CACHE}._match_prefix_helper", "find", OF_KEY, ">=0.5.12,<0.5.17"),
        _walks(f"{UNIFIED_CACHE}._insert_helper", "insert", OF_NODE, ">=0.5.12,<0.5.17"),
        _walks(f"{UNIFIED_CACHE}._add_new_node", "node", OF_PARENT, ">=0.5.12,<0.5.17"),
        _walks(f"{TREE_CORE}._match_prefix_helper", "find", OF_KEY, ">=0.5.17,<0.5.20"),
        _walks(f"{TREE_CORE}._insert_walk_step", "step", Parameters(("self", "state")), ">=0.5.17,<0.5.21"),
        _walks(f"{TREE_CORE}._add_new_node", "node", OF_PARENT, ">=0.5.17,<0.5.21"),
    ),
    retire="with SGLang 0.5.20",
    absent="from 0.5.21 on the tree is in Rust",
)

PROMPTS_ALONE = Patch(
    name="prompts_alone",
    why="with --prefill-decode-interval, ours by default, a prompt's chunks are so many turns apart whether or not "
    "anybody decodes: nothing of the next one is planned or launched while a chunk runs, and with --pp-size one stage "
    "works at a time, so that long prompts take as many times as long as there are stages",
    targets=(
        _alone(f"{SCHEDULER}._should_defer_prefill", "should_defer", OF_SELF, ">=0.5.19,<0.5.23"),
        _alone(
            f"{SCHEDULER}._should_defer_prefill", "should_defer", Parameters(("self", "running_batch")), ">=0.5.23,<0.6"
        ),
    ),
    retire="when SGLang counts the turns of somebody who decodes",
    absent="up to 0.5.18 there is no such argument",
)

OWN_OUTPUTS = Patch(
    name="own_outputs",
    why="with --pp-size the last stage waits for its own tokens to come back around the stages, behind the next launch "
    "of the stage in front of it, before it ends a step and plans the next: with one stream both stages' work on the "
    "host is done one after the other, in each step",
    targets=(
        _own(
            f"{PIPELINE}._pp_send_dict_to_next_stage",
            "send_dict",
            Parameters((*SENT, "msg_type='default'")),
            ">=0.5.12,<0.5.21",
        ),
        _own(
            f"{PIPELINE}._pp_send_dict_to_next_stage",
            "send_dict_on_stream",
            Parameters((*SENT, "msg_type='default'", "ready_event=None")),
            ">=0.5.21,<0.6",
        ),
        _own(f"{PIPELINE}._pp_recv_dict_from_prev_stage", "recv_dict", OF_SELF),
        _own(f"{PIPELINE}._pp_recv_proxy_tensors", "recv_proxy", OF_SELF),
    ),
    retire="when the last stage keeps what it has drawn",
)

FENCED_COPIES = Patch(
    name="fenced_copies",
    why="what a hierarchical cache brings back is copied into pages that a step of the model, launched for a request "
    "that has ended meanwhile, still writes, and what it keeps is read while such a step writes it: prefixes have a "
    "token of another prompt, or none, and nothing says so (sglang #36738 mended the first in 0.5.19)",
    targets=(
        _fenced(f"{SCHEDULER}.run_event_loop", "run_event_loop", OF_SELF, ">=0.5.12,<0.5.23"),
        _fenced(f"{HYBRID_CONTROLLER}.start_loading", "start_loading", OF_SELF, ">=0.5.12,<0.5.18"),
        _fenced(f"{CACHE_CONTROLLER}.start_loading", "start_loading", OF_SELF, ">=0.5.18,<0.5.19"),
        _fenced(f"{HYBRID_CONTROLLER}.start_writing", "start_writing", OF_SELF, ">=0.5.12,<0.5.18"),
        _fenced(f"{CACHE_CONTROLLER}.start_writing", "start_writing", OF_SELF, ">=0.5.18,<0.5.23"),
    ),
    retire="with SGLang 0.5.22",
    absent="0.5.23 has both copies wait",
)

FREED_WINDOWS = Patch(
    name="freed_windows",
    why="where two prompts of a pass begin alike and the shorter one's window lies in that beginning, its window is "
    "freed while it runs: its answer goes on from slot 0, and nothing says so; the other's is lost, and the check of "
    'the books ends the server: "pool memory leak detected" (sglang #36081)',
    targets=(
        targets_of_fix("freed_windows")(
            "sglang.srt.mem_cache.allocator.swa:SWATokenToKVPoolAllocator.free_swa",
            "free_swa",
            Parameters(("self", "free_index"), overridden_by=("PureSWATokenToKVPoolAllocator",)),
            ">=0.5.18,<0.5.19",
        ),
    ),
    retire="with SGLang 0.5.18",
    absent="up to 0.5.17 windows are freed at once, from 0.5.19 on they are looked up before",
)

REPLACED_SESSIONS = Patch(
    name="replaced_sessions",
    why="a request that replaces all requests of its session, so one that says replace and names no rid, ends the "
    "server for all: they are taken out of a dict while it is walked through",
    targets=(
        targets_of_fix("replaced_sessions")(
            "sglang.srt.session.session_controller:Session.create_req",
            "create_request",
            Parameters(("self", "req"), further="any"),
        ),
    ),
    retire="when SGLang walks through a copy",
)

FIRST_STOPS = Patch(
    name="first_stops",
    why="where a step with speculation brings several tokens, a stop ends the answer by its place in the request's "
    "list, not in the text, and a stop behind the answer's end goes before that end: what no server without drafts "
    "answers is told (vLLM #49391, mended there). Up to 0.5.17 max_tokens goes before all of them (sglang #31599)",
    targets=(
        _first_stops(f"{REQUEST}.check_finished", "older_update", ACCEPTED, "<0.5.13"),
        _first_stops(f"{REQUEST}.update_finish_state", "older_update", ACCEPTED, ">=0.5.13,<0.5.14"),
        _first_stops(f"{REQUEST}.update_finish_state", "update", ACCEPTED, ">=0.5.14,<0.6"),
    ),
    retire="when SGLang asks token by token, or for the first of all that end the answer",
)

STORED_PAGES = Patch(
    name="stored_pages",
    why="a hierarchical cache's files are named by tokens, pool and model, not by how long a page's rows are: a server "
    "without DSPARK takes the compressors' states that one with it has written to the same folder, twice as long, for "
    "its own, and nothing says so (sglang #33268, open, has the same of --kv-cache-dtype)",
    targets=(
        _stored(
            f"{STORAGE}:HiCacheStorage.register_mem_host_pool_v2",
            "register",
            Parameters(("self", "host_pool", "host_pool_name"), overridden_by=("HiCacheStorageFailureInjector",)),
        ),
        _stored(f"{STORAGE}:HiCacheFile._get_suffixed_key", "suffixed", Parameters(("self", "key"))),
    ),
    retire="when SGLang's names have the form of what is stored",
)

ABORT_NAMES = Patch(
    name="abort_names",
    why="an abort ends each request whose name begins with the name that is asked for: where clients choose the names, "
    "who leaves job-1 ends job-10 of others, whose answers stop in their middle",
    targets=(targets_of_fix("abort_names")(f"{SCHEDULER}.abort_request", "abort", Parameters(("self", "recv_req"))),),
    retire="when SGLang asks for the whole name",
)
