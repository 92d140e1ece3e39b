"""From a request (model, cards, context, streams) to a plan: what it takes, whether it fits, the flags with reasons."""

from __future__ import annotations

import functools
import math
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deepseek_v4_sm120 import OPS
from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.doctor import facts
from deepseek_v4_sm120.commands.plan import choices, memory, roofline
from deepseek_v4_sm120.commands.plan.models import FP8, Model
from deepseek_v4_sm120.commands.speculation import DSPARK, EAGLE, TEXT, Speculation, advise, refuse_if_unsafe
from deepseek_v4_sm120.ops import all_reduce_sizes
from deepseek_v4_sm120.settings import asks_for
from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.adapters import prefill_graphs
from deepseek_v4_sm120.sglang_patches.defaults import CAPTURED_ROWS, HALF_ROWS

TPS = (1, 2, 4, 8)
REPORTED_PER_GB = 97887 / 96  # MiB that the driver reports per GB of the label, RTX PRO 6000
CHUNK_WITH_OTHERS = 4096  # about half a second of prefill on 2 or 4 cards by published rates
DECODE_SHARE, MOST_INTERVAL = 0.3, 32  # of the time while a long prompt is read; steps for it
STEP = 0.01  # of --mem-fraction-static
ENOUGH = 2  # times the tokens of all streams at full length: more capacity is worth less than a chunk or prefill graphs
MOST_STREAMS = 4096
LEAST_MEMORY_GB, MOST_MEMORY_GB = 8, 1024
IMAGE = "lmsysorg/sglang:v{version}"
MOUNT = "/opt/deepseek_v4_sm120"
BUILT = '"$PWD/build/deepseek_v4_sm120/.."'  # of another folder than build/ Docker says that it does not exist
PROFILE_MOUNT = "/opt/dsv4-profile.json"
HOME = Path("/root")  # in the image
NOTICEABLE = 0.02  # of a step: less is not worth its copy's memory
NEWEST_READ = (0, 5, 23)  # every release from 0.5.12 to this one: tests/test_plan_pools.py


