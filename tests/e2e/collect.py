#!/usr/bin/env python3
"""Turn run_stage.py's outputs into one table of results and print it.

usage: collect.py STAGE.json .. [--write FILE | --results bench/results] [--commit HASH]

--results writes each of RESULTS that these stages belong to, under the release that ran. Rows have the form of
bench/results: {issue, case, impl, metric, value, bar, met}; bar and met are null where a number is reported and nothing
is demanded of it.
"""

import argparse
import collections
import json
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE)]

import cards_stage  # noqa: E402
import chain_stage  # noqa: E402
import drawn_stage  # noqa: E402
import experts_stage  # noqa: E402
import fault_rows  # noqa: E402
import features_stage  # noqa: E402
import halves_stage  # noqa: E402
import layers_rows  # noqa: E402
import products_stage  # noqa: E402
import prompts_stage  # noqa: E402
import shadow_rows  # noqa: E402
import shared_cards  # noqa: E402
import shortage_rows  # noqa: E402
import soak_rows  # noqa: E402
import start_rows  # noqa: E402
import streams_stage  # noqa: E402

from deepseek_v4_sm120 import OPS as OPERATORS  # noqa: E402

ISSUE = 2  # of the runs themselves
EXIT_CODE = "exit code of the engine run"
SHARE = re.compile(r", (of (stock|that|the whole)|beyond plain)|^times the time without")  # metrics of two engines
RESULTS = {  # name of a result file: stages that go into it
    "e2e": ("ops", "prompt32k", "seams", "shadow43", "ops43", "seams43", "launches43"),
    "e2e_operators": ("index", "router"),
    "e2e_index_seams": ("index_seams",),
    "e2e_dealt_index": ("index2", "index2_43"),
    "e2e_whole_step": ("whole43", "without43", "chain43"),
    "e2e_chain2": ("chain2_43", "speculation2_43"),
    "e2e_chain4": ("chain4_43", "speculation4_43"),
    "e2e_two_cards": ("tp2", "tp2_43"),
    "e2e_four_cards": ("tp4", "tp4_43"),
    "e2e_sums": ("sums2", "sums4", "sums8", "drawn2"),
    "e2e_sums_step": ("sums2_43", "sums4_43"),
    "e2e_speculation": ("speculation", "speculation43", "dspark43", "dspark_lengths43"),
    "e2e_faults": ("faults2",),  # of faults_stage.py
    "e2e_soak": ("soak",),  # of soak_stage.py
    "e2e_start": ("start",),  # of start_stage.py
    **{"e2e_shortage": ("shortage",), "e2e_layers": ("layers",)},  # of shortage_stage.py, layers_stage.py
    "e2e_accepted": ("accepted",),
    "e2e_reproducible": ("reproducible", "reproducible_seams", *(f"reproducible{n}" for n in cards_stage.WORDS)),
    "e2e_reproducible43": (
        "reproducible43",
        *(f"reproducible43_{n}" for n in cards_stage.WORDS),
        "reproducible43_cost",
    ),
    "e2e_features": ("features",),
    "e2e_experts": ("experts", "experts_same", "experts_router", "experts_seams"),
    "e2e_halves": ("halves2_same", "halves4_same", "halves2_combined", "halves2_43"),
    "e2e_streams": ("streams2_same", "streams2_43"),
    "e2e_products": ("products2_same", "products4_same", "products2_43", "products4_43"),
    "e2e_prompts": (
        *("prompts", "prompts2", "prompts_planned", "prompts_planned2", "prompts_same", "prompts_same2"),
        *("prompts_eagle", "prompts_interval", "prompts_interval_stages", "cards2_43", "host_cache43"),
    ),
}
TIMELESS = ("e2e_features", "e2e_sums")  # of any device, since no row is a time
# part of a name -> of its layers
FEWER_EXPERTS = {"lengths_": 16, "_alone": 16, "_without_": 16, "_with_": 16, "43_prompts": 32}
FEWER_EXPERTS |= {f"_products{n}_43": products_stage.EXPERTS for n in products_stage.CARDS}
FEATURE = "feature: "  # how the cases of the stage `features` begin
OF_THEIR_OWN = {  # stages with rows of their own
    **{"faults": fault_rows, "soak": soak_rows},
    **{"start": start_rows, "shortage": shortage_rows, "layers": layers_rows},
}
# runs whose every bit is that of the one they are compared with, and both have their own again; the issue that asks
SAME_BITS = {"index_b": 5, **dict.fromkeys((f"sums{n}_b" for n in cards_stage.WORDS), 20), "index2_dealt": 22}
FINITE_BAR = 0
IMPLEMENTATIONS = {
    "stock": "SGLang stock (FlashMLA, Hopper)",
    "stock43": "SGLang stock (FlashMLA, Hopper)",
    "ops": "ours, DSV4_SM120_FORCE=ops",
    "ops_paged": "ours, DSV4_SM120_FORCE=ops, paged extend",
    "stock32k": "stock, paged extend, a prompt of 32,000 tokens",
    "ops32k_shadow": "ours beside FlashMLA's Hopper kernel, a prompt of 32,000 tokens",
    "ops32k": "ours, DSV4_SM120_FORCE=ops, paged extend, a prompt of 32,000 tokens",
    "ops43": "ours, DSV4_SM120_FORCE=ops",
    "ops_shadow": "ours beside FlashMLA's Hopper kernel",
    "stock43_launches": "SGLang stock (FlashMLA, Hopper)",
    "ops43_launches": "ours, DSV4_SM120_FORCE=ops",
    "seams43_launches": "ours, DSV4_SM120_FORCE=seams",
    "stock43_whole": "SGLang stock (Hopper kernels)",
    "ops43_whole": "ours, every operator on",
    "ops43_shadow": "ours beside FlashMLA's Hopper kernel",
    "seams": "ours, DSV4_SM120_FORCE=seams",
    "seams43": "ours, DSV4_SM120_FORCE=seams",
    "seams_shadow": "ours beside SGLang's Triton kernel",
    "seams43_shadow": "ours beside SGLang's Triton kernel",
    "index_shadow": "ours beside DeepGEMM's logits and SGLang's top-k",
    "index_seams_shadow": "ours beside TileLang's logits and SGLang's top-k",
    "router_shadow": "ours beside SGLang's, the router's choice among it",
    **dict.fromkeys(("index_a", "index_b"), "ours, DSV4_SM120_FORCE=ops, every call ours"),
    "index2_shadow": "ours beside TileLang's logits and SGLang's top-k, index rows dealt to two cards",
    **{
        f"index2{timed}_{dealt}{peers}": f"ours, two cards, index rows {words}{through}"
        for dealt, words in (("dealt", "dealt"), ("undealt", "not dealt"))
        for timed, peers, through in (("", "", ""), ("_43", "", ""), ("_43", "_no_peers", ", NCCL through host memory"))
    },
    **{
        name: text
        for n, cards in cards_stage.WORDS.items()
        for name, text in (
            (f"ops_tp{n}_shadow", f"ours beside SGLang's, {cards}"),
            *((f"{name}_tp{n}", f"ours, every operator on, {cards}") for name in ("ops", "ops43")),
            (f"stock43_tp{n}", f"SGLang stock, {cards} (Hopper kernels)"),
            (f"sums{n}_shadow", f"ours beside SGLang's, {cards} and their sums"),
            *((f"sums{n}_{one}", f"ours, every operator on, {cards}") for one in "ab"),
            (f"nccl43_sums{n}", f"ours with NCCL's sums, {cards}"),
            (f"nccl43_sums{n}_no_peers", f"ours with NCCL's sums through host memory, {cards}"),
            (f"ops43_sums{n}", f"ours, every operator on, {cards}"),
            (f"ops43_sums{n}_host", f"ours, every operator on, {cards}, sums through host memory"),
            (f"stock43_sums{n}", f"SGLang stock and its own sums, {cards}"),
        )
    },
    "plain": "ours, without speculation",
    "eagle112": "ours, EAGLE 1/1/2",
    "eagle314": "ours, EAGLE 3/1/4",
    "dspark3": "ours, DSPARK, a block of 3",
    "accepted_plain": "ours, reproducible, without speculation",
    **{
        f"accepted_{name}_{kind}": f"ours, reproducible, {drafter}, {kind} of the drafts right"
        for name, drafter in (
            ("eagle314", "EAGLE 3/1/4"),
            ("dspark3", "DSPARK, a block of 3"),
            ("eagle516", "EAGLE 5/1/6"),
        )
        for kind in ("none", "half", "all")
    },
    "eagle314_shadow": "ours beside SGLang's, EAGLE 3/1/4",
    "dspark3_shadow": "ours beside SGLang's, DSPARK, a block of 3",
    "stock_plain": "SGLang stock, without speculation",
    "stock_eagle314": "SGLang stock, EAGLE 3/1/4",
    "text43_plain": "ours, reproducible, without speculation",
    "text43_eagle314": "ours, reproducible, EAGLE 3/1/4",
    "text43_eagle314_graphs": "ours, reproducible, EAGLE 3/1/4, prefill graphs as planned",
    **cards_stage.IMPLEMENTATIONS,
    "cost43_without": "ours, not reproducible",
    "cost43_reproducible": "ours, reproducible",
    "stock43_eagle314": "SGLang stock (Hopper kernels), EAGLE 3/1/4",
    "ops43_eagle314": "ours, every operator on, EAGLE 3/1/4",
    "stock43_dspark3": "SGLang stock (Hopper kernels), DSPARK, a block of 3",
    "ops43_dspark3": "ours, every operator on, DSPARK, a block of 3",
    "lengths_told_dspark3": "ours, DSPARK, a block of 3",
    "lengths_asked_dspark3": "ours, DSPARK, a block of 3, its draft's lengths asked of the GPU",
    "ops43_draft_head": "ours, every operator on, EAGLE 3/1/4, drafts with the head in INT4",
    "ops43_glue_draft_head": "ours, EAGLE 3/1/4, the head in INT4, without greedy_argmax and step_tables",
    "ops43_router_draft_head": "ours, every operator on, EAGLE 3/1/4, drafts with the head in INT4, with router_topk",
    **{
        f"{kind}_{name}": f"ours, {'not reproducible' if kind == 'unlike' else 'reproducible'}, {text}"
        for kind, name, text in (
            ("same", "8192", "chunks of 8,192"),
            ("same", "2048", "chunks of 2,048"),
            ("same", "512", "chunks of 512, prefix cache"),
            ("same", "8192_radix", "chunks of 8,192, prefix cache"),
            ("same", "retracted", "chunks of 2,048, prefix cache, requests retracted"),
            ("same", "router_8192", "chunks of 8,192, routers that choose"),
            ("same", "router_512", "chunks of 512, prefix cache, routers that choose"),
            ("same", "router_topk", "chunks of 8,192, the router's choice ours"),
            ("same", "flag", "chunks of 512, prefix cache, --enable-deterministic-inference"),
            ("same", "seams_8192", "chunks of 8,192, SM120 branches"),
            ("same", "seams_512", "chunks of 512, prefix cache, SM120 branches"),
            ("same43", "8192", "chunks of 8,192, 43 layers"),
            ("same43", "512", "chunks of 512, prefix cache, 43 layers"),
            ("unlike", "8192", "chunks of 8,192"),
            ("unlike", "512", "chunks of 512, prefix cache"),
        )
    },
    "stock43_alone": "SGLang stock (Hopper kernels)",
    "ops43_alone": "ours, every operator on",
    **{f"ops43_{kind}_{name}": f"ours, {kind} {name}" for kind in ("with", "without") for name in OPERATORS},
    **{
        features_stage.PREFIX + name: "SGLang stock" if engine.stock_of or engine.is_stock else "ours, reproducible"
        for name, engine in features_stage.ENGINES.items()
    },
    **chain_stage.IMPLEMENTATIONS,
    **drawn_stage.IMPLEMENTATIONS,
    **experts_stage.IMPLEMENTATIONS,
    **halves_stage.IMPLEMENTATIONS,
    **streams_stage.IMPLEMENTATIONS,
    **products_stage.IMPLEMENTATIONS,
    **prompts_stage.IMPLEMENTATIONS,
}
KEPT_ANSWERS = {  # shadow mode keeps the original's result, so these runs answer as stock does
    "index_shadow": "SGLang stock (FlashMLA, paged extend, DeepGEMM's paged logits)",
    "ops_shadow": "SGLang stock (FlashMLA, paged extend)",
    "ops_tp2_shadow": "SGLang stock, two cards (paged extend, paged logits)",
    "ops_tp4_shadow": "SGLang stock, four cards (paged extend, paged logits)",
    **{f"sums{n}_shadow": f"SGLang stock, {cards}, its own sums" for n, cards in cards_stage.WORDS.items()},
    "seams_shadow": "SGLang stock (Triton, SM120 branches)",
}
STEP_WORST = ("decode step, ms, worst", "decode step within a run, ms, worst")  # the former has two prefills in it
EAGLE = ("ops43_eagle314", "ops43_draft_head", "ops43_router_draft_head")  # 3/1/4
WHOLE_BARS = {  # of the whole step with everything on: batch -> metric -> bar
    ("ops43_whole", "1"): {"decode step, ms, worst": 5.5, "launches per step": 950},
    ("ops43_whole", "8"): {"decode step, ms, worst": 11.5},
    **{(name, "1"): {metric: 7.8 for metric in STEP_WORST} | {"launches per step": 1150} for name in EAGLE},
    **{(name, "8"): {metric: 18.2 for metric in STEP_WORST} for name in EAGLE},
    ("ops43_sums2", "1"): {"decode step, ms, worst": 3.9},
    ("ops43_sums4", "1"): {"decode step, ms, worst": 3.4},
    ("ops43_sums4", "8"): {"decode step, ms, worst": 6.2},
    ("ops43_sums4_host", "1"): {"decode step, ms, worst": 3.9},
    **chain_stage.BARS,
}
COST_BAR = 1.1  # times the prompt's time without one order of sums
MOST_OFF = 1  # verifications of an answer: SGLang counts the one that is under way when it ends, or does not
WHOLE_ISSUE, PREFILL_ISSUE, SPECULATION_ISSUE, SUMS_ISSUE, FEATURES_ISSUE = 7, 4, 21, 20, 23
SPECULATION_RUNS = ("_eagle314", "_dspark3", "_draft_head", "cost43_without", "cost43_reproducible")
# and what norms, rotates and stores K: fused_k_norm_rope_flashmla
ATTENTION_KERNELS = re.compile(r"sparse_decode|flash_fwd|mla|sparse_attn|sparse_fwd", re.IGNORECASE)


