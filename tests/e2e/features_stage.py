"""The stage `features` of run_stage.py: what a server's user combines, each in an engine of its own or between two
rounds of one (features_engine.py), against the same engine without it; and what is said of each.

Every engine adds in one order (`reproducible=on`), so what keeps the arithmetic must give the same bits of all
log-probabilities, whatever the batch, the chunks and the caches; an engine that speculates, or has a grammar, gives the
same text. Where a feature changes the arithmetic (other shares for the cards), its engine is compared with itself: each
prompt alone, while the other cards are idle, and all at once. A feature counts only if it acted: the arguments as
SGLang resolved them, lines of the log, counts of the answers.

Where SGLang hands weights over (adapters/handed_over.py), wo_a and the experts are its own: such engines are compared
with one that loads the same checkpoint as ever, with these two off. Their bits depend on the rows of a batch, so each
prompt is asked alone. An engine that loads what another has written waits for it.
"""

import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import accepted_stage  # noqa: E402
from callers_cards import of_callers  # noqa: E402
from features_asked import (  # noqa: E402
    BASE,
    DISK,
    ENGINES,
    EXPERTS,
    FEATURES,
    FREE,
    PREFIX,
    PRESHARDED,
    PRESHARDED_PLUGIN,
    SAVED,
    SET,
    SMALL,
    TEXT_BASE,
    WRITTEN,
    Engine,
    Feature,
    flags,
    handed_over,
    override,
)

__all__ = ("BASE", "FREE", "PRESHARDED_PLUGIN", "TEXT_BASE", "handed_over")  # of what is asked, for others
CHECKPOINT_AT = "E2E_CHECKPOINT"  # the folder, for a step that loads it once more
ERROR = re.compile(r"^(?:\[[^\]]*\] )?\s*((?:\w+\.)*\w*(?:Error|Exception): .+)$")
PLACE = re.compile(r"/[\w./-]*/(?=sglang/)")  # where SGLang happened to be installed
TRACEBACK = "Traceback (most recent call last)"
STOCK_DIFFERS = "differs in stock too"
BY_ITSELF = "differs from run to run"
FURTHER = 3.0  # times as far as SGLang's own layers are from themselves, an answer may be where these are not steady
# what became of a feature -> is it a defect of ours, or may be
STATES = {
    "same bits": False,
    "same text": False,
    "refused": False,
    "turned off by SGLang": False,
    "fails in stock too": False,  # with the same words
    STOCK_DIFFERS: False,  # SGLang alone, with and without it
    BY_ITSELF: False,  # SGLang's own layers, asked twice
    "did not act in stock either": False,  # it lacks the same
    "not run": False,
    "did not act": True,
    "differs": True,
    "fails": True,
}


# ---- for run_stage.py