@dataclass(frozen=True)
class Request:
    model: Model
    gpus: int
    memory_mib: int
    context: int
    concurrency: int
    speculation: Speculation | None
    sglang: str
    replaced: tuple[str, ...] = OPS  # the operators that nothing leaves out
    profile: str | None = None  # the file that says so
    profile_unused: str | None = None  # why a server makes nothing of the file that was given
    switched_off: tuple[str, ...] = ()  # operators, by DSV4_SM120_SET
    draft_head: bool | None = None  # drafts guess with a copy of the head in E4M3, likewise; None: where it pays
    also_set: Mapping[str, str] = field(default_factory=dict)  # what else it says, which no size here hangs on
    prefill_graphs: int | None = None  # rows of a pass in graphs, at most, likewise; None: where there is room
    sums_us: Mapping[str, Mapping[int, float]] = field(default_factory=dict)  # by provider: rows -> us, by the profile
    load: str = TEXT  # what is written: speculation.TEXT or STRUCTURE
    insist: bool = False  # take a speculation that is known to answer wrongly
    off: bool = False  # DSV4_SM120=off: nothing is replaced
    shadow: str | None = None  # DSV4_SM120_SHADOW: SGLang's own run beside ours, and hold their weights

    @property
    def version(self) -> memory.Version:
        return tuple(map(int, re.match(r"(\d+)\.(\d+)\.(\d+)", self.sglang).groups()))

    @property
    def image(self) -> str | None:
        """SGLang's image of exactly this version; None of a build that is no release."""
        return None if re.search(r"dev|\+", self.sglang) else IMAGE.format(version=self.sglang)

    @property
    def wo_a_bf16(self) -> bool:
        return "wo_a" not in self.replaced

    @property
    def rows(self) -> int:
        """Rows of a request that a step verifies; 0 without speculation."""
        return 0 if self.speculation is None else self.speculation.rows

    @property
    def most_rows(self) -> int:
        """Rows of a decode or verify step, at most."""
        return self.concurrency * max(1, self.rows)

    @property
    def could_have_draft_head(self) -> bool:
        return "fp8_linear" in self.replaced and self.rows > 0 and self.version >= choices.DRAFT_HEAD_SINCE

    @property
    def has_draft_head(self) -> bool:
        """Whether drafts guess with a copy of the head in E4M3: as the user says; else the model's own drafts, where a
        step reads noticeably less."""
        if not self.could_have_draft_head:
            return False
        if self.draft_head is not None or self.speculation.algorithm != EAGLE:
            return bool(self.draft_head)
        with_it, without = (self.drafted_step_seconds(self.speculation.rows - 1, one) for one in (True, False))
        return with_it <= (1 - NOTICEABLE) * without

    def drafted_step_seconds(self, drafts: int, draft_head: bool) -> float:
        """The least time of a step of EAGLE with so many drafts."""
        context, head_bytes = min(self.context, roofline.CONTEXT), 1.0 if draft_head else 2.0
        sizes = self.model, self.gpus, self.concurrency, context, drafts
        return roofline.speculating_seconds(*sizes, wo_a_bf16=self.wo_a_bf16, head_bytes=head_bytes)

    @property
    def may_keep_prefixes(self) -> bool:
        """Whether more sliding windows may be held for cached prefixes: not where SGLang's own attention holds a copy
        of that pool."""
        return "sparse_decode" in self.replaced and self.shadow is None

    @property
    def may_capture(self) -> tuple[int, ...]:
        """Rows of a prompt's pass in graphs at most, the wish first; 0: none. Of speculation beside the model's own
        drafts alone, which are in no graph then."""
        since = choices.PREFILL_GRAPHS_SINCE if self.speculation is None else choices.WITH_MTP_SINCE
        has_others = self.speculation is not None and self.speculation.algorithm != EAGLE
        if self.version < since or has_others or "index_select" not in self.replaced:
            return (0,)
        if self.prefill_graphs is not None:
            return (self.prefill_graphs,)
        if self.shadow is not None and self.version < choices.SHADOWED_SINCE:
            return (0,)
        return (*dict.fromkeys((prefill_graphs.worth_capturing(self.gpus), CAPTURED_ROWS)), 0)

    @property
    def may_halve(self) -> bool:
        """Whether passes of a prompt's rows in graphs may go in halves: not where the user has said how they go, or
        something that keeps all of them whole."""
        said = self.also_set
        is_said = choices.HALVES in said or self.prefill_graphs is not None
        has_one_order = said.get("reproducible") == "on" and self.gpus > all_reduce_sizes.ONE_ORDER_RANKS
        are_whole = self.shadow is not None or has_one_order
        if is_said or are_whole or asks_for(said, choices.DEALT_STREAMS):
            return False
        return self.gpus > 1 and self.version >= choices.IN_GRAPHS_SINCE and self.may_capture[0] > 0


@dataclass(frozen=True)
class Flag:
    name: str
    value: str
    reason: str