def row(case, impl, metric, value, bar=None, issue=ISSUE):
    met = None if bar is None else value is not None and value <= bar
    return {"issue": issue, "case": case, "impl": impl, "metric": metric, "value": value, "bar": bar, "met": met}


def timing_rows(name, batches, prefill_bars=None):
    impl, rows = IMPLEMENTATIONS[name], []
    is_whole = name.endswith(("_whole", "43_alone", "43_tp2", "43_tp4")) or "_with_" in name or "_without_" in name
    issue = WHOLE_ISSUE if is_whole else SPECULATION_ISSUE if name.endswith(SPECULATION_RUNS) else ISSUE
    issue = SUMS_ISSUE if "43_sums" in name else chain_stage.ISSUES.get(name, issue)
    issue = products_stage.ISSUE if name in products_stage.TIMED else issue
    variant = "flash43" if name.endswith(("_tp4", "_chain_tp2")) or "_sums4" in name else "flash43e64"
    for batch, timed in batches.items():
        bars = WHOLE_BARS.get((name, batch), {}) | (prefill_bars or {}).get(batch, {})
        experts = next((f", {count} experts" for part, count in FEWER_EXPERTS.items() if part in name), "")
        case = f"{variant}{experts}, batch {batch}, {timed.get('in_len', 1024) >> 10}K context"
        for metric, key in (
            ("decode step, ms, best", "step_ms_best"),
            ("decode step, ms, worst", "step_ms_worst"),
            ("decode step, ms, median of rounds in turn", "step_ms_middle_round"),
            ("decode step, ms, worst", "step_ms_median"),  # older files' name for the slower of two
            ("decode step within a run, ms, best", "within_ms_best"),
            ("decode step within a run, ms, worst", "within_ms_worst"),
            ("prefill, ms, best", "prefill_ms"),
            ("launches per step", "launches_per_step"),
            ("kernel time per step, us", "busy_us_per_step"),
            ("launching a step's graph, us of the host", "graph_launch_us_per_step"),
        ):
            if timed.get(key):  # 0: not measured
                rows.append(row(case, impl, metric, timed[key], bars.get(metric), issue))
        measured = {one["metric"] for one in rows if one["case"] == case}
        rows += [row(case, impl, metric, None, bar, issue) for metric, bar in bars.items() if metric not in measured]
        if timed.get("launches_per_step") and "uneven_launches" in timed:
            rows.append(row(case, impl, "launches that are not a whole number per step", timed["uneven_launches"]))
        attention = [k for k in timed.get("kernels", []) if ATTENTION_KERNELS.search(k[0])]
        if attention:
            rows.append(row(case, impl, "attention and K's store, launches per step", sum(k[1] for k in attention)))
            rows.append(row(case, impl, "attention and K's store per step, us", sum(k[2] for k in attention)))
    return rows


