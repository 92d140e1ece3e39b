"""doctor --url against a small local server with recorded answers."""

import http.server
import json
import threading

import pytest

from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.doctor import server
from deepseek_v4_sm120.commands.doctor.finding import FAIL, NOT_RUN, OK, WARN
from deepseek_v4_sm120.sglang_patches.names import RUST_FRONT_SINCE
from tests.patching.test_wheel_speculation import number
from tests.patching.wheels import archive, content, every_release, fetch

# the fields that SGLang 0.5.17 and 0.5.23 answer with, at the values that an unplanned start has on 2 cards
# (context_length as `ask` finds it: such a start tells null there)
STOCK = {
    "version": "0.5.23",
    "model_path": "deepseek-ai/DeepSeek-V4-Flash",
    "attention_backend": "dsv4",
    "tp_size": 2,
    "disable_cuda_graph": False,
    "moe_runner_backend": "flashinfer_mxfp4",
    "disable_custom_all_reduce": False,
    "chunked_prefill_size": 8192,
    "context_length": 1048576,
    "prefill_decode_interval": 0,
    "enable_mixed_chunk": False,
    "mem_fraction_static": 0.86,
    "max_running_requests": 256,
    "speculative_algorithm": None,
    "speculative_num_draft_tokens": None,
    "disable_radix_cache": False,
    "swa_prefix_tails": None,
    "swa_full_tokens_ratio": 0.1,
    "stream_interval": 1,
    "tool_call_parser": None,
    "reasoning_parser": None,
    "internal_states": [{}],
}
PLANNED = STOCK | {
    "context_length": 393216,
    "chunked_prefill_size": 4096,
    "prefill_decode_interval": 8,
    "max_running_requests": 8,
    "swa_prefix_tails": 256,
    "tool_call_parser": "deepseekv4",
    "reasoning_parser": "deepseek-v4",
}
METRICS = """# HELP sglang:token_usage x
sglang:token_usage{{model_name="m",tp_rank="0"}} {usage}
sglang:num_queue_reqs{{tp_rank="0"}} 3.0
sglang:num_retracted_requests_total{{tp_rank="0"}} {retracted}
sglang:spec_accept_length{{tp_rank="0"}} 1.1
process_cpu_seconds_total 5
sglang:broken{{}} nonsense
"""


@pytest.fixture
def serve():
    """serve({path: (status, text)}) -> base URL"""
    servers = []

    def start(answers):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                status, text = answers.get(self.path, (404, ""))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args):
                pass

        made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=made.serve_forever, daemon=True).start()
        servers.append(made)
        return f"http://127.0.0.1:{made.server_port}"

    yield start
    for made in servers:
        made.shutdown()
        made.server_close()


def found(info, metrics=None):
    return {f.check: f for f in server.checks(server.Answers(info, metrics, model_type="deepseek_v4"))}


def test_an_unplanned_server_is_named_setting_by_setting(serve):
    url = serve({"/server_info": (200, json.dumps(STOCK)), "/metrics": (200, METRICS.format(usage=0.97, retracted=4))})
    answers = server.ask(url + "/")
    checks = {f.check: f for f in server.checks(answers)}
    assert checks["prefill and decode"].fix == "--prefill-decode-interval 8"
    scratch = checks["prefill scratch"]
    assert (
        scratch.state == NOT_RUN and "8.0 GiB" in scratch.found and "unless index_select is in place" in scratch.found
    )
    assert checks["request slots"].fix == "--max-running-requests <your streams>"
    assert checks["load"].state == WARN and "97% full, 4 requests retracted" in checks["load"].found
    assert checks["speculation"].found == "1.10 tokens accepted a step"
    assert all(f.cost and f.fix for f in checks.values() if f.state in (WARN, FAIL))


def test_a_planned_server_is_fine(serve):
    checks = found(PLANNED, {"token_usage": 0.3})
    assert {f.state for f in checks.values()} == {OK}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": "main"}, "version is 'main', no release"),
        ({"version": "0.5"}, "version is '0.5', no release"),
        ({"disable_cuda_graph": None}, "neither disable_cuda_graph nor cuda_graph_config is told"),
        ({"disable_cuda_graph": None, "cuda_graph_config": {"decode": {"backend": "full"}}}, None),
    ],
)
def test_what_is_not_told_is_not_well(changes, words):
    told = found(PLANNED | changes)["arguments"]
    assert told.state == (NOT_RUN if words else OK) and (not words or words in told.found)