@dataclass
class Plan:
    request: Request
    chunk: int
    fraction: float
    weights: float
    reserves: list[memory.Reserve]
    pools: memory.Pools
    tokens: int
    captured: int = 0  # rows of a prompt's pass in graphs, at most
    prefix_tails: int | None = None  # windows of cached prefixes; None: SGLang's own number
    flags: list[Flag] = field(default_factory=list)
    environment: list[Flag] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    interval: int = 0

    @property
    def halves(self) -> bool:
        """Whether its greatest passes in graphs go in halves."""
        return self.captured >= 2 * HALF_ROWS and self.request.may_halve

    @property
    def static_bytes(self) -> float:
        """What --mem-fraction-static gives to weights and pools."""
        return self.fraction * self.card_bytes

    @property
    def card_bytes(self) -> int:
        return self.request.memory_mib * (1 << 20)

    @property
    def window_needed(self) -> int:
        """Sliding-window slots that must be there at once: two chunks in flight, the window and two pages a request."""
        return 2 * self.chunk + self.request.concurrency * (self.request.model.window + 2 * memory.PAGE_TOKENS)

    @property
    def has_window(self) -> bool:
        """Where a release sizes that pool by the requests, it gives them what its scheduler needs."""
        return self.pools.window_tokens is not None or self.pools.window(self.tokens) >= self.window_needed

    @property
    def fits(self) -> bool:
        return self.tokens >= self.request.context and self.has_window

    @property
    def left_free(self) -> float:
        """Bytes outside of the static part that no reserve claims."""
        return self.card_bytes - self.static_bytes - sum(r.bytes for r in self.reserves)

    @property
    def off_by(self) -> float:
        """Bytes by which the estimates of what is outside of the static part may be short."""
        return sum(r.off_by for r in self.reserves)

    @property
    def spare(self) -> float:
        """Bytes of capacity beyond one request of full length."""
        return (self.tokens - self.request.context) * self.pools.token_bytes

    @property
    def is_tight(self) -> bool:
        """It fits only if the estimates hold: less is left, outside or inside of the static part, than they may be
        short by."""
        return self.fits and (self.left_free < self.off_by or self.spare < self.weights * memory.WEIGHTS_OFF_BY)


def check(request: Request) -> None:
    """CommandError for a request that contradicts itself, the model, or what is known to be safe."""
    m = request.model
    if request.gpus < 1:
        raise CommandError(f"--gpus must be at least 1, got {request.gpus}")
    if request.gpus not in TPS or m.heads % request.gpus or m.o_groups % request.gpus:
        usable = [tp for tp in TPS if m.heads % tp == 0 and m.o_groups % tp == 0]
        near = max([tp for tp in usable if tp <= request.gpus], default=usable[0])
        raise CommandError(f"--gpus {request.gpus}: {m.name} divides into {usable} ranks; take {near} of the cards")
    if not 1024 <= request.context <= m.max_context:
        raise CommandError(f"--context must be 1024 to {m.max_context} tokens for this model, got {request.context}")
    if not 1 <= request.concurrency <= MOST_STREAMS:
        raise CommandError(f"--concurrency must be 1 to {MOST_STREAMS}, got {request.concurrency}")
    check_memory(request.memory_mib / REPORTED_PER_GB)
    if request.version < (0, 5, 12):
        raise CommandError(f"SGLang {request.sglang} does not have this model; take 0.5.17 or newer")
    if request.version >= (0, 6):
        raise CommandError(f"SGLang {request.sglang} is newer than what this release knows (below 0.6)")
    if request.speculation is not None and request.speculation.algorithm != m.drafter:
        brings = "an MTP block (--spec mtp)" if m.drafter == EAGLE else "DSPARK's drafter (--spec dspark)"
        raise CommandError(f"--spec: {m.name} brings {brings}, nothing to draft with as {request.speculation.drafts}")
    unsafe(request)


def unsafe(request: Request) -> list[str]:
    """What is known of its speculation and tolerated; CommandError where it is not."""
    r = request
    return refuse_if_unsafe(r.version, r.speculation, r.replaced, insist=r.insist, release=r.sglang)


def check_memory(memory_gb: float) -> None:
    """memory_gb: of a card, as sold. CommandError for what no card has, and for what is no number."""
    if not LEAST_MEMORY_GB - 0.01 <= memory_gb <= MOST_MEMORY_GB:
        raise CommandError(f"--memory must be {LEAST_MEMORY_GB} to {MOST_MEMORY_GB} GB per card, got {memory_gb:g}")


