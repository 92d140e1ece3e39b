"""`python3 -m deepseek_v4_sm120 layers`: asks a running server, or takes a finished record, and judges it.

Exit status: 0 the engine computes the model; 1 a fault was found; 2 it could not be judged.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import time
import traceback
from pathlib import Path

from deepseek_v4_sm120 import LAYERS as VARIABLE
from deepseek_v4_sm120.commands.console import BAD_INPUT, CommandError, Progress, print_json, print_table, say
from deepseek_v4_sm120.commands.disclosure import API_KEY
from deepseek_v4_sm120.commands.doctor.http_get import check_url
from deepseek_v4_sm120.commands.layers import asking
from deepseek_v4_sm120.settings import settings

ROWS = {"cpu": 2, "cuda": 8}  # of each request's in a pass
CARD_BYTES = 10 << 30  # free on a card that judges
LIMIT_S = 7200.0
INDEX_FP4 = "enable_deepseek_v4_fp4_indexer"  # SGLang's argument
NEEDED = (  # of config.json
    *("num_hidden_layers", "hidden_size", "vocab_size", "compress_ratios", "num_attention_heads", "o_groups"),
    *("index_n_heads", "index_topk", "n_routed_experts", "num_experts_per_tok", "num_hash_layers", "swiglu_limit"),
    *("routed_scaling_factor", "rms_norm_eps", "hc_sinkhorn_iters", "rope_theta", "compress_rope_theta"),
    "rope_scaling",
)
SPARE = 2.5  # times what the experts take, a layer: measured on a shared core, 35 rows, ratio 4 (of 128 less)
MADE_BYTES = 16 << 30  # of memory at most, reckoned: a sublayer's weights in float64, and the record's pages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", help=f"where the server records (default: {VARIABLE})")
    parser.add_argument("--url", help="the running server that is asked, like http://127.0.0.1:30000")
    parser.add_argument("--api-key", help=f"the server's; others can read it here: better the variable {API_KEY}")
    parser.add_argument("--record", help="a finished record, in place of --url: a folder in the server's")
    parser.add_argument(
        "--model", help="the checkpoint's folder, or its name in Hugging Face's cache (default, of a record: its)"
    )
    lengths = {"type": int, "nargs": "*", "metavar": "TOKENS"}
    sent = "prompts of so many tokens, sent {} (default: %(default)s)"
    parser.add_argument("--alone", default=list(asking.ALONE), help=sent.format("one by one"), **lengths)
    parser.add_argument("--together", default=list(asking.TOGETHER), help=sent.format("at once"), **lengths)
    parser.add_argument("--new", type=int, default=asking.NEW, help="tokens of each answer (default: %(default)s)")
    parser.add_argument("--rows", type=int, help="judged of each request's in a pass (default: 2, on a card 8)")
    parser.add_argument(
        "--device", help="what judges: cpu, or an idle card, cuda:0 (default: one that is idle, or cpu)"
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        default=LIMIT_S,
        help="a judgement that is reckoned to last longer is not begun (default: %(default)g)",
    )
    parser.add_argument("--without-drafts", action="store_true", help="the model alone, not its MTP block")
    parser.add_argument("--keep", action="store_true", help="leave the record where it is")
    parser.add_argument("--json", action="store_true", help="machine-readable")


def run(arguments: argparse.Namespace) -> int:
    if importlib.util.find_spec("torch") is None:
        raise CommandError("this Python has no torch: run this in SGLang's image")
    if (arguments.url is None) == (arguments.record is None):
        raise CommandError("give --url, a running server, or --record, what one has recorded")
    if min([arguments.new, *arguments.alone, *arguments.together, arguments.rows or 1]) < 1 or not arguments.alone:
        raise CommandError("--alone, --together, --new and --rows are numbers of tokens and rows, from 1 on")
    if arguments.new < 2:
        raise CommandError("--new is 2 at least: the first token of an answer is the prompt's")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded: others use the cores, too
    if arguments.record is not None:
        return safely_judged(Path(arguments.record), arguments)
    place = recorded(arguments)
    try:
        return safely_judged(place, arguments)
    finally:
        if not arguments.keep:
            shutil.rmtree(place, ignore_errors=True)


def recorded(arguments: argparse.Namespace) -> Path:
    """The record's folder."""
    folder = arguments.folder or settings().layers
    if folder is None:
        raise CommandError(f"--folder is the one that the server was started with, in {VARIABLE}")
    from deepseek_v4_sm120.commands.layers.checkpoint import folder_of, loaded

    url, folder = check_url(arguments.url), Path(os.path.abspath(folder))
    if arguments.model is None:
        raise CommandError("--model is the checkpoint's folder, or its name in Hugging Face's cache")
    config = loaded(folder_of(arguments.model) / "config.json")
    tokens = sum(arguments.alone) + sum(arguments.together)
    rows = tokens + 8 * arguments.new * (len(arguments.alone) + len(arguments.together)) + 64
    most = 2 * asking.bytes_of(rows, config)
    if not arguments.json:
        end = "kept" if arguments.keep else "deleted behind the judgement"
        say(f"The server records up to {most / 1e9:.1f} GB in {folder}, others' requests of that time, too: {end}.")
    groups = asking.prompts_of(arguments.alone, arguments.together, config["vocab_size"])
    progress = Progress(len(groups))
    with asking.asked(folder, max(arguments.alone + arguments.together) + sum(arguments.together), most) as one:
        requests = asking.send(url, arguments.api_key or os.environ.get(API_KEY), groups, arguments.new, progress.step)
    asking.keep(one, requests, arguments.model)
    return one.place