def test_sessions_that_are_streams_are_told():
    told = found(PLANNED | {"enable_streaming_session": True})["sessions"]
    assert told.state == FAIL and told.found == "--enable-streaming-session" and "windows" in told.cost
    assert "sessions" not in found(PLANNED | {"enable_streaming_session": False})


@every_release()
def test_every_release_has_the_argument_by_that_name(version):
    wheel = fetch(version)
    names = [name for name in archive(wheel).namelist() if name.endswith(("srt/server_args.py", "fields/serving.py"))]
    assert any("enable_streaming_session: " in content(wheel, name) for name in names)


def test_few_windows_for_cached_prefixes_are_told():
    """In cap mode alone: 0.5.21 and later, the ratio not set, a prefix cache."""
    by_default = PLANNED | {"swa_prefix_tails": None}
    told = found(by_default)["prefix cache"]
    assert told.state == WARN and "32 prefixes, which prompts of 98,304 tokens fill" in told.found
    assert "--swa-prefix-tails 256 " in told.fix
    assert "prefix cache" not in found(PLANNED) and "prefix cache" not in found(STOCK)
    for other in (
        {"swa_full_tokens_ratio": 0.3},
        {"_swa_full_tokens_ratio_explicitly_set": True},
        {"disable_radix_cache": True},
        {"chunked_prefill_size": -1},
    ):
        assert "prefix cache" not in found(by_default | other)
    older = {name: value for name, value in by_default.items() if name != "swa_prefix_tails"}
    assert "prefix cache" not in found(older | {"version": "0.5.20"})


@pytest.mark.parametrize(
    ("version", "cards", "variables", "is_told"),
    [
        ("0.5.19", 2, {"SGLANG_REQ_WAITING_TIMEOUT": "45"}, True),
        ("0.5.12.post1", 4, {"SGLANG_REQ_RUNNING_TIMEOUT": "0.5"}, True),
        ("0.5.20", 2, {"SGLANG_REQ_WAITING_TIMEOUT": "45"}, False),
        ("0.5.19", 1, {"SGLANG_REQ_WAITING_TIMEOUT": "45"}, False),
        *(("0.5.19", 2, {"SGLANG_REQ_WAITING_TIMEOUT": off}, False) for off in ("-1", "0", "", "soon")),
        ("0.5.19", 2, None, False),
    ],
)
def test_requests_that_each_card_ends_by_its_own_clock_are_told(version, cards, variables, is_told):
    for ranks in ({"tp_size": cards}, {"tp_size": 1, "pp_size": cards}):
        info = PLANNED | {"version": version} | ranks
        answers = server.Answers(info, None, model_type="deepseek_v4", variables=variables)
        told = {f.check: f for f in server.checks(answers)}.get("request timeouts")
        assert (told is not None) is is_told and (told is None or "#27221" in told.cost)


@pytest.mark.parametrize(
    ("version", "variables", "is_told"),
    [
        *(("0.5.23", {"SGLANG_RUST_SERVER": on}, True) for on in ("1", "True", "yes")),
        ("0.5.17", {"SGLANG_RUST_SERVER": "1"}, True),
        ("0.5.16", {"SGLANG_RUST_SERVER": "1"}, False),
        *(("0.5.23", {"SGLANG_RUST_SERVER": off}, False) for off in ("0", "false", "")),
        ("0.5.23", {}, False),
        ("0.5.23", None, False),
    ],
)
def test_what_a_front_of_sglangs_own_leaves_out_is_told(version, variables, is_told):
    answers = server.Answers(PLANNED | {"version": version}, None, model_type="deepseek_v4", variables=variables)
    told = {f.check: f for f in server.checks(answers)}.get("front")
    assert (told is not None) is is_told and (told is None or told.fix == "unset SGLANG_RUST_SERVER")


@every_release()
def test_since_when_there_is_another_front(version):
    is_there = "SGLANG_RUST_SERVER" in content(fetch(version), "sglang/srt/environ.py")
    assert is_there is (number(version) >= RUST_FRONT_SINCE)


@every_release()
def test_since_when_one_rank_ends_them_for_all(version):
    scheduler = content(fetch(version), "sglang/srt/managers/scheduler.py")
    by_each = "def _abort_on_waiting_timeout(" in scheduler and "def _abort_on_running_timeout(" in scheduler
    by_one = "every rank must drop the same requests" in scheduler
    assert by_each is not by_one is (number(version) >= server.TIMEOUTS_OF_ONE_RANK_SINCE)


