"""The stage `features` of run_stage.py: what a server's user combines, each in an engine of its own or between two
rounds of one (features_engine.py), against the same engine without it; and what is said of each.

Every engine adds in one order (`reproducible=on`), so what keeps the arithmetic must give the same bits of all
log-probabilities, whatever the batch, the chunks and the caches; an engine that speculates, or has a grammar, gives the
same text. Where a feature changes the arithmetic (other shares for the cards), its engine is compared with itself: each
prompt alone, while the other cards are idle, and all at once. A feature counts only if it acted: the arguments as
SGLang resolved them, lines of the log, counts of the answers.
"""

import importlib.util
import json
import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

PREFIX = "features_"
BASE, TEXT_BASE = "base", "text"
SET, REPRODUCIBLE = "DSV4_SM120_SET", "reproducible=on,prefill_decode_interval=off,prefill_decode_interval_0_5_17=off"
ROUND, ALONE, LONG, FULL = ("round", "again"), ("alone",), ("long",), ("full",)
EXPERTS = {"n_routed_experts": 16}  # small engines: many fit a card
NO_END = {"eos_token_id": 1 << 20}  # no token of the vocabulary: answers are of the length that was asked for
HOST_POOLS_S = 300.0  # limit of an engine whose pools in host memory are page-locked at its start, 9 s each
DISK = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
ERROR = re.compile(r"^(?:\[[^\]]*\] )?\s*((?:\w+\.)*\w*(?:Error|Exception): .+)$")
PLACE = re.compile(r"/[\w./-]*/(?=sglang/)")  # where SGLang happened to be installed
TRACEBACK = "Traceback (most recent call last)"
# what became of a feature -> is it a defect of ours, or may be
STATES = {
    "same bits": False,
    "same text": False,
    "refused": False,
    "turned off by SGLang": False,
    "fails in stock too": False,  # with the same words
    "did not act in stock either": False,  # it lacks the same
    "not run": False,
    "did not act": True,
    "differs": True,
    "fails": True,
}


def flags(**arguments):
    return tuple(word for name, value in arguments.items() for word in ("--set", f"{name}={json.dumps(value)}"))


def override(**more):
    return flags(json_model_override_args=json.dumps(EXPERTS | more))


def speculative(algorithm, **more):
    return flags(speculative_algorithm=algorithm, **more)


EAGLE = speculative("EAGLE", speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=4)
SMALL = ("--variant", "flash6h", "--mem", "0.9", "--max-running", "16", "--context", "8192", "--graph-bs", "1", "8")
SMALL += flags(swa_full_tokens_ratio=1.0)  # whole prompts fit the sliding windows' pool
FORCED, FREE = ("--phases", "features"), ("--phases", "features_text")
RADIX, CHUNKS = ("--radix",), ("--chunk", "512")
HOST = (*RADIX, *flags(enable_hierarchical_cache=True, hicache_ratio=4.0))
DISKS = (*HOST, *flags(hicache_storage_backend="file", hicache_storage_prefetch_policy="wait_complete"))
TWO = flags(tp_size=2, enforce_disable_flashinfer_allreduce_fusion=True)
DATA_PARALLEL = (*TWO, *flags(dp_size=2, enable_dp_attention=True))
GRAMMAR = flags(grammar_backend="xgrammar", skip_tokenizer_init=False)
RECOMMENDED = (*RADIX, *CHUNKS, *EAGLE)  # README's, with its speculation
PREFILL_GRAPHS = flags(cuda_graph_backend_prefill="breakable", cuda_graph_bs_prefill=[256, 1024, 2304])


@dataclass(frozen=True)
class Engine:
    """A start of SGLang. steps: what it is asked, in order (features_engine.py); tokens: of the KV pool."""

    options: tuple = ()
    steps: tuple = ROUND
    phases: tuple = FORCED
    tokens: int = 20000
    config: dict = field(default_factory=dict)
    settings: str = REPRODUCIBLE
    environment: dict = field(default_factory=dict)
    needs: tuple = ()  # modules, one of which must be there
    cards: int = 1
    limit_s: float = 150.0
    stock_of: str = ""  # SGLang alone, run only where that engine of ours failed


