"""`plan`: print what fits and the command lines; exit status 1 when it does not fit."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from deepseek_v4_sm120 import OPS, __version__
from deepseek_v4_sm120.commands import console
from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.doctor import facts, nvidia_smi, visible
from deepseek_v4_sm120.commands.doctor.visible import ORDER, VISIBLE
from deepseek_v4_sm120.commands.models_table import TENSOR_PARALLEL
from deepseek_v4_sm120.commands.plan import cards as kinds
from deepseek_v4_sm120.commands.plan import host_cache, hosts, launch, models, roofline, stages
from deepseek_v4_sm120.commands.plan.remedies import remedies
from deepseek_v4_sm120.commands.plan.request import DRAFT_HEAD, PREFILL_GRAPHS, Plan, Request
from deepseek_v4_sm120.commands.speculation import (
    DSPARK,
    EAGLE,
    MOST_DRAFTS,
    STRUCTURE,
    TEXT,
    UNTOUCHED_DRAFT_BLOCK,
    Speculation,
)
from deepseek_v4_sm120.patching import profile
from deepseek_v4_sm120.patching.sources import Sources, package_version, tells_release
from deepseek_v4_sm120.patching.steering import Steering
from deepseek_v4_sm120.settings import settings
from deepseek_v4_sm120.sglang_patches.defaults import CAPTURED_ROWS
from deepseek_v4_sm120.sglang_patches.device_gate import SM120_MAJOR
from deepseek_v4_sm120.sglang_patches.table import TABLE

DEFAULT_SGLANG = "0.5.23"
GIVEN = "NVIDIA_VISIBLE_DEVICES"  # by `docker run --gpus` to its container, and in Kubernetes; all, none, void, a path
CARDS = re.compile(r"(\d+|(GPU|MIG)-[\w./-]+)(,(\d+|(GPU|MIG)-[\w./-]+))*", re.ASCII)
CASE = re.compile(r"(\d+) cards, (\d+) rows")  # of specs/all_reduce.py
SUMMED_BY = ("ours", "nccl")
DRAFTERS = {"mtp": EAGLE, "dspark": DSPARK}  # --spec, by SGLang's names
VERSION = re.compile(r"v?\d{1,4}\.\d{1,4}\.\d{1,4}(\.?(a|b|rc|post|dev)\d{1,12})*(\+[a-z0-9._-]{1,80})?", re.ASCII)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_request_arguments(parser)
    parser.add_argument("--json", action="store_true", help="machine-readable")


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="flash", help=f"{models.KNOWN} (default: flash)")
    parser.add_argument("--experts", choices=(models.FP4, models.FP8), help="format of the experts")
    parser.add_argument("--gpus", type=int, help="cards of one machine (default: those found, else 2)")
    parser.add_argument(
        "--pp-size", type=int, default=1, help="stages of layers in place of tensors, for long prompts (default: 1)"
    )
    parser.add_argument("--memory", type=float, help="GB of a card as sold (default: as found, else 96 or 128)")
    parser.add_argument(
        "--card", choices=tuple(kinds.KINDS), help="of what kind they are (default: as found, else pro)"
    )
    parser.add_argument("--nodes", type=int, default=1, help="hosts with so many cards each (default: 1)")
    parser.add_argument(
        "--dist-init-addr", help=f"with --nodes: address:port of the first host, like 10.0.0.1:{hosts.PORT}"
    )
    parser.add_argument("--interface", help="with --nodes: the network between the hosts, by its name on this one")
    parser.add_argument("--context", type=int, default=393_216, help="longest request in tokens (default: 393216)")
    parser.add_argument("--concurrency", type=int, default=8, help="streams at the same time (default: 8)")
    parser.add_argument("--spec", choices=(*DRAFTERS, "none"), help="speculation (default: what the checkpoint brings)")
    parser.add_argument("--block", type=int, help="drafts a step (default: what suits streams, --load and release)")
    parser.add_argument(
        "--load", choices=(TEXT, STRUCTURE), default=TEXT, help="what is written: prose, or code and tool calls"
    )
    parser.add_argument(
        "--host-cache", type=float, metavar="GB", help="of the host's memory, for cached prompts beyond the KV cache"
    )
    parser.add_argument("--insist", action="store_true", help="take a speculation that is known to answer wrongly")
    parser.add_argument("--sglang", help="its version (default: the one found here, else " + DEFAULT_SGLANG + ")")
    parser.add_argument("--profile", help="file that `calibrate` wrote (default: DSV4_SM120_PROFILE)")


def request_of(arguments: argparse.Namespace) -> Request:
    """CommandError for anything that is not a version, a model, a number of cards, or is no plan's size, and for a
    setting with which no server would start."""
    if problem := Steering(TABLE.defaults, settings(), lambda versions: True, TABLE.operators, TABLE.fixed).problem():
        raise CommandError(problem)
    found = package_version("sglang", Sources())
    given, is_untold = arguments.sglang, found is not None and not tells_release(found)
    sglang = given if given is not None else DEFAULT_SGLANG if found is None or is_untold else found
    if not VERSION.fullmatch(sglang):
        raise CommandError(f"--sglang must be a version like {DEFAULT_SGLANG}, got {sglang!r}")
    sglang = sglang.removeprefix("v")
    if not arguments.model:
        raise CommandError(f"--model must be {models.KNOWN}, got nothing")
    hosts.check(arguments.nodes, arguments.dist_init_addr)
    if arguments.nodes == 1 and (arguments.dist_init_addr or arguments.interface):
        raise CommandError("--dist-init-addr and --interface are for several hosts: --nodes")
    card, of_host, memory_mib, in_use_mib = _machine(arguments)
    gpus = of_host * arguments.nodes
    choices = settings().choices
    switched_off = tuple(op for op in OPS if choices.get(op) == "off")
    measured = _profile(settings().profile if arguments.profile is None else arguments.profile, sglang)
    untold = f"SGLang's version here, {found}, names no release: {DEFAULT_SGLANG}'s sizes, or say --sglang"
    told = (measured.outdated, measured.of_other_cards(gpus), measured.of_fewer_shapes())
    told += (untold,) if given is None and is_untold else ()
    replaced = [op for op in OPS if op not in switched_off and measured.against(op) is None]
    request = Request(
        model=models.find(arguments.model, arguments.experts),
        gpus=gpus,
        memory_mib=memory_mib,
        context=arguments.context,
        concurrency=arguments.concurrency,
        speculation=None,
        sglang=sglang,
        replaced=() if settings().off else tuple(replaced),
        profile=None if measured.warnings else measured.path,
        profile_told=(*measured.warnings, *filter(None, told)),
        switched_off=switched_off,
        draft_head=choices[DRAFT_HEAD] == "on" if DRAFT_HEAD in choices else None,
        also_set={k: v for k, v in choices.items() if k not in (*switched_off, DRAFT_HEAD, PREFILL_GRAPHS)},
        prefill_graphs=_rows_of(choices.get(PREFILL_GRAPHS)),
        sums_us=_sums(measured, gpus // max(1, arguments.pp_size)),
        load=arguments.load,
        insist=arguments.insist,
        off=settings().off,
        shadow=None if settings().off else settings().shadow,
        card=card,
        nodes=arguments.nodes,
        address=arguments.dist_init_addr,
        interface=arguments.interface,
        cards=_chosen_cards(of_host, os.environ),
        given=given_cards(os.environ),
        in_use_mib=in_use_mib or 0,
        stages=arguments.pp_size,
        host_cache_gb=arguments.host_cache,
        host_available=None if in_use_mib is None else host_cache.available_bytes(Path("/")),
    )
    if request.stages > 1 and os.environ.get(stages.PARTITION):
        raise CommandError(f"{stages.PARTITION}: stages of other layers than an even share are not planned; unset it")
    launch.check(request)  # a block is advised by its steps
    return replace(request, speculation=_speculation(request, arguments.spec, arguments.block))


def _rows_of(choice: str | None) -> int | None:
    """Of DSV4_SM120_SET=prefill_graphs: rows in graphs at most, 0 for none; None where nothing is said."""
    return {None: None, "on": CAPTURED_ROWS, "off": 0}[choice] if choice in (None, "on", "off") else int(choice)


def _speculation(request: Request, spec: str | None, block: int | None) -> Speculation | None:
    if block is not None and block < 1:
        raise CommandError(f"--block must be at least 1 draft, got {block}")
    if spec == "none":
        if block is not None:
            raise CommandError(f"--block {block} with --spec none: nothing drafts; leave out one of them")
        return None
    if spec is None and block is None and (request.model.no_drafter or request.stages > 1):
        return None
    algorithm = request.model.drafter if spec is None else DRAFTERS[spec]
    rows = 1 + (request.advised(algorithm).block if block is None else block)
    trained = request.model.dspark_block or UNTOUCHED_DRAFT_BLOCK
    return Speculation(algorithm, rows, cards=request.ranks, trained=trained)


def _sums(measured: profile.Profile, gpus: int) -> dict[str, dict[int, float]]:
    """What a sum between so many cards took, by provider: rows -> microseconds."""
    providers, found = measured.operators.get("all_reduce", {}).get("providers"), {}
    for name in SUMMED_BY:
        provider = providers.get(name) if isinstance(providers, dict) else None
        cases = provider.get("cases") if isinstance(provider, dict) else None
        for one in cases if isinstance(cases, list) else ():  # of which a server looks at nothing
            told, us = (one.get("case"), one.get("us")) if isinstance(one, dict) else (None, None)
            case = CASE.fullmatch(told) if isinstance(told, str) else None
            if case and int(case[1]) == gpus and isinstance(us, int | float) and us > 0:
                found.setdefault(name, {})[int(case[2])] = us
    return found


def _profile(path: str | None, sglang: str) -> profile.Profile:
    """What a server makes of the file, by its own code; CommandError where it would not start.

    The machine may be another one than that which will serve, so of the profile's identity the releases count alone.
    """
    found = profile.consult(path, sglang, profile.Identity(None, None, sglang, __version__))
    if found.problem is not None:
        raise CommandError(found.problem)
    return found


def _machine(arguments: argparse.Namespace) -> tuple[kinds.Card, int, int, int | None]:
    """(kind, how many, MiB of one, MiB in use now of one at most) of this machine's cards, or as is said: then nothing
    is in use, None."""
    gpus, memory_gb = arguments.gpus, arguments.memory
    asked = None if arguments.card is None else kinds.KINDS[arguments.card]
    if memory_gb is not None:
        launch.check_memory(memory_gb)
    if gpus is not None and memory_gb is not None and asked is not None:
        return asked, gpus, int(memory_gb * asked.mib_per_gb), None
    found = cards(nvidia_smi.read(facts.run_command).gpus, os.environ)
    card = asked or (kinds.of_name(found[0].name) if found and found[0] is not None else kinds.PRO)
    usable = max((tp for tp in TENSOR_PARALLEL if tp <= len(found)), default=1 if card.is_hosts else 2)
    gpus = usable if gpus is None else gpus
    if memory_gb is not None or not found or asked is not None:
        return card, gpus, int((card.gb if memory_gb is None else memory_gb) * card.mib_per_gb), None
    if None in found:
        name = visible.names(os.environ)[found.index(None)]
        raise CommandError(f"nvidia-smi does not list {VISIBLE}={name}: --gpus N --memory <GB of one>")
    told = min(gpu.memory_total for gpu in found)
    memory_mib = kinds.host_memory_mib(Path("/")) if card.is_hosts and not told else told
    if not memory_mib:
        raise CommandError(f"the driver does not tell the memory of {found[0].name}: --memory <GB of a card>")
    in_use = max(gpu.memory_used for gpu in found[:gpus]) if gpus <= len(found) else None  # of more cards than are here
    return card, gpus, memory_mib, in_use


def cards(gpus: Sequence, environ: Mapping[str, str]) -> list:
    """Those that can serve, of the kind that ours is for where there are some. Of CUDA_VISIBLE_DEVICES those that it
    names (None: nvidia-smi does not list it), where it has CUDA's own numbers, by speed, of several kinds, as many."""
    if (named := visible.named(gpus, environ)) is not None:
        return named
    served = [gpu for gpu in gpus if gpu.capability is not None and gpu.capability[0] == SM120_MAJOR] or list(gpus)
    return served[: len(visible.names(environ)) or None]