@pytest.mark.parametrize(
    ("changes", "is_told"),
    [
        ({"version": "0.5.17", "speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 2}, True),
        ({"version": "0.5.17", "stream_interval": 4}, True),
        ({"version": "0.5.17"}, False),
        ({"version": "0.5.17", "stream_interval": 4, "tool_call_parser": "other"}, False),
        ({"version": "0.5.18", "stream_interval": 4}, False),
    ],
)
def test_words_that_streams_of_tool_calls_lose_are_told(changes, is_told):
    told = found(PLANNED | changes).get("parsers")
    assert (told is not None) is is_told and (told is None or "#34458" in told.cost)


@pytest.mark.parametrize(
    ("changes", "is_told"),
    [
        ({"version": "0.5.17", "model_path": "deepseek-ai/DeepSeek-V4-Flash-0731"}, True),
        ({"version": "0.5.18", "model_path": "deepseek-ai/DeepSeek-V4-Flash-0731"}, False),
        ({"version": "0.5.17", "model_path": "deepseek-ai/DeepSeek-V4-Flash"}, False),
    ],
)
def test_levels_of_effort_that_the_checkpoint_does_not_have_are_told(changes, is_told):
    """Which release has which: test_wheel_chat_requests.py."""
    told = found(PLANNED | changes).get("reasoning effort")
    assert (told is not None) is is_told and (told is None or "#33185" in told.cost)
    other = server.Answers(PLANNED | changes, None, model_type="llama")
    assert "reasoning effort" not in {finding.check for finding in server.checks(other)}


def test_nobody_is_sent_to_another_all_reduce_while_ours_may_be_in_place():
    def told(*applied, version="0.5.23"):
        answers = server.Answers(PLANNED | {"tp_size": 4, "version": version}, None, applied[0] if applied else None)
        return {f.check: f for f in server.checks(answers)}.get("all-reduce")

    for version in ("0.5.17", "0.5.23"):
        unknown = told(version=version)
        assert unknown.state == NOT_RUN and "DSV4_SM120_REPORT" in unknown.fix and "PCIE_IPC" not in unknown.fix
    assert told(frozenset({"all_reduce"})) is None
    assert told(frozenset({"mhc"})).state == NOT_RUN and "PCIE_IPC" in told(frozenset({"mhc"})).fix
    assert told(frozenset({"mhc"}), version="0.5.17").state == WARN


def test_fewer_drafts_are_asked_for_where_sglang_listens():
    """With topk 1, the only one for this model, SGLang makes EAGLE's draft tokens of its steps."""
    told = found(PLANNED | {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 8})["speculation"]
    assert "--speculative-num-steps 3" in told.fix and "--speculative-num-draft-tokens" not in told.fix


@pytest.mark.parametrize(
    ("algorithm", "rows", "accepted", "words"),
    [
        ("EAGLE", 2, 1.79, None),
        ("EAGLE", 2, 1.2, "cost more than they bring; others have 1.9"),
        ("EAGLE", 2, 1.45, "less than they could; others have 1.9"),
        ("EAGLE", 3, 1.65, "less than they could; others have 2.0 at temperature 1"),
        ("EAGLE", 4, 2.6, None),
        ("EAGLE", 4, 1.9, "less than they could; others have 2.6 to 3.0"),
        ("DSPARK", 5, 2.1, None),
        ("DSPARK", 6, 2.1, "less than they could; others have 2.8"),
        ("DSPARK", None, 1.2, "drafts cost more than they bring"),
        ("DSPARK", None, 1.5, None),
        ("EAGLE", 4, 0.0, None),  # no step yet
    ],
)
def test_drafts_that_are_seldom_right_are_told(algorithm, rows, accepted, words):
    """By the block, beside what others' real text brings; what else the doctor says of that speculation stays."""
    info = PLANNED | {"speculative_algorithm": algorithm, "speculative_num_draft_tokens": rows}
    metrics = {"token_usage": 0.3, "spec_accept_length": accepted}
    answers = server.Answers(info, metrics, frozenset({"compressor", "sparse_decode", "mhc"}), model_type="deepseek_v4")
    told = [f for f in server.checks(answers) if f.check == "speculation" and "tokens accepted a step" in f.found]
    assert [f.state for f in told] == ([WARN] if words else []) and all(words in f.cost for f in told)


def test_the_logits_tensor_is_nobodys_where_index_select_is_applied():
    def scratch(*applied):
        return {f.check: f for f in server.checks(server.Answers(STOCK, None, frozenset(applied)))}.get(
            "prefill scratch"
        )

    assert scratch("sparse_decode", "index_select") is None
    assert scratch("sparse_decode").state == WARN and "8.0 GiB" in scratch("sparse_decode").cost


def test_the_older_address_and_no_metrics(serve):
    answers = server.ask(serve({"/get_server_info": (200, json.dumps(PLANNED))}))
    assert {f.check: f.state for f in server.checks(answers)}["metrics"] == NOT_RUN


@pytest.mark.parametrize(
    ("change", "check", "state"),
    [
        ({"disable_cuda_graph": True}, "CUDA graphs", WARN),
        ({"cuda_graph_config": {"decode": {"backend": "disabled"}}}, "CUDA graphs", WARN),
        ({"version": "0.5.12", "moe_runner_backend": "auto"}, "experts", FAIL),
        ({"moe_runner_backend": "humming"}, "experts", WARN),
        ({"disable_custom_all_reduce": True}, "all-reduce", WARN),
        ({"tp_size": 4}, "all-reduce", NOT_RUN),
        ({"tp_size": 4, "nnodes": 2, "disable_custom_all_reduce": True}, "all-reduce", OK),
        ({"tp_size": 4, "disable_custom_all_reduce": True}, "all-reduce", WARN),
        ({"chunked_prefill_size": -1}, "prefill chunk", FAIL),
        ({"version": "0.5.14", "chunked_prefill_size": 16384}, "prefill chunk", FAIL),
        ({"version": "0.5.20", "chunked_prefill_size": 65536}, "prefill chunk", FAIL),
        ({"version": "0.5.21", "chunked_prefill_size": 65537}, "prefill chunk", FAIL),
        ({"mem_fraction_static": 0.97}, "memory fraction", WARN),
        ({"speculative_num_draft_tokens": 8}, "speculation", WARN),
        ({"tool_call_parser": None}, "parsers", WARN),
    ],
)
def test_each_rule(change, check, state):
    assert found(PLANNED | change)[check].state == state


@pytest.mark.parametrize("backend", ["auto", "triton", "deep_gemm"])
def test_experts_of_an_fp8_checkpoint_are_not_called_fp4(backend):
    info = PLANNED | {"version": "0.5.12", "moe_runner_backend": backend}
    assert "experts" in found(info) and "experts" not in found(
        info | {"model_path": "sgl-project/DeepSeek-V4-Flash-FP8"}
    )


SHORT = {
    "token_usage": 0.3,
    "num_requests_total": 10.0,
    "prompt_tokens_total": 30_000.0,
    "cached_tokens_total": 24_000.0,
}
NO_PREFILL_GRAPHS = PLANNED | {"cuda_graph_config": {"decode": {"backend": "full"}, "prefill": {"backend": "disabled"}}}


@pytest.mark.parametrize(
    ("info", "metrics", "applied", "is_told"),
    [
        ({}, {}, "index_select", True),
        ({}, {"cached_tokens_total": 0.0}, "index_select", False),  # 3,000 new tokens a prompt
        ({}, {"num_requests_total": 0.0}, "index_select", False),
        ({}, {}, "mhc", False),
        ({"speculative_algorithm": "EAGLE"}, {}, "index_select", False),
        ({"version": "0.5.16"}, {}, "index_select", False),
        # the setting does nothing
        *(({name: 2}, {}, "index_select", False) for name in ("pp_size", "nnodes", "attn_cp_size", "attn_dp_size")),
        ({"enable_dp_attention": True, "dp_size": 2}, {}, "index_select", False),
        ({"pp_size": 1, "nnodes": 1, "enable_prefill_cp": False}, {}, "index_select", True),
        ({"cuda_graph_config": {"prefill": {"backend": "breakable"}}}, {}, "index_select", False),
        ({"cuda_graph_config": "?"}, {}, "index_select", False),
    ],
)
def test_short_prompts_that_wait_for_the_host_are_told(info, metrics, applied, is_told):
    answers = server.Answers(NO_PREFILL_GRAPHS | info, SHORT | metrics, frozenset([applied]), model_type="deepseek_v4")
    told = {f.check: f for f in server.checks(answers)}.get("short prompts")
    assert (told is not None) is is_told
    if told:
        assert told.state == WARN and told.found.startswith("600 new tokens a prompt")
        assert "prefill_graphs=on" in told.fix and told.cost


@pytest.mark.parametrize("shadow", ["1", "ours"])
def test_in_shadow_mode_nothing_is_said_of_times_and_the_logits_tensor_is_there(shadow):
    def told(**variables):
        info = NO_PREFILL_GRAPHS | {"chunked_prefill_size": 8192, "context_length": 1 << 20}
        applied = frozenset(["index_select"])
        answers = server.Answers(info, SHORT, applied, model_type="deepseek_v4", variables=variables)
        return {f.check: f for f in server.checks(answers)}

    plain, shadowed = told(), told(DSV4_SM120_SHADOW=shadow)
    assert plain["short prompts"].state == WARN and "prefill scratch" not in plain
    assert shadowed["short prompts"].state == NOT_RUN and "shadow mode" in shadowed["short prompts"].found
    assert (
        "prefill_graphs" not in shadowed["short prompts"].fix and "DSV4_SM120_SHADOW" in shadowed["short prompts"].fix
    )
    assert "shadow mode runs it beside ours" in shadowed["prefill scratch"].cost


@pytest.mark.parametrize(
    ("cards", "cached", "chunk", "choice"),
    [
        *((2, 2000, 8192, "=on,"), (2, 1000, 8192, "=2048,"), (4, 0, 8192, "=4096,"), (4, 0, -1, "=4096,")),
        *((4, 0, 2048, "=2048,"), (2, 1500, 512, "=512,")),
    ],
)
def test_cards_that_share_a_pass_wait_for_the_host_up_to_more_rows(cards, cached, chunk, choice):
    """3,000 tokens a prompt, of which so many are in the prefix cache; no more rows than a chunk has."""
    read = {"cached_tokens_total": cached * SHORT["num_requests_total"]}
    answers = server.Answers(
        NO_PREFILL_GRAPHS | {"tp_size": cards, "chunked_prefill_size": chunk},
        SHORT | read,
        frozenset(["index_select"]),
        model_type="deepseek_v4",
    )
    told = {f.check: f for f in server.checks(answers)}.get("short prompts")
    assert told.state == WARN and choice in told.fix


def test_where_our_sums_are_in_place_the_probe_tells_and_not_the_flags():
    def told(**changes):
        answers = server.Answers(PLANNED | {"tp_size": 4} | changes, None, frozenset({"all_reduce"}))
        return {f.check: f.state for f in server.checks(answers)}.get("all-reduce")

    assert told() is None and told(disable_custom_all_reduce=True) == WARN


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"enable_dp_attention": True, "dp_size": 4, "chunked_prefill_size": 1024}, "--chunked-prefill-size 16384"),
        ({"enable_dp_attention": True, "dp_size": 4, "chunked_prefill_size": 4096}, None),
        ({"enable_dp_attention": True, "dp_size": 1, "chunked_prefill_size": 1024}, None),
        ({"enable_dp_attention": False, "dp_size": 4, "chunked_prefill_size": 1024}, None),
        # 0.5.22 and later
        (
            {"enable_dp_attention": True, "dp_size": 1, "attn_dp_size": 4, "chunked_prefill_size": 1024},
            "--chunked-prefill-size 16384",
        ),
        ({"enable_dp_attention": False, "dp_size": 4, "attn_dp_size": 1, "chunked_prefill_size": 1024}, None),
        ({"chunked_prefill_size": 1024}, None),
    ],
)
def test_a_chunk_that_was_divided_among_ranks_is_told(changes, fix):
    told = {f.check: f for f in server.checks(server.Answers(PLANNED | changes, None))}.get("prefill chunk")
    assert (told and told.fix) == fix and (told is None or told.state == WARN)