@dataclass(frozen=True)
class Feature:
    """A line of the matrix. engine: its engine; steps: those of it that count (none: all); against: the engine whose
    answers it must have (its own: each step's with the first's); same: "bits" or "text"; acts: lines of the log that
    say that it acted; counts: what the answers must count, together; not_counted: what each must count as none;
    as_asked: arguments that SGLang must not have changed; refusal: what it says where it refuses."""

    what: str
    engine: str
    against: str = BASE
    steps: tuple = ()
    same: str = "bits"
    acts: tuple = ()
    counts: tuple = ()
    not_counted: tuple = ()
    as_asked: tuple = ()
    refusal: str = ""
    lacks: tuple = ()  # lines that its log must not have
    off: str = ""  # what SGLang says where it turns it off by itself; of a draft model too, so `acts` outweighs it


ENGINES = {  # what matters most first: the limit cuts the last
    BASE: Engine(steps=(*ROUND, *ALONE, *LONG)),
    TEXT_BASE: Engine(phases=FREE, steps=(*ROUND, *ALONE, *LONG)),
    "radix": Engine(
        RADIX, steps=(*ROUND, "flush_cache", "flushed", *LONG, "pause:in_place", "pause:retract", "abort_all", "after")
    ),
    "recommended": Engine(RECOMMENDED, phases=FREE),
    # compiles for minutes: only the stage's limit stops it
    "compiled": Engine(
        flags(enable_torch_compile=True, torch_compile_max_bs=1),
        phases=FREE,
        steps=("alone", "round"),
        settings=f"{REPRODUCIBLE},compiled_streams=on",  # on by itself on SM120
        limit_s=600,
    ),
    "data_parallel": Engine(DATA_PARALLEL, steps=("round", *ALONE), cards=2),
    # SGLang's own mHC kernels compile 21 times at the first weights that it loads from elsewhere; SM120 has them off
    "weights": Engine(
        steps=("round", "settle", "weights:tensors", "settle", "weights:disk"),  # SGLang asserts that nothing runs
        needs=("safetensors",),
        environment={"SGLANG_OPT_USE_TILELANG_MHC_PRE": "0"},
        limit_s=260,
    ),
    "hicache": Engine(HOST, steps=("round", "settle", "fill", "settle", "restored"), tokens=8192, limit_s=HOST_POOLS_S),
    "chunks": Engine(CHUNKS),
    "mixed": Engine((*CHUNKS, *flags(enable_mixed_chunk=True))),
    "not_overlapped": Engine(flags(disable_overlap_schedule=True)),
    "interval": Engine(
        (*CHUNKS, *flags(decode_log_interval=1)),
        settings="reproducible=on,prefill_decode_interval=4,prefill_decode_interval_0_5_17=4",
    ),
    "eager": Engine(("--eager",)),
    "prefill_graphs": Engine(("--chunk", "2048", *PREFILL_GRAPHS), steps=(*ROUND, *ALONE)),
    "recommended_graphs": Engine((*RECOMMENDED, *PREFILL_GRAPHS), phases=FREE, steps=(*ROUND, *ALONE)),
    # where a request ignores its end SGLang admits no more than fits: from 0.5.22 on always, before without the cache
    "retracted": Engine((*RADIX, *flags(schedule_conservativeness=0.05)), steps=FULL, tokens=5632, config=NO_END),
    "eagle": Engine(EAGLE, phases=FREE, steps=(*ROUND, *ALONE)),
    "dspark": Engine(
        speculative("DSPARK", speculative_dspark_block_size=3),
        phases=FREE,
        config={
            **{"dspark_block_size": 3, "dspark_markov_rank": 256, "dspark_noise_token_id": 2},
            **{"dspark_target_layer_ids": [1, 3, 5], "compress_ratios": [0, 0, 4, 128, 4, 128, 0, 0, 0]},
        },
    ),
    "grammar": Engine(GRAMMAR, phases=FREE, steps=("grammar",), needs=("xgrammar",)),
    "recommended_grammar": Engine((*RECOMMENDED, *GRAMMAR), phases=FREE, steps=("grammar",), needs=("xgrammar",)),
    "recommended_hicache": Engine(
        (*RECOMMENDED, *HOST),
        phases=FREE,
        steps=("round", "settle", "fill", "settle", "restored"),
        tokens=8192,
        limit_s=HOST_POOLS_S,
    ),
    "hicache_disk": Engine(
        DISKS,
        steps=("round", "settle", "flush_cache", "restored"),
        tokens=8192,
        environment={DISK: "hicache_disk"},
        limit_s=HOST_POOLS_S,
    ),
    "two": Engine(TWO, steps=("round", *ALONE), cards=2),
    "expert_parallel": Engine((*TWO, *flags(ep_size=2)), steps=("round", *ALONE), cards=2),
    "two_batches": Engine((*DATA_PARALLEL, *flags(enable_two_batch_overlap=True)), steps=("round", *ALONE), cards=2),
    "eagle_retracted": Engine(
        (*EAGLE, *RADIX, *flags(schedule_conservativeness=0.05)), phases=FREE, steps=FULL, tokens=5632, config=NO_END
    ),
    "eagle_not_overlapped": Engine((*EAGLE, *flags(disable_overlap_schedule=True)), phases=FREE, steps=("round",)),
    "eagle_eager": Engine((*EAGLE, "--eager"), phases=FREE, steps=("round",)),
    "data_parallel_eagle": Engine((*DATA_PARALLEL, *EAGLE), phases=FREE, steps=("round", *ALONE), cards=2),
    "saver": Engine(
        flags(enable_memory_saver=True, enable_weights_cpu_backup=True),
        steps=("round", "settle", "release", "resumed"),  # SGLang asserts that nothing runs
        needs=("torch_memory_saver",),
    ),
    "lora": Engine(
        flags(enable_lora=True, max_lora_rank=8, lora_target_modules=["gate_up_proj", "down_proj"]), steps=("round",)
    ),
    "multiplexed": Engine(
        ("--chunk", "-1", *flags(enable_pdmux=True, disable_overlap_schedule=True)), steps=("round",)
    ),
    "mixed_eagle": Engine((*CHUNKS, *EAGLE, *flags(enable_mixed_chunk=True)), phases=FREE, steps=("round",)),
    "disaggregated": Engine(steps=(), needs=("mooncake", "nixl", "nixl_cu12", "nixl_cu13"), cards=2),
}
STOCK = ("multiplexed", "compiled", "two_batches", "prefill_graphs", "hicache", "hicache_disk", "data_parallel")
STOCK += ("data_parallel_eagle", "expert_parallel", "mixed", "weights", "lora")
ENGINES |= {f"{name}_stock": replace(ENGINES[name], settings="", stock_of=name) for name in STOCK}