def prefill_rows(name, prefill):
    """The share that attention and storing K have of a long prompt's kernel time."""
    total = sum(us for _, _, us in prefill["kernels"])
    attention = sum(us for kernel, _, us in prefill["kernels"] if ATTENTION_KERNELS.search(kernel))
    case = f"flash43e64, prefill of {prefill['prompt']} tokens"
    return [
        row(case, IMPLEMENTATIONS[name], metric, value, issue=PREFILL_ISSUE)
        for metric, value in (
            ("time to the first token, ms, best", prefill["first_token_ms"]),
            ("kernel time, ms", total / 1e3),
            ("attention and K's store, ms", attention / 1e3),
            ("attention and K's store, share of kernel time", attention / total),
        )
    ]


def stocks_prefill(stage):
    """The prefill of 8 prompts must not be slower than stock's of the same run."""
    stock = stage["cases"].get("stock43_whole", {}).get("rows", {}).get("8", {})
    return {"8": {"prefill, ms, best": stock["prefill_ms"]}} if "prefill_ms" in stock else {}


def cost_rows(stage):
    """What one order of sums costs a prompt and a step: times over those without."""
    name = "cost43_reproducible"
    times = [_prompt_times(stage["cases"].get(case, {})) for case in (name, "cost43_without")]
    metric, impl, found = "times the time without the setting", IMPLEMENTATIONS[name], []
    for what in dict.fromkeys(what for one in times for what in one):
        ours, without = (one.get(what) for one in times)
        value = ours / without if ours and without else None  # a bar without what it is of is missed
        found.append(row(f"43 layers, {what}", impl, metric, value, COST_BAR, SPECULATION_ISSUE))
    return found


