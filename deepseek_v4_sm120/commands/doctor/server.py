"""A running server's own answers: /server_info (or /get_server_info) and /metrics; each argument with cost and fix.

An answer may have any shape: what is not there, or is not what SGLang answers, is NOT RUN and never passes.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from deepseek_v4_sm120.commands import streaming_session
from deepseek_v4_sm120.commands.console import CommandError, one_line
from deepseek_v4_sm120.commands.doctor import host_cache_checks, load_checks, model_checks
from deepseek_v4_sm120.commands.doctor.finding import OK, Finding, fail, not_run, ok, warn
from deepseek_v4_sm120.commands.doctor.http_get import check_url, get
from deepseek_v4_sm120.commands.plan import memory, models
from deepseek_v4_sm120.commands.speculation import (
    COMPACT,
    DSPARK,
    EAGLE,
    MODE_VARIABLE,
    WRONG,
    Speculation,
    hazards,
    of_variables,
)
from deepseek_v4_sm120.settings import read_settings
from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.names import IS_TRUE, RUST_FRONT, RUST_FRONT_SINCE, WITHOUT_FRONT

MOST_PLANNED = 65_535  # tokens of a pass that SGLang's planner of groups takes, which has 16 bits for each; then 65,536
PREFILL_ROW_LIMIT = 11_673  # 0.5.14: an extend of more rows takes a kernel that has no SM120 code
INTERVAL_OF_OURS = "prefill_interval"  # our patch, in place where prefill_decode_interval_0_5_17 is on
LEAST_CHUNK = 4096  # rows, of a rank
OVERLAPPED_DRAFTS_SINCE = (0, 5, 14)
GRAPHS_BY_PHASE_SINCE = (0, 5, 14)  # --cuda-graph-max-bs was one for both before
HIGH_FRACTION = 0.95
DEEP_DRAFTS = 5
REQUEST_TIMEOUTS = ("SGLANG_REQ_WAITING_TIMEOUT", "SGLANG_REQ_RUNNING_TIMEOUT")  # in seconds, off by default
TIMEOUTS_OF_ONE_RANK_SINCE = (0, 5, 20)
WORDS_KEPT_SINCE = (0, 5, 18)  # in front of a tool call that is streamed
CHUNK_CUT_SINCE = (0, 5, 16)  # where the sliding windows have no room for a chunk (sglang #31681)
CACHED_UNCUT_SINCE = (0, 5, 18)  # but not where it is the prompt's own cached beginning that takes the room (#32700)
LOCKED_PAGES = 2  # of sliding windows, by that beginning
LATER_LEVELS = "0731"  # in the names of checkpoints whose levels of effort are not the first ones'
LATER_LEVELS_SINCE = (0, 5, 18)
MORE_PASSES = "a long prompt is read in as many more passes, each of which reads all experts and waits for its launches"
OTHER_EXPERTS = ("humming", "deep_gemm")  # backends for FP4 experts that we do not replace
GREATEST = 1e12  # of any number that an argument or a metric can be
# what the checks look at: the kind of value, and whether they cannot do without
WHOLE, SHARE, SWITCH, WORDS = "a whole number", "a number", "true or false", "words"
FIELDS = {
    "version": (WORDS, True),
    "model_path": (WORDS, True),
    "tp_size": (WHOLE, True),
    "chunked_prefill_size": (WHOLE, True),
    "max_total_num_tokens": (WHOLE, False),  # of the KV cache
    "context_length": (WHOLE, True),
    "max_running_requests": (WHOLE, True),
    "mem_fraction_static": (SHARE, True),
    "moe_runner_backend": (WORDS, True),
    "disable_cuda_graph": (SWITCH, False),  # newer releases have cuda_graph_config
    "disable_custom_all_reduce": (SWITCH, True),
    "disable_overlap_schedule": (SWITCH, False),
    "pp_size": (WHOLE, False),
    "pp_max_micro_batch_size": (WHOLE, False),
    "nnodes": (WHOLE, False),
    "cpu_offload_gb": (SHARE, False),
    "offload_group_size": (WHOLE, False),
    "enable_mixed_chunk": (SWITCH, False),
    "prefill_decode_interval": (WHOLE, False),
    "attention_backend": (WORDS, False),
    "speculative_algorithm": (WORDS, False),
    "speculative_num_draft_tokens": (WHOLE, False),
    "enable_symm_mem": (SWITCH, False),
    "disable_radix_cache": (SWITCH, False),
    "enable_dp_attention": (SWITCH, False),
    "dp_size": (WHOLE, False),
    "attn_dp_size": (WHOLE, False),  # 0.5.22 and later, where dp_size is 1 beside it
    "enable_hierarchical_cache": (SWITCH, False),
    "hicache_write_policy": (WORDS, False),
    "swa_prefix_tails": (WHOLE, False),  # 0.5.21 and later
    "swa_full_tokens_ratio": (SHARE, False),
    "_swa_full_tokens_ratio_explicitly_set": (SWITCH, False),
    streaming_session.FIELD: (SWITCH, False),
    "stream_interval": (WHOLE, False),
    "tool_call_parser": (WORDS, False),
    "reasoning_parser": (WORDS, False),
}


@dataclass(frozen=True)
class Answers:
    """What the server said. `metrics` is None where there are none, `metrics_problem` says why."""

    info: dict
    metrics: dict[str, float] | None
    applied: frozenset[str] | None = None  # patches of running servers by their reports; None: no reports
    metrics_problem: str = "the server has none"
    model_type: str | None = None  # of /model_info
    variables: Mapping[str, str] | None = None  # its environment, by the reports; None: no reports

    def get(self, name: str):
        """A field of FIELDS as the kind of value that it is; None where it is absent or of another kind."""
        return _as_kind(FIELDS[name][0], self.info.get(name))

    @property
    def version(self) -> tuple[int, ...]:
        numbers = (self.get("version") or "").split(".")[:3]
        return tuple(int(n) for n in numbers if re.fullmatch("[0-9]{1,4}", n))

    @property
    def is_v4(self) -> bool:
        """Whether it serves DeepSeek-V4, as far as it tells."""
        if self.model_type is not None:
            return self.model_type in models_served.MODEL_TYPES
        return "deepseek-v4" in str(self.get("model_path")).lower() or self.get("attention_backend") == "dsv4"

    @property
    def attention_ranks(self) -> int:
        """How many data-parallel ranks the attention has."""
        told = self.get("attn_dp_size") or (self.get("dp_size") if self.get("enable_dp_attention") else 1)
        return told or 1

    @property
    def stages(self) -> int:
        """Of a pipeline; each has layers of its own, and a batch in its turn."""
        return self.get("pp_size") or 1

    @property
    def cards(self) -> int:
        """Of tensors, in all stages."""
        return (self.get("tp_size") or 1) * self.stages

    @property
    def most_running(self) -> int | None:
        """Requests of one step at most, as SGLang divides --max-running-requests."""
        slots, told = self.get("max_running_requests"), self.get("pp_max_micro_batch_size")
        return None if slots is None else told or max(1, slots // self.attention_ranks // self.stages)

    @property
    def is_shadowed(self) -> bool:
        """Whether SGLang's own runs beside ours, as far as its environment is known."""
        return read_settings(self.variables or {}).shadow is not None

    def unread(self) -> list[str]:
        """In words: fields that the checks need and that are not told, and those that are told as something else."""
        found = []
        if self.get("version") is not None and len(self.version) < 3:
            found.append(f"version is {one_line(self.get('version'), 40)!r}, no release whose faults are known")
        if self.info.get("disable_cuda_graph") is None and not isinstance(self.info.get("cuda_graph_config"), dict):
            found.append("neither disable_cuda_graph nor cuda_graph_config is told")
        for name, (kind, is_needed) in FIELDS.items():
            value = self.info.get(name)
            if value is None and is_needed:
                found.append(f"{name} is not told")
            elif value is not None and self.get(name) is None:
                told = one_line(value, 40) if isinstance(value, str | int | float) else f"a {type(value).__name__}"
                found.append(f"{name} is {told!r}, not {kind}")
        return found


