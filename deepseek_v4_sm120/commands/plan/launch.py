"""From a request (model, cards, context, streams) to a plan: what it takes, whether it fits, the flags with reasons."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable
from pathlib import Path

from deepseek_v4_sm120 import OPS
from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.doctor import facts
from deepseek_v4_sm120.commands.doctor.gpu_checks import IDLE_MEMORY_MIB
from deepseek_v4_sm120.commands.doctor.software_checks import ATTENTION_VARIABLE
from deepseek_v4_sm120.commands.models_table import TENSOR_PARALLEL
from deepseek_v4_sm120.commands.plan import cards, choices, host_cache, hosts, memory, roofline, stages
from deepseek_v4_sm120.commands.plan.models import FP8, Model
from deepseek_v4_sm120.commands.plan.request import DRAFT_HEAD, Flag, Plan, Request
from deepseek_v4_sm120.commands.speculation import DSPARK, EAGLE, refuse_if_unsafe
from deepseek_v4_sm120.ops import all_reduce_sizes
from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.adapters import prefill_graphs
from deepseek_v4_sm120.sglang_patches.defaults import CAPTURED_ROWS

REPORTED_PER_GB = cards.PRO.mib_per_gb  # MiB that the driver reports per GB of the label
CHUNK_WITH_OTHERS = 4096  # about half a second of prefill on 2 or 4 cards by published rates
DECODE_SHARE, MOST_INTERVAL = 0.3, 32  # of the time while a long prompt is read; steps for it
WITHOUT_ITS_KERNEL = (0, 5, 15)  # and its post release: doctor's FLASHINFER_WITHOUT_KERNEL
STEP = 0.01  # of --mem-fraction-static
ENOUGH = 2  # times the tokens of all streams at full length: more capacity is worth less than a chunk or prefill graphs
MOST_STREAMS = 4096
LEAST_MEMORY_GB, MOST_MEMORY_GB = 8, 1024
MOUNT = "/opt/deepseek_v4_sm120"
BUILT = '"$PWD/build/deepseek_v4_sm120/.."'  # of another folder than build/ Docker says that it does not exist
PROFILE_MOUNT = "/opt/dsv4-profile.json"
HOME = Path("/root")  # in the image
LOOPBACK = "127.0.0.1"
OTHERS = (
    "Both answer this machine alone. For others: --host 0.0.0.0 or -p 30000:30000, with both keys, `--api-key` and "
    "`--admin-api-key`; without them whoever reaches the port may empty the cache, stop requests, put other weights in"
)
NEWEST_READ = (0, 5, 23)  # every release from 0.5.12 to this one: tests/test_plan_pools.py


def check(request: Request) -> None:
    """CommandError for a request that contradicts itself, the model, or what is known to be safe."""
    m = request.model
    if request.gpus < 1:
        raise CommandError(f"--gpus must be at least 1, got {request.gpus}")
    stages.check(request)
    host_cache.check(request)
    usable = [tp for tp in TENSOR_PARALLEL if m.heads % tp == 0 and m.o_groups % tp == 0]
    if request.ranks not in usable and request.stages > 1:
        of = f"--pp-size {request.stages} of --gpus {request.gpus} are {request.ranks} cards a stage"
        raise CommandError(f"{of}; {m.name} divides into {usable} ranks")
    if request.ranks not in usable and request.nodes > 1:
        of = f"--gpus {request.gpus_of_host} on each of --nodes {request.nodes} are {request.gpus} cards"
        raise CommandError(f"{of}; {m.name} divides into {usable} ranks")
    if request.ranks not in usable:
        near = max([tp for tp in usable if tp <= request.gpus], default=usable[0])
        raise CommandError(f"--gpus {request.gpus}: {m.name} divides into {usable} ranks; take {near} of the cards")
    if not 1024 <= request.context <= m.max_context:
        raise CommandError(f"--context must be 1024 to {m.max_context} tokens for this model, got {request.context}")
    if not 1 <= request.concurrency <= MOST_STREAMS:
        raise CommandError(f"--concurrency must be 1 to {MOST_STREAMS}, got {request.concurrency}")
    check_memory(request.memory_mib / request.card.mib_per_gb)
    if request.version < (0, 5, 12):
        raise CommandError(f"SGLang {request.sglang} does not have this model; take 0.5.17 or newer")
    if request.version >= (0, 6):
        raise CommandError(f"SGLang {request.sglang} is newer than what this release knows (below 0.6)")
    if request.speculation is not None and m.no_drafter:
        raise CommandError(f"--spec: {m.name} has nothing to draft with: {m.no_drafter}")
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
    only what nobody misses. None that hangs on estimates where another does not. Where none fits, the most capacity."""
    request, most = plans[0].request, max(plan.tokens for plan in plans)
    enough = ENOUGH * request.concurrency * request.context
    usual = CAPTURED_ROWS if request.prefill_graphs is None else request.prefill_graphs
    least = {p.captured: enough if p.captured > usual else min(0.9 * most, enough) for p in plans}
    enough_of = [p for p in plans if p.fits and p.tokens >= least[p.captured]] or [max(plans, key=lambda p: p.tokens)]
    return next((p for p in enough_of if not p.is_tight), enough_of[0])