def safely_judged(place: Path, arguments: argparse.Namespace) -> int:
    """A fault of this command's own, or no memory for it, must not look like one of the engine's: a Python that ends
    by an exception ends with 1."""
    try:
        return judged(place, arguments)
    except CommandError:
        raise
    except Exception:
        say(traceback.format_exc(), sys.stderr)
        return _ended(arguments, ["judging it failed, see above"], {})


def judged(place: Path, arguments: argparse.Namespace) -> int:
    import torch

    from deepseek_v4_sm120.commands.layers import record, verdict
    from deepseek_v4_sm120.commands.layers.checkpoint import Checkpoint, folder_of, loaded
    from deepseek_v4_sm120.commands.layers.judge import Judge

    for file in (record.SENT, record.FACTS):
        if not (place / file).is_file():
            raise CommandError(f"{place} has no {file}: it is no finished record")
    sent, facts = loaded(place / record.SENT), record.facts_of(place)
    name = arguments.model or sent.get("model") or facts.get("model_path")
    if name is None:
        raise CommandError("--model is the checkpoint's folder")
    if sent.get("id") != place.resolve().name:
        return _ended(arguments, ["the requests beside the record are another record's"], facts)
    checkpoint = Checkpoint(folder_of(name))
    lacks = [key for key in NEEDED if key not in checkpoint.config]
    if lacks:
        raise CommandError(f"{checkpoint.folder}/config.json has no {lacks[0]}: it is no DeepSeek-V4's")
    device = arguments.device or idle_card() or "cpu"
    tail = arguments.rows or ROWS[torch.device(device).type]
    progress = Progress(checkpoint.config["num_hidden_layers"])
    judge = Judge(
        *(checkpoint.config, checkpoint, device),
        tail=tail,
        tell=lambda n, most: progress.step(f"layer {n - 1}"),
        index_fp4=bool(facts.get(INDEX_FP4)),
    )
    try:
        asked = record.Sent.of(sent.get("requests") or [])
        with torch.inference_mode():
            for one in record.read(place):
                if not (arguments.without_drafts and one["kind"] != "target"):
                    judge.take(one, asked.segments(one))
            problems = asked.missing()
            if problems:
                return _ended(arguments, [f"the record lacks {text}" for text in problems], facts)
            expected = seconds(judge, checkpoint, device)
            text = f"{judge.judged_rows} rows of {judge.layers} layers, on {device}: about {expected / 60:.0f} minutes"
            progress.note(f"{text}, up to {MADE_BYTES >> 30} GB of memory")
            if expected > arguments.limit_s:
                return _ended(arguments, [f"{text}, above --limit-s: fewer --rows, or an idle card"], facts)
            groups = judge.finish()
    except record.Unjudged as error:
        return _ended(arguments, [str(error)], facts)
    found = verdict.of(groups, judge.layers, wanted(facts, arguments), judge.tokens, drawn(facts))
    found.notes += [*scope(groups, asked, checkpoint.config), *notes_of(facts, asked, arguments)]
    _tell(arguments, groups, found, facts)
    return found.status


def wanted(facts: dict, arguments: argparse.Namespace) -> tuple[str, ...]:
    """The kinds of passes without which nothing is said."""
    from deepseek_v4_sm120.commands.layers import verdict

    algorithm = facts.get("speculative_algorithm")
    if not algorithm:
        return verdict.PLAIN
    if algorithm == "DSPARK" and not arguments.without_drafts:
        return verdict.BLOCKS
    if algorithm != "EAGLE" or arguments.without_drafts:
        return verdict.VERIFIED
    chained = (facts.get("speculative_num_steps") or 1) > 1
    return tuple(mode for mode in verdict.DRAFTED if chained or mode != "draft, decode")


def drawn(facts: dict) -> bool:
    """Whether the MTP block's drafts may be others than the greatest: drawn ones, or of a list of tokens."""
    return any(facts.get(name) for name in ("speculative_use_rejection_sampling", "speculative_token_map"))