def _prompt_times(case):
    """{prompts: ms to the first tokens}"""
    found = {
        f"{'prompt of 1,024 tokens' if n == '1' else f'{n} prompts of 1,024 tokens'}": timed["prefill_ms"]
        for n, timed in case.get("rows", {}).items()
    }
    if "prefill" in case:
        found[f"prompt of {case['prefill']['prompt']:,} tokens"] = case["prefill"]["first_token_ms"]
    return found


def case_rows(name, case, prefill_bars=None):
    impl = IMPLEMENTATIONS[name]
    rows = [row(name, impl, EXIT_CODE, case["exit"] if case["exit"] in (0, None) else 1, 0)]
    if case["patched"]:
        rows.append(row(name, impl, "processes that applied a patch", len(case["reports"])))
    if "bad_logprobs" in case:
        rows.append(row(name, impl, "log-probabilities", case["logprobs"]))
        rows.append(row(name, impl, "log-probabilities that are not finite", case["bad_logprobs"], FINITE_BAR))
    if name.endswith("_shadow"):
        records = [r for report in case["reports"] for r in report["shadow"]]
        rows += shadow_rows.rows(name, impl, records, row)
    rows += prefill_rows(name, case["prefill"]) if "prefill" in case else []
    rows += prompts_stage.rows_of(row, name, case) if name in prompts_stage.IMPLEMENTATIONS else []
    rows += prompts_stage.graph_rows(row, name, impl, case)
    batches = dict(case.get("rows", {}))
    for batch in (batch for of, batch in WHOLE_BARS if of == name):
        batches.setdefault(batch, {})  # one that the run did not reach has missed its bars
    return rows + timing_rows(name, batches, prefill_bars)