def cases(make, environment):
    """make: run_stage.Case; environment: what every patched engine has."""
    found = []
    for name, engine in ENGINES.items():
        options = [*SMALL, *engine.options, *override(**engine.config), "--max-total-tokens", str(engine.tokens)]
        options += ["--new", "32", "--top", "8", *engine.phases, "--steps", *engine.steps]
        options += ["--prefill", *words(engine.prefill)] if engine.prefill else []
        is_stock = engine.is_stock or bool(engine.stock_of)
        settings = {} if is_stock else {SET: engine.settings}
        own = environment(is_stock) | settings | engine.environment
        own |= {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
        found.append(make(PREFIX + name, options, patched=not is_stock, environment=own, limit_s=engine.limit_s))
    return found


def words(arguments: dict) -> list[str]:
    return [f"{name}={json.dumps(value)}" for name, value in arguments.items()]


def engine_of(case) -> Engine | None:
    return ENGINES.get(case.name.removeprefix(PREFIX)) if case.name.startswith(PREFIX) else None


def environment(case, arguments):
    """The card that a case of one has, in turn; a folder of its own on disk."""
    engine = engine_of(case)
    if engine is None:
        return {}
    own = {DISK: str(arguments.work / f"{case.name}_disk")} if DISK in engine.environment else {}
    if engine.loads:
        own[CHECKPOINT_AT] = str(checkpoint(arguments))
    if engine.plugin:
        own["PYTHONPATH"] = os.pathsep.join(filter(None, (str(engine.plugin), os.environ.get("PYTHONPATH"))))
    if engine.cards == 1:
        singles = [name for name, other in ENGINES.items() if other.cards == 1]
        turn = singles.index(case.name.removeprefix(PREFIX)) % arguments.cards
        own["CUDA_VISIBLE_DEVICES"] = of_callers(str(turn))
    return own


def checkpoint(arguments) -> Path:
    return arguments.work / f"{PREFIX}checkpoint"


def written(engine: Engine, name: str, arguments) -> Path:
    """The folder that an engine loads from, or writes itself."""
    return arguments.work / f"{PREFIX}{engine.after or name}_{engine.loads}"


def options(case, arguments) -> list[str]:
    """Where its weights are."""
    engine = engine_of(case)
    if engine is None or not engine.loads:
        return []
    folder = written(engine, case.name.removeprefix(PREFIX), arguments)
    found = flags(model_path=str(folder if engine.loads == SAVED else checkpoint(arguments)))
    if engine.loads == PRESHARDED:
        found += flags(model_loader_extra_config=json.dumps({"presharded_path": str(folder)}))
    return list(found)


def is_whole(folder: Path) -> bool:
    return (folder / "config.json").exists() or any(folder.glob("*/READY"))


def why_not(case, arguments) -> str | None:
    """Why a case is not run here, asked when its turn comes: behind the one that writes what it loads."""
    engine = engine_of(case)
    if engine is None:
        return None
    if engine.needs and not any(importlib.util.find_spec(name) for name in engine.needs):
        return f"the harness lacks {' or '.join(engine.needs)}"
    if engine.cards > arguments.cards:
        return f"it needs {engine.cards} cards, here are {arguments.cards}"
    if engine.stock_of:
        ours, log = reader(arguments.work)(engine.stock_of)
        features = [feature for feature in FEATURES if feature.engine == engine.stock_of]
        if ours and ours.get("ended") and not any(acted(feature, ours, log) for feature in features):
            return "ours did not fail"
    if engine.after:
        if (writer := arguments.ended.get(PREFIX + engine.after)) is not None:
            writer.wait(max(0.0, arguments.deadline - time.monotonic()))
        if engine.loads in WRITTEN and not is_whole(written(engine, "", arguments)):
            return f"{engine.after} has written nothing whole to load"
    return None


def prepare(stage_cases, arguments):
    """The models' folders with a tokenizer before engines start side by side, weights where an engine loads them, and
    how many cards there are."""
    arguments.cards, arguments.ended = 1, {case.name: threading.Event() for case in stage_cases}
    speaking = [case for case in stage_cases if engine_of(case) or accepted_stage.TOKENIZER[-1] in case.options]
    if not speaking:
        return
    import torch
    from made_tokenizer import write_tokenizer

    sys.path.insert(0, str(arguments.harness))
    import run_engine as harness

    arguments.cards = max(1, torch.cuda.device_count())
    models = {}
    for variant in dict.fromkeys(variant_of(case.options) for case in speaking):
        _, models[variant] = harness.engine_args(harness.parse(["run", *SMALL, *variant]))
        write_tokenizer(Path(models[variant]), harness.vocab_of(models[variant]))
    if loading := [case for case in speaking if engine_of(case) and engine_of(case).loads]:
        write_checkpoint(Path(models[variant_of(loading[0].options)]), arguments)
    for case in stage_cases:  # what an earlier call left must not be taken for this one's
        for what in WRITTEN:
            shutil.rmtree(arguments.work / f"{case.name}_{what}", ignore_errors=True)


def variant_of(options) -> tuple[str, ...]:
    """The words by which an engine's model is chosen; the last count."""
    places = [place for place, word in enumerate(options) if word == "--variant"]
    return tuple(options[places[-1] :][:2]) if places else ()


def write_checkpoint(model: Path, arguments) -> None:
    """Whole, by the harness's make_weights.py, once for all calls: of the same names it makes the same weights."""
    folder = checkpoint(arguments)
    if (folder / "model.safetensors.index.json").exists():  # written last
        return
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_text()) | EXPERTS
    (folder / "config.json").write_text(json.dumps(config))
    subprocess.run([sys.executable, str(arguments.harness / "make_weights.py"), str(folder)], check=True)


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