@pytest.mark.parametrize(
    ("models", "told"),
    [
        ({"object": "list", "data": [{"id": "m", "max_model_len": 1048576}]}, None),
        ({"data": [{"id": "m"}]}, "context_length is not told"),
        ({"data": []}, "context_length is not told"),
        ([], "context_length is not told"),
        ({"data": [{"max_model_len": "long"}]}, "context_length is 'long', not a whole number"),
    ],
)
def test_the_context_of_a_server_that_was_given_none_is_its_models(models, told, serve):
    """/server_info has null there: the start of the README."""
    info = STOCK | {"context_length": None}
    answers = server.ask(serve({"/server_info": (200, json.dumps(info)), "/v1/models": (200, json.dumps(models))}))
    checks = {f.check: f for f in server.checks(answers)}
    assert told in checks["arguments"].found if told else "arguments" not in checks
    assert ("prefill scratch" in checks) == (told is None)


def test_a_context_that_was_given_is_not_asked_for(serve):
    url = serve({"/server_info": (200, json.dumps(STOCK)), "/v1/models": (200, '{"data": [{"max_model_len": 7}]}')})
    assert server.ask(url).get("context_length") == STOCK["context_length"]


def test_a_release_without_the_interval():
    info = {k: v for k, v in PLANNED.items() if k != "prefill_decode_interval"} | {"version": "0.5.17"}
    assert "prefill_decode_interval_0_5_17" in found(info)["prefill and decode"].fix


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({}, "not an SGLang server"),
        ({"/server_info": (200, "<html>")}, "is not what SGLang answers"),
        ({"/server_info": (200, "[]")}, "is not what SGLang answers"),
        ({"/server_info": (500, "")}, "answers 500"),
    ],
)
def test_strangers_and_broken_servers_are_one_sentence(serve, answers, words):
    with pytest.raises(CommandError, match=words):
        server.ask(serve(answers))