def merged(found):
    """One entry for the prompts of a batch: mean of their means, greatest of all, share of all positions."""
    positions = sum(f["positions"] for f in found)
    return {
        "mean": sum(f["mean"] for f in found) / len(found),
        "greatest": max(f["greatest"] for f in found),
        "same_greatest": sum(f["same_greatest"] * f["positions"] for f in found) / positions,
        "repeated": [],
    }


def difference_rows(difference):
    """Rows of every single prompt, and of every batch as one."""
    by_case = collections.defaultdict(list)
    for found in difference["rows"]:
        size, length = found["prompt"].split("x")
        by_case[f"prompt of {length} tokens" if size == "1" else f"batch of {size} prompts"].append(found)
    answered, rows = IMPLEMENTATIONS | KEPT_ANSWERS, []
    same = (0, SAME_BITS[difference["run"]]) if difference["run"] in SAME_BITS else ()  # bar, issue
    for name, chosen in by_case.items():
        found = chosen[0] if len(chosen) == 1 else merged(chosen)
        case = f"flash6h, {name}: {difference['what']}"
        impl = answered[difference["run"]]
        rows.append(row(case, impl, "log-probability difference, mean", found["mean"]))
        rows.append(row(case, impl, "log-probability difference, greatest", found["greatest"], *same))
        rows.append(row(case, impl, "share of positions with the same greatest token", found["same_greatest"]))
        for run, own in zip((difference["run"], difference["against"]), found["repeated"], strict=False):
            twice = (0, experts_stage.ISSUE) if run in experts_stage.ANSWERS else same
            rows.append(row(case, answered[run], "the run against its own repetition", own["greatest"], *twice))
    return rows