def make(request: Request) -> Plan:
    """The plan with the largest prefill chunk that leaves room; the caller looks at `fits`."""
    check(request)
    wanted = memory.CHUNKS[0] if request.concurrency == 1 else CHUNK_WITH_OTHERS
    chunks, may_capture = [chunk for chunk in memory.CHUNKS if chunk <= wanted], request.may_capture
    is_said = request.prefill_graphs is not None  # by the user: SGLang captures as much, whatever the chunk
    wishes = [(chunk, rows if is_said else min(rows, chunk)) for chunk in chunks for rows in may_capture]
    # whole chunks in halves, of which SGLang's own kernel between two cards does not take the sums
    halved = [(chunks[0], chunks[0])] if request.may_halve and chunks[0] == memory.CHUNKS[0] else []
    wishes = dict.fromkeys(halved + wishes)
    plan = _best([_sized(request, chunk, rows, with_errors=True) for chunk, rows in wishes])
    if not plan.fits:  # with what the estimates may be short by kept free; without, it may
        plan = _best([_sized(request, chunk, may_capture[-1], with_errors=False) for chunk in chunks])
    plan.interval = 0 if choices.says_interval(request) else _interval(request, plan.chunk)
    _flags(plan)
    return plan


def _best(plans: list[Plan]) -> Plan:
    """The first, the largest chunk with graphs, that costs hardly any capacity or none that is missed: twice what all
    streams at full length hold is enough, half of it for the prefix cache. Graphs of more than the usual rows are worth
    only what nobody misses. Where none fits, the most capacity."""
    request, most = plans[0].request, max(plan.tokens for plan in plans)
    enough = ENOUGH * request.concurrency * request.context
    usual = CAPTURED_ROWS if request.prefill_graphs is None else request.prefill_graphs
    least = {p.captured: enough if p.captured > usual else min(0.9 * most, enough) for p in plans}
    return next((p for p in plans if p.fits and p.tokens >= least[p.captured]), max(plans, key=lambda p: p.tokens))


def _sized(request: Request, chunk: int, captured: int, with_errors: bool) -> Plan:
    m, tp, version = request.model, request.gpus, request.version
    total = request.memory_mib * (1 << 20)
    reserves = memory.reserves(
        m,
        tp=tp,
        context=request.context,
        chunk=chunk,
        rows=request.most_rows,
        replaced=request.replaced,
        drafts=request.has_draft_head,
        captured=prefill_graphs.captured_rows(captured) if captured else (),
        shadow=request.shadow is not None,
    )
    outside = sum(r.bytes + (r.off_by if with_errors else 0.0) for r in reserves)
    fraction = math.floor((1 - outside / total) / STEP) * STEP
    fraction = round(max(0.0, min(memory.MOST_FRACTION, fraction)), 2)  # as it is given to the server
    weights = memory.weight_bytes(m, tp, drafts=request.rows > 0, wo_a_bf16=request.wo_a_bf16)
    if request.shadow is not None:
        weights += memory.shadow_bytes(m, tp, drafts=request.rows > 0, replaced=request.replaced)
    sized = functools.partial(memory.pools, m, version, requests=request.concurrency, chunk=chunk, drafts=request.rows)
    pools, room, tails = sized(), fraction * total - weights, None
    if request.may_keep_prefixes:
        streams = request.concurrency * request.context
        tails = memory.wanted_prefix_tails(m, pools, chunk=chunk, room=room, tokens=streams)
        pools = pools if tails is None else sized(prefix_tails=tails)
    tokens = pools.tokens(room)
    return Plan(request, chunk, fraction, weights, reserves, pools, tokens, captured, prefix_tails=tails)


def _prefill_rate(gpus: int) -> float:
    return roofline.PUBLISHED_PREFILL.get(gpus, roofline.PUBLISHED_PREFILL[4])[0]


def _decode_of_chunk(request: Request, chunk: int) -> float:
    """How many of a chunk's times a decode step takes, as far as published rates tell."""
    ideal = roofline.step_seconds(
        request.model, request.gpus, request.concurrency, request.context // 4, wo_a_bf16=request.wo_a_bf16
    )
    return roofline.TYPICAL_OVER_IDEAL * ideal * _prefill_rate(request.gpus) / chunk


def _interval(request: Request, chunk: int) -> int:
    """Decode steps after each chunk, so that decode keeps DECODE_SHARE of the time while a prompt is read, as far as
    MOST_INTERVAL lets it."""
    if request.concurrency == 1:
        return 0
    steps = DECODE_SHARE / (1 - DECODE_SHARE) / _decode_of_chunk(request, chunk)
    return max(1, min(MOST_INTERVAL, math.ceil(steps)))