def test_nobody_there():
    with pytest.raises(CommandError, match="no server at"):
        server.ask("http://127.0.0.1:9")
    with pytest.raises(CommandError, match="must start with http"):
        server.ask("127.0.0.1:30000")
    with pytest.raises(CommandError, match="without /v1 at its end"):
        server.ask("http://127.0.0.1:30000/v1/")


def decode(**fields):
    return {"cuda_graph_config": {"decode": {"backend": "full", **fields}}}


@pytest.mark.parametrize(
    ("changes", "words", "flag"),
    [
        (decode(max_bs=4, bs=[1, 2, 4]), "up to 4 requests, of 8", "--cuda-graph-max-bs-decode 8"),
        (decode(max_bs=8, bs=[1, 2, 4, 8]), None, None),
        (decode(max_bs=256, bs=[1, 2]), "up to 2 requests", "--cuda-graph-max-bs-decode 8"),
        (decode(max_bs=2), "up to 2 requests", "--cuda-graph-max-bs-decode 8"),
        (decode(max_bs=2, bs=[]), "up to 2 requests", "--cuda-graph-max-bs-decode 8"),
        (decode(), None, None),
        (decode(max_bs="many", bs="1"), None, None),
        (decode(bs=[None, "x", -1]), None, None),
        ({"cuda_graph_max_bs": 4, "version": "0.5.13"}, "up to 4 requests", "--cuda-graph-max-bs 8"),
        ({"cuda_graph_bs": [1, 2], "cuda_graph_max_bs": 8, "version": "0.5.13"}, "up to 2", "--cuda-graph-max-bs 8"),
        # each rank runs its share
        ({**decode(bs=[1, 2]), "enable_dp_attention": True, "dp_size": 4, "chunked_prefill_size": 4096}, None, None),
        # so does each batch of a pipeline
        (decode(max_bs=4) | {"pp_size": 2}, None, None),
        (decode(max_bs=2) | {"pp_size": 2}, "up to 2 requests, of 4", "--cuda-graph-max-bs-decode 4"),
        (decode(max_bs=1) | {"pp_size": 16}, None, None),
        (decode(max_bs=4) | {"pp_size": 2, "pp_max_micro_batch_size": 8}, "of 8", "--cuda-graph-max-bs-decode 8"),
    ],
)
def test_graphs_for_fewer_requests_than_may_run_are_told(changes, words, flag):
    told = found(PLANNED | changes).get("CUDA graphs")
    assert (told is not None) is (words is not None)
    if told:
        assert told.state == WARN and words in told.found and told.fix.startswith(f"{flag},")