def text_rows(found):
    """Answers of a speculating run that are not the plain one's. One prompt at a time, none of ours may differ."""
    at_once = found["at_once"]
    together = "one prompt at a time" if at_once == 1 else f"{at_once} prompts at once"
    together += f" beside {found['beside']} that sample" if found.get("beside") else ""
    together += " that end behind min_tokens" if "ended" in found else ""
    model = "flash43, 16 experts" if found["run"].startswith("text43") else "flash6h"
    case = f"{model}, {together}: {found['what']}, greedy text with and without"
    is_forced = found["run"].startswith("accepted")
    is_reproducible = is_forced or found["run"].startswith("text")
    bar = 0 if is_reproducible or (at_once == 1 and not found["run"].startswith("stock")) else None
    impl = IMPLEMENTATIONS[found["run"]]
    return [
        row(case, impl, "answers", found["answers"], issue=SPECULATION_ISSUE),
        row(case, impl, "answers that differ", found["differ"], bar, SPECULATION_ISSUE),
        *(
            [row(case, impl, "first token that differs", found["first"], issue=SPECULATION_ISSUE)]
            if found["differ"]
            else []
        ),
        *(acceptance_rows(case, impl, found) if is_forced and set(found).isdisjoint(("beside", "ended")) else []),
    ]


def acceptance_rows(case, impl, found):
    """As many drafts are accepted as are right; of a run that did not count them it is not shown."""
    each, off = found.get("tokens_a_verification"), found.get("off")
    metric = "verifications off what the drafts must take, worst answer"
    off = row(case, impl, metric, off, MOST_OFF, SPECULATION_ISSUE)
    return [off, *([row(case, impl, "tokens a verification", each, issue=SPECULATION_ISSUE)] if each else [])]


def same_rows(found):
    """Answers with another bit than where they are compared with; none with the setting."""
    case, impl = f"log-probabilities to the bit: {found['what']}", IMPLEMENTATIONS[found["run"]]
    case = case if "43" in found["run"] else f"six layers, {case}"
    bar = 0 if found["run"].startswith("same") else None
    return [
        row(case, impl, "answers", found["answers"], issue=SPECULATION_ISSUE),
        row(case, impl, "answers that differ", found["differ"], bar, SPECULATION_ISSUE),
        row(case, impl, "log-probability difference, greatest", found["greatest"], bar, SPECULATION_ISSUE),
    ]