def _flags(plan: Plan) -> None:
    r, m = plan.request, plan.request.model
    add = plan.flags.append
    add(Flag("--model-path", m.path or m.name, f"{m.name}, {m.expert_format.upper()} experts"))
    add(Flag("--tp-size", str(r.gpus), f"{plan.weights / 1e9:.1f} GB of weights a card"))
    add(Flag("--trust-remote-code", "", "the checkpoint's own configuration"))
    followers = "every captured width" + ("" if "index_select" in r.replaced else " and the indexer's logits")
    add(Flag("--context-length", str(r.context), f"the longest request; {followers} grows with it"))
    slots = (
        "C128 states are held per slot" if memory.has_request_states(r.version) else "the streams that were asked for"
    )
    add(Flag("--max-running-requests", str(r.concurrency), f"{slots}; SGLang's default is 256"))
    graphs = "--cuda-graph-max-bs" if r.version < (0, 5, 14) else "--cuda-graph-max-bs-decode"
    add(Flag(graphs, str(r.concurrency), "no graphs for batches that cannot come"))
    reserve = sum(x.bytes for x in plan.reserves) / memory.GIB
    add(Flag("--mem-fraction-static", f"{plan.fraction:.2f}", f"leaves {reserve:.1f} GiB of scratch, itemised above"))
    add(Flag("--chunked-prefill-size", str(plan.chunk), _chunk_reason(plan)))
    if plan.prefix_tails is not None:
        add(Flag("--swa-prefix-tails", str(plan.prefix_tails), _prefixes_reason(plan)))
    _speculation(plan)
    if r.version < (0, 5, 13) and m.expert_format != FP8:
        add(Flag("--moe-runner-backend", "marlin", "0.5.12's default asserts on FP4 experts"))
    add(Flag("--reasoning-parser", "deepseek-v4", "thoughts apart from the answer"))
    add(Flag("--tool-call-parser", "deepseekv4", "tool calls as calls, not as markup"))
    add(Flag("--enable-metrics", "", "for `doctor --url`"))
    _interleaving(plan)
    env = plan.environment.append
    env(Flag("PYTHONPATH", MOUNT, "our folder, in every process of the server"))
    env(Flag("DSV4_SM120_REPORT", "/tmp/dsv4", "what each process applied, for `status` and `doctor`"))
    if r.off:
        env(Flag("DSV4_SM120", "off", "as in your environment: nothing is replaced"))
    elif chosen := choices.of(plan, _interval_reason(plan) if _is_interval_a_choice(plan) else None):
        values, reasons = zip(*chosen, strict=True)
        env(Flag("DSV4_SM120_SET", ",".join(values), "; ".join(dict.fromkeys(reasons))))
    if r.shadow is not None:
        env(Flag("DSV4_SM120_SHADOW", r.shadow, "as in your environment: SGLang's own beside ours, to compare them"))
    if r.profile is not None:
        env(Flag("DSV4_SM120_PROFILE", PROFILE_MOUNT, f"what calibrate found: {r.profile}"))
    if m.expert_format == FP8:
        env(Flag("SGLANG_DSV4_FP4_EXPERTS", "0", "the checkpoint's experts are FP8"))
    _notes(plan)


def _speculation(plan: Plan) -> None:
    r, add = plan.request, plan.flags.append
    if r.speculation is None:
        return
    algorithm, block = r.speculation.algorithm, r.speculation.block
    advice = advise(r.version, algorithm, r.concurrency, r.load)
    reason = advice.reason if block == advice.block else f"as asked; {advice.block} for this load: {advice.reason}"
    if algorithm == DSPARK:
        add(Flag("--speculative-algorithm", DSPARK, "the checkpoint's own drafter"))
        add(Flag("--speculative-dspark-block-size", str(block), reason))
        return
    add(Flag("--speculative-algorithm", EAGLE, "the model's own MTP block"))
    add(Flag("--speculative-num-steps", str(block), reason))
    add(Flag("--speculative-eagle-topk", "1", "the only one for this model"))
    add(Flag("--speculative-num-draft-tokens", str(r.rows), "the verified token and the drafts"))