def _sized(request: Request, chunk: int, captured: int, with_errors: bool) -> Plan:
    m, tp, version = request.model, request.ranks, request.version
    free, drafts = request.card.free_at_start(request.memory_mib * (1 << 20)), request.rows > 0
    most = request.card.most_fraction
    is_behind = drafts and version < memory.DRAFTER_FIRST_SINCE
    weights = _weights(request, drafts and not is_behind)
    has_own = drafts and not is_behind and request.speculation.algorithm == EAGLE
    given_back = memory.head_and_embedding_bytes(m, tp) if has_own else 0.0
    sized = stages.sized(request, chunk, most * free - weights - given_back)
    least = stages.least_prefix_tails(request, chunk)
    pools, tails = sized(prefix_tails=least), least
    reserves = memory.reserves(
        m,
        tp=tp,
        context=request.context,
        chunk=chunk,
        rows=request.most_rows,
        replaced=[op for op in request.replaced if op != "all_reduce" or request.sums_are_ours],
        drafts=request.has_draft_head,
        captured=prefill_graphs.captured_rows(captured) if captured else (),
        halved=request.halved(captured),
        shadow=request.shadow is not None,
        drafter_behind=_weights(request, True) - weights if is_behind else 0.0,
        requests=request.concurrency,
        tokens=pools.tokens(most * free - weights - given_back),
        stages=request.stages,
    )
    outside = sum(r.bytes + (r.off_by if with_errors else 0.0) for r in reserves) - given_back
    fraction = math.floor((1 - outside / max(free, 1.0)) / STEP) * STEP
    fraction = round(max(0.0, min(most, fraction)), 2)  # as it is given to the server
    room = fraction * free - weights - given_back
    if request.may_keep_prefixes:
        wanted = _prefix_tails(request, pools, sized, chunk, room, memory.static_off_by(weights, fraction))
        pools, tails = (pools, least) if wanted is None else (sized(prefix_tails=wanted), wanted)
    tokens = pools.tokens(room)
    return Plan(request, chunk, fraction, weights, reserves, pools, tokens, captured, tails, given_back)