FEATURES = (
    Feature("prefix cache (the default)", "radix", steps=ROUND, counts=("cached",)),
    Feature("flush_cache", "radix", steps=("flush_cache", "flushed"), not_counted=("cached",)),
    Feature("pause in place and resume", "radix", steps=("pause:in_place",)),
    Feature("pause with retraction and resume", "radix", steps=("pause:retract",), counts=("retracted",)),
    Feature("abort of all", "radix", steps=("abort_all", "after")),
    Feature("chunks of 512", "chunks", acts=(r"Prefill batch.*#new-token: 512\b",), as_asked=("chunked_prefill_size",)),
    Feature("mixed chunks", "mixed", as_asked=("enable_mixed_chunk", "chunked_prefill_size")),
    Feature("overlap schedule off", "not_overlapped", as_asked=("disable_overlap_schedule",)),
    Feature(
        "--prefill-decode-interval 4 (0.5.17: ours)", "interval",
        acts=(r"Prefill batch.*\n(?:.*Decode batch.*\n){3,}.*Prefill batch.*#new-token: 512\b",),
    ),
    Feature("CUDA graphs off", "eager", lacks=("Capture target decode",)),
    Feature(
        "prefill graphs (breakable)", "prefill_graphs", acts=("Capture target prefill CUDA graph end",),
        off="Breakable CUDA graph is incompatible with|Disable prefill CUDA graph because",
    ),
    # Inductor's kernels for what is torch's round otherwise: the bits are not asked for
    Feature("--enable-torch-compile, one row", "compiled", TEXT_BASE, same="text", as_asked=("enable_torch_compile",)),
    Feature(
        "prefix cache + retraction, the KV pool is full", "retracted", acts=("KV cache pool is full",),
        counts=("retracted",),
    ),
    Feature("hierarchical cache, host memory", "hicache", counts=("host",), as_asked=("enable_hierarchical_cache",)),
    Feature("hierarchical cache, a folder on disk", "hicache_disk", counts=("storage",)),
    Feature("update_weights_from_tensor", "weights", steps=("round", "weights:tensors")),
    Feature("update_weights_from_disk", "weights", steps=("round", "weights:disk")),
    Feature("--enable-memory-saver, release and resume", "saver"),
    Feature("EAGLE 3/1/4", "eagle", TEXT_BASE, same="text", counts=("verified",)),
    Feature("DSPARK, a block of 3", "dspark", TEXT_BASE, same="text", counts=("verified",)),
    Feature("xgrammar", "grammar", TEXT_BASE, same="text"),
    Feature(
        "prefix cache + chunks + EAGLE + overlap + graphs", "recommended", TEXT_BASE, same="text",
        counts=("verified", "cached"),
    ),
    Feature(
        "the same + xgrammar", "recommended_grammar", TEXT_BASE, same="text", counts=("verified",),
    ),
    Feature(
        "the same + prefill graphs (breakable)", "recommended_graphs", TEXT_BASE, same="text", counts=("verified",),
        acts=("Capture target prefill CUDA graph end",),
        off="Breakable CUDA graph is incompatible with|Disable prefill CUDA graph because",
    ),
    Feature(
        "the same + hierarchical cache", "recommended_hicache", TEXT_BASE, same="text", counts=("verified", "host"),
    ),
    Feature(
        "EAGLE + prefix cache + retraction", "eagle_retracted", TEXT_BASE, same="text", counts=("retracted", "verified")
    ),
    Feature(
        "EAGLE + overlap schedule off", "eagle_not_overlapped", TEXT_BASE, same="text", counts=("verified",),
        as_asked=("disable_overlap_schedule",),
    ),
    Feature("EAGLE + CUDA graphs off", "eagle_eager", TEXT_BASE, same="text", counts=("verified",)),
    Feature(
        "EAGLE + mixed chunks", "mixed_eagle", TEXT_BASE, same="text", as_asked=("enable_mixed_chunk",),
        refusal="enable_mixed_chunk is (required for|not supported with) speculative decoding",
    ),
    Feature("TP2, each prompt alone and all at once", "two", "two"),
    Feature(
        "DP attention, the other rank idle or busy", "data_parallel", "data_parallel", as_asked=("enable_dp_attention",)
    ),
    Feature(
        "DP attention + EAGLE, the other rank idle or busy", "data_parallel_eagle", "data_parallel_eagle", same="text",
        counts=("verified",), as_asked=("enable_dp_attention",),
    ),
    Feature("EP 2, each prompt alone and all at once", "expert_parallel", "expert_parallel", as_asked=("ep_size",)),
    Feature(
        "--enable-two-batch-overlap (with DP attention)", "two_batches", "two_batches",
        as_asked=("enable_two_batch_overlap",),
    ),
    Feature("LoRA of the experts", "lora", refusal="Marlin MoE backend requires a quant method exposing"),
    Feature("--enable-pdmux", "multiplexed"),
    Feature("PD disaggregation, two cards of one host", "disaggregated"),
)  # fmt: skip