def notes_of(facts: dict, asked, arguments: argparse.Namespace) -> list[str]:
    found = [f"left out by the server: {why} ({count})" for why, count in facts.get("left_out", {}).items()]
    if asked.others:
        found.append(f"{asked.others} rows were of requests that this command had not sent")
    algorithm = facts.get("speculative_algorithm")
    if algorithm and algorithm not in ("EAGLE", "DSPARK"):
        found.append(f"what {algorithm} drafts with was not judged: verification was, which decides the answers")
    elif algorithm and arguments.without_drafts:
        found.append("drafts were not judged: verification was, which decides the answers")
    elif algorithm and drawn(facts):
        found.append(
            "which tokens the MTP block drafts was not asked: by the server's flags they are drawn, or of a list"
        )
    return found


def scope(groups: list[dict], asked, config: dict) -> list[str]:
    """What was asked one by one, and what nobody asked."""
    from deepseek_v4_sm120.commands.layers import verdict

    def least(kind: str, what: str) -> int:
        """Of the layers' numbers of units that could be told, the smallest."""
        of_layer: dict = {}
        for group in groups:
            for number, layer in group["layers"].items() if group["what"].startswith(what) else ():
                told = {name for name in verdict.told_units(layer) if name.startswith(f"{kind} ")}
                of_layer.setdefault((group["what"], number), set()).update(told)
        return min(map(len, of_layer.values()), default=0)

    longest = max(map(len, asked.tokens), default=0)
    return [
        f"one by one were asked, in the layer with the fewest: {least('head', 'attention')} of "
        f"{config['num_attention_heads']} heads, {least('expert', 'experts')} of {config['n_routed_experts']} experts",
        f"not asked: positions from {longest} on, more requests at once than were sent, a single key among those of a "
        "page, what fills graphs of other sizes, sampling other than greedy, and a fault in less than one of these",
    ]


def idle_card() -> str | None:
    import torch

    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if torch.cuda.mem_get_info(number)[0] >= CARD_BYTES:
            return f"cuda:{number}"
    return None


def seconds(judge, checkpoint, device: str) -> float:
    """What judging is reckoned to take, by one expert."""
    import torch

    from deepseek_v4_sm120.reference import model

    rows, config = judge.judged_rows, checkpoint.config
    experts, each = config["n_routed_experts"], config["num_experts_per_tok"]
    picked = experts * (1 - (1 - each / experts) ** rows)  # different ones, of rows that choose evenly
    weights = judge.weights.under("layers.0.ffn.experts.0.")
    x = torch.ones(1, config["hidden_size"], dtype=torch.float64, device=device)
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        float(model.mlp(weights, x, None).sum())  # waits for the card
        times.append(time.perf_counter() - begin)
    return SPARE * min(times) * picked * judge.layers


def _ended(arguments, why: list[str], facts: dict) -> int:
    """Not judged."""
    left = [f"left out by the server: {text} ({count})" for text, count in facts.get("left_out", {}).items()]
    if arguments.json:
        print_json({"status": BAD_INPUT, "unjudged": why, "notes": left, "server": facts})
    else:
        say("\n".join(["NOT JUDGED", *(f"  {text}" for text in (*why, *left))]))
    return BAD_INPUT


def _tell(arguments, groups: list[dict], found, facts: dict) -> None:
    from deepseek_v4_sm120.commands.layers import verdict

    if arguments.json:
        lists = {"faults": found.faults, "unjudged": found.unjudged, "notes": found.notes}
        print_json({"status": found.status, **lists, "groups": groups, "server": facts})
        return
    for mode in dict.fromkeys(group["mode"] for group in groups):
        of_mode = [group for group in groups if group["mode"] == mode]
        rows = [
            (str(number), group["what"], str(layer["rows"]), _number(layer["error"]), _worst(layer))
            for group in of_mode
            for number, layer in group["layers"].items()
        ]
        rows.sort(key=lambda row: (row[1] != "embedding", int(row[0]), row[1]))
        print_table(mode, ("layer", "sublayer", "rows", "relative error", "greatest share of a fault"), rows)
        shares = [
            (group["what"], fault, f"{share:.3f}")
            for group in of_mode
            for fault, share in sorted(verdict.told(group).items())
        ]
        print_table(f"{mode}: known faults, 0 not there, 1 there", ("sublayers", "fault", "share"), shares)
    word = {verdict.RIGHT: "RIGHT", verdict.FAULT: "FAULT", verdict.UNJUDGED: "NOT JUDGED"}[found.status]
    lines = [*found.faults, *found.unjudged, *(f"note: {text}" for text in found.notes)]
    say("\n".join([f"\n{word}", *(f"  {text}" for text in lines)]))


def _number(value) -> str:
    return "-" if value is None else f"{value:.4f}"


def _worst(layer: dict) -> str:
    from deepseek_v4_sm120.commands.layers import verdict

    shares = verdict.told(layer)
    worst = max(shares, key=lambda fault: abs(shares[fault]), default=None)
    return "-" if worst is None else f"{shares[worst]:.2f} {worst}"