@pytest.mark.parametrize(
    ("changes", "is_told"),
    [
        ({"disable_overlap_schedule": True}, True),
        ({"disable_overlap_schedule": False}, False),
        ({"disable_overlap_schedule": True, "pp_size": 1}, True),
        # where SGLang turns it off by itself
        ({"disable_overlap_schedule": True, "pp_size": 2}, False),
        *(({"disable_overlap_schedule": True, "speculative_algorithm": name}, False) for name in ("NGRAM", "OTHER")),
        ({"disable_overlap_schedule": True, "speculative_algorithm": "EAGLE", "version": "0.5.13"}, False),
        *(({"disable_overlap_schedule": True, "speculative_algorithm": name}, True) for name in ("EAGLE", "DSPARK")),
    ],
)
def test_steps_that_do_not_overlap_are_told(changes, is_told):
    told = found(PLANNED | changes).get("overlap of steps")
    assert (told is not None) is is_told and (told is None or told.fix == "remove --disable-overlap-schedule")


@pytest.mark.parametrize(("chunk", "is_told"), [(512, True), (1023, True), (1024, False), (4096, False)])
def test_chunks_that_no_plan_would_make_are_told(chunk, is_told):
    told = found(PLANNED | {"chunked_prefill_size": chunk}).get("prefill chunk")
    assert (told is not None) is is_told and (told is None or f"{chunk} tokens" in told.found)