# ---- for run_stage.py


def cases(make, environment):
    """make: run_stage.Case; environment: what every patched engine has."""
    found = []
    for name, engine in ENGINES.items():
        options = [*SMALL, *engine.options, *override(**engine.config), "--max-total-tokens", str(engine.tokens)]
        options += ["--new", "32", "--top", "8", *engine.phases, "--steps", *engine.steps]
        is_stock = bool(engine.stock_of)
        settings = {} if is_stock else {SET: engine.settings}
        own = environment(is_stock) | settings | engine.environment
        own |= {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
        found.append(make(PREFIX + name, options, patched=not is_stock, environment=own, limit_s=engine.limit_s))
    return found


def engine_of(case) -> Engine | None:
    return ENGINES.get(case.name.removeprefix(PREFIX)) if case.name.startswith(PREFIX) else None


def environment(case, arguments):
    """The card that a case of one has, in turn; a folder of its own on disk."""
    engine = engine_of(case)
    if engine is None:
        return {}
    own = {DISK: str(arguments.work / f"{case.name}_disk")} if DISK in engine.environment else {}
    if engine.cards == 1:
        singles = [name for name, other in ENGINES.items() if other.cards == 1]
        own["CUDA_VISIBLE_DEVICES"] = str(singles.index(case.name.removeprefix(PREFIX)) % arguments.cards)
    return own


def why_not(case, arguments) -> str | None:
    """Why a case is not run here, asked when its turn comes."""
    engine = engine_of(case)
    if engine is None:
        return None
    if engine.needs and not any(importlib.util.find_spec(name) for name in engine.needs):
        return f"the harness lacks {' or '.join(engine.needs)}"
    if engine.cards > arguments.cards:
        return f"it needs {engine.cards} cards, here are {arguments.cards}"
    if not engine.steps:
        return "not written: no harness with a transfer backend was at hand"
    if engine.stock_of:
        ours, log = reader(arguments.work)(engine.stock_of)
        features = [feature for feature in FEATURES if feature.engine == engine.stock_of]
        if ours and ours.get("ended") and not any(acted(feature, ours, log) for feature in features):
            return "ours did not fail"
    return None


def prepare(stage_cases, arguments):
    """The model's folder with a tokenizer before engines start side by side, and how many cards there are."""
    arguments.cards = 1
    if not any(engine_of(case) for case in stage_cases):
        return
    import torch
    from made_tokenizer import write_tokenizer

    sys.path.insert(0, str(arguments.harness))
    import run_engine as harness

    arguments.cards = max(1, torch.cuda.device_count())
    _, model = harness.engine_args(harness.parse(["run", *SMALL]))
    write_tokenizer(Path(model), harness.vocab_of(model))


# ---- what became of each


def quote(log: str) -> str:
    """The error that ended an engine: the first behind a traceback."""
    _, _, behind = log.partition(TRACEBACK)
    lines = (behind or log).splitlines()
    found = next((match[1] for line in lines if (match := ERROR.match(line))), "")
    said = found or next((line.strip() for line in reversed(lines) if line.strip()), "nothing in its log")
    return PLACE.sub("", said)[:300]


def answers_of(found: dict, steps: tuple) -> list[tuple[str, str, dict]]:
    """(step, kind, answers) of the steps that count; kind: what they were asked."""
    return [
        (step["step"], step["kind"], step["answers"])
        for step in found["steps"]
        if "answers" in step and (not steps or step["step"] in steps)
    ]


def compare(found: dict, against: dict, steps: tuple) -> dict:
    """All answers beside the other engine's first of what was asked alike (its own first: skipped)."""
    first = {}
    for _, kind, answers in answers_of(against, ()):
        first.setdefault(kind, answers)
    row = {"answers": 0, "other_bits": 0, "other_text": 0, "greatest": 0.0, "of": []}
    for step, kind, answers in answers_of(found, steps):
        reference = first.get(kind)
        if reference is None or answers is reference:
            continue
        for name, one in answers.items():
            other = reference[name]
            row["answers"] += 1
            row["other_text"] += one["ids"] != other["ids"]
            is_other = one["ids"] != other["ids"] or one.get("digest") != other.get("digest")
            row["other_bits"] += is_other
            row["of"] += [f"{step} {name}"] if is_other else []
            pairs = zip(one.get("logprobs", ()), other.get("logprobs", ()), strict=False)
            row["greatest"] = max([row["greatest"], *(abs(a - b) for a, b in pairs)])
    return row


def unseen(feature: Feature, log: str) -> list[str]:
    """The lines that would say that it acted, of those that the log lacks."""
    return [text for text in feature.acts if not re.search(text, log)]


def acted(feature: Feature, found: dict, log: str) -> list[str]:
    """What is missing of what would show that the feature acted."""
    missing = [f"no line {text!r} in its log" for text in unseen(feature, log)]
    missing += [f"{text!r} is in its log" for text in feature.lacks if re.search(text, log)]
    every = [answer for _, _, answers in answers_of(found, feature.steps) for answer in answers.values()]
    totals = {name: sum(answer.get(name) or 0 for answer in every) for name in feature.counts}
    missing += [f"no answer counts {name}" for name, total in totals.items() if not total]
    for name in feature.not_counted:
        told = [answer.get(name) for answer in every]
        if not told or any(count != 0 for count in told):
            missing.append(f"not every answer counts no {name}")
    return missing


def turned_off(feature: Feature, found: dict, log: str) -> str:
    may_be = feature.off and (not feature.acts or unseen(feature, log))
    said = re.search(f".*(?:{feature.off}).*", log) if may_be else None
    changed = [said[0].strip()[:300]] if said else []
    changed += [
        f"{name} is {found['resolved'].get(name)!r}, asked was {found['asked'][name]!r}"
        for name in feature.as_asked
        if name in found["asked"] and found["resolved"].get(name) != found["asked"][name]
    ]
    return "; ".join(changed)


def verdict(feature: Feature, outcome: dict | None, read) -> dict:
    """{state, detail, ...} of a feature. outcome: what run_case says of its engine; read(name) -> (what it found, or
    None; its log)."""
    if outcome is None:
        return {"state": "not run", "detail": "its engine was not asked for"}
    if outcome.get("not_run"):
        return {"state": "not run", "detail": outcome["not_run"]}
    found, log = read(feature.engine)
    done = found is not None and found.get("ended")
    reached = {step["step"] for step in found["steps"]} if found else set()
    if not done and not (feature.steps and set(feature.steps) <= reached):
        return _failed(feature, outcome, log, read)
    if off := turned_off(feature, found, log):
        return {"state": "turned off by SGLang", "detail": off}
    bad = [
        f"{step['step']}: {check['what']}"
        for step in found["steps"]
        if not feature.steps or step["step"] in feature.steps
        for check in step.get("checks", ())
        if not check["ok"]
    ]
    against = found if feature.against == feature.engine else read(feature.against)[0]
    if against is None:
        return {"state": "not run", "detail": f"there is no {feature.against} to compare with"}
    row = compare(found, against, feature.steps)
    checks = sum(len(step.get("checks", ())) for step in found["steps"])
    if feature.same == "text":
        differ, state = row["other_text"], "same text"
    else:
        differ, state = row["other_bits"], "same bits"
    row |= {"differ": differ, "checks": checks, "detail": "; ".join(bad)}
    if differ or bad:
        named = ", ".join(row["of"][:4])
        more = f"{differ} of {row['answers']} answers ({named}), greatest difference {row['greatest']:.3g}"
        return row | {"state": "differs", "detail": "; ".join(filter(None, [row["detail"], more if differ else ""]))}
    if missing := acted(feature, found, log):
        stock, stock_log = read(f"{feature.engine}_stock")
        is_stocks = stock is not None and stock.get("ended") and acted(feature, stock, stock_log) == missing
        state = "did not act in stock either" if is_stocks else "did not act"
        return row | {"state": state, "detail": "; ".join(missing)}
    if not row["answers"] and not checks:
        return row | {"state": "did not act", "detail": "nothing was compared"}
    return row | {"state": state}


def _failed(feature: Feature, outcome: dict, log: str, read) -> dict:
    said = quote(log)
    if outcome["exit"] == "stopped at the limit":
        return {"state": "not run" if outcome.get("by_stage") else "fails", "detail": f"stopped at its limit; {said}"}
    if feature.refusal and re.search(feature.refusal, log):
        refused = next(line for line in log.splitlines() if re.search(feature.refusal, line))
        return {"state": "refused", "detail": f"SGLang: {refused.strip()[:300]}"}
    stock, stock_log = read(f"{feature.engine}_stock")
    if f"{feature.engine}_stock" in ENGINES and stock_log and not (stock and stock.get("ended")):
        theirs = quote(stock_log)
        same = theirs == said  # what fails in another way may be ours all the same
        return {
            "state": "fails in stock too" if same else "fails",
            "detail": f"{'' if same else f'{said}; '}stock: {theirs}",
        }
    return {"state": "fails", "detail": said}


def reader(work: Path):
    """read(name) -> (what an engine found, or None; its log)."""

    def read(name):
        path, log = work / f"{PREFIX}{name}_features.json", work / f"{PREFIX}{name}.log"
        found = json.loads(path.read_text()) if path.exists() else None
        return found, log.read_text(errors="replace") if log.exists() else ""

    return read


def matrix(outcomes: dict, work: Path) -> list[dict]:
    """The lines of those features whose engines ran in this call."""
    read, lines = reader(work), []
    for feature in FEATURES:
        outcome = outcomes.get(PREFIX + feature.engine)
        if outcome is None:
            continue
        line = {"feature": feature.what, "engine": feature.engine, "against": feature.against, "same": feature.same}
        kept = verdict(feature, outcome, read)
        kept.pop("of", None)
        flags_of = [*ENGINES[feature.engine].options]
        lines.append(line | {"flags": " ".join(word for word in flags_of if word != "--set")} | kept)
    return lines