def compare(found: dict, against: dict, steps: tuple, unsteady=frozenset()) -> dict:
    """All answers beside the other engine's first of what was asked alike (its own first: skipped). unsteady: (kind,
    prompt) of those that are asked for no bits; how far they are is kept apart."""
    first = {}
    for _, kind, answers in answers_of(against, ()):
        first.setdefault(kind, answers)
    row = {"answers": 0, "other_bits": 0, "other_text": 0, "greatest": 0.0, "of": [], "unsteady": 0, "furthest": 0.0}
    row["pairs"] = set()
    for step, kind, answers in answers_of(found, steps):
        reference = first.get(kind)
        if reference is None or answers is reference:
            continue
        for name, one in answers.items():
            other = reference[name]
            pairs = zip(one.get("logprobs", ()), other.get("logprobs", ()), strict=False)
            apart = [abs(a - b) for a, b in pairs]
            far = math.inf if any(map(math.isnan, apart)) else max(apart, default=0.0)
            row["answers"] += 1
            row["other_text"] += one["ids"] != other["ids"]
            if (kind, name) in unsteady:
                row["unsteady"] += 1
                row["furthest"] = max(row["furthest"], far)
                continue
            is_other = one["ids"] != other["ids"] or one.get("digest") != other.get("digest")
            row["other_bits"] += is_other
            row["of"] += [f"{step} {name}"] if is_other else []
            row["pairs"] |= {(kind, name)} if is_other else set()
            row["greatest"] = max(row["greatest"], far)
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
    steady = read(feature.steady_in)[0] if feature.steady_in else None
    if feature.steady_in and steady is None:
        return {"state": "not run", "detail": f"there is no {feature.steady_in} to say what differs from run to run"}
    by_itself = compare(steady, steady, ()) if steady else {"pairs": frozenset(), "greatest": 0.0}
    row = compare(found, against, feature.steps, by_itself["pairs"])
    row.pop("pairs")
    checks = sum(len(step.get("checks", ())) for step in found["steps"])
    if feature.same == "text":
        differ, state = row["other_text"], "same text"
    else:
        differ, state = row["other_bits"], "same bits"
    told = bad.copy()
    if row["unsteady"]:
        told.append(
            f"{row['unsteady']} of {row['answers']} answers are up to {row['furthest']:.3g} off, {feature.steady_in}, "
            f"asked twice, {by_itself['greatest']:.3g} off itself there"
        )
    is_far = not row["furthest"] <= FURTHER * by_itself["greatest"]
    if differ:
        named = ", ".join(row["of"][:4])
        told.append(f"{differ} of {row['answers']} answers ({named}), greatest difference {row['greatest']:.3g}")
    row |= {"differ": differ, "checks": checks, "detail": "; ".join(told)}
    if differ or bad or is_far:
        is_theirs = not bad and stock_differs(feature, read)
        of_itself = feature.yardstick and not bad
        return row | {"state": BY_ITSELF if of_itself else STOCK_DIFFERS if is_theirs else "differs"}
    if missing := acted(feature, found, log):
        stock, stock_log = read(f"{feature.engine}_stock")
        is_stocks = stock is not None and stock.get("ended") and acted(feature, stock, stock_log) == missing
        state = "did not act in stock either" if is_stocks else "did not act"
        return row | {"state": state, "detail": "; ".join(missing)}
    if row["unsteady"] == row["answers"] and not checks:
        return row | {"state": "did not act", "detail": "; ".join(["nothing was compared to the bit", *told])}
    return row | {"state": state}


def stock_differs(feature: Feature, read) -> bool:
    """Whether SGLang alone has other bits with it than without, too, where without it asked twice has the same."""
    if not feature.stock:
        return False
    found, against = (read(name)[0] for name in feature.stock)
    if not (found and against):
        return False
    return compare(found, against, feature.steps, compare(against, against, ())["pairs"])["other_bits"] > 0


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
        engine = ENGINES[feature.engine]
        flags_of = [word for word in engine.options if word != "--set"]
        flags_of += ["; the other process:", *words(engine.prefill)] if engine.prefill else []
        lines.append(line | {"flags": " ".join(flags_of)} | kept)
    return lines