def _chunk_reason(plan: Plan) -> str:
    if plan.request.concurrency == 1:
        return "one stream: nobody waits for a chunk"
    seconds = plan.chunk / _prefill_rate(plan.request.gpus)
    return f"about {seconds:.1f} s at published rates: the longest that other streams wait"


def _prefixes_reason(plan: Plan) -> str:
    m, default = plan.request.model, memory.CACHED_PREFIXES * plan.request.concurrency
    ours, stock = (memory.kept_prefix_tokens(m, tails, plan.chunk) for tails in (plan.prefix_tails, default))
    kept = min(ours, plan.tokens)
    return f"conversations of {kept:,} tokens stay cached beside each other; by default, {default}, of {stock:,}"


def _interval_reason(plan: Plan) -> str:
    decode = plan.interval * _decode_of_chunk(plan.request, plan.chunk)
    return f"{plan.interval} decode steps after each chunk: decode keeps about {decode / (1 + decode):.0%} of the time"


def _is_interval_a_choice(plan: Plan) -> bool:
    r = plan.request
    return plan.interval > 0 and r.version == (0, 5, 17) and choices.INTERVAL_0_5_17 not in r.also_set


def _interleaving(plan: Plan) -> None:
    r, n = plan.request, plan.interval
    if n == 0:
        return
    if r.version >= (0, 5, 19):
        plan.flags.append(Flag("--prefill-decode-interval", str(n), _interval_reason(plan)))
    elif r.version != (0, 5, 17):
        plan.notes.append(
            f"SGLang {r.sglang} has no way to let streams decode between the chunks of a long prompt: they stop until "
            "it is read. 0.5.19 and later have one"
        )


def _notes(plan: Plan) -> None:
    r = plan.request
    plan.notes += unsafe(r)
    if r.speculation is not None and r.speculation.algorithm == DSPARK:
        plan.notes.append(
            "with our operators DSPARK has run in engines with random weights alone (docs/features.md): let the gate "
            "speculation-equality judge it first"
        )
    if r.model.sees_images:
        plan.notes.append(models_served.SEES_IMAGES)
    if r.profile_unused:
        plan.notes.append(r.profile_unused)
    if r.profile is not None and facts.is_container(Path("/")):
        plan.notes.append(f"{r.profile} lies in this container: the docker line's --mount wants its path on the host")
    if (model := local_model(plan)) is not None and facts.is_container(Path("/")):
        plan.notes.append(f"{model} lies in this container: the docker line's --mount wants its path on the host")
    if r.version > NEWEST_READ:
        newest = ".".join(map(str, NEWEST_READ))
        plan.notes.append(f"nobody has read SGLang {r.sglang} for this; sizes are those of {newest}")
    if r.version < (0, 5, 13) and "index_select" not in r.replaced:
        plan.notes.append("0.5.12 has no fast indexer for SM120, only one that gathers all keys; take 0.5.17 or newer")
    if missing := [op for op in OPS if op not in r.replaced]:
        by = "DSV4_SM120_SET" if set(missing) <= set(r.switched_off) else "the profile"
        by = "DSV4_SM120=off" if r.off else by
        plan.notes.append(f"{by} leaves out {', '.join(missing)}: SGLang's own memory is reckoned there")
    if r.may_capture[0] and r.prefill_graphs is None and not plan.captured:
        plan.notes.append(
            "prompts of a thousand tokens and fewer wait for their launches; DSV4_SM120_SET=prefill_graphs=on puts "
            "them into graphs, for whose memory this plan has no room without less context or fewer streams"
        )
    if r.could_have_draft_head and r.draft_head is None:
        held = memory.draft_head_bytes(r.model, r.gpus, r.concurrency * r.rows) / 1e9
        copy = f"a copy of the head in E4M3, {held:.2f} GB a card: no checkpoint's acceptance was looked at"
        plan.notes.append(
            f"drafts guess with {copy}; compare SGLang's accept len with DSV4_SM120_SET={choices.DRAFT_HEAD}=off"
            if r.has_draft_head
            else f"each guess reads the whole head in bf16; DSV4_SM120_SET={choices.DRAFT_HEAD}=on gives drafts {copy}"
        )
    if r.gpus > 2 and r.version >= (0, 5, 22) and "all_reduce" not in r.replaced:
        plan.notes.append(
            "above 2 cards all-reduce is NCCL; where `doctor` finds that peers move data, try "
            "DSV4_SM120_SET=pcie_ipc_all_reduce=on (35% of a step at TP8 elsewhere)"
        )
    plan.notes += choices.in_vain(r)
    if r.gpus > 1 and "all_reduce" in r.replaced and r.most_rows > all_reduce_sizes.MAX_ROWS:
        plan.notes.append(
            f"steps of {r.most_rows} rows are more than all_reduce takes ({all_reduce_sizes.MAX_ROWS}): the sums "
            "between the cards will be NCCL's, as in the column of the ceilings"
        )
    per_request = plan.tokens // r.context
    if plan.fits and per_request < r.concurrency:
        each = plan.tokens // r.concurrency
        plan.notes.append(
            f"{plan.tokens:,} tokens hold {per_request} request(s) of {r.context:,} at once; {r.concurrency} streams "
            f"may have {each:,} each, beyond that requests wait"
        )