def feature_rows(lines):
    """Of each feature whether it is a defect; of those that were compared the answers."""
    rows = []
    for line in lines:
        case, impl = f"{FEATURE}{line['feature']}", IMPLEMENTATIONS[features_stage.PREFIX + line["engine"]]
        told = f": {line['detail']}" if line.get("detail") else ""
        is_defect = int(features_stage.STATES[line["state"]])
        if line["state"] != "not run":
            rows.append(row(case, impl, "a defect", is_defect, 0, FEATURES_ISSUE))
        rows.append(row(case, impl, f"{line['state']}{told}", None, issue=FEATURES_ISSUE))
        if line.get("answers") and "differ" in line:  # not of a line whose answers were asked for what it is not
            rows.append(row(case, impl, "answers", line["answers"], issue=FEATURES_ISSUE))
            bar = None if line["state"] in (features_stage.STOCK_DIFFERS, features_stage.BY_ITSELF) else 0
            rows.append(row(case, impl, "answers that differ", line["differ"], bar, FEATURES_ISSUE))
    return rows


def merged_features(lines):
    """By feature, of all calls: what ran stands above what did not."""
    found = {}
    for line in lines:
        if line["state"] != "not run" or line["feature"] not in found:
            found[line["feature"]] = line
    order = [feature.what for feature in features_stage.FEATURES]
    return sorted(found.values(), key=lambda line: order.index(line["feature"]))


def commit_of(stage, commit):
    """A copy without history says none, or the bare word that git prints there."""
    return commit if stage["commit"] in (None, "HEAD") else stage["commit"]


def of_calls(stages):
    """Each stage once, with the engines of all its calls, which are compared with each other; one that was asked again
    is as it was the last time."""
    found = {}
    for stage in stages:
        cases = found.get(stage["stage"], stage)["cases"] | stage["cases"]
        found[stage["stage"]] = found.get(stage["stage"], {}) | stage | {"cases": cases}
    return list(found.values())


def collect(stages, commit):
    rows, differences, texts, sames = [], {}, {}, {}
    for stage in of_calls(stages):
        for name, case in stage["cases"].items() if "features" not in stage else ():
            rows += case_rows(name, case, stocks_prefill(stage) if name == "ops43_whole" else None)
        for of_stage in (chain_stage, drawn_stage, halves_stage, streams_stage, products_stage, experts_stage):
            rows += of_stage.rows(stage["cases"], row)
        rows += cost_rows(stage)
    for stage in stages:
        for difference in stage["differences"]:  # a later call's file repeats what its work folder still holds
            differences[difference["what"]] = difference
        texts |= {
            (*(found.get(key) for key in ("run", "at_once", "beside", "ended")),): found
            for found in stage.get("texts", [])
        }
        sames |= {(found["what"], found["run"]): found for found in stage.get("sames", [])}
    for difference in differences.values():
        rows += difference_rows(difference)
    for found in texts.values():
        rows += text_rows(found)
    for found in sames.values():
        rows += same_rows(found)
    for name, module in OF_THEIR_OWN.items():
        rows += module.rows(row, [stage[name] for stage in stages if name in stage])
    features = merged_features(line for stage in stages for line in stage.get("features", []))
    rows += feature_rows(features)
    table = {
        **({"features": features} if features else {}),
        "device": stages[0]["device"],
        "date": stages[0]["date"],
        "commit": ", ".join(dict.fromkeys(commit_of(stage, commit) for stage in stages)),
        "command": list(dict.fromkeys(stage["command"] for stage in stages)),
        "sglang": sorted({release for stage in stages for release in releases(stage)}),
        "ceilings": {},
        "runs": {
            name: {"command": case["command"], "commit": commit_of(stage, commit)}
            for stage in stages
            for name, case in stage["cases"].items()
        },
        "rows": rows,
    }
    return shared_cards.told(stages, table)


def identity(found):
    return tuple(found[name] for name in ("issue", "case", "impl", "metric"))