def _as_kind(kind: str, value):
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind in (WHOLE, SHARE):
        if not is_number or not abs(value) <= GREATEST:  # not a number either
            return None
        return value if kind == SHARE else int(value) if value == int(value) else None
    if kind == SWITCH:
        return value if isinstance(value, bool) else None
    return one_line(value) if isinstance(value, str) else None


def ask(url: str, api_key: str | None = None) -> Answers:
    """CommandError in one sentence when nobody, or somebody else, answers."""
    base = check_url(url)
    text = get(f"{base}/server_info", api_key)
    if text is None:
        text = get(f"{base}/get_server_info", api_key)
    if text is None:
        raise CommandError(f"{base} answers, but has neither /server_info nor /get_server_info: not an SGLang server")
    try:
        info = json.loads(text)
    except (ValueError, RecursionError):  # no JSON, or deeper than anybody's answer
        info = None
    if not isinstance(info, dict) or "version" not in info:
        raise CommandError(f"{base}/server_info is not what SGLang answers: {one_line(text[:400], 80)!r}")
    model_type = _model_type(base, api_key)
    if info.get("context_length") is None:  # told only where it was given; else it is the model's
        info |= {"context_length": _model_length(base, api_key)}
    try:
        metrics = get(f"{base}/metrics", api_key)
    except CommandError as error:
        return Answers(info, None, metrics_problem=str(error), model_type=model_type)
    return Answers(info, None if metrics is None else read_metrics(metrics), model_type=model_type)


