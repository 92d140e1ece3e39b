"""The table of models_served.py for readers: `status`, `status --model`, and `doctor` of a running server."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.plan import models
from deepseek_v4_sm120.ops.shared.limits import LIMITS
from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.models_served import OTHER_MODEL_TYPES, Verdict

TENSOR_PARALLEL = (1, 2, 4, 8)
OURS, STOCK, NOT_HERE = "ours", "SGLang's", "SGLang's here"
NEVER_RUN = {"pro": "the operators were tested in its shapes, the model was never run with us"}


def built_in(model: models.Model) -> dict:
    """What models_served.sizes reads of a config.json, of a model that `plan` knows."""
    told = {key: getattr(model, field) for field, key in models.FIELDS.items()}
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": model.expert_format}
    return {"model_type": "deepseek_v4", "qk_rope_head_dim": 64, "quantization_config": quantized, **told}


def overview() -> dict[str, dict[str, str]]:
    """operator -> {model: "ours", "SGLang's", or at which TP it is ours}, of the models that have a name here."""
    rows: dict[str, dict[str, str]] = {operator: {} for operator in LIMITS}
    named = {f"V4-{name.capitalize()}": built_in(models.BUILT_IN[name]) for name in ("flash", "pro")}
    named |= {name.removeprefix("DeepSeek-"): {"model_type": kind} for kind, (name, *_) in OTHER_MODEL_TYPES.items()}
    for name, config in named.items():
        by_tp = {tp: models_served.verdicts(config, tp) for tp in TENSOR_PARALLEL}
        for index, operator in enumerate(LIMITS):
            served = [str(tp) for tp, verdicts in by_tp.items() if verdicts[index].served]
            at = "" if len(served) == len(by_tp) else f" at TP {', '.join(served)}"
            rows[operator][name] = f"{OURS}{at}" if served else STOCK
    return rows


def of_model(text: str, tp: int) -> dict:
    """{model, note, operators: [{operator, served, why}]} of a name that `plan` takes, too, or a config.json;
    CommandError for what is none."""
    if models.named(text)[0] is not None:
        model = models.find(text, None)
        config, name = built_in(model), model.path
    else:
        config, name = models.read(text)[1], text
    heads = models_served.sizes(config).get("heads")
    if tp < 1 or (isinstance(heads, int) and heads % tp):
        raise CommandError(f"--tp must be 1 or more and divide the model's {heads} heads, got {tp}")
    other = models_served.other_model(config["model_type"])
    note = f"nothing of it is touched: {other}" if other else NEVER_RUN.get(_name_of(config), "")
    if models_served.sees_images(config):
        note = "; ".join(filter(None, (note, models_served.SEES_IMAGES)))
    return {"model": f"{name}, TP{tp}", "note": note, "operators": as_rows(models_served.verdicts(config, tp))}


def as_rows(verdicts: list[Verdict]) -> list[dict]:
    return [vars(verdict) for verdict in verdicts]


def _name_of(config: Mapping) -> str | None:
    """Which built-in model has this hidden size."""
    hidden = models_served.sizes(config).get("hidden")
    return next((name for name, model in models.BUILT_IN.items() if model.hidden == hidden), None)


def not_here(patches: list[dict]) -> dict[str, str]:
    """operator -> why none of it is in place, of the rows of `status`."""
    in_place = {row["patch"] for row in patches if row["state"] in ("READY", "APPLIED")}
    return {row["patch"]: row["reason"] for row in patches if row["patch"] in LIMITS and row["patch"] not in in_place}


def overview_text(rows: dict[str, dict[str, str]], absent: Collection[str] = ()) -> list[tuple[str, ...]]:
    """absent: operators that would serve and are not in place here."""
    names = list(next(iter(rows.values())))
    return [("operator", *names), *((op, *_cells(by_model, op in absent)) for op, by_model in rows.items())]


def _cells(by_model: dict[str, str], is_absent: bool) -> list[str]:
    return [NOT_HERE if is_absent and cell != STOCK else cell for cell in by_model.values()]


def of_model_text(found: dict, absent: Mapping[str, str] = MappingProxyType({})) -> list[tuple[str, ...]]:
    """absent: as above, with why."""
    rows = [("operator", "served by", "why")]
    for row in found["operators"]:
        why_not_here = absent.get(row["operator"]) if row["served"] else None
        is_ours = row["served"] and why_not_here is None
        rows.append((row["operator"], OURS if is_ours else STOCK, why_not_here or _why(row, found)))
    return rows


def _why(row: dict, found: dict) -> str:
    """Once for all, where it is the model's."""
    return "" if row["why"] in found["note"] else row["why"]