def _chosen_cards(gpus: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that leave so many cards and more, for who starts the server elsewhere: in a container, a unit."""
    is_chosen = len(visible.names(environ)) >= gpus
    return {name: environ[name] for name in (VISIBLE, ORDER) if is_chosen and environ.get(name)}


def given_cards(environ: Mapping[str, str]) -> str:
    """Of the machine's cards those that this container was given; "" where that is all, or is not told."""
    told = environ.get(GIVEN, "") if facts.is_container(Path("/"), environ) else ""
    return told if CARDS.fullmatch(told) else ""


def run(arguments: argparse.Namespace) -> int:
    plan = launch.make(request_of(arguments))
    if arguments.json:
        console.print_json(as_dict(plan))
    else:
        show(plan)
    return 0 if plan.fits else 1


def as_dict(plan: Plan) -> dict:
    r = plan.request
    return {
        "fits": plan.fits,
        "tight": plan.is_tight,
        "free_at_start_bytes": plan.free_bytes,
        "left_free_bytes": plan.left_free,
        "estimates_off_by_bytes": plan.off_by,
        "request": asdict(r),
        "tokens": plan.tokens,
        "weights_bytes": plan.weights,
        "states_bytes": plan.pools.states,
        "window_bytes": plan.pools.window_bytes,
        "reserves": [asdict(x) for x in plan.reserves],
        "flags": [asdict(f) for f in plan.flags],
        "environment": [asdict(f) for f in plan.environment],
        "notes": plan.notes,
        "remedies": [] if plan.fits else remedies(r),
        "launch": launch.launch_line(plan),
        "docker": launch.docker_line(plan),
        "hosts": [{"launch": launch.launch_line(one), "docker": launch.docker_line(one)} for one in _of_hosts(plan)],
        "speed": speed_rows(plan),
        "drafts": draft_rows(plan),
    }


def show(plan: Plan) -> None:
    r = plan.request
    drafts = r.speculation.drafts if r.speculation else "no speculation"
    where = f"{r.gpus_of_host} {r.card.name}" if r.card.is_hosts else f"{r.gpus_of_host} card(s)"
    of_each = f" in each of {r.nodes} hosts" if r.nodes > 1 else f" in {r.stages} stages" if r.stages > 1 else ""
    console.say(
        f"{r.model.name}, {r.model.expert_format.upper()} experts, on {where} of {r.memory_mib} MiB{of_each}, SGLang "
        f"{r.sglang}: {r.concurrency} stream(s), up to {r.context:,} tokens, {drafts}"
    )
    console.print_table("Memory of one card", ("what", "GB", "from"), memory_rows(plan))
    if not plan.fits:
        console.say(f"\n{why_not(plan)}")
        return
    at_once = plan.tokens // r.context
    console.say(f"\n{verdict(plan)}: {plan.tokens:,} tokens of KV cache, {at_once} request(s) of full length at once.")
    rows = [(f.name, f.value, f.reason) for f in (*plan.flags, *plan.environment)]
    console.print_table("Flags and variables", ("flag", "value", "why"), rows)
    header = ("streams", "ceiling, tok/s", "step, ms", "with NCCL", "best published", "by")
    sums = f"all-reduces as {r.profile} has them" if r.sums_us else "all-reduces"
    rate = (
        f"{r.card.bytes_per_s / 1e12:.3g} TB/s"
        if r.card.bytes_per_s >= 1e12
        else f"{r.card.bytes_per_s / 1e9:.0f} GB/s"
    )
    sums += f" over {r.link.name}" if r.nodes > 1 else ""
    title = f"Speed without speculation (ceiling: every byte once at {rate}, then {sums}; nobody reaches it)"
    console.print_table(title, header, speed_rows(plan))
    if drafts := draft_rows(plan):
        title = f"Drafts of the MTP block at {r.concurrency} stream(s), by bytes as above: from which share of right "
        title += "guesses one more pays, and SGLang's accept len without it there (reckoned; not measured on SM120)"
        console.print_table(title, ("drafts", "rows", "step, ms", "pays from", "accept len"), drafts)
    for note in plan.notes:
        console.say(f"\nNote: {note}.")
    for number, one in enumerate(_of_hosts(plan)):
        docker = launch.docker_line(one) or f"no image of SGLang {r.sglang} is known; give --sglang a release"
        on = f" on host {number}" if r.nodes > 1 else ""
        console.say(f"\nWith SGLang installed{on}:\n  {launch.launch_line(one)}\n\nWith Docker{on}:\n  {docker}")
    console.say(f"\n{launch.OTHERS}.")


def _of_hosts(plan: Plan) -> list[Plan]:
    """One for each host that starts it."""
    return [plan if plan.request.nodes == 1 else hosts.of_host(plan, rank) for rank in range(plan.request.nodes)]


def verdict(plan: Plan) -> str:
    """Whether it fits; where that hangs on our estimates, that it does."""
    if not plan.is_tight:
        return "It fits"
    return (
        f"It may fit: {plan.left_free / 1e9:.1f} GB are left free, and the estimates above may be short by "
        f"{plan.off_by / 1e9:.1f} GB; {plan.spare / 1e9:.1f} GB of capacity to spare. "
        "Safer are a shorter --context, fewer streams or more cards"
    )


def memory_rows(plan: Plan) -> list[tuple[str, str, str]]:
    r = plan.request
    pools = plan.pools
    wo_a = "wo_a in bf16 as SGLang holds it on SM120" if r.wo_a_bf16 else "wo_a in FP8 as it is stored"
    twice = "; what is compared twice" if r.shadow else ""
    kept = "the system and what runs there" if r.card.is_hosts else "what the driver keeps"
    at_start = f"estimate: CUDA's context, NCCL, and {kept}"
    rows = [("taken in front of the weights", plan.card_bytes - plan.free_bytes, at_start)]
    of_stage = ", of the stage that has most" if r.stages > 1 else ""
    rows.append(("weights", plan.weights, f"the checkpoint's shapes{of_stage}, {wo_a}{twice}; RoPE's tables"))
    rows += [("C128 states", pools.states, f"{r.concurrency} request slots")] if pools.states else []
    if pools.window_tokens is not None:
        rows.append(
            ("sliding windows", pools.window_bytes, f"{pools.window_tokens:,} slots, by requests, chunk and prefixes")
        )
    tokens = f"{plan.tokens:,} tokens" + ", of the stage that has room for the fewest" * (r.stages > 1)
    rows.append(("KV cache", max(0.0, plan.pool_bytes - pools.fixed_bytes), tokens))
    rows += [(x.what, x.bytes, x.basis) for x in plan.reserves]
    off_by = f"the estimates may be short by {plan.off_by / 1e9:.1f}"
    rows += [("left free", plan.left_free, off_by)]
    return [(what, f"{size / 1e9:7.2f}", source) for what, size, source in rows] + [
        ("card", f"{plan.card_bytes / 1e9:7.2f}", f"{plan.fraction:.2f} of the {plan.free_bytes / 1e9:.2f} static")
    ]


def speed_rows(plan: Plan) -> list[tuple[str, ...]]:
    r, rows = plan.request, []
    if r.gpus == 1:
        return rows
    for streams in sorted({1, r.concurrency}):
        context = min(r.context, roofline.CONTEXT)
        is_flash = r.model.hidden == models.FLASH.hidden  # whose sums calibrate measures
        fast, nccl = (
            roofline.step_seconds(
                *(r.model, r.ranks, math.ceil(streams / r.stages), context),
                wo_a_bf16=r.wo_a_bf16,
                fast=name == "ours",
                measured=r.sums_us.get(name) if is_flash and r.nodes == 1 else None,
                card=r.card,
                link=r.link,
            )
            for name in SUMMED_BY
        )
        is_published = is_flash and r.model.expert_format == models.FP4 and r.card is kinds.PRO
        is_published = is_published and r.nodes == r.stages == 1
        best = roofline.PUBLISHED.get((r.gpus, streams)) if is_published else None
        cells = (f"{streams / fast:.0f} at {context // 1024}K", f"{fast * 1e3:.2f}", f"{streams / nccl:.0f}")
        rows.append((str(streams), *cells, *((f"{best[0]:.0f}", best[1]) if best else ("-", "nobody"))))
    return rows


def draft_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Of EAGLE with so many drafts and none: what a step takes at least, and which share of right guesses makes one
    more pay. What DSPARK's drafter reads for a block is not known to us."""
    r, rows = plan.request, []
    if r.speculation is None or r.speculation.algorithm != EAGLE:
        return rows
    before, draft_head = None, r.has_draft_head
    for drafts in range(MOST_DRAFTS + 1):
        seconds = r.drafted_step_seconds(drafts, draft_head)
        share = None if before is None else roofline.pays_from(seconds / before, drafts)
        says = "-" if before is None else "never" if share is None else f"{share:.0%}"
        length = "-" if share is None or drafts == 1 else f"{sum(share**i for i in range(drafts)):.2f}"
        rows.append((str(drafts), str(r.concurrency * (drafts + 1)), f"{seconds * 1e3:.2f}", says, length))
        before = seconds
    return rows


def why_not(plan: Plan) -> str:
    r = plan.request
    card = plan.free_bytes / 1e9
    scratch = (plan.pools.fixed_bytes + sum(x.bytes for x in plan.reserves)) / 1e9
    if plan.weights > r.card.most_fraction * card * 1e9:
        reason = f"{plan.weights / 1e9:.1f} GB of weights on a card with {card:.1f} GB for them"
    elif plan.weights / 1e9 + scratch > card:
        reason = (
            f"{plan.weights / 1e9:.1f} GB of weights, and {scratch:.1f} GB for {r.concurrency} streams beside them, "
        )
        reason += f"on a card with {card:.1f} GB for them"
    elif plan.tokens >= r.context:
        slots = plan.pools.window(plan.tokens)
        reason = f"{slots:,} sliding-window slots for {r.concurrency} streams, which need {plan.window_needed:,}"
    else:
        reason = f"room for {plan.tokens:,} tokens, one request needs {r.context:,}"
    would = ", or ".join(remedies(r)) or "nothing on one machine of such cards"
    return f"It does not fit: {reason}. What would: {would}."