def _prefix_tails(
    request: Request, pools: memory.Pools, sized: Callable, chunk: int, room: float, off_by: float
) -> int | None:
    """The windows of all that the KV cache holds beside all streams at full length. Where it has not that much as it
    is, those of one conversation of full length, for half of the cache at most: with fewer a single long prompt drops
    what all others have cached. None: SGLang's own number. off_by: bytes by which `room` may be short."""
    m, context, short = request.model, request.context, math.ceil(off_by / pools.token_bytes)
    least, holds = request.concurrency * context + short, pools.tokens(room)
    if pools.prefix_tails is not None and holds < least:
        least, one = max(context + short, holds // 2), memory.prefix_tails_for(m, context, chunk)
        if one <= pools.prefix_tails or sized(prefix_tails=one).tokens(room) >= least:
            return one if one > pools.prefix_tails else None
    return memory.wanted_prefix_tails(m, pools, chunk=chunk, room=room, tokens=least)


def _weights(request: Request, drafts: bool) -> float:
    """Of a card, with what shadow mode holds twice; drafts: the drafter's as well. Of stages those of the one that has
    most: SGLang sizes the pools of all by what is left there."""
    return max(_weights_of(request, m, drafts) for m in request.model.of_stages(request.stages))


def _weights_of(request: Request, m: Model, drafts: bool) -> float:
    tp = request.ranks
    weights = memory.weight_bytes(m, tp, drafts=drafts, wo_a_bf16=request.wo_a_bf16)
    weights += memory.angle_tables_bytes(m, request.version, drafts)
    if request.shadow is not None:
        weights += memory.shadow_bytes(m, tp, drafts=drafts, replaced=request.replaced)
    return weights


def _prefill_rate(request: Request) -> float:
    rates = request.card.prefill_per_s or roofline.PUBLISHED_PREFILL
    return rates.get(request.gpus, rates[max(rates)])[0]


def _decode_of_chunk(request: Request, chunk: int) -> float:
    """How many of a chunk's times a decode step takes, or one that verifies drafts and makes new ones (of DSPARK's
    drafter as of an MTP block), as far as published rates tell. Beside streams a chunk goes through one stage after the
    other, in the time that tensors take by our runs on two H200 without peers (590 ms for 553, 8,192 tokens)."""
    sizes = request.model, request.ranks, request.step_requests, request.context // 4
    speeds = {"wo_a_bf16": request.wo_a_bf16, "card": request.card, "link": request.link}
    if request.speculation is None:
        ideal = roofline.step_seconds(*sizes, **speeds)
    else:
        ideal = roofline.speculating_seconds(*sizes, request.rows - 1, **speeds)
    return roofline.TYPICAL_OVER_IDEAL * ideal * _prefill_rate(request) / chunk


def _interval(request: Request, chunk: int) -> int:
    """Decode steps after each chunk, so that decode keeps DECODE_SHARE of the time while a prompt is read, as far as
    MOST_INTERVAL lets it; of a pipeline those of all batches, which SGLang counts together."""
    if request.concurrency == 1:
        return 0
    steps = DECODE_SHARE / (1 - DECODE_SHARE) / _decode_of_chunk(request, chunk)
    return max(1, min(MOST_INTERVAL, math.ceil(steps))) * request.stages


def _flags(plan: Plan) -> None:
    r, m = plan.request, plan.request.model
    add = plan.flags.append
    add(Flag("--model-path", m.path or m.name, f"{m.name}, {m.expert_format.upper()} experts"))
    add(Flag("--tp-size", str(r.ranks), f"{plan.weights / 1e9:.1f} GB of weights a card"))
    plan.flags += stages.flags(r)
    add(Flag("--trust-remote-code", "", "the checkpoint's own configuration"))
    followers = "every captured width" + ("" if "index_select" in r.replaced else " and the indexer's logits")
    add(Flag("--context-length", str(r.context), f"the longest request; {followers} grows with it"))
    slots = (
        "C128 states are held per slot" if memory.has_request_states(r.version) else "the streams that were asked for"
    )
    add(Flag("--max-running-requests", str(r.concurrency), f"{slots}; SGLang's default is 256"))
    graphs = "--cuda-graph-max-bs" if r.version < (0, 5, 14) else "--cuda-graph-max-bs-decode"
    add(Flag(graphs, str(r.step_requests), "no graphs for batches that cannot come"))
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
    add(Flag("--enable-cache-report", "", "each answer's usage says how many tokens of its prompt were cached"))
    plan.flags += host_cache.flags(plan)
    _interleaving(plan)
    plan.flags += hosts.flags(r)
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
    if r.version == WITHOUT_ITS_KERNEL and ("sparse_decode" not in r.replaced or r.shadow is not None):
        env(Flag(ATTENTION_VARIABLE, "triton", "by default its attention imports what its FlashInfer does not have"))
    plan.environment += hosts.environment(r)
    plan.environment += [Flag(*item, "as in your environment: the plan is for these cards") for item in r.cards.items()]
    _notes(plan)


def _speculation(plan: Plan) -> None:
    r, add = plan.request, plan.flags.append
    if r.speculation is None:
        return
    algorithm, block = r.speculation.algorithm, r.speculation.block
    advice = r.advised(algorithm)
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
    seconds = plan.chunk / _prefill_rate(plan.request)
    return f"about {seconds:.1f} s at published rates: the longest that other streams wait"


def _prefixes_reason(plan: Plan) -> str:
    m, default = plan.request.model, memory.CACHED_PREFIXES * plan.request.concurrency
    ours, stock = (memory.kept_prefix_tokens(m, tails, plan.chunk) for tails in (plan.prefix_tails, default))
    kept = min(ours, plan.tokens)
    return f"conversations of {kept:,} tokens stay cached beside each other; by default, {default}, of {stock:,}"


def _interval_reason(plan: Plan) -> str:
    batches = plan.request.stages
    steps = plan.interval // batches
    decode = steps * _decode_of_chunk(plan.request, plan.chunk)
    of_each = f" of each of {batches} batches" if batches > 1 else ""
    return f"{steps} decode steps{of_each} after each chunk: decode keeps about {decode / (1 + decode):.0%} of the time"


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
    plan.notes += [*unsafe(r), *stages.notes(r), *hosts.notes(r), *host_cache.notes(plan)]
    if r.speculation is not None and r.speculation.algorithm == DSPARK:
        plan.notes.append(
            "with our operators DSPARK has run in engines with random weights alone (docs/features.md): let the gate "
            "speculation-equality judge it first"
        )
    if r.model.sees_images:
        plan.notes.append(models_served.SEES_IMAGES)
    if r.model.no_drafter:
        plan.notes.append(f"no speculation: {r.model.no_drafter}")
    plan.notes += r.profile_told
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
        held = memory.draft_head_bytes(r.model, r.ranks, r.concurrency * r.rows) / 1e9
        copy = f"a copy of the head in INT4, {held:.2f} GB a card (the best are computed by the head itself)"
        plan.notes.append(
            f"drafts guess with {copy}; compare SGLang's accept len with DSV4_SM120_SET={DRAFT_HEAD}=off"
            if r.has_draft_head
            else f"each guess reads the whole head in bf16; DSV4_SM120_SET={DRAFT_HEAD}=on gives drafts {copy}"
        )
    if r.ranks > 2 and r.nodes == 1 and r.version >= (0, 5, 22) and "all_reduce" not in r.replaced:
        plan.notes.append(
            "above 2 cards all-reduce is NCCL; where `doctor` finds that peers move data, try "
            "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE=1 (35% of a step at TP8 elsewhere)"
        )
    plan.notes += choices.in_vain(r)
    if r.ranks > 1 and r.sums_are_ours and r.most_rows > all_reduce_sizes.MAX_ROWS:
        plan.notes.append(
            f"steps of {r.most_rows} rows are more than all_reduce takes ({all_reduce_sizes.MAX_ROWS}): the sums "
            "between the cards will be NCCL's, as in the column of the ceilings"
        )
    if plan.fits and plan.kept_prefixes is not None and plan.kept_prefixes < r.context:
        way = "fewer streams, or a shorter --context, leave room for more sliding windows (--swa-prefix-tails)"
        if not r.may_keep_prefixes:
            way = "SGLang's own attention holds a copy of each sliding window, so the plan keeps no more of them"
        plan.notes.append(
            f"a prompt of more than {plan.kept_prefixes:,} tokens drops what other conversations have cached: {way}"
        )
    if plan.fits and r.in_use_mib > IDLE_MEMORY_MIB:
        lacks = math.ceil(plan.fraction * (r.in_use_mib << 20) / plan.pools.token_bytes)
        is_short = ", and no request of full length fits then" if plan.tokens - lacks < r.context else ""
        plan.notes.append(
            f"{r.in_use_mib:,} MiB of a card are in use now: what is still there when the server starts, as a desktop "
            f"is, the KV cache lacks: {min(lacks, plan.tokens):,} of {plan.tokens:,} tokens{is_short}"
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


def launch_line(plan: Plan, port: int = 30000) -> str:
    """For a machine with SGLang installed; it answers that machine alone."""
    here = {"PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    if plan.request.profile is not None:
        here["DSV4_SM120_PROFILE"] = str(Path(plan.request.profile).resolve())
    env = " ".join(f"{flag.name}={shlex.quote(here.get(flag.name, flag.value))}" for flag in plan.environment)
    words = ["python3", "-m", "sglang.launch_server", "--host", LOOPBACK, "--port", str(port), *server_arguments(plan)]
    return f"{env} {shlex.join(words)}"


def docker_line(plan: Plan, port: int = 30000) -> str | None:
    """With the built folder mounted into SGLang's image; kernel caches are kept in volumes; the port is published
    for this machine alone. None: there is no image."""
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
    listens = "0.0.0.0" if plan.request.nodes == 1 else LOOPBACK  # there the host's own network
    words = ["python3", "-m", "sglang.launch_server", "--host", listens, "--port", str(port), *arguments]
    given = f"""'"device={plan.request.given}"'""" if plan.request.given else "all"
    network = f"-p {LOOPBACK}:{port}:{port}" if plan.request.nodes == 1 else hosts.DOCKER
    return (
        f"docker run --rm --gpus {given} --ipc=host {network} --ulimit memlock=-1 "
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