def test_a_pipeline_is_named():
    assert "TP4, PP2" in found(PLANNED | {"tp_size": 4, "pp_size": 2})["server"].found
    assert "PP" not in found(PLANNED | {"tp_size": 4, "pp_size": 1})["server"].found


LOAD = {"token_usage": 0.2, "num_queue_reqs": 5.0, "num_running_reqs": 8.0}


@pytest.mark.parametrize(
    ("info", "metrics", "found_words", "fix_words"),
    [
        ({}, {}, "all 8 request slots are taken", "more --max-running-requests"),
        ({}, {"num_running_reqs": 7.0}, "5 requests wait while the KV cache is 20% full", "ask again"),
        ({"max_running_requests": None}, {}, "5 requests wait", "ask again"),
        ({"enable_dp_attention": True, "dp_size": 2}, {"num_running_reqs": 4.0}, "all 8", "more --max-running"),
        # of a pipeline SGLang tells the requests of one batch
        ({"pp_size": 2}, {"num_running_reqs": 4.0}, "all 8", "more --max-running"),
        ({"pp_size": 2}, {"num_running_reqs": 3.0}, "5 requests wait", "ask again"),
        ({"pp_size": 2, "pp_max_micro_batch_size": 8}, {"num_running_reqs": 7.0}, "5 requests wait", "ask again"),
        ({"pp_size": 16}, {"num_running_reqs": 0.0}, "20% full", "ask again"),
        ({}, {"token_usage": 0.97}, "97% full", "fewer --max-running-requests"),
        ({"mem_fraction_static": 0.6}, {"token_usage": 0.97}, "0.6 leaves it little", "a larger --mem-fraction-static"),
        ({"mem_fraction_static": 0.6}, {"num_queue_reqs": 0.0}, "20% full, 0 waiting", ""),
    ],
)
def test_requests_that_wait_for_slots_are_not_sent_to_fewer_slots(info, metrics, found_words, fix_words):
    told = found(PLANNED | info, LOAD | metrics)["load"]
    assert found_words in told.found and fix_words in told.fix and (told.state == WARN) == bool(fix_words)


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"cpu_offload_gb": 20}, "--cpu-offload-gb 20:"),
        ({"cpu_offload_gb": 0.5}, "--cpu-offload-gb 0.5:"),
        ({"offload_group_size": 4, "cpu_offload_gb": 0}, "--offload-group-size 4:"),
        ({"offload_group_size": -1, "cpu_offload_gb": 0}, None),
        ({"offload_group_size": None, "cpu_offload_gb": "20"}, None),
    ],
)
def test_weights_that_are_copied_in_each_step_are_told(info, words):
    told = found(PLANNED | info).get("weights")
    assert (told is not None) is (words is not None) and (told is None or told.found.startswith(words))


@pytest.mark.parametrize(
    ("info", "is_told"),
    [
        ({"disable_radix_cache": True}, True),
        ({"disable_radix_cache": False}, False),
        ({"disable_radix_cache": True, "disaggregation_mode": "null"}, True),
        ({"disable_radix_cache": True, "disaggregation_mode": "decode"}, False),  # SGLang's own
    ],
)
def test_a_server_that_reads_every_turn_anew_is_told(info, is_told):
    assert ("cached prefixes" in found(PLANNED | info)) is is_told