def _told(base: str, paths: tuple[str, ...], api_key: str | None) -> dict:
    """The object that the first of these routes answers with; an empty one where none does."""
    try:
        text = next((text for path in paths if (text := get(f"{base}{path}", api_key))), "")
        told = json.loads(text)
    except (CommandError, ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def _model_type(base: str, api_key: str | None) -> str | None:
    """model_type of the server's model; None where it does not say."""
    found = _told(base, ("/model_info", "/get_model_info"), api_key).get("model_type")
    return found if isinstance(found, str) else None


def _model_length(base: str, api_key: str | None):
    """The context that the server's model is served with, as /v1/models tells it; None where it does not."""
    models_ = _told(base, ("/v1/models",), api_key).get("data")
    first = models_[0] if isinstance(models_, list) and models_ else None
    return first.get("max_model_len") if isinstance(first, dict) else None


SUMMED = ("num_requests_total", "prompt_tokens_total", "cached_tokens_total", "generation_tokens_total")  # by labels


def read_metrics(text: str) -> dict[str, float]:
    """Prometheus text: metric -> greatest value over its labels, of SUMMED the sum; no number that is not finite."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        name = name.partition("{")[0].strip()
        if name.startswith("sglang:"):
            try:
                number = float(value)
            except ValueError:
                continue
            if abs(number) <= GREATEST:
                name = name.removeprefix("sglang:")
                before = found.get(name)
                found[name] = number if before is None else before + number if name in SUMMED else max(before, number)
    return found


def checks(answers: Answers) -> Iterator[Finding]:
    """Every argument that is known to be slow or dangerous on SM120, then what the metrics say."""
    name = f"SGLang {answers.get('version')}, {answers.get('model_path')}, TP{answers.get('tp_size')}"
    name += f", PP{answers.stages}" * (answers.stages > 1)
    if answers.get("model_path") is None:
        yield not_run("server", f"{name}: it does not tell its model, so nothing is known of it")
    elif "deepseek" not in str(answers.get("model_path")).lower() and answers.get("attention_backend") != "dsv4":
        yield warn("server", name, "these checks are for DeepSeek-V4; nothing is known of this model", "")
    else:
        yield ok("server", name)
    yield from model_checks.findings(answers.get("model_path"), answers.model_type, answers.get("tp_size"))
    found = [finding for rule in RULES for finding in rule(answers)]
    yield from found
    if unread := answers.unread():
        yield not_run("arguments", "; ".join(unread), "ask an SGLang server that doctor knows (0.5.12 to 0.5.23)")
    elif not [finding for finding in found if finding.state != OK]:
        yield ok("arguments", "none that is known to be slow on SM120")
    yield from load_checks.checks(answers)


def _graphs(a: Answers) -> Iterator[Finding]:
    config = a.info.get("cuda_graph_config")
    decode = config.get("decode") if isinstance(config, dict) else None
    decode = decode if isinstance(decode, dict) else {}
    if a.get("disable_cuda_graph") or decode.get("backend") == "disabled":
        cost = "a decode step is about 2,000 launches: several times slower without a graph"
        yield warn("CUDA graphs", "off", cost, "remove --disable-cuda-graph")
        return
    captured = (
        decode.get("bs") or a.info.get("cuda_graph_bs") or [decode.get("max_bs") or a.info.get("cuda_graph_max_bs")]
    )
    numbers = [_as_kind(WHOLE, number) for number in captured] if isinstance(captured, list) else []
    most, running = max((number for number in numbers if (number or 0) > 0), default=None), a.most_running
    if most is not None and running is not None and most < running:
        found = f"decode is captured up to {most} requests, of {running} that may run"
        cost = f"steps of more than {most} are about 2,000 launches each: several times slower without a graph"
        flag = "--cuda-graph-max-bs" + "-decode" * (a.version >= GRAPHS_BY_PHASE_SINCE)
        yield warn("CUDA graphs", found, cost, f"{flag} {running}, or fewer --max-running-requests")


def _overlap(a: Answers) -> Iterator[Finding]:
    """Where SGLang does not turn it off by itself, as it does for pipelines, and up to 0.5.13 for speculation."""
    algorithm = a.get("speculative_algorithm")
    is_kept = a.version >= OVERLAPPED_DRAFTS_SINCE and algorithm in (EAGLE, DSPARK)
    if a.get("disable_overlap_schedule") and a.stages == 1 and (not algorithm or is_kept):
        cost = "the cards wait in every step while the host takes its tokens and prepares the next one"
        yield warn("overlap of steps", "off", cost, "remove --disable-overlap-schedule")


def _no_prefixes(a: Answers) -> Iterator[Finding]:
    if a.get("disable_radix_cache") and a.is_v4 and a.info.get("disaggregation_mode") in (None, "null"):
        cost = "every turn of a conversation is read anew from its first token"
        yield warn("cached prefixes", "none are kept", cost, "remove --disable-radix-cache")


def _offloaded(a: Answers) -> Iterator[Finding]:
    size, group = a.get("cpu_offload_gb") or 0, a.get("offload_group_size") or 0
    if size > 0 or group > 0:
        flag = f"--cpu-offload-gb {size:g}" if size > 0 else f"--offload-group-size {group}"
        cost = "each step copies them over PCIe, and wo_a and the experts are SGLang's own"
        yield warn("weights", f"{flag}: some lie in host memory", cost, "without that flag; `plan` says what fits")


def _experts(a: Answers) -> Iterator[Finding]:
    backend = a.get("moe_runner_backend")
    if "fp8" in str(a.get("model_path")).lower():
        return  # no FP4 experts
    if a.version[:3] == (0, 5, 12) and backend in ("auto", "triton"):
        cost = "packed FP4 experts fail an assertion"
        yield fail("experts", f"moe_runner_backend={backend}", cost, "--moe-runner-backend marlin")
    elif backend == "triton":
        yield warn("experts", "triton", "FP4 experts expanded to FP8: twice the memory", "--moe-runner-backend auto")
    elif backend in OTHER_EXPERTS:
        cost = "FP4 experts run through SGLang's own kernels: mxfp4_moe serves flashinfer_mxfp4 and marlin"
        yield warn("experts", str(backend), cost, "--moe-runner-backend auto")


def _all_reduce(a: Answers) -> Iterator[Finding]:
    tp = a.get("tp_size") or 1
    if (a.get("nnodes") or 1) > 1:
        yield ok("all-reduce", f"NCCL's, between {a.get('nnodes')} hosts; `doctor` on each looks at their network")
        return
    if "all_reduce" in (a.applied or ()) and not a.get("disable_custom_all_reduce"):
        return  # ours is asked: "sums between the cards" says what its probe found
    if tp == 2 and a.get("disable_custom_all_reduce"):
        cost = "NCCL: about 10 us more in each of 87 all-reduces of a step"
        yield warn("all-reduce", "custom all-reduce off", cost, "remove --disable-custom-all-reduce")
    elif tp > 2 and a.get("disable_custom_all_reduce"):
        cost = "NCCL, 16 to 30 us in each of 87 all-reduces of a step: ours is not asked either"
        yield warn("all-reduce", "custom all-reduce off", cost, "remove --disable-custom-all-reduce")
    elif tp > 2 and a.applied is None:
        found = "ours, or NCCL at 21 to 30 us a sum: not known without reports"
        yield not_run("all-reduce", found, "start server and doctor with DSV4_SM120_REPORT=<one folder>")
    elif tp > 2:
        fix = "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE=1 (0.5.22 and later)"
        if a.version >= (0, 5, 22):
            found, cost = (
                "NCCL, unless the PCIe kernel is on; the server does not tell",
                "21.1, not 13.6 ms a step at TP8",
            )
            yield not_run("all-reduce", f"{found}: {cost}", fix)
        else:
            cost = f"NCCL: custom all-reduce serves 2 PCIe cards only; {tp} pay 21 to 30 us per all-reduce"
            yield warn("all-reduce", f"TP{tp} over PCIe", cost, "SGLang 0.5.22 or newer, then " + fix)


def _prefill(a: Answers) -> Iterator[Finding]:
    chunk = a.get("chunked_prefill_size")
    if chunk is None:
        return  # said by `unread`
    if chunk <= 0:
        cost = "a long prompt is one forward: out of memory, and nobody else gets a token meanwhile; of more than "
        cost += f"{MOST_PLANNED:,} tokens it ends the server"
        yield fail("prefill chunk", "no chunking", cost, "--chunked-prefill-size 8192")
    elif a.version[:3] == (0, 5, 14) and chunk > PREFILL_ROW_LIMIT:
        cost = f"0.5.14 crashes above {PREFILL_ROW_LIMIT} rows in one extend"
        yield fail("prefill chunk", str(chunk), cost, "--chunked-prefill-size 8192")
    elif chunk > MOST_PLANNED + (a.version >= (0, 5, 21)):
        cost = "a prompt that fills it ends the server: SGLang plans no pass of so many tokens"
        yield fail("prefill chunk", str(chunk), cost, "--chunked-prefill-size 8192")
    elif a.attention_ranks > 1 and chunk < LEAST_CHUNK:
        found = f"{chunk} rows a rank: SGLang divides --chunked-prefill-size by the attention's data-parallel ranks"
        yield warn("prefill chunk", found, MORE_PASSES, f"--chunked-prefill-size {LEAST_CHUNK * a.attention_ranks}")
    elif a.attention_ranks == 1 and chunk < memory.CHUNKS[-1]:
        found = f"{chunk} tokens; `plan` goes down to {memory.CHUNKS[-1]}, and no further"
        yield warn("prefill chunk", found, MORE_PASSES, f"--chunked-prefill-size {LEAST_CHUNK}; `plan` says what fits")
    context = a.get("context_length")
    if context is not None and chunk > 0:
        scratch = memory.index_logits_bytes(chunk, context)
        if scratch > 2 << 30 and (a.is_shadowed or "index_select" not in (a.applied or ())):
            size = f"up to {scratch / 2**30:.1f} GiB for one chunk at {context} tokens"
            if a.applied is None:
                found = f"chunk {chunk} x context {context}: {size}, unless index_select is in place"
                yield not_run("prefill scratch", found, "start server and doctor with DSV4_SM120_REPORT=<one folder>")
                return
            fix = f"--chunked-prefill-size {memory.chunk_for(context, 2 << 30)}, or a smaller --context-length"
            why = "shadow mode runs it beside ours" if a.is_shadowed else "index_select is not in place there"
            cost = f"the stock indexer's logits take {size}; {why}"
            yield warn("prefill scratch", f"chunk {chunk} x context {context}", cost, fix)


def _fairness(a: Answers) -> Iterator[Finding]:
    if a.get("max_running_requests") == 1 or INTERVAL_OF_OURS in (a.applied or ()):
        return  # no other stream waits, or what `plan` sets of 0.5.17 has them go on
    if "prefill_decode_interval" in a.info:
        if not a.get("prefill_decode_interval"):
            cost = "a long prompt stops all other streams: 2 to 3 tokens/s for half a minute was measured"
            yield warn("prefill and decode", "no interleaving", cost, "--prefill-decode-interval 8")
    elif not a.get("enable_mixed_chunk"):
        cost = "a long prompt stops all other streams; this release has no --prefill-decode-interval"
        fix = "0.5.19 or newer; 0.5.17: DSV4_SM120_SET=prefill_decode_interval_0_5_17=on; or a smaller chunk"
        yield warn("prefill and decode", "no interleaving", cost, fix)


def _memory(a: Answers) -> Iterator[Finding]:
    fraction, running = a.get("mem_fraction_static"), a.get("max_running_requests")
    if fraction is not None and fraction >= HIGH_FRACTION:
        cost = "0.95 to 0.975 killed a rank at 240K to 550K tokens, hours after the start"
        yield warn("memory fraction", f"{fraction}", cost, "--mem-fraction-static 0.93; `plan` computes what is safe")
    slots_cost = memory.has_request_states(a.version)
    if (
        slots_cost
        and running is not None
        and running > 64
        and "deepseek-v4-pro" not in str(a.get("model_path")).lower()
    ):
        speculative = bool(a.get("speculative_algorithm"))
        stages = models.FLASH.of_stages(a.stages if 1 <= a.stages <= models.FLASH.layers else 1)
        taken = max(memory.c128_state_bytes(stage, running, speculative) for stage in stages)
        cost = f"C128 states of {running} requests take {taken / 1e9:.1f} GB of every card, used or not"
        yield warn("request slots", f"max_running_requests={running}", cost, "--max-running-requests <your streams>")


def _timeouts(a: Answers) -> Iterator[Finding]:
    given = a.variables or {}
    set_ = [f"{name}={given[name]}" for name in REQUEST_TIMEOUTS if _is_positive(given.get(name))]
    if set_ and a.cards > 1 and a.version < TIMEOUTS_OF_ONE_RANK_SINCE:
        cost = "each card ends requests by its own clock: at the limit two part, and the server hangs (sglang #27221)"
        fix = "unset, or SGLang 0.5.20 or newer (#37143 mended it)"
        yield warn("request timeouts", ", ".join(set_), cost, fix)


def _front(a: Answers) -> Iterator[Finding]:
    value = (a.variables or {}).get(RUST_FRONT, "")
    if a.is_v4 and value.lower() in IS_TRUE and a.version >= RUST_FRONT_SINCE:
        yield warn("front", f"{RUST_FRONT}={value}", WITHOUT_FRONT, f"unset {RUST_FRONT}")


def _is_positive(value: str | None) -> bool:
    return re.fullmatch(r"\s*\+?0*(\d+\.?\d*|\.\d+)\s*", value or "") is not None and float(value) > 0


def _prefixes(a: Answers) -> Iterator[Finding]:
    """Where the sliding windows' pool has as many slots as the requests need, and those of a number of prefixes."""
    running, chunk, context = (
        a.get(name) for name in ("max_running_requests", "chunked_prefill_size", "context_length")
    )
    sized_by_ratio = (
        a.get("_swa_full_tokens_ratio_explicitly_set") or a.get("swa_full_tokens_ratio") != memory.SWA_RATIO
    )
    if "swa_prefix_tails" not in a.info or sized_by_ratio or a.get("disable_radix_cache") or not a.is_v4:
        return
    if not running or not chunk or chunk < 0 or not context:
        return
    told = a.get("swa_prefix_tails")
    tails = memory.CACHED_PREFIXES * running if told is None else told
    kept = memory.kept_prefix_tokens(models.FLASH, tails, chunk)
    if kept < context:
        found = f"windows of {tails} prefixes, which prompts of {kept:,} tokens fill"
        cost = "a longer prompt drops the cached prefixes of all other conversations, whatever room the KV cache has"
        fix = f"{_more_windows(a, running, chunk, context, tails)}; `plan` says what fits (InferenceX #3346)"
        yield warn("prefix cache", found, cost, fix)


def _more_windows(a: Answers, running: int, chunk: int, context: int, tails: int) -> str:
    """What keeps the windows of two conversations of full length, or of one, or as many as leave the KV cache half of
    its tokens and a request of full length; by Flash's sizes."""
    tokens, rows = a.get("max_total_num_tokens"), a.get("speculative_num_draft_tokens") or 0
    sized = functools.partial(memory.pools, models.FLASH, a.version, requests=running, chunk=chunk, drafts=rows)
    now = sized(prefix_tails=tails)

    def left(wanted: int) -> int:
        return (tokens or 0) - math.ceil((sized(prefix_tails=wanted).window_bytes - now.window_bytes) / now.token_bytes)

    both = {name: memory.prefix_tails_for(models.FLASH, n * context, chunk) for n, name in ((2, "two"), (1, "one"))}
    if not tokens:
        return f"--swa-prefix-tails {both['two']} for two of full length"
    least = max(context, tokens // 2)
    for name, wanted in both.items():
        if left(wanted) >= least:
            return f"--swa-prefix-tails {wanted} for {name} of full length leaves {left(wanted):,} tokens of {tokens:,}"
    room = tokens * now.token_bytes + now.window_bytes + now.states
    wanted = memory.wanted_prefix_tails(models.FLASH, now, chunk=chunk, room=room, tokens=least)
    if wanted is None or wanted <= tails:
        return "a shorter --context-length, more cards, or a memory fraction that `plan` has"
    kept = memory.kept_prefix_tokens(models.FLASH, wanted, chunk)
    return f"--swa-prefix-tails {wanted} for {kept:,} tokens leaves {left(wanted):,} of {tokens:,}; or less context"


def _small_windows(a: Answers) -> Iterator[Finding]:
    """Where the sliding windows' pool is a share of the tokens: prompts that an idle server never lets in."""
    chunk, tokens, ratio = (
        a.get(name) for name in ("chunked_prefill_size", "max_total_num_tokens", "swa_full_tokens_ratio")
    )
    is_share = (
        a.version < memory.PADDED_SINCE
        or a.get("_swa_full_tokens_ratio_explicitly_set")
        or (ratio or memory.SWA_RATIO) != memory.SWA_RATIO
        or not a.get("max_running_requests")
    )
    if not chunk or chunk < 0 or not tokens or len(a.version) < 3 or not is_share or not a.is_v4:
        return
    page = memory.PAGE_TOKENS
    windows, asked = int(tokens * (ratio or memory.SWA_RATIO)) // page * page, chunk + page
    is_cached = not a.get("disable_radix_cache") and asked < windows <= asked + LOCKED_PAGES * page
    if a.version < CHUNK_CUT_SINCE and windows <= asked:
        which, source = "a prompt that fills a chunk", "sglang #31205"
    elif is_cached and "cached_beginning" in (a.applied or ()):
        return
    elif is_cached and not CHUNK_CUT_SINCE <= a.version < CACHED_UNCUT_SINCE:
        which, source = "a prompt that goes on from a cached one by a chunk or more", "since sglang #32700"
    else:
        return
    cost = f"{which} is never let in, on an idle server, too: it and all behind it wait ({source})"
    found = f"{windows:,} slots in chunks of {chunk:,} tokens"
    yield warn("sliding windows", found, cost, f"--chunked-prefill-size {max(page, chunk // 2 // page * page)}")


def _unsafe_speculation(a: Answers) -> Iterator[Finding]:
    algorithm, rows = a.get("speculative_algorithm"), a.get("speculative_num_draft_tokens")
    if algorithm is None or not a.is_v4:
        return
    if rows is None or len(a.version) < 3:
        yield not_run("speculation", f"{algorithm}: its draft tokens or its release are not told", "see `arguments`")
        return
    told = {"mode": None} if a.variables is None else of_variables(a.variables)
    symmetric, cards = bool(a.get("enable_symm_mem")), a.get("tp_size") or 1
    found = Speculation(algorithm, rows, symmetric=symmetric, cards=cards, **told)
    for kind, hazard in hazards(a.version, found, a.applied):
        cost = f"{kind}: {hazard.does} ({hazard.source})"
        yield (fail if kind == WRONG else warn)("speculation", f"{found.drafts}: {hazard.what}", cost, hazard.fix)
    if algorithm == DSPARK and found.mode is None:
        why = f"{MODE_VARIABLE} of the server is not known; {COMPACT} crashes, or worse"
        yield not_run("speculation", why, "start server and doctor with DSV4_SM120_REPORT=<one folder>")


def _speculation(a: Answers) -> Iterator[Finding]:
    drafts = a.get("speculative_num_draft_tokens")
    if drafts is not None and drafts > DEEP_DRAFTS and a.get("max_running_requests") != 1:
        cost = "each draft row reads 1.6 GB more per step and card on 2 cards; k=3 beat k=7 by 10% under load"
        # of EAGLE SGLang makes the draft tokens of the steps, whatever they were set to
        fix = "--speculative-num-steps 3 or fewer (DSPARK: --speculative-dspark-block-size 3)"
        yield warn("speculation", f"{drafts} draft tokens", cost, fix)


def _sessions(a: Answers) -> Iterator[Finding]:
    if a.get(streaming_session.FIELD) and a.is_v4:
        cost = f"{streaming_session.DOES} ({streaming_session.SOURCE})"
        yield fail("sessions", streaming_session.FLAG, cost, streaming_session.INSTEAD)


def _parsers(a: Answers) -> Iterator[Finding]:
    for name, value in (("tool_call_parser", "deepseekv4"), ("reasoning_parser", "deepseek-v4")):
        if name in a.info and not a.get(name):
            cost = "tool calls or thoughts arrive as raw markup in the text"
            yield warn("parsers", f"no {name}", cost, f"--{name.replace('_', '-')} {value}")
    many = "speculation" if a.get("speculative_algorithm") else f"--stream-interval {a.get('stream_interval')}"
    is_many = a.get("speculative_algorithm") or (a.get("stream_interval") or 1) > 1
    if a.get("tool_call_parser") == "deepseekv4" and is_many and a.version < WORDS_KEPT_SINCE:
        cost = "in streams, words in front of a tool call are lost where a step brings several tokens (sglang #34458)"
        yield warn("parsers", f"{many}, tool calls", cost, "SGLang 0.5.18 or newer, or no streaming")


def _effort(a: Answers) -> Iterator[Finding]:
    if LATER_LEVELS in str(a.get("model_path")) and a.is_v4 and a.version < LATER_LEVELS_SINCE:
        cost = 'reasoning_effort "high" adds nothing, "max" is the checkpoint\'s "high" (sglang #33185)'
        yield warn("reasoning effort", "levels of the first checkpoints", cost, "SGLang 0.5.18 or newer (#33140)")


RULES: tuple[Callable[[Answers], Iterator[Finding]], ...] = (
    *(
        _graphs,
        _overlap,
        _no_prefixes,
        _offloaded,
        _experts,
        _all_reduce,
        _prefill,
        _fairness,
        _memory,
        _timeouts,
        _prefixes,
        _small_windows,
        host_cache_checks.findings,
        _unsafe_speculation,
        _speculation,
    ),
    *(_sessions, _parsers, _effort, _front),
)