def added(old, new, is_timed=True):
    """A result file with what later calls of the same release and device have; of what both have, theirs. Where they
    left out engines (--only) and ended well, a share without a value keeps the older one; an engine's own is missed."""
    names = [old["device"]["name"], new["device"]["name"]]
    for name, one, other in (("release", old["sglang"], new["sglang"]), *([("device", *names)] if is_timed else [])):
        if one != other:
            raise SystemExit(f"collect: --add needs the same {name}: the file is of {one}, the stages are of {other}")
    features = merged_features([*old.get("features", []), *new.get("features", [])])
    fresh = [r for r in new["rows"] if not r["case"].startswith(FEATURE)] + feature_rows(features)
    is_well = {r["value"] for r in fresh if r["metric"] == EXIT_CODE} == {0}
    if is_well and old["runs"].keys() - new["runs"].keys():
        known = {identity(r) for r in old["rows"] if r["value"] is not None and SHARE.search(r["metric"])}
        fresh = [r for r in fresh if r["value"] is not None or identity(r) not in known]
    fresh = soak_rows.beside_longer(old["rows"], fresh)
    replaced = {identity(r) for r in fresh}
    return {
        **old,
        **({"features": features} if features else {}),
        "device": old["device"] | {"name": ", ".join(dict.fromkeys(", ".join(names).split(", ")))},
        "date": max(old["date"], new["date"]),
        "commit": ", ".join(dict.fromkeys(f"{old['commit']}, {new['commit']}".split(", "))),
        "command": list(dict.fromkeys([*old["command"], *new["command"]])),
        "runs": old["runs"] | new["runs"],
        "rows": [r for r in old["rows"] if identity(r) not in replaced and not r["case"].startswith(FEATURE)] + fresh,
    }


def head_commit():
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    return asked.stdout.strip() or None


def results(stages, commit):
    """{file name: table} of what RESULTS says of these stages, release by release."""
    found = {}
    for release in sorted({release for stage in stages for release in releases(stage)}):
        for name, of in RESULTS.items():
            if chosen := [s for s in stages if s["stage"] in of and releases(s) == [release]]:
                table = collect(chosen, commit)
                found[f"{name}_sglang_{release}{suffix(name, table['device']['name'])}.json"] = table
    if mixed := [stage["stage"] for stage in stages if len(releases(stage)) != 1]:
        raise SystemExit(f"collect: each stage must be of one release of SGLang; not so: {', '.join(mixed)}")
    return found


def suffix(name, device):
    """Of a result file's name: times are of one device, and those of another than the H200 have files of their own."""
    model = device.split()[1].lower() if device.startswith("NVIDIA ") else ""
    return "" if name in TIMELESS or model in ("", "h200") else f"_{model}"


def releases(stage):
    ran = [*stage["cases"].values(), *(stage.get(name, {}) for name in OF_THEIR_OWN)]
    return sorted({case["sglang"] for case in ran if "sglang" in case})


def write(path, table):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n")
    print(f"wrote {path}, {len(table['rows'])} rows")


def show(table):
    for r in table["rows"]:
        verdict = {None: "", True: "met", False: "NOT MET"}[r["met"]]
        value = f"{r['value']:.6g}" if isinstance(r["value"], (int, float)) else str(r["value"])
        print(f"{r['case'][:76]:76s}  {r['metric'][:44]:44s}  {value:>12s}  {verdict:7s}  {r['impl']}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stages", nargs="+", type=Path)
    parser.add_argument("--write", type=Path, help="one file of all stages")
    parser.add_argument("--results", type=Path, help="folder for a file of each of RESULTS")
    parser.add_argument("--add", action="store_true", help="--results: to the files that are there")
    parser.add_argument("--commit", help="of the measured tree, where the stage files do not say (default: HEAD here)")
    arguments = parser.parse_args()
    stages = [json.loads(path.read_text()) for path in arguments.stages]
    commit = arguments.commit or head_commit() or "unknown"
    table = collect(stages, commit)
    show(table)
    if arguments.write:
        write(arguments.write, table)
    if arguments.results:
        for name, one in results(stages, commit).items():
            path = arguments.results / name
            if arguments.add and path.exists():
                one = added(json.loads(path.read_text()), one, not name.startswith(TIMELESS))
            write(path, one)
    unmet = [r for r in table["rows"] if r["met"] is False]
    print(f"{len(unmet)} of {sum(r['met'] is not None for r in table['rows'])} bars not met")
    sys.exit(1 if unmet else 0)


if __name__ == "__main__":
    main()