# ---- command lines


def server_arguments(plan: Plan) -> list[str]:
    """Arguments of sglang.launch_server, host and port apart."""
    return [word for flag in plan.flags for word in (flag.name, flag.value) if word]


def launch_line(plan: Plan, host: str = "0.0.0.0", port: int = 30000) -> str:
    """For a machine with SGLang installed."""
    here = {"PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    if plan.request.profile is not None:
        here["DSV4_SM120_PROFILE"] = str(Path(plan.request.profile).resolve())
    env = " ".join(f"{flag.name}={shlex.quote(here.get(flag.name, flag.value))}" for flag in plan.environment)
    words = ["python3", "-m", "sglang.launch_server", "--host", host, "--port", str(port), *server_arguments(plan)]
    return f"{env} {shlex.join(words)}"


def docker_line(plan: Plan, port: int = 30000) -> str | None:
    """With the built folder mounted into SGLang's image; kernel caches are kept in volumes. None: there is no image."""
    if plan.request.image is None:
        return None
    env = " ".join(f"-e {flag.name}={shlex.quote(flag.value)}" for flag in plan.environment)
    mounts, arguments = [mount(BUILT, MOUNT)], server_arguments(plan)
    if (profile := plan.request.profile) is not None:
        mounts.append(mount(shlex.quote(str(Path(profile).resolve())), PROFILE_MOUNT))
    if (model := local_model(plan)) is not None:
        folder = shlex.quote(str(_with_its_links(model)))
        mounts.append(mount(folder, folder))
        arguments = [str(model) if word == plan.request.model.path else word for word in arguments]
    words = ["python3", "-m", "sglang.launch_server", "--host", "0.0.0.0", "--port", str(port), *arguments]
    return (
        f"docker run --rm --gpus all --ipc=host -p {port}:{port} --ulimit memlock=-1 "
        f"-v ~/.cache/huggingface:/root/.cache/huggingface {facts.volumes(facts.cache_folders({}, HOME))} "
        f"{' '.join(mounts)} {env} {plan.request.image} {shlex.join(words)}"
    )


def mount(source: str, target: str) -> str:
    """What must be there: of a source that is missing `docker run -v` makes an empty folder."""
    return f"--mount type=bind,source={source},target={target},readonly"


def local_model(plan: Plan) -> Path | None:
    """The folder of weights on this machine that the plan is for; None: SGLang fetches them by their name."""
    path = plan.request.model.path
    return Path(path).resolve() if path and Path(path).is_dir() else None


def _with_its_links(model: Path) -> Path:
    """The folder to mount: a download's files may be links to files beside it."""
    return Path(os.path.commonpath((model, (model / "config.json").resolve())))
